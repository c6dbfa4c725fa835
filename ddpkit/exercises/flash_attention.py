"""Checkers of notebook 09: flash_forward, o and lse in tiles of keys, and flash_backward."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ddpkit import flash_attention
from ddpkit.memory import watch

from .checker import Exercise, mistakes
from .softmax import Numbers, trial_of

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these

FAR = 4e9  # so far below 0 that -1e9, a common value for masks, is above it
O_LSE = {"o": 0, "lse, though o is right": 1}  # {result to compare, in this order: its place}
GRADIENTS = {"dv": 2, "dk, though dv is right": 1, "dq, though dv and dk are right": 0}


def _tensors(queries: int, keys: int, D: int, below: float = 0.0) -> tuple[Tensor, ...]:
    """Make q, k, v, do; scores are lowered by `below`; if it is negative, query 0's are raised."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = torch.randn(4, max(queries, keys), D, dtype=torch.float64, generator=generator)
    q[:, 0] = 1
    if below < 0:
        q[1:, 0] = 0
    k[:, 0] -= below * math.sqrt(D)
    return q[:queries], k[:keys], v[:keys], do[:queries]


def _exact(products: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """The specification, with all of q·kᵀ at once: o and lse."""
    s = products / math.sqrt(v.shape[1])
    if causal:
        s = s.masked_fill(torch.ones_like(s).triu(1) > 0, -math.inf)
    return s.softmax(1) @ v, s.logsumexp(1)


def _look(answer: Callable, case: str, names: dict[str, int], given: tuple, *options) -> dict:
    """Return {"CASE: shapes": ..., "CASE: NAME": numbers} of a call. names: {name: its index}."""
    with torch.no_grad():
        returned = answer(*given, *options)
    returned = returned if isinstance(returned, tuple | list) else [returned]
    seen = {f"{case}: shapes": [tuple(getattr(x, "shape", ())) for x in returned]}
    if len(returned) == len(names) and all(isinstance(x, Tensor) for x in returned):
        # A weight exp(s - m) is as far off as s: of numbers near FAR, by some 1e-6.
        rounding = 64 * torch.finfo(torch.float64).eps * max(x.abs().max() for x in given)
        atol = max(1e-5, rounding.item())
        seen |= {f"{case}: {name}": Numbers(returned[at], atol) for name, at in names.items()}
    return seen


# flash_forward(q, k, v, tile, causal)

FORWARD_CASES = [  # name, tile, causal, the amount that scores are lowered by
    ("8 keys in one tile", 8, False, 0.0),
    ("8 keys in tiles of 3", 3, False, 0.0),
    ("scores far below 0", 3, False, 2e3),
    ("scores of one query far above the others", 3, False, -2e3),
    ("causal", 3, True, 0.0),
    ("causal, scores far below 0", 3, True, FAR),
]
MANY = 256  # keys
MEMORY_CASES = [  # name, queries, causal, the smallest count of numbers that is too many at once
    ("1 query", 1, False, MANY),  # a row of scores
    (f"{MANY} queries, causal", MANY, True, MANY * MANY // 4),  # part of a mask
]
ALIVE, PRODUCTS = "numbers alive at once", "matrix products for each tile"


def _exact_forward(q, k, v, tile, causal):
    return _exact(q @ k.T, v, causal)


def _look_forward(answer: Callable, case: str, tile: int, causal: bool, below: float) -> dict:
    return _look(answer, case, O_LSE, _tensors(8, 8, 3, below)[:3], tile, causal)


def _look_at_memory(answer: Callable, case: str, queries: int, causal: bool, most: int) -> dict:
    """Run tiles of 4 keys; return how many numbers were alive at once, or "few": under `most`.

    With 1 query, also the matrix products for each tile, or "two" if they are no more: one pass.
    """
    q, k, v, _ = given = _tensors(queries, MANY, 4)
    with watch(nn.Module(), buckets=given) as timeline:
        answer(q, k, v, 4, causal)
    alive = (max(timeline.totals) - timeline.totals[0]) // q.itemsize
    products = sum(".mm" in op for op in timeline.ops) / (MANY / 4)
    seen = {f"{case}: {ALIVE}": "few" if alive < most else alive}
    if queries > 1:  # tiles of queries are as good
        return seen
    return seen | {f"{case}: {PRODUCTS}": "two" if products <= 2 else f"{products:g}"}


def _forward_trials():
    expected = {}
    for case in FORWARD_CASES:
        expected |= _look_forward(_exact_forward, *case)
    yield trial_of(_look_forward, FORWARD_CASES, expected, "small matrices")
    expected = {}
    for case, queries, *_ in MEMORY_CASES:
        expected |= {f"{case}: {ALIVE}": "few"} | (
            {f"{case}: {PRODUCTS}": "two"} if queries == 1 else {}
        )
    yield trial_of(_look_at_memory, MEMORY_CASES, expected, f"{MANY} keys in tiles of 4")


FORWARD = mistakes("""
acc_as_it_was: acc * correction + → acc +
    The maximum grows, ell is rescaled, but acc isn't: multiply it by exp(m - m_new), too.
ell_as_it_was: ell * correction + → ell +
    The maximum grows, acc is rescaled, but ell isn't: multiply it by exp(m - m_new), too.
from_0: q[..., :1], -math.inf → q[..., :1], 0.0
    With a maximum of 0, every exp is 0 where all scores are far below. Begin with -inf.
maximum_of_the_tile: torch.maximum(m, s.amax(-1, keepdim=True)) → s.amax(-1, keepdim=True)
    m_new is this tile's maximum alone: take the larger of it and m.
sees_only_the_past: triu(1 - first) → triu(-first)
    With causal, a query doesn't see its own key: -inf begins one key later, at j > i.
each_tile_alone: triu(1 - first) → triu(1)
    The causal mask begins anew in each tile: the tile's keys have numbers from `first` on.
last_tile_missing: range(0, k.shape[-2], tile) → range(0, k.shape[-2] - tile + 1, tile)
    The last, shorter tile is missing: its keys count, too.
lse_without_maximum: (m + ell.log()) → ell.log()
    o is right; lse is m + log(ell): the sum was taken after m was subtracted.
all_at_once: m = torch.full_like → tile = len(k)⏎m = torch.full_like
    Take the scores of one tile of keys at a time; keep nothing but its part in m, ell and acc.
""")
flash_forward = Exercise(
    reference=flash_attention.flash_forward,
    helpers=(flash_attention.tile_scores,),
    same_dtype=False,
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
    mistakes=FORWARD,
)


# flash_backward(q, k, v, o, lse, do, causal)

BACKWARD_CASES = [  # name, keys given, of 8, causal, the amount that scores are lowered by
    ("8 queries and keys", 8, False, 0.0),
    ("causal", 8, True, 0.0),
    ("5 of the 8 keys, o and lse of all", 5, False, 0.0),
    ("causal, scores far below 0", 8, True, FAR),
]


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
delta_as_a_row: .sum(-1, keepdim=True) → .sum(-1)
    delta is a number for each query: a column, (do * o).sum(1, keepdim=True).
no_scale: scale = q.shape[-1] ** -0.5⏎delta = → scale = 1.0⏎delta =
    dv is right. The scores were scaled by 1/√D, and so are dq and dk.
dk_not_transposed: = ds.mT @ q → = ds @ q
    dk = dsᵀ·q: key j's gradient comes from column j of ds.
sees_only_the_past: triu(1 - first) → triu(-first)
    With causal, a query sees its own key: -inf only at j > i.
lse_of_these_keys: lse.unsqueeze(-1) → s.logsumexp(-1, keepdim=True)
    You have a part of the keys; lse belongs to all of them: p = exp(s - lse), with lse as given.
delta_of_these_keys: p * (dp - delta) → p * (dp - (p * dp).sum(-1, keepdim=True))
    You have a part of the keys; o belongs to all of them: delta = rowsum(do ∘ o), with o as given.
""")
flash_backward = Exercise(
    reference=flash_attention.flash_backward,
    helpers=(flash_attention.tile_scores,),
    same_dtype=False,
    note="Ours, for any leading axes, and a tile of keys at a time.",
    trials=_backward_trials,
    hints={
        "start": "p = exp(s - lse[:, None]), with s as in forward; then dv = p.T @ do.",
        "values": "delta = (do * o).sum(1, keepdim=True), and ds = p * (do @ v.T - delta).",
        "error": "dq = ds @ k and dk = ds.T @ q, both times 1/√D.",
    },
    praise="dq, dk and dv from q, k, v, o, do and one number for each row.",
    mistakes=BACKWARD,
)
