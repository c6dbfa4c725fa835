"""The positions of this rank's elements in whole tensors, as boxes for a checkpoint.

A rank may hold only some elements of a tensor: tensor parallelism deals out rows or columns, FSDP
cuts by rows, ZeRO anywhere in a flat bucket. In each case these elements are an index range of a
flattened part of the tensor. Such a range consists of a few boxes, i.e. rectangular blocks, given
by their offsets and sizes in the whole tensor. `torch.distributed.checkpoint` writes boxes. To fill
the boxes of a rank, it reads all saved ones that overlap with them, whatever mesh has saved them.
"""

import math
from itertools import pairwise

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

Box = tuple[tuple[int, ...], Tensor]  # offsets in the whole tensor, and a view of the values there
Split = tuple[int, int, Tensor]  # the dimension that is cut, its whole length, the rows here


class Pieces(torch.Tensor):
    """A stand-in for a whole tensor of `shape`, of which this rank has only the `boxes`.

    It has no memory, and no operation works on it. It tells `torch.distributed.checkpoint` what to
    write and where to read to, as a DTensor does.
    """

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], dtype: torch.dtype, boxes: list[Box]):
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        made.boxes = boxes
        return made

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        raise NotImplementedError(f"{operation} of a tensor that has no memory: use its boxes")

    def __repr__(self):
        return f"<Pieces of {tuple(self.shape)}: {len(self.boxes)} boxes>"

    def staged(self) -> "Pieces":
        """Return a copy on the CPU, so that the next step can't change what is being saved."""
        boxes = [(offsets, view.detach().to("cpu", copy=True)) for offsets, view in self.boxes]
        return Pieces(tuple(self.shape), self.dtype, boxes)

    # What torch.distributed.checkpoint calls

    def __create_write_items__(self, name: str, _) -> list[WriteItem]:
        """List what this rank writes: an item for each box."""
        items = []
        for offsets, view in self.boxes:
            where = ChunkStorageMetadata(torch.Size(offsets), view.shape)
            properties = TensorProperties(dtype=self.dtype)
            data = TensorWriteData(where, properties, self.size())
            index = MetadataIndex(name, torch.Size(offsets))
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return items

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """List offsets and sizes of this rank's boxes, into which a checkpoint is read."""
        return [ChunkStorageMetadata(torch.Size(at), view.shape) for at, view in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return a writable view of the box at the index's offset. ValueError: there is none."""
        for offsets, view in self.boxes:
            if torch.Size(offsets) == index.offset:
                return view.detach()
        raise ValueError(f"{index.fqn} has no box at {tuple(index.offset)} on this rank")


def pieces(part: tuple[int, ...], values: Tensor, first: int, split: Split | None) -> Pieces:
    """Return `Pieces` that say where in a whole tensor these `values` belong.

    part: the shape of this rank's part of the tensor, or of the whole. split: how the part was cut
    from the whole; None if it is the whole. values: 1-D, the elements from index `first` on of the
    flattened part; they may be none. The boxes are views of it. A scalar's shape becomes (1,).
    """
    part = part or (1,)  # a scalar is one row
    whole = list(part)
    runs = [(0, 0, part[0])]
    dim = 0
    if split is not None:
        dim, total, mine = split
        whole[dim] = total
        runs = consecutive(mine)
    boxes = []
    for starts, sizes in range_boxes(part, first, first + len(values)):
        at = flat_place(part, starts) - first
        view = values[at : at + math.prod(sizes)].view(sizes)
        # Along the dimension that was dealt out, a box may hold rows from several places.
        begin, end = starts[dim], starts[dim] + sizes[dim]
        for local, everywhere, length in runs:
            low, high = max(begin, local), min(end, local + length)
            if low < high:
                offsets = list(starts)
                offsets[dim] = everywhere + low - local
                boxes.append((tuple(offsets), view.narrow(dim, low - begin, high - low)))
    return Pieces(tuple(whole), values.dtype, boxes)


def consecutive(rows: Tensor) -> list[tuple[int, int, int]]:
    """Cut sorted row numbers into runs of consecutive ones.

    rows: this rank's rows, as numbered in the whole tensor. Returns for each run (index of its
    first row among `rows`, number of that row in the whole tensor, length).
    """
    numbers = rows.tolist()
    breaks = [i for i in range(1, len(numbers)) if numbers[i] != numbers[i - 1] + 1]
    return [(a, numbers[a], b - a) for a, b in pairwise([0, *breaks, len(numbers)])]


def flat_place(shape: tuple[int, ...], starts: tuple[int, ...]) -> int:
    """Return the index, in the flattened tensor, of the element at `starts`, one index an axis."""
    place = 0
    for length, start in zip(shape, starts, strict=True):
        place = place * length + start
    return place


def range_boxes(shape: tuple[int, ...], first: int, end: int) -> list[tuple[tuple, tuple]]:
    """Cut an index range of a flattened tensor into boxes, each without gaps in memory.

    shape: the tensor's. The range begins with element `first`, and ends before `end`. Returns
    (starts, sizes) of each box: the end of a row, whole rows, the beginning of a row. For (4, 3),
    2 and 10 these are [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 1))]. Where a row has more
    than one axis, its end and its beginning are cut into boxes in the same way.
    """
    if first >= end:
        return []
    if len(shape) == 1:
        return [((first,), (end - first,))]
    row = math.prod(shape[1:])
    whole_from, whole_to = -(-first // row), end // row
    if whole_from > whole_to:  # all within one row
        return in_row(shape, whole_to, first, end)
    found = in_row(shape, whole_from - 1, first, whole_from * row)
    if whole_from < whole_to:
        zeros = (0,) * (len(shape) - 1)
        found.append(((whole_from, *zeros), (whole_to - whole_from, *shape[1:])))
    return found + in_row(shape, whole_to, whole_to * row, end)


def in_row(shape: tuple[int, ...], number: int, first: int, end: int) -> list[tuple[tuple, tuple]]:
    """Cut an index range that lies within row `number` of a tensor into boxes (starts, sizes).

    first, end: indices in the whole flattened tensor, as for `range_boxes`.
    """
    before = number * math.prod(shape[1:])
    inside = range_boxes(shape[1:], first - before, end - before)
    return [((number, *starts), (1, *sizes)) for starts, sizes in inside]
