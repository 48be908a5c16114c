"""Vector clocks of one cluster, and what the machine tells them.

Components are warps and the asynchronous units, as far as something can wait for them: the copies that an
mbarrier tracks (epoch: its phase), the bulk groups of a lane, the wgmma groups, ``tcgen05.ld``s and ``st``s
of a warp, the matrix operations that a warp issues (epoch: its commits). A warp knows four clocks:

- ``KNOWN``: what happened before its next instruction;
- ``PROXIED``: what of it ``fence.proxy.async`` made visible to asynchronous units, on either side of a
  barrier;
- ``LENIENT``: like KNOWN, but as if every barrier had ``tcgen05.fence`` around it, to tell a missing fence
  from a missing wait;
- ``TMEM``: what its TMEM accesses are ordered after: its own waits, and KNOWN at the last ``after`` fence.

A barrier carries the first three from those that arrive to those that wait.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fa4tune.emulator import checks_words as words
from fa4tune.emulator.checks_global import Who
from fa4tune.emulator.checks_shadow import Access, Accesses, Index, Shadow, byte_masks
from fa4tune.emulator.lanes import Array
from fa4tune.emulator.memory import SMEM_BASE
from fa4tune.emulator.tensor_memory import COLUMNS
from fa4tune.errors import EmulationError

if TYPE_CHECKING:
    from fa4tune.emulator.barriers import MBarrier, NamedBarrier
    from fa4tune.emulator.checks import Checks
    from fa4tune.emulator.ptx import Instruction

KNOWN, PROXIED, LENIENT, TMEM = range(4)
CLOCKS = 4
SHARED_CLOCKS = 3  #: of the four, those that barriers carry
TMEM_GROUP = 16  #: lanes of a granule of tensor memory
TENSOR_FAMILIES = ("tmem.ld", "tmem.st", "mma")  #: asynchronous work that tcgen05 fences order
GUARD = 0  #: the component of live mbarriers, known to nobody
GUARD_EPOCH = 1 << 30

OF_BARRIERS, OF_PROXIES, OF_SHARED = 1, 2, 4


def fence_effects(scope: str, modifiers: tuple[str, ...]) -> int:
    """What a ``fence`` is: of mbarrier initialisations, between proxies, of shared memory among them."""
    between = scope.startswith("proxy")
    asynchronous = between and "async" in scope
    return (
        OF_BARRIERS * (asynchronous or scope == "mbarrier_init")
        | OF_PROXIES * between
        | OF_SHARED * (asynchronous and "global" not in modifiers)
    )


@dataclass(slots=True)
class Agent:
    """What the checks know about one warp."""

    warp: Any
    component: int
    clock: Array
    at: Any = None  #: the instruction being executed
    own: dict[str, int] = field(default_factory=dict)  #: components of its asynchronous work
    groups: dict[str, int] = field(default_factory=dict)  #: closed groups of each
    numbers: dict[tuple[int, bool], int] = field(default_factory=dict)
    fenced: Array | None = None  #: what fences made a relaxed arrival carry
    initialised: list[Any] = field(default_factory=list)  #: its mbarriers since the last fence for them
    loading: int = 0  #: registers (bits) that a tcgen05.ld writes
    flying: list[tuple[int, int]] = field(default_factory=list)  #: wgmma groups and their registers
    flying_mask: int = 0
    touched: int = -1  #: registers accessed since the last wgmma.fence

    @property
    def epoch(self) -> int:
        """Its own epoch."""
        return int(self.clock[KNOWN, self.component])

    def step(self) -> None:
        """Later accesses are told apart from earlier ones."""
        self.clock[KNOWN, self.component] += 1
        self.clock[LENIENT, self.component] += 1
        self.numbers.clear()


@dataclass(frozen=True, slots=True)
class Issued:
    """An asynchronous operation at the moment of its issue."""

    warp: Any
    clock: Array
    epoch: int
    instruction: Instruction


class _Clocks:
    """What a barrier carries. ``base`` continues the epochs of an earlier mbarrier at the same place."""

    def __init__(self, size: int, component: int = -1, base: int = 0) -> None:
        self.component = component
        self.base = base
        self.phase = 0
        self.coming: Array = np.zeros((SHARED_CLOCKS, size), np.int32)
        self.done: Array = self.coming.copy()
        self.rounds: dict[int, Array] = {}
        self.init: tuple[int, int] = (0, 0)
        self.fenced = False
        self.uses: Array = np.zeros(size, np.int32)


class ClusterChecks:
    """The checks of one cluster."""

    def __init__(self, checks: Checks, cluster: Any) -> None:
        self.checks = checks
        self.cluster = cluster
        cluster.units.random = cluster.random
        warps = len(cluster.warps)
        self.size = 1 + 7 * warps + 256 * cluster.size
        self.components = 1
        self.tensor: Array = np.zeros(self.size, bool)
        self.accesses = Accesses()
        self.mbarriers: dict[MBarrier, _Clocks] = {}
        self.places: dict[tuple[int, int], _Clocks] = {}
        self.named: dict[tuple[int, int], _Clocks] = {}
        self.whole = _Clocks(self.size)
        self.outstanding: dict[tuple[int, int], tuple[Access, Any]] = {}
        for cta in cluster.ctas:
            cta.shadow = Shadow(self.accesses, (-(-cta.smem.nbytes // 16),))
            cta.tmem_shadow = Shadow(self.accesses, (COLUMNS, 128 // TMEM_GROUP))
        assert checks.globals is not None
        checks.globals.begin([Who(w.label, w.index) for w in cluster.warps])
        for warp in cluster.warps:
            clock = np.zeros((4, self.size), np.int32)
            warp.agent = Agent(warp, self.component(), clock)
            warp.agent.step()

    def component(self) -> int:
        """A new component of the clocks."""
        number = self.components
        if number == self.size:
            raise EmulationError(words.too_many(self.size))
        self.components += 1
        return number

    # -- findings

    def report(self, kind: str, message: str, warp: Any, other: Access | None = None) -> None:
        """A finding at the instruction that a warp executes."""
        party = None if other is None else (other.warp, other.instruction, other.what)
        self.checks.report(kind, message, warp, warp.agent.at, party)

    def _conflict(self, number: int, by: Access, clock: Array, tensor: bool) -> None:
        """Name a conflict with an earlier access that ``by`` is not ordered after."""
        other = self.accesses.records[number]
        assert other is not None
        known = clock[LENIENT]
        kind, text = words.conflict(
            by.what, other.what, other.family, bool(known[other.component] >= other.epoch),
            bool(known[other.warp.agent.component] >= other.issued), tensor,
        )  # fmt: skip
        self.checks.report(kind, text, by.warp, by.instruction, (other.warp, other.instruction, other.what))

    # -- clocks

    def own(self, agent: Agent, family: str) -> tuple[int, int]:
        """Component of a warp's asynchronous work and the epoch of the group that is open."""
        found = agent.own.get(family)
        if found is None:
            found = agent.own[family] = self.component()
            agent.groups[family] = 0
            if family in TENSOR_FAMILIES:
                self.tensor[found] = True
        return found, agent.groups[family] + 1

    def close(self, agent: Agent, family: str) -> int:
        """End the open group; its epoch."""
        _, epoch = self.own(agent, family)
        agent.groups[family] = epoch
        return epoch

    def awaited(self, agent: Agent, family: str, left: int) -> None:
        """All but the last ``left`` closed groups are complete for this warp."""
        component = agent.own.get(family)
        if component is not None:
            epoch = agent.groups[family] - left
            for row in (KNOWN, LENIENT):
                agent.clock[row, component] = max(int(agent.clock[row, component]), epoch)

    def release(self, agent: Agent, clocks: _Clocks, semantics: str = "release") -> None:
        """A warp arrives."""
        source = agent.clock[:SHARED_CLOCKS]
        if semantics == "relaxed":
            if agent.fenced is None:
                return
            source = agent.fenced
        np.maximum(clocks.coming, source, out=clocks.coming)
        agent.step()

    def acquire(self, agent: Agent, done: Array) -> None:
        """A warp's wait succeeded."""
        mine = agent.clock[:SHARED_CLOCKS]
        np.maximum(mine, done, out=mine)

    def fence(self, w: Any, scope: str, modifiers: tuple[str, ...]) -> None:
        """``fence`` of any kind."""
        agent = w.agent
        effects = fence_effects(scope, modifiers)
        if effects & OF_BARRIERS:
            for clocks in agent.initialised:
                clocks.fenced = True
            agent.initialised.clear()
        if effects & OF_PROXIES:
            if effects & OF_SHARED:
                np.maximum(agent.clock[PROXIED], agent.clock[KNOWN], out=agent.clock[PROXIED])
                agent.step()
            return
        agent.fenced = agent.clock[:SHARED_CLOCKS].copy()
        agent.step()

    def tcgen05_fence(self, w: Any, before: bool) -> None:
        """``tcgen05.fence``."""
        agent = w.agent
        clock = agent.clock
        if not before:
            np.maximum(clock[TMEM], clock[KNOWN], out=clock[TMEM])
            return
        for family in ("tmem.ld", "tmem.st"):
            component = agent.own.get(family)
            if component is not None:
                clock[KNOWN, component] = clock[LENIENT, component]
        # a relaxed arrival that follows orders them, and nothing else (PTX ISA, tcgen05 memory consistency)
        ordered = np.where(self.tensor, clock[:SHARED_CLOCKS], 0)
        agent.fenced = ordered if agent.fenced is None else np.maximum(agent.fenced, ordered)

    def tcgen05_wait(self, w: Any, family: str) -> None:
        """``tcgen05.wait::ld`` and ``::st``."""
        agent = w.agent
        epoch = self.close(agent, family)
        component = agent.own[family]
        agent.clock[LENIENT, component] = epoch
        agent.clock[TMEM, component] = epoch
        if family == "tmem.ld":
            agent.loading = 0

    # -- mbarriers

    def init(self, w: Any, bar: MBarrier) -> None:
        """An mbarrier was initialised."""
        agent = w.agent
        place = (bar.cta.number, bar.offset)
        old = self.places.get(place)
        self._write_barrier(w, bar, live=False)
        if old is None:
            clocks = _Clocks(self.size, self.component())
        else:
            self._require_unused(w, bar, old)
            clocks = _Clocks(self.size, old.component, old.base + old.phase + 1)
        self.places[place] = self.mbarriers[bar] = clocks
        clocks.init = (agent.component, agent.epoch)
        agent.initialised.append(clocks)
        self._write_barrier(w, bar, live=True)

    def inval(self, w: Any, bar: MBarrier) -> None:
        """An mbarrier was invalidated."""
        self._require_unused(w, bar, self.mbarriers[bar])
        self._write_barrier(w, bar, live=False)

    def _require_unused(self, w: Any, bar: MBarrier, clocks: _Clocks) -> None:
        if (clocks.uses > w.agent.clock[KNOWN]).any():
            self.report(*words.reuse(bar), w)

    def _write_barrier(self, w: Any, bar: MBarrier, live: bool) -> None:
        shadow: Shadow = bar.cta.shadow
        offset = bar.offset - SMEM_BASE
        granule, mask = offset >> 4, 0xFF << (offset & 8)
        if live:
            number = self.accesses.add(
                Access(GUARD, GUARD_EPOCH, "barrier", w, w.agent.epoch, w.agent.at, "a live mbarrier")
            )
            shadow.has_fine[granule] = True
            shadow.fine.setdefault(granule, {}).setdefault((GUARD, True), []).append((mask, number))
            return
        guards = shadow.fine.get(granule, {}).get((GUARD, True))
        if guards is not None:
            guards[:] = [(m, n) for m, n in guards if m & ~mask]
        self.shared(w, bar.cta, np.array([offset]), 8, True)

    def sync(self, bar: MBarrier) -> _Clocks:
        """The clocks of an mbarrier, its phase brought up to date before anybody else arrives."""
        clocks = self.mbarriers[bar]
        if clocks.phase != bar.phase:
            clocks.phase = bar.phase
            clocks.done = clocks.coming.copy()
        return clocks

    def use(self, w: Any, bar: MBarrier, clocks: _Clocks) -> None:
        """A warp uses an mbarrier: it must be initialised for it, and its CTA must be there."""
        agent = w.agent
        component, epoch = clocks.init
        if agent.clock[KNOWN, component] < epoch and component != agent.component:
            self.report(*words.init_race(bar), w)
        clocks.uses[agent.component] = agent.epoch
        if bar.cta is not w.cta:
            self._require_fence(bar, clocks, w, agent.at)
            self.touch(agent, bar.cta, f"the use of an mbarrier of CTA {bar.cta.label}")

    def arrive(self, w: Any, bar: MBarrier, semantics: str = "release") -> None:
        """Before a warp's arrival."""
        clocks = self.sync(bar)
        self.use(w, bar, clocks)
        self.release(w.agent, clocks, semantics)

    def wait(self, w: Any, bar: MBarrier) -> None:
        """A warp's wait succeeded."""
        clocks = self.sync(bar)
        self.use(w, bar, clocks)
        self.acquire(w.agent, clocks.done)

    # -- named barriers and the cluster's

    def _round(self, clocks: _Clocks, generation: int) -> None:
        if clocks.phase != generation:
            clocks.rounds[clocks.phase] = clocks.coming.copy()
            clocks.rounds.pop(clocks.phase - 8, None)
            clocks.coming[:] = 0
            clocks.phase = generation

    def _named(self, w: Any, bar: NamedBarrier) -> _Clocks:
        key = (w.cta.number, bar.number)
        clocks = self.named.get(key)
        if clocks is None:
            clocks = self.named[key] = _Clocks(self.size)
        self._round(clocks, bar.generation)
        return clocks

    def named_arrive(self, w: Any, bar: NamedBarrier) -> None:
        """Before a warp's arrival at a named barrier."""
        self.release(w.agent, self._named(w, bar))

    def named_wait(self, w: Any, bar: NamedBarrier, generation: int) -> None:
        """A round is over for a warp."""
        self.acquire(w.agent, self._named(w, bar).rounds[generation])

    def cluster_arrive(self, w: Any, semantics: str | None) -> None:
        """Before a warp's arrival at the cluster's barrier."""
        self._round(self.whole, self.cluster.barrier.generation)
        self.release(w.agent, self.whole, semantics or "release")

    def cluster_wait(self, w: Any, generation: int) -> None:
        """A round is over for a warp."""
        self._round(self.whole, self.cluster.barrier.generation)
        self.acquire(w.agent, self.whole.rounds[generation])

    # -- accesses

    def touch(self, agent: Agent, cta: Any, what: str) -> None:
        """A warp itself reaches into another CTA."""
        access = Access(agent.component, agent.epoch, "warp", agent.warp, agent.epoch, agent.at, what)
        self.reach(access, cta)

    def reach(self, access: Access, cta: Any) -> None:
        """Something uses a CTA's memory: it must be over before that CTA exits."""
        self.outstanding[access.component, cta.rank] = (access, cta)
        if all(w.state == 2 for w in cta.warps):
            self.checks.report(*words.exited(access.what, cta), access.warp, access.instruction)

    def _number(self, agent: Agent, write: bool) -> int:
        """The operation of a warp's own access at the current instruction and epoch."""
        key = (agent.at.line, write)
        number = agent.numbers.get(key)
        if number is None:
            what = "a write" if write else "a read"
            number = agent.numbers[key] = self.accesses.add(
                Access(agent.component, agent.epoch, "warp", agent.warp, agent.epoch, agent.at, what)
            )
        return number

    def shared(self, w: Any, cta: Any, offsets: Array, nbytes: int, write: bool) -> None:
        """A warp reads or writes ``nbytes`` of shared memory at each of ``offsets``."""
        agent = w.agent
        shadow: Shadow = cta.shadow
        number = self._number(agent, write)
        access = self.accesses.records[number]
        assert access is not None
        full, parts = byte_masks(offsets, nbytes)
        clock = agent.clock
        known = clock[KNOWN]

        def conflict(other: int) -> None:
            self._conflict(other, access, clock, False)

        if not write:
            missing = len(full) and not shadow.initialised((full,))
            if missing or any(int(shadow.valid[g]) & m != m for g, m in parts):
                self.report(*words.uninitialised(None, False), w)
        if len(full):
            shadow.access((full,), write, number, known, known, agent.component, conflict)
        for granule, mask in parts:
            shadow.access_part(granule, mask, write, number, known, agent.component, conflict)
        if cta is not w.cta:
            self.touch(agent, cta, "an access to another CTA's shared memory")

    def atomic(self, w: Any, cta: Any, start: int, nbytes: int) -> None:
        """An atomic on shared memory: ordered with the other atomics there, not compared."""
        for byte in range(start, start + nbytes):
            cta.shadow.valid[byte >> 4] |= 1 << (byte & 15)
        if cta is not w.cta:
            self.touch(w.agent, cta, "an atomic on another CTA's shared memory")

    def global_access(self, w: Any, starts: Array, nbytes: int, write: bool, atomic: bool, what: str) -> None:
        """A warp accesses ``nbytes`` of global memory at each of the addresses ``starts``."""
        assert self.checks.globals is not None
        self.checks.globals.access(w, starts, nbytes, write, atomic, what, w.agent.clock[KNOWN])

    def issued(self, w: Any) -> Issued:
        """The moment of issue of asynchronous work."""
        agent = w.agent
        return Issued(w, agent.clock.copy(), agent.epoch, agent.at)

    def departed(self, w: Any) -> Issued:
        """The same for work whose end tells what its issuer knew; what it does next is not part of it."""
        issue = self.issued(w)
        w.agent.step()
        return issue

    def access(
        self,
        issue: Issued,
        shadow: Shadow,
        index: Index,
        write: bool,
        place: tuple[int, int, str],
        what: str,
        *,
        ordered: bool = True,
        initialised: bool = True,
    ) -> Access:
        """Asynchronous work uses shared or tensor memory.

        Args:
            place: component, epoch and family of the work.
            ordered: works of that component do not overtake each other.
            initialised: whether a read needs written memory.
        """
        component, epoch, family = place
        access = Access(component, epoch, family, issue.warp, issue.epoch, issue.instruction, what)
        number = self.accesses.add(access)
        clock = issue.clock
        tensor = shadow.valid.ndim == 2
        known = clock[TMEM] if tensor else clock[KNOWN]
        generic = clock[LENIENT] if tensor else clock[PROXIED]

        def conflict(other: int) -> None:
            self._conflict(other, access, clock, tensor)

        if not write and initialised and not shadow.initialised(index):
            self.checks.report(*words.uninitialised(what, tensor), issue.warp, issue.instruction)
        shadow.access(index, write, number, known, generic, component if ordered else -1, conflict)
        return access

    def landed(self, issue: Issued, cta: Any, start: int, nbytes: int, bar: MBarrier, what: str) -> None:
        """A copy that an mbarrier tracks writes ``nbytes`` from byte ``start`` of a CTA's memory."""
        clocks = self._tracked(issue, bar)
        place = (clocks.component, clocks.base + bar.phase + 1, "load")
        if (start | nbytes) & 15:
            access = Access(*place, issue.warp, issue.epoch, issue.instruction, what)
            number = self.accesses.add(access)
            _, parts = byte_masks(np.array([start]), nbytes)
            for granule, mask in parts:
                cta.shadow.access_part(
                    granule, mask, True, number, issue.clock[KNOWN], clocks.component,
                    lambda other: self._conflict(other, access, issue.clock, False),
                )  # fmt: skip
        else:
            index = (slice(start >> 4, (start + nbytes) >> 4),)
            access = self.access(issue, cta.shadow, index, True, place, what, ordered=False)
        self.reach(access, cta)

    def fetched(self, issue: Issued, cta: Any, start: int, nbytes: int, bar: MBarrier, what: str) -> None:
        """A copy that an mbarrier tracks reads shared memory."""
        clocks = self._tracked(issue, bar)
        place = (clocks.component, clocks.base + bar.phase + 1, "load")
        index = (slice(start >> 4, (start + nbytes) >> 4),)
        self.reach(self.access(issue, cta.shadow, index, False, place, what, ordered=False), cta)

    def _tracked(self, issue: Issued, bar: MBarrier) -> _Clocks:
        """Note that a copy's end is part of an mbarrier's current phase."""
        clocks = self.sync(bar)
        epoch = clocks.base + bar.phase + 1
        component, init = clocks.init
        if issue.clock[KNOWN, component] < init and component != issue.warp.agent.component:
            self.checks.report(*words.init_race(bar), issue.warp, issue.instruction)
        self._require_fence(bar, clocks, issue.warp, issue.instruction)
        np.maximum(clocks.coming, issue.clock[:SHARED_CLOCKS], out=clocks.coming)
        clocks.coming[:, clocks.component] = epoch
        clocks.uses[clocks.component] = epoch
        return clocks

    def _require_fence(self, bar: MBarrier, clocks: _Clocks, warp: Any, instruction: Instruction) -> None:
        if not clocks.fenced:
            self.checks.report(*words.barrier_fence(bar), warp, instruction)

    def completed(self, issue: Issued, bar: MBarrier, component: int, epoch: int) -> None:
        """Before an asynchronous unit arrives at an mbarrier for work up to an epoch."""
        clocks = self.sync(bar)
        self._tracked(issue, bar)
        np.maximum(clocks.coming[:, component], epoch, out=clocks.coming[:, component])

    def bulk_read(self, w: Any, lane: int, start: int, nbytes: int, what: str, initialised: bool) -> None:
        """A store that a bulk group of a lane tracks reads shared memory."""
        component, epoch = self.own(w.agent, f"bulk {lane}")
        index = (slice(start >> 4, (start + nbytes) >> 4),)
        place = (component, epoch, "bulk")
        access = self.access(self.issued(w), w.cta.shadow, index, False, place, what, initialised=initialised)
        self.reach(access, w.cta)

    def bulk_commit(self, w: Any, lanes: list[int]) -> None:
        """``cp.async.bulk.commit_group``."""
        for lane in lanes:
            if f"bulk {lane}" in w.agent.own:
                self.close(w.agent, f"bulk {lane}")

    def bulk_wait(self, w: Any, lanes: list[int], left: int) -> None:
        """``cp.async.bulk.wait_group``, with or without ``.read``."""
        for lane in lanes:
            self.awaited(w.agent, f"bulk {lane}", left)

    def copied(self, w: Any, offsets: Array, nbytes: int) -> None:
        """``cp.async`` of some lanes, a write that its group tracks."""
        agent = w.agent
        component, epoch = self.own(agent, "copy")
        access = Access(component, epoch, "copy", w, agent.epoch, agent.at, "a cp.async")
        number = self.accesses.add(access)
        full, parts = byte_masks(offsets, nbytes)
        clock = agent.clock.copy()

        def conflict(other: int) -> None:
            self._conflict(other, access, clock, False)

        known = clock[KNOWN]
        if len(full):
            w.cta.shadow.access((full,), True, number, known, known, component, conflict)
        for granule, mask in parts:
            w.cta.shadow.access_part(granule, mask, True, number, known, component, conflict)

    def wgmma_registers(self, w: Any, item: Any, register_mask: int, poison: Any) -> None:
        """Registers of a wgmma that a warp issues."""
        from fa4tune.emulator.checks_tensor import wgmma_registers

        wgmma_registers(self, w, item, register_mask, poison)

    def assume_loaded(self, w: Any) -> None:
        """A missing ``tcgen05.wait::ld`` is reported; from here on it counts as if it were there."""
        self.tcgen05_wait(w, "tmem.ld")
        agent = w.agent
        agent.clock[KNOWN, agent.own["tmem.ld"]] = agent.groups["tmem.ld"]

    # -- the end

    def finish(self) -> None:
        """Every warp of the cluster has exited."""
        for access, cta in self.outstanding.values():
            exit_clock = max(int(w.agent.clock[LENIENT, access.component]) for w in cta.warps)
            if any(w.agent.component == access.component for w in cta.warps):
                continue
            if exit_clock >= access.epoch:
                continue
            found = words.unawaited(access.what, access.family, access.warp.cta is not cta, cta)
            self.checks.report(*found, access.warp, access.instruction)
        for bar in self.mbarriers:
            if bar.tx and bar.cta.mbarriers.get(bar.offset) is bar:
                self.checks.report(*words.bytes_pending(bar), bar.cta.warps[0], None)
