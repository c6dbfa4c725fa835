import subprocess
import sys
import types

import pytest

from ddpkit import doctor
from ddpkit.doctor import GIB, NOTE, OK, PROBLEM, Finding, Report


@pytest.mark.parametrize(
    ("finding", "level", "words"),
    [
        (doctor.judge_python((3, 10, 4), "Linux", "x86_64"), PROBLEM, "3.11 or newer"),
        (doctor.judge_python((3, 14, 0), "Darwin", "arm64"), OK, ""),
        (doctor.judge_torch("2.10.1", True), PROBLEM, "torch>=2.11,<2.15"),
        (doctor.judge_torch("2.15.0+cu130", True), PROBLEM, "torch>=2.11,<2.15"),
        (doctor.judge_torch("2.13.0+cpu", False), PROBLEM, "pytorch.org"),
        (doctor.judge_torch("2.13.0a0+git1234", True), OK, ""),
        (doctor.judge_cores(0.5), NOTE, "take turns"),
        (doctor.judge_cores(None), NOTE, ""),
        (doctor.judge_cores(1.5), NOTE, ""),
        (doctor.judge_cores(2), OK, ""),
        (doctor.judge_memory(8 * GIB, GIB), NOTE, "close other programs"),
        (doctor.judge_memory(8 * GIB, None), OK, ""),
        (doctor.judge_memory(None, None), NOTE, ""),
        (doctor.judge_gpus([], apple=False), NOTE, ""),
        (doctor.judge_gpus([], apple=True), NOTE, ""),
        (doctor.judge_gpus("driver too old", apple=False), NOTE, "nvidia-smi"),
        (
            doctor.judge_gpus(
                [{"name": "X1", "bytes": 80 * GIB, "capability": "9.0"}], apple=False
            ),
            OK,
            "",
        ),
        (doctor.judge_nccl((), gpus=0), OK, ""),
        (doctor.judge_nccl((2, 28, 9), gpus=0), OK, ""),
        (doctor.judge_nccl((), gpus=1), NOTE, ""),
        (doctor.judge_nccl((2, 29, 7), gpus=1), NOTE, "2.30 or newer"),
        (doctor.judge_nccl((2, 30, 3), gpus=1), OK, ""),
        (doctor.judge_gloo(False), PROBLEM, "pytorch.org"),
        (doctor.judge_gloo(True), OK, ""),
        (doctor.loopback("192.0.2.1"), PROBLEM, "firewall"),  # of no machine
        (doctor.judge_start_method(["spawn"]), NOTE, "WSL"),
        (doctor.judge_start_method(["fork", "spawn", "forkserver"]), OK, ""),
        (doctor.judge_shared_memory(64 * 2**20), NOTE, "--shm-size"),
        (doctor.judge_shared_memory(8 * GIB), OK, ""),
        (doctor.judge_shared_memory(None), OK, ""),
        (doctor.judge_temp(10 * 2**20), PROBLEM, "TMPDIR"),
        (doctor.judge_temp(10 * GIB), OK, ""),
        (doctor.judge_torchrun(None), OK, ""),
        (doctor.judge_triton(False, gpus=0), NOTE, "triton"),
        (doctor.package("no-such-package", "players"), NOTE, "[course,test]"),
        (doctor.package("torch", "players"), OK, ""),
    ],
)
def test_each_finding_has_its_level_and_its_remedy(finding, level, words):
    assert finding.level == level, finding
    assert words in finding.remedy
    assert finding.value


def test_quota_of_a_container(tmp_path):
    assert doctor.cgroup_cores(tmp_path) is None
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert doctor.cgroup_cores(tmp_path) is None
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert doctor.cgroup_cores(tmp_path) == 1.5


def test_cores_are_the_least_of_affinity_and_quota(monkeypatch):
    monkeypatch.setattr(doctor.os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(doctor, "cgroup_cores", lambda: 1.5)
    assert doctor.count_cores() == 1.5
    monkeypatch.setattr(doctor, "cgroup_cores", lambda: 64)
    assert doctor.count_cores() == 4


def test_memory_of_a_container(tmp_path, monkeypatch):
    assert doctor.cgroup_memory(tmp_path) == (None, None)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("5\n")
    assert doctor.cgroup_memory(tmp_path) == (None, None)
    (tmp_path / "memory.max").write_text("1000\n")
    assert doctor.cgroup_memory(tmp_path) == (1000, 5)
    monkeypatch.setattr(doctor, "cgroup_memory", lambda: (1000, 400))
    assert doctor.memory_bytes() == (1000, 600)


def test_available_memory_is_read_in_bytes():
    assert (
        doctor.meminfo_available("MemTotal: 9 kB\nMemFree: 3 kB\nMemAvailable:       7 kB\n")
        == 7168
    )
    assert doctor.meminfo_available("") is None


def test_two_ranks_reports_failure_as_a_finding(monkeypatch):
    import ddpkit

    def refuse(*args, **kwargs):
        raise RuntimeError("no room for processes\nand more")

    monkeypatch.setattr(ddpkit, "launch", refuse, raising=False)
    assert doctor.two_ranks() == Finding(
        "two ranks",
        "RuntimeError: no room for processes",
        PROBLEM,
        "see the findings above, then try again",
    )


def test_two_ranks_doubts_a_wrong_sum(monkeypatch):
    import ddpkit

    class Run(list):
        backend, seconds = "gloo", 0.1

    monkeypatch.setattr(ddpkit, "launch", lambda *args, **kwargs: Run([3.0, 1.0]), raising=False)
    assert doctor.two_ranks().level == PROBLEM
    monkeypatch.setattr(ddpkit, "launch", lambda *args, **kwargs: Run([3.0, 3.0]), raising=False)
    assert doctor.two_ranks().level == OK


def test_a_gpu_that_does_not_work_is_reported_with_its_last_words(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    failed = types.SimpleNamespace(
        returncode=1, stderr="Traceback\nRuntimeError: driver too old\n", stdout=""
    )
    monkeypatch.setattr(doctor.subprocess, "run", lambda *args, **kwargs: failed)
    assert doctor.look_at_gpus() == "RuntimeError: driver too old"


def test_the_table_names_remedies_and_ends_with_the_verdict():
    good = Finding("cores", "2")
    bad = Finding("Gloo", "missing in this torch", PROBLEM, "install torch from pytorch.org")
    assert repr(Report((good,))).splitlines() == [
        "ok       cores  2",
        "",
        "This machine can run the course.",
    ]
    assert repr(
        Report(
            (
                good,
                bad,
            )
        )
    ).splitlines() == [
        "ok       cores  2",
        "PROBLEM  Gloo   missing in this torch",
        "                -> install torch from pytorch.org",
        "",
        "To be mended first: Gloo.",
    ]


def test_long_values_and_remedies_wrap():
    long = Finding("two ranks", "word " * 40, NOTE, "advice " * 40)
    assert max(map(len, repr(Report((long,))).splitlines())) <= 110


def test_the_exit_code_says_whether_the_course_can_run(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "examine", lambda: iter([Finding("cores", "2")]))
    assert doctor.main() == 0
    monkeypatch.setattr(doctor, "examine", lambda: iter([Finding("Gloo", "missing", PROBLEM)]))
    assert doctor.main() == 1
    assert "To be mended first: Gloo." in capsys.readouterr().out


def test_this_machine_can_run_the_course():
    done = subprocess.run(
        [sys.executable, "-m", "ddpkit.doctor"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr
    assert "This machine can run the course." in done.stdout


def test_the_report_leaves_cuda_alone():
    import torch

    assert doctor.report().ok
    assert not torch.cuda.is_initialized()
