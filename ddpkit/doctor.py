"""Examine what this machine can run, and how to mend the rest: `python -m ddpkit.doctor`.

It works without Jupyter, and starts CUDA only in other processes, so that the caller's stays
without it. Findings name no folder of the user's, since notebook 00 stores them; errors may.
"""

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import socket
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .runtime.backends import SHARES_A_GPU, UPGRADE, nccl_version
from .runtime.launch import launch
from .runtime.machine import (
    count_cores,
    look_at_gpus,
    memory_bytes,
    torch_requirement,
    untried_torch,
)
from .runtime.processes import start_method

OK, NOTE, PROBLEM = "ok", "note", "PROBLEM"
OLDEST_PYTHON = (3, 11)
GIB = 2**30
PACKAGES = {"jupyterlab": "the notebooks", "ipywidgets": "players and calculators"}
PACKAGES |= {"matplotlib": "figures", "nbval": "tests of the notebooks"}  # {package: its use}
NO_COURSE_WITHOUT = ("Python", "Gloo", "loopback", "temp space", "two ranks")
REMEDIES = {
    "Python": "install Python 3.11 or newer, then: make lab PYTHON=python3.12",
    "torch": f'pip install "{torch_requirement()}"',
    "cores": "everything runs, but ranks take turns: expect no speed-up anywhere",
    "memory": "four ranks need about 2 GiB: close other programs or kernels",
    "GPUs": "check nvidia-smi and the driver; or set CUDA_VISIBLE_DEVICES= to go without",
    "NCCL": "more ranks than GPUs talk over Gloo; with NCCL 2.30 or newer, several on one GPU over "
    f"NCCL: {UPGRADE}",
    "Gloo": "install torch from pytorch.org",
    "loopback": "ranks talk over 127.0.0.1: let the firewall or VPN allow it",
    "new ranks": "each launch takes seconds; under WSL or Linux it takes about 0.1 s",
    "shared memory": "for your own work, start the container with --shm-size=2g",
    "temp space": "make room, or set TMPDIR to a folder that has some",
    "two ranks": "see the findings above, then try again",
    "Triton": "pip install triton (Linux only)",
} | dict.fromkeys(PACKAGES, 'pip install -e ".[course,test]"')


@dataclass(frozen=True)
class Finding:
    """A finding about one part of this machine, such as "torch" or "memory".

    name: the part, a key of `REMEDIES`, or "torchrun".
    value: what was found, for people.
    level: OK (there is nothing to do), NOTE (the course runs, but something in it doesn't, or not
        as shown) or PROBLEM (the course can't run).
    remedy: what to do about it; "" if there is nothing to do, or nothing that can be done.
    """

    name: str
    value: str
    level: str = OK
    remedy: str = ""


class Report(list[Finding]):
    """A list of all findings, which prints as a verdict and a table."""

    @property
    def problems(self) -> list[str]:
        """Return the names of the findings that keep the course from running."""
        return [finding.name for finding in self if finding.level == PROBLEM]

    def __repr__(self) -> str:
        """Return the verdict, then a table of the findings with each remedy below its finding."""
        verdict = "This machine can run the course."
        if self.problems:
            verdict = f"To be mended first: {', '.join(self.problems)}."
        column, lines = max(len(finding.name) for finding in self), [verdict, ""]
        for finding in self:
            head = f"{finding.level:<7}  {finding.name:<{column}}  "
            lines += wrap(head, finding.value) + wrap(f"{' ' * len(head)}-> ", finding.remedy)
        return "\n".join(lines)


def wrap(head: str, text: str) -> list[str]:
    """Return `text` as lines of at most 72 columns, the first after `head`; none if it is empty."""
    return textwrap.wrap(text, 72, initial_indent=head, subsequent_indent=" " * len(head))


def judge(name: str, value: str, fine: bool = True) -> Finding:
    """Return the finding about a part; unless it is `fine`, with its remedy from `REMEDIES`.

    If it isn't fine, the level is PROBLEM for the parts in `NO_COURSE_WITHOUT`, and NOTE for
    others.
    """
    if fine:
        return Finding(name, value)
    return Finding(name, value, PROBLEM if name in NO_COURSE_WITHOUT else NOTE, REMEDIES[name])


def report() -> Report:
    """Examine this machine and return the findings, as a list that prints as a table.

    It takes a few seconds, most of them for starting two real ranks; with a broken GPU, minutes.
    """
    return Report(examine())


def examine() -> Iterator[Finding]:
    """Yield a finding for each part of this machine: Python, torch, cores, memory, ..."""
    value = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield judge("Python", value, sys.version_info >= OLDEST_PYTHON)
    version, untried = torch.__version__, untried_torch(torch.__version__)
    yield judge("torch", f"{version}, {untried}" if untried else version, not untried)
    cores = count_cores()
    yield judge("cores", f"{cores:g}", cores >= 2)
    total, free = memory_bytes()
    value = f"{gib(total)}, {gib(free)} free" if total else "can't tell"
    yield judge("memory", value, not total or free >= 2 * GIB)
    gpus, version = torch.cuda.device_count(), nccl_version()  # the driver says, not CUDA
    seen = look_at_gpus() if gpus else []
    yield judge_gpus(seen)
    yield judge_nccl(gpus, version)
    gloo = dist.is_gloo_available()
    value = "available: any number of ranks on the CPU" if gloo else "missing in this torch"
    yield judge("Gloo", value, gloo)
    yield loopback()
    forks = start_method() == "forkserver"
    value = "from a fork server: about 0.1 s" if forks else "by spawn"
    yield judge("new ranks", value, forks)
    if os.path.exists("/dev/shm"):
        size = shutil.disk_usage("/dev/shm").total
        yield judge("shared memory", f"{gib(size)} in /dev/shm", size >= GIB / 4)
    free = shutil.disk_usage(tempfile.gettempdir()).free
    yield judge("temp space", f"{gib(free)} free", free >= GIB / 10)
    yield two_ranks()
    other = "not on PATH; the same thing is: python -m torch.distributed.run"
    yield judge("torchrun", "on PATH" if shutil.which("torchrun") else other)
    value = "available" if gpus else "available, through its interpreter (no GPU)"
    if re.search(r"capability [1-7]\.", str(seen)):
        value += ", but ddpkit's kernels want a GPU of capability 8.0"
    found = importlib.util.find_spec("triton") is not None
    yield judge("Triton", value if found else "missing: its kernels are read, not run", found)
    for name, purpose in PACKAGES.items():
        try:
            yield judge(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield judge(name, f"missing: needed for {purpose} only", fine=False)


def judge_gpus(gpus: list[str] | str) -> Finding:
    """Return the finding about GPUs.

    gpus: a line for each GPU, none if there are none (a NOTE), or the text of the error with which
        trying them failed, as `look_at_gpus` returns it.
    """
    if isinstance(gpus, str):
        return judge("GPUs", f"there, but not working: {gpus}", fine=False)
    if gpus:
        return judge("GPUs", f"{len(gpus)}: {', '.join(gpus)}")
    apple = torch.backends.mps.is_available()
    what = "Apple's, which torch.distributed can't use" if apple else "none"
    return Finding("GPUs", f"{what}: the course runs on the CPU", NOTE)


def judge_nccl(gpus: int, version: tuple[int, ...]) -> Finding:
    """Return the finding about NCCL. gpus: how many there are. version: NCCL's; () without it."""
    if not gpus:
        return judge("NCCL", "not needed without a GPU")
    if not version:
        return Finding("NCCL", "missing in this torch: ranks run on the CPU", NOTE)
    several = version >= SHARES_A_GPU
    on_one = ", or several ranks on one" if several else ""
    return judge("NCCL", f"{'.'.join(map(str, version))}: a GPU for each rank{on_one}", several)


def loopback(address: str = "127.0.0.1") -> Finding:
    """Return the finding whether this process can connect to a socket of its own at `address`."""
    try:
        with socket.create_server((address, 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        return judge("loopback", str(error), fine=False)
    return judge("loopback", f"{address} answers")


def two_ranks() -> Finding:
    """Run one all-reduce between two processes; return the finding whether it gave the sum.

    The processes are started as every notebook starts them. If that raises, the finding's value is
    the exception's name and its first line.
    """
    try:
        run = launch(sum_of_ranks, world_size=2, timeout=120)
    except Exception as error:  # whatever it is, the reader must see it as a finding
        said = [*str(error).strip().splitlines(), ""][0]
        return judge("two ranks", f"{type(error).__name__}: {said}", fine=False)
    if list(run) != [3.0, 3.0]:
        return judge("two ranks", f"1 + 2 gave {list(run)}", fine=False)
    took = f"in {run.seconds:.2f} s (later ones are quicker)"
    return judge("two ranks", f"all-reduce of 1 and 2 gave 3 on both, {took}; {run.backend}")


def sum_of_ranks() -> float:
    """Return the sum of rank + 1 over all ranks, by an all-reduce; `two_ranks` runs it in each."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    x = torch.tensor([dist.get_rank() + 1.0], device=device)
    dist.all_reduce(x)
    return x.item()


def gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f} GiB"


def main() -> int:
    """Print the report; return the exit code, 1 if the course can't run here and 0 if it can."""
    result = report()
    print(result)
    return 1 if result.problems else 0


if __name__ == "__main__":
    from ddpkit import doctor  # ranks can import its functions, but not those of __main__

    sys.exit(doctor.main())
