"""The search space: every config that a plan exists for, and what the model says of each.

Knobs fall in two groups. The *structure* (tiles, stages, CTAs, warp roles, registers) decides what fits on an
SM; the *softmax and order* knobs (:data:`SOFT_KNOBS`) are then free. A structure that does not fit with the
plainest softmax fits with none, so only structures that do are crossed with the rest.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from typing import Any

from fa4tune.errors import ConfigError, Fa4tuneError, InfeasibleError, SearchError
from fa4tune.hardware.gpu import Gpu
from fa4tune.kernels.config import CONFIGS, KernelConfig, default_config
from fa4tune.kernels.program import build_plan
from fa4tune.model.predict import predict
from fa4tune.problem import AttentionProblem

SOFT_KNOBS = ("exp2_share", "exp2_degree", "exp2_start", "rescale_threshold", "p_split", "scheduler")
"""Knobs that do not decide whether a structure fits."""

UNPREDICTED_KNOBS = ("registers",)
"""Knobs that the model's time does not depend on: predicted once, tried by the sampler."""

RING_KNOB = "kv_stages"
"""A longer ring only takes waits away, so predictions never rise with it while Q and O keep their places."""

Progress = Callable[[int, int], None]


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
            config = _config(
                cls, {**neutral, **dict(zip(outer, values, strict=True)), **dict(zip(inner, split, strict=True))}
            )
            if config is not None and plan_or_none(problem, config, gpu) is not None:
                found.append(config)
                break
    return found


def _choices(cls: type[KernelConfig], base: KernelConfig, name: str) -> tuple[Any, ...]:
    """What a search draws from, and the default's value where that lies outside."""
    return tuple(dict.fromkeys((*cls.choices(name), getattr(base, name))))


def _config(cls: type[KernelConfig], values: Mapping[str, Any]) -> KernelConfig | None:
    try:
        return cls(**values)
    except ConfigError:
        return None


def soft_values(cls: type[KernelConfig], base: KernelConfig) -> list[dict[str, Any]]:
    """Every distinct setting of the softmax and order knobs; without emulation its other knobs stand still."""
    names = [n for n in SOFT_KNOBS if n in cls.knobs()]
    idle = {n: cls.knobs()[n].default for n in ("exp2_degree", "exp2_start") if n in cls.knobs()}
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for values in product(*(_choices(cls, base, n) for n in names)):
        setting = dict(zip(names, values, strict=True))
        if setting["exp2_share"] == 0:
            setting |= idle
        found[tuple(setting.values())] = setting
    return list(found.values())


def _rings(problem: AttentionProblem, gpu: Gpu, found: list[KernelConfig]) -> list[list[KernelConfig]]:
    """Structures that differ in the ring's length only, Q and O in the same places, shortest ring first."""
    groups: dict[tuple[Any, ...], list[KernelConfig]] = {}
    for config in found:
        overlays = tuple((b.name, b.overlays) for b in build_plan(problem, config, gpu).buffers if b.overlays)
        others = tuple(getattr(config, n) for n in config.knobs() if n != RING_KNOB)
        groups.setdefault((others, overlays), []).append(config)
    return [sorted(group, key=lambda c: getattr(c, RING_KNOB)) for group in groups.values()]


def _predict_ring(problem: AttentionProblem, gpu: Gpu, ring: list[KernelConfig]) -> list[Ranked]:
    """Predictions of one group of :func:`_rings` with every setting of the soft knobs.

    The shortest and the longest ring are predicted first; where these agree, the lengths between do too.
    """
    cls = type(ring[0])
    names = [n for n in cls.knobs() if n not in SOFT_KNOBS]
    ranked = []
    for setting in soft_values(cls, default_config(problem, gpu.arch)):
        configs = [_config(cls, {**{n: getattr(c, n) for n in names}, **setting}) for c in ring]
        plans = [(c, plan) for c in configs if c and (plan := plan_or_none(problem, c, gpu)) is not None]
        if not plans:
            continue
        ends = [predict(plans[i][1], gpu).microseconds for i in {0, len(plans) - 1}]
        same = ends[0] == ends[-1]
        for config, plan in plans:
            ranked.append(Ranked(config, ends[0] if same else predict(plan, gpu).microseconds))
    return ranked


def _predict_ring_of(work: tuple[AttentionProblem, Gpu, list[KernelConfig]]) -> list[Ranked]:
    return _predict_ring(*work)


def rank_space(
    problem: AttentionProblem, gpu: Gpu, *, workers: int | None = None, progress: Progress | None = None
) -> list[Ranked]:
    """Every feasible config with its prediction, fastest first; ties keep the order of enumeration.

    Args:
        problem, gpu: what to search for.
        workers: processes; default one a CPU that this process may use.
        progress: called with groups of structures done and in all.

    Raises:
        SearchError: no config of the kernel can run the problem; the sentence repeats the default's reasons.
    """
    found = structures(problem, gpu)
    if not found:
        build_plan(problem, default_config(problem, gpu.arch), gpu)  # raises with its reasons
        raise SearchError(f"no config of the {gpu.arch} kernel can run {problem}")
    ranked: list[Ranked] = []
    rings = _rings(problem, gpu, found)
    count = workers or len(os.sched_getaffinity(0))
    for done, part in enumerate(_map(problem, gpu, rings, count), 1):
        ranked += part
        if progress is not None:
            progress(done, len(rings))
    return sorted(ranked, key=lambda r: r.predicted_us)


def _map(
    problem: AttentionProblem, gpu: Gpu, rings: list[list[KernelConfig]], count: int
) -> Iterator[list[Ranked]]:
    work = [(problem, gpu, ring) for ring in rings]
    if count == 1 or len(work) == 1:
        yield from map(_predict_ring_of, work)
        return
    with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:
        yield from pool.map(_predict_ring_of, work)


def structure_of(config: KernelConfig) -> tuple[Any, ...]:
    """What makes two configs alike to a person: tiles and overlap, without stages, registers and softmax."""
    skipped = (*SOFT_KNOBS, *UNPREDICTED_KNOBS, RING_KNOB)
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
        config = _config(cls, {n: rng.choice(cls.choices(n)) for n in cls.knobs()})
        if config is not None and plan_or_none(problem, config, gpu) is not None:
            return config
    return None
