"""How good predictions are, split by problem: errors, ranks and what following them costs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from fa4tune.errors import ConfigError, HardwareError, InfeasibleError
from fa4tune.hardware.gpu import Gpu
from fa4tune.kernels.config import CONFIGS, KERNEL_VERSIONS, KernelConfig
from fa4tune.kernels.plan import KernelPlan
from fa4tune.kernels.program import build_plan
from fa4tune.model.power import clock_in_turns
from fa4tune.model.predict import predict
from fa4tune.outcome import Outcome
from fa4tune.problem import AttentionProblem
from fa4tune.record import Trial

GOOD = 1.2
"""A config is good when it takes at most this many times the best measured one of its problem."""

SHORTLIST = 12
"""How many of the model's choices a search would measure."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A measured config with its plan."""

    problem: AttentionProblem
    config: KernelConfig
    plan: KernelPlan
    measured_us: float


def samples(trials: Iterable[Trial], gpu: Gpu) -> list[Sample]:
    """Measured trials of ``gpu`` as samples, one a problem and config: the median of its medians.

    Left out: trials of other hardware or of another version of the kernel (their times are not comparable),
    without a time, with spills, or whose plan no longer exists.
    """
    times: dict[tuple[str, str], list[float]] = {}
    known: dict[tuple[str, str], tuple[AttentionProblem, KernelConfig, KernelPlan] | None] = {}
    for trial in trials:
        usable = trial.outcome == Outcome.MEASURED and trial.median_us and trial.hardware_key == gpu.key
        current = trial.kernel_version == KERNEL_VERSIONS[CONFIGS[gpu.arch].family]
        spilled = any("spill" in name and count for name, count in trial.resources.items())
        if not usable or not current or spilled:
            continue
        key = (trial.problem, repr(sorted(trial.config.items())))
        if key not in known:
            known[key] = _resolve(trial.problem, trial.config, gpu)
        times.setdefault(key, []).append(float(trial.median_us or 0.0))
    return [Sample(*found, median(times[key])) for key, found in known.items() if found is not None]


@dataclass(frozen=True, slots=True)
class Profiled:
    """A kernel whose cycles a profiler read: those of the SM that was busy longest."""

    problem: AttentionProblem
    config: KernelConfig
    plan: KernelPlan
    cycles: float


def profiled(path: Path, gpu: Gpu) -> list[Profiled]:
    """Kernels of a file that ``studies/kernel_profile.py`` writes.

    Raises:
        HardwareError: readings of another version of the kernel, whose cycles say nothing of this one's.
    """
    first, *rest = [json.loads(line) for line in path.read_text().splitlines()]
    version = first["provenance"]["kernel_version"]
    current = KERNEL_VERSIONS[CONFIGS[gpu.arch].family]
    if version != current:
        raise HardwareError(f"{path} has cycles of kernel version {version}, not {current}; profile again")
    found = []
    for row in rest:
        known = _resolve(row["problem"], row["config"], gpu)
        if known is not None:
            found.append(Profiled(*known, row["cycles_active_max"]))
    return found


def times_in_turns(found: Sequence[Sample], gpu: Gpu, pause_us: float) -> list[float]:
    """Predicted microseconds of each sample as the configs of a problem are measured: in turns, at one clock.

    Args:
        found: samples; those of a problem were measured together.
        gpu: the hardware.
        pause_us: between kernels.
    """
    said = [predict(sample.plan, gpu) for sample in found]
    together: dict[str, list[int]] = {}
    for index, sample in enumerate(found):
        together.setdefault(str(sample.problem), []).append(index)
    times = [0.0] * len(found)
    for members in together.values():
        cycles = [said[i].cycles for i in members]
        clock = clock_in_turns(gpu, cycles, [said[i].watts for i in members], pause_us)
        for i in members:
            # what waits for HBM does so at any clock
            waited = said[i].breakdown["memory"]
            at_least = said[i].microseconds - gpu.launch_us if waited else 0.0
            computed = said[i].cycles - waited * said[i].clock_mhz
            times[i] = max(computed / clock, at_least) + gpu.launch_us
    return times


def _resolve(
    text: str, values: dict[str, Any], gpu: Gpu
) -> tuple[AttentionProblem, KernelConfig, KernelPlan] | None:
    problem = AttentionProblem.parse(text)
    try:
        config = CONFIGS[gpu.arch].from_dict(values)
        return problem, config, build_plan(problem, config, gpu)
    except (ConfigError, InfeasibleError):
        return None


@dataclass(frozen=True, slots=True)
class ProblemAccuracy:
    """One problem's configs, measured against predicted.

    ``regret`` is the measured time of the config that the prediction puts first over the best measured one;
    ``best_rank`` the predicted rank (from 1) of the best measured one.
    """

    problem: str
    configs: int
    mape: float
    good_mape: float
    good_maximum: float
    spearman: float
    regret: float
    best_rank: int
    bias: float


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Over all problems: means over configs, medians and worst cases over problems."""

    problems: tuple[ProblemAccuracy, ...]
    mape: float
    good_mape: float
    good_maximum: float
    median_spearman: float
    regret: float
    worst_regret: float
    in_shortlist: float


def accuracy(problems: Sequence[str], measured: Sequence[float], predicted: Sequence[float]) -> Accuracy:
    """Accuracy of ``predicted`` times against ``measured`` ones, grouped by ``problems``.

    Args:
        problems: a name each, equal for configs of one problem.
        measured, predicted: times in the same unit.
    """
    groups: dict[str, list[int]] = {}
    for index, name in enumerate(problems):
        groups.setdefault(name, []).append(index)
    rows, errors, good_errors = [], [], []
    for name, members in groups.items():
        took, said = np.array([measured[i] for i in members]), np.array([predicted[i] for i in members])
        error = said / took - 1.0
        good = took <= GOOD * took.min()
        best = int(took.argmin())
        errors += list(np.abs(error))
        good_errors += list(np.abs(error[good]))
        rows.append(
            ProblemAccuracy(
                problem=name,
                configs=len(members),
                mape=float(np.abs(error).mean()),
                good_mape=float(np.abs(error[good]).mean()),
                good_maximum=float(np.abs(error[good]).max()),
                spearman=float(spearmanr(said, took).statistic) if len(members) > 2 else 1.0,
                regret=float(took[int(said.argmin())] / took.min()),
                best_rank=int((said < said[best]).sum()) + 1,
                bias=float(error.mean()),
            )
        )
    return Accuracy(
        problems=tuple(rows),
        mape=fmean(errors),
        good_mape=fmean(good_errors),
        good_maximum=max(good_errors),
        median_spearman=median(row.spearman for row in rows),
        regret=float(np.exp(np.mean([np.log(row.regret) for row in rows]))),
        worst_regret=max(row.regret for row in rows),
        in_shortlist=fmean(row.best_rank <= SHORTLIST for row in rows),
    )
