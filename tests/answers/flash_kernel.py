"""A right answer to notebook 09's second Triton kernel. The checker gives it `tl`."""

from __future__ import annotations  # tl.constexpr, before there is tl

tl = None


def flash_kernel_finished_all_along(
    q_ptr, k_ptr, v_ptr, o_ptr, N, scale, D: tl.constexpr, TILE: tl.constexpr
):
    """In base 2, with o divided in every step, and rows as the second axis of s."""
    queries = tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]
    columns = tl.arange(0, D)[None, :]
    q = tl.load(q_ptr + queries * D + columns, mask=queries < N, other=0.0)
    q *= scale * 1.4426950408889634
    m = tl.full((1, TILE), float("-inf"), tl.float32)
    ell = tl.zeros((1, TILE), tl.float32)
    o = tl.zeros((D, TILE), tl.float32)
    for first in range(0, N, TILE):
        keys = first + tl.arange(0, TILE)[:, None]
        k = tl.load(k_ptr + keys * D + columns, mask=keys < N, other=0.0)
        v = tl.load(v_ptr + keys * D + columns, mask=keys < N, other=0.0)
        s = tl.where(keys < N, tl.dot(k, tl.trans(q)), float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 0)[None, :])
        p = tl.exp2(s - m_new)
        before = ell * tl.exp2(m - m_new)
        ell = before + tl.sum(p, 0)[None, :]
        o = o * before / ell + tl.dot(tl.trans(v), p / ell)
        m = m_new
    tl.store(o_ptr + queries * D + columns, tl.trans(o), mask=queries < N)


RIGHT = [("flash_kernel", flash_kernel_finished_all_along)]
