"""Races in global memory: between the warps of a cluster, and between the CTAs of a launch.

Nothing orders CTAs of different clusters but atomics (strong loads and stores count as such). The clusters of
a launch run one after another; whatever a cluster did before its last atomic counts as known to a later one
that executed an atomic itself. Inside a cluster the clocks of the warps decide, as for shared memory. A copy
counts as an access of the warp that issues it, at its issue: its completion is not followed.

Per granule of 16 bytes stand the last write and the last reads of two different warps. An access that is
ordered after the last write is ordered after those before it, or they were reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fa4tune.emulator import checks_words as words
from fa4tune.emulator.checks_shadow import GRANULE, byte_masks
from fa4tune.emulator.lanes import Array

if TYPE_CHECKING:
    from fa4tune.emulator.checks import Checks
    from fa4tune.emulator.launch import BufferRegion
    from fa4tune.emulator.ptx import Instruction


@dataclass(frozen=True, slots=True)
class Who:
    """A warp, also of a cluster that is gone, as findings name it."""

    label: str
    index: int


@dataclass(frozen=True, slots=True)
class GlobalAccess:
    """One operation of a warp on global memory.

    Args:
        cluster: in order of execution, from 0.
        component, epoch: of the warp, in the clocks of its cluster.
        atomic: it is ordered with other atomics.
    """

    cluster: int
    component: int
    epoch: int
    atomic: bool
    who: Who
    instruction: Instruction
    what: str


@dataclass(slots=True)
class _Part:
    mask: int
    number: int
    write: bool


@dataclass(slots=True)
class _Region:
    """Shadow of a buffer: numbers of accesses by granule, 0 for none."""

    first: int  # address of the first granule
    write: Array
    reader: Array
    other: Array
    parts: dict[int, list[_Part]] = field(default_factory=dict)
    in_parts: Array | None = None


def cover(offsets: Array, nbytes: int) -> tuple[Array, list[tuple[int, int]]]:
    """Granules of spans of ``nbytes`` in full, and (granule, byte mask) of those in part."""
    if nbytes < GRANULE or not (int(np.bitwise_or.reduce(offsets)) | nbytes) & (GRANULE - 1):
        return byte_masks(offsets, nbytes)
    full: list[int] = []
    parts: list[tuple[int, int]] = []
    for offset in offsets.tolist():
        whole, rest = byte_masks(np.array([offset]), nbytes)
        full.extend(whole.tolist())
        parts.extend(rest)
    return np.array(full, np.int64), parts


class GlobalChecks:
    """The global memory of a launch."""

    def __init__(self, checks: Checks, buffers: list[BufferRegion]) -> None:
        self.checks = checks
        self.buffers = buffers
        self.starts = [b.address for b in buffers]
        self.regions: dict[int, _Region] = {}
        self.records: list[GlobalAccess | None] = [None]
        self.owners: Array = np.zeros(1024, np.int64)
        self.released: list[int] = []
        self.warps: list[list[Who]] = []
        self.acquired = False
        self.kept: dict[tuple[int, int, int, bool], int] = {}

    def begin(self, warps: list[Who]) -> None:
        """The next cluster runs."""
        self.warps.append(warps)
        self.released.append(0)
        self.acquired = False
        self.kept.clear()

    def by_buffer(self, starts: Array, nbytes: int) -> Iterator[tuple[int, Array]]:
        """The addresses of each buffer that may be written; those that leave it are none of it."""
        numbers = np.searchsorted(np.array(self.starts, np.uint64), starts.astype(np.uint64), "right") - 1
        for number in dict.fromkeys(numbers.tolist()):
            if number < 0 or not self.buffers[number].writable:
                continue
            some = starts[numbers == number]
            end = self.buffers[number].address + self.buffers[number].nbytes
            inside = some[some <= end - nbytes]
            if len(inside):
                yield number, inside

    def access(
        self, w: Any, starts: Array, nbytes: int, write: bool, atomic: bool, what: str, known: Array
    ) -> None:
        """A warp accesses ``nbytes`` at each of the addresses ``starts``.

        Args:
            known: what its clock knows of its cluster.
        """
        for number, some in self.by_buffer(starts, nbytes):
            self._access(w, self._region(number), some, nbytes, write, atomic, what, known)

    def _access(
        self,
        w: Any,
        region: _Region,
        starts: Array,
        nbytes: int,
        write: bool,
        atomic: bool,
        what: str,
        known: Array,
    ) -> None:
        full, parts = cover(starts.astype(np.int64) - region.first, nbytes)
        mine = self._number(w, write, atomic, what)
        conflicts: list[int] = []
        if len(full):
            found = [region.write[full]]
            if write:
                found += [region.reader[full], region.other[full]]
            conflicts += [n for numbers in found for n in _distinct(numbers)]
            if region.in_parts is not None:
                touched = full[region.in_parts[full]]
                conflicts += [p.number for g in touched.tolist() for p in region.parts[g] if write or p.write]
        for granule, mask in parts:
            conflicts.append(int(region.write[granule]))
            if write:
                conflicts += [int(region.reader[granule]), int(region.other[granule])]
            for part in region.parts.get(granule, ()):
                if part.mask & mask and (write or part.write):
                    conflicts.append(part.number)
        for other in conflicts:
            if other and self._unordered(other, mine, known):
                self._report(other, mine)
        if len(full):
            self._note(region, full, mine, write)
        for granule, mask in parts:
            self._note_part(region, granule, _Part(mask, mine, write))
        if atomic:
            self.acquired = True
            self.released[-1] = len(self.records) - 1

    def _region(self, number: int) -> _Region:
        found = self.regions.get(number)
        if found is None:
            buffer = self.buffers[number]
            first = buffer.address & -GRANULE
            count = -(-(buffer.address + buffer.nbytes - first) // GRANULE)
            found = _Region(
                first, np.zeros(count, np.int32), np.zeros(count, np.int32), np.zeros(count, np.int32)
            )
            self.regions[number] = found
        return found

    def _number(self, w: Any, write: bool, atomic: bool, what: str) -> int:
        agent = w.agent
        key = (agent.component, agent.epoch, agent.at.line, write)
        number = self.kept.get(key)
        if number is None:
            number = self.kept[key] = len(self.records)
            cluster = len(self.released) - 1
            self.records.append(
                GlobalAccess(
                    cluster, agent.component, agent.epoch, atomic, Who(w.label, w.index), agent.at, what
                )
            )
            if number == len(self.owners):
                self.owners = np.concatenate([self.owners, np.zeros_like(self.owners)])
            self.owners[number] = cluster << 16 | agent.component
        return number

    def _unordered(self, other: int, mine: int, known: Array) -> bool:
        a, b = self.records[other], self.records[mine]
        assert a is not None
        assert b is not None
        if a.atomic and b.atomic:
            return False
        if a.cluster != b.cluster:
            return not (self.acquired and other <= self.released[a.cluster])
        return a.component != b.component and bool(known[a.component] < a.epoch)

    def _report(self, other: int, mine: int) -> None:
        a, b = self.records[other], self.records[mine]
        assert a is not None
        assert b is not None
        found = words.global_race(b.what, a.what, a.cluster != b.cluster)
        self.checks.report(*found, b.who, b.instruction, (a.who, a.instruction, a.what))

    def _note(self, region: _Region, full: Array, mine: int, write: bool) -> None:
        if write:
            region.write[full] = mine
            region.reader[full] = 0
            region.other[full] = 0
            if region.in_parts is not None:
                for granule in full[region.in_parts[full]].tolist():
                    region.parts[granule].clear()
            return
        before = region.reader[full]
        change = full[self.owners[before] != self.owners[mine]]
        region.other[change] = region.reader[change]
        region.reader[full] = mine

    def _note_part(self, region: _Region, granule: int, new: _Part) -> None:
        if region.in_parts is None:
            region.in_parts = np.zeros(len(region.write), bool)
        region.in_parts[granule] = True
        parts = region.parts.setdefault(granule, [])
        if new.write:
            parts[:] = [p for p in parts if p.mask & ~new.mask]
        else:
            same = [p for p in parts if not p.write and p.mask == new.mask]
            mine = [p for p in same if self.owners[p.number] == self.owners[new.number]]
            gone = mine or (same[:1] if len(same) > 1 else [])
            parts[:] = [p for p in parts if not any(p is g for g in gone)]
        parts.append(new)


def _distinct(numbers: Array) -> list[int]:
    """The different numbers but 0, in order of first appearance."""
    values, first = np.unique(numbers, return_index=True)
    return [int(v) for v in values[np.argsort(first, kind="stable")] if v]
