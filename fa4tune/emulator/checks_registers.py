"""Which instructions can read a register too early, found in the flow graph; both back-ends look only there.

A register can be used too early in three ways: nothing ever wrote it, a ``wgmma`` or a ``tcgen05.ld`` that
writes it was not waited for. A ``wgmma`` can be issued too early, without ``wgmma.fence`` after an access to
its registers. Each is a forward analysis of what *may* hold before an operation. Where it may, the back-ends
follow what does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from fa4tune.emulator.cfg import EXIT, Block, Program, registers_of
from fa4tune.emulator.isa import Operation
from fa4tune.emulator.ptx import Operand, Register

#: Operations that hand bits on without looking at them. The assembler renames registers for them, and the
#: compiler puts them between a ``tcgen05.ld`` and its wait: what they write is as unfinished as what they
#: read.
_MOVES = ("mov", "pack", "unpack")

GROUPS_KEPT = 4
"""Closed ``wgmma`` groups that the analysis tells apart."""

#: Registers (bits) held by the open ``wgmma`` group, by the last closed one, the one before, ...
_Flying = tuple[int, ...]
_S = TypeVar("_S")


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


def moves(operation: Operation) -> bool:
    """Whether an operation only hands bits on."""
    return operation.op.split(".")[0] in _MOVES


@dataclass(frozen=True, slots=True)
class RegisterCheck:
    """What to look for before an operation; registers as bits.

    Args:
        flying: registers it accesses that a wgmma may hold.
        loading: registers it accesses, or a move reads, that a ``tcgen05.ld`` may still write.
        moved: registers that a move then writes; they are loading if what it reads is.
        unset: registers it reads that may not have been written.
        touched: registers it accesses that a later wgmma may find touched.
        clears: it is a ``wgmma.fence``, after which no register counts as touched.
        defined: registers that it is perhaps the first to write, of those that somebody asks about.
    """

    flying: int = 0
    loading: int = 0
    moved: int = 0
    unset: tuple[Register, ...] = ()
    touched: int = 0
    clears: bool = False
    defined: int = 0

    def __bool__(self) -> bool:
        """Whether there is anything to do before the operation."""
        return bool(self.flying or self.loading or self.moved or self.unset or self.touched or self.clears)


class RegisterPlan:
    """The checks of a program's registers.

    Attributes:
        checks: by block and operation.
        tracked: registers of which a back-end must know whether they were written.
        copies: moves, by block and operation, that hand on that their source was never written.
        fenced: registers of which a back-end must know whether they were touched since ``wgmma.fence``.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        blocks = program.blocks
        everything = (1 << len(program.storage)) - 1
        unset = _forward(program, everything, _define, _union)
        flying = _forward(program, (0,) * (GROUPS_KEPT + 1), _fly, _unite)
        loading = _forward(program, 0, _load, _union)
        self.matrix = 0
        for block in blocks:
            for operation in block.operations:
                if operation.op == "wgmma.mma":
                    self.matrix |= wgmma_registers(operation)
        touched = _forward(program, self.matrix, self._touch, _union)
        self.fenced = self._may_be_touched(touched)
        self.tracked = 0
        self.copies: dict[tuple[int, int], Register] = {}
        self.checks = [
            self._block(block, unset[block.index], flying[block.index], loading[block.index])
            for block in blocks
        ]
        if not any(c.loading and not c.moved for block in self.checks for c in block):
            # nobody asks which registers are loading
            self.checks = [[replace(c, loading=0, moved=0) for c in block] for block in self.checks]
        self._follow_moves(unset)
        self._find_definitions(unset)

    def _touch(self, operation: Operation, touched: int) -> int:
        if operation.op == "wgmma.mma":
            return touched if _guarded(operation) else touched & ~wgmma_registers(operation)
        if operation.op == "wgmma.fence" and not _guarded(operation):
            return 0
        return touched | (read(operation) | written(operation)) & self.matrix

    def _may_be_touched(self, before: list[int]) -> int:
        found = 0
        for block in self.program.blocks:
            touched = before[block.index]
            for operation in block.operations:
                if operation.op == "wgmma.mma":
                    found |= touched & wgmma_registers(operation)
                touched = self._touch(operation, touched)
        return found

    def _block(self, block: Block, unset: int, flying: _Flying, loading: int) -> list[RegisterCheck]:
        out: list[RegisterCheck] = []
        for operation in block.operations:
            reads, writes = read(operation), written(operation)
            accesses = reads | writes
            early = late = moved = touched = 0
            never: list[Register] = []
            if operation.op != "wgmma.mma":
                held = 0
                for group in flying:
                    held |= group
                early = accesses & held
                touched = accesses & self.fenced
            if moves(operation):
                if accesses & loading:
                    late, moved = reads & loading, writes
            else:
                late = accesses & loading
                for register in registers_of(operation.src):
                    if unset >> register.index & 1:
                        never.append(register)
                        unset &= ~(1 << register.index)
            if operation.op == "wgmma.mma":
                self.tracked |= unset & writes
            self.tracked |= mask_of(never)
            clears = operation.op == "wgmma.fence" and bool(self.fenced)
            out.append(RegisterCheck(early, late, moved, tuple(never), touched, clears))
            unset = _define(operation, unset)
            flying = _fly(operation, flying)
            loading = _load(operation, loading)
        return out

    def _follow_moves(self, before: list[int]) -> None:
        """A move of a register that was never written leaves its target so: follow the source as well."""
        more = True
        while more:
            more = False
            for block in self.program.blocks:
                unset = before[block.index]
                for position, operation in enumerate(block.operations):
                    source = _unset_source(self.program, operation, unset)
                    key = block.index, position
                    if source is not None and written(operation) & self.tracked and key not in self.copies:
                        self.copies[key] = source
                        self.tracked |= 1 << source.index
                        more = True
                    unset = _define(operation, unset)

    def _find_definitions(self, before: list[int]) -> None:
        for block in self.program.blocks:
            unset = before[block.index]
            checks = self.checks[block.index]
            for position, operation in enumerate(block.operations):
                defined = written(operation) & unset & self.tracked
                if defined:
                    checks[position] = replace(checks[position], defined=defined)
                unset = _define(operation, unset)


def _unset_source(program: Program, operation: Operation, unset: int) -> Register | None:
    """What a move hands on unchanged although it may never have been written."""
    if operation.op != "mov" or _guarded(operation):
        return None
    source: Operand = operation.src[0]
    target: Operand = operation.dst[0]
    if not isinstance(source, Register) or not isinstance(target, Register):
        return None
    same = program.storage[source.index] == program.storage[target.index]
    return source if same and unset >> source.index & 1 else None


def _guarded(operation: Operation) -> bool:
    return operation.instruction.predicate is not None


def _forward(
    program: Program, start: _S, step: Callable[[Operation, _S], _S], join: Callable[[_S, _S], _S]
) -> list[_S]:
    """What can hold at the start of each block."""
    blocks = program.blocks
    before: dict[int, _S] = {0: start}
    work = [0]
    while work:
        index = work.pop()
        state = before[index]
        for operation in blocks[index].operations:
            state = step(operation, state)
        for successor in blocks[index].successors:
            if successor == EXIT:
                continue
            known = before.get(successor)
            joined = state if known is None else join(known, state)
            if known is None or joined != known:
                before[successor] = joined
                work.append(successor)
    return [before.get(block.index, start) for block in blocks]


def _union(a: int, b: int) -> int:
    return a | b


def _unite(a: _Flying, b: _Flying) -> _Flying:
    return tuple(x | y for x, y in zip(a, b, strict=True))


def _define(operation: Operation, unset: int) -> int:
    return unset if _guarded(operation) else unset & ~written(operation)


def _fly(operation: Operation, flying: _Flying) -> _Flying:
    if operation.op == "wgmma.mma":
        return (flying[0] | wgmma_registers(operation), *flying[1:])
    if operation.op == "wgmma.commit":
        after = (0, flying[0], *flying[1:-2], flying[-2] | flying[-1])
        return _unite(flying, after) if _guarded(operation) else after
    if operation.op == "wgmma.wait" and not _guarded(operation):
        left = operation.attrs["count"]
        if left < GROUPS_KEPT:
            return tuple(group if age <= left else 0 for age, group in enumerate(flying))
    return flying


def _load(operation: Operation, loading: int) -> int:
    if operation.op == "tcgen05.ld":
        return loading | written(operation)
    if moves(operation):
        return loading | written(operation) if read(operation) & loading else loading & ~written(operation)
    return 0 if operation.op == "tcgen05.wait.ld" else loading
