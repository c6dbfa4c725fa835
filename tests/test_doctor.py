"""The doctor: each finding has its level and its remedy, on any machine a test can play."""

import runpy
import subprocess
import types

import pytest
import torch

from ddpkit import doctor
from ddpkit.doctor import GIB, NOTE, OK, PROBLEM, Finding, Report


def always(value):
    return lambda *args, **kwargs: value


def disk(nbytes):
    return always(types.SimpleNamespace(total=nbytes, free=nbytes))


def refuse(*args, **kwargs):
    raise OSError("no way\nand more")


class Run(list):
    backend, seconds = "gloo", 0.1


RIGHT = Run([3.0, 3.0])


@pytest.mark.parametrize(
    ("patched", "value", "name", "level", "words"),
    [
        ("sys.version_info", (3, 10, 4), "Python", PROBLEM, "3.11 or newer"),
        ("torch.__version__", "2.10.1", "torch", NOTE, "torch>=2.11,<2.16"),
        ("torch.__version__", "2.16.0+cu130", "torch", NOTE, "torch>=2.11,<2.16"),
        ("torch.__version__", "2.15.1+cu130", "torch", OK, ""),
        ("torch.__version__", "2.13.0a0+git1234", "torch", OK, ""),
        ("count_cores", always(1.5), "cores", NOTE, "take turns"),
        ("count_cores", always(2), "cores", OK, ""),
        ("memory_bytes", always((8 * GIB, GIB)), "memory", NOTE, "close other programs"),
        ("memory_bytes", always((0, 0)), "memory", OK, ""),
        ("look_at_gpus", always("driver too old"), "GPUs", NOTE, "nvidia-smi"),
        ("look_at_gpus", always(["X1 (80 GiB)"]), "GPUs", OK, ""),
        ("torch.cuda.device_count", always(0), "GPUs", NOTE, ""),
        ("torch.cuda.device_count", always(0), "NCCL", OK, ""),
        ("nccl_version", always((2, 29, 7)), "NCCL", NOTE, "2.30 or newer"),
        ("nccl_version", always((2, 30, 3)), "NCCL", OK, ""),
        ("dist.is_gloo_available", always(False), "Gloo", PROBLEM, "pytorch.org"),
        ("socket.create_server", refuse, "loopback", PROBLEM, "firewall"),
        ("start_method", always("spawn"), "new ranks", NOTE, "WSL"),
        ("shutil.disk_usage", disk(64 * 2**20), "shared memory", NOTE, "--shm-size"),
        ("shutil.disk_usage", disk(64 * 2**20), "temp space", PROBLEM, "TMPDIR"),
        ("shutil.disk_usage", disk(8 * GIB), "temp space", OK, ""),
        ("launch", refuse, "two ranks", PROBLEM, "findings above"),
        ("launch", always(Run([3.0, 1.0])), "two ranks", PROBLEM, "findings above"),
        ("shutil.which", always(None), "torchrun", OK, ""),
        ("importlib.util.find_spec", always(None), "Triton", NOTE, "triton"),
        ("PACKAGES", {"no-such-package": "players"}, "no-such-package", NOTE, "[course,test]"),
        ("PACKAGES", {"pytest": "players"}, "pytest", OK, ""),
    ],
)
def test_each_finding_has_its_level_and_its_remedy(monkeypatch, patched, value, name, level, words):
    monkeypatch.setattr(doctor, "launch", always(RIGHT))
    monkeypatch.setattr(doctor, "look_at_gpus", always([]))
    monkeypatch.setattr(torch.cuda, "device_count", always(1))
    monkeypatch.setitem(doctor.REMEDIES, "no-such-package", doctor.REMEDIES["nbval"])
    monkeypatch.setattr(f"ddpkit.doctor.{patched}", value)
    (finding,) = (each for each in doctor.examine() if each.name == name)
    assert finding.level == level, finding
    assert words in finding.remedy
    assert finding.value
    assert name != "two ranks" or "and more" not in finding.value


def test_a_torch_without_nccl():
    found = doctor.judge_nccl(2, ())
    assert found == Finding("NCCL", "missing in this torch: ranks run on the CPU", NOTE)


@pytest.mark.parametrize(("capability", "said"), [("7.5", True), ("8.0", False), ("12.0", False)])
def test_a_gpu_that_is_too_old_for_the_kernels_is_told(monkeypatch, capability, said):
    monkeypatch.setattr(doctor, "launch", always(RIGHT))
    monkeypatch.setattr(torch.cuda, "device_count", always(1))
    monkeypatch.setattr(doctor, "look_at_gpus", always([f"T4 (15 GiB, capability {capability})"]))
    (triton,) = (each for each in doctor.examine() if each.name == "Triton")
    assert ("want a GPU of capability 8.0" in triton.value) == said


def test_limits_of_a_container(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor.os, "sched_getaffinity", always({0, 1, 2, 3}), raising=False)
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemFree: 3 kB\nMemAvailable:       7 kB\n")
    assert doctor.count_cores(tmp_path) == 4
    assert doctor.memory_bytes(tmp_path, tmp_path) == (9 * 1024, 7 * 1024)
    assert doctor.memory_bytes(tmp_path / "macOS", tmp_path) == (0, 0)
    for cores, memory, expected in [
        ("max", "max", (4, 9216, 7168)),
        ("150", "1000", (1.5, 1000, 600)),
    ]:
        (tmp_path / "cpu.max").write_text(f"{cores} 100\n")
        (tmp_path / "memory.max").write_text(f"{memory}\n")
        (tmp_path / "memory.current").write_text("400\n")
        found = doctor.count_cores(tmp_path), *doctor.memory_bytes(tmp_path, tmp_path)
        assert found == expected
    (tmp_path / "memory.stat").write_text("anon 330\ninactive_file 40\nactive_file 30\n")
    assert doctor.memory_bytes(tmp_path, tmp_path) == (1000, 670)  # cached files can go


def test_a_gpu_that_does_not_work_is_reported_with_its_last_words(monkeypatch):
    said = "Traceback\nRuntimeError: driver too old\n"
    failed = types.SimpleNamespace(returncode=1, stderr=said, stdout="")
    monkeypatch.setattr(subprocess, "run", always(failed))
    assert doctor.look_at_gpus() == "RuntimeError: driver too old"


def test_the_verdict_comes_first_and_the_table_names_remedies():
    good, bad = doctor.judge("cores", "2"), doctor.judge("Gloo", "missing", fine=False)
    assert repr(Report((good,))) == "This machine can run the course.\n\nok       cores  2"
    assert repr(Report((good, bad))).splitlines() == [
        "To be mended first: Gloo.",
        "",
        "ok       cores  2",
        "PROBLEM  Gloo   missing",
        "                -> install torch from pytorch.org",
    ]
    long = Finding("two ranks", "word " * 40, NOTE, "advice " * 40)
    assert max(map(len, repr(Report((long,))).splitlines())) <= 72


def test_the_exit_code_says_whether_the_course_can_run(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "examine", lambda: [doctor.judge("Gloo", "no", fine=False)])
    assert doctor.main() == 1
    assert "To be mended first: Gloo." in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
def test_this_machine_can_run_the_course_and_cuda_is_left_alone(capsys):
    before = torch.cuda.is_initialized()  # by another test of this process
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("ddpkit.doctor", run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("This machine can run the course.\n")
    assert torch.cuda.is_initialized() == before
