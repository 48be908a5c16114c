"""Integer instructions against Python integers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.emulator.emulator_harness import lanes

M16, M32, M64 = (1 << 16) - 1, (1 << 32) - 1, (1 << 64) - 1
EDGES = [0, 1, 2, 31, 32, 33, 63, 64, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x12345678]


def signed(x: int, bits: int) -> int:
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


def words(seed: int, bits: int = 32, n: int = 256) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 1 << bits, n, dtype=np.uint64)
    x[: len(EDGES)] = [e & ((1 << bits) - 1) for e in EDGES]
    x[64 : 64 + len(EDGES)] = rng.permutation(x[: len(EDGES)])
    return x.astype({16: np.uint16, 32: np.uint32, 64: np.uint64}[bits])


def check(body: str, inputs: list[tuple[str, np.ndarray]], output: str, expected: Callable[..., int]) -> None:
    (got,) = lanes(body, inputs, [output])
    mask = {"u16": M16, "u32": M32, "u64": M64}[output]
    want = [expected(*(int(v[i]) for _, v in inputs)) & mask for i in range(len(got))]
    wrong = [i for i, (g, w) in enumerate(zip(got.tolist(), want, strict=True)) if g != w]
    assert not wrong, [
        (tuple(hex(int(v[i])) for _, v in inputs), hex(got[i]), hex(want[i])) for i in wrong[:3]
    ]


def truncated(a: int, b: int) -> int:
    q = abs(a) // abs(b)
    return -q if (a < 0) != (b < 0) else q


BINARY_32: dict[str, Callable[[int, int], int]] = {
    "add.s32": lambda a, b: a + b,
    "sub.u32": lambda a, b: a - b,
    "mul.lo.u32": lambda a, b: a * b,
    "mul.lo.s32": lambda a, b: a * b,
    "mul.hi.u32": lambda a, b: a * b >> 32,
    "mul.hi.s32": lambda a, b: signed(a, 32) * signed(b, 32) >> 32,
    "min.u32": min,
    "max.s32": lambda a, b: max(signed(a, 32), signed(b, 32)),
    "min.s32": lambda a, b: min(signed(a, 32), signed(b, 32)),
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "shl.b32": lambda a, b: a << b if b < 32 else 0,
    "shr.u32": lambda a, b: a >> b if b < 32 else 0,
    "shr.s32": lambda a, b: signed(a, 32) >> min(b, 31),
    "add.sat.s32": lambda a, b: max(min(signed(a, 32) + signed(b, 32), (1 << 31) - 1), -(1 << 31)),
    "div.u32": lambda a, b: a // b if b else M32,
    "rem.u32": lambda a, b: a % b if b else a,
    "div.s32": lambda a, b: truncated(signed(a, 32), signed(b, 32)) if b else M32,
    "rem.s32": lambda a, b: (
        signed(a, 32) - signed(b, 32) * truncated(signed(a, 32), signed(b, 32)) if b else a
    ),
}


@pytest.mark.parametrize("opcode", sorted(BINARY_32))
def test_binary_32_bits(opcode: str) -> None:
    a, b = words(1), words(2)
    if opcode.startswith("sh"):
        b = np.where(np.arange(len(b)) % 2 == 0, b % 40, b).astype(np.uint32)
    check(f"{opcode} %y0, %x0, %x1;", [("u32", a), ("u32", b)], "u32", BINARY_32[opcode])


@pytest.mark.parametrize(
    ("opcode", "expected"),
    [
        ("add.s64", lambda a, b: a + b),
        ("sub.s64", lambda a, b: a - b),
        ("mul.lo.s64", lambda a, b: a * b),
        ("mul.hi.u64", lambda a, b: a * b >> 64),
        ("max.s64", lambda a, b: max(signed(a, 64), signed(b, 64))),
        ("xor.b64", lambda a, b: a ^ b),
    ],
)
def test_binary_64_bits(opcode: str, expected: Callable[[int, int], int]) -> None:
    check(f"{opcode} %y0, %x0, %x1;", [("u64", words(3, 64)), ("u64", words(4, 64))], "u64", expected)


@pytest.mark.parametrize("opcode", ["shl.b64", "shr.u64", "shr.s64"])
def test_shifts_64_bits(opcode: str) -> None:
    n = np.arange(256, dtype=np.uint32) % 80
    expected = {
        "shl.b64": lambda a, b: a << b if b < 64 else 0,
        "shr.u64": lambda a, b: a >> b if b < 64 else 0,
        "shr.s64": lambda a, b: signed(a, 64) >> min(b, 63),
    }[opcode]
    check(f"{opcode} %y0, %x0, %x1;", [("u64", words(5, 64)), ("u32", n)], "u64", expected)


@pytest.mark.parametrize(
    ("opcode", "expected"),
    [
        ("add.s16", lambda a, b: a + b),
        ("sub.s16", lambda a, b: a - b),
        ("mul.lo.u16", lambda a, b: a * b),
        ("and.b16", lambda a, b: a & b),
        ("max.s16", lambda a, b: max(signed(a, 16), signed(b, 16))),
    ],
)
def test_binary_16_bits(opcode: str, expected: Callable[[int, int], int]) -> None:
    check(f"{opcode} %y0, %x0, %x1;", [("u16", words(6, 16)), ("u16", words(7, 16))], "u16", expected)


@pytest.mark.parametrize(
    ("opcode", "kind", "wide", "expected"),
    [
        ("mul.wide.u16", "u16", "u32", lambda a, b: a * b),
        ("mul.wide.s16", "u16", "u32", lambda a, b: signed(a, 16) * signed(b, 16)),
        ("mul.wide.u32", "u32", "u64", lambda a, b: a * b),
        ("mul.wide.s32", "u32", "u64", lambda a, b: signed(a, 32) * signed(b, 32)),
    ],
)
def test_widening_products(opcode: str, kind: str, wide: str, expected: Callable[[int, int], int]) -> None:
    bits = 16 if kind == "u16" else 32
    check(f"{opcode} %y0, %x0, %x1;", [(kind, words(8, bits)), (kind, words(9, bits))], wide, expected)


@pytest.mark.parametrize(
    ("opcode", "expected"),
    [
        ("mad.lo.s32", lambda a, b, c: a * b + c),
        ("mad.hi.u32", lambda a, b, c: (a * b >> 32) + c),
        ("mad.hi.s32", lambda a, b, c: (signed(a, 32) * signed(b, 32) >> 32) + c),
        ("shf.l.wrap.b32", lambda a, b, c: ((b << 32 | a) << (c & 31)) >> 32),
        ("shf.r.wrap.b32", lambda a, b, c: (b << 32 | a) >> (c & 31)),
        ("shf.r.clamp.b32", lambda a, b, c: (b << 32 | a) >> min(c, 32)),
        ("shf.l.clamp.b32", lambda a, b, c: ((b << 32 | a) << min(c, 32)) >> 32),
        ("prmt.b32", None),
    ],
)
def test_ternary(opcode: str, expected: Callable[[int, int, int], int] | None) -> None:
    def permute(a: int, b: int, c: int) -> int:
        source = (a | b << 32).to_bytes(8, "little")
        out = 0
        for i in range(4):
            nibble = c >> 4 * i & 15
            byte = source[nibble & 7]
            out |= (0xFF if byte & 0x80 else 0) << 8 * i if nibble & 8 else byte << 8 * i
        return out

    three = [("u32", words(s)) for s in (10, 11, 12)]
    check(f"{opcode} %y0, %x0, %x1, %x2;", three, "u32", expected or permute)


def test_mad_wide_and_lop3() -> None:
    check(
        "mad.wide.u32 %y0, %x0, %x1, %x2;",
        [("u32", words(13)), ("u32", words(14)), ("u64", words(15, 64))],
        "u64",
        lambda a, b, c: a * b + c,
    )
    for table in (0x96, 0xE8, 0x1B, 0x00, 0xFF):

        def expected(a: int, b: int, c: int, table: int = table) -> int:
            return sum(
                (table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)) & 1) << i for i in range(32)
            )

        three = [("u32", words(s)) for s in (16, 17, 18)]
        check(f"lop3.b32 %y0, %x0, %x1, %x2, {table};", three, "u32", expected)


def extract(a: int, p: int, n: int, is_signed: bool, bits: int = 32) -> int:
    p, n = p & 255, n & 255
    out = 0
    sign = 0
    if is_signed and n:
        sign = a >> min(p + n - 1, bits - 1) & 1
    for i in range(bits):
        bit = a >> (p + i) & 1 if i < n and p + i < bits else sign
        out |= bit << i
    return out


@pytest.mark.parametrize("kind", ["u32", "s32"])
def test_bit_field_extract(kind: str) -> None:
    rng = np.random.default_rng(19)
    p, n = (rng.integers(0, 40, 256).astype(np.uint32) for _ in range(2))
    check(
        f"bfe.{kind} %y0, %x0, %x1, %x2;",
        [("u32", words(20)), ("u32", p), ("u32", n)],
        "u32",
        lambda a, x, y: extract(a, x, y, kind == "s32"),
    )


def test_bit_field_insert() -> None:
    rng = np.random.default_rng(21)
    p, n = (rng.integers(0, 33, 256).astype(np.uint32) for _ in range(2))

    def expected(a: int, b: int, p: int, n: int) -> int:
        out = b
        for i in range(n):
            if p + i < 32:
                out = out & ~(1 << p + i) | (a >> i & 1) << p + i
        return out

    check(
        "bfi.b32 %y0, %x0, %x1, %x2, %x3;",
        [("u32", words(22)), ("u32", words(23)), ("u32", p), ("u32", n)],
        "u32",
        expected,
    )


@pytest.mark.parametrize(
    ("opcode", "expected"),
    [
        ("not.b32", lambda a: ~a),
        ("neg.s32", lambda a: -a),
        ("abs.s32", lambda a: abs(signed(a, 32))),
        ("cnot.b32", lambda a: a == 0),
        ("popc.b32", lambda a: a.bit_count()),
        ("clz.b32", lambda a: 32 - a.bit_length()),
        ("brev.b32", lambda a: sum((a >> i & 1) << 31 - i for i in range(32))),
        ("bfind.u32", lambda a: a.bit_length() - 1),
        ("bfind.s32", lambda a: (~signed(a, 32) if signed(a, 32) < 0 else a).bit_length() - 1),
    ],
)
def test_unary(opcode: str, expected: Callable[[int], int]) -> None:
    check(f"{opcode} %y0, %x0;", [("u32", words(24))], "u32", expected)


@pytest.mark.parametrize("compare", ["eq", "ne", "lt", "le", "gt", "ge"])
@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_integer_comparison_and_selection(compare: str, kind: str) -> None:
    bits = int(kind[1:])
    a, b = words(25, bits), words(26, bits)
    b[::3] = a[::3]
    relation = {
        "eq": "__eq__",
        "ne": "__ne__",
        "lt": "__lt__",
        "le": "__le__",
        "gt": "__gt__",
        "ge": "__ge__",
    }

    def expected(x: int, y: int) -> int:
        if kind[0] == "s":
            x, y = signed(x, bits), signed(y, bits)
        return 5 if getattr(x, relation[compare])(y) else 9

    body = f"setp.{compare}.{kind} %p1, %x0, %x1;\nselp.b32 %y0, 5, 9, %p1;"
    check(body, [(f"u{bits}", a), (f"u{bits}", b)], "u32", expected)


def test_setp_with_two_results_and_a_combination() -> None:
    body = """
    setp.ne.b32 %p3, %x2, 0;
    setp.lt.and.s32 %p1|%p2, %x0, %x1, %p3;
    selp.b32 %r1, 1, 0, %p1;
    selp.b32 %r2, 2, 0, %p2;
    @!%p3 add.s32 %r2, %r2, 4;
    or.b32 %y0, %r1, %r2;
    """

    def expected(a: int, b: int, c: int) -> int:
        less = signed(a, 32) < signed(b, 32)
        flag = c != 0
        return (less and flag) * 1 + (not less and flag) * 2 + (not flag) * 4

    c = words(27) % 2
    check(body, [("u32", words(28)), ("u32", words(29)), ("u32", c.astype(np.uint32))], "u32", expected)


@pytest.mark.parametrize(
    ("opcode", "source", "target", "expected"),
    [
        ("cvt.u32.u16", "u16", "u32", lambda a: a),
        ("cvt.s32.s16", "u16", "u32", lambda a: signed(a, 16)),
        ("cvt.u16.u32", "u32", "u16", lambda a: a),
        ("cvt.s64.s32", "u32", "u64", lambda a: signed(a, 32)),
        ("cvt.u64.u32", "u32", "u64", lambda a: a),
        ("cvt.u32.u64", "u64", "u32", lambda a: a),
        ("cvt.s16.s8", "u16", "u16", lambda a: signed(a, 8)),
        ("cvt.s32.s8", "u32", "u32", lambda a: signed(a, 8)),
        ("cvt.u32.u8", "u32", "u32", lambda a: a & 255),
        ("cvt.u8.u32", "u32", "u32", lambda a: a & 255),
        ("cvt.sat.u16.s32", "u32", "u16", lambda a: max(0, min(signed(a, 32), M16))),
    ],
)
def test_integer_conversion(opcode: str, source: str, target: str, expected: Callable[[int], int]) -> None:
    check(f"{opcode} %y0, %x0;", [(source, words(30, int(source[1:])))], target, expected)


def test_moves_between_widths() -> None:
    body = """
    mov.b64 {%r1, %r2}, %x0;
    mov.b32 {%h1, %h2}, %r1;
    mov.b32 %r3, {%h2, %h1};
    mov.b64 %y0, {%r2, %r3};
    """
    check(
        body,
        [("u64", words(31, 64))],
        "u64",
        lambda a: a >> 32 | ((a & M16) << 16 | (a >> 16 & M16)) << 32,
    )
