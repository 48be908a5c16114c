"""Matrix operations that the C runtime recorded: performing them in Python, and the BLAS that it calls."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np

from fa4tune.emulator import blas, runtime_tcgen05, runtime_wgmma
from fa4tune.emulator.asynchronous import AsyncUnits, Pending
from fa4tune.emulator.findings import FaultError
from fa4tune.emulator.isa import Operation
from fa4tune.emulator.native.layout import Mma
from fa4tune.emulator.ptx import Register

PERFORM_WGMMA, PERFORM_TENSOR, QUEUE_FULL = -1, -2, -3  #: numbers of calls, as in tensor.c
_ROW_MAJOR, _PLAIN, _TRANSPOSED = 101, 111, 112
_SHAPES = ((16, 128, 64), (16, 64, 128), (16, 8, 16), (128, 128, 128), (128, 64, 16), (64, 256, 64))


@cache
def sgemm_address() -> int:
    """``cblas_sgemm`` of NumPy's own BLAS, or 0 where it cannot be found or gives other bits than NumPy."""
    library = blas.library()
    function = getattr(library, "scipy_cblas_sgemm64_", None) if library is not None else None
    if function is None:
        return 0
    i64, f32, pointer = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
    function.restype = None
    function.argtypes = [ctypes.c_int] * 3 + [i64] * 3 + [f32, pointer, i64, pointer, i64, f32, pointer, i64]
    rng = np.random.default_rng(0)
    with blas.single_thread():
        for m, n, k in _SHAPES:
            a, b = (rng.standard_normal((rows, k)).astype(np.float32) for rows in (m, n))
            out = np.empty((m, n), np.float32)
            function(
                _ROW_MAJOR, _PLAIN, _TRANSPOSED, m, n, k, 1.0, a.ctypes.data, k, b.ctypes.data, k, 0.0,
                out.ctypes.data, n,
            )  # fmt: skip
            if out.tobytes() != (a @ b.T).tobytes():
                return 0
    return ctypes.cast(function, pointer).value or 0


def perform(warp: Any, number: int, start: int, end: int) -> None:
    """Perform recorded operations with the plain back-end's functions."""
    if number == QUEUE_FULL:
        raise FaultError("unsupported", "more than 512 matrix operations without a commit or wait")
    machine = warp.machine
    records = (warp.struct.mmas if number == PERFORM_WGMMA else warp.cta.struct.tensor)[start:end]
    instruction = machine.operation(records[0].operation).instruction
    machine.current = (instruction, warp)
    if number == PERFORM_WGMMA:
        runtime_wgmma._perform(warp, [_wgmma(machine.operation(r.operation), r) for r in records])
    else:
        runtime_tcgen05._Join(warp.cluster, [_tensor(machine, warp.cta.rank, r) for r in records])()
    machine.current = (None, None)


def _wgmma(operation: Operation, record: Mma) -> Any:
    accumulators = tuple(d.index for d in operation.dst if isinstance(d, Register))
    a: Any = record.a
    if operation.attrs["from_registers"]:
        a = tuple(s.index for s in operation.src[:4] if isinstance(s, Register))
    return runtime_wgmma._Mma(operation, accumulators, a, record.b, bool(record.accumulate))


def _tensor(machine: Any, rank: int, record: Mma) -> Any:
    operation = machine.operation(record.operation)
    off = tuple(record.off[: len(operation.src) - 5])
    return runtime_tcgen05._Mma(
        rank, operation.attrs["cta_group"], record.d, record.a, record.b,
        runtime_tcgen05.decode_instruction(record.idesc), bool(record.accumulate),
        operation.attrs["from_tmem"], off,
    )  # fmt: skip


def count_key(kind: int, m: int, n: int) -> tuple[str, int, int, int]:
    """The event that the plain back-end counts."""
    if kind & 4:
        return f"wgmma.{'RS' if kind & 1 else 'SS'}", m, n, 16
    return f"tcgen05.{'TS' if kind & 1 else 'SS'}.cta_group::{kind // 2 + 1}", m, n, 16


class NativeUnits(AsyncUnits):
    """The asynchronous units; matrix operations that nobody committed come from the C runtime's queues."""

    def __init__(self, late: bool, cluster: Any) -> None:
        super().__init__(late)
        self.cluster = cluster

    def _collect(self) -> None:
        for cta in self.cluster.ctas:
            records = cta.struct.tensor[: cta.struct.tensor_count]
            cta.struct.tensor_count = 0
            for r in records:
                machine = cta.machine
                join = runtime_tcgen05._Join(
                    self.cluster, [_tensor(machine, cta.rank, Mma.from_buffer_copy(r))]
                )
                pending = Pending(
                    join, (), "a matrix operation", machine.operation(r.operation).instruction,
                    self.cluster.warps[r.warp],
                )  # fmt: skip
                self.issue_tensor(cta.rank, pending, False)

    def force(self, random: Any) -> bool:
        """Perform some pending work; False if there is none."""
        self._collect()
        return super().force(random)

    def pending(self) -> list[Pending]:
        """Everything that has not been performed."""
        self._collect()
        return super().pending()
