"""`make kernels`: which picks of kernels a processor can run, and that they reach the ranks."""

import subprocess

import kernels
import pytest
from outside import run_script

NEWEST = " ".join(kernels.NEEDS.values())


@pytest.mark.parametrize(
    ("flags", "runnable"),
    [
        (f"flags\t\t: fpu {NEWEST}", ["haswell", "zen", "oldest", "skylake"]),
        (f"processor : 0\nflags : {NEWEST.replace('avx512bw', '')}", ["haswell", "zen", "oldest"]),
        ("flags : fpu sse4_1", ["oldest"]),
        ("Features : asimd", []),
        (None, []),
    ],
)
def test_a_pick_that_the_processor_lacks_is_left_out_with_the_reason(tmp_path, flags, runnable):
    cpuinfo = tmp_path / "cpuinfo"
    if flags:
        cpuinfo.write_text(flags + "\n")
    lacks = {pick: kernels.lacking(pick, cpuinfo) for pick in kernels.PICKS}
    assert [pick for pick in lacks if not lacks[pick]] == runnable
    if "avx512f" in str(flags) and "skylake" not in runnable:
        assert lacks["skylake"] == "this processor has no avx512bw"


def test_left_out_is_not_failed_and_what_fails_is_named(monkeypatch, capsys):
    ran = []

    def run(command, env, check):
        ran.append(env.get("OPENBLAS_CORETYPE"))
        return subprocess.CompletedProcess(command, int(ran[-1] == "Prescott"))

    monkeypatch.setattr(kernels, "lacking", lambda pick: "too old" * (pick == "skylake"))
    monkeypatch.setattr(kernels.subprocess, "run", run)
    assert kernels.main(["all"]) == 1
    assert ran == ["Haswell", "Zen", "Prescott"]
    said = capsys.readouterr().out
    assert "skylake is left out: too old\n" in said
    assert said.endswith("failed under oldest. Again: make kernels PICK=oldest\n")
    assert kernels.main(["skylake"]) == 0
    assert len(ran) == 3


def test_where_no_pick_can_run_the_processors_own_kernels_do(monkeypatch, capsys):
    def run(command, env, check):
        assert "OPENBLAS_CORETYPE" not in env
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)
    monkeypatch.setattr(kernels, "lacking", lambda pick: "another kind")
    monkeypatch.setattr(kernels.subprocess, "run", run)
    assert kernels.main(["turn"]) == 1
    assert capsys.readouterr().out.endswith("under its own. Again: make kernels PICK=turn\n")


def test_the_last_commit_decides_whose_turn_it_is(monkeypatch):
    for commit, pick in [("0b\n", "zen"), ("0a\n", "haswell"), ("", "haswell")]:
        done = subprocess.CompletedProcess([], 0, stdout=commit)
        monkeypatch.setattr(kernels.subprocess, "run", lambda *_, done=done, **__: done)
        assert kernels.in_turn(["haswell", "zen"]) == pick


SCRIPT = """
import os
from torch.backends.cpu import get_cpu_capability
from ddpkit import launch
print(*launch(lambda: get_cpu_capability() + " " + os.environ["OPENBLAS_CORETYPE"], world_size=2))
"""


@pytest.mark.skipif(bool(kernels.lacking("oldest")), reason=kernels.lacking("oldest"))
def test_a_pick_reaches_the_ranks(tmp_path):
    printed = run_script(tmp_path, SCRIPT, **kernels.environment("oldest"))
    assert printed == "DEFAULT Prescott DEFAULT Prescott\n"
