"""``fa4tune simulate``: play a kernel's pipeline event by event and write it as a trace or a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fa4tune.cli.common import (
    ArchOption,
    ConfigOption,
    GpuOption,
    JsonOption,
    choose_config,
    emit_json,
    note,
    only,
    require_picture,
    require_writable,
    with_problems,
    writing,
)
from fa4tune.problem import AttentionProblem


@with_problems
def simulate(
    problems: tuple[AttentionProblem, ...],
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Chrome/Perfetto trace (JSON) to write.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Picture to write (.png, .svg or .pdf).")
    ] = None,
    tiles: Annotated[int, typer.Option("--tiles", min=1, help="Output tiles of the CTA to play.")] = 1,
    trips: Annotated[
        int | None,
        typer.Option("--trips", min=1, help="K/V iterations of a tile (default: the problem's, at most 12)."),
    ] = None,
    masked: Annotated[
        int, typer.Option("--masked", min=0, help="Iterations of each tile that apply the mask.")
    ] = 0,
    gpu: GpuOption = None,
    arch: ArchOption = None,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Play one CTA of the kernel and show when each role and unit does what."""
    from fa4tune.hardware.gpu import choose_gpu
    from fa4tune.kernels.program import build_plan
    from fa4tune.model.replay import replay
    from fa4tune.model.replay_plot import draw
    from fa4tune.model.trace import write_trace

    if trace is not None:
        require_writable(trace)
    if plot is not None:
        require_picture(plot)
    problem = only(problems)
    chosen = choose_gpu(gpu, arch)
    plan = build_plan(problem, choose_config(problem, chosen, config), chosen)
    played = replay(plan, chosen, tiles=tiles, trips=trips, masked=masked)
    written: list[str] = []
    if trace is not None:
        with writing(trace):
            write_trace(played, trace)
        written.append(str(trace))
    if plot is not None:
        with writing(plot):
            draw(played, plot)
        written.append(str(plot))
    prediction = played.prediction
    if json:
        emit_json(
            {
                "problem": str(problem),
                "gpu": chosen.name,
                "kernel": plan.name,
                "config": str(plan.config),
                "events": len(played.events),
                "cycles": max(played.tile_ends),
                "tile_ends": list(played.tile_ends),
                "period": played.period,
                "predicted_period": prediction.period,
                "bound": prediction.bound,
                "critical_cycle": list(prediction.critical_cycle),
                "utilisation": {str(unit): busy for unit, busy in played.utilisation().items()},
                "files": written,
            }
        )
        return
    print(f"{problem} on {chosen.title}, config {plan.config}")
    print(
        f"{len(played.events)} operations in {max(played.tile_ends):.0f} cycles; "
        + (f"steady state {played.period:.0f} cycles an iteration (predicted " if played.period else "")
        + (f"{prediction.period:.0f})" if played.period else f"{prediction.period:.0f} cycles predicted")
        + f", bound by {prediction.bound}"
    )
    print("critical cycle: " + " -> ".join(prediction.critical_cycle))
    for path in written:
        note(f"wrote {path}")
    if not written:
        note("add --trace out.json (open it at ui.perfetto.dev) or --plot out.png to see the pipeline")


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command(name="simulate")(simulate)
