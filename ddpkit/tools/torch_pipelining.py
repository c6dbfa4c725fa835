"""Convert pipeline schedules between ddpkit and PyTorch, and run ours on PyTorch's engine.

Everything used here is private in PyTorch: `_Action`, `_PipelineScheduleRuntime`,
`_validate_schedule` and `pipeline_order` of `torch.distributed.pipelining.schedules`. Schedules
are lists of words for each rank, as in `ddpkit.pipeline.schedules`. Notebook 10.
"""

import importlib
import re
from collections.abc import Callable, Mapping
from itertools import chain
from types import SimpleNamespace

import torch
from torch import Tensor, nn

Schedule = list[list[str]]

NAMES = {  # for get_schedule_class: the number of stages on a rank
    "GPipe": 1,
    "1F1B": 1,  # torch 2.13 miscounts in it, and `pytorch_validates` says so
    "Interleaved1F1B": 2,
    "LoopedBFS": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}


def private(name: str):
    """Return the object behind one of PyTorch's private names. ImportError: it doesn't exist."""
    module = importlib.import_module("torch.distributed.pipelining.schedules")
    if not hasattr(module, name):
        has = f"torch {torch.__version__} has no {module.__name__}.{name}"
        raise ImportError(f"{has}, which ddpkit uses: python -m ddpkit.doctor says what to take")
    return getattr(module, name)


def words(cells: list) -> list[str]:
    """Select, from PyTorch's cells of a rank, the actions that compute, as words.

    Left out are idle slots, messages, sharding and reducing. An overlapped action, e.g.
    "(0F1;3B0)OVERLAP_F_B", becomes two, one after the other.
    """
    found = []
    for cell in cells:
        if cell is not None:  # an idle slot
            found += re.findall(r"(?<![A-Z_\d])\d+[FBIW]\d+(?=[;)]|$)", str(cell))
    return found


def pytorchs_schedule(name: str, ranks: int, micro_batches: int) -> Schedule:
    """Return PyTorch's own schedule of that name, one of NAMES, in ddpkit's words.

    ValueError: PyTorch has none for these numbers.
    """
    stages = NAMES[name] * ranks
    cls = private("get_schedule_class")(name)
    own = []
    for number in range(NAMES[name]):  # all that a schedule asks of a stage
        facts = {"group_rank": 0, "group_size": ranks, "num_stages": stages}
        place = {"stage_index": number, "is_first": number == 0, "is_last": False}
        own.append(SimpleNamespace(**facts, **place, submod=None, has_backward=True))
    made = cls(own[0] if NAMES[name] == 1 else own, micro_batches)
    order = made._get_pipeline_order() if NAMES[name] == 1 else made.pipeline_order
    return [words(order[rank]) for rank in range(ranks)]


def pytorch_validates(schedule: Schedule) -> None:
    """Run PyTorch's own check of a schedule. ValueError: PyTorch rejects it."""
    try:
        private("_validate_schedule")(_actions(schedule), len(schedule), *_sizes(schedule))
    except AssertionError as refusal:
        raise ValueError(f"PyTorch refuses it: {refusal}") from refusal


def _actions(schedule: Schedule) -> dict[int, list]:
    read = private("_Action").from_str
    return {rank: [*map(read, map(str, row))] for rank, row in enumerate(schedule)}


def _sizes(schedule: Schedule) -> tuple[int, int]:
    """Return the numbers of stages and of micro-batches."""
    numbers = re.findall(r"(\d+)[FBIW](\d+)", " ".join(map(str, chain(*schedule))))
    stages, micro_batches = zip(*numbers, strict=True)
    return 1 + max(map(int, stages)), 1 + max(map(int, micro_batches))


class PyTorchPipeline:
    """PyTorch's engine, `_PipelineScheduleRuntime`, run on any schedule; used like `Pipeline`.

    modules: {stage: layers} of this rank. loss: of the last stage's output and the targets. After
    `step` the gradients are in the parameters' `.grad`.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        schedule: Schedule,
        loss: Callable[[Tensor, Tensor], Tensor],
    ):
        from torch.distributed.pipelining import PipelineStage

        stages, micro_batches = _sizes(schedule)
        self.own = []
        for number, module in modules.items():
            device = next(module.parameters(), torch.empty(0)).device
            self.own.append(PipelineStage(module, number, stages, device))
        self.engine = private("_PipelineScheduleRuntime")(self.own, micro_batches, loss)
        self.engine._prepare_schedule_with_comms(_actions(schedule))

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Run forward and backward of a batch; return its mean loss on the last stage's rank.

        None on the others.
        """
        losses: list[Tensor] = []
        whole = [inputs.contiguous()]  # torch 2.11 needs them contiguous
        first = whole if any(stage.is_first for stage in self.own) else []
        last = any(stage.is_last for stage in self.own)
        self.engine.step(*first, target=targets if last else None, losses=losses)
        return torch.stack(losses).mean() if last else None
