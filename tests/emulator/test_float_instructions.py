"""Float instructions against exact rational arithmetic, float64 and the documented error bounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

import tests.emulator.sixteen_bits as bf
from tests.emulator.emulator_harness import exact, lanes, random_floats, round_to, same_floats

MODES = ["rn", "rz", "rm", "rp"]


def finite(*values: float) -> bool:
    return all(math.isfinite(v) for v in values)


def reference(
    function: Callable[..., Fraction], mode: str, ieee: Callable[..., float], *xs: np.ndarray
) -> np.ndarray:
    """Exact result rounded once; what is not finite, and the sign of a zero, from IEEE arithmetic."""
    out = np.empty(len(xs[0]), np.float32)
    with np.errstate(all="ignore"):
        for i, args in enumerate(zip(*(x.tolist() for x in xs), strict=True)):
            plain = ieee(*(np.float32(a) for a in args))
            if not finite(*args):
                out[i] = plain
                continue
            value = function(*(exact(a) for a in args))
            out[i] = round_to(value, mode)
            if value == 0:
                out[i] = plain
                exact_signs = bool(np.signbit(plain))
                if mode == "rm" and not exact_signs and not all_positive_zero(ieee, args):
                    out[i] = -0.0
            elif out[i] == 0:
                out[i] = math.copysign(0.0, value)
    return out


def all_positive_zero(ieee: Callable[..., float], args: tuple[float, ...]) -> bool:
    """Whether a zero sum is +0 in every rounding mode: no cancellation of opposite signs took place."""
    if len(args) == 2:
        if ieee is np.multiply:
            return True
        a, b = args
        b = -b if ieee is np.subtract else b
        return not (math.copysign(1, a) < 0 or math.copysign(1, b) < 0)
    product = math.copysign(1, args[0]) * math.copysign(1, args[1])
    return not (product < 0 or math.copysign(1, args[2]) < 0)


def pairs(seed: int) -> tuple[np.ndarray, np.ndarray]:
    a, b = random_floats(640, seed), random_floats(640, seed + 1)
    rng = np.random.default_rng(seed)
    b[:18] = rng.permutation(a[:18])
    b[100:140] = -a[100:140]  # cancellation
    b[140:200] = (a[140:200] * rng.uniform(0.4, 2.5, 60)).astype(np.float32)
    a[200:230] = np.ldexp(a[200:230], -120)  # subnormal results
    b[200:230] = np.ldexp(b[200:230], -20)
    return a, b


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["add", "sub", "mul"])
def test_arithmetic_rounds_exactly_in_every_mode(name: str, mode: str) -> None:
    a, b = pairs(1)
    (got,) = lanes(f"{name}.{mode}.f32 %y0, %x0, %x1;", [("f32", a), ("f32", b)], ["f32"])
    function = {"add": lambda x, y: x + y, "sub": lambda x, y: x - y, "mul": lambda x, y: x * y}[name]
    ieee = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[name]
    assert same_floats(got, reference(function, mode, ieee, a, b))


@pytest.mark.parametrize("mode", MODES)
def test_fma_rounds_once_in_every_mode(mode: str) -> None:
    a, b = pairs(3)
    c = random_floats(640, 5)
    with np.errstate(all="ignore"):
        c[250:400] = (-(a[250:400] * b[250:400])).astype(np.float32)  # the rounding error of the product
        # half-way cases: a*b is a power of two, c one half ulp of it
        a[400:440], b[400:440], c[400:440] = 1.0, 1 + 2.0**-22, 2.0**-24
        a[440:480], b[440:480], c[440:480] = 1.0, 1 + 2.0**-23, 2.0**-24 + 2.0**-60
    (got,) = lanes(f"fma.{mode}.f32 %y0, %x0, %x1, %x2;", [("f32", a), ("f32", b), ("f32", c)], ["f32"])
    expected = reference(
        lambda x, y, z: x * y + z, mode, lambda x, y, z: np.float32(np.float64(x) * y + z), a, b, c
    )
    assert same_floats(got, expected)


@pytest.mark.parametrize(
    ("opcode", "n"),
    [("add.rn", 2), ("add.rm", 2), ("sub.rn", 2), ("mul.rn", 2), ("mul.rz", 2), ("fma.rn", 3), ("fma.rp", 3)],
)
def test_packed_arithmetic_equals_two_scalars(opcode: str, n: int) -> None:
    vectors = [random_floats(320, s, 20) for s in range(2 * n)]
    low = ", ".join(f"%x{i}" for i in range(n))
    high = ", ".join(f"%x{n + i}" for i in range(n))
    packs = "".join(f"mov.b64 %d{i}, {{%x{i}, %x{n + i}}};\n" for i in range(n))
    body = (
        packs + f"{opcode}.f32x2 %d9, {', '.join(f'%d{i}' for i in range(n))};\nmov.b64 {{%y0, %y1}}, %d9;\n"
    )
    body += f"{opcode}.f32 %y2, {low};\n{opcode}.f32 %y3, {high};"
    got = lanes(body, [("f32", v) for v in vectors], ["f32"] * 4)
    assert same_floats(got[0], got[2])
    assert same_floats(got[1], got[3])


def test_round_down_add_splits_the_integer_part() -> None:
    x = np.linspace(-126, 10, 512).astype(np.float32)
    body = "add.rm.f32 %f1, %x0, 0f4B400000;\nmov.b32 %y0, %f1;\nsub.rn.f32 %y1, %f1, 0f4B400000;"
    bits, floor = lanes(body, [("f32", x)], ["u32", "f32"])
    assert (floor == np.floor(x)).all()
    assert ((bits & 0xFF) == (np.floor(x).astype(np.int64) & 0xFF)).all()


def test_ftz_flushes_inputs_and_results_and_keeps_signs() -> None:
    a = np.array(
        [2.0**-127, -(2.0**-127), 2.0**-126, -(2.0**-126), np.nan, np.inf, 1.0, 2.0**-149], np.float32
    )
    half = np.full(8, 0.5, np.float32)
    (product,) = lanes("mul.ftz.f32 %y0, %x0, %x1;", [("f32", a), ("f32", half)], ["f32"])
    assert same_floats(product, np.array([0.0, -0.0, 0.0, -0.0, np.nan, np.inf, 0.5, 0.0], np.float32))
    (kept,) = lanes("mul.f32 %y0, %x0, %x1;", [("f32", a), ("f32", half)], ["f32"])
    assert kept[0] == 2.0**-128
    assert kept[2] == 2.0**-127


def test_saturation_clamps_and_sends_nan_to_zero() -> None:
    a = np.array([-1.0, 0.25, 3.0, np.nan, np.inf], np.float32)
    (got,) = lanes("add.sat.f32 %y0, %x0, 0f00000000;", [("f32", a)], ["f32"])
    assert got.tolist() == [0.0, 0.25, 1.0, 0.0, 1.0]


@pytest.mark.parametrize("name", ["min", "max"])
def test_min_and_max_ignore_nan_unless_asked(name: str) -> None:
    a, b = pairs(7)
    c = random_floats(640, 9)
    with np.errstate(all="ignore"):
        number = np.fmin if name == "min" else np.fmax
        poison = np.minimum if name == "min" else np.maximum
    inputs = [("f32", a), ("f32", b), ("f32", c)]
    body = f"{name}.f32 %y0, %x0, %x1;\n{name}.NaN.f32 %y1, %x0, %x1;\n{name}.f32 %y2, %x0, %x1, %x2;"
    two, nan, three = lanes(body, inputs, ["f32"] * 3)
    assert same_floats(two, number(a, b), signed_zero=False)
    assert same_floats(nan, poison(a, b), signed_zero=False)
    assert same_floats(three, number(number(a, b), c), signed_zero=False)


@pytest.mark.parametrize(
    ("compare", "expected"),
    [
        ("lt", lambda a, b: a < b), ("geu", lambda a, b: not a < b), ("eq", lambda a, b: a == b),
        ("ne", lambda a, b: a == a and b == b and a != b), ("neu", lambda a, b: a != b),
        ("num", lambda a, b: a == a and b == b), ("nan", lambda a, b: a != a or b != b),
        ("equ", lambda a, b: a == b or a != a or b != b), ("gt", lambda a, b: a > b),
    ],
)  # fmt: skip
def test_float_comparison_with_nan(compare: str, expected: Callable[[float, float], bool]) -> None:
    a, b = pairs(11)
    body = f"setp.{compare}.f32 %p1, %x0, %x1;\nselp.b32 %y0, 1, 0, %p1;"
    (got,) = lanes(body, [("f32", a), ("f32", b)], ["u32"])
    assert got.tolist() == [int(expected(x, y)) for x, y in zip(a.tolist(), b.tolist(), strict=True)]


# -- approximate functions: error bounds of the PTX ISA


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    usable = (
        np.isfinite(expected)
        & (expected != 0)
        & (np.abs(expected) >= 2.0**-126)
        & (np.abs(expected) < 2.0**128)
    )
    return float(np.max(np.abs(got[usable].astype(np.float64) - expected[usable]) / np.abs(expected[usable])))


def test_ex2_error_bound_edges_and_exact_powers() -> None:
    x = np.random.default_rng(13).uniform(-140, 128, 4096).astype(np.float32)
    x[:8] = [np.inf, -np.inf, np.nan, 0.0, -0.0, 128.0, -127.0, -150.0]
    full, flushed = lanes("ex2.approx.f32 %y0, %x0;\nex2.approx.ftz.f32 %y1, %x0;", [("f32", x)], ["f32"] * 2)
    with np.errstate(all="ignore"):
        expected = np.exp2(x.astype(np.float64))
    assert relative_error(full, expected) < 2.0**-22
    assert same_floats(flushed[:8], np.array([np.inf, 0, np.nan, 1, 1, np.inf, 0, 0], np.float32))
    assert ((flushed == 0) | (flushed >= 2.0**-126) | np.isnan(flushed)).all()
    whole = np.arange(-126, 128, dtype=np.float32)
    (powers,) = lanes("ex2.approx.ftz.f32 %y0, %x0;", [("f32", whole)], ["f32"])
    assert (powers == np.ldexp(np.float32(1), whole.astype(np.int32))).all()


@pytest.mark.parametrize(
    ("opcode", "function", "bound"),
    [
        ("rcp.approx.ftz.f32", lambda x: 1 / x, 2.0**-23),
        ("rcp.rn.f32", lambda x: 1 / x, 2.0**-24),
        ("sqrt.approx.f32", np.sqrt, 2.0**-23),
        ("rsqrt.approx.f32", lambda x: 1 / np.sqrt(x), 2.0**-22.9),
        ("tanh.approx.f32", np.tanh, 2.0**-11),
    ],
)
def test_approximate_functions_within_their_bound(
    opcode: str, function: Callable[[np.ndarray], np.ndarray], bound: float
) -> None:
    x = np.abs(random_floats(1024, 15, 30)[32:])
    (got,) = lanes(f"{opcode} %y0, %x0;", [("f32", x)], ["f32"])
    assert relative_error(got, function(x.astype(np.float64))) <= bound


def test_lg2_absolute_error_near_one_and_special_values() -> None:
    x = np.random.default_rng(17).uniform(0.5, 2, 2048).astype(np.float32)
    x[:6] = [0.0, np.inf, -1.0, np.nan, 1.0, 2.0**-127]
    (got,) = lanes("lg2.approx.ftz.f32 %y0, %x0;", [("f32", x)], ["f32"])
    assert same_floats(got[:6], np.array([-np.inf, np.inf, np.nan, np.nan, 0.0, -np.inf], np.float32))
    assert np.abs(got[6:] - np.log2(x[6:].astype(np.float64))).max() < 2.0**-22


def test_directed_reciprocal() -> None:
    x = random_floats(512, 19, 30)[32:]
    for mode in ("rz", "rm", "rp"):
        (got,) = lanes(f"rcp.{mode}.f32 %y0, %x0;", [("f32", x)], ["f32"])
        expected = [round_to(1 / exact(v), mode) for v in x.tolist()]
        assert same_floats(got, np.array(expected, np.float32))


# -- conversions


@pytest.mark.parametrize("half", ["bf16", "f16"])
@pytest.mark.parametrize("mode", ["rn", "rz"])
def test_packing_to_16_bits(half: str, mode: str) -> None:
    a, b = random_floats(640, 21, 18), random_floats(640, 22, 18)
    a[30:40] = [
        1 + 2.0**-8,
        1 + 3 * 2.0**-8,
        1 + 2.0**-11,
        1 + 3 * 2.0**-11,
        65504,
        65520,
        2.0**-24,
        2.0**-25,
        6e-8,
        65519,
    ]
    body = f"cvt.{mode}.{half}x2.f32 %y0, %x0, %x1;\ncvt.{mode}.{half}.f32 %y1, %x0;"
    packed, single = lanes(body, [("f32", a), ("f32", b)], ["u32", "u16"])
    expected_a = [bf.encode(v, half, mode) for v in a.tolist()]
    expected_b = [bf.encode(v, half, mode) for v in b.tolist()]
    assert bf.same(packed >> 16, expected_a, half)
    assert bf.same(packed & 0xFFFF, expected_b, half)
    assert bf.same(single, expected_a, half)


@pytest.mark.parametrize("half", ["bf16", "f16"])
def test_widening_from_16_bits_covers_every_value(half: str) -> None:
    x = np.arange(1 << 16, dtype=np.uint32)[::7].astype(np.uint16)
    (got,) = lanes(f"cvt.f32.{half} %y0, %x0;", [("u16", x)], ["f32"])
    assert same_floats(got, np.array([bf.decode(int(v), half) for v in x], np.float32))


@pytest.mark.parametrize("half", ["bf16", "f16"])
def test_16_bit_arithmetic_rounds_once(half: str) -> None:
    rng = np.random.default_rng(23)
    words = [rng.integers(0, 1 << 32, 320, dtype=np.uint32) for _ in range(3)]
    body = (
        f"fma.rn.{half}x2 %y0, %x0, %x1, %x2;\nadd.rn.{half}x2 %y1, %x0, %x1;\nmul.rn.{half}x2 %y2, %x0, %x1;"
    )
    fused, total, product = lanes(body, [("u32", w) for w in words], ["u32"] * 3)
    for shift in (0, 16):
        a, b, c = ([bf.decode(int(x) >> shift & 0xFFFF, half) for x in w] for w in words)
        for got, function in (
            (fused, lambda x, y, z: x * y + z),
            (total, lambda x, y, z: x + y),
            (product, lambda x, y, z: x * y),
        ):
            expected = []
            usable = []
            for x, y, z in zip(a, b, c, strict=True):
                usable.append(finite(x, y, z))
                value = function(exact(x), exact(y), exact(z)) if usable[-1] else Fraction(0)
                expected.append(bf.encode_fraction(value, half) & 0x7FFF | (0x8000 if value < 0 else 0))
            result = (got >> shift & 0xFFFF).tolist()
            wrong = [
                i
                for i in range(len(result))
                if usable[i] and result[i] != expected[i] and (result[i] | expected[i]) & 0x7FFF
            ]
            assert not wrong


def test_mixed_precision_fma_takes_bf16_factors() -> None:
    rng = np.random.default_rng(25)
    a, b = (rng.integers(0x3F00, 0x4100, 256).astype(np.uint16) for _ in range(2))
    c = random_floats(256, 26, 4)[:256]
    (got,) = lanes("fma.rn.f32.bf16 %y0, %x0, %x1, %x2;", [("u16", a), ("u16", b), ("f32", c)], ["f32"])
    for i in range(40, 256):
        value = exact(bf.decode(int(a[i]), "bf16")) * exact(bf.decode(int(b[i]), "bf16")) + exact(float(c[i]))
        assert got[i] == np.float32(round_to(value, "rn"))


@pytest.mark.parametrize(
    ("mode", "function"), [("rzi", math.trunc), ("rni", round), ("rmi", math.floor), ("rpi", math.ceil)]
)
@pytest.mark.parametrize("kind", ["s32", "u32", "s64"])
def test_float_to_integer_saturates(mode: str, function: Callable[[float], int], kind: str) -> None:
    x = random_floats(512, 27, 34)
    x[40:60] = np.arange(20) - 9.5
    width = kind[1:]
    (got,) = lanes(f"cvt.{mode}.{kind}.f32 %y0, %x0;", [("f32", x)], [f"u{width}"])
    low, high = (0, (1 << 32) - 1) if kind == "u32" else (-(1 << int(width) - 1), (1 << int(width) - 1) - 1)
    for value, result in zip(x.tolist(), got.tolist(), strict=True):
        expected = (
            0
            if math.isnan(value)
            else high
            if value == math.inf
            else low
            if value == -math.inf
            else max(low, min(high, function(value)))
        )
        assert result == expected & (1 << int(width)) - 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "u64"])
def test_integer_to_float_rounds_exactly(mode: str, kind: str) -> None:
    rng = np.random.default_rng(29)
    bits = int(kind[1:])
    x = rng.integers(0, 1 << bits, 320, dtype=np.uint64, endpoint=False) >> rng.integers(
        0, bits - 1, 320, dtype=np.uint64
    )
    x[:4] = [0, (1 << bits) - 1, 1 << bits - 1, (1 << 24) + 1]
    words = x.astype(np.uint64 if bits == 64 else np.uint32)
    (got,) = lanes(f"cvt.{mode}.f32.{kind} %y0, %x0;", [(f"u{bits}", words)], ["f32"])
    for value, result in zip(words.tolist(), got.tolist(), strict=True):
        number = value - (1 << bits) if kind[0] == "s" and value >> bits - 1 else value
        assert result == np.float32(round_to(Fraction(number), mode))


def test_rounding_float_to_integral_float() -> None:
    x = random_floats(256, 31, 10)
    body = "cvt.rni.f32.f32 %y0, %x0;\ncvt.rmi.f32.f32 %y1, %x0;\nabs.f32 %y2, %x0;\nneg.f32 %y3, %x0;"
    nearest, down, magnitude, negated = lanes(body, [("f32", x)], ["f32"] * 4)
    assert same_floats(nearest, np.rint(x))
    assert same_floats(down, np.floor(x))
    assert same_floats(magnitude, np.abs(x))
    assert same_floats(negated, -x)
