"""The roofline: work of plan operations over the rate of the unit that does it.

Every value is a sum over plan operations divided by a number of the hardware file; nothing knows a shape.
"""

from __future__ import annotations

from dataclasses import dataclass

from fa4tune.hardware.gpu import Gpu
from fa4tune.kernels.plan import KernelPlan, Unit, Work, total_work
from fa4tune.kernels.tiles import HeadTrips, tile_trips

CAPABLE = (Unit.TENSOR, Unit.SMEM, Unit.EXP, Unit.FMA, Unit.ALU, Unit.ISSUE, Unit.TMEM, Unit.L2)
"""Units whose load one tile decides; HBM is a matter of the whole problem."""


@dataclass(frozen=True, slots=True)
class SmemCycles:
    """SMEM cycles by path. ``mma`` alone is what the published cycle tables count."""

    mma: float
    tma_write: float
    tma_read: float
    generic: float
    dsmem: float

    @property
    def total(self) -> float:
        """All paths: operand reads, TMA writes and reads, loads and stores of threads, peer traffic."""
        return self.mma + self.tma_write + self.tma_read + self.generic + self.dsmem


def smem_cycles(work: Work, gpu: Gpu) -> SmemCycles:
    """Cycles of the SMEM data path, by path."""
    rate = gpu.smem_bytes_per_clk
    return SmemCycles(
        mma=work.smem_mma_bytes / rate,
        tma_write=work.smem_tma_write_bytes / rate,
        tma_read=work.smem_tma_read_bytes / rate,
        generic=work.smem_generic_bytes / rate,
        dsmem=work.dsmem_bytes / rate,
    )


def unit_cycles(work: Work, gpu: Gpu) -> dict[Unit, float]:
    """Cycles that each unit of one SM needs for ``work``, each as if it were alone.

    Tensor ``flops / mma_flops_per_clk``, exponentials ``elements / exp_per_clk``, SMEM ``bytes / 128`` and so
    on (FlashAttention-4, arXiv 2603.05451, section 3.1.1). L2 counts the bytes that global reads and writes
    move; TMEM loads and stores have paths of their own and add up.
    """
    tmem = 0.0
    if work.tmem_load_bytes or work.tmem_store_bytes:
        tmem = (
            work.tmem_load_bytes / gpu.tmem_load_bytes_per_clk
            + work.tmem_store_bytes / gpu.tmem_store_bytes_per_clk
        )
    return {
        Unit.TENSOR: work.mma_flops / gpu.mma_flops_per_clk,
        Unit.SMEM: smem_cycles(work, gpu).total,
        Unit.EXP: work.exp / gpu.exp_per_clk,
        Unit.FMA: work.fma / gpu.fma_per_clk,
        Unit.ALU: work.alu / gpu.alu_per_clk,
        Unit.ISSUE: work.issue / gpu.issue_per_clk,
        Unit.TMEM: tmem,
        Unit.L2: (work.global_read_bytes + work.global_write_bytes) / gpu.l2_bytes_per_clk,
    }


def iteration_work(plan: KernelPlan) -> Work:
    """Work of one K/V iteration without mask and without rescale."""
    return total_work(op for op in plan.loop.body if op.when not in ("masked", "rescaled"))


def iteration_cycles(plan: KernelPlan, gpu: Gpu) -> dict[Unit, float]:
    """Unit cycles of one unmasked K/V iteration of one CTA."""
    return unit_cycles(iteration_work(plan), gpu)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Tiles and iterations of the whole problem, per CTA of a tile."""

    tiles: int
    iterations: int
    masked: int


def head_trips(plan: KernelPlan, least: int = 0) -> HeadTrips:
    """Iterations of each output tile of one (packed) head, in order of rows.

    ``least`` iterations of a tile count as masked in any case.
    """
    return tile_trips(plan.problem, plan.tile_rows, plan.tile_n, plan.packed_heads, least)


def traffic(plan: KernelPlan) -> Traffic:
    """Tiles and iterations over all heads and sequences."""
    trips = head_trips(plan)
    copies = plan.problem.batch * (plan.problem.heads // plan.packed_heads)
    return Traffic(
        tiles=len(trips) * copies,
        iterations=trips.total * copies,
        masked=trips.masked * copies,
    )


def problem_work(plan: KernelPlan) -> Work:
    """Work of the whole problem, all CTAs of a tile counted."""
    amount = traffic(plan)
    once = total_work((*plan.prologue, *plan.epilogue)) * amount.tiles
    steady = iteration_work(plan) * amount.iterations
    masked = total_work(op for op in plan.loop.body if op.when == "masked") * amount.masked
    return (once + steady + masked) * plan.ctas_per_tile


@dataclass(frozen=True, slots=True)
class Roofline:
    """Lower bounds of the whole problem on a GPU.

    ``seconds`` by unit, every SM busy all the time, HBM moving the compulsory bytes once.
    """

    seconds: dict[Unit, float]

    @property
    def bound(self) -> Unit:
        """The unit that needs longest; the tensor cores win a tie, then the exponential unit."""
        longest = max(self.seconds.values())
        return next(unit for unit, time in self.seconds.items() if time >= longest * (1 - 1e-9))

    @property
    def time(self) -> float:
        """Seconds of the binding unit."""
        return max(self.seconds.values())


def roofline(plan: KernelPlan, gpu: Gpu) -> Roofline:
    """The roofline of ``plan`` on ``gpu``."""
    cycles = unit_cycles(problem_work(plan), gpu)
    clock = gpu.clock_mhz * 1e6
    order = (Unit.TENSOR, Unit.EXP, *(u for u in CAPABLE if u not in (Unit.TENSOR, Unit.EXP)))
    seconds = {unit: cycles[unit] / (gpu.sm_count * clock) for unit in order}
    seconds[Unit.HBM] = plan.problem.compulsory_bytes() / (gpu.hbm_gbytes_per_s * 1e9)
    return Roofline(seconds)
