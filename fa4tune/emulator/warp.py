"""A warp: registers, a stack of masks, and the loop that runs blocks until it must wait."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from fa4tune.emulator.cfg import EXIT
from fa4tune.emulator.codegen import REDIRECT, SUSPEND
from fa4tune.emulator.findings import FaultError
from fa4tune.emulator.lanes import U4, U8, Array
from fa4tune.emulator.memory import UNSIGNED

if TYPE_CHECKING:
    from fa4tune.emulator.machine import Cta, Machine

READY, BLOCKED, DONE = 0, 1, 2
LOCAL_BYTES = 1 << 16

REGISTER_POISON = {
    "p": np.zeros(32, bool),
    "h": np.full(32, 0xFFFF, np.uint16),
    "u": np.full(32, 0xFFFFFFFF, np.uint32),
    "f": np.full(32, 0xFFFFFFFF, np.uint32).view(np.float32),
    "q": np.full(32, 0xFFFFFFFFFFFFFFFF, np.uint64),
    "x": np.full((2, 32), 0xFFFFFFFF, np.uint32).view(np.float32),
}


_LANES = np.arange(32, dtype=np.uint32)
_ONE, _TWO = np.uint32(1), np.uint32(2)


def _linear(w: Warp) -> Array:
    """Thread numbers in the CTA."""
    return _LANES + np.uint32(32 * w.index)


def _extent(w: Warp, i: int) -> np.uint32:
    return np.uint32(w.machine.launch.block[i])


#: Special registers: one number for all lanes, or a number a lane.
_SPECIAL: dict[str, Callable[[Any], Any]] = {
    "%tid.x": lambda w: _linear(w) % _extent(w, 0),
    "%tid.y": lambda w: _linear(w) // _extent(w, 0) % _extent(w, 1),
    "%tid.z": lambda w: _linear(w) // (_extent(w, 0) * _extent(w, 1)),
    "%laneid": lambda w: _LANES,
    "%warpid": lambda w: w.index,
    "%nwarpid": lambda w: -(-w.cta.thread_count // 32),
    "%smid": lambda w: w.cta.number % 148,
    "%nsmid": lambda w: 148,
    "%gridid": lambda w: 1,
    "%cluster_ctarank": lambda w: w.cta.rank,
    "%cluster_nctarank": lambda w: w.cluster.size,
    "%is_explicit_cluster": lambda w: np.full(32, w.cluster.size > 1),
    "%lanemask_eq": lambda w: _ONE << _LANES,
    "%lanemask_lt": lambda w: (_ONE << _LANES) - _ONE,
    "%lanemask_le": lambda w: (_TWO << _LANES) - _ONE,
    "%lanemask_gt": lambda w: ~((_TWO << _LANES) - _ONE),
    "%lanemask_ge": lambda w: ~((_ONE << _LANES) - _ONE),
    "%dynamic_smem_size": lambda w: w.machine.launch.smem_bytes,
    "%total_smem_size": lambda w: w.machine.smem_bytes,
    "%clock": lambda w: 0,
    "%clock_hi": lambda w: 0,
    "%globaltimer_lo": lambda w: 0,
    "%globaltimer_hi": lambda w: 0,
}
#: Those with an axis; i is its number.
_SPECIAL_AXIS: dict[str, Callable[[Any, int], int]] = {
    "%ntid": lambda w, i: w.machine.launch.block[i],
    "%ctaid": lambda w, i: w.cta.position[i],
    "%nctaid": lambda w, i: w.machine.launch.grid[i],
    "%clusterid": lambda w, i: w.cta.position[i] // w.machine.cluster_shape[i],
    "%nclusterid": lambda w, i: w.machine.launch.grid[i] // w.machine.cluster_shape[i],
    "%cluster_ctaid": lambda w, i: w.cta.position[i] % w.machine.cluster_shape[i],
    "%cluster_nctaid": lambda w, i: w.machine.cluster_shape[i],
}


class _Specials(dict[str, Array]):
    """A warp's special registers, each computed when it is first read."""

    def __init__(self, warp: Warp) -> None:
        super().__init__()
        self.warp = warp

    def __missing__(self, name: str) -> Array:
        stem, _, axis = name.partition(".")
        if stem in _SPECIAL_AXIS and axis in ("x", "y", "z"):
            value: Any = _SPECIAL_AXIS[stem](self.warp, "xyz".index(axis))
        else:
            value = _SPECIAL[name](self.warp)
        found: Array = value if isinstance(value, np.ndarray) else np.full(32, value, U4)
        self[name] = found
        return found


class BulkGroups:
    """Bulk asynchronous groups of one thread."""

    __slots__ = ("closed", "open")

    def __init__(self) -> None:
        self.open: list[Any] = []
        self.closed: deque[list[Any]] = deque()


class Warp:
    """One warp of a CTA.

    ``mask`` is None while all 32 lanes run together; ``stack`` holds what waits for reconvergence as
    (program counter, where that part meets others, mask).
    """

    width = 32
    agent: Any = None  #: what the checks know about it, in a checked run

    def __init__(self, cta: Cta, index: int) -> None:
        self.cta = cta
        self.cluster = cta.cluster
        self.machine: Machine = cta.machine
        self.index = index
        self.registers: Any = self.new_registers()
        self.pc = 0
        self.join = EXIT
        self.mask: Array | None = None
        self.stack: list[tuple[int, int, Array | None]] = []
        self.alive = np.ones(32, bool)
        self.state = READY
        self.waiting: Any = None
        self.timed_out = False
        self.token: Any = None  # a barrier round this warp has already arrived at
        self.cluster_round = 0
        self.bulk: dict[int, BulkGroups] = {}
        self.copies_open: list[Any] = []
        self.copies: deque[list[Any]] = deque()
        self.mma_open: list[Any] = []
        self.mma_groups: deque[list[Any]] = deque()
        self.tmem_stores: list[Any] = []
        # The assembler chose what a launch allocates and the PTX does not say it: an even share is assumed.
        self.register_count = cta.initial_registers
        self.registers_set = False
        self.local: Array | None = None
        self.visits: dict[tuple[int, bool], list[int]] = {}
        self.bytes: dict[str, int] = {}
        self.events: dict[Any, int] = {}
        self.steps = 0
        self.special = _Specials(self)
        self.threads = min(32, math.prod(self.machine.launch.block) - index * 32)
        if self.threads < 32:
            self.alive = np.arange(32) < self.threads
            self.mask = self.alive.copy()

    def new_registers(self) -> Any:
        """Registers by number, born as NaN bits."""
        return [REGISTER_POISON[k] for k in self.machine.program.storage]

    @property
    def label(self) -> str:
        """Who this is, for reports."""
        role = self.machine.roles.get((self.cta.rank, self.index))
        return f"cta {self.cta.label} warp {self.index}" + (f" ({role})" if role else "")

    def special64(self, name: str) -> Array:
        """A 64-bit special register (the clocks count executed instructions)."""
        if name in ("%clock64", "%globaltimer"):
            return np.full(32, self.machine.steps, U8)
        return self.special[name].astype(U8)

    def symbol(self, name: str, offset: int, wide: bool) -> Array:
        """The address of a shared or local variable."""
        return np.full(32, self.machine.symbol(name, self.cta) + offset, U8 if wide else U4)

    def count_bytes(self, path: str, nbytes: int) -> None:
        """Add to a byte counter."""
        self.bytes[path] = self.bytes.get(path, 0) + nbytes

    def count_event(self, key: Any, n: int = 1) -> None:
        """Add to an event counter."""
        self.events[key] = self.events.get(key, 0) + n

    # -- local memory

    def _local(self) -> Array:
        if self.local is None:
            self.local = np.full((32, LOCAL_BYTES), 0xFF, np.uint8)
        return self.local

    def _local_lanes(self, n: int) -> Array:
        lanes = np.arange(32) if self.mask is None else np.flatnonzero(self.mask)
        if len(lanes) != n:
            raise FaultError("unsupported", "a guarded access to local memory")
        return lanes

    def local_load(self, addresses: Array, size: int, count: int) -> Array:
        """Words of each active lane's own memory, shape (count, lanes)."""
        at = addresses.astype(np.int64)[:, None] + np.arange(size * count)
        data = self._local()[self._local_lanes(len(addresses))[:, None], at]
        return np.ascontiguousarray(np.ascontiguousarray(data).view(UNSIGNED[size]).T)

    def local_store(self, addresses: Array, values: list[Array], size: int) -> None:
        """Words to each active lane's own memory."""
        at = addresses.astype(np.int64)[:, None] + np.arange(size * len(values))
        data = np.ascontiguousarray(np.stack(values, axis=1)).view(np.uint8)
        self._local()[self._local_lanes(len(addresses))[:, None], at] = data

    # -- waiting

    def block(self, on: Any) -> None:
        """Sleep until :meth:`wake`; ``on`` has ``describe()``."""
        self.state = BLOCKED
        self.waiting = on

    def wake(self) -> None:
        """Become runnable."""
        if self.state == BLOCKED:
            self.state = READY
            self.cluster.ready.append(self)

    # -- control flow

    def diverge(self, taken: Array, goal: int, following: int, join: int) -> int:
        """Split the active lanes: ``taken`` runs first, the others and the meeting point are pushed."""
        mask = self.alive if self.mask is None else self.mask
        self.stack.append((join, self.join, self.mask))
        if following != join:
            self.stack.append((following, join, mask & ~taken))
        if goal != join:
            self.pc, self.join, self.mask = goal, join, taken & mask
        else:
            self._pop()
        return REDIRECT

    def _pop(self) -> None:
        while self.stack:
            pc, join, mask = self.stack.pop()
            if not self.alive.all():
                mask = self.alive.copy() if mask is None else mask & self.alive
                if not mask.any():
                    continue
            if pc == EXIT:
                continue
            self.pc, self.join, self.mask = pc, join, mask
            return
        self.state = DONE

    def leave(self, lanes: Array | None, following: int = EXIT) -> int:
        """Lanes exit (all active ones if None); the others go on at ``following``."""
        active = self.alive if self.mask is None else self.mask
        gone = active if lanes is None else lanes & active
        before = int(np.count_nonzero(self.alive))
        self.alive = self.alive & ~gone
        after = int(np.count_nonzero(self.alive))
        self.cluster.threads_left(self, before - after)
        rest = active & ~gone
        if rest.any():
            self.pc, self.mask = following, rest
        else:
            self._pop()
        return REDIRECT

    def run(self, fuel: int) -> None:
        """Run until blocked, done, or ``fuel`` blocks have been executed."""
        compiler = self.machine.compiler
        full, masked, sizes = compiler.full, compiler.masked, compiler.sizes
        counting = self.machine.counting
        steps = 0
        while fuel > 0:
            fuel -= 1
            pc = self.pc
            mask = self.mask
            if mask is None:
                following = full[pc](self)
            else:
                following = masked[pc](self)
            if following == SUSPEND:
                break
            steps += sizes[pc]
            if counting:
                self._visit(pc, mask)
            if following >= 0:
                self.pc = following
                if following == self.join:
                    self._pop()
            elif self.state == DONE:
                break
            while self.state == READY and self.pc == self.join and self.stack:
                self._pop()
        self.steps += steps
        self.machine.steps += steps

    def _visit(self, pc: int, mask: Array | None) -> None:
        key = (pc, mask is None)
        entry = self.visits.get(key)
        if entry is None:
            entry = self.visits[key] = [0, 0]
        entry[0] += 1
        entry[1] += 32 if mask is None else int(np.count_nonzero(mask))
