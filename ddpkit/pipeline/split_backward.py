"""Backward in two parts: now the gradient of the input, later those of the weights.

    parts = SplitBackward(y, x, weights)
    parts.input(gradient)       # of y; returns that of x, for which another stage waits
    parts.weight()              # adds to every weight's .grad

autograd.grad(y, x), then autograd.grad(y, weights), would walk from y to x twice: a weight's
gradient needs those of all activations between it and y. Here the first walk, along the nodes of
autograd's graph from y to x, notes the gradient that comes to each node from which weights branch
off. The second begins at these nodes, and computes nothing but the products for the weights.

PyTorch's pipelines do the same in `torch.distributed.pipelining._backward`; the idea is from Qi et
al. 2023, section 2. Notebook 10.
"""

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


class SplitBackward:
    """A backward from `y` to `x` and to `weights`, in two parts, each called once.

    x: a leaf that y depends on and that needs a gradient. All gradients are added to `.grad`.
    `input` also adds those of weights that are used in two places.
    """

    def __init__(self, y: Tensor, x: Tensor, weights: Iterable[nn.Parameter]):
        self.y = y
        self.x = x
        trained = {weight for weight in weights if weight.requires_grad}
        self.branches = branches(y, x, trained)
        # A weight that hangs on two nodes would be counted by both: it goes with the input.
        uses = Counter(weight for branch in self.branches.values() for weight in branch)
        self.at_once = [weight for weight in trained if uses[weight] != 1]
        for node, its in self.branches.items():
            self.branches[node] = [weight for weight in its if uses[weight] == 1]
        self.came: dict[Node, tuple] = {}  # {node: the gradients that arrived at it}

    def input(self, gradient: Tensor | None = None) -> Tensor:
        """Run backward to `x`; return `x.grad`. gradient: of `y`; None if y is one number."""
        # The hooks run while autograd walks, on its own thread on a GPU.
        hooks = [node.register_prehook(self.note(node)) for node in self.branches]
        try:
            wanted = [self.x, *self.at_once]
            torch.autograd.backward(self.y, gradient, retain_graph=True, inputs=wanted)
        finally:
            for hook in hooks:
                hook.remove()
        return self.x.grad

    def note(self, node: Node):
        """Return a hook that stores in `came[node]` the gradients of all the node's outputs."""

        def keep(gradients):
            self.came[node] = gradients

        return keep

    def weight(self) -> None:
        """Add to the gradients of the weights, and free the graph; before `input`, add nothing."""
        # From each noted node one product to its weights, and no step further.
        for node, weights in self.branches.items():
            if weights and node in self.came:
                edges = []
                gradients = []
                for output, gradient in enumerate(self.came[node]):
                    if gradient is not None:
                        edges.append(GradientEdge(node, output))
                        gradients.append(gradient)
                torch.autograd.backward(edges, gradients, inputs=weights)
        self.branches = {}
        self.came = {}
        self.y = None


def branches(y: Tensor, x: Tensor, weights: set[nn.Parameter]) -> dict[Node, list[nn.Parameter]]:
    """Return {node on the way from `y` to `x`: the weights that branch off from it}.

    A weight branches off where autograd's graph leads from the node to it through no other node on
    the way, if need be through a view or a cast. It is listed for each such node, and twice if two
    inputs of one node lead to it. Nodes without weights are left out.
    """
    end = get_gradient_edge(x).node
    start = get_gradient_edge(y).node
    below: dict[Node, set[nn.Parameter]] = {}  # {node beside the way: its weights}
    on_the_way: dict[Node, list[nn.Parameter]] = {end: []}
    todo = [start]
    while todo:  # depth first, without recursion: graphs are deep
        node = todo[-1]
        children = [child for child, _ in node.next_functions if child is not None]
        unseen = [c for c in children if c not in below and c not in on_the_way]
        if unseen:  # children first: come back to this node later
            todo += unseen
            continue
        todo.pop()
        if any(child in on_the_way for child in children):
            hanging = [below[child] for child in children if child not in on_the_way]
            on_the_way[node] = [weight for branch in hanging for weight in branch]
        else:  # beside the way: what lies below it is passed up
            own = getattr(node, "variable", None)  # a leaf's node names its tensor
            below[node] = {own} & weights
            for child in children:
                below[node] |= below[child]
    return {node: its for node, its in on_the_way.items() if its}
