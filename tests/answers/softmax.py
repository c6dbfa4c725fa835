"""Answers to the exercises of notebook 08: wrong ones, with what the verdict must say, and other right ones."""

import math
from math import exp, inf

import torch

from ddpkit import softmax

# online_softmax


def online_softmax_without_a_correction(row):
    m, d = -inf, 0.0
    for x in row:
        m = max(m, x)
        d += exp(x - m)
    return [exp(x - m) / d for x in row]


def online_softmax_corrects_with_the_new_maximum(row):
    m, d = -inf, 0.0
    for x in row:
        m = max(m, x)
        d = d * exp(m - m) + exp(x - m)
    return [exp(x - m) / d for x in row]


def online_softmax_from_0(row):
    m, d = 0.0, 0.0
    for x in row:
        m_before, m = m, max(m, x)
        d = d * exp(m_before - m) + exp(x - m)
    return [exp(x - m) / d for x in row]


def online_softmax_from_0_in_torch(row):
    m, d = torch.zeros(2, dtype=torch.float64)
    for x in row:
        m_before, m = m, torch.maximum(m, x)
        d = d * torch.exp(m_before - m) + torch.exp(x - m)
    return [torch.exp(x - m) / d for x in row]


def online_softmax_with_the_wrong_sign(row):
    m, d = row[0], 1.0
    for x in row[1:]:
        m_before, m = m, max(m, x)
        d = d * exp(m - m_before) + exp(x - m)
    return [exp(x - m) / d for x in row]


def online_softmax_with_the_wrong_sign_from_the_start(row):
    m, d = -inf, 0.0
    for x in row:
        m_before, m = m, max(m, x)
        d = d * exp(m - m_before) + exp(x - m)
    return [exp(x - m) / d for x in row]


def online_softmax_corrects_the_new_number_too(row):
    m, d = row[0], 1.0
    for x in row[1:]:
        m_before, m = m, max(m, x)
        d = (d + exp(x - m)) * exp(m_before - m)
    return [exp(x - m) / d for x in row]


def online_softmax_with_the_maximum_before(row):
    m, d = row[0], 1.0
    for x in row[1:]:
        m_before, m = m, max(m, x)
        d = d * exp(m_before - m) + exp(x - m_before)
    return [exp(x - m) / d for x in row]


def online_softmax_of_a_masked_row_is_nan(row):
    m, d = torch.tensor(-inf), torch.tensor(0.0)
    for x in row:
        m_before, m = m, torch.maximum(m, x)
        if m > -inf:
            d = d * torch.exp(m_before - m) + torch.exp(x - m)
    return [torch.exp(x - m) / d for x in row]


def online_softmax_divides_by_0(row):
    m, d = -inf, 0.0
    for x in row:
        if x > -inf:
            m_before, m = m, max(m, x)
            d = d * exp(m_before - m) + exp(x - m)
    return [0.0 / d if x == -inf else exp(x - m) / d for x in row]


def online_softmax_of_a_row_that_begins_masked_is_nan(row):
    m, d = -inf, 0.0
    for x in row:
        m_before, m = m, max(m, x)
        d = d * exp(m_before - m) + exp(x - m)
    return [exp(x - m) / d for x in row]


def online_softmax_chokes_on_masked_numbers(row):
    m, d = -inf, 0.0
    for x in row:
        m_before, m = m, max(m, x)
        d = d * exp(m_before - m) + exp(x - m)
    return [exp(x + 0 * x - m) / d for x in row]


def online_softmax_without_a_maximum(row):
    d = sum(exp(x) for x in row)
    return [exp(x) / d for x in row]


def online_softmax_without_a_maximum_in_torch(row):
    d = sum(torch.exp(x) for x in row)
    return [torch.exp(x) / d for x in row]


def online_softmax_with_the_minimum(row):
    m, d = inf, 0.0
    for x in row:
        m_before, m = m, min(m, x)
        d = d * (exp(m_before - m) if d else 0) + exp(x - m)
    return [exp(x - m) / d for x in row]


def online_softmax_in_one_pass(row):
    m, d, shares = -inf, 0.0, []
    for x in row:
        m_before, m = m, max(m, x)
        d = d * exp(m_before - m) + exp(x - m)
        shares.append(exp(x - m) / d)
    return shares


def online_softmax_without_a_division(row):
    m = -inf
    for x in row:
        m = max(m, x)
    return [exp(x - m) for x in row]


def online_softmax_counts_the_first_twice(row):
    m, d = row[0], 1.0
    for x in row:
        m_before, m = m, max(m, x)
        d = d * exp(m_before - m) + exp(x - m)
    return [exp(x - m) / d for x in row]


def online_softmax_divides_by_the_length(row):
    m = max(row)
    return [exp(x - m) / len(row) for x in row]


def online_softmax_in_three_passes(row):
    m = max(row)
    d = sum(exp(x - m) for x in row if x > -inf)
    return [exp(x - m) / d if d else 0.0 for x in row]


def online_softmax_of_a_copy(row):
    return softmax.safe_softmax(torch.tensor([float(x) for x in row], dtype=torch.float64)).tolist()


def online_softmax_by_torch(row):
    return torch.tensor(row).softmax(-1).nan_to_num(0.0)


def online_softmax_of_a_copy_read_for_nothing(row):
    numbers = list(row)
    list(row)
    m = max(numbers)
    d = sum(exp(x - m) for x in numbers if x > -inf)
    return [exp(x - m) / d if d else 0.0 for x in numbers]


def online_softmax_of_a_copy_made_in_the_second_pass(row):
    m, numbers = max(row), [float(x) for x in row]
    d = sum(exp(x - m) for x in numbers if x > -inf)
    return [exp(x - m) / d if d else 0.0 for x in numbers]


def online_softmax_keeps_the_powers(row):
    m = max(row)
    powers = [exp(x - m) if x > -inf else 0.0 for x in row]
    return [power / (sum(powers) or 1) for power in powers]


def online_softmax_keeps_the_powers_that_overflow(row):
    powers = [exp(x) for x in row]
    return [power / sum(powers) for power in powers]


def online_softmax_from_minus_1e9(row):
    m, d = -1e9, 0.0
    for x in row:
        m_before, m = m, max(m, x)
        d = d * exp(m_before - m) + exp(x - m)
    return [exp(x - m) / d if d else 0.0 for x in row]


def online_softmax_of_a_masked_row_is_even(row):
    m, d = -inf, 0.0
    for x in row:
        if x > -inf:
            m_before, m = m, max(m, x)
            d = d * exp(m_before - m) + exp(x - m)
    return [exp(x - m) / d if d else 1 / len(row) for x in row]


def online_softmax_ends_at_a_masked_number(row):
    m, d = -inf, 0.0
    for x in row:
        if x == -inf:
            break
        m_before, m = m, max(m, x)
        d = d * exp(m_before - m) + exp(x - m)
    return [exp(x - m) / d if d else 0.0 for x in row]


def online_softmax_returns_its_statistics(row):
    m = max(row)
    return m, sum(exp(x - m) for x in row)


def online_softmax_returns_a_number(row):
    return 1.0


# merge


def merge_adds_the_sums(a, b):
    return max(a[0], b[0]), a[1] + b[1]


def merge_corrects_the_larger_only(a, b):
    m = max(a[0], b[0])
    return m, a[1] * exp(a[0] - m) + b[1]


def merge_takes_the_smaller_maximum(a, b):
    m = min(a[0], b[0])
    return m, a[1] * exp(a[0] - m) + b[1] * exp(b[0] - m)


def merge_takes_the_second_maximum(a, b):
    m = b[0]
    return m, a[1] * exp(a[0] - m) + b[1]


def merge_takes_the_first_maximum(a, b):
    m = a[0]
    return m, a[1] + b[1] * exp(b[0] - m)


def merge_swaps_the_corrections(a, b):
    m = max(a[0], b[0])
    return m, a[1] * exp(b[0] - m) + b[1] * exp(a[0] - m)


def merge_with_the_wrong_sign(a, b):
    m = max(a[0], b[0])
    return m, a[1] * exp(m - a[0]) + b[1] * exp(m - b[0])


def merge_overflows(a, b):
    m = max(a[0], b[0])
    return m, (a[1] * exp(a[0]) + b[1] * exp(b[0])) / exp(m)


def merge_overflows_in_torch(a, b):
    m = max(a[0], b[0])
    return m, (a[1] * torch.exp(a[0]) + b[1] * torch.exp(b[0])) / torch.exp(m)


def merge_of_two_masked_parts_is_nan(a, b):
    m = max(a[0], b[0])
    return m, a[1] * exp(a[0] - m) + b[1] * exp(b[0] - m)


def _merge_with(nothing, a, b):
    m = max(a[0], b[0])
    return nothing if m == -inf else (m, a[1] * exp(a[0] - m) + b[1] * exp(b[0] - m))


def merge_of_two_masked_parts_is_0(a, b):
    return _merge_with((0.0, 0.0), a, b)


def merge_of_two_masked_parts_has_a_sum(a, b):
    return _merge_with((-inf, 1.0), a, b)


def merge_of_two_masked_parts_is_finite(a, b):
    return _merge_with((-1e30, 0.0), a, b)


def merge_takes_the_larger_part(a, b):
    return max(a, b)


def merge_averages(a, b):
    m = max(a[0], b[0])
    return m, (a[1] * exp(a[0] - m) + b[1] * exp(b[0] - m)) / 2


def merge_the_other_way_round(a, b):
    m = max(a[0], b[0])
    return a[1] * exp(a[0] - m) + b[1] * exp(b[0] - m), m


def merge_returns_the_sum(a, b):
    m = max(a[0], b[0])
    return a[1] * exp(a[0] - m) + b[1] * exp(b[0] - m)


def merge_multiplies(a, b):
    return max(a[0], b[0]), a[1] * b[1]


WRONG = [  # exercise, answer, what the verdict must say
    ("online_softmax", online_softmax_without_a_correction, "wasn't corrected when the maximum grew"),
    ("online_softmax", online_softmax_corrects_with_the_new_maximum, "wasn't corrected when the maximum grew"),
    ("online_softmax", online_softmax_from_0, "From 0 it would stay 0"),
    ("online_softmax", online_softmax_from_0_in_torch, "From 0 it would stay 0"),
    ("online_softmax", online_softmax_with_the_wrong_sign, "The correction has the wrong sign"),
    ("online_softmax", online_softmax_with_the_wrong_sign_from_the_start, "exp(m - m_before) is infinite"),
    ("online_softmax", online_softmax_corrects_the_new_number_too, "The correction belongs to the sum before"),
    ("online_softmax", online_softmax_with_the_maximum_before, "not the one before"),
    ("online_softmax", online_softmax_of_a_masked_row_is_nan, "Give zeros, not 0/0"),
    ("online_softmax", online_softmax_divides_by_0, "Give zeros, not 0/0"),
    ("online_softmax", online_softmax_of_a_row_that_begins_masked_is_nan, "Before the first number that isn't masked"),
    ("online_softmax", online_softmax_chokes_on_masked_numbers, "a masked number among others changes neither"),
    ("online_softmax", online_softmax_without_a_maximum, "exp(1000) overflows"),
    ("online_softmax", online_softmax_without_a_maximum_in_torch, "exp(1000) overflows"),
    ("online_softmax", online_softmax_with_the_minimum, "Subtract m, the largest number"),
    ("online_softmax", online_softmax_in_one_pass, "takes the last m and the last d"),
    ("online_softmax", online_softmax_without_a_division, "has to be divided by d"),
    ("online_softmax", online_softmax_counts_the_first_twice, "The first number is in the sum twice"),
    ("online_softmax", online_softmax_divides_by_the_length, "They add up to 0.533333"),
    ("online_softmax", online_softmax_in_three_passes, "the row was read in 3 passes"),
    ("online_softmax", online_softmax_of_a_copy, "was it kept somewhere?"),
    ("online_softmax", online_softmax_by_torch, "a copy of it was kept, or of its powers"),
    ("online_softmax", online_softmax_of_a_copy_read_for_nothing, "a copy of it was kept, or of its powers"),
    ("online_softmax", online_softmax_of_a_copy_made_in_the_second_pass, "a copy of it was kept, or of its powers"),
    ("online_softmax", online_softmax_keeps_the_powers, "a copy of it was kept, or of its powers"),
    ("online_softmax", online_softmax_keeps_the_powers_that_overflow, "exp(1000) overflows"),
    ("online_softmax", online_softmax_from_minus_1e9, "start at -inf, which no number is below"),
    ("online_softmax", online_softmax_of_a_masked_row_is_even, "all masked: d stays 0. Give zeros."),
    ("online_softmax", online_softmax_ends_at_a_masked_number, "The sum ends at the first -inf"),
    ("online_softmax", online_softmax_returns_its_statistics, "2 numbers for a row of 3"),
    ("online_softmax", online_softmax_returns_a_number, "Return a list"),
    ("merge", merge_adds_the_sums, "The part with the smaller maximum brought its sum as it is"),
    ("merge", merge_corrects_the_larger_only, "The part with the smaller maximum brought its sum as it is"),
    ("merge", merge_takes_the_smaller_maximum, "m is the smaller maximum"),
    ("merge", merge_takes_the_second_maximum, "m is the smaller maximum"),
    ("merge", merge_takes_the_first_maximum, "m is the smaller maximum"),
    ("merge", merge_swaps_the_corrections, "The corrections are swapped"),
    ("merge", merge_with_the_wrong_sign, "The corrections have the wrong sign"),
    ("merge", merge_overflows, "use only differences of maxima"),
    ("merge", merge_overflows_in_torch, "use only differences of maxima"),
    ("merge", merge_of_two_masked_parts_is_nan, "Both parts are all masked"),
    ("merge", merge_of_two_masked_parts_is_0, "Both parts are all masked: together they are (-inf, 0)"),
    ("merge", merge_of_two_masked_parts_has_a_sum, "Both parts are all masked: together they are (-inf, 0)"),
    ("merge", merge_of_two_masked_parts_is_finite, "Both parts are all masked: together they are (-inf, 0)"),
    ("merge", merge_takes_the_larger_part, "the other's numbers are missing"),
    ("merge", merge_averages, "The sums were averaged"),
    ("merge", merge_the_other_way_round, "the maximum comes first"),
    ("merge", merge_returns_the_sum, "Return a pair, (m, d)"),
    ("merge", merge_multiplies, "d = d_a * exp(m_a - m) + d_b * exp(m_b - m)"),
]


# Right, though not written as the reference is.


def online_softmax_in_torch(row):
    m, d = torch.tensor(-inf, dtype=torch.float64), torch.tensor(0.0, dtype=torch.float64)
    for x in row:
        m_before, m = m, torch.maximum(m, x)
        shift = m if m > -inf else 0.0
        d = d * torch.exp(m_before - shift) + torch.exp(x - shift)
    return torch.stack([torch.exp(x - m) / d if d > 0 else torch.zeros(()).double() for x in row])


def online_softmax_by_place(row):
    m, d = row[0], 1.0 if row[0] > -inf else 0.0
    for i in range(1, len(row)):
        if row[i] == -inf:
            continue
        m_before, m = m, max(m, row[i])
        d = d * exp(m_before - m) + exp(row[i] - m)
    return [exp(row[i] - m) / d if row[i] > -inf else 0 for i in range(len(row))]


def online_softmax_that_skips_masked_numbers(row):
    m, d = -inf, 0.0
    for x in row:
        if x == -inf:
            continue
        m_before, m = m, max(m, x)
        d = d * exp(m_before - m) + exp(x - m)
    return [exp(x - m) / d for x in row] if d else [0.0] * len(row)


def online_softmax_by_the_log_of_the_sum(row):
    log_sum = -inf
    for x in row:
        low, high = sorted((log_sum, float(x)))
        log_sum = high if low == -inf else high + math.log1p(exp(low - high))
    return tuple(exp(x - log_sum) if x > -inf else 0.0 for x in row)


def online_softmax_in_blocks(row):
    pair = -inf, 0.0
    for start in range(0, len(row), 8):
        numbers = [float(x) for x in row[start : start + 8]]
        m = max(numbers)
        pair = merge_in_two_cases(pair, (m, sum(exp(x - m) if x > -inf else 0.0 for x in numbers)))
    m, d = pair
    return [exp(x - m) / d if d else 0.0 for x in row]


def online_softmax_looks_whether_all_is_masked(row):
    if all(x == -inf for x in row):
        return [0.0] * len(row)
    m, d = -inf, 0.0
    for x in row:
        m_before, m = m, max(m, x)
        d = (d * exp(m_before - m) if d else 0.0) + (exp(x - m) if x > -inf else 0.0)
    return (exp(x - m) / d for x in row)


def merge_of_equal_maxima(a, b):
    if a[0] == b[0]:
        return a[0], a[1] + b[1]
    return merge_in_two_cases(a, b)


def merge_in_two_cases(a, b):
    (m_a, d_a), (m_b, d_b) = sorted((a, b))
    return (m_b, d_b) if m_a == -inf else (m_b, d_b + d_a * exp(m_a - m_b))


def merge_by_the_library(a, b):
    return list(softmax.merge(a, b))


def merge_in_one_tensor(a, b):
    logs = torch.stack([a[0] + torch.log(a[1]), b[0] + torch.log(b[1])])
    m = torch.maximum(a[0], b[0])
    return torch.stack([m, torch.exp(logs - m).sum() if m > -inf else torch.zeros_like(m)])


RIGHT = [
    ("online_softmax", online_softmax_in_torch),
    ("online_softmax", online_softmax_by_place),
    ("online_softmax", online_softmax_that_skips_masked_numbers),
    ("online_softmax", online_softmax_by_the_log_of_the_sum),
    ("online_softmax", online_softmax_in_blocks),
    ("online_softmax", online_softmax_looks_whether_all_is_masked),
    ("merge", merge_of_equal_maxima),
    ("merge", merge_in_two_cases),
    ("merge", merge_by_the_library),
    ("merge", merge_in_one_tensor),
]
