"""The samples of a training: which rows went into the model, on which rank?

Two runs that use different samples have different gradients without any bug. So a `Tape`, the
record of a run, keeps a hash of each row, and `compare` says whether the rows differ. A script that
draws its samples by rank can be compared all the same: the serial run's rows are replaced by those
that the ranks had (`instead`).
"""

import hashlib
from collections import Counter
from collections.abc import Iterable
from itertools import chain

import torch
from torch import Tensor

Rows = list[tuple[Tensor, ...]]  # of each call: its tensors of data, rows along the first axis


class Samples:
    """Note what the outermost modules of a training are called with.

    keep: hold copies of the rows on the CPU, not only their hashes. instead: for each step the rows
    of all ranks, rank after rank; each call gets the next of these in the place of its own, and
    later steps keep their own. A call without a tensor may have a dict of equally long tensors, or
    a list or tuple of such tensors if they are of different kinds, as (inputs, targets) are.
    """

    def __init__(self, keep: bool = False, instead: list[Rows] | None = None):
        self.keep = keep
        self.instead = instead
        self.taken = Counter()  # {step: rows that were replaced}
        self.names: Counter = Counter()  # since the last `take`, as is `rows`
        self.rows: Rows = []

    def of_call(self, step: int, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Note a call's rows, after `instead` has replaced them if given; return its arguments."""
        values = [*args, *kwargs.values()]
        found = data_in(values)
        if not any(isinstance(x, Tensor) for x in values):
            inside = tuple(chain.from_iterable(map(columns_of, values)))
            found = inside if len(set(map(len, inside))) == 1 else ()
        if not found:
            return args, kwargs
        if self.instead is not None and step < len(self.instead):
            rows = self.next_rows(step, found)
            new = dict(zip(map(id, found), rows, strict=True))
            args = tuple(replaced(x, new) for x in args)
            kwargs = {key: replaced(x, new) for key, x in kwargs.items()}
            found = rows
        self.names.update(names_of(found))
        if self.keep:
            self.rows.append(tuple(x.detach().cpu().clone() for x in found))
        return args, kwargs

    def next_rows(self, step: int, data: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the next of the rows that the ranks had in this step, as many as `data` has.

        ValueError: fewer are left.
        """
        columns = [torch.cat(column) for column in zip(*self.instead[step], strict=True)]
        count = len(data[0])
        begin = self.taken[step]
        there = len(columns[0]) if columns else 0
        if begin + count > there:
            more = f"expected {begin + count} samples or more in step {step} of the parallel run"
            raise ValueError(f"{more}, got {there}: both must use as many in a step")
        self.taken[step] += count
        return tuple(
            column[begin : begin + count].to(x.device)
            for column, x in zip(columns, data, strict=True)
        )

    def take(self) -> tuple[Counter, Rows]:
        """Return {row's name: how often} and, with `keep`, the rows, noted since the last call."""
        names, rows = self.names, self.rows
        self.names, self.rows = Counter(), []
        return names, rows


def data_in(values: list) -> tuple[Tensor, ...]:
    """Return those of a call's arguments that hold rows of data.

    They are tensors that require no gradient, and are as long as the first of these.
    """
    found = tensors_in(values)
    return tuple(x for x in found if len(x) == len(found[0]))


def tensors_in(values: Iterable) -> list[Tensor]:
    found = [x for x in values if isinstance(x, Tensor) and x.ndim > 0 and not x.requires_grad]
    return [x for x in found if x.layout is torch.strided and not x.is_meta]


def columns_of(argument: object) -> list[Tensor]:
    """Return the columns of a batch that is a dict, list or tuple of tensors; otherwise [].

    Tensors of one kind (dtype and shape of a row) in a list may be samples, one each: [] as well.
    """
    if type(argument) is dict:
        return tensors_in(argument.values())
    found = tensors_in(argument) if type(argument) in (list, tuple) else []
    kinds = {(x.dtype, x.shape[1:]) for x in found}
    return found if len(kinds) == len(found) > 1 else []


def replaced(argument: object, new: dict[int, Tensor]) -> object:
    """Return an argument, or a copy of it if it contains some, with tensors of `new`, {id: new}."""
    if type(argument) is dict and any(id(x) in new for x in argument.values()):
        return {key: new.get(id(x), x) for key, x in argument.items()}
    if type(argument) in (list, tuple) and any(id(x) in new for x in argument):
        return type(argument)(new.get(id(x), x) for x in argument)
    return new.get(id(argument), argument)


def names_of(data: tuple[Tensor, ...]) -> list[tuple]:
    """Return a name for each row, (shapes, hash of its bytes), over all tensors of `data`."""
    shape = tuple(tuple(x.shape[1:]) for x in data)
    columns = [x.detach().cpu().contiguous().view(len(x), x.shape[1:].numel()) for x in data]
    return [
        (shape, hashlib.sha256(b"".join(map(raw, row))).digest()[:16])
        for row in zip(*columns, strict=True)
    ]


def raw(row: Tensor) -> bytes:
    return row.contiguous().view(torch.uint8).numpy().tobytes() if row.numel() else b""


def other_samples(serial: Counter, by_rank: list[Counter]) -> tuple[str, bool]:
    """Return (sentence on how ranks' samples in a step differ from the serial run's, undecided).

    serial, by_rank: {row's name: how often}. The sentence is "" if they don't differ, or can't be
    compared, since rows have several shapes. undecided: ranks used rows that the serial run didn't,
    so that other gradients prove no bug; False if all ranks used the same rows, which is a bug.
    Ranks without data, as in a pipeline, are left out.
    """
    ranks = [names for names in by_rank if names]
    together = sum(ranks, Counter())
    shapes = {shape for shape, _ in chain(serial, together)}
    if not serial or len(shapes) > 1 or all(names == serial for names in ranks):
        return "", False
    if together == serial:
        return "", False
    if len(ranks) > 1 and all(names == ranks[0] for names in ranks):
        return "all ranks used the same samples: no sampler deals them out", False
    due = serial.total()
    foreign = sum(count for name, count in together.items() if name not in serial)
    told = f"the ranks used {together.total()} samples together, the serial run {due}"
    if together.total() != due and foreign:
        return f"{told}: both must use as many in a step (--serial-args?)", True
    if foreign == 0:
        return f"{told}, each of them among its own", False
    return f"{told}; {foreign} of theirs aren't among its own (--ranks-samples?)", True
