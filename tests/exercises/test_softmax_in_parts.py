"""The exercises of notebook 08 in which a row is taken in parts."""

import torch

from ddpkit import exercises as check
from ddpkit.softmax import finish, merge, start, summarize

from .every import *  # noqa: F403


def test_blocks_may_be_views_and_come_in_any_order():
    def split(row, block):
        pair = start(row)
        for part in row.split(block):
            pair = merge(pair, summarize(part))
        return torch.cat([finish(part, *pair) for part in row.split(block)[::-1]][::-1])

    assert check.blockwise_softmax(split).passed
    whole = check.blockwise_softmax(lambda row, block: split(row, len(row)))
    assert "read at once: 60, not 8" in whole.text
