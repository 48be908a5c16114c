"""Fit a few physical constants of a hardware file to measured kernels, by cross-validation over problems.

What microbenchmarks cannot give (how two warpgroups disturb each other, what a tile costs besides its
operations) is fitted to trial records: at most 12 numbers, each bounded by what is physically possible, each
one number for the whole GPU. Problems, not configs, are held out in turn, so that the error reported is one
on shapes that the fit has not seen.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from fa4tune.errors import SearchError
from fa4tune.hardware.gpu import Gpu
from fa4tune.model.accuracy import GOOD, Accuracy, Sample, accuracy
from fa4tune.model.predict import predict


@dataclass(frozen=True, slots=True)
class Constant:
    """A number that may be fitted, and the bounds that physics gives it."""

    name: str
    low: float
    high: float
    why: str


CONSTANTS = (
    Constant("contention", 0.2, 1.5, "0: roles never meet, 1: they meet at random; above, they tend to meet"),
    Constant("section_contention", 0.2, 1.5, "the same for sections of arithmetic"),
    Constant(
        "mma_start_clk", 0.0, 80.0, "from products that follow without a gap to a lone one's whole latency"
    ),
    Constant("l2_bytes_per_clk", 36.0, 87.0, "all SMs load different tiles, or all the same: measured"),
    Constant("smem_fence_clk", 30.0, 400.0, "from a store's latency alone to several under load"),
    Constant(
        "arithmetic_latency_clk",
        5.0,
        200.0,
        "from one pipeline drain to reductions over lanes and barriers polled",
    ),
    Constant("tile_overhead_clk", 0.0, 3000.0, "from nothing to a cold restart of the pipeline"),
    Constant(
        "cta_start_clk", 0.0, 6000.0, "from nothing to three microseconds of block scheduling and draining"
    ),
    Constant("launch_us", 2.0, 5.0, "3.4 between two events around an empty kernel, and cold caches"),
)
"""All that is ever fitted. What one warp takes for instructions and exponentials is measured and stays out:
the campaign's configs hardly tell the two apart."""

PULL = 0.5
"""Weight of the prior: moving a constant over its whole range costs as much as a 5% error on 100 samples."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted constants and how well they do.

    ``held_out`` is over problems that the constants used for them were not fitted to (``folds`` refits);
    ``before`` is the starting hardware file on the same samples, ``after`` the final constants.
    """

    gpu: Gpu
    constants: dict[str, float]
    spread: dict[str, float]
    samples: int
    problems: int
    folds: int
    before: Accuracy
    held_out: Accuracy
    after: Accuracy


def predictions(found: Sequence[Sample], gpu: Gpu) -> list[float]:
    """Predicted microseconds of each sample on ``gpu``."""
    return [predict(sample.plan, gpu).microseconds for sample in found]


def with_constants(gpu: Gpu, values: Iterable[float], constants: Sequence[Constant] = CONSTANTS) -> Gpu:
    """``gpu`` with the constants replaced."""
    changes: dict[str, Any] = {c.name: float(v) for c, v in zip(constants, values, strict=True)}
    return dataclasses.replace(gpu, **changes)


def fit(
    found: Sequence[Sample],
    gpu: Gpu,
    *,
    constants: Sequence[Constant] = CONSTANTS,
    folds: int = 4,
    limit: int = 400,
    seed: int = 0,
) -> Fit:
    """Fit ``constants`` of ``gpu`` to ``found``.

    Minimises a robust sum of squared log errors (soft L1 beyond 5%), good configs counting double, plus a
    weak pull towards the starting values.

    Args:
        found: measured configs, of several problems.
        gpu: where the fit starts.
        constants: what to fit.
        folds: groups of problems that are held out in turn.
        limit: samples used in a fit, spread over the problems; all of them are used to judge it.
        seed: of the choice of samples and folds.

    Raises:
        SearchError: fewer problems than folds, so that nothing can be held out.
    """
    names = sorted({str(sample.problem) for sample in found})
    if len(names) < max(2, folds):
        raise SearchError(
            f"{len(names)} problems cannot be held out in {folds} folds; measure more or use fewer folds"
        )
    rng = Random(seed)
    shuffled = names[:]
    rng.shuffle(shuffled)
    fold_of = {name: index % folds for index, name in enumerate(shuffled)}
    start = predictions(found, gpu)
    held: list[float] = [0.0] * len(found)
    solutions = []
    for fold in range(folds):
        training = [s for s in found if fold_of[str(s.problem)] != fold]
        values = _solve(_spread_over(training, limit, rng), gpu, constants)
        solutions.append(values)
        other = with_constants(gpu, values, constants)
        for index, sample in enumerate(found):
            if fold_of[str(sample.problem)] == fold:
                held[index] = predict(sample.plan, other).microseconds
    final = _solve(_spread_over(found, limit, rng), gpu, constants)
    fitted = with_constants(gpu, final, constants)
    groups = [str(sample.problem) for sample in found]
    measured = [sample.measured_us for sample in found]
    spread = np.std(np.array(solutions), axis=0)
    return Fit(
        gpu=fitted,
        constants={c.name: float(v) for c, v in zip(constants, final, strict=True)},
        spread={c.name: float(v) for c, v in zip(constants, spread, strict=True)},
        samples=len(found),
        problems=len(names),
        folds=folds,
        before=accuracy(groups, measured, start),
        held_out=accuracy(groups, measured, held),
        after=accuracy(groups, measured, predictions(found, fitted)),
    )


def _spread_over(found: Sequence[Sample], limit: int, rng: Random) -> list[Sample]:
    """At most ``limit`` samples, as many of each problem as possible."""
    groups: dict[str, list[Sample]] = {}
    for sample in found:
        groups.setdefault(str(sample.problem), []).append(sample)
    each = max(1, limit // len(groups))
    return [s for group in groups.values() for s in rng.sample(group, min(each, len(group)))]


def _solve(found: Sequence[Sample], gpu: Gpu, constants: Sequence[Constant]) -> NDArray[np.float64]:
    low, high = np.array([c.low for c in constants]), np.array([c.high for c in constants])
    prior = np.clip([getattr(gpu, c.name) for c in constants], low, high)
    measured = np.array([s.measured_us for s in found])
    best: dict[str, float] = {}
    for sample in found:
        key = str(sample.problem)
        best[key] = min(best.get(key, sample.measured_us), sample.measured_us)
    weight = np.array([1.4 if s.measured_us <= GOOD * best[str(s.problem)] else 1.0 for s in found])

    def residuals(unit: NDArray[np.float64]) -> NDArray[np.float64]:
        said = np.array(predictions(found, with_constants(gpu, low + unit * (high - low), constants)))
        pull = PULL * (unit - (prior - low) / (high - low))
        return np.concatenate([weight * np.log(said / measured), pull])

    answer = least_squares(
        residuals,
        np.clip((prior - low) / (high - low), 0.01, 0.99),
        bounds=(0.0, 1.0),
        loss="soft_l1",
        f_scale=0.05,
        diff_step=0.02,
        max_nfev=12,
    )
    return np.asarray(low + answer.x * (high - low))


def overlay(result: Fit, base: str, data: str) -> str:
    """A hardware TOML that starts from ``base`` and replaces the fitted constants, each with its source.

    Args:
        result: the fit.
        base: GPU name or file that the fit started from.
        data: where the records are, for the sources.
    """
    lines = [
        f"# Fitted to {result.samples} measured configs of {result.problems} problems ({data}).",
        f"# Held-out problems, {result.folds} folds: MAPE {result.held_out.mape:.1%}, good configs "
        f"{result.held_out.good_mape:.1%}; before the fit {result.before.mape:.1%}.",
        f"base = {json.dumps(base)}",
    ]
    for constant in CONSTANTS:
        if constant.name not in result.constants:
            continue
        value, moved = result.constants[constant.name], result.spread[constant.name]
        source = (
            f"fitted to {result.samples} measured configs of {result.problems} problems ({data}) within "
            f"{constant.low:g} to {constant.high:g}; standard deviation over {result.folds} folds {moved:.2g}"
        )
        lines += ["", f"[{constant.name}]", f"value = {value:.4g}", f"source = {json.dumps(source)}"]
    return "\n".join(lines) + "\n"
