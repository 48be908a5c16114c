"""``fa4tune search``: find the best config by prediction, by measuring here, or split over two machines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fa4tune.cli.common import (
    ArchOption,
    GpuOption,
    JsonOption,
    emit_json,
    note,
    with_problems,
)
from fa4tune.errors import ConfigError, InfeasibleError, ProblemError
from fa4tune.kernels.config import default_config
from fa4tune.kernels.program import build_plan
from fa4tune.problem import AttentionProblem

if TYPE_CHECKING:
    from fa4tune.hardware.gpu import Gpu
    from fa4tune.search.evaluators import Report
    from fa4tune.search.session import Found, Request
    from fa4tune.search.transfer import Exported

TableOption = Annotated[
    Path | None, typer.Option("--table", metavar="DIR", help="Table to write (default: the user's own).")
]
StudiesOption = Annotated[
    Path | None,
    typer.Option("--studies", metavar="DIR", help="Where trials are kept (default: the user's data)."),
]


def search(
    problems: tuple[AttentionProblem, ...],
    gpu: GpuOption = None,
    arch: ArchOption = None,
    trials: Annotated[int, typer.Option("--trials", min=1, help="Configs to measure for a problem.")] = 24,
    table: TableOption = None,
    studies: StudiesOption = None,
    storage: Annotated[
        str | None, typer.Option("--storage", help="Optuna storage URL in place of a journal file.")
    ] = None,
    sampler: Annotated[str, typer.Option("--sampler", help="tpe or gp.")] = "tpe",
    seed: Annotated[int, typer.Option("--seed", help="Of the sampler.")] = 0,
    predict: Annotated[bool, typer.Option("--predict", help="Do not measure, even with a GPU.")] = False,
    try_: Annotated[
        list[str] | None, typer.Option("--try", metavar="KEY=VALUE,...", help="Measure this config too.")
    ] = None,
    ablate: Annotated[
        bool, typer.Option("--ablate", help="Also measure every one-knob change of the default.")
    ] = False,
    export: Annotated[
        Path | None, typer.Option("--export", metavar="DIR", help="Write a bundle to measure elsewhere.")
    ] = None,
    import_: Annotated[
        Path | None, typer.Option("--import", metavar="DIR", help="Take the results of a measured bundle.")
    ] = None,
    python: Annotated[str, typer.Option("--python", help="Python of the measuring host.")] = "3.12",
    emulate: Annotated[
        bool, typer.Option(help="Run a predicted winner in the emulator before it is written.")
    ] = True,
    rounds: Annotated[int, typer.Option("--rounds", min=5, help="Turns of every config.")] = 15,
    duel_rounds: Annotated[int, typer.Option("--duel-rounds", min=5, help="Turns in the last duel.")] = 40,
    json: JsonOption = False,
) -> None:
    """Find the fastest config of a problem and write it to the table.

    With a fitting GPU configs are measured; without one the model's prediction is taken. With --export the
    candidates are compiled into a directory to measure on another machine, and --import takes the results.
    """
    from fa4tune.hardware.gpu import choose_gpu
    from fa4tune.runtime.device import local_gpu
    from fa4tune.search import session
    from fa4tune.search.bundle import Settings
    from fa4tune.search.candidates import SAMPLERS
    from fa4tune.search.evaluators import MeasuredEvaluator
    from fa4tune.search.study import default_directory
    from fa4tune.table.store import Table

    if export is not None and import_ is not None:
        raise ProblemError("--export and --import exclude each other; run one after the other")
    if import_ is not None and problems:
        raise ProblemError("--import takes no problem; the bundle names its own")
    if sampler not in SAMPLERS:
        raise ConfigError(f"sampler {sampler!r} is not known; use one of {', '.join(SAMPLERS)}")

    def request(hardware: Gpu) -> Request:
        return session.Request(
            gpu=hardware,
            trials=trials,
            table=Table(table),
            studies=studies,
            storage=storage,
            sampler=sampler,
            seed=seed,
            asked=tuple(try_ or ()),
            ablate=ablate,
            note=note,
            emulate=emulate,
        )

    if import_ is not None:
        override = choose_gpu(gpu, arch) if gpu or arch else None
        found = session.import_results(import_, lambda hardware: request(override or hardware), override)
        _show(found, json)
        return
    here = None if predict or export is not None else local_gpu()
    chosen = here if here is not None and not gpu and not arch else choose_gpu(gpu, arch)
    for text in try_ or ():  # what cannot be measured is said before minutes of work, not after
        _require_one_runs(problems, chosen, text)
    settings = Settings(rounds=rounds, duel_rounds=duel_rounds)
    with _progress() as report:
        if export is not None:
            written = session.export_bundle(
                problems,
                request(chosen),
                export,
                python=python,
                settings=settings,
                report=report,
            )
            _show_export(written, json)
            return
        measured = here is not None and here.key == chosen.key
        if not measured:
            note(f"taking the model's prediction: {'asked to' if predict else f'no {chosen.title} here'}")
        evaluator = MeasuredEvaluator(chosen, studies or default_directory(), settings=settings)
        found = [
            session.search_measured(problem, request(chosen), evaluator, report=report)
            if measured
            else session.search_predicted(problem, request(chosen), report)
            for problem in problems
        ]
    _show(found, json)


def _require_one_runs(problems: tuple[AttentionProblem, ...], gpu: Gpu, text: str) -> None:
    """Check that the config of a ``--try`` can run at least one of the problems; others leave it out.

    Raises:
        ConfigError: a knob does not exist, or a value is out of range.
        InfeasibleError: it can run none of them.
    """
    refused = []
    for problem in problems:
        try:
            build_plan(problem, default_config(problem, gpu.arch).with_text(text), gpu)
        except InfeasibleError as error:
            refused.append(error)
    if len(refused) == len(problems):
        raise refused[0]


def _show_export(written: Exported, json: bool) -> None:
    total = sum(written.candidates.values())
    note(f"{written.directory}: {total} configs, {written.size / 1e6:.1f} MB")
    note(f"on the GPU host: python {written.directory}/measure.py --out OUT")
    note("then here: fa4tune search --import OUT")
    if json:
        emit_json(
            {
                "exported": str(written.directory),
                "candidates": written.candidates,
                "bytes": written.size,
                "wheel": written.wheel,
            }
        )


def _show(found: list[Found], json: bool) -> None:
    """Print what was found; status 1 where a problem came to nothing."""
    if json:
        emit_json({"results": [item.as_dict() for item in found]})
    else:
        for item in found:
            print("\n".join(_lines(item)))
    if any(item.entry is None for item in found):
        note("error: no config passed its checks for at least one problem; see the outcomes")
        raise SystemExit(1)


def _lines(item: Found) -> list[str]:
    entry = item.entry
    outcomes = ", ".join(f"{count} {name}" for name, count in sorted(item.outcomes.items()))
    if entry is None:
        return [f"{item.problem}: nothing usable ({outcomes})"]
    rate = item.problem.flops_convention() / entry.median_us * 1e-6
    spread = "" if entry.spread_us is None else f" (spread {entry.spread_us:.1f})"
    lines = [
        f"{item.problem}",
        f"  {entry.source}: {entry.median_us:.1f} us{spread}, {rate:.0f} TFLOP/s; configs: {outcomes}",
        f"  config: {entry.kernel_config()}",
    ]
    if entry.default_us is not None and entry.ratio is not None:
        lines.append(f"  default: {entry.default_us:.1f} us, {entry.ratio:.3f} times as long")
    if entry.source == "measured" and entry.predicted_us is not None:
        lines.append(f"  the model said {entry.predicted_us:.1f} us")
    lines.append(f"  entry: {item.path}")
    return lines


@contextmanager
def _progress() -> Iterator[Report]:
    """A progress bar on stderr: stage, time left, what happened last. A file gets a line a stage."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column

    # only the text gives way where the terminal is narrow
    columns = (
        TextColumn("{task.fields[stage]:<10}", table_column=Column(no_wrap=True, min_width=10)),
        BarColumn(bar_width=16, table_column=Column(min_width=16)),
        MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=7)),
        TimeRemainingColumn(table_column=Column(no_wrap=True, min_width=7)),
        TextColumn(
            "{task.fields[text]}",
            markup=False,
            table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1),
        ),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, expand=True) as bar:
        task = bar.add_task("", stage="", text="", total=None)
        shown = ""

        def report(stage: str, done: int, total: int, text: str) -> None:
            nonlocal shown
            if stage != shown:
                bar.reset(task)
                shown = stage
                if not console.is_terminal:
                    note(f"{stage}: {total} step{'' if total == 1 else 's'}")
            bar.update(task, completed=done, total=total, stage=stage, text=text)

        yield report


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("search")(with_problems(search, unless="import_"))
