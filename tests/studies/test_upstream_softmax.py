"""The study of upstream's softmax, arranged as that kernel's machine code."""

from statistics import fmean
from types import ModuleType

import pytest

from tests.study import load_study


@pytest.fixture(scope="module")
def study() -> ModuleType:
    return load_study("upstream_softmax")


def test_signs_are_right_where_an_effect_exceeds_three_percent(study: ModuleType) -> None:
    compared = 0
    for effect in study.effects(study.machine_code):
        for half in study.HALVES:
            said, took = fmean(effect.said[half]), fmean(effect.took[half])
            if abs(took) > 0.03:
                assert said * took > 0, effect.row
                compared += 1
    assert compared >= 12


def test_sizes_are_within_three_points_where_polynomials_are(study: ModuleType) -> None:
    effects = study.effects(study.machine_code)
    assert all(effect.near(effect.took) == 2 for effect in effects if effect.row[0])
    # taken to stand between exponentials, as they do not, they cost too little
    apart = study.effects(lambda share, threshold: study.Arrangement())
    assert sum(effect.near(effect.took) for effect in apart) < sum(e.near(e.took) for e in effects)


def test_an_effect_is_near_within_three_points_of_its_mean(study: ModuleType) -> None:
    effect = study.Effect((0.25, 8.0, 3), [-0.05] * 8, [], [])
    assert effect.near([-0.079] * 4 + [-0.081] * 4) == 1
    assert effect.near([-0.02, -0.08, -0.05, -0.05] * 2) == 2
