"""Cycle ratios against brute force: simulation, enumeration of cycles, and arithmetic by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4tune.errors import PlanError
from fa4tune.model.event_graph import Arcs, contract, maximum_cycle_ratio, simulate, slacks

Graph = tuple[Arcs, list[float]]


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Random graphs whose every cycle has a distance: arcs without one go from lower to higher nodes."""
    nodes = draw(st.integers(1, 7))
    count = draw(st.integers(1, 16))
    arcs = []
    for _ in range(count):
        source, target = draw(st.integers(0, nodes - 1)), draw(st.integers(0, nodes - 1))
        distance = draw(st.integers(0 if source < target else 1, 3))
        arcs.append((source, target, distance, float(draw(st.integers(0, 50)))))
    return (
        Arcs(nodes, tuple(a[0] for a in arcs), tuple(a[1] for a in arcs), tuple(a[2] for a in arcs)),
        [a[3] for a in arcs],
    )


def ratio_by_enumeration(arcs: Arcs, weights: list[float]) -> float:
    """Largest ratio over all simple cycles, by depth-first search from each cycle's lowest node."""
    best = 0.0

    def walk(start: int, node: int, seen: frozenset[int], weight: float, distance: int) -> None:
        nonlocal best
        for arc in arcs.outgoing[node]:
            target = arcs.targets[arc]
            w, d = weight + weights[arc], distance + arcs.distances[arc]
            if target == start:
                best = max(best, w / d)
            elif target > start and target not in seen:
                walk(start, target, seen | {target}, w, d)

    for start in range(arcs.nodes):
        walk(start, start, frozenset({start}), 0.0, 0)
    return best


@given(graphs())
@settings(max_examples=300, deadline=None)
def test_ratio_is_the_largest_over_all_cycles(graph: Graph) -> None:
    arcs, weights = graph
    assert maximum_cycle_ratio(arcs, weights).ratio == pytest.approx(ratio_by_enumeration(arcs, weights))


@given(graphs())
@settings(max_examples=150, deadline=None)
def test_ratio_is_the_period_of_the_simulated_graph(graph: Graph) -> None:
    arcs, weights = graph
    ratio = maximum_cycle_ratio(arcs, weights).ratio
    first, last = (
        60,
        60 + 840,
    )  # 840 is a multiple of every distance that a cycle of 7 nodes can have, or close
    starts = simulate(arcs, weights, last + 1)
    growth = max((b - a) / (last - first) for a, b in zip(starts[first], starts[last], strict=True))
    assert growth == pytest.approx(ratio, rel=0.01, abs=0.5)


@given(graphs())
@settings(max_examples=150, deadline=None)
def test_cycle_returned_is_a_cycle_of_that_ratio(graph: Graph) -> None:
    arcs, weights = graph
    answer = maximum_cycle_ratio(arcs, weights)
    if not answer.cycle:
        assert ratio_by_enumeration(arcs, weights) == 0.0
        return
    for arc, following in zip(answer.cycle, answer.cycle[1:] + answer.cycle[:1], strict=True):
        assert arcs.targets[arc] == arcs.sources[following]
    weight = sum(weights[arc] for arc in answer.cycle)
    distance = sum(arcs.distances[arc] for arc in answer.cycle)
    assert weight / distance == pytest.approx(answer.ratio)


@given(graphs(), st.data())
@settings(max_examples=200, deadline=None)
def test_any_start_gives_the_same_ratio(graph: Graph, data: st.DataObject) -> None:
    arcs, weights = graph
    start = [data.draw(st.floats(-1e4, 1e4)) for _ in range(arcs.nodes)]
    warm = maximum_cycle_ratio(arcs, weights, potentials=start)
    assert warm.ratio == pytest.approx(maximum_cycle_ratio(arcs, weights).ratio)


@given(graphs(), st.floats(0.0, 200.0))
@settings(max_examples=200, deadline=None)
def test_no_cycle_is_named_where_none_is_above_the_ratio_asked_for(graph: Graph, asked: float) -> None:
    arcs, weights = graph
    largest = ratio_by_enumeration(arcs, weights)
    answer = maximum_cycle_ratio(arcs, weights, asked)
    assert answer.ratio == pytest.approx(max(asked, largest))
    if abs(largest - asked) > 1e-6:
        assert bool(answer.cycle) == (largest > asked)


@given(graphs())
@settings(max_examples=150, deadline=None)
def test_contracted_graph_has_the_same_ratio(graph: Graph) -> None:
    arcs, weights = graph
    core, paths = contract(arcs)
    merged = [sum(weights[arc] for arc in path) for path in paths]
    assert core.nodes <= arcs.nodes
    assert maximum_cycle_ratio(core, merged).ratio == pytest.approx(maximum_cycle_ratio(arcs, weights).ratio)
    for index, path in enumerate(paths):
        assert sum(arcs.distances[arc] for arc in path) == core.distances[index]


@given(graphs())
@settings(max_examples=60, deadline=None)
def test_slack_is_what_a_node_may_grow_without_lengthening_the_period(graph: Graph) -> None:
    arcs, weights = graph
    ratio = maximum_cycle_ratio(arcs, weights).ratio
    for node, slack in enumerate(slacks(arcs, weights, ratio)):
        if math.isinf(slack):
            continue
        longer = [w + (slack + 7.0 if arcs.sources[a] == node else 0.0) for a, w in enumerate(weights)]
        exact = [w + (slack if arcs.sources[a] == node else 0.0) for a, w in enumerate(weights)]
        assert maximum_cycle_ratio(arcs, exact).ratio == pytest.approx(ratio, abs=1e-6)
        assert maximum_cycle_ratio(arcs, longer).ratio > ratio + 1e-6


def test_two_stage_ring_by_hand() -> None:
    # load (10) -> use (4) -> free after two iterations: (10 + 4) / 2; the loader alone takes 10
    arcs = Arcs(2, (0, 1, 0), (1, 0, 0), (0, 2, 1))
    assert maximum_cycle_ratio(arcs, [10.0, 4.0, 6.0]).ratio == pytest.approx(7.0)
    assert maximum_cycle_ratio(arcs, [10.0, 4.0, 10.0]).ratio == pytest.approx(10.0)


def test_graph_without_cycle_has_period_zero() -> None:
    answer = maximum_cycle_ratio(Arcs(2, (0,), (1,), (0,)), [5.0])
    assert answer.ratio == 0.0
    assert answer.cycle == ()


def test_cycle_without_distance_is_refused() -> None:
    with pytest.raises(PlanError, match="wait for each other"):
        Arcs(2, (0, 1), (1, 0), (0, 0))


def test_negative_distance_is_refused() -> None:
    with pytest.raises(PlanError, match="distance -1"):
        Arcs(2, (0,), (1,), (-1,))
