"""Scale tensor cores, exponential unit and the other rates apart from each other; re-tune at every point.

Run `python studies/asymmetric_scaling.py`: prints three tables and draws `figures/asymmetric_scaling.png`.
`--scale exp=2,mma=1.5 --gpu b200` prints one point instead; `--gpu` takes a GPU of one's own as TOML too.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

from fa4tune.errors import HardwareError
from fa4tune.hardware.gpu import Gpu, load_gpu
from fa4tune.kernels.plan import Unit
from fa4tune.model.scaling import Point, elasticities, retimed, retuned, sweep
from fa4tune.problem import AttentionProblem

FIGURE = Path(__file__).parent / "figures" / "asymmetric_scaling.png"
HEAD_DIMS = ((64, 64), (128, 128), (192, 128))
SEQLEN, TOKENS, HIDDEN = 8192, 32768, 2048
GENERATIONS = ("h200", "b200", "b300")
RATES = ("mma", "exp", "issue", "fma", "smem", "tmem", "l2", "hbm")
FACTORS = (0.5, 2**-0.5, 1.0, 2**0.5, 2.0, 2**1.5, 4.0)
COLOURS = {
    "mma": "#76b7b2",
    "exp": "#e15759",
    "issue": "#4e79a7",
    "fma": "#59a14f",
    "smem": "#edc948",
    "tmem": "#b07aa1",
    "l2": "#9c755f",
    "hbm": "#ff9da7",
}
WORDS = {
    "mma": "tensor cores",
    "exp": "exponential unit",
    "issue": "instruction issue, ALU",
    "fma": "multiply-add",
    "smem": "shared memory",
    "tmem": "tensor memory",
    "l2": "L2",
    "hbm": "HBM",
}


def problem_of(head_dim: int, head_dim_v: int) -> AttentionProblem:
    """Forward, full mask, bf16, 32k tokens; hidden size 2048 (16 heads for 192/128)."""
    heads = HIDDEN // head_dim if head_dim != 192 else 16
    return AttentionProblem(TOKENS // SEQLEN, heads, heads, SEQLEN, SEQLEN, head_dim, head_dim_v)


def describe(problem: AttentionProblem, point: Point) -> str:
    """One line: speed, what binds, busy units, the re-tuned config's main knobs."""
    busy, best = point.best.utilisation, point.best
    elastic = elasticities(problem, point.config, point.gpu)
    first = max(elastic, key=lambda rate: elastic[rate])
    knobs = ",".join(part for part in str(point.config).split(",") if not part.startswith("registers"))
    return (
        f"{best.tflops:6.0f} TFLOP/s | {best.bound:16s} | +1% of {WORDS[first]} gives "
        f"+{elastic[first]:.2f}% | tensor {busy[Unit.TENSOR]:4.0%}, exponential {busy[Unit.EXP]:4.0%}, "
        f"issue {busy[Unit.ISSUE]:4.0%}, SMEM {busy[Unit.SMEM]:4.0%} | {knobs}"
    )


def generations() -> None:
    """The three GPUs with their best configs."""
    print("\n## Best config by GPU")
    for dims in HEAD_DIMS:
        problem = problem_of(*dims)
        for name in GENERATIONS:
            print(f"d{dims[0]:<3}/{dims[1]:<3} {name}: {describe(problem, retuned(problem, load_gpu(name)))}")


def one_rate(gpu: Gpu, axes: Sequence[Axes]) -> None:
    """Each rate alone from half to four times, re-tuned; the speed-up, and what re-timing alone would say."""
    print(f"\n## {gpu.title}: speed with one rate doubled, re-tuned (re-timed only)")
    for dims, axis in zip(HEAD_DIMS, axes, strict=True):
        problem = problem_of(*dims)
        base = retuned(problem, gpu)
        cells = []
        for rate in RATES:
            points = dict(sweep(problem, gpu, rate, FACTORS))
            axis.plot(
                FACTORS,
                [base.best.microseconds / points[f].best.microseconds for f in FACTORS],
                color=COLOURS[rate],
                marker="o",
                markersize=3,
                label=WORDS[rate],
            )
            again = retimed(problem, base.config, gpu.scaled(**{rate: 2.0}))
            cells.append(
                f"{rate} {base.best.microseconds / points[2.0].best.microseconds:.3f} "
                f"({base.best.microseconds / again.microseconds:.3f})"
            )
        print(f"d{dims[0]}/{dims[1]}: " + ", ".join(cells))
        axis.set_xscale("log", base=2)
        axis.set_title(f"head dim {dims[0]}/{dims[1]}: one rate changed", fontsize=10)
        axis.set_xlabel(f"times the {gpu.name.upper()}'s rate")
        axis.grid(color="#dddddd")
    axes[0].set_ylabel("speed, re-tuned at every point")
    axes[-1].legend(fontsize=8)


def two_rates(gpu: Gpu, axes: Sequence[Axes]) -> None:
    """Tensor cores against exponential unit: what binds, as it buys most, and tensor-core utilisation.

    What a rate buys is the re-tuned speed-up of making it 1.41 times faster.
    """
    order = ("mma", "exp", "issue", "smem")
    print(f"\n## {gpu.title}: tensor-core factor from which a faster exponential unit buys most, re-tuned")
    for dims, axis in zip(HEAD_DIMS, axes, strict=True):
        problem = problem_of(*dims)
        known: dict[tuple[float, ...], Point] = {}

        def at(mma: float, exp: float, issue: float = 1.0, smem: float = 1.0) -> Point:
            key = tuple(round(2 * np.log2(f)) for f in (mma, exp, issue, smem))
            if key not in known:  # noqa: B023
                scaled = gpu.scaled(mma=mma, exp=exp, issue=issue, smem=smem)
                known[key] = retuned(problem, scaled)  # noqa: B023
            return known[key]  # noqa: B023

        shown = np.zeros((len(FACTORS), len(FACTORS)), dtype=int)
        busy = np.zeros(shown.shape)
        for i, exp in enumerate(FACTORS):
            turns = None
            for j, mma in enumerate(FACTORS):
                now = at(mma, exp)
                faster = (
                    at(mma * 2**0.5, exp),
                    at(mma, exp * 2**0.5),
                    at(mma, exp, issue=2**0.5),
                    at(mma, exp, smem=2**0.5),
                )
                shown[i, j] = int(np.argmin([point.best.microseconds for point in faster]))
                busy[i, j] = now.best.utilisation[Unit.TENSOR]
                if order[shown[i, j]] == "exp" and turns is None:
                    turns = mma
            where = "nowhere up to 4x" if turns is None else f"from {turns:.2f}x"
            print(f"d{dims[0]}/{dims[1]}, exponential unit {exp:.2f}x: {where}")
        edges = np.array([f / 2**0.25 for f in FACTORS] + [FACTORS[-1] * 2**0.25])
        colours = ListedColormap([COLOURS[rate] for rate in order])
        axis.pcolormesh(edges, edges, shown, cmap=colours, vmin=-0.5, vmax=len(order) - 0.5, alpha=0.75)
        lines = axis.contour(
            FACTORS, FACTORS, busy, levels=[0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9], colors="black", linewidths=0.8
        )
        axis.clabel(lines, fmt=lambda value: f"{value:.0%}", fontsize=8)
        for name, mma, exp in (("Hopper's ratio", 0.5, 1.0), ("B200", 1.0, 1.0), ("B300", 1.0, 2.0)):
            axis.plot(mma, exp, "k*", markersize=11)
            axis.annotate(name, (mma, exp), textcoords="offset points", xytext=(7, 5), fontsize=8)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.set_title(f"head dim {dims[0]}/{dims[1]}: what binds, as it buys most", fontsize=10)
        axis.set_xlabel("tensor cores, times the B200's")
    axes[0].set_ylabel("exponential unit, times the B200's")
    axes[-1].legend(
        handles=[Patch(color=COLOURS[r], label=WORDS[r]) for r in order], fontsize=8, loc="lower right"
    )


def scales(text: str) -> dict[str, float]:
    """``exp=2,mma=1.5`` as a mapping."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            factor = float(value)
        except ValueError:
            factor = math.nan
        if not math.isfinite(factor):
            raise argparse.ArgumentTypeError(f"{part!r} is not RATE=FACTOR, as in exp=2,mma=1.5")
        if name in found:
            raise argparse.ArgumentTypeError(f"{name} is named twice; give each rate once")
        found[name] = factor
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", default="b200", help="GPU by name or TOML file")
    parser.add_argument("--scale", type=scales, help="rate=factor,...: print this one point")
    arguments = parser.parse_args()
    gpu = load_gpu(arguments.gpu)
    if arguments.scale:
        try:
            scaled = gpu.scaled(**arguments.scale)
        except HardwareError as error:
            parser.error(str(error))
        for dims in HEAD_DIMS:
            problem = problem_of(*dims)
            print(f"d{dims[0]}/{dims[1]}: {describe(problem, retuned(problem, scaled))}")
        return
    generations()
    figure, axes = plt.subplots(2, 3, figsize=(15, 9), layout="constrained")
    one_rate(gpu, list(axes[0]))
    two_rates(gpu, list(axes[1]))
    figure.suptitle(
        "Forward attention, full mask, bf16, 8k keys; every point is the best config for that hardware. "
        "Below: black lines are tensor-core utilisation",
        fontsize=11,
    )
    FIGURE.parent.mkdir(exist_ok=True)
    figure.savefig(FIGURE, dpi=110)
    print(f"\nwrote {FIGURE.relative_to(Path.cwd()) if FIGURE.is_relative_to(Path.cwd()) else FIGURE}")


if __name__ == "__main__":
    main()
