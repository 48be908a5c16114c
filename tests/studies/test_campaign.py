"""The campaign's sets of shapes: apart from each other, and what their files hold."""

from types import ModuleType

import pytest

from fa4tune.record import read_trials
from tests.study import load_study


@pytest.fixture(scope="module")
def study() -> ModuleType:
    return load_study("campaign")


def problems(study: ModuleType, which: str) -> set[str]:
    return {str(p) for kind in study.classes() for p in study.shapes(*kind, which)}


def test_no_shape_is_in_two_sets_and_none_draws_by_the_word_of_another(study: ModuleType) -> None:
    names = list(study.SETS)
    for i, which in enumerate(names):
        for other in names[:i]:
            assert not problems(study, which) & problems(study, other)
    assert len({chosen.seed for chosen in study.SETS.values()}) == len(names)


def test_files_hold_the_shapes_of_their_set(study: ModuleType) -> None:
    for which in study.SETS:
        assert {trial.problem for trial in read_trials(study.data_of(which))} == problems(study, which)


def test_half_of_the_shapes_of_each_class_are_held_out(study: ModuleType) -> None:
    for kind in study.classes():
        held = [study.held_out(problem) for problem in study.shapes(*kind)]
        assert abs(2 * sum(held) - len(held)) <= 2
