"""`make gpu`: all that needs a GPU, tests and then benchmarks, in at most a quarter of an hour.

Needs Python, torch, triton, pytest, psutil and matplotlib, and no Jupyter. Each part has a process
and a time limit of its own: one that fails, or hangs, doesn't stop the others. The findings and the
machine's description are in gpu-results/: gpu.json and gpu.md, a page. `python scripts/gpu.py NAME`
runs one part.
"""

import argparse
import datetime
import importlib.util
import json
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch

from ddpkit.bench.results import FOLDER as BENCH_RESULTS
from ddpkit.runtime.backends import nccl_version
from ddpkit.runtime.machine import look_at_gpus

TESTS = "-m", "pytest", "-q", "-p", "no:cacheprovider"
TESTS += "-W", "ignore::pytest.PytestConfigWarning"  # pytest-timeout is not needed
STARTS, PYTORCH, HANGS = (
    f"tests/test_{name}.py" for name in ("launch", "pytorch_inside", "explain")
)


class Part(NamedTuple):
    """A part of the run: `python ARGUMENTS`. bench: the name of its results, if it leaves any."""

    name: str
    limit_s: int
    arguments: tuple[str, ...]
    bench: str = ""


def bench(name: str, limit_s: int) -> Part:
    return Part(f"bench {name}", limit_s, ("-m", "ddpkit.bench", name), name)


def tests(name: str, limit_s: int, *which: str) -> Part:
    return Part(name, limit_s, (*TESTS, "-m", "gpu", *which))


# In the order in which a first run would go wrong. On an H200, beside each other, the starts took
# 70 s, PyTorch's own 88, hangs 70, nearly all of the others 127 and of the kernels 133; alone, and
# with kernels that were compiled, attention took 132, precision 20. Other benches run on the CPU.
PARTS = [
    Part("doctor", 20, ("-m", "ddpkit.doctor")),
    tests("starts", 75, STARTS),
    tests("PyTorch's own", 80, PYTORCH),
    tests("hangs", 85, HANGS),
    tests(
        "the other tests", 160, "tests", *(f"--ignore={file}" for file in (STARTS, PYTORCH, HANGS))
    ),
    Part("kernels", 190, (*TESTS, "tests/test_triton_attention.py")),
    bench("attention", 255),
    bench("precision", 35),
]


def machine() -> dict[str, str]:
    """Describe the machine that the figures hold for."""
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(ask, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        driver = "can't tell"
    triton = importlib.util.find_spec("triton")
    gpus = look_at_gpus()
    return {
        "date": datetime.date.today().isoformat(),
        "GPUs": gpus if isinstance(gpus, str) else ", ".join(gpus),
        "driver": driver.split("\n")[0],
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "NCCL": ".".join(map(str, nccl_version())),
        "Triton": __import__("triton").__version__ if triton else "missing",
    }


def run(part: Part) -> dict:
    """Run `part`; return {"name", "ended", "seconds", "output"}, with its results, if any."""
    begun = time.perf_counter()
    kept = BENCH_RESULTS / f"{part.bench}.json"
    kept.unlink(missing_ok=True)  # left by an earlier run
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    child = subprocess.Popen([sys.executable, *part.arguments], **pipes)
    try:
        output, _ = child.communicate(timeout=part.limit_s)
        ended = "ok" if child.returncode == 0 else f"failed, exit code {child.returncode}"
    except subprocess.TimeoutExpired:
        ended = f"stopped after its {part.limit_s} s"
        child.send_signal(signal.SIGINT)  # a launch then ends its ranks
        try:
            output, _ = child.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            child.kill()
            output, _ = child.communicate()
    seconds = round(time.perf_counter() - begun, 1)
    found = {"name": part.name, "ended": ended, "seconds": seconds, "output": output}
    return found | ({"results": json.loads(kept.read_text())} if kept.exists() else {})


def page(about: dict[str, str], found: list[dict]) -> str:
    """Write everything as Markdown: the machine, how each part ended, its last output."""
    lines = ["# On a GPU", "", *(f"- {name}: {value}" for name, value in about.items()), ""]
    lines += ["| part | | seconds |", "|---|---|---|"]
    lines += [f"| {each['name']} | {each['ended']} | {each['seconds']} |" for each in found]
    for each in found:
        said = each["output"].strip().splitlines()[-200:]
        lines += ["", f"## {each['name']}", "", "```text", *said, "```"]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None, parts: list[Part] = PARTS) -> int:
    """Run all parts; return 0 if all ended well, or if there is no GPU."""
    parser = argparse.ArgumentParser("make gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--into", type=Path, default=Path("gpu-results"), help="a folder")
    names = [part.name for part in parts]
    parser.add_argument("parts", nargs="*", choices=[*names, "all"], default="all", metavar="part")
    options = parser.parse_args(arguments)
    into, chosen = options.into, names if "all" in options.parts else options.parts
    if not torch.cuda.device_count():
        print("make gpu: PyTorch finds no GPU here, so there is nothing to run.")
        return 0
    into.mkdir(parents=True, exist_ok=True)
    about, found = machine(), []
    for part in parts:
        if part.name not in chosen:
            continue
        found.append(run(part))
        print(f"{part.name}: {found[-1]['ended']}, {found[-1]['seconds']} s", flush=True)
        (into / "gpu.json").write_text(json.dumps({"machine": about, "parts": found}, indent=1))
        (into / "gpu.md").write_text(page(about, found))
    return int(any(each["ended"] != "ok" for each in found))


if __name__ == "__main__":
    sys.exit(main())
