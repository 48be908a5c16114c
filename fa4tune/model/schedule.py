"""How output tiles fall on the CTAs of a GPU: makespan in iterations, and what HBM has to deliver.

Repeats the orders of ``fa4tune/kernels/tile_scheduler.py`` on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush, heapreplace

import numpy as np

from fa4tune.kernels.plan import KernelPlan
from fa4tune.kernels.tiles import Trips, ceil_div

L2_SECTION_BYTES = 50 * 2**20
"""K and V bytes of the heads that the longest-first order keeps together."""

END_TILES = 4
"""Tiles a CTA of which the end of an unsorted schedule is simulated; before them loads are even."""


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


def makespan(
    plan: KernelPlan, trips: tuple[Trips, ...], places: int, overhead: float, masked: float
) -> Makespan:
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
    total = sum(t.total for t in trips) * copies
    total_masked = sum(t.masked for t in trips) * copies
    if trips[0] == trips[-1] and (len(trips) == 1 or trips[0] == trips[len(trips) // 2]):
        waves = ceil_div(tiles, places)
        return Makespan(waves, waves * trips[0].total, waves * trips[0].masked, tiles / (waves * places))
    section = max(1, L2_SECTION_BYTES // max(1, problem.seqlen_k * _key_bytes(plan))) * problem.gqa_group
    # The order of events hardly moves with the overhead: quarters of an iteration suffice.
    worst = _last(
        tuple((t.total, t.masked) for t in trips),
        copies,
        places,
        plan.scheduler == "persistent",
        longest_first(plan),
        max(1, section // plan.packed_heads),
        round(overhead * 4),
        round(masked * 4),
    )
    cost = total + tiles * overhead + total_masked * masked
    mine = worst[1] + worst[0] * overhead + worst[2] * masked
    return Makespan(worst[0], worst[1], worst[2], min(1.0, cost / (mine * places)))


def _key_bytes(plan: KernelPlan) -> int:
    return (plan.problem.head_dim + plan.problem.head_dim_v) * plan.problem.element_bytes


@lru_cache(maxsize=8192)
def _last(
    trips: tuple[tuple[int, int], ...],
    copies: int,
    places: int,
    persistent: bool,
    longest_first: bool,
    section: int,
    overhead: int,
    masked: int,
) -> tuple[float, float, float]:
    """(tiles, iterations, masked iterations) of the place that finishes last; costs in quarters."""
    jobs = [(4 * total + overhead + masked * hidden, total, hidden) for total, hidden in trips]
    unit = section if longest_first else 1  # copies that leave the order of the others as it is
    before = max(0, copies // unit - ceil_div(PLAYED_TILES * places, unit * len(jobs))) * unit
    if persistent:
        tiles, iterations, hidden = _static(jobs, copies - before, places, longest_first, section)
    elif longest_first:
        tiles, iterations, hidden = _greedy_runs(jobs, copies - before, places, section)
    else:
        tiles, iterations, hidden = _greedy(jobs, copies - before, places)
    even = before / places
    return (
        tiles + even * len(jobs),
        iterations + even * sum(job[1] for job in jobs),
        hidden + even * sum(job[2] for job in jobs),
    )


def _static(
    jobs: list[tuple[int, int, int]], copies: int, places: int, longest_first: bool, section: int
) -> tuple[float, float, float]:
    """A static grid: wave after wave, every other one backwards."""
    table = np.array(jobs)
    if longest_first:
        blocks = np.arange(len(jobs) - 1, -1, -1)
        whole, rest = divmod(copies, section)
        order = np.tile(np.repeat(blocks, section), whole)
        if rest:
            order = np.concatenate([order, np.repeat(blocks, rest)])
    else:
        order = np.tile(np.arange(len(jobs)), copies)
    waves = ceil_div(len(order), places)
    grid = np.full(waves * places, -1)
    grid[: len(order)] = order
    board = grid.reshape(waves, places)
    board[1::2] = board[1::2, ::-1]
    loads = np.where(board >= 0, table[board, 0], 0).sum(axis=0)
    mine = board[:, int(loads.argmax())]
    mine = mine[mine >= 0]
    return len(mine), int(table[mine, 1].sum()), int(table[mine, 2].sum())


def _greedy_runs(
    jobs: list[tuple[int, int, int]], copies: int, places: int, section: int
) -> tuple[float, float, float]:
    """Longest first to whoever is free: runs of equal tiles, dealt to groups of equally loaded places."""
    levels = [(0, 0, 0, 0, places)]
    for first in range(0, copies, section):
        equal = min(copies, first + section) - first
        for cost, total, hidden in reversed(jobs):
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
    _, tiles, iterations, masks, _ = max(levels)
    return tiles, iterations, masks


def _greedy(jobs: list[tuple[int, int, int]], copies: int, places: int) -> tuple[float, float, float]:
    """In the order of rows to whoever is free; the last few tiles of each place decide who is last."""
    tiles = len(jobs) * copies
    simulated = min(tiles, END_TILES * places)
    before = tiles - simulated
    heap = [(0, 0, 0, 0)] * places
    for index in range(before, tiles):
        cost, total, hidden = jobs[index % len(jobs)]
        load, count, iterations, masks = heap[0]
        heapreplace(heap, (load + cost, count + 1, iterations + total, masks + hidden))
    _, count, iterations, masks = max(heap)
    whole, rest = divmod(before, len(jobs))
    even = [sum(job[i] for job in jobs) * whole + sum(job[i] for job in jobs[:rest]) for i in (1, 2)]
    return count + before / places, iterations + even[0] / places, masks + even[1] / places


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
