"""``fa4tune explain``: what binds a kernel, from its plan, in under a second and without a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from fa4tune.cli.common import (
    ArchOption,
    ConfigOption,
    GpuOption,
    JsonOption,
    choose_config,
    emit_json,
    only,
    with_problems,
)
from fa4tune.problem import AttentionProblem

if TYPE_CHECKING:
    from rich.console import Console

    from fa4tune.model.explain import Explanation

BAR = 28
"""Characters of a full utilisation bar."""


@with_problems
def explain(
    problems: tuple[AttentionProblem, ...],
    gpu: GpuOption = None,
    arch: ArchOption = None,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Predict one kernel and say what limits it, what it uses, and what each knob would change."""
    from fa4tune.hardware.gpu import choose_gpu
    from fa4tune.kernels.program import build_plan
    from fa4tune.model.explain import explain as explain_plan

    problem = only(problems)
    chosen = choose_gpu(gpu, arch)
    plan = build_plan(problem, choose_config(problem, chosen, config), chosen)
    explanation = explain_plan(plan, chosen)
    if json:
        emit_json(explanation.as_dict())
        return
    from rich.console import Console

    show(explanation, Console(highlight=False))


def show(explanation: Explanation, console: Console) -> None:
    """Print an explanation for a person."""
    plan, gpu, prediction = explanation.plan, explanation.gpu, explanation.prediction
    console.print(f"[bold]{plan.problem}[/] on {gpu.title} ({gpu.arch})")
    console.print(f"kernel {plan.name}, config")
    console.print(f"  {plan.config}", soft_wrap=True)  # stays one word for --config
    console.print(
        f"\n[bold]Predicted {prediction.microseconds:.4g} us: {prediction.tflops:.0f} TFLOP/s[/] "
        f"(field's convention; {prediction.tflops_exact:.0f} counting unmasked pairs exactly, "
        f"{prediction.tflops_exact / gpu.peak_tflops:.0%} of the {gpu.peak_tflops:.0f} peak)"
    )
    console.print(f"[bold]Bound by {prediction.bound}[/]")
    if explanation.memory_bound:
        console.print(
            f"The problem itself is memory-bound for any kernel: {explanation.flops_per_byte:.3g} FLOP a "
            f"byte, the GPU balances at {explanation.ridge_flops_per_byte:.3g}"
        )
    if prediction.critical_cycle:
        console.print("critical cycle: " + " -> ".join(prediction.critical_cycle))
    _show_cycles(explanation, console)
    _show_budgets(explanation, console)
    _show_changes(explanation, console)


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
