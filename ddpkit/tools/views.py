"""Cut a flat tensor, such as a bucket of gradients, into views in the shapes of given tensors."""

from collections.abc import Iterable

from torch import Tensor


def views(flat: Tensor, tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return views of consecutive parts of `flat`, one for each of `tensors`, in their shapes.

    Writing to a view writes to `flat`.

    flat: 1-D, at least as long as all tensors together; elements after the last part are padding.
    tensors: only their shapes and sizes are used.
    """
    found = []
    start = 0
    for tensor in tensors:
        part = flat[start : start + tensor.numel()]
        found.append(part.view(tensor.shape))
        start += tensor.numel()
    return found
