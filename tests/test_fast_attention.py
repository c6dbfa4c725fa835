"""ddpkit.fast.attention: the plain form's results, its tiles, what it leaves out, its memory."""

import pytest
import torch
from attention_cases import output_and_gradients, randn
from test_flash_attention import extra_bytes

from ddpkit import flash_attention as plain
from ddpkit.fast.attention import TILE, flash_attention, tile_rows


@pytest.mark.parametrize("causal", [False, True])
def test_the_plain_form_has_the_same_results(causal):
    """In float64, where rounding hides nothing; with no leading axis, one, and two."""
    for heads, Nq, Nk in (((), 300, 600), ((3,), 600, 300), ((2, 2), TILE + 1, 2 * TILE + 1)):
        q, do = randn(*heads, Nq, 4), randn(*heads, Nq, 4, seed=3)
        k, v = randn(*heads, Nk, 4, seed=1), randn(*heads, Nk, 4, seed=2)
        ours = output_and_gradients(flash_attention, q, k, v, do, causal)
        theirs = output_and_gradients(plain.flash_attention, q, k, v, do, causal)
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("empty", [(0, 300, 8), (2, 0, 8)])
def test_no_head_and_no_query(empty):
    q, k = randn(*empty, grad=True), randn(*empty[:-2], 300, 8)
    o = flash_attention(q, k, k)
    o.sum().backward()
    assert (o.shape, q.grad.shape) == (empty, empty)


# Tiles


@pytest.mark.parametrize("causal", [False, True])
def test_tiles_cover_what_is_seen_once(causal):
    for queries, keys in ((1, 1), (255, 257), (600, 600), (300, 1000), (1000, 300), (256, 512)):
        times = torch.zeros(queries, keys, dtype=torch.int64)
        for rows, tiles in tile_rows(queries, keys, causal):
            assert rows.stop - rows.start <= TILE
            for columns in tiles:
                assert 0 < columns.stop - columns.start <= TILE
                assert not causal or columns.stop <= rows.stop
                times[rows, columns] += 1
        seen = torch.ones_like(times).tril() if causal else torch.ones_like(times)
        assert times.max() == 1
        assert times[seen.bool()].all()


def test_tiles_in_the_future_are_not_even_read():
    """NaN plus -inf is NaN: were they read, the NaN of the later keys would be in all results."""
    q, k, v, do = randn(4, 2 * TILE, 16)
    k[TILE:] = v[TILE:] = torch.nan
    found = output_and_gradients(flash_attention, q[:TILE], k, v, do[:TILE], True)
    assert all(found[name][:TILE].isfinite().all() for name in found)


# Memory


def test_extra_memory_is_a_tenth_of_textbook_attentions_and_less_than_the_plain_forms():
    extra = {attend: extra_bytes(attend, 2048) for attend in (flash_attention, plain.attention)}
    assert extra[flash_attention] * 10 <= extra[plain.attention]
    assert extra[flash_attention] * 2 <= extra_bytes(plain.flash_attention, 2048)
