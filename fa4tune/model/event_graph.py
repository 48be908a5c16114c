"""Timed event graphs: the steady-state period of a loop is its largest cycle ratio.

A graph has nodes (operations) and arcs. An arc ``(source, target, weight, distance)`` says that ``target`` of
iteration *i* starts no earlier than ``weight`` cycles after ``source`` of iteration ``i - distance`` started.
Started as early as these arcs allow, the loop settles on a period of

    max over cycles of (sum of weights) / (sum of distances)

(Baccelli, Cohen, Olsder, Quadrat, "Synchronization and Linearity", 1992, theorem 3.28). Howard's policy
iteration finds it (Cochet-Terrasson et al., 1998); the cycle that attains it explains
the period.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fa4tune.errors import PlanError

_TOLERANCE = 1e-9


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

    def __post_init__(self) -> None:
        outgoing: list[list[int]] = [[] for _ in range(self.nodes)]
        incoming: list[list[int]] = [[] for _ in range(self.nodes)]
        for arc, (source, target) in enumerate(zip(self.sources, self.targets, strict=True)):
            outgoing[source].append(arc)
            incoming[target].append(arc)
        object.__setattr__(self, "outgoing", tuple(map(tuple, outgoing)))
        object.__setattr__(self, "incoming", tuple(map(tuple, incoming)))
        object.__setattr__(self, "order", self._topological())

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
    """The largest ratio, the arcs of the cycle that attains it in order, and the policy for a warm start.

    ``ratio`` is 0 and ``cycle`` empty for a graph without cycles.
    """

    ratio: float
    cycle: tuple[int, ...]
    policy: tuple[int, ...]


def maximum_cycle_ratio(
    arcs: Arcs, weights: Sequence[float], policy: Sequence[int] | None = None
) -> CycleRatio:
    """The largest cycle ratio by Howard's policy iteration.

    Args:
        arcs: the graph; every cycle has a distance of at least 1.
        weights: cycles of each arc, in the order of ``arcs``.
        policy: the ``policy`` of an earlier answer on the same arcs, as a start.

    Returns:
        The ratio in the unit of ``weights``, and a cycle that attains it.
    """
    targets, distances, outgoing = arcs.targets, arcs.distances, arcs.outgoing
    nodes = arcs.nodes
    # A node without arcs out lies on no cycle: -1.
    chosen = (
        list(policy)
        if policy is not None
        else [max(out, key=weights.__getitem__) if out else -1 for out in outgoing]
    )
    best = 0.0
    best_cycle: tuple[int, ...] = ()
    potential = [0.0] * nodes
    ratio = [0.0] * nodes
    for _ in range(200):
        best, best_cycle = _evaluate(arcs, weights, chosen, potential, ratio)
        improved = False
        for node in range(nodes):
            out = outgoing[node]
            if len(out) < 2:
                continue
            now_ratio, now_value, pick = ratio[node], potential[node], -1
            for arc in out:
                target = targets[arc]
                other = ratio[target]
                if other > now_ratio + _TOLERANCE * (1 + abs(now_ratio)):
                    now_ratio, pick = other, arc
                    now_value = weights[arc] - other * distances[arc] + potential[target]
                elif other >= now_ratio - _TOLERANCE * (1 + abs(now_ratio)):
                    value = weights[arc] - now_ratio * distances[arc] + potential[target]
                    if value > now_value + 1e-7 * (1 + abs(now_value)):
                        now_value, pick = value, arc
            if pick >= 0 and pick != chosen[node]:
                chosen[node] = pick
                improved = True
        if not improved:
            break
    return CycleRatio(best, best_cycle, tuple(chosen))


def _evaluate(
    arcs: Arcs, weights: Sequence[float], chosen: list[int], potential: list[float], ratio: list[float]
) -> tuple[float, tuple[int, ...]]:
    """Ratio and potential of every node under the policy ``chosen``; the largest ratio and its cycle."""
    targets, distances = arcs.targets, arcs.distances
    colour = [0] * arcs.nodes
    best = 0.0
    best_cycle: tuple[int, ...] = ()
    for root in range(arcs.nodes):
        if colour[root]:
            continue
        path = []
        node = root
        mark = root + 1
        while node >= 0 and not colour[node]:
            colour[node] = mark
            path.append(node)
            arc = chosen[node]
            node = targets[arc] if arc >= 0 else -1
        if node >= 0 and colour[node] == mark:  # a new cycle closes at node
            start = path.index(node)
            cycle = [chosen[n] for n in path[start:]]
            weight = distance = 0.0
            for arc in cycle:
                weight += weights[arc]
                distance += distances[arc]
            value = weight / distance
            if value > best or not best_cycle:
                best, best_cycle = value, tuple(cycle)
            ratio[node], potential[node] = value, 0.0
            end = start
        else:
            if node < 0:
                last = path.pop()
                ratio[last], potential[last] = 0.0, 0.0
            end = -1
        for member in reversed(path):
            if end >= 0 and member == node:
                continue
            arc = chosen[member]
            target = targets[arc]
            value = ratio[target]
            ratio[member] = value
            potential[member] = weights[arc] - value * distances[arc] + potential[target]
    return best, best_cycle


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
