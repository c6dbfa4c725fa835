"""PyTorch's schedules in our words and run by us, ours accepted and run by PyTorch."""

import pytest
import torch.distributed as dist
from on_ranks import on_ranks
from test_pipeline import check_step, gpt_and_batch, parts_of, same_gradients, twin_of
from test_schedules import MAKERS, SIZES

from ddpkit.models import mean_loss
from ddpkit.pipeline.dry_run import held, idle, validate
from ddpkit.pipeline.schedules import gpipe, one_f_one_b
from ddpkit.tools import torch_pipelining
from ddpkit.tools.torch_pipelining import (
    NAMES,
    PyTorchPipeline,
    pytorch_validates,
    pytorchs_schedule,
    words,
)

THEIRS = [name for name in NAMES if name != "1F1B"]


@pytest.mark.parametrize("name", MAKERS)
def test_pytorch_accepts_ours(name):
    for p, m in SIZES[::5]:
        pytorch_validates(MAKERS[name](p, m))


def test_pytorch_refuses_what_is_wrong():
    with pytest.raises(ValueError, match=r"PyTorch refuses it.*without first running Forward"):
        pytorch_validates([["0B0", "0F0"]])


@pytest.mark.parametrize("name", THEIRS)
def test_ours_accepts_pytorchs(name):
    for ranks in (2, 4):
        schedule = pytorchs_schedule(name, ranks, 8)
        pytorch_validates(schedule)
        validate(schedule)


def test_the_same_schedule_by_both():
    """PyTorch's zero bubble with one stage a rank is not there; the rest is ours to the letter."""
    for p, m in [(2, 4), (3, 3), (4, 8), (4, 2)]:
        assert pytorchs_schedule("GPipe", p, m) == gpipe(p, m)
        assert pytorchs_schedule("Interleaved1F1B", p, m) == MAKERS["interleaved"](p, m)
    zero = pytorchs_schedule("InterleavedZeroBubble", 4, 8)
    assert idle(zero) == [3] * 4
    assert idle(pytorchs_schedule("ZBVZeroBubble", 4, 16)) == [3] * 4
    assert max(held(zero).values()) == 8


def test_1f1b_is_ours_but_for_its_miscount():
    """torch 2.13 counts some forwards of the last stage twice; `step` doesn't use this list."""
    schedule = pytorchs_schedule("1F1B", 4, 8)
    assert schedule[:-1] == one_f_one_b(4, 8)[:-1]


def test_words():
    row = "0F0,,0SEND_F0,0UNSHARD,10I12,0RECV_B0,(0F1;3B0)OVERLAP_F_B,0REDUCE_GRAD,0W3"
    assert words(row.split(",")) == ["0F0", "10I12", "0F1", "3B0", "0W3"]
    assert words(["0F0", None, "1B1"]) == ["0F0", "1B1"]


def test_another_torch():
    with pytest.raises(ImportError, match=r"torch.* has no .*schedules\._Nothing, which"):
        torch_pipelining.private("_Nothing")


@pytest.fixture
def theirs():
    """Made here: importing PyTorch's pipelines takes two seconds of every rank."""
    found = {}
    for ranks in (2, 4):
        found[ranks] = {name: pytorchs_schedule(name, ranks, 8) for name in THEIRS}
    return found


@on_ranks(2, 4)
def test_theirs_on_ours(check, theirs):
    for name, schedule in theirs[dist.get_world_size()].items():
        check_step(check, schedule, name)


@on_ranks(2)
def test_ours_on_theirs(check, tmp_path):
    for name in ("gpipe", "1F1B", "interleaved", "zero bubble"):
        schedule = MAKERS[name](2, 4)
        path = tmp_path / f"{name} {dist.get_rank()}.csv"
        path.write_text("\n".join(map(",".join, schedule)))
        model, inputs, targets = gpt_and_batch(4)
        pipeline = PyTorchPipeline(parts_of(model, schedule), schedule, mean_loss)
        pipeline.engine._load_csv(path)  # as PyTorch reads it
        loss = pipeline.step(inputs, targets)
        twin, expected = twin_of(4)
        same_gradients(check, model, twin, parts_of(model, schedule), name, ends=True)
        if loss is not None:
            check.close(loss, expected, 1e-12, name, "loss")
