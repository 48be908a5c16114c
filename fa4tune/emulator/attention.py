"""One attention call in the emulator: compile, run, and compare with float64 by definition."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fa4tune.emulator.findings import Finding
from fa4tune.errors import ProblemError
from fa4tune.kernels.config import KernelConfig
from fa4tune.kernels.kernel_class import KernelClass
from fa4tune.problem import AttentionProblem

if TYPE_CHECKING:
    import torch

    from fa4tune.emulator.machine import Result
    from fa4tune.hardware.gpu import Gpu
    from fa4tune.kernels.compile import CompiledKernel
    from fa4tune.kernels.plan import KernelPlan

OUT_BOUND = 1e-2
"""Largest difference of an output element from float64, relative to the largest element."""
MAX_CLUSTER = 16
"""CTAs of the largest cluster."""
LSE_BOUND = 1e-3
"""Largest absolute difference of a log-sum-exp from float64."""


@dataclass(slots=True)
class EmulatedCall:
    """What an emulated call gave.

    Args:
        out: (batch, seqlen_q, heads, head_dim_v); lse: (batch, heads, seqlen_q).
        out_error: largest difference of ``out`` from float64 over the largest element; inf for a NaN.
        lse_error: largest absolute difference of ``lse``; rows without a key must be -inf.
        results: the machine's result of each launch.
    """

    problem: AttentionProblem
    kernel: CompiledKernel
    out: torch.Tensor
    lse: torch.Tensor
    out_error: float
    lse_error: float
    results: list[Result] = field(default_factory=list)

    @property
    def findings(self) -> list[Finding]:
        """Findings of all launches."""
        return [f for r in self.results for f in r.findings]

    @property
    def accurate(self) -> bool:
        """Whether both errors are within their bounds."""
        return self.out_error <= OUT_BOUND and self.lse_error <= LSE_BOUND

    @property
    def passed(self) -> bool:
        """Accurate, complete, and without a finding that is not waived."""
        stand = [f for f in self.findings if f.severity != "waived"]
        return self.accurate and not stand and all(r.completed for r in self.results)


def read_inputs(path: Path, problem: AttentionProblem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of a problem from a safetensors file.

    Raises:
        ProblemError: the file cannot be read, lacks a tensor, or holds one of another shape or dtype.
    """
    try:
        from safetensors.torch import load_file
    except ImportError:
        raise ProblemError("--inputs reads safetensors files; pip install safetensors") from None
    try:
        tensors = load_file(str(path))
    except Exception as error:  # the library raises its own and the OS's
        raise ProblemError(f"{str(path)!r} cannot be read as safetensors: {error}") from None
    out = []
    for name, shape in _shapes(problem).items():
        if name not in tensors:
            raise ProblemError(f"{str(path)!r} has no tensor {name}, only {', '.join(tensors) or 'none'}")
        tensor = tensors[name]
        if tuple(tensor.shape) != shape or tensor.dtype != _dtype(problem):
            raise ProblemError(
                f"{name} in {str(path)!r} is {tuple(tensor.shape)} {tensor.dtype}, "
                f"the problem needs {shape} {_dtype(problem)}"
            )
        out.append(tensor.contiguous())
    return out[0], out[1], out[2]


def _shapes(problem: AttentionProblem) -> dict[str, tuple[int, ...]]:
    b, kv = problem.batch, problem.kv_heads
    return {
        "q": (b, problem.seqlen_q, problem.heads, problem.head_dim),
        "k": (b, problem.seqlen_k, kv, problem.head_dim),
        "v": (b, problem.seqlen_k, kv, problem.head_dim_v),
    }


def _dtype(problem: AttentionProblem) -> torch.dtype:
    import torch

    return torch.float16 if problem.dtype == "fp16" else torch.bfloat16


def random_inputs(
    problem: AttentionProblem, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gaussian q, k and v of a problem."""
    from fa4tune.kernels.inputs import gaussian_inputs

    drawn = gaussian_inputs(
        batch=problem.batch,
        heads=problem.heads,
        kv_heads=problem.kv_heads,
        seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        dtype=_dtype(problem),
        seed=seed,
    )
    return drawn.q, drawn.k, drawn.v


def emulate_forward(
    problem: AttentionProblem,
    config: KernelConfig,
    gpu: Gpu,
    *,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    softmax_scale: float | None = None,
    seed: int = 0,
    late: int | None = None,
    counters: bool = False,
    trace: bool = False,
    check: bool = False,
    waivers: Iterable[str] = (),
    progress: Callable[[int, int], None] | None = None,
    kernel: CompiledKernel | None = None,
) -> EmulatedCall:
    """Compile the kernel of a problem and config, run it on the CPU and compare with float64.

    Args:
        inputs: q, k, v; Gaussian from ``seed`` if None.
        softmax_scale: factor of the scores; 1/sqrt(head_dim) if None.
        late, counters, trace, check, waivers, progress: as :func:`fa4tune.emulator.machine.run` takes them.
        kernel: a kernel of that class that is compiled already. With ``check`` and without this one, the
            kernel is compiled once more with line information, for the findings.

    Raises:
        CompileError, InfeasibleError: there is no such kernel.
        EmulationError: it uses something that the emulator does not model.
    """
    import torch

    from fa4tune.emulator.capture import capture, kernel_ptx
    from fa4tune.emulator.machine import run
    from fa4tune.kernels.compile import compile_kernel
    from fa4tune.kernels.program import build_plan
    from fa4tune.kernels.reference import attention
    from fa4tune.runtime.arguments import forward_caller

    plan = build_plan(problem, config, gpu)
    compiled: Any = kernel
    if kernel is None:
        kernel = compile_kernel(KernelClass.from_problem(problem, config, gpu.arch))
        compiled = compile_with_lines(kernel.kernel_class) if check else kernel
    q, k, v = inputs if inputs is not None else random_inputs(problem, seed)
    out = torch.full((*q.shape[:3], problem.head_dim_v), float("nan"), dtype=q.dtype)
    lse = torch.full((problem.batch, problem.heads, problem.seqlen_q), float("nan"))
    names = [a.name for a in kernel.signature]
    ptx = kernel_ptx(compiled)
    roles = warp_roles(plan)
    results: list[Result] = []

    def host(*args: Any) -> None:
        for launched in capture(
            compiled, args, ptx=ptx, names=names, read_only=("mQ", "mK", "mV"), sm_count=gpu.sm_count
        ):
            results.append(
                run(
                    ptx,
                    launched,
                    late=late,
                    counters=counters,
                    trace=trace,
                    check=check,
                    waivers=waivers,
                    progress=progress,
                    roles=roles,
                )
            )

    call = forward_caller(host, names, sm_count=gpu.sm_count, window=problem.window)
    scale = problem.head_dim**-0.5 if softmax_scale is None else softmax_scale
    call(q, k, v, out, lse, scale)
    exact_out, exact_lse = attention(
        q, k, v, softmax_scale=scale, causal=problem.mask == "causal", window=_window(problem)
    )
    return EmulatedCall(
        problem, kernel, out, lse, relative_error(out, exact_out), absolute_error(lse, exact_lse), results
    )


def warp_roles(plan: KernelPlan) -> dict[tuple[int, int], str]:
    """The plan's role of each warp, by (rank of its CTA in the cluster, warp number)."""
    return {
        (rank, warp): role.name
        for role in plan.roles
        for rank in (range(MAX_CLUSTER) if role.cta_rank is None else (role.cta_rank,))
        for warp in range(role.first_warp, role.first_warp + role.warps)
    }


@cache
def compile_with_lines(kernel_class: KernelClass) -> Any:
    """The compiler's result for a kernel class, with line information; needs the compiler in this process."""
    from fa4tune.testing import compile_host

    module = importlib.import_module(kernel_class.module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's, about loops that are meant to be unrolled
        host, arguments = module.build(kernel_class.representative(), kernel_class.config)
        return compile_host(host, *arguments, arch=kernel_class.arch, stream=False)


def _window(problem: AttentionProblem) -> tuple[int | None, int | None]:
    return problem.window if problem.mask_kind == "window" else (None, None)


def relative_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest difference over the largest exact element; inf if anything is not finite."""
    difference = (actual.double() - exact).abs().max().item() if exact.numel() else 0.0
    size = exact.abs().max().item() if exact.numel() else 0.0
    if difference != difference:
        return float("inf")
    return difference / size if size else difference


def absolute_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest difference, equal infinities being none; inf if anything else is not finite."""
    a = actual.double()
    difference = (a - exact).abs()
    difference[a == exact] = 0.0
    largest = difference.max().item() if exact.numel() else 0.0
    return float("inf") if largest != largest else largest
