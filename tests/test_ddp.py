"""ddpkit.ddp, data_parallel and fast.buckets; they train as one process does in test_training."""

import itertools
from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed as dist
import training_cases as cases
from on_ranks import on_ranks
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ddpkit.batch_norm import convert
from ddpkit.data_parallel import join
from ddpkit.ddp import BucketedDDP, FlatDDP, NaiveDDP, plan_buckets
from ddpkit.fast import buckets as fast
from ddpkit.models import mean_loss
from ddpkit.tools.text import Batches

ALL = cases.WRAPPERS | {"bf16": partial(cases.FAST, wire_dtype=torch.bfloat16)}


def all_tensors(module) -> dict[str, torch.Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


def check_means(check, module, parts, *what):
    """Every gradient is the mean of these of the ranks."""
    for name, parameter in cases.trained_of(module).items():
        shares = [part[name] / len(parts) for part in parts]
        check.near(parameter.grad, shares, *what, name)


# The start


@on_ranks(1, 3)
def test_replicas_are_made_equal(check, rank):
    for (name, wrap), build in itertools.product(ALL.items(), (cases.small_gpt, cases.small_mlp)):
        module, firsts = build(seed=rank), all_tensors(build(seed=0))
        if build is cases.small_mlp:
            module[1].num_batches_tracked += 3 * rank
        addresses = [tensor.data_ptr() for tensor in all_tensors(module).values()]
        records = cases.sent_by(lambda module=module, wrap=wrap: wrap(module))
        sent = [record.bytes for record in records if record.op == "broadcast"]
        check.same(sent[: len(firsts)], [t.nbytes for t in firsts.values()], name, "sent")
        check.same(all_tensors(module), firsts, name)
        kept = [tensor.data_ptr() for tensor in all_tensors(module).values()]
        check.same(kept, addresses, name, "the same tensors")


class Two(nn.Module):
    """Two tensors of the same size, a parameter and a parameter or a buffer."""

    def __init__(self, names=("one", "two"), dtype=torch.float32, trained=True, buffer=False, n=2):
        super().__init__()
        for name in names[:1] if buffer else names:
            parameter = nn.Parameter(torch.ones(n, 6 // n, dtype=dtype), requires_grad=trained)
            self.register_parameter(name, parameter)
        if buffer:
            self.register_buffer(names[1], torch.ones(2, 3))


@on_ranks(3)
def test_other_modules_are_refused_on_every_rank(check, rank):
    differences = [{"names": names} for names in (("one", "three"), ("one",), ("two", "one"))]
    differences += [{"n": 3}, {"dtype": torch.float64}, {"trained": False}, {"buffer": True}]
    for difference, odd in itertools.product(differences, (0, 1)):
        module = Two(**difference if rank == odd else {})
        says = "expected the same module on every rank, got", " on rank 1, "
        check.refused(NaiveDDP, module, says=says)


# Gradients of all kinds


class Mixed(nn.Module):
    """Parameters of five dtypes, empty, without dimension, or with axes in another order."""

    def __init__(self):
        super().__init__()
        half = torch.bfloat16, torch.float16
        dtypes = [torch.float32, torch.float64, torch.complex64, *half]
        self.many = nn.ParameterList(torch.randn(7).to(dtype) for dtype in dtypes * 2)
        self.scalar = nn.Parameter(torch.randn(()))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.turned = nn.Parameter(torch.randn(3, 4).T)
        image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
        self.image = nn.Parameter(image)
        self.register_buffer("flags", torch.rand(5) > 0.5)
        self.register_buffer("count", torch.tensor(dist.get_rank()))

    def forward(self, scale):
        return sum((p.abs() ** 2).sum().double() * scale for p in self.parameters())


@on_ranks(2)
def test_dtypes_and_layouts(check, rank, world_size):
    """Each gradient is 2 · scale · parameter: a rounding or two of its dtype away."""
    for name, wrap in cases.WRAPPERS.items():
        torch.manual_seed(rank)
        module = Mixed()
        model = wrap(module)
        for tensor_name, tensor in all_tensors(module).items():
            check.same_on_all(tensor, name, tensor_name)
        for step in range(3):
            model(float(step + 2**rank)).backward()
            model.synchronize()
            scale = sum(step + 2**r for r in range(world_size)) / world_size
            for parameter_name, parameter in module.named_parameters():
                what = name, step, parameter_name
                close = torch.allclose(parameter.grad, 2 * scale * parameter.detach(), rtol=0.02)
                check.unless(close and parameter.grad.dtype == parameter.dtype, *what)
                check.same_on_all(parameter.grad, *what)
            model.zero_grad(set_to_none=step == 0)


# Backward twice


@on_ranks(2)
def test_reentrant_checkpoints_hand_over_a_weights_gradient_in_parts(check):
    says = "backward ran twice without synchronize()", "use_reentrant=False"
    for (name, wrap), use_reentrant in itertools.product(cases.IN_BACKWARD.items(), (False, True)):
        x, model = torch.ones(1, 3, requires_grad=True), wrap(nn.Linear(3, 3))
        for _ in range(2):
            x = checkpoint(model, x, use_reentrant=use_reentrant)
        if use_reentrant:
            check.refused(x.sum().backward, says=says, error=RuntimeError)
        else:
            x.sum().backward()
            model.synchronize()
            check.same_on_all(model.module.weight.grad, name)


@on_ranks(2)
def test_backward_twice_is_fine_where_nothing_is_on_its_way(check):
    for wrap in (NaiveDDP, FlatDDP):
        model, parts = wrap(cases.Routes()), []
        inputs = [[cases.routes_batch(step, 0, r)[0] for step in range(2)] for r in range(2)]
        parts = [cases.gradients_of(model.module, sum(map(model.module, each))) for each in inputs]
        for x in inputs[dist.get_rank()]:
            model(x).backward()
        model.synchronize()
        check_means(check, model.module, parts, wrap)


# Uneven numbers of batches

UNEVEN = {  # rows of each batch of each rank, by world size
    1: [[2, 3]],
    2: [[2, 2, 2, 2], [3]],
    3: [[2], [1, 0, 4, 2], [3, 3]],
    4: [[2] * 4, [2], [1, 3], [0]],
}


def rows_of(kind, step, rank, rows):
    """A rank's batch of a step."""
    parts = zip(*(cases.MODELS[kind][1](step, number, rank) for number in range(2)), strict=True)
    return tuple(torch.cat(part)[:rows] for part in parts)


def whole_batches(kind, uneven):
    """What all ranks have at each step, in one."""
    for step in range(max(map(len, uneven))):
        having = [(rank, rows[step]) for rank, rows in enumerate(uneven) if step < len(rows)]
        parts = [rows_of(kind, step, rank, rows) for rank, rows in having]
        yield *(torch.cat(part) for part in zip(*parts, strict=True)), 1


def train_on(kind, batches, wrap, seed, make):
    """All weights and buffers."""
    module = cases.MODELS[kind][0](seed)
    model = wrap(module)
    optimizer = make(module.parameters())
    for inputs, targets, weight in batches:
        optimizer.zero_grad()
        (weight * mean_loss(model(inputs), targets)).backward()
        if hasattr(model, "synchronize"):
            model.synchronize()
        optimizer.step()
    buffers = [buffer.double() for buffer in module.buffers()]
    return torch.cat([cases.weights_of(module), *(buffer.flatten() for buffer in buffers)])


@on_ranks(1, 2, 3, 4)
def test_a_join_is_one_process_with_the_rows_that_are_left(check):
    """Also of batch norm over all ranks' rows. It sends a number a step, and one in the end."""
    rank, uneven = dist.get_rank(), UNEVEN[dist.get_world_size()]
    for kind, make, name in (
        ("GPT", cases.ADAMW, "naive"),
        ("MLP", cases.SGD, "buckets"),
        ("MLP", cases.ADAMW, "fast"),
    ):
        expected = train_on(kind, whole_batches(kind, uneven), nn.Module.train, 0, make)
        batches = [rows_of(kind, s, rank, rows) for s, rows in enumerate(uneven[rank])]
        before = len(cases.said())
        got = train_on(kind, join(batches), partial(converted, cases.WRAPPERS[name]), rank, make)
        check.close(got, expected, cases.HALF_THE_DIGITS, kind, make, name)
        check.same_on_all(got, kind, make, name)
        asked = [
            r.bytes for r in cases.said()[before:] if (r.op, r.dtype) == ("all_reduce", "int64")
        ]
        check.same(asked, [8] * (max(map(len, uneven)) + 1), kind, name)


def converted(wrap, module):
    return wrap(convert(module))


@on_ranks(4)
def test_weights_of_a_join(check, rank, world_size):
    """Of twelve sequences dealt out nine at a time, the last batch has none for the last rank."""
    batches = Batches(torch.zeros(25, dtype=torch.uint8), 9, 2, rank=rank, world_size=world_size)
    found = [(len(inputs), weight == batches.weight) for inputs, _, weight in join(batches)]
    check.same(found, [(3 if rank == 0 else 2, True), (0 if rank == 3 else 1, True)])
    step, nothing = (torch.ones(2),), (torch.ones(0),)
    check.same(len(list(join([step, nothing, nothing]))), 1, "nothing left")
    says = f"rank {rank} has rows after a step in which no rank has any", "Leave such steps out"
    check.refused(list, join([step, nothing, step]), says=says)
    says = f"rank {rank} has no batch to join with, expected at least one", "0 rows"
    check.refused(next, join([]), says=says)


# The plan


@pytest.mark.parametrize("seed", range(3))
def test_the_plan_is_torchs(seed):
    """Of gradients of one dtype, empty ones among them; of two, the exercise has the reference."""
    generator = torch.Generator().manual_seed(seed)
    numels = torch.randint(0, 50, (40,), generator=generator).tolist()
    tensors = [torch.empty(numel, device="meta") for numel in numels]
    for cap_bytes in (1, 20, 100, 196, 1000, 10_000):
        expected, _ = dist._compute_bucket_assignment_by_size(tensors, [cap_bytes])
        assert plan_buckets([(t.nbytes, t.dtype) for t in tensors], cap_bytes) == expected


# The wire

LAYERS = [[(8, 8)] * 5, [(8, 2), (2, 8)] * 3, [(2, 4), (4, 8), (8, 16), (16, 2)]]


@on_ranks(2)
def test_the_messages_are_torchs(check):
    """In the order of sending, in the third step: torch plans anew after the first."""
    for layers, cap_bytes in itertools.product(LAYERS, (1, 200, 256, 300, 100_000)):
        bytes_of = {}
        for wrap in (nn.parallel.DistributedDataParallel, BucketedDDP, fast.BucketedDDP):
            module = nn.Sequential(*[nn.Linear(*shape) for shape in layers])
            model = wrap(module, bucket_cap_mb=cap_bytes / 2**20)
            for _ in range(3):
                before = len(cases.said())
                model(torch.ones(2, layers[0][0])).sum().backward()
                if hasattr(model, "synchronize"):
                    model.synchronize()
            sent = cases.said()[before:]
            bytes_of[wrap] = [record.bytes for record in sent if record.op == "all_reduce"]
        torchs, *ours = bytes_of.values()
        for each in ours:
            check.same(each, torchs, layers, cap_bytes)


@on_ranks(2)
def test_all_ranks_send_in_the_order_of_the_plan(check, rank):
    """A bucket that is full before its turn waits."""
    for wrap, routes in itertools.product(BUCKETED, (["acb", "bca"], ["cab", "abc"])):
        model = wrap(cases.Routes(), 336 / 2**20)  # a layer's weight and bias
        for step in range(2):
            sizes = [flat.nbytes for flat, _ in buckets_of(model)]
            records = cases.sent_by(partial(cases.routes_step, model, step, routes[rank]))
            sent = [record.bytes for record in records if record.op == "all_reduce"]
            check.same(sent, sizes, wrap, routes, step)
            check.unless(len(set(sizes)) > 1, wrap, "has equal buckets: no order would show")


BUCKETED = BucketedDDP, fast.BucketedDDP


def buckets_of(model) -> list[tuple]:
    """(flat tensor, its parameters) of each bucket."""
    return [(bucket.flat, list(bucket.views)) for bucket in model.buckets]


# Copies


class Copied(TorchDispatchMode):
    """Bytes that copying operations write into memory."""

    def __init__(self):
        super().__init__()
        self.written = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        out = (kwargs or {}).get("out")
        elsewhere = name == "mul" and out is not None and out.data_ptr() != args[0].data_ptr()
        if name in ("copy_", "cat", "clone", "_to_copy") or elsewhere:
            self.written[name] += result.nbytes
        return result


def bytes_copied(make, set_to_none) -> int:
    """In a third step, of an MLP of float32."""
    module = cases.small_mlp(0, torch.float32)
    model = make(module)
    inputs, targets = cases.mlp_batch(dtype=torch.float32)
    for _ in range(3):
        with Copied() as copied:
            mean_loss(model(inputs), targets).backward()
            if hasattr(model, "synchronize"):
                model.synchronize()
        model.zero_grad(set_to_none)
    return copied.written.total()


@on_ranks(2)
def test_copies(check):
    """In multiples of Φ, the bytes of all gradients: after zero_grad with None, with zeros.

    FlatDDP copies gradients into its message and back. Buckets take them in, unless they are there
    already; bf16 always, into a message of half the bytes, and from there into the bucket.
    """
    gradient_bytes = sum(p.nbytes for p in cases.small_mlp(0, torch.float32).parameters())
    for name, expected in {
        "naive": (0, 0),
        "flat": (2, 2),
        "overlap": (0, 0),
        "one bucket": (1, 0),
        "buckets": (1, 0),
        "fast": (1, 0),
        "bf16": (1.5, 1.5),
    }.items():
        for set_to_none, times in zip((True, False), expected, strict=True):
            without = bytes_copied(lambda module: module, set_to_none)
            copied = bytes_copied(ALL[name], set_to_none) - without
            check.same(copied / gradient_bytes, times, name, set_to_none)
