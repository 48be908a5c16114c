"""Attention forward for Hopper (``sm_90a``): TMA loads, a K ring and a V ring, wgmma, warp specialisation.

A CTA holds ``tile_m`` query rows, 64 for each MMA warpgroup, and walks the key blocks from the last one down.
The MMA warpgroups come first, the producer warpgroup last. Blocks that cross the mask or the end of the keys
run in a loop of their own; a warpgroup passes over blocks that none of its own rows see.

Register layout of a 64-row wgmma accumulator: register ``i`` of thread ``t`` holds row
``16 * (t / 32 % 4) + t % 32 / 4 + 8 * (i / 2 % 2)`` and column ``8 * (i / 4) + 2 * (t % 4) + i % 2``. Eight
consecutive registers are exactly the A fragment of a K=16 step, so P needs no data movement before PV.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from cutlass.utils import LayoutEnum, SmemAllocator

from fa4tune.kernels import softmax
from fa4tune.kernels.exp2_device import pack_pair, stay_below
from fa4tune.kernels.mask import mask_from_column
from fa4tune.kernels.tile_scheduler import (
    TileShape,
    decode_tile,
    is_valid,
    persistent_index,
    tile_count,
    tile_shape,
)

WARPGROUP = 128


class Ring(NamedTuple):
    """Position in a ring of stages and the parity that a consumer waits for there."""

    stage: Any
    phase: Any


class ForwardSm90:
    """One kernel: everything in ``plan`` and ``dtype`` is compiled in, lengths and strides are arguments."""

    def __init__(self, spec: Any) -> None:
        self.spec = spec
        self.dtype = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}[spec.dtype]
        self.warpgroups = spec.tile_m // 64
        self.mma_threads = self.warpgroups * WARPGROUP
        n = spec.tile_n
        # (register, column) of the two rows a thread holds, columns before its own offset 2 * (t % 4)
        elements = [(i, 8 * (i // 4) + i % 2) for i in range(n // 2)]
        self.row_elements = tuple(tuple(e for e in elements if (e[0] // 2) % 2 == row) for row in (0, 1))

    # ------------------------------------------------------------------ host

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        softmax_scale: Float32,
        sm_count: Int32,
        stream: cuda.CUstream,
    ) -> None:
        spec = self.spec
        # (batch, seqlen, heads, d) -> (seqlen, d, heads, batch)
        mQ, mK, mV, mO = (
            cute.make_tensor(t.iterator, cute.select(t.layout, mode=[1, 3, 2, 0])) for t in (mQ, mK, mV, mO)
        )
        dtype = self.dtype
        qk_mma = sm90.make_trivial_tiled_mma(
            dtype,
            dtype,
            warpgroup.OperandMajorMode.K,
            warpgroup.OperandMajorMode.K,
            Float32,
            atom_layout_mnk=(1, 1, 1),
            tiler_mn=(64, spec.tile_n),
        )
        pv_mma = sm90.make_trivial_tiled_mma(
            dtype,
            dtype,
            warpgroup.OperandMajorMode.K,
            warpgroup.OperandMajorMode.MN,
            Float32,
            atom_layout_mnk=(1, 1, 1),
            tiler_mn=(64, spec.head_dim_v),
            a_source=warpgroup.OperandSource.RMEM if spec.p_in_registers else warpgroup.OperandSource.SMEM,
        )
        q_layout = self._smem_layout(64, spec.head_dim, self.warpgroups)
        k_layout = self._smem_layout(spec.tile_n, spec.head_dim, spec.kv_stages)
        v_layout = self._smem_layout(spec.tile_n, spec.head_dim_v, spec.kv_stages)
        o_layout = self._smem_layout(64, spec.head_dim_v, self.warpgroups)
        p_layout = self._smem_layout(64, spec.tile_n, self.warpgroups)

        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        one = lambda layout: cute.select(layout, mode=[0, 1])  # noqa: E731
        tma_q, gQ = cpasync.make_tiled_tma_atom(load, mQ, one(q_layout), (64, spec.head_dim))
        tma_k, gK = cpasync.make_tiled_tma_atom(load, mK, one(k_layout), (spec.tile_n, spec.head_dim))
        tma_v, gV = cpasync.make_tiled_tma_atom(load, mV, one(v_layout), (spec.tile_n, spec.head_dim_v))
        tma_o, gO = cpasync.make_tiled_tma_atom(store, mO, one(o_layout), (64, spec.head_dim_v))

        seqlen_q, seqlen_k = Int32(mQ.shape[0]), Int32(mK.shape[0])
        heads, kv_heads, batch = Int32(mQ.shape[2]), Int32(mK.shape[2]), Int32(mQ.shape[3])
        group = heads // kv_heads
        tiles = tile_shape(
            seqlen_q,
            spec.tile_m,
            heads,
            batch,
            group,
            seqlen_k,
            (spec.head_dim + spec.head_dim_v) * dtype.width // 8,
        )
        grid = tile_count(tiles)
        if const_expr(spec.scheduler == "persistent"):
            grid = cutlass.min(grid, sm_count * spec.ctas_per_sm)
        self.kernel(
            qk_mma,
            pv_mma,
            (tma_q, tma_k, tma_v, tma_o),
            (gQ, gK, gV, gO),
            mLSE,
            (q_layout, k_layout, v_layout, o_layout, p_layout),
            tiles,
            (seqlen_q, seqlen_k, group),
            softmax_scale * Float32(softmax.LOG2_E),
        ).launch(
            grid=[grid, 1, 1],
            block=[self.mma_threads + WARPGROUP, 1, 1],
            stream=stream,
            min_blocks_per_mp=spec.ctas_per_sm,
            preferred_smem_carveout=100,
        )

    def _smem_layout(self, rows: int, columns: int, stages: int) -> Any:
        """(rows, columns, stages), columns contiguous and swizzled as TMA and wgmma want them."""
        kind = sm90.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, self.dtype, columns)
        atom = warpgroup.make_smem_layout_atom(kind, self.dtype)
        return cute.tile_to_shape(atom, (rows, columns, stages), order=(0, 1, 2))

    # ------------------------------------------------------------------ device

    @cute.kernel
    def kernel(
        self,
        qk_mma: cute.TiledMma,
        pv_mma: cute.TiledMma,
        tma: tuple,
        gmem: tuple,
        mLSE: cute.Tensor,
        layouts: tuple,
        tiles: TileShape,
        lengths: tuple,
        scale_log2: Float32,
    ) -> None:
        spec = self.spec
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_index == 0:
            for atom in tma:
                cpasync.prefetch_descriptor(atom)

        smem = SmemAllocator()
        q_layout, k_layout, v_layout, o_layout, p_layout = layouts
        bars = {
            name: smem.allocate_array(cutlass.Int64, stages)
            for name, stages in (
                ("q_full", self.warpgroups),
                ("q_empty", self.warpgroups),
                ("k_full", spec.kv_stages),
                ("k_empty", spec.kv_stages),
                ("v_full", spec.kv_stages),
                ("v_empty", spec.kv_stages),
            )
        }
        sQ = smem.allocate_tensor(self.dtype, q_layout.outer, 1024, swizzle=q_layout.inner)
        sK = smem.allocate_tensor(self.dtype, k_layout.outer, 1024, swizzle=k_layout.inner)
        sV = smem.allocate_tensor(self.dtype, v_layout.outer, 1024, swizzle=v_layout.inner)
        if const_expr(spec.o_overlays_q):
            sO = cute.make_tensor(cute.recast_ptr(sQ.iterator, o_layout.inner, self.dtype), o_layout.outer)
        else:
            sO = smem.allocate_tensor(self.dtype, o_layout.outer, 1024, swizzle=o_layout.inner)
        sP = None
        if const_expr(not spec.p_in_registers):
            sP = smem.allocate_tensor(self.dtype, p_layout.outer, 1024, swizzle=p_layout.inner)

        if warp_index == 0:
            with cute.arch.elect_one():
                for name, arrivals in (
                    ("q_full", 1),
                    ("q_empty", 4),
                    ("k_full", 1),
                    ("k_empty", 4 * self.warpgroups),
                    ("v_full", 1),
                    ("v_empty", 4 * self.warpgroups),
                ):
                    stages = self.warpgroups if name[0] == "q" else spec.kv_stages
                    for stage in range(stages):
                        cute.arch.mbarrier_init(bars[name] + stage, arrivals)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        group_index = cute.arch.make_warp_uniform(warp_index // 4)
        if group_index == self.warpgroups:
            cute.arch.setmaxregister_decrease(spec.registers[1])
            if warp_index == 4 * self.warpgroups:
                self.load(tma, gmem, (sQ, sK, sV), bars, tiles, lengths)
        else:
            cute.arch.setmaxregister_increase(spec.registers[0])
            self.mma(
                qk_mma, pv_mma, tma[3], gmem[3], mLSE, (sQ, sK, sV, sO, sP), bars, tiles, lengths, scale_log2
            )

    @cute.jit
    def load(
        self, tma: tuple, gmem: tuple, smem: tuple, bars: dict, tiles: TileShape, lengths: tuple
    ) -> None:
        """Producer warp: Q of each warpgroup once a tile, K and V blocks in the order they are consumed."""
        spec = self.spec
        tma_q, tma_k, tma_v, _ = tma
        mQ, mK, mV, _ = gmem
        sQ, sK, sV = smem
        seqlen_q, seqlen_k, kv_group = lengths
        block, grid = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        total = tile_count(tiles)
        wave = Int32(0)
        index = block
        k_ring, v_ring = Ring(Int32(0), Int32(1)), Ring(Int32(0), Int32(1))
        q_phase = Int32(1)
        working = is_valid(index, total)
        while working:
            m_block, head, batch = decode_tile(index, tiles, spec.longest_first)
            kv_head = head // kv_group
            gQ = cute.local_tile(mQ[None, None, head, batch], (64, spec.head_dim), (None, 0))
            gK = cute.local_tile(mK[None, None, kv_head, batch], (spec.tile_n, spec.head_dim), (None, 0))
            gV = cute.local_tile(mV[None, None, kv_head, batch], (spec.tile_n, spec.head_dim_v), (None, 0))
            tQs, tQg = self._tma_partition(tma_q, sQ, gQ)
            tKs, tKg = self._tma_partition(tma_k, sK, gK)
            tVs, tVg = self._tma_partition(tma_v, sV, gV)
            blocks = self.key_blocks((m_block + 1) * spec.tile_m, seqlen_q, seqlen_k)
            for w in cutlass.range_constexpr(self.warpgroups):
                if const_expr(spec.scheduler == "persistent"):
                    cute.arch.mbarrier_wait(bars["q_empty"] + w, q_phase)
                self._tma_load(
                    tma_q,
                    tQg[None, m_block * self.warpgroups + w],
                    tQs[None, w],
                    bars["q_full"] + w,
                    spec.q_bytes,
                )
                if const_expr(w == 0):
                    k_ring = self._load_block(tma_k, tKg, tKs, bars, "k", blocks - 1, k_ring, spec.k_bytes)
            for i in cutlass.range(1, blocks, unroll=1):
                n_block = blocks - 1 - i
                if const_expr(spec.overlap):
                    k_ring = self._load_block(tma_k, tKg, tKs, bars, "k", n_block, k_ring, spec.k_bytes)
                    v_ring = self._load_block(tma_v, tVg, tVs, bars, "v", n_block + 1, v_ring, spec.v_bytes)
                else:
                    v_ring = self._load_block(tma_v, tVg, tVs, bars, "v", n_block + 1, v_ring, spec.v_bytes)
                    k_ring = self._load_block(tma_k, tKg, tKs, bars, "k", n_block, k_ring, spec.k_bytes)
            v_ring = self._load_block(tma_v, tVg, tVs, bars, "v", 0, v_ring, spec.v_bytes)
            q_phase = q_phase ^ 1
            working = Boolean(False)
            if const_expr(spec.scheduler == "persistent"):
                wave += 1
                index = persistent_index(wave, block, grid)
                working = is_valid(index, total)

    @cute.jit
    def mma(
        self,
        qk_mma: cute.TiledMma,
        pv_mma: cute.TiledMma,
        tma_o: cute.CopyAtom,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        smem: tuple,
        bars: dict,
        tiles: TileShape,
        lengths: tuple,
        scale_log2: Float32,
    ) -> None:
        """MMA warpgroup: S = QK, softmax, O += PV, epilogue."""
        spec = self.spec
        sQ, sK, sV, sO, sP = smem
        seqlen_q, seqlen_k, _ = lengths
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        group = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARPGROUP)
        # operand descriptors and accumulators of this warpgroup
        qk = qk_mma.get_slice(0)
        pv = pv_mma.get_slice(0)
        sVt = cute.make_tensor(sV.iterator, cute.select(sV.layout, mode=[1, 0, 2]))
        tQ = qk_mma.make_fragment_A(qk.partition_A(sQ))[None, None, None, group]
        tK = qk_mma.make_fragment_B(qk.partition_B(sK))
        tV = pv_mma.make_fragment_B(pv.partition_B(sVt))
        acc_s = cute.make_rmem_tensor(qk.partition_shape_C((64, spec.tile_n)), Float32)
        acc_o = cute.make_rmem_tensor(pv.partition_shape_C((64, spec.head_dim_v)), Float32)
        p_registers = cute.make_rmem_tensor(pv.partition_shape_A((64, spec.tile_n)), self.dtype)
        if const_expr(spec.p_in_registers):
            tP = p_registers
            p_store = None
        else:
            tP = pv_mma.make_fragment_A(pv.partition_A(sP))[None, None, None, group]
            copy_p = cute.make_tiled_copy_C(self._stmatrix(), qk_mma).get_slice(thread)
            p_source = cute.make_tensor(p_registers.iterator, acc_s.layout)
            p_store = (copy_p, copy_p.retile(p_source), copy_p.partition_D(sP[None, None, group]))
        s = cute.make_tensor(acc_s.iterator, cute.make_layout(spec.tile_n // 2))
        o = cute.make_tensor(acc_o.iterator, cute.make_layout(spec.head_dim_v // 2))
        p = cute.recast_tensor(
            cute.make_tensor(p_registers.iterator, cute.make_layout(spec.tile_n // 2)), Int32
        )
        row_max = cute.make_rmem_tensor(2, Float32)
        row_sum = cute.make_rmem_tensor(2, Float32)
        state = (s, o, p, p_store, row_max, row_sum)

        if const_expr(spec.ping_pong):
            if group == self.warpgroups - 1:
                self._pass_turn(group)

        block, grid = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        total = tile_count(tiles)
        wave = Int32(0)
        index = block
        ring = Ring(Int32(0), Int32(0))
        q_phase = Int32(0)
        working = is_valid(index, total)
        while working:
            m_block, head, batch = decode_tile(index, tiles, spec.longest_first)
            first_row = m_block * spec.tile_m + group * 64
            tile_blocks = self.key_blocks((m_block + 1) * spec.tile_m, seqlen_q, seqlen_k)
            blocks = self.key_blocks(first_row + 64, seqlen_q, seqlen_k)
            clear = self.clear_blocks(first_row, seqlen_q, seqlen_k)
            if first_row >= seqlen_q:
                blocks = Int32(1)
                clear = Int32(0)
            # first key column that row 0 of this thread does not see, from its own first column
            row = first_row + thread // 32 * 16 + thread % 32 // 4
            end = row + seqlen_k - seqlen_q + 1 - 2 * (thread % 4)
            limit = seqlen_k - 2 * (thread % 4)

            o.fill(0.0)
            row_max.fill(-Float32.inf)
            row_sum.fill(0.0)
            for _ in cutlass.range(tile_blocks - blocks, unroll=1):
                ring = self.pass_over(bars, ring, group)
            cute.arch.mbarrier_wait(bars["q_full"] + group, q_phase)
            n_block = blocks - 1
            masked_until = cutlass.min(clear, n_block)
            if const_expr(spec.overlap):
                self._wait(bars, "k", ring)
                self._take_turn(group)
                self._gemm(qk_mma, acc_s, tQ, tK[None, None, None, ring.stage], True)
                self._pass_turn(group)
                warpgroup.wait_group(0)
                self._release(bars, "k", ring)
                self.softmax_tile(state, scale_log2, n_block, end, limit, True, False)
                for j in cutlass.range(n_block - masked_until, unroll=1):
                    ring = self.step_overlap(
                        (qk_mma, pv_mma, acc_s, acc_o, tQ, tK, tP, tV),
                        state,
                        bars,
                        ring,
                        group,
                        scale_log2,
                        n_block - 1 - j,
                        end,
                        limit,
                        True,
                    )
                for j in cutlass.range(masked_until, unroll=1):
                    ring = self.step_overlap(
                        (qk_mma, pv_mma, acc_s, acc_o, tQ, tK, tP, tV),
                        state,
                        bars,
                        ring,
                        group,
                        scale_log2,
                        masked_until - 1 - j,
                        end,
                        limit,
                        False,
                    )
                self._release_q(bars, group)
                self._wait(bars, "v", ring)
                self._gemm(pv_mma, acc_o, tP, tV[None, None, None, ring.stage], False)
                warpgroup.wait_group(0)
                self._release(bars, "v", ring)
                ring = self._advance(ring)
            else:
                for j in cutlass.range(blocks - masked_until, unroll=1):
                    ring = self.step(
                        (qk_mma, pv_mma, acc_s, acc_o, tQ, tK, tP, tV),
                        state,
                        bars,
                        ring,
                        group,
                        scale_log2,
                        n_block - j,
                        end,
                        limit,
                        True,
                    )
                for j in cutlass.range(masked_until, unroll=1):
                    ring = self.step(
                        (qk_mma, pv_mma, acc_s, acc_o, tQ, tK, tP, tV),
                        state,
                        bars,
                        ring,
                        group,
                        scale_log2,
                        masked_until - 1 - j,
                        end,
                        limit,
                        False,
                    )
                self._release_q(bars, group)
            q_phase = q_phase ^ 1

            self.epilogue(
                pv_mma,
                acc_o,
                o,
                row_max,
                row_sum,
                scale_log2,
                tma_o,
                mO,
                mLSE,
                sO,
                thread,
                group,
                (m_block, head, batch),
                row,
                seqlen_q,
            )
            working = Boolean(False)
            if const_expr(spec.scheduler == "persistent"):
                wave += 1
                index = persistent_index(wave, block, grid)
                working = is_valid(index, total)
        # SMEM must outlive the last store's reads
        if thread < 32:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def step_overlap(
        self,
        mmas: tuple,
        state: tuple,
        bars: dict,
        ring: Ring,
        group: Int32,
        scale_log2: Float32,
        n_block: Int32,
        end: Int32,
        limit: Int32,
        masked: cutlass.Constexpr[bool],
    ) -> Ring:
        """QK of this block and PV of the one before are in flight together; softmax runs under PV."""
        qk_mma, pv_mma, acc_s, acc_o, tQ, tK, tP, tV = mmas
        before = ring
        ring = self._advance(ring)
        self._wait(bars, "k", ring)
        self._take_turn(group)
        self._gemm(qk_mma, acc_s, tQ, tK[None, None, None, ring.stage], True)
        self._wait(bars, "v", before)
        self._gemm(pv_mma, acc_o, tP, tV[None, None, None, before.stage], False)
        self._pass_turn(group)
        warpgroup.wait_group(1)
        self._release(bars, "k", ring)
        self.softmax_tile(state, scale_log2, n_block, end, limit, masked, True, bars, before)
        return ring

    @cute.jit
    def step(
        self,
        mmas: tuple,
        state: tuple,
        bars: dict,
        ring: Ring,
        group: Int32,
        scale_log2: Float32,
        n_block: Int32,
        end: Int32,
        limit: Int32,
        masked: cutlass.Constexpr[bool],
    ) -> Ring:
        """QK, softmax and PV of one block, one after the other."""
        qk_mma, pv_mma, acc_s, acc_o, tQ, tK, tP, tV = mmas
        self._wait(bars, "k", ring)
        self._take_turn(group)
        self._gemm(qk_mma, acc_s, tQ, tK[None, None, None, ring.stage], True)
        self._pass_turn(group)
        warpgroup.wait_group(0)
        self._release(bars, "k", ring)
        self.softmax_tile(state, scale_log2, n_block, end, limit, masked, False)
        self._wait(bars, "v", ring)
        self._gemm(pv_mma, acc_o, tP, tV[None, None, None, ring.stage], False)
        warpgroup.wait_group(0)
        self._release(bars, "v", ring)
        return self._advance(ring)

    @cute.jit
    def softmax_tile(
        self,
        state: tuple,
        scale_log2: Float32,
        n_block: Int32,
        end: Int32,
        limit: Int32,
        masked: cutlass.Constexpr[bool],
        pv_in_flight: cutlass.Constexpr[bool],
        bars: Any = None,
        before: Any = None,
    ) -> None:
        """Scores to P, maximum and sum of the rows, O rescaled; waits for the PV in flight before O and P."""
        spec = self.spec
        s, o, p, p_store, row_max, row_sum = state
        rows = self.row_elements
        if const_expr(masked):
            for r in cutlass.range_constexpr(2):
                row_end = limit
                if const_expr(spec.causal):
                    row_end = cutlass.min(end + 8 * r, limit)
                mask_from_column(s, rows[r], row_end - n_block * spec.tile_n)
        registers = [tuple(e[0] for e in row) for row in rows]
        factors = cute.make_rmem_tensor(2, Float32)
        minus = cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            tile_max = softmax.maximum_of(s, registers[r], row_max[r])
            tile_max = cute.arch.warp_reduction_max(tile_max, threads_in_group=4)
            row_max[r], minus[r], factors[r] = softmax.advance_row_max(
                row_max[r], tile_max, scale_log2, spec.rescale_threshold, masked
            )
            row_sum[r] = row_sum[r] * factors[r]
        # The PV in flight reads P and writes O: exponentials before the wait stay float32 in the score registers.
        wait_at = (
            spec.tile_n // 2 * max(spec.pv_wait_quarters, 0) // 4 // 8 * 8 if const_expr(pv_in_flight) else 0
        )
        if const_expr(not pv_in_flight):
            self.rescale(o, factors)
        sums = [row_sum[0], row_sum[1]]
        for i in cutlass.range_constexpr(spec.tile_n // 2 + 1):
            if const_expr(pv_in_flight and i == wait_at):
                if const_expr(spec.pv_wait_quarters >= 0):
                    stay_below(sums[0] if const_expr(i > 0) else factors[1], bars["q_full"])
                warpgroup.wait_group(0)
                self._release(bars, "v", before)
                self.rescale(o, factors)
                for done in cutlass.range_constexpr(wait_at // 2):
                    p[done] = pack_pair(s[2 * done], s[2 * done + 1], self.dtype)
                    if const_expr(p_store is not None and done % 4 == 3):
                        self._store_p(p_store, done // 4)
            if const_expr(i < spec.tile_n // 2):
                r = (i // 2) % 2
                value = softmax.exponentiate(s, i, scale_log2, minus[r], spec.emulated[i], spec.exp2_degree)
                sums[r] = sums[r] + value
                if const_expr(i % 2 == 1 and i >= wait_at):
                    p[i // 2] = pack_pair(s[i - 1], s[i], self.dtype)
                    if const_expr(p_store is not None and i % 8 == 7):
                        self._store_p(p_store, i // 8)
        row_sum[0], row_sum[1] = sums
        if const_expr(p_store is not None):
            cute.arch.fence_view_async_shared()
            # each warp's quarter of the MMA reads the 16 rows that the warp itself wrote
            cute.arch.sync_warp()

    @cute.jit
    def rescale(self, o: cute.Tensor, factors: cute.Tensor) -> None:
        """O times the factor of its row; with a threshold only where some row of the warp needs it."""
        if const_expr(self.spec.rescale_threshold > 0):
            needed = softmax.any_lane((factors[0] < Float32(1.0)) | (factors[1] < Float32(1.0)))
            if needed:
                for i in cutlass.range_constexpr(cute.size(o)):
                    o[i] = o[i] * factors[(i // 2) % 2]
        else:
            for i in cutlass.range_constexpr(cute.size(o)):
                o[i] = o[i] * factors[(i // 2) % 2]

    @cute.jit
    def epilogue(
        self,
        pv_mma: cute.TiledMma,
        acc_o: cute.Tensor,
        o: cute.Tensor,
        row_max: cute.Tensor,
        row_sum: cute.Tensor,
        scale_log2: Float32,
        tma_o: cute.CopyAtom,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        sO: cute.Tensor,
        thread: Int32,
        group: Int32,
        tile: tuple,
        row: Int32,
        seqlen_q: Int32,
    ) -> None:
        """Normalises O, stores it through SMEM by TMA (which clips rows past the end), writes the LSE."""
        spec = self.spec
        m_block, head, batch = tile
        factors = cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            total = cute.arch.warp_reduction_sum(row_sum[r], threads_in_group=4)
            factors[r], lse = softmax.normaliser(row_max[r], total, scale_log2)
            if thread % 4 == 0 and row + 8 * r < seqlen_q:
                mLSE[batch, head, row + 8 * r] = lse
        out = cute.make_rmem_tensor(acc_o.shape, self.dtype)
        packed = cute.recast_tensor(cute.make_tensor(out.iterator, cute.make_layout(cute.size(o))), Int32)
        for i in cutlass.range_constexpr(cute.size(o) // 2):
            f = factors[i % 2]
            packed[i] = pack_pair(o[2 * i] * f, o[2 * i + 1] * f, self.dtype)
        copy_o = cute.make_tiled_copy_C(self._stmatrix(), pv_mma).get_slice(thread)
        if const_expr(spec.scheduler == "persistent"):
            # the previous tile's store must have read the buffer
            if thread < 32:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.barrier(barrier_id=self._store_barrier(), number_of_threads=WARPGROUP)
        cute.copy(copy_o, copy_o.retile(out), copy_o.partition_D(sO[None, None, group]))
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=self._store_barrier(), number_of_threads=WARPGROUP)
        if thread < 32:
            gO = cute.local_tile(mO[None, None, head, batch], (64, spec.head_dim_v), (None, 0))
            tOs, tOg = self._tma_partition(tma_o, sO, gO)
            cute.copy(tma_o, tOs[None, group], tOg[None, m_block * self.warpgroups + group])
            cute.arch.cp_async_bulk_commit_group()

    # ------------------------------------------------------------------ shared by the roles

    @cute.jit
    def key_blocks(self, end_row: Int32, seqlen_q: Int32, seqlen_k: Int32) -> Int32:
        """Key blocks that rows before ``end_row`` see; at least one, so that every tile runs the same code."""
        keys = seqlen_k
        if const_expr(self.spec.causal):
            keys = cutlass.min(seqlen_k, cutlass.min(end_row, seqlen_q) + seqlen_k - seqlen_q)
        return cutlass.max(cute.ceil_div(keys, self.spec.tile_n), 1)

    @cute.jit
    def clear_blocks(self, first_row: Int32, seqlen_q: Int32, seqlen_k: Int32) -> Int32:
        """Key blocks of which ``first_row``, and so every later row, sees every key."""
        keys = seqlen_k
        if const_expr(self.spec.causal):
            keys = cutlass.max(cutlass.min(seqlen_k, first_row + 1 + seqlen_k - seqlen_q), 0)
        return keys // self.spec.tile_n

    @cute.jit
    def pass_over(self, bars: dict, ring: Ring, group: Int32) -> Ring:
        """Hands a block back that this warpgroup's rows do not see."""
        self._wait(bars, "k", ring)
        self._take_turn(group)
        self._pass_turn(group)
        self._release(bars, "k", ring)
        self._wait(bars, "v", ring)
        self._release(bars, "v", ring)
        return self._advance(ring)

    @cute.jit
    def _gemm(
        self,
        tiled_mma: cute.TiledMma,
        acc: cute.Tensor,
        a: cute.Tensor,
        b: cute.Tensor,
        zero_first: cutlass.Constexpr[bool],
    ) -> None:
        atom = cute.make_mma_atom(tiled_mma.op)
        warpgroup.fence()
        for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
            atom.set(warpgroup.Field.ACCUMULATE, not zero_first or k != 0)
            cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
        warpgroup.commit_group()

    @cute.jit
    def _wait(self, bars: dict, operand: cutlass.Constexpr[str], ring: Ring) -> None:
        cute.arch.mbarrier_wait(bars[operand + "_full"] + ring.stage, ring.phase)

    @cute.jit
    def _release(self, bars: dict, operand: cutlass.Constexpr[str], ring: Ring) -> None:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(bars[operand + "_empty"] + ring.stage)

    @cute.jit
    def _release_q(self, bars: dict, group: Int32) -> None:
        if const_expr(self.spec.scheduler == "persistent"):
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(bars["q_empty"] + group)

    @cute.jit
    def _advance(self, ring: Ring) -> Ring:
        stages = self.spec.kv_stages
        if const_expr(stages == 1):
            return Ring(ring.stage, ring.phase ^ 1)
        stage = ring.stage + 1
        wrapped = stage == stages
        return Ring(Int32(0) if wrapped else stage, ring.phase ^ 1 if wrapped else ring.phase)

    @cute.jit
    def _load_block(
        self,
        atom: cute.CopyAtom,
        gmem: cute.Tensor,
        smem: cute.Tensor,
        bars: dict,
        operand: cutlass.Constexpr[str],
        n_block: Int32,
        ring: Ring,
        size: cutlass.Constexpr[int],
    ) -> Ring:
        cute.arch.mbarrier_wait(bars[operand + "_empty"] + ring.stage, ring.phase)
        self._tma_load(
            atom, gmem[None, n_block], smem[None, ring.stage], bars[operand + "_full"] + ring.stage, size
        )
        return self._advance(ring)

    @cute.jit
    def _tma_load(
        self,
        atom: cute.CopyAtom,
        source: cute.Tensor,
        destination: cute.Tensor,
        barrier: Any,
        size: cutlass.Constexpr[int],
    ) -> None:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)
        cute.copy(atom, source, destination, tma_bar_ptr=barrier)

    def _tma_partition(self, atom: cute.CopyAtom, smem: cute.Tensor, gmem: cute.Tensor) -> Any:
        return cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(gmem, 0, 2)
        )

    def _stmatrix(self) -> cute.CopyAtom:
        return cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)

    @cute.jit
    def _store_p(self, p_store: tuple, k: cutlass.Constexpr[int]) -> None:
        """16 columns of P, the K step of one MMA, to SMEM."""
        copy, source, destination = p_store
        cute.copy(copy, source[None, None, k], destination[None, None, k])

    @cute.jit
    def _take_turn(self, group: Int32) -> None:
        if const_expr(self.spec.ping_pong):
            cute.arch.barrier(barrier_id=1 + group, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def _pass_turn(self, group: Int32) -> None:
        if const_expr(self.spec.ping_pong):
            after = group + 1
            after = Int32(0) if after == self.warpgroups else after
            cute.arch.barrier_arrive(barrier_id=1 + after, number_of_threads=2 * WARPGROUP)

    def _store_barrier(self) -> Any:
        return 5 + cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARPGROUP)
