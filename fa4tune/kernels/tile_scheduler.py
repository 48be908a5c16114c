"""Which output tile a CTA works on next: block index and iteration to (m_block, head, batch).

Orders: ``single`` and ``persistent`` walk the query blocks of a head before the next head, so that CTAs that
run together share K and V in L2. ``lpt`` puts the longest tiles first (query blocks in reverse, for masks
that give late rows more keys), over as many heads at a time as fit in L2
(FlashAttention-4, arXiv 2603.05451, section 3.3). A static persistent grid goes through that order in waves,
every other wave backwards, which evens out what a CTA gets when tiles differ in length.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

L2_BYTES = 50 * 2**20
"""K and V bytes that one section of heads may take: what stays in the L2 of H100 to B300."""


class TileShape(NamedTuple):
    """Extents of the tile space; all Int32 on the device."""

    m_blocks: Any
    heads: Any
    batch: Any
    heads_per_section: Any


def tile_shape(
    seqlen_q: Int32, tile_m: int, heads: Int32, batch: Int32, group: Int32, seqlen_k: Int32, row_bytes: int
) -> TileShape:
    """Extents for a call.

    Args:
        seqlen_q: query rows of a sequence.
        tile_m: rows of a tile.
        heads: query heads.
        batch: sequences.
        group: query heads of a key/value head.
        seqlen_k: keys.
        row_bytes: bytes of one key row and one value row together.
    """
    kv_heads = cutlass.max(L2_BYTES // cutlass.max(seqlen_k * row_bytes, 1), 1)
    return TileShape(cute.ceil_div(seqlen_q, tile_m), heads, batch, kv_heads * group)


@cute.jit
def tile_count(shape: TileShape) -> Int32:
    """Tiles of the whole call."""
    return shape.m_blocks * shape.heads * shape.batch


@cute.jit
def decode_tile(
    index: Int32, shape: TileShape, longest_first: cutlass.Constexpr[bool]
) -> tuple[Int32, Int32, Int32]:
    """(m_block, head, batch) of the ``index``-th tile of the order."""
    if const_expr(longest_first):
        all_heads = shape.heads * shape.batch
        section_tiles = shape.heads_per_section * shape.m_blocks
        section = index // section_tiles
        rest = index - section * section_tiles
        first_head = section * shape.heads_per_section
        heads_here = cutlass.min(shape.heads_per_section, all_heads - first_head)
        m_rank = rest // heads_here
        flat_head = first_head + rest - m_rank * heads_here
        m_block = shape.m_blocks - 1 - m_rank
    else:
        flat_head = index // shape.m_blocks
        m_block = index - flat_head * shape.m_blocks
    batch = flat_head // shape.heads
    return m_block, flat_head - batch * shape.heads, batch


@cute.jit
def persistent_index(wave: Int32, block: Int32, grid: Int32) -> Int32:
    """Tile of a CTA in a wave: forwards in even waves, backwards in odd ones."""
    place = block if wave % 2 == 0 else grid - 1 - block
    return wave * grid + place


@cute.jit
def is_valid(index: Int32, tiles: Int32) -> Boolean:
    """Whether the tile exists."""
    return index < tiles
