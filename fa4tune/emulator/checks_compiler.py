"""The NumPy back-end with checks of registers: it also tells the checks which instruction runs."""

from __future__ import annotations

from typing import Any

from fa4tune.emulator import checks_words as words
from fa4tune.emulator.cfg import Block, Program
from fa4tune.emulator.checks_registers import RegisterPlan
from fa4tune.emulator.codegen import BlockWriter, Compiler
from fa4tune.emulator.isa import Operation
from fa4tune.emulator.warp import REGISTER_POISON


class CheckedCompiler(Compiler):
    """Makes block functions that check registers."""

    plan: RegisterPlan

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.plan = RegisterPlan(program)
        self.poison = [REGISTER_POISON[kind] for kind in program.storage]
        self.globals |= {"early": early_register, "unset": unset_register}

    def writer(self, block: Block, masked: bool) -> BlockWriter:
        """What writes one block."""
        return _CheckedWriter(self, block, masked)


class _CheckedWriter(BlockWriter):
    compiler: CheckedCompiler

    def __init__(self, compiler: CheckedCompiler, block: Block, masked: bool) -> None:
        super().__init__(compiler, block, masked)
        self.position = 0
        self.touched = 0

    def name(self, value: Any, prefix: str) -> str:
        return self.compiler.name(value, prefix)

    def alu(self, operation: Operation) -> None:
        self.before(operation)
        super().alu(operation)

    def system(self, operation: Operation) -> None:
        self.before(operation)
        if operation.op in ("wgmma.fence", "wgmma.mma"):
            self.flush()
        self.emit(f"w.agent.at = {self.name(operation.instruction, 'i')}")
        super().system(operation)
        if operation.op == "wgmma.fence":
            self.emit("w.agent.touched = 0")

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
        check = self.compiler.plan.checks[self.block.index][self.position]
        self.position += 1
        instruction = self.name(operation.instruction, "i")
        self.touched |= check.touched
        if check.flying:
            mask = self.name(_Constant(check.flying), "k")
            self.emit(f"if w.agent.flying_mask & {mask}.value: early(w, {instruction}, 'wgmma')")
        if check.moved:
            mask, copies = (self.name(_Constant(m), "k") for m in (check.loading, check.moved))
            self.emit(f"if w.agent.loading & {mask}.value: w.agent.loading |= {copies}.value")
            self.emit(f"else: w.agent.loading &= ~{copies}.value")
        elif check.loading:
            mask = self.name(_Constant(check.loading), "k")
            self.emit(f"if w.agent.loading & {mask}.value: early(w, {instruction}, 'ld')")
        for register in check.unset:
            name = self.load(register)
            poison = self.name(self.compiler.poison[register.index], "poison")
            self.emit(f"if {name} is {poison}: unset(w, {instruction}, {register.name!r})")


class _Constant:
    """A large integer that generated code names instead of spelling."""

    __slots__ = ("value",)

    def __init__(self, value: int) -> None:
        self.value = value


def early_register(w: Any, instruction: Any, unit: str) -> None:
    """A register is used while an asynchronous unit may still write or read it."""
    agent = w.agent
    agent.at = instruction
    if unit == "wgmma":
        w.cluster.checks.report(*words.WGMMA_WAIT, w)
        return
    w.cluster.checks.report(*words.LOAD_WAIT, w)
    w.cluster.checks.assume_loaded(w)


def unset_register(w: Any, instruction: Any, name: str) -> None:
    """A register is read that nothing wrote."""
    w.agent.at = instruction
    w.cluster.checks.report(*words.unset_register(name), w)
