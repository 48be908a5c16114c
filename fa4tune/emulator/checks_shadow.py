"""Shadow memory of the checks: who touched which 16 bytes last, and what of it was ever written.

An access is named by an operation number. Every operation belongs to a component of the vector clocks (a
warp, the stores to TMEM of a warp, an mbarrier with the copies it tracks, ...) and has an epoch on it;
numbers and epochs of one component grow together, so that the newest operation of a region says all about
the older ones. A conflicting access that the current clock does not know is a race, whatever order the
schedule happened to choose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fa4tune.emulator.lanes import Array

if TYPE_CHECKING:
    from fa4tune.emulator.ptx import Instruction

GRANULE = 16
FULL = 0xFFFF

Index = tuple[Any, ...]
"""An index into the granules of a memory: one slice or array a dimension."""


@dataclass(frozen=True, slots=True)
class Access:
    """One operation that touched memory.

    Args:
        component, epoch: its place in the vector clocks.
        family: what kind of component that is: ``warp``, ``wgmma``, ``bulk``, ``load``, ``mma``, ``tmem.ld``,
            ``tmem.st``, ``copy`` or ``barrier``.
        warp: who issued it.
        issued: epoch of that warp when it did.
        instruction: with line, text and source line.
        what: in words.
    """

    component: int
    epoch: int
    family: str
    warp: Any
    issued: int
    instruction: Instruction
    what: str


class Accesses:
    """All operations of a cluster by number; number 0 is none."""

    def __init__(self) -> None:
        self.records: list[Access | None] = [None]
        self.epochs: Array = np.zeros(1024, np.int32)

    def add(self, access: Access) -> int:
        """The number of a new operation."""
        number = len(self.records)
        if number == len(self.epochs):
            self.epochs = np.concatenate([self.epochs, np.zeros_like(self.epochs)])
        self.epochs[number] = access.epoch
        self.records.append(access)
        return number


class _Table:
    """The last operation of each component on each granule, one row a component."""

    __slots__ = ("components", "count", "generic", "last", "rows")

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.last: Array = np.zeros((8, *shape), np.int32)
        self.components: Array = np.zeros(8, np.int32)
        self.generic: Array = np.zeros(8, bool)
        self.rows: dict[int, int] = {}
        self.count = 0

    def row(self, component: int, generic: bool) -> int:
        found = self.rows.get(component)
        if found is None:
            found = self.rows[component] = self.count
            self.count += 1
            if found == len(self.last):
                self.last = np.concatenate([self.last, np.zeros_like(self.last)])
                self.components = np.concatenate([self.components, np.zeros_like(self.components)])
                self.generic = np.concatenate([self.generic, np.zeros_like(self.generic)])
            self.components[found] = component
            self.generic[found] = generic
        return found

    def newest(self, index: Index) -> Array:
        """The newest operation of each row in a region."""
        n = self.count
        out: Array = self.last[(slice(0, n), *index)].reshape(n, -1).max(axis=1)
        return out


Conflict = Callable[[int], None]


class Shadow:
    """Shadow of one memory.

    Args:
        accesses: the operations of the cluster.
        shape: granules along each dimension.
    """

    def __init__(self, accesses: Accesses, shape: tuple[int, ...]) -> None:
        self.accesses = accesses
        self.writes = _Table(shape)
        self.reads = _Table(shape)
        self.valid: Array = np.zeros(shape, np.uint16)
        """Bytes of each granule that were written."""
        self.fine: dict[int, dict[tuple[int, bool], list[tuple[int, int]]]] = {}
        """Accesses to parts of granules: by granule and (component, write), byte masks and numbers."""
        self.has_fine: Array = np.zeros(shape, bool)

    def access(
        self,
        index: Index,
        write: bool,
        number: int,
        known: Array,
        known_generic: Array,
        own: int,
        conflict: Conflict,
    ) -> None:
        """Compare an access to whole granules with all before it, and note it.

        Args:
            known: by component, the epoch that happened before this access.
            known_generic: the same for writes of warps, which an asynchronous access sees through a proxy
                fence.
            own: the component whose operations are ordered before this one by their nature, -1 for none.
            conflict: called with the number of each conflicting operation.
        """
        epochs = self.accesses.epochs
        for table in (self.writes, self.reads) if write else (self.writes,):
            n = table.count
            if not n:
                continue
            newest = table.newest(index)
            components = table.components[:n]
            limit = known[components]
            if table is self.writes and known_generic is not known:
                limit = np.where(table.generic[:n], known_generic[components], limit)
            late = epochs[newest] > limit
            if late.any():
                for row in np.flatnonzero(late):
                    if int(components[row]) != own:
                        conflict(int(newest[row]))
        if self.fine:
            which = np.flatnonzero(self.has_fine[index])
            if len(which):
                granules = np.arange(len(self.has_fine))[index][which]
                for granule in granules.tolist():
                    self._compare_fine(granule, FULL, write, known, known_generic, own, conflict)
        access = self.accesses.records[number]
        assert access is not None
        target = self.writes if write else self.reads
        own_row = target.row(access.component, access.family in ("warp", "copy"))  # may replace target.last
        target.last[(own_row, *index)] = number
        if write:
            self.valid[index] = FULL

    def access_part(
        self,
        granule: int,
        mask: int,
        write: bool,
        number: int,
        known: Array,
        own: int,
        conflict: Conflict,
    ) -> None:
        """The same for some bytes of one granule, by a warp."""
        epochs = self.accesses.epochs
        for table in (self.writes, self.reads) if write else (self.writes,):
            n = table.count
            newest = table.last[:n, granule]
            late = epochs[newest] > known[table.components[:n]]
            for row in np.flatnonzero(late):
                if int(table.components[row]) != own:
                    conflict(int(newest[row]))
        self._compare_fine(granule, mask, write, known, known, own, conflict)
        self.has_fine[granule] = True
        noted = self.fine.setdefault(granule, {}).setdefault((own, write), [])
        noted[:] = [(m, n) for m, n in noted if m & ~mask]
        noted.append((mask, number))
        if write:
            self.valid[granule] |= mask

    def _compare_fine(
        self,
        granule: int,
        mask: int,
        write: bool,
        known: Array,
        known_generic: Array,
        own: int,
        conflict: Conflict,
    ) -> None:
        for (component, written), noted in self.fine.get(granule, {}).items():
            if component == own or not (write or written):
                continue
            limit = known_generic[component] if written else known[component]
            for other, number in noted:
                if other & mask and self.accesses.epochs[number] > limit:
                    conflict(number)

    def forget(self, index: Index) -> None:
        """The region holds nothing that was written (a new allocation)."""
        self.valid[index] = 0

    def initialised(self, index: Index) -> bool:
        """Whether every byte of whole granules was written."""
        return bool((self.valid[index] == FULL).all())


def byte_masks(offsets: Array, nbytes: int) -> tuple[Array, list[tuple[int, int]]]:
    """What lanes cover together: granules in full, and (granule, byte mask) of those in part."""
    if nbytes >= GRANULE and not int(np.bitwise_or.reduce(offsets)) & (GRANULE - 1):
        granules = offsets >> 4
        if nbytes > GRANULE:
            granules = (granules[:, None] + np.arange(nbytes // GRANULE)).ravel()
        return granules, []
    covered: dict[int, int] = {}
    whole = (1 << nbytes) - 1
    for offset in offsets.tolist():
        bits = whole << (offset & 15)
        granule = offset >> 4
        while bits:
            covered[granule] = covered.get(granule, 0) | bits & FULL
            bits >>= 16
            granule += 1
    full = np.array([g for g, m in covered.items() if m == FULL], np.int64)
    return full, [(g, m) for g, m in covered.items() if m != FULL]
