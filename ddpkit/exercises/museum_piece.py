"""A piece of the museum: code that looks right, what it showed, and a check of what is wrong.

    museum.late_flag(mechanism=..., number=...)     # shows code, symptom, question, choices
    museum.late_flag(mechanism="b", number=2)       # judges both, by running it

Each choice is a mechanism, and brings a repair of the code. A choice is right if the code, so
repaired, has the same numbers on all ranks as the run on one process; "sound" is right if the code
itself has. The number is measured as well: nothing is judged by what is written here.
"""

import contextlib
import dataclasses
import linecache
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import init_device_mesh

from ddpkit.audit import Tape, compare
from ddpkit.audit.tape import Step
from ddpkit.runtime.errors import LaunchError
from ddpkit.runtime.launch import launch
from ddpkit.tensor_parallel.split import join, splits
from ddpkit.tools.units import wrap

from .checker import Mistake, Verdict, mistakes, source_of
from .museum_case import DATA, Case

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these

PATIENCE_S = 120.0  # no choice hangs, so it is for machines that are busy
# Of a tensor's length, in float64: sums of some hundred numbers are off by 1e-13 at most, and no
# bug of the museum is as small as 1e-6.
TOLERANCE = 1e-10
STEPS = 2  # that the audit compares: some bugs begin with the second
CLOSE = 0.01  # of the number that is asked for
SOUND = "sound"
Seen = Mapping[str, Tensor]  # of a run, on one rank
Trained = nn.Module | Mapping[str, object]
Train = Callable[[Case], Trained]
Measure = Callable[[list[Seen], list[Seen]], float]  # from the ranks' runs, and what is right


# One run


def see(trained: Trained) -> dict[str, Tensor]:
    """Return a module's parameters and gradients by name, parts joined; of a dict, its numbers."""
    if not isinstance(trained, nn.Module):
        return {name: torch.as_tensor(value).detach().clone() for name, value in trained.items()}
    split = splits(trained)
    found = {}
    for name, parameter in trained.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for what, value in ((name, parameter), (f"gradient of {name}", gradient)):
            whole = join(value, *split[name], None) if name in split else value
            found[what] = whole.detach().clone()
    return found


def on_meshes(cases: list[Case]) -> list[Case]:
    """Return the cases, all of one mesh, with that mesh made; without inner groups, as they are."""
    if cases[0].inner == 1:
        return cases
    shape = cases[0].ranks // cases[0].inner, cases[0].inner
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "inner"))
    return [dataclasses.replace(case, mesh=mesh) for case in cases]


def run_on_a_rank(train: Train, serial: Train, cases: list[Case]) -> list[tuple]:
    """Return (what a run has, what is right) for each case; all cases are of one mesh."""
    return [(see(train(case)), see(serial(case))) for case in on_meshes(cases)]


def same(got: Tensor, right: Tensor) -> bool:
    if got.shape != right.shape:
        return False
    difference = (got.double() - right.double()).norm().item()
    return difference <= TOLERANCE * max(1.0, right.double().norm().item())  # never true of a NaN


def differing(got: Seen, right: Seen) -> list[str]:
    """List the names of what isn't as on one process; a rank may hold a part of the names."""
    found = [name for name in got if not same(got[name], right[name])]
    return sorted(found, key=lambda name: not name.startswith("gradient"))  # the cause first


def judged_on_a_rank(train: Train, serial: Train, cases: list[Case]) -> list[tuple]:
    """Compare a run with one process, by case: (this rank's numbers differ, the training differs).

    The second is the audit's verdict on all ranks' tapes, or recordings: see `differs_by_audit`.
    """
    found = []
    for case in on_meshes(cases):
        with Tape(STEPS) as mine:
            got = see(train(case))
        alone = Tape(STEPS)  # all ranks compute it, one listens
        with alone if dist.get_rank() == 0 else contextlib.nullcontext():
            right = see(serial(case))
        found.append((bool(differing(got, right)), differs_by_audit(alone, mine)))
    return found


def differs_by_audit(alone: Tape, mine: Tape) -> bool | None:
    """Return, on rank 0, whether the ranks' tapes differ from `alone`, the tape of one process.

    mine: this rank's. None on other ranks, and if nothing trains.
    """
    tapes = [None] * dist.get_world_size()
    sent = only_numbers(mine, lambda x: x.double().numpy())  # pickled 8 times as fast as tensors
    dist.gather_object(sent, tapes if dist.get_rank() == 0 else None)
    gradients = [x for step in alone.steps for x in step.gradients.values() if x is not None]
    if dist.get_rank() or not gradients:
        return None
    return not compare(alone, [only_numbers(tape, torch.from_numpy) for tape in tapes]).fine


def only_numbers(tape: Tape, convert: Callable) -> Tape:
    """Return a tape with only what the verdict needs, its tensors converted."""

    def all_of(tensors: dict) -> dict:
        return {name: None if x is None else convert(x) for name, x in tensors.items()}

    found = Tape(tape.most)
    found.rank, found.begin = tape.rank, all_of(tape.begin)
    for step in tape.steps:
        gradients, parameters = all_of(step.gradients), all_of(step.parameters)
        found.steps.append(Step(step.losses, gradients, parameters, rates=step.rates))
    return found


def factor_of(got: Tensor, right: Tensor) -> float:
    """Return the number that comes nearest to got / right."""
    a = got.double()
    b = right.double()
    return ((a * b).sum() / (b * b).sum()).item()


# What a piece asks for, measured


def factor(name: str, rank: int = 0) -> Measure:
    """Measure how many times as large as the right one a rank's tensor `name` is."""
    return lambda got, right: factor_of(got[rank][name], right[rank][name])


def value(name: str, rank: int = 0) -> Measure:
    """Take a number that the run itself returns."""
    return lambda got, right: got[rank][name].item()


def counted(name: str, rank: int = 0) -> Measure:
    """Count the columns that aren't 0: micro-batches that are in the gradient."""
    return lambda got, right: float((got[rank][name] != 0).any(0).sum())


def weight_of(column: int, name: str = "gradient of first.weight", rank: int = 0) -> Measure:
    """Measure how many times too much a micro-batch counts: 1 is right."""
    return lambda got, right: factor_of(got[rank][name][:, column], right[rank][name][:, column])


# Pieces


@dataclass(kw_only=True, repr=False)
class Piece:
    """A piece; call it with `mechanism`, one of its choices, and `number`, what it asks for.

    code: trains on all ranks of a case. serial: the same on one process. symptom: what people saw.
    source: where it was found. choices: mechanisms with repairs, as a table of `checker.mistakes`;
    "sound" is always one more. why: what there is to know afterwards. case: the run that is judged;
    meshes: those of `python -m ddpkit.exercises.museum`. asks: for the number that `measure` finds.
    """

    code: Train
    serial: Train
    source: str
    symptom: str
    asks: str
    measure: Measure
    choices: str
    why: str
    case: Case
    meshes: tuple[Case, ...] = DATA
    first: tuple[bool, bool] | None = field(default=None, init=False)  # right: mechanism, number
    false_alarm: bool = field(default=False, init=False)

    @property
    def name(self) -> str:
        return self.code.__name__

    def __repr__(self):
        return f"museum.{self.name}: call it with mechanism=..., number=..."

    @cached_property
    def repairs(self) -> dict[str, Mistake]:
        return {repair.name: repair for repair in mistakes(self.choices)}

    def repaired(self, mechanism: str) -> Train:
        """Return the code, repaired as a choice says; the code itself for "sound"."""
        if mechanism == SOUND:
            return self.code
        return self.repairs[mechanism].applied_to(self.code)

    def run(self, mechanism: str, case: Case, seeds: int = 1, on_a_rank=run_on_a_rank) -> list:
        """Run `repaired(mechanism)` with `seeds` seeds from the case's; return results by rank."""
        cases = [case.with_seed(case.seed + more) for more in range(seeds)]
        run = launch(
            on_a_rank,
            self.repaired(mechanism),
            self.serial,
            cases,
            world_size=case.ranks,
            backend="gloo",
            timeout=PATIENCE_S + seeds,
        )
        return list(run)

    def wrong_with(self, mechanism: str = SOUND) -> str:
        """Say how the code, so repaired, differs from the one process; "" if it doesn't."""
        try:
            found = self.run(mechanism, self.case)
        except LaunchError as error:
            return str(error).partition("\n")[0].rstrip(".")
        for rank, ((got, right),) in enumerate(found):
            names = differing(got, right)
            if names:
                times = factor_of(got[names[0]], right[names[0]])
                plain = same(got[names[0]], right[names[0]].double() * times) and times != 0
                how = f"×{times:.4g}" if plain else "other numbers"
                return f"on rank {rank}, {names[0]} has {how}"
        return ""

    def right(self) -> str:
        """Find the choice that makes it the run on one process."""
        return next(name for name in (SOUND, *self.repairs) if not self.wrong_with(name))

    def measured(self) -> float:
        """Measure what the piece asks for."""
        found = self.run(SOUND, self.case)
        return self.measure([seeds[0][0] for seeds in found], [seeds[0][1] for seeds in found])

    def __call__(self, mechanism: object = ..., number: object = ...) -> Verdict:
        """Show the piece; with both answers, judge them."""
        if mechanism is ... and number is ...:
            return Page(None, *self.page(), title=f"museum.{self.name}")
        if mechanism is ... or number is ...:
            missing = "mechanism" if mechanism is ... else "number"
            told = f"the {missing} is missing: both are judged together."
            return Verdict(None, f"{self.name}: {told} museum.{self.name}() shows the piece.")
        if mechanism not in (*self.repairs, SOUND):
            names = ", ".join(f'"{name}"' for name in self.repairs)
            told = f'expected mechanism to be {names} or "{SOUND}", got {mechanism!r}'
            return Verdict(False, f"✗ {self.name}: {told}")
        if isinstance(number, bool) or not isinstance(number, int | float):
            return Verdict(False, f"✗ {self.name}: expected a number, got {number!r}")
        wrong = self.wrong_with(mechanism)
        measured = self.measured()
        near = abs(number - measured) <= CLOSE * max(abs(measured), 1e-12)
        if self.first is None:
            self.first = not wrong, near
            self.false_alarm = mechanism != SOUND and not self.wrong_with()
        lines = [self.of_the_mechanism(mechanism, wrong), of_the_number(number, near)]
        lines = lines if wrong else lines[::-1]  # what is wrong comes first
        passed = near and not wrong
        if passed:
            lines = [f"✓ {self.name}: mechanism and number. {self.why} Source: {self.source}."]
        else:
            lines[0] = f"✗ {self.name}: {lines[0]}"
            lines.append(f"More: museum.{self.name}() shows it again · .solution()")
        return Verdict(passed, *lines, folds=lambda: {"solution": self.solution().text})

    def of_the_mechanism(self, mechanism: str, wrong: str) -> str:
        run = f"the run on {self.case}"
        if not wrong:
            return "the mechanism is right."
        if mechanism == SOUND:
            return f"it isn't sound: {run} isn't the run on one process, {wrong}."
        if not self.wrong_with():
            return f"a false alarm: {run} is the run on one process, and so repaired: {wrong}."
        return f"not that: repaired as {mechanism} says, {run} isn't that on one: {wrong}."

    def page(self) -> list[str]:
        """Return the piece as it hangs: code, symptom, question, choices."""
        options = [f"  {name}: {repair.says}" for name, repair in self.repairs.items()]
        return [
            f"museum.{self.name}, on {self.case}",
            f"\n{source_of(self.code).rstrip()}\n",
            self.symptom,
            f"number: {self.asks}",
            "mechanism:",
            *options,
            f'  "{SOUND}": nothing is wrong',
        ]

    def solution(self) -> Verdict:
        """Show what is right, both as measured, the repaired code, and the source."""
        right = self.right()
        told = f"mechanism {right!r}, number {self.measured():.4g}. {self.why} Source:"
        lines = [wrap(f"{told} {self.source}."), ""]
        if right in self.repairs:
            file = self.repaired(right).__code__.co_filename
            lines.append(source_in(file))
        return Page(None, "\n".join(lines), title="solution")


class Page(Verdict):
    """A verdict whose code keeps its lines; the rest is wrapped."""

    def __repr__(self):
        return "\n".join(part if "\n" in part else wrapped(part) for part in self._said)


def wrapped(text: str) -> str:
    indent = "     " if text.startswith("  ") else ""
    return textwrap.fill(text, 72, subsequent_indent=indent)


def source_in(file: str) -> str:
    """Return a repaired piece's source; `file` is the name it was compiled with, not on disk."""
    return "".join(linecache.getlines(file))


def of_the_number(number: float, near: bool) -> str:
    return "the number is right." if near else f"the number isn't {number:g}."
