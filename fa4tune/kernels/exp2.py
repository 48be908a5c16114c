"""The emulated exponential: which columns of a row it computes, and its exact float32 arithmetic.

The exponential unit (MUFU.EX2) is often the busiest unit of an attention kernel. A kernel may therefore
compute part of each row's exponentials with fused multiply-adds instead: 2^x = 2^floor(x) * 2^(x - floor(x))
(Cody and Waite), the second factor by a polynomial on [0, 1).

This module is the one definition that kernel, plan, model and reference share. It needs numpy only.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fa4tune.errors import ConfigError

POLYNOMIALS: dict[int, tuple[float, ...]] = {
    1: (1.0, 0.922497093677520751953125),
    2: (1.0, 0.6657850742340087890625, 0.330107033252716064453125),
    3: (1.0, 0.695146143436431884765625, 0.227564394474029541015625, 0.077119089663028717041015625),
    4: (
        1.0,
        0.693042695522308349609375,
        0.2412912547588348388671875,
        0.052225358784198760986328125,
        0.013434938155114650726318359375,
    ),
    5: (
        1.0,
        0.693151414394378662109375,
        0.24016360938549041748046875,
        0.055802188813686370849609375,
        0.00901452265679836273193359375,
        0.00186810153536498546600341796875,
    ),
}
"""Degree -> coefficients p0, p1, ... of 2^f on [0, 1], each exactly a float32.

They minimise the relative error with p0 held at 1, so that 2^0 is exactly 1 (Sollya's fpminimax with 24-bit
coefficients gives these; the maximum relative errors are 3.9e-2, 2.1e-3, 8.8e-5, 3.1e-6 and 1.4e-7).
"""

MIN_EXPONENT = -127.0
"""Arguments are clamped to this, where the result is 0: below it the added exponent would wrap."""

ROUND_DOWN_MAGIC = 12582912.0
"""2^23 + 2^22: a float32 this large has a spacing of 1, so x + magic rounded down is floor(x) + magic."""

SHARE_DENOMINATOR = 16
"""The share of emulated exponentials is counted in sixteenths of a row of a tile."""


def emulated_columns(
    tile_n: int, share_sixteenths: int, start_fragment: int, fragment: int = 32
) -> tuple[bool, ...]:
    """Says for each of a row's `tile_n` columns whether its exponential is computed by the polynomial.

    The rule, in this order:

    1. Columns go in adjacent pairs (2i, 2i + 1), the unit of packed arithmetic. The number of emulated pairs
       is `share_sixteenths / 16` of all pairs, to the nearest whole pair, a half rounded up; a share above
       zero is thus always at least one pair.
    2. The row is cut into fragments of `fragment` columns (the last one may be shorter). Fragments before
       `start_fragment` are never used: their exponentials start the row on the exponential unit. The last
       fragment is used only if the fragments before it have fewer pairs than needed, because it is what the
       second matrix multiplication waits for.
    3. The emulated pairs are spread evenly over the n usable ones: of p emulated pairs, usable pair i is one
       where floor((i + 1) p / n) exceeds floor(i p / n). Any run of usable pairs holds its proportion within
       one pair, and the run of hardware exponentials comes first.

    Args:
        tile_n: columns of the tile (keys), even and positive.
        share_sixteenths: emulated share of the row in sixteenths, 0 to 16.
        start_fragment: index of the first fragment that may be emulated.
        fragment: columns a fragment, even and positive.

    Returns:
        `tile_n` booleans; `sum()` of it is twice the number of emulated pairs.

    Raises:
        ConfigError: an argument is out of range, or the share does not fit behind `start_fragment`.
    """
    if tile_n <= 0 or tile_n % 2:
        raise ConfigError(f"tile_n must be a positive even number of columns, not {tile_n}")
    if fragment <= 0 or fragment % 2:
        raise ConfigError(f"fragment must be a positive even number of columns, not {fragment}")
    if not 0 <= share_sixteenths <= SHARE_DENOMINATOR:
        raise ConfigError(f"exp2 share must be 0 to 16 sixteenths of the row, not {share_sixteenths}")
    fragments = -(-tile_n // fragment)
    if not 0 <= start_fragment < fragments:
        raise ConfigError(
            f"exp2 start fragment must be 0 to {fragments - 1} for {tile_n} columns in fragments of "
            f"{fragment}, not {start_fragment}"
        )

    row_pairs = tile_n // 2
    wanted = (2 * share_sixteenths * row_pairs + SHARE_DENOMINATOR) // (2 * SHARE_DENOMINATOR)
    first = start_fragment * fragment // 2
    before_last_fragment = (fragments - 1) * fragment // 2
    end = before_last_fragment if wanted <= before_last_fragment - first else row_pairs
    usable = end - first
    if wanted > usable:
        raise ConfigError(
            f"exp2 share {share_sixteenths}/16 of {tile_n} columns needs {2 * wanted} emulated columns, but "
            f"start fragment {start_fragment} leaves {2 * usable}; lower the share or the start fragment"
        )

    columns: list[bool] = []
    for pair in range(row_pairs):
        index = pair - first
        emulated = 0 <= index < usable and (index + 1) * wanted // usable > index * wanted // usable
        columns += [emulated, emulated]
    return tuple(columns)


def exp2_polynomial(x: NDArray[np.float32], degree: int) -> NDArray[np.float32]:
    """2^x as the kernel's emulation computes it, bit for bit.

    Step by step, with the PTX instruction that each one stands for: clamp to at least -127 (`max.f32`, which
    turns NaN into -127 too); add 2^23 + 2^22 rounding down (`add.rm.ftz.f32`) and subtract it again, which
    leaves floor(x); the fraction x - floor(x) (`sub.rn.f32`); Horner's scheme with one fused multiply-add a
    degree (`fma.rn.ftz.f32`); shift the integer into the exponent field and add it to the polynomial's bits
    (`shl.b32`, `add.s32`).

    Results below 2^-126 are not rounded correctly: the integer add gives (p - 1) * 2^-126 there, and exactly
    0 at and below x = -127 (so 2^-inf is 0).

    Args:
        x: float32 array of any shape, every element below 128.
        degree: a key of `POLYNOMIALS`.

    Returns:
        float32 array of x's shape.

    Raises:
        ConfigError: no such degree, x is not float32, or an element is 128 or more (its exponent would wrap).
    """
    if degree not in POLYNOMIALS:
        raise ConfigError(f"exp2 degree must be one of {', '.join(map(str, POLYNOMIALS))}, not {degree}")
    if x.dtype != np.float32:
        raise ConfigError(f"exp2_polynomial takes float32, not {x.dtype}")
    if np.any(x >= 128.0):
        raise ConfigError(f"exp2_polynomial takes arguments below 128, not {float(np.nanmax(x))}")
    clamped = np.fmax(x, np.float32(MIN_EXPONENT))
    clamped = _flush_subnormals(clamped)
    # Exact in float32 for [-127, 128), where the sum with the magic number has a spacing of 1.
    floor = np.floor(clamped)
    fraction = clamped - floor
    coefficients = POLYNOMIALS[degree]
    value = np.full_like(fraction, np.float32(coefficients[-1]))
    for coefficient in reversed(coefficients[:-1]):
        value = fused_multiply_add(value, fraction, np.float32(coefficient))
    exponent = floor.astype(np.int32) << np.int32(23)
    bits: NDArray[np.int32] = value.view(np.int32) + exponent
    return bits.view(np.float32)


def fused_multiply_add(a: Any, b: Any, c: Any) -> NDArray[np.float32]:
    """a * b + c of float32 operands with one rounding to nearest even, as `fma.rn.f32`.

    The product is exact in float64. The sum is not always, and rounding it to float64 and then to float32
    could round twice; so the float64 sum is rounded to odd first (Boldo and Melquiond, 2008), after which the
    second rounding is the correct one.
    """
    product = np.asarray(a, np.float32).astype(np.float64) * np.asarray(b, np.float32).astype(np.float64)
    addend = np.asarray(c, np.float32).astype(np.float64)
    total = product + addend
    # Knuth's two-sum: what the addition lost, exactly.
    part = total - product
    lost = (product - (total - part)) + (addend - part)
    even = (total.view(np.int64) & 1) == 0
    odd_neighbour = np.nextafter(total, np.copysign(np.inf, lost))
    return np.where((lost != 0.0) & even, odd_neighbour, total).astype(np.float32)


def round_to_bfloat16(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rounds float32 to bfloat16, to nearest even, and returns the values as float32 (NaN stays NaN)."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(x), np.float32(np.nan), rounded.view(np.float32))


def _flush_subnormals(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Replaces subnormal float32 by zero, as the `.ftz` instructions do with their operands."""
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.float32(0.0), x)
