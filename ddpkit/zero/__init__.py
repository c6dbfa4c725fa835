"""ZeRO: data parallelism without W copies of the optimizer's state.

Replicated AdamW keeps two moments of every parameter on every rank, all of them alike. Here each
rank keeps the moments of one shard, 1/W of the parameters, and updates only that shard:

    optimizer = ZeroOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)   # and no DDP
    loss.backward()         # reduce-scatter: each rank gets the mean gradient of its shard
    optimizer.step()        # it updates the shard; all-gather: every rank gets all parameters

These are the two halves of an all-reduce: as many bytes are sent as without ZeRO. `plan` says which
rank owns what, and has a step by hand; `optimizer` serves any model. Stage 3 is in `ddpkit.fsdp`;
half precision, clipping and checkpoints are in `ddpkit.fast.zero`.

PyTorch's ZeroRedundancyOptimizer deals out whole parameters. Rajbhandari et al. 2020. Notebook 07.
"""

from .optimizer import Bucket, ZeroOptimizer
from .plan import shard_plan, zero_step

__all__ = ["Bucket", "ZeroOptimizer", "shard_plan", "zero_step"]
