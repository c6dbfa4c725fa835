"""Mixtures of experts with whole numbers, so that every order of adding gives the same bits."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddpkit.experts import MixtureOfExperts, Router, make_sparse

EXPERTS, WIDTH, HIDDEN, K = 12, 4, 3, 2
LR = 2.0**-10


class WholeRouter(Router):
    """A stand-in whose scores and weights are whole numbers, and never tie."""

    def forward(self, rows):
        scores = F.linear(rows, self.weight)
        rank_of = scores.detach() * EXPERTS + torch.arange(EXPERTS)
        chosen = (rank_of + self.bias).topk(self.k, dim=-1).indices
        return scores, chosen, scores.gather(-1, chosen)


def whole_numbers(*shape, seed, most=2):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=generator).double()


def whole_layer(shared=0, capacity=None):
    layer = MixtureOfExperts(WIDTH, HIDDEN, EXPERTS, K, shared=shared, capacity=capacity).double()
    router = WholeRouter(WIDTH, EXPERTS, K).double()
    layer.router = router
    for number, parameter in enumerate(layer.parameters()):
        parameter.data = whole_numbers(*parameter.shape, seed=number, most=1)
    return layer


def whole_model(**options):
    """Two layers of experts, and one that isn't any, before them."""
    first = nn.Linear(WIDTH, WIDTH).double()
    first.weight.data = whole_numbers(WIDTH, WIDTH, seed=99, most=1)
    first.bias.data = whole_numbers(WIDTH, seed=98, most=1)
    return nn.Sequential(first, whole_layer(**options), whole_layer(**options))


def tokens_of(rank):
    """Ranks have unequal numbers of tokens; rank 1 has none, unless it is alone with rank 0."""
    return [5, 0, 3, 7, 1, 4][rank]


def rows_of(ranks):
    parts = [whole_numbers(tokens_of(rank), WIDTH, seed=1000 + rank) for rank in ranks]
    return torch.cat(parts)


def squares(out):
    """A loss that stays whole."""
    return (out - 1).square().sum()


def by_hand(layer: MixtureOfExperts, x, kept=None):
    """The mixture token by token, and expert by expert: nothing is sorted, nothing sent."""
    _, chosen, weights = layer.router(x)
    out = []
    for t, row in enumerate(x):
        total = torch.zeros_like(row)
        for i, expert in enumerate(chosen[t].tolist()):
            if kept is None or kept[t, i]:
                total = total + weights[t, i] * layer.experts[str(expert)](row)
        out.append(total + (layer.shared(row) if layer.shared is not None else 0))
    return torch.stack(out) if out else x


def sparse_gpt(make, **options):
    """`make()`, a GPT, with 8 experts a block, alike on all ranks."""
    gpt = make()
    torch.manual_seed(7)
    make_sparse(gpt, **options)
    return gpt


def ranks_here():
    return range(dist.get_world_size())
