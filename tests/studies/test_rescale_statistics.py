"""The rescale study: its softmax is right, thresholds spare rescales, and the kernel takes as many."""

import math
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fa4tune.emulator.attention import emulate_forward
from fa4tune.hardware.gpu import load_gpu
from fa4tune.kernels.config import SM100ForwardConfig
from fa4tune.kernels.inputs import AttentionInputs, heavy_tailed_inputs
from fa4tune.kernels.sm100.forward_plan import build_plan
from fa4tune.problem import AttentionProblem
from tests.study import load_study

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def study() -> ModuleType:
    return load_study("rescale_statistics")


def drawn(seqlen_q: int = 256, seqlen_k: int = 1024) -> AttentionInputs:
    return heavy_tailed_inputs(
        batch=1, heads=1, kv_heads=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=64, head_dim_v=64
    )


@pytest.mark.parametrize("causal", [False, True])
def test_a_threshold_spares_rescales_and_keeps_the_result(study: ModuleType, causal: bool) -> None:
    x = drawn(300, 700)
    walked = [study.walk(x.q, x.k, x.v, t, causal=causal) for t in (0.0, 4.0, 8.0, math.inf)]
    for name in ("rows", "warps"):
        shares = [getattr(w, name) for w in walked]
        assert shares == sorted(shares, reverse=True)
        assert shares[0] > shares[-1] == 0
    assert all(w.error < 1.3 for w in walked[:3])
    assert walked[0].largest == 0
    assert 0 < walked[1].largest <= 4


def test_a_row_rescales_with_its_warp_at_the_least(study: ModuleType) -> None:
    x = drawn()
    walked = study.walk(x.q, x.k, x.v, 2.0, causal=False, last_first=False)
    assert walked.rows <= walked.warps <= study.WARP * walked.rows


@pytest.mark.parametrize("threshold", [0.0, 4.0])
def test_the_kernel_rescales_as_often_as_the_study_says(study: ModuleType, threshold: float) -> None:
    """Factors that the executed kernel computed, in warps, against the simulated share."""
    problem = AttentionProblem(1, 1, 1, 256, 1024, 64, 64, "bf16", "full")
    config = SM100ForwardConfig(kv_stages=4, exp2_share=0.0, rescale_threshold=threshold, scheduler="single")
    x = drawn()
    walked = study.walk(x.q, x.k, x.v, threshold, causal=False)
    b200 = load_gpu("b200")
    call = emulate_forward(problem, config, b200, inputs=(x.q, x.k, x.v), counters=True)
    assert call.passed
    assert call.results[0].counters is not None
    trips, warps = 8, 8
    exponentials = call.results[0].counters.total().exponentials["mufu"]
    plain = sum(
        operation.work.exp * times
        for operation, times in build_plan(problem, config, b200).operations(trips)
        if operation.name.startswith("exp")
    )
    taken = (exponentials - plain) // 32
    # scores next to the threshold may fall on either side: sums are rounded in another order
    assert taken / (warps * (trips - 1)) == pytest.approx(walked.warps, abs=0.04)


def test_model_learns_and_gives_its_layers_inputs(study: ModuleType) -> None:
    model, loss = study.train(steps=12)
    assert loss < math.log(256)
    layers = list(study.layer_inputs(model, 130))
    assert len(layers) == 3
    for q, k, v in layers:
        assert q.shape == k.shape == v.shape == (1, 130, 4, 64)
        assert q.dtype == torch.bfloat16


def test_figure_is_drawn(study: ModuleType, tmp_path: Path) -> None:
    x = drawn(64, 256)
    results = {"one": [study.walk(x.q, x.k, x.v, t, causal=True) for t in (0.0, 8.0)]}
    study.draw(results, tmp_path / "figures" / "f.png")
    assert (tmp_path / "figures" / "f.png").stat().st_size > 1000
