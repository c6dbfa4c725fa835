"""The exercises of notebook 09: the forward and the backward of FlashAttention."""

from ddpkit import exercises as check
from ddpkit import flash_attention

from .every import *  # noqa: F403


def test_the_solutions_are_the_librarys_functions():
    assert check.flash_forward.reference is flash_attention.flash_forward
    assert check.flash_backward.reference is flash_attention.flash_backward


def test_shapes_come_first():
    def dv_alone(q, k, v, o, lse, do, causal=False):
        return q[:1], k, v

    assert (
        "Shapes first: dq is (1, 3), and should be (8, 3)." in check.flash_backward(dv_alone).text
    )


def test_what_is_right_is_told():
    def dv_right(q, k, v, o, lse, do, causal=False):
        _, dk, dv = flash_attention.flash_backward(q, k, v, o, lse, do, causal)
        return q, dk, dv

    assert "dk, dv are right." in check.flash_backward(dv_right).text
