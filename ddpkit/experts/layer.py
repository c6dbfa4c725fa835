"""The layer: a router, experts on several ranks, and the exchanges between. Notebook 13."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ..models import GPT
from .dispatch import capacity_of, through_experts, within_capacity
from .router import Router, balance_loss, softmax


class MixtureOfExperts(nn.Module):
    """A layer of `experts` MLPs; a token visits k of them, and the shared one, if there is one.

    width, hidden: of each expert, Linear, ReLU, Linear. score: see `Router`. capacity: an expert
    takes at most `capacity` times its fair share of a rank's rows, and the rest skip it; None: it
    takes all. shared: the hidden width of an expert for all tokens; 0: there is none. balance: the
    factor of `balance_loss`; 0: that isn't computed, and stays 0.

    A new layer has all experts, and computes in one process. `share_experts` leaves each rank its
    part of them. From then on every rank of the group must call the layer, even without tokens:
    the others wait for its counts of rows.

    load: (E,), how often this rank's tokens chose each expert, skipped or not, in training mode,
    since it was last set to 0. balance_loss: of the last forward, times `balance`: add it to the
    loss. Cost: see `ddpkit.experts`.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        experts: int = 8,
        k: int = 2,
        score: Callable[[Tensor], Tensor] = softmax,
        capacity: float | None = None,
        shared: int = 0,
        balance: float = 0.0,
    ):
        super().__init__()
        self.router = Router(width, experts, k, score)
        self.number = experts
        self.capacity = capacity
        self.balance = balance
        # By number, not by place: a rank that has experts 6 and 7 calls them so in checkpoints.
        self.experts = nn.ModuleDict()
        for number in range(experts):
            self.experts[str(number)] = mlp(width, hidden)
        self.shared = mlp(width, shared) if shared else None
        nothing = torch.zeros(experts, dtype=torch.int64)
        self.register_buffer("load", nothing, persistent=False)
        self.ranks = 1  # that share the experts
        self.group: ProcessGroup | None = None
        self.everyone: ProcessGroup | None = None
        self.copies = 1  # ranks whose gradients are averaged
        self.balance_loss = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        """Return the experts' result for x, (..., width): the same shape and dtype.

        There may be any number of tokens, none included. ValueError: a score is NaN or infinite.
        """
        rows = x.flatten(0, -2)
        scores, chosen, weights = self.router(rows)
        if self.balance > 0:
            loss = balance_loss(scores, chosen, self.copies, self.everyone)
            self.balance_loss = self.balance * loss
        # Counted here, moved by `balance` once a step: the bias must not change within one.
        if self.training:
            self.load += torch.bincount(chosen.flatten(), minlength=self.number)
        kept = None
        if self.capacity is not None and len(rows) > 0:
            most = capacity_of(self.capacity, len(rows), self.router.k, self.number)
            kept = within_capacity(chosen, self.number, most)
        process = self.here if self.ranks == 1 else self.across_ranks
        out = through_experts(rows, chosen, weights, self.number, process, kept)
        if self.shared is not None:
            out = out + self.shared(rows)  # once, where the token lives
        return out.view_as(x)

    def here(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Compute rows, sorted by expert, with this rank's experts; return the results in order.

        counts: (experts of this rank,), the number of rows for each of them.
        """
        results = []
        parts = rows.split(counts.tolist())
        for expert, part in zip(self.experts.values(), parts, strict=True):
            results.append(expert(part))  # also without rows: its gradients are zeros then
        return torch.cat(results)

    def across_ranks(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Send rows, sorted by expert, to the ranks of their experts; return the results in order.

        counts: (E,), int64, the number of rows for each expert. All ranks must call.
        """
        # Counts first: no rank knows yet how many rows to expect.
        coming = exchange_counts(counts, self.group)
        # Rows for each rank, and from each: the splits of both exchanges.
        going = counts.view(self.ranks, -1)
        send = going.sum(1).tolist()
        receive = coming.sum(1).tolist()
        came = ExchangeRows.apply(rows, send, receive, self.group)
        # They came by rank, and of each rank by expert; the products need them by expert.
        own = torch.arange(coming.shape[1], device=rows.device)
        numbers = own.repeat(self.ranks).repeat_interleave(coming.flatten())
        by_expert = numbers.argsort(stable=True)
        results = self.here(came[by_expert], coming.sum(0))
        # And back, the same way.
        as_they_came = results[by_expert.argsort()]
        return ExchangeRows.apply(as_they_came, receive, send, self.group)


def mlp(width: int, hidden: int) -> nn.Sequential:
    """Return a new expert: Linear, ReLU, Linear."""
    return nn.Sequential(
        nn.Linear(width, hidden),
        nn.ReLU(),
        nn.Linear(hidden, width),
    )


def exchange_counts(counts: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Send every rank the numbers of rows for its experts; return those of the rows that come here.

    counts: (E,), int64, this rank's rows for each expert. Returns (ranks, this rank's experts).
    """
    coming = torch.empty_like(counts)
    dist.all_to_all_single(coming, counts, group=group)  # E / e counts for each rank
    return coming.view(dist.get_world_size(group), -1)


class ExchangeRows(torch.autograd.Function):
    """An exchange of rows between ranks; backward sends their gradients back the same way.

    apply(rows, send, receive, group). rows: (Σ send, d), sorted by the rank that gets them. send,
    receive: the number of rows for each rank, and from each. Returns (Σ receive, d), by sender.
    """

    @staticmethod
    def forward(
        ctx,
        rows: Tensor,
        send: list[int],
        receive: list[int],
        group: ProcessGroup | None = None,
    ) -> Tensor:
        ctx.way_back = receive, send, group
        return exchange(rows, send, receive, group)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        returned = exchange(gradient, *ctx.way_back)  # the same splits, swapped
        return returned, None, None, None


def exchange(
    rows: Tensor,
    send: list[int],
    receive: list[int],
    group: ProcessGroup | None,
) -> Tensor:
    """Exchange rows in one all-to-all with uneven splits: `ExchangeRows`, without autograd."""
    came = rows.new_empty(sum(receive), rows.shape[1])
    dist.all_to_all_single(came, rows.contiguous(), receive, send, group=group)
    return came


def make_sparse(gpt: GPT, experts: int = 8, k: int = 2, **options) -> None:
    """Replace the MLP of each block by new experts, each as wide as the MLP was, in place.

    options: others of `MixtureOfExperts`. Weights are drawn anew, on torch's default device, then
    moved to the MLP's device and dtype.
    """
    for block in gpt.blocks:
        first = block.mlp[0]
        layer = MixtureOfExperts(first.in_features, first.out_features, experts, k, **options)
        block.mlp = layer.to(first.weight.device, first.weight.dtype)
