"""Right answers to notebook 09's Triton kernel. The checker gives them `tl`."""

from __future__ import annotations  # tl.constexpr, before there is tl

tl = None


def softmax_kernel_in_base_2(x_ptr, y_ptr, stride, columns, BLOCK: "tl.constexpr"):  # noqa: UP037 (as before Triton)
    offsets = tl.arange(0, BLOCK)
    x_ptr += tl.program_id(0) * stride
    y_ptr += tl.program_id(0) * stride
    x = tl.load(x_ptr + offsets, mask=offsets < columns, other=-float("inf")) * 1.4426950408889634
    p = tl.exp2(x - tl.max(x, axis=0))
    tl.store(y_ptr + offsets, p / tl.sum(p, axis=0), mask=offsets < columns)


def softmax_kernel_online(x_ptr, y_ptr, stride, columns, BLOCK: tl.constexpr):
    start = tl.program_id(0) * stride
    m, d = -float("inf"), 0.0
    for column in range(columns):
        x = tl.load(x_ptr + start + column)
        m_new = tl.maximum(m, x)
        d = d * tl.exp(m - m_new) + tl.exp(x - m_new)
        m = m_new
    for column in range(columns):
        tl.store(y_ptr + start + column, tl.exp(tl.load(x_ptr + start + column) - m) / d)


RIGHT = [
    ("softmax_kernel", softmax_kernel_in_base_2),
    ("softmax_kernel", softmax_kernel_online),
]


def softmax_kernel_by_log_sum_exp(x_ptr, y_ptr, stride, columns, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    start, inside = tl.program_id(0) * stride, offsets < columns
    x = tl.load(x_ptr + start + offsets, mask=inside, other=-float("inf"))
    m = tl.max(x, 0)
    lse = m + tl.log(tl.sum(tl.exp(x - m), 0))
    tl.store(y_ptr + start + offsets, tl.exp(x - lse), mask=inside)


RIGHT += [("softmax_kernel", softmax_kernel_by_log_sum_exp)]


def softmax_kernel_in_x_too(x_ptr, y_ptr, stride, columns, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    start, inside = tl.program_id(0) * stride, offsets < columns
    x = tl.load(x_ptr + start + offsets, mask=inside, other=-float("inf"))
    p = tl.exp(x - tl.max(x, 0))
    tl.store(x_ptr + start + offsets, p, mask=inside)
    tl.store(y_ptr + start + offsets, p / tl.sum(p, 0), mask=inside)


WRONG = [("softmax_kernel", softmax_kernel_in_x_too, "numbers of x that changed")]
