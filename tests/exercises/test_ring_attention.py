"""The exercise of notebook 09 on many ranks: its ring."""

import torch.distributed as dist

from ddpkit import exercises as check
from ddpkit.ring_attention import ring_attention

from .every import *  # noqa: F403


def test_memory_is_watched_where_a_row_is_long_and_masked():
    def beside_a_mask(q, k, v, causal=False):
        mask = q.new_zeros(len(q) // 2, len(q) * dist.get_world_size()) if causal else None
        return ring_attention(q, k, v, causal) + 0 * (mask is None)

    assert "as many as 6 blocks have" in check.ring_attention(beside_a_mask).text
