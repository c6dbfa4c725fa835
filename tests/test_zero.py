"""ddpkit.zero, on every rank, against its serial twin: one process that trains on all data with the plain optimizer.

What runs on the ranks returns what it found wrong, as a list of sentences; the tests assert that there are none.
"""

import contextlib
import itertools
import sys
from functools import partial
from pathlib import Path
from unittest.mock import patch

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import twin
from outside import run_script
from torch import nn
from torch.nn.utils import parameters_to_vector

from ddpkit import HangError, RankError, launch, ring
from ddpkit import exercises as check
from ddpkit.models import GPT, mean_loss
from ddpkit.zero import ZeroOptimizer

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # functions travel as those of a notebook do

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
FEW_BYTES = 600 / 2**20  # a bucket for some parameters of the GPT below, not for all; half that in float32
VARIANTS = {
    "one bucket": {},
    "buckets": {"bucket_cap_mb": FEW_BYTES},
    "shared": {"bucket_cap_mb": FEW_BYTES, "shared_memory": True},
}
STEPS = 10


def rank_and_world():
    return dist.get_rank(), dist.get_world_size()


# A model with a tied weight, a frozen one, and lengths that divide by nothing; other weights and data on every rank


def small_gpt(seed, dtype=torch.float64):
    torch.manual_seed(seed)
    model = GPT(vocabulary=11, context=6, width=6, heads=2, layers=1).to(dtype)
    model.prior.zero_()
    return model


def batch(step, micro_batch, rank):
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro_batch + rank)
    return torch.randint(11, (2, 7), generator=generator).unfold(1, 6, 1).unbind(1)


def loss_of(model, batches):
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return mean_loss(model(inputs), targets)


def two_groups(module):
    """Vectors, not decayed, after what is left; each with options of its own."""
    vectors = [parameter for parameter in module.parameters() if parameter.dim() == 1]
    rest = [parameter for parameter in module.parameters() if parameter.dim() > 1]
    return [{"params": rest, "lr": 0.02}, {"params": vectors, "weight_decay": 0.0}]


def trained_of(module):
    return parameters_to_vector(parameter for parameter in module.parameters() if parameter.requires_grad).detach()


def train(module, optimizer, ranks, steps=range(STEPS), accumulation=1, set_to_none=True, schedule=True, clip=None):
    """All trained parameters, as one vector, after training on the data of these ranks."""
    for step in steps:
        if schedule:  # of each group another; from outside, as schedulers do it
            for number, group in enumerate(optimizer.param_groups):
                group["lr"] = 0.02 / (1 + (step % 4) * (number + 1))
        optimizer.zero_grad(set_to_none)
        for number in range(accumulation):
            quiet = number < accumulation - 1 and hasattr(optimizer, "no_sync")
            with optimizer.no_sync() if quiet else contextlib.nullcontext():
                (loss_of(module, [batch(step, number, rank) for rank in ranks]) / accumulation).backward()
        if clip:
            clip(module, optimizer)
        optimizer.step()
    return trained_of(module)


ADAMW = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)


def alone(accumulation=1, make=ADAMW, dtype=torch.float64, **options):
    module = small_gpt(0, dtype)
    return train(module, make(two_groups(module)), range(dist.get_world_size()), accumulation=accumulation, **options)


def sharded(variant, make=ADAMW, dtype=torch.float64):
    """(module, its ZeroOptimizer)."""
    module = small_gpt(dist.get_rank(), dtype)
    return module, ZeroOptimizer(two_groups(module), make.func, **make.keywords, **VARIANTS[variant])


# The serial twin

# Roundings of 1e-16 grow in ten steps, but nowhere near the eighth digit; a wrong gradient moves a parameter by a good
# part of the learning rate, in the second or third.
HALF_THE_DIGITS = torch.finfo(torch.float64).eps ** 0.5


def near(got, expected) -> bool:
    return bool(((got - expected).abs() < HALF_THE_DIGITS).all())


def check_training():
    wrong, rank = twin.Complaints(), dist.get_rank()
    for accumulation in (1, 3):
        expected = alone(accumulation)
        for variant in VARIANTS:
            set_to_none = (variant == "buckets") == (accumulation == 3)
            module, optimizer = sharded(variant)
            got = train(module, optimizer, [rank], accumulation=accumulation, set_to_none=set_to_none)
            what = variant, accumulation, set_to_none
            wrong.unless(near(got, expected), *what, (got - expected).abs().max())
            wrong.same_on_all(got, *what)
            wrong.same_on_all(module.positions, *what, "frozen")
            wrong.unless(len(optimizer.buckets) == 2 or variant != "one bucket", *what, optimizer.plan)
            wrong.unless(len(optimizer.buckets) > 3 or variant == "one bucket", *what, optimizer.plan)
    return wrong


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_trained_like_one_process(world_size):
    run = launch(check_training, world_size=world_size)
    assert [wrong[:3] for wrong in run] == [[]] * world_size


def check_segments():
    """A bucket that travels in many segments, with room for one, isn't mixed up with the next, ready already."""
    with patch.multiple(ring, SEGMENT_BYTES=128, AHEAD=1):
        return [] if near(train(*sharded("buckets"), [dist.get_rank()]), alone()) else ["other parameters"]


@pytest.mark.parametrize("world_size", [2, 3])
def test_buckets_of_many_segments(world_size):
    assert list(launch(check_segments, world_size=world_size)) == [[]] * world_size


def check_zero_grad():
    """What added up before it makes no difference, whoever owns it."""
    wrong, rank = twin.Complaints(), dist.get_rank()
    expected = alone(3)
    for variant, set_to_none in itertools.product(VARIANTS, (True, False)):
        module, optimizer = sharded(variant)
        with optimizer.no_sync():
            loss_of(module, [batch(8, 8, rank)]).backward()
        got = train(module, optimizer, [rank], accumulation=3, set_to_none=set_to_none)
        wrong.unless(near(got, expected), variant, set_to_none)
    return wrong


def test_zero_grad_forgets_all_gradients():
    assert list(launch(check_zero_grad, world_size=2)) == [[]] * 2


def check_float32():
    """No further from the float64 twin than twice the float32 twin is."""
    wrong, rank = twin.Complaints(), dist.get_rank()
    exact = alone(3)
    allowed = 2 * (alone(3, dtype=torch.float32) - exact).norm()
    for variant in VARIANTS:
        got = train(*sharded(variant, dtype=torch.float32), [rank], accumulation=3)
        wrong.unless((got - exact).norm() <= allowed, variant, (got - exact).norm(), allowed)
        wrong.same_on_all(got, variant)
    return wrong


def test_float32_is_as_exact_as_one_process():
    assert list(launch(check_float32, world_size=2)) == [[]] * 2


OPTIMIZERS = {
    "fused AdamW": partial(torch.optim.AdamW, lr=0.01, fused=True, amsgrad=True),
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "plain SGD": partial(torch.optim.SGD, lr=0.1),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.05),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01, centered=True),
    "NAdam": partial(torch.optim.NAdam, lr=0.01),
    "ASGD": partial(torch.optim.ASGD, lr=0.05, t0=3),
}


def check_optimizers():
    """Also with torch's own schedulers, which change groups and count steps."""
    wrong, rank = twin.Complaints(), dist.get_rank()

    def scheduled(module, optimizer, ranks):
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        for step in range(STEPS):
            train(module, optimizer, ranks, [step], schedule=False)
            scheduler.step()
        return trained_of(module)

    for name, make in OPTIMIZERS.items():
        module = small_gpt(0)
        expected = scheduled(module, make(two_groups(module)), range(dist.get_world_size()))
        got = scheduled(*sharded("buckets", make), [rank])
        wrong.unless(near(got, expected), name, (got - expected).abs().max())
    return wrong


def test_any_elementwise_optimizer():
    assert list(launch(check_optimizers, world_size=2)) == [[]] * 2


# Clipping


def clip_plain(module, optimizer, norms, max_norm):
    norms.append(nn.utils.clip_grad_norm_(module.parameters(), max_norm))


def clip_ours(module, optimizer, norms, max_norm):
    norms.append(optimizer.clip_grad_norm_(max_norm))


def check_clipping():
    wrong, rank = twin.Complaints(), dist.get_rank()
    for max_norm, variant in itertools.product((0.05, 100.0), VARIANTS):
        plain, ours = [], []
        sgd = partial(torch.optim.SGD, lr=0.3)  # AdamW would hardly notice
        expected = alone(make=sgd, clip=partial(clip_plain, norms=plain, max_norm=max_norm))
        got = train(*sharded(variant, sgd), [rank], clip=partial(clip_ours, norms=ours, max_norm=max_norm))
        wrong.unless(near(got, expected), variant, max_norm)
        wrong.unless(near(torch.stack(ours), torch.stack(plain)), variant, ours, plain)
        wrong.unless(all((norm > max_norm) == (max_norm < 1) for norm in ours), variant, ours)
    return wrong


def test_clipping_by_the_norm_of_all_shards():
    assert list(launch(check_clipping, world_size=3)) == [[]] * 3


# State, counted


def tensors_of(optimizer) -> list[torch.Tensor]:
    """Every tensor that the optimizers inside keep."""
    states = [state for bucket in optimizer.buckets for state in bucket.optimizer.state.values()]
    return [value for state in states for value in state.values()]


def check_state_bytes():
    wrong, (rank, world_size) = twin.Complaints(), rank_and_world()
    for variant, dtype in itertools.product(VARIANTS, (torch.float32, torch.bfloat16)):
        module, optimizer = sharded(variant, dtype=dtype)
        train(module, optimizer, [rank], range(2))
        padded = sum(plan.numel for plan in optimizer.plan)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        moments = [tensor for tensor in tensors_of(optimizer) if tensor.dim()]
        counters = [tensor for tensor in tensors_of(optimizer) if not tensor.dim()]
        k = 8 if dtype == torch.float32 else 12
        wrong.unless(optimizer.state_bytes() == k * padded / world_size, variant, dtype, optimizer.state_bytes())
        wrong.unless(sum(tensor.nbytes for tensor in moments) == 8 * padded / world_size, variant, "moments")
        wrong.unless(len(counters) == len(optimizer.buckets), variant, "counters of steps", counters)
        wrong.unless(optimizer.state[trained[0]] == {}, "state of whole parameters")
        wrong.unless(padded - sum(p.numel() for p in trained) == sum(p.padding for p in optimizer.plan), "padding")
        masters = sum(shard.nbytes for shard in optimizer.shards if shard.dtype != dtype)
        wrong.unless(masters == (k - 8) * padded / world_size, variant, dtype, "masters", masters)
    return wrong


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_state_is_k_psi_over_w(world_size):
    assert list(launch(check_state_bytes, world_size=world_size)) == [[]] * world_size


def linears_state_bytes():
    """12 biases and weights whose lengths are multiples of 64 bytes on 4 ranks: no padding at all."""
    module = nn.Sequential(*[nn.Linear(64, 64) for _ in range(12)])
    optimizer = ZeroOptimizer(module.parameters(), torch.optim.AdamW)
    module(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    return optimizer.state_bytes()


def test_state_without_padding():
    assert list(launch(linears_state_bytes, world_size=4)) == [8 * 12 * 64 * 65 / 4] * 4


# The plan


def test_plan():
    assert plan_shards({}, 2) == []
    assert plan_shards({4: (5, 20, "a"), 2: (3, 12, "a")}, 2) == [BucketPlan((4, 2), (5, 3), (0, 5), 8, 2, "a")]
    (plan,) = plan_shards({4: (5, 20, "a"), 2: (4, 16, "a")}, 2)
    assert (plan.numel, plan.padding, plan.shard_numel) == (10, 1, 5)
    assert [plan.owned(rank) for rank in range(2)] == [[Part(4, 0, 5, 0)], [Part(2, 0, 4, 0)]]
    (plan,) = plan_shards({0: (5, 20, "a"), 1: (3, 12, "a")}, 2, align=4)
    assert (plan.starts, plan.numel, plan.padding) == ((0, 8), 16, 8)
    assert [plan.owned(rank) for rank in range(2)] == [[Part(0, 0, 5, 0)], [Part(1, 0, 3, 0)]]
    (plan,) = plan_shards({0: (5, 20, "a"), 1: (6, 24, "a")}, 3)
    parts = [[Part(0, 0, 4, 0)], [Part(0, 4, 5, 0), Part(1, 0, 3, 1)], [Part(1, 3, 6, 0)]]
    assert [plan.owned(rank) for rank in range(3)] == parts


def test_plan_has_a_bucket_for_each_kind_and_cap():
    plans = plan_shards({3: (4, 16, "a"), 2: (4, 16, "b"), 1: (4, 16, "a"), 0: (4, 16, "a")}, 2, cap_bytes=32)
    assert [(plan.parameters, plan.kind) for plan in plans] == [((2,), "b"), ((3, 1), "a"), ((0,), "a")]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("align", [1, 4, 16])
def test_every_element_has_one_owner(world_size, align):
    numels = [1, 100, 0, 17, 64, 5]
    (plan,) = plan_shards({n: (numel, 4 * numel, None) for n, numel in enumerate(numels)}, world_size, align=align)
    owned = [part for rank in range(world_size) for part in plan.owned(rank)]
    elements = sorted((p.parameter, element) for p in owned for element in range(p.start, p.stop))
    assert elements == [(n, element) for n, numel in enumerate(numels) for element in range(numel)]
    assert plan.numel % (world_size * align) == 0
    assert all(start % align == 0 for start in plan.starts)
    assert plan.padding < len(numels) * align + world_size * align
    assert all(0 <= part.at <= plan.shard_numel - (part.stop - part.start) for part in owned)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_the_exercise_and_the_library_have_one_plan(world_size):
    for numels in ([4, 4], [7, 2, 1], [1, 1], [0, 5]):
        (plan,) = plan_shards({n: (numel, 4 * numel, None) for n, numel in enumerate(numels)}, world_size)
        owned = [[tuple(part[:3]) for part in plan.owned(rank)] for rank in range(world_size)]
        assert owned == check.shard_plan.reference(numels, world_size)


# The buffers


def check_views():
    wrong, rank = twin.Complaints(), dist.get_rank()
    for variant in VARIANTS:
        module, optimizer = sharded(variant)
        train(module, optimizer, [rank], range(1))
        with optimizer.no_sync():
            loss_of(module, [batch(0, 0, rank)]).backward()
        for bucket in optimizer.buckets:
            for parameter, start in zip(bucket.views, bucket.plan.starts, strict=True):
                place = start * parameter.element_size()
                wrong.unless(parameter.data_ptr() == bucket.flat.data_ptr() + place, variant, "parameter")
                wrong.unless(parameter.grad.data_ptr() == bucket.gradients.data_ptr() + place, variant, "gradient")
                wrong.unless(place % 64 == 0, variant, place)
            own = bucket.flat.chunk(dist.get_world_size())[rank]
            wrong.unless(bucket.shard.data_ptr() == own.data_ptr(), variant, "shard")
        wrong.unless(module.head.weight is module.tokens.weight, variant, "tied")
        optimizer.zero_grad()
        loss_of(module, [batch(0, 0, rank)]).backward()
        wrong.unless(all(parameter.grad is None for parameter in module.parameters()), variant, "left behind")
    return wrong


def test_parameters_and_gradients_live_in_flat_buffers():
    assert list(launch(check_views, world_size=2)) == [[]] * 2


# The wire, exactly


def mark():
    """Begin a section of the records."""
    dist.barrier()


def sections(records) -> list[list]:
    """The records between marks; first those before any."""
    found = [[]]
    for record in records:
        if record.function == "mark":
            found.append([])
        else:
            found[-1].append(record)
    return found


def three_steps(variant):
    """One micro-batch, three micro-batches, and gradients that are thrown away; bytes of all parameters and padding."""
    module, optimizer = sharded(variant, dtype=torch.float32)
    for accumulation in (1, 3):
        mark()
        train(module, optimizer, [dist.get_rank()], range(1), accumulation)
    mark()
    with optimizer.no_sync():
        loss_of(module, [batch(0, 0, dist.get_rank())]).backward()
    optimizer.zero_grad()
    return sum(bucket.flat.nbytes for bucket in optimizer.buckets)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_bytes_on_the_wire(variant, world_size):
    run = launch(three_steps, variant, world_size=world_size)
    for records, nbytes in zip(run.wire, run, strict=True):
        _, once, accumulated, thrown_away = sections(records)
        for step in (once, accumulated):
            assert {record.op for record in step} <= {"send", "recv"}
            sent = sum(record.bytes for record in step if record.op == "send")
            assert sent == (0 if variant == "shared" else 2 * (world_size - 1) * nbytes / world_size)
        assert thrown_away == []


def linears_step():
    module = nn.Sequential(*[nn.Linear(64, 64) for _ in range(12)])
    optimizer = ZeroOptimizer(module.parameters(), torch.optim.AdamW, bucket_cap_mb=0.05)
    mark()
    module(torch.ones(1, 64)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("world_size", [2, 4])
def test_without_padding_the_wire_carries_the_parameters_alone(world_size):
    parameter_bytes = 4 * 12 * 64 * 65
    for records in launch(linears_step, world_size=world_size).wire:
        sent = sum(record.bytes for record in sections(records)[-1] if record.op == "send")
        assert sent == 2 * (world_size - 1) * parameter_bytes / world_size


class Ways(nn.Module):
    """Layers that are passed in any order."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(16, 16, bias=False) for name in "abc"})

    def forward(self, x, way):
        for name in way:
            x = self.layers[name](x)
        return x


def check_ways(ways):
    """Ranks whose gradients come in other orders, or not at all, add up what belongs together."""
    wrong, (rank, world_size) = twin.Complaints(), rank_and_world()
    torch.manual_seed(0)
    module = Ways().double()
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    optimizer = ZeroOptimizer(module.parameters(), torch.optim.SGD, 1e-6, unused_as_zero=True, lr=1.0)
    losses = [module(torch.full((1, 16), 1.0 + r).double(), way).sum() for r, way in enumerate(ways)]
    grads = [torch.autograd.grad(x, [*module.parameters()], allow_unused=True, materialize_grads=True) for x in losses]
    module(torch.full((1, 16), 1.0 + rank).double(), ways[rank]).sum().backward()
    optimizer.step()
    for (name, parameter), *each in zip(module.named_parameters(), *grads, strict=True):
        mean = sum(each) / world_size
        wrong.unless(near(before[name] - parameter, mean), name, before[name] - parameter, mean)
    return wrong


@pytest.mark.parametrize("ways", [["abc", "cba"], ["acb", "ab"], ["c", "abc"]])
def test_all_ranks_send_in_one_order(ways):
    assert [wrong[:3] for wrong in launch(check_ways, ways, world_size=2)] == [[]] * 2


def sent_before_each_gradient():
    """How many messages were sent before the gradients of the layers were ready, one after the other."""
    module = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(4)])
    optimizer = ZeroOptimizer(module.parameters(), torch.optim.SGD, 1 / 2**20, lr=0.1)
    sent, records = [], dist.group.WORLD.recorder.records

    def look(parameter):
        sent.append(sum(record.op == "send" for record in records))

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(look)
    before = sum(record.op == "send" for record in records)
    module(torch.ones(1, 16)).sum().backward()
    optimizer.step()
    return [number - before for number in sent]


def test_buckets_leave_while_backward_goes_on():
    assert list(launch(sent_before_each_gradient, world_size=2)) == [[1, 2, 3, 4]] * 2


# Half precision


def check_half(dtype):
    """Against master copies by hand. Two ranks: their sum has the same bits in either order."""
    wrong, (rank, world_size) = twin.Complaints(), rank_and_world()
    for variant, accumulation in itertools.product(VARIANTS, (1, 2)):
        plain = small_gpt(0, dtype)
        trained = [parameter for parameter in plain.parameters() if parameter.requires_grad]
        masters = [nn.Parameter(parameter.detach().float()) for parameter in trained]
        adamw = torch.optim.AdamW(masters, lr=1e-4)
        module = small_gpt(rank, dtype)
        optimizer = ZeroOptimizer(module.parameters(), torch.optim.AdamW, **VARIANTS[variant], lr=1e-4)
        for step in range(5):
            shares = []
            for r in range(world_size):
                for number in range(accumulation):
                    (loss_of(plain, [batch(step, number, r)]) / accumulation).backward()
                shares.append([parameter.grad / world_size for parameter in trained])
                plain.zero_grad()
            for master, *each in zip(masters, *shares, strict=True):
                master.grad = twin.total(each).float()
            adamw.step()
            for parameter, master in zip(trained, masters, strict=True):
                parameter.data.copy_(master)
            train(module, optimizer, [rank], [step], accumulation, schedule=False)
            wrong.same(trained_of(module), trained_of(plain), variant, accumulation, step)
        wrong.unless({shard.dtype for shard in optimizer.shards} == {torch.float32}, variant)
        saved = optimizer.state_dict()["state"]
        names = [name for name, p in enumerate(module.parameters()) if p.requires_grad]
        for name, master in zip(names, masters, strict=True):
            wrong.same(saved[name]["master"], master.detach(), variant, name)
    return wrong


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_has_a_master_copy(dtype):
    """A learning rate of 1e-4 is less than the spacing of bf16 at most weights: without a copy, nothing would move."""
    assert [wrong[:2] for wrong in launch(check_half, dtype, world_size=2)] == [[]] * 2


def check_unscaling():
    """A loss scaler's way: scale the loss, unscale the shards; leave out a step whose gradients overflowed."""
    wrong, rank = twin.Complaints(), dist.get_rank()
    scaled, plain = sharded("buckets"), sharded("buckets")
    for step in range(3):
        train(*plain, [rank], [step])
        module, optimizer = scaled
        (float("inf") * loss_of(module, [batch(step, 1, rank)])).backward()
        optimizer.synchronize()
        wrong.unless(not all(shard.grad.isfinite().all() for shard in optimizer.shards), "no overflow")
        optimizer.zero_grad()
        (1024 * loss_of(module, [batch(step, 0, rank)])).backward()
        optimizer.synchronize()
        for shard in optimizer.shards:
            shard.grad /= 1024
        for group, other in zip(optimizer.param_groups, plain[1].param_groups, strict=True):
            group["lr"] = other["lr"]
        optimizer.step()
        wrong.unless(near(trained_of(module), trained_of(plain[0])), step)
    return wrong


def test_shards_can_be_unscaled_and_steps_left_out():
    assert list(launch(check_unscaling, world_size=2)) == [[]] * 2


# Saved and loaded


def save(path, variant, dtype):
    """Train, save, train on; what came out."""
    module, optimizer = sharded(variant, dtype=dtype)
    train(module, optimizer, range(4), range(3))  # all ranks have all data: worlds of any size train alike
    saved = {"module": module.state_dict(), "optimizer": optimizer.state_dict()}
    if dist.get_rank() == 0:
        torch.save(saved, path)
    return train(module, optimizer, range(4), range(3, 6))


def load(path, variant, dtype):
    """Load into another model with other options, and train on; that and what is saved again."""
    saved = torch.load(path)
    module, optimizer = sharded(variant, dtype=dtype)
    train(module, optimizer, range(4), range(7, 8))
    module.load_state_dict(saved["module"])
    optimizer.load_state_dict(saved["optimizer"])
    again = optimizer.state_dict()
    return train(module, optimizer, range(4), range(3, 6)), again, optimizer.state_bytes()


def load_plain(path):
    saved, module = torch.load(path), small_gpt(5)
    optimizer = ADAMW(two_groups(module))
    module.load_state_dict(saved["module"])
    optimizer.load_state_dict(saved["optimizer"])
    return train(module, optimizer, range(4), range(3, 6))


@pytest.mark.parametrize("variant", VARIANTS)
def test_saved_on_four_ranks_loads_on_fewer_and_into_adamw(variant, tmp_path):
    expected = launch(save, tmp_path / "saved", variant, torch.float64, world_size=4)[0]
    whole = torch.load(tmp_path / "saved")["optimizer"]
    for world_size, into in ((4, variant), (2, "buckets"), (1, "one bucket")):
        for got, again, nbytes in launch(load, tmp_path / "saved", into, torch.float64, world_size=world_size):
            assert near(got, expected)
            torch.testing.assert_close(again, whole, rtol=0, atol=0)
            assert nbytes >= sum(t.nbytes for s in whole["state"].values() for t in s.values() if t.dim()) / world_size
    assert near(launch(load_plain, tmp_path / "saved", world_size=1)[0], expected)


def test_half_precision_is_saved_with_its_master_copies(tmp_path):
    expected = launch(save, tmp_path / "saved", "buckets", torch.bfloat16, world_size=2)[0]
    for got, _, _ in launch(load, tmp_path / "saved", "buckets", torch.bfloat16, world_size=2):
        assert torch.equal(got, expected)


def check_loaded_from_plain():
    wrong, everyone = twin.Complaints(), range(dist.get_world_size())
    plain = small_gpt(0)
    adamw = ADAMW(two_groups(plain))
    train(plain, adamw, everyone, range(3))
    module, optimizer = sharded("buckets")
    module.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(adamw.state_dict())
    expected = train(plain, adamw, everyone, range(3, 6))
    wrong.unless(near(train(module, optimizer, everyone, range(3, 6)), expected), "from plain AdamW")
    counted = adamw.state_dict()
    next(iter(counted["state"].values()))["step"] += 1
    one = ZeroOptimizer(two_groups(small_gpt(0)), torch.optim.AdamW)
    wrong.refused(one.load_state_dict, counted, says=("expected the same 'step' for parameters", "share a shard"))
    wrong.refused(one.load_state_dict, {**counted, "param_groups": counted["param_groups"][:1]}, says=("groups",))
    return wrong


def test_a_plain_optimizers_state_loads():
    assert list(launch(check_loaded_from_plain, world_size=3)) == [[]] * 3


# Mistakes


def raises(kind, says, function, *args) -> twin.Complaints:
    wrong = twin.Complaints()
    try:
        function(*args)
    except kind as error:
        wrong.unless(says in str(error), f"{says} not in {error}")
    else:
        wrong.unless(False, f"{function} raised nothing")
    return wrong


def check_mistakes():
    wrong, rank = twin.Complaints(), dist.get_rank()
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    adamw = torch.optim.AdamW
    for cap in (0, float("nan")):
        wrong.refused(ZeroOptimizer, weights, adamw, cap, says=("expected bucket_cap_mb > 0", str(cap), "in MiB"))
    for whole in (torch.optim.Adafactor, torch.optim.LBFGS):
        wrong.refused(ZeroOptimizer, weights, whole, says=("elementwise", whole.__name__, "AdamW"))
    group = dist.new_group([1 - rank], use_local_synchronization=True)
    says = f"rank {rank} made a ZeroOptimizer for a group that it isn't in", "on the group's ranks only"
    if dist.get_rank(group) < 0:
        wrong.refused(ZeroOptimizer, weights, adamw, group=group, says=says)
    other = [nn.Parameter(torch.ones(2 + rank))]
    wrong.refused(ZeroOptimizer, other, adamw, says=("on rank 1", "parameter 0 (torch.float32, (3,), trained)"))
    optimizer = ZeroOptimizer(weights, adamw)
    wrong.refused(optimizer.add_param_group, {"params": other}, says=("all groups to ZeroOptimizer at once",))
    weights[0].sum().backward()
    wrong.refused(optimizer.step, says=(f"rank {rank} has no gradient for parameter 1 of shape (2,)", "unused_as_zero"))
    optimizer.zero_grad()
    wrong.refused(optimizer.step, says=("parameter 1 of shape (2,), 0 of shape (2,)",))
    sum(weights).sum().backward()
    wrong += raises(RuntimeError, "backward ran twice without step()", sum(weights).sum().backward)
    with optimizer.no_sync():
        wrong += raises(RuntimeError, "with optimizer.no_sync()", sum(weights).sum().backward)
    return wrong


def test_mistakes_are_named():
    assert list(launch(check_mistakes, world_size=2)) == [[]] * 2


def nothing_to_train():
    optimizer = ZeroOptimizer(nn.Linear(2, 2).requires_grad_(False).parameters(), torch.optim.AdamW)
    optimizer.step()
    return optimizer.plan, optimizer.state_bytes(), optimizer.state_dict()["state"]


def test_nothing_to_train():
    assert list(launch(nothing_to_train, world_size=2)) == [([], 0, {})] * 2


def skip_step():
    """In the second step, one rank."""
    module = nn.Linear(3, 3)
    optimizer = ZeroOptimizer(module.parameters(), torch.optim.SGD, lr=0.1)
    for step in range(3):
        module(torch.ones(1, 3)).sum().backward()
        if (dist.get_rank(), step) != (1, 1):
            optimizer.step()


def test_a_rank_that_skips_a_step_is_reported():
    with pytest.raises((HangError, RankError), match="backward ran twice without step"):
        launch(skip_step, world_size=2)


# Groups


def check_groups():
    """Two groups of two ranks train a model each."""
    wrong, rank = twin.Complaints(), dist.get_rank()
    pairs = [[0, 2], [1, 3]]
    group = [dist.new_group(pair) for pair in pairs][rank % 2]
    plain = small_gpt(pairs[rank % 2][0])
    expected = train(plain, ADAMW(two_groups(plain)), pairs[rank % 2])
    module = small_gpt(rank)
    optimizer = ZeroOptimizer(two_groups(module), torch.optim.AdamW, group=group, lr=0.01, weight_decay=0.1)
    wrong.unless(near(train(module, optimizer, [rank]), expected))
    return wrong


def test_groups():
    assert list(launch(check_groups, world_size=4)) == [[]] * 4


# Stage 3, of one layer


class Kept:
    """The elements of tensors that autograd keeps until backward, parameters left out."""

    def __init__(self):
        self.numel = 0
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor)

    def pack(self, tensor):
        self.numel += tensor.numel() * (not isinstance(tensor, nn.Parameter))
        return tensor


def check_sharded_linear(bias):
    wrong, (rank, world_size) = twin.Complaints(), rank_and_world()
    torch.manual_seed(rank)
    mine = nn.Linear(3, 5, bias, dtype=torch.float64)
    torch.manual_seed(0)
    first = nn.Linear(3, 5, bias, dtype=torch.float64)
    layer = ShardedLinear(mine)
    for value, parameter in zip(layer.gather(), first.parameters(), strict=True):
        wrong.same(value, parameter.detach(), "gathered")
    inputs = torch.randn(world_size, 2, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    sgd = torch.optim.SGD(layer.parameters(), lr=1.0), torch.optim.SGD(first.parameters(), lr=1.0)
    for _ in range(2):
        x, y = inputs[rank].clone().requires_grad_(), inputs[rank].clone().requires_grad_()
        kept = Kept()
        with kept._hooks:
            out = layer(x)
        wrong.unless(kept.numel == x.numel(), "autograd keeps", kept.numel)
        mark()
        out.square().sum().backward()
        (first(inputs).square().sum() / world_size).backward()
        wrong.unless(near(out, first(y)), "forward")
        (expected,) = torch.autograd.grad(first(y).square().sum(), y)
        wrong.unless(near(x.grad, expected), "gradient of x")
        for optimizer in sgd:
            optimizer.step()
            optimizer.zero_grad()
        for value, parameter in zip(layer.gather(), first.parameters(), strict=True):
            wrong.unless(near(value, parameter), "updated")
    wrong.unless([p.numel() for p in layer.parameters()] == [layer.plan.numel // world_size], "parameters")
    return wrong


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_sharded_linear(bias, world_size):
    assert list(launch(check_sharded_linear, bias, world_size=world_size)) == [[]] * world_size


def stage_3():
    layer = ShardedLinear(nn.Linear(8, 7))  # 63 numbers and one of padding
    mark()
    out = layer(torch.ones(1, 8))
    mark()
    out.sum().backward()


def test_stage_3_sends_half_as_much_again():
    for records in launch(stage_3, world_size=4).wire:
        forward, backward = (sum(r.bytes for r in part if r.op == "send") for part in sections(records)[1:])
        assert (forward, backward) == (64 * 4 * 3 / 4, 2 * 64 * 4 * 3 / 4)


# Elsewhere

SCRIPT = """
import sys

import torch.distributed as dist

sys.path.append(sys.argv[1])
import test_zero

dist.init_process_group("gloo")
wrong = [*test_zero.check_clipping(), *test_zero.check_state_bytes(), *test_zero.check_sharded_linear(True)]
with open(f"rank.{dist.get_rank()}", "w") as file:
    print(wrong, file=file)
dist.destroy_process_group()
"""


def test_under_torchrun_alone(tmp_path):
    """In a world that ddpkit didn't make."""
    run_script(tmp_path, SCRIPT, str(Path(__file__).parent), command=TORCHRUN, OMP_NUM_THREADS="1")
    assert [(tmp_path / f"rank.{rank}").read_text() for rank in range(2)] == ["[]\n"] * 2
