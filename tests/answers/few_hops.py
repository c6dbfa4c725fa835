"""Answers to the exercises of notebook 02's second part, not written as the references."""

import torch
import torch.distributed as dist


def _swap(peer, outgoing, incoming):
    sending = dist.isend(outgoing, peer)
    dist.recv(incoming, peer)
    sending.wait()


def halving_doubling_by_numbers(x):
    """The farthest partner first, and chunks of `tensor_split(world_size)`."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    edges = [0]
    for chunk in x.tensor_split(world_size):
        edges.append(edges[-1] + len(chunk))
    low, many = 0, world_size
    while many > 1:
        many //= 2
        low += many * (rank // many % 2)
        there = low ^ many if world_size > 1 else low
        mine = x[edges[low] : edges[low + many]]
        arrived = torch.empty_like(mine)
        _swap(rank ^ many, x[edges[there] : edges[there + many]], arrived)
        mine.add_(arrived)
    while many < world_size:
        there = low ^ many
        mine, theirs = (x[edges[start] : edges[start + many]] for start in (low, there))
        _swap(rank ^ many, mine, theirs)
        low, many = min(low, there), 2 * many
    return x


def alpha_beta_by_lstsq(points):
    hops, nbytes, seconds = torch.tensor(points, dtype=torch.float64).T
    rows = torch.stack([hops / seconds, nbytes / seconds], dim=1)
    return torch.linalg.lstsq(rows, torch.ones(len(points), 1, dtype=torch.float64)).solution


RIGHT = [
    ("halving_doubling_all_reduce", halving_doubling_by_numbers),
    ("alpha_beta", alpha_beta_by_lstsq),
]
