"""ddpkit.collectives, on every rank, against two oracles: torch.distributed in the same run, and one process alone.

What runs on the ranks returns what it found wrong, as a list of sentences; the tests assert that there are none.
"""

import ast
import functools
import inspect
import math
import operator
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from ddpkit import collectives as ours
from ddpkit import launch

WORLD_SIZES = [1, 2, 3, 4]
INTEGERS = [torch.uint8, torch.int8, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
GLOO_HAS = [torch.bool, *INTEGERS, *FLOATS, torch.complex64]
WE_HAVE = [*GLOO_HAS, torch.int16, torch.complex128]
EVERY_DTYPE = [(dtype, (3, 4)) for dtype in WE_HAVE]
EVERY_SHAPE = [(torch.float32, shape) for shape in [(), (0,), (7,)]]
OPS = {
    "SUM": operator.add,
    "AVG": operator.add,
    "PRODUCT": operator.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": operator.and_,
    "BOR": operator.or_,
    "BXOR": operator.xor,
}


def data(rank, shape=(7,), dtype=torch.float32, salt=0):
    """What `rank` brings: every rank can make it, so every rank can be the one-process twin. Begins with 10**rank."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    if dtype in (torch.bool, *INTEGERS, torch.int16):
        values = torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=generator)
        if values.numel() and dtype in (torch.int32, torch.int64):
            values.view(-1)[0] = 10**rank
    else:
        values = torch.randn(shape, generator=generator, dtype=dtype if dtype.is_complex else torch.float64)
        if values.numel():
            values.view(-1)[0] = 10**rank
    return values.to(dtype)


def twin(parts, op):
    """The parts combined in the order of ranks by one process."""
    total = functools.reduce(OPS[op], parts)
    return total / len(parts) if op == "AVG" else total


def allowed(op, dtype):
    if op in ("SUM", "AVG"):
        return op == "SUM" or dtype.is_floating_point or dtype.is_complex
    return not dtype.is_complex and (not op.startswith("B") or not dtype.is_floating_point)


def transposed(tensor):
    """The same values with gaps between them."""
    wide = torch.zeros(*tensor.shape, 2, dtype=tensor.dtype)
    wide[..., 0] = tensor
    return wide[..., 0]


def rank_and_world():
    return dist.get_rank(), dist.get_world_size()


class Complaints(list):
    """Sentences about what is not as it should be."""

    def same(self, got, expected, *what):
        """The same bits. A torch bool that holds 3, as Gloo's sums do, is simply true."""
        if isinstance(expected, list):
            for number, (one, other) in enumerate(zip(got, expected, strict=True)):
                self.same(one, other, *what, f"[{number}]")
            return
        if expected.dtype == torch.bool:
            got, expected = got.contiguous().view(torch.uint8) != 0, expected.contiguous().view(torch.uint8) != 0
        alike = got.dtype == expected.dtype and got.shape == expected.shape and torch.equal(got, expected)
        if not alike:
            self.append(f"rank {dist.get_rank()}: {' '.join(map(str, what))}: got {got}, expected {expected}")

    def near(self, got, expected, parts, op, *what):
        """Equal, or, for sums and products of fractions, as near as two orders of the same operations must be.

        Each of the W-1 operations (AVG: W) rounds by at most eps/2 of its result or of the smallest normal number, in
        either order, and no result is larger than the sum (the product) of absolute values.
        """
        if op not in ("SUM", "AVG", "PRODUCT") or not (got.is_floating_point() or got.is_complex()):
            self.same(got, expected, *what)
            return
        bound = functools.reduce(OPS[op], [part.to(torch.complex128).abs() for part in parts])
        kind = torch.finfo(got.dtype)
        tolerance = len(parts) * kind.eps * (bound + kind.tiny)
        distance = (got.to(torch.complex128) - expected.to(torch.complex128)).abs()
        alike = got.shape == expected.shape and got.dtype == expected.dtype
        if not alike or not ((distance <= tolerance) | (got == expected)).all():
            self.append(f"rank {dist.get_rank()}: {' '.join(map(str, what))}: got {got}, not near {expected}")

    def refused(self, function, *args, says=(), **kwargs):
        """A ValueError that says all of `says`."""
        try:
            function(*args, **kwargs)
        except ValueError as error:
            missing = [word for word in (f"rank {dist.get_rank()} called", "expected", *says) if word not in str(error)]
            if missing:
                self.append(f"{function.__name__}: {missing} not in {str(error)!r}")
        else:
            self.append(f"{function.__name__}{args} {kwargs} was not refused")


# Values


def check_one_to_all():
    wrong, (rank, world_size) = Complaints(), rank_and_world()
    for src in range(world_size):
        for dtype, shape in (EVERY_DTYPE if src == 0 else []) + EVERY_SHAPE:
            what = src, dtype, shape
            theirs = data(rank, shape, dtype)
            for function in (ours.broadcast, ours.tree_broadcast):
                for gaps in (torch.clone, transposed):
                    x = gaps(data(rank, shape, dtype))
                    function(x, src)
                    wrong.same(x, data(src, shape, dtype), function.__name__, *what, gaps.__name__)
            if dtype in GLOO_HAS:
                dist.broadcast(theirs, src)
                wrong.same(x, theirs, "broadcast and torch's", *what)

            parts = [data(src, shape, dtype, salt=1 + r) for r in range(world_size)]
            for gaps in (torch.clone, transposed):
                out = gaps(data(rank, shape, dtype))
                ours.scatter(out, [gaps(part) for part in parts] if rank == src else None, src)
                wrong.same(out, parts[rank], "scatter", *what, gaps.__name__)
            if dtype in GLOO_HAS:
                dist.scatter(theirs, parts if rank == src else None, src)
                wrong.same(out, theirs, "scatter and torch's", *what)
        uneven = [data(src, (r,), salt=2) for r in range(world_size)]  # rank 0's is empty
        out = torch.zeros(rank)
        ours.scatter(out, uneven if rank == src else [], src)
        wrong.same(out, uneven[rank], "uneven scatter", src)
    return wrong


def check_all_to_one():
    wrong, (rank, world_size) = Complaints(), rank_and_world()
    for dst in range(world_size):
        for dtype, shape in (EVERY_DTYPE if dst == 0 else []) + EVERY_SHAPE:
            parts = [data(r, shape, dtype) for r in range(world_size)]
            for gaps in (torch.clone, transposed):
                got = [gaps(torch.zeros(shape, dtype=dtype)) for _ in parts] if rank == dst else None
                ours.gather(gaps(parts[rank]), got, dst)
                if rank == dst:
                    wrong.same(got, parts, "gather", dst, dtype, shape, gaps.__name__)
            if dtype in GLOO_HAS and not dtype.is_complex:
                theirs = [torch.zeros(shape, dtype=dtype) for _ in parts] if rank == dst else None
                dist.gather(parts[rank], theirs, dst)
                if rank == dst:
                    wrong.same(got, theirs, "gather and torch's", dst, dtype, shape)
        uneven = [data(r, (r,), salt=2) for r in range(world_size)]
        got = [torch.zeros(r) for r in range(world_size)] if rank == dst else []
        ours.gather(uneven[rank], got, dst)
        if rank == dst:
            wrong.same(got, uneven, "uneven gather", dst)
    return wrong


def check_reductions():
    wrong, (rank, world_size) = Complaints(), rank_and_world()
    for name in OPS:
        for dtype, shape in EVERY_DTYPE + EVERY_SHAPE:
            op = getattr(dist.ReduceOp, name)
            if allowed(name, dtype):
                wrong += check_reduction(name, op, dtype, shape, rank, world_size)
                continue
            x = data(rank, shape, dtype)
            says = (name, str(dtype), "SUM")
            wrong.refused(ours.reduce, x, 0, op, says=says)
            wrong.refused(ours.tree_reduce, x, 0, op, says=says)
            wrong.refused(ours.all_reduce, x, op, says=says)
            wrong.refused(ours.reduce_scatter, x, [x] * world_size, op, says=says)
            wrong.same(x, data(rank, shape, dtype), "a refused reduction leaves its tensor", name, dtype)
            try:
                dist.all_reduce(x, op)
                wrong.append(f"torch takes {name} for {dtype}, we don't")
            except (ValueError, RuntimeError):
                pass
    return wrong


def check_reduction(name, op, dtype, shape, rank, world_size):
    wrong, what = Complaints(), (name, dtype, shape)
    parts = [data(r, shape, dtype) for r in range(world_size)]
    expected = twin(parts, name)
    dst = len(name) % world_size  # not the same for every op

    x = transposed(parts[rank])
    ours.all_reduce(x, op)
    wrong.same(x, expected, "all_reduce", *what)
    reduced = transposed(parts[rank])
    ours.reduce(reduced, dst, op)
    wrong.same(reduced, expected if rank == dst else parts[rank], "reduce", *what)
    tree_reduced = transposed(parts[rank])
    ours.tree_reduce(tree_reduced, dst, op)
    if rank == dst:
        wrong.near(tree_reduced, expected, parts, name, "tree_reduce", *what)
    else:
        wrong.same(tree_reduced, parts[rank], "tree_reduce", *what)

    chunks = [[data(r, shape, dtype, salt=1 + chunk) for chunk in range(world_size)] for r in range(world_size)]
    column = [row[rank] for row in chunks]
    mine = [transposed(chunk) for chunk in chunks[rank]]
    scattered = transposed(data(rank, shape, dtype))
    ours.reduce_scatter(scattered, mine, op)
    wrong.same(scattered, twin(column, name), "reduce_scatter", *what)
    wrong.same(mine, chunks[rank], "reduce_scatter's input", *what)

    if dtype in GLOO_HAS:
        theirs = parts[rank].clone()
        dist.all_reduce(theirs, op)
        wrong.near(x, theirs, parts, name, "all_reduce and torch's", *what)
        theirs = parts[rank].clone()
        dist.reduce(theirs, dst, op)
        if rank == dst:
            wrong.near(reduced, theirs, parts, name, "reduce and torch's", *what)
        dist.reduce_scatter(theirs, chunks[rank], op)
        wrong.near(scattered, theirs, column, name, "reduce_scatter and torch's", *what)
    return wrong


def check_every_root_and_order():
    """The bits of a float sum depend on its order: ours is rank 0, 1, 2, ..., whoever collects it, in whatever way."""
    wrong, (rank, world_size) = Complaints(), rank_and_world()
    parts = [data(r, (1000,)) * 10.0**r for r in range(world_size)]
    expected = twin(parts, "SUM")
    for dst in range(world_size):
        for function in (ours.reduce, ours.tree_reduce):
            x = parts[rank].clone()
            function(x, dst)
            if rank != dst:
                wrong.same(x, parts[rank], function.__name__, dst, "elsewhere")
            elif function is ours.reduce:
                wrong.same(x, expected, "reduce", dst)
            else:
                wrong.near(x, expected, parts, "SUM", "tree_reduce", dst)
    out = torch.zeros(1000 // world_size + (rank < 1000 % world_size))
    ours.reduce_scatter(out, list(parts[rank].tensor_split(world_size)))  # 3 ranks: 334, 333, 333
    wrong.same(out, expected.tensor_split(world_size)[rank], "reduce_scatter of uneven chunks, and all_reduce")
    theirs = torch.zeros_like(out)
    dist.reduce_scatter(theirs, list(parts[rank].tensor_split(world_size)))
    wrong.near(out, theirs, [part.tensor_split(world_size)[rank] for part in parts], "SUM", "and torch's")
    return wrong


def check_all_to_all():
    wrong, (rank, world_size) = Complaints(), rank_and_world()
    for dtype, shape in EVERY_DTYPE + EVERY_SHAPE:
        parts = [data(r, shape, dtype) for r in range(world_size)]
        sent = [data(rank, shape, dtype, salt=1 + r) for r in range(world_size)]
        arriving = [data(r, shape, dtype, salt=1 + rank) for r in range(world_size)]
        for gaps in (torch.clone, transposed):
            got = [gaps(torch.zeros(shape, dtype=dtype)) for _ in parts]
            ours.all_gather(got, gaps(parts[rank]))
            wrong.same(got, parts, "all_gather", dtype, shape, gaps.__name__)
            swapped = [gaps(torch.zeros(shape, dtype=dtype)) for _ in parts]
            ours.all_to_all(swapped, [gaps(part) for part in sent])
            wrong.same(swapped, arriving, "all_to_all", dtype, shape, gaps.__name__)
        if dtype in GLOO_HAS:
            theirs = [torch.zeros(shape, dtype=dtype) for _ in parts]
            dist.all_gather(theirs, parts[rank])
            wrong.same(got, theirs, "all_gather and torch's", dtype, shape)
            dist.all_to_all(theirs, sent)
            wrong.same(swapped, theirs, "all_to_all and torch's", dtype, shape)

    uneven = [data(r, (r, 2), salt=2) for r in range(world_size)]
    got = [torch.zeros(r, 2) for r in range(world_size)]
    ours.all_gather(got, uneven[rank])
    wrong.same(got, uneven, "uneven all_gather")
    got = [torch.zeros(2 * r + rank) for r in range(world_size)]
    ours.all_to_all(got, [data(rank, (2 * rank + r,), salt=r) for r in range(world_size)])
    wrong.same(got, [data(r, (2 * r + rank,), salt=rank) for r in range(world_size)], "uneven all_to_all")
    whole = torch.zeros(world_size, 3)  # the part is already where it belongs
    whole[rank] = data(rank, (3,))
    ours.all_gather(list(whole), whole[rank])
    wrong.same(whole, torch.stack([data(r, (3,)) for r in range(world_size)]), "all_gather in place")
    large = [torch.zeros(1_000_000) for _ in range(world_size)]  # more than any socket buffers
    ours.all_gather(large, torch.full((1_000_000,), rank + 0.5))
    wrong.same(torch.stack(large).mean(1), torch.arange(world_size) + 0.5, "a large all_gather")
    return wrong


def check_one_tensor():
    wrong, (rank, world_size) = Complaints(), rank_and_world()
    # Torch 2.13 has new names for these two and warns of the old ones.
    torch_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    torch_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    for dtype in (torch.int64, torch.float32, torch.complex64):
        row, flat, stacked = (2, 3), (2 * world_size, 3), (world_size, 2, 3)
        x = data(rank, row, dtype)
        everyones = torch.stack([data(r, row, dtype) for r in range(world_size)])
        got = torch.zeros(stacked, dtype=dtype)
        ours.all_gather_into_tensor(got, x)
        wrong.same(got, everyones, "all_gather_into_tensor, stacked", dtype)
        got, theirs = torch.zeros(flat, dtype=dtype), torch.zeros(flat, dtype=dtype)
        ours.all_gather_into_tensor(got, x)
        torch_all_gather(theirs, x)
        wrong.same(got, theirs, "all_gather_into_tensor and torch's", dtype)
        wrong.same(got, everyones.view(flat), "all_gather_into_tensor", dtype)

        parts = [data(r, stacked, dtype)[rank] for r in range(world_size)]
        for shape in (flat, stacked):
            got = torch.zeros(row, dtype=dtype)
            ours.reduce_scatter_tensor(got, data(rank, stacked, dtype).view(shape))
            wrong.same(got, twin(parts, "SUM"), "reduce_scatter_tensor", dtype, shape)
        theirs = torch.zeros(row, dtype=dtype)
        torch_reduce_scatter(theirs, data(rank, stacked, dtype).view(flat))
        wrong.near(got, theirs, parts, "SUM", "reduce_scatter_tensor and torch's", dtype)

        got, theirs = torch.zeros(flat, dtype=dtype), torch.zeros(flat, dtype=dtype)
        ours.all_to_all_single(got, data(rank, flat, dtype))
        dist.all_to_all_single(theirs, data(rank, flat, dtype))
        wrong.same(got, theirs, "all_to_all_single", dtype)
        out_sizes, in_sizes = [2 * r + rank for r in range(world_size)], [2 * rank + r for r in range(world_size)]
        x = data(rank, (sum(in_sizes), 2), dtype)
        got, theirs = torch.zeros(sum(out_sizes), 2, dtype=dtype), torch.zeros(sum(out_sizes), 2, dtype=dtype)
        ours.all_to_all_single(got, x, out_sizes, in_sizes)
        dist.all_to_all_single(theirs, x, out_sizes, in_sizes)
        wrong.same(got, theirs, "all_to_all_single with sizes", dtype)
    return wrong


CHECKS = [
    check_one_to_all,
    check_all_to_one,
    check_reductions,
    check_every_root_and_order,
    check_all_to_all,
    check_one_tensor,
]


def all_checks():
    return [complaint for check in CHECKS for complaint in check()]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_equal_to_torch_and_to_one_process(world_size):
    run = launch(all_checks, world_size=world_size)
    assert [wrong[:3] for wrong in run] == [[]] * world_size


# Sub-groups


def every_collective(module, group, roots, in_group):
    """Call everything in `group`, rooted at `roots`: {"src": ...} or {"group_src": ...}. Return what this rank has."""
    rank = dist.get_rank()
    size = 2 if not in_group else dist.get_world_size(group)
    x = [data(rank, (4,), torch.int64, salt) for salt in range(8)]
    lists = [[torch.zeros(4, dtype=torch.int64) for _ in range(size)] for _ in range(3)]
    src = roots
    dst = {name.replace("src", "dst"): root for name, root in roots.items()}
    me_first = in_group and (rank if "src" in roots else dist.get_rank(group)) in roots.values()
    module.broadcast(x[0], group=group, **src)
    module.all_reduce(x[1], group=group)
    module.reduce(x[2], group=group, **dst)
    module.all_gather(lists[0], x[3], group=group)
    module.gather(x[4], lists[1] if me_first else None, group=group, **dst)
    module.scatter(x[5], [x[4] + r for r in range(size)] if me_first else None, group=group, **src)
    module.reduce_scatter(x[6], [x[3] * (r + 1) for r in range(size)], group=group)
    module.all_to_all(lists[2], [x[3] + r for r in range(size)], group=group)
    module.barrier(group)
    if not me_first:
        x[2].zero_()  # reduce leaves other things in it than torch does
    return [*x, *lists[0], *lists[1], *lists[2]]


def check_forms_torch_has_not(group, members, root, rank):
    """The trees, and the one-tensor forms with an op, in a group."""
    wrong, parts = Complaints(), [data(r, (len(members), 3), torch.int64) for r in members]
    if rank not in members:
        return wrong
    place = members.index(rank)
    x = data(rank, (4,))
    ours.tree_broadcast(x, root, group)
    wrong.same(x, data(root, (4,)), "tree_broadcast", members, root)
    x = parts[place].clone()
    ours.tree_reduce(x, root, dist.ReduceOp.MAX, group)
    wrong.same(x, twin(parts, "MAX") if rank == root else parts[place], "tree_reduce", members, root)
    x = torch.zeros(3, dtype=torch.int64)
    ours.reduce_scatter_tensor(x, parts[place], dist.ReduceOp.MIN, group)
    wrong.same(x, twin(parts, "MIN")[place], "reduce_scatter_tensor", members)
    whole = torch.zeros(len(members), 3, dtype=torch.int64)
    ours.all_gather_into_tensor(whole, parts[place][0], group)
    wrong.same(whole, torch.stack([part[0] for part in parts]), "all_gather_into_tensor", members)
    ours.all_to_all_single(whole, parts[place], group=group)
    wrong.same(whole, torch.stack([part[place] for part in parts]), "all_to_all_single", members)
    return wrong


def check_groups():
    wrong, (rank, world_size) = Complaints(), rank_and_world()
    for members in ([0, 2], [3, 1], [1, 2, 3], [2], [0, 1, 2, 3]):
        group = dist.new_group(members)
        in_group = rank in members
        for root in members:
            for roots in ({"src": root}, {"group_src": sorted(members).index(root)}):
                with warnings.catch_warnings(record=True) as heard:
                    warnings.simplefilter("always")
                    got = every_collective(ours, group, roots, in_group)
                    ours_said = [str(warning.message) for warning in heard if "group" in str(warning.message)]
                    expected = every_collective(dist, group, roots, in_group) if in_group or "src" in roots else got
                wrong.same(got, expected, members, roots)
                if len(ours_said) != (0 if in_group else 9):
                    wrong.append(f"rank {rank} outside {members} heard {ours_said}")
                if heard and any(f"rank {rank} called" not in said for said in ours_said):
                    wrong.append(f"{ours_said}")
        for root in members:
            wrong += check_forms_torch_has_not(group, sorted(members), root, rank)
        if in_group:
            outside = [r for r in range(world_size) if r not in members]
            x = data(rank)
            for root in [*outside, 7, -1]:
                wrong.refused(ours.broadcast, x, root, group, says=(f"src={root}", str(sorted(members))))
                wrong.refused(ours.tree_broadcast, x, root, group, says=(f"src={root}",))
                wrong.refused(ours.scatter, x, None, root, group, says=(f"src={root}",))
                wrong.refused(ours.reduce, x, root, group=group, says=(f"dst={root}",))
                wrong.refused(ours.tree_reduce, x, root, group=group, says=(f"dst={root}",))
                wrong.refused(ours.gather, x, None, root, group, says=(f"dst={root}",))
            wrong.refused(ours.broadcast, x, group=group, group_src=len(members), says=(f"group_src={len(members)}",))
            wrong.refused(ours.reduce, x, group=group, group_dst=-1, says=("group_dst=-1",))
            wrong.same(x, data(rank), "untouched")
    return wrong


def test_groups():
    run = launch(check_groups, world_size=4)
    assert [wrong[:3] for wrong in run] == [[]] * 4


# Mistakes


def check_mistakes():
    wrong, (rank, world_size) = Complaints(), rank_and_world()
    x, one_less = torch.zeros(3), [torch.zeros(3)] * (world_size - 1)
    full = [torch.zeros(3)] * world_size
    root, leaf = rank, (rank + 1) % world_size
    count = (f"{world_size - 1} tensors", f"a list of {world_size}", "One for each rank")

    wrong.refused(ours.all_gather, one_less, x, says=("tensor_list", *count))
    wrong.refused(ours.reduce_scatter, x, one_less, says=("input_list", *count))
    wrong.refused(ours.all_to_all, full, one_less, says=("input_tensor_list", *count))
    wrong.refused(ours.all_to_all, one_less, full, says=("output_tensor_list", *count))
    wrong.refused(ours.scatter, x, one_less, root, says=("scatter_list", *count))
    wrong.refused(ours.gather, x, one_less, root, says=("gather_list", *count))
    wrong.refused(ours.scatter, x, None, root, says=("NoneType as scatter_list",))
    wrong.refused(ours.gather, x, None, root, says=("NoneType as gather_list",))
    wrong.refused(ours.all_gather, torch.zeros(world_size, 3), x, says=("Tensor as tensor_list",))
    wrong.refused(ours.scatter, x, full, leaf, says=("scatter_list", "None", "source"))
    wrong.refused(ours.gather, x, full, leaf, says=("gather_list", "None", "destination"))

    whole_numbers = torch.zeros(3, dtype=torch.int64)
    for function in (ours.all_gather, lambda many, one: ours.reduce_scatter(one, many)):
        wrong.refused(function, full, whole_numbers, says=("torch.float32 and torch.int64", ".to("))
        wrong.refused(function, full, torch.zeros(4), says=(f"[{rank}] of shape (3,)", "(4,)"))
        wrong.refused(function, full, torch.zeros(1), says=(f"[{rank}] of shape (3,)", "(1,)"))
    wrong.refused(ours.all_to_all, full, [whole_numbers] * world_size, says=("one dtype",))
    wrong.refused(ours.all_to_all, full, [torch.zeros(1)] * world_size, says=("output_tensor_list", "(1,)"))

    wrong.refused(ours.broadcast, x, says=("src=None and group_src=None", "one of the two"))
    wrong.refused(ours.broadcast, x, 0, group_src=0, says=("src=0 and group_src=0",))
    wrong.refused(ours.reduce, x, says=("dst=None and group_dst=None",))
    wrong.refused(ours.gather, x, full, 0, group_dst=0, says=("dst=0 and group_dst=0",))
    wrong.refused(ours.broadcast, x, world_size, says=(f"src={world_size}", str(list(range(world_size)))))

    wrong.refused(ours.all_gather_into_tensor, torch.zeros(5), x, says=("5 elements", f"{world_size} × 3"))
    wrong.refused(ours.reduce_scatter_tensor, x, torch.zeros(5), says=("5 elements", "Pad it"))
    gaps = torch.zeros(3, world_size).T
    wrong.refused(ours.reduce_scatter_tensor, x, gaps, says=("non-contiguous input", ".contiguous()"))
    wrong.refused(
        ours.all_to_all_single, torch.zeros(5), torch.zeros(5), says=("[2, 2]", "sum 5", "output_split_sizes")
    )
    wrong.refused(ours.all_to_all_single, x, x, [1, 2], [1, 1], says=("[1, 1]", "sum 3", "input_split_sizes"))
    wrong.refused(ours.all_to_all_single, x, x, [3], [1, 2], says=("[3]", "2 sizes"))
    return wrong


def test_mistakes_are_named():
    run = launch(check_mistakes, world_size=2)
    assert list(run) == [[], []]


# Bytes and messages: every phase ends with torch's own barrier, which marks its end in the records.

ELEMENTS = 12  # float32, divides by 1, 2, 3, 4
WHOLE = 4 * ELEMENTS


def every_phase():
    rank, world_size = rank_and_world()
    whole = torch.ones(ELEMENTS)
    part = torch.ones(ELEMENTS // world_size)
    parts = list(torch.ones(ELEMENTS).chunk(world_size))
    root = world_size - 1
    at_root = parts if rank == root else None
    phases = {
        "broadcast": lambda: ours.broadcast(whole, root),
        "tree_broadcast": lambda: ours.tree_broadcast(whole, root),
        "scatter": lambda: ours.scatter(part, at_root, root),
        "reduce": lambda: ours.reduce(whole, root),
        "tree_reduce": lambda: ours.tree_reduce(whole, root),
        "gather": lambda: ours.gather(part, at_root, root),
        "all_reduce": lambda: ours.all_reduce(whole),
        "all_gather": lambda: ours.all_gather(parts, part),
        "reduce_scatter": lambda: ours.reduce_scatter(part, parts),
        "all_to_all": lambda: ours.all_to_all(parts, list(torch.ones(ELEMENTS).chunk(world_size))),
        "barrier": lambda: ours.barrier(),
        "all_gather_into_tensor": lambda: ours.all_gather_into_tensor(whole, part),
        "reduce_scatter_tensor": lambda: ours.reduce_scatter_tensor(part, whole),
        "all_to_all_single": lambda: ours.all_to_all_single(torch.ones(ELEMENTS), whole),
    }
    for phase in phases.values():
        phase()
        dist.barrier()
    return list(phases)


def records_by_phase(run):
    """{phase: [the records of rank 0, of rank 1, ...]}."""
    names, found = run[0], {name: [] for name in run[0]}
    for rank in range(len(run)):
        done, current = [], []
        for record in run.wire[rank]:
            if record.op == "barrier":
                done.append(current)
                current = []
            else:
                current.append(record)
        for name, records in zip(names, done, strict=True):
            found[name].append(records)
    return found


def nbytes(records, *ops):
    return sum(record.bytes for record in records if record.op in ops)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_bytes_on_the_wire(world_size):
    phases = records_by_phase(launch(every_phase, world_size=world_size))
    others, hops, root = world_size - 1, math.ceil(math.log2(world_size)), world_size - 1
    part = WHOLE // world_size
    total = {
        "broadcast": others * WHOLE,
        "tree_broadcast": others * WHOLE,
        "reduce": others * WHOLE,
        "tree_reduce": others * WHOLE,
        "scatter": others * part,
        "gather": others * part,
        "all_gather": others * WHOLE,
        "reduce_scatter": others * WHOLE,
        "all_to_all": others * WHOLE,
        "all_gather_into_tensor": others * WHOLE,
        "reduce_scatter_tensor": others * WHOLE,
        "all_to_all_single": others * WHOLE,
        "all_reduce": 2 * others * WHOLE,
        "barrier": world_size * hops,
    }
    busiest = {
        "broadcast": others * WHOLE,
        "tree_broadcast": hops * WHOLE,
        "reduce": others * WHOLE,
        "tree_reduce": hops * WHOLE,
        "scatter": others * part,
        "gather": others * part,
        "all_gather": 2 * others * part,
        "reduce_scatter": 2 * others * part,
        "all_to_all": 2 * others * part,
        "all_gather_into_tensor": 2 * others * part,
        "reduce_scatter_tensor": 2 * others * part,
        "all_to_all_single": 2 * others * part,
        "all_reduce": 2 * others * WHOLE,
        "barrier": 2 * hops,
    }
    assert {name: sum(nbytes(records, "send") for records in ranks) for name, ranks in phases.items()} == total
    assert {name: sum(nbytes(records, "recv") for records in ranks) for name, ranks in phases.items()} == total
    both_ways = {name: [nbytes(records, "send", "recv") for records in ranks] for name, ranks in phases.items()}
    assert {name: max(each) for name, each in both_ways.items()} == busiest
    if world_size > 2:
        assert both_ways["broadcast"] == [WHOLE] * root + [others * WHOLE]
        assert both_ways["all_reduce"] == [2 * others * WHOLE] + [2 * WHOLE] * others
        assert len(set(both_ways["reduce_scatter"])) == len(set(both_ways["all_gather"])) == 1
    used = {record.op for ranks in phases.values() for records in ranks for record in records}
    assert used <= {"send", "recv"}


def both_trees():
    x = torch.tensor([10 ** dist.get_rank()])
    ours.tree_broadcast(x.clone(), 1)
    dist.barrier()
    ours.tree_reduce(x, 1)
    dist.barrier()
    return x.item()


@pytest.mark.parametrize("world_size", [2, 3, 4, 6])
def test_trees_are_flat(world_size):
    """Replay the messages, one per rank at a time, in the order of its records, and count the hops."""
    run = launch(both_trees, world_size=world_size)
    assert run[1] == int("1" * world_size)
    for phase in range(2):
        programs = []
        for rank in range(world_size):
            ops = [(record.op, getattr(record, "peer", None)) for record in run.wire[rank]]
            ends = [number for number, (op, _) in enumerate(ops) if op == "barrier"]
            programs.append(ops[0 : ends[0]] if phase == 0 else ops[ends[0] + 1 : ends[1]])
        hops = 0
        while any(programs):
            next_ones = {rank: program[0] for rank, program in enumerate(programs) if program}
            pairs = [
                (rank, peer)
                for rank, (op, peer) in next_ones.items()
                if op == "send" and next_ones.get(peer) == ("recv", rank)
            ]
            assert pairs, f"nobody can go on: {next_ones}"
            for rank in (rank for pair in pairs for rank in pair):
                programs[rank].pop(0)
            hops += 1
        assert hops == math.ceil(math.log2(world_size))


# Everything else


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
    run = launch(cross_the_barrier, world_size=world_size)
    for times in zip(*run, strict=True):
        assert max(came for came, _ in times) <= min(went for _, went in times)


def reduce_parameters():
    rank, world_size = rank_and_world()
    weight = torch.full((2,), float(rank), requires_grad=True)
    gathered = [torch.zeros(2) for _ in range(world_size)]
    shard = torch.zeros(2)
    ours.all_gather(gathered, weight)
    ours.reduce_scatter(shard, [weight] * world_size)
    ours.broadcast(weight, 1)
    ours.tree_reduce(weight, 0)
    ours.all_reduce(weight)
    tracked = [tensor.requires_grad for tensor in [*gathered, shard]]
    return weight.is_leaf, weight.requires_grad, weight.tolist(), shard.tolist(), tracked, torch.is_grad_enabled()


def test_parameters_are_data_to_a_collective():
    for values in launch(reduce_parameters, world_size=2):
        assert values == (True, True, [3.0, 3.0], [1.0, 1.0], [False] * 3, True)


NAMES = [
    "broadcast",
    "scatter",
    "reduce",
    "gather",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "barrier",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all_single",
]
LEFT_OUT = {"async_op", "device_ids", "timeout"}


@pytest.mark.parametrize("name", NAMES)
def test_signature_is_torchs(name):
    theirs = inspect.signature(getattr(dist, name)).parameters.values()
    mine = inspect.signature(getattr(ours, name)).parameters.values()
    expected = [(p.name, p.default) for p in theirs if p.name not in LEFT_OUT]
    if name == "barrier":
        expected = [("group", None)]  # torch's default, GroupMember.WORLD, is None as well until the world exists
    assert [(p.name, p.default) for p in mine] == expected
    keyword_only = [p.name for p in mine if p.kind is p.KEYWORD_ONLY]
    assert keyword_only == [p.name for p in theirs if p.name.startswith("group_")]


def test_trees_are_called_like_their_linear_forms():
    assert inspect.signature(ours.tree_broadcast) == inspect.signature(ours.broadcast)
    assert inspect.signature(ours.tree_reduce) == inspect.signature(ours.reduce)


def test_only_point_to_point():
    """Of torch.distributed, the module uses messages between two ranks, and questions that send nothing."""
    tree = ast.parse(inspect.getsource(ours))
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "dist"
    }
    messages = {"send", "recv", "isend", "irecv", "P2POp", "batch_isend_irecv"}
    assert used - messages == {"get_rank", "get_world_size", "get_process_group_ranks", "group"}
    imported = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert imported == ["collections.abc", "torch", "torch.distributed"]


def left_out_is_refused():
    said = []
    for more in [{"async_op": True}, {"timeout": None}]:
        try:
            ours.barrier(**more)
        except TypeError as error:
            said.append(str(error))
    try:
        ours.broadcast(torch.zeros(1), 0, None, True)  # torch's async_op, by position
    except TypeError as error:
        said.append(str(error))
    return said


def test_what_is_left_out_is_refused_not_ignored():
    [said] = launch(left_out_is_refused, world_size=1)
    assert [message.split("(")[0] for message in said] == ["barrier", "barrier", "broadcast"]


@pytest.mark.parametrize("name", [*NAMES, "tree_broadcast", "tree_reduce"])
def test_documented(name):
    text = inspect.getdoc(getattr(ours, name))
    assert "Notebook 01." in text
    assert "Cost" in text
