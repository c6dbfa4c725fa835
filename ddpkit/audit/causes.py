"""Suggest, in sentences, why a parallel training differs from the serial run.

It goes by factors, by which gradients are multiples of the serial ones, and by the first module's
output that differs. `ours` is a `Step` of the serial run, `theirs` that step on each rank; names of
parameters and modules are the serial ones.
"""

from itertools import chain
from math import log2

import torch
from torch import Tensor

from .ratios import epsilon, near, ratio
from .report import SHOWN, Difference
from .shares import kept, shares
from .tape import SOME, Step, Tape

FITS = 1e-3  # of a length: what a factor may leave, by the roundings of float32
NO_FACTOR = (
    "no one factor: the mean of unequal parts' means, other data, a stale or partial sum, "
    "a missing term, a function of parts (Muon's, a norm's) where that of the whole is due"
)
LOSS_SCALE = 2**8  # powers of two from here on, and their reciprocals, are one that is left over


# Of gradients


def explained(found: list[Difference], ranks: int, ours: Step, theirs: list[Step]) -> list[str]:
    """Return causes of differing gradients, a sentence each, none twice. ranks: their number."""
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


def written_between(step: int, ours: Step, theirs: list[Step]) -> list[str]:
    """Return sentences on parameters that some runs, ranks or the serial one, changed, others not.

    They changed between the updates of steps `step` - 1 and `step`. A rank counts among the others
    if its own backward gives a gradient of the parameter: what is written into FSDP's shards, or
    DTensors, isn't noted.
    """
    changed = {}
    seen = {}
    for rank, taken in enumerate(theirs):
        changed[f"rank {rank}"] = set(taken.written)
        seen[f"rank {rank}"] = set(chain(*taken.parts))
    changed["the serial run"] = set(ours.written)
    seen["the serial run"] = set(ours.parameters)
    told: dict[str, list[str]] = {}
    for name in sorted(set().union(*changed.values())):
        who = [run for run, names in changed.items() if name in names]
        if any(name in seen[run] for run in changed if run not in who):
            told.setdefault(", ".join(who), []).append(name)
    between = f"between the updates of steps {step - 1} and {step}"
    return [
        f"{between}, {who} changed {', '.join(names[:SHOWN])}: "
        "what writes there (a checkpoint that is loaded, an average, a broadcast)?"
        for who, names in told.items()
    ]


def steps_apart(theirs: list[Step]) -> str:
    """Say after how many backwards each rank updates; "" if equally many, or a rank has no loss."""
    counts: dict[int, list[str]] = {}
    for rank, step in enumerate(theirs):
        counts.setdefault(len(step.losses), []).append(str(rank))
    if len(counts) == 1 or 0 in counts:  # a pipeline's first stages have no loss
        return ""
    told = "; ".join(f"{n} on rank {', '.join(ranks)}" for n, ranks in sorted(counts.items()))
    return (
        f"ranks make this update after different numbers of backwards ({told}): each decides for "
        "itself whether to skip (an overflow of its own), or they have unequal numbers of batches"
    )


def of_micro_batches(found: Difference, ours: Step, theirs: list[Step]) -> str:
    """Return a sentence of `kept` (ranks' own gradients) or of `shares` (no factor fits), or ""."""
    if found.own:
        return kept(found.names, theirs)
    return shares(found.names, ours, theirs) if found.all and found.factor is None else ""


def last_is_shared(names: list[str], ours: Step, theirs: list[Step]) -> bool:
    """Return whether the last backward added gradients of equal norms, not all 0, on all ranks."""
    within = max(1e-3, 4 * epsilon(ours.gradients))
    seen = False
    for name in names:
        lengths = [step.last.get(name, 0.0) for step in theirs]
        if not all(near(length, lengths[0], within) for length in lengths):
            return False
        seen = seen or any(lengths)
    return seen


def scales_of_ranks(ours: Step, theirs: list[Step]) -> str:
    """Return a sentence with the factor by which each rank scales all its gradients.

    Returns "" if these factors are equal or a rank has none: it has fewer than two gradients that
    aren't 0, they have other names or shapes, or no one number fits them all.
    """
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
        factor, _, _ = ratio(got, right, max(FITS, 4 * epsilon(ours.gradients)), 0.0)
        factors.append(factor)
    if None in factors or len({round(factor, 3) for factor in factors}) == 1:
        return ""
    told = "; ".join(f"×{factor:.4g} on rank {rank}" for rank, factor in enumerate(factors))
    return f"each rank scales all that it holds by a factor of its own (a norm, a scale): {told}"


def suggestions(found: Difference, ranks: int, micro_batches: int, serial: int) -> list[str]:
    """Return likely causes of a difference by its factor, such as ×4 for 4 ranks; at least one.

    ranks, micro_batches: numbers of the parallel run. serial: micro-batches of the serial run.
    """
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


# Of outputs, and of updates


def first_output(serial: Tape, parallel: list[Tape], tolerance: float) -> str:
    """Return a sentence on the first module whose output differs though the inputs are equal.

    Tapes keep some elements of both. tolerance: the share of an output's norm that is no
    difference. Returns "" if no rank has equal inputs and a difference, or ranks disagree.
    """
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
    """Return whether a module's output differs from the serial one; False if its shape does."""
    output, due = tape.outputs[name], serial.outputs.get(name)
    if due is None or due.shape != output.shape:
        return False
    return not ratio(output.some, due.some, tolerance, 0.0)[2]


def added_too_often(difference: Tensor, name: str, serial: Tape) -> str:
    """Return, for example, ": its bias is in it 2 times" of the output of module `name`, or "".

    difference: some elements of the output minus the serial ones. If it is a multiple of the bias,
    or of another module's output of the same shape, that is in the sum too often, or too seldom.
    """
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
        factor, _, _ = ratio(difference, some, FITS, 0.0)
        if factor is not None:
            return f": {summand} is in it {1 + factor:.4g} times"
    return ""


def of_the_update(step: int, found: list[Difference], ours: Step, theirs: list[Step]) -> list[str]:
    """Return causes of differing updates: ranks' wrong learning rates, or one hint if all agree."""
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
