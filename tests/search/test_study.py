"""Studies on real journal and SQLite files: nothing finished is lost, whatever kills the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from fa4tune.errors import SearchError
from fa4tune.hardware.gpu import load_gpu
from fa4tune.kernels.config import CONFIGS, KernelConfig, SM90ForwardConfig, SM100ForwardConfig
from fa4tune.outcome import Outcome
from fa4tune.problem import AttentionProblem
from fa4tune.record import Trial, read_trials
from fa4tune.search.space import random_feasible
from fa4tune.search.study import OWNER, Study, config_of, distributions_of, parameters_of

PROBLEM = AttentionProblem.parse("b4_hq16_hk16_sq4096_sk4096_d128_dv128_bf16_causal_fwd")
GPU = load_gpu("h200")


def record(
    config: KernelConfig, us: float | None, outcome: Outcome = Outcome.MEASURED, phase: str = "model"
) -> Trial:
    return Trial(
        problem=str(PROBLEM),
        kernel_class="sm90_fwd",
        config=config.as_dict(),
        hardware_key=GPU.key,
        outcome=outcome,
        reason="" if us else "for a reason",
        samples_us=[us] * 5 if us else [],
        median_us=us,
        phase=phase,
    )


@pytest.fixture(params=["journal", "sqlite"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    return None if request.param == "journal" else f"sqlite:///{tmp_path / 'study.db'}"


def test_trials_survive_and_are_the_same_in_file_and_storage(tmp_path: Path, storage: str | None) -> None:
    study = Study(PROBLEM, GPU, directory=tmp_path, storage=storage)
    good, bad = SM90ForwardConfig(tile_n=96), SM90ForwardConfig(tile_n=112)
    number = study.begin(good, "model")
    study.finish(number, record(good, 900.0))
    study.add([record(bad, None, Outcome.INCORRECT)])
    again = Study(PROBLEM, GPU, directory=tmp_path, storage=storage)
    assert again.tried() == {good: 900.0, bad: None}
    assert [t.outcome for t in again.trials()] == [Outcome.MEASURED, Outcome.INCORRECT]
    finished = again.optuna_study.get_trials(states=(TrialState.COMPLETE,))
    assert [t.value for t in finished] == [900.0]
    assert finished[0].params["tile_n"] == 96
    failed = again.optuna_study.get_trials(states=(TrialState.FAIL,))
    assert failed[0].user_attrs["outcome"] == "incorrect"


def test_trial_that_reached_only_one_of_the_two_places_is_made_good(
    tmp_path: Path, storage: str | None
) -> None:
    config = SM90ForwardConfig(tile_n=96)
    study = Study(PROBLEM, GPU, directory=tmp_path, storage=storage)
    study.add([record(config, 900.0)])
    study.record_path.unlink()  # only in the storage
    assert Study(PROBLEM, GPU, directory=tmp_path, storage=storage).tried() == {config: 900.0}
    for path in (tmp_path / f"{study.name}.journal", tmp_path / "study.db"):
        path.unlink(missing_ok=True)  # only in the record file
    healed = Study(PROBLEM, GPU, directory=tmp_path, storage=storage)
    assert [t.value for t in healed.optuna_study.get_trials()] == [900.0]
    assert len(healed.trials()) == 1


def test_running_trials_of_dead_processes_are_failed_and_of_live_ones_kept(
    tmp_path: Path, storage: str | None
) -> None:
    study = Study(PROBLEM, GPU, directory=tmp_path, storage=storage)
    mine = study.begin(SM90ForwardConfig(tile_n=96), "model")
    stale = study.begin(SM90ForwardConfig(tile_n=112), "model")
    host, _, _ = study.optuna_study.trials[stale].user_attrs[OWNER].rpartition(":")
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    inner = study.optuna_study
    inner._storage.set_trial_user_attr(inner.trials[stale]._trial_id, OWNER, f"{host}:{dead.pid}")
    states = [t.state for t in Study(PROBLEM, GPU, directory=tmp_path, storage=storage).optuna_study.trials]
    assert states[mine] is TrialState.RUNNING
    assert states[stale] is TrialState.FAIL


KILLED = """
import sys
from pathlib import Path
from tests.search.test_study import GPU, PROBLEM, record
from fa4tune.kernels.config import SM90ForwardConfig
from fa4tune.search.study import Study

study = Study(PROBLEM, GPU, directory=Path(sys.argv[1]))
for i in range(10**6):
    config = SM90ForwardConfig(tile_n=48 + 16 * (i % 14), kv_stages=1 + i // 14 % 4)
    number = study.begin(config, "model")
    study.finish(number, record(config, 900.0 + i))
    print(i, flush=True)
"""


def test_kill_9_loses_no_finished_trial_and_the_study_goes_on(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    said = []
    for _ in range(2):  # killed twice, at whatever point it is then
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root)},
        )
        assert process.stdout is not None
        for line in process.stdout:
            said.append(int(line))
            if int(line) >= 6:
                break
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    began = time.monotonic()
    study = Study(PROBLEM, GPU, directory=tmp_path)
    finished = study.trials()
    assert len(finished) >= len(said)
    assert not study.optuna_study.get_trials(states=(TrialState.RUNNING,))
    in_study = [t for t in study.optuna_study.get_trials() if t.state is TrialState.COMPLETE]
    assert len(in_study) == len(finished)
    study.add([record(SM90ForwardConfig(tile_n=256), 1.0)])
    assert len(list(read_trials(study.record_path))) == len(finished) + 1
    assert time.monotonic() - began < 60  # no lock of a dead process is waited for


def test_torn_lines_of_a_killed_writer_are_cut_off(tmp_path: Path) -> None:
    study = Study(PROBLEM, GPU, directory=tmp_path)
    study.add([record(SM90ForwardConfig(tile_n=96), 900.0)])
    for path in (study.record_path, tmp_path / f"{study.name}.journal"):
        with path.open("ab") as file:
            file.write(b'{"torn": 1, "prob')
    again = Study(PROBLEM, GPU, directory=tmp_path)
    again.add([record(SM90ForwardConfig(tile_n=112), 901.0)])
    assert sorted(t for t in Study(PROBLEM, GPU, directory=tmp_path).tried().values() if t) == [900.0, 901.0]


def test_two_open_studies_see_each_other_s_trials(tmp_path: Path) -> None:
    one, two = Study(PROBLEM, GPU, directory=tmp_path), Study(PROBLEM, GPU, directory=tmp_path)
    one.add([record(SM90ForwardConfig(tile_n=96), 900.0)])
    two.add([record(SM90ForwardConfig(tile_n=112), 901.0)])
    assert len(one.tried()) == len(two.tried()) == 2


def test_studies_of_other_problems_and_gpus_do_not_mix(tmp_path: Path) -> None:
    Study(PROBLEM, GPU, directory=tmp_path).add([record(SM90ForwardConfig(), 900.0)])
    full = AttentionProblem.parse(str(PROBLEM).replace("causal", "full"))
    assert Study(full, GPU, directory=tmp_path).tried() == {}
    assert Study(PROBLEM, load_gpu("h100"), directory=tmp_path).tried() == {}


def test_unusable_places_are_clear_sentences(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SearchError, match=r"cannot be kept in .* give a writable directory"):
        Study(PROBLEM, GPU, directory=tmp_path / "file" / "studies")
    with pytest.raises(SearchError, match="storage 'nonsense://x' cannot be used"):
        Study(PROBLEM, GPU, directory=tmp_path, storage="nonsense://x")


@pytest.mark.parametrize("config", [SM90ForwardConfig(), SM100ForwardConfig(), SM90ForwardConfig(tile_m=256)])
def test_config_survives_the_way_through_optuna_parameters(config: KernelConfig) -> None:
    parameters, distributions = parameters_of(config)
    assert set(parameters) == set(type(config).knobs())
    study = optuna.create_study()
    study.enqueue_trial(parameters)
    trial = study.ask(fixed_distributions=distributions)
    assert config_of(type(config), trial.params) == config


@pytest.mark.parametrize("gpu", ["h200", "b200"])
def test_every_drawn_config_survives_too(gpu: str) -> None:
    import random

    hardware = load_gpu(gpu)
    full = AttentionProblem.parse(str(PROBLEM).replace("causal", "full"))
    for seed in range(20):
        config = random_feasible(full, hardware, random.Random(seed))
        assert config is not None
        parameters, own = parameters_of(config)
        assert set(own) == set(distributions_of(CONFIGS[hardware.arch]))
        assert config_of(CONFIGS[hardware.arch], parameters) == config


def test_value_outside_a_knob_s_choices_is_left_out_of_the_parameters() -> None:
    parameters, _ = parameters_of(SM90ForwardConfig(tile_n=16, registers=(168, 24)))
    assert "tile_n" not in parameters
    assert "registers" not in parameters
