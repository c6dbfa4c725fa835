"""Run a schedule without a process: would it hang, who would be idle, what would be held?

A rank does its actions in order. A forward needs the output of the stage before, a backward (or its
input part) the forward and the gradient from the stage after, a weight part the input part. That is
all it takes to find what is wrong with a schedule; `ddpkit.schedules` has the notation.

PyTorch's counterparts are private: `_validate_schedule`, `_simulate_comms_compute` and
`_add_send_recv` in `torch.distributed.pipelining.schedules`. Notebook 10.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import chain

from .schedules import Schedule, parse


def rank_of_stage(schedule: Schedule) -> dict[int, int]:
    """{stage: the rank that has it}. ValueError: two have it; actions aren't in lists."""
    ranks: dict[int, int] = {}
    for rank, actions in enumerate(schedule):
        if isinstance(actions, str):
            raise ValueError(f"expected a list of actions for each rank, got {actions!r} for one")
        for action in actions:
            stage = parse(action)[0]
            if ranks.setdefault(stage, rank) != rank:
                both = f"rank {rank} does {action}, but stage {stage} is on rank {ranks[stage]}"
                raise ValueError(f"{both}: a stage's weights are on one rank, which does all of it")
    return ranks


def validate(schedule: Schedule) -> None:
    """ValueError, in words, unless every rank can do its actions, in order, to the end.

    Every stage needs a forward of every micro-batch and a backward, whole or in both parts, each
    once; what an action needs must be done before; and no ranks may wait for each other.
    """
    ranks = rank_of_stage(schedule)
    times = Counter(all_actions(schedule))
    stages, micro_batches = max(ranks, default=0) + 1, 1
    for action, number in times.items():
        stage, _, micro_batch = parse(action)
        micro_batches = max(micro_batches, micro_batch + 1)
        if number > 1:
            got = f"rank {ranks[stage]} does {action} {number} times, expected once"
            raise ValueError(f"{got}: take the others out")
    for stage in range(stages):
        for micro_batch in range(micro_batches):
            found = [f"{stage}{kind}{micro_batch}" for kind in "FBIW"]
            found = [action for action in found if action in times]
            if "".join(parse(action)[1] for action in found) not in ("FB", "FIW"):
                got = f"got {' and '.join(found) or 'nothing'} of stage {stage}"
                expected = f"{stage}F{micro_batch} and its backward, whole (B) or in parts (I, W)"
                raise ValueError(f"{got}, micro-batch {micro_batch}: expected {expected}")
    done = {action for _, action in in_turn(schedule)}
    if len(done) < len(times):
        raise ValueError(f"this would hang: {cycle(schedule, done)}")


def needs(action: str, actions: set[str]) -> list[str]:
    """What must be done before an action: on its own stage, and on a stage next to it.

    actions: all of the schedule's; of B and I, the one that it has.
    """
    stage, kind, micro_batch = parse(action)
    if kind == "F":
        before = [f"{stage - 1}F{micro_batch}"]
    elif kind == "W":
        before = [f"{stage}I{micro_batch}"]
    else:
        after = stage + 1
        before = [f"{stage}F{micro_batch}", f"{after}B{micro_batch}", f"{after}I{micro_batch}"]
    return [each for each in before if each in actions]


def all_actions(schedule: Schedule) -> list[str]:
    return [str(action) for action in chain.from_iterable(schedule)]


def in_turn(schedule: Schedule) -> Iterator[tuple[int, str]]:
    """(rank, action) in an order in which all can be done, a rank after the other, one each.

    Ends early where every rank waits for another.
    """
    left = [list(map(str, actions)) for actions in schedule]
    everything, done = set(all_actions(schedule)), set()
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(left):
            if actions and done.issuperset(needs(actions[0], everything)):
                moved = True
                done.add(actions[0])
                yield rank, actions.pop(0)


def messages(schedule: Schedule) -> Schedule:
    """The schedule with what each rank sends and receives, in PyTorch's words, as "0SEND_F3".

    A message is sent right after the action that made it, "0SEND_F3" after "0F3"; at that moment of
    the dry run the other side starts to receive, "1RECV_F3". So two ranks agree on the order of all
    messages between them, both ways: NCCL carries them one after the other, and hangs where each
    side would first send. Where a schedule hangs, its receives end.
    """
    ranks, program = rank_of_stage(schedule), [[] for _ in schedule]
    done = dict.fromkeys(action for _, action in in_turn(schedule))
    for action in done | dict.fromkeys(all_actions(schedule)):  # first those that can be done
        (rank, words), (other, receive) = message(action, ranks)
        program[rank] += words
        program[other] += receive if action in done else []
    return program


def message(action: str, ranks: dict[int, int]) -> list[tuple[int, list[str]]]:
    """[(its rank, action and send), (the other rank, receive)]; no words within a rank."""
    stage, kind, micro_batch = parse(action)
    way = "F" if kind == "F" else "B"
    to = {"F": stage + 1, "W": stage}.get(kind, stage - 1)
    rank, other = ranks[stage], ranks.get(to, ranks[stage])
    if other == rank:
        return [(rank, [action]), (rank, [])]
    send, receive = f"{stage}SEND_{way}{micro_batch}", f"{to}RECV_{way}{micro_batch}"
    return [(rank, [action, send]), (other, [receive])]


def cycle(schedule: Schedule, done: set[str]) -> str:
    """Who waits for whom, in words, once `done` is done and no rank can go on."""
    everything, ranks, first = all_actions(schedule), rank_of_stage(schedule), {}
    for action in reversed(everything):
        if action not in done:
            first[ranks[parse(action)[0]]] = action  # of those that its rank has left
    rank, said = min(first), {}
    while rank not in said:
        missing = next(each for each in needs(first[rank], set(everything)) if each not in done)
        other = ranks[parse(missing)[0]]
        who = "it" if other == rank else f"rank {other}"
        waits = f"rank {rank} waits in {first[rank]} for {missing}"
        said[rank] = f"{waits}, which {who} does only after {first[other]}"
        rank = other
    round_and_round = list(said).index(rank)  # whoever only waits for the cycle is left out
    return "; ".join(list(said.values())[round_and_round:])


def simulate(
    schedule: Schedule,
    F: float = 1,
    B: float = 2,
    I: float = 1,  # noqa: E741
    W: float = 1,
) -> dict[str, tuple[float, float]]:
    """{action: (start, end)}, if each takes so many ticks, and messages take none.

    ValueError as `validate`.
    """
    validate(schedule)
    ticks = {"F": F, "B": B, "I": I, "W": W}
    everything = set(all_actions(schedule))
    when: dict[str, tuple[float, float]] = {}
    free = [0] * len(schedule)  # when each rank is done with what it does
    for rank, action in in_turn(schedule):
        start = max([free[rank], *(when[each][1] for each in needs(action, everything))])
        free[rank] = start + ticks[parse(action)[1]]
        when[action] = start, free[rank]
    return when


def idle(schedule: Schedule, **ticks: float) -> list[float]:
    """For each rank, the ticks in which it does nothing, until the last rank is done.

    ticks: as for `simulate`. Notebook 10.
    """
    when = simulate(schedule, **ticks)
    whole = max(end for _, end in when.values())
    idle_ticks = [whole] * len(schedule)
    for rank, actions in enumerate(schedule):
        for start, end in map(when.get, map(str, actions)):
            idle_ticks[rank] -= end - start
    return idle_ticks


def held(schedule: Schedule) -> dict[int, int]:
    """{stage: the most micro-batches whose activations it holds at a time}.

    From a forward until the backward, or its weight part, is done.
    """
    most, now = Counter(), Counter()
    for stage, kind, _ in map(parse, all_actions(schedule)):
        now[stage] += {"F": 1, "B": -1, "I": 0, "W": -1}[kind]
        most[stage] = max(most[stage], now[stage])
    return dict(sorted(most.items()))
