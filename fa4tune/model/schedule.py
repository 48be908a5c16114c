"""How output tiles fall on the CTAs of a GPU: makespan in iterations, and what HBM has to deliver.

Repeats the orders of ``fa4tune/kernels/tile_scheduler.py`` on the host.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush, heapreplace

import numpy as np
from numpy.typing import NDArray

from fa4tune.kernels.plan import KernelPlan
from fa4tune.kernels.tiles import HeadTrips, ceil_div

L2_SECTION_BYTES = 50 * 2**20
"""K and V bytes of the heads that the longest-first order keeps together."""

END_TILES = 4
"""Tiles a CTA of which the end of an unsorted schedule is simulated; before them loads are even."""

FEW_EQUAL = 4
"""Heads a section below which tiles are dealt one by one: too few are alike for groups to pay."""

PLAYED_TILES = 256
"""Tiles a CTA up to which a schedule is played whole; of a longer one the end, loads before it being even."""


@dataclass(frozen=True, slots=True)
class Makespan:
    """What the last CTA to finish does: ``tiles``, ``iterations`` and the masked ones among them.

    ``busy`` is the mean CTA's work over this one's.
    """

    tiles: float
    iterations: float
    masked: float
    busy: float


def workers(plan: KernelPlan, sm_count: int) -> int:
    """Tiles in flight on the whole GPU."""
    return max(1, sm_count // plan.ctas_per_tile) * plan.resources.ctas_per_sm


def makespan(plan: KernelPlan, trips: HeadTrips, places: int, overhead: float, masked: float) -> Makespan:
    """The CTA that finishes last.

    Args:
        plan: the kernel.
        trips: iterations of each tile of a head, by row block.
        places: CTAs (or pairs) that run at once.
        overhead: a tile's cost beside its iterations, in iterations.
        masked: extra cost of a masked iteration, in iterations.
    """
    problem = plan.problem
    copies = problem.batch * (problem.heads // plan.packed_heads)
    tiles = len(trips) * copies
    if trips.uniform:
        waves = ceil_div(tiles, places)
        each = trips[0]
        return Makespan(waves, waves * each.total, waves * each.masked, tiles / (waves * places))
    section = max(1, L2_SECTION_BYTES // max(1, problem.seqlen_k * _key_bytes(plan))) * problem.gqa_group
    # The order of events hardly moves with the overhead: quarters of an iteration suffice.
    worst = _last(
        trips,
        copies,
        places,
        plan.scheduler == "persistent",
        longest_first(plan),
        max(1, section // plan.packed_heads),
        round(overhead * 4),
        round(masked * 4),
    )
    cost = (trips.total + len(trips) * overhead + trips.masked * masked) * copies
    mine = worst[1] + worst[0] * overhead + worst[2] * masked
    return Makespan(worst[0], worst[1], worst[2], min(1.0, cost / (mine * places)))


def _key_bytes(plan: KernelPlan) -> int:
    return (plan.problem.head_dim + plan.problem.head_dim_v) * plan.problem.element_bytes


@lru_cache(maxsize=8192)
def _last(
    trips: HeadTrips,
    copies: int,
    places: int,
    persistent: bool,
    longest_first: bool,
    section: int,
    overhead: int,
    masked: int,
) -> tuple[float, float, float]:
    """(tiles, iterations, masked iterations) of the place that finishes last; costs in quarters."""
    ones = np.ones_like(trips.totals)
    # a row a tile: what it costs, and what it counts for
    jobs = np.stack(
        [4 * trips.totals + overhead + masked * trips.masks, ones, trips.totals, trips.masks], axis=1
    )
    unit = section if longest_first else 1  # copies that leave the order of the others as it is
    before = max(0, copies // unit - ceil_div(PLAYED_TILES * places, unit * len(jobs))) * unit
    if persistent:
        found = _static(jobs, copies - before, places, longest_first, section)
    elif longest_first:
        found = _greedy_runs(jobs, copies - before, places, section)
    else:
        found = _greedy(jobs, copies - before, places)
    even = before / places
    return (
        found[0] + even * len(trips),
        found[1] + even * trips.total,
        found[2] + even * trips.masked,
    )


Jobs = NDArray[np.int64]
"""(tiles, 4): cost, 1, iterations and masked iterations of each tile of a head."""

Sections = list[tuple[list[list[int]], int]]
"""Of each section of heads: the jobs of a head, and how many heads it has."""


def _static(
    jobs: Jobs, copies: int, places: int, longest_first: bool, section: int
) -> tuple[float, float, float]:
    """A static grid: wave after wave, every other one backwards."""
    even = np.zeros(4, np.int64)
    if longest_first:
        parts = []
        whole, rest = divmod(copies, section)
        # two waves, there and back, of equal tiles give every place two of them and change nothing else
        for heads, times in ((section, whole), (rest, 1)):
            pairs, left = divmod(heads, 2 * places)
            even += 2 * pairs * times * jobs.sum(axis=0)
            parts.append(np.tile(np.repeat(np.arange(len(jobs) - 1, -1, -1), left), times))
        order = np.concatenate(parts)
    else:
        order = np.tile(np.arange(len(jobs)), copies)
    waves = ceil_div(len(order), places)
    grid = np.full(waves * places, -1)
    grid[: len(order)] = order
    board = grid.reshape(waves, places)
    board[1::2] = board[1::2, ::-1]
    loads = np.where(board >= 0, jobs[board, 0], 0).sum(axis=0)
    mine = board[:, int(loads.argmax())]
    _, tiles, iterations, masks = (jobs[mine[mine >= 0]].sum(axis=0) + even).tolist()
    return tiles, iterations, masks


def _greedy_runs(jobs: Jobs, copies: int, places: int, section: int) -> tuple[float, float, float]:
    """Longest first to whoever is free: runs of equal tiles, one after the other."""
    left_out = max(0, len(jobs) * copies - PLAYED_TILES * places)
    even = np.zeros(4, np.int64)
    sections = []
    for first in range(0, copies, section):
        equal = min(copies, first + section) - first
        played = len(jobs) - min(len(jobs), left_out // equal)
        left_out = left_out - len(jobs) * equal if not played else 0
        even += jobs[played:].sum(axis=0) * equal
        sections.append((jobs[:played].tolist(), equal))
    deal = _dealt_by_tile if section < FEW_EQUAL else _dealt_by_level
    _, tiles, iterations, masks = deal(sections, places)
    _, *each = (even / places).tolist()
    return tiles + each[0], iterations + each[1], masks + each[2]


def _dealt_by_tile(sections: Sections, places: int) -> tuple[int, ...]:
    """(load, tiles, iterations, masked iterations) of the most loaded place."""
    order = (job for jobs, equal in sections for job in reversed(jobs) for _ in range(equal))
    return _dealt(order, places)


def _dealt_by_level(sections: Sections, places: int) -> tuple[int, ...]:
    """The same for groups of equally loaded places at once."""
    levels = [(0, 0, 0, 0, places)]
    for jobs, equal in sections:
        for cost, _, total, hidden in reversed(jobs):
            left = equal
            while left:
                load, tiles, iterations, masks, count = heappop(levels)
                while levels and levels[0][:4] == (load, tiles, iterations, masks):
                    count += heappop(levels)[4]
                taken = min(left, count)
                if taken < count:
                    heappush(levels, (load, tiles, iterations, masks, count - taken))
                heappush(levels, (load + cost, tiles + 1, iterations + total, masks + hidden, taken))
                left -= taken
    return max(levels)[:4]


def _greedy(jobs: Jobs, copies: int, places: int) -> tuple[float, float, float]:
    """In the order of rows to whoever is free; the last few tiles of each place decide who is last."""
    tiles = len(jobs) * copies
    before = max(0, tiles - END_TILES * places)
    _, count, iterations, masks = _dealt(jobs[np.arange(before, tiles) % len(jobs)].tolist(), places)
    whole, rest = divmod(before, len(jobs))
    even = (jobs.sum(axis=0) * whole + jobs[:rest].sum(axis=0)).tolist()
    return count + before / places, iterations + even[2] / places, masks + even[3] / places


def _dealt(jobs: Iterable[list[int]], places: int) -> tuple[int, ...]:
    """The most loaded place when each of ``jobs``, in their order, goes to the least loaded one."""
    heap = [(0, 0, 0, 0)] * places
    for cost, _, total, hidden in jobs:
        load, count, iterations, masks = heap[0]
        heapreplace(heap, (load + cost, count + 1, iterations + total, masks + hidden))
    return max(heap)


def longest_first(plan: KernelPlan) -> bool:
    """Whether the longest tiles of many heads come before the next ones."""
    return plan.scheduler == "lpt" or bool(plan.constants.get("longest_first"))


def first_touch(plan: KernelPlan, places: int) -> tuple[int, float]:
    """Tiles that bring the keys and values of their heads from HBM, and the bytes that each of them moves.

    In a longest-first order the first tiles of a section of heads are those of different heads. Where a
    section has more heads than CTAs run at once, these tiles read all keys and values from HBM, and the later
    ones find them in L2; elsewhere CTAs that run together share what they read, and none is counted.
    """
    problem = plan.problem
    heads = problem.batch * (problem.heads // plan.packed_heads)
    one = problem.seqlen_k * _key_bytes(plan)
    group = problem.gqa_group // plan.packed_heads
    section = min(heads, max(1, L2_SECTION_BYTES // max(1, one)) * group)
    if section < places:
        return 0, 0.0
    return heads, one / group + plan.tile_rows * (_key_bytes(plan) + 4)


def hbm_bytes(plan: KernelPlan, places: int, l2_bytes: int) -> float:
    """Bytes that HBM moves: q, k, v, out and LSE once, K and V again where L2 cannot hold what is in use.

    CTAs that run together on one head read its K and V at about the same time, once for all of them. A head
    with more tiles than CTAs needs several rounds; each reads K and V anew unless the heads in use fit in L2.
    """
    problem = plan.problem
    blocks = ceil_div(problem.seqlen_q * plan.packed_heads, plan.tile_rows)
    one = problem.seqlen_k * _key_bytes(plan)
    sharing = problem.gqa_group // plan.packed_heads
    together = max(1, min(problem.batch * problem.kv_heads, ceil_div(places, blocks * sharing)))
    rounds = ceil_div(blocks * sharing, places)
    all_once = problem.compulsory_bytes()
    if plan.scheduler == "lpt":
        # a section of heads is worked on from end to end before the next
        together = max(
            together, min(problem.batch * problem.kv_heads, max(1, L2_SECTION_BYTES // max(1, one)))
        )
        rounds = ceil_div(blocks * sharing * together, places)
    if rounds <= 1 or together * one <= l2_bytes:
        return float(all_once)
    return all_once + (rounds - 1) * problem.batch * problem.kv_heads * one
