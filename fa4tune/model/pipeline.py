"""From a plan's loop to a timed event graph, its steady state, and the run of whole tiles through it.

An operation that its role executes itself is one node. An asynchronous one is two: the issue, at which the
issuing warp waits for what the operation needs, and the execution, which its unit does in order. Issue orders
and dependencies are arcs. Iterations are K/V tiles; an issuer that runs ahead makes distances below zero,
which retiming removes (a node's turn is its tile plus its lag).

**Shared memory.** Operand reads of the tensor cores wait while SMEM takes in copies or serves threads, for a
part ``b`` of the period: an operation takes ``b * yielding`` cycles longer. What yields is ``smem_conflict``
of its operand cycles where these leave SMEM room for others, and all of them where they need the whole
bandwidth. Threads' own accesses take ``1 + utilisation of SMEM`` times as long.

**Sharing.** Where several roles use a unit and no order or barrier says who goes first, a role finds another
one there with the probability that the other is there at all, and then shares the unit with it evenly: work
``w`` of role *g* takes ``w (1 + c * sum of the others' busy fractions)``, ``c`` being ``contention`` of the
hardware file, or ``section_contention`` for sections. Roles that a ring of one stage keeps in step meet
surely. Busy fractions follow from these longer times and the period, so the three are solved together
(mean value analysis of a closed queueing network, Bard's approximation with exact self-exclusion). Two equal
roles that do nothing but share a unit take exactly twice as long each, and nothing beats the unit's total.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import exp, log
from typing import NamedTuple

from fa4tune.errors import PlanError
from fa4tune.hardware.gpu import Gpu
from fa4tune.kernels.plan import Dependency, Loop, Order, Unit
from fa4tune.model.event_graph import Arcs, CycleRatio, contract, maximum_cycle_ratio, slacks
from fa4tune.model.timing import UNITS, Duration, Rates

_FULL, _REMOTE, _SERVICE, _ISSUE, _TURN = range(5)
"""What an arc's weight is: the source's whole time, that and a barrier, its hold on the unit, its issue, that and
handing the turn to another role."""

TENSOR, SECTION, TMEM, TURNS = range(4)
"""Stations at which roles meet: tensor cores, warp schedulers with the pipes behind them, tensor memory; and
again the tensor cores for work that an order between roles lets in by turns, which meets only work outside
such an order."""

QUEUE = "queue"
"""Owner of the order in which tensor cores take products of roles that do not take turns."""

_STATIONS = 4
_SMEM, _EXP, _ALU, _FMA = (UNITS.index(unit) for unit in (Unit.SMEM, Unit.EXP, Unit.ALU, Unit.FMA))


ISSUES, EXECUTES, RUNS = range(3)
"""What a node is: an asynchronous operation's issue, its execution, or an operation of the role itself."""


GAMMA = [0.8, 1.0]


class Step(NamedTuple):
    """A node as a run meets it; ``waits`` are (operation, distance, across roles), ``orders`` (order, whether its
    turn goes to another role)."""

    kind: int
    operation: int
    lag: int
    needs_q: bool
    waits: tuple[tuple[int, int, bool], ...]
    orders: tuple[tuple[int, bool], ...]
    chains: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Skeleton:
    """Everything about a loop that does not depend on durations.

    ``values`` gives each arc's weight as an index into ``[full..., full + barrier..., service..., issue...]``
    over the operations. ``steps`` is what a run executes in a turn, in order.
    """

    arcs: Arcs
    values: tuple[int, ...]
    owners: tuple[int, ...]
    """Operation of each node."""
    groups: tuple[str, ...]
    group_of: tuple[int, ...]
    """Role of each operation, as an index into ``groups``."""
    in_step: bool
    """Whether a ring of one stage can keep roles in step: the next load waits for all of its readers."""
    turns: tuple[bool, ...]
    """Whether an order between roles says when an operation has the tensor cores."""
    covered: tuple[tuple[int, tuple[int, ...]], ...]
    """Matrix products of a role, each with the sections that it runs before it waits for the product."""
    lags: tuple[int, ...]
    order_owners: tuple[str, ...]
    steps: tuple[Step, ...]
    core: Arcs
    """The graph contracted to the nodes where paths join and part."""
    paths: tuple[tuple[int, ...], ...]
    """Arcs of ``arcs`` that each arc of ``core`` stands for."""
    picks: tuple[tuple[int, ...], ...]
    """Values that add up to the weight of each arc of ``core``."""
    chains: int
    why: tuple[str, ...]
    """What each arc says, for people."""


@lru_cache(maxsize=1024)
def _skeleton(
    operations: tuple[tuple[str, str, Unit, bool], ...],
    dependencies: tuple[Dependency, ...],
    orders: tuple[Order, ...],
) -> Skeleton:
    names = {name: index for index, (name, *_) in enumerate(operations)}
    used = {name for edge in dependencies for name in (edge.source, edge.target)}
    used.update(name for order in orders for name in order.operations)
    if strangers := sorted(used - names.keys()):
        raise PlanError(f"orders or dependencies name {', '.join(strangers)}, which the loop does not run")
    count = len(operations)
    issue_node = {}
    owners = list(range(count))
    for index, (_, _, _, asynchronous) in enumerate(operations):
        if asynchronous:
            issue_node[index] = len(owners)
            owners.append(index)
    begin = [issue_node.get(index, index) for index in range(count)]
    arcs: list[tuple[int, int, int, int, str]] = []
    waits: list[list[tuple[int, int, bool]]] = [[] for _ in owners]
    in_orders: list[list[int]] = [[] for _ in owners]
    in_chains: list[list[int]] = [[] for _ in owners]

    def value(kind: int, operation: int) -> int:
        return kind * count + operation

    for index, node in issue_node.items():
        arcs.append((node, index, value(_ISSUE, index), 0, "issue"))
    for dependency in dependencies:
        source, target = names[dependency.source], names[dependency.target]
        remote = operations[source][1] != operations[target][1]
        weight = value(_REMOTE if remote else _FULL, source)
        why = dependency.why or "dependency"
        arcs.append((source, begin[target], weight, dependency.distance, why))
        waits[begin[target]].append((source, dependency.distance, remote))
    chain_count = 0
    handing: dict[tuple[int, int], bool] = {}
    turns = [False] * count
    for number, order in enumerate(orders):
        members = [names[name] for name in order.operations]
        for member in members:
            in_orders[begin[member]].append(number)
        edges = (
            order.dependencies()
            if len(members) > 1
            else (Dependency(order.operations[0], order.operations[0], 1),)
        )
        for edge in edges:
            source, target = names[edge.source], names[edge.target]
            handed = order.owner != QUEUE and operations[source][1] != operations[target][1]
            kind = (_TURN if handed else _ISSUE) if source in issue_node else _FULL
            weight = value(kind, source)
            handing[number, begin[source]] = kind == _TURN
            arcs.append((begin[source], begin[target], weight, edge.distance, f"order of {order.owner}"))
        lags = order.lags or (0,) * len(members)
        for unit in {operations[m][2] for m in members if m in issue_node}:
            chain = [
                (m, lag)
                for m, lag in zip(members, lags, strict=True)
                if m in issue_node and operations[m][2] == unit
            ]
            for (a, lag_a), (b, lag_b) in zip(
                chain, [*chain[1:], (chain[0][0], chain[0][1] - 1)], strict=True
            ):
                arcs.append((a, b, value(_SERVICE, a), lag_a - lag_b, f"{unit} in order"))
            for member, _ in chain:
                in_chains[member].append(chain_count)
            chain_count += 1
            if unit == Unit.TENSOR and len({operations[m][1] for m, _ in chain}) > 1:
                for member, _ in chain:
                    turns[member] = True
    covered = _covered(operations, names, dependencies, orders)
    lags_of = _retime(len(owners), arcs)
    graph = Arcs(
        len(owners),
        tuple(a[0] for a in arcs),
        tuple(a[1] for a in arcs),
        tuple(a[3] + lags_of[a[1]] - lags_of[a[0]] for a in arcs),
    )
    rank = {_REMOTE: 3, _FULL: 2, _SERVICE: 1, _TURN: 1, _ISSUE: 0}

    held: dict[tuple[int, ...], dict[tuple[int, bool], list[int]]] = {}

    def kinds_of(path: tuple[int, ...]) -> dict[tuple[int, bool], list[int]]:
        """Kinds of each operation's weights on a path, the heaviest first; an issue is of its own kind."""
        found = held.get(path)
        if found is None:
            found = {}
            for arc in path:
                kind, operation = divmod(arcs[arc][2], count)
                found.setdefault((operation, kind in (_ISSUE, _TURN)), []).append(rank[kind])
            for kinds in found.values():
                kinds.sort(reverse=True)
            held[path] = found
        return found

    def outweighs(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
        heavy, light = kinds_of(one), kinds_of(other)
        if len(light) > len(heavy):
            return False
        for key, kinds in light.items():
            mine = heavy.get(key)
            if mine is None or len(mine) < len(kinds):
                return False
            for a, b in zip(mine, kinds, strict=False):
                if a < b:
                    return False
        return True

    core, paths = contract(graph, outweighs)
    groups = tuple(dict.fromkeys(role for _, role, _, _ in operations))
    steps = []
    for node in graph.order:
        operation = owners[node]
        kind = ISSUES if node >= count else EXECUTES if operation in issue_node else RUNS
        steps.append(
            Step(
                kind,
                operation,
                lags_of[node],
                operations[operation][2] == Unit.TENSOR and kind != EXECUTES,
                tuple(waits[node]),
                tuple([(number, handing.get((number, node), False)) for number in in_orders[node]]),
                tuple(in_chains[node]),
            )
        )
    return Skeleton(
        arcs=graph,
        values=tuple(a[2] for a in arcs),
        owners=tuple(owners),
        groups=groups,
        group_of=tuple(groups.index(role) for _, role, _, _ in operations),
        in_step=not any(turns)
        and any(
            len(
                {
                    operations[names[d.source]][1]
                    for d in dependencies
                    if d.target == copy and d.distance == 1 and operations[names[d.source]][2] == Unit.TENSOR
                }
            )
            > 1
            for copy in {d.target for d in dependencies if operations[names[d.target]][2] == Unit.L2}
        ),
        turns=tuple(turns),
        covered=covered,
        lags=tuple(lags_of),
        order_owners=tuple(order.owner for order in orders),
        steps=tuple(steps),
        core=core,
        paths=paths,
        picks=tuple(tuple(arcs[arc][2] for arc in path) for path in paths),
        chains=chain_count,
        why=tuple(a[4] for a in arcs),
    )


def _covered(
    operations: tuple[tuple[str, str, Unit, bool], ...],
    names: dict[str, int],
    dependencies: tuple[Dependency, ...],
    orders: tuple[Order, ...],
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Products under which a role's own sections run: those between its issue and the first that needs it."""
    needed = {(names[edge.source], names[edge.target]) for edge in dependencies}
    found = []
    for order in orders:
        members = [names[name] for name in order.operations]
        for place, product in enumerate(members):
            _, role, unit, asynchronous = operations[product]
            if role != order.owner or unit != Unit.TENSOR or not asynchronous:
                continue
            between = []
            for other in [*members[place + 1 :], *members[:place]]:
                if (product, other) in needed:
                    break
                if not operations[other][3]:
                    between.append(other)
            if between:
                found.append((product, tuple(between)))
    return tuple(found)


def _retime(nodes: int, arcs: list[tuple[int, int, int, int, str]]) -> list[int]:
    """Turns that each node trails its tile by, so that no arc reaches into a later turn."""
    lags = [0] * nodes
    for _ in range(nodes + 1):
        moved = False
        for source, target, _, distance, _ in arcs:
            if lags[source] - distance > lags[target]:
                lags[target] = lags[source] - distance
                moved = True
        if not moved:
            return lags
    raise PlanError("operations wait for each other's later tiles in a circle; the loop can never start")


_SKELETONS: dict[int, tuple[Loop, Skeleton]] = {}
"""By identity: plan builders keep their loops, and hashing one takes as long as solving it."""


def skeleton(loop: Loop) -> Skeleton:
    """The event graph of ``loop`` without durations; loops that differ in work only share one.

    Raises:
        PlanError: the operations wait for each other, so that no iteration can complete.
    """
    found = _SKELETONS.get(id(loop))
    if found is not None and found[0] is loop:
        return found[1]
    shape = _skeleton(
        tuple([(op.name, op.role, op.unit, op.asynchronous) for op in loop.body]),
        loop.dependencies,
        loop.orders,
    )
    if len(_SKELETONS) > 10_000:
        _SKELETONS.clear()
    _SKELETONS[id(loop)] = (loop, shape)
    return shape


_QUEUED: dict[int, tuple[Loop, Loop | None]] = {}


def queued(loop: Loop) -> Loop | None:
    """``loop`` with the matrix products of its roles taken in a fixed order, first come, first served.

    None where there is no choice: one role has all products, or roles take turns anyway.
    """
    found = _QUEUED.get(id(loop))
    if found is not None and found[0] is loop:
        return found[1]
    role_of = {operation.name: operation.role for operation in loop.body}
    products = {operation.name for operation in loop.body if operation.mma and operation.asynchronous}
    names: list[str] = []
    lags: list[int] = []
    roles = 0
    for order in loop.orders:
        leading: list[int] = []
        for place, name in enumerate(order.operations):
            if name not in products:
                break
            leading.append(place)
        if not leading:
            continue
        if any(role_of[name] != order.owner for name in order.operations):
            roles = 0
            break
        roles += 1
        for place in leading:
            names.append(order.operations[place])
            lags.append(order.lags[place] if order.lags else 0)
    answer = None
    if roles > 1:
        answer = replace(loop, orders=(*loop.orders, Order(QUEUE, tuple(names), tuple(lags))))
    if len(_QUEUED) > 10_000:
        _QUEUED.clear()
    _QUEUED[id(loop)] = (loop, answer)
    return answer


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


@dataclass(slots=True)
class Timed:
    """A loop with durations: the weights of its arcs under the sharing rule, and its period.

    ``period`` is the larger of the largest cycle ratio ``ratio`` and the largest unit total; ``totals`` are
    cycles an iteration by unit of :data:`fa4tune.model.timing.UNITS`, all CTAs of
    an SM; ``values`` the cycles that arcs pick from; ``stretch`` the delay factor by role and station.
    """

    skeleton: Skeleton
    durations: tuple[Duration, ...]
    values: list[float]
    period: float
    ratio: float
    cycle: tuple[int, ...]
    totals: list[float]
    stretch: list[list[float]]
    blocked: float
    """Part of the time that SMEM serves others than the tensor cores."""
    tensor_total: float
    """Cycles an iteration that the tensor cores are held, with these waits; the period is no shorter."""

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


_LAST: dict[int, tuple[Skeleton, CycleRatio]] = {}
"""The last answer by graph: the next config with the same graph starts there. Any start is correct."""


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
        start: an earlier answer on the same graph, to start from.
    """
    gpu = rates.gpu
    groups = len(shape.groups)
    totals = [0.0] * len(UNITS)
    operands = yielding = held = 0.0
    demand = [[0.0] * _STATIONS for _ in range(groups)]
    by_turns = shape.turns
    sections, hindered = _own_products(shape, durations, weights)
    slowed = [0.0] * groups
    dense = [0.0] * groups
    products = [0.0] * groups
    for index, (duration, weight, group) in enumerate(zip(durations, weights, shape.group_of, strict=True)):
        if weight:
            operands += duration.operands * weight
            held += duration.tensor * weight
            yielding += duration.yielding * weight
            for unit, cycles in enumerate(duration.units):
                if cycles:
                    totals[unit] += cycles * weight
            own = demand[group]
            own[TURNS if by_turns[index] else TENSOR] += duration.tensor * weight
            own[SECTION] += sections[index] * weight
            slowed[group] += hindered[index] * weight
            dense[group] += duration.dense * weight
            products[group] += duration.tensor * weight
            own[TMEM] += duration.tmem * weight
    if copies > 1:
        totals = [total * copies for total in totals]
        operands *= copies
        yielding *= copies
        held *= copies
    floor = max(*totals, held, *_beside(totals, held, gpu))
    elsewhere = [held - own for own in products]
    undisturbed = [own[SECTION] for own in demand]
    others = max(0.0, totals[_SMEM] - operands)
    meets = [
        station
        for station in (TENSOR, SECTION, TMEM)
        if (gpu.section_contention if station == SECTION else gpu.contention)
        and (copies > 1 or sum([1 for d in demand if d[station] or (station == TENSOR and d[TURNS])]) > 1)
    ]
    in_step = False
    stretch = [row[:] for row in start.stretch] if start else [[1.0] * _STATIONS for _ in range(groups)]
    core, picks, distances = shape.core, shape.picks, shape.arcs.distances
    known = _LAST.get(id(shape))
    met = [0.0] * groups
    if known is not None and known[0] is shape:
        answer = known[1]
        period = start.period if start else floor
    else:
        values = _values(
            shape,
            durations,
            weights,
            sections,
            stretch,
            gpu,
            others / floor,
            min(1.0, totals[_SMEM] / floor),
        )
        answer = maximum_cycle_ratio(core, [sum([values[v] for v in pick]) for pick in picks])
        period = max(answer.ratio, floor)
    while True:
        for _ in range(30):
            cycle = [arc for path in answer.cycle for arc in shape.paths[path]]
            along, fixed = _along(
                shape, durations, weights, sections, hindered, gpu, cycle, min(1.0, totals[_SMEM] / period)
            )
            turns = sum([distances[arc] for arc in cycle])
            # along the cycle found last, the fixed point costs little
            cycles = 0.0
            for _ in range(8):
                inner, last = period, cycles
                for group, work in enumerate(elsewhere):
                    met[group] = min(1.0, work / period)
                    demand[group][SECTION] = undisturbed[group] + slowed[group] * met[group]
                if meets:
                    _share(stretch, demand, period, meets, gpu, copies, in_step)
                    if any(dense):
                        everyone = sum(dense)
                        for group, factors in enumerate(stretch):
                            held_up = GAMMA[0] * (everyone * copies - dense[group]) / period
                            if demand[group][SECTION]:
                                factors[SECTION] += held_up*GAMMA[1]
                                factors[TENSOR] += held_up
                                factors[TURNS] += held_up
                blocked = others / period
                cycles = fixed
                for group, (tensor, fed, section, tmem, turn, turn_fed, slow) in along.items():
                    factors = stretch[group]
                    section += slow * met[group]
                    cycles += (tensor + blocked * fed) * factors[TENSOR]
                    if turn:
                        cycles += (turn + blocked * turn_fed) * factors[TURNS]
                    cycles += section * factors[SECTION] + tmem * factors[TMEM]
                period = 0.5 * (inner + max(cycles / turns, floor, held + blocked * yielding))
                # where a total binds, the period stands still before the factors do
                if abs(period - inner) < 1e-4 * period and abs(cycles - last) < 5e-4 * cycles:
                    break
            before = period
            longer = [
                section + slow * met[group]
                for section, slow, group in zip(sections, hindered, shape.group_of, strict=True)
            ]
            values = _values(
                shape, durations, weights, longer, stretch, gpu, blocked, min(1.0, totals[_SMEM] / period)
            )
            answer = maximum_cycle_ratio(core, [sum([values[v] for v in pick]) for pick in picks], answer.policy)
            tensor_total = held + blocked * yielding
            period = max(answer.ratio, floor, tensor_total)
            if abs(period - before) < 3e-4 * period:
                break
        # another CTA on the SM disturbs the step
        waits = any(arc_waits_for_copy(shape, durations, arc) for path in answer.cycle for arc in shape.paths[path])
        if in_step or not shape.in_step or copies > 1 or not waits:
            break
        in_step = True
    if len(_LAST) > 4096:
        _LAST.clear()
    _LAST[id(shape)] = shape, answer
    cycle = [arc for path in answer.cycle for arc in shape.paths[path]]
    return Timed(
        shape,
        tuple(durations),
        values,
        period,
        answer.ratio,
        tuple(cycle),
        totals,
        stretch,
        blocked,
        tensor_total,
    )


def arc_waits_for_copy(shape: Skeleton, durations: Sequence[Duration], arc: int) -> bool:
    """Whether an arc stands for a bulk copy."""
    duration = durations[shape.values[arc] % len(durations)]
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
    sections, _ = _own_products(shape, durations, present)
    values = _values(
        shape, durations, present, sections, [[1.0] * _STATIONS for _ in shape.groups], rates.gpu, 0.0, 0.0
    )
    known = _LAST.get(id(shape))
    policy = known[1].policy if known is not None and known[0] is shape else None
    ratio = maximum_cycle_ratio(
        shape.core, [sum([values[v] for v in pick]) for pick in shape.picks], policy
    ).ratio
    return max(ratio, max(timed.totals) / len(sharing))


def _beside(totals: Sequence[float], held: float, gpu: Gpu) -> tuple[float, float, float]:
    """What exponentials, ALU and FMA take at least where the tensor cores work for ``held`` cycles of it."""
    return (
        totals[_EXP] + held * (1.0 - gpu.exp_beside_mma) if totals[_EXP] else 0.0,
        totals[_ALU] + held * (1.0 - gpu.alu_beside_mma) if totals[_ALU] else 0.0,
        totals[_FMA] + held * (1.0 - gpu.fma_beside_mma) if totals[_FMA] else 0.0,
    )


def _own_products(
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


def _along(
    shape: Skeleton,
    durations: Sequence[Duration],
    weights: Sequence[float],
    sections: Sequence[float],
    hindered: Sequence[float],
    gpu: Gpu,
    cycle: Sequence[int],
    taken: float,
) -> tuple[dict[int, list[float]], float]:
    """Cycles along ``cycle``: what is stretched, by role, and the rest.

    By role: tensor cycles, their operands, section, tensor memory, tensor cycles by turns, their operands, and
    by how much the section is longer where other roles' products run all the time.
    """
    count = len(durations)
    sums: dict[int, list[float]] = {}
    fixed = 0.0
    for arc in cycle:
        kind, operation = divmod(shape.values[arc], count)
        duration, weight = durations[operation], weights[operation]
        if kind in (_ISSUE, _TURN):
            fixed += duration.issue * weight
            if kind == _TURN:
                fixed += gpu.turn_latency_clk
            continue
        if kind == _REMOTE:
            fixed += gpu.barrier_latency_clk
        if not weight:
            continue
        group = shape.group_of[operation]
        row = sums.setdefault(group, [0.0] * 7)
        if duration.asynchronous:
            at = 4 if shape.turns[operation] else 0
            row[at] += duration.tensor * weight
            row[at + 1] += duration.yielding * weight
            fixed += (duration.other + (duration.latency if kind != _SERVICE else 0.0)) * weight
        else:
            row[2] += sections[operation] * weight
            row[6] += hindered[operation] * weight
            row[3] += duration.tmem * weight
            fixed += (duration.other * (1.0 + taken) + duration.latency) * weight
            if weight < 1.0:
                fixed += gpu.arithmetic_latency_clk
    return sums, fixed


def _share(
    stretch: list[list[float]],
    demand: list[list[float]],
    period: float,
    meets: list[int],
    gpu: Gpu,
    copies: int,
    in_step: bool,
) -> None:
    """The sharing rule, once around all roles: each one's factor from the others' busy fractions."""
    for station in meets:
        contention = gpu.section_contention if station == SECTION else gpu.contention
        busy = []
        for own, factors in zip(demand, stretch, strict=True):
            part = own[station] * factors[station]
            if station == TENSOR:
                part += own[TURNS] * factors[TURNS]
            part /= period
            busy.append(part if part < 1.0 else 1.0)
        everyone = sum(busy)
        for group, factors in enumerate(stretch):
            own = demand[group]
            load = own[station]
            if load:
                others = everyone - busy[group]
                if in_step:
                    others = sum([min(1.0, d[station] / load) for d in demand]) - 1.0
                factors[station] = 1.0 + contention * (others + (copies - 1) * everyone)
                part = load * factors[station]
                if station == TENSOR:
                    part += own[TURNS] * factors[TURNS]
                part /= period
                part = part if part < 1.0 else 1.0
                everyone += part - busy[group]
                busy[group] = part
        if station == TENSOR:
            free = [
                min(1.0, own[TENSOR] * f[TENSOR] / period) for own, f in zip(demand, stretch, strict=True)
            ]
            outside = sum(free)
            for group, factors in enumerate(stretch):
                if demand[group][TURNS]:
                    factors[TURNS] = 1.0 + contention * (outside - free[group] + (copies - 1) * everyone)


def _values(
    shape: Skeleton,
    durations: Sequence[Duration],
    weights: Sequence[float],
    sections: Sequence[float],
    stretch: list[list[float]],
    gpu: Gpu,
    blocked: float,
    taken: float,
) -> list[float]:
    """Full, remote, service and issue cycles of every operation under ``stretch``."""
    full, remote, service, issue, turn = [], [], [], [], []
    barrier, vote = gpu.barrier_latency_clk, gpu.arithmetic_latency_clk
    for index, (duration, weight, group) in enumerate(zip(durations, weights, shape.group_of, strict=True)):
        factors = stretch[group]
        if duration.asynchronous:
            met = factors[TURNS if shape.turns[index] else TENSOR]
            hold = (duration.tensor + blocked * duration.yielding) * met + duration.other
            whole = (hold + duration.latency) * weight
            hold *= weight
        else:
            hold = whole = weight * (
                sections[index] * factors[SECTION]
                + duration.tmem * factors[TMEM]
                + duration.other * (1.0 + taken)
                + duration.latency
            )
            if 0.0 < weight < 1.0:
                # to go through it or around takes a vote and a branch, which drain the pipeline
                hold = whole = whole + vote
        full.append(whole)
        remote.append(whole + barrier)
        service.append(hold)
        issue.append(duration.issue * weight)
        turn.append(duration.issue * weight + gpu.turn_latency_clk)
    return full + remote + service + issue + turn
