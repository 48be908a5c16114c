"""The fit finds constants that produced the data, judges itself on unseen problems, and writes an overlay."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from random import Random

import pytest

from fa4tune.errors import ConfigError, InfeasibleError, SearchError
from fa4tune.hardware.gpu import load_gpu
from fa4tune.kernels.config import KERNEL_VERSIONS, default_config
from fa4tune.kernels.program import build_plan
from fa4tune.model.accuracy import Sample, accuracy, samples
from fa4tune.model.fit import CONSTANTS, fit, overlay
from fa4tune.model.predict import predict
from fa4tune.outcome import Outcome
from fa4tune.problem import AttentionProblem
from fa4tune.record import Trial

TEXTS = [
    f"b{32768 // s}_hq{2048 // d}_hk{2048 // d}_sq{s}_sk{s}_d{d}_dv{d}_bf16_{mask}_fwd"
    for s, d, mask in ((1024, 64, "full"), (4096, 64, "full"), (4096, 128, "causal"), (8192, 128, "full"))
]


def made_up(gpu_changes: dict[str, float], noise: float, each: int) -> list[Sample]:
    """Measurements by the model itself under other constants, with noise."""
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
            measured = predict(plan, truth).microseconds * (1 + rng.gauss(0, noise))
            found.append(Sample(problem, config, plan, measured))
            count += 1
    return found


def test_fit_recovers_constants_that_made_the_data() -> None:
    truth = {"contention": 0.4, "arithmetic_latency_clk": 30.0}
    chosen = [c for c in CONSTANTS if c.name in truth]
    result = fit(made_up(truth, 0.01, 30), load_gpu("h200"), constants=chosen, folds=2)
    assert result.before.mape > 0.05
    assert result.held_out.mape < 0.015
    for name, value in truth.items():
        assert result.constants[name] == pytest.approx(value, rel=0.15)


def test_overlay_is_a_hardware_file_with_sources(tmp_path: Path) -> None:
    chosen = [c for c in CONSTANTS if c.name == "contention"]
    result = fit(made_up({"contention": 0.5}, 0.0, 4), load_gpu("h200"), constants=chosen, folds=2)
    path = tmp_path / "fitted.toml"
    path.write_text(overlay(result, "h200", "made up"))
    gpu = load_gpu(str(path))
    assert gpu.contention == pytest.approx(result.constants["contention"], rel=1e-3)
    assert "made up" in gpu.sources["contention"]
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
        fit(found, load_gpu("h200"))


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
