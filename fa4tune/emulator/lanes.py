"""Arithmetic on vectors of 32 lanes with PTX semantics, in NumPy.

Every function is pure: it returns new arrays and never writes to its arguments, so that moves may alias. A
float32 pair (``f32x2``) is an array of shape (2, lanes). Rounding is exact: sums through the error term of
Knuth's TwoSum, products through float64 (which holds a product of two float32 exactly), fused multiply-adds
through float64 rounded to odd where a double rounding could show. Approximate functions are computed in
float64 and rounded once, which is inside every error bound that the PTX ISA documents for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
F4, F8, U2, U4, U8, I2, I4, I8 = (
    np.dtype(x) for x in ("f4", "f8", "u2", "u4", "u8", "i2", "i4", "i8")
)  # fmt: skip

_TINY = np.float32(2.0**-126)
_HALF_ULP = np.int64(-(1 << 63))  # the low 29 bits 10...0 of a float64, shifted to the top
_SHIFT35 = np.int64(35)
_BELOW_HALF_ULP = np.uint64((1 << 28) - 64)  # in units of float64
_WIDTH_OF_DOUBT = np.uint64(128 << 35)
_INF = np.float32(np.inf)


def ftz(x: Array) -> Array:
    """Flush float32 subnormals to zero of the same sign."""
    return np.multiply(x, np.abs(x) >= _TINY)  # NaN times False is NaN: kept


def two_sum_error(a: Array, b: Array, s: Array) -> Array:
    """The exact ``a + b - s`` for the rounded sum ``s`` (Knuth, TAOCP 4.2.2)."""
    v = s - a
    return (a - (s - v)) + (b - v)


def _direct(r: Array, low: Array, high: Array, mode: str) -> Array:
    """Move a nearest result one step from the wrong side; ``low`` marks r below the exact value."""
    inf = r.dtype.type(np.inf)
    if mode == "rm":
        return np.where(high, np.nextafter(r, -inf), r)
    if mode == "rp":
        return np.where(low, np.nextafter(r, inf), r)
    away = np.where(r > 0, high, low) & (r != 0)
    return np.where(away, np.nextafter(r, r.dtype.type(0)), r)


def add_directed(mode: str) -> Callable[[Array, Array], Array]:
    """Float32 or float64 addition rounded down (rm), up (rp) or toward zero (rz)."""

    def add(a: Array, b: Array) -> Array:
        s = np.add(a, b)
        e = two_sum_error(a, b, s)
        r = _direct(s, e > 0, e < 0, mode)
        overflow = np.isinf(s) & np.isfinite(a) & np.isfinite(b)
        if overflow.any():
            big = np.finfo(s.dtype).max
            keep = {"rm": s > 0, "rp": s < 0, "rz": s != 0}[mode] & overflow
            r = np.where(keep, np.copysign(big, s), np.where(overflow, s, r))
        if mode == "rm":  # x - x is -0 when rounding down
            zero = (r == 0) & (e == 0)
            if zero.any():
                both = ~np.signbit(a) & ~np.signbit(b)
                r = np.where(zero & ~both, np.negative(np.abs(r)), r)
        return r

    return add


def sub_directed(mode: str) -> Callable[[Array, Array], Array]:
    """Subtraction, rounded as :func:`add_directed`."""
    add = add_directed(mode)
    return lambda a, b: add(a, np.negative(b))


def mul_directed(mode: str) -> Callable[[Array, Array], Array]:
    """Float32 multiplication rounded down, up or toward zero; the product is exact in float64."""
    return lambda a, b: round_f64(np.multiply(a, b, dtype=F8), mode)


def round_f64(x: Array, mode: str) -> Array:
    """Round float64 to float32 in a given mode; ``x`` must be exact or rounded to odd."""
    r = x.astype(F4)
    if mode == "rn":
        return r
    wide = r.astype(F8)
    r = _direct(r, wide < x, wide > x, mode)
    overflow = np.isinf(r) & np.isfinite(x)
    if overflow.any():
        keep = {"rm": r > 0, "rp": r < 0, "rz": r != 0}[mode] & overflow
        r = np.where(keep, np.copysign(np.finfo(F4).max, r), r)
    zero = (r == 0) & (x != 0)
    if zero.any():  # underflow keeps the sign of the exact value
        r = np.where(zero, np.copysign(r, x).astype(F4), r)
    return r


def sum_to_odd(p: Array, c: Array) -> Array:
    """``p + c`` in float64 rounded to odd, so that a later rounding to fewer bits is right."""
    s = p + c
    e = two_sum_error(p, c, s)
    bits = s.view(I8)
    fix = (e != 0) & ((bits & 1) == 0) & np.isfinite(s)
    toward = np.where((e > 0) == (s > 0), 1, -1)
    return np.where(fix, bits + toward, bits).view(F8)


def fma_rn(a: Array, b: Array, c: Array) -> Array:
    """Float32 fused multiply-add, rounded once to nearest even."""
    p = np.multiply(a, b, dtype=F8)
    s = np.add(p, c)
    # A second rounding differs only where s sits exactly half way between two float32 (low 29 bits 10...0),
    # or where the result is subnormal and its grid is coarser than that.
    tie = (np.left_shift(s.view(I8), _SHIFT35) == _HALF_ULP) | (np.abs(s) < 2.0**-125)
    if b"\x01" in tie.tobytes():
        s = sum_to_odd(p, c.astype(F8))
    return s.astype(F4)


def fma_directed(mode: str) -> Callable[[Array, Array, Array], Array]:
    """Float32 fused multiply-add rounded down, up or toward zero."""

    def fma(a: Array, b: Array, c: Array) -> Array:
        s = sum_to_odd(np.multiply(a, b, dtype=F8), c.astype(F8))
        r = round_f64(s, mode)
        if mode == "rm":
            zero = (s == 0) & (r == 0)
            positive = ~np.signbit(np.multiply(a, b)) & ~np.signbit(c)
            r = np.where(zero & ~positive, np.negative(np.abs(r)), r)
        return r

    return fma


# -- 16-bit floats


def f32_to_bf16(x: Array) -> Array:
    """Float32 to bfloat16 bits (uint16), to nearest even; NaN becomes the canonical 0x7fff."""
    u = x.view(U4)
    r = ((u + (((u >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(U2)
    nan = x != x
    if b"\x01" in nan.tobytes():
        r = np.where(nan, np.uint16(0x7FFF), r)
    return r


def f32_to_bf16_rz(x: Array) -> Array:
    """Float32 to bfloat16 bits by truncation."""
    return np.where(x != x, np.uint16(0x7FFF), (x.view(U4) >> 16).astype(U2))


def bf16_to_f32(h: Array) -> Array:
    """Bfloat16 bits (uint16) to float32."""
    return (h.astype(U4) << 16).view(F4)


def f32_to_f16(x: Array) -> Array:
    """Float32 to float16 bits (uint16), to nearest even."""
    r = x.astype(np.float16).view(U2)
    return np.where(x != x, np.uint16(0x7FFF), r)


def f32_to_f16_rz(x: Array) -> Array:
    """Float32 to float16 bits toward zero."""
    h = x.astype(np.float16)
    wide = h.astype(F4)
    away = np.abs(wide) > np.abs(x)
    h = np.where(away, np.nextafter(h, np.float16(0)), h)
    return np.where(x != x, np.uint16(0x7FFF), h.view(U2))


def f16_to_f32(h: Array) -> Array:
    """Float16 bits (uint16) to float32."""
    return h.view(np.float16).astype(F4)


def bf16x2_rn(a: Array, b: Array) -> Array:
    """Two float32 to packed bfloat16, ``a`` in the upper half: ``cvt.rn.bf16x2.f32 d, a, b``."""
    ua, ub = a.view(U4), b.view(U4)
    ra = (ua + (((ua >> 16) & 1) + np.uint32(0x7FFF))) & np.uint32(0xFFFF0000)
    rb = (ub + (((ub >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    nan_a, nan_b = a != a, b != b
    if b"\x01" in nan_a.tobytes():
        ra = np.where(nan_a, np.uint32(0x7FFF0000), ra)
    if b"\x01" in nan_b.tobytes():
        rb = np.where(nan_b, np.uint32(0x7FFF), rb)
    return ra | rb


def pack16(hi: Array, lo: Array) -> Array:
    """Two uint16 into a uint32."""
    return (hi.astype(U4) << 16) | lo


def halves(x: Array) -> tuple[Array, Array]:
    """Low and high uint16 of a uint32."""
    return x.astype(U2), (x >> 16).astype(U2)


def on_f32(kind: str, function: Callable[..., Array]) -> Callable[..., Array]:
    """A float32 function applied to float16 or bfloat16 operands, packed or not, rounded once at the end.

    Right for add, sub, mul, min, max, abs, neg and the approximate functions: their float32 (or, for the
    first three, at most 24-bit) result rounds to 16 bits as the exact one does, because 24 >= 2*11 + 2.
    """
    load, store = (f16_to_f32, f32_to_f16) if kind in "FV" else (bf16_to_f32, f32_to_bf16)
    if kind in "FG":
        return lambda *args: store(function(*(load(x) for x in args)))

    def packed(*args: Array) -> Array:
        parts = [halves(x) for x in args]
        low = store(function(*(load(p[0]) for p in parts)))
        high = store(function(*(load(p[1]) for p in parts)))
        return pack16(high, low)

    return packed


def fma16(kind: str, mode: str, relu: bool) -> Callable[[Array, Array, Array], Array]:
    """Fused multiply-add of float16 or bfloat16, through float64 rounded to odd."""
    load = f16_to_f32 if kind in "FV" else bf16_to_f32

    def one(a: Array, b: Array, c: Array) -> Array:
        s = sum_to_odd(np.multiply(load(a).astype(F8), load(b).astype(F8)), load(c).astype(F8))
        if kind in "FV":
            r = f64_to_f16(s)
        else:
            r = f32_to_bf16(odd_f32(s))
        return np.where(r >> 15 != 0, np.uint16(0), r) if relu else r

    if kind in "FG":
        return one

    def two(a: Array, b: Array, c: Array) -> Array:
        (al, ah), (bl, bh), (cl, ch) = halves(a), halves(b), halves(c)
        return pack16(one(ah, bh, ch), one(al, bl, cl))

    return two


def odd_f32(s: Array) -> Array:
    """Float64 to float32 rounded to odd."""
    r = round_f64(s, "rz")
    inexact = (r.astype(F8) != s) & np.isfinite(r)
    return np.where(inexact, r.view(U4) | 1, r.view(U4)).view(F4)


def f64_to_f16(s: Array) -> Array:
    """Float64 to float16 bits to nearest even (one rounding)."""
    return f32_to_f16(odd_f32(s))


# -- approximate functions


def ex2(x: Array) -> Array:
    """``2**x`` in float32, correctly rounded (PTX allows 2 ulp), so that any implementation has its bits.

    Float64 decides unless its result is within 64 units of half way between two float32, or subnormal, where
    the grid is coarser; then the extended type does.
    """
    s = np.exp2(x.astype(F8))
    r = s.astype(F4)
    near = np.left_shift(s.view(U8) - _BELOW_HALF_ULP, _SHIFT35.astype(U8)) < _WIDTH_OF_DOUBT
    doubt = near | ((x < -126) & (x > -152))
    if b"\x01" in doubt.tobytes():
        r[doubt] = np.exp2(x[doubt].astype(np.longdouble)).astype(F4)
    return r


def ex2_ftz(x: Array) -> Array:
    """``2**x`` with subnormal results flushed."""
    r = ex2(x)
    return np.multiply(r, r >= _TINY) if b"\x01" in (x < -126).tobytes() else r


def lg2(x: Array) -> Array:
    """Base-2 logarithm in float32, correctly rounded (PTX: absolute error 2**-22 near 1)."""
    s = np.log2(x.astype(F8))
    r = s.astype(F4)
    doubt = np.left_shift(s.view(U8) - _BELOW_HALF_ULP, _SHIFT35.astype(U8)) < _WIDTH_OF_DOUBT
    if b"\x01" in doubt.tobytes():
        r[doubt] = np.log2(x[doubt].astype(np.longdouble)).astype(F4)
    return r


def rcp(x: Array) -> Array:
    """Reciprocal in float32, correctly rounded (PTX allows 1 ulp)."""
    return np.divide(1.0, x.astype(F8)).astype(F4)


def through_f64(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """A float64 function on float32 operands."""
    return lambda x: function(x.astype(F8)).astype(F4)


def rsqrt(x: Array) -> Array:
    """Reciprocal square root."""
    return np.divide(1.0, np.sqrt(x.astype(F8))).astype(F4)


def rcp_directed(mode: str) -> Callable[[Array], Array]:
    """Reciprocal rounded in a direction: the nearest result corrected by the sign of ``1 - r x``."""

    def function(x: Array) -> Array:
        r = rcp(x)
        # 1 - r*x is exact in float64: r*x has 48 bits.
        residual = 1.0 - np.multiply(r, x, dtype=F8)
        low = np.where(x > 0, residual > 0, residual < 0)
        high = np.where(x > 0, residual < 0, residual > 0)
        usable = np.isfinite(r) & (x != 0) & np.isfinite(x)
        return _direct(r, low & usable, high & usable, mode)

    return function


def div_rn(a: Array, b: Array) -> Array:
    """Float32 division to nearest even."""
    return np.divide(a, b)


# -- integers


def mul_hi(a: Array, b: Array) -> Array:
    """Upper 32 bits of a 32-bit product, signed or unsigned by the arrays' type; 16 and 64 bits likewise."""
    bits = a.dtype.itemsize * 8
    if bits == 64:
        product = [(int(x) * int(y)) >> 64 for x, y in zip(a, b, strict=True)]
        mask = (1 << 64) - 1
        return np.array([p & mask for p in product], dtype=U8).view(a.dtype)
    wide = I8 if a.dtype.kind == "i" else U8
    return (np.multiply(a, b, dtype=wide) >> bits).astype(a.dtype)


def mul_wide(a: Array, b: Array) -> Array:
    """Full product, twice as wide."""
    wide = {"u2": U4, "i2": I4, "u4": U8, "i4": I8}[a.dtype.str[1:]]
    return np.multiply(a, b, dtype=wide)


def divide(a: Array, b: Array) -> Array:
    """Integer division toward zero; division by zero gives all ones, as the hardware does."""
    zero = b == 0
    safe = np.where(zero, b.dtype.type(1), b)
    if a.dtype.kind == "i":
        q = np.abs(a.astype(np.int64)) // np.abs(safe.astype(np.int64))
        r = np.where((a < 0) != (safe < 0), -q, q).astype(a.dtype)
    else:
        r = a // safe
    return np.where(zero, a.dtype.type(-1 if a.dtype.kind == "i" else np.iinfo(a.dtype).max), r)


def remainder(a: Array, b: Array) -> Array:
    """Integer remainder with the dividend's sign; the dividend itself for a zero divisor."""
    zero = b == 0
    safe = np.where(zero, b.dtype.type(1), b)
    return np.where(zero, a, np.fmod(a, safe)).astype(a.dtype)


def shift_left(a: Array, n: Array) -> Array:
    """Shift left; amounts of the width or more give zero."""
    bits = a.dtype.itemsize * 8
    if bits == 32:
        return np.left_shift(a, n)  # NumPy defines over-long shifts as the PTX ISA does
    return np.where(n >= bits, a.dtype.type(0), a << np.minimum(n, bits - 1).astype(a.dtype))


def shift_right(a: Array, n: Array) -> Array:
    """Shift right, arithmetic for signed arrays; amounts of the width or more fill completely."""
    bits = a.dtype.itemsize * 8
    if a.dtype == U4:
        return np.right_shift(a, n)
    clamped = np.minimum(n, bits - 1).astype(a.dtype)
    if a.dtype.kind == "i":
        return a >> clamped
    return np.where(n >= bits, a.dtype.type(0), a >> clamped)


def funnel(side: str, mode: str) -> Callable[[Array, Array, Array], Array]:
    """``shf``: shift the pair (b high, a low) and take the upper (l) or lower (r) word."""

    def shift(a: Array, b: Array, c: Array) -> Array:
        n = (c & 31 if mode == "wrap" else np.minimum(c, 32)).astype(U8)
        pair = (b.astype(U8) << np.uint64(32)) | a.astype(U8)
        if side == "r":
            return (pair >> n).astype(U4)
        return ((pair << n) >> np.uint64(32)).astype(U4)

    return shift


def bit_extract(a: Array, pos: Array, length: Array) -> Array:
    """``bfe``: bits pos..pos+len-1, sign-extended for signed arrays (PTX ISA, bfe)."""
    bits = a.dtype.itemsize * 8
    signed = a.dtype.kind == "i"
    out = []
    for x, p, n in zip(a.tolist(), pos.tolist(), length.tolist(), strict=True):
        p, n = p & 255, n & 255
        u = x & ((1 << bits) - 1)
        value = (u >> p) & ((1 << min(n, bits)) - 1) if p < bits else 0
        if signed and n:
            top = min(p + n - 1, bits - 1)
            if (u >> top) & 1 and p + n - 1 >= 0:
                width = max(top - p + 1, 0)
                value |= ((1 << bits) - 1) & ~((1 << width) - 1)
        out.append(value)
    return np.array(out, dtype=U8).astype(U4 if bits == 32 else U8).view(a.dtype)


def bit_insert(a: Array, b: Array, pos: Array, length: Array) -> Array:
    """``bfi``: insert the low bits of ``a`` into ``b``."""
    bits = a.dtype.itemsize * 8
    full = (1 << bits) - 1
    out = []
    for x, y, p, n in zip(a.tolist(), b.tolist(), pos.tolist(), length.tolist(), strict=True):
        p, n = p & 255, n & 255
        mask = (((1 << n) - 1) << p) & full
        out.append((y & ~mask) | ((x << p) & mask))
    return np.array(out, dtype=U8).astype(a.dtype)


def permute(a: Array, b: Array, selector: Array) -> Array:
    """``prmt``, default mode: a selector nibble picks a byte of {b, a}; its bit 3 replicates the sign."""
    source = np.empty((len(a), 8), np.uint8)
    source[:, :4] = np.ascontiguousarray(a).view(np.uint8).reshape(-1, 4)
    source[:, 4:] = np.ascontiguousarray(b).view(np.uint8).reshape(-1, 4)
    out = np.empty((len(a), 4), np.uint8)
    rows = np.arange(len(a))
    for i in range(4):
        nibble = (selector >> np.uint32(4 * i)) & 15
        byte = source[rows, nibble & 7]
        out[:, i] = np.where(nibble & 8, np.where(byte & 128, 255, 0), byte)
    return out.view(U4).ravel()


def popcount(a: Array) -> Array:
    """Number of ones, as uint32."""
    return np.bitwise_count(a).astype(U4)


def leading_zeros(a: Array) -> Array:
    """``clz``."""
    bits = a.dtype.itemsize * 8
    return np.array([bits - int(x).bit_length() for x in a], dtype=U4)


def bit_find(a: Array) -> Array:
    """``bfind``: position of the highest bit that differs from the sign, all ones if there is none."""
    signed = a.dtype.kind == "i"
    out = [(~x if signed and x < 0 else x).bit_length() - 1 for x in a.tolist()]
    return np.array([x & 0xFFFFFFFF for x in out], dtype=U4)


def bit_reverse(a: Array) -> Array:
    """``brev.b32``."""
    return np.array([int(f"{x:032b}"[::-1], 2) for x in a.tolist()], dtype=U4)


def logic3(table: int) -> Callable[[Array, Array, Array], Array]:
    """``lop3``: bit k of the table is the result for the three source bits whose number is k."""

    def function(a: Array, b: Array, c: Array) -> Array:
        r = np.zeros_like(a)
        for k in range(8):
            if table >> k & 1:
                r |= (a if k & 4 else ~a) & (b if k & 2 else ~b) & (c if k & 1 else ~c)
        return r

    return function


def float_to_int(dtype: Any, mode: str) -> Callable[[Array], Array]:
    """``cvt`` to an integer with saturation; NaN gives zero."""
    info = np.iinfo(dtype)
    rounding = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[mode]

    def convert(x: Array) -> Array:
        y = rounding(x.astype(F8))
        out = [
            0 if v != v else info.max if v >= info.max else info.min if v <= info.min else int(v)
            for v in y.tolist()
        ]
        return np.array(out, dtype=dtype)

    return convert


def int_to_f32(mode: str) -> Callable[[Array], Array]:
    """Integer to float32 in a rounding mode; 64-bit integers go through Python's exact integers."""

    def convert(x: Array) -> Array:
        if x.dtype.itemsize < 8:
            return round_f64(x.astype(F8), mode)
        hi = x.astype(F8)
        low = np.array([v - int(h) for h, v in zip(hi.tolist(), x.tolist(), strict=True)], dtype=F8)
        return round_f64(sum_to_odd(hi, low), mode)

    return convert
