"""Run every notebook (or those named) from a fresh kernel and store its outputs: `make refresh`.

Outputs that differ from the stored ones only in times, addresses and the like stay as they were, so
that a second refresh changes nothing but pictures of wall times.
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
        kept = {key: cell.metadata[key] for key in ("slideshow", "tags") if cell.metadata.get(key)}
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
    stored = {cell.id: cell for cell in old.cells if cell.cell_type == "code"}
    for cell in new.cells:
        before = stored.get(cell.id)
        if before is None or before.source != cell.source:
            continue
        digits = r"\d+" if "nbval-ignore-output" in cell.metadata.get("tags", []) else None
        if comparable(before.outputs, digits) == comparable(cell.outputs, digits):
            cell.outputs = before.outputs


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


def refresh(path: Path) -> None:
    old = nbformat.read(path, as_version=4)
    new = nbformat.read(path, as_version=4)
    run(new, path.parent)
    refuse_large(new)
    normalise(new)
    keep_equal_outputs(new, old)
    nbformat.write(new, path)


if __name__ == "__main__":
    os.environ["DDPKIT_PROGRESS"] = "off"
    for path in [Path(name) for name in sys.argv[1:]] or NOTEBOOKS:
        print(path.name, flush=True)
        refresh(path)
