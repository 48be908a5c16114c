"""A program's blocks as one LLVM function that runs a warp until it must wait, exits or is out of fuel.

Every block of the program becomes a block of the function; branches, masks and reconvergence stay inside,
with the runtime's help where lanes part. An instruction becomes a call of a kernel that computes 32 lanes in
the registers of the warp, which lie in one piece of memory; logic on predicates, one bit a lane, is written
out. Calls are what LLVM compiles fastest: a kernel of 5 000 instructions takes a third of a second, and 32
lanes an instruction make the call itself a small part of the time.

Inside a block, moves between registers and in and out of float32 pairs only note where a value lies; what
lives on is copied home at the end of the block.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fa4tune.emulator.cfg import EXIT, Block, Program, uses
from fa4tune.emulator.checks_registers import wgmma_registers, written
from fa4tune.emulator.codegen import LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW
from fa4tune.emulator.isa import Operation, unsupported
from fa4tune.emulator.native import operations
from fa4tune.emulator.native.kernel_table import kernel
from fa4tune.emulator.native.kinds import BASE, SLOT
from fa4tune.emulator.native.layout import BASE_SHIFT, DONE, FAULT, OK, WarpState
from fa4tune.emulator.native.places import Call, Places, Shared, Translation
from fa4tune.emulator.native.registers import NativeRegisters
from fa4tune.emulator.ptx import FloatImmediate, Immediate, Negated, Operand, Register, Special, Symbol
from fa4tune.errors import EmulationError

_BASE_NAMES = ("%registers", "%special", "%constants")
_WINDOWS = {"shared": SHARED_WINDOW, "param": PARAM_WINDOW, "local": LOCAL_WINDOW}
_FIELD = {name: getattr(WarpState, name).offset for name, *_ in WarpState._fields_}
_CLOCKS = ("%clock", "%clock_hi", "%clock64", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi")


class NotNativeError(EmulationError):
    """A program that only the plain back-end can run."""


def translate(
    program: Program,
    *,
    half_floats: bool = True,
    host_only: bool = False,
    registers: NativeRegisters | None = None,
) -> Translation:
    """Translate a program.

    Args:
        program: decoded and analysed.
        half_floats: the C compiler knows float16.
        host_only: send every system operation through Python.
        registers: of a checked run.

    Raises:
        NotNativeError: it reads a clock.
        PtxError: an operand that is not modelled.
    """
    offsets: list[int | None] = []
    at = 0
    lasting = _lasting(program)
    for index, kind in enumerate(program.storage):
        offsets.append(at if index in lasting else None)
        at += SLOT[BASE[kind]] if index in lasting else 0
    at += -at % 256
    entry = program.entry
    last = entry.parameters[-1] if entry.parameters else None
    joins = {b.reconvergence for b in program.blocks if len(b.successors) > 1} - {EXIT}
    shared = Shared(
        program, half_floats, offsets, at, {p.name: p.offset for p in entry.parameters},
        last.offset + last.nbytes if last is not None else 0, joins, host_only, registers,
    )  # fmt: skip
    _prologue(shared)
    for block in program.blocks:
        _BlockWriter(shared, block).write()
    declarations = "\n".join(shared.declared.values())
    body = "\n".join(shared.lines)
    return Translation(
        f"{declarations}\ndefine i32 @run(ptr %w) nounwind {{\n{body}\n}}\n",
        offsets, at + shared.scratch_bytes, shared.calls, shared.specials, shared.special_bytes,
        bytes(shared.pool) or bytes(64), tuple(shared.declared),
    )  # fmt: skip


def _lasting(program: Program) -> set[int]:
    """Registers whose value crosses from one block to another, or is read before it is written."""
    out: set[int] = set()
    for block in program.blocks:
        out |= block.live_out
        written: set[int] = set()
        for operation in block.operations:
            out.update(r.index for r in uses(operation) if r.index not in written)
            written.update(d.index for d in operation.dst if isinstance(d, Register))
    return out


def _prologue(s: Shared) -> None:
    s.lines.append("entry:")
    for name in ("registers", "special", "constants", "visits"):
        s.lines.append(f"%p_{name} = getelementptr i8, ptr %w, i64 {_FIELD[name]}")
        s.lines.append(f"%{name} = load ptr, ptr %p_{name}")
    for name in ("mask", "lanes", "pc", "join", "fuel", "state", "fault", "steps"):
        s.lines.append(f"%p_{name} = getelementptr i8, ptr %w, i64 {_FIELD[name]}")
    s.declared["fa_rejoin"] = "declare void @fa_rejoin(ptr)"
    cases = " ".join(f"i32 {block.index}, label %b{block.index}" for block in s.program.blocks)
    s.lines += [
        "br label %dispatch",
        "rejoin:",
        "call void @fa_rejoin(ptr %w)",
        "br label %dispatch",
        "dispatch:",
        "%state = load i32, ptr %p_state",
        f"%done = icmp eq i32 %state, {DONE}",
        "br i1 %done, label %stop, label %resume",
        "resume:",
        "%pc = load i32, ptr %p_pc",
        f"switch i32 %pc, label %stop [{cases}]",
        "stop:",
        f"ret i32 {OK}",
        "failed:",
        f"ret i32 {FAULT}",
    ]


class _BlockWriter(Places):
    def __init__(self, shared: Shared, block: Block) -> None:
        super().__init__(shared, block)
        self.lines = shared.lines
        self.mask = ""
        self.may_fault = False

    # -- text

    def op(self, text: str) -> str:
        self.shared.count += 1
        name = f"%v{self.shared.count}"
        self.lines.append(f"{name} = {text}")
        return name

    def do(self, text: str) -> None:
        self.lines.append(text)

    def call(self, name: str, result: str, *arguments: tuple[str, str]) -> str:
        """Call a C function, declared on first use; arguments are (type, value)."""
        if name not in self.shared.declared:
            types = ", ".join(t for t, _ in arguments)
            self.shared.declared[name] = f"declare {result} @{name}({types})"
        text = f"call {result} @{name}({', '.join(f'{t} {v}' for t, v in arguments)})"
        if result == "void":
            self.do(text)
            return ""
        return self.op(text)

    def pointer(self, location: int) -> str:
        base, offset = location >> BASE_SHIFT, location & (1 << BASE_SHIFT) - 1
        return self.op(f"getelementptr i8, ptr {_BASE_NAMES[base]}, i64 {offset}")

    def run_kernel(self, name: str, locations: Sequence[int], *rest: str) -> str:
        """Call a kernel; ``rest`` are 32-bit values behind the locations."""
        arguments = [("ptr", self.pointer(x)) for x in locations] + [("i32", x) for x in rest]
        result = "i32" if name.startswith(("setp", "testp")) else "void"
        return self.call(f"k_{name}", result, *arguments)

    # -- frame

    def write(self) -> None:
        i = self.block.index
        fuel = f"%fuel{i}"
        self.lines += [
            f"b{i}:",
            f"{fuel} = load i32, ptr %p_fuel",
            f"%empty{i} = icmp sle i32 {fuel}, 0",
            f"br i1 %empty{i}, label %s{i}, label %c{i}",
            f"s{i}:",
            f"store i32 {i}, ptr %p_pc",
            "br label %stop",
            f"c{i}:",
            f"%less{i} = sub i32 {fuel}, 1",
            f"store i32 %less{i}, ptr %p_fuel",
        ]
        self.mask = self.op("load i32, ptr %p_mask")
        terminator = None
        for position, operation in enumerate(self.block.operations):
            self.position = position
            self.release()
            if operation.category == "alu":
                self.before(operation)
                self.alu(operation)
                self.after(operation, self.mask)
            elif operation.category == "system":
                self.before(operation)
                self.system(operation)
            else:
                terminator = operation
        self.position = len(self.block.operations)
        guard = self.guard(terminator) if terminator is not None else None
        for register in list(self.where):
            if register in self.where and register in self.block.live_out:
                self.bring_home(register)
        if self.may_fault:
            self.lines += [
                f"%fault{i} = load i32, ptr %p_fault",
                f"%failed{i} = icmp ne i32 %fault{i}, 0",
                f"br i1 %failed{i}, label %f{i}, label %e{i}",
                f"f{i}:",
                f"store i32 {i}, ptr %p_pc",
                "br label %failed",
                f"e{i}:",
            ]
        self.count()
        self.terminate(terminator, guard)

    def count(self) -> None:
        """One more visit of this block, by the lanes of the mask."""
        i = self.block.index
        visits = self.op(f"getelementptr i8, ptr %visits, i64 {16 * i}")
        old = self.op(f"load i64, ptr {visits}")
        self.do(f"store i64 {self.op(f'add i64 {old}, 1')}, ptr {visits}")
        total = self.op(f"getelementptr i8, ptr %visits, i64 {16 * i + 8}")
        lanes = self.op("load i64, ptr %p_lanes")
        old = self.op(f"load i64, ptr {total}")
        self.do(f"store i64 {self.op(f'add i64 {old}, {lanes}')}, ptr {total}")
        steps = self.op("load i64, ptr %p_steps")
        size = max(len(self.block.operations), 1)
        self.do(f"store i64 {self.op(f'add i64 {steps}, {size}')}, ptr %p_steps")

    def copy(self, to: int, of: int, base: str) -> None:
        kind = {"p": "u", "x": "u"}.get(base, base)
        self.run_kernel(f"copy_{kind}", (to, of), self.mask)

    # -- checks of registers

    def before(self, operation: Operation) -> None:
        """Look at the registers that an operation may use too early."""
        registers = self.shared.registers
        if registers is None:
            return
        check = registers.plan.checks[self.block.index][self.position]
        if check:
            number = len(self.shared.calls)
            self.shared.calls.append(Call(operation, "", "", "", (), (), {}))
            self.call("fc_registers", "void", ("ptr", "%w"), ("i32", str(registers.add(check, number))))

    def after(self, operation: Operation, mask: str) -> None:
        """Note the registers that were perhaps written for the first time."""
        registers = self.shared.registers
        if registers is None:
            return
        defined = registers.plan.checks[self.block.index][self.position].defined
        numbers = [n for register, n in registers.tracked.items() if defined >> register & 1]
        if not numbers:
            return
        copied = registers.plan.copies.get((self.block.index, self.position))
        if copied is not None:
            of = registers.tracked.get(copied.index, -1)
            self.call("fc_copy_written", "void", ("ptr", "%w"), ("i32", str(numbers[0])), ("i32", str(of)))
            return
        while numbers:
            first = last = numbers.pop(0)
            while numbers and numbers[0] == last + 1:
                last = numbers.pop(0)
            span = [("i32", str(first)), ("i32", str(last - first + 1))]
            self.call("fc_written", "void", ("ptr", "%w"), *span, ("i32", mask))

    def checked_fields(self, operation: Operation) -> dict[str, int]:
        """What the checks of a matrix operation's registers need to know."""
        registers = self.shared.registers
        if registers is None:
            return {}
        if operation.op == "tcgen05.ld":
            return {"extra7": registers.mask(written(operation))}
        if operation.op != "wgmma.mma":
            return {}
        defined = registers.plan.checks[self.block.index][self.position].defined
        first, count = registers.unset(defined)
        return {"extra5": first, "extra6": count, "extra7": registers.mask(wgmma_registers(operation))}

    # -- operands

    def source(self, operand: Operand, kind: str, operation: Operation) -> tuple[int, ...]:
        """Locations of a source operand in a kind: one, or two for a float32 pair."""
        base = BASE[kind]
        if isinstance(operand, Register):
            stored = BASE[self.storage[operand.index]]
            parts = self.parts(operand.index)
            if stored == base:
                return parts
            if stored == "q" and base == "x":
                low = self.temporary()
                self.run_kernel("low_QW", (low, parts[0]), self.mask)
                self.run_kernel("high_QW", (low + 128, parts[0]), self.mask)
                return low, low + 128
            if stored == "x" and base == "q":
                whole = self.temporary()
                self.run_kernel("pack_QW", (whole, *parts), self.mask)
                return (whole,)
            raise unsupported(
                operation.instruction, f"reads {operand.name} ({stored}) as kind {kind}, a size mismatch"
            )
        if isinstance(operand, Negated):
            place = self.temporary()
            self.do(f"store i32 {self.predicate(operand, operation)}, ptr {self.pointer(place)}")
            return (place,)
        if isinstance(operand, Immediate):
            if kind in "fd" and operand.value and operation.op not in ("selp", "mov"):  # those move bits
                raise unsupported(operation.instruction, "has an integer literal where a float belongs")
            return self.literal(operand.value, base)
        if isinstance(operand, FloatImmediate):
            bits = operand.bits
            if operand.width == 64 and kind in "fW":
                bits = int(np.array([bits], "u8").view("f8").astype("f4").view("u4")[0])
            return self.literal(bits, base)
        if isinstance(operand, Special):
            if operand.name in _CLOCKS:
                raise NotNativeError(f"PTX line {operation.instruction.line} reads {operand.name}")
            return (self.shared.special(operand.name, 0, base),)
        if isinstance(operand, Symbol):
            if operand.name in self.shared.parameters:
                return self.literal(self.shared.parameters[operand.name] + operand.offset, base)
            return (self.shared.special(operand.name, operand.offset, base),)
        raise unsupported(operation.instruction, f"has an operand that is not modelled: {operand}")

    def literal(self, bits: int, base: str) -> tuple[int, ...]:
        if base == "x":
            return self.shared.constant(bits, "u"), self.shared.constant(bits >> 32, "u")
        return (self.shared.constant(bits, base),)

    def predicate(self, operand: Operand, operation: Operation) -> str:
        """A predicate source as a 32-bit value."""
        if isinstance(operand, Negated):
            return self.op(f"xor i32 {self.predicate(operand.register, operation)}, -1")
        if isinstance(operand, Immediate):
            return "-1" if operand.value else "0"
        (location,) = self.source(operand, "p", operation)
        return self.op(f"load i32, ptr {self.pointer(location)}")

    def guard(self, operation: Operation) -> str | None:
        """An operation's guard alone."""
        ins = operation.instruction
        if ins.predicate is None:
            return None
        value = self.predicate(ins.predicate, operation)
        return self.op(f"xor i32 {value}, -1") if ins.predicate_negated else value

    def lanes(self, guard: str | None) -> str:
        """The lanes that take part."""
        return self.mask if guard is None else self.op(f"and i32 {guard}, {self.mask}")

    def put_predicate(self, operand: Operand, value: str, mask: str) -> None:
        """Write a predicate for the lanes of a mask."""
        if not isinstance(operand, Register):
            return
        pointer = self.pointer(self.target(operand.index, True)[0])
        old = self.op(f"load i32, ptr {pointer}")
        change = self.op(f"and i32 {self.op(f'xor i32 {old}, {value}')}, {mask}")
        self.do(f"store i32 {self.op(f'xor i32 {old}, {change}')}, ptr {pointer}")

    # -- operations

    def clear(self, operation: Operation) -> None:
        """Save what lies where an operation writes, before its sources are looked up."""
        for d in operation.dst:
            if isinstance(d, Register):
                self.vacate(self.home(d.index), d.index)

    def alu(self, operation: Operation) -> None:
        op = operation.op
        if not isinstance(operation.dst[0], Register) and len(operation.dst) == 1:
            return
        moves = op in ("mov", "pack.QW", "unpack.QW", "cvta.global", "cvta.to.global")
        if operation.instruction.predicate is not None or not moves:
            self.clear(operation)
        if op == "mov":
            self.move(operation)
        elif op == "pack.QW" and self.stored(operation.dst[0]) == "x":
            parts = tuple(self.source(s, "u", operation)[0] for s in operation.src)
            self.place(operation.dst[0], parts, operation)
        elif op == "unpack.QW" and self.stored(operation.src[0]) == "x":
            parts = self.source(operation.src[0], "x", operation)
            for d, part in zip(operation.dst, parts, strict=True):
                self.place(d, (part,), operation)
        elif op.startswith(("pack.", "unpack.")):
            self.repack(operation)
        elif op.startswith("cvta"):
            self.convert_address(operation)
        else:
            self.compute(operation)

    def stored(self, operand: Operand) -> str:
        return BASE[self.storage[operand.index]] if isinstance(operand, Register) else ""

    def place(self, operand: Operand, parts: tuple[int, ...], operation: Operation) -> None:
        """Note that a register's value lies elsewhere; under a guard, copy it."""
        if not isinstance(operand, Register):
            return
        register = operand.index
        if operation.instruction.predicate is None:
            if parts == self.home(register):
                self.forget(register)
            else:
                self.remember(register, parts)
            return
        mask = self.lanes(self.guard(operation))
        base = BASE[self.storage[register]]
        home = self.target(register, operation.instruction.predicate is not None)
        for to, of in zip(home, parts, strict=True):
            self.run_kernel(f"copy_{'u' if base == 'x' else base}", (to, of), mask)

    def move(self, operation: Operation) -> None:
        dst, src = operation.dst[0], operation.src[0]
        if operation.dst_kinds == "p":
            value = self.predicate(src, operation)
            self.put_predicate(dst, value, self.lanes(self.guard(operation)))
            return
        parts = self.source(src, self.stored(dst), operation)
        self.place(dst, parts, operation)

    def repack(self, operation: Operation) -> None:
        self.clear(operation)
        mask = self.lanes(self.guard(operation))
        guarded = operation.instruction.predicate is not None
        shape = operation.op.split(".")[1]
        if operation.op.startswith("pack."):
            sources = [
                self.source(s, k, operation)[0]
                for s, k in zip(operation.src, operation.src_kinds, strict=True)
            ]
            self.result(operation.dst[0], operation.dst_kinds, f"pack_{shape}", sources, (), mask, guarded)
            return
        value = self.source(operation.src[0], operation.src_kinds, operation)[0]
        if any(isinstance(d, Register) and value in self.home(d.index) for d in operation.dst):
            aside = self.temporary()
            self.copy(aside, value, BASE[operation.src_kinds])
            value = aside
        names = [f"part{i}_QH" for i in range(4)] if shape == "QH" else [f"low_{shape}", f"high_{shape}"]
        for d, kind, name in zip(operation.dst, operation.dst_kinds, names, strict=True):
            self.result(d, kind, name, [value], (), mask, guarded)

    def convert_address(self, operation: Operation) -> None:
        window = _WINDOWS.get(operation.op.rsplit(".", 1)[1])
        parts = self.source(operation.src[0], "q", operation)
        if window is None:
            if self.stored(operation.dst[0]) == "q":
                self.place(operation.dst[0], parts, operation)
                return
            raise unsupported(operation.instruction, "converts to a float32 pair")
        name = "sub_q" if ".to." in operation.op else "add_q"
        mask = self.lanes(self.guard(operation))
        guarded = operation.instruction.predicate is not None
        window_at = self.shared.constant(window, "q")
        self.result(operation.dst[0], "q", name, [parts[0], window_at], (), mask, guarded)

    def result(
        self, operand: Operand, kind: str, name: str, sources: Sequence[int], rest: tuple[str, ...],
        mask: str, guarded: bool,
    ) -> None:  # fmt: skip
        """Run a kernel into a destination register, through a temporary where it is stored otherwise."""
        if not isinstance(operand, Register):
            return
        base, stored = BASE[kind], BASE[self.storage[operand.index]]
        if base == stored:
            (to,) = self.target(operand.index, guarded)
            self.run_kernel(name, (to, *sources), *rest, mask)
            return
        if SLOT[base] != SLOT[stored]:
            raise EmulationError(f"{operand.name} is {stored} and is assigned kind {kind}")
        aside = self.temporary()
        self.run_kernel(name, (aside, *sources), *rest, mask)
        self.spread(operand.index, aside, guarded, mask)

    def spread(self, register: int, whole: int, guarded: bool, mask: str) -> None:
        """64-bit words to a register that is stored as a float32 pair."""
        low, high = self.target(register, guarded)
        self.run_kernel("low_QW", (low, whole), mask)
        self.run_kernel("high_QW", (high, whole), mask)

    def compute(self, operation: Operation) -> None:
        op, kinds = operation.op, operation.dst_kinds
        parts = op.split(".")
        guard = self.guard(operation)
        mask, guarded = self.lanes(guard), guard is not None
        if kinds == "p" and parts[0] in ("and", "or", "xor", "not"):
            values = [self.predicate(s, operation) for s in operation.src]
            text = f"{op} i32 {values[0]}, {values[1]}" if op != "not" else f"xor i32 {values[0]}, -1"
            self.put_predicate(operation.dst[0], self.op(text), mask)
            return
        if op == "selp":
            self.select(operation, mask, guarded)
            return
        found = kernel(operation, self.shared.half_floats)
        if found is None:
            self.host_alu(operation, mask)
            return
        name, literals, is_predicate = found
        rest = tuple(str(x) for x in literals)
        if is_predicate:
            self.compare(operation, parts, name, mask)
        elif kinds == "x":
            self.pairwise(operation, name, rest, mask, guarded)
        else:
            sources = [
                self.source(s, k, operation)[0]
                for s, k in zip(operation.src, operation.src_kinds, strict=True)
            ]
            self.result(operation.dst[0], kinds, name, sources, rest, mask, guarded)

    def compare(self, operation: Operation, parts: list[str], name: str, mask: str) -> None:
        count = 1 if parts[0] == "testp" else 2
        sources = [self.source(operation.src[i], operation.src_kinds[i], operation)[0] for i in range(count)]
        if "ftz" in parts:
            flushed = []
            for at in sources:
                flushed.append(self.temporary())
                self.run_kernel("cvt_ftz_f32", (flushed[-1], at), "-1")
            sources = flushed
        answers = [self.run_kernel(name, sources)]
        if operation.attrs.get("two"):
            answers.append(self.op(f"xor i32 {answers[0]}, -1"))
        if parts[-1] in ("and", "or", "xor"):
            other = self.predicate(operation.src[2], operation)
            answers = [self.op(f"{parts[-1]} i32 {a}, {other}") for a in answers]
        for d, answer in zip(operation.dst, answers, strict=True):
            self.put_predicate(d, answer, mask)

    def pairwise(
        self, operation: Operation, name: str, rest: tuple[str, ...], mask: str, guarded: bool
    ) -> None:
        sources = [
            self.source(s, k, operation) for s, k in zip(operation.src, operation.src_kinds, strict=True)
        ]
        dst = operation.dst[0]
        assert isinstance(dst, Register)
        if self.storage[dst.index] != "x":
            aside = self.temporary()
            for n in (0, 1):
                self.run_kernel(name, (aside + 128 * n, *(s[n] for s in sources)), *rest, mask)
            (whole,) = self.target(dst.index, guarded)
            self.run_kernel("pack_QW", (whole, aside, aside + 128), mask)
            return
        home = self.home(dst.index)
        for k, s in enumerate(sources):
            if s[1] == home[0]:  # written before it is read
                aside = self.temporary()
                self.copy(aside, s[1], "u")
                sources[k] = (s[0], aside)
        to = self.target(dst.index, guarded)
        for n in (0, 1):
            self.run_kernel(name, (to[n], *(s[n] for s in sources)), *rest, mask)

    def select(self, operation: Operation, mask: str, guarded: bool) -> None:
        dst = operation.dst[0]
        assert isinstance(dst, Register)
        pick = self.predicate(operation.src[2], operation)
        stored = BASE[self.storage[dst.index]]
        a, b = (self.source(s, stored, operation) for s in operation.src[:2])
        if stored == "x" and self.home(dst.index)[0] in (a[1], b[1]):
            raise NotNativeError(f"PTX line {operation.instruction.line} selects crossed halves")
        to = self.target(dst.index, guarded)
        kind = "u" if stored == "x" else stored
        for n in range(len(to)):
            self.run_kernel(f"selp_{kind}", (to[n], a[n], b[n]), pick, mask)

    def host_alu(self, operation: Operation, mask: str) -> None:
        self.invoke(operation, "fa_host", {}, operation.src_kinds, operation.dst_kinds, mask)

    # -- system operations

    def system(self, operation: Operation) -> None:
        op = operation.op
        checked = self.shared.registers is not None
        if op in operations.NOTHING and not (checked and op in operations.CHECKED):
            return
        self.clear(operation)
        mask = self.lanes(self.guard(operation))
        if op in operations.INLINE:
            self.inline(operation, mask)
            self.after(operation, mask)
            return
        if op == "ld.param" and self.load_parameter(operation, mask):
            self.after(operation, mask)
            return
        found: operations.Call = ("fa_host", {})
        function, fields = found if self.shared.host_only else operations.native_call(operation, checked)
        fields = {**fields, **self.checked_fields(operation)}
        # accumulators are written when the operation is performed
        dst_kinds = "" if function == "fa_host" and op == "wgmma.mma" else operation.dst_kinds
        self.invoke(operation, function, fields, operation.src_kinds, dst_kinds, mask)
        self.after(operation, mask)

    def invoke(
        self, operation: Operation, function: str, fields: dict[str, int], src_kinds: str, dst_kinds: str,
        mask: str,
    ) -> None:  # fmt: skip
        """Call a runtime function, which reads and writes registers itself."""
        guarded = operation.instruction.predicate is not None
        sources: list[int] = []
        for s, k in zip(operation.src, src_kinds, strict=True):
            parts = self.source(s, k, operation)
            if BASE[k] == "x":  # the host takes float32 pairs in one piece
                aside = self.temporary()
                self.copy(aside, parts[0], "u")
                self.copy(aside + 128, parts[1], "u")
                parts = (aside,)
            sources.append(parts[0])
        destinations: list[int] = []
        spread: list[tuple[int, int]] = []
        for d, k in zip(operation.dst, dst_kinds, strict=False):
            if not isinstance(d, Register):
                destinations.append(self.temporary())
            elif SLOT[BASE[k]] == 256 and BASE[k] != BASE[self.storage[d.index]]:
                if BASE[k] == "x":
                    raise NotNativeError(f"PTX line {operation.instruction.line} leaves a pair in 64 bits")
                destinations.append(self.temporary())
                spread.append((d.index, destinations[-1]))
            else:
                destinations.append(self.target(d.index, guarded or k == "p")[0])
        number = len(self.shared.calls)
        self.shared.calls.append(
            Call(operation, function, src_kinds, dst_kinds, tuple(destinations), tuple(sources), fields)
        )
        self.may_fault = True
        rc = self.call(function, "i32", ("ptr", "%w"), ("i32", str(number)), ("i32", mask))
        if operation.suspends:
            i = self.block.index
            self.do(f"br i1 {self.op(f'icmp ne i32 {rc}, {OK}')}, label %s{i}, label %d{i}")
            self.do(f"d{i}:")
        for register, whole in spread:
            self.spread(register, whole, guarded, mask)

    def load_parameter(self, operation: Operation, mask: str) -> bool:
        """A load from a fixed place in the parameter block."""
        base = operation.src[0]
        if not isinstance(base, Symbol) or base.name not in self.shared.parameters:
            return False
        size, signed = operation.attrs["size"], operation.attrs["signed"]
        first = self.shared.parameters[base.name] + base.offset + operation.attrs["offset"]
        if first + size * len(operation.dst) > self.shared.parameter_bytes:
            return False
        guarded = operation.instruction.predicate is not None
        block = self.op("load ptr, ptr %special")
        for j, (d, kind) in enumerate(zip(operation.dst, operation.dst_kinds, strict=True)):
            pointer = self.op(f"getelementptr i8, ptr {block}, i64 {first + j * size}")
            value = self.op(f"load i{8 * size}, ptr {pointer}, align 1")
            width = {"H": 16, "W": 32, "Q": 64}[kind]
            if width < 8 * size:
                raise unsupported(operation.instruction, "loads more than its register holds")
            passed = max(width, 32)
            if passed > 8 * size:
                word = "sext" if signed and width > 8 * size else "zext"
                value = self.op(f"{word} i{8 * size} {value} to i{passed}")
            self.splat(d, kind, value, mask, guarded)
        return True

    def splat(self, operand: Operand, kind: str, value: str, mask: str, guarded: bool) -> None:
        """A scalar into all lanes of a register."""
        if not isinstance(operand, Register):
            return
        base, stored = BASE[kind], BASE[self.storage[operand.index]]
        if base != stored:
            low = self.op(f"trunc i64 {value} to i32")
            high = self.op(f"trunc i64 {self.op(f'lshr i64 {value}, 32')} to i32")
            home = self.target(operand.index, guarded)
            for to, half in zip(home, (low, high), strict=True):
                self.call("k_splat_u", "void", ("ptr", self.pointer(to)), ("i32", half), ("i32", mask))
            return
        (to,) = self.target(operand.index, guarded)
        t = "i64" if base == "q" else "i32"
        self.call(f"k_splat_{base}", "void", ("ptr", self.pointer(to)), (t, value), ("i32", mask))

    def inline(self, operation: Operation, mask: str) -> None:
        op = operation.op
        guarded = operation.instruction.predicate is not None
        if op == "zero64":
            self.splat(operation.dst[0], "q", "0", mask, guarded)
            return
        if op == "activemask":
            self.splat(operation.dst[0], "u", mask, mask, guarded)
            return
        if op == "elect":
            if len(operation.dst) == 2 and isinstance(operation.dst[0], Register):
                lane = self.call("fa_first_lane", "i32", ("i32", mask))
                self.splat(operation.dst[0], "u", lane, mask, guarded)
            lowest = self.op(f"and i32 {mask}, {self.op(f'sub i32 0, {mask}')}")
            self.put_predicate(operation.dst[-1], lowest, mask)
            return
        live = self.op(f"and i32 {self.predicate(operation.src[0], operation)}, {mask}")
        if op == "vote.ballot":
            self.splat(operation.dst[0], "u", live, mask, guarded)
            return
        some = self.op(f"icmp ne i32 {live}, 0")
        every = self.op(f"icmp eq i32 {live}, {mask}")
        answer = {"vote.any": some, "vote.all": every}.get(op)
        if answer is None:
            answer = self.op(f"or i1 {every}, {self.op(f'xor i1 {some}, true')}")
        number = self.op(f"zext i1 {answer} to i32")
        self.put_predicate(operation.dst[0], self.op(f"sub i32 0, {number}"), mask)

    # -- ends

    def go(self, goal: int) -> None:
        """Continue at a block of the program, which may be where the warp's parts meet."""
        if goal == EXIT:
            self.leave("-1", EXIT)
        elif goal in self.shared.joins:
            self.do(f"store i32 {goal}, ptr %p_pc")
            meets = self.op(f"icmp eq i32 {self.op('load i32, ptr %p_join')}, {goal}")
            self.do(f"br i1 {meets}, label %rejoin, label %b{goal}")
        else:
            self.do(f"br label %b{goal}")

    def leave(self, lanes: str, following: int) -> None:
        self.call("fa_leave", "void", ("ptr", "%w"), ("i32", lanes), ("i32", str(following)))
        self.do("br label %dispatch")

    def terminate(self, operation: Operation | None, guard: str | None) -> None:
        i = self.block.index
        successors = self.block.successors
        if operation is None:
            self.go(successors[0])
            return
        if guard is None:
            self.go(EXIT if operation.op == "exit" else operation.attrs["block"])
            return
        taken = self.op(f"and i32 {guard}, {self.mask}")
        following = successors[1]
        self.do(f"br i1 {self.op(f'icmp eq i32 {taken}, 0')}, label %n{i}, label %m{i}")
        self.do(f"n{i}:")
        self.go(following)
        self.do(f"m{i}:")
        if operation.op == "exit":
            self.leave(taken, following)
            return
        goal = operation.attrs["block"]
        if goal == EXIT or following == EXIT:
            raise unsupported(operation.instruction, "branches to, or is followed by, the end of the entry")
        self.do(f"br i1 {self.op(f'icmp eq i32 {taken}, {self.mask}')}, label %y{i}, label %x{i}")
        self.do(f"y{i}:")
        self.go(goal)
        self.do(f"x{i}:")
        numbers = [("i32", str(n)) for n in (goal, following, self.block.reconvergence)]
        self.call("fa_diverge", "void", ("ptr", "%w"), ("i32", taken), *numbers)
        self.do("br label %dispatch")
