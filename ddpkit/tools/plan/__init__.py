"""The plan that explains itself: which mesh trains a model fastest, and why.

    shape = Shape(layers=32, width=4096, heads=32, vocabulary=32_000, length=2048, batch=64)
    machine = Machine(8, 80e9, 400e12, CostModel(3e-6, 370e9))     # or fit(shape, ranks=4)
    search = Search(shape, machine)
    print(table(search.best(8)))
    print(explain(search))

A plan is a mesh of data × tensor × pipeline ranks, with DDP, ZeRO-1 or FSDP on the data axis, a
number of micro-batches, and activation checkpoints or none. Every plan that suits the model is
considered, but for those with very many micro-batches, or fewer than stages. A plan's training step
is written down as a program, call by call (`program`), and run on a clock with the latency and
bandwidth of the machine's network (`clock`); its bytes are counted (`room`). `search` leaves out
plans that don't fit into memory, and finds the fastest of the others; `why` compares the best with
its rivals. `fit` measures this machine; `CostModel` is in `ddpkit.cost`. Notebook 15.
"""

from .clock import spent, step_s
from .fit import fit
from .program import programs
from .room import Room, peak, rooms
from .search import Prediction, Search, plans
from .shape import Machine, Plan, Shape, stages
from .table import table
from .why import explain

__all__ = [
    "Machine",
    "Plan",
    "Prediction",
    "Room",
    "Search",
    "Shape",
    "explain",
    "fit",
    "peak",
    "plans",
    "programs",
    "rooms",
    "spent",
    "stages",
    "step_s",
    "table",
]
