"""What a plan's loop settles on, apart from the problem's size, and what tiles cost beside it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import TypeVar

from fa4tune.hardware.gpu import Gpu
from fa4tune.kernels.plan import KernelPlan, Operation
from fa4tune.model.pipeline import Timed, alone, rescale_rate, settle, solve
from fa4tune.model.run import Phases, Run, phases_of
from fa4tune.model.timing import Duration, Rates, from_hbm, rates_of

HBM_STEP = 64.0
"""Cycles to which the HBM time of an iteration is rounded, so that problems share steady states."""

MISS_STEP = 1 / 8
"""Share of loads that miss L2, rounded likewise."""

RATE_STEP, RATE_LEAST = 1 / 1024, 2.0**-20
"""How often O is rescaled, rounded likewise; what can happen at all costs its vote however rare it is."""

_KEPT = 4096


@dataclass(slots=True)
class Settled:
    """A loop under one set of durations: ``plain`` and ``masked`` without and with mask operations.

    ``absent`` are cycles that an iteration takes less for each part of the tile that passes over it. ``plan``
    and ``rates`` keep alive what the cache knows by identity. ``tiles`` is what tiles cost, by the
    iterations of the run, whether a CTA has one tile only, and cycles of the operations beside the loop.
    """

    plain: Timed
    masked: Timed | None
    absent: float
    plan: KernelPlan
    rates: Rates
    tiles: dict[tuple[int, bool, tuple[float, ...]], tuple[float, float]] = field(default_factory=dict)


@dataclass(slots=True)
class Steady:
    """What one loop on one GPU settles on, and its tiles.

    ``first`` and ``later`` are the cycles that a CTA's first and every later tile cost beside their
    iterations. ``hbm_busy`` is how busy HBM was taken to be, in CTAs of an SM that wait for it at once.
    """

    loop: Settled
    first: float
    later: float
    hbm_busy: float
    plan: KernelPlan
    rates: Rates

    @property
    def plain(self) -> Timed:
        """The loop without mask operations."""
        return self.loop.plain

    @property
    def masked(self) -> Timed | None:
        """The loop with mask operations, where they are wanted."""
        return self.loop.masked

    @property
    def absent(self) -> float:
        """Cycles that an iteration takes less for each part of the tile that passes over it."""
        return self.loop.absent


_SETTLED: OrderedDict[tuple[object, ...], Settled] = OrderedDict()
_STEADY: OrderedDict[tuple[object, ...], Steady] = OrderedDict()
"""By identity of operations, which plan builders share between configs that differ elsewhere."""

_Kept = TypeVar("_Kept", Settled, Steady)


def _known(
    cache: OrderedDict[tuple[object, ...], _Kept], key: tuple[object, ...], plan: KernelPlan, rates: Rates
) -> _Kept | None:
    found = cache.get(key)
    if found is None or found.rates is not rates:
        return None
    kept = found.plan
    same = kept.loop is plan.loop and kept.prologue is plan.prologue and kept.epilogue is plan.epilogue
    return found if same and kept.roles == plan.roles else None


def _keep(cache: OrderedDict[tuple[object, ...], _Kept], key: tuple[object, ...], found: _Kept) -> None:
    cache[key] = found
    if len(cache) > _KEPT:
        cache.popitem(last=False)


def durations_of(
    plan: KernelPlan, rates: Rates, operations: Sequence[Operation], miss: float, busy: float
) -> tuple[Duration, ...]:
    """Durations of ``operations``; ``miss`` and ``busy`` as of :func:`fa4tune.model.timing.from_hbm`."""
    warps = {role.name: role.warps for role in plan.roles}
    return tuple(
        [
            from_hbm(rates.duration(operation, warps[operation.role]), operation, rates.gpu, miss, busy)
            for operation in operations
        ]
    )


def parts_of(plan: KernelPlan) -> int:
    """Groups of rows of a tile that run the loop on their own and pass over K/V tiles they do not see."""
    rows = plan.constants.get("rows")
    return plan.tile_rows // int(rows) if rows else 1


def steady(
    plan: KernelPlan, gpu: Gpu, trips: int, miss: float = 0.0, masks: bool = False, hbm: float = 0.0
) -> Steady:
    """The steady state of ``plan``'s loop and the overhead of a tile.

    Args:
        plan: the kernel.
        gpu: the hardware.
        trips: iterations of a typical tile, which set how often O is rescaled.
        miss: share of K/V loads that miss L2.
        masks: whether masked iterations are wanted.
        hbm: cycles an iteration of a CTA that HBM takes for all that the kernel moves; infinite where all
            CTAs wait for it at once.
    """
    rates = rates_of(gpu)
    copies = plan.resources.ctas_per_sm
    single = plan.scheduler != "persistent"
    probe = max(1, min(3, trips))
    hbm = round(hbm / HBM_STEP) * HBM_STEP if isfinite(hbm) else hbm
    miss = round(miss / MISS_STEP) * MISS_STEP
    rate = _rescales(plan, trips)
    key = (id(rates), id(plan.loop), id(plan.epilogue), rate, copies, single, probe, miss, masks, hbm)
    found = _known(_STEADY, key, plan, rates)
    if found is None:
        # in the long run HBM bounds the whole kernel, not an iteration, unless all CTAs wait for it
        loop = _settled(plan, rates, rate, miss, 0.0 if isfinite(hbm) else float(copies), masks)
        busy = copies * min(1.0, hbm / loop.plain.period)
        first, later = _tiles(plan, loop, phases_of(plan, rates, busy), probe, single)
        found = Steady(loop, first, later, busy, plan, rates)
        _keep(_STEADY, key, found)
    return found


def _rescales(plan: KernelPlan, trips: int) -> float:
    """How often O is rescaled in an iteration, where data decide."""
    if all(operation.when != "rescaled" for operation in plan.loop.body):
        return 0.0
    rate = rescale_rate(float(getattr(plan.config, "rescale_threshold", 0.0)), trips)
    return max(round(rate / RATE_STEP) * RATE_STEP, RATE_LEAST) if rate else 0.0


def _settled(plan: KernelPlan, rates: Rates, rate: float, miss: float, busy: float, masks: bool) -> Settled:
    copies = plan.resources.ctas_per_sm
    key = (id(rates), id(plan.loop), id(plan.epilogue), rate, copies, miss, busy, masks)
    found = _known(_SETTLED, key, plan, rates)
    if found is not None:
        return found
    body = plan.loop.body
    durations = durations_of(plan, rates, body, miss, busy)
    weights = [0.0 if o.when == "masked" else rate if o.when == "rescaled" else 1.0 for o in body]
    plain = settle(plan.loop, durations, weights, rates, copies)
    masked, absent = None, 0.0
    if masks:
        with_masks = [1.0 if o.when == "masked" else w for o, w in zip(body, weights, strict=True)]
        masked = solve(plain.skeleton, durations, with_masks, rates, copies, plain).loosened(plain.looseness)
        parts = parts_of(plan)
        if parts > 1:
            absent = max(0.0, plain.period - alone(plain, rates, weights)) / (parts - 1)
    found = Settled(plain, masked, absent, plan, rates)
    _keep(_SETTLED, key, found)
    return found


def _tiles(plan: KernelPlan, loop: Settled, phases: Phases, probe: int, single: bool) -> tuple[float, float]:
    """What the first and every later tile cost beside their iterations, from a run of ``probe`` each."""
    key = probe, single, tuple([once.span for phase in phases for once in phase])
    found = loop.tiles.get(key)
    if found is None:
        gpu, plain = loop.rates.gpu, loop.plain
        run = Run(plan, plain, gpu, phases)
        end = run.tile(probe, plain.values)
        overhead = gpu.tile_overhead_clk + (gpu.cta_start_clk if single else 0.0)
        first = end - probe * plain.ratio + overhead
        later = first if single else run.tile(probe, plain.values) - end - probe * plain.ratio + overhead
        found = loop.tiles[key] = first, max(0.0, later)
    return found
