"""Processes: nothing leaks, listens to the outside or outlives its parent; all can be stopped."""

import multiprocessing.util
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist
from outside import FREEZE_S, PREAMBLE, Script, run_script, wait_until

from ddpkit import LaunchError, launch
from ddpkit.runtime import processes, worker
from ddpkit.runtime.backends import Choice

linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
forks = pytest.mark.skipif(processes.start_method() != "forkserver", reason="no fork server here")


# Trap 4: nothing leaks.


def descriptors() -> list[str]:
    """What the open descriptors of this process stand for."""
    folder = f"/proc/{os.getpid()}/fd"
    paths = [f"{folder}/{fd}" for fd in os.listdir(folder)]
    return [os.readlink(path) for path in paths if os.path.islink(path)]  # not of this listing


def belongings() -> dict[str, list]:
    """What this process and the system hold that a launch might leave behind."""
    family = psutil.Process().children(recursive=True)
    temporary = Path(tempfile.gettempdir())
    return {
        "descriptors": sorted(re.sub(r"\d+", "N", link) for link in descriptors()),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "processes": sorted(p.name() for p in family if p.status() != psutil.STATUS_ZOMBIE),
        "zombies": [p.pid for p in family if p.status() == psutil.STATUS_ZOMBIE],
        "shared memory": sorted(name for name in os.listdir("/dev/shm") if not others(name)),
        "temporary": sorted(path.name for path in temporary.glob(f"ddpkit-{os.getpid()}-*")),
        "multiprocessing's": sorted(os.listdir(multiprocessing.util.get_temp_dir())),
    }


def others(name: str) -> bool:
    """Whether a piece of shared memory belongs to a process that lives: not to one of the ranks."""
    owner = re.match(r"torch_(\d+)_", name)
    return owner is not None and psutil.pid_exists(int(owner[1]))


def grown(before) -> dict[str, tuple]:
    """What is different now, once all that goes on has ended."""
    until = time.monotonic() + FREEZE_S
    while (now := belongings()) != before and time.monotonic() < until:
        time.sleep(0.05)
    return {name: (before[name], now[name]) for name in now if before[name] != now[name]}


def add():
    x = torch.ones(1)
    dist.all_reduce(x)
    return x.item()


def broken(kind):
    if dist.get_rank() == 1:
        if kind == "raises":
            raise ValueError
        if kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "disagrees":
            dist.all_reduce(torch.ones(2))
        if kind == "leaves a child":
            os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "1000")
            os._exit(3)
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize(("gpus", "seconds"), [(0, 4.0), (2, 30.0)])
def test_a_rank_that_held_a_gpus_memory_may_take_longer_to_go(gpus, seconds):
    waited, rank = [], object.__new__(processes.Rank)
    rank.assignment = SimpleNamespace(choice=Choice("nccl", gpus, ""))
    rank.process = SimpleNamespace(join=waited.append, close=lambda: None)
    rank.pipe = SimpleNamespace(close=lambda: None)
    rank.wait_gone()
    assert waited == [seconds]


@pytest.mark.skipif(os.name != "posix", reason="no such locks here")
def test_folders_of_killed_launches_are_swept(tmp_path, monkeypatch):
    for name in ("1-dead", "1-young", "1-locked", "session-1"):
        folder = tmp_path / f"ddpkit-{name}"
        folder.mkdir()
        (folder / "board").touch()
        os.utime(folder, (0, 0) if name != "1-young" else None)
    link = tmp_path / "ddpkit-1-elsewhere"
    link.symlink_to(tmp_path / "ddpkit-1-young")
    os.utime(link, (0, 0), follow_symlinks=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with processes.locked(tmp_path / "ddpkit-1-locked"):
        processes.sweep.__wrapped__()
    left = {path.name.removeprefix("ddpkit-") for path in tmp_path.iterdir()}
    assert left == {"1-young", "1-locked", "session-1", "1-elsewhere"}


def test_the_folder_of_a_launch_is_locked():
    def free() -> bool:
        with processes.locked(Path(multiprocessing.util.get_temp_dir())) as free:
            return free

    assert list(launch(free, world_size=1)) == [False]


def leave():
    """A rank that returns while all that it began goes on."""
    os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "1000")
    sys.child = subprocess.Popen(["sleep", "1000"])  # kept: it has none of the rank's descriptors
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,)).start()
    assert len(list(torch.utils.data.DataLoader(range(4), num_workers=2))) == 4  # trap 22
    threading.Thread(target=time.sleep, args=(1000,)).start()
    torch.ones(10).share_memory_()
    return sys.child.pid


@linux
@pytest.mark.parametrize("times", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_trap_4_21_and_22_launches_leave_nothing(times, monkeypatch):
    """Neither those that work, nor broken ones, nor what a rank started, nor half a start."""
    launch(add, world_size=2)
    before = belongings()
    for _ in range(times):
        assert list(launch(add, world_size=2)) == [2.0, 2.0]
    for kind in ("raises", "killed", "disagrees", "leaves a child"):
        with pytest.raises(LaunchError):
            launch(broken, kind, world_size=2)
    children = list(launch(leave, world_size=2))
    wait_until(lambda: not any(psutil.pid_exists(child) for child in children))
    start, left = processes.Rank, iter(range(2))

    def third_fails(*args):
        if next(left, None) is None:
            raise OSError("no more processes")
        return start(*args)

    monkeypatch.setattr(processes, "Rank", third_fails)
    with pytest.raises(OSError, match="no more processes"):
        launch(add)
    assert grown(before) == {}


# Trap 5: loopback only.


def listening(pids: set[int]) -> set[str]:
    """Addresses that these processes listen on, as `ss -ltn` would show them."""
    connections = [c for pid in pids for c in psutil.Process(pid).net_connections("tcp")]
    return {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}


@linux
def test_trap_5_ranks_listen_on_the_loopback_interface_alone(monkeypatch):
    def look():
        dist.new_group([0, 1])
        dist.barrier()
        found = listening({os.getpid(), os.getppid()})
        dist.barrier()
        return found

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "vpn0")
    monkeypatch.setenv("MASTER_ADDR", "no.such.host")
    for found in launch(look, world_size=2):
        assert found
        assert found <= {"127.0.0.1", "::1"}
    with socket.create_server(("0.0.0.0", 0)):  # the test can see what it looks for
        assert "0.0.0.0" in listening({os.getpid()})


def unshare(*options):
    """A command that runs another in namespaces of its own; skips where that is not allowed."""
    command = ["unshare", *options]
    try:
        subprocess.run([*command, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs the right to make namespaces")
    return command


BARE = """
print(launch(total, world_size=8))
print(len(launch(lambda: torch.zeros(30_000_000), world_size=1)[0]), os.uname().nodename)
try:
    open("x", "w")
except OSError as error:
    print(error.strerror)
"""


@pytest.mark.wide
def test_trap_5_and_6_odd_host_name_little_shared_memory_read_only_directory_8_ranks(tmp_path):
    mounts = "mount -t tmpfs -o size=64m tmpfs /dev/shm && mount -t tmpfs -o ro tmpfs work"
    (tmp_path / "work").mkdir()
    here = f'hostname odd.invalid && {mounts} && cd work && exec "$0" "$@"'
    command = (*unshare("--uts", "--mount"), "sh", "-c", here, sys.executable)
    totals = "".join(f"rank {rank}: 8.0\n" for rank in range(8))
    expected = totals + "30000000 odd.invalid\nRead-only file system\n"
    assert run_script(tmp_path, PREAMBLE + BARE, command=command) == expected


def test_trap_8_which_systems_spawn(monkeypatch):
    monkeypatch.delenv("DDPKIT_START_METHOD", raising=False)
    for platform, method in (("linux", "forkserver"), ("darwin", "spawn"), ("win32", "spawn")):
        monkeypatch.setattr(sys, "platform", platform)
        assert processes.start_method() == method


# Traps 18, 20 and 21: interrupts, and no orphans.

WORK = """
import threading
from ddpkit.runtime.live import LiveWorld

def compute():
    while True:
        pass

def sleep():
    time.sleep(1e6)

def hold_the_lock_in_c():
    ctypes.PyDLL(None).sleep(1000)

def hang_in_a_collective():
    dist.get_rank() or dist.barrier()
    time.sleep(1e6)

def ignore_signals():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1e6)

WORK = [hang_in_a_collective, hold_the_lock_in_c, compute, sleep, ignore_signals]

def work(*fns):
    os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "1000")
    print("ready", flush=True)
    fns[dist.get_rank() % len(fns)]()
"""
INTERRUPTED = """
print("start", flush=True)
try:
    while True:
        launch(total, world_size=4)
except KeyboardInterrupt:
    print("interrupted the start", flush=True)
for fn in WORK:
    try:
        launch(work, fn, world_size=2, live=True, hang_after=1e6)
    except KeyboardInterrupt:
        for _ in range(2):  # the second press may come while the first is dealt with
            try:
                print("interrupted", fn.__name__, flush=True)
                time.sleep(0.1)
            except KeyboardInterrupt:
                pass
"""
KILLED = """
def start_ranks():
    while True:
        launch(total, world_size=2)

world = LiveWorld(1)
world.run("import os; os.spawnlp(os.P_NOWAIT, 'sleep', 'sleep', '1000')", [0])
threading.Thread(target=start_ranks).start()
launch(work, *WORK, world_size=int(sys.argv[1]), live=True)
"""


def kill_while_it_works(script, world_size):
    """The ranks of a launch, a rank that stays, a child of each, and ranks that are just starting.

    None outlives the notebook.
    """
    ready = {script.line() for _ in range(world_size)}
    assert ready == {f"rank {rank} | ready" for rank in range(world_size)}
    wait_until(lambda: len(script.sleeping()) == world_size + 1)
    script.signal(signal.SIGKILL)
    script.process.wait(FREEZE_S)
    assert script.left() == []


def test_trap_18_20_and_21_interrupts_and_a_kill(tmp_path):
    """While ranks start, and in all that they do; once, and twice in a row: nothing is left."""
    names = ["hang_in_a_collective", "hold_the_lock_in_c", "compute", "sleep", "ignore_signals"]
    with Script(tmp_path, PREAMBLE + WORK + INTERRUPTED + KILLED, "5") as script:
        assert script.line() == "start"
        time.sleep(0.05)  # the fork server imports torch
        script.interrupt_group()
        assert script.line() == "interrupted the start"
        for number, name in enumerate(names):
            assert {script.line(), script.line()} == {"rank 0 | ready", "rank 1 | ready"}
            wait_until(lambda: len(script.sleeping()) == 2)  # none of the launch before
            for _ in range(1 + number % 2):
                script.interrupt_group()
                time.sleep(0.005)
            assert script.line() == f"interrupted {name}"
            assert script.line() == f"interrupted {name}"
        kill_while_it_works(script, 5)


@linux
@pytest.mark.slow
def test_trap_21_spawned_ranks_do_not_outlive_the_notebook(tmp_path):
    with Script(tmp_path, PREAMBLE + WORK + KILLED, "2", DDPKIT_START_METHOD="spawn") as script:
        kill_while_it_works(script, 2)


@pytest.mark.skipif(os.name != "posix", reason="no process groups here")
def test_trap_20_ranks_ignore_ctrl_c_and_lead_their_own_group():
    def look():
        return signal.getsignal(signal.SIGINT) == signal.SIG_IGN, os.getpgrp() == os.getpid()

    assert list(launch(look, world_size=2)) == [(True, True)] * 2


def test_interrupts_are_deferred_not_lost():
    reached = []

    def deferred():
        with processes.interrupts_deferred():
            os.kill(os.getpid(), signal.SIGINT)
            threading.Event().wait(0.05)
            reached.append("the end")

    with pytest.raises(KeyboardInterrupt):
        deferred()
    assert reached


@pytest.mark.wide
@linux
def test_trap_21_the_notebook_dies_while_the_server_starts(tmp_path):
    with Script(tmp_path, PREAMBLE + 'print("begin", flush=True)\nlaunch(total)') as script:
        assert script.line() == "begin"
        time.sleep(0.1)
        script.signal(signal.SIGTERM)
        script.process.wait(FREEZE_S)
        assert script.left() == []


# The fork server.


def import_slowly() -> tuple[int, bool]:
    """The number of the server, and whether it had imported what counts as slow in this test."""
    was_there = "colorsys" in sys.modules
    worker.SLOW_IMPORTS = ("colorsys",)
    import colorsys  # noqa: F401

    return os.getppid(), was_there


@pytest.mark.wide
@forks
def test_a_server_that_died_is_replaced_and_so_is_one_that_knows_too_little(monkeypatch):
    """A rank that makes an optimizer imports for a second: later ranks shall begin with that."""
    server = processes._server.__wrapped__()  # the one of all tests stays
    monkeypatch.setattr(processes, "_server", lambda: server)
    processes.warm_up()
    died = server._forkserver_pid
    os.kill(died, signal.SIGKILL)
    os.waitid(os.P_PID, died, os.WEXITED | os.WNOWAIT)
    ((old, was_there),) = launch(import_slowly, world_size=1)
    assert (old != died, was_there) == (True, False)
    one, other = launch(import_slowly, world_size=2)
    assert one == other == (server._forkserver_pid, True)
    wait_until(lambda: not psutil.pid_exists(old))
    server._stop()


def test_before_a_server_starts_what_it_will_import_is_only_noted(monkeypatch):
    server = processes._server.__wrapped__()
    monkeypatch.setattr(processes, "_server", lambda: server)
    processes.preload(["colorsys"])
    processes.preload(["this", "colorsys"])
    expected = [*processes.PRELOAD, "colorsys", "this", processes.LAST]
    assert (server._preload_modules, server._forkserver_pid) == (expected, None)


def test_ranks_ask_for_large_pages_unless_the_user_says_otherwise(monkeypatch):
    def asked():
        return os.environ.get("THP_MEM_ALLOC_ENABLE")

    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    assert list(launch(asked, world_size=2)) == ["1", "1"]
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
    assert list(launch(asked, world_size=2)) == ["0", "0"]


@pytest.mark.parametrize(
    ("asked", "cores", "world_size", "threads"),
    [("2", 2, 4, 1), ("3", 8, 2, 3), ("9", 8, 2, 4), ("4,2", 8, 1, 4), ("", 8, 2, 1)],
)
def test_threads_of_all_ranks_fit_the_cores(monkeypatch, asked, cores, world_size, threads):
    monkeypatch.setattr(processes, "count_cores", lambda: cores)
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    monkeypatch.setenv("MKL_NUM_THREADS", "7")

    def counts():
        told = os.environ["OMP_NUM_THREADS"], os.environ["MKL_NUM_THREADS"]
        before = torch.get_num_threads()
        torch.set_num_threads(5)  # whatever the environment says
        return before, *told, torch.get_num_threads()

    expected = threads, str(threads), str(threads), 5
    assert list(launch(counts, world_size=world_size)) == [expected] * world_size
