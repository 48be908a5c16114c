"""What to try next: the default, what was asked for, the model's best few, the sampler's choice."""

from __future__ import annotations

import statistics
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

import optuna

from fa4tune.errors import ConfigError, SearchError
from fa4tune.hardware.gpu import Gpu
from fa4tune.kernels.config import CONFIGS, KernelConfig, default_config
from fa4tune.kernels.program import build_plan
from fa4tune.model.predict import predict
from fa4tune.problem import AttentionProblem
from fa4tune.search.space import Ranked, diverse, plan_or_none
from fa4tune.search.study import config_of, distributions_of, parameters_of

SAMPLERS = {"tpe": 4, "gp": 1}
"""Samplers, and how many proposals each makes for one that the model picks; a Gaussian process is slow."""

MODEL_SHARE = 0.5
"""Part of the trials, after the default, that goes to the model's best; the sampler has the rest."""

PSEUDO_TRIALS = 48
"""Predictions that the sampler is shown as if they were measurements, a third of them from the top."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A config to try, why, and the model's time for it in microseconds (None where it has none)."""

    config: KernelConfig
    phase: str
    predicted_us: float | None


def choose(
    problem: AttentionProblem,
    gpu: Gpu,
    ranked: Sequence[Ranked],
    tried: Mapping[KernelConfig, float | None],
    count: int,
    *,
    again: Iterable[KernelConfig] = (),
    asked: Iterable[tuple[KernelConfig, str]] = (),
    allowed: Container[KernelConfig] | None = None,
    sampler: str = "tpe",
    seed: int = 0,
) -> list[Choice]:
    """What one round of measuring compares: the default, known configs to time again, and new ones.

    Args:
        problem, gpu: what is searched.
        ranked: the whole space with predictions, fastest first.
        tried: configs that are known: their time, or None where they failed.
        count: new configs, the default among them while it has no outcome.
        again: known configs to time along, such as the table's present entry.
        asked: configs to try before the model's, each with its phase, on top of ``count``.
        allowed: the only configs that may be chosen, for searching among recorded ones; None allows all.
        sampler: ``tpe`` or ``gp``.
        seed: of the sampler.

    Returns:
        the configs in the order to try them; the default comes first in every round, for it is the floor of
        a search and shows the drift between rounds.

    Raises:
        SearchError: an unknown sampler.
    """
    if sampler not in SAMPLERS:
        raise SearchError(f"sampler {sampler!r} is not known; use one of {', '.join(SAMPLERS)}")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    base = default_config(problem, gpu.arch)
    chosen: dict[KernelConfig, str] = {}
    if plan_or_none(problem, base, gpu) is not None:
        chosen[base] = "default"
        count += base in tried
    for config in again:
        if plan_or_none(problem, config, gpu) is not None and config not in chosen:
            chosen[config] = "incumbent"
            count += 1
    for config, phase in asked:
        if config not in tried and config not in chosen:
            chosen[config] = phase
            count += 1
    if allowed is not None:
        chosen = {c: phase for c, phase in chosen.items() if c in allowed}
        ranked = [r for r in ranked if r.config in allowed]
    fresh = [r for r in ranked if r.config not in tried and r.config not in chosen]
    from_model = round((count - len(chosen)) * MODEL_SHARE)
    for entry in diverse(fresh, from_model, taken=[*tried, *chosen]):
        chosen.setdefault(entry.config, "model")
    known = {r.config: r.predicted_us for r in ranked}
    if len(chosen) < count:
        proposals = _propose(problem, gpu, ranked, tried, list(chosen), count - len(chosen), sampler, seed)
        for config in proposals:
            if allowed is None or config in allowed:
                chosen.setdefault(config, "sampler")
    for entry in diverse(fresh, count, taken=chosen):
        if len(chosen) < count:
            chosen.setdefault(entry.config, "model")
    return [
        Choice(config, phase, known.get(config) or predicted_time(problem, config, gpu))
        for config, phase in chosen.items()
    ]


def predicted_time(problem: AttentionProblem, config: KernelConfig, gpu: Gpu) -> float:
    """The model's time in microseconds.

    Raises:
        InfeasibleError: no plan exists.
    """
    return predict(build_plan(problem, config, gpu), gpu).microseconds


def _propose(
    problem: AttentionProblem,
    gpu: Gpu,
    ranked: Sequence[Ranked],
    tried: Mapping[KernelConfig, float | None],
    chosen: list[KernelConfig],
    count: int,
    sampler: str,
    seed: int,
) -> list[KernelConfig]:
    """Feasible configs that are new, drawn by an Optuna sampler and picked by the model.

    The sampler runs on a study of its own in memory. It is shown what was measured, failures as twice the
    slowest, and a spread of predictions, scaled to the measurements: samplers take no prior, but they take
    observations. Of what it proposes, the model's fastest are taken.
    """
    cls = CONFIGS[gpu.arch]
    predictions = {r.config: r.predicted_us for r in ranked}
    measured = {c: t for c, t in tried.items() if t is not None}
    ratios = [t / predictions[c] for c, t in measured.items() if c in predictions]
    scale = statistics.median(ratios) if ratios else 1.0
    worst = 2 * max([*measured.values(), *(r.predicted_us * scale for r in ranked[-1:])], default=1.0)
    study = optuna.create_study(sampler=_sampler(sampler, seed + len(tried)))
    distributions = distributions_of(cls)
    seen = {c: (worst if t is None else t) for c, t in tried.items()}
    seen |= {r.config: r.predicted_us * scale for r in _spread(ranked) if r.config not in seen}
    for config, value in seen.items():
        parameters, own = parameters_of(config)
        if len(own) == len(distributions):
            study.add_trial(
                optuna.trial.create_trial(params=parameters, distributions=own, value=float(value))
            )
    pool: dict[KernelConfig, float] = {}
    for _ in range(10 * SAMPLERS[sampler] * count):
        if len(pool) == SAMPLERS[sampler] * count:
            break
        trial = study.ask(fixed_distributions=distributions)
        try:
            config = config_of(cls, trial.params)
        except ConfigError:
            study.tell(trial, worst)
            continue
        plan = plan_or_none(problem, config, gpu)
        # an infeasible or known proposal is told its value, so that the sampler moves on
        value = seen.get(config, worst)
        if plan is not None and config not in seen:
            value = predict(plan, gpu).microseconds * scale
            if config not in chosen:
                pool[config] = value
        study.tell(trial, value)
    picked = [Ranked(config, time) for config, time in sorted(pool.items(), key=lambda item: item[1])]
    return [r.config for r in diverse(picked, count, taken=chosen)]


def _spread(ranked: Sequence[Ranked]) -> list[Ranked]:
    """A third of :data:`PSEUDO_TRIALS` from the top, the rest evenly over all ranks."""
    top = PSEUDO_TRIALS // 3
    step = max(1, len(ranked) // (PSEUDO_TRIALS - top))
    return list({r.config: r for r in (*ranked[:top], *ranked[top::step])}.values())


def _sampler(name: str, seed: int) -> object:
    if name == "gp":
        return optuna.samplers.GPSampler(seed=seed, n_startup_trials=0, deterministic_objective=False)
    return optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=0)
