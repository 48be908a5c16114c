"""How long operations take while roles share the units of an SM, at a given period of the loop.

**Shared memory.** Operand reads of the tensor cores wait while SMEM takes in copies or serves threads, for a
part ``b`` of the period: an operation takes ``b * yielding`` cycles longer. What yields is ``smem_conflict``
of its operand cycles where these leave SMEM room for others, and all of them where they need the whole
bandwidth. What of threads' own accesses hides under no arithmetic takes ``1 + utilisation of SMEM`` times as
long.

**Arithmetic beside tensor cores.** A section is ``hindered`` cycles longer where products run all the time
that it takes. Those of its own role do as long as they last, if they were issued before it and waited for
after it; those of other roles as often as chance has it, which is the part of the period that they take.

**Independent arithmetic.** A scheduler goes on with a warp that has an instruction ready every cycle, as
polynomials and element by element work have. For ``dense_hold`` of its length the products of other roles
stand still, because their next instruction is not issued (added to their time, which is right for holds that
are short beside the period). Polynomials that stand together, with no exponential between them, are taken to
hold up other roles' sections too, and for as long as both their pipes need beside tensor cores.

**Stations.** Where several roles use a unit and no order or barrier says who goes first, a role finds another
one there with the probability that the other is there at all, and then shares the unit with it evenly: work
``w`` of role *g* takes ``w (1 + c * sum of the others' busy fractions)``, ``c`` being ``contention`` of the
hardware file. Sections need several pipes and leave even the busiest one idle for some of their time: of
*n* roles that are all in theirs, each takes ``n s`` times as long, ``s`` being ``section_contention``, the
part of it for which that pipe works. So there ``c = (n s - 1) / (n - 1)``: two hide among each other, many do
not. A role with less than a tenth of the longest section does not count for *n*.

Busy fractions follow from these longer times and the period (mean value analysis of a closed queueing
network, Bard's approximation with exact self-exclusion); all of it is linear, so that factors at a period are
closed formulas. Two equal roles that do nothing but share a unit take exactly twice as long each. Roles in
step meet surely, and work that an order between roles lets in by turns meets only work outside that order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import inf, sqrt
from operator import mul
from typing import NamedTuple

from fa4tune.hardware.gpu import Gpu
from fa4tune.kernels.plan import Unit
from fa4tune.model.skeleton import ISSUE, REMOTE, SERVICE, TURN, Skeleton
from fa4tune.model.timing import UNITS, Duration

TENSOR, SECTION, TMEM, TURNS = range(4)
"""Stations at which roles meet: tensor cores, warp schedulers with the pipes behind them, tensor memory; and
again the tensor cores for work that an order between roles lets in by turns, which meets only work outside
such an order."""

STATIONS = 4
_SMEM, _EXP, _ALU, _FMA = (UNITS.index(unit) for unit in (Unit.SMEM, Unit.EXP, Unit.ALU, Unit.FMA))

Factors = list[list[float]]
"""How many times longer work takes, by role and station."""

LITTLE = 0.1
"""Part of the longest section below which a role's sections are too short to be met often."""


class Along(NamedTuple):
    """What a cycle of arcs takes: by role what the others stretch, in cycles, and the rest.

    ``rows`` are (role, tensor cycles, yielding ones, the same two by turns, section, what other roles'
    products add to it if they run all the time, tensor memory); ``fixed`` is not stretched, ``accesses`` are
    those of threads to SMEM; ``turns`` is how many iterations the cycle spans.
    """

    rows: list[tuple[int, list[float]]]
    fixed: float
    accesses: float
    turns: int


class Demand:
    """What the roles of a loop ask of an SM in an iteration.

    Args:
        shape: the loop's graph, or one that differs in the order of products only.
        durations: of each operation, undisturbed.
        weights: how often each operation happens in an iteration, 0 to 1.
        gpu: the hardware.
        copies: CTAs that run the same loop on one SM, out of step with each other.

    Attributes:
        totals: cycles an iteration that each of :data:`fa4tune.model.timing.UNITS` takes, all CTAs.
        least: the shortest period that these totals allow.
        operations: asynchronous or not, role, cycles of tensor cores or section, those of them that yield to
            SMEM traffic or what products of other roles add, tensor memory, what nobody disturbs, latency.
        issues: cycles that issuing takes, by operation.
        sections, slower, tmem: cycles at these stations by role; ``slower`` is what products of others add.
        holding: cycles for which other roles' independent instructions hold up a role's products, by role;
            empty where none do. ``blocking``: for which their blocks of polynomials hold up its sections.
        held, yielding: cycles of the tensor cores, and those that yield to SMEM traffic, all CTAs.
        elsewhere: the same of others, by role.
        traffic: cycles for which SMEM serves others than the tensor cores, all CTAs.
    """

    def __init__(
        self,
        shape: Skeleton,
        durations: Sequence[Duration],
        weights: Sequence[float],
        gpu: Gpu,
        copies: int = 1,
    ) -> None:
        self.durations, self.gpu, self.copies = tuple(durations), gpu, copies
        groups = len(shape.groups)
        sections, hindered = own_products(shape, durations, weights)
        operands = yielding = 0.0
        products = [0.0] * groups
        dense, block = [0.0] * groups, [0.0] * groups
        self.sections, self.slower, self.tmem = [0.0] * groups, [0.0] * groups, [0.0] * groups
        self.operations: list[tuple[bool, int, float, float, float, float, float]] = []
        for duration, weight, group, section, slower in zip(
            durations, weights, shape.group_of, sections, hindered, strict=True
        ):
            other, latency = duration.other * weight, duration.latency * weight
            if duration.asynchronous:
                main, extra, tmem = duration.tensor * weight, duration.yielding * weight, 0.0
                operands += duration.operands * weight
                yielding += extra
                products[group] += main
            else:
                main, extra, tmem = section * weight, slower * weight, duration.tmem * weight
                self.sections[group] += main
                self.slower[group] += extra
                dense[group] += duration.dense * weight
                block[group] += duration.block * weight
                self.tmem[group] += tmem
                if 0.0 < weight < 1.0:
                    # to go through it or around takes a vote and a branch, which drain the pipeline
                    latency += gpu.vote_latency_clk
            self.operations.append((duration.asynchronous, group, main, extra, tmem, other, latency))
        self.issues = [duration.issue * weight for duration, weight in zip(durations, weights, strict=True)]
        columns = zip(*[duration.units for duration in durations], strict=True)
        self.totals = [copies * sum(map(mul, column, weights)) for column in columns]
        self.held, self.yielding = copies * sum(products), copies * yielding
        self.elsewhere = [self.held - own for own in products]
        self.holding, self.blocking = (self._of_others(cycles) for cycles in (dense, block))
        self.traffic = max(0.0, self.totals[_SMEM] - copies * operands)
        self.least = max(
            *self.totals,
            # the period in which tensor cores work and wait for operands: held + yielding * traffic / period
            0.5 * self.held + sqrt(0.25 * self.held * self.held + self.yielding * self.traffic),
            *beside_products(self.totals, self.held, gpu),
        )

    def _of_others(self, dense: Sequence[float]) -> list[float]:
        """Cycles for which ``dense`` cycles of the other roles, by role, hold a role up; empty for none."""
        everyone = self.copies * sum(dense) * self.gpu.dense_hold
        return [everyone - own * self.gpu.dense_hold for own in dense] if everyone else []


class Sharing:
    """Factors and cycles of a loop's operations at any period.

    Args:
        shape: the loop's graph.
        demand: what its roles ask for.

    Attributes:
        in_step: whether roles are at a station together rather than at random.
    """

    def __init__(self, shape: Skeleton, demand: Demand) -> None:
        self.shape, self.demand = shape, demand
        self.in_step = False
        gpu, copies = demand.gpu, demand.copies
        free, turn = [0.0] * len(shape.groups), [0.0] * len(shape.groups)
        for (asynchronous, group, main, *_), by_turns in zip(demand.operations, shape.turns, strict=True):
            if asynchronous:
                (turn if by_turns else free)[group] += main
        self._products = list(zip(free, turn, strict=True))
        """Cycles of the tensor cores by role, at random and by turns."""

        def meeting(contention: float, work: Sequence[float], present: int) -> list[tuple[int, float]]:
            """Roles that have ``work`` at a station, and how much, if they meet there."""
            if not contention or (copies == 1 and present < 2):
                return []
            return [(group, cycles) for group, cycles in enumerate(work) if cycles]

        self._section_contention = section_contention(gpu.section_contention, copies * crowd(demand.sections))
        using = sum([1 for own in self._products if any(own)])
        self._tensor = meeting(gpu.contention, free, using)
        self._by_turns = any(turn) and bool(self._tensor or (gpu.contention and copies > 1))
        self._sections = meeting(self._section_contention, demand.sections, sum(map(bool, demand.sections)))
        self._tmem = meeting(gpu.contention, demand.tmem, sum(map(bool, demand.tmem)))

    def blocked(self, period: float) -> float:
        """Part of the time that SMEM serves others than the tensor cores."""
        return self.demand.traffic / period

    def tensor_total(self, period: float) -> float:
        """Cycles an iteration that tensor cores work and wait for operands."""
        return self.demand.held + self.demand.yielding * self.blocked(period)

    def met(self, period: float) -> list[float]:
        """Part of the time that other roles' products run, by role."""
        return [cycles / period if cycles < period else 1.0 for cycles in self.demand.elsewhere]

    def unshared(self) -> Factors:
        """Factors of roles that meet nobody."""
        return [[1.0] * STATIONS for _ in self._products]

    def factors(self, period: float, met: Sequence[float]) -> Factors | None:
        """How much longer work takes; None where a role's work at a station would not fit into the period."""
        stretch = self.unshared()
        gpu, none = self.demand.gpu, nothing_held(len(stretch))
        held = [cycles / period for cycles in self.demand.holding] or none
        blocked = [cycles / period for cycles in self.demand.blocking] or none
        if self._sections:
            longer = self.demand.slower
            sections = [(group, cycles + longer[group] * met[group]) for group, cycles in self._sections]
            if not self._meet(stretch, SECTION, sections, self._section_contention, period, blocked):
                return None
        else:
            for factors, extra in zip(stretch, blocked, strict=True):
                factors[SECTION] += extra
        if self._tmem and not self._meet(stretch, TMEM, self._tmem, gpu.contention, period, blocked):
            return None
        if self._by_turns:
            if not self._meet_by_turns(stretch, gpu.contention, period):
                return None
        elif self._tensor:
            return (
                stretch if self._meet(stretch, TENSOR, self._tensor, gpu.contention, period, held) else None
            )
        for factors, extra in zip(stretch, held, strict=True):
            factors[TENSOR] += extra
            factors[TURNS] += extra
        return stretch

    def _meet(
        self,
        stretch: Factors,
        station: int,
        roles: list[tuple[int, float]],
        contention: float,
        period: float,
        held: Sequence[float],
    ) -> bool:
        """Factors of ``roles`` at a station: with busy fractions ``b = w f / P`` and their sum ``B``,
        ``f = 1 + held + c (copies B - b)``; False where a role would be busier than all the time.
        """
        if self.in_step:
            for group, own in roles:
                met = sum([min(1.0, cycles / own) for _, cycles in roles]) - 1.0
                stretch[group][station] = 1.0 + held[group] + contention * met
            return True
        copies = contention * self.demand.copies
        room = 1.0 - copies * sum([cycles / (period + contention * cycles) for _, cycles in roles])
        if room <= 0.0:
            return False
        alone = sum([cycles * (1.0 + held[g]) / (period + contention * cycles) for g, cycles in roles])
        everyone = copies * alone / room
        for group, cycles in roles:
            factor = period * (1.0 + held[group] + everyone) / (period + contention * cycles)
            if cycles * factor > period * (1.0 + 1e-9):
                return False
            stretch[group][station] = factor
        return True

    def _meet_by_turns(self, stretch: Factors, contention: float, period: float) -> bool:
        """Factors at the tensor cores where some work comes by turns and some does not.

        With busy fractions ``t`` outside the order and ``u`` in it, ``B`` the sum of both and ``T`` that of
        ``t`` over roles, and *k* copies, ``t = p (1 + c (k B - t - u))`` and
        ``u = q (1 + c (T - t + (k - 1) B))``, where ``p`` and ``q`` are undisturbed fractions: linear in
        ``B`` and ``T`` for each role, and so in all.
        """
        c, copies = contention, self.demand.copies
        parts = []
        t_one = t_all = t_free = b_one = b_all = b_free = 0.0
        for free, turn in self._products:
            p, q = free / period, turn / period
            scale = 1.0 + c * p - c * c * p * q
            if scale <= 0.0:
                return False
            # t = one + all * B + free * T
            one, every, outside = (
                p * (1.0 - c * q) / scale,
                p * c * (copies - c * q * (copies - 1)) / scale,
                -c * c * p * q / scale,
            )
            parts.append((one, every, outside))
            t_one, t_all, t_free = t_one + one, t_all + every, t_free + outside
            rest = 1.0 - c * q
            b_one += rest * one + q
            b_all += rest * every + c * (copies - 1) * q
            b_free += rest * outside + c * q
        # T (1 - t_free) = t_one + t_all B and B (1 - b_all) = b_one + b_free T
        room = (1.0 - t_free) * (1.0 - b_all) - t_all * b_free
        if room <= 0.0 or b_all >= 1.0:
            return False
        outside_all = (t_one * (1.0 - b_all) + t_all * b_one) / room
        everyone = (b_one + b_free * outside_all) / (1.0 - b_all)
        for group, (one, every, outside) in enumerate(parts):
            free, turn = self._products[group]
            own = one + every * everyone + outside * outside_all
            met = 1.0 + c * (outside_all - own + (copies - 1) * everyone)
            busy = own + turn / period * met
            if busy > 1.0 + 1e-9:
                return False
            if turn:
                stretch[group][TURNS] = met
            if free:
                stretch[group][TENSOR] = 1.0 + c * (copies * everyone - busy)
        return True

    def values(self, period: float, met: Sequence[float], stretch: Factors) -> list[float]:
        """Cycles of every operation that arcs pick from: full, remote, service, issue and turn."""
        demand, gpu = self.demand, self.demand.gpu
        blocked, taken = demand.traffic / period, 1.0 + min(1.0, demand.totals[_SMEM] / period)
        full, service = [], []
        for (asynchronous, group, main, extra, tmem, other, latency), by_turns in zip(
            demand.operations, self.shape.turns, strict=True
        ):
            factors = stretch[group]
            if asynchronous:
                hold = (main + blocked * extra) * factors[TURNS if by_turns else TENSOR] + other
                service.append(hold)
                full.append(hold + latency)
            else:
                whole = (main + extra * met[group]) * factors[SECTION] + tmem * factors[TMEM] + other * taken
                whole += latency
                service.append(whole)
                full.append(whole)
        remote = [cycles + gpu.barrier_latency_clk for cycles in full]
        return [*full, *remote, *service, *demand.issues, *[c + gpu.turn_latency_clk for c in demand.issues]]

    def along(self, cycle: Sequence[int]) -> Along:
        """What ``cycle``, arcs of the loop's graph, takes."""
        demand, gpu, shape = self.demand, self.demand.gpu, self.shape
        sums: dict[int, list[float]] = {}
        fixed = accesses = 0.0
        for arc in cycle:
            kind, operation = divmod(shape.values[arc], len(shape.turns))
            if kind in (ISSUE, TURN):
                fixed += demand.issues[operation] + (gpu.turn_latency_clk if kind == TURN else 0.0)
                continue
            if kind == REMOTE:
                fixed += gpu.barrier_latency_clk
            asynchronous, group, main, extra, tmem, other, latency = demand.operations[operation]
            row = sums.setdefault(group, [0.0] * 7)
            if asynchronous:
                at = 2 if shape.turns[operation] else 0
                fixed += other + (0.0 if kind == SERVICE else latency)
            else:
                at = 4
                row[6] += tmem
                accesses += other
                fixed += latency
            row[at] += main
            row[at + 1] += extra
        turns = sum([shape.arcs.distances[arc] for arc in cycle])
        return Along(list(sums.items()), fixed, accesses, turns)

    def ratio(self, along: Along, period: float) -> float | None:
        """Cycles an iteration that a cycle takes at ``period``; None where :meth:`factors` has none."""
        met = self.met(period)
        stretch = self.factors(period, met)
        if stretch is None:
            return None
        demand = self.demand
        blocked, taken = demand.traffic / period, min(1.0, demand.totals[_SMEM] / period)
        cycles = along.fixed + along.accesses * (1.0 + taken)
        for group, (tensor, fed, turn, turn_fed, section, slower, tmem) in along.rows:
            factors = stretch[group]
            cycles += (tensor + blocked * fed) * factors[TENSOR]
            cycles += (turn + blocked * turn_fed) * factors[TURNS]
            cycles += (section + slower * met[group]) * factors[SECTION] + tmem * factors[TMEM]
        return cycles / along.turns

    def roomy(self) -> float:
        """A period with :meth:`factors`, somewhat longer than that of roles which are never anywhere else.

        Of *n* equal roles and *k* copies, each takes ``w (1 + c (k n - 1))`` then.
        """
        copies, gpu = self.demand.copies, self.demand.gpu
        period = self.demand.least
        for roles, contention in (
            (self._tensor, gpu.contention),
            (self._tmem, gpu.contention),
            (self._sections, self._section_contention),
        ):
            if roles:
                most = max([cycles + self.demand.slower[group] for group, cycles in roles])
                period = max(period, most * (1.0 + contention * (copies * len(roles) - 1)))
        period *= 1.25
        while self.factors(period, self.met(period)) is None:
            period *= 1.25
        return period

    def period_of(self, along: Along, least: float, start: float) -> float:
        """The period, at least ``least``, at which a cycle takes no longer than the period itself."""
        return fixed_point(lambda period: self.ratio(along, period), least, start)


def crowd(sections: Sequence[float]) -> int:
    """How many roles' sections count for contention: those of at least :data:`LITTLE` of the longest."""
    least = LITTLE * max(sections, default=0.0)
    return sum([1 for cycles in sections if cycles and cycles >= least])


def section_contention(busiest: float, roles: int) -> float:
    """Contention of each other role's sections, of ``roles`` that have some.

    All of them at once need ``roles * busiest`` of the time that one takes alone, ``busiest`` being the part
    for which its busiest pipe works, and no less than that one.
    """
    return max(0.0, (roles * busiest - 1.0) / (roles - 1)) if roles > 1 else 0.0


@lru_cache
def nothing_held(roles: int) -> tuple[float, ...]:
    """Nothing that holds a role up, for each of ``roles``."""
    return (0.0,) * roles


def own_products(
    shape: Skeleton, durations: Sequence[Duration], weights: Sequence[float]
) -> tuple[list[float], list[float]]:
    """Sections as they are beside the role's own products, and what others' products can still add."""
    sections = [duration.section for duration in durations]
    hindered = [duration.hindered for duration in durations]
    for product, between in shape.covered:
        length = sum([sections[index] * weights[index] for index in between])
        if not length:
            continue
        part = min(1.0, durations[product].tensor * weights[product] / length)
        for index in between:
            sections[index] += part * hindered[index]
            hindered[index] *= 1.0 - part
    return sections, hindered


def beside_products(totals: Sequence[float], held: float, gpu: Gpu) -> list[float]:
    """What exponentials, ALU and FMA take at least where the tensor cores work for ``held`` cycles of it.

    While they do, a pipe has the part ``beside`` of its rate: ``total = period - held + beside * held``.
    """
    parts = ((_EXP, gpu.exp_beside_mma), (_ALU, gpu.alu_beside_mma), (_FMA, gpu.fma_beside_mma))
    return [totals[unit] + held * (1.0 - beside) if totals[unit] else 0.0 for unit, beside in parts]


def fixed_point(function: Callable[[float], float | None], least: float, start: float) -> float:
    """The smallest ``x`` of at least ``least`` with ``function(x) <= x``, to 1e-10 of it.

    ``function`` falls with ``x``; None stands for a value above any ``x``. About ``a + b / x`` between two
    arguments, it is solved as such. ``start`` is the first guess.
    """
    low, high, x = least, inf, max(least, start)
    tried = False
    """Whether ``low`` is known to be too small."""
    known: list[tuple[float, float]] = []
    for _ in range(100):
        value = function(x)
        if value is not None and abs(value - x) <= 1e-10 * x:
            return max(least, value)
        if value is None or value > x:
            low, tried = x, True
        elif x == least:
            return least
        else:
            high = x
        if value is not None:
            high = min(high, max(x, value))
            known = [*known[-1:], (x, value)]
            if abs(value - x) <= 1e-7 * x and len(known) == 2:
                # the next guess is far closer
                return max(least, _solved(*known))
        if high - low <= 1e-10 * low:
            break
        guess = _solved(*known) if len(known) == 2 else value if value is not None else 1.3 * low
        if low < guess < high:
            x = guess
        elif guess <= low and not tried:
            x = low
        else:
            x = 0.5 * (low + high) if high < inf else 1.3 * low
    return high if high < inf else low


def _solved(one: tuple[float, float], other: tuple[float, float]) -> float:
    """The fixed point of ``a + b / x`` through two (argument, value); 0 without one."""
    (x, value), (y, beside) = one, other
    b = (value - beside) / (1.0 / x - 1.0 / y)
    a = value - b / x
    square = a * a + 4.0 * b
    return 0.5 * (a + sqrt(square)) if square >= 0.0 else 0.0
