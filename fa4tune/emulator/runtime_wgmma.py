"""wgmma for the NumPy back-end.

Each warp of a warpgroup computes its own 16 rows. An instruction is recorded when it is issued and performed
when its group is committed (eagerly) or waited for (late); instructions of one group on the same accumulators
become one matrix product.

Accumulator j of lane t: row ``t/4 + 8*((j/2)%2)``, column ``2*(t%4) + j%2 + 8*(j/4)``. A from registers:
word j has row ``t/4 + 8*(j%2)``, k ``2*(t%4) + 8*(j/2)`` and the next one (PTX ISA, register fragments for
wgmma).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fa4tune.emulator import checks_tensor, operand
from fa4tune.emulator.codegen import RuntimeFunction, runtime
from fa4tune.emulator.findings import FaultError
from fa4tune.emulator.isa import Operation
from fa4tune.emulator.lanes import F4, U2, U4, Array
from fa4tune.emulator.ptx import Register
from fa4tune.emulator.runtime_sync import uniform


@dataclass(slots=True)
class _Mma:
    operation: Operation
    accumulators: tuple[int, ...]
    a: Any  # a descriptor, or the numbers of four registers
    b: int
    accumulate: bool


@runtime("wgmma.mma")
def _mma(operation: Operation) -> RuntimeFunction:
    attrs = operation.attrs
    n = attrs["n"]
    accumulators = tuple(d.index for d in operation.dst if isinstance(d, Register))
    if len(accumulators) != n // 2:
        raise FaultError("unsupported", "wgmma accumulators that are no registers")
    a_registers = tuple(s.index for s in operation.src[:4] if isinstance(s, Register))
    from_registers = attrs["from_registers"]
    kind = f"wgmma.{'RS' if from_registers else 'SS'}"
    smem_bytes = n * 32 + (0 if from_registers else 64 * 32)

    held = 0
    for register in accumulators + (a_registers if from_registers else ()):
        held |= 1 << register

    def mma(w: Any, m: Array | None, *sources: Array) -> None:
        if m is not None:
            raise FaultError("partial-mask", "wgmma with idle lanes")
        b = uniform(None, sources[-2], "a wgmma descriptor")
        a: Any = a_registers if from_registers else uniform(None, sources[0], "a wgmma descriptor")
        scale = sources[-1]
        item = _Mma(operation, accumulators, a, b, bool(scale[0]))
        w.mma_open.append(item)
        if w.cluster.checks is not None:
            checks_tensor.wgmma(w.cluster.checks, w, item, held, w.machine.compiler.poison)
        if w.index % 4 == 0:
            w.count_event((kind, 64, n, 16))
            w.count_bytes("mma_smem", smem_bytes)

    return mma


@runtime("wgmma.commit")
def _commit(operation: Operation) -> RuntimeFunction:
    def commit(w: Any, m: Array | None) -> None:
        w.mma_groups.append(w.mma_open)
        w.mma_open = []
        if w.cluster.checks is not None:
            checks_tensor.wgmma_commit(w.cluster.checks, w)
        if not w.cluster.units.late:
            while w.mma_groups:
                perform_group(w, w.mma_groups.popleft())

    return commit


@runtime("wgmma.wait")
def _wait(operation: Operation) -> RuntimeFunction:
    count = operation.attrs["count"]

    def wait(w: Any, m: Array | None) -> bool:
        while len(w.mma_groups) > count:
            perform_group(w, w.mma_groups.popleft())
        if w.cluster.checks is not None:
            checks_tensor.wgmma_wait(w.cluster.checks, w, count)
        return True

    return wait


@runtime("wgmma.fence")
def _fence(operation: Operation) -> RuntimeFunction:
    return lambda w, m: None


def perform_group(w: Any, group: list[_Mma]) -> None:
    """Perform a committed group in order, joining runs on the same accumulators."""
    start = 0
    while start < len(group):
        end = start + 1
        while (
            end < len(group)
            and group[end].accumulators == group[start].accumulators
            and group[end].accumulate
        ):
            end += 1
        w.machine.current = (group[start].operation.instruction, w)
        _perform(w, group[start:end])
        w.machine.current = (None, None)
        start = end
    w.machine.progress += 1


def _a_matrix(w: Any, item: _Mma, warp_row: int) -> Array:
    attrs = item.operation.attrs
    bf16 = attrs["type"] == "bf16"
    if attrs["from_registers"]:
        words = np.stack([w.registers[i].view(U4) for i in item.a])  # (4, 32)
        halves = words.view(U2).reshape(2, 2, 8, 4, 2)  # k half, row half, row, quad, pair
        matrix = operand.to_float32(halves.transpose(1, 2, 0, 3, 4).reshape(16, 16), bf16)
    else:
        d = operand.decode_sm90(item.a)
        full = operand.load_operand(w.cta, d, 64, 16, bool(attrs["transpose_a"]), bf16)
        matrix = full[warp_row : warp_row + 16]
    return -matrix if attrs["negate_a"] < 0 else matrix


def _b_matrix(w: Any, item: _Mma) -> Array:
    attrs = item.operation.attrs
    d = operand.decode_sm90(item.b)
    matrix = operand.load_operand(
        w.cta, d, attrs["n"], 16, bool(attrs["transpose_b"]), attrs["type"] == "bf16"
    )
    return -matrix if attrs["negate_b"] < 0 else matrix


def _perform(w: Any, items: list[_Mma]) -> None:
    first = items[0]
    n = first.operation.attrs["n"]
    row = 16 * (w.index % 4)
    if len(items) == 1:
        product = _a_matrix(w, first, row) @ _b_matrix(w, first).T
    else:
        a = np.concatenate([_a_matrix(w, i, row) for i in items], axis=1)
        b = np.concatenate([_b_matrix(w, i) for i in items], axis=1)
        product = a @ b.T
    fragments = product.reshape(2, 8, n // 8, 4, 2).transpose(2, 0, 4, 1, 3).reshape(n // 2, 32)
    registers = w.registers
    storage = w.machine.program.storage
    if first.accumulate:
        old = np.stack([registers[i].view(F4) for i in first.accumulators])
        fragments = fragments + old
    else:
        fragments = np.ascontiguousarray(fragments)
    for j, index in enumerate(first.accumulators):
        value = fragments[j]
        registers[index] = value if storage[index] == "f" else value.view(U4)
