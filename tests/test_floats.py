"""Floats: every pattern of torch's 16-bit and 8-bit types, every tie, roundings by chance."""

import itertools
import math
import struct

import pytest
import torch

from ddpkit import floats

SMALL = [floats.BF16, floats.FP16, floats.E4M3, floats.E5M2]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def names(format):
    return format.name


def patterns(format) -> torch.Tensor:
    """All of them, as numbers of torch's type."""
    whole = torch.arange(2**format.bits)
    return whole.to(torch.uint8 if format.bits == 8 else torch.uint16).view(format.dtype)


def same(ours: float, torchs: float) -> bool:
    """Equal, or both NaN; -0 is not 0."""
    if math.isnan(ours) or math.isnan(torchs):
        return math.isnan(ours) and math.isnan(torchs)
    return ours == torchs and math.copysign(1, ours) == math.copysign(1, torchs)


def cast(x: torch.Tensor, format) -> torch.Tensor:
    """torch's own, as float64; older ones make NaN of what is too large for e4m3."""
    there = x.to(format.dtype).double()
    if format is floats.E4M3 and torch.tensor(1e9).to(format.dtype).isnan():
        there = torch.where(
            there.isnan() & ~x.isnan(), torch.tensor(448.0).copysign(x).double(), there
        )
    return there


def ties(format) -> torch.Tensor:
    """Numbers, the values halfway, the fp32 before and after these; both signs; too large."""
    values = patterns(format)[: 2 ** (format.bits - 1)].float()
    values = values[values.isfinite()]
    beyond = values[-1] + (values[-1] - values[-2])  # one more, if there were one
    halfway = (values + torch.cat([values[1:], beyond[None]])) / 2
    around = [torch.nextafter(halfway, torch.tensor(end)) for end in (-math.inf, math.inf)]
    return (
        torch.cat([values, halfway, *around, torch.tensor([1e9, 3.4e38, math.inf, 1e-44])])
        .repeat(2)
        .mul_(torch.tensor([1.0, -1.0]).repeat_interleave(4 * len(values) + 4))
    )


@pytest.mark.parametrize("format", SMALL, ids=names)
def test_patterns_are_torchs_numbers(format):
    """All of 8 bits; of 16 a part, odd so that it has even and odd ones, and the ends."""
    step = 1 if format.bits == 8 else 37
    values = patterns(format).double().tolist()
    for pattern in {*range(0, len(values), step), 0, len(values) // 2, len(values) - 1}:
        value = floats.decode(pattern, format)
        assert same(value, values[pattern]), f"{pattern:#x}"
        assert math.isnan(value) or floats.encode(value, format) == pattern
    assert math.isnan(floats.decode(floats.encode(math.nan, format), format))


@pytest.mark.parametrize("format", SMALL, ids=names)
def test_ties_go_where_torchs_go(format):
    x = ties(format)
    x = x[:: 1 if format.bits == 8 else 67]
    for value, torchs in zip(x.tolist(), cast(x, format).tolist(), strict=True):
        assert same(floats.decode(floats.encode(value, format), format), torchs), value
        if format.has_inf and math.isfinite(value):
            assert floats.nearest(value, format) == torchs, value


def test_tf32_is_fp32_without_its_last_13_bits():
    """Against arithmetic on fp32's bits: add just under half, 1 more if the last bit is odd."""
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(0, 0x7F800000, (400,), generator=generator, dtype=torch.int64)
    ties = bits // 2**13 * 2**13 + 2**12
    bits = torch.cat([bits, ties, torch.tensor([0, 1, 2**12, 3 * 2**12, 0x7F7FFFFF])])
    kept = (bits + 2**12 - 1 + (bits >> 13 & 1)) >> 13
    values = bits.to(torch.int32).view(torch.float32)
    for value, pattern in zip(values.tolist(), kept.tolist(), strict=True):
        assert floats.encode(value, floats.TF32) == pattern


def test_fp32_is_rounded_as_c_does():
    x = torch.randn(500, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    values = (x * 2.0 ** torch.arange(500).sub(300).div(2)).tolist()
    for value in [*values, 0.1, -0.0, 1 + 2**-24, 1 + 3 * 2**-24, 2.0**-150, 2.0**-149]:
        pattern = floats.encode(value, floats.FP32)
        assert pattern == int.from_bytes(struct.pack(">f", value))
        assert same(
            floats.decode(pattern, floats.FP32), struct.unpack(">f", struct.pack(">f", value))[0]
        )


@pytest.mark.parametrize("format", [floats.FP32, *SMALL], ids=names)
def test_extremes_are_torchs(format):
    info = torch.finfo(format.dtype)
    assert (format.bits, format.largest) == (info.bits, info.max)
    assert (format.smallest_normal, format.epsilon) == (info.smallest_normal, info.eps)
    assert format.smallest_subnormal == floats.decode(1, format)


def test_describe():
    """3.14 in fp16: 2^1 × (1 + 584/1024); there numbers are 2/1024 apart."""
    number = floats.Number(floats.encode(3.14, floats.FP16), floats.FP16)
    found = number.sign, number.exponent, number.fraction
    assert floats.fields(number.pattern, floats.FP16) == found == (0, 16, 584)
    assert (number.bits, number.formula) == ("0 10000 1001001000", "2^1 × 1.5703125")
    assert (number.value, number.spacing) == (3.140625, 2**-9)
    assert str(number) == (
        "fp16: 0 10000 1001001000 is 3.140625, normal; spacing 0.001953125, between 3.138671875 "
        "and 3.142578125"
    )
    assert str(floats.Number(0xFE, floats.E4M3)) == (
        "fp8 e4m3: 1 1111 110 is -448.0, normal; spacing 32.0, between nothing and -416.0"
    )
    assert str(floats.Number(0x7C, floats.E5M2)) == "fp8 e5m2: 0 11111 00 is inf, infinity"


@pytest.mark.parametrize(
    ("pattern", "format", "formula"),
    [
        (0x8001, floats.FP16, "-2^-14 × 0.0009765625"),
        (0x8000, floats.FP16, "zero"),
        (0x7C00, floats.FP16, "infinity"),
        (0x7F, floats.E4M3, "NaN"),
        (0x78, floats.E4M3, "2^8 × 1.0"),
        (0xC0, floats.E5M2, "-2^1 × 1.0"),
    ],
)
def test_formulas(pattern, format, formula):
    number = floats.Number(pattern, format)
    assert number.formula == formula
    if "×" in formula:
        power, significand = formula.lstrip("-").removeprefix("2^").split(" × ")
        assert abs(number.value) == 2.0 ** int(power) * float(significand)


@pytest.mark.parametrize("format", [floats.E4M3, floats.E5M2], ids=names)
def test_neighbours_are_the_next_numbers_in_order(format):
    numbers = [floats.Number(pattern, format) for pattern in range(2**format.bits)]
    there = [n for n in numbers if n.kind != "NaN" and n.pattern != 2 ** (format.bits - 1)]
    numbers = sorted(there, key=lambda number: number.value)
    assert (numbers[0].below, numbers[-1].above) == (None, None)
    for number, after in itertools.pairwise(numbers):
        assert (number.above, after.below) == (after.value, number.value)
        if number.spacing and after.spacing:
            assert after.value - number.value == min(number.spacing, after.spacing)


def test_patterns_of_another_format():
    for pattern in (-1, 256):
        says = f"8 bits for fp8 e4m3, got {pattern:#x}: is it of another"
        with pytest.raises(ValueError, match=says):
            floats.decode(pattern, floats.E4M3)


# By chance. Each rounding is up with probability p or down. By Hoeffding's inequality the mean of n
# is further than t spacings from the value with a probability below 2 exp(-2nt²): 1e-9 here.


@pytest.mark.parametrize("device", DEVICES)
def test_chance_is_fair(device):
    values = [1 + 2**-12, -1.001, 0.1, -3.3e-6, 1e-30, 65000.0, 3.14159, -0.00012345, 1e-39]
    x = torch.tensor(values, device=device).expand(20_000, -1)
    torch.manual_seed(4)
    rounded = floats.round_stochastically(x)
    assert rounded.dtype == torch.bfloat16
    below = (x.view(torch.int32) & -(2**16)).view(torch.float32).double()  # towards 0
    above = (below.float().view(torch.int32) + 2**16).view(torch.float32).double()
    assert ((rounded.double() == below) | (rounded.double() == above)).all()
    assert ((rounded.double() - x).mean(0).abs() < 0.0232 * (above - below).abs()).all()


def test_chance_leaves_nan_alone():
    bits = torch.tensor([0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32).expand(100, 3)
    assert floats.round_stochastically(bits.view(torch.float32)).isnan().all()


def test_chance_leaves_bf16_and_its_argument_alone():
    numbers = patterns(floats.BF16).float()
    numbers = numbers[~numbers.isnan()]
    assert (
        floats.round_stochastically(numbers)
        .float()
        .view(torch.int32)
        .equal(numbers.view(torch.int32))
    )
    x = torch.rand(1000, generator=torch.Generator().manual_seed(5)).requires_grad_()
    was, rounded = x.detach().clone(), floats.round_stochastically(x)
    assert not rounded.equal(floats.round_stochastically(x))
    assert x.equal(was)
    assert not rounded.requires_grad
    with pytest.raises(ValueError, match=r"expected float32 .*got torch.float64: say x.float"):
        floats.round_stochastically(x.double())
