"""Barriers, fences, warp-wide operations and scheduling for the NumPy back-end."""

from __future__ import annotations

from typing import Any

import numpy as np

from fa4tune.emulator.barriers import MBarrier, NamedBarrier, TraceEvent
from fa4tune.emulator.codegen import SHARED_WINDOW, RuntimeFunction, runtime
from fa4tune.emulator.findings import FaultError
from fa4tune.emulator.isa import Operation
from fa4tune.emulator.lanes import F4, U4, U8, Array
from fa4tune.emulator.memory import RANK_SHIFT

_TRUE = np.ones(32, bool)
_FALSE = np.zeros(32, bool)
_LANES = np.arange(32, dtype=np.int64)
_BITS = np.uint32(1) << np.arange(32, dtype=np.uint32)
OFFSET_MASK = (1 << RANK_SHIFT) - 1


def active_list(m: Array | None) -> list[int]:
    """Numbers of the active lanes."""
    return list(range(32)) if m is None else np.flatnonzero(m).tolist()


def first_lane(m: Array | None) -> int:
    """The first active lane."""
    return 0 if m is None else int(m.argmax())


def uniform(m: Array | None, a: Array, what: str) -> int:
    """The value that all active lanes agree on."""
    live = a if m is None else a[m]
    first = live[0]
    if (live != first).any():
        raise FaultError("not-uniform", f"{what} differs between the lanes of a warp")
    return int(first)


def window_offset(a: Array, offset: int) -> Array:
    """Shared::cluster addresses (int64) from 32-bit shared or 64-bit generic ones."""
    if a.dtype == U8:
        return (a - np.uint64(SHARED_WINDOW)).astype(np.int64) + offset
    return a.astype(np.int64) + offset


def note(w: Any, kind: str, bar: MBarrier, phase: int, amount: int = 0, warp: int | None = None) -> None:
    """Append an mbarrier event to the trace."""
    if w.machine.trace is not None:
        number = w.index if warp is None else warp
        w.machine.trace.append(
            TraceEvent(kind, w.cta.number, number, "mbarrier", bar.cta.number, bar.offset, phase, amount)
        )


@runtime("mbarrier.init")
def _init(operation: Operation) -> RuntimeFunction:
    offset = operation.attrs["offset"]

    def init(w: Any, m: Array | None, base: Array, count: Array) -> None:
        addresses = window_offset(base, offset)
        for lane in active_list(m):
            at = int(addresses[lane])
            if at & 7:
                raise FaultError("misaligned", f"mbarrier.init at {at:#x}, no multiple of 8")
            cta = w.cluster.cta(at >> RANK_SHIFT)
            if cta is not w.cta:
                raise FaultError("mbarrier", "mbarrier.init on another CTA's shared memory")
            where = at & OFFSET_MASK
            cta.smem.check(where, 8, "mbarrier.init")
            old = cta.mbarriers.get(where)
            if old is not None and (old.waiters or old.pending != old.count or old.tx):
                raise FaultError("mbarrier-reuse", f"initialised again while in use ({old.describe()})")
            bar = cta.mbarriers[where] = MBarrier(cta, where, int(count[lane]))
            if w.cluster.checks is not None:
                w.cluster.checks.init(w, bar)
            note(w, "init", bar, 0, bar.count)
        w.machine.progress += 1

    return init


@runtime("mbarrier.inval")
def _inval(operation: Operation) -> RuntimeFunction:
    offset = operation.attrs["offset"]

    def inval(w: Any, m: Array | None, base: Array) -> None:
        for lane in active_list(m):
            bar = w.cluster.mbarrier(int(window_offset(base, offset)[lane]))
            if w.cluster.checks is not None:
                w.cluster.checks.inval(w, bar)
            del bar.cta.mbarriers[bar.offset]

    return inval


def barrier_groups(w: Any, m: Array | None, base: Array, offset: int) -> list[tuple[MBarrier, list[int]]]:
    """The mbarriers that active lanes address, each with its lanes."""
    lanes = active_list(m)
    addresses = window_offset(base, offset)
    first = int(addresses[lanes[0]])
    if len(lanes) == 1 or not (addresses[lanes] != first).any():
        return [(w.cluster.mbarrier(first), lanes)]
    groups: dict[int, list[int]] = {}
    for lane in lanes:
        groups.setdefault(int(addresses[lane]), []).append(lane)
    return [(w.cluster.mbarrier(a), which) for a, which in groups.items()]


@runtime("mbarrier.arrive")
def _arrive(operation: Operation) -> RuntimeFunction:
    attrs = operation.attrs
    offset, expect, drop, counted = (attrs[k] for k in ("offset", "expect", "drop", "counted"))
    semantics = attrs["semantics"]

    def arrive(w: Any, m: Array | None, base: Array, *extra: Array) -> Any:
        state = np.zeros(32, U8)
        for bar, lanes in barrier_groups(w, m, base, offset):
            phase = bar.phase
            state[lanes] = phase
            n = len(lanes)
            if w.cluster.checks is not None:
                w.cluster.checks.arrive(w, bar, semantics)
            if expect:
                amount = int(extra[0][lanes].astype(np.int64).sum())
                note(w, "expect_tx", bar, phase, amount)
                bar.tx += amount  # the arrival below checks for the end of the phase
            elif counted:
                n = int(extra[0][lanes].astype(np.int64).sum())
            note(w, "arrive", bar, phase, n)
            bar.arrive(n, drop)
        w.machine.progress += 1
        return state

    return arrive


@runtime("mbarrier.expect_tx", "mbarrier.complete_tx")
def _tx(operation: Operation) -> RuntimeFunction:
    offset = operation.attrs["offset"]
    expect = operation.op.endswith("expect_tx")

    def tx(w: Any, m: Array | None, base: Array, amount: Array) -> None:
        for bar, lanes in barrier_groups(w, m, base, offset):
            n = int(amount[lanes].astype(np.int64).sum())
            if w.cluster.checks is not None:
                w.cluster.checks.use(w, bar, w.cluster.checks.sync(bar))
            note(w, "expect_tx" if expect else "complete_tx", bar, bar.phase, n)
            (bar.expect if expect else bar.complete)(n)
        w.machine.progress += 1

    return tx


@runtime("mbarrier.wait")
def _wait(operation: Operation) -> RuntimeFunction:
    offset, parity, blocking = (operation.attrs[k] for k in ("offset", "parity", "blocking"))

    def wait(w: Any, m: Array | None, base: Array, value: Array) -> Array | None:
        groups = barrier_groups(w, m, base, offset)
        out = _FALSE if len(groups) == 1 else np.zeros(32, bool)
        for bar, lanes in groups:
            wanted = int(value[lanes[0]])
            done = (bar.phase & 1) != (wanted & 1) if parity else bar.phase != wanted
            if not done:
                if blocking and not w.timed_out and not w.cluster.gives_up():
                    bar.waiters.append(w)
                    w.block(bar)
                    return None
                continue
            if w.cluster.checks is not None:
                w.cluster.checks.wait(w, bar)
            note(w, "wait", bar, bar.phase - 1)
            if len(groups) == 1:
                out = _TRUE
            else:
                out[lanes] = True
        w.timed_out = False
        return out

    return wait


# -- named and cluster barriers


def _named(w: Any, m: Array | None, number: Array, count: Array | None) -> tuple[NamedBarrier, int]:
    index = uniform(m, number, "a barrier's number")
    if not 0 <= index < 16:
        raise FaultError("barrier", f"barrier number {index} is not in 0..15")
    bar = w.cta.named.get(index)
    if bar is None:
        bar = w.cta.named[index] = NamedBarrier(index)
    expected = w.cta.thread_count if count is None else uniform(m, count, "a barrier's thread count")
    return bar, -(-expected // 32) * 32 if count is None else expected


def _note_named(w: Any, kind: str, bar: NamedBarrier, phase: int, amount: int) -> None:
    if w.machine.trace is not None:
        w.machine.trace.append(
            TraceEvent(kind, w.cta.number, w.index, "named", w.cta.number, bar.number, phase, amount)
        )


@runtime("barrier.sync")
def _sync(operation: Operation) -> RuntimeFunction:
    def sync(w: Any, m: Array | None, number: Array, count: Array | None = None) -> Any:
        bar, expected = _named(w, m, number, count)
        if w.token is None:
            w.token = bar.generation
            if w.cluster.checks is not None:
                w.cluster.checks.named_arrive(w, bar)
            _note_named(w, "sync_arrive", bar, bar.generation, 32)
            bar.arrive(32, expected)
            w.machine.progress += 1
        if bar.generation == w.token:
            bar.waiters.append(w)
            w.block(bar)
            return None
        if w.cluster.checks is not None:
            w.cluster.checks.named_wait(w, bar, w.token)
        _note_named(w, "wait", bar, w.token, 0)
        w.token = None
        return True

    return sync


@runtime("barrier.arrive")
def _bar_arrive(operation: Operation) -> RuntimeFunction:
    def arrive(w: Any, m: Array | None, number: Array, count: Array) -> None:
        bar, expected = _named(w, m, number, count)
        if w.cluster.checks is not None:
            w.cluster.checks.named_arrive(w, bar)
        _note_named(w, "arrive", bar, bar.generation, 32)
        bar.arrive(32, expected)
        w.machine.progress += 1

    return arrive


@runtime("barrier.cluster.arrive")
def _cluster_arrive(operation: Operation) -> RuntimeFunction:
    semantics = operation.attrs["semantics"]

    def arrive(w: Any, m: Array | None) -> None:
        bar = w.cluster.barrier
        w.cluster_round = bar.generation
        if w.cluster.checks is not None:
            w.cluster.checks.cluster_arrive(w, semantics)
        bar.arrive(w.threads if m is None else int(np.count_nonzero(m)))
        w.machine.progress += 1

    return arrive


@runtime("barrier.cluster.wait")
def _cluster_wait(operation: Operation) -> RuntimeFunction:
    def wait(w: Any, m: Array | None) -> Any:
        bar = w.cluster.barrier
        if bar.generation == w.cluster_round:
            bar.waiters.append(w)
            w.block(bar)
            return None
        if w.cluster.checks is not None:
            w.cluster.checks.cluster_wait(w, w.cluster_round)
        return True

    return wait


# -- within a warp


def _shuffle_source(mode: str, b: Array, c: Array) -> tuple[Array, Array]:
    """Source lane and in-range predicate of each lane (PTX ISA, shfl.sync)."""
    b = (b & np.uint32(31)).astype(np.int64)
    clamp = (c & np.uint32(31)).astype(np.int64)
    segment = ((c >> np.uint32(8)) & np.uint32(31)).astype(np.int64)
    high = (_LANES & segment) | (clamp & ~segment)
    low = _LANES & segment
    if mode == "up":
        j = _LANES - b
        ok = j >= high
    elif mode == "down":
        j = _LANES + b
        ok = j <= high
    elif mode == "bfly":
        j = _LANES ^ b
        ok = j <= high
    else:
        j = low | (b & ~segment)
        ok = j <= high
    return np.where(ok, j, _LANES), ok


@runtime("shfl.up", "shfl.down", "shfl.bfly", "shfl.idx")
def _shfl(operation: Operation) -> RuntimeFunction:
    mode = operation.op[5:]
    two = len(operation.dst) == 2
    cache: dict[bytes, tuple[Array, Array]] = {}

    def shuffle(w: Any, m: Array | None, a: Array, b: Array, c: Array) -> Any:
        key = b.tobytes() + c.tobytes()
        found = cache.get(key)
        if found is None:
            if len(cache) > 256:
                cache.clear()
            found = cache[key] = _shuffle_source(mode, b, c)
        r = a[found[0]]
        return (r, found[1]) if two else r

    return shuffle


@runtime("vote.all", "vote.any", "vote.uni", "vote.ballot")
def _vote(operation: Operation) -> RuntimeFunction:
    mode = operation.op[5:]

    def vote(w: Any, m: Array | None, p: Array) -> Array:
        live = p if m is None else p & m
        if mode == "ballot":
            return np.full(32, np.bitwise_or.reduce(np.where(live, _BITS, np.uint32(0))), U4)
        any_set = bool(live.any())
        all_set = bool(live.all()) if m is None else bool((live == m).all())
        answer = {"any": any_set, "all": all_set, "uni": all_set or not any_set}[mode]
        return _TRUE if answer else _FALSE

    return vote


@runtime("match.any", "match.all")
def _match(operation: Operation) -> RuntimeFunction:
    every = operation.op == "match.all"
    two = len(operation.dst) == 2

    def match(w: Any, m: Array | None, a: Array) -> Any:
        lanes = active_list(m)
        out = np.zeros(32, U4)
        if every:
            same = len({int(a[i]) for i in lanes}) == 1
            bits = np.bitwise_or.reduce(_BITS[lanes]) if same else np.uint32(0)
            out[:] = bits
            return (out, np.full(32, same)) if two else out
        for lane in lanes:
            out[lane] = np.bitwise_or.reduce(_BITS[[i for i in lanes if a[i] == a[lane]]])
        return out

    return match


_ELECTED = np.arange(32) == 0


@runtime("elect")
def _elect(operation: Operation) -> RuntimeFunction:
    with_lane = len(operation.dst) == 2
    zero = np.zeros(32, U4)

    def elect(w: Any, m: Array | None) -> Any:
        if m is None:
            return (zero, _ELECTED) if with_lane else _ELECTED
        lane = int(m.argmax())
        chosen = lane == _LANES
        return (np.full(32, lane, U4), chosen) if with_lane else chosen

    return elect


@runtime("activemask")
def _activemask(operation: Operation) -> RuntimeFunction:
    def mask(w: Any, m: Array | None) -> Array:
        return np.full(32, np.bitwise_or.reduce(_BITS if m is None else _BITS[m]), U4)

    return mask


@runtime("redux")
def _redux(operation: Operation) -> RuntimeFunction:
    name, absolute, nan, kind = (operation.attrs[k] for k in ("operation", "absolute", "nan", "kind"))

    def reduce(w: Any, m: Array | None, a: Array) -> Array:
        live = a if m is None else a[m]
        if absolute:
            live = np.abs(live)
        if kind == "f":
            if nan and np.isnan(live).any():
                value: Any = np.float32(np.nan)
            else:
                value = (np.fmin if name == "min" else np.fmax).reduce(live)
            return np.full(32, value, F4)
        function: Any = {
            "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
            "xor": np.bitwise_xor,
        }[name]  # fmt: skip
        return np.full(32, function.reduce(live, dtype=a.dtype), a.dtype)

    return reduce


# -- scheduling and hints


class _RegisterPool:
    """What a warp waits for in ``setmaxnreg.inc``."""

    def __init__(self, cta: Any, wanted: int) -> None:
        self.cta = cta
        self.wanted = wanted

    def describe(self) -> str:
        return f"{self.wanted} registers a thread of a pool with {self.cta.register_pool} x 32 free"


@runtime("setmaxnreg.inc", "setmaxnreg.dec")
def _setmaxnreg(operation: Operation) -> RuntimeFunction:
    count = operation.attrs["count"]
    increase = operation.op.endswith("inc")

    def change(w: Any, m: Array | None) -> Any:
        cta = w.cta
        if increase:
            if count < w.register_count and w.registers_set:
                raise FaultError("setmaxnreg", f".inc to {count} registers from {w.register_count}")
            if count - w.register_count > cta.register_pool:
                cta.register_waiters.append(w)
                w.block(_RegisterPool(cta, count))
                return None
            cta.register_pool -= count - w.register_count
            w.register_count = count
            w.registers_set = True
            return True
        if count > w.register_count and w.registers_set:
            raise FaultError("setmaxnreg", f".dec to {count} registers from {w.register_count}")
        cta.register_pool += w.register_count - count
        w.register_count = count
        w.registers_set = True
        waiters, cta.register_waiters = cta.register_waiters, []
        for other in waiters:
            other.wake()
        w.machine.progress += 1
        return True

    return change


@runtime("fence")
def _fence(operation: Operation) -> RuntimeFunction:
    scope, modifiers = operation.attrs["scope"], operation.instruction.modifiers

    def fence(w: Any, m: Array | None) -> None:
        if w.cluster.checks is not None:
            w.cluster.checks.fence(w, scope, modifiers)

    return fence


@runtime("nop", "yield")
def _nop(operation: Operation) -> RuntimeFunction:
    return lambda w, m, *sources: None


@runtime("zero64")
def _zero64(operation: Operation) -> RuntimeFunction:
    zero = np.zeros(32, U8)
    return lambda w, m: zero


@runtime("trap", "brkpt")
def _trap(operation: Operation) -> RuntimeFunction:
    def trap(w: Any, m: Array | None) -> None:
        raise FaultError("trap", f"the kernel executed {operation.op}")

    return trap
