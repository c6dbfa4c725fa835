"""Numbers with units, as people read them."""

import math

import pytest

from ddpkit.tools import units


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (units.size(96), "96 B"),
        (units.size(999.6), "1 kB"),  # rounded first: never "1e+03 B"
        (units.size(1_500_000), "1.5 MB"),
        (units.size(0), "0 B"),
        (units.size(7.5e13), "75 TB"),
        (units.binary_size(512), "512 B"),
        (units.binary_size(3 * 2**19), "1.5 MiB"),
        (units.round_size(4096), "4 KiB"),
        (units.round_size(25 * 2**20), "25 MiB"),
        (units.round_size(100), "100 B"),
        (units.round_size(10**8), "100 MB"),
        (units.duration(31.4e-6), "31.4 µs"),
        (units.duration(0), "0 ns"),
        (units.duration(90), "90 s"),
        (units.rate(1.25e9), "1.25 GB/s"),
        (units.rate(117), "117 bytes/s"),
        (units.count(1, "hop"), "1 hop"),
        (units.count(0, "hop"), "0 hops"),
    ],
)
def test_numbers_for_people(text, expected):
    assert text == expected


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (1.0, "1"),
        (-0.0, "0"),
        (11111111.0, "11111111"),
        (0.1234, "0.123"),
        (-0.09861, "-0.099"),
        (0.00012345, "1.2e-4"),
        (1e20, "1e+20"),
        (math.inf, "inf"),
        (math.nan, "nan"),
        (True, "True"),
        (None, ""),
    ],
)
def test_values_take_about_six_characters(value, shown):
    assert units.number(value) == shown


def test_lists_and_ranks():
    assert units.numbers([1.0, 2.5]) == "[1, 2.5]"
    assert units.numbers(range(20)).endswith("14, 15, …]")
    assert units.numbers(range(16)).endswith("14, 15]")
    assert units.numbers(None) == "nothing"
    assert units.name_ranks([2]) == "rank 2"
    assert units.name_ranks([0, 1, 3]) == "ranks 0, 1 and 3"
    assert units.name_ranks([0, 1, 2, 3]) == "ranks 0 to 3"
    assert units.name_ranks([0, 1, 2, 4, 6, 7, 8, 9]) == "ranks 0 to 2, 4 and 6 to 9"
    assert units.name_ranks([0, 2, 3, 9]) == "ranks 0, 2, 3 and 9"
    assert units.name_ranks([0, 1], 2) == "every rank"
    assert units.name_ranks(range(1, 64, 4)) == "ranks 1, 5, 9, ..., 61"
    assert (units.equally_spaced((3, 3)), units.equally_spaced([])) == (None, None)
    assert units.name_group((0, 2)) == "group [0, 2]"
    assert units.name_group(range(9)) == "group [0, 1, 2, ..., 8]"
    assert units.name_group([0, 1, 2, 3, 4, 5, 6, 7, 9]) == "group [0, 1, 2, 3, 4, 5, 6, 7, 9]"
