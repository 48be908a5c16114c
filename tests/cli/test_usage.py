"""Mistakes at the command line, of every verb: one sentence that names the value, and status 2."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import pytest

from fa4tune.cli import main
from fa4tune.table.store import Table

PROBLEM = "b4_hq16_hk16_sq4096_sk4096_d128_dv128_bf16_causal_fwd"
SHAPE = ("--heads", "2", "--seqlen-q", "256", "--head-dim", "64")
TOO_LARGE = ("--gpu", "h200", "--config", "tile_n=256,kv_stages=8")


def refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 2
) -> str:
    """The sentence on stderr of a command that is refused; notes may stand before it."""
    monkeypatch.setattr("sys.argv", ["fa4tune", *arguments])
    with pytest.raises(SystemExit) as done:
        main.main()
    assert done.value.code == status
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("error: ") == 1
    sentence = shown.err[shown.err.index("error: ") :].strip()
    assert len(sentence.splitlines()) == 1
    return sentence


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("explian", PROBLEM), "'explian'"),
        (("explain", PROBLEM, "--tabel", "x"), "No such option: --tabel"),
        (("explain", "--batch", "x", *SHAPE), "'--batch': Input should be a valid integer"),
        (("explain", "--batch", "x", *SHAPE), "got 'x'; see `fa4tune explain --help`"),
        (("emulate", "--seed=z", PROBLEM), "got 'z'"),
        (("explain", "--batch", "0", *SHAPE), "batch must be a positive integer, got 0"),
        (("simulate", PROBLEM, "--trips", "0"), "got '0'"),
        (("simulate", PROBLEM, "--masked", "9", "--trips", "8"), "9 masked iterations exceed a tile's 8"),
        (("explain", PROBLEM, "--gpu"), "'--gpu' requires an argument"),
        (("explain", PROBLEM, "--gpu", "rtx9090"), "GPU 'rtx9090' is not known"),
        (("explain", PROBLEM, "--table", "absent"), "table 'absent' is not a directory"),
        (("explain", PROBLEM, "--config", ""), "names no knob"),
        (("explain", PROBLEM, "--config", "tile_n=96,tile_n=128"), "tile_n is given twice"),
        (("explain", PROBLEM, "--config", "tile_n=wide"), "tile_n='wide' cannot be read; tile_n is: keys of"),
        (("simulate", PROBLEM, "--gpu", "b300", "--config", "tuned"), "no table has an entry"),
        (("measure",), "Missing argument 'DIR'"),
        (("measure", "absent"), "absent holds no manifest.json"),
        (("search", "--import", "absent"), "absent holds no manifest.json"),
        (("calibrate", "--import", "absent"), "absent holds no calibration.json"),
        (("calibrate", "--out", "mine.json"), "'mine.json' must end in .toml"),
        (("table", "list", "--table", "absent"), "table 'absent' is not a directory"),
        (("table", "merge", "absent"), "table 'absent' is not a directory"),
        (("table", "foo"), "'foo'"),
        (("study", "absent"), "study 'absent' does not exist"),
    ],
)
def test_a_mistake_is_one_sentence_and_status_2(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: tuple[str, ...],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert words in refused(monkeypatch, capsys, *arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ("explain", PROBLEM, *TOO_LARGE),
        ("simulate", PROBLEM, *TOO_LARGE),
        ("emulate", PROBLEM, *TOO_LARGE),
        ("search", PROBLEM, "--gpu", "h200", "--predict", "--try", "tile_n=256,kv_stages=8"),
    ],
)
def test_a_config_that_cannot_run_is_bad_usage_of_every_verb(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    sentence = refused(monkeypatch, capsys, *arguments)
    assert sentence.startswith("error: 1115136 bytes of SMEM")  # what is wrong comes before the long config
    assert "this cannot run: sm90_fwd" in sentence


@pytest.mark.parametrize("verb", ["explain", "simulate", "emulate", "search"])
def test_a_problem_without_a_kernel_is_bad_usage_of_every_verb(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    odd = PROBLEM.replace("d128_dv128", "d63_dv63")
    sentence = refused(monkeypatch, capsys, verb, odd, "--gpu", "b200")
    assert sentence.startswith("error: head_dim=63")


def test_what_came_out_badly_is_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sentence = refused(monkeypatch, capsys, "table", "show", PROBLEM, "--gpu", "b300", status=1)
    assert "--gpu b300" in sentence


@pytest.mark.parametrize(
    ("verb", "option", "name"),
    [("explain", "--plot", "out.png"), ("simulate", "--plot", "out.png"), ("simulate", "--trace", "o.json")],
)
def test_an_output_that_cannot_be_written_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    verb: str,
    option: str,
    name: str,
) -> None:
    (tmp_path / name).mkdir()
    assert "is a directory" in refused(monkeypatch, capsys, verb, PROBLEM, option, str(tmp_path / name))
    # whoever may write anywhere still cannot make files there
    assert "cannot be written" in refused(monkeypatch, capsys, verb, PROBLEM, option, f"/proc/{name}")


def test_no_arguments_show_the_help_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["fa4tune"])
    with pytest.raises(SystemExit) as done:
        main.main()
    assert done.value.code == 2
    shown = capsys.readouterr()
    assert "explain" in shown.out
    assert "error" not in shown.err


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads=0"),
        ({"num_attention_heads": 8}, "no hidden_size"),
        ({"num_attention_heads": 8, "qk_rope_head_dim": 64}, "no qk_nope_head_dim"),
        ({"text_config": 3}, "no JSON object"),
    ],
)
def test_a_model_config_without_what_is_needed_says_what(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    values: dict[str, int],
    words: str,
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    told = refused(
        monkeypatch, capsys, "explain", "--model-config", str(path), "--batch", "1", "--seqlen-q", "64"
    )
    assert words in told


def test_tuned_is_a_config_of_simulate_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shipped = Table(tmp_path, fallback=[resources.files("fa4tune.table") / "data"])  # type: ignore[list-item]
    entry = next(e for _, e in shipped.entries() if e.hardware_key.startswith("sm_90a"))
    Table().put(entry)
    monkeypatch.setattr(
        "sys.argv", ["fa4tune", "simulate", entry.problem, "--gpu", "h200", "--config", "tuned", "--json"]
    )
    with pytest.raises(SystemExit) as done:
        main.main()
    assert not done.value.code
    assert json.loads(capsys.readouterr().out)["config"] == str(entry.kernel_config())
