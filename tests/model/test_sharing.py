"""The sharing rule against its own definition, sections beside products, and the fixed point."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4tune.kernels.plan import Dependency, Loop, Operation, Order, Unit, Work
from fa4tune.model.event_graph import maximum_cycle_ratio
from fa4tune.model.pipeline import solve
from fa4tune.model.sharing import (
    SECTION,
    STATIONS,
    TENSOR,
    TMEM,
    TURNS,
    Demand,
    Sharing,
    crowd,
    fixed_point,
    section_contention,
)
from fa4tune.model.skeleton import skeleton
from fa4tune.model.timing import rates_of
from tests.model.loops import chain, durations_of, exponentials, plain_gpu, product, random_attention, solved


@pytest.mark.parametrize("turns", ["none", "qk", "all"])
@pytest.mark.parametrize("copies", [1, 2])
def test_factors_are_those_of_the_rule(turns: str, copies: int) -> None:
    rng = random.Random(1)
    compared = 0
    for _ in range(60):
        loop = random_attention(rng, turns)
        gpu = plain_gpu(contention=rng.uniform(0.1, 1.0), section_contention=rng.uniform(0.3, 1.0))
        shape, ones = skeleton(loop), [1.0] * len(loop.body)
        sharing = Sharing(shape, Demand(shape, durations_of(loop, gpu), ones, gpu, copies))
        period = sharing.demand.least * rng.uniform(1.0, 3.0)
        stretch = sharing.factors(period, sharing.met(period))
        if stretch is None:
            continue
        roles = range(len(shape.groups))
        work = [[0.0] * STATIONS for _ in roles]
        for index, operation in enumerate(loop.body):
            if operation.unit == Unit.TENSOR:
                station = TURNS if shape.turns[index] else TENSOR
            elif operation.unit == Unit.EXP:
                station = SECTION
            else:
                continue
            cycles = operation.work.mma_flops / 4096 + operation.work.exp / 16
            work[shape.group_of[index]][station] += cycles
        busy = [
            [cycles * factor / period for cycles, factor in zip(own, factors, strict=True)]
            for own, factors in zip(work, stretch, strict=True)
        ]
        busy_roles = copies * crowd([own[SECTION] for own in work])
        rules = (
            (SECTION, (SECTION,), (SECTION,), section_contention(gpu.section_contention, busy_roles)),
            (TENSOR, (TENSOR, TURNS), (TENSOR, TURNS), gpu.contention),
            (TURNS, (TENSOR,), (TENSOR, TURNS), gpu.contention),  # turns of its own CTA it does not meet
        )
        for g in roles:
            for station, own_cta, other_ctas, contention in rules:
                if work[g][station]:
                    met = sum(busy[h][s] for h in roles if h != g for s in own_cta)
                    met += (copies - 1) * sum(busy[h][s] for h in roles for s in other_ctas)
                    assert stretch[g][station] == pytest.approx(1.0 + contention * met, rel=1e-9)
                    compared += 1
        assert all(row[TMEM] == 1.0 for row in stretch)
    assert compared > 100


def test_a_period_too_short_for_what_a_role_does_has_no_factors() -> None:
    loop, gpu = chain(2, 300, 700), plain_gpu()
    shape, ones = skeleton(loop), [1.0] * len(loop.body)
    sharing = Sharing(shape, Demand(shape, durations_of(loop, gpu), ones, gpu))
    assert sharing.factors(1.0, sharing.met(1.0)) is None
    period = sharing.roomy()
    assert sharing.factors(period, sharing.met(period)) is not None


@pytest.mark.parametrize("turns", ["none", "qk", "all"])
def test_a_cycle_takes_what_its_arcs_weigh(turns: str) -> None:
    rng = random.Random(8)
    clocks = ("turn_latency_clk", "barrier_latency_clk", "mma_latency_clk", "copy_latency_clk")
    for _ in range(40):
        loop = random_attention(rng, turns)
        gpu = plain_gpu(
            exp_beside_mma=0.6, smem_conflict=0.5, **{name: rng.uniform(0, 500) for name in clocks}
        )
        shape, weights = skeleton(loop), [rng.choice([1.0, 1.0, 0.3]) for _ in loop.body]
        sharing = Sharing(shape, Demand(shape, durations_of(loop, gpu), weights, gpu, rng.choice([1, 2])))
        period = sharing.roomy() * rng.uniform(1.0, 2.0)
        met = sharing.met(period)
        stretch = sharing.factors(period, met)
        assert stretch is not None
        values = sharing.values(period, met, stretch)
        in_core = shape.core_weights(values)
        for start in (-1.0, 0.0):  # the largest cycle, under any weights, is as good as another one
            cycle = maximum_cycle_ratio(shape.core, [w * rng.random() for w in in_core], start).cycle
            arcs = shape.along(cycle)
            around = sum(values[shape.values[arc]] for arc in arcs) / sum(
                shape.arcs.distances[a] for a in arcs
            )
            assert sharing.ratio(sharing.along(arcs), period) == pytest.approx(around, rel=1e-9)
            assert sum(in_core[arc] for arc in cycle) == pytest.approx(
                sum(values[shape.values[arc]] for arc in arcs), rel=1e-9
            )


def one_role(covered: bool, tensor: int, section: int) -> Loop:
    """A product and a section that runs under it, or waits for it."""
    return Loop(
        (product("qk", "mma", tensor), exponentials("exp", "mma", section)),
        () if covered else (Dependency("qk", "exp"),),
        (Order("mma", ("qk", "exp")),),
    )


@pytest.mark.parametrize(("tensor", "section"), [(300, 900), (900, 300), (500, 500)])
def test_a_section_is_slower_for_as_long_as_its_own_products_run(tensor: int, section: int) -> None:
    # beside products exponentials have half of their rate: so 900 take 300 more beside 300 of products
    gpu = plain_gpu(exp_beside_mma=0.5)
    beside = solved(one_role(True, tensor, section), gpu)
    assert beside.span(1) == pytest.approx(section + min(1.0, tensor / section) * section)
    assert beside.period == pytest.approx(max(beside.span(1), tensor))
    after = solved(one_role(False, tensor, section), gpu)
    assert after.span(1) == pytest.approx(section)
    assert after.period == pytest.approx(tensor + section)


@pytest.mark.parametrize("covered", [True, False])
def test_covered_sections_are_those_before_the_product_is_needed(covered: bool) -> None:
    assert skeleton(one_role(covered, 100, 100)).covered == (((0, (1,)),) if covered else ())


def test_sections_between_a_product_and_its_reader_are_covered_and_no_others() -> None:
    names = ("qk", "max", "exp", "sum")
    body = (product("qk", "mma", 100), *(exponentials(name, "mma", 100) for name in names[1:]))
    loop = Loop(body, (Dependency("qk", "sum"),), (Order("mma", names),))
    assert skeleton(loop).covered == ((0, (1, 2)),)
    # through the end of the turn: the next turn's first sections, before the one that needs it
    late = Loop(body, (Dependency("qk", "exp", 1),), (Order("mma", ("max", "exp", "sum", "qk")),))
    assert skeleton(late).covered == ((0, (1,)),)


@pytest.mark.parametrize(("tensor", "section", "beside"), [(300, 900, 0.75), (800, 500, 0.5), (1, 700, 0.5)])
def test_products_of_another_role_slow_a_section_as_often_as_they_run(
    tensor: int, section: int, beside: float
) -> None:
    # P = s + h T / P where the section binds, and at most s + h, or T where products do
    loop = Loop(
        (product("qk", "mma", tensor), exponentials("exp", "softmax", section)),
        (),
        (Order("mma", ("qk",)), Order("softmax", ("exp",))),
    )
    timed = solved(loop, plain_gpu(exp_beside_mma=beside))
    hindered = section * (1.0 / beside - 1.0)
    chain = 0.5 * (section + (section**2 + 4.0 * hindered * tensor) ** 0.5)
    if chain < tensor:
        chain = section + hindered
    # the unit's total: what is left of its rate while the tensor cores work
    total = section + tensor * (1.0 - beside)
    assert timed.period == pytest.approx(max(chain, total, tensor), rel=1e-8)
    assert timed.span(1) == pytest.approx(section + hindered * min(1.0, tensor / timed.period))


def test_only_what_own_products_leave_is_hindered_by_those_of_others() -> None:
    # 300 of the 900 run beside own products and take 300 more; the other 600 meet products of 500 in P cycles
    body = (product("qk", "m", 300), exponentials("exp", "m", 900), product("other", "n", 500))
    loop = Loop(body, (), (Order("m", ("qk", "exp")), Order("n", ("other",))))
    period = solved(loop, plain_gpu(exp_beside_mma=0.5, contention=0.0)).period
    assert period == pytest.approx(600 + (600**2 + 600 * 500) ** 0.5, rel=1e-8)


def test_sections_share_what_they_take_beside_products() -> None:
    # two roles with w = 600 + 600 * 400 / P and nothing else share evenly: P = 2 w
    body = (*(exponentials(f"exp{g}", f"s{g}", 600) for g in range(2)), product("qk", "m", 400))
    orders = (*(Order(f"s{g}", (f"exp{g}",)) for g in range(2)), Order("m", ("qk",)))
    period = solved(Loop(body, (), orders), plain_gpu(exp_beside_mma=0.5)).period
    assert period == pytest.approx(600 + (600**2 + 2 * 600 * 400) ** 0.5, rel=1e-8)


def polynomials(name: str, role: str, elements: int) -> Operation:
    """A section of polynomials of eight instructions an element, and nothing else."""
    count = 8 * elements // 32
    return Operation(
        name, role, Unit.EXP, Work(exp_emulated=elements, issue=count, issue_emulated=count)
    )  # fmt: skip


def beside(work: Operation) -> Loop:
    """A role that multiplies for 500 cycles and exponentiates for 700, and one that does ``work``."""
    body = (product("qk", "m", 500), work, exponentials("exp", "m", 700))
    return Loop(body, (Dependency("qk", "exp"),), (Order("m", ("qk", "exp")), Order("s", (work.name,))))


def test_independent_arithmetic_holds_up_products_of_other_roles() -> None:
    free = plain_gpu(section_contention=0.0, dense_hold=0.0)
    held = dataclasses.replace(free, dense_hold=0.8)
    rescale = Operation("scale", "s", Unit.FMA, Work(fma=128 * 64, issue=4 * 64))
    for work in (polynomials("poly", "s", 1024), rescale):
        assert solved(beside(work), free).period == pytest.approx(1200)
        # 64 cycles of it: P = 500 (1 + 0.8 * 64 / P) + 700
        period = 600 + (600**2 + 500 * 0.8 * 64) ** 0.5
        assert solved(beside(work), held).period == pytest.approx(period, rel=1e-8)
        alone = Loop((work,), (), (Order("s", (work.name,)),))
        assert solved(alone, held).period == pytest.approx(64)


def test_polynomials_that_stand_together_hold_up_sections_too() -> None:
    gpu = plain_gpu(section_contention=0.0, dense_hold=0.8, fma_beside_mma=0.9, alu_beside_mma=0.5)
    # an element takes six slots of the FMA pipe and two of an ALU of half the rate, one pipe after the other
    count = 8 * 1024 // 32
    together = Operation(
        "poly", "s", Unit.EXP,
        Work(exp_emulated=1024, issue=count, issue_emulated=count, fma=6 * 1024, fma_emulated=6 * 1024,
             alu=2 * 1024, alu_emulated=2 * 1024), together=True,
    )  # fmt: skip
    alone = Loop((together,), (), (Order("s", ("poly",)),))
    assert solved(alone, gpu).period == pytest.approx(48 + 32)
    # beside tensor cores at work it lasts 48 / 0.9 + 32 / 0.5, and holds up matmuls and exponentials alike
    lasts = 0.8 * (48 / 0.9 + 32 / 0.5)
    period = 600 + (600**2 + 1200 * lasts) ** 0.5
    assert solved(beside(together), gpu).period == pytest.approx(period, rel=1e-8)
    apart = dataclasses.replace(together, together=False)
    assert solved(beside(apart), gpu).period < period
    assert solved(Loop((apart,), (), (Order("s", ("poly",)),)), gpu).period == pytest.approx(64)


def test_all_sections_at_once_take_what_their_busiest_pipe_has_to_do() -> None:
    for roles in (2, 3, 4):
        contention = section_contention(0.75, roles)
        assert 1.0 + (roles - 1) * contention == pytest.approx(0.75 * roles)
    assert section_contention(1.0, 2) == 1.0
    assert section_contention(0.4, 2) == 0.0  # both hide under each other
    assert section_contention(0.75, 3) > section_contention(0.75, 2)
    assert section_contention(0.75, 1) == 0.0


def test_a_role_with_little_to_do_counts_little() -> None:
    gpu = plain_gpu(section_contention=0.75)

    def period(others: int) -> float:
        body = tuple(exponentials(f"exp{g}", f"s{g}", 700) for g in range(2))
        body += (exponentials("little", "t", others),) if others else ()
        orders = tuple(Order(operation.role, (operation.name,)) for operation in body)
        return solved(Loop(body, (), orders), gpu).period

    assert period(0) < period(7) < 1.03 * period(0)
    assert crowd([700.0, 700.0, 7.0]) == 2
    assert crowd([700.0, 350.0, 70.0]) == 3
    assert crowd([]) == crowd([0.0]) == 0


def test_going_around_an_operation_costs_the_vote() -> None:
    rescale = Operation("scale", "s", Unit.FMA, Work(fma=128 * 64, issue=4 * 64))
    loop = Loop((exponentials("exp", "s", 700), rescale), (), (Order("s", ("exp", "scale")),))
    gpu = plain_gpu(vote_latency_clk=69.0)
    periods = [
        solve(skeleton(loop), durations_of(loop, gpu), [1.0, weight], rates_of(gpu)).period
        for weight in (0.0, 0.25, 1.0)
    ]
    assert periods == pytest.approx([700, 700 + 16 + 69, 764])


def test_stores_hide_under_the_arithmetic_that_they_store() -> None:
    gpu = plain_gpu()

    def period(cycles: int, stored: int) -> float:
        work = Work(exp=16 * cycles, smem_generic_bytes=128 * stored)
        loop = Loop((Operation("exp", "s", Unit.EXP, work),), (), (Order("s", ("exp",)),))
        return solved(loop, gpu).period

    assert period(700, 0) == period(700, 600) == pytest.approx(700)
    assert period(700, 900) > 900


def test_a_pipe_is_full_when_its_work_and_what_products_take_from_it_fill_the_period() -> None:
    # 4 roles' exponentials (600 each) beside one role's products: 2400 + 0.25 * 1000, no chain that long
    body = (product("qk", "mma", 1000), *(exponentials(f"exp{g}", f"softmax{g}", 600) for g in range(4)))
    orders = (Order("mma", ("qk",)), *(Order(f"softmax{g}", (f"exp{g}",)) for g in range(4)))
    gpu = plain_gpu(exp_beside_mma=0.75, section_contention=0.0)
    assert solved(Loop(body, (), orders), gpu).period == pytest.approx(2650)


def test_waits_for_operands_are_part_of_the_least_period() -> None:
    reads = Work(mma_flops=4096 * 400, smem_mma_bytes=128 * 300)
    body = (
        Operation("qk", "mma", Unit.TENSOR, reads, product("qk", "mma", 1).mma, asynchronous=True),
        Operation("load", "load", Unit.L2, Work(smem_tma_write_bytes=128 * 100), asynchronous=True),
    )
    loop = Loop(body, (), (Order("mma", ("qk",)), Order("load", ("load",))))
    gpu = plain_gpu(smem_conflict=1.0)
    shape = skeleton(loop)
    demand = Demand(shape, durations_of(loop, gpu), [1.0, 1.0], gpu)
    sharing = Sharing(shape, demand)
    assert sharing.tensor_total(demand.least) == pytest.approx(demand.least)


@given(
    st.floats(0.0, 1e4), st.floats(0.0, 1e7), st.floats(0.1, 1e4), st.floats(0.1, 1e4), st.floats(0.0, 1.0)
)
@settings(max_examples=300, deadline=None)
def test_fixed_point_is_where_a_falling_function_meets_its_argument(
    base: float, slope: float, least: float, start: float, domain: float
) -> None:
    root = 0.5 * (base + (base * base + 4.0 * slope) ** 0.5)
    bound = domain * max(root, least)

    def falling(x: float) -> float | None:
        return base + slope / x if x >= bound else None

    assert fixed_point(falling, least, start) == pytest.approx(max(root, least), rel=1e-7)


@given(st.floats(0.0, 1e3), st.floats(1.0, 1e6), st.floats(10.0, 1e4), st.floats(10.0, 1e4))
@settings(max_examples=300, deadline=None)
def test_fixed_point_of_other_falling_functions(
    base: float, slope: float, least: float, start: float
) -> None:
    def falling(x: float) -> float:
        return base + slope / (x * x) + min(100.0, 1e4 / x)

    x = fixed_point(falling, least, start)
    assert x >= least
    assert falling(x) <= x * (1 + 1e-7)
    if x > least * (1 + 1e-7):
        assert falling(x) == pytest.approx(x, rel=1e-6)


def test_fixed_point_that_was_guessed() -> None:
    assert fixed_point(lambda x: 5.0 + 50.0 / x, 1.0, 10.0) == pytest.approx(10.0)
    assert fixed_point(lambda x: 7.0, 1.0, 7.0) == 7.0
    assert fixed_point(lambda x: 7.0, 7.0, 1.0) == 7.0


def test_fixed_point_below_the_domain_is_its_edge() -> None:
    assert fixed_point(lambda x: 10.0 if x >= 70.0 else None, 1.0, 5.0) == pytest.approx(70.0)
