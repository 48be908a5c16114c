"""The model's verdict on a whole search space: every feasible config predicted, kept on disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from importlib import resources
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import msgspec

from fa4tune.errors import SearchError
from fa4tune.hardware.gpu import Gpu
from fa4tune.kernels.config import CONFIGS, KernelConfig, default_config
from fa4tune.kernels.plan import KernelPlan
from fa4tune.kernels.program import build_plan
from fa4tune.kernels.toolchain import cache_dir, digest
from fa4tune.model.predict import predict
from fa4tune.problem import AttentionProblem
from fa4tune.search.space import (
    RING_KNOB,
    SOFT_KNOBS,
    Ranked,
    make_config,
    plan_or_none,
    soft_values,
    structures,
)

Progress = Callable[[int, int], None]
"""``progress(done, total)``."""

_Ring = list[KernelConfig]


def rank_space(
    problem: AttentionProblem, gpu: Gpu, *, workers: int | None = None, progress: Progress | None = None
) -> list[Ranked]:
    """Every feasible config with its prediction, fastest first; ties keep the order of enumeration.

    Args:
        problem, gpu: what to search for.
        workers: processes; default one a CPU that this process may use.
        progress: called with groups of structures done and in all, first with none done; not at all where
            the ranking is known.

    Raises:
        InfeasibleError: no config of the kernel can run the problem; the reasons are the default's.
    """
    path = cache_dir("rankings") / f"{digest(str(problem), repr(gpu), _sources())}.msgpack"
    cls = CONFIGS[gpu.arch]
    with contextlib.suppress(OSError, msgspec.MsgspecError, ValueError, TypeError):
        return _decode(cls, path.read_bytes())
    rings = _rings(problem, gpu, structures(problem, gpu))
    if not rings:
        build_plan(problem, default_config(problem, gpu.arch), gpu)
        raise SearchError(f"no config that a search draws from can run {problem} on {gpu.name}")
    ranked: list[Ranked] = []
    count = workers or len(os.sched_getaffinity(0))
    if progress is not None:
        progress(0, len(rings))
    for done, part in enumerate(_map(problem, gpu, rings, count), 1):
        ranked += part
        if progress is not None:
            progress(done, len(rings))
    ranked.sort(key=lambda r: r.predicted_us)
    with contextlib.suppress(OSError):
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(_encode(ranked))
        os.replace(temporary, path)
    return ranked


def _rings(problem: AttentionProblem, gpu: Gpu, found: list[KernelConfig]) -> list[_Ring]:
    """Structures that differ in the ring's length only, Q and O in the same places, shortest ring first."""
    groups: dict[tuple[Any, ...], _Ring] = {}
    for config in found:
        overlays = tuple((b.name, b.overlays) for b in build_plan(problem, config, gpu).buffers if b.overlays)
        others = tuple(getattr(config, n) for n in config.knobs() if n != RING_KNOB)
        groups.setdefault((others, overlays), []).append(config)
    return [sorted(group, key=lambda c: getattr(c, RING_KNOB)) for group in groups.values()]


def _predict_ring(problem: AttentionProblem, gpu: Gpu, ring: _Ring) -> list[Ranked]:
    """Predictions of one group of :func:`_rings` with every setting of the soft knobs."""
    cls = type(ring[0])
    names = [n for n in cls.knobs() if n not in SOFT_KNOBS]
    ranked = []
    for setting in soft_values(cls, default_config(problem, gpu.arch)):
        configs = [make_config(cls, {**{n: getattr(c, n) for n in names}, **setting}) for c in ring]
        plans = [plan for c in configs if c and (plan := plan_or_none(problem, c, gpu)) is not None]
        times = _falling([None] * len(plans), plans, gpu)
        ranked += [Ranked(plan.config, time) for plan, time in zip(plans, times, strict=True)]
    return ranked


def _falling(times: list[float | None], plans: list[KernelPlan], gpu: Gpu) -> list[float]:
    """Times of ``plans``, which never rise along the list: between two equal ones nothing is computed."""

    def time(i: int) -> float:
        known = times[i]
        if known is None:
            known = times[i] = predict(plans[i], gpu).microseconds
        return known

    def fill(low: int, high: int) -> None:
        if high - low < 2:
            return
        middle = (low + high) // 2
        if times[low] == times[high]:
            times[middle] = times[low]
        else:
            time(middle)
        fill(low, middle)
        fill(middle, high)

    if plans:
        time(0)
        time(len(plans) - 1)
        fill(0, len(plans) - 1)
    return [time(i) for i in range(len(plans))]


def _predict_ring_of(work: tuple[AttentionProblem, Gpu, _Ring]) -> list[Ranked]:
    return _predict_ring(*work)


def _map(problem: AttentionProblem, gpu: Gpu, rings: list[_Ring], count: int) -> Iterator[list[Ranked]]:
    work = [(problem, gpu, ring) for ring in rings]
    if count == 1 or len(work) == 1:
        yield from map(_predict_ring_of, work)
        return
    with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:
        yield from pool.map(_predict_ring_of, work)


@cache
def _sources() -> str:
    """Digest of every source that a prediction depends on: plans, configs, model."""
    root = Path(str(resources.files("fa4tune")))
    files = [*root.glob("model/*.py"), *root.glob("kernels/**/*.py"), root / "search/space.py"]
    return digest(*(path.read_bytes() for path in sorted(files)))


def _encode(ranked: list[Ranked]) -> bytes:
    names = list(ranked[0].config.knobs())
    rows = [[*(getattr(r.config, n) for n in names), r.predicted_us] for r in ranked]
    return msgspec.msgpack.encode([names, rows])


def _decode(cls: type[KernelConfig], data: bytes) -> list[Ranked]:
    names, rows = msgspec.msgpack.decode(data)
    return [Ranked(cls.from_dict(dict(zip(names, row[:-1], strict=True))), row[-1]) for row in rows]
