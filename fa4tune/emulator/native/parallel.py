"""Clusters of one launch on several cores: a thread and a machine each, native code without Python's lock.

Only where clusters cannot see each other: no atomics or reductions on global memory. Results are put together
in the order of the clusters, so that they are those of a run on one core.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from fa4tune.emulator.cfg import Program
from fa4tune.emulator.counters import WarpCounters, collect
from fa4tune.emulator.findings import Finding

if TYPE_CHECKING:
    from fa4tune.emulator.machine import Machine

Position = tuple[int, int, int]


@dataclass(slots=True)
class ClusterResult:
    """What one cluster gave."""

    finished: bool
    findings: list[Finding]
    counters: list[WarpCounters]
    steps: int


@dataclass(slots=True)
class _Work:
    """The clusters that are still to be run; none beyond one that failed."""

    positions: list[Position]
    results: dict[int, ClusterResult] = field(default_factory=dict)
    taken: int = 0
    stopped: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self) -> int | None:
        """The number of the next cluster."""
        with self.lock:
            if self.stopped or self.taken == len(self.positions):
                return None
            self.taken += 1
            return self.taken - 1


def independent(program: Program) -> bool:
    """Whether no cluster's result depends on when another one runs."""
    for block in program.blocks:
        for operation in block.operations:
            attrs = operation.attrs
            if operation.op == "atom" and not attrs["space"].startswith("shared"):
                return False
            if operation.op in ("tma.store", "bulk.copy") and attrs.get("reduction") is not None:
                return False
    return True


def run_clusters(
    make_machine: Callable[[], Machine], positions: list[Position], workers: int, counters: bool,
    progress: Callable[[int, int], None] | None,
) -> tuple[list[ClusterResult], float]:  # fmt: skip
    """Run clusters on ``workers`` threads; results up to the first that failed, and matrix seconds."""
    work = _Work(positions)
    seconds: list[float] = []

    def serve() -> None:
        machine = make_machine()
        with np.errstate(all="ignore"), machine.session():
            while (number := work.take()) is not None:
                before, steps = len(machine.findings), machine.steps
                cluster = machine.new_cluster(positions[number])
                finished = machine.run_cluster(cluster)
                counted = collect(machine, cluster.ctas) if counters else []
                with work.lock:
                    work.results[number] = ClusterResult(
                        finished, machine.findings[before:], counted, machine.steps - steps
                    )
                    work.stopped |= not finished
                    if progress is not None and finished:
                        progress(len(work.results), len(positions))
        seconds.append(machine.matrix_seconds)

    with ThreadPoolExecutor(workers) as pool:
        for future in [pool.submit(serve) for _ in range(workers)]:
            future.result()
    out: list[ClusterResult] = []
    for number in range(len(work.results)):
        out.append(work.results[number])
        if not out[-1].finished:
            break
    return out, sum(seconds)
