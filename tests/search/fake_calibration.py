"""A worker whose GPU is a formula: a CTA of a kernel takes ``LAUNCH + iterations * cost`` cycles.

Kernels named in ``FAKE_FAILURES`` (``name=hang``, ``name=crash`` or ``name=raise``) fail that way; of one
that is ``name=uneven`` the last CTA takes half as long again. Warps beside the timed ones end later.
"""

from __future__ import annotations

import contextlib
import os
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from fa4tune.search import calibrate_worker
from fa4tune.search.calibrate_worker import Bench

LAUNCH = 5000
CLOCK_MHZ = 1500.0
NOW_MS = [0.0]


def cost(kernel: str, threads: int) -> int:
    """Cycles of an iteration."""
    return 200 + zlib.crc32(f"{kernel}/{threads}".encode()) % 3000


class FakeEvent:
    def __init__(self, enable_timing: bool) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = NOW_MS[0]

    def synchronize(self) -> None:
        time.sleep(0.002)

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.at - self.at


class FakeGraph:
    def replay(self) -> None:
        NOW_MS[0] += calibrate_worker.LAUNCHES * LAUNCH / CLOCK_MHZ * 1e-3


class FakeBench(Bench):
    memory = "cpu"

    def kernel(self, name: str) -> Callable[..., None]:
        failure = dict(pair.split("=") for pair in os.environ.get("FAKE_FAILURES", "").split(",") if pair)
        how = failure.get(name)
        if how == "hang":
            time.sleep(600)
        if how == "crash":
            os.abort()
        if how == "raise":
            raise RuntimeError("an illegal instruction was encountered")

        def run(
            stamps: Any, sink: Any, source: Any, iterations: int, blocks: int, threads: int, *walk: int
        ) -> None:
            assert threads % 32 == 0
            assert iterations >= 0
            assert 0 < blocks <= self.sm_count
            span = walk[2]
            assert span * 128 <= source.shape[0]
            cycles = torch.full((blocks, threads // 32), LAUNCH + iterations * cost(name, threads))
            if how == "uneven":
                cycles[-1] += cycles[-1] // 2
            whole = cycles.max().item()
            if name.startswith("beside."):
                cycles[:, 4:] += 7 * iterations
            pairs = stamps[: blocks * threads // 32 * 2].view(-1, 2)
            # blocks start at different times on clocks of their own
            begin = torch.arange(pairs.shape[0]) * 32 // threads * 1000 + 17
            pairs[:, 0], pairs[:, 1] = begin, begin + cycles.flatten()
            sink.fill_(0.5)
            NOW_MS[0] += whole / CLOCK_MHZ * 1e-3

        return run


def make(bundle: Path) -> FakeBench:
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_properties = lambda index: SimpleNamespace(  # type: ignore[assignment]
        name="formula", major=9, minor=0, multi_processor_count=3, L2_cache_size=1 << 20, total_memory=1 << 26
    )
    torch.cuda.synchronize = lambda: None
    torch.cuda.Event = FakeEvent  # type: ignore[misc,assignment]
    torch.cuda.CUDAGraph = FakeGraph  # type: ignore[misc,assignment]
    torch.cuda.graph = contextlib.nullcontext  # type: ignore[misc,assignment]
    torch.cuda.Stream = object  # type: ignore[misc,assignment]
    torch.cuda.stream = contextlib.nullcontext  # type: ignore[assignment]
    calibrate_worker.FLUSH_BYTES = 1 << 12
    bench = FakeBench(bundle)
    loads = tuple(replace(load, seconds=0.3) for load in bench.suite.loads)
    bench.suite = replace(bench.suite, loads=loads)
    return bench


if __name__ == "__main__":
    calibrate_worker.main(make)
