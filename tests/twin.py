"""The serial twin: what every rank brings to a sum, known to all, so that each can compare."""

from itertools import pairwise
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
DTYPES = [*FLOATS, *COMPLEX, *INTEGERS, torch.bool]


def whole(rank, shape, dtype=torch.float32, salt=0) -> Tensor:
    """What `rank` brings: whole numbers from 1 to 9; every dtype holds their sum over 8 ranks."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    if dtype == torch.bool:
        return torch.randint(
            0, 2, (shape,) if isinstance(shape, int) else shape, generator=generator
        ).bool()
    values = torch.randint(
        1, 10, (shape,) if isinstance(shape, int) else shape, generator=generator
    ).to(dtype)
    return values * (1 - 2j) if dtype.is_complex else values


def fractions(rank, length, dtype=torch.float32, salt=0) -> Tensor:
    """What `rank` brings: many sizes, both signs; the order of a sum shows in its last bits."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    sizes = torch.randint(-3, 4, (length,), generator=generator)
    return (torch.randn(length, generator=generator, dtype=torch.float64) * 2.0**sizes).to(dtype)


def total(parts: list[Tensor]) -> Tensor:
    """The sum, rank after rank."""
    result = parts[0].clone()
    for part in parts[1:]:
        result += part
    return result


def bits(x: Tensor) -> Tensor:
    return x.detach().contiguous().view(-1).view(torch.uint8)


def between_barriers(run) -> list[SimpleNamespace]:
    """For each part of a run that one of torch's barriers ends, the records of all ranks."""
    by_rank = []
    for records in run.wire:
        ends = [-1, *(number for number, record in enumerate(records) if record.op == "barrier")]
        by_rank.append([records[begin + 1 : end] for begin, end in pairwise(ends)])
    return [SimpleNamespace(wire=wire) for wire in zip(*by_rank, strict=True)]


class Complaints(list):
    """What is not as it should be on this rank: `rank 2: w.grad got … expected …`."""

    def unless(self, fine: bool, *what):
        """`what` is put into words only if it must be: printing takes longer than comparing."""
        if not fine:
            self.append(f"rank {dist.get_rank()}: {' '.join(map(_brief, what))}")

    def same(self, got, expected, *what):
        """The same dtype, shape and bits, also within lists and dicts; anything else is equal."""
        if isinstance(expected, Tensor) and isinstance(got, Tensor):
            alike = (got.dtype, got.shape) == (expected.dtype, expected.shape)
            alike = alike and torch.equal(bits(got), bits(expected))
            self.unless(alike, *what, "got", got, "expected", expected)
        elif (
            type(got) is type(expected)
            and isinstance(got, list | tuple)
            and len(got) == len(expected)
        ):
            for index, (one, other) in enumerate(zip(got, expected, strict=True)):
                self.same(one, other, *what, f"[{index}]")
        elif type(got) is type(expected) is dict and got.keys() == expected.keys():
            for name in expected:
                self.same(got[name], expected[name], *what, name)
        else:
            self.unless(got == expected, *what, "got", got, "expected", expected)

    def close(self, got: Tensor, expected: Tensor, bound, *what):
        """No element is further from `expected` than `bound`, a number or a tensor (float64)."""
        error = (got.double() - expected.double()).abs() if got.shape == expected.shape else None
        fine = error is not None and bool((error <= bound).all())  # a NaN is not
        self.unless(fine, *what, "got", got, "expected", expected, "within", bound)

    def near(self, got: Tensor, parts: list[Tensor], *what):
        """As near to the sum of `parts` in float64 as any order of adding must come.

        Each of the W-1 additions rounds by at most eps/2 of its result, which is no larger than the
        sum of absolute values; so does the float64 sum. W times eps covers both, and what the
        roundings do to each other.
        """
        exact = total([part.double() for part in parts])
        bound = (
            len(parts) * torch.finfo(got.dtype).eps * total([part.double().abs() for part in parts])
        )
        self.close(got, exact, bound, *what)

    def same_on_all(self, x: Tensor, *what, group=None):
        """The same bits on every rank of the group, also of a NaN."""
        everyones = [torch.empty_like(bits(x)) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everyones, bits(x), group=group)
        for rank, theirs in enumerate(everyones):
            self.unless(
                torch.equal(theirs, bits(x)), *what, "here", x, "not the same bits on rank", rank
            )

    def refused(self, function, *args, says: tuple[str, ...] | str, error=ValueError, **kwargs):
        """A ValueError (or another `error`) whose text has all of `says`."""
        says = (says,) if isinstance(says, str) else says
        try:
            function(*args, **kwargs)
        except error as refusal:
            missing = [word for word in says if word not in str(refusal)]
            self.unless(not missing, f"{missing} not in {str(refusal)!r}")
        else:
            called = getattr(function, "__name__", function)
            self.unless(False, f"{called}{args} {kwargs} was not refused")


def _brief(what) -> str:
    """Tensors as the lists they hold, long ones with their middle left out."""
    if not isinstance(what, Tensor):
        return str(what)
    text = repr(what.detach()).removeprefix("tensor(").removesuffix(")")
    return " ".join(text.split())
