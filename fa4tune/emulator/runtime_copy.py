"""Asynchronous copies for the NumPy back-end: TMA tensors, bulk copies, bulk groups, cp.async, st.async."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fa4tune.emulator import tensor_map
from fa4tune.emulator.asynchronous import Pending, perform
from fa4tune.emulator.barriers import MBarrier
from fa4tune.emulator.codegen import RuntimeFunction, runtime
from fa4tune.emulator.findings import FaultError
from fa4tune.emulator.isa import Operation
from fa4tune.emulator.lanes import U8, Array
from fa4tune.emulator.memory import RANK_SHIFT, SHARED_WINDOW, SMEM_BASE, UNSIGNED
from fa4tune.emulator.runtime_sync import OFFSET_MASK, active_list, barrier_groups, note
from fa4tune.emulator.warp import BulkGroups


def tensor_map_at(w: Any, address: int) -> tensor_map.TensorMap:
    """The tensor map at a generic address."""
    raw = w.machine.bytes_at(address, 128)
    found = w.machine.tensor_maps.get(raw)
    if found is None:
        found = w.machine.tensor_maps[raw] = tensor_map.decode(raw)
    return found


def complete(w: Any, bar: MBarrier, nbytes: int) -> None:
    """Signal bytes that arrived."""
    note(w, "complete_tx", bar, bar.phase, nbytes, warp=-1)
    bar.complete(nbytes)


def _tell_box(
    w: Any, tmap: tensor_map.TensorMap, coordinates: tuple[int, ...], write: bool, atomic: bool, what: str
) -> None:
    """Tell the checks about the part of a box that lies in global memory."""
    found = tensor_map.rows_inside(tmap, coordinates)
    if found is not None:
        w.cluster.checks.global_access(w, *found, write, atomic, what)


def ranks_of(mask: int, size: int) -> list[int]:
    """CTA ranks of a multicast mask."""
    ranks = [r for r in range(16) if mask >> r & 1]
    if not ranks or ranks[-1] >= size:
        raise FaultError("out-of-bounds", f"multicast to CTA mask {mask:#x} of a cluster of {size}")
    return ranks


def _lanes_once(m: Array | None, sources: tuple[Array, ...], merge: bool) -> list[int]:
    """Active lanes; identical copies of a whole warp are merged (they write the same bytes)."""
    lanes = active_list(m)
    if len(lanes) > 1 and merge and all((s[lanes] == s[lanes[0]]).all() for s in sources):
        return lanes[:1]
    return lanes


@runtime("tma.load")
def _tma_load(operation: Operation) -> RuntimeFunction:
    attrs = operation.attrs
    rank, offset, bar_offset = attrs["rank"], attrs["offset"], attrs["barrier_offset"]
    multicast, group = attrs["multicast"], attrs["cta_group"]

    def load(w: Any, m: Array | None, *sources: Array) -> None:
        for lane in active_list(m):
            _issue(w, [int(s[lane]) for s in sources])

    def _issue(w: Any, values: list[int]) -> None:
        tmap = tensor_map_at(w, values[1])
        if len(tmap.box) != rank:
            raise FaultError("descriptor", f"a {rank}d copy with a tensor map of {len(tmap.box)} dimensions")
        coordinates = tuple(values[2 : 2 + rank])
        shared = values[0] + offset
        barrier = values[2 + rank] + bar_offset
        owner, where = shared >> RANK_SHIFT, shared & OFFSET_MASK
        bar_owner, bar_where = barrier >> RANK_SHIFT, barrier & OFFSET_MASK
        nbytes = tmap.box_bytes
        if multicast:
            targets = ranks_of(values[3 + rank], w.cluster.size)
        else:
            targets = [owner]
            if group == 1 and bar_owner != owner:
                raise FaultError(
                    "mbarrier", "a tensor copy signals an mbarrier of another CTA without cta_group::2"
                )
        signals: list[tuple[Any, MBarrier]] = []
        for target in targets:
            signal = bar_owner if not multicast else target
            if group == 2:
                signal = (target & ~1) | (bar_owner & 1)
            signals.append((w.cluster.cta(target), w.cluster.cta(signal).mbarrier(bar_where)))
        w.count_bytes("tma_read", nbytes)
        checks = w.cluster.checks
        if checks is not None:
            _tell_box(w, tmap, coordinates, False, False, "a tensor load")
        issue = None if checks is None else checks.departed(w)

        def run() -> None:
            box = tensor_map.read_box(w.machine.memory, tmap, coordinates)
            for cta, bar in signals:
                tensor_map.to_shared(cta, where, tmap, box)
                if checks is not None:
                    checks.landed(issue, cta, where - SMEM_BASE, nbytes, bar, "a tensor load")
                complete(w, bar, nbytes)

        w.cluster.units.issue_copy(
            Pending(
                run,
                tuple(b for _, b in signals),
                f"a tensor load of {nbytes} bytes",
                operation.instruction,
                w,
            )
        )

    return load


def add_to_group(w: Any, lane: int, operation: Operation, run: Callable[[], None], what: str) -> None:
    """Queue an operation that a bulk group tracks; eagerly it is performed at once."""
    pending = Pending(run, (), what, operation.instruction, w)
    if w.cluster.units.late:
        w.bulk.setdefault(lane, BulkGroups()).open.append(pending)
    else:
        perform(pending)


@runtime("tma.store")
def _tma_store(operation: Operation) -> RuntimeFunction:
    attrs = operation.attrs
    rank, offset, reduction = attrs["rank"], attrs["offset"], attrs["reduction"]

    def store(w: Any, m: Array | None, *sources: Array) -> None:
        for lane in _lanes_once(m, sources, reduction is None):
            _issue(w, lane, [int(s[lane]) for s in sources])

    def _issue(w: Any, lane: int, values: list[int]) -> None:
        tmap = tensor_map_at(w, values[1])
        if len(tmap.box) != rank:
            raise FaultError("descriptor", f"a {rank}d copy with a tensor map of {len(tmap.box)} dimensions")
        coordinates = tuple(values[2 : 2 + rank])
        shared = values[0] + offset
        if shared >> RANK_SHIFT != w.cta.rank:
            raise FaultError("out-of-bounds", "a tensor store reads another CTA's shared memory")
        w.count_bytes("tma_write" if reduction is None else "tma_reduce", tmap.box_bytes)

        def run() -> None:
            box = tensor_map.from_shared(w.cta, shared & OFFSET_MASK, tmap)
            tensor_map.write_box(w.machine.memory, tmap, coordinates, box, reduction)

        if w.cluster.checks is not None:
            start = w.cta.smem.check(shared & OFFSET_MASK, tmap.box_bytes, "a tensor store")
            inside = all(0 <= c <= n - b for c, b, n in zip(coordinates, tmap.box, tmap.sizes, strict=True))
            w.cluster.checks.bulk_read(w, lane, start, tmap.box_bytes, "a tensor store", inside)
            what = "a tensor store" if reduction is None else "a tensor reduction"
            _tell_box(w, tmap, coordinates, True, reduction is not None, what)
        add_to_group(w, lane, operation, run, f"a tensor store of {tmap.box_bytes} bytes")

    return store


@runtime("bulk.commit")
def _bulk_commit(operation: Operation) -> RuntimeFunction:
    def commit(w: Any, m: Array | None) -> None:
        if w.cluster.checks is not None:
            w.cluster.checks.bulk_commit(w, active_list(m))
        if not w.cluster.units.late:
            return
        for lane in active_list(m):
            groups = w.bulk.get(lane)
            if groups is not None:
                groups.closed.append(groups.open)
                groups.open = []

    return commit


@runtime("bulk.wait")
def _bulk_wait(operation: Operation) -> RuntimeFunction:
    count = operation.attrs["count"]

    def wait(w: Any, m: Array | None) -> None:
        if w.cluster.checks is not None:
            w.cluster.checks.bulk_wait(w, active_list(m), count)
        for lane in active_list(m) if w.bulk else ():
            groups = w.bulk.get(lane)
            while groups is not None and len(groups.closed) > count:
                for pending in groups.closed.popleft():
                    perform(pending)

    return wait


def _resolve_bulk(w: Any, address: int, nbytes: int, write: bool) -> tuple[Any, int]:
    """(cta, index) of a shared address or (None, address) of a global one; checked."""
    if address >= SHARED_WINDOW:
        address -= SHARED_WINDOW
    cta = w.cluster.cta(address >> RANK_SHIFT)
    return cta, cta.smem.check(address & OFFSET_MASK, nbytes, "a bulk copy")


_REDUCE_ELEMENT = {"f16": "f2", "bf16": "bf16", "b32": "u4", "u32": "u4", "s32": "i4", "f32": "f4"}
_REDUCE_ELEMENT |= {"b64": "u8", "u64": "u8", "s64": "i8", "f64": "f8"}


@runtime("bulk.copy")
def _bulk_copy(operation: Operation) -> RuntimeFunction:
    attrs = operation.attrs
    to, of, group, multicast = attrs["to"], attrs["of"], attrs["group"], attrs["multicast"]
    dst_offset, src_offset, bar_offset = attrs["dst_offset"], attrs["src_offset"], attrs["barrier_offset"]
    reduction = attrs["reduction"]
    element = _REDUCE_ELEMENT.get(attrs["type"] or "", "")

    def copy(w: Any, m: Array | None, *sources: Array) -> None:
        for lane in active_list(m):
            _issue(w, lane, [int(s[lane]) for s in sources])

    def _issue(w: Any, lane: int, values: list[int]) -> None:
        dst, src, nbytes = values[0] + dst_offset, values[1] + src_offset, values[2]
        if (dst | src | nbytes) & 15:
            raise FaultError(
                "misaligned", f"a bulk copy of {nbytes} bytes from {src:#x} to {dst:#x}, not 16-byte aligned"
            )
        if nbytes == 0:
            return
        bars: list[MBarrier] = []
        targets: list[int] = []
        if not group:
            barrier = values[3] + bar_offset
            targets = ranks_of(values[4], w.cluster.size) if multicast else [dst >> RANK_SHIFT]
            owner = barrier >> RANK_SHIFT
            bars = [w.cluster.cta(t if multicast else owner).mbarrier(barrier & OFFSET_MASK) for t in targets]
        if of == "global":
            w.count_bytes("tma_read", nbytes)
        elif to == "global":
            w.count_bytes("tma_write" if reduction is None else "tma_reduce", nbytes)
        else:
            w.count_bytes("dsmem_write", nbytes)

        def read() -> Array:
            if of == "global":
                return w.machine.memory.bytes_at(src, nbytes)
            cta, start = _resolve_bulk(w, src, nbytes, False)
            return cta.smem.bytes[start : start + nbytes]

        def put(old: Array, data: Array) -> None:
            if reduction is None:
                old[:] = data
            else:
                size = np.dtype("u2" if element == "bf16" else element).itemsize
                words = UNSIGNED[size]
                result = tensor_map.reduce_words(old.view(words), data.view(words), reduction, element)
                old[:] = result.view(np.uint8)

        checks = w.cluster.checks
        if checks is not None and "global" in (of, to):
            at = np.array([src if of == "global" else dst], np.uint64)
            what = "a bulk copy" if reduction is None else "a bulk reduction"
            checks.global_access(w, at, nbytes, to == "global", reduction is not None, what)
        issue = None if checks is None else checks.departed(w)
        if group and checks is not None:
            _, start = _resolve_bulk(w, src, nbytes, False)
            checks.bulk_read(w, lane, start, nbytes, "a bulk store", True)

        def run() -> None:
            data = read()
            if checks is not None and not group and of != "global":
                source, start = _resolve_bulk(w, src, nbytes, False)
                checks.fetched(issue, source, start, nbytes, bars[0], "the source of a bulk copy")
            if to == "global":
                put(w.machine.memory.bytes_at(dst, nbytes, True), data)
                return
            for target, bar in zip(targets, bars, strict=True):
                cta = w.cluster.cta(target)
                start = cta.smem.check(dst & OFFSET_MASK, nbytes, "a bulk copy")
                put(cta.smem.bytes[start : start + nbytes], data)
                if checks is not None:
                    checks.landed(issue, cta, start, nbytes, bar, "a bulk copy")
                cta.smem.touch(start, nbytes, w.machine.tick())
                complete(w, bar, nbytes)

        what = f"a bulk copy of {nbytes} bytes"
        if group:
            add_to_group(w, lane, operation, run, what)
        else:
            w.cluster.units.issue_copy(Pending(run, tuple(bars), what, operation.instruction, w))

    return copy


# -- cp.async


@runtime("cp.async")
def _cp_async(operation: Operation) -> RuntimeFunction:
    attrs = operation.attrs
    dst_offset, src_offset, size = attrs["dst_offset"], attrs["src_offset"], attrs["size"]

    def copy(w: Any, m: Array | None, dst: Array, src: Array, have: Array | None = None) -> None:
        lanes = active_list(m)
        targets = dst[lanes].astype(np.int64) + dst_offset
        origins = src[lanes].astype(np.int64) + src_offset
        counts = [size] * len(lanes) if have is None else have[lanes].tolist()

        def run() -> None:
            for target, origin, n in zip(targets.tolist(), origins.tolist(), counts, strict=True):
                data = np.zeros(size, np.uint8)
                if n:
                    data[:n] = w.machine.memory.bytes_at(origin, n)
                if target % size or (n and origin % size):
                    raise FaultError(
                        "misaligned", f"cp.async of {size} bytes from {origin:#x} to {target:#x}"
                    )
                start = w.cta.smem.check(target & OFFSET_MASK, size, "cp.async")
                w.cta.smem.bytes[start : start + size] = data
                w.cta.smem.touch(start, size, w.machine.tick())

        w.count_bytes("cp_async", size * len(lanes))
        if w.cluster.checks is not None:
            w.cta.smem.check(int((targets & OFFSET_MASK).min()), 1, "cp.async")
            w.cta.smem.check(int((targets & OFFSET_MASK).max()), size, "cp.async")
            for n in dict.fromkeys(counts):
                if n:
                    some = origins[np.array(counts) == n].astype(np.uint64)
                    w.cluster.checks.global_access(w, some, n, False, False, "a cp.async")
            w.cluster.checks.copied(w, (targets & OFFSET_MASK) - SMEM_BASE, size)
        pending = Pending(run, (), f"cp.async of {size} bytes a lane", operation.instruction, w)
        if w.cluster.units.late:
            w.copies_open.append(pending)
        else:
            perform(pending)

    return copy


@runtime("cp.async.commit")
def _cp_commit(operation: Operation) -> RuntimeFunction:
    def commit(w: Any, m: Array | None) -> None:
        w.copies.append(w.copies_open)
        w.copies_open = []
        if w.cluster.checks is not None:
            w.cluster.checks.close(w.agent, "copy")

    return commit


@runtime("cp.async.wait")
def _cp_wait(operation: Operation) -> RuntimeFunction:
    count = operation.attrs["count"]

    def wait(w: Any, m: Array | None) -> None:
        if w.cluster.checks is not None:
            if operation.instruction.modifiers[-1] == "wait_all":
                w.cluster.checks.close(w.agent, "copy")
            w.cluster.checks.awaited(w.agent, "copy", count)
        while len(w.copies) > count:
            for pending in w.copies.popleft():
                perform(pending)
        if count == 0 and operation.instruction.modifiers[-1] == "wait_all":
            for pending in w.copies_open:
                perform(pending)
            w.copies_open = []

    return wait


@runtime("cp.async.mbarrier")
def _cp_mbarrier(operation: Operation) -> RuntimeFunction:
    offset, noinc = operation.attrs["offset"], operation.attrs["noinc"]

    def arrive(w: Any, m: Array | None, base: Array) -> None:
        earlier = [p for group in w.copies for p in group] + w.copies_open
        w.copies.clear()
        w.copies_open = []
        checks = w.cluster.checks
        issue = None if checks is None else checks.departed(w)
        group = 0 if checks is None else checks.close(w.agent, "copy")
        for bar, lanes in barrier_groups(w, m, base, offset):
            if not noinc:
                bar.pending += len(lanes)

            def run(bar: MBarrier = bar, n: int = len(lanes)) -> None:
                for pending in earlier:
                    perform(pending)
                earlier.clear()
                if checks is not None:
                    checks.completed(issue, bar, checks.own(w.agent, "copy")[0], group)
                note(w, "arrive", bar, bar.phase, n, warp=-1)
                bar.arrive(n)

            w.cluster.units.issue_copy(
                Pending(run, (bar,), "the arrival after cp.async", operation.instruction, w)
            )

    return arrive


@runtime("st.async")
def _st_async(operation: Operation) -> RuntimeFunction:
    attrs = operation.attrs
    offset, bar_offset, size = attrs["offset"], attrs["barrier_offset"], attrs["size"]

    def store(w: Any, m: Array | None, base: Array, barrier: Array, *values: Array) -> None:
        for lane in active_list(m):
            at = int(base[lane]) + offset
            bar = w.cluster.mbarrier(int(barrier[lane]) + bar_offset)
            cta = w.cluster.cta(at >> RANK_SHIFT)
            n = size * len(values)
            start = cta.smem.check(at & OFFSET_MASK, n, "st.async")
            if at % n:
                raise FaultError("misaligned", f"st.async of {n} bytes at {at:#x}")
            data = np.array([int(v[lane]) for v in values], UNSIGNED[size])
            w.count_bytes("dsmem_write", n)
            checks = w.cluster.checks
            issue = None if checks is None else checks.departed(w)

            def run(
                cta: Any = cta,
                start: int = start,
                data: Array = data,
                bar: MBarrier = bar,
                n: int = n,
                checks: Any = checks,
                issue: Any = issue,
            ) -> None:
                cta.smem.bytes[start : start + n] = data.view(np.uint8)
                cta.smem.touch(start, n, w.machine.tick())
                if checks is not None:
                    checks.landed(issue, cta, start, n, bar, "an asynchronous store")
                complete(w, bar, n)

            w.cluster.units.issue_copy(
                Pending(run, (bar,), "an asynchronous store", operation.instruction, w)
            )

    return store


__all__ = ["SMEM_BASE", "U8"]
