"""Speed and memory of the emulator's native back-end beside the plain one, on our forward kernels.

    python benchmarks/emulator_speed.py [--arch sm_100a] [--seqlen 2048] [--repeats 5] [--json]

Each measurement runs in a process of its own, on one core. `cold` is the first run of a process: parsing,
translation and machine code included, the kernel compiled and the C runtime built before. `warm` is the best
of the runs after it. CPU time says what a busy machine adds to the wall time; the rate is executed warp
instructions over CPU time outside of matrix products, which go to NumPy's BLAS in both back-ends. Memory is
the growth of the process's peak over what it was when the run began.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from typing import Any

TARGET_RATE = 20e6
"""Warp instructions a second and core outside of matrix products that the native back-end is to reach."""

TARGETS = {("sm_100a", "b1_hq1_hk1_sq2048_sk2048_d128_dv128_bf16_full_fwd", "warm"): 0.3,
           ("sm_100a", "b1_hq2_hk2_sq1024_sk1024_d128_dv128_bf16_full_fwd", "cold"): 2.0}  # fmt: skip
"""Seconds to stay within, by architecture, problem and state."""


def problem_text(heads: int, seqlen: int) -> str:
    """The problem string of a forward with head dim 128."""
    return f"b1_hq{heads}_hk{heads}_sq{seqlen}_sk{seqlen}_d128_dv128_bf16_full_fwd"


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(arch: str, text: str, backend: str, repeats: int) -> dict[str, Any]:
    """In this process: one cold run and ``repeats`` warm ones."""
    import torch

    from fa4tune.emulator.capture import capture
    from fa4tune.emulator.machine import run
    from fa4tune.emulator.native.backend import unavailable
    from fa4tune.hardware.gpu import choose_gpu
    from fa4tune.kernels.compile import compile_kernel
    from fa4tune.kernels.config import default_config
    from fa4tune.kernels.inputs import gaussian_inputs
    from fa4tune.kernels.kernel_class import KernelClass
    from fa4tune.problem import AttentionProblem
    from fa4tune.runtime.arguments import forward_caller

    if backend == "native" and unavailable() is not None:
        raise SystemExit(f"no native back-end: {unavailable()}")
    problem, gpu = AttentionProblem.parse(text), choose_gpu(None, arch)
    kernel = compile_kernel(KernelClass.from_problem(problem, default_config(problem, arch), arch))
    shape = {k: getattr(problem, k) for k in ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k")}
    inputs = gaussian_inputs(**shape, head_dim=128, head_dim_v=128, dtype=torch.bfloat16, seed=0)
    out = torch.zeros_like(inputs.q)
    lse = torch.zeros(problem.batch, problem.heads, problem.seqlen_q)
    names = [a.name for a in kernel.signature]
    launches: list[Any] = []

    def host(*args: Any) -> None:
        launches.extend(capture(kernel, args, ptx=kernel.ptx, names=names, sm_count=gpu.sm_count))

    call = forward_caller(host, names, sm_count=gpu.sm_count, window=problem.window)
    call(inputs.q, inputs.k, inputs.v, out, lse, problem.head_dim**-0.5)
    ptx, before = kernel.ptx, _peak_mib()
    runs = []
    for _ in range(1 + repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        results = [run(ptx, launched, backend=backend) for launched in launches]
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        if not all(r.completed for r in results):
            raise SystemExit(f"the {backend} back-end did not complete {text}")
        matrix = sum(r.matrix_seconds for r in results)
        runs.append((wall, cpu, matrix, sum(r.warp_instructions for r in results)))
    warm = min(runs[1:], key=lambda r: r[1])
    return {
        "arch": arch, "problem": text, "backend": backend, "warp_instructions": warm[3],
        "cold_seconds": runs[0][0], "cold_cpu_seconds": runs[0][1],
        "warm_seconds": min(r[0] for r in runs[1:]),
        "warm_cpu_seconds": warm[1], "matrix_seconds": warm[2], "rate": warm[3] / (warm[1] - warm[2]),
        "memory_mib": _peak_mib() - before,
    }  # fmt: skip


def in_process(arch: str, text: str, backend: str, repeats: int) -> dict[str, Any]:
    """:func:`measure` in a fresh process."""
    command = [sys.executable, __file__, "--measure", arch, text, backend, "--repeats", str(repeats)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(done.stderr.strip() or f"measuring {text} failed")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _row(r: dict[str, Any]) -> str:
    return (
        f"{r['arch']:8} {r['problem'].replace('_bf16_full_fwd', ''):38} {r['backend']:7}"
        f"{r['warp_instructions'] / 1e6:7.2f} M {r['cold_seconds']:7.2f} s {r['cold_cpu_seconds']:7.2f} s"
        f"{r['warm_seconds']:8.3f} s {r['warm_cpu_seconds']:8.3f} s {r['matrix_seconds']:8.3f} s"
        f"{r['rate'] / 1e6:8.2f} M/s{r['memory_mib']:7.0f} MiB"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", action="append", choices=["sm_90a", "sm_100a"])
    parser.add_argument("--seqlen", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--measure", nargs=3, metavar=("ARCH", "PROBLEM", "BACKEND"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(*args.measure, args.repeats)))
        return 0
    rows = []
    if not args.json:
        print(f"{'':63}instr.      cold  cold CPU      warm  warm CPU     matrix    rate   memory")
    for arch in args.arch or ["sm_100a", "sm_90a"]:
        for heads, seqlen in ((1, args.seqlen), (2, args.seqlen // 2)):
            pair = []
            for backend, repeats in (("plain", 1), ("native", args.repeats)):
                pair.append(in_process(arch, problem_text(heads, seqlen), backend, repeats))
                if not args.json:
                    print(_row(pair[-1]), flush=True)
            rows += pair
            if not args.json:
                plain, native = pair
                warm, cold = (
                    plain[f"{s}_cpu_seconds"] / native[f"{s}_cpu_seconds"] for s in ("warm", "cold")
                )
                print(f"{'':8} native is {warm:.0f} times as fast warm, {cold:.1f} times cold")
    missed = []
    for r in rows:
        if r["backend"] != "native":
            continue
        if r["rate"] < TARGET_RATE:
            missed.append(f"{r['arch']} {r['problem']}: {r['rate'] / 1e6:.1f} M warp instructions a second")
        for state in ("cold", "warm"):
            limit = TARGETS.get((r["arch"], r["problem"], state))
            if limit is not None and r[f"{state}_cpu_seconds"] > limit:
                missed.append(
                    f"{r['arch']} {r['problem']}: {state} {r[f'{state}_cpu_seconds']:.2f} s of {limit} s"
                )
    if args.json:
        print(json.dumps({"rows": rows, "missed": missed}))
    else:
        print("missed: " + "; ".join(missed) if missed else "every target met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
