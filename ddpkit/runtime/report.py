"""Explain why ranks make no progress: what happened, where each rank is, and what to do."""

import re
import time
from collections import Counter
from collections.abc import Sequence

from ..tools.units import MANY_RANKS, name_ranks, name_some
from .board import MESSAGES, Record, unfitting
from .columns import last_calls
from .look import INSIDE, Look, Situation, group_of
from .place import describe_place

MANY_CALLS = 1000
PATIENCE_S = 60.0  # the longest timeout of the script's own that may still end a wait
COUNT_THEM = (
    "Every send needs a recv on the other rank, and every recv a send. Count them on both sides."
)


# Mismatches.


def explain_mismatch(by_rank: dict[int, Record]) -> tuple[str, str]:
    """Return (what happened, what to do) for ranks whose calls differ: {rank: its record}."""
    if pairs := unfitting(by_rank):
        return _explain_splits(by_rank, pairs)
    ranks_by_call: dict[str, list[int]] = {}
    for rank, record in sorted(by_rank.items()):
        ranks_by_call.setdefault(record.call, []).append(rank)
    members = next(iter(by_rank.values())).ranks
    world_size = len(members) if members == tuple(range(len(members))) else 0
    sides = [f"{name_some(r, world_size)} called {call}" for call, r in ranks_by_call.items()]
    said = f"mismatch: {', '.join(sides[:-1])}, but {sides[-1]}."
    return said, _how_to_agree(list(by_rank.values()))


def _explain_splits(by_rank: dict[int, Record], pairs: list[tuple[int, int]]) -> tuple[str, str]:
    """Return (what happened, what to do) for an all_to_all whose splits disagree.

    pairs: each (sender, receiver) that disagrees. The rank in most of them is named first: if one
    rank is at fault, it is in all.
    """
    in_pairs = Counter(rank for pair in pairs for rank in pair)
    odd, times = in_pairs.most_common(1)[0]
    said = []
    for sender, receiver in sorted(pairs, key=lambda pair: (odd not in pair, pair)):
        ranks = by_rank[sender].ranks
        sent = by_rank[sender].splits[0][ranks.index(receiver)]
        expected = by_rank[receiver].splits[1][ranks.index(sender)]
        elements = "" if said else " elements"
        whose = f"rank {sender} sends {sent}{elements} to rank {receiver}"
        said.append(f"{whose}, which expects {expected}")
    advice = "What a rank sends to another must be as long as that one expects it."
    if times == len(pairs) > 1:
        advice += f" Rank {odd} is in all of these pairs: look at its splits first."
    headline = f"mismatch: the splits of all_to_all disagree: {'; '.join(said)}."
    return headline, f"{advice} Have you exchanged the counts first?"


def _how_to_agree(records: list[Record]) -> str:
    if len({record.op for record in records if record.op not in MESSAGES}) > 1:
        alike = "Every rank must make the same collective calls in the same order."
        return f"{alike} Is one of them under an `if`?"
    if len({record.dtype for record in records}) > 1:
        return "Both sides must use the same dtype; the bytes would be read as other numbers."
    sizes = {record.bytes for record in records}
    if records[0].op in MESSAGES:
        same = "Both sides must name the same number of elements."
        return f"{same} Did one side skip a message?" if _far_apart(sizes) else same
    if len(sizes) > 1:
        if len({record.place for record in records}) > 1 or _far_apart(sizes):
            skipped = (
                "These look like two different calls: one rank skipped a call, or made one more."
            )
            return f"{skipped} Is one of them under an `if`, or did one loop end early?"
        alike = "Every rank must bring the same number of elements."
        return f"{alike} Did the last batch shrink on one rank?"
    return "Every rank must name the same root and the same operation."


def _far_apart(sizes: set[int]) -> bool:
    """Tell whether sizes differ by more than the last batch, if it is smaller, would explain."""
    return max(sizes) > 2 * min(sizes)


# Waits.


def explain_deadlock(look: Look, stuck: list[int]) -> tuple[str, str]:
    """Return (what happened, what to do) for the ranks in `stuck`, which can never go on."""
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
    """Tell whether a wait of the ranks in `stuck` will soon end by a timeout of the script's own.

    The script may catch that, so its ranks aren't ended by us.
    """
    for s in (look.now[rank] for rank in stuck):
        for wait in (s, *s.more):
            if wait.call.limit_s is not None and wait.call.limit_s <= PATIENCE_S:
                return True
    return False


def explain_timeout(look: Look, seconds: float) -> tuple[str, str]:
    """Return (what happened, what to do) for a wait that timed out after `seconds`."""
    if stuck := look.deadlocked() or look.polled_in_vain():
        return explain_deadlock(look, stuck)
    return explain_standstill(look, seconds)


def explain_silence(silent: list[int], seconds: float) -> tuple[str, str]:
    """Return (what happened, what to do) where a wait timed out and another machine is silent."""
    said = f"no progress for {seconds:.2g} s, and nothing is heard of {name_ranks(silent)}: "
    said += "the wire between the machines is cut, or theirs is down."
    advice = "Can the machines reach each other, and is the other one up? What is shown of "
    return said, advice + f"{name_ranks(silent)} is the last that came through."


def explain_standstill(look: Look, seconds: float) -> tuple[str, str]:
    """Return (what happened, what to do) for ranks that wait for ranks that may still come."""
    said = f"no progress for {seconds:.2g} s"
    waiting = [s for s in look.now if s.state in INSIDE and s.missing]
    awaited = {rank for s in waiting for rank in s.missing}
    absent = sorted(rank for rank in awaited if look.now[rank].state not in INSIDE)
    if not absent:
        return f"{said}, and every rank is inside a call.", "Which of these calls is one too many?"
    for_them = [s for s in waiting if not set(absent).isdisjoint(s.missing)]
    who = name_ranks([s.rank for s in for_them])
    wait = "waits" if len(for_them) == 1 else "wait"
    are = "isn't" if len(absent) == 1 else "aren't"
    calls = " and ".join(sorted({s.call.op for s in for_them}))
    said += f": {who} {wait} in {calls} for {name_ranks(absent)}, which {are} in a call."
    return said, f"Why does {name_ranks(absent[:1])} take so long at that line?"


def waited_s(record: Record | None, error: BaseException) -> float:
    """Return the seconds that a wait lasted before it timed out with `error`.

    record: the call, if known.
    """
    of_gloo = re.search(r"Timed out waiting (\d+)ms", str(error))  # it counts from the call on
    if of_gloo:
        return int(of_gloo[1]) / 1e3
    if record is None:
        return 0.0
    return time.perf_counter() - (record.waited or record.issued)


def _how_gone(s: Situation, look: Look) -> str:
    """Say why a rank that `s` waits for won't come: "returned", or "destroyed its group ..."."""
    other = look.now[look.gone(s)[0]]
    where = other.destroyed.get(group_of(s.call))
    if where is not None:
        return f"destroyed its group without that call ({describe_place(where)})"
    return "returned" if other.state == "returned" else "ended the cell"


def _circle(waiting: list[Situation]) -> list[Situation]:
    """Select, of the ranks that wait, those that wait for each other in a cycle.

    The rest wait for these, and would go on if the cycle were broken.
    """
    awaited = {s.rank: set(s.missing) for s in waiting}
    before = -1
    found = 0
    while before != found:  # each round follows the waits one rank further
        for ranks in awaited.values():
            ranks.update(*map(awaited.get, ranks))
        before, found = found, sum(map(len, awaited.values()))
    circle = []
    for s in waiting:
        if all(s.rank in awaited[rank] for rank in awaited[s.rank]):
            circle.append(s)
    return circle


def _skipped(circle: list[Situation], look: Look) -> tuple[Record, int, Record] | None:
    """Find the call that a rank in a cycle of waits seems to have left out.

    Returns (the call that another rank waits in, the rank that left it out, the call that this rank
    made there the time before). The evidence is its history: when it last made the same calls from
    the same lines, that one came next. None: no evidence.
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
    """Predict the next call from history: the one that followed when the calls were last alike.

    Of several places with calls like the last ones, the longest such run counts.
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
    found = _skipped(circle, look)
    if found is None:
        return None
    _, rank, before = found
    said = f"Rank {rank} seems to have skipped the {before.op} that it made before"
    why = "Is it under an `if`, or did one loop end early?"
    why += f" {COUNT_THEM}" if before.op in MESSAGES else ""
    return f"{said} ({describe_place(before.place)}). {why}"


def _others(s: Situation, look: Look, ranks: Sequence[int] | None = None) -> str:
    """Name the ranks that `s` waits for, or `ranks` instead; "all others" if these are many."""
    ranks = s.missing if ranks is None else ranks
    everybody_else = len(look.ranks) - 1
    if len(ranks) > MANY_RANKS and len(set(ranks) - {s.rank}) == everybody_else:
        return "all others"
    return name_some(ranks, len(look.ranks))


def _way_out(stuck: list[Situation], gone: bool) -> str:
    """Choose the advice for a deadlock by the operations in which ranks wait.

    stuck: the ranks in the cycle, or, if `gone`, those that wait for ranks that have ended.
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
    if any((s.call.peer, s.rank) in sends for s in stuck if s.call.op == "recv"):
        return "Their tags, or groups, differ: a receive takes only what was sent with its own."
    if ops.issubset(MESSAGES):
        if any(s.call.on_stream for s in stuck):
            in_line = "On NCCL, a group's messages go one after the other"
            return f"{in_line}: start them together, with dist.batch_isend_irecv."
        return "Let one side receive first, or start both with isend and irecv and wait afterwards."
    return (
        "All ranks must use their groups in the same order, and leave no call out. "
        "Is one of them under an `if`?"
    )


def let_go(look: Look) -> str | None:
    """Say which open message has lost its handle, and on which line; None: none has.

    It may hold up all later messages.
    """
    for rank in look.ranks:
        for record in look.records[rank]:
            if record.dropped and record.done is None:
                return _let_go(rank, record)
    return None


def _let_go(rank: int, message: Record) -> str:
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
    """Put a report together: headline, where ranks are, a table of their last calls, advice.

    stuck: a rank that lacks a call will never make it; otherwise it may only be late. ranks: those
    to show; None: all.
    """
    ranks = look.ranks if ranks is None else ranks
    ranks_by_place: dict[str, list[int]] = {}
    for rank in ranks:
        ranks_by_place.setdefault(_where(look.now[rank], look), []).append(rank)
    places = [f"{name_some(r, len(look.ranks))}: {place}" for place, r in ranks_by_place.items()]
    calls = last_calls(look, ranks, _guilty(look, ranks), stuck)
    return "\n".join([headline, "", *places, "", *calls, *_loops(look), "", advice])


def _where(s: Situation, look: Look) -> str:
    """Write a rank's state, call and line: "waiting in barrier()", " step, line 3: ..."."""
    state = "waiting, by is_completed()," if s.state == "polling" else s.state
    missing = f" for {_others(s, look)}" if s.missing else ""
    call = f" in {s.call.call}" if s.call else ""
    lines = [f"{state}{missing}{call}"]
    if s.place:
        lines.append(f"  {describe_place(s.place)}")
    via = s.call.via if s.call else (*(s.place or ()), "", "", "", "")[3]
    if via:
        file, line, function = via.rsplit(":", 2)
        lines.append(f"  by way of {describe_place((file, int(line), function))}")
    for other in s.more:
        lines.append(f"  another thread: {_where(other, look)}")
    return "\n".join(lines)


def _guilty(look: Look, ranks: Sequence[int]) -> Record | None:
    """Find the call to blame: where ranks differ, or in which one waits for a rank that doesn't.

    If all wait in a cycle it is the call that was left out, if that is known; otherwise None.
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
    """Warn of ranks that may loop for ever: many calls, the last of them all alike; [] if none."""
    found = []
    for rank in look.ranks:
        made = look.board.calls(rank)
        calls = {record.call for record in look.records[rank]}
        if len(calls) == 1 and made >= MANY_CALLS:
            many = f"Rank {rank} has made {made:,} calls, the last of them all alike"
            found.append(f"{many}: a loop that doesn't end?")
    return found
