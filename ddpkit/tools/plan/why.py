"""Say in sentences why the best plan is the best, or why there is none.

`explain` puts the sentences together; `search` has the plans and their predicted times.
"""

from dataclasses import replace

from ...pipeline import idle, one_f_one_b
from ..units import count, duration, size
from .program import AGAIN, COMPUTING, UPDATE
from .search import Prediction, Search, meshes, plans
from .shape import SHARDINGS, Plan, micro_batches, refusal

TIE = 0.005  # a share of the step below which two plans take equally long
EMULATED_ERROR = 0.023  # the median of 40 plans, `bench plan` on a quiet machine
FIELDS = "tensor", "pipeline", "sharding", "micro_batches", "checkpoint"


def explain(search: Search) -> str:
    """Return a paragraph: the best plan, the reason for each of its choices, the error to expect.

    If no plan fits, the paragraph says what is missing.
    """
    if not search.plans:
        return no_mesh(search)
    if not search.fitting:
        return too_large(search)
    (best,) = search.best()
    room = best.room
    has = f"{size(room.total)} of {size(search.machine.memory_bytes)} on the fullest rank"
    sentences = [f"Best: {best.plan}: {duration(best.seconds)} a step, {has}."]
    for name in FIELDS:
        sentences += reason(search, best, name)
    sentences += data_axis(best) + idle_share(best) + [error(search)]
    return " ".join(sentences)


# No plan


def no_mesh(search: Search) -> str:
    """Return a sentence that says why the model can't be divided among the machine's ranks.

    If it can, but not with the values that are fixed, the sentence names them.
    """
    shape = search.shape
    ranks = search.machine.ranks
    if any(plans(shape, ranks)):
        fixed = ", ".join(f"{name}={value}" for name, value in search.fixed.items())
        suits = f"No plan of {count(ranks, 'rank')} that suits this model"
        return f"{suits} has {fixed}: choose other values."
    reasons = {}
    for mesh in meshes(ranks):
        data, _, pipeline = mesh
        m = pipeline if shape.batch % (data * pipeline) == 0 else 1
        plan = Plan(*mesh, micro_batches=m)
        few = f"{shape.batch // data} sequences a rank can't make {micro_batches(pipeline)}"
        reasons[refusal(shape, plan) or few] = None
    return f"No mesh of {count(ranks, 'rank')} suits this model: {'; '.join(reasons)}."


def too_large(search: Search) -> str:
    """Return sentences: which plan needs least memory, what is missing, and what takes most."""
    plan = search.leanest()
    room = search.rooms[plan]
    memory_bytes = int(search.machine.memory_bytes)
    missing = room.total - memory_bytes
    parts = {"model states": room.states, "activations": room.activations}
    parts["whole for a moment"] = room.working
    listed = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in parts.items())
    most = max(parts, key=parts.get)
    remedy = {
        "model states": "more ranks share the states out",
        "activations": "a shorter length or more ranks leave fewer activations on each",
        "whole for a moment": "a smaller vocabulary or width makes the largest piece smaller",
    }
    fits = f"fits in {size(memory_bytes)} a rank"
    needs = f"the leanest, {plan}, needs {size(room.total)} on its fullest rank ({listed})"
    short = f"{size(missing)} more than there is ({missing:,} bytes)"
    return (
        f"No mesh of {count(search.machine.ranks, 'rank')} {fits}: {needs}, {short}. "
        f"Most is {most}: {remedy[most]}."
    )


# Each choice of the best plan


def reason(search: Search, best: Prediction, name: str) -> list[str]:
    """Return [a sentence] on why the best plan has its value of `name`, a field of `Plan`.

    It compares the best plan with those that have a smaller value, by `amount`, or, if there are
    none, a larger one. Return [] if all have the same, or on the sharding of one data rank.
    """
    if name == "sharding" and best.plan.data == 1:
        return []
    rivals = others(search, best.plan, name)
    mine = amount(name, getattr(best.plan, name))
    less = [plan for plan in rivals if amount(name, getattr(plan, name)) < mine]
    for some in (less, [plan for plan in rivals if plan not in less]):
        if some:
            return [f"{said(name, best.plan)}{against(search, best, name, some)}."]
    return []


def others(search: Search, plan: Plan, name: str) -> list[Plan]:
    """Return the plans that have another value of `name`, a field of `Plan`, than `plan`.

    If `name` is "tensor" or "pipeline", they may differ otherwise as well. For any other they are
    alike in all other fields.
    """
    found = []
    for other in search.plans:
        differs = getattr(other, name) != getattr(plan, name)
        axis = name in ("tensor", "pipeline")
        if differs and (axis or replace(other, **{name: getattr(plan, name)}) == plan):
            found.append(other)
    return found


def amount(name: str, value) -> int:
    """Return a number to compare a value by: 0 for DDP, 1 for ZeRO-1, 2 for FSDP; others as is."""
    return list(SHARDINGS).index(value) if name == "sharding" else value


def said(name: str, plan: Plan) -> str:
    """Return a plan's choice in words: 'tensor=2', 'ZeRO-1', '4 micro-batches', 'Checkpoints'."""
    value = getattr(plan, name)
    if name == "checkpoint":
        return "Checkpoints" if value else "No checkpoints"
    if name == "sharding":
        return SHARDINGS[value]
    return micro_batches(value) if name == "micro_batches" else f"{name}={value}"


def within(name: str, plan: Plan) -> str:
    """Return a plan's choice in words after "with": 'with tensor=2', 'without checkpoints'."""
    word = said(name, plan)
    lower = word if name == "sharding" else word.lower()
    return f"with {lower}".replace("with no ", "without ")


def against(search: Search, best: Prediction, name: str, rivals: list[Plan]) -> str:
    """Return the end of a sentence that says why none of the plans in `rivals` is better.

    It is for lack of memory, or it is what the fastest of them loses time with. If that plan is
    slower by at most `TIE` of a step, the end says that it takes as long, and how much more memory
    it needs, if so.
    """
    found = search.best(where=set(rivals).__contains__)
    if not found:
        plan = search.leanest(set(rivals).__contains__)
        room = search.rooms[plan]
        parts = f"{size(room.states)} of states, {size(room.activations)} of activations, "
        parts += f"{size(room.working)} that come and go"
        missing = size(room.total - search.machine.memory_bytes)
        needs = f"a rank needs {size(room.total)} ({parts}), {missing} more than it has"
        return f" because {within(name, plan)} {needs}"
    (rival,) = found
    more_s = rival.seconds - best.seconds
    if more_s <= TIE * best.seconds:
        saved = rival.room.total - best.room.total
        alike = f"{within(name, rival.plan)} a step takes as long"
        return (
            f" because {alike} and needs {size(saved)} more" if saved > 0 else f", though {alike}"
        )
    takes = f"{within(name, rival.plan)} a step takes {duration(rival.seconds)}"
    return f" because {takes}: {loss(best, rival)}"


def loss(best: Prediction, rival: Prediction) -> str:
    """Return where a slower plan loses most time: '31 ms more of waiting for the last rank'."""
    share = f"{rival.mean('pipeline') / rival.seconds:.0%}"
    words = {
        COMPUTING: "of more computing",
        AGAIN: "of computing activations again",
        UPDATE: "of updating parameters that others update as well",
        "tensor": "of waiting for activations between tensor ranks, which nothing hides",
        "data": "of waiting for gradients and weights that computing doesn't hide",
        "pipeline": f"of idle ranks, {share} of its step",
        "ranks": "of waiting for the last rank",
    }
    losses = {what: rival.mean(what) - best.mean(what) for what in words}
    most = max(losses, key=losses.get)
    return f"{duration(losses[most])} more {words[most]}"


# What the best plan itself loses


def data_axis(best: Prediction) -> list[str]:
    """Return [a sentence] on how much of the sending on the data axis is hidden.

    It hides behind computing. Return [] if nothing is sent along it.
    """
    sending_s = best.sending("data")
    if best.plan.data == 1 or not sending_s:
        return []
    hidden = max(0.0, 1 - best.mean("data") / sending_s)
    what = {
        "ddp": "Its all-reduce of gradients takes",
        "zero1": "Its reduce-scatter of gradients and all-gather of weights take",
        "fsdp": "Gathering weights and reducing gradients take",
    }
    begun = f"{what[best.plan.sharding]} {duration(sending_s)} on the wire"
    return [f"{begun}, {hidden:.0%} of it hidden behind computing."]


def idle_share(best: Prediction) -> list[str]:
    """Return [a sentence] on how long ranks of the pipeline are idle; [] without a pipeline.

    It gives a share of the step twice, by the prediction and by the schedule alone.
    """
    plan = best.plan
    if plan.pipeline == 1:
        return []
    ticks = idle(one_f_one_b(plan.pipeline, plan.micro_batches))
    whole = ticks[0] + 3 * plan.micro_batches  # a forward is a tick, a backward two
    by_schedule = f"{ticks[0] / whole:.0%} by the schedule alone"
    waiting = best.mean("pipeline") / best.seconds
    said = f"The pipeline's ranks are idle {waiting:.0%} of the step, {by_schedule}"
    return [f"{said}; the rest are uneven stages and messages."]


def error(search: Search) -> str:
    """Return a sentence on how far off the predicted times may be."""
    if search.machine.error is not None:
        known = f"by {search.machine.error:.0%} on this machine, the median of what `fit` held back"
        return f"Times may be off {known}."
    known = f"{EMULATED_ERROR:.0%} on an emulated cluster with known figures, the median"
    return f"Times were off by {known}; the machine's figures are as you gave them."
