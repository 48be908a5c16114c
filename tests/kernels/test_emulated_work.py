"""What a plan says polynomials cost is what its work grows by when they take an exponential's place."""

from __future__ import annotations

import pytest

from fa4tune.hardware.gpu import load_gpu
from fa4tune.kernels.config import CONFIGS, default_config
from fa4tune.kernels.plan import total_work
from fa4tune.kernels.program import build_plan
from fa4tune.problem import AttentionProblem


@pytest.mark.parametrize("share", [0.25, 0.5])
@pytest.mark.parametrize(
    ("gpu", "knobs"),
    [
        ("h200", {"overlap": True}),
        ("h200", {"overlap": False, "tile_n": 64}),
        ("b200", {"cta_group": 1, "kv_stages": 3}),
        ("b200", {"cta_group": 2}),
    ],
)
def test_emulated_work_is_the_growth(gpu: str, knobs: dict[str, object], share: float) -> None:
    problem = AttentionProblem.parse("b1_hq8_hk8_sq4096_sk4096_d128_dv128_bf16_full_fwd")
    hardware = load_gpu(gpu)
    knobs = knobs | {n: k.default for n, k in CONFIGS[hardware.arch].knobs().items() if n.startswith("exp2_")}
    base = default_config(problem, hardware.arch).replace(**knobs)
    plain, emulated = (
        total_work(build_plan(problem, base.replace(exp2_share=s), hardware).loop.body) for s in (0.0, share)
    )
    assert emulated.exp_emulated > plain.exp_emulated == 0
    assert (plain.fma_emulated, plain.alu_emulated, plain.issue_emulated) == (0, 0, 0)
    assert emulated.exp_emulated == plain.exp - emulated.exp
    assert emulated.fma_emulated == emulated.fma - plain.fma
    assert emulated.alu_emulated == emulated.alu - plain.alu
    # a warp issues one instruction for 32 exponentials, which it is spared
    assert emulated.issue_emulated - emulated.exp_emulated // 32 == emulated.issue - plain.issue
