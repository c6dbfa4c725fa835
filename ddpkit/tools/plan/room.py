"""Predict the memory of a rank: model states, activations, and working memory.

States are exact for the engines that `plan.program` names, except for AdamW's counters of steps.
Activations are `ddpkit.memory`'s terms without dropout, with attention that keeps no matrix.
Working memory is what is there for a part of the step only: FSDP's gathered weights and their
gradients, a checkpointed block's activations, gradients of logits and of the largest weight, and a
pipeline's messages, which are kept until the step ends.
"""

from typing import NamedTuple

from ...memory import PRECISIONS, ModelStates, block_activations, checkpointed_activations
from ...pipeline import held, one_f_one_b
from .program import AXES
from .shape import Plan, Shape, Stage, stages, tokens

# Terms of a block that are split along the tensor axis; the others are whole on every rank.
SPLIT = (
    "queries, keys and values",
    "log-sum-exp of each row",
    "input of the layer out",
    "input of GELU",
    "input of the MLP's second layer",
)
TOKEN_BYTES = 8  # int64
UNITS_AT_A_TIME = 4  # of FSDP: the whole weights of two, the gradients of two


class Room(NamedTuple):
    """The predicted bytes of one rank, by what they are for.

    optimizer: the optimizer's state.
    activations: what forward keeps for backward, of all micro-batches that are held at a time.
    working: what is there for a part of the step only.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    working: int

    @property
    def states(self) -> int:
        """Return the bytes of the model states: parameters, gradients and the optimizer's state."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """Return the sum of all bytes."""
        return sum(self)


def rooms(shape: Shape, plan: Plan) -> list[Room]:
    """Return a `Room` for each pipeline stage, in order: the predicted bytes of its first rank.

    No other rank of the stage has more.
    ValueError: the model can't be divided by this plan; the message says why.
    """
    micro_batches = held(one_f_one_b(plan.pipeline, plan.micro_batches))
    found = []
    for stage in stages(shape, plan):
        kept = micro_batches[stage.number] * activation_bytes(shape, plan, stage)
        found.append(Room(*states(shape, plan, stage), kept, working_bytes(shape, plan, stage)))
    return found


def peak(shape: Shape, plan: Plan) -> Room:
    """Predict the bytes of the rank that needs most, and return its `Room`.

    ValueError: the model can't be divided by this plan; the message says why.
    """
    return max(rooms(shape, plan), key=lambda room: room.total)


def states(shape: Shape, plan: Plan, stage: Stage) -> ModelStates:
    """Return the bytes of a rank's parameters, gradients and optimizer state, as `ModelStates`.

    Frozen parameters are among the parameters. With FSDP the rank is the data axis' first, whose
    shards are the largest.
    """
    number = shape.states  # bytes of one
    frozen = sum(weight.numel for weight in stage.weights if not weight.trained)
    if plan.sharded == "fsdp":  # shards are float32, in any precision
        number = PRECISIONS["fp32"]
        frozen = sum(owned(w.shape, plan.data) for w in stage.weights if not w.trained)
        whole = owner = sum(owned(w.shape, plan.data) for w in stage.trained)
    else:
        axis = AXES[plan.sharded]
        buckets = axis.deal(stage, shape, plan)
        whole = owner = sum(axis.padded(bucket, plan) for bucket in buckets)
        if plan.sharded == "zero1":
            owner = whole // plan.data
    parameters = (whole + frozen) * number.parameters
    return ModelStates(parameters, whole * number.gradients, owner * number.optimizer)


def owned(shape: tuple[int, ...], ranks: int) -> int:
    """Return the number of elements of the first rank's shard, without padding, in FSDP's layout.

    shape: of the whole tensor, which is sharded by rows.
    ranks: the number of ranks that share it.
    """
    numel = 1
    for length in shape[1:]:
        numel *= length
    return min(shape[0], -(-shape[0] // ranks)) * numel


def activation_bytes(shape: Shape, plan: Plan, stage: Stage) -> int:
    """Return the bytes that one rank of this stage keeps of one micro-batch for its backward."""
    n = tokens(shape, plan)
    split = plan.tensor > 1
    total = stage.blocks * block_bytes(shape, plan)
    if stage.first:
        total += TOKEN_BYTES * n
        total += n if split else 0  # which tokens are this rank's
    if stage.last:
        # Norm: its input, and two numbers a token. Head: its input, probabilities, targets.
        itemsize = shape.states.parameters
        total += 2 * itemsize * n * shape.width + 2 * 4 * n + logit_bytes(shape, plan)
        total += TOKEN_BYTES * n
        # The vocabulary's cross-entropy: powers too, whose targets are this rank's, two sums.
        total += logit_bytes(shape, plan) + n + 8 * n if split else 0
    return total


def block_bytes(shape: Shape, plan: Plan, checkpoint: bool | None = None) -> int:
    """Return the bytes that a block keeps of one micro-batch for its backward.

    checkpoint: whether only its input is kept; None: as the plan says.
    """
    itemsize = shape.states.parameters
    sizes = tokens(shape, plan) // shape.length, shape.length, shape.width
    if plan.checkpoint if checkpoint is None else checkpoint:
        return sum(term.nbytes for term in checkpointed_activations(*sizes, itemsize))
    terms = block_activations(*sizes, shape.heads, itemsize, dropout=False, attention="flash")
    return sum(t.nbytes // (plan.tensor if t.name in SPLIT else 1) for t in terms)


def logit_bytes(shape: Shape, plan: Plan) -> int:
    """Return the bytes of the first tensor rank's part of a micro-batch's logits, in float32."""
    return 4 * tokens(shape, plan) * -(-shape.vocabulary // plan.tensor)


def working_bytes(shape: Shape, plan: Plan, stage: Stage) -> int:
    """Return the bytes that are there for a part of the step only.

    Activations kept for backward aren't among them. For FSDP this is an upper bound.
    """
    moments = [0]
    if plan.checkpoint and stage.blocks:
        moments.append(block_bytes(shape, plan, checkpoint=False))
    if stage.last:
        moments.append(2 * logit_bytes(shape, plan))
    neighbours = (not stage.first) + (not stage.last)
    boundary = tokens(shape, plan) * shape.width * shape.states.parameters
    sent = neighbours * plan.micro_batches * boundary
    largest = max(weight.numel for weight in stage.trained) * shape.states.gradients
    whole = 0
    if plan.sharded == "fsdp":
        sizes = {}
        for unit, weights in stage.units.items():
            numel = plan.data * sum(weight.shard(plan.data) for weight in weights)
            sizes[unit] = numel * shape.states.parameters
        # Several micro-batches add up whole gradients; otherwise few units have any at a time.
        gradients = sum(sizes.values()) if plan.micro_batches > 1 else 0
        # The root's weights and gradients stay whole; of the other units a few are at a time.
        whole = gradients + 2 * sizes.pop("") + UNITS_AT_A_TIME * max(sizes.values(), default=0)
    return whole + sent + largest + max(moments)
