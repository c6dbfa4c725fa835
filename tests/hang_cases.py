"""Scripts that hang or disagree, for `test_explain`: what PyTorch's analyser must say of each.

The traps of the launcher that end so, and mutants of right programs. A case is a function, its
number of ranks, and the verdict: ("missing", who didn't come), or how calls differ and which ranks
made another: ("type", "size" or "dtype", {1}).
"""

import torch
import torch.distributed as dist

CASES = {}
NOT_ON_NCCL = {
    "tags_differ",  # it takes messages in their order, whatever their tags
    "both_send",  # it raises an error when it connects
}
UNSEEN = {}  # by the format of the dumps, which tells neither roots nor operations


def case(kind, *ranks, world_size=3, cases=CASES):
    def add(function):
        cases[function.__name__] = function, world_size, (kind, set(ranks))
        return function

    return add


def me():
    return dist.get_rank()


def x(numel=4, dtype=torch.float32):
    return torch.ones(numel, dtype=dtype)


def several(numel=4):
    return [x(numel) for _ in range(dist.get_world_size())]


# The launcher's traps 16 to 18


@case("size", 2)
def another_shape():
    dist.all_reduce(x(4 + (me() == 2)))


@case("missing", 1)
def skips():
    dist.barrier()
    if me() != 1:
        dist.all_reduce(x())


@case("missing", 1, 2)
def only_rank_0():
    if me() == 0:
        dist.barrier()


@case("type", 0)
def broadcast_against_all_reduce():
    dist.broadcast(x(), 0) if me() == 0 else dist.all_reduce(x())


@case("missing", 0, 1, world_size=2)
def groups_in_opposite_order():
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    for group in groups if me() == 0 else groups[::-1]:
        dist.all_reduce(x(), group=group)


@case("missing", 0, 1, world_size=2)
def both_send():
    dist.send(x(100_000), 1 - me())
    dist.recv(x(100_000), 1 - me())


@case("missing", 0, 1, 2)
def a_circle_of_receives():
    dist.recv(x(), (me() + 1) % 3)


@case("missing", 0)
def a_loop_without_end():
    while me() == 0:
        pass
    dist.barrier()


# Mutants


@case("missing", 2)
def a_loop_ends_early():
    for _ in range(3 - (me() == 2)):
        dist.all_reduce(x())


@case("missing", 1)
def after_more_calls_than_the_board_remembers():
    for _ in range(300 - (me() == 1)):
        dist.all_reduce(x())


@case("missing", 2)
def skips_a_reduce():
    if me() != 2:
        dist.reduce(x(100_000), 0)


@case("missing", 1)
def skips_a_gather():
    if me() != 1:
        dist.gather(x(), several() if me() == 0 else None)


@case("missing", 0)
def the_root_skips_a_broadcast():
    if me() != 0:
        dist.broadcast(x(), 0)


@case("missing", 0)
def the_root_skips_a_scatter():
    if me() != 0:
        dist.scatter(x())


@case("missing", 0)
def skips_an_all_to_all():
    if me() != 0:
        dist.all_to_all_single(x(3), x(3))


@case("missing", 2)
def skips_in_a_group():
    group = dist.new_group([0, 2])
    if me() == 0:
        dist.all_reduce(x(), group=group)


@case("missing", 0, 2)
def calls_the_world_for_a_group():
    group = dist.new_group([0, 2])
    dist.all_reduce(x(), group=None if me() == 1 else group)


@case("size", 2)
def another_shape_in_a_group():
    group = dist.new_group([0, 2])
    if me() != 1:
        dist.all_reduce(x(4 + me()), group=group)


@case("size", 1)
def another_shape_of_a_broadcast():
    dist.broadcast(x(4 + (me() == 1)), 0)


@case("size", 1)
def another_shape_of_a_reduce_scatter():
    dist.reduce_scatter(x(4 + (me() == 1)), several(4 + (me() == 1)))


@case("dtype", 2)
def another_dtype():
    dist.all_reduce(x(dtype=torch.float64 if me() == 2 else torch.float32))


@case("type", 1)
def all_gather_against_all_reduce():
    dist.all_gather(several(), x()) if me() == 1 else dist.all_reduce(x())


@case("type", 2)
def reduce_scatter_against_all_reduce():
    dist.reduce_scatter(x(), several()) if me() == 2 else dist.all_reduce(x())


@case("type", 0)
def only_rank_0_validates():
    if me() == 0:
        dist.all_reduce(x())
    dist.barrier()


@case("type", 1)
def two_calls_in_another_order():
    calls = [lambda: dist.all_reduce(x()), dist.barrier]
    for call in calls[::-1] if me() == 1 else calls:
        call()


@case("missing", 1, world_size=2)
def nobody_sends():
    if me() == 0:
        dist.recv(x(), 1)


@case("missing", 0, world_size=2)
def one_send_too_few():
    for _ in range(1 + me()):
        dist.recv(x(), 0) if me() else dist.send(x(), 1)


@case("size", 1, world_size=2)
def another_length_of_a_message():
    dist.recv(x(7), 0) if me() else dist.send(x(8), 1)


@case("missing", 0, 1, world_size=2)
def tags_differ():
    dist.recv(x(), 0, tag=4) if me() else dist.send(x(100_000), 1, tag=3)


@case("missing", 2)
def a_pipeline_with_a_stage_that_stops():
    for _ in range(3 - (me() == 2)):
        if me() > 0:
            dist.recv(x(10_000_000), me() - 1)
        if me() < 2:
            dist.send(x(10_000_000), me() + 1)  # more than the buffers hold


# What the dumps can't tell


@case("root", 1, cases=UNSEEN)
def another_root():
    dist.broadcast(x(), me() == 1)


@case("operation", 1, cases=UNSEEN)
def another_operation():
    dist.all_reduce(x(), [dist.ReduceOp.SUM, dist.ReduceOp.MAX][me() == 1])
