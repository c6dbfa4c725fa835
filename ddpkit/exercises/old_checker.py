"""What all checkers share: run the answer on real ranks, compare with a slow specification, name the mistake."""

import dis
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ddpkit.runtime.errors import LaunchError
from ddpkit.runtime.hang import describe_place
from ddpkit.runtime.launch import Run, launch

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these

PATIENCE_S = 20.0
LIBRARYS_OWN = "# The library's own. It serves sub-groups, too, and names mistakes; the algorithm is in what remains."


@dataclass
class Trial:
    """One run of the answer on real ranks, and what must come out of it.

    program: called on every rank with the answer and `args`; returns plain data.
    expected: what it must return, by rank, from a specification that shares no code with the library; or a function
        that counts it on the wire of the run.
    sent_bytes: what all ranks together may send; None: any number.
    what: what the trial tries besides the number of ranks.
    """

    world_size: int
    program: Callable
    args: tuple
    expected: list | Callable[[Run], list]
    sent_bytes: int | None = None
    what: str = ""

    def __str__(self):
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        return f"{ranks}, {self.what}" if self.what else ranks


class Verdict:
    """What a check found. `passed` is None for an answer that is not written yet."""

    def __init__(self, passed: bool | None, text: str):
        self.passed, self.text = passed, text

    def __repr__(self):
        return self.text


class Exercise:
    """A checker: call it with the answer; ask it for a `hint()`, the `solution()`, or a `replay()` of what went wrong.

    trials: smallest world first, so that the first failure is the easiest to understand.
    praise: what a right answer hears; or called with the last trial and its run, and returns that.
    reference: the library's own function, which is also the solution; `helpers` are the library's functions that it
        calls and a reader must see to understand it. `note` stands above them.
    given: the methods of a class that the notebook gives; the reader writes the others.
    cause: called with a trial, the rank with a wrong result, what it should have and what it has; names the usual
        cause, or None. Where nothing names it, a hint is offered from the second failure on.
    races: called with a trial and its run; returns what makes the values a matter of luck, right or wrong, or None.
    wire: called with a trial and its run; returns what is wrong on the wire though the values are right, or None.
    beside: called with what should come and what came; returns how both are told, where one line is too short.
    """

    def __init__(
        self,
        reference: Callable,
        trials: Callable[[], Iterable[Trial]],
        hints: list[str],
        praise: str | Callable[[Trial, Run], str],
        cause: Callable[[Trial, int, object, object], str | None],
        wire: Callable[[Trial, Run], str | None] | None = None,
        helpers: tuple[Callable, ...] = (),
        races: Callable[[Trial, Run], str | None] | None = None,
        note: str = LIBRARYS_OWN,
        given: tuple[str, ...] = ("__init__",),
        beside: Callable[[object, object], str] | None = None,
    ):
        self.name, self.helpers, self.note, self.given = reference.__name__, helpers, note, given
        self.reference, self.trials, self.hints, self.praise = reference, trials, hints, praise
        self._cause, self._wire, self._races = cause, wire or _check_wire, races or (lambda trial, run: None)
        self._beside = beside
        self._hints_given = 0
        self._failures = 0
        self._failed: Run | LaunchError | None = None
        self._last: Run | None = None

    def __call__(self, answer: Callable) -> Verdict:
        """Run `answer`; what comes back shows as a line or a few: right, not written yet, or what is wrong and why."""
        if not callable(answer):
            return Verdict(False, f"✗ {self.name}: expected your function, got {answer!r}: leave the parentheses off")
        parts = self._to_write(answer)
        empty = [name for name, part in parts.items() if is_stub(inspect.unwrap(part))]
        if empty and len(empty) == len(parts):
            which = f": {', '.join(empty)}" if inspect.isclass(answer) else ""
            return Verdict(None, f"{self.name}: not written yet{which}")
        for trial in self.trials():
            problem, explained = self._problem(answer, trial)
            if problem:
                self._failures += 1
                lines = [f"✗ {self.name} on {trial}: {problem}"]
                if empty:
                    lines.append(f"{', '.join(empty)} {'is' if len(empty) == 1 else 'are'} still empty.")
                if self._failures > 1 and not explained and self._hints_given < len(self.hints):
                    lines.append(f"Hint: {self._next_hint()}")
                replay = " · .replay()" * any(self._failed.wire)  # only of what was said
                lines.append(f"More: check.{self.name}.hint(){replay} · .solution()")
                return Verdict(False, "\n".join(lines))
        self._failures = 0
        praise = self.praise(trial, self._last) if callable(self.praise) else self.praise
        return Verdict(True, f"✓ {self.name}: {praise}")

    def hint(self) -> Verdict:
        """The next hint; after the last one, the last one again."""
        return Verdict(None, self._next_hint())

    def solution(self) -> Verdict:
        """The reference's source, and that of the functions it calls."""
        parts = [inspect.getsource(inspect.unwrap(part)) for part in (self.reference, *self.helpers)]
        return Verdict(None, f"{self.note}\n" + "\n\n".join(parts))

    def replay(self):
        """A player of the smallest world in which the last answer failed: what your code really sent."""
        from ddpkit.lesson.player import player

        if self._failed is None:
            why = "nothing failed yet" if self._last is None else "the last check passed"
            return Verdict(None, f"{self.name}: {why}, so there is nothing to replay")
        if not (isinstance(self._failed, LaunchError) or any(self._failed.wire)):
            return Verdict(None, f"{self.name}: the ranks sent nothing, so there is nothing to replay")
        return player(self._failed)

    def _next_hint(self) -> str:
        hint = self.hints[min(self._hints_given, len(self.hints) - 1)]
        self._hints_given += 1
        return hint

    def _to_write(self, answer: Callable) -> dict[str, Callable]:
        """What the reader has to write, by name: the answer itself, or methods of it that the reference has, too.

        What is empty in the reference may stay so.
        """
        if not inspect.isclass(answer):
            return {self.name: answer}
        ours = {name: getattr(self.reference, name) for name in vars(self.reference) if name not in self.given}
        names = [name for name, part in ours.items() if inspect.isfunction(part) and not is_stub(part)]
        return {name: getattr(answer, name) for name in names if hasattr(answer, name)}

    def _problem(self, answer: Callable, trial: Trial) -> tuple[str | None, bool]:
        """What is wrong, and whether that names the cause."""
        try:
            run = self._last = self._failed = launch(
                trial.program,
                answer,
                *trial.args,
                world_size=trial.world_size,
                backend="gloo",
                keep_values=True,
                timeout=PATIENCE_S,
            )
        except LaunchError as error:
            self._failed = error
            return str(error), False
        luck = _forgotten_handle(run) or self._races(trial, run) or _overwritten(run)
        if luck:
            return luck, True
        everything = trial.expected(run) if callable(trial.expected) else trial.expected
        for rank, (expected, got) in enumerate(zip(everything, run, strict=True)):
            if got != expected:
                usual = self._cause(trial, rank, expected, got)
                problem = f"rank {rank} has {_short(got)}, expected {_short(expected)}."
                if self._beside:
                    problem = self._beside(expected, got)
                return (f"{problem}\n{usual}", True) if usual else (problem, False)
        problem = self._wire(trial, run)
        self._failed = self._failed if problem else None
        return problem, True


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


def _stub():
    """An unwritten answer: what Python makes of a body that is only `...`."""


def is_stub(answer: Callable) -> bool:
    """Whether the function's body is still only `...`."""
    code = getattr(answer, "__code__", None)
    return code is not None and _opcodes(code) == _opcodes(_stub.__code__)


def _opcodes(code) -> list[tuple[str, object]]:
    return [(step.opname, step.argval) for step in dis.get_instructions(code) if step.opname != "RESUME"]


# The wire.


def messages(run: Run) -> Iterator:
    """All sends of all ranks."""
    return (record for records in run.wire for record in records if record.op == "send")


def _forgotten_handle(run: Run) -> str | None:
    """A message that was begun with isend or irecv, and that nobody waited for: it may arrive late, or never."""
    for rank, records in enumerate(run.wire):
        for record in records:
            if record.op in ("send", "recv") and record.waited is None:
                place = describe_place((record.file, record.line, record.function))
                return (
                    f"rank {rank} began {record.call} and never waited for it ({place}).\n"
                    f"Keep what {'isend' if record.op == 'send' else 'irecv'} returns, and call wait() on it."
                )
    return None


def _overwritten(run: Run) -> str | None:
    """A message that arrived with other numbers than it was sent with."""
    arrived = {(r.channel, r.seq): r.result for records in run.wire for r in records if r.op == "recv"}
    for rank, records in enumerate(run.wire):
        for record in records:
            got = arrived.get((record.channel, record.seq)) if record.op == "send" else None
            if None not in (got, record.values) and got != record.values:
                place = describe_place((record.file, record.line, record.function))
                return (
                    f"rank {rank} sent {_short(record.values)} to rank {record.peer}, and {_short(got)} arrived "
                    f"({place}).\nSomebody wrote into it on the way: leave alone what isend sends and irecv fills "
                    "until wait() has returned."
                )
    return None


def ready_made(run: Run) -> str | None:
    """A collective of torch's, where only messages were allowed."""
    ops = sorted({r.op for records in run.wire for r in records if r.op not in ("send", "recv", "new_group")})
    if not ops:
        return None
    return (
        f"the values are right, but the wire saw dist.{ops[0]}: torch did the work.\n"
        "Use only dist.send, dist.recv, dist.isend and dist.irecv."
    )


def _check_wire(trial: Trial, run: Run) -> str | None:
    """Only messages, no ready-made collectives; each byte sent once."""
    by_torch = ready_made(run)
    if by_torch:
        return by_torch
    sent = sum(record.bytes for record in messages(run))
    if trial.sent_bytes is not None and sent != trial.sent_bytes:
        more = "more" if sent > trial.sent_bytes else "fewer"
        return (
            f"the values are right, but all ranks together sent {sent} bytes, {more} than the {trial.sent_bytes} "
            "that are needed.\nReplay it: which message holds what its receiver had already, or doesn't need?"
        )
    return None


# Reading a wrong sum: rank r brings 10**r, so every digit counts one rank.


def who_is_in(value: int, world_size: int) -> list[int]:
    """How often each rank's 10**rank is in `value`: [1, 0, 2] says rank 1 is missing and rank 2 counted twice."""
    return [value // 10**rank % 10 for rank in range(world_size)]


def read_sum(value: int, world_size: int) -> str:
    """In words, what is wrong with a sum that should count every rank once."""
    counts = who_is_in(value, world_size)
    missing = [str(rank) for rank, count in enumerate(counts) if count == 0]
    twice = [str(rank) for rank, count in enumerate(counts) if count > 1]
    parts = []
    if missing:
        parts.append(f"rank {', '.join(missing)} is missing from it")
    if twice:
        parts.append(f"rank {', '.join(twice)} is in it more than once")
    return " and ".join(parts)
