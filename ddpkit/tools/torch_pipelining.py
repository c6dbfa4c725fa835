"""Convert pipeline schedules between ddpkit and PyTorch, and run ours on PyTorch's engine.

Much of what it uses is private in PyTorch: `_Action`, `_PipelineScheduleRuntime`,
`_validate_schedule` and `pipeline_order` of `torch.distributed.pipelining.schedules`. A schedule
is, for each rank, a list of words in the order in which it computes: "1F0" is stage 1's forward of
micro-batch 0, and B, I and W are backward, its part for the inputs, and its part for the weights.
Notebook 10.
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
    """Return the object called `name` in torch.distributed.pipelining.schedules.

    ImportError: this torch has no such name; the message says what to do.
    """
    module = importlib.import_module("torch.distributed.pipelining.schedules")
    if not hasattr(module, name):
        has = f"torch {torch.__version__} has no {module.__name__}.{name}"
        raise ImportError(f"{has}, which ddpkit uses: python -m ddpkit.doctor says what to take")
    return getattr(module, name)


def words(cells: list) -> list[str]:
    """Return the actions of one rank that compute, as a list of words such as "1F0".

    Left out are idle slots, messages, sharding and reducing. An overlapped action, such as
    "(0F1;3B0)OVERLAP_F_B", becomes two words, one after the other.

    cells: the rank's list in PyTorch's schedule: actions, or None for an idle slot.
    """
    found = []
    for cell in cells:
        if cell is not None:  # an idle slot
            found += re.findall(r"(?<![A-Z_\d])\d+[FBIW]\d+(?=[;)]|$)", str(cell))
    return found


def pytorchs_schedule(name: str, ranks: int, micro_batches: int) -> Schedule:
    """Return PyTorch's own schedule of that name: for each rank, a list of words such as "1F0".

    name: one of NAMES; KeyError if it isn't.
    ValueError: PyTorch has none for these numbers of ranks and micro-batches.
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
    """Run PyTorch's own check of a schedule, and return None if it passes.

    schedule: for each rank, a list of words such as "1F0".
    ValueError: PyTorch rejects it, and says why. RuntimeError: a word isn't in its notation.
    """
    try:
        private("_validate_schedule")(_actions(schedule), len(schedule), *_sizes(schedule))
    except AssertionError as refusal:
        raise ValueError(f"PyTorch refuses it: {refusal}") from refusal


def _actions(schedule: Schedule) -> dict[int, list]:
    """Return a schedule as PyTorch's own: {rank: its list of `_Action`s}."""
    read = private("_Action").from_str
    return {rank: [*map(read, map(str, row))] for rank, row in enumerate(schedule)}


def _sizes(schedule: Schedule) -> tuple[int, int]:
    """Return (number of stages, number of micro-batches), by the highest numbers in a schedule."""
    numbers = re.findall(r"(\d+)[FBIW](\d+)", " ".join(map(str, chain(*schedule))))
    stages, micro_batches = zip(*numbers, strict=True)
    return 1 + max(map(int, stages)), 1 + max(map(int, micro_batches))


class PyTorchPipeline:
    """PyTorch's engine, `_PipelineScheduleRuntime`, run on any schedule; every rank makes one.

    After `step` each parameter's `.grad` is that of the batch's mean loss; weights that two stages
    share aren't summed.

    modules: {stage: its layers} of this rank.
    schedule: for each rank, a list of words such as "1F0"; PyTorch adds the messages.
    loss: called with a micro-batch's output of the last stage and its targets; returns their mean.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        schedule: Schedule,
        loss: Callable[[Tensor, Tensor], Tensor],
    ):
        from torch.distributed.pipelining import PipelineStage

        class Stage(PipelineStage):
            def _get_init_p2p_neighbors_ops(self):
                """Return the first messages without those to this rank: Gloo can't send them."""
                greetings = super()._get_init_p2p_neighbors_ops()
                return [message for message in greetings if message.group_peer != self.group_rank]

        stages, micro_batches = _sizes(schedule)
        self.own = []
        for number, module in modules.items():
            device = next(module.parameters(), torch.empty(0)).device
            self.own.append(Stage(module, number, stages, device))
        self.engine = private("_PipelineScheduleRuntime")(self.own, micro_batches, loss)
        self.engine._prepare_schedule_with_comms(_actions(schedule))

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Run forward and backward of a batch; return its mean loss on the last stage's rank.

        Return None on the other ranks. Only the first stage's rank uses `inputs`, and the last
        one's `targets`.
        """
        losses: list[Tensor] = []
        whole = [inputs.contiguous()]  # torch 2.11 needs them contiguous
        first = whole if any(stage.is_first for stage in self.own) else []
        last = any(stage.is_last for stage in self.own)
        self.engine.step(*first, target=targets if last else None, losses=losses)
        return torch.stack(losses).mean() if last else None
