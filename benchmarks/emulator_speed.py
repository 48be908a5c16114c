"""Speed and memory of the emulator's native back-end beside the plain one, with and without checks.

    python benchmarks/emulator_speed.py [--arch sm_100a] [--seqlen 2048] [--repeats 5] [--json]
                                        [--output FILE] [--note TEXT]

Each measurement runs in a process of its own, on one core. `cold` is the first run of a process: parsing,
translation and machine code included, the kernel compiled and the C runtime built before. `warm` is the best
of the runs after it. CPU time says what a busy machine adds to the wall time; the rate is executed warp
instructions over CPU time outside of matrix products, which go to NumPy's BLAS in both back-ends. Memory is
the growth of the process's peak over what it was when the run began.

What checks cost is a checked run's CPU time over that of a native run without checks: `native+c` is the
native back-end with checks, `plain+c` the plain one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TARGET_RATE = 20e6
"""Warp instructions a second and core outside of matrix products that the native back-end is to reach."""

TARGETS = {("sm_100a", "b1_hq1_hk1_sq2048_sk2048_d128_dv128_bf16_full_fwd", "warm"): 0.3,
           ("sm_100a", "b1_hq2_hk2_sq1024_sk1024_d128_dv128_bf16_full_fwd", "cold"): 2.0}  # fmt: skip
"""Seconds to stay within, by architecture, problem and state."""

TARGET_CHECKS = 5.0
"""Times the cost of a native run that the checks may have, cold and warm."""

#: Name, back-end, with checks, warm runs (None: as many as are asked for).
VARIANTS = (("native", "native", False, None), ("native+c", "native", True, None),
            ("plain", "plain", False, 1), ("plain+c", "plain", True, 1))  # fmt: skip


def problem_text(heads: int, seqlen: int) -> str:
    """The problem string of a forward with head dim 128."""
    return f"b1_hq{heads}_hk{heads}_sq{seqlen}_sk{seqlen}_d128_dv128_bf16_full_fwd"


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(arch: str, text: str, variant: str, repeats: int) -> dict[str, Any]:
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

    _, backend, check, _ = next(v for v in VARIANTS if v[0] == variant)
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
        results = [run(ptx, launched, backend=backend, check=check) for launched in launches]
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        if not all(r.completed for r in results):
            raise SystemExit(f"the {backend} back-end did not complete {text}")
        if any(r.findings for r in results):
            raise SystemExit(f"the {backend} back-end has findings in {text}: {results[0].findings[0]}")
        matrix = sum(r.matrix_seconds for r in results)
        runs.append((wall, cpu, matrix, sum(r.warp_instructions for r in results)))
    warm = min(runs[1:], key=lambda r: r[1])
    return {
        "arch": arch, "problem": text, "variant": variant, "warp_instructions": warm[3],
        "cold_seconds": runs[0][0], "cold_cpu_seconds": runs[0][1],
        "warm_seconds": min(r[0] for r in runs[1:]),
        "warm_cpu_seconds": warm[1], "matrix_seconds": warm[2], "rate": warm[3] / (warm[1] - warm[2]),
        "memory_mib": _peak_mib() - before,
    }  # fmt: skip


def in_process(arch: str, text: str, variant: str, repeats: int) -> dict[str, Any]:
    """:func:`measure` in a fresh process."""
    command = [sys.executable, __file__, "--measure", arch, text, variant, "--repeats", str(repeats)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(done.stderr.strip() or f"measuring {text} failed")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _processor() -> str:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    return names[0].partition(":")[2].strip() if names else platform.processor()


def _row(r: dict[str, Any]) -> str:
    return (
        f"{r['arch']:8} {r['problem'].replace('_bf16_full_fwd', ''):38} {r['variant']:9}"
        f"{r['warp_instructions'] / 1e6:7.2f} M {r['cold_seconds']:7.2f} s {r['cold_cpu_seconds']:7.2f} s"
        f"{r['warm_seconds']:8.3f} s {r['warm_cpu_seconds']:8.3f} s {r['matrix_seconds']:8.3f} s"
        f"{r['rate'] / 1e6:8.2f} M/s{r['memory_mib']:7.0f} MiB"
    )


def measure_pair(arch: str, text: str, repeats: int, show: Callable[[str], None]) -> list[dict[str, Any]]:
    """All variants on one problem, and what they cost beside each other."""
    found: dict[str, dict[str, Any]] = {}
    for name, _, _, fixed in VARIANTS:
        found[name] = in_process(arch, text, name, fixed or repeats)
        show(_row(found[name]))
    native = found["native"]
    for row in found.values():
        for state in ("cold", "warm"):
            row[f"{state}_ratio"] = row[f"{state}_cpu_seconds"] / native[f"{state}_cpu_seconds"]
    plain, checked, reference = found["plain"], found["native+c"], found["plain+c"]
    show(
        f"{'':8} checks cost {checked['warm_ratio']:.2f} times a native run warm, "
        f"{checked['cold_ratio']:.2f} cold (plain checks {reference['warm_ratio']:.0f} "
        f"and {reference['cold_ratio']:.0f}); native is {plain['warm_ratio']:.0f} times "
        f"as fast as plain warm, {plain['cold_ratio']:.1f} cold"
    )
    return list(found.values())


def missed_targets(rows: list[dict[str, Any]]) -> list[str]:
    """What does not reach its target, in words."""
    missed = []
    for r in rows:
        who = f"{r['arch']} {r['problem']}"
        if r["variant"] == "native" and r["rate"] < TARGET_RATE:
            missed.append(f"{who}: {r['rate'] / 1e6:.1f} M warp instructions a second")
        for state in ("cold", "warm"):
            limit, seconds = TARGETS.get((r["arch"], r["problem"], state)), r[f"{state}_cpu_seconds"]
            if r["variant"] == "native" and limit is not None and seconds > limit:
                missed.append(f"{who}: {state} {seconds:.2f} s of {limit} s")
            if r["variant"] == "native+c" and r[f"{state}_ratio"] > TARGET_CHECKS:
                missed.append(f"{who}: checks cost {r[f'{state}_ratio']:.1f} times a {state} run")
    return missed


def main() -> int:
    """Command line; status 1 if a target is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", action="append", choices=["sm_90a", "sm_100a"])
    parser.add_argument("--seqlen", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--output", metavar="FILE", help="write what is printed to a file, too")
    parser.add_argument("--note", default="", help="what else was running, for the first line")
    parser.add_argument("--measure", nargs=3, metavar=("ARCH", "PROBLEM", "VARIANT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(*args.measure, args.repeats)))
        return 0
    lines: list[str] = []

    def show(line: str) -> None:
        lines.append(line)
        if not args.json:
            print(line, flush=True)

    load = os.getloadavg()[0]
    show(f"{_processor()}, {os.cpu_count()} cores, load {load:.1f}{'; ' if args.note else ''}{args.note}")
    show(f"{'':65}instr.      cold  cold CPU      warm  warm CPU     matrix    rate   memory")
    rows = []
    for arch in args.arch or ["sm_100a", "sm_90a"]:
        for heads, seqlen in ((1, args.seqlen), (2, args.seqlen // 2)):
            rows += measure_pair(arch, problem_text(heads, seqlen), args.repeats, show)
    missed = missed_targets(rows)
    show("missed: " + "; ".join(missed) if missed else "every target met")
    if args.json:
        print(json.dumps({"rows": rows, "missed": missed}))
    if args.output:
        Path(args.output).write_text("\n".join(lines) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
