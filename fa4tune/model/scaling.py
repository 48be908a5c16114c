"""What-ifs: the best config on hardware that does not exist, re-tuned at every point.

Re-timing a config that was chosen for other rates understates what a change of hardware gives: with twice the
exponential rate nobody would still emulate. Each point therefore searches again, over the knobs that the
model's time depends on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

from fa4tune.errors import ConfigError, InfeasibleError, SearchError
from fa4tune.hardware.gpu import Gpu
from fa4tune.kernels.config import CONFIGS, KernelConfig, default_config
from fa4tune.kernels.plan import KernelPlan
from fa4tune.kernels.program import build_plan
from fa4tune.model.predict import Prediction, predict
from fa4tune.problem import AttentionProblem

SEARCHED = (
    "tile_m",
    "tile_n",
    "q_tiles",
    "cta_group",
    "ctas_per_sm",
    "overlap",
    "ping_pong",
    "p_in_registers",
    "exp2_share",
)
"""Knobs that every point searches; the ring is as long as fits, the others keep their defaults."""


@dataclass(frozen=True, slots=True)
class Point:
    """The best config on one GPU."""

    gpu: Gpu
    config: KernelConfig
    best: Prediction


def candidates(problem: AttentionProblem, gpu: Gpu) -> tuple[KernelPlan, ...]:
    """Plans of every feasible config of the searched knobs, each with the longest ring that fits.

    Feasibility depends on memory sizes, not on rates, so that scaled GPUs share the plans.
    """
    return _candidates(problem, gpu.arch, gpu.smem_per_cta, gpu.smem_per_sm, gpu.tmem_columns, _Boxed(gpu))


@dataclass(frozen=True, slots=True)
class _Boxed:
    """A GPU that does not count for equality: only what else is in the key decides feasibility."""

    gpu: Gpu

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Boxed)

    def __hash__(self) -> int:
        return 0


@lru_cache(maxsize=64)
def _candidates(
    problem: AttentionProblem, arch: str, smem_per_cta: int, smem_per_sm: int, tmem: int, boxed: _Boxed
) -> tuple[KernelPlan, ...]:
    cls = CONFIGS[arch]
    base = default_config(problem, arch)
    names = [name for name in SEARCHED if name in cls.knobs()]
    rings = sorted(cls.choices("kv_stages"), reverse=True)
    found = []
    for values in product(*(dict.fromkeys((*cls.choices(n), getattr(base, n))) for n in names)):
        setting: dict[str, Any] = dict(zip(names, values, strict=True))
        if not setting.get("exp2_share"):
            setting |= {n: cls.knobs()[n].default for n in ("exp2_degree", "exp2_start") if n in cls.knobs()}
        for stages in rings:
            try:
                found.append(build_plan(problem, base.replace(kv_stages=stages, **setting), boxed.gpu))
            except (ConfigError, InfeasibleError):
                continue
            break
    return tuple(found)


def retuned(problem: AttentionProblem, gpu: Gpu) -> Point:
    """The fastest config for ``problem`` on ``gpu``.

    Raises:
        InfeasibleError: nothing runs; the reasons are the default's.
    """
    plans = candidates(problem, gpu)
    if not plans:
        build_plan(problem, default_config(problem, gpu.arch), gpu)
        raise SearchError(f"no config of the searched knobs can run {problem} on {gpu.name}")
    timed = [(predict(plan, gpu), plan) for plan in plans]
    best, plan = min(timed, key=lambda t: t[0].microseconds)
    assert isinstance(plan.config, KernelConfig)
    return Point(gpu, plan.config, best)


def retimed(problem: AttentionProblem, config: KernelConfig, gpu: Gpu) -> Prediction:
    """The time of a given config on ``gpu``, for comparison with re-tuning."""
    return predict(build_plan(problem, config, gpu), gpu)


ELASTIC = ("mma", "exp", "issue", "smem", "tmem", "l2", "hbm")
"""Rates whose elasticity is asked for; multiply-add alone buys little without ``issue``."""


def elasticities(
    problem: AttentionProblem, config: KernelConfig, gpu: Gpu, step: float = 1.05
) -> dict[str, float]:
    """Percent of speed that one percent more of each rate gives ``config`` on ``gpu``.

    They add up to about 1 where rates alone decide; what is missing is latency, launch and clock. The largest
    names what binds, also where no unit is saturated.
    """
    plan = build_plan(problem, config, gpu)
    now = predict(plan, gpu).microseconds
    return {
        rate: (now / predict(plan, gpu.scaled(**{rate: step})).microseconds - 1.0) / (step - 1.0)
        for rate in ELASTIC
    }


def sweep(
    problem: AttentionProblem, gpu: Gpu, rate: str, factors: tuple[float, ...]
) -> Iterator[tuple[float, Point]]:
    """Re-tuned points with one rate scaled; ``rate`` is a key of :data:`fa4tune.hardware.gpu.SCALES`."""
    for factor in factors:
        yield factor, retuned(problem, gpu.scaled(**{rate: factor}) if factor != 1 else gpu)


def grid(
    problem: AttentionProblem, gpu: Gpu, across: str, up: str, factors: tuple[float, ...]
) -> Mapping[tuple[float, float], Point]:
    """Re-tuned points over two rates, by (factor of ``across``, factor of ``up``)."""
    return {(x, y): retuned(problem, gpu.scaled(**{across: x, up: y})) for x in factors for y in factors}
