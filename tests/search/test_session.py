"""Whole searches: replayed from records, and measured by real workers on a machine without a GPU."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from fa4tune.errors import SearchError
from fa4tune.hardware.gpu import load_gpu
from fa4tune.kernels.config import SM90ForwardConfig, default_config
from fa4tune.outcome import Outcome
from fa4tune.problem import AttentionProblem
from fa4tune.record import Trial
from fa4tune.search.candidates import choose
from fa4tune.search.evaluators import ReplayEvaluator
from fa4tune.search.ranking import rank_space
from fa4tune.search.session import Request, search_measured, search_predicted
from fa4tune.search.space import Ranked, diverse
from fa4tune.search.study import Study
from fa4tune.table.store import Table

PROBLEM = AttentionProblem.parse("b4_hq16_hk16_sq4096_sk4096_d128_dv128_bf16_causal_fwd")
GPU = load_gpu("h200")

pytestmark = pytest.mark.usefixtures("small_space")


def request_in(directory: Path, trials: int) -> Request:
    table = Table(directory / "table", fallback=())
    return Request(gpu=GPU, trials=trials, table=table, studies=directory / "studies")


def recorded(ranked: Sequence[Ranked], noise: float = 0.1) -> list[Trial]:
    """Records of a GPU that agrees with the model up to ``noise``, and on which some configs fail."""
    rng = random.Random(11)
    trials = []
    base = default_config(PROBLEM, GPU.arch)
    times = {r.config: r.predicted_us for r in ranked} | {base: ranked[len(ranked) // 2].predicted_us}
    for i, (config, predicted) in enumerate(times.items()):
        fails = i % 7 == 3 and config != base
        us = predicted * 1.1 * (1 + rng.uniform(-noise, noise))
        trials.append(
            Trial(
                problem=str(PROBLEM),
                kernel_class="sm90_fwd",
                config=config.as_dict(),
                hardware_key=GPU.key,
                outcome=Outcome.INCORRECT if fails else Outcome.MEASURED,
                reason="relative error" if fails else "",
                samples_us=[] if fails else [us + 0.01 * j for j in range(15)],
                median_us=None if fails else us + 0.07,
                spread_us=None if fails else 0.07,
                predicted_us=predicted,
            )
        )
    return trials


def test_predicted_search_writes_the_exhaustive_minimum_beside_the_default(tmp_path: Path) -> None:
    ranked = rank_space(PROBLEM, GPU)
    found = search_predicted(PROBLEM, request_in(tmp_path, 4))
    assert found.entry is not None
    assert found.entry.median_us == ranked[0].predicted_us
    assert (found.entry.source, found.entry.kernel) == ("predicted", "absent")
    assert found.entry.trials == len(ranked)
    assert found.entry.default_us is not None
    assert found.entry.ratio == pytest.approx(found.entry.default_us / found.entry.median_us, abs=1e-4)
    assert found.entry.ratio >= 1


def test_replayed_search_comes_close_to_the_best_recorded_in_a_fraction_of_the_trials(tmp_path: Path) -> None:
    ranked = rank_space(PROBLEM, GPU)
    evaluator = ReplayEvaluator(PROBLEM, GPU, recorded(ranked))
    times = [t.median_us for t in evaluator.recorded.values() if t.median_us is not None]
    trials = 24
    assert trials < len(times) / 4
    found = search_measured(PROBLEM, request_in(tmp_path, trials), evaluator, allowed=evaluator.recorded)
    assert found.entry is not None
    assert found.entry.source == "measured"
    assert found.entry.median_us <= 1.05 * min(times)
    assert found.entry.default_us == evaluator.recorded[default_config(PROBLEM, GPU.arch)].median_us
    study = Study(PROBLEM, GPU, directory=tmp_path / "studies")
    assert len(study.tried()) == trials
    assert study.trials()[0].phase == "default"
    phases = {t.phase for t in study.trials()}
    assert {"default", "model", "sampler", "duel"} <= phases


def test_same_command_again_measures_nothing_new_and_a_larger_one_goes_on(tmp_path: Path) -> None:
    ranked = rank_space(PROBLEM, GPU)
    evaluator = ReplayEvaluator(PROBLEM, GPU, recorded(ranked))
    search_measured(PROBLEM, request_in(tmp_path, 8), evaluator, allowed=evaluator.recorded)
    study = Study(PROBLEM, GPU, directory=tmp_path / "studies")
    first = study.tried()
    search_measured(PROBLEM, request_in(tmp_path, 8), evaluator, allowed=evaluator.recorded)
    assert study.tried() == first
    search_measured(PROBLEM, request_in(tmp_path, 14), evaluator, allowed=evaluator.recorded)
    assert len(study.tried()) == 14
    assert study.tried().items() >= first.items()


def test_default_is_the_floor_where_everything_else_fails(tmp_path: Path) -> None:
    ranked = rank_space(PROBLEM, GPU)
    base = default_config(PROBLEM, GPU.arch)
    trials = [t if SM90ForwardConfig.from_dict(t.config) == base else _failed(t) for t in recorded(ranked)]
    evaluator = ReplayEvaluator(PROBLEM, GPU, trials)
    found = search_measured(PROBLEM, request_in(tmp_path, 10), evaluator, allowed=evaluator.recorded)
    assert found.entry is not None
    assert found.entry.kernel_config() == base
    assert found.entry.ratio == 1.0
    assert found.outcomes["crashed"] == 9


def _failed(trial: Trial) -> Trial:
    return Trial(
        problem=trial.problem,
        kernel_class=trial.kernel_class,
        config=trial.config,
        hardware_key=trial.hardware_key,
        outcome=Outcome.CRASHED,
        reason="killed by signal 11",
    )


def test_nothing_that_passes_is_an_error_with_the_reasons(tmp_path: Path) -> None:
    ranked = rank_space(PROBLEM, GPU)
    evaluator = ReplayEvaluator(PROBLEM, GPU, recorded(ranked))
    evaluator.recorded = {c: _failed(t) for c, t in evaluator.recorded.items()}
    with pytest.raises(SearchError, match=r"no config of .* passed; crashed: killed by signal 11"):
        search_measured(PROBLEM, request_in(tmp_path, 3), evaluator, allowed=evaluator.recorded)
    with pytest.raises(SearchError, match=r"no trial of .* with a time was recorded"):
        ReplayEvaluator(PROBLEM, GPU, evaluator.recorded.values())


@pytest.mark.parametrize("sampler", ["tpe", "gp"])
def test_choices_start_with_the_default_and_are_new_feasible_and_of_the_asked_number(sampler: str) -> None:
    ranked = rank_space(PROBLEM, GPU)
    base = default_config(PROBLEM, GPU.arch)
    tried = {r.config: r.predicted_us for r in ranked[:10] if r.config != base}
    asked = base.replace(tile_n=64)
    chosen = choose(PROBLEM, GPU, ranked, tried, 6, asked=[(asked, "asked")], sampler=sampler)
    configs = [c.config for c in chosen]
    assert configs[0] == base
    assert chosen[0].phase == "default"
    assert len(set(configs)) == len(configs) == 7  # the asked one on top
    assert asked in configs
    assert not set(configs[1:]) & set(tried)
    assert {"model", "sampler"} <= {c.phase for c in chosen}
    again = choose(PROBLEM, GPU, ranked, tried, 6, asked=[(asked, "asked")], sampler=sampler)
    assert again == chosen  # the same seed gives the same choice


def test_unknown_sampler_is_one_clear_sentence() -> None:
    with pytest.raises(SearchError, match="sampler 'cmaes' is not known; use one of tpe, gp"):
        choose(PROBLEM, GPU, [], {}, 1, sampler="cmaes")


def test_default_is_timed_again_in_later_rounds_without_taking_a_slot() -> None:
    ranked = rank_space(PROBLEM, GPU)
    base = default_config(PROBLEM, GPU.arch)
    chosen = choose(PROBLEM, GPU, ranked, {base: 900.0}, 4)
    assert chosen[0].config == base
    assert len(chosen) == 5


SEARCH = """
import os, sys
from pathlib import Path
import pytest
from tests.search.conftest import SMALL
from fa4tune.kernels.config import KernelConfig
KernelConfig.choices = classmethod(lambda cls, name: SMALL[cls].get(name, (cls.knobs()[name].default,)))
os.sched_getaffinity = lambda pid: {0}
from tests.search.fake_build import fake_build
import fa4tune.search.evaluators as evaluators
evaluators.build = fake_build
from fa4tune.hardware.gpu import load_gpu
from fa4tune.problem import AttentionProblem
from fa4tune.search.bundle import Settings
from fa4tune.search.session import Request, search_measured
from fa4tune.table.store import Table

directory = Path(sys.argv[1])
gpu = load_gpu("h200")
problem = AttentionProblem.parse("b1_hq2_hk2_sq64_sk64_d64_dv64_bf16_full_fwd")
request = Request(gpu=gpu, trials=8, table=Table(directory / "table", fallback=()), studies=directory / "s")
evaluator = evaluators.MeasuredEvaluator(
    gpu, directory / "s", settings=Settings(rounds=6, duel_rounds=10, check_seconds=8.0),
    backend="tests.search.fake_backend:FakeBackend",
)
found = search_measured(problem, request, evaluator, report=lambda *a: print(*a, flush=True))
print("found", found.entry.median_us, found.entry.default_us, found.outcomes)
"""


def _search(directory: Path, cache: Path) -> subprocess.Popen[str]:
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        [sys.executable, "-c", SEARCH, str(directory)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "FA4TUNE_CACHE": str(cache)},
    )


def test_killed_search_goes_on_with_the_same_command_and_loses_no_finished_trial(
    tmp_path: Path, small_cache: Path
) -> None:
    process = _search(tmp_path, small_cache)
    assert process.stdout is not None
    checked = 0
    for line in process.stdout:
        checked += line.startswith("measuring") and "#" in line and ": ok" in line
        if checked >= 4:
            break
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    time.sleep(0.2)
    (results,) = (tmp_path / "s").glob("*.work/results/results.jsonl")
    before = results.read_text()
    assert before.count('"kind": "check"') >= 4
    process = _search(tmp_path, small_cache)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    problem = AttentionProblem.parse("b1_hq2_hk2_sq64_sk64_d64_dv64_bf16_full_fwd")
    study = Study(problem, GPU, directory=tmp_path / "s")
    assert len(study.tried()) == 8
    found = output.strip().splitlines()[-1].split()
    assert found[0] == "found"
    measured = [t for t in study.tried().values() if t is not None]
    assert float(found[1]) == pytest.approx(min(measured), rel=0.05)
    assert not list((tmp_path / "s").glob("*.work"))
    # checks of the first run were not repeated: each config of the first batch has one record
    phases = [t for t in study.trials() if t.phase in ("default", "model", "sampler")]
    assert len({str(sorted(t.config.items())) for t in phases}) == 8


def test_diverse_of_nothing_is_nothing() -> None:
    assert diverse([], 3) == []
