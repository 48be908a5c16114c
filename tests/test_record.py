from __future__ import annotations

from pathlib import Path

import pytest

from fa4tune.errors import SearchError
from fa4tune.outcome import Outcome
from fa4tune.record import SCHEMA, Trial, append_trials, decode_trial, encode_trial, read_trials


def _trial(outcome: Outcome = Outcome.MEASURED, **values: object) -> Trial:
    fields = {
        "problem": "b1_hq1_hk1_sq64_sk64_d64_dv64_bf16_full_fwd",
        "kernel_class": "sm90_fwd",
        "config": {"tile_m": 128, "registers": [240, 24]},
        "hardware_key": "sm_90a-132sm-hbm3e-141",
        **values,
    }
    return Trial(outcome=outcome, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("outcome", list(Outcome))
def test_record_survives_a_round_trip(outcome: Outcome) -> None:
    trial = _trial(outcome, samples_us=[1.5, 2.5], median_us=2.0, reason="why")
    assert decode_trial(encode_trial(trial)) == trial


def test_appending_keeps_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "trials.jsonl"
    append_trials(path, [_trial(median_us=1.0)])
    append_trials(path, [_trial(median_us=2.0)])
    assert [trial.median_us for trial in read_trials(path)] == [1.0, 2.0]


def test_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    append_trials(path, [_trial(), _trial()])
    path.write_bytes(path.read_bytes()[:-20])
    assert len(list(read_trials(path))) == 1


def test_newer_schema_is_refused_with_both_numbers() -> None:
    line = encode_trial(_trial()).replace(b'"schema":1', b'"schema":99')
    with pytest.raises(SearchError, match=f"schema 99, this fa4tune reads up to {SCHEMA}"):
        decode_trial(line)


def test_refused_record_names_its_line_and_file(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    append_trials(path, [_trial()])
    with path.open("ab") as file:
        file.write(encode_trial(_trial()).replace(b'"schema":1', b'"schema":99'))
    with pytest.raises(SearchError, match=rf"^line 2 of {path}: .*schema 99"):
        list(read_trials(path))


def test_unknown_outcome_is_refused() -> None:
    with pytest.raises(SearchError, match="not a trial record"):
        decode_trial(encode_trial(_trial()).replace(b"measured", b"guessed"))
