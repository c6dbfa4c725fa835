"""Answers to the exercises of notebook 15 that are right in another way, and wrong ones."""

import math
import os
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn


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


def first_ones_quiet(model, optimizer, micro_batches):
    *others, last = micro_batches
    losses = []

    def backward(x, y):
        loss = (model(x) - y).square().mean() / len(micro_batches)
        loss.backward()
        losses.append(loss.detach())

    optimizer.zero_grad(set_to_none=False)
    with model.no_sync():
        for x, y in others:
            backward(x, y)
    backward(*last)
    model.synchronize()
    optimizer.step()
    losses = torch.stack(losses) / dist.get_world_size()
    dist.all_reduce(losses)
    return losses.sum()


def quiet_to_the_end(model, optimizer, micro_batches):
    """Send after the last backward: nothing overlaps, but each gradient travels once."""
    optimizer.zero_grad()
    mean = 0
    with model.no_sync():
        for x, y in micro_batches:
            loss = nn.functional.mse_loss(model(x), y)
            (loss / len(micro_batches)).backward()
            mean += loss.item() / len(micro_batches)
    model.synchronize()
    optimizer.step()
    everyones = torch.tensor(mean, dtype=torch.float64)
    dist.all_reduce(everyones)
    return everyones / dist.get_world_size()


def published_by_paths(folder, name, files):
    shutil.rmtree(folder / f"{name}.writing", ignore_errors=True)
    writing = Path(tempfile.mkdtemp(prefix="saving-", dir=folder))
    for file_name in files:
        path = writing / file_name
        path.write_bytes(files[file_name])
        handle = os.open(path, os.O_RDWR)
        os.fsync(handle)
        os.close(handle)
    writing.rename(folder / name)
    (folder / "latest").write_text(name)


def published_by_handles(folder, name, files):
    writing = folder / f"{name}.writing"
    writing.mkdir(exist_ok=True)
    for left in writing.iterdir():
        left.unlink()
    for file_name, content in files.items():
        handle = os.open(writing / file_name, os.O_WRONLY | os.O_CREAT)
        os.write(handle, content)
        os.fsync(handle)
        os.close(handle)
    os.replace(writing, folder / name)


RIGHT = [
    ("learning_rate", rate_by_the_middle),
    ("learning_rate", rate_as_a_table),
    ("logged_loss", loss_gathered),
    ("mesh_norm", norm_of_norms),
    ("mesh_norm", norm_of_products),
    ("choose_mesh", mesh_by_search),
    ("choose_mesh", mesh_by_logarithm),
    ("slow_step", first_ones_quiet),
    ("slow_step", quiet_to_the_end),
    ("publish", published_by_paths),
    ("publish", published_by_handles),
]


def from_zero(step, steps, warmup, peak, last):
    if step < warmup:
        return peak * step / warmup
    return last + (peak - last) * 0.5 * (
        1 + math.cos(math.pi * (step - warmup) / (steps - 1 - warmup))
    )


def ends_with_the_warmup(step, steps, warmup, peak, last):
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / (steps - 1 - warmup)
    return last + (peak - last) * 0.5 * (1 + math.cos(math.pi * done))


def means_averaged(losses, group=None):
    mean = losses.detach().mean()
    dist.all_reduce(mean, group=group)
    return mean / dist.get_world_size(group)


def a_number(losses, group=None):
    pair = torch.tensor([losses.sum().item(), len(losses)])
    dist.all_reduce(pair, group=group)
    return (pair[0] / pair[1]).item()


@torch.no_grad()
def loss_in_two_calls(losses, group=None):
    total, tokens = losses.sum(), torch.tensor(losses.numel())
    dist.all_reduce(total, group=group)
    dist.all_reduce(tokens, group=group)
    return total / tokens


def loss_of_all_losses(losses, group=None):
    everyones = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyones, losses.detach().tolist(), group=group)
    return torch.tensor([loss for of_rank in everyones for loss in of_rank]).mean()


def loss_in_bfloat16(losses, group=None):
    pair = torch.tensor([losses.sum().item(), len(losses)], dtype=torch.bfloat16)
    dist.all_reduce(pair, group=group)
    return pair[0] / pair[1]


def loss_in_float16(losses, group=None):
    pair = torch.stack([losses.detach().sum(), torch.tensor(float(len(losses)))]).half()
    dist.all_reduce(pair, group=group)
    return pair[0] / pair[1]


def wider_at_the_end(gradients, copies, group=None):
    total = torch.zeros(())
    for gradient, count in zip(gradients, copies, strict=True):
        total += gradient.float().square().sum() / count
    dist.all_reduce(total, group=group)
    return total.double().sqrt()


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


def one_backward(model, optimizer, micro_batches):
    optimizer.zero_grad()
    losses = [nn.functional.mse_loss(model(x), y) for x, y in micro_batches]
    mean = sum(losses) / len(losses)
    mean.backward()
    model.synchronize()
    optimizer.step()
    mean = mean.detach()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def one_batch(model, optimizer, micro_batches):
    optimizer.zero_grad()
    x, y = (torch.cat(parts) for parts in zip(*micro_batches, strict=True))
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    model.synchronize()
    optimizer.step()
    mean = loss.detach()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def gradients_each_time(model, optimizer, micro_batches):
    optimizer.zero_grad()
    logged = torch.zeros(())
    for x, y in micro_batches:
        loss = nn.functional.mse_loss(model(x), y) / len(micro_batches)
        loss.backward()
        model.synchronize()
        logged += loss.detach()
    optimizer.step()
    dist.all_reduce(logged)
    return logged.item() / dist.get_world_size()


def written_in_place(folder, name, files):
    (folder / name).mkdir()
    for file_name, content in files.items():
        (folder / name / file_name).write_bytes(content)


def published_anew(folder, name, files):
    shutil.rmtree(folder / name, ignore_errors=True)
    published_by_handles(folder, name, files)


def left_behind(folder, name, files):
    writing = folder / f"{name}.tmp"
    writing.mkdir()
    for file_name, content in files.items():
        with open(writing / file_name, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file)
    writing.rename(folder / name)


def synced_too_late(folder, name, files):
    writing = folder / f"{name}.writing"
    writing.mkdir(exist_ok=True)
    for left in writing.iterdir():
        left.unlink()
    for file_name, content in files.items():
        (writing / file_name).write_bytes(content)
    writing.rename(folder / name)
    for path in (folder / name).iterdir():
        with open(path, "rb+") as file:
            os.fsync(file)


WRONG = [
    ("learning_rate", from_zero, "4 of 9 steps rise: [0.0, 2.5"),
    ("learning_rate", ends_with_the_warmup, "all but the last of 5 steps rise: 'ZeroDiv"),
    ("logged_loss", means_averaged, "logs [22.0], expected [13.0]"),
    ("logged_loss", a_number, "returns on rank 0: 'float', not ()"),
    ("logged_loss", loss_in_two_calls, "rank 0 made 2 calls, where one does"),
    ("logged_loss", loss_of_all_losses, "rank 0 made 2 calls, where one does"),
    ("logged_loss", loss_in_bfloat16, "2.3 a rank on rank 0: [2.312], not [2.3]"),
    ("logged_loss", loss_in_float16, "2.3 a rank on rank 0: [inf], not [2.3]"),
    ("mesh_norm", wider_at_the_end, "in float32 on rank 0: (inf"),
    ("mesh_norm", lengths_of_ranks, "parts alone, in pairs, on all on rank 0: ("),
    ("mesh_norm", wider_too_late, "in float16 on rank 0: (inf"),
    ("mesh_norm", in_place, "`gradients` isn't what it was"),
    ("mesh_norm", one_number_each, "where one or two numbers do"),
    ("choose_mesh", tensor_everywhere, "80 GB a rank: [2, 32, 1], not [2, 8, 4]"),
    ("slow_step", one_backward, "8 rows wait for their backward at a time"),
    ("slow_step", one_batch, "8 rows wait for their backward at a time"),
    ("slow_step", gradients_each_time, "gradients 8 times in a step, where 2 buckets are enough"),
    ("publish", written_in_place, "before open: step-2 is there, and not whole"),
    ("publish", published_anew, "step-2 was already there, whole, and now is"),
    ("publish", left_behind, "step-2.writing, which a killed attempt had left, is still there"),
    ("publish", synced_too_late, "may keep the rename and lose the rest"),
]
