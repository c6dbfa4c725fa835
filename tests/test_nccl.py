"""The wire over NCCL, on the fake: groups, meshes, graphs, and hangs told as on Gloo."""

import os
import re
import signal
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import hang_cases
import pytest
import torch
import torch.distributed as dist
from fake_nccl import on_nccl
from on_ranks import on_ranks
from test_debug import debug
from test_hang import MISMATCHES
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from ddpkit import HangError, RankError, collectives, ddp, launch, ring
from ddpkit.fast import buckets
from ddpkit.runtime import watch
from ddpkit.runtime.recorder import recorder
from ddpkit.runtime.wire import NEVER, WireGroup

README = Path(__file__).parents[1] / "README.md"


def report(fn, world_size=2, error=HangError, **options) -> str:
    with pytest.raises(error) as caught:
        launch(fn, world_size=world_size, **{"timeout": 20, **options})
    return str(caught.value)


# Groups.


def test_a_group_is_connected_once_by_its_members_alone():
    def groups():
        rank, x = dist.get_rank(), torch.ones(1)
        part = dist.new_group([0, 1], timeout=timedelta(minutes=3))
        dist.all_reduce(x, group=part) if rank < 2 else None
        dist.all_reduce(x)  # of those that aren't in the part, too
        bound = dist.new_group([2, 3], device_id=torch.device("cuda", 0))
        dist.all_reduce(x, group=bound) if rank > 1 else None
        made = [(g.communicators, g.given._timeout) for g in dist.ProcessGroupNCCL.made]
        return x.item(), made, dist.group.WORLD.bound_device_id

    run = launch(on_nccl(groups), world_size=4, timeout=20)
    never, three = (1, NEVER), (1, timedelta(minutes=3))
    first, last = (6.0, [never, three], None), (12.0, [never, never], None)
    assert list(run) == [first, first, last, last]


@on_ranks(2, over=on_nccl, timeout=20)
def test_a_split_is_refused_in_words(check):
    says = "dist.split_group got a group of NCCL's on ddpkit's wire, for [[0], [1]]: make each part"
    check.refused(dist.split_group, split_ranks=[[0], [1]], says=says)


@on_ranks(2, over=on_nccl, timeout=20)
def test_a_barrier_names_its_device_and_torch_says_nothing(check):
    torch._C._get_accelerator = lambda: torch.device("cuda")  # as where there is one
    c10d._get_object_coll_device = lambda group: "cuda"
    with warnings.catch_warnings(record=True) as said:
        dist.barrier()
    check.same(said, [], "warnings")
    (nccl,) = dist.ProcessGroupNCCL.made
    check.same(nccl.barrier_device, dist.group.WORLD.device, "device")


def test_messages_one_by_one_bring_no_warning():
    def talk():
        x = torch.ones(1)
        dist.send(x, 1) if dist.get_rank() == 0 else dist.recv(x, 0)

    run = launch(on_nccl(talk), world_size=2, timeout=20)
    assert run.output == ["", ""]


@on_ranks(3, over=on_nccl, timeout=20)
def test_our_own_algorithms_run(check, rank):
    for all_reduce in (collectives.all_reduce, ring.ring_all_reduce):
        x = torch.arange(6.0) + rank
        all_reduce(x)
        check.same(x.tolist(), [3 * each + 3 for each in range(6)], all_reduce)


# Under `ddpkit.debug`.

BEGIN = f"""\
import datetime, os, sys, time
sys.path.append({str(Path(__file__).parent)!r})
import fake_nccl
import torch
import torch.distributed as dist

fake_nccl.install(reads=False)
rank, device = int(os.environ["RANK"]), torch.device("cuda", 0)
limit = datetime.timedelta(minutes=7)
where = dict(world_size=2, rank=rank, timeout=limit, device_id=device)
dist.init_process_group("nccl", os.environ["STORE"], **where)
"""


def test_a_scripts_device_connects_its_world_once_under_debug(tmp_path):
    script = """\
(world,) = dist.ProcessGroupNCCL.made
print(world.communicators, world.given._timeout, dist.get_backend())
x = torch.ones(1)
if rank == 0:
    dist.all_reduce(x)
"""
    output, said = debug(tmp_path, script, begin=BEGIN)
    assert ["1 0:07:00 nccl" in each for each in output] == [True, True]
    assert said.startswith("deadlock: rank 0 waits in all_reduce for rank 1, which has ")


def test_streams_that_wait_for_each_other_are_told_under_debug_and_nothing_is_ended(tmp_path):
    script = """\
from ddpkit.inspect import session

session.STANDSTILL_S = 0.8
word = session.Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent.parent / "ddpkit/word"
x, groups = torch.ones(1), [dist.new_group([0, 1]) for _ in range(2)]
for group in groups:
    dist.all_reduce(x, group=group)
dist.all_reduce(x, group=groups[rank], async_op=True).wait()
for _ in range(2000):
    if word.exists():
        break
    time.sleep(0.01)
time.sleep(1)
print("went on", flush=True)
os._exit(0)
"""
    output, said = debug(tmp_path, script, begin=BEGIN)
    assert said.startswith("deadlock: each waits for another: rank 0 for rank 1 in all_reduce, ra")
    assert ["went on" in each for each in output] == [True, True]


# Hangs: what is told over Gloo is told over NCCL, by what the host waits for, or the streams.

# Gloo's gather ends for who only sends.
OTHERWISE = {"skips_a_gather", "a_loop_without_end"} | hang_cases.NOT_ON_NCCL
HANGS = [
    name
    for name, (*_, said) in hang_cases.CASES.items()
    if said[0] == "missing" and name not in OTHERWISE
]


def connected(function):
    """`function`, once all ranks have spoken: then nothing stops the host but what it reads."""

    def rank():
        me, x = dist.get_rank(), torch.ones(1)
        others = [peer for peer in range(dist.get_world_size()) if peer != me]
        dist.all_reduce(x)
        batch = [dist.P2POp(dist.isend, x.clone(), peer) for peer in others]
        batch += [dist.P2POp(dist.irecv, x.clone(), peer) for peer in others]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        return function()

    return rank


@pytest.fixture(scope="module")
def told():
    """{(name, over what): report}."""

    def tell(case):
        name, over = case
        function, world_size, _ = hang_cases.CASES[name]
        function = connected(function) if over == "NCCL, connected" else function
        function = function if over == "Gloo" else on_nccl(function)
        # Only then circles are uncertain: a program whose stream waits may still go on.
        options = {"hang_after": 1.0} if over == "NCCL, connected" else {}
        return report(function, world_size, **options)

    cases = [(name, over) for over in ("Gloo", "NCCL", "NCCL, connected") for name in HANGS]
    with ThreadPoolExecutor(4) as pool:
        return dict(zip(cases, pool.map(tell, cases), strict=True))


@pytest.mark.parametrize("over", ["NCCL", "NCCL, connected"])
@pytest.mark.parametrize("name", HANGS)
def test_a_hang_is_told_as_over_gloo(told, name, over):
    expected, got = told[name, "Gloo"].splitlines(), told[name, over].splitlines()
    assert got[0] == expected[0]
    assert got[-1] == expected[-1] or (got[-1].startswith("On NCCL") and "isend" in expected[-1])


@pytest.mark.parametrize("name", MISMATCHES)
def test_trap_16_a_mismatch_is_told_as_over_gloo(monkeypatch, name):
    monkeypatch.setattr(watch, "SETTLE_S", 30.0)
    function, world_size = (hang_cases.CASES | hang_cases.UNSEEN)[name][:2]
    says, advice = MISMATCHES[name]
    text = report(on_nccl(function), world_size)
    assert text.startswith(f"mismatch: {says}")
    assert text.splitlines()[-1].startswith(advice)


def test_trap_18_the_timeout_shows_where_every_rank_is():
    def busy():
        x = torch.ones(1)
        dist.all_reduce(x)
        time.sleep(600 * dist.get_rank())
        dist.all_reduce(x)

    text = report(on_nccl(busy), timeout=2)
    assert text.startswith("no result after 2 s.")
    assert "rank 0: its stream waiting for rank 1 in all_reduce(1 float32, sum)" in text
    assert "rank 1: computing" in text


def test_the_readmes_example_is_told_as_it_says():
    program, *_ = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names = {"__name__": "example"}
    exec(compile(program, "example.py", "exec"), names)
    with pytest.raises(HangError) as caught:
        launch(on_nccl(names["average_loss"]), torch.ones(1), world_size=2, timeout=20)
    text = str(caught.value)
    assert text.startswith("deadlock: rank 0 waits in all_reduce for rank 1, which has returned.")
    assert "rank 0: waiting for rank 1 in all_reduce(1 float32, sum)\n  example.py:8 in" in text


def test_a_ring_of_messages_that_are_not_batched_is_told():
    """Before they are connected, the hosts stop; then each send has a receive behind it."""

    def ring():
        rank, x = dist.get_rank(), torch.ones(1)
        works = [dist.isend(x, (rank + 1) % 3), dist.irecv(x.clone(), (rank - 1) % 3)]
        for work in works:
            work.wait()

    for function, reads in ((ring, True), (connected(ring), True), (connected(ring), False)):
        text = report(on_nccl(function, reads), 3, hang_after=1.0)
        said = "deadlock: each waits for another: rank 0 for rank 1 in send, rank 1 for rank 2 in"
        assert text.startswith(said)
        assert text.endswith("start them together, with dist.batch_isend_irecv.")


def test_a_batch_waits_for_the_peer_that_is_missing():
    """Its first message arrives; the host stops for the other one, at once or in its stream."""

    def batch(times):
        rank, x = dist.get_rank(), torch.ones(1)
        for turn in range(2):
            both = {0: [(dist.irecv, 1), (dist.irecv, 2)], 1: [(dist.isend, 0)]}
            both[2] = [(dist.isend, 0)] * (turn < times)
            ops = [dist.P2POp(op, x.clone(), peer) for op, peer in both[rank]]
            for work in dist.batch_isend_irecv(ops) if ops else []:
                work.wait()

    for times in (0, 1):
        with pytest.raises(HangError) as caught:
            launch(on_nccl(batch), times, world_size=3, timeout=20)
        text = str(caught.value)
        assert text.startswith("deadlock: rank 0 waits in recv for rank 2, which has returned.")


def test_a_group_on_the_worlds_own_backend_is_on_the_wire():
    def groups():
        own = [dist.new_group([0, 1], backend=name) for name in (dist.get_backend(), "nccl", None)]
        return [type(group) is WireGroup for group in (*own, dist.new_group(backend="gloo"))]

    assert launch(on_nccl(groups), world_size=2, timeout=20)[0] == [True, True, True, False]


def test_a_batch_may_have_messages_of_a_rank_to_itself():
    """As torch 2.11's pipelines have whose neighbouring stages share a rank; NCCL copies them."""

    def batch(receivers):
        me, into = dist.get_rank(), torch.zeros(2)
        peers = [me, 1 - me][:receivers]
        ops = [dist.P2POp(dist.isend, torch.tensor(1.0 + me), peer) for peer in peers]
        ops += [dist.P2POp(dist.irecv, into[peer], peer) for peer in peers]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return into.tolist()

    run = launch(on_nccl(batch), 2, world_size=2, timeout=20)
    assert list(run) == [[1.0, 2.0]] * 2
    assert [[(r.op, r.peer) for r in records] for records in run.wire] == [
        [(op, peer) for op in ("send", "recv")] for peer in (1, 0)
    ]
    with pytest.raises(RankError, match=r"called send with dst=\d, which is itself"):
        launch(on_nccl(batch), 1, world_size=2, timeout=20)


def test_a_message_that_nobody_takes_holds_up_what_is_behind_it():
    def in_line():
        x = torch.ones(1)
        dist.all_reduce(x)
        if dist.get_rank() == 0:
            dist.irecv(x, 1)
        dist.all_reduce(torch.ones(1))

    text = report(on_nccl(connected(in_line)), hang_after=1.0)
    said = "deadlock: each waits for another: rank 0 for rank 1 in recv, rank 1 for rank 0 in all_r"
    assert text.startswith(said)
    assert text.endswith("every recv a send. Count them on both sides.")


def test_a_group_that_was_destroyed_is_told():
    def destroys():
        dist.all_reduce(torch.ones(1))
        if dist.get_rank() == 1:
            dist.destroy_process_group()
        else:
            dist.all_reduce(torch.ones(1))

    text = report(on_nccl(destroys))
    said = "deadlock: rank 0 waits in all_reduce for rank 1, which has destroyed its group without"
    assert text.startswith(said)


def test_who_asks_whether_a_call_is_complete_is_told():
    def asks():
        work = dist.all_reduce(torch.ones(1), async_op=True) if dist.get_rank() == 0 else None
        while work and not work.is_completed():
            time.sleep(0.001)

    text = report(on_nccl(connected(asks)), hang_after=1.0)
    assert "rank 0: waiting, by is_completed(), for rank 1 in all_reduce(1 float32, sum)" in text


def test_a_wait_with_a_timeout_ends_by_it_and_says_who_was_awaited():
    def in_vain():
        x = torch.zeros(1)
        dist.send(x, 1) if dist.get_rank() == 0 else dist.recv(x, 0)
        if dist.get_rank() == 1:
            dist.irecv(x, 0).wait(timedelta(seconds=0.2))
        time.sleep(1)

    text = report(on_nccl(in_vain), error=RankError)
    assert text.startswith("rank 1 raised DistBackendError: Watchdog caught collective operation")
    assert "rank 1 waits in recv for rank 0, which isn't in a call" in text


# Hooks run in a thread of autograd's.


def loss_of(model):
    return model(torch.ones(2, 4)).sum()


@pytest.mark.parametrize(
    "make", [ddp.OverlapDDP, buckets.BucketedDDP, DistributedDataParallel], ids=lambda m: m.__name__
)
def test_one_loop_that_ends_early_is_told_where_hooks_have_a_thread(make):
    def train():
        model = make(torch.nn.Linear(4, 1))
        for _ in range(4 - dist.get_rank()):
            loss_of(model).backward()
            if hasattr(model, "synchronize"):
                model.synchronize()

    text = report(on_nccl(train))
    assert text.startswith("deadlock: rank 0 waits in all_reduce for rank 1, which has returned.")
    line = train.__code__.co_firstlineno + 3
    assert f"test_nccl.py:{line} in train: loss_of(model).backward()" in text
    assert "rank 1: returned" in text


def test_threads_that_wait_for_each_other_are_told():
    """While the main thread, which made calls, too, waits for that thread."""

    def waits():
        dist.barrier()
        other = threading.Thread(target=dist.recv, args=(torch.ones(1), 1 - dist.get_rank()))
        other.start()
        other.join()

    text = report(waits, hang_after=1.0)
    assert text.startswith("deadlock: each waits for another: rank 0 for rank 1 in recv, rank 1")


# The launcher's traps 14, 15 and 19.


def falls(how):
    dist.all_reduce(torch.ones(8))
    if dist.get_rank() == 1:
        how()
    dist.all_reduce(torch.ones(8))


def raises():
    raise ValueError("enough")


def is_killed():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("how", "says"),
    [(raises, "raised ValueError: enough"), (is_killed, "was killed by SIGKILL.")],
    ids=["raises", "is killed"],
)
def test_traps_14_and_15_who_fell_is_named_and_where_the_others_were(how, says):
    text = report(on_nccl(lambda: falls(how)), 3, RankError)
    assert text.startswith(f"rank 1 {says}")
    place = falls.__code__.co_firstlineno + 4
    assert f"Rank 0 was in all_reduce(8 float32, sum), test_nccl.py:{place} in falls" in text


def test_trap_19_slow_is_not_hung():
    def slow():
        rank, x = dist.get_rank(), torch.ones(1)
        dist.all_reduce(x)
        time.sleep(0.6 * (rank == 0))
        dist.all_reduce(x)
        work = dist.all_reduce(x, async_op=True)
        time.sleep(0.6)
        work.wait()
        if rank == 0:
            time.sleep(0.6)
            dist.send(x, 1)
        else:
            dist.recv(x, 0)
        return x.item()

    assert list(launch(on_nccl(slow), world_size=2, hang_after=0.2, timeout=20)) == [8.0] * 2


def test_a_gpu_that_computes_long_before_a_call_is_not_hung():
    """Though all have made the call, and none goes on: `hang_after` counts what all reached."""

    def computes_first():
        x = torch.ones(1)
        dist.all_reduce(x)
        torch.cuda.current_stream().put(lambda: time.sleep(2))
        dist.all_reduce(x)
        return x.item()

    assert list(launch(on_nccl(computes_first), world_size=2, hang_after=0.3, timeout=20)) == [4, 4]


def test_a_call_that_all_reached_and_that_does_not_end_falls_under_hang_after():
    def stops():
        x = torch.ones(1)
        dist.all_reduce(x)
        nccl = dist.ProcessGroupNCCL.made[0]
        nccl._carrier = SimpleNamespace(allreduce=lambda *_: threading.Event())  # never set
        dist.all_reduce(x)

    text = report(on_nccl(stops), hang_after=0.3)
    assert text.startswith("no progress for 0.3 s, and every rank is inside a call.")


# Graphs.


def test_a_captured_call_spoils_no_graph_and_stays_on_no_board():
    def capture():
        rank, store = dist.get_rank(), c10d._get_default_store()
        x, y, z = torch.ones(1), torch.ones(1), torch.ones(1)
        dist.all_reduce(x)
        dist.barrier()
        if rank == 0:  # the thread that reads events has one to ask for
            open_call = dist.all_reduce(x, async_op=True)
        with torch.cuda.graph() as graph:
            dist.all_reduce(y)
            work = dist.all_reduce(z, async_op=True)
            work.wait()
            time.sleep(0.2)
        if rank == 0:
            store.set("captured", "")
        else:
            store.wait(["captured"])
            open_call = dist.all_reduce(x, async_op=True)
        open_call.wait()
        for _ in range(2):
            graph.replay()
        torch.cuda.synchronize()
        recorder().settle()
        threads = [thread.name for thread in threading.enumerate()]
        return x.item(), y.item(), z.item(), "ddpkit streams" in threads

    run = launch(on_nccl(capture), world_size=2, timeout=20)
    assert list(run) == [(4.0, 4.0, 4.0, True)] * 2
    for records in run.wire:
        assert all(r.done is not None for r in records)
        assert [r.stream for r in records].count("graph") == 2
