"""The messages of a pipeline: activations to the stage after, gradients to the stage before."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .stages import PipelineStage


class Mail:
    """The messages of one step between the stages of this rank and those next to them.

    stages: {number: stage} of this rank. ranks: {number: its rank in `group`} of all stages. A
    message is named by the stage that needs it, "F" (an activation) or "B" (a gradient), and the
    micro-batch: (1, "F", 3). The name isn't sent: two ranks must send and receive in one order.
    """

    def __init__(
        self,
        stages: dict[int, PipelineStage],
        ranks: dict[int, int],
        group: ProcessGroup | None,
    ):
        self.stages = stages
        self.ranks = ranks
        self.group = group
        self.arriving: dict[tuple[int, str, int], tuple[Tensor, dist.Work | None]] = {}
        self.sent: list[tuple[dist.Work, Tensor]] = []

    def hand_on(self, made: Tensor, to: int, way: str, k: int) -> None:
        """Begin to send `made`, the message (to, way, k); within a rank, keep it for `take`."""
        if to in self.stages:  # both stages are on this rank: no message
            self.arriving[to, way, k] = made, None
            return
        # The send goes on while this rank computes; `wait` sees its end.
        made = made.contiguous()
        work = dist.isend(made, group=self.group, group_dst=self.ranks[to])
        self.sent.append((work, made))  # which must live until it has gone

    def receive(self, number: int, way: str, k: int) -> None:
        """Begin to receive the message (number, way, k): for "B" only after that forward."""
        stage = self.stages[number]
        if way == "F":
            source = number - 1
            like = stage.receives
        else:
            source = number + 1
            like = stage.kept[k][1]  # its output, whose gradient comes
        # Filled while this rank computes something else; `take` waits for it.
        buffer = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        work = dist.irecv(buffer, group=self.group, group_src=self.ranks[source])
        self.arriving[number, way, k] = buffer, work

    def take(self, number: int, way: str, k: int) -> Tensor:
        """Return the tensor of the message (number, way, k), once it is here."""
        if (number, way, k) not in self.arriving:  # in a schedule that hangs
            self.receive(number, way, k)
        buffer, work = self.arriving.pop((number, way, k))
        if work is not None:
            work.wait()
        return buffer

    def wait(self) -> None:
        """Wait until all that was handed on has been sent."""
        for work, _ in self.sent:
            work.wait()
