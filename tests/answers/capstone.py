"""Answers to the exercises of notebook 15 that are right in another way, and wrong ones."""

import math

import torch
import torch.distributed as dist


def rate_by_the_middle(step, steps, warmup, peak, last):
    middle = (peak + last) / 2
    angle = math.pi * max(0, step - warmup) / max(1, steps - 1 - warmup)
    rise = min(1, (step + 1) / max(1, warmup))
    return torch.tensor(min(peak * rise, middle + (peak - last) / 2 * math.cos(angle)))


def rate_as_a_table(step, steps, warmup, peak, last):
    rise = [peak / warmup * (number + 1) for number in range(warmup)]
    left = steps - warmup
    angles = torch.linspace(0, math.pi, left, dtype=torch.float64)
    return (rise + (last + (peak - last) * (1 + angles.cos()) / 2).tolist())[step]


def loss_gathered(losses, group=None):
    pair = torch.stack([losses.sum(), torch.tensor(len(losses))]).detach()
    pairs = [torch.empty_like(pair) for _ in range(dist.get_world_size(group))]
    dist.all_gather(pairs, pair, group=group)
    total, tokens = sum(pairs)
    return total / tokens


@torch.no_grad()
def loss_in_two_calls(losses, group=None):
    total, tokens = losses.sum(), torch.tensor(losses.numel())
    dist.all_reduce(total, group=group)
    dist.all_reduce(tokens, group=group)
    return total / tokens


def norm_of_norms(gradients, copies, group=None):
    lengths = [g.double().norm() / math.sqrt(c) for g, c in zip(gradients, copies, strict=True)]
    mine = torch.tensor(lengths, dtype=torch.float64).square().sum()
    dist.all_reduce(mine, group=group)
    return mine**0.5


def norm_of_products(gradients, copies, group=None):
    total = torch.tensor([0.0], dtype=torch.float64)
    for place, gradient in enumerate(gradients):
        flat = gradient.flatten().to(torch.float64)
        total += flat @ flat / copies[place]
    dist.all_reduce(total, group=group)
    return total.sqrt().squeeze()


def mesh_by_search(ranks, node, states, memory):
    powers = [2**n for n in range(ranks.bit_length())]
    fitting = [parts for parts in powers if states <= memory * parts]
    if not fitting:
        raise ValueError("too little memory")
    tensor = max(power for power in powers if power <= node and power <= fitting[0])
    return [ranks // fitting[0], tensor, fitting[0] // tensor]


def mesh_by_logarithm(ranks, node, states, memory):
    parts = 2 ** max(0, math.ceil(math.log2(states / memory)))
    if ranks < parts:
        raise ValueError
    tensor, pipeline = parts, 1
    while tensor > node:
        tensor, pipeline = tensor // 2, pipeline * 2
    return (ranks // parts, tensor, pipeline)


RIGHT = [
    ("learning_rate", rate_by_the_middle),
    ("learning_rate", rate_as_a_table),
    ("logged_loss", loss_gathered),
    ("logged_loss", loss_in_two_calls),
    ("mesh_norm", norm_of_norms),
    ("mesh_norm", norm_of_products),
    ("choose_mesh", mesh_by_search),
    ("choose_mesh", mesh_by_logarithm),
]


def from_zero(step, steps, warmup, peak, last):
    if step < warmup:
        return peak * step / warmup
    return last + (peak - last) * 0.5 * (
        1 + math.cos(math.pi * (step - warmup) / (steps - 1 - warmup))
    )


def means_averaged(losses, group=None):
    mean = losses.detach().mean()
    dist.all_reduce(mean, group=group)
    return mean / dist.get_world_size(group)


def a_number(losses, group=None):
    pair = torch.tensor([losses.sum().item(), len(losses)])
    dist.all_reduce(pair, group=group)
    return (pair[0] / pair[1]).item()


def lengths_of_ranks(gradients, copies, group=None):
    mine = sum((g.double() ** 2).sum() / c for g, c in zip(gradients, copies, strict=True)) ** 0.5
    mine = torch.as_tensor(mine, dtype=torch.float64)
    dist.all_reduce(mine, group=group)
    return mine


def wider_too_late(gradients, copies, group=None):
    total = torch.zeros((), dtype=torch.float64)
    for gradient, count in zip(gradients, copies, strict=True):
        total += (gradient**2).sum().double() / count
    dist.all_reduce(total, group=group)
    return total.sqrt()


def in_place(gradients, copies, group=None):
    total = torch.zeros((), dtype=torch.float64)
    for gradient, count in zip(gradients, copies, strict=True):
        total += gradient.double().norm() ** 2 / count
        gradient *= 0
    dist.all_reduce(total, group=group)
    return total.sqrt()


def one_number_each(gradients, copies, group=None):
    squares = [g.double().square().sum() / c for g, c in zip(gradients, copies, strict=True)]
    everyones = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyones, squares, group=group)
    return torch.as_tensor(sum(map(sum, everyones)), dtype=torch.float64).sqrt()


def tensor_everywhere(ranks, node, states, memory):
    tensor = 1
    while tensor * memory < states:
        tensor *= 2
    if tensor > ranks:
        raise ValueError
    return ranks // tensor, tensor, 1


WRONG = [
    ("learning_rate", from_zero, "4 of 9 steps rise on rank 0: [0.0, 2.5"),
    ("logged_loss", means_averaged, "logs [22.0], expected [13.0]"),
    ("logged_loss", a_number, "returns on rank 0: 'float', not ()"),
    ("mesh_norm", lengths_of_ranks, "parts alone, in pairs, on all on rank 0: ("),
    ("mesh_norm", wider_too_late, "in float16 on rank 0: (inf"),
    ("mesh_norm", in_place, "`gradients` isn't what it was"),
    ("mesh_norm", one_number_each, "where one or two numbers do"),
    ("choose_mesh", tensor_everywhere, "80 GB a rank: [2, 32, 1], not [2, 8, 4]"),
]
