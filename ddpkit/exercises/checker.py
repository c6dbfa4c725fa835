"""The common part of all checkers: run the answer on real ranks, compare, name the mistake.

An exercise is its trials (a program and its expected results), and a table of well-known mistakes.
An answer is judged by its trials alone. If it fails, the mistakes of the table are run on the same
trial, for a few seconds at most, and the one that fails in the same way says what is probably
wrong. Unless the exercise allows it (`writes`, `same_dtype`), a function mustn't change its
arguments, nor return another dtype. A right answer must be right once more in the same process.
"""

import contextlib
import dis
import inspect
import linecache
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist

from ddpkit.runtime.errors import HangError, LaunchError
from ddpkit.runtime.launch import Run, launch
from ddpkit.runtime.look import Look
from ddpkit.runtime.place import describe_place
from ddpkit.tools.units import name_ranks, wrap

from .on_rank import in_turn
from .score import code_lines, counts, score

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these

PATIENCE_S = 20.0  # for one launch
NAMING_S = 5.0  # for all known mistakes together, until the values are shown without a cause
LONGEST = 110  # characters of a value that is shown
ROOM = 150  # characters of the trials' names, if all are shown

# An exercise as data


@dataclass
class Trial:
    """One run of the answer on real ranks, and its expected results.

    program: called on every rank with the answer and `args`; returns plain data, or a dict of its
        observations: {"gradients": ..., "calls": 3}.
    expected: the results it must return, by rank, from a specification that shares no code with
        the reference; or a function that returns them, called with the run. A dict has the most
        telling observation first: of several wrong ones, the first is named.
    sent_bytes: the bytes that all ranks together must send, for `check_wire`; None: any number.
    what: the aim of the trial, besides the number of ranks.
    rungs: the names of its cases, in order, where it has several; observations begin with them.
    """

    world_size: int
    program: Callable
    args: tuple
    expected: list | Callable[[Run], list]
    sent_bytes: int | None = None
    what: str = ""
    rungs: tuple[str, ...] = ()

    def __str__(self):
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        return f"{ranks}, {self.what}" if self.what else ranks


class Rounded(list):
    """Numbers rounded to `decimals`; equal to others if the last digit differs by 1 at most.

    Two sums of the same numbers in different order may be rounded one up and one down.
    """

    def __init__(self, numbers: Iterable[float], decimals: int):
        super().__init__(round(number, decimals) + 0.0 for number in numbers)
        self.decimals = decimals

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, list) or len(self) != len(other):
            return False
        pairs = zip(self, other, strict=True)
        return all(abs(ours - theirs) < 1.5 * 10**-self.decimals for ours, theirs in pairs)

    def __ne__(self, other: object) -> bool:
        return not self == other


@dataclass(frozen=True)
class Mistake:
    """A well-known wrong answer: the reference with some of its text replaced.

    says: the sentence that explains it. changes: (old, new), each old occurring once in the source
    of the reference and its helpers; `⏎` stands for a new line at the same depth. answer: the wrong
    answer written out, where it can't be a replacement.
    """

    name: str
    says: str
    changes: tuple[tuple[str, str], ...] = ()
    answer: Callable | None = None

    @classmethod
    def written(cls, answer: Callable, says: str) -> "Mistake":
        """Make a mistake of an answer that is written out."""
        return cls(answer.__name__, says, answer=answer)

    def applied_to(self, reference: Callable, helpers: Sequence[Callable] = ()) -> Callable:
        """Make the wrong answer, in a namespace like that of the reference."""
        if self.answer:
            return self.answer
        source = source_of(*helpers, reference)
        found = [(*self._place(source, old), new) for old, new in self.changes]
        for start, stop, new in sorted(found, reverse=True):
            line = source[source.rfind("\n", 0, start) + 1 : start]
            indent = line[: len(line) - len(line.lstrip())]
            source = source[:start] + new.replace("⏎", f"\n{indent}") + source[stop:]
        namespace = dict(vars(sys.modules[reference.__module__]))
        namespace["__name__"] = f"mistake_{self.name}"  # unknown, so it travels to ranks by value
        file = f"<{reference.__name__}: {self.name}>"
        linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
        exec(compile(source, file, "exec"), namespace)
        return namespace[reference.__name__]

    def _place(self, source: str, old: str) -> tuple[int, int]:
        """Find where the text begins and ends; ValueError unless it is in exactly one place."""
        pattern = r"\n *".join(re.escape(line.strip()) for line in old.split("⏎"))
        found = list(re.finditer(pattern, source))
        if len(found) != 1:
            raise ValueError(
                f"mistake {self.name}: expected {old!r} once in the reference, found it "
                f"{len(found)} times: has the reference changed?"
            )
        return found[0].span()


def mistakes(table: str) -> list[Mistake]:
    """Read a table of mistakes. Each is its name, its replacements, and its sentence:

        own_twice: mine += arrived → mine += mine + arrived
            The chunk's own numbers are in it twice: add what arrives once.

    Further replacements follow on lines of their own, with an arrow; a line that begins with ⏎
    continues the replacement above; any other line belongs to the sentence.
    """
    found = []
    for block in re.split(r"\n(?=\w+: )", textwrap.dedent(table).strip()):
        name, _, rest = block.partition(": ")
        changes, says = [], []
        for line in rest.splitlines():
            old, arrow, new = line.partition(" →")
            if line.strip().startswith("⏎"):  # continues the replacement before it
                changes[-1] = changes[-1][0], changes[-1][1] + line.strip()
            elif arrow:
                changes.append((old.strip(), new.removeprefix(" ")))
            else:
                says.append(line.strip())
        found.append(Mistake(name, " ".join(says), tuple(changes)))
    return found


def source_of(*parts: Callable) -> str:
    """Join the sources of functions or classes."""
    return "\n\n".join(textwrap.dedent(inspect.getsource(inspect.unwrap(p))) for p in parts)


@dataclass
class Problem:
    """The fault of an answer. stage: "luck", "values", "damage", "wire", "hang" or "error".

    "luck": a call was never waited for, or a message overwritten on its way: values depend on
    timing. "damage": values are right, but a call changed an argument, or a dtype. symptom: equal
    for two answers that make the same mistake. reading: an explanation from the values, in case no
    known mistake explains them. rung: the failed case's index in `rungs`.
    """

    stage: str
    text: str
    symptom: object = None
    reading: str | None = None
    rung: int = 0


class Verdict:
    """The result of a check. `passed` is None if nothing was judged: an unwritten answer, a hint.

    said: paragraphs, the first of which begins with a title unless there is a `title`. more: a last
    paragraph, of what can be called next. In a browser the verdict is a card, with the texts of
    `folds()`, {name: text}, to unfold, and below it the player that `replay()` returns, if any. The
    card has `more` only if that offers a replay, and there is no player.
    """

    def __init__(
        self, passed: bool | None, *said: str, title="", folds=dict, replay=lambda: None, more=""
    ):
        self.passed, self.text = passed, "\n".join(filter(None, (*said, more)))
        self._said, self._title, self._more = said, title, more
        self._folds, self._replay = folds, replay

    def __repr__(self):
        return wrap(self.text)

    def _repr_mimebundle_(self, include=None, exclude=None):
        from ddpkit.lesson.card import card
        from ddpkit.lesson.widgets import Below

        player, (first, *rest), title = self._replay(), [s for s in self._said if s], self._title
        found = None if title else re.match(r"[✓✗ ]*(\w+( on [^:]+)?): ", first)
        if found:
            title, first = found[1], first[found.end() :]
        rest.append(self._more if "replay" in self._more and not player else "")
        page = card(self.passed, title, first, *rest, folds=self._folds())
        bundle = {"text/plain": repr(self), "text/html": page}
        if player:
            bundle |= Below(repr(self), page, player)._repr_mimebundle_()[0]
        return bundle


class Solution(Verdict):
    """Source code, shown verbatim."""

    def __repr__(self):
        return self.text


@dataclass(kw_only=True, repr=False)
class Exercise:
    """A checker: call it with the answer; ask it for a `hint()`, the `solution()`, or a `replay()`.

    reference: the right answer that `solution()` shows, mostly the library's own object; `helpers`
        are the library's functions that it calls and a reader must see to understand it.
    trials: returns them: 2 ranks first, so that a first failure is easy to understand, 1 rank last.
    mistakes: the known ones, the commonest first: of two that fail alike, the first is named.
    hints: by the stage at which an answer failed: "start", "values", "wire", "hang", "error".
    praise: the sentence for a right answer; or a function that returns it, called with the last
        trial of the most ranks and its run.
    note: printed above the solution.
    given: the methods of a class that the notebook gives; the reader writes the others.
    writes: the arguments of a function that it may write to, in place: a list must still hold the
        same tensors. All others must be as they were, after each call. None: calls aren't watched.
    same_dtype: floating-point results must have the dtype of the arguments, if these have only one.
    says: where a trial's program returns a dict, the sentence for each of its entries that isn't
        as expected, with {rank}, {expected} and {got}.
    explain: called with a trial, the rank with a wrong result, the expected result and the rank's;
        explains the values if no known mistake has them, or returns None.
    wire: called with a trial and its run; says what is wrong on the wire though the values are
        right, or returns None.
    best: {"bytes", "calls" or "hops": the fewest known} in the last trial of the most ranks.
    plays: below a right answer, play its run of the first trial of 3 ranks or more, hop by hop.
    """

    reference: Callable
    trials: Callable[[], Iterable[Trial]]
    mistakes: Sequence[Mistake]
    hints: dict[str, str]
    praise: str | Callable[[Trial, Run], str]
    helpers: tuple[Callable, ...] = ()
    note: str = ""
    given: tuple[str, ...] = ("__init__",)
    writes: tuple[str, ...] | None = ()
    same_dtype: bool = True
    says: dict[str, str] = field(default_factory=dict)
    explain: Callable[[Trial, int, object, object], str | None] = lambda *_: None
    wire: Callable[[Trial, Run], str | None] = lambda *_: None
    best: dict[str, int] = field(default_factory=dict)
    plays: bool = False
    _failures: int = field(default=0, init=False)
    _stages: list[str] = field(default_factory=list, init=False)  # stages whose hints come next
    _outcome: Run | LaunchError | None = field(default=None, init=False)
    _passed: bool = field(default=False, init=False)
    _ours: Run | None = field(default=None, init=False)  # the reference's, for the score
    # {name of a known mistake: (number of trials it passes, its problem in the next one)}
    _tried: dict[str, tuple[int, Problem | None]] = field(default_factory=dict, init=False)

    @property
    def name(self) -> str:
        return self.reference.__name__

    def __repr__(self):
        return f"check.{self.name}: call it with your answer, or ask for its hint() or solution()"

    def __call__(self, answer: "Callable | Mistake") -> Verdict:
        """Run `answer`; return a verdict of a few lines: right, not written yet, or the fault."""
        mistake = answer if isinstance(answer, Mistake) else None
        if mistake:
            answer = mistake.applied_to(self.reference, self.helpers)
        unfit = self._unfit(answer)
        if unfit:
            return Verdict(False, f"✗ {self.name}: {unfit}")
        parts = self._to_write(answer)
        empty = [name for name, part in parts.items() if is_stub(inspect.unwrap(part))]
        if empty and len(empty) == len(parts):
            which = f": {', '.join(empty)}" if inspect.isclass(answer) else ""
            hint = {"hint": next(iter(self.hints.values()))}
            return Verdict(None, f"{self.name}: not written yet{which}", folds=lambda: hint)
        if returns_nothing(answer) and not returns_nothing(self.reference):
            return Verdict(False, f"✗ {self.name}: it returns nothing. Is a `return` missing?")
        trials = list(self.trials())
        largest, ran, played = trials[0], None, None
        for number, trial in enumerate(trials):
            outcome, problem = self._try(answer, [trial])
            if problem and mistake:  # keep it: it needn't run again to be compared with itself
                self._tried[mistake.name] = number, problem
            if problem:
                return self._refuse(trials, number, trial, problem, empty)
            if trial.world_size >= largest.world_size:
                largest, ran = trial, outcome
            if trial.world_size > 2:
                played = played or outcome
        # Once more, in one process: an answer that remembers its first call may fail in the second.
        alike = [trial for trial in trials if trial.world_size == largest.world_size]
        again = alike if len(alike) > 1 else alike * 2
        _, problem = self._try(answer, again)
        if problem:
            told = replace(
                largest, what=f"{largest.what}, once more in the same process".lstrip(", ")
            )
            return self._refuse(trials, len(trials), told, problem, empty)
        self._failures = 0
        ran = of_trial(ran, 0)
        praise = self.praise(largest, ran) if callable(self.praise) else self.praise
        told = f"✓ {self.name}: {praise}", self._score(answer, largest, ran)
        return Verdict(True, *told, replay=partial(self._played, played))

    def _try(self, answer: Callable, trials: list[Trial]) -> tuple[object, Problem | None]:
        """Run trials of one world size, in one launch; return its outcome, and the first problem.

        The outcome is kept for a replay.
        """
        outcome, noticed = self._run(answer, trials, PATIENCE_S)
        problem = self._problem(trials, outcome, noticed)
        self._outcome, self._passed = outcome, problem is None
        return outcome, problem

    def _run(self, answer: Callable, trials: list[Trial], seconds: float) -> tuple[object, list]:
        """Run trials in one launch; return the run, or its LaunchError, and each rank's complaints.

        A rank's result is a list, by trial. Complaints: that a call changed arguments, or a dtype;
        one for each call, "" for most.
        """
        programs = [(trial.program, *trial.args) for trial in trials]
        try:
            run = launch(
                in_turn,
                answer,
                self.writes,
                self.same_dtype,
                programs,
                world_size=trials[0].world_size,
                backend="gloo",
                keep_values=True,
                timeout=seconds,
            )
        except LaunchError as error:
            return error, []
        noticed = [told for _, told in run]
        return replace(run, results=[plain(results) for results, _ in run]), noticed

    def _score(self, answer: Callable, trial: Trial, run: Run) -> str:
        """Write bytes, calls, hops and lines: yours, ours, and the fewest known."""
        yours, ours = {}, {}
        if any(run.wire):
            yours = counts(run)
            if self._ours is None:
                self._ours, _ = self._run(self.reference, [trial], PATIENCE_S)
            ours = counts(self._ours)
        if code_lines(answer):
            yours["lines"], ours["lines"] = code_lines(answer), code_lines(self.reference)
        return score(yours, ours, self.best)

    def hint(self) -> Verdict:
        """Give a hint for the stage at which the last answer failed; the next one on each call."""
        return Verdict(None, self._next_hint(), title="hint")

    def solution(self) -> Verdict:
        """Show the reference's source, and that of the functions it calls."""
        note = [f"# {self.note}"] if self.note else []
        source = "\n".join([*note, source_of(self.reference, *self.helpers)])
        return Solution(None, source, title="solution")

    def replay(self):
        """Play the messages of the last answer, in the first trial in which it failed."""
        from ddpkit.lesson.player import player

        if self._outcome is None or self._passed:
            why = "the last check passed" if self._passed else "nothing failed yet"
            return Verdict(None, f"{self.name}: {why}, so there is nothing to replay")
        if not any(self._outcome.wire):
            why = "the ranks sent nothing, so there is nothing to replay"
            return Verdict(None, f"{self.name}: {why}")
        return player(self._outcome)

    def _short_replay(self):
        """Return the player if its pictures can be drawn within a second or two.

        If they can't be drawn at all the verdict stands without them.
        """
        records = [record for of_rank in self._outcome.wire for record in of_rank]
        kept = any(record.values is not None for record in records)  # else there is nothing to draw
        if not kept or len(records) > 16:
            return None
        with contextlib.suppress(Exception):
            return self.replay()

    def _played(self, run: Run):
        """Return the player of a right answer's run, which plays once; or None."""
        from ddpkit.lesson.player import player

        return player(run, by_hop=True, plays=True) if self.plays else None

    def known(self, number: int, problem: Problem) -> Mistake | None:
        """Find the mistake of the table that passes the trials before this one, and fails it alike.

        number: the failed trial's index. If no mistake has the problem's symptom, it is the first
        with its text: an answer may have other mistakes. The search takes NAMING_S at most: if
        each launch takes seconds, the rest of the table isn't run before the next failure.
        """
        deadline, near, longest = time.monotonic() + NAMING_S, None, 0.0
        trials = list(self.trials())
        if number == len(trials):
            return None
        for mistake in self.mistakes:
            passed, failed = self._tried.get(mistake.name, (0, None))
            while failed is None and passed <= number:
                begun = time.monotonic()
                left = deadline - begun
                if left <= longest:
                    break
                answer = mistake.applied_to(self.reference, self.helpers)
                found = self._run(answer, [trials[passed]], left)
                longest = max(longest, time.monotonic() - begun)
                if isinstance(found[0], HangError) and longest >= left:
                    break  # it was cut off, and tells nothing
                failed = self._problem([trials[passed]], *found)
                passed += failed is None
            self._tried[mistake.name] = passed, failed
            if passed == number and failed and failed.symptom == problem.symptom:
                return mistake
            if passed == number and failed and failed.text == problem.text:
                near = near or mistake
        return near

    def _unfit(self, answer: object) -> str | None:
        """Say what is wrong with an answer that can't be run at all."""
        if inspect.isclass(self.reference) and not inspect.isclass(answer) and callable(answer):
            made = type(answer).__name__
            if not inspect.isfunction(answer):
                return f"expected the class {made}, got an object of it: leave the parentheses off"
        if not callable(answer):
            return f"expected your function, got {answer!r}: leave the parentheses off"
        return None

    def _to_write(self, answer: Callable) -> dict[str, Callable]:
        """{name: function the reader has to write}: the answer, or methods that the reference has.

        Methods that are empty in the reference may stay so.
        """
        if not inspect.isclass(answer):
            return {self.name: answer}
        parts = {}
        for name in vars(self.reference):
            ours = getattr(self.reference, name)
            written = inspect.isfunction(ours) and not is_stub(ours)
            if written and name not in self.given and hasattr(answer, name):
                parts[name] = getattr(answer, name)
        return parts

    def _problem(self, trials: list[Trial], outcome, noticed: list) -> Problem | None:
        """Compare the outcome of trials with what is expected; return the first problem, if any."""
        if isinstance(outcome, LaunchError):
            stage, text = "hang" if isinstance(outcome, HangError) else "error", str(outcome)
            return Problem(stage, text, (text.partition("\n")[0], "never waited" in text))
        luck = never_waited(outcome) or _overwritten(outcome)
        if luck:
            return Problem("luck", luck, "a matter of luck")  # so the values mean nothing
        for number, trial in enumerate(trials):
            problem = self._wrong_values(trial, of_trial(outcome, number))
            if problem:
                return problem
        for rank, told in enumerate(noticed):
            for call, damage in enumerate(told):
                if damage:
                    text = f"the values are right, but on rank {rank} {damage}"
                    rung = call * len(trials[0].rungs) // len(told)  # each case has as many calls
                    return Problem("damage", text, text, rung=rung)
        wrong = self.wire(trials[0], of_trial(outcome, 0))
        return Problem("wire", wrong, wrong) if wrong else None

    def _wrong_values(self, trial: Trial, run: Run) -> Problem | None:
        expected = trial.expected(run) if callable(trial.expected) else trial.expected
        wrong = (rank for rank, should in enumerate(expected) if run[rank] != should)
        rank = next(wrong, None)
        if rank is None:
            return None
        text = self._tell(trial, rank, expected[rank], run[rank])
        unsent = ""
        if trial.sent_bytes and not any(run.wire) and "sent nothing" not in text:
            unsent = " No rank sent anything."
        text += unsent
        reading = self.explain(trial, rank, expected[rank], run[rank])
        what = first_difference(expected[rank], run[rank])
        rungs = [at for at, case in enumerate(trial.rungs) if str(what).startswith(case)]
        return Problem("values", text, repr(list(run)) + unsent, reading, max(rungs, default=0))

    def _tell(self, trial: Trial, rank: int, expected: object, got: object) -> str:
        sentence = "rank {rank} has {got}, expected {expected}."
        where = f" on rank {rank}" if trial.world_size > 1 else ""
        what = first_difference(expected, got)
        if what is not None:
            if what not in expected:
                return f"{what}{where}: {short(got[what])}, which nobody asked for."
            expected, got = expected[what], got.get(what)
            sentence = self.says.get(what, f"{what}{where}: {{got}}, not {{expected}}.")
        shown = short(got), short(expected)
        if shown[0] == shown[1]:  # the digits that are shown are alike
            sentence += " They differ in digits that aren't shown: is something in float32?"
        return sentence.format(rank=rank, got=shown[0], expected=shown[1])

    def _refuse(
        self, trials: list[Trial], number: int, trial: Trial, problem: Problem, empty: list[str]
    ) -> Verdict:
        """Write the verdict: what is wrong, why, how far it came. empty: what isn't written yet."""
        self._failures += 1
        stages = [stage for stage in ("start", *self.hints) if stage != problem.stage]
        self._stages = [stage for stage in (problem.stage, *stages) if stage in self.hints]
        lines = [f"✗ {self.name} on {trial}: {problem.text}"]
        cause = None if problem.stage == "luck" else self._cause(number, problem)
        if cause and cause not in problem.text:
            lines.append(cause)
        if empty:
            lines.append(f"{', '.join(empty)} {'is' if len(empty) == 1 else 'are'} still empty.")
        # What is said of damage and of the wire has its cause in it: a hint might mislead.
        vague = problem.stage in ("values", "hang", "error") or problem.stage in self.hints
        if self._failures > 1 and not cause and vague and self._stages:
            lines.append(f"A hint, in case it is this: {self._next_hint()}")
        lines.append(ladder(trials, number, problem.rung))
        replay = " · .replay()" if any(self._outcome.wire) else ""
        more = f"More: check.{self.name}.hint(){replay} · .solution()"
        hints = dict(zip(("hint", "another hint"), map(self.hints.get, self._stages), strict=False))
        look = {"folds": lambda: hints | {"solution": self.solution().text}}
        return Verdict(False, *lines, **look, replay=self._short_replay, more=more)

    def _cause(self, number: int, problem: Problem) -> str | None:
        """Explain the problem by a known mistake, or by its values; None if neither does."""
        mistake = self.known(number, problem)
        said = mistake.says if mistake else ""
        return problem.reading if said in (problem.reading or "") else said

    def _next_hint(self) -> str:
        stages = self._stages or list(self.hints)
        if len(stages) > 1:
            self._stages = stages[1:]
        return self.hints[stages[0]]


def plain(value: object) -> object:
    """Replace arrays and tensors by lists, also those in a list, a tuple or a dict."""
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    if type(value) is dict:
        return {key: plain(part) for key, part in value.items()}
    return value.tolist() if getattr(value, "ndim", 0) > 0 else value


def of_trial(run: Run, number: int) -> Run:
    """Return the run of several trials with the results of one."""
    return replace(run, results=[results[number] for results in run])


def first_difference(expected: object, got: object) -> object:
    """Return the first entry of two dicts in which they differ; None of anything else."""
    if not isinstance(expected, dict) or not isinstance(got, dict):
        return None
    return next(
        what
        for what in (expected | got)
        if what not in expected or what not in got or got[what] != expected[what]
    )


def ladder(trials: list[Trial], number: int, rung: int) -> str:
    """Draw a box for each trial, or for each case of one that has several: ✓, ✗, · not yet tried.

    The names stand beside the boxes where there is room, and always beside the failing one.
    """
    names, failed = [], rung
    for at, trial in enumerate(trials):
        failed += (len(trial.rungs) or 1) * (at < number)
        names += trial.rungs or [str(trial)]
    if number == len(trials):
        names.append("once more in the same process")
        failed = len(names) - 1
    if len(names) == 1:
        return ""
    if sum(map(len, names)) > ROOM:
        names = [name if at == failed else "" for at, name in enumerate(names)]
    boxes = []
    for at, name in enumerate(names):
        box = "✓" if at < failed else "✗" if at == failed else "·"
        boxes.append(f"{box} {name}".strip())
    return "Trials: " + ("  " if any(names[:failed] + names[failed + 1 :]) else " ").join(boxes)


def short(value: object) -> str:
    """Write a value as Python does; one that is too long ends after a comma."""
    text = repr(value)
    if len(text) <= LONGEST:
        return text
    start = text[:LONGEST]
    return f"{start[: start.rfind(',') + 1] or start} …"


def _stub():
    """Stand for an unwritten answer: its code is that of any body of only `...`."""


def is_stub(answer: Callable) -> bool:
    """Return True if the function's body is still only `...`, or as empty: `pass`, a docstring."""
    code = getattr(answer, "__code__", None)
    return code is not None and _opcodes(code) == _opcodes(_stub.__code__)


def returns_nothing(answer: Callable) -> bool:
    """Return True if it is a function that returns, but no value on any path."""
    code = getattr(inspect.unwrap(answer), "__code__", None)
    if code is None or inspect.isgeneratorfunction(answer):
        return False
    values = []
    for before, (op, value) in pairwise(_opcodes(code)):
        if op == "RETURN_VALUE":
            values.append(before != ("LOAD_CONST", None))
        elif op == "RETURN_CONST":
            values.append(value is not None)
    return not any(values) and len(values) > 0


def _opcodes(code) -> list[tuple[str, object]]:
    return [(op.opname, op.argval) for op in dis.get_instructions(code) if op.opname != "RESUME"]


# For trials


def rank_1_comes_last() -> None:
    """Hold rank 1 back until no other rank can go on without it.

    A rank that uses a message before it has waited for it, or overwrites one before it is taken,
    then fails every time, whatever the timing.
    """
    if dist.get_rank() != 1:
        return
    board = dist.group.WORLD.recorder.board
    while not all(s.rank == 1 or s.missing or s.state == "returned" for s in Look(board).now):
        if any(record.by_future for record in board.records(0)):
            return  # rank 0 waits in a place that leaves no record
        time.sleep(0.001)


@contextlib.contextmanager
def unwritten_memory_shows() -> Iterator[None]:
    """Fill the memory of torch.empty, while inside, with the largest integer or with NaN."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error")  # torch.utils.deterministic fills what is empty
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


# The wire


def messages(run: Run) -> Iterator:
    """Yield all sends of all ranks."""
    for records in run.wire:
        yield from (record for record in records if record.op == "send")


def place(record) -> str:
    """Describe where the call of a record is: function, line and the line's text."""
    return describe_place((record.file, record.line, record.function))


def never_waited(run: Run) -> str | None:
    """Name a message or collective that was begun in the background and never waited for."""
    for rank, records in enumerate(run.wire):
        for record in records:
            if record.waited is None:
                begun_by = f"i{record.op}" if record.op in ("send", "recv") else "async_op=True"
                future = ", not on its get_future(), which leaves no mark"
                future = future if record.by_future else ""
                return (
                    f"rank {rank} began {record.call} and never waited for it ({place(record)}).\n"
                    f"Keep what {begun_by} returns, and call wait() on it{future}: until then "
                    "nobody knows what is in the tensor."
                )
    return None


def _overwritten(run: Run) -> str | None:
    """Name a message that arrived with other numbers than it was sent with."""
    arrived = {}
    for records in run.wire:
        arrived.update({(r.channel, r.seq): r.result for r in records if r.op == "recv"})
    for rank, records in enumerate(run.wire):
        for record in records:
            got = arrived.get((record.channel, record.seq)) if record.op == "send" else None
            if None not in (got, record.values) and repr(got) != repr(record.values):  # NaN
                return (
                    f"rank {rank} sent {short(record.values)} to rank {record.peer}, and "
                    f"{short(got)} arrived ({place(record)}).\nSomebody wrote into it on the way: "
                    "leave alone what isend sends and irecv fills until wait() has returned."
                )
    return None


def ready_made(run: Run) -> str | None:
    """Name a collective of torch's where only messages are allowed."""
    ops = set()
    for records in run.wire:
        ops.update(r.op for r in records if r.op not in ("send", "recv", "new_group"))
    if not ops:
        return None
    return (
        f"the values are right, but the wire saw dist.{min(ops)}: torch did the work.\n"
        "Use only dist.send, dist.recv, dist.isend and dist.irecv."
    )


def check_wire(trial: Trial, run: Run) -> str | None:
    """Say what is wrong on the wire: a ready-made collective, or not `sent_bytes` sent in all."""
    by_torch = ready_made(run)
    if by_torch or trial.sent_bytes is None:
        return by_torch
    sent, needed = sum(record.bytes for record in messages(run)), trial.sent_bytes
    told = f"the values are right, but all ranks together sent {sent} bytes, "
    if sent > needed:
        return (
            f"{told}more than the {needed} that are needed.\n"
            "Replay it: which message holds what its receiver had already, or doesn't need?"
        )
    if sent < needed:
        return (
            f"{told}fewer than the {needed} that are needed.\n"
            "Did a rank know its result without being told, or send a smaller dtype? Every number "
            "must come by a message, as it is."
        )
    return None


# Reading a wrong sum: rank r brings 10**r, so every digit counts one rank.


def who_is_in(value: int, world_size: int) -> list[int]:
    """Count each rank's 10**rank in `value`: in [1, 0, 2] rank 1 is missing, rank 2 comes twice."""
    return [value // 10**rank % 10 for rank in range(world_size)]


def read_sum(value: int, world_size: int) -> str:
    """Say what is wrong with a sum that should count every rank once."""
    counts = who_is_in(value, world_size)
    missing = [rank for rank, count in enumerate(counts) if count == 0]
    twice = [rank for rank, count in enumerate(counts) if count > 1]
    parts = []
    for ranks, how in ((missing, "missing from it"), (twice, "in it more than once")):
        if ranks:
            parts.append(f"{name_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} {how}")
    return " and ".join(parts)
