"""Our forward kernels give no finding, and a single fault in them is found."""

from __future__ import annotations

import dataclasses
import json

import pytest
from typer.testing import CliRunner

from fa4tune.cli import main
from fa4tune.cli.main import app
from fa4tune.emulator.attention import emulate_forward
from fa4tune.hardware.gpu import choose_gpu
from fa4tune.kernels.config import default_config
from fa4tune.problem import AttentionProblem

pytest.importorskip("cutlass")

#: One CTA (or pair) does two output tiles and goes through all stages, so that everything is used again.
CASES = [
    ("sm_90a", "b1_hq1_hk1_sq256_sk384_d64_dv64_bf16_full_fwd", ""),
    ("sm_90a", "b1_hq1_hk1_sq300_sk300_d128_dv128_bf16_causal_fwd", "scheduler=lpt"),
    ("sm_90a", "b1_hq1_hk1_sq256_sk256_d64_dv64_bf16_full_fwd", "p_in_registers=false"),
    (
        "sm_90a",
        "b1_hq2_hk1_sq128_sk256_d128_dv128_bf16_full_fwd",
        "p_in_registers=false,scheduler=persistent",
    ),
    ("sm_90a", "b1_hq2_hk1_sq130_sk256_d128_dv128_bf16_causal_fwd", "scheduler=persistent"),
    ("sm_100a", "b1_hq1_hk1_sq512_sk300_d64_dv64_bf16_full_fwd", "scheduler=persistent"),
    ("sm_100a", "b1_hq2_hk1_sq256_sk256_d64_dv64_bf16_causal_fwd", "scheduler=lpt"),
    ("sm_100a", "b1_hq2_hk1_sq256_sk256_d128_dv128_bf16_causal_fwd", ""),
    ("sm_100a", "b1_hq2_hk1_sq512_sk512_d128_dv128_bf16_full_fwd", "cta_group=2,scheduler=persistent"),
]


@pytest.mark.parametrize("late", [None, 11])
@pytest.mark.parametrize(("arch", "text", "knobs"), CASES)
def test_our_forward_gives_no_finding(arch: str, text: str, knobs: str, late: int | None) -> None:
    problem = AttentionProblem.parse(text)
    config = default_config(problem, arch)
    config = config.with_text(knobs) if knobs else config
    gpu = dataclasses.replace(choose_gpu(None, arch), sm_count=2)
    call = emulate_forward(problem, config, gpu, late=late, check=True)
    assert [str(f) for f in call.findings] == []
    assert call.passed


def test_command_runs_the_checks() -> None:
    from fa4tune.cli import emulate

    if not any(c.name == "emulate" for c in app.registered_commands):
        emulate.register(app)
    arguments = [
        "emulate",
        "b1_hq1_hk1_sq128_sk128_d64_dv64_bf16_full_fwd",
        "--arch",
        "sm_90a",
        "--check",
        "--json",
    ]
    result = CliRunner().invoke(app, arguments)
    report = json.loads(result.stdout)
    assert result.exit_code == 0
    assert report["check"]
    assert report["findings"] == []


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--check", "--waive", "nonsense"], "there is no waiver 'nonsense'; choose of tcgen05-wait-ld, "),
        (["--waive", "wgmma-fence"], "--waive wgmma-fence without --check waives nothing"),
    ],
)
def test_waivers_that_make_no_sense_are_bad_usage(
    options: list[str],
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["fa4tune", "emulate", CASES[0][1], "--arch", "sm_90a", *options])
    with pytest.raises(SystemExit) as done:
        main.main()
    assert done.value.code == 2
    assert complaint in capsys.readouterr().err
