"""ddpkit.fast.buckets: what it adds to the plain BucketedDDP; what both do is in test_training."""

import itertools

import torch
import torch.distributed as dist
from on_ranks import on_ranks
from training_cases import FAST, MODELS, Routes, gradients_of, routes_step, trained_of

from ddpkit.ddp import plan_buckets
from ddpkit.fast.buckets import BucketedDDP

LAYER_BYTES = 336  # a layer's weight and bias


def narrow(batch):
    return [part.float() if part.is_floating_point() else part for part in batch]


@on_ranks(1, 2, 3)
def test_bf16_on_the_way(check, rank, world_size):
    """Each gradient is rounded to bf16 once, and so is each of the W-1 sums: as `near` allows."""
    for kind, shared in itertools.product(("GPT", "MLP"), (False, True)):
        build, batch, loss = MODELS[kind]
        module = build(rank, torch.float32)
        model = FAST(module, wire_dtype=torch.bfloat16, shared_memory=shared)
        for step in range(2):
            batches = [narrow(batch(step, 0, r)) for r in range(world_size)]
            parts = [gradients_of(module, loss(module, [each])) for each in batches]
            loss(model, [batches[rank]]).backward()
            model.synchronize()
            for name, parameter in trained_of(module).items():
                what = kind, shared, step, name
                shares = [part[name] / world_size for part in parts]
                check.near(parameter.grad.bfloat16(), shares, *what)
                check.same(parameter.grad.bfloat16().float(), parameter.grad, *what, "was sent")
                check.same_on_all(parameter.grad, *what)
            model.zero_grad()


def plan_of(model) -> list[list[str]]:
    names = {parameter: name for name, parameter in model.module.named_parameters()}
    return [[names[parameter] for parameter in bucket.views] for bucket in model.buckets]


def planned(names) -> list[list[str]]:
    sizes = {name: (p.nbytes, p.dtype) for name, p in Routes().named_parameters()}
    plan = plan_buckets([sizes[name] for name in names], LAYER_BYTES)
    return [[names[number] for number in bucket] for bucket in plan]


@on_ranks(3)
def test_the_plan_is_the_order_in_which_the_first_ranks_gradients_came(check):
    """At first, the reverse order of the parameters; other routes later change nothing."""
    for routes in (["abc"] * 3, ["cba", "abc", "bac"], ["acb", "cba", "cba"]):
        module = Routes()
        names = {parameter: name for name, parameter in module.named_parameters()}
        arrived = []
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(arrived.append)
        model = BucketedDDP(module, LAYER_BYTES / 2**20)
        check.same(plan_of(model), planned(list(names.values())[::-1]), routes, "first")
        routes_step(model, 0, routes[dist.get_rank()])
        firsts = [[names[parameter] for parameter in arrived]]
        dist.broadcast_object_list(firsts, 0)
        came = "".join(dict.fromkeys(name[0] for name in firsts[0]))
        check.same(came, routes[0][::-1], routes, "rank 0's gradients")
        for step in (1, 2):
            check.same(plan_of(model), planned(firsts[0]), routes, step)
            model.zero_grad()
            routes_step(model, step)
