"""Train in a pipeline with 1F1B, replicated twice, as Hugging Face's picotron."""

import os

import torch
import torch.distributed as dist
from torch import nn


class ProcessGroupManager:
    """The grid data x pipeline x tensor, and the groups of its lines."""

    def __init__(self, dp_size, pp_size, tp_size):
        self.rank = dist.get_rank()
        grid = torch.arange(dist.get_world_size()).view(dp_size, pp_size, tp_size)
        self.dp_rank, self.pp_rank, self.tp_rank = (grid == self.rank).nonzero()[0].tolist()
        self.tp_group = dist.new_subgroups_by_enumeration(grid.flatten(0, 1).tolist())[0]
        pipelines = grid.transpose(1, 2).flatten(0, 1).tolist()
        self.pp_group = dist.new_subgroups_by_enumeration(pipelines)[0]
        replicas = grid.permute(1, 2, 0).flatten(0, 1).tolist()
        self.dp_group = dist.new_subgroups_by_enumeration(replicas)[0]
        pipeline = grid[self.dp_rank, :, self.tp_rank].tolist()
        self.first, self.last = self.pp_rank == 0, self.pp_rank == pp_size - 1
        self.prev_rank = None if self.first else pipeline[self.pp_rank - 1]
        self.next_rank = None if self.last else pipeline[self.pp_rank + 1]
        self.pp_size, self.dp_size = pp_size, dp_size


def communicate(operation, tensor=None):
    """One message: recv_forward, send_forward, recv_backward or send_backward."""
    forward, sends = operation.endswith("forward"), operation.startswith("send")
    peer = pgm.next_rank if forward == sends else pgm.prev_rank
    if peer is None:
        return None
    if not sends:
        tensor = torch.empty(SHAPE, requires_grad=True)
    op = dist.P2POp(dist.isend if sends else dist.irecv, tensor, peer)
    for request in dist.batch_isend_irecv([op]):
        request.wait()
    return None if sends else tensor


def exchange(operation, tensor):
    """Both ways at once: send_forward_recv_backward or send_backward_recv_forward."""
    peer = pgm.next_rank if operation.startswith("send_forward") else pgm.prev_rank
    if peer is None:
        return None
    received = torch.empty(SHAPE, requires_grad=True)
    sends = dist.P2POp(dist.isend, tensor, peer)
    receives = dist.P2POp(dist.irecv, received, peer)
    for request in dist.batch_isend_irecv([sends, receives]):
        request.wait()
    return received


def backward(inputs, outputs, output_gradient):
    if inputs is not None:
        inputs.retain_grad()
    torch.autograd.backward(outputs, output_gradient)
    return None if inputs is None else inputs.grad


def train_step(stage, batches):
    """One step of 1F1B: warm-up, steady state, cool-down. Returns the last stage's loss."""
    warmup = min(pgm.pp_size - pgm.pp_rank - 1, len(batches))
    waiting, total = [], 0.0

    def forward(received):
        nonlocal total
        x, y = batches.pop(0)
        outputs = stage(x if received is None else received)
        if pgm.last:
            outputs = nn.functional.mse_loss(outputs, y) / MICRO_BATCHES
            total += outputs.item()
        waiting.append((received, outputs))
        return outputs

    for _ in range(warmup):
        received = communicate("recv_forward")
        communicate("send_forward", forward(received))
    steady = MICRO_BATCHES - warmup
    received = communicate("recv_forward")
    for i in range(steady):
        outputs = forward(received)
        gradient = exchange("send_forward_recv_backward", outputs)
        inputs_gradient = backward(*waiting.pop(0), gradient)
        if i == steady - 1:
            communicate("send_backward", inputs_gradient)
        else:
            received = exchange("send_backward_recv_forward", inputs_gradient)
    for _ in range(warmup):
        gradient = communicate("recv_backward")
        communicate("send_backward", backward(*waiting.pop(0), gradient))
    return total


def average_gradients(stage):
    for parameter in stage.parameters():
        dist.all_reduce(parameter.grad, group=pgm.dp_group)
        parameter.grad /= pgm.dp_size


MICRO_BATCHES, SHAPE = 4, (4, 8)
dist.init_process_group("gloo")
pgm = ProcessGroupManager(dp_size=int(os.environ["WORLD_SIZE"]) // 2, pp_size=2, tp_size=1)
torch.manual_seed(pgm.pp_rank)
stage = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
torch.manual_seed(100 + pgm.dp_rank)
for step in range(3):
    batches = [(torch.randn(SHAPE), torch.randn(SHAPE)) for _ in range(MICRO_BATCHES)]
    loss = torch.tensor([train_step(stage, batches)])
    average_gradients(stage)
    optimizer.step()
    optimizer.zero_grad()
    dist.broadcast(loss, group_src=pgm.pp_size - 1, group=pgm.pp_group)
    dist.all_reduce(loss, group=pgm.dp_group)
    if pgm.rank == 0:
        print(f"step {step}: loss {loss.item() / pgm.dp_size:.6f}")
dist.destroy_process_group()
