"""`ddpkit.debug`: unmodified scripts under torchrun, with their own init_process_group."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from outside import FREEZE_S

from ddpkit.debug import main

BEGIN = """\
import sys
import time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
x = torch.full((4,), float(rank))
"""
RIGHT = """
dist.all_reduce(x)
time.sleep(1.5 * rank)  # rank 0 is done before the others
print(f"{rank}: {x.tolist()} {dist.get_backend()} {sys.argv[1:]}")
"""
SKIPS = "dist.barrier()\nif rank != 0:\n    dist.all_reduce(x)"
ENDS = "dist.barrier()\nif rank == 1:\n    sys.exit(3)\ntime.sleep(9)"
DIFFERS = "dist.all_reduce(torch.ones(4 + (rank == 3)))"
RAISES = (
    "dist.barrier()\nif rank == 1:\n    raise ValueError('the batch is empty')\ndist.all_reduce(x)"
)


@pytest.fixture
def script(tmp_path):
    def write(text):
        path = tmp_path / "train.py"
        path.write_text(BEGIN + text + "\n")
        return str(path)

    return write


def start(*arguments):
    command = [sys.executable, "-m", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, **pipes)


def debug(*arguments):
    """(exit code, standard output, what ddpkit.debug said); with the errors kept in `debug.err`."""
    process = start("ddpkit.debug", "--world-size", "2", *arguments)
    out, err = process.communicate(timeout=FREEZE_S)
    debug.err = err
    assert not list(Path(tempfile.gettempdir()).glob(f"ddpkit-session-{process.pid}-*"))
    return process.returncode, out, said(err)


def said(err):
    reports = re.findall(r"\nddpkit: (.*?)\n(?:[EW]\d{4} |Traceback|$)", err, re.DOTALL)
    assert len(reports) <= 1, err
    return " ".join(reports[0].split()) if reports else ""


def test_a_right_script_says_what_it_says_without_us_and_is_traced(script, tmp_path):
    trace, dumps = tmp_path / "step.json", tmp_path / "dumps"
    keep = ["--trace", str(trace), "--flight-recorder", str(dumps)]
    code, out, report = debug(*keep, script(RIGHT), "--lr", "1")
    assert (code, report) == (0, "")
    lines = [f"{rank}: [1.0, 1.0, 1.0, 1.0] gloo ['--lr', '1']" for rank in (0, 1)]
    assert sorted(re.findall(r"\d: .*?'1'\]", out)) == lines
    names = [event["name"] for event in json.loads(trace.read_text())["traceEvents"]]
    assert names.count("all_reduce") == 2
    assert {path.name for path in dumps.iterdir()} == {"rank_0", "rank_1"}


def test_a_skipped_call_is_explained(script):
    code, _, report = debug(script(SKIPS))
    assert code == 1
    assert report.startswith("deadlock: rank 1 waits in all_reduce for rank 0, which has returned.")
    assert "train.py:11: dist.all_reduce(x)" in report
    assert "2 ≠ - all_reduce(4 float32, sum)" in report


@pytest.mark.slow
def test_a_code_that_the_script_exits_with_is_kept(script):
    code, _, report = debug(script(ENDS))
    assert (code, report) == (1, "")  # torchrun's own code
    assert re.search(r"\(exitcode: 3\) local_rank: 1", debug.err)


@pytest.mark.slow
def test_a_rank_that_raised_is_told_first(script):
    code, _, report = debug(script(RAISES))
    assert code == 1
    assert report.startswith("rank 1 raised ValueError: the batch is empty train.py:11: raise")


def test_two_machines_give_one_report(script):
    path, port = script(DIFFERS), str(20_000 + os.getpid() % 10_000)
    agent = ["torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
    agent += ["--master-addr=127.0.0.1", f"--master-port={port}"]
    agents = [start(*agent, f"--node-rank={n}", "-m", "ddpkit.debug", path) for n in (0, 1)]
    errs = [agent.communicate(timeout=FREEZE_S)[1] for agent in agents]
    assert [agent.returncode for agent in agents] == [1, 1]
    whole = "ranks 0, 1 and 2 called all_reduce(4 float32, sum), but rank 3 called all_reduce(5"
    assert said(errs[0]).startswith(f"mismatch: {whole}")
    assert said(errs[1]) == ""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere.py"], "expected a script, got nowhere.py"),
        ([__file__], "start it by torchrun, or say how many ranks: --world-size 4"),
    ],
)
def test_what_can_not_be_started(arguments, says, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match=says):
        main(arguments)
