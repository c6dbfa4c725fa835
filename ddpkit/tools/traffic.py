"""Count the numbers that a function reads from and writes to memory. Notebook 08."""

from torch import Tensor
from torch.overrides import TorchFunctionMode


class Traffic(TorchFunctionMode):
    """Count the elements read and written by indexing inside `with Traffic() as traffic:`.

    x[..., i] counts the elements it returns as reads; a[..., i] = y counts those it sets as writes.
    Using a tensor without an index counts nothing, as if it were in registers or fast memory.
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
