"""The router: which experts a token visits, how much each counts, and how loads stay level.

Left alone a router collapses: an expert that is chosen often learns more, and is chosen more often.
Two remedies: a loss that grows with the imbalance (`balance_loss`), and a bias added to scores for
the choice, but not for the weights (`move_bias`). Notebook 13.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ..tools.checks import check_counts, misuse


def softmax(logits: Tensor) -> Tensor:
    """Return scores that add up to 1: experts compete. Shazeer et al. 2017; Switch, Mixtral."""
    return logits.softmax(-1)


def sigmoid(logits: Tensor) -> Tensor:
    """Return scores between 0 and 1, independent of one another. DeepSeek-V3."""
    return logits.sigmoid()


class Router(nn.Module):
    """A linear layer that scores all experts for each token, and chooses the best k.

    width: numbers of a token. score: logits (T, E) to scores, such as `softmax` or `sigmoid`.
    `bias`, (E,), is added to the scores for the choice, and nowhere else: it is a buffer, zero at
    first, without gradient, which `move_bias` changes. All is computed in float32 at least: in 16
    bits, scores that nearly tie would be equal. ValueError: k isn't one of 1 to `experts`.
    """

    def __init__(
        self,
        width: int,
        experts: int,
        k: int,
        score: Callable[[Tensor], Tensor] = softmax,
    ):
        super().__init__()
        check_counts(experts=experts, k=k)
        if k > experts:
            raise ValueError(f"expected k of at most {experts} experts, got {k}: choose fewer")
        self.k = k
        self.score = score
        self.weight = nn.Parameter(torch.empty(experts, width))
        nn.init.normal_(self.weight, std=width**-0.5)
        self.register_buffer("bias", torch.zeros(experts))  # in checkpoints, not in the optimizer

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return scores (T, E), chosen experts (T, k), their weights (T, k), for rows (T, width).

        Weights are the chosen experts' scores, for k > 1 divided by their sum. For k = 1 that would
        always be 1, and the router would get no gradient. ValueError: a score is NaN or infinite.
        """
        # Not under autocast either: it would round the logits to 16 bits.
        wide = torch.promote_types(rows.dtype, torch.float32)
        with torch.autocast(rows.device.type, enabled=False):
            logits = F.linear(rows.to(wide), self.weight.to(wide))
            scores = self.score(logits)
        finite = scores.isfinite().all(-1)
        if not finite.all():
            bad = int((~finite).sum())
            remedy = "Look for the first layer that isn't finite; lower the learning rate, or clip."
            raise misuse("the router", f"scores not finite for {bad} tokens", "numbers", remedy)
        # The bias chooses; the scores alone weigh, and carry the gradient.
        biased = scores.detach() + self.bias
        chosen = biased.topk(self.k, dim=-1).indices
        weights = scores.gather(-1, chosen)  # without the bias
        if self.k > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        return scores, chosen, weights


def balance_loss(
    scores: Tensor, chosen: Tensor, ranks: int = 1, group: ProcessGroup | None = None
) -> Tensor:
    """Return W times this rank's part of E·Σ fᵢ·Pᵢ, the loss that grows with the imbalance.

    The mean of the results over all W ranks is the loss of one process with all tokens: 1 if all
    experts are used alike, at most E. fᵢ: the part of all ranks' choices that expert i got, without
    gradient. Pᵢ: the mean over all ranks' tokens of its score, divided by the token's sum. scores,
    chosen: from `Router`. ranks: the size W of `group`. Multiply the loss by 0.01 or so. Fedus et
    al. 2021, equation 4. Cost per rank: E numbers all-reduced, if W > 1.
    """
    # Whole numbers: the same on all ranks, in whatever order they are added.
    load = torch.bincount(chosen.flatten(), minlength=scores.shape[-1])
    if ranks > 1:
        dist.all_reduce(load, group=group)
    tokens = load.sum() / chosen.shape[-1]
    f = load / load.sum().clamp(min=1)
    normalised = scores / scores.sum(-1, keepdim=True)
    # Sum, not mean: ranks may have unequal numbers of tokens, or none.
    p = normalised.sum(0) * ranks / tokens.clamp(min=1)
    return scores.shape[-1] * (f * p).sum()


def move_bias(bias: Tensor, load: Tensor, speed: float, group: ProcessGroup | None = None) -> None:
    """Lower the bias of experts with more than the mean load by `speed`, raise it for less.

    bias: (E,), changed in place, alike on all ranks. load: (E,), the choices that each expert got
    from this rank's tokens since the last step; not changed. Wang et al. 2024 (no auxiliary loss).
    Cost per rank: E numbers all-reduced.
    """
    total = load.clone()
    dist.all_reduce(total, group=group)  # a rank's own tokens would move its own copy of the bias
    direction = torch.sign(total.double().mean() - total)
    bias += speed * direction.to(bias.dtype)
