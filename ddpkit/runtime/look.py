"""Read the board at one moment: where each rank is, whom it waits for, who can never go on.

The board is the file in which each rank writes its state and, just before it makes a call, a
`Record` of it. A call is a collective call, a send, a receive, or a new_group (the making of a
group, on a channel such as "new 1#1"). A call is open until it is complete. A rank has come to
a call if it has made it, though the call may still be open. A GPU carries out a group's calls one
after another, from a queue, but those of one batch_isend_irecv, a batch, together.

The n-th calls that ranks make on one channel belong together. A channel is a group, or the messages
with one tag from one member to another. Its name is "0#1" for the group that torch names "0", in
the script's first world (#1: of its first init_process_group), and "0#1 2>3:7" for that group's
messages from rank 2 to 3 of the world with tag 7. Until a receive from any rank has got a message,
its channel is "0#1 7?" (tag 7), and no other call belongs to it. Then it gets the message's
channel, and the next number on that. Variables called `s` hold a `Situation`, a rank's state.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from .board import DISAGREES, IDLE, MESSAGES, RETURNED, SLOTS, STARTING, Board, Record, unfitting

ENDED = {RETURNED: "returned", IDLE: "idle", STARTING: "starting"}  # states without calls
INSIDE = "waiting", "polling"  # states of a rank that is inside a call
ON_STREAM = "its stream waiting"  # a GPU waits in a call, while the program may go on
FREE = "starting", "computing", "polling", ON_STREAM  # states of a rank that may still come
POLLS_S = 1.0  # a rank that last polled a call longer ago than this has moved on


@dataclass
class Situation:
    """The state of one rank at the moment of a `Look`: where it is, for which ranks it waits.

    call: the call in which it waits, which it polls, or in which it differs from another rank; None
        if it is in none.
    missing: the ranks for which it waits there, as numbers in the world; () if there are none.
    place: (file, line, function) of the user's line where it is, if known, perhaps with a fourth
        entry, the line of a framework that this line called, as "file:line:function", or "".
    lost: if `call` is a message, and the rank at its other end deleted the handle that its isend or
        irecv returned, without wait(), that rank's record of the message; otherwise None.
    more: the situations of its other threads that wait, if several do; this one is of one thread.
    has_free_thread: it waits, but not with all of its threads that make calls: one may go on.
    destroyed: {name of a group that it destroyed, such as "0#1": the line that did, like `place`}.
    state:
      starting: it hasn't joined the world yet.
      computing: it is in no call, as far as the board shows.
      polling: less than 1 s ago it asked, by `is_completed()`, whether `call` is complete.
      waiting: one of its threads waits for `call` to end, or ddpkit holds it in `call`, because
        another rank's call with the same number on that channel is a different one.
      its stream waiting: the GPU waits for `call`, while the program may go on. In a `Look` with
        standstill=True, for use when no rank has written for long, the state is "waiting" instead.
      returned: its function or script has ended. A rank that raised or was killed may have the
        state that it had before.
      idle: its cell of `%%ranks`, in a notebook, has ended.
    """

    rank: int
    state: str
    call: Record | None = None
    missing: tuple[int, ...] = ()
    place: tuple | None = None
    lost: Record | None = None
    more: list["Situation"] = field(default_factory=list)
    has_free_thread: bool = False
    destroyed: dict[str, tuple] = field(default_factory=dict)


class Look:
    """The state of all ranks, as the board shows it at one moment.

    now: a `Situation` for each rank, in a list: where it is, and for which ranks it waits.
    records: for each rank its last calls, at most 256, as a list of `Record`s, the oldest first.

    board: the open `Board` that is read.
    events: for each rank, how often it had written to the board (`board.events()`) when the caller
        last looked; None: the present counts. `is_still` compares these counts with later ones.
    standstill: True if the caller has seen that no rank has written for a long time. Then a rank
        whose GPU waits counts as waiting, though its program may go on. And a rank that has made a
        call is awaited in it if its GPU has an earlier open call of the group in its queue, since
        the GPU may never come to the later one. This isn't certain: NCCL may buffer a short
        message, so that its send ends without the receive, and the queue moves on.
    reached: for each rank, {channel: number of its last call there, from 0}, for a caller that
        knows more calls than the board holds; None: taken from `records`.
    """

    def __init__(
        self,
        board: Board,
        events: list[int] | None = None,
        standstill: bool = False,
        reached: list[dict[str, int]] | None = None,
    ):
        self.board = board
        self._events = board.events() if events is None else events
        self._standstill = standstill
        self.ranks = range(board.world_size)
        # A rank writes its call before its state; read the other way round, a state has its call.
        self._states = [board.state(rank) for rank in self.ranks]
        self.records = [board.records(rank) for rank in self.ranks]
        last = (dict(sorted(map(_channel_and_seq, records))) for records in self.records)
        self._reached = reached or list(last)
        self.now = [self._situation(rank) for rank in self.ranks]
        self._put_hopeless_waits_first()

    def is_still(self) -> bool:
        """Return whether no rank has written a call, a state or a destroyed group since `events`.

        If one has, the board may have changed while it was read, so that this look shows ranks at
        different moments. A rank that has begun to wait for a call or to poll it isn't noticed.
        """
        return self.board.events() == self._events

    # Where each rank is.

    def _situation(self, rank: int) -> Situation:
        """Return the `Situation` of `rank`: its state and, if it is in a call, that call.

        A rank is "waiting" if a thread of it waits in an open call. If several do, `call` is the
        main thread's or, if that doesn't wait, another's; `more` has a `Situation` for each of the
        rest. A rank is "waiting" as well if it has found that its last call differs from another
        rank's: ddpkit blocks it just before that call until the report ends all ranks. If no thread
        waits, the rank is "its stream waiting" ("waiting" at a standstill) in a call for which the
        GPU waits, or "polling" in an open call that the program polled less than 1 s ago. In no
        call, it is in one of the other states of a `Situation`.
        """
        state = self._states[rank]
        if state == DISAGREES:
            last = self.records[rank][-1]
            return Situation(rank, "waiting", last, (), last.place)
        if state in ENDED:
            return Situation(rank, ENDED[state])
        waits = list(self._waits(rank))
        if waits:
            first, *first.more = waits
            first.has_free_thread = self.board.threads(rank) > len(waits)
            return first
        on_stream = self._wait_on_stream(rank)
        if on_stream is not None:
            return on_stream
        call = self._polled(rank)
        if call is not None:
            return Situation(rank, "polling", call, self.missing(call, rank), call.place)
        return Situation(rank, "computing", place=self.board.place(rank))

    def _waits(self, rank: int) -> Iterator[Situation]:
        """Yield a `Situation` for each thread of `rank` that is waiting in a call not yet complete.

        Its field `call` is the call that holds the thread up: the one for which it waits or, on a
        GPU, perhaps an earlier one in the queue (see `_in_front`).
        """
        for index in self.board.waiting(rank):
            call = self.board.record(rank, index)
            if call is None or call.done is not None:
                continue
            call = self._in_front(call, rank)
            lost = self._lost(call)
            awaited = (call.peer,) if lost else self._awaited(call, rank)
            yield Situation(rank, "waiting", call, awaited, call.place, lost)

    def _wait_on_stream(self, rank: int) -> Situation | None:
        """Return the situation of a rank whose GPU waits for a call while its program goes on.

        On a GPU, wait() only queues a wait on a stream. CUDA events show for which open calls a
        stream has begun to wait; if there are none, return None. The result's `call` is one of
        these calls or an earlier one in their queue, if possible one in which other ranks are
        awaited. The state is "waiting" at a standstill, and "its stream waiting" otherwise.
        """
        held = [record for record in self.records[rank] if record.on_stream and record.waited]
        if not held:
            return None
        last_in_line = {group_of(record): record for record in held}.values()
        in_front = (self._in_front(record, rank) for record in last_in_line)
        call = next((record for record in in_front if self._awaited(record, rank)), held[0])
        state = "waiting" if self._standstill else ON_STREAM
        return Situation(rank, state, call, self._awaited(call, rank), call.place)

    def _polled(self, rank: int) -> Record | None:
        """Return the call that `rank` last polled, by `is_completed()`, and found open; or None.

        None also if that call is complete by now, or if the poll was over 1 s (`POLLS_S`) ago.
        """
        polled = self.board.polled(rank)
        if polled is None or not 0 <= time.perf_counter() - polled[1] < POLLS_S:
            return None
        call = self.board.record(rank, polled[0])
        return call if call is not None and call.done is None else None

    def _put_hopeless_waits_first(self) -> None:
        """Put into `now`, for each rank, a wait that can never end, if one of its threads has one.

        Of a rank's waits, one for each thread, `now` has one, whose field `more` has the others;
        `deadlocked` asks only that one whether it waits for ranks that are `gone`. If it doesn't,
        and one in `more` does, they change places. The latter then has all the others in `more`,
        and the fields about the whole rank: `destroyed`, and `has_free_thread` (a thread that makes
        calls isn't waiting). `destroyed` is read from the board first: a rank makes no more calls
        in the groups that it has destroyed, so a wait for it in one of these can't end.
        """
        for s in self.now:
            s.destroyed = self.board.destroyed(s.rank)
        for s in list(self.now):
            waits = [s, *s.more]
            hopeless = next((wait for wait in waits if self.gone(wait)), s)
            if hopeless is not s:
                hopeless.more = [wait for wait in waits if wait is not hopeless]
                s.more = []  # it is one of those in `more` now
                hopeless.destroyed = s.destroyed
                hopeless.has_free_thread = s.has_free_thread
                self.now[s.rank] = hopeless

    # Ranks that are missing from a call.

    def missing(self, call: Record, rank: int) -> tuple[int, ...]:
        """Return the ranks that belong to `call` but haven't made it yet, as numbers in the world.

        They are members of its group or, for a message, its other end. For a receive from any rank
        that has no message yet, they are all other members, or () once a message that it can take
        is on its way; until the receive has got this, its rank is missing from the message's send.
        Calls are known from each rank's last 256, or from `reached` (see `Look`). A rank with none
        of these on the channel of `call` counts as missing, even if it made `call` long ago.
        call: the record of a call that `rank` has made.
        """
        others = tuple(other for other in call.ranks if other != rank)
        if call.channel.endswith("?"):  # from any rank
            return () if self._is_coming(call, rank) else others
        return tuple(r for r in others if self._reached[r].get(call.channel, -1) < call.seq)

    def _is_coming(self, call: Record, rank: int) -> bool:
        """Return whether a message is on its way that `call`, a receive from any rank, can take.

        Such a message was sent to `rank`, which made `call`, in that call's group and with its tag;
        the send may be complete. No other receive of `rank` may have claimed the message. A receive
        that names the sender claims it when it is made, one from any rank only on getting it.
        """
        tag = call.channel.rpartition(" ")[2].removesuffix("?")
        for sender in call.ranks:
            for sent in self.records[sender]:
                fits = sent.op == "send" and sent.peer == rank and group_of(sent) == group_of(call)
                is_new = self._reached[rank].get(sent.channel, -1) < sent.seq
                if fits and is_new and sent.channel.endswith(f":{tag}"):
                    return True
        return False

    def _awaited(self, call: Record, rank: int) -> tuple[int, ...]:
        """Return the other ranks for which `rank` waits in `call`, a call that it has made.

        These are the members that haven't made it yet. For a receive from any rank they are all
        other members, of which one suffices, or () once a message that it can take is on its way.
        At a standstill (see `Look`) a member that has made the call is awaited as well if its GPU
        has an earlier open call of the group in its queue. The messages of one batch_isend_irecv
        don't count as earlier than each other.
        """
        missing = self.missing(call, rank)
        if not self._standstill:
            return missing
        others = (other for other in call.ranks if other != rank)
        return tuple(r for r in others if r in missing or self._is_behind(call, r))

    def _in_front(self, call: Record, rank: int) -> Record:
        """Return the call that holds up `call` of `rank`: itself, or one before it on the GPU.

        On the CPU, return `call`. A GPU carries out a group's calls in the order in which they were
        made, so an open call holds up those behind it. Return the first that some other rank hasn't
        made yet, since those that all have made will end; without one up to `call`, return `call`.
        At a standstill (see `Look`) no call can be trusted to end: return the first open call. If a
        batch (of batch_isend_irecv) begins with it, any message of the batch may hold up the queue:
        return the first in which `rank` waits for another rank or, without one, the batch's first.
        """
        line = [record for record in self._line(call, rank) if record.issued <= call.issued]
        if self._standstill and line:
            line = _front(line)
            call = line[0]
        return next((record for record in line if self._awaited(record, rank)), call)

    def _line(self, call: Record, rank: int) -> list[Record]:
        """Return the open GPU calls of `rank` in the group of `call`, in the order of their queue.

        `call` may be another rank's record. Collectives and messages share that queue. An open call
        counts as on a GPU if it has no start time: on a GPU, the start is noted only after the end,
        so even the call that is running has none. On the CPU a call has one at once, so the list is
        empty. NCCL's calls in a flight recorder's file have none.
        """
        open_calls = (record for record in self.records[rank] if record.on_stream)
        return [record for record in open_calls if group_of(record) == group_of(call)]

    def _is_behind(self, call: Record, rank: int) -> bool:
        """Return whether `rank` has made `call`, but its GPU has an earlier open call of the group.

        Messages of one batch (of batch_isend_irecv) don't count as earlier than each other.
        call: another rank's record of it, or of the message's other end. False if `rank` hasn't
        made it, or on the CPU.
        """
        line = self._line(call, rank)
        behind = line[len(_front(line)) :]
        return _channel_and_seq(call) in map(_channel_and_seq, behind)

    def _lost(self, call: Record) -> Record | None:
        """Return the other end's record of a message if that end deleted its handle without wait().

        The handle is what isend or irecv returns; without it, the message may never be delivered.
        Otherwise return None, also if the other end hasn't made its call, if `call` is no message,
        or if it is a receive from any rank that has no message yet. call: this end's record.
        """
        if call.op not in MESSAGES or call.peer is None:
            return None
        for record in self.records[call.peer]:
            if (record.channel, record.seq) == (call.channel, call.seq) and record.dropped:
                return record
        return None

    # Ranks that can never go on.

    def gone(self, s: Situation) -> list[int]:
        """Return the ranks for which `s` waits in vain, since they will never come to its call.

        They have ended their function ("returned") or notebook cell ("idle": the next begins only
        once all ranks have ended this one), or destroyed the call's group. A receive from any rank
        needs only one sender: for it the result is [] until all are gone.
        """
        if s.call is None:
            return []
        never = [rank for rank in s.missing if self._is_gone(rank, s.call)]
        if s.call.channel.endswith("?") and len(never) < len(s.missing):
            return []
        return never

    def _is_gone(self, rank: int, call: Record) -> bool:
        """Return whether `rank`, yet to make `call`, has ended or destroyed the call's group."""
        s = self.now[rank]
        return s.state in ("returned", "idle") or group_of(call) in s.destroyed

    def deadlocked(self, states: tuple[str, ...] = ("waiting",)) -> list[int]:
        """Return the ranks, sorted, that can never go on, wholly or with one thread or GPU stream.

        states: the states (see `Situation`) that count as waiting in a call: ("waiting",), or also
            "polling", in which the program asks again and again whether a call is complete.
        A rank is gone if it is "returned" or "idle", or has destroyed the call's group.
        A rank is free if it may still make calls: it starts, computes or (by default) polls, only
        its GPU's stream waits (unless at a standstill), or one of its threads is in no call. Also
        free is a waiting rank with a thread that waits for no rank, or for free ranks only that
        aren't gone (in a receive from any rank, one is enough). Ranks that wait in a cycle aren't
        free. Returned are the waiting ranks that aren't free, and free ranks that are stuck in
        part: one thread waits for gone ranks, or the GPU's stream waits for ranks that are gone or
        not free. The rest of such a rank may go on, so ranks that wait only for it aren't returned.
        A thread of a free rank may also wait for a rank that is stuck, but not gone: then only the
        stuck rank is returned, since the report is about that.
        """
        on_stream = [s for s in self.now if s.state == ON_STREAM]
        waiting = [s for s in self.now if s.state in states]
        free = {s.rank for s in self.now if s.state in set(FREE).difference(states)}
        free |= {s.rank for s in waiting if s.has_free_thread}
        for _ in waiting:  # each round frees at least one rank, or none can be freed any more
            before = len(free)
            for s in waiting:
                if any(self._may_go_on(wait, free) for wait in (s, *s.more)):
                    free.add(s.rank)
            if len(free) == before:
                break
        stuck = [s.rank for s in waiting if s.rank not in free or self.gone(s)]
        return sorted(stuck + [s.rank for s in on_stream if not self._may_go_on(s, free)])

    def _may_go_on(self, s: Situation, free: set[int]) -> bool:
        """Return whether the wait of `s` can end, supposing that only ranks in `free` make calls.

        It can if all ranks for which `s` waits are in `free`, and none of them has ended or
        destroyed the group. A receive from any rank needs just one such rank, or a message on its
        way.
        """
        if self.gone(s):
            return False
        if s.call.channel.endswith("?"):  # from any rank: one that comes is enough
            may_come = [rank for rank in s.missing if not self._is_gone(rank, s.call)]
            return not s.missing or not free.isdisjoint(may_come)
        return free.issuperset(s.missing)

    def polled_in_vain(self) -> list[int]:
        """Return the ranks that can never go on, supposing that ranks in state "polling" wait.

        A rank is "polling" if it asked less than 1 s ago, by `is_completed()`, whether a call is
        complete. The result includes all of `deadlocked()`, but is [] if no rank polls. It isn't
        certain: a loop that polls may have an end of its own, such as a time limit.
        """
        if all(s.state != "polling" for s in self.now):
            return []
        return self.deadlocked(INSIDE)

    # Waits that leave no mark.

    def unseen(self) -> Iterator[Situation]:
        """Yield a `Situation` for each collective in which a rank may be waiting unseen.

        DistributedDataParallel waits for a call's future (`get_future()`) in C++. The board doesn't
        show such a wait, so the rank seems to compute. Any open collective of the rank may be the
        one for which it waits, if its future was taken and another member hasn't made it yet. Each
        such collective gives a `Situation`, as if the rank waited in it.
        """
        for s in self.now:
            for call in self.records[s.rank] if s.state == "computing" else ():
                if call.op in MESSAGES or call.done is not None or not call.by_future:
                    continue
                if missing := self.missing(call, s.rank):
                    destroyed = {"destroyed": s.destroyed}
                    yield Situation(s.rank, "waiting", call, missing, call.place, **destroyed)

    def abandoned(self) -> list[Situation]:
        """Return a `Situation` for each rank that may wait in C++ for a member that never comes.

        Such a wait, as of DistributedDataParallel, doesn't show on the board, so the rank seems to
        compute. The sign is an open collective whose future (`get_future()`) was taken, and which
        another member will never make, since that member has ended or destroyed the group. The
        `Situation` has this collective as `call`, the first if there are several. Ranks that the
        board shows as waiting aren't included. The list is sorted by `rank`, [] if there is none.
        """
        found = {s.rank: s for s in reversed([*self.unseen()]) if self.gone(s)}
        return [found[rank] for rank in sorted(found)]

    def show_abandoned(self, sleeps: Callable[[int], bool]) -> None:
        """Change `now` of ranks that seem to compute, but wait in C++ for ranks that are gone.

        Such a rank, one of `abandoned()`, has made a collective call that another member will never
        make. It counts as waiting if it sleeps, and in any case if the call is on a GPU: there a
        wait in C++ code, such as DistributedDataParallel's, uses the CPU.
        sleeps(rank): whether the rank's process uses no CPU.
        """
        for hidden in self.abandoned():
            if hidden.call.on_stream or sleeps(hidden.rank):
                self.now[hidden.rank] = hidden

    # Whether the ranks agree.

    def mismatch(self) -> dict[int, Record] | None:
        """Return the call in which ranks differ: {rank: its record} of all that made it, or None.

        Calls that have the same number on the same channel should be the same. If several such
        calls differ, it is the one that any rank made earliest. Collectives are compared by
        operation, dtype, root, reduction and number of elements. The number isn't compared where
        ranks may bring different ones, as in an all_to_all and, on NCCL, an all_gather or gather.
        An all_to_all also differs if a rank sends more or fewer elements to another than that one
        expects. Messages are compared by dtype and number of elements. Not compared are a new_group
        and a receive from any rank, even once it has its message.
        """
        said: dict[tuple[str, int], dict[int, Record]] = {}
        for rank in self.ranks:
            for record in self.records[rank]:
                if record.fingerprint:
                    said.setdefault(_channel_and_seq(record), {})[rank] = record
        different = []
        for by_rank in said.values():
            alike = len({record.fingerprint for record in by_rank.values()}) == 1
            if not alike or unfitting(by_rank):
                different.append(by_rank)
        return min(different, key=_first_issue, default=None)

    def crossed_groups(self) -> dict[tuple[int, ...], list[int]]:
        """Return the groups that ranks made under the same number although their members differ.

        Each rank numbers the groups that it makes, and members of a group find each other's
        addresses under the group's number. If ranks 0 and 1 make [0, 1] first, but rank 2 [0, 2],
        neither group may ever connect. Then return {(0, 1): [0, 1], (0, 2): [2]}: for each group
        its members, and the ranks that made it. Only the first such number counts; {}: none.
        """
        made: dict[tuple[str, int], dict[tuple[int, ...], list[int]]] = {}
        for rank in self.ranks:
            for record in self.records[rank]:
                if record.op == "new_group":
                    groups = made.setdefault(_channel_and_seq(record), {})
                    groups.setdefault(record.ranks, []).append(rank)
        return next((groups for groups in made.values() if len(groups) > 1), {})

    def in_step(self) -> bool:
        """Return whether all ranks wait for the next notebook cell, and can run it.

        They can if, on each channel, all of its ranks have made the same number of calls: no rank
        has left out a collective, and no message awaits its receive. Without `reached`, only the
        last 256 calls of a rank are known. If it has made more, but none of these on a channel, it
        counts as in step.
        """
        if any(s.state != "idle" for s in self.now):
            return False
        forgetful = {rank for rank in self.ranks if self.board.calls(rank) > SLOTS}
        for rank in self.ranks:
            for record in self.records[rank]:
                lacking = self.missing(record, rank)
                if lacking and record.channel.endswith("?"):  # no other call is on that channel
                    return False
                for other in lacking:
                    if record.channel in self._reached[other] or other not in forgetful:
                        return False
        return True


def group_of(call: Record) -> str:
    """Return the name of a call's group, such as "0#1"; for the making of any group, "new"."""
    return call.channel.partition(" ")[0]


def _front(line: list[Record]) -> list[Record]:
    """Return the calls at the head of a GPU's queue, which can run now: the first, with its batch.

    line: the queue's calls in order, or []. A batch is what one batch_isend_irecv starts together.
    """
    rest = itertools.takewhile(lambda record: record.batched, line[1:])
    return [*line[:1], *rest]


def _channel_and_seq(record: Record) -> tuple[str, int]:
    """Return the (channel, number on it) of a call, the same for all calls that belong together."""
    return record.channel, record.seq


def _first_issue(by_rank: dict[int, Record]) -> float:
    """Return when the first rank made a call, in seconds. by_rank: {rank: its record of it}."""
    return min(record.issued for record in by_rank.values())
