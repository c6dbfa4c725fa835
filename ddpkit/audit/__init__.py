"""Is my run on N ranks the same training as on one? If not, by which factor, and where first?

    report = same_training(serial, parallel, world_size=3)  # two functions that train
    print(report)       # the same training, or: step 0, gradient of out.bias: ×3, on every rank

    agree(model, optimizer)     # list the tensors that differ between replicas, and on which ranks
    same_state(saved, loaded)   # list the values of a checkpoint that aren't in what was loaded
    with finite(model): ...     # raise at the first NaN or inf: module, call, rank
    Ledger(loader)              # was every sample used once, on all ranks together?
    budget(run, {"all_reduce": 2})  # list the calls that a step makes too often or too rarely
    types(make, x)              # is each tensor whole on a rank, a part, or a term of a sum?
    exact(model)                # make weights integers: right runs are equal to the last bit

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
