import os
import pickle

import pytest
import torch
import torch.distributed as dist

from ddpkit import HangError, launch
from ddpkit.explain import explain, main, read_dumps


def skips():
    dist.barrier()
    if dist.get_rank() != 1:
        dist.all_reduce(torch.ones(4))


def another_length():
    dist.barrier()
    dist.all_reduce(torch.ones(4 + (dist.get_rank() == 2)))


def dumps_of(fn, folder):
    with pytest.raises(HangError) as caught:
        launch(fn, world_size=3)
    caught.value.run.flight_recorder(folder)
    return read_dumps(folder)


def test_a_rank_that_did_not_come_is_named(tmp_path):
    text = explain(dumps_of(skips, tmp_path))
    said = "ranks 0 and 2 wait in all_reduce for rank 1, which didn't come to it.\n"
    assert text.startswith(said)
    assert "ranks 0 and 2: waiting for rank 1 in all_reduce(4 float32)\n" in text
    assert "in skips: dist.all_reduce(torch.ones(4))" in text
    assert "\n1     barrier()              barrier()\n2 ≠   all_reduce(4 float32)  -\n" in text


def test_messages_are_paired(tmp_path):
    def sends():
        other = 1 - dist.get_rank()
        for _ in range(2):
            handles = [dist.isend(torch.ones(3), other), dist.irecv(torch.ones(3), other)]
            for handle in handles:
                handle.wait()
        dist.send(torch.ones(100_000), other)

    with pytest.raises(HangError) as caught:
        launch(sends, world_size=2)
    caught.value.run.flight_recorder(tmp_path)
    text = explain(read_dumps(tmp_path))
    said = "deadlock: each waits for another: rank 0 for rank 1 in send, rank 1 for rank 0 in send."
    assert text.startswith(said)
    assert "rank 0: waiting for rank 1 in send(100000 float32, 0->1)\n" in text


def test_calls_that_differ_are_told(tmp_path):
    text = explain(dumps_of(another_length, tmp_path))
    assert text.startswith("mismatch: ")
    assert "all_reduce(5 float32)" in text


def test_a_run_that_ended_well_waits_for_nothing(tmp_path, capsys):
    launch(dist.barrier, world_size=2).flight_recorder(tmp_path)
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("no rank waits for another")


class Evil:
    def __reduce__(self):
        return os.system, ("touch executed",)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (pickle.dumps(Evil()), "system, and a dump is plain data"),
        (b"not a pickle", "expected a flight recorder's dump, got rank_0"),
        (pickle.dumps([1, 2]), "expected version, entries and pg_config in a dump"),
        (
            pickle.dumps({"version": "9.1", "entries": [], "pg_config": {}}),
            "expected version 2.x of the dumps, got 9.1 in rank_0",
        ),
        (None, "expected a folder of dumps, rank_0, rank_1, ..., got"),
    ],
    ids=["evil", "no pickle", "no dump", "version", "empty"],
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
    assert says in capsys.readouterr().err
    assert not (tmp_path / "executed").exists()
