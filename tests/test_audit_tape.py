"""ddpkit.audit.tape: whose gradients are recorded, under which names, and how exact they are."""

import gc
from weakref import WeakSet

import pytest
import torch
from on_ranks import on_ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ddpkit.audit import Tape, compare
from ddpkit.audit.tape import Step, holds

BFLOAT16 = torch.finfo(torch.bfloat16).eps


def in_place(model: nn.Module, backend: str) -> nn.Module:
    model.compile(backend=backend)
    return model


def of_two(actors=1.0):
    """Return the tape of two modules with the same names; `actors` scales gradients of one."""
    torch.manual_seed(0)
    actor, critic = nn.Sequential(nn.Linear(2, 3)), nn.Sequential(nn.Linear(2, 1))
    optimizer = torch.optim.SGD([*actor.parameters(), *critic.parameters()], lr=0.1)
    with Tape(2, given={"module2.0.weight": torch.ones(1, 2)}) as tape:
        for _ in range(2):
            optimizer.zero_grad()
            for x in torch.ones(2, 1, 2):
                (actor(x).square().sum() + critic(x).square().sum()).backward()
            for parameter in actor.parameters():
                parameter.grad *= actors
            optimizer.step()
    return tape


def test_modules_with_the_same_names_are_told_apart():
    tape = of_two()
    shapes = {name: tuple(x.shape) for name, x in tape.begin.items()}
    both = {"0.weight": (3, 2), "0.bias": (3,)}
    assert shapes == both | {"module2.0.weight": (1, 2), "module2.0.bias": (1,)}
    assert tape.begin["module2.0.weight"].tolist() == [[1.0, 1.0]]
    assert [set(step.last) for step in tape.steps] == [set(shapes)] * 2
    assert not any(step.written for step in tape.steps)
    report = compare(tape, [of_two(2.0)] * 2)
    assert [difference.names for difference in report.differences] == [["0.weight", "0.bias"]]


def test_a_part_that_is_called_first_has_no_names_of_its_own(monkeypatch):
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))
    looked = []
    monkeypatch.setattr("ddpkit.audit.tape.holds", lambda *of: looked.append(of) or holds(*of))
    with Tape(1) as tape:
        (model[0](torch.ones(1, 2)).sum() + model(torch.ones(1, 2)).sum()).backward()
    assert list(tape.begin) == ["0.0.weight", "0.0.bias", "1.weight", "1.bias"]
    assert tape.depth == 2
    assert len(looked) == 2  # a call inside of another isn't looked up among all modules


def test_a_model_that_goes_on_in_the_place_of_another_has_its_names():
    with Tape(2) as tape:
        for _ in range(2):  # the second is loaded from a checkpoint, say
            model = nn.Linear(2, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    assert [list(step.gradients) for step in tape.steps] == [["weight", "bias"]] * 2


def test_a_gradient_is_recorded_when_its_own_optimizer_steps():
    layers = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
    first, second = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in layers)
    with Tape(3) as tape:
        other = torch.optim.SGD(layers[1].parameters(), lr=0.1)  # made, but it steps later
        for optimizers in ([first], [first, second], [other]):
            (layers[0](torch.ones(1, 2)) + layers[1](torch.ones(1, 2))).backward()
            for number, optimizer in enumerate(optimizers, 1):
                for group in optimizer.param_groups:
                    group["params"][0].grad.fill_(number)  # averaged just before the step
                optimizer.step()
    found = [[x if x is None else x.tolist() for x in s.gradients.values()] for s in tape.steps]
    assert found == [[[[1.0, 1.0]], None], [[[1.0, 1.0]], [[2.0, 2.0]]], [None, [[1.0, 1.0]]]]


def test_a_copy_that_is_only_evaluated_does_not_take_the_names():
    model, ema = (nn.Linear(2, 1) for _ in range(2))
    with Tape(1) as tape:
        with torch.no_grad():
            ema(torch.ones(1, 2))
        model(torch.ones(1, 2)).sum().backward()
    assert list(tape.begin) == ["weight", "bias", "module2.weight", "module2.bias"]
    assert torch.equal(tape.begin["weight"], model.weight)


def test_names_stay_as_they_are_from_the_first_backward_on():
    models = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    given = {"weight": torch.ones(1, 2), "module2.weight": torch.zeros(1, 2)}
    with Tape(3, given=given) as tape:
        with torch.no_grad():
            models[0](torch.ones(1, 2))
        for at in (1, 0, 1):
            models[at](torch.ones(1, 2)).sum().backward()
            optimizers[at].step()
            optimizers[at].zero_grad()
    assert tape.begin["weight"].tolist() == [[1.0, 1.0]]
    assert tape.begin["module2.weight"].tolist() == [[0.0, 0.0]]
    found = [[name for name, x in step.gradients.items() if x is not None] for step in tape.steps]
    assert found == [["weight", "bias"], ["module2.weight", "module2.bias"], ["weight", "bias"]]
    assert not any(step.written for step in tape.steps)


def test_a_model_that_is_trained_by_its_parts_is_not_replaced():
    model, copy = (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)) for _ in range(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Tape(2) as tape:
        with torch.no_grad():
            model(x := torch.ones(1, 2))
        for step in range(2):
            (model[1](model[0](x)) + step * copy(x).detach()).sum().backward()
            optimizer.step()
    assert all(step.gradients["0.weight"] is not None for step in tape.steps)


def test_only_names_in_common_get_a_number():
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2)
    with Tape(1) as tape:
        second(first(torch.ones(1, 2))).sum().backward()
    assert list(tape.begin) == ["weight", "module2.weight", "bias"]


def test_sparse_buffers_and_lazy_modules_are_recorded_without_harm():
    model, later = nn.Linear(2, 2), nn.LazyLinear(2)
    model.register_buffer("graph", torch.eye(2).to_sparse())
    model.register_buffer("empty", torch.empty(2, device="meta"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Tape(2) as tape:
        for module in (model, later):
            module(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    assert [step.buffers for step in tape.steps] == [{}, {}]
    assert "module2.weight" in tape.steps[1].gradients


def test_what_a_training_drops_the_tape_does_not_keep():
    model = nn.Linear(2, 2)
    alive = WeakSet()
    with Tape(1) as tape:
        for _ in range(3):
            loss, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1)
            alive.update([loss, optimizer])
            loss(model(torch.ones(1, 2)), torch.ones(1, dtype=torch.long)).backward()
            optimizer.step()
        gc.collect()
        assert len(alive) == 2
    assert tape.full


class LightningModule(nn.Module):
    pass


class Lit(LightningModule):
    """Trains as Lightning's modules do: it isn't called, and its steps are given closures."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(2, 1)

    def training_step(self, x):
        return self.net(x).square().mean()

    forward = training_step


def with_closures(kind, given: str = "kwarg", calls: bool = False, **options):
    """Return the tape of two updates.

    given: how a step gets its closure, "" for none. calls: whether the model itself is called.
    """
    model = Lit()
    optimizer = kind(model.parameters(), lr=0.1, **options)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(3, 2)) if calls else model.training_step(torch.ones(3, 2))
        loss.backward()
        return loss

    with Tape(2) as tape:
        for _ in range(2):
            if given == "kwarg":
                assert optimizer.step(closure=closure) > 0
            elif given == "arg":
                assert optimizer.step(closure) > 0
            else:
                closure()
                optimizer.step()
    return tape


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_step_that_is_given_a_closure_is_recorded_like_any(kind):
    due = with_closures(kind, "")
    assert list(due.begin) == ["net.weight", "net.bias"]
    assert [len(step.losses) for step in due.steps] == [1, 1]
    for given in ("kwarg", "arg"):
        tape = with_closures(kind, given)
        assert compare(due, [tape], to_the_bit=True).fine
        assert [step.losses for step in tape.steps] == [step.losses for step in due.steps]
        assert [step.last for step in tape.steps] == [step.last for step in due.steps]


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch.compile looks at it
@pytest.mark.parametrize("compiled", [torch.compile, in_place])
def test_a_compiled_model_is_recorded_like_any(compiled):
    tapes = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
        model = compiled(model, backend="eager") if compiles else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Tape(2) as tape:
            for x in torch.arange(8.0).view(2, 2, 2):
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
        tapes.append(tape)
    serial, tape = tapes
    assert list(tape.begin) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert [step.samples for step in tape.steps] == [step.samples for step in serial.steps]
    assert not compare(serial, [tape]).differences
    assert tape.epsilon == serial.epsilon


def test_an_output_counts_as_it_was_computed_not_as_a_hook_has_cast_it():
    model = nn.Linear(2, 1, dtype=torch.bfloat16)
    model.register_forward_hook(lambda module, inputs, output: output.float())
    with Tape(1) as tape:
        model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    assert tape.epsilon == BFLOAT16


def test_a_class_of_ones_own_around_a_wrapped_model_gives_no_names():
    class Learner(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = nn.Linear(2, 1)  # perhaps wrapped by DDP, on several ranks

        def training_step(self, x):
            return self.model(x).sum()

    with Tape(1) as tape:
        Learner().training_step(torch.ones(1, 2)).backward()
    assert list(tape.begin) == ["weight", "bias"]


class Twice(torch.optim.SGD):
    def step(self, closure):
        loss = closure()
        closure()
        super().step()
        return loss


def test_of_several_evaluations_in_a_step_the_first_is_recorded():
    tape = with_closures(Twice, calls=True)
    assert [len(step.losses) for step in tape.steps] == [1, 1]
    assert [step.samples.total() for step in tape.steps] == [3, 3]
    assert compare(with_closures(torch.optim.SGD), [tape], to_the_bit=True).fine
    assert with_closures(torch.optim.LBFGS).steps == []


class Own(torch.optim.SGD):
    """Ignores its closure or, like SAM, moves the weights before it calls it with an argument."""

    sharp = False

    @torch.no_grad()
    def step(self, closure=None):
        if self.sharp:
            weights = self.param_groups[0]["params"]
            torch._foreach_add_(weights, 1.0)
            torch.enable_grad()(closure)(backward=True)
            torch._foreach_sub_(weights, 1.0)
        super().step()


@pytest.mark.parametrize("sharp", [False, True])
def test_a_gradient_that_was_there_before_the_step_is_recorded(sharp):
    model = nn.Linear(2, 1)
    optimizer = Own(model.parameters(), lr=0.1)
    optimizer.sharp = sharp

    def closure(backward=False):
        assert backward == sharp
        optimizer.zero_grad()
        model(torch.full((1, 2), 5.0)).sum().backward()

    with Tape(2) as tape:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step(closure)
    assert [step.gradients["weight"].tolist() for step in tape.steps] == [[[1.0, 1.0]]] * 2
    assert [len(step.losses) for step in tape.steps] == [1, 1]


def test_a_gradient_that_a_fused_optimizer_divides_is_recorded_divided():
    def run(scale):
        torch.manual_seed(0)
        layer = nn.Linear(2, 1)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        with Tape(1) as tape:
            scaler.scale(layer(torch.ones(1, 2)).sum()).backward()
            scaler.step(optimizer)
        return tape

    assert run(1024.0).steps[0].gradients["weight"].tolist() == [[1.0, 1.0]]
    assert compare(run(1024.0), [run(2048.0)] * 2).fine


@pytest.mark.parametrize("lower", [True, False])
def test_the_dtype_of_outputs_counts_for_the_tolerance_but_not_at_the_start(lower):
    layer, x = nn.Linear(2, 1), torch.ones(1, 2)
    with Tape(1) as tape, torch.autocast("cpu", torch.bfloat16, enabled=lower):
        layer(x).sum().backward()
    assert tape.epsilon == (BFLOAT16 if lower else torch.finfo(torch.float32).eps)

    def of(begin, gradient):
        found = Tape(1)
        found.epsilon, found.longest = tape.epsilon, 50
        found.begin = {"w": torch.full((4,), begin)}
        found.steps = [Step([1.0], {"w": torch.full((4,), gradient)}, found.begin)]
        return found

    assert compare(of(1.0, 2.0), [of(1.0, 2.02)] * 2).fine == lower
    assert "don't begin alike" in str(compare(of(1.0, 2.0), [of(1.01, 2.0)] * 2))


@on_ranks(2)
def test_fsdp2_in_bfloat16_is_recorded_in_the_dtype_it_is_kept_in(check, rank):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    due = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Tape(2) as tape:
        for _ in range(2):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
    for name, value in due.items():
        check.same(tape.begin[name], value, name)
    check.same([step.written for step in tape.steps], [[], []])
    check.same([set(step.parts[0]) for step in tape.steps], [set(due)] * 2)


def test_a_parameter_that_is_first_seen_later_can_be_renamed():
    def of(name):
        tape = Tape(1)
        tape.begin = {"w": torch.ones(1)}
        both = {"w": torch.ones(1), name: torch.ones(1)}
        tape.steps = [Step([1.0], both, both)]
        return tape

    assert compare(of("x"), [of("y")] * 2, rename={"y": "x"}).fine
    with pytest.raises(ValueError, match="expected to rename a parameter"):
        compare(of("x"), [of("y")] * 2, rename={"z": "x"})
