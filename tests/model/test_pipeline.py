"""Steady states of hand-made loops whose periods are known, and the sharing rule."""

from __future__ import annotations

import dataclasses
import random

import pytest

from fa4tune.errors import PlanError
from fa4tune.kernels.plan import Dependency, Loop, Mma, Operation, Order, Unit, Work
from fa4tune.model.event_graph import simulate
from fa4tune.model.pipeline import alone, rescale_rate, settle, solve
from fa4tune.model.product_queue import queued
from fa4tune.model.skeleton import skeleton
from fa4tune.model.timing import UNITS, rates_of
from tests.model.loops import (
    chain,
    durations_of,
    exponentials,
    plain_gpu,
    product,
    random_attention,
    solved,
)


def test_one_role_alternates_product_and_softmax() -> None:
    timed = solved(chain(1, 300, 700), plain_gpu())
    assert timed.period == pytest.approx(1000)
    assert {timed.skeleton.owners[timed.skeleton.arcs.sources[a]] for a in timed.cycle} == {0, 1}


def test_unit_total_is_a_cycle_of_distance_one() -> None:
    # a saturated unit binds even when no chain is that long
    gpu = plain_gpu(contention=0.0, section_contention=0.0)
    timed = solved(chain(3, 100, 400), gpu)
    assert timed.ratio == pytest.approx(500)
    assert timed.period == pytest.approx(1200)
    assert timed.totals[UNITS.index(Unit.EXP)] == pytest.approx(1200)


@pytest.mark.parametrize("groups", [2, 3, 4])
def test_equal_roles_that_only_share_a_unit_take_turns_on_average(groups: int) -> None:
    body = tuple(exponentials(f"exp{g}", f"softmax{g}", 500) for g in range(groups))
    loop = Loop(body, (), tuple(Order(f"softmax{g}", (f"exp{g}",)) for g in range(groups)))
    assert solved(loop, plain_gpu()).period == pytest.approx(500 * groups, rel=2e-3)


def test_order_between_roles_on_the_tensor_cores_replaces_sharing() -> None:
    shared = chain(2, 400, 900)
    turns = dataclasses.replace(shared, orders=(*shared.orders, Order("turn", ("qk0", "qk1"))))
    gpu = plain_gpu()
    ordered, met = solved(turns, gpu), solved(shared, gpu)
    assert ordered.stretch[0][0] == 1.0
    assert met.stretch[0][0] > 1.0


@pytest.mark.parametrize(("work", "private"), [(600, 900), (500, 700), (800, 400)])
def test_sharing_matches_a_queue_at_random_phase(work: int, private: int) -> None:
    # two roles alternate time of their own (a copy each) and a shared unit; against a simulated queue
    body, dependencies, orders = [], [], []
    for g in range(2):
        own = Operation(f"own{g}", f"s{g}", Unit.L2, Work(global_read_bytes=64 * private), asynchronous=True)
        body += [own, exponentials(f"exp{g}", f"s{g}", work)]
        dependencies.append(Dependency(f"own{g}", f"exp{g}"))
        orders.append(Order(f"s{g}", (f"own{g}", f"exp{g}")))
    loop = Loop(tuple(body), tuple(dependencies), tuple(orders))
    predicted = solved(loop, plain_gpu(l2_bytes_per_clk=64.0)).period
    simulated = simulate_processor_sharing(work, private, 20_000, random.Random(4))
    assert predicted == pytest.approx(simulated, rel=0.08)


def simulate_processor_sharing(work: float, private: float, rounds: int, rng: random.Random) -> float:
    """Mean cycle of two customers with exponential private times and work at one processor-sharing server."""
    now, done = 0.0, 0
    waiting = [rng.expovariate(1 / private) for _ in range(2)]
    left: list[float | None] = [None, None]
    while done < rounds:
        active = [i for i in range(2) if left[i] is not None]
        speed = 1.0 / max(1, len(active))
        steps = [(left[i] or 0.0) / speed if i in active else waiting[i] for i in range(2)]
        step = min(steps)
        now += step
        for i in range(2):
            if i in active:
                left[i] = (left[i] or 0.0) - step * speed
                if left[i] <= 1e-9:  # type: ignore[operator]
                    left[i], waiting[i] = None, rng.expovariate(1 / private)
                    done += 1
            else:
                waiting[i] -= step
                if waiting[i] <= 1e-9:
                    left[i] = rng.expovariate(1 / work)
    return 2 * now / done


def test_ring_of_stages_limits_by_latency() -> None:
    # a load of 900 cycles latency and 100 use: one stage 1000 a turn, two 500, many the use alone
    gpu = plain_gpu(copy_latency_clk=900.0)
    for stages, period in ((1, 1000.0), (2, 500.0), (4, 250.0), (20, 100.0)):
        loop = Loop(
            (
                Operation("load", "load", Unit.L2, Work(), asynchronous=True),
                exponentials("use", "softmax", 100),
            ),
            (Dependency("load", "use"), Dependency("use", "load", stages)),
            (Order("load", ("load",)), Order("softmax", ("use",))),
        )
        assert solved(loop, gpu).period == pytest.approx(period)


def ringed(groups: int, stages: int) -> Loop:
    """:func:`chain` with operands that a ring of ``stages`` brings."""
    plain = chain(groups, 300, 700)
    load = Operation("load", "load", Unit.L2, Work(), asynchronous=True)
    dependencies = [*plain.dependencies]
    for g in range(groups):
        dependencies += [Dependency("load", f"qk{g}"), Dependency(f"qk{g}", "load", stages)]
    return Loop((load, *plain.body), tuple(dependencies), (Order("load", ("load",)), *plain.orders))


def test_a_ring_of_one_stage_that_binds_keeps_its_readers_in_step() -> None:
    # both wait for the same load, so each product meets the other's: 1500 + 2 * 300
    gpu = plain_gpu(copy_latency_clk=1500.0)
    assert solved(ringed(2, 1), gpu).period == pytest.approx(2100)
    assert solved(ringed(1, 1), gpu).period == pytest.approx(1800)


def test_a_ring_that_does_not_bind_leaves_its_readers_at_random() -> None:
    for gpu in (plain_gpu(), plain_gpu(copy_latency_clk=200.0)):
        assert solved(ringed(2, 1), gpu).period == pytest.approx(solved(ringed(2, 9), gpu).period, rel=1e-3)
    # 1500 + 300 (1 + busy of the other), not in step, where two stages bring every other load ahead
    assert solved(ringed(2, 2), plain_gpu(copy_latency_clk=1500.0)).period < 1700


def test_another_cta_breaks_the_step() -> None:
    gpu = plain_gpu()
    one, two = ringed(2, 1), ringed(2, 2)
    for a, b in zip(solved(one, gpu, copies=2).stretch, solved(two, gpu, copies=2).stretch, strict=True):
        assert a == pytest.approx(b, rel=5e-3)


def test_sections_and_tensor_cores_have_a_contention_each() -> None:
    loop = chain(2, 400, 600)
    never = solved(loop, plain_gpu(contention=0.0, section_contention=0.0))
    tensor = solved(loop, plain_gpu(section_contention=0.0))
    sections = solved(loop, plain_gpu(contention=0.0))
    assert never.period == pytest.approx(1200)  # the exponentials' total
    assert tensor.stretch[0][0] > 1.0 == tensor.stretch[0][1]
    assert sections.stretch[0][1] > 1.0 == sections.stretch[0][0]


def test_a_role_alone_takes_its_own_chain() -> None:
    gpu = plain_gpu()
    timed = solved(chain(3, 300, 700), gpu)
    assert timed.period > 1400
    assert alone(timed, rates_of(gpu), [1.0] * 6) == pytest.approx(1000)


def test_factors_settle_where_a_total_binds() -> None:
    # copies bind at 4000; the chain under them must still be that of the sharing rule at this period
    gpu = plain_gpu(l2_bytes_per_clk=64.0)
    shared = chain(2, 300, 700)
    copy = Operation("copy", "load", Unit.L2, Work(global_read_bytes=64 * 4000), asynchronous=True)
    loop = Loop((*shared.body, copy), shared.dependencies, (*shared.orders, Order("load", ("copy",))))
    timed = solved(loop, gpu)
    assert timed.period == pytest.approx(4000)
    factor = timed.stretch[0][1]
    assert factor == pytest.approx(1 + 700 * factor / 4000, rel=2e-3)


def test_two_ctas_share_the_units_of_an_sm() -> None:
    loop, gpu = chain(1, 400, 400), plain_gpu()
    one, two = solved(loop, gpu, 1), solved(loop, gpu, 2)
    assert two.totals == pytest.approx([2 * t for t in one.totals])
    assert one.period < two.period <= 2 * one.period


def test_operand_reads_wait_for_incoming_copies() -> None:
    reads = Work(mma_flops=4096 * 400, smem_mma_bytes=128 * 300)
    loop = Loop(
        (
            Operation("qk", "mma", Unit.TENSOR, reads, (Mma(64, 8, 16, 1),), asynchronous=True),
            Operation("load", "load", Unit.L2, Work(smem_tma_write_bytes=128 * 100), asynchronous=True),
        ),
        (),
        (Order("mma", ("qk",)), Order("load", ("load",))),
    )
    free, blocked = solved(loop, plain_gpu()), solved(loop, plain_gpu(smem_conflict=1.0))
    assert free.period == pytest.approx(400)
    # 400 + 300 * (100 / P) = P
    assert blocked.period == pytest.approx(200 + (200**2 + 300 * 100) ** 0.5, rel=1e-3)


def test_operations_that_wait_in_a_circle_are_refused() -> None:
    loop = Loop(
        (exponentials("a", "x", 1), exponentials("b", "y", 1)),
        (Dependency("a", "b"), Dependency("b", "a")),
        (Order("x", ("a",)), Order("y", ("b",))),
    )
    with pytest.raises(PlanError, match="wait for each other"):
        skeleton(loop)


def test_order_of_an_unknown_operation_is_refused() -> None:
    loop = Loop((exponentials("a", "x", 1),), (), (Order("x", ("a", "b")),))
    with pytest.raises(PlanError, match="name b, which the loop does not run"):
        skeleton(loop)


def test_work_outside_an_order_still_meets_work_inside() -> None:
    # QK takes turns, PV does not: two roles' PV still delay each other and the other's QK
    body, dependencies, orders = [], [], []
    for g in range(2):
        body += [product(f"qk{g}", f"m{g}", 300), exponentials(f"exp{g}", f"m{g}", 500)]
        body.append(product(f"pv{g}", f"m{g}", 300))
        dependencies += [Dependency(f"qk{g}", f"exp{g}"), Dependency(f"pv{g}", f"qk{g}", 1)]
        orders.append(Order(f"m{g}", (f"qk{g}", f"exp{g}", f"pv{g}")))
    loop = Loop(tuple(body), tuple(dependencies), (*orders, Order("turn", ("qk0", "qk1"))))
    timed = solved(loop, plain_gpu())
    assert timed.period > 300 + 500 + 300
    assert timed.stretch[0][3] > 1.0


def test_rescale_rate_falls_with_threshold_and_length() -> None:
    assert rescale_rate(0.0, 1) == 0.0
    assert 0.9 < rescale_rate(0.0, 4) <= 1.0
    assert rescale_rate(0.0, 64) < rescale_rate(0.0, 8)
    assert rescale_rate(8.0, 64) < 1e-4
    assert rescale_rate(1.0, 16) > rescale_rate(2.0, 16)


@pytest.mark.parametrize("latency", [0.0, 36.0, 200.0])
def test_handing_the_turn_over_costs_its_latency(latency: float) -> None:
    # products of 10 cycles that wait for nothing but their turn: two hand-overs an iteration
    gpu = plain_gpu(turn_latency_clk=latency)
    body = tuple(product(f"qk{g}", f"m{g}", 10) for g in range(2))
    loop = Loop(body, (), (Order("m0", ("qk0",)), Order("m1", ("qk1",)), Order("turn", ("qk0", "qk1"))))
    assert solved(loop, gpu).period == pytest.approx(max(20.0, 2 * latency))


def test_a_queue_hands_nothing_over() -> None:
    loop, gpu = chain(3, 300, 700), plain_gpu(turn_latency_clk=900.0)
    order = queued(loop)
    assert order is not None
    assert solved(order, gpu).period == pytest.approx(solved(order, plain_gpu()).period)
    turns = dataclasses.replace(loop, orders=(*loop.orders, Order("turn", order.orders[-1].operations)))
    assert solved(turns, gpu).period > solved(order, gpu).period


def random_gpu(rng: random.Random) -> dict[str, float]:
    """Latencies and constants of sharing, anywhere in their ranges."""
    clocks = ("barrier_latency_clk", "turn_latency_clk", "mma_latency_clk", "copy_latency_clk")
    parts = ("exp_beside_mma", "contention", "section_contention", "smem_conflict")
    return {
        **{name: rng.uniform(0.0, 400.0) for name in clocks},
        **{name: rng.uniform(0.3, 1.0) for name in parts},
    }


def test_roles_queue_up_only_where_that_is_quicker() -> None:
    rng = random.Random(2)
    queueing = 0
    for _ in range(150):
        loop, gpu = random_attention(rng), plain_gpu(**random_gpu(rng))
        durations, ones, rates = durations_of(loop, gpu), [1.0] * len(loop.body), rates_of(gpu)
        at_random, order = solve(skeleton(loop), durations, ones, rates), queued(loop)
        found = settle(loop, durations, ones, rates)
        if order is None:
            assert found.period == at_random.period
            continue
        in_order = solve(skeleton(order), durations, ones, rates)
        if at_random.period <= in_order.period:
            assert found.period == at_random.period
            continue
        # in order while a product waits
        full = (in_order.tensor_total / in_order.period) ** 2
        mixed = full * in_order.period + (1.0 - full) * at_random.period
        assert found.period == pytest.approx(mixed, rel=1e-6)
        assert in_order.period <= found.period * (1 + 1e-9) <= at_random.period * (1 + 1e-6)
        assert found.skeleton is skeleton(order)
        assert found.ratio == pytest.approx(in_order.ratio * found.looseness)
        if in_order.period <= in_order.ratio * (1 + 1e-9):
            assert min(found.slack()) == pytest.approx(0.0, abs=1e-6 * found.period)
        queueing += 1
    assert 20 < queueing < 110


@pytest.mark.parametrize("turns", ["none", "qk", "all"])
def test_the_period_is_the_ratio_of_its_cycle_and_no_other_is_larger(turns: str) -> None:
    # the steady state by definition: run the arcs at the cycles that the rule gives at this period
    rng = random.Random(3)
    for _ in range(60):
        loop, gpu = random_attention(rng, turns), plain_gpu(**random_gpu(rng))
        timed = solved(loop, gpu, copies=rng.choice([1, 1, 2]))
        shape = timed.skeleton
        weights = [timed.values[value] for value in shape.values]
        starts = simulate(shape.arcs, weights, 421)
        growth = max(b - a for a, b in zip(starts[60], starts[420], strict=True)) / 360
        assert growth == pytest.approx(timed.ratio, rel=2e-3)
        around = sum(weights[arc] for arc in timed.cycle)
        assert around / sum(shape.arcs.distances[arc] for arc in timed.cycle) == pytest.approx(timed.ratio)
        assert timed.period >= timed.ratio * (1 - 1e-12)
        assert timed.period >= max(timed.totals) * (1 - 1e-12)


def test_any_start_gives_the_same_steady_state() -> None:
    rng = random.Random(4)
    for _ in range(60):
        loop, gpu = random_attention(rng), plain_gpu(**random_gpu(rng))
        rates, shape = rates_of(gpu), skeleton(loop)
        durations = durations_of(loop, gpu)
        ones, halves = [1.0] * len(loop.body), [rng.uniform(0.1, 1.0) for _ in loop.body]
        other = solve(shape, durations, halves, rates)
        cold, warm = solve(shape, durations, ones, rates), solve(shape, durations, ones, rates, start=other)
        assert warm.period == pytest.approx(cold.period, rel=1e-7)
        assert warm.ratio == pytest.approx(cold.ratio, rel=1e-7)


def test_a_longer_operation_never_shortens_the_period() -> None:
    rng = random.Random(5)
    for _ in range(90):
        loop, gpu = random_attention(rng), plain_gpu(**random_gpu(rng))
        if skeleton(loop).in_step:
            continue  # it may take the load off the critical cycle, and the roles out of step
        longer = list(loop.body)
        at = rng.randrange(len(longer))
        longer[at] = dataclasses.replace(longer[at], work=longer[at].work * 2)
        grown = dataclasses.replace(loop, body=tuple(longer))
        assert solved(grown, gpu).period >= solved(loop, gpu).period * (1 - 1e-7)
