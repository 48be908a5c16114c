"""Whole tiles: what they cost beside their iterations, and loads of Q while HBM is busy."""

from __future__ import annotations

import pytest

from fa4tune.hardware.gpu import load_gpu
from fa4tune.kernels.config import default_config
from fa4tune.kernels.plan import KernelPlan
from fa4tune.kernels.program import build_plan
from fa4tune.model.run import Run, phases_of
from fa4tune.model.steady import durations_of, steady
from fa4tune.model.timing import from_hbm, rates_of
from fa4tune.problem import AttentionProblem


def plan_on(gpu_name: str) -> KernelPlan:
    gpu = load_gpu(gpu_name)
    problem = AttentionProblem.parse("b4_hq16_hk16_sq4096_sk4096_d128_dv128_bf16_causal_fwd")
    return build_plan(problem, default_config(problem, gpu.arch), gpu)


@pytest.mark.parametrize("gpu_name", ["h200", "b200"])
@pytest.mark.parametrize("busy", [0.0, 0.3, 1.0, 4.0])
def test_loads_of_a_tile_wait_for_a_busy_hbm(gpu_name: str, busy: float) -> None:
    plan, gpu = plan_on(gpu_name), load_gpu(gpu_name)
    rates = rates_of(gpu)
    for operations, phase in zip((plan.prologue, plan.epilogue), phases_of(plan, rates, busy), strict=True):
        alone = durations_of(plan, rates, operations, 0.0, 0.0)
        for operation, duration, once in zip(operations, alone, phase, strict=True):
            d = from_hbm(duration, operation, gpu, 1.0, busy)
            assert once.name == operation.name
            assert once.span == pytest.approx(d.tensor + d.section + d.tmem + d.other + d.latency)


@pytest.mark.parametrize("gpu_name", ["h200", "b200"])
def test_a_tile_costs_the_same_however_many_iterations_it_has(gpu_name: str) -> None:
    # what predict takes from a run of 3 iterations holds for longer tiles
    plan, gpu = plan_on(gpu_name), load_gpu(gpu_name)
    state = steady(plan, gpu, 32)
    timed = state.plain
    run = Run(plan, timed, gpu, phases_of(plan, rates_of(gpu), state.hbm_busy))
    ends = [run.tile(24, timed.values) for _ in range(3)]
    single = plan.scheduler != "persistent"
    overhead = gpu.tile_overhead_clk + (gpu.cta_start_clk if single else 0.0)
    assert ends[0] == pytest.approx(24 * timed.ratio + state.first - overhead, rel=0.01)
    if not single:
        assert ends[2] - ends[1] == pytest.approx(24 * timed.ratio + state.later - overhead, rel=0.01)


def test_a_busy_hbm_delays_the_first_tile_only_where_its_loads_take_longer() -> None:
    plan, gpu = plan_on("h200"), load_gpu("h200")
    idle, little, much = (steady(plan, gpu, 32, hbm=cycles) for cycles in (0.0, 64.0, 1e6))
    assert idle.first == little.first < much.first
