"""Dumps for PyTorch's analyser and from PyTorch's recorders: they say what our reports say."""

import contextlib
import gc
import io
import os
import pickle
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from hang_cases import CASES, NOT_ON_NCCL, UNSEEN
from torch._C import _distributed_c10d as c10d

from ddpkit import HangError, LaunchError, launch
from ddpkit.explain import main
from ddpkit.inspect.explain import explain, read_dumps


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """{case: (our report, folder of its dumps)}, of all cases: most of their time is waiting."""
    launch(print, world_size=1)

    def hang(name):
        function, world_size, _ = (CASES | UNSEEN)[name]
        with pytest.raises(HangError) as caught:
            launch(
                function, world_size=world_size, timeout=3 if name == "a_loop_without_end" else 60
            )
        folder = tmp_path_factory.mktemp(name)
        caught.value.run.flight_recorder(folder)
        return name, (str(caught.value), folder)

    with ThreadPoolExecutor(4) as pool:
        return dict(pool.map(hang, CASES | UNSEEN))


# Verdicts, as in `hang_cases`


def analysers_verdict(folder):
    """What PyTorch's analyser says of each group's first call that isn't right; None if all are."""
    first = {}
    for collective in analyse(folder):
        if collective.missing_ranks or differing(collective):
            first.setdefault(collective.group_id, collective)
    missing = [collective.missing_ranks or set() for collective in first.values()]
    if any(missing):
        return "missing", set().union(*missing)
    for collective in first.values():
        others = differing(collective)
        (kind,) = set(others.values())
        kind = kind.split("_")[-2].lower().replace("syntax", "size")
        return kind, odd(set(others), collective.expected_ranks)
    return None


def differing(collective) -> dict[int, str]:
    """{rank: how}. That one is done already, and another not, is no mistake."""
    others = (collective.mismatch_collectives or {}).items()
    kinds = {rank: its.type_of_mismatch.state.name for rank, its in others}
    return {rank: kind for rank, kind in kinds.items() if "_STATE_" not in kind}


def analyse(folder) -> list:
    """The collectives that PyTorch's analyser finds in dumps."""
    from torch.distributed.flight_recorder.components import builder, config_manager, loader

    with contextlib.redirect_stderr(io.StringIO()):
        arguments = config_manager.JobConfig().parse_args([str(folder)])
        details, version = loader.read_dir(arguments)
        gc.enable()  # which it disables
        return builder.build_db(details, arguments, version).collectives


def odd(one_side: set, everybody: set) -> set:
    """The smaller of two sides; of equal ones, that without the first rank."""
    sides = one_side, set(everybody) - one_side
    return min(sides, key=lambda side: (len(side), min(everybody) in side))


def our_verdict(report: str):
    """What a report says, of `launch` or of `ddpkit.explain`."""
    if not report.startswith("mismatch: "):
        waits = re.findall(r"waiting for (ranks?[\d, and]+) in ", report)
        return "missing", set().union(*map(named, waits))
    headline = " ".join(report.partition("\n\n")[0].split())
    said = re.findall(r"(ranks?[\d, and]+) called (\w+)\((.*?)\)(?:,|\.)", headline)
    sides, calls = [named(ranks) for ranks, _, _ in said], {call for _, call, _ in said}
    if len(calls) > 1 and calls != {"send", "recv"}:
        kind = "type"
    else:
        sizes = {detail.split()[0] for _, _, detail in said}
        kind = "size" if len(sizes) > 1 else "dtype"
    return kind, odd(sides[1], set.union(*sides))


def named(ranks: str) -> set[int]:
    numbers = list(map(int, re.findall(r"\d+", ranks)))
    return set(range(numbers[0], numbers[1] + 1) if " to " in ranks else numbers)


@pytest.mark.wide
@pytest.mark.parametrize("name", CASES)
def test_pytorchs_analyser_names_the_ranks_and_the_kind_that_our_reports_name(reports, name):
    report, folder = reports[name]
    verdict = CASES[name][2]
    assert our_verdict(report) == verdict, report
    assert analysers_verdict(folder) == verdict
    explained = explain(read_dumps(folder))
    assert our_verdict(explained) == verdict, explained


def hang_on_gpus(function):
    torch.set_default_device("cuda")
    function()


@pytest.fixture(scope="module")
def reports_of_gpus():
    """{case: what was said of it}, of all cases, each by tensors on a GPU."""

    def hang(name):
        function, world_size, _ = CASES[name]
        options = {"world_size": world_size, "backend": "nccl", "hang_after": 3.0, "timeout": 25}
        try:
            launch(hang_on_gpus, function, **options)
        except LaunchError as error:
            return name, f"{error}"
        return name, "nothing: it ended well"

    with ThreadPoolExecutor(6) as pool:
        return dict(pool.map(hang, [name for name in CASES if name not in NOT_ON_NCCL]))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in CASES if name not in NOT_ON_NCCL])
def test_on_gpus_reports_name_the_same_ranks(request, name):
    report = request.getfixturevalue("reports_of_gpus")[name]
    assert our_verdict(report) == CASES[name][2], report


def test_calls_that_some_rank_has_forgotten_are_in_no_dump(reports):
    found = analyse(reports["after_more_calls_than_the_board_remembers"][1])
    assert sum(collective.missing_ranks is not None for collective in found) == 1


def test_enough_is_tried():
    assert len(CASES) >= 9 + 20


@pytest.mark.parametrize("name", UNSEEN)
def test_what_the_format_does_not_tell_only_our_report_does(reports, name):
    report, folder = reports[name]
    assert report.startswith("mismatch: ranks 0 and 2 called ")
    assert analysers_verdict(folder) is None
    assert "A dump holds neither root nor operation: " in explain(read_dumps(folder))


@pytest.mark.slow
def test_the_analysers_own_command(reports):
    _, folder = reports["skips"]
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(folder)]
    assert "missing ranks: {1}" in subprocess.run(command, capture_output=True, text=True).stderr


def collectives_of_all_kinds():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x = torch.ones(4)
    dist.all_reduce(x)
    dist.all_gather([torch.ones(4) for _ in range(world_size)], x)
    dist.reduce_scatter(torch.ones(2), [torch.ones(2) for _ in range(world_size)])
    dist.broadcast(x, 1)
    dist.barrier()
    group = dist.new_group([0, 2])
    if rank != 1:
        dist.all_reduce(x, group=group)
    for _ in range(2):
        right, left = (rank + 1) % world_size, (rank - 1) % world_size
        handles = [dist.isend(x, right, tag=3), dist.irecv(torch.ones(4), left, tag=3)]
        dist.all_reduce(torch.ones(2))
        for handle in handles:
            handle.wait()


def test_a_run_without_a_mistake_has_none(tmp_path, capsys):
    launch(collectives_of_all_kinds, world_size=3).flight_recorder(tmp_path)
    found = analyse(tmp_path)
    assert len(found) == 6 + 2 * (3 + 1)
    assert all(collective.pass_check for collective in found)
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("no rank waits for another")


def explained(folder, function, world_size):
    """What our dumps say of a program that hangs."""
    with pytest.raises(HangError) as caught:
        launch(function, world_size=world_size)
    caught.value.run.flight_recorder(folder)
    return explain(read_dumps(folder))


def test_a_receive_that_was_posted_early_is_not_waited_in(tmp_path):
    def early():
        rank = dist.get_rank()
        if rank < 2:
            message = dist.irecv(torch.ones(1), 1 - rank)
            dist.all_reduce(torch.ones(1))
            message.wait()

    said = "ranks 0 and 1 wait in all_reduce for rank 2, which didn't come to it.\n"
    assert explained(tmp_path, early, 3).startswith(said)


def test_a_receive_from_any_rank_that_waits_is_in_the_dump(tmp_path):
    def one_too_many():
        for _ in range(2):
            if dist.get_rank() == 0:
                dist.recv(torch.ones(1))
        if dist.get_rank() == 1:
            dist.send(torch.ones(1), 0)

    text = explained(tmp_path, one_too_many, 2)
    assert text.startswith("rank 0 waits in recv for rank 1, which didn't come to it.\n")
    assert "1     recv(1 float32, src=1)    send(1 float32, dst=0)\n" in text
    assert "2     recv(1 float32, src=any)  -\n" in text
    assert analysers_verdict(tmp_path) is None  # it would blame all others


def test_our_dumps_tell_tags_and_the_cpu(reports, tmp_path):
    def tags():
        transfer = (dist.send, dist.recv)[dist.get_rank()]
        transfer(torch.ones(1), 1 - dist.get_rank(), tag=1 + dist.get_rank())

    text = explained(tmp_path, tags, 2)
    assert "send(1 float32, dst=1, tag=1)  recv(1 float32, src=0, tag=2)" in text
    assert "\nTheir tags, or groups, differ: " in text
    both = explain(read_dumps(reports["both_send"][1]))
    assert "\nLet one side receive first, " in both


def test_the_report_from_dumps(reports):
    text = explain(read_dumps(reports["skips"][1]))
    said = "ranks 0 and 2 wait in all_reduce for rank 1, which didn't come to it.\n"
    assert text.startswith(said)
    assert "ranks 0 and 2: waiting for rank 1 in all_reduce(4 float32)\n" in text
    assert "in skips: dist.all_reduce(x())" in text
    assert "\n1     barrier()              barrier()\n2 ≠   all_reduce(4 float32)  -\n" in text


# PyTorch's own recorders


def own_dump():
    """What PyTorch's recorder, in C++, has of Gloo; rank 1 comes late to the last call."""
    rank, x = dist.get_rank(), torch.ones(4, 3)
    dist.all_reduce(x)
    dist.barrier()
    dist.all_gather([torch.ones(2) for _ in range(2)], torch.ones(2))
    dist.scatter(x, [x, x] if rank == 0 else None)
    dist.all_reduce(x, group=dist.new_group([0, 1]))
    handles = [dist.all_reduce(x, async_op=True)] if rank == 0 else []
    dump = c10d._dump_fr_trace()
    while not all(entry["retired"] for entry in pickle.loads(dump)["entries"][:5]):
        dump = c10d._dump_fr_trace()  # the recorder learns a little late that a call is done
    store = dist.distributed_c10d._get_default_store()
    store.set(f"dumped {rank}", "")
    store.wait(["dumped 0", "dumped 1"])
    handles = handles or [dist.all_reduce(x, async_op=True)]
    handles[0].wait()
    return dump


@pytest.mark.skipif(not hasattr(c10d, "_dump_fr_trace"), reason="this torch can't dump on the CPU")
def test_dumps_of_pytorchs_own_recorder_are_read(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "100")
    for rank, dump in enumerate(launch(own_dump, world_size=2)):
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(dump)
    text = explain(read_dumps(tmp_path))
    assert text.startswith("rank 0 waits in all_reduce for rank 1, which didn't come to it.\n")
    assert "test_explain.py:" in text
    assert "in own_dump: handles = [dist.all_reduce(x, async_op=True)]" in text
    assert "\n5 ≠   all_reduce(4×3 float32)  -\n" in text


def nccl(*calls, ranks="[0, 1, 2]", first=0):
    """A dump as NCCL's recorder writes it: format 2.10, torch/csrc/…/c10d/FlightRecorderDetail.hpp.

    calls: (name, size, state), a list of them for a batch.
    """
    entries, sequences = [], {False: first, True: first}

    def add(name, size, state, is_p2p):
        size, dtypes = [[size]] if size else [], ["Float"] if size else []
        frames = [
            ("all_reduce", "/opt/conda/lib/python3.12/site-packages/torch/distributed/c10d.py"),
            ("all_reduce", "/src/pytorch/torch/distributed/c10d.py"),
            ("step", "/home/she/torch/train.py"),
        ]
        completed = state == "completed"
        entry = {
            "frames": [{"name": name, "filename": file, "line": 7} for name, file in frames],
            "record_id": first + len(entries),
            "pg_id": 0,
            "process_group": ("0", "default_pg"),
            "thread_name": "python",
            "thread_id": "1",
            "collective_seq_id": sequences[False],
            "p2p_seq_id": sequences[True],
            "op_id": len(entries) + 1,
            "profiling_name": f"nccl:{name}",
            "time_created_ns": 10**18 + len(entries),
            "input_sizes": size,
            "input_dtypes": dtypes,
            "output_sizes": size,
            "output_dtypes": dtypes,
            "state": state,
            "time_discovered_started_ns": 1 if state == "started" else None,
            "time_discovered_completed_ns": 2 if completed else None,
            "retired": completed,
            "timeout_ms": 600_000,
            "is_p2p": is_p2p,
        }
        entries.append(entry)

    for call in calls:
        batch = call if isinstance(call, list) else [call]
        is_p2p = batch[0][0].startswith(("send", "recv"))
        sequences[is_p2p] += 1
        for each in batch:
            add(*each, is_p2p)
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}}
    common = {"version": "2.10", "comm_lib_version": "2.27.3", "pg_config": config}
    return common | {"pg_status": {}, "entries": entries, "nccl_comm_state": {}}


def of_groups(dumps):
    """One rank's calls in several groups, {name: a dump}, in this order."""
    config, entries = {}, []
    for name, dump in dumps.items():
        config[name] = dump["pg_config"]["0"]
        entries += [entry | {"process_group": (name, name)} for entry in dump["entries"]]
    return nccl() | {"pg_config": config, "entries": entries}


def write(folder, dumps):
    for rank, dump in dumps.items():
        (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump, protocol=2))


DONE = ("all_reduce", 8, "completed")
STUCK = ("_all_gather_base", 8, "started")


def batch(*messages, state="completed"):
    """batch_isend_irecv: the messages have no state, only what ends the batch has."""
    return [*((name, 4, "scheduled") for name in messages), ("coalesced", 0, state)]


def test_nccls_names_batches_and_frames(tmp_path):
    there = batch("send 0->1", "recv 0<-1"), batch("send 1->0", "recv 1<-0"), DONE
    dumps = {
        0: nccl(DONE, there[0], STUCK),
        1: nccl(DONE, there[1], STUCK),
        2: nccl(DONE),
    }
    text = explain(dumps)
    assert text.startswith("ranks 0 and 1 wait in _all_gather_base for rank 2, which didn't come")
    assert "  train.py:7 in step\n" in text
    for dump in dumps.values():  # PyTorch's analyser stumbles over a batch without rank 2
        dump["entries"] = [entry for entry in dump["entries"] if not entry["is_p2p"]]
    write(tmp_path, dumps)
    assert analysers_verdict(tmp_path) == our_verdict(text) == ("missing", {2})


def test_a_batch_that_waits(tmp_path):
    stuck = batch("send 0->1", "recv 0<-1", state="started")
    text = explain({0: nccl(DONE, stuck, ranks="[0, 1]"), 1: nccl(DONE, ranks="[0, 1]")})
    assert text.startswith("rank 0 waits in send for rank 1, which didn't come to it.")


@pytest.mark.parametrize("forgotten", [1, 2])
def test_a_batch_whose_beginning_is_forgotten_is_no_mismatch(forgotten):
    parts = [("all_reduce", size, "scheduled") for size in (8, 16)]
    calls = [*parts, ("coalesced", 0, "completed")], DONE
    dumps = {rank: nccl(*calls, ranks="[0, 1]") for rank in (0, 1)}
    del dumps[1]["entries"][:forgotten]
    assert explain(dumps).startswith("no rank waits")


def test_the_end_of_a_batch_of_messages_alone_is_no_call():
    dumps = {0: nccl(batch("send 0->1"), DONE, ranks="[0, 1]")}
    dumps[1] = nccl(batch("recv 1<-0"), DONE, ranks="[0, 1]")
    del dumps[1]["entries"][0]
    assert explain(dumps).startswith("no rank waits")


def test_a_rank_in_a_chain_is_not_blamed():
    stuck = of_groups({"1": nccl(STUCK, ranks="[1, 2]")})
    for call, rank in ((("recv 0<-1", 4, "started"), 1), (STUCK, 0)):  # 0 waits for 1, and for both
        said = f"rank {rank} waits in {STUCK[0]} for rank 2, which didn't come to it.\n"
        assert explain({0: nccl(call), 1: stuck, 2: nccl()}).startswith(said)


def test_messages_name_ranks_of_the_world():
    text = explain({4: nccl(("recv 0<-1", 4, "started"), ranks="[4, 5]"), 5: nccl(ranks="[4, 5]")})
    assert "rank 4: waiting for rank 5 in recv(4 float32, src=5)\n" in text


def test_a_group_whose_members_no_dump_names_has_those_that_made_a_call():
    """As torch's recorder of Gloo leaves it: rank 1 isn't in the group."""
    dumps = {rank: of_groups({"0": nccl(DONE), "1": nccl(DONE, STUCK)}) for rank in (0, 2)}
    dumps[1] = nccl(DONE)
    for dump in dumps.values():
        dump["pg_config"] = {"": {"name": "", "desc": "", "ranks": "[]"}}
    said = "ranks 0 and 2 wait in _all_gather_base; the dump doesn't say for whom.\n"
    assert explain(dumps).startswith(said)
    del dumps[2]["entries"][-1]
    text = explain(dumps)
    assert text.startswith("rank 0 waits in _all_gather_base for rank 2, which didn't come to it.")
    assert 'Their calls in group "1" (≠: here they differ):\n' in text
    assert text.endswith("don't name the members of this group: one that made no call isn't seen.")


def test_calls_that_the_board_forgets_were_made():
    """Rank 1 has made the call of group 2 before, or queued it after, 300 others."""
    waits = nccl(STUCK, ranks="[0, 1]")
    over = nccl((STUCK[0], 8, "completed"), ranks="[0, 1]")
    others = nccl(*[DONE] * 300, ranks="[1, 2]")
    queue = nccl(*[("all_reduce", 8, "scheduled")] * 300, ranks="[1, 2]")
    dumps = {0: of_groups({"2": waits}), 2: of_groups({"1": others})}
    dumps[1] = of_groups({"2": over, "1": others})
    said = "rank 0 is still in _all_gather_base, which is over for rank 1.\n"
    assert explain(dumps).startswith(said)
    del dumps[1]["entries"][0]
    dumps[1]["entries"][0]["record_id"] = 1
    said = "rank 0 waits in _all_gather_base for rank 1, which didn't come to it, as far as one can"
    assert explain(dumps).startswith(said)
    dumps[1] = of_groups({"1": queue, "2": waits})
    dumps[2]["entries"] = []
    said = "rank 1 waits in all_reduce for rank 2, which didn't come to it.\n"
    assert explain(dumps).startswith(said)


def test_collectives_in_a_batch_are_compared_one_by_one():
    def dump(*sizes):
        parts = [("all_reduce", size, "scheduled") for size in sizes]
        return nccl([*parts, ("coalesced", 0, "started")], ranks="[0, 1]")

    assert explain({0: dump(4, 5), 1: dump(4, 5)}).startswith("no rank waits")
    for other in ((6, 5), (4, 6)):
        assert "called all_reduce(6 float32)" in explain({0: dump(4, 5), 1: dump(*other)})


def test_views_of_another_shape_and_what_only_a_root_hands_in_are_no_mismatch():
    dumps = {rank: nccl(("scatter", 6, "started"), ranks="[0, 1]") for rank in (0, 1)}
    dumps[1]["entries"][0] |= {"input_sizes": [], "input_dtypes": [], "output_sizes": [[2, 3]]}
    assert explain(dumps).startswith("no rank waits")
    uneven = {rank: nccl(("all_to_all", 6 + rank, "started"), ranks="[0, 1]") for rank in (0, 1)}
    text = explain(uneven)
    assert text.startswith("no rank waits")
    assert "≠" not in text
    for rank, dump in uneven.items():  # each goes on to another group
        uneven[rank] = of_groups({"0": dump, f"{rank + 1}": nccl(STUCK, ranks="[0, 1]")})
        uneven[rank]["entries"][0]["state"] = "completed"
    text = explain(uneven)
    assert text.startswith("deadlock: each waits for another")
    assert "≠" not in text


def test_a_recorder_that_was_too_short_for_all_calls():
    sends, receives = [("send 0->1", 4, "completed")] * 3, [("recv 1<-0", 4, "completed")] * 5
    late = ("recv 1<-0", 4, "started")
    dumps = {0: nccl(*sends, ranks="[0, 1]", first=90)}
    dumps[1] = nccl(*receives, late, ranks="[0, 1]", first=70)
    text = explain(dumps)
    assert text.startswith("rank 1 waits in recv for rank 0, which didn't come to it.")
    assert "\n5     send(4 float32, dst=1)  recv(4 float32, src=0)\n6 ≠   -  " in text
    dumps[0] = nccl(*sends, ("send 0->1", 4, "started"), ranks="[0, 1]", first=90)
    assert explain(dumps).startswith("no rank waits")


def test_a_rank_far_ahead_of_the_call_that_waits():
    """The CPU hands in what the GPU has yet to begin: more than the board remembers."""
    queued = [("all_reduce", 8, "scheduled")] * 600
    text = explain({0: nccl(DONE, STUCK, *queued, ranks="[0, 1]"), 1: nccl(DONE, ranks="[0, 1]")})
    assert text.startswith("rank 0 waits in _all_gather_base for rank 1, which didn't come to it.")


def test_a_rank_without_a_dump_is_named(tmp_path):
    write(tmp_path, {0: nccl(DONE, STUCK), 2: nccl(DONE, STUCK)})
    text = explain(read_dumps(tmp_path))
    assert text.startswith("ranks 0 and 2 wait in _all_gather_base for rank 1, which didn't come ")
    assert text.endswith("There is no dump of rank 1: did it end before the others?")
    assert "\n2     _all_gather_base(8 float32)\n" in text  # nothing differs between those two


def test_a_dump_alone_claims_nothing_of_the_others():
    text = explain({2: nccl(DONE)})
    assert text.startswith("rank 2 waits for nobody.\n")
    assert "\nWho waits for them, only the dumps of the others can tell.\n" in text
    unknown = nccl(DONE, STUCK, ranks="[]")  # as Gloo's recorder
    assert explain({0: unknown}).startswith(
        "rank 0 waits in _all_gather_base; the dump doesn't say"
    )


def test_a_call_that_is_over_for_some_is_no_mistake_of_the_program():
    """As when a link of NCCL's breaks."""
    over = (STUCK[0], STUCK[1], "completed")
    text = explain({0: nccl(DONE, over), 1: nccl(DONE, STUCK), 2: nccl(DONE, STUCK)})
    said = "ranks 1 and 2 are still in _all_gather_base, which is over for rank 0.\n"
    assert text.startswith(said)
    assert text.endswith("look at what carries it: a link, a GPU, NCCL's own log.")
    assert "≠" not in text


@pytest.mark.parametrize(
    ("one", "other", "advice"),
    [
        (8, 7, "Every rank must bring the same number of elements. Did the last batch"),
        (8, 800, "These look like two different calls: one rank skipped a call"),
    ],
)
def test_sizes_that_differ_hear_the_advice_for_sizes(one, other, advice):
    dumps = {r: nccl(("all_reduce", (one, other)[r], "started"), ranks="[0, 1]") for r in (0, 1)}
    assert explain(dumps).splitlines()[-1].startswith(advice)


def test_each_group_counts_its_own_calls():
    """Ranks with groups of their own: nothing else is marked."""
    tensor, data, dumps = ("[0, 1]", "[2, 3]"), ("[0, 2]", "[1, 3]"), {}
    for rank in range(4):
        layers = [("all_reduce", 4, "completed")] * (2 + rank // 2)
        late = () if rank == 3 else [("all_reduce", 9, "started" if rank == 1 else "completed")]
        dumps[rank] = nccl(*layers, ranks=tensor[rank // 2])
        others = nccl(DONE, *late, ranks=data[rank % 2])
        for entry in others["entries"]:
            entry["process_group"] = ("1", "data")
        dumps[rank]["entries"] += others["entries"]
        dumps[rank]["pg_config"]["1"] = others["pg_config"]["0"]
    text = explain(dumps)
    assert text.startswith("rank 1 waits in all_reduce for rank 3, which didn't come to it.")
    assert text.count("≠") == 2
    assert "\nTheir calls in group [1, 3] (≠: here they differ):\n" in text
    assert "\n1     all_reduce(8 float32)  all_reduce(8 float32)\n2 ≠   all_reduce(9 fl" in text


# What is no dump


class Evil:
    def __reduce__(self):
        return os.system, ("touch executed",)


GOOD = nccl(DONE, ranks="[0]")


def spoilt(**fields) -> dict:
    return GOOD | {"entries": [GOOD["entries"][0] | fields]}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (pickle.dumps(Evil()), "system, and a dump is plain data"),
        (b"not a pickle", "expected a flight recorder's dump, got rank_0"),
        (pickle.dumps(GOOD)[:-20], "expected a flight recorder's dump, got rank_0: "),
        (b"", "expected a flight recorder's dump, got rank_0: "),
        (pickle.dumps([1, 2]), "expected version, entries and pg_config in a dump"),
        (pickle.dumps(GOOD | {"version": "9.1"}), "expected version 2.x of the dumps, got 9.1 in"),
        (pickle.dumps(GOOD | {"entries": [{}]}), "got KeyError: 'collective_seq_id'"),
        (pickle.dumps(GOOD | {"entries": 7}), "expected a list of entries in rank_0, got int"),
        (pickle.dumps(spoilt(collective_seq_id="seven")), "invalid literal for int() with base 10"),
        (pickle.dumps(spoilt(collective_seq_id=10**30)), "a call has the number 1000000000000"),
        (pickle.dumps(spoilt(time_created_ns="noon")), "could not convert string to float"),
        (pickle.dumps(spoilt(input_sizes=[["8"], 7])), "got TypeError: "),
        (pickle.dumps(spoilt(frames=[{"name": 1, "filename": 2, "line": "x"}])), "got "),
        (pickle.dumps(GOOD | {"pg_config": {"0": 7}}), "expected the ranks of each group"),
        (pickle.dumps(GOOD | {"pg_config": {"0": {"ranks": "[3]"}}}), "whose name ends in 0"),
        (
            pickle.dumps(GOOD | {"pg_config": {"0": {"ranks": f"[0, 1, {10**25}]"}}}),
            "ranks 0, 1 an",
        ),
        (None, "expected a folder of dumps, rank_0, rank_1, ..., got"),
    ],
    ids=[
        *("evil", "no pickle", "cut", "empty", "no dump", "version", "entry", "entries"),
        *("id", "huge id", "time", "sizes", "frames", "group", "other run", "many", "folder"),
    ],
)
def test_what_is_no_dump_is_refused_and_never_executed(
    content, says, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "dumps"
    folder.mkdir()
    if content is not None:
        (folder / "rank_0").write_bytes(content)
    assert main([str(folder)]) == 1
    assert says in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "executed").exists()


def test_a_log_beside_dumps_hides_none(tmp_path, capsys):
    write(tmp_path, {0: GOOD})
    (tmp_path / "train.log").write_text("epoch 1\n")
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("no rank waits for another")


def test_two_dumps_of_a_rank_are_refused(tmp_path):
    write(tmp_path, {0: GOOD})
    (tmp_path / "rank_0").write_bytes(b"")
    with pytest.raises(ValueError, match="one dump of rank 0, got nccl_trace_rank_0 and rank_0"):
        read_dumps(tmp_path)


def test_numbers_as_text_are_numbers():
    text = explain({0: spoilt(collective_seq_id="1", time_created_ns="5")})
    assert text.startswith("no rank waits for another")


def test_a_file_of_something_else_is_named(tmp_path):
    write(tmp_path, {0: GOOD})
    (tmp_path / "events.1700000000").write_bytes(pickle.dumps(GOOD))
    with pytest.raises(ValueError, match="expected dumps of rank 0, got one whose name ends in 17"):
        explain(read_dumps(tmp_path))


@pytest.mark.wide
def test_who_reads_only_the_first_lines_sees_no_traceback(tmp_path):
    write(tmp_path, {0: GOOD})
    command = [sys.executable, "-m", "ddpkit.explain", str(tmp_path)]
    reader, writer = os.pipe()
    os.close(reader)  # `head` has ended already
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")
