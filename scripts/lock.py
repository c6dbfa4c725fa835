"""Write constraints.txt: each package that the course installs, in the version that was tried.

Resolves the newest of all but torch and ruff, whose versions stay as the file has them: to move
one, change its line, run `make lock`, then the tests. One file for Linux, macOS and Windows, and
for Python 3.11 and newer.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
KEPT = "torch==", "ruff=="
OF_CUDA = "cuda-", "nvidia-"  # each build of torch for CUDA pins its own
HEADER = """\
# The course's environment, each package as it was tried: `make lock` writes this file, but leaves
# torch and ruff. The notebooks' stored outputs came from this torch; this ruff formatted the code.
"""


def resolve(kept: list[str]) -> list[str]:
    """Pin all that pyproject.toml asks for on any system, with the pins `kept`."""
    options = ["--universal", "--python-version", "3.11", "--fork-strategy", "fewest"]
    options += ["--extra", "course", "--extra", "test", "--no-annotate", "--no-header", "--quiet"]
    with tempfile.TemporaryDirectory() as folder:
        pins = Path(folder, "kept.txt")
        pins.write_text("\n".join(kept), encoding="utf-8")
        command = [sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml", *options]
        command += ["--constraint", str(pins)]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return [pin for pin in done.stdout.splitlines() if not pin.startswith(OF_CUDA)]


def main() -> None:
    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    pins = resolve([line for line in lines if line.startswith(KEPT)])
    CONSTRAINTS.write_text(HEADER + "\n".join(pins) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
