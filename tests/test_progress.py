import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ddpkit import launch
from ddpkit.lesson import progress
from ddpkit.lesson.progress import Progress
from ddpkit.runtime import processes, watch


class Line(list):
    """Stands in for IPython's display and the handle that it returns: a list of what was shown."""

    def __call__(self, shown, raw, display_id):
        self.update(shown, raw)
        return self

    def update(self, shown, raw):
        self.append(shown)


def test_a_slow_launch_says_what_its_ranks_do_and_leaves_no_trace(monkeypatch):
    def slow():
        if dist.get_rank() == 0:
            time.sleep(1.5)
        dist.all_reduce(torch.ones(1))

    monkeypatch.setattr(progress, "PATIENCE_S", 0.01)
    monkeypatch.setattr(progress, "EVERY_S", 0.05)
    monkeypatch.setattr(watch, "STANDSTILL_S", 0.7)
    line = Line()
    cell = Progress(line)
    cell.begin()
    launch(slow, world_size=2)
    cell.end()
    said = " ".join(each.get("text/plain", "") for each in line)
    assert "s: 2 ranks, 1 call so far" in said
    assert "s: no call for 1 s, rank 1 waits for rank 0 in all_reduce" in said
    assert line[-1] == {}


def test_the_first_launch_says_what_it_waits_for(monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE_S", 0.01)
    line = Line()
    cell = Progress(line)
    with processes._starting:
        cell.begin()
        while not line:
            time.sleep(0.01)
    cell.end()
    assert line[0]["text/plain"] == "… 0 s: the ranks' server starts, and imports torch once"
    assert line[-1] == {}


@pytest.mark.parametrize(
    ("request_type", "runs"), [("execute_request", 1), ("comm_msg", 0), (None, 0)]
)
def test_the_cell_that_imports_it_is_watched_too(monkeypatch, request_type, runs):
    ipython = pytest.importorskip("IPython", reason="Jupyter isn't installed")
    registered, begun = [], []
    events = SimpleNamespace(register=lambda name, _: registered.append(name))
    kernel = SimpleNamespace(get_parent=lambda: {"header": {"msg_type": request_type}})
    shell = SimpleNamespace(kernel=kernel, events=events)
    monkeypatch.setattr(ipython, "get_ipython", lambda: shell)
    monkeypatch.delenv("DDPKIT_PROGRESS")
    monkeypatch.setattr(Progress, "begin", lambda self: begun.append(self))
    progress.show_progress()
    assert registered == ["pre_run_cell", "post_run_cell", "post_run_cell"]
    assert len(begun) == runs


def test_torch_is_imported_and_the_line_says_so(monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE_S", 0.01)
    monkeypatch.setattr(progress, "RUNTIME", "ddpkit.runtime.not_yet")
    line = Line()
    cell = Progress(line)
    cell.begin()
    while not line:
        time.sleep(0.01)
    cell.end()
    assert line[0]["text/plain"] == "… 0 s: importing torch"


def test_a_quick_cell_shows_nothing():
    line = Line()
    cell = Progress(line)
    cell.begin()
    cell.end()
    assert line == []
    assert not cell.thread.is_alive()
