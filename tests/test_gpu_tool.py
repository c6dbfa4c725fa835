"""`make gpu`, as far as a machine without a GPU can tell."""

import json
import subprocess
import sys
from pathlib import Path

import gpu
import pytest
import torch


def test_without_a_gpu_it_says_so_and_is_content(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert gpu.main(["--into", str(tmp_path / "results")]) == 0
    assert capsys.readouterr().out.count("\n") == 1
    assert not (tmp_path / "results").exists()


def test_a_part_that_fails_or_hangs_does_not_stop_the_others(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(gpu, "look_at_gpus", lambda: ["a GPU that isn't here"])
    monkeypatch.setattr(gpu, "BENCH_RESULTS", tmp_path)
    leaves = f"open({str(tmp_path / 'mine.json')!r}, 'w').write('[1]'); print('measured')"
    hangs = "import time; print('begun', flush=True); time.sleep(60)"
    parts = [
        gpu.Part("fails", 20, ("-c", "import sys; sys.exit(3)")),
        gpu.Part("hangs", 1, ("-c", hangs)),
        gpu.Part("bench mine", 20, ("-c", leaves), "mine"),
    ]
    assert gpu.main(["--into", str(tmp_path)], parts) == 1
    found = json.loads((tmp_path / "gpu.json").read_text())
    ended = [part["ended"] for part in found["parts"]]
    assert ended == ["failed, exit code 3", "stopped after its 1 s", "ok"]
    assert found["parts"][1]["output"].startswith("begun")
    assert found["parts"][2]["results"] == [1]
    page = (tmp_path / "gpu.md").read_text()
    assert "- GPUs: a GPU that isn't here" in page
    assert "| fails | failed, exit code 3 |" in page
    assert "measured" in page


def test_a_part_can_be_asked_for(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(gpu, "look_at_gpus", list)
    parts = [gpu.Part(name, 20, ("-c", "")) for name in ("one", "other")]
    assert gpu.main(["--into", str(tmp_path), "other"], parts) == 0
    found = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert [part["name"] for part in found] == ["other"]


def test_tests_begin_without_pytest_timeout():
    asked = *gpu.TESTS, "-p", "no:timeout", "--collect-only", "tests/test_checks.py"
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, *asked], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_quarter_of_an_hour_at_most():
    assert sum(part.limit_s for part in gpu.PARTS) <= 900


def test_every_test_that_needs_a_gpu_is_in_one_part():
    tests, marked = Path(__file__).parent, set()
    for path in tests.glob("test_*.py"):
        if "mark.gpu" in path.read_text() and path.name != Path(__file__).name:
            marked.add(f"tests/{path.name}")
    alone = [part.arguments[-1] for part in gpu.PARTS if "gpu" in part.arguments][:3]
    (others,) = (part for part in gpu.PARTS if "tests" in part.arguments)
    assert others.arguments[-3:] == tuple(f"--ignore={file}" for file in alone)
    assert set(alone) <= marked


@pytest.mark.parametrize("part", [part for part in gpu.PARTS if part.bench])
def test_the_benchmarks_exist(part):
    from ddpkit.bench.__main__ import BENCHMARKS

    assert part.bench in BENCHMARKS
