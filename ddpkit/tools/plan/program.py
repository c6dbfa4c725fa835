"""Write down what a rank does in a step: computing, calls and messages, in their order.

The engines are those of ddpkit: `BucketedDDP`, `ZeroOptimizer` or `fast.fsdp.FSDP` on the data
axis, the layers of `ParallelGPT` on the tensor axis, `Pipeline` with 1F1B. A weight that first and
last stage share has its gradient summed after the data axis has done its part: whole by DDP, this
rank's shard by the others.

All ranks of a stage do the same, so one of them stands for all.
"""

from itertools import count, groupby
from operator import attrgetter
from typing import NamedTuple

from ...ddp import plan_buckets
from ...pipeline.dry_run import messages
from ...pipeline.schedules import one_f_one_b, parse
from .shape import EMBEDDING, HEAD, MLP, NORM, Plan, Shape, Stage, Weight, stages, tokens

SCALAR_BYTES = 8  # the loss that a pipeline broadcasts, float64
COMPUTING, AGAIN, UPDATE = "computing", "computing again", "update"


class Compute(NamedTuple):
    """Computing: FLOPs, or for an update the parameters."""

    what: str
    amount: float


class Call(NamedTuple):
    """A collective that begins. nbytes: as a record on the wire has them, handed in by a rank."""

    key: int
    axis: str
    op: str
    nbytes: int


class Wait(NamedTuple):
    """Wait for a collective."""

    key: int


class Send(NamedTuple):
    """A message to another stage, which begins."""

    key: tuple
    nbytes: int


class Post(NamedTuple):
    """A receive that begins."""

    key: tuple


class Receive(NamedTuple):
    """Wait for a message."""

    key: tuple
    nbytes: int


class Sent(NamedTuple):
    """Wait until a message of this rank has arrived."""

    key: tuple


Program = list[Compute | Call | Wait | Send | Post | Receive | Sent]


def programs(shape: Shape, plan: Plan) -> list[Program]:
    """Write the program of a rank of each stage, in a step that isn't the first.

    ValueError: the model can't be cut so.
    """
    schedule = one_f_one_b(plan.pipeline, plan.micro_batches)
    words = messages(schedule)
    return [Writer(shape, plan, stage).steps(words[stage.number]) for stage in stages(shape, plan)]


class Writer:
    """The program of a rank of one stage, as it is written."""

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

    def steps(self, words: list[str]) -> Program:
        """Write two steps and return the second: engines remember the order of the first."""
        for _ in range(2):
            self.program = []
            self.step(words)
        return self.program

    def step(self, words: list[str]) -> None:
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
        self.data_axis.synchronize()
        self.sum_tied()
        self.data_axis.update()

    # Parts of a step

    def forward(self, k: int) -> None:
        self.receive("F", k, needed=not self.stage.first)
        self.data_axis.before_forward("")
        for unit, works in groupby(self.stage.works, attrgetter("unit")):
            if unit:
                self.data_axis.before_forward(unit)
            for work in works:
                self.forward_work(work)
            if unit:
                self.data_axis.after_forward(unit)
        self.data_axis.after_forward("")

    def forward_work(self, work, what: str = COMPUTING) -> None:
        self.compute(work.flops, what)
        if work.kind == NORM:
            return
        if work.kind == HEAD:  # the largest logit, then two sums a target
            self.collective("tensor", "all_reduce", 4 * self.tokens)
            self.collective("tensor", "all_reduce", 8 * self.tokens)
        else:
            self.collective("tensor", "all_reduce", self.boundary_bytes)

    def backward(self, k: int) -> None:
        self.receive("B", k, needed=not self.stage.last)
        self.data_axis.begin_backward(last=k == self.plan.micro_batches - 1)
        self.data_axis.before_backward("")
        for unit, group in groupby(self.stage.works[::-1], attrgetter("unit")):
            works = list(group)
            if unit:
                self.data_axis.before_backward(unit)
            if self.plan.checkpoint and works[0].kind == MLP:
                for work in reversed(works):
                    self.forward_work(work, AGAIN)
            for work in works:
                self.backward_work(work)
            # Token ids need no gradient, so backward never leaves what they feed.
            if unit and works[-1].kind != EMBEDDING:
                self.data_axis.after_backward(unit)
        if not self.stage.first:
            self.data_axis.after_backward("")
        self.data_axis.end_backward()

    def backward_work(self, work) -> None:
        """Write gradients of inputs and of weights, which are ready before f's all-reduce."""
        self.compute(2 * work.flops)
        names = [name for name in work.weights if self.by_name[name].trained]
        self.data_axis.gradients([self.by_name[name] for name in reversed(names)])
        if work.kind not in (EMBEDDING, NORM):
            self.collective("tensor", "all_reduce", self.boundary_bytes)

    def sum_tied(self) -> None:
        """Exchange the gradient of the table between first and last stage."""
        if not self.stage.tied:
            return
        nbytes = self.data_axis.shard_bytes(self.by_name[self.stage.tied])
        mine, theirs = ("first", "last") if self.stage.first else ("last", "first")
        self.program += [Send((mine, "tied", 0), nbytes), Post((theirs, "tied", 0))]
        self.program += [Sent((mine, "tied", 0)), Receive((theirs, "tied", 0), nbytes)]

    # Words of the program

    def send(self, word: str) -> tuple:
        stage, way, k = parse(word.replace("SEND_", ""))
        key = (stage + 1 if way == "F" else stage - 1, way, k)
        self.program.append(Send(key, self.boundary_bytes))
        return key

    def receive(self, way: str, k: int, needed: bool) -> None:
        if needed:
            self.program.append(Receive((self.stage.number, way, k), self.boundary_bytes))

    def compute(self, amount: float, what: str = COMPUTING) -> None:
        """Add to the computing before, if nothing came between."""
        last = self.program[-1] if self.program else None
        if isinstance(last, Compute) and last.what == what:
            self.program[-1] = Compute(what, last.amount + amount)
        elif amount:
            self.program.append(Compute(what, amount))

    def start(self, axis: str, op: str, nbytes: int) -> int | None:
        """Begin a call; None on an axis of one rank, which sends nothing."""
        if self.plan.size(axis) == 1:
            return None
        key = next(self.keys)
        self.program.append(Call(key, axis, op, nbytes))
        return key

    def wait(self, key: int | None) -> None:
        if key is not None:
            self.program.append(Wait(key))

    def collective(self, axis: str, op: str, nbytes: int) -> None:
        self.wait(self.start(axis, op, nbytes))


# The data axis


class Ddp:
    """Replicas: buckets of gradients are all-reduced in the last micro-batch's backward."""

    op = "all_reduce"

    def __init__(self, writer: Writer):
        self.writer = writer
        self.ranks = writer.plan.data
        self.buckets = self.deal(writer.stage, writer.shape, writer.plan)
        self.ready: set[str] = set()
        self.under_way: list[int | None] = []
        self.sending = False

    @classmethod
    def deal(cls, stage: Stage, shape: Shape, plan: Plan) -> list[list[Weight]]:
        """Deal the weights into buckets, in the order of backward."""
        backwards = stage.trained[::-1]
        nbytes = shape.states.gradients
        sizes = [(weight.numel * nbytes, cls.kind(stage, weight)) for weight in backwards]
        plans = plan_buckets(sizes, plan.bucket_cap_mb * 2**20)
        return [[backwards[number] for number in numbers] for numbers in plans]

    @classmethod
    def kind(cls, stage: Stage, weight: Weight) -> str:
        return "any"

    @classmethod
    def padded(cls, bucket: list[Weight], plan: Plan) -> int:
        """Count the numbers of a bucket, padding included."""
        return sum(weight.numel for weight in bucket)

    def numel(self, bucket: list[Weight]) -> int:
        return self.padded(bucket, self.writer.plan)

    def begin_backward(self, last: bool) -> None:
        self.sending = last

    def gradients(self, weights: list[Weight]) -> None:
        """Start what is full, in the plan's order."""
        if not self.sending:
            return
        self.ready |= {weight.name for weight in weights}
        for bucket in self.buckets[len(self.under_way) :]:
            if not self.ready.issuperset(weight.name for weight in bucket):
                break
            nbytes = self.numel(bucket) * self.writer.shape.states.gradients
            self.under_way.append(self.writer.start("data", self.op, nbytes))

    def synchronize(self) -> None:
        for key in self.under_way:
            self.writer.wait(key)
        self.under_way = []
        self.ready = set()

    def update(self) -> None:
        self.writer.compute(sum(map(self.numel, self.buckets)), UPDATE)

    def shard_bytes(self, weight: Weight) -> int:
        return weight.numel * self.writer.shape.states.gradients

    # Weights are always whole.

    def before_forward(self, unit: str) -> None: ...
    def after_forward(self, unit: str) -> None: ...
    def before_backward(self, unit: str) -> None: ...
    def after_backward(self, unit: str) -> None: ...
    def end_backward(self) -> None: ...


class Zero1(Ddp):
    """Buckets are reduce-scattered instead; each rank updates its shards, and all gather them."""

    op = "reduce_scatter"

    @classmethod
    def kind(cls, stage: Stage, weight: Weight) -> str:
        return "tied" if weight.name == stage.tied else "any"  # a bucket of its own: shards match

    @classmethod
    def padded(cls, bucket: list[Weight], plan: Plan) -> int:
        numel = sum(weight.numel for weight in bucket)
        return numel + -numel % plan.data

    def update(self) -> None:
        writer = self.writer
        gathers = []
        for bucket in self.buckets:
            shard = self.numel(bucket) // self.ranks
            writer.compute(shard, UPDATE)
            nbytes = shard * writer.shape.states.parameters
            gathers.append(writer.start("data", "all_gather", nbytes))
        for key in gathers:
            writer.wait(key)

    def shard_bytes(self, weight: Weight) -> int:
        return self.numel([weight]) // self.ranks * self.writer.shape.states.gradients


class Fsdp(Ddp):
    """Shards: units are gathered one ahead, dropped and reduced, as by `ddpkit.fsdp.Conductor`."""

    def __init__(self, writer: Writer):
        self.writer = writer
        self.ranks = writer.plan.data
        self.units = writer.stage.units
        self.whole: set[str] = set()
        self.gathering: dict[str, int] = {}
        self.order: list[str] = []
        self.last_order: list[str] = []
        self.uses: dict[str, list[int]] = {unit: [] for unit in self.units}
        self.done: set[str] = set()
        self.reduction: int | None = None

    def shard(self, weights: list[Weight]) -> int:
        return sum(weight.shard(self.ranks) for weight in weights)

    # Weights

    def start_gather(self, unit: str) -> None:
        weights = self.units[unit]
        if weights and unit not in self.whole and unit not in self.gathering:
            nbytes = self.shard(weights) * self.writer.shape.states.parameters
            self.gathering[unit] = self.writer.start("data", "all_gather", nbytes)

    def gather(self, unit: str) -> None:
        self.start_gather(unit)
        if unit in self.gathering:
            self.writer.wait(self.gathering.pop(unit))
            self.whole.add(unit)

    def drop(self, unit: str) -> None:
        if unit in self.gathering:
            self.writer.wait(self.gathering.pop(unit))
        self.whole.discard(unit)

    def before_forward(self, unit: str) -> None:
        self.gather(unit)
        pair = self.last_order[len(self.order) : len(self.order) + 2]
        if len(pair) == 2 and pair[0] == unit:
            self.start_gather(pair[1])

    def after_forward(self, unit: str) -> None:
        if unit:
            self.drop(unit)
        if self.units[unit]:
            self.uses[unit].append(len(self.order))
            self.order.append(unit)

    def before_backward(self, unit: str) -> None:
        self.gather(unit)
        if self.uses[unit]:
            place = self.uses[unit].pop()
            if place > 0:
                self.start_gather(self.order[place - 1])

    # Gradients

    def begin_backward(self, last: bool) -> None: ...

    def gradients(self, weights: list[Weight]) -> None: ...

    def after_backward(self, unit: str) -> None:
        self.done.add(unit)
        self.drop(unit)
        self.finish_reduction()
        trained = [weight for weight in self.units[unit] if weight.trained]
        if trained:
            numel = self.shard(trained) * self.ranks
            nbytes = numel * self.writer.shape.states.gradients
            self.reduction = self.writer.start("data", "reduce_scatter", nbytes)

    def finish_reduction(self) -> None:
        self.writer.wait(self.reduction)
        self.reduction = None

    def end_backward(self) -> None:
        for unit in self.units:
            if unit not in self.done:
                self.after_backward(unit)
            self.uses[unit].clear()
        self.done = set()
        self.finish_reduction()
        self.last_order = self.order
        self.order = []

    def synchronize(self) -> None:
        for unit in self.units:
            self.drop(unit)

    def update(self) -> None:
        for weights in self.units.values():
            trained = [weight for weight in weights if weight.trained]
            self.writer.compute(self.shard(trained), UPDATE)

    def shard_bytes(self, weight: Weight) -> int:
        # Shards aren't padded in memory: the first rank has as many rows as a part.
        return weight.shard(self.ranks) * self.writer.shape.states.gradients


AXES = {"ddp": Ddp, "zero1": Zero1, "fsdp": Fsdp}
