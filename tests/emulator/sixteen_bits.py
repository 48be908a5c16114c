"""float16 and bfloat16 in Python integers and fractions, for tests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from tests.emulator.emulator_harness import exact, round_to

#: format: (significand bits, smallest exponent, largest exponent)
FORMATS = {"bf16": (8, -126, 127), "f16": (11, -14, 15)}


def decode(bits: int, kind: str) -> float:
    """The value of 16 bits."""
    precision, emin, _ = FORMATS[kind]
    field = precision - 1
    sign = -1.0 if bits >> 15 else 1.0
    exponent = (bits & 0x7FFF) >> field
    fraction = bits & ((1 << field) - 1)
    if exponent == (1 << 15 - field) - 1:
        return math.nan if fraction else sign * math.inf
    if exponent == 0:
        return sign * fraction * 2.0 ** (emin - field)
    return sign * ((1 << field) + fraction) * 2.0 ** (exponent - 1 + emin - field)


def encode_fraction(value: Fraction, kind: str, mode: str = "rn") -> int:
    """Bits of an exact value rounded once; zero is +0."""
    precision, emin, emax = FORMATS[kind]
    field = precision - 1
    rounded = round_to(value, mode, precision, emin, emax)
    sign = 0x8000 if value < 0 else 0
    top = ((1 << 15 - field) - 1) << field
    if math.isinf(rounded):
        return sign | top
    magnitude = abs(Fraction(rounded))
    if magnitude == 0:
        return sign
    exponent = emin
    while Fraction(2) ** (exponent + 1) <= magnitude:
        exponent += 1
    significand = magnitude / Fraction(2) ** (exponent - field)
    assert significand.denominator == 1
    if significand < 1 << field:
        return sign | int(significand)
    return sign | (exponent - emin + 1) << field | (int(significand) & ((1 << field) - 1))


def encode(value: float, kind: str, mode: str = "rn") -> int:
    """Bits of a float; NaN is 0x7fff."""
    if math.isnan(value):
        return 0x7FFF
    if math.isinf(value):
        precision = FORMATS[kind][0]
        return (0x8000 if value < 0 else 0) | ((1 << 16 - precision) - 1) << precision - 1
    if value == 0:
        return 0x8000 if math.copysign(1, value) < 0 else 0
    return encode_fraction(exact(value), kind, mode)


def same(got: np.ndarray, expected: Sequence[int], kind: str) -> bool:
    """Bit equality."""
    wrong = [(hex(int(g)), hex(e)) for g, e in zip(got, expected, strict=True) if int(g) != e]
    assert not wrong, (kind, wrong[:5])
    return True
