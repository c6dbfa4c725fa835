"""Checkers of notebook 09: flash_forward, o and lse in tiles of keys, and flash_backward."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from ddpkit import flash_attention
from ddpkit.memory import watch

from .checker import Exercise, mistakes
from .softmax import Numbers, read_by_case, trial_of

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these

FAR = 4e9  # so far below 0 that -1e9, a common value for masks, is above it
O_LSE = {"o": 0, "lse, though o is right": 1}  # {result to compare, in this order: its place}
GRADIENTS = {"dv": 2, "dk, though dv is right": 1, "dq, though dv and dk are right": 0}


def _tensors(queries: int, keys: int, D: int, below: float = 0.0) -> tuple[Tensor, ...]:
    """Make q, k, v, do; all scores are lowered by `below`."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = torch.randn(4, max(queries, keys), D, dtype=torch.float64, generator=generator)
    q[:, 0] = 1
    k[:, 0] -= below * math.sqrt(D)
    return q[:queries], k[:keys], v[:keys], do[:queries]


def _exact(products: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """The specification, with all of q·kᵀ at once: o and lse."""
    s = products / math.sqrt(v.shape[1])
    if causal:
        s = s.masked_fill(torch.ones_like(s).triu(1) > 0, -math.inf)
    return s.softmax(1) @ v, s.logsumexp(1)


def _look(answer: Callable, case: str, names: dict[str, int], given: tuple, *options) -> dict:
    """Call the answer; return its results, shapes first, and whether arguments are unchanged."""
    copies = [x.clone() for x in given]
    with torch.no_grad():
        returned = answer(*copies, *options)
    returned = returned if isinstance(returned, tuple | list) else [returned]
    seen = {f"{case}: shapes": [tuple(getattr(x, "shape", ())) for x in returned]}
    if len(returned) == len(names) and all(isinstance(x, Tensor) for x in returned):
        # A weight exp(s - m) is as far off as s: of numbers near FAR, by some 1e-6.
        rounding = 64 * torch.finfo(torch.float64).eps * max(x.abs().max() for x in given)
        atol = max(1e-5, rounding.item())
        seen |= {f"{case}: {name}": Numbers(returned[at], atol) for name, at in names.items()}
    untouched = all(map(torch.equal, copies, given))
    return seen | {f"{case}: arguments": "as given" if untouched else "changed in place"}


# flash_forward(q, k, v, tile, causal)

FORWARD_CASES = [  # name, tile, causal, the amount that scores are lowered by
    ("8 keys in one tile", 8, False, 0.0),
    ("8 keys in tiles of 3", 3, False, 0.0),
    ("scores far below 0", 3, False, 2e3),
    ("causal", 3, True, 0.0),
    ("causal, scores far below 0", 3, True, FAR),
]
MANY = 256  # keys
ALIVE, PRODUCTS = "numbers alive at once", "matrix products for each tile"


def _exact_forward(q, k, v, tile, causal):
    return _exact(q @ k.T, v, causal)


def _look_forward(answer: Callable, case: str, tile: int, causal: bool, below: float) -> dict:
    return _look(answer, case, O_LSE, _tensors(8, 8, 3, below)[:3], tile, causal)


def _look_at_memory(answer: Callable) -> dict:
    """Check that the answer works tile by tile, in one pass: one query, tiles of 4 keys."""
    q, k, v, _ = given = _tensors(1, MANY, 4)
    with watch(nn.Module(), buckets=given) as timeline:
        answer(q, k, v, 4, False)
    alive = (max(timeline.totals) - timeline.totals[0]) // q.itemsize
    products = sum(".mm" in op for op in timeline.ops) / (MANY / 4)
    return {
        ALIVE: "few" if alive < MANY else f"{alive}, more than a row of scores",
        PRODUCTS: "two" if products <= 2 else f"{products:g}",
    }


def _forward_trials():
    expected = {}
    for case in FORWARD_CASES:
        expected |= _look_forward(_exact_forward, *case)
    yield trial_of(_look_forward, FORWARD_CASES, expected, "small matrices")
    expected = {ALIVE: "few", PRODUCTS: "two"}
    yield trial_of(_look_at_memory, [()], expected, f"1 query and {MANY} keys")


FORWARD = mistakes("""
acc_as_it_was: acc * correction + → acc +
    The maximum grows, ell is rescaled, but acc isn't: multiply it by exp(m - m_new), too.
ell_as_it_was: ell * correction + → ell +
    The maximum grows, acc is rescaled, but ell isn't: multiply it by exp(m - m_new), too.
from_0: q[..., :1], -math.inf → q[..., :1], 0.0
    With a maximum of 0, every exp is 0 where all scores are far below. Begin with -inf.
maximum_of_the_tile: torch.maximum(m, s.amax(-1, keepdim=True)) → s.amax(-1, keepdim=True)
    m_new is this tile's maximum alone: take the larger of it and m.
normalised_per_tile: acc * correction + p @ → acc * correction + p / p.sum(-1, keepdim=True) @
    acc / ell → acc
    Each tile is divided by its own sum. Only ell, of all tiles, makes weights: divide at the end.
ell_of_the_tile: ell * correction + →
    ell is that of the last tile: add up all of them, and rescale what is there.
never_divided: acc / ell → acc
    acc is still a sum: divide it by ell at the end.
correction_as_a_row: acc * correction → acc * correction.squeeze(-1)
    m, ell and correction are one number a query. They meet s and acc as columns, m_new[:, None].
maximum_as_a_row: torch.exp(s - m_new) → torch.exp(s - m_new.squeeze(-1))
not_scaled: * q.shape[-1] ** -0.5 →
    The scores aren't scaled by 1/√D.
scaled_twice: * q.shape[-1] ** -0.5 → / q.shape[-1]
    The scores are scaled by 1/D: that is 1/√D twice.
sees_only_the_past: triu(1 - first) → triu(-first)
    With causal, a query doesn't see its own key: -inf begins one key later, at j > i.
sees_the_next: triu(1 - first) → triu(2 - first)
    With causal, a query sees the key after its own: -inf begins at j = i + 1.
each_tile_alone: triu(1 - first) → triu(1)
    The causal mask begins anew in each tile: the tile's keys have numbers from `first` on.
mask_to_the_right: triu(1 - first) → triu(1 + first)
    Without causal it is right. Column c of a tile is key first + c, hidden where first + c > i.
past_hidden: triu(1 - first) → tril(-1 - first)
    With causal, it is the past that is masked: -inf belongs at j > i.
not_causal: if causal: → if False:
    `causal` changes nothing: scores of keys j > i are -inf.
masked_with_0: hidden, -math.inf → hidden, 0.0
    A masked score is 0, whose exp counts: only exp(-inf) is 0.
masked_with_1e9: hidden, -math.inf → hidden, -1e9
    A masked score is -inf, not just small: all others may be smaller.
last_tile_missing: range(0, k.shape[-2], tile) → range(0, k.shape[-2] - tile + 1, tile)
    The last, shorter tile is missing: its keys count, too.
lse_without_maximum: (m + ell.log()) → ell.log()
    o is right; lse is m + log(ell): the sum was taken after m was subtracted.
m_stays: m = m_new →
    m is still -inf at the end: when ell and acc are corrected, m becomes m_new.
lse_without_log: (m + ell.log()) → (m + ell)
    o is right; lse is m + log(ell), of ell the logarithm.
lse_as_a_column: .squeeze(-1) →
    Shapes first: lse is (8, 1), and should be (8,).
another_order: return acc / ell, (m + ell.log()) → return (m + ell.log()).squeeze(-1), (acc / ell)
    o and lse are in each other's place: return o, lse.
m_and_ell: (m + ell.log()).squeeze(-1) → m.squeeze(-1), ell.squeeze(-1)
    Two are asked for, o and lse: m + log(ell), one number a row, stands for both m and ell.
o_alone: return acc / ell, (m + ell.log()).squeeze(-1) → return acc / ell
    Return o, lse, in this order.
q_scaled_in_place: m = torch.full_like → q *= q.shape[-1] ** -0.5⏎m = torch.full_like
    keys.mT * q.shape[-1] ** -0.5 → keys.mT
    Whoever called you needs it as it was: write q * scale, not q *= scale.
two_slips: * q.shape[-1] ** -0.5 →
    (m + ell.log()) → ell.log()
    It is wrong with all keys in one tile, too. So look first at the scores, q·kᵀ/√D, with -inf
    where causal hides; at p = exp(s - m_new); and at the end, o = acc / ell, lse = m + log(ell).
two_slips_between_tiles: ell * correction + → ell +
    acc * correction + → acc +
    With all keys in one tile it is right. So look at what a new tile does to ell and acc: both
    times exp(m - m_new), then plus the tile's part; and m becomes m_new.
all_at_once: m = torch.full_like → tile = len(k)⏎m = torch.full_like
    Take the scores of one tile of keys at a time; keep nothing but its part in m, ell and acc.
keeps_all_tiles: ell, acc = torch.zeros_like(m), torch.zeros_like(q) → ell, acc = 0, 0⏎kept = []
    m = m_new → m = m_new⏎kept.append(p)
    Keep nothing of a tile but its part in m, ell and acc.
row_by_row: m = torch.full_like → if len(q) > 1:
    ⏎    ends = [i + 1 if causal else len(k) for i in range(len(q))]
    ⏎    rows = [flash_forward(q[i : i + 1], k[:n], v[:n], n) for i, n in enumerate(ends)]
    ⏎    return tuple(map(torch.cat, zip(*rows)))⏎tile = len(k)⏎m = torch.full_like
    Take the scores of one tile of keys at a time; keep nothing but its part in m, ell and acc.
first_lse_then_o: acc = acc * correction + p @ v[..., keys, :] →
    return acc / ell, → for first in range(0, k.shape[-2], tile):
    ⏎    keys = slice(first, first + tile)
    ⏎    s = tile_scores(q, k[..., keys, :], first, causal)
    ⏎    acc = acc + torch.exp(s - m) @ v[..., keys, :]
    ⏎return acc / ell,
    One pass is enough: m, ell and acc go on together from tile to tile.
""")
USUAL = {"8 keys in one tile: o": "two_slips", "8 keys in tiles of 3: o": "two_slips_between_tiles"}
USUAL |= {"8 keys in one tile: lse, though o is right": "lse_without_maximum"}
USUAL |= {"causal: o": "mask_to_the_right"}
USUAL |= {ALIVE: "all_at_once", PRODUCTS: "first_lse_then_o"}
flash_forward = Exercise(
    reference=flash_attention.flash_forward,
    helpers=(flash_attention.tile_scores,),
    note="Ours, for any leading axes. The fast form has tiles of queries, too.",
    trials=_forward_trials,
    hints={
        "start": "for first in range(0, len(k), tile): the keys are k[first : first + tile], the "
        "last tile may be shorter.",
        "values": "m_new = torch.maximum(m, s.amax(1, keepdim=True)). Both ell and acc are "
        "multiplied by exp(m - m_new) before the tile's part is added.",
        "error": "The tile's keys are first, first + 1, ..., and the last tile has fewer. m, ell "
        "and lse are one number a query: columns, [:, None], where they meet s or acc.",
    },
    praise="o and lse, from one tile of scores at a time.",
    explain=partial(read_by_case, FORWARD, USUAL),
    mistakes=FORWARD,
)


# flash_backward(q, k, v, o, lse, do, causal)

BACKWARD_CASES = [  # name, keys given, of 8, causal, the amount that scores are lowered by
    ("8 queries and keys", 8, False, 0.0),
    ("causal", 8, True, 0.0),
    ("5 of the 8 keys, o and lse of all", 5, False, 0.0),
    ("causal, scores far below 0", 8, True, FAR),
]
PARTS = [f"5 of the 8 keys, o and lse of all: {name}" for name in GRADIENTS]


def _look_backward(answer: Callable, case: str, keys: int, causal: bool, below: float) -> dict:
    q, k, v, do = _tensors(8, 8, 3, below)
    given = q, k[:keys], v[:keys], *_exact(q @ k.T, v, causal), do
    seen = _look(answer, case, GRADIENTS, given, causal)
    if below:  # the first of k's columns is so large that dq's rounding is also large
        seen.pop(f"{case}: dq, though dv and dk are right", None)
    return seen


def _gradients(keys: int, causal: bool, below: float) -> tuple[Tensor, ...]:
    """The specification: autograd, with all scores at once; some keys get no gradient."""
    q, k, v, do = _tensors(8, 8, 3, below)
    inputs = [x.clone().requires_grad_() for x in (q, k[:keys], v[:keys])]
    products = torch.cat([inputs[0] @ inputs[1].T, q @ k[keys:].T], 1)
    o, _ = _exact(products, torch.cat([inputs[2], v[keys:]]), causal)
    return torch.autograd.grad(o, inputs, do)


def _backward_trials():
    expected = {}
    for case, *options in BACKWARD_CASES:
        right = _gradients(*options)
        expected |= _look_backward(lambda *_, right=right: right, case, *options)
    yield trial_of(_look_backward, BACKWARD_CASES, expected, "small matrices")


BACKWARD = mistakes("""
lse_as_a_row: lse.unsqueeze(-1) → lse
    Shapes first: s - lse subtracts lse[j] from column j. lse[:, None] is a column, one a row.
no_delta: (dp - delta) → dp
    dv is right. Softmax's derivative is p ∘ (dp - delta): delta = rowsum(do ∘ o) is missing.
delta_added: (dp - delta) → (dp + delta)
    delta is subtracted: ds = p ∘ (dp - delta).
delta_as_a_row: .sum(-1, keepdim=True) → .sum(-1)
    delta is a number for each query: a column, (do * o).sum(1, keepdim=True).
o_squared: (do * o) → (o * o)
    delta is rowsum(do ∘ o), not of o ∘ o.
no_scale: scale = q.shape[-1] ** -0.5 → scale = 1.0
    dv is right. The scores were scaled by 1/√D, and so are dq and dk.
scaled_twice: scale = q.shape[-1] ** -0.5 → scale = 1 / q.shape[-1]
    dq and dk are scaled twice: 1/√D once each, in ds or at the end.
dk_scaled_twice: @ q * scale → @ q * scale**2
    dk is scaled twice: if q is scaled already, ds.T @ q has its 1/√D.
dk_not_scaled: @ q * scale → @ q
    dk isn't scaled: by 1/√D, as dq.
dq_not_scaled: ds @ k[..., keys, :] * scale → ds @ k[..., keys, :]
    dq isn't scaled: by 1/√D, as dk.
dv_scaled: = p.mT @ do → = p.mT @ do * scale
    dv has no scale: o = p·v.
scores_not_scaled: keys.mT * q.shape[-1] ** -0.5 → keys.mT
    p isn't that of forward: the scores are q·kᵀ/√D there.
no_lse: s - lse.unsqueeze(-1) → s
    p = exp(s - lse): exp(s) alone isn't divided by the row's sum.
p_left_out: p * (dp - delta) → dp - delta
    ds = p ∘ (dp - delta): the factor p is missing.
dp_left_out: (dp - delta) → (p - delta)
    dp = do·vᵀ, the gradient of p, is missing: ds = p ∘ (dp - delta).
dk_not_transposed: = ds.mT @ q → = ds @ q
    dk = dsᵀ·q: key j's gradient comes from column j of ds.
dq_transposed: += ds @ k → += ds.mT @ k
    dq = ds·k: query i's gradient comes from row i of ds.
dv_not_transposed: = p.mT @ do → = p @ do
    dv = pᵀ·do: value j's gradient comes from column j of p.
dv_of_ds: dv[..., keys, :] = p.mT @ do →
    dp = do @ v[..., keys, :].mT → ds = p * (do @ v[..., keys, :].mT - delta)
    ds = p * (dp - delta) → dv[..., keys, :] = ds.mT @ do
    dv = pᵀ·do: from the weights, not from ds.
dv_only: dq += ds @ k[..., keys, :] * scale →
    dk[..., keys, :] = ds.mT @ q * scale → dk[..., keys, :] = 0
    dv is right. dq = ds·k and dk = dsᵀ·q, both scaled, are still to come.
another_order: return dq, dk, dv → return dk, dq, dv
    dq and dk are in each other's place: return dq, dk, dv.
dv_in_the_middle: return dq, dk, dv → return dq, dv, dk
    Gradients are in each other's place: return dq, dk, dv, as q, k, v.
dv_first: return dq, dk, dv → return dv, dq, dk
two_slips_after_p: dv[..., keys, :] = p.mT @ do → dv[..., keys, :] = p.mT @ do⏎do, q = -do, 2 * q
    dv is right, so p is, too. Then dp = do·vᵀ and ds = p ∘ (dp - delta), which has no scale yet;
    dq = ds·k and dk = dsᵀ·q, each times 1/√D, once.
sees_only_the_past: triu(1 - first) → triu(-first)
    With causal, a query sees its own key: -inf only at j > i.
past_hidden: triu(1 - first) → tril(-1)
    With causal, it is the past that is masked: -inf belongs at j > i.
not_causal: if causal: → if False:
    `causal` changes nothing: p is 0 for keys j > i, as in forward.
masked_with_1e9: hidden, -math.inf → hidden, -1e9
    A masked score is -inf, not just small: all others may be smaller.
lse_of_these_keys: lse.unsqueeze(-1) → s.logsumexp(-1, keepdim=True)
    You have a part of the keys; lse belongs to all of them: p = exp(s - lse), with lse as given.
delta_of_these_keys: p * (dp - delta) → p * (dp - (p * dp).sum(-1, keepdim=True))
    You have a part of the keys; o belongs to all of them: delta = rowsum(do ∘ o), with o as given.
q_scaled_in_place: scale = q.shape[-1] ** -0.5 → scale = q.shape[-1] ** -0.5⏎q *= scale
    keys.mT * q.shape[-1] ** -0.5 → keys.mT
    ds.mT @ q * scale → ds.mT @ q
    Whoever called you needs it as it was: write q * scale, not q *= scale.
by_autograd: scale = q.shape[-1] ** -0.5 → inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    ⏎with torch.enable_grad():
    ⏎    o = tile_scores(*inputs[:2], 0, causal).softmax(-1) @ inputs[2]
    ⏎return torch.autograd.grad(o, inputs, do)⏎scale = 1
    You are given a part of the keys; o and lse belong to all of them. p = exp(s - lse), and delta =
    rowsum(do ∘ o), with o and lse as given: made anew from these keys, they differ.
""")
AFTER_P = dict.fromkeys([f"8 queries and keys: {x}" for x in [*GRADIENTS][1:]], "two_slips_after_p")
flash_backward = Exercise(
    reference=flash_attention.flash_backward,
    helpers=(flash_attention.tile_scores,),
    note="Ours, for any leading axes, and a tile of keys at a time.",
    trials=_backward_trials,
    hints={
        "start": "p = exp(s - lse[:, None]), with s as in forward; then dv = p.T @ do.",
        "values": "delta = (do * o).sum(1, keepdim=True), and ds = p * (do @ v.T - delta).",
        "error": "dq = ds @ k and dk = ds.T @ q, both times 1/√D.",
    },
    praise="dq, dk and dv from q, k, v, o, do and one number for each row.",
    explain=partial(read_by_case, BACKWARD, AFTER_P | dict.fromkeys(PARTS, "by_autograd")),
    mistakes=BACKWARD,
)
