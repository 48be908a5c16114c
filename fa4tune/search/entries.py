"""From measurements or predictions to a table entry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fa4tune import __version__
from fa4tune.hardware.gpu import Gpu
from fa4tune.kernels.config import CONFIGS, KernelConfig, default_config
from fa4tune.outcome import Outcome
from fa4tune.problem import AttentionProblem
from fa4tune.record import Provenance, Trial
from fa4tune.search.candidates import predicted_time
from fa4tune.search.samples import duel_winner
from fa4tune.search.space import Ranked, plan_or_none
from fa4tune.table.entry import Entry
from fa4tune.table.key import table_key


def predicted_entry(
    problem: AttentionProblem, gpu: Gpu, ranked: Sequence[Ranked], *, kernel: str = "absent"
) -> Entry:
    """The config that the model finds fastest in the whole space, beside the default's prediction."""
    best = ranked[0]
    base = default_config(problem, gpu.arch)
    feasible = plan_or_none(problem, base, gpu) is not None
    default_us = predicted_time(problem, base, gpu) if feasible else None
    if default_us is not None and default_us <= best.predicted_us:
        best = Ranked(base, default_us)
    return _entry(
        problem,
        gpu,
        best.config,
        source="predicted",
        kernel=kernel,
        median_us=best.predicted_us,
        default_us=default_us,
        predicted_us=best.predicted_us,
        trials=len(ranked),
        provenance=Provenance(gpu=gpu.title, fa4tune=__version__),
    )


def measured_entry(
    problem: AttentionProblem,
    gpu: Gpu,
    comparison: Mapping[int, Sequence[float]],
    default: int | None,
    trials: Sequence[Trial],
    configs: Mapping[int, dict[str, object]],
    *,
    tried: int,
    study: str = "",
) -> Entry | None:
    """The winner of the last comparison: None where nothing passed.

    Args:
        problem, gpu: what was searched.
        comparison: samples in microseconds by candidate, position by position of the same rounds.
        default: the candidate that is the default config, if one is.
        trials: records of this comparison; the winner's gives provenance and protocol.
        configs: knob values by candidate.
        tried: configs that were measured in all.
        study: name for the entry.
    """
    if not comparison:
        return None
    winner = duel_winner(comparison, default)
    own = [t for t in trials if t.config == configs[winner] and t.outcome is Outcome.MEASURED]
    record = own[-1]  # a duel's record is behind the rounds'
    base = None if default is None else configs[default]
    floor = [t for t in trials if t.config == base and t.outcome is Outcome.MEASURED]
    assert record.median_us is not None  # measured
    return _entry(
        problem,
        gpu,
        CONFIGS[gpu.arch].from_dict(record.config),
        source="measured",
        kernel="measured",
        median_us=record.median_us,
        spread_us=record.spread_us,
        default_us=floor[-1].median_us if floor else None,
        predicted_us=record.predicted_us,
        trials=tried,
        provenance=record.provenance,
        protocol=record.protocol,
        study=study,
    )


def _entry(
    problem: AttentionProblem,
    gpu: Gpu,
    config: KernelConfig,
    *,
    median_us: float,
    default_us: float | None,
    **fields: object,
) -> Entry:
    key = table_key(problem, gpu)
    return Entry(
        problem=str(problem),
        hardware_key=key.hardware,
        kernel_class=key.kernel_class,
        bucket=key.bucket,
        kernel_version=key.kernel_version,
        config=config.as_dict(),
        median_us=median_us,
        default_us=default_us,
        ratio=None if default_us is None else round(default_us / median_us, 4),
        **fields,  # type: ignore[arg-type]
    )
