"""The pictures and the calculator of notebook 12, by their text."""

from ddpkit.lesson import fsdp_charts


def test_rows_and_what_is_padding():
    said = repr(fsdp_charts.rows_on_ranks({"A": 5, "B": 1}, world_size=4))
    assert "A, 5 rows: 2 + 2 + 1 + 0" in said
    assert "B, 1 row: 1 + 0 + 0 + 0" in said


def test_peaks_by_the_size_of_a_unit():
    said = repr(fsdp_charts.unit_peaks({1: 110_000, 8: 300_000}, 60_000, {1: 16_000, 8: 130_000}))
    assert "1 layer a unit: 110 kB, 8 layers a unit: 300 kB" in said


def test_worth_at_the_published_figures():
    """8,000 tokens hide on 400 Gbit, 1,081 on NVLink 4, up to the (W-1)/W that W ranks save."""
    caption, picture = fsdp_charts.worth(8192, 8192, 64, 4, 8, 2048, 400)
    assert "64 ranks, 8,192 tokens each" in caption
    nvlink, wire, _ = repr(picture).splitlines()[1:4]
    assert nvlink.startswith("NVLink 4: data parallel 0.13, FSDP 0.13, tensor 1.8")
    assert nvlink.endswith("ring 0.033, experts 0.35")
    assert wire.endswith("ring 0.24, experts 2.6")
    assert wire.startswith("400 Gbit: data parallel 0.96, FSDP 0.96, tensor 14")
    assert repr(fsdp_charts.worth_calculator()).startswith("8 ranks, 8,192 tokens each")
