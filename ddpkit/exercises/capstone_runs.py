"""Checkers of notebook 15: slow_step, whose messages are counted, and publish, which is killed."""

import contextlib
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

from .checker import Exercise, Mistake, Rounded, Trial, mistakes

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these


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
HELD = "micro-batches whose activations are in memory at a time"
AT_ONCE = "rows in one forward"
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
    rows = [0]

    def backward(gradient):
        held.pop()

    def forward(module, inputs, out):
        held.append(len(out))
        most.append(len(held))
        rows.append(len(out))
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
        AT_ONCE: max(rows),
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
    right = {AFTER: Rounded(numbers.tolist(), 4), **found, AT_ONCE: ROWS, HELD: 1}
    return [right | {GRADIENTS: 2, LOSSES: 1}] * world_size


def step_trials():
    for world_size, count in (2, 4), (3, 3), (1, 2):
        right = steps_of_one_process(world_size, count)
        what = f"2 steps of {count} micro-batches, 2 buckets"
        yield Trial(world_size, run_steps, (count,), right, what=what)


EACH_TIME = (
    "Gradients add up on the rank by themselves. Run all micro-batches but the last inside "
    "`with model.no_sync():`, and synchronize() once, after the last."
)
slow_step = Exercise(
    reference=slow_step,
    trials=lambda: list(step_trials()),
    same_dtype=False,
    says={
        GRADIENTS: "the result is right, but rank {rank} all-reduced gradients {got} times in a "
        "step, where {expected} buckets are enough.",
        LOSSES: "the result is right, but rank {rank} sent a loss {got} times in a step, where "
        "once is enough. Add up loss.detach() on the rank; all_reduce the sum after the loop.",
        AT_ONCE: "the result is right, but {got} rows were in one forward, where a micro-batch has "
        "{expected}. The whole batch doesn't fit: that is why it comes in parts.",
        HELD: "the result is right, but {got} micro-batches waited for backward at a time. Call "
        "backward() for each, and its activations are gone before the next.",
    },
    hints={
        "start": "Count: how often does each gradient travel in a step, and how often the loss? "
        "How often must it?",
        "values": "zero_grad, all micro-batches, synchronize, step, once each; each loss is "
        "divided by the number of micro-batches.",
        "error": "In BucketedDDP a backward that sends is followed by synchronize(): all others "
        "go inside `with model.no_sync():`.",
    },
    praise="each gradient travelled once, with the last micro-batch, and the loss once.",
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
SIZES = {file_name: len(content) for file_name, content in FILES.items()}


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
    """Look at what kills left; and count the bytes that were fsynced before the last rename."""
    found = None
    for number in range(len(changes), 0, -1):
        harmed = harm(Path(str(number)))
        found = f"before {changes[number - 1][0]}: {harmed}" if harmed else found
    renames = [place for place, (event, *_) in enumerate(changes) if event == "os.rename"]
    before = changes[: max(renames, default=0)]
    synced = dict(details for event, *details in before if event == "os.fsync")
    sizes = {path.name: synced.get(path.stat().st_ino) for path in (Path("0") / NAME).iterdir()}
    return {KILLED: found, SYNCED: sizes}


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
        return found


PUBLISHED = {f"{case}: {NAME}": FILES for case in CASES}
PUBLISHED |= {f"{case}: {BEFORE}": OLD for case in CASES}
RUNGS = *CASES, KILLED, SYNCED

publish = Exercise(
    reference=publish,
    trials=lambda: [
        Trial(1, run_publish, (), [PUBLISHED | {KILLED: None, SYNCED: SIZES}], rungs=RUNGS)
    ],
    says={
        KILLED: f"a kill hurts. {KILLED}, {{got}}.",
        SYNCED: "when it was published, these bytes were certainly on the disk: {got}, expected "
        "{expected}. A power cut may keep the rename and lose the rest.",
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
    It was written in its place, so until the last file is there it looks like a checkpoint and is
    none. Write beside it, and rename once.
file_by_file: os.rename(writing, folder / name) → (folder / name).mkdir()
    ⏎[os.rename(writing / file_name, folder / name / file_name) for file_name in files]
    Files were renamed one by one, and a kill comes between two. Rename the folder: one rename is
    there or not.
copies: os.rename(writing, folder / name) → shutil.copytree(writing, folder / name)
    A copy takes many operations, and a kill comes between two: rename.
latest_first: writing.mkdir() → writing.mkdir()⏎(folder / "latest").write_text(name)
    `latest` was written before the checkpoint was there. Find the latest by looking.
deletes_first: shutil.rmtree(writing, ignore_errors=True) → shutil.rmtree(folder)⏎folder.mkdir()
    The checkpoint before is deleted: if a kill comes now, there is none. Nothing old goes before
    the new one is there.
without_fsync: os.fsync(file.fileno()) → pass
    Without os.fsync the bytes may still be in memory when the rename is on the disk: a power cut
    leaves a checkpoint of empty files.
without_flush: file.flush() → pass
    os.fsync writes what the operating system has. Python's own buffer comes first: file.flush().
trips_over_the_rest: shutil.rmtree(writing, ignore_errors=True) → pass
    A killed attempt left its folder: delete it before mkdir(), or no later save succeeds.
keeps_the_rest: shutil.rmtree(writing, ignore_errors=True)⏎writing.mkdir() →
    ⏎writing.mkdir(exist_ok=True)
    A file of the killed attempt got into the checkpoint: begin with an empty folder.
"""),
)
