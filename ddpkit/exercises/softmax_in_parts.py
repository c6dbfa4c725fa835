"""Checkers of notebook 08: a mean in one pass, a row in blocks, a row in parts on many ranks."""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist

from ddpkit import softmax
from ddpkit.runtime.launch import Run

from .checker import Exercise, Trial, mistakes
from .softmax import (
    INF,
    LN2,
    LN3,
    LN4,
    LN5,
    LONG,
    Numbers,
    Row,
    exact_softmax,
    numbers,
    trial_of,
)

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these

FEW = 16  # numbers that may be held at once, of 60


# online_weighted_mean(x, v)

SCORES = [  # name, scores
    ("scores ln 5, ln 2, ln 1", [LN5, LN2, 0.0]),
    ("scores ln 1, ln 2, ln 5", [0.0, LN2, LN5]),
    ("scores 0, 1000", [0.0, 1000.0]),
    ("scores -1000, -1000 + ln 3", [-1000.0, -1000 + LN3]),
    ("scores -inf, 0, ln 3", [-INF, 0.0, LN3]),
    ("scores -inf, -inf", [-INF, -INF]),
]


def _values(length: int) -> list[list[float]]:
    """Make values [1, 1], [2, 1], [4, 1], ... up to 16, and again: a mean's second number is 1."""
    return [[2.0 ** (at % 5), 1.0] for at in range(length)]


def _exact_mean(scores: list[float]) -> Numbers:
    return Numbers(exact_softmax(scores) @ torch.tensor(_values(len(scores))).double())


def _look_at_mean(answer: Callable, name: str, scores: list[float]) -> dict:
    x, v = torch.tensor(scores).double(), torch.tensor(_values(len(scores))).double()
    return {name: numbers(answer, x, v)}


def _look_at_stream(answer: Callable) -> dict:
    x = Row(LONG)
    v = Row(_values(len(LONG)), x.log)
    mean = numbers(answer, x, v)
    ahead = most = 0
    for row, count in x.log:
        ahead += count if row is x else -count
        most = max(most, ahead, count)
    return {
        "the mean": mean,
        "passes over the scores": x.times.max().item(),
        "scores read before the values that go with them": "few" if most <= FEW else most,
    }


def _mean_trials():
    expected = {name: _exact_mean(scores) for name, scores in SCORES}
    yield trial_of(_look_at_mean, SCORES, expected, "few scores, values (1, 1), (2, 1), (4, 1)")
    names = list(_look_at_stream(softmax.online_weighted_mean))
    expected = dict(zip(names, (_exact_mean(LONG), 1, "few"), strict=True))
    yield trial_of(_look_at_stream, [()], expected, "60 scores, every seventh -inf")


MEAN = mistakes("""
o_as_it_was: o = o * correction.unsqueeze(-1) → pass
    ℓ is corrected when the maximum grows, and the sum of values isn't: it needs the same factor.
ell_as_it_was: ell * correction + → ell +
    The sum of values is corrected when the maximum grows, and ℓ isn't: it needs the same factor.
not_divided: normalize(o, ell.unsqueeze(-1)) → o
    That is the sum of weighted values. Divided by ℓ, at the end, it is their mean.
no_maximum: torch.maximum(m, x_i) → torch.zeros_like(m)
    exp(1000) overflows. Subtract m, the largest score so far: exp(x - m).
masked_is_nan: m.masked_fill(m == -math.inf, 0) → m
    While all scores are -inf, add nothing: -inf - -inf is NaN. If all are, the mean is zeros.
softmax_first: m, ell = start(x) → return online_softmax(x) @ v⏎m, ell = start(x)
    The mean is right, and the scores were read twice. One loop is enough: m, ℓ and the sum of
    values are kept up to date together, and no weight is final before the end.
all_at_once: m, ell = start(x) → return normalize(*summarize(x, v)[:0:-1])⏎m, ell = start(x)
    The mean is right, and the row was taken whole: it may be longer than memory. Read a score and
    its value, bring m, ℓ and the sum of values up to date, and forget them.
""")
online_weighted_mean = Exercise(
    reference=softmax.online_weighted_mean,
    helpers=(softmax.start, softmax.power, softmax.normalize),
    note="Ours, for many rows at a time: x[..., i] is number i of every row.",
    trials=_mean_trials,
    hints={
        "start": "It is your online softmax with one thing more that is kept: the sum of "
        "exp(x - m) * v so far.",
        "values": "When m grows, the factor exp(m_before - m) corrects ℓ and that sum. Then add "
        "exp(x - m) to the one, exp(x - m) * v to the other.",
    },
    praise="each score was read once, and its value with it.",
    mistakes=MEAN,
)


# blockwise_softmax(x, block)

BLOCKS = [  # name, row, block
    ("a row of 3 in one block", [0.0, LN2, LN5], 3),
    ("ln 1, ln 2, ln 5, ln 4 in blocks of 2", [0.0, LN2, LN5, LN4], 2),
    ("ln 5, ln 4, ln 3, ln 2, 0 in blocks of 2", [LN5, LN4, LN3, LN2, 0.0], 2),
    ("-inf, -inf, 1000, 1000 in blocks of 2", [-INF, -INF, 1000.0, 1000.0], 2),
    ("-inf, -inf, -inf in blocks of 2", [-INF, -INF, -INF], 2),
]
BLOCK = 8
READINGS = 2 * math.ceil(len(LONG) / BLOCK)  # one less is seen if a pass begins where one ended
FADED = "the result between its end blocks, if each number is less by ln 2 in the second pass,"


def _look_at_blocks(answer: Callable, name: str, values: list[float], block: int) -> dict:
    return {name: numbers(answer, torch.tensor(values).double(), block)}


def _look_at_readings(answer: Callable) -> dict:
    row = Row(LONG)
    result = numbers(lambda x: list(answer(x, BLOCK))[BLOCK:-BLOCK], row)
    return {
        "the most numbers read at once": max((count for _, count in row.log), default=0),
        "passes over the row": row.times.max().item(),
        "readings": max(len(row.log), READINGS),
        FADED: result,
    }


def _block_trials():
    expected = {name: Numbers(exact_softmax(values)) for name, values, _ in BLOCKS}
    yield trial_of(_look_at_blocks, BLOCKS, expected, "short rows")
    right = BLOCK, 2, READINGS, Numbers(exact_softmax(LONG)[BLOCK:-BLOCK] / 2)
    names = list(_look_at_readings(softmax.blockwise_softmax))
    expected = dict(zip(names, right, strict=True))
    yield trial_of(_look_at_readings, [()], expected, f"60 numbers in blocks of {BLOCK}")


BY_BLOCK = mistakes("""
each_block_alone: finish(x[..., part], *pair) → finish(x[..., part], *summarize(x[..., part]))
    Each block is divided by its own sum. First the pair of the whole row, then all results with it.
last_block_alone: merge(pair, summarize(x[..., part])) → summarize(x[..., part])
    The pair is that of the last block: merge each block's with the pair so far.
adds_the_sums: merge(pair, summarize(x[..., part])) → (
    ⏎    torch.maximum(pair[0], summarize(x[..., part])[0]), pair[1] + summarize(x[..., part])[1])
    A block's sum is for the block's own maximum: merge corrects it, + doesn't.
all_at_once: pair = start(x) → block = max(block, 9)⏎pair = start(x)
    The row was taken whole, or nearly: x[first : first + block] is one block, and the memory has
    room for no more.
number_by_number: pair = start(x) → block = 1⏎pair = start(x)
    The row was read number by number. Take a block at once: its maximum, its sum, one merge.
starts_with_floats: pair = start(x) → pair = -math.inf, 0.0
    The library's merge takes tensors: begin with summarize(row[:0]), the pair of an empty part.
masked_block_is_nan: m.masked_fill(m == -math.inf, 0) → m
    A block that is all masked has the pair (-inf, 0), and changes nothing: mind -inf - -inf.
""")
blockwise_softmax = Exercise(
    reference=softmax.blockwise_softmax,
    helpers=(softmax.merge, softmax.summarize, softmax.finish, softmax.power, softmax.normalize),
    note="Ours, for many rows at a time: x[..., part] is a block of every row.",
    trials=_block_trials,
    hints={
        "start": "pair = summarize(row[:0]) at first: (-inf, 0). For each block: its own maximum "
        "and sum, as safe softmax has them, and pair = merge(pair, that).",
        "values": "for first in range(0, len(row), block): row[first : first + block] is a block, "
        "and the last may be shorter. Twice: for the pair, then for exp(x - m) / ell.",
    },
    praise="two passes, a block at a time, and a correction for each block, not for each number.",
    mistakes=BY_BLOCK,
)


# softmax_across_ranks(x)

SHARED = [  # three rows, each in the parts of up to four ranks. The last row is all masked
    [[LN2, LN5], [LN3], [], [LN4, 0.0]],
    [[-INF, 1000.0], [1000 + LN3], [], [-INF, 1000 + LN4]],
    [[-INF] * 2, [-INF], [], [-INF] * 2],
]
PAIRS = len(SHARED) * 2 * 8  # bytes of a pair for each row


def _share(answer: Callable, world_size: int) -> Numbers:
    return numbers(lambda x: answer(x).flatten(), _part(dist.get_rank(), world_size))


def _part(rank: int, world_size: int) -> torch.Tensor:
    return torch.tensor([row[:world_size][rank] for row in SHARED], dtype=torch.float64)


def _across_trials():
    for world_size in (2, 3, 4, 1):
        rows = [_part(rank, world_size) for rank in range(world_size)]
        whole = torch.cat(rows, 1).softmax(1).nan_to_num(0)
        parts = whole.split([part.shape[1] for part in rows], 1)
        expected = [Numbers(part.flatten()) for part in parts]
        what = "rank 2 has nothing of the rows" if world_size > 2 else "3 rows, the last masked"
        yield Trial(world_size, _share, (world_size,), expected, what=what)


def _pairs_only(trial: Trial, run: Run) -> str | None:
    """Return a complaint, if a rank made two collectives or sent a rank more than m and ℓ a row."""
    for rank, records in enumerate(run.wire):
        sent = [record for record in records if record.op not in ("recv", "new_group")]
        collectives = [record.op for record in sent if record.op != "send"]
        if len(collectives) > 1:
            return (
                f"the values are right, but rank {rank} called {len(collectives)} collectives, "
                f"{', '.join(collectives)}.\nEach waits for the one before. One is enough: gather "
                "m and ℓ in one tensor, and merge the pairs."
            )
        most = PAIRS * (1 if collectives else trial.world_size - 1)
        if sum(record.bytes for record in sent) > most:
            return (
                f"the values are right, but rank {rank} sent {sum(r.bytes for r in sent)} bytes.\n"
                f"Two numbers a row are {PAIRS}. Gather pairs, and not the row's numbers: it may "
                "be longer than a rank's memory."
            )
    return None


ACROSS = mistakes("""
own_part_alone: functools.reduce(merge, everyones) → summarize(x)
    Each rank divided by the sum of its own part. The sum is that of the whole row, of all ranks.
sums_added: functools.reduce(merge, everyones) → summarize(x)[0], sum(e[1] for e in everyones)
    A rank's sum is for its own maximum: before it is added, it is corrected. That is merge.
own_maximum: finish(x, *pair) → finish(x, summarize(x)[0], pair[1])
    The sum is right, for the maximum of the whole row: subtract that one, not your own part's.
one_tensor_many_times: for _ in range(dist.get_world_size(group))] → ] * dist.get_world_size(group)
    `[tensor] * W` is one tensor W times, and what comes last is left in it. Make one for each rank:
    `[torch.empty_like(mine) for _ in range(W)]`.
m_as_a_row: finish(x, *pair) → (x - pair[0])
    m and ℓ are one number a row. They meet `x` as columns, m[:, None] and ell[:, None].
masked_is_nan: m.masked_fill(m == -math.inf, 0) → m
    A part that is all masked is (-inf, 0), and a row that is so everywhere has a softmax of zeros:
    mind -inf - -inf, and 0/0.
leaves_early: mine = torch.stack → if not x.numel(): return x⏎mine = torch.stack
    A rank with nothing of the row must take part all the same, or the others wait for it for ever.
    Its pair is (-inf, 0).
""")


softmax_across_ranks = Exercise(
    reference=softmax.softmax_across_ranks,
    helpers=(softmax.summarize, softmax.merge, softmax.finish, softmax.power, softmax.normalize),
    trials=_across_trials,
    hints={
        "start": "mine = torch.stack(summarize(x)) has m and ℓ of each row, in one tensor.",
        "values": "dist.all_gather(pairs, mine), merge all pairs in a loop, and divide by the ℓ of "
        "the whole row, with its m.",
        "hang": "Every rank calls the same collectives, with tensors of one shape, whatever it has "
        "of the row.",
        "error": "With all pairs merged, the result is exp(x - m[:, None]) / ell[:, None].",
    },
    praise="no more than two numbers a row from each rank, however long the row is.",
    wire=_pairs_only,
    mistakes=ACROSS,
)
