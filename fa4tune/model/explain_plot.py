"""Explanations as a picture: busy units, where a K/V tile's cycles go, and what a knob would change."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fa4tune.kernels.plan import Unit
from fa4tune.model.explain import UNIT_NAMES, Explanation
from fa4tune.model.trace import COLOURS, WORDS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PALETTE = ("#4e79a7", "#e15759", "#59a14f", "#edc948", "#b07aa1", "#9c755f", "#76b7b2", "#bab0ac")
"""One colour a case; seen apart by people who see few colours too."""

KNOBS = 10
"""Knob changes shown: the best."""


def draw(cases: Sequence[tuple[str, Explanation]], path: Path) -> None:
    """Draw one or several explanations; the file's ending decides the format.

    Args:
        cases: (label, explanation) of each config or GPU, drawn beside each other.
        path: where to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    alone = len(cases) == 1
    height = 3.2 + 0.34 * len(cases)
    figure, axes = plt.subplots(
        3 if alone else 2,
        1,
        figsize=(10.5, height * (2.6 if alone else 2.2)),
        height_ratios=[3, 1.5, 2.6] if alone else [3, 1 + 0.35 * len(cases)],
        layout="constrained",
    )
    _utilisation(axes[0], cases)
    _cycle(axes[1], cases)
    if alone:
        _knobs(axes[2], cases[0][1])
    problems = dict.fromkeys(str(e.plan.problem) for _, e in cases)
    title = "  ".join(problems)
    if alone:
        explanation = cases[0][1]
        title += f"  on {explanation.gpu.title}\n{_wrapped(str(explanation.plan.config))}\n"
        title += f"{explanation.prediction.microseconds:.4g} us, bound by {explanation.prediction.bound}"
    figure.suptitle(title, fontsize=9.5, ha="left", x=0.01)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _utilisation(axes: Axes, cases: Sequence[tuple[str, Explanation]]) -> None:
    units = [u for u in Unit if any(e.prediction.utilisation.get(u, 0.0) > 0.005 for _, e in cases)]
    thick = 0.8 / len(cases)
    for n, (label, explanation) in enumerate(cases):
        shares = [100 * explanation.prediction.utilisation.get(u, 0.0) for u in units]
        places = [i - 0.4 + thick * (n + 0.5) for i in range(len(units))]
        text = f"{label}: {explanation.prediction.microseconds:.4g} us, {explanation.prediction.bound}"
        axes.barh(places, shares, thick * 0.92, color=PALETTE[n % len(PALETTE)], label=text)
        for place, share in zip(places, shares, strict=True):
            axes.text(share + 0.7, place, f"{share:.0f}", va="center", fontsize=7)
    axes.set_yticks(range(len(units)), [UNIT_NAMES[u] for u in units])
    axes.invert_yaxis()
    axes.set_xlim(0, 105)
    axes.set_xlabel("busy, % of the whole kernel")
    if len(cases) > 1:
        axes.legend(fontsize=8, loc="lower right")
    _plain(axes)


def _cycle(axes: Axes, cases: Sequence[tuple[str, Explanation]]) -> None:
    from matplotlib.patches import Patch

    longest = max(e.prediction.period for _, e in cases)
    used: dict[Unit, None] = {}
    for n, (_, explanation) in enumerate(cases):
        at = 0.0
        tiles = max(1, sum(s.distance for s in explanation.prediction.steps))
        units = {o.name: o.unit for o in explanation.plan.loop.body}
        for step in explanation.prediction.steps:
            cycles = step.cycles / tiles
            unit = units[step.operation]
            used.setdefault(unit, None)
            axes.barh(n, cycles, 0.62, left=at, color=COLOURS[unit], edgecolor="white")
            if cycles > 0.012 * longest * len(step.operation):
                axes.text(at + cycles / 2, n, step.operation, ha="center", va="center", fontsize=7)
            at += cycles
        axes.text(at + 0.005 * longest, n, f"{at:.0f}", va="center", fontsize=8)
    axes.set_yticks(range(len(cases)), [label for label, _ in cases] if len(cases) > 1 else [""])
    axes.invert_yaxis()
    axes.set_xlim(0, longest * 1.08)
    axes.set_xlabel("critical cycle: SM cycles of one K/V tile, step after step, coloured by unit")
    axes.legend(
        handles=[Patch(facecolor=COLOURS[u], label=WORDS[u]) for u in COLOURS if u in used],
        fontsize=8, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False,
    )  # fmt: skip
    _plain(axes)


def _knobs(axes: Axes, explanation: Explanation) -> None:
    possible = [c for c in explanation.changes if c.speedup is not None][:KNOBS]
    gains = [100 * ((c.speedup or 1.0) - 1) for c in possible]
    axes.barh(range(len(gains)), gains, 0.7, color=["#59a14f" if g > 0 else "#bab0ac" for g in gains])
    axes.set_yticks(range(len(gains)), [f"{c.knob} = {_text(c.value)}" for c in possible], fontsize=8)
    for i, gain in enumerate(gains):
        axes.text(max(gain, 0.0), i, f" {gain:+.1f}%", va="center", fontsize=7)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("what one knob would change, % of speed")
    _plain(axes)


def _wrapped(config: str, width: int = 130) -> str:
    lines = [""]
    for part in config.split(","):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += ("," if lines[-1] else "") + part
    return "\n".join(lines)


def _text(value: object) -> str:
    return "/".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
