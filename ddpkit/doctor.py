"""What this machine can run, and how to mend what it can't: `python -m ddpkit.doctor`.

The functions that judge take plain values and return a `Finding`, so that a test can play any
machine. Works without Jupyter, starts CUDA only in a process of its own, and prints no paths:
notebook 00 stores the table.
"""

import contextlib
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

OK, NOTE, PROBLEM = "ok", "note", "PROBLEM"

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH, TOO_NEW_TORCH = (2, 11), (2, 15)
NCCL_SHARES_A_GPU = (2, 30)  # NCCL_MULTI_RANK_GPU_ENABLE
GIB = 2**30
GET_TORCH = "install torch from pytorch.org"
PACKAGES = {  # what each is for
    "jupyterlab": "the notebooks",
    "ipywidgets": "players and calculators",
    "matplotlib": "figures",
    "nbval": "tests of the notebooks",
}


@dataclass(frozen=True)
class Finding:
    """OK: nothing to do. NOTE: the course runs, something in it won't. PROBLEM: it can't run."""

    name: str
    value: str
    level: str = OK
    remedy: str = ""


@dataclass(frozen=True)
class Report:
    """The findings; printed, the report itself, so that a notebook cell shows it."""

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        return all(finding.level != PROBLEM for finding in self.findings)

    def __repr__(self) -> str:
        """A table, remedies below their finding, and one closing sentence."""
        column, lines = max((len(finding.name) for finding in self.findings), default=0), []
        for finding in self.findings:
            head = f"{finding.level:<7}  {finding.name:<{column}}  "
            lines += wrap(head, finding.value) or [head.rstrip()]
            lines += wrap(f"{' ' * len(head)}-> ", finding.remedy)
        problems = [finding.name for finding in self.findings if finding.level == PROBLEM]
        mend = f"To be mended first: {', '.join(problems)}."
        return "\n".join([*lines, "", mend if problems else "This machine can run the course."])


def report() -> Report:
    """Examine this machine; takes a few seconds, most of them for starting two real ranks."""
    return Report(tuple(examine()))


def examine() -> Iterator[Finding]:
    yield judge_python(sys.version_info[:3], platform.system(), platform.machine())
    try:
        import torch
        import torch.distributed as dist
    except Exception as error:  # OSError, ImportError, RuntimeError: whatever keeps it from loading
        yield Finding("torch", f"can't be imported: {error}", PROBLEM, "make lab")
        return
    from .runtime.backends import nccl_version

    yield judge_torch(torch.__version__, dist.is_available())
    yield judge_cores(count_cores())
    yield judge_memory(*memory_bytes())
    yield judge_gpus(look_at_gpus(), torch.backends.mps.is_available())
    yield judge_nccl(nccl_version(), torch.cuda.device_count())
    yield judge_gloo(dist.is_available() and dist.is_gloo_available())
    yield loopback()
    yield judge_start_method(multiprocessing.get_all_start_methods())
    yield judge_shared_memory(shm_bytes())
    yield judge_temp(shutil.disk_usage(tempfile.gettempdir()).free)
    yield two_ranks()
    yield judge_torchrun(shutil.which("torchrun"))
    yield judge_triton(importlib.util.find_spec("triton") is not None, torch.cuda.device_count())
    for name, purpose in PACKAGES.items():
        yield package(name, purpose)


# What this machine has. None means: can't tell.


def count_cores() -> float | None:
    """Cores this process may use: its affinity, and the quota of the container it runs in."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS, Windows
        cores = os.cpu_count()
    return min((limit for limit in (cores, cgroup_cores()) if limit), default=None)


def cgroup_cores(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    with contextlib.suppress(OSError, ValueError):  # "max": no limit
        quota, period = (root / "cpu.max").read_text().split()
        return int(quota) / int(period)
    return None


def memory_bytes() -> tuple[int | None, int | None]:
    """(total, free) of this machine, or of the container where that is less."""
    total = free = None
    with contextlib.suppress(OSError, AttributeError, ValueError):  # Windows has no sysconf
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError):
        free = meminfo_available(Path("/proc/meminfo").read_text())
    limit, used = cgroup_memory()
    if limit and (total is None or limit < total):
        return limit, min(limit - (used or 0), free or limit)
    return total, free


def meminfo_available(meminfo: str) -> int | None:
    found = re.search(r"MemAvailable:\s+(\d+) kB", meminfo)
    return int(found[1]) * 1024 if found else None


def cgroup_memory(root: Path = Path("/sys/fs/cgroup")) -> tuple[int | None, int | None]:
    """(limit, used) of the container."""
    with contextlib.suppress(OSError, ValueError):
        return tuple(int((root / f"memory.{what}").read_text()) for what in ("max", "current"))
    return None, None


def look_at_gpus() -> list[dict] | str:
    """Names and sizes of the GPUs, or what is wrong; a child asks, for that starts CUDA."""
    import torch

    if not torch.cuda.device_count():  # asks the driver, without starting CUDA
        return []
    code = [sys.executable, "-c", LOOK]
    try:
        child = subprocess.run(code, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        return "no answer within two minutes"
    if child.returncode:
        return (child.stderr.strip() or f"exit code {child.returncode}").splitlines()[-1]
    return json.loads(child.stdout.splitlines()[-1])


LOOK = """
import json, torch
gpus = []
for index in range(torch.cuda.device_count()):
    torch.ones(1, device=f"cuda:{index}").item()
    found = torch.cuda.get_device_properties(index)
    capability = f"{found.major}.{found.minor}"
    gpus.append({"name": found.name, "bytes": found.total_memory, "capability": capability})
print(json.dumps(gpus))
"""


def shm_bytes() -> int | None:
    try:
        return shutil.disk_usage("/dev/shm").total
    except OSError:
        return None


def loopback(address: str = "127.0.0.1") -> Finding:
    try:
        with (
            socket.create_server((address, 0)) as server,
            socket.create_connection(server.getsockname(), timeout=5) as client,
        ):
            client.sendall(b"x")
    except OSError as error:
        remedy = "ranks talk over 127.0.0.1: let the firewall or VPN allow it"
        return Finding("loopback", str(error), PROBLEM, remedy)
    return Finding("loopback", f"{address} answers")


def two_ranks() -> Finding:
    """Two real processes and one all-reduce between them, started the way every notebook does."""
    from ddpkit import launch

    try:
        run = launch(sum_of_ranks, world_size=2, timeout=120)
    except Exception as error:  # whatever it is, the reader must see it as a finding
        said = [*str(error).strip().splitlines(), ""][0]
        what = f"{type(error).__name__}: {said}"
        return Finding("two ranks", what, PROBLEM, "see the findings above, then try again")
    if list(run) != [3.0, 3.0]:
        remedy = "please report this, with this table"
        return Finding("two ranks", f"1 + 2 gave {list(run)}", PROBLEM, remedy)
    took = f"in {run.seconds:.2f} s (later ones are quicker)"
    return Finding("two ranks", f"all-reduce of 1 and 2 gave 3 on both, {took}; {run.backend}")


def sum_of_ranks() -> float:
    import torch
    import torch.distributed as dist

    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    x = torch.tensor([dist.get_rank() + 1.0], device=device)
    dist.all_reduce(x)
    return x.item()


# What it means for the course


def judge_python(version: tuple[int, ...], system: str, machine: str) -> Finding:
    value = f"{'.'.join(map(str, version))} on {system} {machine}"
    if version >= OLDEST_PYTHON:
        return Finding("Python", value)
    remedy = "install Python 3.11 or newer, then: make lab PYTHON=python3.12"
    return Finding("Python", value, PROBLEM, remedy)


def judge_torch(version: str, distributed: bool) -> Finding:
    number = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if not OLDEST_TORCH <= number < TOO_NEW_TORCH:
        return Finding("torch", version, PROBLEM, 'pip install "torch>=2.11,<2.15"')
    if not distributed:
        return Finding("torch", f"{version}, built without torch.distributed", PROBLEM, GET_TORCH)
    return Finding("torch", version)


def judge_cores(cores: float | None) -> Finding:
    if cores is None:
        return Finding("cores", "can't tell", NOTE)
    if cores < 2:
        remedy = "everything runs, but ranks take turns: expect no speed-up anywhere"
        return Finding("cores", f"{cores:g}", NOTE, remedy)
    return Finding("cores", f"{cores:g}")


def judge_memory(total: int | None, free: int | None) -> Finding:
    if total is None:
        return Finding("memory", "can't tell", NOTE)
    value = gib(total) + (f", {gib(free)} free" if free is not None else "")
    if (total if free is None else free) < 2 * GIB:
        remedy = "four ranks need about 2 GiB: close other programs or kernels"
        return Finding("memory", value, NOTE, remedy)
    return Finding("memory", value)


def judge_gpus(gpus: list[dict] | str, apple: bool) -> Finding:
    if isinstance(gpus, str):
        remedy = "check nvidia-smi and the driver; or set CUDA_VISIBLE_DEVICES= to go without"
        return Finding("GPUs", f"there, but not working: {gpus}", NOTE, remedy)
    if gpus:
        each = [f"{g['name']} ({gib(g['bytes'], 0)}, capability {g['capability']})" for g in gpus]
        return Finding("GPUs", f"{len(gpus)}: {', '.join(each)}")
    what = "Apple's, which torch.distributed can't use" if apple else "none"
    return Finding("GPUs", f"{what}: the course runs on the CPU", NOTE)


def judge_nccl(version: tuple[int, ...], gpus: int) -> Finding:
    if not gpus:
        return Finding("NCCL", "not needed without a GPU")
    if not version:
        return Finding("NCCL", "missing", NOTE)
    value = f"{'.'.join(map(str, version))}: a GPU for each rank"
    if version >= NCCL_SHARES_A_GPU:
        return Finding("NCCL", f"{value}, or several ranks on one")
    remedy = "more ranks than GPUs talk over Gloo; with NCCL 2.30 or newer several share one GPU"
    return Finding("NCCL", value, NOTE, remedy)


def judge_gloo(available: bool) -> Finding:
    if available:
        return Finding("Gloo", "available: any number of ranks on the CPU")
    return Finding("Gloo", "missing in this torch", PROBLEM, GET_TORCH)


def judge_start_method(methods: list[str]) -> Finding:
    if "forkserver" in methods:
        return Finding("new ranks", "from a fork server: about 0.1 s")
    remedy = "each launch takes seconds; under WSL or Linux it takes about 0.1 s"
    return Finding("new ranks", "by spawn", NOTE, remedy)


def judge_shared_memory(size: int | None) -> Finding:
    if size is None:
        return Finding("shared memory", "no /dev/shm on this system")
    if size < GIB / 4:
        remedy = "enough for the course; for your own work start the container with --shm-size=2g"
        return Finding("shared memory", f"{size / 2**20:.0f} MiB in /dev/shm", NOTE, remedy)
    return Finding("shared memory", f"{gib(size)} in /dev/shm")


def judge_temp(free: int) -> Finding:
    if free < GIB / 10:
        remedy = "make room, or set TMPDIR to a folder that has some"
        return Finding("temp space", f"{gib(free)} free", PROBLEM, remedy)
    return Finding("temp space", f"{gib(free)} free")


def judge_torchrun(path: str | None) -> Finding:
    other = "not on PATH; the same thing is: python -m torch.distributed.run"
    return Finding("torchrun", "on PATH" if path else other)


def judge_triton(present: bool, gpus: int) -> Finding:
    if present:
        how = "available" if gpus else "available, through its interpreter (no GPU)"
        return Finding("Triton", how)
    missing = "missing: its kernels are read, not run"
    return Finding("Triton", missing, NOTE, "pip install triton (Linux only)")


def package(name: str, purpose: str) -> Finding:
    try:
        return Finding(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        missing = f"missing: needed for {purpose} only"
        return Finding(name, missing, NOTE, 'pip install -e ".[course,test]"')


def gib(nbytes: int, digits: int = 1) -> str:
    return f"{nbytes / GIB:.{digits}f} GiB"


# How it is said


def wrap(head: str, text: str) -> list[str]:
    indent = " " * len(head)
    return textwrap.wrap(text, 96, initial_indent=head, subsequent_indent=indent)


def main() -> int:
    result = report()
    print(result)
    return 0 if result.ok else 1


if __name__ == "__main__":
    # Through the import, so that ranks see functions of ddpkit.doctor and not of __main__.
    from ddpkit import doctor

    sys.exit(doctor.main())
