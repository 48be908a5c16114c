"""Compile seconds per config, beside what C++ kernels of the same kind take.

    python benchmarks/compile_time.py --arch sm_90a --configs 8

Each config is compiled from nothing (an empty cache) in one warm compiler process, one after the other: host
function, PTX, machine code, object, linked library and the reading of registers and spills. The second figure
is throughput with all compiler processes at work. CPU time says what of the wall time a busy machine added.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time

from fa4tune.errors import CompileError, ConfigError, InfeasibleError
from fa4tune.hardware.gpu import ARCHITECTURES, load_gpu
from fa4tune.kernels.compile import CompilePool, compile_many
from fa4tune.kernels.config import KernelConfig, default_config
from fa4tune.kernels.kernel_class import KernelClass
from fa4tune.kernels.program import build_plan
from fa4tune.problem import AttentionProblem

CPP_SECONDS = {"fwd": 55.0, "bwd": 45.0}
"""FlashAttention-3 (C++ templates), one kernel: FlashAttention-4, arXiv 2603.05451, Table 4."""

PAPER_DSL_SECONDS = {"fwd": 2.5, "bwd": 1.4}
"""FlashAttention-4 (CuTe DSL), one kernel: same table."""

PROBLEM = "b4_hq16_hk16_sq4096_sk4096_d128_dv128_bf16_causal_fwd"


def neighbours(problem: AttentionProblem, arch: str, count: int) -> list[KernelClass]:
    """The default config and configs that differ from it in one knob, feasible ones, ``count`` at most."""
    gpu = load_gpu(ARCHITECTURES[arch])
    default = default_config(problem, arch)
    found: list[KernelConfig] = []
    candidates = [default]
    for name in default.knobs():
        for value in default.choices(name):
            try:
                candidates.append(default.replace(**{name: value}))
            except ConfigError:
                continue
    for config in candidates:
        try:
            build_plan(problem, config, gpu)
        except InfeasibleError:
            continue
        if config not in found:
            found.append(config)
    # spread over the knobs, the default first
    step = max(1, len(found) // count)
    return [KernelClass.from_problem(problem, config, arch) for config in found[::step][:count]]


def main() -> int:
    """Print the figures; exit status 1 when a config fails to compile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--problem", default=PROBLEM)
    parser.add_argument("--arch", default="sm_90a", choices=sorted(ARCHITECTURES))
    parser.add_argument("--configs", type=int, default=8, help="configs to compile (default 8)")
    parser.add_argument("--module", help="module with build(problem, config), in place of the family's")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    arguments = parser.parse_args()
    problem = AttentionProblem.parse(arguments.problem)
    classes = neighbours(problem, arguments.arch, arguments.configs)

    seconds: list[float] = []
    cpu_seconds: list[float] = []
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FA4TUNE_CACHE"] = os.path.join(folder, "serial")
        with CompilePool(1) as pool:
            for i, kernel_class in enumerate(classes):
                try:
                    kernel = pool.submit(kernel_class, arguments.module).result()
                except CompileError as error:
                    failures.append(str(error))
                    continue
                seconds.append(kernel.seconds)
                cpu_seconds.append(kernel.cpu_seconds)
                print(
                    f"[{i + 1}/{len(classes)}] {kernel.seconds:5.2f} s  {kernel.registers} registers, "
                    f"{kernel.spill_bytes} spill bytes  {kernel_class.config}",
                    file=sys.stderr,
                )
        os.environ["FA4TUNE_CACHE"] = os.path.join(folder, "parallel")
        start = time.perf_counter()
        results = [result for _, result in compile_many(classes, module=arguments.module)]
        elapsed = time.perf_counter() - start
        failures += [str(result) for result in results if isinstance(result, CompileError)]
        built = sum(not isinstance(result, CompileError) for result in results)

    for failure in failures:
        print(failure, file=sys.stderr)
    if len(seconds) < 2:
        print("fewer than two configs compiled; nothing to report", file=sys.stderr)
        return 1
    direction = "fwd" if problem.direction == "fwd" else "bwd"
    median = statistics.median(seconds)
    quartiles = statistics.quantiles(seconds, n=4)
    result = {
        "problem": str(problem),
        "arch": arguments.arch,
        "configs": len(seconds),
        "failed": len(failures),
        "median_s": median,
        "quartiles_s": [quartiles[0], quartiles[2]],
        "range_s": [min(seconds), max(seconds)],
        "median_cpu_s": statistics.median(cpu_seconds),
        "parallel_s_per_config": elapsed / built if built else None,
        "workers": len(os.sched_getaffinity(0)),
        "cpp_s": CPP_SECONDS[direction],
        "paper_dsl_s": PAPER_DSL_SECONDS[direction],
        "ratio": CPP_SECONDS[direction] / median,
    }
    if arguments.json:
        print(json.dumps(result))
    else:
        print(f"{'kernel':40} {'seconds':>8}")
        print(f"{'this, median of ' + str(len(seconds)) + ' configs':40} {median:8.2f}")
        print(f"{'  quartiles':40} {quartiles[0]:8.2f} .. {quartiles[2]:.2f}")
        print(f"{'  range':40} {min(seconds):8.2f} .. {max(seconds):.2f}")
        print(f"{'  CPU time, median':40} {result['median_cpu_s']:8.2f}")
        if built:
            label = f"  a config, {result['workers']} processes, start included"
            print(f"{label:40} {elapsed / built:8.2f}")
        print(f"{'FlashAttention-4, CuTe DSL (paper)':40} {PAPER_DSL_SECONDS[direction]:8.2f}")
        print(f"{'FlashAttention-3, C++ templates (paper)':40} {CPP_SECONDS[direction]:8.2f}")
        print(f"C++ takes {result['ratio']:.0f} times as long")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
