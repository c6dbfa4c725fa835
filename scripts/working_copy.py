"""The reader's own notebooks, in my_notebooks/: without outputs, no answer before its question.

`make lab` makes them, git ignores them, and nothing here ever overwrites one: a newer version is
put beside it, with a message. It also gives JupyterLab the course's settings.
"""

import hashlib
import json
import shutil
import sys
from datetime import date
from pathlib import Path

import nbformat
from ipykernel.ipkernel import IPythonKernel

ROOT = Path(__file__).resolve().parents[1]
OFFERED = ".offered.json"  # {notebook: fingerprint of the version that the reader has been given}
SETTINGS = {  # file in this folder: where JupyterLab looks for it
    "overrides.json": "share/jupyter/lab/settings",
    "jupyter_server_config.py": "etc/jupyter",
    "custom.css": "etc/jupyter/custom",
    "ipython_kernel_config.py": "etc/ipython",
}


def cleared(path: Path) -> str:
    """Return the notebook as it is before anything has run."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return nbformat.writes(notebook)


def at_home(text: str) -> str:
    """Rewrite the notebook as JupyterLab would save it: else it looks changed once it is opened."""
    notebook = nbformat.reads(text, as_version=4)
    kernel = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    notebook.metadata |= {"kernelspec": kernel, "language_info": IPythonKernel.language_info}
    return nbformat.writes(notebook)


def copy(source: Path, target: Path, today: str) -> list[str]:
    """Copy new notebooks of `source`; return a line for each that was put beside an older one."""
    target.mkdir(exist_ok=True)
    record = target / OFFERED
    offered = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
    words = []
    for path in sorted(source.glob("*.ipynb")):
        text = cleared(path)
        fingerprint = hashlib.sha256(text.encode()).hexdigest()
        own = target / path.name
        if own.exists() and offered.get(path.name) != fingerprint:
            own = own.with_suffix(f".{today}.ipynb")
            words.append(
                f"{path.name} has a new version. Yours stays as it is; beside it: {own.name}"
            )
        if not own.exists():
            own.write_text(at_home(text), encoding="utf-8")
        offered[path.name] = fingerprint
    record.write_text(json.dumps(offered, indent=1), encoding="utf-8")
    return words


if __name__ == "__main__":
    for name, folder in SETTINGS.items():
        Path(sys.prefix, folder).mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "scripts" / name, Path(sys.prefix, folder))
    for word in copy(ROOT / "notebooks", ROOT / "my_notebooks", date.today().isoformat()):
        print(word)
