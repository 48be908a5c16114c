"""The process that runs microbenchmark kernels: JSON jobs on stdin, JSON answers on stdout.

Imports torch, the launcher and the standard library. It may die of a kernel; its parent replaces it.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fa4tune.kernels.micro.suite import SWEEP_TILES, TILE_ROWS, Load, Probe, suite
from fa4tune.runtime.launcher import load_library
from fa4tune.search.calibrate import CalibrationManifest

REPEATS = 3
"""Times that each iteration count of a probe is run."""

COLUMNS = 128
"""Columns of the source; see :mod:`fa4tune.kernels.micro.base`."""

SMALL_ROWS = 4096
"""Rows of the source that all kernels but those that sweep memory need."""

MOST_THREADS = 512

FLUSH_BYTES = 256 << 20
"""Written where L2 must hold other data: more than twice any L2."""

LAUNCH_SECONDS = 5e-3
"""About how long one launch of a load takes."""

LAUNCHES = 100
"""Launches of a kernel without work in a graph."""

SENSORS = ("clocks.sm", "power.draw.instant", "power.draw", "temperature.gpu", "power.limit", "clocks.max.sm")


_SMI = ("nvidia-smi", "--format=csv,noheader,nounits", "-i")


class Sensors:
    """What ``nvidia-smi`` reads, every 20 ms, each reading with the time it came.

    Args:
        device: identity of the GPU for ``nvidia-smi -i``.
    """

    def __init__(self, device: str) -> None:
        self._readings: list[tuple[float, dict[str, float]]] = []
        query = ",".join(SENSORS)
        try:
            process = subprocess.Popen(
                [*_SMI, device, f"--query-gpu={query}", "-lms", "20"],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        except OSError:
            return
        threading.Thread(target=self._collect, args=(process,), daemon=True).start()

    def _collect(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            values = {}
            for name, text in zip(SENSORS, line.split(","), strict=False):
                try:
                    values[name] = float(text)
                except ValueError:
                    continue  # not supported on this board
            self._readings.append((time.monotonic(), values))

    def between(self, start: float, end: float) -> dict[str, float]:
        """Medians of the readings in that time; empty where there were none."""
        window = [values for at, values in list(self._readings) if start <= at <= end]
        names = {name for values in window for name in values}
        return {n: statistics.median(v[n] for v in window if n in v) for n in sorted(names)}


class Bench:
    """The GPU, its memory and the kernels of a bundle.

    Raises:
        RuntimeError: no CUDA GPU, or one of another architecture than the bundle's.
    """

    memory = "cuda"
    """Device of the tensors."""

    def __init__(self, bundle: Path) -> None:
        self.manifest = CalibrationManifest.read(bundle)
        self.bundle = bundle
        if not torch.cuda.is_available():
            raise RuntimeError("no CUDA GPU is visible to torch on this machine")
        self.properties = torch.cuda.get_device_properties(0)
        found = f"sm_{self.properties.major}{self.properties.minor}"
        if found != self.manifest.arch.rstrip("af"):
            raise RuntimeError(
                f"this GPU is {self.properties.name} ({found}) and the bundle is for {self.manifest.arch}"
            )
        self.sm_count = self.properties.multi_processor_count
        self.suite = suite(self.manifest.arch)
        self.probes = {probe.name: probe for probe in self.suite.probes}
        self.sink = torch.zeros(self.sm_count * MOST_THREADS, device=self.memory)
        self.stamps = [self._new_stamps() for _ in range(8)]
        self.sources = {"random": self._random(SMALL_ROWS), "zero": self._zero(SMALL_ROWS)}
        self._flush: torch.Tensor | None = None
        uuid = getattr(self.properties, "uuid", None)
        self.device = "0" if uuid is None else f"GPU-{uuid}"
        self.sensors: Sensors | None = None
        self._cycles: dict[str, float] = {}

    def _new_stamps(self) -> torch.Tensor:
        return torch.zeros(self.sm_count * MOST_THREADS // 32 * 2, dtype=torch.int64, device=self.memory)

    def _random(self, rows: int) -> torch.Tensor:
        generator = torch.Generator(self.memory).manual_seed(rows)
        block = torch.randn(min(rows, 1 << 16), COLUMNS, device=self.memory, generator=generator).bfloat16()
        source = torch.empty(rows, COLUMNS, dtype=torch.bfloat16, device=self.memory)
        source.view(-1, *block.shape).copy_(block)
        return source

    def _zero(self, rows: int) -> torch.Tensor:
        return torch.zeros(rows, COLUMNS, dtype=torch.bfloat16, device=self.memory)

    def environment(self) -> dict[str, Any]:
        """Facts of the machine."""
        properties = self.properties
        return {
            "gpu": properties.name,
            "arch": self.manifest.arch,
            "sm_count": self.sm_count,
            "l2_bytes": properties.L2_cache_size,
            "memory_bytes": properties.total_memory,
            "torch": torch.__version__,
            "cuda": torch.version.cuda or "",
            "python": platform.python_version(),
            "driver": _nvidia_smi(self.device, "driver_version"),
            "power_limit_watts": _number(_nvidia_smi(self.device, "power.limit")),
            "max_clock_mhz": _number(_nvidia_smi(self.device, "clocks.max.sm")),
            "memory_clock_mhz": _number(_nvidia_smi(self.device, "clocks.max.memory")),
            "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            **{f"compiler_{name}": value for name, value in self.manifest.provenance.items()},
        }

    # ------------------------------------------------------------------ launches

    def kernel(self, name: str) -> Callable[..., None]:
        """The host function of a kernel."""
        entry = self.manifest.kernels[name]
        return load_library(self.bundle / entry["file"], entry["symbol"])

    def blocks(self, probe: Probe) -> int:
        """CTAs of a probe."""
        return self.sm_count if probe.every_sm else 1

    def source(self, probe: Probe, values: str = "random") -> torch.Tensor:
        """The memory that a probe reads."""
        if probe.span >= SWEEP_TILES and "sweep" not in self.sources:
            rows = SWEEP_TILES * TILE_ROWS
            while 4 * rows * COLUMNS > self.properties.total_memory:
                rows //= 2
            self.sources["sweep"] = self._random(rows)
        elif probe.span * TILE_ROWS > SMALL_ROWS and "tiles" not in self.sources:
            self.sources["tiles"] = self._random(1 << 18)
        if probe.span >= SWEEP_TILES:
            return self.sources["sweep"]
        return self.sources["tiles" if probe.span * TILE_ROWS > SMALL_ROWS else values]

    def launch(self, probe: Probe, iterations: int, stamps: torch.Tensor, values: str = "random") -> None:
        """One launch on the current stream."""
        source = self.source(probe, values)
        blocks = self.blocks(probe)
        span = min(probe.span, source.shape[0] // TILE_ROWS)
        step = probe.step or blocks
        self.kernel(probe.kernel)(
            stamps,
            self.sink,
            source,
            iterations,
            blocks,
            probe.threads,
            probe.start,
            step,
            span,
            probe.block_step,
        )

    def flush(self) -> None:
        """Fill L2 with other data."""
        if self._flush is None:
            self._flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device=self.memory)
        self._flush.zero_()

    def block_cycles(self, probe: Probe, stamps: torch.Tensor) -> list[int]:
        """Cycles of each CTA: from its first warp's start to its last warp's end, of the warps that count."""
        warps, timed = probe.threads // 32, (probe.timed_threads or probe.threads) // 32
        pairs = stamps[: self.blocks(probe) * warps * 2].view(-1, warps, 2)[:, :timed].cpu()
        cycles: list[int] = (pairs[:, :, 1].amax(1) - pairs[:, :, 0].amin(1)).tolist()
        return cycles

    # ------------------------------------------------------------------ tasks

    def probe(self, name: str) -> dict[str, Any]:
        """Cost of an iteration of a probe: the slope between its two iteration counts.

        Returns:
            ``cycles`` and ``us`` an iteration, ``rate`` in ``unit`` a clock and CTA; for each launch its
            iterations, median, least and most cycles of a CTA, and microseconds.
        """
        probe = self.probes[name]
        stamps = self.stamps[0]
        stamps.zero_()
        self.launch(probe, probe.iterations[0], stamps)
        torch.cuda.synchronize()
        launches = []
        for _ in range(REPEATS):
            for iterations in probe.iterations:
                if probe.cold:
                    self.flush()
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                self.launch(probe, iterations, stamps)
                end.record()
                torch.cuda.synchronize()
                cycles = self.block_cycles(probe, stamps)
                if min(cycles) <= 0:
                    raise RuntimeError(
                        f"the clock went from {min(cycles)} to {max(cycles)} cycles; no CTA ran"
                    )
                launches.append(
                    [
                        iterations,
                        statistics.median(cycles),
                        min(cycles),
                        max(cycles),
                        start.elapsed_time(end) * 1e3,
                    ]
                )
        low, high = (
            [statistics.median(r[column] for r in launches if r[0] == n) for column in (1, 4)]
            for n in probe.iterations
        )
        turns = probe.iterations[1] - probe.iterations[0]
        cycles_each = (high[0] - low[0]) / turns
        result = self.sink[: self.blocks(probe) * probe.threads]
        if cycles_each <= 0:
            raise RuntimeError(f"more iterations took fewer cycles: {launches}")
        self._cycles[name] = cycles_each
        return {
            "cycles": cycles_each,
            "us": (high[1] - low[1]) / turns,
            "rate": probe.work / cycles_each,
            "unit": probe.unit,
            "clock_mhz": (high[0] - low[0]) / (high[1] - low[1]) if high[1] > low[1] else 0.0,
            "sink": _finite(result[0].item()),
            "launches": launches,
        }

    def launch_cost(self, name: str) -> dict[str, Any]:
        """A launch without work: between events, on a stream in a row, in a graph.

        Returns:
            ``event_us``: median between two events around a launch on a busy GPU; ``stream_us``: one of many
            in a row; ``graph_us``: one of many in a graph; ``pair_us``: two events without a launch.
        """
        probe, stamps = self.probes[name], self.stamps[0]

        def call() -> None:
            self.launch(probe, 0, stamps)

        def between(work: Callable[[], None]) -> float:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.flush()  # the GPU is busy while the host submits what is timed
            start.record()
            work()
            end.record()
            torch.cuda.synchronize()
            return start.elapsed_time(end) * 1e3

        call()
        torch.cuda.synchronize()
        events = [between(call) for _ in range(30)]
        pairs = [between(lambda: None) for _ in range(30)]
        begun = time.perf_counter()
        for _ in range(LAUNCHES):
            call()
        torch.cuda.synchronize()
        stream_us = (time.perf_counter() - begun) / LAUNCHES * 1e6
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(LAUNCHES):
                call()
        return {
            "event_us": statistics.median(events),
            "pair_us": statistics.median(pairs),
            "graph_us": statistics.median(between(graph.replay) / LAUNCHES for _ in range(10)),
            "stream_us": stream_us,
            "events": events,
        }

    def load(self, name: str) -> dict[str, Any]:
        """Clock and power while a probe runs over and over.

        Returns:
            ``clock_mhz`` from the SM's clock over the events' time (idle: what the sensors say), ``watts``,
            cycles an iteration, and the sensors' medians over the second half of the time.
        """
        load = next(load for load in self.suite.loads if load.name == name)
        if self.sensors is None:
            self.sensors = Sensors(self.device)
            time.sleep(1.0)
        begun = time.monotonic()
        measured = self._idle(load, begun) if load.probe is None else self._busy(load, begun)
        readings = self.sensors.between(begun + load.seconds / 2, begun + load.seconds)
        watts = readings.get("power.draw.instant", readings.get("power.draw", 0.0))
        return {
            "watts": watts,
            **({"clock_mhz": readings.get("clocks.sm", 0.0)} if load.probe is None else {}),
            **measured,
            "tensor_flops": load.tensor_flops,
            "sensors": readings,
        }

    def _idle(self, load: Load, begun: float) -> dict[str, Any]:
        time.sleep(max(0.0, begun + load.seconds - time.monotonic()))
        return {}

    def _busy(self, load: Load, begun: float) -> dict[str, Any]:
        assert load.probe is not None
        probe = self.probes[load.probe]
        if probe.name not in self._cycles:
            self.probe(probe.name)
        iterations = max(1, math.ceil(LAUNCH_SECONDS * 1.5e9 / self._cycles[probe.name]))
        pending: list[tuple[Any, Any, torch.Tensor]] = []
        clocks, each = [], []
        number = 0
        while time.monotonic() < begun + load.seconds:
            stamps = self.stamps[number % len(self.stamps)]
            number += 1
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            self.launch(probe, iterations, stamps, load.values)
            end.record()
            pending.append((start, end, stamps))
            if len(pending) < 4:  # launches wait on the GPU, so that it never idles
                continue
            start, end, stamps = pending.pop(0)
            end.synchronize()
            if time.monotonic() > begun + load.seconds / 2:
                ms = start.elapsed_time(end)
                # read without waiting for the launches behind it
                with torch.cuda.stream(self._side()):
                    cycles = self.block_cycles(probe, stamps)
                # events enclose the slowest CTA
                clocks.append(max(cycles) / ms * 1e-3)
                each.append(statistics.median(cycles) / iterations)
        torch.cuda.synchronize()
        return {
            "clock_mhz": statistics.median(clocks) if clocks else 0.0,
            "cycles": statistics.median(each) if each else 0.0,
            "launches": number,
            "iterations": iterations,
        }

    def _side(self) -> torch.cuda.Stream:
        stream = getattr(self, "_side_stream", None)
        if stream is None:
            stream = self._side_stream = torch.cuda.Stream()
        return stream


def _finite(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _nvidia_smi(device: str, field: str) -> str:
    command = [*_SMI, device, f"--query-gpu={field}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def serve(bench: Bench, job: dict[str, Any]) -> dict[str, Any]:
    """The answer to one job; ``reason`` where it failed, ``gone`` where the process is of no more use."""
    work = {"probe": bench.probe, "launch": bench.launch_cost, "load": bench.load}[job["kind"]]
    try:
        return work(job["name"])
    except Exception as error:  # whatever a kernel raises is this task's outcome
        return {"reason": f"{type(error).__name__}: {str(error).strip()[:500]}", "gone": not _usable()}


def _usable() -> bool:
    """Whether the GPU's context survived a failure."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def main(make: Callable[[Path], Bench] = Bench) -> None:
    """Serve jobs until stdin closes."""
    # what libraries print goes to stderr, the protocol keeps stdout
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        bench = make(Path(sys.argv[1]))
    except Exception as error:  # the parent says it in one sentence
        reply({"reason": str(error).strip()[:500]})
        return
    reply({"environment": bench.environment()})
    for line in sys.stdin:
        reply(serve(bench, json.loads(line)))


if __name__ == "__main__":
    main()
