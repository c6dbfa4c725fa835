"""A counter of the numbers that a function reads from memory and writes to it. Notebook 08."""

from torch import Tensor
from torch.overrides import TorchFunctionMode


class Traffic(TorchFunctionMode):
    """Count, inside `with Traffic() as traffic:`, the numbers that tensors are indexed for.

    x[..., i] reads as many numbers as it returns, a[..., i] = y writes them. A tensor that is used
    without an index counts as held in registers, or in fast memory.
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
