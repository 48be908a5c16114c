"""What the emulator counts while the kernel runs one output tile is what its plan said beforehand."""

from __future__ import annotations

from collections import Counter

import pytest

from fa4tune.emulator.attention import emulate_forward
from fa4tune.emulator.barriers import TraceEvent
from fa4tune.emulator.machine import Result
from fa4tune.emulator.plan_check import ESTIMATES, check_counts
from fa4tune.hardware.gpu import load_gpu
from fa4tune.kernels.config import SM100ForwardConfig, default_config
from fa4tune.kernels.plan import KernelPlan, Work
from fa4tune.kernels.sm100.forward_plan import build_plan
from fa4tune.problem import AttentionProblem

B200 = load_gpu("b200")

CASES = {
    "one CTA": ("d128_dv128_bf16_full", "cta_group=1,kv_stages=3,exp2_share=0.1875"),
    "CTA pair": ("d128_dv128_bf16_full", "cta_group=2,kv_stages=6"),
    "one Q tile, long rows": ("d96_dv96_fp16_full", "cta_group=1,q_tiles=1,tile_n=160,scheduler=single"),
    "O in the place of Q": ("d192_dv128_bf16_full", "cta_group=1,kv_stages=2,p_split=1.0"),
}


def one_tile(case: str, trips: int) -> tuple[AttentionProblem, SM100ForwardConfig]:
    """A problem of exactly one output tile of ``trips`` K/V tiles, without mask or tail."""
    text, knobs = CASES[case]
    problem = AttentionProblem.parse(f"b1_hq1_hk1_sq4096_sk4096_{text}_fwd")
    default = default_config(problem, "sm_100a")
    assert isinstance(default, SM100ForwardConfig)
    config = default.with_text(knobs)
    rows = 128 * config.q_tiles * config.cta_group
    return AttentionProblem.parse(f"b1_hq1_hk1_sq{rows}_sk{trips * config.tile_n}_{text}_fwd"), config


def role_of(plan: KernelPlan) -> dict[int, str]:
    return {w: r.name for r in plan.roles for w in range(r.first_warp, r.first_warp + r.warps)}


def executed_work(result: Result, plan: KernelPlan) -> dict[str, Work]:
    """Exact work of the first CTA by role, in the plan's words."""
    assert result.counters is not None
    roles, pair = role_of(plan), plan.ctas_per_tile
    found: dict[str, Work] = {}
    for warp in result.counters.warps:
        if warp.cta:
            continue
        flops = sum(2 * m * n * k * count for (_, m, n, k), count in warp.mmas.items())
        work = Work(
            mma_flops=flops // pair,
            smem_mma_bytes=warp.bytes["mma_smem"] // pair,
            smem_tma_write_bytes=warp.bytes["tma_read"],
            smem_tma_read_bytes=warp.bytes["tma_write"],
            smem_generic_bytes=warp.bytes["smem_read"] + warp.bytes["smem_write"],
            tmem_load_bytes=warp.bytes["tmem_read"],
            tmem_store_bytes=warp.bytes["tmem_write"],
            exp=warp.exponentials["mufu"] + warp.exponentials["mufu_other"],
            exp_emulated=warp.exponentials["polynomial"],
            global_read_bytes=warp.bytes["tma_read"],
            global_write_bytes=warp.bytes["global_write"] + warp.bytes["tma_write"],
        )
        role = roles[warp.warp]
        found[role] = found.get(role, Work()) + work
    return {role: work for role, work in found.items() if work != Work()}


def planned_work(plan: KernelPlan, trips: int) -> tuple[dict[str, Work], dict[str, Work]]:
    """(work that does not depend on data, work of all iterations rescaled) by role, estimates left out."""
    certain: dict[str, Work] = {}
    rescaled: dict[str, Work] = {}
    for operation, times in plan.operations(trips):
        w = operation.work * times
        exact = Work(**{n: v for n, v in w.nonzero().items() if n not in ESTIMATES})
        into = rescaled if operation.when == "rescaled" else certain
        into[operation.role] = into.get(operation.role, Work()) + exact
    return {role: work for role, work in certain.items() if work != Work()}, rescaled


def executed_barriers(events: list[TraceEvent], plan: KernelPlan) -> dict[tuple[str, str], tuple[int, int]]:
    """(waits, arrivals) of the first CTA by (role, barrier)."""
    roles = role_of(plan)
    names = {b.offset + 8 * stage: b.name for b in plan.barriers for stage in range(b.stages)}
    base = min(e.barrier for e in events if e.space == "mbarrier") - min(names)
    waits: Counter[tuple[str, str]] = Counter()
    arrivals: Counter[tuple[str, str]] = Counter()
    for event in events:
        if event.space != "mbarrier" or event.cta or event.warp < 0:
            continue
        key = roles[event.warp], names[event.barrier - base]
        if event.kind == "wait":
            waits[key] += 1
        elif event.kind in ("arrive", "commit"):
            arrivals[key] += event.amount if event.kind == "arrive" else 1
    return {key: (waits[key], arrivals[key]) for key in {*waits, *arrivals}}


@pytest.mark.parametrize("case", CASES)
def test_work_and_barriers_of_a_tile_are_the_plans(case: str) -> None:
    for trips in (1, 2, 5):
        problem, config = one_tile(case, trips)
        plan = build_plan(problem, config, B200)
        certain, rescaled = planned_work(plan, trips)
        expected_barriers = {key: n for key, n in plan.barrier_counts(trips).items() if n != (0, 0)}

        call = emulate_forward(problem, config, B200, counters=True, trace=True)
        assert call.passed
        (result,) = call.results
        executed = executed_work(result, plan)
        assert result.counters is not None
        tile = {role.name: (trips, 0) for role in plan.roles}
        assert check_counts(plan, result.counters, [tile]) == []
        assert result.trace is not None
        assert executed_barriers(result.trace, plan) == expected_barriers

        # Where data decide, whole warps do: 32 rows compute their factor, and as many rescale O.
        taken = 0
        for role in certain:
            extra = executed[role].exp - certain[role].exp
            if role.startswith("softmax"):
                assert extra % 32 == 0
                assert 0 <= extra <= rescaled[role].exp
                taken += extra // 32
                certain[role] = certain[role] + Work(exp=extra)
        dv = problem.head_dim_v
        certain["correction"] = certain["correction"] + Work(
            tmem_load_bytes=32 * 4 * dv * taken, tmem_store_bytes=32 * 4 * dv * taken
        )
        assert executed == certain


def test_matrix_instructions_have_the_planned_shapes() -> None:
    problem, config = one_tile("CTA pair", 2)
    plan = build_plan(problem, config, B200)
    call = emulate_forward(problem, config, B200, counters=True)
    assert call.results[0].counters is not None
    executed = call.results[0].counters.total().mmas
    planned: Counter[tuple[str, int, int, int]] = Counter()
    for operation, times in plan.operations(2):
        for mma in operation.mma:
            sources = "TS" if mma.a_source == "tmem" else "SS"
            shape = (f"tcgen05.{sources}.cta_group::{mma.cta_group}", mma.m, mma.n, mma.k)
            planned[shape] += mma.count * times
    assert executed == planned
