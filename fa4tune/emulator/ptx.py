"""What a parsed PTX module is made of: operands, instructions, entries.

These classes carry no behaviour. :mod:`fa4tune.emulator.parser` builds them, :mod:`fa4tune.emulator.isa` says
what each instruction means.
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: Register width by the letter classes that ``.reg`` declarations fall into.
REGISTER_CLASS = {
    "pred": "p",
    "b8": "h",
    "u8": "h",
    "s8": "h",
    "b16": "h",
    "u16": "h",
    "s16": "h",
    "f16": "h",
    "bf16": "h",
    "b32": "w",
    "u32": "w",
    "s32": "w",
    "f32": "w",
    "f16x2": "w",
    "bf16x2": "w",
    "b64": "d",
    "u64": "d",
    "s64": "d",
    "f64": "d",
    "f32x2": "d",
    "b128": "o",
}


@dataclass(frozen=True, slots=True)
class Register:
    """A register; ``index`` is unique in its entry, ``cls`` is p, h (16), w (32), d (64) or o (128)."""

    index: int
    name: str
    cls: str


@dataclass(frozen=True, slots=True)
class Immediate:
    """An integer literal, unlimited in size until an instruction gives it a width."""

    value: int


@dataclass(frozen=True, slots=True)
class FloatImmediate:
    """A float literal by its bits: ``0fXXXXXXXX`` has width 32, ``0dXXXXXXXXXXXXXXXX`` 64."""

    bits: int
    width: int


@dataclass(frozen=True, slots=True)
class Symbol:
    """The address of a parameter, a shared or a local variable, plus an offset in bytes."""

    name: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Special:
    """A special register such as ``%tid.x``."""

    name: str


@dataclass(frozen=True, slots=True)
class Sink:
    """The ``_`` destination, written and forgotten."""


@dataclass(frozen=True, slots=True)
class Negated:
    """A predicate source with ``!`` before it."""

    register: Register


@dataclass(frozen=True, slots=True)
class Vector:
    """``{a, b, ...}``."""

    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """``d|p``: two destinations in one operand."""

    first: Operand
    second: Operand


@dataclass(frozen=True, slots=True)
class Memory:
    """``[base + offset]``, or ``[base, {coordinates}]`` for a tensor."""

    base: Operand
    offset: int = 0
    coordinates: tuple[Operand, ...] | None = None


@dataclass(frozen=True, slots=True)
class Label:
    """A branch target; ``name`` is unique in its entry (a suffix tells inline-assembly scopes apart)."""

    name: str


Operand = (
    Register | Immediate | FloatImmediate | Symbol | Special | Sink | Negated | Vector | Pair | Memory | Label
)


@dataclass(slots=True)
class Instruction:
    """One statement. ``opcode`` is the first word before a dot, ``modifiers`` all that follows it."""

    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    line: int
    text: str
    predicate: Register | None = None
    predicate_negated: bool = False
    source: tuple[int, int] | None = None  # (file number, line) of the last .loc


@dataclass(slots=True)
class Parameter:
    """A kernel parameter: its size and alignment in bytes and its offset in the parameter block."""

    name: str
    nbytes: int
    align: int
    offset: int


@dataclass(slots=True)
class Variable:
    """A shared or local variable; ``nbytes`` is 0 for the extern array whose size the launch gives."""

    name: str
    space: str
    nbytes: int
    align: int
    extern: bool = False
    data: bytes | None = None


@dataclass(slots=True)
class Entry:
    """One kernel: its parameters, declared variables, instructions and labels (position in ``body``)."""

    name: str
    parameters: list[Parameter]
    variables: list[Variable]
    registers: list[Register]
    body: list[Instruction]
    labels: dict[str, int]
    required_threads: tuple[int, int, int] | None = None
    min_ctas: int = 1
    required_cluster: tuple[int, int, int] | None = None


@dataclass(slots=True)
class Module:
    """A PTX translation unit."""

    version: tuple[int, int]
    target: str
    entries: dict[str, Entry]
    variables: list[Variable]
    files: dict[int, str] = field(default_factory=dict)
