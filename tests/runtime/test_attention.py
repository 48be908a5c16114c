"""The attention call: CPU path, validation, choice of config and object, what it says and when."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import pytest
import torch

import fa4tune
from fa4tune.errors import CompileError, InfeasibleError, LaunchError, ProblemError
from fa4tune.hardware.gpu import load_gpu
from fa4tune.kernels.compile import compile_kernel
from fa4tune.kernels.config import SM90ForwardConfig, default_config
from fa4tune.kernels.kernel_class import KernelClass
from fa4tune.kernels.reference import attention
from fa4tune.problem import AttentionProblem
from fa4tune.runtime import attention as runtime
from fa4tune.runtime import objects
from fa4tune.runtime.attention import choose_config, flash_attn_func, last_dispatch, prepare
from fa4tune.runtime.fallback import masked_attention
from fa4tune.table.store import Table
from tests.table.test_store import make_entry

GPU = load_gpu("h200")
PROBLEM = AttentionProblem.parse("b4_hq16_hk16_sq4096_sk4096_d128_dv128_bf16_causal_fwd")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FA4TUNE_TABLE", str(tmp_path / "table"))
    monkeypatch.delenv("FA4TUNE_OBJECTS", raising=False)
    runtime.reset()


def tensors(
    batch: int = 2,
    seqlen_q: int = 5,
    seqlen_k: int = 7,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    dim_v: int = 24,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = (
        (batch, seqlen_q, heads, dim),
        (batch, seqlen_k, kv_heads, dim),
        (batch, seqlen_k, kv_heads, dim_v),
    )
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return q, k, v


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
def test_cpu_tensors_of_any_float_dtype_give_the_exact_result_in_their_dtype(
    dtype: torch.dtype, causal: bool
) -> None:
    q, k, v = tensors(dtype=dtype)
    out, lse = flash_attn_func(q, k, v, causal=causal, return_lse=True)
    exact, exact_lse = attention(q, k, v, causal=causal)
    assert out.dtype == dtype
    assert lse.shape == (2, 4, 5)
    assert torch.equal(out, exact.to(dtype))
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-6)
    only = flash_attn_func(q, k, v, causal=causal)
    assert isinstance(only, torch.Tensor)
    assert torch.equal(only, out)


def test_softmax_scale_is_used_and_lse_is_a_natural_logarithm() -> None:
    q, k, v = tensors(batch=1, seqlen_q=1, seqlen_k=3, heads=1, kv_heads=1)
    _, lse = flash_attn_func(q, k, v, softmax_scale=0.5, return_lse=True)
    scores = (q[0, 0, 0] @ k[0, :, 0].T) * 0.5
    assert lse.item() == pytest.approx(math.log(scores.exp().sum().item()), rel=1e-5)


def test_rows_without_a_key_are_zero_with_lse_minus_infinity() -> None:
    q, k, v = tensors(seqlen_q=7, seqlen_k=4)
    out, lse = flash_attn_func(q, k, v, causal=True, return_lse=True)
    assert not out[:, :3].any()
    assert torch.isneginf(lse[..., :3]).all()
    assert out[:, 3:].any()


@pytest.mark.parametrize("change", [{"batch": 0}, {"seqlen_q": 0}, {"seqlen_k": 0}])
def test_empty_sizes_give_zeros_and_minus_infinity(change: dict[str, int]) -> None:
    q, k, v = tensors(**change)  # type: ignore[arg-type]
    out, lse = flash_attn_func(q, k, v, return_lse=True)
    assert out.shape == (*q.shape[:3], 24)
    assert not out.any()
    assert torch.isneginf(lse).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(33, 50), (50, 33)])
def test_masked_torch_path_agrees_with_the_reference(
    causal: bool, seqlen_q: int, seqlen_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fa4tune.runtime.fallback.SCORES_PER_CHUNK", 2 * 4 * seqlen_k * 7)
    q, k, v = tensors(seqlen_q=seqlen_q, seqlen_k=seqlen_k, dtype=torch.float64)
    out, lse = masked_attention(q, k, v, 0.25, causal)
    exact, exact_lse = attention(q, k, v, softmax_scale=0.25, causal=causal)
    torch.testing.assert_close(out, exact)
    torch.testing.assert_close(lse, exact_lse)


def _with(**changes: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tensors(**changes)  # type: ignore[arg-type]


def _bad() -> dict[str, tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], str]]:
    q, k, v = tensors()
    return {
        "kv_heads do not divide heads": (_with(heads=4, kv_heads=3), "kv_heads=3 does not divide heads=4"),
        "devices": ((q, k.to("meta"), v), "q is on cpu and k on meta; move them to one device"),
        "dtypes": ((q, k, v.half()), r"q is torch.float32 and v torch.float16; convert"),
        "rank": ((q, k[0], v), r"k has shape \(7, 2, 16\); give \(batch, seqlen, heads, head_dim\)"),
        "integers": ((q.int(), k.int(), v.int()), r"q is torch.int32; give a float dtype"),
        "batch": ((q, k[:1], v), "batches 2, 1 and 2"),
        "rows": ((q, k, v[:, :3]), "k has 7 rows and 2 heads, v 3 and 2"),
        "head_dim": ((q, k[..., :8], v), "q has head_dim 16 and k 8"),
    }


@pytest.mark.parametrize("what", sorted(_bad()))
def test_bad_arguments_are_one_clear_sentence(what: str) -> None:
    arguments, sentence = _bad()[what]
    with pytest.raises(ProblemError, match=sentence) as caught:
        flash_attn_func(*arguments)
    assert isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("value", [None, [[0.0]], 3])
def test_what_is_no_tensor_is_named(place: int, value: object) -> None:
    arguments: list[object] = [*tensors()]
    arguments[place] = value
    with pytest.raises(
        ProblemError, match=f"{'qkv'[place]} is a {type(value).__name__}; give a torch.Tensor"
    ):
        flash_attn_func(*arguments)  # type: ignore[arg-type]


def test_inputs_that_want_gradients_are_refused_unless_grad_is_off() -> None:
    q, k, v = tensors()
    q.requires_grad_()
    with pytest.raises(LaunchError, match="forward only"):
        flash_attn_func(q, k, v)
    with torch.no_grad():
        assert flash_attn_func(q, k, v).shape == (2, 5, 4, 24)


def test_last_dispatch_says_that_no_kernel_served_a_cpu_call() -> None:
    flash_attn_func(*tensors())
    dispatch = last_dispatch()
    assert dispatch is not None
    assert (dispatch.kernel, dispatch.source, dispatch.reason) == (False, "reference", "CPU tensors")


# -- which config --------------------------------------------------------------------------------------------


def test_config_is_the_default_without_an_entry_then_the_bucket_s_then_the_problem_s() -> None:
    assert choose_config(PROBLEM, GPU) == (default_config(PROBLEM, GPU.arch), "default")
    near = AttentionProblem.parse(str(PROBLEM).replace("4096", "4000"))
    Table().put(make_entry(near, tile_n=96))
    assert choose_config(PROBLEM, GPU) == (SM90ForwardConfig(tile_n=96), "bucket")
    Table().put(make_entry(PROBLEM, tile_n=112))
    assert choose_config(PROBLEM, GPU) == (SM90ForwardConfig(tile_n=112), "table")


def test_entry_that_cannot_run_this_problem_is_said_once_and_replaced_by_the_default() -> None:
    config = SM90ForwardConfig(tile_n=256, kv_stages=4).as_dict()
    Table().put(make_entry(PROBLEM, config=config))
    with pytest.warns(runtime.DispatchWarning, match="the default config is") as seen:
        assert choose_config(PROBLEM, GPU)[1] == "default"
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choose_config(PROBLEM, GPU)


def test_problem_that_no_kernel_runs_gives_the_reasons() -> None:
    odd = AttentionProblem(1, 2, 2, 64, 64, 72, 72)
    with pytest.raises(InfeasibleError):
        choose_config(odd, GPU)


# -- which object --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiled() -> KernelClass:
    """The default kernel of the problem, compiled (2 s) or from the cache."""
    kernel_class = KernelClass.from_problem(PROBLEM, default_config(PROBLEM, GPU.arch), GPU.arch)
    try:
        compile_kernel(kernel_class)
    except CompileError as error:
        pytest.skip(f"no kernel compiler: {error}")
    return kernel_class


def test_prepare_collects_objects_that_a_host_without_compiler_finds(
    compiled: KernelClass, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (kernel,) = prepare([str(PROBLEM), PROBLEM], gpu=GPU, objects=tmp_path / "objects")
    assert kernel.kernel_class == compiled
    monkeypatch.setenv("FA4TUNE_OBJECTS", str(tmp_path / "objects"))
    monkeypatch.setattr("fa4tune.kernels.compile.cached_kernel", _no_compiler)
    monkeypatch.setattr("fa4tune.kernels.compile.compile_kernel", _no_compiler)
    found, source = runtime._object(PROBLEM, GPU, default_config(PROBLEM, GPU.arch), "default")
    assert source == "default"
    assert found.library.parent.parent == tmp_path / "objects"
    assert set(found.arguments) >= {"mQ", "mK", "mV", "mO", "mLSE", "softmax_scale"}
    with pytest.warns(runtime.DispatchWarning, match="the object of the wanted config is not here"):
        other, source = runtime._object(PROBLEM, GPU, SM90ForwardConfig(tile_n=96), "table")
    assert (other, source) == (found, "carried")
    full = AttentionProblem.parse(str(PROBLEM).replace("causal", "full"))
    with pytest.raises(CompileError, match="not installed"), pytest.warns(runtime.DispatchWarning):
        runtime._object(full, GPU, default_config(full, GPU.arch), "default")


def _no_compiler(*_: object, **__: object) -> None:
    raise CompileError("nvidia-cutlass-dsl is not installed")


def test_missing_object_with_jit_forbidden_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FA4TUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("fa4tune.kernels.compile.cached_kernel", lambda kernel_class: None)
    monkeypatch.setenv("FA4TUNE_JIT", "0")
    with pytest.raises(LaunchError, match=r"FA4TUNE_JIT=0 forbids .*fa4tune\.prepare\(\['b4_hq16"):
        runtime._object(PROBLEM, GPU, default_config(PROBLEM, GPU.arch), "default")


def test_first_call_inside_a_graph_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(LaunchError, match=r"inside a CUDA graph capture.*once before capturing"):
        runtime._object(PROBLEM, GPU, default_config(PROBLEM, GPU.arch), "default")


def test_compiling_an_untuned_problem_names_the_search_command_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "find_object", lambda kernel_class: None)
    monkeypatch.setattr(runtime, "find_object", lambda kernel_class: None)
    monkeypatch.setattr(runtime, "compile_object", lambda kernel_class: "compiled")
    config = default_config(PROBLEM, GPU.arch)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert runtime._object(PROBLEM, GPU, config, "default") == ("compiled", "default")
        assert runtime._object(PROBLEM, GPU, config, "default") == ("compiled", "default")
    (said,) = (str(warning.message) for warning in seen)
    assert f"`fa4tune search {PROBLEM} --gpu h200` tunes it" in said


def test_prepare_without_a_gpu_asks_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "local_gpu", lambda: None)
    with pytest.raises(LaunchError, match="no GPU with kernels is here; name one"):
        prepare([PROBLEM])


def test_public_names_are_those_of_the_runtime() -> None:
    assert fa4tune.flash_attn_func is flash_attn_func
    assert fa4tune.prepare is prepare


@pytest.mark.parametrize(
    ("make", "aligned"),
    [
        (lambda t: t, True),
        (lambda t: t.transpose(1, 2).contiguous().transpose(1, 2), True),
        (lambda t: t.transpose(2, 3).contiguous().transpose(2, 3), False),
        (lambda t: t[..., :56], True),
        (lambda t: t[:, :1].expand(-1, 5, -1, -1), False),
        (lambda t: torch.empty(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape), False),
        (lambda t: torch.empty(2, 5, 4, 65, dtype=t.dtype)[..., :64], False),
    ],
)
def test_only_tensors_that_tma_can_read_are_passed_as_they_are(make: object, aligned: bool) -> None:
    tensor = make(torch.randn(2, 5, 4, 64, dtype=torch.float16))  # type: ignore[operator]
    assert runtime._is_aligned(tensor) is aligned
    copy = runtime._aligned(tensor)
    assert runtime._is_aligned(copy)
    assert torch.equal(copy, tensor) or tensor.isnan().any()


@pytest.mark.parametrize("scale", [-0.25, 0.0])
def test_scores_are_the_same_by_a_positive_scale(scale: float) -> None:
    q, k, v = (torch.randn(1, 40, 2, 64, dtype=torch.float64) for _ in range(3))
    turned, positive = runtime._with_positive_scale(q, scale)
    assert positive > 0
    wanted, given = (
        attention(a, k, v, softmax_scale=b, causal=True) for a, b in ((q, scale), (turned, positive))
    )
    for exact, actual in zip(wanted, given, strict=True):
        torch.testing.assert_close(actual, exact, rtol=0, atol=1e-12)


def test_scale_that_is_no_number_is_refused() -> None:
    with pytest.raises(LaunchError, match="softmax_scale=nan is not a number"):
        runtime._with_positive_scale(torch.zeros(1), float("nan"))
