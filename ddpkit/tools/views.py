"""Cut a flat tensor into views, one for each of some tensors."""

from collections.abc import Iterable

from torch import Tensor


def views(flat: Tensor, tensors: Iterable[Tensor]) -> list[Tensor]:
    """View the parts of `flat` in the shapes of `tensors`, which lie in it end to end.

    flat: 1-D; what is left after the last part is padding. Writing to a view writes to `flat`.
    """
    found = []
    start = 0
    for tensor in tensors:
        part = flat[start : start + tensor.numel()]
        found.append(part.view(tensor.shape))
        start += tensor.numel()
    return found
