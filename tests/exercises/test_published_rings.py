"""The exercises of published rings, notebook 02."""

import torch.distributed as dist

from ddpkit import exercises as check

from .every import *  # noqa: F403


def test_a_collective_is_refused_before_messages_are_followed():
    assert "Use only dist.send" in check.whole_ring(lambda x: dist.all_reduce(x)).text
