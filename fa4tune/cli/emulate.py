"""``fa4tune emulate``: run a kernel's PTX on the CPU and compare with float64."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    with_problems,
)
from fa4tune.problem import AttentionProblem

if TYPE_CHECKING:
    from fa4tune.emulator.attention import EmulatedCall
    from fa4tune.emulator.counters import Counters


@with_problems
def emulate(
    problems: tuple[AttentionProblem, ...],
    gpu: GpuOption = None,
    arch: ArchOption = None,
    config: ConfigOption = None,
    late: Annotated[
        int | None,
        typer.Option(
            "--late", metavar="SEED", help="Asynchronous work as late as possible, random warp order."
        ),
    ] = None,
    counters: Annotated[bool, typer.Option("--counters", help="Count instructions, bytes and MMAs.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Look for races, missing fences and waits, uninitialised reads.")
    ] = False,
    waive: Annotated[
        list[str] | None, typer.Option("--waive", metavar="NAME", help="A habit that is no finding.")
    ] = None,
    inputs: Annotated[
        Path | None, typer.Option("--inputs", metavar="FILE", help="q, k, v from a safetensors file.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the Gaussian inputs.")] = 0,
    json: JsonOption = False,
) -> None:
    """Run a kernel's PTX on the CPU; status 1 if it is wrong or the emulator finds a fault."""
    from fa4tune.emulator.attention import emulate_forward, read_inputs
    from fa4tune.emulator.checks import WaiverError, waived_kinds
    from fa4tune.hardware.gpu import choose_gpu

    problem = only(problems)
    waived_kinds(waive or ())
    if waive and not check:
        raise WaiverError(f"--waive {waive[0]} without --check waives nothing: add --check or leave it out")
    chosen = choose_gpu(gpu, arch)
    knobs = choose_config(problem, chosen, config)
    tensors = None if inputs is None else read_inputs(inputs, problem)
    with _progress_bar() as progress:
        call = emulate_forward(
            problem,
            knobs,
            chosen,
            inputs=tensors,
            seed=seed,
            late=late,
            counters=counters,
            check=check,
            waivers=waive or (),
            progress=progress,
        )
    if json:
        emit_json({**_as_dict(call, str(knobs), chosen.name, late), "check": check})
    else:
        _show(call, str(knobs), f"{chosen.title} ({chosen.arch})", late, check)
    if not call.passed:
        raise SystemExit(1)


class _progress_bar:  # noqa: N801 (reads as a function)
    """A bar on stderr that counts clusters; hidden where stderr is no terminal."""

    def __enter__(self) -> Any:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        console = Console(stderr=True)
        self.bar = Progress(
            TextColumn("clusters"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            console=console, transient=True, disable=not console.is_terminal,
        )  # fmt: skip
        self.bar.start()
        task = self.bar.add_task("clusters", total=None)
        return lambda done, total: self.bar.update(task, completed=done, total=total)

    def __exit__(self, *_: object) -> None:
        self.bar.stop()


def _counters_dict(counters: Counters) -> list[dict[str, Any]]:
    """One entry a warp number, summed over CTAs."""
    warps = sorted({w.warp for w in counters.warps})
    out = []
    for warp in warps:
        total = counters.total(warps={warp})
        out.append(
            {
                "warp": warp,
                "mmas": [
                    {"kind": kind, "m": m, "n": n, "k": k, "count": count}
                    for (kind, m, n, k), count in sorted(total.mmas.items())
                ],
                "exponentials": dict(total.exponentials),
                "rescales": dict(total.rescales),
                "bytes": dict(total.bytes),
                "instructions": dict(total.instructions),
            }
        )
    return out


def _as_dict(call: EmulatedCall, config: str, gpu: str, late: int | None) -> dict[str, Any]:
    counted = [r.counters for r in call.results if r.counters is not None]
    return {
        "problem": str(call.problem),
        "config": config,
        "gpu": gpu,
        "late": late,
        "passed": call.passed,
        "out_error": call.out_error,
        "lse_error": call.lse_error,
        "warp_instructions": sum(r.warp_instructions for r in call.results),
        "findings": [
            {
                "kind": f.kind,
                "severity": f.severity,
                "message": f.message,
                "line": f.line,
                "text": f.text,
                "where": f.where,
                "source": f.source,
                "details": list(f.details),
            }
            for f in call.findings
        ],
        "counters": _counters_dict(counted[0]) if counted else None,
    }


def _show(call: EmulatedCall, config: str, gpu: str, late: int | None, check: bool) -> None:
    from rich.console import Console
    from rich.markup import escape

    from fa4tune.emulator.attention import LSE_BOUND, OUT_BOUND

    console = Console(highlight=False)
    mode = ("eager" if late is None else f"late, seed {late}") + (", checked" if check else "")
    console.print(f"[bold]{call.problem}[/] for {gpu}, emulated ({mode})", soft_wrap=True)
    console.print(f"config {config}", soft_wrap=True)
    console.print(f"{sum(r.warp_instructions for r in call.results):,} warp instructions")
    for name, error, bound, how in (
        ("out", call.out_error, OUT_BOUND, "of the largest element"),
        ("lse", call.lse_error, LSE_BOUND, "absolute"),
    ):
        verdict = "[green]ok[/]" if error <= bound else "[red]too large[/]"
        console.print(f"{name}: largest error {error:.2e} {how}, bound {bound:.0e}: {verdict}")
    for finding in call.findings:
        console.print(escape(str(finding)))
    if not call.findings:
        console.print("no findings")
    for result in call.results:
        if result.counters is not None:
            _show_counters(result.counters, console)
    if not call.passed:
        note("the kernel is wrong, or a finding stands")


def _show_counters(counters: Counters, console: Any) -> None:
    from rich.table import Table

    for title, field in (
        ("Matrix instructions", "mmas"),
        ("Exponentials (elements)", "exponentials"),
        ("Votes to rescale O", "rescales"),
        ("Bytes by path", "bytes"),
        ("Warp instructions by class", "instructions"),
    ):
        warps = sorted({w.warp for w in counters.warps})
        totals = {warp: getattr(counters.total(warps={warp}), field) for warp in warps}
        keys = sorted({key for total in totals.values() for key in total}, key=str)
        if not keys:
            continue
        table = Table()
        table.add_column("warps", no_wrap=True, min_width=max(len(_label(k)) for k in keys))
        groups = _equal_runs(warps, totals)
        for group in groups:
            first, last = group[0], group[-1]
            name = str(first) if first == last else f"{first}-{last}"
            table.add_column(name, justify="right", overflow="fold")
        for key in keys:
            cells = [
                f"{sum(totals[w][key] for w in group):,}" if any(totals[w][key] for w in group) else ""
                for group in groups
            ]
            table.add_row(_label(key), *cells)
        console.print(f"\n[italic]{title}, all CTAs together[/]")
        console.print(table)


def _label(key: Any) -> str:
    return f"{key[0]} {key[1]}x{key[2]}x{key[3]}" if isinstance(key, tuple) else str(key)


def _equal_runs(warps: list[int], totals: dict[int, Any]) -> list[list[int]]:
    """Neighbouring warps that count the same things, four (a warpgroup) at most: a column each."""
    groups: list[list[int]] = []
    for warp in warps:
        fits = groups and warp % 4 and set(totals[groups[-1][0]]) == set(totals[warp])
        if fits:
            groups[-1].append(warp)
        else:
            groups.append([warp])
    return groups


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("emulate")(emulate)
