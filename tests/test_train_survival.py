"""A training killed anywhere, on a full disk, with damaged checkpoints: it goes on, bit for bit."""

import contextlib
import dataclasses
import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent import futures
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from kill_points import SEQUENCES, TEXT, TINY, digest, flip, losses, published
from outside import Script, wait_until

from ddpkit import launch
from ddpkit.train import TrainConfig, Trainer, run
from ddpkit.train import checkpoint as saving
from ddpkit.train.__main__ import main
from ddpkit.train.run import audit_samples, read_log, train
from ddpkit.train.state import whole_parameters

TESTS = Path(__file__).parent


@pytest.fixture
def config(tmp_path):
    """Make the config of a tiny training: 6 steps on 2 ranks, saved after each 2."""

    def make(**options) -> TrainConfig:
        (tmp_path / "text").write_bytes(TEXT)
        values = TINY | {"text": str(tmp_path / "text"), "folder": str(tmp_path / "run"), "data": 2}
        return TrainConfig(**(values | options))

    return make


# Killed


def killed_at(*flags: str) -> list[dict]:
    """Results of tests/kill_points.py; no process of it is left."""
    command = [sys.executable, str(TESTS / "kill_points.py"), *flags]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), *sys.path])}
    ended = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    results = [json.loads(line) for line in ended.stdout.splitlines()]
    assert ended.returncode == 0, [found for found in results if found["wrong"]] or ended.stderr
    return results


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="ranks are forked and killed")


@needs_fork
def test_killed_at_a_dozen_points():
    results = killed_at("--some", "4", "--meshes", "ddp")
    assert len(results) == 12
    assert {result["phase"] for result in results} > {"begin", "save 4", "save 6"}
    assert {result["rank"] for result in results} == {0, 1}


@needs_fork
@pytest.mark.slow
def test_killed_at_sixty_points_on_all_meshes():
    assert len(killed_at("--some", "9")) == 63


@needs_fork
@pytest.mark.slow
def test_killed_at_any_time():
    assert len(killed_at("--random", "20")) == 20


# A full disk


def no_room(save: int, rank: int, name: str) -> None:
    """Let this rank find the disk full when it writes a file of this name in this save."""
    plain_open = io.open

    def opened(path, mode="r", *args, **options):
        file = str(path)
        if dist.get_rank() == rank and name in file and f"step-{save:08}" in file and "w" in mode:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return plain_open(path, mode, *args, **options)

    io.open = opened
    saving.open = opened


def trained(config: TrainConfig, meddle=None) -> tuple[str, str, list[str]]:
    """(state by its digest, what was said, the checkpoints that are there) on each rank."""
    if meddle is not None:
        meddle()
    with contextlib.redirect_stdout(io.StringIO()) as said:
        trainer, _ = train(config)
    dist.barrier()
    files = sorted(path.name for path in Path(config.folder).glob("step-*"))
    return digest(trainer), said.getvalue(), files


@pytest.mark.wide
@pytest.mark.parametrize(
    ("rank", "name"), [(0, ".distcp"), (1, ".distcp"), (0, ".metadata"), (0, "run.json")]
)
def test_a_full_disk_costs_that_save_alone(config, rank, name):
    right = launch(trained, config(folder=""), world_size=2)
    found = launch(trained, config(), lambda: no_room(4, rank, name), world_size=2)
    for (state, _, files), (untouched, _, _) in zip(found, right, strict=True):
        assert state == untouched
        assert files == ["step-00000002", "step-00000006"]
    said = found[0][1]
    problem = f"rank {rank}: OSError: [Errno 28] No space left on device"
    assert said.count(f"step-00000004 wasn't saved: {problem}") == 1
    assert said.count("Errno") == 1
    assert audit_samples(config().folder, SEQUENCES) == []


def full_until_the_last_save(place: str) -> None:
    """Fill a disk but for 4 KiB, in which a log has room and no checkpoint, until save 6."""
    filler = Path(place) / "filler"
    if dist.get_rank() == 0:
        with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        os.truncate(filler, filler.stat().st_size - 4096)
    plain = saving.Checkpoints.save

    def save(checkpoints, step, *args):
        if step == 6:
            futures.wait([checkpoints.saving])
            if dist.get_rank() == 0:
                filler.unlink()
            dist.barrier()
        plain(checkpoints, step, *args)

    saving.Checkpoints.save = save


@pytest.fixture
def small_disk(tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    options = ["-t", "tmpfs", "-o", "size=400k", "tmpfs"]
    if (
        sys.platform != "linux"
        or subprocess.run(
            ["mount", *options, str(place)], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("no small disk can be mounted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_disk_that_is_really_full(config, small_disk):
    right = launch(trained, config(folder=""), world_size=2)
    full = config(folder=str(small_disk / "run"))
    found = launch(trained, full, lambda: full_until_the_last_save(str(small_disk)), world_size=2)
    assert [state for state, *_ in found] == [state for state, *_ in right]
    assert found[0][2] == ["step-00000006"]
    said = found[0][1]
    assert said.count("wasn't saved") == 2
    assert "No space left on device" in said
    assert audit_samples(full.folder, SEQUENCES) == []


def test_no_checkpoint_runs_ahead_of_the_log(config):
    """Steps that can't be logged aren't saved: killed after it, a run wouldn't know its samples."""

    def unlogged():
        run.Log.write = with_a_full_disk(run.Log.write, steps=(2, 3))

    found = launch(trained, config(), unlogged, world_size=2)
    assert found[0][2] == ["step-00000002", "step-00000006"]
    assert "step-00000004 wasn't saved: rank 0: OSError: [Errno 28]" in found[0][1]
    assert audit_samples(config().folder, SEQUENCES) == []
    assert [step["step"] for step in read_log(config().folder)] == list(range(6))


def with_a_full_disk(write, steps):
    """Wrap `Log.write`: in these steps the log can't be opened."""

    def wrapped(log, step):
        def refuse(*_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        if step["step"] in steps:
            run.open = refuse
        write(log, step)
        vars(run).pop("open", None)

    return wrapped


# Damage


DAMAGES = {
    "a flipped bit": flip,
    "cut short": lambda path: os.truncate(path, path.stat().st_size // 2),
    "emptied": lambda path: os.truncate(path, 0),
    "missing": lambda path: path.unlink(),
}
KINDS = "__0_0.distcp", "__1_0.distcp", ".metadata", "run.json", "checksums.json"


def resume_from_damaged(config: TrainConfig) -> list[tuple]:
    """(kind, damage, what was said, the step resumed after, the state at the end) of each."""
    train(config)
    folder = Path(config.folder)
    found = []
    for kind in KINDS:
        for name, damage in DAMAGES.items():
            dist.barrier()
            if dist.get_rank() == 0:
                damage(folder / "step-00000006" / kind)
            dist.barrier()
            with contextlib.redirect_stdout(io.StringIO()) as said:
                trainer, done = train(config)
            found.append((kind, name, said.getvalue(), done[0]["step"], digest(trainer)))
    return found


@pytest.mark.wide
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(config):
    right = launch(trained, config(folder=""), world_size=2)
    ranks = launch(resume_from_damaged, config(), world_size=2)
    for found, (state, _, _) in zip(ranks, right, strict=True):
        assert len(found) == len(KINDS) * len(DAMAGES)
        for kind, name, _, first, end in found:
            assert (first, end) == (4, state), (kind, name)
    for kind, name, said, _, _ in ranks[0]:
        assert said.startswith("step-00000006 is damaged ("), (kind, name, said)
        assert said.count("damaged") == 1
        # A sum that has changed accuses the file whose sum it was.
        assert kind in said or (kind, name) == ("checksums.json", "a flipped bit")
        assert "): the one before it is used.\nresumed after 4 steps: step 4 is next\n" in said


def test_the_only_whole_checkpoint_is_not_deleted_for_a_damaged_one(config):
    def damage_and_resume(config):
        train(config)
        if dist.get_rank() == 0:
            flip(Path(config.folder) / "step-00000006/.metadata")
            flip(Path(config.folder) / "step-00000004/.metadata")
        dist.barrier()
        plain = saving.remove
        kept = []

        def remove(path):
            plain(path)
            kept.append(published(path.parent))

        saving.remove = remove
        with contextlib.redirect_stdout(io.StringIO()) as said:
            train(dataclasses.replace(config, keep=1))
        return kept, said.getvalue()

    kept, said = launch(damage_and_resume, config(keep=3), world_size=2)[0]
    assert kept  # the latest whole one after each deletion
    assert min(kept) >= 2
    assert kept[-1] == 6
    assert said.count("the one before it is used") == 2


def test_if_none_is_whole_it_begins_anew(config):
    def damage_all(config):
        train(config)
        dist.barrier()
        if dist.get_rank() == 0:
            for path in Path(config.folder).glob("step-*"):
                flip(path / ".metadata")
        dist.barrier()
        with contextlib.redirect_stdout(io.StringIO()) as said:
            trainer, done = train(config)
        return digest(trainer), len(done), said.getvalue()

    right = launch(trained, config(folder=""), world_size=2)
    found = launch(damage_all, config(keep=2), world_size=2)
    assert [state for state, *_ in found] == [state for state, *_ in right]
    assert [many for _, many, _ in found] == [6, 6]
    assert "(.metadata isn't as it was written): none is left." in found[0][2]


# More than a resume


CHAIN = [{"data": 2}, {"tensor": 2}, {"pipeline": 2, "micro_batches": 2}, {"data": 1}]


def chained(options: dict, config) -> tuple[dict, dict, dict, Path]:
    """Parameters before, after 8 steps of one rank, and after 2 on each mesh of the chain."""
    options = options | {"warmup": 0, "decay_to": 1.0, "steps": 8}

    def whole(config):
        trainer = Trainer(config)
        before = whole_parameters(trainer)
        for number in range(config.steps):
            trainer.step(number)
        return before, whole_parameters(trainer)

    def resumed(config):
        trainer, done = train(config)
        return whole_parameters(trainer), len(done)

    before, right = launch(whole, config(**options | {"data": 1}, folder=""), world_size=1)[0]
    for turn, mesh in enumerate(CHAIN, 1):
        made = config(**options | {"data": 1, "steps": 2 * turn} | mesh)
        found, many = launch(resumed, made, world_size=made.world_size)[0]
        assert many == 2
    return before, right, found, Path(made.folder)


def test_the_exact_twin_resumes_on_mesh_after_mesh_to_the_last_bit(config):
    options = {"exact": True, "optimizer": "sign", "clip": 0.0}
    before, right, found, folder = chained(options, config)
    assert found.keys() == right.keys()
    assert all(torch.equal(found[name], right[name]) for name in right)
    assert not torch.equal(before["tokens.weight"], right["tokens.weight"])
    assert audit_samples(folder, SEQUENCES) == []
    assert len(losses(folder)) == 8


def test_fp32_resumes_on_mesh_after_mesh_up_to_its_roundings(config):
    """SGD's step is its gradient, a sum over tokens and width that each mesh adds in its order.

    Roundings of a sum of n don't conspire: ε · √n of it, in each of 8 steps.
    """
    options = {"optimizer": "sgd", "lr": 0.1}
    before, right, found, folder = chained(options, config)
    longest = TINY["batch"] * TINY["length"] * TINY["width"]
    for name, value in right.items():
        moved = (value - before[name]).norm()
        bound = 8 * 2.0**-23 * (longest**0.5 * moved + value.norm())
        assert (found[name] - value).norm() <= bound, name
    assert audit_samples(folder, SEQUENCES) == []


# torchrun


def torchruns(config: TrainConfig, tmp_path: Path, *flags: str) -> Script:
    """Start torchrun on 2 ranks."""
    values = [f"{name} = {value!r}" for name, value in vars(config).items() if value is not None]
    file = tmp_path / "config.toml"
    file.write_text("\n".join(values).replace("True", "true").replace("False", "false"))
    start = f"""
import os, sys
command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
os.execv(sys.executable, [*command, *sys.argv[1:], "-m", "ddpkit.train", {str(file)!r}])
"""
    path = os.pathsep.join([str(TESTS.parent), *sys.path])
    return Script(tmp_path, start, *flags, OMP_NUM_THREADS="1", PYTHONPATH=path)


def ranks_of(script: Script) -> list[psutil.Process]:
    """The ranks that torchrun has started."""
    return psutil.Process(script.process.pid).children()


def step_of(config: TrainConfig) -> int:
    log = Path(config.folder) / "log.jsonl"
    return len(log.read_text().splitlines()) if log.exists() else 0


LONG = {"steps": 150, "save_every": 10, "log_every": 50}


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_torchrun_starts_a_killed_rank_again_and_it_ends_right(config, tmp_path, rank):
    made = config(**LONG)
    launch(trained, config(**LONG, folder=str(tmp_path / "whole")), world_size=2)
    with torchruns(made, tmp_path, "--max-restarts=2") as script:
        wait_until(lambda: step_of(made) > 30)
        ranks = ranks_of(script)
        assert len(ranks) == 2
        ranks[rank].send_signal(signal.SIGKILL)
        killed = time.monotonic()
        wait_until(lambda: set(ranks_of(script)).isdisjoint(ranks) and ranks_of(script))
        restarted = time.monotonic() - killed
        code, out, err = script.result()
        assert code == 0, err
        assert "resumed after " in out
        assert restarted < 30  # seconds, of a busy machine
        assert script.left() == []
    assert losses(Path(made.folder)) == losses(tmp_path / "whole")
    assert audit_samples(made.folder, SEQUENCES) == []
    assert not list(Path(made.folder).glob("*.*ing"))


@pytest.mark.slow
def test_ranks_end_with_torchruns_agent_and_the_next_run_goes_on(config, tmp_path):
    made = config(**LONG)
    launch(trained, config(**LONG, folder=str(tmp_path / "whole")), world_size=2)
    with torchruns(made, tmp_path) as script:
        wait_until(lambda: step_of(made) > 30)
        script.signal(signal.SIGKILL)
        assert script.left() == []
        assert step_of(made) < LONG["steps"]
    with torchruns(made, tmp_path) as script:  # the same command
        code, out, err = script.result()
        assert code == 0, err
        assert "resumed after " in out
        assert script.left() == []
    assert losses(Path(made.folder)) == losses(tmp_path / "whole")
    assert audit_samples(made.folder, SEQUENCES) == []


# Folders that can't be used


def refused(config):
    run.LEAVING_S = 0.2
    with pytest.raises(saving.FolderError) as error:
        train(config)
    return str(error.value)


def test_a_folder_that_cannot_be_made_is_refused_on_every_rank(config, tmp_path):
    (tmp_path / "file").write_text("")
    made = config(folder=str(tmp_path / "file/below"))
    said = f"{made.folder} can't be used: Not a directory. Choose another folder."
    assert list(launch(refused, made, world_size=2)) == [said] * 2


def test_a_folder_in_which_another_run_trains(config, monkeypatch):
    fcntl = pytest.importorskip("fcntl")
    made = config()
    os.makedirs(made.folder)
    handle = os.open(made.folder, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)

    said = f"another run trains in {made.folder}: end it, or choose another folder."
    assert list(launch(refused, made, world_size=2)) == [said] * 2
    os.close(handle)
    assert len(launch(trained, made, world_size=2)[0][2]) == 3


def flags_of(config: TrainConfig) -> list[str]:
    names = [*TINY, "text", "folder", "data"]
    return [f"--{name.replace('_', '-')}={getattr(config, name)}" for name in names]


def test_another_models_checkpoint_is_refused_before_a_rank_starts(config, capfd):
    launch(trained, config(), world_size=2)
    assert main(flags_of(config(width=32))) == 2
    said = capfd.readouterr().err
    folder = f"{config().folder}/step-00000006"
    assert f"{folder} was saved with width = 16, and this run has 32: choose the same" in said
    # Other samples in each step: the ledger would have some twice, and others never.
    assert main(flags_of(config(batch=8))) == 2
    assert "was saved with batch = 4, and this run has 8" in capfd.readouterr().err


def test_a_folder_that_cannot_be_written_is_refused_before_a_rank_starts(config, capfd, tmp_path):
    (tmp_path / "file").write_text("")
    assert main(flags_of(config(folder=str(tmp_path / "file")))) == 2
    assert "can't be written: File exists. Choose another." in capfd.readouterr().err
    assert main(flags_of(config(folder=str(tmp_path / "file/below")))) == 2
    assert "can't be written: Not a directory. Choose another." in capfd.readouterr().err


@pytest.mark.parametrize("text", ["", "[]", '{"config": 3}', "\0\xff"])
def test_a_corrupt_description_refuses_nothing_by_itself(config, text):
    made = config()
    folder = Path(made.folder) / "step-00000002"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(text)
    assert saving.problems_of_the_folder(made) == []


def test_a_damaged_description_of_another_model_refuses_nothing(config):
    launch(trained, config(), world_size=2)
    path = Path(config().folder) / "step-00000006/run.json"
    path.write_text(path.read_text().replace('"width": 16', '"width": 17'))
    assert saving.problems_of_the_folder(config()) == []
    assert saving.problems_of_the_folder(config(width=17, heads=1)) != []  # the one before


def test_files_of_others_are_left_alone(config):
    made = config()
    kept = ["step-1.txt", "step-2.backup", "step-by-step"]
    for name in kept:
        (Path(made.folder) / name).mkdir(parents=True)
    launch(trained, made, world_size=2)
    assert all((Path(made.folder) / name).is_dir() for name in kept)
    shutil.rmtree(made.folder)


FAILS_WHILE_IT_SAVES = """
import threading, torch.distributed as dist
from ddpkit.train import TrainConfig, Trainer
from ddpkit.train.checkpoint import Checkpoints

if __name__ == "__main__":
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    checkpoints = Checkpoints(Trainer(TrainConfig(layers=1, text=__file__)), "run")
    checkpoints.write = lambda *_: threading.Event().wait()  # as for a rank that is gone
    checkpoints.save(1)
    raise SystemExit(3)
"""


def test_a_rank_that_fails_does_not_wait_for_the_thread_that_saves(tmp_path):
    with Script(tmp_path, FAILS_WHILE_IT_SAVES) as script:
        code, _, err = script.result()
        assert code == 3, err
        assert script.left() == []
