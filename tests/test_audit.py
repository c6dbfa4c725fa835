"""ddpkit.audit: right trainings are the same, wrong ones are told with their factor and place."""

import contextlib
import copy
from collections import Counter, OrderedDict

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddpkit import launch
from ddpkit.audit import (
    Ledger,
    NotFinite,
    Tape,
    agree,
    budget,
    compare,
    exact,
    exact_loss,
    finite,
    same_training,
    unchanged,
)
from ddpkit.audit.causes import steps_apart, written_between
from ddpkit.audit.compare import renamed_modules
from ddpkit.audit.finite import function_too_large, product_too_large
from ddpkit.audit.ratios import apart
from ddpkit.audit.tape import Step, plain_name
from ddpkit.audit.whole import whole_tensor
from ddpkit.ddp import BucketedDDP
from ddpkit.fsdp import FSDP
from ddpkit.models import GPT, mean_loss
from ddpkit.tensor_parallel import ColumnParallelLinear, ParallelGPT
from ddpkit.zero import ZeroOptimizer

RANKS, MICRO_BATCHES = 3, 2  # unequal, so that a factor has one cause


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 32, (12, 9), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def new_model() -> GPT:
    torch.manual_seed(0)
    return GPT(vocabulary=32, context=8, width=16, heads=2, layers=2)


def serial() -> None:
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(3):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        mean_loss(model(inputs), targets).backward()
        optimizer.step()


def sharded(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def in_parallel(wrap, divided=True, after=lambda net: None, lr=1e-3):
    """Train with data parallelism. after: is called with the wrapped model, before the update."""

    def train():
        rank, world_size = dist.get_rank(), dist.get_world_size()
        net = wrap(new_model())
        optimizer = torch.optim.AdamW(net.parameters(), lr=lr)
        for step in range(3):
            inputs, targets = (part.chunk(world_size)[rank] for part in batch(step))
            optimizer.zero_grad()
            for number in range(MICRO_BATCHES):
                x, y = inputs.chunk(MICRO_BATCHES)[number], targets.chunk(MICRO_BATCHES)[number]
                loss = mean_loss(net(x), y) / (MICRO_BATCHES if divided else 1)
                if number < MICRO_BATCHES - 1 and hasattr(net, "no_sync"):
                    with net.no_sync():
                        loss.backward()
                else:
                    loss.backward()
            if hasattr(net, "synchronize"):
                net.synchronize()
            after(net)
            optimizer.step()

    return train


def with_zero() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = new_model()
    optimizer = ZeroOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    for step in range(3):
        inputs, targets = (part.chunk(world_size)[rank] for part in batch(step))
        mean_loss(model(inputs), targets).backward()
        optimizer.step()


def split() -> None:
    model = ParallelGPT(new_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(3):
        optimizer.zero_grad()
        model(*batch(step)).backward()
        optimizer.step()


RIGHT = {
    "ours": (in_parallel(BucketedDDP), RANKS),
    "PyTorch's": (in_parallel(DistributedDataParallel), RANKS),
    "FSDP2": (in_parallel(sharded), RANKS),
    "our FSDP": (in_parallel(FSDP), RANKS),
    "ZeRO": (with_zero, RANKS),
    "tensor parallel": (split, 2),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_trainings_are_the_same(name):
    train, world_size = RIGHT[name]
    report = same_training(serial, train, world_size=world_size, sgd=False)
    assert report.fine, str(report)
    assert (report.steps, report.tensors) == (3, 26)
    assert str(report).startswith("the same training: 3 steps, 26 gradients and parameters in each")


def scaled(factor, ranks=range(RANKS)):
    def after(net):
        for parameter in net.parameters():
            if parameter.grad is not None and dist.get_rank() in ranks:
                parameter.grad *= factor

    return after


def forgets(net):
    """One tensor has this rank's part only, as if a hook weren't armed."""
    net.module.blocks[1].out.bias.grad *= dist.get_rank()


class LastAveraged(nn.Module):
    """What a hook on a parameter gets is averaged: one backward's gradient (picotron_tutorial)."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        self.skips = False
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_hook(self.average)

    def forward(self, *inputs):
        return self.module(*inputs)

    @contextlib.contextmanager
    def no_sync(self):
        self.skips = True
        yield
        self.skips = False

    def average(self, gradient):
        gradient = gradient.clone()
        if not self.skips:
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
        return gradient


WRONG = {
    "micro-batches": (
        in_parallel(BucketedDDP, divided=False),
        [
            "gradient of all 25 tensors",
            "×2, on every rank",
            "2 micro-batches: their losses aren't divided",
        ],
    ),
    "a sum": (
        in_parallel(BucketedDDP, after=scaled(RANKS)),
        ["×3, on every rank", "3 ranks: summed over them where the mean is due"],
    ),
    "one rank": (
        in_parallel(BucketedDDP, after=scaled(0.5, [1])),
        ["×0.5, on rank 1 only", "what does rank 1 do alone?"],
    ),
    "nobody averages": (
        in_parallel(lambda model: model),
        ["each rank has its own; their mean: ×1", "their mean is right: nobody averages them"],
    ),
    "the last alone": (
        in_parallel(LastAveraged),
        ["each rank has its own", "the last of 2 micro-batches is averaged, the others aren't"],
    ),
    "one tensor": (
        in_parallel(BucketedDDP, after=forgets),
        ["step 0, gradient of blocks.1.out.bias: ", "each rank has its own"],
    ),
    "an update": (
        in_parallel(BucketedDDP, lr=2e-3),
        ["step 0, update of", "learning rate 0.002 on rank 0, 0.001 serially (×2)"],
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_trainings_are_told_with_factor_and_place(name):
    train, says = WRONG[name]
    report = same_training(serial, train, world_size=RANKS, sgd=False)
    assert not report.fine
    for words in says:
        assert words in str(report), str(report)


def test_sgd_shows_the_factor_that_adamw_hides():
    """A wrapper of the optimizer scales what it is given: only the update knows."""

    def train():
        torch.optim.AdamW, given = Scaled.of(torch.optim.AdamW), torch.optim.AdamW
        try:
            in_parallel(BucketedDDP)()
        finally:
            torch.optim.AdamW = given

    assert same_training(serial, train, world_size=2, sgd=False, steps=1).fine
    report = same_training(serial, train, world_size=2, steps=1)
    assert not report.fine
    assert "with SGD in the optimizer's place" in str(report)
    assert "step 0, update of tokens.weight" in str(report)
    assert ": ×4, on every rank" in str(report)


class Scaled:
    """Makes an optimizer that steps along gradients 4 times too long."""

    @staticmethod
    def of(optimizer):
        class Long(optimizer):
            def step(self, closure=None):
                for options in self.param_groups:
                    for parameter in options["params"]:
                        if parameter.grad is not None:
                            parameter.grad = parameter.grad * 4
                return super().step(closure)

        return Long


def integers(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randint(-2, 3, (12, 5), generator=generator).double()
    return inputs, torch.randint(-2, 3, (12, 3), generator=generator).double()


def exact_twin() -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Dropout(0.5), nn.Linear(7, 3))
    assert exact(model) == []
    return model


def exactly(parallel: bool, wrong: bool = False):
    def train():
        rank = dist.get_rank() if parallel else 0
        world_size = dist.get_world_size() if parallel else 1
        net = BucketedDDP(exact_twin()) if parallel else exact_twin()
        optimizer = torch.optim.SGD(net.parameters(), lr=2**-6)
        for step in range(3):
            inputs, targets = (part.chunk(world_size)[rank] for part in integers(step))
            optimizer.zero_grad()
            exact_loss(net(inputs), targets).backward()
            if parallel:
                net.synchronize()
                if wrong:
                    net.module[0].bias.grad[0] += 2**-40
            optimizer.step()

    return train


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_exact_twin_is_equal_to_the_bit_and_shows_the_smallest_difference(world_size):
    options = {"world_size": world_size, "sgd": False, "to_the_bit": True, "steps": 2}
    report = same_training(exactly(False), exactly(True), **options)
    assert report.fine, str(report)
    assert "equal to the last bit" in str(report)
    report = same_training(exactly(False), exactly(True, wrong=True), **options)
    assert "step 0, gradient of 0.bias: ×1 but for" in str(report)


def test_what_cannot_be_exact_is_said():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU(), nn.Softmax(-1))
    assert exact(model) == ["1", "3"]
    assert isinstance(model[2], nn.ReLU)
    smooth = nn.GELU()
    twice = nn.Sequential(nn.Linear(4, 4), smooth, nn.Linear(4, 4), smooth)
    assert exact(twice) == []
    assert [type(part) for part in twice] == [nn.Linear, nn.ReLU] * 2
    assert exact(smooth) == [""]  # nothing holds it, so nothing can be put in its place
    assert {value for p in model.parameters() for value in p.unique().tolist()} <= {-1.0, 0.0, 1.0}


def tape_of(begin=1.0, gradient=2.0, parameter=3.0, name="w") -> Tape:
    tape = Tape(1)
    whole = torch.full((4,), 1.0, dtype=torch.float64)
    tape.begin = {name: whole * begin}
    value = None if gradient is None else whole * gradient
    tape.steps = [Step([1.0], {name: value}, {name: whole * parameter})]
    return tape


def test_tapes_are_compared_by_name_from_the_start_on():
    assert compare(tape_of(), [tape_of(), tape_of()]).fine
    told = str(compare(tape_of(), [tape_of(), tape_of(begin=5.0)]))
    assert "at the start, parameter of w: ×5, on rank 1 only" in told
    assert "don't begin alike" in told
    told = str(compare(tape_of(), [tape_of(gradient=None)] * 2))
    assert "gradient of w: ×0, on every rank" in told
    assert "no gradient arrived" in told
    with pytest.raises(ValueError, match=r"got 'v' on rank 0, 'w' in the serial run: use rename"):
        compare(tape_of(), [tape_of(name="v")])
    assert compare(tape_of(), [tape_of(name="v")], rename={"v": "w"}).fine
    assert "no optimizer stepped" in str(compare(Tape(1), [Tape(1)]))
    assert not compare(Tape(1), [Tape(1)]).fine


def test_under_other_names_a_report_says_the_same():
    def run(outer: str, factors=(1, 1), bias: int = 1, writes: bool = False) -> Tape:
        linear = nn.Linear(2, 2)
        nn.init.ones_(linear.weight)
        nn.init.ones_(linear.bias)
        linear.forward = lambda x: F.linear(x, linear.weight, bias * linear.bias)
        model = nn.Sequential(OrderedDict({outer: nn.Sequential(linear)}))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Tape(2) as tape:
            for step in range(2):
                if step and writes:
                    nn.init.zeros_(linear.weight)
                optimizer.zero_grad()
                for factor, x in zip(factors, torch.tensor([[1.0, 2.0], [3.0, step]]), strict=True):
                    (factor * model(x).square().mean()).backward()
                optimizer.step()
        return tape

    rename = {f"layers.{name}": f"blocks.{name}" for name in ("0.weight", "0.bias")}
    for wrong, said in (
        ([{"bias": 2}] * 2, "that of blocks.0 (Linear): its bias is in it 2 times"),
        ([{"factors": (2, 1)}], "×2 for micro-batch 0; ×1 for micro-batch 1"),
        ([{}, {"writes": True}], "rank 1 changed blocks.0.weight: what writes there"),
    ):
        serial = run("blocks")
        told = str(compare(serial, [run("layers", **of) for of in wrong], rename))
        assert told == str(compare(serial, [run("blocks", **of) for of in wrong]))
        assert said in told


def test_a_module_is_renamed_if_all_its_parameters_are_alike():
    def renamed(rename, *modules):
        tape = Tape(1)
        tape.begin = dict.fromkeys(f"{m}.weight" for m in modules if "." in m or m not in parents)
        tape.outputs = dict.fromkeys((*modules, "relu"))
        return renamed_modules(tape, rename)

    parents = {"", "a"}
    alike = {"a.0.weight": "b.0.weight", "a.1.weight": "b.1.weight"}
    assert renamed(alike, "a.0", "a.1", "a", "") == {"a.0": "b.0", "a.1": "b.1", "a": "b", "": ""}
    apart = {"a.0.weight": "b.0.weight", "a.1.weight": "c.weight"}
    assert renamed(apart, "a.0", "a.1", "a", "") == {"a.0": "b.0", "a.1": "c", "": ""}
    assert renamed({"head.weight": "tokens.weight"}, "tokens", "head", "") == {"": ""}  # tied there
    wrapped = {"a.0.weight": "0.weight"}
    assert renamed(wrapped, "a.0", "a", "") == {"a.0": "0", "a": ""}
    swapped = {"c.weight": "d.weight", "d.weight": "c.weight"}
    assert renamed(swapped, "c", "d") == {"c": "d", "d": "c"}


def with_gradient(gradient: torch.Tensor, **more) -> Tape:
    tape = tape_of()
    tape.begin = {"w": torch.ones_like(gradient)}
    tape.steps = [Step([1.0], {"w": gradient}, {"w": tape.begin["w"] - gradient}, **more)]
    return tape


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def changed(x: torch.Tensor, where, by) -> torch.Tensor:
    x = x.clone()
    x[where] = by(x[where])
    return x


PARTS = {
    "one row": (changed(random(5, 3), 4, lambda row: 2 * row), "row 4 of 5: ×2"),
    "rows": (changed(random(9, 3), slice(1, 4), lambda row: 0 * row), "rows 1 to 3 of 9: ×0"),
    "many rows": (
        changed(random(12, 3), slice(None, None, 2), lambda row: row.flip(1)),
        "rows 0, 2, 4, 6 and 2 more of 12: no one factor",
    ),
    "columns": (
        changed(random(3, 5), (slice(None), [1, 3]), lambda x: -x),
        "columns 1, 3 of 5: ×-1",
    ),
    "numbers": (changed(random(6), 5, lambda x: x / 2), "row 5 of 6: ×0.5"),
}


@pytest.mark.parametrize("name", PARTS)
def test_rows_or_columns_that_differ_are_named_where_others_agree(name):
    wrong, told = PARTS[name]
    report = compare(with_gradient(random(*wrong.shape)), [with_gradient(wrong)] * 2)
    assert f"step 0, gradient of w: {told}, on every rank" in str(report)


def test_rows_without_a_gradient_are_named_where_no_row_agrees():
    wrong = changed(random(6, 2).flip(1), [0, 5], lambda row: 0 * row)
    told = str(compare(with_gradient(random(6, 2)), [with_gradient(wrong)] * 2))
    assert "rows 0, 5 of 6: ×0, no one factor for the others" in told


def test_an_update_that_cancels_its_parameter_may_be_off_by_what_the_parameter_was():
    """Found by the museum's command: a weight that an update makes 100 times shorter."""
    right, other = with_gradient(random(8)), with_gradient(random(8))
    for tape, off in ((right, 0.0), (other, 1e-16)):
        tape.begin = {"w": random(8)}
        tape.steps[0].parameters = {"w": random(8) * 1e-3 + off}
    assert compare(right, [other, other]).fine
    other.steps[0].parameters["w"] += 1e-12
    assert not compare(right, [other, other]).fine
    exactly = compare(right, [with_gradient(random(8))] * 2, to_the_bit=True)
    assert not exactly.fine


@pytest.mark.parametrize("call", ["a list", "by name", "in a dict"])
def test_samples_count_for_the_tolerance_however_they_are_given(call):
    class Listening(nn.Linear):
        def forward(self, x):
            x = x["x"] if isinstance(x, dict) else x[0] if isinstance(x, list) else x
            return super().forward(x)

    net = Listening(3, 2)
    x = torch.ones(50, 3)
    with Tape(1) as tape:
        if call == "by name":
            net(x=x).sum().backward()
        else:
            net([x] if call == "a list" else {"x": x}).sum().backward()
    assert tape.longest == x.numel()
    assert [len(some) for some in tape.inputs] == [75]  # every second of 150


def test_rows_that_agree_by_chance_are_not_named():
    right = random(40).float()
    by_chance = changed(right, slice(1, None), lambda x: x + 1)  # one of 40
    told = str(compare(with_gradient(right), [with_gradient(by_chance)] * 2))
    assert "gradient of w: no one factor (length" in told
    short = changed(random(4, 3).float(), [1, 2], lambda x: 1e-9 * x)
    wrong = changed(short, [0, 3], lambda x: x.roll(1, 1))  # rows 1 and 2 are too short to tell
    told = str(compare(with_gradient(short), [with_gradient(wrong)] * 2))
    assert "gradient of w: no one factor (length" in told


def test_without_a_factor_length_and_angle_are_told():
    right = torch.tensor([1.0, 0.0, 0.0])
    turned = torch.tensor([1.0, 1.0, 0.0])
    assert apart([(turned, right)]) == " (length ×1.414, turned by 45°)"
    assert apart([(-3 * right, right)]) == " (length ×3, turned by 180°)"
    both = [(3 * right, right), (turned, right)]  # one vector: (3, 0, 0, 1, 1, 0)
    assert apart(both) == " (length ×2.345, turned by 31.5°)"  # √(11/2); cos = 4/√22
    nothing = [(x, right) for x in (None, right[:2], 0 * right, right * torch.nan, 1e200 * right)]
    nothing[-1][0][1] = torch.inf
    assert [apart([pair]) for pair in nothing] == [""] * 5

    ours, theirs = with_gradient(torch.ones(2)), with_gradient(torch.tensor([2.0, 3.0]))
    for tape, other in (ours, torch.ones(2)), (theirs, torch.tensor([5.0, 2.0])):
        tape.begin["v"] = tape.steps[0].parameters["v"] = torch.ones(2)
        tape.steps[0].gradients["v"] = other
    told = str(compare(ours, [theirs] * 2))
    assert "all 2 tensors: no one factor (length ×3.24, turned by 22.2°)" in told  # √42 / 2


def test_ranks_that_do_not_step_together_are_told():
    def after(*backwards):
        return [Step([1.0] * count) for count in backwards]

    told = steps_apart(after(1, 2, 1))
    assert "numbers of backwards (1 on rank 0, 2; 2 on rank 1): each decides for itself" in told
    assert steps_apart(after(2, 2)) == ""
    assert steps_apart(after(0, 2)) == ""  # a pipeline's first stage has no loss
    serial = with_gradient(random(4))
    tapes = [with_gradient(2 * random(4)), with_gradient(2 * random(4))]
    tapes[1].steps[0].losses = [1.0, 1.0]
    told = str(compare(serial, tapes))
    assert "(1 on rank 0; 2 on rank 1): each decides" in told
    assert "×2: 2 ranks: summed over them" in told  # and what the factor says
    tapes = [with_gradient(random(4)), with_gradient(random(4))]
    tapes[1].steps[0].losses = [1.0, 1.0]
    assert compare(serial, tapes).fine


def test_what_is_written_between_two_updates_is_named():
    def run(writes):
        model = nn.Linear(2, 2)
        nn.init.ones_(model.weight)
        nn.init.zeros_(model.bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Tape(2) as tape:
            for step in range(2):
                if step and writes:
                    with torch.no_grad():
                        getattr(model, writes)[1] = 3.0
                optimizer.zero_grad()
                model(torch.ones(3, 2)).square().sum().backward()
                optimizer.step()
        return tape

    right, wrong = run(None), run("weight")
    assert [step.written for step in wrong.steps] == [[], ["weight"]]
    between = "between the updates of steps 0 and 1, "
    told = str(compare(right, [right, wrong]))
    assert f"{between}rank 1 changed weight: what writes there" in told
    assert f"{between}rank 0, rank 1 changed weight:" in str(compare(right, [wrong, wrong]))
    assert f"{between}the serial run changed weight:" in str(compare(wrong, [right, right]))
    told = str(compare(run("bias"), [wrong] * 2))
    assert "rank 0, rank 1 changed weight" in told
    assert "the serial run changed bias" in told
    assert f"{between}rank 0, the serial run changed weight:" in str(compare(wrong, [wrong, right]))
    assert compare(wrong, [wrong, wrong]).fine
    blind = Step()  # a pipeline's other stage; FSDP's shards
    assert written_between(1, wrong.steps[1], [wrong.steps[1], blind]) == []
    assert written_between(1, wrong.steps[1], [blind, blind]) == []


def test_who_skips_has_later_samples_and_that_is_no_reason_to_be_undecided():
    def of(backwards, samples):
        tape = with_gradient(random(4))
        again = Step([1.0] * backwards, {"w": backwards * random(4)}, tape.steps[0].parameters)
        again.samples = Counter({((1,), name): 1 for name in samples})
        tape.steps.append(again)
        return tape

    report = compare(of(1, "ab"), [of(1, "a"), of(2, "bd")])
    assert not report.undecided
    assert "(1 on rank 0; 2 on rank 1): each decides" in str(report)
    assert "samples" not in str(report)
    always = [of(1, "a"), of(2, "bd")]  # also in the step before, in which they agreed
    always[1].steps[0].losses = [1.0, 1.0]
    report = compare(of(1, "ab"), always)
    assert report.undecided
    assert "each decides" not in str(report)
    assert "samples together" in str(report)


def test_what_overflows_is_told():
    def told(x, *parameters, of=torch.float32):
        x, *parameters = (torch.tensor(numbers, dtype=of) for numbers in (x, *parameters))
        return product_too_large(x, parameters) if parameters else function_too_large(x)

    assert told([-1.0, 88.8]) == ": in torch.float32 exponentials are inf from 88.7 on"
    assert told([-1e5, 88.7]) == told([]) == ""
    assert told([-1e20]) == ": in torch.float32 squares are inf from 1.84e+19 on"
    assert told([12.0], of=torch.half) == ": in torch.float16 exponentials are inf from 11.1 on"
    assert told([-257.0], of=torch.half) == ": in torch.float16 squares are inf from 256 on"
    assert told([88.8], of=torch.double) == ""
    assert told([88.8], [2.0], [3.0]) == ""  # a layer multiplies
    layer = ", its parameters at most 200: torch.float16 ends at 6.55e+04"
    assert told([200.0, 1.0], [-200.0, 2.0], [1.0], of=torch.half) == layer
    assert told([1.0], [2.0, float("nan")]) == ", its parameters aren't"


def test_nothing_is_said_of_exponentials_where_a_gradient_is_large():
    told = r"the gradient that a module \(Root\) .*, at most 1e\+05$"  # as with a loss's scale
    with pytest.raises(NotFinite, match=told), finite():
        (1e5 * Root()(torch.zeros(1, requires_grad=True))).sum().backward()


def test_parameters_that_are_not_finite_are_told():
    layer = nn.Linear(2, 2)
    nn.init.constant_(layer.bias, torch.nan)
    told = "has NaN; its inputs are finite, at most 1, its parameters aren't"
    with pytest.raises(NotFinite, match=told), finite(layer):
        layer(torch.ones(1, 2))


def test_nan_is_named_and_whose_it_is():
    nan = changed(random(4, 3), 2, lambda row: row * torch.nan)
    told = str(compare(with_gradient(random(4, 3)), [with_gradient(nan)] * 2))
    assert "gradient of w: 3 of 12 numbers are NaN or inf, on every rank" in told
    told = str(compare(with_gradient(nan), [with_gradient(random(4, 3))] * 2))
    assert "3 of 12 numbers are NaN or inf in the serial run, on every rank" in told


def test_a_long_report_is_cut():
    def of(factors):
        tape = with_gradient(random(4))
        tape.begin = {f"w{n}": random(4) * factor for n, factor in enumerate(factors, 1)}
        return tape

    told = str(compare(of([1.0] * 12), [of(range(2, 14))] * 2)).splitlines()
    assert "parameter of w8: ×9, on every rank" in told[8]
    assert told[9] == "  and 4 more tensors, which differ in other ways"
    assert "don't begin alike" in told[10]


def test_rows_that_no_token_uses_tell_nothing():
    unused = changed(random(6, 2), [2, 3, 4], lambda row: 0 * row)
    wrong = changed(unused, [0, 1, 5], lambda row: row.flip(1))
    for to_the_bit in (False, True):
        tapes = with_gradient(unused), [with_gradient(wrong)] * 2
        told = str(compare(*tapes, to_the_bit=to_the_bit))
        assert "gradient of w: no one factor (length" in told


def test_a_short_update_is_judged_by_its_own_length():
    right, wrong = with_gradient(random(8).float()), with_gradient(random(8).float())
    right.steps[0].parameters = {"w": right.begin["w"] - 1e-5 * random(8).float()}
    wrong.steps[0].parameters = {"w": right.begin["w"] - 3e-5 * random(8).float()}
    assert "step 0, update of w: ×3, on every rank" in str(compare(right, [wrong, wrong]))


def test_of_an_update_the_factor_is_told_however_short_it_is():
    """Parameters differ by 1 in 10⁶, updates by a factor of 3."""
    right, wrong = with_gradient(random(8)), with_gradient(random(8))
    right.steps[0].parameters = {"w": right.begin["w"] - 1e-6 * random(8)}
    wrong.steps[0].parameters = {"w": right.begin["w"] - 3e-6 * random(8)}
    told = str(compare(right, [wrong, wrong]))
    assert "step 0, update of w: ×3, on every rank" in told
    assert "gradients agree: look at the update" in told
    wrong.steps[0].parameters = right.begin
    told = str(compare(right, [wrong, wrong]))
    assert "step 0, update of w: ×0, on every rank" in told
    assert "nothing moves: the optimizer holds other tensors" in told
    assert "update of w: ×0, on rank 1 only" in str(compare(right, [right, wrong]))
    for tape in (right, wrong):  # the same once more, after a step in which they agree
        tape.steps.insert(0, Step([1.0], tape.steps[0].gradients, tape.begin))
    wrong.steps[1].parameters = {"w": right.begin["w"] - 3e-6 * random(8)}
    told = str(compare(right, [wrong, wrong]))
    assert "step 1, update of w: ×3" in told
    assert "so did the update before: look at what the optimizer keeps" in told


@pytest.mark.parametrize(
    ("factor", "told"),
    [
        (2.0**-16, "2^-16: a loss's scale, put in or taken out only"),
        (2.0**12, "2^12: a loss's scale"),
        (0.7, "one for all tensors: a norm (clipping), or a loss's scale"),
        (3.0, "3 ranks: summed over them where the mean is due"),
    ],
)
def test_a_factor_suggests_its_cause(factor, told):
    def of(times):
        tape = with_gradient(times * random(4))
        tape.begin["v"] = tape.begin["w"]
        tape.steps[0].gradients["v"] = times * random(4).flip(0)
        tape.steps[0].parameters["v"] = tape.begin["v"]
        return tape

    assert told in str(compare(of(1.0), [of(factor)] * 3))


def test_ranks_with_a_scale_of_their_own_are_told():
    def of(rank, times):
        tape = with_gradient(times * random(4))
        tape.rank = rank
        for name in ("v", f"part{rank}"):
            tape.begin[name] = tape.begin["w"]
            tape.steps[0].gradients[name] = times * random(4).flip(0)
            tape.steps[0].parameters[name] = tape.begin[name]
        return tape

    alone = of(0, 1.0)
    for whole in (alone.begin, alone.steps[0].gradients, alone.steps[0].parameters):
        whole["part1"] = whole["part0"]
    told = str(compare(alone, [of(0, 0.5), of(1, 0.25)]))
    assert "factor of its own (a norm, a scale): ×0.5 on rank 0; ×0.25 on rank 1" in told
    assert "of its own" not in str(compare(alone, [of(0, 0.5), of(1, 1.0)]))


class Shifted(nn.Module):
    """Adds something to what its layer returns, where more than one rank is at work."""

    def __init__(self, added):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.added = added if dist.get_world_size() > 1 else lambda out, bias: 0

    def forward(self, x):
        out = self.layer(x)
        return out + self.added(out, self.layer.bias)


@pytest.mark.parametrize(
    ("added", "told"),
    [
        (
            lambda out, bias: 0.5 * out.detach(),
            "that of 0 (Shifted): the output of 0.layer is in it 1.5",
        ),
        (
            lambda out, bias: out.detach().square(),
            "the first output that differs is that of 0 (Shifted)\n",
        ),
        (lambda out, bias: 0 * bias, ""),
    ],
)
def test_the_first_output_that_differs_is_named(added, told):
    def train():
        torch.manual_seed(0)
        net = nn.Sequential(Shifted(added), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net(random(8, 4).float()).square().sum().backward()
        optimizer.step()

    report = same_training(train, train, world_size=2, steps=1)
    assert report.fine == (not told)
    assert told in f"{report}\n"


def test_the_first_call_of_the_first_batch_is_on_the_tape_and_no_batch_is_kept():
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(2, 4)
    first = layer(x).detach().double().flatten()
    with Tape(2) as tape:
        for _ in range(2):
            model(x).sum().backward()
            optimizer.step()
            assert tape.arriving == []
    assert torch.equal(tape.outputs["0"].some, first)
    assert list(tape.outputs) == ["0", ""]  # as they return


def test_names_are_the_serial_models():
    assert plain_name("module.blocks.0._orig_mod.out.weight") == "blocks.0.out.weight"
    assert plain_name("encoder.module.weight") == "encoder.module.weight"
    assert plain_name("_orig_mod.module.blocks.0.weight") == "blocks.0.weight"


def test_a_forward_that_is_called_past_the_hooks():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Tape(1, given={"1.weight": torch.eye(2)}) as tape:
        model.forward(torch.ones(3, 2)).sum().backward()
        optimizer.step()
    assert list(tape.begin) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert torch.equal(tape.begin["1.weight"], torch.eye(2))


def test_bfloat16_hides_no_factor():
    def tape(gradient):
        of = tape_of(gradient=gradient)
        of.begin = {"w": of.begin["w"].bfloat16()}
        of.longest, of.depth = 1000, 10
        return of

    assert str(compare(tape(2.0), [tape(2.02)] * 2)).endswith("(float32 would show more)")
    of_one = [tape(6.0), tape(6.0)]
    of_one[1].steps[0].gradients["w"][0] *= 1.02
    assert "gradient of w: ×3, on every rank" in str(compare(tape(2.0), of_one))


def test_parts_that_cannot_be_put_together_are_said():
    half = tape_of()
    half.begin = {"w": half.begin["w"][:2]}
    report = compare(tape_of(), [half, half])
    assert report.undecided
    assert "w is (2,) on rank 0, (4,) serially: a part of a kind" in str(report)


def test_stages_that_differ_alike_are_one_line():
    serial, stages = tape_of(), [tape_of(gradient=6.0), tape_of(gradient=6.0, name="v")]
    for tape in stages:
        serial.begin |= tape.begin
        serial.steps[0].gradients |= dict.fromkeys(tape.begin, serial.steps[0].gradients["w"])
    assert "gradient of all 2 tensors: ×3, on every rank" in str(compare(serial, stages))


def fails_after(train):
    train()
    raise ZeroDivisionError


def test_a_tape_leaves_nothing_behind():
    before = torch.autograd.backward
    tape = Tape(2)
    with pytest.raises(ZeroDivisionError), tape:
        fails_after(serial)
    assert torch.autograd.backward is before
    assert [len(step.gradients) for step in tape.steps] == [26, 26]
    model = new_model()
    model(batch(0)[0]).sum().backward()
    assert len(tape.steps) == 2


@on_ranks(2)
def test_parameters_that_are_given_also_go_into_shards(check, rank):
    model = sharded(new_model())
    wanted = {name: torch.full(p.shape, 0.5) for name, p in model.named_parameters()}
    with Tape(1, given=wanted):
        model(batch(0)[0]).sum().backward()
    found = {name: p.full_tensor() for name, p in model.named_parameters()}
    check.same([name for name in wanted if not torch.equal(found[name], wanted[name])], [])


@on_ranks(4)
def test_a_split_layer_inside_fsdp_is_put_together_twice(check, rank):
    rows = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    columns = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    torch.manual_seed(0)
    layer = nn.Linear(3, 7)  # each hand of 4 or 3, and each shard of it, is uneven
    split = ColumnParallelLinear(layer, rows[rank // 2])
    model = FSDP(nn.Sequential(split), group=columns[rank % 2])
    for (path, mine), whole in zip(model.named_parameters(), layer.parameters(), strict=True):
        check.same(whole_tensor(model, path, mine.detach()), whole, path)


# Agreement, numbers, samples, calls


@on_ranks(3)
def test_agreement_names_tensor_and_rank(check, rank):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 2)).sum().backward()
    optimizer.step()
    check.same(agree(model, optimizer), [])
    with torch.no_grad():
        if rank == 2:
            model[0].weight[0, 0] += 1e-7
        model[1].running_mean += rank
        if rank == 1:
            optimizer.param_groups[0]["lr"] = 0.5
            optimizer.state[model[0].bias]["exp_avg"] += 1
    found = agree(model, optimizer)
    expected = [
        "parameter 0.weight: rank 2 differs",
        "buffer 1.running_mean: no two ranks are alike",
        "lr of parameter group 0: rank 1 differs",
        "exp_avg of 0.bias: rank 1 differs",
    ]
    check.same(found, expected)
    check.same(agree({"norm": torch.tensor(rank // 2), "scale": 2.0}), ["norm: rank 2 differs"])
    large = torch.zeros(10_000)
    large[5_000] = rank // 2
    check.same(agree({"state": {"x": [large]}}), ["state.x.0: rank 2 differs"])
    optimizer.state[model[1].bias]["old_dirs"] = [large]  # as LBFGS keeps them
    check.same(agree(model, optimizer)[-1], "old_dirs of 1.bias.0: rank 2 differs")
    alone = dist.new_group([1, 2])
    if rank:
        check.same(agree(model, group=alone)[0], "parameter 0.weight: the two ranks differ")


class Root(nn.Module):
    def forward(self, x):
        return x.sqrt()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch.compile looks at it
def test_the_first_nan_is_named():
    model = nn.Sequential(nn.Linear(2, 2), Root(), nn.Linear(2, 1))
    with torch.no_grad():
        model[0].weight.fill_(-1.0)
        model[0].bias.zero_()
    told = (
        r"rank 0: the output of module 1 \(Root\), call 1 has NaN; its inputs are finite, at most 2"
    )
    for called in (model, torch.compile(model, backend="eager")):
        with pytest.raises(NotFinite, match=told), finite(model):
            called(torch.ones(1, 2))
    with pytest.raises(NotFinite, match=told):
        torch.compile(lambda x: finite(model)(model)(x), backend="eager")(torch.ones(1, 2))
    with pytest.raises(NotFinite, match=r"output of a module \(Root\), call 1 has NaN"), finite():
        model(torch.ones(1, 2))
    assert model(torch.ones(1, 2)).isnan().all()  # nothing listens any more
    with torch.no_grad():
        model[0].weight.zero_()
    with (
        finite(model[0]),
        finite(model[2]),
        finite(nn.Sequential()),
    ):  # no warning of torch's either
        model(torch.ones(1, 2)).sum().backward()
    for watched in (finite(model), finite()):
        with pytest.raises(NotFinite, match=r"the gradient that .*Root"), watched:
            model(torch.ones(1, 2)).sum().backward()


@pytest.mark.parametrize("whole", [True, False])
def test_what_is_changed_in_place_is_checked_and_stays_what_it_is(whole):
    torch.manual_seed(0)
    model = nn.Sequential(Root(), nn.Linear(2, 3), nn.ReLU(inplace=True), nn.Linear(3, 1))
    x = torch.ones(4, 2, requires_grad=True)
    due = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
    with finite(model if whole else None):
        found = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
    assert all(map(torch.equal, found, due))
    finite_came = r"Root\) hands back has inf; the one that came to it is finite, at most"
    with pytest.raises(NotFinite, match=finite_came), finite(model if whole else None):
        model(torch.zeros(4, 2, requires_grad=True)).sum().backward()


def test_a_gradient_is_of_the_module_that_hands_it_back():
    innocent, x = nn.Identity(), torch.zeros(2, requires_grad=True)
    with finite(innocent):
        (innocent(x) + x.sqrt()).sum().backward()
    came = r"\(Identity\) hands back has inf, and the one that came to it is not finite either"
    with pytest.raises(NotFinite, match=came), finite(innocent):
        innocent(x).sqrt().sum().backward()


@on_ranks(3)
def test_the_ledger_counts_each_sample_of_all_ranks(check, rank):
    samples = torch.arange(12.0)
    right = Ledger([samples[rank::3][:2], samples[rank::3][2:]])
    list(right)
    check.same(right.audit(12), [])
    list(right)
    check.same(right.audit(12), ["epoch 1 has the order of epoch 0: who calls set_epoch?"])
    right.loader = right.loader[::-1]
    list(right)
    check.same(right.audit(12), [])
    list(right)
    check.same(right.audit(12), ["epoch 3 has the order of epoch 2: who calls set_epoch?"])
    everywhere = Ledger([samples])
    list(everywhere)
    expected = ["12 of 12 samples were used 3 times"]
    expected += ["all ranks had the same samples: no sampler deals them out"]
    check.same(everywhere.audit(12), expected)
    padded = Ledger([samples[: 4 + (rank == 0)], samples[4 * rank + 1 : 4 * rank + 2]])
    list(padded)
    check.unless(any("used by no rank" in each for each in padded.audit(12)), "a sample is missing")


def test_a_ledger_goes_on_after_a_resume():
    samples = torch.arange(6)
    first = Ledger([samples[:3]], key=torch.Tensor.tolist)
    list(first)
    second = Ledger([samples[3:]], key=torch.Tensor.tolist, entries=first.entries)
    list(second)
    assert second.audit(6) == []


def test_the_budget_counts_calls_by_rank():
    def step(more):
        for _ in range(2 + more):
            dist.all_reduce(torch.ones(3))

    run = launch(step, 0, world_size=2)
    assert budget(run, {"all_reduce": 2}) == []
    more = launch(step, 3, world_size=2)
    assert budget(more, {"all_reduce": 2}) == [f"rank {r}: 5 all_reduce, 2 due" for r in (0, 1)]
    assert (
        budget(run, {"all_reduce": 1, "broadcast": 1}, steps=2)[0] == "rank 0: 0 broadcast, 2 due"
    )
    assert unchanged(run, launch(step, 0, world_size=2))
    assert not unchanged(run, more)


def test_a_parameter_that_no_rank_has_is_told():
    alone = tape_of()
    alone.begin["head"] = alone.begin["w"]
    told = str(compare(alone, [tape_of(), tape_of()]))
    assert "at the start, parameter of head: ×0, on every rank" in told
    assert "no rank has head: what is left out there?" in told
    assert "begin alike" not in told


def test_a_parameter_with_another_name_is_told_and_a_rename_must_fit():
    alone, others = tape_of(name="w"), tape_of(name="w")
    alone.begin["head"] = others.begin["lm_head"] = alone.begin["w"]
    report = compare(alone, [others, others])
    assert report.undecided
    assert "no rank has head, the serial run no lm_head: if these are the same, " in str(report)
    assert "--rename lm_head=head" in str(report)
    assert compare(alone, [others, others], {"lm_head": "head"}).fine
    for new, old in ("head", "lm_head"), ("lm_head", "hat"):
        with pytest.raises(ValueError, match=f"has to one of the serial run, got {new}={old}"):
            compare(alone, [others, others], {new: old})


def test_an_update_more_or_less_is_told():
    longer = tape_of()
    longer.steps.append(longer.steps[0])
    report = compare(tape_of(), [tape_of(), longer])
    assert not report.fine
    assert "rank 1 made 2 updates, the serial run 1" in str(report)


def test_a_rate_that_differs_is_told():
    serial = tape_of()
    serial.steps[0].rates = [0.25]
    others = [tape_of(parameter=4.0), tape_of(parameter=4.0)]
    for tape in others:
        tape.steps[0].rates = [0.5]
    report = compare(serial, others)
    assert report.causes[0] == "learning rate 0.5 on rank 0, 0.25 serially (×2)"
    others[0].steps[0].rates = [0.25]
    assert [cause[-30:] for cause in compare(serial, others).causes] == [
        "5 on rank 1, 0.25 serially (×2)"[-30:]
    ]


def test_a_rate_that_differs_is_told_however_little_the_parameters_differ():
    def of(rate, moved=None):
        tape = with_gradient(random(8))
        tape.epsilon = 1e-3
        tape.steps[0].rates = [rate]
        moved = rate if moved is None else moved
        tape.steps[0].parameters = {"w": tape.begin["w"] - moved * random(8)}
        return tape

    told = str(compare(of(1e-5), [of(2e-5)] * 2))
    assert "step 0, update of w: ×2, on every rank" in told
    assert "learning rate 2e-05 on rank 1, 1e-05 serially (×2)" in told
    assert "update of w: ×0, on every rank" in str(compare(of(1e-5), [of(0.0)] * 2))
    told = str(compare(of(1e-5), [of(1e-5), of(1.1e-5)]))
    assert "learning rate of an optimizer: not the serial one, on rank 1 only" in told
    assert compare(of(1e-5), [of(0.5, moved=1e-5)] * 2).fine  # something else moves them
    several = of(1e-5)
    several.steps[0].rates = [1e-5, 1e-3]
    assert compare(several, [of(1e-5), of(1e-3, moved=1e-5)]).fine  # a pipeline's stages
    told = str(compare(several, [of(4e-5)] * 2))
    assert "learning rate 4e-05 on rank 0, 1e-05 or 0.001 serially" in told


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_rates_of_all_optimizers_are_on_the_tape(order):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizers = [torch.optim.SGD(model[n].parameters(), lr=n + 1.0) for n in order]
    with Tape(1) as tape:
        model(torch.ones(1, 2)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    assert tape.steps[0].rates == [1.0, 2.0]


def test_ranks_that_agree_in_groups_are_told():
    one, other = with_gradient(random(4)), with_gradient(random(4).flip(0))
    mean = with_gradient((random(4) + random(4).flip(0)) / 2)
    told = str(compare(mean, [one, other, other, one]))
    assert "their mean: ×1" in told
    assert "gradients are equal within groups (rank 0, 3; rank 1, 2) and not among them" in told
    assert "each rank kept its own gradient" in str(compare(mean, [one, other]))
    told = str(compare(one, [with_gradient(2 * random(4))] * 4))
    assert "×2: 4 ranks: their sum is divided by 2, a group's size" in told
    assert "×2: counted twice" in told
    told = str(compare(one, [with_gradient(random(4) / 3)] * 6))
    assert "6 ranks: their mean is divided by 3, a group's size" in told


def test_where_the_serial_run_has_no_gradient_that_is_said():
    told = str(compare(tape_of(gradient=None), [tape_of()] * 2))
    assert "gradient of w: nothing in the serial run, on every rank" in told
    assert "frozen, or unused, in it alone?" in told
    told = str(compare(tape_of(gradient=None, parameter=1.0), [tape_of(gradient=0.0)] * 2))
    assert "step 0, update of w: nothing in the serial run, on every rank" in told
    assert "w: no gradient (None) in some runs, zeros in others" in told


class Untied(nn.Linear):
    def __init__(self):
        super().__init__(6, 6)
        self.other = self.weight if dist.get_world_size() == 1 else nn.Parameter(1 * self.weight)

    def forward(self, x):
        return F.linear(super().forward(x), self.other)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: nn.BatchNorm1d(6), "own samples\n  1.running_mean, 1.running_var: a buffer"),
        (lambda: nn.Dropout(0.5), "1 (Dropout): set dropout to 0, since ranks"),
        (Untied, "1.other: only ranks have it: tied in the serial run?"),
    ],
)
def test_what_ranks_compute_otherwise_in_forward_is_named(made, says):
    def train():
        torch.manual_seed(0)
        model = BucketedDDP(nn.Sequential(nn.Linear(6, 6), made(), nn.Linear(6, 2)))
        x, y = random(12, 8).float().chunk(dist.get_world_size())[dist.get_rank()].split([6, 2], 1)
        (model(x) - y).square().mean().backward()
        model.synchronize()
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    report = same_training(train, train, world_size=3, steps=1, sgd=False)
    assert "the serial gradient is no sum of these" in str(report)
    assert says in str(report)
    assert report.undecided == ("Dropout" in says)


def test_two_optimizers_make_one_update():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizers = [torch.optim.SGD(layer.parameters(), lr=1.0) for layer in model]
    full = []
    with Tape(2, when_full=full.append) as tape:
        for _ in range(4):
            model(torch.ones(1, 2)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
            if len(tape.steps) == 2 and not full:
                after = [parameter.detach().clone() for parameter in model.parameters()]
    assert [len(step.gradients) for step in tape.steps] == [4, 4]
    assert all(map(torch.equal, tape.steps[-1].parameters.values(), after))
    assert full == [tape]


def test_the_tolerance_of_a_long_sum_hides_no_factor():
    """A step of nanoGPT's size: 12,288 tokens, 75 layers, fp32. 3 % more must show."""
    alone, more = tape_of(), tape_of(gradient=2.06)
    for tape in (alone, more):
        tape.begin["w"] = tape.begin["w"].float()
        tape.longest, tape.depth = 12_288, 75
    assert compare(alone, [alone, alone]).fine
    deep = copy.copy(alone)
    deep.longest = 10**9
    told = str(compare(deep, [alone, alone]))
    assert told.endswith("equal within 2.5e-01 (a smaller batch, or float64, would show more)")
    assert "×1.03" in str(compare(alone, [more, more]))
