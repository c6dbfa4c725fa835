"""Cut a flat tensor into views, one for each of some tensors."""

from collections.abc import Iterable

from torch import Tensor


def views(flat: Tensor, tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return views of consecutive parts of `flat`, in the shapes of `tensors`.

    flat: 1-D; elements after the last part are padding. Writing to a view writes to `flat`.
    """
    found = []
    start = 0
    for tensor in tensors:
        part = flat[start : start + tensor.numel()]
        found.append(part.view(tensor.shape))
        start += tensor.numel()
    return found
