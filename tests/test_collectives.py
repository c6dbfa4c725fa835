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

OPS = {
    "SUM": operator.add,
    "PRODUCT": operator.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
}
NAMES = (
    "broadcast",
    "reduce",
    "all_reduce",
    "gather",
    "scatter",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "barrier",
)
TREES = ("tree_broadcast", "tree_reduce")
TORCHS_DTYPES = {*twin.FLOATS, torch.uint8, torch.int8, torch.int32, torch.int64}


def part(rank, shape=(7,), dtype=torch.float32, salt=0):
    """What `rank` brings; every rank can make it, so every rank can be the one-process twin."""
    return twin.whole(rank, shape, dtype, salt)


def combined(parts, op):
    """The parts, one after the other, combined by one process."""
    return functools.reduce(OPS[op], parts)


def cases():
    """Every dtype with one shape, every shape with one dtype."""
    yield from ((dtype, (3, 4)) for dtype in twin.DTYPES)
    yield from ((torch.float32, shape) for shape in [(), (0,), (7,)])


# Values


@on_ranks(1, 2, 3, 4)
def test_what_moves_data(check):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for number, (dtype, shape) in enumerate(cases()):
        what, root = (dtype, shape), number % world_size
        parts = [part(r, shape, dtype) for r in range(world_size)]
        mine = [part(rank, shape, dtype, 1 + r) for r in range(world_size)]
        for_me = [part(r, shape, dtype, 1 + rank) for r in range(world_size)]

        for broadcast in (ours.broadcast, ours.tree_broadcast):
            x = parts[rank].clone()
            broadcast(x, root)
            check.same(x, parts[root], broadcast.__name__, root, *what)

        got = [torch.empty_like(x) for x in parts] if rank == root else None
        ours.gather(parts[rank], got, root)
        check.same(got, parts if rank == root else None, "gather", root, *what)

        x = torch.empty_like(parts[rank])
        ours.scatter(x, mine if rank == root else None, root)
        check.same(x, part(root, shape, dtype, 1 + rank), "scatter", root, *what)

        got = [torch.empty_like(x) for x in parts]
        ours.all_gather(got, parts[rank])
        check.same(got, parts, "all_gather", *what)

        got = [torch.empty_like(x) for x in parts]
        ours.all_to_all(got, mine)
        check.same(got, for_me, "all_to_all", *what)
        check.same(mine, [part(rank, shape, dtype, 1 + r) for r in range(world_size)], "input")


@on_ranks(1, 2, 3, 4)
def test_what_combines(check):
    """Whole numbers, so that the order doesn't matter; torch does the same, where it can."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    names = list(OPS)
    for number, (dtype, shape) in enumerate(cases()):
        other = names[number % 2] if dtype.is_complex else names[(number + 2) % 4]
        for name in dict.fromkeys(["SUM", other]):
            op, what, root = getattr(dist.ReduceOp, name), (name, dtype, shape), number % world_size
            parts = [part(r, shape, dtype) for r in range(world_size)]
            expected = combined(parts, name)

            x = parts[rank].clone()
            ours.all_reduce(x, op)
            check.same(x, expected, "all_reduce", *what)
            if dtype in TORCHS_DTYPES:
                theirs = parts[rank].clone()
                dist.all_reduce(theirs, op)
                check.same(x, theirs, "all_reduce and torch's", *what)

            for reduce in (ours.reduce, ours.tree_reduce):
                x = parts[rank].clone()
                reduce(x, root, op)
                left = expected if rank == root else parts[rank]
                check.same(x, left, reduce.__name__, root, *what)

            mine = [part(rank, shape, dtype, 1 + r) for r in range(world_size)]
            for_me = [part(r, shape, dtype, 1 + rank) for r in range(world_size)]
            x = part(rank, shape, dtype, 9)
            ours.reduce_scatter(x, mine, op)
            check.same(x, combined(for_me, name), "reduce_scatter", *what)
            check.same(mine, [part(rank, shape, dtype, 1 + r) for r in range(world_size)], "input")


@on_ranks(3, 4)
def test_sums_that_round_have_the_same_bits_on_all_ranks_and_in_every_run(check):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for dtype in twin.FLOATS:
        parts = [twin.fractions(r, 1000, dtype) for r in range(world_size)]
        runs = {"all_reduce": [], "tree_reduce": []}
        for _ in range(2):
            for name, args in (("all_reduce", ()), ("tree_reduce", (1,))):
                x = parts[rank].clone()
                getattr(ours, name)(x, *args)
                runs[name].append(x)
        for name, (x, again) in runs.items():
            check.same(again, x, name, "a second time")
            if name == "all_reduce" or rank == 1:
                check.near(x, parts, name, dtype)
        check.same_on_all(runs["all_reduce"][0], "all_reduce", dtype)
        check.same(runs["all_reduce"][0], twin.total(parts), "in the order of ranks")


@on_ranks(2, 3)
def test_parts_of_different_sizes(check):
    rank, world_size = dist.get_rank(), dist.get_world_size()
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


@on_ranks(3)
def test_more_than_any_socket_holds_and_in_place(check):
    rank = dist.get_rank()
    whole = torch.zeros(3, 1_000_000)
    whole[rank] = rank + 0.5  # the part is where it belongs
    ours.all_gather(list(whole), whole[rank])
    check.same(whole.amin(1), torch.tensor([0.5, 1.5, 2.5]), "all_gather")
    check.same(whole.amax(1), torch.tensor([0.5, 1.5, 2.5]), "all_gather")


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


# Sub-groups


def everything(module, group, ranks, root):
    """Call all of `module`'s collectives in `group`, rooted at `root`; what this rank then has."""
    rank, many = dist.get_rank(), len(ranks)
    x = [part(rank, (4,), torch.int64, salt) for salt in range(7)]
    lists = [[torch.zeros_like(x[0]) for _ in ranks] for _ in range(3)]
    module.broadcast(x[0], root, group)
    module.all_reduce(x[1], group=group)
    module.reduce(x[2], root, dist.ReduceOp.MAX, group)
    module.all_gather(lists[0], x[3], group)
    module.gather(x[4], lists[1] if rank == root else None, root, group)
    module.scatter(x[5], [x[4] + r for r in range(many)] if rank == root else None, root, group)
    module.reduce_scatter(x[6], [x[3] * (r + 1) for r in range(many)], group=group)
    module.all_to_all(lists[2], [x[3] + r for r in range(many)], group)
    module.barrier(group)
    if rank != root:
        x[2].zero_()  # torch leaves other things in it than we do
    return [*x, *lists]


@on_ranks(4)
def test_groups(check):
    rank = dist.get_rank()
    for ranks in ([0, 2], [3, 1], [1, 2, 3], [2]):
        group = dist.new_group(ranks)
        if rank not in ranks:
            for name in (*NAMES, *TREES):
                x = torch.zeros(4)
                arguments = {
                    "barrier": (),
                    "all_gather": ([x], x),
                    "reduce_scatter": (x, [x]),
                    "all_to_all": ([x], [x]),
                    "all_reduce": (x,),
                    "gather": (x, None, ranks[0]),
                    "scatter": (x, None, ranks[0]),
                }.get(name, (x, ranks[0]))
                says = (f"rank {rank} called ", "with a group that it isn't in")
                check.refused(getattr(ours, name), *arguments, group=group, says=says)
            continue
        for root in ranks:
            theirs = everything(dist, group, ranks, root)
            check.same(everything(ours, group, ranks, root), theirs, ranks, "rooted at", root)
            x = part(rank, (4,))
            ours.tree_broadcast(x, root, group)
            check.same(x, part(root, (4,)), "tree_broadcast", ranks, root)
            x = part(rank, (4,))
            ours.tree_reduce(x, root, dist.ReduceOp.MAX, group)
            most = combined([part(r, (4,)) for r in ranks], "MAX")
            check.same(x, most if rank == root else part(rank, (4,)), "tree_reduce", ranks, root)
        outside = min({0, 1, 2, 3} - set(ranks))
        for name in ("broadcast", "tree_broadcast", "reduce", "tree_reduce"):
            check.refused(getattr(ours, name), torch.zeros(4), outside, group=group, says="not")


@on_ranks(2)
def test_lists_of_another_length_are_refused(check):
    x, rank = torch.zeros(3), dist.get_rank()
    for wrong in ([x], [x, x, x]):
        check.refused(ours.all_gather, wrong, x, says="")
        check.refused(ours.reduce_scatter, x, wrong, says="")
        check.refused(ours.all_to_all, wrong, [x, x], says="")
        check.refused(ours.all_to_all, [x, x], wrong, says="")
        check.refused(ours.gather, x, wrong, rank, says="")
        check.refused(ours.scatter, x, wrong, rank, says="")


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


@pytest.mark.parametrize("world_size", [3, 4])
def test_nobody_leaves_a_barrier_before_all_have_come(world_size):
    for times in zip(*launch(cross_the_barrier, world_size=world_size), strict=True):
        assert max(came for came, _ in times) <= min(went for _, went in times)


# What stands in the file


@pytest.mark.parametrize("name", NAMES)
def test_signature_is_torchs(name):
    """Less what goes on in the background, and what counts ranks in the group."""
    left_out = {"async_op", "device_ids", "timeout", "group_src", "group_dst"}
    theirs = [p for p in inspect.signature(getattr(dist, name)).parameters if p not in left_out]
    assert list(inspect.signature(getattr(ours, name)).parameters) == theirs


def test_trees_are_called_like_their_linear_forms():
    assert inspect.signature(ours.tree_broadcast) == inspect.signature(ours.broadcast)
    assert inspect.signature(ours.tree_reduce) == inspect.signature(ours.reduce)


def test_only_point_to_point():
    """Of torch.distributed, only messages between two ranks, and questions that send nothing."""
    used = set()
    for node in ast.walk(ast.parse(inspect.getsource(ours))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            used |= {node.attr} if node.value.id == "dist" else set()
    messages = {"send", "recv", "isend", "irecv", "P2POp", "batch_isend_irecv"}
    assert used - messages == {"get_rank", "get_process_group_ranks", "group"}
