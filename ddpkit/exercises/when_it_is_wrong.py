"""Checkers of notebook 14: exposed, token_loss, out_of_sight, replicas_apart, first_wrong.

The museum's pieces are in `museum`.
"""

import copy
import itertools
import math
from collections.abc import Callable
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from ddpkit.data_parallel import average_gradients

from .checker import Exercise, Trial, mistakes
from .on_rank import bits

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
    "in part beside": ([(0, 10)], [(8, 15)], 5),
    "two at once": ([(0, 10)], [(12, 16), (11, 14)], 5),
    "a pause": ([(0, 4), (9, 12)], [(3, 10)], 5),
    "nothing sent": ([(0, 5)], [], 0),
    "nothing computed": ([], [(2, 5), (7, 8)], 4),
    "two streams compute": ([(0, 6), (4, 9)], [(5, 11)], 2),
    "parts of a second": ([(0, 0.1875)], [(0.0625, 0.5)], 0.3125),
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
        "error": "A list may be empty, and times are seconds, whole or not.",
    },
    says={
        what: f"{what}, computing {a}, messages {b}: {{got}} s, expected {{expected}} s."
        for what, (a, b, _) in STEPS.items()
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


COUNTS = {2: [1, 2], 3: [2, 0, 3], 4: [1, 4, 2, 3], 1: [257]}  # tokens by rank


NUMBER = "a loss that is a number"
LEADS = "a loss that leads back to the weights"


def run_loss(answer, counts):
    """Average the gradients of tokens that bring 10**rank × all tokens: digits count tokens."""
    module = nn.Linear(1, 1, bias=False)
    nn.init.ones_(module.weight)
    rank = dist.get_rank()
    tokens = torch.ones(counts[rank], 1) * sum(counts) * 10**rank
    loss = answer(module(tokens).squeeze(1))
    loss.backward()
    leads = module.weight.grad is not None
    average_gradients(module)
    gradient = round(module.weight.grad.item(), 3)
    return {"gradient": gradient, NUMBER: bool(loss.isfinite()), LEADS: leads}


def loss_trials():
    for world_size, counts in COUNTS.items():
        digits = sum(count * 10**rank for rank, count in enumerate(counts))
        named = ", ".join(map(str, counts))
        expected = [{"gradient": float(digits), NUMBER: True, LEADS: True}] * world_size
        yield Trial(world_size, run_loss, (counts,), expected, what=f"with {named} tokens")


token_loss = Exercise(
    reference=token_loss,
    trials=lambda: list(loss_trials()),
    says={
        NUMBER: "the gradient is right, but the loss on rank {rank} is NaN or infinite.",
        LEADS: "the gradient is right here, but the loss on rank {rank} doesn't lead back to the "
        "weights.",
    },
    hints={
        "start": "all_reduce the number of tokens. Then the sum of the losses, divided by it; and "
        "the mean over ranks that comes behind divides once more.",
        "values": "sum / all ranks' tokens · W.",
        "hang": "Every rank calls all_reduce, one without tokens too.",
        "error": "dist.all_reduce takes a tensor: torch.tensor(float(len(losses))).",
    },
    praise="each token counts alike, whatever rank it is on, and a rank without tokens joins in, "
    "in backward too.",
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
mean_of_nothing: losses.sum() → losses.mean() * len(losses)
    The mean of no numbers is NaN, and NaN times 0 is NaN: add up with sum(), which gives 0.
leads_nowhere: dist.all_reduce(tokens) → dist.all_reduce(tokens)
    ⏎if not len(losses): return torch.zeros((), requires_grad=True)
    DDP sends gradients from within backward. Where the loss doesn't lead back to the weights, that
    rank sends nothing, and the others wait for it. losses.sum() is 0 there, and leads back.
"""),
)


# out_of_sight(gradient)


def out_of_sight(gradient: Tensor) -> Tensor:
    factor = torch.ones_like(gradient)
    factor[0] = 1000.0
    return gradient * factor


APART = "AdamW's weights after 20 steps"
TURNED = "each gradient"


def run_out_of_sight(answer):
    """Train a right and a wrong copy by AdamW; compare their weights, and the gradients' angles."""
    torch.manual_seed(0)
    right, x, y = nn.Linear(8, 8).double(), torch.randn(16, 8).double(), torch.randn(16, 8).double()
    start = parameters_to_vector(right.parameters()).detach()
    wrong = copy.deepcopy(right)
    angles, weights = [], []
    for module in (right, wrong):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        for _ in range(20):
            optimizer.zero_grad()
            (module(x) - y).square().mean().backward()
            if module is wrong:
                for p in module.parameters():
                    true = p.grad
                    p.grad = answer(true.clone())
                    cosine = torch.cosine_similarity(true.flatten(), p.grad.flatten(), dim=0)
                    angles.append(math.degrees(cosine.clamp(-1, 1).acos()))
            optimizer.step()
        weights.append(parameters_to_vector(module.parameters()).detach())
    apart = float((weights[1] - weights[0]).norm() / (weights[0] - start).norm())
    return {
        APART: WITHIN if apart < 0.01 else f"{apart:.0%} of their way",
        TURNED: OFF if min(angles) > 20 else f"{min(angles):.0f}° off the right one",
    }


WITHIN, OFF = "within 1 % of their way", "more than 20° off the right one"

out_of_sight = Exercise(
    reference=out_of_sight,
    trials=lambda: [Trial(1, run_out_of_sight, (), [{APART: WITHIN, TURNED: OFF}])],
    hints={
        "start": "AdamW divides each *number* of a gradient by that number's own size. So a factor "
        "cancels, number by number.",
        "values": "A row times 1000, the others as they are: the gradient then points along that "
        "row. The factors must be the same in every step.",
    },
    says={
        APART: "AdamW's weights ended {got} apart, expected {expected}: it sees this one.",
        TURNED: "a gradient points {got}, expected {expected}.",
    },
    praise="AdamW's weights don't show it. A step of SGD would point where the gradient points.",
    note="AdamW's step is m / √v, number by number: a factor that a number keeps cancels, if the "
    "number stays far above ε. In the wild it is a layer's: experts e times too large, copies that "
    "are summed. Each tensor points right then, all together don't; same_training sees it.",
    mistakes=mistakes("""
one_factor: factor[0] = 1000.0 → factor *= 1000.0
    One factor for all leaves the direction as it is: SGD only takes longer steps. AdamW hides more
    than that: it divides number by number.
by_chance: factor[0] = 1000.0 → factor.log_normal_(0, 4)
    Factors that change from step to step don't cancel: AdamW divides by a mean of many steps.
turned_round: 1000.0 → -1000.0
    AdamW divides by a size, and a size has no sign.
nothing_left: torch.ones_like(gradient) → torch.full_like(gradient, 1e-12)
    Numbers as small as AdamW's ε = 1e-8 aren't divided by their size, but by ε.
too_little: 1000.0 → 1.5
    That turns it a little. Make the factors more unequal.
"""),
)


# replicas_apart(module)


def replicas_apart(module: nn.Module) -> dict[str, list[int]]:
    mine = {}
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        mine[name] = tensor.detach().flatten().view(torch.uint8)  # its bytes
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    found = {}
    for name, first in everyones[0].items():
        odd = []
        for rank, theirs in enumerate(everyones):
            if not torch.equal(theirs[name], first):
                odd.append(rank)
        if odd:
            found[name] = odd
    return found


AS_IT_WAS = "the module is as it was"


def add_to_the_last(tensor):
    """Add a small step to the last number; float32 would lose that of a float64 or an int64."""
    tensor[-1] += {torch.float32: 2.0**-20, torch.float64: 2.0**-40, torch.int64: 1}[tensor.dtype]


def exchange(tensor):
    """Exchange the first number and the last, which differ: no sum changes."""
    tensor[0] = 2
    tensor.copy_(tensor.roll(-1))


def replace_zero(tensor):
    """Make the last number NaN on rank 1, and -0.0, an equal number with other bits, elsewhere."""
    tensor[-1] = math.nan if dist.get_rank() == 1 else -0.0


def salted(value, plain=hash):
    """Hash as processes of torchrun do: each has its own salt for strings and bytes."""
    return plain((dist.get_rank(), value) if isinstance(value, str | bytes) else value)


def replica(special):
    """Make a module, the same on all ranks: numbers are 1, integers 2²⁴, 0.bias is `special`."""
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3).double())
    module.register_buffer("mask", torch.ones(2), persistent=False)
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data.fill_(1 if tensor.is_floating_point() else 2**24)
    module[0].bias.data.copy_(torch.tensor(special))
    return module


def run_replicas(answer, odd, change, special):
    module = replica(special)
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, ranks in odd.items():
        if dist.get_rank() in ranks:
            change(tensors[name].data.flatten())  # a view
    before = [bits(tensor) for tensor in tensors.values()]
    with mock.patch("builtins.hash", salted):
        found = answer(module)
    found = found and {name: list(ranks) for name, ranks in found.items()}
    return {"apart": found, AS_IT_WAS: before == [bits(tensor) for tensor in tensors.values()]}


def replicas_trials():
    plain = [1.0, 1.0, 1.0]
    for world_size, odd, change, special, what in (
        (
            2,
            {"0.weight": [1]},
            add_to_the_last,
            plain,
            "a number of rank 1's weight is off by 2⁻²⁰",
        ),
        (3, {}, None, plain, "all alike"),
        (3, {"1.running_mean": [2], "mask": [1, 2]}, add_to_the_last, plain, "buffers differ"),
        (
            4,
            {"0.bias": [1, 3], "1.num_batches_tracked": [2]},
            add_to_the_last,
            plain,
            "two tensors",
        ),
        (2, {"0.bias": [1]}, exchange, [2.0, 1.0, 1.0], "two numbers of a bias are exchanged"),
        (
            4,
            {"0.bias": [1, 2]},  # rank 3 has the NaN of rank 0
            replace_zero,
            [math.nan, 0.0, 0.0],
            "a 0 of a bias is NaN on rank 1, -0 on rank 2",
        ),
    ):
        expected = [{"apart": odd, AS_IT_WAS: True}] * world_size
        yield Trial(world_size, run_replicas, (odd, change, special), expected, what=what)


replicas_apart = Exercise(
    reference=replicas_apart,
    trials=lambda: list(replicas_trials()),
    says={
        "apart": "rank {rank} returns {got}, expected {expected}.",
        AS_IT_WAS: "what it returns is right, but on rank {rank} the module isn't what it was.",
    },
    hints={
        "start": "named_parameters() and named_buffers() have all by name; dist.all_gather_object "
        "brings everyone's.",
        "values": "Compare bytes: tensor.detach().flatten().view(torch.uint8). Only names of which "
        "some rank differs.",
        "hang": "Every rank makes the call, rank 0 too.",
        "error": "everyones[rank][name] is a rank's tensor.",
    },
    praise="parameters and buffers, to the bit. `ddpkit.audit.agree` looks at the optimizer, too.",
    mistakes=mistakes("""
nearly: tensor.detach().flatten().view(torch.uint8) → tensor.detach().mul(1e5).round()
    Nearly equal isn't equal: replicas that are a rounding apart are already two models.
parameters_only: (module.named_parameters(), module.named_buffers()) → (module.named_parameters())
    Buffers are missing: named_buffers() has them.
saved_only: (module.named_parameters(), module.named_buffers()) → (module.state_dict().items())
    state_dict() leaves out buffers that aren't saved (persistent=False): take named_buffers().
all_names: if odd:⏎    found[name] = odd → found[name] = odd
    Only what isn't alike should be in the dict.
counts: found[name] = odd → found[name] = [len(odd)]
    Which ranks are they? A list of their numbers.
hashed: .flatten().view(torch.uint8) → .new_tensor(hash(bits(tensor)), dtype=torch.int64)
    Python salts hash() of bytes in each process: under torchrun everything would differ. Take
    hashlib.sha256, or compare the bytes themselves.
sums: tensor.detach().flatten().view(torch.uint8) → tensor.detach().double().sum()
    A sum doesn't show which number is where: 1, 2 and 2, 1 have the same.
equal_numbers: tensor.detach().flatten().view(torch.uint8) → tensor.detach()
    Numbers were compared, not bits: 0.0 equals -0.0, and a NaN not even itself. Compare bytes:
    tensor.flatten().view(torch.uint8).
overwrites: return found → [dist.broadcast(tensor, 0) for tensor in module.state_dict().values()]
    ⏎return found
    The audit wrote rank 0's numbers into the module, and the evidence is gone. Work on copies.
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


BISECTED = (8, 5), (1, 1), (100, 1), (100, 100), (37, 18), (1000, 777)  # last, first
ENDS = "steps that needn't be asked"
RUNS = {last: f"runs, where last is {last}" for last in (1000, 37, 100, 8, 1)}


def run_bisect(answer):
    found, runs, ends = {}, dict.fromkeys(RUNS.values(), 0), set()
    for last, first in BISECTED:
        asked = []

        def differs(step, first=first, asked=asked):
            asked.append(step)
            return step >= first

        found[f"first of {last}, where it is {first}"] = answer(differs, last)
        runs[RUNS[last]] = max(runs[RUNS[last]], len(asked), math.ceil(math.log2(last)))
        ends |= {step for step in asked if not 0 < step < last}
    return found | runs | {ENDS: sorted(ends)}


def bisected():
    found = {f"first of {last}, where it is {first}": first for last, first in BISECTED}
    return found | {RUNS[last]: math.ceil(math.log2(last)) for last in RUNS} | {ENDS: []}


def of_the_runs(trial, rank, expected, got):
    """Explain too many runs: one a step, or a few too many; None if a step found is wrong."""
    if any(got[what] != step for what, step in expected.items() if what.startswith("first")):
        return None
    if got[RUNS[1000]] > 500:
        return (
            "Right, but as many runs as steps. Ask for the middle: it spares half of what is left."
        )
    return "Ask neither 0 nor `last`, whose answers are known, and halve what is left each time."


first_wrong = Exercise(
    reference=first_wrong,
    trials=lambda: [Trial(1, run_bisect, (), [bisected()])],
    explain=of_the_runs,
    says={
        what: f"{what}: {{got}}, and {{expected}} are enough: each is minutes of training."
        for what in RUNS.values()
    },
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
    Right, but as many runs as steps. Ask for the middle: it spares half of what is left.
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
