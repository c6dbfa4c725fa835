"""Is my run on N ranks the run on one? If not, by which factor, and where does it begin?

    report = same_training(serial, parallel, world_size=3)  # two functions that train
    print(report)       # nothing differs, or: step 0, gradient of blocks.1.out.bias, ×3.000 on ...

    agree(model, optimizer)     # do replicas hold the same bits? which tensor, which rank
    same_state(saved, loaded)   # is what was saved also what is loaded, or what is live?
    with finite(model): ...     # the first NaN or inf: module, step, rank
    Ledger(loader)              # was every sample used once, on all ranks together?
    budget(run, {"all_reduce": 2})  # calls that a step makes, and those it needs
    types(make, x)              # what is whole, a part, a summand; without processes
    exact(model)                # integers in float64: equal means equal to the last bit

For scripts, unchanged: `python -m ddpkit.audit SERIAL.py PARALLEL.py --world-size 3`. Notebook 14.
"""

from .agree import agree
from .budget import budget, unchanged
from .compare import compare
from .exact import exact, exact_loss
from .finite import NotFinite, finite
from .ledger import Ledger
from .report import Report
from .state import same_state
from .tape import Tape
from .training import same_training
from .typed import types

__all__ = [
    "Ledger",
    "NotFinite",
    "Report",
    "Tape",
    "agree",
    "budget",
    "compare",
    "exact",
    "exact_loss",
    "finite",
    "same_state",
    "same_training",
    "types",
    "unchanged",
]
