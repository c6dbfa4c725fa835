"""ZeRO carried to its end: no rank has all parameters, gradients or optimizer state.

    stage    each rank keeps 1/W of                        sent by each rank in a step
    0        nothing                                       2(W-1)/W of the parameters
    1        the optimizer's state (`ddpkit.zero`)         2(W-1)/W
    2        and of the gradients                          (A+1)(W-1)/W with A micro-batches
    3        and of the parameters                         3(W-1)/W with one micro-batch

`layer`: one layer, gathered by hand. `by_hand`: the ideas of FSDP as functions. `wrapper`: FSDP,
for any module. Its parts, from the small to the large: `shards` (a parameter), `units` (what
travels together), `reduce`, `plan`, `hooks`, `agreement` (of ranks, on their collective calls),
`conductor` (when units are gathered and reduced). `state`: checkpoints. `clip`: one norm of all.

PyTorch's `fully_shard`; DeepSpeed's stage 3. Rajbhandari et al. 2020. Notebooks 07 and 12.
"""

from .clip import clip_grad_norm_
from .layer import GatherUseFree, ShardedLinear
from .state import load, save
from .wrapper import FSDP

__all__ = ["FSDP", "GatherUseFree", "ShardedLinear", "clip_grad_norm_", "load", "save"]
