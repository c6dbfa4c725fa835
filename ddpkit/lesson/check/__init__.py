"""Checks of the reader's answers: `check.broadcast(broadcast)`. One file per notebook, one checker per exercise."""

from .exercise import is_stub
from .notebook_00 import neighbours, say_hello
from .notebook_01 import all_gather, all_reduce, broadcast, reduce_scatter
from .notebook_02 import ring_all_gather, ring_cost, ring_reduce_scatter
from .notebook_03 import HookedDDP, average_gradients, sum_or_mean
from .notebook_04 import BucketedDDP, OverlapDDP, no_sync, plan_buckets
from .notebook_05 import LossScaler, master_step, predict_bytes
from .notebook_06 import Checkpoint, block_bytes
from .notebook_07 import shard_plan, zero_step
from .notebook_08 import merge, online_softmax
from .notebook_09 import flash_backward, flash_forward
from .notebook_09_triton import softmax_kernel

__all__ = [
    "BucketedDDP",
    "Checkpoint",
    "HookedDDP",
    "LossScaler",
    "OverlapDDP",
    "all_gather",
    "all_reduce",
    "average_gradients",
    "block_bytes",
    "broadcast",
    "flash_backward",
    "flash_forward",
    "is_stub",
    "master_step",
    "merge",
    "neighbours",
    "no_sync",
    "online_softmax",
    "plan_buckets",
    "predict_bytes",
    "reduce_scatter",
    "ring_all_gather",
    "ring_cost",
    "ring_reduce_scatter",
    "say_hello",
    "shard_plan",
    "softmax_kernel",
    "sum_or_mean",
    "zero_step",
]
