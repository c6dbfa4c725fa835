"""Ranks that raise, exit or are killed: which one is named first, and what is shown of it."""

import ctypes
import os
import pickle
import re
import signal
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from outside import cell

from ddpkit import HangError, LaunchError, RankError, launch
from ddpkit.runtime import processes, watch, worker
from ddpkit.runtime.backends import Choice
from ddpkit.runtime.board import STARTING
from ddpkit.runtime.exits import note_exits, noted_exit
from ddpkit.runtime.watch import Watch

NAME = Path(__file__).name


def failure(fn, *args, world_size=3, times=2, **options) -> RankError:
    """What a launch that must fail raises; the same message each time."""

    def once(_):
        with pytest.raises(RankError) as caught:
            launch(fn, *args, world_size=world_size, **{"timeout": 90, **options})
        return caught.value

    with ThreadPoolExecutor(times) as pool:
        errors = list(pool.map(once, range(times)))
    assert len({str(error) for error in errors}) == 1
    return errors[0]


def message(*args, **options) -> list[str]:
    return str(failure(*args, **options)).splitlines()


# Trap 14: a rank raises.

CELL = """\
import torch, torch.distributed as dist
def inner(x):
    if dist.get_rank() == 1:
        raise ValueError("the batch {} is 100% empty")
    return x
def before():
    dist.all_reduce(inner(torch.ones(8)))
def inside():
    dist.all_reduce(torch.ones(8) if dist.get_rank() != 1 else "a tensor")
def after():
    x = torch.ones(8)
    dist.all_reduce(x)
    inner(x)
"""


def test_trap_14_a_rank_raises_before_in_and_after_a_collective():
    names = cell(CELL)
    call = "all_reduce(8 float32, sum), before, line 7: dist.all_reduce(inner(torch.ones(8)))"
    assert message(names["before"]) == [
        "rank 1 raised ValueError: the batch {} is 100% empty",
        "  before, line 7: dist.all_reduce(inner(torch.ones(8)))",
        '  inner, line 4: raise ValueError("the batch {} is 100% empty")',
        "The others were ended:",
        f"  Rank 0 was in {call}",
        f"  Rank 2 was in {call}",
    ]
    first, *_, place, others, _, last = message(names["inside"])
    assert first.startswith("rank 1 raised TypeError: ")
    assert place == f"  inside, line 9: {CELL.splitlines()[8].strip()}"
    assert others == "The others were ended:"
    assert last.startswith("  Rank 2 was in all_reduce(8 float32, sum), inside, line 9: ")
    first, place, _, others, *ended = message(names["after"])
    assert first == "rank 1 raised ValueError: the batch {} is 100% empty"
    assert place == "  after, line 13: inner(x)"
    assert ended == ["  Rank 0 had returned.", "  Rank 2 had returned."]


def test_trap_14_a_lost_peer_is_not_the_cause():
    """Rank 0 notices that rank 1's connection is gone before anybody notices that rank 1 is."""

    def fall():
        if dist.get_rank() == 0:
            raise RuntimeError("Read error [127.0.0.1]: Connection reset by peer.")
        if dist.get_rank() == 1:
            time.sleep(0.6)  # longer than others are waited for
            os.kill(os.getpid(), signal.SIGKILL)

    assert message(fall, times=1)[0].startswith("rank 1 was killed by SIGKILL.")


def test_all_ranks_fail_alike():
    def divide():
        return 1 / 0

    first = divide.__code__.co_firstlineno
    assert message(divide) == [
        "rank 0 raised ZeroDivisionError: division by zero",
        f"  {NAME}:{first + 1} in divide: return 1 / 0",
        "Ranks 1 and 2 failed in the same way.",
    ]


def test_ranks_that_fail_differently_are_all_told_with_their_lines():
    def differ():
        raise ValueError(f"from {dist.get_rank()}")

    told = r"ank (\d) raised ValueError: from (\d)\n  .* in differ: raise ValueError"
    said = re.findall(told, str(failure(differ, times=1)))
    assert sorted(said) == [("0", "0"), ("1", "1"), ("2", "2")]


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no words")


class Unpicklable(Exception):
    def __init__(self):
        super().__init__("held")
        self.lock = threading.Lock()


def chained(cause=None):
    raise ValueError("no number") from cause or KeyError("invalid literal")


def throw(error):
    raise error


def deep(n=0):
    return deep(n + 1) + 1


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (chained, "ValueError: no number (because of KeyError: 'invalid literal')"),
        (lambda: throw(KeyboardInterrupt), "KeyboardInterrupt"),
        (lambda: throw(Unpicklable()), "Unpicklable: held"),
        (lambda: throw(Unspeakable), "Unspeakable: (its text can't be had: RuntimeError in "),
        (lambda: chained(Unspeakable()), "ValueError: no number (because of Unspeakable: (its"),
        (lambda: throw(ExceptionGroup("two", [OSError()])), "ExceptionGroup: two (1 sub-exc"),
        (deep, "RecursionError: maximum recursion depth exceeded"),
    ],
)
def test_exceptions_of_every_kind_are_reported(fn, says):
    lines = message(fn, world_size=1, times=1)
    assert lines[0].startswith(f"rank 0 raised {says}")
    assert len(lines) < 40


def test_a_module_that_the_ranks_cannot_import():
    module = types.ModuleType("only_here")
    sys.modules["only_here"] = module
    exec("def f(): return 1", vars(module))
    try:
        assert message(module.f, world_size=2, times=1)[0] == (
            "rank 0 raised ModuleNotFoundError: No module named 'only_here'"
        )
    finally:
        del sys.modules["only_here"]


def test_the_error_brings_the_output_which_is_shown_too_and_the_records(capfd):
    def talk():
        print("\n".join(f"line {n}" for n in range(8)))
        dist.barrier()
        if dist.get_rank() == 1:
            raise ValueError("enough")
        dist.all_reduce(torch.ones(1))

    error = failure(talk, times=1)
    assert str(error).splitlines()[-6:] == [
        "Rank 1's last output:",
        *(f"  line {n}" for n in range(3, 8)),
    ]
    assert error.output[0] == "".join(f"line {n}\n" for n in range(8))
    assert capfd.readouterr().out.startswith("rank 0 | line 0\nrank 0 | line 1\n")
    assert [[r.op for r in wire] for wire in error.wire] == [
        ["barrier", "all_reduce"],
        ["barrier"],
        ["barrier", "all_reduce"],
    ]


def test_errors_are_values_that_travel():
    error = RankError("rank 1 raised", rank=1, output=["a"], wire=[[]])
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.rank, again.output, again.wire) == ("rank 1 raised", 1, ["a"], [[]])
    assert isinstance(again, LaunchError)
    assert isinstance(pickle.loads(pickle.dumps(HangError("deadlock", output=["b"]))), LaunchError)
    assert error._render_traceback_() == ["\x1b[1mRankError: rank 1 raised\x1b[22m"]


def test_a_models_own_frames_are_shown_and_not_the_calls_between_them():
    net = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(5, 4)))
    lines = message(net, torch.ones(2, 4), world_size=1, times=1)
    places = [line.partition(":")[0] for line in lines[1:]]
    assert places == ["  torch/nn/modules/container.py"] * 2 + ["  torch/nn/modules/linear.py"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no full disk")
def test_a_full_disk_is_called_so():
    with pytest.raises(OSError, match="disk for temporary files is too full for the return value"):
        worker.save(Path("/dev/full"), (torch.ones(10), []))


def test_a_disk_without_room_for_the_ranks_starts_none(monkeypatch):
    full = types.SimpleNamespace(free=1000)
    monkeypatch.setattr(processes.shutil, "disk_usage", lambda _: full)
    monkeypatch.setattr(processes, "Rank", lambda *_: pytest.fail("a process was started"))
    with pytest.raises(OSError, match=r"files is full: the ranks' files take .*, and 1 kB are"):
        launch(print, world_size=1)


# Trap 15: a rank exits or is killed.


def end_in_the_middle(how):
    dist.barrier()
    if dist.get_rank() == 1:
        how()
    dist.all_reduce(torch.ones(8))


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (lambda: os._exit(0), "exited with code 0, in the middle of its work."),
        (lambda: os._exit(3), "exited with code 3, in the middle of its work."),
        (sys.exit, "raised SystemExit: sys.exit() was called"),
        (lambda: sys.exit("why"), "raised SystemExit: sys.exit('why') was called"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL. Something outside"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), "was killed by SIGTERM."),
        (os.abort, "was killed by SIGABRT. Compiled code gave up; its last output says why."),
        (lambda: ctypes.string_at(0), "was killed by SIGSEGV. It touched memory that isn't its"),
    ],
)
def test_trap_15_exits_and_signals(how, says):
    lines = message(end_in_the_middle, how, times=1)
    assert " ".join(line.strip() for line in lines).startswith(f"rank 1 {says}")
    line = end_in_the_middle.__code__.co_firstlineno + 4
    place = f"{NAME}:{line} in end_in_the_middle: dist.all_reduce(torch.ones(8))"
    assert [line for line in lines if line.startswith("  Rank ")][-2:] == [
        f"  Rank {rank} was in all_reduce(8 float32, sum), {place}" for rank in (0, 2)
    ]


def test_any_status_that_os_exit_takes_is_noted(tmp_path):
    def leaves():
        note_exits(tmp_path, 0)
        os._exit(True)

    with pytest.raises(RankError):
        launch(leaves, world_size=1)
    code, (_, line, function) = noted_exit(tmp_path, 0)
    assert (code, line, function) == (1, leaves.__code__.co_firstlineno + 2, "leaves")


def test_of_an_abort_the_first_complaint_of_a_kernel_is_shown():
    def aborts():
        if dist.get_rank() == 1:
            for thread in range(100):
                print(f"Index.cu:7: thread: [{thread},0,0] Assertion `index < size` failed.")
            print("terminate called\n" + "frame\n" * 50, flush=True)
            os.abort()
        dist.barrier()

    lines = message(aborts, times=1)
    assert lines[0] == "rank 1 was killed by SIGABRT."
    assert lines[2] == "  Index.cu:7: thread: [0,0,0] Assertion `index < size` failed."
    assert sum("Index.cu" in line for line in lines) == 1


class Runs:
    """Runs `source` in the rank that loads it."""

    def __init__(self, source):
        self.source = f"import time, torch.distributed as dist\n{source}"

    def __reduce__(self):
        return exec, (self.source,)


@pytest.mark.parametrize("gpus", [0, 1])
def test_a_start_that_hangs_is_told(monkeypatch, gpus):
    """As NCCL's, which waits without end for a rank that doesn't answer."""

    def watched(ranks, *rest, **options):
        ranks[0].assignment.choice.gpus = gpus
        return Watch(ranks, *rest, **options)

    monkeypatch.setattr(sys.modules["ddpkit.runtime.launch"], "Watch", watched)
    monkeypatch.setattr(watch, "START_S", 1.0)
    never = Runs("dist.init_process_group = lambda *_, **__: time.sleep(1000)")
    says = r"no start: after \d s the ranks are still connecting"
    with pytest.raises(HangError, match=says) as caught:
        launch(print, never, world_size=2, timeout=60)
    said = str(caught.value)
    assert "ranks 0 and 1: starting" in said
    assert ("NCCL_DEBUG=INFO" in said) == bool(gpus)


@pytest.mark.skipif(not os.path.exists("/proc"), reason="looks into /proc")
def test_a_start_that_waits_for_a_stopped_rank_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(watch, "START_S", 1.0)
    stop = f"""
import os, pathlib, signal
try:
    pathlib.Path({str(tmp_path)!r}, "first").touch(exist_ok=False)
except OSError:
    os.kill(os.getpid(), signal.SIGSTOP)
"""
    with pytest.raises(HangError, match=r"doesn't answer: what holds rank [01]\?"):
        launch(print, Runs(stop), world_size=2, timeout=60)


def test_ranks_that_load_the_call_for_long_have_all_the_time_to_connect():
    loads, connects = [(worker.__file__, 1, "main")], [(worker.__file__, 2, "join_world")]
    stacks = {20: loads, 35: connects, 40: loads, 70: connects, 99: connects, 101: connects}
    asked, told = [], []
    rank = types.SimpleNamespace(rank=0, is_stopped=False, ask_stack=lambda: asked[-1])
    rank.assignment = types.SimpleNamespace(choice=Choice("gloo", 0, ""))
    watching = Watch([], types.SimpleNamespace(state=lambda rank: STARTING))
    watching.ranks = [rank]
    watching._raise_hang = lambda headline, advice: told.append(headline)
    for seconds, stack in stacks.items():
        asked.append(stack)
        watching._look_at_start(seconds)
    assert told == ["no start: after 101 s the ranks are still connecting."]


def test_a_rank_killed_while_it_starts():
    class Bomb:
        def __reduce__(self):
            return os._exit, (7,)

    said = message(print, Bomb(), world_size=2, times=1)[0]  # both die: whose is seen is chance
    assert re.fullmatch(r"rank [01] exited with code 7, in the middle of its work\.", said)


def test_no_rank_begins_before_all_have_joined():
    """Else its early end would break the others' connections while they are being made."""

    def dies_at_once():
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    for _ in range(3):
        lines = message(dies_at_once)
        others = [line for line in lines if line.startswith("  Rank ")]
        assert len(others) == sum(" was in barrier(), " in line for line in others) == 2


# What readers get wrong in the call itself.


def silent():
    return dist.get_rank()


def told(rank, timeout):
    return rank


@pytest.mark.parametrize(
    ("fn", "args", "options", "meant"),
    [
        (silent, (2,), {}, "too many positional arguments. Did you mean world_size=2?"),
        (silent, (), {"word_size": 2}, "Did you mean world_size where you wrote word_size?"),
        (silent, (), {"nprocs": 2}, "Did you mean world_size where you wrote nprocs?"),
        (silent, ("x", "y"), {}, "launch can't call silent with these arguments: too many pos"),
        (told, (), {}, "launch doesn't pass it: in told, ask dist.get_rank()"),
        (told, (0,), {"timeout": 5}, "launch keeps timeout= for itself: give told its own"),
    ],
)
def test_arguments_that_the_function_does_not_take(fn, args, options, meant):
    with pytest.raises(TypeError, match=re.escape(meant)) as caught:
        launch(fn, *args, **options)
    said = " ".join("".join(caught.value._render_traceback_()).split())
    assert said.startswith("\x1b[1mTypeError: launch can't call")
    assert said.endswith("launch(fn, *args, **options)")


def test_what_python_and_torch_say_is_told_once_more():
    shared_memory = RuntimeError("NCCL error: unhandled system error")
    wrong = (lambda: rank), dist.init_process_group, lambda: throw(shared_memory)  # noqa: F821
    last = [message(fn, times=1)[-1] for fn in wrong]
    assert last[0].endswith("asks for its number: rank = dist.get_rank().")
    assert last[1].endswith("leave out init_process_group and destroy_process_group.")
    assert "start it with --shm-size=2g" in last[2]


def test_ranks_that_are_not_there():
    def pairs():
        dist.recv(torch.ones(1), 1 - dist.get_rank())

    def beyond():
        dist.broadcast(torch.ones(1), src=7)

    with pytest.raises(
        RankError, match=r"% world_size. Is it made for fewer ranks\? Then say how many"
    ):
        launch(pairs, world_size=4)
    with pytest.raises(RankError, match="broadcast with src=7, but the ranks go from 0 to 1"):
        launch(beyond, world_size=2)
