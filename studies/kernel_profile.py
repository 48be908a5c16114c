"""Utilisation of units, and cycles, in kernels of the Hopper forward, read by Nsight Compute.

    python studies/campaign.py export DIR --set fresh     a bundle, as for measuring
    python studies/kernel_profile.py export DIR        or one of configs that differ in one knob at a time
    python studies/kernel_profile.py metrics           names for --metrics
    ncu --clock-control none --cache-control none --profile-from-start off --csv --page raw \\
        --metrics NAMES --log-file OUT/ncu.csv \\
        python studies/kernel_profile.py launch DIR OUT/order.json [--cycles]
                                                       on the GPU host
    python studies/kernel_profile.py import OUT/order.json OUT/ncu.csv --day YYYY-MM-DD [--cycles]

Without `--cycles`: four kernel classes at 3072 keys, six configs each from the default to random ones; the
records replace `studies/data/ncu_h200.jsonl`. With it: every config of the bundle, 2048 query rows beside
2048 and beside 8192 keys, so that the difference is iterations and nothing else; the records are added to
`studies/data/ncu_cycles_h200.jsonl`, which the model's constants are fitted to besides the campaign. One
launch a kernel after a warm-up, Gaussian inputs.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data" / "ncu_h200.jsonl"
CYCLES_DATA = DATA.with_name("ncu_cycles_h200.jsonl")
METRICS = {
    "duration_ns": "gpu__time_duration.avg",
    "clock_hz": "gpc__cycles_elapsed.avg.per_second",
    "cycles_active_max": "sm__cycles_active.max",
    "cycles_active_sum": "sm__cycles_active.sum",
    "tensor_pct": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "exp_pct": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_elapsed",
    "tensor_pct_active": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "exp_pct_active": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "issue_pct": "sm__issue_active.avg.pct_of_peak_sustained_elapsed",
    "fma_pct": "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "alu_pct": "sm__pipe_alu_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "issue_pct_active": "sm__issue_active.avg.pct_of_peak_sustained_active",
    "fma_pct_active": "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active",
    "alu_pct_active": "sm__pipe_alu_cycles_active.avg.pct_of_peak_sustained_active",
    "lsu_data_pct": "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed",
}
"""Our names -> the profiler's; a log may lack some."""

SEQLEN = 3072
CONFIGS = 6
ROWS, KEYS = 2048, (2048, 8192)
"""Query rows, and the two numbers of keys, of the readings of cycles."""
TILES = {
    64: ((64, 128, 192, 256), (64, 96, 128, 192)),
    128: ((64, 128, 192), (48, 64, 96, 128, 176)),
}
"""By head dimension: the ``tile_m`` and the ``tile_n`` of :func:`factorial`."""


def factorial(head_dim: int) -> tuple[Any, list[Any]]:
    """(problem, configs): tiles by overlap by turns, and one more change of a knob to some of them."""
    from fa4tune.hardware.gpu import load_gpu
    from fa4tune.kernels.config import ConfigError, default_config
    from fa4tune.problem import AttentionProblem
    from fa4tune.search.space import plan_or_none

    gpu = load_gpu("h200")
    heads = 2048 // head_dim
    problem = AttentionProblem(2, heads, heads, ROWS, KEYS[0], head_dim, head_dim, "bf16", "full")
    base = default_config(problem, gpu.arch).replace(
        scheduler="persistent", rescale_threshold=0.0, exp2_share=0.0, ctas_per_sm=1, p_in_registers=True,
        kv_stages=2,
    )  # fmt: skip
    changes: list[dict[str, Any]] = []
    for tile_m, tile_n, overlap, turns in product(*TILES[head_dim], (True, False), (False, True)):
        if not turns or tile_m > 64:  # one warpgroup has nobody to take turns with
            changes.append({"tile_m": tile_m, "tile_n": tile_n, "overlap": overlap, "ping_pong": turns})
    for tile_m, overlap in product((64, 128, 192), (True, False)):
        tile = {"tile_m": tile_m, "tile_n": 64 if (tile_m, head_dim) == (192, 128) else 128}
        tile |= {"overlap": overlap, "ping_pong": False}
        for knob in (
            {"p_in_registers": False}, {"exp2_share": 0.25}, {"rescale_threshold": 8.0}, {"kv_stages": 1},
            {"kv_stages": 3},
        ):  # fmt: skip
            changes.append(tile | knob)
    for (tile_m, tile_n), overlap, stages in product(
        ((64, 64), (64, 96), (64, 128), (128, 64)), (True, False), (1, 2)
    ):
        changes.append(
            {"tile_m": tile_m, "tile_n": tile_n, "overlap": overlap, "ping_pong": False, "ctas_per_sm": 2,
             "kv_stages": stages}
        )  # fmt: skip
    found: list[Any] = []
    for change in changes:
        try:
            config = base.replace(**change)
        except ConfigError:
            continue
        if plan_or_none(problem, config, gpu) is not None and config not in found:
            found.append(config)
    return problem, found


def write_bundle(directory: Path) -> None:
    """Compile and export the configs of :func:`factorial`."""
    from fa4tune.hardware.gpu import load_gpu
    from fa4tune.search.bundle import Settings
    from fa4tune.search.candidates import Choice
    from fa4tune.search.compiling import build
    from fa4tune.search.transfer import export

    gpu = load_gpu("h200")
    built = {}
    for head_dim in (64, 128):
        problem, configs = factorial(head_dim)
        built[problem], failed = build(problem, gpu, [Choice(c, "profile", None) for c in configs])
        for trial in failed:
            print(f"{problem}: {trial.outcome}: {trial.reason}", file=sys.stderr)
    written = export(directory, gpu, built, settings=Settings(rounds=11, duel_rounds=20), note=print)
    print(f"{written.directory}: {written.size / 1e6:.1f} MB")


def _launches(manifest: dict[str, Any], cycles: bool) -> Iterator[tuple[dict[str, Any], str]]:
    """(candidate, problem) of everything that is launched."""
    if not cycles:
        for text in manifest["problems"]:
            if f"_sk{SEQLEN}_" not in text:
                continue
            own = sorted(
                (c for c in manifest["candidates"] if c["problem"] == text), key=lambda c: int(c["name"])
            )
            for candidate in own[:: (len(own) - 1) // (CONFIGS - 1)][:CONFIGS]:
                yield candidate, text
        return
    from fa4tune.problem import AttentionProblem

    seen = set()
    for candidate in manifest["candidates"]:
        problem = AttentionProblem.parse(candidate["problem"])
        key = (problem.head_dim, problem.mask, json.dumps(candidate["config"], sort_keys=True))
        if key in seen:
            continue
        seen.add(key)
        heads = 2048 // problem.head_dim
        for keys in KEYS:
            yield (
                candidate,
                str(
                    AttentionProblem(
                        2, heads, heads, ROWS, keys, problem.head_dim, problem.head_dim, "bf16", problem.mask
                    )
                ),
            )


def launch(bundle: Path, order: Path, cycles: bool) -> None:
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
    inputs: dict[str, tuple[Any, ...]] = {}
    for candidate, text in _launches(manifest, cycles):
        problem = AttentionProblem.parse(text)
        if text not in inputs:
            q, k, v = make_inputs(problem, "gaussian", "cuda")
            inputs[text] = (q, k, v, *make_outputs(problem, q))
        kernel = backend.load(bundle, candidate["kernel"])
        kernel(*inputs[text], problem.head_dim**-0.5)
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        kernel(*inputs[text], problem.head_dim**-0.5)
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
        "cycle": 1.0,
    }
    for row in rows[1:]:
        found.append(
            {
                ours: float(row[theirs].replace(",", "")) * scale[units[theirs]]
                for ours, theirs in METRICS.items()
                if theirs in row
            }
        )
    return found


def take(order: Path, log: Path, day: str, cycles: bool) -> int:
    """Add readings to the cycles' file, or replace the recorded ones of utilisation; how many there are."""
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
        "metrics": {name: METRICS[name] for name in found[0]},
    }
    path = CYCLES_DATA if cycles else DATA
    with path.open("a" if cycles else "w") as file:
        if not cycles or not path.stat().st_size:
            file.write(json.dumps({"provenance": provenance}) + "\n")
        for launched, reading in zip(said["launched"], found, strict=True):
            file.write(json.dumps(launched | reading) + "\n")
    return len(found)


def main() -> None:
    """Command line of the study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("metrics")
    out = verbs.add_parser("export")
    out.add_argument("directory", type=Path)
    start = verbs.add_parser("launch")
    start.add_argument("bundle", type=Path)
    start.add_argument("order", type=Path)
    back = verbs.add_parser("import")
    back.add_argument("order", type=Path)
    back.add_argument("log", type=Path)
    back.add_argument("--day", required=True, help="when it was read, YYYY-MM-DD")
    for verb in (start, back):
        verb.add_argument("--cycles", action="store_true", help="every config, at two numbers of keys")
    options = parser.parse_args()
    if options.verb == "export":
        write_bundle(options.directory)
    elif options.verb == "metrics":
        print(",".join(METRICS.values()))
    elif options.verb == "launch":
        launch(options.bundle, options.order, options.cycles)
    else:
        count = take(options.order, options.log, options.day, options.cycles)
        print(f"{count} readings written to {CYCLES_DATA if options.cycles else DATA}")


if __name__ == "__main__":
    main()
