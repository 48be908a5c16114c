"""Matrix operands in shared memory: descriptors, swizzles, and the conversion to float32.

One element is 16 bits here. A descriptor gives a start address and two strides; the swizzle moves 16-byte
chunks by bits of the absolute address, the same function for TMA and for matrix operations: chunk number c
becomes ``c ^ (c >> 3 & mask)`` with mask 7, 3 or 1 for 128, 64 or 32 bytes. Layouts are those of the
canonical forms in CUTLASS's ``mma_sm100_desc.hpp`` and ``mma_traits_sm90_gmma.hpp``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from fa4tune.emulator import lanes
from fa4tune.emulator.findings import FaultError
from fa4tune.emulator.lanes import Array
from fa4tune.emulator.memory import SMEM_BASE

SWIZZLE_MASK = {0: 0, 32: 1, 64: 3, 128: 7}


@dataclass(frozen=True, slots=True)
class MatrixDescriptor:
    """A shared-memory matrix descriptor: byte addresses and strides, swizzle width in bytes."""

    start: int
    leading: int
    stride: int
    swizzle: int


def decode_sm90(bits: int) -> MatrixDescriptor:
    """A wgmma descriptor: swizzle code in bits 62-63 (1 is 128, 2 is 64, 3 is 32 bytes)."""
    if bits >> 49 & 7:
        raise FaultError(
            "descriptor", f"matrix descriptor {bits:#x} has a base offset, which is not modelled"
        )
    swizzle = {0: 0, 1: 128, 2: 64, 3: 32}[bits >> 62]
    return MatrixDescriptor(
        (bits & 0x3FFF) << 4, (bits >> 16 & 0x3FFF) << 4, (bits >> 32 & 0x3FFF) << 4, swizzle
    )


def decode_sm100(bits: int) -> MatrixDescriptor:
    """A tcgen05 descriptor: version 1 at bit 46, swizzle in bits 61-63 (2: 128, 4: 64, 6: 32 bytes)."""
    code = bits >> 61
    if bits >> 46 & 3 != 1 or code not in (0, 2, 4, 6):
        raise FaultError("descriptor", f"{bits:#x} is no matrix descriptor of this architecture")
    if bits >> 49 & 7 or bits >> 52 & 1:
        raise FaultError(
            "descriptor", f"matrix descriptor {bits:#x} has a base offset or an absolute leading dimension"
        )
    swizzle = {0: 0, 2: 128, 4: 64, 6: 32}[code]
    return MatrixDescriptor(
        (bits & 0x3FFF) << 4, (bits >> 16 & 0x3FFF) << 4, (bits >> 32 & 0x3FFF) << 4, swizzle
    )


def swizzled(address: Any, width: int) -> Any:
    """The address where a byte of a swizzled layout lies (absolute shared addresses, ints or arrays)."""
    mask = SWIZZLE_MASK[width]
    return address ^ ((address >> 7 & mask) << 4)


@lru_cache(maxsize=4096)
def element_offsets(
    phase: int, leading: int, stride: int, swizzle: int, rows: int, depth: int, mn_major: bool
) -> tuple[Array, int, int]:
    """Where the elements of a rows x depth operand lie: 16-bit word numbers relative to ``start - phase``.

    ``phase`` is the start address modulo 1024, the period of the swizzle. Returns (words, lowest byte, end
    byte).
    """
    r = np.arange(rows)[:, None]
    k = np.arange(depth)[None, :]
    if mn_major:
        q, inner = r // 8, r % 8
        if swizzle:
            per = swizzle // 16
            at = q % per * 16 + q // per * leading + k % 8 * swizzle + k // 8 * stride + 2 * inner
        else:
            at = q * stride + k % 8 * 16 + k // 8 * leading + 2 * inner
    else:
        c, inner = k // 8, k % 8
        if swizzle:
            at = r % 8 * swizzle + r // 8 * stride + 16 * c + 2 * inner
        else:
            at = r % 8 * 16 + r // 8 * stride + c * leading + 2 * inner
    at = swizzled(at + phase, swizzle)
    words = np.ascontiguousarray(at // 2)
    return words, int(at.min()), int(at.max()) + 2


def to_float32(halves: Array, bf16: bool) -> Array:
    """16-bit floats (uint16) to float32."""
    return lanes.bf16_to_f32(halves) if bf16 else lanes.f16_to_f32(halves)


def load_operand(cta: Any, d: MatrixDescriptor, rows: int, depth: int, mn_major: bool, bf16: bool) -> Array:
    """A rows x depth operand from a CTA's shared memory as float32, kept until its bytes change."""
    key = (d, rows, depth, mn_major, bf16)
    kept = cta.operands.get(key)
    phase = d.start & 1023
    words, low, end = element_offsets(phase, d.leading, d.stride, d.swizzle, rows, depth, mn_major)
    base = d.start - phase
    start = cta.smem.check(base + low, end - low, "a matrix operand")
    if kept is not None and cta.smem.newest(start, end - low) <= kept[0]:
        matrix: Array = kept[1]
        return matrix
    view = cta.smem.views[2][(base - SMEM_BASE) // 2 :] if base >= SMEM_BASE else None
    if view is None:
        raise FaultError("out-of-bounds", f"a matrix operand starts at shared offset {d.start}")
    matrix = to_float32(view[words], bf16)
    if len(cta.operands) > 512:
        cta.operands.clear()
    cta.operands[key] = (cta.machine.stamp, matrix)
    return matrix
