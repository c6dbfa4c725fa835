"""Run the numeric tests with the kernels of other processors: `make kernels PICK=zen`.

numpy, PyTorch, oneDNN and MKL choose their kernels by the processor they find, and each kernel adds
in another order. A test that passes only in the order of one machine fails under one of the picks.
PICK: one of them, `turn` (one that the last commit decides, so that it changes from commit to
commit and can be repeated; the processor's own where it can run none) or `all`. A pick whose
instructions the processor lacks is left out.
"""

import argparse
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

OWN = "its own"  # where a processor can run no pick
ROOT = Path(__file__).resolve().parents[1]
PICKS = {
    "haswell": "OPENBLAS_CORETYPE=Haswell ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2",
    "zen": "OPENBLAS_CORETYPE=Zen",
    "oldest": "OPENBLAS_CORETYPE=Prescott ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE "
    "ONEDNN_MAX_CPU_ISA=SSE41",
    "skylake": "OPENBLAS_CORETYPE=SkylakeX ATEN_CPU_CAPABILITY=avx512 "
    "ONEDNN_MAX_CPU_ISA=AVX512_CORE",
}
NEEDS = {
    "haswell": "avx2 fma",
    "zen": "avx2 fma",
    "oldest": "sse4_1",
    "skylake": "avx512f avx512bw avx512cd avx512dq avx512vl",
}
NUMERIC = "-m", "numeric and not slow", "-n", "3", "--dist", "loadfile", "--no-loadscope-reorder"


def environment(pick: str) -> dict[str, str]:
    """Return the environment variables of a pick."""
    return dict(variable.split("=") for variable in PICKS.get(pick, "").split())


def lacking(pick: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Say why this processor can't run a pick; "" if it can."""
    if not cpuinfo.exists():
        return f"{platform.system()} has no {cpuinfo} that tells what the processor can do"
    flags = re.search(r"^flags\s*:(.*)", cpuinfo.read_text(), re.MULTILINE)
    if not flags:
        return f"it is for x86, this is {platform.machine()}"
    missing = set(NEEDS[pick].split()) - set(flags[1].split())
    return f"this processor has no {', '.join(sorted(missing))}" if missing else ""


def in_turn(picks: list[str]) -> str:
    """Choose one by the hash of the last commit; without git, the first."""
    git = ["git", "rev-parse", "HEAD"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    return picks[int(commit.strip() or "0", 16) % len(picks)]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pick", choices=[*PICKS, "turn", "all"])
    options, of_pytest = parser.parse_known_args(arguments)
    wanted = list(PICKS) if options.pick in ("turn", "all") else [options.pick]
    for pick in wanted:
        if lacking(pick):
            print(f"kernels: {pick} is left out: {lacking(pick)}", flush=True)
    picks = [pick for pick in wanted if not lacking(pick)]
    if options.pick == "turn":
        picks = [in_turn(picks)] if picks else [OWN]
    failed = []
    for pick in picks:
        print(f"kernels: {pick}", PICKS.get(pick, ""), flush=True)
        command = [sys.executable, "-m", "pytest", *NUMERIC, *of_pytest]
        if subprocess.run(command, env=os.environ | environment(pick), check=False).returncode:
            failed.append(pick)
    if failed:
        again = "turn" if failed == [OWN] else failed[0]
        print(f"kernels: failed under {', '.join(failed)}. Again: make kernels PICK={again}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
