"""Basic blocks to Python functions over 32-lane NumPy vectors.

A block has two functions: one for a warp with all lanes active, one for a partial mask, which computes on all
lanes too and merges what lives on. Registers are local variables inside a block and live in
``warp.registers`` between blocks. Arrays are never written in place, so moves only bind names.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

import numpy as np

from fa4tune.emulator import lanes, numpy_alu
from fa4tune.emulator.cfg import EXIT, Block, Program, registers_of
from fa4tune.emulator.checks_registers import RegisterPlan
from fa4tune.emulator.isa import Operation, unsupported
from fa4tune.emulator.ptx import (
    FloatImmediate,
    Immediate,
    Instruction,
    Negated,
    Operand,
    Register,
    Special,
    Symbol,
)

SUSPEND = -1  #: a block function's answer when its first operation must wait
REDIRECT = -2  #: the warp's own program counter says where to go on (divergence, exit)
PARAM_WINDOW = 1 << 57  #: generic address of the parameter block
SHARED_WINDOW = 1 << 56  #: generic address of shared::cluster address 0
LOCAL_WINDOW = 1 << 58  #: generic address of local memory

RuntimeFunction = Callable[..., Any]
RuntimeFactory = Callable[[Operation], RuntimeFunction]
#: System operations by name; the modules ``runtime_*`` fill it.
RUNTIME: dict[str, RuntimeFactory] = {}


def runtime(*names: str) -> Callable[[RuntimeFactory], RuntimeFactory]:
    """Register the maker of a system operation's function ``f(warp, mask, *sources)``."""

    def register(factory: RuntimeFactory) -> RuntimeFactory:
        for name in names:
            RUNTIME[name] = factory
        return factory

    return register


_VIEW = {  # (stored kind, wanted kind) -> expression; the same kind needs none
    ("u", "i"): "{}.view(I4)", ("u", "f"): "{}.view(F4)", ("f", "u"): "{}.view(U4)", ("f",
    "i"): "{}.view(I4)",
    ("q", "l"): "{}.view(I8)", ("q", "d"): "{}.view(F8)", ("q", "x"): "q_to_x({})", ("x", "q"): "x_to_q({})",
    ("x", "l"): "x_to_q({}).view(I8)", ("x", "d"): "x_to_q({}).view(F8)", ("h", "s"): "{}.view(I2)",
}  # fmt: skip
_SAME = {"V": "u", "B": "u", "W": "u", "Q": "q", "H": "h", "F": "h", "G": "h"}
_BACK = {
    ("i", "u"): "{}.view(U4)", ("f", "u"): "{}.view(U4)", ("u", "f"): "{}.view(F4)", ("i",
    "f"): "{}.view(F4)",
    ("l", "q"): "{}.view(U8)", ("d", "q"): "{}.view(U8)", ("q", "x"): "q_to_x({})", ("x", "q"): "x_to_q({})",
    ("l", "x"): "q_to_x({}.view(U8))", ("d", "x"): "q_to_x({}.view(U8))", ("s", "h"): "{}.view(U2)",
}  # fmt: skip
#: Operations whose result bits do not depend on signedness are computed unsigned, without a view.
_SIGNLESS = {"add", "sub", "mul.lo", "mad.lo", "and", "or", "xor", "not", "shl", "neg", "setp.eq", "setp.ne"}
_UNSIGNED = str.maketrans("isl", "uhq")
#: Written out by the block writer itself.
_MOVES = ("mov", "pack", "unpack", "cvta")


def q_to_x(a: lanes.Array) -> lanes.Array:
    """64-bit words to a float32 pair of shape (2, lanes)."""
    return np.ascontiguousarray(np.ascontiguousarray(a).view(lanes.F4).reshape(-1, 2).T)


def x_to_q(a: lanes.Array) -> lanes.Array:
    """A float32 pair to 64-bit words."""
    return np.ascontiguousarray(a.T).view(lanes.U8).ravel()


def join_pair(a: lanes.Array, b: lanes.Array) -> lanes.Array:
    """Two float32 vectors to a pair."""
    x = np.empty((2, a.shape[0]), lanes.F4)
    x[0] = a
    x[1] = b
    return x


def _pack_words(a: lanes.Array, b: lanes.Array) -> lanes.Array:
    return a.astype(lanes.U8) | (b.astype(lanes.U8) << np.uint64(32))


def _pack_halves(*parts: lanes.Array) -> lanes.Array:
    wide = lanes.U4 if len(parts) == 2 else lanes.U8
    out = parts[0].astype(wide)
    for i, part in enumerate(parts[1:], 1):
        out = out | (part.astype(wide) << wide.type(16 * i))
    return out


def _unpack_halves(x: lanes.Array, n: int) -> list[lanes.Array]:
    return [(x >> x.dtype.type(16 * i)).astype(lanes.U2) for i in range(n)]


class Compiler:
    """Makes the functions of a program's blocks, each when it is first needed."""

    plan: RegisterPlan | None = None  #: of a checked run

    def __init__(self, program: Program) -> None:
        self.program = program
        count = len(program.blocks)
        self.full: list[Callable[[Any], int]] = [self._stub(i, False) for i in range(count)]
        self.masked: list[Callable[[Any], int]] = [self._stub(i, True) for i in range(count)]
        self.sizes = [max(len(b.operations), 1) for b in program.blocks]
        self.line_map: dict[str, list[Instruction | None]] = {}
        self.parameters = {p.name: p.offset for p in program.entry.parameters}
        self.globals: dict[str, Any] = {
            "I2": lanes.I2, "I4": lanes.I4, "I8": lanes.I8, "U2": lanes.U2, "U4": lanes.U4, "U8": lanes.U8,
            "F4": lanes.F4, "F8": lanes.F8, "q_to_x": q_to_x, "x_to_q": x_to_q, "join_pair": join_pair,
            "pack_words": _pack_words, "pack_halves": _pack_halves, "unpack_halves": _unpack_halves,
            "where": np.where, "inv": np.logical_not, "SH32": np.uint64(32), "ALL": b"\x01" * 32,
            "NONE": b"\x00" * 32, "BIT": b"\x01",
            "SHARED": np.uint64(SHARED_WINDOW), "PARAM": np.uint64(PARAM_WINDOW),
            "LOCAL": np.uint64(LOCAL_WINDOW),
        }  # fmt: skip
        self.names: dict[int, str] = {}
        self.require_modelled()

    def require_modelled(self) -> None:
        """Refuse a program with any operation that this back-end lacks, executed or not."""
        for block in self.program.blocks:
            for operation in block.operations:
                if operation.category == "system":
                    if operation.op not in RUNTIME:
                        raise unsupported(operation.instruction, f"({operation.op}) is not modelled")
                elif operation.category == "alu" and operation.op.split(".")[0] not in _MOVES:
                    numpy_alu.resolve(operation)

    def writer(self, block: Block, masked: bool) -> BlockWriter:
        """What writes one block."""
        return BlockWriter(self, block, masked)

    def _stub(self, index: int, masked: bool) -> Callable[[Any], int]:
        def compile_now(warp: Any) -> int:
            function = self.compile_block(index, masked)
            (self.masked if masked else self.full)[index] = function
            return function(warp)

        return compile_now

    def name(self, value: Any, prefix: str) -> str:
        """A global name for a Python object of the generated code."""
        found = self.names.get(id(value))
        if found is None:
            found = f"{prefix}{len(self.names)}"
            self.names[id(value)] = found
            self.globals[found] = value
        return found

    def compile_block(self, index: int, masked: bool) -> Callable[[Any], int]:
        """Generate and compile one block."""
        source, mapping = self.writer(self.program.blocks[index], masked).write()
        filename = f"<ptx block {index}{' masked' if masked else ''}>"
        code: CodeType = compile(source, filename, "exec")
        self.line_map[filename] = mapping
        scope: dict[str, Any] = {}
        exec(code, self.globals, scope)
        function: Callable[[Any], int] = scope["block"]
        return function


class BlockWriter:
    def __init__(self, compiler: Compiler, block: Block, masked: bool) -> None:
        self.compiler = compiler
        self.block = block
        self.masked = masked
        self.storage = compiler.program.storage
        self.lines: list[str] = []
        self.mapping: list[Instruction | None] = [None]  # Python lines count from 1
        self.current: Instruction | None = None
        self.known: set[int] = set()
        self.written: set[int] = set()
        self.temporaries = 0

    def emit(self, text: str) -> None:
        self.lines.append(f"    {text}")
        self.mapping.append(self.current)

    def write(self) -> tuple[str, list[Instruction | None]]:
        self.lines.append("def block(w):")
        self.mapping.append(None)
        self.emit("R = w.registers")
        if self.masked:
            self.emit("m = w.mask")
        terminator = None
        for operation in self.block.operations:
            self.current = operation.instruction
            if operation.category == "alu":
                self.alu(operation)
            elif operation.category == "system":
                self.system(operation)
            else:
                terminator = operation
        if terminator is not None and terminator.instruction.predicate is not None:
            self.load(terminator.instruction.predicate)
        self.current = terminator.instruction if terminator is not None else self.current
        self.store()
        self.terminate(terminator)
        return "\n".join(self.lines) + "\n", self.mapping

    # -- registers

    def load(self, register: Register) -> str:
        """The local of a register, fetched on first use."""
        name = f"r{register.index}"
        if register.index not in self.known:
            self.known.add(register.index)
            self.emit(f"{name} = R[{register.index}]")
        return name

    def store(self) -> None:
        for index in sorted(self.written & self.block.live_out):
            if self.masked:
                self.emit(f"R[{index}] = where(m, r{index}, R[{index}])")
            else:
                self.emit(f"R[{index}] = r{index}")

    def read(self, operand: Operand, kind: str, operation: Operation) -> str:
        """An expression for a source operand in a kind."""
        if isinstance(operand, Register):
            name = self.load(operand)
            stored = self.storage[operand.index]
            wanted = _SAME.get(kind, kind)
            if stored == wanted:
                return name
            form = _VIEW.get((stored, wanted))
            if form is None:
                raise unsupported(
                    operation.instruction, f"reads {operand.name} ({stored}) as kind {kind}, a size mismatch"
                )
            return form.format(name)
        if isinstance(operand, Negated):
            return f"inv({self.load(operand.register)})"
        if isinstance(operand, Immediate):
            if kind in "fd" and operand.value and operation.op not in ("selp", "mov"):  # those move bits
                raise unsupported(operation.instruction, "has an integer literal where a float belongs")
            return self.compiler.name(numpy_alu.constant(kind, operand.value), "c")
        if isinstance(operand, FloatImmediate):
            bits = operand.bits
            if operand.width == 64 and kind in "fW":
                bits = int(np.array([bits], "u8").view("f8").astype("f4").view("u4")[0])
            return self.compiler.name(numpy_alu.constant(kind, bits), "c")
        if isinstance(operand, Special):
            if kind in "Qq":
                return f"w.special64({operand.name!r})"
            return f"w.special[{operand.name!r}]"
        if isinstance(operand, Symbol):
            if operand.name in self.compiler.parameters:
                value = self.compiler.parameters[operand.name] + operand.offset
                return self.compiler.name(numpy_alu.constant(kind, value), "c")
            return f"w.symbol({operand.name!r}, {operand.offset}, {_SAME.get(kind, kind) == 'q'})"
        raise unsupported(operation.instruction, f"has an operand that is not modelled: {operand}")

    def guard(self, operation: Operation) -> str | None:
        """The expression of an operation's guard alone."""
        ins = operation.instruction
        if ins.predicate is None:
            return None
        name = self.load(ins.predicate)
        return f"inv({name})" if ins.predicate_negated else name

    def assign(self, operand: Operand, expression: str, kind: str, guard: str | None) -> None:
        """Bind a destination register to a value of a kind, kept where the guard is false."""
        if not isinstance(operand, Register):
            return
        stored = self.storage[operand.index]
        wanted = _SAME.get(kind, kind)
        if stored != wanted:
            form = _BACK.get((wanted, stored))
            if form is None:
                assert self.current is not None
                raise unsupported(
                    self.current, f"writes {operand.name} ({stored}) as kind {kind}, a size mismatch"
                )
            expression = form.format(expression)
        name = f"r{operand.index}"
        if guard is not None:
            old = self.load(operand)
            expression = f"where({guard}, {expression}, {old})"
        self.emit(f"{name} = {expression}")
        self.known.add(operand.index)
        self.written.add(operand.index)

    def temporary(self) -> str:
        self.temporaries += 1
        return f"t{self.temporaries}"

    # -- operations

    def alu(self, operation: Operation) -> None:
        guard = self.guard(operation)
        op = operation.op
        if op == "mov":
            self.move(operation, guard)
        elif op.startswith("pack."):
            self.pack(operation, guard)
        elif op.startswith("unpack."):
            self.unpack(operation, guard)
        elif op.startswith("cvta"):
            self.convert_address(operation, guard)
        else:
            self.compute(operation, guard)

    def move(self, operation: Operation, guard: str | None) -> None:
        dst, src = operation.dst[0], operation.src[0]
        kind = operation.dst_kinds
        if isinstance(dst, Register) and kind in "WQ":
            kind = self.storage[dst.index]
        self.assign(dst, self.read(src, kind, operation), kind, guard)

    def pack(self, operation: Operation, guard: str | None) -> None:
        dst = operation.dst[0]
        if operation.op == "pack.QW" and isinstance(dst, Register) and self.storage[dst.index] == "x":
            a, b = (self.read(s, "f", operation) for s in operation.src)
            self.assign(dst, f"join_pair({a}, {b})", "x", guard)
            return
        parts = ", ".join(
            self.read(s, k, operation) for s, k in zip(operation.src, operation.src_kinds, strict=True)
        )
        function = "pack_words" if operation.op == "pack.QW" else "pack_halves"
        self.assign(dst, f"{function}({parts})", operation.dst_kinds, guard)

    def unpack(self, operation: Operation, guard: str | None) -> None:
        src = operation.src[0]
        if operation.op == "unpack.QW":
            if isinstance(src, Register) and self.storage[src.index] == "x":
                name = self.load(src)
                self.assign(operation.dst[0], f"{name}[0]", "f", guard)
                self.assign(operation.dst[1], f"{name}[1]", "f", guard)
                return
            name = self.temporary()
            self.emit(f"{name} = {self.read(src, 'q', operation)}")
            self.assign(operation.dst[0], f"{name}.astype(U4)", "u", guard)
            self.assign(operation.dst[1], f"({name} >> SH32).astype(U4)", "u", guard)
            return
        name = self.temporary()
        value = self.read(src, operation.src_kinds, operation)
        self.emit(f"{name} = unpack_halves({value}, {len(operation.dst)})")
        for i, d in enumerate(operation.dst):
            self.assign(d, f"{name}[{i}]", "h", guard)

    def convert_address(self, operation: Operation, guard: str | None) -> None:
        value = self.read(operation.src[0], "q", operation)
        space = operation.op.rsplit(".", 1)[1]
        window = {"shared": "SHARED", "param": "PARAM", "local": "LOCAL"}.get(space)
        if window is not None:
            value = f"({value} {'-' if '.to.' in operation.op else '+'} {window})"
        self.assign(operation.dst[0], value, "q", guard)

    def compute(self, operation: Operation, guard: str | None) -> None:
        src_kinds, dst_kinds = operation.src_kinds, operation.dst_kinds
        if operation.op in _SIGNLESS:
            src_kinds, dst_kinds = src_kinds.translate(_UNSIGNED), dst_kinds.translate(_UNSIGNED)
        function = self.compiler.name(numpy_alu.resolve(operation), "f")
        if operation.op == "selp" and dst_kinds in "WQ" and isinstance(operation.dst[0], Register):
            dst_kinds = self.storage[operation.dst[0].index]
            src_kinds = dst_kinds * 2 + "p"
        if operation.op == "selp":
            a, b, p = (self.read(s, k, operation) for s, k in zip(operation.src, src_kinds, strict=True))
            self.assign(operation.dst[0], f"where({p}, {a}, {b})", dst_kinds, guard)
            return
        arguments = ", ".join(
            self.read(s, k, operation) for s, k in zip(operation.src, src_kinds, strict=True)
        )
        call = f"{function}({arguments})"
        if len(operation.dst) == 1:
            self.assign(operation.dst[0], call, dst_kinds, guard)
            return
        name = self.temporary()
        self.emit(f"{name} = {call}")
        for i, (d, k) in enumerate(zip(operation.dst, dst_kinds, strict=True)):
            self.assign(d, f"{name}[{i}]", k, guard)

    def system(self, operation: Operation) -> None:
        function = self.compiler.name(RUNTIME[operation.op](operation), "s")
        sources = "".join(
            f", {self.read(s, k, operation)}" for s, k in zip(operation.src, operation.src_kinds, strict=True)
        )
        guard = self.guard(operation)
        mask = "m" if self.masked else "None"
        indent = ""
        if guard is not None:
            for d in registers_of(operation.dst):
                self.load(d)
            mask = self.temporary()
            self.emit(f"{mask} = {guard} & m" if self.masked else f"{mask} = {guard}")
            self.emit(f"if BIT in {mask}.tobytes():")
            indent = "    "
        result = self.temporary()
        self.emit(f"{indent}{result} = {function}(w, {mask}{sources})")
        if operation.suspends:
            self.emit(f"{indent}if {result} is None: return {SUSPEND}")
        if operation.op == "wgmma.mma":
            return  # its accumulators are written to the register file when the group is performed
        self.unpack_result(operation, result, mask if guard is not None else None, indent)

    def unpack_result(self, operation: Operation, result: str, guard: str | None, indent: str) -> None:
        saved = self.lines
        if indent:
            self.lines = []
        count = len(operation.dst)
        kinds = operation.dst_kinds
        if count > 2 and set(kinds) == {"W"}:
            stored = {self.storage[d.index] for d in registers_of(operation.dst)}
            if stored == {"f"}:  # one reinterpretation for the whole array
                self.emit(f"{result} = {result}.view(F4)")
                kinds = "f" * count
        for i, (d, k) in enumerate(zip(operation.dst, kinds, strict=True)):
            self.assign(d, result if count == 1 else f"{result}[{i}]", k, guard)
        if indent:
            saved.extend(indent + line for line in self.lines)
            self.lines = saved

    # -- ends

    def terminate(self, operation: Operation | None) -> None:
        successors = self.block.successors
        if operation is None:
            goal = successors[0]
            if goal == EXIT:
                self.emit("return w.leave(None)")
            else:
                self.emit(f"return {goal}")
            return
        if operation.op == "exit":
            guard = self.guard(operation)
            if guard is None:
                self.emit("return w.leave(None)")
                return
            self.emit(f"p = {guard} & m" if self.masked else f"p = {guard}")
            self.emit(f"if BIT not in p.tobytes(): return {successors[1]}")
            self.emit(f"return w.leave(p, {successors[1]})")
            return
        guard = self.guard(operation)
        goal = operation.attrs["block"]
        if guard is None:
            self.emit(f"return {goal}" if goal != EXIT else "return w.leave(None)")
            return
        assert operation.instruction.predicate is not None
        following = successors[1]
        join = self.block.reconvergence
        if goal == EXIT:
            raise unsupported(operation.instruction, "branches to the end of the entry under a guard")
        if following == EXIT:
            raise unsupported(operation.instruction, "is followed by nothing")
        if self.masked:
            self.emit(f"p = {guard} & m")
            self.emit("b = p.tobytes()")
            self.emit(f"if BIT not in b: return {following}")
            self.emit(f"if b == m.tobytes(): return {goal}")
            self.emit(f"return w.diverge(p, {goal}, {following}, {join})")
            return
        name = f"r{operation.instruction.predicate.index}"
        yes, no = (following, goal) if operation.instruction.predicate_negated else (goal, following)
        self.emit(f"b = {name}.tobytes()")
        self.emit(f"if b == ALL: return {yes}")
        self.emit(f"if b == NONE: return {no}")
        self.emit(f"return w.diverge({guard}, {goal}, {following}, {join})")
