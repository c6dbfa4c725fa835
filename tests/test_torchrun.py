"""Under torchrun, `launch` joins the world that runs: the same Run on every rank, records too."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from on_ranks import into_torchs_own_world
from outside import Script, run_script

from ddpkit import launch
from ddpkit.runtime.launch import _initialise_under_torchrun

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")

WORK = """
import torch
import torch.distributed as dist

def work(n):
    x = torch.full((4,), dist.get_rank() + n)
    dist.all_reduce(x)
    if dist.get_rank() == 0:
        dist.send(x, 1)
    else:
        dist.recv(x, 0)
    return x[0].item()
"""

TELL = """
import contextlib, glob, os, threading, time
from ddpkit import Link, launch

def cpp_threads():
    # those that neither Python knows nor a GPU's driver has begun
    names = []
    for task in glob.glob("/proc/self/task/*/comm"):
        with contextlib.suppress(OSError):  # it has just ended
            names.append(open(task).read())
    others = [name for name in names if not name.startswith("cuda")]
    return len(others) - threading.active_count() if names else 0

before = cpp_threads()

def name(record):
    file = os.path.basename(record.file)
    return record.op, record.detail, record.bytes, record.peer, file, record.function

def tell(*words):
    with open(f"run.{os.environ['RANK']}", "a") as file:
        print(*words, file=file)

def tell_run(run):
    said = [[name(record) for record in wire] for wire in run.wire]
    tell((list(run), said, run.output, run.seconds > 0))
    tell(run.backend)
"""

SCRIPT = """
try:
    launch(3)
except ValueError as error:
    tell(error)
try:
    launch(work, 1.0, world_size=4)
except ValueError as error:
    tell(error)
tell_run(launch(work, 1.0, world_size=2))
tell_run(launch(work, 2.0, link=Link(1e-4, 1e9)))
run = launch(work, 3.0, keep_values=True)
tell(run.wire[1][0].values, run.wire[0][1].seq)
if dist.get_rank() == 0:  # it imports for two seconds
    torch.optim.SGD(torch.nn.Linear(1, 1).parameters())
dist.destroy_process_group()
for _ in range(1200):  # until the other rank has destroyed it, too
    if cpp_threads() > before:
        time.sleep(0.05)
tell(cpp_threads() - before)
"""


def run_under_torchrun(folder, source, **options) -> list[list[str]]:
    """What each rank wrote into its file."""
    run_script(folder, source, command=TORCHRUN, OMP_NUM_THREADS="1", **options)
    return [(folder / f"run.{rank}").read_text().splitlines() for rank in range(2)]


def test_trap_9_the_same_function_under_torchrun(tmp_path):
    names = {}
    exec(compile(WORK, "script.py", "exec"), names)
    run = launch(names["work"], 1.0, world_size=2)
    said = [[(r.op, r.detail, r.bytes, r.peer, "script.py", "work") for r in w] for w in run.wire]

    first, second = run_under_torchrun(tmp_path, WORK + TELL + SCRIPT)
    assert first == second  # every rank has the whole Run
    refused, too_many, plain, backend, linked, _, values, threads = first
    assert refused.startswith("launch expected a function to call on every rank, got 3")
    assert too_many.startswith("launch got world_size=4 where torchrun started 2 ranks: leave it ")
    assert plain == repr((list(run), said, ["", ""], True))
    assert backend.endswith(": in the world that torchrun started")
    assert linked == repr(([5.0, 5.0], said, ["", ""], True))
    assert values.startswith("[4.0, 4.0, 4.0, 4.0] ")
    # Alive while the interpreter ends, Gloo's threads abort one process in forty.
    assert threads == "0"


LINKS = """
links = None, Link.preset("1 Gbit Ethernet"), None
tell([launch(work, 1.0, link=link).link.name for link in links])
"""


@pytest.mark.wide
def test_a_launch_without_a_link_has_that_of_the_command(tmp_path):
    debug = sys.executable, "-m", "ddpkit.debug", "--world-size=2", "--link", "10 Gbit Ethernet"
    run_script(tmp_path, WORK + TELL + LINKS, command=debug, OMP_NUM_THREADS="1")
    names = ["10 Gbit Ethernet", "1 Gbit Ethernet", "10 Gbit Ethernet"]
    assert (tmp_path / "run.1").read_text() == f"{names}\n"


HANGS = """
from ddpkit import launch

def waits():
    if dist.get_rank() == 0:
        dist.recv(torch.ones(3), 1)

launch(work, 1.0)
launch(waits)
"""


@pytest.mark.slow
def test_a_hang_under_torchrun_is_explained(tmp_path):
    with Script(tmp_path, WORK + HANGS, command=TORCHRUN, OMP_NUM_THREADS="1") as script:
        code, _, err = script.result()
    said = " ".join(err.split())
    assert (code, said.count("ddpkit: ")) == (1, 1)
    assert "ddpkit: deadlock: rank 0 waits in recv for rank 1, which has returned." in said
    assert "in waits: dist.recv(torch.ones(3), 1)" in said


def test_a_world_of_the_scripts_own_is_used_as_it_is(tmp_path):
    def torchruns_rank():
        into_torchs_own_world(tmp_path)
        os.environ["TORCHELASTIC_RUN_ID"] = "mine"
        run = launch(lambda: dist.get_rank() + 10)
        return list(run), run.wire, run.backend

    expected = [10, 11], [[], []], "gloo: in the world that torchrun started"  # not over our wire
    assert list(launch(torchruns_rank, world_size=2)) == [expected] * 2


def names_its_backend(folder, gpus, per_machine):
    """The backend that `launch` asks for on this rank. gpus: of each rank's machine."""
    rank, said = dist.get_rank(), []
    store = dist.FileStore(f"{folder}/store", dist.get_world_size())
    dist.rendezvous = lambda url: iter([(store, rank, dist.get_world_size())])
    dist.init_process_group = lambda backend, **_: said.append(backend)
    mine = SimpleNamespace(check_buffers=0, own_link=None)
    dist.init_process_group.session = SimpleNamespace(recorder=mine)
    dist.is_nccl_available, torch.cuda.device_count = lambda: True, lambda: gpus[rank]
    os.environ["LOCAL_WORLD_SIZE"] = str(per_machine)
    for attempt in ("0", "1"):  # torchrun keeps its store
        os.environ["TORCHELASTIC_RESTART_COUNT"] = attempt
        _initialise_under_torchrun(None, False)
    return said


@pytest.mark.parametrize(
    ("gpus", "per_machine", "backend"),
    [((1, 1), 2, "gloo"), ((2, 2), 2, "nccl"), ((1, 0), 1, "gloo"), ((1, 2), 1, "nccl")],
)
def test_all_ranks_take_nccl_or_none_does(gpus, per_machine, backend, tmp_path):
    """Also where another machine has no GPU, or one of two ranks would have none."""
    run = launch(names_its_backend, tmp_path, gpus, per_machine, world_size=2, timeout=60)
    assert list(run) == [[backend] * 2] * 2


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
def test_nccl_under_torchrun(tmp_path):
    first, _ = run_under_torchrun(
        tmp_path, WORK.replace("+ n)", "+ n, device='cuda')") + TELL + SCRIPT
    )
    assert first[3].startswith("nccl")
