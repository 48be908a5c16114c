"""TMA descriptors (``CUtensorMap``) and the copies that they describe.

The fields were found by varying shapes and encoding: word 0-1 the address; word 2 bits 4-6 rank - 1, 7-10
element type, 11-12 interleave, 13-14 swizzle; words 3-6 strides >> 4 of dimensions 1-4 and word 7 their
bits 32-35; words 8-12 sizes - 1; word 13 bits 24-31 and the bytes of word 14 the box sizes - 1. The other
64 bytes are not read.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from fa4tune.emulator import lanes
from fa4tune.emulator.findings import FaultError
from fa4tune.emulator.lanes import Array
from fa4tune.emulator.memory import SMEM_BASE, UNSIGNED
from fa4tune.emulator.operand import swizzled

#: Element types by code: (bytes, NumPy type or None where only copies are modelled), as in tensormap.replace.
ELEMENT_TYPES: dict[int, tuple[int, str]] = {
    0: (1, "u1"), 1: (2, "u2"), 2: (4, "u4"), 3: (4, "i4"), 4: (8, "u8"), 5: (8, "i8"), 6: (2, "f2"),
    7: (4, "f4"), 8: (4, "f4"), 9: (8, "f8"), 10: (2, "bf16"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A tiled tensor: address, sizes and byte strides (innermost first), box, swizzle in bytes."""

    address: int
    element: str
    nbytes: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int

    @property
    def box_bytes(self) -> int:
        """Bytes that one box occupies in shared memory."""
        out = self.nbytes
        for b in self.box:
            out *= b
        return out


def decode(raw: bytes) -> TensorMap:
    """Decode a tensor map's first 64 bytes; a :class:`FaultError` for one outside of the model."""
    words = struct.unpack("<16I", raw[:64])
    address = words[0] | words[1] << 32
    rank = (words[2] >> 4 & 7) + 1
    code = words[2] >> 7 & 15
    if rank > 5 or code not in ELEMENT_TYPES or address & 15 or not address:
        raise FaultError(
            "descriptor", f"not a tensor map: rank {rank}, element type {code}, address {address:#x}"
        )
    if words[2] >> 11 & 3:
        raise FaultError("descriptor", "a tensor map with interleave, which is not modelled")
    swizzle = (0, 32, 64, 128)[words[2] >> 13 & 3]
    nbytes, element = ELEMENT_TYPES[code]
    strides = [nbytes]
    for i in range(rank - 1):
        strides.append((words[3 + i] | (words[7] >> 4 * i & 15) << 32) << 4)
    sizes = tuple(words[8 + i] + 1 for i in range(rank))
    boxes = [words[13] >> 24, *(words[14] >> 8 * i & 255 for i in range(4))]
    box = tuple(b + 1 for b in boxes[:rank])
    inner = box[0] * nbytes
    if inner % 16:
        raise FaultError("descriptor", f"a box whose rows have {inner} bytes, no multiple of 16")
    if swizzle and inner > swizzle:
        raise FaultError("descriptor", f"a box with rows of {inner} bytes and a swizzle of {swizzle}")
    return TensorMap(address, element, nbytes, sizes, tuple(strides), box, swizzle)


@lru_cache(maxsize=1024)
def _chunk_order(phase: int, chunks: int, swizzle: int) -> Array:
    """Where the 16-byte chunks of a box land, relative to ``start - phase`` (1 KiB period)."""
    at = phase + 16 * np.arange(chunks)
    return swizzled(at, swizzle) >> 4


def _clip(tmap: TensorMap, coordinates: tuple[int, ...]) -> tuple[list[int], list[int]] | None:
    """First index and count per dimension of a box's part inside the tensor; None if empty."""
    first, count = [], []
    for c, b, n in zip(coordinates, tmap.box, tmap.sizes, strict=True):
        low, high = max(c, 0), min(c + b, n)
        if high <= low:
            return None
        first.append(low)
        count.append(high - low)
    return first, count


def rows_inside(tmap: TensorMap, coordinates: tuple[int, ...]) -> tuple[Array, int] | None:
    """Addresses (uint64) and bytes of the rows of a box's part inside the tensor; None if it is empty."""
    clipped = _clip(tmap, coordinates)
    if clipped is None:
        return None
    first, count = clipped
    at = np.array([tmap.address + sum(f * s for f, s in zip(first, tmap.strides, strict=True))], np.uint64)
    for n, stride in zip(count[1:], tmap.strides[1:], strict=True):
        at = (np.arange(n, dtype=np.uint64)[:, None] * np.uint64(stride) + at).ravel()
    return at, count[0] * tmap.nbytes


def _global_box(memory: Any, tmap: TensorMap, first: list[int], count: list[int], write: bool) -> Array:
    """A strided view (outermost dimension first) of a box in global memory."""
    address = tmap.address + sum(f * s for f, s in zip(first, tmap.strides, strict=True))
    extent = tmap.nbytes + sum((n - 1) * s for n, s in zip(count, tmap.strides, strict=True))
    index, offset = memory.find(address, extent, write)
    words = memory.view(index, tmap.nbytes)
    start = offset // tmap.nbytes
    view: Array = np.lib.stride_tricks.as_strided(
        words[start:], shape=tuple(reversed(count)), strides=tuple(reversed(tmap.strides)), writeable=write
    )
    return view


def read_box(memory: Any, tmap: TensorMap, coordinates: tuple[int, ...]) -> Array:
    """A box from global memory (outermost first, unsigned words), zero outside of the tensor."""
    shape = tuple(reversed(tmap.box))
    clipped = _clip(tmap, coordinates)
    if clipped is None:
        return np.zeros(shape, UNSIGNED[tmap.nbytes])
    first, count = clipped
    part = _global_box(memory, tmap, first, count, False)
    if list(tmap.box) == count:
        return np.ascontiguousarray(part)
    out = np.zeros(shape, UNSIGNED[tmap.nbytes])
    out[_inside(tmap, coordinates, first, count)] = part
    return out


def _inside(
    tmap: TensorMap, coordinates: tuple[int, ...], first: list[int], count: list[int]
) -> tuple[slice, ...]:
    return tuple(
        slice(f - c, f - c + n) for f, c, n in reversed(list(zip(first, coordinates, count, strict=True)))
    )


def to_shared(cta: Any, offset: int, tmap: TensorMap, box: Array) -> None:
    """Put a box into shared memory at an offset of the CTA's window, swizzled."""
    nbytes = tmap.box_bytes
    _require_alignment(offset, tmap)
    start = cta.smem.check(offset, nbytes, "a tensor copy")
    chunks = box.reshape(-1).view(np.complex128)
    if tmap.swizzle:
        phase = offset & 1023
        order = _chunk_order(phase, len(chunks), tmap.swizzle)
        cta.smem.chunks[order + ((offset - phase - SMEM_BASE) >> 4)] = chunks
    else:
        cta.smem.chunks[start >> 4 : (start >> 4) + len(chunks)] = chunks
    cta.smem.touch(start, nbytes, cta.machine.tick())


def from_shared(cta: Any, offset: int, tmap: TensorMap) -> Array:
    """A box from shared memory (outermost dimension first, unsigned words)."""
    nbytes = tmap.box_bytes
    _require_alignment(offset, tmap)
    start = cta.smem.check(offset, nbytes, "a tensor copy")
    if tmap.swizzle:
        phase = offset & 1023
        order = _chunk_order(phase, nbytes >> 4, tmap.swizzle)
        chunks = cta.smem.chunks[order + ((offset - phase - SMEM_BASE) >> 4)]
    else:
        chunks = cta.smem.chunks[start >> 4 : (start + nbytes) >> 4].copy()
    box: Array = chunks.view(UNSIGNED[tmap.nbytes]).reshape(tuple(reversed(tmap.box)))
    return box


def _require_alignment(offset: int, tmap: TensorMap) -> None:
    if offset & 127:
        raise FaultError("misaligned", f"a tensor copy at shared offset {offset}, no multiple of 128")


def write_box(
    memory: Any, tmap: TensorMap, coordinates: tuple[int, ...], box: Array, reduction: str | None
) -> int:
    """A box to global memory, what lies outside of the tensor left out; returns the bytes written."""
    clipped = _clip(tmap, coordinates)
    if clipped is None:
        return 0
    first, count = clipped
    view = _global_box(memory, tmap, first, count, True)
    part = box[_inside(tmap, coordinates, first, count)]
    if reduction is None:
        view[...] = part
    else:
        view[...] = reduce_words(view, part, reduction, tmap.element)
    return int(part.size) * tmap.nbytes


def reduce_words(old: Array, new: Array, operation: str, element: str) -> Array:
    """Element-wise reduction of unsigned words that hold ``element``; float sums round to nearest."""

    if element == "bf16":
        result = _combine(lanes.bf16_to_f32(old), lanes.bf16_to_f32(new), operation)
        return lanes.f32_to_bf16(np.ascontiguousarray(result))
    dtype = np.dtype(element)
    if dtype.kind != "f" and operation in ("and", "or", "xor"):
        return _combine(old, new, operation)
    a, b = np.ascontiguousarray(old).view(dtype), np.ascontiguousarray(new).view(dtype)
    wide = np.float32 if dtype == np.dtype("f2") else dtype
    return _combine(a.astype(wide), b.astype(wide), operation).astype(dtype).view(old.dtype)


def _combine(a: Array, b: Array, operation: str) -> Array:
    functions: dict[str, Any] = {
        "add": np.add, "min": np.fmin, "max": np.fmax, "and": np.bitwise_and, "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }  # fmt: skip
    if operation not in functions:
        raise FaultError("unsupported", f"a bulk reduction .{operation}")
    if a.dtype.kind in "ui":
        functions |= {"min": np.minimum, "max": np.maximum}
    result: Array = functions[operation](a, b)
    return result
