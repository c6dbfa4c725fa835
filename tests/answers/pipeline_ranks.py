"""Answers to notebook 10's exercises on ranks, right in another way than the reference."""

import torch
import torch.distributed as dist

from ddpkit import pipeline


def run_forwards_by_send(module, actions, inputs, loss):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    held = {}
    for i in map(int, (action.partition("F")[2] for action in actions)):
        x = torch.empty_like(inputs[i]) if rank > 0 else inputs[i].clone()
        if rank > 0:
            dist.recv(x, rank - 1)
        y = module(x.requires_grad_())
        held[i] = [x, y]
        if rank == last:
            held[i][1] = loss(y, i) * (1 / len(inputs))
        else:
            dist.send(y.detach(), rank + 1)
    return held


def run_forwards_without_a_gradient_on_rank_0(module, actions, inputs, loss):
    """Rank 0's inputs could be whole numbers, which can't require one."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    held = {}
    for action in actions:
        i = pipeline.parse(action)[2]
        if rank > 0:
            dist.recv(inputs[i], rank - 1)
            inputs[i].requires_grad_()
        y = module(inputs[i])
        if rank < last:
            dist.send(y.detach(), rank + 1)
        held[i] = inputs[i], y if rank < last else loss(y, i) / len(inputs)
    return held


def run_stage_posts_its_receives(module, actions, inputs, loss):
    """Every receive begun at the start, in the order in which they are needed."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    arriving, held, works = {}, {}, []
    for action in actions:
        i, other = int(action[2:]), rank - 1 if action[1] == "F" else rank + 1
        if 0 <= other <= last:
            buffer = inputs[i] if action[1] == "F" else torch.empty_like(inputs[i])
            arriving[action] = buffer, dist.irecv(buffer, other)
    for action in actions:
        i = int(action[2:])
        buffer, work = arriving.get(action, (inputs[i], None))
        if work is not None:
            work.wait()
        if action[1] == "F":
            x = buffer.requires_grad_()
            y = module(x)
            held[i] = x, y if rank < last else loss(y, i) / len(inputs)
            out, to = y.detach(), rank + 1
        else:
            x, y = held[i]
            torch.autograd.backward(y, None if rank == last else buffer)
            out, to = x.grad, rank - 1
        if 0 <= to <= last:
            works.append((out, dist.isend(out, to)))
    for _, work in works:
        work.wait()


def accumulate_by_sums(model, micro_batches, loss):
    rows = sum(len(inputs) for inputs, _ in micro_batches)
    losses = []
    for inputs, targets in micro_batches:
        each = loss(model(inputs), targets) * len(inputs)
        each.backward()
        losses.append(each.detach())
    for parameter in model.parameters():
        parameter.grad /= rows
    return torch.stack(losses).sum() / rows


def finish_step_by_messages(parameters, tied, ends):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    if tied is not None and last > 0:
        parts = [torch.empty_like(tied.grad) for _ in range(2)]
        dist.all_gather(parts, tied.grad, group=ends)
        tied.grad = parts[0] + parts[1]
    mine = [p.grad for p in parameters if p is not tied or rank == last]
    square = torch.nn.utils.get_total_norm(mine) ** 2
    dist.all_reduce(square)
    return square.sqrt().item()


RIGHT = [
    ("run_forwards", run_forwards_by_send),
    ("run_forwards", run_forwards_without_a_gradient_on_rank_0),
    ("run_stage", run_stage_posts_its_receives),
    ("accumulate", accumulate_by_sums),
    ("finish_step", finish_step_by_messages),
]


# Wrong, though the values are right


def run_stage_keeps_every_graph(module, actions, inputs, loss):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    held, works = {}, []
    for action in actions:
        i = int(action[2:])
        if action[1] == "F":
            if rank > 0:
                dist.recv(inputs[i], rank - 1)
            y = module(inputs[i].requires_grad_())
            out, to = y.detach(), rank + 1
            held[i] = y if rank < last else loss(y, i) / len(inputs)
        else:
            gradient = torch.empty_like(inputs[i]) if rank < last else None
            if rank < last:
                dist.recv(gradient, rank + 1)
            held[i].backward(gradient, retain_graph=True)
            out, to = inputs[i].grad, rank - 1
        if 0 <= to <= last:
            works.append((out, dist.isend(out, to)))
    for _, work in works:
        work.wait()


def accumulate_and_drag_graphs(model, micro_batches, loss):
    rows = sum(len(inputs) for inputs, _ in micro_batches)
    logged = 0.0
    for inputs, targets in micro_batches:
        share = loss(model(inputs), targets) * len(inputs) / rows
        share.backward()
        logged += share
    return logged


def run_forwards_twice(module, actions, inputs, loss):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    held = {}
    for action in actions:
        _, _, i = pipeline.parse(action)
        for _ in range(2):
            if rank > 0:
                dist.recv(inputs[i].detach(), rank - 1)
            y = module(inputs[i].requires_grad_())
            if rank < last:
                dist.send(y.detach(), rank + 1)
        held[i] = inputs[i], loss(y, i) / len(inputs) if rank == last else y
    return held


WRONG = [
    ("run_forwards", run_forwards_twice, "sent 48 bytes, expected 24"),
    ("run_stage", run_stage_keeps_every_graph, "the graphs of 4 micro-batches"),
    ("accumulate", accumulate_and_drag_graphs, "the loss drags its graph along"),
]
