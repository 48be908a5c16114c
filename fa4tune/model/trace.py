"""A replay for people: a Chrome/Perfetto trace, and a picture of the pipeline.

Rows are roles, and the units that work on their own (tensor cores, bulk copies). Time is in SM cycles.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fa4tune.kernels.plan import Unit
from fa4tune.model.replay import Event, Replay

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TENSOR_ROW = "tensor cores"
COPY_ROW = "copies (TMA)"

COLOURS = {
    Unit.TENSOR: "#76b7b2",
    Unit.EXP: "#e15759",
    Unit.ALU: "#4e79a7",
    Unit.FMA: "#59a14f",
    Unit.ISSUE: "#bab0ac",
    Unit.TMEM: "#b07aa1",
    Unit.SMEM: "#edc948",
    Unit.L2: "#9c755f",
}
"""One colour a unit, told apart by people who see few colours too."""

WORDS = {
    Unit.TENSOR: "tensor cores",
    Unit.EXP: "exponentials",
    Unit.ALU: "maxima, masks (ALU)",
    Unit.FMA: "multiply-add",
    Unit.ISSUE: "other instructions",
    Unit.TMEM: "tensor memory",
    Unit.SMEM: "shared memory",
    Unit.L2: "loads and stores",
}


def row_of(event: Event) -> str:
    """The row that shows an event."""
    if not event.asynchronous:
        return event.role
    return TENSOR_ROW if event.unit == Unit.TENSOR else COPY_ROW


def rows_of(replay: Replay) -> list[str]:
    """Rows in use, from memory over the tensor cores to the roles in the plan's order."""
    busy: dict[str, float] = {}
    for event in replay.events:
        row = row_of(event)
        busy[row] = busy.get(row, 0.0) + event.end - event.start
    used = {row for row, cycles in busy.items() if cycles > 0.002 * max(replay.tile_ends)}
    order = [COPY_ROW, TENSOR_ROW, *(role.name for role in replay.plan.roles)]
    return [row for row in order if row in used]


def chrome_trace(replay: Replay) -> dict[str, Any]:
    """The replay in the trace event format that Perfetto and ``chrome://tracing`` read.

    Times are microseconds at the predicted clock; ``args`` hold cycles, tile and iteration. A row of its own
    marks one steady-state period.
    """
    scale = 1.0 / replay.prediction.clock_mhz
    rows = rows_of(replay)
    events: list[dict[str, Any]] = [
        {
            "ph": "M",
            "pid": 0,
            "name": "process_name",
            "args": {"name": f"{replay.plan.name} on {replay.gpu.name}: {replay.plan.problem}"},
        }
    ]
    for number, row in enumerate([*rows, "steady state"]):
        events.append({"ph": "M", "pid": 0, "tid": number, "name": "thread_name", "args": {"name": row}})
        events.append(
            {"ph": "M", "pid": 0, "tid": number, "name": "thread_sort_index", "args": {"sort_index": number}}
        )
    for event in replay.events:
        if row_of(event) not in rows:
            continue
        end = event.released if event.asynchronous and event.unit == Unit.TENSOR else event.end
        events.append(
            {
                "ph": "X",
                "pid": 0,
                "tid": rows.index(row_of(event)),
                "name": event.operation,
                "cat": str(event.unit),
                "ts": event.start * scale,
                "dur": (end - event.start) * scale,
                "args": {
                    "unit": str(event.unit),
                    "role": event.role,
                    "tile": event.tile,
                    "iteration": event.iteration,
                    "start_cycle": event.start,
                    "cycles": end - event.start,
                    "seen_after_cycles": event.end - event.start,
                },
            }
        )
    if replay.window:
        start, end = replay.window
        events.append(
            {
                "ph": "X",
                "pid": 0,
                "tid": len(rows),
                "name": f"one period: {replay.period:.0f} cycles",
                "ts": start * scale,
                "dur": (end - start) * scale,
                "args": {"bound": replay.prediction.bound},
            }
        )
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {
            "problem": str(replay.plan.problem),
            "config": str(replay.plan.config),
            "gpu": replay.gpu.name,
            "clock_mhz": replay.prediction.clock_mhz,
            "period_cycles": replay.period,
            "bound": replay.prediction.bound,
            "critical_cycle": list(replay.prediction.critical_cycle),
        },
    }


def write_trace(replay: Replay, path: Path) -> None:
    """Write :func:`chrome_trace` to ``path``."""
    path.write_text(json.dumps(chrome_trace(replay)) + "\n")


def draw(replay: Replay, path: Path) -> None:
    """Draw the pipeline: rows of roles and units, coloured by unit, one steady-state period marked.

    The picture shows the start of the first tile, cut in the steady state, and the end of the last tile in a
    second panel. Operations of the critical cycle have a dark edge. Roles that share a unit without an order
    between them are drawn as the model treats them: each slowed by the others, in step. The file's ending
    decides its format.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    rows = rows_of(replay)
    whole = max(replay.tile_ends)
    period = replay.period or whole
    begin = 0.0
    stop = min(whole, replay.window[1] + 1.6 * period if replay.window else whole)
    ending = max(stop, whole - 3.2 * period)
    split = ending > stop * 1.02
    figure, axes = plt.subplots(
        1,
        2 if split else 1,
        figsize=(19 if split else 16, 1.6 + 0.62 * len(rows)),
        width_ratios=[stop - begin, whole - ending] if split else [1],
        squeeze=False,
        layout="constrained",
    )
    left: Axes = axes[0][0]
    shown = (stop - begin + whole - ending) if split else whole
    _panel(left, replay, rows, begin, stop if split else whole, shown)
    left.set_yticks(range(len(rows)), rows)
    left.set_xlabel("SM cycles from the start of the CTA")
    if split:
        right: Axes = axes[0][1]
        _panel(right, replay, rows, ending, whole * 1.002, shown)
        right.set_yticks([])
        right.set_xlabel("end of the tile" if len(replay.tile_ends) == 1 else "end of the last tile")
    if replay.window:
        start, end = replay.window
        left.axvspan(start, end, color="#f28e2b", alpha=0.16, zorder=0)
        left.annotate(
            f"one period: {replay.period:.0f} cycles",
            ((start + end) / 2, -0.72),
            ha="center",
            va="center",
            fontsize=9,
            color="#a85a00",
            annotation_clip=False,
        )
    prediction = replay.prediction
    figure.suptitle(
        f"{replay.plan.problem}  on {replay.gpu.title}\n"
        f"{replay.plan.config}\n"
        f"bound by {prediction.bound}; critical cycle: {' → '.join(prediction.critical_cycle)}",
        fontsize=9.5,
        ha="left",
        x=0.01,
    )
    used = dict.fromkeys(event.unit for event in replay.events)
    handles = [Patch(facecolor=COLOURS[unit], label=WORDS[unit]) for unit in COLOURS if unit in used]
    handles.append(Patch(facecolor="white", edgecolor="black", label="on the critical cycle"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=9, frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _panel(axes: Axes, replay: Replay, rows: list[str], begin: float, stop: float, shown: float) -> None:
    """One time span; ``shown`` is what all panels show together, which says how much text fits."""
    critical = set(replay.prediction.critical_cycle)
    scale = shown / 1250
    for event in replay.events:
        if event.end < begin or event.start > stop or row_of(event) not in rows:
            continue
        row = rows.index(row_of(event))
        tensor = event.unit == Unit.TENSOR and event.asynchronous
        end = event.released if tensor else event.end
        start, end = max(event.start, begin), min(end, stop)
        height, base = 0.8, row - 0.4
        if event.asynchronous:
            # roles that share a unit, and copies in flight together, each have a lane of the row
            lane, lanes = _lane(event, replay)
            height = 0.8 / lanes
            base += lane * height
        shade = 1.0 if event.iteration % 2 == 0 or event.iteration < 0 else 0.66
        axes.broken_barh(
            [(start, max(end - start, scale * 0.5))],
            (base, height),
            facecolor=COLOURS[event.unit],
            alpha=shade,
            edgecolor="black" if event.operation in critical and event.iteration >= 0 else "white",
            linewidth=0.8 if event.operation in critical and event.iteration >= 0 else 0.3,
        )
        name = re.sub(r"_(first|last)$", lambda m: "a" if m[1] == "first" else "b", event.operation)
        label = name if event.iteration < 0 else f"{name}·{event.iteration}"
        if end - start > scale * 6.2 * len(label) and height > 0.25:
            axes.text(
                (start + end) / 2,
                base + height / 2,
                label,
                ha="center",
                va="center",
                fontsize=7,
                clip_on=True,
            )
        elif end - start > scale * 8:
            number = f"{event.iteration}" if event.iteration >= 0 else ""
            axes.text(
                (start + end) / 2,
                base + height / 2,
                number,
                ha="center",
                va="center",
                fontsize=6,
                clip_on=True,
            )
    axes.set_xlim(begin, stop)
    axes.set_ylim(len(rows) - 0.45, -0.95)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6, zorder=0)
    axes.set_axisbelow(True)


def _lane(event: Event, replay: Replay) -> tuple[int, int]:
    """Lane and number of lanes of an asynchronous event's row: by role on the tensor cores, else by name."""
    if event.unit == Unit.TENSOR:
        roles = sorted({e.role for e in replay.events if e.unit == Unit.TENSOR and e.asynchronous})
        return roles.index(event.role), len(roles)
    names = ["load_k", "load_v"]
    return (names.index(event.operation) if event.operation in names else 2), 3
