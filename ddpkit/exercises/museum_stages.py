"""Pieces of the museum: pipelines, sequences cut among ranks, experts."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from ddpkit.tensor_parallel import SumOverRanks

from .museum_case import GRID, RANKS, Case, batches_of, joined, sgd, step_on
from .museum_piece import Piece, counted, factor, factor_of, value

# Pipelines of a layer a rank


class Stages(nn.ModuleDict):
    """Compute layers in turn, with tanh between: a whole model, or a rank's stage."""

    def forward(self, x):
        first, *others = self.values()
        x = first(x)
        for layer in others:
            x = layer(torch.tanh(x))
        return x


def stage_of(case, rank):
    torch.manual_seed(1000 * case.seed + rank)
    width = case.ranks * case.micro_batches
    linear = nn.Linear(width, width if rank < case.ranks - 1 else 3)
    return Stages({f"stage{rank}": linear}).double()


def serial_pipeline(case):
    stages = Stages()
    for rank in range(case.ranks):
        stages.update(stage_of(case, rank))
    return step_on(stages, *joined(batches_of(case, 0)))  # the first stage's


def receive(like, rank):
    tensor = torch.empty_like(like)
    dist.recv(tensor, rank)
    return tensor


def undivided(case):
    rank = dist.get_rank()
    model = stage_of(case, rank)
    optimizer = sgd(model)
    log = 0.0
    for x, y in batches_of(case, 0):
        if rank > 0:
            x = torch.tanh(receive(x, rank - 1)).requires_grad_()
        out = model(x)
        if rank < case.ranks - 1:
            dist.send(out.detach(), rank + 1)
            out.backward(receive(out, rank + 1))
        else:
            loss = mse_loss(out, y)
            log += loss.item() / case.micro_batches
            loss.backward()
        if rank > 0:  # of tanh's input: 1 - tanh²
            dist.send(x.grad * (1 - x.detach() ** 2), rank - 1)
    optimizer.step()
    return model


undivided = Piece(
    code=undivided,
    serial=serial_pipeline,
    case=Case(2, 3),
    source="huggingface/picotron, its pipelines; three production frameworks had it, too",
    symptom="The logged loss is right, and falls as it should (with AdamW). Clipping always cuts.",
    asks="what is the first stage's gradient, as a multiple of the right one?",
    measure=factor("gradient of stage0.weight"),
    choices="""
a: optimizer.step() → dist.barrier()⏎optimizer.step()
    The first stage steps before the last micro-batch's gradient has arrived.
b: x.grad * (1 - x.detach() ** 2) → x.grad
    tanh's derivative is taken twice, here and by autograd.
c: loss.backward() → (loss / case.micro_batches).backward()
    What is logged is divided, what is differentiated isn't.
""",
    why="By m. AdamW hides it, until clipping cuts in some steps and not in others.",
)


def tied_ends(case):
    rank = dist.get_rank()
    torch.manual_seed(case.seed)
    tied = nn.Embedding(8, 4).double()  # on both stages, as a copy
    head = nn.Linear(4, 8, bias=False)
    head.weight = tied.weight
    optimizer = sgd(tied)
    tokens = torch.arange(case.micro_batches) % 8
    if rank == 0:
        out = tied(tokens)
        dist.send(out.detach(), 1)
        out.backward(receive(out, 1))
    else:
        x = torch.empty(len(tokens), 4).double()
        dist.recv(x, 0)
        x.requires_grad_()
        cross_entropy(head(x), tokens.roll(-1)).backward()
        dist.send(x.grad, 0)
    optimizer.step()
    return tied


def serial_tied_ends(case):
    torch.manual_seed(case.seed)
    tied = nn.Embedding(8, 4).double()
    tokens = torch.arange(case.micro_batches) % 8
    logits = tied(tokens) @ tied.weight.T
    cross_entropy(logits, tokens.roll(-1)).backward()
    sgd(tied).step()
    return tied


tied_ends = Piece(
    code=tied_ends,
    serial=serial_tied_ends,
    case=Case(2, 3),
    meshes=tuple(Case(2, tokens) for tokens in range(3, 8)),
    source="pytorch/torchtitan#596; NVIDIA/Megatron-LM#299; uw-syfi/piper#13",
    symptom="A model with tied embeddings is worse on a pipeline than on one GPU, and worse still "
    "once it is saved and loaded.",
    asks="the batch has 3 tokens of a vocabulary of 8: how many rows of the tied weight have a "
    "gradient that isn't 0, on rank 0?",
    measure=lambda got, right: float((got[0]["gradient of weight"] != 0).any(1).sum()),
    choices="""
a: optimizer.step() → dist.all_reduce(tied.weight.grad)⏎optimizer.step()
    Each end has a part of the tied weight's gradient, and nobody adds them.
b: head(x) → x @ tied.weight.detach().T
    The last stage changes a weight that isn't its own: it belongs to the first.
c: dist.send(x.grad, 0) → dist.send(x.grad / 2, 0)
    The weight is used twice, so each use has half of the gradient.
""",
    why="The embedding's rows of these tokens only; the head's part, in all rows, is on the other "
    "end. Two messages, or an all-reduce of the two ranks.",
)


# Sequences cut among ranks


def tokens_of(case):
    torch.manual_seed(case.seed)
    return torch.randperm(6 * case.ranks * case.micro_batches + 1)


def bigrams(case):
    torch.manual_seed(case.seed)
    vocabulary = len(tokens_of(case))
    return nn.Embedding(vocabulary, vocabulary).double()


def serial_bigrams(case):
    model = bigrams(case)
    tokens = tokens_of(case)
    cross_entropy(model(tokens[:-1]), tokens[1:]).backward()
    sgd(model).step()
    return {"targets": len(tokens) - 1, "weight": model.weight, "gradient": model.weight.grad}


def shifted_after_the_cut(case):
    model = bigrams(case)
    optimizer = sgd(model)
    tokens = tokens_of(case)
    mine = tokens.tensor_split(case.ranks)[dist.get_rank()]
    inputs = mine[:-1]
    targets = mine[1:]
    count = torch.tensor(len(targets))
    dist.all_reduce(count)
    losses = cross_entropy(model(inputs), targets, reduction="none")
    loss = losses.sum() / count
    loss.backward()
    dist.all_reduce(model.weight.grad)
    optimizer.step()
    weight = model.weight
    return {"targets": count, "weight": weight, "gradient": weight.grad}


shifted_after_the_cut = Piece(
    code=shifted_after_the_cut,
    serial=serial_bigrams,
    case=Case(4, 1),
    meshes=RANKS,
    source="huggingface/transformers#36607",
    symptom="Loss and gradients are almost those of one process; the difference grows with the "
    "number of ranks, and with long sequences it is hard to see.",
    asks="how many targets fewer than one process does the loss have?",
    measure=lambda got, right: (right[0]["targets"] - got[0]["targets"]).item(),
    choices="""
a: / count → / len(targets)
    Each rank's loss has to be the mean of its own targets.
b: mine = tokens.tensor_split(case.ranks)[dist.get_rank()] →
    inputs = mine[:-1] → inputs = tokens[:-1].tensor_split(case.ranks)[dist.get_rank()]
    targets = mine[1:] → targets = tokens[1:].tensor_split(case.ranks)[dist.get_rank()]
    The last token of each part has its target on the next rank.
c: dist.all_reduce(model.weight.grad) →
    ⏎dist.all_reduce(model.weight.grad)⏎model.weight.grad /= case.ranks
    The sum of the gradients has to be divided by the number of ranks.
""",
    why="One at each cut: W - 1. Shift first, then cut.",
)


def shifted_before_the_cut(case):
    model = bigrams(case)
    optimizer = sgd(model)
    tokens = tokens_of(case)
    rank = dist.get_rank()
    pairs = torch.stack([tokens[:-1], tokens[1:]])
    mine = pairs[:, rank :: case.ranks]  # every W-th
    inputs, targets = mine
    losses = cross_entropy(model(inputs), targets, reduction="none")
    loss = losses.mean() / case.ranks
    loss.backward()
    dist.all_reduce(model.weight.grad)
    optimizer.step()
    weight = model.weight
    return {"weight": weight, "gradient": weight.grad}


shifted_before_the_cut = Piece(
    code=shifted_before_the_cut,
    serial=serial_bigrams,
    case=Case(4, 1),
    meshes=RANKS,
    source="written for this course: right",
    symptom="No rank has two neighbouring tokens.",
    asks="how many times the right gradient has rank 0?",
    measure=factor("gradient"),
    choices="""
a: losses.mean() / case.ranks → losses.mean()
    The all-reduce takes the mean already.
b: losses.mean() / case.ranks → losses.sum() / len(tokens)
    A mean of means: it must be a sum, divided by all tokens.
c: pairs[:, rank :: case.ranks] → pairs.chunk(case.ranks, 1)[rank - 1]
    loss = losses.mean() → loss = losses[:-1].mean()
    Targets must be on the same rank as the next input.
""",
    why="Pairs are dealt out, so no target is lost, in whatever order; parts are equal, so a mean "
    "of means is the mean.",
)


def zigzag_then_shifted(case):
    model = bigrams(case)
    optimizer = sgd(model)
    tokens = tokens_of(case)
    rank = dist.get_rank()
    chunks = tokens[:-1].chunk(2 * case.ranks)
    mine = torch.cat([chunks[rank], chunks[-1 - rank]])  # zigzag
    wanted = mine.roll(-1)  # the last one's target: on another rank
    after = tokens[1:].chunk(2 * case.ranks)[-1 - rank][-1]
    wanted[-1] = after
    loss = cross_entropy(model(mine), wanted) / case.ranks
    loss.backward()
    dist.all_reduce(model.weight.grad)
    optimizer.step()
    follows = torch.empty_like(tokens)  # {token: the next one}
    follows[tokens[:-1]] = tokens[1:]
    wrong = (wanted != follows[mine]).sum()
    dist.all_reduce(wrong)
    return {"gradient": model.weight.grad, "wrong": wrong}


zigzag_then_shifted = Piece(
    code=zigzag_then_shifted,
    serial=lambda case: {**serial_bigrams(case), "wrong": 0},
    case=Case(4, 1),
    meshes=RANKS,
    source="NVIDIA/bionemo-recipes#1449; verl-project/verl#4250",
    symptom="No target is missing. The loss is a little higher than on one process, and stays so.",
    asks="how many targets of all ranks are wrong?",
    measure=value("wrong"),
    choices="""
a: wanted = mine.roll(-1)  # the last one's target: on another rank →
    ⏎targets = tokens[1:].chunk(2 * case.ranks)
    ⏎wanted = torch.cat([targets[rank], targets[-1 - rank]])
    The last token of a rank's first chunk gets the first of its second chunk as its target.
b: wanted[-1] = after → wanted[-1] = mine[0]
    The target of a rank's last token is the first of its own.
c: cross_entropy(model(mine), wanted) / case.ranks → cross_entropy(model(mine), wanted)
    The loss is divided by the number of ranks, though it is a mean.
""",
    why="On all ranks but the last, whose two chunks are neighbours: W - 1, and wrong ones, not "
    "missing ones. Targets are cut as inputs are.",
)


def last_hops_keys(case):
    model = query(case)
    optimizer = sgd(model)
    x, k, v, y = parts_of(case, dist.get_rank())  # k: one column
    q = model(x)
    block = torch.stack([k, v])
    kept = []  # for backward
    out = torch.zeros_like(y)
    for _ in range(case.ranks):
        kept.append(block)
        out += q @ block[0].T @ block[1]
        send_on(block)
    gradient = out - y  # of the squared loss
    of_q = sum(gradient @ kv[1].T @ kv[0] for kv in kept)
    (q * of_q.detach()).sum().backward()  # on, to the weight
    dist.all_reduce(model.weight.grad)
    optimizer.step()
    return {"output": out, "gradient of q": of_q}


def send_on(block):
    """Send `block` to the next rank, and replace it, in place, by that of the rank before."""
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    arrived = torch.empty_like(block)
    if ranks == 1:
        return
    sending = dist.isend(block.clone(), (rank + 1) % ranks)
    dist.recv(arrived, (rank - 1) % ranks)
    sending.wait()
    block.copy_(arrived)


def query(case):
    """Make the layer that computes q of x."""
    torch.manual_seed(case.seed)
    return nn.Linear(case.ranks, case.ranks, bias=False).double()


def parts_of(case, rank):
    """Return x, k, v and y of a rank's 3 tokens; k has numbers in column `rank` alone."""
    generator = torch.Generator().manual_seed(1000 * case.seed + rank)
    width = case.ranks
    x, k, v, y = torch.randn(4, 3, width, generator=generator, dtype=torch.float64)
    only = torch.zeros(width, dtype=torch.float64)
    only[rank] = 1
    return x, k * only, v, y


def serial_ring(case):
    parts = [parts_of(case, rank) for rank in range(case.ranks)]
    x, keys, values, y = map(torch.cat, zip(*parts, strict=True))
    model = query(case)
    q = model(x)
    q.retain_grad()
    out = q @ keys.T @ values
    (out - y).square().sum().div(2).backward()
    sgd(model).step()
    mine = slice(3 * dist.get_rank(), 3 * dist.get_rank() + 3)
    return {"output": out[mine], "gradient of q": q.grad[mine]}


last_hops_keys = Piece(
    code=last_hops_keys,
    serial=serial_ring,
    case=Case(3, 1),
    meshes=RANKS,
    source="huggingface/diffusers#14265; NVIDIA/TransformerEngine#1557",
    symptom="Outputs are right to the last digit. Training with context parallelism is worse, with "
    "inference nothing is wrong.",
    asks="keys of rank r are in column r: how many of the 3 columns of q's gradient aren't 0?",
    measure=counted("gradient of q"),
    choices="""
a: send_on(block) → send_on(block)⏎send_on(block)
    Blocks go round in the wrong direction.
b: kept.append(block) → kept.append(block.clone())
    What is kept for backward is overwritten by the next hop.
c: gradient @ kv[1].T @ kv[0] → gradient @ kv[1].T @ kv[0] / case.ranks
    Gradients of all hops are summed, and have to be averaged.
""",
    why="One tensor is kept W times, and after the last hop it holds one block. Forward has used "
    "each in time.",
)


def merged_by_powers(case):
    class Merge(nn.Module):
        def forward(self, lse):
            first = torch.exp(lse)  # of two equal blocks
            second = torch.exp(lse)
            return first / (first + second)

    merge = Merge()
    lses = torch.arange(1.0, 121.0)  # scores grow in training
    return {"weights": torch.stack([merge(lse) for lse in lses])}


merged_by_powers = Piece(
    code=merged_by_powers,
    serial=lambda case: {"weights": torch.full((120,), 0.5)},
    case=Case(1),
    meshes=(Case(1),),
    source="SHI-Labs/NATTEN#202",
    symptom="Two blocks of attention are merged by their log-sum-exps, in float32. Tests pass. "
    "After some thousand steps the loss is NaN.",
    asks="the lse grows by 1 a step, from 1: at which is the weight NaN for the first time?",
    measure=lambda got, right: 1 + got[0]["weights"].isnan().int().argmax().item(),
    choices="""
a: torch.arange(1.0, 121.0) → torch.arange(1.0, 121.0).double().float()
    Sums of powers have to be kept in float64.
b: first / (first + second) → first / (first + second + 1e-6)
    A division by 0, if both powers vanish.
c: first = torch.exp(lse)  # of two equal blocks → first = torch.exp(lse - lse)
    second = torch.exp(lse) → second = torch.exp(lse - lse)
    Powers of the lse itself overflow: it is their difference that matters.
""",
    why="e⁸⁹ is more than 3.4·10³⁸, and inf/inf is NaN. σ(lse₂ - lse₁) never overflows.",
)


# Experts

TOKENS = 4  # of a rank


def tokens_for(case, rank, expert):
    """Return the tokens of a rank that go to an expert of `case.inner`: every inner-th."""
    generator = torch.Generator().manual_seed(1000 * case.seed + rank)
    x, y = torch.randn(2, TOKENS, 3, generator=generator, dtype=torch.float64)
    return x[expert :: case.inner], y[expert :: case.inner]


class Experts(nn.ModuleDict):
    """Apply each expert, of all or of a rank's one, to its own tensor in a list; return a list."""

    def forward(self, tokens):
        return [expert(x) for expert, x in zip(self.values(), tokens, strict=True)]


def expert_of(case, number):
    torch.manual_seed(1000 * case.seed + number)
    return Experts({f"expert{number}": nn.Linear(3, 3)}).double()


def serial_experts(case):
    experts = Experts()
    tokens = []
    for number in range(case.inner):
        experts.update(expert_of(case, number))
        tokens.append(joined([tokens_for(case, rank, number) for rank in range(case.ranks)]))
    outputs = experts([x for x, _ in tokens])
    errors = [out - y for out, (_, y) in zip(outputs, tokens, strict=True)]
    squares = sum(error.square().sum() for error in errors)
    (squares / (TOKENS * case.ranks)).backward()
    sgd(experts).step()
    return experts


def expert_gradients(case):
    group = case.mesh["inner"]  # an expert on each of its ranks
    copies = case.mesh["data"]  # ranks that have the same expert
    number = group.get_local_rank()
    model = expert_of(case, number)
    optimizer = sgd(model)
    start = copies.get_local_rank() * group.size()
    senders = range(start, start + group.size())
    # What an all-to-all brings: tokens of all ranks of the group
    x, y = joined([tokens_for(case, r, number) for r in senders])
    (out,) = model([x])
    loss = (out - y).square().sum() / TOKENS  # each sender's mean
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=copies.get_group())
        parameter.grad /= copies.size()
    optimizer.step()
    return model


expert_gradients = Piece(
    code=expert_gradients,
    serial=serial_experts,
    case=Case(3, 1, inner=3),
    meshes=GRID,
    source="pytorch#160285; NVIDIA/Megatron-LM#5956; megablocks#86; DeepSpeed#5259",
    symptom="With more expert-parallel ranks experts learn faster than the rest. All other "
    "gradients are right.",
    asks="how many times too large is the gradient of expert 0, with an expert on each of 3 ranks?",
    measure=factor("gradient of expert0.weight"),
    choices="""
a: / TOKENS  # each sender's mean → / len(x)
    An expert's loss has to be the mean of the tokens that it got.
b: /= copies.size() → /= case.ranks
    An expert's gradient has the tokens of all ranks of its group in it already, and must still be
    divided by the group's size.
c: group=copies.get_group()) → group=group.get_group())
    The sum is over ranks that have the same expert, and has to be over those that send to it.
""",
    why="By the size of the expert group. The loss is a mean over W ranks, so the sum of all their "
    "tokens' gradients is divided by W, however many copies there are.",
)


def shared_expert(case):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(case.seed)
            self.shared = nn.Linear(3, 3).double()  # on all ranks
            self.mine = expert_of(case, dist.get_rank())

        def forward(self, x):
            (routed,) = self.mine.values()
            here = torch.arange(len(x)) % case.ranks == dist.get_rank()
            part = self.shared(x) + routed(x) * here[:, None]
            return SumOverRanks.apply(part, None)

    model = Layer()
    optimizer = sgd(model)
    x, y = tokens_for(Case(1, seed=case.seed), 0, 0)
    out = model(x)
    mse_loss(out, y).backward()
    optimizer.step()
    gradient = model.shared.weight.grad
    return {"output": out, "gradient of shared": gradient}


class AllExperts(nn.Module):
    """Compute the shared expert's output and, for row i, that of expert i mod W, of W in all."""

    def __init__(self, case):
        super().__init__()
        torch.manual_seed(case.seed)
        self.shared = nn.Linear(3, 3).double()
        self.mine = Experts()
        for number in range(case.ranks):
            self.mine.update(expert_of(case, number))

    def forward(self, x):
        experts = list(self.mine.values())
        rows = [experts[number % len(experts)](row) for number, row in enumerate(x)]
        return self.shared(x) + torch.stack(rows)


def serial_shared(case):
    model = AllExperts(case)
    x, y = tokens_for(Case(1, seed=case.seed), 0, 0)
    out = model(x)
    mse_loss(out, y).backward()
    sgd(model).step()
    return {"output": out, "gradient of shared": model.shared.weight.grad}


def times_shared(got, right):
    torch.manual_seed(0)
    x, _ = tokens_for(Case(1), 0, 0)
    shared = nn.Linear(3, 3).double()(x)
    return 1 + factor_of(got[0]["output"] - right[0]["output"], shared)


shared_expert = Piece(
    code=shared_expert,
    serial=serial_shared,
    case=Case(3, 1),
    meshes=RANKS,
    source="sgl-project/sglang#26845",
    symptom="A model that is served on three expert ranks answers worse than on one.",
    asks="how often is the shared expert's output in the result?",
    measure=times_shared,
    choices="""
a: SumOverRanks.apply(part, None) → SumOverRanks.apply(part, None) / case.ranks
    Outputs of all ranks are summed, where their mean is due.
b: routed(x) * here[:, None] → routed(x)
    Tokens of other ranks' experts are zeroed.
c: self.shared(x) + →
    SumOverRanks.apply(part, None) → SumOverRanks.apply(part, None) + self.shared(x)
    All ranks have the shared expert, and all add it to their part.
""",
    why="W times. What is on all ranks belongs behind the sum: the same bug as a replicated bias.",
)


def orthogonal_shards(case):
    model, x, y = square(case)
    optimizer = sgd(model)
    mse_loss(model(x), y).backward()
    gradient = model.weight.grad.chunk(case.ranks)[dist.get_rank()]
    u, _, v = torch.linalg.svd(gradient, full_matrices=False)
    update = u @ v  # as Newton-Schulz, of Muon
    model.weight.grad = gathered(update)
    optimizer.step()
    return {"update": model.weight.grad}


def square(case):
    """Make a layer whose weight is square, x and y: all from the case's seed, on any rank."""
    torch.manual_seed(case.seed)
    width = 2 * case.ranks
    x, y = torch.randn(2, 2 * width, width).double()
    return nn.Linear(width, width, bias=False).double(), x, y


def gathered(mine):
    """Return all ranks' rows, rank 0's first, without a gradient."""
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine.contiguous())
    return torch.cat(parts)


def serial_orthogonal(case):
    model, x, y = square(case)
    mse_loss(model(x), y).backward()
    u, _, v = torch.linalg.svd(model.weight.grad)
    model.weight.grad = u @ v
    sgd(model).step()
    return {"update": model.weight.grad}


orthogonal_shards = Piece(
    code=orthogonal_shards,
    serial=serial_orthogonal,
    case=Case(3, 1),
    meshes=RANKS,
    source="MoonshotAI/Moonlight#27; KellerJordan/modded-nanogpt#99",
    symptom="Muon on shards learns, a little worse than on whole matrices. Updates have their "
    "usual length.",
    asks="how many times as long as the right one is the update? (All its numbers squared, summed, "
    "the root.)",
    measure=lambda got, right: (got[0]["update"].norm() / right[0]["update"].norm()).item(),
    choices="""
a: torch.linalg.svd(gradient, → torch.linalg.svd(gathered(gradient),
    u @ v  # as Newton-Schulz, of Muon → (u @ v).chunk(case.ranks)[dist.get_rank()]
    What is made of a shard isn't the shard of what is made of the whole.
b: update = u @ v  # as Newton-Schulz, of Muon → update = u @ v / case.ranks**0.5
    An update of W shards is √W times too long.
c: torch.linalg.svd(gradient, → torch.linalg.svd(gradient / gradient.norm(),
    Newton-Schulz needs a matrix of length 1.
""",
    why="Each shard gets orthonormal rows, but not orthogonal to those of other shards. The length "
    "is the same, so no norm shows it. Gather, or let each matrix have an owner.",
)
