"""A machine without a GPU for measuring workers: float attention stands in for kernels, a formula for time.

The ``kernel`` of a candidate says what goes wrong with it; see :func:`FakeBackend.load`.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from fa4tune.kernels.reference import attention_rounded

HARDWARE_KEY = "sm_90a-132sm-hbm3e-141"


class FakeBackend:
    """Times are ``kernel["us"]`` plus a clock that slows down by 1% a round, which rounds must cancel."""

    device = "cpu"

    def __init__(self) -> None:
        if os.environ.get("FAKE_GPU") == "none":
            raise RuntimeError("no CUDA GPU is visible to torch on this machine")
        self.pending: str | None = None

    def environment(self) -> dict[str, Any]:
        return {
            "gpu": "Fake H200",
            "driver": "1.0",
            "torch": torch.__version__,
            "python": "3",
            "arch": os.environ.get("FAKE_ARCH", "sm_90"),
            "sm_count": 132,
        }

    def load(self, bundle: Path, kernel: dict[str, Any]) -> Callable[..., None]:
        fault = kernel.get("fault", "")
        assert (bundle / kernel["object"]).exists()
        if fault == "load":
            raise OSError("undefined symbol: kernel")

        def call(q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float) -> None:
            self._misbehave(fault, kernel)
            mask = {"window": tuple(kernel.get("window", (None, None)))}
            exact, exact_lse = attention_rounded(q, k, v, softmax_scale=scale, **mask)
            out.copy_(exact)
            lse.copy_(exact_lse)
            self._spoil(fault, q, out, lse)

        call.us = float(kernel.get("us", 100.0))  # type: ignore[attr-defined]
        call.fault = fault  # type: ignore[attr-defined]
        return call

    def _misbehave(self, fault: str, kernel: dict[str, Any]) -> None:
        if fault == "hang":
            time.sleep(3600)
        if fault == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if fault == "launch":
            raise RuntimeError("CUDA error: invalid argument")
        if fault == "memory":
            raise RuntimeError("CUDA out of memory. Tried to allocate 20 GiB")
        if fault == "late" and (flag := Path(kernel["flag"])).exists():
            os.kill(os.getpid(), signal.SIGSEGV)
        elif fault == "late":
            self.pending = str(flag)

    def _spoil(self, fault: str, q: Any, out: Any, lse: Any) -> None:
        if fault == "zeros":
            out.zero_()
        elif fault == "unwritten":
            out[0, -1, 0, 0] = math.nan
        elif fault == "inaccurate":
            out.copy_((out.float() * 1.02).to(out.dtype))
        elif fault == "one element":
            out[0, 0, 0, 0] += 0.015
        elif fault == "lse":
            lse.mul_(1.4427)
        elif fault == "lse unwritten":
            lse[..., -1] = math.nan
        elif fault == "race":
            out[0, 0, 0, 0] += torch.rand(()).to(out.dtype)
        elif fault == "heavy tails" and q.float().abs().max() > 20:
            out.mul_(1.1)

    def synchronize(self) -> None:
        if self.pending:
            Path(self.pending).touch()
            self.pending = None

    def rounds(self, calls: Sequence[Callable[[], None]], count: int, graph: bool) -> Iterator[list[float]]:
        for turn in range(count):
            clock = 1.0 + 0.01 * turn
            yield [_kernel_of(call).us * clock for call in calls]

    @contextlib.contextmanager
    def watch(self) -> Iterator[dict[str, float]]:
        readings: dict[str, float] = {}
        yield readings
        readings.update(clock_mhz=1755.0, power_watts=650.0, power_limit_watts=700.0, temperature_c=61.0)


def _kernel_of(call: Callable[[], None]) -> Any:
    """The kernel that a worker's zero-argument call launches."""
    return next(c.cell_contents for c in call.__closure__ or () if hasattr(c.cell_contents, "us"))
