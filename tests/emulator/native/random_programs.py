"""Random PTX bodies: arithmetic, moves, guards, branches that part the lanes, loops, memory.

Integer registers never take the bits of float ones, so that a NaN's payload, which no rule fixes, cannot
reach them. Everything is stored at the end.
"""

from __future__ import annotations

import random

INTS, FLOATS, WIDES, PAIRS, HALVES, PREDICATES = 10, 8, 4, 4, 3, 4

_INT2 = [
    "add.s32", "sub.s32", "mul.lo.s32", "mul.hi.u32", "mul.hi.s32", "and.b32", "or.b32", "xor.b32", "min.s32",
    "max.u32", "shl.b32", "shr.u32", "shr.s32", "div.u32", "rem.s32", "add.sat.s32",
]  # fmt: skip
_INT1 = ["not.b32", "neg.s32", "abs.s32", "popc.b32", "clz.b32", "brev.b32", "cnot.b32"]
_INT3 = ["mad.lo.s32", "shf.l.wrap.b32", "shf.r.clamp.b32", "prmt.b32", "bfe.u32", "bfe.s32"]
_WIDE2 = ["add.s64", "sub.s64", "mul.lo.s64", "and.b64", "xor.b64", "max.s64", "min.u64"]
_FLOAT2 = [
    "add.f32", "sub.f32", "mul.f32", "add.ftz.f32", "mul.sat.f32", "min.f32", "max.f32", "max.NaN.f32",
    "add.rm.f32",     "mul.rz.f32", "div.rn.f32",
]  # fmt: skip
_FLOAT1 = [
    "abs.f32",
    "neg.ftz.f32",
    "ex2.approx.ftz.f32",
    "rcp.approx.f32",
    "rsqrt.approx.f32",
    "cvt.rni.f32.f32",
]
_PAIR2 = ["add.rn.f32x2", "mul.rn.ftz.f32x2", "sub.rn.f32x2", "add.rm.f32x2", "add.rm.ftz.f32x2"]


class _Body:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.lines: list[str] = []
        self.labels = 0

    def pick(self, prefix: str, n: int) -> str:
        return f"%{prefix}{self.rng.randrange(n)}"

    def r(self) -> str:
        return self.pick("r", INTS)

    def f(self) -> str:
        return self.pick("f", FLOATS)

    def wide(self) -> str:
        return self.pick("w", WIDES)

    def pair(self) -> str:
        return self.pick("x", PAIRS)

    def half(self) -> str:
        return self.pick("g", HALVES)

    def p(self) -> str:
        return self.pick("p", PREDICATES)

    def source(self) -> str:
        """An integer source: a register or a literal."""
        return (
            self.r() if self.rng.random() < 0.75 else str(self.rng.choice([0, 1, 5, 31, 255, 0x7FFFFFFF, -3]))
        )

    def emit(self, text: str, guard: bool = True) -> None:
        prefix = ""
        if guard and self.rng.random() < 0.2:
            prefix = f"@{'!' if self.rng.random() < 0.5 else ''}{self.p()} "
        self.lines.append(prefix + text)

    def statement(self) -> None:
        """One random instruction."""
        rng = self.rng
        kind = rng.randrange(19)
        if kind < 3:
            self.emit(f"{rng.choice(_INT2)} {self.r()}, {self.r()}, {self.source()};")
        elif kind == 3:
            self.emit(f"{rng.choice(_INT1)} {self.r()}, {self.r()};")
        elif kind == 4:
            self.emit(f"{rng.choice(_INT3)} {self.r()}, {self.r()}, {self.r()}, {self.r()};")
        elif kind == 5:
            self.emit(f"lop3.b32 {self.r()}, {self.r()}, {self.r()}, {self.r()}, {rng.randrange(256)};")
        elif kind == 6:
            self.emit(f"{rng.choice(_WIDE2)} {self.wide()}, {self.wide()}, {self.wide()};")
        elif kind == 7:
            self.emit(f"mad.wide.u32 {self.wide()}, {self.r()}, {self.source()}, {self.wide()};")
        elif kind == 8:
            self.emit(f"{rng.choice(_FLOAT2)} {self.f()}, {self.f()}, {self.f()};")
        elif kind == 9:
            self.emit(f"{rng.choice(_FLOAT1)} {self.f()}, {self.f()};")
        elif kind == 10:
            self.emit(f"fma.rn.f32 {self.f()}, {self.f()}, {self.f()}, {self.f()};")
        elif kind == 11:
            self.emit(f"{rng.choice(_PAIR2)} {self.pair()}, {self.pair()}, {self.pair()};")
        elif kind == 12:
            self.moves()
        elif kind == 13:
            compare = rng.choice(["lt", "ge", "eq", "ne"])
            self.emit(f"setp.{compare}.s32 {self.p()}, {self.r()}, {self.source()};")
        elif kind == 14:
            self.emit(f"setp.{rng.choice(['lt', 'geu', 'num'])}.f32 {self.p()}, {self.f()}, {self.f()};")
        elif kind == 15:
            self.emit(f"{rng.choice(['and', 'or', 'xor'])}.pred {self.p()}, {self.p()}, {self.p()};")
        elif kind == 16:
            self.emit(f"selp.b32 {self.r()}, {self.source()}, {self.r()}, {self.p()};")
        elif kind == 17:
            self.emit(f"selp.f32 {self.f()}, {self.f()}, {self.f()}, {self.p()};")
        else:
            self.conversions()

    def moves(self) -> None:
        """Renamings, which the translator only notes: swaps and rotations are the hard ones."""
        rng = self.rng
        kind = rng.randrange(8)
        a, b = self.pair(), self.pair()
        if kind == 0:
            self.emit(f"mov.b32 {self.r()}, {self.r()};")
        elif kind == 1:
            self.emit(f"mov.b32 {self.f()}, {self.f()};")
        elif kind == 2:
            x, y, t = self.r(), self.r(), self.r()
            self.lines += [f"mov.b32 {t}, {x};", f"mov.b32 {x}, {y};", f"mov.b32 {y}, {t};"]
        elif kind == 3:
            self.emit(f"mov.b64 {a}, {{{self.f()}, {self.f()}}};")
        elif kind == 4:
            self.emit(f"mov.b64 {{{self.f()}, {self.f()}}}, {a};")
        elif kind == 5:  # the halves of a pair change places
            x, y = rng.sample(range(FLOATS), 2)
            self.lines += [f"mov.b64 {{%f{x}, %f{y}}}, {a};", f"mov.b64 {b}, {{%f{y}, %f{x}}};"]
        elif kind == 6:
            self.emit(f"mov.b64 {self.wide()}, {{{self.r()}, {self.r()}}};")
        else:
            self.emit(f"mov.b32 {{{self.half()}, {self.half()}}}, {self.r()};")

    def conversions(self) -> None:
        rng = self.rng
        choices = [
            f"cvt.rn.f32.s32 {self.f()}, {self.r()};",
            f"cvt.rzi.s32.f32 {self.r()}, {self.f()};",
            f"cvt.u32.u64 {self.r()}, {self.wide()};",
            f"cvt.s64.s32 {self.wide()}, {self.r()};",
            f"cvt.u16.u32 {self.half()}, {self.r()};",
            f"cvt.s32.s16 {self.r()}, {self.half()};",
            f"cvt.rn.bf16x2.f32 {self.r()}, {self.f()}, {self.f()};",
            f"mov.b32 {self.r()}, {{{self.half()}, {self.half()}}};",
        ]
        self.emit(rng.choice(choices))

    def label(self) -> str:
        self.labels += 1
        return f"L{self.labels}"

    def region(self, depth: int, size: int) -> None:
        """Statements with a branch or a loop among them."""
        for _ in range(size):
            self.statement()
        if depth == 0:
            return
        kind = self.rng.randrange(3)
        if kind == 0:  # if, else
            other, end = self.label(), self.label()
            self.lines.append(f"@{self.p()} bra {other};")
            self.region(depth - 1, size)
            self.lines += [f"bra {end};", f"{other}:"]
            self.region(depth - 1, size)
            self.lines.append(f"{end}:")
        elif kind == 1:  # if
            end = self.label()
            self.lines.append(f"@!{self.p()} bra {end};")
            self.region(depth - 1, size)
            self.lines.append(f"{end}:")
        else:  # a loop whose number of trips differs between lanes
            head, counter = self.label(), f"%c{depth}"
            self.lines += [f"and.b32 {counter}, {self.r()}, 3;", f"{head}:"]
            self.region(depth - 1, size)
            self.lines += [
                f"sub.s32 {counter}, {counter}, 1;",
                f"setp.gt.s32 %pl, {counter}, 0;",
                f"@%pl bra {head};",
            ]
        for _ in range(size):
            self.statement()


def random_body(seed: int, depth: int = 2, size: int = 12) -> tuple[str, str, dict[str, int]]:
    """(declarations, body, stored words by buffer): buffer 0 holds inputs, 1 integers, 2 floats.

    Inputs are INTS + FLOATS words a thread; floats are small and finite at the start.
    """
    b = _Body(seed)
    declarations = (
        f".reg .b64 %w<{WIDES}>;\n.reg .b64 %x<{PAIRS}>;\n.reg .b16 %g<{HALVES}>;\n"
        ".reg .b32 %c<4>;\n.reg .pred %pl;\n"
    )
    n = INTS + FLOATS
    text = [f"mul.lo.s32 %c0, %tid, {4 * n};", "cvt.u64.u32 %a0, %c0;", "add.s64 %a0, %b0, %a0;"]
    text += [f"ld.global.b32 %r{i}, [%a0+{4 * i}];" for i in range(INTS)]
    text += [f"ld.global.f32 %f{i}, [%a0+{4 * (INTS + i)}];" for i in range(FLOATS)]
    text += [f"mov.b64 %w{i}, {{%r{i}, %r{i + 1}}};" for i in range(WIDES)]
    text += [f"mov.b64 %x{i}, {{%f{i}, %f{i + 1}}};" for i in range(PAIRS)]
    text += [f"cvt.u16.u32 %g{i}, %r{i};" for i in range(HALVES)]
    text += [f"setp.lt.s32 %p{i}, %r{i}, %r{i + 1};" for i in range(PREDICATES)]
    b.region(depth, size)
    ints = INTS + 2 * WIDES + HALVES + PREDICATES
    floats = FLOATS + 2 * PAIRS
    out = []
    for k, count in ((1, ints), (2, floats)):
        out += [f"mul.lo.s32 %c0, %tid, {4 * count};", "cvt.u64.u32 %a0, %c0;", f"add.s64 %a{k}, %b{k}, %a0;"]
    words = [f"%r{i}" for i in range(INTS)]
    at = 0
    for word in words:
        out.append(f"st.global.b32 [%a1+{4 * at}], {word};")
        at += 1
    for i in range(WIDES):
        out += [f"mov.b64 {{%c0, %c1}}, %w{i};", f"st.global.b32 [%a1+{4 * at}], %c0;"]
        out.append(f"st.global.b32 [%a1+{4 * at + 4}], %c1;")
        at += 2
    for i in range(HALVES):
        out += [f"cvt.u32.u16 %c0, %g{i};", f"st.global.b32 [%a1+{4 * at}], %c0;"]
        at += 1
    for i in range(PREDICATES):
        out += [f"selp.b32 %c0, 1, 0, %p{i};", f"st.global.b32 [%a1+{4 * at}], %c0;"]
        at += 1
    out += [f"st.global.f32 [%a2+{4 * i}], %f{i};" for i in range(FLOATS)]
    for i in range(PAIRS):
        out += [f"mov.b64 {{%f0, %f1}}, %x{i};", f"st.global.f32 [%a2+{4 * (FLOATS + 2 * i)}], %f0;"]
        out.append(f"st.global.f32 [%a2+{4 * (FLOATS + 2 * i) + 4}], %f1;")
    return declarations, "\n".join([*text, *b.lines, *out]), {"inputs": n, "ints": ints, "floats": floats}
