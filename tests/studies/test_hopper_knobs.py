"""The knob study: which configs it takes for a pair, and which way its ratios go."""

from types import ModuleType

import pytest

from fa4tune.kernels.config import SM90ForwardConfig
from fa4tune.outcome import Outcome
from fa4tune.record import Trial, read_trials
from tests.study import load_study

PROBLEM = "b4_hq16_hk16_sq4096_sk4096_d128_dv128_bf16_full_fwd"


@pytest.fixture(scope="module")
def study() -> ModuleType:
    return load_study("hopper_knobs")


def trial(time: float, study: str = "a", phase: str = "campaign", **knobs: object) -> Trial:
    config = SM90ForwardConfig().replace(**knobs).as_dict()
    return Trial(
        problem=PROBLEM, kernel_class="", config=config, hardware_key="", outcome=Outcome.MEASURED,
        median_us=time, phase=phase, study=study,
    )  # fmt: skip


def test_a_pair_differs_in_one_knob_and_shares_a_study(study: ModuleType) -> None:
    trials = [
        trial(100.0),
        trial(80.0, rescale_threshold=8.0),
        trial(90.0, rescale_threshold=8.0, tile_n=96),  # one knob from the second, two from the first
        trial(50.0, study="b", ping_pong=True),  # another turn
        trial(40.0, phase="duel", ping_pong=True),  # the finalists' own turns
    ]
    found = study.pairs(reversed(trials))
    assert {(p.knob, p.before, p.value): p.speed for p in found} == {
        ("rescale_threshold", 0.0, 8.0): pytest.approx(100 / 80),
        ("tile_n", 96, 128): pytest.approx(90 / 80),
    }


def test_registers_that_follow_the_tile_do_not_part_a_pair(study: ModuleType) -> None:
    first, second = trial(100.0, tile_m=192, tile_n=64), trial(70.0, tile_m=128, tile_n=64)
    assert first.config["registers"] != second.config["registers"]
    (found,) = study.pairs([first, second])
    assert (found.knob, found.before, found.value) == ("tile_m", 128, 192)
    assert found.speed == pytest.approx(70 / 100)


def test_the_record_holds_pairs_of_head_dim_128(study: ModuleType) -> None:
    found = [p for name in study.CAMPAIGNS for p in study.pairs(read_trials(study.DATA.parent / name))]
    knobs = {(p.problem.mask, p.knob) for p in found if p.problem.head_dim == 128}
    assert {("full", "rescale_threshold"), ("full", "exp2_share"), ("causal", "scheduler")} <= knobs
    assert all(0.5 < p.speed < 2 for p in found)
