"""Split mode end to end: compile, export, measure in the bundle's own copy of the package, import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fa4tune
from fa4tune.errors import SearchError, TableError
from fa4tune.hardware.gpu import load_gpu
from fa4tune.kernels.config import SM90ForwardConfig, default_config
from fa4tune.outcome import Outcome
from fa4tune.problem import AttentionProblem
from fa4tune.record import read_trials
from fa4tune.search.bundle import Candidate, Manifest, Results, Settings
from fa4tune.search.session import Request, export_bundle, import_results, search_predicted
from fa4tune.search.study import Study
from fa4tune.search.transfer import SCRIPT, VENDORED, load_results, vendor
from fa4tune.table.key import table_key
from fa4tune.table.store import Table

PROBLEM = AttentionProblem.parse("b1_hq2_hk2_sq64_sk64_d64_dv64_bf16_full_fwd")
GPU = load_gpu("h200")
FAKE = Path(__file__).with_name("fake_backend.py")


def make_bundle(directory: Path, times: dict[int, float], faults: dict[int, str] | None = None) -> Manifest:
    """A bundle as ``export`` writes it, with the fake backend beside it; candidate 0 is the default."""
    (directory / "objects").mkdir(parents=True)
    (directory / "objects" / "k.so").write_bytes(b"")
    vendor(directory / "lib" / "fa4tune", VENDORED)
    (directory / "measure.py").write_text(SCRIPT)
    (directory / "lib" / "fake_backend.py").write_text(FAKE.read_text())
    base = default_config(PROBLEM, GPU.arch)
    candidates = [
        Candidate(
            name=name,
            problem=str(PROBLEM),
            config=(base if name == 0 else SM90ForwardConfig(tile_n=48 + 16 * name)).as_dict(),
            phase="default" if name == 0 else "model",
            kernel={"object": "objects/k.so", "us": us, "fault": (faults or {}).get(name, "")},
            predicted_us=us * 0.9,
            resources={"registers": 168, "spill_bytes": 0},
        )
        for name, us in times.items()
    ]
    key = table_key(PROBLEM, GPU)
    manifest = Manifest(
        problems=(str(PROBLEM),),
        candidates=tuple(candidates),
        settings=Settings(rounds=6, duel_rounds=20),
        arch=GPU.arch,
        hardware_key=GPU.key,
        kernel_classes={str(PROBLEM): key.kernel_class},
        kernel_version=key.kernel_version,
        provenance={"cuda_flavour": "cu13", "cutlass_dsl": "4.8.1", "fa4tune": fa4tune.__version__},
    )
    manifest.write(directory)
    return manifest


def run_measure(bundle: Path, out: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment["PYTHONPATH"] = str(bundle / "lib")
    command = [sys.executable, str(bundle / "measure.py"), "--out", str(out)]
    done = subprocess.run(
        [*command, "--backend", "fake_backend:FakeBackend"],
        capture_output=True,
        text=True,
        env=environment,
        cwd=bundle,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "complete" in done.stderr


def test_bundle_measures_with_its_own_files_and_imports_to_study_and_table(tmp_path: Path) -> None:
    manifest = make_bundle(tmp_path / "bundle", {0: 100.0, 1: 80.0, 2: 90.0, 3: 70.0}, {3: "inaccurate"})
    run_measure(tmp_path / "bundle", tmp_path / "out")
    assert len(list((tmp_path / "out").iterdir())) <= 8
    table = Table(tmp_path / "table", fallback=())
    request = Request(gpu=GPU, trials=4, table=table, studies=tmp_path / "studies")
    (found,) = import_results(tmp_path / "out", lambda gpu: request)
    entry = found.entry
    assert entry is not None
    assert entry.config == manifest.candidates[1].config
    assert (entry.source, entry.kernel, entry.trials) == ("measured", "measured", 3)
    assert entry.ratio == pytest.approx(100 / 80, rel=1e-3)
    assert entry.provenance.gpu == "Fake H200"
    assert entry.provenance.cutlass_dsl == "4.8.1"
    assert entry.provenance.clock_mhz == 1755.0
    assert entry.protocol is not None
    assert (entry.protocol.l2, entry.protocol.rounds, entry.protocol.interleaved) == ("cold", 20, True)
    hit = table.lookup(PROBLEM, GPU)
    assert hit is not None
    assert hit.entry == entry
    trials = list(read_trials(Study(PROBLEM, GPU, directory=tmp_path / "studies").record_path))
    assert sorted((t.outcome, t.phase) for t in trials) == sorted(
        [
            (Outcome.INCORRECT, "model"),
            (Outcome.MEASURED, "default"),
            *[(Outcome.MEASURED, "model")] * 2,
            *[(Outcome.MEASURED, "duel")] * 3,
        ]
    )
    wrong = next(t for t in trials if t.outcome is Outcome.INCORRECT)
    assert "exceeds 1.3 times" in wrong.reason
    measured = next(t for t in trials if t.phase == "default")
    assert len(measured.samples_us) == 6
    assert set(measured.error) == {"gaussian", "heavy_tailed"}
    # importing again changes nothing
    before = (tmp_path / "studies").stat(), len(trials)
    import_results(tmp_path / "out", lambda gpu: request)
    again = list(read_trials(Study(PROBLEM, GPU, directory=tmp_path / "studies").record_path))
    assert len(again) == before[1]


def test_default_stays_where_the_challenger_is_not_significantly_faster(tmp_path: Path) -> None:
    manifest = make_bundle(tmp_path / "bundle", {0: 100.0, 1: 99.9})
    results = Results(tmp_path / "out", manifest.identity)
    manifest.write(tmp_path / "out")
    for name in (0, 1):
        results.append(kind="check", problem=str(PROBLEM), candidate=name, outcome="ok", reason="", error={})
    noisy = [[100.0 + (i * 7919 % 13), 99.9 + (i * 104729 % 13)] for i in range(20)]
    results.append(
        kind="timing", problem=str(PROBLEM), phase="duel", candidates=[0, 1], rounds=noisy,
        timing="events", environment={}, measured_at="2026-01-01T00:00:00Z",
    )  # fmt: skip
    results.close()
    request = Request(gpu=GPU, trials=2, table=Table(tmp_path / "t", fallback=()), studies=tmp_path / "s")
    (found,) = import_results(tmp_path / "out", lambda gpu: request)
    assert found.entry is not None
    assert found.entry.config == default_config(PROBLEM, GPU.arch).as_dict()
    assert found.entry.ratio == 1.0


def test_cut_off_run_still_gives_the_floor(tmp_path: Path) -> None:
    manifest = make_bundle(tmp_path / "bundle", {0: 100.0, 1: 80.0})
    run_measure(tmp_path / "bundle", tmp_path / "out")
    path = tmp_path / "out" / "results.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    floor = [line for line in lines if line.get("phase") == "default" or line.get("candidate") == 0]
    path.write_text("".join(json.dumps(line) + "\n" for line in floor))
    imported = load_results(tmp_path / "out")
    (trial,) = imported.results[str(PROBLEM)].trials
    assert trial.config == manifest.candidates[0].config
    assert trial.outcome is Outcome.MEASURED
    assert list(imported.results[str(PROBLEM)].paired) == [default_config(PROBLEM, GPU.arch)]


def test_nothing_that_passes_is_reported_and_writes_no_entry(tmp_path: Path) -> None:
    make_bundle(tmp_path / "bundle", {0: 100.0, 1: 80.0}, {0: "zeros", 1: "unwritten"})
    run_measure(tmp_path / "bundle", tmp_path / "out")
    request = Request(gpu=GPU, trials=2, table=Table(tmp_path / "t", fallback=()), studies=tmp_path / "s")
    (found,) = import_results(tmp_path / "out", lambda gpu: request)
    assert found.entry is None
    assert found.outcomes == {"incorrect": 2}
    assert not (tmp_path / "t").exists()


def test_import_without_results_and_of_another_gpu_are_clear_sentences(tmp_path: Path) -> None:
    make_bundle(tmp_path / "bundle", {0: 100.0})
    with pytest.raises(SearchError, match=r"holds no results\.jsonl; run measure\.py"):
        load_results(tmp_path / "bundle")
    Results(tmp_path / "bundle" / "results", Manifest.read(tmp_path / "bundle").identity).close()
    request = Request(gpu=GPU, trials=1, table=Table(tmp_path / "t"), studies=tmp_path / "s")
    with pytest.raises(SearchError, match="give the right one with --gpu"):
        import_results(tmp_path / "bundle", lambda gpu: request, load_gpu("b200"))
    with pytest.raises(SearchError, match="holds no measurement yet"):
        import_results(tmp_path / "bundle", lambda gpu: request)


def test_unusable_places_are_found_before_anything_is_predicted_or_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(*_: object, **__: object) -> None:
        raise AssertionError("worked before it looked")

    monkeypatch.setattr("fa4tune.search.session.rank_space", work)
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "other").write_text("")
    request = Request(gpu=GPU, trials=1, table=Table(tmp_path / "file"), studies=tmp_path / "s")
    with pytest.raises(TableError, match="cannot be written"):
        search_predicted(PROBLEM, request)
    with pytest.raises(SearchError, match="cannot be written"):
        export_bundle([PROBLEM], request, tmp_path / "file" / "b")
    with pytest.raises(SearchError, match="is not empty"):
        export_bundle([PROBLEM], request, tmp_path / "full")


def test_vendored_files_import_nothing_of_the_package_beyond_themselves(tmp_path: Path) -> None:
    vendor(tmp_path / "fa4tune", VENDORED)
    names = [n.removesuffix(".py").replace("/", ".") for n in VENDORED if not n.endswith("__init__.py")]
    code = f"import importlib, fa4tune\nfor n in {names!r}: importlib.import_module('fa4tune.' + n)\n"
    code += "print(fa4tune.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path))
