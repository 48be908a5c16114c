"""Our forward kernels: outputs, counters and traces equal on both back-ends, eagerly and late."""

from __future__ import annotations

import pytest
import torch

from fa4tune.emulator.attention import EmulatedCall, emulate_forward
from fa4tune.hardware.gpu import choose_gpu
from fa4tune.kernels.config import default_config
from fa4tune.problem import AttentionProblem

pytest.importorskip("cutlass")


def emulate(
    text: str, arch: str, backend: str, monkeypatch: pytest.MonkeyPatch, late: int | None, trace: bool
) -> EmulatedCall:
    monkeypatch.setenv("FA4TUNE_EMULATOR", backend)
    problem = AttentionProblem.parse(text)
    config, gpu = default_config(problem, arch), choose_gpu(None, arch)
    return emulate_forward(problem, config, gpu, counters=True, late=late, trace=trace)


@pytest.mark.parametrize("late", [None, 5])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize(
    "text",
    ["b1_hq2_hk1_sq200_sk330_d64_dv64_bf16_causal_fwd", "b1_hq1_hk1_sq256_sk384_d128_dv128_fp16_full_fwd"],
)
def test_same_bits_counts_and_events(
    arch: str, text: str, late: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = late is None
    plain = emulate(text, arch, "plain", monkeypatch, late, trace)
    native = emulate(text, arch, "native", monkeypatch, late, trace)
    assert native.passed
    assert torch.equal(plain.out.view(torch.int16), native.out.view(torch.int16))
    assert torch.equal(plain.lse.view(torch.int32), native.lse.view(torch.int32))
    for p, n in zip(plain.results, native.results, strict=True):
        assert p.counters == n.counters
        assert p.trace == n.trace
        assert p.warp_instructions == n.warp_instructions
