"""Predict the time of a training step: run the programs of all stages on a clock.

A program is the list of what a rank does in a step (`program`). Every rank has one connection,
which carries one message at a time each way, as that of `launch(link=)` does: collective calls of
one axis follow one another, and calls of several axes share the connection. A rank either computes
or waits for an axis. Left out are the computing of clipping, that small matrix products are slow,
and that sending takes a core's or a GPU's time.
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from ...cost import CostModel
from .program import UPDATE, Call, Compute, Program, Receive, Send, Sent, Wait, programs
from .shape import Machine, Plan, Shape

# The algorithm in `ddpkit.cost` that each call is assumed to be.
ALGORITHMS = {
    "all_reduce": "ring_all_reduce",
    "reduce_scatter": "ring_reduce_scatter",
    "all_gather": "ring_all_gather",
    "broadcast": "tree_broadcast",
}


@dataclass
class Spent:
    """The seconds of one rank in a training step, by what it does and for which axis it waits.

    busy: {kind of computing, such as COMPUTING or UPDATE of `program`: seconds}.
    waits: {axis: seconds of waiting for its calls or messages}.
    sending: {axis: seconds that its collective calls take}, whether computing hides them or not;
        without messages, and without calls that all stages make together.
    """

    busy: Counter = field(default_factory=Counter)
    waits: Counter = field(default_factory=Counter)
    sending: Counter = field(default_factory=Counter)  # by axis, of the calls, hidden or not

    @property
    def seconds(self) -> float:
        """Return the seconds of the step: all computing and all waiting."""
        return self.busy.total() + self.waits.total()


def spent(shape: Shape, machine: Machine, plan: Plan) -> list[Spent]:
    """Predict what the seconds of a training step go to, on a rank of each stage.

    Return a list of `Spent`, in the order of the stages. All have the same sum, since a stage that
    is done before the last one waits for its pipeline.

    ValueError: the model can't be divided by this plan; the message says why.
    """
    shared: dict = defaultdict(list, sent={})
    ranks = []
    for program in programs(shape, plan):
        ranks.append(Rank(machine, plan, shared))
        ranks[-1].moves = ranks[-1].run(program)
    left = list(ranks)
    while left:
        left = [rank for rank in left if next(rank.moves, "done") != "done"]
    last = max(rank.now for rank in ranks)
    for rank in ranks:
        rank.spent.waits["pipeline"] += last - rank.now
    return [rank.spent for rank in ranks]


class Rank:
    """A rank of one stage on the clock: its connection, and the time to which it has come.

    All times are seconds since the step began.

    shared: one dict for all ranks. shared["sent"] is {message: when its sending began}.
        shared["pipeline"] and shared["ranks"] list when each stage came to the one call of a step
        that all stages make together on that axis.
    """

    def __init__(self, machine: Machine, plan: Plan, shared: dict):
        self.machine = machine
        self.plan = plan
        self.shared = shared
        self.now = 0.0
        self.out = 0.0  # when the wire is free again, each way
        self.into = 0.0
        self.queues: dict[str, deque] = defaultdict(deque)  # {axis: calls that haven't begun}
        self.free: Counter = Counter()  # {axis: when its last call is done}
        self.done: dict[int, float] = {}
        self.sent: dict[tuple, float] = {}
        self.spent = Spent()
        self.known: dict[tuple, float] = {}  # {call without its key: its seconds}
        self.moves: Iterator[str] = iter(())

    def run(self, program: Program) -> Iterator[str]:
        """Go through the program; yield "waiting" each time another stage must come first."""
        for step in program:
            if isinstance(step, Compute):
                self.compute(step)
            elif isinstance(step, Call):
                if step.axis == "pipeline" or (self.plan.pipeline > 1 and step.axis == "ranks"):
                    yield from self.meet(step)
                else:
                    self.queues[step.axis].append((self.now, step))
            elif isinstance(step, Wait):
                self.wait(step)
            elif isinstance(step, Send):
                self.send(step)
            elif isinstance(step, Sent):
                self.until(self.sent[step.key], "pipeline")
            elif isinstance(step, Receive):
                while step.key not in self.shared["sent"]:
                    yield "waiting"
                self.receive(step)

    def compute(self, step: Compute) -> None:
        """Advance this rank's time by a piece of computing."""
        update = step.what == UPDATE
        speed = self.machine.updates_per_s if update else self.machine.flops_per_s
        self.spent.busy[step.what] += step.amount / speed
        self.now += step.amount / speed

    def until(self, moment: float, axis: str) -> None:
        """Advance this rank's time to `moment`, if that is later; it counts as wait for `axis`."""
        self.spent.waits[axis] += max(0.0, moment - self.now)
        self.now = max(self.now, moment)

    # Collectives

    def seconds(self, call: Call) -> float:
        """Return the predicted seconds of a collective call, kept for calls that are alike."""
        if call[1:] not in self.known:
            self.known[call[1:]] = self.predicted_s(call)
        return self.known[call[1:]]

    def predicted_s(self, call: Call) -> float:
        """Return the seconds of a collective call, by the cost model of its axis."""
        ranks = self.plan.size(call.axis)
        whole = call.nbytes * ranks if call.op == "all_gather" else call.nbytes
        wire = self.machine.wire_of(self.plan, call.axis)
        return wire.seconds(ALGORITHMS[call.op], whole, ranks)

    def wait(self, step: Wait) -> None:
        """Advance this rank's time to the end of a collective call.

        Calls that are queued before it begin first.
        """
        while step.key not in self.done:
            self.book()
        moment, axis = self.done.pop(step.key)
        self.until(moment, axis)

    def book(self, until: float = math.inf) -> bool:
        """Let the queued call begin that can begin first, unless that is later than `until`.

        It takes the connection, both ways, as soon as that is free. Return whether there was one.
        """
        nexts = [(max(q[0][0], self.free[axis]), axis) for axis, q in self.queues.items() if q]
        if not nexts or min(nexts)[0] > until:
            return False
        begin, axis = min(nexts)
        _, call = self.queues[axis].popleft()
        seconds = self.seconds(call)
        start = max(begin, self.out, self.into)
        self.out = self.into = self.free[axis] = start + seconds
        self.done[call.key] = start + seconds, axis
        self.spent.sending[axis] += seconds
        return True

    def catch_up(self) -> None:
        """Let all queued calls begin that can by now: what comes next is sent after them."""
        while self.book(self.now):
            pass

    def meet(self, call: Call) -> Iterator[str]:
        """Begin a call that all stages make once all have come; yield "waiting" until then."""
        meeting = self.shared[call.axis]
        meeting.append(self.now)
        while len(meeting) < self.plan.pipeline:
            yield "waiting"
        self.catch_up()
        start = max(*meeting, self.out, self.into)
        self.out = self.into = start + self.seconds(call)
        self.done[call.key] = self.out, call.axis

    # Messages between stages

    def wire(self) -> CostModel:
        """Return the cost model of the connection between stages."""
        return self.machine.wire_of(self.plan, "pipeline")

    def send(self, step: Send) -> None:
        """Begin a message to another stage when the connection is free; the rank doesn't wait."""
        self.catch_up()
        start = max(self.now, self.out)
        self.out = start + step.nbytes / self.wire().bytes_per_s
        self.sent[step.key] = self.out + self.wire().latency_s
        self.shared["sent"][step.key] = start

    def receive(self, step: Receive) -> None:
        """Advance this rank's time to the arrival of a message from another stage."""
        self.catch_up()
        start = max(self.shared["sent"][step.key], self.into)
        travel_s = self.wire().latency_s + step.nbytes / self.wire().bytes_per_s
        self.into = start + travel_s
        self.until(self.into, "pipeline")


def step_s(shape: Shape, machine: Machine, plan: Plan) -> float:
    """Return the predicted seconds of a training step.

    ValueError: the model can't be divided by this plan; the message says why.
    """
    return spent(shape, machine, plan)[0].seconds
