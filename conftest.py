"""What holds for all tests, wherever and however pytest was started."""

import os
import signal
from pathlib import Path

import pytest

# What each rank would import for itself: in tests, where it takes longer than all else that they
# do; where ranks train or watch memory, as in some notebooks: a second and a half for each.
IN_TESTS = ["pytest", "matplotlib.figure", "ddpkit.exercises", "ddpkit.lesson.player"]
IN_TRAINING = ["torch._dynamo", "torch.fx.experimental.symbolic_shapes"]


def pytest_configure(config: pytest.Config) -> None:
    # Before torch is imported: where all cores are busy, threads mostly wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["DDPKIT_PROGRESS"] = "off"  # no lines that come and go in compared outputs
    if config.pluginmanager.hasplugin("nbval"):
        config.option.nbval = config.option.nbval_current_env = True
        config.option.nbval_cell_timeout = 120
        # Read relative to the current directory; this makes it work from any.
        config.option.nbval_sanitize_with = str(Path(__file__).parent / "tests/nbval-sanitize.cfg")
    # Jobs that a shell runs in the background start with interrupts ignored; some tests need them.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header(config: pytest.Config) -> str | None:
    """What a machine without Jupyter leaves out, besides the tests that say so themselves."""
    found = config.pluginmanager.hasplugin("nbval")
    return None if found else "notebooks aren't run: nbval isn't installed"


@pytest.hookimpl(tryfirst=True)  # before a notebook's kernel starts
def pytest_runtest_setup(item: pytest.Item) -> None:
    text = item.path.read_text() if item.path.suffix == ".ipynb" else ""
    slow = "backward()" in text or "memory.watch(" in text
    checked = ["ddpkit.exercises"] if "✗" in text else []  # by a check, not only "not written yet"
    os.environ["DDPKIT_PRELOAD"] = " ".join([*(IN_TRAINING if slow else []), *checked])
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no GPU")


LIVE = "image/svg+xml", "text/html"  # refresh.py drops them

# The files that take longest come first, so that no worker ends long after the others.
LONGEST = ["04_bucketed_ddp", "02_ring_all_reduce", "09_flash_attention", "test_browser"]
LONGEST += ["test_debug", "test_training", "test_processes", "test_launch"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files, then the other notebooks and exercises, then the rest as it was.

    Of notebooks, nothing is compared that is live and not stored.
    """
    from ddpkit.runtime import processes

    processes.preload([*IN_TESTS, *IN_TRAINING])
    for notebook in {item.parent for item in items if item.path.suffix == ".ipynb"}:
        notebook.skip_compare += LIVE

    def place(item: pytest.Item) -> int:
        if item.path.stem in LONGEST:
            return LONGEST.index(item.path.stem)
        long = item.path.suffix == ".ipynb" or item.path.parent.name == "exercises"
        return len(LONGEST) + (not long)

    items.sort(key=place)
