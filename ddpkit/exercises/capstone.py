"""Checkers of notebook 15: a schedule, a loss, a norm, a slow step, a mesh, a killed save."""

import contextlib
import math
import os
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from ddpkit.ddp import BucketedDDP
from ddpkit.runtime.recorder import recorder
from ddpkit.tools.kills import kill_before_each_change
from ddpkit.tools.rate import learning_rate

from .checker import Exercise, Mistake, Rounded, Trial, mistakes
from .score import SPARE, spare
from .tensor_parallel import group_of, in_groups, of_group

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these


# learning_rate(step, steps, warmup, peak, last)


COSINE = [10, 8.828427, 6, 3.171573, 2]  # by hand: from 10 to 2, a quarter of the way a step
RATES = {  # steps, warmup, peak, last, and the rate of each step
    "4 of 9 steps rise": ((9, 4, 10.0, 2.0), [2.5, 5, 7.5, 10, *COSINE]),
    "2 of 7 steps rise": ((7, 2, 10.0, 2.0), [5, 10, *COSINE]),
    "no step rises": ((5, 0, 10.0, 2.0), COSINE),
    "all 4 steps rise": ((4, 4, 8.0, 1.0), [2, 4, 6, 8]),
    "all but the last of 5 steps rise": ((5, 4, 8.0, 1.0), [2, 4, 6, 8, 8]),
}
RIGHT_RATES = {what: Rounded(rates, 5) for what, (_, rates) in RATES.items()}


def run_rates(answer):
    found = {}
    for what, (settings, _) in RATES.items():
        try:
            rates = [float(answer(step, *settings)) for step in range(settings[0])]
            found[what] = Rounded(rates, 5)
        except ZeroDivisionError:
            found[what] = "ZeroDivisionError"
    return found


learning_rate = Exercise(
    reference=learning_rate,
    trials=lambda: [Trial(1, run_rates, (), [RIGHT_RATES], rungs=tuple(RATES))],
    hints={
        "start": "First the rise: step 0 has peak / warmup, step warmup - 1 has peak. Then a share "
        "`done` of the way down: 0 in step warmup, 1 in step steps - 1.",
        "values": "(1 + cos(π · done)) / 2 falls from 1 to 0: multiply by what lies between peak "
        "and last, and add last.",
        "error": "warmup may be 0, or steps - 1: divide by neither what may be 0.",
    },
    praise="from the first step to the last, with and without a warm-up; of the step alone, so a "
    "resumed run goes on with the same rates.",
    mistakes=mistakes("""
starts_at_zero: (step + 1) / warmup → step / warmup
    Step 0 has the rate 0: its gradient is computed and thrown away. Begin with peak / warmup.
counts_from_the_start: (step - warmup) / max(1, steps - 1 - warmup) → step / (steps - 1)
    The cosine begins where the warm-up ends: count from step warmup, or the rate jumps there.
never_arrives: max(1, steps - 1 - warmup) → (steps - warmup)
    The last step has the number steps - 1: there the rate should be `last`, and it is above.
begins_a_step_early: done = (step - warmup) / max(1, steps - 1 - warmup) →
    ⏎done = (step - warmup + 1) / (steps - warmup)
    Step warmup has the peak, too: the cosine begins there, with 0 of its way done.
whole_cosine: math.cos(math.pi * done) → math.cos(2 * math.pi * done)
    A whole cosine goes down and up again: the rate ends at the peak. Take half of one, to π.
once_a_rank: if step < warmup: → step = step * 2⏎if step < warmup:
    The rate goes W steps at a time: each rank moved the schedule on. All ranks take one and the
    same step together, and it counts once.
divides_by_nothing: if step < warmup:⏎return peak * (step + 1) / warmup →
    ⏎if (step + 1) / warmup < 1:⏎    return peak * (step + 1) / warmup
    Without a warm-up, warmup is 0: divide by it only in a step that is below it.
divides_by_no_way: max(1, steps - 1 - warmup) → (steps - 1 - warmup)
    Where the warm-up ends just before the last step, steps - 1 - warmup is 0: divide by at least 1.
"""),
)


# logged_loss(losses, group)


def logged_loss(losses, group=None):
    counted = torch.zeros(2, dtype=torch.float64, device=losses.device)
    counted[0] = losses.detach().sum()
    counted[1] = len(losses)
    dist.all_reduce(counted, group=group)
    return counted[0] / counted[1]


SHAPE = "shape of the tensor that it returns"
GRAPH = "the result has a graph"
MANY = "the mean of 30,000 losses of 2.3 a rank"
CALLS = "calls for the loss"
TOKENS = {2: [3, 1], 3: [2, 0, 3], 4: [1, 4, 2, 0], 1: [5]}  # of each rank


def run_logged(answer, size):
    """Return what the answer does with losses of which the mean has each rank's tokens as a digit.

    Each loss on the group's rank p is 10**p times the group's tokens: 3 and 1 tokens make it 13.
    """
    place = dist.get_rank() % size
    tokens = TOKENS[dist.get_world_size()]
    everyones = sum(tokens[dist.get_rank() - place :][:size])
    weight = torch.ones(tokens[dist.get_rank()], requires_grad=True)
    got = answer(weight * everyones * 10**place, group_of(size))
    if not torch.is_tensor(got):
        return {SHAPE: type(got).__name__}
    mean = [round(number, 3) for number in got.flatten().tolist()]
    begun = len(recorder().records)
    of_many = Rounded([float(answer(torch.full((30_000,), 2.3), group_of(size)))], 3)
    calls = [record.op for record in recorder().records[begun:] if record.op != "new_group"]
    seen = {SHAPE: tuple(got.shape), "loss": mean, GRAPH: got.requires_grad, MANY: of_many}
    return seen | {CALLS: len(calls)}


def logged(world_size, size):
    found = []
    for rank in range(world_size):
        tokens = TOKENS[world_size][rank - rank % size :][:size]
        mean = sum(count * 10**place for place, count in enumerate(tokens))
        right = {SHAPE: (), "loss": [float(mean)], GRAPH: False, MANY: Rounded([2.3], 3)}
        found.append(right | {CALLS: 1})
    return found


logged_loss = Exercise(
    reference=logged_loss,
    trials=lambda: list(in_groups(run_logged, logged, "unequal tokens, perhaps none")),
    same_dtype=False,
    explain=of_group,
    says={
        "loss": "rank {rank} logs {got}, expected {expected}. Read the digits from the right: the "
        "first counts the tokens of the group's first rank, the next its second's.",
        CALLS: "the loss is right, but rank {rank} made {got} calls, where one does.",
    },
    hints={
        "start": "Two numbers from each rank: the sum of its losses and the number of its tokens. "
        "One all_reduce of both; then divide.",
        "values": "counted = torch.zeros(2); counted[0] = losses.detach().sum(); counted[1] = "
        "len(losses). After the all_reduce: counted[0] / counted[1].",
        "hang": "Every rank calls all_reduce, one without tokens too.",
        "error": "The sum of no numbers is 0, their mean is NaN.",
    },
    praise="each token counts alike, and a rank without tokens joins in: one small call.",
    mistakes=mistakes("""
mean_of_means: counted[0] = losses.detach().sum()⏎counted[1] = len(losses) →
    ⏎counted[0] = losses.detach().mean()⏎counted[1] = 1
    A mean of means: a token on a rank with few counts more than one on a rank with many, and a
    rank without tokens makes it NaN. Add up losses and tokens apart, and divide last.
mean_of_nothing: losses.detach().sum() → losses.detach().mean() * len(losses)
    The mean of no numbers is NaN, and NaN times 0 is NaN: add up with sum(), which gives 0.
divided_by_ranks: counted[1] = len(losses) → counted[1] = 1
    The sum was divided by the number of ranks. Divide by the tokens of all ranks.
own_loss: dist.all_reduce(counted, group=group) → pass
    That is this rank's own loss. The others' tokens are missing: all_reduce.
whole_world: dist.all_reduce(counted, group=group) → dist.all_reduce(counted)
    All ranks came into it: give all_reduce the group.
without_a_call: counted[1] = len(losses) → counted[1] = len(losses)
    ⏎if not len(losses): return counted[0]
    A rank without tokens left before the all_reduce, for which the others wait: join in with two
    zeros.
keeps_the_graph: return counted[0] / counted[1] → return counted[0] / counted[1] + 0 * losses.sum()
    It has a graph: a list of such losses keeps every activation. detach() first.
in_bfloat16: dtype=torch.float64 → dtype=torch.bfloat16
    It was added up in bfloat16, which has 8 bits: 69,000 becomes 69,120. Take float64.
two_calls: dist.all_reduce(counted, group=group) → dist.all_reduce(counted[0], group=group)
    ⏎dist.all_reduce(counted[1], group=group)
    Each call costs a latency, however small it is: put both numbers into one tensor.
"""),
)


# mesh_norm(gradients, copies, group)


def mesh_norm(gradients, copies, group=None):
    squares = torch.zeros((), dtype=torch.float64)
    for gradient, count in zip(gradients, copies, strict=True):
        squares += gradient.double().square().sum() / count
    dist.all_reduce(squares, group=group)
    return squares.sqrt()


PARTS = "parts alone, in pairs, on all"
NORMS = PARTS, "the last rank has none", "in float16", "in bfloat16", "in float32"


def parts(what, place, size):
    """List (numbers, copies) of a rank's gradients; copies: how many ranks hold the same one.

    what: the case, of NORMS. place: the rank's number in its group, which has `size` ranks.
    """
    own = [3.0 * (place + 1), -4.0 * (place + 1)], 1
    if what == PARTS:
        pair = [([8.0, 6.0], min(2, size))] if place < 2 else []
        return [own, *pair, ([12.0, 0.0, 5.0], size)]
    if what == "in float16":
        return [([300.0, 400.0], 1)]  # 300² is more than float16 has
    if what == "in bfloat16":
        return [([256.0] + [1.0] * 256, size)]  # 256² + 256 is between two numbers of bfloat16
    if what == "in float32":
        return [([3e20, 4e20], 1)]  # (3e20)² is more than float32 has
    return [own] if place < size - 1 else []


def six_digits(norm):
    return float(f"{float(norm):.6g}")


def run_norm(answer, size):
    group = group_of(size)
    begun = len(recorder().records)
    found = {}
    for what in NORMS:
        dtype = getattr(torch, what.removeprefix("in "), torch.float32)
        mine = parts(what, dist.get_rank() % size, size)
        copies = [count for _, count in mine]
        norm = answer([torch.tensor(numbers, dtype=dtype) for numbers, _ in mine], copies, group)
        kind = f"{norm.dtype}, {norm.dim()}-d" if torch.is_tensor(norm) else type(norm).__name__
        found[what] = six_digits(norm), kind
    return found | {SPARE: spare(recorder().records[begun:], len(NORMS))}


def norms(world_size, size):
    """The specification: for each case the norm of all the group's gradients, each counted once."""
    found = {}
    for what in NORMS:
        squares = 0.0
        for place in range(size):
            for numbers, count in parts(what, place, size):
                squares += sum(number**2 for number in numbers) / count
        found[what] = six_digits(math.sqrt(squares)), "torch.float64, 0-d"
    return [found | {SPARE: "few"}] * world_size


mesh_norm = Exercise(
    reference=mesh_norm,
    trials=lambda: list(in_groups(run_norm, norms, "[3, -4]·(r+1) alone, [12, 0, 5] on all")),
    same_dtype=False,
    explain=of_group,
    hints={
        "start": "The root of the sum of all squares, each number once, however many ranks hold "
        "it: of c ranks that hold a gradient alike, each adds 1/c of its squares.",
        "values": "gradient.double().square().sum() / count, added up; all_reduce that one number; "
        "then sqrt().",
        "hang": "Every rank calls all_reduce, one without gradients too: it brings 0.",
        "error": "Begin with torch.zeros((), dtype=torch.float64): the sum over no gradients.",
    },
    praise="one length on all ranks, each number of the model in it once, whatever is split.",
    note="ddpkit.tensor_parallel.clip_grad_norm, which also shortens.",
    mistakes=mistakes("""
counts_copies: gradient.double().square().sum() / count → gradient.double().square().sum()
    What several ranks hold alike is in it several times: divide its squares by the copies.
divides_too_early: .double().square().sum() / count → .double().div(count).square().sum()
    Divided before it was squared, a copy counts 1/c², and c of them 1/c. Square first.
adds_lengths: gradient.double().square().sum() / count → gradient.double().norm() / count
    Lengths don't add up: a 3 and a 4 at right angles make a 5. Add squares, and take one root.
adds_ranks_lengths: dist.all_reduce(squares, group=group)⏎return squares.sqrt() →
    ⏎dist.all_reduce(squares.sqrt_(), group=group)⏎return squares
    The ranks' lengths were added. Add squares over the ranks, and take the root last.
own_length: dist.all_reduce(squares, group=group) → pass
    That is the length of what this rank has: the other ranks' parts are missing.
in_its_own_dtype: gradient.double().square().sum() → gradient.square().sum()
    It was squared and added in the gradient's own dtype: float16 ends at 65,504, and bfloat16
    drops what is small beside the sum. double() first.
in_float32: gradient.double().square().sum() → gradient.float().square().sum()
    It was squared in float32, which ends at 3.4e38: double() comes before square().
without_a_call: dist.all_reduce(squares, group=group) → if not gradients: return squares
    ⏎dist.all_reduce(squares, group=group)
    A rank without gradients left before the all_reduce, for which the others wait: it brings 0.
"""),
)


# slow_step(model, optimizer, micro_batches)


def slow_step(model, optimizer, micro_batches):
    optimizer.zero_grad()
    logged = torch.zeros(())
    for number, (x, y) in enumerate(micro_batches, 1):
        last = number == len(micro_batches)
        with contextlib.nullcontext() if last else model.no_sync():
            loss = nn.functional.mse_loss(model(x), y) / len(micro_batches)
            loss.backward()
        logged += loss.detach()
    model.synchronize()
    optimizer.step()
    dist.all_reduce(logged)
    return logged.item() / dist.get_world_size()


def as_found(model, optimizer, micro_batches):
    optimizer.zero_grad()
    logged = 0.0
    for x, y in micro_batches:
        loss = nn.functional.mse_loss(model(x), y) / len(micro_batches)
        loss.backward()
        model.synchronize()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        logged += mean.item() / dist.get_world_size()
    optimizer.step()
    return logged


ROWS = 2  # of a micro-batch
CAP_BYTES = 36  # of a bucket: the first has 9 numbers, the second 32
LARGE = 32  # bytes; what is longer holds gradients
HELD = "rows that wait for their backward at a time"
GRADIENTS = "all-reduces of gradients in a step"
LOSSES = "all-reduces of the loss in a step"
AFTER = "parameters after 2 steps"


def make_net():
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    for parameter in net.parameters():
        numbers = torch.arange(parameter.numel()).view_as(parameter)
        parameter.data = (numbers * 7 % 11 - 5) / 8.0
    return net, torch.optim.SGD(net.parameters(), lr=0.125, momentum=0.5)


def make_batches(rank, step, count):
    generator = torch.Generator().manual_seed(10 * rank + step)
    rows = torch.randn(count, ROWS, 4, generator=generator)
    return [(part[:, :3], part[:, 3:]) for part in rows]


def run_steps(answer, count):
    net, optimizer = make_net()
    model = BucketedDDP(net, CAP_BYTES / 2**20)
    held = []  # rows of each forward that waits for its backward
    most = [0]

    def backward(gradient):
        held.pop()

    def forward(module, inputs, out):
        held.append(len(out))
        most.append(sum(held))
        out.register_hook(backward)

    net.register_forward_hook(forward)
    found = {}
    begun = len(recorder().records)
    for step in (1, 2):
        loss = answer(model, optimizer, make_batches(dist.get_rank(), step, count))
        found[f"loss of step {step}"] = None if loss is None else Rounded([float(loss)], 4)
    sent = [record.bytes for record in recorder().records[begun:]]
    large = sum(nbytes > LARGE for nbytes in sent)
    numbers = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
    return {
        AFTER: Rounded(numbers.tolist(), 4),
        **found,
        HELD: max(most),
        GRADIENTS: max(2, -(-large // 2)),
        LOSSES: max(1, -(-(len(sent) - large) // 2)),
    }


def steps_of_one_process(world_size, count):
    """Train one process on the micro-batches of all ranks."""
    net, optimizer = make_net()
    found = {}
    for step in (1, 2):
        optimizer.zero_grad()
        total = 0.0
        for rank in range(world_size):
            for x, y in make_batches(rank, step, count):
                loss = (net(x) - y).square().mean() / (world_size * count)
                loss.backward()
                total += loss.item()
        optimizer.step()
        found[f"loss of step {step}"] = Rounded([total], 4)
    numbers = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
    right = {AFTER: Rounded(numbers.tolist(), 4), **found, HELD: ROWS}
    return [right | {GRADIENTS: 2, LOSSES: 1}] * world_size


EACH_TIME = (
    "Gradients add up on the rank by themselves. Run all micro-batches but the last inside "
    "`with model.no_sync():`, and synchronize() once, after the last."
)
slow_step = Exercise(
    reference=slow_step,
    trials=lambda: [
        Trial(W, run_steps, (m,), steps_of_one_process(W, m), what=f"{m} micro-batches, 2 buckets")
        for W, m in ((2, 4), (3, 3), (1, 2))
    ],
    same_dtype=False,
    says={
        GRADIENTS: "the result is right, but rank {rank} all-reduced gradients {got} times in a "
        "step, where {expected} buckets are enough.",
        LOSSES: "the result is right, but rank {rank} sent a loss {got} times in a step, where "
        "once is enough. Add up loss.detach() on the rank; all_reduce the sum after the loop.",
        HELD: "the result is right, but {got} rows wait for their backward at a time, where a "
        "micro-batch has {expected}. The whole batch doesn't fit: call backward() for each.",
    },
    hints={
        "start": "zero_grad, all micro-batches, synchronize, step, all_reduce of the loss: once "
        "each. All micro-batches but the last run inside `with model.no_sync():`.",
        "values": "Divide each loss by the number of micro-batches, and the logged sum by the "
        "number of ranks.",
    },
    praise="each gradient travelled once a step, and so did the loss. Where the last micro-batch "
    "is outside no_sync, gradients travel while its backward goes on.",
    note="As it was found, each of m micro-batches sent all gradients, and the loss, and waited.",
    mistakes=[
        Mistake.written(as_found, EACH_TIME),
        *mistakes("""
without_no_sync: with contextlib.nullcontext() if last else model.no_sync(): →
    ⏎with contextlib.nullcontext():
    Every backward began to send, while what the one before had sent was still travelling: all but
    the last belong inside `with model.no_sync():`.
logs_each: logged += loss.detach() → logged += loss.detach()⏎dist.all_reduce(loss.detach().clone())
    The loss travels in each micro-batch, and every rank waits for it: once a step is enough.
a_sum: / len(micro_batches) →
    Those are sums over the micro-batches: divide each loss by their number.
the_last_alone: last = number == len(micro_batches) → last = number == len(micro_batches)
    ⏎optimizer.zero_grad()
    zero_grad() in the loop: only the last micro-batch's gradients are left.
a_step_each: logged += loss.detach() → logged += loss.detach()⏎if not last: optimizer.step()
    optimizer.step() in the loop: take one step, for all micro-batches together.
own_loss: dist.all_reduce(logged) → logged *= dist.get_world_size()
    The loss is this rank's: all_reduce it, once.
"""),
    ],
)


# choose_mesh(ranks, node, states, memory)


def choose_mesh(ranks, node, states, memory):
    parts = 1
    while states / parts > memory:
        parts *= 2
    if parts > ranks:
        raise ValueError(f"{states} don't fit on {ranks} ranks of {memory}: take {parts} ranks")
    tensor = min(parts, node)
    return ranks // parts, tensor, parts // tensor


TOLD = "{} ranks, {} a node, {} GB of states, {} GB a rank"
MESHES = {  # ranks, ranks in a node, states, memory of a rank: data, tensor, pipeline
    (8, 4, 10, 80): [8, 1, 1],
    (8, 4, 160, 80): [4, 2, 1],
    (16, 8, 161, 80): [4, 4, 1],
    (8, 8, 7, 3): [2, 4, 1],
    (64, 8, 2000, 80): [2, 8, 4],
    (16, 2, 450, 80): [2, 2, 4],  # not [2, 2, 3]
    (4, 4, 320, 80): [1, 4, 1],
    (16, 4, 1280, 80): [1, 4, 4],
    (1, 1, 80, 80): [1, 1, 1],
    (4, 4, 1000, 80): "ValueError",
    (1, 8, 81, 80): "ValueError",
}


def run_meshes(answer):
    found = {}
    for case in MESHES:
        try:
            found[TOLD.format(*case)] = list(answer(*case))
        except ValueError:
            found[TOLD.format(*case)] = "ValueError"
    return found


choose_mesh = Exercise(
    reference=choose_mesh,
    trials=lambda: [Trial(1, run_meshes, (), [{TOLD.format(*c): r for c, r in MESHES.items()}])],
    hints={
        "start": "Memory first: into how many parts must the states be cut? Double 1 until a part "
        "fits. Then deal the parts: tensor within the node, pipeline for the rest.",
        "values": "tensor = min(parts, node), pipeline = parts // tensor, data = ranks // parts.",
        "hang": "Double the parts in each round.",
    },
    praise="memory first, tensor within the node, pipeline for the rest, data with what is left.",
    mistakes=mistakes("""
data_first: return ranks // parts, tensor, parts // tensor → return ranks, 1, 1
    Data parallelism alone: each rank then holds all states, and they don't fit. Memory comes first.
pipeline_first: return ranks // parts, tensor, parts // tensor → return ranks // parts, 1, parts
    Within a node links are fast, and tensor parallelism leaves no bubble: it comes before pipeline.
across_nodes: tensor = min(parts, node) → tensor = parts
    Tensor ranks talk in every layer: keep them within the node. Between nodes, pipeline.
as_large_as_can_be: while states / parts > memory: → while parts < ranks:
    The states were cut finer than needed. The smallest number of parts that fits leaves most ranks
    to data parallelism, which talks least.
rounds_down: while states / parts > memory: → while states // parts > memory:
    Rounded down, a part seems to fit that doesn't: divide with /, not with //.
without_an_error: if parts > ranks: → if False:
    More parts than ranks: no mesh has room. Raise ValueError, before a rank starts.
exact_fit: while states / parts > memory: → while states / parts >= memory:
    A part of exactly a rank's memory fits: cut on only while it is larger, with >.
one_short: if parts > ranks: → if parts >= ranks:
    As many parts as ranks is possible: data is 1 then.
"""),
)


# publish(folder, name, files)


def publish(folder, name, files):
    writing = folder / (name + ".writing")
    shutil.rmtree(writing, ignore_errors=True)
    writing.mkdir()
    for file_name, content in files.items():
        with open(writing / file_name, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    os.rename(writing, folder / name)


NAME = "step-2"
FILES = {"weights.bin": b"new weights", "moments.bin": b"new moments"}
BEFORE = "step-1"
OLD = {"weights.bin": b"old weights"}
CASES = "a clean folder", "a half-written attempt lies there"
KILLED = "killed while it publishes"
SYNCED = "bytes of each file fsynced before the rename"
LEFT = f"{NAME}.writing afterwards"
THERE = f"{NAME} is already there"


def make_folder(folder, half_written=True):
    """Make a folder with the checkpoint before, and perhaps what a killed save left."""
    entries = {BEFORE: OLD}
    if half_written:
        entries[f"{NAME}.writing"] = {"weights.bin": b"new w", "stale.bin": b"of another model"}
    for entry, files in entries.items():
        (folder / entry).mkdir(parents=True)
        for file_name, content in files.items():
            (folder / entry / file_name).write_bytes(content)


def contents(folder):
    """{file name: bytes} of a checkpoint; None if there is none."""
    if not folder.exists():
        return None
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def harm(folder):
    """Say what a kill has spoiled; None: nothing."""
    new = contents(folder / NAME)
    if contents(folder / BEFORE) != OLD:
        return f"{BEFORE} isn't what it was"
    if new not in (None, FILES):
        return f"{NAME} is there, and not whole"
    for path in folder.iterdir():
        if new is None and path.is_file() and NAME.encode() in path.read_bytes():
            return f"{path.name} names {NAME}, which isn't there"
    return None


def harm_and_sizes(changes):
    """Return the first kill that did harm, and each file's bytes fsynced before the last rename.

    changes: of `kill_before_each_change`; folder "3" has what a kill before the third of them left.
    """
    found = None
    for number in range(len(changes), 0, -1):
        harmed = harm(Path(str(number)))
        found = f"before {changes[number - 1][0]}: {harmed}" if harmed else found
    renames = [place for place, (event, *_) in enumerate(changes) if event == "os.rename"]
    before = changes[: max(renames, default=0)]
    synced = dict(details for event, *details in before if event == "os.fsync")
    sizes = {path.name: synced.get(path.stat().st_ino) for path in (Path("0") / NAME).iterdir()}
    return {KILLED: found, SYNCED: sizes}


def publish_again(answer, folder):
    """Publish under a name that is there; return what is there then."""
    make_folder(folder, half_written=False)
    (folder / NAME).mkdir()
    (folder / NAME / "weights.bin").write_bytes(b"published weights")
    with contextlib.suppress(OSError):  # it may refuse
        answer(folder, NAME, dict(FILES))
    return contents(folder / NAME)


def run_publish(answer):
    found = {}
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        for case in CASES:
            make_folder(Path(case), half_written=case != CASES[0])
            answer(Path(case), NAME, dict(FILES))
            found[f"{case}: {NAME}"] = contents(Path(case) / NAME)
            found[f"{case}: {BEFORE}"] = contents(Path(case) / BEFORE)
        if found == PUBLISHED:
            bare = getattr(answer, "__wrapped__", answer)
            changes = kill_before_each_change(bare, (NAME, FILES), make_folder, Path())
            found |= harm_and_sizes(changes)
        found[LEFT] = contents(Path(CASES[1]) / f"{NAME}.writing")
        return found | {THERE: publish_again(answer, Path(THERE))}


PUBLISHED = {f"{case}: {NAME}": FILES for case in CASES}
PUBLISHED |= {f"{case}: {BEFORE}": OLD for case in CASES}
UNHURT = {KILLED: None, SYNCED: dict.fromkeys(FILES, 11)}
UNHURT |= {LEFT: None, THERE: {"weights.bin": b"published weights"}}

publish = Exercise(
    reference=publish,
    trials=lambda: [Trial(1, run_publish, (), [PUBLISHED | UNHURT], rungs=(*CASES, *UNHURT))],
    says={
        KILLED: f"a kill hurts. {KILLED}, {{got}}.",
        SYNCED: "when it was published, these bytes were certainly on the disk: {got}, expected "
        "{expected}, by os.fsync. A power cut may keep the rename and lose the rest.",
        LEFT: f"{NAME}.writing, which a killed attempt had left, is still there: {{got}}.",
        THERE: f"{NAME} was already there, whole, and now is {{got}}, not {{expected}}.",
    },
    hints={
        "start": f"Write all files into another folder, {NAME}.writing. When all are on the disk, "
        "one os.rename makes it the checkpoint.",
        "values": "Before it: what an earlier attempt left in the way must go. For each file: "
        "write, file.flush(), os.fsync(file.fileno()).",
        "error": "A half-written attempt may lie there: shutil.rmtree(writing, ignore_errors=True) "
        "before mkdir().",
    },
    praise="killed before each of its changes on the disk: the checkpoint was whole, or not there.",
    note="ddpkit.train.checkpoint also adds checksums, and fsyncs the folders, where one can.",
    mistakes=mistakes("""
in_its_place: writing = folder / (name + ".writing") → writing = folder / name
    It was written in its place: until the last file is there it looks like a checkpoint, and is
    none. Write beside it, and rename once.
file_by_file: os.rename(writing, folder / name) → (folder / name).mkdir()
    ⏎[os.rename(writing / file_name, folder / name / file_name) for file_name in files]
    Files were renamed one by one, and a kill comes between two: rename the folder, once.
latest_first: writing.mkdir() → writing.mkdir()⏎(folder / "latest").write_text(name)
    `latest` was written before the checkpoint was there. Find the latest by looking.
deletes_first: shutil.rmtree(writing, ignore_errors=True) → shutil.rmtree(folder)⏎folder.mkdir()
    The checkpoint before is gone, and a kill now leaves none. Nothing old goes before the new.
without_fsync: os.fsync(file.fileno()) → pass
    Without os.fsync the rename may reach the disk before the bytes do: after a power cut the files
    are empty.
without_flush: file.flush() → pass
    os.fsync writes what the operating system has. Python's own buffer comes first: file.flush().
trips_over_the_rest: shutil.rmtree(writing, ignore_errors=True) → pass
    A killed attempt left its folder: delete it before mkdir(), or no later save succeeds.
keeps_the_rest: shutil.rmtree(writing, ignore_errors=True)⏎writing.mkdir() →
    ⏎writing.mkdir(exist_ok=True)
    A file of the killed attempt got into the checkpoint: begin with an empty folder.
replaces_what_is_there: writing.mkdir() → writing.mkdir()
    ⏎shutil.rmtree(folder / name, ignore_errors=True)
    A whole checkpoint of this name was deleted: a kill before the new one is there leaves none.
"""),
)
