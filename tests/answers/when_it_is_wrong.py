"""Answers to the exercises of notebook 14 that are right in another way, and wrong ones."""

import bisect
import hashlib
import math

import torch
import torch.distributed as dist

from ddpkit.exercises.on_rank import bits


def loss_with_everyones_counts(losses):
    counts = [torch.zeros(()) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, torch.tensor(float(losses.numel())))
    return len(counts) * losses.sum() / sum(counts)


def apart(own):
    """{name: the ranks whose value isn't rank 0's}, of what each rank has made of its tensors."""
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, own)
    found = {}
    for name in own:
        ranks = [r for r, theirs in enumerate(everyones) if theirs[name] != everyones[0][name]]
        if ranks:
            found[name] = ranks
    return found


def replicas_by_sha(module):
    own = {}
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        own[name] = hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest()
    return apart(own)


def first_by_bisect(differs, last):
    return 1 + bisect.bisect_left(range(1, last), True, key=differs)


def by_powers_of_ten(gradient):
    return gradient * (10.0 ** (torch.arange(gradient.numel()) % 5)).view_as(gradient)


def every_other_number(gradient):
    factors = torch.ones(gradient.numel(), dtype=gradient.dtype)
    factors[::2] = 1000
    return gradient * factors.view_as(gradient)


RIGHT = [
    ("out_of_sight", by_powers_of_ten),
    ("out_of_sight", every_other_number),
    ("token_loss", loss_with_everyones_counts),
    ("replicas_apart", replicas_by_sha),
    ("first_wrong", first_by_bisect),
]


def zero_of_its_own(losses):
    tokens = torch.tensor(float(len(losses)))
    dist.all_reduce(tokens)
    if len(losses) == 0:
        return torch.zeros((), requires_grad=True)
    return losses.sum() * dist.get_world_size() / tokens


def replicas_by_sums(module):
    own = {name: t.double().sum().item() for name, t in module.state_dict().items()}
    return apart(own)


def replicas_by_broadcast(module):
    apart = {}
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        before = tensor.detach().clone().flatten().view(torch.uint8)
        dist.broadcast(tensor.data, 0)
        odd = [None] * dist.get_world_size()
        same = torch.equal(before, tensor.detach().flatten().view(torch.uint8))
        dist.all_gather_object(odd, not same)
        if any(odd):
            apart[name] = [rank for rank, is_odd in enumerate(odd) if is_odd]
    return apart


def replicas_on_rank_0(module):
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, dict(module.named_parameters()))
    if dist.get_rank() > 0:
        return None
    apart = {}
    for name, first in everyones[0].items():
        ranks = [r for r, theirs in enumerate(everyones) if not torch.equal(theirs[name], first)]
        if ranks:
            apart[name] = ranks
    return apart


def asks_each(differs, last):
    for step in range(last + 1):
        if differs(step):
            return step
    return None


def gallops(differs, last):
    step = 1
    while step < last and not differs(step):
        step *= 2
    low, high = step // 2, min(step, last)
    while high - low > 1:
        middle = math.ceil((low + high) / 2)
        low, high = (low, middle) if differs(middle) else (middle, high)
    return high


def asks_for_both_ends(differs, last):
    return bisect.bisect_left(range(last + 1), True, key=differs)


def signs(gradient):
    return gradient.sign()


def the_other_way(gradient):
    return -gradient


def in_the_caller_s(gradient):
    gradient[0] *= 1000
    return gradient


def exposed_in_whole_seconds(computing, communication):
    busy = {second for begin, end in computing for second in range(int(begin), round(end))}
    sent = {second for begin, end in communication for second in range(int(begin), round(end))}
    return float(len(sent - busy))


def loss_of_eight_bits(losses):
    tokens = torch.tensor([len(losses)]).to(torch.uint8)
    dist.all_reduce(tokens)
    return losses.sum() / tokens[0] * dist.get_world_size()


def replicas_without_nan(module):
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return apart({n: (t.nan_to_num().tolist(), t.signbit().tolist()) for n, t in tensors})


def replicas_in_float32(module):
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return apart({name: bits(tensor.float()) for name, tensor in tensors})


WRONG = [
    ("exposed", exposed_in_whole_seconds, "parts of a second, computing [(0, 0.1875)]"),
    ("out_of_sight", signs, "AdamW's weights ended"),
    ("out_of_sight", the_other_way, "AdamW's weights ended '218% of their way' apart"),
    ("out_of_sight", in_the_caller_s, "`gradient` isn't what it was before the call"),
    ("token_loss", zero_of_its_own, "the loss on rank 1 doesn't lead back to the weights"),
    ("token_loss", loss_of_eight_bits, "257.0"),
    ("replicas_apart", replicas_without_nan, "{'0.bias': [2]}, expected {'0.bias': [1, 2]}"),
    ("replicas_apart", replicas_in_float32, "{'mask': [1, 2]}, expected {'1.running_mean': [2]"),
    ("replicas_apart", replicas_by_sums, "rank 0 returns {'1.running_mean': [2]}, expected"),
    ("replicas_apart", replicas_by_broadcast, "on rank 1 the module isn't what it was"),
    ("replicas_apart", replicas_on_rank_0, "rank 1 returns None, expected {'0.weight': [1]}"),
    ("first_wrong", asks_each, "runs, where last is 1000: 778, and 10 are enough"),
    ("first_wrong", asks_each, "as many runs as steps"),
    ("first_wrong", gallops, "Ask neither 0 nor `last`"),
    ("first_wrong", asks_for_both_ends, "Ask neither 0 nor `last`"),
]
