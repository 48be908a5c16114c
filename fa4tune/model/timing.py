"""How long one operation takes on a GPU: its work over the rate of the unit, as its role can use it.

An operation that its role executes itself (softmax, rescale) is a section of arithmetic of a few warps. A
section's exponentials and its other instructions compete for the same in-order warps, so that little of one
hides under the other; ``exp_overlap`` of the hardware file says how much. An asynchronous operation (matrix
multiply, bulk copy) occupies its unit for ``service`` cycles and is seen by its reader ``latency`` later.
"""

from __future__ import annotations

from dataclasses import dataclass

from fa4tune.hardware.gpu import Gpu
from fa4tune.kernels.plan import Operation, Unit, Work

TENSOR, EXP, ARITHMETIC, TMEM = range(4)
"""Stations at which roles without a barrier between them delay each other."""

STATIONS = ("tensor", "exp", "issue", "tmem")

UNITS = (Unit.TENSOR, Unit.EXP, Unit.SMEM, Unit.FMA, Unit.ALU, Unit.ISSUE, Unit.TMEM, Unit.L2)
"""Units whose total work bounds the period, in the order that ties are named."""


@dataclass(frozen=True, slots=True)
class Duration:
    """Cycles of one operation, undisturbed.

    ``demand`` is what it takes of each station; ``alone`` what its arithmetic takes at the pace of its own
    warps, at least ``demand[ARITHMETIC]``; ``other`` what nobody disturbs; ``latency`` passes after the unit
    is free again. ``units`` are the cycles of all units, for the totals.
    """

    asynchronous: bool
    issue: float
    demand: tuple[float, float, float, float]
    alone: float
    other: float
    latency: float
    units: tuple[float, ...]


class Rates:
    """The numbers of a GPU that durations need, as plain attributes, and the durations computed with them."""

    __slots__ = ("_cache", "gpu")

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self._cache: dict[tuple[Work, bool, int], Duration] = {}

    def duration(self, operation: Operation, warps: int) -> Duration:
        """Cycles of ``operation`` of a role of ``warps`` warps."""
        key = (operation.work, operation.asynchronous, warps)
        found = self._cache.get(key)
        if found is None:
            if len(self._cache) > 100_000:
                self._cache.clear()
            found = self._cache[key] = _duration(operation, warps, self.gpu)
        return found


_RATES: dict[int, Rates] = {}


def rates_of(gpu: Gpu) -> Rates:
    """The :class:`Rates` of ``gpu``, one object a GPU object."""
    found = _RATES.get(id(gpu))
    if found is None or found.gpu is not gpu:
        if len(_RATES) > 64:
            _RATES.clear()
        found = _RATES[id(gpu)] = Rates(gpu)
    return found


def _duration(operation: Operation, warps: int, gpu: Gpu) -> Duration:
    work = operation.work
    smem_bytes = (
        work.smem_mma_bytes
        + work.smem_tma_write_bytes
        + work.smem_tma_read_bytes
        + work.smem_generic_bytes
        + work.dsmem_bytes
    )
    tensor = work.mma_flops / gpu.mma_flops_per_clk
    smem = smem_bytes / gpu.smem_bytes_per_clk
    exp = work.exp / gpu.exp_per_clk
    fma = work.fma / gpu.fma_per_clk
    alu = work.alu / gpu.alu_per_clk
    issue = work.issue / gpu.issue_per_clk
    tmem = 0.0
    if work.tmem_load_bytes or work.tmem_store_bytes:
        tmem = (
            work.tmem_load_bytes / gpu.tmem_load_bytes_per_clk
            + work.tmem_store_bytes / gpu.tmem_store_bytes_per_clk
        )
    l2 = (work.global_read_bytes + work.global_write_bytes) / gpu.l2_bytes_per_clk
    units = (tensor, exp, smem, fma, alu, issue, tmem, l2)
    pace = min(gpu.issue_per_clk, warps * gpu.warp_issue_per_clk)
    if operation.asynchronous:
        if tensor:
            # An operand that SMEM delivers more slowly than the tensor core eats holds the tensor core up.
            service = max(tensor, work.smem_mma_bytes / gpu.smem_bytes_per_clk)
            return Duration(
                True, work.issue / pace, (service, 0.0, 0.0, 0.0), 0.0, 0.0, gpu.mma_latency_clk, units
            )
        return Duration(True, work.issue / pace, (0.0, 0.0, 0.0, 0.0), 0.0, l2, gpu.copy_latency_clk, units)
    # A role of fewer warps than schedulers reaches its share of each unit only.
    part = min(1.0, warps / gpu.issue_per_clk)
    slots = max(0.0, work.issue - work.exp / 32)
    demand = max(slots / gpu.issue_per_clk, fma, alu)
    alone = max(slots / pace, fma / part, alu / part)
    latency = gpu.arithmetic_latency_clk if work.exp or work.fma or work.alu else 0.0
    if work.tmem_load_bytes:
        latency += gpu.tmem_latency_clk
    return Duration(
        False,
        0.0,
        (0.0, exp / part, demand, tmem / part),
        alone,
        work.smem_generic_bytes / gpu.smem_bytes_per_clk / part,
        latency,
        units,
    )
