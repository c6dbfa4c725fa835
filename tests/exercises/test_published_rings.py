"""The exercises of published rings, notebook 02."""

import torch.distributed as dist

from ddpkit import exercises as check

from .every import *  # noqa: F403


def test_only_messages_are_followed():
    assert "Use only dist.send" in check.whole_ring(lambda x: dist.all_reduce(x)).text

    def in_a_group(x):
        dist.new_group()
        check.whole_ring.reference(x)

    assert check.whole_ring(in_a_group).passed
