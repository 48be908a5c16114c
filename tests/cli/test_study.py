"""``fa4tune study``: the list, a run, and names that do not exist."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fa4tune.cli import main, study
from fa4tune.errors import Fa4tuneError


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    monkeypatch.setattr("sys.argv", ["fa4tune", "study", *arguments])
    with pytest.raises(SystemExit) as done:
        main.main()
    return done.value.code


def test_list_says_what_each_is_about(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--list", "--json") in (0, None)
    known = json.loads(capsys.readouterr().out)["studies"]
    assert "asymmetric-scaling" in known
    assert all(text.endswith(".") for text in known.values())


def test_arguments_after_the_name_are_the_studys(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "echo.py").write_text('"""Says back."""\nimport sys\nprint(sys.argv[1:])\n')
    monkeypatch.setattr(study, "FOLDER", tmp_path)
    assert run(monkeypatch, "echo", "--scale", "exp=2") in (0, None)
    assert "['--scale', 'exp=2']" in capsys.readouterr().out


@pytest.mark.parametrize("word", ["--help", "-h"])
def test_help_is_the_verbs_or_the_studys(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], word: str
) -> None:
    assert run(monkeypatch, word) in (0, None)
    assert "Run a study with the arguments" in capsys.readouterr().out
    assert run(monkeypatch, "asymmetric-scaling", word) in (0, None)
    shown = capsys.readouterr().out
    assert "--scale" in shown
    assert "Run a study with the arguments" not in shown


def test_unknown_study_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "no-such") not in (0, None)
    assert "does not exist; use one of" in capsys.readouterr().err


def test_without_source_tree_studies_are_those_of_the_working_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(study, "FOLDER", tmp_path / "none")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Fa4tuneError, match="come with the source tree"):
        study.studies_folder()
    (tmp_path / "studies").mkdir()
    assert study.studies_folder() == tmp_path / "studies"
