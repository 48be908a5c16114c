"""Predict a kernel's time: steady-state period, tile overhead, waves and tail, HBM, launch and clock.

Closed form but for a short run of two tiles that gives the cost of filling and draining the pipeline;
thousands a second. :mod:`fa4tune.model.replay` plays the same model event by event.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import inf

import numpy as np

from fa4tune.hardware.gpu import Gpu
from fa4tune.kernels.plan import KernelPlan, Unit
from fa4tune.kernels.tiles import HeadTrips, tile_trips
from fa4tune.model.pipeline import Timed
from fa4tune.model.power import clock_mhz, full_watts
from fa4tune.model.roofline import head_trips
from fa4tune.model.schedule import first_touch, hbm_bytes, longest_first, makespan, workers
from fa4tune.model.steady import Steady, parts_of, steady
from fa4tune.model.timing import UNITS
from fa4tune.problem import AttentionProblem

BOUND_WORDS = {
    Unit.TENSOR: "tensor cores",
    Unit.EXP: "exponential unit",
    Unit.SMEM: "shared memory",
    Unit.FMA: "FMA",
    Unit.ALU: "ALU",
    Unit.ISSUE: "issue slots",
    Unit.TMEM: "tensor memory",
    Unit.L2: "L2",
}
"""What :attr:`Prediction.bound` says for a saturated unit."""

L2 = UNITS.index(Unit.L2)

SATURATED = 0.97
"""A unit this busy in the steady state is what binds; below, the chain of the critical cycle is."""


@dataclass(frozen=True, slots=True)
class CriticalStep:
    """An arc of the critical cycle: ``operation`` holds the next one up for ``cycles``, because of ``why``.

    ``distance`` is how many K/V tiles lie between the two.
    """

    operation: str
    why: str
    cycles: float
    distance: int


@dataclass(frozen=True, slots=True)
class Prediction:
    """Time of one kernel launch and where it goes.

    Attributes:
        microseconds: from launch to the end of the last CTA.
        cycles: the same without the launch, in SM clocks at ``clock_mhz``.
        clock_mhz: after sagging with power.
        watts: power at the highest clock, were there no limit.
        period: cycles of one K/V iteration of a CTA in the steady state.
        steps: the critical cycle; its cycles over its distances are ``period``, unless a unit's total is.
        bound: a saturated unit in words, ``latency chain``, ``memory`` or ``launch``.
        utilisation: busy share of each unit over the whole kernel.
        tflops: by the field's convention (causal counts as half); ``tflops_exact`` counts unmasked pairs.
        breakdown: microseconds: ``launch``, ``fill`` (prologue, first loads), ``steady``, ``masked`` (what
            masks add), ``tiles`` (epilogues and refills), ``tail`` (the last CTA beyond the mean),
            ``memory`` (HBM beyond all that).
        waves: output tiles of the CTA that finishes last.
    """

    microseconds: float
    cycles: float
    clock_mhz: float
    watts: float
    period: float
    steps: tuple[CriticalStep, ...]
    bound: str
    utilisation: Mapping[Unit, float]
    tflops: float
    tflops_exact: float
    breakdown: Mapping[str, float]
    waves: float

    @property
    def critical_cycle(self) -> tuple[str, ...]:
        """Names of the operations around the critical cycle, each once."""
        return tuple(dict.fromkeys(step.operation for step in self.steps))


@dataclass(frozen=True, slots=True)
class Load:
    """What a problem asks of a plan.

    Attributes:
        trips: of each tile of a head.
        iterations: of all tiles; ``executed`` leaves out what parts of a tile pass over.
        places: tiles at work at once.
        hbm_bytes: all that HBM moves.
        miss: share of K/V loads that miss L2.
        hidden: share of a tile's parts that apply the mask in one of its masked iterations.
        absent: parts that pass over one of these, in the mean, because their rows see nothing of it.
        touched: tiles that bring keys and values of their heads from HBM, each moving ``fed`` bytes.
    """

    trips: HeadTrips
    iterations: int
    executed: float
    places: int
    hbm_bytes: float
    miss: float
    hidden: float
    absent: float
    touched: int
    fed: float


@lru_cache(maxsize=4096)
def _by_part(
    problem: AttentionProblem, rows: int, parts: int, tile_n: int, least: int, trips: HeadTrips
) -> tuple[float, float]:
    """Of a masked iteration of a tile: the share of parts that apply the mask, and how many are absent."""
    own = tile_trips(problem, rows, tile_n, least=least)
    totals = np.repeat(trips.totals, parts)
    seen = np.ones_like(totals)  # a part beyond the last row takes part in one iteration, and masks it
    seen[: len(own)] = np.maximum(own.totals, 1)
    hidden = own.masked + len(totals) - len(own)
    absent = int((totals - np.minimum(totals, seen)).sum())
    return (hidden / (parts * trips.masked), absent / trips.masked) if trips.masked else (1.0, 0.0)


def load_of(plan: KernelPlan, gpu: Gpu) -> Load:
    """The load that ``plan``'s problem puts on ``gpu``."""
    least = int(plan.constants.get("always_masked", 0))
    trips = head_trips(plan, least)
    copies = plan.problem.batch * (plan.problem.heads // plan.packed_heads)
    places = workers(plan, gpu.sm_count)
    traffic = hbm_bytes(plan, places, gpu.l2_bytes)
    parts, shares = parts_of(plan), (1.0, 0.0)
    if parts > 1:
        shares = _by_part(plan.problem, plan.tile_rows // parts, parts, plan.tile_n, least, trips)
    touched, fed = 0, 0.0
    if longest_first(plan) and trips[0].total < trips[-1].total:
        touched, fed = first_touch(plan, places)
    iterations = trips.total * copies
    return Load(
        trips,
        iterations,
        iterations - shares[1] * trips.masked * copies / parts,
        places,
        traffic,
        0.0 if touched else _miss_share(plan, trips, copies, traffic),
        *shares,
        touched,
        fed,
    )


def state_of(plan: KernelPlan, gpu: Gpu, load: Load) -> Steady:
    """The steady state of ``plan`` under ``load``."""
    per_clk = gpu.hbm_bytes_per_clk * gpu.hbm_efficiency * gpu.sm_count
    hbm = load.hbm_bytes / per_clk * load.places / load.iterations
    return steady(plan, gpu, _typical_trips(plan, load), load.miss, load.trips.masked > 0, hbm)


def _typical_trips(plan: KernelPlan, load: Load) -> int:
    """Iterations of a tile in the mean."""
    tiles = len(load.trips) * plan.problem.batch * (plan.problem.heads // plan.packed_heads)
    return max(1, round(load.iterations / tiles))


def slack(plan: KernelPlan, gpu: Gpu) -> dict[str, float]:
    """Cycles that each loop operation could take longer before the period grows, by name.

    Operations that do not run in an unmasked iteration are left out.
    """
    timed = state_of(plan, gpu, load_of(plan, gpu)).plain
    return {
        operation.name: cycles
        for index, (operation, cycles) in enumerate(zip(plan.loop.body, timed.slack(), strict=True))
        if timed.span(index) > 0
    }


def predict(plan: KernelPlan, gpu: Gpu) -> Prediction:
    """Predict the time of one launch of ``plan`` on ``gpu``.

    Sums over plan operations and numbers of the hardware file; nothing depends on a shape or config beyond
    them.
    """
    problem = plan.problem
    load = load_of(plan, gpu)
    places, traffic, miss = load.places, load.hbm_bytes, load.miss
    state = state_of(plan, gpu, load)
    period = state.plain.period
    mask = max(0.0, state.masked.period - period) * load.hidden if state.masked else 0.0
    spared = state.absent * load.absent
    extra = mask - spared
    span = makespan(plan, load.trips, places, state.later / period, extra / period)
    cold = gpu.copy_miss_clk * (1.0 - min(1.0, miss))
    fill = max(0.0, state.first - state.later) + cold
    if load.touched:
        # the tiles that bring a section's keys and values from HBM, for which everybody waits at once
        brought = steady(plan, gpu, _typical_trips(plan, load), 1.0, False, inf)
        longest = load.trips[-1].total
        each = longest * brought.plain.period + brought.later
        each = max(each, load.fed * places / (gpu.hbm_bytes_per_clk * gpu.hbm_efficiency * gpu.sm_count))
        fill += load.touched / places * max(0.0, each - longest * period - state.later)
    compute = fill + span.iterations * period + span.masked * extra + span.tiles * state.later

    totals, copies = state.plain.totals, plan.resources.ctas_per_sm
    work = load.executed * plan.ctas_per_tile / copies
    sm_cycles = compute * gpu.sm_count
    tensor = work * totals[0] / sm_cycles
    busy = span.busy * min(1.0, places * plan.ctas_per_tile / (gpu.sm_count * copies))
    watts = full_watts(gpu, busy, tensor, work * totals[L2] / sm_cycles)
    clock = clock_mhz(gpu, watts)
    compute_us = compute / clock
    memory_us = traffic / (gpu.hbm_gbytes_per_s * 1e3 * gpu.hbm_efficiency)
    # Bytes cannot arrive before the first load returns, nor results leave before the last tile is done.
    memory_us += (state.later + gpu.copy_latency_clk + cold) / clock
    us = max(compute_us, memory_us)
    total_us = us + gpu.launch_us

    utilisation = {
        unit: min(1.0, work * cycles / (us * clock * gpu.sm_count))
        for unit, cycles in zip(UNITS, totals, strict=True)
    }
    utilisation[Unit.HBM] = min(1.0, traffic / (gpu.hbm_gbytes_per_s * 1e3) / us)
    to_us = 1.0 / clock
    tail = (1.0 - span.busy) * (compute - fill)
    return Prediction(
        microseconds=total_us,
        cycles=us * clock,
        clock_mhz=clock,
        watts=watts,
        period=period,
        steps=_steps(plan, state.plain),
        bound=_bound(state.plain, span.iterations * period / clock, compute_us, memory_us, gpu.launch_us),
        utilisation=utilisation,
        tflops=problem.flops_convention() / total_us * 1e-6,
        tflops_exact=problem.flops() / total_us * 1e-6,
        breakdown={
            "launch": gpu.launch_us,
            "fill": fill * to_us,
            "steady": (span.iterations * period - span.masked * spared) * span.busy * to_us,
            "masked": span.masked * mask * span.busy * to_us,
            "tiles": span.tiles * state.later * span.busy * to_us,
            "tail": tail * to_us,
            "memory": us - compute_us,
        },
        waves=span.tiles,
    )


def _miss_share(plan: KernelPlan, trips: HeadTrips, copies: int, traffic: float) -> float:
    """Part of the bytes that K/V loads ask of L2 which HBM must deliver."""
    asked = sum(o.work.global_read_bytes for o in plan.loop.body) * plan.ctas_per_tile
    asked *= trips.total * copies
    problem = plan.problem
    rows = problem.batch * problem.heads * problem.seqlen_q
    keys = traffic - rows * ((problem.head_dim + problem.head_dim_v) * problem.element_bytes + 4)
    return min(1.0, keys / asked) if asked else 0.0


def _bound(timed: Timed, loop_us: float, compute_us: float, memory_us: float, launch_us: float) -> str:
    """The word for what binds: nothing in the loop where the launch takes longer than all its iterations."""
    if launch_us > max(loop_us, memory_us):
        return "launch"
    if memory_us >= compute_us * SATURATED:
        return "memory"
    busiest = max(range(len(UNITS)), key=timed.totals.__getitem__)
    if timed.totals[busiest] >= SATURATED * timed.period:
        return BOUND_WORDS[UNITS[busiest]]
    if timed.tensor_total >= SATURATED * timed.period:
        # tensor cores with their waits for operands while SMEM takes in copies: whichever is the longer part
        working = timed.totals[UNITS.index(Unit.TENSOR)]
        return BOUND_WORDS[Unit.TENSOR if 2 * working >= timed.tensor_total else Unit.SMEM]
    return "latency chain"


def _steps(plan: KernelPlan, timed: Timed) -> tuple[CriticalStep, ...]:
    shape, body = timed.skeleton, plan.loop.body
    arcs = shape.arcs
    steps = []
    for arc in timed.cycle:
        source = arcs.sources[arc]
        cycles = timed.values[shape.values[arc]]
        distance = arcs.distances[arc] + shape.lags[source] - shape.lags[arcs.targets[arc]]
        if cycles > 0 or distance:
            steps.append(CriticalStep(body[shape.owners[source]].name, shape.why[arc], cycles, distance))
    return tuple(steps)
