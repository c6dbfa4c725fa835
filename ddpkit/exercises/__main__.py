"""Judge students' notebooks, for teachers: python -m ddpkit.exercises NOTEBOOK ...

Runs each notebook in a kernel of its own, whatever fails in it, and prints its checks' verdicts, a
line an exercise, or one JSON object with --json. Meanwhile, on stderr, it prints a dot for each
cell that has begun. The exit code is 0 if all are right, 1 if not, 2 if a notebook couldn't be run:
then the rest aren't, and --json prints nothing.
"""

import argparse
import json
import re
import sys
from pathlib import Path

SIGNS = {"right": "✓", "wrong": "✗", "not written": "·"}
CALL = re.compile(r"^(?:check\.(\w+)\(\w+\)|(museum\.(?!score\b)\w+)\()", re.MULTILINE)
UNWRITTEN = "not written yet", "museum."  # what an exercise, or a piece without answers, shows
GIVEN = {"museum.hook_averages"}  # answered in the notebook itself


def run(path: Path, seconds: float):
    """Run the notebook in a fresh kernel, a cell for `seconds` at most; return it with outputs."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=seconds,
        interrupt_on_timeout=True,
        allow_errors=True,
        resources={"metadata": {"path": str(path.parent)}},
        on_cell_execute=lambda cell, cell_index: show("."),
        extra_arguments=["--log-level=ERROR"],  # no warning that messages aren't encrypted
    )
    written = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    show(f"{path}, {len(written)} cells: ")
    try:
        return client.execute()
    finally:
        show("\n")


def show(text: str) -> None:
    """Print to stderr, away from the results, at once."""
    print(text, end="", file=sys.stderr, flush=True)


def verdicts(notebook) -> dict[str, str]:
    """{exercise or museum.NAME: "right", "wrong" or "not written"}, of the cells that call one."""
    found = {}
    for cell in notebook.cells:
        called = CALL.search(cell.source)
        if cell.cell_type != "code" or not called or called[2] in GIVEN:
            continue
        said = "".join(o.get("data", {}).get("text/plain", "") for o in cell.outputs)
        check, piece = UNWRITTEN
        written = not said.startswith(piece) if called[2] else check not in said
        passed = said.startswith("✓")
        name = called[1] or called[2]
        if written:
            found[name] = "right" if passed else "wrong"
        else:  # a call without an answer shows the piece again, and takes nothing back
            found.setdefault(name, "not written")
    return found


def points(name: str, found: dict[str, str]) -> str:
    """Write the verdicts on a notebook in words, a line an exercise."""
    lines = [f"{name}: {list(found.values()).count('right')} of {len(found)} points"]
    for exercise, verdict in found.items():
        lines.append(f"  {SIGNS[verdict]} {exercise}: {verdict}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ddpkit.exercises")
    parser.add_argument("notebooks", nargs="+", type=Path, metavar="NOTEBOOK.ipynb")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument("--seconds", type=float, default=120, help="limit for a cell")
    options = parser.parse_args(arguments)
    report = {}
    for path in options.notebooks:
        try:
            report[str(path)] = verdicts(run(path, options.seconds))
        except Exception as error:
            show(f"{path} couldn't be run: {type(error).__name__}: {error}\n")
            return 2
        if not options.json:
            print(points(str(path), report[str(path)]), flush=True)
    if options.json:
        print(json.dumps(report))
    return int(any(v != "right" for found in report.values() for v in found.values()))


if __name__ == "__main__":
    sys.exit(main())
