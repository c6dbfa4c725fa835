"""The stages of a pipeline: a model's layers cut into parts that cost alike, and what one computes.

    layers = cut_layers(gpt_layers(model), stages=4)
    stage = PipelineStage(layers[rank], number=rank, receives=torch.empty(2, 16, 64))

`ddpkit.pipeline` lets micro-batches pass through them. Notebook 10.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate, pairwise

from torch import Tensor, nn

from .models import GPT, first
from .split_backward import SplitBackward


class PipelineStage:
    """Forward and backward of some layers of the model, one micro-batch after the other.

    module: these layers. number: which stage they are, from 0. receives: a tensor of the shape and
    dtype that a micro-batch has when it comes from the stage before; None for stage 0 alone, else
    ValueError.

    Gradients add up in the parameters' `.grad`. kept: {micro-batch: what its backward needs}.
    most_held: of how many micro-batches at a time, at most.
    """

    def __init__(self, module: nn.Module, number: int, receives: Tensor | None = None):
        if number > 0 and receives is None:
            got = f"stage {number} got no `receives`, expected a tensor like a micro-batch from"
            raise ValueError(f"{got} stage {number - 1}, as torch.empty(rows, length, width)")
        self.module, self.number, self.receives = module, number, receives
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        self.weight_parts: dict[int, Callable[[], None]] = {}
        self.most_held = 0

    def reset(self) -> None:
        """Let go of what a step left that ended early."""
        self.kept.clear()
        self.weight_parts.clear()

    def forward(self, k: int, x: Tensor, loss: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """What micro-batch `k` is after these layers; `loss` of it, if that is given."""
        if self.number > 0:  # nobody wants the gradient of the data
            x = x.detach().requires_grad_()
        y = self.module(x) if loss is None else loss(self.module(x))
        self.kept[k] = x, y
        self.most_held = max(self.most_held, len(self.kept))
        return y.detach()

    def backward(self, k: int, gradient: Tensor | None) -> Tensor | None:
        """Returns the gradient of what came in. gradient: of what went out; None for a loss."""
        x, y = self.kept.pop(k)
        if y.requires_grad:  # not if all in stage 0 is frozen
            y.backward(gradient)
        return x.grad

    def backward_input(self, k: int, gradient: Tensor | None) -> Tensor | None:
        """As `backward`, but leaves the weights' gradients for `backward_weight`."""
        x, y = self.kept[k]
        if self.number == 0:  # there is nothing but weights
            self.weight_parts[k] = partial(y.backward, gradient) if y.requires_grad else list
            return None
        split = SplitBackward(y, x, self.module.parameters())
        self.weight_parts[k] = split.weight
        return split.input(gradient)

    def backward_weight(self, k: int) -> None:
        self.weight_parts.pop(k)()
        del self.kept[k]


def cut_layers(
    layers: Sequence[nn.Module], stages: int, costs: Sequence[float] | None = None
) -> list[nn.Sequential]:
    """The layers in `stages` parts, one after the other, of which the dearest costs least.

    costs: of each layer; None: the weights of its linear layers, with which each token is
    multiplied. A pipeline is as slow as its slowest stage. ValueError: more stages than layers.
    """
    if stages > len(layers):
        few = f"{len(layers)} layers can't make {stages} stages"
        raise ValueError(f"{few}: every stage needs one. Take fewer stages")
    costs = [multiplications(layer) for layer in layers] if costs is None else costs

    @cache
    def cheapest(start: int, parts: int) -> tuple[float, list[int]]:
        """(cost of the dearest, how many layers in each) of the layers from `start` on."""
        if parts == 1:
            return sum(costs[start:]), [len(layers) - start]
        options = []
        for many in range(1, len(layers) - start - parts + 2):
            others, sizes = cheapest(start + many, parts - 1)
            options.append((max(sum(costs[start : start + many]), others), [many, *sizes]))
        return min(options)

    ends = list(accumulate(cheapest(0, stages)[1]))
    return [nn.Sequential(*layers[start:end]) for start, end in pairwise([0, *ends])]


def multiplications(layer: nn.Module) -> int:
    """Weights of its linear layers: so many multiplications does a token take."""
    return sum(m.weight.numel() for m in layer.modules() if isinstance(m, nn.Linear))


def gpt_layers(model: GPT) -> list[nn.Module]:
    """The model's own layers, to be called one after the other: the result is the model's.

    First and last have one weight, `model.tokens.weight`: hand it to `Pipeline(tied=...)`.
    """
    return [Embedding(model), *model.blocks, nn.Sequential(model.norm, model.head)]


class Embedding(nn.Module):
    """How a GPT begins: (n, length) tokens to (n, length, width)."""

    def __init__(self, model: GPT):
        super().__init__()
        self.tokens, self.positions, self.dropout = model.tokens, model.positions, model.dropout

    def forward(self, tokens: Tensor) -> Tensor:
        return self.dropout(self.tokens(tokens) + first(self.positions, tokens.shape[1]))
