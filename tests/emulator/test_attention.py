"""Our own forward kernels in the emulator, and the command that runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fa4tune.cli.main import app
from fa4tune.emulator.attention import emulate_forward, random_inputs, read_inputs
from fa4tune.errors import ProblemError
from fa4tune.hardware.gpu import choose_gpu
from fa4tune.kernels.config import default_config
from fa4tune.problem import AttentionProblem

pytest.importorskip("cutlass")


@pytest.mark.parametrize("late", [None, 1])
@pytest.mark.parametrize(
    ("arch", "text"),
    [
        ("sm_90a", "b1_hq2_hk1_sq200_sk330_d64_dv64_bf16_causal_fwd"),
        ("sm_90a", "b1_hq1_hk1_sq128_sk384_d128_dv128_bf16_full_fwd"),
        ("sm_100a", "b1_hq1_hk1_sq300_sk400_d64_dv64_bf16_causal_fwd"),
        ("sm_100a", "b1_hq1_hk1_sq512_sk256_d128_dv128_bf16_full_fwd"),
    ],
)
def test_our_forward_is_right_and_clean(arch: str, text: str, late: int | None) -> None:
    problem = AttentionProblem.parse(text)
    gpu = choose_gpu(None, arch)
    call = emulate_forward(problem, default_config(problem, arch), gpu, late=late)
    assert call.passed, (call.out_error, call.lse_error, [str(f) for f in call.findings])


def _invoke(*arguments: str) -> tuple[int, str]:
    from fa4tune.cli import emulate

    if not any(c.name == "emulate" for c in app.registered_commands):
        emulate.register(app)
    result = CliRunner().invoke(app, ["emulate", *arguments])
    return result.exit_code, result.stdout


PROBLEM = "b1_hq1_hk1_sq128_sk128_d64_dv64_bf16_full_fwd"


def test_command_reports_errors_findings_and_counters() -> None:
    code, out = _invoke(PROBLEM, "--arch", "sm_90a", "--config", "tile_m=128", "--counters", "--json")
    report = json.loads(out)
    assert code == 0
    assert report["passed"]
    assert report["findings"] == []
    mmas = [m for w in report["counters"] for m in w["mmas"]]
    # 2 x 128 x 128 x 64 multiply-adds, each counted once
    assert sum(m["m"] * m["n"] * m["k"] * m["count"] for m in mmas) == 2 * 128 * 128 * 64
    exponentials = [w["exponentials"].get("mufu", 0) for w in report["counters"]]
    assert sum(exponentials) >= 128 * 128


def test_command_ends_with_status_1_where_the_result_is_not_finite(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    problem = AttentionProblem.parse(PROBLEM)
    q, k, v = random_inputs(problem)
    v[0, 3, 0, 5] = float("nan")
    save_file({"q": q, "k": k, "v": v}, str(tmp_path / "in.safetensors"))
    code, out = _invoke(
        PROBLEM, "--arch", "sm_90a", "--inputs", str(tmp_path / "in.safetensors"), "--late", "2"
    )
    assert code == 1
    assert "too large" in out


def test_inputs_of_another_shape_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    problem = AttentionProblem.parse(PROBLEM)
    q, k, v = random_inputs(problem)
    path = tmp_path / "in.safetensors"
    save_file({"q": q, "k": k, "v": v[:, :64].contiguous()}, str(path))
    with pytest.raises(ProblemError, match=r"v in .* \(1, 64, 1, 64\)"):
        read_inputs(path, problem)
    save_file({"q": q, "k": k.float(), "v": v}, str(path))
    with pytest.raises(ProblemError, match="float32"):
        read_inputs(path, problem)
    save_file({"q": q, "k": k}, str(path))
    with pytest.raises(ProblemError, match="no tensor v"):
        read_inputs(path, problem)


def test_inputs_come_back_as_they_were_saved(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    problem = AttentionProblem.parse(PROBLEM)
    given = random_inputs(problem, seed=3)
    save_file(dict(zip("qkv", given, strict=True)), str(tmp_path / "in.safetensors"))
    for a, b in zip(read_inputs(tmp_path / "in.safetensors", problem), given, strict=True):
        assert torch.equal(a, b)
