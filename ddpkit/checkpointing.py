"""Activation checkpointing: keep a function's inputs instead of its activations, and call it again in backward.

    y = checkpoint(block, x)                      keeps x, and calls block once more
    y = selective_checkpoint(block, x)            keeps x and what the linear layers gave; computes the rest again
    y = checkpoint_sequential(blocks, None, x)    a stack of L blocks, in about √L parts

Gradients are the same to the last bit, dropout included: the second call starts from the same state of the random
number generators. It costs computing: one more forward, on top of a forward and a backward that is twice as much.

What the function does besides, it does twice: batch norm counts each batch two times. It must compute the same both
times. Inside a wrapper of `ddpkit.ddp`, checkpoint parts of the module, and use each parameter in one of them only: it
gets a gradient from each, and wrappers that send during backward expect one.

Chen et al. 2016; Korthikanti et al. 2022, section 5 (selective). Notebook 06.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, reduce
from itertools import pairwise

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode

# Products with weights. Those of attention aren't among them: their results have a number for each pair of tokens.
PRODUCTS = frozenset({torch.ops.aten.mm.default, torch.ops.aten.addmm.default})


def checkpoint(fn: Callable, *args):
    """Call `fn(*args)` so that only its arguments are kept for backward, which calls it again.

    fn: returns a tensor, or a tuple of tensors and of what needs no gradient. The parameters that it uses get theirs,
    though they aren't arguments. args: tensors, which get gradients if they require them, and anything else.
    ValueError: fn returns a list, a dict or None, through which gradients would not find their way.
    RuntimeError: gradients of an argument are asked for with torch.autograd.grad or backward(inputs=...), which would
    leave none in fn's parameters; asked for those of the parameters, both don't find them.

    Cost: the bytes of `args` and of the random number generators' states (5056 on a CPU, 16 more for a GPU) instead of
    fn's activations; in backward one more forward. What comes out always requires a gradient.
    """
    return _call(fn, frozenset(), *args)


def selective_checkpoint(fn: Callable, *args):
    """As `checkpoint`, but keep also the results of `PRODUCTS`, and compute only the rest again.

    ValueError: fn changes such a result in place.

    Cost: the bytes of `args` and of these results; in backward everything else once more. In a transformer's block that
    is attention itself and what goes number by number: little computing, and much of the memory.
    """
    return _call(fn, PRODUCTS, *args)


def checkpoint_sequential(functions: Sequence[Callable], segments: int | None, x: Tensor) -> Tensor:
    """Call the functions one after the other, in so many segments, all but the last of them checkpointed.

    functions: a list, or an nn.Sequential; each takes what the one before gives. segments: None for `best_segments`.
    ValueError: fewer segments than 1, or more than functions.

    Cost: see `sequential_bytes`; in backward one more forward of all segments but the last, whose activations are
    needed at once. As torch.utils.checkpoint.checkpoint_sequential.
    """
    functions = list(functions)
    segments = best_segments(len(functions)) if segments is None else segments
    *checkpointed, last = [functions[start:stop] for start, stop in _bounds(len(functions), segments)]
    for segment in checkpointed:
        x = checkpoint(_chain(segment), x)
    return _chain(last)(x)


def best_segments(functions: int) -> int:
    """√L, rounded: of L functions that keep as much as their input each, k inputs and L/k functions are least then."""
    return max(1, round(math.sqrt(functions)))


def sequential_bytes(functions: int, segments: int, input_bytes: int, function_bytes: int) -> int:
    """What `checkpoint_sequential` keeps after forward, which is also most of what it keeps at any time in backward.

    input_bytes: of what goes from one function to the next. function_bytes: what a function alone keeps, its input
    included. ValueError: as there. Left out: 5056 bytes a segment, for the random number generator's state.
    """
    start, stop = _bounds(functions, segments)[-1]
    return (segments - 1) * input_bytes + (stop - start) * function_bytes


def _bounds(functions: int, segments: int) -> list[tuple[int, int]]:
    """Where each segment begins and ends."""
    if not 1 <= segments <= functions:
        got = f"{segments} segments of {functions} functions"
        raise ValueError(f"expected at least 1 segment, and 1 function in each, got {got}: best_segments has a number")
    return list(pairwise(functions * segment // segments for segment in range(segments + 1)))


def _chain(functions: Sequence[Callable]) -> Callable:
    return lambda x: reduce(lambda value, function: function(value), functions, x)


# The second call


def _call(fn: Callable, keep: frozenset, *args):
    if not torch.is_grad_enabled():  # no backward will come; in the first call of an outer checkpoint, for example
        return fn(*args)
    reason = torch.empty(0, requires_grad=True)  # for backward to come here, also if only fn's parameters need it
    return _Checkpoint.apply(reason, fn, keep, *args)


class _Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, reason, fn, keep, *args):
        ctx.set_materialize_grads(False)
        ctx.fn, ctx.keep = fn, keep
        ctx.args = [None if isinstance(arg, Tensor) else arg for arg in args]
        ctx.places = [place for place, arg in enumerate(args) if isinstance(arg, Tensor)]
        tensors = [args[place] for place in ctx.places]
        ctx.devices = _gpus(tensors)
        ctx.autocasts = [_autocast(kind) for kind in (["cpu", "cuda"] if ctx.devices else ["cpu"])]
        states = _random_states(ctx.devices)
        with _Keep(keep) if keep else contextlib.nullcontext() as kept:
            outputs = fn(*args)
        _check_outputs(outputs)
        ctx.save_for_backward(*states, *tensors, *(kept.unchanged() if keep else ()))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        if not torch.autograd._is_checkpoint_valid():  # as torch's own checkpoint asks
            got = "torch.autograd.grad or backward(inputs=...)"
            raise RuntimeError(f"checkpoint expected loss.backward(), got {got}: read the gradients from .grad")
        saved = iter(ctx.saved_tensors)
        states = [next(saved) for _ in ("cpu", *ctx.devices)]
        args = list(ctx.args)
        for place in ctx.places:
            tensor = next(saved)
            args[place] = tensor.detach().requires_grad_(tensor.requires_grad)
        with _as_the_first_time(ctx, states), _Replay(ctx.keep, saved) if ctx.keep else contextlib.nullcontext():
            outputs = ctx.fn(*args)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        wanted = [pair for pair in zip(outputs, gradients, strict=True) if pair[1] is not None and _in_graph(pair[0])]
        if wanted:
            torch.autograd.backward(*zip(*wanted, strict=True))
        return None, None, None, *(arg.grad if isinstance(arg, Tensor) else None for arg in args)


def _check_outputs(outputs) -> None:
    many = isinstance(outputs, tuple)
    lost = [each for each in outputs if isinstance(each, list | dict | tuple)] if many else [outputs]
    if lost and not isinstance(lost[0], Tensor):
        got = f"{type(lost[0]).__name__}{' in a tuple' * many}"
        raise ValueError(f"checkpoint expected a tensor, or a tuple of them, from its function, got {got}: return one")


def _in_graph(output) -> bool:
    return isinstance(output, Tensor) and output.requires_grad


def _gpus(tensors: Iterable[Tensor]) -> list[int]:
    """Those whose random numbers fn may use: of its arguments, and the current one."""
    current = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    return sorted({*current, *(tensor.get_device() for tensor in tensors if tensor.is_cuda)})


def _random_states(devices: Sequence[int]) -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]


def _autocast(kind: str) -> Callable:
    """A context in which autocast is for this kind of device as it is now."""
    return partial(
        torch.autocast,
        kind,
        dtype=torch.get_autocast_dtype(kind),
        enabled=torch.is_autocast_enabled(kind),
        cache_enabled=torch.is_autocast_cache_enabled(),
    )


@contextlib.contextmanager
def _as_the_first_time(ctx, states: Sequence[Tensor]) -> Iterator[None]:
    """Random numbers and autocast as in forward, and a graph is recorded; afterwards all is as it was before."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(ctx.devices))
        torch.set_rng_state(states[0])
        for device, state in zip(ctx.devices, states[1:], strict=True):
            torch.cuda.set_rng_state(state, device)
        for autocast in ctx.autocasts:
            stack.enter_context(autocast())
        stack.enter_context(torch.enable_grad())
        yield


# What a selective checkpoint keeps


class _Keep(TorchDispatchMode):
    """Notes the results of some operations."""

    def __init__(self, operations: frozenset):
        super().__init__()
        self.operations, self.results = operations, []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        if operation in self.operations:
            self.results.append((result, result._version))
        return result

    def unchanged(self) -> list[Tensor]:
        for number, (result, version) in enumerate(self.results):
            if result._version != version:
                raise ValueError(
                    f"expected products that stay as they are, got number {number}, {tuple(result.shape)}, changed in "
                    "place: write y = y + 1 instead of y += 1, or checkpoint it all"
                )
        return [result for result, _ in self.results]


class _Replay(TorchDispatchMode):
    """Instead of these operations, gives the results that were kept. Autograd, above, records them all the same."""

    def __init__(self, operations: frozenset, results: Iterator[Tensor]):
        super().__init__()
        self.operations, self.results = operations, results

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation in self.operations:
            return next(self.results)
        return operation(*args, **(kwargs or {}))
