"""Loads, stores, atomics and matrix moves for the NumPy back-end."""

from __future__ import annotations

from typing import Any

import numpy as np

from fa4tune.emulator import checks_words, lanes
from fa4tune.emulator.codegen import PARAM_WINDOW, SHARED_WINDOW, RuntimeFunction, runtime
from fa4tune.emulator.findings import FaultError
from fa4tune.emulator.isa import Operation, unsupported
from fa4tune.emulator.isa_memory import is_strong
from fa4tune.emulator.lanes import F4, U2, U4, U8, Array
from fa4tune.emulator.memory import (
    LOCAL_WINDOW,
    PAGE_SHIFT,
    RANK_SHIFT,
    SIGNED,
    SMEM_BASE,
    UNSIGNED,
    require_aligned,
    window_of,
)

_REGISTER_BYTES = {"H": 2, "W": 4, "Q": 8, "p": 1}


def active(mask: Array | None) -> Array | None:
    """Indices of the active lanes, or None for all."""
    return None if mask is None else np.flatnonzero(mask)


def spread(values: Array, which: Array | None, n: int) -> Array:
    """Per-active-lane values to full vectors; idle lanes hold zero."""
    if which is None:
        return values
    out = np.zeros((*values.shape[:-1], n), values.dtype)
    out[..., which] = values
    return out


def lane_count(warp: Any, mask: Array | None) -> int:
    """How many lanes take part."""
    return warp.width if mask is None else int(np.count_nonzero(mask))


def _widen(data: Array, operation: Operation, register: str) -> Array:
    """Extend loaded words to the register's width."""
    size = operation.attrs["size"]
    width = _REGISTER_BYTES[register]
    if size == width:
        return data
    if size > width:
        raise unsupported(operation.instruction, "loads more than its register holds")
    if operation.attrs["signed"]:
        return data.view(SIGNED[size]).astype(SIGNED[width]).view(UNSIGNED[width])
    return data.astype(UNSIGNED[width])


@runtime("ld.param")
def _ld_param(operation: Operation) -> RuntimeFunction:
    size, offset = operation.attrs["size"], operation.attrs["offset"]
    count = len(operation.dst)
    kinds = operation.dst_kinds

    def load(w: Any, m: Array | None, base: Array) -> Any:
        block = w.machine.parameters
        out = []
        first = int(base[0]) + offset
        for j in range(count):
            at = first + j * size
            if at + size > len(block):
                raise FaultError("out-of-bounds", f"parameter bytes {at}..{at + size} of {len(block)}")
            word = (
                np.frombuffer(block, UNSIGNED[size], 1, at)
                if at % size == 0
                else np.frombuffer(bytes(block[at : at + size]), UNSIGNED[size], 1)
            )
            out.append(_widen(np.repeat(word, w.width), operation, kinds[j]))
        return out[0] if count == 1 else out

    return load


def _global_load(w: Any, addresses: Array, size: int, count: int, strong: bool = False) -> Array:
    """Words of active lanes from global memory, shape (count, lanes)."""
    require_aligned(addresses, size * count)
    memory = w.machine.memory
    groups = memory.locate(addresses, size * count, False)
    if w.cluster.checks is not None:
        w.cluster.checks.global_access(w, addresses, size * count, False, strong, checks_words.GLOBAL_READ)
    out = np.empty((count, len(addresses)), UNSIGNED[size])
    for index, offsets, which in groups:
        view = memory.view(index, size)
        words = (offsets // np.uint64(size)).astype(np.int64)
        for j in range(count):
            out[j, which] = view[words + j]
    w.count_bytes("global_read", size * count * len(addresses))
    return out


def _global_store(w: Any, addresses: Array, values: list[Array], size: int, strong: bool = False) -> None:
    require_aligned(addresses, size * len(values))
    memory = w.machine.memory
    groups = memory.locate(addresses, size * len(values), True)
    if w.cluster.checks is not None:
        w.cluster.checks.global_access(
            w, addresses, size * len(values), True, strong, checks_words.GLOBAL_WRITE
        )
    for index, offsets, which in groups:
        view = memory.view(index, size)
        words = (offsets // np.uint64(size)).astype(np.int64)
        for j, value in enumerate(values):
            view[words + j] = value[which]
    w.machine.progress += 1
    w.count_bytes("global_write", size * len(values) * len(addresses))


def shared_groups(w: Any, addresses: Array, cluster: bool) -> list[tuple[Any, Array, Any]]:
    """Group shared addresses by CTA: (cta, byte indices into its memory, which lanes)."""
    ranks = addresses >> np.uint32(RANK_SHIFT)
    rank = int(ranks[0])
    if not (ranks != rank).any():
        found: list[tuple[int, Any]] = [(rank, ...)]
    else:
        found = [(int(r), np.flatnonzero(ranks == r)) for r in np.unique(ranks)]
    out = []
    for r, which in found:
        if r != w.cta.rank and not cluster:
            raise FaultError(
                "out-of-bounds",
                f"shared::cta access at {int(addresses[which].ravel()[0]):#x}, which belongs to CTA rank {r}",
            )
        cta = w.cluster.cta(r)
        offsets = (addresses[which] & np.uint32((1 << RANK_SHIFT) - 1)).astype(np.int64) - SMEM_BASE
        out.append((cta, offsets, which))
    return out


def _check_shared(cta: Any, offsets: Array, nbytes: int, what: str) -> None:
    low, high = int(offsets.min()), int(offsets.max())
    cta.smem.check(low + SMEM_BASE, nbytes, what)
    cta.smem.check(high + SMEM_BASE, nbytes, what)


def shared_load(w: Any, addresses: Array, size: int, count: int, cluster: bool) -> Array:
    """Words from shared memory, shape (count, lanes)."""
    out = np.empty((count, len(addresses)), UNSIGNED[size])
    for cta, offsets, which in shared_groups(w, addresses, cluster):
        _check_shared(cta, offsets, size * count, "a shared load")
        require_aligned(offsets, size * count)
        if w.cluster.checks is not None:
            w.cluster.checks.shared(w, cta, offsets, size * count, False)
        view = cta.smem.views[size]
        words = offsets // size
        for j in range(count):
            out[j, which] = view[words + j]
        w.count_bytes("smem_read" if cta is w.cta else "dsmem_read", size * count * len(offsets))
    return out


def shared_store(
    w: Any, addresses: Array, values: list[Array], size: int, cluster: bool, counted: bool = True
) -> None:
    """Words to shared memory; ``counted`` as bytes that a thread stored."""
    count = len(values)
    for cta, offsets, which in shared_groups(w, addresses, cluster):
        _check_shared(cta, offsets, size * count, "a shared store")
        require_aligned(offsets, size * count)
        if w.cluster.checks is not None:
            w.cluster.checks.shared(w, cta, offsets, size * count, True)
        view = cta.smem.views[size]
        words = offsets // size
        for j, value in enumerate(values):
            view[words + j] = value[which]
        cta.smem.stamps[offsets >> PAGE_SHIFT] = w.machine.tick()
        if counted:
            w.count_bytes("smem_write" if cta is w.cta else "dsmem_write", size * count * len(offsets))
    w.machine.progress += 1


def _narrow(values: tuple[Array, ...], which: Array | None, size: int) -> list[Array]:
    picked = [v if which is None else v[which] for v in values]
    return [v if v.dtype.itemsize == size else v.astype(UNSIGNED[size]) for v in picked]


@runtime("ld.shared", "ld.global", "ld.generic", "ld.local", "ld.const")
def _ld(operation: Operation) -> RuntimeFunction:
    attrs = operation.attrs
    size, offset, space = attrs["size"], attrs["offset"], attrs["space"]
    count = len(operation.dst)
    kinds = operation.dst_kinds
    strong = is_strong(operation)
    same_kinds = len(set(kinds)) == 1 and _REGISTER_BYTES[kinds[0]] == size

    def load(w: Any, m: Array | None, base: Array) -> Any:
        which = active(m)
        addresses = (base if which is None else base[which]) + base.dtype.type(
            offset & ((1 << 8 * base.itemsize) - 1)
        )
        data = read(w, addresses, space)
        if same_kinds:
            out = spread(data, which, w.width)
            return out[0] if count == 1 else out
        outs = [spread(_widen(data[j], operation, kinds[j]), which, w.width) for j in range(count)]
        return outs[0] if count == 1 else outs

    def read(w: Any, addresses: Array, where: str) -> Array:
        if where.startswith("shared"):
            return shared_load(w, addresses, size, count, where == "shared::cluster")
        if where == "global":
            return _global_load(w, addresses, size, count, strong)
        if where == "local":
            return w.local_load(addresses & np.uint64(LOCAL_WINDOW - 1), size, count)
        if where != "generic":
            raise unsupported(operation.instruction, f"reads .{where}")
        window = window_of(int(addresses[0]))
        if window == "shared":
            return shared_load(w, (addresses - np.uint64(SHARED_WINDOW)).astype(U4), size, count, True)
        if window == "param":
            at = (addresses - np.uint64(PARAM_WINDOW)).astype(np.int64)
            block = np.frombuffer(w.machine.parameters, np.uint8)
            picks = at[:, None] + np.arange(size * count)
            return np.ascontiguousarray(block[picks]).view(UNSIGNED[size]).T
        return read(w, addresses, window)

    return load


@runtime("st.shared", "st.global", "st.generic", "st.local")
def _st(operation: Operation) -> RuntimeFunction:
    attrs = operation.attrs
    size, offset, space = attrs["size"], attrs["offset"], attrs["space"]
    strong = is_strong(operation)

    def store(w: Any, m: Array | None, base: Array, *values: Array) -> None:
        which = active(m)
        addresses = (base if which is None else base[which]) + base.dtype.type(
            offset & ((1 << 8 * base.itemsize) - 1)
        )
        write(w, addresses, _narrow(values, which, size), space)

    def write(w: Any, addresses: Array, values: list[Array], where: str) -> None:
        if where.startswith("shared"):
            shared_store(w, addresses, values, size, where == "shared::cluster")
        elif where == "global":
            _global_store(w, addresses, values, size, strong)
        elif where == "local":
            w.local_store(addresses & np.uint64(LOCAL_WINDOW - 1), values, size)
        elif where == "generic":
            window = window_of(int(addresses[0]))
            if window == "shared":
                shared_store(w, (addresses - np.uint64(SHARED_WINDOW)).astype(U4), values, size, True)
            else:
                write(w, addresses, values, window)
        else:
            raise unsupported(operation.instruction, f"writes .{where}")

    return store


_ATOMIC_INT: dict[str, Any] = {
    "add": lambda old, x: old + x,
    "min": min,
    "max": max,
    "and": lambda old, x: old & x,
    "or": lambda old, x: old | x,
    "xor": lambda old, x: old ^ x,
    "exch": lambda old, x: x,
    "inc": lambda old, x: 0 if old >= x else old + 1,
    "dec": lambda old, x: x if old == 0 or old > x else old - 1,
}


def combine(view: Array, index: int, operation: str, kind: str, value: Any, compare: Any = None) -> Any:
    """One atomic read-modify-write on a typed view; returns the old value.

    ``value`` and ``compare`` are NumPy scalars of the view's type. Float additions round to nearest.
    """
    old = view[index].copy() if hasattr(view[index], "copy") else view[index]
    if operation == "cas":
        if old == compare:
            view[index] = value
    elif kind in "VB":
        load, store = (
            (lanes.f16_to_f32, lanes.f32_to_f16) if kind == "V" else (lanes.bf16_to_f32, lanes.f32_to_bf16)
        )
        a = load(np.array([old], U4).view(U2))
        b = load(np.array([value], U4).view(U2))
        view[index] = store(_float_combine(operation, a, b)).view(U4)[0]
    elif kind in "FG":
        load, store = (
            (lanes.f16_to_f32, lanes.f32_to_f16) if kind == "F" else (lanes.bf16_to_f32, lanes.f32_to_bf16)
        )
        view[index] = store(
            _float_combine(operation, load(np.array([old], U2)), load(np.array([value], U2)))
        )[0]
    elif kind in "fd" and operation != "exch":
        view[index] = _float_combine(operation, old, value)
    else:
        bits = view.dtype.itemsize * 8
        result = _ATOMIC_INT[operation](
            old if kind in "fd" else int(old), value if kind in "fd" else int(value)
        )
        if view.dtype.kind in "ui":
            result &= (1 << bits) - 1
            if view.dtype.kind == "i" and result >> (bits - 1):
                result -= 1 << bits
        view[index] = result
    return old


def _float_combine(operation: str, a: Any, b: Any) -> Any:
    if operation == "add":
        return a + b
    if operation == "min":
        return np.fmin(a, b)
    if operation == "max":
        return np.fmax(a, b)
    raise FaultError("unsupported", f"a float atomic .{operation}")


_ATOMIC_DTYPE = {"u": U4, "i": np.dtype("i4"), "f": F4, "q": U8, "l": np.dtype("i8"), "d": np.dtype("f8")}
_ATOMIC_DTYPE |= {"V": U4, "B": U4, "F": U2, "G": U2}


@runtime("atom")
def _atom(operation: Operation) -> RuntimeFunction:
    attrs = operation.attrs
    size, offset, space, name, kind = (attrs[k] for k in ("size", "offset", "space", "operation", "kind"))
    dtype = _ATOMIC_DTYPE[kind]
    width = attrs["width"]
    returns = len(operation.dst)

    def atomic(w: Any, m: Array | None, base: Array, *values: Array) -> Any:
        which = np.arange(w.width) if m is None else np.flatnonzero(m)
        addresses = base[which] + base.dtype.type(offset)
        require_aligned(addresses, size * width)
        olds = [np.zeros(w.width, dtype) for _ in range(width)]
        typed = [v.view(dtype) for v in values]
        for lane, address in zip(which.tolist(), addresses.tolist(), strict=True):
            view, index = w.machine.atomic_view(w, int(address), size, width, space, dtype)
            for j in range(width):
                compare = typed[0][lane] if name == "cas" else None
                value = typed[1][lane] if name == "cas" else typed[j][lane]
                olds[j][lane] = combine(view, index + j, name, kind, value, compare)
        w.machine.progress += 1
        w.count_bytes("atomic", size * width * len(which))
        if returns == 0:
            return None
        return olds[0] if returns == 1 else olds

    return atomic


# -- matrices


def _matrix_rows(w: Any, m: Array | None, base: Array, offset: int, count: int) -> tuple[Any, Array]:
    if m is not None:
        raise FaultError("partial-mask", "a matrix move with idle lanes")
    addresses = base[: 8 * count] + np.uint32(offset & 0xFFFFFFFF)
    groups = shared_groups(w, addresses, False)
    cta, offsets, _ = groups[0]
    _check_shared(cta, offsets, 16, "a matrix move")
    require_aligned(offsets, 16)
    return cta, offsets


@runtime("ldmatrix")
def _ldmatrix(operation: Operation) -> RuntimeFunction:
    offset, count, transpose = (operation.attrs[k] for k in ("offset", "count", "transpose"))

    def load(w: Any, m: Array | None, base: Array) -> Any:
        cta, offsets = _matrix_rows(w, m, base, offset, count)
        if w.cluster.checks is not None:
            w.cluster.checks.shared(w, cta, offsets, 16, False)
        halves = cta.smem.views[2][(offsets // 2)[:, None] + np.arange(8)].reshape(count, 8, 8)
        if transpose:
            halves = halves.transpose(0, 2, 1)
        # Lane t holds row t/4, elements 2(t%4) and the next one (PTX ISA, ldmatrix fragments).
        words = np.ascontiguousarray(halves).view(U4).reshape(count, 32)
        w.count_bytes("smem_read", 128 * count)
        return words[0] if count == 1 else words

    return load


@runtime("stmatrix")
def _stmatrix(operation: Operation) -> RuntimeFunction:
    offset, count, transpose = (operation.attrs[k] for k in ("offset", "count", "transpose"))

    def store(w: Any, m: Array | None, base: Array, *registers: Array) -> None:
        cta, offsets = _matrix_rows(w, m, base, offset, count)
        if w.cluster.checks is not None:
            w.cluster.checks.shared(w, cta, offsets, 16, True)
        halves = np.stack(registers).view(U2).reshape(count, 8, 8)
        if transpose:
            halves = halves.transpose(0, 2, 1)
        cta.smem.views[2][(offsets // 2)[:, None] + np.arange(8)] = halves.reshape(-1, 8)
        cta.smem.stamps[offsets >> PAGE_SHIFT] = w.machine.tick()
        w.machine.progress += 1
        w.count_bytes("smem_write", 128 * count)

    return store


@runtime("movmatrix")
def _movmatrix(operation: Operation) -> RuntimeFunction:
    def move(w: Any, m: Array | None, a: Array) -> Array:
        if m is not None:
            raise FaultError("partial-mask", "movmatrix with idle lanes")
        halves = np.ascontiguousarray(a).view(U2).reshape(8, 8)
        return np.ascontiguousarray(halves.T).view(U4).reshape(32)

    return move


@runtime("mapa")
def _mapa(operation: Operation) -> RuntimeFunction:
    generic = operation.dst_kinds == "q"
    base = np.uint64(SHARED_WINDOW) if generic else np.uint32(0)
    kind: Any = np.uint64 if generic else np.uint32

    def function(w: Any, m: Array | None, a: Array, rank: Array) -> Array:
        offset = (a - base) & kind((1 << RANK_SHIFT) - 1)
        ranks = rank.astype(a.dtype)
        live = ranks if m is None else ranks[m]
        if int(live.max()) >= w.cluster.size:
            raise FaultError(
                "out-of-bounds", f"mapa to CTA rank {int(live.max())} of a cluster of {w.cluster.size}"
            )
        return base + ((ranks << kind(RANK_SHIFT)) | offset)

    return function


@runtime("getctarank")
def _getctarank(operation: Operation) -> RuntimeFunction:
    def function(w: Any, m: Array | None, a: Array) -> Array:
        base = np.uint64(SHARED_WINDOW) if a.dtype == U8 else np.uint32(0)
        return ((a - base) >> a.dtype.type(RANK_SHIFT)).astype(U4)

    return function
