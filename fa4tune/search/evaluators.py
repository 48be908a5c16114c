"""Ways to find out how long configs take: on the GPU, or from what was recorded on one."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from fa4tune.errors import ConfigError, SearchError
from fa4tune.hardware.gpu import Gpu
from fa4tune.kernels.config import CONFIGS, KernelConfig
from fa4tune.outcome import Outcome
from fa4tune.problem import AttentionProblem
from fa4tune.record import Trial
from fa4tune.search.bundle import MANIFEST, Settings
from fa4tune.search.candidates import Choice
from fa4tune.search.compiling import build
from fa4tune.search.measure import measure
from fa4tune.search.transfer import Comparison, load_results, make_manifest
from fa4tune.search.worker import DEFAULT_BACKEND

Report = Callable[[str, int, int, str], None]
"""``report(stage, done, total, text)``: what a progress bar shows."""


def silent(stage: str, done: int, total: int, text: str) -> None:
    """A report to nobody."""


class Evaluator(Protocol):
    """Compares configs of one problem with each other."""

    def compare(
        self,
        problem: AttentionProblem,
        choices: Sequence[Choice],
        *,
        duel: bool = False,
        report: Report = silent,
    ) -> Comparison:
        """Try ``choices``, the default first; with ``duel`` the fastest meet again for more rounds."""

    def unfinished(self, problem: AttentionProblem, report: Report = silent) -> Comparison | None:
        """Finish a comparison that an earlier process was killed in; None if there is none."""


class MeasuredEvaluator:
    """Compiles and measures on this machine's GPU.

    Args:
        gpu: the hardware.
        directory: where a comparison in progress is kept, so that a killed one can be finished.
        settings: of the measurement.
        backend: of the worker processes.
    """

    def __init__(
        self,
        gpu: Gpu,
        directory: Path,
        *,
        settings: Settings | None = None,
        backend: str = DEFAULT_BACKEND,
    ) -> None:
        self.gpu = gpu
        self.directory = directory
        self.settings = settings or Settings()
        self.backend = backend

    def _work(self, problem: AttentionProblem) -> Path:
        return self.directory / f"{problem}-{self.gpu.key}.work"

    def compare(
        self,
        problem: AttentionProblem,
        choices: Sequence[Choice],
        *,
        duel: bool = False,
        report: Report = silent,
    ) -> Comparison:
        """See :class:`Evaluator`. Configs that do not compile or spill are trials without a time.

        Raises:
            SearchError: the machine cannot measure.
        """
        built, failed = build(
            problem,
            self.gpu,
            choices,
            progress=lambda done, total: report("compiling", done, total, str(problem)),
        )
        if not built:
            return Comparison(failed, {})
        settings = self.settings if duel else dataclasses.replace(self.settings, duel_rounds=0)
        make_manifest(self._work(problem), self.gpu, {problem: built}, settings)
        measured = self._finish(problem, report)
        return Comparison([*failed, *measured.trials], measured.paired)

    def unfinished(self, problem: AttentionProblem, report: Report = silent) -> Comparison | None:
        """See :class:`Evaluator`."""
        work = self._work(problem)
        if not (work / MANIFEST).exists():
            shutil.rmtree(work, ignore_errors=True)
            return None
        return self._finish(problem, report)

    def _finish(self, problem: AttentionProblem, report: Report) -> Comparison:
        work = self._work(problem)
        measure(
            work,
            backend=self.backend,
            report=lambda done, total, text: report("measuring", done, total, text),
        )
        comparison = load_results(work).results[str(problem)]
        shutil.rmtree(work)
        return comparison


class ReplayEvaluator:
    """Answers from recorded trials, so that a search can be run again, and tested, without a GPU.

    Args:
        trials: records of one problem; of several with a time for a config the last counts.

    Raises:
        SearchError: no record has a time.
    """

    def __init__(self, problem: AttentionProblem, gpu: Gpu, trials: Iterable[Trial]) -> None:
        self.recorded: dict[KernelConfig, Trial] = {}
        cls = CONFIGS[gpu.arch]
        for trial in trials:
            if trial.problem != str(problem) or trial.outcome is Outcome.PREDICTED or trial.phase == "duel":
                continue
            try:
                config = cls.from_dict(trial.config)
            except ConfigError:
                continue
            known = self.recorded.get(config)
            if known is None or trial.outcome is Outcome.MEASURED:
                self.recorded[config] = trial
        if not any(trial.outcome is Outcome.MEASURED for trial in self.recorded.values()):
            raise SearchError(
                f"no trial of {problem} with a time was recorded; give a record file that has one"
            )

    def compare(
        self,
        problem: AttentionProblem,
        choices: Sequence[Choice],
        *,
        duel: bool = False,
        report: Report = silent,
    ) -> Comparison:
        """See :class:`Evaluator`.

        Raises:
            SearchError: a config was not recorded.
        """
        trials: list[Trial] = []
        for done, choice in enumerate(choices, 1):
            trial = self.recorded.get(choice.config)
            if trial is None:
                raise SearchError(
                    f"[{choice.config}] of {problem} was not recorded; search among recorded ones"
                )
            trials.append(msgspec.structs.replace(trial, phase=choice.phase))
            report("replaying", done, len(choices), str(choice.config))
        length = min((len(t.samples_us) for t in trials if t.samples_us), default=0)
        paired = {
            choice.config: trial.samples_us[:length]
            for choice, trial in zip(choices, trials, strict=True)
            if trial.outcome is Outcome.MEASURED
        }
        return Comparison(trials, paired)

    def unfinished(self, problem: AttentionProblem, report: Report = silent) -> Comparison | None:
        """See :class:`Evaluator`: nothing ever is."""
        return None
