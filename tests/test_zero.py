"""ddpkit.zero, fast.zero and fsdp; that they train as one process does is in test_training."""

import contextlib
import copy
from functools import partial

import torch
import torch.distributed as dist
import training_cases as cases
import twin
from attention_cases import randn
from on_ranks import on_ranks
from torch import nn

from ddpkit import launch
from ddpkit.fast.ring import RingTransport
from ddpkit.fast.transports import SharedMemoryTransport
from ddpkit.fast.zero import ZeroOptimizer as FastZero
from ddpkit.fsdp import ShardedLinear
from ddpkit.zero import ZeroOptimizer


def sharded(way, make=cases.ADAMW, dtype=torch.float64):
    """What `prepare` returns; each rank begins with other weights."""
    return cases.prepare(way, cases.small_gpt(dist.get_rank(), dtype), make)


# Beside plain training


@on_ranks(2)
def test_zero_grad_forgets_all_gradients(check):
    """Also those that are sent, and those that added up in no_sync, whoever owns them."""
    rank, expected = dist.get_rank(), cases.alone("GPT", steps=range(1))
    for way in cases.ZEROS:
        for quiet in (True, False):
            prepared = module, _, optimizer, _ = sharded(way, cases.SGD)
            with optimizer.no_sync() if quiet else contextlib.nullcontext():
                cases.backward("GPT", module, None, [rank], 8)
            got = cases.train("GPT", prepared, [rank], set_to_none=quiet, steps=range(1))
            check.close(got, expected, cases.HALF_THE_DIGITS, way, "no_sync", quiet)


OPTIMIZERS = {
    "fused AdamW": partial(torch.optim.AdamW, lr=0.01, fused=True, amsgrad=True),
    "Nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.05, initial_accumulator_value=0.1),
    "NAdam": partial(torch.optim.NAdam, lr=0.01),
    "ASGD": partial(torch.optim.ASGD, lr=0.05, t0=3),
}


@on_ranks(2)
def test_any_elementwise_optimizer(check):
    """`train` changes learning rates as schedulers do. A step with a closure returns its loss."""
    for name, make in OPTIMIZERS.items():
        expected = cases.alone("GPT", make)
        check.close(cases.together("zero", "GPT", make), expected, cases.HALF_THE_DIGITS, name)
    module, _, optimizer, _ = sharded("zero")

    def closure():
        loss = cases.gpt_loss(module, [cases.gpt_batch()])
        loss.backward()
        return loss

    check.unless(optimizer.step(closure) > 0, "the closure's loss")


@on_ranks(3)
def test_clipping_by_the_norm_of_all_shards(check):
    def by_torch(module, _):
        return nn.utils.clip_grad_norm_(module.parameters(), max_norm)

    def ours(_, optimizer):
        return optimizer.clip_grad_norm_(max_norm)

    for max_norm in (0.05, 100.0):
        expected = cases.alone("GPT", micro_batches=2, clip=by_torch)
        for way in ("fast zero", "fast zero, shared"):
            got = cases.train(
                "GPT", sharded(way, cases.SGD), [dist.get_rank()], micro_batches=2, clip=ours
            )
            check.close(got, expected, cases.HALF_THE_DIGITS, way, max_norm)


# Who owns what


@on_ranks(2, 3)
def test_state_is_k_psi_over_w(check, world_size):
    kinds = [(way, torch.float32, 8) for way in cases.ZEROS]
    kinds += [(way, torch.bfloat16, 12) for way in cases.ZEROS if way.startswith("fast")]
    for way, dtype, k in kinds:
        prepared = module, _, optimizer, _ = sharded(way, dtype=dtype)
        cases.train("GPT", prepared, [dist.get_rank()], steps=range(2))
        shards = [bucket.shard for bucket in optimizer.buckets]
        states = [b.optimizer.state[b.shard] for b in optimizer.buckets]
        kept = [value for state in states for value in state.values()]
        owned = sum(bucket.numel for bucket in optimizer.buckets) // world_size
        trained = cases.trained_of(module).values()
        padding = owned * world_size - sum(p.numel() for p in trained)
        check.unless(0 <= padding < world_size * len(shards), way, "padding", padding)
        check.same(optimizer.state_bytes(), k * owned, way, dtype, "state_bytes")
        check.same(sum(v.nbytes for v in kept if v.dim()), 8 * owned, way, dtype, "moments")
        check.same(sum(not v.dim() for v in kept), len(shards), way, "counters of steps")
        storage = {shard.untyped_storage().data_ptr() for shard in shards}
        views = {p.untyped_storage().data_ptr() for p in trained}
        check.same(storage == views, k == 8, way, dtype, "shards are views of the parameters")


# Half precision


@on_ranks(2)
def test_half_precision_has_a_master_copy(check, rank):
    """Against master copies by hand, to the bit: two ranks' sum is the same in either order.

    A learning rate of 1e-4 is less than the spacing of bf16 at most weights: without a copy,
    nothing would move.
    """
    for way, dtype in (("fast zero", torch.bfloat16), ("fast zero, shared", torch.float16)):
        plain = cases.small_gpt(0, dtype)
        trained = list(cases.trained_of(plain).values())
        masters = [nn.Parameter(parameter.detach().float()) for parameter in trained]
        adamw = torch.optim.AdamW(masters, lr=1e-4)
        module = cases.small_gpt(rank, dtype)
        cls, cap_mb, how = cases.ZEROS[way]
        optimizer = cls(module.parameters(), torch.optim.AdamW, cap_mb, None, how(), lr=1e-4)
        for step in range(3):
            shares = []
            for r in range(2):
                cases.backward("GPT", plain, None, [r], step)
                shares.append([parameter.grad / 2 for parameter in trained])
                plain.zero_grad()
            for master, *each in zip(masters, *shares, strict=True):
                master.grad = twin.total(each).float()
            adamw.step()
            for parameter, master in zip(trained, masters, strict=True):
                parameter.data.copy_(master)
            cases.backward("GPT", module, None, [rank], step)
            optimizer.step()
            check.same(cases.weights_of(module), cases.weights_of(plain), way, "step", step)
        saved = optimizer.state_dict()["state"]
        numbers = [number for number, p in enumerate(module.parameters()) if p.requires_grad]
        for number, master in zip(numbers, masters, strict=True):
            check.same(saved[number]["master"], master.detach(), way, "saved", number)


# Saved and loaded: all ranks have all data, so that worlds of any size agree


def save(path, dtype):
    """Train, save, train on; what came out."""
    prepared = module, _, optimizer, _ = sharded("fast zero", dtype=dtype)
    cases.train("GPT", prepared, range(4))
    saved = {"module": module.state_dict(), "optimizer": optimizer.state_dict()}
    if dist.get_rank() == 0:
        torch.save(saved, path)
    return cases.train("GPT", prepared, range(4), steps=range(3, 6))


def load(path, dtype, way):
    """Load into another model with other options, and train on; that and what is saved again."""
    saved, prepared = torch.load(path), sharded(way, dtype=dtype)
    module, _, optimizer, _ = prepared
    cases.train("GPT", prepared, range(4), steps=range(7, 8))
    module.load_state_dict(saved["module"])
    optimizer.load_state_dict(saved["optimizer"])
    again = copy.deepcopy(optimizer.state_dict())
    return cases.train("GPT", prepared, range(4), steps=range(3, 6)), again


def test_saved_on_four_ranks_loads_on_fewer_and_into_adamw(tmp_path):
    path, near = tmp_path / "saved", {"rtol": 0, "atol": cases.HALF_THE_DIGITS}
    expected = launch(save, path, torch.float64, world_size=4)[0]
    whole = torch.load(path)["optimizer"]
    for world_size, way in ((3, "fast zero, shared"), (1, "fast zero, one bucket"), (1, None)):
        for got, again in launch(load, path, torch.float64, way, world_size=world_size):
            torch.testing.assert_close(got, expected, **near)
            torch.testing.assert_close(again, whole, rtol=0, atol=0)


def test_half_precision_is_saved_with_its_master_copies(tmp_path):
    expected = launch(save, tmp_path / "saved", torch.bfloat16, world_size=2)[0]
    for got, _ in launch(load, tmp_path / "saved", torch.bfloat16, "fast zero", world_size=2):
        assert torch.equal(got, expected)


@on_ranks(3)
def test_a_plain_optimizers_state_loads(check):
    plain = module, _, adamw, _ = cases.prepare(None, cases.small_gpt(), cases.ADAMW)
    cases.train("GPT", plain, range(3))
    ours = mine, _, optimizer, _ = sharded("fast zero")
    mine.load_state_dict(module.state_dict())
    optimizer.load_state_dict(adamw.state_dict())
    expected, got = (
        cases.train("GPT", each, range(3), steps=range(3, 6)) for each in (plain, ours)
    )
    check.close(got, expected, cases.HALF_THE_DIGITS)
    counted = adamw.state_dict()
    one = sharded("fast zero, one bucket")[2]
    for number in counted["state"]:  # as if it had been frozen
        others = {other: state for other, state in counted["state"].items() if other != number}
        says = "state of all parameters that share a bucket, or of none, got"
        check.refused(one.load_state_dict, {**counted, "state": others}, says=says)
    next(iter(counted["state"].values()))["step"] += 1
    check.refused(one.load_state_dict, counted, says=("the same 'step'", "share a bucket"))
    other = {**counted, "param_groups": counted["param_groups"][:1]}
    check.refused(one.load_state_dict, other, says="groups")


@on_ranks(2)
def test_mistakes_are_named(check):
    rank, adamw = dist.get_rank(), torch.optim.AdamW
    other = [nn.Parameter(torch.ones(2 + rank))]
    for cls in (ZeroOptimizer, FastZero):
        says = ("rank 1", "parameter 0 (torch.float32, (3,), trained)")
        check.refused(cls, other, adamw, says=says)
    for whole in (torch.optim.Adafactor, torch.optim.LBFGS):
        check.refused(FastZero, other, whole, says=("elementwise", whole.__name__, "AdamW"))
    optimizer = FastZero([nn.Parameter(torch.ones(2))], adamw)
    check.refused(optimizer.add_param_group, {"params": other}, says="all groups")
    way = SharedMemoryTransport()
    check.refused(way.start_all_gather, torch.zeros(2), says="zeros made, got one of this rank's")
    part = way.zeros(4, torch.float32)[:2]
    check.refused(way.start_reduce_scatter, part, says="zeros made, got a part of one")


# Stage 3, of one layer


@on_ranks(2, 3)
def test_sharded_linear_without_bias_over_our_ring(check, rank, world_size):
    """It begins with the first rank's values. With a bias, over torch's: its exercise."""
    torch.manual_seed(rank)
    layer = ShardedLinear(nn.Linear(3, 5, bias=False).double(), transport=RingTransport())
    torch.manual_seed(0)
    first, inputs = nn.Linear(3, 5, bias=False).double(), randn(world_size, 2, 4, 3)
    check.same(layer.gather(), [first.weight.detach()], "gathered")
    layer(inputs[rank]).square().sum().backward()
    kept = layer.shard.grad.untyped_storage().nbytes()
    check.same(kept, layer.shard.nbytes, "bytes of the gradient")
    (first(inputs).square().sum() / world_size).backward()
    for each in (layer, first):
        torch.optim.SGD(each.parameters(), lr=1.0).step()
    check.close(layer.gather()[0], first.weight, cases.HALF_THE_DIGITS, "updated")
    out, expected = layer(inputs[rank]), first(inputs[rank])
    check.close(out, expected, cases.HALF_THE_DIGITS * (1 + expected.abs()), "forward")
