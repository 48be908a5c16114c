"""How good the model's predictions are on shapes it was not fitted to, beside two baselines.

Run `python studies/model_accuracy.py`: reads the shapes of `studies/data/campaign_judged.jsonl`, which
nothing was fitted to, prints accuracy by problem and over all of them, the same for a roofline and for a
roofline times one constant a kernel class (fitted to `campaign.jsonl`, as the model), then profiled kernels
and the published B200 figures against the model, and draws `figures/model_accuracy.png`. Configs of a problem
were measured in turns, at the clock that they share, and are predicted so. `--half FILE` judges the file that
`model_fit.py --half --out FILE` wrote on the shapes of the campaign that it left out.
"""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from campaign import DATA, data_of, held_out, pause_us

from fa4tune.errors import InfeasibleError
from fa4tune.hardware.gpu import Gpu, load_gpu
from fa4tune.kernels.config import KERNEL_VERSIONS, SM90ForwardConfig, default_config
from fa4tune.kernels.plan import Unit
from fa4tune.kernels.program import build_plan
from fa4tune.model.accuracy import (
    GOOD,
    SHORTLIST,
    Accuracy,
    Sample,
    accuracy,
    samples,
    times_in_turns,
)
from fa4tune.model.predict import predict
from fa4tune.model.roofline import roofline
from fa4tune.problem import AttentionProblem
from fa4tune.record import read_trials

FIGURE = Path(__file__).parent / "figures" / "model_accuracy.png"
PROFILED = tuple(Path(__file__).parent / "data" / name for name in ("ncu_h200_s4096.jsonl", "ncu_h200.jsonl"))

PUBLISHED_B200 = {1024: 1355, 2048: 1468, 4096: 1532, 8192: 1579, 16384: 1601, 32768: 1613}
"""FlashAttention-4 (arXiv 2603.05451), forward, full mask, head dim 128, 16 heads, 32k tokens: TFLOP/s."""

PLAUSIBLE = {
    "warp_issue_per_clk": (0.6, 1.0),
    "contention": (0.6, 1.0),
    "section_contention": (0.5, 1.0),
    "dense_hold": (0.0, 0.8),
    "vote_latency_clk": (20.0, 100.0),
    "exp_beside_mma": (0.75, 1.0),
    "alu_beside_mma": (0.5, 1.0),
    "fma_beside_mma": (0.9, 1.0),
    "mma_clock": (0.904, 1.0),
    "l2_watts": (0.0, 525.0),
    "mma_start_clk": (0.0, 60.0),
    "exp_overlap": (0.11, 0.8),
    "smem_conflict": (0.0, 1.0),
    "barrier_latency_clk": (36.0, 120.0),
    "mma_latency_clk": (20.0, 100.0),
    "arithmetic_latency_clk": (10.0, 110.0),
    "tmem_latency_clk": (10.0, 80.0),
    "tmem_load_bytes_per_clk": (228.0, 512.0),
    "tmem_store_bytes_per_clk": (228.0, 512.0),
    "copy_latency_clk": (350.0, 1200.0),
    "copy_miss_clk": (200.0, 1000.0),
    "l2_bytes_per_clk": (36.0, 87.0),
    "hbm_efficiency": (0.8, 0.98),
    "tile_overhead_clk": (0.0, 2000.0),
    "cta_start_clk": (500.0, 3000.0),
    "max_clock_mhz": (1850.0, 2100.0),
    "launch_us": (1.5, 6.0),
    "active_watts": (540.0, 730.0),
    "tensor_watts": (660.0, 900.0),
}
"""Ranges of the B200's assumed constants over which the published figures are predicted."""


def class_of(sample: Sample) -> tuple[int, str]:
    """What the second baseline has a constant for."""
    return sample.problem.head_dim, sample.problem.mask_kind


def baselines(fitted_on: Sequence[Sample], judged: Sequence[Sample], gpu: Gpu) -> dict[str, list[float]]:
    """Microseconds by roofline, and by roofline times a class's median ratio on the samples fitted on."""
    ratios: dict[tuple[int, str], list[float]] = {}
    for sample in fitted_on:
        bound = roofline(sample.plan, gpu).time * 1e6
        ratios.setdefault(class_of(sample), []).append(sample.measured_us / bound)
    plain = [roofline(sample.plan, gpu).time * 1e6 for sample in judged]
    every = median([r for group in ratios.values() for r in group])
    scaled = [
        time * median(ratios.get(class_of(sample), [every]))
        for time, sample in zip(plain, judged, strict=True)
    ]
    return {"roofline": plain, "roofline x class": scaled}


def show(label: str, result: Accuracy) -> None:
    print(
        f"{label:18s} {result.mape:6.1%} {result.good_mape:6.1%} {result.good_maximum:7.1%} "
        f"{result.median_spearman:9.3f} {result.regret:7.3f} {result.worst_regret:6.3f} "
        f"{result.in_shortlist:8.0%}"
    )


def split(gpu: Gpu, path: Path | None) -> tuple[list[Sample], list[Sample], str]:
    """(samples to judge on, the others, what the first are): judged shapes, or half of the campaign."""
    found = samples(read_trials(DATA), gpu)
    if path is not None:
        seen = {str(s.problem) for s in found}
        judged = [s for s in samples(read_trials(path), gpu) if str(s.problem) not in seen]
        return judged, found, "Shapes that nothing was fitted to"
    judged = [s for s in found if held_out(s.problem)]
    others = [s for s in found if not held_out(s.problem)]
    return judged, others, "Every other shape of the campaign"


def campaign(path: Path | None, gpu: Gpu) -> None:
    """Accuracy on shapes that nothing was fitted to, and a picture of it for the judged ones."""
    judged, others, words = split(gpu, path)
    names = [str(s.problem) for s in judged]
    measured = [s.measured_us for s in judged]
    predicted = times_in_turns(judged, gpu, pause_us(gpu))
    result = accuracy(names, measured, predicted)
    print(f"\n## {words}: {len(judged)} configs of {len(result.problems)}")
    print(f"{'problem':58s} configs   MAPE   good    max Spearman regret rank   bias")
    for row in result.problems:
        print(
            f"{row.problem:58s} {row.configs:7d} {row.mape:6.1%} {row.good_mape:6.1%} "
            f"{row.good_maximum:6.1%} {row.spearman:8.3f} {row.regret:6.3f} {row.best_rank:4d} "
            f"{row.bias:+6.1%}"
        )
    print(
        f"\n{'':18s} {'MAPE':>6s} {'good':>6s} {'maximum':>7s} {'Spearman':>9s} {'regret':>7s} {'worst':>6s} "
        f"{f'best<={SHORTLIST}':>8s}   (good: within {GOOD - 1:.0%} of the best)"
    )
    show("model", result)
    for label, times in baselines(others, judged, gpu).items():
        show(label, accuracy(names, measured, times))
    train = [str(s.problem) for s in others]
    show(
        "model, its own fit",
        accuracy(train, [s.measured_us for s in others], times_in_turns(others, gpu, pause_us(gpu))),
    )
    if path is not None:
        draw(judged, measured, predicted, baselines(others, judged, gpu)["roofline x class"])


def draw(
    judged: Sequence[Sample],
    measured: Sequence[float],
    predicted: Sequence[float],
    base: Sequence[float],
) -> None:
    """Predicted over measured TFLOP/s for the model and the better baseline."""
    figure, axes = plt.subplots(1, 2, figsize=(13, 6.2), layout="constrained", sharex=True, sharey=True)
    colours = {
        (64, "full"): "#4e79a7",
        (64, "causal"): "#76b7b2",
        (128, "full"): "#e15759",
        (128, "causal"): "#f28e2b",
    }
    for axis, times, title in (
        (axes[0], predicted, "model"),
        (axes[1], base, "roofline times a constant per class"),
    ):
        for key, colour in colours.items():
            members = [i for i, sample in enumerate(judged) if class_of(sample) == key]
            flops = [judged[i].problem.flops_convention() * 1e-6 for i in members]
            axis.scatter(
                [f / measured[i] for f, i in zip(flops, members, strict=True)],
                [f / times[i] for f, i in zip(flops, members, strict=True)],
                s=14, color=colour, alpha=0.75, label=f"d{key[0]} {key[1]}",
            )  # fmt: skip
        top = 1.05 * max(
            s.problem.flops_convention() * 1e-6 / m for s, m in zip(judged, measured, strict=True)
        )
        axis.plot([0, top], [0, top], color="black", linewidth=0.8)
        axis.fill_between(
            [0, top], [0, 0.9 * top], [0, 1.1 * top], color="black", alpha=0.07, label="within 10%"
        )
        axis.set_title(title)
        axis.set_xlabel("measured TFLOP/s (H200, shapes that nothing was fitted to)")
        axis.grid(color="#dddddd")
    axes[0].set_ylabel("predicted TFLOP/s")
    axes[0].legend(fontsize=9)
    FIGURE.parent.mkdir(exist_ok=True)
    figure.savefig(FIGURE, dpi=110)
    print(f"\nwrote {FIGURE.name}")


def profiler() -> None:
    """Busy share of tensor cores and exponential unit, predicted against a profiler's, and the clock."""
    gpu = load_gpu("h200")
    rows = [json.loads(line) for path in PROFILED for line in path.read_text().splitlines()]
    errors: dict[str, list[float]] = {"tensor": [], "exp": []}
    clocks = []
    current, older = KERNEL_VERSIONS["sm90_fwd"], 0
    header: dict[str, object] = {}
    print("\n## Profiled kernels: busy share of the kernel's time, predicted (measured)")
    for row in rows:
        if "problem" not in row:
            header = row["provenance"]
            continue
        version = row.get("kernel_version", header.get("kernel_version"))
        if version is None:
            # readings without a version are of a time when P went to SMEM by costlier stores
            version = current if row["config"]["p_in_registers"] else current - 1
        if version != current:
            older += 1
            continue
        problem = AttentionProblem.parse(row["problem"])
        try:
            plan = build_plan(problem, SM90ForwardConfig.from_dict(row["config"]), gpu)
        except InfeasibleError:
            continue
        said = predict(plan, gpu)
        cells = []
        for name, unit in (("tensor", Unit.TENSOR), ("exp", Unit.EXP)):
            # the profiler's time starts with the kernel, not with its launch
            share, took = 100 * said.utilisation[unit], row[f"{name}_pct"]
            errors[name].append(share - took)
            cells.append(f"{name} {share:4.1f} ({took:4.1f})")
        clocks.append(said.clock_mhz / (row["clock_hz"] * 1e-6) - 1)
        print(
            f"{row['problem']:50s} {', '.join(cells)}, "
            f"{said.clock_mhz:.0f} ({row['clock_hz'] * 1e-6:.0f}) MHz"
        )
    for name, found in errors.items():
        within = sum(abs(e) <= 5 for e in found)
        print(
            f"{name}: within 5 points on {within} of {len(found)}, mean error "
            f"{fmean(map(abs, found)):.1f} points"
        )
    print(f"clock: mean error {fmean(map(abs, clocks)):.1%}; {older} readings of an older kernel left out")


def published_b200() -> None:
    """The published full-mask forward figures, default config; no constant was fitted to them."""
    gpu = load_gpu("b200")
    print(
        "\n## B200, published forward (full, d128), default config; spread over the assumed constants' ranges"
    )
    for seqlen, published in PUBLISHED_B200.items():
        problem = AttentionProblem(32768 // seqlen, 16, 16, seqlen, seqlen, 128, 128)
        config = default_config(problem, gpu.arch)
        plan = build_plan(problem, config, gpu)
        early = build_plan(problem, config.with_text("row_sum=with_exponentials"), gpu)
        now, before = predict(plan, gpu), predict(early, gpu)
        moved = {
            (name, value): predict(plan, dataclasses.replace(gpu, **{name: value})).tflops  # type: ignore[arg-type]
            for name, ends in PLAUSIBLE.items()
            for value in ends
        }
        low, high = min(moved, key=lambda k: moved[k]), max(moved, key=lambda k: moved[k])
        print(
            f"s{seqlen:<6d} published {published}, predicted {now.tflops:.0f} "
            f"({now.tflops / published - 1:+.1%}), with row sums among the exponentials {before.tflops:.0f} "
            f"({before.tflops / published - 1:+.1%}); "
            f"{moved[low]:.0f} with {low[0]}={low[1]:g} to {moved[high]:.0f} with {high[0]}={high[1]:g}"
        )
    print(f"bound by {now.bound}, period {now.period:.0f} cycles, {now.clock_mhz:.0f} MHz")
    print("critical cycle: " + " -> ".join(f"{s.operation} ({s.cycles:.0f})" for s in now.steps))
    print(f"what each assumed constant does to {now.tflops:.0f} of s{seqlen}:")
    for name, ends in PLAUSIBLE.items():
        there = " to ".join(f"{moved[name, value]:.0f} ({value:g})" for value in ends)
        print(f"  {name:24s} = {getattr(gpu, name):<6g} {there}; {gpu.sources[name]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--judged", type=Path, default=data_of("judged"), help="trials to judge on")
    parser.add_argument(
        "--half",
        type=Path,
        help="judge this file of model_fit.py --half on the shapes it left out, and no more",
    )
    arguments = parser.parse_args()
    if arguments.half:
        campaign(None, load_gpu(str(arguments.half)))
        return
    campaign(arguments.judged, load_gpu("h200"))
    if all(path.is_file() for path in PROFILED):
        profiler()
    published_b200()


if __name__ == "__main__":
    main()
