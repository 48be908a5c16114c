from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fa4tune.cli import calibrate as command
from fa4tune.cli.main import main
from fa4tune.errors import Fa4tuneError
from fa4tune.hardware.gpu import load_gpu
from fa4tune.kernels.micro.suite import suite
from fa4tune.search import calibrate_bundle
from fa4tune.search.calibrate import CalibrationManifest


def _run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["fa4tune", "calibrate", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """What a bundle's script leaves: two probes of a GPU with 96 SMs."""
    out = tmp_path / "out"
    out.mkdir()
    manifest = CalibrationManifest("sm_90a", {}, {}, {})
    manifest.write(out)
    environment = {
        "kind": "environment", "gpu": "a machine", "arch": "sm_90a", "sm_count": 96, "l2_bytes": 50 << 20,
        "memory_bytes": 150e9, "measured_at": "2026-01-02T03:04:05Z",
    }  # fmt: skip
    probes = [
        {"kind": "probe", "name": name, "cycles": 1000.0, "us": 0.6, "rate": rate, "unit": "bytes"}
        for name, rate in (("smem_load.throughput", 120.0), ("smem_store.throughput", 110.0))
    ]
    chain = {"kind": "probe", "name": "smem_load.latency", "cycles": 960.0, "us": 0.6, "rate": 0.03}
    lines = [{"bundle": manifest.identity, **line} for line in (environment, *probes, {**chain, "unit": ""})]
    (out / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return out


def test_import_writes_a_hardware_file_that_loads(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"
    assert _run(monkeypatch, "--import", str(results), "--out", str(path)) == 0
    gpu = load_gpu(str(path))
    assert (gpu.sm_count, gpu.smem_bytes_per_clk) == (96, 120.0)
    assert gpu.exp_per_clk == load_gpu("h200").exp_per_clk
    shown = capsys.readouterr().out
    assert "exp_per_clk keeps 16: ex2.warp was not measured" in shown
    assert "mine.toml" in shown


def test_json_is_one_object_with_numbers_and_gaps(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"
    assert _run(monkeypatch, "--import", str(results), "--out", str(path), "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["file"] == str(path)
    number = answer["numbers"]["smem_bytes_per_clk"]
    assert (number["value"], number["base"]) == (120.0, 128.0)
    assert "measured on a machine" in number["source"]
    assert "mma_flops_per_clk" in answer["left_out"]
    assert set(answer["probes"]) == {"smem_load.throughput", "smem_store.throughput", "smem_load.latency"}


def test_without_a_gpu_one_sentence_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert _run(monkeypatch) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "no CUDA GPU is visible here" in line
    assert "--export DIR" in line


def test_a_gpu_without_kernels_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA A100")
    assert _run(monkeypatch) == 1
    assert "NVIDIA A100 has compute capability 8.0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--export", "a", "--import", "b"], "--export only writes a bundle"),
        (["--import", "RESULTS", "--gpu", "b200"], "--gpu b200 is sm_100a and sm_90a was measured"),
        (["--import", "RESULTS", "--arch", "sm_100a"], "sm_90a was measured; leave --arch out"),
        (["--import", "RESULTS", "--out", "file.json"], "must end in .toml"),
    ],
)
def test_contradictions_are_bad_usage(
    results: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    sentence: str,
) -> None:
    assert _run(monkeypatch, *(str(results) if a == "RESULTS" else a for a in arguments)) == 2
    assert sentence in capsys.readouterr().err


def test_import_of_a_directory_without_results_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    CalibrationManifest("sm_90a", {}, {}, {}).write(tmp_path)
    assert _run(monkeypatch, "--import", str(tmp_path)) == 2
    assert "run calibrate.py first" in capsys.readouterr().err


def test_export_makes_a_bundle_that_runs_on_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FA4TUNE_CACHE", str(tmp_path / "cache"))
    full = suite("sm_90a")
    one = replace(full, kernels=tuple(k for k in full.kernels if k.name == "smem.chain"))
    monkeypatch.setattr(calibrate_bundle, "suite", lambda arch: one)
    monkeypatch.setattr(calibrate_bundle, "add_wheel", lambda *arguments: None)
    directory = tmp_path / "bundle"
    assert _run(monkeypatch, "--export", str(directory), "--arch", "sm_90a", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["kernels"], answer["missing"]) == (1, {})
    assert (directory / "kernels" / "smem.chain.so").stat().st_size == pytest.approx(30e3, abs=30e3)
    environment = {"PATH": "", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(directory / "calibrate.py"), "--out", str(tmp_path / "out")],
        capture_output=True, text=True, cwd=tmp_path, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == (
        "error: this machine cannot calibrate: no CUDA GPU is visible to torch on this machine\n"
    )


def test_export_does_not_touch_other_directories(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("x")
    with pytest.raises(Fa4tuneError, match="not empty and no calibration bundle"):
        calibrate_bundle.export(tmp_path, "sm_90a", python=None)
    assert (tmp_path / "precious.txt").exists()


def test_every_known_architecture_has_a_compute_capability() -> None:
    from fa4tune.hardware.gpu import ARCHITECTURES

    found: dict[tuple[int, int], Any] = command.COMPUTE_CAPABILITIES
    assert set(found.values()) == set(ARCHITECTURES)
