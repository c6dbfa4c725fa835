"""Answers to the exercises of notebook 06 that are right, though not written as the reference."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ddpkit import memory
from ddpkit.checkpointing import Products, checkpoint, is_product


def block_bytes_with_statistics(batch, length, width, heads):
    return 34 * batch * length * width + 5 * batch * length**2 * heads + 8 * batch * length


def block_bytes_as_a_float(batch, length, width, heads):
    return batch * length * width * (34 + 5 * length * heads / width)


def _leaves(output):
    found, nodes = [], [output.grad_fn]
    while nodes:
        node = nodes.pop()
        if hasattr(node, "variable"):
            found.append(node.variable)
        nodes += [following for following, _ in node.next_functions if following is not None]
    return list(dict.fromkeys(found))


class CheckpointByAutogradGrad(torch.autograd.Function):
    """Asks for all gradients, and adds those of the weights itself."""

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
        leaves = _leaves(output)
        for leaf, each in zip(leaves, torch.autograd.grad(output, leaves, gradient), strict=True):
            leaf.grad = each if leaf.grad is None else leaf.grad + each
        return None, *(x.grad for x in inputs)


class CheckpointSavesTheState(torch.autograd.Function):
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


def alive_by_comparing(lives, moments):
    return [sum(n for b, d, n in lives if b <= moment < d) for moment in range(moments)]


class ProductsByTurns(TorchDispatchMode):
    """Decides before it calls; keeps aliases."""

    def __init__(self, kept=None):
        super().__init__()
        self.kept, self.next = [], None if kept is None else iter(kept)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if not is_product(operation):
            return operation(*args, **(kwargs or {}))
        if self.next is not None:
            return next(self.next).detach()
        self.kept.append(operation(*args, **(kwargs or {})))
        return self.kept[-1].detach()


def sequential_by_chunks(functions, segments, x):
    """The longer segments first."""
    parts = torch.arange(len(functions)).tensor_split(segments)
    for part in parts[:-1]:
        x = checkpoint(functions[part[0] : part[-1] + 1], x)
    return functions[parts[-1][0] :](x)


RIGHT = [
    ("alive", alive_by_comparing),
    ("Products", ProductsByTurns),
    ("checkpoint_sequential", sequential_by_chunks),
    ("block_bytes", block_bytes_with_statistics),
    ("block_bytes", block_bytes_as_a_float),
    ("Checkpoint", CheckpointByAutogradGrad),
    ("Checkpoint", CheckpointSavesTheState),
]


def alive_that_empties_its_list(lives, moments):
    counted = memory.alive(list(lives), moments)
    lives.clear()
    return counted


class ProductsInCopies(Products):
    """What is kept exists twice."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(operation, types, args, kwargs)
        if is_product(operation) and not self.again:
            self.kept[-1] = result.clone()
        return result


class CheckpointInCopies(CheckpointByAutogradGrad):
    """Each input exists twice."""

    @staticmethod
    def forward(ctx, fn, *inputs):
        ctx.fn, ctx.state = fn, torch.get_rng_state()
        ctx.save_for_backward(*(x.clone().requires_grad_(x.requires_grad) for x in inputs))
        return fn(*inputs)


def block_bytes_one_percent_off(batch, length, width, heads):
    return round(0.992 * memory.block_bytes(batch, length, width, heads))


def block_bytes_with_a_little_more(batch, length, width, heads):
    return memory.block_bytes(batch, length, width, heads) + 24 * batch * length


class CheckpointInAttributes(CheckpointByAutogradGrad):
    @staticmethod
    def forward(ctx, fn, *inputs):
        ctx.fn, ctx.state, ctx.inputs = fn, torch.get_rng_state(), inputs
        return fn(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        inputs = [x.detach().requires_grad_(x.requires_grad) for x in ctx.inputs]
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            torch.set_rng_state(ctx.state)
            ctx.fn(*inputs).backward(gradient)
        return None, *(x.grad for x in inputs)


class CheckpointOfInputsAlone(CheckpointByAutogradGrad):
    @staticmethod
    def backward(ctx, gradient):
        inputs = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
        with torch.enable_grad():
            output = ctx.fn(*inputs)
        return None, *torch.autograd.grad(output, inputs, gradient)


class CheckpointKeepsTheGraph(torch.autograd.Function):
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


class ProductsOfAttentionToo(TorchDispatchMode):
    def __init__(self, kept=None):
        super().__init__()
        self.kept, self.again = list(kept or ()), kept is not None

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        product = is_product(operation) or "bmm" in str(operation)
        if product and self.again:
            return self.kept.pop(0).detach()
        result = operation(*args, **(kwargs or {}))
        self.kept += [result] * product
        return result


def sequential_with_a_long_last_one(functions, segments, x):
    length = len(functions) // segments
    for start in range(0, length * (segments - 1), length):
        x = checkpoint(functions[start : start + length], x)
    return functions[length * (segments - 1) :](x)


COPIED = "an alias, which takes no memory, would do"
WRONG = [
    ("alive", alive_that_empties_its_list, "`lives` isn't what it was"),
    ("Products", ProductsInCopies, COPIED),
    ("Checkpoint", CheckpointInCopies, COPIED),
    ("Checkpoint", CheckpointInAttributes, "Use ctx.save_for_backward(*inputs), which"),
    ("Checkpoint", CheckpointOfInputsAlone, "the weights inside fn have none"),
    ("Checkpoint", CheckpointKeepsTheGraph, "fn wasn't called in backward"),
    ("Products", ProductsOfAttentionToo, "bmm is attention's"),
    ("checkpoint_sequential", sequential_with_a_long_last_one, "longer than another by more"),
    ("block_bytes", block_bytes_one_percent_off, "Yours is 33.7sbd + 4.96bs²H"),
    ("block_bytes", block_bytes_with_a_little_more, "how many sbd, and how many bs²H?"),
]


class CheckpointOfItsFirstInput(CheckpointByAutogradGrad):
    @staticmethod
    def backward(ctx, gradient):
        _, of_x, *others = CheckpointByAutogradGrad.backward(ctx, gradient)
        return None, of_x, *(None for _ in others)


WRONG += [("Checkpoint", CheckpointOfItsFirstInput, "one has two inputs: the gradient of x")]
