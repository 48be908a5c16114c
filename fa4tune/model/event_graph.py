"""Timed event graphs: the steady-state period of a loop is its largest cycle ratio.

A graph has nodes (operations) and arcs. An arc ``(source, target, weight, distance)`` says that ``target`` of
iteration *i* starts no earlier than ``weight`` cycles after ``source`` of iteration ``i - distance`` started.
Started as early as these arcs allow, the loop settles on a period of

    max over cycles of (sum of weights) / (sum of distances)

(Baccelli, Cohen, Olsder, Quadrat, "Synchronization and Linearity", 1992, theorem 3.28). A ratio is the
largest one when no cycle is positive after it is taken off each arc as often as the arc's distance says,
which longest paths tell (Lawler, "Combinatorial Optimization", 1976, section 3.13); a positive cycle gives
the next ratio to try. The cycle that attains the largest explains the period.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

from fa4tune.errors import PlanError


@dataclass(frozen=True, slots=True)
class Arcs:
    """The structure of a graph, without weights: arrays of equal length, and what is derived from them once.

    Args:
        nodes: number of nodes.
        sources, targets, distances: of each arc.

    Raises:
        PlanError: a cycle of distance 0, which could never start.
    """

    nodes: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    distances: tuple[int, ...]
    outgoing: tuple[tuple[int, ...], ...] = field(init=False)
    order: tuple[int, ...] = field(init=False)
    incoming: tuple[tuple[int, ...], ...] = field(init=False)
    backwards: tuple[tuple[int, tuple[tuple[int, int], ...]], ...] = field(init=False)
    """Nodes against ``order``, each with its outgoing arcs and their targets."""

    def __post_init__(self) -> None:
        outgoing: list[list[int]] = [[] for _ in range(self.nodes)]
        incoming: list[list[int]] = [[] for _ in range(self.nodes)]
        for arc, (source, target) in enumerate(zip(self.sources, self.targets, strict=True)):
            outgoing[source].append(arc)
            incoming[target].append(arc)
        object.__setattr__(self, "outgoing", tuple(map(tuple, outgoing)))
        object.__setattr__(self, "incoming", tuple(map(tuple, incoming)))
        object.__setattr__(self, "order", self._topological())
        backwards = [
            (node, tuple([(a, self.targets[a]) for a in outgoing[node]])) for node in self.order[::-1]
        ]
        object.__setattr__(self, "backwards", tuple(backwards))

    def _topological(self) -> tuple[int, ...]:
        waiting = [0] * self.nodes
        for target, distance in zip(self.targets, self.distances, strict=True):
            if distance < 0:
                raise PlanError(
                    f"an arc has distance {distance}; an operation cannot wait for a later iteration"
                )
            waiting[target] += distance == 0
        ready = [node for node in range(self.nodes) if not waiting[node]]
        order = []
        while ready:
            node = ready.pop()
            order.append(node)
            for arc in self.outgoing[node]:
                if self.distances[arc] == 0:
                    target = self.targets[arc]
                    waiting[target] -= 1
                    if not waiting[target]:
                        ready.append(target)
        if len(order) < self.nodes:
            stuck = ", ".join(str(node) for node in range(self.nodes) if waiting[node])
            raise PlanError(
                f"operations {stuck} wait for each other in one iteration; the loop can never start"
            )
        return tuple(order)


Path = tuple[int, ...]
"""Arcs one after the other, as indexes."""


def contract(
    arcs: Arcs, outweighs: Callable[[Path, Path], bool] = lambda a, b: False
) -> tuple[Arcs, tuple[Path, ...]]:
    """A smaller graph with the same largest cycle ratio.

    Nodes with few arcs in or out are bypassed, each path through them becoming an arc. Of two arcs between
    the same nodes the one with the larger distance is dropped where it can never weigh more.

    Args:
        arcs: the graph.
        outweighs: whether the first path weighs at least as much as the second whatever the weights.

    Returns:
        The graph, and for each of its arcs the path of the given graph that it stands for.
    """
    into: list[dict[int, list[tuple[Path, int]]]] = [{} for _ in range(arcs.nodes)]
    out: list[dict[int, list[tuple[Path, int]]]] = [{} for _ in range(arcs.nodes)]

    def add(source: int, target: int, path: Path, distance: int) -> None:
        parallel = out[source].setdefault(target, [])
        into[target][source] = parallel
        if any(d <= distance and outweighs(p, path) for p, d in parallel):
            return
        parallel[:] = [(p, d) for p, d in parallel if not (distance <= d and outweighs(path, p))]
        parallel.append((path, distance))

    for arc in range(len(arcs.sources)):
        add(arcs.sources[arc], arcs.targets[arc], (arc,), arcs.distances[arc])
    alive = set(range(arcs.nodes))

    def growth(node: int) -> int:
        """Arcs that bypassing a node adds."""
        if node in out[node]:
            return 1
        i, o = sum(map(len, into[node].values())), sum(map(len, out[node].values()))
        return i * o - i - o

    cost = {node: growth(node) for node in alive}
    while cost:
        node = min(cost, key=lambda n: (cost[n], n))
        if cost.pop(node) > 0:
            break
        touched = {*into[node], *out[node]}
        for source, first in into[node].items():
            for target, second in out[node].items():
                for p, d in first:
                    for q, e in second:
                        add(source, target, p + q, d + e)
        for source in into[node]:
            del out[source][node]
        for target in out[node]:
            del into[target][node]
        into[node], out[node] = {}, {}
        alive.discard(node)
        cost.update((other, growth(other)) for other in touched if other in cost)
    number = {node: index for index, node in enumerate(sorted(alive))}
    kept = [
        (number[source], number[target], distance, path)
        for source in sorted(alive)
        for target, parallel in sorted(out[source].items())
        for path, distance in parallel
    ]
    core = Arcs(len(number), tuple(k[0] for k in kept), tuple(k[1] for k in kept), tuple(k[2] for k in kept))
    return core, tuple(k[3] for k in kept)


@dataclass(frozen=True, slots=True)
class CycleRatio:
    """The largest ratio, the arcs of a cycle that attains it in order, and potentials that prove it.

    Where no cycle has a ratio above the one asked for, ``ratio`` is that one and ``cycle`` empty.
    """

    ratio: float
    cycle: tuple[int, ...]
    potentials: list[float]


def maximum_cycle_ratio(
    arcs: Arcs, weights: Sequence[float], least: float = 0.0, potentials: Sequence[float] | None = None
) -> CycleRatio:
    """The largest cycle ratio above ``least``.

    Under a ratio, potentials of the nodes grow to the heaviest paths out of them, a node's arc that made it
    grow last being its choice. A cycle of choices has a larger ratio, which takes over; potentials that stand
    still prove that none has.

    Args:
        arcs: the graph; every cycle has a distance of at least 1.
        weights: cycles of each arc, in the order of ``arcs``.
        least: a ratio known to be attained, or below which answers are of no interest.
        potentials: of an earlier answer on the same arcs, as a start. Any start gives the same ratio.

    Returns:
        The ratio in the unit of ``weights``, and a cycle that attains it.
    """
    ratio = least
    cycle: tuple[int, ...] = ()
    value = list(potentials) if potentials is not None else [0.0] * arcs.nodes
    # what potentials must grow by at least: above the rounding of sums of weights
    tolerance = 1e-11 * (1.0 + sum(weights))
    while True:
        reduced = [w - ratio * distance for w, distance in zip(weights, arcs.distances, strict=True)]
        around = _positive_cycle(arcs, reduced, value, tolerance)
        found, best = _best(arcs, weights, around)
        if found <= ratio:
            return CycleRatio(ratio, cycle, value)
        ratio, cycle = found, best


def _positive_cycle(
    arcs: Arcs, reduced: Sequence[float], value: list[float], tolerance: float
) -> list[list[int]]:
    """Cycles whose reduced weights add up to more than 0; none once ``value``, which grows, stands still."""
    targets = arcs.targets
    chosen = [-1] * arcs.nodes
    while True:
        moved = False
        for node, out in arcs.backwards:
            best, pick = value[node] + tolerance, -1
            for arc, target in out:
                through = reduced[arc] + value[target]
                if through > best:
                    best, pick = through, arc
            if pick >= 0:
                value[node], chosen[node] = best, pick
                moved = True
        if not moved:
            return []
        if found := _cycles_of(targets, chosen):
            return found


def _cycles_of(targets: Sequence[int], chosen: Sequence[int]) -> list[list[int]]:
    """Cycles, as arcs, of a graph with at most one arc out of each node (-1 is none)."""
    seen = [-1] * len(chosen)
    found = []
    for root in range(len(chosen)):
        node = root
        while seen[node] < 0:
            seen[node] = root
            arc = chosen[node]
            if arc < 0:
                break
            node = targets[arc]
        else:
            if seen[node] == root:
                start, cycle = node, []
                while True:
                    cycle.append(chosen[node])
                    node = targets[chosen[node]]
                    if node == start:
                        break
                found.append(cycle)
    return found


def _best(arcs: Arcs, weights: Sequence[float], cycles: list[list[int]]) -> tuple[float, tuple[int, ...]]:
    best: tuple[float, tuple[int, ...]] = (-inf, ())
    for cycle in cycles:
        distance = sum([arcs.distances[arc] for arc in cycle])
        ratio = sum([weights[arc] for arc in cycle]) / distance
        if ratio > best[0]:
            best = ratio, tuple(cycle)
    return best


def simulate(
    arcs: Arcs, weights: Sequence[float], iterations: int, not_before: Sequence[float] | None = None
) -> list[list[float]]:
    """Earliest start of every node in every iteration, by the definition of the arcs.

    Args:
        arcs: the graph.
        weights: cycles of each arc.
        iterations: how many to run.
        not_before: earliest start of each node in iteration 0.

    Returns:
        ``starts[iteration][node]``; nothing starts before 0, arcs from before iteration 0 do not bind.
    """
    starts: list[list[float]] = []
    plan = [
        (node, [(arcs.sources[a], arcs.distances[a], weights[a]) for a in arcs.incoming[node]])
        for node in arcs.order
    ]
    first = list(not_before) if not_before is not None else [0.0] * arcs.nodes
    for iteration in range(iterations):
        now = list(first) if iteration == 0 else [0.0] * arcs.nodes
        starts.append(now)
        for node, incoming in plan:
            at = now[node]
            for source, distance, weight in incoming:
                if distance <= iteration:
                    begin = starts[iteration - distance][source] + weight
                    if begin > at:
                        at = begin
            now[node] = at
    return starts


def slacks(arcs: Arcs, weights: Sequence[float], period: float) -> list[float]:
    """How many cycles each node could take longer before the period grows; 0 on the critical cycle.

    For each node, the smallest ``period * distance - weight`` over the cycles through it (Floyd-Warshall on
    these reduced costs); infinity for a node on no cycle.
    """
    infinity = float("inf")
    n = arcs.nodes
    cost = [[infinity] * n for _ in range(n)]
    for arc in range(len(arcs.sources)):
        s, t = arcs.sources[arc], arcs.targets[arc]
        cost[s][t] = min(cost[s][t], period * arcs.distances[arc] - weights[arc])
    for k in range(n):
        row_k = cost[k]
        for i in range(n):
            through = cost[i][k]
            if through == infinity:
                continue
            row = cost[i]
            for j in range(n):
                value = through + row_k[j]
                if value < row[j]:
                    row[j] = value
    return [max(0.0, cost[i][i]) if cost[i][i] < infinity else infinity for i in range(n)]
