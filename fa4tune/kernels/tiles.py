"""How a problem falls into work tiles and K/V iterations; kernels repeat this arithmetic on the device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fa4tune.problem import AttentionProblem


def ceil_div(a: int, b: int) -> int:
    """``a / b`` rounded up."""
    return -(-a // b)


@dataclass(frozen=True, slots=True)
class Trips:
    """K/V iterations of one output tile: ``total`` of which ``masked`` apply the mask or the length limit."""

    total: int
    masked: int


class HeadTrips:
    """K/V iterations of every output tile of a head, in order of rows.

    Immutable and hashable, so that caches may know it by value. Arrays, because a head of millions of rows
    has tens of thousands of tiles.

    Attributes:
        totals: int64 (tiles,), iterations of each tile.
        masks: int64 (tiles,), those among them that apply the mask or the length limit.
        total, masked: their sums.
        uniform: whether all tiles are alike.
    """

    __slots__ = ("_hash", "masked", "masks", "total", "totals", "uniform")

    def __init__(self, totals: NDArray[np.int64], masks: NDArray[np.int64]) -> None:
        self.totals, self.masks = totals, masks
        self.totals.flags.writeable = self.masks.flags.writeable = False
        self.total, self.masked = int(totals.sum()), int(masks.sum())
        self.uniform = bool((totals == totals[0]).all() and (masks == masks[0]).all())
        self._hash = hash((len(totals), self.total, self.masked))

    def __len__(self) -> int:
        return len(self.totals)

    def __getitem__(self, tile: int) -> Trips:
        return Trips(int(self.totals[tile]), int(self.masks[tile]))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HeadTrips):
            return NotImplemented
        return self is other or (
            self._hash == other._hash
            and np.array_equal(self.totals, other.totals)
            and np.array_equal(self.masks, other.masks)
        )

    @property
    def longest(self) -> int:
        """Iterations of the longest tile."""
        return int(self.totals.max())

    def masked_at_least(self, least: int) -> HeadTrips:
        """The same where the first ``least`` iterations of a tile run masked code in any case."""
        if not least:
            return self
        return HeadTrips(self.totals, np.maximum(self.masks, np.minimum(least, self.totals)))


@lru_cache(maxsize=4096)
def tile_trips(
    problem: AttentionProblem, tile_rows: int, tile_n: int, packed_heads: int = 1, least: int = 0
) -> HeadTrips:
    """Iterations of the output tiles of one (packed) head.

    ``tile_rows`` counts packed rows: with ``packed_heads`` query heads of a group packed, ``packed_heads``
    rows share one query position. A tile whose rows see no key has no iteration. A kernel takes its masked
    code for the first ``least`` iterations in any case.
    """
    count = m_blocks(problem, tile_rows, packed_heads)
    # without a mask all tiles are as the first one is
    tile = np.arange(1 if problem.mask == "full" else count, dtype=np.int64)
    first_row = tile * tile_rows // packed_heads
    last_row = np.minimum(problem.seqlen_q - 1, ((tile + 1) * tile_rows - 1) // packed_heads)
    keys, shift = problem.seqlen_k, problem.seqlen_k - problem.seqlen_q
    left, right = problem.window

    def keys_before(row: NDArray[np.int64]) -> NDArray[np.int64]:
        """Keys up to the last that ``row`` sees; below 0 where it sees none."""
        return np.full_like(row, keys) if right is None else np.minimum(keys, row + shift + right + 1)

    def keys_left_out(row: NDArray[np.int64]) -> NDArray[np.int64]:
        """Keys before the first that ``row`` sees."""
        return np.zeros_like(row) if left is None else np.maximum(0, row + shift - left)

    start, end = keys_left_out(first_row), keys_before(last_row)
    first_block, end_block = start // tile_n, -(-end // tile_n)
    # A block needs no mask when every row of the tile sees all of it.
    first_clear = -(-keys_left_out(last_row) // tile_n)
    end_clear = np.maximum(0, keys_before(first_row)) // tile_n
    clear = np.maximum(0, np.minimum(end_clear, end_block) - np.maximum(first_clear, first_block))
    totals = np.where(end > start, end_block - first_block, 0)
    masks = np.where(end > start, totals - clear, 0)
    trips = HeadTrips(totals, masks).masked_at_least(least)
    if len(tile) == count:
        return trips
    return HeadTrips(np.broadcast_to(trips.totals, count), np.broadcast_to(trips.masks, count))


def m_blocks(problem: AttentionProblem, tile_rows: int, packed_heads: int = 1) -> int:
    """Output tiles along the queries of one (packed) head of one sequence."""
    return ceil_div(problem.seqlen_q * packed_heads, tile_rows)


def work_tiles(problem: AttentionProblem, tile_rows: int, packed_heads: int = 1) -> int:
    """Output tiles of the whole problem."""
    return m_blocks(problem, tile_rows, packed_heads) * (problem.heads // packed_heads) * problem.batch
