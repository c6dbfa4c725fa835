"""ddpkit.fsdp beside the serial twin, to the last bit where integers allow it, and beside PyTorch's
`fully_shard`, call by call."""

import contextlib
from functools import partial

import fsdp_cases as cases
import torch
import torch.distributed as dist
from on_ranks import on_ranks, some_or_all
from torch import nn
from torch.utils.checkpoint import checkpoint as torchs_checkpoint

from ddpkit import memory, transport
from ddpkit.checkpointing import checkpoint
from ddpkit.fast import fsdp as fast
from ddpkit.fsdp import FSDP, clip_grad_norm_
from ddpkit.fsdp.reduce import divisors

STEPS = 5
OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=2**-16),
    "momentum": partial(torch.optim.SGD, lr=2**-16, momentum=1 / 2),
    "AdamW": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
}
ADAMW = OPTIMIZERS["AdamW"]
HALF_THE_DIGITS = torch.finfo(torch.float64).eps ** 0.5  # the roundings of five steps are far below

CHECKPOINTS = {
    "no checkpoint": None,
    "ddpkit's": checkpoint,
    "torch's": partial(torchs_checkpoint, use_reentrant=False),
    "torch's, reentrant": partial(torchs_checkpoint, use_reentrant=True),
}


# The serial twin


def twins_backward(twin, step, micro_batches, factor=1):
    """The whole batch in one process: all ranks' micro-batches, one after the other."""
    losses = []
    for number in range(micro_batches):
        for rank in range(dist.get_world_size()):
            losses.append(cases.loss_of(twin, cases.batch(step, number, rank)))
    (factor * sum(losses)).backward()
    return sum(losses).detach()


def compare(check, model, gradients, same, *what):
    """This rank's gradients with its rows of the twin's, {name: gradient}; `same` says how."""
    for name, shard in model.module.named_parameters():
        if gradients[name] is None:
            check.same(shard.grad, None, *what, name)
        else:
            same(shard.grad, cases.mine(name, gradients[name]), *what, name, "gradient")


def compare_whole(check, model, twin, same, *what):
    full = model.full_parameters()
    names = dict(twin.named_parameters())
    check.same(list(full), list(names), *what, "names")
    for name, whole in full.items():
        same(whole, names[name].detach(), *what, name, "whole")


def all_settings():
    """(reshard_after_forward, micro-batches, what no_sync leaves out): all there are."""
    for reshard in (None, True, False):
        for number in (1, 2, 3):
            for quiet in cases.QUIET if number > 1 else [None]:
                yield reshard, number, quiet


@some_or_all
@on_ranks(1, 2, 3, 4)
def test_the_exact_twin(check, world_size, part):
    """Five steps in every setting, in integers of float64: not one bit may differ.

    Each rank begins with weights of its own. All settings on 2 ranks; on 3, with `fast`, those of 1
    and 2 micro-batches; on 4, some. Checkpoints take turns. In part, a third of these on 1, 2, 3.
    """
    torch.use_deterministic_algorithms(True)
    wrapper = fast.FSDP if world_size == 3 else FSDP
    twins = {number: twins_steps(check, number) for number in (1, 2, 3)}
    for place, setting in enumerate(all_settings()):
        if (world_size == 3 and setting[1] == 3) or (world_size == 4 and place % 5 != 0):
            continue  # more ranks than cores are slow
        if part == "some" and world_size < 4 and place % 3 != world_size - 1:
            continue
        reshard, micro_batches, quiet = setting
        name, how = list(CHECKPOINTS.items())[(place + world_size) % 4]
        module = cases.Odd(dist.get_rank(), checkpoint=how)
        model = wrapper(module, reshard_after_forward=reshard)
        optimizer = cases.Folded(model.parameters())
        steps, trained = twins[micro_batches]
        for step, (loss, gradients) in enumerate(steps):
            # The mean over ranks of W times their sums is the sum over all: it divides evenly.
            ours = cases.backward(model, step, micro_batches, quiet, factor=world_size)
            dist.all_reduce(ours)
            check.same(ours, loss, setting, name, step, "loss")
            compare(check, model, gradients, check.same, setting, name, step)
            optimizer.step()
            optimizer.zero_grad()
        compare_whole(check, model, trained, check.same, setting, name)


def twins_steps(check, micro_batches):
    """The twin's loss and gradients, step by step, and what has become of it."""
    twin = cases.Odd()
    optimizer = cases.Folded(twin.parameters())
    steps = []
    for _ in range(STEPS):
        loss = twins_backward(twin, len(steps), micro_batches)
        for name, p in twin.named_parameters():
            if p.requires_grad:
                whole = torch.equal(p.grad, p.grad.round()) and p.grad.abs().max() < 2**53
                check.unless(whole and p.grad.any(), "the twin isn't exact", name, p.grad)
        steps.append((loss, {name: p.grad for name, p in twin.named_parameters()}))
        optimizer.step()
        optimizer.zero_grad()  # to None: what is kept above stays
    return steps, twin


@on_ranks(1, 2, 3, 4)
def test_optimizers_of_torch_for_five_steps(check, world_size):
    """Also where gradients are clipped, by one norm, in every second step.

    A wrong gradient moves a weight by the learning rate; the norm shows a factor that AdamW hides.
    """

    def near(got, expected, *what):
        check.close(got, expected, HALF_THE_DIGITS * (1 + expected.abs()), *what)

    for kind, make in OPTIMIZERS.items():
        model = cases.wrapped(dist.get_rank())
        twin = cases.Odd()
        optimizers = [make(each.parameters()) for each in (model, twin)]
        for step in range(STEPS):
            loss = twins_backward(twin, step, 2, 1 / 64)
            ours = cases.backward(model, step, 2, factor=world_size / 64)
            dist.all_reduce(ours)
            near(ours, loss, kind, step, "loss")
            gradients = {name: p.grad for name, p in twin.named_parameters()}
            compare(check, model, gradients, near, kind, step)
            most = (float("inf"), 1.0)[step % 2]
            norm = nn.utils.clip_grad_norm_(twin.parameters(), most)
            check.unless(norm > 1, kind, step, "nothing to clip", norm)
            near(model.clip_grad_norm(most), norm, kind, step, "norm")
            compare(check, model, gradients, near, kind, step, "clipped")  # in place: the same
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        compare_whole(check, model, twin, near, kind)


class Twice(nn.Module):
    """A module under two names, and one of its parameters under two there."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.one = nn.Linear(5, 5)
        self.one.again = self.one.weight
        self.other = self.one

    def forward(self, x):
        return self.other(self.one(x)) @ self.one.again


@on_ranks(1, 2)
def test_a_module_and_a_parameter_under_two_names(check, rank, world_size):
    for make in (partial(torch.optim.SGD, lr=0.1), ADAMW):
        model = FSDP(Twice(rank))
        twin = Twice()
        optimizers = [make(module.parameters()) for module in (model, twin)]
        for step in range(2):
            losses = [squared(twin, floats(step, 0, r)) for r in range(world_size)]
            (sum(losses) / world_size).backward()
            cases.backward(model, step, loss=squared, batch=floats)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for name, whole in model.full_parameters().items():
            expected = twin.get_parameter(name).detach()
            check.close(whole, expected, 100 * torch.finfo(torch.float32).eps, make, name)


# Half precision


class Plain(nn.Sequential):
    def __init__(self, seed=0):
        torch.manual_seed(seed)
        super().__init__(nn.Linear(5, 6), nn.GELU(), nn.Linear(6, 3))


def floats(step, micro_batch, rank):
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro_batch + rank)
    return torch.randn(4, 5, generator=generator)


def squared(model, x):
    return model(x).float().square().mean()


def serial_mean(gradients, dtype, quiet):
    """The mean over ranks, as float32, of {(rank, micro-batch): gradient}, and what may be off.

    Cast to `dtype`; added over micro-batches in it inside no_sync, in float32 else.
    """
    world_size = dist.get_world_size()
    before, after = divisors(dtype, world_size)
    total = 0
    for numbers in [(0, 1)] if quiet else [(0,), (1,)]:
        parts = []
        for rank in range(world_size):
            part = gradients[rank, numbers[0]].to(dtype)
            for number in numbers[1:]:
                part = part + gradients[rank, number]
            parts.append(part / before)
        total = total + (sum(parts) / after).float()
    size = sum(each.float().abs() for each in gradients.values()) / world_size
    return total, 2 * world_size * torch.finfo(dtype).eps * size


@some_or_all
@on_ranks(2, 3)
def test_half_precision_is_the_casts_of_a_serial_model(check, rank, world_size, part):
    """In every setting. To the bit on two ranks, since a sum of two has one order; on three each
    addition and each division may round otherwise, by half the format's spacing.
    """
    kinds = [(torch.bfloat16, torch.float32), (torch.bfloat16, None), (torch.float16, None)]
    if part == "some":
        kinds = kinds[2:] if world_size == 2 else kinds[:1]
    for compute, reduce in kinds:
        for late in (False, True):  # are gradients reduced with the last micro-batch?
            what = compute, reduce, late
            models = []
            for reshard in (None, True, False):
                for weights in (False, True):
                    model = FSDP(Plain(rank), compute, reduce, reshard_after_forward=reshard)
                    models.append((model, {"gradients": late, "weights": weights}))
            twin = Plain()
            optimizer = ADAMW(twin.parameters())
            for step in range(3):
                gradients = {}
                for r in range(world_size):
                    for number in range(2):
                        rounded = Plain().to(compute)
                        rounded.load_state_dict(twin.state_dict())
                        squared(rounded, floats(step, number, r).to(compute)).backward()
                        gradients[r, number] = [each.grad for each in rounded.parameters()]
                expected = {}
                for place, (name, parameter) in enumerate(twin.named_parameters()):
                    mine = {key: each[place] for key, each in gradients.items()}
                    parameter.grad, bound = serial_mean(mine, reduce or compute, late)
                    expected[name] = cases.mine(name, parameter.grad), cases.mine(name, bound)
                optimizer.step()
                for model, quiet in models:
                    cases.backward(model, step, 2, quiet, loss=squared, batch=floats)
                    for name, (gradient, bound) in expected.items():
                        got = model.module.get_parameter(name).grad
                        if world_size == 2:
                            check.same(got, gradient, *what, quiet, step, name)
                        check.close(got, gradient, bound, *what, quiet, step, name)
                    model.module.zero_grad()
                    model.load_full_parameters(dict(twin.named_parameters()))


@on_ranks(1, 3)
def test_gradients_of_shards_have_their_dtype(check):
    model = FSDP(Plain(), torch.bfloat16, torch.float32)
    out = model(floats(0, 0, 0))
    check.same(out.dtype, torch.bfloat16, "output")
    out.float().sum().backward()
    model.synchronize()
    for name, shard in model.module.named_parameters():
        check.same((shard.dtype, shard.grad.dtype), (torch.float32,) * 2, name)
        check.same(shard.grad.shape, shard.shape, name)


@on_ranks(2, 3, 4)
def test_clipping_by_the_norm_of_all_shards(check, rank, world_size):
    for max_norm in (0.01, 100.0):
        model = FSDP(Plain(rank))
        twin = Plain()
        losses = [squared(twin, floats(0, 0, r)) for r in range(world_size)]
        (sum(losses) / world_size).backward()
        cases.backward(model, 0, loss=squared, batch=floats)
        norm = nn.utils.clip_grad_norm_(twin.parameters(), max_norm)
        near = 100 * torch.finfo(torch.float32).eps  # sums of 80 squares, in other orders
        check.close(model.clip_grad_norm(max_norm), norm, near * norm, "norm")
        for name, parameter in twin.named_parameters():
            got = model.module.get_parameter(name).grad
            check.close(got, cases.mine(name, parameter.grad), near, name)


@on_ranks(2)
def test_a_norm_whose_square_isnt_fp16(check, rank):
    """It is 300, all on rank 0."""
    shard = torch.full((0 if rank else 100,), 30.0, dtype=torch.float16)
    check.close(clip_grad_norm_([shard], 3.0), torch.tensor(300.0), 0.1, "norm")
    check.close(shard, torch.full_like(shard, 0.3), 1e-3, "clipped")


# Beside fully_shard


class Blocks(nn.Module):
    """Three blocks, with or without a parameter of the root's own, with or without token ids."""

    def __init__(self, own, tokens):
        super().__init__()
        self.tokens = nn.Embedding(11, 5) if tokens else nn.Identity()
        blocks = [nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 5)) for _ in range(3)]
        self.blocks = nn.ModuleList(blocks)
        self.own = nn.Parameter(torch.ones(5)) if own else None

    def forward(self, x):
        x = self.tokens(x)
        for block in self.blocks:
            x = block(x)
        return x if self.own is None else x * self.own


def fully_sharded(own, tokens, reshard, halves):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = Blocks(own, tokens)
    options = {
        "mesh": init_device_mesh("cpu", (dist.get_world_size(),)),
        "reshard_after_forward": reshard,
        "mp_policy": MixedPrecisionPolicy(*halves),
    }
    for unit in [model.tokens, *model.blocks] if tokens else model.blocks:
        fully_shard(unit, **options)
    return fully_shard(model, **options)


@some_or_all
@on_ranks(2, 3, 4)
def test_calls_are_fully_shards(check, world_size, part):
    """Number, order, dtypes and bytes of the calls in a second step; no padding differs."""
    for number in range(world_size % 3, 8, 3) if part == "some" else range(8):
        own, tokens, odd = number // 4, number // 2 % 2, number % 2
        reshard = (None, True, False)[(number + world_size) % 3]
        halves = (torch.bfloat16, torch.float32) if odd else (None, None)
        micro_batches = 1 + odd
        ours = FSDP(Blocks(own, tokens), *halves, reshard_after_forward=reshard)
        theirs = fully_sharded(own, tokens, reshard, halves)
        overlapped = fast.FSDP(
            Blocks(own, tokens), *halves, reshard_after_forward=reshard, transport=transport
        )
        x = torch.ones(4, dtype=torch.int64) if tokens else torch.ones(4, 5)

        def step(model, x=x, micro_batches=micro_batches):
            for left in reversed(range(micro_batches)):
                quiet = left and isinstance(model, FSDP)
                if not isinstance(model, FSDP):
                    model.set_requires_gradient_sync(left == 0)
                with model.no_sync() if quiet else contextlib.nullcontext():
                    model(x).sum().backward()
            if isinstance(model, FSDP):
                model.synchronize()

        said = []
        for model in (ours, theirs, overlapped):
            step(model)
            said.append(cases.sent_by(partial(step, model)))
        what = own, tokens, reshard, micro_batches, halves
        check.same(said[0], said[1], *what)
        check.same(said[2], said[1], "overlapped", *what)
        check.unless(len(said[0]) >= 6, "calls", said[0])


@on_ranks(2, 3)
def test_accumulation_in_five_settings(check, world_size):
    """In units of one gather or reduction of the model: 3A, 2A, 2A + 1, 2A + 1, 2."""
    parts = {
        "as it comes": lambda a: (2 * a, a),
        "kept after forward": lambda a: (a, a),
        "synced at the last": lambda a: (2 * a, 1),
        "kept after backward": lambda a: (1 + a, a),
        "kept always, synced at the last": lambda a: (1, 1),
    }
    for setting, (reshard, quiet) in cases.SETTINGS.items():
        model = FSDP(Blocks(False, False), reshard_after_forward=reshard)

        def loss(model, x):
            return model(x).sum()

        for micro_batches in (3, 1):
            step = partial(cases.backward, model, 0, micro_batches, quiet, 1, loss, floats)
            step()
            ops = [op for op, _, _ in cases.sent_by(step)]
            got = ops.count("all_gather") / 3, ops.count("reduce_scatter") / 3
            expected = parts[setting](micro_batches)
            if micro_batches == 1 and not reshard:
                expected = 1, 1
            check.same(got, expected, setting, micro_batches)


# Memory


class Wide(nn.Module):
    """Units so large that activations hardly count."""

    def __init__(self, layers=4, width=64):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x


class InPlace:
    """A transport without scratch memory: Gloo's own reduce-scatter clones the whole message."""

    start_all_gather = staticmethod(transport.start_all_gather)

    @staticmethod
    def start_reduce_scatter(flat, group):
        return dist.all_reduce(flat, group=group, async_op=True)


def nbytes(tensors):
    """Of their memory, each piece once."""
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
    return sum(each.nbytes() for each in storages.values())


@on_ranks(1, 2, 3, 4)
def test_memory_by_rank_to_the_byte(check, rank, world_size):
    model = cases.wrapped()
    optimizer = ADAMW(model.parameters())
    whole = {name: p if p.dim() else p[None] for name, p in cases.Odd().named_parameters()}
    rows = {name: -(-len(p) // world_size) for name, p in whole.items()}
    for _ in range(2):
        cases.backward(model, 0)
        optimizer.step()
    shards = dict(model.module.named_parameters())
    for name, p in whole.items():
        mine = max(0, min(len(p), (rank + 1) * rows[name]) - rank * rows[name])
        check.same(shards[name].shape, (mine, *p.shape[1:]), name)
        check.same(shards[name].untyped_storage().nbytes(), mine * p[0].nbytes, name, "shard")
        if p.requires_grad:
            kept = optimizer.state[shards[name]]
            check.same(kept["exp_avg"].nbytes, mine * p[0].nbytes, name, "moment")
    trained = {name: p for name, p in whole.items() if p.requires_grad}
    padded = sum(rows[name] * p[0].nbytes for name, p in trained.items())
    check.same(nbytes(s.grad for s in shards.values() if s.grad is not None), padded, "gradients")
    wholes = [each.whole for unit in model.units for each in unit.sharded]
    check.same(nbytes(wholes), 0, "whole weights after a step")


@on_ranks(2, 3, 4)
def test_peak_of_a_step(check, world_size):
    """No more than the shards and their gradients, two units whole, one unit's gradients, and
    activations; and with one unit for all the whole model, twice."""
    x = torch.ones(2, 64)
    for wrap in (None, []):
        model = FSDP(Wide(), wrap=wrap, transport=InPlace())
        unit = max(unit.nbytes for unit in model.units)
        shards = list(model.module.parameters())
        step = partial(cases.backward, model, 0, loss=lambda m, x: m(x).sum(), batch=lambda *_: x)
        step()
        for shard in shards:
            shard.grad = None
        kept = nbytes(shards)
        gradients = unit + sum(each.nbytes for each in model.units) // world_size
        activations = 4 * 4 * x.nbytes + 64
        got = memory.most_bytes(step, shards)
        check.unless(got <= kept + 2 * unit + gradients + activations, wrap, got, kept, unit)
        check.unless(got > 2 * unit, wrap, "is too little to be true", got, unit)
