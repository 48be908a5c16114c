"""A replay as a Chrome/Perfetto trace.

Rows are roles, and the units that work on their own (tensor cores, bulk copies); the picture of
:mod:`fa4tune.model.replay_plot` has the same.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fa4tune.kernels.plan import Unit
from fa4tune.model.replay import Event, Replay

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
