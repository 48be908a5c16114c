"""How each role of a Blackwell forward kernel walks the output tiles of its CTA or CTA pair."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from fa4tune.kernels.plan import KernelPlan
from fa4tune.kernels.sm100.device import block_index
from fa4tune.kernels.tile_scheduler import (
    TileShape,
    decode_tile,
    is_valid,
    persistent_index,
    tile_count,
)


class Tile(NamedTuple):
    """An output tile: query block, packed head group, sequence; its K/V tiles, the clear ones last."""

    m_block: Any
    head: Any
    batch: Any
    blocks: Any
    clear: Any


class Walk(NamedTuple):
    """What a role needs to find its tiles: extents, lengths, its CTA (pair) of how many, its rank in a pair.

    ``group`` counts packed head groups of a key/value head.
    """

    tiles: TileShape
    seqlen_q: Any
    seqlen_k: Any
    group: Any
    worker: Any
    workers: Any
    rank: Any


class TileWalk:
    """Output tiles of ``plan`` on the device; all that its methods branch on is known at compile time."""

    def __init__(self, plan: KernelPlan) -> None:
        self.plan = plan
        self.packed = plan.packed_heads
        self.causal = plan.problem.mask_kind == "causal"
        self.persistent = plan.scheduler == "persistent"
        self.pair = plan.ctas_per_tile == 2

    @cute.jit
    def walk(self, call: tuple) -> Walk:
        """Read anew by each role: values that all roles share would hold registers in each of them."""
        tiles, seqlen_q, seqlen_k, group = call
        rank, block, grid = Int32(0), block_index(), cute.arch.grid_dim()[0]
        if const_expr(self.pair):
            rank, block, grid = block & 1, block >> 1, grid >> 1
        return Walk(tiles, seqlen_q, seqlen_k, group, block, grid, rank)

    @cute.jit
    def tile(self, index: Int32, walk: Walk) -> Tile:
        """Output tile ``index``; one that sees no key still goes through one (masked) K/V tile."""
        tile_n, rows = self.plan.tile_n, self.plan.tile_rows
        m_block, head, batch = decode_tile(index, walk.tiles, self.plan.scheduler == "lpt")
        end, clear = walk.seqlen_k, walk.seqlen_k
        if const_expr(self.causal):
            shift = walk.seqlen_k - walk.seqlen_q
            first_row = m_block * rows // self.packed
            last_row = cutlass.min(walk.seqlen_q - 1, ((m_block + 1) * rows - 1) // self.packed)
            end = cutlass.min(end, last_row + shift + 1)
            clear = cutlass.max(cutlass.min(clear, first_row + shift + 1), 0)
        blocks = cutlass.max(cute.ceil_div(end, tile_n), 1)
        return Tile(m_block, head, batch, blocks, cutlass.min(clear // tile_n, blocks))

    @cute.jit
    def next_tile(self, wave: Int32, index: Int32, walk: Walk) -> tuple[Int32, Int32, Boolean]:
        """(wave, index, whether there is one) of the role's next output tile."""
        working = Boolean(False)
        if const_expr(self.persistent):
            wave += 1
            index = persistent_index(wave, walk.worker, walk.workers)
            working = is_valid(index, tile_count(walk.tiles))
        return wave, index, working
