"""The exercises of notebook 09: the forward and the backward of FlashAttention."""

from ddpkit import exercises as check
from ddpkit import flash_attention

from .every import *  # noqa: F403


def test_shapes_come_first_then_what_is_simplest():
    def shorter(q, k, v, o, lse, do, causal=False):
        return q[:1], k, v

    def dk_is_wrong(q, k, v, o, lse, do, causal=False):
        _, _, dv = flash_attention.flash_backward(q, k, v, o, lse, do, causal)
        return q, k, dv

    assert "shapes: [(1, 3), (8, 3), (8, 3)], not" in check.flash_backward(shorter).text
    assert "dk, though dv is right: [" in check.flash_backward(dk_is_wrong).text
