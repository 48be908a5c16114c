"""A replay as a picture: roles and units as rows, coloured by unit, one steady-state period marked.

The picture shows three stretches of time at one scale: how the pipeline fills, the steady state, and how the
last tile ends. Roles that share a unit without an order between them are drawn as the model treats them:
each slowed by the others, in step.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fa4tune.model.replay import Event, Replay
from fa4tune.model.trace import COLOURS, COPY_ROW, TENSOR_ROW, WORDS, row_of, rows_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PALE = 0.5
"""How much of its colour the work on odd K/V tiles keeps; the rest is white."""

ROW_INCHES, LANE_INCHES = 0.74, 0.2
"""Height of a role's row, and of a lane where several things are under way in a row at once."""

GREY = "#555555"
"""Stands for any colour in the legend."""

SIZES = (7.5, 6.5)
"""Font sizes of labels, the first that fits."""


@dataclass(frozen=True, slots=True)
class Box:
    """One execution as drawn: times in cycles, ``top`` and ``height`` in inches from the top of the rows.

    ``names`` are what it may be called, the fullest first.
    """

    event: Event
    start: float
    end: float
    top: float
    height: float
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of the time that is shown, and what it is."""

    begin: float
    end: float
    title: str


def draw(replay: Replay, path: Path) -> None:
    """Draw the pipeline; the file's ending decides the format."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure = figure_of(replay)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def stretches(replay: Replay) -> list[Stretch]:
    """What is shown: the first iteration, the marked period with its surroundings, the end of the last tile.

    Stretches that meet become one; without a steady state all is shown.
    """
    whole = max(replay.tile_ends)
    if replay.window is None:
        return [Stretch(0.0, whole, "the whole run")]
    period, (start, end) = replay.period, replay.window
    loop = [e for e in replay.events if e.iteration >= 0]
    first = min(e.start for e in loop if row_of(e) != COPY_ROW)
    last = max(_end(e) for e in loop)
    tile = "the tile" if len(replay.tile_ends) == 1 else "the last tile"
    found: list[Stretch] = []
    for stretch in (
        Stretch(0.0, first + 1.2 * period, "start"),
        Stretch(start - 0.35 * period, end + 0.35 * period, "steady state"),
        Stretch(last - 0.9 * period, whole, f"end of {tile}"),
    ):
        if found and stretch.begin <= found[-1].end:
            before = found.pop()
            stretch = Stretch(before.begin, stretch.end, f"{before.title}, {stretch.title}")
        found.append(stretch)
    return found


def figure_of(replay: Replay) -> Figure:
    """The picture as a matplotlib figure."""
    import matplotlib.pyplot as plt

    shown = stretches(replay)
    rows = rows_of(replay)
    boxes, tops = _boxes(replay, rows, shown)
    height = tops[-1]
    spans = [stretch.end - stretch.begin for stretch in shown]
    figure, axes = plt.subplots(
        1, len(shown), figsize=(19, 2.1 + height), width_ratios=spans, squeeze=False, layout="constrained"
    )
    for number, (panel, stretch) in enumerate(zip(axes[0], shown, strict=True)):
        _panel(panel, replay, boxes, stretch, height)
        centres = [(top + bottom) / 2 for top, bottom in pairwise(tops)]
        panel.set_yticks(centres if number == 0 else [], rows if number == 0 else [])
        panel.set_xlabel(f"{stretch.title} (SM cycles)")
    prediction = replay.prediction
    figure.suptitle(
        f"{replay.plan.problem}  on {replay.gpu.title}\n"
        f"{replay.plan.config}\n"
        f"bound by {prediction.bound}; critical cycle: {' → '.join(prediction.critical_cycle)}",
        fontsize=9.5,
        ha="left",
        x=0.01,
    )
    _legend(figure, replay)
    figure.draw_without_rendering()  # the layout is made now, and labels are fitted to it
    figure.set_layout_engine("none")
    for panel, stretch in zip(axes[0], shown, strict=True):
        _label(figure, panel, boxes, stretch)
    return figure


def _end(event: Event) -> float:
    """When the row is free again: tensor cores before their result is seen, all else at its end."""
    return event.released if row_of(event) == TENSOR_ROW else event.end


def _boxes(replay: Replay, rows: list[str], shown: list[Stretch]) -> tuple[list[Box], list[float]]:
    """Boxes of all rows, and the top of each row with the bottom of the last one.

    What runs in a row at the same time gets lanes of its own; tensor cores one for each role they serve.
    """
    boxes: list[Box] = []
    tops = [0.0]
    for row in rows:
        events = [
            e
            for e in replay.events
            if row_of(e) == row and any(e.start < s.end and _end(e) > s.begin for s in shown)
        ]
        roles = sorted({e.role for e in events})
        lanes: list[float] = []
        places = []
        for event in events:
            if row == TENSOR_ROW:
                lane = roles.index(event.role)
            else:
                free = (n for n, end in enumerate(lanes) if end <= event.start + 1e-6)
                lane = next(free, len(lanes))
            lanes += [0.0] * (lane + 1 - len(lanes))
            lanes[lane] = _end(event)
            places.append(lane)
        inches = max(ROW_INCHES, LANE_INCHES * len(lanes)) * 0.82
        each = inches / max(1, len(lanes))
        top = tops[-1] + 0.09 * inches
        for event, lane in zip(events, places, strict=True):
            boxes.append(
                Box(event, event.start, _end(event), top + lane * each, each, tuple(_names(event, row)))
            )
        tops.append(tops[-1] + inches * 1.18)
    return boxes, tops


def _names(event: Event, row: str) -> Iterator[str]:
    """What a box may be called: operation and K/V tile, the operation, the tile.

    In the row of a numbered role the operation goes without the number.
    """
    name = event.operation
    number = re.search(r"\d+$", row)
    if number is not None and row == event.role:
        name = re.sub(rf"(?<=[a-z]){number[0]}(?=_|$)", "", name)
    name = name.replace("_first", " first").replace("_last", " last")
    if event.iteration >= 0:
        yield f"{name} ·{event.iteration}"
    yield name
    if event.iteration >= 0:
        yield f"·{event.iteration}"


def _panel(axes: Axes, replay: Replay, boxes: list[Box], stretch: Stretch, height: float) -> None:
    critical = set(replay.prediction.critical_cycle)
    for box in boxes:
        start, end = max(box.start, stretch.begin), min(box.end, stretch.end)
        if start >= end:
            continue
        event = box.event
        binds = event.operation in critical and event.iteration >= 0
        axes.broken_barh(
            [(start, end - start)],
            (box.top, box.height),
            facecolor=_shade(COLOURS[event.unit], event.iteration),
            edgecolor="black" if binds else "white",
            linewidth=0.9 if binds else 0.4,
            zorder=3 if binds else 2,
        )
    if replay.window and stretch.begin < replay.window[1] and replay.window[0] < stretch.end:
        start, end = replay.window
        axes.axvspan(start, end, color="#f28e2b", alpha=0.16, zorder=0)
        axes.text(
            (start + end) / 2, -0.12, f"one period: {replay.period:.0f} cycles",
            ha="center", va="center", fontsize=9, color="#a85a00", clip_on=False,
        )  # fmt: skip
    axes.set_xlim(stretch.begin, stretch.end)
    axes.set_ylim(height, -0.25)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6, zorder=0)
    axes.set_axisbelow(True)


def _shade(colour: str, iteration: int) -> tuple[float, ...]:
    """The colour of work on a K/V tile, paler for odd ones; -1 is work beside the K/V tiles."""
    from matplotlib.colors import to_rgb

    keep = PALE if iteration > 0 and iteration % 2 else 1.0
    return tuple(1.0 - keep * (1.0 - part) for part in to_rgb(colour))


def _legend(figure: Figure, replay: Replay) -> None:
    from matplotlib.patches import Patch

    used = dict.fromkeys(event.unit for event in replay.events)
    handles = [Patch(facecolor=COLOURS[unit], label=WORDS[unit]) for unit in COLOURS if unit in used]
    handles += [
        Patch(facecolor=_shade(GREY, 0), label="full: even K/V tile"),
        Patch(facecolor=_shade(GREY, 1), label="pale: odd K/V tile (·3 is tile 3)"),
        Patch(facecolor="white", edgecolor="black", label="on the critical cycle"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=9, frameon=False)


def _label(figure: Figure, axes: Axes, boxes: list[Box], stretch: Stretch) -> None:
    """Write on each box the fullest name that fits into what is seen of it, upright where it is narrow."""
    renderer: Any = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    for box in boxes:
        start, end = max(box.start, stretch.begin), min(box.end, stretch.end)
        if start >= end:
            continue
        (left, low), (right, high) = axes.transData.transform([(start, box.top + box.height), (end, box.top)])
        fitted = _fitted(renderer, box.names, right - left, high - low)
        if fitted is None:
            continue
        name, size, upright = fitted
        axes.text(
            (start + end) / 2, box.top + box.height / 2, name, fontsize=size, zorder=4, gid="label",
            rotation=90 if upright else 0, ha="center", va="center_baseline" if not upright else "center",
        )  # fmt: skip


def _fitted(
    renderer: Any, names: tuple[str, ...], width: float, height: float
) -> tuple[str, float, bool] | None:
    """(name, font size, upright) of the fullest name that fits into ``width`` x ``height`` pixels."""
    from matplotlib.font_manager import FontProperties

    for name in names:
        for upright in (False, True):
            for size in SIZES:
                font = FontProperties(size=size)
                long = renderer.get_text_width_height_descent(name, font, False)[0]
                tall = renderer.get_text_width_height_descent("lp", font, False)[1]  # of any line
                across, along = (tall, long + 5) if upright else (long + 5, tall)
                if across <= width and along <= height:
                    return name, size, upright
    return None
