"""``fa4tune table``: look at tuned-kernel tables, check and merge them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fa4tune.cli.common import (
    ArchOption,
    GpuOption,
    JsonOption,
    emit_json,
    note,
    only,
    with_problems,
)
from fa4tune.errors import TablePathError
from fa4tune.problem import AttentionProblem

if TYPE_CHECKING:
    from fa4tune.table.entry import Entry
    from fa4tune.table.store import Table

app = typer.Typer(help="Tuned-kernel tables: list, show, check, merge.", no_args_is_help=True)

TableOption = Annotated[
    Path | None,
    typer.Option("--table", metavar="DIR", help="Table (default: the user's own, then the packaged ones)."),
]


def _open(table: Path | None, existing: bool = True) -> Table:
    from fa4tune.table.store import Table

    if table is not None and existing and not table.is_dir():
        raise TablePathError(f"table {str(table)!r} is not a directory; give one that a search wrote")
    return Table(table, fallback=() if table is not None else None)


def _as_dict(path: Path, entry: Entry) -> dict[str, Any]:
    import msgspec

    values: dict[str, Any] = msgspec.to_builtins(entry)
    return {**values, "path": str(path)}


@app.command("list")
def list_(table: TableOption = None, json: JsonOption = False) -> None:
    """Every entry: problem, GPU, source, time, and how much faster than the default."""
    entries = list(_open(table).entries())
    if json:
        emit_json({"entries": [_as_dict(path, entry) for path, entry in entries]})
        return
    for _, entry in entries:
        ratio = "" if entry.ratio is None else f", default / this {entry.ratio:.3f}"
        print(f"{entry.problem} on {entry.hardware_key}")
        print(f"  {entry.source} {entry.median_us:.1f} us{ratio}; kernel {entry.kernel}")
        print(f"  {entry.kernel_config()}")
    note(f"{len(entries)} entries")


def show(
    problems: tuple[AttentionProblem, ...],
    gpu: GpuOption = None,
    arch: ArchOption = None,
    table: TableOption = None,
    json: JsonOption = False,
) -> None:
    """The entry that a problem gets, with its provenance; status 1 where there is none."""
    from fa4tune.hardware.gpu import choose_gpu

    problem, hardware = only(problems), choose_gpu(gpu, arch)
    hit = _open(table).lookup(problem, hardware)
    if hit is None:
        note(
            f"error: no entry serves {problem} on {hardware.name}; run `fa4tune search {problem} "
            f"--gpu {gpu or hardware.name}`"
        )
        raise SystemExit(1)
    values = {**_as_dict(hit.path, hit.entry), "exact": hit.exact}
    if json:
        emit_json(values)
        return
    print(f"{problem} on {hardware.name}: {'exact entry' if hit.exact else 'entry of its bucket'}")
    for name, value in values.items():
        if value not in (None, "", {}):
            print(f"  {name}: {value}")


@app.command()
def check(table: TableOption = None, json: JsonOption = False) -> None:
    """Read every file of the table; status 1 where one cannot be used."""
    opened = _open(table)
    faults = opened.faults()
    bad = {fault.path for fault in faults}
    import warnings

    from fa4tune.table.store import TableWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TableWarning)
        good = sum(path not in bad for path, _ in opened.entries())
    if json:
        emit_json({"usable": good, "faults": [{"path": str(f.path), "reason": f.reason} for f in faults]})
    else:
        for fault in faults:
            print(f"{fault.path}: {fault.reason}")
        print(f"{good} usable entries, {len(faults)} faults")
    if faults:
        raise SystemExit(1)


@app.command()
def merge(
    others: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Tables to take entries from.")],
    table: TableOption = None,
    json: JsonOption = False,
) -> None:
    """Take over entries that are better: measured before predicted, then the faster; provenance is kept."""
    opened = _open(table, existing=False)
    changed: dict[str, int] = {}
    for other in others:
        changed[str(other)], faults = opened.merge(other)
        for fault in faults:
            note(f"left out {fault.path}: {fault.reason}")
    if json:
        emit_json({"table": str(opened.directory), "changed": changed})
    else:
        for name, count in changed.items():
            print(f"{name}: {count} entries of {opened.directory} changed")


def register(root: typer.Typer) -> None:
    """Add the verb."""
    app.command("show")(with_problems(show))
    root.add_typer(app, name="table")
