"""Answers to the exercises of notebook 09: wrong ones, with what the verdict must say, and other right ones."""

import math

import torch


def _forward(
    q,
    k,
    v,
    tile,
    causal,
    start=-math.inf,
    acc_kept=None,
    total_kept=None,
    offset=1,
    scale=None,
    per_tile=False,
    masked=-math.inf,
):
    scale = q.shape[1] ** -0.5 if scale is None else scale
    m, total, acc = q.new_full((len(q), 1), start), q.new_zeros(len(q), 1), torch.zeros_like(q)
    for first in range(0, len(k), tile):
        keys = k[first : first + tile]
        s = q @ keys.T * scale
        if causal:
            hidden = torch.arange(first, first + len(keys)) >= torch.arange(len(q))[:, None] + offset
            s = s.masked_fill(hidden, masked)
        m_new = torch.maximum(m, s.amax(1, keepdim=True))
        correction, p = torch.exp(m - m_new), torch.exp(s - m_new)
        total = total * (total_kept or correction) + p.sum(1, keepdim=True)
        p = p / p.sum(1, keepdim=True) if per_tile else p
        acc = acc * (acc_kept or correction) + p @ v[first : first + tile]
        m = m_new
    return acc, total, m


def _finish(acc, total, m):
    return acc / total, (m + total.log())[:, 0]


def flash_forward_keeps_acc(q, k, v, tile, causal=False):
    return _finish(*_forward(q, k, v, tile, causal, acc_kept=1.0))


def flash_forward_keeps_total(q, k, v, tile, causal=False):
    return _finish(*_forward(q, k, v, tile, causal, total_kept=1.0))


def flash_forward_from_0(q, k, v, tile, causal=False):
    return _finish(*_forward(q, k, v, tile, causal, start=0.0))


def flash_forward_past_only(q, k, v, tile, causal=False):
    return _finish(*_forward(q, k, v, tile, causal, offset=0))


def flash_forward_sees_the_next(q, k, v, tile, causal=False):
    return _finish(*_forward(q, k, v, tile, causal, offset=2))


def flash_forward_never_causal(q, k, v, tile, causal=False):
    return _finish(*_forward(q, k, v, tile, False))


def flash_forward_unscaled(q, k, v, tile, causal=False):
    return _finish(*_forward(q, k, v, tile, causal, scale=1.0))


def flash_forward_scaled_twice(q, k, v, tile, causal=False):
    return _finish(*_forward(q * q.shape[1] ** -0.5, k, v, tile, causal))


def flash_forward_per_tile(q, k, v, tile, causal=False):
    acc, total, m = _forward(q, k, v, tile, causal, per_tile=True)
    return acc, (m + total.log())[:, 0]


def flash_forward_undivided(q, k, v, tile, causal=False):
    acc, total, m = _forward(q, k, v, tile, causal)
    return acc, (m + total.log())[:, 0]


def flash_forward_lse_without_maximum(q, k, v, tile, causal=False):
    acc, total, _ = _forward(q, k, v, tile, causal)
    return acc / total, total.log()[:, 0]


def flash_forward_o_only(q, k, v, tile, causal=False):
    return _finish(*_forward(q, k, v, tile, causal))[0]


def flash_forward_all_at_once(q, k, v, tile, causal=False):
    return _finish(*_forward(q, k, v, len(k), causal))


def flash_forward_by_element(q, k, v, tile, causal=False):
    """One query, one key at a time, with o divided all along."""
    rows = []
    for i, query in enumerate(q):
        m, total, o = torch.tensor(-math.inf), torch.tensor(0.0), torch.zeros_like(query)
        for j in range(i + 1 if causal else len(k)):
            s = query @ k[j] / math.sqrt(len(query))
            m_new = torch.maximum(m, s)
            total_new = total * torch.exp(m - m_new) + torch.exp(s - m_new)
            o = o * torch.exp(m - m_new) * total / total_new + torch.exp(s - m_new) / total_new * v[j]
            m, total = m_new, total_new
        rows.append((o, m + total.log()))
    return torch.stack([o for o, _ in rows]), torch.stack([lse for _, lse in rows])


def flash_forward_by_logaddexp(q, k, v, tile, causal=False):
    """Merges o and lse of tiles that are each finished."""
    o, lse = torch.zeros_like(q), q.new_full((len(q), 1), -math.inf)
    for first in range(0, len(k), tile):
        s = q @ k[first : first + tile].T / math.sqrt(q.shape[1])
        if causal:
            s = s.masked_fill(torch.ones_like(s).triu(1 - first) > 0, -math.inf)
        lse_new = torch.logaddexp(lse, s.logsumexp(1, keepdim=True))
        o = o * (lse - lse_new).exp() + (s - lse_new).exp() @ v[first : first + tile]
        lse = lse_new
    return o, lse[:, 0]


def flash_forward_lse_as_column(q, k, v, tile, causal=False):
    o, lse = flash_forward_by_logaddexp(q, k, v, tile, causal)
    return o, lse[:, None]


def flash_forward_in_another_order(q, k, v, tile, causal=False):
    return flash_forward_by_logaddexp(q, k, v, tile, causal)[::-1]


def flash_forward_masks_with_100(q, k, v, tile, causal=False):
    return _finish(*_forward(q, k, v, tile, causal, masked=-100.0))


def flash_forward_masks_with_1e4(q, k, v, tile, causal=False):
    return _finish(*_forward(q, k, v, tile, causal, masked=-1e4))


def flash_forward_masks_with_1e9(q, k, v, tile, causal=False):
    return _finish(*_forward(q, k, v, tile, causal, masked=-1e9))


def flash_forward_masks_with_0(q, k, v, tile, causal=False):
    return _finish(*_forward(q, k, v, tile, causal, masked=0.0))


def flash_forward_last_tile_missing(q, k, v, tile, causal=False):
    whole = len(k) // tile * tile
    return _finish(*_forward(q, k[:whole], v[:whole], tile, causal))


def flash_forward_without_maximum(q, k, v, tile, causal=False):
    total, acc = q.new_zeros(len(q), 1), torch.zeros_like(q)
    for first in range(0, len(k), tile):
        s = q @ k[first : first + tile].T / math.sqrt(q.shape[1])
        s = s.masked_fill(torch.ones_like(s).triu(1 - first) > 0, -math.inf) if causal else s
        total, acc = total + s.exp().sum(1, keepdim=True), acc + s.exp() @ v[first : first + tile]
    return acc / total, total.log()[:, 0]


def flash_forward_scales_q_in_place(q, k, v, tile, causal=False):
    q *= q.shape[1] ** -0.5
    return _finish(*_forward(q, k, v, tile, causal, scale=1.0))


def flash_forward_in_float32(q, k, v, tile, causal=False):
    """The sums and results are of the usual dtype, whatever q's is."""
    m, total, acc = torch.full((len(q), 1), -math.inf), torch.zeros(len(q), 1), torch.zeros(len(q), q.shape[1])
    for first in range(0, len(k), tile):
        s = q @ k[first : first + tile].T / math.sqrt(q.shape[1])
        s = s.masked_fill(torch.ones_like(s).triu(1 - first) > 0, -math.inf) if causal else s
        m_new = torch.maximum(m, s.amax(1, keepdim=True))
        total *= torch.exp(m - m_new)
        total += torch.exp(s - m_new).sum(1, keepdim=True)
        acc *= torch.exp(m - m_new)
        acc += torch.exp(s - m_new) @ v[first : first + tile]
        m = m_new
    return _finish(acc, total, m)


def flash_forward_row_by_row(q, k, v, tile, causal=False):
    o, lse = torch.empty(q.shape), torch.empty(len(q))
    for i in range(len(q)):
        end = i + 1 if causal else len(k)
        row, row_lse = flash_forward_by_logaddexp(q[i : i + 1], k[:end], v[:end], tile)
        o[i], lse[i] = row[0], row_lse[0]
    return o, lse


# flash_backward


def _p(q, k, lse, causal, scale=None):
    s = q @ k.T * (q.shape[1] ** -0.5 if scale is None else scale)
    s = s.masked_fill(torch.ones_like(s).triu(1) > 0, -math.inf) if causal else s
    return torch.exp(s - lse[:, None])


def _ds(p, v, o, do):
    return p * (do @ v.T - (do * o).sum(1, keepdim=True))


def flash_backward_without_delta(q, k, v, o, lse, do, causal=False):
    p, scale = _p(q, k, lse, causal), q.shape[1] ** -0.5
    ds = p * (do @ v.T) * scale
    return ds @ k, ds.T @ q, p.T @ do


def flash_backward_adds_delta(q, k, v, o, lse, do, causal=False):
    p, scale = _p(q, k, lse, causal), q.shape[1] ** -0.5
    ds = p * (do @ v.T + (do * o).sum(1, keepdim=True)) * scale
    return ds @ k, ds.T @ q, p.T @ do


def flash_backward_unscaled(q, k, v, o, lse, do, causal=False):
    p = _p(q, k, lse, causal)
    ds = _ds(p, v, o, do)
    return ds @ k, ds.T @ q, p.T @ do


def flash_backward_scaled_twice(q, k, v, o, lse, do, causal=False):
    p, scale = _p(q, k, lse, causal), q.shape[1] ** -0.5
    ds = _ds(p, v, o, do) * scale
    return ds @ k * scale, ds.T @ q * scale, p.T @ do


def flash_backward_of_scaled_q(q, k, v, o, lse, do, causal=False):
    scale = q.shape[1] ** -0.5
    q = q * scale
    p = _p(q, k, lse, causal, scale=1.0)
    ds = _ds(p, v, o, do) * scale
    return ds @ k, ds.T @ q, p.T @ do


def flash_backward_of_other_scores(q, k, v, o, lse, do, causal=False):
    p, scale = _p(q, k, lse, causal, scale=1.0), q.shape[1] ** -0.5
    ds = _ds(p, v, o, do) * scale
    return ds @ k, ds.T @ q, p.T @ do


def flash_backward_without_lse(q, k, v, o, lse, do, causal=False):
    p, scale = _p(q, k, torch.zeros_like(lse), causal), q.shape[1] ** -0.5
    ds = _ds(p, v, o, do) * scale
    return ds @ k, ds.T @ q, p.T @ do


def flash_backward_dk_not_transposed(q, k, v, o, lse, do, causal=False):
    p, scale = _p(q, k, lse, causal), q.shape[1] ** -0.5
    ds = _ds(p, v, o, do) * scale
    return ds @ k, ds @ q, p.T @ do


def flash_backward_dv_not_transposed(q, k, v, o, lse, do, causal=False):
    p, scale = _p(q, k, lse, causal), q.shape[1] ** -0.5
    ds = _ds(p, v, o, do) * scale
    return ds @ k, ds.T @ q, p @ do


def flash_backward_never_causal(q, k, v, o, lse, do, causal=False):
    p, scale = _p(q, k, lse, False), q.shape[1] ** -0.5
    ds = _ds(p, v, o, do) * scale
    return ds @ k, ds.T @ q, p.T @ do


def flash_backward_in_another_order(q, k, v, o, lse, do, causal=False):
    p, scale = _p(q, k, lse, causal), q.shape[1] ** -0.5
    ds = _ds(p, v, o, do) * scale
    return ds.T @ q, ds @ k, p.T @ do


def flash_backward_dv_only(q, k, v, o, lse, do, causal=False):
    return torch.zeros_like(q), torch.zeros_like(k), _p(q, k, lse, causal).T @ do


def flash_backward_dq_unscaled(q, k, v, o, lse, do, causal=False):
    p, scale = _p(q, k, lse, causal), q.shape[1] ** -0.5
    ds = _ds(p, v, o, do)
    return ds @ k, ds.T @ q * scale, p.T @ do


def flash_backward_dv_scaled(q, k, v, o, lse, do, causal=False):
    p, scale = _p(q, k, lse, causal), q.shape[1] ** -0.5
    ds = _ds(p, v, o, do) * scale
    return ds @ k, ds.T @ q, p.T @ do * scale


def flash_backward_past_hidden(q, k, v, o, lse, do, causal=False):
    scale = q.shape[1] ** -0.5
    s = q @ k.T * scale
    s = s.masked_fill(torch.ones_like(s).tril(-1) > 0, -math.inf) if causal else s
    p = torch.exp(s - lse[:, None])
    ds = _ds(p, v, o, do) * scale
    return ds @ k, ds.T @ q, p.T @ do


def flash_backward_scales_q_in_place(q, k, v, o, lse, do, causal=False):
    scale = q.shape[1] ** -0.5
    q *= scale
    p = _p(q, k, lse, causal, scale=1.0)
    ds = _ds(p, v, o, do)
    return ds @ k * scale, ds.T @ q, p.T @ do


def flash_backward_delta_of_p(q, k, v, o, lse, do, causal=False):
    """delta as softmax's derivative has it, from p ∘ dp, and q scaled beforehand."""
    scale = q.shape[1] ** -0.5
    p = _p(q * scale, k, lse, causal, scale=1.0)
    dp = do @ v.mT
    ds = p * dp - p * (p * dp).sum(-1, keepdim=True)
    return (scale * ds) @ k, ds.mT @ (q * scale), p.mT @ do


def flash_backward_by_row(q, k, v, o, lse, do, causal=False):
    scale = q.shape[1] ** -0.5
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for i in range(len(q)):
        for j in range(i + 1 if causal else len(k)):
            p = torch.exp(q[i] @ k[j] * scale - lse[i])
            ds = p * (do[i] @ v[j] - do[i] @ o[i]) * scale
            dq[i] += ds * k[j]
            dk[j] += ds * q[i]
            dv[j] += p * do[i]
    return dq, dk, dv


WRONG = [
    ("flash_forward", flash_forward_keeps_acc, "but acc isn't"),
    ("flash_forward", flash_forward_keeps_total, "but total isn't"),
    ("flash_forward", flash_forward_from_0, "Begin with -inf"),
    ("flash_forward", flash_forward_past_only, "doesn't see its own key"),
    ("flash_forward", flash_forward_sees_the_next, "sees the key after its own"),
    ("flash_forward", flash_forward_never_causal, "`causal` changes nothing"),
    ("flash_forward", flash_forward_unscaled, "aren't scaled by 1/√D"),
    ("flash_forward", flash_forward_scaled_twice, "that is 1/√D twice"),
    ("flash_forward", flash_forward_per_tile, "divided by its own sum"),
    ("flash_forward", flash_forward_undivided, "divide it by total at the end"),
    ("flash_forward", flash_forward_lse_without_maximum, "lse is log(total) + m"),
    ("flash_forward", flash_forward_o_only, "Return o, of q's shape, and lse"),
    ("flash_forward", flash_forward_all_at_once, "as many as all 8 × 8 scores"),
    ("flash_forward", flash_forward_masks_with_100, "-inf, not just small"),
    ("flash_forward", flash_forward_masks_with_1e4, "-inf, not just small"),
    ("flash_forward", flash_forward_masks_with_1e9, "-inf, not just small"),
    ("flash_forward", flash_forward_masks_with_0, "A masked score is 0, whose exp counts"),
    ("flash_forward", flash_forward_lse_as_column, "lse has shape (8, 1): one number for each query is (8,)"),
    ("flash_forward", flash_forward_in_another_order, "in each other's place: return o, lse"),
    ("flash_forward", flash_forward_last_tile_missing, "The last, shorter tile is missing"),
    ("flash_forward", flash_forward_without_maximum, "Without a running maximum"),
    ("flash_forward", flash_forward_scales_q_in_place, "q was changed in place"),
    ("flash_backward", flash_backward_dq_unscaled, "dq isn't scaled: by 1/√D, as dk"),
    ("flash_backward", flash_backward_dv_scaled, "dv has no scale: o = p·v"),
    ("flash_backward", flash_backward_past_hidden, "-inf belongs at j > i"),
    ("flash_backward", flash_backward_scales_q_in_place, "q was changed in place"),
    ("flash_backward", flash_backward_without_delta, "delta = rowsum(do ∘ o): that is missing"),
    ("flash_backward", flash_backward_adds_delta, "delta is subtracted"),
    ("flash_backward", flash_backward_unscaled, "and so are dq and dk"),
    ("flash_backward", flash_backward_scaled_twice, "dq and dk are scaled twice"),
    ("flash_backward", flash_backward_of_scaled_q, "dk is scaled twice"),
    ("flash_backward", flash_backward_of_other_scores, "p isn't that of forward"),
    ("flash_backward", flash_backward_without_lse, "exp(s) alone isn't divided"),
    ("flash_backward", flash_backward_dk_not_transposed, "dk = dsᵀ·q"),
    ("flash_backward", flash_backward_dv_not_transposed, "dv = pᵀ·do: value j's"),
    ("flash_backward", flash_backward_never_causal, "`causal` changes nothing"),
    ("flash_backward", flash_backward_in_another_order, "in each other's place"),
    ("flash_backward", flash_backward_dv_only, "dv is right, dq, dk not"),
]
RIGHT = [
    ("flash_forward", flash_forward_by_element),
    ("flash_forward", flash_forward_by_logaddexp),
    ("flash_forward", flash_forward_in_float32),
    ("flash_forward", flash_forward_row_by_row),
    ("flash_backward", flash_backward_delta_of_p),
    ("flash_backward", flash_backward_by_row),
]
