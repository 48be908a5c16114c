"""The float64 reference against torch's own attention and autograd, and the error yardstick."""

import ast
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fa4tune.kernels import reference
from fa4tune.kernels.exp2 import POLYNOMIALS, emulated_columns, exp2_polynomial
from fa4tune.kernels.inputs import gaussian_inputs, heavy_tailed_inputs

Window = tuple[int | None, int | None]


def tensors(
    seed: int,
    batch: int = 2,
    seqlen_q: int = 9,
    seqlen_k: int = 13,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    head_dim_v: int = 6,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [
        (batch, seqlen_q, heads, head_dim),
        (batch, seqlen_k, kv_heads, head_dim),
        (batch, seqlen_k, kv_heads, head_dim_v),
        (batch, seqlen_q, heads, head_dim_v),
    ]
    q, k, v, dout = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return q, k, v, dout


def visible(seqlen_q: int, seqlen_k: int, causal: bool = False, window: Window = (None, None)) -> Tensor:
    """The masks' definition, pair by pair."""
    table = torch.zeros(seqlen_q, seqlen_k, dtype=torch.bool)
    for row in range(seqlen_q):
        position = row + seqlen_k - seqlen_q
        for key in range(seqlen_k):
            table[row, key] = (
                (not causal or key <= position)
                and (window[0] is None or key >= position - window[0])
                and (window[1] is None or key <= position + window[1])
            )
    return table


def torch_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None = None) -> Tensor:
    """torch's scaled_dot_product_attention in this package's layout; rows without a key are set to 0."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    mask = mask.expand(*q.shape[:3], k.shape[2])
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return torch.where(mask.any(-1, keepdim=True), out, 0.0).transpose(1, 2)


def torch_lse(q: Tensor, k: Tensor, mask: Tensor, scale: float) -> Tensor:
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(q.shape[2] // k.shape[2], 2)) * scale
    return torch.logsumexp(scores.masked_fill(~mask, -math.inf), -1)


MASKS: list[tuple[bool, Window]] = [
    (False, (None, None)),
    (True, (None, None)),
    (False, (3, 2)),
    (False, (0, 0)),
    (False, (None, 1)),
    (False, (2, None)),
    (True, (4, 7)),
]
SHAPES = [(9, 13), (13, 9), (8, 8), (1, 17), (17, 1)]


@pytest.fixture(params=[1 << 24, 50], ids=["one piece", "many pieces"])
def piece_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(reference, "SCORES_PER_PIECE", request.param)
    return int(request.param)


@pytest.mark.usefixtures("piece_size")
@pytest.mark.parametrize(("causal", "window"), MASKS)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), SHAPES)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_forward_matches_torch(
    causal: bool, window: Window, seqlen_q: int, seqlen_k: int, kv_heads: int
) -> None:
    q, k, v, _ = tensors(1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, kv_heads=kv_heads)
    mask = visible(seqlen_q, seqlen_k, causal, window)
    out, lse = reference.attention(q, k, v, causal=causal, window=window)
    torch.testing.assert_close(out, torch_attention(q, k, v, mask), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(lse, torch_lse(q, k, mask, 8**-0.5), rtol=1e-12, atol=1e-13)


@pytest.mark.usefixtures("piece_size")
@pytest.mark.parametrize(("causal", "window"), MASKS)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), SHAPES)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_backward_matches_autograd(
    causal: bool, window: Window, seqlen_q: int, seqlen_k: int, kv_heads: int
) -> None:
    q, k, v, dout = tensors(2, seqlen_q=seqlen_q, seqlen_k=seqlen_k, kv_heads=kv_heads)
    mask = visible(seqlen_q, seqlen_k, causal, window)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    scores = torch.einsum("bihd,bjhd->bhij", leaves[0], leaves[1].repeat_interleave(4 // kv_heads, 2)) * 0.3
    # A large finite number in place of -inf keeps autograd free of NaN; such rows are then removed.
    probabilities = torch.softmax(scores.masked_fill(~mask, -1e30), -1) * mask
    expected = torch.einsum("bhij,bjhd->bihd", probabilities, leaves[2].repeat_interleave(4 // kv_heads, 2))
    expected.backward(dout)
    gradients = reference.attention_backward(q, k, v, dout, softmax_scale=0.3, causal=causal, window=window)
    for gradient, leaf in zip(gradients, leaves, strict=True):
        torch.testing.assert_close(gradient, leaf.grad, rtol=1e-11, atol=1e-12)


@pytest.mark.usefixtures("piece_size")
@pytest.mark.parametrize("shape", [(9, 13), (1, 1, 9, 13), (2, 1, 9, 13), (1, 4, 1, 13), (2, 4, 9, 13)])
def test_explicit_mask_broadcasts_and_combines(shape: tuple[int, ...]) -> None:
    q, k, v, dout = tensors(3)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(4)) < 0.4
    both = mask & visible(9, 13, causal=True)
    out, lse = reference.attention(q, k, v, causal=True, mask=mask)
    torch.testing.assert_close(out, torch_attention(q, k, v, both), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(lse, torch_lse(q, k, both, 8**-0.5), rtol=1e-12, atol=1e-13)
    combined = reference.attention_backward(q, k, v, dout, mask=both)
    for gradient, same in zip(
        reference.attention_backward(q, k, v, dout, causal=True, mask=mask), combined, strict=True
    ):
        torch.testing.assert_close(gradient, same, rtol=1e-12, atol=1e-13)


def test_rows_without_a_key_give_zero_and_minus_infinity() -> None:
    q, k, v, dout = tensors(5, seqlen_q=6, seqlen_k=4)
    for out, lse in (
        reference.attention(q, k, v, causal=True),
        reference.attention_rounded(q.float(), k.float(), v.float(), causal=True),
    ):
        assert not out[:, :2].any()
        assert torch.all(lse[:, :, :2] == -math.inf)
        assert out[:, 2:].abs().min() > 0
        assert torch.all(lse[:, :, 2:].isfinite())
    dq, dk, dv = reference.attention_backward(q, k, v, dout, causal=True)
    assert not dq[:, :2].any()
    assert all(torch.all(gradient.isfinite()) for gradient in (dq, dk, dv))


@pytest.mark.parametrize("empty", ["batch", "seqlen_q", "seqlen_k", "heads", "head_dim_v"])
def test_empty_dimensions(empty: str) -> None:
    sizes = {empty: 0} if empty != "heads" else {"heads": 0, "kv_heads": 1}
    q, k, v, dout = tensors(6, **sizes)
    out, lse = reference.attention(q, k, v)
    assert out.shape == dout.shape
    assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    if empty == "seqlen_k":
        assert not out.any()
        assert torch.all(lse == -math.inf)
    rounded, _ = reference.attention_rounded(q, k, v)
    assert rounded.shape == out.shape
    for gradient, tensor in zip(reference.attention_backward(q, k, v, dout), (q, k, v), strict=True):
        assert gradient.shape == tensor.shape
        assert not gradient.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_inputs_are_taken_as_exact(dtype: torch.dtype) -> None:
    q, k, v, _ = (x.to(dtype) for x in tensors(7))
    out, lse = reference.attention(q, k, v)
    assert out.dtype == lse.dtype == torch.float64
    again, _ = reference.attention(q.double(), k.double(), v.double())
    assert torch.equal(out, again)


def test_large_scores_do_not_overflow() -> None:
    q, k, v, dout = tensors(8)
    out, lse = reference.attention(q * 1e3, k * 1e3, v)
    assert torch.all(out.isfinite())
    assert torch.all(lse.isfinite())
    best = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)).amax(-1) * 1e6 / 8**0.5
    torch.testing.assert_close(lse, best, rtol=1e-6, atol=1.0)
    gradients = reference.attention_backward(q * 1e3, k * 1e3, v, dout)
    assert all(torch.all(gradient.isfinite()) for gradient in gradients)


def test_views_and_recorded_tensors_are_accepted() -> None:
    q, k, v, dout = tensors(9)
    expected, _ = reference.attention(q, k, v)
    strided = [x.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2).requires_grad_() for x in (q, k, v)]
    out, _ = reference.attention(*strided)
    assert not out.requires_grad
    assert torch.equal(out, expected)
    plain = reference.attention_backward(q, k, v, dout)
    for a, b in zip(reference.attention_backward(*strided, dout), plain, strict=True):
        assert torch.equal(a, b)


def test_pieces_are_bounded_and_skip_what_no_row_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "SCORES_PER_PIECE", 2048)
    sizes = []
    softmax = reference._softmax

    def recording(call: reference._Call, piece: reference._Piece) -> tuple[Tensor, Tensor]:
        probabilities, lse = softmax(call, piece)
        sizes.append(probabilities.numel())
        return probabilities, lse

    monkeypatch.setattr(reference, "_softmax", recording)
    q, k, v, _ = tensors(10, seqlen_q=128, seqlen_k=128)
    reference.attention(q, k, v)
    assert max(sizes) <= 2048
    assert sum(sizes) == 2 * 4 * 128 * 128
    sizes.clear()
    reference.attention(q, k, v, causal=True)
    assert sum(sizes) < 0.54 * 2 * 4 * 128 * 128
    sizes.clear()
    reference.attention(q, k, v, window=(15, 0))
    assert sum(sizes) < 0.2 * 2 * 4 * 128 * 128


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    seqlen_q=st.integers(1, 20),
    seqlen_k=st.integers(1, 20),
    left=st.none() | st.integers(0, 20),
    right=st.none() | st.integers(0, 20),
)
def test_out_is_a_mean_of_visible_values(
    seed: int, seqlen_q: int, seqlen_k: int, left: int | None, right: int | None
) -> None:
    q, k, v, _ = tensors(seed, batch=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads=2, kv_heads=1)
    mask = visible(seqlen_q, seqlen_k, window=(left, right))
    out, _ = reference.attention(q, k, v, window=(left, right))
    for row in range(seqlen_q):
        seen = v[0, mask[row], 0]
        if len(seen) == 0:
            assert not out[0, row].any()
        else:
            assert torch.all(out[0, row] <= seen.amax(0) + 1e-12)
            assert torch.all(out[0, row] >= seen.amin(0) - 1e-12)


@pytest.mark.parametrize("generator", [gaussian_inputs, heavy_tailed_inputs])
@pytest.mark.parametrize(
    ("dtype", "low", "high"), [(torch.bfloat16, 1e-3, 3e-3), (torch.float16, 1.2e-4, 4e-4)]
)
def test_rounded_error_is_that_of_the_dtype(generator, dtype: torch.dtype, low: float, high: float) -> None:  # type: ignore[no-untyped-def]
    x = generator(
        batch=1, heads=4, kv_heads=2, seqlen_q=256, seqlen_k=384, head_dim=64, head_dim_v=64, dtype=dtype
    )
    exact, exact_lse = reference.attention(x.q, x.k, x.v, causal=True)
    out, lse = reference.attention_rounded(x.q, x.k, x.v, causal=True)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    yardstick = reference.errors_against(out, exact).rms
    assert low < yardstick < high
    assert reference.errors_against(lse, exact_lse).rms < 1e-6
    # Torch's own kernel of that precision passes the bound that ours must pass.
    peer = torch_attention(x.q, x.k, x.v, visible(256, 384, causal=True))
    assert reference.errors_against(peer, exact).rms < 1.3 * yardstick
    unrounded, _ = reference.attention_rounded(x.q, x.k, x.v, causal=True, dtype=torch.float32)
    assert reference.errors_against(unrounded, exact).rms < 1e-6


def test_rounded_error_comes_from_p_as_well_as_from_o() -> None:
    x = gaussian_inputs(batch=1, heads=2, kv_heads=2, seqlen_q=128, seqlen_k=128, head_dim=64, head_dim_v=64)
    exact, _ = reference.attention(x.q, x.k, x.v)
    only_o = reference.errors_against(exact.to(torch.bfloat16), exact).rms
    rounded, _ = reference.attention_rounded(x.q, x.k, x.v)
    assert reference.errors_against(rounded, exact).rms > 1.2 * only_o


def test_emulated_exponential_stays_within_the_bound_at_degree_three_but_not_one() -> None:
    x = gaussian_inputs(batch=1, heads=2, kv_heads=2, seqlen_q=128, seqlen_k=384, head_dim=64, head_dim_v=64)
    exact, _ = reference.attention(x.q, x.k, x.v)
    columns = emulated_columns(128, 4, 0)
    plain, _ = reference.attention_rounded(x.q, x.k, x.v)
    bound = 1.3 * reference.errors_against(plain, exact).rms
    errors = {}
    for degree in (1, 2, 3):
        emulation = reference.polynomial_exp2(POLYNOMIALS[degree], columns)
        out, _ = reference.attention_rounded(x.q, x.k, x.v, exp2=emulation)
        errors[degree] = reference.errors_against(out, exact).rms
    assert errors[3] < errors[2] < bound < errors[1]


@pytest.mark.parametrize("degree", POLYNOMIALS)
def test_polynomial_exponential_is_the_kernels_bit_for_bit(degree: int) -> None:
    x = np.concatenate(
        [
            np.random.default_rng(1).uniform(-130, 20, 60_000),
            np.random.default_rng(2).uniform(-1, 1, 60_000),
            [0.0, -0.0, -127.0, -126.5, -1e30, -np.inf, 8.0],
        ]
    ).astype(np.float32)
    columns = torch.zeros(len(x), dtype=torch.int64)
    emulated = reference.polynomial_exp2(POLYNOMIALS[degree], (True,))(torch.from_numpy(x), columns)
    assert np.array_equal(emulated.numpy(), exp2_polynomial(x, degree))


def test_polynomial_exponential_applies_to_its_columns_of_each_tile() -> None:
    x = torch.linspace(-3, 0, 64).expand(2, 64)
    pattern = emulated_columns(32, 8, 0)
    result = reference.polynomial_exp2((2.0,), pattern)(x, torch.arange(16, 80))
    hardware = torch.exp2(x)
    for column, key in enumerate(range(16, 80)):
        wanted = 2.0 * 2.0 ** math.floor(x[0, column]) if pattern[key % 32] else hardware[0, column]
        assert result[0, column] == wanted


def test_errors_against_sees_one_wrong_element_and_infinities() -> None:
    exact = torch.ones(100, dtype=torch.float64)
    wrong = exact.clone()
    wrong[7] = 3.0
    assert reference.errors_against(wrong, exact) == pytest.approx((0.2, 2.0))
    assert reference.errors_against(exact, exact) == (0.0, 0.0)
    exact[3] = wrong[3] = -math.inf
    assert reference.errors_against(exact, exact) == (0.0, 0.0)
    assert math.isfinite(reference.errors_against(wrong, exact).rms)
    wrong[3] = 0.0
    assert reference.errors_against(wrong, exact) == (math.inf, math.inf)
    wrong[3] = math.nan
    assert reference.errors_against(wrong, exact) == (math.inf, math.inf)
    zeros = torch.zeros(3)
    assert reference.errors_against(zeros, zeros) == (0.0, 0.0)
    assert reference.errors_against(zeros + 1e-9, zeros) == (math.inf, math.inf)


def test_bad_arguments_give_one_sentence() -> None:
    q, k, v, dout = tensors(11)
    wrong_heads = torch.zeros(2, 13, 3, 8)
    cases = [
        ((q[0], k, v), {}, "must be"),
        ((q.long(), k, v), {}, "float dtype"),
        ((q, wrong_heads, wrong_heads), {}, "3 does not divide 4"),
        ((q, k[:1], v[:1]), {}, "batch must agree"),
        ((q, k, v[:, :5]), {}, "do not fit"),
        ((q, k, v), {"window": (-1, 0)}, "not -1"),
        ((q, k, v), {"mask": torch.ones(9, 13)}, "boolean"),
        ((q, k, v), {"mask": torch.ones(9, 12, dtype=torch.bool)}, "broadcast"),
        ((q.to("meta"), k, v), {}, "on meta and k on cpu"),
    ]
    for arguments, options, words in cases:
        with pytest.raises(ValueError, match=words):
            reference.attention(*arguments, **options)
    with pytest.raises(ValueError, match="shape of out"):
        reference.attention_backward(q, k, v, dout[:, :3])
    with pytest.raises(ValueError, match="cannot compare"):
        reference.errors_against(q, k)


@pytest.mark.parametrize("name", ["reference", "inputs"])
def test_exported_files_import_torch_numpy_and_the_standard_library_only(name: str) -> None:
    tree = ast.parse((Path(reference.__file__).parent / f"{name}.py").read_text())
    roots = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            roots.add(str(node.module).split(".")[0])
    assert roots <= set(sys.stdlib_module_names) | {"torch", "numpy"}
