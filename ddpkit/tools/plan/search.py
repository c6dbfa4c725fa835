"""Find the best plans: try all meshes and shardings, and sort those that fit by predicted time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product

from ..checks import check_counts
from .clock import Spent, spent
from .room import Room, peak
from .shape import SHARDINGS, Machine, Plan, Shape, refusal, stages

MOST_MICRO_BATCHES = 64


@dataclass(frozen=True)
class Prediction:
    """A plan, what its training step's seconds go to, and the bytes of its fullest rank.

    room: the bytes of the rank that needs most.
    stages: for a rank of each stage, its seconds by what it does and waits for.
    """

    plan: Plan
    room: Room
    stages: list[Spent] = field(repr=False)

    @property
    def seconds(self) -> float:
        """Return the predicted seconds of a step."""
        return self.stages[0].seconds

    def mean(self, what: str) -> float:
        """Return the seconds of `what`, averaged over the stages' ranks.

        what: a kind of computing, such as COMPUTING or UPDATE of `program`, or the axis that is
            waited for: "data", "tensor", "pipeline" or "ranks".
        """
        found = [spent.busy[what] + spent.waits[what] for spent in self.stages]
        return sum(found) / len(found)

    def sending(self, axis: str) -> float:
        """Return the seconds that an axis' collective calls take, averaged over the stages' ranks.

        Whether computing hides them or not makes no difference. What isn't counted: see `Spent`.
        """
        return sum(spent.sending[axis] for spent in self.stages) / len(self.stages)


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, in ascending order."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def meshes(ranks: int) -> Iterator[tuple[int, int, int]]:
    """Yield every (data, tensor, pipeline) whose product is `ranks`."""
    for data in divisors(ranks):
        for tensor in divisors(ranks // data):
            yield data, tensor, ranks // (data * tensor)


def plans(shape: Shape, ranks: int, **fixed) -> Iterator[Plan]:
    """Yield every plan by which these ranks can train the model, whether it fits in memory or not.

    A pipeline has at least as many micro-batches as stages. More than `MOST_MICRO_BATCHES` aren't
    tried, nor a `bucket_cap_mb` other than the default.

    fixed: fields of `Plan` with the value that every plan must have, such as tensor=1.
    """
    for data, tensor, pipeline in meshes(ranks):
        if shape.batch % data != 0:
            continue
        shardings = list(SHARDINGS) if data > 1 else ["ddp"]
        counts = [m for m in divisors(shape.batch // data) if pipeline <= m or pipeline == 1]
        counts = [m for m in counts if m <= MOST_MICRO_BATCHES]
        for sharding, micro_batches, again in product(shardings, counts, (False, True)):
            plan = Plan(data, tensor, pipeline, sharding, micro_batches, again)
            given = all(getattr(plan, name) == value for name, value in fixed.items())
            if given and not refusal(shape, plan):
                yield plan


class Search:
    """All plans of a machine for a model; a plan's time is predicted when it is first needed.

    plans: all that can train the model.
    rooms: {plan: the `Room` of its fullest rank, i.e. its bytes}.
    fitting: the plans that fit into a rank's memory, sorted by `bounds`.
    bounds: {plan that fits: seconds that its step takes at least}.
    found: {plan: its prediction}, of those that were predicted so far.

    shape, machine: the model and the ranks.
    fixed: fields of `Plan` with the value that every plan must have, such as tensor=1; see `plans`.
    """

    def __init__(self, shape: Shape, machine: Machine, **fixed):
        self.shape = shape
        self.machine = machine
        self.fixed = fixed
        self.plans = list(plans(shape, machine.ranks, **fixed))
        self.rooms = {plan: peak(shape, plan) for plan in self.plans}
        self.fitting = [plan for plan in self.plans if self.fits(plan)]
        self.bounds = {plan: self.at_least(plan) for plan in self.fitting}
        self.fitting.sort(key=self.bounds.get)
        self.found: dict[Plan, Prediction] = {}

    def fits(self, plan: Plan) -> bool:
        """Return whether the plan's fullest rank has enough memory."""
        return self.rooms[plan].total <= self.machine.memory_bytes

    def at_least(self, plan: Plan) -> float:
        """Return a lower bound of a step's seconds: the computing of the slowest stage."""
        slowest = 0.0
        for stage in stages(self.shape, plan):
            again = sum(work.flops for work in stage.works if work.unit and plan.checkpoint)
            slowest = max(slowest, 3 * stage.flops + again)
        return plan.micro_batches * slowest / self.machine.flops_per_s

    def predict(self, plan: Plan) -> Prediction:
        """Return the prediction of a plan, from `found` if it is there."""
        if plan not in self.found:
            parts = spent(self.shape, self.machine, plan)
            self.found[plan] = Prediction(plan, self.rooms[plan], parts)
        return self.found[plan]

    def best(self, most: int = 1, where: Callable[[Plan], bool] = bool) -> list[Prediction]:
        """Return predictions of the fastest plans that fit, the fastest first.

        Only plans for which `where` holds count. If two are equally fast, the one that needs less
        memory comes first. The list is empty if none fits.

        most: the largest number of plans to return, 1 or more; ValueError otherwise.
        """
        check_counts(most=most)
        best: list[Prediction] = []
        for plan in filter(where, self.fitting):
            # The others need longer for computing alone.
            if len(best) == most and self.bounds[plan] > best[-1].seconds:
                break
            best.append(self.predict(plan))
            best.sort(key=lambda found: (found.seconds, found.room.total))
            del best[most:]
        return best

    def leanest(self, where: Callable[[Plan], bool] = bool) -> Plan | None:
        """Return the plan that needs the least memory, of those for which `where` holds.

        It may not fit. Return None if there is no plan.
        """
        return min(filter(where, self.plans), key=lambda p: self.rooms[p].total, default=None)
