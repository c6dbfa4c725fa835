"""Numbers to beat in an open task: par is the number of our answer, and no answer beats the bound.

A try has two numbers, since a small first one may cost a large second one: a schedule of few ticks
may hold many micro-batches. It is among the best tries while no other is as good in both.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import nn

from ddpkit.pipeline import dry_run, schedules
from ddpkit.runtime.run import Run

from ..tools.hops import hop_numbers
from .checker import Verdict, ready_made
from .pipeline import validate
from .score import bytes_moved


class Tried(Verdict):
    """A verdict on a try; in a browser all tries are drawn below it, from the second on."""

    def __init__(self, passed: bool | None, said: str, number: "NumberToBeat"):
        super().__init__(passed, said, title="" if passed else "A try")
        self.number = number
        self.tries = list(number.tries)

    def _repr_mimebundle_(self, include=None, exclude=None):
        bundle, number = super()._repr_mimebundle_(include, exclude), self.number
        if len(self.tries) > 1:
            from ddpkit.lesson.charts import tries

            labels = number.unit, number.company
            bundle["text/html"] += tries(self.tries, labels, number.par, number.bound).html
        return bundle


@dataclass
class NumberToBeat:
    """A number to make as small as possible; it remembers the tries since the kernel started.

    unit, company: the units of a try's two numbers, for example "ticks" and "held". par: the number
    of our answer. bound: no answer gets below it, by an argument; None: no bound is known. tries:
    [(number, second number)] of those that count, in their order. kept: the best, least first.
    """

    unit: str
    company: str
    par: float | None = None
    bound: float | None = None
    kept: list[tuple[float, float]] = field(default_factory=list, init=False)
    tries: list[tuple[float, float]] = field(default_factory=list, init=False)

    def judge(self, number: float, beside: float, refused: str | None) -> Verdict:
        """Judge a try, (number, beside), by par, bound and best tries. refused: why, if it is."""
        told = [f"yours {number:g} {self.unit}, {self._beside(beside)}"]
        if self.par is not None:
            told.append(f"par {self.par:g}")
        if self.bound is not None:
            told.append(f"nobody below {self.bound:g}")
        if refused:
            return Verdict(False, f"✗ {' · '.join(told)}. It doesn't count: {refused}")
        self.keep(number, beside)
        best = ", ".join(f"{least:g} ({self._beside(other)})" for least, other in self.kept)
        told.append(f"your best {best}")
        beaten = self.par is not None and number <= self.par
        return Tried(beaten or None, f"{'✓ ' if beaten else ''}{' · '.join(told)}", self)

    def _beside(self, number: float) -> str:
        one = number == 1 and self.company == "hops"
        return f"{number:g} {'hop' if one else self.company}"

    def keep(self, number: float, beside: float) -> None:
        """Add a try, and drop from `kept` those that another is as good as in both numbers."""
        self.tries.append((number, beside))
        self.kept = sorted({*self.kept, (number, beside)})
        least = math.inf
        for a_try in list(self.kept):
            if a_try[1] >= least:
                self.kept.remove(a_try)
            least = min(least, a_try[1])


def only_messages(run: Run) -> str | None:
    """Return why a run is refused if it has collectives, whose messages the wire doesn't see."""
    found = ready_made(run)
    return found and found.partition("\n")[2]


_EXCHANGE = NumberToBeat("Φ through the busiest rank", "hops", par=3, bound=3)
_STEP = NumberToBeat("bytes a rank and step", "of loss", par=192)
_TICKS = NumberToBeat("ticks", "held", par=33, bound=28)
_BLOCK = NumberToBeat("bytes a step", "of loss", par=51_429)
_TEN = {  # (stages, micro-batches, the most held): ticks of a list that does whatever is ready
    (2, 4, 1): 20,
    (2, 4, 2): 13,
    (3, 6, 2): 25,
    (4, 8, 2): 41,
    (4, 8, 3): 33,
    (4, 8, 4): 29,
    (4, 16, 3): 59,
    (6, 12, 4): 51,
    (8, 8, 5): 43,
    (8, 16, 6): 65,
}
_WHO = "If several actions are ready: who waits for your F, for your I, for your W?"
_AFTER = (
    "Who waits? For I the rank before, for F the one after, for W nobody, unless `most` are held: "
    "so I before F before W."
)
_PLANS = {  # by the most MB at the peak
    most: NumberToBeat("thirds of a block's forward", "MB at most", par=par)
    for most, par in ((34.4, 21), (50.0, 8))
}


def bytes_of(records: list) -> int:
    """Sum the bytes of a rank's calls."""
    return sum(record.bytes for record in records)


def worst(losses: Iterable[float]) -> float:
    """Return the largest loss, or NaN if one is."""
    return max(losses, key=lambda loss: (loss != loss, loss))


def beat_server(run: Run, expected: Sequence[float], nbytes: int) -> Verdict:
    """Judge notebook 03's exchange: each rank returned its x, which should be `expected`."""
    carried = [bytes_of(records) for records in run.wire]
    right = all(x.flatten().tolist() == list(expected) for x in run)
    refused = only_messages(run) or (None if right else "a rank's x isn't the mean.")
    hops = max(hop_numbers(run).values(), default=0) if only_messages(run) is None else 0
    return _EXCHANGE.judge(max(carried) / nbytes, hops, refused)


def beat_lean_step(run: Run, steps: int) -> Verdict:
    """Judge notebook 07's step: each rank returned its last loss."""
    sent = max(bytes_moved(records, len(run.wire)) for records in run.wire) / steps
    refused = only_messages(run) or (
        None if worst(run) < 1e-6 else "it doesn't fit: loss above 1e-6."
    )
    return _STEP.judge(sent, round(worst(run), 9), refused)


def beat_schedule(schedule: list[list[str]], stages: int, micro_batches: int, most: int) -> Verdict:
    """Judge notebook 10's schedule by its ticks; a stage may hold `most` micro-batches at once."""
    ticks, held, refused = _ticks(schedule, stages, micro_batches, most)
    if ticks == math.inf:
        return Verdict(False, f"✗ beat_schedule: {refused}")
    return _TICKS.judge(ticks, held, refused)


def _ticks(schedule, stages: int, micro_batches: int, most: int) -> tuple[float, int, str | None]:
    """Return (ticks, infinite if it can't run; the most that a stage holds; why it is refused)."""
    if not isinstance(schedule, list):
        return math.inf, 0, f"expected a list of lists of actions, got {schedule!r}."
    try:
        validate(schedule, micro_batches)
        ticks = max(end for _, end in dry_run.simulate(schedule).values())
    except ValueError as error:
        return math.inf, 0, f"{error}."
    refused = None
    by_stage = dry_run.held(schedule)
    fullest = max(by_stage, key=by_stage.get)
    everything = dry_run.all_actions(schedules.gpipe(stages, micro_batches))
    forwards = {action for action in everything if "F" in action}
    if not forwards <= set(dry_run.all_actions(schedule)):
        refused = "some forwards are missing."
    elif by_stage[fullest] > most:
        refused = f"stage {fullest} holds {by_stage[fullest]} at a time, allowed {most}."
    return ticks, by_stage[fullest], refused


def beat_ten_schedules(make: Callable[[int, int, int], list[list[str]]]) -> Verdict:
    """Judge notebook 10's make(stages, micro_batches, most held) by schedules for ten settings."""
    if not callable(make):
        told = f"expected the function itself, my_schedule, got {type(make).__name__}."
        return Verdict(False, f"✗ beat_ten_schedules: {told}")
    page = ["my_schedule(stages, micro_batches, most): ticks"]
    reached, reasons = 0, {}
    for setting, par in _TEN.items():
        ticks, _, refused = _ticks(make(*setting), *setting)
        counts = not refused and ticks <= par
        yours = f"{'✓ ' if counts else ''}yours {ticks:g}{', below par' * (ticks < par)}"
        if refused:
            first = reasons.setdefault(refused, setting)
            yours = f"✗ {refused.rstrip('.') if first == setting else f'as for {first}'}"
        bound = schedules.fewest_ticks(*setting)
        page.append(f"{setting}: {yours} · par {par} · nobody below {bound}")
        reached += counts
    page.append(f"{reached} of {len(_TEN)} reach par. {_AFTER if reached == len(_TEN) else _WHO}")
    return Verdict(reached == len(_TEN) or None, *page, title="Ten schedules")


def beat_plan(thirds: int, peak: int, most: float) -> Verdict:
    """Judge notebook 06's plan: `thirds` of a block's forward are computed again in backward.

    peak: in bytes; if it is above `most` MB, 34.4 or 50.0, the plan is refused.
    """
    megabytes = round(peak / 1e6, 1)
    refused = f"its peak is above {most:g} MB." if megabytes > most else None
    return _PLANS[most].judge(thirds, megabytes, refused)


def beat_block(run: Run, alone: Run, model: nn.Module, plain: nn.Module) -> Verdict:
    """Judge notebook 11's block: a rank returned (losses and lengths by step, {name: copy}).

    The copies are the parameters that all ranks hold alike. alone: the same program on one rank.
    model: with the reader's blocks, serial, and no fewer parameters than plain, the library's.
    """
    world_size, steps = len(run.wire), len(run[0][0])
    sent = max(bytes_moved(records, world_size) for records in run.wire) / steps
    last = worst(float(seen[-1, 0]) for seen, _ in run)
    if not last < 1:
        refused = "the loss isn't below 1."
    elif sum(p.numel() for p in model.parameters()) < sum(p.numel() for p in plain.parameters()):
        refused = "the model lost parameters: attention and MLP must both be there."
    elif _unused(model):
        refused = f"{_unused(model)} takes no part: attention and MLP must both be used."
    else:
        refused = _apart(run) or _unlike_one(run, alone)
    return _BLOCK.judge(sent, round(last, 3), refused)


def _apart(run: Run) -> str | None:
    """Name a parameter of which the ranks' copies differ."""
    for name, copied in run[0][1].items():
        if any((copies[name] != copied).any() for _, copies in run):
            return (
                f"ranks went apart: their copies of {name} differ. Where a whole x goes to the "
                "parts on several ranks, f has to add up its gradients."
            )
    return None


def _unlike_one(run: Run, alone: Run) -> str | None:
    """Explain a first step whose loss or gradient's length is more than 1 % off one rank's."""
    several, one = run[0][0][0].tolist(), alone[0][0][0].tolist()
    if all(math.isclose(*pair, rel_tol=0.01) for pair in zip(several, one, strict=True)):
        return None
    first, right = ("a loss of {:.3f}, a gradient {:.3f} long".format(*x) for x in (several, one))
    return (
        f"step 1 has {first}; of one rank with the same blocks it is {right}. Is a bias inside g, "
        "and so in the sum once for each rank? Is f there, once for each whole x?"
    )


def _unused(model: nn.Module) -> str | None:
    """Name a trained parameter without a gradient, once backward has run."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if all(parameter.grad is None for parameter in trained.values()):
        return None  # backward ran elsewhere
    return next((name for name, p in trained.items() if p.grad is None), None)
