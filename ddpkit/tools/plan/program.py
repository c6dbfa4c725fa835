"""Write down what a rank does in a training step: computing, collective calls, messages, in order.

The engines are those of ddpkit: `fast.buckets.BucketedDDP`, `fast.zero.ZeroOptimizer` or
`fast.fsdp.FSDP` on the data axis, the layers of `tensor_parallel`, and `Pipeline` with the schedule
1F1B. With a pipeline, the data axis' calls come after it, since a weight that first and last stage
share is summed in between. FSDP's units are the blocks, and a root unit with the rest; it reduces
in the last micro-batch's backward.

All ranks of a stage make the same calls, so the first of them stands for all.
"""

from itertools import count, groupby
from operator import attrgetter
from typing import NamedTuple

from ...ddp import plan_buckets
from ...pipeline.dry_run import messages
from ...pipeline.schedules import one_f_one_b, parse
from .shape import EMBEDDING, HEAD, Plan, Shape, Stage, Weight, stages, tokens

SCALAR_BYTES = 8  # a loss or a norm, float64
COMPUTING, AGAIN, UPDATE = "computing", "computing again", "update"


class Compute(NamedTuple):
    """An instruction of a program: compute.

    what: COMPUTING, AGAIN (of what a checkpoint didn't keep) or UPDATE.
    amount: the FLOPs, or, for UPDATE, the number of parameters that are updated.
    """

    what: str
    amount: float


class Call(NamedTuple):
    """An instruction of a program: begin a collective call, without waiting for it.

    key: what `Wait` names it by.
    axis: the axis of the mesh whose ranks take part.
    op: the operation, such as "all_reduce".
    nbytes: the bytes that a rank hands in: its part in an all_gather, otherwise the whole.
    """

    key: int
    axis: str
    op: str
    nbytes: int


class Wait(NamedTuple):
    """An instruction of a program: wait for the collective call with this key."""

    key: int


class Send(NamedTuple):
    """An instruction of a program: begin to send a message to another stage.

    key: names the message on both sides: (receiving stage, "F" or "B", micro-batch) or, for a tied
        weight's gradient, ("first", "tied", 0) from the first stage, ("last", "tied", 0) to it.
    """

    key: tuple
    nbytes: int


class Post(NamedTuple):
    """An instruction of a program: begin to receive the message with this key."""

    key: tuple


class Receive(NamedTuple):
    """An instruction of a program: wait for the message with this key, which has `nbytes`."""

    key: tuple
    nbytes: int


class Sent(NamedTuple):
    """An instruction of a program: wait until this rank's message with this key has arrived."""

    key: tuple


Program = list[Compute | Call | Wait | Send | Post | Receive | Sent]


def programs(shape: Shape, plan: Plan) -> list[Program]:
    """Return the program of one rank of each stage: its list of instructions in a training step.

    The step isn't the first one, in which engines still learn the order of gradients.

    ValueError: the model can't be divided by this plan; the message says why.
    """
    schedule = one_f_one_b(plan.pipeline, plan.micro_batches)
    words = messages(schedule)
    return [Writer(shape, plan, stage).step(words[stage.number]) for stage in stages(shape, plan)]


class Writer:
    """The program of a rank of one stage, while it is written.

    program: the instructions so far, to which "write" in a docstring means to append.
    data_axis: a `Ddp`, `Zero1` or `Fsdp`, which writes the calls on the data axis into `program`.
    """

    def __init__(self, shape: Shape, plan: Plan, stage: Stage):
        self.shape = shape
        self.plan = plan
        self.stage = stage
        self.tokens = tokens(shape, plan)
        self.boundary_bytes = self.tokens * shape.width * shape.states.parameters
        self.program: Program = []
        self.keys = count()
        self.by_name = {weight.name: weight for weight in stage.weights}
        self.data_axis = AXES[plan.sharded](self)

    def step(self, words: list[str]) -> Program:
        """Write a whole step and return its program.

        words: the stage's schedule in PyTorch's notation, with messages: for stage 1 "1RECV_F0",
            "1F0", "1SEND_F0" and so on.
        """
        sent = []
        for word in words:
            if "SEND" in word:
                sent.append(self.send(word))
            elif "RECV" in word:
                self.program.append(Post(parse(word.replace("RECV_", ""))))
            else:
                _, kind, k = parse(word)
                self.forward(k) if kind == "F" else self.backward(k)
        self.program += [Sent(key) for key in sent]
        if self.plan.pipeline > 1:
            self.collective("pipeline", "broadcast", SCALAR_BYTES)
        self.collective("data", "all_reduce", SCALAR_BYTES)  # the loss of all replicas
        self.sum_tied()
        self.data_axis.synchronize()
        self.collective("ranks", "all_reduce", SCALAR_BYTES)  # the norm, for clipping
        self.data_axis.update()
        return self.program

    # Parts of a step

    def forward(self, k: int) -> None:
        """Write the forward of micro-batch k."""
        self.receive("F", k, needed=not self.stage.first)
        for unit, works in groupby(self.stage.works, attrgetter("unit")):
            self.data_axis.before_forward(unit)
            for work in works:
                self.forward_work(work)
            self.data_axis.after_forward(unit)

    def forward_work(self, work, what: str = COMPUTING) -> None:
        """Write one part of a forward: its computing, then its calls on the tensor axis.

        work: the part, a `shape.Work`.
        what: the kind of computing, COMPUTING or AGAIN.
        """
        self.compute(work.flops, what)
        if work.kind == HEAD:  # the largest logit, then two sums a target
            self.collective("tensor", "all_reduce", 4 * self.tokens)
            self.collective("tensor", "all_reduce", 8 * self.tokens)
        else:
            self.collective("tensor", "all_reduce", self.boundary_bytes)

    def backward(self, k: int) -> None:
        """Write the backward of micro-batch k; checkpointed blocks compute forward again before."""
        self.receive("B", k, needed=not self.stage.last)
        self.data_axis.begin_backward(last=k == self.plan.micro_batches - 1)
        for unit, works in groupby(self.stage.works[::-1], attrgetter("unit")):
            self.data_axis.before_backward(unit)
            works = list(works)
            if self.plan.checkpoint and unit:
                for work in reversed(works):
                    self.forward_work(work, AGAIN)
            for work in works:
                self.backward_work(work)
            self.data_axis.after_backward(unit)
        self.data_axis.end_backward()

    def backward_work(self, work) -> None:
        """Write one part of a backward: its computing, its gradients, its call on the tensor axis.

        The weights' gradients are ready before the all-reduce of the input's gradient.

        work: the part, a `shape.Work`.
        """
        self.compute(2 * work.flops)
        names = [name for name in work.weights if self.by_name[name].trained]
        self.data_axis.gradients([self.by_name[name] for name in reversed(names)])
        if work.kind != EMBEDDING:
            self.collective("tensor", "all_reduce", self.boundary_bytes)

    def sum_tied(self) -> None:
        """Write the exchange of the shared weight's gradient, in the first and last stage only."""
        if not self.stage.tied:
            return
        table = self.by_name[self.stage.tied]
        nbytes = table.numel * self.shape.states.gradients
        mine, theirs = ("first", "last") if self.stage.first else ("last", "first")
        self.program += [Send((mine, "tied", 0), nbytes), Post((theirs, "tied", 0))]
        self.program += [Sent((mine, "tied", 0)), Receive((theirs, "tied", 0), nbytes)]

    # Words of the program

    def send(self, word: str) -> tuple:
        """Write that a message begins; return its key. word: such as "1SEND_F0"."""
        stage, way, k = parse(word.replace("SEND_", ""))
        key = (stage + 1 if way == "F" else stage - 1, way, k)
        self.program.append(Send(key, self.boundary_bytes))
        return key

    def receive(self, way: str, k: int, needed: bool) -> None:
        """Write that the stage waits for micro-batch k's message, if it is `needed`.

        way: "F" for the input of a forward, "B" for the gradient that a backward begins with.
        needed: False in the first stage's forward and the last stage's backward.
        """
        if needed:
            self.program.append(Receive((self.stage.number, way, k), self.boundary_bytes))

    def compute(self, amount: float, what: str = COMPUTING) -> None:
        """Write a `Compute`; if the last instruction is one of the same kind, add to its amount."""
        last = self.program[-1] if self.program else None
        if isinstance(last, Compute) and last.what == what:
            self.program[-1] = Compute(what, last.amount + amount)
        elif amount:
            self.program.append(Compute(what, amount))

    def start(self, axis: str, op: str, nbytes: int) -> int | None:
        """Write that a collective call begins; return the key by which the program waits for it.

        Return None on an axis of one rank, which sends nothing.
        """
        if self.plan.size(axis) == 1:
            return None
        key = next(self.keys)
        self.program.append(Call(key, axis, op, nbytes))
        return key

    def wait(self, key: int | None) -> None:
        """Write that the program waits for the call with this key; nothing if it is None."""
        if key is not None:
            self.program.append(Wait(key))

    def collective(self, axis: str, op: str, nbytes: int) -> None:
        """Write a collective call and, right after it, that the program waits for it."""
        self.wait(self.start(axis, op, nbytes))


# The data axis


class Ddp:
    """The data axis with DDP: replicas, whose gradients are all-reduced in buckets.

    The all-reduces begin in the last micro-batch's backward, or, if there is a pipeline, after its
    last backward. The class's methods write into the `Writer`'s program.
    """

    op = "all_reduce"

    def __init__(self, writer: Writer):
        self.writer = writer
        self.buckets = self.deal(writer.stage, writer.shape, writer.plan)
        self.arrived: set[str] = set()
        self.under_way: list[int | None] = []
        self.sending = False

    @classmethod
    def deal(cls, stage: Stage, shape: Shape, plan: Plan) -> list[list[Weight]]:
        """Return each bucket's weights (`plan_buckets`), in the order in which they are sent."""
        order = cls.order(stage, plan)
        nbytes = shape.states.gradients
        sizes = [(weight.numel * nbytes, weight.trained) for weight in order]
        buckets = []
        for numbers in plan_buckets(sizes, plan.bucket_cap_mb * 2**20):
            buckets.append([order[number] for number in numbers])
        return buckets

    @classmethod
    def order(cls, stage: Stage, plan: Plan) -> list[Weight]:
        """Return the trained weights in the order in which their gradients are sent."""
        # After a pipeline all gradients are there: it is the modules' order that is learned.
        return stage.trained if plan.pipeline > 1 else stage.trained[::-1]

    @classmethod
    def padded(cls, bucket: list[Weight], plan: Plan) -> int:
        """Return the number of elements in a bucket, padding included."""
        return sum(weight.numel for weight in bucket)

    def numel(self, bucket: list[Weight]) -> int:
        """Return `padded` of a bucket under the writer's plan."""
        return self.padded(bucket, self.writer.plan)

    def begin_backward(self, last: bool) -> None:
        """Take note that a backward begins, and write nothing. last: the last micro-batch's."""
        self.sending = last and self.writer.plan.pipeline == 1

    def gradients(self, weights: list[Weight]) -> None:
        """Take note that these weights' gradients are ready; write the calls of full buckets.

        Buckets are sent in order, so a full one waits for those before it. Nothing is sent before
        the last micro-batch's backward or, with a pipeline, before `synchronize`.
        """
        if not self.sending:
            return
        self.arrived |= {weight.name for weight in weights}
        for bucket in self.buckets[len(self.under_way) :]:
            if not self.arrived.issuperset(weight.name for weight in bucket):
                break
            nbytes = self.numel(bucket) * self.writer.shape.states.gradients
            self.under_way.append(self.writer.start("data", self.op, nbytes))

    def synchronize(self) -> None:
        """Write the calls of buckets that haven't begun, then a `Wait` for each bucket's call."""
        self.sending = True
        self.gradients(self.writer.stage.trained)
        for key in self.under_way:
            self.writer.wait(key)
        self.under_way = []
        self.arrived = set()

    def update(self) -> None:
        """Write the optimizer's update of this rank's parameters."""
        self.writer.compute(sum(map(self.numel, self.buckets)), UPDATE)

    # Weights are always whole.

    def before_forward(self, unit: str) -> None: ...
    def after_forward(self, unit: str) -> None: ...
    def before_backward(self, unit: str) -> None: ...
    def after_backward(self, unit: str) -> None: ...
    def end_backward(self) -> None: ...


class Zero1(Ddp):
    """The data axis with ZeRO-1: gradients are reduce-scattered in buckets, not all-reduced.

    Each rank updates its shard of every bucket, and the shards are all-gathered.
    """

    op = "reduce_scatter"

    @classmethod
    def order(cls, stage: Stage, plan: Plan) -> list[Weight]:
        return stage.trained[::-1]

    @classmethod
    def padded(cls, bucket: list[Weight], plan: Plan) -> int:
        numel = sum(weight.numel for weight in bucket)
        return numel + -numel % plan.data

    def update(self) -> None:
        """Write each bucket's update and the all-gather after it, then a `Wait` for each gather."""
        writer = self.writer
        gathers = []
        for bucket in self.buckets:
            shard = self.numel(bucket) // writer.plan.data
            writer.compute(shard, UPDATE)
            nbytes = shard * writer.shape.states.parameters
            gathers.append(writer.start("data", "all_gather", nbytes))
        for key in gathers:
            writer.wait(key)


class Fsdp(Ddp):
    """The data axis with FSDP: blocks are gathered one ahead, freed after use, and reduced.

    `ddpkit.fsdp.Conductor` does that, with `overlap`. With checkpoints no block is gathered ahead:
    forward then runs without autograd, where the conductor doesn't learn the order.

    whole: the units whose weights are whole now.
    gathering: {unit whose gather is under way: key of its call}.
    reduction: the key of the reduce-scatter that is under way, or None.
    """

    def __init__(self, writer: Writer):
        self.writer = writer
        self.units = writer.stage.units
        self.blocks = [unit for unit in self.units if unit]
        self.whole: set[str] = set()
        self.gathering: dict[str, int | None] = {}
        self.reduction: int | None = None
        self.last = False  # micro-batch of the step
        self.in_backward = False

    def shard(self, weights: list[Weight]) -> int:
        """Return the number of elements of one rank's shards of these weights, padding included."""
        return sum(weight.shard(self.writer.plan.data) for weight in weights)

    def start_gather(self, unit: str) -> None:
        """Write that a unit's gather begins, unless its weights are whole or on the way."""
        if unit not in self.whole and unit not in self.gathering:
            nbytes = self.shard(self.units[unit]) * self.writer.shape.states.parameters
            self.gathering[unit] = self.writer.start("data", "all_gather", nbytes)

    def gather(self, unit: str, step: int) -> None:
        """Write the gather of a unit and a wait for it, unless it is whole; begin the next block's.

        step: from a block to the next, 1 in forward and -1 in backward. With checkpoints none
        begins, nor does the root begin one in forward.
        """
        self.start_gather(unit)
        if unit in self.gathering:
            self.writer.wait(self.gathering.pop(unit))
            self.whole.add(unit)
        # The root's weights are here before any block's forward, and again before its backward.
        place = self.blocks.index(unit) + step if unit else len(self.blocks) - 1
        fetches = bool(unit) or (step < 0 and not self.in_backward)
        if fetches and place in range(len(self.blocks)) and not self.writer.plan.checkpoint:
            self.start_gather(self.blocks[place])

    def before_forward(self, unit: str) -> None:
        self.gather(unit, step=1)

    def after_forward(self, unit: str) -> None:
        if unit:  # the root's weights stay
            self.whole.discard(unit)

    def begin_backward(self, last: bool) -> None:
        self.last = last
        self.in_backward = False

    def gradients(self, weights: list[Weight]) -> None: ...

    def before_backward(self, unit: str) -> None:
        self.gather(unit, step=-1)
        self.in_backward = True

    def after_backward(self, unit: str) -> None:
        if unit:  # the root's come last, after those of what it feeds
            self.whole.discard(unit)
            self.reduce(unit)

    def end_backward(self) -> None:
        self.whole.clear()
        self.reduce("")
        self.finish_reduction()

    def reduce(self, unit: str) -> None:
        """Write that a unit's gradients begin to be reduced, once the reduction before has ended.

        Nothing is written except in the step's last micro-batch.
        """
        if not self.last:
            return
        self.finish_reduction()
        trained = [weight for weight in self.units[unit] if weight.trained]
        numel = self.shard(trained) * self.writer.plan.data
        nbytes = numel * self.writer.shape.states.gradients
        self.reduction = self.writer.start("data", "reduce_scatter", nbytes)

    def finish_reduction(self) -> None:
        """Write that the program waits for the reduction that is under way, if there is one."""
        self.writer.wait(self.reduction)
        self.reduction = None

    def synchronize(self) -> None: ...

    def update(self) -> None:
        self.writer.compute(self.shard(self.writer.stage.trained), UPDATE)


AXES = {"ddp": Ddp, "zero1": Zero1, "fsdp": Fsdp}
