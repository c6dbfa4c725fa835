"""A model, a machine and a plan in figures; and what each stage of the plan holds and computes."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from torch import nn

from ...cost import CostModel
from ...memory import PRECISIONS, ModelStates
from ...pipeline import cut_layers
from ..checks import check_counts, check_positive
from ..units import count

SHARDINGS = {"ddp": "DDP", "zero1": "ZeRO-1", "fsdp": "FSDP"}
EMBEDDING, ATTENTION, MLP, HEAD = "embedding", "attention", "MLP", "head"


@dataclass(frozen=True)
class Shape:
    """The shape of a `ddpkit.models.GPT`, and of the batch that it is trained with.

    width: elements of a token's vector between layers; a multiple of `heads`.
    vocabulary: the number of different tokens.
    length: the number of tokens in a sequence, and of the model's positions.
    batch: the number of sequences in a step, over all ranks.
    precision: "fp32" or "mixed", as in `ddpkit.memory.PRECISIONS`.
    ValueError: a count that is less than 1, heads that don't divide the width, or another
        precision.
    """

    layers: int
    width: int
    heads: int
    vocabulary: int
    length: int
    batch: int
    precision: str = "fp32"

    def __post_init__(self):
        counts = {name: value for name, value in vars(self).items() if name != "precision"}
        check_counts(**counts)
        if self.width % self.heads != 0:
            got = f"width {self.width} and {self.heads} heads"
            raise ValueError(f"expected heads that divide the width, got {got}: change one of them")
        if self.precision not in ("fp32", "mixed"):
            got = f"precision {self.precision!r}"
            raise ValueError(f"expected 'fp32' or 'mixed', got {got}: choose one")

    @property
    def states(self) -> ModelStates:
        """Return the bytes of one parameter, of its gradient and of its optimizer state.

        An element of an activation, or of a weight that is sent, has the bytes of a parameter.
        """
        return PRECISIONS[self.precision]

    @property
    def parameters(self) -> int:
        """Return the number of trained parameters of the whole model."""
        (whole,) = stages(self, Plan())
        return sum(weight.numel for weight in whole.trained)


@dataclass(frozen=True)
class Machine:
    """Ranks, what each of them has, and the connections between them.

    memory_bytes: of one rank.
    flops_per_s: what a rank reaches in a model's matrix products.
    wire: the cost of sending between ranks of one node.
    between: the cost of sending between nodes; None: as `wire`.
    ranks_per_node: None: all ranks are in one node.
    updates_per_s: the parameters that AdamW updates in a second.
    error: the relative error of predicted times on this machine, such as 0.1; None: not known.
    ValueError: fewer than 1 rank, no memory or no FLOPs.
    """

    ranks: int
    memory_bytes: float
    flops_per_s: float
    wire: CostModel
    between: CostModel | None = None
    ranks_per_node: int | None = None
    updates_per_s: float = math.inf
    error: float | None = None

    def __post_init__(self):
        check_counts(ranks=self.ranks)
        check_positive("Give bytes, 16e9 for 16 GB.", memory_bytes=self.memory_bytes)
        check_positive("Give 400e12 for 400 TFLOP/s.", flops_per_s=self.flops_per_s)

    def wire_of(self, plan: "Plan", axis: str) -> CostModel:
        """Return the cost model of the connection along an axis of the plan's mesh.

        It is `between` if a group of this axis spans several nodes. Ranks of a tensor group are
        next to each other, then those of a data group, then those of a pipeline.

        axis: "data", "tensor", "pipeline", or "ranks" for all.
        """
        span = plan.tensor
        if axis != "tensor":
            span *= plan.data
        if axis in ("pipeline", "ranks"):
            span *= plan.pipeline
        outside = span > (self.ranks_per_node or self.ranks)
        return self.between if outside and self.between else self.wire


@dataclass(frozen=True)
class Plan:
    """A mesh of data × tensor × pipeline ranks, and what is done along its axes.

    data, tensor, pipeline: the number of ranks along each axis.
    sharding: what is sharded along the data axis, one of `SHARDINGS`.
    micro_batches: their number in a step, on each rank of the data axis; a pipeline runs them by
        1F1B.
    checkpoint: whether only each block's input is kept, and its activations are computed again.
    bucket_cap_mb: the most MiB in a bucket of gradients, for `BucketedDDP` and `ZeroOptimizer`.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    sharding: str = "ddp"
    micro_batches: int = 1
    checkpoint: bool = False
    bucket_cap_mb: float = 25.0

    @property
    def ranks(self) -> int:
        """Return the number of all ranks."""
        return self.data * self.tensor * self.pipeline

    @property
    def sharded(self) -> str:
        """Return the sharding, or "ddp" if the data axis has one rank: nothing can be sharded."""
        return self.sharding if self.data > 1 else "ddp"

    def size(self, axis: str) -> int:
        """Return the number of ranks along an axis.

        axis: "data", "tensor", "pipeline", or "ranks" for all.
        """
        return getattr(self, axis)

    def __str__(self):
        name = SHARDINGS[self.sharding] if self.data > 1 else ""
        parts = [f"data={self.data}{f' ({name})' if name else ''}"]
        parts += [f"tensor={self.tensor}", f"pipeline={self.pipeline}"]
        parts.append(micro_batches(self.micro_batches))
        return ", ".join(parts + ["checkpoints"] * self.checkpoint)


def micro_batches(many: int) -> str:
    """Return a number of micro-batches as text: '1 micro-batch', '2 micro-batches'."""
    return "1 micro-batch" if many == 1 else f"{many} micro-batches"


def refusal(shape: Shape, plan: Plan) -> str:
    """Return the reason why this plan doesn't suit the model and its batch, or "" if it does."""
    if shape.heads % plan.tensor != 0:
        return f"{count(shape.heads, 'head')} can't be shared by tensor={plan.tensor}"
    if plan.pipeline > shape.layers:
        return f"{count(shape.layers, 'layer')} can't make pipeline={plan.pipeline} stages"
    if plan.pipeline > 1 and plan.sharded == "fsdp":
        return "FSDP would gather a stage's weights again for each micro-batch of the pipeline"
    if shape.batch % plan.data != 0:
        return f"a batch of {shape.batch} can't be dealt out to data={plan.data}"
    if shape.batch // plan.data % plan.micro_batches != 0:
        rows = f"{shape.batch // plan.data} sequences a rank"
        return f"{rows} can't make {micro_batches(plan.micro_batches)}"
    return ""


# What a stage has


class Weight(NamedTuple):
    """A parameter, or the part of it that the first rank of a tensor group has.

    name: as in `named_parameters` of the model.
    shape: of this part.
    unit: the unit of FSDP, a block, with which it is gathered; "" is the root unit.
    trained: False for a parameter without a gradient.
    """

    name: str
    shape: tuple[int, ...]
    unit: str
    trained: bool = True

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def shard(self, ranks: int) -> int:
        """Return the number of elements of one rank's shard under FSDP, padding included."""
        rows, *columns = self.shape
        return -(-rows // ranks) * math.prod(columns)


class Work(NamedTuple):
    """A part of a stage's forward for one micro-batch.

    kind: EMBEDDING, ATTENTION, MLP or HEAD.
    unit: the unit of FSDP to which it belongs; "" is the root unit.
    flops: of this part's forward, on one tensor rank.
    weights: the names of the trained parameters whose gradients its backward completes; a stage
        with embedding and head has their shared table in the embedding's part.
    """

    kind: str
    unit: str
    flops: float
    weights: tuple[str, ...]


@dataclass(frozen=True)
class Stage:
    """The layers of one pipeline stage, on one tensor rank.

    number: the index of the stage.
    weights: in the order of `named_parameters`.
    works: the parts of one micro-batch's forward, in order.
    first, last: whether it is the pipeline's first or last stage; both without a pipeline.
    tied: the name of the weight that first and last stage share; "" where one stage has both or
        neither.
    """

    number: int
    weights: tuple[Weight, ...]
    works: tuple[Work, ...]
    first: bool
    last: bool
    tied: str

    @property
    def trained(self) -> list[Weight]:
        return [weight for weight in self.weights if weight.trained]

    @property
    def blocks(self) -> int:
        """Return the number of transformer blocks in this stage."""
        return sum(work.kind == MLP for work in self.works)

    @property
    def units(self) -> dict[str, list[Weight]]:
        """Return {unit of FSDP: its weights}, the root unit "" first, then in forward's order."""
        found: dict[str, list[Weight]] = {"": []}
        for weight in self.weights:
            found.setdefault(weight.unit, []).append(weight)
        return found

    @property
    def flops(self) -> float:
        """Return the FLOPs of one micro-batch's forward in this stage."""
        return sum(work.flops for work in self.works)


def tokens(shape: Shape, plan: Plan) -> int:
    """Return the number of tokens in a micro-batch, on one rank of the data axis."""
    return shape.batch // (plan.data * plan.micro_batches) * shape.length


def cut_sizes(shape: Shape, stages: int) -> list[int]:
    """Return the number of layers of each stage, as `cut_layers` cuts.

    Embedding and head count as layers.
    """
    block = 12 * shape.width**2
    costs = [0, *[block] * shape.layers, shape.vocabulary * shape.width]
    layers = [nn.Identity() for _ in costs]
    return [len(part) for part in cut_layers(layers, stages, costs)]


def stages(shape: Shape, plan: Plan) -> tuple[Stage, ...]:
    """Return the stages of the pipeline, in order; one if there is no pipeline.

    ValueError: the plan doesn't suit the model; the message has `refusal`'s reason.
    """
    wrong = refusal(shape, plan)
    if wrong:
        raise ValueError(f"{plan} doesn't suit this model: {wrong}")
    # Sharding and checkpoints change nothing here: only one tuple of stages is kept for all.
    return _stages(shape, replace(plan, sharding="ddp", checkpoint=False, bucket_cap_mb=1.0))


@lru_cache(maxsize=4096)
def _stages(shape: Shape, plan: Plan) -> tuple[Stage, ...]:
    """Return the stages of a plan that suits the model; `stages` has checked that."""
    layers = [EMBEDDING, *range(shape.layers), HEAD]
    found = []
    for number, many in enumerate(cut_sizes(shape, plan.pipeline)):
        mine, layers = layers[:many], layers[many:]
        found.append(_stage(shape, plan, number, mine))
    return tuple(found)


def _stage(shape: Shape, plan: Plan, number: int, layers: list) -> Stage:
    """Return the stage with these layers: EMBEDDING, indices of blocks, HEAD."""
    n = tokens(shape, plan)
    first = EMBEDDING in layers
    last = HEAD in layers
    rows = -(-shape.vocabulary // plan.tensor)  # of the vocabulary, on the first rank
    table = rows, shape.width
    weights = []
    works = []
    for layer in layers:
        if layer == EMBEDDING:
            weights.append(Weight("positions", (shape.length, shape.width), "", trained=False))
            weights.append(Weight("tokens.weight", table, ""))
            works.append(Work(EMBEDDING, "", 0.0, ("tokens.weight",)))
        elif layer == HEAD:
            names = ["norm.weight", "norm.bias"]
            weights += [Weight(name, (shape.width,), "") for name in names]
            if not first:  # otherwise it is the embedding's table, whose gradient comes later
                weights.append(Weight("head.weight", table, ""))
                names.append("head.weight")
            flops = 2.0 * n * shape.vocabulary * shape.width / plan.tensor
            works.append(Work(HEAD, "", flops, tuple(names)))
        else:
            unit = f"blocks.{layer}"
            for half in (ATTENTION, MLP):
                mine = _half(half, unit, shape, plan.tensor)
                weights += mine
                names = tuple(weight.name for weight in mine)
                works.append(Work(half, unit, half_flops(half, shape, n) / plan.tensor, names))
    tied = "" if first == last else "tokens.weight" if first else "head.weight"
    return Stage(number, tuple(weights), tuple(works), first, last, tied)


def half_flops(half: str, shape: Shape, n: int) -> float:
    """Return the FLOPs of half a block's forward for n tokens, on all tensor ranks together.

    half: ATTENTION or MLP.
    """
    if half == MLP:
        return 16.0 * n * shape.width**2
    # The products, then scores and their weighted sum, without a mask.
    return 8.0 * n * shape.width**2 + 4.0 * n * shape.length * shape.width


def _half(half: str, unit: str, shape: Shape, tensor: int) -> list[Weight]:
    """Return the weights of half a block, ATTENTION or MLP, in the order of `models.Block`.

    unit: the unit of FSDP, whose name their names begin with.
    tensor: the number of tensor ranks that share the weights.
    """
    d = shape.width
    if half == ATTENTION:
        shapes = {
            "attention_norm.weight": (d,),
            "attention_norm.bias": (d,),
            "qkv.weight": (3 * d // tensor, d),
            "out.weight": (d, d // tensor),
            "out.bias": (d,),
        }
    else:
        shapes = {
            "mlp_norm.weight": (d,),
            "mlp_norm.bias": (d,),
            "mlp.0.weight": (4 * d // tensor, d),
            "mlp.0.bias": (4 * d // tensor,),
            "mlp.2.weight": (d, 4 * d // tensor),
            "mlp.2.bias": (d,),
        }
    return [Weight(f"{unit}.{name}", numbers, unit) for name, numbers in shapes.items()]
