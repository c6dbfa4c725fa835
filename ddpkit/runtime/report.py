"""Explain why ranks make no progress: what happened, where each rank is, and what to do.

A call is a collective call, a send or a receive. A `Look` is the state of all ranks at one moment,
as they have written it on the board, a file that they share. For each rank it has the last calls,
and a `Situation` (often `s`): whether the rank waits, in which call, and for which ranks. A message
is a send or a receive; its handle is what isend or irecv returns. The explain_* functions return
(headline, advice), two texts that `report` puts around what it says of the ranks.
"""

import linecache
import math
import re
import time
from collections import Counter
from collections.abc import Sequence

from ..tools.units import MANY_RANKS, name_ranks, name_some
from .board import MESSAGES, Record, unfitting
from .columns import last_calls
from .look import INSIDE, Look, Situation, group_of
from .place import describe_place
from .wording import UNEQUAL

MANY_CALLS = 1000  # of a rank: if they are all alike, it may be in a loop without end
PATIENCE_S = 60.0  # the longest timeout of the script's own that may still end a wait
COUNT_THEM = (
    "Every send needs a recv on the other rank, and every recv a send. Count them on both sides."
)


# Mismatches.


def explain_mismatch(by_rank: dict[int, Record]) -> tuple[str, str]:
    """Return (headline, advice) for a call in which ranks differ.

    by_rank: {rank: its record of the call}, as `Look.mismatch` returns it.
    The headline is like 'mismatch: rank 0 called all_reduce(8 float32, sum), but rank 1 called
    barrier().'
    """
    if sizes := unfitting(by_rank):
        return _explain_splits(sizes)
    ranks_by_call: dict[str, list[int]] = {}
    for rank, record in sorted(by_rank.items()):
        ranks_by_call.setdefault(record.call, []).append(rank)
    members = next(iter(by_rank.values())).ranks
    world_size = len(members) if members == tuple(range(len(members))) else 0
    sides = [f"{name_some(r, world_size)} called {call}" for call, r in ranks_by_call.items()]
    if len(sides) == 1:  # the others' records are overwritten
        sides.append("another rank called something else, over 250 calls ago")
    said = f"mismatch: {', '.join(sides[:-1])}, but {sides[-1]}."
    return said, _how_to_agree(list(by_rank.values()))


def _explain_splits(sizes: dict[tuple[int, int], tuple[int, int]]) -> tuple[str, str]:
    """Return (headline, advice) for an all_to_all whose splits (numbers of elements) disagree.

    sizes: the pairs that disagree, {(sender, receiver): (number of elements sent, number that the
        receiver expects)}. The headline begins with the pairs of the rank that is in most pairs. If
        there are several, and only that rank is in all, the advice is to look at its splits first.
    """
    in_pairs = Counter(rank for pair in sizes for rank in set(pair))
    odd, times = in_pairs.most_common(1)[0]
    said = []
    for sender, receiver in sorted(sizes, key=lambda pair: (odd not in pair, pair)):
        sent, expected = sizes[sender, receiver]
        elements = "" if said else " elements"
        whose = f"rank {sender} sends {sent}{elements} to rank {receiver}"
        said.append(f"{whose}, which expects {expected}")
    advice = "What a rank sends to another must be as long as that one expects it."
    others = [count for rank, count in in_pairs.items() if rank != odd]
    if times == len(sizes) > max(others, default=0) and len(sizes) > 1:
        advice += f" Rank {odd} is in all of these pairs: look at its splits first."
    headline = f"mismatch: the splits of all_to_all disagree: {'; '.join(said)}."
    return headline, f"{advice} Have you exchanged the counts first?"


def _how_to_agree(records: list[Record]) -> str:
    """Return the advice for a call in which ranks differ, chosen by what differs.

    records: the records of the call, one of each rank. Compared are collectives (such as
        all_reduce), dtypes and sizes; the first difference decides. Without one, the advice is to
        name the same root and operation (such as sum).
    """
    if len({record.op for record in records if record.op not in MESSAGES}) > 1:
        alike = "Every rank must make the same collective calls in the same order."
        return f"{alike} Is one of them under an `if`?"
    skipped = "These look like two different calls: one rank skipped a call, or made one more."
    skipped += " Is one of them under an `if`, or did one loop end early?"
    other_shapes = len({record.shape for record in records}) > 1
    if len({record.dtype for record in records}) > 1:
        if other_shapes and records[0].op not in (*MESSAGES, *UNEQUAL):
            return skipped
        return "Both sides must use the same dtype; the bytes would be read as other numbers."
    # Of a scatter the root has all parts, the others one.
    sizes = {math.prod(r.shape) if r.op == "scatter" else r.bytes for r in records}
    if records[0].op in MESSAGES:
        same = "Both sides must name the same number of elements."
        return f"{same} Did one side skip a message?" if _far_apart(sizes) else same
    if len(sizes) > 1:
        if len({record.place for record in records}) > 1 or _far_apart(sizes):
            return skipped
        if any("object_list" in linecache.getline(r.file, r.line) for r in records):
            return "Every rank must pass a list of the same length."
        alike = "Every rank must bring the same number of elements."
        return f"{alike} Did the last batch shrink on one rank?"
    return "Every rank must name the same root and the same operation."


def _far_apart(sizes: set[int]) -> bool:
    """Return whether the largest of the sizes is more than twice the smallest.

    sizes: those of the ranks' tensors in what should be one call. So different, they are probably
        of two calls; a smaller difference may be due to a shorter last batch (a rule of thumb).
    """
    return max(sizes) > 2 * min(sizes)


# Waits.


def explain_deadlock(look: Look, stuck: list[int]) -> tuple[str, str]:
    """Return (headline, advice) for ranks that can never go on.

    look: the state of all ranks.
    stuck: these ranks, as `Look.deadlocked` returns them. Some wait for ranks that have ended or
        left the group, or for each other in a cycle; the rest wait for such a stuck rank.
    """
    waiting = [look.now[rank] for rank in stuck]
    hopeless = [s for s in waiting if look.gone(s)]
    if not hopeless:
        circle = _circle(waiting)
        chain = (f"rank {s.rank} for {_others(s, look)} in {s.call.op}" for s in circle)
        said = f"deadlock: each waits for another: {', '.join(chain)}."
        return said, _name_who_skipped(circle, look) or _way_out(circle, gone=False)
    never = sorted({rank for s in hopeless for rank in look.gone(s)})
    direct = [s.rank for s in hopeless]
    calls = sorted({s.call.op for s in hopeless})
    world_size = len(look.ranks)
    wait = "waits" if len(direct) == 1 else "wait"
    have = "has" if len(never) == 1 else "have"
    whom = name_some(never, world_size)
    if len(direct) == 1:
        whom = _others(hopeless[0], look, never)
    said = f"deadlock: {name_some(direct, world_size)} {wait} in {' and '.join(calls)}"
    said += f" for {whom}, which {have} {_how_gone(hopeless[0], look)}."
    return said, _way_out(hopeless, gone=True)


def ends_by_itself(look: Look, stuck: list[int]) -> bool:
    """Return whether a rank in `stuck` waits with a timeout of at most 60 s (`PATIENCE_S`) in all.

    Such a short one is the script's own, of a wait(), a monitored_barrier or the group. The script
    may catch the error that it raises and go on, so ddpkit doesn't end the ranks at once.
    """
    for s in (look.now[rank] for rank in stuck):
        for wait in (s, *s.more):
            if wait.call.limit_s is not None and wait.call.limit_s <= PATIENCE_S:
                return True
    return False


def explain_timeout(look: Look, seconds: float) -> tuple[str, str]:
    """Return (headline, advice) for a rank's wait in a call that timed out after `seconds`.

    If some ranks can never go on, the texts are those of `explain_deadlock`, otherwise those of
    `explain_standstill`, about ranks that may be late. A rank that polls a call by `is_completed()`
    counts as waiting in it if no deadlock is found without that.
    """
    if stuck := look.deadlocked() or look.polled_in_vain():
        return explain_deadlock(look, stuck)
    return explain_standstill(look, seconds)


def explain_silence(silent: list[int], seconds: float) -> tuple[str, str]:
    """Return (headline, advice) for a wait that timed out while other machines can't be reached.

    silent: the ranks there, in ascending order: those of which their machines sent no new state in
        the few seconds after the timeout. seconds: how long the wait lasted.
    """
    said = f"no progress for {seconds:.2g} s, and nothing is heard of {name_ranks(silent)}: "
    said += "the wire between the machines is cut, or theirs is down."
    advice = "Can the machines reach each other, and is the other one up? What is shown of "
    return said, advice + f"{name_ranks(silent)} is the last that came through."


def explain_standstill(look: Look, seconds: float) -> tuple[str, str]:
    """Return (headline, advice) if nothing has moved for long, though it isn't surely a deadlock.

    A rank is late if it is in no call while others wait for it. The headline names the late ranks
    and those that wait for them; the advice asks what keeps the first late rank at its line. If
    none is late, the headline names the ranks inside calls. The advice then is to wait for a
    message whose handle was deleted or, without one, asks which call is one too many. If no rank is
    inside a call, the headline says so, and the advice asks if all ranks made the same calls.
    look: the state of all ranks. seconds: how long nothing has moved.
    """
    said = f"no progress for {seconds:.2g} s"
    waiting = [s for s in look.now if s.state in INSIDE and s.missing]
    awaited = {rank for s in waiting for rank in s.missing}
    absent = sorted(rank for rank in awaited if look.now[rank].state not in INSIDE)
    if not absent:
        inside = [s.rank for s in look.now if s.state in INSIDE]
        if not inside:  # the wait that timed out was the last
            return f"{said}, and no rank is inside a call.", "Did all ranks make the same calls?"
        are = "is" if len(inside) in (1, len(look.now)) else "are"
        said += f", and {name_ranks(inside, len(look.now))} {are} inside a call."
        return said, let_go(look) or "Which of these calls is one too many?"
    for_them = [s for s in waiting if not set(absent).isdisjoint(s.missing)]
    who = name_ranks([s.rank for s in for_them])
    wait = "waits" if len(for_them) == 1 else "wait"
    are = "isn't" if len(absent) == 1 else "aren't"
    calls = " and ".join(sorted({s.call.op for s in for_them}))
    said += f": {who} {wait} in {calls} for {name_ranks(absent)}, which {are} in a call."
    return said, f"Why does {name_ranks(absent[:1])} take so long at that line?"


def waited_s(record: Record | None, error: BaseException) -> float:
    """Return the seconds that a wait lasted before it timed out with `error`; 0.0 if unknown.

    The figure in Gloo's message is taken, if there is one; otherwise the time from the beginning of
    the wait, or of the call if that of the wait isn't known, until now.
    record: the call in which the rank waited, or None if it isn't known.
    """
    of_gloo = re.search(r"Timed out waiting (\d+)ms", str(error))  # it counts from the call on
    if of_gloo:
        return int(of_gloo[1]) / 1e3
    if record is None:
        return 0.0
    return time.perf_counter() - (record.waited or record.issued)


def _how_gone(s: Situation, look: Look) -> str:
    """Return in words why a rank will never make the call in which the rank of `s` waits.

    The text goes on from "rank 1, which has": 'returned' (from its function), 'ended the cell' (of
    a notebook), or 'destroyed its group without that call (train.py:12: ...)'. It is about the
    first of the ranks that can't come any more, `look.gone(s)`; there must be one.
    """
    other = look.now[look.gone(s)[0]]
    where = other.destroyed.get(group_of(s.call))
    if where is not None:
        return f"destroyed its group without that call ({describe_place(where)})"
    return "returned" if other.state == "returned" else "ended the cell"


def _circle(waiting: list[Situation]) -> list[Situation]:
    """Return those of the waiting ranks that wait for each other in a cycle, in the given order.

    If 0 and 1 wait for each other and 2 for 0, these are ranks 0 and 1. Rank 2 isn't in the cycle,
    and may go on once that is broken. Cycles that share a rank count as one. A cycle is left out if
    one of its ranks also waits for a rank in `waiting` outside of it: to break the cycle wouldn't
    free its ranks. The ranks of all other cycles are returned in one list; [] without any.
    waiting: a `Situation` for each rank that waits. Waits for other ranks are ignored.
    """
    ranks_waiting = {s.rank for s in waiting}  # a missing rank may still compute
    awaited = {s.rank: ranks_waiting.intersection(s.missing) for s in waiting}
    before = -1
    found = 0
    while before != found:  # each round follows the waits one rank further
        for ranks in awaited.values():
            ranks.update(*map(awaited.get, ranks))
        before, found = found, sum(map(len, awaited.values()))
    circle = []
    for s in waiting:
        if awaited[s.rank] and all(s.rank in awaited[rank] for rank in awaited[s.rank]):
            circle.append(s)
    return circle


def _skipped(circle: list[Situation], look: Look) -> tuple[Record, int, Record] | None:
    """Return the call that a rank in a cycle of waits seems to have left out, and the evidence.

    circle: the `Situation` of each rank in the cycle, each waiting for others of them.
    Return (call, rank, evidence), or None if there is no evidence. In `call` another rank waits for
    `rank`, which is in a call on another channel (a group, or the messages with one tag from one
    rank to another). Just before, `rank` repeated one or more of its earlier calls, on the same
    channels and from the same lines. The call that had followed these, on the channel of `call`, is
    `evidence`. For example, rank 1 called in groups A, B, A, and waits in C for rank 0, which waits
    in B for rank 1. Rank 1's first A was followed by B: the evidence that it left out B after the
    second. Rank 0's calls, A, B, A and now B, say nothing of C: it isn't blamed.
    """
    for s in circle:
        for rank in s.missing:
            other = look.now[rank].call
            before = [r for r in look.records[rank] if other and r.issued < other.issued]
            expected = _what_came_next(before)
            if expected and expected.channel == s.call.channel != other.channel:
                return s.call, rank, expected
    return None


def _what_came_next(records: list[Record]) -> Record | None:
    """Return the call that a rank would make next if it repeated itself, or None if unknown.

    Two calls match if they were made on the same channel (group; for messages also ranks and tag)
    and from the same line. Of all earlier sequences that match the end of `records`, call by call,
    the longest counts, of equally long ones the latest; a single call is enough. The result is the
    call that followed it; None: no earlier call matches the last one.
    records: the rank's last calls, the oldest first.
    """
    said = [(record.channel, record.place) for record in records]
    longest = 0
    following = None
    for end in range(1, len(said)):
        alike = 0
        while alike < end and said[end - 1 - alike] == said[-1 - alike]:
            alike += 1
        if alike and alike >= longest:
            longest = alike
            following = records[end]
    return following


def _name_who_skipped(circle: list[Situation], look: Look) -> str | None:
    """Return advice that names the rank that seems to have skipped a call; None if none seems to.

    For example, a rank made calls in groups A, B, A, and is now in C, while another rank waits for
    it in B: as B followed the first A, the rank seems to have skipped the B after the second.
    circle: the `Situation` of each rank in a cycle, in which each waits for another.
    """
    found = _skipped(circle, look)
    if found is None:
        return None
    _, rank, before = found
    said = f"Rank {rank} seems to have skipped the {before.op} that it made before"
    why = "Is it under an `if`, or did one loop end early?"
    why += f" {COUNT_THEM}" if before.op in MESSAGES else ""
    return f"{said} ({describe_place(before.place)}). {why}"


def _others(s: Situation, look: Look, ranks: Sequence[int] | None = None) -> str:
    """Return the names of the ranks for which the rank of `s` waits: 'ranks 1 and 3'.

    The result is 'all others' for all other ranks of the world, if more than 3 (`MANY_RANKS`).
    ranks: name these instead, in the same way.
    """
    ranks = s.missing if ranks is None else ranks
    everybody_else = len(look.ranks) - 1
    if len(ranks) > MANY_RANKS and len(set(ranks) - {s.rank}) == everybody_else:
        return "all others"
    return name_some(ranks, len(look.ranks))


def _way_out(stuck: list[Situation], gone: bool) -> str:
    """Return the advice for a deadlock, which depends on the operations in which ranks wait.

    stuck: the situations of the ranks in the cycle, or, if `gone`, of those that wait for ranks
        that have ended or left the group. If one waits for a message, and the rank at the other end
        deleted its own handle without waiting (`Situation.lost`), the advice is about that handle.
    """
    lost = next((s for s in stuck if s.lost), None)
    if lost:
        return _let_go(lost.call.peer, lost.lost)
    ops = {s.call.op for s in stuck}
    if "new_group" in ops:
        return "Every rank must call dist.new_group, also those that are not in the group."
    if not ops.isdisjoint(MESSAGES) and (gone or not ops.issubset(MESSAGES)):
        return COUNT_THEM
    if gone:
        every = "Every rank of the group must make the call."
        return f"{every} Is it under an `if`, or did one loop end early?"
    sends = {(s.rank, s.call.peer) for s in stuck if s.call.op == "send"}
    sends |= {(None, dst) for _, dst in sends}  # for receives from any rank
    if any((s.call.peer, s.rank) in sends for s in stuck if s.call.op == "recv"):
        return "Their tags, or groups, differ: a receive takes only what was sent with its own."
    if ops == {"recv"}:
        return "Each waits for a message, and none that fits is on its way: let one send first."
    if ops.issubset(MESSAGES):
        if any(s.call.on_stream for s in stuck):
            in_line = "On NCCL, a group's messages go one after the other"
            return f"{in_line}: start them together, with dist.batch_isend_irecv."
        return "Let one side receive first, or start both with isend and irecv and wait afterwards."
    return (
        "All ranks must use their groups in the same order, and leave no call out. "
        "Is one of them under an `if`?"
    )


def crossed(look: Look) -> str | None:
    """Return sentences that say which ranks made different groups under the same number, or None.

    Each rank numbers the groups in the order in which it makes them, and the members of a group
    look up each other's addresses by its number. A rank that leaves out a group, even one that it
    isn't in, numbers later groups differently, and the members of these may never connect.
    """
    groups = look.crossed_groups()
    if not groups:
        return None
    said = []
    for members, ranks in groups.items():
        verb = "makes" if len(ranks) == 1 else "make"
        said.append(f"{name_ranks(ranks)} {verb} {list(members)}")
    counted = f"Each rank counts its groups, and under one number {', '.join(said)}"
    return f"{counted}. Every rank must make every group, in one order, also those it isn't in."


def let_go(look: Look) -> str | None:
    """Return sentences on the first incomplete message whose handle was deleted without a wait().

    They name the rank and the line of its isend or irecv. Without the handle the message may never
    be delivered, and may hold up all later ones. None: there is no such message.
    """
    for rank in look.ranks:
        for record in look.records[rank]:
            if record.dropped and record.done is None:
                return _let_go(rank, record)
    return None


def _let_go(rank: int, message: Record) -> str:
    """Return advice on a message that may not arrive: `rank` dropped the handle without wait()."""
    call, handle = ("isend", "send") if message.op == "send" else ("irecv", "receive")
    said = f"Rank {rank} began its {handle} with {call} and never waited for it"
    where = describe_place(message.place)
    return f"{said} ({where}). Keep what {call} returns, and call wait() on it."


# The whole report.


def report(
    headline: str,
    advice: str,
    look: Look,
    stuck: bool = True,
    ranks: Sequence[int] | None = None,
) -> str:
    """Return the whole report: headline, where the ranks are, a table of their last calls, advice.

    Below the table stands a warning for each rank that may be in an endless loop.
    headline: what happened. advice: what to do. If ranks made different process groups under one
        number, say as their third, sentences that explain this (`crossed`) replace the advice. If
        some ranks, not all, are in a call made in an `except` or `finally`, a sentence before it
        names the first of them.
    look: the state of all ranks.
    stuck: whether the table marks as a difference (≠) a call that only some ranks have made. True:
        the others will never make it. False: they may only be late.
    ranks: the ranks to show, None for all; the warnings are about all in any case.
    """
    ranks = look.ranks if ranks is None else ranks
    ranks_by_place: dict[str, list[int]] = {}
    for rank in ranks:
        ranks_by_place.setdefault(_where(look.now[rank], look), []).append(rank)
    places = [f"{name_some(r, len(look.ranks))}: {place}" for place, r in ranks_by_place.items()]
    calls = last_calls(look, ranks, _guilty(look, ranks), stuck)
    advice = crossed(look) or advice
    amid = next((s for s in look.now if s.call and s.call.amid), None)
    if amid and not all(s.call and s.call.amid for s in look.now):  # all may run in an `except`
        its = f"Rank {amid.rank} makes its call while it handles an exception"
        advice = f"{its}: look at that first. {advice}"
    return "\n".join([headline, "", *places, "", *calls, *_loops(look), "", advice])


def _where(s: Situation, look: Look) -> str:
    """Return in lines where a rank is: "waiting for rank 1 in barrier()", "  step, line 3: ...".

    The second line has the user's function, the number and the text of the line that the rank has
    reached. Further lines name the line of an installed framework, such as lightning, by which the
    call was made, and say where the rank's other threads wait.
    """
    state = "waiting, by is_completed()," if s.state == "polling" else s.state
    if state == "computing" and (unseen := _open_in_cpp(look, s.rank)):
        state = f"computing, or waiting in C++ in {unseen.call}"
    missing = f" for {_others(s, look)}" if s.missing else ""
    call = f" in {s.call.call}" if s.call else ""
    lines = [f"{state}{missing}{call}"]
    if s.place:
        lines.append(f"  {describe_place(s.place)}")
    if s.call and s.call.amid:
        lines.append(f"  while it handles {s.call.amid}")
    via = s.call.via if s.call else (*(s.place or ()), "", "", "", "")[3]
    if via:
        file, line, function = via.rsplit(":", 2)
        lines.append(f"  by way of {describe_place((file, int(line), function))}")
    for other in s.more:
        lines.append(f"  another thread: {_where(other, look)}")
    return "\n".join(lines)


def _open_in_cpp(look: Look, rank: int) -> Record | None:
    """Return the oldest incomplete call of `rank` whose `get_future()` was called, or None.

    C++ code, such as DDP's, may wait for that future, while the board shows the rank as computing.
    """
    return next((r for r in look.records[rank] if r.by_future and r.done is None), None)


def _guilty(look: Look, ranks: Sequence[int]) -> Record | None:
    """Return one rank's record of the call to blame for the hang of `ranks`; None if unknown.

    The report's table shows the calls of the same group, or from the same sender to its receiver.
    The call is that in which ranks differ, say in size, if there is one. Otherwise it is the
    earliest in which a rank waits for a rank that doesn't wait itself. If all wait for each other,
    it is a call that one of them seems to have left out. For example, rank 1 called in groups A, B,
    A, and waits in C for rank 0, which waits in its second call in B. Rank 1's first A was followed
    by B, so it seems to have left out B after its second: rank 0's record of that B is returned.
    """
    different = look.mismatch()
    if different:
        return next(iter(different.values()))
    waiting = [look.now[rank] for rank in ranks if look.now[rank].missing]
    wait = {s.rank for s in waiting}
    ends = [s.call for s in waiting if not wait.issuperset(s.missing)]
    if waiting and not ends:
        skipped = _skipped(_circle(waiting), look)
        return skipped and skipped[0]
    return min(ends, key=lambda call: call.issued, default=None)


def _loops(look: Look) -> list[str]:
    """Return a warning for each rank that may be in a loop without end; [] if there is none.

    Such a rank has made at least 1,000 calls (`MANY_CALLS`), and those still on the board, the last
    256, all have the same operation and arguments.
    """
    found = []
    for rank in look.ranks:
        made = look.board.calls(rank)
        calls = {record.call for record in look.records[rank]}
        if len(calls) == 1 and made >= MANY_CALLS:
            many = f"Rank {rank} has made {made:,} calls, the last of them all alike"
            found.append(f"{many}: a loop that doesn't end?")
    return found
