"""Address spaces: bounded global buffers, shared memory of a CTA, generic windows.

Shared memory starts at offset 1024 of a CTA's window (the first KiB belongs to the system) and an address
holds the CTA's rank in its cluster in bits 24 and up. It is born as NaN bits, so that a read before a write
shows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np

from fa4tune.emulator.codegen import LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW
from fa4tune.emulator.findings import FaultError
from fa4tune.emulator.lanes import Array
from fa4tune.emulator.launch import BufferRegion

SMEM_BASE = 1024
RANK_SHIFT = 24
PAGE_SHIFT = 10  #: shared memory is stamped in pages of 1 KiB, so that converted MMA operands can be kept
POISON = 0xFF

UNSIGNED: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("u2"),
    4: np.dtype("u4"),
    8: np.dtype("u8"),
}
SIGNED: dict[int, np.dtype[Any]] = {
    1: np.dtype("i1"),
    2: np.dtype("i2"),
    4: np.dtype("i4"),
    8: np.dtype("i8"),
}


class GlobalMemory:
    """The launch's buffers. Every access must lie inside one of them."""

    def __init__(self, buffers: Sequence[BufferRegion]) -> None:
        self.regions = sorted(buffers, key=lambda b: b.address)
        self.starts = [b.address for b in self.regions]
        self.views: list[dict[int, Array]] = [{1: b.array} for b in self.regions]

    def find(self, address: int, nbytes: int, write: bool) -> tuple[int, int]:
        """Index of the region that holds the bytes, and their offset; a :class:`FaultError` if none."""
        i = bisect_right(self.starts, address) - 1
        if i >= 0:
            region = self.regions[i]
            offset = address - region.address
            if offset + nbytes <= region.nbytes:
                if write and not region.writable:
                    raise FaultError(
                        "read-only", f"a store of {nbytes} bytes at offset {offset} of {region.name}"
                    )
                return i, offset
            if offset < region.nbytes + (1 << 20):
                raise FaultError(
                    "out-of-bounds",
                    f"global access of {nbytes} bytes at offset {offset} of {region.name}, "
                    f"which has {region.nbytes}",
                )
        raise FaultError(
            "out-of-bounds",
            f"global access of {nbytes} bytes at {address:#x}, which is in no buffer of the launch",
        )

    def view(self, index: int, size: int) -> Array:
        """A region as words of ``size`` bytes; its tail that fills no word is left out."""
        views = self.views[index]
        found = views.get(size)
        if found is None:
            region = self.regions[index]
            if region.address % size:
                raise FaultError(
                    "misaligned", f"{region.name} lies at {region.address:#x}, no multiple of {size}"
                )
            found = region.array[: region.nbytes // size * size].view(UNSIGNED[size])
            views[size] = found
        return found

    def locate(self, addresses: Array, nbytes: int, write: bool) -> list[tuple[int, Array, Any]]:
        """Group lanes by region: (region index, offsets, which of ``addresses``); ``...`` stands for all."""
        low = int(addresses.min())
        high = int(addresses.max())
        index, _ = self.find(low, nbytes, write)
        region = self.regions[index]
        if high + nbytes <= region.address + region.nbytes:
            return [(index, addresses - np.uint64(region.address), ...)]
        groups: dict[int, list[int]] = {}
        for lane, address in enumerate(addresses.tolist()):
            groups.setdefault(self.find(address, nbytes, write)[0], []).append(lane)
        return [
            (i, addresses[which] - np.uint64(self.regions[i].address), np.array(which))
            for i, which in groups.items()
        ]

    def bytes_at(self, address: int, nbytes: int, write: bool = False) -> Array:
        """The bytes themselves (uint8), for copies."""
        index, offset = self.find(address, nbytes, write)
        view: Array = self.regions[index].array[offset : offset + nbytes]
        return view


def require_aligned(addresses: Array, size: int) -> None:
    """Refuse addresses that are no multiple of ``size``, a power of two."""
    if int(np.bitwise_or.reduce(addresses)) & (size - 1):
        bad = next(a for a in addresses.tolist() if a & (size - 1))
        raise FaultError("misaligned", f"an access of {size} bytes at {bad:#x}")


class SharedMemory:
    """One CTA's shared memory of ``nbytes``, at offset :data:`SMEM_BASE`."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        padded = -(-nbytes // 16) * 16
        self.bytes: Array = np.full(padded, POISON, np.uint8)
        self.views = {size: self.bytes.view(dtype) for size, dtype in UNSIGNED.items()}
        self.chunks = self.bytes.view(np.complex128)  # 16 bytes at a time, only ever copied
        self.stamps = np.zeros((padded >> PAGE_SHIFT) + 2, np.int64)

    def check(self, offset: int, nbytes: int, what: str) -> int:
        """Index into :attr:`bytes` of a window offset; a :class:`FaultError` outside of the memory."""
        start = offset - SMEM_BASE
        if start < 0 or start + nbytes > self.nbytes:
            raise FaultError(
                "out-of-bounds",
                f"{what} of {nbytes} bytes at shared offset {offset}: the CTA has {self.nbytes} bytes from "
                f"{SMEM_BASE} on",
            )
        return start

    def touch(self, start: int, nbytes: int, stamp: int) -> None:
        """Note that bytes changed."""
        self.stamps[start >> PAGE_SHIFT : ((start + nbytes - 1) >> PAGE_SHIFT) + 1] = stamp

    def newest(self, start: int, nbytes: int) -> int:
        """The stamp of the last change among bytes."""
        return int(self.stamps[start >> PAGE_SHIFT : ((start + nbytes - 1) >> PAGE_SHIFT) + 1].max())


def window_of(address: int) -> str:
    """The state space that a generic address belongs to."""
    if address < SHARED_WINDOW:
        return "global"
    if address < PARAM_WINDOW:
        return "shared"
    return "param" if address < LOCAL_WINDOW else "local"


__all__ = ["LOCAL_WINDOW", "PARAM_WINDOW", "SHARED_WINDOW"]
