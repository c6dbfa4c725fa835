"""00's first cell: real processes, a real ring, and two buttons whose reports are real."""

import os
import re

import pytest

from ddpkit.lesson.first_minute import four_ranks

pytest.importorskip("ipywidgets", reason="Jupyter isn't installed")


def test_the_first_minute(capsys):
    first = four_ranks()
    said = capsys.readouterr().out
    pids = re.findall(r"rank \d \| here I am, pid (\d+)", said)
    assert len({*pids, str(os.getpid())}) == 5
    assert repr(first).count("hop") == 6
    _, lower = first.box.children
    _, controls, report = lower.children
    _, kill, forget = controls.children
    kill.click()
    assert "rank 2 was killed by SIGKILL" in report.value
    assert "<svg" in report.value
    forget.click()
    assert "ranks 0, 2 and 3 wait in all_reduce for rank 1" in report.value
    assert "waits in all_reduce" in report.value
    assert "forget, line 5: dist.all_reduce(x)" in report.value
