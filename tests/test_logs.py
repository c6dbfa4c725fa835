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
    "early": "rank 1 raised RuntimeError: no such file: tokens.bin train.py:8: raise "
    'RuntimeError("no such file: tokens.bin") The others fell because of it: Rank 0 was ended by '
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
