"""Run every notebook (or those named) from a fresh kernel and store its outputs: `make refresh`.

A run that differs from the stored one only in times, addresses and the like isn't stored, so that a
second refresh changes nothing.

A run that the machine has disturbed (`disturbed`) isn't stored: it is taken again, a few times.
`--anyway` stores it, for trying out changes on a busy machine; `make test-all` refuses it.
"""

import json
import os
import re
import sys
import tempfile
from configparser import RawConfigParser
from pathlib import Path

import nbformat
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbval.kernel import CURRENT_ENV_KERNEL_NAME, NbvalKernelspecManager

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
MOST_BYTES, MOST_OF_AN_OUTPUT = 3_000_000, 300_000  # as JupyterLab would save them
LIVE = WIDGET_VIEW, "image/svg+xml", "text/html"  # shown where a cell was run, not stored
TRIES = 4
# A measured number's name, and between what it lies on a machine with nothing else to do. A/A: one
# piece of work, timed twice in turns. The share: of a step whose wire was chosen for 35 %.
BOUNDS = {"A/A": (0.95, 1.05), "share of communication": (0.30, 0.40)}


def run(notebook: NotebookNode, folder: Path) -> None:
    """Execute in place, in this interpreter's environment, whatever kernel the notebook names."""
    specs = NbvalKernelspecManager()
    kernel = AsyncKernelManager(kernel_name=CURRENT_ENV_KERNEL_NAME, kernel_spec_manager=specs)
    NotebookClient(
        notebook,
        km=kernel,
        resources={"metadata": {"path": str(folder)}},
        timeout=300,
        extra_arguments=["--log-level=ERROR"],  # no warning that messages aren't encrypted
        record_timing=False,
        store_widget_state=True,
        coalesce_streams=True,
    ).execute(cleanup_kc=True)


def refuse_large(notebook: NotebookNode) -> None:
    """Raise ValueError if a reader's saved notebook, widgets included, would be slow to open."""
    nbytes = len(nbformat.writes(notebook).encode())
    if nbytes > MOST_BYTES:
        raise ValueError(f"expected at most {MOST_BYTES} bytes, got {nbytes}: draw fewer frames?")
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            nbytes = len(json.dumps(output))
            if nbytes > MOST_OF_AN_OUTPUT:
                where = cell.source.splitlines()[0]
                raise ValueError(f"expected {MOST_OF_AN_OUTPUT} bytes, got {nbytes} of: {where}")


def normalise(notebook: NotebookNode) -> None:
    """Strip, in place, what the repository doesn't keep: live outputs, a machine's marks, paths."""
    notebook.metadata = NotebookNode(
        kernelspec={"display_name": "Python 3", "language": "python", "name": "python3"},
        language_info={"name": "python"},
    )
    for cell in notebook.cells:
        known = "slideshow", "tags", "jupyter"  # the last hides a source, such as imports
        kept = {key: cell.metadata[key] for key in known if cell.metadata.get(key)}
        cell.metadata = NotebookNode(kept)
        for output in cell.get("outputs", []):
            for kind in LIVE:
                output.get("data", {}).pop(kind, None)
            if output.output_type == "error":
                output.traceback = [without_paths(line) for line in output.traceback]
        if "outputs" in cell:
            cell.outputs = [output for output in cell.outputs if output.get("data", True)]


def without_paths(line: str) -> str:
    """Replace a traceback's paths by those of any machine: tests don't compare them."""
    names = [(ROOT, ""), (sys.prefix, ".venv/"), (sys.base_prefix, "python/")]
    for folder, name in [*names, (tempfile.gettempdir(), "")]:
        line = line.replace(f"{folder}/", name)
    return line


def keep_equal_outputs(new: NotebookNode, old: NotebookNode) -> None:
    """Keep the stored run if the new one differs in times alone; else store all of the new one.

    Never cell by cell: the times of two runs contradict each other.
    """
    pairs = list(zip(code_cells(new), code_cells(old), strict=False))
    if len(code_cells(new)) == len(code_cells(old)) and all(alike(*pair) for pair in pairs):
        for cell, before in pairs:
            cell.outputs = before.outputs


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def alike(cell: NotebookNode, before: NotebookNode) -> bool:
    digits = r"\d+" if "nbval-ignore-output" in cell.metadata.get("tags", []) else None
    same_cell = (cell.id, cell.source) == (before.id, before.source)
    return same_cell and comparable(cell.outputs, digits) == comparable(before.outputs, digits)


def comparable(outputs: list[NotebookNode], also: str | None = None) -> list[str]:
    """Turn outputs into text, less what the tests' sanitiser (and `also`) hides, single-spaced."""
    config = RawConfigParser()
    config.read(ROOT / "tests/nbval-sanitize.cfg", encoding="utf-8")
    patterns = [(config[name]["regex"], config[name]["replace"]) for name in config.sections()]
    if also:
        patterns.append((also, "N"))
    found = []
    for output in outputs:
        parts = dict(output) | dict(output.get("data", {}))
        parts["traceback"] = ""
        keys = sorted(parts.keys() - {"data", "execution_count"})
        text = "\n".join(f"{key}: {parts[key]}" for key in keys)
        if "image/png" not in parts:  # digits and units inside a picture mean nothing
            for regex, replacement in patterns:
                text = re.sub(regex, replacement, text)
        found.append(re.sub(r"[ \t]+", " ", text))
    return found


def disturbed(notebook: NotebookNode) -> list[str]:
    """Return the printed lines that leave their `BOUNDS`: what they stand beside isn't true either.

    The number follows its name, or stands before an interval in brackets and then the name.
    """
    found = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            for line in output.get("text", "").splitlines():
                found += [line] if out_of_bounds(line) else []
    return found


def out_of_bounds(line: str) -> bool:
    """Return whether a number on the line, by its name, leaves its `BOUNDS`."""
    for name, (low, high) in BOUNDS.items():
        after = re.search(rf"{name}:? (\d+\.\d+)", line)
        before = re.search(rf"(\d+\.\d+) \[[^]]*\] +{name}$", line.rstrip())
        for number in filter(None, (after, before)):
            if not low <= float(number[1]) <= high:
                return True
    return False


def refresh(path: Path, tries: int = TRIES, anyway: bool = False) -> list[str]:
    """Store a fresh run and return []; or store nothing, and return the last disturbed lines.

    anyway: store the first, disturbed or not.
    """
    old = nbformat.read(path, as_version=4)
    for _ in range(tries):
        new = nbformat.read(path, as_version=4)
        run(new, path.parent)
        refuse_large(new)
        normalise(new)
        wrong = disturbed(new)
        if anyway or not wrong:
            keep_equal_outputs(new, old)
            nbformat.write(new, path)
            return []
        print("  disturbed, taken again:", *wrong, sep="\n    ", flush=True)
    return wrong


def main(names: list[str]) -> int:
    os.environ["DDPKIT_PROGRESS"] = "off"
    refused = []
    anyway = "--anyway" in names
    for path in [Path(name) for name in names if name != "--anyway"] or NOTEBOOKS:
        print(path.name, flush=True)
        if refresh(path, anyway=anyway):
            refused.append(path.name)
    if refused:
        print(f"not stored, {TRIES} runs were disturbed:", *refused, "\nRun it on a quiet machine.")
    return bool(refused)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
