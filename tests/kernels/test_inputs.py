"""The gate's inputs: shapes, determinism, and the properties that make heavy-tailed inputs a hard case."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fa4tune.kernels.inputs import AttentionInputs, gaussian_inputs, heavy_tailed_inputs

Generator = Callable[..., AttentionInputs]
SIZES = {
    "batch": 1,
    "heads": 4,
    "kv_heads": 2,
    "seqlen_q": 512,
    "seqlen_k": 1024,
    "head_dim": 64,
    "head_dim_v": 32,
}
both = pytest.mark.parametrize("generator", [gaussian_inputs, heavy_tailed_inputs])


def scores_log2(x: AttentionInputs) -> Tensor:
    """Scores (batch, heads, seqlen_q, seqlen_k) in log2 units at the default scale."""
    k = x.k.double().repeat_interleave(x.q.shape[2] // x.k.shape[2], 2)
    return torch.einsum("bihd,bjhd->bhij", x.q.double(), k) * (math.log2(math.e) / math.sqrt(x.q.shape[3]))


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_shapes_dtypes_and_finite_values(generator: Generator, dtype: torch.dtype) -> None:
    x = generator(**SIZES, dtype=dtype)
    assert [tuple(tensor.shape) for tensor in x] == [
        (1, 512, 4, 64),
        (1, 1024, 2, 64),
        (1, 1024, 2, 32),
        (1, 512, 4, 32),
    ]
    assert all(tensor.dtype == dtype and bool(tensor.isfinite().all()) for tensor in x)


@both
def test_seed_decides_everything_and_global_generator_is_untouched(generator: Generator) -> None:
    before = torch.random.get_rng_state()
    first = generator(**SIZES, seed=3)
    torch.manual_seed(123)
    again = generator(**SIZES, seed=3)
    other = generator(**SIZES, seed=4)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    torch.random.set_rng_state(before)
    generator(**SIZES, seed=3)
    assert torch.equal(torch.random.get_rng_state(), before)


@both
@pytest.mark.parametrize("empty", ["batch", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v"])
def test_empty_sizes(generator: Generator, empty: str) -> None:
    x = generator(**{**SIZES, empty: 0})
    assert any(tensor.numel() == 0 for tensor in x)


@both
def test_bad_sizes_are_refused(generator: Generator) -> None:
    with pytest.raises(ValueError, match="3 does not divide 4"):
        generator(**{**SIZES, "kv_heads": 3})
    with pytest.raises(ValueError, match="seqlen_k must not be negative, but is -1"):
        generator(**{**SIZES, "seqlen_k": -1})


def test_gaussian_inputs_are_standard_normal_and_independent() -> None:
    x = gaussian_inputs(**SIZES, dtype=torch.float32)
    for tensor in x:
        assert tensor.mean().item() == pytest.approx(0.0, abs=0.03)
        assert tensor.std().item() == pytest.approx(1.0, abs=0.03)
        assert correlation(tensor, 1) == pytest.approx(0.0, abs=0.03)
    assert scores_log2(x).std().item() == pytest.approx(math.log2(math.e), rel=0.05)


def correlation(tensor: Tensor, dim: int) -> float:
    """Correlation of neighbours along a dimension."""
    length = tensor.shape[dim]
    pair = torch.stack(
        [tensor.narrow(dim, 0, length - 1).flatten(), tensor.narrow(dim, 1, length - 1).flatten()]
    )
    return torch.corrcoef(pair.double())[0, 1].item()


def test_heavy_tailed_inputs_are_correlated_and_heavy_tailed() -> None:
    x = heavy_tailed_inputs(**{**SIZES, "seqlen_k": 8192}, dtype=torch.float32)
    texture = x.v[..., 1:]  # without the outlier channel
    assert texture.std().item() == pytest.approx(1.0, abs=0.1)
    assert correlation(texture, 1) > 0.8
    assert 0.35 < correlation(texture, 3) < 0.6
    kurtosis = (texture**4).mean() / (texture**2).mean() ** 2
    assert kurtosis > 5.0  # 3 for Gaussian elements
    assert x.v[..., 0].std() > 5 * texture.std()


@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_heavy_tailed_inputs_have_outlier_channels_shared_by_q_and_k(head_dim: int) -> None:
    x = heavy_tailed_inputs(**{**SIZES, "head_dim": head_dim}, dtype=torch.float32)
    for kv_head in range(2):
        k_mean = x.k[0, 512:, kv_head].mean(0)
        outliers = k_mean.abs().topk(head_dim // 32).indices
        assert k_mean[outliers].abs().min() > 4 * k_mean.abs().median()
        for head in (2 * kv_head, 2 * kv_head + 1):
            q_mean = x.q[0, :, head].mean(0)
            assert torch.equal(q_mean[outliers].sign(), k_mean[outliers].sign())
            # The factor of the last head is a quarter.
            assert q_mean[outliers].abs().min() > 1.0


@pytest.mark.parametrize("head_dim", [64, 128, 192])
@pytest.mark.parametrize("seed", [0, 1])
def test_heavy_tailed_scores_span_tens_of_log2_units_and_grow(head_dim: int, seed: int) -> None:
    x = heavy_tailed_inputs(**{**SIZES, "head_dim": head_dim}, seed=seed)
    scores = scores_log2(x)
    row_max = scores.amax(-1)
    assert row_max.median() > 20
    assert row_max.amax() > 50
    running = scores.unflatten(-1, (-1, 128)).amax(-1).cummax(-1).values
    growth = running[..., -1] - running[..., 0]
    # More than twice over a rescale threshold of 8 in a typical row, and over it in most.
    assert growth.median() > 16
    assert (growth > 8).double().mean() > 0.6
    sharpness = torch.softmax(scores * math.log(2), -1).amax(-1)
    assert sharpness.median() > 0.2


def test_gaussian_scores_are_neither_wide_nor_sharp() -> None:
    scores = scores_log2(gaussian_inputs(**SIZES))
    assert scores.amax() < 12
    assert torch.softmax(scores * math.log(2), -1).amax(-1).median() < 0.05
