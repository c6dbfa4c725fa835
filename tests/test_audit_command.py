"""`python -m ddpkit.audit`: scripts that know nothing of it, under real torchrun."""

import os
import signal
import subprocess
import sys
import time

import pytest

from ddpkit.audit import Tape, command

SCRIPT = """\
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

wrong = sys.argv[1] if len(sys.argv) > 1 else ""
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(4):
    data = torch.randn(12, 12, generator=torch.Generator().manual_seed(step))
    inputs, targets = data.chunk(world_size)[rank].split([8, 4], dim=1)
    optimizer.zero_grad()
    called = model.module if wrong == "past the hooks" else model
    loss = (called(inputs) - targets).square().mean()
    loss = loss * world_size if wrong == "a sum" else loss
    loss.backward()
    optimizer.step()
    while wrong == "for ever":
        pass
if wrong == "a hang" and rank == 0:
    dist.barrier()
if wrong == "a crash" and rank == 1:
    raise RuntimeError("out of luck")
dist.destroy_process_group()
"""
ALONE = """\
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(4):
    data = torch.randn(12, 12, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    (model(data[:, :8]) - data[:, 8:]).square().mean().backward()
    optimizer.step()
"""
DRAWS = """\
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# In the shape of nanoGPT's loop: micro-batches are drawn at random, by a seed of the rank's own
late, micro_batches = sys.argv[1] == "late", int(sys.argv[2])
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
data = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(7, 16), nn.GELU(), nn.Linear(16, 1))

    def forward(self, x, targets=None):
        return (self.layers(x).squeeze(1) - targets).square().mean()


model = Model()
if os.path.exists("snapshot.pt"):
    model.load_state_dict(torch.load("snapshot.pt"))
torch.manual_seed(1337 + rank)
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(3):
    for micro_step in range(micro_batches):
        last = micro_step == micro_batches - 1
        if not late:
            model.require_backward_grad_sync = last
        rows = data[torch.randint(64, (4,))]
        loss = model(rows[:, :7], targets=rows[:, 7]) / micro_batches
        model.require_backward_grad_sync = last
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if rank == 0:
    torch.save(model.module.state_dict(), "snapshot.pt")
dist.destroy_process_group()
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.mark.wide
def test_two_scripts_are_the_same_training(script, tmp_path, capsys):
    alone = tmp_path / "alone.py"
    alone.write_text(ALONE)
    options = "--world-size", "2", "--steps", "2", "--no-sgd", "--stop"
    assert command.main([str(alone), script, *options]) == 0
    told = capsys.readouterr()
    assert told.out.startswith("the same training: 2 steps, 4 gradients and parameters in each")
    assert told.err == ""


@pytest.mark.wide
def test_a_factor_is_told_in_a_script(script, tmp_path, capsys):
    alone = tmp_path / "alone.py"
    alone.write_text(ALONE)
    options = "--world-size", "3", "--steps", "1", "--no-sgd", "--", "a sum"
    assert command.main([str(alone), script, *options]) == 1
    told = capsys.readouterr().out
    assert "step 0, gradient of all 4 tensors: ×3, on every rank" in told
    assert "3 ranks: summed over them where the mean is due" in told


@pytest.mark.wide
def test_a_script_that_fails_before_its_first_step_has_failed_also_with_stop(tmp_path, capsys):
    broken = tmp_path / "broken.py"
    broken.write_text("raise OSError('no such device')\n")
    options = "--world-size", "2", "--no-sgd", "--stop"
    assert command.main([str(broken), *options]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "broken.py failed on 2 ranks, exit code 1" in told.err
    assert "no such device" in told.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "code", "says"),
    [
        ("", 0, "the same training: 3 steps"),
        ("past the hooks", 1, "their mean is right: nobody averages them"),
        ("a crash", 2, "rank 1 raised RuntimeError: out of luck"),
        ("a hang", 2, "deadlock: rank 0 waits in barrier for rank 1, which has"),
    ],
)
def test_one_script_on_one_rank_and_on_two(script, capsys, wrong, code, says):
    assert command.main([script, "--world-size", "2", "--", *([wrong] if wrong else [])]) == code
    told = capsys.readouterr()
    assert says in (told.out if code < 2 else told.err)


@pytest.mark.slow
def test_a_script_that_trains_for_ever_is_ended(script, capsys):
    assert command.main([script, "--timeout", "8", "--", "for ever"]) == 2
    assert "made no 3 steps in 8 s" in capsys.readouterr().err
    left = subprocess.run(["pgrep", "-f", script], capture_output=True, check=False)
    assert left.stdout == b""


@pytest.mark.wide
def test_a_signal_leaves_neither_processes_nor_files(tmp_path):
    script = tmp_path / "endless.py"
    script.write_text("import pathlib, time\npathlib.Path('begun').touch()\ntime.sleep(600)\n")
    arguments = [sys.executable, "-m", "ddpkit.audit", str(script), "--world-size", "2"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    process = subprocess.Popen(arguments, cwd=tmp_path, env=environment)
    while not (tmp_path / "begun").exists():
        time.sleep(0.1)
    for _ in range(2):  # as `timeout` does
        process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    assert list(tmp_path.glob("ddpkit-audit-*")) == []
    while subprocess.run(["pgrep", "-f", str(script)], capture_output=True, check=False).stdout:
        time.sleep(0.1)


@pytest.fixture
def drawing(tmp_path, monkeypatch):
    """Return a script that draws its samples, in the present folder."""
    (tmp_path / "draws.py").write_text(DRAWS)
    monkeypatch.chdir(tmp_path)
    return "draws.py"


OPTIONS = "--world-size", "2", "--serial-args", "right 4"


@pytest.mark.slow
def test_a_script_that_draws_by_rank_with_the_ranks_samples(drawing, tmp_path, capsys):
    more = "--seed", "0", "--apart", "--ranks-samples", "--steps", "2", "--no-sgd"
    assert command.main([drawing, *OPTIONS, *more, "--", "right", "2"]) == 0
    assert capsys.readouterr().out.startswith("the same training: 2 steps")
    assert [path.name for path in tmp_path.iterdir()] == ["draws.py"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "loop", "code", "says"),
    [
        (["--seed", "0", "--apart"], "right", 2, "of theirs aren't among its own"),
        (["--seed", "0", "--apart", "--ranks-samples"], "late", 1, "micro-batch 1 stays on its"),
        (["--seed", "0", "--ranks-samples"], "right", 1, "loads what another has saved (--apart)"),
        (["--apart", "--ranks-samples"], "right", 1, "other seeds (--seed)"),
        (["--apart", "--ranks-samples", "--ranks-parameters"], "right", 0, "the same training"),
    ],
)
def test_what_a_script_that_draws_needs(drawing, capsys, options, loop, code, says):
    assert command.main([drawing, *OPTIONS, *options, "--", loop, "2"]) == code
    assert says in capsys.readouterr().out


def test_parameters_may_have_other_names(capsys):
    options = command.parse(["a.py", "--rename", "head.weight=embed.weight", "--rename", "b=c"])
    assert options.rename == {"head.weight": "embed.weight", "b": "c"}
    assert command.parse(["a.py", "--rename", "module.b=_orig_mod.c"]).rename == {"b": "c"}
    with pytest.raises(SystemExit):
        command.parse(["a.py", "--rename", "head.weight"])
    assert "expected --rename NAME=NAME, got head.weight" in capsys.readouterr().err


@pytest.mark.wide
def test_bad_input_is_told_in_a_sentence(tmp_path, capsys):
    assert command.main([str(tmp_path / "none.py")]) == 2
    assert "none.py: there is no such file" in capsys.readouterr().err
    empty = tmp_path / "empty.py"
    empty.write_text("print('nothing')\n")
    assert command.main([str(empty), str(empty), "--world-size", "0"]) == 2
    assert "expected --world-size of 1 or more" in capsys.readouterr().err
    fails = tmp_path / "fails.py"
    fails.write_text("import sys\nsys.exit('no data')\n")
    assert command.main([str(fails), str(empty)]) == 2
    assert "fails.py failed on one rank, exit code 1:\nno data" in capsys.readouterr().err


def test_where_no_optimizer_steps_nothing_is_decided(script, monkeypatch, capsys):
    monkeypatch.setattr(command, "tapes", lambda *_, **__: [Tape(1)])
    assert command.main([script]) == 2
    assert "nothing to compare: no optimizer stepped" in capsys.readouterr().out


def test_a_run_apart_writes_into_copies_but_for_large_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "LARGE", 6)
    for name, text in {"small": "small", "large": "larger", "within/small": "small"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "lost").symlink_to("nowhere")
    (tmp_path / "run").mkdir()  # the temporary folder may be in this one
    apart = command.copied(tmp_path / "run" / "apart")
    assert sorted(path.name for path in apart.iterdir()) == ["large", "lost", "small", "within"]
    links = {path.name for path in apart.rglob("*") if path.is_symlink()}
    assert links == {"large", "lost"}
    with pytest.raises(command.CannotTell, match=r"expected to copy all of .*: run it in a folder"):
        command.copied(tmp_path / "run" / "apart")


@pytest.mark.wide
def test_a_rank_that_leaves_no_tape_has_not_run_out_of_time(tmp_path):
    (tmp_path / "leaves.py").write_text("import os\nos._exit(0)\n")
    options = command.parse([str(tmp_path / "leaves.py")])
    with pytest.raises(command.CannotTell, match=r"though exit code 0: does it call os\._exit"):
        command.tapes(options.serial, [], 1, False, options, alone=True)


def test_the_command_is_there():
    help_ = subprocess.run(
        [sys.executable, "-m", "ddpkit.audit", "--help"], capture_output=True, text=True, check=True
    )
    assert "Is my script on N ranks the script on one?" in help_.stdout
