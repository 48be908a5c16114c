"""What a measuring worker asks of the GPU: load a kernel, time calls in turns, read clocks and temperature.

Imports torch, the launcher and the standard library only. Tests put another backend in its place.
"""

from __future__ import annotations

import contextlib
import platform
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
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

WARM_UP_SECONDS = 1.0
"""Turns before the first that counts: the clock follows the power of about the last second."""

SENSOR_MILLISECONDS = 50
"""Between two readings of clock, power and temperature."""

SENSOR_START_SECONDS = 5.0
"""Patience with the first reading, which comes before timing starts."""

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


class _Sensors:
    """A running ``nvidia-smi`` and its readings. It ends with this process: its pipe breaks."""

    FIELDS = ("clocks.sm", "power.draw", "power.limit", "temperature.gpu")
    NAMES = ("clock_mhz", "power_watts", "power_limit_watts", "temperature_c")

    def __init__(self, command: list[str]) -> None:
        self._readings: list[tuple[float, list[float]]] = []
        self._first = threading.Event()
        try:
            process = subprocess.Popen(
                [*command, "-lms", str(SENSOR_MILLISECONDS)],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        except OSError:
            return
        threading.Thread(target=self._collect, args=(process.stdout,), daemon=True).start()
        self._first.wait(timeout=SENSOR_START_SECONDS)

    def _collect(self, lines: Iterable[str]) -> None:
        for line in lines:
            with contextlib.suppress(ValueError):
                values = [float(part) for part in line.split(",")]
                if len(values) == len(self.NAMES):
                    self._readings.append((time.monotonic(), values))
                    self._first.set()

    def since(self, start: float) -> dict[str, float]:
        """Medians of the readings since ``start``, or the last reading where that was too short a time."""
        values = [v for at, v in self._readings if at >= start] or [v for _, v in self._readings[-1:]]
        columns = zip(*values, strict=True)
        return dict(zip(self.NAMES, map(statistics.median, columns), strict=False))


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
        self._sensors: _Sensors | None = None
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
        """See :class:`Backend`. One sample is a kernel between two events, or a share of a graph replay.

        Turns of the first second warm up and do not count.
        """
        timed = self._graph_turns(calls) if graph else self._event_turns(calls)
        start, turn = time.monotonic(), 0
        while turn < count:
            samples = [0.0] * len(calls)
            order = [(turn + i) % len(calls) for i in range(len(calls))]
            for index, microseconds in timed(order):
                samples[index] = microseconds
            if time.monotonic() - start >= WARM_UP_SECONDS:
                yield samples
                turn += 1

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
        """See :class:`Backend`. Medians of what ``nvidia-smi`` reads; empty without it."""
        if self._sensors is None:
            self._sensors = _Sensors(self._smi(",".join(_Sensors.FIELDS)))
        start = time.monotonic()
        summary: dict[str, float] = {}
        yield summary
        summary.update(self._sensors.since(start))

    def _smi(self, fields: str) -> list[str]:
        return ["nvidia-smi", "-i", self._identity, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]

    def _query(self, fields: str) -> list[str]:
        try:
            done = subprocess.run(self._smi(fields), capture_output=True, text=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return []
        return [part.strip() for part in done.stdout.strip().split(",")] if done.returncode == 0 else []
