"""`ddpkit.train`: every mesh trains as one process does; what can't work is said beforehand."""

import dataclasses
import itertools
import json
import math
import os
import subprocess
import sys
import threading

import pytest
import torch
from outside import FREEZE_S, run_script
from torch.utils._python_dispatch import TorchDispatchMode

from ddpkit import launch
from ddpkit.lesson import capstone_runs
from ddpkit.tools.rate import learning_rate
from ddpkit.train import TrainConfig, Trainer, problems, report
from ddpkit.train import __main__ as train_command
from ddpkit.train.checkpoint import Checkpoints
from ddpkit.train.config import AXES, CHOICES, parse
from ddpkit.train.data import Sequences, ledger
from ddpkit.train.state import whole_parameters, whole_state
from ddpkit.train.trainer import own_device

TINY = {"layers": 2, "width": 32, "heads": 4, "length": 16, "batch": 12, "steps": 6, "warmup": 2}
STEPS = 3
# Two right runs differ by roundings, which don't conspire: ε · √(the longest sum), for each step.
ROUNDING = 2.0**-23 * math.sqrt(TINY["batch"] * TINY["length"] * TINY["width"])

MESHES = {  # by world size; axes of unequal sizes where there are two
    1: [
        {"micro_batches": 3},
        {"recompute": True},
    ],
    2: [
        {"data": 2, "sharding": "zero1", "micro_batches": 2, "recompute": True},
        {"context": 2, "sharding": "fsdp", "attention": "ring"},
        {"context": 2, "attention": "gathered", "micro_batches": 3},
        {"tensor": 2, "micro_batches": 2},
        {"pipeline": 2, "micro_batches": 3, "schedule": "gpipe"},
    ],
    3: [
        {"data": 3, "sharding": "fsdp", "micro_batches": 2, "batch": 11},
        {"data": 3, "sharding": "zero1", "batch": 11},
        {"pipeline": 3, "micro_batches": 2},
    ],
    4: [
        {"data": 4},
        {"data": 4, "sharding": "fsdp", "micro_batches": 3},
        {"data": 2, "tensor": 2, "sharding": "zero1", "micro_batches": 2},
        {"data": 2, "tensor": 2, "sharding": "fsdp", "recompute": True},
        {"data": 2, "pipeline": 2, "micro_batches": 3, "sharding": "zero1"},
        {"data": 2, "pipeline": 2, "micro_batches": 6, "schedule": "zero_bubble"},
        {"data": 2, "context": 2, "sharding": "zero1", "attention": "all_to_all"},
        {"data": 2, "context": 2, "sharding": "fsdp"},
        {"tensor": 4, "recompute": True},
        {"tensor": 2, "pipeline": 2, "micro_batches": 2, "recompute": True},
        {"tensor": 2, "context": 2, "attention": "ring"},
        {"pipeline": 4, "micro_batches": 4, "recompute": True},
        {"pipeline": 2, "context": 2, "micro_batches": 2, "attention": "gathered"},
        {"context": 4, "length": 14},  # two chunks a rank don't divide it
    ],
    8: [
        {"data": 4, "tensor": 2, "sharding": "fsdp"},
        {"data": 2, "tensor": 4, "sharding": "zero1", "micro_batches": 2},
        {"data": 4, "pipeline": 2, "micro_batches": 3, "sharding": "zero1"},
        {"data": 2, "tensor": 2, "pipeline": 2, "micro_batches": 2, "recompute": True},
        {"data": 2, "tensor": 2, "context": 2, "sharding": "fsdp"},
        {"context": 2, "tensor": 2, "pipeline": 2, "micro_batches": 2},
        {"context": 4, "pipeline": 2, "micro_batches": 2, "sharding": "zero1"},
    ],
}


def outcomes(configs: list[TrainConfig]) -> list[tuple]:
    """Losses and norms of three steps, and all parameters, of each training; on every rank."""
    found = []
    for config in configs:
        trainer = Trainer(config)
        before = whole_parameters(trainer)
        steps = [trainer.step(number) for number in range(STEPS)]
        after = whole_parameters(trainer)
        found.append((steps, before, after))
    return found


def configs(meshes: list[dict], **options) -> list[TrainConfig]:
    made = [TrainConfig(**(TINY | options | mesh)) for mesh in meshes]
    assert [problems(config) for config in made] == [[]] * len(made)
    return made


def alone(config: TrainConfig) -> TrainConfig:
    """The same training on one rank, in one micro-batch."""
    return dataclasses.replace(
        config, **dict.fromkeys(AXES, 1), sharding="ddp", micro_batches=1, recompute=False
    )


def trained_alone(made: list[TrainConfig]) -> list[tuple]:
    """Outcomes of each on one rank. Configs that differ only in their mesh share one training."""
    twins = [alone(config) for config in made]
    different = [twin for at, twin in enumerate(twins) if twin not in twins[:at]]
    (found,) = launch(outcomes, different, world_size=1, backend="gloo")
    return [found[different.index(twin)] for twin in twins]


@pytest.mark.parametrize("optimizer", ["sgd", pytest.param("adamw", marks=pytest.mark.wide)])
@pytest.mark.parametrize(
    ("world_size", "backend"),
    [
        *[(ranks, "gloo") for ranks in (1, 2, 3, 4)],
        pytest.param(8, "gloo", marks=pytest.mark.slow),
        *[pytest.param(ranks, "nccl", marks=pytest.mark.gpu) for ranks in (1, 2, 3, 4)],
    ],
)
def test_every_mesh_trains_as_one_process(world_size, backend, optimizer):
    # SGD's update is the gradient: a wrong factor shows in it. AdamW divides by the gradient's
    # size, so that roundings of the smallest grow; a factor would hide in it, but not in norms.
    bound = {"sgd": STEPS * ROUNDING, "adamw": 0.02}[optimizer]
    rate = {"sgd": 0.1, "adamw": 0.003}[optimizer]
    made = configs(MESHES[world_size], optimizer=optimizer, lr=rate)
    serial = trained_alone(made)
    ranks = list(launch(outcomes, made, world_size=world_size, backend=backend))
    for case, config in enumerate(made):
        steps, _, right = serial[case]
        for rank, found in enumerate(ranks):
            mine, before, after = found[case]
            where = f"rank {rank} of {MESHES[world_size][case]}"
            for one, other in zip(steps, mine, strict=True):
                assert other["loss"] == pytest.approx(one["loss"], rel=STEPS * ROUNDING), where
                assert other["norm"] == pytest.approx(one["norm"], rel=STEPS * ROUNDING), where
            assert after.keys() == right.keys(), where
            for name, value in after.items():
                moved = (right[name] - before[name]).norm()
                apart = (value - right[name]).norm()
                # What is smaller than the parameter's own last digits isn't held against it.
                least = 2.0**-23 * right[name].norm()
                assert apart <= bound * moved + STEPS * least, f"{where}: {name} in {config}"


EXACT = {"optimizer": "sign", "exact": True, "clip": 0.0, "width": 16, "length": 8}


@pytest.mark.parametrize(
    "world_size",
    [2, 3, pytest.param(4, marks=pytest.mark.wide), pytest.param(8, marks=pytest.mark.slow)],
)
def test_the_exact_twin_is_equal_to_the_last_bit(world_size):
    meshes = [mesh for mesh in MESHES[world_size] if "context" not in mesh]
    made = configs(meshes, **EXACT)
    serial = trained_alone(made)
    for found in launch(outcomes, made, world_size=world_size):
        for case, mesh in enumerate(meshes):
            right, wrong = serial[case], found[case]
            assert [s["loss"] for s in right[0]] == [s["loss"] for s in wrong[0]], mesh
            assert all(torch.equal(right[2][name], wrong[2][name]) for name in right[2]), mesh


def test_dropout_draws_alike_wherever_the_batch_is_cut_alike():
    """Six micro-batches in all: over data ranks, over stages, recomputed, with split layers."""
    options = {"dropout": 0.2, "optimizer": "sgd", "lr": 0.1}
    meshes = [
        {"data": 2, "micro_batches": 3, "recompute": True},
        {"pipeline": 2, "micro_batches": 6},
        {"tensor": 2, "micro_batches": 6},
        {"data": 2, "micro_batches": 3, "sharding": "fsdp", "recompute": True},
    ]
    in_six = configs([{"micro_batches": 6}], **options)
    (serial,) = launch(outcomes, in_six, world_size=1, backend="gloo")  # a GPU draws other numbers
    losses = [step["loss"] for step in serial[0][0]]
    (without,) = launch(outcomes, configs([{"micro_batches": 6}]), world_size=1)
    assert losses != [step["loss"] for step in without[0][0]]
    for found in launch(outcomes, configs(meshes, **options), world_size=2):
        for case, (steps, _, _) in enumerate(found):
            got = [step["loss"] for step in steps]
            assert got == pytest.approx(losses, rel=STEPS * ROUNDING), meshes[case]


def test_experts_that_ranks_share_train_as_on_one():
    options = {"experts": 4, "optimizer": "sgd", "lr": 0.1, "clip": 0.0}
    meshes = [{"data": 2}, {"data": 2, "share_experts": False, "micro_batches": 2}]
    (serial,) = launch(outcomes, configs([{}], **options), world_size=1)
    right = [(step["loss"], step["norm"]) for step in serial[0][0]]
    for found in launch(outcomes, configs(meshes, **options), world_size=2):
        for steps, _, _ in found:
            for step, (loss, norm) in zip(steps, right, strict=True):
                assert step["loss"] == pytest.approx(loss, rel=STEPS * ROUNDING)
                assert step["norm"] == pytest.approx(norm, rel=STEPS * ROUNDING)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_computes_the_same_but_for_its_roundings(dtype):
    meshes = [{"data": 2}, {"tensor": 2}, {"pipeline": 2, "micro_batches": 2}]
    if dtype == "bfloat16":
        meshes.append({"data": 2, "sharding": "fsdp"})
    options = {"optimizer": "sgd", "lr": 0.1}
    (serial,) = launch(outcomes, configs([{}], **options), world_size=1)
    digits = {"bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]  # of one rounding
    for found in launch(outcomes, configs(meshes, dtype=dtype, **options), world_size=2):
        for steps, _, _ in found:
            pairs = zip(serial[0][0], steps, strict=True)
            off = [abs(other["loss"] - one["loss"]) / one["loss"] for one, other in pairs]
            assert 0 < max(off) < digits  # a single loss may be equal by chance


# Checkpoints: saved on one mesh, loaded on another


TIED_AND_UNEVEN = {"layers": 11, "width": 12, "heads": 4, "length": 8, "batch": 4, "steps": 4}
SAVED_ON = [
    {},
    {"data": 2, "sharding": "fsdp"},
    {"data": 2, "sharding": "zero1"},
    {"tensor": 2},
    {"pipeline": 2, "micro_batches": 2},
    {"data": 4, "sharding": "fsdp"},
    {"data": 4, "sharding": "zero1"},
    {"data": 2, "tensor": 2, "sharding": "zero1"},
    {"data": 2, "tensor": 2, "sharding": "fsdp"},
    {"tensor": 2, "pipeline": 2, "micro_batches": 2, "sharding": "zero1"},
    {"context": 2, "data": 2, "sharding": "zero1"},
]


def save_on(config: TrainConfig, folder: str) -> dict:
    trainer = Trainer(config)
    checkpoints = Checkpoints(trainer, folder)
    for number in range(2):
        trainer.step(number)
    saved = whole_state(trainer)
    # The thread that writes is held back until a further step has changed all parameters.
    stepped = threading.Event()
    write = checkpoints.write
    checkpoints.write = lambda *staged: stepped.wait() and write(*staged)
    checkpoints.save(2)
    trainer.step(2)
    stepped.set()
    checkpoints.wait()
    return saved


def load_on(config: TrainConfig, folders: list[str]) -> list[dict]:
    found = []
    for folder in folders:
        trainer = Trainer(config)
        assert Checkpoints(trainer, folder).load() == 2
        found.append(whole_state(trainer))
    return found


def load_everywhere(meshes: list[dict], tmp_path, **options) -> int:
    """Save on each mesh, load on each; the number of pairs whose tensors had all bits."""
    made = [TrainConfig(**(TIED_AND_UNEVEN | options | mesh)) for mesh in meshes]
    folders = [str(tmp_path / str(number)) for number in range(len(made))]
    saved = []
    for config, folder in zip(made, folders, strict=True):
        saved.append(launch(save_on, config, folder, world_size=config.world_size)[0])
    pairs = 0
    for config in made:
        for found in launch(load_on, config, folders, world_size=config.world_size):
            for here, there in zip(found, saved, strict=True):
                assert here.keys() == there.keys()
                assert all(torch.equal(here[name], there[name]) for name in here), config
        pairs += len(folders)
    return pairs


@pytest.mark.wide
def test_any_mesh_loads_what_another_has_saved(tmp_path):
    assert load_everywhere([SAVED_ON[at] for at in (0, 1, 4, 7)], tmp_path) == 16


@pytest.mark.wide
def test_experts_are_loaded_by_whichever_rank_has_them(tmp_path):
    """Twelve experts, of which 10 doesn't come before 2; the router's bias is a buffer."""
    meshes = [{}, {"data": 2}, {"data": 3}, {"data": 2, "share_experts": False}]
    assert load_everywhere(meshes, tmp_path, experts=12, layers=2, batch=6) == 16


@pytest.mark.slow
@pytest.mark.timeout(600)  # two minutes on a quiet machine
def test_all_pairs_of_meshes(tmp_path):
    assert load_everywhere(SAVED_ON, tmp_path) == 121


def test_a_state_has_every_tensor_of_the_model_and_its_optimizer():
    def names(config):
        trainer = Trainer(config)
        trainer.step(0)
        return sorted(whole_state(trainer))

    (found,) = launch(names, TrainConfig(**TINY), world_size=1)
    model = [name for name in found if name.startswith("parameters.")]
    assert "parameters.tokens.weight" in model
    assert "parameters.head.weight" not in model  # the same weight
    trained = [name.removeprefix("parameters.") for name in model if "positions" not in name]
    for moment in ("exp_avg", "exp_avg_sq"):
        assert [name for name in found if name.startswith(f"optimizer.{moment}.")] == [
            f"optimizer.{moment}.{name}" for name in trained
        ]


# What can't be trained


BAD = [
    ({"layers": 0}, "layers = 0: give a whole number from 1."),
    ({"sharding": "zero4"}, "sharding = 'zero4': choose one of ddp, zero1, fsdp."),
    ({"lr": 0.0}, "lr = 0.0: give a number above 0."),
    ({"width": 30}, "width 30 can't be shared by 4 heads: make it a multiple."),
    ({"tensor": 3}, "4 heads can't be dealt to 3 tensor ranks: choose a multiple of 3 heads."),
    ({"pipeline": 5, "micro_batches": 5}, "2 blocks, embedding and head can't make 5 stages"),
    ({"data": 5, "micro_batches": 3}, "leaves some of 5 data ranks × 3 micro-batches without any"),
    ({"pipeline": 2, "micro_batches": 5}, "equally long: choose 15."),
    ({"pipeline": 2, "sharding": "fsdp"}, "each micro-batch would gather every weight anew"),
    ({"dtype": "float16", "sharding": "fsdp"}, "choose sharding = 'ddp', or dtype = 'bfloat16'"),
    ({"exact": True}, "choose clip = 0"),
    ({"experts": 4, "tensor": 2}, "experts share the data axis with data parallelism alone"),
    ({"experts": 3, "data": 2}, "3 experts can't be dealt to 2 data ranks"),
    ({"experts": 2, "top_k": 3}, "top_k = 3 of 2 experts: choose from 1 to 2."),
    ({"context": 3, "attention": "all_to_all"}, "4 heads a rank can't be dealt to 3 context ranks"),
    ({"context": 2, "dropout": 0.1}, "context ranks would draw alike"),
    ({"text": "no/such/file"}, "there is no such file"),
    ({"pipeline": 2, "micro_batches": 2, "recompute": True, "schedule": "zero_bubble"}, "1f1b"),
]


@pytest.mark.parametrize(("values", "says"), BAD, ids=[str(values) for values, _ in BAD])
def test_what_cannot_be_trained_is_said(values, says):
    assert says in "\n".join(problems(TrainConfig(**(TINY | values))))


@pytest.mark.wide
def test_every_combination_of_settings_is_allowed_or_has_a_sentence():
    """None is let through that the trainer doesn't know: it is built and steps, or it is said."""
    allowed = []
    for sharding, schedule, dtype in itertools.product(
        CHOICES["sharding"], CHOICES["schedule"], CHOICES["dtype"]
    ):
        mesh = {"data": 2, "pipeline": 2, "micro_batches": 2, "recompute": True}
        values = TINY | mesh | {"sharding": sharding, "schedule": schedule, "dtype": dtype}
        if not problems(TrainConfig(**values)):
            allowed.append(TrainConfig(**values))
    assert len(allowed) == 2 * 3 + 2 * 2  # 1f1b and gpipe: ddp with three dtypes, zero1 with two
    for found in launch(outcomes, allowed, world_size=4):
        assert all(math.isfinite(step["loss"]) for steps, _, _ in found for step in steps)


def test_a_world_that_does_not_fit_is_told_which_would():
    config = TrainConfig(**(TINY | {"data": 2, "tensor": 2}))
    (said,) = problems(config, world_size=6)
    assert "= 4 ranks, but 6 were started: start 4, or choose data = 3." in said
    (said,) = problems(config, world_size=3)
    assert "choose axes whose product is 3" in said


# Settings from a file and flags


def test_flags_win_over_the_file(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text('layers = 3\nlr = 1\nsharding = "zero1"\nrecompute = true\n')
    config = parse([str(file), "--layers", "5", "--no-recompute"])
    assert (config.layers, config.lr, config.sharding) == (5, 1.0, "zero1")
    assert config.recompute is False


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("layer = 3", "'layer' is no setting. There are: layers, width"),
        ("layers = 2.5", "layers = 2.5, expected a value of type int"),
        ("layers = true", "layers = True, expected a value of type int"),
        ("layers =", "can't be read as TOML"),
    ],
)
def test_a_wrong_file_is_a_sentence(text, says, tmp_path):
    file = tmp_path / "config.toml"
    file.write_text(text)
    with pytest.raises(SystemExit, match=says):
        parse([str(file)])


# The data and the schedule


def test_an_epoch_has_each_sequence_once_wherever_batches_end():
    sequences = Sequences(torch.arange(101, dtype=torch.uint8), 10, seed=1)
    assert sequences.number == 10
    used = [sample for step in range(5) for sample in sequences.of_step(step, 4)]
    assert sorted(used[:10]) == sorted(used[10:]) == list(range(10))
    assert used[:10] != used[10:]  # another order
    rows = sequences.rows([3])
    assert rows.tolist() == [list(range(30, 41))]


def test_the_ledger_sees_what_came_twice_or_not_at_all():
    fine = {0: [0, 1, 2], 1: [3, 0, 2], 2: [1, 3]}
    assert ledger(fine, number=4) == []
    assert ledger(fine | {1: [3, 0, 0]}, number=4) == ["epoch 1: 1 of 4 sequences came again"]
    assert "step 1 is missing" in ledger({0: [0], 2: [1]}, number=4)


def test_the_rate_rises_and_falls():
    rates = [learning_rate(step, steps=11, warmup=4, peak=1.0, last=0.1) for step in range(11)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert rates[-1] == pytest.approx(0.1)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert learning_rate(4, steps=5, warmup=4, peak=1.0, last=0.1) == 1.0  # no step is left to fall


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, torch.float32),
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": "float16"}, torch.float16),
        ({"exact": True}, torch.float64),
    ],
)
def test_mfu_compares_with_products_in_the_dtype_of_the_run(options, expected):
    def dtypes():
        report.MEASURED_S = 0.001
        with Products() as products:
            speed = report.measure_products(TrainConfig(**(TINY | options)), own_device())
        return speed > 0, products.dtypes

    assert list(launch(dtypes, world_size=1, backend="gloo")) == [(True, {expected})]


class Products(TorchDispatchMode):
    """Notes the dtypes of matrix products."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op is torch.ops.aten.mm.default:
            self.dtypes.add(args[0].dtype)
        return op(*args, **(kwargs or {}))


# The command


def command(*flags: str, torchrun: int = 0, cwd=None) -> subprocess.CompletedProcess:
    start = ["-m", "torch.distributed.run", f"--nproc-per-node={torchrun}"] if torchrun else []
    values = [f"--{name}={value}" for name, value in TINY.items()]
    whole = [sys.executable, *start, "-m", "ddpkit.train", *values, *flags]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        whole, capture_output=True, text=True, timeout=FREEZE_S, cwd=cwd, env=environ, check=False
    )


@pytest.mark.wide
def test_the_command_trains_resumes_and_leaves_a_log_a_curve_and_a_sample(tmp_path):
    folder = tmp_path / "run"
    first = command("--data=2", f"--folder={folder}", "--steps=3", "--decay-to=1", "--warmup=0")
    assert first.returncode == 0, first.stderr
    assert "step 1 of 3  loss 5." in first.stdout
    assert "The " in first.stdout
    # Resumed under torchrun, on another mesh.
    second = command("--tensor=2", f"--folder={folder}", "--decay-to=1", "--warmup=0", torchrun=2)
    assert second.returncode == 0, second.stderr
    assert "resumed after 3 steps: step 3 is next" in second.stdout
    steps = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(6))
    assert ledger({step["step"]: step["samples"] for step in steps}, 10**4) == []
    assert sorted(path.name for path in folder.iterdir()) == [
        "log.jsonl",
        "loss.png",
        "step-00000003",
        "step-00000006",
    ]


def test_a_bad_config_starts_no_rank(tmp_path, capsys):
    found = command("--tensor=3", "--pipeline=2")
    assert found.returncode == 2
    assert "4 heads can't be dealt to 3 tensor ranks" in found.stderr
    assert found.stdout == ""
    short = tmp_path / "short.txt"
    short.write_text("too short")
    assert train_command.main([f"--text={short}", "--length=16"]) == 2
    assert "expected a text of more than 16 bytes, got 9" in capsys.readouterr().err


def test_under_torchrun_ranks_with_a_gpu_each_train_on_it(monkeypatch):
    """Its backend for GPUs has a name of two parts, one for the CPU."""
    for backend, device in (("gloo", "cpu"), ("nccl", "cuda"), ("cpu:gloo,cuda:nccl", "cuda")):
        monkeypatch.setattr(torch.distributed, "get_backend", lambda name=backend: name)
        assert own_device().type == device


ON_GPU = """
import torch.distributed as dist
from ddpkit.train import TrainConfig, Trainer
from ddpkit.train.__main__ import join_torchruns_world

if __name__ == "__main__":
    join_torchruns_world()
    trainer = Trainer(TrainConfig(steps=2))
    losses = [trainer.step(number)["loss"] for number in range(2)]
    print(trainer.device, losses[1] < losses[0])
    dist.destroy_process_group()
"""


@pytest.mark.gpu
def test_under_torchrun_on_a_gpu(tmp_path):
    torchrun = sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"
    assert run_script(tmp_path, ON_GPU, command=torchrun) == "cuda True\n"


def spoilt(config, factor, apart):
    """Gradients are `factor` times too large; in the end rank 0's embedding is `apart` off."""
    trainer = Trainer(config)
    for parameter in filter(lambda each: each.requires_grad, trainer.part.parameters()):
        parameter.register_hook(lambda gradient: factor * gradient)
    losses = [trainer.step(number)["loss"] for number in range(2)]
    trainer.part.tokens.weight.data.add_(apart * (trainer.mesh.rank("data") == 0))
    return losses, whole_state(trainer)


def test_the_exact_twin_sees_a_factor_and_a_copy_that_is_apart():
    """Signs hide a factor from losses and parameters; the sums of gradients show it."""
    sizes = {"layers": 1, "width": 8, "heads": 2, "length": 4, "batch": 2}
    twin = TrainConfig(**sizes, exact=True, optimizer="sign", clip=0.0)
    (right,) = launch(capstone_runs.twin_of, twin, 2, world_size=1)
    (losses, state) = launch(spoilt, twin, 2, 0, world_size=1)[0]
    assert (losses, state.keys()) == (right[0], right[1].keys())
    wrong = {name for name in state if not torch.equal(state[name], right[1][name])}
    assert wrong == {name for name in state if name.startswith("optimizer.sum.")}
    run = launch(spoilt, dataclasses.replace(twin, data=2), 1, 1, world_size=2)
    assert [capstone_runs.same(right, rank) for rank in run] == [False, True]
