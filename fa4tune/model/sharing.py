"""How long operations take while roles share the units of an SM, at a given period of the loop.

**Shared memory.** Operand reads of the tensor cores wait while SMEM takes in copies or serves threads, for a
part ``b`` of the period: an operation takes ``b * yielding`` cycles longer. What yields is ``smem_conflict``
of its operand cycles where these leave SMEM room for others, and all of them where they need the whole
bandwidth. Threads' own accesses take ``1 + utilisation of SMEM`` times as long.

**Arithmetic beside tensor cores.** A section is ``hindered`` cycles longer where products run all the time
that it takes. Those of its own role do as long as they last, if they were issued before it and waited for
after it; those of other roles as often as chance has it, which is the part of the period that they take.

**Stations.** Where several roles use a unit and no order or barrier says who goes first, a role finds another
one there with the probability that the other is there at all, and then shares the unit with it evenly: work
``w`` of role *g* takes ``w (1 + c * sum of the others' busy fractions)``, ``c`` being ``contention`` of the
hardware file, or ``section_contention`` for sections. Busy fractions follow from these longer times and the
period (mean value analysis of a closed queueing network, Bard's approximation with exact self-exclusion); all
of it is linear, so that factors at a period are closed formulas. Two equal roles that do nothing but share a
unit take exactly twice as long each. Roles in step meet surely, and work that an order between roles lets in
by turns meets only work outside that order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, sqrt
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


class Along(NamedTuple):
    """What a cycle of arcs takes: by role what the others stretch, in cycles, and the rest.

    ``rows`` are (role, tensor cycles, yielding ones, the same two by turns, section, what other roles' products
    add to it if they run all the time, tensor memory); ``fixed`` is not stretched, ``accesses`` are those of
    threads to SMEM; ``turns`` is how many iterations the cycle spans.
    """

    rows: list[tuple[int, float, float, float, float, float, float, float]]
    fixed: float
    accesses: float
    turns: int


class Sharing:
    """A loop whose operations take ``durations``, as often in an iteration as ``weights`` say.

    Args:
        shape: the loop's graph.
        durations: of each operation, undisturbed.
        weights: how often each operation happens in an iteration, 0 to 1.
        gpu: the hardware.
        copies: CTAs that run the same loop on one SM, out of step with each other.

    Attributes:
        totals: cycles an iteration that each of :data:`fa4tune.model.timing.UNITS` takes, all CTAs.
        least: the shortest period that the units' totals allow.
        in_step: whether roles are at a station together rather than at random.
    """

    def __init__(
        self,
        shape: Skeleton,
        durations: Sequence[Duration],
        weights: Sequence[float],
        gpu: Gpu,
        copies: int = 1,
    ) -> None:
        self.shape, self.durations, self.weights, self.gpu = shape, durations, weights, gpu
        self.copies = copies
        self.in_step = False
        groups = len(shape.groups)
        self._sections, self._hindered = own_products(shape, durations, weights)
        totals = [0.0] * len(UNITS)
        products = [0.0] * groups
        operands = yielding = 0.0
        work = [[0.0] * groups for _ in range(STATIONS)]
        hindered = [0.0] * groups
        for index, (duration, weight, group) in enumerate(
            zip(durations, weights, shape.group_of, strict=True)
        ):
            if not weight:
                continue
            for unit, cycles in enumerate(duration.units):
                if cycles:
                    totals[unit] += cycles * weight
            if duration.asynchronous:
                tensor = duration.tensor * weight
                operands += duration.operands * weight
                yielding += duration.yielding * weight
                products[group] += tensor
                work[TURNS if shape.turns[index] else TENSOR][group] += tensor
            else:
                work[SECTION][group] += self._sections[index] * weight
                work[TMEM][group] += duration.tmem * weight
                hindered[group] += self._hindered[index] * weight
        held = copies * sum(products)
        self.totals = [copies * total for total in totals]
        self._held, self._yielding = held, copies * yielding
        self._work, self._longer = work, hindered
        self._elsewhere = [held - own for own in products]
        self._others = max(0.0, self.totals[_SMEM] - copies * operands)
        self.least = max(
            *self.totals,
            # the period in which tensor cores work and wait for operands: held + yielding * others / period
            0.5 * held + sqrt(0.25 * held * held + self._yielding * self._others),
            *beside_products(self.totals, held, gpu),
        )
        self._roles: list[list[tuple[int, float]]] = []
        """Roles at each station with their work, where any meet."""
        for station in (TENSOR, SECTION, TMEM):
            there = [(group, cycles) for group, cycles in enumerate(work[station]) if cycles]
            present = len(there)
            if station == TENSOR:
                present += sum(
                    [1 for turn, free in zip(work[TURNS], work[TENSOR], strict=True) if turn and not free]
                )
            contention = gpu.section_contention if station == SECTION else gpu.contention
            self._roles.append(there if contention and (copies > 1 or present > 1) else [])
        self._by_turns = bool(gpu.contention) and any(work[TURNS])
        self._operations = self._stretchable()
        self._issues = [d.issue * w for d, w in zip(durations, weights, strict=True)]

    def _stretchable(self) -> list[tuple[bool, int, int, float, float, float, float, float]]:
        """By operation what :meth:`values` needs, weighted."""
        vote = self.gpu.arithmetic_latency_clk
        found = []
        for index, (duration, weight, group) in enumerate(
            zip(self.durations, self.weights, self.shape.group_of, strict=True)
        ):
            latency = duration.latency * weight
            if duration.asynchronous:
                station = TURNS if self.shape.turns[index] else TENSOR
                row = (duration.tensor * weight, duration.yielding * weight, 0.0, duration.other * weight)
                found.append((True, group, station, *row, latency))
                continue
            if 0.0 < weight < 1.0:
                # to go through it or around takes a vote and a branch, which drain the pipeline
                latency += vote
            section, slower = self._sections[index] * weight, self._hindered[index] * weight
            row = (section, slower, duration.tmem * weight, duration.other * weight)
            found.append((False, group, SECTION, *row, latency))
        return found

    def blocked(self, period: float) -> float:
        """Part of the time that SMEM serves others than the tensor cores."""
        return self._others / period

    def tensor_total(self, period: float) -> float:
        """Cycles an iteration that tensor cores work and wait for operands."""
        return self._held + self._yielding * self._others / period

    def met(self, period: float) -> list[float]:
        """Part of the time that other roles' products run, by role."""
        return [min(1.0, cycles / period) for cycles in self._elsewhere]

    def factors(self, period: float, met: Sequence[float]) -> Factors | None:
        """How much longer work takes; None where the period is too short for what roles do one after the other."""
        stretch = [[1.0] * STATIONS for _ in self._elsewhere]
        tensor, sections, tmem = self._roles
        contention, copies = self.gpu.contention, self.copies
        if sections:
            if any(met):
                sections = [(group, cycles + self._longer[group] * met[group]) for group, cycles in sections]
            if not self._meet(stretch, SECTION, sections, self.gpu.section_contention, period):
                return None
        if tmem and not self._meet(stretch, TMEM, tmem, contention, period):
            return None
        if self._by_turns:
            if (tensor or copies > 1) and not self._meet_by_turns(stretch, contention, period):
                return None
        elif tensor and not self._meet(stretch, TENSOR, tensor, contention, period):
            return None
        return stretch

    def _meet(
        self, stretch: Factors, station: int, roles: list[tuple[int, float]], contention: float, period: float
    ) -> bool:
        """Factors of ``roles`` at a station: with busy fractions ``b = w f / P`` and their sum ``B``,
        ``f = 1 + c (copies B - b)``; False where a role would be busier than all the time.
        """
        if self.in_step:
            for group, own in roles:
                met = sum([min(1.0, cycles / own) for _, cycles in roles]) - 1.0
                stretch[group][station] = 1.0 + contention * met
            return True
        shares = sum([cycles / (period + contention * cycles) for _, cycles in roles])
        room = 1.0 - contention * self.copies * shares
        if room <= 0.0:
            return False
        for group, cycles in roles:
            factor = period / ((period + contention * cycles) * room)
            if cycles * factor > period * (1.0 + 1e-9):
                return False
            stretch[group][station] = factor
        return True

    def _meet_by_turns(self, stretch: Factors, contention: float, period: float) -> bool:
        """Factors at the tensor cores where some work comes by turns and some does not.

        With busy fractions ``t`` outside the order and ``u`` in it, ``B`` the sum of both and ``T`` that of ``t``
        over roles, and *k* copies, ``t = p (1 + c (k B - t - u))`` and ``u = q (1 + c (T - t + (k - 1) B))``,
        where ``p`` and ``q`` are undisturbed fractions: linear in ``B`` and ``T`` for each role, and so in all.
        """
        c, copies = contention, self.copies
        parts = []
        t_one = t_all = t_free = b_one = b_all = b_free = 0.0
        for free, turn in zip(self._work[TENSOR], self._work[TURNS], strict=True):
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
            free, turn = self._work[TENSOR][group], self._work[TURNS][group]
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
        blocked, taken = self._others / period, 1.0 + min(1.0, self.totals[_SMEM] / period)
        full, service = [], []
        for asynchronous, group, station, main, extra, tmem, other, latency in self._operations:
            factors = stretch[group]
            if asynchronous:
                hold = (main + blocked * extra) * factors[station] + other
                service.append(hold)
                full.append(hold + latency)
            else:
                whole = (main + extra * met[group]) * factors[SECTION] + tmem * factors[TMEM] + other * taken
                whole += latency
                service.append(whole)
                full.append(whole)
        barrier, turn = self.gpu.barrier_latency_clk, self.gpu.turn_latency_clk
        remote = [cycles + barrier for cycles in full]
        return full + remote + service + self._issues + [cycles + turn for cycles in self._issues]

    def along(self, cycle: Sequence[int]) -> Along:
        """What ``cycle``, arcs of the loop's graph, takes."""
        gpu, count, values = self.gpu, len(self.durations), self.shape.values
        sums: dict[int, list[float]] = {}
        fixed = accesses = 0.0
        for arc in cycle:
            kind, operation = divmod(values[arc], count)
            if kind in (ISSUE, TURN):
                fixed += self._issues[operation] + (gpu.turn_latency_clk if kind == TURN else 0.0)
                continue
            if kind == REMOTE:
                fixed += gpu.barrier_latency_clk
            asynchronous, group, station, main, extra, tmem, other, latency = self._operations[operation]
            row = sums.setdefault(group, [0.0] * 7)
            if asynchronous:
                at = 2 if station == TURNS else 0
                fixed += other + (0.0 if kind == SERVICE else latency)
            else:
                at = 4
                row[6] += tmem
                accesses += other
                fixed += latency
            row[at] += main
            row[at + 1] += extra
        turns = sum([self.shape.arcs.distances[arc] for arc in cycle])
        rows = [(group, *row) for group, row in sums.items()]
        return Along(rows, fixed, accesses, turns)  # type: ignore[arg-type]

    def ratio(self, along: Along, period: float) -> float | None:
        """Cycles an iteration that a cycle takes at ``period``; None where :meth:`factors` has none."""
        met = self.met(period)
        stretch = self.factors(period, met)
        if stretch is None:
            return None
        blocked, taken = self._others / period, min(1.0, self.totals[_SMEM] / period)
        cycles = along.fixed + along.accesses * (1.0 + taken)
        for group, tensor, fed, turn, turn_fed, section, slower, tmem in along.rows:
            factors = stretch[group]
            cycles += (tensor + blocked * fed) * factors[TENSOR]
            cycles += (turn + blocked * turn_fed) * factors[TURNS]
            cycles += (section + slower * met[group]) * factors[SECTION] + tmem * factors[TMEM]
        return cycles / along.turns

    def period_of(self, along: Along) -> float:
        """The period, at least :attr:`least`, at which a cycle takes no longer than the period itself."""
        return fixed_point(lambda period: self.ratio(along, period), self.least)


def own_products(
    shape: Skeleton, durations: Sequence[Duration], weights: Sequence[float]
) -> tuple[list[float], list[float]]:
    """Sections as long as they are beside the role's own products, and what others' products can still add."""
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


def fixed_point(function: Callable[[float], float | None], least: float) -> float:
    """The smallest ``x`` of at least ``least`` with ``function(x) <= x``, to 1e-10 of it.

    ``function`` falls with ``x``; None stands for a value above any ``x``. About ``a + b / x`` between two
    arguments, it is solved as such.
    """
    low, high, x = least, inf, least
    known: list[tuple[float, float]] = []
    for _ in range(100):
        value = function(x)
        if value is None:
            low = x
        elif abs(value - x) <= 1e-10 * x:
            return max(least, value)
        else:
            if value > x:
                low, high = x, min(high, value)
            elif x == least:
                return least
            else:
                high = x
            known = [*known[-1:], (x, value)]
        if high - low <= 1e-10 * low:
            break
        x = _between(known, low, high)
    return high if high < inf else low


def _between(known: list[tuple[float, float]], low: float, high: float) -> float:
    """The next guess at a fixed point in ``low`` to ``high`` from up to two (argument, value)."""
    if len(known) == 2:
        (x, value), (y, other) = known
        slope = (value - other) / (1.0 / x - 1.0 / y)
        base = value - slope / x
        square = base * base + 4.0 * slope
        guess = 0.5 * (base + sqrt(square)) if square >= 0.0 else low
        if low < guess < high:
            return guess
    if high == inf:
        return 1.3 * low
    return 0.5 * (low + high) if len(known) == 2 else 0.25 * low + 0.75 * high
