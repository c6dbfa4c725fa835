"""Floating-point formats bit by bit: fp32, tf32, bf16, fp16 and the two of fp8.

    decode(0x3E00, FP16)               # 1.5: the number that these bits stand for
    encode(0.1, BF16)                  # 0x3DCD: the bits of the nearest number
    print(Number(0x3DCD, BF16))        # its fields, spacing and neighbours
    nearest(0.1, BF16)                 # 0.10009765625, without its bits
    round_stochastically(x)            # a tensor in bf16, rounded up or down by chance
    quantise(x, 32)                    # in int8, with a scale for each 32 numbers

A pattern is a whole number. Its bits, from the highest: sign, exponent, fraction. It stands for

    (-1)^sign × 2^(exponent - bias) × 1.fraction      if exponent is not 0   (normal)
    (-1)^sign × 2^(1 - bias)        × 0.fraction      if exponent is 0       (subnormal, and zero)

and, where all bits of the exponent are set, infinity or NaN. fp8 e4m3 has no infinity, and NaN only
where all bits of the fraction are set as well, so it reaches 448 rather than 240.

In PyTorch: torch.finfo. IEEE 754-2019, sections 3 and 4; Kalamkar et al. 2019 (bf16); NVIDIA A100
whitepaper 2020 (tf32); Micikevicius et al. 2022, table 1 (fp8). Notebook 05.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Format:
    """A floating-point format: sign, `exponent_bits`, `fraction_bits`. dtype: torch's, or None."""

    name: str
    exponent_bits: int
    fraction_bits: int
    dtype: torch.dtype | None
    has_inf: bool = True

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.fraction_bits

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def largest(self) -> float:
        return decode(self._overflow - self.has_inf, self)

    @property
    def smallest_normal(self) -> float:
        return math.ldexp(1.0, 1 - self.bias)

    @property
    def smallest_subnormal(self) -> float:
        return math.ldexp(1.0, 1 - self.bias - self.fraction_bits)

    @property
    def epsilon(self) -> float:
        """Return the distance from 1 to the next number."""
        return math.ldexp(1.0, -self.fraction_bits)

    @property
    def _overflow(self) -> int:
        """Return the pattern for values that are too large: infinity, or the largest number."""
        if self.has_inf:
            return (2**self.exponent_bits - 1) << self.fraction_bits
        return 2 ** (self.bits - 1) - 2


FP32 = Format("fp32", 8, 23, torch.float32)
TF32 = Format("tf32", 8, 10, None)  # the format of factors in tensor cores; in memory fp32
BF16 = Format("bf16", 8, 7, torch.bfloat16)
FP16 = Format("fp16", 5, 10, torch.float16)
E4M3 = Format("fp8 e4m3", 4, 3, torch.float8_e4m3fn, has_inf=False)
E5M2 = Format("fp8 e5m2", 5, 2, torch.float8_e5m2)
FORMATS = (FP32, TF32, BF16, FP16, E4M3, E5M2)


# One number


def fields(pattern: int, format: Format) -> tuple[int, int, int]:
    """Split a pattern into (sign, exponent, fraction), each as a whole number.

    ValueError: the format has no such pattern.
    """
    if not 0 <= pattern < 2**format.bits:
        expected = f"expected a pattern of {format.bits} bits for {format.name}"
        raise ValueError(f"{expected}, got {pattern:#x}: is it of another format?")
    sign, magnitude = divmod(pattern, 2 ** (format.bits - 1))
    return sign, *divmod(magnitude, 2**format.fraction_bits)


def field_of(place: int, format: Format) -> str:
    """Name the field of the bit at `place`, 0 for the highest: 'sign', 'exponent', 'fraction'."""
    if place == 0:
        return "sign"
    return "exponent" if place <= format.exponent_bits else "fraction"


def decode(pattern: int, format: Format) -> float:
    """Return the number that a pattern stands for, exactly: Python's floats have more bits.

    ValueError: the format has no such pattern.
    """
    sign, exponent, fraction = fields(pattern, format)
    magnitude = pattern % 2 ** (format.bits - 1)
    if magnitude == format._overflow and format.has_inf:
        value = math.inf
    elif magnitude > format._overflow:
        value = math.nan
    elif exponent:
        power = exponent - format.bias - format.fraction_bits
        value = math.ldexp(2**format.fraction_bits + fraction, power)
    else:
        value = math.ldexp(fraction, 1 - format.bias - format.fraction_bits)
    return math.copysign(value, -1.0 if sign else 1.0)


def encode(value: float, format: Format) -> int:
    """Return the pattern of the number nearest to a value; of two equally near, the even one.

    Values that are too large become infinity, in e4m3 the largest number, as in torch 2.13 (older
    versions made NaN of them on CPUs: pull request 178817). NaN becomes one of the format's NaNs.
    """
    if math.isnan(value):
        return 2 ** (format.bits - 1) - 1  # one of many NaNs: torch's differ between devices
    sign = 2 ** (format.bits - 1) * (math.copysign(1, value) < 0)
    magnitude = abs(value) if math.isinf(value) else nearest(abs(value), format)
    if magnitude in (0, math.inf):
        return sign + (format._overflow if magnitude else 0)
    exponent = max(math.frexp(magnitude)[1] - 1, 1 - format.bias)
    significand = int(math.ldexp(magnitude, format.fraction_bits - exponent))
    return sign + ((exponent - 1 + format.bias) << format.fraction_bits) + significand


def nearest(value, format):
    """Round a float to the format's nearest number; of two equally near, to the even one.

    Too large values become infinity, even in e4m3. OverflowError: infinite value; ValueError: NaN.
    """
    exponent = math.frexp(value)[1] - 1  # |value| is this power of two times 1 to 2
    exponent = max(exponent, 1 - format.bias)
    spacing = 2.0 ** (exponent - format.fraction_bits)
    rounded = round(value / spacing) * spacing
    if abs(rounded) > format.largest:
        rounded = math.copysign(math.inf, value)
    return rounded


class Number:
    """A pattern of a format, with its properties. ValueError: the format has no such pattern.

    kind: normal, subnormal, zero, infinity or NaN. spacing: to the next number away from 0, `ulp`;
    None for infinity and NaN. below, above: the neighbouring numbers; None where there is none.
    """

    def __init__(self, pattern: int, format: Format):
        self.pattern, self.format = pattern, format
        self.sign, self.exponent, self.fraction = fields(pattern, format)
        self.value = decode(pattern, format)
        self.below, self.above = _next(pattern, format, -1), _next(pattern, format, +1)
        self.spacing = None
        if math.isfinite(self.value):
            self.kind = "normal" if self.exponent else "subnormal" if self.fraction else "zero"
            power = max(self.exponent, 1) - format.bias - format.fraction_bits
            self.spacing = math.ldexp(1.0, power)
        else:
            self.kind = "NaN" if math.isnan(self.value) else "infinity"

    @property
    def bits(self) -> str:
        """Return sign, exponent and fraction in binary: '0 01111 1000000000'."""
        exponent = f"{self.exponent:0{self.format.exponent_bits}b}"
        return f"{self.sign} {exponent} {self.fraction:0{self.format.fraction_bits}b}"

    @property
    def formula(self) -> str:
        """Return the value as '2^0 × 1.5'; for zero, infinity and NaN, the name without a sign."""
        if self.kind not in ("normal", "subnormal"):
            return self.kind
        leading = 1 if self.kind == "normal" else 0
        significand = leading + self.fraction * self.format.epsilon
        sign = "-" if self.sign else ""
        return f"{sign}2^{max(self.exponent, 1) - self.format.bias} × {significand}"

    def __str__(self):
        text = f"{self.format.name}: {self.bits} is {self.value}, {self.kind}"
        if self.spacing is None:
            return text
        below, above = ("nothing" if x is None else x for x in (self.below, self.above))
        return f"{text}; spacing {self.spacing}, between {below} and {above}"


def _next(pattern: int, format: Format, step: int) -> float | None:
    """Return the neighbour above (step 1) or below (-1), None if there is none.

    Without the sign, the next larger pattern is the next larger number.
    """
    half = 2 ** (format.bits - 1)
    sign, magnitude = divmod(pattern, half)
    place = (-magnitude if sign else magnitude) + step
    if magnitude > format._overflow or abs(place) > format._overflow:
        return None
    return decode(abs(place) + half * (place < 0), format)


# Tensors


def round_stochastically(x: Tensor) -> Tensor:
    """Round every element to one of the two bf16 numbers around it, the nearer the likelier.

    x: float32, any shape and device; it isn't changed. Infinity and NaN stay what they are.
    ValueError: another dtype.

    bf16 is the upper half of fp32's bits. The lower half, divided by 2^16, is the chance that the
    upper half grows by one. So the mean of many roundings is the element itself, and bf16 weights
    learn from updates below half their spacing. Gupta et al. 2015. Notebook 05.
    """
    if x.dtype != torch.float32:
        raise ValueError(f"expected float32 to round to bf16, got {x.dtype}: say x.float()")
    carry = torch.randint(0, 2**16, x.shape, dtype=torch.int32, device=x.device)
    x = x.detach()
    upper = x.view(torch.int32) + carry & -(2**16)
    # The bits of a NaN may overflow, or lose what tells it from infinity.
    return torch.where(x.isfinite(), upper.view(torch.float32), x).bfloat16()


def quantise(x, block):
    """Return (numbers, scales): `x` as int8, a row for each `block` numbers, and each row's scale.

    numbers * scales is about x, in rows. x: float32; block divides its number of elements.
    """
    blocks = x.reshape(-1, block)
    scales = blocks.abs().amax(1, keepdim=True) / 127
    scales[scales == 0] = 1  # a row of nothing but zeros
    return (blocks / scales).round().to(torch.int8), scales
