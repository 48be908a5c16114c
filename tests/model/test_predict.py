"""Predictions against arithmetic that does not go through the model, and replay against prediction."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest

from fa4tune.errors import ConfigError, InfeasibleError
from fa4tune.hardware.gpu import Gpu, load_gpu
from fa4tune.kernels.config import default_config
from fa4tune.kernels.plan import KernelPlan, Unit
from fa4tune.kernels.program import build_plan
from fa4tune.kernels.sm90.forward_plan import cta_trips, warpgroup_trips
from fa4tune.model.predict import load_of, predict, slack, state_of
from fa4tune.model.replay import replay
from fa4tune.model.roofline import roofline
from fa4tune.model.skeleton import QUEUE
from fa4tune.model.steady import steady
from fa4tune.problem import AttentionProblem

PROBLEMS = (
    "b4_hq32_hk32_sq4096_sk4096_d64_dv64_bf16_full_fwd",
    "b4_hq16_hk16_sq4096_sk4096_d128_dv128_bf16_causal_fwd",
    "b2_hq32_hk8_sq2000_sk3000_d128_dv128_bf16_causal_fwd",
    "b16_hq16_hk16_sq512_sk512_d128_dv128_bf16_full_fwd",
)


def default_plan(text: str, gpu: Gpu) -> KernelPlan:
    problem = AttentionProblem.parse(text)
    return build_plan(problem, default_config(problem, gpu.arch), gpu)


def random_plans(text: str, gpu: Gpu, count: int, seed: int) -> list[KernelPlan]:
    """Feasible configs drawn from the whole space."""
    problem, rng = AttentionProblem.parse(text), random.Random(seed)
    base = default_config(problem, gpu.arch)
    plans: list[KernelPlan] = []
    while len(plans) < count:
        knobs = {name: rng.choice(base.choices(name)) for name in base.knobs()}
        try:
            plans.append(build_plan(problem, base.replace(**knobs), gpu))
        except (ConfigError, InfeasibleError):
            continue
    return plans


@pytest.mark.parametrize("gpu_name", ["h200", "b200"])
@pytest.mark.parametrize("text", PROBLEMS)
def test_replay_agrees_with_predict_in_steady_state(text: str, gpu_name: str) -> None:
    gpu = load_gpu(gpu_name)
    for plan in random_plans(text, gpu, 15, seed=7):
        played = replay(plan, gpu, trips=40)
        assert played.period == pytest.approx(played.prediction.period, rel=0.01), str(plan.config)


def measured_plans(gpu: Gpu, every: int) -> list[KernelPlan]:
    """Plans of configs that the campaign measured, one in ``every``."""
    lines = (Path(__file__).parents[2] / "studies/data/campaign.jsonl").read_text().splitlines()
    plans = []
    for line in lines[::every]:
        trial = json.loads(line)
        problem = AttentionProblem.parse(trial["problem"])
        knobs = {k: tuple(v) if isinstance(v, list) else v for k, v in trial["config"].items()}
        plans.append(build_plan(problem, default_config(problem, gpu.arch).replace(**knobs), gpu))
    return plans


def test_replay_agrees_with_predict_on_measured_configs() -> None:
    gpu = load_gpu("h200")
    queueing = turns = 0
    for plan in measured_plans(gpu, 7):
        played, state = replay(plan, gpu, trips=40), state_of(plan, gpu, load_of(plan, gpu))
        assert played.period == pytest.approx(state.plain.period, rel=0.01), str(plan.config)
        queueing += QUEUE in state.plain.skeleton.order_owners
        turns += "turn" in state.plain.skeleton.order_owners
    assert queueing >= 5
    assert turns > 10


@pytest.mark.parametrize("latency", [0.0, 36.0, 1500.0])
def test_replay_hands_turns_over_as_predict_does(latency: float) -> None:
    gpu = dataclasses.replace(load_gpu("h200"), turn_latency_clk=latency)
    problem = AttentionProblem.parse(PROBLEMS[0])
    config = default_config(problem, gpu.arch).replace(ping_pong=True)
    played = replay(build_plan(problem, config, gpu), gpu, trips=40)
    assert played.period == pytest.approx(played.prediction.period, rel=1e-6)
    groups = len({operation.role for operation in played.plan.loop.body if operation.mma})
    assert played.period >= groups * latency
    if latency > 1000:  # then handing over is all that counts
        assert played.period < 1.2 * groups * latency


@pytest.mark.parametrize("gpu_name", ["h200", "b200"])
def test_a_prediction_does_not_depend_on_those_before_it(gpu_name: str) -> None:
    # an equal GPU that is another object shares no prediction
    plans = [plan for text in PROBLEMS for plan in random_plans(text, load_gpu(gpu_name), 12, seed=21)]
    first, second = (dataclasses.replace(load_gpu(gpu_name)) for _ in range(2))
    forwards = [predict(plan, first) for plan in plans]
    backwards = [predict(plan, second) for plan in reversed(plans)]
    assert forwards == backwards[::-1]
    assert len({prediction.period for prediction in forwards}) > 20


def test_a_prediction_is_the_same_in_a_process_of_its_own() -> None:
    gpu = load_gpu("h200")
    before = random_plans(PROBLEMS[0], gpu, 20, seed=23)
    plan = default_plan(PROBLEMS[1], gpu)
    for other in before:
        predict(other, gpu)
    code = (
        "from fa4tune.hardware.gpu import load_gpu\nfrom fa4tune.kernels.config import default_config\n"
        "from fa4tune.kernels.program import build_plan\nfrom fa4tune.model.predict import predict\n"
        "from fa4tune.problem import AttentionProblem\ngpu = load_gpu('h200')\n"
        f"problem = AttentionProblem.parse({PROBLEMS[1]!r})\n"
        "found = predict(build_plan(problem, default_config(problem, gpu.arch), gpu), gpu)\n"
        "print(found.period.hex(), found.microseconds.hex(), *found.critical_cycle)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    here = predict(plan, gpu)
    assert told.split() == [here.period.hex(), here.microseconds.hex(), *here.critical_cycle]


@pytest.mark.parametrize("gpu_name", ["h100", "h200", "b200", "b300"])
@pytest.mark.parametrize("text", PROBLEMS)
def test_no_prediction_beats_the_roofline(text: str, gpu_name: str) -> None:
    gpu = load_gpu(gpu_name)
    for plan in [default_plan(text, gpu), *random_plans(text, gpu, 5, seed=3)]:
        prediction = predict(plan, gpu)
        at_clock = dataclasses.replace(gpu, clock_mhz=prediction.clock_mhz)
        assert prediction.microseconds >= roofline(plan, at_clock).time * 1e6


@pytest.mark.parametrize("gpu_name", ["h200", "b200"])
@pytest.mark.parametrize("text", PROBLEMS)
def test_breakdown_adds_up_to_the_time(text: str, gpu_name: str) -> None:
    gpu = load_gpu(gpu_name)
    for plan in random_plans(text, gpu, 5, seed=5):
        prediction = predict(plan, gpu)
        assert sum(prediction.breakdown.values()) == pytest.approx(prediction.microseconds, rel=1e-6)
        assert all(part >= -1e-9 for part in prediction.breakdown.values())


@pytest.mark.parametrize("gpu_name", ["h200", "b200"])
def test_critical_cycle_explains_the_period(gpu_name: str) -> None:
    gpu = load_gpu(gpu_name)
    for plan in random_plans(PROBLEMS[0], gpu, 10, seed=9):
        prediction = predict(plan, gpu)
        around = sum(s.cycles for s in prediction.steps) / sum(s.distance for s in prediction.steps)
        assert around <= prediction.period * 1.001
        if prediction.bound == "latency chain":
            assert around == pytest.approx(prediction.period, rel=1e-6)


@pytest.mark.parametrize("gpu_name", ["h200", "b200"])
def test_slack_is_zero_on_the_critical_cycle_and_positive_off_it(gpu_name: str) -> None:
    gpu = load_gpu(gpu_name)
    for plan in random_plans(PROBLEMS[0], gpu, 6, seed=13):
        found, prediction = slack(plan, gpu), predict(plan, gpu)
        if prediction.bound != "latency chain":
            continue
        for name in prediction.critical_cycle:
            # of an asynchronous operation the issue alone may be critical
            if not plan.loop.operation(name).asynchronous:
                assert found[name] == pytest.approx(0.0, abs=1e-3 * prediction.period)
        assert max(found.values()) > 0.05 * prediction.period


@pytest.mark.parametrize(("gpu_name", "kv_heads"), [("h200", 32), ("b200", 32), ("b200", 8)])
def test_single_query_decode_is_memory_bound(gpu_name: str, kv_heads: int) -> None:
    gpu = load_gpu(gpu_name)
    text = f"b64_hq32_hk{kv_heads}_sq1_sk8192_d128_dv128_bf16_full_fwd"
    prediction = predict(default_plan(text, gpu), gpu)
    least = 64 * kv_heads * 8192 * 256 * 2 / (gpu.hbm_gbytes_per_s * 1e3)
    assert prediction.bound == "memory"
    assert least < prediction.microseconds < 1.25 * least


def test_tiny_problem_is_bound_by_its_launch() -> None:
    gpu = load_gpu("h200")
    prediction = predict(default_plan("b1_hq1_hk1_sq64_sk64_d64_dv64_bf16_full_fwd", gpu), gpu)
    assert prediction.bound == "launch"
    assert prediction.microseconds < 12


def test_faster_exponentials_help_where_the_chain_holds_them() -> None:
    gpu = load_gpu("b200")
    plan = default_plan("b4_hq32_hk32_sq8192_sk8192_d64_dv64_bf16_full_fwd", gpu)
    assert predict(plan, gpu.scaled(exp=2.0)).microseconds < 0.95 * predict(plan, gpu).microseconds


@pytest.mark.parametrize("rate", ["mma", "exp", "smem", "fma", "l2", "hbm"])
def test_a_faster_unit_never_slows_the_kernel_at_a_fixed_clock(rate: str) -> None:
    cool = dataclasses.replace(load_gpu("h200"), power_watts=1e6)
    for plan in random_plans(PROBLEMS[1], cool, 6, seed=11):
        before, after = predict(plan, cool), predict(plan, cool.scaled(**{rate: 2.0}))
        assert after.microseconds <= before.microseconds * 1.002


def test_causal_costs_about_half_of_full() -> None:
    gpu = load_gpu("h200")
    full = predict(default_plan("b2_hq16_hk16_sq16384_sk16384_d128_dv128_bf16_full_fwd", gpu), gpu)
    causal = predict(default_plan("b2_hq16_hk16_sq16384_sk16384_d128_dv128_bf16_causal_fwd", gpu), gpu)
    assert 0.5 < causal.microseconds / full.microseconds < 0.6


def test_utilisation_of_the_replay_matches_the_prediction() -> None:
    gpu = load_gpu("b200")
    plan = default_plan("b1_hq1_hk1_sq256_sk16384_d128_dv128_bf16_full_fwd", gpu)
    played = replay(plan, gpu, trips=128).utilisation()
    period = predict(plan, gpu).period
    tensor = 2 * 2 * 256 * 128 * 128 / gpu.mma_flops_per_clk / 2 / period * 2
    assert played[Unit.TENSOR] == pytest.approx(tensor, rel=0.05)


@pytest.mark.parametrize("tile", [(128, 128), (192, 64), (256, 80)])
@pytest.mark.parametrize("seqlens", [(512, 512), (1000, 1000), (300, 900)])
def test_warpgroups_above_the_diagonal_are_counted_as_the_kernel_runs(
    tile: tuple[int, int], seqlens: tuple[int, int]
) -> None:
    gpu = load_gpu("h200")
    problem = AttentionProblem(2, 4, 4, *seqlens, 64, 64, "bf16", "causal")
    registers = {128: (240, 24), 192: (160, 32), 256: (112, 32)}[tile[0]]
    base = default_config(problem, gpu.arch)
    config = base.replace(
        tile_m=tile[0], tile_n=tile[1], registers=registers, kv_stages=2, scheduler="lpt", overlap=False
    )
    load = load_of(build_plan(problem, config, gpu), gpu)
    parts = tile[0] // 64
    executed = masked = 0
    for block in range(len(load.trips)):
        own = [warpgroup_trips(problem, config, block, w) for w in range(parts)]  # type: ignore[arg-type]
        assert max(t.total for t in own) <= cta_trips(problem, config, block)  # type: ignore[arg-type]
        executed += sum(t.total for t in own)
        masked += sum(t.masked for t in own)
    assert load.executed * parts == pytest.approx(8 * executed)
    tiles_masked = load.trips.masked
    assert load.hidden * parts * tiles_masked == pytest.approx(masked)


def test_first_tiles_take_longer_while_they_bring_keys_and_values() -> None:
    gpu = load_gpu("h200")
    plan = default_plan("b32_hq16_hk16_sq512_sk512_d128_dv128_bf16_causal_fwd", gpu)
    assert load_of(plan, gpu).touched == 512
    waited, found = steady(plan, gpu, 4, 1.0, False, math.inf), steady(plan, gpu, 4)
    times = [4 * state.plain.period + state.later for state in (waited, found)]
    assert times[0] > 1.05 * times[1]
    slow = dataclasses.replace(gpu, hbm_gbytes_per_s=gpu.hbm_gbytes_per_s / 2)
    assert predict(plan, slow).microseconds > predict(plan, gpu).microseconds
