"""Our forward kernels give no finding, and a single fault in them is found."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fa4tune.cli import main
from fa4tune.cli.main import app
from fa4tune.emulator import capture
from fa4tune.emulator.attention import emulate_forward
from fa4tune.emulator.capture import kernel_ptx
from fa4tune.hardware.gpu import choose_gpu
from fa4tune.kernels.config import default_config
from fa4tune.kernels.program import build_plan
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


def test_unknown_back_end_in_the_environment_is_bad_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FA4TUNE_EMULATOR", "bogus")
    monkeypatch.setattr("sys.argv", ["fa4tune", "emulate", CASES[0][1], "--arch", "sm_90a"])
    with pytest.raises(SystemExit) as done:
        main.main()
    assert done.value.code == 2
    complaint = "FA4TUNE_EMULATOR is 'bogus', which is no back-end; choose one of auto, native, plain"
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["missing-proxy-fence", "deadlock"])
def test_findings_of_our_kernel_name_source_line_and_role(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []

    def faulty(compiled: object) -> str:
        lines.extend(kernel_ptx(compiled).splitlines())
        wanted = "fence.proxy.async" if kind == "missing-proxy-fence" else "mbarrier.arrive.expect_tx"
        return "\n".join("" if wanted in line else line for line in lines) + "\n"

    monkeypatch.setattr(capture, "kernel_ptx", faulty)
    problem = AttentionProblem.parse(CASES[0][1])
    gpu = dataclasses.replace(choose_gpu(None, "sm_90a"), sm_count=1)
    config = default_config(problem, "sm_90a")
    roles = {role.name for role in build_plan(problem, config, gpu).roles}
    call = emulate_forward(problem, config, gpu, check=True)
    finding = next(f for f in call.findings if f.kind == kind)
    file, number = finding.source.rsplit(":", 1)
    assert Path(file).name in {"forward.py", "tiles.py", "softmax.py", "tile_scheduler.py", "mask.py"}
    assert 0 < int(number) <= len(Path(file).read_text().splitlines())
    named = re.search(r"warp \d+ \((\w+)\)", finding.where)
    assert named is not None
    assert named[1] in roles
    blocked = [d for d in finding.details if " blocked at " in d]
    assert bool(blocked) == (kind == "deadlock")
    assert all(re.search(r"warp \d+ \(\w+\) blocked at PTX line \d+ `.*` \(.*:\d+\)", d) for d in blocked)
