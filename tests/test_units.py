"""Numbers with units, as people read them."""

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
