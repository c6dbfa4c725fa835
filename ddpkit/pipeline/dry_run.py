"""Run a schedule without a process: does it hang, which ranks are idle, what do stages hold?

A rank does its actions in order: "1F0", stage 1's forward of micro-batch 0; "1B0", its backward, or
in two parts "1I0", the input's gradient, and "1W0", the weights'. F needs the output of the stage
before, B and I their F and the gradient from the stage after, W its I. These rules are enough to
find every hang, and what is missing or repeated. `schedules` has more on the notation.

PyTorch's counterparts are private: `_validate_schedule`, `_simulate_comms_compute` and
`_add_send_recv` in `torch.distributed.pipelining.schedules`. Notebook 10.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import chain

from .schedules import Schedule, parse


def rank_of_stage(schedule: Schedule) -> dict[int, int]:
    """Return {stage: the rank that has it}.

    ValueError: two ranks have it; a word isn't an action; a rank has a string, not a list.
    """
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
    """Raise ValueError, in words, unless every rank can do its actions, in order, to the end.

    Every stage, at least stage 0, needs a forward of every micro-batch and a backward, whole or in
    both parts, each once; what an action needs must come first; no ranks may wait for each other.
    """
    ranks = rank_of_stage(schedule)
    times = Counter(all_actions(schedule))
    stages = max(ranks, default=0) + 1
    micro_batches = 1
    # Each action once.
    for action, number in times.items():
        stage, _, micro_batch = parse(action)
        micro_batches = max(micro_batches, micro_batch + 1)
        if number > 1:
            got = f"rank {ranks[stage]} does {action} {number} times, expected once"
            raise ValueError(f"{got}: take the others out")
    # Every stage has a forward and a backward of every micro-batch.
    for stage in range(stages):
        for micro_batch in range(micro_batches):
            found = [f"{stage}{kind}{micro_batch}" for kind in "FBIW"]
            found = [action for action in found if action in times]
            if "".join(parse(action)[1] for action in found) not in ("FB", "FIW"):
                got = f"got {' and '.join(found) or 'nothing'} of stage {stage}"
                expected = f"{stage}F{micro_batch} and its backward, whole (B) or in parts (I, W)"
                raise ValueError(f"{got}, micro-batch {micro_batch}: expected {expected}")
    # A dry run comes to the end.
    done = {action for _, action in in_turn(schedule)}
    if len(done) < len(times):
        raise ValueError(f"this would hang: {cycle(schedule, done)}")


def needs(action: str, actions: set[str]) -> list[str]:
    """List the actions that must be done before one, on its own stage and on a stage next to it.

    actions: all of the schedule's; no others are listed. "1B0" needs "1F0", and "2B0" or "2I0".
    """
    stage, kind, micro_batch = parse(action)
    if kind == "F":
        before = [f"{stage - 1}F{micro_batch}"]
    elif kind == "W":
        before = [f"{stage}I{micro_batch}"]
    else:
        after = stage + 1
        before = [f"{stage}F{micro_batch}", f"{after}B{micro_batch}", f"{after}I{micro_batch}"]
    return [need for need in before if need in actions]


def all_actions(schedule: Schedule) -> list[str]:
    """List the actions of all ranks, rank after rank."""
    return [str(action) for action in chain.from_iterable(schedule)]


def in_turn(schedule: Schedule) -> Iterator[tuple[int, str]]:
    """Yield (rank, action) in a possible order: in each round, one action of every rank that can.

    Ends early, without an error, where no rank can do its next action.
    """
    left = [list(map(str, actions)) for actions in schedule]
    everything = set(all_actions(schedule))
    done = set()
    moved = True
    while moved:  # a round: each rank does at most one action
        moved = False
        for rank, actions in enumerate(left):
            if actions and done.issuperset(needs(actions[0], everything)):
                moved = True
                done.add(actions[0])  # at once: later ranks may use it in the same round
                yield rank, actions.pop(0)


def messages(schedule: Schedule) -> Schedule:
    """Add to a schedule what each rank sends and receives, in PyTorch's words, as "0SEND_F3".

    Returns a new schedule. A message, an output F3 or a gradient B3, is sent right after the action
    that made it; at that moment of the dry run the other rank starts to receive, "1RECV_F3". So two
    ranks agree on the order of all messages between them, both ways: NCCL carries them one by one,
    and hangs where both send first. What a hang leaves undone comes last, and isn't received.
    """
    ranks = rank_of_stage(schedule)
    program = [[] for _ in schedule]
    done = dict.fromkeys(action for _, action in in_turn(schedule))
    # Those that can be done come first, in an order that works; then the rest, where it hangs.
    for action in done | dict.fromkeys(all_actions(schedule)):
        (rank, words), (other, receive) = message(action, ranks)
        program[rank] += words
        program[other] += receive if action in done else []
    return program


def message(action: str, ranks: dict[int, int]) -> list[tuple[int, list[str]]]:
    """Return what an action adds to the lists of two ranks, the sender's and the receiver's.

    message("0F3", {0: 0, 1: 1}) is [(0, ["0F3", "0SEND_F3"]), (1, ["1RECV_F3"])]. Without a
    message, as for "0W3", it is [(0, ["0W3"]), (0, [])]. ranks: {stage: its rank}.
    """
    stage, kind, micro_batch = parse(action)
    way = "F" if kind == "F" else "B"
    to = {"F": stage + 1, "W": stage}.get(kind, stage - 1)
    rank = ranks[stage]
    # The first and the last stage have no neighbour there, a weight part has none at all.
    other = ranks.get(to, ranks[stage])
    if other == rank:
        return [(rank, [action]), (rank, [])]
    send = f"{stage}SEND_{way}{micro_batch}"
    receive = f"{to}RECV_{way}{micro_batch}"
    return [(rank, [action, send]), (other, [receive])]


def cycle(schedule: Schedule, done: set[str]) -> str:
    """Return a sentence on which rank waits for which when, with `done` done, no rank can go on."""
    everything = all_actions(schedule)
    ranks = rank_of_stage(schedule)
    first = {}
    for action in reversed(everything):
        if action not in done:
            first[ranks[parse(action)[0]]] = action  # backwards, so the rank's first stays
    # From rank to rank, each time to the one that is waited for, until one comes again.
    rank = min(first)
    said = {}
    while rank not in said:
        missing = next(need for need in needs(first[rank], set(everything)) if need not in done)
        other = ranks[parse(missing)[0]]
        who = "it" if other == rank else f"rank {other}"
        waits = f"rank {rank} waits in {first[rank]} for {missing}"
        said[rank] = f"{waits}, which {who} does only after {first[other]}"
        rank = other
    round_and_round = list(said).index(rank)  # ranks that only wait for the cycle are left out
    return "; ".join(list(said.values())[round_and_round:])


def simulate(
    schedule: Schedule,
    F: float = 1,
    B: float = 2,
    I: float = 1,  # noqa: E741
    W: float = 1,
) -> dict[str, tuple[float, float]]:
    """Return {action: (start, end)} in ticks, each as early as possible; messages take none.

    F, B, I, W: of a forward, a backward, its two parts. ValueError: the schedule is wrong or hangs.
    """
    validate(schedule)
    ticks = {"F": F, "B": B, "I": I, "W": W}
    everything = set(all_actions(schedule))
    when: dict[str, tuple[float, float]] = {}
    free = [0] * len(schedule)  # by rank, the tick at which its last action ended
    for rank, action in in_turn(schedule):
        # As soon as the rank is free and what the action needs has ended, on whatever rank.
        start = max([free[rank], *(when[need][1] for need in needs(action, everything))])
        free[rank] = start + ticks[parse(action)[1]]
        when[action] = start, free[rank]
    return when


def idle(schedule: Schedule, **ticks: float) -> list[float]:
    """Return, for each rank, the ticks in which it does nothing until the last rank has finished.

    ticks, ValueError: as for `simulate`. Notebook 10.
    """
    when = simulate(schedule, **ticks)
    whole = max(end for _, end in when.values())
    idle_ticks = [whole] * len(schedule)
    for rank, actions in enumerate(schedule):
        for start, end in map(when.get, map(str, actions)):
            idle_ticks[rank] -= end - start
    return idle_ticks


def held(schedule: Schedule) -> dict[int, int]:
    """Return {stage: the most micro-batches whose activations it holds at a time}.

    They are held from the forward until the backward, or its weight part. Nothing is validated.
    """
    most, now = Counter(), Counter()
    for stage, kind, _ in map(parse, all_actions(schedule)):
        now[stage] += {"F": 1, "B": -1, "I": 0, "W": -1}[kind]
        most[stage] = max(most[stage], now[stage])
    return dict(sorted(most.items()))
