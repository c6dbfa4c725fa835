"""ddpkit.collectives beside torch's in the same run, and beside one process that has all parts."""

import ast
import functools
import inspect
import operator
import time

import pytest
import torch
import torch.distributed as dist
import twin
from on_ranks import on_ranks

from ddpkit import collectives as ours
from ddpkit import launch

OPS = {"SUM": operator.add, "PRODUCT": operator.mul, "MIN": torch.minimum, "MAX": torch.maximum}
NAMES = ["broadcast", "reduce", "all_reduce", "gather", "scatter"]
NAMES += ["all_gather", "reduce_scatter", "all_to_all", "barrier"]


def part(rank, shape=(7,), dtype=torch.float32, salt=0):
    """What `rank` brings; every rank can make it, so every rank can be the one-process twin."""
    return twin.whole(rank, shape, dtype, salt)


def combined(parts, op):
    """The parts, one after the other, combined by one process."""
    return functools.reduce(OPS[op], parts)


# Values


def everything(module, ranks, root, op="SUM", shape=(7,), dtype=torch.int64, group=None):
    """Call all of `module`'s collectives; what this rank then has, by name."""
    rank, op = dist.get_rank(), getattr(dist.ReduceOp, op)
    own = part(rank, shape, dtype)
    mine = [part(rank, shape, dtype, 1 + r) for r in ranks]
    has = {"what it brought": [own, mine]}
    for name in ("broadcast", "reduce", "all_reduce", "scatter", "reduce_scatter"):
        has[name] = own.clone()
    for name in ("gather", "all_gather", "all_to_all"):
        has[name] = [torch.zeros_like(own) for _ in ranks]
    module.broadcast(has["broadcast"], root, group)
    module.reduce(has["reduce"], root, op, group)
    module.all_reduce(has["all_reduce"], op, group)
    module.gather(own, has["gather"] if rank == root else None, root, group)
    module.scatter(has["scatter"], mine if rank == root else None, root, group)
    module.all_gather(has["all_gather"], own, group)
    module.reduce_scatter(has["reduce_scatter"], mine, op, group)
    if module is ours or torch.__version__ >= "2.12":  # before, Gloo had none
        module.all_to_all(has["all_to_all"], mine, group)
    else:
        del has["all_to_all"]
    module.barrier(group)
    if module is ours:
        has |= {"tree_broadcast": own.clone(), "tree_reduce": own.clone()}
        ours.tree_broadcast(has["tree_broadcast"], root, group)
        ours.tree_reduce(has["tree_reduce"], root, op, group)
    return has


def by_one_process(ranks, root, op="SUM", shape=(7,), dtype=torch.int64):
    """What `everything` should give on this rank."""
    rank = dist.get_rank()
    parts = [part(r, shape, dtype) for r in ranks]
    for_me = [part(r, shape, dtype, 1 + rank) for r in ranks]
    own, total = part(rank, shape, dtype), combined(parts, op)
    at_root = total if rank == root else own
    return {
        "what it brought": [own, [part(rank, shape, dtype, 1 + r) for r in ranks]],
        "broadcast": part(root, shape, dtype),
        "reduce": at_root,
        "all_reduce": total,
        "scatter": part(root, shape, dtype, 1 + rank),
        "reduce_scatter": combined(for_me, op),
        "gather": parts if rank == root else [torch.zeros_like(own) for _ in ranks],
        "all_gather": parts,
        "all_to_all": for_me,
        "tree_broadcast": part(root, shape, dtype),
        "tree_reduce": at_root,
    }


@on_ranks(1, 2, 3, 4)
def test_every_dtype_and_shape(check):
    """Every dtype in one of three worlds, every shape in all; whole numbers, exact in any order."""
    ranks = range(dist.get_world_size())
    cases = [(dtype, (3, 4)) for dtype in twin.DTYPES[len(ranks) % 3 :: 3]]
    cases += [(torch.float32, shape) for shape in [(), (0,), (7,)]]
    for number, (dtype, shape) in enumerate(cases):
        op = [*OPS][number % (2 if dtype.is_complex else 4)]
        case = ranks, number % len(ranks), op, shape, dtype
        check.same(everything(ours, *case), by_one_process(*case), *case)


@on_ranks(3)
def test_sums_that_round(check, rank, world_size):
    """The same bits on all ranks and in every run, also into a tensor far larger than a socket."""
    for dtype in twin.FLOATS:
        parts = [twin.fractions(r, 1000, dtype) for r in range(world_size)]
        for name, args in (("all_reduce", ()), ("tree_reduce", (1,))):
            x, again = parts[rank].clone(), parts[rank].clone()
            getattr(ours, name)(x, *args)
            getattr(ours, name)(again, *args)
            check.same(again, x, name, "a second time", dtype)
            if name == "all_reduce":
                check.same(x, twin.total(parts), "in the order of ranks", dtype)
            elif rank == 1:
                check.near(x, parts, name, dtype)
    whole = torch.zeros(3, 1_000_000)
    whole[rank] = rank + 0.5  # the part is where it belongs
    ours.all_gather(list(whole), whole[rank])
    for least_or_most in (whole.amin(1), whole.amax(1)):
        check.same(least_or_most, torch.tensor([0.5, 1.5, 2.5]), "all_gather in place")


@on_ranks(3)
def test_parts_of_different_sizes(check, rank, world_size):
    sizes = range(world_size)  # rank 0's is empty
    parts = [part(r, (r, 2)) for r in sizes]
    got = [torch.empty(r, 2) for r in sizes]
    ours.all_gather(got, parts[rank])
    check.same(got, parts, "all_gather")

    got = [torch.empty(r, 2) for r in sizes] if rank == 1 else []
    ours.gather(parts[rank], got, 1)
    check.same(got, parts if rank == 1 else [], "gather")

    x = torch.empty(rank, 2)
    ours.scatter(x, parts if rank == 1 else [], 1)
    check.same(x, parts[rank], "scatter")

    got = [torch.empty(2 * r + rank) for r in sizes]
    ours.all_to_all(got, [part(rank, 2 * rank + r, salt=r) for r in sizes])
    check.same(got, [part(r, 2 * r + rank, salt=rank) for r in sizes], "all_to_all")

    chunks = list(part(rank, 10).tensor_split(world_size))  # 3 ranks: 4, 3, 3
    x = torch.empty_like(chunks[rank])
    ours.reduce_scatter(x, chunks)
    total = combined([part(r, 10) for r in sizes], "SUM")
    check.same(x, total.tensor_split(world_size)[rank], "reduce_scatter")


@on_ranks(2)
def test_parameters_are_data_to_a_collective(check):
    weight = torch.full((2,), float(dist.get_rank()), requires_grad=True)
    gathered, shard = [torch.zeros(2), torch.zeros(2)], torch.zeros(2)
    ours.all_gather(gathered, weight)
    ours.reduce_scatter(shard, [weight, weight])
    ours.gather(weight, gathered if dist.get_rank() == 0 else None)
    ours.broadcast(weight, 1)
    ours.tree_reduce(weight, 0)
    ours.all_reduce(weight)
    ours.scatter(weight, [weight + 1, weight + 2] if dist.get_rank() == 1 else None, 1)
    tracked = [tensor.requires_grad for tensor in [*gathered, shard]]
    check.same((weight.is_leaf, weight.requires_grad, tracked), (True, True, [False] * 3))
    check.same(weight.tolist(), [4.0 + dist.get_rank()] * 2, "weight")


@on_ranks(2)
def test_what_is_refused(check):
    """On every rank, before anything is sent: nobody is left waiting."""
    x, rank = torch.zeros(3), dist.get_rank()
    says = (f"rank {rank} called", "op=AVG, expected one of SUM, PRODUCT, MIN, MAX", "For an av")
    for function, args in (
        (ours.reduce, (x, 0)),
        (ours.tree_reduce, (x, 0)),
        (ours.all_reduce, (x,)),
        (ours.reduce_scatter, (x, [x, x])),
    ):
        check.refused(function, *args, op=dist.ReduceOp.AVG, says=says)
    for wrong in ([x], [x, x, x]):
        check.refused(ours.all_gather, wrong, x, says="")
        check.refused(ours.reduce_scatter, x, wrong, says="")
        check.refused(ours.all_to_all, wrong, [x, x], says="")
        check.refused(ours.all_to_all, [x, x], wrong, says="")
        check.refused(ours.gather, x, wrong, rank, says="")
        check.refused(ours.scatter, x, wrong, rank, says="")


# Sub-groups


@on_ranks(4)
def test_groups(check):
    rank, x = dist.get_rank(), torch.zeros(4)
    for ranks in ([0, 2], [3, 1], [1, 2, 3], [2]):
        group = dist.new_group(ranks)
        if rank not in ranks:
            arguments = {
                "barrier": (),
                "all_gather": ([x], x),
                "reduce_scatter": (x, [x]),
                "all_to_all": ([x], [x]),
                "all_reduce": (x,),
                "gather": (x, None, ranks[0]),
                "scatter": (x, None, ranks[0]),
            }
            for name in (*NAMES, "tree_broadcast", "tree_reduce"):
                args = arguments.get(name, (x, ranks[0]))
                says = (f"rank {rank} called ", "with a group that it isn't in")
                check.refused(getattr(ours, name), *args, group=group, says=says)
            continue
        ranks = dist.get_process_group_ranks(group)  # torch sorts them
        for root in ranks:
            expected = by_one_process(ranks, root)
            check.same(everything(ours, ranks, root, group=group), expected, ranks, root)
            theirs = everything(dist, ranks, root, group=group)
            if rank != root:
                theirs["reduce"] = expected["reduce"]  # torch leaves other things in it
            expected = {name: expected[name] for name in theirs}
            check.same(theirs, expected, "torch's own", ranks, root)
        outside = min({0, 1, 2, 3} - set(ranks))
        for name in ("broadcast", "tree_broadcast", "reduce", "tree_reduce"):
            check.refused(getattr(ours, name), torch.zeros(4), outside, group=group, says="not")


# What it costs is in test_cost.


def cross_the_barrier():
    """(came, went) for one barrier in which rank 0 is late, one in which rank 1 is, ..."""
    times = []
    for late in range(dist.get_world_size()):
        if dist.get_rank() == late:
            time.sleep(0.02)
        came = time.monotonic()
        ours.barrier()
        times.append((came, time.monotonic()))
    return times


def test_nobody_leaves_a_barrier_before_all_have_come():
    for times in zip(*launch(cross_the_barrier, world_size=3), strict=True):
        assert max(came for came, _ in times) <= min(went for _, went in times)


# What stands in the file


@pytest.mark.parametrize("name", NAMES)
def test_signature_is_torchs(name):
    """Less what goes on in the background, and what counts ranks in the group."""
    left_out = {"async_op", "device_ids", "timeout", "group_src", "group_dst"}
    theirs = [p for p in inspect.signature(getattr(dist, name)).parameters if p not in left_out]
    assert list(inspect.signature(getattr(ours, name)).parameters) == theirs
    tree = getattr(ours, f"tree_{name}", getattr(ours, name))
    assert list(inspect.signature(tree).parameters) == theirs


def test_only_point_to_point():
    """Of torch.distributed, only messages between two ranks, and questions that send nothing."""
    used = set()
    for node in ast.walk(ast.parse(inspect.getsource(ours))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            used |= {node.attr} if node.value.id == "dist" else set()
    messages = {"send", "recv", "isend", "irecv", "P2POp", "batch_isend_irecv"}
    assert used - messages == {"get_rank", "get_process_group_ranks", "group"}
