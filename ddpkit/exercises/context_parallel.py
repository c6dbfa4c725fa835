"""Checkers of notebook 13, context parallelism: zigzag, its mask, the ring's backward, Ulysses."""

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist

from ddpkit import context_parallel as library
from ddpkit.context_parallel.all_to_all import trade
from ddpkit.context_parallel.blocks import attend
from ddpkit.runtime.recorder import recorder

from .checker import Exercise, Mistake, Trial, check_wire, mistakes, rank_1_comes_last
from .softmax import Numbers
from .tensor_parallel import autograd_must_know, calls, group_of, in_groups, of_group, whole

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these

# zigzag(world_size)


def _run_deal(answer, world_size):
    dealt = [sorted(chunks) for chunks in answer(world_size)]
    scores = [_scores(mine, range(2 * world_size)) for mine in dealt]
    return {"chunks, by rank": dealt, "pairs of chunks that each rank computes": scores}


def _scores(mine, all_chunks) -> float:
    """Count the pairs of chunks, (query, key), that a causal mask leaves; (chunk, itself) is ½."""
    seen = 0.0
    for query in mine:
        seen += sum(1.0 for key in all_chunks if key < query) + 0.5
    return seen


def _deals() -> Iterator[Trial]:
    for world_size in (2, 3, 4, 1):
        right = [sorted({rank, 2 * world_size - 1 - rank}) for rank in range(world_size)]
        scores = [2.0 * world_size] * world_size
        expected = {
            "chunks, by rank": right,
            "pairs of chunks that each rank computes": scores,
        }
        yield Trial(1, _run_deal, (world_size,), [expected], what=f"asked for W = {world_size}")


zigzag = Exercise(
    reference=library.zigzag,
    trials=_deals,
    hints={
        "start": "Chunk 0 sees least, chunk 2W-1 most. Give both to one rank.",
        "values": "The other chunk of rank r is the r-th from the end: 2W-1-r.",
        "error": "Return a list of pairs, one for each rank: [(0, 3), (1, 2)] for 2 ranks.",
    },
    praise="each rank computes 2W blocks, those on the diagonal counted ½.",
    mistakes=mistakes("""
in_order: [(rank, last - rank) for → [(2 * rank, 2 * rank + 1) for
    In order, the last rank computes 2W-1 times as much as the first: an early chunk goes with a
    late one.
like_cards: [(rank, last - rank) for → [(rank, rank + world_size) for
    Dealt like cards, rank 0 has the first chunk of each half, and the last rank the last of each:
    the second half is dealt on the way back.
one_too_far: [(rank, last - rank) for → [(rank, last - rank + 1) for
    There are chunks 0 to 2W-1: rank 0's second chunk is 2W-1.
the_middle_first: [(rank, last - rank) for → [(world_size - 1 - rank, world_size + rank) for
    All compute equally much, but in the other order: rank 0 gets the first chunk and the last.
one_chunk: [(rank, last - rank) for → [(rank,) for
    Half of the chunks aren't dealt out: there are 2W, two for each rank.
"""),
)


# pairs_of_hop(deal, rank, hop, causal)

TOKENS = 2  # of a chunk, in the specification


def _run_pairs(answer, deal, causal):
    world_size, seen = len(deal), {}
    for rank in range(world_size):
        for hop in range(world_size):
            pairs = answer(deal, rank, hop, causal)
            seen[f"rank {rank} in hop {hop}"] = sorted(tuple(pair) for pair in pairs)
    return seen


def _pairs(deal, causal) -> dict:
    """Return what `_run_pairs` should, from the place of each token in the sequence."""
    right = {}
    for rank in range(len(deal)):
        for hop in range(len(deal)):
            pairs = []
            for query in deal[rank]:
                for key in deal[(rank - hop) % len(deal)]:
                    seen = 0
                    for place in range(TOKENS * query, TOKENS * (query + 1)):
                        for other in range(TOKENS * key, TOKENS * (key + 1)):
                            seen += other <= place or not causal
                    if seen > 0:
                        pairs.append((query, key, seen < TOKENS**2))
            right[f"rank {rank} in hop {hop}"] = sorted(pairs)
    return right


def _pair_trials() -> Iterator[Trial]:
    for make, world_size, causal in (
        (library.contiguous, 2, True),
        (library.zigzag, 2, True),
        (library.zigzag, 3, True),
        (library.zigzag, 2, False),
        (library.contiguous, 1, True),
    ):
        deal = make(world_size)
        what = f"{make.__name__}({world_size}){', causal' if causal else ', not causal'}"
        yield Trial(1, _run_pairs, (deal, causal), [_pairs(deal, causal)], what=what)


pairs_of_hop = Exercise(
    reference=library.pairs_of_hop,
    trials=_pair_trials,
    hints={
        "start": "In hop h, rank r has the keys of rank (r - h) % W. Look at each of its two "
        "chunks of queries with each of their two chunks of keys.",
        "values": "key < query: all is seen, (query, key, False). key == query: the diagonal, "
        "(query, key, True). key > query: nothing. Not causal: all of all.",
        "error": "Return a list of (chunk of queries, chunk of keys, diagonal).",
    },
    praise="no pair too many, and only the diagonal needs a mask.",
    mistakes=mistakes("""
keys_of_the_right: (rank - hop) % len(deal) → (rank + hop) % len(deal)
    Keys travel to the right: in hop h those of rank r - h are here.
own_keys_always: (rank - hop) % len(deal) → rank
    Those are the rank's own keys, in each hop. In hop h it has those of rank r - h.
no_diagonal: pairs.append((query, key, True)) → pass
    A chunk of queries sees keys of its own chunk, too, up to each query: (chunk, chunk, True).
diagonal_seen_whole: pairs.append((query, key, True)) → pairs.append((query, key, False))
    In its own chunk a query doesn't see the keys after it: the third entry says so, True.
mask_everywhere: pairs.append((query, key, False)) → pairs.append((query, key, causal))
    Of an earlier chunk all keys are seen: only the diagonal needs a mask.
future_too: key < query: → key != query:
    Keys of later chunks are in the future: leave such pairs out.
by_rank: key < query: → owner < rank:
    Chunks have places in the sequence, ranks don't: compare the numbers of chunks.
ignores_causal: if not causal or key → if key
    Without a causal mask every chunk sees every chunk.
"""),
)


# ring_backward(q, kv, o, lse, do, causal, deal, group)

BATCH, HEADS, KV_HEADS, EACH, WIDTH = 1, 4, 2, 4, 2  # EACH: tokens of a rank


def _whole(world_size: int, dtype: torch.dtype, number: int = 0) -> list[torch.Tensor]:
    """Make q, k, v and do of a whole sequence; each group of ranks has another `number`."""
    generator, length = torch.Generator().manual_seed(number), EACH * world_size
    made = []
    for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS):
        shape = BATCH, heads, length, WIDTH
        made.append(torch.randn(shape, generator=generator).to(dtype))
    return made


def _run_backward(answer, make, causal, dtype, size):
    group, rank = group_of(size), dist.get_rank() % size
    deal = make(size)
    mine = library.places(deal, rank, EACH * size)
    whole_ones = _whole(size, dtype, dist.get_rank() // size)
    q, k, v, do = (x[..., mine, :] for x in whole_ones)
    everyones = []
    for hop in range(size):  # forward, without the wire: only backward is the answer's
        theirs = library.places(deal, (rank - hop) % size, EACH * size)
        everyones.append(torch.stack([x[..., theirs, :] for x in whole_ones[1:3]]))
    o, lse = attend(q, everyones, deal, rank, causal)
    rank_1_comes_last()
    dq, dkv = answer(q, torch.stack((k, v)), o, lse, do, causal, deal, group)
    return {name: Numbers(x.detach(), 1e-4) for name, x in zip(NAMES, (dq, *dkv), strict=True)}


NAMES = "gradient of q", "gradient of k", "gradient of v"


def _gradients(make, causal, dtype, size, number) -> list[dict]:
    """Return, by rank, its part of autograd's gradients of textbook attention on one process."""
    q, k, v, do = _whole(size, dtype, number)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    q, k, v = leaves
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores = q @ k.mT * WIDTH**-0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, -torch.inf)
    found = torch.autograd.grad(scores.softmax(-1) @ v, leaves, do.double())
    right = []
    for rank in range(size):
        mine = library.places(make(size), rank, EACH * size)
        parts = [Numbers(x[..., mine, :]) for x in found]
        right.append(dict(zip(NAMES, parts, strict=True)))
    return right


def _backward_trials() -> Iterator[Trial]:
    for world_size, size, make, causal, dtype in (
        (2, 2, library.contiguous, False, torch.float32),
        (3, 3, library.zigzag, True, torch.float32),
        (3, 3, library.contiguous, True, torch.bfloat16),
        (4, 2, library.zigzag, True, torch.float32),
        (1, 1, library.zigzag, True, torch.float32),
    ):
        numbers = 2 * BATCH * KV_HEADS * EACH * WIDTH  # of a rank's k and v
        sent = numbers * ((size - 1) * dtype.itemsize + (size if size > 1 else 0) * 4)
        groups = f"in groups of {size}, " if size < world_size else ""
        what = f"{groups}{make.__name__}, {'causal' if causal else 'each token sees all'}"
        what += ", q, k and v in bf16" if dtype == torch.bfloat16 else ""
        args = make, causal, dtype, size
        right = []
        for number in range(world_size // size):
            right += _gradients(*args, number)
        yield Trial(world_size, _run_backward, args, right, world_size * sent, what)


ring_backward = Exercise(
    reference=library.ring_backward,
    trials=_backward_trials,
    explain=of_group,
    hints={
        "start": "for hop, block in enumerate(travel(kv, group)): what the block adds to dq stays "
        "here; the gradients of the block's keys and values must reach their owner.",
        "values": "A rank adds its summand to what its left neighbour sent for the same keys, and "
        "passes the sum on; after hop W-1 one more pass_on brings it home.",
        "wire": "k and v travel W-1 times, which `travel` does, and the sum of gradients W times.",
        "error": "pass_on returns what is coming, and a list of works: wait for each before you "
        "read it.",
    },
    praise="k and v went round once more, and their gradients W hops, home again, in float32.",
    note="gradients(saved, block, deal, rank, hop, causal) is what one block adds.",
    mistakes=mistakes("""
own_keys_in_every_hop: gradients(saved, block, → gradients(saved, kv,
    Each hop took this rank's own keys and values: take the block that is here in this hop. Forward
    was right, so the loss looks right, too.
sum_is_lost: else coming + summand → else summand
    The summands of the ranks before are lost: add what came from the left to this rank's own.
not_brought_home: return dq, coming → return dq, total
    After the last hop a rank holds the sum for its right neighbour's keys: pass it on once more.
dq_of_one_hop: dq = dq + dq_part → dq = dq_part
    Every block adds to the gradient of q: sum over the hops.
in_16_bits: pass_on(total, group) → pass_on(total.to(kv.dtype), group)
    The sum was rounded to 16 bits on its way, once in each hop: let it travel in float32.
returned_in_16_bits: return dq, coming → return dq.to(q.dtype), coming.to(q.dtype)
    What is returned was rounded to 16 bits: return float32, whatever q, k and v are.
every_hop_is_the_first: deal, rank, hop, causal) → deal, rank, 0, causal)
    Which keys these are, and what the mask hides of them, depends on the hop: pass it on to
    `gradients`.
no_mask: deal, rank, hop, causal) → deal, rank, hop, False)
    The mask is missing: what no query saw in forward gets no gradient.
of_the_world: pass_on(total, group) → pass_on(total)
    The sum went round all ranks. Here only those of the group share the sequence: pass it on in
    `group`.
"""),
    wire=check_wire,
)


# HeadsForTokens

SHAPE = 3, 2  # tokens of a rank, numbers of a token
BEFORE = {1: (1, 2), 2: (2,), 3: ()}  # the axes before the heads, by how many ranks share the heads


def _tokens(rank: int, heads: int) -> torch.Tensor:
    """Make a rank's x, (..., heads, tokens, numbers): 1, 2, 3, ... in order, plus 1000 · rank."""
    shape = *BEFORE[heads // 2], heads, *SHAPE
    numbers = torch.arange(1.0, 1 + math.prod(shape), dtype=torch.float64)
    return numbers.view(shape) + 1000 * rank


def _run_heads(answer, size):
    autograd_must_know()
    rank, group, heads = dist.get_rank(), group_of(size), 2 * size
    x = _tokens(rank, heads).requires_grad_()
    begun = len(recorder().records)
    out = answer.apply(x, group)
    then = len(recorder().records)
    seen = {"shape": list(out.shape), "out": whole(out), "calls in forward": calls(begun, then)}
    if list(out.shape) == [*BEFORE[size], 2, size * SHAPE[0], SHAPE[1]]:
        first = rank - rank % size
        mine = slice(2 * (rank % size), 2 * (rank % size) + 2)
        parts = [_tokens(other, heads)[..., mine, :, :] for other in range(first, first + size)]
        out.backward(torch.cat(parts, -2))  # the gradients are the numbers themselves
        seen |= {"gradient of x": whole(x.grad), "calls in backward": calls(then)}
    return seen | {"x afterwards": whole(x)}


def _heads(world_size: int, size: int) -> list[dict]:
    """Return what each rank should see: its part of the heads, of all tokens of its group."""
    right, heads = [], 2 * size
    for rank in range(world_size):
        first, place = rank - rank % size, rank % size
        parts = [
            _tokens(other, heads)[..., 2 * place : 2 * place + 2, :, :]
            for other in range(first, first + size)
        ]
        out = torch.cat(parts, -2)
        one = {"all_to_all": 1}
        seen = {"shape": list(out.shape), "out": whole(out), "calls in forward": one}
        seen |= {"gradient of x": whole(_tokens(rank, heads)), "calls in backward": one}
        right.append(seen | {"x afterwards": whole(_tokens(rank, heads))})
    return right


class GathersAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group=None):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.detach().contiguous(), group=group)
        return torch.cat(parts, -2).chunk(len(parts), -3)[dist.get_rank(group)].clone()

    @staticmethod
    def backward(ctx, gradient):
        return trade(gradient, -2, -3, ctx.group), None


HeadsForTokens = Exercise(
    reference=library.HeadsForTokens,
    helpers=(trade,),
    trials=lambda: in_groups(_run_heads, _heads, "two heads for each rank"),
    explain=of_group,
    hints={
        "start": "Rank r gets the r-th part of the heads, of everyone's tokens. Backward is the "
        "way back: cut along the tokens, join along the heads.",
        "values": "parts = torch.stack(x.chunk(W, dim=-3)); received = torch.empty_like(parts); "
        "dist.all_to_all_single(received, parts, group=group); torch.cat(received.unbind(), -2).",
        "wire": "One all-to-all each way.",
        "error": "all_to_all_single wants two contiguous tensors, whose first axis is cut into W "
        "parts: torch.stack makes one. backward returns a gradient for x, and None for the group.",
    },
    praise="one all-to-all each way, (W-1)/W of x sent.",
    note="The way back, after attention, is the same pair with forward and backward exchanged.",
    mistakes=[
        Mistake.written(
            GathersAll,
            "The values are right, but everything was sent to everyone, W times what is needed: "
            "an all-to-all gives each rank its part only.",
        ),
        *mistakes("""
tokens_for_heads: return trade(x, -3, -2, group) → return trade(x, -2, -3, group)
    That cuts the tokens and joins the heads, which is the way back: cut x along its heads.
backward_like_forward: trade(gradient, -2, -3, ctx.group) → trade(gradient, -3, -2, ctx.group)
    Backward goes the way back: cut the gradient along its tokens, join what comes along the heads.
passes_the_gradient_on: trade(gradient, -2, -3, ctx.group), None → gradient, None
    The gradient has other heads and other tokens than x: it must go back to where x came from.
interleaved: torch.cat(received.unbind(), dim=join) → torch.stack(
    ⏎received.unbind(), dim=join).flatten(join - 1, join)
    Tokens of the ranks take turns: all of rank 0's come first, then all of rank 1's.
of_the_world: dist.all_to_all_single(received, parts, group=group) → (
    ⏎dist.all_to_all_single(received, parts))
    The all-to-all was among all ranks: those that share a sequence are in `group`.
cuts_the_batch: parts = torch.stack(x.chunk(dist.get_world_size(group), dim=cut)) →
    ⏎shape = x.chunk(dist.get_world_size(group), dim=cut)[0].shape
    ⏎parts = x.contiguous().view(-1, *shape)
    The batch was cut with the heads: cut x along its axis of heads alone, dim=-3.
sends_nothing: dist.all_to_all_single(received, parts, group=group) → received.copy_(parts)
    Nothing was sent: these are this rank's own tokens, in other places.
"""),
    ],
)
