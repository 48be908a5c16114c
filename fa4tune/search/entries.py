"""From measurements or predictions to a table entry."""

from __future__ import annotations

from collections.abc import Sequence

from fa4tune import __version__
from fa4tune.hardware.gpu import Gpu
from fa4tune.kernels.config import KernelConfig, default_config
from fa4tune.outcome import Outcome
from fa4tune.problem import AttentionProblem
from fa4tune.record import Provenance
from fa4tune.search.candidates import predicted_time
from fa4tune.search.samples import duel_winner
from fa4tune.search.space import Ranked, plan_or_none
from fa4tune.search.transfer import Comparison
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
    problem: AttentionProblem, gpu: Gpu, comparison: Comparison, *, tried: int, study: str = ""
) -> Entry | None:
    """The winner of a comparison: None where nothing passed.

    Args:
        problem, gpu: what was searched.
        comparison: the last stage's samples and records; the winner's record gives provenance and protocol.
        tried: configs that were measured in all.
        study: name for the entry.
    """
    if not comparison.paired:
        return None
    base = default_config(problem, gpu.arch)
    cls = type(base)
    records = {
        cls.from_dict(trial.config): trial for trial in comparison.trials if trial.outcome is Outcome.MEASURED
    }  # of two records of a config the later one, the duel's
    winner = duel_winner(comparison.paired, base)
    record = records[winner]
    floor = records.get(base)
    assert record.median_us is not None  # measured
    return _entry(
        problem,
        gpu,
        winner,
        source="measured",
        kernel="measured",
        median_us=record.median_us,
        spread_us=record.spread_us,
        default_us=floor.median_us if floor else None,
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
