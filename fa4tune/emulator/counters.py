"""What a run did, per CTA and warp, for comparison with a plan."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

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
        bytes: by path: ``tma_read`` and ``tma_write`` (global memory side), ``mma_smem`` (operands read by
            matrix operations, as the instruction asks for them), ``smem_read``, ``smem_write``,
            ``dsmem_read``, ``dsmem_write``, ``global_read``, ``global_write``, ``tmem_read``,
            ``tmem_write``, ``atomic``.
        mmas: matrix instructions by (kind, M, N, K) such as ``("tcgen05.SS.cta_group::1", 128, 128, 16)``;
            a wgmma counts once, at the first warp of its warpgroup.
        events: anything else that is counted by name.
    """

    cta: int
    warp: int
    instructions: Counter[str] = field(default_factory=Counter)
    exponentials: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    mmas: Counter[tuple[str, int, int, int]] = field(default_factory=Counter)
    lines: Counter[int] = field(default_factory=Counter)


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
        return out


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


def collect(machine: Machine, ctas: list[Cta]) -> list[WarpCounters]:
    """Counters from the blocks that each warp visited and the events that it noted."""
    static: list[tuple[Counter[str], dict[str, int], list[int]]] = []
    for block in machine.program.blocks:
        units: Counter[str] = Counter(o.unit for o in block.operations)
        elements = {
            "mufu": sum(_mufu(o, "mufu_ex2") for o in block.operations),
            "mufu_other": sum(_mufu(o, "mufu") for o in block.operations),
            "polynomial": sum(_polynomial(o) for o in block.operations),
        }
        static.append((units, elements, [o.instruction.line for o in block.operations]))
    out = []
    for cta in ctas:
        for warp in cta.warps:
            count = WarpCounters(cta.number, warp.index)
            for (pc, _), (visits, lanes) in warp.visits.items():
                units, elements, lines = static[pc]
                for unit, n in units.items():
                    count.instructions[unit] += n * visits
                for unit, n in elements.items():
                    if n:
                        count.exponentials[unit] += n * lanes
                for line in lines:
                    count.lines[line] += visits
            count.bytes.update(warp.bytes)
            events: dict[Any, int] = warp.events
            for key, n in events.items():
                count.mmas[key] += n
            out.append(count)
    return out
