"""FlashAttention on a GPU: another name for `ddpkit.fast.triton_attention`."""

from .fast.triton_attention import *  # noqa: F403
