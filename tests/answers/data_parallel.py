"""Other right answers to the exercises of notebook 03."""

import torch
import torch.distributed as dist


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
    """As a reader writes it; buffers and frozen parameters are in the state_dict."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        for tensor in module.state_dict().values():
            dist.broadcast(tensor, src=0)

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
