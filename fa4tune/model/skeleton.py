"""The event graph of a plan's loop without durations.

An operation that its role executes itself is one node. An asynchronous one is two: the issue, at which the
issuing warp waits for what the operation needs, and the execution, which its unit does in order. Issue orders
and dependencies are arcs. Iterations are K/V tiles; an issuer that runs ahead makes distances below zero,
which retiming removes (a node's turn is its tile plus its lag).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from fa4tune.errors import PlanError
from fa4tune.kernels.plan import Dependency, Loop, Order, Unit
from fa4tune.model.event_graph import Arcs, Path, contract

FULL, REMOTE, SERVICE, ISSUE, TURN = range(5)
"""What an arc's weight is: the source's whole time, that and a barrier, its hold on the unit, its issue, that
and handing the turn to another role."""

RANK = {REMOTE: 3, FULL: 2, SERVICE: 1, TURN: 1, ISSUE: 0}
"""Kinds of weight of one operation by size; issues are compared with issues only."""

ISSUES, EXECUTES, RUNS = range(3)
"""What a node is: an asynchronous operation's issue, its execution, or an operation of the role itself."""

QUEUE = "queue"
"""Owner of the order in which tensor cores take products of roles that do not take turns."""

Named = tuple[str, str, Unit, bool]
"""An operation's name, role and unit, and whether it is asynchronous."""


class Step(NamedTuple):
    """A node as a run meets it; ``waits`` are (operation, distance, across roles), ``orders`` (order, whether
    its turn goes to another role)."""

    kind: int
    operation: int
    lag: int
    needs_q: bool
    waits: tuple[tuple[int, int, bool], ...]
    orders: tuple[tuple[int, bool], ...]
    chains: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Skeleton:
    """Everything about a loop that does not depend on durations.

    Attributes:
        arcs: the event graph.
        values: each arc's weight as an index into the values of :data:`FULL`, :data:`REMOTE` and so on, each
            over all operations.
        owners: operation of each node.
        groups: roles.
        group_of: role of each operation, as an index into ``groups``.
        in_step: whether a ring of one stage can keep roles in step: its next load waits for all readers.
        turns: whether an order between roles says when an operation has the tensor cores.
        covered: products of a role, each with the sections that it runs before it waits for the product.
        lags: turns that each node trails its tile by.
        order_owners: who keeps each order.
        steps: what a run executes in a turn, in order.
        core: the graph contracted to the nodes where paths join and part.
        paths: arcs of ``arcs`` that each arc of ``core`` stands for.
        picked, picked_from: values whose sums are the weights of ``core``, arc after arc, and where each
            arc's begin.
        chains: units that take operations in order, by order.
        why: what each arc says, for people.
    """

    arcs: Arcs
    values: tuple[int, ...]
    owners: tuple[int, ...]
    groups: tuple[str, ...]
    group_of: tuple[int, ...]
    in_step: bool
    turns: tuple[bool, ...]
    covered: tuple[tuple[int, tuple[int, ...]], ...]
    lags: tuple[int, ...]
    order_owners: tuple[str, ...]
    steps: tuple[Step, ...]
    core: Arcs
    paths: tuple[Path, ...]
    picked: np.ndarray
    picked_from: np.ndarray
    chains: int
    why: tuple[str, ...]

    def core_weights(self, values: list[float]) -> list[float]:
        """Weights of the arcs of ``core`` under ``values``."""
        weights: list[float] = np.add.reduceat(np.array(values)[self.picked], self.picked_from).tolist()
        return weights

    def along(self, core_cycle: tuple[int, ...]) -> list[int]:
        """Arcs of ``arcs`` along a cycle of ``core``."""
        return [arc for path in core_cycle for arc in self.paths[path]]


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


@lru_cache(maxsize=1024)
def _skeleton(
    operations: tuple[Named, ...], dependencies: tuple[Dependency, ...], orders: tuple[Order, ...]
) -> Skeleton:
    names = {name: index for index, (name, *_) in enumerate(operations)}
    used = {name for edge in dependencies for name in (edge.source, edge.target)}
    used.update(name for order in orders for name in order.operations)
    if strangers := sorted(used - names.keys()):
        raise PlanError(f"orders or dependencies name {', '.join(strangers)}, which the loop does not run")
    built = _Builder(operations, names)
    for dependency in dependencies:
        built.depend(dependency)
    for number, order in enumerate(orders):
        built.order(number, order)
    lags = _retime(len(built.owners), built.sources, built.targets, built.distances)
    ends = list(zip(built.sources, built.targets, built.distances, strict=True))
    distances = [distance + lags[target] - lags[source] for source, target, distance in ends]
    graph = Arcs(len(built.owners), tuple(built.sources), tuple(built.targets), tuple(distances))
    core, paths = contract(graph, _comparison(built.values, len(operations)))
    groups = tuple(dict.fromkeys(role for _, role, _, _ in operations))
    return Skeleton(
        arcs=graph,
        values=tuple(built.values),
        owners=tuple(built.owners),
        groups=groups,
        group_of=tuple([groups.index(role) for _, role, _, _ in operations]),
        in_step=not any(built.turns) and _common_ring(operations, names, dependencies),
        turns=tuple(built.turns),
        covered=_covered(operations, names, dependencies, orders),
        lags=tuple(lags),
        order_owners=tuple([order.owner for order in orders]),
        steps=tuple([built.step(node, lags[node]) for node in graph.order]),
        core=core,
        paths=paths,
        picked=np.array([built.values[arc] for path in paths for arc in path], dtype=np.intp),
        picked_from=np.cumsum([0, *map(len, paths[:-1])], dtype=np.intp),
        chains=built.chains,
        why=tuple(built.why),
    )


class _Builder:
    """Nodes and arcs as they are found, and what a run must know of each node."""

    def __init__(self, operations: tuple[Named, ...], names: dict[str, int]) -> None:
        self._operations, self._names = operations, names
        self._issues: dict[int, int] = {}
        """Node at which an asynchronous operation is issued."""
        self.owners = list(range(len(operations)))
        for index, (_, _, _, asynchronous) in enumerate(operations):
            if asynchronous:
                self._issues[index] = len(self.owners)
                self.owners.append(index)
        self._begin = [self._issues.get(index, index) for index in range(len(operations))]
        self.sources: list[int] = []
        self.targets: list[int] = []
        self.values: list[int] = []
        self.distances: list[int] = []
        self.why: list[str] = []
        self.chains = 0
        self.turns = [False] * len(operations)
        self._waits: list[list[tuple[int, int, bool]]] = [[] for _ in self.owners]
        self._orders: list[list[tuple[int, bool]]] = [[] for _ in self.owners]
        self._chains: list[list[int]] = [[] for _ in self.owners]
        for index, node in self._issues.items():
            self._arc(node, index, ISSUE, index, 0, "issue")

    def _arc(self, source: int, target: int, kind: int, operation: int, distance: int, why: str) -> None:
        self.sources.append(source)
        self.targets.append(target)
        self.values.append(kind * len(self._operations) + operation)
        self.distances.append(distance)
        self.why.append(why)

    def _role(self, operation: int) -> str:
        return self._operations[operation][1]

    def depend(self, edge: Dependency) -> None:
        """The target begins when the source is complete."""
        source, target = self._names[edge.source], self._names[edge.target]
        remote = self._role(source) != self._role(target)
        begin, kind = self._begin[target], REMOTE if remote else FULL
        self._arc(source, begin, kind, source, edge.distance, edge.why or "dependency")
        self._waits[begin].append((source, edge.distance, remote))

    def order(self, number: int, order: Order) -> None:
        """Operations begin one after the other, and units execute what is asynchronous in the same order."""
        members = [self._names[name] for name in order.operations]
        handing = dict.fromkeys(members, False)
        alone = (Dependency(order.operations[0], order.operations[0], 1),)
        for edge in order.dependencies() if len(members) > 1 else alone:
            source, target = self._names[edge.source], self._names[edge.target]
            handed = order.owner != QUEUE and self._role(source) != self._role(target)
            kind = (TURN if handed else ISSUE) if source in self._issues else FULL
            handing[source] = kind == TURN
            why = f"order of {order.owner}"
            self._arc(self._begin[source], self._begin[target], kind, source, edge.distance, why)
        for member in members:
            self._orders[self._begin[member]].append((number, handing[member]))
        lagging = list(zip(members, order.lags or (0,) * len(members), strict=True))
        for unit in {self._operations[member][2] for member in members if member in self._issues}:
            self._chain(
                unit, [(m, lag) for m, lag in lagging if m in self._issues and self._operations[m][2] == unit]
            )

    def _chain(self, unit: Unit, chain: list[tuple[int, int]]) -> None:
        following = [*chain[1:], (chain[0][0], chain[0][1] - 1)]
        for (member, lag), (after, lag_after) in zip(chain, following, strict=True):
            self._arc(member, after, SERVICE, member, lag - lag_after, f"{unit} in order")
            self._chains[member].append(self.chains)
        self.chains += 1
        if unit == Unit.TENSOR and len({self._role(member) for member, _ in chain}) > 1:
            for member, _ in chain:
                self.turns[member] = True

    def step(self, node: int, lag: int) -> Step:
        """A node as a run meets it."""
        operation = self.owners[node]
        kind = ISSUES if node >= len(self._operations) else EXECUTES if operation in self._issues else RUNS
        return Step(
            kind,
            operation,
            lag,
            self._operations[operation][2] == Unit.TENSOR and kind != EXECUTES,
            tuple(self._waits[node]),
            tuple(self._orders[node]),
            tuple(self._chains[node]),
        )


def _common_ring(
    operations: tuple[Named, ...], names: dict[str, int], dependencies: tuple[Dependency, ...]
) -> bool:
    """Whether a copy's next turn waits for products of several roles in this one."""
    readers: dict[str, set[str]] = {}
    for edge in dependencies:
        _, role, unit, _ = operations[names[edge.source]]
        copied = operations[names[edge.target]][2] == Unit.L2
        if copied and edge.distance == 1 and unit == Unit.TENSOR:
            readers.setdefault(edge.target, set()).add(role)
    return any(len(roles) > 1 for roles in readers.values())


def _covered(
    operations: tuple[Named, ...],
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


def _retime(nodes: int, sources: list[int], targets: list[int], distances: list[int]) -> list[int]:
    """Turns that each node trails its tile by, so that no arc reaches into a later turn."""
    lags = [0] * nodes
    arcs = list(zip(sources, targets, distances, strict=True))
    for _ in range(nodes + 1):
        moved = False
        for source, target, distance in arcs:
            if lags[source] - distance > lags[target]:
                lags[target] = lags[source] - distance
                moved = True
        if not moved:
            return lags
    raise PlanError("operations wait for each other's later tiles in a circle; the loop can never start")


def _comparison(values: list[int], count: int) -> Callable[[Path, Path], bool]:
    """Whether one path of arcs weighs at least as much as another whatever ``count`` operations take."""
    held: dict[Path, dict[tuple[int, bool], list[int]]] = {}

    def kinds_of(path: Path) -> dict[tuple[int, bool], list[int]]:
        """Ranks of each operation's weights on a path, the heaviest first; issues apart."""
        found = held.get(path)
        if found is None:
            found = {}
            for arc in path:
                kind, operation = divmod(values[arc], count)
                found.setdefault((operation, kind in (ISSUE, TURN)), []).append(RANK[kind])
            for kinds in found.values():
                kinds.sort(reverse=True)
            held[path] = found
        return found

    def outweighs(one: Path, other: Path) -> bool:
        heavy, light = kinds_of(one), kinds_of(other)
        if len(light) > len(heavy):
            return False
        for key, kinds in light.items():
            mine = heavy.get(key)
            if mine is None or len(mine) < len(kinds):
                return False
            if any(a < b for a, b in zip(mine, kinds, strict=False)):
                return False
        return True

    return outweighs
