"""Rescales of O are counted as votes that were taken and skipped, on both architectures."""

from __future__ import annotations

import pytest
import torch

from fa4tune.emulator.attention import emulate_forward
from fa4tune.hardware.gpu import load_gpu
from fa4tune.kernels.config import default_config
from fa4tune.problem import AttentionProblem


def _growing(problem: AttentionProblem, log2_steps: float, tile_n: int) -> tuple[torch.Tensor, ...]:
    """q, k, v whose row maximum grows by ``log2_steps`` with every key tile that a kernel takes.

    Tiles go from the last to the first, so the first keys score highest.
    """
    q = torch.zeros((1, problem.seqlen_q, 1, problem.head_dim))
    k = torch.zeros((1, problem.seqlen_k, 1, problem.head_dim))
    q[..., 0] = 1.0
    tile = torch.arange(problem.seqlen_k) // tile_n
    k[0, :, 0, 0] = log2_steps * (problem.seqlen_k // tile_n - tile) * 0.6931 * problem.head_dim**0.5
    v = torch.randn(k.shape, generator=torch.Generator().manual_seed(0))
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize(("growth", "taken"), [(2.0, 0), (5.0, 1), (12.0, 3)])
def test_growth_since_the_last_rescale_decides(arch: str, growth: float, taken: int) -> None:
    gpu = load_gpu("h200" if arch == "sm_90a" else "b200")
    problem = AttentionProblem(1, 1, 1, 64, 256, 64, 64)
    tile = "tile_m=64,ping_pong=false," if arch == "sm_90a" else ""
    config = default_config(problem, arch).with_text(f"{tile}tile_n=64,rescale_threshold=8")
    q, k, v = _growing(problem, growth, 64)
    call = emulate_forward(problem, config, gpu, inputs=(q, k, v), counters=True)
    assert call.passed
    counters = call.results[0].counters
    assert counters is not None
    warps = [w.rescales for w in counters.warps if w.rescales and w.rescales.total()]
    assert warps
    for warp in warps[:2]:  # warps whose rows exist
        assert warp["taken"] == taken
        assert warp["taken"] + warp["skipped"] == 3
