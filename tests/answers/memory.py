"""Answers to the exercises of notebook 06: wrong ones, with what the verdict must say, and other right ones."""

import torch

# block_bytes


def _formula(tokens, pairs, name="formula"):
    """tokens · sbd + pairs · bs²H."""

    def formula(batch, length, width, heads):
        return tokens * batch * length * width + pairs * batch * length**2 * heads

    formula.__name__ = name
    return formula


block_bytes_of_tokens_only = _formula(34, 0, "block_bytes_of_tokens_only")
block_bytes_masks_twice = _formula(36, 5, "block_bytes_masks_twice")
block_bytes_seventeen = _formula(17, 5, "block_bytes_seventeen")
block_bytes_without_dropout = _formula(32, 2, "block_bytes_without_dropout")
block_bytes_numbers = _formula(16, 2, "block_bytes_numbers")
block_bytes_of_4_bytes = _formula(66, 9, "block_bytes_of_4_bytes")
block_bytes_everything_twice = _formula(68, 10, "block_bytes_everything_twice")
block_bytes_softmax_only = _formula(34, 2, "block_bytes_softmax_only")
block_bytes_one_norm = _formula(32, 5, "block_bytes_one_norm")
block_bytes_no_norms = _formula(30, 5, "block_bytes_no_norms")
block_bytes_no_queries_keys_values = _formula(28, 5, "block_bytes_no_queries_keys_values")
block_bytes_no_gelu = _formula(26, 5, "block_bytes_no_gelu")
block_bytes_one_mask = _formula(33, 5, "block_bytes_one_mask")
block_bytes_one_more = _formula(35, 5, "block_bytes_one_more")
block_bytes_sums_kept = _formula(38, 5, "block_bytes_sums_kept")


def block_bytes_one_head(batch, length, width, heads):
    return 34 * batch * length * width + 5 * batch * length**2


def block_bytes_one_sequence(batch, length, width, heads):
    return 34 * batch * length * width + 5 * length**2 * heads


def block_bytes_not_squared(batch, length, width, heads):
    return 34 * batch * length * width + 5 * batch * length * heads


def block_bytes_no_batch(batch, length, width, heads):
    return 34 * length * width + 5 * length**2 * heads


def block_bytes_of_four_heads(batch, length, width, heads):
    return 34 * batch * length * width + 5 * batch * length**2 * 4


def block_bytes_of_the_notebook(batch, length, width, heads):
    b, s, d, H = 2, 128, 64, 4
    return 34 * b * s * d + 5 * b * s**2 * H


def block_bytes_as_a_tensor(batch, length, width, heads):
    return torch.tensor(_formula(34, 5)(batch, length, width, heads))


def block_bytes_with_weights(batch, length, width, heads):
    return _formula(34, 5)(batch, length, width, heads) + 2 * 12 * width**2


def block_bytes_at_random(batch, length, width, heads):
    return 12345


def block_bytes_in_words(batch, length, width, heads):
    return "34sbd"


# Checkpoint


class Right(torch.autograd.Function):
    """Right; those below do a step of it otherwise."""

    @staticmethod
    def forward(ctx, fn, *inputs):
        ctx.fn, ctx.state = fn, torch.get_rng_state()
        ctx.save_for_backward(*inputs)
        return fn(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        return _backward(ctx, gradient)


def _detached(ctx):
    return [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]


def _again(ctx, inputs):
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        torch.set_rng_state(ctx.state)
        return ctx.fn(*inputs)


def _backward(ctx, gradient):
    inputs = _detached(ctx)
    _again(ctx, inputs).backward(gradient)
    return None, *(x.grad for x in inputs)


class CheckpointForgetsTheRandomState(Right):
    @staticmethod
    def backward(ctx, gradient):
        inputs = _detached(ctx)
        with torch.enable_grad():
            output = ctx.fn(*inputs)
        output.backward(gradient)
        return None, *(x.grad for x in inputs)


class CheckpointLeavesTheRandomState(Right):
    @staticmethod
    def backward(ctx, gradient):
        inputs = _detached(ctx)
        torch.set_rng_state(ctx.state)
        with torch.enable_grad():
            output = ctx.fn(*inputs)
        output.backward(gradient)
        return None, *(x.grad for x in inputs)


class CheckpointSeeds(Right):
    @staticmethod
    def forward(ctx, fn, *inputs):
        torch.manual_seed(7)
        return Right.forward(ctx, fn, *inputs)


class CheckpointForksInForward(Right):
    @staticmethod
    def forward(ctx, fn, *inputs):
        with torch.random.fork_rng(devices=[]):
            return Right.forward(ctx, fn, *inputs)


class CheckpointLosesOutsideTheGraph(Right):
    @staticmethod
    def backward(ctx, gradient):
        inputs = _detached(ctx)
        with torch.enable_grad():
            output = ctx.fn(*inputs)
        (output * gradient).sum().backward()
        return None, *(x.grad for x in inputs)


class CheckpointWithoutGraph(Right):
    @staticmethod
    def backward(ctx, gradient):
        inputs = _detached(ctx)
        ctx.fn(*inputs).backward(gradient)
        return None, *(x.grad for x in inputs)


class CheckpointNoGradientsForWeights(Right):
    @staticmethod
    def backward(ctx, gradient):
        inputs = _detached(ctx)
        return None, *torch.autograd.grad(_again(ctx, inputs), inputs, gradient)


class CheckpointForgetsToDetach(Right):
    @staticmethod
    def backward(ctx, gradient):
        _again(ctx, ctx.saved_tensors).backward(gradient)
        return None, *(x.grad for x in ctx.saved_tensors)


class CheckpointDropsTheInputsGradients(Right):
    @staticmethod
    def backward(ctx, gradient):
        _again(ctx, _detached(ctx)).backward(gradient)
        return None, *(None for _ in ctx.saved_tensors)


class CheckpointForgetsNone(Right):
    @staticmethod
    def backward(ctx, gradient):
        return _backward(ctx, gradient)[1:]


class CheckpointIgnoresTheGradient(Right):
    @staticmethod
    def backward(ctx, gradient):
        inputs = _detached(ctx)
        output = _again(ctx, inputs)
        output.backward(torch.ones_like(output))
        return None, *(x.grad for x in inputs)


class CheckpointWantsAllGradients(Right):
    @staticmethod
    def backward(ctx, gradient):
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        _again(ctx, inputs).backward(gradient)
        return None, *(x.grad for x in inputs)


class CheckpointKeepsTheGraph(Right):
    @staticmethod
    def forward(ctx, fn, *inputs):
        ctx.inputs = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
        with torch.enable_grad():
            ctx.output = fn(*ctx.inputs)
        return ctx.output.detach()

    @staticmethod
    def backward(ctx, gradient):
        ctx.output.backward(gradient)
        return None, *(x.grad for x in ctx.inputs)


class CheckpointRecordsInForward(Right):
    @staticmethod
    def forward(ctx, fn, *inputs):
        ctx.fn, ctx.state = fn, torch.get_rng_state()
        ctx.save_for_backward(*inputs)
        with torch.enable_grad():
            ctx.output = fn(*inputs)
        return ctx.output.detach()


class CheckpointKeepsAttributes(Right):
    """All right but for the place where the inputs are kept."""

    @staticmethod
    def forward(ctx, fn, *inputs):
        ctx.fn, ctx.inputs, ctx.state = fn, inputs, torch.get_rng_state()
        return fn(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        inputs = [x.detach().requires_grad_(x.requires_grad) for x in ctx.inputs]
        now = torch.get_rng_state()
        torch.set_rng_state(ctx.state)
        with torch.enable_grad():
            output = ctx.fn(*inputs)
        torch.set_rng_state(now)
        output.backward(gradient)
        return None, *(x.grad for x in inputs)


class CheckpointKeepsAttributesToo(Right):
    @staticmethod
    def forward(ctx, fn, *inputs):
        ctx.kept = {"inputs": [inputs]}
        return Right.forward(ctx, fn, *inputs)


class CheckpointKeepsTheResult(Right):
    @staticmethod
    def forward(ctx, fn, *inputs):
        ctx.out = Right.forward(ctx, fn, *inputs)
        return ctx.out


class CheckpointKeepsTheResultInAList(Right):
    @staticmethod
    def forward(ctx, fn, *inputs):
        ctx.all = [fn, (Right.forward(ctx, fn, *inputs),)]
        return ctx.all[1][0]


class CheckpointHidesTheInputs(Right):
    """In a function, where nobody looks."""

    @staticmethod
    def forward(ctx, fn, *inputs):
        ctx.fn, ctx.inputs, ctx.state = fn, lambda: inputs, torch.get_rng_state()
        return fn(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        inputs = [x.detach().requires_grad_(x.requires_grad) for x in ctx.inputs()]
        _again(ctx, inputs).backward(gradient)
        return None, *(x.grad for x in inputs)


class CheckpointWithoutBackward(Right):
    @staticmethod
    def backward(ctx, gradient):
        """Not yet."""
        ...  # noqa: PIE790


class CheckpointCallsTwiceInForward(Right):
    @staticmethod
    def forward(ctx, fn, *inputs):
        fn(*inputs)
        return Right.forward(ctx, fn, *inputs)


class CheckpointCallsTwiceInBackward(Right):
    @staticmethod
    def backward(ctx, gradient):
        _again(ctx, _detached(ctx))
        return _backward(ctx, gradient)


class CheckpointReturnsNothing(Right):
    @staticmethod
    def forward(ctx, fn, *inputs):
        Right.forward(ctx, fn, *inputs)


class CheckpointReturnsTheInput(Right):
    @staticmethod
    def forward(ctx, fn, x, *others):
        Right.forward(ctx, fn, x, *others)
        return x.clone()


class CheckpointAddsOne(Right):
    @staticmethod
    def backward(ctx, gradient):
        return None, *(None if each is None else each + 1 for each in _backward(ctx, gradient)[1:])


def checkpoint_as_a_function(fn, *inputs):
    return fn(*inputs)


WRONG = [  # exercise, answer, what the verdict must say
    ("block_bytes", block_bytes_of_tokens_only, "34sbd + 0bs²H. Attention has a weight for each pair of tokens"),
    ("block_bytes", block_bytes_masks_twice, "36sbd + 5bs²H. The masks of the two dropouts are in it twice"),
    ("block_bytes", block_bytes_seventeen, "17 of something for each number"),
    ("block_bytes", block_bytes_without_dropout, "That is without dropout"),
    ("block_bytes", block_bytes_numbers, "Those are numbers, and without dropout"),
    ("block_bytes", block_bytes_of_4_bytes, "Those are numbers of 4 bytes"),
    ("block_bytes", block_bytes_everything_twice, "That is everything twice"),
    ("block_bytes", block_bytes_softmax_only, "34sbd + 2bs²H. Look at the weights of attention again"),
    ("block_bytes", block_bytes_one_norm, "2sbd are missing: the masks of both dropouts (1 each), or one tensor"),
    ("block_bytes", block_bytes_no_norms, "perhaps what the two norms are given"),
    ("block_bytes", block_bytes_no_queries_keys_values, "queries, keys and values?"),
    ("block_bytes", block_bytes_no_gelu, "Something of 4 times the width is missing"),
    ("block_bytes", block_bytes_one_mask, "1sbd are missing"),
    ("block_bytes", block_bytes_one_more, "1sbd are too many"),
    ("block_bytes", block_bytes_sums_kept, "4sbd are too many. What is added or given to dropout isn't kept"),
    ("block_bytes", block_bytes_one_head, "Each head has its own"),
    ("block_bytes", block_bytes_one_sequence, "Each of the batch has its own"),
    ("block_bytes", block_bytes_not_squared, "don't grow with the square of the length"),
    ("block_bytes", block_bytes_no_batch, "Every term has the factor b"),
    ("block_bytes", block_bytes_of_four_heads, "right in the first size, with 4 heads. Here are 2: use `heads`"),
    ("block_bytes", block_bytes_of_the_notebook, "Use what the function is given"),
    ("block_bytes", block_bytes_as_a_tensor, "a Python number, not a tensor"),
    ("block_bytes", block_bytes_with_weights, "Yours has the block's weights in it"),
    ("block_bytes", block_bytes_at_random, "Here sbd is 6016 and bs²H is 17672"),
    ("block_bytes", block_bytes_in_words, "Return a number of bytes"),
    ("Checkpoint", CheckpointForgetsTheRandomState, "The second call drew other numbers than the first"),
    ("Checkpoint", CheckpointLeavesTheRandomState, "put the generator's state back when fn was called"),
    ("Checkpoint", CheckpointSeeds, "leave the generator alone there"),
    ("Checkpoint", CheckpointWithoutGraph, "no graph is recorded, unless it is computed inside torch.enable_grad()"),
    ("Checkpoint", CheckpointLosesOutsideTheGraph, "unless it is computed inside torch.enable_grad()"),
    ("Checkpoint", CheckpointForksInForward, "fork_rng() (in backward only: forward draws as ever)"),
    ("Checkpoint", CheckpointNoGradientsForWeights, "torch.autograd.grad gives one only to what it is asked for"),
    ("Checkpoint", CheckpointForgetsToDetach, "x has its gradient twice: call fn on x.detach()"),
    ("Checkpoint", CheckpointDropsTheInputsGradients, "and then a gradient for each input"),
    ("Checkpoint", CheckpointForgetsNone, "backward returns one for each argument of forward but ctx"),
    ("Checkpoint", CheckpointIgnoresTheGradient, "lacks a factor 10, the gradient that backward is given"),
    ("Checkpoint", CheckpointWantsAllGradients, "some inputs are whole numbers"),
    ("Checkpoint", CheckpointKeepsTheGraph, "Backward didn't call fn again"),
    ("Checkpoint", CheckpointRecordsInForward, "Forward keeps 24 bytes, and the inputs have 8"),
    ("Checkpoint", CheckpointKeepsAttributes, "All gradients are right. But inputs kept as attributes of ctx"),
    ("Checkpoint", CheckpointKeepsAttributesToo, "But inputs kept as attributes of ctx aren't seen by autograd"),
    ("Checkpoint", CheckpointKeepsTheResult, "the inputs have 8. Keep nothing else, no result either"),
    ("Checkpoint", CheckpointKeepsTheResultInAList, "Forward keeps 16 bytes, and the inputs have 8"),
    ("Checkpoint", CheckpointHidesTheInputs, "But where are the inputs kept?"),
    ("Checkpoint", CheckpointWithoutBackward, "\nbackward is still empty.\n"),
    ("Checkpoint", CheckpointCallsTwiceInForward, "Forward calls fn 2 times"),
    ("Checkpoint", CheckpointCallsTwiceInBackward, "Backward calls fn 2 times"),
    ("Checkpoint", CheckpointReturnsNothing, "forward must return what fn(*inputs) gives"),
    ("Checkpoint", CheckpointReturnsTheInput, "y isn't what fn gives"),
    ("Checkpoint", CheckpointAddsOne, "x.grad isn't what fn alone would leave"),
    ("Checkpoint", checkpoint_as_a_function, "Checkpoint is a class"),
]


# Right, though not written as the reference is.


def block_bytes_with_statistics(batch, length, width, heads):
    return _formula(34, 5)(batch, length, width, heads) + 8 * batch * length


def block_bytes_as_a_float(batch, length, width, heads):
    return batch * length * width * (34 + 5 * length * heads / width)


def block_bytes_part_by_part(batch, length, width, heads):
    token, pair = batch * length * width, batch * length * length * heads
    attention = 2 * token * (1 + 3 + 1) + token + (2 + 1 + 2) * pair
    mlp = 2 * token * (1 + 4 + 4) + token
    return attention + mlp + 2 * 2 * token


class CheckpointByAutogradGrad(Right):
    """Asks for all gradients, and adds those of the weights itself."""

    @staticmethod
    def backward(ctx, gradient):
        inputs = _detached(ctx)
        output = _again(ctx, inputs)
        leaves = _leaves(output)
        for leaf, each in zip(leaves, torch.autograd.grad(output, leaves, gradient), strict=True):
            leaf.grad = each if leaf.grad is None else leaf.grad + each
        return None, *(x.grad for x in inputs)


def _leaves(output):
    found, nodes = [], [output.grad_fn]
    while nodes:
        node = nodes.pop()
        if hasattr(node, "variable"):
            found.append(node.variable)
        nodes += [following for following, _ in node.next_functions if following is not None]
    return list(dict.fromkeys(found))


class CheckpointPutsTheStateBackItself(Right):
    @staticmethod
    def backward(ctx, gradient):
        inputs = [x.detach() for x in ctx.saved_tensors]
        for x, wanted in zip(inputs, ctx.needs_input_grad[1:], strict=True):
            x.requires_grad = wanted
        now = torch.get_rng_state()
        torch.set_rng_state(ctx.state)
        with torch.set_grad_enabled(True):
            output = ctx.fn(*inputs)
        torch.set_rng_state(now)
        torch.autograd.backward(output, gradient)
        return (None, *[x.grad for x in inputs])


class CheckpointSavesTheState(Right):
    """The generator's state beside the inputs, and forward explicitly without a graph."""

    @staticmethod
    def forward(ctx, fn, *inputs):
        ctx.fn = fn
        ctx.save_for_backward(torch.get_rng_state(), *inputs)
        with torch.no_grad():
            return fn(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        state, *inputs = ctx.saved_tensors
        inputs = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(state)
            with torch.enable_grad():
                output = ctx.fn(*inputs)
        output.backward(gradient)
        return None, *(x.grad for x in inputs)


RIGHT = [
    ("block_bytes", block_bytes_with_statistics),
    ("block_bytes", block_bytes_as_a_float),
    ("block_bytes", block_bytes_part_by_part),
    ("Checkpoint", CheckpointByAutogradGrad),
    ("Checkpoint", CheckpointPutsTheStateBackItself),
    ("Checkpoint", CheckpointSavesTheState),
]
