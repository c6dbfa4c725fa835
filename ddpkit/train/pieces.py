"""The places of this rank's numbers in the whole tensors: boxes that a checkpoint puts together.

A rank may hold rows of a part of a tensor: tensor parallelism cuts by heads, FSDP by rows, ZeRO
anywhere in a flat bucket. Each is a range of the flattened part, and a range is a few boxes.
PyTorch writes boxes, and reads whichever boxes of any other mesh overlap with its own.
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
Split = tuple[int, int, Tensor]  # the dimension dealt out, its length, the rows of it that are here


class Pieces(torch.Tensor):
    """Stands for a whole tensor of `shape`, of which this rank has `boxes`; has no memory itself.

    It tells `torch.distributed.checkpoint` what to write and where to read to, as a DTensor does.
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
        """Copy the values to CPU memory: a step that follows can't change what is being saved."""
        boxes = [(offsets, view.detach().to("cpu", copy=True)) for offsets, view in self.boxes]
        return Pieces(tuple(self.shape), self.dtype, boxes)

    # What torch.distributed.checkpoint calls

    def __create_write_items__(self, name: str, _) -> list[WriteItem]:
        items = []
        for offsets, view in self.boxes:
            where = ChunkStorageMetadata(torch.Size(offsets), view.shape)
            properties = TensorProperties(dtype=self.dtype)
            data = TensorWriteData(where, properties, self.size())
            index = MetadataIndex(name, torch.Size(offsets))
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return items

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(at), view.shape) for at, view in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for offsets, view in self.boxes:
            if torch.Size(offsets) == index.offset:
                return view.detach()
        raise ValueError(f"{index.fqn} has no box at {tuple(index.offset)} on this rank")


def pieces(part: tuple[int, ...], values: Tensor, first: int, split: Split | None) -> Pieces:
    """Describe `values`, the numbers from `first` on of a flattened tensor of shape `part`.

    part: this rank's part of the whole, dealt out along a dimension by `split`; or the whole.
    values: 1-D; the boxes are views of it.
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
    """Cut sorted row numbers into runs: (place here, place in the whole, length)."""
    numbers = rows.tolist()
    breaks = [i for i in range(1, len(numbers)) if numbers[i] != numbers[i - 1] + 1]
    return [(a, numbers[a], b - a) for a, b in pairwise([0, *breaks, len(numbers)])]


def flat_place(shape: tuple[int, ...], starts: tuple[int, ...]) -> int:
    """Return the place in the flattened tensor of the element at `starts`."""
    place = 0
    for length, start in zip(shape, starts, strict=True):
        place = place * length + start
    return place


def range_boxes(shape: tuple[int, ...], first: int, end: int) -> list[tuple[tuple, tuple]]:
    """Cut a range of a flattened tensor into boxes, each (starts, sizes), each without gaps in it.

    They are, in order: the end of a row, whole rows, the beginning of a row; and so within rows.
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
    """Cut a range that lies within row `number` into boxes."""
    before = number * math.prod(shape[1:])
    inside = range_boxes(shape[1:], first - before, end - before)
    return [((number, *starts), (1, *sizes)) for starts, sizes in inside]
