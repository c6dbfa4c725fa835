"""`python -m ddpkit.resume_check`: scripts that know nothing of it, right ones and wrong ones."""

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

from ddpkit.resume_check import command
from ddpkit.resume_check.verdict import Attempt, CannotTell, place_in_data, schedule
from ddpkit.resume_check.witness import Witness, rows

SCRIPT = """\
import os
import sys
import threading
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 8)
        self.dropout = nn.Dropout(0.2)
        self.experts = nn.ModuleList([nn.Linear(8, 1, bias=False) for _ in range(11)])

    def forward(self, x, y):
        hidden = self.dropout(self.inner(x).tanh())
        predicted = sum(expert(hidden) for expert in self.experts)
        return (predicted - y).square().mean()


def save(path):
    draft = path.with_suffix(".draft")
    torch.save(everything, draft)
    draft.rename(path)


torch.manual_seed(0)
data = TensorDataset(torch.randn(24, 6), torch.randn(24, 1))
model = Mixture()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + 0.1 * n))
out = Path("out")
out.mkdir(exist_ok=True)
updates = 0
saves = sorted(out.glob("*.pt"), key=lambda path: int(path.stem))
if saves:
    saved = torch.load(saves[-1])
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    torch.set_rng_state(saved["random"])
    updates = saved["updates"]
first_epoch, first_batch = divmod(updates, 6)
for epoch in range(first_epoch, 2):
    order = torch.Generator().manual_seed(epoch)
    loader = DataLoader(data, batch_size=4, shuffle=True, generator=order)
    for number, (x, y) in enumerate(loader):
        if epoch == first_epoch and number < first_batch:
            continue
        optimizer.zero_grad()
        model(x, y).backward()
        optimizer.step()
        scheduler.step()
        updates += 1
        if updates % 2 == 0:
            everything = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "random": torch.get_rng_state(),
                "updates": updates,
            }
            save(out / f"{updates}.pt")
"""
# The newest save is named by `latest`, the one before is deleted, and the save is still written.
EARLY_LATEST = """
    (out / "latest").write_text(path.name)
    for old in out.glob("*.pt"):
        old.unlink()
    writer = threading.Thread(target=torch.save, args=(everything, path))
    writer.start()
    writer.join()
"""
SAVE = """
    draft = path.with_suffix(".draft")
    torch.save(everything, draft)
    draft.rename(path)
"""
BY_NUMBER = 'sorted(out.glob("*.pt"), key=lambda path: int(path.stem))'
BY_LATEST = '[out / (out / "latest").read_text()] if (out / "latest").exists() else []'
LOAD = '    model.load_state_dict(saved["model"])\n'
# Row 73: experts are put back in the order of their names, as strings.
BY_NAME = """\
    names = [name for name in model.state_dict() if "experts" in name]
    back = dict(zip(names, [saved["model"][name] for name in sorted(names)]))
    model.load_state_dict(saved["model"] | back)
"""
WRONG = {  # {what: ((old, new), ..., the cause, what else is said)}
    "moments": (
        ('(saved["optimizer"])', '(saved["optimizer"] | {"state": {}})'),
        "lost: the optimizer's moments: it goes on without any",
        "first difference: update 11, parameters after it",
    ),
    "step counter": (
        (
            '(saved["optimizer"])\n',
            '(saved["optimizer"])\n    for state in optimizer.state.values():\n'
            '        state["step"].zero_()\n',
        ),
        "lost: the step counter: 0 where it was 10, so the bias correction is wrong",
        "first difference: update 11, parameters after it",
    ),
    "random state": (
        ('    torch.set_rng_state(saved["random"])\n', ""),
        "lost: the random state (torch): dropout draws other numbers",
        "first difference: update 11, loss",
    ),
    "epoch's beginning": (
        ("number < first_batch", "number < 0"),
        "lost: the place in the data: update 11 gets the samples of update 7 again; is it the "
        "epoch's beginning?",
        "lost: the count: 16 updates in all, 12 uninterrupted",
    ),
    "schedule": (
        ('    scheduler.load_state_dict(saved["scheduler"])\n', ""),
        "lost: the schedule: a learning rate of 0.00909091 in update 12 where it was 0.0047619",
        "first difference: update 12, parameters after it",
    ),
    "saves sorted as strings": (
        (BY_NUMBER, 'sorted(out.glob("*.pt"))'),
        "lost: 2 saved updates: it takes the save after 8 for the newest, not that after 10: "
        "numbers are sorted as strings",
        "ledger: 48 uses of samples, each as it should be; updates replayed: 3",
    ),
    "experts sorted as strings": (
        (LOAD, BY_NAME),
        "lost: parameters' places: experts.2.weight has what experts.10.weight had, 9 are in "
        "others' places; are numbers sorted as strings, 10 before 2?",
        "first difference: update 11, parameters after it",
    ),
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check(folder, capsys, text, *options, start=("python",), code=0) -> str:
    (folder / "train.py").write_text(text)
    assert command.main([*options, "--", *start, "train.py"]) == code, capsys.readouterr()
    assert sorted(path.name for path in folder.iterdir()) == ["train.py"]  # each run had a copy
    return capsys.readouterr().out


@pytest.mark.wide
def test_a_right_script_is_exact_after_an_update_and_in_a_save(here, capsys):
    said = check(here, capsys, SCRIPT)
    assert said == (
        "killed after update 11: goes on exactly\n"
        "  it had made 11 updates, the last whole save was after 10; it went on after 10\n"
        "  losses and parameters of all 12 updates are equal to the bit\n"
        "  ledger: 48 uses of samples, each as it should be; updates replayed: 1\n"
        "killed in the save after update 4: goes on exactly\n"
        "  it had made 4 updates, the last whole save was after 2; it went on after 2\n"
        "  losses and parameters of all 12 updates are equal to the bit\n"
        "  ledger: 48 uses of samples, each as it should be; updates replayed: 2\n"
    )


@pytest.mark.parametrize(
    "what",
    [
        pytest.param(what, marks=pytest.mark.wide if what == "moments" else pytest.mark.slow)
        for what in WRONG
    ],
)
def test_what_is_lost_is_named(what, here, capsys):
    *changes, cause, also = WRONG[what]
    text = SCRIPT
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    said = check(here, capsys, text, "--kill-after-step", "11", code=1)
    assert f"  {cause}\n" in said
    assert also in said
    if "count" not in said:
        assert said.count("lost: ") == 1


@pytest.mark.slow
def test_latest_moved_before_the_save_was_durable(here, capsys):
    text = SCRIPT.replace(SAVE, EARLY_LATEST).replace(BY_NUMBER, BY_LATEST)
    said = check(here, capsys, text, code=1)
    first, second = said.split("killed in the save after update 4: does not go on exactly\n")
    assert first.startswith("killed after update 11: goes on exactly")
    assert "lost: everything: started again, it ends with exit code 1. It takes the save" in second
    assert "of 4.pt, which the kill cut short, for whole" in second
    assert "then move `latest`" in second


@pytest.mark.slow
def test_killed_three_times(here, capsys):
    said = check(here, capsys, SCRIPT, "--kill-after-step", "3", "--times", "3")
    assert said.count("it went on after") == 3
    assert "losses and parameters of all 12 updates are equal to the bit" in said
    assert "each as it should be; updates replayed: 3" in said


DDP = (
    ("import torch\n", "import torch\nimport torch.distributed as dist\n"),
    (
        "torch.manual_seed(0)\n",
        'dist.init_process_group("gloo")\nrank = dist.get_rank()\ntorch.manual_seed(0)\n',
    ),
    ("optimizer = torch", "model = nn.parallel.DistributedDataParallel(model)\noptimizer = torch"),
    ("model(x, y)", "model(x[rank::2], y[rank::2])"),
    ("updates % 2 == 0:", "updates % 2 == 0 and rank == 0:"),
)


@pytest.mark.slow
def test_under_torchrun_each_rank_has_a_random_state(here, capsys):
    """Only rank 0 saves its own, which both take: rank 1 drew other numbers for its dropout."""
    text = SCRIPT
    for old, new in DDP:
        assert text.count(old) == 1
        text = text.replace(old, new)
    torchrun = "torchrun", "--standalone", "--nproc-per-node=2"
    text = text.replace("optimizer = torch", "torch.manual_seed(rank)\noptimizer = torch", 1)
    said = check(here, capsys, text, "--kill-after-step", "5", start=torchrun, code=1)
    assert "lost: the random state (torch): dropout draws other numbers" in said
    assert "ledger: 48 uses of samples, each as it should be" in said


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch.compile looks at it
@pytest.mark.parametrize("compiled", [False, True])
def test_what_a_loss_is_called_with_is_no_sample(compiled, tmp_path):
    model, loss = nn.Sequential(nn.Linear(3, 2)), nn.CrossEntropyLoss()
    model = torch.compile(model, backend="eager") if compiled else model
    x, y = torch.ones(2, 3), torch.zeros(2, dtype=torch.long)
    with Witness(tmp_path, "") as witness:
        loss(model(x), y)
        assert witness.samples == rows((x,))


def test_a_step_that_is_given_a_closure_is_an_update_like_any(tmp_path):
    def train(folder, closes):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def closure():
            optimizer.zero_grad()
            loss = model(input=torch.arange(6.0).view(2, 3)).square().sum()
            loss.backward()
            return loss

        folder.mkdir()
        with Witness(folder, ""):
            for _ in range(2):
                if closes:
                    optimizer.step(closure)
                else:
                    closure()
                    optimizer.step()
        return [json.loads(line) for line in (folder / "0.jsonl").read_text().splitlines()]

    due, got = train(tmp_path / "a", False), train(tmp_path / "b", True)
    assert got == due
    assert set(due[0]["before"]) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert [len(update["losses"]) for update in got] == [1, 1]
    assert [len(update["samples"]) for update in got] == [2, 2]


def test_in_a_save_only_the_rank_whose_saves_are_counted_is_killed(tmp_path, monkeypatch):
    saves = [{"rank": 0, "number": n, "updates": 2 * n} for n in (1, 2)]
    whole = Attempt([[{}] * 6] * 2, saves)
    kill, says = command.plan(command.parse([]), whole)[1]
    assert says == "in the save after update 4"
    for rank, kill_at in (("0", {"save": 2}), ("1", {})):
        monkeypatch.setenv("RANK", rank)
        assert Witness(tmp_path, kill).kill_at == kill_at
        assert Witness(tmp_path, "step 3").kill_at == {"step": 3}


def test_a_temporary_folder_in_this_one_is_not_copied(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    copy = tmp_path / f"{command.FOLDER}7" / "copy"
    copy.parent.mkdir()
    command.copy_here(copy, None)
    assert list(copy.iterdir()) == []


def test_a_resumed_run_with_other_groups_and_generators_gets_a_sentence():
    due = {"rates": [0.1], "samples": ["a"], "random": {"numpy": "1"}}
    got = due | {"rates": [0.1, 0.1], "random": {}}
    said = schedule(due, got, 10)
    assert said == "the parameter groups: 2 in update 11 where there were 1"
    assert "samples of update 1 again" in place_in_data(got, [due], 10, ["numpy"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "expected a command after --, such as: -- python train.py"),
        (["--", "python", "none.py"], "got none.py, which isn't there"),
        (["--", "torchrun", "-m", "train"], "a file that ends in .py, got torchrun -m train"),
        (["--", "bash", "train.py"], "begins with torchrun or python, got bash"),
        (["--times", "0", "--", "python", "train.py"], "expected --times of 1 or more, got 0"),
        (["--folder", "..", "--", "python", "train.py"], "inside the current folder, got .."),
        (["--", "python", "train.py"], "uninterrupted, it ends with exit code 1:\nno data"),
    ],
)
def test_bad_use_gets_a_sentence(arguments, says, here, capsys):
    (here / "train.py").write_text("import sys\nsys.exit('no data')\n")
    assert command.main(arguments) == 2
    assert says in capsys.readouterr().err


@pytest.mark.slow
def test_a_training_that_is_no_two_times_the_same_cannot_be_judged(here, capsys):
    (here / "train.py").write_text(SCRIPT.replace("torch.manual_seed(0)", "torch.seed()"))
    assert command.main(["--kill-after-step", "3", "--", "python", "train.py"]) == 2
    assert "two runs differ before any kill, in the samples of update 1" in capsys.readouterr().err


@pytest.mark.wide
def test_the_command_is_there():
    words = [sys.executable, "-m", "ddpkit.resume_check", "--help"]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert "killed and started again" in said
    with pytest.raises(CannotTell):
        command.with_witness(["python"])
