"""Count the tensor elements that a function reads from and writes to memory. Notebook 08."""

from torch import Tensor
from torch.overrides import TorchFunctionMode


class Traffic(TorchFunctionMode):
    """A counter of the elements read and written by indexing inside `with Traffic() as traffic:`.

    `traffic.reads` counts the elements that an index such as x[i] returns, and `traffic.writes`
    those that an assignment to x[i] sets; x[i] += 1 does both. Using a tensor without an index
    counts nothing, as if it were in registers or fast memory.
    """

    def __init__(self):
        super().__init__()
        self.reads = self.writes = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is Tensor.__getitem__:
            self.reads += result.numel()
        elif func is Tensor.__setitem__:
            tensor, index, _ = args
            self.writes += tensor[index].numel()
        return result
