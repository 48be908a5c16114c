"""Barriers, tensor memory and registers whose state lies in the structs that the C runtime changes.

They stand in for the plain machine's objects, so that its functions and the scheduler work on them unchanged.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from fa4tune.emulator.barriers import ClusterBarrier, MBarrier, NamedBarrier
from fa4tune.emulator.findings import FaultError
from fa4tune.emulator.lanes import F4, U2, U4, U8, Array
from fa4tune.emulator.native.layout import MAX_BARS, MAX_WAITERS, MBarrierState, NamedBarrierState
from fa4tune.emulator.native.library import library
from fa4tune.emulator.tensor_memory import COLUMNS, LANES, TensorMemory


def field(name: str) -> Any:
    """A property that reads and writes a field of ``self.struct``."""

    def read(self: Any) -> Any:
        return getattr(self.struct, name)

    def write(self: Any, value: Any) -> None:
        setattr(self.struct, name, value)

    return property(read, write)


class Waiters(list[Any]):
    """The warps that wait at a barrier; changes go to its state."""

    def __init__(self, struct: Any, warps: list[Any], capacity: int) -> None:
        self.struct = struct
        self.capacity = capacity
        super().__init__(warps[n] for n in struct.waiters[: struct.waiting])

    def append(self, warp: Any) -> None:
        """One more, at the end."""
        if self.struct.waiting == self.capacity:
            raise FaultError("unsupported", f"more than {self.capacity} warps wait at one barrier")
        super().append(warp)
        self._write()

    def remove(self, warp: Any) -> None:
        """One less."""
        super().remove(warp)
        self._write()

    def _write(self) -> None:
        for i, warp in enumerate(self):
            self.struct.waiters[i] = warp.number
        self.struct.waiting = len(self)


class _Waiting:
    """The ``waiters`` of a barrier; needs ``struct`` and ``cluster``."""

    __slots__ = ()
    struct: Any
    cluster: Any
    capacity = MAX_WAITERS

    @property
    def waiters(self) -> Any:
        """Warps in order of arrival."""
        return Waiters(self.struct, self.cluster.warps, self.capacity)

    @waiters.setter
    def waiters(self, warps: list[Any]) -> None:
        for i, warp in enumerate(warps):
            self.struct.waiters[i] = warp.number
        self.struct.waiting = len(warps)


class NativeMBarrier(_Waiting, MBarrier):
    """An mbarrier of the C runtime."""

    __slots__ = ("cluster", "struct")

    def __init__(self, cta: Any, struct: MBarrierState) -> None:
        self.struct = struct
        self.cta = cta
        self.cluster = cta.cluster

    count = field("count")
    offset = field("offset")
    pending = field("pending")
    phase = field("phase")
    tx = field("tx")


class MBarriers:
    """A CTA's mbarriers by offset."""

    def __init__(self, cta: Any) -> None:
        self.cta = cta
        self.views: dict[int, NativeMBarrier] = {}

    def number(self, number: int) -> NativeMBarrier:
        """The mbarrier with a number."""
        found = self.views.get(number)
        if found is None:
            found = self.views[number] = NativeMBarrier(self.cta, self.cta.bars[number])
        return found

    def get(self, offset: int) -> NativeMBarrier | None:
        """The mbarrier at an offset, or None."""
        index = (offset - 1024) >> 3
        if offset & 7 or not 0 <= index < len(self.cta.bar_index):
            return None
        number = int(self.cta.bar_index[index]) - 1
        return self.number(number) if number >= 0 and self.cta.bars[number].live else None

    def __setitem__(self, offset: int, bar: MBarrier) -> None:
        if library().fa_new_mbarrier(self.cta.address, offset, bar.count) < 0:
            raise FaultError("unsupported", f"more than {MAX_BARS} mbarriers in one CTA")

    def __delitem__(self, offset: int) -> None:
        bar = self.get(offset)
        assert bar is not None
        bar.struct.live = 0

    def values(self) -> Iterator[NativeMBarrier]:
        """All of them."""
        for number in range(self.cta.struct.bar_count):
            if self.cta.bars[number].live:
                yield self.number(number)


class NativeNamedBarrier(_Waiting, NamedBarrier):
    """A named barrier of the C runtime."""

    __slots__ = ("cluster", "struct")

    def __init__(self, cta: Any, number: int, struct: NamedBarrierState) -> None:
        self.struct = struct
        self.cluster = cta.cluster
        self.number = number

    arrived = field("arrived")
    expected = field("expected")
    generation = field("generation")


class NamedBarriers:
    """A CTA's sixteen named barriers."""

    def __init__(self, cta: Any) -> None:
        self.all = [NativeNamedBarrier(cta, i, cta.named_states[i]) for i in range(16)]

    def get(self, number: int) -> NativeNamedBarrier:
        """A barrier by number."""
        self.all[number].struct.used = 1
        return self.all[number]

    def values(self) -> list[NativeNamedBarrier]:
        """Those that were used."""
        return [b for b in self.all if b.struct.used]


class NativeClusterBarrier(_Waiting, ClusterBarrier):
    """The cluster barrier of the C runtime."""

    capacity = 512

    def __init__(self, cluster: Any) -> None:
        self.struct = cluster.struct
        self.cluster = cluster

    arrived = field("arrived")
    expected = field("expected")
    generation = field("generation")


class ReadyQueue:
    """The runnable warps of a cluster, in the C runtime's queue."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster

    def __len__(self) -> int:
        return int(self.cluster.struct.ready_count)

    def __iter__(self) -> Iterator[Any]:
        warps = self.cluster.warps
        return iter([warps[n] for n in self.cluster.struct.ready[: len(self)]])

    def __getitem__(self, index: int) -> Any:
        return self.cluster.warps[self.cluster.struct.ready[index]]

    def append(self, warp: Any) -> None:
        """At the end."""
        library().fa_push_ready(self.cluster.address, warp.number)

    def extend(self, warps: Iterable[Any]) -> None:
        """Several at the end."""
        for warp in warps:
            self.append(warp)

    def popleft(self) -> Any:
        """The first."""
        return self.cluster.warps[library().fa_pop_ready(self.cluster.address)]

    def remove(self, warp: Any) -> None:
        """One from anywhere."""
        rest = [w for w in self if w is not warp]
        self.cluster.struct.ready_count = 0
        self.extend(rest)


class NativeTensorMemory(TensorMemory):
    """Tensor memory whose words and allocation the C runtime sees."""

    @property
    def data(self) -> Array:
        """The words, shape (512 columns, 128 lanes)."""
        if self.words is None:
            self.words = np.full((COLUMNS, LANES), 0xFFFFFFFF, np.uint32)
            self.cta.struct.tmem = self.words.ctypes.data
        return self.words

    def allocate(self, columns: int) -> int | None:
        """First fit; None if the caller must wait."""
        first = super().allocate(columns)
        if first is not None:
            _ = self.data
            for i in range(first // 32, (first + columns) // 32):
                self.cta.struct.tmem_owner[i] = first + 1
        return first

    def free(self, address: int, columns: int) -> None:
        """Give columns back."""
        first = address & 0xFFFF
        super().free(address, columns)
        for i in range(first // 32, (first + columns) // 32):
            self.cta.struct.tmem_owner[i] = 0


_DTYPE = {"h": U2, "u": U4, "f": F4, "q": U8}


class RegisterFile:
    """A warp's registers by number, as arrays over its memory."""

    def __init__(self, memory: Array, offsets: list[int | None], storage: list[str]) -> None:
        self.memory = memory
        self.offsets = offsets
        self.storage = storage

    def __getitem__(self, index: int) -> Array:
        at, kind = self.offsets[index], self.storage[index]
        assert at is not None
        if kind == "x":
            return self.memory[at : at + 256].view(F4).reshape(2, 32)
        if kind == "p":
            return unpack_predicate(int(self.memory[at : at + 4].view(U4)[0]))
        dtype = _DTYPE[kind]
        return self.memory[at : at + 32 * dtype.itemsize].view(dtype)

    def __setitem__(self, index: int, value: Array) -> None:
        self[index][...] = value.view(self[index].dtype)


_BITS = np.uint32(1) << np.arange(32, dtype=np.uint32)


def unpack_predicate(bits: int) -> Array:
    """One bit a lane to 32 booleans."""
    return (np.uint32(bits) & _BITS) != 0


def pack_predicate(lanes: Array) -> int:
    """32 booleans to one bit a lane."""
    return int(np.packbits(lanes, bitorder="little").view(np.uint32)[0])


def address_of(array: Array) -> int:
    """Where an array's memory starts."""
    return int(array.__array_interface__["data"][0])


def aligned(nbytes: int) -> Array:
    """Bytes that start at a cache line."""
    whole = np.empty(nbytes + 64, np.uint8)
    start = -address_of(whole) % 64
    return whole[start : start + nbytes]


def as_array(pointer: Any, count: int) -> Any:
    """A ctypes array at a pointer's target."""
    return ctypes.cast(pointer, ctypes.POINTER(pointer._type_ * count)).contents
