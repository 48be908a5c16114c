"""TMA loads of tiles by one thread an SM: latency with one in flight, throughput with several.

Where the tiles come from is the walk's choice: a few tiles again and again hit L2, ever new ones come from
HBM, and CTAs that walk together share what they read as attention's query tiles share K and V.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from fa4tune.kernels.micro.base import MicroKernel, Walk, clock
from fa4tune.kernels.micro.wgmma import smem_layout


class BulkCopy(MicroKernel):
    """Loads of one tile shape.

    Args:
        rows, columns: of a tile; ``columns`` is 64 or 128 (one or two boxes of 128 bytes a row).
        depth: loads in flight.
    """

    max_threads = 128

    def __init__(self, rows: int, columns: int, depth: int) -> None:
        self.rows = rows
        self.columns = columns
        self.depth = depth

    @property
    def tile_bytes(self) -> int:
        """Bytes of one load."""
        return self.rows * self.columns * 2

    def prepare(self, mSource: cute.Tensor) -> tuple:
        """Copy atom, its tensor and the ring's layout."""
        ring = smem_layout(self.rows, self.columns, self.depth)
        atom, gSource = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(),
            mSource,
            cute.select(ring, mode=[0, 1]),
            (self.rows, self.columns),
        )
        return atom, gSource, ring

    @cute.jit
    def body(self, mSource: cute.Tensor, host: tuple, iterations: Int32, walk: Walk) -> Any:
        atom, gSource, ring = host
        smem = SmemAllocator()
        full = smem.allocate_array(Int64, self.depth)
        sTiles = smem.allocate_tensor(BFloat16, ring.outer, 1024, swizzle=ring.inner)
        thread, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            with cute.arch.elect_one():
                for stage in range(self.depth):
                    cute.arch.mbarrier_init(full + stage, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        tiles = cute.local_tile(gSource, (self.rows, self.columns), (None, 0))
        shared, source = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(sTiles, 0, 2), cute.group_modes(tiles, 0, 2)
        )
        # the span bounds the walk of the block's first tile as well
        index = (walk.start + block * walk.block_step) % walk.span
        began = clock()
        if warp == 0:
            stage, phase = Int32(0), Int32(0)
            for first in cutlass.range_constexpr(self.depth - 1):
                if first < iterations:
                    self._load(atom, source, shared, full, index, Int32(first))
                    index = self._advance(index, walk)
            for i in cutlass.range(iterations, unroll=1):
                ahead = stage + self.depth - 1
                ahead = ahead - self.depth if ahead >= self.depth else ahead
                if i + self.depth - 1 < iterations:
                    self._load(atom, source, shared, full, index, ahead)
                    index = self._advance(index, walk)
                cute.arch.mbarrier_wait(full + stage, phase)
                stage = stage + 1
                if stage == self.depth:
                    stage = Int32(0)
                    phase = phase ^ 1
        ended = clock()
        cute.arch.sync_threads()
        return began, ended, sTiles[thread % self.rows, 0, 0].to(Float32)

    @cute.jit
    def _advance(self, index: Int32, walk: Walk) -> Int32:
        index = index + walk.step
        return index - walk.span if index >= walk.span else index

    @cute.jit
    def _load(
        self, atom: cute.CopyAtom, source: cute.Tensor, shared: cute.Tensor, full: Any, index: Any, stage: Any
    ) -> None:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, self.tile_bytes)
        cute.copy(atom, source[None, index], shared[None, stage], tma_bar_ptr=full + stage)
