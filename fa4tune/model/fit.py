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
from fa4tune.model.accuracy import (
    GOOD,
    SHORTLIST,
    Accuracy,
    Profiled,
    Sample,
    accuracy,
    times_in_turns,
)
from fa4tune.model.predict import predict


@dataclass(frozen=True, slots=True)
class Constant:
    """A number that may be fitted, and the bounds that physics gives it."""

    name: str
    low: float
    high: float
    why: str


CONSTANTS = (
    Constant("exp_overlap", 0.11, 0.8, "from one warpgroup's section alone to nearly all of the shorter"),
    Constant(
        "section_contention",
        0.5,
        1.0,
        "part that the busiest pipe of a section works: two sections that hide each other, to one pipe alone",
    ),
    Constant(
        "mma_start_clk", 0.0, 65.5, "from products that follow without a gap to a lone one's whole latency"
    ),
    Constant(
        "arithmetic_latency_clk", 0.0, 75.0, "up to half of what a lone section has beside its instructions"
    ),
    Constant("copy_latency_clk", 347.0, 1100.0, "from one copy in flight on each SM to a full memory system"),
    Constant("tile_overhead_clk", 0.0, 3000.0, "from nothing to a cold restart of the pipeline"),
    Constant(
        "cta_start_clk", 0.0, 6000.0, "from nothing to three microseconds of block scheduling and draining"
    ),
    Constant("launch_us", 2.0, 6.0, "3.4 between two events around an empty kernel, and cold caches"),
    Constant("active_watts", 300.0, 800.0, "from a softmax without matrix work to a sweep through HBM"),
    Constant("tensor_watts", 200.0, 1300.0, "up to the 1,150 of matmuls alone on random values"),
    Constant("l2_watts", 0.0, 900.0, "0 to 60 picojoules a byte; a sweep through HBM and L2 takes 80"),
)
"""All that is ever fitted. What a pipe does in a clock, alone and beside tensor cores, is measured and stays
out."""

PULL = 0.5
"""Weight of the prior: moving a constant over its whole range costs as much as a 5% error on 100 samples."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted constants and how well they do.

    ``held_out`` is over problems that the constants used for them were not fitted to (``folds`` refits);
    ``before`` is the starting hardware file on the same samples, ``after`` the final constants;
    ``cycles_error`` the mean error on profiled kernels with these.
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
    kernels: int
    cycles_error: float


def with_constants(gpu: Gpu, values: Iterable[float], constants: Sequence[Constant] = CONSTANTS) -> Gpu:
    """``gpu`` with the constants replaced."""
    changes: dict[str, Any] = {c.name: float(v) for c, v in zip(constants, values, strict=True)}
    return dataclasses.replace(gpu, **changes)


def fit(
    found: Sequence[Sample],
    kernels: Sequence[Profiled],
    gpu: Gpu,
    pause_us: float,
    *,
    constants: Sequence[Constant] = CONSTANTS,
    folds: int = 4,
    seed: int = 0,
) -> Fit:
    """Fit ``constants`` of ``gpu`` to measured times and to profiled cycles.

    Minimises a robust sum of squared log errors (soft L1 beyond 5%), good configs counting double, plus a
    weak pull towards the starting values.

    Args:
        found: measured configs, of several problems; those of a problem were measured in turns.
        kernels: profiled kernels, which say what cycles are when clocks are not known; may be empty.
        gpu: where the fit starts.
        pause_us: between kernels that are measured in turns.
        constants: what to fit.
        folds: groups of problems that are held out in turn.
        seed: of the choice of folds.

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
    start = times_in_turns(found, gpu, pause_us)
    held: list[float] = [0.0] * len(found)
    solutions = []
    for fold in range(folds):
        inside = [i for i, s in enumerate(found) if fold_of[str(s.problem)] == fold]
        training = [s for s in found if fold_of[str(s.problem)] != fold]
        values = _solve(training, kernels, gpu, pause_us, constants)
        solutions.append(values)
        said = times_in_turns([found[i] for i in inside], with_constants(gpu, values, constants), pause_us)
        for index, time in zip(inside, said, strict=True):
            held[index] = time
    final = _solve(found, kernels, gpu, pause_us, constants)
    fitted = with_constants(gpu, final, constants)
    errors = [abs(predict(k.plan, fitted).cycles / k.cycles - 1.0) for k in kernels]
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
        after=accuracy(groups, measured, times_in_turns(found, fitted, pause_us)),
        kernels=len(kernels),
        cycles_error=float(np.mean(errors)) if errors else 0.0,
    )


def _good_twice(groups: Sequence[str], took: NDArray[np.float64]) -> NDArray[np.float64]:
    """Weights: 2 for what is within :data:`GOOD` of its group's best, else 1."""
    best: dict[str, float] = {}
    for group, value in zip(groups, took, strict=True):
        best[group] = min(best.get(group, value), value)
    return np.array([2.0 if v <= GOOD * best[g] else 1.0 for g, v in zip(groups, took, strict=True)])


def _solve(
    found: Sequence[Sample],
    kernels: Sequence[Profiled],
    gpu: Gpu,
    pause_us: float,
    constants: Sequence[Constant],
) -> NDArray[np.float64]:
    low, high = np.array([c.low for c in constants]), np.array([c.high for c in constants])
    prior = np.clip([getattr(gpu, c.name) for c in constants], low, high)
    measured = np.array([s.measured_us for s in found])
    read = np.array([k.cycles for k in kernels])
    weight = _good_twice([str(s.problem) for s in found], measured)
    weight_read = _good_twice([str(k.problem) for k in kernels], read)

    def residuals(unit: NDArray[np.float64]) -> NDArray[np.float64]:
        trial = with_constants(gpu, low + unit * (high - low), constants)
        said = np.array(times_in_turns(found, trial, pause_us))
        counted = np.array([predict(k.plan, trial).cycles for k in kernels])
        pull = PULL * (unit - (prior - low) / (high - low))
        return np.concatenate([weight * np.log(said / measured), weight_read * np.log(counted / read), pull])

    answer = least_squares(
        residuals,
        np.clip((prior - low) / (high - low), 0.01, 0.99),
        bounds=(0.0, 1.0),
        loss="soft_l1",
        f_scale=0.05,
        diff_step=0.02,
        max_nfev=8,
    )
    return np.asarray(low + answer.x * (high - low))


def overlay(result: Fit, base: str, data: str) -> str:
    """A hardware TOML that starts from ``base`` and replaces the fitted constants, each with its source.

    Args:
        result: the fit.
        base: GPU name or file that the fit started from.
        data: where the records are, for the sources.
    """
    held = result.held_out
    lines = [
        f"# Fitted to {result.samples} measured configs of {result.problems} problems and the cycles of "
        f"{result.kernels} kernels ({data}).",
        f"# Held-out problems, {result.folds} folds: MAPE {held.mape:.1%}, good configs "
        f"{held.good_mape:.1%}, worst good {held.good_maximum:.1%},",
        f"# Spearman {held.median_spearman:.3f}, regret {held.regret:.3f} (worst {held.worst_regret:.3f}), "
        f"best in the first {SHORTLIST} on {held.in_shortlist:.0%}; MAPE before the fit "
        f"{result.before.mape:.1%}.",
        f"base = {json.dumps(base)}",
    ]
    for constant in CONSTANTS:
        if constant.name not in result.constants:
            continue
        value, moved = result.constants[constant.name], result.spread[constant.name]
        source = (
            f"fitted to {result.samples} measured configs of {result.problems} problems and the cycles of "
            f"{result.kernels} kernels ({data}) within "
            f"{constant.low:g} to {constant.high:g}; standard deviation over {result.folds} folds {moved:.2g}"
        )
        lines += ["", f"[{constant.name}]", f"value = {value:.4g}", f"source = {json.dumps(source)}"]
    return "\n".join(lines) + "\n"
