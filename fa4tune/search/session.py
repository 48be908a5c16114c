"""One search from request to table entry: predicted, measured here, or split over two machines."""

from __future__ import annotations

import dataclasses
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fa4tune.errors import SearchError
from fa4tune.hardware.gpu import Gpu, gpu_names, load_gpu
from fa4tune.kernels.config import CONFIGS, KernelConfig, default_config
from fa4tune.outcome import Outcome
from fa4tune.problem import AttentionProblem
from fa4tune.record import Trial
from fa4tune.search.bundle import MANIFEST, Manifest, Settings
from fa4tune.search.candidates import Choice, choose, predicted_time
from fa4tune.search.compiling import Built, build
from fa4tune.search.entries import measured_entry, predicted_entry
from fa4tune.search.measure import measure
from fa4tune.search.ranking import rank_space
from fa4tune.search.space import ablations
from fa4tune.search.study import Study
from fa4tune.search.transfer import Exported, Imported, export, load_results, make_manifest
from fa4tune.search.worker import DEFAULT_BACKEND
from fa4tune.table.entry import Entry
from fa4tune.table.store import Table

BATCH = 8
"""New configs that are compiled and compared at a time when measuring on this machine."""

FINALISTS = 3
"""Fastest configs of a study that meet the default in its last duel."""

Report = Callable[[str, int, int, str], None]
"""``report(stage, done, total, text)``: what a progress bar shows."""


def _silent(stage: str, done: int, total: int, text: str) -> None:
    return


@dataclass(frozen=True, slots=True)
class Found:
    """What a search came to for one problem. ``entry`` is None where no config passed its checks."""

    problem: AttentionProblem
    entry: Entry | None
    path: Path | None
    outcomes: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        entry = self.entry
        names = ("source", "kernel", "config", "median_us", "spread_us", "default_us", "ratio")
        more = ("predicted_us", "trials", "kernel_class", "bucket")
        values = {n: getattr(entry, n) for n in (*names, *more)} if entry else {}
        return {
            "problem": str(self.problem),
            **values,
            "outcomes": self.outcomes,
            "entry": str(self.path) if self.path else None,
        }


@dataclass(frozen=True, slots=True)
class Request:
    """What to search and how.

    Args:
        gpu: the hardware the kernels are for.
        trials: configs to measure for each problem, the default among them, over all runs of a study.
        table: where entries go.
        studies: directory of record files and journals; default the user's.
        storage: Optuna storage URL in place of the journal.
        sampler, seed: of the sampler's share of the trials.
        asked: texts of further configs to measure, as ``--config`` takes them.
        ablate: also measure every config that differs from the default in one knob.
    """

    gpu: Gpu
    trials: int
    table: Table
    studies: Path | None = None
    storage: str | None = None
    sampler: str = "tpe"
    seed: int = 0
    asked: tuple[str, ...] = ()
    ablate: bool = False

    def study(self, problem: AttentionProblem) -> Study:
        """The study of one problem."""
        return Study(problem, self.gpu, directory=self.studies, storage=self.storage)


def search_predicted(problem: AttentionProblem, request: Request, report: Report = _silent) -> Found:
    """Search with the model alone: the exhaustive minimum of the space.

    Raises:
        InfeasibleError, SearchError: nothing can run the problem.
        TableError: the table cannot be written.
    """
    ranked = rank_space(
        problem, request.gpu, progress=lambda done, total: report("predicting", done, total, str(problem))
    )
    entry = predicted_entry(problem, request.gpu, ranked)
    path = request.table.put(entry)
    return Found(problem, entry, path, {Outcome.PREDICTED.value: len(ranked)})


def pick(
    problem: AttentionProblem,
    request: Request,
    study: Study,
    count: int,
    report: Report = _silent,
) -> tuple[list[Built], list[Trial]]:
    """Choose and compile until ``count`` new configs can be measured, or no more are found.

    Configs that fail to compile or spill are recorded in the study at once; others take their place.
    """
    gpu = request.gpu
    ranked = rank_space(
        problem, gpu, progress=lambda done, total: report("predicting", done, total, str(problem))
    )
    base = default_config(problem, gpu.arch)
    asked = [(base.with_text(text), "asked") for text in request.asked]
    if request.ablate:
        asked += [(config, "ablation") for config in ablations(problem, gpu, base)]
    hit = request.table.lookup(problem, gpu)
    again = [hit.entry.kernel_config()] if hit is not None else []
    times = {c: t for c, t in study.tried().items() if t is not None}
    again += sorted(times, key=lambda c: times[c])[:1]
    built: dict[KernelConfig, Built] = {}
    failures: list[Trial] = []
    for _ in range(3):
        tried = study.tried()
        left = count - sum(config not in tried for config in built)
        if left <= 0:
            break
        known = {**tried, **dict.fromkeys(built)}
        choices = choose(
            problem,
            gpu,
            ranked,
            known,
            left,
            again=again,
            asked=asked,
            sampler=request.sampler,
            seed=request.seed,
        )
        fresh = [c for c in choices if c.config not in built]
        if not fresh:
            break
        done, failed = build(
            problem,
            gpu,
            fresh,
            study=study.name,
            progress=lambda n, total: report("compiling", n, total, str(problem)),
        )
        built |= {item.choice.config: item for item in done}
        failures += failed
        study.add(failed)
        if not failed:
            break
    return sorted(built.values(), key=lambda b: b.choice.phase != "default"), failures


def export_bundle(
    problems: Sequence[AttentionProblem],
    request: Request,
    directory: Path,
    *,
    python: str = "3.12",
    settings: Settings | None = None,
    note: Callable[[str], None] = lambda text: None,
    report: Report = _silent,
) -> Exported:
    """Choose, compile and write a bundle for a host that measures.

    Raises:
        SearchError: nothing could be compiled for a problem, or the directory cannot be used.
    """
    built = {}
    for problem in problems:
        study = request.study(problem)
        missing = max(1, request.trials - len(study.tried()))
        built[problem], failed = pick(problem, request, study, missing, report)
        for trial in failed:
            note(f"{problem}: {trial.outcome}: {trial.reason}")
        if not built[problem]:
            reason = failed[0].reason if failed else "nothing was chosen"
            raise SearchError(f"no config of {problem} could be compiled; the first reason: {reason}")
    return export(directory, request.gpu, built, python=python, settings=settings, note=note)


def import_results(
    directory: Path, request_for: Callable[[Gpu], Request], override: Gpu | None = None
) -> list[Found]:
    """Take over the results of a bundle: trials to the studies, winners to the table.

    Args:
        directory: a bundle with results, or the output directory of its measurement.
        request_for: the request, given the GPU that the bundle is for.
        override: a hardware file of one's own for that GPU.

    Raises:
        SearchError: there are no results, or they are of a GPU that has no hardware file.
    """
    imported = load_results(directory)
    key = imported.manifest.hardware_key
    gpu = override or next((g for g in map(load_gpu, gpu_names()) if g.key == key), None)
    if gpu is None or gpu.key != key:
        given = f"{gpu.name} is {gpu.key}" if gpu else "no hardware file describes that"
        raise SearchError(f"results are of {key}, and {given}; give the right one with --gpu")
    request = request_for(gpu)
    return [
        _take_over(AttentionProblem.parse(problem), request, imported)
        for problem in imported.manifest.problems
    ]


def _take_over(problem: AttentionProblem, request: Request, imported: Imported) -> Found:
    study = request.study(problem)
    trials = imported.trials[str(problem)]
    study.add(trials)
    candidates = imported.manifest.of(str(problem))
    tried = study.tried()
    entry = measured_entry(
        problem,
        request.gpu,
        imported.comparison[str(problem)],
        imported.defaults[str(problem)],
        trials,
        {c.name: c.config for c in candidates},
        tried=sum(time is not None for time in tried.values()),
        study=study.name,
    )
    outcomes = dict(Counter(t.outcome.value for t in trials if t.phase != "duel"))
    if entry is None:
        return Found(problem, None, None, outcomes)
    present = request.table.lookup(problem, request.gpu)
    compared = [c.config for c in candidates if c.name in imported.comparison[str(problem)]]
    replaces = present is not None and present.exact and present.entry.config in compared
    return Found(problem, entry, request.table.put(entry, replace=replaces), outcomes)


def search_measured(
    problem: AttentionProblem,
    request: Request,
    *,
    settings: Settings | None = None,
    backend: str = DEFAULT_BACKEND,
    report: Report = _silent,
) -> Found:
    """Search on this machine's GPU, a batch at a time; the same call goes on where a killed one stopped.

    Raises:
        SearchError: nothing could be measured, or the machine cannot measure.
    """
    study = request.study(problem)
    settings = settings or Settings()
    work = study.directory / f"{study.name}.work"
    if (work / MANIFEST).exists():  # a batch that an earlier run did not finish
        _finish_batch(work, problem, study, backend, report)
    while (missing := request.trials - len(study.tried())) > 0:
        built, failed = pick(problem, request, study, min(BATCH, missing), report)
        new = [b for b in built if b.choice.config not in study.tried()]
        if not new:
            if failed:
                continue
            break
        make_manifest(work, request.gpu, {problem: built}, _with(settings, duel_rounds=0))
        _finish_batch(work, problem, study, backend, report)
    times = {c: t for c, t in study.tried().items() if t is not None}
    if not times:
        raise SearchError(
            f"no config of {problem} passed: "
            + "; ".join(sorted({f"{t.outcome}: {t.reason}" for t in study.trials()})[:3])
        )
    return _last_duel(work, problem, request, study, times, settings, backend, report)


def _with(settings: Settings, **changes: Any) -> Settings:
    return dataclasses.replace(settings, **changes)


def _finish_batch(
    work: Path, problem: AttentionProblem, study: Study, backend: str, report: Report
) -> Imported:
    """Measure what is left of a batch, store its trials, and remove it."""
    times = [t for t in study.tried().values() if t is not None]
    best = f"best {min(times):.1f} us so far" if times else ""
    numbers = {}
    cls = CONFIGS[study.gpu.arch]
    for candidate in Manifest.read(work).of(str(problem)):
        config = cls.from_dict(candidate.config)
        numbers[str(config)] = study.begin(config, candidate.phase)
    try:
        measure(
            work,
            backend=backend,
            report=lambda done, total, text: report("measuring", done, total, f"{text} {best}".strip()),
        )
        imported = load_results(work)
        for trial in imported.trials[str(problem)]:
            number = numbers.pop(str(cls.from_dict(trial.config)), None)
            if number is None:
                study.add([trial])
            else:
                study.finish(number, trial)
    finally:
        for number in numbers.values():
            study.abandon(number)
    shutil.rmtree(work)
    return imported


def _last_duel(
    work: Path,
    problem: AttentionProblem,
    request: Request,
    study: Study,
    times: dict[KernelConfig, float],
    settings: Settings,
    backend: str,
    report: Report,
) -> Found:
    """The study's fastest configs against the default and the table's entry; the winner goes to the table."""
    base = default_config(problem, request.gpu.arch)
    ordered = sorted((c for c in times if c != base), key=lambda c: times[c])[:FINALISTS]
    present = request.table.lookup(problem, request.gpu)
    if present is not None and present.exact:
        ordered.append(present.entry.kernel_config())
    finalists = list(dict.fromkeys([base, *ordered] if base in times else ordered))
    choices = [
        Choice(c, "default" if c == base else "duel", predicted_time(problem, c, request.gpu))
        for c in finalists
    ]
    built, _ = build(problem, request.gpu, choices, study=study.name)
    make_manifest(work, request.gpu, {problem: built}, settings)
    imported = _finish_batch(work, problem, study, backend, report)
    outcomes = dict(Counter(t.outcome.value for t in study.trials() if t.phase != "duel"))
    entry = measured_entry(
        problem,
        request.gpu,
        imported.comparison[str(problem)],
        imported.defaults[str(problem)],
        imported.trials[str(problem)],
        {c.name: c.config for c in imported.manifest.candidates},
        tried=len(times),
        study=study.name,
    )
    if entry is None:
        raise SearchError(f"no finalist of {problem} passed its checks again; see {study.record_path}")
    return Found(problem, entry, request.table.put(entry, replace=True), outcomes)
