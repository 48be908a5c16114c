"""``fa4tune measure``: measure an exported bundle on this machine's GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fa4tune.cli.common import JsonOption, emit_json, note


def measure(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="What search --export wrote.")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="OUT", help="Where results go (default: DIR/results).")
    ] = None,
    budget_seconds: Annotated[
        float | None, typer.Option("--budget-seconds", min=0, help="Start no new work after this long.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Measure a bundle's kernels: correctness first, then time in turns. Run again to go on."""
    from fa4tune.search.measure import ConsoleReport
    from fa4tune.search.measure import measure as run

    target = out or directory / "results"
    complete = run(directory, target, budget_seconds=budget_seconds, report=ConsoleReport())
    note(f"results in {target} ({'complete' if complete else 'cut off; the same command goes on'})")
    if json:
        emit_json({"results": str(target), "complete": complete})


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("measure")(measure)
