"""`python -m ddpkit.explain LOGS`: torchrun's logs, read again, name the rank that fell first."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from outside import FREEZE_S

from ddpkit.inspect.explain import main
from ddpkit.inspect.logs import explain_log, find_logs, read_log
from ddpkit.runtime.falls import explain_rendezvous

SCRIPT = """\
import os, signal, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist

how = sys.argv[1]
if how == "early" and os.environ["RANK"] == "1":
    raise RuntimeError("no such file: tokens.bin")
dist.init_process_group("gloo", timeout=timedelta(seconds=9 if how == "early" else 99))
if dist.get_rank() == 1:
    time.sleep(1)  # rank 0 may still be joining
    if how == "raise":
        raise ValueError("the batch is empty")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "leave":
        os._exit(0)
dist.all_reduce(torch.ones(2))
"""
CALL = "train.py:18: dist.all_reduce(torch.ones(2))"
FOLLOWED = f"The others fell because of it: Rank 0 lost its connection to another rank, {CALL}"
TOLD = {
    "raise": 'rank 1 raised ValueError: the batch is empty train.py:13: raise ValueError("the '
    f'batch is empty") {FOLLOWED}',
    "kill": "rank 1 was killed by SIGKILL. Something outside killed it; most often the machine had "
    f"no memory left. {FOLLOWED}",
    "leave": "no rank in this log fell by itself. A rank that isn't listed left with code 0 while "
    "these still waited for it, or the log of another machine has the cause. The ranks in this log"
    ": "
    f"Rank 0 lost its connection to another rank, {CALL}",
    "early": "rank 1 perhaps raised RuntimeError: no such file: tokens.bin train.py:8: raise "
    'RuntimeError("no such file: tokens.bin") Or that was caught: torch put no rank before this '
    "traceback. The others fell because of it: Rank 0 was ended by "
    "torchrun, by SIGTERM, because of rank 1.",
}


@pytest.fixture(scope="module")
def logs(tmp_path_factory) -> dict[str, Path]:
    """Run the script once for each way to fall, all at the same time, under torchrun itself."""
    folder = tmp_path_factory.mktemp("logs")
    (folder / "train.py").write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    running = {}
    for how in TOLD:
        more = [f"--log-dir={folder / 'each'}", "--redirects=3"] if how == "raise" else []
        command = [*torchrun, *more, str(folder / "train.py"), how]
        with open(folder / f"{how}.txt", "w") as file:
            environ = os.environ | {"OMP_NUM_THREADS": "1"}
            running[how] = subprocess.Popen(command, stdout=file, stderr=file, env=environ)
    for process in running.values():
        assert process.wait(FREEZE_S) == 1
    return {how: folder / f"{how}.txt" for how in TOLD} | {"each": folder / "each"}


def explain(path: Path) -> str:
    return " ".join(explain_log(read_log(find_logs(path))).split())


@pytest.mark.parametrize("how", ["kill", "leave", "early"])
def test_the_first_to_fall_is_named_and_those_that_followed(how, logs):
    # Whether rank 0 sees the lost connection first or torchrun's SIGTERM is a race.
    ended = "Rank 0 was ended by torchrun, by SIGTERM, because of rank 1."
    lost = f"Rank 0 lost its connection to another rank, {CALL}"
    assert explain(logs[how]) in (TOLD[how], TOLD[how].replace(lost, ended))


JOINING = """\
Traceback (most recent call last):
  File "train.py", line 9, in <module>
    dist.init_process_group("gloo")
RuntimeError: Gloo connectFullMesh failed with [pair.cc:553] Connection closed by peer [127.0.0.1]:9
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 3)
"""


def test_a_rank_that_lost_another_while_it_joined_only_followed(tmp_path):
    """torch puts no rank before its lines; it is the only one that left with 1."""
    (tmp_path / "log.txt").write_text(JOINING)
    said = explain(tmp_path / "log.txt")
    assert said.startswith("no rank in this log fell by itself.")
    assert "lost its connection to another rank, train.py:9: dist.init_process_group" in said


KILLED_AND_RESTARTED = """
[rank2]: Traceback (most recent call last):
[rank2]:   File "train.py", line 29, in <module>
[rank2]:     work.wait()
[rank2]: RuntimeError: [pair.cc:537] Read error [10.77.0.2]:9621: Connection reset by peer.
E1126 api.py:1002] failed (exitcode: -9) local_rank: 1 (pid: 9369) of binary: python
W1126 dynamic_rendezvous.py:1298] The node '10.77.0.2_9362_0' has failed to shutdown the \
rendezvous 'job' due to an error of type RendezvousConnectionError.
"""


@pytest.mark.parametrize("more", ["", "RendezvousConnectionError: it couldn't restart\n"])
def test_machines_that_lose_each_other_in_the_end_killed_nobody(more, tmp_path):
    """The other machine's torchrun, which has the store, may end first, or go for good."""
    assert explain_rendezvous(KILLED_AND_RESTARTED) is None
    (tmp_path / "log.txt").write_text(KILLED_AND_RESTARTED + more)
    assert explain(tmp_path / "log.txt").startswith("rank 1 of this machine was killed by SIGKILL")


def test_a_killed_rank_is_named_though_machines_lost_each_other_after_it(tmp_path):
    summary = "  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 9369)\n"
    lost = "RendezvousConnectionError: The connection to the C10d store has failed.\n"
    (tmp_path / "log.txt").write_text(f"ChildFailedError\n{summary}{lost}")
    assert explain(tmp_path / "log.txt").startswith("rank 1 was killed by SIGKILL")


def test_a_machine_to_which_no_other_comes(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--rdzv-backend=c10d"]
    torchrun.append(f"--rdzv-endpoint=127.0.0.1:{21_000 + os.getpid() % 10_000}")
    command = [*torchrun, "--rdzv-conf=join_timeout=2", "train.py"]
    done = subprocess.run(command, capture_output=True, timeout=FREEZE_S)
    (tmp_path / "log.txt").write_bytes(done.stderr)
    said = explain(tmp_path / "log.txt")
    assert said.startswith("rendezvous: torchrun didn't find its other machines (Timeout).")


def test_a_folder_of_logs_is_read_as_one(logs, tmp_path):
    """The ranks' own files have the tracebacks, the terminal's has the exit codes."""
    assert explain(logs["each"]) == TOLD["raise"]
    codes = read_log(find_logs(logs["raise"])).codes
    assert codes[1] == 1
    assert set(codes) <= {0, 1}


def rank_files(folder, **texts):
    """Files of ranks as --log-dir writes them: {"_0": text}."""
    for local, text in texts.items():
        (folder / local[1:]).mkdir(exist_ok=True)
        (folder / local[1:] / "stderr.log").write_text(text)
    return explain(folder)


def test_which_of_two_files_came_first_is_not_known(tmp_path):
    longer = "step 1\n" * 9 + KEYS.replace("KeyError: 'x'", "ValueError: empty")
    said = rank_files(tmp_path, _0=KEYS.replace("rank1", "rank0"), _1=longer)
    assert said == (
        "rank 0 raised KeyError: 'x' train.py:3 in f Or one of these fell first: several files "
        "don't say in which order. Rank 1 raised ValueError: empty"
    )


def test_a_local_rank_is_not_taken_for_the_worlds(tmp_path):
    """torchrun's summary, or a line of another rank, says how they are counted."""
    alone = KEYS.replace("[rank1]: ", "")
    teed, summary = KEYS.replace("rank1", "default1"), JOINING.partition("  rank")[2]
    summary = summary.replace("0 (local_rank: 0)", "5 (local_rank: 1)")
    for text in (f"ChildFailedError\n{teed}  rank{summary}", f"{teed}[default0]:[rank4]: Lost\n"):
        (tmp_path / "log.txt").write_text(text)
        assert explain(tmp_path / "log.txt").startswith("rank 5 raised KeyError: 'x'")
    said = rank_files(tmp_path, _0="[rank4]: Lost\n", _1=alone)
    assert said == "rank 5 raised KeyError: 'x' train.py:3 in f"
    said = rank_files(tmp_path, _0="", _1=alone)
    assert said.startswith("rank 1 raised KeyError")
    assert said.endswith("Ranks are counted on their machine here: no line has those of the world.")


def test_the_command_explains_a_log(logs, capsys):
    assert main([str(logs["kill"])]) == 0
    assert capsys.readouterr().out.startswith("rank 1 was killed by SIGKILL.\n  Something outside")


MEET = """
import sys
from datetime import timedelta
import torch.distributed as dist
dist.init_process_group(
    "gloo", "tcp://127.0.0.1:" + sys.argv[1], timedelta(seconds=1), 2, int(sys.argv[2])
)
"""


@pytest.mark.parametrize(
    ("rank", "says"),
    [
        ("0", r"rendezvous: after \d s, 1 of 2 ranks had come to init_process_group\."),
        ("1", r"rendezvous: in 1000ms, nothing answered at 127.0.0.1, \d+\. Is rank 0 started"),
    ],
)
def test_ranks_that_did_not_meet(rank, says, tmp_path):
    port = str(21_000 + os.getpid() % 10_000)
    command = [sys.executable, "-c", MEET, port, rank]
    run = subprocess.run(command, capture_output=True, text=True, timeout=FREEZE_S)
    (tmp_path / "log.txt").write_text(run.stderr)
    assert re.match(says, explain(tmp_path / "log.txt"))


WATCHDOG = (
    "[rank{0}]:[E1124 torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:683] [Rank {0}] Watchdog "
    "caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, NumelIn=2, "
    "NumelOut=2, Timeout(ms)=600000) ran for 600013 milliseconds before timing out.\n"
)
KEYS = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 3, in f
[rank1]: KeyError: 'x'
"""


def test_nccls_watchdog_ends_those_that_waited(tmp_path):
    """Its lines as ProcessGroupNCCL.cpp writes them: there is no GPU to write them here."""
    path = tmp_path / "log.txt"
    path.write_text(WATCHDOG.format(0) + KEYS)
    assert explain(path) == "rank 1 raised KeyError: 'x' train.py:3 in f"
    path.write_text(WATCHDOG.format(0) + WATCHDOG.format(1))
    assert explain(path).startswith("every rank in this log waited in allreduce, until NCCL's")


@pytest.mark.parametrize("text", ["", "epoch 1, loss 2.3\n", "\x00\xff"])
def test_what_is_no_log_of_torchruns(text, tmp_path, capsys):
    (tmp_path / "log.txt").write_text(text)
    assert main([str(tmp_path / "log.txt")]) == 1
    assert "expected a log of torchrun's, or a folder of dumps, got log.txt" in (
        capsys.readouterr().err
    )


def test_a_rank_that_was_killed_and_started_again_is_named(tmp_path):
    """torchrun sums up nothing then: one line of its log has the code, and the rank's number on
    its machine."""
    log = tmp_path / "agent.log"
    line = (
        "E1124 22:42:43 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: "
    )
    log.write_text(
        f"{line}-15) local_rank: 0 (pid: 3)\n{line}-9) local_rank: 1 (pid: 4) of binary\n"
    )
    assert explain_log(read_log([log])).startswith("rank 1 of this machine was killed by SIGKILL.")
    log.write_text(f"{line}-15) local_rank: 0 (pid: 3)\n")
    assert explain_log(read_log([log])).startswith("no rank in this log fell by itself.")


BARE = KEYS.replace("[rank1]: ", "")
LOST = """\
[rank0]: Traceback (most recent call last):
[rank0]:   File "train.py", line 9, in <module>
[rank0]: RuntimeError: Connection closed by peer [127.0.0.1]:9
"""


def told(tmp_path, text, **codes) -> str:
    """The explanation of a log: a text, and torchrun's summary {"_0": its exit code}."""
    lines = "  rank      : {0} (local_rank: {0})\n  exitcode  : {1} (pid: 7{0})\n"
    summary = "".join(lines.format(rank[1:], code) for rank, code in codes.items())
    (tmp_path / "log.txt").write_bytes(f"{text}ChildFailedError\n{summary}".encode())
    return explain(tmp_path / "log.txt")


def test_a_rank_that_torchrun_ended_had_caught_what_it_logged(tmp_path):
    teed = BARE.replace("\n", "\n[default0]:").removesuffix("[default0]:")
    text = f"[default0]:{teed}[default1]:[rank1]: Traceback (most recent call last):\n"
    said = told(tmp_path, f"{text}[default1]:[rank1]: ValueError: empty\n", _0=-15, _1=1)
    assert said.startswith("rank 1 raised ValueError: empty The others")
    assert said.endswith("Rank 0 was ended by torchrun, by SIGTERM, because of rank 1.")
    assert told(tmp_path, KEYS, _1=-15).startswith("rank 1 raised KeyError")  # it hung at its end


def test_a_traceback_without_a_rank_is_perhaps_that_of_the_silent_one(tmp_path):
    said = told(tmp_path, BARE + LOST, _0=-15, _1=1)
    assert said.startswith("rank 1 perhaps raised KeyError: 'x' train.py:3 in f Or that was caught")
    said = told(tmp_path, f"[rank1]: a warning\n{BARE}{LOST}", _0=-15, _1=1)
    assert said.startswith("rank 1 exited with code 1. The others fell")  # torch knew its rank
    assert told(tmp_path, BARE).startswith("rank ? perhaps raised KeyError: 'x' train.py:3 in f")


@pytest.mark.parametrize(("number", "name"), [(15, "SIGTERM"), (2, "SIGINT"), (99, "signal 99")])
def test_a_signal_to_torchrun_itself(number, name, tmp_path):
    ended = KEYS.replace("KeyError: 'x'", "KeyboardInterrupt") if number == 2 else ""
    ended += BARE.replace("KeyError: 'x'", f"SignalException: Process 9 got signal: {number}")
    assert told(tmp_path, ended).startswith(f"torchrun itself got {name}, and ended its ranks.")


def test_exit_codes_do_not_say_who_was_first(tmp_path):
    alike = "rank 0 exited with code 2. Rank 1 failed in the same way."
    assert told(tmp_path, "", _1=2, _0=2) == alike
    assert told(tmp_path, "", _0=1, _1=3) == (
        "rank 0 exited with code 1. Or one of these fell first: exit codes don't say in which "
        "order. Rank 1 exited with code 3."
    )


def test_another_rank_is_no_reason_for_a_sigkill_unless_torchrun_sent_it(tmp_path):
    assert told(tmp_path, "", _0=1, _1=-9).startswith("rank 1 was killed by SIGKILL")
    forced = "W1128 api.py:1048] Unable to shutdown process 70 via SIGTERM, forcefully exiting\n"
    assert told(tmp_path, KEYS + forced, _0=-9, _1=1).startswith("rank 1 raised KeyError")


def test_windows_line_ends(tmp_path):
    text = f"{LOST}\n  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 7)\n"
    assert told(tmp_path, text.replace("\n", "\r\n")).startswith("rank 1 was killed by SIGKILL.")


def test_only_the_last_attempt_of_a_torchrun_is_read(tmp_path):
    failed = "E1128 10:33:00 {} torch/distributed/elastic/api.py:1002] failed (exitcode: 1) local\n"
    old = LOST.replace("rank0", "rank2").replace("RuntimeError: Connection", "OSError:")
    said = told(tmp_path, old + failed.format(8) + KEYS + failed.format(8), _1=1, _2=-15)
    assert said.startswith("rank 1 raised KeyError")
    assert "OSError" not in said
    assert said.endswith("Left out is what is older than the last attempt.")
    said = told(tmp_path, old + failed.format(8) + KEYS + failed.format(9), _1=1, _2=1)
    assert said.startswith("rank 2 raised OSError")  # that of another machine
    ended = f"{old}{failed.format(8)}ChildFailedError\n{KEYS}{failed.format(8)}"
    assert told(tmp_path, ended, _1=1, _2=1).startswith("rank 2 raised OSError")  # in a container


def test_only_the_newest_run_of_a_folder_is_read(tmp_path):
    """Machines of one run have folders of their own, and count their attempts themselves."""
    folders = ["a_12345678/attempt_1", "b_12345678/attempt_0", "b_23456789/attempt_2"]
    folders += ["b_34567890/attempt_0", "b_34567890/attempt_1"]
    for now, folder in zip([1000, 2000, 3000, 3001, 3002], folders, strict=True):
        (tmp_path / folder / "0").mkdir(parents=True)
        (tmp_path / folder / "0" / "stderr.log").write_text(KEYS)
        for path in (tmp_path / folder / "0" / "stderr.log", tmp_path / folder):
            os.utime(path, (now, now))
    found = [str(file.parent.parent.relative_to(tmp_path)) for file in find_logs(tmp_path)]
    assert found == [folders[2], folders[4]]
    said = explain(tmp_path)
    assert said.endswith(f"Left out is what is older than {folders[2]} and {folders[4]}.")
    assert "Left out" not in explain(tmp_path / folders[0])  # there is nothing older


COLOURED = KEYS.replace("KeyError", "\x1b[1;35mKeyError\x1b[0m").replace("Trace", "\x1b[31mTrace")
LOCAL = KEYS.replace("Key", "f.<locals>.Key")
IN_A_GROUP = """\
[rank1]:   + Exception Group Traceback (most recent call last):
[rank1]:   |   File "train.py", line 5, in <module>
[rank1]:   | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)
[rank1]:   +-+---------------- 1 ----------------
[rank1]:     | Traceback (most recent call last):
[rank1]:     |   File "train.py", line 3, in f
[rank1]:     | KeyError: 'x'
[rank1]:     +------------------------------------
"""


@pytest.mark.parametrize("text", [f"\r 20%|## [00:00, 1.0it/s]{KEYS}", COLOURED, LOCAL, IN_A_GROUP])
def test_a_traceback_is_found(text, tmp_path):
    assert told(tmp_path, text, _1=1) == "rank 1 raised KeyError: 'x' train.py:3 in f"
    assert told(tmp_path, f"[step12]: loss 2.3\n{text}").endswith("train.py:3 in f")


def test_nccl_lost_its_peer(tmp_path):
    lost = "DistBackendError: NCCL error in: x.cpp:9, remote process exited or there was a network "
    said = told(tmp_path, KEYS.replace("KeyError: 'x'", f"{lost}error, NCCL version 2.27.3"))
    assert said.startswith("no rank in this log fell by itself.")


def test_the_watchdog_counts_in_the_group_and_torch_in_the_world(tmp_path):
    second = WATCHDOG.format(3).replace("[Rank 3]", "[Rank 1]")
    said = told(tmp_path, second, _2=-15, _3=-6)
    assert said.startswith("rank 3 waited in allreduce, until NCCL's watchdog ended it.")
    told(tmp_path, "[Rank 0] " * 200_000)  # quadratic, 60,000 took 82 s
