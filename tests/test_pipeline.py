"""Pipelines on ranks beside the serial model: losses, gradients, norms, messages, what is held."""

import copy
import math
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from fake_nccl import on_nccl
from on_ranks import on_ranks
from test_schedules import MAKERS
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import get_total_norm
from torch.utils.flop_counter import FlopCounterMode
from training_cases import ADAMW, HALF_THE_DIGITS, SGD, sent_by, small_gpt

from ddpkit import HangError, launch
from ddpkit.data_parallel import average_gradients
from ddpkit.models import Block, mean_loss, torch_attention
from ddpkit.pipeline import Pipeline, PipelineStage, cut_layers, gpt_layers
from ddpkit.pipeline.dry_run import held, rank_of_stage
from ddpkit.pipeline.schedules import gpipe, interleaved, one_f_one_b, parse, zero_bubble
from ddpkit.pipeline.split_backward import SplitBackward

ROWS, LENGTH, WIDTH = 2, 6, 6  # of a micro-batch
SCHEDULES = {name: MAKERS[name] for name in ("gpipe", "1F1B", "interleaved", "zero bubble")}


# A GPT of eight layers with a tied weight, a frozen one and one that isn't used


def gpt(dtype=torch.float64):
    model = small_gpt(dtype=dtype, layers=6)
    model.blocks[2].unused = nn.Linear(3, 3, dtype=dtype)
    return model


def batch(m, step=0):
    numbers = torch.Generator().manual_seed(step)
    tokens = torch.randint(11, (ROWS * m, LENGTH + 1), generator=numbers)
    return tokens[:, :-1], tokens[:, 1:]


def gpt_and_batch(m, dtype=torch.float64):
    return gpt(dtype), *batch(m)


def twin_of(m):
    """(the serial model after backward of the whole batch, its loss)."""
    twin, inputs, targets = gpt_and_batch(m)
    loss = mean_loss(twin(inputs), targets)
    loss.backward()
    return twin, loss.detach()


def parts_of(model, schedule):
    """{stage: layers} of this rank."""
    ranks = rank_of_stage(schedule)
    layers = cut_layers(gpt_layers(model), len(ranks))
    return {s: layers[s] for s in sorted(ranks) if ranks[s] == dist.get_rank()}


def pipeline_of(model, schedule, loss=mean_loss, group=None, validate=True):
    ranks, rank = rank_of_stage(schedule), dist.get_rank(group)
    layers = cut_layers(gpt_layers(model), len(ranks))
    weight = model.tokens.weight
    comes = torch.empty(ROWS, LENGTH, WIDTH, dtype=weight.dtype)
    stages = [PipelineStage(layers[s], s, comes) for s in ranks if ranks[s] == rank]
    tied = weight if rank in (ranks[0], ranks[len(ranks) - 1]) else None
    return Pipeline(stages, schedule, loss, tied, group, validate)


def same_gradients(check, model, twin, parts, what, ends=False):
    """Of the weights of this rank's stages. ends: the tied one hasn't been summed."""
    mine = {id(weight) for part in parts.values() for weight in part.parameters()}
    for (name, weight), expected in zip(model.named_parameters(), twin.parameters(), strict=True):
        if id(weight) not in mine or (ends and name == "tokens.weight"):
            continue
        if expected.grad is None:
            check.unless(weight.grad is None, what, name, "has a gradient")
        elif weight.grad is None:
            check.unless(False, what, name, "has no gradient")
        else:
            bound = HALF_THE_DIGITS * expected.grad.abs().max()
            check.close(weight.grad, expected.grad, bound, what, name)


def check_step(check, schedule, what):
    """One step of a schedule: loss, gradients and their norm as the serial model's."""
    m = 1 + max(parse(action)[2] for actions in schedule for action in actions)
    model, inputs, targets = gpt_and_batch(m)
    pipeline = pipeline_of(model, schedule)
    loss = pipeline.step(inputs, targets)
    pipeline.synchronize()
    norm = pipeline.clip_grad_norm(math.inf)
    twin, expected = twin_of(m)
    check.close(loss, expected, HALF_THE_DIGITS, what, "loss")
    same_gradients(check, model, twin, parts_of(model, schedule), what)
    whole = get_total_norm([p.grad for p in twin.parameters() if p.grad is not None])
    check.close(norm, whole, HALF_THE_DIGITS * whole, what, "norm")
    check.unless(not any(s.kept or s.weight_parts for s in pipeline.stages.values()), what, "kept")
    most = {number: stage.most_held for number, stage in pipeline.stages.items()}
    check.same({s: held(schedule)[s] for s in most}, most, what, "held")
    done = [action for action, begin, end in pipeline.spans if begin <= end]
    check.same(done, schedule[dist.get_rank()], what, "spans")


@on_ranks(1, 2, 3, 4)
def test_a_step_is_the_serial_models(check):
    check_schedules(check)


@on_ranks(2, 3, 4, over=on_nccl, timeout=60)
def test_messages_in_one_line_hang_nowhere(check):
    """As NCCL carries them: no send ends before it is received, and all that is later waits."""
    check_schedules(check)


def check_schedules(check):
    ranks = dist.get_world_size()
    for at, (name, m) in enumerate(product(SCHEDULES, (1, 4, 8))):
        if (at + ranks) % 2:  # every other one; the rest with one rank more
            check_step(check, SCHEDULES[name](ranks, m), f"{name}, m = {m}")


@on_ranks(2)
def test_neighbours_on_one_rank(check):
    """A V: stages 0 and 3, 1 and 2; and a last rank that has the first stage."""
    check_step(check, [["0F0", "3F0", "3B0", "0B0"], ["1F0", "2F0", "2B0", "1B0"]], "V")
    check_step(check, [["1F0", "1B0"], ["0F0", "0B0"]], "the wrong way round")


# Training: the tied weight, different data each step, accumulation


@on_ranks(3)
def test_five_steps_beside_the_twin(check, world_size):
    cases = [(one_f_one_b, SGD, 4, 1), (one_f_one_b, ADAMW, 2, 2), (interleaved, SGD, 2, 1)]
    cases += [(zero_bubble, SGD, 2, 2), (zero_bubble, ADAMW, 4, 1), (gpipe, ADAMW, 2, 1)]
    for make, optimizer, m, times in cases:
        what = f"{make.__name__}, {optimizer.func.__name__}, {times} times m = {m}"
        model, twin = gpt(), gpt()
        schedule = make(world_size, m)
        loss = lambda y, targets, times=times: mean_loss(y, targets) / times  # noqa: E731
        pipeline = pipeline_of(model, schedule, loss)
        optimizers = optimizer(pipeline.weights), optimizer(twin.parameters())
        for step in range(5):
            for number in range(times):
                inputs, targets = batch(m, times * step + number)
                pipeline.step(inputs, targets)
                (mean_loss(twin(inputs), targets) / times).backward()
            pipeline.synchronize()
            norm = nn.utils.clip_grad_norm_(twin.parameters(), 0.2)
            check.close(pipeline.clip_grad_norm(0.2), norm, HALF_THE_DIGITS, what, step, "norm")
            check.unless(norm > 0.2, what, step, "nothing was clipped", norm)
            for each in optimizers:
                each.step()
                each.zero_grad()
        mine = {id(weight) for weight in pipeline.weights}
        for (name, weight), other in zip(model.named_parameters(), twin.parameters(), strict=True):
            if id(weight) in mine:
                check.close(weight, other, HALF_THE_DIGITS, what, name)


@on_ranks(3)
def test_to_the_bit_in_bf16(check):
    """But for the tied weight: the serial model with one micro-batch after the other."""
    m = 4
    for make in (gpipe, one_f_one_b, interleaved, zero_bubble):
        schedule = make(3, m)
        model, inputs, targets = gpt_and_batch(m, torch.bfloat16)
        pipeline = pipeline_of(model, schedule)
        pipeline.step(inputs, targets)
        pipeline.synchronize()
        twin, parts = gpt(torch.bfloat16), []
        twin.head.weight = nn.Parameter(twin.head.weight.detach().clone())
        for x, t in zip(inputs.chunk(m), targets.chunk(m), strict=True):
            ends = twin.tokens.weight, twin.head.weight
            for weight in ends:
                weight.grad = None
            (mean_loss(twin(x), t) / m).backward()
            parts += [weight.grad for weight in ends]
        others = dict(twin.named_parameters())
        for name, weight in model.named_parameters():
            if weight is pipeline.tied:
                check.near(weight.grad, parts, make.__name__, name)
            elif weight.grad is not None:
                check.same(weight.grad, others[name].grad, make.__name__, name)


@on_ranks(3)
def test_a_stage_without_anything_to_train(check):
    """Nothing in stage 0; in stage 1 only the last layer; stage 2 all."""
    for make in (one_f_one_b, zero_bubble):
        torch.manual_seed(0)
        layers = [nn.Linear(4, 4).double() for _ in range(6)]
        for layer in layers[:3]:
            layer.requires_grad_(False)
        stages = cut_layers(layers, 3)
        rank, x = dist.get_rank(), torch.ones(4, 4, dtype=torch.float64)
        stage = PipelineStage(stages[rank], rank, x[:2])
        loss = lambda y, target: (y - target).square().mean()  # noqa: E731
        pipeline = Pipeline([stage], make(3, 2), loss)
        pipeline.step(x, 2 * x)
        twin = copy.deepcopy(nn.Sequential(*layers)).requires_grad_()
        twin.zero_grad()
        loss(twin(x), 2 * x).backward()
        for at, (layer, other) in enumerate(zip(layers, twin, strict=True)):
            if at // 2 == rank and at > 2:
                check.close(layer.weight.grad, other.weight.grad, 1e-12, make.__name__, at)
            elif at // 2 == rank:
                check.unless(layer.weight.grad is None, at, "is frozen, and has a gradient")
        whole = get_total_norm([p.grad for layer in twin[3:] for p in layer.parameters()])
        check.close(pipeline.clip_grad_norm(math.inf), whole, 1e-12, make.__name__, "norm")


@on_ranks(4)
def test_data_times_pipeline(check):
    """2 × 2: two pipelines of two stages, each with half of the batch."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipe"))
    model, inputs, targets = gpt_and_batch(8)
    share = mesh.get_local_rank("data")
    schedule, group = one_f_one_b(2, 4), mesh["pipe"].get_group()
    pipeline = pipeline_of(model, schedule, group=group)
    loss = pipeline.step(inputs.chunk(2)[share], targets.chunk(2)[share])
    pipeline.synchronize()
    for stage in pipeline.stages.values():
        average_gradients(stage.module, mesh["data"].get_group())
    dist.all_reduce(loss, group=mesh["data"].get_group())
    norm = pipeline.clip_grad_norm(math.inf)
    twin, expected = twin_of(8)
    for weight in twin.blocks[2].unused.parameters():
        weight.grad = torch.zeros_like(weight)  # as `average_gradients` counts it
    check.close(loss / 2, expected, HALF_THE_DIGITS, "loss")
    parts = {number: stage.module for number, stage in pipeline.stages.items()}
    same_gradients(check, model, twin, parts, "2 × 2")
    whole = get_total_norm([p.grad for p in twin.parameters() if p.grad is not None])
    check.close(norm, whole, HALF_THE_DIGITS, "norm")


# What is sent


@on_ranks(3)
def test_messages(check):
    """For each micro-batch one each way between stages of two ranks, of an activation's bytes."""
    rank, m = dist.get_rank(), 4
    for name, make in SCHEDULES.items():
        schedule = make(3, m)
        ranks, (model, inputs, targets) = rank_of_stage(schedule), gpt_and_batch(m)
        pipeline = pipeline_of(model, schedule)
        records = sent_by(partial(pipeline.step, inputs, targets))
        expected = []
        for action in schedule[rank]:
            stage, kind, _ = parse(action)
            to = {"F": stage + 1, "W": None}.get(kind, stage - 1)
            if to in ranks:
                expected.append(("send", ranks[to], action))
        sent = [r for r in records if r.op == "send"]
        got = [(r.op, r.peer, r.detail.rpartition(", ")[2]) for r in sent]
        check.same(got, expected, name)
        check.same({r.bytes for r in sent}, {8 * ROWS * LENGTH * WIDTH}, name, "bytes")
        check.unless(all(r.waited for r in records), name, "a message that nobody waited for")
        others = [r.op for r in records if r.op not in ("send", "recv")]
        check.same(others, ["broadcast"], name)
        receives = [r.detail.rpartition(", ")[2] for r in records if r.op == "recv"]
        check.same(len(receives), len(sent) if rank != 1 or "inter" in name else 2 * m, name)
        check.unless(all("RECV_" in each for each in receives), name, receives)
        records = sent_by(pipeline.synchronize)
        swap = [("send", 2 - rank), ("recv", 2 - rank)] if rank != 1 else []
        check.same([(r.op, r.peer) for r in records], swap, name, "tied")
        records = sent_by(partial(pipeline.clip_grad_norm, 1.0))
        check.same([(r.op, r.bytes) for r in records], [("all_reduce", 8)], name, "norm")


# Mistakes


def hang():
    schedule = [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]
    model, inputs, targets = gpt_and_batch(2)
    pipeline_of(model, schedule, validate=False).step(inputs, targets)


def test_a_hang_names_stages_and_micro_batches():
    with pytest.raises(HangError) as error:
        launch(hang, world_size=2)
    said = str(error.value)
    assert "rank 0: waiting for rank 1 in recv(72 float64, src=1, 0B0)" in said
    assert "rank 1: waiting for rank 0 in recv(72 float64, src=0, 1F1)" in said


@on_ranks(2)
def test_refusals(check):
    rank, model = dist.get_rank(), gpt()
    good, other = one_f_one_b(2, 2), 1 - rank
    layers, x = cut_layers(gpt_layers(model), 2), torch.empty(ROWS, LENGTH, WIDTH)
    wrong = [PipelineStage(layers[other], other, x)]
    has = f"rank {rank} of 2 has stages [{other}]"
    check.refused(Pipeline, wrong, good, mean_loss, says=(has, f"in which it has [{rank}]"))
    check.refused(pipeline_of, model, one_f_one_b(1, 2), says="a schedule for 1 ranks")
    hangs = [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]
    check.refused(pipeline_of, model, hangs, says="this would hang: rank 0 waits in 0B0 for 1B0")
    inputs, targets = batch(2)
    step = pipeline_of(model, good).step
    says = f"rank {rank} got inputs of 3 rows for 2 micro-batches, expected a multiple of 2"
    check.refused(step, inputs[:3], targets, says=(says, "leave out 1, as a DataLoader with drop"))
    says = f"rank {rank} got no {('inputs', 'targets')[rank]}, expected a batch's"
    check.refused(step, *((None, targets), (inputs, None))[rank], says=says)
    check.refused(PipelineStage, model, 1, says="stage 1 got no `receives`, expected a tensor like")
    check.refused(cut_layers, layers, 3, says="2 layers can't make 3 stages")


@on_ranks(1)
def test_a_step_that_raised_leaves_nothing(check):
    """GPipe holds two micro-batches when the second one's loss raises."""
    model, inputs, targets = gpt_and_batch(2)
    pipeline = pipeline_of(model, gpipe(1, 2))
    (stage,) = pipeline.stages.values()
    pipeline.loss = lambda y, targets: y.mean() if not pipeline.losses else 1 / 0
    check.refused(pipeline.step, inputs, targets, says="zero", error=ZeroDivisionError)
    check.same(list(stage.kept), [0])
    pipeline.program.reverse()  # now it begins with a backward, for which nothing is kept
    check.refused(pipeline.step, inputs, targets, says="1", error=KeyError)
    check.same(list(stage.kept), [])


# Layers to stages; backward in two parts


def test_stages_cost_alike():
    layers = [nn.Linear(2, size) for size in (1, 1, 1, 8, 1, 1)]
    assert [len(stage) for stage in cut_layers(layers, 2)] == [3, 3]
    assert [len(stage) for stage in cut_layers(layers, 3)] == [3, 1, 2]
    assert [len(stage) for stage in cut_layers(layers, 3, costs=[1] * 6)] == [2, 2, 2]
    model = gpt()
    whole = nn.Sequential(*cut_layers(gpt_layers(model), 4))
    inputs, _ = batch(2)
    assert torch.equal(whole(inputs), model(inputs))
    assert set(whole.parameters()) == set(model.parameters())


class Tangled(nn.Module):
    """Weights that are used twice, through a view, by way of each other, or not at all."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))
        self.w, self.v = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6))
        self.unused = nn.Parameter(torch.randn(6))
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)

    def forward(self, x):
        turned = self.w.T
        x = self.a(self.b(self.a(x))) @ turned + x @ turned
        return self.c(x * self.v + self.frozen) @ (self.w * 2) + self.v.exp()


@pytest.mark.parametrize(
    "make", [Tangled, partial(Block, 6, 2, 0.0, torch_attention), nn.Tanh, nn.Identity]
)
def test_backward_in_two_parts_is_backward(make):
    torch.manual_seed(0)
    module = make().double()
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    gradient = torch.randn_like(x)
    module(x).backward(gradient)
    expected, of_x = {name: p.grad for name, p in module.named_parameters()}, x.grad
    module.zero_grad()
    x.grad = None
    parts = SplitBackward(module(x), x, module.parameters())
    torch.testing.assert_close(parts.input(gradient), of_x)
    at_once = {name for name, p in module.named_parameters() if p.grad is not None}
    assert at_once == ({"a.weight", "a.bias", "w", "v"} if make is Tangled else set())
    parts.weight()
    for name, weight in module.named_parameters():
        if expected[name] is None:
            assert weight.grad is None
        else:
            torch.testing.assert_close(weight.grad, expected[name])


def test_nothing_is_computed_twice():
    """Forward, input part and weight part of linear layers: 2·rows·inputs·outputs each."""
    module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    x = torch.randn(4, 8, requires_grad=True)
    y = module(x)
    parts = SplitBackward(y, x, module.parameters())
    for part in (partial(module, x), partial(parts.input, torch.ones_like(y)), parts.weight):
        with FlopCounterMode(display=False) as counter:
            part()
        assert counter.get_total_flops() == 3 * 2 * 4 * 8 * 8
