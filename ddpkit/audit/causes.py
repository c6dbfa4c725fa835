"""Suggest, in sentences, why a parallel training differs from the serial run.

It goes by factors, by which gradients are multiples of the serial ones, and by the first module's
output that differs. `ours` is a `Step` of the serial run, `theirs` that step on each rank; names of
parameters and modules are the serial ones.
"""

from itertools import chain
from math import log2

import torch
from torch import Tensor

from .ratios import alike, epsilon, near, ratio
from .report import NOTHING, SHOWN, Difference
from .shares import kept, shares
from .tape import SOME, Step, Tape

FITS = 1e-3  # of a length: what a factor may leave, by the roundings of float32
NO_FACTOR = (
    "no one factor: the mean of unequal parts' means, other data, a stale or partial sum, "
    "a missing term, a function of parts (Muon's, a norm's) where that of the whole is due"
)
MASKS = "set dropout to 0, since ranks that share a batch out can't draw the serial run's masks"
UNSEEN = (
    "nothing shows that both runs use the same samples: the serial run called no module with them "
    "(in Lightning, choose strategy='ddp' for one rank too)"
)
NO_MODULE = (
    "no module with parameters was called, so nothing was compared; if only compiled code calls "
    "one, set TORCHDYNAMO_DISABLE=1"
)
NOT_NAMED = (
    "not compared: {} that an optimizer steps, but no module that was called has; call the model "
    "itself or, if only compiled code calls it, set TORCHDYNAMO_DISABLE=1"
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
        elif said := of_micro_batches(difference, ours, theirs) or of_groups(difference, theirs):
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


def of_the_forward(ours: Step, theirs: list[Step]) -> tuple[list[str], bool]:
    """Return (sentences on what may differ in forward, whether it may do so by no fault).

    That is if ranks draw dropout, or if the serial run's samples are unknown.
    """
    found: dict[str, dict[str, None]] = {}  # names, by what is said of them
    within = max(FITS, 4 * epsilon(ours.buffers))
    for step in theirs:
        for name, kind in step.mixing.items():
            said = MASKS if "Dropout" in kind else "statistics of a rank's own samples"
            found.setdefault(said, {})[f"{name} ({kind})"] = None
        for name in step.gradients:
            if name not in ours.gradients:
                found.setdefault("only ranks have it: tied in the serial run?", {})[name] = None
        for name, x in step.buffers.items():
            due = ours.buffers.get(name, x)
            if due.shape == x.shape and not ratio(x, due, within, 0.0)[2]:
                found.setdefault("a buffer that isn't the serial run's", {})[name] = None
    told = [f"{', '.join([*names][:SHOWN])}: {said}" for said, names in found.items()]
    unseen = not ours.samples and any(step.samples for step in theirs)
    return told + [UNSEEN] * unseen, unseen or MASKS in found


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


def of_groups(found: Difference, theirs: list[Step]) -> str:
    """Return a sentence on the groups of ranks that hold equal gradients, or "" if none do."""
    groups: dict[int, list[str]] = {}  # by the first rank of each
    for rank in found.ranks if found.own else ():
        same = (first for first in groups if agree(found.names, theirs[first], theirs[rank]))
        groups.setdefault(next(same, rank), []).append(str(rank))
    if not 1 < len(groups) < len(found.ranks):
        return ""
    told = "; ".join(f"rank {', '.join(ranks)}" for ranks in groups.values())
    return (
        f"gradients are equal within groups ({told}) and not among them: nobody averages them over "
        "all ranks, or it is done over another axis of a mesh"
    )


def agree(names: list[str], one: Step, other: Step) -> bool:
    return all(alike([one.gradients.get(name), other.gradients.get(name)]) for name in names)


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
    if found.part == NOTHING:
        return ["the serial run has no gradient there, or zeros: frozen, or unused, in it alone?"]
    if found.factor is None:
        return [NO_FACTOR]
    if near(found.factor, 1):
        return ["nearly the same: other roundings, another dtype on the way, or a small term"]
    if found.factor == 0:
        return ["no gradient arrived: frozen, a hook not armed, or zero_grad at the wrong place"]
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
    for part in [n for n in range(2, ranks) if ranks % n == 0]:  # sizes of groups
        table.append((part, f"{w}: their sum is divided by {ranks // part}, a group's size"))
        table.append((1 / part, f"{w}: their mean is divided by {part}, a group's size"))
    causes = [cause for value, cause in table if value != 1 and near(found.factor, value)]
    if near(found.factor, 2) and 2 not in (ranks, micro_batches):
        causes.append("counted twice: a tied weight, or a hook that runs two times")
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


def wrong_rates(ours: Step, theirs: list[Step]) -> dict[int, float]:
    """Return {rank: its first learning rate that no group of the serial run has}."""
    found: dict[int, float] = {}
    for rank, taken in enumerate(theirs):
        for rate in taken.rates if ours.rates else []:
            if not any(near(rate, due) for due in ours.rates):
                found.setdefault(rank, rate)
    return found


def of_the_update(step: int, found: list[Difference], ours: Step, theirs: list[Step]) -> list[str]:
    """Return causes of differing updates: ranks' wrong learning rates, or one hint if all agree."""
    causes = []
    for rank, got in wrong_rates(ours, theirs).items():
        rates, due = theirs[rank].rates, ours.rates
        due = [due[rates.index(got)]] if len(rates) == len(due) else due
        times = f" (×{got / due[0]:.4g})" if len(due) == 1 and due[0] else ""
        serially = " or ".join(f"{rate:.4g}" for rate in due)
        causes.append(f"learning rate {got:.4g} on rank {rank}, {serially} serially{times}")
    if causes:
        return causes
    present = {}
    for name in chain(*(difference.names for difference in found)):
        steps = [ours, *(taken for taken in theirs if name in taken.gradients)]
        present[name] = {taken.gradients.get(name) is not None for taken in steps}
    if none := [name for name, kinds in present.items() if len(kinds) > 1]:
        return [
            f"{', '.join(none[:SHOWN])}: no gradient (None) in some runs, zeros in others: the "
            "optimizer leaves out the first, decay and momentum move the second"
        ]
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
