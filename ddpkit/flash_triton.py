"""FlashAttention on a GPU. Lives in `ddpkit.fast.triton_attention`."""

from .fast.triton_attention import *  # noqa: F403
