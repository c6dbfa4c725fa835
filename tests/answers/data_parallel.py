"""Other right answers to the exercises of notebook 03."""

import torch
import torch.distributed as dist

from ddpkit import exercises as check
from ddpkit.ring import ring_all_reduce


def _trained(module):
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _or_zeros(parameter):
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def average_gradients_in_one_message(module):
    parameters = _trained(module)
    flat = torch.cat([_or_zeros(parameter).flatten() for parameter in parameters])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    parts = flat.split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view_as(parameter)


def average_gradients_by_avg(module):
    for parameter in _trained(module):
        parameter.grad = _or_zeros(parameter)
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)


def average_gradients_by_flags(module):
    """Agree first on who has a gradient; what nobody has stays without."""
    flags = [0.0 if parameter.grad is None else 1.0 for parameter in module.parameters()]
    flags = torch.tensor(flags)
    dist.all_reduce(flags)
    for flag, parameter in zip(flags, module.parameters(), strict=True):
        if flag > 0:
            parameter.grad = _or_zeros(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def push_and_pull_by_hand(model):
    flat = torch.cat([parameter.grad.flatten() for parameter in _trained(model)])
    dist.send(flat, 0)
    dist.recv(flat, 0)
    for parameter in _trained(model):
        with torch.no_grad():
            parameter.copy_(flat[: parameter.numel()].view_as(parameter))
        flat = flat[parameter.numel() :]


def serve_whoever_comes(model, optimizer, steps):
    """The order of a sum doesn't matter, here at least."""
    trained, workers = _trained(model), dist.get_world_size() - 1
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=False)
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        for _ in range(workers):
            pushed = torch.empty(sum(parameter.numel() for parameter in trained))
            dist.recv(pushed)
            parts = pushed.split([parameter.numel() for parameter in trained])
            for parameter, part in zip(trained, parts, strict=True):
                parameter.grad += part.view_as(parameter) / workers
        optimizer.step()
        weights = torch.cat([parameter.detach().flatten() for parameter in trained])
        sending = [dist.isend(weights, worker) for worker in range(1, workers + 1)]
        for work in sending:
            work.wait()


class NaiveDDPWhole(torch.nn.Module):
    """As a reader writes it; not all buffers are in the state_dict."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.data, src=0)

    def synchronize(self):
        average_gradients_by_flags(self.module)

    def forward(self, *inputs):
        return self.module(*inputs)


def sum_or_mean_by_parameter(module, reduction, rows):
    for parameter in _trained(module):
        if reduction == "mean":
            parameter.grad *= rows
        dist.all_reduce(parameter.grad)
        if reduction == "mean":
            all_rows = torch.tensor(rows)
            dist.all_reduce(all_rows)
            parameter.grad /= all_rows.item()


class HookedOnTensors(torch.nn.Module):
    """register_hook is given the gradient, and what it returns takes its place."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        for parameter in module.parameters():
            dist.broadcast(parameter.data, 0)
            parameter.register_hook(self.mean)

    def mean(self, gradient):
        mean = gradient / dist.get_world_size()
        dist.all_reduce(mean)
        return mean

    def forward(self, *inputs):
        return self.module(*inputs)


RIGHT = [
    ("push_and_pull", push_and_pull_by_hand),
    ("serve", serve_whoever_comes),
    ("NaiveDDP", NaiveDDPWhole),
    ("average_gradients", average_gradients_in_one_message),
    ("average_gradients", average_gradients_by_avg),
    ("average_gradients", average_gradients_by_flags),
    ("sum_or_mean", sum_or_mean_by_parameter),
    ("HookedDDP", HookedOnTensors),
]


def average_gradients_round_a_ring(module):
    """Notebook 02's ring, which sends what an all_reduce sends."""
    for parameter in _trained(module):
        parameter.grad = ring_all_reduce(_or_zeros(parameter)) / dist.get_world_size()


class HookedAndWaiting(HookedOnTensors):
    """The hook begins, synchronize waits."""

    def __init__(self, module):
        super(HookedOnTensors, self).__init__()
        self.module, self.works = module, []
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self.begin)

    def begin(self, parameter):
        parameter.grad /= dist.get_world_size()
        self.works.append(dist.all_reduce(parameter.grad, async_op=True))

    def synchronize(self):
        for work in self.works:
            work.wait()
        self.works.clear()


RIGHT += [
    ("average_gradients", average_gradients_round_a_ring),
    ("HookedDDP", HookedAndWaiting),
]


# Wrong, though the values are right


def gathers_everything(module):
    for parameter in _trained(module):
        gradient = _or_zeros(parameter)
        every = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
        dist.all_gather(every, gradient)
        parameter.grad = torch.stack(every).mean(0)


def sends_the_frozen_too(module):
    average_gradients_by_avg(module)
    for parameter in module.parameters():
        if not parameter.requires_grad:
            dist.all_reduce(torch.zeros_like(parameter))


def counts_ranks_each_time(module):
    for parameter in _trained(module):
        parameter.grad = _or_zeros(parameter)
        dist.all_reduce(parameter.grad)
        ranks = torch.ones(1)
        dist.all_reduce(ranks)
        parameter.grad /= ranks


class AveragesAgain(check.HookedDDP.reference):
    def synchronize(self):
        for parameter in self.module.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size() ** 2


class RaisesAtTheEnd(check.HookedDDP.reference):
    def synchronize(self):
        raise NotImplementedError


class SendsWeightsInForward(check.HookedDDP.reference):
    def forward(self, x):
        for parameter in self.module.parameters():
            dist.broadcast(parameter.data, 0)
        return self.module(x)


def counts_rows_in_bytes(module, reduction, rows):
    all_rows = torch.tensor(rows, dtype=torch.uint8)
    dist.all_reduce(all_rows)
    for parameter in _trained(module):
        parameter.grad *= 1 if reduction == "sum" else rows / max(1, all_rows.item())
        dist.all_reduce(parameter.grad)


def gathers_all_to_sum(module, reduction, rows):
    counts = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, torch.tensor([float(rows)]))
    for parameter in _trained(module):
        every = [torch.empty_like(parameter) for _ in counts]
        dist.all_gather(every, parameter.grad * (rows if reduction == "mean" else 1))
        parameter.grad = sum(every) / (sum(counts) if reduction == "mean" else 1)


class SendsTheStateDict(NaiveDDPWhole):
    """Without the buffers that aren't saved."""

    def __init__(self, module):
        super(NaiveDDPWhole, self).__init__()
        self.module = module
        for tensor in module.state_dict().values():
            dist.broadcast(tensor, src=0)


class SendsTheWeightsInEachStep(NaiveDDPWhole):
    def synchronize(self):
        average_gradients_by_avg(self.module)
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            dist.broadcast(tensor.detach(), src=0)


WRONG = [
    ("NaiveDDP", SendsTheStateDict, "the buffers on rank 1"),
    ("NaiveDDP", SendsTheWeightsInEachStep, "after wrapping, rank 0 sent parameters"),
    ("average_gradients", gathers_everything, "bytes more than an all_reduce of each"),
    ("average_gradients", sends_the_frozen_too, "made 1 calls more than there are trained"),
    ("average_gradients", counts_ranks_each_time, "bytes more than an all_reduce of each"),
    ("HookedDDP", AveragesAgain, "weight.grad"),
    ("HookedDDP", RaisesAtTheEnd, "NotImplementedError"),
    ("HookedDDP", SendsWeightsInForward, "bytes sent by each rank"),
    ("sum_or_mean", counts_rows_in_bytes, "mean over 128 and 128 rows"),
    ("sum_or_mean", gathers_all_to_sum, "bytes more than an all_reduce of each"),
]


def average_gradients_upside_down(module):
    average_gradients_by_avg(module)
    for parameter in _trained(module):
        parameter.grad = parameter.grad.flip(0)


def average_gradients_in_float32(module):
    average_gradients_by_avg(module)
    for parameter in _trained(module):
        parameter.grad = parameter.grad.float().to(parameter.dtype)


def push_and_pull_in_float32(model):
    flat = torch.cat([parameter.grad.flatten().float() for parameter in _trained(model)])
    dist.send(flat, 0)
    dist.recv(flat, 0)
    torch.nn.utils.vector_to_parameters(flat, _trained(model))


class SendsTheWeightsInForward(NaiveDDPWhole):
    def forward(self, *inputs):
        for parameter in self.module.parameters():
            dist.broadcast(parameter.detach(), 0)
        return self.module(*inputs)


class ForgetsTheMean(check.HookedDDP.reference):
    def average(self, parameter):
        dist.all_reduce(parameter.grad / dist.get_world_size())


WRONG += [
    ("average_gradients", average_gradients_upside_down, "Is each number in its place?"),
    ("average_gradients", average_gradients_in_float32, "has lost digits"),
    ("push_and_pull", push_and_pull_in_float32, "Both sides must use the same dtype"),
    ("NaiveDDP", SendsTheWeightsInForward, "after wrapping, rank 0 sent parameters"),
    ("HookedDDP", ForgetsTheMean, "weight.grad is still rank 0's own"),
]


def sum_or_mean_by_objects(module, reduction, rows):
    counts = [None] * dist.get_world_size()
    dist.all_gather_object(counts, rows)
    for parameter in _trained(module):
        parameter.grad *= rows / sum(counts) if reduction == "mean" else 1
        dist.all_reduce(parameter.grad)


RIGHT += [("sum_or_mean", sum_or_mean_by_objects)]
