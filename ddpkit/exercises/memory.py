"""Checkers of notebook 06: block_bytes, held against a real block, and Checkpoint, against its
function alone."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import nn

from ddpkit import checkpointing
from ddpkit.models import Block
from ddpkit.runtime.launch import Run
from ddpkit.tools import memory
from ddpkit.tools.memory import ByteDropout, MaterialisedAttention, measure_saved

from .checker import Exercise, Mistake, Trial, is_stub, mistakes

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these

# block_bytes(batch, length, width, heads)

# Batch, length, width, heads. Width and length × heads have 32 as common factor, and else 10 and 7,
# 11 and 7, 13 and 15: so a sum of sbd, bs²H and a few sb is that in one way only.
SIZES = (2, 56, 320, 4), (3, 112, 352, 2), (1, 60, 416, 8)
TOLERANCE = 0.01  # the norms' means and deviations are less, and not in the formula; 1sbd is more


@dataclass
class Bytes:
    """What an answer predicts; right if it is at most 1 % from what is measured."""

    sizes: tuple[int, int, int, int]
    predicted: object
    measured: int

    @property
    def right(self) -> bool:
        if isinstance(self.predicted, bool) or not isinstance(self.predicted, int | float):
            return False
        return abs(self.predicted - self.measured) <= TOLERANCE * self.measured


def _run_block_bytes(answer):
    found = []
    for sizes in SIZES:
        batch, length, width, heads = sizes
        block = Block(width, heads, 0.0, MaterialisedAttention(ByteDropout(0.1))).bfloat16()
        block.dropout = ByteDropout(0.1)
        x = torch.randn(batch, length, width, dtype=torch.bfloat16, requires_grad=True)
        measured = sum(saved.nbytes for saved in measure_saved(block, x))
        found.append(Bytes(sizes, answer(*sizes), measured))
    return found


def _measured(run: Run) -> list[list[Bytes]]:
    return [[each if each.right else None for each in run[0]]]


def _first_wrong(got: list[Bytes]) -> Bytes:
    return next(each for each in got if not each.right)


def _beside_bytes(expected: list[Bytes], got: list[Bytes]) -> str:
    wrong = _first_wrong(got)
    batch, length, width, heads = wrong.sizes
    return (
        f"{wrong.predicted} bytes for batch {batch}, {length} tokens, width {width}, {heads} "
        f"heads; a real block keeps {wrong.measured}."
    )


def _read(nbytes: float, token: int, pair: int) -> tuple[int, int] | None:
    """How many sbd and bs²H it is, if it is that exactly."""
    for pairs in range(10):
        tokens, left = divmod(nbytes - pairs * pair, token)
        if left == 0 and 0 <= tokens <= 80:
            return int(tokens), pairs
    return None


def _explain_block_bytes(trial: Trial, rank: int, expected, got: list[Bytes]) -> str:
    wrong = _first_wrong(got)
    batch, length, width, heads = wrong.sizes
    if not isinstance(wrong.predicted, int | float):
        return "Return a number of bytes."
    token, pair = batch * length * width, batch * length**2 * heads
    read = _read(wrong.predicted, token, pair)
    if read is None:
        return f"sbd is {token} and bs²H is {pair}. How many of each does the block keep, in bytes?"
    tokens, pairs = read
    yours = f"Yours is {tokens}sbd + {pairs}bs²H."
    if pairs != 5:
        return (
            f"{yours} Look at the attention weights again, the bs²H. Who keeps them for backward: "
            "softmax, their dropout, the product with the values? As numbers or as a mask?"
        )
    if tokens < 34:
        return f"{yours} {34 - tokens}sbd are missing. Who needs what for backward?"
    return (
        f"{yours} {tokens - 34}sbd are too many. What is added or given to dropout isn't kept, and "
        "what one layer gives and the next is given is one thing."
    )


block_bytes = Exercise(
    reference=memory.block_bytes,
    trials=lambda: [Trial(1, _run_block_bytes, (), _measured, what="three blocks")],
    hints={
        "start": "A linear layer keeps its input, a norm its input, GELU its input, softmax its "
        "result, a product both factors.",
        "values": "As large as the input, of 2 bytes: norm, qkv; queries, keys, values; out; norm, "
        "MLP: 8. And twice 4 more. Attention weights, a matrix of length × length for each head: "
        "softmax's, a mask of 1 byte, and after dropout.",
    },
    praise="within 1 % of what a real block keeps, in three sizes. The rest are the norms' means "
    "and deviations.",
    explain=_explain_block_bytes,
    beside=_beside_bytes,
    note="ddpkit.tools.memory.block_activations has it term by term.",
    mistakes=mistakes("""
tokens_only: return 2 * numbers + masks → return 34 * tokens
    Attention has a weight for each pair of tokens, in each head: bs²H of them. What is kept of
    these?
masks_twice: return 2 * numbers + masks → return 36 * tokens + 5 * pairs
    Yours is 36sbd + 5bs²H. The masks of the two dropouts are in it twice: 16 numbers of 2 bytes,
    and 2 masks of 1, are 34sbd.
seventeen: return 2 * numbers + masks → return 17 * tokens + 5 * pairs
    That is 17 of something for each number: 16 numbers have 2 bytes, only the 2 masks have 1.
without_dropout: return 2 * numbers + masks → return 32 * tokens + 2 * pairs
    That is without dropout: its masks are 2sbd and 1bs²H, and weights after dropout 2bs²H more.
counts_numbers: return 2 * numbers + masks → return numbers
    Those are numbers, and without dropout. A number has 2 bytes.
four_bytes: 2 * numbers + → 4 * numbers +
    Those are numbers of 4 bytes. Here they have 2.
everything_twice: return 2 * numbers + masks → return 68 * tokens + 10 * pairs
    That is everything twice: numbers of 2 bytes, not 4, and masks of 1.
softmax_only: 2 * pairs⏎masks = 2 * tokens + pairs → pairs⏎masks = 2 * tokens
    Yours is 34sbd + 2bs²H. Look at the attention weights again, the bs²H.
one_norm: 16 * tokens + → 15 * tokens +
    2sbd are missing: the masks of both dropouts (1 each), or one tensor as large as the block's
    input (2), such as what a norm gives to the layer behind it.
no_norms: 16 * tokens + → 14 * tokens +
    Two things as large as the block's input are missing: perhaps what the two norms are given.
no_queries_keys_values: 16 * tokens + → 13 * tokens +
    Three are missing as large as the block's input: queries, keys and values?
no_gelu: 16 * tokens + → 12 * tokens +
    Something of 4 times the width is missing. The MLP keeps two: what GELU is given, and what it
    gives.
one_mask: 2 * tokens + pairs → tokens + pairs
    Yours is 33sbd + 5bs²H. 1sbd are missing.
sums_kept: 16 * tokens + → 18 * tokens +
    4sbd are too many. What is added or given to dropout isn't kept
one_head: length**2 * heads → length**2
    Yours has a matrix of attention weights for all heads together. Each head has its own: bs²H, not
    bs².
one_sequence: batch * length**2 → length**2
    Yours has the attention weights of one sequence. Each of the batch has its own: bs²H, not s²H.
not_squared: length**2 → length
    Yours has attention weights that don't grow with the square of the length: bs²H, not bsH.
no_batch: batch * length * width, batch * length**2 → length * width, length**2
    Every term has the factor b: each sequence of the batch has its own.
four_heads: length**2 * heads → length**2 * 4
    That was right in the first size, with 4 heads. Elsewhere there are others: use `heads`.
of_the_notebook: return 2 * → batch, length, width, heads = 2, 128, 64, 4
        ⏎tokens, pairs = batch * length * width, batch * length**2 * heads
        ⏎numbers, masks = 16 * tokens + 2 * pairs, 2 * tokens + pairs⏎return 2 *
    That is right for the b, s, d and H of the notebook. Use what the function is given.
with_weights: + masks → + masks + 24 * width**2
    Yours has the block's weights in it. They are there anyway: count only what comes of the batch.
in_words: return 2 * numbers + masks → return "34sbd"
    Return a number of bytes.
"""),
)


# Checkpoint: a torch.autograd.Function


class Directly:
    """In place of an answer: the function alone."""

    @staticmethod
    def apply(fn, *inputs):
        return fn(*inputs)


@dataclass
class Seen:
    """What came of a function and its backward.

    calls: how often it was called in forward, and in backward. random: the random number that comes
    next. kept_bytes: for backward. attribute_bytes: of tensors that are attributes of ctx.
    direct: what comes of the function alone, but for the call and the bytes of a checkpoint.
    """

    case: str
    y: list | None
    x_grad: list | None
    weight_grad: list | None
    calls: tuple[int, int]
    random: int
    kept_bytes: int
    attribute_bytes: int = 0
    direct: "Seen | None" = field(default=None, compare=False, repr=False)


GRADIENT = 10.0  # of what comes out


def _one_input(call, x, weight):
    return call(lambda x: (x * weight).square(), x)


def _whole_numbers(call, x, weight):
    places = torch.tensor([0, 0])
    return call(lambda x, places: (x * weight)[places].square(), x, places)


def _random(call, x, weight):
    return call(lambda x: x * weight * torch.randint(1, 1000, (1,)), x)


def _two_functions(call, x, weight):
    y = call(lambda x: x * weight * torch.randint(1, 1000, (1,)), x)
    torch.rand(3)
    return call(lambda x: (x + weight).square(), y)


CASES = {
    "one input": (_one_input, 8),
    "a second input, of whole numbers": (_whole_numbers, 8 + 16),
    "a function that draws random numbers": (_random, 8),
    "two functions, each in a checkpoint": (_two_functions, 8 + 8),
}


def _observe(answer, case: str) -> Seen:
    """Compute it on x = 3 with weight = 5, once to see what comes, once to see what is kept."""
    torch.manual_seed(20_261_122)  # a seed that nobody guesses, and not its first numbers
    torch.rand(7)
    program, kept = CASES[case]
    x = torch.tensor([3.0], dtype=torch.float64, requires_grad=True)
    weight = nn.Parameter(torch.tensor([5.0], dtype=torch.float64))
    calls, contexts, phase = [0, 0], [], 0

    def call(fn, *inputs):
        def counted(*inputs):
            calls[phase] += 1
            return fn(*inputs)

        made = answer.apply(counted, *inputs)
        contexts.append((getattr(made, "grad_fn", None), inputs))
        return made

    y, phase = program(call, x, weight), 1
    torch.rand(1)  # as layers behind it would
    if isinstance(y, torch.Tensor) and not is_stub(getattr(answer, "backward", None)):
        y.backward(torch.full_like(y, GRADIENT))
    random, made = int(torch.randint(1000, (1,))), tuple(calls)
    numbers = [None if each is None else each.tolist() for each in (y, x.grad, weight.grad)]
    # Apart from the above: hooks give backward other tensors, to which a forgotten detach does no
    # harm.
    contexts.clear()
    saved = measure_saved(lambda: program(call, x, weight))
    own, attributes = {x.data_ptr(), weight.data_ptr()}, {}
    for context, inputs in contexts:
        own |= {each.data_ptr() for each in inputs}
        if answer is not Directly:
            found = _tensors(getattr(context, "__dict__", None))
            attributes |= {each.data_ptr(): each for each in found}
    besides = [each for place, each in attributes.items() if place not in own]
    if answer is Directly:
        return Seen(case, *numbers, (made[0], made[0]), random, kept)
    kept = _bytes(chain(saved, besides))
    return Seen(case, *numbers, made, random, kept, _bytes(attributes.values()))


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


def _run_checkpoint(answer):
    """Case after case, up to the first that isn't as without a checkpoint."""
    found = []
    for case in CASES:
        direct, seen = (_observe(each, case) for each in (Directly, answer))
        seen.direct = direct
        found.append(seen)
        if seen != direct:
            break
    return found


def _directly(run: Run) -> list[list[Seen]]:
    return [[seen.direct for seen in run[0]]]


def _beside_seen(expected: list[Seen], got: list[Seen]) -> str:
    lines = [f"{got[-1].case}:"]
    for name, right in vars(expected[-1]).items():
        found = getattr(got[-1], name)
        if name != "direct" and found != right:
            lines.append(f"  {name.replace('_', ' ')}: {found}, expected {right}")
    return "\n".join(lines)


def _explain_checkpoint(trial: Trial, rank: int, expected: list[Seen], got: list[Seen]) -> str:
    right, found = expected[-1], got[-1]
    if found.y != right.y:
        return "y isn't what fn gives: forward returns fn(*inputs), and draws as fn alone would."
    if found.calls != right.calls:
        return "fn is called once in forward, and once more in backward."
    if found.kept_bytes > right.kept_bytes:
        return "Keep nothing but the inputs: no result, no graph."
    return (
        "Backward: fn again, on detached inputs, with a graph, with the random numbers of forward; "
        "then backward(gradient) from there, and the generator back where it was."
    )


def checkpoint_as_a_function(fn, *inputs):
    return fn(*inputs)


Checkpoint = Exercise(
    reference=checkpointing.Checkpoint,
    helpers=(
        checkpointing.random_numbers_from,
        checkpointing.random_state,
        checkpointing.set_random_state,
    ),
    trials=lambda: [Trial(1, _run_checkpoint, (), _directly, what="up to four cases")],
    hints={
        "start": "Forward: ctx.fn = fn, ctx.save_for_backward(*inputs), and return fn(*inputs). No "
        "graph is recorded there.",
        "values": "Backward: copies of the inputs, x.detach().requires_grad_(x.requires_grad), and "
        "fn on them inside torch.enable_grad(). Then output.backward(gradient), and each copy has "
        "its .grad.",
        "error": "Forward: ctx.state = torch.get_rng_state(). Backward: "
        "torch.set_rng_state(ctx.state) before fn, inside torch.random.fork_rng(devices=[]), which "
        "puts everything back afterwards.",
    },
    praise="the same gradients to the last bit, random numbers included, and nothing is kept but "
    "the inputs. fn is called a second time for it.",
    explain=_explain_checkpoint,
    beside=_beside_seen,
    note="With a GPU's random numbers and autocast. ddpkit.checkpointing.checkpoint calls it.",
    mistakes=[
        *mistakes("""
forgets_the_random_state: , random_numbers_from(state) →
    The second call drew other numbers than the first: torch.set_rng_state() to what it was in
    forward.
fixed_seed: state, *inputs = ctx.saved_tensors → state, *inputs = ctx.saved_tensors
        ⏎state = torch.Generator().manual_seed(0).get_state()
    A seed gives the same numbers each time, but not those that forward drew: keep
    torch.get_rng_state() in forward.
leaves_the_random_state: set_random_state(before) → pass
    All is right, but the random numbers that come after backward aren't those that would come
    without a checkpoint: put the generator's state back when fn was called, for example with
    torch.random.fork_rng().
seeds: ctx.fn, ctx.autocast = → torch.manual_seed(7)⏎ctx.fn, ctx.autocast =
    y isn't what fn gives: forward draws as ever. Leave the generator alone there.
forks_in_forward: return fn(*inputs) → with torch.random.fork_rng(devices=[]):
        ⏎    return fn(*inputs)
    The random numbers after forward aren't those that would come without a checkpoint: fork_rng()
    in backward only, forward draws as ever.
state_on_the_class: ctx.fn, ctx.autocast = fn, → Checkpoint.fn, ctx.autocast = fn,
    ctx.fn(*inputs) → Checkpoint.fn(*inputs)
    Of two checkpoints, both called the second's function again: what is kept on the class belongs
    to the last call. ctx is there for each.
without_graph: torch.enable_grad(), →
    if output.requires_grad → if True
    In backward no graph is recorded, unless it is computed inside torch.enable_grad().
loses_outside_the_graph: output.backward(gradient) → (output * gradient).sum().backward()
    In backward no graph is recorded, unless it is computed inside torch.enable_grad().
no_gradients_for_weights: output.backward(gradient) →
        ⏎grads = torch.autograd.grad(output, inputs, gradient)
    (x.grad for x in inputs) → grads
    weight has no gradient, though fn uses it: torch.autograd.grad gives one only to what it is
    asked for. output.backward(gradient) reaches everything.
forgets_to_detach: x.detach().requires_grad_(x.requires_grad) → x
    x has its gradient twice: call fn on x.detach(), or it goes on from there into x itself.
drops_the_inputs_gradients: x.grad for x in inputs → None for x in inputs
    x has no gradient: backward returns None for fn, and then a gradient for each input.
forgets_none: return None, *(x.grad for x in inputs) → return tuple(x.grad for x in inputs)
    backward returns one for each argument of forward but ctx: None for fn, then those of the
    inputs.
ignores_the_gradient: output.backward(gradient) → output.backward(torch.ones_like(output))
    The gradients lack a factor 10, the gradient that backward is given: output.backward(gradient).
wants_all_gradients: .requires_grad_(x.requires_grad) → .requires_grad_()
    Some inputs are whole numbers: x.detach().requires_grad_(x.requires_grad)
keeps_the_graph: return fn(*inputs) → ctx.inputs = [x.detach().requires_grad_() for x in inputs]
        ⏎with torch.enable_grad():⏎    ctx.output = fn(*ctx.inputs)⏎return ctx.output.detach()
    output = ctx.fn(*inputs) → output, inputs = ctx.output, ctx.inputs
    Backward didn't call fn again. Then what fn's backward needs was kept all the time: nothing is
    saved.
records_in_forward: return fn(*inputs) → with torch.enable_grad():
        ⏎    ctx.output = fn(*inputs)⏎return ctx.output.detach()
    Forward keeps 24 bytes, and the inputs have 8. Keep nothing else: call fn without
    torch.enable_grad() there, and save the inputs only.
keeps_attributes: ctx.save_for_backward(random_state(), *inputs) →
        ⏎ctx.saved = random_state(), *inputs
    ctx.saved_tensors → ctx.saved
    All gradients are right. But inputs kept as attributes of ctx aren't seen by autograd, which can
    neither free them after backward nor notice when they are changed:
    ctx.save_for_backward(*inputs), and in backward ctx.saved_tensors.
keeps_attributes_too: return fn(*inputs) → ctx.kept = {"inputs": [inputs]}⏎return fn(*inputs)
    But inputs kept as attributes of ctx aren't seen by autograd: ctx.save_for_backward is enough.
keeps_the_result: return fn(*inputs) → ctx.out = fn(*inputs)⏎return ctx.out
    Forward keeps 16 bytes, and the inputs have 8. Keep nothing else, no result either.
hides_the_inputs: ctx.save_for_backward(random_state(), *inputs) → state = random_state()
        ⏎ctx.saved = lambda: (state, *inputs)
    ctx.saved_tensors → ctx.saved()
    All gradients are right. But where are the inputs kept? ctx.save_for_backward(*inputs) is for
    that.
calls_twice_in_forward: return fn(*inputs) → fn(*inputs)⏎return fn(*inputs)
    Forward calls fn 2 times: once is enough. The second call belongs in backward.
calls_twice_in_backward: output = ctx.fn(*inputs) → ctx.fn(*inputs)⏎output = ctx.fn(*inputs)
    Backward calls fn 2 times: once is enough.
returns_nothing: return fn(*inputs) → fn(*inputs)
    forward must return what fn(*inputs) gives.
returns_the_input: return fn(*inputs) → fn(*inputs)⏎return inputs[0].clone()
    y isn't what fn gives: forward returns fn(*inputs)
adds_one: x.grad for x in inputs → x.grad + 1 if x.requires_grad else None for x in inputs
    x.grad isn't what fn alone would leave.
"""),
        Mistake.written(
            checkpoint_as_a_function,
            "Checkpoint is a class: class Checkpoint(torch.autograd.Function)",
        ),
    ],
)
