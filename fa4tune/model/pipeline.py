"""The steady state of a loop: its period, what it waits for, and who goes first.

The loop's event graph (:mod:`fa4tune.model.skeleton`) with the cycles of its operations under the sharing
rule (:mod:`fa4tune.model.sharing`) settles on its largest cycle ratio. These cycles depend on the period and
the period on them. Both fall as the period grows, so that the period is that of the one cycle of arcs for
which it is longest: starting from any, the cycle that takes longest at the period of the last one replaces it
until none takes longer. No period is shorter than what a unit has to do in an iteration.

Two things are not known beforehand:

- *In step or at random.* A ring of one stage lets its readers start together, as the next load waits for all
  of them. That counts where this load is on the critical cycle. Elsewhere roles drift apart.
- *Queued or at random.* Products of roles that do not take turns are served first come, first served
  (:mod:`fa4tune.model.product_queue`). Roles fall into that order where it is quicker than random phases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import exp, inf, log

from fa4tune.kernels.plan import Loop
from fa4tune.model.event_graph import maximum_cycle_ratio, slacks
from fa4tune.model.product_queue import queued
from fa4tune.model.sharing import Demand, Factors, Sharing
from fa4tune.model.skeleton import Skeleton, skeleton
from fa4tune.model.timing import Duration, Rates

CONVERGED = 1e-8
"""Part of a period by which a cycle must be longer to replace another one."""

ATTEMPTS = 200
"""Cycles to try. Each is longer than the one before, and a handful is usual."""


@dataclass(slots=True)
class Timed:
    """A loop with durations: the weights of its arcs under the sharing rule, and its period.

    ``period`` is the larger of the largest cycle ratio ``ratio`` and the largest unit total; ``cycle`` the
    arcs that attain the ratio; ``totals`` cycles an iteration by unit of :data:`fa4tune.model.timing.UNITS`,
    all CTAs of an SM; ``values`` the cycles that arcs pick from; ``stretch`` the delay factor by role and
    station; ``blocked`` the part of the time that SMEM serves others than the tensor cores, ``tensor_total``
    what these take an iteration with waits for operands.
    """

    skeleton: Skeleton
    durations: tuple[Duration, ...]
    values: list[float]
    period: float
    ratio: float
    cycle: tuple[int, ...]
    totals: list[float]
    stretch: Factors
    blocked: float
    tensor_total: float
    core_cycle: tuple[int, ...] = field(repr=False)
    potentials: list[float] = field(repr=False)
    looseness: float = 1.0
    """How many times longer everything takes because roles keep an order only some of the time."""

    def loosened(self, factor: float) -> Timed:
        """The same with everything ``factor`` times as long."""
        return replace(
            self,
            values=[cycles * factor for cycles in self.values],
            period=self.period * factor,
            ratio=self.ratio * factor,
            potentials=[cycles * factor for cycles in self.potentials],
            looseness=self.looseness * factor,
        )

    def played(self) -> list[float]:
        """``values`` as a run should take them: all longer alike where a unit's total binds, not a cycle."""
        if self.period <= self.ratio or not self.ratio:
            return self.values
        return [cycles * self.period / self.ratio for cycles in self.values]

    def span(self, operation: int) -> float:
        """Cycles of an operation from its start to its end as its reader sees it."""
        return self.values[operation]

    def slack(self) -> list[float]:
        """Cycles that each operation could take longer before the period grows; 0 on the critical cycle.

        Infinity for one that nothing waits for; where a unit's total binds, what its cycles leave to it.
        """
        shape = self.skeleton
        weights = [self.values[value] for value in shape.values]
        by_node = slacks(shape.arcs, weights, self.period)
        return by_node[: len(self.durations)]

    def service(self, operation: int) -> float:
        """Cycles for which an operation holds its unit or, if its role executes it, its role."""
        return self.values[2 * len(self.durations) + operation]


def rescale_rate(threshold: float, trips: int) -> float:
    """How often a warp rescales O in an iteration after the first, for scores without a trend.

    A row's maximum grows in tile *i* with probability ``1/(i+1)``, a warp's vote is over 32 rows, and a
    growth of more than ``threshold`` (log2 units) beyond the maximum of unit-variance scores is exponentially
    rarer, at the maximum's hazard of about 3 a unit. The data decide; this is what random data do.
    """
    if trips <= 1:
        return 0.0
    rare = exp(-3.0 * log(2.0) * threshold)
    steps = min(trips, 64)
    met = sum(1.0 - (1.0 - rare / (i + 1)) ** 32 for i in range(1, steps)) / (steps - 1)
    return float(met)


def settle(
    loop: Loop, durations: Sequence[Duration], weights: Sequence[float], rates: Rates, copies: int = 1
) -> Timed:
    """The steady state that roles fall into: at random phase or, where that is quicker, in part a queue.

    A queue keeps roles in order only while a product waits in it, so that two are at the tensor cores: as
    often as the square of their busy share (M/M/1: Kleinrock, Queueing Systems I, section 3.2). Else chance
    has them. Arguments as of :func:`solve`.
    """
    shape = skeleton(loop)
    demand = Demand(shape, durations, weights, rates.gpu, copies)
    at_random = _solved(Sharing(shape, demand))
    ordered = queued(loop) if copies == 1 else None
    if ordered is None:
        return at_random
    in_order = _solved(Sharing(skeleton(ordered), demand))
    if at_random.period <= in_order.period:
        return at_random
    waiting = min(1.0, in_order.tensor_total / in_order.period) ** 2
    period = waiting * in_order.period + (1.0 - waiting) * at_random.period
    return in_order.loosened(period / in_order.period)


def solve(
    shape: Skeleton,
    durations: Sequence[Duration],
    weights: Sequence[float],
    rates: Rates,
    copies: int = 1,
    start: Timed | None = None,
) -> Timed:
    """Durations under sharing and the steady-state period.

    Args:
        shape: the loop's graph.
        durations: of each operation, undisturbed.
        weights: how often each operation happens in an iteration, 0 to 1.
        rates: of the GPU.
        copies: CTAs that run the same loop on one SM, out of step with each other.
        start: an answer on the same graph, to start from; any start gives the same period.
    """
    return _solved(Sharing(shape, Demand(shape, durations, weights, rates.gpu, copies)), start)


def _solved(sharing: Sharing, start: Timed | None = None) -> Timed:
    shape, demand = sharing.shape, sharing.demand
    if start is None:
        period = sharing.roomy()
        met = sharing.met(period)
        stretch = sharing.factors(period, met)
        assert stretch is not None, "a roomy period has factors"
        first = maximum_cycle_ratio(
            shape.core, shape.core_weights(sharing.values(period, met, stretch)), -1.0
        )
        found = _longest(sharing, first.cycle, first.potentials, 0.5 * (period + first.ratio))
    else:
        found = _longest(sharing, start.core_cycle, start.potentials, start.period)
    # another CTA on the SM disturbs the step
    if shape.in_step and demand.copies == 1 and any(_waits_for_copy(found, arc) for arc in found.cycle):
        sharing.in_step = True
        found = _longest(sharing, found.core_cycle, found.potentials, found.period)
    return found


def _longest(sharing: Sharing, cycle: tuple[int, ...], potentials: list[float], guess: float) -> Timed:
    """The steady state, from any cycle of the contracted graph and a guess at the period."""
    shape, demand = sharing.shape, sharing.demand
    period, attempts = demand.least, 0
    while True:
        period = sharing.period_of(sharing.along(shape.along(cycle)), period, guess)
        met = sharing.met(period)
        stretch = sharing.factors(period, met)
        assert stretch is not None, "a fixed point has factors"
        values = sharing.values(period, met, stretch)
        weights = shape.core_weights(values)
        distance = sum([shape.core.distances[arc] for arc in cycle])
        ratio = sum([weights[arc] for arc in cycle]) / distance
        answer = maximum_cycle_ratio(shape.core, weights, ratio, potentials)
        potentials = answer.potentials
        if answer.cycle:
            cycle, ratio = answer.cycle, answer.ratio
        attempts += 1
        if ratio <= period * (1.0 + CONVERGED) or attempts == ATTEMPTS:
            break
        guess = 0.5 * (period + ratio)
    return Timed(
        skeleton=shape,
        durations=demand.durations,
        values=values,
        period=max(ratio, period),
        ratio=ratio,
        cycle=tuple(shape.along(cycle)),
        totals=demand.totals,
        stretch=stretch,
        blocked=sharing.blocked(period),
        tensor_total=sharing.tensor_total(period),
        core_cycle=cycle,
        potentials=potentials,
    )


def _waits_for_copy(timed: Timed, arc: int) -> bool:
    """Whether an arc stands for a bulk copy."""
    duration = timed.durations[timed.skeleton.values[arc] % len(timed.durations)]
    return duration.asynchronous and not duration.tensor


def alone(timed: Timed, rates: Rates, weights: Sequence[float]) -> float:
    """The period with only the first of the roles that share units at work, the loads for it included."""
    shape, durations = timed.skeleton, timed.durations
    sharing = sorted({g for d, g in zip(durations, shape.group_of, strict=True) if d.section or d.tensor})
    first = sharing[0]
    present = [
        0.0 if group in sharing and group != first else weight
        for group, weight in zip(shape.group_of, weights, strict=True)
    ]
    lone = Sharing(shape, Demand(shape, durations, present, rates.gpu))
    # an infinite period has neither meetings nor traffic
    values = lone.values(inf, lone.met(inf), lone.unshared())
    least = max(timed.totals) / len(sharing)
    return maximum_cycle_ratio(shape.core, shape.core_weights(values), least, timed.potentials).ratio
