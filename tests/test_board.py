"""The board: what one rank writes, all read, also when it has gone round, and whatever it holds."""

import threading
import time

import pytest

from ddpkit import launch
from ddpkit.runtime.board import DISAGREES, IDLE, SLOTS, STARTING, Board, Record, Said, hash32
from ddpkit.runtime.recorder import Recorder


def call(seq=0, op="all_reduce", ranks=(0, 1), channel="0", fingerprint="f", **changes) -> Record:
    said = {"group": "world", "detail": "8 float32, sum", "bytes": 32, "peer": None}
    said |= {"shape": (8,), "dtype": "float32", "file": "train.py", "line": 12, "function": "step"}
    became = {name: changes.pop(name) for name in changes.keys() - Said.__dataclass_fields__}
    said = Said(op=op, ranks=ranks, channel=channel, fingerprint=fingerprint, **said | changes)
    return Record(said, seq, **{"issued": float(seq)} | became)


@pytest.fixture
def board(tmp_path):
    board = Board(tmp_path / "board", 2, create=True)
    yield board
    board.close()


def test_what_is_written_is_read_by_another(board, tmp_path):
    record = call(values=[1.0], memory=(0, 1, [2.0]))
    board.put(1, 0, record)
    other = Board(tmp_path / "board", 2)
    assert other.records(1) == [record]
    assert other.records(0) == []
    assert record.call == "all_reduce(8 float32, sum)"
    other.close()


def test_records_are_read_again_only_when_their_rank_has_written(board, tmp_path, monkeypatch):
    other, read = Board(tmp_path / "board", 2), []
    one = other.record
    monkeypatch.setattr(other, "record", lambda *where: read.append(where) or one(*where))
    board.put(0, 0, call(0))
    assert other.records(0) == other.records(0) == [call(0)]
    board.put(1, 0, call(0))
    assert other.records(0) == [call(0)]
    assert read == [(0, 0)]
    board.update(0, 0, call(0, done=1.0))
    assert other.records(0) == [call(0, done=1.0)]
    other.close()


def test_who_reads_in_the_middle_of_a_put_reads_again_after_it(board, tmp_path, monkeypatch):
    other, put_times = Board(tmp_path / "board", 2), board._put_times

    def look_meanwhile(*args):
        assert other.records(0) == []
        put_times(*args)
        assert other.records(0) == []

    monkeypatch.setattr(board, "_put_times", look_meanwhile)
    board.put(0, 0, call(0))
    assert other.records(0) == [call(0)]
    other.close()


def test_state_waiting_and_threads(board):
    for rank in (0, 1):
        assert (board.calls(rank), board.events()[rank]) == (0, 0)
        assert (board.waiting(rank), board.state(rank)) == ([], STARTING)
    board.set_state(1, IDLE)
    board.set_waiting(1, 0)
    board.set_threads(1, 2)
    assert (board.state(1), board.waiting(1), board.threads(1)) == (IDLE, [0], 2)
    board.set_waiting(1, None)
    assert board.waiting(1) == []
    assert (board.state(0), board.threads(0)) == (STARTING, 0)


def test_a_record_says_since_when_its_rank_waits(board):
    for index in range(SLOTS + 1):
        board.put(0, index, call(index))
    assert board.records(0)[0].waited is None
    board.set_waiting(0, 1, since=7.0)
    assert [record.waited for record in board.records(0)[:2]] == [7.0, None]
    board.set_waiting(0, 0, since=8.0)  # a later call has taken its slot
    assert board.records(0)[-1].waited is None


def test_every_change_counts_as_progress(board):
    board.put(0, 0, call())
    board.put(0, 0, call(done=1.0))
    board.set_state(0, DISAGREES)
    assert (board.events()[0], board.calls(0)) == (3, 1)
    assert board.record(0, 0).done == 1.0


def test_only_the_last_calls_are_kept(board):
    for number in range(SLOTS + 3):
        board.put(0, number, call(number))
    assert [record.seq for record in board.records(0)] == list(range(3, SLOTS + 3))
    assert board.record(0, 2) is None
    assert board.record(0, SLOTS + 3) is None


def test_find_what_was_said_at_a_place(board):
    for number in range(SLOTS + 3):
        board.put(0, number, call(number // 2, channel="ab"[number % 2], fingerprint=str(number)))
    assert board.find(0, hash32("b"), 100) == (201, hash32("201"))
    assert board.find(0, hash32("a"), 0) is None  # overwritten
    assert board.find(0, hash32("c"), 0) is None
    assert board.find(1, hash32("a"), 0) is None
    assert hash32("all_reduce") == 0xB76F6A89  # in every process


def test_a_record_too_large_for_its_slot_loses_what_matters_least(board):
    record = call(
        values=[0.1] * 64, result=[0.1] * 64, memory=(0, 0, [0.1] * 64), file="/very/long" * 60
    )
    board.put(0, 0, record)
    read = board.record(0, 0)
    assert (read.op, read.line, read.file) == ("all_reduce", 12, record.file)
    assert read.memory is None


def test_even_an_absurd_record_fits(board):
    record = call(file="/f" * 5000, detail="d" * 5000, fingerprint="a" * 5000, function="f" * 50)
    board.put(0, 0, record)
    board.put(0, 1, call(1))
    assert [read.seq for read in board.records(0)] == [0, 1]
    assert board.record(0, 0).function == "f" * 50
    assert board.find(0, hash32("0"), 0) == (0, hash32("a" * 5000))


IRREGULAR = tuple(n * n for n in range(250))


@pytest.mark.parametrize("ranks", [tuple(range(2000)), tuple(range(0, 3000, 3)), IRREGULAR])
def test_the_ranks_of_a_cluster_fit(board, ranks):
    for seq in range(2):
        board.put(0, seq, call(seq, ranks=ranks, group=f"group {list(ranks)}"))
    assert [read.ranks for read in board.records(0)] == [ranks] * 2
    board.put(0, 0, call(0, ranks=(0, *IRREGULAR[1:], *range(62002, 65000))))
    assert [read.seq for read in board.records(0)] == [1]  # without room, it takes no other's


def test_a_record_caught_half_written_is_no_record(board):
    board.put(0, 0, call())
    at = board._slot(0, 0) * 8
    board._map[at + 60 : at + 90] = bytes(30)
    assert board.record(0, 0) is None
    assert board.records(0) == []


def test_a_record_that_is_written_again_never_looks_different(board, tmp_path):
    """Else another rank would see a call that nobody made, and report a mismatch."""

    def rewrite():
        """What a rank does when its call is done, again and again."""
        board, until = Board(tmp_path / "board", 2), time.monotonic() + 0.3
        while time.monotonic() < until:
            board.put(0, 0, call())

    board.put(0, 0, call())
    writer = threading.Thread(target=launch, args=[rewrite], kwargs={"world_size": 1})
    writer.start()
    seen = set()
    while writer.is_alive():
        seen.add(board.find(0, hash32("0"), 0))
    assert board.events()[0] > 100
    assert seen == {(0, hash32("f"))}


def test_a_rank_that_ends_waits_for_what_gloos_threads_still_have_to_note():
    """Who waits for a future in C++, as DDP does, may go on before they have."""
    recorder, record = Recorder(0), call(by_future=True)
    recorder.records = [call(), record]  # the first was never waited for: nothing is due
    threading.Timer(0.02, recorder.done, [record]).start()
    recorder.settle()
    assert record.done is not None
