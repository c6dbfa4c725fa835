"""Checkers of notebook 02, second part: recursive halving and doubling, and the fit of α and β."""

from fractions import Fraction
from functools import partial

import torch

from ddpkit import collectives, cost, doubling
from ddpkit.runtime.launch import Run
from ddpkit.tools.hops import sent_bytes

from . import ring
from .checker import Exercise, Mistake, Trial, check_wire, mistakes

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these

# halving_doubling_all_reduce(x)


def _evenly(trial: Trial, run: Run) -> str | None:
    """Explain ranks that sent unequally, or what `check_wire` finds; None if all is right."""
    sent = sent_bytes(run)
    if max(sent) > min(sent) + 8 * trial.world_size:  # an element a hop, where halves are uneven
        return (
            f"the values are right, but rank {sent.index(max(sent))} sent {max(sent)} bytes, and "
            f"rank {sent.index(min(sent))} {min(sent)}.\nIn each hop every rank has a partner, and "
            "each sends the half that the other keeps."
        )
    return check_wire(trial, run)


halving_doubling_all_reduce = Exercise(
    reference=doubling.halving_doubling_all_reduce,
    plays=True,
    writes=("x",),
    helpers=(collectives.exchange,),
    trials=partial(
        ring.lengths_trials,
        sums=True,
        returns="x",
        halves=2,
        lengths=[(2, 4), (2, 5), (4, 4), (4, 10), (1, 3)],
        hops={1: 0, 2: 2, 4: 4},
    ),
    hints={
        "start": "kept = x at first. In each hop: lower, upper = kept.tensor_split(2). Which of "
        "them do you keep if rank & distance is 0? Your partner keeps the other.",
        "values": "Remember each hop's partner, the half that you kept and the half that you gave. "
        "The way back takes them from the last to the first, and adds nothing.",
        "wire": "A hop is one message each way between rank and rank ^ distance: 2 log₂ W in all.",
        "hang": "isend and irecv first, then both wait(), and only then add.",
    },
    praise="right on 1, 2 and 4 ranks; each sends 2(W-1)/W of x, in 2 log₂ W messages.",
    says=ring.SAYS
    | {
        "sent": "rank {rank} sent nothing. In each of 2 log₂ W hops it sends a part.",
        "too many": "the values are right, but rank {rank} sent more than 2 log₂ W messages; the "
        "others had {got} bytes.",
    },
    explain=ring.explain_sum,
    wire=_evenly,
    mistakes=mistakes("""
whole_buffers: while distance < → return doubling_all_reduce(x)⏎while distance <
    Whole buffers were swapped, as in recursive doubling. Here a hop of the way there sends half of
    what the hop before did.
only_the_way_there: in reversed(swaps) → in []
    Every rank has its part of the sum. The way back is missing: there each swap is done again, the
    last one first, and what was given away comes back finished.
the_first_swap_first: in reversed(swaps) → in swaps
    The way back begins with the last swap: a rank has the sum only of the last half that it kept.
keeps_what_arrives: kept += arrived → kept.copy_(arrived)
    Its own numbers are missing: what arrives is added to the half that is kept.
both_keep_the_lower: (upper, lower) if me & distance else (lower, upper) → lower, upper
    Both partners kept the same half. One keeps the lower, the other the upper: rank & distance
    tells them apart.
sends_what_it_keeps: exchange({peer: given} → exchange({peer: kept}
    What a rank sends on the way there is the half that its partner keeps, not its own.
loses_the_remainder: kept.tensor_split(2) → kept.split(len(kept) // 2)[:2]
    Halves of n // 2 lose the remainder: kept.tensor_split(2) makes the first one longer.
"""),
)


# alpha_beta(points)

EXACT = [(2, n, 2e-4 + n * 1e-9) for n in (4096, 10**5, 10**6, 10**7)]
# Times of rings of 2 and of 4 ranks, as on a real machine: each off by a share, one by far
OFF = 1.2, 0.9, 1.1, 0.85, 1.15, 0.95, 40.0, 1.05
NOISY = []
for (hops, turns), off in zip([(2, 1), (6, 1.5)] * 4, OFF, strict=True):
    n = turns * 4096 * 10 ** (len(NOISY) // 2)
    NOISY.append((hops, n, off * (hops * 1e-4 + n * 1e-9)))


def _fitted(answer, points):
    """Return the answer's α and β to three digits."""
    found = answer(list(points))
    try:
        alpha, beta = (f"{float(number):.3g}" for number in found)
    except (TypeError, ValueError):
        return {"two numbers": False}
    return {"two numbers": True, "α": alpha, "β": beta}


def _nearest(points) -> dict:
    """Return what `_fitted` should: the least squares of relative errors, solved in fractions."""
    rows = [(Fraction(hops) / Fraction(s), Fraction(n) / Fraction(s)) for hops, n, s in points]
    hh, hb, bb = (
        sum(x * x for x, _ in rows),
        sum(x * y for x, y in rows),
        sum(y * y for _, y in rows),
    )
    h, b = (sum(column) for column in zip(*rows, strict=True))
    both = hh * bb - hb * hb
    alpha, beta = (h * bb - b * hb) / both, (b * hh - h * hb) / both
    return {"two numbers": True, "α": f"{float(alpha):.3g}", "β": f"{float(beta):.3g}"}


def _fit_trials():
    for points, what in ((EXACT, "times without any noise"), (NOISY, "noisy times")):
        yield Trial(1, _fitted, (points,), [_nearest(points)], what=what)


def absolute_errors(points):
    hops, nbytes, seconds = torch.tensor(points, dtype=torch.float64).T
    rows = torch.stack([hops, nbytes], 1)
    return tuple(torch.linalg.lstsq(rows, seconds[:, None]).solution.flatten().tolist())


alpha_beta = Exercise(
    reference=cost.alpha_beta,
    trials=_fit_trials,
    hints={
        "start": "A point is an equation, α · hops / seconds + β · bytes / seconds = 1. "
        "torch.linalg.lstsq(rows, ones).solution comes closest to all of them.",
        "values": "rows has a row for each point, [hops / seconds, bytes / seconds]; ones is a "
        "column of as many ones.",
    },
    praise="the relative errors are as small as they can be, also of noisy times.",
    says={
        "two numbers": "Return two numbers, α and β: lstsq has them in its `.solution`.",
        "α": "α is {got} s, expected {expected}.",
        "β": "β is {got} s a byte, expected {expected}.",
    },
    note="ddpkit.cost.fit calls it, and keeps α and β from becoming negative.",
    mistakes=[
        Mistake.written(
            absolute_errors,
            "Yours are the least absolute errors: a percent of 100 MB's time is more than all of "
            "4 kB's. Make them relative: divide each equation by its seconds.",
        ),
        *mistakes("""
first_and_last: alpha, beta → rows = rows[:, :: len(points) - 1]⏎alpha, beta
    A line through two of the points believes their noise.
latency_a_call: torch.stack([hops, nbytes]) → torch.stack([hops**0, nbytes])
    Yours is what a call costs before its first byte. α is for each hop: multiply it by hops.
without_latency: return alpha.item(), → return 0.0,
    Yours has no latency: α is what is left of the time when there are no bytes.
bandwidth: beta.item() → 1 / beta.item()
    β is the time of a byte; yours is its inverse, bytes per second.
beta_first: return alpha.item(), beta.item() → return beta.item(), alpha.item()
    The right numbers the wrong way round: α first, then β.
"""),
    ],
)
