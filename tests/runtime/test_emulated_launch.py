"""The emulator in the GPU's place: the launcher's own path, for a kernel that no GPU here can run."""

from __future__ import annotations

import pytest
import torch

from fa4tune.kernels.compile import compile_kernel
from fa4tune.kernels.config import default_config
from fa4tune.kernels.kernel_class import KernelClass
from fa4tune.kernels.reference import attention, attention_rounded, errors_against
from fa4tune.problem import AttentionProblem
from fa4tune.runtime import launcher
from fa4tune.runtime.arguments import forward_caller


@pytest.mark.parametrize(("arch", "sm_count"), [("sm_90a", 132), ("sm_100a", 148)])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_compiled_kernel_is_launched_and_right(arch: str, sm_count: int, mask: str) -> None:
    problem = AttentionProblem(1, 2, 1, 130, 200, 64, 64, "bf16", mask)
    kernel = compile_kernel(KernelClass.from_problem(problem, default_config(problem, arch), arch))
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn((1, n, h, 64), generator=generator).bfloat16() for n, h in ((130, 2), (200, 1), (200, 1))
    )
    out, lse = torch.full_like(q, float("nan")), torch.full((1, 2, 130), float("nan"))

    def host(*arguments: object) -> None:
        launcher.launch(kernel, *arguments, emulate=True)

    call = forward_caller(host, [a.name for a in kernel.signature], sm_count=sm_count)
    call(q, k, v, out, lse, 64**-0.5)
    exact, exact_lse = attention(q, k, v, causal=mask == "causal")
    rounded, _ = attention_rounded(q, k, v, causal=mask == "causal")
    assert errors_against(out, exact).rms <= 1.3 * errors_against(rounded, exact).rms
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=1e-3)
