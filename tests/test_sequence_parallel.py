"""ddpkit.tensor_parallel.sequence: the GPT split among ranks trains as the serial one does."""

import pytest
import torch
import torch.distributed as dist
import training_cases
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import clip_grad_norm_
from training_cases import ADAMW, HALF_THE_DIGITS, SGD, sent_by, small_gpt

from ddpkit.ddp import BucketedDDP
from ddpkit.models import mean_loss
from ddpkit.pipeline import Pipeline, PipelineStage, cut_layers, gpt_layers
from ddpkit.pipeline.schedules import one_f_one_b, zero_bubble
from ddpkit.tensor_parallel import clip_grad_norm, vocabulary_cross_entropy
from ddpkit.tensor_parallel.sequence import ParallelGPT
from ddpkit.tensor_parallel.split import count_copies, gather, splits

MAX_NORM = 0.1  # all steps are clipped


def serial_gpt(seed=0, dtype=torch.float64, tied=True, unused=True, **sizes):
    """With frozen parameters and an unused one; no number of ranks divides its 11 tokens."""
    gpt = small_gpt(seed, dtype, **{"context": 8, "width": 8, "heads": 4, "layers": 2} | sizes)
    if not tied:
        gpt.head.weight = nn.Parameter(gpt.head.weight.detach().flip(0))
    if unused:
        gpt.blocks[0].unused = nn.Parameter(torch.ones(3, dtype=dtype))
    for frozen in (gpt.blocks[0].mlp[0].weight, gpt.blocks[0].mlp[2].bias, gpt.blocks[1].mlp_norm):
        frozen.requires_grad_(False)
    return gpt


def batch(step, micro_batch=0, share=0):
    """Of all ranks, or of one share of the data."""
    numbers = training_cases.numbers_of(step, micro_batch, share)
    tokens = torch.randint(11, (2, 9), generator=numbers)
    return tokens[:, :-1], tokens[:, 1:]


def gradients_of(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def part_of(values, model, group=None):
    """What this rank should have of the serial model's `values`."""
    mine = dict(values)
    for name, (dim, hands) in splits(model).items():
        if name in values:
            mine[name] = values[name].index_select(dim, hands[dist.get_rank(group)])
    return mine


def near(check, got, expected, *what):
    """Alike in half the digits, measured against the largest number (training_cases says why)."""
    check.same(got.keys(), expected.keys(), *what)
    for name in expected:
        bound = HALF_THE_DIGITS * expected[name].abs().max()
        check.close(got[name], expected[name], bound, *what, name)


def same_step(check, got, expected, copies, serial, optimizers, *what, group=None):
    """Gradients and their norm are the serial model's; then both are clipped and take a step."""
    near(check, got, expected, *what)
    expected = clip_grad_norm_(serial.parameters(), MAX_NORM)
    norm = clip_grad_norm(copies, MAX_NORM, group)
    near(check, {"norm": norm}, {"norm": expected}, *what)
    for each in optimizers:
        each.step()
        each.zero_grad()


def train_beside(
    check,
    *what,
    optimizer=SGD,
    sequence=False,
    micro_batches=1,
    steps=5,
    seed=lambda step: step,
    twin_of=lambda serial: serial,
    **options,
):
    """Every loss, gradient, norm and, in the end, parameter is the serial model's, or `twin_of` it.

    seed: what the parallel model's dropout begins with.
    """
    serial = twin_of(serial_gpt(**options))
    model = ParallelGPT(serial_gpt(dist.get_rank(), **options), sequence=sequence)  # rank 0's count
    models = serial, model
    optimizers = [optimizer(each.parameters()) for each in models]
    for step in range(steps):
        for number in range(micro_batches):
            torch.default_generator.manual_seed(step)  # torch.manual_seed seeds GPUs, too: slow
            tokens, targets = batch(step, number)
            expected = mean_loss(serial(tokens), targets)
            torch.default_generator.manual_seed(seed(step))
            loss = model(tokens, targets)
            for each in (expected, loss):
                (each / micro_batches).backward()
            near(check, {"loss": loss.detach()}, {"loss": expected.detach()}, *what, step)
        model.synchronize()
        got, expected = gradients_of(model), part_of(gradients_of(serial), model)
        same_step(check, got, expected, count_copies(model), serial, optimizers, *what, step)
    near(check, gather(model.state_dict(), model), serial.state_dict(), *what)


@on_ranks(2, 4)
def test_five_steps_equal_to_serial_training(check):
    """Each optimizer with both forms; every gradient is compared, so that AdamW hides none."""
    few = dist.get_world_size() == 2
    for sequence, optimizer in enumerate((SGD, ADAMW) if few else (ADAMW, SGD)):
        what = (f"{sequence=}", optimizer.func.__name__)
        options = {"sequence": bool(sequence), "optimizer": optimizer}
        train_beside(check, *what, micro_batches=2 if few else 1, **options)
    if few:
        train_beside(check, "untied", tied=False, steps=2)
        train_beside(check, "grouped heads", kv_heads=2, sequence=True, steps=2)
        train_beside(check, "dropout", dropout=0.3, steps=2)
        options = {"dropout": 0.3, "sequence": True, "twin_of": as_ranks_draw, "seed": own_seed}
        train_beside(check, "dropout of some tokens", **options, steps=2)


def own_seed(step):
    return 100 * dist.get_rank() + step


def as_ranks_draw(serial):
    """With sequence parallelism a rank draws for its tokens: here one process does, for all."""
    states = []

    def begin(*_):
        seeds = [100 * rank + torch.initial_seed() for rank in range(dist.get_world_size())]
        states[:] = [torch.Generator().manual_seed(seed).get_state() for seed in seeds]

    def dropout(x):
        parts = list(x.chunk(len(states), dim=1))
        for rank, part in enumerate(parts):
            torch.set_rng_state(states[rank])
            parts[rank] = nn.functional.dropout(part, serial.dropout.p)
            states[rank] = torch.get_rng_state()
        return torch.cat(parts, dim=1)

    serial.register_forward_pre_hook(begin)
    for module in serial.modules():
        if isinstance(module, nn.Dropout):
            module.forward = dropout
    return serial


@pytest.mark.wide
@on_ranks(2, 4)
def test_bf16(check):
    """As far from float64 as the serial model in bf16, times √(2W-1); and one rounding.

    Where that one rounds the result of a row-parallel layer once, here W summands are rounded, and
    W-1 sums: 2W-1 errors, independent, and so √(2W-1) times as much.
    """
    times = (2 * dist.get_world_size() - 1) ** 0.5
    for optimizer in (SGD, ADAMW):
        exact, serial = serial_gpt(dtype=torch.bfloat16).double(), serial_gpt(dtype=torch.bfloat16)
        split = [ParallelGPT(serial, sequence=sequence) for sequence in (False, True)]
        right, alone, *found = [trained(each, optimizer) for each in (exact, serial, *split)]
        for sequence, together in enumerate(found):
            for number, what in enumerate(("losses", "weights")):
                plain, eps = (alone[number] - right[number]).norm(), torch.finfo(torch.bfloat16).eps
                bound = times * plain + eps / 2 * right[number].norm()
                case = (what, f"{sequence=}", optimizer.func.__name__)
                got = (together[number] - right[number]).norm()
                check.close(got, torch.zeros(()), bound, *case)
                check.unless(plain > 0, *case, "the serial model in bf16 is exact")


def trained(model, optimizer):
    """(the losses of five steps, all weights after them), in float64."""
    losses, optimizer = [], optimizer(model.parameters())
    for step in range(5):
        optimizer.zero_grad()
        tokens, targets = batch(step)
        split = isinstance(model, ParallelGPT)
        losses.append(model(tokens, targets) if split else mean_loss(model(tokens), targets))
        losses[-1].backward()
        if split:
            model.synchronize()
        optimizer.step()
    state = gather(model.state_dict(), model)  # of the serial model, itself
    weights = [state[name].double().flatten() for name in sorted(state)]
    return torch.stack(losses).detach().double(), torch.cat(weights)


# A mesh


@pytest.mark.wide
@on_ranks(4)
def test_two_shares_of_the_data_times_two_parts_of_the_model(check):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    data, tensor = mesh["data"].get_group(), mesh["tensor"].get_group()
    for sequence in (False, True):
        for optimizer in (SGD, ADAMW):
            what = (f"{sequence=}", optimizer.func.__name__)
            serial = serial_gpt(unused=False)
            split = ParallelGPT(serial_gpt(unused=False), tensor, sequence)
            model = BucketedDDP(split, group=data)
            optimizers = [optimizer(each.parameters()) for each in (serial, split)]
            for step in range(3):
                tokens, targets = zip(*(batch(step, 0, share) for share in (0, 1)), strict=True)
                mean_loss(serial(torch.cat(tokens)), torch.cat(targets)).backward()
                model(*batch(step, 0, dist.get_rank(data))).backward()
                model.synchronize()
                split.synchronize()
                got, right = gradients_of(split), part_of(gradients_of(serial), split, tensor)
                copies = count_copies(split, tensor)
                same_step(check, got, right, copies, serial, optimizers, *what, step, group=tensor)
            near(check, gather(split.state_dict(), split, tensor), serial.state_dict(), *what)


@on_ranks(4)
def test_two_stages_times_two_parts_of_each(check):
    """The tied weight is on both stages: two ranks hold each part of it, which the norm counts."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "tensor"))
    pipe, tensor = mesh["pipe"].get_group(), mesh["tensor"].get_group()
    number = dist.get_rank(pipe)
    for optimizer, schedule in ((SGD, zero_bubble), (ADAMW, one_f_one_b)):
        serial, what = serial_gpt(), schedule.__name__
        split = ParallelGPT(serial, tensor)
        module = cut_layers(gpt_layers(split), 2)[number]
        names = {parameter: name for name, parameter in split.named_parameters()}
        mine = {names[p]: p for p in module.parameters()}
        stage = PipelineStage(module, number, torch.empty(2, 8, 8, dtype=torch.float64))

        def loss(logits, targets, split=split, group=tensor):
            return vocabulary_cross_entropy(logits, targets, split.tokens.start, group).mean()

        tied = split.tokens.weight
        pipeline = Pipeline([stage], schedule(2, 2), loss, tied, pipe)
        copies = count_copies(module, tensor) | {tied: 2}
        optimizers = [optimizer(each.parameters()) for each in (serial, module)]
        for step in range(3):
            both = zip(batch(step), batch(step, 1), strict=True)
            tokens, targets = (torch.cat(micro_batches) for micro_batches in both)
            mean_loss(serial(tokens), targets).backward()
            pipeline.step(tokens, targets)
            pipeline.synchronize()
            expected = part_of(gradients_of(serial), split, tensor)
            found = {name: p.grad for name, p in mine.items() if p.grad is not None}
            expected = {name: expected[name] for name in mine if name in expected}
            same_step(check, found, expected, copies, serial, optimizers, what, step)
        expected = part_of(serial.state_dict(), split, tensor)
        found = {name: p.detach() for name, p in mine.items()}
        near(check, found, {name: expected[name] for name in found}, what)


# The wire


def calls(records):
    """{op: (how often, bytes of what is reduced or gathered)}; a Counter would lose the bytes."""
    found = {}
    for record in records:
        times = dist.get_world_size() if record.op == "all_gather" else 1  # it brings a part
        number, nbytes = found.get(record.op, (0, 0))
        found[record.op] = number + 1, nbytes + times * record.bytes
    return found


def calls_of_each_part(model):
    """Forward, backward, and what is left."""
    out = []
    parts = lambda: out.append(model(*batch(0))), lambda: out[0].backward(), model.synchronize
    return [calls(sent_by(part)) for part in parts]


@on_ranks(2)
def test_calls_of_a_step(check):
    """One more, forward for the embedding and backward for the logits; for the loss three numbers a
    target, whatever the vocabulary; for norms and biases one at the end."""
    for vocabulary in (11, 1100):
        for sequence in (False, True):
            sizes = {"width": 8, "layers": 3, "context": 8, "vocabulary": vocabulary}
            model = ParallelGPT(small_gpt(dtype=torch.float32, **sizes), sequence=sequence)
            loss, activations = 3 * 2 * 8 * 4, 7 * 2 * 8 * 8 * 4
            between = 4 * (3 * (2 * 2 * 8 + 2 * 8) + 2 * 8)  # two norms and biases a layer, a norm
            if sequence:
                halves = {"reduce_scatter": (7, activations), "all_gather": (7, activations)}
                at_the_end = {"all_reduce": (1, between)}
                expected = [halves | {"all_reduce": (2, loss)}, halves, at_the_end]
            else:
                whole = {"all_reduce": (7, activations)}
                expected = [{"all_reduce": (9, activations + loss)}, whole, {}]
            check.same(calls_of_each_part(model), expected, f"{vocabulary=}, {sequence=}")


# What can't be split


@on_ranks(4)
def test_what_cannot_be_split_is_refused(check):
    for heads, kv_heads in ((2, 2), (4, 2), (6, 6)):
        gpt = small_gpt(width=12, heads=heads, kv_heads=kv_heads)
        says = (f"{heads} heads and {kv_heads} of keys and values", "4 ranks", "fewer ranks")
        check.refused(ParallelGPT, gpt, says=says)
    gpt = small_gpt(width=8, heads=4)
    few = small_gpt(width=8, heads=4, vocabulary=3)
    check.refused(ParallelGPT, few, says=("3 can't be split among 4 ranks", "use fewer"))
    x = torch.zeros(2, 6, dtype=torch.int64)
    says = ("sequences of 6 tokens can't be split among 4 ranks", "sequence=False")
    check.refused(ParallelGPT(gpt, sequence=True), x, x, says=says)
    x = torch.zeros(2, 8, dtype=torch.int64)
    check.refused(ParallelGPT(gpt), x, x, says="sequences of 8 tokens, expected at most 6")
    for token in (-1, 11):
        says = f"got {token}, expected tokens from 0 to 10"
        x = torch.full((2, 6), token)
        check.refused(ParallelGPT(gpt), x, x, says=says, error=IndexError)
