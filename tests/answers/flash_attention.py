"""Answers to the exercises of notebook 09 that are right, though not written as the reference."""

import math

import torch


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


def flash_forward_in_float32(q, k, v, tile, causal=False):
    """The sums and results are of the usual dtype, whatever q's is."""
    m, ell, acc = (
        torch.full((len(q), 1), -math.inf),
        torch.zeros(len(q), 1),
        torch.zeros(len(q), q.shape[1]),
    )
    for first in range(0, len(k), tile):
        s = q @ k[first : first + tile].T / math.sqrt(q.shape[1])
        s = s.masked_fill(torch.ones_like(s).triu(1 - first) > 0, -math.inf) if causal else s
        m_new = torch.maximum(m, s.amax(1, keepdim=True))
        ell *= torch.exp(m - m_new)
        ell += torch.exp(s - m_new).sum(1, keepdim=True)
        acc *= torch.exp(m - m_new)
        acc += torch.exp(s - m_new) @ v[first : first + tile]
        m = m_new
    return acc / ell, (m + ell.log())[:, 0]


def flash_forward_row_by_row(q, k, v, tile, causal=False):
    o, lse = torch.empty(q.shape), torch.empty(len(q))
    for i in range(len(q)):
        end = i + 1 if causal else len(k)
        row, row_lse = flash_forward_by_logaddexp(q[i : i + 1], k[:end], v[:end], tile)
        o[i], lse[i] = row[0], row_lse[0]
    return o, lse


def flash_backward_of_scaled_q(q, k, v, o, lse, do, causal=False):
    scale = q.shape[1] ** -0.5
    q = q * scale
    s = q @ k.mT
    if causal:
        s = s.masked_fill(torch.ones_like(s).triu(1) > 0, -math.inf)
    p = (s - lse[:, None]).exp()
    ds = p * (do @ v.mT) - p * (do * o).sum(-1, keepdim=True)
    return ds @ k * scale, ds.mT @ q, p.mT @ do


RIGHT = [
    ("flash_forward", flash_forward_by_logaddexp),
    ("flash_forward", flash_forward_in_float32),
    ("flash_forward", flash_forward_row_by_row),
    ("flash_backward", flash_backward_of_scaled_q),
]


def flash_forward_with_a_whole_mask(q, k, v, tile, causal=False):
    """A tile at a time, but for the mask."""
    mask = torch.zeros(len(q), len(k), dtype=q.dtype)
    if causal:
        mask.masked_fill_(torch.ones_like(mask).triu(1) > 0, -math.inf)
    m = q.new_full((len(q), 1), -math.inf)
    ell, acc = torch.zeros_like(m), torch.zeros_like(q)
    for first in range(0, len(k), tile):
        keys = slice(first, first + tile)
        s = q @ k[keys].T / math.sqrt(q.shape[1]) + mask[:, keys]
        m_new = torch.maximum(m, s.amax(1, keepdim=True))
        p, correction = torch.exp(s - m_new), torch.exp(m - m_new)
        ell = ell * correction + p.sum(1, keepdim=True)
        acc = acc * correction + p @ v[keys]
        m = m_new
    return acc / ell, (m + ell.log())[:, 0]


def flash_forward_with_one_maximum(q, k, v, tile, causal=False):
    """One maximum for all queries: the others' powers are 0 where one is far above."""
    _, lse = flash_forward_by_logaddexp(q, k, v, tile, causal)
    s = q @ k.T / math.sqrt(q.shape[1])
    if causal:
        s = s.masked_fill(torch.ones_like(s).triu(1) > 0, -math.inf)
    p = torch.exp(s - s.amax())
    return p @ v / p.sum(1, keepdim=True), lse


WRONG = [
    ("flash_forward", flash_forward_with_a_whole_mask, "numbers alive at once"),
    ("flash_forward", flash_forward_with_one_maximum, "scores of one query far above the others"),
]
