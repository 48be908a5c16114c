"""The instruction table: what each PTX instruction reads, writes and does, for any back-end.

:func:`decode` turns a parsed instruction into an :class:`Operation`: a canonical name, operands with kinds,
and attributes. A back-end maps names to code. Kinds are one letter each:

======  ==================================  ======  ==================================
``p``   predicate                           ``x``   two float32 in 64 bits
``h s`` 16 bits unsigned, signed            ``F G`` float16, bfloat16
``u i`` 32 bits unsigned, signed            ``V B`` two float16, two bfloat16
``q l`` 64 bits unsigned, signed            ``f d`` float32, float64
``H W Q`` 16, 32, 64 bits that only move
======  ==================================  ======  ==================================

Decoding is strict: modifiers are consumed in the order of the PTX ISA and one that is left over is an
error, so an instruction is either modelled or refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fa4tune.emulator.parser import PtxError
from fa4tune.emulator.ptx import Immediate, Instruction, Label, Memory, Operand, Pair, Sink, Vector

TYPE_KIND = {
    "u16": "h", "b16": "h", "s16": "s", "u32": "u", "b32": "u", "s32": "i", "u64": "q", "b64": "q",
    "s64": "l",
    "f32": "f", "f64": "d", "f32x2": "x", "f16": "F", "bf16": "G", "f16x2": "V", "bf16x2": "B", "pred": "p",
}  # fmt: skip
RAW_KIND = {
    "h": "H",
    "s": "H",
    "u": "W",
    "i": "W",
    "f": "W",
    "q": "Q",
    "l": "Q",
    "d": "Q",
    "x": "Q",
    "p": "p",
}
RAW_KIND |= {"F": "H", "G": "H", "V": "W", "B": "W"}
INT_TYPES = ("u16", "s16", "u32", "s32", "u64", "s64")
BIT_TYPES = ("b16", "b32", "b64")
ROUNDINGS = ("rn", "rz", "rm", "rp")


@dataclass(slots=True)
class Operation:
    """One decoded instruction; ``dst`` and ``src`` are flat and as long as their kind strings."""

    op: str
    category: str  # alu (pure, lane by lane), system (touches the machine), branch, exit
    dst: tuple[Operand, ...]
    dst_kinds: str
    src: tuple[Operand, ...]
    src_kinds: str
    unit: str
    instruction: Instruction
    attrs: dict[str, Any] = field(default_factory=dict)
    suspends: bool = False


class Modifiers:
    """The modifiers of one instruction, consumed left to right."""

    def __init__(self, instruction: Instruction) -> None:
        self.instruction = instruction
        self.rest = list(instruction.modifiers)

    def take(self, *options: str) -> str | None:
        """Consume the next modifier if it is one of ``options``."""
        if self.rest and self.rest[0] in options:
            return self.rest.pop(0)
        return None

    def need(self, *options: str) -> str:
        """Consume the next modifier, which must be one of ``options``."""
        found = self.take(*options)
        if found is None:
            have = self.rest[0] if self.rest else "nothing"
            raise unsupported(
                self.instruction, f"has .{have} where one of .{', .'.join(options)} is modelled"
            )
        return found

    def done(self) -> None:
        """Refuse what is left over."""
        if self.rest:
            raise unsupported(self.instruction, f"has a modifier that is not modelled, .{self.rest[0]}")


def unsupported(instruction: Instruction, why: str) -> PtxError:
    """The error for an instruction outside of the model."""
    return PtxError(f"`{instruction.opcode}` {why}", instruction.line, instruction.text)


Decoder = Callable[[Instruction, Modifiers], Operation]
DECODERS: dict[str, Decoder] = {}


def opcode(*names: str) -> Callable[[Decoder], Decoder]:
    """Register a decoder for these opcodes."""

    def register(decoder: Decoder) -> Decoder:
        for name in names:
            DECODERS[name] = decoder
        return decoder

    return register


def decode(instruction: Instruction) -> Operation:
    """Decode one instruction; raises :class:`PtxError` for one that is not modelled."""
    decoder = DECODERS.get(instruction.opcode)
    if decoder is None:
        raise PtxError("unknown instruction", instruction.line, instruction.text)
    modifiers = Modifiers(instruction)
    try:
        operation = decoder(instruction, modifiers)
    except (IndexError, KeyError):  # the decoder looked for an operand or a type that is not there
        raise unsupported(instruction, "lacks an operand or a modifier, or has a type not allowed") from None
    modifiers.done()
    if len(operation.dst) != len(operation.dst_kinds) or len(operation.src) != len(operation.src_kinds):
        raise unsupported(instruction, "has an unexpected number of operands")
    return operation


def alu(
    instruction: Instruction, op: str, dst_kinds: str, src_kinds: str, unit: str, **attrs: Any
) -> Operation:
    """A pure lane-by-lane operation whose destinations come first among the operands."""
    operands = instruction.operands
    dst: tuple[Operand, ...] = operands[:1]
    if dst and isinstance(dst[0], Pair):
        dst = (dst[0].first, dst[0].second)
    return Operation(op, "alu", dst, dst_kinds, operands[1:], src_kinds, unit, instruction, attrs)


def operand_count(instruction: Instruction, *allowed: int) -> int:
    """The number of operands, which must be one of ``allowed``."""
    n = len(instruction.operands)
    if n not in allowed:
        raise unsupported(
            instruction, f"has {n} operands where {' or '.join(map(str, allowed))} are modelled"
        )
    return n


# -- moves and selection


@opcode("mov")
def _mov(ins: Instruction, m: Modifiers) -> Operation:
    kind = TYPE_KIND[m.need(*INT_TYPES, *BIT_TYPES, "f32", "f64", "pred")]
    operand_count(ins, 2)
    d, s = ins.operands
    raw = RAW_KIND[kind]
    if isinstance(s, Vector):
        part = {("Q", 2): "W", ("W", 2): "H", ("Q", 4): "H"}.get((raw, len(s.items)))
        if part is None:
            raise unsupported(ins, "packs a vector of this shape")
        op = f"pack.{raw}{part}"
        return Operation(op, "alu", (d,), raw, s.items, part * len(s.items), "move", ins)
    if isinstance(d, Vector):
        part = {("Q", 2): "W", ("W", 2): "H", ("Q", 4): "H"}.get((raw, len(d.items)))
        if part is None:
            raise unsupported(ins, "unpacks a vector of this shape")
        op = f"unpack.{raw}{part}"
        return Operation(op, "alu", d.items, part * len(d.items), (s,), raw, "move", ins)
    return alu(ins, "mov", raw, raw, "move")


@opcode("cvta")
def _cvta(ins: Instruction, m: Modifiers) -> Operation:
    to = m.take("to") is not None
    space = m.need("param", "shared", "global", "local", "shared::cta", "shared::cluster", "const").split(
        ":"
    )[0]
    size = m.need("u64", "u32")
    if size == "u32":
        raise unsupported(ins, "converts a 32-bit generic address")
    return alu(ins, f"cvta{'.to' if to else ''}.{space}", "q", "q", "int")


@opcode("selp")
def _selp(ins: Instruction, m: Modifiers) -> Operation:
    kind = TYPE_KIND[m.need(*INT_TYPES, *BIT_TYPES, "f32", "f64")]
    raw = RAW_KIND[kind] if kind not in "fd" else kind
    return alu(ins, "selp", raw, raw + raw + "p", "select")


@opcode("setp")
def _setp(ins: Instruction, m: Modifiers) -> Operation:
    compare = m.need(
        "eq", "ne", "lt", "le", "gt", "ge", "lo", "ls", "hi", "hs",
        "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan",
    )  # fmt: skip
    combine = m.take("and", "or", "xor")
    ftz = m.take("ftz") is not None
    kind = TYPE_KIND[m.need(*INT_TYPES, *BIT_TYPES, "f32", "f64", "f16", "bf16")]
    if kind not in "fdFG":
        compare = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(compare, compare)
        if compare not in ("eq", "ne", "lt", "le", "gt", "ge"):
            raise unsupported(ins, f"compares integers with .{compare}")
    two = isinstance(ins.operands[0], Pair)
    op = f"setp.{compare}{'.ftz' if ftz else ''}"
    if combine is not None:
        return alu(ins, f"{op}.{combine}", "pp" if two else "p", kind * 2 + "p", "predicate", two=two)
    return alu(ins, op, "pp" if two else "p", kind * 2, "predicate", two=two)


@opcode("set")
def _set(ins: Instruction, m: Modifiers) -> Operation:
    compare = m.need(
        "eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"
    )
    ftz = m.take("ftz") is not None
    result = m.need("u32", "s32", "f32")
    kind = TYPE_KIND[m.need(*INT_TYPES, *BIT_TYPES, "f32")]
    return alu(
        ins, f"set.{compare}{'.ftz' if ftz else ''}.{result}", TYPE_KIND[result], kind * 2, "predicate"
    )


# -- integers


def _integer_or_float(ins: Instruction, m: Modifiers) -> Operation:
    """add, sub, mul of any type."""
    name = ins.opcode
    if name == "mul":
        wide = m.take("lo", "hi", "wide")
        if wide is not None:
            kind = TYPE_KIND[m.need(*INT_TYPES)]
            if wide == "wide":
                result = {"h": "u", "s": "i", "u": "q", "i": "l"}.get(kind)
                if result is None:
                    raise unsupported(ins, "widens 64 bits")
                return alu(ins, "mul.wide", result, kind * 2, "int")
            return alu(ins, f"mul.{wide}", kind, kind * 2, "int")
    if name in ("add", "sub"):
        saturate = m.take("sat") if ins.modifiers[-1] == "s32" else None
        carry = m.take("cc")
        if carry is not None:
            raise unsupported(ins, "sets the carry")
        kind_name = m.take(*INT_TYPES)
        if kind_name is not None:
            op = name + (".sat" if saturate else "")
            return alu(ins, op, TYPE_KIND[kind_name], TYPE_KIND[kind_name] * 2, "int")
    rounding = m.take(*ROUNDINGS) or "rn"
    ftz = m.take("ftz") is not None
    saturate = m.take("sat")
    kind = TYPE_KIND[m.need("f32", "f64", "f32x2", "f16", "bf16", "f16x2", "bf16x2")]
    op = f"{name}.{rounding}{'.ftz' if ftz else ''}{'.sat' if saturate else ''}"
    return alu(ins, op, kind, kind * 2, "float")


for _name in ("add", "sub", "mul"):
    DECODERS[_name] = _integer_or_float


@opcode("mad", "fma")
def _mad(ins: Instruction, m: Modifiers) -> Operation:
    if ins.opcode == "mad":
        which = m.take("lo", "hi", "wide")
        if which is not None:
            kind = TYPE_KIND[m.need(*INT_TYPES)]
            if which == "wide":
                result = {"h": "u", "s": "i", "u": "q", "i": "l"}[kind]
                return alu(ins, "mad.wide", result, kind * 2 + result, "int")
            return alu(ins, f"mad.{which}", kind, kind * 3, "int")
    rounding = m.need(*ROUNDINGS)
    ftz = m.take("ftz") is not None
    saturate = m.take("sat")
    relu = m.take("relu")
    kind_name = m.need("f32", "f64", "f32x2", "f16", "bf16", "f16x2", "bf16x2")
    kind = TYPE_KIND[kind_name]
    source = m.take("bf16", "f16") if kind_name == "f32" else None
    suffix = f"{'.ftz' if ftz else ''}{'.sat' if saturate else ''}{'.relu' if relu else ''}"
    op = f"fma.{rounding}{suffix}"
    if source is not None:  # sm_100 mixed precision: the factors are 16-bit, the addend and result float32
        return alu(ins, op, "f", TYPE_KIND[source] * 2 + "f", "fma")
    return alu(ins, op, kind, kind * 3, "fma")


@opcode("div", "rem")
def _div(ins: Instruction, m: Modifiers) -> Operation:
    kind_name = m.take(*INT_TYPES)
    if kind_name is not None:
        return alu(ins, ins.opcode, TYPE_KIND[kind_name], TYPE_KIND[kind_name] * 2, "int")
    accuracy = m.need("approx", "full", *ROUNDINGS)
    ftz = m.take("ftz") is not None
    kind = TYPE_KIND[m.need("f32", "f64")]
    return alu(ins, f"div.{accuracy}{'.ftz' if ftz else ''}", kind, kind * 2, "float")


@opcode("min", "max")
def _minmax(ins: Instruction, m: Modifiers) -> Operation:
    relu = ".relu" if m.take("relu") else ""  # a negative result becomes 0
    kind_name = m.need("s32") if relu else m.take(*INT_TYPES)
    if kind_name is not None:
        return alu(ins, f"{ins.opcode}{relu}", TYPE_KIND[kind_name], TYPE_KIND[kind_name] * 2, "int")
    ftz = m.take("ftz") is not None
    nan = m.take("NaN")
    absolute = m.take("xorsign")
    if absolute is not None:
        m.need("abs")
    kind = TYPE_KIND[m.need("f32", "f64", "f16", "bf16", "f16x2", "bf16x2")]
    n = operand_count(ins, 3, 4) - 1
    suffix = f"{'.ftz' if ftz else ''}{'.NaN' if nan else ''}{'.xorsign' if absolute else ''}"
    return alu(ins, f"{ins.opcode}{n if n == 3 else ''}{suffix}", kind, kind * n, "float")


@opcode("abs", "neg")
def _absneg(ins: Instruction, m: Modifiers) -> Operation:
    kind_name = m.take("s16", "s32", "s64")
    if kind_name is not None:
        return alu(ins, ins.opcode, TYPE_KIND[kind_name], TYPE_KIND[kind_name], "int")
    ftz = m.take("ftz") is not None
    kind = TYPE_KIND[m.need("f32", "f64", "f16", "bf16", "f16x2", "bf16x2")]
    return alu(ins, f"{ins.opcode}{'.ftz' if ftz else ''}", kind, kind, "float")


@opcode("and", "or", "xor", "not", "cnot")
def _logic(ins: Instruction, m: Modifiers) -> Operation:
    kind = TYPE_KIND[m.need("pred", *BIT_TYPES)]
    n = operand_count(ins, 2 if ins.opcode in ("not", "cnot") else 3) - 1
    return alu(ins, ins.opcode, kind, kind * n, "predicate" if kind == "p" else "int")


@opcode("shl", "shr")
def _shift(ins: Instruction, m: Modifiers) -> Operation:
    types = BIT_TYPES if ins.opcode == "shl" else (*BIT_TYPES, *INT_TYPES)
    kind = TYPE_KIND[m.need(*types)]
    return alu(ins, ins.opcode, kind, kind + "u", "int")


@opcode("shf")
def _funnel(ins: Instruction, m: Modifiers) -> Operation:
    side = m.need("l", "r")
    mode = m.need("wrap", "clamp")
    m.need("b32")
    return alu(ins, f"shf.{side}.{mode}", "u", "uuu", "int")


@opcode("bfe", "bfi", "prmt", "popc", "clz", "brev", "bfind", "lop3", "sad", "dp4a")
def _bits(ins: Instruction, m: Modifiers) -> Operation:
    name = ins.opcode
    if name == "bfe":
        kind = TYPE_KIND[m.need("u32", "s32", "u64", "s64")]
        return alu(ins, name, kind, kind + "uu", "int")
    if name == "bfi":
        kind = TYPE_KIND[m.need("b32", "b64")]
        return alu(ins, name, kind, kind * 2 + "uu", "int")
    if name == "prmt":
        m.need("b32")
        if m.rest:
            raise unsupported(ins, f"uses the mode .{m.rest[0]}")
        return alu(ins, name, "u", "uuu", "int")
    if name in ("popc", "clz"):
        kind = TYPE_KIND[m.need("b32", "b64")]
        return alu(ins, name, "u", kind, "int")
    if name == "brev":
        kind = TYPE_KIND[m.need("b32")]
        return alu(ins, name, kind, kind, "int")
    if name == "bfind":
        if m.take("shiftamt"):
            raise unsupported(ins, "uses .shiftamt")
        kind = TYPE_KIND[m.need("u32", "s32", "u64", "s64")]
        return alu(ins, name, "u", kind, "int")
    if name == "lop3":
        m.need("b32")
        table = ins.operands[-1]
        if not isinstance(table, Immediate):
            raise unsupported(ins, "has a truth table that is no literal")
        done = alu(ins, name, "u", "uuu", "int", table=table.value)
        done.src = done.src[:3]
        return done
    raise unsupported(ins, "is not modelled")


# -- float functions


@opcode("ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh")
def _function(ins: Instruction, m: Modifiers) -> Operation:
    exact = ("approx", *ROUNDINGS) if ins.opcode in ("rcp", "sqrt") else ("approx",)
    accuracy = m.need(*exact)
    ftz = m.take("ftz") is not None
    types = ("f32", "f16", "f16x2", "bf16", "bf16x2") if ins.opcode in ("ex2", "tanh") else ("f32",)
    kind = TYPE_KIND[m.need(*types)]
    unit = "mufu_ex2" if ins.opcode == "ex2" else "mufu"
    return alu(ins, f"{ins.opcode}.{accuracy}{'.ftz' if ftz else ''}", kind, kind, unit)


@opcode("copysign", "testp")
def _sign(ins: Instruction, m: Modifiers) -> Operation:
    if ins.opcode == "copysign":
        kind = TYPE_KIND[m.need("f32")]
        return alu(ins, "copysign", kind, kind * 2, "float")
    test = m.need("finite", "infinite", "number", "notanumber", "normal", "subnormal")
    kind = TYPE_KIND[m.need("f32")]
    return alu(ins, f"testp.{test}", "p", kind, "predicate")


@opcode("cvt")
def _cvt(ins: Instruction, m: Modifiers) -> Operation:
    pack = m.take("pack")
    if pack is not None:
        raise unsupported(ins, "packs with saturation")
    rounding = m.take(*ROUNDINGS, "rni", "rzi", "rmi", "rpi", "rna")
    ftz = m.take("ftz") is not None
    relu = m.take("relu")
    saturate = m.take("sat", "satfinite")
    names = ("u8", "s8", *INT_TYPES, "f32", "f64", "f16", "bf16", "f16x2", "bf16x2")
    to = m.need(*names)
    relu = relu or m.take("relu")
    of = m.need(*names)
    kinds = {**TYPE_KIND, "u8": "h", "s8": "s"}
    suffix = "".join(f".{x}" for x in (rounding, "ftz" if ftz else None, relu, saturate) if x)
    n = operand_count(ins, 2, 3) - 1
    if n == 2:
        if to not in ("f16x2", "bf16x2") or of != "f32":
            raise unsupported(ins, "packs two values of these types")
        return alu(ins, f"cvt.{to}.f32{suffix}", kinds[to], "ff", "convert")
    # An 8-bit value lives in the low bits of a 16-, 32- or 64-bit register (PTX ISA, operand size exceeding).
    src = ins.operands[1]
    dst = ins.operands[0]
    src_kind, dst_kind = kinds[of], kinds[to]
    if of in ("u8", "s8"):
        src_kind = {"h": "h", "w": "u", "d": "q"}[getattr(src, "cls", "h")]
    if to in ("u8", "s8"):
        dst_kind = {"h": "h", "w": "u", "d": "q"}[getattr(dst, "cls", "h")]
    return alu(ins, f"cvt.{to}.{of}{suffix}", dst_kind, src_kind, "convert")


# -- control


@opcode("bra", "ret", "exit", "trap", "brkpt")
def _control(ins: Instruction, m: Modifiers) -> Operation:
    if ins.opcode == "bra":
        m.take("uni")
        operand_count(ins, 1)
        if not isinstance(ins.operands[0], Label):
            raise unsupported(ins, "goes to something that is no label")
        return Operation("bra", "branch", (), "", (), "", "control", ins, {"target": ins.operands[0]})
    if ins.opcode in ("ret", "exit"):
        m.take("uni")
        operand_count(ins, 0)
        return Operation("exit", "exit", (), "", (), "", "control", ins)
    return Operation(ins.opcode, "system", (), "", (), "", "control", ins)


def flat(operands: tuple[Operand, ...]) -> tuple[Operand, ...]:
    """Operands with vectors replaced by their items."""
    out: list[Operand] = []
    for operand in operands:
        out.extend(operand.items if isinstance(operand, Vector) else (operand,))
    return tuple(out)


def address(ins: Instruction, operand: Operand) -> tuple[Operand, int]:
    """Base and offset of a ``[base + offset]`` operand."""
    if not isinstance(operand, Memory) or operand.coordinates is not None:
        raise unsupported(ins, "wants an address here")
    return operand.base, operand.offset


def sink_or(operand: Operand) -> tuple[Operand, ...]:
    """A destination, or nothing for ``_``."""
    return () if isinstance(operand, Sink) else (operand,)
