"""How a problem falls into work tiles and K/V iterations; kernels repeat this arithmetic on the device."""

from __future__ import annotations

from dataclasses import dataclass

from fa4tune.problem import AttentionProblem


def ceil_div(a: int, b: int) -> int:
    """``a / b`` rounded up."""
    return -(-a // b)


@dataclass(frozen=True, slots=True)
class Trips:
    """K/V iterations of one output tile: ``total`` of which ``masked`` apply the mask or the length limit."""

    total: int
    masked: int


def tile_trips(
    problem: AttentionProblem, tile_rows: int, tile_n: int, m_block: int, packed_heads: int = 1
) -> Trips:
    """Iterations of output tile ``m_block``.

    ``tile_rows`` counts packed rows: with ``packed_heads`` query heads of a group packed, ``packed_heads``
    rows share one query position. A tile whose rows see no key has no iteration.
    """
    first_row = m_block * tile_rows // packed_heads
    last_row = min(problem.seqlen_q - 1, ((m_block + 1) * tile_rows - 1) // packed_heads)
    shift = problem.seqlen_k - problem.seqlen_q
    left, right = problem.window
    end = problem.seqlen_k if right is None else min(problem.seqlen_k, last_row + shift + right + 1)
    start = 0 if left is None else max(0, first_row + shift - left)
    if end <= start:
        return Trips(0, 0)
    first_block, end_block = start // tile_n, ceil_div(end, tile_n)
    # A block needs no mask when every row of the tile sees all of it.
    clear_end = problem.seqlen_k if right is None else min(problem.seqlen_k, first_row + shift + right + 1)
    clear_start = 0 if left is None else max(0, last_row + shift - left)
    first_clear, end_clear = ceil_div(clear_start, tile_n), max(0, clear_end) // tile_n
    clear = max(0, min(end_clear, end_block) - max(first_clear, first_block))
    total = end_block - first_block
    return Trips(total, total - clear)


def m_blocks(problem: AttentionProblem, tile_rows: int, packed_heads: int = 1) -> int:
    """Output tiles along the queries of one (packed) head of one sequence."""
    return ceil_div(problem.seqlen_q * packed_heads, tile_rows)


def work_tiles(problem: AttentionProblem, tile_rows: int, packed_heads: int = 1) -> int:
    """Output tiles of the whole problem."""
    return m_blocks(problem, tile_rows, packed_heads) * (problem.heads // packed_heads) * problem.batch
