"""Who may import whom (README, "What is where"), read from the source, and `import ddpkit` kept
light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "ddpkit").rglob("*.py"))

# From the ground up: a subject imports only torch, the standard library, tools and subjects before
# it in this list.
ORDER = """
    transport softmax flash_attention collectives ring doubling ring_attention shared_memory
    data_parallel ddp batch_norm parameter_server mixed_precision checkpointing zero fsdp muon
    models tensor_parallel pipeline context_parallel experts
"""
SUBJECTS = ORDER.split()
# What stands beside the subjects and belongs to another floor
ELSEWHERE = {"cost": "tools", "floats": "tools", "memory": "tools", "flash_triton": "fast"}
BELOW = {"runtime", "inspect", "subjects", "fast", "tools", "tools.plan", "tools.kills", "train"}
MAY_IMPORT = {  # beyond torch, the standard library and its own kind
    "tools": set(),
    "tools.plan": {"subjects", "runtime", "tools"},  # it predicts the subjects' steps
    "tools.kills": {"cloudpickle"},  # it runs a function in a process that dies
    "subjects": {"tools"},
    "fast": {"subjects", "tools", "triton"},
    "runtime": {"tools", "inspect", "cloudpickle", "IPython"},
    "inspect": {"runtime", "tools"},
    "exercises": BELOW | {"audit", "lesson", "nbclient", "nbformat", "triton"},
    "lesson": BELOW | {"IPython", "PIL", "ipywidgets", "matplotlib", "numpy"},
    "lesson.check": {"exercises", "runtime"},  # their name in notebooks
    "bench": BELOW | {"audit", "lesson", "numpy"},
    "audit": {"runtime", "inspect", "subjects", "tools"},
    "train": {"subjects", "fast", "audit", "runtime", "tools", "matplotlib"},  # all of it together
    "resume_check": {"audit", "inspect", "runtime", "subjects", "tools"},
    "debug": {"inspect"},
    "doctor": {"runtime"},
    "explain": {"inspect"},
    "__init__": {"runtime", "lesson"},  # %load_ext shows what takes long, as a lesson does
}
ONLY_WHEN_USED = {"IPython", "ipywidgets", "matplotlib"}
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def floor(name: str) -> str:
    """The floor of ddpkit.`name`: 'runtime', 'lesson', ... or 'subjects'."""
    top, *inner = name.split(".")
    if inner and f"{top}.{inner[0]}" in MAY_IMPORT:
        return f"{top}.{inner[0]}"
    return "subjects" if top in SUBJECTS else ELSEWHERE.get(top, top)


def imports(tree: ast.Module, package: list[str]) -> list[tuple[str, bool]]:
    """(what is imported, in dotted form; whether that happens when the module is loaded)."""
    found = []

    def visit(node: ast.AST, at_load: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend((alias.name, at_load) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            if module == "ddpkit":
                found.extend((f"ddpkit.{alias.name}", at_load) for alias in node.names)
            else:
                found.append((module, at_load))
        for child in ast.iter_child_nodes(node):
            visit(child, at_load and not isinstance(child, FUNCTIONS))

    visit(tree, True)
    return found


def complaints(path: Path) -> list[str]:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    own = floor(".".join(parts[1:]))
    if own not in MAY_IMPORT:
        return [f"ddpkit.{parts[1]} has no floor: add it to SUBJECTS or to MAY_IMPORT"]
    wrong = []
    for name, at_load in imports(ast.parse(path.read_text(encoding="utf-8")), parts[:-1]):
        top, _, rest = name.partition(".")
        if top == "ddpkit":
            other = rest.split(".")[0]
            if (ROOT / "ddpkit" / f"{other}.py").exists() or (ROOT / "ddpkit" / other).is_dir():
                other_floor = floor(rest)
            else:
                other_floor = "runtime"  # a name of the package itself: launch, Link, ...
            if other_floor == own and own == "subjects":
                if SUBJECTS.index(other) > SUBJECTS.index(parts[1]):
                    wrong.append(f"imports {name}, a subject above it")
            elif other_floor not in MAY_IMPORT[own] | {own}:
                wrong.append(f"imports {name}")
            elif (own, other_floor) == ("runtime", "inspect") and at_load:
                wrong.append(f"imports {name} when loaded, not when used")
        elif top not in sys.stdlib_module_names and top != "torch" and top not in MAY_IMPORT[own]:
            wrong.append(f"imports {name}")
        elif top in ONLY_WHEN_USED and at_load and own != "lesson":
            wrong.append(f"imports {name} when loaded, not when used")
    return wrong


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_go_down(path):
    assert complaints(path) == []


def test_the_test_can_fail(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "ddpkit/runtime").mkdir(parents=True)
    (tmp_path / "ddpkit/lesson").mkdir()
    for name in ("ring", "collectives", "zero"):
        (tmp_path / f"ddpkit/{name}.py").touch()
    sources = {
        "ring": "import torch, matplotlib\nfrom ddpkit import launch, collectives, zero\n",
        "runtime/live": "import IPython\nfrom ..lesson import player\nfrom .launch import launch\n",
        "runtime/worker": "def f():\n    import IPython\nfrom ddpkit.ring import all_reduce\n",
    }
    found = {}
    for name, source in sources.items():
        path = tmp_path / f"ddpkit/{name}.py"
        path.write_text(source)
        found[name] = complaints(path)
    above = "imports ddpkit.zero, a subject above it"
    when_loaded = "imports IPython when loaded, not when used"
    assert found == {
        "ring": ["imports matplotlib", "imports ddpkit.launch", above],
        "runtime/live": [when_loaded, "imports ddpkit.lesson"],
        "runtime/worker": ["imports ddpkit.ring"],
    }


LIGHT = """
import sys
from ddpkit import HangError, Link, RankError, launch
heavy = "IPython", "ipywidgets", "matplotlib", "ipykernel", "nbformat", "torch._dynamo"
heavy += ("ddpkit.lesson",)
print([name for name in sys.modules if name.startswith(heavy)])
import torch
import ddpkit.exercises
from ddpkit import memory
with memory.watch(torch.nn.Linear(1, 1)) as timeline:
    torch.ones(1) + 1
from ddpkit.lesson import check
from ddpkit.runtime import processes
print([name for name in sys.modules if name.startswith(heavy[:-1])])
print("ddpkit.exercises" in processes._server()._preload_modules)
"""


def test_importing_ddpkit_loads_no_jupyter():
    """Nor does what ranks import for a check, or to watch memory: each would do it for itself."""
    python = [sys.executable, "-W", "error", "-c", LIGHT]
    done = subprocess.run(python, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[]\n[]\nTrue\n", "")
