"""Checkers of notebook 06: block_bytes, held against a real block, and Checkpoint, against its function alone.

Lengths are prime, so that a number of bytes is a sum of sbd and bs²H in one way only, and the checker can read it.
"""

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import nn

from ddpkit.models import Block
from ddpkit.runtime.launch import Run
from ddpkit.runtime.wire import is_library
from ddpkit.tools.memory import ByteDropout, MaterialisedAttention, measure_saved

from .old_checker import Exercise, Trial, is_stub

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these

# block_bytes(batch, length, width, heads)

SIZES = (2, 47, 64, 4), (3, 199, 64, 2), (1, 31, 128, 8)  # batch, length, width, heads
NOTEBOOKS = 2, 128, 64, 4  # b, s, d, H there
TOLERANCE = 0.01  # the norms' means and deviations are less, and not in the formula; 1sbd is more


def block_bytes(batch, length, width, heads):
    tokens, pairs = batch * length, batch * length**2 * heads
    numbers = 16 * tokens * width + 2 * pairs  # of 2 bytes each
    decisions = 2 * tokens * width + pairs  # of dropout, a byte each
    return 2 * numbers + decisions


@dataclass
class Bytes:
    """What an answer predicts; equal to another if they are 1 % apart at most. measured: of a real block."""

    predicted: object
    measured: int

    def __eq__(self, other):
        if isinstance(self.predicted, bool) or not isinstance(self.predicted, int | float):
            return False
        return abs(self.predicted - other.predicted) <= TOLERANCE * self.measured

    def __repr__(self):
        return f"{self.predicted} bytes" if isinstance(self.predicted, int | float) else repr(self.predicted)


def _run_block_bytes(answer, batch, length, width, heads):
    torch.manual_seed(0)
    block = Block(width, heads, 0.0, MaterialisedAttention(ByteDropout(0.1))).bfloat16()
    block.dropout = ByteDropout(0.1)
    x = torch.randn(batch, length, width, dtype=torch.bfloat16, requires_grad=True)
    return Bytes(answer(batch, length, width, heads), sum(saved.nbytes for saved in measure_saved(block, x)))


def _block_bytes_trials():
    for sizes in SIZES:
        batch, length, width, heads = sizes
        what = f"batch {batch}, {length} tokens, width {width}, {heads} heads"
        yield Trial(1, _run_block_bytes, sizes, lambda run: [Bytes(run[0].measured, run[0].measured)], what=what)


def _block_bytes_cause(trial: Trial, rank: int, expected: Bytes, got: Bytes) -> str:
    batch, length, width, heads = trial.args
    if isinstance(got.predicted, torch.Tensor):
        return "Return a Python number, not a tensor."
    if isinstance(got.predicted, bool) or not isinstance(got.predicted, int | float):
        return "Return a number of bytes."
    token, pair = batch * length * width, batch * length**2 * heads
    formula = block_bytes.reference
    if got.predicted == formula(*NOTEBOOKS):
        return "That is right for the b, s, d and H of the notebook. Use what the function is given."
    if heads != SIZES[0][-1] and got.predicted == formula(batch, length, width, SIZES[0][-1]):
        return f"That was right in the first size, with {SIZES[0][-1]} heads. Here are {heads}: use `heads`."
    for less, why in {
        heads: "a matrix of attention weights for all heads together. Each head has its own: bs²H, not bs².",
        batch: "the attention weights of one sequence. Each of the batch has its own: bs²H, not s²H.",
        length: "attention weights that don't grow with the square of the length: bs²H, not bsH.",
    }.items():
        if got.predicted == 34 * token + 5 * pair // less:
            return f"Yours has {why}"
    read = _read(got.predicted, token, pair)
    if read:
        return f"Yours is {read[0]}sbd + {read[1]}bs²H. {_wrong_block(*read)}"
    if _read(got.predicted * batch, token, pair):
        return "Every term has the factor b: each sequence of the batch has its own."
    weights = 12 * width**2
    if any(_read(got.predicted - itemsize * weights, token, pair) for itemsize in (2, 4)):
        return "Yours has the block's weights in it. They are there anyway: count only what comes of the batch."
    return f"Here sbd is {token} and bs²H is {pair}. How many of each does the block keep, in bytes?"


def _read(nbytes: float, token: int, pair: int) -> tuple[int, int] | None:
    """How many sbd and bs²H it is, if it is that exactly."""
    for pairs in range(13):
        tokens, left = divmod(nbytes - pairs * pair, token)
        if left == 0 and 0 <= tokens <= 80:
            return int(tokens), pairs
    return None


def _wrong_block(tokens: int, pairs: int) -> str:
    """What is wrong with so many sbd and bs²H, which should be 34 and 5."""
    usual = {
        (36, 5): "The masks of the two dropouts are in it twice: 16 numbers of 2 bytes, and 2 masks of 1, are 34sbd.",
        (17, 5): "That is 17 of something for each number: 16 numbers have 2 bytes, only the 2 masks have 1.",
        (32, 2): "That is without dropout: its masks are 2sbd and 1bs²H, and weights after dropout 2bs²H more.",
        (66, 9): "Those are numbers of 4 bytes. Here they have 2.",
        (68, 10): "That is everything twice: numbers of 2 bytes, not 4, and masks of 1.",
        (16, 2): "Those are numbers, and without dropout. A number has 2 bytes.",
    }
    if (tokens, pairs) in usual:
        return usual[tokens, pairs]
    if pairs == 0:
        return "Attention has a weight for each pair of tokens, in each head: bs²H of them. What is kept of these?"
    if pairs != 5:
        return (
            "Look at the weights of attention again, the bs²H. Who keeps them for backward: softmax, their dropout, "
            "the product with the values? As numbers or as a mask?"
        )
    missing = {
        2: "2sbd are missing: the masks of both dropouts (1 each), or one tensor as large as the block's input (2), "
        "such as what a norm gives to the layer behind it.",
        4: "Two things as large as the block's input are missing: perhaps what the two norms are given.",
        6: "Three are missing as large as the block's input: queries, keys and values?",
        8: "Something of 4 times the width is missing. The MLP keeps two: what GELU is given, and what it gives.",
    }
    if tokens < 34:
        return missing.get(34 - tokens, f"{34 - tokens}sbd are missing. Go through the block: who needs what backward?")
    return (
        f"{tokens - 34}sbd are too many. What is added or given to dropout isn't kept, and what one layer gives and "
        "the next is given is one thing."
    )


block_bytes = Exercise(
    block_bytes,
    _block_bytes_trials,
    [
        "A linear layer keeps its input, a norm its input, GELU its input, softmax its result, a product both factors.",
        "As large as the input, of 2 bytes: norm, qkv; queries, keys, values; out; norm, MLP: 8. And twice 4 more.",
        "Attention weights, for each head a matrix of length × length: softmax's, a mask of 1 byte, and after dropout.",
    ],
    "within 1 % of what a real block keeps, in three sizes. The rest are the norms' means and deviations.",
    _block_bytes_cause,
    lambda trial, run: None,
    note="# Ours. ddpkit.memory.block_activations has it term by term.",
)


# Checkpoint: a torch.autograd.Function


class Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, fn, *inputs):
        ctx.fn, ctx.state = fn, torch.get_rng_state()
        ctx.save_for_backward(*inputs)
        return fn(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        inputs = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            torch.set_rng_state(ctx.state)
            output = ctx.fn(*inputs)
        output.backward(gradient)
        return None, *(x.grad for x in inputs)


class Directly:
    """In place of an answer: the function alone."""

    @staticmethod
    def apply(fn, *inputs):
        return fn(*inputs)


@dataclass
class Seen:
    """What came of a function and its backward.

    calls: how often it was called in forward, and in backward. random: the random number that comes next, if it draws
    any. kept_bytes: for backward. attribute_bytes: of tensors that are attributes of ctx. empty: there is no backward
    yet. direct: what comes of the function alone, except for the call and the bytes that a checkpoint makes of it.
    """

    y: list | None
    x_grad: list | None
    weight_grad: list | None
    calls: tuple[int, int]
    random: int
    kept_bytes: int
    attribute_bytes: int = 0
    empty: bool = False
    direct: "Seen | None" = field(default=None, compare=False)

    def __repr__(self):
        gradients = f"x.grad {_brief(self.x_grad)}, weight.grad {_brief(self.weight_grad)}"
        calls = f"fn called {self.calls[0]} + {self.calls[1]} times"
        random = f", next random number {self.random}" * bool(self.random)
        attributes = f", {self.attribute_bytes} in attributes of ctx" * bool(self.attribute_bytes)
        return f"y {_brief(self.y)}, {gradients}, {calls}{random}, {self.kept_bytes} bytes kept{attributes}"


def _brief(values: list | None) -> str:
    return "None" if values is None else f"[{', '.join(f'{value:g}' for value in values)}]"


def _one_input(x, weight):
    return (x * weight).square()


def _places(x, weight, places):
    return (x * weight)[places].square()


def _random(x, weight):
    return x * weight * torch.randint(1, 1000, (1,))


GRADIENT = 10.0  # of what comes out


def _observe(answer, compute: Callable, others: list) -> Seen:
    """Call it on x = 3 with weight = 5, once to see what comes of it, once to see what is kept."""
    torch.manual_seed(0)
    x = torch.tensor([3.0], dtype=torch.float64, requires_grad=True)
    weight = nn.Parameter(torch.tensor([5.0], dtype=torch.float64))
    calls, phase = [0, 0], 0

    def fn(x, *others):
        calls[phase] += 1
        return compute(x, weight, *others)

    empty = is_stub(getattr(answer, "backward", None))
    y, phase = answer.apply(fn, x, *others), 1
    torch.rand(1)  # as layers behind it would
    if isinstance(y, torch.Tensor) and not empty:
        y.backward(torch.full_like(y, GRADIENT))
    random = int(torch.randint(1000, (1,))) if compute is _random else 0
    numbers = [None if each is None else each.tolist() for each in (y, x.grad, weight.grad)]
    made = tuple(calls)
    # Apart from the above: hooks give backward other tensors, with which a forgotten detach would do no harm.
    again = []
    saved = measure_saved(lambda: again.append(answer.apply(fn, x, *others)))
    ctx = getattr(again[0], "grad_fn", None)
    attributes = {each.data_ptr(): each for each in _tensors(getattr(ctx, "__dict__", None))}
    own = {x.data_ptr(), weight.data_ptr(), *(other.data_ptr() for other in others)}  # is among what is saved
    besides = [each for place, each in attributes.items() if place not in own]
    kept_bytes, attribute_bytes = (_bytes(each) for each in (chain(saved, besides), attributes.values()))
    return Seen(*numbers, made, random, kept_bytes, attribute_bytes, empty)


def _tensors(kept: object) -> Iterator[torch.Tensor]:
    """All in it, if it is a tensor, or a list of such, a dict or a tuple."""
    if isinstance(kept, torch.Tensor):
        yield kept
    elif isinstance(kept, dict | list | tuple | set):
        for each in kept.values() if isinstance(kept, dict) else kept:
            yield from _tensors(each)


def _bytes(kept) -> int:
    """Without generators' states, which may be kept."""
    return sum(each.nbytes for each in kept if each.dtype != torch.uint8)


def _run_checkpoint(answer, compute, others):
    direct = _observe(Directly, compute, others)
    direct.calls = 1, 1
    direct.kept_bytes = torch.float64.itemsize + sum(other.nbytes for other in others)
    try:
        seen = _observe(answer, compute, others)
    except (RuntimeError, AttributeError) as error:
        why = next((why for said, why in USUAL_ERRORS.items() if said in str(error)), None)
        if why is None:
            raise
        files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
        way = None if all(map(is_library, files)) else error.__traceback__  # torch's lines alone explain nothing
        raise type(error)(f"{error}\n({why})").with_traceback(way) from None
    seen.direct = direct
    return seen


USUAL_ERRORS = {  # and their causes
    "has no attribute 'apply'": "Checkpoint is a class: class Checkpoint(torch.autograd.Function)",
    "does not require grad": "in backward no graph is recorded, unless it is computed inside torch.enable_grad()",
    "incorrect number of gradients": "backward returns one for each argument of forward but ctx: None for fn, then "
    "those of the inputs",
    "floating point": "some inputs are whole numbers: x.detach().requires_grad_(x.requires_grad)",
}


def _checkpoint_trials():
    cases = [
        (_one_input, [], "one input"),
        (_places, [torch.tensor([0, 0])], "a second input of whole numbers"),
        (_random, [], "a function that draws random numbers"),
    ]
    for compute, others, what in cases:
        yield Trial(1, _run_checkpoint, (compute, others), lambda run: [run[0].direct], what=what)


def _checkpoint_cause(trial: Trial, rank: int, expected: Seen, got: Seen) -> str | None:
    random = trial.args[0] is _random
    if got.y is None:
        return "forward must return what fn(*inputs) gives."
    if got.y != expected.y:
        return f"y isn't what fn gives.{' Forward draws as ever: leave the generator alone there.' * random}"
    if got.empty:
        return None  # it says that anyway
    if got.calls != expected.calls:
        return _wrong_calls(*got.calls)
    if got.kept_bytes > expected.kept_bytes:
        return (
            f"Forward keeps {got.kept_bytes} bytes, and the inputs have {expected.kept_bytes}. Keep nothing else, no "
            "result either: call fn without torch.enable_grad() there, and save the inputs only."
        )
    for name, wanted, came in (
        ("x", expected.x_grad, got.x_grad),
        ("weight", expected.weight_grad, got.weight_grad),
    ):
        if came != wanted:
            return _wrong_gradient(name, wanted, came, random)
    if got.attribute_bytes:
        return (
            "All gradients are right. But inputs kept as attributes of ctx aren't seen by autograd, which can neither "
            "free them after backward nor notice when they are changed: ctx.save_for_backward(*inputs), and in "
            "backward ctx.saved_tensors."
        )
    if got.kept_bytes < expected.kept_bytes:
        return "All gradients are right. But where are the inputs kept? ctx.save_for_backward(*inputs) is for that."
    return (
        "All is right, but the random numbers that come after backward aren't those that would come without a "
        "checkpoint: put the generator's state back when fn was called, for example with torch.random.fork_rng() (in "
        "backward only: forward draws as ever)."
    )


def _wrong_calls(forward: int, backward: int) -> str:
    if forward != 1:
        return f"Forward calls fn {forward} times: once is enough. The second call belongs in backward."
    if backward == 0:
        return "Backward didn't call fn again. Then what fn's backward needs was kept all the time: nothing is saved."
    return f"Backward calls fn {backward} times: once is enough."


def _wrong_gradient(name: str, wanted: list, came: list | None, random: bool) -> str:
    if came is None and name == "x":
        return "x has no gradient: backward returns None for fn, and then a gradient for each input."
    if came is None:
        return (
            "weight has no gradient, though fn uses it: torch.autograd.grad gives one only to what it is asked for. "
            "output.backward(gradient) reaches everything."
        )
    [factor] = {value / right for value, right in zip(came, wanted, strict=True)}
    if factor == 2:
        return f"{name} has its gradient twice: call fn on x.detach(), or it goes on from there into x itself."
    if factor == 1 / GRADIENT:
        return (
            f"{name}.grad lacks a factor {GRADIENT:g}, the gradient that backward is given: output.backward(gradient)."
        )
    if random:
        return "The second call drew other numbers than the first: torch.set_rng_state() to what it was in forward."
    return (
        f"{name}.grad isn't what fn alone would leave. Call fn again on the inputs, then backward(gradient) from there."
    )


def _checkpoint_praise(trial: Trial, run: Run) -> str:
    return (
        "the same gradients to the last bit, random numbers included, and nothing is kept but the inputs. fn is called "
        "a second time for it."
    )


Checkpoint = Exercise(
    Checkpoint,
    _checkpoint_trials,
    [
        "Forward: ctx.fn = fn, ctx.save_for_backward(*inputs), and return fn(*inputs). No graph is recorded there.",
        "Backward: copies of the inputs, x.detach().requires_grad_(x.requires_grad), and fn on them inside "
        "torch.enable_grad(). Then output.backward(gradient), and each copy has its .grad.",
        "Forward: ctx.state = torch.get_rng_state(). Backward: torch.set_rng_state(ctx.state) before fn, inside "
        "torch.random.fork_rng(devices=[]), which puts everything back afterwards.",
    ],
    _checkpoint_praise,
    _checkpoint_cause,
    lambda trial, run: None,
    note="# Ours. ddpkit.checkpointing serves autocast, GPUs, and several outputs, too.",
)
