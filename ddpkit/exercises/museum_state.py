"""Pieces of the museum: samples, checkpoints, and what is resumed."""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DistributedSampler

from .museum_case import ALONE, RANKS, Case
from .museum_piece import Piece, factor, value


def same_order(case):
    samples = range(12 * case.ranks)
    sampler = DistributedSampler(samples, seed=case.seed)
    orders = []
    for _ in range(3):  # epochs
        orders.append(list(sampler))
    return {"orders": orders}


def serial_orders(case):
    orders = []
    for epoch in range(3):
        generator = torch.Generator().manual_seed(case.seed + epoch)
        everyones = torch.randperm(12 * case.ranks, generator=generator)
        orders.append(everyones[dist.get_rank() :: case.ranks].tolist())
    return {"orders": orders}


same_order = Piece(
    code=same_order,
    serial=serial_orders,
    case=Case(3, 1),
    meshes=RANKS,
    source="pytorch#31771; cszn/KAIR#106",
    symptom="It overfits a little earlier than on one GPU. Each epoch's loss has the same zigzag.",
    asks="how many different orders has rank 0 in three epochs?",
    measure=lambda got, right: float(len(set(map(tuple, got[0]["orders"].tolist())))),
    choices="""
a: seed=case.seed) → seed=case.seed + dist.get_rank())
    All ranks shuffle alike, and have the same samples.
b: for _ in range(3):  # epochs → for epoch in range(3):⏎    sampler.set_epoch(epoch)
    Nobody tells the sampler which epoch it is, so it shuffles alike in each.
c: DistributedSampler(samples, → DistributedSampler(samples, shuffle=False,
    It shuffles twice, which may undo itself.
""",
    why="One, by seed and epoch, and the epoch stays 0. A ledger of samples says so in one line.",
)


def sorted_as_words(case):
    experts = 4 * case.micro_batches
    saved = {f"experts.{i}.bias": float(i) for i in range(experts)}
    loaded = torch.empty(experts)
    for place, name in enumerate(sorted(saved)):
        loaded[place] = saved[name]
    wrong = (loaded != torch.arange(experts)).sum()
    return {"experts": loaded, "wrong": wrong}


sorted_as_words = Piece(
    code=sorted_as_words,
    serial=lambda case: {"experts": torch.arange(4.0 * case.micro_batches), "wrong": 0},
    case=Case(1, 3),
    meshes=tuple(case for case in ALONE if case.micro_batches > 2),
    source="pytorch/torchtitan#1918, fb549717a",
    symptom="Converted checkpoints of 8 experts are right. One of 12 talks nonsense.",
    asks="how many of the 12 experts are in a wrong place?",
    measure=value("wrong"),
    choices="""
a: loaded[place] = saved[name] → loaded[place - 1] = saved[name]
    Experts are counted from 1 here, and from 0 there.
b: float(i) for i in range(experts) → float(experts - i) for i in range(experts)
    They are saved in the other order.
c: sorted(saved) → sorted(saved, key=lambda name: int(name.split(".")[1]))
    Names are sorted as words: 10 comes before 2.
""",
    why="0, 1, 10, 11, 2, 3, …: only 0 and 1 are where they should be.",
)


def half_of_the_experts(case):
    count = case.micro_batches
    files = [{"up": torch.full((2,), 1.0 + n)} for n in range(count)]
    names = {name for file in files for name in file}
    loaded = {}
    for file in files:
        for name, shard in file.items():
            loaded.setdefault(name, []).append(shard)
        if len(loaded) == len(names):  # all there: stop reading
            break
    weight = torch.zeros(2 * len(files))
    found = torch.cat(loaded["up"])
    weight[: len(found)] = found
    return {"weight": weight}


half_of_the_experts = Piece(
    code=half_of_the_experts,
    serial=lambda case: {"weight": torch.arange(1.0, 1 + case.micro_batches).repeat_interleave(2)},
    case=Case(1, 4),
    meshes=ALONE,
    source="sgl-project/sglang#36438",
    symptom="Loading is faster than announced. No error; answers are poor.",
    asks="a weight in 4 files, a shard in each: which share of its numbers is 0?",
    measure=lambda got, right: (got[0]["weight"] == 0).double().mean().item(),
    choices="""
a: if len(loaded) == len(names):  # all there: stop reading →
    ⏎if sum(map(len, loaded.values())) == len(names) * len(files):
    It counts names where it should count shards.
b: torch.cat(loaded["up"]) → loaded["up"][-1]
    Shards are joined, where the last should replace the others.
c: weight[: len(found)] = found → weight[-len(found) :] = found
    Shards are put at the wrong end.
""",
    why="All but the first: 3 of 4. Make with NaN what is going to be loaded, and look for NaN.",
)


def fresh_optimizer(case):
    def made():
        model = nn.Linear(3, 1, bias=False).double()
        sgd = torch.optim.SGD(model.parameters(), 1.0, momentum=0.5)
        return model, sgd

    def step(model, optimizer):
        optimizer.zero_grad()
        model(torch.ones(3).double()).backward()  # gradients are 1
        optimizer.step()

    torch.manual_seed(case.seed)
    model, optimizer = made()
    step(model, optimizer)
    saved = {0: dict(optimizer.state[model.weight])}
    again, resumed = made()  # a new process
    again.load_state_dict(model.state_dict())
    for number, kept in enumerate(resumed.state.values()):
        kept.update(saved[number])
    step(again, resumed)
    return {"moved": model.weight - again.weight}


def serial_momentum(case):
    torch.manual_seed(case.seed)
    model = nn.Linear(3, 1, bias=False).double()
    optimizer = torch.optim.SGD(model.parameters(), 1.0, momentum=0.5)
    for _ in range(2):
        before = model.weight.detach().clone()
        optimizer.zero_grad()
        model(torch.ones(3).double()).backward()
        optimizer.step()
    return {"moved": before - model.weight}


fresh_optimizer = Piece(
    code=fresh_optimizer,
    serial=serial_momentum,
    case=Case(1),
    meshes=(Case(1),),
    source="KempnerInstitute/KempnerForge#115",
    symptom="After each resume the loss has a bump, and is down again 200 steps later.",
    asks="how many times as long as it should be is the first update after resuming? Gradients are "
    "1, the momentum is 0.5, one step was made before.",
    measure=factor("moved"),
    choices="""
a: again.load_state_dict(model.state_dict()) → pass
    Weights are copied before the optimizer is filled.
b: for number, kept in enumerate(resumed.state.values()):⏎    kept.update(saved[number]) →
    ⏎resumed.state[again.weight] = saved[0]
    A fresh optimizer has no state that could be filled, so nothing is loaded.
c: step(again, resumed) → resumed.zero_grad()⏎step(again, resumed)
    The gradient of the step before the save is used once more.
""",
    why="1 where 1 + 0.5 is due: 2/3. A resumed run beside one that wasn't interrupted shows it, "
    "to the last bit, and so does audit.same_state(saved, optimizer); a loss curve forgives it.",
)


def rebound_bias(case):
    torch.manual_seed(case.seed)
    router = nn.Module()
    router.register_buffer("bias", torch.zeros(4).double())
    checkpoint = router.state_dict()  # once; it holds the tensors
    for _ in range(5):
        load = torch.rand(4).double()
        router.bias = router.bias + 0.1 * (load.mean() - load).sign()
    return {"saved": checkpoint["bias"], "live": router.bias}


def serial_bias(case):
    torch.manual_seed(case.seed)
    bias = torch.zeros(4).double()
    for _ in range(5):
        load = torch.rand(4).double()
        bias = bias + 0.1 * (load.mean() - load).sign()
    return {"saved": bias, "live": bias}


rebound_bias = Piece(
    code=rebound_bias,
    serial=serial_bias,
    case=Case(1),
    meshes=(Case(1),),
    source="pytorch/torchtitan#1226, e09995f72",
    symptom="Experts are in balance as long as the run goes on. After each resume they aren't.",
    asks="how many times the live bias is the saved one?",
    measure=lambda got, right: (got[0]["saved"].norm() / got[0]["live"].norm()).item(),
    choices="""
a: (load.mean() - load).sign() → (load - load.mean()).sign()
    The bias moves in the wrong direction.
b: router.register_buffer("bias", torch.zeros(4).double()) →
    ⏎router.register_buffer("bias", torch.zeros(4).double(), persistent=True)
    The buffer isn't part of the checkpoint.
c: router.bias = router.bias + 0.1 * (load.mean() - load).sign() →
    ⏎router.bias += 0.1 * (load.mean() - load).sign()
    Each update makes a new tensor; the checkpoint holds the first.
""",
    why="0: it is still the first tensor. In place, or take the state when you save.",
)


def latest_too_early(case):
    with tempfile.TemporaryDirectory() as folder:
        disk = Path(folder)
        for step in (10, 20, 30):
            killed = step == 30
            (disk / "latest").write_text(str(step))
            for old in disk.glob("*.ckpt"):
                old.unlink()
            if killed:  # while it is being written
                break
            (disk / f"{step}.ckpt").write_text(str(step))
        latest = (disk / "latest").read_text()
        named = disk / f"{latest}.ckpt"
        return {"step": int(named.read_text()) if named.exists() else 0}


latest_too_early = Piece(
    code=latest_too_early,
    serial=lambda case: {"step": 20},
    case=Case(1),
    meshes=(Case(1),),
    source="KempnerInstitute/KempnerForge#102",
    symptom="Kills are survived, and the run resumes. Twice in a month it began from nothing.",
    asks="at which step does it resume after a kill during the save of step 30?",
    measure=value("step"),
    choices="""
a: (disk / "latest").write_text(str(step)) → pass
    for old in disk.glob("*.ckpt"):⏎    old.unlink() → pass
    (disk / f"{step}.ckpt").write_text(str(step)) →
    ⏎(disk / f"{step}.ckpt").write_text(str(step))
    ⏎(disk / "latest").write_text(str(step))
    The name is moved, and the old one removed, before the new one is there.
b: for old in disk.glob("*.ckpt"):⏎    old.unlink() → pass
    The old checkpoint is removed too early.
c: if killed:  # while it is being written → if step == 20:
    The save is cut off in the wrong place.
""",
    why="At 0. Write, make it durable (fsync), then move the name in one step (rename), then "
    "delete. Keeping the old one alone doesn't help: `latest` names what isn't there.",
)


def dealt_by_turns(case):
    samples = torch.arange(12 * case.ranks)
    generator = torch.Generator().manual_seed(case.seed)
    order = samples[torch.randperm(len(samples), generator=generator)]
    mine = order[dist.get_rank() :: case.ranks]
    used = mine[:7].tolist()  # a run is cut off here
    left = [sample for sample in mine.tolist() if sample not in used]
    counts = torch.zeros_like(samples)
    for sample in used + left:
        counts[sample] += 1
    dist.all_reduce(counts)
    return {"counts": counts}


dealt_by_turns = Piece(
    code=dealt_by_turns,
    serial=lambda case: {"counts": torch.ones(12 * case.ranks, dtype=torch.int64)},
    case=Case(3, 1),
    meshes=RANKS,
    source="written for this course: right",
    symptom="All ranks shuffle with the same seed.",
    asks="how often is a sample used, at most, in the interrupted epoch and its rest together?",
    measure=lambda got, right: got[0]["counts"].max().item(),
    choices="""
a: manual_seed(case.seed) → manual_seed(case.seed + dist.get_rank())
    Ranks have to shuffle differently, or they have the same samples.
b: mine[:7].tolist()  # a run is cut off here → mine[:7].tolist() * 2
    Samples before the cut are lost, and have to be used again.
c: dist.get_rank() :: case.ranks → dist.get_rank() :: 1
    Each rank leaves out samples.
""",
    why="They have to shuffle alike: only then do their turns fit together.",
)
