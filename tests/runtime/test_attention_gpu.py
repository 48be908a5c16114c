"""The attention call on a GPU: right on odd shapes and strides, on streams, in CUDA graphs."""

from __future__ import annotations

import pytest
import torch

from fa4tune.errors import CompileError, LaunchError
from fa4tune.kernels.reference import attention, attention_rounded, errors_against
from fa4tune.runtime import attention as runtime
from fa4tune.runtime.attention import flash_attn_func, last_dispatch

pytestmark = pytest.mark.gpu

BOUND = 1.3
"""Error allowed over that of float32 attention with P and O rounded."""


def tensors(
    batch: int = 2,
    seqlen_q: int = 200,
    seqlen_k: int = 333,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 128,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(5)
    shapes = (
        (batch, seqlen_q, heads, dim),
        (batch, seqlen_k, kv_heads, dim),
        (batch, seqlen_k, kv_heads, dim),
    )
    q, k, v = (torch.randn(s, generator=generator, device="cuda").bfloat16() for s in shapes)
    return q, k, v


def call(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """flash_attn_func with LSE by a kernel; skips where none can be compiled."""
    try:
        result = flash_attn_func(q, k, v, causal=causal, return_lse=True)
    except CompileError as error:
        pytest.skip(f"no compiler and no carried object: {error}")
    dispatch = last_dispatch()
    assert dispatch is not None
    assert dispatch.kernel, dispatch.reason
    assert isinstance(result, tuple)
    return result


def assert_right(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> None:
    out, lse = call(q, k, v, causal)
    exact, exact_lse = attention(q, k, v, causal=causal)
    rounded, _ = attention_rounded(q, k, v, causal=causal)
    assert errors_against(out, exact).rms <= BOUND * errors_against(rounded, exact).rms
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=5e-3)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"), [(200, 333), (333, 200), (1, 1000), (128, 1), (1024, 1024)]
)
def test_result_is_within_the_error_bound(dim: int, causal: bool, seqlen_q: int, seqlen_k: int) -> None:
    assert_right(*tensors(seqlen_q=seqlen_q, seqlen_k=seqlen_k, dim=dim), causal)


def test_strided_and_misaligned_inputs_give_the_same_result_as_contiguous_ones() -> None:
    q, k, v = tensors()
    packed = torch.randn(2, 333, 3, 4, 128, device="cuda").bfloat16()
    assert_right(*(packed[:, :, i] for i in range(3)), causal=True)
    assert last_dispatch().copies == ()  # type: ignore[union-attr]
    shifted = torch.empty(q.numel() + 1, dtype=q.dtype, device="cuda")[1:].view(q.shape).copy_(q)
    out, lse = call(shifted, k, v, True)
    assert last_dispatch().copies == ("q",)  # type: ignore[union-attr]
    expected, expected_lse = call(q, k, v, True)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


def test_call_runs_on_the_current_stream() -> None:
    q, k, v = tensors(seqlen_q=2048, seqlen_k=2048)
    expected, _ = call(q, k, v, False)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late = q * 1.0
        out, _ = call(late, k, v, False)
        done = torch.cuda.Event()
        done.record()
    assert not done.query()  # launched behind the sleep, not beside it
    stream.synchronize()
    assert torch.equal(out, expected)


def test_call_is_captured_in_a_graph_and_replays_on_new_inputs() -> None:
    q, k, v = tensors()
    call(q, k, v, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call(q, k, v, True)
    q.copy_(torch.randn_like(q))
    graph.replay()
    expected, expected_lse = call(q, k, v, True)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


def test_first_call_inside_a_capture_is_refused() -> None:
    q, k, v = tensors(seqlen_q=77)
    call(q, k, v, False)
    runtime.reset()
    with (
        pytest.raises(LaunchError, match="inside a CUDA graph capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        flash_attn_func(q, k, v)


def test_float32_takes_the_torch_path_and_says_so_once() -> None:
    q, k, v = (t.float() for t in tensors())
    runtime.reset()
    with pytest.warns(runtime.DispatchWarning, match="no kernel takes torch.float32"):
        out = flash_attn_func(q, k, v, causal=True)
    assert isinstance(out, torch.Tensor)
    exact, _ = attention(q, k, v, causal=True)
    assert errors_against(out, exact).rms < 1e-3
    assert not last_dispatch().kernel  # type: ignore[union-attr]


def test_every_visible_gpu_is_served() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    q, k, v = tensors()
    expected, _ = call(q, k, v, False)
    out, _ = call(q.to("cuda:1"), k.to("cuda:1"), v.to("cuda:1"), False)
    assert out.device == torch.device("cuda:1")
    assert torch.equal(out.cpu(), expected.cpu())


@pytest.mark.parametrize("scale", [-0.25, 0.0])
@pytest.mark.parametrize("causal", [False, True])
def test_scale_that_is_not_positive(scale: float, causal: bool) -> None:
    q, k, v = tensors()
    call(q, k, v, causal)  # skips where no kernel can be had
    out, lse = flash_attn_func(q, k, v, softmax_scale=scale, causal=causal, return_lse=True)
    exact, exact_lse = attention(q, k, v, softmax_scale=scale, causal=causal)
    rounded, _ = attention_rounded(q, k, v, softmax_scale=scale, causal=causal)
    assert errors_against(out, exact).rms <= BOUND * errors_against(rounded, exact).rms
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=5e-3)
