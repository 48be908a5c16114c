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

    A policy is one arc out of each node. Its best cycle gives a ratio; potentials of the nodes under that
    ratio either prove that no cycle has a larger one, or name arcs that improve the policy.

    Args:
        arcs: the graph; every cycle has a distance of at least 1.
        weights: cycles of each arc, in the order of ``arcs``.
        policy: the ``policy`` of an earlier answer on the same arcs, as a start.

    Returns:
        The ratio in the unit of ``weights``, and a cycle that attains it.
    """
    sources, targets, distances = arcs.sources, arcs.targets, arcs.distances
    # A node without arcs out lies on no cycle: -1.
    chosen = (
        list(policy)
        if policy is not None
        else [max(out, key=weights.__getitem__) if out else -1 for out in arcs.outgoing]
    )
    potential = [0.0] * arcs.nodes
    tolerance = 1e-9 * (1.0 + sum(weights))
    for _ in range(10_000):
        ratio, cycle = _best_policy_cycle(arcs, weights, chosen)
        if cycle:
            _set_potentials(arcs, weights, chosen, ratio, sources[cycle[0]], potential)
        improved = False
        for arc, source in enumerate(sources):
            value = weights[arc] - ratio * distances[arc] + potential[targets[arc]]
            if value > potential[source] + tolerance:
                potential[source] = value
                chosen[source] = arc
                improved = True
        if not improved:
            break
    return CycleRatio(ratio, tuple(cycle), tuple(chosen))


def _best_policy_cycle(
    arcs: Arcs, weights: Sequence[float], chosen: Sequence[int]
) -> tuple[float, list[int]]:
    targets, distances = arcs.targets, arcs.distances
    colour = [-1] * arcs.nodes
    best = 0.0
    best_cycle: list[int] = []
    for root in range(arcs.nodes):
        node = root
        while node >= 0 and colour[node] < 0:
            colour[node] = root
            arc = chosen[node]
            node = targets[arc] if arc >= 0 else -1
        if node < 0 or colour[node] != root:
            continue
        start, cycle, weight, distance = node, [], 0.0, 0
        while True:
            arc = chosen[node]
            cycle.append(arc)
            weight += weights[arc]
            distance += distances[arc]
            node = targets[arc]
            if node == start:
                break
        if weight / distance > best or not best_cycle:
            best, best_cycle = weight / distance, cycle
    return best, best_cycle


def _set_potentials(
    arcs: Arcs,
    weights: Sequence[float],
    chosen: Sequence[int],
    ratio: float,
    root: int,
    potential: list[float],
) -> None:
    """Potentials of all nodes whose policy leads to ``root``, which keeps its own."""
    into: list[list[int]] = [[] for _ in range(arcs.nodes)]
    for node, arc in enumerate(chosen):
        if arc >= 0 and node != root:
            into[arcs.targets[arc]].append(node)
    ready = [root]
    while ready:
        target = ready.pop()
        base = potential[target]
        for node in into[target]:
            arc = chosen[node]
            potential[node] = weights[arc] - ratio * arcs.distances[arc] + base
            ready.append(node)


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
