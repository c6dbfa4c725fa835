"""Activation checkpointing: keep a function's inputs instead of its activations, and call it again.

    y = checkpoint(block, x)                    keeps x; backward calls block once more
    y = selective_checkpoint(block, x)          keeps x and the results of linear layers
    y = checkpoint_sequential(blocks, 3, x)     the blocks in three parts

Gradients are the same to the last bit, dropout included: the second call starts from the same state
of the random numbers. It costs one more forward, a third of forward and backward together.

Side effects of the function happen twice: batch norm counts each batch two times. Under wrappers of
`ddpkit.ddp` that send during backward, use each parameter in one checkpoint only: each checkpoint
gives it a gradient of its own.

In PyTorch: torch.utils.checkpoint. Chen et al. 2016; Korthikanti et al. 2022, 5. Notebook 06.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


class Checkpoint(torch.autograd.Function):
    """A call of `fn` that keeps only its inputs for backward: apply(fn, *inputs) is fn(*inputs).

    fn: returns one tensor.
    """

    @staticmethod
    def forward(ctx, fn, *inputs):
        ctx.fn = fn
        ctx.autocast = autocast_as_now(inputs)
        ctx.save_for_backward(random_state(), *inputs)
        return fn(*inputs)  # without a graph: forward runs under no_grad

    @staticmethod
    def backward(ctx, gradient):
        state, *inputs = ctx.saved_tensors
        # New leaves: backward through this graph must not go on into the graph outside.
        inputs = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
        with torch.enable_grad(), random_numbers_from(state), ctx.autocast:
            output = ctx.fn(*inputs)
        if output.requires_grad:  # false if all of fn's inputs and parameters are frozen
            output.backward(gradient)
        return None, *(x.grad for x in inputs)


def checkpoint(fn: Callable, *args: Tensor) -> Tensor:
    """Return `fn(*args)`, keeping only the args for backward, which calls it again.

    fn: returns a tensor. Its parameters get gradients, in `.grad` even by `torch.autograd.grad`, as
    do the args that require them. The result requires one even if neither args nor parameters do.

    Cost: the bytes of `args` and of the random numbers' state (5056 on a CPU, 16 more with a GPU);
    in backward one more forward. It can't be differentiated twice.
    """
    return _apply(Checkpoint, fn, *args)


def _apply(function: type[torch.autograd.Function], fn: Callable, *args: Tensor) -> Tensor:
    """Return `fn(*args)`, by `function`, a checkpoint; directly if gradients are disabled."""
    if not torch.is_grad_enabled():  # no backward will follow, or an outer checkpoint calls again
        return fn(*args)
    # Autograd calls backward only if an input requires a gradient; fn's parameters aren't inputs.
    anchor = torch.empty(0, requires_grad=True)
    return function.apply(lambda _, *args: fn(*args), anchor, *args)


def random_state() -> Tensor:
    """Return the CPU generator's state and, if CUDA is in use, the current GPU's: 1-D, uint8."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return torch.cat(states)


def set_random_state(state: Tensor) -> None:
    """Set the generators to a state that `random_state` returned."""
    # The CPU's state comes first, as `random_state` puts them.
    cpu = len(torch.get_rng_state())
    torch.set_rng_state(state[:cpu])
    if len(state) > cpu:
        torch.cuda.set_rng_state(state[cpu:])


@contextlib.contextmanager
def random_numbers_from(state: Tensor) -> Iterator[None]:
    """Draw random numbers from `state` on while inside, then from where they were before."""
    before = random_state()
    set_random_state(state)
    try:
        yield
    finally:
        set_random_state(before)


def autocast_as_now(inputs: Sequence[Tensor]) -> torch.autocast:
    """Return a context with autocast's present settings, for CUDA if an input is there, or CPU."""
    kind = "cuda" if any(x.is_cuda for x in inputs) else "cpu"
    return torch.autocast(
        kind,
        dtype=torch.get_autocast_dtype(kind),
        enabled=torch.is_autocast_enabled(kind),
        cache_enabled=torch.is_autocast_cache_enabled(),
    )


# Selective: products of two matrices are kept as well; not attention's, which are batched


def selective_checkpoint(fn: Callable, *args: Tensor) -> Tensor:
    """Return `fn(*args)`, keeping args and results of linear layers; compute the rest again.

    Every product of two 2-D tensors is kept, attention's as well if it has neither batch nor heads.
    ValueError: fn changes such a result in place.
    Cost: as `checkpoint`, and the bytes of these results; in backward, all else once more. In a
    transformer's block that is attention, norms, GELU and dropout: little computing, much memory.
    """
    return _apply(SelectiveCheckpoint, fn, *args)


def is_product(operation) -> bool:
    """Return True for a product of two matrices, by which PyTorch computes a linear layer."""
    return operation in {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}


class Products(TorchDispatchMode):
    """A mode that keeps the results of matrix products in `kept`, or hands out those it was given.

    kept: results of an earlier run, in order, one for each product: none is computed again.
    Autograd, which works above this mode, records products as ever.
    """

    def __init__(self, kept=None):
        super().__init__()
        self.kept = list(kept or ())
        self.again = kept is not None

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if is_product(operation) and self.again:
            return self.kept.pop(0).detach()  # an alias that autograd can make part of its graph
        result = operation(*args, **(kwargs or {}))
        if is_product(operation):
            self.kept.append(result)
        return result


class SelectiveCheckpoint(Checkpoint):
    """A checkpoint that also keeps products' results, which fn's second call gets ready-made."""

    @staticmethod
    def forward(ctx, fn, *inputs):
        ctx.fn = partial(_replay, fn, len(inputs))
        ctx.autocast = autocast_as_now(inputs)
        state = random_state()  # before fn draws from it
        with Products() as products:
            output = fn(*inputs)
        if any(result._version for result in products.kept):
            got = "got one changed in place: write y = y + 1 for y += 1, or use checkpoint"
            raise ValueError(f"expected results of linear layers that stay, {got}")
        ctx.save_for_backward(state, *inputs, *products.kept)
        return output


def _replay(fn: Callable, inputs: int, *tensors: Tensor) -> Tensor:
    """Call fn on the first `inputs` of the tensors; its products return those that follow."""
    with Products(tensors[inputs:]):
        return fn(*tensors[:inputs])


# A stack of functions in segments


def checkpoint_sequential(functions: nn.Sequential, segments: int, x: Tensor) -> Tensor:
    """Call the functions one after the other, in `segments` parts, all but the last checkpointed.

    Returns the last one's result. ValueError: fewer segments than 1, or more than functions. As in
    torch.utils.checkpoint.
    """
    # The last segment's backward follows at once: to compute it again would free nothing.
    *checkpointed, last = cut(len(functions), segments)
    for segment in checkpointed:
        x = checkpoint(functions[segment], x)
    return functions[last](x)


def cut(functions: int, segments: int) -> list[slice]:
    """Cut `functions` into `segments` slices whose lengths differ by one at most.

    ValueError: fewer segments than 1, or more than functions.
    """
    if not 1 <= segments <= functions:
        got = f"{segments} segments of {functions} functions"
        raise ValueError(f"expected at least 1 segment, and 1 function in each, got {got}")
    ends = [functions * segment // segments for segment in range(segments + 1)]
    return [slice(start, stop) for start, stop in pairwise(ends)]


def sequential_bytes(functions: int, segments: int, input_bytes: int, function_bytes: int) -> int:
    """Predict the bytes that `checkpoint_sequential` keeps after forward: about a step's peak.

    input_bytes: of what goes from one function to the next. function_bytes: what a function alone
    keeps, its input included. Left out: 5056 bytes a checkpoint, of the random numbers' state.
    """
    last = cut(functions, segments)[-1]
    in_last = last.stop - last.start
    return (segments - 1) * input_bytes + in_last * function_bytes
