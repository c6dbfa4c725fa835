"""The plan that explains itself: which mesh trains a model fastest, and why.

    shape = Shape(layers=32, width=4096, heads=32, vocabulary=32_000, length=2048, batch=64)
    machine = Machine(8, 80e9, 400e12, CostModel(3e-6, 370e9))     # or fit(shape, ranks=4)
    search = Search(shape, machine)
    print(table(search.best(8)))
    print(explain(search))

Every mesh of data × tensor × pipeline, DDP, ZeRO-1 or FSDP on the data axis, any number of
micro-batches, with checkpoints or without: its step is written down as a program, call by call
(`program`), and run on a clock with the wire's α and β (`clock`); its bytes are counted (`room`).
Those that don't fit are left out, the others ranked (`search`); `why` compares the best with its
rivals. `fit` measures this machine. Notebook 15.
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
