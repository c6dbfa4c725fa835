"""Two trainings beside each other: where do they part, on which ranks, and by which factor?

A wrong gradient is often a multiple of the serial one, whose factor names the cause: W, the number
of ranks, is a sum where a mean is due; m, the number of micro-batches, a loss that wasn't divided
by it. Where no one factor fits, `shares` looks for one for each rank's micro-batches.

Tolerance. A sum of n numbers is off by at most (n-1)·ε/2 of its terms' sizes, whatever the order
(Higham 2002, 4.2), so two such sums differ by less than n·ε; roundings that don't conspire stay
within 6·√n·ε (Higham and Mary 2019). The smaller of the two is taken, since a long sum would
otherwise hide a factor. Each of the d layers with parameters hands its error to the next: to first
order, gradients of two right runs differ by no more than d times that. Each update adds its error
to those before it, so step s is allowed s + 1 times as much. ε is that of the narrowest dtype of
the serial parameters and, after the start, of what modules return (autocast). In bfloat16 the
product may exceed the tensor itself, and anything would pass: LOOSEST is the most that is allowed,
and right runs stay far below it. Between exact twins (`to_the_bit`) the tolerance is 0.
"""

import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from ..tools.units import count
from .causes import (
    NO_FACTOR,
    NO_MODULE,
    NOT_NAMED,
    explained,
    first_output,
    of_the_forward,
    of_the_update,
    steps_apart,
    written_between,
    wrong_rates,
)
from .ratios import LOOSEST, added, alike, apart, epsilon, mean_of, near, part_that_differs, ratio
from .report import NOTHING, SHOWN, Difference, Report
from .samples import other_samples
from .shares import OTHER_TERMS
from .tape import Step, Tape

FLOOR = 1e-3  # of all tensors together: one that is shorter is judged as if it had this length


def compare(
    serial: Tape,
    parallel: list[Tape],
    rename: dict[str, str] | None = None,
    to_the_bit: bool = False,
) -> Report:
    """Compare a serial and a parallel training, up to the first step that differs.

    serial: the tape of the run on one rank. parallel: the tapes of all ranks of the other run, in
    order. rename: {parameter's name in the parallel model: in the serial one}. to_the_bit: allow no
    roundings, for exact twins. A rank may lack tensors that another has (a pipeline's). Parameters
    that the serial model lacks aren't compared, nor steps that a tape lacks.
    ValueError: a rank and the serial run have no parameter's name in common, or no rank has a name
    in `rename`, or the serial run hasn't.
    """
    rename = rename or {}
    check_rename(serial, parallel, rename)
    for tape in parallel:
        check_names(serial, tape, rename)
    parallel = [with_serial_names(tape, rename) for tape in parallel]
    steps = min(len(tape.steps) for tape in (serial, *parallel))
    largest = max(epsilon(serial.begin), serial.epsilon)
    tolerance = 0.0 if to_the_bit else allowed_by(largest, serial)
    report = Report(steps, len(serial.begin), tolerance)
    if largest <= torch.finfo(torch.float32).eps:
        report.finer = "a smaller batch, or float64,"
    ranks = len(parallel)

    def differing(step: int, what: str, expected: dict, of: list[dict], before=None) -> bool:
        allowed = min(LOOSEST, tolerance * (step + 1))
        if step < 0 and not to_the_bit:  # nothing has been computed yet
            allowed = allowed_by(epsilon(serial.begin), serial)
        report.differences += judge(step, what, expected, of, allowed, before)
        return bool(report.differences)

    lost, elsewhere = other_names(serial, parallel)
    if elsewhere:
        report.undecided = True
        report.causes.append(elsewhere)
        return report
    parts = other_shapes(serial, parallel)
    if differing(-1, "parameter", serial.begin, [tape.begin for tape in parallel]):
        report.undecided = bool(parts)
        report.causes += parts
        if lost and not parts:
            report.causes.append(f"no rank has {', '.join(lost[:SHOWN])}: what is left out there?")
        if not parts and any(difference.names != lost for difference in report.differences):
            report.causes.append(
                "the runs don't begin alike: other seeds (--seed), ranks that draw only their own "
                "layers (--ranks-parameters), nobody broadcasts, or one loads what another has "
                "saved (--apart)"
            )
        return report
    for step in range(steps):
        ours = serial.steps[step]
        theirs = [tape.steps[step] for tape in parallel]
        if differing(step, "gradient", ours.gradients, [taken.gradients for taken in theirs]):
            of_ranks = [taken.samples for taken in theirs]
            others, report.undecided = other_samples(ours.samples, of_ranks)
            before = map(list, zip(*(tape.steps[:step] for tape in parallel), strict=True))
            skipped = "" if any(map(steps_apart, before)) else steps_apart(theirs)
            if skipped and step:  # the rank that skipped has the samples of a later step
                others, report.undecided = "", False
            causes = written_between(step, ours, theirs)
            causes += [cause for cause in (skipped, others) if cause]
            if not causes or (causes == [skipped] and step == 0):
                factors = explained(report.differences, ranks, ours, theirs)
                causes += [cause for cause in factors if not causes or cause != NO_FACTOR]
            if not {NO_FACTOR, OTHER_TERMS}.isdisjoint(causes):
                hints, draws = of_the_forward(ours, theirs)
                causes += hints
                report.undecided = report.undecided or draws
            report.causes += causes
            if step == 0 and (where := first_output(serial, parallel, tolerance)):
                report.causes = [where, *(cause for cause in report.causes if cause != NO_FACTOR)]
            break
        # Gradients agree here, so what differs now comes from the update alone.
        before = serial.steps[step - 1].parameters if step else serial.begin
        after = [taken.parameters for taken in theirs]
        report.differences += at_other_rates(step, before, ours, theirs)
        if report.differences or differing(step, "update", ours.parameters, after, before):
            report.causes += of_the_update(step, report.differences, ours, theirs)
            break
    else:
        report.causes += unequal_steps(serial, parallel)
        if steps and not serial.begin:
            report.undecided = True
            report.causes.append(NO_MODULE)
        elif steps and not any(moves(step) for step in serial.steps):
            report.undecided = True
            report.causes.append("every gradient is 0, in every step: nothing is trained")
        elif unseen := max(tape.unseen for tape in (serial, *parallel)):
            report.undecided = True
            report.causes.append(NOT_NAMED.format(count(unseen, "tensor")))
    return report


def moves(step: Step) -> bool:
    """Return whether a step has a gradient that isn't 0."""
    return any(gradient is not None and gradient.any() for gradient in step.gradients.values())


def at_other_rates(step: int, before: Mapping, ours: Step, theirs: list[Step]) -> list[Difference]:
    """List updates that differ where ranks have other learning rates, however short they are.

    before: the serial parameters before the step. If all updates agree, to a quarter (`LOOSEST`),
    the rates are listed, or [] if one is farther off: then it isn't what moves the parameters.
    """
    wrong = wrong_rates(ours, theirs)
    if not wrong:
        return []
    start = {name: before[name] for name in ours.parameters if name in before}
    due, *added = [moved(start, taken.parameters) for taken in (ours, *theirs)]
    found = judge(step, "update", due, added, LOOSEST)
    if found:
        return found
    for got in wrong.values():
        if not any(near(got, x, LOOSEST) for x in ours.rates):
            return []
    where = tuple(wrong), len(wrong) == len(theirs)
    other = "not the serial one"
    return [Difference(step, "learning rate", ["an optimizer"], *where, None, 0.0, part=other)]


def moved(before: Mapping, after: Mapping) -> dict[str, Tensor]:
    return {name: after[name].double() - x.double() for name, x in before.items() if name in after}


def unequal_steps(serial: Tape, parallel: list[Tape]) -> list[str]:
    """Return a sentence for each rank that recorded fewer or more updates than the serial run."""
    due = len(serial.steps)
    counts = [(rank, len(tape.steps)) for rank, tape in enumerate(parallel)]
    return [f"rank {rank} made {n} updates, the serial run {due}" for rank, n in counts if n != due]


def other_shapes(serial: Tape, parallel: list[Tape]) -> list[str]:
    """Return one sentence, on the first parameter whose shape on a rank isn't the serial; or []."""
    for tape in parallel:
        for name, value in tape.begin.items():
            due = tuple(serial.begin[name].shape) if name in serial.begin else value.shape
            if value.shape != due:
                shapes = f"{tuple(value.shape)} on rank {tape.rank}, {due} serially"
                part = "a part of a kind that the audit can't put together"
                return [f"{name} is {shapes}: {part}; DTensors it can"]
    return []


def check_names(serial: Tape, tape: Tape, rename: dict[str, str]) -> None:
    theirs = {rename.get(name, name) for name in tape.begin}
    if serial.begin and theirs and not theirs & set(serial.begin):
        got = f"{next(iter(tape.begin))!r} on rank {tape.rank}, {next(iter(serial.begin))!r} in the"
        raise ValueError(f"expected parameters of the same names, got {got} serial run: use rename")


def check_rename(serial: Tape, parallel: list[Tape], rename: dict[str, str]) -> None:
    theirs = set(chain(*map(all_names, parallel)))
    due = all_names(serial)
    for new, old in rename.items() if theirs and due else ():
        if new not in theirs or old not in due:
            wanted = "expected to rename a parameter that a rank has to one of the serial run"
            raise ValueError(f"{wanted}, got {new}={old}")


def all_names(tape: Tape) -> set[str]:
    """Return the names of all parameters, also of modules first called after the beginning."""
    return set(tape.begin).union(*(step.parameters for step in tape.steps))


def other_names(serial: Tape, parallel: list[Tape]) -> tuple[list[str], str]:
    """Return (serial parameters that no rank has, a sentence on those that only ranks have).

    The sentence is "" if none of these has the shape of a lost one.
    """
    theirs = {name: x for tape in parallel for name, x in tape.begin.items()}
    lost = {name: x for name, x in serial.begin.items() if name not in theirs}
    shapes = [x.shape for x in lost.values()]
    new = [n for n, x in theirs.items() if n not in serial.begin and x.shape in shapes]
    if not new:
        return [*lost], ""
    first = theirs[new[0]]
    fitting = [name for name, x in lost.items() if x.shape == first.shape]
    old = next((name for name in fitting if torch.equal(lost[name], first)), fitting[0])
    return [*lost], (
        f"no rank has {', '.join([*lost][:SHOWN])}, the serial run no {', '.join(new[:SHOWN])}: if "
        f"these are the same, --rename {new[0]}={old}, for each"
    )


def with_serial_names(tape: Tape, rename: dict[str, str]) -> Tape:
    """Return a rank's tape with the serial names of parameters and modules; a copy if any differ.

    rename: {parameter's name in the parallel model: in the serial one}.
    """
    if not rename:
        return tape
    named = copy.copy(tape)
    named.begin = with_names(tape.begin, rename)
    modules = renamed_modules(tape, rename)
    named.outputs = {modules[m]: output for m, output in tape.outputs.items() if m in modules}
    named.steps = [step_with_serial_names(step, rename) for step in tape.steps]
    return named


def renamed_modules(tape: Tape, rename: dict[str, str]) -> dict[str, str]:
    """Return {module: its serial name} for the modules whose serial name is certain.

    It is certain if all parameters in a module have moved alike: {"a.0.weight": "b.0.weight"}
    renames "a" and "a.0" if they hold no other parameter. The model itself, "", otherwise keeps its
    name. Modules without parameters are left out, and so are modules that would share a name.
    """
    found = {}
    for module in tape.outputs:
        start = f"{module}." if module else ""
        starts = set()
        for name in tape.begin:
            if name.startswith(start):
                serial, rest = rename.get(name, name), name[len(start) :]
                alike = serial == rest or serial.endswith(f".{rest}")
                starts.add(serial.removesuffix(rest) if alike else None)
        if len(starts) == 1 and None not in starts:
            found[module] = starts.pop().removesuffix(".")
    if "" in tape.outputs and "" not in found.values():
        found.setdefault("", "")
    names = Counter(found.values())
    return {module: serial for module, serial in found.items() if names[serial] == 1}


def step_with_serial_names(step: Step, rename: dict[str, str]) -> Step:
    return replace(
        step,
        gradients=with_names(step.gradients, rename),
        parameters=with_names(step.parameters, rename),
        last=with_names(step.last, rename),
        parts=[with_names(part, rename) for part in step.parts],
        written=[*with_names(dict.fromkeys(step.written), rename)],
    )


def with_names(by_name: Mapping, rename: dict[str, str]) -> dict:
    """Return a dict with the same values, in the same order, and other keys."""
    return {rename.get(name, name): value for name, value in by_name.items()}


def allowed_by(largest: float, serial: Tape) -> float:
    """Return the tolerance of the first step, for numbers with an ε of `largest`."""
    terms = min(serial.longest, 6 * serial.longest**0.5)
    return min(LOOSEST, largest * terms * max(1, serial.depth))


def judge(
    step: int,
    what: str,
    expected: dict[str, Tensor | None],
    of: list[dict],
    tolerance: float,
    before: dict[str, Tensor | None] | None = None,
) -> list[Difference]:
    """List what differs on any rank, in the model's order; tensors that differ alike are one entry.

    what: "gradient", "update" or "parameter". expected: the serial run's tensors. of: each rank's,
    under the serial names. tolerance: a share of a tensor's length. before: the serial parameters
    before the update; then factors are of what the update added, not of the parameters.
    A tensor that no rank has is listed with factor 0; one that `expected` lacks isn't looked at.
    """
    whole = sum(x.double().square().sum().item() for x in expected.values() if x is not None)
    there = sum(x is not None for x in expected.values())
    floor = FLOOR * whole**0.5 if tolerance else 0.0
    found: dict[tuple, Difference] = {}
    pairs: dict[tuple, list[tuple]] = {}  # by the same keys, (a rank's tensor, the serial one)
    for name, x in expected.items():
        holders = [rank for rank, tensors in enumerate(of) if name in tensors]
        if not holders:  # the parallel model lacks it, on every rank
            key = "missing", what
            everyone = tuple(range(len(of)))
            lost = Difference(step, what, [], everyone, True, 0.0, 1.0, of=there)
            found.setdefault(key, lost).names.append(name)
            continue
        values = {rank: of[rank][name] for rank in holders}
        wrong = {}
        least = floor
        if before and name in before:  # what it is updated from may be longer than what it becomes
            least = max(floor, before[name].double().norm().item()) if tolerance else 0.0
        for rank, value in values.items():
            factor, error, same = ratio(value, x, tolerance, least)
            if not same:
                wrong[rank] = factor, error
        if not wrong:
            continue
        within, least = tolerance, floor
        if before and name in before:
            within, x, values = added(before[name], x, values, tolerance)
            least = 0.0  # a short update is judged as such
            wrong = {rank: ratio(values[rank], x, within, least)[:2] for rank in wrong}
        factors = {None if f is None else round(f, 3) for f, _ in wrong.values()}
        everywhere = len(wrong) == len(holders)
        factor, error = next(iter(wrong.values()))
        own, part = False, ""
        if factors == {None}:
            parts = {part_that_differs(values[rank], x, within, least) for rank in wrong}
            part = parts.pop() if len(parts) == 1 else ""
            part = part or ("" if x is not None and x.any() else NOTHING)
        if len(holders) > 1 and (len(factors) > 1 or factors == {None}):
            mean = mean_of(list(values.values()))
            of_mean, left, _ = ratio(mean, x, within, least)
            own = of_mean is not None and of_mean != 0 and not alike(list(values.values()))
            factor, error = (of_mean, left) if own else (None, error)
        on = () if everywhere else tuple(wrong)  # stages of a pipeline have other holders
        key = (on, None if factor is None else round(factor, 3), own, part)
        first = Difference(step, what, [], (), everywhere, factor, error, own, there, part)
        entry = found.setdefault(key, first)
        entry.names.append(name)
        entry.ranks = tuple(sorted({*entry.ranks, *wrong}))
        pairs.setdefault(key, []).append((values[min(wrong)], x))
    for key, entry in found.items():
        if entry.factor is None and not entry.part:
            entry.part = f"no one factor{apart(pairs[key])}"
    return list(found.values())
