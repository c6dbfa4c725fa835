"""Checkers of notebook 06: block_bytes beside a real block, Checkpoint beside PyTorch's."""

from functools import cache, partial
from types import SimpleNamespace

import torch
from torch import nn
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves

from ddpkit import checkpointing
from ddpkit.checkpointing import random_numbers_from, random_state, set_random_state
from ddpkit.models import Block
from ddpkit.tools import memory
from ddpkit.tools.memory import ByteDropout, MaterialisedAttention, measure_saved

from .checker import Exercise, Trial, mistakes

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these

# block_bytes(batch, length, width, heads)

BLOCKS = (2, 56, 320, 4), (3, 112, 352, 2), (1, 60, 416, 8)  # batch, length, width, heads
TOLERANCE = 0.01  # the norms' means and deviations are less, and not in the formula; 1sbd is more


@cache
@torch.random.fork_rng(devices=[])
def _measured() -> dict[tuple, int]:
    """What a real block keeps, in bytes, by its sizes."""
    found = {}
    for batch, length, width, heads in BLOCKS:
        block = Block(width, heads, 0.0, MaterialisedAttention(ByteDropout(0.1))).bfloat16()
        block.dropout = ByteDropout(0.1)
        x = torch.randn(batch, length, width, dtype=torch.bfloat16, requires_grad=True)
        saved = measure_saved(block, x)
        found[batch, length, width, heads] = sum(each.nbytes for each in saved)
    return found


def _predict(answer, measured):
    """What the answer predicts; where that is near enough, what was measured."""
    seen = {}
    for sizes, right in measured.items():
        predicted = answer(*sizes)
        if isinstance(predicted, int | float) and abs(predicted - right) <= TOLERANCE * right:
            predicted = right
        seen[sizes] = predicted
    return seen


block_bytes = Exercise(
    reference=memory.block_bytes,
    trials=lambda: [Trial(1, _predict, (_measured(),), [_measured()], what="by arguments")],
    explain=lambda *_: "Return a number of bytes: how many sbd, and how many bs²H?",
    hints={
        "start": "A linear layer keeps its input, a norm its input, GELU its input, softmax its "
        "result, a product both factors.",
        "values": "As large as the input, of 2 bytes: norm, qkv; queries, keys, values; out; norm, "
        "MLP: 8. And twice 4 more. Attention weights, a matrix of length × length for each head: "
        "softmax's, a mask of 1 byte, and after dropout.",
    },
    praise="within 1 % of what a real block keeps; the rest are the norms' means and deviations.",
    note="ddpkit.tools.memory.block_activations has it term by term.",
    mistakes=mistakes("""
tokens_only: return 2 * numbers + masks → return 34 * tokens
    Attention has a weight for each pair of tokens, in each head: bs²H. What is kept of them?
masks_twice: return 2 * numbers + masks → return 36 * tokens + 5 * pairs
    Yours is 36sbd + 5bs²H. The masks are in it twice: 16 numbers of 2 bytes, 2 masks of 1.
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
    Something of 4 times the width is missing. The MLP keeps two: what GELU gets, and what it gives.
one_mask: 2 * tokens + pairs → tokens + pairs
    Yours is 33sbd + 5bs²H. 1sbd are missing.
sums_kept: 16 * tokens + → 18 * tokens +
    4sbd are too many. What is added or given to dropout isn't kept
one_head: length**2 * heads → length**2
    Yours has one matrix of attention weights. Each head has its own: bs²H, not bs².
one_sequence: batch * length**2 → length**2
    Yours has the attention weights of one sequence. Each of the batch has its own: bs²H, not s²H.
not_squared: length**2 → length
    Yours has attention weights that don't grow with the square of the length: bs²H, not bsH.
no_batch: batch * length * width, batch * length**2 → length * width, length**2
    Every term has the factor b: each sequence of the batch has its own.
four_heads: length**2 * heads → length**2 * 4
    That was right in the first size, with 4 heads. Elsewhere there are others: use `heads`.
of_the_notebook: batch * length * width, batch * length**2 * heads → 2 * 128 * 64, 2 * 128**2 * 4
    That is right for the b, s, d and H of the notebook. Use what the function is given.
with_weights: + masks → + masks + 24 * width**2
    Yours has the block's weights in it. They are there anyway: count only what comes of the batch.
in_words: return 2 * numbers + masks → return "34sbd"
    Return a number of bytes.
"""),
)


# Checkpoint: a torch.autograd.Function


def _square(weight, x):
    return (x * weight).square()


def _pick(weight, x, places):
    return (x * weight)[places].square()


def _draw(weight, x):
    return x * weight * torch.randint(1, 1000, (1,))


# The one of PyTorch's checkpoints that is a Function, too
PYTORCHS = SimpleNamespace(apply=partial(checkpoint.checkpoint, use_reentrant=True))
CASES = {  # functions, one after the other, each with its further inputs
    "one input": [(_square,)],
    "a second input, of whole numbers": [(_pick, torch.tensor([0, 0]))],
    "two functions in a checkpoint each, one draws random numbers": [(_draw,), (_square,)],
}


def _run_checkpoint(answer, functions):
    """Compute it on x = 3 with weight = 5 and 7, to see what comes, then to see what is kept."""
    torch.manual_seed(20_261_122)  # a seed that nobody guesses, and not its first numbers
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
            y = answer.apply(partial(counted, function), y, *others)
            contexts.append(getattr(y.grad_fn, "__dict__", {}))
            torch.rand(1)  # as layers behind it would
        return y

    y, in_forward = forward(), len(calls)
    y.backward(torch.full_like(y, 10.0))
    tensors = {"y": y, "the gradient of x": x.grad, "the gradient of weight": weight.grad}
    seen = {what: None if each is None else each.tolist() for what, each in tensors.items()}
    seen["calls of fn, in forward and in backward,"] = [in_forward, len(calls) - in_forward]
    seen["the next random number"] = int(torch.randint(1000, (1,)))
    # Once more: hooks give backward other tensors, to which a forgotten detach does no harm.
    contexts.clear()
    saved = measure_saved(forward)
    attributes = {id(each): each for each in tree_leaves(contexts) if torch.is_tensor(each)}
    for how, kept in {"by autograd": saved, "as attributes of ctx": attributes.values()}.items():
        kept = [each.nbytes for each in kept if each.dtype != torch.uint8]  # generators' states
        seen[f"bytes kept {how}"] = sum(kept)
    return seen


def _checkpoint_trials():
    for what, functions in CASES.items():
        with torch.random.fork_rng(devices=[]):
            right = _run_checkpoint(PYTORCHS, functions)
        yield Trial(1, _run_checkpoint, (functions,), [right], what=what)


Checkpoint = Exercise(
    reference=checkpointing.Checkpoint,
    helpers=(random_numbers_from, random_state, set_random_state),
    trials=_checkpoint_trials,
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
    note="With a GPU's random numbers and autocast. ddpkit.checkpointing.checkpoint calls it.",
    mistakes=mistakes("""
forgets_the_random_state: , random_numbers_from(state) →
    The second call drew other numbers: torch.set_rng_state() to what it was in forward.
fixed_seed: state, *inputs = ctx.saved_tensors → state, *inputs = ctx.saved_tensors
        ⏎state = torch.Generator().manual_seed(0).get_state()
    A seed doesn't give the numbers that forward drew: keep torch.get_rng_state() in forward.
leaves_the_random_state: set_random_state(before) → pass
    Only the random numbers after backward are others: put the generator's state back when fn was
    called, for example with torch.random.fork_rng().
seeds: ctx.fn, ctx.autocast = → torch.manual_seed(7)⏎ctx.fn, ctx.autocast =
    Forward draws as ever: leave the generator alone there.
forks_in_forward: return fn(*inputs) → with torch.random.fork_rng(devices=[]):
        ⏎    return fn(*inputs)
    The random numbers after forward are others: fork_rng() in backward only.
state_on_the_class: ctx.fn, ctx.autocast = fn, → Checkpoint.fn, ctx.autocast = fn,
    ctx.fn(*inputs) → Checkpoint.fn(*inputs)
    Of two checkpoints, both called the second's function again: what is kept on the class belongs
    to the last call. ctx is there for each.
without_graph: torch.enable_grad(), →
    if output.requires_grad → if True
    In backward no graph is recorded, unless it is computed inside torch.enable_grad().
loses_outside_the_graph: output.backward(gradient) → (output * gradient).sum().backward()
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
    backward returns one for each argument of forward but ctx: None for fn, then one for each input.
ignores_the_gradient: output.backward(gradient) → output.backward(torch.ones_like(output))
    The gradients lack a factor 10, the gradient that backward is given: output.backward(gradient).
wants_all_gradients: .requires_grad_(x.requires_grad) → .requires_grad_()
    Some inputs are whole numbers: x.detach().requires_grad_(x.requires_grad)
keeps_the_graph: return fn(*inputs) → ctx.inputs = [x.detach().requires_grad_() for x in inputs]
        ⏎with torch.enable_grad():⏎    ctx.output = fn(*ctx.inputs)⏎return ctx.output.detach()
    output = ctx.fn(*inputs) → output, inputs = ctx.output, ctx.inputs
    Backward didn't call fn again: what it needs was kept all the time, and nothing is saved.
records_in_forward: return fn(*inputs) → with torch.enable_grad():
        ⏎    ctx.output = fn(*inputs)⏎return ctx.output.detach()
    Forward keeps 24 bytes, and the inputs have 8. Keep nothing else: call fn without
    torch.enable_grad() there, and save the inputs only.
keeps_attributes: ctx.save_for_backward(random_state(), *inputs) →
        ⏎ctx.saved = random_state(), *inputs
    ctx.saved_tensors → ctx.saved
    All gradients are right. But autograd can neither free attributes of ctx after backward nor
    notice a change: ctx.save_for_backward(*inputs), and in backward ctx.saved_tensors.
keeps_attributes_too: return fn(*inputs) → ctx.kept = {"inputs": [inputs]}⏎return fn(*inputs)
    But inputs kept as attributes of ctx aren't seen by autograd: ctx.save_for_backward is enough.
keeps_the_result: return fn(*inputs) → ctx.out = fn(*inputs)⏎return ctx.out
    Forward keeps 16 bytes more than the inputs. Keep nothing else, no result either.
hides_the_inputs: ctx.save_for_backward(random_state(), *inputs) → state = random_state()
        ⏎ctx.saved = lambda: (state, *inputs)
    ctx.saved_tensors → ctx.saved()
    All gradients are right. But where are the inputs? ctx.save_for_backward(*inputs) keeps them.
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
as_a_function: class Checkpoint(torch.autograd.Function): →
        ⏎def Checkpoint(fn, *inputs):⏎    return fn(*inputs)⏎class Unused:
    Checkpoint is a class: class Checkpoint(torch.autograd.Function)
"""),
)
