"""HBM traffic of FlashAttention v1: its growth with N, d and M, and its fall with the block size.

Run `python studies/io_complexity.py`: executes the published algorithms in float64, counts every load and
store, fits the exponents of the traffic, prints two tables and draws `figures/io_complexity.png`.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from fa4tune.kernels.flash_v1 import (
    Blocks,
    Ledger,
    block_sizes,
    flash_attention,
    flash_attention_backward,
    standard_attention,
    standard_attention_backward,
)

FIGURE = Path(__file__).parent / "figures" / "io_complexity.png"

# The published microbenchmark of block sizes: GPT-2 medium, forward, fp16.
SEQLEN, HEAD_DIM, HEADS, BATCH, ELEMENT_BYTES = 1024, 64, 16, 64, 2
BLOCK_COLUMNS = (64, 128, 256, 512)
PUBLISHED_GB = (6.6, 3.4, 1.75, 0.95)
"""Read off the paper's plot, so good to about 0.1 GB."""

NOT_MODELLED = dict.fromkeys(("l", "m", "initial O", "initial l", "initial m"), 0)
"""What the usual count leaves out: row statistics (1/d of the rest) and storing the first zeros."""


@dataclass(frozen=True)
class Point:
    """Forward traffic, in elements, of one head."""

    seqlen: int
    head_dim: int
    sram_elements: int
    flash: int
    standard: int


@dataclass(frozen=True)
class Sweep:
    """Points along which one quantity varies, and the exponents of its power laws."""

    variable: str
    points: tuple[Point, ...]
    expected: float
    flash_slope: float
    standard_slope: float

    def values(self) -> list[int]:
        """The varied quantity at each point."""
        return [getattr(point, self.variable) for point in self.points]


def matrices(seqlen: int, head_dim: int) -> tuple[NDArray[np.float64], ...]:
    """q, k, v, dout of one head."""
    rng = np.random.default_rng(seqlen + head_dim)
    return tuple(rng.standard_normal((seqlen, head_dim)) for _ in range(4))


def measure(seqlen: int, head_dim: int, sram_elements: int) -> Point:
    """Executes both algorithms once and returns what they moved; checks that they agree."""
    q, k, v, _ = matrices(seqlen, head_dim)
    flash = flash_attention(q, k, v, sram_elements=sram_elements)
    standard = standard_attention(q, k, v)
    if not np.allclose(flash.out, standard.out, rtol=1e-10, atol=1e-12):
        raise RuntimeError(f"the two algorithms disagree at seqlen {seqlen}, head_dim {head_dim}")
    return Point(seqlen, head_dim, sram_elements, flash.ledger.elements(), standard.ledger.elements())


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Exponent of the power law through the points: least squares in log-log coordinates."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def sweep(variable: str, values: Sequence[int], expected: float, point: Callable[[int], Point]) -> Sweep:
    """Measures at each value of one variable and fits the exponents."""
    points = tuple(point(value) for value in values)
    return Sweep(
        variable=variable,
        points=points,
        expected=expected,
        flash_slope=slope(values, [point.flash for point in points]),
        standard_slope=slope(values, [point.standard for point in points]),
    )


def scaling_sweeps() -> tuple[Sweep, ...]:
    """Traffic against N, d and M, each with the other two fixed and well inside d <= M <= N d."""
    return (
        sweep("seqlen", (512, 1024, 2048, 4096), 2.0, lambda n: measure(n, 64, 4 * 64 * 64)),
        sweep("head_dim", (16, 32, 64, 128), 2.0, lambda d: measure(2048, d, 4 * 32 * 128)),
        sweep("sram_elements", (4096, 8192, 16384, 32768), -1.0, lambda m: measure(2048, 64, m)),
    )


def block_size_bytes(columns: int) -> tuple[float, float]:
    """Forward traffic in GB of all heads of GPT-2 medium at one key block size.

    Returns:
        Q, K, V and O in the loop, as the paper's IO model counts; and every access of Algorithm 1, with the
        row statistics in float32.
    """
    q, k, v, _ = matrices(SEQLEN, HEAD_DIM)
    ledger = flash_attention(q, k, v, blocks=Blocks(min(columns, HEAD_DIM), columns)).ledger
    statistics = dict.fromkeys(("l", "m", "initial l", "initial m"), 4)
    heads = HEADS * BATCH / 1e9
    return ledger.bytes(ELEMENT_BYTES, NOT_MODELLED) * heads, ledger.bytes(ELEMENT_BYTES, statistics) * heads


def model_bytes(columns: int) -> float:
    """The closed form of the same in GB: K and V once, Q and O (in and out) once a key block."""
    passes = -(-SEQLEN // columns)
    return (3 * passes + 2) * SEQLEN * HEAD_DIM * ELEMENT_BYTES * HEADS * BATCH / 1e9


def training_bytes(sram_elements: int) -> dict[str, float]:
    """Forward plus backward traffic of GPT-2 medium in GB, by algorithm, every access counted."""
    q, k, v, dout = matrices(SEQLEN, HEAD_DIM)
    forward = flash_attention(q, k, v, sram_elements=sram_elements)
    backward = flash_attention_backward(q, k, v, dout, forward, sram_elements=sram_elements)
    ledgers: dict[str, tuple[Ledger, Ledger]] = {
        "standard": (standard_attention(q, k, v).ledger, standard_attention_backward(q, k, v, dout).ledger),
        "flash": (forward.ledger, backward.ledger),
    }
    return {
        name: sum(ledger.bytes(ELEMENT_BYTES) for ledger in pair) * HEADS * BATCH / 1e9
        for name, pair in ledgers.items()
    }


def print_scaling(sweeps: Sequence[Sweep]) -> None:
    """Prints each sweep's traffic and the fitted exponents."""
    print("Forward HBM traffic of one head, in elements; standard is the algorithm that stores S and P")
    for item in sweeps:
        print(f"\n  {item.variable:>14} {'flash':>14} {'standard':>14} {'ratio':>7}")
        for value, point in zip(item.values(), item.points, strict=True):
            ratio = point.standard / point.flash
            print(f"  {value:>14,} {point.flash:>14,} {point.standard:>14,} {ratio:>7.2f}")
        print(
            f"  exponent {item.flash_slope:+.3f} (theory {item.expected:+.0f}), "
            f"standard {item.standard_slope:+.3f}"
        )


def print_block_sizes() -> None:
    """Prints GB against the block size: model, ledger and the published plot."""
    print(
        f"\nGPT-2 medium, forward, GB "
        f"(seqlen {SEQLEN}, head_dim {HEAD_DIM}, {HEADS} heads, batch {BATCH}, fp16)"
    )
    print(f"  {'B_c':>5} {'IO model':>9} {'ledger QKVO':>12} {'ledger, all':>12} {'published':>10}")
    for columns, published in zip(BLOCK_COLUMNS, PUBLISHED_GB, strict=True):
        loop, everything = block_size_bytes(columns)
        model = model_bytes(columns)
        print(f"  {columns:>5} {model:>9.2f} {loop:>12.2f} {everything:>12.2f} {published:>10.2f}")


def print_training() -> None:
    """Prints forward plus backward traffic beside the published measurement."""
    sram_elements = 100 * 1024 // ELEMENT_BYTES
    moved = training_bytes(sram_elements)
    blocks = block_sizes(sram_elements, HEAD_DIM)
    print(f"\nForward and backward, GB (100 KiB of SRAM: B_c {blocks.columns}, B_r {blocks.rows})")
    print(f"  standard {moved['standard']:.1f} (published, with dropout and mask: 40.3)")
    print(f"  flash    {moved['flash']:.1f} (published: 4.4)")


def draw(sweeps: Sequence[Sweep], path: Path) -> None:
    """Draws the three sweeps and the block-size plot, and saves them as PNG."""
    figure, axes = plt.subplots(2, 2, figsize=(11, 8.5), layout="constrained")
    labels = {
        "seqlen": ("sequence length N", "One head, d = 64, M = 16,384 elements"),
        "head_dim": ("head dimension d", "One head, N = 2,048, M = 16,384 elements"),
        "sram_elements": ("SRAM size M, elements", "One head, N = 2,048, d = 64"),
    }
    for axis, item in zip(axes.flat, sweeps, strict=False):
        _draw_sweep(axis, item, *labels[item.variable])
    _draw_block_sizes(axes[1, 1])
    figure.suptitle("Forward HBM traffic of FlashAttention v1, counted access by access", fontsize=14)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_sweep(axis: Axes, item: Sweep, label: str, title: str) -> None:
    values = np.array(item.values(), dtype=float)
    flash = np.array([point.flash for point in item.points], dtype=float)
    standard = [point.standard for point in item.points]
    axis.loglog(
        values,
        standard,
        "s--",
        color="tab:gray",
        label=f"standard, slope {round(item.standard_slope, 2) + 0.0:+.2f}",
    )
    axis.loglog(values, flash, "o-", color="tab:blue", label=f"FlashAttention, slope {item.flash_slope:+.2f}")
    theory = flash[-1] * (values / values[-1]) ** item.expected
    axis.loglog(values, theory, ":", color="tab:red", label=f"N²d²/M: slope {item.expected:+.0f}")
    axis.set_xticks(values, [f"{int(value):,}" for value in values])
    axis.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    axis.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    axis.set_ylim(5e5, 2e8)
    axis.set_xlabel(label)
    axis.set_ylabel("HBM elements read and written")
    axis.set_title(title)
    axis.grid(True, which="both", alpha=0.25)
    axis.legend(loc="upper right" if item.expected < 0 else "upper left")


def _draw_block_sizes(axis: Axes) -> None:
    loop, everything = zip(*(block_size_bytes(columns) for columns in BLOCK_COLUMNS), strict=True)
    axis.plot(BLOCK_COLUMNS, everything, "^-", color="tab:green", label="ledger, every access of Algorithm 1")
    axis.plot(BLOCK_COLUMNS, loop, "o-", color="tab:blue", label="ledger, Q K V O in the loop (= IO model)")
    axis.plot(
        BLOCK_COLUMNS, PUBLISHED_GB, "x", color="tab:red", markersize=10, label="read off the published plot"
    )
    for columns, value in zip(BLOCK_COLUMNS, loop, strict=True):
        axis.annotate(f"{value:.2f} GB", (columns, value), xytext=(-52, -16), textcoords="offset points")
    axis.set_xscale("log", base=2)
    axis.set_xticks(BLOCK_COLUMNS, [str(columns) for columns in BLOCK_COLUMNS])
    axis.set_ylim(0, None)
    axis.set_xlim(40, 640)
    axis.set_xlabel("rows of a key block, $B_c$")
    axis.set_title("GPT-2 medium, N = 1,024, 1,024 heads of d = 64, fp16")
    axis.set_ylabel("forward HBM traffic, GB")
    axis.grid(True, alpha=0.25)
    axis.legend()


def main() -> None:
    """Runs the study."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--figure", type=Path, default=FIGURE, help="where to save the plot")
    arguments = parser.parse_args()
    sweeps = scaling_sweeps()
    print_scaling(sweeps)
    print_block_sizes()
    print_training()
    draw(sweeps, arguments.figure)
    print(f"\nfigure: {arguments.figure}")


if __name__ == "__main__":
    main()
