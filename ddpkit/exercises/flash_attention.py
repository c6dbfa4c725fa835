"""Checkers of notebook 09: flash_forward, o and lse in tiles of keys, and flash_backward."""

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ddpkit import flash_attention
from ddpkit.softmax import merge, summarize
from ddpkit.tools.memory import watch

from .checker import Exercise, Mistake, Trial, mistakes
from .softmax import Cases, Wrong

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these

FAR = 4e9  # so far below 0 that -1e9, which some mask with, is above


@dataclass
class Results:
    """What an answer returned, by name. Equal up to the rounding of float32; NaN equals NaN."""

    tensors: dict[str, Tensor]

    def __repr__(self):
        return self.said(list(self.tensors)) or "something else"

    def symptom(self) -> str:
        shown = {}
        for name, tensor in self.tensors.items():
            shown[name] = [f"{x:.4g}" for x in tensor.flatten()]
        return str(shown)

    def said(self, names: Iterable[str]) -> str:
        """Shapes, and the first numbers."""
        texts = []
        for name in names:
            x = self.tensors[name]
            first = ", ".join(f"{number:.3g}" for number in x.flatten()[:4].tolist())
            texts.append(f"{name} {tuple(x.shape)} [{first}, …]")
        return ", ".join(texts)

    def wrong(self, right: "Results") -> list[str]:
        """The names of those that differ."""
        return [name for name, x in right.tensors.items() if not _same(self.tensors.get(name), x)]


def _same(a: Tensor | None, b: Tensor) -> bool:
    if a is None or a.shape != b.shape:
        return False
    return torch.allclose(a, b, rtol=1e-5, atol=1e-5, equal_nan=True)


def _told(_: None, wrong: Wrong) -> str:
    """Only what is wrong, on two lines."""
    if not isinstance(wrong.got, Results):
        return f"{wrong.case}, but {wrong.got}"
    names = wrong.got.wrong(wrong.expected)
    yours = wrong.got.said(set(names) & wrong.got.tensors.keys()) or "something else"
    return f"{wrong.case}: you return {yours}\n{'expected':>10} {wrong.expected.said(names)}"


def _called(answer: Callable, case: str, given: dict, others: tuple, right: Results, noise=False):
    """What is wrong with what `answer` returns for the tensors that it is given, or None.

    noise: in the first column of the first result.
    """
    before = {name: x.clone() for name, x in given.items()}
    returned = answer(*given.values(), *others)
    fits = isinstance(returned, tuple | list) and len(returned) == len(right.tensors)
    if not fits or not all(isinstance(x, Tensor) for x in returned):
        return Wrong(case, right, Results({}))
    tensors = [x.detach().double() for x in returned]
    got = Results(dict(zip(right.tensors, tensors, strict=True)))
    if noise and tensors[0].dim() > 1:
        tensors[0][:, 0] = 0
    if got.wrong(right):
        return Wrong(case, right, got)
    changed = [name for name, x in given.items() if not torch.equal(x, before[name])]
    if changed:
        return Wrong("the values are right", None, f"{changed[0]} was changed in place", IN_PLACE)
    return None


IN_PLACE = "Whoever called you needs it as it was: write q * scale, not q *= scale."


def _tensors(queries: int, keys: int, D: int, below: float = 0.0) -> tuple[Tensor, ...]:
    """q, k, v, do; all scores are less by `below`."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = torch.randn(4, max(queries, keys), D, dtype=torch.float64, generator=generator)
    q[:, 0] = 1
    k[:, 0] -= below * math.sqrt(D)
    return q[:queries], k[:keys], v[:keys], do[:queries]


def _exact(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, ...]:
    """The specification, with all scores at once: o and lse."""
    s = q @ k.T / math.sqrt(q.shape[1])
    if causal:
        s[torch.ones_like(s).triu(1) > 0] = -math.inf
    return s.softmax(1) @ v, s.logsumexp(1)


def _explain(trial: Trial, rank: int, _: None, wrong: Wrong) -> str | None:
    """Shapes first, then what kind of number is wrong, then which are right."""
    got, right = wrong.got, wrong.expected
    if not isinstance(got, Results) or not got.tensors:
        return wrong.why or f"Return {', '.join(right.tensors)}, in this order."
    for name, x in right.tensors.items():
        shape = got.tensors[name].shape
        if shape != x.shape:
            return f"Shapes first: {name} is {tuple(shape)}, and should be {tuple(x.shape)}."
    if any(x.isnan().any() for x in got.tensors.values()):
        return (
            "There is a NaN: -inf - -inf, or 0/0. With causal, a tile may have nothing that a "
            "query sees; begin with the first tile."
        )
    names = got.wrong(right)
    fine = [name for name in right.tensors if name not in names]
    if fine:
        return f"{', '.join(fine)} {'is' if len(fine) == 1 else 'are'} right. {wrong.why}"
    return wrong.why


# flash_forward(q, k, v, tile, causal)

FORWARD_CASES = [  # queries, keys, D, tile, causal, by how much scores are less
    ("8 keys in tiles of 3", (8, 8, 3), 3, False, 0.0),
    ("scores far below 0", (8, 8, 3), 3, False, 2e3),
    ("causal", (8, 8, 3), 3, True, 0.0),
    ("causal, scores far below 0", (8, 8, 3), 3, True, FAR),
]
LARGE = 16, 96, 4  # queries, keys, D; in tiles of 4, so that all tiles' o are as many as scores


def _forward(answer: Callable, case: str, shape: tuple, tile: int, causal: bool, below: float):
    q, k, v, _ = _tensors(*shape, below)
    right = Results(dict(zip(("o", "lse"), _exact(q, k, v, causal), strict=True)))
    given = {"q": q, "k": k, "v": v}
    wrong = _called(answer, case, given, (tile, causal), right)
    if wrong and not wrong.why:  # two mistakes at once are told apart by tiles of all keys
        at_once = _called(answer, case, given, (len(k), causal), right)
        wrong.why = ONE_TILE_IS_WRONG if at_once else ONE_TILE_IS_RIGHT
    return wrong


ONE_TILE_IS_WRONG = (
    "It is wrong with all keys in one tile, too. So look first at the scores, q·kᵀ/√D, with -inf "
    "where causal hides; at p = exp(s - m_new); and at the end, o = acc / ell, lse = m + log(ell)."
)
ONE_TILE_IS_RIGHT = (
    "With all keys in one tile it is right. So look at what a new tile does to ell and acc: both "
    "times exp(m - m_new), then plus the tile's part; and m becomes m_new."
)


def _run_forward(answer: Callable) -> Wrong | None:
    return next(filter(None, (_forward(answer, *case) for case in FORWARD_CASES)), None)


class Products(TorchDispatchMode):
    """How many multiplications matrix products take; whether a row of scores is there at once."""

    def __init__(self):
        super().__init__()
        self.multiplications, self.whole_row = 0, False

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        made = op(*args, **(kwargs or {}))
        _, keys, D = LARGE
        if isinstance(made, Tensor) and made.is_floating_point():
            self.whole_row |= keys in made.shape and D not in made.shape
            if op.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm):
                self.multiplications += made.numel() * args[0].shape[-1]
        return made


def _run_large(answer: Callable) -> Wrong | None:
    """Whether it is done tile by tile, in one pass, and in the memory of a tile."""
    queries, keys, D = LARGE
    q, k, v, _ = _tensors(*LARGE)
    with watch(nn.Module(), buckets=(q, k, v)) as timeline, Products() as products:
        answer(q, k, v, 4, False)
    case, alive = "the values are right", max(timeline.totals) - timeline.totals[0]
    if alive >= queries * keys * q.itemsize:
        got = f"{alive // q.itemsize} numbers were alive at once, {queries} × {keys} scores or more"
        return Wrong(case, None, got, TOO_MANY)
    if products.whole_row:
        return Wrong(case, None, "a query's scores for all keys were there at once", TOO_MANY)
    if products.multiplications > 2 * queries * keys * D:
        return Wrong(case, None, "the scores were computed twice", TWO_PASSES)
    return _forward(answer, "many tiles", LARGE, 4, False, 0.0)


TOO_MANY = (
    "Take the scores of one tile of keys at a time, and keep nothing of a tile but its part in m, "
    "ell and acc."
)
TWO_PASSES = "One pass is enough: m, ell and acc go on together from tile to tile."


def _forward_trials():
    yield Cases(1, _run_forward, (), [None], what="small matrices")
    yield Cases(1, _run_large, (), [None], what="{} queries and {} keys".format(*LARGE))


def keeps_all_tiles(q, k, v, tile, causal=False):
    parts = []
    for first in range(0, len(k), tile):
        s = flash_attention.tile_scores(q, k[first : first + tile], first, causal)
        parts.append(summarize(s, v[first : first + tile]))
    m, ell, acc = functools.reduce(merge, parts)
    return acc / ell[:, None], m + ell.log()


def all_at_once(q, k, v, tile, causal=False):
    return _exact(q, k, v, causal)


def row_by_row(q, k, v, tile, causal=False):
    rows = []
    for i in range(len(q)):
        end = i + 1 if causal else len(k)
        rows.append(_exact(q[i : i + 1], k[:end], v[:end], False))
    return torch.cat([o for o, _ in rows]), torch.cat([lse for _, lse in rows])


def first_lse_then_o(q, k, v, tile, causal=False):
    _, lse = flash_attention.flash_forward(q, k, v, tile, causal)
    o = torch.zeros_like(q)
    for first in range(0, len(k), tile):
        s = flash_attention.tile_scores(q, k[first : first + tile], first, causal)
        o += (s - lse[:, None]).exp() @ v[first : first + tile]
    return o, lse


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
        "error": "Causal: query i sees key j if j <= i, and the tile's keys are first, first + 1, "
        "... At the end o = acc / ell, lse = (m + ell.log()).squeeze(1).",
    },
    praise="o and lse, from one tile of scores at a time.",
    explain=_explain,
    beside=_told,
    mistakes=[
        *mistakes(f"""
acc_as_it_was: acc * correction + → acc +
    The maximum grows, ell is rescaled, but acc isn't: multiply it by exp(m - m_new), too.
ell_as_it_was: ell * correction + → ell +
    The maximum grows, acc is rescaled, but ell isn't: multiply it by exp(m - m_new), too.
from_0: q[..., :1], -math.inf → q[..., :1], 0.0
    Without a running maximum, or with one that begins with 0, every exp is 0 where all scores are
    far below. Begin with -inf.
maximum_of_the_tile: torch.maximum(m, s.amax(-1, keepdim=True)) → s.amax(-1, keepdim=True)
    m_new is this tile's maximum alone: take the larger of it and m.
normalised_per_tile: acc * correction + p @ → acc * correction + p / p.sum(-1, keepdim=True) @
    acc / ell → acc
    Each tile is divided by its own sum. Only ell, of all tiles, makes weights: divide at the end.
ell_of_the_tile: ell * correction + →
    ell is that of the last tile: add up all of them, and rescale what is there.
never_divided: acc / ell → acc
    acc is still a sum: divide it by ell at the end.
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
lse_without_log: (m + ell.log()) → (m + ell)
    o is right; lse is m + log(ell), of ell the logarithm.
lse_as_a_column: .squeeze(-1) →
    Shapes first: lse is (8, 1), and should be (8,).
another_order: return acc / ell, (m + ell.log()) → return (m + ell.log()).squeeze(-1), (acc / ell)
    o and lse are in each other's place: return o, lse.
o_alone: return acc / ell, (m + ell.log()).squeeze(-1) → return acc / ell
    Return o, lse, in this order.
q_scaled_in_place: m = torch.full_like → q *= q.shape[-1] ** -0.5⏎m = torch.full_like
    keys.mT * q.shape[-1] ** -0.5 → keys.mT
    {IN_PLACE}
two_slips: * q.shape[-1] ** -0.5 →
    acc * correction + → acc +
    {ONE_TILE_IS_WRONG}
two_slips_between_tiles: ell * correction + → ell +
    acc * correction + → acc +
    {ONE_TILE_IS_RIGHT}
"""),
        Mistake.written(all_at_once, "numbers were alive at once, 16 × 96 scores or more"),
        Mistake.written(keeps_all_tiles, TOO_MANY),
        Mistake.written(row_by_row, "a query's scores for all keys were there at once"),
        Mistake.written(first_lse_then_o, TWO_PASSES),
    ],
)


# flash_backward(q, k, v, o, lse, do, causal)

BACKWARD_CASES = [  # how many of 8 keys are given, causal, by how much scores are less
    ("8 queries and keys", 8, False, 0.0, ""),
    ("causal", 8, True, 0.0, ""),
    (
        "5 of the 8 keys, o and lse of all",
        *(5, False, 0.0),
        "You are given a part of the keys; o and lse belong to all of them. p = exp(s - lse), and "
        "delta = rowsum(do ∘ o), with o and lse as given: made anew from these keys, they differ.",
    ),
    ("causal, scores far below 0", 8, True, FAR, ""),
]


def _gradients(q, k, v, do, causal, keys) -> Results:
    """The specification: autograd, with all scores at once."""
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    o, _ = _exact(*inputs, causal)
    dq, dk, dv = torch.autograd.grad(o, inputs, do)
    if keys < len(k):  # dq is the part that these keys give
        s = q @ k.T / math.sqrt(q.shape[1])
        p, dp = s.softmax(1), do @ v.T
        ds = p * (dp - (do * o.detach()).sum(1, keepdim=True)) / math.sqrt(q.shape[1])
        dq = ds[:, :keys] @ k[:keys]
    return Results({"dq": dq, "dk": dk[:keys], "dv": dv[:keys]})


def _run_backward(answer: Callable) -> Wrong | None:
    for case, keys, causal, below, why in BACKWARD_CASES:
        q, k, v, do = _tensors(8, 8, 3, below)
        right, (o, lse) = _gradients(q, k, v, do, causal, keys), _exact(q, k, v, causal)
        given = {"q": q, "k": k[:keys], "v": v[:keys], "o": o, "lse": lse, "do": do}
        if below:  # the first of k's columns is so large that dq's rounding is, too
            right.tensors["dq"][:, 0] = 0
        with torch.no_grad():
            wrong = _called(answer, case, given, (causal,), right, noise=bool(below))
        if wrong:
            wrong.why = wrong.why or why
            return wrong
    return None


def _backward_trials():
    yield Cases(1, _run_backward, (), [None], what="small matrices")


def by_autograd(q, k, v, o, lse, do, causal=False):
    with torch.enable_grad():
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(_exact(*inputs, causal)[0], inputs, do)


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
    explain=_explain,
    beside=_told,
    mistakes=[
        *mistakes(f"""
lse_as_a_row: lse.unsqueeze(-1) → lse
    Shapes first: lse has shape (N,), so s - lse subtracts lse[j] from column j. lse[:, None] is a
    column, a number for each row.
no_delta: (dp - delta) → dp
    dv is right. Softmax's derivative is p ∘ (dp - delta), with delta = rowsum(do ∘ o): that is
    missing.
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
sees_only_the_past: triu(1 - first) → triu(-first)
    With causal, a query sees its own key: -inf only at j > i.
past_hidden: triu(1 - first) → tril(-1)
    With causal, it is the past that is masked: -inf belongs at j > i.
not_causal: if causal: → if False:
    `causal` changes nothing: p is 0 for keys j > i, as in forward.
masked_with_1e9: hidden, -math.inf → hidden, -1e9
    A masked score is -inf, not just small: all others may be smaller.
lse_of_these_keys: lse.unsqueeze(-1) → s.logsumexp(-1, keepdim=True)
    p = exp(s - lse), and delta = rowsum(do ∘ o), with o and lse as given
delta_of_these_keys: p * (dp - delta) → p * (dp - (p * dp).sum(-1, keepdim=True))
    p = exp(s - lse), and delta = rowsum(do ∘ o), with o and lse as given
q_scaled_in_place: scale = q.shape[-1] ** -0.5 → scale = q.shape[-1] ** -0.5⏎q *= scale
    keys.mT * q.shape[-1] ** -0.5 → keys.mT
    ds.mT @ q * scale → ds.mT @ q
    {IN_PLACE}
"""),
        Mistake.written(by_autograd, "with o and lse as given: made anew from these keys"),
    ],
)
