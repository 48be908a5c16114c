"""The fit finds constants that produced the data, judges itself on unseen problems, and writes an overlay."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from random import Random

import pytest

from fa4tune.errors import ConfigError, HardwareError, InfeasibleError, SearchError
from fa4tune.hardware.gpu import load_gpu
from fa4tune.kernels.config import KERNEL_VERSIONS, default_config
from fa4tune.kernels.program import build_plan
from fa4tune.model.accuracy import Profiled, Sample, accuracy, profiled, samples, times_in_turns
from fa4tune.model.fit import CONSTANTS, fit, overlay
from fa4tune.model.predict import predict
from fa4tune.outcome import Outcome
from fa4tune.problem import AttentionProblem
from fa4tune.record import Trial

PAUSE_US = 70.0
DATA = Path(__file__).parents[2] / "studies" / "data"
TEXTS = [
    f"b{32768 // s}_hq{2048 // d}_hk{2048 // d}_sq{s}_sk{s}_d{d}_dv{d}_bf16_{mask}_fwd"
    for s, d, mask in ((1024, 64, "full"), (4096, 64, "full"), (4096, 128, "causal"), (8192, 128, "full"))
]


def made_up(gpu_changes: dict[str, float], noise: float, each: int) -> list[Sample]:
    """Measurements in turns by the model itself under other constants, with noise."""
    gpu = load_gpu("h200")
    truth = dataclasses.replace(gpu, **gpu_changes)
    rng = Random(1)
    found = []
    for text in TEXTS:
        problem = AttentionProblem.parse(text)
        base = default_config(problem, gpu.arch)
        count = 0
        while count < each:
            try:
                config = base.replace(**{n: rng.choice(base.choices(n)) for n in base.knobs()})
                plan = build_plan(problem, config, gpu)
            except (ConfigError, InfeasibleError):
                continue
            found.append(Sample(problem, config, plan, 0.0))
            count += 1
    return [
        dataclasses.replace(sample, measured_us=time * (1 + rng.gauss(0, noise)))
        for sample, time in zip(found, times_in_turns(found, truth, PAUSE_US), strict=True)
    ]


def read_cycles(gpu_changes: dict[str, float], found: list[Sample]) -> list[Profiled]:
    """Cycles of the same kernels under the same constants."""
    truth = dataclasses.replace(load_gpu("h200"), **gpu_changes)
    return [Profiled(s.problem, s.config, s.plan, predict(s.plan, truth).cycles) for s in found]


def test_fit_recovers_constants_that_made_the_data() -> None:
    truth = {"section_contention": 0.95, "arithmetic_latency_clk": 70.0}
    chosen = [c for c in CONSTANTS if c.name in truth]
    found = made_up(truth, 0.01, 24)
    result = fit(found, read_cycles(truth, found[::4]), load_gpu("h200"), PAUSE_US, constants=chosen, folds=2)
    assert result.before.mape > 0.05
    assert result.held_out.mape < 0.015
    assert result.kernels == len(found[::4])
    assert result.cycles_error < 0.015
    for name, value in truth.items():
        assert result.constants[name] == pytest.approx(value, rel=0.15)


def test_cycles_tell_what_a_clock_hides() -> None:
    # times in turns hardly change with power and cycles scaled together; cycles are what they are
    truth = {"section_contention": 0.6, "active_watts": 600.0}
    chosen = [c for c in CONSTANTS if c.name in truth]
    found = made_up(truth, 0.0, 12)
    result = fit(found, read_cycles(truth, found), load_gpu("h200"), PAUSE_US, constants=chosen, folds=2)
    assert result.cycles_error < 0.005
    for name, value in truth.items():
        assert result.constants[name] == pytest.approx(value, rel=0.05)


def test_configs_in_turns_share_a_clock() -> None:
    gpu = load_gpu("h200")
    found = made_up({}, 0.0, 6)
    times = times_in_turns(found, gpu, 0.0)
    clocks: dict[str, set[float]] = {}
    for sample, time in zip(found, times, strict=True):
        clock = predict(sample.plan, gpu).cycles / (time - gpu.launch_us)
        clocks.setdefault(str(sample.problem), set()).add(round(clock, 3))
    assert all(len(values) == 1 for values in clocks.values())


def test_waiting_for_hbm_takes_as_long_at_the_shared_clock() -> None:
    gpu = dataclasses.replace(load_gpu("h200"), hbm_gbytes_per_s=20.0)
    found = made_up({}, 0.0, 6)
    own = [predict(sample.plan, gpu) for sample in found]
    assert all(said.breakdown["memory"] > 0 for said in own)
    assert times_in_turns(found, gpu, 0.0) == pytest.approx([said.microseconds for said in own])


def test_recorded_cycles_are_near_the_predicted_ones() -> None:
    gpu = load_gpu("h200")
    kernels = profiled(DATA / "ncu_cycles_h200.jsonl", gpu)
    assert len(kernels) > 600
    errors = [abs(predict(k.plan, gpu).cycles / k.cycles - 1) for k in kernels]
    assert sum(errors) / len(errors) < 0.07


def test_cycles_of_another_kernel_version_are_refused(tmp_path: Path) -> None:
    lines = (DATA / "ncu_cycles_h200.jsonl").read_text().splitlines()[:3]
    first = json.loads(lines[0])
    first["provenance"]["kernel_version"] = 1
    path = tmp_path / "old.jsonl"
    path.write_text("\n".join([json.dumps(first), *lines[1:]]) + "\n")
    with pytest.raises(HardwareError, match="kernel version 1"):
        profiled(path, load_gpu("h200"))


def test_overlay_is_a_hardware_file_with_sources(tmp_path: Path) -> None:
    chosen = [c for c in CONSTANTS if c.name == "section_contention"]
    found = made_up({"section_contention": 0.6}, 0.0, 4)
    result = fit(found, [], load_gpu("h200"), PAUSE_US, constants=chosen, folds=2)
    path = tmp_path / "fitted.toml"
    path.write_text(overlay(result, "h200", "made up"))
    gpu = load_gpu(str(path))
    assert gpu.section_contention == pytest.approx(result.constants["section_contention"], rel=1e-3)
    assert "made up" in gpu.sources["section_contention"]
    assert gpu.mma_flops_per_clk == load_gpu("h200").mma_flops_per_clk


def test_constants_stay_in_bounds_and_few() -> None:
    assert len(CONSTANTS) <= 12
    for name in ("h100", "h200", "b200", "b300"):
        gpu = load_gpu(name)
        for constant in CONSTANTS:
            assert constant.low <= getattr(gpu, constant.name) <= constant.high, (name, constant.name)


def test_too_few_problems_to_hold_out_are_refused() -> None:
    found = [s for s in made_up({}, 0.0, 2) if str(s.problem) == TEXTS[0]]
    with pytest.raises(SearchError, match="1 problems cannot be held out"):
        fit(found, [], load_gpu("h200"), PAUSE_US)


def test_accuracy_by_hand() -> None:
    result = accuracy(["a"] * 4 + ["b"] * 3, [10, 11, 20, 40, 5, 6, 7], [11, 10, 20, 44, 5, 6, 7])
    a, b = result.problems
    assert (a.regret, b.regret) == (pytest.approx(1.1), 1.0)
    assert (a.best_rank, b.best_rank) == (2, 1)
    assert a.mape == pytest.approx((0.1 + 1 / 11 + 0 + 0.1) / 4)
    assert a.good_maximum == pytest.approx(0.1)
    assert b.spearman == pytest.approx(1.0)
    assert result.worst_regret == pytest.approx(1.1)
    assert result.regret == pytest.approx(1.1**0.5)
    assert result.in_shortlist == 1.0


def test_samples_leave_out_what_has_no_comparable_time() -> None:
    gpu = load_gpu("h200")
    config = default_config(AttentionProblem.parse(TEXTS[0]), gpu.arch).as_dict()

    def trial(**changes: object) -> Trial:
        values: dict[str, object] = {
            "problem": TEXTS[0],
            "kernel_class": "sm90_fwd",
            "config": config,
            "hardware_key": gpu.key,
            "outcome": Outcome.MEASURED,
            "median_us": 100.0,
            "kernel_version": KERNEL_VERSIONS["sm90_fwd"],
        }
        return Trial(**{**values, **changes})  # type: ignore[arg-type]

    kept = samples(
        [
            trial(),
            trial(median_us=110.0),
            trial(outcome=Outcome.HUNG, median_us=None),
            trial(hardware_key="sm_90a-1sm-other"),
            trial(kernel_version=KERNEL_VERSIONS["sm90_fwd"] - 1, median_us=900.0),
            trial(resources={"spill_bytes": 8}, config={**config, "kv_stages": 1}),
            trial(config={"tile_m": 64}),
        ],
        gpu,
    )
    assert [s.measured_us for s in kept] == [105.0]
