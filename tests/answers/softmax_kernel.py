"""Answers to notebook 09's Triton kernel. The checker gives them `tl`, so that this file can be read without Triton."""

from __future__ import annotations  # tl.constexpr, before there is tl

tl = None


def softmax_kernel_without_maximum(x_ptr, y_ptr, stride, columns, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    start = tl.program_id(0) * stride
    p = tl.exp(tl.load(x_ptr + start + offsets, mask=offsets < columns, other=-float("inf")))
    tl.store(y_ptr + start + offsets, p / tl.sum(p, 0), mask=offsets < columns)


def softmax_kernel_without_mask(x_ptr, y_ptr, stride, columns, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * stride + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets)
    p = tl.exp(x - tl.max(x, 0))
    tl.store(y_ptr + offsets, p / tl.sum(p, 0))


def softmax_kernel_stores_the_whole_block(x_ptr, y_ptr, stride, columns, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    start = tl.program_id(0) * stride
    x = tl.load(x_ptr + start + offsets, mask=offsets < columns, other=-float("inf"))
    p = tl.exp(x - tl.max(x, 0))
    tl.store(y_ptr + start + offsets, p / tl.sum(p, 0))


def softmax_kernel_fills_with_zeros(x_ptr, y_ptr, stride, columns, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    start = tl.program_id(0) * stride
    x = tl.load(x_ptr + start + offsets, mask=offsets < columns, other=0.0)
    p = tl.exp(x - tl.max(x, 0))
    tl.store(y_ptr + start + offsets, p / tl.sum(p, 0), mask=offsets < columns)


def softmax_kernel_with_zeros_in_the_maximum(x_ptr, y_ptr, stride, columns, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    start = tl.program_id(0) * stride
    x = tl.load(x_ptr + start + offsets, mask=offsets < columns, other=0.0)
    p = tl.where(offsets < columns, tl.exp(x - tl.max(x, 0)), 0.0)
    tl.store(y_ptr + start + offsets, p / tl.sum(p, 0), mask=offsets < columns)


def softmax_kernel_reads_without_stride(x_ptr, y_ptr, stride, columns, BLOCK: tl.constexpr):
    row, offsets = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * columns + offsets, mask=offsets < columns, other=-float("inf"))
    p = tl.exp(x - tl.max(x, 0))
    tl.store(y_ptr + row * stride + offsets, p / tl.sum(p, 0), mask=offsets < columns)


def softmax_kernel_of_the_first_row(x_ptr, y_ptr, stride, columns, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < columns, other=-float("inf"))
    p = tl.exp(x - tl.max(x, 0))
    tl.store(y_ptr + offsets, p / tl.sum(p, 0), mask=offsets < columns)


def softmax_kernel_divides_by_nothing(x_ptr, y_ptr, stride, columns, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    start = tl.program_id(0) * stride
    x = tl.load(x_ptr + start + offsets, mask=offsets < columns, other=-float("inf"))
    tl.store(y_ptr + start + offsets, tl.exp(x - tl.max(x, 0)), mask=offsets < columns)


def softmax_kernel_takes_columns_for_its_block(x_ptr, y_ptr, stride, columns, BLOCK: tl.constexpr):
    numbers = tl.program_id(0) * stride + tl.arange(0, columns)
    p = tl.exp(tl.load(x_ptr + numbers))
    tl.store(y_ptr + numbers, p / tl.sum(p, 0))


def softmax_kernel_in_quotes(x_ptr, y_ptr, stride, columns, BLOCK: "tl.constexpr"):  # noqa: UP037 (as before Triton)
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * stride + offsets, mask=offsets < columns, other=-float("inf"))
    p = tl.exp(x - tl.max(x, 0))
    tl.store(y_ptr + tl.program_id(0) * stride + offsets, p / tl.sum(p, 0), mask=offsets < columns)


WRONG = [  # exercise, answer, what the verdict must say
    ("softmax_kernel", softmax_kernel_without_maximum, "exp(1000) is inf"),
    ("softmax_kernel", softmax_kernel_without_mask, "beyond its 3 columns was counted"),
    ("softmax_kernel", softmax_kernel_stores_the_whole_block, "tl.store needs the mask, too"),
    ("softmax_kernel", softmax_kernel_fills_with_zeros, "beyond its 3 columns was counted"),
    ("softmax_kernel", softmax_kernel_with_zeros_in_the_maximum, "Has something else become it?"),
    ("softmax_kernel", softmax_kernel_reads_without_stride, "they are `stride` numbers apart"),
    ("softmax_kernel", softmax_kernel_of_the_first_row, "Nothing was written to row 1"),
    ("softmax_kernel", softmax_kernel_divides_by_nothing, "divide by tl.sum"),
]


# Right, though not written as the reference is.


def softmax_kernel_in_base_2(x_ptr, y_ptr, stride, columns, BLOCK: tl.constexpr):
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
    ("softmax_kernel", softmax_kernel_in_quotes),
    ("softmax_kernel", softmax_kernel_in_base_2),
    ("softmax_kernel", softmax_kernel_online),
]
