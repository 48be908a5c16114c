"""The checks of a cluster that native code runs: state in the C runtime, findings named here.

What the C runtime performs, it checks itself. The plain back-end's functions, which perform the rest, find
the same methods here as in :class:`~fa4tune.emulator.checks_cluster.ClusterChecks`.
"""

from __future__ import annotations

import ctypes
from ctypes import addressof
from typing import TYPE_CHECKING, Any

import numpy as np

from fa4tune.emulator import checks_words as words
from fa4tune.emulator.checks_cluster import CLOCKS, ClusterChecks, Issued, fence_effects
from fa4tune.emulator.checks_global import Who
from fa4tune.emulator.checks_shadow import Access
from fa4tune.emulator.lanes import Array
from fa4tune.emulator.native import layout
from fa4tune.emulator.native.library import library
from fa4tune.emulator.native.state import address_of
from fa4tune.emulator.tensor_memory import COLUMNS, LANES
from fa4tune.errors import EmulationError

if TYPE_CHECKING:
    from fa4tune.emulator.checks import Checks

_BULK = words.FAMILIES.index("bulk")

#: What the C runtime's accesses are, in the order of its enum; ``{}`` is a CTA.
WORDS = (
    "a write", "a read", "a tensor load", "a tensor store", "operand A of a wgmma", "operand B of a wgmma",
    "a tcgen05.ld", "a tcgen05.st", "operand B of a tcgen05.mma", "operand A of a tcgen05.mma",
    "operand A (in TMEM) of a tcgen05.mma", "the accumulator of a tcgen05.mma", words.A_COMMIT,
    "a live mbarrier", "the use of an mbarrier of CTA {}", "an access to another CTA's shared memory",
    words.GLOBAL_READ, words.GLOBAL_WRITE,
)  # fmt: skip

(
    _CONFLICT, _UNINITIALISED, _INIT_RACE, _BARRIER_FENCE, _REUSE, _EXITED, _UNAWAITED, _UNSET, _ACCUMULATOR,
    _FLYING, _LOADING, _WGMMA_FENCE, _GLOBAL_RACE, _TOO_MANY,
) = range(14)  # fmt: skip

_PLAIN_WORDS = {
    _ACCUMULATOR: words.UNSET_ACCUMULATOR, _FLYING: words.WGMMA_WAIT, _LOADING: words.LOAD_WAIT,
    _WGMMA_FENCE: words.WGMMA_FENCE,
}  # fmt: skip
_OF_BARRIERS = {_INIT_RACE: words.init_race, _BARRIER_FENCE: words.barrier_fence, _REUSE: words.reuse}


def _family(name: str) -> int:
    """The number of a family; ``bulk 3`` is that of lane 3."""
    stem, _, lane = name.partition(" ")
    return _BULK + int(lane) if lane else words.FAMILIES.index(stem)


class NativeAgent:
    """What the checks know about a warp; ``at`` is the number of the call that it makes."""

    __slots__ = ("at", "checks", "warp")

    def __init__(self, checks: NativeClusterChecks, warp: Any) -> None:
        self.checks = checks
        self.warp = warp
        self.at = -1

    @property
    def component(self) -> int:
        """Its component of the clocks."""
        return int(library().fc_component(self.warp.address))

    @property
    def epoch(self) -> int:
        """Its own epoch."""
        return int(library().fc_epoch(self.warp.address))

    @property
    def loading(self) -> int:
        """Registers (bits) that a tcgen05.ld writes, of those that a check asks for."""
        return self._registers(0)

    @loading.setter
    def loading(self, registers: int) -> None:
        self._put_registers(0, registers)

    def _memory(self, which: int) -> Array:
        pointer = library().fc_registers_of(self.warp.address, which)
        count = self.checks.registers.words
        return np.ctypeslib.as_array((ctypes.c_uint64 * count).from_address(pointer))

    def _registers(self, which: int) -> int:
        registers = self.checks.registers
        return registers.unpack(self._memory(which)) if registers.words else 0

    def _put_registers(self, which: int, mask: int) -> None:
        if self.checks.registers.words:
            self._memory(which)[:] = self.checks.registers.pack(mask)


class _Shadow:
    """Stands for the shadow of a CTA's memory; knows the granules that an index means."""

    def __init__(self, checks: NativeClusterChecks, rank: int, tensor: bool, numbers: Array) -> None:
        self.checks = checks
        self.rank = rank
        self.tensor = tensor
        self.numbers = numbers

    def granules(self, index: Any) -> Array:
        """Granule numbers of the C runtime."""
        return np.ascontiguousarray(self.numbers[index], np.int32).ravel()

    def forget(self, index: Any) -> None:
        """The region holds nothing that was written."""
        found = self.granules(index)
        library().fc_forget(self.checks.address, int(self.tensor), self.rank, address_of(found), len(found))


class NativeClusterChecks(ClusterChecks):
    """The checks of one cluster."""

    def __init__(self, checks: Checks, cluster: Any) -> None:
        self.checks = checks
        self.cluster = cluster
        self.machine = cluster.machine
        self.registers = self.machine.native.registers
        cluster.units.random = cluster.random
        self.words: list[str] = self.machine.words
        self.callback = layout.REPORT(self._report)
        self.lib = library()
        self.address = self.lib.fc_new(
            cluster.address, self.callback, self.registers.address, self.machine.globals_address
        )
        assert checks.globals is not None
        self.globals = checks.globals
        self.globals.begin([Who(w.label, w.index) for w in cluster.warps])
        self.size = int(self.lib.fc_size(self.address))
        self.found = layout.Report.from_address(self.address)
        tensor = np.arange(COLUMNS * LANES // 16, dtype=np.int32).reshape(-1, COLUMNS).T
        for cta in cluster.ctas:
            shared = np.arange(-(-cta.smem.nbytes // 16), dtype=np.int32)
            cta.shadow = _Shadow(self, cta.rank, False, shared)
            cta.tmem_shadow = _Shadow(self, cta.rank, True, tensor)
        for warp in cluster.warps:
            warp.agent = NativeAgent(self, warp)

    def close_all(self) -> None:
        """Give the memory back."""
        self.lib.fc_free(self.address)
        self.__dict__.clear()

    # -- findings

    def _report(self) -> None:
        if self.machine.error is not None:
            return  # after a fault native code goes on to the end of its block; the run ended at the fault
        try:
            self._name(self.found)
        except BaseException as error:
            self.machine.error = error
            for warp in self.cluster.warps:
                warp.struct.fault = 1

    def _name(self, r: layout.Report) -> None:
        warp, at = self.cluster.warps[r.warp], self._instruction(r.operation)
        if r.kind == _CONFLICT:
            other, what, against = r.against, self._what(r.what), self._what(r.against.what)
            found = words.conflict(
                what, against, words.FAMILIES[min(other.family, _BULK)], bool(r.flags & 1), bool(r.flags & 2),
                bool(r.tensor),
            )  # fmt: skip
            party = (self.cluster.warps[other.warp], self._instruction(other.operation), against)
            self.checks.report(*found, warp, at, party)
            return
        if r.kind == _GLOBAL_RACE:
            other, against = r.against, self._what(r.against.what)
            found = words.global_race(self._what(r.what), against, bool(r.flags))
            who = self.globals.warps[other.issued][other.warp]
            self.checks.report(*found, warp, at, (who, self._instruction(other.operation), against))
            return
        if r.kind == _TOO_MANY:
            raise EmulationError(
                f"the checks follow up to {self.size} warps, barriers and groups of a cluster"
            )
        if r.kind == _UNINITIALISED:
            found = words.uninitialised(self._what(r.what) if r.flags else None, bool(r.tensor))
        elif r.kind in (_INIT_RACE, _BARRIER_FENCE, _REUSE):
            bar = self.cluster.ctas[r.cta].mbarriers.get(r.barrier)
            name = {_INIT_RACE: words.init_race, _BARRIER_FENCE: words.barrier_fence, _REUSE: words.reuse}[
                r.kind
            ]
            found = name(bar)
        elif r.kind == _EXITED:
            found = words.exited(self._what(r.what), self.cluster.ctas[r.cta])
        elif r.kind == _UNAWAITED:
            cta, family = self.cluster.ctas[r.cta], words.FAMILIES[min(r.by.family, _BULK)]
            found = words.unawaited(self._what(r.what), family, warp.cta is not cta, cta)
        elif r.kind == _UNSET:
            found = words.unset_register(self.machine.program.entry.registers[r.index].name)
        else:
            found = _PLAIN_WORDS[r.kind]
        self.checks.report(*found, warp, at)

    def _what(self, number: int) -> str:
        text = self.words[number & 0xFFFF]
        return text.format(self.cluster.ctas[number >> 16].label) if "{}" in text else text

    def _number_of(self, text: str) -> int:
        if text not in self.words:
            self.words.append(text)
        return self.words.index(text)

    def _instruction(self, number: int) -> Any:
        return self.machine.operation(number).instruction if number >= 0 else None

    def _checked(self) -> None:
        """Raise what a report raised."""
        if self.machine.error is not None:
            self.machine.raise_error()

    # -- clocks

    def own(self, agent: Any, family: str) -> tuple[int, int]:
        """Component of a warp's asynchronous work and the epoch of the group that is open."""
        number = _family(family)
        component = int(self.lib.fc_own_of(agent.warp.address, number))
        self._checked()
        return component, int(self.lib.fc_open_group(agent.warp.address, number))

    def close(self, agent: Any, family: str) -> int:
        """End the open group; its epoch."""
        return int(self.lib.fc_close_of(agent.warp.address, _family(family)))

    def awaited(self, agent: Any, family: str, left: int) -> None:
        """All but the last ``left`` closed groups are complete for this warp."""
        self.lib.fc_awaited_of(agent.warp.address, _family(family), left)

    def fence(self, w: Any, scope: str, modifiers: tuple[str, ...]) -> None:
        """``fence`` of any kind."""
        self.lib.fc_fence(w.address, fence_effects(scope, modifiers))

    def tcgen05_fence(self, w: Any, before: bool) -> None:
        """``tcgen05.fence``."""
        self.lib.fc_tcgen05_fence(w.address, int(before))

    def tcgen05_wait(self, w: Any, family: str) -> None:
        """``tcgen05.wait::ld`` and ``::st``."""
        self.lib.fc_tcgen05_wait(w.address, _family(family))

    def assume_loaded(self, w: Any) -> None:
        """A missing ``tcgen05.wait::ld`` is reported; from here on it counts as if it were there."""
        self.lib.fc_assume_loaded(w.address)

    # -- barriers

    def _on(self, bar: Any) -> tuple[int, int]:
        """Addresses of an mbarrier's CTA and its own."""
        return bar.cta.address, addressof(bar.cta.mbarriers.get(bar.offset).struct)

    def init(self, w: Any, bar: Any) -> None:
        """An mbarrier was initialised."""
        self.lib.fc_init(w.address, w.agent.at, *self._on(bar))
        self._checked()

    def inval(self, w: Any, bar: Any) -> None:
        """An mbarrier was invalidated."""
        self.lib.fc_inval(w.address, w.agent.at, *self._on(bar))

    def sync(self, bar: Any) -> Any:
        """What :meth:`use` takes."""
        return bar

    def use(self, w: Any, bar: Any, clocks: Any) -> None:
        """A warp uses an mbarrier: it must be initialised for it, and its CTA must be there."""
        self.lib.fc_use(w.address, w.agent.at, *self._on(bar))

    def arrive(self, w: Any, bar: Any, semantics: str = "release") -> None:
        """Before a warp's arrival."""
        self.lib.fc_arrive(w.address, w.agent.at, *self._on(bar), int(semantics == "relaxed"))

    def wait(self, w: Any, bar: Any) -> None:
        """A warp's wait succeeded."""
        self.lib.fc_wait(w.address, w.agent.at, *self._on(bar))

    def named_arrive(self, w: Any, bar: Any) -> None:
        """Before a warp's arrival at a named barrier."""
        self.lib.fc_named_arrive(w.address, bar.number, bar.generation)

    def named_wait(self, w: Any, bar: Any, generation: int) -> None:
        """A round is over for a warp."""
        self.lib.fc_named_wait(w.address, bar.number, generation)

    def cluster_arrive(self, w: Any, semantics: str | None) -> None:
        """Before a warp's arrival at the cluster's barrier."""
        self.lib.fc_cluster_arrive(w.address, int(semantics == "relaxed"))

    def cluster_wait(self, w: Any, generation: int) -> None:
        """A round is over for a warp."""
        self.lib.fc_cluster_wait(w.address, generation)

    # -- accesses

    def reach(self, access: Any, cta: Any) -> None:
        """Something uses a CTA's memory: an :class:`Access`, or the number of one."""
        if isinstance(access, Access):
            at: Any = access.instruction
            access = self.lib.fc_record(
                self.address, access.component, access.epoch, _family(access.family), access.warp.number,
                access.issued, at, self._number_of(access.what),
            )  # fmt: skip
        self.lib.fc_reach_number(self.address, access, cta.rank)

    def shared(self, w: Any, cta: Any, offsets: Array, nbytes: int, write: bool) -> None:
        """A warp reads or writes ``nbytes`` of shared memory at each of ``offsets``."""
        lanes = np.ascontiguousarray(offsets, np.int32)
        self.lib.fc_shared(
            w.address, w.agent.at, cta.address, address_of(lanes), len(lanes), nbytes, int(write)
        )

    def atomic(self, w: Any, cta: Any, start: int, nbytes: int) -> None:
        """An atomic on shared memory: ordered with the other atomics there, not compared."""
        what = self._number_of("an atomic on another CTA's shared memory")
        self.lib.fc_atomic(w.address, w.agent.at, cta.address, start, nbytes, what)

    def global_access(self, w: Any, starts: Array, nbytes: int, write: bool, atomic: bool, what: str) -> None:
        """A warp accesses ``nbytes`` of global memory at each of the addresses ``starts``."""
        number = self._number_of(what)
        for region, some in self.globals.by_buffer(starts, nbytes):
            addresses = np.ascontiguousarray(some, np.uint64)
            self.lib.fg_access(
                w.address, w.agent.at, region, address_of(addresses), len(addresses), nbytes, int(write),
                int(atomic), number,
            )  # fmt: skip

    def issued(self, w: Any) -> Issued:
        """The moment of issue of asynchronous work."""
        memory = (ctypes.c_int32 * (CLOCKS * self.size)).from_address(self.lib.fc_clock(w.address))
        clock = np.ctypeslib.as_array(memory).reshape(CLOCKS, self.size).copy()
        return Issued(w, clock, w.agent.epoch, w.agent.at)

    def departed(self, w: Any) -> Issued:
        """The same for work whose end tells what its issuer knew."""
        issue = self.issued(w)
        self.lib.fc_step(w.address)
        return issue

    def _issue(self, issue: Any) -> tuple[int, int, int, int]:
        return issue.warp.address, issue.instruction, issue.epoch, address_of(issue.clock)

    def access(
        self,
        issue: Issued,
        shadow: Any,
        index: Any,
        write: bool,
        place: tuple[int, int, str],
        what: str,
        *,
        ordered: bool = True,
        initialised: bool = True,
    ) -> Any:
        """Asynchronous work uses shared or tensor memory; the number of the access."""
        component, epoch, family = place
        found = shadow.granules(index)
        warp, at, issued, clock = self._issue(issue)
        return self.lib.fc_access_list(
            warp, int(shadow.tensor), shadow.rank, address_of(found), len(found), int(write), at, issued,
            clock, component, epoch, _family(family), self._number_of(what), int(ordered), int(initialised),
        )  # fmt: skip

    def landed(self, issue: Issued, cta: Any, start: int, nbytes: int, bar: Any, what: str) -> None:
        """A copy that an mbarrier tracks writes ``nbytes`` from byte ``start`` of a CTA's memory."""
        self._copy(issue, cta, start, nbytes, bar, what, 0)

    def fetched(self, issue: Issued, cta: Any, start: int, nbytes: int, bar: Any, what: str) -> None:
        """A copy that an mbarrier tracks reads shared memory."""
        self._copy(issue, cta, start, nbytes, bar, what, 1)

    def _copy(self, issue: Issued, cta: Any, start: int, nbytes: int, bar: Any, what: str, kind: int) -> None:
        self.lib.fc_copy_done(
            *self._issue(issue), cta.address, start, nbytes, *self._on(bar), self._number_of(what), kind
        )

    def completed(self, issue: Issued, bar: Any, component: int, epoch: int) -> None:
        """Before an asynchronous unit arrives at an mbarrier for work up to an epoch."""
        self.lib.fc_arrived(*self._issue(issue), *self._on(bar), component, epoch)

    def bulk_read(self, w: Any, lane: int, start: int, nbytes: int, what: str, initialised: bool) -> None:
        """A store that a bulk group of a lane tracks reads shared memory."""
        number = self._number_of(what)
        self.lib.fc_bulk_read(w.address, w.agent.at, lane, start, nbytes, number, int(initialised))
        self._checked()

    def bulk_commit(self, w: Any, lanes: list[int]) -> None:
        """``cp.async.bulk.commit_group``."""
        self.lib.fc_bulk_commit(w.address, sum(1 << lane for lane in lanes))

    def bulk_wait(self, w: Any, lanes: list[int], left: int) -> None:
        """``cp.async.bulk.wait_group``, with or without ``.read``."""
        self.lib.fc_bulk_wait(w.address, sum(1 << lane for lane in lanes), left)

    def copied(self, w: Any, offsets: Array, nbytes: int) -> None:
        """``cp.async`` of some lanes, a write that its group tracks."""
        lanes = np.ascontiguousarray(offsets, np.int32)
        what = self._number_of("a cp.async")
        self.lib.fc_copied(w.address, w.agent.at, address_of(lanes), len(lanes), nbytes, what)
        self._checked()

    def wgmma_registers(self, w: Any, item: Any, register_mask: int, poison: Any) -> None:
        """Registers of a wgmma that a warp issues."""
        self.lib.fc_wgmma_registers(w.address, w.agent.at, int(item.accumulate))

    # -- the end

    def finish(self) -> None:
        """Every warp of the cluster has exited."""
        self.lib.fc_finish(self.address)
        self._checked()
        for cta in self.cluster.ctas:
            for number in range(cta.struct.bar_count):
                state = cta.bars[number]
                if state.live and state.tx:
                    bar = cta.mbarriers.number(number)
                    self.checks.report(*words.bytes_pending(bar), cta.warps[0], None)
