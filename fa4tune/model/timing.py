"""How long one operation takes on a GPU: its work over the rate of the unit, as its role can use it.

An operation that its role executes itself (softmax, rescale) is a *section* of arithmetic of a few warps. Its
exponentials and its other instructions come from the same in-order warps, so that only ``exp_overlap`` of the
shorter of the two hides under the longer. It waits for its tensor-memory accesses, except that maxima are
taken of what has arrived while the rest of a row is on its way. Chains of dependent instructions (maxima,
exponentials) go at ``warp_issue_per_clk`` a warp; element by element work (rescaling, sums kept in many
registers) goes at one.

Tensor cores that keep their accumulators in registers leave the arithmetic pipes fewer of the register file's
ports: a section takes ``hindered`` cycles longer where they work all the time.

An asynchronous operation (matrix multiply, bulk copy) occupies its unit for ``tensor`` or ``other`` cycles
and is seen by its reader ``latency`` later.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fa4tune.hardware.gpu import Gpu
from fa4tune.kernels.plan import Operation, Unit, Work

UNITS = (Unit.TENSOR, Unit.EXP, Unit.SMEM, Unit.FMA, Unit.ALU, Unit.ISSUE, Unit.TMEM, Unit.L2)
"""Units whose total work bounds the period, in the order that ties are named."""

SCHEDULERS = 4
"""Warp schedulers of an SM, each with a quarter of the arithmetic units and of tensor memory."""

ROOMY = 0.75
"""Part of the SMEM bandwidth up to which operand reads leave room for all other traffic."""

CHAINED = (Unit.ALU, Unit.EXP)
"""Units of operations whose instructions wait for each other."""


@dataclass(frozen=True, slots=True)
class Duration:
    """Cycles of one operation, undisturbed.

    Attributes:
        asynchronous: the unit works on its own once the operation is issued.
        units: cycles of each of :data:`UNITS`, for the totals.
        latency: passes after the unit is free again.
        issue: what issuing costs the role.
        tensor: that it holds the tensor cores, their filling up included.
        operands: for which SMEM delivers operands.
        yielding: of these, what gives way to other SMEM traffic that it meets.
        section: of the role's own instructions.
        hindered: how much longer that is where tensor cores work all the time.
        dense: those in which a warp has an independent instruction every cycle, so that its scheduler issues
            no other warp's matmuls.
        block: those of polynomials that stand together, taken to hold up other warps' arithmetic too.
        tmem: of tensor-memory loads and stores that the role waits for.
        other: what no other role disturbs.
    """

    asynchronous: bool
    units: tuple[float, ...]
    latency: float
    issue: float = 0.0
    tensor: float = 0.0
    operands: float = 0.0
    yielding: float = 0.0
    section: float = 0.0
    hindered: float = 0.0
    dense: float = 0.0
    block: float = 0.0
    tmem: float = 0.0
    other: float = 0.0


class Rates:
    """A GPU with the durations computed for it so far."""

    __slots__ = ("_cache", "gpu")

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self._cache: dict[tuple[Work, Unit, bool, bool, int], Duration] = {}

    def duration(self, operation: Operation, warps: int) -> Duration:
        """Cycles of ``operation`` of a role of ``warps`` warps."""
        key = (operation.work, operation.unit, operation.asynchronous, operation.together, warps)
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


def from_hbm(duration: Duration, operation: Operation, gpu: Gpu, miss: float, busy: float) -> Duration:
    """``duration`` of a copy of which the part ``miss`` comes from HBM.

    It arrives ``copy_miss_clk`` later, and no sooner than an SM's share of the bandwidth delivers it where
    the other SMs are loading too, which they are as often as HBM is ``busy``.
    """
    if not miss or not is_load(operation):
        return duration
    shared = miss * hbm_cycles(operation, gpu, busy)
    return replace(
        duration, other=max(duration.other, shared), latency=duration.latency + miss * gpu.copy_miss_clk
    )


def is_load(operation: Operation) -> bool:
    """Whether an operation is a bulk copy from global memory."""
    return operation.asynchronous and not operation.mma and operation.work.global_read_bytes > 0


def hbm_cycles(operation: Operation, gpu: Gpu, busy: float) -> float:
    """Cycles in which HBM delivers what ``busy`` SMs' shares of an operation's loads ask for."""
    return busy * operation.work.global_read_bytes / (gpu.hbm_bytes_per_clk * gpu.hbm_efficiency)


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
    exp = work.exp / gpu.exp_per_clk
    fma = work.fma / gpu.fma_per_clk
    alu = work.alu / gpu.alu_per_clk
    tmem = 0.0
    if work.tmem_load_bytes or work.tmem_store_bytes:
        tmem = (
            work.tmem_load_bytes / gpu.tmem_load_bytes_per_clk
            + work.tmem_store_bytes / gpu.tmem_store_bytes_per_clk
        )
    l2 = (work.global_read_bytes + work.global_write_bytes) / gpu.l2_bytes_per_clk
    units = (
        tensor,
        exp,
        smem_bytes / gpu.smem_bytes_per_clk,
        fma,
        alu,
        work.issue / gpu.issue_per_clk,
        tmem,
        l2,
    )
    chained = operation.unit in CHAINED
    most = gpu.issue_per_clk / SCHEDULERS
    pace = min(gpu.issue_per_clk, warps * (min(most, gpu.warp_issue_per_clk) if chained else most))
    if operation.asynchronous:
        issue = work.issue / pace
        if work.mma_flops:
            # An operand that SMEM delivers more slowly than the tensor core eats holds the tensor core up.
            # Other traffic finds room between operand reads, unless these take nearly all of the bandwidth.
            operands = work.smem_mma_bytes / gpu.smem_bytes_per_clk
            full = min(1.0, max(0.0, (operands / tensor - ROOMY) / (1.0 - ROOMY)))
            return Duration(
                asynchronous=True,
                units=units,
                latency=gpu.mma_latency_clk,
                issue=issue,
                tensor=max(tensor, operands) + gpu.mma_start_clk,
                operands=operands,
                yielding=operands * (gpu.smem_conflict + (1.0 - gpu.smem_conflict) * full),
            )
        return Duration(asynchronous=True, units=units, latency=gpu.copy_latency_clk, issue=issue, other=l2)
    # A role of fewer warps than schedulers reaches its share of each unit only.
    part = min(1.0, warps / SCHEDULERS)
    exponentials = exp / part
    # polynomials stand where exponentials would, so that they hide under none
    pipes = work.fma_emulated / gpu.fma_per_clk / part, work.alu_emulated / gpu.alu_per_clk / part
    polynomial, block = max(work.issue_emulated / pace, *pipes), 0.0
    if operation.together:
        # nothing stands between them that would let one pipe's instructions hide the other's
        polynomial = max(polynomial, sum(pipes))
        block = max(polynomial, pipes[0] / gpu.fma_beside_mma + pipes[1] / gpu.alu_beside_mma)
    arithmetic = max(
        max(0.0, work.issue - work.exp / 32 - work.issue_emulated) / pace,
        (work.fma - work.fma_emulated) / gpu.fma_per_clk / part,
        (work.alu - work.alu_emulated) / gpu.alu_per_clk / part,
    )
    longer, shorter = max(exponentials, arithmetic), min(exponentials, arithmetic)
    # element by element work leaves no dependent tail that its neighbours could not fill
    latency = gpu.arithmetic_latency_clk if chained else 0.0
    section, waited = polynomial + longer + (1.0 - gpu.exp_overlap) * shorter, tmem / part
    if operation.unit == Unit.ALU:
        # maxima go over scores as they arrive
        section, waited = max(section, waited), 0.0
    elif work.tmem_load_bytes:
        latency += gpu.tmem_latency_clk
    hindered = (
        exponentials * (1.0 / gpu.exp_beside_mma - 1.0)
        + alu / part * (1.0 / gpu.alu_beside_mma - 1.0)
        + fma / part * (1.0 / gpu.fma_beside_mma - 1.0)
    )
    # what is stored goes out while more of it is computed
    accesses = max(0.0, work.smem_generic_bytes / gpu.smem_bytes_per_clk / part - section)
    return Duration(
        asynchronous=False,
        units=units,
        latency=latency,
        section=section,
        hindered=hindered,
        dense=max(block, polynomial) if chained else section,
        block=block,
        tmem=waited,
        other=accesses,
    )
