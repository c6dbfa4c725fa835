"""Checkers of notebook 09: flash_forward, o and lse of one head in tiles of keys, and flash_backward, its gradients.

For each usual mistake the result that it leads to is computed, and compared with the answer's.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .old_checker import Exercise, Trial

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these

QUERIES, KEYS, D, TILE = 8, 8, 2, 3
FAR = 3e4  # makes scores of less than -1e9, with which some mask


@dataclass
class Results:
    """What an answer returned, by name; equal if all numbers differ by rounding only. NaN equals NaN.

    largest: numbers in the largest tensor that the answer made. changed: names of arguments that are others now.
    """

    tensors: dict[str, Tensor]
    largest: int = field(default=0, compare=False)
    changed: list[str] = field(default_factory=list, compare=False)

    def __eq__(self, other):
        return self.tensors.keys() == other.tensors.keys() and not self.wrong(other)

    def __repr__(self):
        return self.said(list(self.tensors))

    def said(self, names: list[str]) -> str:
        """The first numbers of these."""
        texts = (f"{name} {[float(f'{x:.3g}') for x in self.tensors[name].flatten()[:4]]}…" for name in names)
        return ", ".join(texts) or "something else"

    def wrong(self, right: "Results") -> list[str]:
        """The names of those that differ."""
        return [name for name, each in right.tensors.items() if not _same(self.tensors.get(name), each)]


def _same(a: Tensor | None, b: Tensor) -> bool:
    """Whether they differ by no more than the rounding of tensors that were made in float32."""
    return a is not None and a.shape == b.shape and torch.allclose(a, b, rtol=1e-5, atol=1e-5, equal_nan=True)


def _beside(expected: Results, got: Results) -> str:
    """Only what is wrong, on two lines."""
    wrong = got.wrong(expected)
    yours = got.said([name for name in wrong if name in got.tensors])
    return f"you return {yours}\n{'expected':>10} {expected.said(wrong)}"


class Case(Trial):
    """A trial that is named by what it tries: there is one rank."""

    def __str__(self):
        return self.what


def _check_arguments(trial: Trial, run) -> str | None:
    changed = run[0].changed
    if changed:
        return (
            f"the values are right, but {changed[0]} was changed in place.\nWhoever called you needs it as it was: "
            "write q * scale, not q *= scale."
        )
    return None


class _Largest(TorchDispatchMode):
    """Remembers how many numbers the largest result of an operation has; a transposed or cut tensor is no new one."""

    numel = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        made = op(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else (made,):
            if isinstance(each, Tensor) and not op.is_view:
                self.numel = max(self.numel, each.numel())
        return made


def _named(names: tuple[str, ...], returned: object, largest: int) -> Results:
    fits = isinstance(returned, tuple | list) and len(returned) == len(names)
    if not fits or not all(isinstance(each, Tensor) for each in returned):
        return Results({}, largest)
    tensors = [each.detach().double() for each in returned]
    return Results(dict(zip(names, tensors, strict=True)), largest)


def _called(names: tuple[str, ...], answer, given: dict[str, Tensor], *others) -> Results:
    before = {name: each.detach().clone() for name, each in given.items()}
    with _Largest() as largest:
        returned = answer(*given.values(), *others)
    results = _named(names, returned, largest.numel)
    results.changed = [name for name, each in given.items() if not torch.equal(each, before[name])]
    return results


def _tensors(shift: float = 0.0) -> tuple[Tensor, ...]:
    """q, k, v, do; `shift` takes so much from all scores, at least."""
    q, k, v, do = torch.randn(4, KEYS, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return q - shift, k + shift, v, do


# flash_forward(q, k, v, tile, causal)


def flash_forward(q, k, v, tile, causal=False):
    scale = q.shape[1] ** -0.5
    m, total, acc = q.new_full((len(q), 1), -torch.inf), q.new_zeros(len(q), 1), torch.zeros_like(q)
    for first in range(0, len(k), tile):
        s = q @ k[first : first + tile].T * scale
        if causal:
            s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1 - first), -torch.inf)
        m_new = torch.maximum(m, s.max(1, keepdim=True).values)
        correction, p = torch.exp(m - m_new), torch.exp(s - m_new)
        total = total * correction + p.sum(1, keepdim=True)
        acc = acc * correction + p @ v[first : first + tile]
        m = m_new
    return acc / total, (m + total.log()).squeeze(1)


def _forward(q, k, v, causal, mistake="") -> Results:
    """The specification, a key tile after the other; with one mistake, if it is named."""
    scale = {"no scale": 1.0, "scaled twice": 1 / D}.get(mistake, D**-0.5)
    offset = {"sees only the past": 0, "sees the next": 2}.get(mistake, 1)
    m = torch.full((QUERIES, 1), 0.0 if mistake == "from 0" else -math.inf, dtype=torch.float64)
    total, acc = torch.zeros_like(m), torch.zeros_like(q)
    masked = {"masked with 0": 0.0, "masked with a number": -100.0}.get(mistake, -math.inf)
    for first in range(0, KEYS - TILE + 1 if mistake == "last tile missing" else KEYS, TILE):
        keys = slice(first, first + TILE)
        s = q @ k[keys].T * scale
        if causal and mistake != "not causal":
            s[torch.ones_like(s, dtype=torch.bool).triu(offset - first * (mistake != "each tile alone"))] = masked
        m_new = torch.maximum(m, s.amax(1, keepdim=True))
        m_new = s.amax(1, keepdim=True) if mistake == "maximum of the tile" else m_new
        p, correction = torch.exp(s - m_new), torch.exp(m - m_new)
        keep = 1.0 if mistake == "total as it was" else correction
        total = total * keep + p.sum(1, keepdim=True)
        if mistake == "normalised per tile":
            p = p / p.sum(1, keepdim=True)
        acc = acc * (1.0 if mistake == "acc as it was" else correction) + p @ v[keys]
        m = m_new
        if mistake == "total of the tile":
            total = p.sum(1, keepdim=True)
    o = acc if mistake in ("normalised per tile", "never divided") else acc / total
    lse = {"no maximum": total.log(), "no log": m + total, "difference": m - total.log()}
    return Results({"o": o, "lse": lse.get(mistake, m + total.log()).squeeze(1)})


FORWARD_MISTAKES = {
    "acc as it was": "The maximum grows, total is rescaled, but acc isn't: multiply it by exp(m - m_new), too.",
    "total as it was": "The maximum grows, acc is rescaled, but total isn't: multiply it by exp(m - m_new), too.",
    "from 0": "Without a running maximum, or with one that begins with 0, every exp is 0 where all scores are far "
    "below. Begin with -inf.",
    "maximum of the tile": "m_new is this tile's maximum alone: take the larger of it and m.",
    "normalised per tile": "Each tile is divided by its own sum. Only the total of all tiles makes weights: divide at "
    "the end.",
    "total of the tile": "total is that of the last tile: add up all of them, and rescale what is there.",
    "never divided": "acc is still a sum: divide it by total at the end.",
    "no scale": "The scores aren't scaled by 1/√D.",
    "scaled twice": "The scores are scaled by 1/D: that is 1/√D twice.",
    "sees only the past": "With causal, a query doesn't see its own key: -inf begins one key later, at j > i.",
    "sees the next": "With causal, a query sees the key after its own: -inf begins at j = i + 1.",
    "each tile alone": "The causal mask begins anew in each tile: the tile's keys have numbers from `first` on.",
    "last tile missing": "The last, shorter tile is missing: its keys count, too.",
    "masked with 0": "A masked score is 0, whose exp counts: only exp(-inf) is 0.",
    "not causal": "`causal` changes nothing: scores of keys j > i are -inf.",
    "no maximum": "o is right; lse is log(total) + m: the sum was taken after m was subtracted.",
    "no log": "o is right; lse is m + log(total), of the total the logarithm.",
    "difference": "o is right; lse is m + log(total): the maximum comes back.",
}


def _run_forward(answer, shift, causal):
    q, k, v, _ = _tensors(shift)
    return _called(("o", "lse"), answer, {"q": q, "k": k, "v": v}, TILE, causal)


def _trial(program, right: Results, args: tuple, what: str) -> Trial:
    return Case(1, program, args, [right], what=what)


def _forward_trials() -> Iterable[Trial]:
    for shift, causal, what in (
        (0.0, False, f"{KEYS} keys in tiles of {TILE}"),
        (30.0, False, "scores far below 0"),
        (0.0, True, "causal"),
        (FAR, True, "causal, scores far below 0"),
    ):
        q, k, v, _ = _tensors(shift)
        yield _trial(_run_forward, _forward(q, k, v, causal), (shift, causal), what)


def _forward_cause(trial: Trial, rank: int, expected: Results, got: Results) -> str | None:
    shift, causal = trial.args
    if not got.tensors:
        return "Return o, of q's shape, and lse, a number for each query."
    o, lse = got.tensors["o"], got.tensors["lse"]
    if _same(lse, expected.tensors["o"]) and _same(o, expected.tensors["lse"]):
        return "o and lse are in each other's place: return o, lse."
    if _same(o, expected.tensors["o"]) and _same(lse.flatten(), expected.tensors["lse"]):
        return f"lse has shape {tuple(lse.shape)}: one number for each query is ({QUERIES},)."
    q, k, v, _ = _tensors(shift)
    for mistake, why in FORWARD_MISTAKES.items():
        if got == _forward(q, k, v, causal, mistake):
            return why
    if causal and shift and _same(o, _forward(q, k, v, causal, "masked with a number").tensors["o"]):
        return "A masked score is -inf, not just small: all others may be smaller."
    if any(each.isnan().any() for each in got.tensors.values()):
        return (
            "There is a NaN: -inf - -inf, or 0/0. With causal, a tile may have nothing that a query sees; begin with "
            "the first tile."
        )
    if got.wrong(expected) == ["lse"]:
        return "o is right; lse is the log of the sum of exp(scores), m + log(total), a number for each query."
    return None


def _forward_wire(trial: Trial, run) -> str | None:
    """Tiles: nothing as large as the matrix of scores."""
    if run[0].largest >= QUERIES * KEYS:
        return (
            f"the values are right, but one tensor has {run[0].largest} numbers, as many as all {QUERIES} × {KEYS} "
            "scores.\nTake the scores of one tile of keys at a time."
        )
    return _check_arguments(trial, run)


flash_forward = Exercise(
    flash_forward,
    _forward_trials,
    [
        "for first in range(0, len(k), tile): the keys are k[first : first + tile], the last tile may be shorter.",
        "m_new = torch.maximum(m, s.max(1, keepdim=True).values). Both total and acc are multiplied by "
        "exp(m - m_new) before the tile's part is added.",
        "Causal: query i sees key j if j <= i, and the tile's keys are first, first + 1, ... At the end o = acc / "
        "total, lse = m + total.log().",
    ],
    f"o and lse, and no tensor was as large as all {QUERIES} × {KEYS} scores.",
    _forward_cause,
    _forward_wire,
    beside=_beside,
    note="# Ours, for one head. ddpkit.flash_attention also has tiles of queries, and leaves out what causal hides.",
)


# flash_backward(q, k, v, o, lse, do, causal)


def flash_backward(q, k, v, o, lse, do, causal=False):
    scale = q.shape[1] ** -0.5
    s = q @ k.T * scale
    if causal:
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -torch.inf)
    p = torch.exp(s - lse[:, None])
    dv = p.T @ do
    delta = (do * o).sum(1, keepdim=True)
    ds = p * (do @ v.T - delta)
    return ds @ k * scale, ds.T @ q * scale, dv


def _backward(q, k, v, o, lse, do, causal, mistake="") -> Results:
    """The specification, with one mistake, if it is named."""
    scale = D**-0.5
    s = q @ k.T * (1.0 if mistake == "scores not scaled" else scale)
    if causal and mistake != "not causal":
        hidden = torch.ones_like(s, dtype=torch.bool).triu(0 if mistake == "sees only the past" else 1)
        s[hidden.T if mistake == "past hidden" else hidden] = -math.inf
    p = torch.exp(s - (0 if mistake == "no lse" else lse[:, None]))
    delta = ((o if mistake == "o squared" else do) * o).sum(1, keepdim=True)
    delta = {"no delta": 0.0, "delta added": -delta, "delta of columns": delta.T}.get(mistake, delta)
    dp = do @ v.T
    ds = dp - delta if mistake == "p left out" else p * (p - delta) if mistake == "dp left out" else p * (dp - delta)
    factor = {"no scale": 1.0, "scaled twice": scale**2}.get(mistake, scale)
    dv = {"dv of ds": ds.T @ do, "dv not transposed": p @ do}.get(mistake, p.T @ do)
    dq = (ds.T if mistake == "dq transposed" else ds) @ k * factor
    dk = (ds if mistake == "dk not transposed" else ds.T) @ q * (scale**2 if mistake == "dk scaled twice" else factor)
    if mistake == "dk not scaled":
        dk = dk / scale
    dq = dq / scale if mistake == "dq not scaled" else dq
    dv = dv * scale if mistake == "dv scaled" else dv
    if mistake == "another order":
        dq, dk = dk, dq
    return Results({"dq": dq, "dk": dk, "dv": dv})


BACKWARD_MISTAKES = {
    "no delta": "dv is right. Softmax's derivative is p ∘ (dp - delta), with delta = rowsum(do ∘ o): that is missing.",
    "delta added": "delta is subtracted: ds = p ∘ (dp - delta).",
    "delta of columns": "delta is a number for each query: a column, (do * o).sum(1, keepdim=True).",
    "o squared": "delta is rowsum(do ∘ o), not of o ∘ o.",
    "no scale": "dv is right. The scores were scaled by 1/√D, and so are dq and dk.",
    "scaled twice": "dq and dk are scaled twice: 1/√D once each, in ds or at the end.",
    "dk scaled twice": "dk is scaled twice: if q is scaled already, ds.T @ q has its 1/√D.",
    "dk not scaled": "dk isn't scaled: by 1/√D, as dq.",
    "dq not scaled": "dq isn't scaled: by 1/√D, as dk.",
    "dv scaled": "dv has no scale: o = p·v.",
    "scores not scaled": "p isn't that of forward: the scores are q·kᵀ/√D there.",
    "no lse": "p = exp(s - lse): exp(s) alone isn't divided by the row's sum.",
    "p left out": "ds = p ∘ (dp - delta): the factor p is missing.",
    "dp left out": "dp = do·vᵀ, the gradient of p, is missing: ds = p ∘ (dp - delta).",
    "dk not transposed": "dk = dsᵀ·q: key j's gradient comes from column j of ds.",
    "dq transposed": "dq = ds·k: query i's gradient comes from row i of ds.",
    "dv not transposed": "dv = pᵀ·do: value j's gradient comes from column j of p.",
    "dv of ds": "dv = pᵀ·do: from the weights, not from ds.",
    "another order": "dq and dk are in each other's place: return dq, dk, dv.",
    "sees only the past": "With causal, a query sees its own key: -inf only at j > i.",
    "past hidden": "With causal, it is the past that is masked: -inf belongs at j > i.",
    "not causal": "`causal` changes nothing: p is 0 for keys j > i, as in forward.",
}


def _inputs(causal: bool) -> tuple[Tensor, ...]:
    q, k, v, do = _tensors()
    return q, k, v, *_forward(q, k, v, causal).tensors.values(), do


def _run_backward(answer, causal):
    tensors = [x.requires_grad_() for x in _inputs(causal)]  # so that autograd, if somebody calls it, is seen
    given = dict(zip(("q", "k", "v", "o", "lse", "do"), tensors, strict=True))
    with torch.no_grad():
        return _called(("dq", "dk", "dv"), answer, given, causal)


def _backward_trials() -> Iterable[Trial]:
    for causal in (False, True):
        right = _backward(*_inputs(causal), causal)
        yield _trial(_run_backward, right, (causal,), "causal" if causal else f"{QUERIES} queries and keys")


def _backward_cause(trial: Trial, rank: int, expected: Results, got: Results) -> str | None:
    [causal] = trial.args
    if not got.tensors:
        return "Return dq, dk and dv, each of the shape of q, k or v."
    for mistake, why in BACKWARD_MISTAKES.items():
        if got == _backward(*_inputs(causal), causal, mistake):
            return why
    wrong = got.wrong(expected)
    right = [name for name in expected.tensors if name not in wrong]
    return f"{', '.join(right)} {'is' if len(right) == 1 else 'are'} right, {', '.join(wrong)} not." if right else None


flash_backward = Exercise(
    flash_backward,
    _backward_trials,
    [
        "p = exp(s - lse[:, None]), with s as in forward; then dv = p.T @ do.",
        "delta = (do * o).sum(1, keepdim=True), and ds = p * (do @ v.T - delta).",
        "dq = ds @ k and dk = ds.T @ q, both times 1/√D.",
    ],
    "dq, dk and dv from q, k, v, o, do and one number for each row.",
    _backward_cause,
    _check_arguments,
    beside=_beside,
    note="# Ours, for one head. ddpkit.flash_attention does so for one tile of queries and keys at a time.",
)
