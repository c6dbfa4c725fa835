"""Processes: nothing leaks, listens to the outside or outlives its parent; everything can be interrupted."""

import contextlib
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

import cloudpickle
import psutil
import pytest
import torch
import torch.distributed as dist
from outside import PREAMBLE, Script, run_script, wait_until

from ddpkit import LaunchError, launch
from ddpkit.runtime import processes

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # functions travel as those of a notebook do

linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


# Trap 4: nothing leaks.


def descriptors(pid: int) -> list[str]:
    """What the open descriptors of a process stand for."""
    found = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of this listing
            found.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return found


def grown(before) -> dict[str, tuple]:
    """What is different now, once all that is under way has ended."""
    until = time.monotonic() + 5
    while (now := belongings()) != before and time.monotonic() < until:
        time.sleep(0.05)
    return {name: (before[name], now[name]) for name in now if before[name] != now[name]}


def belongings() -> dict[str, list]:
    """What this process and the system hold that a launch might leave behind."""
    family = psutil.Process().children(recursive=True)
    return {
        "descriptors": sorted(re.sub(r"\d+", "N", link) for link in descriptors(os.getpid())),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "processes": sorted(process.name() for process in family if process.status() != psutil.STATUS_ZOMBIE),
        "zombies": [process.pid for process in family if process.status() == psutil.STATUS_ZOMBIE],
        "shared memory": sorted(name for name in os.listdir("/dev/shm") if not others(name)),
        "temporary": sorted(path.name for path in Path(tempfile.gettempdir()).glob(f"ddpkit-{os.getpid()}-*")),
        "multiprocessing's": sorted(os.listdir(multiprocessing.util.get_temp_dir())),
    }


def others(name: str) -> bool:
    """Whether a piece of shared memory belongs to a process that lives: not to one of the ranks, which are gone."""
    owner = re.match(r"torch_(\d+)_", name)
    return owner is not None and psutil.pid_exists(int(owner[1]))


def add():
    x = torch.ones(1)
    dist.all_reduce(x)
    return x.item()


def broken(kind):
    if dist.get_rank() == 1:
        if kind == 0:
            raise ValueError
        if kind == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == 2:
            dist.all_reduce(torch.ones(2))
        if kind == 3:
            os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "1000")
            os._exit(3)
    dist.all_reduce(torch.ones(1))


@linux
def test_trap_4_200_launches_and_20_broken_ones_leave_nothing():
    launch(add, world_size=2)
    before = belongings()
    for _ in range(200):
        assert list(launch(add, world_size=2)) == [2.0, 2.0]
    for number in range(20):
        with pytest.raises(LaunchError):
            launch(broken, number % 4, world_size=2)
    assert grown(before) == {}


@linux
def test_trap_4_what_a_rank_starts_and_leaves_goes_with_it():
    def leave():
        import multiprocessing

        os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "1000")
        multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,)).start()
        list(torch.utils.data.DataLoader(range(4), num_workers=2))
        threading.Thread(target=time.sleep, args=(1000,)).start()
        torch.ones(10).share_memory_()
        return tempfile.gettempdir()

    launch(add, world_size=2)
    before = belongings()
    launch(leave, world_size=2, timeout=60)
    assert grown(before) == {}


@linux
@pytest.mark.parametrize("ending", ["returns", "dies by itself"])
def test_trap_21_children_of_ranks_go_with_them(tmp_path, ending):
    def leave():
        sys.child = subprocess.Popen(["sleep", "1000"])  # kept: it has none of the rank's descriptors
        (tmp_path / str(sys.child.pid)).touch()
        if ending == "dies by itself":
            os._exit(3)

    with contextlib.suppress(LaunchError):
        launch(leave, world_size=2)
    children = [int(path.name) for path in tmp_path.iterdir()]
    assert children
    wait_until(lambda: not any(psutil.pid_exists(child) for child in children), 2)


@linux
def test_bad_arguments_and_a_failed_start_leave_nothing(monkeypatch):
    launch(add, world_size=2)
    before = belongings()
    start, started = processes.Rank, []

    def third_fails(*args):
        if len(started) == 2:
            raise OSError("no more processes")
        started.append(start(*args))
        return started[-1]

    monkeypatch.setattr(processes, "Rank", third_fails)
    with pytest.raises(OSError, match="no more processes"):
        launch(add)
    started.clear()
    assert grown(before) == {}


# Trap 5: loopback only.


def listening(pids: set[int]) -> dict[int, set[str]]:
    """Addresses that these processes listen on, by process, as `ss -ltn` would show them."""
    inodes = {}
    for kind in ("tcp", "tcp6"):
        for row in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = row.split()
            if state == "0A":
                inodes[rest[5]] = local.split(":")[0]
    found = {}
    for pid in pids:
        links = " ".join(descriptors(pid))
        found[pid] = {inodes[inode] for inode in re.findall(r"socket:\[(\d+)\]", links) if inode in inodes}
    return found


LOOPBACK = {"0100007F", "00000000000000000000000001000000"}


@linux
@pytest.mark.parametrize("environ", [{}, {"GLOO_SOCKET_IFNAME": "vpn0", "MASTER_ADDR": "no.such.host"}])
def test_trap_5_ranks_listen_on_the_loopback_interface_alone(monkeypatch, environ):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)

    def look():
        dist.new_group([0, 1])
        dist.barrier()
        found = listening({os.getpid(), os.getppid()})
        dist.barrier()
        return found

    for rank, found in enumerate(launch(look, world_size=2)):
        addresses = set().union(*found.values())
        assert addresses, f"rank {rank} listens nowhere: what is looked at is not what listens"
        assert addresses <= LOOPBACK


@linux
def test_trap_5_the_test_sees_a_socket_that_listens_everywhere():
    with socket.create_server(("0.0.0.0", 0)):
        assert listening({os.getpid()})[os.getpid()] >= {"00000000"}


def unshare(*options):
    """A command that runs another in namespaces of its own; skips where that is not allowed."""
    command = ["unshare", *options]
    try:
        subprocess.run([*command, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs the right to make namespaces")
    return command


TOTAL = PREAMBLE + "print(launch(total, world_size=int(sys.argv[1])))\n"


def test_trap_5_and_6_odd_host_name_little_shared_memory_read_only_directory_8_ranks(tmp_path):
    mounts = "mount -t tmpfs -o size=64m tmpfs /dev/shm && mount -t tmpfs -o ro tmpfs work && cd work"
    (tmp_path / "work").mkdir()
    here = f"hostname odd.invalid && {mounts}"
    command = (*unshare("--uts", "--mount"), "sh", "-c", here + ' && exec "$0" "$@"', sys.executable)
    source = (
        TOTAL + "print(len(launch(lambda: torch.zeros(30_000_000), world_size=1)[0]))\nprint(os.uname().nodename)\n"
    )
    source += "try:\n    open('x', 'w')\nexcept OSError as error:\n    print(error.strerror)\n"
    out = run_script(tmp_path, source, "8", command=command)
    totals = "".join(f"rank {rank}: 8.0\n" for rank in range(8))
    assert out == totals + "30000000\nodd.invalid\nRead-only file system\n"


# Trap 8: no fork.


def test_trap_8_spawned_ranks_behave_the_same(monkeypatch):
    monkeypatch.setenv("DDPKIT_START_METHOD", "spawn")
    before = set(psutil.Process().children(recursive=True))

    def work(n):
        print("from", dist.get_rank())
        if n == 0 and dist.get_rank() == 1:
            raise ValueError("no")
        return add() * n

    run = launch(work, 3, world_size=2)
    assert (list(run), run.output) == ([6.0, 6.0], ["from 0\n", "from 1\n"])
    with pytest.raises(LaunchError, match="rank 1 raised ValueError: no"):
        launch(work, 0, world_size=2)
    left = {process for process in psutil.Process().children(recursive=True) if process.name() != "python"} - before
    assert wait_until(lambda: not any("spawn_main" in " ".join(p.cmdline()) for p in left) or None, 5)


def test_trap_8_which_systems_spawn(monkeypatch):
    monkeypatch.delenv("DDPKIT_START_METHOD", raising=False)
    for platform, method in (("linux", "forkserver"), ("darwin", "spawn"), ("win32", "spawn")):
        monkeypatch.setattr(sys, "platform", platform)
        assert processes.start_method() == method


# Traps 18 and 20: interrupts.

WORK = (
    PREAMBLE
    + """
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

def work(fn):
    os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "1000")
    print("ready", flush=True)
    fn()
"""
)


def test_trap_18_and_20_interrupts(tmp_path):
    """Once, and twice in a row: KeyboardInterrupt arrives, and nothing is left of the ranks and their children."""
    source = WORK + (
        """
import psutil
for fn in WORK:
    try:
        launch(work, fn, world_size=2, live=True, hang_after=1e6)
    except KeyboardInterrupt:
        for _ in range(2):
            try:
                print("interrupted", fn.__name__, flush=True)
                time.sleep(0.1)
            except KeyboardInterrupt:
                pass
    print([p for p in psutil.Process().children(recursive=True) if p.name() == "sleep"])
print(list(launch(total, world_size=2)))
"""
    )
    names = ["hang_in_a_collective", "hold_the_lock_in_c", "compute", "sleep", "ignore_signals"]
    with Script(tmp_path, source) as script:
        for number, name in enumerate(names):
            assert {script.line(), script.line()} == {"rank 0 | ready", "rank 1 | ready"}
            time.sleep(0.1)
            for _ in range(1 + number % 2):
                script.interrupt_group()
                time.sleep(0.005)
            assert script.line() == f"interrupted {name}"
            assert script.line() == f"interrupted {name}"
            assert script.line() == "[]"
        code, out, err = script.result()
        assert (code, out, err) == (0, "[2.0, 2.0]\n", "")
        assert script.gone_within(2) == []


def test_trap_20_an_interrupt_while_ranks_start(tmp_path):
    """At any moment of the start, also while the fork server imports torch."""
    source = PREAMBLE + (
        """
print("ready", flush=True)
try:
    while True:
        launch(total, world_size=4)
except KeyboardInterrupt:
    print("interrupted")
print(list(launch(total, world_size=2)))
"""
    )
    for delay in (0.05, 1.8):
        with Script(tmp_path, source) as script:
            assert script.line() == "ready"
            time.sleep(delay)
            script.interrupt_group()
            code, out, err = script.result()
            assert (code, out, err) == (0, "interrupted\n[2.0, 2.0]\n", ""), delay
            assert script.gone_within(2) == []


@pytest.mark.skipif(os.name != "posix", reason="no process groups here")
def test_trap_20_ranks_ignore_ctrl_c_and_lead_their_own_group():
    def look():
        return signal.getsignal(signal.SIGINT) == signal.SIG_IGN, os.getpgrp() == os.getpid()

    assert list(launch(look, world_size=2)) == [(True, True)] * 2


def test_interrupts_are_deferred_not_lost():
    with pytest.raises(KeyboardInterrupt):
        deferred()


def deferred():
    with processes.interrupts_deferred():
        os.kill(os.getpid(), signal.SIGINT)
        done = threading.Event()
        done.wait(0.05)
    raise AssertionError("the interrupt was lost")


# Trap 21: no orphans.


@linux
@pytest.mark.parametrize(
    ("ending", "start_method", "world_size"),
    [(signal.SIGKILL, "forkserver", 5), (signal.SIGTERM, "forkserver", 2), (signal.SIGKILL, "spawn", 2)],
)
def test_trap_21_no_rank_outlives_the_notebook(tmp_path, ending, start_method, world_size):
    """The ranks of a launch, ranks that stay, and children of both."""
    source = WORK + (
        """
from ddpkit.runtime.live import LiveWorld
world = LiveWorld(1)
world.run("import os; os.spawnlp(os.P_NOWAIT, 'sleep', 'sleep', '1000')", [0])
launch(lambda: work(WORK[dist.get_rank()]), world_size=int(sys.argv[1]), live=True)
"""
    )
    with Script(tmp_path, source, str(world_size), DDPKIT_START_METHOD=start_method) as script:
        assert {script.line() for _ in range(world_size)} == {f"rank {rank} | ready" for rank in range(world_size)}
        time.sleep(0.1)
        assert sum(process.name() == "sleep" for process in script.family()) == world_size + 1
        script.signal(ending)
        script.process.wait(5)
        assert script.gone_within(2) == []


@linux
@pytest.mark.parametrize("delay", [0.1, 1.6], ids=["the server too", "ranks"])
def test_trap_21_the_notebook_dies_while_ranks_start(tmp_path, delay):
    """Who is importing torch at that moment notices afterwards, hence the long wait."""
    source = PREAMBLE + "print('ready', flush=True)\nwhile True:\n    launch(total, world_size=2)\n"
    with Script(tmp_path, source) as script:
        assert script.line() == "ready"
        time.sleep(delay)
        script.signal(signal.SIGKILL)
        script.process.wait(5)
        assert script.gone_within(10) == []


@linux
def test_folders_of_killed_notebooks_are_swept(tmp_path, monkeypatch):
    gone = subprocess.Popen(["true"])
    gone.wait()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for owner in (gone.pid, os.getpid(), 1, "x"):
        (tmp_path / f"ddpkit-{owner}-abc").mkdir()
    processes._sweep.__wrapped__()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        f"ddpkit-{owner}-abc" for owner in (os.getpid(), 1, "x")
    )


# The notebook's own multiprocessing goes on as before.


def test_a_pool_of_the_user_beside_launch(tmp_path):
    source = PREAMBLE + (
        """
import multiprocessing
def double(x): return 2 * x
if __name__ == "__main__":
    print(launch(total, world_size=1))
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(pool.map(double, [1, 2]))
    print(launch(total, world_size=1))
"""
    )
    if not hasattr(os, "fork"):
        pytest.skip("no fork here")
    assert run_script(tmp_path, source) == "rank 0: 1.0\n[2, 4]\n[2, 4]\nrank 0: 1.0\n"


# What ranks import is imported once.


def imported_before_training() -> bool:
    was_there = "torch._dynamo" in sys.modules
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)  # imports it
    return was_there


@linux
def test_slow_imports_are_made_once():
    """A rank that makes an optimizer imports for a second or two; later ranks, from a new server, begin with that."""
    if processes.start_method() != "forkserver":
        pytest.skip("no fork server here")
    processes._servers()[0] = processes._new_server(processes.PRELOAD)  # as in a fresh notebook
    assert list(launch(imported_before_training, world_size=1)) == [False]
    first = processes._servers()[0]
    assert list(launch(imported_before_training, world_size=2)) == [True, True]
    assert processes._servers()[0] is first
    assert launch(lambda: "torch._dynamo" in sys.modules, world_size=1)[0] is True


@linux
def test_the_server_that_knew_less_ends():
    if processes.start_method() != "forkserver":
        pytest.skip("no fork server here")
    launch(print, world_size=1)
    old = processes._servers()[0]._forkserver_pid
    processes.preload(["colorsys"])
    assert processes._servers()[0]._forkserver_pid != old
    assert wait_until(lambda: not psutil.pid_exists(old), 10)
    assert launch(lambda: "colorsys" in sys.modules, world_size=1)[0] is True
