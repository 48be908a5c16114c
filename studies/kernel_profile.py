"""Utilisation of units in 24 kernels of the Hopper forward, read by Nsight Compute.

    python studies/campaign.py export DIR --fresh      a bundle, as for measuring
    python studies/kernel_profile.py metrics           names for --metrics
    ncu --clock-control none --profile-from-start off --csv --page raw --metrics NAMES \\
        --log-file OUT/ncu.csv python studies/kernel_profile.py launch DIR OUT/order.json
                                                       on the GPU host
    python studies/kernel_profile.py import OUT/order.json OUT/ncu.csv --day YYYY-MM-DD

Four kernel classes at 3072 keys, six configs each from the default to random ones, one launch a kernel after
a warm-up, Gaussian inputs. The records go to `studies/data/ncu_h200.jsonl`.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data" / "ncu_h200.jsonl"
METRICS = {
    "duration_ns": "gpu__time_duration.avg",
    "clock_hz": "gpc__cycles_elapsed.avg.per_second",
    "tensor_pct": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "exp_pct": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_elapsed",
    "tensor_pct_active": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "exp_pct_active": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "issue_pct": "sm__issue_active.avg.pct_of_peak_sustained_elapsed",
    "fma_pct": "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "alu_pct": "sm__pipe_alu_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "lsu_data_pct": "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed",
}
"""Our names -> the profiler's."""

SEQLEN = 3072
CONFIGS = 6


def launch(bundle: Path, order: Path) -> None:
    """Launch the chosen kernels of a bundle, each once inside the profiled range, and write their order."""
    sys.path.insert(0, str(bundle / "lib"))
    from fa4tune.problem import AttentionProblem
    from fa4tune.search.wheels import provide_tvm_ffi

    folder = provide_tvm_ffi(bundle)
    if folder is not None:
        sys.path.insert(0, folder.name)
    import torch

    from fa4tune.search.device import CudaBackend
    from fa4tune.search.gate import make_inputs, make_outputs

    backend = CudaBackend()
    manifest = json.loads((bundle / "manifest.json").read_text())
    launched: list[dict[str, Any]] = []
    for text in manifest["problems"]:
        problem = AttentionProblem.parse(text)
        if problem.seqlen_k != SEQLEN:
            continue
        own = sorted(
            (c for c in manifest["candidates"] if c["problem"] == text), key=lambda c: int(c["name"])
        )
        step = (len(own) - 1) // (CONFIGS - 1)
        q, k, v = make_inputs(problem, "gaussian", "cuda")
        out, lse = make_outputs(problem, q)
        for candidate in own[::step][:CONFIGS]:
            kernel = backend.load(bundle, candidate["kernel"])
            kernel(q, k, v, out, lse, problem.head_dim**-0.5)
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            kernel(q, k, v, out, lse, problem.head_dim**-0.5)
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
            launched.append({"problem": text, "config": candidate["config"]})
    order.write_text(
        json.dumps(
            {
                "kernel_version": manifest["kernel_version"],
                "gpu": torch.cuda.get_device_name(),
                "driver": _driver(),
                "launched": launched,
            }
        )
    )


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()[0].strip()


def readings(path: Path) -> list[dict[str, float]]:
    """The profiler's raw page: one row a launch, in order; the line under the names holds units."""
    lines = [line for line in path.read_text().splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(lines))
    units, found = rows[0], []
    scale = {"nsecond": 1.0, "ns": 1.0, "us": 1e3, "usecond": 1e3, "ms": 1e6, "msecond": 1e6}
    scale |= {
        "hz": 1.0,
        "cycle/second": 1.0,
        "cycle/usecond": 1e6,
        "cycle/nsecond": 1e9,
        "Ghz": 1e9,
        "%": 1.0,
    }
    for row in rows[1:]:
        found.append(
            {
                ours: float(row[theirs].replace(",", "")) * scale[units[theirs]]
                for ours, theirs in METRICS.items()
            }
        )
    return found


def take(order: Path, log: Path, day: str) -> int:
    """Replace the recorded readings; how many there are."""
    said = json.loads(order.read_text())
    found = readings(log)
    if len(found) != len(said["launched"]):
        raise SystemExit(f"{log} holds {len(found)} launches, {order} {len(said['launched'])}")
    provenance = {
        "gpu": said["gpu"],
        "driver": said["driver"],
        "kernel_version": said["kernel_version"],
        "tool": "ncu --clock-control none, one launch a kernel after a warm-up, Gaussian inputs",
        "measured_at": day,
        "metrics": METRICS,
    }
    with DATA.open("w") as file:
        file.write(json.dumps({"provenance": provenance}) + "\n")
        for launched, reading in zip(said["launched"], found, strict=True):
            file.write(json.dumps(launched | reading) + "\n")
    return len(found)


def main() -> None:
    """Command line of the study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("metrics")
    start = verbs.add_parser("launch")
    start.add_argument("bundle", type=Path)
    start.add_argument("order", type=Path)
    back = verbs.add_parser("import")
    back.add_argument("order", type=Path)
    back.add_argument("log", type=Path)
    back.add_argument("--day", required=True, help="when it was read, YYYY-MM-DD")
    options = parser.parse_args()
    if options.verb == "metrics":
        print(",".join(METRICS.values()))
    elif options.verb == "launch":
        launch(options.bundle, options.order)
    else:
        print(f"{take(options.order, options.log, options.day)} kernels written to {DATA}")


if __name__ == "__main__":
    main()
