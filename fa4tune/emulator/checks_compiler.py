"""The NumPy back-end with checks of registers: it also tells the checks which instruction runs.

A register can be read too early in three ways: nothing ever wrote it, a ``wgmma`` or a ``tcgen05.ld`` that
writes it was not waited for. An analysis of the flow graph finds where each is possible at all; only there
the generated code looks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from fa4tune.emulator.cfg import EXIT, Block, Program, registers_of
from fa4tune.emulator.codegen import BlockWriter, Compiler
from fa4tune.emulator.isa import Operation
from fa4tune.emulator.ptx import Operand, Register
from fa4tune.emulator.warp import REGISTER_POISON

#: Operations that hand bits on without looking at them. The assembler renames registers for them, and the
#: compiler puts them between a ``tcgen05.ld`` and its wait: what they write is as unfinished as what they
#: read.
_MOVES = ("mov", "pack", "unpack")


def mask_of(registers: Iterable[Register]) -> int:
    """Registers as bits."""
    mask = 0
    for register in registers:
        mask |= 1 << register.index
    return mask


def written(operation: Operation) -> int:
    """Registers that an operation writes, as bits."""
    return mask_of(registers_of(operation.dst))


def read(operation: Operation) -> int:
    """Registers that an operation reads, its guard included, as bits."""
    mask = mask_of(registers_of(operation.src))
    if operation.instruction.predicate is not None:
        mask |= 1 << operation.instruction.predicate.index
    return mask


def wgmma_registers(operation: Operation) -> int:
    """Registers that a wgmma holds until it is waited for."""
    fragments = operation.src[:4] if operation.attrs["from_registers"] else ()
    return written(operation) | mask_of(registers_of(fragments))


def _forward(program: Program, start: int, step: Callable[[Operation, int], int]) -> list[int]:
    """A may-analysis: the bits that can hold at the start of each block."""
    blocks = program.blocks
    before = [0] * len(blocks)
    before[0] = start
    seen = {0}
    work = [0]
    while work:
        index = work.pop()
        state = before[index]
        for operation in blocks[index].operations:
            state = step(operation, state)
        for successor in blocks[index].successors:
            if successor == EXIT:
                continue
            joined = before[successor] | state
            if joined != before[successor] or successor not in seen:
                before[successor] = joined
                seen.add(successor)
                work.append(successor)
    return before


def _define(operation: Operation, unset: int) -> int:
    return unset if operation.instruction.predicate is not None else unset & ~written(operation)


def _fly(operation: Operation, flying: int) -> int:
    if operation.op == "wgmma.mma":
        return flying | wgmma_registers(operation)
    if operation.op == "wgmma.wait" and operation.attrs["count"] == 0:
        return 0
    return flying


def _load(operation: Operation, loading: int) -> int:
    if operation.op == "tcgen05.ld":
        return loading | written(operation)
    if _moves(operation):
        return loading | written(operation) if read(operation) & loading else loading & ~written(operation)
    return 0 if operation.op == "tcgen05.wait.ld" else loading


def _moves(operation: Operation) -> bool:
    return operation.op.split(".")[0] in _MOVES


class CheckedCompiler(Compiler):
    """Makes block functions that check registers."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.unset = _forward(program, (1 << len(program.storage)) - 1, _define)
        self.flying = _forward(program, 0, _fly)
        self.loading = _forward(program, 0, _load)
        self.matrix = 0
        for block in program.blocks:
            for operation in block.operations:
                if operation.op == "wgmma.mma":
                    self.matrix |= wgmma_registers(operation)
        self.poison = [REGISTER_POISON[kind] for kind in program.storage]
        self.globals |= {"early": early_register, "unset": unset_register}

    def writer(self, block: Block, masked: bool) -> BlockWriter:
        """What writes one block."""
        return _CheckedWriter(self, block, masked)


class _CheckedWriter(BlockWriter):
    compiler: CheckedCompiler

    def __init__(self, compiler: CheckedCompiler, block: Block, masked: bool) -> None:
        super().__init__(compiler, block, masked)
        self.unset = compiler.unset[block.index]
        self.flying = compiler.flying[block.index]
        self.loading = compiler.loading[block.index]
        self.touched = 0

    def name(self, value: Any, prefix: str) -> str:
        return self.compiler.name(value, prefix)

    def alu(self, operation: Operation) -> None:
        self.before(operation)
        super().alu(operation)
        self.after(operation)

    def system(self, operation: Operation) -> None:
        self.before(operation)
        if operation.op in ("wgmma.fence", "wgmma.mma"):
            self.flush()
        self.emit(f"w.agent.at = {self.name(operation.instruction, 'i')}")
        super().system(operation)
        if operation.op == "wgmma.fence":
            self.emit("w.agent.touched = 0")
        self.after(operation)

    def store(self) -> None:
        self.flush()
        super().store()

    def flush(self) -> None:
        """Tell which wgmma registers other instructions accessed."""
        if self.touched:
            self.emit(f"w.agent.touched |= {self.name(_Constant(self.touched), 'k')}.value")
            self.touched = 0

    def before(self, operation: Operation) -> None:
        """Checks of the registers that an operation accesses."""
        reads = read(operation)
        accesses = reads | written(operation)
        instruction = self.name(operation.instruction, "i")
        if operation.op != "wgmma.mma":
            early = accesses & self.flying
            if early:
                mask = self.name(_Constant(early), "k")
                self.emit(f"if w.agent.flying_mask & {mask}.value: early(w, {instruction}, 'wgmma')")
            self.touched |= accesses & self.compiler.matrix
        early = accesses & self.loading
        if _moves(operation):
            if early:
                mask, copies = (
                    self.name(_Constant(m), "k") for m in (reads & self.loading, written(operation))
                )
                self.emit(f"if w.agent.loading & {mask}.value: w.agent.loading |= {copies}.value")
                self.emit(f"else: w.agent.loading &= ~{copies}.value")
            return
        if early:
            mask = self.name(_Constant(early), "k")
            self.emit(f"if w.agent.loading & {mask}.value: early(w, {instruction}, 'ld')")
        for operand in operation.src:
            register = _register(operand)
            if register is not None and self.unset >> register.index & 1:
                name = self.load(register)
                poison = self.name(self.compiler.poison[register.index], "poison")
                self.emit(f"if {name} is {poison}: unset(w, {instruction}, {register.name!r})")
                self.unset &= ~(1 << register.index)

    def after(self, operation: Operation) -> None:
        """What holds for the rest of the block."""
        self.unset = _define(operation, self.unset)
        self.flying = _fly(operation, self.flying)
        self.loading = _load(operation, self.loading)


class _Constant:
    """A large integer that generated code names instead of spelling."""

    __slots__ = ("value",)

    def __init__(self, value: int) -> None:
        self.value = value


def _register(operand: Operand) -> Register | None:
    found = registers_of((operand,))
    return found[0] if found else None


def early_register(w: Any, instruction: Any, unit: str) -> None:
    """A register is used while an asynchronous unit may still write or read it."""
    agent = w.agent
    agent.at = instruction
    if unit == "wgmma":
        w.cluster.checks.report("missing-wgmma-wait", "a register of a wgmma used before wgmma.wait_group", w)
        return
    w.cluster.checks.report(
        "missing-tcgen05-wait-ld", "a register that tcgen05.ld writes used before tcgen05.wait::ld", w
    )
    w.cluster.checks.assume_loaded(w)


def unset_register(w: Any, instruction: Any, name: str) -> None:
    """A register is read that nothing wrote."""
    w.agent.at = instruction
    w.cluster.checks.report("uninitialised-register", f"register {name} is read before anything wrote it", w)
