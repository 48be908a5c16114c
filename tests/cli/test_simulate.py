"""``fa4tune simulate`` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fa4tune.cli import main

PROBLEM = "b4_hq16_hk16_sq4096_sk4096_d128_dv128_bf16_full_fwd"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["fa4tune", "simulate", *arguments])
    with pytest.raises(SystemExit) as done:
        main.main()
    assert done.value.code in (0, None)


def test_json_holds_period_and_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace, plot = tmp_path / "out.json", tmp_path / "out.png"
    run(monkeypatch, PROBLEM, "--gpu", "h200", "--trace", str(trace), "--plot", str(plot), "--json")
    answer = json.loads(capsys.readouterr().out)
    assert answer["period"] == pytest.approx(answer["predicted_period"], rel=0.01)
    assert answer["files"] == [str(trace), str(plot)]
    assert json.loads(trace.read_text())["otherData"]["problem"] == PROBLEM
    assert plot.stat().st_size > 10_000


def test_text_names_the_critical_cycle(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, PROBLEM, "--arch", "sm_100a", "--trips", "8", "--tiles", "2")
    out = capsys.readouterr().out
    assert "critical cycle: " in out
    assert "steady state" in out


@pytest.mark.parametrize(
    ("option", "name", "words"),
    [
        ("--plot", "out.txt", "end it in .png, .svg, .pdf"),
        ("--plot", "absent/out.png", "does not exist"),
        ("--trace", "absent/out.json", "does not exist"),
    ],
)
def test_a_file_that_cannot_be_written_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    option: str,
    name: str,
    words: str,
) -> None:
    monkeypatch.setattr("sys.argv", ["fa4tune", "simulate", PROBLEM, option, str(tmp_path / name)])
    with pytest.raises(SystemExit) as done:
        main.main()
    assert done.value.code == 2
    assert words in capsys.readouterr().err
