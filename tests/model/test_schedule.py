"""Makespans against a plain simulation of every tile, and HBM traffic by hand."""

from __future__ import annotations

import heapq
import random

import numpy as np
import pytest

from fa4tune.hardware.gpu import load_gpu
from fa4tune.kernels.config import default_config
from fa4tune.kernels.plan import KernelPlan
from fa4tune.kernels.program import build_plan
from fa4tune.kernels.tiles import HeadTrips, m_blocks, tile_trips
from fa4tune.model.predict import load_of
from fa4tune.model.roofline import head_trips
from fa4tune.model.schedule import FEW_EQUAL, L2_SECTION_BYTES, first_touch, hbm_bytes, makespan, workers
from fa4tune.model.steady import parts_of
from fa4tune.problem import AttentionProblem


def plan_of(text: str, **knobs: object) -> KernelPlan:
    problem, gpu = AttentionProblem.parse(text), load_gpu("h200")
    return build_plan(problem, default_config(problem, gpu.arch).replace(**knobs), gpu)


def by_simulation(plan: KernelPlan, places: int, overhead: float, masked: float) -> float:
    """Cost of the place that finishes last, tile by tile."""
    trips = head_trips(plan)
    problem = plan.problem
    cost = (trips.totals + overhead + masked * trips.masks).tolist()
    heads = problem.batch * problem.heads // plan.packed_heads
    blocks = list(range(len(trips)))
    if plan.scheduler == "lpt" or plan.constants.get("longest_first"):
        bytes_of_head = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * problem.element_bytes
        section = max(1, L2_SECTION_BYTES // bytes_of_head) * problem.gqa_group // plan.packed_heads
        order = []
        for first in range(0, heads, section):
            for block in reversed(blocks):
                order += [block] * (min(heads, first + section) - first)
    else:
        order = blocks * heads
    if plan.scheduler == "persistent":
        loads = [0.0] * places
        for index, block in enumerate(order):
            wave, place = divmod(index, places)
            loads[place if wave % 2 == 0 else places - 1 - place] += cost[block]
        return max(loads)
    heap = [0.0] * places
    for block in order:
        heapq.heapreplace(heap, heap[0] + cost[block])
    return max(heap)


@pytest.mark.parametrize("scheduler", ["single", "persistent", "lpt"])
@pytest.mark.parametrize(
    "text",
    [
        "b4_hq16_hk16_sq4096_sk4096_d128_dv128_bf16_causal_fwd",
        "b1_hq32_hk8_sq8192_sk8192_d128_dv128_bf16_causal_fwd",
        "b2_hq3_hk3_sq1000_sk3000_d64_dv64_bf16_causal_fwd",
    ],
)
def test_causal_makespan_is_that_of_the_tile_order(text: str, scheduler: str) -> None:
    plan = plan_of(text, scheduler=scheduler)
    span = makespan(plan, head_trips(plan), 132, 1.5, 0.25)
    found = span.iterations + 1.5 * span.tiles + 0.25 * span.masked
    # the unsorted order is simulated at its end only
    assert found == pytest.approx(
        by_simulation(plan, 132, 1.5, 0.25), rel=0.06 if scheduler == "single" else 1e-9
    )


def random_plan(rng: random.Random, scheduler: str) -> KernelPlan:
    """A causal problem of at most 256 tiles a CTA, in sections of one head to hundreds of heads."""
    kv_heads, head_dim = rng.choice([1, 2, 3, 8]), rng.choice([64, 128])
    queries = rng.choice([300, 1000, 2048, 5000, 40_000, 100_000])
    keys = rng.choice([queries, queries, 3 * queries + 17, max(1, queries // 3)])
    heads = kv_heads * rng.choice([1, 1, 4])
    batch = max(1, rng.randint(1, 10_000 // (queries // 128)) // heads)
    return plan_of(
        f"b{batch}_hq{heads}_hk{kv_heads}_sq{queries}_sk{keys}_d{head_dim}_dv{head_dim}_bf16_causal_fwd",
        scheduler=scheduler,
    )


@pytest.mark.parametrize("scheduler", ["persistent", "lpt"])
def test_makespan_of_random_problems_is_that_of_a_walk_tile_by_tile(scheduler: str) -> None:
    rng = random.Random(11)
    few = many = 0
    for _ in range(40):
        plan = random_plan(rng, scheduler)
        overhead, masked = rng.randrange(20) / 4, rng.choice([-0.25, 0.0, 0.25, 1.0])
        span = makespan(plan, head_trips(plan), 132, overhead, masked)
        found = span.iterations + overhead * span.tiles + masked * span.masked
        assert found == pytest.approx(by_simulation(plan, 132, overhead, masked), rel=1e-9)
        head = plan.problem.seqlen_k * plan.problem.head_dim * 4
        section = max(1, L2_SECTION_BYTES // head) * plan.problem.gqa_group
        few += section < FEW_EQUAL
        many += section >= FEW_EQUAL
    assert min(few, many) >= 4  # tiles were dealt one by one, and in groups


def test_end_of_a_long_head_stands_for_all_of_it() -> None:
    for text in (
        "b1_hq8_hk2_sq1000000_sk1000000_d64_dv64_bf16_causal_fwd",
        "b16_hq1_hk1_sq400000_sk400000_d128_dv128_bf16_causal_fwd",
    ):
        plan = plan_of(text, scheduler="lpt")
        span = makespan(plan, head_trips(plan), 66, 1.5, 0.25)
        found = span.iterations + 1.5 * span.tiles + 0.25 * span.masked
        assert found == pytest.approx(by_simulation(plan, 66, 1.5, 0.25), rel=1e-4)


@pytest.mark.parametrize(
    "text",
    [
        "b1_hq1_hk1_sq1000_sk1000_d64_dv64_bf16_causal_fwd",
        "b1_hq1_hk1_sq4096_sk1000_d64_dv64_bf16_causal_fwd",
        "b1_hq2_hk1_sq70_sk9000_d128_dv128_bf16_causal_fwd",
    ],
)
def test_shares_of_parts_are_counted_part_by_part(text: str) -> None:
    plan = plan_of(text)
    parts, least = parts_of(plan), int(plan.constants["always_masked"])
    assert parts > 1
    rows = plan.tile_rows // parts
    own, blocks = tile_trips(plan.problem, rows, plan.tile_n), m_blocks(plan.problem, rows)
    masked = hidden = absent = 0
    whole = head_trips(plan, least)
    for part in range(len(whole) * parts):
        tile = whole[part // parts]
        masked += tile.masked
        if part < blocks:
            hidden += max(own[part].masked, min(least, own[part].total))
            absent += tile.total - min(tile.total, max(own[part].total, 1))
        else:
            hidden += 1
            absent += tile.total - min(tile.total, 1)
    load = load_of(plan, load_gpu("h200"))
    assert load.hidden == pytest.approx(hidden / masked)
    assert load.absent == pytest.approx(absent * parts / masked)


@pytest.mark.parametrize("scheduler", ["single", "persistent", "lpt"])
@pytest.mark.parametrize("copies", [2000, 2777])
def test_end_of_a_long_schedule_stands_for_all_of_it(scheduler: str, copies: int) -> None:
    plan = plan_of(f"b{copies}_hq1_hk1_sq4096_sk4096_d128_dv128_bf16_causal_fwd", scheduler=scheduler)
    span = makespan(plan, head_trips(plan), 132, 1.5, 0.25)
    found = span.iterations + 1.5 * span.tiles + 0.25 * span.masked
    assert found == pytest.approx(by_simulation(plan, 132, 1.5, 0.25), rel=0.02)
    huge = plan_of("b100000_hq64_hk64_sq4096_sk4096_d128_dv128_bf16_causal_fwd", scheduler=scheduler)
    mean = head_trips(huge).total * 6_400_000 / 132
    assert makespan(huge, head_trips(huge), 132, 1.5, 0.25).iterations == pytest.approx(mean, rel=0.01)


def test_equal_tiles_take_whole_waves() -> None:
    plan = plan_of("b4_hq16_hk16_sq4096_sk4096_d128_dv128_bf16_full_fwd")
    span = makespan(plan, head_trips(plan), 132, 1.0, 0.0)
    assert span.tiles == 16  # 2048 tiles over 132
    assert span.iterations == 16 * 32
    assert span.busy == pytest.approx(2048 / (16 * 132))


def test_longest_first_balances_better_than_row_order() -> None:
    text = "b4_hq16_hk16_sq4096_sk4096_d128_dv128_bf16_causal_fwd"
    spans = {}
    for scheduler in ("lpt", "single"):
        plan = plan_of(text, scheduler=scheduler)
        spans[scheduler] = makespan(plan, head_trips(plan), 132, 0.0, 0.0)
    assert spans["lpt"].iterations < spans["single"].iterations
    assert spans["lpt"].busy > 0.95


def test_workers_count_ctas_an_sm_and_pairs() -> None:
    assert workers(plan_of("b1_hq1_hk1_sq64_sk64_d64_dv64_bf16_full_fwd"), 132) == 132
    plan = plan_of(
        "b1_hq1_hk1_sq64_sk64_d64_dv64_bf16_full_fwd", tile_m=64, ctas_per_sm=2, tile_n=64, ping_pong=False
    )
    assert workers(plan, 132) == 264


def test_hbm_moves_each_tensor_once_while_l2_holds_what_is_in_use() -> None:
    plan = plan_of("b4_hq16_hk16_sq4096_sk4096_d128_dv128_bf16_full_fwd")
    assert hbm_bytes(plan, 132, 60 << 20) == plan.problem.compulsory_bytes()


def test_hbm_reads_keys_again_where_l2_is_too_small() -> None:
    plan = plan_of("b1_hq1_hk1_sq65536_sk65536_d128_dv128_bf16_full_fwd")
    # 512 tiles of one head over 132 CTAs: four rounds over K and V
    once = plan.problem.seqlen_k * 256 * 2
    assert hbm_bytes(plan, 132, 1 << 20) == plan.problem.compulsory_bytes() + 3 * once
    assert hbm_bytes(plan, 132, 60 << 20) == plan.problem.compulsory_bytes()


def test_trips_of_a_masked_tile_are_counted() -> None:
    plan = plan_of("b1_hq1_hk1_sq128_sk128_d64_dv64_bf16_full_fwd")
    span = makespan(plan, HeadTrips(np.array([4]), np.array([1])), 132, 0.0, 0.5)
    assert (span.tiles, span.iterations, span.masked) == (1, 4, 1)


def test_first_tiles_bring_keys_and_values_where_heads_outnumber_ctas() -> None:
    plan = plan_of("b32_hq16_hk16_sq512_sk512_d128_dv128_bf16_causal_fwd", tile_m=128, scheduler="lpt")
    # 512 heads in sections of 200; a first tile moves 512 keys and values, 128 rows of q and out, and the lse
    assert first_touch(plan, 132) == (512, 512 * 512 + 128 * (512 + 4))
    few = plan_of("b1_hq16_hk16_sq4096_sk4096_d128_dv128_bf16_causal_fwd", tile_m=128, scheduler="lpt")
    assert first_touch(few, 132) == (0, 0.0)
