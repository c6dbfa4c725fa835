"""ddpkit.zero, fast.zero and fsdp beside their serial twin: one process with all data.

Every form of ZeroOptimizer is held to the same results, the same state and the same bytes.
"""

import contextlib
import sys
from functools import partial
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import twin
from on_ranks import on_ranks
from outside import run_script
from torch import nn
from torch.nn.utils import parameters_to_vector

import ddpkit.fast.zero
import ddpkit.zero
from ddpkit import HangError, RankError, launch, transport
from ddpkit.fast.ring import RingTransport
from ddpkit.fast.transports import SharedMemoryTransport
from ddpkit.fsdp import ShardedLinear
from ddpkit.models import GPT, mean_loss
from ddpkit.zero import shard_plan

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as functions of a notebook

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
PLAIN, FAST = ddpkit.zero.ZeroOptimizer, ddpkit.fast.zero.ZeroOptimizer
FEW_BYTES = 600 / 2**20  # a bucket for some parameters of the GPT below, not for all
VARIANTS = {  # class, MiB of a bucket, transport
    "plain": (PLAIN, FEW_BYTES, lambda: transport),
    "plain, ring": (PLAIN, FEW_BYTES, RingTransport),
    "fast": (FAST, FEW_BYTES, lambda: None),
    "fast, one bucket": (FAST, 25.0, lambda: transport),
    "fast, shared": (FAST, FEW_BYTES, SharedMemoryTransport),
}
ADAMW = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
SGD = partial(torch.optim.SGD, lr=0.3, momentum=0.9)  # AdamW would hide any factor
STEPS = 4

# Roundings of 1e-16 grow in some steps, but nowhere near the eighth digit; a wrong gradient moves a
# parameter by a good part of the learning rate, in the second or third.
HALF_THE_DIGITS = torch.finfo(torch.float64).eps ** 0.5


# A model with a tied weight, a frozen one, and lengths that divide by nothing


def small_gpt(seed, dtype=torch.float64):
    torch.manual_seed(seed)
    model = GPT(vocabulary=11, context=6, width=6, heads=2, layers=1).to(dtype)
    model.prior.zero_()
    return model


def batch(step, micro_batch, rank):
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro_batch + rank)
    return torch.randint(11, (2, 7), generator=generator).unfold(1, 6, 1).unbind(1)


def loss_of(module, step, micro_batch, ranks):
    batches = [batch(step, micro_batch, rank) for rank in ranks]
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return mean_loss(module(inputs), targets)


def two_groups(module):
    """Vectors, not decayed, after what is left; each with options of its own."""
    vectors = [parameter for parameter in module.parameters() if parameter.dim() == 1]
    rest = [parameter for parameter in module.parameters() if parameter.dim() > 1]
    return [{"params": rest, "lr": 0.02}, {"params": vectors, "weight_decay": 0.0}]


def trained_of(module):
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return parameters_to_vector(trained).detach()


def gradient_norm(module, optimizer):
    """Of the mean gradient of all parameters together."""
    if not hasattr(optimizer, "buckets"):
        trained = [p.grad for p in module.parameters() if p.requires_grad]
        return nn.utils.get_total_norm(trained)
    optimizer.synchronize()
    squared = sum(bucket.shard.grad.square().sum() for bucket in optimizer.buckets)
    dist.all_reduce(squared, group=optimizer.group)
    return squared.sqrt()


def train(module, optimizer, ranks, steps=range(STEPS), accumulation=1, clip=None, **options):
    """All trained parameters after training on these ranks' data, and each step's gradient norm."""
    norms = []
    for step in steps:
        for number, group in enumerate(optimizer.param_groups):  # from outside, as schedulers do
            group["lr"] = 0.02 / (1 + (step % 4) * (number + 1))
        optimizer.zero_grad(**options)
        for number in range(accumulation):
            last = number == accumulation - 1 and not (accumulation > 2 and step % 2)
            quiet = not last and hasattr(optimizer, "no_sync")  # now and then all of them
            with optimizer.no_sync() if quiet else contextlib.nullcontext():
                (loss_of(module, step, number, ranks) / accumulation).backward()
        norms.append(gradient_norm(module, optimizer))
        if clip:
            norms.append(clip(module, optimizer))
        optimizer.step()
    return torch.cat([trained_of(module), torch.stack(norms)])


def alone(make=ADAMW, **options):
    module = small_gpt(0)
    return train(module, make(two_groups(module)), range(dist.get_world_size()), **options)


def sharded(variant, make=ADAMW, dtype=torch.float64, group=None):
    """(module, its ZeroOptimizer); each rank begins with other weights."""
    cls, cap_mb, how = VARIANTS[variant]
    module = small_gpt(dist.get_rank(), dtype)
    return module, cls(two_groups(module), make.func, cap_mb, group, how(), **make.keywords)


# The serial twin

CASES = [  # variant, optimizer, micro-batches, set_to_none
    ("plain", ADAMW, 3, True),
    ("plain", SGD, 1, False),
    ("plain, ring", SGD, 3, False),
    ("fast", ADAMW, 1, False),
    ("fast", SGD, 3, True),
    ("fast, one bucket", SGD, 1, True),
    ("fast, shared", ADAMW, 3, False),
    ("fast, shared", SGD, 1, True),
]


@on_ranks(1, 2, 3, 4)
def test_trained_like_one_process(check):
    for variant, make, accumulation, set_to_none in CASES:
        what = f"{variant}, {make.func.__name__}, {accumulation} micro-batches"
        expected = alone(make, accumulation=accumulation)
        module, optimizer = sharded(variant, make)
        options = {"accumulation": accumulation, "set_to_none": set_to_none}
        got = train(module, optimizer, [dist.get_rank()], **options)
        check.close(got, expected, HALF_THE_DIGITS, what)
        check.same_on_all(got, what)
        check.same_on_all(module.positions, what, "frozen")
        check.unless(module.head.weight is module.tokens.weight, what, "tied")
        many = len(optimizer.buckets) > 3
        check.unless(many == (variant != "fast, one bucket"), what, len(optimizer.buckets))


@on_ranks(2)
def test_zero_grad_forgets_all_gradients(check):
    """Also those that are sent, and those that added up in no_sync, whoever owns them."""
    rank, expected = dist.get_rank(), alone(SGD, accumulation=2)
    for variant in VARIANTS:
        for quiet in (True, False):
            module, optimizer = sharded(variant, SGD)
            with optimizer.no_sync() if quiet else contextlib.nullcontext():
                loss_of(module, 8, 8, [rank]).backward()
            got = train(module, optimizer, [rank], accumulation=2, set_to_none=quiet)
            check.close(got, expected, HALF_THE_DIGITS, variant, "no_sync", quiet)


OPTIMIZERS = {
    "fused AdamW": partial(torch.optim.AdamW, lr=0.01, fused=True, amsgrad=True),
    "Nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.05, initial_accumulator_value=0.1),
    "NAdam": partial(torch.optim.NAdam, lr=0.01),
    "ASGD": partial(torch.optim.ASGD, lr=0.05, t0=3),
}


@on_ranks(2)
def test_any_elementwise_optimizer_and_scheduler(check):
    def scheduled(module, optimizer, ranks):
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = optimizer.step(partial(backward, module, step, ranks))
            check.unless(loss > 0, "the closure's loss")
            scheduler.step()
        return trained_of(module)

    def backward(module, step, ranks):
        loss = loss_of(module, step, 0, ranks)
        loss.backward()
        return loss

    for name, make in OPTIMIZERS.items():
        module = small_gpt(0)
        expected = scheduled(module, make(two_groups(module)), range(2))
        got = scheduled(*sharded("plain", make), [dist.get_rank()])
        check.close(got, expected, HALF_THE_DIGITS, name)


def clip_plain(max_norm, module, _):
    return nn.utils.clip_grad_norm_(module.parameters(), max_norm)


def clip_ours(max_norm, _, optimizer):
    return optimizer.clip_grad_norm_(max_norm)


@on_ranks(3)
def test_clipping_by_the_norm_of_all_shards(check):
    for max_norm in (0.05, 100.0):
        expected = alone(SGD, accumulation=2, clip=partial(clip_plain, max_norm))
        for variant in ("fast", "fast, shared"):
            ours = {"accumulation": 2, "clip": partial(clip_ours, max_norm)}
            got = train(*sharded(variant, SGD), [dist.get_rank()], **ours)
            check.close(got, expected, HALF_THE_DIGITS, variant, max_norm)


@on_ranks(4)
def test_groups_of_ranks(check):
    """Two groups of two ranks train a model each."""
    rank, pairs = dist.get_rank(), [[0, 2], [1, 3]]
    ranks, group = pairs[rank % 2], [dist.new_group(pair) for pair in pairs][rank % 2]
    plain = small_gpt(ranks[0])
    expected = train(plain, ADAMW(two_groups(plain)), ranks)
    for variant in VARIANTS:
        got = train(*sharded(variant, group=group), [rank])
        check.close(got, expected, HALF_THE_DIGITS, variant)


# Who owns what


def test_shard_plan():
    assert shard_plan([5, 3], 2) == [[(0, 0, 4)], [(0, 4, 5), (1, 0, 3)]]
    assert shard_plan([5, 6], 3) == [[(0, 0, 4)], [(0, 4, 5), (1, 0, 3)], [(1, 3, 6)]]
    for world_size in (1, 2, 3, 4, 7):
        numels = [1, 100, 0, 17, 64, 5]
        plan = shard_plan(numels, world_size)
        owned = [(p, at) for shard in plan for p, start, stop in shard for at in range(start, stop)]
        assert owned == [(p, at) for p, numel in enumerate(numels) for at in range(numel)]
        sizes = [sum(stop - start for _, start, stop in shard) for shard in plan]
        assert max(sizes) == sizes[0] == -(-sum(numels) // world_size)


@on_ranks(1, 2, 3, 4)
def test_state_is_k_psi_over_w(check):
    world_size = dist.get_world_size()
    cases = [(variant, torch.float32, 8) for variant in VARIANTS]
    cases += [(variant, torch.bfloat16, 12) for variant in VARIANTS if variant.startswith("fast")]
    for variant, dtype, k in cases:
        module, optimizer = sharded(variant, dtype=dtype)
        train(module, optimizer, [dist.get_rank()], range(2))
        shards = [bucket.shard for bucket in optimizer.buckets]
        states = [b.optimizer.state[b.shard] for b in optimizer.buckets]
        kept = [value for state in states for value in state.values()]
        owned = sum(bucket.numel for bucket in optimizer.buckets) / world_size
        padding = owned * world_size - len(trained_of(module))
        check.unless(0 <= padding < world_size * len(shards), variant, "padding", padding)
        check.same(optimizer.state_bytes(), k * owned, variant, dtype, "state_bytes")
        check.same(sum(v.nbytes for v in kept if v.dim()), 8 * owned, variant, dtype, "moments")
        check.same(sum(not v.dim() for v in kept), len(shards), variant, "counters of steps")
        check.same(optimizer.state[next(module.parameters())], {}, variant, "whole parameters")
        storage = {shard.untyped_storage().data_ptr() for shard in shards}
        views = {p.untyped_storage().data_ptr() for p in module.parameters() if p.requires_grad}
        check.same(storage == views, k == 8, variant, dtype, "shards are views of the parameters")


# The wire


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


def four_sections():
    """Of each variant: a step of one micro-batch, of three, and gradients that are thrown away."""
    sizes = []
    for variant in VARIANTS:
        module, optimizer = sharded(variant, dtype=torch.float32)
        for accumulation in (1, 3):
            mark()
            loss = partial(loss_of, module, 0, ranks=[dist.get_rank()])
            with optimizer.no_sync():
                for number in range(1, accumulation):
                    loss(number).backward()
            loss(0).backward()
            optimizer.step()
        mark()
        with optimizer.no_sync():
            loss(0).backward()
        optimizer.zero_grad()
        mark()
        sizes.append(sum(bucket.flat.nbytes for bucket in optimizer.buckets))
    return sizes


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_bytes_on_the_wire(world_size):
    """The same in all forms; torch's collectives are recorded as a whole, and not hop by hop."""
    run = launch(four_sections, world_size=world_size, backend="gloo")
    for records, sizes in zip(run.wire, run, strict=True):
        parts = sections(records)[1:]
        for number, (variant, nbytes) in enumerate(zip(VARIANTS, sizes, strict=True)):
            once, accumulated, thrown_away = parts[4 * number : 4 * number + 3]
            part = nbytes / world_size
            for step in (once, accumulated):
                sent = {op: sum(r.bytes for r in step if r.op == op) for op in {r.op for r in step}}
                sent.pop("recv", None)
                if VARIANTS[variant][2]() is transport:
                    assert sent == {"reduce_scatter": nbytes, "all_gather": part}, variant
                elif "shared" in variant:
                    assert sent == {}
                else:
                    assert sent == {"send": 2 * (world_size - 1) * part}, variant
            assert thrown_away == [], variant


class TwoLayers(nn.Module):
    """Passed in any order."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(16, 16, bias=False) for name in "abc"})

    def forward(self, x, way):
        for name in way:
            x = self.layers[name](x)
        return x


@on_ranks(2)
def test_all_ranks_send_in_one_order(check):
    """Ranks whose gradients come in another order add up what belongs together."""
    rank = dist.get_rank()
    for variant, (cls, _, how) in VARIANTS.items():
        torch.manual_seed(0)
        module = TwoLayers().double()
        before = [parameter.detach().clone() for parameter in module.parameters()]
        optimizer = cls(module.parameters(), torch.optim.SGD, 1e-6, None, how(), lr=1.0)
        x = torch.arange(16.0).double()
        losses = [module(x + r, way).sum() for r, way in enumerate(("abc", "cba"))]
        grads = [torch.autograd.grad(loss, list(module.parameters())) for loss in losses]
        module(x + rank, ("abc", "cba")[rank]).sum().backward()
        optimizer.step()
        for was, parameter, *each in zip(before, module.parameters(), *grads, strict=True):
            check.close(was - parameter, sum(each) / 2, 1e-9, variant)


def sent_before_each_gradient(cls, how):
    """How many calls were made before the gradients of the layers were ready, one by one."""
    module = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(4)])
    optimizer = cls(module.parameters(), torch.optim.SGD, 1 / 2**20, None, how(), lr=0.1)
    sent, records = [], dist.group.WORLD.recorder.records

    def look(parameter):
        sent.append(sum(record.op in ("send", "reduce_scatter") for record in records))

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(look)
    before = sum(record.op == "send" for record in records)
    module(torch.ones(1, 16)).sum().backward()
    optimizer.step()
    return [number - before for number in sent]


def test_buckets_leave_while_backward_goes_on():
    for variant in ("plain", "fast"):
        cls, _, how = VARIANTS[variant]
        got = launch(sent_before_each_gradient, cls, how, world_size=2, backend="gloo")
        assert list(got) == [[1, 2, 3, 4]] * 2, variant


# Half precision


@on_ranks(2)
def test_half_precision_has_a_master_copy(check):
    """Against master copies by hand, to the bit: two ranks' sum is the same in either order.

    A learning rate of 1e-4 is less than the spacing of bf16 at most weights: without a copy,
    nothing would move.
    """
    rank = dist.get_rank()
    for variant, dtype in (("fast", torch.bfloat16), ("fast, shared", torch.float16)):
        plain = small_gpt(0, dtype)
        trained = [parameter for parameter in plain.parameters() if parameter.requires_grad]
        masters = [nn.Parameter(parameter.detach().float()) for parameter in trained]
        adamw = torch.optim.AdamW(masters, lr=1e-4)
        module = small_gpt(rank, dtype)
        cls, cap_mb, how = VARIANTS[variant]
        optimizer = cls(module.parameters(), torch.optim.AdamW, cap_mb, None, how(), lr=1e-4)
        for step in range(4):
            shares = []
            for r in range(2):
                loss_of(plain, step, 0, [r]).backward()
                shares.append([parameter.grad / 2 for parameter in trained])
                plain.zero_grad()
            for master, *each in zip(masters, *shares, strict=True):
                master.grad = twin.total(each).float()
            adamw.step()
            for parameter, master in zip(trained, masters, strict=True):
                parameter.data.copy_(master)
            loss_of(module, step, 0, [rank]).backward()
            optimizer.step()
            check.same(trained_of(module), trained_of(plain), variant, "step", step)
        saved = optimizer.state_dict()["state"]
        numbers = [number for number, p in enumerate(module.parameters()) if p.requires_grad]
        for number, master in zip(numbers, masters, strict=True):
            check.same(saved[number]["master"], master.detach(), variant, "saved", number)


@on_ranks(2)
def test_shards_can_be_unscaled_and_steps_left_out(check):
    """A loss scaler's way, with gradients that overflowed in between; and twice synchronized."""
    rank = dist.get_rank()
    for variant, dtype in (("plain", torch.float64), ("fast", torch.bfloat16)):
        (plain, theirs), (module, optimizer) = (
            sharded(variant, SGD, dtype),
            sharded(variant, SGD, dtype),
        )
        for step in range(3):
            loss_of(plain, step, 0, [rank]).backward()
            theirs.step()
            (float("inf") * loss_of(module, step, 1, [rank])).backward()
            optimizer.synchronize()
            finite = [bool(b.shard.grad.isfinite().all()) for b in optimizer.buckets]
            check.unless(not all(finite), variant, "no overflow")
            optimizer.zero_grad()
            (1024 * loss_of(module, step, 0, [rank])).backward()
            optimizer.synchronize()
            for bucket in optimizer.buckets:
                bucket.shard.grad /= 1024
            optimizer.step()
            check.close(trained_of(module), trained_of(plain), HALF_THE_DIGITS, variant, step)


# Saved and loaded


def save(path, dtype):
    """Train, save, train on; what came out. All ranks have all data: worlds of any size agree."""
    module, optimizer = sharded("fast", dtype=dtype)
    train(module, optimizer, range(4), range(3))
    saved = {"module": module.state_dict(), "optimizer": optimizer.state_dict()}
    if dist.get_rank() == 0:
        torch.save(saved, path)
    return train(module, optimizer, range(4), range(3, 6))


def load(path, dtype, variant):
    """Load into another model with other options, and train on; that and what is saved again."""
    saved = torch.load(path)
    module, optimizer = sharded(variant, dtype=dtype)
    train(module, optimizer, range(4), range(7, 8))
    module.load_state_dict(saved["module"])
    optimizer.load_state_dict(saved["optimizer"])
    again = optimizer.state_dict()
    return train(module, optimizer, range(4), range(3, 6)), again


def load_plain(path):
    saved, module = torch.load(path), small_gpt(5)
    optimizer = ADAMW(two_groups(module))
    module.load_state_dict(saved["module"])
    optimizer.load_state_dict(saved["optimizer"])
    return train(module, optimizer, range(4), range(3, 6))


def test_saved_on_four_ranks_loads_on_fewer_and_into_adamw(tmp_path):
    path, near = tmp_path / "saved", {"rtol": 0, "atol": HALF_THE_DIGITS}
    expected = launch(save, path, torch.float64, world_size=4)[0]
    whole = torch.load(path)["optimizer"]
    for world_size, into in ((4, "fast"), (2, "fast, shared"), (1, "fast, one bucket")):
        for got, again in launch(load, path, torch.float64, into, world_size=world_size):
            torch.testing.assert_close(got, expected, **near)
            torch.testing.assert_close(again, whole, rtol=0, atol=0)
    torch.testing.assert_close(launch(load_plain, path, world_size=1)[0], expected, **near)


def test_half_precision_is_saved_with_its_master_copies(tmp_path):
    expected = launch(save, tmp_path / "saved", torch.bfloat16, world_size=2)[0]
    for got, _ in launch(load, tmp_path / "saved", torch.bfloat16, "fast", world_size=2):
        assert torch.equal(got, expected)


@on_ranks(3)
def test_a_plain_optimizers_state_loads(check):
    everyone, plain = range(3), small_gpt(0)
    adamw = ADAMW(two_groups(plain))
    train(plain, adamw, everyone, range(3))
    module, optimizer = sharded("fast")
    module.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(adamw.state_dict())
    expected = train(plain, adamw, everyone, range(3, 6))
    check.close(train(module, optimizer, everyone, range(3, 6)), expected, HALF_THE_DIGITS)
    counted = adamw.state_dict()
    next(iter(counted["state"].values()))["step"] += 1
    _, one = sharded("fast, one bucket")
    check.refused(one.load_state_dict, counted, says=("the same 'step'", "share a bucket"))
    other = {**counted, "param_groups": counted["param_groups"][:1]}
    check.refused(one.load_state_dict, other, says="groups")


# Mistakes


@on_ranks(2)
def test_mistakes_are_named(check):
    rank = dist.get_rank()
    for cls in (PLAIN, FAST):
        weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
        adamw = torch.optim.AdamW
        for cap in (0, float("nan")):
            says = ("expected bucket_cap_mb > 0", str(cap), "in MiB")
            check.refused(cls, weights, adamw, cap, says=says)
        group = dist.new_group([1 - rank], use_local_synchronization=True)
        if dist.get_rank(group) < 0:
            check.refused(cls, weights, adamw, group=group, says=("ZeroOptimizer", "isn't in"))
        other = [nn.Parameter(torch.ones(2 + rank))]
        says = ("rank 1", "parameter 0 (torch.float32, (3,), trained)")
        check.refused(cls, other, adamw, says=says)
        optimizer = cls(weights, adamw)
        weights[0].sum().backward()
        says = (f"rank {rank} has no gradient for parameters of (2,)", "Freeze")
        check.refused(optimizer.step, says=says)
        optimizer.zero_grad()
        sum(weights).sum().backward()
        twice = partial(check.refused, sum(weights).sum().backward, error=RuntimeError)
        twice(says=("backward ran twice", "no_sync"))
        optimizer.zero_grad()
        optimizer.state_bytes()
    for whole in (torch.optim.Adafactor, torch.optim.LBFGS):
        check.refused(FAST, weights, whole, says=("elementwise", whole.__name__, "AdamW"))
    check.refused(optimizer.add_param_group, {"params": other}, says="all groups")
    flat = torch.zeros(2)
    check.refused(SharedMemoryTransport().start_all_gather, flat, says="zeros made")


def nothing_to_train(cls):
    optimizer = cls(nn.Linear(2, 2).requires_grad_(False).parameters(), torch.optim.AdamW)
    optimizer.step()
    return optimizer.state_bytes(), optimizer.state_dict()["state"]


def skip_step():
    """In the second step, one rank."""
    module = nn.Linear(3, 3)
    optimizer = PLAIN(module.parameters(), torch.optim.SGD, lr=0.1)
    for step in range(3):
        module(torch.ones(1, 3)).sum().backward()
        if (dist.get_rank(), step) != (1, 1):
            optimizer.step()


def test_nothing_to_train_and_a_rank_that_skips_a_step():
    for cls in (PLAIN, FAST):
        assert list(launch(nothing_to_train, cls, world_size=2)) == [(0, {})] * 2
    with pytest.raises((HangError, RankError), match="backward ran twice"):
        launch(skip_step, world_size=2)


# Stage 3, of one layer


class Kept:
    """The elements of tensors that autograd keeps until backward, parameters left out."""

    def __init__(self):
        self.numel = 0
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor)

    def pack(self, tensor):
        self.numel += 0 if isinstance(tensor, nn.Parameter) else tensor.numel()
        return tensor


@on_ranks(1, 2, 3)
def test_sharded_linear(check):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for bias, how in ((True, transport), (False, RingTransport())):
        torch.manual_seed(rank)
        layer = ShardedLinear(nn.Linear(3, 5, bias, dtype=torch.float64), transport=how)
        torch.manual_seed(0)
        first = nn.Linear(3, 5, bias, dtype=torch.float64)
        check.same(layer.gather(), [p.detach() for p in first.parameters()], "gathered")
        generator = torch.Generator().manual_seed(9)
        inputs = torch.randn(world_size, 2, 4, 3, dtype=torch.float64, generator=generator)
        sgd = [torch.optim.SGD(each.parameters(), lr=1.0) for each in (layer, first)]
        for _ in range(2):
            x, y = (inputs[rank].clone().requires_grad_() for _ in range(2))
            kept = Kept()
            with kept.hooks:
                out = layer(x)
            check.same(kept.numel, x.numel(), "autograd keeps")
            out.square().sum().backward()
            (first(inputs).square().sum() / world_size).backward()
            check.close(out, first(y), HALF_THE_DIGITS, "forward")
            (expected,) = torch.autograd.grad(first(y).square().sum(), y)
            check.close(x.grad, expected, HALF_THE_DIGITS, "gradient of x")
            for optimizer in sgd:
                optimizer.step()
                optimizer.zero_grad()
            for value, parameter in zip(layer.gather(), first.parameters(), strict=True):
                check.close(value, parameter, HALF_THE_DIGITS, "updated")
        numel = -(-sum(p.numel() for p in first.parameters()) // world_size)
        check.same([p.numel() for p in layer.parameters()], [numel], "kept")


def stage_3():
    layer = ShardedLinear(nn.Linear(8, 7), transport=RingTransport())  # 63 numbers, one of padding
    mark()
    out = layer(torch.ones(1, 8))
    mark()
    out.sum().backward()


def test_stage_3_sends_half_as_much_again():
    for records in launch(stage_3, world_size=4, backend="gloo").wire:
        parts = sections(records)[1:]
        sent = [sum(r.bytes for r in part if r.op == "send") for part in parts]
        assert sent == [64 * 4 * 3 / 4, 2 * 64 * 4 * 3 / 4]


# Elsewhere

SCRIPT = """
import sys

import torch.distributed as dist

sys.path.append(sys.argv[1])
import test_zero
import twin

dist.init_process_group("gloo")
wrong = twin.Complaints()
expected = test_zero.alone(test_zero.SGD)
for variant in ("plain", "fast, shared"):
    got = test_zero.train(*test_zero.sharded(variant, test_zero.SGD), [dist.get_rank()])
    wrong.close(got, expected, test_zero.HALF_THE_DIGITS, variant)
with open(f"rank.{dist.get_rank()}", "w") as file:
    print(wrong, file=file)
dist.destroy_process_group()
"""


def test_under_torchrun_alone(tmp_path):
    """In a world that ddpkit didn't make."""
    folder = str(Path(__file__).parent)
    run_script(tmp_path, SCRIPT, folder, command=TORCHRUN, OMP_NUM_THREADS="1")
    assert [(tmp_path / f"rank.{rank}").read_text() for rank in range(2)] == ["[]\n"] * 2
