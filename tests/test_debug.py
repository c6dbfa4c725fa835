"""`ddpkit.debug`: unmodified scripts under torchrun, with their own init_process_group."""

import ctypes
import functools
import json
import os
import re
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from outside import FREEZE_S, run_script, two_machines
from pytorch_cases import CASES
from test_board import call

from ddpkit import RankError, launch
from ddpkit.debug import main
from ddpkit.inspect import session
from ddpkit.inspect.explain import explain, read_dumps
from ddpkit.inspect.session import Session, own_gpu
from ddpkit.runtime import wire
from ddpkit.runtime.board import RUNNING
from ddpkit.runtime.look import Look

BEGIN = """\
import os, signal, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", os.environ.get("STORE"), rank=rank, world_size=world_size)
x = torch.full((4,), float(rank))
dist.barrier()
"""
LINES = BEGIN.count("\n")
RIGHT = """\
dist.all_reduce(x)
time.sleep(0.7 * rank)  # rank 0 is done before the others
print(f"{rank}: {x.tolist()} {dist.get_backend()} {sys.argv[1:]}")
"""
UNUSED = """\
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.second(x) if rank == 1 else self.second(self.first(x))

net = DistributedDataParallel(Net())
net(x).sum().backward()
"""


def torchruns_rank(folder, per_machine, arguments=(), networks=(), fork=False):
    """Within `launch`: become a rank as torchrun starts it, and run `ddpkit.debug` in it.

    networks: of the machines: (namespace, interface). fork: run it in a child; the child's code.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    machine, local = divmod(rank, per_machine)
    attempt = Path(folder, f"machine_{machine}")
    attempt.mkdir(exist_ok=True)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(per_machine)}
    os.environ["TORCHELASTIC_ERROR_FILE"] = f"{attempt}/{local}/error.json"
    if networks:
        namespace, os.environ["GLOO_SOCKET_IFNAME"] = networks[machine]
        with open(f"/run/netns/{namespace}") as file:
            assert ctypes.CDLL(None).setns(file.fileno(), 0) == 0
        os.environ |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500"}
    else:
        os.environ["STORE"] = f"file://{folder}/store"
    if fork and (child := os.fork()):
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        time.sleep(1)  # torchrun takes 0.1 s, on a machine that isn't busy
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    main([*arguments, f"{folder}/train.py"])
    return os._exit(0) if fork else None


def debug(
    folder,
    text,
    *arguments,
    per_machine=2,
    world_size=2,
    networks=(),
    begin=BEGIN,
    one_report=True,
):
    """(what each rank printed, the report) of a script, without the seconds that torchrun takes."""
    Path(folder, "train.py").write_text(begin + text)
    start = torchruns_rank, folder, per_machine, arguments, networks
    try:
        output = launch(*start, world_size=world_size).output
    except RankError as error:
        output = error.output
    reports = re.findall(r"^ddpkit: (.*)", "\n\n".join(output), re.DOTALL | re.MULTILINE)
    assert not one_report or len(reports) <= 1, reports
    return output, " ".join(" ".join(reports).split())


WAITS = "deadlock: rank {} waits in all_reduce for rank {}, which has returned."
TOLD = {
    "rank 0 skips": ("if rank == 1:\n    dist.all_reduce(x)", WAITS.format(1, 0), 2),
    "rank 1 skips": ("if rank == 0:\n    dist.all_reduce(x)", WAITS.format(0, 1), 2),
    "raises": (
        "if rank == 1:\n    raise ValueError('the batch is empty')\ndist.all_reduce(x)",
        "rank 1 raised ValueError: the batch is empty train.py:11: raise",
        2,
    ),
    "unused parameters, last step": (UNUSED, WAITS.format(0, 1), 10),
    "unused parameters, a step": (
        UNUSED + "net(x)",
        "rank 1 raised RuntimeError: Expected to have finished reduction in the prior iteration",
        11,
    ),
    "unused parameters, a barrier": (
        UNUSED + "dist.barrier()",
        "mismatch: rank 0 called all_reduce(40 float32, sum), but rank 1 called barrier().",
        11,
    ),
}


def told():
    for name, case in TOLD.items():  # what DistributedDataParallel imports takes seconds
        yield pytest.param(*case, id=name, marks=[pytest.mark.slow] * ("parameters, a " in name))


@pytest.mark.parametrize(("text", "says", "line"), list(told()))
def test_what_will_never_go_on_is_told_once_with_its_line(text, says, line, tmp_path):
    _, report = debug(tmp_path, text)
    assert report.startswith(says)
    assert f"train.py:{LINES + line}: {text.splitlines()[line - 1].strip()}" in report


def test_a_rank_that_was_killed_is_named(tmp_path):
    """By rank 0, if it has the time: torchrun soon ends it. Here nobody does."""
    kill = "if rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\ndist.all_reduce(x)"
    (tmp_path / "train.py").write_text(BEGIN + kill)
    run = launch(torchruns_rank, tmp_path, 2, fork=True, world_size=2)
    said = " ".join(run.output[0].split())
    says = "ddpkit: rank 1 was killed by SIGKILL. Something outside killed it; most often the "
    assert f"{says}machine had no memory left. Memory wasn't short: " in said
    assert "GiB were free shortly before. after barrier(), train.py:9: dist.barrier()" in said
    assert "Rank 0 lost it in train.py:12:" in said
    assert list(run) == [1, -9]


MISMATCH = (
    "mismatch: ranks 0, 1 and 2 called all_reduce(4 float32, sum), but rank 3 called all_reduce(5"
)


def test_two_machines_give_one_report(tmp_path):
    text = "dist.all_reduce(torch.ones(4 + (rank == 3)))"
    output, report = debug(tmp_path, text, world_size=4)
    assert report.startswith(MISMATCH)
    assert "ddpkit: " in output[0]


SLOW = """\
def compute(seconds):
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        torch.ones(500, 500) @ torch.ones(500, 500)
        time.sleep(0.05)  # a little of it is enough
    print("computed", flush=True)

if rank == 0:
    compute(0.8)
dist.barrier()
if rank == 0:
    future = dist.all_reduce(x, async_op=True).get_future()  # as DistributedDataParallel does
    compute(1.6)
    future.wait()
"""


@pytest.fixture
def session_of_3(monkeypatch, tmp_path):
    """Rank 0's, on a machine of its own."""
    where = {"RANK": 0, "WORLD_SIZE": 3, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    where |= {"TORCHELASTIC_ERROR_FILE": tmp_path / "rank" / "error"}
    for name, value in where.items():
        monkeypatch.setenv(name, str(value))
    return Session(None)


def test_a_mismatch_is_told_when_all_pages_had_time_to_come(session_of_3, monkeypatch):
    session, told = session_of_3, []
    monkeypatch.setattr(session, "tell", told.append)
    eight, nine = (call(ranks=(0, 1, 2), fingerprint=n, detail=n) for n in ("8", "9"))
    session.board.put(0, 0, eight)
    session.board.put(1, 0, nine)
    session._look(session.board.events())
    assert told == []
    session.board.put(2, 0, nine)  # its page comes from another machine
    session._look(session.board.events())
    assert "ranks 1 and 2 called all_reduce(9)" in told[0]


def test_a_failure_is_told_though_the_store_went_down_with_its_machine(
    session_of_3, monkeypatch, capsys
):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    session_of_3.store = dist.TCPStore("127.0.0.1", server.port)
    del server
    ended = []
    monkeypatch.setattr(session_of_3, "end", lambda *how, **cause: ended.append((how, cause)))
    session_of_3.failed(RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:9"))
    assert "ddpkit: a connection broke, nobody here knows why." in capsys.readouterr().err
    assert ended == [((1,), {"cause": True})]


def test_a_message_that_came_too_soon_comes_later(session_of_3, capsys):
    board = session_of_3.board
    board.set_state(0, RUNNING)
    board.set_waiting(0, 0)
    for line in (1, 2):
        board.put(0, 0, call(ranks=(0, 1, 2), line=line))
        session_of_3._say("rank 0 waits", "", Look(board))
    assert capsys.readouterr().err.count("ddpkit: ") == 1
    os.utime(session_of_3.folder / "word", (0, 0))
    for _ in range(2):
        session_of_3._say("rank 0 waits", "", Look(board))
    assert capsys.readouterr().err.count("ddpkit: ") == 1


def test_slow_is_not_hung(tmp_path):
    """A rank that computes is not reported, not even before a call to which nobody will come."""
    output, report = debug(tmp_path, SLOW)
    assert output[0].count("computed\n") == 2
    assert report.startswith(WAITS.format(0, 1))


CLOCK = """
import ddpkit.inspect.session as session
real = session.clock_s
session.clock_s = lambda: real() + 1000 * rank  # the machines count from different moments
"""


def test_what_all_machines_said_is_gathered_on_rank_0(tmp_path):
    keep = ["--trace", f"{tmp_path}/step.json", "--flight-recorder", f"{tmp_path}/dumps"]
    output, report = debug(tmp_path, CLOCK + RIGHT, *keep, per_machine=1)
    assert (output[1], report) == ("1: [1.0, 1.0, 1.0, 1.0] gloo []\n", "")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    begun = {e["pid"]: e["ts"] / 1e6 for e in events if e["name"] == "all_reduce"}
    assert round(begun[1] - begun[0], -2) == 1000
    assert explain(read_dumps(tmp_path / "dumps")).startswith("no rank waits for another")
    assert [path.name for path in sorted(tmp_path.rglob("ddpkit"))] == []


def test_of_ranks_that_hand_in_nothing_the_board_has_the_calls(session_of_3):
    """They never made a world, or ended by os._exit(0)."""
    for rank in range(2):
        session_of_3.board.put(rank, 0, call())
    for store in (None, dist.HashStore()):
        session_of_3.store = store
        assert session_of_3._collect() == [[call()], [call()], []]


def test_the_emulated_link_and_gloos_interfaces(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    text = "print(dist.group.WORLD.recorder.link.name)"
    (said, _), report = debug(tmp_path, text, "--link", "10 Gbit Ethernet")
    assert (said, report) == ("10 Gbit Ethernet\n", "")


def pretend_torch(version, *start):
    torch.__version__ = version
    torchruns_rank(*start)


def test_an_untried_torch_is_named_on_rank_0_and_the_script_runs(tmp_path):
    (tmp_path / "train.py").write_text(BEGIN + "print('trained')")
    first, second = launch(pretend_torch, "2.99.0", tmp_path, 2, world_size=2).output
    assert re.fullmatch("ddpkit.debug: torch 2.99.0 is newer than any .*\ntrained\n", first)
    assert second == "trained\n"


def test_interfaces_that_are_not_there_are_told(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")  # as without us
    assert "nowhere0" in debug(tmp_path, "")[1]


def test_after_a_report_dumps_are_there_too(tmp_path):
    debug(
        tmp_path, TOLD["rank 1 skips"][0], "--flight-recorder", f"{tmp_path}/dumps", per_machine=1
    )
    said = explain(read_dumps(tmp_path / "dumps"))
    assert said.startswith("rank 0 waits in all_reduce for rank 1, which didn't come to it.")


def test_a_script_may_end_its_world_and_begin_another(tmp_path):
    (joins,) = (line for line in BEGIN.splitlines() if "init_process_group" in line)
    again = joins.replace('environ.get("STORE")', 'environ["STORE"] + "2"')
    text, *_ = TOLD["rank 1 skips"]
    _, report = debug(tmp_path, f"dist.destroy_process_group()\n{again}\n{text}")
    assert report.startswith(WAITS.format(0, 1))
    assert "in all_reduce(4 float32, sum) train.py" in report  # it is the world, not a group


# On NCCL, as far as a machine without a GPU can tell


@pytest.mark.parametrize(
    ("given", "current", "gpus", "index"),
    [
        (None, None, 4, 3),
        (None, None, 1, 0),  # Slurm shows each rank one
        (None, 0, 4, 3),  # CUDA was used, and no device set
        (None, 2, 4, 2),
        (torch.device("cuda", 1), 2, 4, 1),
        (1, None, 4, 1),
        (0, 2, 4, 0),
    ],
)
def test_a_script_keeps_the_gpu_that_it_chose(monkeypatch, given, current, gpus, index):
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: current is not None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert own_gpu(given) == torch.device("cuda", index)


def asks_for_nccl(folder, *args, **kwargs):
    """What torch's own init_process_group gets, and the wire, in a rank without a GPU."""
    where = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= where | {"TORCHELASTIC_ERROR_FILE": f"{folder}/rank/error"}
    said, c10d = [], dist.distributed_c10d
    session.register_wire = lambda _, *how, one_machine: said.append(how)
    torch.cuda.set_device = said.append
    c10d.default_pg_nccl_timeout, c10d._get_default_store = timedelta(minutes=10), lambda: None
    joins = functools.wraps(dist.init_process_group)(
        lambda *args, **kwargs: said.append((args, kwargs))
    )
    dist.init_process_group = c10d.init_process_group = joins
    Session(None).install()
    dist.init_process_group(*args, **kwargs)
    return said


def test_what_a_script_gives_init_process_group_reaches_nccl(tmp_path):
    gpu, options = torch.device("cuda", 1), {"pg_options": "its own", "rank": 0}
    asked = "nccl", None, timedelta(seconds=7)
    (said,) = launch(asks_for_nccl, tmp_path, *asked, device_id=gpu, world_size=1, **options)
    said[2][1].pop("init_method")
    given = options | {"timeout": timedelta(seconds=7)}
    assert said == [gpu, ("nccl", gpu), (("ddpkit",), given)]  # a device_id connects groups twice
    (said,) = launch(asks_for_nccl, tmp_path, "nccl", world_size=1)
    assert said[2] == (("ddpkit",), {"timeout": timedelta(minutes=10)})  # NCCL's, not Gloo's


def test_a_scripts_own_options_are_nccls(monkeypatch):
    class Nccl:
        Options = SimpleNamespace

        def __init__(self, store, rank, size, options):
            self.options = options

        def eager_connect_single_device(self, device):
            pass

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    asked = SimpleNamespace(global_ranks_in_group=[0], store=None, group_rank=0, group_size=1)
    mine = SimpleNamespace(is_high_priority_stream=True)
    for given in (mine, None):
        real, _ = wire._nccl(asked, torch.device("cuda"), wire.NEVER, given)
        assert (real.options is given) == (given is mine)
        assert real.options.global_ranks_in_group == [0]


# With torchrun itself


def start(folder, *arguments, **environ):
    """folder: where temporary files go."""
    command = [sys.executable, "-m", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    own = {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    return subprocess.Popen(command, env=os.environ | own | environ, **pipes)


@pytest.mark.wide
def test_a_right_script_says_what_it_says_without_us(tmp_path):
    (tmp_path / "train.py").write_text(BEGIN + RIGHT)
    process = start(
        *(tmp_path, "ddpkit.debug", "--world-size", "2", "--trace", f"{tmp_path}/step.json"),
        *(str(tmp_path / "train.py"), "--lr", "1"),
    )
    out, err = process.communicate(timeout=FREEZE_S)
    assert (process.returncode, "ddpkit: " in err) == (0, False), err
    lines = [f"{rank}: [1.0, 1.0, 1.0, 1.0] gloo ['--lr', '1']" for rank in (0, 1)]
    assert sorted(re.findall(r"\d: .*?'1'\]", out)) == lines
    names = [e["name"] for e in json.loads((tmp_path / "step.json").read_text())["traceEvents"]]
    assert names.count("all_reduce") == 2
    assert not list(tmp_path.glob("torchelastic_*/*/*/ddpkit"))


AT_WORK = """
import time
import torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
session = dist.init_process_group.session

def goes_in_and_out_of_cpp():
    until = time.monotonic() + 3
    while time.monotonic() < until:
        session.store.check(["key"])

session.recorder.release = goes_in_and_out_of_cpp
time.sleep(0.5)
"""


@pytest.mark.wide
def test_the_watcher_is_not_cut_off_in_the_middle_of_cpp_code(tmp_path):
    """Python would unwind its stack, and C++ abort: a right script would end by SIGABRT."""
    (tmp_path / "train.py").write_text(AT_WORK)
    of_one = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    process = start(tmp_path, "ddpkit.debug", str(tmp_path / "train.py"), **of_one)
    err = process.communicate(timeout=FREEZE_S)[1]
    assert (process.returncode, err) == (0, "")


@pytest.mark.slow
def test_a_code_that_the_script_exits_with_is_kept(tmp_path):
    (tmp_path / "train.py").write_text(BEGIN + "if rank == 1:\n    sys.exit(3)\ntime.sleep(9)")
    process = start(tmp_path, "ddpkit.debug", "--world-size", "2", str(tmp_path / "train.py"))
    err = process.communicate(timeout=FREEZE_S)[1]
    assert (process.returncode, err.count("ddpkit: ")) == (1, 1)  # torchrun's own code
    assert "ddpkit: rank 1 called sys.exit(3)" in err
    assert re.search(r"\(exitcode: 3\) local_rank: 1", err)


ALL = """
import pickle
import torch.distributed as dist
from pytorch_cases import CASES, results

dist.init_process_group("gloo")
with open(f"found.{dist.get_rank()}", "wb") as file:
    pickle.dump(results(CASES), file)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_what_works_under_torchrun_works_under_debug(tmp_path):
    """The cases of `test_pytorch_inside`, and not a bit is different."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4")
    paths = f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    found = []
    for command in (torchrun, (*torchrun, "-m", "ddpkit.debug")):
        run_script(tmp_path, ALL, command=command, OMP_NUM_THREADS="1", PYTHONPATH=paths)
        found.append([(tmp_path / f"found.{rank}").read_bytes() for rank in range(4)])
    assert found[0] == found[1]
    assert found[0][0].count(b"Error: ") < 3 < len(CASES)


# Two machines

LISTENS = """
import psutil
listens = [c.laddr for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"]
listens = [ip for ip, port in listens if str(port) != os.environ["MASTER_PORT"]]  # torch's store
said = " ".join(["listens on", *sorted(set(listens))])
os.write(1, f"{said}\\n".encode())  # in one piece: the other rank writes here, too
dist.all_reduce(torch.ones(4 + (rank == 3)))
"""


@pytest.fixture
def namespaces():
    with two_machines() as machines:
        yield machines


def test_two_namespaces_are_two_machines(tmp_path, namespaces):
    """They have no interface in common but the wire, and no name of a host leads anywhere."""
    output, report = debug(tmp_path, LISTENS, world_size=4, networks=namespaces)
    assert report.startswith(MISMATCH)
    assert "ddpkit: " in output[0]
    listens = re.findall("listens on .*", "\n".join(output))
    assert listens == [f"listens on 10.77.0.{machine}" for machine in (1, 1, 2, 2)]


@pytest.mark.slow
def test_two_agents_of_one_machine_are_two_machines(tmp_path):
    (tmp_path / "train.py").write_text(BEGIN + LISTENS)
    run = ["torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", "--master-addr=127.0.0.1"]
    run.append(f"--master-port={20_000 + os.getpid() % 10_000}")
    script = "-m", "ddpkit.debug", str(tmp_path / "train.py")
    agents = [start(tmp_path, *run, f"--node-rank={machine}", *script) for machine in range(2)]
    try:
        said = [agent.communicate(timeout=FREEZE_S)[1] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.communicate()
    assert [agent.returncode for agent in agents] == [1, 1]
    reports = [" ".join(err.partition("\nddpkit: ")[2].split()) for err in said]
    assert reports[0].startswith(MISMATCH)
    assert reports[1] == ""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere.py"], "expected a script, got nowhere.py"),
        ([__file__], "how many ranks, before the script: --world-size 4 .*test_debug.py"),
        (["--link", "a string", __file__], "a string"),
        (["--world", "2", __file__], "2"),  # an option's beginning is none
        (["--trace", "nowhere/step.json", __file__], "a folder for nowhere/step.json: make one"),
    ],
)
def test_what_can_not_be_started(arguments, says, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match=says):
        main(arguments)


@pytest.mark.wide
def test_a_rank_that_comes_after_the_others_have_left_finds_the_board(tmp_path):
    """A script that ends at once, and a rank whose imports take longer than the other's run."""
    script = tmp_path / "short.py"
    script.write_text("print('nothing')\n")
    environ = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "late"}
    for rank in ("0", "1"):
        folder = tmp_path / "attempt" / rank
        folder.mkdir(parents=True)
        own = {"RANK": rank, "LOCAL_RANK": rank, "TORCHELASTIC_ERROR_FILE": str(folder / "error")}
        command = [sys.executable, "-m", "ddpkit.debug", str(script)]
        subprocess.run(command, env=os.environ | environ | own, timeout=FREEZE_S, check=True)
    assert not (tmp_path / "attempt" / "ddpkit").exists()  # the last one has removed it
