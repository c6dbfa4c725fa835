"""Waits that end by a timeout, second threads, destroyed groups, exits: all are told."""

import os
import re
import signal
import subprocess
import sys

import pytest
import stuck_scripts
from outside import FREEZE_S
from stuck_scripts import BEGIN, CASES, LINES, RIGHT
from test_debug import debug, start

from ddpkit import LaunchError, launch


def in_words(text: str) -> str:
    return " ".join(text.split())


def reports(text: str) -> list[str]:
    return [in_words(part) for part in re.split(r"^ddpkit: ", text, flags=re.MULTILINE)[1:]]


def guilty(case: stuck_scripts.Case) -> str:
    return f"train.py:{LINES + case.line}: {in_words(case.text.splitlines()[case.line - 1])}"


def check(case: stuck_scripts.Case, said: str):
    first, *rest = reports(said)
    assert first.startswith(case.says)
    assert guilty(case) in first
    assert "GLHF" not in said
    assert len(rest) == bool(case.seconds)  # then Gloo's own error ends the wait
    for report in rest:
        assert re.match("rank 0 raised RuntimeError: .*(Timed|timed|failed to pass)", report)


# One of each kind, for `make test`.
QUICK = "sleeps", "a timeout of wait()", "after a thread's call", "polls a handle"
QUICK += "destroys its group", "leaves by os._exit(0)"


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.wide] * (n not in QUICK)) for n in CASES]
)
def test_what_does_not_go_on_is_told_with_its_line(name, tmp_path):
    """As under torchrun, but for its seconds."""
    case = CASES[name]
    output, _ = debug(tmp_path, case.text, begin=BEGIN, one_report=False)
    check(case, "\n".join(output))


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_stays_right(name, tmp_path):
    output, _ = debug(tmp_path, RIGHT[name], begin=BEGIN, one_report=False)
    said = [
        [line for line in text.splitlines() if line in ("1.0", "0.0", "True")] for text in output
    ]
    assert said[0] == ["True" if "catches" in name else "0.0" if "sends" in name else "1.0"]
    found = [report for text in output for report in reports(text)]
    assert ("catches" in name) == bool(found), found  # a word on what it waited for ends nothing


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_same_under_torchrun_itself(name, tmp_path):
    case = CASES[name]
    (tmp_path / "train.py").write_text(BEGIN + case.text)
    process = start(tmp_path, "ddpkit.debug", "--world-size", "2", str(tmp_path / "train.py"))
    _, err = process.communicate(timeout=FREEZE_S)
    assert process.returncode == 1
    check(case, err.partition("torch.distributed.elastic")[0])
    assert not list(tmp_path.glob("torchelastic_*/*/*/ddpkit"))


def run_text(text: str, file: str):
    """Within `launch`: what the script does after its `init_process_group`."""
    lines = BEGIN.replace("dist.init", "# dist.init").splitlines()
    os.environ |= {"RANK": str(stuck_scripts_rank()), "WORLD_SIZE": "2"}
    exec(compile("\n".join([*lines, text]), file, "exec"), {"__name__": "__main__"})


def stuck_scripts_rank() -> int:
    import torch.distributed as dist

    return dist.get_rank()


@pytest.mark.wide
@pytest.mark.parametrize("name", CASES)
def test_the_same_under_launch(name, tmp_path):
    case = CASES[name]
    (tmp_path / "train.py").write_text(BEGIN + case.text)
    with pytest.raises(LaunchError) as caught:
        launch(run_text, case.text, str(tmp_path / "train.py"), world_size=2, hang_after=3)
    said = in_words(str(caught.value))
    headline = case.says.replace("called os._exit(", "exited with code ").rstrip(")")
    headline = headline.replace("called sys.exit(3", "raised SystemExit: sys.exit(3) was called")
    assert headline in said
    assert guilty(case) in said or name == "polls a handle"  # the error comes two lines later
    assert "GLHF" not in said


@pytest.mark.parametrize("how", [name for name in RIGHT if "child" in name])
def test_a_child_does_not_report_in_its_ranks_name(how, tmp_path):
    """What `run_text` leaves, a child does as well."""
    run = launch(run_text, RIGHT[how], str(tmp_path / "train.py"), world_size=2, timeout=30)
    assert [text.splitlines()[-1] for text in run.output] == ["1.0", "1.0"]
    assert ("I am a child" in run.output[0]) == ("leaves" in how)


FRAMEWORK = """\
import sysconfig
file = sysconfig.get_path("purelib") + "/frame/ops.py"
exec(compile("def gather(x): dist.all_reduce(x)", file, "exec"))
if rank == 0: gather(x)
"""


def test_under_a_framework_both_lines_are_told(tmp_path):
    _, report = debug(tmp_path, FRAMEWORK, begin=BEGIN)
    own = f"train.py:{LINES + 4}: if rank == 0: gather(x)"
    assert f"{own} by way of frame/ops.py:1 in gather" in report


SLOW = """\
import ddpkit.inspect.session as session
session.STANDSTILL_S = 0.8
if rank == 1: time.sleep(3)
dist.barrier()
dist.all_reduce(x)
"""


def test_a_rank_that_is_waited_for_for_long_is_named_once_and_nothing_ends(tmp_path):
    _, report = debug(tmp_path, SLOW, begin=BEGIN)
    waits = "rank 0 waits in barrier for rank 1, which isn't in a call."
    assert re.match(rf"no progress for [\d.]+ s: {waits}", report)
    assert f"train.py:{LINES + 3}: if rank == 1: time.sleep(3)" in report


HANGS = BEGIN + "if rank == 1: print('here', flush=True), time.sleep(100)\ndist.all_reduce(x)\n"


@pytest.mark.wide
def test_sigterm_is_answered_and_still_ends_the_rank(tmp_path):
    """Also by a rank that is blocked in C++; a child of a rank dies of it as ever."""
    fork = "worker = os.fork()\nif worker == 0: time.sleep(100)\n"
    dies = "os.kill(worker, signal.SIGTERM)\nassert os.waitpid(worker, 0)[1] == signal.SIGTERM\n"
    (tmp_path / "train.py").write_text(HANGS.replace("if rank", f"{fork}{dies}if rank", 1))
    process = start(tmp_path, "ddpkit.debug", "--world-size", "2", str(tmp_path / "train.py"))
    assert process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=FREEZE_S)
    (report,) = reports(err.partition("Traceback")[0])
    assert report.startswith("ended by SIGTERM, sent to rank ")
    assert f"train.py:{LINES + 5}: if rank == 1: print" in report
    assert not list(tmp_path.glob("torchelastic_*/*/*/ddpkit"))


ASYNCIO = """
import asyncio, os, signal, time
from ddpkit.runtime.exits import answer_sigterm
answer_sigterm(lambda: os._exit(7))
asyncio.new_event_loop().add_signal_handler(signal.SIGUSR2, print)
blocked = {signal.SIGTERM}
signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
if (child := os.fork()) == 0:
    os._exit(signal.pthread_sigmask(signal.SIG_BLOCK, []) != blocked)
assert os.waitpid(child, 0)[1] == 0  # a fork leaves the mask as it was
assert signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked) == blocked
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
"""


def test_sigterm_is_answered_under_asyncio():
    ended = subprocess.run([sys.executable, "-c", ASYNCIO], timeout=FREEZE_S, check=False)
    assert ended.returncode == 7


def test_a_crashed_sessions_folder_is_swept_by_a_later_one(tmp_path, monkeypatch):
    from ddpkit.inspect import session
    from ddpkit.runtime import processes

    old, live = (tmp_path / f"torchelastic_{n}/id/attempt_0/ddpkit" for n in range(2))
    for folder in (old, live):
        folder.mkdir(parents=True)
        (folder / "board").touch()
        os.utime(folder, (0, 0))
    monkeypatch.setattr(processes.tempfile, "tempdir", str(tmp_path))
    with processes.locked(live, shared=True):
        for pattern in session.OLD_FOLDERS:
            processes.sweep.__wrapped__(pattern)
    assert (old.exists(), live.exists()) == (False, True)
