"""What this machine can run, in plain words, and how to mend what it can't: `python -m ddpkit.doctor`.

The functions that judge take plain values and return a `Finding`, so that a test can play any machine. Works without
Jupyter, starts CUDA only in a process of its own, and prints no paths: notebook 00 stores the table.
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


@dataclass(frozen=True)
class Finding:
    name: str
    value: str
    level: str = OK  # OK: nothing to do. NOTE: the course runs, something in it won't. PROBLEM: the course can't run.
    remedy: str = ""


@dataclass(frozen=True)
class Report:
    """The findings; its text is the report itself, so that a notebook cell shows it."""

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        return all(finding.level != PROBLEM for finding in self.findings)

    def __repr__(self) -> str:
        return render(self.findings)


def report() -> Report:
    """Examine this machine; takes a few seconds, most of them for starting two real ranks."""
    return Report(tuple(examine()))


def examine() -> Iterator[Finding]:
    yield judge_python(sys.version_info[:3], platform.system(), platform.machine())
    try:
        import torch
        import torch.distributed as dist
    except Exception as error:  # a torch that doesn't load raises OSError, ImportError, RuntimeError ...
        yield Finding("torch", f"can't be imported: {error}", PROBLEM, "make lab, or pip install -e .")
        return
    from .runtime.backends import nccl_version

    yield judge_torch(torch.__version__, dist.is_available())
    yield judge_cores(count_cores())
    yield judge_memory(*memory_bytes())
    yield judge_gpus(look_at_gpus(), torch.backends.mps.is_available())
    yield judge_nccl(nccl_version(), torch.cuda.device_count())
    yield judge_gloo(dist.is_available() and dist.is_gloo_available())
    yield judge_loopback(loopback_error())
    yield judge_start_method(multiprocessing.get_all_start_methods())
    yield judge_shared_memory(shm_bytes())
    yield judge_temp(shutil.disk_usage(tempfile.gettempdir()).free)
    yield two_ranks()
    yield judge_torchrun(shutil.which("torchrun"))
    yield judge_triton(importlib.util.find_spec("triton") is not None, torch.cuda.device_count())
    for package, purpose in (
        ("jupyterlab", "the notebooks"),
        ("ipywidgets", "players and calculators"),
        ("matplotlib", "figures"),
        ("nbval", "tests of the notebooks"),
    ):
        yield judge_package(package, installed_version(package), purpose)


# What this machine has. None means: can't tell.


def count_cores() -> float | None:
    """Cores this process may use: its affinity, and the quota of the container it runs in."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS, Windows
        cores = os.cpu_count()
    return min((limit for limit in (cores, cgroup_cores()) if limit), default=None)


def cgroup_cores(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    with contextlib.suppress(OSError, ValueError):  # version 2; "max" means no limit
        quota, period = (root / "cpu.max").read_text().split()
        return int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):  # version 1; -1 means no limit
        quota = int((root / "cpu/cpu.cfs_quota_us").read_text())
        if quota > 0:
            return quota / int((root / "cpu/cpu.cfs_period_us").read_text())
    return None


def memory_bytes() -> tuple[int | None, int | None]:
    """(total, free) of this machine, or of the container where that is less."""
    total = free = None
    with contextlib.suppress(OSError, AttributeError, ValueError):  # Windows has no sysconf
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError):
        free = meminfo_available(Path("/proc/meminfo").read_text())
    if total is None:
        with contextlib.suppress(ImportError):
            import psutil  # comes with ipykernel

            total, free = psutil.virtual_memory()[:2]
    limit, used = cgroup_memory()
    if limit and (total is None or limit < total):
        return limit, min(limit - (used or 0), free or limit)
    return total, free


def meminfo_available(meminfo: str) -> int | None:
    found = re.search(r"MemAvailable:\s+(\d+) kB", meminfo)
    return int(found[1]) * 1024 if found else None


def cgroup_memory(root: Path = Path("/sys/fs/cgroup")) -> tuple[int | None, int | None]:
    """(limit, used) of the container."""
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):
            return int((root / limit).read_text()), int((root / used).read_text())
    return None, None


def look_at_gpus() -> list[dict] | str:
    """Names and sizes of the GPUs, or what is wrong with them.

    Asked in a child process that puts a number on each, because asking takes CUDA into use, here for good.
    """
    import torch

    if not torch.cuda.device_count():  # asks the driver, without starting CUDA
        return []
    code = """
        import json, torch
        gpus = []
        for index in range(torch.cuda.device_count()):
            torch.ones(1, device=f"cuda:{index}").item()
            properties = torch.cuda.get_device_properties(index)
            gpus.append({"name": properties.name, "bytes": properties.total_memory,
                         "capability": f"{properties.major}.{properties.minor}"})
        print(json.dumps(gpus))
    """
    try:
        child = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120, check=False
        )
    except subprocess.TimeoutExpired:
        return "no answer within two minutes"
    if child.returncode:
        return child.stderr.strip().splitlines()[-1] if child.stderr.strip() else f"exit code {child.returncode}"
    return json.loads(child.stdout.splitlines()[-1])


def loopback_error() -> str:
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=5) as client,
        ):
            client.sendall(b"x")
    except OSError as error:
        return str(error)
    return ""


def shm_bytes() -> int | None:
    try:
        return shutil.disk_usage("/dev/shm").total
    except OSError:
        return None


def installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def two_ranks() -> Finding:
    """Two real processes and one all-reduce between them, started the way every notebook does."""
    name = "two ranks"
    try:
        from ddpkit import launch

        run = launch(_sum_of_ranks, world_size=2, timeout=120)
    except Exception as error:  # whatever it is, the reader must see it as a finding
        said = str(error).strip().splitlines() or [""]
        return Finding(name, f"{type(error).__name__}: {said[0]}", PROBLEM, "see the findings above, then try again")
    if list(run) != [3.0, 3.0]:
        return Finding(name, f"1 + 2 gave {list(run)}", PROBLEM, "please report this, with this table")
    return Finding(
        name, f"all-reduce of 1 and 2 gave 3 on both, in {run.seconds:.2f} s (later ones are quicker); {run.backend}"
    )


def _sum_of_ranks() -> float:
    import torch
    import torch.distributed as dist

    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    x = torch.tensor([dist.get_rank() + 1.0], device=device)
    dist.all_reduce(x)
    return x.item()


# What it means for the course.


def judge_python(version: tuple[int, ...], system: str, machine: str) -> Finding:
    value = f"{'.'.join(map(str, version))} on {system} {machine}"
    if version < OLDEST_PYTHON:
        return Finding("Python", value, PROBLEM, "install Python 3.11 or newer, then: make lab PYTHON=python3.12")
    return Finding("Python", value)


def judge_torch(version: str, distributed: bool) -> Finding:
    number = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if not OLDEST_TORCH <= number < TOO_NEW_TORCH:
        return Finding("torch", version, PROBLEM, 'pip install "torch>=2.11,<2.15"')
    if not distributed:
        return Finding(
            "torch", f"{version}, built without torch.distributed", PROBLEM, "install torch from pytorch.org"
        )
    return Finding("torch", version)


def judge_cores(cores: float | None) -> Finding:
    if cores is None:
        return Finding("cores", "can't tell", NOTE)
    if cores < 2:
        return Finding(
            "cores", f"{cores:g}", NOTE, "everything runs, but ranks take turns: expect no speed-up anywhere"
        )
    return Finding("cores", f"{cores:g}")


def judge_memory(total: int | None, free: int | None) -> Finding:
    if total is None:
        return Finding("memory", "can't tell", NOTE)
    value = f"{total / GIB:.1f} GiB" + (f", {free / GIB:.1f} GiB free" if free is not None else "")
    if (total if free is None else free) < 2 * GIB:
        return Finding("memory", value, NOTE, "four ranks need about 2 GiB: close other programs or kernels")
    return Finding("memory", value)


def judge_gpus(gpus: list[dict] | str, apple: bool) -> Finding:
    if isinstance(gpus, str):
        return Finding(
            "GPUs",
            f"there, but not working: {gpus}",
            NOTE,
            "check nvidia-smi and the driver; or set CUDA_VISIBLE_DEVICES= to go without",
        )
    if gpus:
        each = [f"{gpu['name']} ({gpu['bytes'] / GIB:.0f} GiB, capability {gpu['capability']})" for gpu in gpus]
        return Finding("GPUs", f"{len(gpus)}: " + ", ".join(each))
    if apple:
        return Finding("GPUs", "Apple's, which torch.distributed can't use: the course runs on the CPU", NOTE)
    return Finding("GPUs", "none: the course runs on the CPU", NOTE)


def judge_nccl(version: tuple[int, ...], gpus: int) -> Finding:
    if not version or not gpus:
        return Finding("NCCL", "not needed without a GPU" if not gpus else "missing", NOTE if gpus else OK)
    value = ".".join(map(str, version))
    if version >= NCCL_SHARES_A_GPU:
        return Finding("NCCL", f"{value}: a GPU for each rank, or several ranks on one")
    remedy = "more ranks than GPUs talk over Gloo; NCCL 2.30 or newer lets several ranks share one GPU"
    return Finding("NCCL", f"{value}: a GPU for each rank", NOTE, remedy)


def judge_gloo(available: bool) -> Finding:
    if available:
        return Finding("Gloo", "available: any number of ranks on the CPU")
    return Finding("Gloo", "missing in this torch", PROBLEM, "install torch from pytorch.org")


def judge_loopback(error: str) -> Finding:
    if error:
        return Finding("loopback", error, PROBLEM, "ranks talk over 127.0.0.1: let the firewall or VPN allow it")
    return Finding("loopback", "127.0.0.1 answers")


def judge_start_method(methods: list[str]) -> Finding:
    if "forkserver" in methods:
        return Finding("new ranks", "from a fork server: about 0.1 s")
    return Finding("new ranks", "by spawn", NOTE, "each launch takes seconds; under WSL or Linux it takes about 0.1 s")


def judge_shared_memory(size: int | None) -> Finding:
    if size is None:
        return Finding("shared memory", "no /dev/shm on this system")
    if size < GIB / 4:
        remedy = "enough for the course; for your own work start the container with --shm-size=2g"
        return Finding("shared memory", f"{size / 2**20:.0f} MiB in /dev/shm", NOTE, remedy)
    return Finding("shared memory", f"{size / GIB:.1f} GiB in /dev/shm")


def judge_temp(free: int) -> Finding:
    value = f"{free / GIB:.1f} GiB free"
    if free < GIB / 10:
        return Finding("temp space", value, PROBLEM, "make room, or set TMPDIR to a folder that has some")
    return Finding("temp space", value)


def judge_torchrun(path: str | None) -> Finding:
    if path:
        return Finding("torchrun", "on PATH")
    return Finding("torchrun", "not on PATH; the same thing is: python -m torch.distributed.run")


def judge_triton(present: bool, gpus: int) -> Finding:
    if present:
        return Finding("Triton", "available" if gpus else "available, through its interpreter (no GPU)")
    return Finding("Triton", "missing: its kernels are read, not run", NOTE, "pip install triton (Linux only)")


def judge_package(package: str, version: str | None, purpose: str) -> Finding:
    if version:
        return Finding(package, version)
    return Finding(package, f"missing: needed for {purpose} only", NOTE, 'pip install -e ".[course,test]"')


# How it is said.


def render(findings: tuple[Finding, ...], width: int = 96) -> str:
    """The findings as a table, remedies below their finding, and one closing sentence."""
    column = max((len(finding.name) for finding in findings), default=0)
    lines = []
    for finding in findings:
        head = f"{finding.level:<7}  {finding.name:<{column}}  "
        indent = " " * len(head)
        lines += textwrap.wrap(finding.value, width, initial_indent=head, subsequent_indent=indent) or [head.rstrip()]
        if finding.remedy:
            lines += textwrap.wrap(
                finding.remedy, width, initial_indent=f"{indent}-> ", subsequent_indent=f"{indent}   "
            )
    problems = [finding.name for finding in findings if finding.level == PROBLEM]
    lines += ["", "This machine can run the course." if not problems else f"To be mended first: {', '.join(problems)}."]
    return "\n".join(lines)


def main() -> int:
    result = report()
    print(result)
    return 0 if result.ok else 1


if __name__ == "__main__":
    # Through the import, so that ranks see functions of ddpkit.doctor and not of __main__.
    from ddpkit import doctor

    sys.exit(doctor.main())
