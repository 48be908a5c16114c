"""What matrix operations and TMEM moves touch, told to the checks when they are issued."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from fa4tune.emulator import checks_words as words
from fa4tune.emulator import operand
from fa4tune.emulator.checks_cluster import LENIENT, TMEM, TMEM_GROUP, ClusterChecks, Issued
from fa4tune.emulator.checks_shadow import Access, Index
from fa4tune.emulator.lanes import Array
from fa4tune.emulator.memory import SMEM_BASE

if TYPE_CHECKING:
    from fa4tune.emulator.operand import MatrixDescriptor


@lru_cache(maxsize=4096)
def _granules(
    phase: int,
    leading: int,
    stride: int,
    swizzle: int,
    rows: int,
    depth: int,
    mn_major: bool,
    first: int,
    last: int,
) -> tuple[Array, int, int]:
    """Granules of some rows of an operand, relative to ``start - phase``, lowest byte and end."""
    words, _, _ = operand.element_offsets(phase, leading, stride, swizzle, rows, depth, mn_major)
    part = words[first:last]
    return np.unique(part >> 3), 2 * int(part.min()), 2 * int(part.max()) + 2


def operand_index(
    cta: Any,
    d: MatrixDescriptor,
    rows: int,
    depth: int,
    mn_major: bool,
    first: int = 0,
    last: int | None = None,
) -> Index:
    """Granules of a CTA's shared memory that rows of an operand lie in; a fault outside of the memory."""
    phase = d.start & 1023
    granules, low, end = _granules(
        phase, d.leading, d.stride, d.swizzle, rows, depth, mn_major, first, rows if last is None else last
    )
    base = d.start - phase
    cta.smem.check(base + low, end - low, "a matrix operand")
    at = (base - SMEM_BASE) >> 4
    first_granule, count = int(granules[0]), len(granules)
    if int(granules[-1]) - first_granule == count - 1:
        return (slice(at + first_granule, at + first_granule + count),)
    return (granules + at,)


# -- wgmma


def wgmma_registers(c: ClusterChecks, w: Any, item: Any, register_mask: int, poison: Any) -> None:
    """The registers of a wgmma that a warp issues."""
    agent = w.agent
    if agent.touched & register_mask:
        c.report(*words.WGMMA_FENCE, w)
        agent.touched &= ~register_mask
    if item.accumulate:
        flying = agent.flying_mask  # those hold a result soon
        if any(w.registers[i] is poison[i] and not flying >> i & 1 for i in item.accumulators):
            c.report(*words.UNSET_ACCUMULATOR, w)


def wgmma(c: ClusterChecks, w: Any, item: Any, register_mask: int, poison: Any) -> None:
    """A warp issues a wgmma: its registers, and the shared memory it will read."""
    agent = w.agent
    attrs = item.operation.attrs
    c.wgmma_registers(w, item, register_mask, poison)
    issue = c.issued(w)
    component, epoch = c.own(agent, "wgmma")
    place = (component, epoch, "wgmma")
    if not attrs["from_registers"]:
        row = 16 * (w.index % 4)
        index = operand_index(
            w.cta, operand.decode_sm90(item.a), 64, 16, bool(attrs["transpose_a"]), row, row + 16
        )
        c.access(issue, w.cta.shadow, index, False, place, "operand A of a wgmma")
    index = operand_index(w.cta, operand.decode_sm90(item.b), attrs["n"], 16, bool(attrs["transpose_b"]))
    c.reach(c.access(issue, w.cta.shadow, index, False, place, "operand B of a wgmma"), w.cta)
    agent.flying_mask |= register_mask
    agent.flying.append((epoch, register_mask))


def wgmma_commit(c: ClusterChecks, w: Any) -> None:
    """A wgmma group is closed."""
    c.close(w.agent, "wgmma")


def wgmma_wait(c: ClusterChecks, w: Any, count: int) -> None:
    """All but ``count`` groups are complete."""
    agent = w.agent
    c.own(agent, "wgmma")
    c.awaited(agent, "wgmma", count)
    done = agent.groups["wgmma"] - count
    agent.flying = [f for f in agent.flying if f[0] > done]
    agent.flying_mask = 0
    for _, mask in agent.flying:
        agent.flying_mask |= mask


# -- tcgen05


def _lanes(first: int, count: int) -> slice:
    return slice(first // TMEM_GROUP, (first + count) // TMEM_GROUP)


def tmem_load(
    c: ClusterChecks, w: Any, column: int, span: int, lane: int, rows: int, register_mask: int
) -> None:
    """``tcgen05.ld``."""
    component, epoch = c.own(w.agent, "tmem.ld")
    index = (slice(column, column + span), _lanes(lane, rows))
    c.access(c.issued(w), w.cta.tmem_shadow, index, False, (component, epoch, "tmem.ld"), "a tcgen05.ld")
    w.agent.loading |= register_mask


def tmem_store(c: ClusterChecks, w: Any, column: int, span: int, lane: int, rows: int) -> None:
    """``tcgen05.st``."""
    component, epoch = c.own(w.agent, "tmem.st")
    index = (slice(column, column + span), _lanes(lane, rows))
    c.access(c.issued(w), w.cta.tmem_shadow, index, True, (component, epoch, "tmem.st"), "a tcgen05.st")


def allocated(c: ClusterChecks, w: Any, cta: Any, first: int, columns: int, group: int) -> None:
    """``tcgen05.alloc``: the columns hold nothing, and others may use them once they are told.

    The allocation of a pair is one act of both CTAs: neither is told about the other's part.
    """
    if group == 1:
        _whole_columns(c, w, cta, first, columns, "tcgen05.alloc")
    cta.tmem_shadow.forget((slice(first, first + columns), slice(None)))


def freed(c: ClusterChecks, w: Any, cta: Any, first: int, columns: int) -> None:
    """``tcgen05.dealloc``: every use must be over."""
    _whole_columns(c, w, cta, first, columns, "tcgen05.dealloc")


def _whole_columns(c: ClusterChecks, w: Any, cta: Any, first: int, columns: int, what: str) -> None:
    agent = w.agent
    issue = c.issued(w)
    np.maximum(
        issue.clock[TMEM], issue.clock[LENIENT], out=issue.clock[TMEM]
    )  # an allocation is no access: no fence needed
    index = (slice(first, first + columns), slice(None))
    c.access(issue, cta.tmem_shadow, index, True, (agent.component, agent.epoch, "warp"), what)


def mma(c: ClusterChecks, w: Any, item: Any) -> None:
    """A ``tcgen05.mma`` of one or two CTAs is issued."""
    d = item.idesc
    issue = c.issued(w)
    component, epoch = c.own(w.agent, "mma")
    place = (component, epoch, "mma")
    ranks = [item.rank] if item.group == 1 else [item.rank, item.rank ^ 1]
    rows, share = d.m // len(ranks), d.n // len(ranks)
    for rank in ranks:
        cta = w.cluster.cta(rank)
        _operands(c, issue, cta, item, rows, share, place)
        index = _accumulator(item, rows, d.n)
        cta.tmem.check(index[0].start, index[0].stop - index[0].start, "accumulator D")
        shadow = cta.tmem_shadow
        if item.accumulate:
            c.access(issue, shadow, index, False, place, "the accumulator of a tcgen05.mma")
        c.reach(c.access(issue, shadow, index, True, place, "the accumulator of a tcgen05.mma"), cta)


def _operands(
    c: ClusterChecks, issue: Issued, cta: Any, item: Any, rows: int, share: int, place: tuple[int, int, str]
) -> None:
    d = item.idesc
    index = operand_index(cta, operand.decode_sm100(item.b), share, 16, d.b_mn_major)
    c.access(issue, cta.shadow, index, False, place, "operand B of a tcgen05.mma")
    if item.from_tmem:
        column = item.a & 0xFFFF
        cta.tmem.check(column, 8, "operand A")
        whole = (slice(column, column + 8), _lanes(item.a >> 16, rows))
        c.access(issue, cta.tmem_shadow, whole, False, place, "operand A (in TMEM) of a tcgen05.mma")
        return
    index = operand_index(cta, operand.decode_sm100(item.a), rows, 16, d.a_mn_major)
    c.access(issue, cta.shadow, index, False, place, "operand A of a tcgen05.mma")


def _accumulator(item: Any, rows: int, n: int) -> tuple[slice, slice]:
    """Columns and lane groups of D (layouts: PTX ISA, tcgen05 data path)."""
    column, lane = item.d & 0xFFFF, item.d >> 16
    if rows == 64 and item.group == 2:
        return slice(column, column + n // 2), slice(0, 8)
    if rows == 64:
        return slice(column, column + n), slice(lane // TMEM_GROUP, 8, 2)
    return slice(column, column + n), slice(0, 8)


def commit(c: ClusterChecks, w: Any, targets: list[Any]) -> tuple[Issued, int, int]:
    """``tcgen05.commit``: what it stands for, to be given to ``completed`` when it arrives."""
    agent = w.agent
    access_epoch = agent.epoch
    issue = c.departed(w)
    epoch = c.close(agent, "mma")
    component, _ = c.own(agent, "mma")
    access = Access(component, epoch, "mma", w, access_epoch, agent.at, words.A_COMMIT)
    for cta in targets:
        c.reach(access, cta)
    return issue, component, epoch
