"""How output tiles fall on the CTAs of a GPU: makespan in iterations, and what HBM has to deliver.

Repeats the orders of ``fa4tune/kernels/tile_scheduler.py`` on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from heapq import heapreplace

from fa4tune.kernels.plan import KernelPlan
from fa4tune.kernels.tiles import Trips, ceil_div

L2_SECTION_BYTES = 50 * 2**20
"""K and V bytes of the heads that the longest-first order keeps together."""

SIMULATED_TILES = 40_000
"""Above this many unequal tiles the end effect is taken as half a longest tile."""


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
    if tiles > SIMULATED_TILES:
        longest = max(t.total for t in trips)
        end = 0.5 * longest if plan.scheduler != "lpt" else 0.5 * min(t.total for t in trips)
        share = 1.0 / places
        iterations = total * share + end
        return Makespan(tiles * share, iterations, total_masked * share, total * share / iterations)
    section = max(1, L2_SECTION_BYTES // max(1, problem.seqlen_k * _key_bytes(plan))) * problem.gqa_group
    # The order of events hardly moves with the overhead: eighths of an iteration suffice.
    worst = _last(
        tuple((t.total, t.masked) for t in trips),
        copies,
        places,
        plan.scheduler == "persistent",
        plan.scheduler == "lpt" or bool(plan.constants.get("longest_first")),
        max(1, section // plan.packed_heads),
        round(overhead * 8),
        round(masked * 8),
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
) -> tuple[int, int, int]:
    """(tiles, iterations, masked iterations) of the place that finishes last; costs in eighths."""
    costs = [8 * total + overhead + masked * hidden for total, hidden in trips]
    blocks = len(trips)
    if longest_first:
        order = [
            block
            for first in range(0, copies, section)
            for block in range(blocks - 1, -1, -1)
            for _ in range(first, min(copies, first + section))
        ]
    else:
        order = list(range(blocks)) * copies
    loads = [0] * places
    done: list[list[int]] = [[] for _ in range(places)]
    if persistent:
        for index, block in enumerate(order):
            wave, place = divmod(index, places)
            place = place if wave % 2 == 0 else places - 1 - place
            loads[place] += costs[block]
            done[place].append(block)
        last = max(range(places), key=loads.__getitem__)
        mine = done[last]
    else:
        heap = [(0, place) for place in range(places)]
        for block in order:
            load, place = heap[0]
            done[place].append(block)
            heapreplace(heap, (load + costs[block], place))
        mine = done[max(heap)[1]]
    return len(mine), sum(trips[b][0] for b in mine), sum(trips[b][1] for b in mine)


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
