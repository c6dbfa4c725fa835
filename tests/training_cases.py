"""Small models and their data, every way to train them in parallel, and the serial twin."""

import contextlib
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import get_total_norm, parameters_to_vector

from ddpkit import transport, zero
from ddpkit.ddp import BucketedDDP, FlatDDP, NaiveDDP, OverlapDDP
from ddpkit.fast import buckets as fast_buckets
from ddpkit.fast import zero as fast_zero
from ddpkit.fast.ring import RingTransport
from ddpkit.fast.transports import SharedMemoryTransport
from ddpkit.models import GPT, MLP, mean_loss

# Roundings of 1e-16 grow in some steps, but nowhere near the eighth digit; a wrong gradient moves a
# parameter by a good part of the learning rate.
HALF_THE_DIGITS = torch.finfo(torch.float64).eps ** 0.5
FEW_BYTES = 500 / 2**20  # a bucket for some parameters of the models below, not for all
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)  # AdamW alone would hide any factor
ADAMW = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)

FAST = partial(fast_buckets.BucketedDDP, bucket_cap_mb=FEW_BYTES)
WRAPPERS = {
    "naive": NaiveDDP,
    "flat": FlatDDP,
    "overlap": OverlapDDP,
    "one bucket": BucketedDDP,
    "buckets": partial(BucketedDDP, bucket_cap_mb=FEW_BYTES),
    "fast": FAST,
    "shared": partial(FAST, shared_memory=True),
}
IN_BACKWARD = {name: wrap for name, wrap in WRAPPERS.items() if name not in ("naive", "flat")}
ZEROS = {  # class, MiB of a bucket, transport
    "zero": (zero.ZeroOptimizer, FEW_BYTES, lambda: transport),
    "zero, ring": (zero.ZeroOptimizer, FEW_BYTES, RingTransport),
    "fast zero": (fast_zero.ZeroOptimizer, FEW_BYTES, lambda: None),
    "fast zero, one bucket": (fast_zero.ZeroOptimizer, 25.0, lambda: transport),
    "fast zero, shared": (fast_zero.ZeroOptimizer, FEW_BYTES, SharedMemoryTransport),
}
WAYS = [*WRAPPERS, *ZEROS]


# Models and data


def small_gpt(seed=0, dtype=torch.float64, **sizes):
    """With a tied weight, a frozen one, and lengths that divide by nothing."""
    torch.manual_seed(seed)
    sizes = {"vocabulary": 11, "context": 6, "width": 6, "heads": 2, "layers": 1} | sizes
    return GPT(**sizes).to(dtype)


def small_mlp(seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    return MLP(inputs=4, width=6, outputs=3, layers=2).to(dtype)


class Routes(nn.Module):
    """Three layers; `forward` goes through those that it is told, in order."""

    def __init__(self, seed=0, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(seed)
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.c = nn.Linear(6, 6, bias=False)
        self.to(dtype)

    def forward(self, x, route="abc"):
        for name in route:
            x = getattr(self, name)(x).tanh()
        return x.square().mean()


def numbers_of(step, micro_batch, rank):
    return torch.Generator().manual_seed(1000 * step + 100 * micro_batch + rank)


def gpt_batch(step=0, micro_batch=0, rank=0):
    tokens = torch.randint(11, (2, 7), generator=numbers_of(step, micro_batch, rank))
    return tokens[:, :-1], tokens[:, 1:]


def mlp_batch(step=0, micro_batch=0, rank=0, dtype=torch.float64):
    generator = numbers_of(step, micro_batch, rank)
    x = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.randint(3, (5,), generator=generator)


def routes_batch(step=0, micro_batch=0, rank=0):
    """Another order of layers on every rank; from the second micro-batch on, one is left out."""
    x = torch.randn(3, 6, generator=numbers_of(step, micro_batch, rank), dtype=torch.float64)
    return x, ["abc", "cab", "bca"][(rank + step) % 3][: 2 if micro_batch else 3]


def gpt_loss(model, batches):
    """Of one batch with all that the ranks have."""
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return mean_loss(model(inputs), targets)


def mlp_loss(model, batches):
    """Batch norm looks at one rank's share: the twin shows its model one after the other."""
    return sum(mean_loss(model(x), targets) for x, targets in batches) / len(batches)


def routes_loss(model, batches):
    return sum(model(*batch) for batch in batches) / len(batches)


MODELS = {
    "GPT": (small_gpt, gpt_batch, gpt_loss),
    "MLP": (small_mlp, mlp_batch, mlp_loss),
    "Routes": (Routes, routes_batch, routes_loss),
}


def trained_of(module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def weights_of(module):
    """Frozen ones, too."""
    return parameters_to_vector(module.parameters()).detach()


def gradients_of(module, loss) -> dict[str, torch.Tensor]:
    """Without hooks, and without leaving a trace; zeros for what has none."""
    names, parameters = zip(*trained_of(module).items(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    return dict(zip(names, found, strict=True))


def routes_step(model, step=0, route="abc"):
    """Backward, and all gradients sent."""
    model(routes_batch(step, 0, dist.get_rank())[0], route).backward()
    model.synchronize()


# Training


def groups_of(module):
    """Vectors, not decayed, after what is left; each with options of its own."""
    rest = [parameter for parameter in module.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in module.parameters() if parameter.dim() == 1]
    return [{"params": rest, "lr": 0.02}, {"params": vectors, "weight_decay": 0.0}]


def prepare(way, module, make=SGD, group=None):
    """(module, what to call, optimizer, what has no_sync and synchronize); way None: the twin."""
    if way is None:
        return module, module, make(groups_of(module)), None
    if way in WRAPPERS:
        model = WRAPPERS[way](module, group=group)
        return module, model, make(groups_of(module)), model
    cls, cap_mb, how = ZEROS[way]
    optimizer = cls(groups_of(module), make.func, cap_mb, group, how(), **make.keywords)
    return module, module, optimizer, optimizer


def gradient_norm(module, optimizer):
    """Of the mean gradient of all parameters together."""
    if not isinstance(optimizer, zero.ZeroOptimizer):
        return get_total_norm([parameter.grad for parameter in trained_of(module).values()])
    squared = sum(bucket.shard.grad.square().sum() for bucket in optimizer.buckets)
    dist.all_reduce(squared, group=optimizer.group)
    return squared.sqrt()


def backward(kind, model, sender, ranks, step, micro_batches=1):
    """Of all micro-batches: sent with the last one, or now and then after it."""
    _, batch, loss = MODELS[kind]
    for number in range(micro_batches):
        late = number < micro_batches - 1 or (micro_batches > 1 and step % 2)
        with sender.no_sync() if late and sender else contextlib.nullcontext():
            batches = [batch(step, number, rank) for rank in ranks]
            (loss(model, batches) / micro_batches).backward()
    if sender:
        sender.synchronize()


def train(kind, prepared, ranks, micro_batches=1, set_to_none=True, steps=range(3), clip=None):
    """All weights after training on these ranks' data, and each step's gradient norm."""
    module, model, optimizer, sender = prepared
    norms = []
    for step in steps:
        for number, options in enumerate(optimizer.param_groups):  # as schedulers do
            options["lr"] = 0.02 / (1 + (step % 4) * (number + 1))
        optimizer.zero_grad(set_to_none=set_to_none)
        backward(kind, model, sender, ranks, step, micro_batches)
        norms.append(gradient_norm(module, optimizer))
        if clip:
            norms.append(clip(module, optimizer))
        optimizer.step()
    return torch.cat([weights_of(module), torch.stack(norms)])


def alone(kind, make=SGD, ranks=None, seed=0, **options):
    """The twin's `train`, on the data of all ranks."""
    ranks = range(dist.get_world_size()) if ranks is None else ranks
    return train(kind, prepare(None, MODELS[kind][0](seed), make), ranks, **options)


def together(way, kind, make=SGD, group=None, **options):
    """`train` on this rank's data, from weights of its own."""
    rank = dist.get_rank()
    prepared = prepare(way, MODELS[kind][0](rank), make, group)
    return train(kind, prepared, [rank], **options)


# The wire


def said() -> list:
    """What this rank said so far."""
    return dist.group.WORLD.recorder.records


def sent_by(step) -> list:
    """The records of what this rank says in `step()`."""
    before = len(said())
    step()
    return said()[before:]
