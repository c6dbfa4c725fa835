"""Checker of notebook 06: chunked_cross_entropy, whose logits never exist all at once."""

import torch
import torch.nn.functional as F
from torch import nn

from ddpkit.checkpointing import checkpoint
from ddpkit.memory import watch

from .checker import Exercise, Rounded, Trial, first_difference, mistakes

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these

WIDTH, VOCABULARY = 4, 512
CASES = (128, 8), (125, 8), (8, 32)  # tokens, rows at a time: also some that don't divide
COPIES = 6  # of a part's logits: logits, their logarithms, gradients of both, and some to spare
TOLD = "the most numbers in memory at a time, beside x and the weights, forward and backward"


def chunked_cross_entropy(x, head, targets, rows):
    def loss_of(part, wanted):
        return F.cross_entropy(head(part), wanted, reduction="sum")

    total = 0.0
    for part, wanted in zip(x.split(rows), targets.split(rows), strict=True):
        total = total + checkpoint(loss_of, part, wanted)
    return total / len(targets)


def _data(tokens: int) -> tuple[torch.Tensor, nn.Linear, torch.Tensor]:
    """Make x, the head and the targets; logits of all tokens are tokens * VOCABULARY."""
    head = nn.Linear(WIDTH, VOCABULARY, dtype=torch.float64)
    numbers = torch.arange(WIDTH * VOCABULARY, dtype=torch.float64)
    head.weight.data = (numbers * 7 % 11 - 5).view(VOCABULARY, WIDTH) / 8
    head.bias.data = torch.arange(VOCABULARY).double() % 5 / 8
    x = (torch.arange(tokens * WIDTH).double() * 5 % 13 - 6).view(tokens, WIDTH) / 8
    return x.requires_grad_(), head, torch.arange(tokens) * 37 % VOCABULARY


def _seen(x, head, loss) -> dict:
    return {
        "loss": Rounded([loss.item()], 6),
        "gradient of x": _numbers(x.grad),
        "gradient of the weight": _numbers(head.weight.grad),
        "gradient of the bias": _numbers(head.bias.grad),
    }


def _numbers(gradient: torch.Tensor | None) -> Rounded | None:
    return None if gradient is None else Rounded(gradient.flatten().tolist(), 6)


def _run(answer, tokens, rows):
    x, head, targets = _data(tokens)
    with watch(head, buckets=[x, targets]) as timeline:
        loss = answer(x, head, targets, rows)
        loss.backward()
    most = (max(timeline.totals) - timeline.totals[0]) // x.itemsize
    enough = COPIES * min(rows, tokens) * VOCABULARY + 3 * (WIDTH + 1) * VOCABULARY + 2000
    return _seen(x, head, loss) | {TOLD: "few" if most <= enough else most}


def _trials():
    for tokens, rows in CASES:
        x, head, targets = _data(tokens)
        loss = F.cross_entropy(head(x), targets)
        loss.backward()
        right = _seen(x, head, loss) | {TOLD: "few"}
        yield Trial(1, _run, (tokens, rows), [right], what=f"{tokens} tokens, {rows} at a time")


def _read_numbers(_trial, _rank, right, seen):
    if first_difference(right, seen) == TOLD:
        return "Take `rows` rows of x at a time. And what keeps a part's logits until backward?"
    return None


chunked_cross_entropy = Exercise(
    reference=chunked_cross_entropy,
    trials=_trials,
    says={
        TOLD: "loss and gradients are right, but {got} numbers were in memory at a time: logits of "
        "too many tokens, in forward or until backward."
    },
    explain=_read_numbers,
    hints={
        "start": "x.split(rows) and targets.split(rows) are parts that belong together. The mean "
        "over all tokens is the sum of the parts' sums, divided once.",
        "values": 'F.cross_entropy(head(part), wanted, reduction="sum") for each part; the total '
        "is divided by len(targets).",
        "error": "checkpoint(function, *tensors) calls function(*tensors): give it part and "
        "wanted, not names that change before backward.",
    },
    praise="as one process with all logits, but only some rows of them ever exist.",
    note="Liger's fused loss computes each chunk's gradient along with it: no second forward.",
    mistakes=mistakes("""
all_at_once: total = 0.0 → rows = len(x)⏎total = 0.0
    All logits were in memory at a time: take rows of x at a time.
without_checkpoint: checkpoint(loss_of, part, wanted) → loss_of(part, wanted)
    Each part's logits wait for backward, so all of them exist together: checkpoint(…) keeps only
    the part, and computes its logits again.
mean_of_means: reduction="sum") → reduction="mean") * rows
    Right while all parts have the same size. The last one is shorter here: sum, then divide once.
never_divides: total / len(targets) → total
    That is the sum over the tokens: divide by their number, once.
by_the_parts: total / len(targets) → total / len(x.split(rows))
    The mean is over the tokens, not over the parts.
without_graph: checkpoint(loss_of, part, wanted) → checkpoint(loss_of, part.detach(), wanted)
    x has no gradient: its parts were cut from the graph.
"""),
)
