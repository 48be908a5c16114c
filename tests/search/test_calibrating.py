from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fa4tune.errors import SearchError
from fa4tune.kernels.micro import suite as suites
from fa4tune.search import calibrate
from fa4tune.search.calibrate import CalibrationManifest, measure
from tests.search.fake_calibration import CLOCK_MHZ, LAUNCH, cost

WORKER = "tests.search.fake_calibration"


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle of some kernels, whose worker knows what they cost."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    kernels = [
        "arithmetic.ex2.8",
        "arithmetic.fma.1",
        "arithmetic.fma_max.8",
        "beside.ex2.rs128",
        "copy.128x128.depth4",
        "copy.64x64.depth1",
        "wgmma.ss.n64.k8.queued",
    ]
    entry = {"file": "none.so", "symbol": "kernel", "loop": {}, "registers": 32, "spill_bytes": 0}
    directory = tmp_path / "bundle"
    directory.mkdir()
    CalibrationManifest("sm_90a", dict.fromkeys(kernels, entry), {}, {"cuda": "cu13"}).write(directory)
    return directory


@pytest.fixture
def short_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    full = suites.suite("sm_90a")
    few = replace(full, loads=(), launches=("l2.throughput",))
    monkeypatch.setattr(calibrate, "suite", lambda arch: few)


def _lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def _probes(out: Path) -> dict[str, dict[str, Any]]:
    return {line["name"]: line for line in _lines(out) if line["kind"] == "probe"}


def test_measure_finds_the_cost_of_an_iteration(bundle: Path, tmp_path: Path, short_loads: None) -> None:
    out = tmp_path / "out"
    assert measure(bundle, out, worker=WORKER)
    found = _probes(out)
    probes = {p.name: p for p in suites.suite("sm_90a").probes}
    assert {"ex2.throughput", "fma.latency", "hbm.throughput", "beside.ex2.rs128"} <= set(found)
    for name, line in found.items():
        expected = cost(probes[name].kernel, probes[name].threads)
        assert line["cycles"] == pytest.approx(expected), name
        assert line["us"] == pytest.approx(expected / CLOCK_MHZ)
        assert line["clock_mhz"] == pytest.approx(CLOCK_MHZ)
        assert line["rate"] == pytest.approx(probes[name].work / expected)
    (launch,) = (line for line in _lines(out) if line["kind"] == "launch")
    assert launch["event_us"] == pytest.approx(LAUNCH / CLOCK_MHZ)
    assert launch["graph_us"] == pytest.approx(LAUNCH / CLOCK_MHZ)


@pytest.mark.parametrize(
    ("failure", "reason"),
    [("raise", "illegal instruction"), ("crash", "signal 6"), ("hang", "no answer within")],
)
def test_measure_survives_a_kernel_that_fails(
    bundle: Path,
    tmp_path: Path,
    short_loads: None,
    monkeypatch: pytest.MonkeyPatch,
    failure: str,
    reason: str,
) -> None:
    monkeypatch.setenv("FAKE_FAILURES", f"arithmetic.fma.1={failure}")
    monkeypatch.setattr(calibrate, "TASK_SECONDS", 3.0)
    out = tmp_path / "out"
    assert not measure(bundle, out, worker=WORKER)
    failed = [line for line in _lines(out) if line["kind"] == "failed"]
    assert [line["task"] for line in failed] == [["probe", "fma.latency"]]
    assert reason in failed[0]["reason"]
    assert "hbm.throughput" in _probes(out)
    if failure == "raise":
        # a second run does what is missing, and only that
        monkeypatch.setenv("FAKE_FAILURES", "arithmetic.ex2.8=crash")
        assert measure(bundle, out, worker=WORKER)
        assert "fma.latency" in _probes(out)


def test_a_load_reports_clock_and_cycles(bundle: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert measure(bundle, out, worker=WORKER)
    loads = {line["name"]: line for line in _lines(out) if line["kind"] == "load"}
    assert set(loads) == {"idle", "arithmetic", "sweep"}
    line = loads["arithmetic"]
    assert line["clock_mhz"] == pytest.approx(CLOCK_MHZ, rel=0.01)
    assert line["cycles"] == pytest.approx(cost("arithmetic.fma_max.8", 512), rel=0.01)
    assert line["launches"] > 4


def test_a_load_s_clock_is_that_of_its_slowest_cta(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_FAILURES", "arithmetic.fma_max.8=uneven")
    full = suites.suite("sm_90a")
    loads = tuple(load for load in full.loads if load.name == "arithmetic")
    probes = tuple(probe for probe in full.probes if probe.name == loads[0].probe)
    few = replace(full, probes=probes, loads=loads, launches=())
    monkeypatch.setattr(calibrate, "suite", lambda arch: few)
    assert measure(bundle, tmp_path / "out", worker=WORKER)
    (line,) = (line for line in _lines(tmp_path / "out") if line["kind"] == "load")
    assert line["clock_mhz"] == pytest.approx(CLOCK_MHZ, rel=0.01)
    assert line["cycles"] == pytest.approx(cost("arithmetic.fma_max.8", 512), rel=0.01)


def test_a_budget_leaves_work_for_the_next_run(bundle: Path, tmp_path: Path, short_loads: None) -> None:
    out = tmp_path / "out"
    assert not measure(bundle, out, budget_seconds=0.0, worker=WORKER)
    assert not _lines(out)


def test_without_a_gpu_one_sentence(bundle: Path, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SearchError, match="no CUDA GPU is visible"):
        measure(bundle, tmp_path / "out")


def test_a_manifest_of_another_suite_is_refused(bundle: Path) -> None:
    text = (bundle / calibrate.MANIFEST).read_text().replace(f'"suite": {suites.VERSION}', '"suite": 0')
    (bundle / calibrate.MANIFEST).write_text(text)
    with pytest.raises(SearchError, match="suite 0"):
        CalibrationManifest.read(bundle)


def test_a_directory_without_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SearchError, match="holds no calibration"):
        measure(tmp_path, tmp_path / "out")


@pytest.mark.gpu
def test_a_gpu_s_exponential_unit_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real way: compile, bundle, measure; 16 exponentials a clock on Hopper and B200, 32 on B300."""
    from fa4tune.cli.calibrate import COMPUTE_CAPABILITIES
    from fa4tune.search import calibrate_bundle

    arch = COMPUTE_CAPABILITIES[torch.cuda.get_device_capability(0)]
    full = suites.suite(arch)
    kernels = tuple(k for k in full.kernels if k.name == "arithmetic.ex2.8")
    probes = tuple(p for p in full.probes if p.kernel == kernels[0].name)
    few = replace(full, kernels=kernels, probes=probes, loads=(), launches=())
    monkeypatch.setattr(calibrate_bundle, "suite", lambda arch: few)
    monkeypatch.setattr(calibrate, "suite", lambda arch: few)
    calibrate_bundle.export(tmp_path / "bundle", arch, python=None)
    assert measure(tmp_path / "bundle", tmp_path / "out")
    rate = _probes(tmp_path / "out")["ex2.throughput"]["rate"]
    assert 14 < rate < 34
