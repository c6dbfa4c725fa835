"""Checked buffers: nothing right is refused or changed, and the checksum sees every byte."""

import pytest
import torch
import torch.distributed as dist
from on_ranks import into_torchs_own_world
from pytorch_cases import CALLS, reduce_scatter_single, results
from torch.nn.parallel import DistributedDataParallel

from ddpkit import RankError, launch
from ddpkit.runtime.buffers import CheckedWork, checksum


def differing(folder) -> list[str]:
    on_wire = results(CALLS)
    into_torchs_own_world(folder)
    plain = results(CALLS)
    return [name for name in CALLS if on_wire[name] != plain[name]]


def test_every_call_is_bit_identical_to_plain_gloo(tmp_path):
    run = launch(differing, tmp_path, world_size=3, check_buffers=True)
    assert list(run) == [[]] * 3


def test_right_waits_in_all_ways_are_right():
    def right():
        rank, found = dist.get_rank(), []
        x = torch.full((4,), float(rank))
        dist.all_reduce(x, async_op=True).get_future().wait()
        found.append(x.tolist())
        handle = dist.all_reduce(x, async_op=True)
        while not handle.is_completed():
            pass
        found.append(x.tolist())
        x.zero_()  # after it is over, also if somebody waits again
        handle.wait()
        found.append(x.tolist())
        assert isinstance(handle, CheckedWork)
        parts = torch.arange(4.0)
        handle = reduce_scatter_single(parts[2 * rank : 2 * rank + 2], parts, async_op=True)
        handle.wait()  # into its own input
        found.append(parts[2 * rank : 2 * rank + 2].tolist())
        return found

    expected = [[1.0] * 4, [2.0] * 4, [0.0] * 4]
    (one, other) = launch(right, world_size=2, check_buffers=True)
    assert one == [*expected, [0.0, 2.0]]
    assert other == [*expected, [4.0, 6.0]]


def test_torchs_own_training_is_the_same():
    def train():
        torch.manual_seed(0)
        net = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(9, 9) for _ in "abc"]))
        for _ in range(3):
            net(torch.randn(2, 9) + dist.get_rank()).sum().backward()
        return [p.grad for p in net.parameters()]

    plain, checked = (launch(train, world_size=2, check_buffers=on)[0] for on in (False, True))
    assert all(map(torch.equal, plain, checked))


def test_without_the_option_nothing_is_said_and_no_handle_is_another():
    def changes():
        x = torch.zeros(4)
        handle = dist.all_reduce(x, async_op=True)
        x.zero_()
        handle.wait()
        return type(handle).__name__

    assert launch(changes, world_size=2)[0] == "WireWork"


def test_the_future_of_a_changed_tensor_fails():
    def changes():
        x, rank = torch.zeros(4), dist.get_rank()
        if rank == 1:  # comes when rank 0 has written: the call can't be complete before
            dist.recv(torch.zeros(1), 0)
        future = dist.all_reduce(x, async_op=True).get_future()
        if rank == 0:
            x[3] = 1.0
            dist.send(torch.zeros(1), 1)
        future.wait()

    with pytest.raises(RankError, match="rank 0 changed what it sends before it was sent"):
        launch(changes, world_size=2, check_buffers=True)


@pytest.mark.parametrize(
    "tensor",
    [
        *(torch.zeros(5, dtype=dtype) for dtype in (torch.bfloat16, torch.bool, torch.complex64)),
        torch.zeros(4, 3).T,
        torch.zeros(()),
        torch.zeros(6)[::2],
    ],
    ids=["bfloat16", "bool", "complex", "transposed", "scalar", "strided"],
)
def test_a_checksum_sees_the_last_number(tensor):
    before = checksum([torch.ones(2), tensor])
    tensor[(-1,) * tensor.dim()] = 1
    assert checksum([torch.ones(2), tensor]) != before
    assert checksum([]) == checksum([torch.zeros(0)])
