"""``fa4tune explain``: what binds a kernel, from its plan, in under a second and without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fa4tune.cli.common import (
    ArchOption,
    JsonOption,
    emit_json,
    note,
    only,
    require_picture,
    with_problems,
    writing,
)
from fa4tune.errors import TablePathError
from fa4tune.problem import AttentionProblem

if TYPE_CHECKING:
    from rich.console import Console

    from fa4tune.cli.explain_cases import Case
    from fa4tune.model.explain import Explanation

BOUNDS = {"latency chain": "a latency chain", "memory": "memory (HBM)", "FMA": "multiply-add", "L2": "L2"}
"""What binds as a sentence names it, where that is not `the ...`."""

BAR = 28
"""Characters of a full utilisation bar."""


@with_problems
def explain(
    problems: tuple[AttentionProblem, ...],
    gpu: Annotated[
        list[str] | None,
        typer.Option("--gpu", help="GPU by name, or a TOML file of one's own; several are compared."),
    ] = None,
    arch: ArchOption = None,
    config: Annotated[
        list[str] | None,
        typer.Option(
            "--config",
            help="Knobs as key=value,..., the others at their default; `default`; or `tuned`, the table's. "
            "Several are compared.",
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Picture to write (.png, .svg or .pdf).")
    ] = None,
    table: Annotated[
        Path | None,
        typer.Option("--table", metavar="DIR", help="Table with measured times (default: the user's own)."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Predict a kernel and say what limits it, what it uses, and what each knob would change.

    Give --gpu or --config several times to see GPUs or configs side by side.
    """
    from fa4tune.cli.explain_cases import cases
    from fa4tune.table.store import Table

    if table is not None and not table.is_dir():
        raise TablePathError(f"table {str(table)!r} is not a directory; give one that a search wrote")
    if plot is not None:
        require_picture(plot)
    found = cases(only(problems), gpu or [], arch, config or [], Table(table))
    if plot is not None:
        from fa4tune.model.explain_plot import draw

        with writing(plot):
            draw([(case.label, case.explanation) for case in found], plot)
    if json:
        shown = found[0].as_dict() if len(found) == 1 else {"cases": [c.as_dict() for c in found]}
        emit_json(shown | ({"files": [str(plot)]} if plot is not None else {}))
        return
    from rich.console import Console

    console = Console(highlight=False)
    if len(found) == 1:
        show(found[0], console)
    else:
        from fa4tune.cli.explain_compare import compare

        compare(found, console)
    if plot is not None:
        note(f"wrote {plot}")


def show(case: Case, console: Console) -> None:
    """Print an explanation for a person."""
    from fa4tune.model.explain import paragraphs

    explanation = case.explanation
    plan, gpu, prediction = explanation.plan, explanation.gpu, explanation.prediction
    console.print(f"[bold]{plan.problem}[/] on {gpu.title} ({gpu.arch})")
    console.print(f"kernel {plan.name}, config")
    console.print(f"  {plan.config}", soft_wrap=True)  # stays one word for --config
    console.print(
        f"\n[bold]Predicted {prediction.microseconds:.4g} us: {prediction.tflops:.0f} TFLOP/s[/] "
        f"(field's convention; {prediction.tflops_exact:.0f} counting unmasked pairs exactly, "
        f"{prediction.tflops_exact / gpu.peak_tflops:.0%} of the {gpu.peak_tflops:.0f} peak)"
    )
    console.print(measured_text(case))
    console.print(f"[bold]Bound by {BOUNDS.get(prediction.bound, f'the {prediction.bound}')}[/]")
    for paragraph in paragraphs(explanation):
        console.print(paragraph)
    if explanation.memory_bound:
        console.print(
            f"The problem itself is memory-bound for any kernel: {explanation.flops_per_byte:.3g} FLOP a "
            f"byte, the GPU balances at {explanation.ridge_flops_per_byte:.3g}"
        )
    _show_chain(explanation, console)
    _show_cycles(explanation, console)
    _show_budgets(explanation, console)
    _show_changes(explanation, console)


def measured_text(case: Case) -> str:
    """What the table has measured, in a line."""
    text = "Not measured: the table has no time of this config for this problem and GPU."
    if case.measured_us is not None:
        text = (
            f"Measured {case.measured_us:.4g} us (table, in turns with other configs at their common clock): "
            f"the prediction is {case.error:+.1%} off."
        )
    if case.best is not None:
        text += f" The table's best, --config tuned, took {case.best.median_us:.4g} us."
    return text


def _show_chain(explanation: Explanation, console: Console) -> None:
    from rich.table import Table

    steps = explanation.prediction.steps
    if not steps:
        return
    tiles = max(1, sum(step.distance for step in steps))
    title = "Critical cycle: what one K/V tile waits for" + (f", over {tiles} tiles" if tiles > 1 else "")
    table = Table(title=title, title_justify="left")
    table.add_column("operation")
    table.add_column("cycles", justify="right")
    table.add_column("the next waits because of")
    for step in steps:
        why = _why(step.why) + (", for the next tile" if step.distance == 1 else "")
        table.add_row(step.operation, f"{step.cycles:.0f}", why)
    if tiles > 1:
        whole = sum(step.cycles for step in steps)
        table.add_row(f"a tile, of {tiles}", f"{whole / tiles:.0f}", "")
    console.print()
    console.print(table)
    console.print(
        "qk: S = Q K^T on the tensor cores; row_max, exp, rescale: softmax of S; pv: O += P V; load, store: "
        "copies. A number is the group of warps; first and last are parts of a tile."
    )


def _why(reason: str) -> str:
    """An arc's name in words."""
    if reason.startswith("order of "):
        return f"the same warps, one thing at a time ({reason.removeprefix('order of ')})"
    known = {"issue": "the time to issue it", "tensor in order": "the tensor cores, which work in order"}
    return known.get(reason, f"barrier: {reason}")


def _show_cycles(explanation: Explanation, console: Console) -> None:
    from rich.table import Table

    from fa4tune.kernels.plan import Unit
    from fa4tune.model.explain import UNIT_NAMES

    plan = explanation.plan
    rows = plan.tile_rows // plan.ctas_per_tile
    table = Table(
        title=f"Cycles of a CTA's K/V iteration, {rows} rows x {plan.tile_n} keys",
        title_justify="left",
    )
    table.add_column("unit")
    table.add_column("cycles", justify="right")
    table.add_column("busy over the whole kernel")
    for unit, cycles in [*explanation.cycles.items(), (Unit.HBM, explanation.hbm_cycles)]:
        share = explanation.prediction.utilisation.get(unit, 0.0)
        bar = "█" * round(min(1.0, share) * BAR)
        table.add_row(UNIT_NAMES[unit], f"{cycles:.0f}", f"{bar} {share:.0%}")
        if unit == Unit.SMEM:
            for path, part in explanation.smem_paths.items():
                if part:
                    table.add_row(f"  of it {path.replace('_', ' ')}", f"{part:.0f}", "")
    console.print()
    console.print(table)
    console.print(
        "Each unit as if alone. Shared memory counts operand reads by MMA, TMA writes and reads, and "
        "threads' loads and stores; published cycle tables count the MMA reads only. "
        "HBM counts q, k, v, out and LSE once."
    )


def _show_budgets(explanation: Explanation, console: Console) -> None:
    resources = explanation.plan.resources
    roles = ", ".join(f"{role.name} {role.registers}" for role in explanation.plan.roles)
    lines = [
        f"SMEM {resources.smem_bytes / 1024:.1f} of {resources.smem_limit / 1024:.0f} KiB",
        f"registers {resources.registers} of {resources.registers_limit} (a thread: {roles})",
    ]
    if resources.tmem_limit:
        lines.append(f"TMEM {resources.tmem_columns} of {resources.tmem_limit} columns")
    console.print(f"\n[bold]Budgets of a CTA[/] ({resources.ctas_per_sm} an SM): " + "; ".join(lines))


def _show_changes(explanation: Explanation, console: Console, most: int = 12) -> None:
    from rich.table import Table

    changes = explanation.changes
    possible = [c for c in changes if c.speedup is not None]
    table = Table(title="What one knob would change, all others kept", title_justify="left")
    for column, justify in (
        ("knob", "left"),
        ("value", "left"),
        ("predicted us", "right"),
        ("speed-up", "right"),
    ):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for change in possible[:most]:
        table.add_row(
            change.knob, _text(change.value), f"{change.microseconds:.4g}", f"{change.speedup:.3f}x"
        )
    console.print()
    console.print(table)
    if len(possible) > most:
        slowest = possible[-1]
        console.print(
            f"... and {len(possible) - most} slower ones, down to {slowest.speedup:.3f}x "
            f"({slowest.knob}={_text(slowest.value)})."
        )
    console.print(
        "These are predictions, off by 5% or so: take smaller differences for none, and measure larger ones "
        "with `fa4tune search --try KNOB=VALUE`."
    )
    refused = [c for c in changes if c.speedup is None]
    if refused:
        console.print(f"\n[bold]{len(refused)} values cannot run[/], for example:")
        seen: set[str] = set()
        for change in refused:
            if change.knob not in seen:
                seen.add(change.knob)
                console.print(f"  {change.knob}={_text(change.value)}: {change.reason}")


def _text(value: object) -> str:
    """As ``--config`` takes it."""
    if isinstance(value, tuple):
        return "/".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("explain")(explain)
