"""tcgen05 for the NumPy back-end: allocation, loads and stores, matrix operations of one and two CTAs.

Matrix operations are queued in order of issue per issuing CTA and performed at a commit (late: when somebody
needs it); those on the same accumulator become one matrix product. Instruction descriptor (CUTLASS
``mma_sm100_desc.hpp``): C format in bits 4-5, A in 7-9, B in 10-12, negations 13-14, MN-major A and B
15-16, N/8 from bit 17, M/16 from bit 24; M and N are those of the pair for ``cta_group::2``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fa4tune.emulator import checks_tensor, operand
from fa4tune.emulator.asynchronous import Pending, perform
from fa4tune.emulator.barriers import MBarrier
from fa4tune.emulator.codegen import RuntimeFunction, runtime
from fa4tune.emulator.findings import FaultError
from fa4tune.emulator.isa import Operation
from fa4tune.emulator.lanes import F4, U2, U4, Array
from fa4tune.emulator.memory import RANK_SHIFT
from fa4tune.emulator.ptx import Register
from fa4tune.emulator.runtime_copy import ranks_of
from fa4tune.emulator.runtime_memory import shared_store
from fa4tune.emulator.runtime_sync import OFFSET_MASK, active_list, note, uniform, window_offset
from fa4tune.emulator.tensor_memory import WantedColumns


@dataclass(frozen=True, slots=True)
class InstructionDescriptor:
    """The fields of an instruction descriptor for kind::f16."""

    m: int
    n: int
    a_bf16: bool
    b_bf16: bool
    negate_a: bool
    negate_b: bool
    a_mn_major: bool
    b_mn_major: bool


def decode_instruction(bits: int) -> InstructionDescriptor:
    """Decode; a :class:`FaultError` for formats or shapes outside of the model."""
    c, a, b = bits >> 4 & 3, bits >> 7 & 7, bits >> 10 & 7
    if bits & 0xF or c != 1 or a > 1 or b > 1:
        raise FaultError(
            "descriptor", f"instruction descriptor {bits:#x}: only f16 or bf16 into f32 is modelled"
        )
    return InstructionDescriptor(
        (bits >> 24 & 31) * 16, (bits >> 17 & 63) * 8, a == 1, b == 1, bool(bits >> 13 & 1),
        bool(bits >> 14 & 1),
        bool(bits >> 15 & 1), bool(bits >> 16 & 1),
    )  # fmt: skip


@dataclass(slots=True)
class _Mma:
    """One issued matrix operation."""

    rank: int
    group: int
    d: int
    a: int
    b: int
    idesc: InstructionDescriptor
    accumulate: bool
    from_tmem: bool
    disabled: tuple[int, ...]


@runtime("tcgen05.mma")
def _mma(operation: Operation) -> RuntimeFunction:
    attrs = operation.attrs
    d_offset, a_offset, from_tmem, group = (
        attrs[k] for k in ("d_offset", "a_offset", "from_tmem", "cta_group")
    )

    def mma(
        w: Any, m: Array | None, d: Array, a: Array, b: Array, idesc: Array, accumulate: Array, *off: Array
    ) -> None:
        for lane in active_list(m):
            descriptor = decode_instruction(int(idesc[lane]))
            item = _Mma(
                w.cta.rank, group, int(d[lane]) + d_offset, int(a[lane]) + a_offset, int(b[lane]), descriptor,
                bool(accumulate[lane]), from_tmem, tuple(int(x[lane]) for x in off),
            )  # fmt: skip
            _check(w, item)
            if w.cluster.checks is not None:
                checks_tensor.mma(w.cluster.checks, w, item)
            kind = f"tcgen05.{'TS' if from_tmem else 'SS'}.cta_group::{group}"
            w.count_event((kind, descriptor.m, descriptor.n, 16))
            w.count_bytes("mma_smem", 32 * (descriptor.n + (0 if from_tmem else descriptor.m)))
            queue = w.cluster.units.tensor.get(w.cta.rank)
            last = queue[-1] if queue else None
            if last is not None and isinstance(last.run, _Join) and last.run.accepts(item):
                last.run.items.append(item)
            else:
                w.cluster.units.issue_tensor(
                    w.cta.rank,
                    Pending(_Join(w.cluster, [item]), (), "a matrix operation", operation.instruction, w),
                    False,
                )

    return mma


def _check(w: Any, item: _Mma) -> None:
    d = item.idesc
    ok_m = (64, 128) if item.group == 1 else (128, 256)
    step = 8 if d.m == 64 else 16 if item.group == 1 else 32
    if d.m not in ok_m or d.n % step or not 0 < d.n <= 256:
        raise FaultError("descriptor", f"a matrix shape {d.m} x {d.n} with cta_group::{item.group}")
    if item.group == 2 and (w.cta.rank & 1 or w.cluster.size < 2):
        raise FaultError(
            "descriptor", f"cta_group::2 issued by CTA rank {w.cta.rank} of a cluster of {w.cluster.size}"
        )


class _Join:
    """Consecutive operations on one accumulator, performed as one product."""

    def __init__(self, cluster: Any, items: list[_Mma]) -> None:
        self.cluster = cluster
        self.items = items

    def accepts(self, item: _Mma) -> bool:
        """Whether an operation continues this run."""
        first = self.items[0]
        return (
            item.accumulate
            and item.d == first.d
            and item.group == first.group
            and item.from_tmem == first.from_tmem
            and item.idesc == first.idesc
            and item.disabled == first.disabled
        )

    def __call__(self) -> None:
        first = self.items[0]
        ranks = [first.rank] if first.group == 1 else [first.rank, first.rank ^ 1]
        ctas = [self.cluster.cta(r) for r in ranks]
        d = first.idesc
        b = np.concatenate([self._b(cta, len(ctas)) for cta in ctas], axis=0)
        for cta in ctas:
            a = self._a(cta, d.m // len(ctas))
            _accumulate(cta, first, a @ b.T)

    def _b(self, cta: Any, share: int) -> Array:
        d = self.items[0].idesc
        parts = [
            operand.load_operand(cta, operand.decode_sm100(i.b), d.n // share, 16, d.b_mn_major, d.b_bf16)
            for i in self.items
        ]
        matrix = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
        return -matrix if d.negate_b else matrix

    def _a(self, cta: Any, rows: int) -> Array:
        d = self.items[0].idesc
        if self.items[0].from_tmem:
            parts = [_a_from_tmem(cta, i.a, rows, d.a_bf16) for i in self.items]
        else:
            parts = [
                operand.load_operand(cta, operand.decode_sm100(i.a), rows, 16, d.a_mn_major, d.a_bf16)
                for i in self.items
            ]
        matrix = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
        return -matrix if d.negate_a else matrix


def _a_from_tmem(cta: Any, address: int, rows: int, bf16: bool) -> Array:
    """A rows x 16 operand from tensor memory: two 16-bit values a column."""
    column, lane = address & 0xFFFF, address >> 16
    if rows != 128 or lane:
        raise FaultError("unsupported", f"A in TMEM with {rows} rows at lane {lane}")
    cta.tmem.check(column, 8, "operand A")
    words = np.ascontiguousarray(cta.tmem.data[column : column + 8, :rows].T)
    return operand.to_float32(words.view(U2), bf16)


def _accumulate(cta: Any, item: _Mma, product: Array) -> None:
    """Add a CTA's rows of the product to its accumulator in TMEM (layouts: PTX ISA, tcgen05 data path)."""
    rows, n = product.shape
    column, lane = item.d & 0xFFFF, item.d >> 16
    data = cta.tmem.data.view(F4)
    if item.group == 2 and rows == 64:  # layout B: the halves of N side by side in lanes
        cta.tmem.check(column, n // 2, "accumulator D")
        _write(
            data,
            item,
            column,
            np.concatenate([product[:, : n // 2], product[:, n // 2 :]], axis=0),
            slice(0, 128),
        )
        return
    cta.tmem.check(column, n, "accumulator D")
    if rows == 64:  # layout F: 16 rows in the first half of each quarter
        if lane not in (0, 16):
            raise FaultError("unsupported", f"an accumulator of 64 rows at lane {lane}")
        lanes = (np.arange(64) // 16) * 32 + np.arange(64) % 16 + lane
        _write(data, item, column, product, lanes)
        return
    if lane:
        raise FaultError("unsupported", f"an accumulator of 128 rows at lane {lane}")
    _write(data, item, column, product, slice(0, 128))


def _write(data: Array, item: _Mma, column: int, values: Array, lanes: Any) -> None:
    window = data[column : column + values.shape[1]]
    new = values.T
    if item.accumulate:
        new = new + window[:, lanes]
    if any(item.disabled):
        bits = np.array(item.disabled, U4)
        off = (bits[:, None] >> np.arange(32, dtype=np.uint32) & 1).astype(bool).ravel()[:128]
        new = np.where(off[lanes], window[:, lanes], new)
    window[:, lanes] = new


@runtime("tcgen05.commit")
def _commit(operation: Operation) -> RuntimeFunction:
    offset = operation.attrs["offset"]

    def commit(w: Any, m: Array | None, base: Array, mask: Array | None = None) -> None:
        for lane in active_list(m):
            address = int(window_offset(base, offset)[lane])
            if mask is not None:
                bars = [
                    w.cluster.cta(r).mbarrier(address & OFFSET_MASK)
                    for r in ranks_of(int(mask[lane]), w.cluster.size)
                ]
            else:
                bars = [w.cluster.cta(address >> RANK_SHIFT).mbarrier(address & OFFSET_MASK)]

            checks = w.cluster.checks
            stands_for = None
            if checks is not None:
                stands_for = checks_tensor.commit(checks, w, [bar.cta for bar in bars])

            def run(bars: list[MBarrier] = bars, checks: Any = checks, stands_for: Any = stands_for) -> None:
                for bar in bars:
                    if checks is not None:
                        issue, component, epoch = stands_for
                        checks.completed(issue, bar, component, epoch)
                    note(w, "commit", bar, bar.phase, 1)
                    bar.arrive(1)

            w.cluster.units.issue_tensor(
                w.cta.rank, Pending(run, tuple(bars), "a commit", operation.instruction, w), True
            )

    return commit


# -- allocation


@runtime("tcgen05.alloc")
def _alloc(operation: Operation) -> RuntimeFunction:
    offset, group = operation.attrs["offset"], operation.attrs["cta_group"]

    def alloc(w: Any, m: Array | None, base: Array, columns: Array) -> Any:
        if m is not None:
            raise FaultError("partial-mask", "tcgen05.alloc with idle lanes")
        wanted = uniform(None, columns, "a number of columns")
        first = w.cta.tmem.allocate(wanted)
        if first is None:
            w.cta.tmem.waiters.append(w)
            w.block(WantedColumns(w.cta.tmem, wanted))
            return None
        w.cta.tmem.holders[first] = f"warp {w.index} since PTX line {operation.instruction.line}"
        if w.cluster.checks is not None:
            checks_tensor.allocated(w.cluster.checks, w, w.cta, first, w.cta.tmem.blocks[first], group)
        address = window_offset(base, offset)[:1].astype(U4)
        shared_store(w, address, [np.array([first], U4)], 4, False, counted=False)
        return True

    return alloc


@runtime("tcgen05.dealloc")
def _dealloc(operation: Operation) -> RuntimeFunction:
    def dealloc(w: Any, m: Array | None, address: Array, columns: Array) -> None:
        first, count = uniform(m, address, "a TMEM address"), uniform(m, columns, "a number of columns")
        w.cta.tmem.free(first, count)
        if w.cluster.checks is not None:
            checks_tensor.freed(w.cluster.checks, w, w.cta, first & 0xFFFF, count)
        w.machine.progress += 1

    return dealloc


@runtime("tcgen05.relinquish")
def _relinquish(operation: Operation) -> RuntimeFunction:
    def relinquish(w: Any, m: Array | None) -> None:
        w.cta.tmem.relinquished = True

    return relinquish


@runtime("tcgen05.fence")
def _fence(operation: Operation) -> RuntimeFunction:
    before = operation.attrs["before"]

    def fence(w: Any, m: Array | None) -> None:
        if w.cluster.checks is not None:
            w.cluster.checks.tcgen05_fence(w, before)

    return fence


@runtime("tcgen05.wait.ld")
def _wait_ld(operation: Operation) -> RuntimeFunction:
    def wait(w: Any, m: Array | None) -> None:
        if w.cluster.checks is not None:
            w.cluster.checks.tcgen05_wait(w, "tmem.ld")

    return wait


@runtime("tcgen05.wait.st")
def _wait_st(operation: Operation) -> RuntimeFunction:
    def wait(w: Any, m: Array | None) -> None:
        for pending in w.tmem_stores:
            perform(pending)
        w.tmem_stores = []
        if w.cluster.checks is not None:
            w.cluster.checks.tcgen05_wait(w, "tmem.st")

    return wait


# -- loads and stores


def _region(
    w: Any, m: Array | None, base: Array, offset: int, shape: str, count: int, what: str
) -> tuple[int, int]:
    """(column, first lane) of a warp's access, checked against what the warp may reach."""
    if m is not None:
        raise FaultError("partial-mask", f"{what} with idle lanes")
    address = uniform(None, base, "a TMEM address") + offset
    column, lane = address & 0xFFFF, address >> 16
    quarter = 32 * (w.index % 4)
    rows = 32 if shape == "32x32b" else 16
    if not quarter <= lane <= quarter + 32 - rows:
        raise FaultError(
            "tmem", f"{what} at lane {lane}: warp {w.index} reaches lanes {quarter}..{quarter + 31}"
        )
    w.cta.tmem.check(column, count, what)
    return column, lane


#: Columns that one repetition covers, and 32-bit registers a lane.
_SHAPES = {"32x32b": (1, 1), "16x64b": (2, 1), "16x128b": (4, 2), "16x256b": (8, 4)}


def _matrix_fragment(shape: str, repeat: int) -> tuple[Array, Array]:
    """Row and column of register j of lane t, shape (registers, 32), for the 16-row shapes.

    As in CUTLASS (``copy_traits_sm100.hpp``, 16dp64b, 16dp128b, 16dp256b): four lanes share a row.
    """
    columns, registers = _SHAPES[shape]
    t = np.arange(32)
    rows, cols = [], []
    for r in range(repeat):
        for j in range(registers):
            if shape == "16x256b":
                rows.append(t // 4 + 8 * (j // 2))
                cols.append(r * columns + 2 * (t % 4) + j % 2)
            elif shape == "16x128b":
                rows.append(t // 4 + 8 * j)
                cols.append(r * columns + t % 4)
            else:
                rows.append(t // 4 + 8 * (t % 2))
                cols.append(r * columns + t // 2 % 2)
    return np.array(rows), np.array(cols)


@runtime("tcgen05.ld")
def _ld(operation: Operation) -> RuntimeFunction:
    offset, shape, repeat = (operation.attrs[k] for k in ("offset", "shape", "repeat"))
    columns, registers = _SHAPES[shape]
    span = columns * repeat
    fragment = None if shape == "32x32b" else _matrix_fragment(shape, repeat)
    rows = 32 if shape == "32x32b" else 16
    held = sum(1 << d.index for d in operation.dst if isinstance(d, Register))
    single = len(operation.dst) == 1

    def load(w: Any, m: Array | None, base: Array) -> Array:
        column, lane = _region(w, m, base, offset, shape, span, "tcgen05.ld")
        w.count_bytes("tmem_read", 128 * repeat * registers)
        if w.cluster.checks is not None:
            checks_tensor.tmem_load(w.cluster.checks, w, column, span, lane, rows, held)
        if fragment is None:
            data: Array = w.cta.tmem.data[column : column + span, lane : lane + 32].copy()
        else:
            data = w.cta.tmem.data[column + fragment[1], lane + fragment[0]]
        return data[0] if single else data

    return load


@runtime("tcgen05.st")
def _st(operation: Operation) -> RuntimeFunction:
    offset, shape, repeat = (operation.attrs[k] for k in ("offset", "shape", "repeat"))
    columns, registers = _SHAPES[shape]
    span = columns * repeat
    rows = 32 if shape == "32x32b" else 16
    fragment = None if shape == "32x32b" else _matrix_fragment(shape, repeat)

    def store(w: Any, m: Array | None, base: Array, *values: Array) -> None:
        column, lane = _region(w, m, base, offset, shape, span, "tcgen05.st")
        w.count_bytes("tmem_write", 128 * repeat * registers)
        if w.cluster.checks is not None:
            checks_tensor.tmem_store(w.cluster.checks, w, column, span, lane, rows)

        def run() -> None:
            data = w.cta.tmem.data
            if fragment is None:
                data[column : column + span, lane : lane + 32] = values
            else:
                data[column + fragment[1], lane + fragment[0]] = np.stack(values)

        pending = Pending(run, (), "a store to TMEM", operation.instruction, w)
        if w.cluster.units.late:
            w.tmem_stores.append(pending)
        else:
            perform(pending)

    return store
