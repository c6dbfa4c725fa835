"""Checkers of notebook 06: bytes alive, a block's activations, and three kinds of checkpoints."""

import math
from collections import Counter
from functools import cache, partial
from itertools import pairwise
from types import SimpleNamespace

import torch
from torch import nn
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ddpkit import checkpointing, memory
from ddpkit.checkpointing import (
    cut,
    is_product,
    random_numbers_from,
    random_state,
    set_random_state,
)
from ddpkit.memory import ByteDropout, MaterialisedAttention, measure_saved
from ddpkit.models import Block

from .checker import Exercise, Mistake, Trial, first_difference, mistakes

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these

# alive(lives, moments)

FOREVER = math.inf
LIVES = {  # (born, died, bytes) of each tensor, and the bytes alive at each of six moments
    "one tensor": ([(1, 4, 100)], [0, 100, 100, 100, 0, 0]),
    "one of two stays": ([(0, FOREVER, 1000), (2, 3, 50)], [1000, 1000, 1050, 1000, 1000, 1000]),
    "in no order, and one as short-lived as can be": (
        [(3, FOREVER, 7), (0, 5, 10), (4, 4, 999), (1, 3, 200), (1, 5, 10)],
        [10, 220, 220, 27, 27, 7],
    ),
}


def _run_alive(answer):
    return {what: list(answer(lives, 6)) for what, (lives, _) in LIVES.items()}


alive = Exercise(
    reference=memory.alive,
    trials=lambda: [
        Trial(1, _run_alive, (), [{what: right for what, (_, right) in LIVES.items()}])
    ],
    hints={
        "start": "At which moments is a tensor there? From born on, up to the one before died.",
        "values": "For each moment, sum the bytes of those tensors of which born <= moment < died.",
        "error": "A tensor may stay for ever: died is math.inf, and range(born, died) won't have "
        "it. Compare: born <= moment < died.",
    },
    praise="what is alive together counts, not what was ever made. `watch` adds up so.",
    mistakes=mistakes("""
never_dies: changes[died] -= nbytes → pass
    Those are all bytes ever made. What has died doesn't count: memory is used again.
dies_a_moment_late: changes[died] → changes[died + 1]
    A tensor still counts at the moment in which it died: born <= moment < died.
born_a_moment_late: changes[born] → changes[born + 1]
    A tensor is missing when it is born: born <= moment < died.
counts_tensors: changes[born] += nbytes⏎changes[died] -= nbytes → changes[born] += 1
    ⏎changes[died] -= 1
    Those are tensors. How many bytes?
"""),
)


# block_bytes(batch, length, width, heads)

BLOCKS = (2, 56, 320, 4), (3, 112, 352, 2), (1, 60, 416, 8)  # batch, length, width, heads


@cache
@torch.random.fork_rng(devices=[])
def _measured() -> dict[tuple, int]:
    """Measure the bytes that a real block keeps, by its sizes."""
    found = {}
    for batch, length, width, heads in BLOCKS:
        block = Block(width, heads, 0.0, MaterialisedAttention(ByteDropout(0.1))).bfloat16()
        block.dropout = ByteDropout(0.1)
        x = torch.randn(batch, length, width, dtype=torch.bfloat16, requires_grad=True)
        saved = measure_saved(block, x)
        found[batch, length, width, heads] = sum(tensor.nbytes for tensor in saved)
    return found


def _predict(answer, measured):
    """Return the answer's predictions, each replaced by the measured number where it is right.

    The norms' means and deviations, less than 1 %, may be counted, in part or whole, or left out.
    """
    seen = {}
    for sizes, right in measured.items():
        predicted = answer(*sizes)
        least = memory.block_bytes(*sizes)
        if isinstance(predicted, int | float) and least - 1 < predicted < right + 1:
            predicted = right
        seen[sizes] = predicted
    return seen


def _read_terms(_trial, _rank, _measured, seen):
    if all(isinstance(nbytes, int | float) for nbytes in seen.values()):
        sizes = torch.tensor([(b * s * d, b * s * s * h) for b, s, d, h in seen]).double()
        found = torch.tensor(list(seen.values())).double()
        terms = torch.linalg.lstsq(sizes, found).solution
        if (sizes @ terms - found).abs().max() < 1:
            told = f"Yours is {terms[0]:.3g}sbd + {terms[1]:.3g}bs²H. "
            if abs(terms[1] - 5) < 0.01:
                return f"{told}The bs²H are right. Go through the sbd again, arrow by arrow."
            if abs(terms[0] - 34) < 0.01:
                told += "The sbd are right. What do softmax, dropout and “× values” keep of each "
                return f"{told}matrix?"
            return f"{told}Numbers count 2 bytes each, dropouts' masks 1: is any of them missing?"
    return "Return a number of bytes: how many sbd, and how many bs²H?"


block_bytes = Exercise(
    reference=memory.block_bytes,
    trials=lambda: [Trial(1, _predict, (_measured(),), [_measured()], what="by arguments")],
    explain=_read_terms,
    hints={
        "start": "A linear layer keeps its input, a norm its input, GELU its input, softmax its "
        "result, a product both factors.",
        "values": "As large as the input, of 2 bytes: norm, qkv; queries, keys, values; out; norm, "
        "MLP: 8. And twice 4 more. Attention weights, a matrix of length × length for each head: "
        "softmax's, a mask of 1 byte, and after dropout.",
    },
    praise="within 1 % of what a real block keeps; the rest are the norms' means and deviations.",
    note="ddpkit.memory.block_activations has it term by term.",
    mistakes=mistakes("""
masks_twice: return 2 * numbers + masks → return 36 * tokens + 5 * pairs
    Yours is 36sbd + 5bs²H. The masks are in it twice: 16 numbers of 2 bytes, 2 masks of 1.
without_dropout: return 2 * numbers + masks → return 32 * tokens + 2 * pairs
    That is without dropout: its masks are 2sbd and 1bs²H, and weights after dropout 2bs²H more.
no_queries_keys_values: 16 * tokens + → 13 * tokens +
    Three are missing as large as the block's input: queries, keys and values?
sums_kept: 16 * tokens + → 18 * tokens +
    4sbd are too many. What is added or given to dropout isn't kept.
one_head: length**2 * heads → length**2
    Yours has one matrix of attention weights. Each head has its own: bs²H, not bs².
"""),
)


# Checkpoint: a torch.autograd.Function

COPIES = "aten::clone", "aten::copy_", "aten::_to_copy"
CALLS = "calls of fn in forward and in backward"
SAVED, ATTRIBUTES = "bytes kept by autograd", "bytes kept as attributes of ctx"
COPIED = "copies made where an alias, which takes no memory, would do"


def _square(weight, x):
    return (x * weight).square()


def _pick(weight, x, places):
    return (x * weight)[places].square()


def _product(weight, x, y):
    return x * weight * y


def _draw(weight, x):
    return x * weight * torch.randint(1, 1000, (1,))


AGAIN = "the first input again"  # so that a gradient which is forgotten, or comes twice, shows
# The reentrant one of PyTorch's checkpoints is also a Function
PYTORCHS = SimpleNamespace(apply=partial(checkpoint.checkpoint, use_reentrant=True))
CASES = {  # functions, one after the other, each with its further inputs
    "one input": [(_square,)],
    "a second input, of whole numbers": [(_pick, torch.tensor([0, 0]))],
    "two checkpoints, one draws random numbers, one has two inputs": [(_draw,), (_product, AGAIN)],
}


def _run_checkpoint(answer, functions):
    """Call a checkpoint on x = 3 with the weight [5, 7]: for results, then again for bytes kept.

    functions: (function, *further inputs) of each; the second is called with the first's result,
    which is also its further input where that is AGAIN.
    """
    torch.manual_seed(20_261_122)  # an unlikely seed, and not its first numbers
    torch.rand(7)
    x = torch.tensor([3.0], dtype=torch.float64, requires_grad=True)
    weight = nn.Parameter(torch.tensor([5.0, 7.0], dtype=torch.float64))
    calls, contexts = [], []

    def counted(function, *inputs):
        calls.append(function)
        return function(weight, *inputs)

    def forward():
        y = x
        for function, *others in functions:
            others = [y if other == AGAIN else other for other in others]
            y = answer.apply(partial(counted, function), y, *others)
            contexts.append(getattr(y.grad_fn, "__dict__", {}))
            torch.rand(1)  # as later layers would
        return y

    y, in_forward = forward(), len(calls)
    y.backward(torch.full_like(y, 10.0))
    tensors = {"y": y, "the gradient of x": x.grad, "the gradient of weight": weight.grad}
    seen = {what: None if tensor is None else tensor.tolist() for what, tensor in tensors.items()}
    seen[CALLS] = [in_forward, len(calls) - in_forward]
    seen["the next random number"] = int(torch.randint(1000, (1,)))
    # Once more: hooks give backward other tensors, to which a forgotten detach does no harm.
    contexts.clear()
    with _Seen() as really:
        saved = measure_saved(forward)
    attributes = {id(tensor): tensor for tensor in tree_leaves(contexts) if torch.is_tensor(tensor)}
    for how, kept in {SAVED: saved, ATTRIBUTES: attributes.values()}.items():
        kept = [x.nbytes for x in kept if x.dtype != torch.uint8]  # uint8: generators' states
        seen[how] = sum(kept)
    return seen | {COPIED: really.copies}


def _checkpoint_trials():
    for what, functions in CASES.items():
        with torch.random.fork_rng(devices=[]):
            right = _run_checkpoint(PYTORCHS, functions)
        yield Trial(1, _run_checkpoint, (functions,), [right], what=what)


def _read_checkpoint(_trial, _rank, right, seen):
    """Explain what was kept in the wrong place, not called again, or not differentiated."""
    what = first_difference(right, seen)
    if what == "the gradient of weight" and seen[what] is None:
        return (
            "x has its gradient, the weights inside fn have none: torch.autograd.grad(output, "
            "inputs) gives those of the inputs alone. output.backward(gradient) gives all."
        )
    if what == CALLS and seen[CALLS][1] == 0:
        return (
            "fn wasn't called in backward, so all that forward computed had to wait for it. Keep "
            "the inputs only, and call fn again."
        )
    if what == SAVED and seen[SAVED] < right[SAVED] and seen[ATTRIBUTES]:
        return (
            "The inputs are kept as an attribute. Use ctx.save_for_backward(*inputs), which "
            "autograd knows of: it frees them after backward, and notices if one was changed."
        )
    return None


class CheckpointForgetsEnableGrad(checkpointing.Checkpoint):
    @staticmethod
    def backward(ctx, gradient):
        _, *inputs = ctx.saved_tensors
        ctx.fn(*[x.detach().requires_grad_(x.requires_grad) for x in inputs]).backward(gradient)


Checkpoint = Exercise(
    reference=checkpointing.Checkpoint,
    helpers=(random_numbers_from, random_state, set_random_state),
    trials=_checkpoint_trials,
    explain=_read_checkpoint,
    hints={
        "start": "Forward: ctx.fn = fn, ctx.save_for_backward(*inputs), and return fn(*inputs). No "
        "graph is recorded there.",
        "values": "Backward: copies of the inputs, x.detach().requires_grad_(x.requires_grad), and "
        "fn on them inside torch.enable_grad(). Then output.backward(gradient), and each copy has "
        "its .grad.",
        "error": "Call fn inside torch.enable_grad(), and return None for fn, then a gradient for "
        "each input. Random numbers? Forward: ctx.state = torch.get_rng_state(). Backward: "
        "torch.set_rng_state(ctx.state) before fn, inside torch.random.fork_rng(devices=[]), which "
        "puts everything back afterwards.",
    },
    praise="the same gradients to the last bit, random numbers included, and nothing is kept but "
    "the inputs. fn is called a second time for it.",
    note="With a GPU's random numbers and autocast. ddpkit.checkpointing.checkpoint calls it.",
    mistakes=[
        *mistakes("""
all_require_gradients: requires_grad_(x.requires_grad) → requires_grad_()
    An input of whole numbers can't require a gradient: requires_grad_(x.requires_grad).
forgets_the_random_state: , random_numbers_from(state) →
    The second call drew other numbers: torch.set_rng_state() to what it was in forward.
leaves_the_random_state: set_random_state(before) → pass
    Only the random numbers after backward are others: put the state back that backward found.
forgets_to_detach: x.detach().requires_grad_(x.requires_grad) → x
    x has its gradient twice: call fn on x.detach(), or it goes on from there into x itself.
forgets_none: return None, *(x.grad for x in inputs) → return tuple(x.grad for x in inputs)
    backward returns one for each argument of forward but ctx: None for fn, then one for each input.
ignores_the_gradient: output.backward(gradient) → output.backward(torch.ones_like(output))
    The gradients lack a factor 10, the gradient that backward is given: output.backward(gradient).
records_in_forward: return fn(*inputs) → with torch.enable_grad(): ctx.output = fn(*inputs)
        ⏎return ctx.output.detach()
    Forward keeps 24 bytes, and the inputs have 8. Keep nothing else: call fn without
    torch.enable_grad() there, and save the inputs only.
keeps_the_result: return fn(*inputs) → ctx.out = fn(*inputs)⏎return ctx.out
    Forward keeps 16 bytes more than the inputs. Keep nothing else, no result either.
"""),
        Mistake.written(
            CheckpointForgetsEnableGrad,
            "In backward no graph is recorded: call fn inside torch.enable_grad().",
        ),
    ],
)


# Products: a mode that keeps the results of linear layers


def _two_layers():
    """Return (weights, loss): the loss has two products with weights, and one without, a bmm."""
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    w = [torch.eye(2).mul(scale).requires_grad_() for scale in (0.5, 0.25, 2.0)]
    y = torch.tanh(x @ w[0])
    pairs = torch.bmm(y[None], y.T[None])[0].exp()
    return w, torch.addmm(w[2], pairs.mean(0, keepdim=True) * y, w[1], alpha=0.5).square().sum()


class _Seen(TorchDispatchMode):
    """Count the operations that are really computed, and the copies of numbers."""

    def __init__(self):
        super().__init__()
        self.ops = Counter()
        self.copies = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.ops["products with weights" if is_product(operation) else operation.name()] += 1
        self.copies += operation.name() in COPIES and args[0].is_floating_point()
        return operation(*args, **(kwargs or {}))


def _run_products(answer):
    """Run forward without a graph; then, given what that kept, forward and backward, twice."""
    with torch.no_grad(), _Seen() as forward, answer() as products:
        results = [_two_layers()[1].item()]
    kept = list(products.kept)
    seen = {"sizes of what is kept": [list(product.shape) for product in kept]}
    for _ in range(2):
        with _Seen() as really, answer(kept):
            weights, loss = _two_layers()
        results.append(loss.item())
        loss.backward()
    names = "products with weights", "aten::tanh", "aten::bmm"
    seen["computed again"] = {name: really.ops[name] for name in names}
    seen["results, the first time and twice again"] = results
    seen["gradients of the weights"] = [weight.grad.tolist() for weight in weights]
    seen["what was kept got a graph"] = any(product.requires_grad for product in kept)
    return seen | {COPIED: forward.copies + really.copies}


def _products_trials():
    weights, loss = _two_layers()
    loss.backward()
    right = {
        "sizes of what is kept": [[2, 2], [2, 2]],
        "computed again": {"products with weights": 0, "aten::tanh": 1, "aten::bmm": 1},
        "results, the first time and twice again": 3 * [loss.item()],
        "gradients of the weights": [weight.grad.tolist() for weight in weights],
        "what was kept got a graph": False,
        COPIED: 0,
    }
    yield Trial(1, _run_products, (), [right])


def _read_products(_trial, _rank, right, seen):
    what = "sizes of what is kept"
    if len(seen[what]) > len(right[what]):
        return (
            "More was kept than the results of the two products with weights. bmm is attention's, "
            "and is computed again like all others: is_product(operation) is false for it."
        )
    return None


Products = Exercise(
    reference=checkpointing.Products,
    trials=_products_trials,
    explain=_read_products,
    hints={
        "start": "Four cases: is it a product, and is it the first time or again? In three of them "
        "call operation(*args, **(kwargs or {})) and return what it gives.",
        "values": "For the first time: append a product's result to self.kept. Again: return "
        "self.kept.pop(0).detach(), and don't compute.",
    },
    praise="two results were kept, and no product with a weight was computed again.",
    note="SelectiveCheckpoint's forward runs fn in it, and saves what it kept.",
    mistakes=mistakes("""
computes_again: return self.kept.pop(0).detach() → pass
    The second time no product is computed: return what was kept, and don't call operation.
last_first: self.kept.pop(0) → self.kept.pop()
    The second time the last product comes first: take them in the order of forward, pop(0).
always_the_first: self.kept.pop(0) → self.kept[0]
    The second time every product is the first: take each once, pop(0).
without_detach: .pop(0).detach() → .pop(0)
    What was kept became part of the first graph: return an alias of it, .detach().
returns_products_only: return result → return result if is_product(operation) else None
    What the mode returns is the operation's result: return it for all others, too.
without_kwargs: result = operation(*args, **(kwargs or {})) → result = operation(*args)
    An operation lost its named arguments: operation(*args, **(kwargs or {})).
"""),
)


# checkpoint_sequential(functions, segments, x)

CUTS = {(6, 3): [2, 2, 2], (7, 3): [3, 2, 2], (5, 1): [5], (4, 4): [1, 1, 1, 1], (8, 3): [3, 3, 2]}


LENGTHS = "lengths of the segments, the longest first"


class _Layer(nn.Module):
    """Multiply, square, and note the call."""

    def __init__(self, number, calls):
        super().__init__()
        self.number, self.calls = number, calls
        self.weight = nn.Parameter(torch.tensor(1 + 2.0**-number, dtype=torch.float64))

    def forward(self, x):
        self.calls.append(self.number)
        return (x * self.weight).square()


def _run_sequential(answer, layers, segments):
    calls = []
    chain = nn.Sequential(*(_Layer(number, calls) for number in range(layers)))
    x = torch.tensor([0.5], dtype=torch.float64, requires_grad=True)
    y = answer(chain, segments, x)
    in_forward, lengths = list(calls), []
    calls.clear()
    y.backward()
    for before, number in pairwise([layers, *calls]):  # a segment's layers come in order
        if number != before + 1:
            lengths.append(0)
        lengths[-1] += 1
    lengths.append(layers - len(calls))  # the last isn't computed again
    gradients = [x.grad, *(layer.weight.grad for layer in chain)]
    gradients = [None if gradient is None else gradient.item() for gradient in gradients]
    return {
        "calls in forward": in_forward,
        LENGTHS: sorted(lengths, reverse=True),
        "the last layer is computed again": layers - 1 in calls,
        "the result, and the gradients": [y.item(), *gradients],
    }


def _sequential_trials():
    for (layers, segments), lengths in CUTS.items():
        plain = _run_sequential(lambda chain, _, x: chain(x), layers, segments)
        right = plain | {LENGTHS: lengths}
        what = f"{layers} layers, segments={segments}"
        yield Trial(1, _run_sequential, (layers, segments), [right], what=what)


def _read_segments(_trial, _rank, right, seen):
    if first_difference(right, seen) != LENGTHS or len(seen[LENGTHS]) != len(right[LENGTHS]):
        return None
    return (
        "So many segments, but one is longer than another by more than one, so more of it is alive "
        "at a time. Segment number i begins at len(functions) * i // segments."
    )


checkpoint_sequential = Exercise(
    reference=checkpointing.checkpoint_sequential,
    helpers=(cut,),
    trials=_sequential_trials,
    explain=_read_segments,
    hints={
        "start": "Where does segment number i begin? At len(functions) * i // segments.",
        "values": "For all segments but the last: x = checkpoint(functions[start:stop], x). A part "
        "of an nn.Sequential is one as well. Then return functions[start:](x).",
    },
    praise="only the last segment's activations and the others' inputs wait for backward.",
    mistakes=mistakes("""
without_checkpoints: x = checkpoint(functions[segment], x) → x = functions[segment](x)
    Nothing was computed again in backward: the segments aren't checkpoints.
each_alone: x = checkpoint(functions[segment], x) →
        ⏎for function in functions[segment]: x = checkpoint(function, x)
    Each layer has a checkpoint of its own, so each keeps its input. One around a whole segment.
last_one_too: return functions[last](x) → return checkpoint(functions[last], x)
    The last segment was computed again, too: its backward comes at once, so just call it.
each_from_the_start: x = checkpoint( → y = checkpoint(
    Each segment got the same x: it goes on from what the one before it gave, x = checkpoint(…, x).
loses_the_rest: cut(len(functions), → cut(len(functions) // segments * segments,
    Some layers were never called: 7 in 3 segments leave one over.
by_a_lambda: checkpoint(functions[segment], x) → checkpoint(lambda x: functions[segment](x), x)
    A lambda looks its names up when it is called, in backward: the loop is over then, and all call
    the last part. Give checkpoint the part itself, functions[start:stop].
"""),
)
