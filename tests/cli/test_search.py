"""``fa4tune search``, ``measure``, ``table`` as commands: output, status, one sentence for bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fa4tune.cli import main as cli
from fa4tune.hardware.gpu import load_gpu
from fa4tune.kernels.config import SM90ForwardConfig, default_config
from fa4tune.problem import AttentionProblem
from fa4tune.search.bundle import Manifest
from fa4tune.table.store import Table
from tests.search.conftest import small_cache, small_space  # noqa: F401 - fixtures
from tests.search.fake_build import fake_build
from tests.table.test_store import PROBLEM as TABLE_PROBLEM
from tests.table.test_store import make_entry

PROBLEM = "b4_hq16_hk16_sq4096_sk4096_d128_dv128_bf16_causal_fwd"

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Run a command line in this process; gives status, stdout, stderr."""
    monkeypatch.setenv("FA4TUNE_TABLE", str(tmp_path / "own-table"))
    monkeypatch.setenv("FA4TUNE_STUDIES", str(tmp_path / "own-studies"))

    def command(*arguments: str) -> tuple[int, str, str]:
        import typer

        monkeypatch.setattr(sys, "argv", ["fa4tune", *arguments])
        monkeypatch.setattr(cli, "app", typer.Typer(name="fa4tune", pretty_exceptions_enable=False))
        cli.app.callback()(cli._root)
        status = 0
        try:
            cli.main()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(bool(end.code))
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return command


@pytest.mark.usefixtures("small_space")
def test_search_without_a_gpu_writes_a_prediction_and_says_so(run: Run, tmp_path: Path) -> None:
    status, out, err = run("search", PROBLEM, "--gpu", "b200", "--table", str(tmp_path / "t"), "--json")
    assert status == 0, err
    (result,) = json.loads(out)["results"]
    assert result["source"] == "predicted"
    assert result["kernel"] == "emulated"  # the winner ran there, and was right
    assert result["default_us"] >= result["median_us"]
    assert "model's prediction" in err
    hit = Table(tmp_path / "t", fallback=()).lookup(AttentionProblem.parse(PROBLEM), load_gpu("b200"))
    assert hit is not None
    assert hit.entry.config == result["config"]
    status, out, _ = run("search", PROBLEM, "--gpu", "b200", "--no-emulate", "--table", str(tmp_path / "t"))
    assert status == 0
    assert "default:" in out
    assert "TFLOP/s" in out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--sampler", "random"), "'random' is not known; use one of tpe, gp"),
        (("--try", "tile_n=3"), "tile_n=3 is out of range"),
    ],
)
def test_search_refuses_bad_options_before_it_ranks(
    run: Run, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], words: str
) -> None:
    monkeypatch.setattr("fa4tune.search.session.rank_space", lambda *_, **__: pytest.fail("ranked"))
    status, _, err = run("search", PROBLEM, "--arch", "sm_90a", *options)
    assert status == 2
    assert words in err


def test_table_check_refuses_a_directory_that_is_not_there(run: Run, tmp_path: Path) -> None:
    status, _, err = run("table", "check", "--table", str(tmp_path / "absent"))
    assert status == 2
    assert "is not a directory" in err


@pytest.mark.usefixtures("small_space")
def test_search_takes_shape_options(run: Run) -> None:
    shape = ("--batch", "4", "--seqlen-q", "4096", "--heads", "16", "--head-dim", "128", "--causal")
    status, out, err = run("search", *shape, "--arch", "sm_90a", "--no-emulate", "--json")
    assert status == 0, err
    assert json.loads(out)["results"][0]["problem"] == PROBLEM


def in_table(text: str) -> bool:
    """Whether the packaged table has another config than the default for a problem on an H200."""
    problem, gpu = AttentionProblem.parse(text), load_gpu("h200")
    hit = Table().lookup(problem, gpu)
    return hit is not None and hit.entry.kernel_config() != default_config(problem, gpu.arch)


@pytest.mark.usefixtures("small_space")
def test_export_writes_a_bundle_for_several_problems(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fa4tune.search.session.build", fake_build)
    monkeypatch.setattr("fa4tune.search.transfer.add_wheel", lambda *_: None)
    small = PROBLEM.replace("d128_dv128", "d64_dv64")
    arguments = ("--gpu", "h200", "--trials", "5", "--export", str(tmp_path / "out"), "--json")
    status, out, err = run("search", PROBLEM, small, *arguments, "--try", "tile_n=160")
    assert status == 0, err
    assert err.count("left out: ") == 1  # four warpgroups of head dim 64 have no registers for 160 keys
    # an asked config that can run comes on top of the trials, and so does what the table holds now
    expected = {PROBLEM: 6 + in_table(PROBLEM), small: 5 + in_table(small)}
    assert json.loads(out)["candidates"] == expected
    assert "measure.py" in err
    manifest = Manifest.read(tmp_path / "out")
    for problem in (PROBLEM, small):
        first = manifest.of(problem)[0]
        assert first.phase == "default"
        assert first.config == default_config(AttentionProblem.parse(problem), "sm_90a").as_dict()
        asked = [c for c in manifest.of(problem) if c.phase == "asked"]
        assert [c.config["tile_n"] for c in asked] == ([160] if problem == PROBLEM else [])
    help_text = subprocess.run(
        [sys.executable, str(tmp_path / "out" / "measure.py"), "--help"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "--budget-seconds" in help_text


BAD = {
    "no problem": (("search",), 2, "no problem was given"),
    "not a problem": (("search", "b4_what"), 2, "'b4_what' is not a problem"),
    "kv heads": (("search", PROBLEM.replace("hk16", "hk3")), 2, "kv_heads=3 does not divide heads=16"),
    "unknown name": (("search", PROBLEM, "--gpu", "h900"), 2, "GPU 'h900' is not known"),
    "gpu against arch": (("search", PROBLEM, "--gpu", "h200", "--arch", "sm_100a"), 2, "--arch says sm_100a"),
    "export and import": (("search", PROBLEM, "--export", "a", "--import", "b"), 2, "exclude each other"),
    "import and problem": (("search", PROBLEM, "--import", "b"), 2, "--import takes no problem"),
    "import of nothing": (("search", "--import", "/nonexistent"), 2, "holds no manifest.json"),
    "measure of nothing": (("measure", "/nonexistent"), 2, "holds no manifest.json"),
    "no trials": (("search", PROBLEM, "--trials", "0"), 2, "--trials"),
    "show without entry": (("table", "show", PROBLEM, "--gpu", "h100"), 1, "run `fa4tune search"),
    "merge of nothing": (("table", "merge", "/nonexistent"), 2, "is not a directory"),
}


@pytest.mark.parametrize("what", sorted(BAD))
def test_bad_usage_is_one_sentence_and_a_status(run: Run, what: str) -> None:
    arguments, expected, sentence = BAD[what]
    status, out, err = run(*arguments)
    assert status == expected, err
    assert sentence in err
    assert out == ""


@pytest.mark.usefixtures("small_space")
def test_unknown_knob_of_try_is_bad_usage(run: Run, tmp_path: Path) -> None:
    status, _, err = run("search", PROBLEM, "--gpu", "h200", "--export", str(tmp_path / "o"), "--try", "x=1")
    assert status == 2
    assert "knob 'x' does not exist" in err


@pytest.mark.usefixtures("small_space")
def test_unwritable_table_is_bad_usage(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    status, _, err = run("search", PROBLEM, "--gpu", "h200", "--table", str(tmp_path / "file" / "t"))
    assert status == 2
    assert "cannot be written" in err


def test_table_commands_list_show_check_and_merge(run: Run, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "a", tmp_path / "b"
    Table(ours, fallback=()).put(make_entry())
    Table(theirs, fallback=()).put(make_entry(median_us=800.0, tile_n=96))
    status, out, _ = run("table", "list", "--table", str(ours), "--json")
    (entry,) = json.loads(out)["entries"]
    assert (status, entry["median_us"]) == (0, 900.0)
    status, out, _ = run("table", "merge", str(theirs), "--table", str(ours), "--json")
    assert (status, json.loads(out)["changed"]) == (0, {str(theirs): 1})
    status, out, _ = run("table", "show", str(TABLE_PROBLEM), "--gpu", "h200", "--table", str(ours), "--json")
    shown = json.loads(out)
    assert (status, shown["exact"], shown["config"]["tile_n"]) == (0, True, 96)
    assert shown["provenance"]["gpu"] == "NVIDIA H200"
    status, out, _ = run("table", "list", "--table", str(ours))
    assert status == 0
    assert str(SM90ForwardConfig(tile_n=96)) in out
    status, out, _ = run("table", "check", "--table", str(ours), "--json")
    assert (status, json.loads(out)) == (0, {"usable": 1, "faults": []})
    (file,) = ours.rglob("*.json")
    file.write_text("{")
    status, out, _ = run("table", "check", "--table", str(ours), "--json")
    assert status == 1
    assert json.loads(out)["faults"][0]["path"] == str(file)


def test_packaged_tables_are_sound(run: Run) -> None:
    status, out, _ = run("table", "check", "--json")
    assert status == 0, out
