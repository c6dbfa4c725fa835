"""Reports of code that isn't ours, as scripts under torchrun and under `launch`: the same words."""

import textwrap
import time

import pytest
import torch
import torch.distributed as dist
from outside import cell
from test_debug import debug

from ddpkit import LaunchError, launch
from ddpkit.runtime.errors import BLACK, RED, shown

BEGIN = """\
rank, world_size = dist.get_rank(), dist.get_world_size()
x = torch.full((4,), float(rank))
dist.barrier()
"""
# Both ways give the same report, and a start under torchrun takes most of the time.
WAYS = pytest.mark.parametrize("way", [pytest.param("torchrun", marks=pytest.mark.wide), "launch"])


def told(way, folder, text, world_size=2, **options) -> str:
    """The report of a script that must fail, its white space as single blanks."""
    text = textwrap.dedent(text)
    if way == "torchrun":
        keys = [f"--{name.replace('_', '-')}" for name in options]
        return debug(folder, text, *keys, per_machine=world_size, world_size=world_size)[1]
    names = {"__name__": "__main__", "torch": torch, "dist": dist, "time": time}
    script = cell(f"def script():\n{textwrap.indent(BEGIN + text, '    ')}", names)["script"]
    with pytest.raises(LaunchError) as caught:
        launch(script, world_size=world_size, timeout=60, **options)
    return " ".join(str(caught.value).split())


@WAYS
@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
@pytest.mark.parametrize(
    "call",
    [
        "dist.reduce_scatter_tensor(x[:2].clone(), x)",
        "dist.all_gather_into_tensor(torch.ones(8), x)",
    ],
)
def test_a_call_that_torch_calls_deprecated_has_the_line_of_the_script(way, call, tmp_path):
    report = told(way, tmp_path, f"if rank == 0:\n    {call}")
    assert report.startswith("deadlock: rank 0 waits in ")
    assert f": {call} " in report
    assert "typing_extensions" not in report


GRID = """\
tensor = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
data = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
for step in range(3):
    for layer in range(2 + rank // 2):
        dist.all_reduce(x, group=tensor)
    if rank != 3 or step < 2:
        dist.all_reduce(torch.ones(100), group=data)
"""
PIPELINE = """\
for micro_batch in range(3):
    if rank > 0 and (rank < 2 or micro_batch < 2):
        dist.recv(torch.ones(100_000), rank - 1)
    if rank < 2:
        dist.send(torch.ones(100_000), rank + 1)
dist.barrier()
"""
SKIPPED = "Is it under an `if`, or did one loop end early?"
GUILTY = {
    "a group's call is left out, at the end": (
        *(4, GRID),
        "deadlock: rank 1 waits in all_reduce for rank 3, which has returned.",
        "Their calls in group [1, 3] (≠: here they differ):",
        "3 ≠ all_reduce(100 float32, sum) - Other calls, the last two of each: rank 0:",
        "Every rank of the group must make the call.",
        SKIPPED,
    ),
    "a group's call is left out, and more come": (
        *(4, f"{GRID}    dist.barrier()\n"),
        "deadlock: each waits for another: rank 1 for rank 3 in all_reduce, rank 3 for rank 1 in b",
        "Their calls in group [1, 3] (≠: here they differ):",
        "3 ≠ all_reduce(100 float32, sum) - Other calls",
        "Rank 3 seems to have skipped the all_reduce that it made before (",
        SKIPPED,
    ),
    "a message is left out, and more come": (
        *(3, PIPELINE),
        "deadlock: each waits for another: rank 1 for rank 2 in send, rank 2 for rank 1 in barr",
        "Their messages from rank 1 to rank 2 (≠: here they differ):",
        "3 ≠ send(100000 float32, dst=2) - Other calls",
        "Rank 2 seems to have skipped the recv that it made before (",
        f"{SKIPPED} Every send needs a recv on the other rank, and every recv a send. Count them "
        "on both sides.",
    ),
}


@WAYS
@pytest.mark.parametrize("case", GUILTY)
def test_only_the_guilty_call_is_marked_and_its_groups_calls_stand_beside_it(way, case, tmp_path):
    world_size, text, headline, table, row, by_whom, advice = GUILTY[case]
    report = told(way, tmp_path, text, world_size)
    assert report.startswith(headline)
    assert table in report
    assert row in report
    assert report.count("≠") == 2
    assert by_whom in report
    assert report.endswith(advice)


BYSTANDER = """\
if rank < 2:
    dist.send(torch.ones(100_000), 1 - rank)
    dist.recv(torch.ones(100_000), 1 - rank)
dist.barrier()
"""


@WAYS
def test_who_only_waits_for_the_circle_changes_nothing_of_the_advice(way, tmp_path):
    report = told(way, tmp_path, BYSTANDER, 3)
    said = (
        "deadlock: each waits for another: rank 0 for rank 1 in send, rank 1 for rank 0 in send. "
    )
    assert report.startswith(said)
    assert "rank 2: waiting for ranks 0 and 1 in barrier()" in report
    assert "≠" not in report
    assert report.endswith(
        "Let one side receive first, or start both with isend and irecv and wait afterwards."
    )


SIZES = {
    "another line": (
        "if rank:\n    dist.all_reduce(x)\ndist.all_reduce(x[:3])",
        "These look like two",
    ),
    "far apart": (
        "for n in (64, 8)[rank:]:\n    dist.all_reduce(torch.ones(n))",
        "These look like two",
    ),
    "a last batch": (
        "dist.all_reduce(x[rank:])",
        "Every rank must bring the same number of elements.",
    ),
}


@WAYS
@pytest.mark.parametrize("case", SIZES)
def test_a_skipped_call_is_no_batch_that_shrank(way, case, tmp_path):
    text, advice = SIZES[case]
    report = told(way, tmp_path, text)
    assert report.startswith("mismatch: rank 0 called all_reduce(")
    assert advice in report


CHANGED = {
    "isend": "handle = dist.isend(x, 1) if rank == 0 else dist.irecv(x, 0)",
    "all_reduce": "handle = dist.all_reduce(x, async_op=True)",
    "broadcast": "handle = dist.broadcast(x, 0, async_op=True)",
    "all_gather": "handle = dist.all_gather([x.clone(), x.clone()], x, async_op=True)",
}


@WAYS
@pytest.mark.parametrize("op", CHANGED)
def test_a_rank_that_changes_what_it_sends_is_named(way, op, tmp_path):
    text = f"{CHANGED[op]}\nif rank == 0:\n    x[2] = 7.0\nhandle.wait()"
    report = told(way, tmp_path, text, check_buffers=True)
    said = f"rank 0 raised ValueError: rank 0 changed what it sends before it was sent ({op}, "
    assert report.startswith(said)
    assert f": {CHANGED[op]}): call wait() on the handle first" in report


def test_the_row_that_differs_is_red_in_jupyter():
    table = "Their calls (≠: here they differ):\ncall  rank 0  rank 1\n1 ≠   a()     b()"
    lines = shown(f"mismatch: …\n\n{table}\n\nWhat to do.")
    assert [line for line in lines if RED in line] == [f"{RED}1 ≠   a()     b(){BLACK}"]
