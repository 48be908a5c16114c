"""One search from request to table entry: predicted, measured here, or split over two machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fa4tune.errors import InfeasibleError, SearchError
from fa4tune.hardware.gpu import Gpu, gpu_names, load_gpu
from fa4tune.kernels.config import CONFIGS, KernelConfig, default_config
from fa4tune.kernels.program import build_plan
from fa4tune.outcome import Outcome
from fa4tune.problem import AttentionProblem
from fa4tune.record import Trial
from fa4tune.search.bundle import Settings
from fa4tune.search.candidates import Choice, choose, predicted_time
from fa4tune.search.compiling import Built, build
from fa4tune.search.emulated import run_in_emulator
from fa4tune.search.entries import measured_entry, predicted_entry
from fa4tune.search.evaluators import Evaluator, Report, silent
from fa4tune.search.ranking import rank_space
from fa4tune.search.space import ablations
from fa4tune.search.study import Study
from fa4tune.search.transfer import Comparison, Exported, Imported, export, load_results, require_usable
from fa4tune.table.entry import Entry
from fa4tune.table.store import Table

BATCH = 8
"""New configs that are compiled and compared at a time when measuring on this machine."""

FINALISTS = 3
"""Fastest configs of a study that meet the default in its last duel."""


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
        trials: configs to measure for each problem, the default among them, over all runs of a study;
            asked ones and ablations come on top.
        table: where entries go.
        studies: directory of record files and journals; default the user's.
        storage: Optuna storage URL in place of the journal.
        sampler, seed: of the sampler's share of the trials.
        asked: texts of further configs to measure, as ``--config`` takes them.
        ablate: also measure every config that differs from the default in one knob.
        note: told of asked configs that a problem cannot run.
        emulate: run a predicted winner in the emulator before its entry is written.
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
    note: Callable[[str], None] = lambda text: None
    emulate: bool = False

    def study(self, problem: AttentionProblem) -> Study:
        """The study of one problem."""
        return Study(problem, self.gpu, directory=self.studies, storage=self.storage)


def search_predicted(problem: AttentionProblem, request: Request, report: Report = silent) -> Found:
    """Search with the model alone: the exhaustive minimum of the space.

    Raises:
        InfeasibleError, SearchError: nothing can run the problem.
        TableError: the table cannot be written.
    """
    if request.asked or request.ablate:
        request.note("nothing is measured, so configs asked for with --try or --ablate change nothing")
    request.table.require_writable()
    ranked = rank_space(
        problem, request.gpu, progress=lambda done, total: report("predicting", done, total, str(problem))
    )
    entry = predicted_entry(problem, request.gpu, ranked)
    if request.emulate:
        report("emulating", 0, 1, str(problem))
        kernel = run_in_emulator(problem, entry.kernel_config(), request.gpu, request.note)
        entry = predicted_entry(problem, request.gpu, ranked, kernel=kernel)
    path = request.table.put(entry)
    return Found(problem, entry, path, {Outcome.PREDICTED.value: len(ranked)})


def _asked(problem: AttentionProblem, request: Request) -> list[tuple[KernelConfig, str]]:
    """Configs that the request names itself, each with its phase."""
    base = default_config(problem, request.gpu.arch)
    asked = []
    for text in request.asked:
        config = base.with_text(text)
        try:
            build_plan(problem, config, request.gpu)
        except InfeasibleError as error:
            request.note(f"left out: {error}")
        else:
            asked.append((config, "asked"))
    if request.ablate:
        asked += [(config, "ablation") for config in ablations(problem, request.gpu, base)]
    return asked


def pick(
    problem: AttentionProblem,
    request: Request,
    study: Study,
    report: Report = silent,
) -> tuple[list[Built], list[Trial]]:
    """Choose and compile what the study lacks of ``request.trials``, at least one new config.

    Configs that fail to compile or spill are recorded in the study at once; others take their place.
    """
    gpu = request.gpu
    ranked = rank_space(
        problem, gpu, progress=lambda done, total: report("predicting", done, total, str(problem))
    )
    asked = _asked(problem, request)
    hit = request.table.lookup(problem, gpu)
    again = [hit.entry.kernel_config()] if hit is not None else []
    times = {c: t for c, t in study.tried().items() if t is not None}
    again += sorted(times, key=lambda c: times[c])[:1]
    extra = {config for config, _ in asked}
    count = max(1, request.trials - len(study.tried().keys() - extra))
    built: dict[KernelConfig, Built] = {}
    failures: list[Trial] = []
    for _ in range(3):
        tried = study.tried()
        left = count - len(built.keys() - tried.keys() - extra)
        if left <= 0:
            break
        known = {**dict.fromkeys(built), **tried}
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
    report: Report = silent,
) -> Exported:
    """Choose, compile and write a bundle for a host that measures.

    Raises:
        SearchError: nothing could be compiled for a problem, or the directory cannot be used.
    """
    require_usable(directory)
    built = {}
    for problem in problems:
        study = request.study(problem)
        built[problem], failed = pick(problem, request, study, report)
        for trial in failed:
            request.note(f"{problem}: {trial.outcome}: {trial.reason}")
        if not built[problem]:
            reason = failed[0].reason if failed else "nothing was chosen"
            raise SearchError(f"no config of {problem} could be compiled; the first reason: {reason}")
    return export(directory, request.gpu, built, python=python, settings=settings, note=request.note)


def import_results(
    directory: Path, request_for: Callable[[Gpu], Request], override: Gpu | None = None
) -> list[Found]:
    """Take over the results of a bundle: trials to the studies, winners to the table.

    Args:
        directory: a bundle with results, or the output directory of its measurement.
        request_for: the request, given the GPU that the bundle is for.
        override: a hardware file of one's own for that GPU.

    Raises:
        SearchError: there are no results, none was measured yet, or they are of a GPU that has no hardware
            file.
    """
    imported = load_results(directory)
    key = imported.manifest.hardware_key
    gpu = override or next((g for g in map(load_gpu, gpu_names()) if g.key == key), None)
    if gpu is None or gpu.key != key:
        given = f"{gpu.name} is {gpu.key}" if gpu else "no hardware file describes that"
        raise SearchError(f"results are of {key}, and {given}; give the right one with --gpu")
    if not any(comparison.trials for comparison in imported.results.values()):
        raise SearchError(f"{directory} holds no measurement yet; run measure.py again, its reason is there")
    request = request_for(gpu)
    return [
        _take_over(AttentionProblem.parse(problem), request, imported)
        for problem in imported.manifest.problems
    ]


def _take_over(problem: AttentionProblem, request: Request, imported: Imported) -> Found:
    study = request.study(problem)
    comparison = imported.results[str(problem)]
    study.add(comparison.trials)
    return _conclude(problem, request, study, comparison)


def _conclude(problem: AttentionProblem, request: Request, study: Study, comparison: Comparison) -> Found:
    """Write the winner of a study's last comparison to the table."""
    times = [time for time in study.tried().values() if time is not None]
    entry = measured_entry(problem, request.gpu, comparison, tried=len(times), study=study.name)
    outcomes = dict(Counter(t.outcome.value for t in study.trials() if t.phase != "duel"))
    if entry is None:
        return Found(problem, None, None, outcomes)
    present = request.table.lookup(problem, request.gpu)
    # an entry that was measured again along with the others is known as well as they are
    replaces = present is not None and present.exact and present.entry.kernel_config() in comparison.paired
    return Found(problem, entry, request.table.put(entry, replace=replaces), outcomes)


def search_measured(
    problem: AttentionProblem,
    request: Request,
    evaluator: Evaluator,
    *,
    allowed: Container[KernelConfig] | None = None,
    report: Report = silent,
) -> Found:
    """Search a batch at a time until the study has ``request.trials`` configs, then let the best meet again.

    The same call goes on where a killed one stopped.

    Args:
        problem, request: what to search and how.
        evaluator: measures, or replays measurements.
        allowed: the only configs that may be chosen; None allows all that are feasible.
        report: told of progress.

    Raises:
        SearchError: no config passed, or the machine cannot measure.
    """
    request.table.require_writable()
    study = request.study(problem)
    if (left_over := evaluator.unfinished(problem, report)) is not None:
        study.add(left_over.trials)
    ranked = rank_space(
        problem, request.gpu, progress=lambda done, total: report("predicting", done, total, str(problem))
    )
    asked = _asked(problem, request)
    while (missing := request.trials + len(asked) - len(study.tried())) > 0:
        choices = choose(
            problem,
            request.gpu,
            ranked,
            study.tried(),
            min(BATCH, missing),
            asked=asked,
            allowed=allowed,
            sampler=request.sampler,
            seed=request.seed,
        )
        if all(choice.config in study.tried() for choice in choices):
            break
        _compare(problem, study, evaluator, choices, report)
    times = {c: t for c, t in study.tried().items() if t is not None}
    if not times:
        reasons = sorted({f"{t.outcome}: {t.reason}" for t in study.trials()})
        raise SearchError(f"no config of {problem} passed; {'; '.join(reasons[:3])}")
    choices = _finalists(problem, request, times)
    comparison = _compare(problem, study, evaluator, choices, report, duel=True)
    found = _conclude(problem, request, study, comparison)
    if found.entry is None:
        raise SearchError(f"no finalist of {problem} passed its checks again; see {study.record_path}")
    return found


def _compare(
    problem: AttentionProblem,
    study: Study,
    evaluator: Evaluator,
    choices: Sequence[Choice],
    report: Report,
    duel: bool = False,
) -> Comparison:
    """Evaluate ``choices`` and store every outcome in the study; an interruption leaves no trial open."""
    times = [t for t in study.tried().values() if t is not None]
    best = f"best so far {min(times):.1f} us; " if times else ""
    cls = CONFIGS[study.gpu.arch]
    open_trials = {c.config: study.begin(c.config, c.phase) for c in choices}
    try:
        comparison = evaluator.compare(
            problem,
            choices,
            duel=duel,
            report=lambda s, done, total, text: report(s, done, total, best + text),
        )
        for trial in comparison.trials:
            number = open_trials.pop(cls.from_dict(trial.config), None)
            if number is None:
                study.add([trial])
            else:
                study.finish(number, trial)
    finally:
        for number in open_trials.values():
            study.abandon(number)
    return comparison


def _finalists(problem: AttentionProblem, request: Request, times: dict[KernelConfig, float]) -> list[Choice]:
    """The default, the study's fastest others, and the table's entry if it is another one."""
    base = default_config(problem, request.gpu.arch)
    configs = [base] if base in times else []
    configs += sorted((c for c in times if c != base), key=lambda c: times[c])[:FINALISTS]
    present = request.table.lookup(problem, request.gpu)
    if present is not None and present.exact and present.entry.kernel_config() in times:
        configs.append(present.entry.kernel_config())
    return [
        Choice(c, "default" if c == base else "duel", predicted_time(problem, c, request.gpu))
        for c in dict.fromkeys(configs)
    ]
