"""Answers to the exercises of notebook 08 that are right, though not written as the reference."""

import math
from math import exp, inf

import torch


def online_softmax_in_torch(row):
    m, d = torch.tensor(-inf, dtype=torch.float64), torch.tensor(0.0, dtype=torch.float64)
    for x in row:
        m_before, m = m, torch.maximum(m, x)
        shift = m if m > -inf else 0.0
        d = d * torch.exp(m_before - shift) + torch.exp(x - shift)
    return torch.stack([torch.exp(x - m) / d if d > 0 else torch.zeros(()).double() for x in row])


def online_softmax_by_the_log_of_the_sum(row):
    log_sum = -inf
    for x in row:
        low, high = sorted((log_sum, float(x)))
        log_sum = high if low == -inf else high + math.log1p(exp(low - high))
    return tuple(exp(x - log_sum) if x > -inf else 0.0 for x in row)


def online_softmax_looks_whether_all_is_masked(row):
    if all(x == -inf for x in row):
        return [0.0] * len(row)
    m, d = -inf, 0.0
    for x in row:
        m_before, m = m, max(m, x)
        d = (d * exp(m_before - m) if d else 0.0) + (exp(x - m) if x > -inf else 0.0)
    return (exp(x - m) / d for x in row)


def merge_in_two_cases(a, b):
    (m_a, d_a), (m_b, d_b) = sorted((a, b))
    return (m_b, d_b) if m_a == -inf else (m_b, d_b + d_a * exp(m_a - m_b))


def merge_in_one_tensor(a, b):
    logs = torch.stack([a[0] + torch.log(a[1]), b[0] + torch.log(b[1])])
    m = torch.maximum(a[0], b[0])
    return torch.stack([m, torch.exp(logs - m).sum() if m > -inf else torch.zeros_like(m)])


RIGHT = [
    ("online_softmax", online_softmax_in_torch),
    ("online_softmax", online_softmax_by_the_log_of_the_sum),
    ("online_softmax", online_softmax_looks_whether_all_is_masked),
    ("merge", merge_in_two_cases),
    ("merge", merge_in_one_tensor),
]
