"""FlashAttention v1: exact against the reference, and its HBM traffic against closed formulas."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fa4tune.errors import ConfigError, ProblemError
from fa4tune.kernels import reference
from fa4tune.kernels.flash_v1 import (
    Blocks,
    Ledger,
    block_sizes,
    flash_attention,
    flash_attention_backward,
    standard_attention,
    standard_attention_backward,
)

Array = NDArray[np.float64]


def matrices(
    seed: int, seqlen_q: int, seqlen_k: int, head_dim: int, spread: float = 1.0
) -> tuple[Array, ...]:
    """q, k, v, dout of one head."""
    rng = np.random.default_rng(seed)
    q, dout = (rng.standard_normal((seqlen_q, head_dim)) for _ in range(2))
    k, v = (rng.standard_normal((seqlen_k, head_dim)) for _ in range(2))
    return q * spread, k, v, dout


def one_head(*arrays: Array) -> list[torch.Tensor]:
    return [torch.from_numpy(array)[None, :, None, :] for array in arrays]


def reference_forward(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Array]:
    out, lse = reference.attention(*one_head(q, k, v), **options)
    return out[0, :, 0].numpy(), lse[0, 0].numpy()


def reference_backward(q: Array, k: Array, v: Array, dout: Array, **options: Any) -> list[Array]:
    gradients = reference.attention_backward(*one_head(q, k, v, dout), **options)
    return [gradient[0, :, 0].numpy() for gradient in gradients]


def assert_exact(actual: Array, expected: Array) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-12 * max(1.0, np.abs(expected).max()))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sram_elements", [16, 200, 1000, 5000, 10**6])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "head_dim"), [(64, 64, 8), (37, 53, 5), (50, 20, 16)])
@pytest.mark.parametrize("spread", [1.0, 40.0])
def test_forward_and_backward_are_exact(
    causal: bool, sram_elements: int, seqlen_q: int, seqlen_k: int, head_dim: int, spread: float
) -> None:
    q, k, v, dout = matrices(1, seqlen_q, seqlen_k, head_dim, spread)
    forward = flash_attention(q, k, v, sram_elements=sram_elements, causal=causal)
    out, lse = reference_forward(q, k, v, causal=causal)
    assert_exact(forward.out, out)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(forward.row_max + np.log(forward.row_sum), lse, rtol=1e-12, atol=1e-12)
    backward = flash_attention_backward(q, k, v, dout, forward, sram_elements=sram_elements, causal=causal)
    for actual, expected in zip(backward[:3], reference_backward(q, k, v, dout, causal=causal), strict=True):
        assert_exact(actual, expected)


@pytest.mark.parametrize("causal", [False, True])
def test_standard_attention_is_exact(causal: bool) -> None:
    q, k, v, dout = matrices(2, 45, 31, 7)
    forward = standard_attention(q, k, v, causal=causal, softmax_scale=0.2)
    assert_exact(forward.out, reference_forward(q, k, v, causal=causal, softmax_scale=0.2)[0])
    backward = standard_attention_backward(q, k, v, dout, causal=causal, softmax_scale=0.2)
    expected = reference_backward(q, k, v, dout, causal=causal, softmax_scale=0.2)
    for actual, gradient in zip(backward[:3], expected, strict=True):
        assert_exact(actual, gradient)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 40),
    columns=st.integers(1, 40),
    seqlen_q=st.integers(1, 40),
    seqlen_k=st.integers(1, 40),
)
def test_result_does_not_depend_on_blocks(
    seed: int, rows: int, columns: int, seqlen_q: int, seqlen_k: int
) -> None:
    q, k, v, _ = matrices(seed, seqlen_q, seqlen_k, 4, spread=5.0)
    blocked = flash_attention(q, k, v, blocks=Blocks(rows, columns))
    whole = flash_attention(q, k, v, blocks=Blocks(seqlen_q, seqlen_k))
    assert_exact(blocked.out, whole.out)
    assert_exact(blocked.row_max, whole.row_max)


def test_no_keys_and_no_queries() -> None:
    q, k, v, dout = matrices(3, 4, 0, 3)
    forward = flash_attention(q, k, v, sram_elements=100)
    assert not forward.out.any()
    assert np.all(np.isneginf(forward.row_max))
    assert not standard_attention(q, k, v).out.any()
    backward = flash_attention_backward(q, k, v, dout, forward, sram_elements=100)
    assert not backward.dq.any()
    assert flash_attention(k, q, q, sram_elements=100).out.shape == (0, 3)


@pytest.mark.parametrize(
    ("sram_elements", "head_dim", "rows", "columns"),
    [
        (48_000, 64, 64, 188),
        (16_384, 64, 64, 64),
        (4_000, 64, 16, 16),
        (51_200, 128, 100, 100),
        (1, 64, 1, 1),
    ],
)
def test_block_sizes_follow_sram(sram_elements: int, head_dim: int, rows: int, columns: int) -> None:
    assert block_sizes(sram_elements, head_dim) == Blocks(rows=rows, columns=columns)


@pytest.mark.parametrize("blocks", [Blocks(8, 16), Blocks(16, 8), Blocks(7, 11), Blocks(100, 100)])
def test_forward_ledger_equals_closed_formula(blocks: Blocks) -> None:
    seqlen_q, seqlen_k, d = 48, 80, 8
    q, k, v, _ = matrices(4, seqlen_q, seqlen_k, d)
    ledger = flash_attention(q, k, v, blocks=blocks).ledger
    passes = -(-seqlen_k // blocks.columns)
    assert ledger.reads == {
        "K": seqlen_k * d,
        "V": seqlen_k * d,
        "Q": passes * seqlen_q * d,
        "O": passes * seqlen_q * d,
        "l": passes * seqlen_q,
        "m": passes * seqlen_q,
    }
    assert ledger.writes == {
        "initial O": seqlen_q * d,
        "initial l": seqlen_q,
        "initial m": seqlen_q,
        "O": passes * seqlen_q * d,
        "l": passes * seqlen_q,
        "m": passes * seqlen_q,
    }
    assert ledger.elements() == 2 * seqlen_k * d + (3 * d + 4) * passes * seqlen_q + (d + 2) * seqlen_q


@pytest.mark.parametrize("blocks", [Blocks(8, 16), Blocks(7, 11), Blocks(100, 100)])
def test_backward_ledger_equals_closed_formula(blocks: Blocks) -> None:
    seqlen_q, seqlen_k, d = 48, 80, 8
    q, k, v, dout = matrices(5, seqlen_q, seqlen_k, d)
    forward = flash_attention(q, k, v, blocks=blocks)
    ledger = flash_attention_backward(q, k, v, dout, forward, blocks=blocks).ledger
    passes = -(-seqlen_k // blocks.columns)
    rows, keys = seqlen_q * d, seqlen_k * d
    assert ledger.reads == {
        "K": keys,
        "V": keys,
        **dict.fromkeys(("Q", "O", "dO", "dQ"), passes * rows),
        **dict.fromkeys(("l", "m"), passes * seqlen_q),
    }
    assert ledger.writes == {
        "initial dQ": rows,
        "initial dK": keys,
        "initial dV": keys,
        "dQ": passes * rows,
        "dK": keys,
        "dV": keys,
    }


def test_standard_ledgers_equal_closed_formulas() -> None:
    seqlen_q, seqlen_k, d = 48, 80, 8
    q, k, v, dout = matrices(6, seqlen_q, seqlen_k, d)
    square = seqlen_q * seqlen_k
    assert standard_attention(q, k, v).ledger.elements() == 4 * square + 2 * (seqlen_q + seqlen_k) * d
    backward = standard_attention_backward(q, k, v, dout).ledger
    # Reads P twice, dP, dS twice; writes dP, dS.
    assert backward.elements() == 7 * square + (4 * seqlen_q + 4 * seqlen_k) * d


def test_bytes_take_a_size_for_each_tensor() -> None:
    ledger = Ledger()
    ledger.load(Q=np.zeros((3, 5)), l=np.zeros(3))
    ledger.store(O=np.zeros((3, 5)), l=np.zeros(3))
    assert ledger.bytes(2) == 2 * 36
    assert ledger.bytes(2, {"l": 4}) == 2 * 30 + 4 * 6
    assert ledger.bytes(2, {"l": 0, "O": 8}) == 2 * 15 + 8 * 15


def test_bad_arguments_give_one_sentence() -> None:
    q, k, v, dout = matrices(7, 6, 5, 4)
    forward = flash_attention(q, k, v, sram_elements=50)
    with pytest.raises(ConfigError, match="exactly one"):
        flash_attention(q, k, v)
    with pytest.raises(ConfigError, match="exactly one"):
        flash_attention(q, k, v, sram_elements=50, blocks=Blocks(2, 2))
    with pytest.raises(ConfigError, match="0 rows"):
        flash_attention(q, k, v, blocks=Blocks(0, 2))
    with pytest.raises(ConfigError, match="at least 1 element"):
        flash_attention(q, k, v, sram_elements=0)
    with pytest.raises(ProblemError, match="share head_dim"):
        standard_attention(q, k[:, :3], v)
    with pytest.raises(ProblemError, match="float32"):
        flash_attention(q.astype(np.float32), k, v, sram_elements=50)  # type: ignore[arg-type]
    for backward in (
        lambda: flash_attention_backward(q, k, v, dout[:5], forward, sram_elements=50),
        lambda: standard_attention_backward(q, k, v, dout[:5]),
    ):
        with pytest.raises(ProblemError, match="shape of out"):
            backward()
