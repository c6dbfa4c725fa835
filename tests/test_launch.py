"""`launch`: what travels to the ranks and back, a Run, what ranks print, what is refused."""

import _thread
import ctypes
import functools
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
import threading
import time
from fractions import Fraction
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist
from outside import FREEZE_S, cell, run_script, wait_until

from ddpkit import Link, RankError, Run, launch
from ddpkit.runtime import backends, call, output, processes, worker
from ddpkit.runtime.call import pickle_call
from ddpkit.runtime.errors import NoGpu
from ddpkit.runtime.live import LiveWorld
from ddpkit.runtime.output import Output
from ddpkit.runtime.watch import Watch

# The Run.


def test_ranks_that_set_no_seed_draw_differently():
    drawn = [launch(lambda: torch.rand(()).item(), world_size=2) for _ in range(2)]
    assert len({number for run in drawn for number in run}) == 4


def test_a_run_holds_what_each_rank_returned_printed_and_said():
    def work(start, step=1):
        print("on", dist.get_rank(), "of", dist.get_world_size())
        dist.barrier()
        return start + dist.get_rank() * step

    run = launch(work, 5, step=10, world_size=3)
    assert isinstance(run, Run)
    assert (run[0], run[2], list(run), len(run)) == (5, 25, [5, 15, 25], 3)
    assert run[-1] == 25
    assert run.output == ["on 0 of 3\n", "on 1 of 3\n", "on 2 of 3\n"]
    assert [[r.op for r in wire] for wire in run.wire] == [["barrier"]] * 3
    assert run.seconds > 0
    assert run.backend.startswith(("gloo on CPU: ", "nccl"))
    assert run.link is None
    with pytest.raises(IndexError, match=r"run\[3\]: the ranks of this run go from 0 to 2"):
        run[3]
    columns = launch(lambda: torch.tensor([[dist.get_rank()], [7]]))  # on 4 ranks, unless asked
    shown = [f"rank {rank}: tensor([[{rank}],\n                [7]])" for rank in range(4)]
    assert repr(columns) == "\n".join(shown)


# Arguments that can't work are refused before any process is started.


@pytest.fixture
def no_process(monkeypatch):
    monkeypatch.setattr(processes, "Rank", lambda *_: pytest.fail("a process was started"))


def count(n):
    yield from range(n)


async def coroutine(): ...


def closure():
    lock = LOCK
    return lambda: lock


def writes():
    global WRITTEN
    WRITTEN = 1


LOCK = OTHER = WRITTEN = threading.Lock()


@pytest.mark.parametrize(
    ("args", "options", "says"),
    [
        ([3], {}, "a function to call on every rank, got 3: pass launch(f), not launch(f())"),
        ([print], {"world_size": 0}, "world_size, from 1 to 64 on one machine, got 0"),
        ([print], {"world_size": 65}, "world_size, from 1 to 64 on one machine, got 65"),
        ([print], {"world_size": 2.0}, "a whole number as world_size, from 1 to 64 on"),
        ([coroutine], {}, "expected a plain function, got one of `async def`: call asyncio.run("),
        ([functools.partial(coroutine)], {}, "a plain function, got one of `async def`"),
        ([print], {"backend": "mpi"}, "backend 'auto', 'gloo' or 'nccl', got 'mpi'"),
        ([print], {"link": 1e9}, "a Link, got 1000000000.0: for example link=Link.preset("),
        ([print], {"link": Link(0, 1e9), "backend": "nccl"}, "only Gloo's wire is emulated"),
        ([print], {"timeout": 0}, "expected timeout > 0, got 0. Give seconds"),
        ([print], {"hang_after": None}, "expected hang_after > 0, got None. Give seconds"),
        ([print, count(3)], {}, "a generator as argument 0: pass list(...) of it"),
        ([print], {"sep": count(3)}, "a generator as argument sep=: pass list(...) of it"),
        ([print, LOCK], {}, "argument 0 (TypeError: cannot pickle '_thread.lock' object). Make it"),
        ([functools.partial(print, LOCK)], {}, "got argument 0 of partial (TypeError: cannot"),
        ([lambda: LOCK], {}, "the variable 'LOCK' that the function uses (TypeError: cannot"),
        ([closure()], {}, "the variable 'lock' that the function uses (TypeError: cannot"),
        ([lambda: dist.LOCK or OTHER], {}, "the variable 'OTHER' that the function uses"),
        ([writes], {}, "the variable 'WRITTEN' that the function uses"),
    ],
)
def test_bad_arguments_start_no_process(no_process, args, options, says):
    with pytest.raises(ValueError, match="expected") as caught:
        launch(*args, **options)
    assert says in str(caught.value)


# Which backend.


@pytest.mark.parametrize(
    ("gpus", "version", "world_size", "line"),
    [
        (0, (), 4, "gloo on CPU: no GPU that PyTorch can use"),
        (4, (2, 28, 9), 4, "nccl 2.28.9: a GPU for each of 4 ranks"),
        (1, (2, 28, 9), 4, "gloo on CPU: 1 GPU for 4 ranks, and NCCL 2.28.9 can't share one (2.30"),
        (1, (2, 30, 0), 4, "nccl 2.30.0: 4 ranks share 1 GPU"),
    ],
)
def test_trap_25_the_choice_of_backend_and_its_reason(monkeypatch, gpus, version, world_size, line):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(backends, "nccl_version", lambda: version)
    choice = backends.choose_backend("auto", world_size)
    assert choice.line.startswith(line)
    assert choice.line.startswith(choice.backend)
    environ = {"gloo": backends.ON_CPU, "nccl": {}}[choice.backend]
    assert choice.environ == (backends.sharing(4, version) if "share 1" in choice.line else environ)
    linked = backends.choose_backend("auto", world_size, Link.preset("NVLink 4")).line
    assert linked == "gloo on CPU: the emulated link (NVLink 4) works on its wire"
    assert backends.choose_backend("gloo", 2).line == "gloo on CPU: as asked"
    if not gpus:
        with pytest.raises(ValueError, match="expected a GPU, got no GPU that PyTorch can use"):
            backends.choose_backend("nccl", world_size)


def test_ranks_on_the_cpu_see_no_gpu(monkeypatch):
    """Else PyTorch's FSDP2 and DeviceMesh would take it, and fail beside tensors on the CPU."""
    run = launch(lambda: os.environ["CUDA_VISIBLE_DEVICES"], world_size=2, backend="gloo")
    assert list(run) == ["", ""]
    layer = torch.nn.Linear(2, 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert sys.modules["ddpkit.runtime.call"]._on_gpu(layer.weight) is layer.weight
    with pytest.raises(RankError, match=r"No CUDA GPUs[^\0]*These ranks are on the CPU"):
        launch(asks_for_a_gpu, world_size=1, backend="gloo")


def asks_for_a_gpu():
    raise RuntimeError("No CUDA GPUs are available")  # as where CUDA's PyTorch finds none


def test_trap_25_what_lets_ranks_share_a_gpu():
    """As asked, an NCCL that refuses it is told that each rank is a host of its own."""
    enabled = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}
    assert backends.sharing(2, (2, 30, 0)) == enabled
    assert backends.sharing(3, (2, 30, 0)) == enabled | {"NCCL_MAX_CTAS": "4"}
    assert backends.sharing(4, (2, 28, 9)).keys().isdisjoint([*enabled, "NCCL_MAX_CTAS"])
    assert backends.sharing(4, (2, 28, 9))["NCCL_NET"] == "Socket"
    choice = backends.Choice("gloo", 0, "", backends.sharing(2, (2, 28, 9)))
    with processes.world(choice, 2, None, False, worker.main) as (ranks, _):
        hosts = [rank.assignment.environ["NCCL_HOSTID"] for rank in ranks]
    assert hosts == ["ddpkit-0", "ddpkit-1"]


@pytest.mark.parametrize("gpus", [0, 1])
def test_nccl_listens_on_the_loopback_and_lets_python_raise_unless_told_otherwise(
    monkeypatch, gpus
):
    def environ():
        choice = backends.Choice("nccl", gpus, "")
        with processes.world(choice, 1, None, False, worker.main) as (ranks, _):
            environ = ranks[0].assignment.environ
        return [
            environ.get(name) for name in ("NCCL_SOCKET_IFNAME", "TORCH_NCCL_RETHROW_CUDA_ERRORS")
        ]

    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    assert environ() == (["lo", "0"] if gpus else [None, None])
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    assert environ()[0] == "eth7"


def test_gpus_that_the_driver_counts_and_cuda_can_not_use_lead_to_gloo(monkeypatch):
    """As on a card in MIG mode."""
    counted = torch.cuda.device_count() + 2
    monkeypatch.setattr(torch.cuda, "device_count", lambda: counted)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(backends, "nccl_version", lambda: (2, 29, 7))
    run = launch(lambda: dist.get_backend(), world_size=counted)
    assert list(run) == ["gloo"] * counted
    assert re.match(r"gloo on CPU: rank \d can't use cuda:\d: \w", run.backend)
    with pytest.raises(NoGpu, match=r"rank \d can't use cuda:\d: \w"):
        launch(print, world_size=counted, backend="nccl")
    world = LiveWorld(counted)
    world.close()
    assert world.ranks[0].assignment.device.type == "cpu"


# Tensors on a GPU, as far as a machine without one can tell.


class OnGpu(torch.Tensor):
    is_cuda = True

    def cpu(self):
        return self.as_subclass(torch.Tensor)


class ParameterOnGpu(torch.nn.Parameter):
    is_cuda = True


def on_gpu():
    """A tensor, and a layer with a frozen bias, that say they are on a GPU."""
    layer = torch.nn.Linear(1, 1)
    layer.bias = ParameterOnGpu(torch.zeros(1), requires_grad=False)
    return torch.zeros(2).as_subclass(OnGpu), layer


def test_tensors_on_a_gpu_arrive_on_the_ranks_own(monkeypatch):
    x, layer = on_gpu()
    call = pickle_call(print, (x, x, layer), {})
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor + 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    _, (first, second, layer), _ = pickle.loads(call)
    assert first is second
    assert (type(first), first.tolist()) == (torch.Tensor, [1, 1])
    assert (type(layer.bias), layer.bias.tolist()) == (torch.nn.Parameter, [1])
    assert [p.requires_grad for p in layer.parameters()] == [True, False]


def test_trap_13_parameters_on_a_gpu_come_back_as_parameters(tmp_path):
    x, layer = on_gpu()
    worker.save(tmp_path / "result", (x, layer, layer))
    x, layer, again = pickle.loads((tmp_path / "result").read_bytes())
    assert type(x) is torch.Tensor
    assert again is layer
    assert (type(layer.bias), layer.bias.requires_grad) == (torch.nn.Parameter, False)


@pytest.mark.gpu
def test_a_gpu_tensor_arrives_on_the_ranks_own_gpu():
    x, gpus = torch.ones(1, device="cuda"), torch.cuda.device_count()
    assert list(launch(lambda: x.device.index, world_size=gpus)) == list(range(gpus))


def note(what):
    SAID.append(what)


SAID = []


class Noted:
    def __reduce__(self):
        return note, ("loads the call",)


def test_a_rank_takes_its_gpu_before_it_loads_the_call(monkeypatch, tmp_path):
    """Else what was on a GPU would arrive on GPU 0, and take half a GB of it for a context."""
    (tmp_path / "call").write_bytes(pickle.dumps((note, (Noted(),), {})))
    choice = backends.Choice("nccl", 2, "")
    assignment = worker.Assignment(3, 4, str(tmp_path), choice, None, False, {}, {})
    recorder = SimpleNamespace(settle=lambda: None, records=[], board=SimpleNamespace())
    recorder.board.set_state = lambda *_: None
    monkeypatch.setattr(worker, "become_rank", lambda *_: recorder)
    monkeypatch.setattr(worker, "join_world", lambda *_: note("joins"))
    monkeypatch.setattr(worker, "wait_to_be_ended", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: note(str(device)))
    SAID.clear()
    worker.main(assignment, SimpleNamespace(send=print), None)
    assert SAID[:3] == ["cuda:1", "loads the call", "joins"]


@pytest.mark.gpu
def test_trap_1_and_24_nccl_after_cuda_was_used_here():
    here = torch.ones(1, device="cuda")

    def use():
        x = torch.ones(1, device="cuda")
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, dist.get_rank())  # hangs where the device was not set first
        dist.all_reduce(x)
        return dist.get_backend(), found, x.item() == dist.get_world_size()

    run = launch(use, world_size=torch.cuda.device_count(), timeout=60)
    assert list(run) == [("nccl", list(range(len(run))), True)] * len(run)
    assert here.item() == 1


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("backend", ["auto", "nccl"])
def test_trap_25_ranks_on_one_gpu(backend, ranks):
    def use():
        x = torch.ones(4, device="cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.all_reduce(x)
        return x.sum().item()

    world_size = ranks * torch.cuda.device_count()
    run = launch(use, world_size=world_size, backend=backend, timeout=60)
    assert list(run) == [4.0 * world_size] * world_size
    assert "share" in run.backend


# Trap 2: what cells define.


def test_trap_2_functions_helpers_globals_and_closures_redefined():
    names = cell(
        """
        import functools
        import torch.distributed as dist
        factor, seen = 10, []
        def helper(x): return x * factor
        def twice(fn):
            @functools.wraps(fn)
            def wrapped(*args): return 2 * fn(*args)
            return wrapped
        @twice
        def decorated(x):
            seen.append(x)
            return helper(x) + dist.get_rank() + len(seen)
        def maker(n): return lambda: n + factor
        """
    )
    assert list(launch(names["decorated"], 1, world_size=2)) == [22, 24]
    assert names["seen"] == []  # a rank changes its own copy
    names["factor"] = 100
    assert list(launch(names["decorated"], 1, world_size=2)) == [202, 204]
    assert launch(names["maker"](5), world_size=1)[0] == 105
    cell("def helper(x): return 0", names)
    assert launch(names["decorated"], 1, world_size=1)[0] == 2


def test_trap_2_classes_dataclasses_enums_and_modules():
    names = cell(
        """
        import dataclasses, enum, torch
        class Base: pass
        class Child(Base):
            def __init__(self, x): self.x = x
            def __call__(self): return isinstance(self, Base) and isinstance(self, Child), self.x
        @dataclasses.dataclass
        class Point:
            x: int
            def up(self): return dataclasses.replace(self, x=self.x + 1)
        class Colour(enum.Enum):
            RED = 1
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(2, 1, bias=False)
            def forward(self, x): return self.layer(x)
        def use(point, colour, net):
            assert isinstance(point, Point) and isinstance(net, Net)
            return point.up(), colour is Colour.RED, colour, net(torch.ones(2)).item(), net
        """
    )
    assert launch(names["Child"](3), world_size=1)[0] == (True, 3)
    net = names["Net"]()
    given = names["Point"](1), names["Colour"].RED, net
    point, is_red, colour, value, returned = launch(names["use"], *given, world_size=1)[0]
    assert point == names["Point"](2)
    assert is_red
    assert colour is names["Colour"].RED
    assert value == net(torch.ones(2)).item()
    assert isinstance(returned, names["Net"])
    assert torch.equal(returned.layer.weight, net.layer.weight)


def test_trap_2_modules_that_are_objects_of_their_own_classes():
    def deterministic():
        torch.backends.cudnn.deterministic = True
        return torch.backends.cudnn.deterministic

    assert launch(deterministic, world_size=1)[0] is True
    assert torch.backends.cudnn.deterministic is False


def test_code_with_a_constant_that_marshal_does_not_know_is_copied_too():
    def constant():
        return "half"

    code = constant.__code__
    constants = (Fraction(1, 2) if x == "half" else x for x in code.co_consts)
    constant.__code__ = code.replace(co_consts=tuple(constants))
    assert launch(constant, world_size=1).results == [Fraction(1, 2)]


def test_trap_2_a_large_captured_variable_is_named_in_a_warning():
    names = cell(
        """
        import torch
        big, small = torch.zeros(3_000_000), 1
        def use(): return len(big) + small
        """
    )
    says = r"its own copy of 12 MB: the variable big \(12 MB\) that the function uses"
    with pytest.warns(UserWarning, match=says) as seen:
        assert launch(names["use"], world_size=1)[0] == 3_000_001
    assert seen[0].filename == __file__
    with pytest.warns(UserWarning, match=r": argument 0 \(11 MB\). Make or load it inside the"):
        launch(len, bytes(11_000_000), world_size=1)


class Holder:
    def __init__(self, value):
        self.value = value

    def measure(self):
        return len(self.value)


def test_what_is_bound_to_a_function_is_named_when_it_is_large():
    large = bytes(11_000_000)

    def inner():
        return len(large)

    for fn, name in [
        (inner, "the variable large .* that the function uses"),
        (functools.partial(len, large), "argument 0 of partial"),
        (functools.partial(sorted, [], key=Holder(large)), "argument key= of partial"),
        (Holder(large).measure, "the object whose method it is"),
    ]:
        with pytest.warns(UserWarning, match=rf"of 11 MB: {name}( \(11 MB\))?"):
            pickle_call(fn, (), {})


def test_a_copy_that_takes_long_is_told_with_its_time(monkeypatch):
    monkeypatch.setattr(call, "LONG_S", -1.0)
    with pytest.warns(UserWarning, match=r"Copying it took \d+ s, and every rank takes as long"):
        pickle_call(len, (bytes(11_000_000),), {})


# Traps 7 and 13.


def test_trap_7_environment_and_edited_modules_are_seen(tmp_path, monkeypatch):
    module = tmp_path / "lesson_of_today.py"
    module.write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("DDPKIT_SEEN", "first")
    monkeypatch.delenv("DDPKIT_NEW", raising=False)

    def look():
        import lesson_of_today

        seen, new = os.environ.get("DDPKIT_SEEN"), os.environ.get("DDPKIT_NEW")
        return lesson_of_today.VALUE, seen, new, os.getcwd()

    assert launch(look, world_size=1)[0] == (1, "first", None, os.getcwd())
    module.write_text("VALUE = 23\n")
    monkeypatch.delenv("DDPKIT_SEEN")
    monkeypatch.setenv("DDPKIT_NEW", "yes")
    monkeypatch.chdir(tmp_path)
    assert launch(look, world_size=1)[0] == (23, None, "yes", str(tmp_path))


class Unbuildable:
    def __reduce__(self):
        return _fail_to_build, ()


def _fail_to_build():
    raise KeyError("no such thing")


def test_trap_13_results_that_cannot_travel():
    says = "rank 0 raised ValueError: the return value can't be sent .* got generator: return its"
    with pytest.raises(RankError, match=says):
        launch(lambda: (i for i in range(3)), world_size=2)
    says = r"rank 1 returned a value that can't be rebuilt here \(KeyError: 'no such thing'\)"
    with pytest.raises(RankError, match=says):
        launch(lambda: Unbuildable() if dist.get_rank() else 1, world_size=2)


def test_trap_13_results_of_every_kind_and_large_ones():
    def kinds():
        model = torch.nn.Linear(2, 2)
        model(torch.ones(2)).sum().backward()
        x = torch.arange(6.0).view(2, 3)
        return (
            x.t(),
            x[0].requires_grad_(),
            model.weight,
            {"a": (1, None)},
            torch.float16,
            ValueError("x"),
            lambda: 7,
            torch.full((30_000_000,), 2.0),
        )

    transposed, leaf, weight, plain, dtype, error, fn, large = launch(kinds, world_size=1)[0]
    assert transposed.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert leaf.requires_grad
    assert isinstance(weight, torch.nn.Parameter)
    assert (plain, dtype) == ({"a": (1, None)}, torch.float16)
    assert (repr(error), fn()) == ("ValueError('x')", 7)
    assert (len(large), large[-1]) == (30_000_000, 2)


@pytest.mark.gpu
def test_trap_13_a_gpu_tensor_comes_back_on_the_cpu():
    run = launch(lambda: {"x": torch.ones(3, device="cuda")}, world_size=1)
    assert run[0]["x"].device.type == "cpu"


# Traps 10 to 12: output.


def test_trap_10_output_is_shown_in_rank_order_when_done(capfd):
    def talk():
        rank = dist.get_rank()
        time.sleep(0.05 * (2 - rank))
        print("first from", rank)
        print("second\n\nlast, unfinished", end="")

    run = launch(talk, world_size=3)
    blocks = [
        f"rank {r} | first from {r}\nrank {r} | second\nrank {r} | \nrank {r} | last, unfinished\n"
        for r in range(3)
    ]
    assert capfd.readouterr() == ("".join(blocks), "")
    assert run.output[1] == "first from 1\nsecond\n\nlast, unfinished"


def test_trap_10_live_shows_whole_labelled_lines_as_they_come(monkeypatch, tmp_path):
    class Stream:
        shown = ""

        def write(self, text):
            self.shown += text
            if self.shown.count("beginning\n") == 2:
                (tmp_path / "seen").touch()  # the ranks wait for that: lines come while they run

        def flush(self):
            pass

    def slowly():
        print("begin", end="", flush=True)
        dist.barrier()
        print("ning")
        while not (tmp_path / "seen").exists():
            time.sleep(0.01)
        print("end", end="")

    monkeypatch.setattr(sys, "stdout", Stream())
    run = launch(slowly, world_size=2, live=True, timeout=60)
    shown = sys.stdout.shown
    lines = [f"rank {rank} | {word}" for rank in range(2) for word in ("beginning", "end")]
    assert sorted(shown.splitlines()) == lines
    assert shown.endswith("\n")
    assert run.output == ["beginning\nend"] * 2


def test_what_is_printed_before_the_parent_listens_is_not_lost(monkeypatch):
    """On a busy machine ranks may be quicker than who has started them."""

    def late(ranks, *rest, **options):
        outputs = [rank.assignment.path("output") for rank in ranks]
        wait_until(lambda: all(path.exists() and path.stat().st_size for path in outputs))
        return Watch(ranks, *rest, **options)

    monkeypatch.setattr(sys.modules["ddpkit.runtime.launch"], "Watch", late)
    run = launch(lambda: print("here", flush=True), world_size=2)
    assert run.output == ["here\n"] * 2


LEFT_ALONE = """\
[rank0]:[E1125 23:23:48.752794166 ProcessGroupNCCL.cpp:612] [Rank 0] Collective WorkNCCL(SeqNum=1, \
OpType=ALLREDUCE) raised the following async exception: NCCL error: remote process exited or there \
was a network error, NCCL version 2.28.9
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting \
prematurely.
Last error:
socketProgress: Connection closed by remote peer localhost<47728>
Exception raised from checkForNCCLErrorsInternal at ProcessGroupNCCL.cpp:2770 (most recent first):
frame #0: c10::Error::Error(c10::SourceLocation) + 0x9d (0x7fbf0317305d in libc10.so)
frame #7: <unknown function> + 0x129ecc (0x7fbf04729ecc in /lib/x86_64-linux-gnu/libc.so.6)

[rank0]:[E1125 23:23:48.754213419 ProcessGroupNCCL.cpp:2303] [PG ID 0 PG GUID  Rank 0]  failure \
detected by watchdog at work sequence id: 1 PG status: last enqueued work: 2, last completed: -1
"""


def test_what_nccl_prints_when_another_rank_is_gone_is_left_out():
    """As H100 ranks with NCCL 2.28.9 printed it; the report names the rank that went."""
    run = launch(lambda: print(f"before\n{LEFT_ALONE}after"), world_size=1)
    assert run.output == ["before\nafter\n"]


def test_trap_11_and_12_every_way_to_print_is_captured(capfd):
    chatter = b"[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected ...: 1\n"

    def talk():
        print("print")
        sys.stderr.write("stderr\n")
        libc = ctypes.CDLL(None)
        libc.printf(b"printf\n")
        libc.fflush(None)
        subprocess.run(["echo", "child"], check=True)
        os.write(1, b"descriptor\n" + chatter)
        print("{} {x} 100% %s %d \x1b[31mred\x1b[0m")
        for percent in (0, 50, 100):
            print(f"\r{percent}% done", end="", file=sys.stderr)
        print(file=sys.stderr)
        print("windows\r\nline")
        libc.printf(b"left in C's buffer\n")

    (output,) = launch(talk, world_size=1).output
    lines = ["print", "stderr", "printf", "child", "descriptor"]
    lines += ["{} {x} 100% %s %d \x1b[31mred\x1b[0m", "100% done", "windows", "line"]
    assert output.splitlines() == [*lines, "left in C's buffer"]
    assert capfd.readouterr().out.splitlines()[:9] == [f"rank 0 | {line}" for line in lines]
    launch(lambda: None, world_size=2)
    assert capfd.readouterr() == ("", "")


def test_trap_11_long_lines_and_split_characters():
    def talk():
        sys.stderr.write("x" * 200_000)
        sys.stderr.flush()
        data = "é€😀".encode()
        for byte in range(len(data)):
            os.write(2, data[byte : byte + 1])
            time.sleep(0.01)
        os.write(1, b"\n\xff not UTF-8")

    for live in (False, True):
        (output,) = launch(talk, world_size=1, live=live).output
        assert output == "x" * 200_000 + "é€😀\n\ufffd not UTF-8"


def test_very_long_output_is_shown_without_its_middle(capsys):
    def chatter():
        for number in range(1000):
            print(number)

    run = launch(chatter, world_size=1)
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 201
    assert shown[99:102] == [
        "rank 0 | 99",
        "rank 0 | ... 800 more lines, all of them in run.output[0] ...",
        "rank 0 | 900",
    ]
    assert run.output[0].splitlines() == [str(number) for number in range(1000)]


def test_both_limits_of_what_is_shown():
    lines = "".join(f"{'x' * 1999}\n" for _ in range(1000))
    shown = output.shorten(lines, "")
    assert (shown.count("..."), "\n... 1.9 MB more ...\n" in shown) == (2, True)


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # between open() and with
@pytest.mark.parametrize("live", [False, True])
def test_endless_printing_is_capped_and_can_be_stopped(tmp_path, capsys, live):
    def chatter():
        print("the first line")
        (tmp_path / f"printing {dist.get_rank()}").touch()
        while True:
            print("x" * 1000)

    def stop():
        while len(list(tmp_path.iterdir())) < 4:
            time.sleep(0.05)
        time.sleep(1.0)
        stopped.append(time.perf_counter())
        _thread.interrupt_main()

    stopped = []
    threading.Thread(target=stop).start()
    with pytest.raises(KeyboardInterrupt):
        launch(chatter, world_size=4, live=live)
    assert time.perf_counter() - stopped[0] < FREEZE_S
    shown = capsys.readouterr().out
    assert len(shown) < 1_000_000
    assert "rank 3 | the first line" in shown
    goes_on = "rank 3 | ... it goes on, but no more of it is shown ...\n"
    assert (goes_on in shown) is live


def test_what_is_kept_of_very_much_is_its_beginning_and_end(tmp_path):
    path = tmp_path / "output"
    path.write_text("before\n")
    output = Output(path)
    with path.open("a") as file:
        file.write("begin\n")
        for number in range(5):
            file.write(f"{number}" * 1_500_000)
            file.flush()
            output.trim()
            assert path.stat().st_size < 4_500_000
        file.write("\nend")
    text = output.read()
    assert text.startswith("begin\n000")
    assert text.endswith("444\nend")
    assert "\n... 5.5 MB left out ...\n" in text
    assert len(text) < 2_000_100


# Not from inside.


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_launch_inside_a_rank_or_its_forked_child_is_refused():
    def nested(pipe=None):
        try:
            launch(print)
        except ValueError as error:
            pipe.send(str(error)) if pipe else None
            return str(error)

    def in_both():
        ours, theirs = multiprocessing.Pipe()
        child = multiprocessing.get_context("fork").Process(target=nested, args=(theirs,))
        child.start()
        said = ours.recv()
        child.join()
        return {said, nested()}

    says = "launch was called inside a rank: expected a notebook, a script or torchrun"
    assert launch(in_both, world_size=1)[0] == {f"{says}. Call fn directly"}


# Traps 3 and 9: where launch is called from.

SCRIPT = """
print("this file runs", flush=True)
def double(x): return 2 * x
def work():
    import torch.distributed as dist
    x = torch.ones(1)
    dist.all_reduce(x)
    return x.item()
if __name__ != "__mp_main__":  # what a pool calls it
    import torch
    from ddpkit import launch
    print(launch(work, world_size=2), flush=True)
"""
POOLS = """
if __name__ == "__main__":
    import multiprocessing
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(pool.map(double, [1, 2]), flush=True)
    print(launch(work, world_size=1))
"""
SHOWN = "this file runs\nrank 0: 2.0\nrank 1: 2.0\n"


@pytest.mark.wide
def test_trap_3_and_9_a_plain_script_without_a_main_guard_and_the_users_own_pools(tmp_path):
    pools = "[2, 4]\nthis file runs\n[2, 4]\nrank 0: 1.0\n"  # a spawned pool runs it: its own way
    assert run_script(tmp_path, SCRIPT + POOLS) == SHOWN + pools


def test_trap_8_a_plain_script_where_ranks_are_spawned(tmp_path):
    assert run_script(tmp_path, SCRIPT, DDPKIT_START_METHOD="spawn") == SHOWN


@pytest.mark.wide
def test_trap_9_an_ipython_terminal(tmp_path):
    """And ranks that stay end when it does."""
    pytest.importorskip("IPython", reason="Jupyter isn't installed")
    magic = "get_ipython().run_cell_magic('ranks', '2', 'import os; print(os.getpid())\\nrank')"
    lines = ["%run script.py", "print(launch(work, world_size=1))", "%load_ext ddpkit", magic]
    command = (sys.executable, "-m", "IPython", "--no-banner", "--simple-prompt")
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        (*command, "--no-confirm-exit"),
        input="\n".join([*lines, "exit", ""]),
        env={**os.environ, "IPYTHONDIR": str(tmp_path / "ipython")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=150,
        check=True,
    )
    assert SHOWN in done.stdout
    assert "rank 0: 1.0\n" in done.stdout
    assert "rank 0: 0\nrank 1: 1\n" in done.stdout
    assert done.stdout.count("this file runs") == 1
    pids = re.findall(r"rank \d \| (\d+)\n", done.stdout)
    assert len(pids) == 2
    wait_until(lambda: not any(psutil.pid_exists(int(pid)) for pid in pids))
