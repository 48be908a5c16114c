"""The search space: every config that a plan exists for, and choices among ranked ones.

Knobs fall in two groups. The *structure* (tiles, stages, CTAs, warp roles, registers, scheduler) decides what
fits on an SM; the *softmax* knobs (:data:`SOFT_KNOBS`) are then free. A structure that does not fit with the
plainest softmax fits with none, so only structures that do are crossed with the rest.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from fa4tune.errors import ConfigError, Fa4tuneError, InfeasibleError
from fa4tune.hardware.gpu import Gpu
from fa4tune.kernels.config import CONFIGS, KernelConfig, default_config
from fa4tune.kernels.program import build_plan
from fa4tune.problem import AttentionProblem

SOFT_KNOBS = ("exp2_share", "exp2_degree", "exp2_start", "rescale_threshold", "p_split", "row_sum")
"""Knobs that do not decide whether a structure fits."""

UNPREDICTED_KNOBS = ("registers",)
"""Knobs that the model's time does not depend on: predicted once, tried by the sampler."""

RING_KNOB = "kv_stages"
"""A longer ring only takes waits away, so predictions never rise with it while Q and O keep their places."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """A feasible config and the model's time for it, in microseconds."""

    config: KernelConfig
    predicted_us: float


def plan_or_none(problem: AttentionProblem, config: KernelConfig, gpu: Gpu) -> Any:
    """The plan, or None where the config is infeasible."""
    try:
        return build_plan(problem, config, gpu)
    except InfeasibleError:
        return None


def structures(problem: AttentionProblem, gpu: Gpu) -> list[KernelConfig]:
    """The feasible structures, each with the plainest softmax; of the register splits the first that fits."""
    cls = CONFIGS[gpu.arch]
    base = default_config(problem, gpu.arch)
    plain = {"exp2_share": 0.0}
    neutral = {n: plain.get(n, cls.knobs()[n].default) for n in SOFT_KNOBS if n in cls.knobs()}
    inner = [n for n in cls.knobs() if n in UNPREDICTED_KNOBS]
    outer = [n for n in cls.knobs() if n not in SOFT_KNOBS and n not in inner]
    # the default's own value first, so that it represents its structure where it fits
    splits = list(product(*(dict.fromkeys((getattr(base, n), *cls.choices(n))) for n in inner)))
    found = []
    for values in product(*(_choices(cls, base, n) for n in outer)):
        for split in splits:
            config = make_config(
                cls,
                {**neutral, **dict(zip(outer, values, strict=True)), **dict(zip(inner, split, strict=True))},
            )
            if config is not None and plan_or_none(problem, config, gpu) is not None:
                found.append(config)
                break
    return found


def _choices(cls: type[KernelConfig], base: KernelConfig, name: str) -> tuple[Any, ...]:
    """What a search draws from, and the default's value where that lies outside."""
    return tuple(dict.fromkeys((*cls.choices(name), getattr(base, name))))


def make_config(cls: type[KernelConfig], values: Mapping[str, Any]) -> KernelConfig | None:
    try:
        return cls(**values)
    except ConfigError:
        return None


def soft_values(cls: type[KernelConfig], base: KernelConfig) -> list[dict[str, Any]]:
    """Every distinct setting of the softmax knobs; without emulation its others stand still."""
    names = [n for n in SOFT_KNOBS if n in cls.knobs()]
    idle: dict[str, Any] = {
        n: cls.knobs()[n].default for n in ("exp2_degree", "exp2_start") if n in cls.knobs()
    }
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for values in product(*(_choices(cls, base, n) for n in names)):
        setting = dict(zip(names, values, strict=True))
        if setting["exp2_share"] == 0:
            setting |= idle
        found[tuple(setting.values())] = setting
    return list(found.values())


def structure_of(config: KernelConfig) -> tuple[Any, ...]:
    """What makes two configs alike to a person: tiles and overlap, not stages, registers, order, softmax."""
    skipped = (*SOFT_KNOBS, *UNPREDICTED_KNOBS, RING_KNOB, "scheduler")
    return tuple(getattr(config, n) for n in config.knobs() if n not in skipped)


def hamming(a: KernelConfig, b: KernelConfig) -> int:
    """Knobs in which two configs of one kernel differ."""
    return sum(getattr(a, n) != getattr(b, n) for n in a.knobs())


def diverse(
    ranked: Iterable[Ranked], count: int, taken: Iterable[KernelConfig] = (), alike: int = 2
) -> list[Ranked]:
    """The ``count`` fastest that differ: two knobs apart, and at most ``alike`` of one structure.

    Near the top of a ranking most configs differ in a knob that the model barely feels; measuring these would
    test one prediction many times. Where the rules leave too few, the fastest others fill up.
    """
    chosen: list[Ranked] = []
    seen = list(taken)
    rest: list[Ranked] = []
    used: dict[tuple[Any, ...], int] = {}
    for entry in ranked:
        if len(chosen) == count:
            return chosen
        structure = structure_of(entry.config)
        near = any(hamming(entry.config, other) < 2 for other in seen)
        if near or used.get(structure, 0) >= alike:
            if entry.config not in seen and len(rest) < count:
                rest.append(entry)
            continue
        used[structure] = used.get(structure, 0) + 1
        chosen.append(entry)
        seen.append(entry.config)
    return chosen + rest[: count - len(chosen)]


def ablations(problem: AttentionProblem, gpu: Gpu, base: KernelConfig) -> list[KernelConfig]:
    """Every feasible config that differs from ``base`` in one knob (registers follow where they must)."""
    found: dict[KernelConfig, None] = {}
    for name in base.knobs():
        for value in type(base).choices(name):
            for changes in ({name: value}, {name: value, "registers": base.registers}):  # type: ignore[attr-defined]
                try:
                    config = base.replace(**changes)
                    build_plan(problem, config, gpu)
                except Fa4tuneError:
                    continue
                if config != base:
                    found.setdefault(config)
                break
    return list(found)


def random_feasible(
    problem: AttentionProblem, gpu: Gpu, rng: random.Random, tries: int = 1000
) -> KernelConfig | None:
    """A feasible config drawn uniformly from the knobs' choices by rejection; None after ``tries``."""
    cls = CONFIGS[gpu.arch]
    for _ in range(tries):
        config = make_config(cls, {n: rng.choice(cls.choices(n)) for n in cls.knobs()})
        if config is not None and plan_or_none(problem, config, gpu) is not None:
            return config
    return None
