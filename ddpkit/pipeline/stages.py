"""The stages of a pipeline: a model's layers cut into parts of like cost, and their computing.

    layers = cut_layers(gpt_layers(model), stages=4)
    stage = PipelineStage(layers[rank], number=rank, receives=torch.empty(2, 16, 64))

`ddpkit.pipeline` lets micro-batches pass through them. Notebook 10.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate, pairwise

from torch import Tensor, nn

from ..models import GPT, first
from .split_backward import SplitBackward


class PipelineStage:
    """Forward and backward of some layers of the model, one micro-batch after the other.

    module: these layers. number: of the stage, from 0. receives: a tensor of the shape and dtype
    that a micro-batch has when it comes from the stage before; only stage 0 may leave it out, any
    other raises ValueError.

    Gradients add up in the parameters' `.grad`. kept: {micro-batch: (input, output)}, for backward.
    most_held: the most micro-batches that were ever in `kept` at a time.
    """

    def __init__(self, module: nn.Module, number: int, receives: Tensor | None = None):
        if number > 0 and receives is None:
            got = f"stage {number} got no `receives`, expected a tensor like a micro-batch from"
            raise ValueError(f"{got} stage {number - 1}, as torch.empty(rows, length, width)")
        self.module = module
        self.number = number
        self.receives = receives
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        self.weight_parts: dict[int, Callable[[], None]] = {}  # {micro-batch: what is to run}
        self.most_held = 0

    def reset(self) -> None:
        """Drop the micro-batches that a step which ended early has left in `kept`."""
        self.kept.clear()
        self.weight_parts.clear()

    def forward(self, k: int, x: Tensor, loss: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Take micro-batch `k` through these layers, and `loss` if given; return a detached result.

        Input and output, and with them the graph, are kept for backward.
        """
        if self.number > 0:  # stage 0 gets data, whose gradient isn't needed
            x = x.detach().requires_grad_()
        y = self.module(x)
        if loss is not None:
            y = loss(y)
        self.kept[k] = x, y
        self.most_held = max(self.most_held, len(self.kept))
        return y.detach()  # the next stage's graph begins anew

    def backward(self, k: int, gradient: Tensor | None) -> Tensor | None:
        """Run backward of micro-batch `k`; return the gradient of its input, None in stage 0.

        gradient: of the output; None if the output is a loss. KeyError: `k` had no forward.
        """
        x, y = self.kept.pop(k)  # the activations are free once backward has used them
        self.whole_backward(y, gradient)
        return x.grad

    def whole_backward(self, y: Tensor, gradient: Tensor | None) -> None:
        if y.requires_grad:  # false if all of stage 0 is frozen
            y.backward(gradient)

    def backward_input(self, k: int, gradient: Tensor | None) -> Tensor | None:
        """Run the input's part of backward; return the input's gradient, None in stage 0.

        `backward_weight` does the weights' part: in stage 0, whose input needs none, all of it.
        """
        x, y = self.kept[k]
        if self.number == 0:  # no input part: the weights' part is all of backward
            self.weight_parts[k] = partial(self.whole_backward, y, gradient)
            return None
        # The graph stays in `kept` until the weights' part has also walked it.
        split = SplitBackward(y, x, self.module.parameters())
        self.weight_parts[k] = split.weight
        return split.input(gradient)

    def backward_weight(self, k: int) -> None:
        """Run the weights' part of backward; what was kept of micro-batch `k` is then dropped."""
        # Only now may the graph go: until here the micro-batch counts as held.
        self.weight_parts.pop(k)()
        del self.kept[k]


def cut_layers(
    layers: Sequence[nn.Module],
    stages: int,
    costs: Sequence[float] | None = None,
) -> list[nn.Sequential]:
    """Cut the layers into `stages` consecutive parts, so that the most expensive costs least.

    costs: of each layer; None: the weights of its linear layers, with which each token is
    multiplied. A pipeline is as slow as its slowest stage. ValueError: more stages than layers.
    """
    if stages > len(layers):
        few = f"{len(layers)} layers can't make {stages} stages"
        raise ValueError(f"{few}: every stage needs one. Take fewer stages")
    if costs is None:
        costs = [multiplications(layer) for layer in layers]

    @cache
    def cheapest(start: int, parts: int) -> tuple[float, list[int]]:
        """Return (cost of the dearest part, each part's number of layers) from layer `start` on."""
        if parts == 1:
            return sum(costs[start:]), [len(layers) - start]
        # Try every length of the first part; the others are cut as well as can be.
        options = []
        longest = len(layers) - start - (parts - 1)  # one layer is left for each other part
        for many in range(1, longest + 1):
            own = sum(costs[start : start + many])
            others, sizes = cheapest(start + many, parts - 1)
            options.append((max(own, others), [many, *sizes]))
        return min(options)

    _, sizes = cheapest(0, stages)
    cut = []
    for start, end in pairwise(accumulate(sizes, initial=0)):
        cut.append(nn.Sequential(*layers[start:end]))
    return cut


def multiplications(layer: nn.Module) -> int:
    """Count the weights of a layer's Linears: the multiplications that one token takes."""
    linears = [module for module in layer.modules() if isinstance(module, nn.Linear)]
    return sum(linear.weight.numel() for linear in linears)


def gpt_layers(model: GPT) -> list[nn.Module]:
    """List the model's own layers: called one after the other, they compute what the model does.

    First and last share `model.tokens.weight`: pass it to `Pipeline(tied=...)` on their ranks.
    """
    return [Embedding(model), *model.blocks, nn.Sequential(model.norm, model.head)]


class Embedding(nn.Module):
    """The first layer of a GPT: (n, length) tokens to vectors, (n, length, width), with dropout."""

    def __init__(self, model: GPT):
        super().__init__()
        self.tokens = model.tokens
        self.positions = model.positions
        self.dropout = model.dropout

    def forward(self, tokens: Tensor) -> Tensor:
        positions = first(self.positions, tokens.shape[1])
        return self.dropout(self.tokens(tokens) + positions)
