"""What a run did, per CTA and warp, for comparison with a plan."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from fa4tune.emulator.cfg import EXIT, Program
from fa4tune.emulator.isa import Operation

if TYPE_CHECKING:
    from fa4tune.emulator.machine import Cta, Machine


@dataclass(slots=True)
class WarpCounters:
    """Counts of one warp.

    Args:
        instructions: executed instructions by class (``int``, ``float``, ``fma``, ``mufu_ex2``, ``mufu``,
            ``convert``, ``select``, ``predicate``, ``move``, ``memory``, ``tmem``, ``mma``, ``tma``,
            ``async``, ``barrier``, ``wait``, ``fence``, ``shuffle``, ``vote``, ``atomic``, ``control``,
            ``hint``).
        exponentials: elements by unit: ``mufu`` (ex2), ``mufu_other`` (the unit's other functions: lg2, rcp,
            ...), ``polynomial`` (recognised by the round-down add that splits off the integer part).
        bytes: by path: ``tma_read`` and ``tma_write`` (whole boxes, with what lies outside of the tensor),
            ``mma_smem`` (operands read by matrix operations, as the instruction asks for them),
            ``smem_read``, ``smem_write``,
            ``dsmem_read``, ``dsmem_write``, ``global_read``, ``global_write``, ``tmem_read``,
            ``tmem_write``, ``atomic``.
        mmas: matrix instructions by (kind, M, N, K) such as ``("tcgen05.SS.cta_group::1", 128, 128, 16)``;
            a wgmma counts once, at the first warp of its warpgroup.
        rescales: ``taken`` and ``skipped``: how often a warp's vote led it into or past code that multiplies
            an accumulator (:func:`rescale_sites` finds it), as conditional rescaling of O does.
    """

    cta: int
    warp: int
    instructions: Counter[str] = field(default_factory=Counter)
    exponentials: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    mmas: Counter[tuple[str, int, int, int]] = field(default_factory=Counter)
    lines: Counter[int] = field(default_factory=Counter)
    rescales: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Counters:
    """Counts of a whole run: one entry a warp."""

    warps: list[WarpCounters]

    def total(self, warps: set[int] | None = None, ctas: set[int] | None = None) -> WarpCounters:
        """The sum over warp numbers and CTA numbers (all if None)."""
        out = WarpCounters(-1, -1)
        for w in self.warps:
            if (warps is None or w.warp in warps) and (ctas is None or w.cta in ctas):
                out.instructions.update(w.instructions)
                out.exponentials.update(w.exponentials)
                out.bytes.update(w.bytes)
                out.mmas.update(w.mmas)
                out.lines.update(w.lines)
                out.rescales.update(w.rescales)
        return out


RESCALED = 8
"""Fewest multiplications behind a vote that count as rescaling an accumulator."""


def rescale_sites(program: Program) -> list[tuple[int, int]]:
    """(voting block, first guarded block) of each vote whose yes leads to the scaling of an accumulator.

    Such a block holds a ``vote`` and ends in a branch of which one way is the reconvergence point; the other
    way leads through code that multiplies at least :data:`RESCALED` registers and computes nothing else in
    float: fast paths of other kinds take maxima or convert there.
    """
    sites = []
    for block in program.blocks:
        if not any(o.op.startswith("vote") for o in block.operations) or len(set(block.successors)) != 2:
            continue
        guarded = [b for b in block.successors if b != block.reconvergence]
        if len(guarded) != 1:
            continue
        region, todo = {guarded[0]}, [guarded[0]]
        while todo:
            inner = program.blocks[todo.pop()]
            fresh = [b for b in inner.successors if b not in region and b not in (block.reconvergence, EXIT)]
            region.update(fresh)
            todo += fresh
        kinds = [o.op.partition(".")[0] for b in region for o in program.blocks[b].operations if _is_float(o)]
        if kinds.count("mul") >= RESCALED and set(kinds) <= {"mul", "mov"}:
            sites.append((block.index, guarded[0]))
    return sites


def _is_float(operation: Operation) -> bool:
    """Whether it computes float32 values, packed pairs included."""
    return operation.unit in ("float", "fma", "mufu", "mufu_ex2", "convert")


def _polynomial(operation: Operation) -> int:
    """Elements a lane of a polynomial exponential: one a round-down add, two if packed."""
    if operation.op.startswith("add.rm"):
        return {"f": 1, "x": 2}.get(operation.dst_kinds, 0)
    return 0


def _mufu(operation: Operation, unit: str) -> int:
    """Elements a lane that the exponential unit computes."""
    if operation.unit != unit:
        return 0
    return 2 if operation.dst_kinds in "VB" else 1


@dataclass(frozen=True, slots=True)
class _Static:
    """What one visit of each block counts, as matrices with a row a block."""

    units: list[str]
    per_visit: NDArray[np.int64]  # (blocks, units)
    exponentials: NDArray[np.int64]  # (blocks, 3): elements a lane of mufu, mufu_other, polynomial
    lines: NDArray[np.int64]
    line_blocks: NDArray[np.int64]  # the block of each executed line
    rescales: list[tuple[int, int]]


def _static(program: Program) -> _Static:
    units = sorted({o.unit for b in program.blocks for o in b.operations})
    per_visit = np.zeros((len(program.blocks), len(units)), np.int64)
    exponentials = np.zeros((len(program.blocks), 3), np.int64)
    lines, line_blocks = [], []
    for i, block in enumerate(program.blocks):
        for o in block.operations:
            per_visit[i, units.index(o.unit)] += 1
            exponentials[i] += (_mufu(o, "mufu_ex2"), _mufu(o, "mufu"), _polynomial(o))
            lines.append(o.instruction.line)
            line_blocks.append(i)
    numbers, owners = np.array(lines, np.int64), np.array(line_blocks, np.int64)
    return _Static(units, per_visit, exponentials, numbers, owners, rescale_sites(program))


_STATIC: WeakKeyDictionary[Program, _Static] = WeakKeyDictionary()


def collect(machine: Machine, ctas: list[Cta]) -> list[WarpCounters]:
    """Counters from the blocks that each warp visited and the events that it noted."""
    static = _STATIC.get(machine.program)
    if static is None:
        static = _STATIC[machine.program] = _static(machine.program)
    out = []
    for cta in ctas:
        for warp in cta.warps:
            count = WarpCounters(cta.number, warp.index)
            visited = np.zeros((2, len(machine.program.blocks)), np.int64)
            for (pc, _), entry in warp.visits.items():
                visited[:, pc] += entry
            visits, lanes = visited
            count.instructions.update(_nonzero(static.units, visits @ static.per_visit))
            names = ["mufu", "mufu_other", "polynomial"]
            count.exponentials.update(_nonzero(names, lanes @ static.exponentials))
            executed = np.bincount(static.lines, visits[static.line_blocks]).astype(np.int64)
            numbers = np.flatnonzero(executed)
            count.lines.update(dict(zip(numbers.tolist(), executed[numbers].tolist(), strict=True)))
            for vote, guarded in static.rescales:
                taken, votes = int(visits[guarded]), int(visits[vote])
                count.rescales.update(_nonzero(["taken", "skipped"], np.array([taken, votes - taken])))
            count.bytes.update(warp.bytes)
            events: dict[Any, int] = warp.events
            for key, n in events.items():
                count.mmas[key] += n
            out.append(count)
    return out


def _nonzero(names: list[str], values: NDArray[np.int64]) -> dict[str, int]:
    return {name: n for name, n in zip(names, values.tolist(), strict=True) if n}
