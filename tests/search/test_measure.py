"""Measuring bundles through real worker processes: gate, watchdog, rounds, duel, resumption, budget."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fa4tune.errors import SearchError
from fa4tune.kernels.config import SM90ForwardConfig
from fa4tune.search.bundle import RESULTS, Candidate, Manifest, Results, Settings, read_lines
from fa4tune.search.measure import measure
from tests.search.fake_backend import HARDWARE_KEY

BACKEND = "tests.search.fake_backend:FakeBackend"
PROBLEM = "b1_hq2_hk1_sq48_sk64_d64_dv64_bf16_full_fwd"
CAUSAL = "b1_hq2_hk2_sq64_sk64_d64_dv64_bf16_causal_fwd"
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def make_bundle(directory: Path, kernels: dict[str, list[dict[str, Any]]], **settings: Any) -> Manifest:
    """A bundle whose first kernel of each problem is the default config."""
    candidates = []
    for problem, of_problem in kernels.items():
        for kernel in of_problem:
            window = [None, 0] if "causal" in problem else [None, None]
            name = len(candidates)
            candidates.append(
                Candidate(
                    name=name,
                    problem=problem,
                    config=SM90ForwardConfig(tile_n=48 + 16 * (name % 14)).as_dict(),
                    phase="default" if kernel is of_problem[0] else "model",
                    kernel={"object": "k.so", "window": window, **kernel},
                    predicted_us=90.0,
                )
            )
    (directory / "k.so").parent.mkdir(parents=True, exist_ok=True)
    (directory / "k.so").write_bytes(b"")
    manifest = Manifest(
        problems=tuple(kernels),
        candidates=tuple(candidates),
        settings=Settings(**{"rounds": 6, "duel_rounds": 12, "check_seconds": 8.0, **settings}),
        arch="sm_90a",
        hardware_key=HARDWARE_KEY,
        kernel_classes=dict.fromkeys(kernels, "sm90_fwd_test"),
        kernel_version=1,
        provenance={"fa4tune": "0"},
    )
    manifest.write(directory)
    return manifest


def lines_of(out: Path, manifest: Manifest, kind: str) -> list[dict[str, Any]]:
    return [line for line in read_lines(out / RESULTS, manifest.identity) if line["kind"] == kind]


def test_measures_floors_first_then_rounds_then_a_duel(tmp_path: Path) -> None:
    kernels = {
        PROBLEM: [{"us": 100}, {"us": 90}, {"us": 120}, {"us": 80}, {"us": 85}],
        CAUSAL: [{"us": 70}, {"us": 75}],
    }
    manifest = make_bundle(tmp_path, kernels)
    events: list[str] = []
    assert measure(tmp_path, backend=BACKEND, report=lambda done, total, text: events.append(text))
    out = tmp_path / "results"
    assert len(list(out.iterdir())) <= 8
    checks = lines_of(out, manifest, "check")
    assert [c["outcome"] for c in checks] == ["ok"] * 7
    assert all(set(c["error"]) == {"gaussian", "heavy_tailed"} for c in checks)
    assert all(ours <= 1.3 * yardstick for c in checks for ours, yardstick in c["error"].values())
    timings = lines_of(out, manifest, "timing")
    assert [(t["problem"], t["phase"]) for t in timings] == [
        (PROBLEM, "default"),
        (CAUSAL, "default"),
        (PROBLEM, "rounds"),
        (CAUSAL, "rounds"),
        (PROBLEM, "duel"),
        (CAUSAL, "duel"),
    ]
    duel = timings[4]
    assert duel["candidates"] == [0, 3, 4, 1]  # the default and its three fastest challengers
    assert len(duel["rounds"]) == 12
    assert duel["environment"]["gpu"] == "Fake H200"
    assert duel["environment"]["clock_mhz"] == 1755.0
    assert len(events) == 7 + 6


FAULTS = {
    "load": ("launch_failed", "undefined symbol"),
    "launch": ("launch_failed", "invalid argument"),
    "memory": ("out_of_memory", "out of memory"),
    "crash": ("crashed", "signal 11"),
    "zeros": ("incorrect", "zero everywhere"),
    "unwritten": ("incorrect", "not finite or were not written"),
    "inaccurate": ("incorrect", "exceeds 1.3 times"),
    "one element": ("incorrect", "one element"),
    "lse": ("incorrect", "LSE is off"),
    "lse unwritten": ("incorrect", "LSE values"),
    "race": ("incorrect", "two runs on the same inputs differ"),
    "heavy tails": ("incorrect", "heavy_tailed inputs"),
}


def test_every_fault_is_recorded_and_the_others_go_on(tmp_path: Path) -> None:
    kernels = [{}, *({"fault": fault, "us": 1} for fault in FAULTS), {"us": 90}]
    manifest = make_bundle(tmp_path, {PROBLEM: kernels})
    assert measure(tmp_path, backend=BACKEND)
    checks = lines_of(tmp_path / "results", manifest, "check")
    assert [c["candidate"] for c in checks] == list(range(len(kernels)))
    assert checks[0]["outcome"] == checks[-1]["outcome"] == "ok"
    for check, (fault, (outcome, reason)) in zip(checks[1:], FAULTS.items(), strict=False):
        assert (fault, check["outcome"]) == (fault, outcome)
        assert reason in check["reason"]
    for timing in lines_of(tmp_path / "results", manifest, "timing"):
        assert set(timing["candidates"]) <= {0, len(kernels) - 1}


def test_hang_is_killed_by_the_watchdog_and_the_search_goes_on(tmp_path: Path) -> None:
    manifest = make_bundle(tmp_path, {PROBLEM: [{}, {"fault": "hang"}, {"us": 90}]}, check_seconds=1.5)
    assert measure(tmp_path, backend=BACKEND)
    checks = {c["candidate"]: c["outcome"] for c in lines_of(tmp_path / "results", manifest, "check")}
    assert checks == {0: "ok", 1: "hung", 2: "ok"}


def test_candidate_that_dies_only_while_timed_is_dropped(tmp_path: Path) -> None:
    late = {"fault": "late", "flag": str(tmp_path / "flag"), "us": 1}
    manifest = make_bundle(tmp_path, {PROBLEM: [{}, late, {"us": 90}]})
    assert measure(tmp_path, backend=BACKEND)
    out = tmp_path / "results"
    last = {c["candidate"]: c["outcome"] for c in lines_of(out, manifest, "check")}
    assert last == {0: "ok", 1: "crashed", 2: "ok"}
    rounds = next(t for t in lines_of(out, manifest, "timing") if t["phase"] == "rounds")
    assert rounds["candidates"] == [0, 2]


def test_second_run_measures_only_what_is_missing(tmp_path: Path) -> None:
    manifest = make_bundle(tmp_path, {PROBLEM: [{}, {"us": 90}, {"us": 95}]})
    measure(tmp_path, backend=BACKEND)
    path = tmp_path / "results" / RESULTS
    complete = path.read_text().splitlines(keepends=True)
    kept = [line for line in complete if json.loads(line).get("candidate") != 2][:3]
    path.write_text("".join(kept) + complete[-1][:40])  # and a torn line
    assert measure(tmp_path, backend=BACKEND)
    checks = lines_of(tmp_path / "results", manifest, "check")
    assert [c["candidate"] for c in checks] == [0, 1, 2]
    assert path.read_text().startswith("".join(kept))
    before = path.read_bytes()
    assert measure(tmp_path, backend=BACKEND)
    assert path.read_bytes() == before


def test_spent_budget_still_leaves_resumable_results(tmp_path: Path) -> None:
    manifest = make_bundle(tmp_path, {PROBLEM: [{}, {"us": 90}], CAUSAL: [{}]})
    assert not measure(tmp_path, backend=BACKEND, budget_seconds=0.0)
    assert measure(tmp_path, backend=BACKEND, budget_seconds=300.0)
    assert len(lines_of(tmp_path / "results", manifest, "check")) == 3


def test_killed_measurement_resumes_without_losing_a_finished_check(tmp_path: Path) -> None:
    manifest = make_bundle(
        tmp_path, {PROBLEM: [{}, {"us": 90}, {"fault": "hang"}, {"us": 95}]}, check_seconds=60.0
    )
    command = [sys.executable, "-m", "fa4tune.search.measure", str(tmp_path), "--backend", BACKEND]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, cwd=ROOT)
    out = tmp_path / "results"
    deadline = time.monotonic() + 60
    while not lines_of(out, manifest, "check")[1:] and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    finished = [c["candidate"] for c in lines_of(out, manifest, "check")]
    assert finished == [0, 1]
    results = Results(out, manifest.identity)
    results.append(kind="check", problem=PROBLEM, candidate=2, outcome="hung", reason="given up", error={})
    results.close()
    assert measure(tmp_path, backend=BACKEND)
    assert [c["candidate"] for c in lines_of(out, manifest, "check")] == [0, 1, 2, 3]


def test_results_of_another_bundle_are_refused(tmp_path: Path) -> None:
    make_bundle(tmp_path / "a", {PROBLEM: [{}]})
    make_bundle(tmp_path / "b", {PROBLEM: [{"us": 3}]})
    measure(tmp_path / "a", tmp_path / "out", backend=BACKEND)
    with pytest.raises(SearchError, match="holds results of bundle"):
        measure(tmp_path / "b", tmp_path / "out", backend=BACKEND)


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("FAKE_GPU", "none", "this machine cannot measure: .*no CUDA GPU is visible"),
        ("FAKE_ARCH", "sm_100", "this GPU is Fake H200 .* the bundle is for sm_90a"),
    ],
)
def test_machine_that_does_not_fit_is_one_clear_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, sentence: str
) -> None:
    make_bundle(tmp_path, {PROBLEM: [{}]})
    monkeypatch.setenv(variable, value)
    with pytest.raises(SearchError, match=sentence):
        measure(tmp_path, backend=BACKEND)


def test_directory_without_a_bundle_and_unwritable_output_are_clear_sentences(tmp_path: Path) -> None:
    with pytest.raises(SearchError, match=r"holds no manifest\.json"):
        measure(tmp_path, backend=BACKEND)
    make_bundle(tmp_path, {PROBLEM: [{}]})
    (tmp_path / "file").write_text("")
    with pytest.raises(SearchError, match="results cannot be written"):
        measure(tmp_path, tmp_path / "file" / "out", backend=BACKEND)
    (tmp_path / "manifest.json").write_text('{"format": 99}')
    with pytest.raises(SearchError, match="format 99"):
        measure(tmp_path, backend=BACKEND)


def test_measuring_side_imports_only_what_a_gpu_host_has() -> None:
    code = (
        "import sys, fa4tune.search.measure, fa4tune.search.worker, fa4tune.search.gate\n"
        "odd = {m.split('.')[0] for m in sys.modules} & "
        "{'cutlass', 'msgspec', 'optuna', 'typer', 'rich', 'platformdirs', 'filelock', 'scipy', 'pydantic'}\n"
        "sys.exit(', '.join(odd) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
