"""Checkers of notebook 10's schedules: gpipe, one_f_one_b, a published one to mend, zero_bubble.

Those of exercises that run on ranks are in `pipeline_ranks`.
"""

from ddpkit.pipeline import dry_run, schedules

from .checker import Exercise, Trial, mistakes

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these

CASES = [(3, 4), (2, 2), (4, 8), (4, 2), (1, 3)]  # stages, micro-batches


def gpipe_rows(stages: int, micro_batches: int) -> list[list[str]]:
    """The specification: a list of actions for each stage, such as ["0F0", "0F1", "0B0", "0B1"]."""
    rows = []
    for stage in range(stages):
        rows.append([f"{stage}{kind}{i}" for kind in "FB" for i in range(micro_batches)])
    return rows


def one_f_one_b_rows(stages: int, micro_batches: int) -> list[list[str]]:
    """The specification: p - s forwards on stage s of p, then a backward and a forward in turn."""
    rows, last = [], micro_batches - 1
    for stage in range(stages):
        moments = {f"{stage}F{i}": (i, 0) for i in range(micro_batches)}
        ahead = stages - stage - 1
        moments |= {f"{stage}B{i}": (min(i + ahead, last), 1 + i) for i in range(micro_batches)}
        rows.append(sorted(moments, key=moments.get))
    return rows


def _seen(plan: object, stages: int, micro_batches: int) -> dict[str, object]:
    """Describe a plan: its number of lists and their contents; anything else as it is."""
    case = f"with {stages} stages and {micro_batches} micro-batches"
    if not isinstance(plan, list | tuple) or not all(isinstance(r, list | tuple) for r in plan):
        return {f"lists {case}": plan}
    rows = {f"rank {r} {case}": " ".join(map(str, row)) for r, row in enumerate(plan)}
    return {f"lists {case}": len(plan)} | rows


def _run(answer, right: list[dict], cases):
    """Call the answer for plan after plan, up to the first that isn't right."""
    seen = {}
    for expected, case in zip(right, cases, strict=True):
        plan = answer(*case)
        seen |= _seen(plan, *case)
        if expected != _seen(plan, *case):
            return seen | {"plan": plan, "micro-batches": case[1]}
    return seen


def validate(plan: list, micro_batches: int) -> None:
    """Validate a plan, as `dry_run.validate` does; ValueError also for a micro-batch too many."""
    dry_run.rank_of_stage(plan)  # are they actions?
    for action in dry_run.all_actions(plan):
        if schedules.parse(action)[2] >= micro_batches:
            last = f"the last of {micro_batches} micro-batches is number {micro_batches - 1}"
            raise ValueError(f"take {action} out: {last}")
    dry_run.validate(plan)


def _trials(rows_of, cases=CASES):
    right = [_seen(rows_of(*case), *case) for case in cases]
    expected = {what: seen for case_seen in right for what, seen in case_seen.items()}
    return [Trial(1, _run, (right, cases), [expected], what="as a plan")]


def _explain(trial: Trial, rank: int, expected: dict, got: dict):
    """Explain a plan by the words of `validate`, or say that it is another schedule."""
    for what in expected:
        if what.startswith("lists") and got.get(what, expected[what]) != expected[what]:
            return 'Return a list for each rank, one for each stage, of actions such as "0F0".'
    try:
        validate(got["plan"], got["micro-batches"])
    except ValueError as error:
        return str(error)
    return "It would run, and the gradients would be right; but it isn't this schedule."


HINTS = {
    "start": 'An action is a string: f"{stage}F{i}". A list for each rank, and in it, in order, '
    "all that this rank does.",
    "error": "micro_batches and stages are numbers: range(micro_batches).",
}

gpipe = Exercise(
    reference=schedules.gpipe,
    helpers=(schedules.each,),
    trials=lambda: _trials(gpipe_rows),
    hints=HINTS | {"values": "The same for every stage: its F of all micro-batches, then its B."},
    praise="for 1 to 4 stages, with fewer micro-batches than stages, too.",
    explain=_explain,
    mistakes=mistakes("""
one_micro_batch_at_a_time: each(stage, "F", micro_batches) + each(stage, "B", micro_batches) →
    ⏎[f"{stage}{kind}{i}" for i in range(micro_batches) for kind in "FB"]
    It would run, but as slowly as without micro-batches: every rank waits for its backward before
    it begins the next forward. All forwards first.
one_f_one_b: each(stage, "F", micro_batches) + each(stage, "B", micro_batches) →
    ⏎alternate(each(stage, "F", micro_batches), each(stage, "B", micro_batches), stages - 1 - stage)
    That is a schedule of a later section. Here a rank does all its forwards, then all backwards.
from_the_last: + each(stage, "B", micro_batches) → + each(stage, "B", micro_batches)[::-1]
    It would run, and papers draw it so. Here backward, too, begins with micro-batch 0: that helps
    in a later section.
backward_first: each(stage, "F", micro_batches) + each(stage, "B", micro_batches) →
    ⏎each(stage, "B", micro_batches) + each(stage, "F", micro_batches)
    No backward without its forward: first all F, then all B.
by_micro_batch: return schedule → return [list(column) for column in zip(*schedule)]
    A list for each rank: schedule[rank] is what that rank does, from its first action to its last.
only_forward: each(stage, "F", micro_batches) + each(stage, "B", micro_batches) →
    ⏎each(stage, "F", micro_batches)
    Each forward needs its backward: that is where the gradients come from.
"""),
)

one_f_one_b = Exercise(
    reference=schedules.one_f_one_b,
    helpers=(schedules.alternate, schedules.each),
    trials=lambda: _trials(one_f_one_b_rows),
    hints=HINTS
    | {
        "values": "Stage s does p - 1 - s forwards ahead, but not more than there are; then it "
        "takes turns, a forward and a backward, until no forward is left; then the backwards that "
        "are left.",
    },
    praise="stage s holds p - s micro-batches, however many there are.",
    explain=_explain,
    mistakes=mistakes("""
gpipe: ahead=stages - 1 - stage → ahead=micro_batches
    It would run, but that is GPipe: a stage holds all micro-batches. Begin with backwards as soon
    as one can be there.
one_more_ahead: ahead=stages - 1 - stage → ahead=stages - stage
    It would run, in the same time, but each stage holds one micro-batch more than it has to. The
    last stage has no forward ahead: 3F0 3B0 3F1 3B1 with 4 stages.
all_as_far_as_the_first: ahead=stages - 1 - stage → ahead=stages - 1
    It would run, but all stages hold as much as the first. A stage further down needs fewer
    forwards ahead: its backward comes sooner.
none_ahead: ahead=stages - 1 - stage → ahead=0
    It would run, but no two ranks would compute at the same time: every rank waits for its
    backward before it begins the next forward.
one_too_few: ahead=stages - 1 - stage → ahead=max(0, stages - 2 - stage)
    It would run, and hold even less. But stage 0 waits for a backward when it could begin another
    forward: p - 1 of them are on their way before the first comes back.
the_wrong_way_round: ahead=stages - 1 - stage → ahead=stage
    Stage 0 has the longest way to its first backward, so it does most forwards ahead; the last
    stage does none.
backward_before_forward: actions += [forward, backward] → actions += [backward, forward]
    The last stage begins with a backward, which has had no forward yet. In a turn the forward is
    first.
"""),
)


# published_1f1b: what is wrong with it?


def published_1f1b(stages: int, micro_batches: int) -> schedules.Schedule:
    schedule = []
    for stage in range(stages):
        actions = []
        ahead = stages - 1 - stage
        forward = -1  # the last one done: none yet
        for i in range(ahead):
            actions.append(f"{stage}F{i}")
            forward = i
        backward = 0
        remaining = micro_batches - ahead
        while remaining > 0:
            forward += 1
            actions.append(f"{stage}F{forward}")
            remaining -= 1
            actions.append(f"{stage}B{backward}")
            backward += 1
        while backward < micro_batches:
            actions.append(f"{stage}B{backward}")
            backward += 1
        schedule.append(actions)
    return schedule


published_1f1b = Exercise(
    reference=published_1f1b,
    trials=lambda: _trials(one_f_one_b_rows, [(3, 4), (2, 2), (4, 8), (1, 3)]),
    hints={
        "values": "Which value has `forward` when the loop over `ahead` has not run once?",
        "start": "On the last stage nothing is ahead. `forward` is the last one done: 0 would be "
        "one too many.",
    },
    praise="one number, on the last stage only.",
    note="One number, mended. PyTorch's own step() never used the list, only its drawing did.",
    explain=_explain,
    mistakes=mistakes("""
as_found: forward = -1 → forward = 0
    The stages before the last are right. What is different about the last, when its first turn
    begins?
one_more_ahead: ahead = stages - 1 - stage → ahead = stages - stage
    It would run: the last stage, too, has a forward ahead now, so the loop sets `forward`. But
    every stage holds a micro-batch more than it has to: mend the count, not the plan.
all_ahead: ahead = stages - 1 - stage → ahead = micro_batches
    It would run: with all forwards ahead it is GPipe, which holds all micro-batches.
kept_in_range: forward += 1 → forward = min(max(forward, 0) + 1, micro_batches - 1)
    No number is too large any more, but the last stage does its last forward twice and its first,
    F0, never. At which number does it begin?
no_turns: while remaining > 0: → while remaining > 0 and stage < stages - 1:
    Now the last stage does no forward at all.
"""),
)


# zero_bubble: the place of the weight parts


LIMITS = (3, 6), (2, 4), (4, 8), (4, 4), (1, 3)  # stages, micro-batches


def _run_bubble(answer):
    """Judge plan after plan as `_judged` does, up to the first that isn't right."""
    seen = {}
    for stages, micro_batches in LIMITS:
        case = f"with {stages} stages and {micro_batches} micro-batches"
        plan = answer(stages, micro_batches)
        found = _judged(plan, stages, micro_batches)
        seen |= {f"{what} {case}": value for what, value in found.items()}
        if found != _BUBBLE:
            return seen | {"plan": plan}
    return seen


_BUBBLE = {"a plan": True, "it runs": True, "stages": True, "held": True, "idle": True}


def _judged(plan: object, stages: int, micro_batches: int) -> dict[str, object]:
    """Return {entry of `_BUBBLE`: True, what the plan has instead, or None if not looked at}."""
    seen = dict.fromkeys(_BUBBLE, None)
    if not isinstance(plan, list | tuple) or not all(isinstance(row, list | tuple) for row in plan):
        return seen | {"a plan": "no list of lists"}
    seen["a plan"] = True
    try:
        validate(plan, micro_batches)
    except ValueError as error:
        return seen | {"it runs": str(error)}
    seen["it runs"] = True
    count = len(plan), sum(map(len, plan))
    seen["stages"] = count == (stages, 3 * stages * micro_batches) or f"{count[1]} actions"
    held = max(dry_run.held(plan).values())
    seen["held"] = held <= stages or f"{held}, where {stages} do"
    idle = max(dry_run.idle(plan))
    seen["idle"] = idle <= stages - 1 or f"{idle:g} ticks, where {stages - 1} do"
    return seen


def _bubble_trials():
    right = {}
    for stages, micro_batches in LIMITS:
        case = f"with {stages} stages and {micro_batches} micro-batches"
        right |= {f"{what} {case}": value for what, value in _BUBBLE.items()}

    def expected(run):
        plan = {"plan": run[0]["plan"]} if "plan" in run[0] else {}
        return [right | plan]

    return [Trial(1, _run_bubble, (), expected, what="as a plan")]


def _explain_bubble(trial: Trial, rank: int, expected: dict, got: dict) -> str | None:
    what = next(key for key in expected if got.get(key) != expected[key])
    if what.startswith("held"):
        return "A micro-batch is held until its W: some come too late, or too many F are ahead."
    if what.startswith("idle"):
        if _waits_with_one_ready(got["plan"]):
            return "A rank waits while a W of its own lies ready: do it then."
        return (
            "Where a rank waits, no W of its own is ready: it did them too early, or their I too "
            "late. The last stage, which is idle at the end, has most of them to keep."
        )
    if what.startswith("stages"):
        return "F, I and W of each micro-batch, on each stage, and no B."
    return None


def _waits_with_one_ready(plan: list) -> bool:
    """Return True if a rank isn't busy all the time from an I to the W that belongs to it."""
    when = dry_run.simulate(plan)
    for row in plan:
        spans = [when[str(action)] for action in row]
        for action in filter(lambda action: "W" in action, map(str, row)):
            ready, begun = when[action.replace("W", "I")][1], when[action][0]
            if begun - ready > sum(end - start for start, end in spans if ready <= start < begun):
                return True
    return False


zero_bubble = Exercise(
    reference=schedules.zero_bubble,
    helpers=(schedules.alternate, schedules.each),
    trials=_bubble_trials,
    hints=HINTS
    | {
        "start": "Begin with 1F1B, written with I in place of B: alternate(forwards, inputs, "
        "ahead=stages - 1 - stage). Where are its ranks idle now?",
        "values": "Nobody waits for a W. Put one after each I, but stage s leaves out its first s: "
        "those fill its idle ticks at the end.",
    },
    praise="idle for p - 1 ticks instead of 3(p - 1), and nobody holds more than p.",
    explain=_explain_bubble,
    note='ZB1P, "ZB-H1" in Qi et al. 2023.',
    mistakes=mistakes("""
w_at_once: if action in inputs[stage:]: → if action in inputs:
    Every W stands right behind its I, as in a whole backward: then nothing is left to fill the idle
    ticks at the end. Later stages delay some.
all_at_the_end: if action in inputs[stage:]: → if action in []:
    All W at the end: nobody is idle for long, but every micro-batch is held until its W.
as_many_everywhere: inputs[stage:] → inputs[stages - 1 :]
    Each stage delays as many as the last one has to: the first ones hold more than they may.
the_wrong_way_round: inputs[stage:] → inputs[stages - 1 - stage :]
    The last stage has most to delay: its gradients travel longest, and it is idle at the end.
one_more_ahead: ahead=stages - 1 - stage → ahead=stages - stage
    A forward more is ahead than has to be, and each is held until its W.
forgets_the_rest: return schedule → return [row[: 3 * micro_batches - 1] for row in schedule]
    Some W are never done, and their weights get no gradient.
"""),
)
