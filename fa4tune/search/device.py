"""What a measuring worker asks of the GPU: load a kernel, time calls in turns, read clocks and temperature.

Imports torch, the launcher and the standard library only. Tests put another backend in its place.
"""

from __future__ import annotations

import contextlib
import platform
import statistics
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from fa4tune.runtime.arguments import forward_caller
from fa4tune.runtime.launcher import load_library
from fa4tune.search.gate import Kernel

FLUSH_BYTES = 256 << 20
"""Written before each sample: more than twice any L2, and long enough to hide the host's launch overhead."""

GRAPH_REPEATS = 10
"""Kernels in one graph; a sample is the graph's time, less that of one of flushes only, over this."""

WARM_UP_SECONDS = 0.3

Call = Callable[[], None]


class Backend(Protocol):
    """The seam between the measuring protocol and a machine."""

    device: str

    def environment(self) -> dict[str, Any]:
        """Facts of the machine for provenance: gpu, driver, torch, python, arch, sm_count."""

    def load(self, bundle: Path, kernel: dict[str, Any]) -> Kernel:
        """The candidate's kernel as a callable; raises if it cannot be loaded."""

    def synchronize(self) -> None:
        """Wait for everything that was launched; raises if a launch failed."""

    def rounds(self, calls: Sequence[Call], count: int, graph: bool) -> Iterator[list[float]]:
        """``count`` times the microseconds of one turn of every call, L2 cold, in cyclic order."""

    def watch(self) -> contextlib.AbstractContextManager[dict[str, float]]:
        """Read the sensors while the context is open; its dict is filled when it closes."""


class CudaBackend:
    """One CUDA GPU, the first that is visible.

    Raises:
        RuntimeError: no GPU is usable.
    """

    device = "cuda"

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError("no CUDA GPU is visible to torch on this machine")
        self._flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
        self._identity = "0"
        self._sm_count = torch.cuda.get_device_properties(0).multi_processor_count
        uuid = getattr(torch.cuda.get_device_properties(0), "uuid", None)
        if uuid is not None:
            self._identity = f"GPU-{uuid}"

    def environment(self) -> dict[str, Any]:
        """See :class:`Backend`."""
        properties = torch.cuda.get_device_properties(0)
        reading = self._query("driver_version")
        return {
            "gpu": properties.name,
            "driver": reading[0] if reading else "",
            "torch": torch.__version__,
            "python": platform.python_version(),
            "arch": f"sm_{properties.major}{properties.minor}",
            "sm_count": properties.multi_processor_count,
        }

    def load(self, bundle: Path, kernel: dict[str, Any]) -> Kernel:
        """See :class:`Backend`."""
        function = load_library(bundle / kernel["object"], kernel["symbol"])
        window = kernel.get("window", (None, None))
        return forward_caller(
            function, kernel["arguments"], sm_count=self._sm_count, window=(window[0], window[1])
        )

    def synchronize(self) -> None:
        """See :class:`Backend`."""
        torch.cuda.synchronize()

    def rounds(self, calls: Sequence[Call], count: int, graph: bool) -> Iterator[list[float]]:
        """See :class:`Backend`. One sample is a kernel between two events, or a share of a graph replay."""
        self._warm_up(calls)
        timed = self._graph_turns(calls) if graph else self._event_turns(calls)
        for turn in range(count):
            samples = [0.0] * len(calls)
            order = [(turn + i) % len(calls) for i in range(len(calls))]
            for index, microseconds in timed(order):
                samples[index] = microseconds
            yield samples

    def _warm_up(self, calls: Sequence[Call]) -> None:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        elapsed = 0.0
        while elapsed < WARM_UP_SECONDS * 1e3:
            start.record()
            for call in calls:
                call()
            end.record()
            end.synchronize()
            elapsed += max(start.elapsed_time(end), 0.1)

    def _event_turns(self, calls: Sequence[Call]) -> Callable[[list[int]], list[tuple[int, float]]]:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in calls]

        def turns(order: list[int]) -> list[tuple[int, float]]:
            for index in order:
                self._flush.zero_()
                events[index][0].record()
                calls[index]()
                events[index][1].record()
            torch.cuda.synchronize()
            return [(i, events[i][0].elapsed_time(events[i][1]) * 1e3) for i in order]

        return turns

    def _graph_turns(self, calls: Sequence[Call]) -> Callable[[list[int]], list[tuple[int, float]]]:
        graphs = [self._capture(call) for call in calls]
        flushes = self._capture(lambda: None)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]

        def turns(order: list[int]) -> list[tuple[int, float]]:
            found = []
            for index in order:
                self._flush.zero_()  # the GPU is busy while the host submits what is timed
                events[0].record()
                flushes.replay()
                events[1].record()
                graphs[index].replay()
                events[2].record()
                torch.cuda.synchronize()
                both = events[1].elapsed_time(events[2]) - events[0].elapsed_time(events[1])
                found.append((index, both * 1e3 / GRAPH_REPEATS))
            return found

        return turns

    def _capture(self, call: Call) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(GRAPH_REPEATS):
                self._flush.zero_()
                call()
        return graph

    @contextlib.contextmanager
    def watch(self) -> Iterator[dict[str, float]]:
        """See :class:`Backend`. Medians of what ``nvidia-smi`` reads every 50 ms; empty without it."""
        fields = ("clocks.sm", "power.draw", "power.limit", "temperature.gpu")
        names = ("clock_mhz", "power_watts", "power_limit_watts", "temperature_c")
        readings: list[list[float]] = []
        summary: dict[str, float] = {}
        try:
            process = subprocess.Popen(
                [*self._smi(",".join(fields)), "-lms", "50"],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        except OSError:
            yield summary
            return

        def collect() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                with contextlib.suppress(ValueError):
                    readings.append([float(part) for part in line.split(",")])

        reader = threading.Thread(target=collect, daemon=True)
        reader.start()
        try:
            yield summary
        finally:
            process.terminate()
            process.wait()
            reader.join(timeout=2)
            if readings:
                columns = zip(*(r for r in readings if len(r) == len(names)), strict=True)
                summary.update(zip(names, (statistics.median(column) for column in columns), strict=False))

    def _smi(self, fields: str) -> list[str]:
        return ["nvidia-smi", "-i", self._identity, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]

    def _query(self, fields: str) -> list[str]:
        try:
            done = subprocess.run(self._smi(fields), capture_output=True, text=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return []
        return [part.strip() for part in done.stdout.strip().split(",")] if done.returncode == 0 else []
