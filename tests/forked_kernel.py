"""Kernels for notebooks in tests, forked from the server that starts the tests' ranks.

It has imported what each kernel and its own server would, five seconds of CPU time each.
`make test-all` starts kernels as Jupyter does.
"""

import contextlib
import itertools
import multiprocessing
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker

from ipykernel.kernelapp import IPKernelApp
from IPython.core.interactiveshell import InteractiveShell
from jupyter_client.connect import LocalPortCache
from jupyter_client.provisioning import local_provisioner

from ddpkit.bench import interleave
from ddpkit.lesson import page, widgets
from ddpkit.runtime import processes

ROUNDS = re.compile(r"\b(rounds|tries)=\d+")  # in a cell that measures


class ForkedKernel:
    """What jupyter_client asks of a `subprocess.Popen`."""

    stdin = stdout = stderr = None

    def __init__(self, command: list[str], cwd: str, env: dict[str, str], **_streams):
        self._process = multiprocessing.get_context("forkserver").Process(
            target=run_kernel, args=(command[command.index("-f") + 1], cwd, env)
        )
        with processes._starting, processes._our_way():
            self._process.start()
        self.pid = self._process.pid
        while os.getpgid(self.pid) != self.pid:  # jupyter_client signals the group
            time.sleep(0.01)

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int | None:
        self._process.join()
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def run_kernel(connection_file: str, cwd: str, env: dict[str, str]) -> None:
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the server holds it back
    threading.Thread(target=end_with_parent, daemon=True).start()
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    server = forkserver._forkserver  # that this process came from: its ranks do, too
    server.ensure_running = resource_tracker.ensure_running
    processes._server = lambda: server
    # Neither measurements nor pictures are compared: few rounds, and only pictures that are stored.
    race, interleave.WARM_UP = interleave.race, 0
    interleave.race = lambda make, rounds, *options, **named: race(make, 1, *options, **named)
    transformed = InteractiveShell.transform_cell
    InteractiveShell.transform_cell = lambda *cell: ROUNDS.sub(r"\1=2", transformed(*cell))
    page.Picture.svg, widgets.inline = b"", lambda picture: ""
    sys.argv = ["ipykernel_launcher", "-f", connection_file]
    IPKernelApp.launch_instance()


def end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def own_ports() -> Iterator[int]:
    """Ports for this worker's kernels, which neither the system nor another worker hands out.

    Jupyter asks the system for free ports, and releases them before the kernel binds them: in
    between a rank may get one.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    first = 10_000 + 800 * (worker % 12)
    return (first + number % 800 for number in itertools.count(os.getpid()))


def is_free(ip: str, port: int) -> bool:
    with socket.socket() as tried, contextlib.suppress(OSError):
        tried.bind((ip, port))
        return True
    return False


def use() -> None:
    """From now on, kernels that this process starts are forked."""
    local_provisioner.launch_kernel = ForkedKernel


def use_own_ports() -> None:
    """From now on, kernels that this process starts, in whichever way, have ports of their own."""
    ports = own_ports()
    LocalPortCache.find_available_port = lambda _, ip: next(p for p in ports if is_free(ip, p))
