"""Pipeline parallelism: each rank has some of a model's layers, and micro-batches pass through.

    schedule = one_f_one_b(stages=4, micro_batches=8)
    stage = PipelineStage(layers, number=rank, receives=torch.empty(2, 16, 64))  # as its input
    pipeline = Pipeline([stage], schedule, mean_loss)
    loss = pipeline.step(inputs, targets)   # every .grad is that of the whole batch's mean loss
    optimizer.step()

`schedules` writes down the order of the work; `dry_run` checks it before a rank starts; `stages`
cuts the model and computes; `split_backward` cuts a backward in two, for inputs and for weights;
`mail` sends; `engine` runs it all.

A stage computes, the pipeline sends: activations to the stage after, gradients to the stage before.
So two messages a micro-batch go between neighbouring stages, whatever the schedule, and none if one
rank has both. A step ends with a broadcast of the loss. A weight that the first and the last stage
share needs `pipeline.synchronize()` before the update.

PyTorch's `torch.distributed.pipelining`: PipelineStage, and schedules with a `step`. Huang et al.
2019; Narayanan et al. 2021. Notebook 10.
"""

from .dry_run import held, idle, messages, rank_of_stage, simulate, validate
from .engine import Pipeline
from .schedules import Schedule, gpipe, interleaved, one_f_one_b, parse, zero_bubble
from .stages import PipelineStage, cut_layers, gpt_layers

__all__ = [
    "Pipeline",
    "PipelineStage",
    "Schedule",
    "cut_layers",
    "gpipe",
    "gpt_layers",
    "held",
    "idle",
    "interleaved",
    "messages",
    "one_f_one_b",
    "parse",
    "rank_of_stage",
    "simulate",
    "validate",
    "zero_bubble",
]
