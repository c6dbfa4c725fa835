"""The serial twin: what every rank brings to a sum, known to all, so that each can add it up alone and compare."""

import torch
import torch.distributed as dist
from torch import Tensor

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
DTYPES = [*FLOATS, *COMPLEX, *INTEGERS, torch.bool]


def whole(rank, shape, dtype=torch.float32, salt=0) -> Tensor:
    """What `rank` brings: whole numbers from 1 to 9, of which every dtype holds the sum over 8 ranks exactly."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    if dtype == torch.bool:
        return torch.randint(0, 2, (shape,) if isinstance(shape, int) else shape, generator=generator).bool()
    values = torch.randint(1, 10, (shape,) if isinstance(shape, int) else shape, generator=generator).to(dtype)
    return values * (1 - 2j) if dtype.is_complex else values


def fractions(rank, length, dtype=torch.float32, salt=0) -> Tensor:
    """What `rank` brings: numbers of many sizes and both signs, so that the order of a sum shows in its last bits."""
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


class Complaints(list):
    """Sentences about what is not as it should be, on this rank."""

    def unless(self, fine: bool, *what):
        """`what` is put into words only if it must be: printing a tensor takes longer than comparing it."""
        if not fine:
            self.append(f"rank {dist.get_rank()}: {' '.join(map(str, what))}")

    def same(self, got: Tensor, expected: Tensor, *what):
        """The same dtype, shape and bits."""
        alike = (got.dtype, got.shape) == (expected.dtype, expected.shape) and torch.equal(bits(got), bits(expected))
        self.unless(alike, *what, "got", got, "expected", expected)

    def near(self, got: Tensor, parts: list[Tensor], *what):
        """As near to the sum of `parts` in float64 as any order of adding must come.

        Each of the W-1 additions rounds by at most eps/2 of its result, which is no larger than the sum of absolute
        values; so does the float64 sum. W times eps covers both, and what the roundings do to each other.
        """
        exact = total([part.double() for part in parts])
        bound = len(parts) * torch.finfo(got.dtype).eps * total([part.double().abs() for part in parts])
        self.unless(bool(((got.double() - exact).abs() <= bound).all()), *what, "got", got, "not near", exact)

    def same_on_all(self, x: Tensor, *what, group=None):
        """The same bits on every rank of the group, also of a NaN."""
        everyones = [torch.empty_like(bits(x)) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everyones, bits(x), group=group)
        for rank, theirs in enumerate(everyones):
            self.unless(torch.equal(theirs, bits(x)), *what, "here", x, "not the same bits on rank", rank)

    def refused(self, function, *args, says: tuple[str, ...], **kwargs):
        """A ValueError that says all of `says`."""
        try:
            function(*args, **kwargs)
        except ValueError as error:
            missing = [word for word in says if word not in str(error)]
            self.unless(not missing, f"{missing} not in {str(error)!r}")
        else:
            self.unless(False, f"{function.__name__}{args} {kwargs} was not refused")
