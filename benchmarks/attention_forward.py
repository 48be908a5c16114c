"""fa4tune's forward against flash-attn-4, fa3-fwd, cuDNN and FlexAttention, interleaved in one run.

    python benchmarks/attention_forward.py [--out FILE] [--rounds 20] [--budget-seconds S] [--without flex]

Prints every cell in TFLOP/s (the field's convention, causal counted as half) and the geometric mean of the
ratios. A cell that no kernel of fa4tune serves is printed as missing, never as the fallback's time; so is a
peer that is not installed or whose result is wrong. Each round calls every implementation once, L2 cold,
starting with another one each time; a figure is the median over rounds. On a host without the kernel compiler
see benchmarks/host_bundle.py.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fa4tune.kernels.reference import attention, errors_against
from fa4tune.problem import AttentionProblem
from fa4tune.runtime.attention import flash_attn_func, last_dispatch

HIDDEN = 2048
SHAPES = [
    (batch, seqlen, HIDDEN // head_dim, HIDDEN // head_dim, head_dim, causal)
    for head_dim in (64, 128)
    for causal in (False, True)
    for batch, seqlen in ((16, 1024), (4, 4096), (1, 16384))
] + [(1, 8192, 32, 8, 128, causal) for causal in (False, True)]
"""(batch, seqlen, heads, kv_heads, head_dim, causal)."""

FLUSH_BYTES = 256 << 20
MAX_ERROR = 1e-2
"""Relative error above which an implementation's cell is wrong; bf16 results lie near 3e-3."""

Attention = Callable[[Tensor, Tensor, Tensor, bool], Tensor]


def ours() -> Attention:
    """fa4tune.flash_attn_func; raises where no kernel of the package served the call."""

    def call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        out = flash_attn_func(q, k, v, causal=causal)
        assert isinstance(out, Tensor)
        return out

    return call


def flash_attn_4() -> Attention:
    """The flash-attn-4 package."""
    upstream = import_module("flash_attn.cute").flash_attn_func
    return lambda q, k, v, causal: _first(upstream(q, k, v, causal=causal))


def flash_attn_3() -> Attention:
    """The fa3-fwd package."""
    upstream = import_module("fa3_fwd_interface").flash_attn_func
    return lambda q, k, v, causal: _first(upstream(q, k, v, causal=causal))


def cudnn() -> Attention:
    """cuDNN through torch's scaled_dot_product_attention."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    def call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            gqa = q.shape[1] != k.shape[1]
            return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=gqa).transpose(1, 2)

    return call


def flex() -> Attention:
    """FlexAttention, compiled; block masks are made once a length, outside the timed calls."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.config.recompile_limit = 64
    compiled = torch.compile(flex_attention, dynamic=False)
    masks: dict[int, Any] = {}

    def call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        seqlen = q.shape[1]
        if causal and seqlen not in masks:
            masks[seqlen] = create_block_mask(
                lambda b, h, row, key: row >= key, None, None, seqlen, seqlen, device=q.device
            )
        return compiled(
            *(t.transpose(1, 2) for t in (q, k, v)),
            block_mask=masks[seqlen] if causal else None,
            enable_gqa=q.shape[2] != k.shape[2],
        ).transpose(1, 2)

    return call


IMPLEMENTATIONS: dict[str, Callable[[], Attention]] = {
    "fa4tune": ours,
    "fa4": flash_attn_4,
    "fa3": flash_attn_3,
    "cudnn": cudnn,
    "flex": flex,
}


def _first(result: Any) -> Tensor:
    found: Tensor = result[0] if isinstance(result, tuple) else result
    return found


@dataclass(slots=True)
class Cell:
    """One implementation on one shape: microseconds and TFLOP/s, or why there is none."""

    problem: str
    implementation: str
    microseconds: float | None = None
    tflops: float | None = None
    error: float | None = None
    missing: str = ""
    config: str = ""


def problem_of(shape: tuple[int, int, int, int, int, bool]) -> AttentionProblem:
    """The shape as a problem."""
    batch, seqlen, heads, kv_heads, dim, causal = shape
    return AttentionProblem(
        batch, heads, kv_heads, seqlen, seqlen, dim, dim, "bf16", "causal" if causal else "full", "fwd"
    )


def run_shape(
    problem: AttentionProblem, available: dict[str, Attention], absent: dict[str, str], rounds: int
) -> list[Cell]:
    """Check and time every implementation on one shape."""
    causal = problem.mask == "causal"
    generator = torch.Generator(device="cuda").manual_seed(0)
    shape_q = (problem.batch, problem.seqlen_q, problem.heads, problem.head_dim)
    shape_k = (problem.batch, problem.seqlen_k, problem.kv_heads, problem.head_dim)
    q, k, v = (
        torch.randn(shape, generator=generator, device="cuda").bfloat16()
        for shape in (shape_q, shape_k, shape_k)
    )
    # the last query head of the last sequence, with its key head
    exact, _ = attention(q[-1:, :, -1:], k[-1:, :, -1:], v[-1:, :, -1:], causal=causal)
    cells = {name: Cell(str(problem), name, missing=reason) for name, reason in absent.items()}
    for name, call in available.items():
        cell = cells[name] = Cell(str(problem), name)
        try:
            out = call(q, k, v, causal)
            torch.cuda.synchronize()
        except Exception as error:  # a peer that cannot run a shape is a missing cell
            cell.missing = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
            continue
        if name == "fa4tune":
            dispatch = last_dispatch()
            assert dispatch is not None
            cell.config = f"{dispatch.source}: {dispatch.config}"
            if not dispatch.kernel:
                cell.missing = f"no kernel of fa4tune: {dispatch.reason}"
                continue
        cell.error = errors_against(out[-1:, :, -1:], exact).rms
        if not cell.error <= MAX_ERROR:
            cell.missing = f"wrong result (relative error {cell.error:.1e})"
    calls = {name: available[name] for name, cell in cells.items() if not cell.missing}
    for name, samples in time_interleaved(calls, (q, k, v, causal), rounds).items():
        microseconds = statistics.median(samples)
        cells[name].microseconds = microseconds
        cells[name].tflops = problem.flops_convention() / microseconds * 1e-6
    return [cells[name] for name in IMPLEMENTATIONS if name in cells]


def time_interleaved(
    calls: dict[str, Attention], arguments: tuple[Any, ...], rounds: int
) -> dict[str, list[float]]:
    """Microseconds by implementation; every round calls each once, in an order that rotates."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    names = list(calls)
    samples: dict[str, list[float]] = {name: [] for name in names}
    events = {name: [torch.cuda.Event(enable_timing=True) for _ in range(2)] for name in names}
    for turn in range(-3, rounds):
        for offset in range(len(names)):
            name = names[(turn + offset) % len(names)]
            flush.zero_()  # also keeps the GPU busy while the host prepares the launch
            events[name][0].record()
            calls[name](*arguments)
            events[name][1].record()
        torch.cuda.synchronize()
        if turn >= 0:
            for name in names:
                samples[name].append(events[name][0].elapsed_time(events[name][1]) * 1e3)
    return samples


def geomean(ratios: list[float]) -> float:
    """Geometric mean; nan of nothing."""
    return math.exp(statistics.fmean(map(math.log, ratios))) if ratios else math.nan


def host_microseconds(calls: int = 2000) -> float | None:
    """Host time of one flash_attn_func call on a tiny problem; None if no kernel serves it."""
    q = torch.randn(1, 128, 1, 128, device="cuda").bfloat16()
    try:
        flash_attn_func(q, q, q)
    except Exception as error:
        print(f"host time: not measured ({error})", file=sys.stderr)
        return None
    dispatch = last_dispatch()
    if dispatch is None or not dispatch.kernel:
        return None
    torch.cuda.synchronize()
    best = math.inf
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(calls // 5):
            flash_attn_func(q, q, q)
        best = min(best, (time.perf_counter() - start) / (calls // 5))
        torch.cuda.synchronize()
    return best * 1e6


def report(cells: list[Cell]) -> None:
    """Print the table and the geometric means."""
    names = list(IMPLEMENTATIONS)
    by = {(cell.problem, cell.implementation): cell for cell in cells}
    problems = list(dict.fromkeys(cell.problem for cell in cells))
    width = max(map(len, problems))
    print(f"\nTFLOP/s (causal counted as half)\n{'':<{width}} " + " ".join(f"{n:>8}" for n in names))
    for problem in problems:
        shown = [f"{c.tflops:8.0f}" if (c := by[problem, n]).tflops else f"{'-':>8}" for n in names]
        print(f"{problem:<{width}} " + " ".join(shown))
    for name in names[1:]:
        pairs = [
            (a.tflops, b.tflops)
            for p in problems
            if (a := by[p, names[0]]).tflops and (b := by[p, name]).tflops
        ]
        ratios = [mine / theirs for mine, theirs in pairs if mine and theirs]
        peers = sum(by[p, name].tflops is not None for p in problems)
        print(
            f"fa4tune / {name}: geomean {geomean(ratios):.3f} over {len(ratios)} of {peers} cells of {name}"
            + ("" if len(ratios) == peers else "; the others are MISSING")
        )
    for cell in cells:
        if cell.missing:
            print(f"missing {cell.implementation} on {cell.problem}: {cell.missing}")


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="cells as JSON lines")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--budget-seconds", type=float, default=math.inf)
    parser.add_argument("--without", action="append", default=[], choices=list(IMPLEMENTATIONS))
    parser.add_argument("--only", help="only problems whose string contains this")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: no CUDA GPU is visible; run this on a GPU host", file=sys.stderr)
        return 1
    available: dict[str, Attention] = {}
    absent = dict.fromkeys(options.without, "left out by --without")
    for name, load in IMPLEMENTATIONS.items():
        if name not in absent:
            try:
                available[name] = load()
            except Exception as error:
                absent[name] = f"not installed ({type(error).__name__}: {error})"
    started = time.monotonic()
    cells: list[Cell] = []
    for shape in SHAPES:
        problem = problem_of(shape)
        if options.only and options.only not in str(problem):
            continue
        if time.monotonic() - started > options.budget_seconds:
            late = dict.fromkeys(IMPLEMENTATIONS, "the budget ended")
            cells += [Cell(str(problem), name, missing=reason) for name, reason in late.items()]
            continue
        new = run_shape(problem, available, absent, options.rounds)
        cells += new
        shown = " ".join(f"{c.implementation} {c.tflops:.0f}" for c in new if c.tflops)
        print(f"[{time.monotonic() - started:.0f} s] {problem}: {shown}", file=sys.stderr, flush=True)
        if options.out:
            with options.out.open("a") as file:
                for cell in new:
                    record = {f: getattr(cell, f) for f in Cell.__dataclass_fields__}
                    file.write(json.dumps({**record, "gpu": torch.cuda.get_device_name()}) + "\n")
    if not cells:
        print("error: --only matches no problem", file=sys.stderr)
        return 2
    report(cells)
    host = host_microseconds()
    if host is not None:
        print(f"host time of a fa4tune call: {host:.1f} us")
    return 0


if __name__ == "__main__":
    sys.exit(main())
