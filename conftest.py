"""What holds for all tests, wherever and however pytest was started."""

import contextlib
import hashlib
import importlib.util
import os
import re
import signal
import sys
import types
from pathlib import Path

import pytest

# nbval by way of jsonschema, which does without: parses grammars for 1.6 s in each worker.
sys.modules["rfc3987_syntax"] = None
pytest_plugins = ["nbval.plugin"] if importlib.util.find_spec("nbval") else []

# What each rank would import for itself: in tests, where it takes longer than all else that they
# do; for gradients that go into backward, a third of a second; for an optimizer, 1.5 s; for torch's
# ZeroRedundancyOptimizer, another third.
IN_TESTS = ["pytest", "matplotlib.figure", "ddpkit.exercises", "ddpkit.lesson.player"]
IN_TESTS += ["torch.fx.experimental.symbolic_shapes", "torch._dynamo", "torch.distributed.tensor"]
IN_TESTS += ["torch.distributed.optim"]
IN_KERNELS = ["ipykernel.kernelapp", "ipywidgets", "matplotlib.backends.backend_svg"]


def pytest_configure(config: pytest.Config) -> None:
    # Before torch is imported: where all cores are busy, threads mostly wait for each other.
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
    if "not slow" in config.option.markexpr and hasattr(os, "SCHED_BATCH"):
        # Ranks inherit it: Gloo's small messages take a fifth of the time (wire.py). `make
        # test-all` runs as a user does.
        with contextlib.suppress(OSError):  # a container forbids it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    paths = str(Path(__file__).parent), os.environ.get("PYTHONPATH")  # for scripts that tests start
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.environ["DDPKIT_PROGRESS"] = "off"  # no lines that come and go in compared outputs
    if config.pluginmanager.hasplugin("nbval.plugin"):
        config.option.nbval = config.option.nbval_current_env = True
        config.option.nbval_cell_timeout = 120
        # Read relative to the current directory; this makes it work from any.
        config.option.nbval_sanitize_with = str(Path(__file__).parent / "tests/nbval-sanitize.cfg")
    # Jobs that a shell runs in the background start with interrupts ignored; some tests need them.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header(config: pytest.Config) -> str | None:
    """What a machine without Jupyter leaves out, besides the tests that say so themselves."""
    found = config.pluginmanager.hasplugin("nbval.plugin")
    return None if found else "notebooks aren't run: nbval isn't installed"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no GPU")


# What carries and shows numbers, but computes none.
CARRIES = re.compile(r"ddpkit\.(runtime|lesson|exercises|debug|doctor|explain)\b")
ORACLES = "twin", "attention_cases", "training_cases", "pytorch_cases"


def is_numeric(item: pytest.Item) -> bool:
    """Whether the order in which a processor adds matters here: scripts/kernels.py runs them.

    It does in notebooks, in exercises and in files that import something that computes.
    """
    if item.path.suffix == ".ipynb" or item.path.parent.name == "exercises":
        return True
    for value in vars(item.module).values():
        is_module = isinstance(value, types.ModuleType)
        origin = value.__name__ if is_module else str(getattr(value, "__module__", ""))
        if origin in ORACLES or (origin.startswith("ddpkit.") and not CARRIES.match(origin)):
            return True
    return False


LIVE = "image/svg+xml", "text/html"  # refresh.py drops them
# Notebooks 03, 05, 13 and 15 train on Python's manual, of which each release has its own edition,
# 3.11.8 another than 3.11.7. This one's, which the stored outputs are of, by its hash:
EDITION = "2a95af4ac93f"
OF_THE_TEXT = r"\d\.\d(?= bits per byte)", r"(?<=off by )0\.\d+"
OF_THE_TEXT += r"(?<=loss )\d\.\d{4}", r"(?<=the fullest has )\d", r"(?<=with nothing\? )\d\.\d"
OF_THE_TEXT += (r"(?<=choices in )\d+",)
OF_THE_TEXT += r"(?<=norm )\d\.\d{4}", r"(?<=by counting: )\d\.\d\d"
OF_THE_TEXT += r"(?<=by counting pairs: )\d\.\d\d", r"(?<=Loss after training\? )\d\.\d"


def has_the_stored_edition() -> bool:
    from ddpkit.tools.text import text

    return hashlib.sha256(text().encode()).hexdigest().startswith(EDITION)


# Files that start a browser, many processes or measurements. Elsewhere single tests are marked.
WIDE = ["test_audit_museum", "test_audit_mutants", "test_browser", "test_gpu_tool", "test_live"]
WIDE += ["test_logs", "test_nccl"]

# No worker shall end long after the others.
LONG = ["test_stuck_scripts", "test_foreign", "test_browser", "test_debug", "test_training"]
LONG += ["test_processes", "test_launch", "test_train", "test_train_survival"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Notebooks, long files, exercises, then the rest.

    Of notebooks, nothing is compared that is live and not stored.
    """
    import cloudpickle

    from ddpkit.runtime import processes

    for item in items:
        if is_numeric(item):
            item.add_marker("numeric")
        if item.path.stem in WIDE or item.path.stem.startswith("test_bench_"):
            item.add_marker("wide")
    if config.pluginmanager.hasplugin("nbval.plugin"):
        from tests import forked_kernel

        forked_kernel.use_own_ports()
        if processes.start_method() == "forkserver" and "not slow" in config.option.markexpr:
            forked_kernel.use()
            processes.preload(IN_KERNELS)
    processes.preload(IN_TESTS)
    for module in list(sys.modules.values()):  # their functions travel to ranks as a notebook's do
        if Path(getattr(module, "__file__", None) or "").parent == Path(__file__).parent / "tests":
            cloudpickle.register_pickle_by_value(module)
    notebooks = {item.parent for item in items if item.path.suffix == ".ipynb"}
    other_text = notebooks and not has_the_stored_edition()
    for notebook in notebooks:
        notebook.skip_compare += LIVE
        if other_text:
            notebook.sanitize_patterns |= dict.fromkeys(OF_THE_TEXT, "NUMBER")

    def place(item: pytest.Item) -> int:
        path = item.path
        kinds = path.suffix == ".ipynb", path.stem in LONG, path.parent.name == "exercises", True
        return kinds.index(True)

    items.sort(key=place)
