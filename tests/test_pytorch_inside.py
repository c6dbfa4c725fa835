"""PyTorch runs inside `launch` unmodified: the results of plain Gloo, and all is recorded."""

import math
import pickle
from collections import Counter

import pytest
import pytorch_cases
import torch
import torch.distributed as dist
from fake_nccl import on_nccl
from on_ranks import into_torchs_own_world
from pytorch_cases import CASES, WORLD, grid, init_device_mesh, results, sharded, split_mlp

from ddpkit import LaunchError, launch
from ddpkit.runtime.wire import recorder


def run_all(folder):
    """({case: result over the wire}, {case: its calls}, over plain Gloo, the twins' distances)."""
    wired, calls = {}, {}
    for name in CASES:
        before = len(recorder().records)
        wired |= results([name])
        calls[name] = len(recorder().records) - before - 1  # a barrier is last
    twins = [ways() for ways in (hybrid, sharded_and_split, pipelined)]
    into_torchs_own_world(folder)
    return wired, calls, results(CASES), twins


def batch(part):
    return (torch.arange(24).view(3, 8) + 10 * part) / 100


def furthest_from_serial(module, parts):
    """The largest difference to the gradients of one process with the batches of all."""
    twin, worst = pytorch_cases.mlp(), 0.0
    for part in range(parts):
        (twin(batch(part)).square().mean() / parts).backward()
    for ours, its in zip(module.parameters(), twin.parameters(), strict=True):
        worst = max(worst, (ours.grad.full_tensor() - its.grad).abs().max().item())
    return worst


def hybrid():
    """HSDP on a 2 × 2 mesh: shards in a row, replicas in a column."""
    module = sharded(pytorch_cases.mlp(), grid())
    module(batch(dist.get_rank())).square().mean().backward()
    return furthest_from_serial(module, WORLD)


def sharded_and_split():
    """On a 2 × 2 mesh: FSDP in one direction, tensor parallel in the other."""
    mesh = grid()
    module = sharded(split_mlp(mesh["tp"]), mesh["dp"])
    module(batch(mesh["dp"].get_local_rank())).square().mean().backward()
    return furthest_from_serial(module, 2)


def pipelined():
    _, ((weight, bias),) = pytorch_cases.schedule("Schedule1F1B")
    torch.manual_seed(0)
    twin = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(WORLD)))
    for micro_batch in (torch.arange(32.0).view(8, 4) / 32).chunk(4):
        ((twin(micro_batch) - micro_batch).square().mean() / 4).backward()
    mine = twin[dist.get_rank()]
    differences = mine.weight.grad - torch.tensor(weight), mine.bias.grad - torch.tensor(bias)
    return max(difference.abs().max().item() for difference in differences)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return launch(run_all, str(tmp_path_factory.mktemp("plain")), world_size=WORLD)


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_plain_gloo(run, name):
    for wired, _, plain, _ in run:
        assert wired[name] == plain[name]
    said = sum(calls[name] for _, calls, _, _ in run)
    silent = {"distributed_sampler"} | ({"split_group"} if torch.__version__ < "2.15" else set())
    assert (said > 0) == (name not in silent)  # before 2.15, Gloo can't split


# The same over the fake NCCL, whose data Gloo carries

ON_NCCL = [name for name in CASES if name not in pytorch_cases.NOT_ON_NCCL]
ON_NCCL.remove("a_compiled_ddp")  # the compiler asks for a GPU that is real


@pytest.fixture(scope="module")
def over_nccl():
    def run_all():
        return results(ON_NCCL), [group.communicators for group in dist.ProcessGroupNCCL.made]

    return launch(on_nccl(run_all), world_size=WORLD, timeout=120)


@pytest.mark.wide
@pytest.mark.parametrize("name", ON_NCCL)
def test_results_over_nccl_are_those_of_plain_gloo(run, over_nccl, name):
    for (_, _, plain, _), (found, _) in zip(run, over_nccl, strict=True):
        assert found[name] == plain[name]


@pytest.mark.wide
def test_every_group_connects_once_over_nccl(over_nccl):
    for _, communicators in over_nccl:
        assert len(communicators) > 10
        assert set(communicators) == {1}


# The same on a GPU, or on several


def run_on_gpus(folder, names):
    torch.set_default_device("cuda")
    for name in names:
        found = results([name])[name]
        (folder / f"{name}.{dist.get_rank()}").write_bytes(pickle.dumps(found))


@pytest.fixture(scope="module")
def on_gpus(tmp_path_factory):
    """{case: what each rank found, or the error that it ended a launch by}."""
    folder, found = tmp_path_factory.mktemp("gpus"), {}
    left = [name for name in CASES if name not in pytorch_cases.NOT_ON_NCCL]
    while left:
        error = None
        try:
            launch(run_on_gpus, folder, left, world_size=WORLD, backend="nccl", timeout=80)
        except LaunchError as failed:
            error = failed
        for name in list(left):
            kept = [folder / f"{name}.{rank}" for rank in range(WORLD)]
            if not all(path.exists() for path in kept):
                found[name] = error
                left.remove(name)
                break
            found[name] = [pickle.loads(path.read_bytes()) for path in kept]
            left.remove(name)
    return found


def near(one, other):
    """Alike but for rounding; what overflows in one order of adding needn't in another."""
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(near, one, other))
    if isinstance(one, float) and math.isfinite(one) and math.isfinite(other):
        return math.isclose(one, other, rel_tol=0.05, abs_tol=0.05)
    return isinstance(one, float) or one == other


def test_near():
    assert near([1.0, (2, None)], [1.01, (2, None)])
    for wrong in ([1.0], [1.0, (3, None)], [1.2, (2, None)]):
        assert not near([1.0, (2, None)], wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_results_on_gpus_are_those_of_gloo(request, name):
    if name in pytorch_cases.NOT_ON_NCCL:
        pytest.skip(f"NCCL: {pytorch_cases.NOT_ON_NCCL[name]}")
    found = request.getfixturevalue("on_gpus")[name]
    if isinstance(found, LaunchError):
        raise found
    for ours, (wired, *_) in zip(found, request.getfixturevalue("run"), strict=True):
        assert near(ours, wired[name])


def test_gradients_are_the_serial_twins(run):
    assert max(max(twins) for *_, twins in run) < 1e-6


def test_enough_of_pytorch_is_tried():
    assert len(CASES) >= 40


# How often PyTorch's own ways to train call


def calls_by_op(records):
    return Counter(record.op for record in records if record.op != "new_group")


def fully_sharded_step():
    """Calls of the second step; in the first, FSDP gets ready."""
    torch.manual_seed(0)
    blocks = [torch.nn.Linear(8, 8) for _ in range(3)]
    module, mesh = torch.nn.Sequential(*blocks), init_device_mesh("cpu", (dist.get_world_size(),))
    for block in blocks:
        sharded(block, mesh)
    sharded(module, mesh)
    pytorch_cases.train(module, steps=1)
    before = len(recorder().records)
    pytorch_cases.train(module, steps=1)
    return calls_by_op(recorder().records[before:])


def tensor_parallel_step():
    """Calls of forward, calls of backward."""
    module = split_mlp(init_device_mesh("cpu", (dist.get_world_size(),)))
    before = len(recorder().records)
    loss = module(torch.ones(3, 8).requires_grad_()).square().mean()
    forward = len(recorder().records)
    loss.backward()
    records = recorder().records
    return calls_by_op(records[before:forward]), calls_by_op(records[forward:])


def pipeline_step():
    before = len(recorder().records)
    pytorch_cases.schedule("Schedule1F1B")
    records = recorder().records[before:]
    return calls_by_op(record for record in records if record.dtype == "float32")


# Of 4 micro-batches, forward and backward; torch 2.11 tells shapes by messages of their own.
MESSAGES = 5 if torch.__version__ < "2.12" else 4


def test_counts_of_fsdp_tensor_parallel_and_1f1b():
    def count():
        return fully_sharded_step(), tensor_parallel_step(), pipeline_step()

    for fsdp, (forward, backward), pipeline in launch(count, world_size=2):
        assert fsdp == {"all_gather": 6, "reduce_scatter": 3}
        assert (forward, backward) == ({"all_reduce": 1}, {"all_reduce": 1})
        assert pipeline == {"send": MESSAGES, "recv": MESSAGES}
