"""Several explanations side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fa4tune.kernels.plan import Unit
from fa4tune.model.explain import UNIT_NAMES, in_words

if TYPE_CHECKING:
    from rich.console import Console

    from fa4tune.cli.explain_cases import Case


def compare(cases: list[Case], console: Console) -> None:
    """Print one column a case: times, what binds, how busy each unit is; then each one in words."""
    from rich.table import Table

    first = cases[0].explanation.prediction.microseconds
    console.print(f"[bold]{cases[0].explanation.plan.problem}[/]\n")
    for case in cases:
        gpu = case.explanation.gpu
        console.print(f"[bold]{case.label}[/]: {gpu.title} ({gpu.arch})")
        console.print(f"  {case.explanation.plan.config}", soft_wrap=True)
    table = Table(title="Side by side", title_justify="left")
    table.add_column("")
    for case in cases:
        table.add_column(case.label, justify="right", overflow="fold")

    def row(name: str, *values: str) -> None:
        table.add_row(name, *values)

    predictions = [case.explanation.prediction for case in cases]
    row("predicted us", *(f"{p.microseconds:.4g}" for p in predictions))
    if any(case.measured_us is not None for case in cases):
        row(
            "measured us (error)",
            *(
                "-" if case.measured_us is None else f"{case.measured_us:.4g} ({case.error:+.1%})"
                for case in cases
            ),
        )
    row("speed against the first", *(f"{first / p.microseconds:.3f}x" for p in predictions))
    row("TFLOP/s", *(f"{p.tflops:.0f}" for p in predictions))
    row(
        "share of peak",
        *(f"{c.explanation.prediction.tflops_exact / c.explanation.gpu.peak_tflops:.0%}" for c in cases),
    )
    row("bound", *(p.bound for p in predictions))
    row("rows x keys of a tile", *(f"{_rows(c)} x {c.explanation.plan.tile_n}" for c in cases))
    row("cycles of a K/V tile", *(f"{p.period:.0f}" for p in predictions))
    row("clock MHz", *(f"{p.clock_mhz:.0f}" for p in predictions))
    table.add_section()
    for unit in Unit:
        shares = [p.utilisation.get(unit, 0.0) for p in predictions]
        if any(share > 0.005 for share in shares):
            row(f"{UNIT_NAMES[unit]} busy", *(f"{share:.0%}" for share in shares))
    console.print()
    console.print(table)
    for case in cases:
        console.print(f"\n[bold]{case.label}[/]: {in_words(case.explanation)}")


def _rows(case: Case) -> int:
    plan = case.explanation.plan
    return plan.tile_rows // plan.ctas_per_tile
