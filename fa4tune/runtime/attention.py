"""The attention call: look up the tuned config, take its compiled object, launch it on the current stream.

The first call of a shape decides what serves it and says so once; every later one finds that decision by the
sizes, strides and dtypes of its arguments and launches. :func:`last_dispatch` tells what served a call.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fa4tune.errors import CompileError, ConfigError, InfeasibleError, LaunchError, ProblemError
from fa4tune.hardware.gpu import Gpu
from fa4tune.kernels.config import KernelConfig, default_config
from fa4tune.kernels.kernel_class import KernelClass
from fa4tune.kernels.program import build_plan
from fa4tune.problem import AttentionProblem
from fa4tune.runtime.arguments import forward_caller
from fa4tune.runtime.device import detect_gpu, local_gpu
from fa4tune.runtime.fallback import lse_dtype, masked_attention, reference_attention
from fa4tune.runtime.launcher import load_library
from fa4tune.runtime.objects import (
    LoadableKernel,
    alternatives,
    collect,
    compile_object,
    find_object,
    jit_allowed,
)
from fa4tune.table.store import Table

if TYPE_CHECKING:
    from fa4tune.kernels.compile import CompiledKernel

ALIGNMENT = 16
"""Bytes that rows and heads must be aligned to, because TMA reads them."""


class DispatchWarning(UserWarning):
    """What a call does that its caller may not expect, said once."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """What served a call.

    Args:
        kernel: whether a kernel of this package ran (False: a reference path).
        source: where the config is from: ``table`` (this very problem), ``bucket`` (a problem like it),
            ``default``, ``carried`` (the wanted object is missing, another of its class is here) or
            ``reference``.
        reason: why no kernel ran, empty otherwise.
        problem: canonical problem string; empty for calls that are no problem (no rows).
        config: the config as text.
        library: the compiled object's file.
        copies: tensors among q, k and v that are copied at each call because of their alignment.
    """

    kernel: bool
    source: str
    reason: str = ""
    problem: str = ""
    config: str = ""
    library: str = ""
    copies: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Served:
    """A decision: ``run(q, k, v, out, lse, scale)`` or, without it, the fallback ``compute``.

    ``like`` are an out and an LSE of one element, expanded: to allocate from them takes half the time that
    sizes, dtype and device take to be read.
    """

    dispatch: Dispatch
    scale: float
    run: Callable[..., None] | None = None
    like: tuple[Tensor, Tensor] | None = None
    compute: Callable[..., tuple[Tensor, Tensor]] | None = None
    copied: tuple[bool, bool, bool] = (False, False, False)


_SERVED: dict[tuple[Any, ...], _Served] = {}
_last: Dispatch | None = None
_said: set[str] = set()


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention forward: ``softmax(softmax_scale * q k^T) v``.

    Args:
        q: (batch, seqlen_q, heads, head_dim), bfloat16 or float16 on a GPU, any float dtype on the CPU.
        k: (batch, seqlen_k, kv_heads, head_dim); kv_heads divides heads.
        v: (batch, seqlen_k, kv_heads, head_dim_v).
        softmax_scale: any finite factor; 1 / sqrt(head_dim) by default.
        causal: aligned bottom-right: row i sees keys up to ``i + seqlen_k - seqlen_q``.
        return_lse: also return the log-sum-exp.

    Returns:
        out (batch, seqlen_q, heads, head_dim_v) in q's dtype, or (out, lse) with lse float32 (float64 for
        float64 inputs), (batch, heads, seqlen_q), the natural logarithm of each row's sum of exponentials. A
        row that sees no key has out 0 and lse -inf.

    Raises:
        ProblemError: arguments that do not fit together.
        LaunchError: inputs that want gradients, or no compiled kernel where none may be compiled (inside a
            CUDA graph capture, or with ``FA4TUNE_JIT=0``).
        CompileError: the kernel did not compile.
    """
    global _last
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        name, value = next((n, t) for n, t in zip("qkv", (q, k, v), strict=True) if not isinstance(t, Tensor))
        raise ProblemError(f"{name} is a {type(value).__name__}; give a torch.Tensor")
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise LaunchError(
            "flash_attn_func is forward only and an input requires a gradient; call it under torch.no_grad() "
            "or detach its inputs"
        )
    alignment = (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGNMENT
    key = (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(),
        q.dtype, k.dtype, v.dtype, q.get_device(), k.get_device(), v.get_device(), causal, alignment,
    )  # fmt: skip
    served = _SERVED.get(key)
    if served is None:
        _check(q, k, v)
        served = _SERVED[key] = _decide(q, k, v, causal)
    scale = served.scale if softmax_scale is None else softmax_scale
    run = served.run
    if run is None:
        assert served.compute is not None
        out, lse = served.compute(q, k, v, scale, causal)
    else:
        assert served.like is not None
        if not scale > 0:
            q, scale = _with_positive_scale(q, scale)
        out = torch.empty_like(served.like[0], memory_format=torch.contiguous_format)
        lse = torch.empty_like(served.like[1], memory_format=torch.contiguous_format)
        if served.dispatch.copies:
            q, k, v = (_aligned(t) if c else t for t, c in zip((q, k, v), served.copied, strict=True))
        if q.device.index == torch.cuda.current_device():
            run(q, k, v, out, lse, scale)
        else:
            with torch.cuda.device(q.device):
                run(q, k, v, out, lse, scale)
    _last = served.dispatch
    return (out, lse) if return_lse else out


def _with_positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """The same scores by a positive scale: kernels take the row maximum of ``q k^T`` before they scale it.

    A sign moves into q, which is exact; at 0 every score is 0, as of queries that are 0.

    Raises:
        LaunchError: the scale is not a number.
    """
    if scale < 0:
        return -q, -scale
    if scale == 0:
        return torch.zeros_like(q), 1.0
    raise LaunchError(f"softmax_scale={scale} is not a number; give a finite factor or None for the default")


def last_dispatch() -> Dispatch | None:
    """What served the latest call of this process; None before the first."""
    return _last


def reset() -> None:
    """Forget every decision, so that the next call of each shape looks up table and objects again."""
    _SERVED.clear()
    _said.clear()


def prepare(
    problems: Iterable[AttentionProblem | str],
    *,
    gpu: Gpu | None = None,
    objects: str | Path | None = None,
    table: Table | None = None,
) -> list[CompiledKernel]:
    """Compile ahead of time what calls of ``problems`` will use.

    Args:
        problems: problems or their strings.
        gpu: hardware to compile for; default this machine's GPU.
        objects: also copy the objects to this directory, for a host that has no compiler and names the
            directory with ``FA4TUNE_OBJECTS``.
        table: where configs are looked up; default the user's table, then the packaged ones.

    Returns:
        the compiled kernels, one a class.

    Raises:
        LaunchError: no GPU is here and none is given.
        InfeasibleError: no kernel can run a problem.
        CompileError: a kernel did not compile.
    """
    from fa4tune.kernels.compile import compile_many

    gpu = gpu or local_gpu()
    if gpu is None:
        raise LaunchError(
            "no GPU with kernels is here; name one, as in prepare(problems, gpu=load_gpu('h200'))"
        )
    classes: dict[KernelClass, None] = {}
    for item in problems:
        problem = AttentionProblem.parse(item) if isinstance(item, str) else item
        config, _ = choose_config(problem, gpu, table)
        classes[KernelClass.from_problem(problem, config, gpu.arch)] = None
    kernels = []
    for _, kernel in compile_many(classes):
        if isinstance(kernel, CompileError):
            raise kernel
        kernels.append(kernel)
    if objects is not None:
        collect(kernels, Path(objects))
    return kernels


def choose_config(
    problem: AttentionProblem, gpu: Gpu, table: Table | None = None
) -> tuple[KernelConfig, str]:
    """The config for a call and where it is from: ``table``, ``bucket`` or ``default``.

    Raises:
        InfeasibleError: not even the default config can run the problem.
    """
    hit = (table or Table()).lookup(problem, gpu)
    if hit is not None:
        config = hit.entry.kernel_config()
        try:
            build_plan(problem, config, gpu)
        except InfeasibleError as error:
            _say(f"the table's config for {problem} is not used: {error}; the default config is")
        else:
            return config, "table" if hit.exact else "bucket"
    config = default_config(problem, gpu.arch)
    build_plan(problem, config, gpu)
    return config, "default"


def _say(text: str) -> None:
    """A warning, once a process."""
    if text not in _said:
        _said.add(text)
        warnings.warn(text, DispatchWarning, stacklevel=5)


# -- deciding ------------------------------------------------------------------------------------------------


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse arguments that do not fit together, each with one sentence."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ProblemError(
                f"{name} has shape {tuple(tensor.shape)}; give (batch, seqlen, heads, head_dim)"
            )
        if tensor.device != q.device:
            raise ProblemError(f"q is on {q.device} and {name} on {tensor.device}; move them to one device")
        if tensor.dtype != q.dtype:
            raise ProblemError(f"q is {q.dtype} and {name} {tensor.dtype}; convert them to one dtype")
        if not tensor.is_floating_point():
            raise ProblemError(f"{name} is {tensor.dtype}; give a float dtype")
    batch, _, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    if k.shape[0] != batch or v.shape[0] != batch:
        raise ProblemError(f"q, k and v have batches {batch}, {k.shape[0]} and {v.shape[0]}; give one batch")
    if v.shape[1:3] != k.shape[1:3]:
        raise ProblemError(
            f"k has {k.shape[1]} rows and {kv_heads} heads, v {v.shape[1]} and {v.shape[2]}; they must agree"
        )
    if k.shape[3] != head_dim:
        raise ProblemError(f"q has head_dim {head_dim} and k {k.shape[3]}; they must agree")
    if kv_heads == 0 or heads % kv_heads:
        raise ProblemError(
            f"kv_heads={kv_heads} does not divide heads={heads}; give a number of key heads that does"
        )


_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def _decide(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> _Served:
    """What serves calls like this one."""
    batch, seqlen_q, heads, head_dim = q.shape
    scale = 1.0 / math.sqrt(head_dim) if head_dim else 1.0

    def reference(reason: str, compute: Callable[..., tuple[Tensor, Tensor]]) -> _Served:
        return _Served(Dispatch(False, "reference", reason), scale, compute=compute)

    if not q.numel() or not k.numel() or not v.numel():
        return reference("a size is 0", _empty)
    if q.device.type == "cpu":
        return reference("CPU tensors", reference_attention)
    if q.dtype not in _NAMES:
        return _without_kernel(reference, f"no kernel takes {q.dtype}")
    problem = AttentionProblem(
        batch, heads, k.shape[2], seqlen_q, k.shape[1], head_dim, v.shape[3],
        _NAMES[q.dtype], "causal" if causal else "full", "fwd",
    )  # fmt: skip
    gpu = detect_gpu(q.device.index) if q.device.type == "cuda" else None
    if gpu is None:
        return _without_kernel(reference, f"no kernel exists for {_device_name(q)}")
    try:
        config, source = choose_config(problem, gpu)
    except (InfeasibleError, ConfigError, ProblemError) as error:
        return _without_kernel(reference, str(error))
    kernel, source = _object(problem, gpu, config, source)
    run = forward_caller(load_library(kernel.library, kernel.symbol), kernel.arguments, sm_count=gpu.sm_count)
    copied = tuple(not _is_aligned(t) for t in (q, k, v))
    dispatch = Dispatch(
        True,
        source,
        problem=str(problem),
        config=str(kernel.kernel_class.config),
        library=str(kernel.library),
        copies=tuple(name for name, copy in zip("qkv", copied, strict=True) if copy),
    )
    like = (
        q.new_empty(1).expand(batch, seqlen_q, heads, v.shape[3]),
        q.new_empty(1, dtype=torch.float32).expand(batch, heads, seqlen_q),
    )
    return _Served(dispatch, scale, run=run, like=like, copied=(copied[0], copied[1], copied[2]))


def _without_kernel(
    reference: Callable[[str, Callable[..., tuple[Tensor, Tensor]]], _Served], reason: str
) -> _Served:
    _say(f"flash_attn_func computes through torch with an explicit mask, slowly: {reason}")
    return reference(reason, masked_attention)


def _device_name(tensor: Tensor) -> str:
    if tensor.device.type != "cuda":
        return f"device {tensor.device}"
    return str(torch.cuda.get_device_name(tensor.device))


def _empty(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """No rows, or no keys: out 0, LSE -inf."""
    batch, seqlen_q, heads, _ = q.shape
    out = q.new_zeros(batch, seqlen_q, heads, v.shape[3])
    return out, q.new_full((batch, heads, seqlen_q), -math.inf, dtype=lse_dtype(q.dtype))


def _object(
    problem: AttentionProblem, gpu: Gpu, config: KernelConfig, source: str
) -> tuple[LoadableKernel, str]:
    """The compiled kernel for a config, and the source of the config that is really used.

    Raises:
        LaunchError: it is not here and may not be compiled now.
        CompileError: it did not compile.
    """
    hint = f"`fa4tune search {problem} --gpu {gpu.name}`"
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise LaunchError(
            f"the first call of {problem} came inside a CUDA graph capture, where kernels are not loaded; "
            f"call flash_attn_func with these shapes once before capturing"
        )
    kernel_class = KernelClass.from_problem(problem, config, gpu.arch)
    found = find_object(kernel_class)
    if found is not None:
        return found, source
    if not jit_allowed():
        other = _other_object(problem, gpu, kernel_class)
        if other is None:
            raise LaunchError(
                f"no compiled kernel for {problem} is here and FA4TUNE_JIT=0 forbids compiling; call "
                f"fa4tune.prepare(['{problem}']) ahead or unset FA4TUNE_JIT"
            )
        return other, "carried"
    try:
        if source == "default":
            _say(f"compiling the default config for {problem}, which is not tuned; {hint} tunes it")
        return compile_object(kernel_class), source
    except CompileError:
        other = _other_object(problem, gpu, kernel_class)
        if other is None:
            raise
        return other, "carried"


def _other_object(problem: AttentionProblem, gpu: Gpu, kernel_class: KernelClass) -> LoadableKernel | None:
    """Of the carried objects of the class, the one with the default config or else the model's fastest."""
    from fa4tune.model.predict import predict

    times: list[tuple[float, int, LoadableKernel]] = []
    base = default_config(problem, gpu.arch)
    for index, other in enumerate(alternatives(kernel_class)):
        try:
            plan = build_plan(problem, other.kernel_class.config, gpu)
        except InfeasibleError:
            continue
        is_default = other.kernel_class.config == base
        times.append((0.0 if is_default else predict(plan, gpu).microseconds, index, other))
    if not times:
        return None
    chosen = min(times)[2]
    _say(
        f"{problem} runs with [{chosen.kernel_class.config}], as the object of the wanted config is not here"
    )
    return chosen


def _is_aligned(tensor: Tensor) -> bool:
    """Whether the kernel can read the tensor where it lies: rows contiguous, all else in 16-byte steps."""
    step = ALIGNMENT // tensor.element_size()
    strides = tensor.stride()
    return (
        strides[3] == 1
        and all(stride % step == 0 and stride > 0 for stride in strides[:3])
        and tensor.data_ptr() % ALIGNMENT == 0
    )


def _aligned(tensor: Tensor) -> Tensor:
    """A copy that the kernel can read."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
