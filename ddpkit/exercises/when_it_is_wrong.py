"""Checkers of notebook 14: exposed, token_loss, replicas_apart, first_wrong.

The museum's pieces are in `museum`.
"""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpkit.data_parallel import average_gradients

from .checker import Exercise, Trial, mistakes

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these

Spans = list[tuple[float, float]]  # (begin, end)


# exposed(computing, communication)


def covered(spans: Spans) -> float:
    total = 0.0
    reached = -math.inf
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def exposed(computing: Spans, communication: Spans) -> float:
    return covered([*computing, *communication]) - covered(computing)


STEPS = {  # computing, communication, and what is exposed
    "one message after all": ([(0, 10)], [(10, 14)], 4),
    "one message beside": ([(0, 10)], [(3, 8)], 0),
    "half beside": ([(0, 10)], [(8, 15)], 5),
    "two at once": ([(0, 10)], [(12, 16), (11, 14)], 5),
    "a pause": ([(0, 4), (9, 12)], [(3, 10)], 5),
    "nothing sent": ([(0, 5)], [], 0),
    "nothing computed": ([], [(2, 5), (7, 8)], 4),
    "two streams compute": ([(0, 6), (4, 9)], [(5, 11)], 2),
    "in no order": ([(9, 12), (0, 4)], [(20, 21), (3, 10), (4, 5)], 6),
}


def run_exposed(answer):
    return {what: float(answer(list(a), list(b))) for what, (a, b, _) in STEPS.items()}


exposed = Exercise(
    reference=exposed,
    helpers=(covered,),
    trials=lambda: [Trial(1, run_exposed, (), [{w: float(r) for w, (_, _, r) in STEPS.items()}])],
    hints={
        "start": "How many seconds are covered by a list of spans? Sort them, and remember how far "
        "you have come.",
        "values": "What all spans together cover, less what computing alone covers.",
        "error": "A list may be empty.",
    },
    praise="computing + communication - union would be what overlaps; this is what doesn't.",
    mistakes=mistakes("""
all_of_it: covered([*computing, *communication]) - covered(computing) → covered(communication)
    That is all communication. What computing hides costs nothing.
spans_added: total += max(0.0, end - max(begin, reached)) → total += end - begin
    Two spans at once are one second a second, not two: join what overlaps first.
the_difference: covered([*computing, *communication]) - covered(computing) → max(
    ⏎0.0, covered(communication) - covered(computing))
    A message is hidden only by what is computed at the same time.
the_hidden_part: covered([*computing, *communication]) - covered(computing) → (
    ⏎covered(computing) + covered(communication) - covered([*computing, *communication]))
    That is what is hidden. The rest of the communication is exposed.
after_the_last: covered([*computing, *communication]) - covered(computing) → (
    ⏎max([e for _, e in communication], default=0) - max([e for _, e in computing], default=0))
    Not only after the last product: between two of them a rank may wait, too.
"""),
)


# token_loss(losses)


def token_loss(losses: Tensor) -> Tensor:
    tokens = torch.tensor(float(len(losses)))
    dist.all_reduce(tokens)
    return losses.sum() / tokens * dist.get_world_size()


COUNTS = {2: [1, 2], 3: [2, 0, 3], 4: [1, 4, 2, 3], 1: [5]}  # tokens by rank


def run_loss(answer, counts):
    """Average gradients of losses of 10**rank a token, times all tokens: digits are counts."""
    module = nn.Linear(1, 1, bias=False)
    nn.init.ones_(module.weight)
    rank = dist.get_rank()
    tokens = torch.ones(counts[rank], 1) * sum(counts) * 10**rank
    answer(module(tokens).squeeze(1)).backward()
    average_gradients(module)
    return {"gradient": round(module.weight.grad.item(), 3)}


def loss_trials():
    for world_size, counts in COUNTS.items():
        digits = sum(count * 10**rank for rank, count in enumerate(counts))
        named = ", ".join(map(str, counts))
        expected = [{"gradient": float(digits)}] * world_size
        yield Trial(world_size, run_loss, (counts,), expected, what=f"with {named} tokens")


token_loss = Exercise(
    reference=token_loss,
    trials=lambda: list(loss_trials()),
    hints={
        "start": "all_reduce the number of tokens. Then the sum of the losses, divided by it; and "
        "the mean over ranks that comes behind divides once more.",
        "values": "sum / all ranks' tokens · W.",
        "hang": "Every rank calls all_reduce, one without tokens too.",
        "error": "dist.all_reduce takes a tensor: torch.tensor(float(len(losses))).",
    },
    praise="each token counts alike, whatever rank it is on, and a rank without tokens joins in.",
    mistakes=mistakes("""
mean_of_means: losses.sum() / tokens * dist.get_world_size() → losses.mean()
    A mean of means: a token on a rank with few counts more than one on a rank with many. On a rank
    with none it is 0/0.
not_undone: tokens * dist.get_world_size() → tokens
    The mean over ranks that follows divides by W, so it is divided by W too often.
own_tokens: dist.all_reduce(tokens) → pass
    Those are this rank's tokens only: all_reduce their number first.
a_sum: / tokens * dist.get_world_size() → * dist.get_world_size()
    That is a sum: more tokens make a larger step. Divide by the tokens of all ranks.
"""),
)


# replicas_apart(module)


def replicas_apart(module: nn.Module) -> dict[str, list[int]]:
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, module.state_dict())
    found = {}
    for name, first in everyones[0].items():
        odd = []
        for rank, theirs in enumerate(everyones):
            if not torch.equal(theirs[name], first):
                odd.append(rank)
        if odd:
            found[name] = odd
    return found


def run_replicas(answer, odd):
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    for tensor in module.state_dict().values():
        tensor.fill_(1)
    rank = dist.get_rank()
    for name, ranks in odd.items():
        if rank in ranks:
            last = module.state_dict()[name].flatten()[-1:]
            last += last.new_tensor(2.0**-20 if last.is_floating_point() else 1)
    return {"apart": {name: list(ranks) for name, ranks in answer(module).items()}}


def replicas_trials():
    for world_size, odd, what in (
        (2, {"0.weight": [1]}, "a number of rank 1's weight is off by 2⁻²⁰"),
        (3, {}, "all alike"),
        (3, {"1.running_mean": [2], "1.num_batches_tracked": [1, 2]}, "buffers differ"),
        (4, {"0.bias": [1, 3], "1.weight": [2]}, "two tensors, on several ranks"),
    ):
        yield Trial(world_size, run_replicas, (odd,), [{"apart": odd}] * world_size, what=what)


replicas_apart = Exercise(
    reference=replicas_apart,
    trials=lambda: list(replicas_trials()),
    hints={
        "start": "module.state_dict() has parameters and buffers by name; dist.all_gather_object "
        "brings everyone's.",
        "values": "torch.equal compares to the bit. Only names of which some rank differs.",
        "hang": "Every rank makes the call, rank 0 too.",
        "error": "everyones[rank][name] is a rank's tensor.",
    },
    praise="parameters and buffers, to the bit. `ddpkit.audit.agree` looks at the optimizer, too.",
    mistakes=mistakes("""
nearly: torch.equal(theirs[name], first) → torch.allclose(theirs[name], first, 1e-5)
    Nearly equal isn't equal: replicas that are a rounding apart are already two models.
parameters_only: module.state_dict()) → dict(module.named_parameters()))
    Buffers are missing: state_dict() has both.
all_names: if odd:⏎    found[name] = odd → found[name] = odd
    Only what isn't alike should be in the dict.
counts: found[name] = odd → found[name] = [len(odd)]
    Which ranks are they? A list of their numbers.
only_the_first: return found → return dict(list(found.items())[:1])
    All tensors that differ, not only the first.
"""),
)


# first_wrong(differs, last)


def first_wrong(differs: Callable[[int], bool], last: int) -> int:
    fine = 0
    wrong = last
    while wrong - fine > 1:
        middle = (fine + wrong) // 2
        if differs(middle):
            wrong = middle
        else:
            fine = middle
    return wrong


def run_bisect(answer):
    found = {}
    for last, first in ((8, 5), (1, 1), (100, 1), (100, 100), (37, 18), (1000, 777)):
        asked = []

        def differs(step, first=first, asked=asked):
            asked.append(step)
            return step >= first

        found[f"first of {last}"] = answer(differs, last)
        limit = math.ceil(math.log2(last))
        found[f"runs for {last}, beyond {limit}"] = max(0, len(asked) - limit)
        found[f"runs outside 1 to {last - 1}"] = sorted({s for s in asked if not 0 < s < last})
    return found


def bisected():
    found = {}
    for last, first in ((8, 5), (1, 1), (100, 1), (100, 100), (37, 18), (1000, 777)):
        found[f"first of {last}"] = first
        found[f"runs for {last}, beyond {math.ceil(math.log2(last))}"] = 0
        found[f"runs outside 1 to {last - 1}"] = []
    return found


first_wrong = Exercise(
    reference=first_wrong,
    trials=lambda: [Trial(1, run_bisect, (), [bisected()])],
    hints={
        "start": "Keep two numbers: the last step that is known to be fine, 0 at first, and the "
        "first known to be wrong, `last`.",
        "values": "Ask for the middle; one of the two moves there. They are neighbours at the end.",
        "hang": "One of the two has to move in each round.",
        "error": "differs(step) is a run of the program: call it with an int.",
    },
    praise="10 runs for 1,000 steps.",
    mistakes=mistakes("""
one_by_one: middle = (fine + wrong) // 2 → middle = fine + 1
    Right, but as many runs as steps. Ask for the middle: half of what is left is spared each time.
the_last_fine_one: return wrong → return fine
    That is the last step which is fine. The first wrong one is next to it.
sides_swapped: if differs(middle): → if not differs(middle):
    If the middle differs, the first wrong step is there or before.
asks_the_end: wrong = last → wrong = last⏎differs(last)
    That the last step is wrong is known: each run costs minutes.
stops_early: while wrong - fine > 1: → while wrong - fine > 2:
    There may be a step left between the two.
"""),
)
