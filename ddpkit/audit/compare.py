"""Two trainings beside each other: where do they part, on which ranks, and by which factor?

A factor names its cause: W is a sum where a mean is due, m a loss that wasn't divided by the number
of micro-batches. So the report says the ratio where it is one number. Where it isn't, `shares`
looks for a factor of each rank's micro-batches.

Tolerance. A sum of n numbers is off by at most (n-1)·ε/2 of its terms' sizes, whatever the order
(Higham 2002, 4.2); roundings that don't conspire stay within 6·√n·ε (Higham and Mary 2019). The
smaller of the two is taken, or a long sum would hide a factor. Each of the d layers above hands its
error on: to first order, gradients of two right runs differ by no more than d times that. An update
adds a step's error to those before it. ε is that of the narrowest dtype. In bfloat16 that may
exceed the tensor itself, and anything would pass: LOOSEST is the most that is allowed, and right
runs stay far below it. Where numbers are integers (`exact`), the tolerance is 0.
"""

from dataclasses import dataclass, field
from math import isfinite, log2

import torch
from torch import Tensor

from .samples import other_samples
from .shares import kept, shares
from .tape import SOME, Step, Tape

FLOOR = 1e-3  # of the whole gradient: a tensor that is shorter is judged as if it had this length
LOOSEST = 0.25  # of a tensor's length: a factor of 2 is more, roundings of bfloat16 are 1 or 2 %
LATITUDE = 0.05  # of a factor, for roundings
NO_FACTOR = (
    "no one factor: the mean of unequal parts' means, other data, a stale or partial sum, "
    "a missing term"
)
SHOWN = 4  # names in a line, and rows
LOSS_SCALE = 2**8  # powers of two from here on, and their reciprocals, are one that is left over


@dataclass
class Difference:
    """Tensors that differ in the same way.

    step: from 0; -1 is the start. what: 'gradient', 'update', 'parameter'. names: in the model's
    order. ranks: where; all: on every rank. factor: the ratio to the serial run, None if it isn't
    one number. error: what is left without the factor, as a share of the serial tensor. own: each
    rank has a gradient of its own, and their mean is `factor` times the serial one. part: the rows
    that differ, where others are right, as "rows 2 to 7 of 8: ×0".
    """

    step: int
    what: str
    names: list[str]
    ranks: tuple[int, ...]
    all: bool
    factor: float | None
    error: float
    own: bool = False
    of: int = 0  # tensors that there are
    part: str = ""

    def __str__(self) -> str:
        where = "on every rank" if self.all else f"on rank {', '.join(map(str, self.ranks))} only"
        if self.own:
            where = "each rank has its own"
        ratio = self.part or "no one factor"
        if self.factor is not None:
            ratio = f"×{self.factor:.4g}"
            if near(self.factor, 1) and not self.own:
                ratio += f" but for {self.error:.0e} of its length"
        when = "at the start" if self.step < 0 else f"step {self.step}"
        return f"{when}, {self.what} of {self.named}: {ratio}, {where}"

    @property
    def named(self) -> str:
        more = f" and {len(self.names) - SHOWN} more" if len(self.names) > SHOWN else ""
        listed = f"{', '.join(self.names[:SHOWN])}{more}"
        return f"all {self.of} tensors" if len(self.names) == self.of > 1 else listed


@dataclass
class Report:
    """The differences between a serial and a parallel training; `fine` if there are none.

    steps: that were compared. tensors: in each. tolerance: of a gradient in the first step.
    undecided: ranks used samples that the serial run didn't, or hold parts that can't be put
    together, or all gradients are 0.
    """

    steps: int
    tensors: int
    tolerance: float
    differences: list[Difference] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)
    optimizer: str = ""
    undecided: bool = False

    @property
    def fine(self) -> bool:
        return not self.differences and not self.causes and self.steps > 0

    def __str__(self) -> str:
        if self.steps == 0:
            return "nothing to compare: no optimizer stepped after a backward"
        if self.fine:
            within = "to the last bit" if self.tolerance == 0 else f"within {self.tolerance:.1e}"
            compared = f"{self.steps} steps, {self.tensors} gradients and parameters in each"
            coarse = " (float32 would show more)" if self.tolerance == LOOSEST else ""
            return f"the same training: {compared}, equal {within}{coarse}"
        with_it = f" (with {self.optimizer})" if self.optimizer else ""
        begins = f"not the same training{with_it}; it begins here:"
        lines = [f"whether it is the same training can't be told{with_it}:"]
        lines = lines if self.undecided else [begins]
        lines += [f"  {difference}" for difference in self.differences]
        return "\n".join(lines + [f"  {cause}" for cause in self.causes])


def compare(
    serial: Tape,
    parallel: list[Tape],
    rename: dict[str, str] | None = None,
    to_the_bit: bool = False,
) -> Report:
    """Compare tapes of a serial and a parallel training, until the first step that differs.

    parallel: of all ranks. rename: {a name of the parallel model: the serial one}. to_the_bit: no
    tolerance, for exact twins. A rank may lack tensors that another has (a pipeline's).
    ValueError: the two name no parameter alike.
    """
    rename = rename or {}
    for tape in parallel:
        check_names(serial, tape, rename)
    steps = min(len(tape.steps) for tape in (serial, *parallel))
    tolerance = 0.0 if to_the_bit else first_tolerance(serial)
    report = Report(steps, len(serial.begin), tolerance)
    ranks = len(parallel)

    def differing(step: int, what: str, expected: dict, of: list[dict], before=None) -> bool:
        renamed = [with_names(tensors, rename) for tensors in of]
        allowed = min(LOOSEST, tolerance * max(1, step + 1))
        report.differences += judge(step, what, expected, renamed, allowed, before)
        return bool(report.differences)

    parts = other_shapes(serial, parallel, rename)
    if differing(-1, "parameter", serial.begin, [tape.begin for tape in parallel]):
        report.undecided = bool(parts)
        report.causes += parts or [
            "the runs don't begin alike: other seeds (--seed), ranks that draw only their own "
            "layers (--ranks-parameters), nobody broadcasts, or one loads what another has saved "
            "(--apart)"
        ]
        return report
    for step in range(steps):
        ours = serial.steps[step]
        theirs = [tape.steps[step] for tape in parallel]
        if differing(step, "gradient", ours.gradients, [taken.gradients for taken in theirs]):
            of_ranks = [taken.samples for taken in theirs]
            others, report.undecided = other_samples(ours.samples, of_ranks)
            report.causes += [others] if others else []
            report.causes += [] if others else explained(report.differences, ranks, ours, theirs)
            if step == 0 and (where := first_output(serial, parallel, tolerance)):
                report.causes = [where, *(cause for cause in report.causes if cause != NO_FACTOR)]
            break
        # Gradients agree here, so what differs now comes from the update alone.
        before = serial.steps[step - 1].parameters if step else serial.begin
        after = [taken.parameters for taken in theirs]
        if differing(step, "update", ours.parameters, after, before):
            report.causes += of_the_update(step, report.differences, ours, theirs)
            break
    else:
        report.causes += unequal_steps(serial, parallel)
        if steps and not any(moves(step) for step in serial.steps):
            report.undecided = True
            report.causes.append("every gradient is 0, in every step: nothing is trained")
    return report


def of_the_update(step: int, found: list[Difference], ours: Step, theirs: list[Step]) -> list[str]:
    """Say why updates differ though gradients agree: another rate, or what else there is."""
    causes = []
    for rank, taken in enumerate(theirs):
        pairs = list(zip(taken.rates, ours.rates, strict=False))
        wrong = [(got, due) for got, due in pairs if not near(got, due)]
        if wrong:
            got, due = wrong[0]
            ratio = f" (×{got / due:.4g})" if due else ""
            causes.append(f"learning rate {got:.4g} on rank {rank}, {due:.4g} serially{ratio}")
    if causes:
        return causes
    if all(difference.factor == 0 for difference in found):
        return [
            "gradients agree, but nothing moves: the optimizer holds other tensors than the model, "
            "the step is skipped, or it is rounded away (weights in bfloat16)"
        ]
    if step > 0:
        return [
            "gradients agree, and so did the update before: look at what the optimizer keeps from "
            "step to step (momentum, lost at a resume?), and at who skips"
        ]
    return ["gradients agree: look at the update (state, who skips, who clips)"]


def moves(step: Step) -> bool:
    """Return whether a step has a gradient that isn't 0."""
    return any(gradient is not None and gradient.any() for gradient in step.gradients.values())


def unequal_steps(serial: Tape, parallel: list[Tape]) -> list[str]:
    """Name the ranks that made fewer or more updates than the serial run, of those recorded."""
    due = len(serial.steps)
    counts = [(rank, len(tape.steps)) for rank, tape in enumerate(parallel)]
    return [f"rank {rank} made {n} updates, the serial run {due}" for rank, n in counts if n != due]


def other_shapes(serial: Tape, parallel: list[Tape], rename: dict[str, str]) -> list[str]:
    """Name the first parameter of which a rank has another shape than the serial run."""
    for tape in parallel:
        for name, value in with_names(tape.begin, rename).items():
            due = tuple(serial.begin[name].shape) if name in serial.begin else value.shape
            if value.shape != due:
                shapes = f"{tuple(value.shape)} on rank {tape.rank}, {due} serially"
                part = "a part of a kind that the audit can't put together"
                return [f"{name} is {shapes}: {part}; DTensors it can"]
    return []


def with_names(tensors: dict, rename: dict[str, str]) -> dict:
    return {rename.get(name, name): tensor for name, tensor in tensors.items()}


def check_names(serial: Tape, tape: Tape, rename: dict[str, str]) -> None:
    theirs = {rename.get(name, name) for name in tape.begin}
    if serial.begin and theirs and not theirs & set(serial.begin):
        got = f"{next(iter(tape.begin))!r} on rank {tape.rank}, {next(iter(serial.begin))!r} in the"
        raise ValueError(f"expected parameters of the same names, got {got} serial run: use rename")


def first_tolerance(serial: Tape) -> float:
    terms = min(serial.longest, 6 * serial.longest**0.5)
    return min(LOOSEST, epsilon(serial.begin) * terms * max(1, serial.depth))


def epsilon(tensors: dict[str, Tensor | None]) -> float:
    """Return ε of the narrowest floating-point dtype among these."""
    floats = [x.dtype for x in tensors.values() if x is not None and x.is_floating_point()]
    return max((torch.finfo(dtype).eps for dtype in floats), default=0.0)


# One kind of tensor, in one step


def judge(
    step: int,
    what: str,
    expected: dict[str, Tensor | None],
    of: list[dict],
    tolerance: float,
    before: dict[str, Tensor | None] | None = None,
) -> list[Difference]:
    """List what differs, tensors that differ alike in one entry, in the model's order.

    before: where the serial run's tensors came from; then factors are those of what was added.
    """
    whole = sum(x.double().square().sum().item() for x in expected.values() if x is not None)
    there = sum(x is not None for x in expected.values())
    floor = FLOOR * whole**0.5 if tolerance else 0.0
    found: dict[tuple, Difference] = {}
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
        for rank, value in values.items():
            factor, error, same = ratio(value, x, tolerance, floor)
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
    return list(found.values())


def ratio(
    value: Tensor | None, expected: Tensor | None, tolerance: float, floor: float
) -> tuple[float | None, float, bool]:
    """(factor, error, whether they are the same): value ≈ factor · expected, up to the tolerance.

    factor: None if no number fits. A gradient that is missing counts as zeros.
    """
    if value is None or expected is None:
        present = value if expected is None else expected
        empty = present is None or not present.any()
        return (1.0 if empty else 0.0 if value is None else None), 0.0, empty
    if value.shape != expected.shape:
        return None, float("inf"), False
    a = value.double()
    b = expected.double()
    if tolerance == 0 and torch.equal(a, b):
        return 1.0, 0.0, True
    length = max(b.norm().item(), floor)
    if (a - b).norm().item() <= tolerance * length:
        return 1.0, 0.0, True
    squared = b.square().sum().item()
    factor = (a * b).sum().item() / squared if squared else 0.0
    left = (a - factor * b).norm().item()
    error = left / length if length else float(left > 0)
    # Against a number that fits by chance: a vector of one element always has one.
    fits = isfinite(factor) and left <= max(tolerance, 1e-12) * max(1.0, abs(factor)) * length
    return (whole_number(factor, error) if fits else None), error, False


def added(
    before: Tensor, expected: Tensor, values: dict[int, Tensor], tolerance: float
) -> tuple[float, Tensor, dict[int, Tensor]]:
    """(the tolerance of an update, the serial one, {rank: its own}), in float64."""
    start = before.double()
    update = expected.double() - start
    length = update.norm().item()
    # An update is off by as much as the parameter is, and is much shorter.
    within = tolerance * max(1.0, start.norm().item() / length) if length else tolerance
    return min(LOOSEST, within), update, {r: v.double() - start for r, v in values.items()}


def part_that_differs(
    value: Tensor | None, expected: Tensor | None, tolerance: float, floor: float
) -> str:
    """Say which rows, or columns, differ where others agree, and by which factor.

    If all differ, those of which nothing arrived. "" if there are no such rows or columns. Rows
    that are 0 in both tell nothing: an embedding's, of tokens that weren't there.
    """
    if value is None or expected is None or value.shape != expected.shape:
        return ""
    for axis, name in enumerate(("row", "column")[: value.dim()]):
        a = value.double().movedim(axis, 0).reshape(value.shape[axis], -1)
        b = expected.double().movedim(axis, 0).reshape(value.shape[axis], -1)
        usual = max(b.norm().item(), floor) / max(1, len(b)) ** 0.5
        differ = ~((a - b).norm(dim=1) <= tolerance * b.norm(dim=1).clamp(min=usual))
        tells = a.any(1) | b.any(1)
        some_right = (tells & ~differ).any()
        gone = differ & ~a.any(1)
        if some_right and differ.any():
            factor, _, _ = ratio(a[differ], b[differ], tolerance, floor)
            ratios = "no one factor" if factor is None else f"×{factor:.4g}"
            return f"{numbered(name, differ)}: {ratios}"
        if gone.any() and not gone[tells].all():
            return f"{numbered(name, gone)}: ×0, no one factor for the others"
    return ""


def numbered(name: str, which: Tensor) -> str:
    """Say where `which` is true: 'row 3 of 8', 'rows 2 to 7 of 8', 'rows 0, 2, 4, 6 and 1 more'."""
    places = which.nonzero().flatten().tolist()
    first, last = places[0], places[-1]
    of = f"of {len(which)}"
    if len(places) == 1:
        return f"{name} {first} {of}"
    if len(places) > 2 and last - first == len(places) - 1:
        return f"{name}s {first} to {last} {of}"
    more = f" and {len(places) - SHOWN} more" if len(places) > SHOWN else ""
    return f"{name}s {', '.join(map(str, places[:SHOWN]))}{more} {of}"


def whole_number(factor: float, error: float) -> float:
    """Return the whole number, or its reciprocal, that a factor is but for the error; or itself."""
    upside_down = 0 < abs(factor) < 1
    whole = round(1 / factor if upside_down else factor)
    nearest = 1 / whole if upside_down else float(whole)
    return nearest if near(factor, nearest, min(error, LATITUDE)) else factor


def mean_of(values: list[Tensor | None]) -> Tensor | None:
    present = [value.double() for value in values if value is not None]
    return sum(present) / len(values) if present else None


def alike(values: list[Tensor | None]) -> bool:
    first = values[0]
    if any(value is None for value in values):
        return all(value is None for value in values)
    return all(torch.equal(first, value) for value in values[1:])


# Causes


def explained(found: list[Difference], ranks: int, ours: Step, theirs: list[Step]) -> list[str]:
    """Say which causes these factors suggest, each once."""
    scales = scales_of_ranks(ours, theirs)
    if scales and all(difference.all for difference in found):
        return [scales]
    micro_batches = max(len(step.losses) for step in theirs) or 1
    causes = []
    for difference in found:
        late = micro_batches > 1 and last_is_shared(difference.names, ours, theirs)
        if difference.own and late:
            causes.append(
                f"the last of {micro_batches} micro-batches is averaged, the others aren't: what a "
                "hook gets is one backward's gradient, not the sum in .grad"
            )
        elif said := of_micro_batches(difference, ours, theirs):
            causes.append(said)
        else:
            causes += suggestions(difference, ranks, micro_batches, len(ours.losses) or 1)
    specific = [cause for cause in causes if cause != NO_FACTOR]
    return list(dict.fromkeys(specific or causes))


def of_micro_batches(found: Difference, ours: Step, theirs: list[Step]) -> str:
    """Say which micro-batches count otherwise than in the serial run; "" if that isn't it."""
    if found.own:
        return kept(found.names, theirs)
    return shares(found.names, ours, theirs) if found.all and found.factor is None else ""


def scales_of_ranks(ours: Step, theirs: list[Step]) -> str:
    """Say by which factor each rank's gradients, all alike, are off; "" if it isn't that."""
    factors = []
    for step in theirs:
        held = {name: x for name, x in step.gradients.items() if x is not None and x.any()}
        due = [ours.gradients.get(name) for name in held]
        if len(held) < 2 or any(x is None for x in due):
            return ""
        pairs = zip(held.values(), due, strict=True)
        if any(x.shape != y.shape for x, y in pairs):
            return ""
        got = torch.cat([x.double().flatten() for x in held.values()])
        right = torch.cat([x.double().flatten() for x in due])
        factor, _, _ = ratio(got, right, max(FLOOR, 4 * epsilon(ours.gradients)), 0.0)
        factors.append(factor)
    if None in factors or len({round(factor, 3) for factor in factors}) == 1:
        return ""
    told = "; ".join(f"×{factor:.4g} on rank {rank}" for rank, factor in enumerate(factors))
    return f"each rank scales all that it holds by a factor of its own (a norm, a scale): {told}"


def first_output(serial: Tape, parallel: list[Tape], tolerance: float) -> str:
    """Name the first module that returns something else, on ranks with the serial run's inputs."""
    found = {}
    for tape in parallel:
        alike = len(tape.inputs) == len(serial.inputs) > 0
        if alike and all(map(torch.equal, tape.inputs, serial.inputs)):
            names = (name for name in tape.outputs if other_output(serial, tape, name, tolerance))
            name = next(names, None)
            if name is not None:
                found[name] = tape
    if len(found) != 1:
        return ""
    ((name, tape),) = found.items()
    output, due = tape.outputs[name], serial.outputs[name]
    told = f"{name} ({output.kind})" if name else f"the model itself ({output.kind})"
    return (
        f"forward is off: the first output that differs is that of {told}"
        f"{added_too_often(output.some - due.some, name, serial)}"
    )


def other_output(serial: Tape, tape: Tape, name: str, tolerance: float) -> bool:
    """Return whether a module returned something else, where its output has the same shape."""
    output, due = tape.outputs[name], serial.outputs.get(name)
    if due is None or due.shape != output.shape:
        return False
    return not ratio(output.some, due.some, tolerance, 0.0)[2]


def added_too_often(difference: Tensor, name: str, serial: Tape) -> str:
    """Say which summand of a module's output is in it how often; "" if it isn't that."""
    shape = serial.outputs[name].shape
    bias = serial.begin.get(f"{name}.bias")
    summands = {}
    if bias is not None and shape and bias.shape == shape[-1:]:
        places = torch.arange(shape.numel())[:: max(1, shape.numel() // SOME)]  # as `some_of`
        summands["its bias"] = bias.double()[places % len(bias)]
    for other, output in serial.outputs.items():
        if other != name and output.shape == shape:
            summands[f"the output of {other}"] = output.some
    for summand, some in summands.items():
        factor, _, _ = ratio(difference, some, FLOOR, 0.0)
        if factor is not None:
            return f": {summand} is in it {1 + factor:.4g} times"
    return ""


def last_is_shared(names: list[str], ours: Step, theirs: list[Step]) -> bool:
    """Return whether the last backward added a gradient of the same length on all ranks."""
    within = max(1e-3, 4 * epsilon(ours.gradients))
    seen = False
    for name in names:
        lengths = [step.last.get(name, 0.0) for step in theirs]
        if not all(near(length, lengths[0], within) for length in lengths):
            return False
        seen = seen or any(lengths)
    return seen


def suggestions(found: Difference, ranks: int, micro_batches: int, serial: int) -> list[str]:
    if found.own and found.factor is not None and near(found.factor, 1):
        return ["each rank kept its own gradient, and their mean is right: nobody averages them"]
    if found.own and found.factor is not None and near(found.factor, 1 / ranks):
        return ["each rank kept its own gradient, and their sum is right: nobody adds them"]
    if found.own:
        return [f"each rank kept its own gradient, whose mean is ×{found.factor:.4g}"]
    if not found.all:
        return [f"other ranks are right: what does rank {found.ranks[0]} do alone?"]
    if found.factor is None:
        return [NO_FACTOR]
    if near(found.factor, 1):
        return ["nearly the same: other roundings, another dtype on the way, or a small term"]
    if found.factor == 0:
        return ["no gradient arrived: a hook that isn't armed, or zero_grad at the wrong place"]
    w = f"{ranks} ranks"
    m = f"{micro_batches} micro-batches"
    table = [
        (ranks, f"{w}: summed over them where the mean is due"),
        (1 / ranks, f"{w}: divided by their number twice, or only one rank's part counts"),
        (micro_batches, f"{m}: their losses aren't divided by their number"),
        (1 / micro_batches, f"{m}: divided by their number twice, or only one of them counts"),
        (1 / serial, f"{serial} micro-batches of the serial run: not divided there"),
        (ranks * micro_batches if micro_batches > 1 else 1, f"{w}, {m}: divided by neither"),
        (ranks**2, f"{w}: summed over them twice"),
    ]
    causes = [cause for value, cause in table if value != 1 and near(found.factor, value)]
    if not causes and near(found.factor, 2):
        causes = ["counted twice: a tied weight, or a hook that runs two times"]
    if not causes and is_loss_scale(found.factor):
        causes = [f"2^{log2(found.factor):.0f}: a loss's scale, put in or taken out only"]
    if not causes:
        causes = ["no number of ranks or micro-batches of this run"]
        if found.of == len(found.names) > 1:
            causes[0] += "; one for all tensors: a norm (clipping), or a loss's scale"
    return [f"×{found.factor:.4g}: {cause}" for cause in causes]


def is_loss_scale(factor: float) -> bool:
    exponent = log2(factor) if factor > 0 else 0.0
    return abs(exponent) >= log2(LOSS_SCALE) and near(factor, 2 ** round(exponent))


def near(a: float, b: float, within: float = 1e-3) -> bool:
    return abs(a - b) <= within * abs(b)
