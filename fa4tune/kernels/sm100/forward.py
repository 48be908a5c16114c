"""Attention forward for Blackwell (``sm_100a``): tcgen05 MMAs, S, P and O in TMEM, six warp roles.

Read :mod:`fa4tune.kernels.sm100.forward_plan` first: memory offsets, barrier counts, registers and the order
in which MMAs are issued come from the plan. Each role walks the same output tiles on its own; a *turn* counts
the K/V tiles that a role has gone through since the kernel began and gives slot and parity of its barriers.

A row of S belongs to one thread: lane *t* of TMEM, thread *t* of the softmax warpgroup. Rows of a tile are
packed: row *r* is query position ``r // packed_heads`` of head ``r % packed_heads`` of its group.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import (
    OperandMajorMode,
    cpasync,
    make_tiled_tma_atom_A,
    make_tiled_tma_atom_B,
    tcgen05,
)

from fa4tune.hardware.gpu import load_gpu
from fa4tune.kernels import softmax
from fa4tune.kernels.config import SM100ForwardConfig
from fa4tune.kernels.exp2 import SHARE_DENOMINATOR, emulated_columns
from fa4tune.kernels.exp2_device import exp2_hardware, pack_pair
from fa4tune.kernels.mask import mask_from_column
from fa4tune.kernels.plan import KernelPlan
from fa4tune.kernels.sm100.device import (
    Pair,
    TmemRows,
    exp2_emulated_pair,
    fence_after_wait,
    fence_before_arrive,
    fma_pair,
    opaque,
    zero_read_here,
)
from fa4tune.kernels.sm100.forward_plan import (
    EARLY_COLUMNS,
    MMA_K,
    SUM_CHAINS,
    TILE_M,
    build_plan,
    fragments,
)
from fa4tune.kernels.sm100.walk import TileWalk
from fa4tune.kernels.tile_scheduler import TileShape, is_valid, tile_count, tile_shape
from fa4tune.problem import AttentionProblem

TMEM_COLUMNS = 512
"""The whole TMEM: a CTA has its SM to itself."""

O_COLUMNS = 16
"""Columns of O that a correction thread holds at a time."""


class Ring(NamedTuple):
    """Position in the K/V ring and the parity that a wait there needs."""

    stage: Any
    phase: Any


class ForwardSm100(TileWalk):
    """One kernel: everything in ``plan`` is compiled in, lengths and strides are arguments."""

    def __init__(self, plan: KernelPlan) -> None:
        config = plan.config
        assert isinstance(config, SM100ForwardConfig)
        problem = plan.problem
        super().__init__(plan)
        self.config = config
        self.dtype = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}[problem.dtype]
        self.head_dim, self.head_dim_v = problem.head_dim, problem.head_dim_v
        self.q_tiles = config.q_tiles
        self.split = int(plan.constants["split"])
        self.overlay = bool(plan.constants["o_overlays_q"])
        self.passes = int(plan.constants["passes"])
        self.summed_late = int(plan.constants["summed_late"])
        self.fragments = fragments(config.tile_n, self.split)
        share = round(config.exp2_share * SHARE_DENOMINATOR)
        start = config.exp2_start if share else 0
        self.emulated = emulated_columns(config.tile_n, share, start)
        order = next(o for o in plan.loop.orders if o.owner == "mma")
        self.mma_order = tuple(zip(order.operations, order.lags, strict=True))
        self.k_first = self.mma_order[0][0].startswith("qk")
        self.group = tcgen05.CtaGroup.TWO if self.pair else tcgen05.CtaGroup.ONE
        self.all_ctas = 0b11 if self.pair else None

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
        """Launch on tensors of shape (batch, seqlen, heads, head_dim); ``mLSE`` (batch, heads, seqlen_q)."""
        config, plan = self.config, self.plan
        seqlen_q, seqlen_k = Int32(mQ.shape[1]), Int32(mK.shape[1])
        heads, kv_heads, batch = Int32(mQ.shape[2]), Int32(mK.shape[2]), Int32(mQ.shape[0])
        gQ, gO = self._packed(mQ), self._packed(mO)
        gK = cute.make_tensor(mK.iterator, cute.select(mK.layout, mode=[1, 3, 2, 0]))
        gV = cute.make_tensor(mV.iterator, cute.select(mV.layout, mode=[3, 1, 2, 0]))

        dtype, k_major, mn_major = self.dtype, OperandMajorMode.K, OperandMajorMode.MN
        m = TILE_M * config.cta_group
        qk_tiler, pv_tiler = (m, config.tile_n, self.head_dim), (m, self.head_dim_v, config.tile_n)
        qk_mma = sm100.make_trivial_tiled_mma(
            dtype, dtype, k_major, k_major, Float32, self.group, qk_tiler[:2]
        )
        pv_mma = sm100.make_trivial_tiled_mma(
            dtype, dtype, k_major, mn_major, Float32, self.group, pv_tiler[:2], tcgen05.OperandSource.TMEM
        )
        q_layout = sm100.make_smem_layout_a(qk_mma, qk_tiler, dtype, self.q_tiles)
        k_layout = self._ring_layout(sm100.make_smem_layout_b(qk_mma, qk_tiler, dtype, 1))
        v_layout = self._ring_layout(sm100.make_smem_layout_b(pv_mma, pv_tiler, dtype, 1))
        p_layout = sm100.make_smem_layout_a(pv_mma, pv_tiler, dtype, 1)
        kind = sm100.get_smem_layout_atom_ab(k_major, dtype, (TILE_M, self.head_dim_v))
        o_layout = cute.tile_to_shape(
            tcgen05.make_smem_layout_atom(kind, dtype), (TILE_M, self.head_dim_v), order=(0, 1)
        )

        cluster = cute.tiled_divide(cute.make_layout((config.cta_group, 1, 1)), (qk_mma.thr_id.shape,))
        load, store = cpasync.CopyBulkTensorTileG2SOp(self.group), cpasync.CopyBulkTensorTileS2GOp()
        one = lambda layout: cute.select(layout, mode=[0, 1, 2])  # noqa: E731
        tma_q, gQ = make_tiled_tma_atom_A(load, gQ, one(q_layout), qk_tiler, qk_mma, cluster.shape)
        tma_k, gK = make_tiled_tma_atom_B(load, gK, one(k_layout), qk_tiler, qk_mma, cluster.shape)
        tma_v, gV = make_tiled_tma_atom_B(load, gV, one(v_layout), pv_tiler, pv_mma, cluster.shape)
        tma_o, gO = cpasync.make_tiled_tma_atom(store, gO, o_layout, (TILE_M, self.head_dim_v))

        tiles = tile_shape(
            seqlen_q * self.packed,
            plan.tile_rows,
            heads // self.packed,
            batch,
            heads // self.packed // kv_heads,
            seqlen_k,
            (self.head_dim + self.head_dim_v) * dtype.width // 8,
        )
        workers = tile_count(tiles)
        if const_expr(self.persistent):
            workers = cutlass.min(workers, cutlass.max(sm_count // config.cta_group, 1))
        self.kernel(
            qk_mma,
            pv_mma,
            (tma_q, tma_k, tma_v, tma_o),
            (gQ, gK, gV, gO),
            mLSE,
            (q_layout, k_layout, v_layout, p_layout, o_layout),
            tiles,
            (seqlen_q, seqlen_k, heads // self.packed // kv_heads),
            softmax_scale * Float32(softmax.LOG2_E),
        ).launch(
            grid=[workers * config.cta_group, 1, 1],
            block=[config.threads, 1, 1],
            cluster=[config.cta_group, 1, 1],
            smem=plan.resources.smem_bytes,
            stream=stream,
            min_blocks_per_mp=1,
        )

    def _packed(self, tensor: cute.Tensor) -> cute.Tensor:
        """(batch, seqlen, heads, d) as (rows, d, head groups, batch), rows (head in group, position)."""
        batch, seqlen, heads, d = tensor.shape
        b, s, h, one = tensor.stride
        if self.packed == 1:
            layout = cute.make_layout((seqlen, d, heads, batch), stride=(s, one, h, b))
        else:
            layout = cute.make_layout(
                ((self.packed, seqlen), d, heads // self.packed, batch),
                stride=((h, s), one, h * self.packed, b),
            )
        return cute.make_tensor(tensor.iterator, layout)

    def _ring_layout(self, layout: Any) -> Any:
        """A one-stage operand layout as a ring of the slots that K and V share."""
        ring = self.plan.buffer("kv")
        slots = cute.make_layout(ring.stages, stride=ring.size * 8 // self.dtype.width)
        return cute.append(cute.select(layout, mode=[0, 1, 2]), slots)

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
        plan, config = self.plan, self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        q_layout, k_layout, v_layout, p_layout, o_layout = layouts
        base = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024)
        bars = {b.name: cute.recast_ptr(base + b.offset, dtype=cutlass.Int64) for b in plan.barriers}
        address_slot = cute.recast_ptr(base + plan.resources.smem_bytes - 16, dtype=Int32)
        sQ, sK, sV = (
            self._smem(base, name, layout)
            for name, layout in (("q", q_layout), ("kv", k_layout), ("kv", v_layout))
        )
        o_buffer = plan.buffer("o")
        sO = [
            cute.make_tensor(
                cute.recast_ptr(base + o_buffer.offset + q * o_buffer.size, o_layout.inner, self.dtype),
                o_layout.outer,
            )
            for q in range(self.q_tiles)
        ]
        stats = cute.make_tensor(
            cute.recast_ptr(base + plan.buffer("stats").offset, dtype=Float32),
            cute.make_layout((TILE_M, 4)),
        )

        mma_warp, load_warp = plan.role("mma").first_warp, plan.role("load").first_warp
        if warp == load_warp:
            for atom in tma:
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                for barrier in plan.barriers:
                    for stage in range(barrier.stages):
                        cute.arch.mbarrier_init(bars[barrier.name] + stage, barrier.arrivals)
            cute.arch.mbarrier_init_fence()
        if warp == mma_warp:
            cute.arch.alloc_tmem(TMEM_COLUMNS, address_slot, is_two_cta=self.pair)
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=self.pair)
        self._sync_all()
        # All columns were allocated, so they begin at 0: an address that takes no register.
        tmem = cute.make_ptr(Float32, 0, cute.AddressSpace.tmem, assumed_align=16)

        call = (tiles, *lengths)
        softmax_registers, correction_registers, other_registers = config.registers
        correction_warp = plan.role("correction").first_warp
        if warp < correction_warp:
            cute.arch.setmaxregister_increase(softmax_registers)
            # The address of the TMEM is a zero in SMEM.
            self.softmax(tmem, stats, address_slot, mLSE, bars, call, scale_log2)
        elif warp < mma_warp:
            if const_expr(correction_registers > plan.constants["launch_registers"]):
                cute.arch.setmaxregister_increase(correction_registers)
            else:
                cute.arch.setmaxregister_decrease(correction_registers)
            self.correction(tmem, stats, sO, bars, call)
        else:
            cute.arch.setmaxregister_decrease(other_registers)
            if warp == mma_warp:
                self.mma(qk_mma, pv_mma, tmem, (sQ, sK, sV), p_layout, bars, call)
            elif warp == load_warp:
                self.load(qk_mma, pv_mma, tma, gmem, (sQ, sK, sV), bars, call)
            elif warp == plan.role("store").first_warp:
                self.store(tma[3], gmem[3], sO, bars, call)
        self._sync_all()
        if warp == mma_warp:
            cute.arch.dealloc_tmem(tmem, TMEM_COLUMNS, is_two_cta=self.pair)

    @cute.jit
    def load(
        self,
        qk_mma: cute.TiledMma,
        pv_mma: cute.TiledMma,
        tma: tuple,
        gmem: tuple,
        smem: tuple,
        bars: dict,
        call: tuple,
    ) -> None:
        """TMA warp: Q once a tile, K and V in the order of use. A CTA of a pair loads its half of each."""
        config = self.config
        tma_q, tma_k, tma_v, _ = tma
        mQ, mK, mV, _ = gmem
        sQ, sK, sV = smem
        walk = self.walk(call)
        qk, pv = qk_mma.get_slice(walk.rank), pv_mma.get_slice(walk.rank)
        m = TILE_M * config.cta_group
        ring, q_phase = Ring(Int32(0), Int32(1)), Int32(1)
        wave, index = Int32(0), walk.worker
        working = is_valid(index, tile_count(walk.tiles))
        while working:
            tile = self.tile(index, walk)
            kv_head = tile.head // walk.group
            gQ = cute.local_tile(mQ[None, None, tile.head, tile.batch], (m, self.head_dim), (None, 0))
            gK = cute.local_tile(
                mK[None, None, kv_head, tile.batch], (config.tile_n, self.head_dim), (None, 0)
            )
            gV = cute.local_tile(
                mV[None, None, kv_head, tile.batch], (self.head_dim_v, config.tile_n), (0, None)
            )
            tQ = self._tma_partition(tma_q, sQ, qk.partition_A(gQ))
            tK = self._tma_partition(tma_k, sK, qk.partition_B(gK))
            tV = self._tma_partition(tma_v, sV, pv.partition_B(gV))
            first = tile.m_block * self.q_tiles
            for q in cutlass.range_constexpr(self.q_tiles):
                if const_expr(self.persistent):
                    cute.arch.mbarrier_wait(bars["q_empty"] + q, q_phase)
                self._tma_load(tma_q, tQ, first + q, q, bars["q_full"] + q, walk.rank, self.head_dim * TILE_M)
                if const_expr(q == 0):
                    ring = self._load_block(tma_k, tK, tile.blocks - 1, ring, bars, walk.rank, self.head_dim)
            for i in cutlass.range(1, tile.blocks, unroll=1):
                n_block = tile.blocks - 1 - i
                if const_expr(self.k_first):
                    ring = self._load_block(tma_k, tK, n_block, ring, bars, walk.rank, self.head_dim)
                ring = self._load_block(tma_v, tV, n_block + 1, ring, bars, walk.rank, self.head_dim_v)
                if const_expr(not self.k_first):
                    ring = self._load_block(tma_k, tK, n_block, ring, bars, walk.rank, self.head_dim)
            ring = self._load_block(tma_v, tV, Int32(0), ring, bars, walk.rank, self.head_dim_v)
            q_phase = q_phase ^ 1
            wave, index, working = self.next_tile(wave, index, walk)
        # No barrier of this CTA may be signalled after it has gone: see the last uses of the ring and of Q.
        for _ in cutlass.range_constexpr(config.kv_stages):
            cute.arch.mbarrier_wait(bars["kv_empty"] + ring.stage, ring.phase)
            ring = self._advance(ring)
        if const_expr(self.persistent):
            for q in cutlass.range_constexpr(self.q_tiles):
                cute.arch.mbarrier_wait(bars["q_empty"] + q, q_phase)

    @cute.jit
    def mma(
        self,
        qk_mma: cute.TiledMma,
        pv_mma: cute.TiledMma,
        tmem: cute.Pointer,
        smem: tuple,
        p_layout: Any,
        bars: dict,
        call: tuple,
    ) -> None:
        """MMA warp, of the pair's first CTA: the plan's order, a turn for each K/V tile and one more."""
        config = self.config
        sQ, sK, sV = smem
        m = TILE_M * config.cta_group
        qk, pv = qk_mma.get_slice(0), pv_mma.get_slice(0)
        tQ, tK, tV = qk_mma.make_fragment_A(sQ), qk_mma.make_fragment_B(sK), pv_mma.make_fragment_B(sV)
        s_layout = qk_mma.make_fragment_C(qk.partition_shape_C((m, config.tile_n))).layout
        o_layout = pv_mma.make_fragment_C(pv.partition_shape_C((m, self.head_dim_v))).layout
        p_tile = cute.make_tensor(cute.recast_ptr(tmem, dtype=self.dtype), p_layout.outer)
        tP = pv_mma.make_fragment_A(p_tile)[None, None, None, 0]
        operands = (qk_mma, pv_mma, tQ, tK, tV, tP, s_layout, o_layout, tmem)

        ring, turn, q_phase = Ring(Int32(0), Int32(0)), Int32(0), Int32(0)
        walk = self.walk(call)
        wave, index = Int32(0), walk.worker
        working = is_valid(index, tile_count(walk.tiles)) & (walk.rank == 0)
        while working:
            tile = self.tile(index, walk)
            ring = self.mma_turn(operands, bars, ring, turn, q_phase, Boolean(False), first=True)
            for i in cutlass.range(1, tile.blocks, unroll=1):
                turn += 1
                ring = self.mma_turn(operands, bars, ring, turn, q_phase, i > 1)
            turn += 1
            if const_expr(self.persistent and not self.overlay):
                for q in cutlass.range_constexpr(self.q_tiles):
                    self._commit(bars["q_empty"] + q)
            ring = self.mma_turn(operands, bars, ring, turn, q_phase, tile.blocks > 1, last=True)
            q_phase = q_phase ^ 1
            wave, index, working = self.next_tile(wave, index, walk)

    def mma_turn(
        self,
        operands: tuple,
        bars: dict,
        ring: Ring,
        turn: Int32,
        q_phase: Int32,
        accumulate: Boolean,
        first: bool = False,
        last: bool = False,
    ) -> Ring:
        """QK of K/V tile ``turn`` and PV of the one before; the first turn has no PV, the last one no QK."""
        qk_mma, pv_mma, tQ, tK, tV, tP, s_layout, o_layout, tmem = operands
        config, last_tile = self.config, self.q_tiles - 1
        before = turn - 1
        place: dict[int, Ring] = {}
        for name, lag in self.mma_order:
            if (first and lag == 1) or (last and lag == 0):
                continue
            q = int(name[2])
            if lag not in place:
                place[lag] = ring
                if first:
                    cute.arch.mbarrier_wait(bars["q_full"] + q, q_phase)
                cute.arch.mbarrier_wait(bars["kv_full"] + ring.stage, ring.phase)
                ring = self._advance(ring)
            elif first:
                cute.arch.mbarrier_wait(bars["q_full"] + q, q_phase)
            stage = place[lag].stage
            if lag == 0:
                slot, _ = self.slot(q, turn)
                scores = cute.make_tensor(tmem + slot * config.tile_n, s_layout)
                steps = range(self.head_dim // MMA_K)
                # For long rows q as something that changes: else the descriptors of all of Q take registers.
                q_stage = q if self.head_dim <= 128 else q + (turn >> 30)
                fence_after_wait()
                self._gemm(
                    qk_mma, scores, tQ[None, None, None, q_stage], tK[None, None, None, stage], steps, False
                )
                self._commit(bars["s_full"] + slot)
            else:
                slot, phase = self.slot(q, before)
                start = self.split if name.endswith("_last") else 0
                end = self.split if name.endswith("_first") else config.tile_n
                cute.arch.mbarrier_wait(bars["p_last" if start else "p_full"] + slot, phase)
                fence_after_wait()
                address = cute.recast_ptr(tmem + slot * config.tile_n, dtype=self.dtype)
                out = cute.make_tensor(tmem + self.plan.buffer("acc").offset + q * self.head_dim_v, o_layout)
                self._gemm(
                    pv_mma,
                    out,
                    cute.make_tensor(address, tP.layout),
                    tV[None, None, None, stage],
                    range(start // MMA_K, end // MMA_K),
                    True if start else accumulate,
                )
                if end < config.tile_n:
                    continue
                if last or self.q_tiles == 1:
                    self._commit(bars["o_full"] + q)
            if q == last_tile:
                self._commit(bars["kv_empty"] + stage)
        return ring

    @cute.jit
    def softmax(
        self,
        tmem: cute.Pointer,
        stats: cute.Tensor,
        zero: cute.Pointer,
        mLSE: cute.Tensor,
        bars: dict,
        call: tuple,
        scale_log2: Float32,
    ) -> None:
        """Softmax warpgroup of a query tile: S to P in TMEM, a thread a row; factors to the correction."""
        config, plan = self.config, self.plan
        thread = cute.arch.thread_idx()[0] % 128
        warps = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        q, warp = warps // 4, warps % 4
        turn, scales = Int32(0), Int32(0)
        walk = self.walk(call)
        wave, index = Int32(0), walk.worker
        working = is_valid(index, tile_count(walk.tiles))
        while working:
            tile = self.tile(index, walk)
            row = tile.m_block * plan.tile_rows + (q * config.cta_group + walk.rank) * TILE_M + thread
            # keys of the block at hand that the row sees, counted from its first one
            visible = walk.seqlen_k - (tile.blocks - 1) * config.tile_n
            if const_expr(self.causal):
                visible = cutlass.min(visible, visible + row // self.packed - walk.seqlen_q + 1)
            row_max, row_sum = -Float32.inf, Float32(0.0)
            env = (tmem, stats, zero, bars, scale_log2, q, warp, thread)
            for i in cutlass.range(tile.blocks - tile.clear, unroll=1):
                row_max, row_sum, scales = self.softmax_step(
                    env, row_max, row_sum, scales, turn, i > 0, visible, True
                )
                turn += 1
                visible += config.tile_n
            for i in cutlass.range(tile.clear, unroll=1):
                later = (tile.blocks > tile.clear) | (i > 0)
                row_max, row_sum, scales = self.softmax_step(
                    env, row_max, row_sum, scales, turn, later, Int32(0), False
                )
                turn += 1
            factor, lse = softmax.normaliser(row_max, row_sum, scale_log2)
            stats[thread, 2 + q] = factor
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(bars["sum_full"] + q * 4 + warp)
            # Decoded anew, so that no register holds the place of the tile through its loops.
            index = opaque(index)
            tile = self.tile(index, walk)
            row = tile.m_block * plan.tile_rows + (q * config.cta_group + walk.rank) * TILE_M + thread
            position = row // self.packed
            if position < walk.seqlen_q:
                mLSE[tile.batch, tile.head * self.packed + row % self.packed, position] = lse
            wave, index, working = self.next_tile(wave, index, walk)

    @cute.jit
    def softmax_step(
        self,
        env: tuple,
        row_max: Float32,
        row_sum: Float32,
        scales: Int32,
        turn: Int32,
        later: Boolean,
        visible: Int32,
        masked: cutlass.Constexpr[bool],
    ) -> tuple[Float32, Float32, Int32]:
        """One K/V tile: maximum, exponentials, P. ``later`` is false in an output tile's first one."""
        tmem, stats, zero, bars, scale_log2, q, warp, thread = env
        config = self.config
        slot, phase = self.slot(q, turn)
        address = tmem + slot * config.tile_n
        cute.arch.mbarrier_wait(bars["s_full"] + slot, phase)
        fence_after_wait()

        held = config.tile_n if const_expr(self.passes == 1) else 32
        s = cute.make_rmem_tensor(held, Float32)
        tile_max = row_max
        if const_expr(self.passes == 1):
            for start, size in self.fragments:
                TmemRows(size, thread).load(address + start, s.iterator + start)
            cute.arch.fence_view_async_tmem_load()
            if const_expr(masked):
                mask_from_column(s, tuple((c, c) for c in range(config.tile_n)), visible)
            tile_max = softmax.maximum_of(s, tuple(range(config.tile_n)), row_max, 4)
        else:
            for start, size in self.fragments:
                self._load_fragment(s, address, start, size, thread, visible, masked)
                tile_max = softmax.maximum_of(s, tuple(range(size)), tile_max, 4)

        # The maximum that this tile's exponentials are taken against: the old one, while the true one is at
        # most the threshold larger, so that nothing accumulated needs rescaling.
        finite = tile_max
        if const_expr(masked):
            finite = Float32(0.0) if tile_max == -Float32.inf else tile_max
        factor = Float32(1.0)
        if later:
            growth = (row_max - finite) * scale_log2
            grown = growth < Float32(-config.rescale_threshold)
            # A row that has seen no key yet has nothing to rescale.
            rescales = grown & (row_max > -Float32.inf)
            if softmax.any_lane(rescales):
                factor = exp2_hardware(growth)
            factor = factor if rescales else Float32(1.0)
            finite = finite if grown else row_max
            tile_max = tile_max if grown else row_max
            column, barrier = q, q * 4 + warp
            if const_expr(self.q_tiles == 1):
                column, barrier = scales & 1, (scales & 1) * 4 + warp
            stats[thread, column] = factor
            fence_before_arrive()
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(bars["scale_full"] + barrier)
            scales += 1
        # An ulp or two above, so that the argument of the maximum itself does not round to just below 0,
        # where a polynomial is worst: its error would fall on the key with the most weight.
        below, above = scale_log2 * Float32(2.0**-23 - 1.0), scale_log2 * Float32(-1.0 - 2.0**-23)
        minus = finite * (below if finite > Float32(0.0) else above)
        row_sum = self.exponentials(
            s, address, scale_log2, minus, row_sum * factor, zero, bars, slot, thread, visible, masked
        )
        return tile_max, row_sum, scales

    @cute.jit
    def exponentials(
        self,
        s: cute.Tensor,
        address: cute.Pointer,
        scale_log2: Float32,
        minus: Float32,
        row_sum: Float32,
        zero: cute.Pointer,
        bars: dict,
        slot: Int32,
        thread: Int32,
        visible: Int32,
        masked: cutlass.Constexpr[bool],
    ) -> Float32:
        """P = 2^(S * scale + minus) of a row, by fragments, over S in TMEM; ``row_sum`` plus its sum."""
        config = self.config
        scale, shift = (scale_log2, scale_log2), (minus, minus)
        before = shift
        total = (row_sum, Float32(0.0))
        for start, size in self.fragments:
            offset = start if const_expr(self.passes == 1) else 0
            if const_expr(self.passes == 2):
                self._load_fragment(s, address, start, size, thread, visible, masked)
            packed = cute.make_rmem_tensor(size // 2, Int32)
            for pair in cutlass.range_constexpr(size // 2):
                at = offset + 2 * pair
                x = fma_pair(
                    (s[at], s[at + 1]), scale, before if const_expr(2 * pair < EARLY_COLUMNS) else shift
                )
                if const_expr(self.emulated[start + 2 * pair]):
                    p = exp2_emulated_pair(x, config.exp2_degree)
                else:
                    p = (exp2_hardware(x[0]), exp2_hardware(x[1]))
                if const_expr(start < config.tile_n - self.summed_late):
                    total = cute.arch.add_packed_f32x2(total, p)
                else:
                    s[at], s[at + 1] = p
                packed[pair] = pack_pair(p[0], p[1], self.dtype)
            values = cute.recast_ptr(packed.iterator, dtype=Float32)
            TmemRows(size // 2, thread, store=True).store(address + start // 2, values)
            end = start + size
            if const_expr(end == self.split or end == config.tile_n):
                cute.arch.fence_view_async_tmem_store()
                self._arrive_mma(bars["p_full" if const_expr(end == self.split) else "p_last"] + slot)
            if const_expr(end < config.tile_n):
                # The assembler would otherwise do the exponentials of a whole row first, keep rounded and
                # unrounded values together in registers, and hand over the first part of P late.
                link = zero_read_here(zero)
                if const_expr(start < config.tile_n - self.summed_late):
                    link = cute.arch.fmin(total[0], link)  # the sum is not negative, or not a number
                held = minus + link
                before, shift = shift, (held, held)
        if const_expr(self.summed_late > 0):
            total = self._add_late(s, total, zero_read_here(zero))
        return total[0] + total[1]

    @cute.jit
    def correction(self, tmem: cute.Pointer, stats: cute.Tensor, sO: list, bars: dict, call: tuple) -> None:
        """Correction warpgroup: rescales O where a row's maximum grew, normalises it at the end."""
        thread = cute.arch.thread_idx()[0] % 128
        warp = thread // 32
        turn, scales, tiles, products = Int32(0), Int32(0), Int32(0), Int32(0)
        walk = self.walk(call)
        wave, index = Int32(0), walk.worker
        working = is_valid(index, tile_count(walk.tiles))
        while working:
            tile = self.tile(index, walk)
            # O of the last output tile has been read: PV may overwrite it.
            for q in cutlass.range_constexpr(self.q_tiles):
                slot, _ = self.slot(q, turn)
                self._arrive_mma(bars["p_full"] + slot)
            turn += 1
            for _ in cutlass.range(1, tile.blocks, unroll=1):
                for q in cutlass.range_constexpr(self.q_tiles):
                    column, barrier, phase = q, q * 4 + warp, scales & 1
                    if const_expr(self.q_tiles == 1):
                        column, barrier, phase = scales & 1, (scales & 1) * 4 + warp, (scales >> 1) & 1
                    cute.arch.mbarrier_wait(bars["scale_full"] + barrier, phase)
                    if const_expr(self.q_tiles == 1):
                        cute.arch.mbarrier_wait(bars["o_full"], products & 1)
                    fence_after_wait()
                    factor = stats[thread, column]
                    if softmax.any_lane(factor < Float32(1.0)):
                        self.rescale(tmem + self._o_column(q), factor, thread)
                    slot, _ = self.slot(q, turn)
                    # The softmax may overwrite the factor once S of the next tile is there.
                    self._arrive_mma(bars["p_full"] + slot, orders_smem=True)
                turn += 1
                scales += 1
                products += 1
            for q in cutlass.range_constexpr(self.q_tiles):
                cute.arch.mbarrier_wait(bars["sum_full"] + q * 4 + warp, tiles & 1)
                done = products if const_expr(self.q_tiles == 1) else tiles
                cute.arch.mbarrier_wait(bars["o_full"] + q, done & 1)
                fence_after_wait()
                if const_expr(self.persistent and not self.overlay):
                    cute.arch.mbarrier_wait(bars["o_empty"] + q, (tiles + 1) & 1)
                self.normalise(tmem + self._o_column(q), stats[thread, 2 + q], sO[q], thread)
                cute.arch.fence_view_async_shared()
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(bars["o_ready"] + q)
            tiles += 1
            products += 1
            wave, index, working = self.next_tile(wave, index, walk)

    @cute.jit
    def rescale(self, address: cute.Pointer, factor: Float32, thread: Int32) -> None:
        """A row of O in TMEM times ``factor``."""
        for start in cutlass.range_constexpr(0, self.head_dim_v, O_COLUMNS):
            o = cute.make_rmem_tensor(O_COLUMNS, Float32)
            TmemRows(O_COLUMNS, thread).load(address + start, o.iterator)
            cute.arch.fence_view_async_tmem_load()
            for i in cutlass.range_constexpr(0, O_COLUMNS, 2):
                o[i], o[i + 1] = cute.arch.mul_packed_f32x2((o[i], o[i + 1]), (factor, factor))
            TmemRows(O_COLUMNS, thread, store=True).store(address + start, o.iterator)
        cute.arch.fence_view_async_tmem_store()

    @cute.jit
    def normalise(self, address: cute.Pointer, factor: Float32, sO: cute.Tensor, thread: Int32) -> None:
        """A row of O in TMEM times ``factor``, converted, into SMEM in 16-byte pieces."""
        piece = 128 // self.dtype.width
        # not known to the compiler: it would keep all swizzled addresses in registers across output tiles
        thread = opaque(thread)
        copy = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.dtype, num_bits_per_copy=128)
        for start in cutlass.range_constexpr(0, self.head_dim_v, O_COLUMNS):
            o = cute.make_rmem_tensor(O_COLUMNS, Float32)
            TmemRows(O_COLUMNS, thread).load(address + start, o.iterator)
            cute.arch.fence_view_async_tmem_load()
            out = cute.make_rmem_tensor(O_COLUMNS, self.dtype)
            packed = cute.recast_tensor(out, Int32)
            for i in cutlass.range_constexpr(0, O_COLUMNS, 2):
                pair = cute.arch.mul_packed_f32x2((o[i], o[i + 1]), (factor, factor))
                packed[i // 2] = pack_pair(pair[0], pair[1], self.dtype)
            for i in cutlass.range_constexpr(O_COLUMNS // piece):
                target = cute.local_tile(sO, (1, piece), (thread, start // piece + i))
                source = cute.local_tile(out, (piece,), (i,))
                cute.copy(copy, source, cute.group_modes(target, 0, 2))

    @cute.jit
    def store(self, tma_o: cute.CopyAtom, mO: cute.Tensor, sO: list, bars: dict, call: tuple) -> None:
        """TMA store warp; rows past the end are clipped."""
        phase = Int32(0)
        walk = self.walk(call)
        wave, index = Int32(0), walk.worker
        working = is_valid(index, tile_count(walk.tiles))
        while working:
            tile = self.tile(index, walk)
            gO = cute.local_tile(mO[None, None, tile.head, tile.batch], (TILE_M, self.head_dim_v), (None, 0))
            for q in cutlass.range_constexpr(self.q_tiles):
                block = (tile.m_block * self.q_tiles + q) * self.config.cta_group + walk.rank
                source, target = cpasync.tma_partition(
                    tma_o, 0, cute.make_layout(1), cute.group_modes(sO[q], 0, 2), cute.group_modes(gO, 0, 2)
                )
                cute.arch.mbarrier_wait(bars["o_ready"] + q, phase)
                cute.copy(tma_o, source, target[None, block])
                cute.arch.cp_async_bulk_commit_group()
            for q in cutlass.range_constexpr(self.q_tiles):
                cute.arch.cp_async_bulk_wait_group(self.q_tiles - 1 - q, read=True)
                if const_expr(self.persistent):
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive(bars["q_empty" if self.overlay else "o_empty"] + q)
            phase = phase ^ 1
            wave, index, working = self.next_tile(wave, index, walk)

    def _add_late(self, s: cute.Tensor, total: Pair, zero: Float32) -> Pair:
        """``total`` plus the exponentials left in ``s``; nothing is added before ``zero`` is known."""
        end = self.config.tile_n if self.passes == 1 else self.fragments[-1][1]
        chains: list[Pair] = [(total[0] + zero, total[1]), *[(zero, zero)] * (SUM_CHAINS - 1)]
        for number, at in enumerate(range(end - self.summed_late, end, 2)):
            chain = number % SUM_CHAINS
            chains[chain] = cute.arch.add_packed_f32x2(chains[chain], (s[at], s[at + 1]))
        while len(chains) > 1:
            chains = [
                cute.arch.add_packed_f32x2(a, b) for a, b in zip(chains[::2], chains[1::2], strict=True)
            ]
        return chains[0]

    # ------------------------------------------------------------------ shared by the roles

    def slot(self, q: Any, turn: Int32) -> tuple[Any, Int32]:
        """S/P slot of a turn and the parity of its barriers: one a query tile, or two that take turns."""
        if self.q_tiles == 2:
            return q, turn & 1
        return turn & 1, (turn >> 1) & 1

    def _o_column(self, q: int) -> int:
        return self.plan.buffer("acc").offset + q * self.head_dim_v

    def _smem(self, base: cute.Pointer, name: str, layout: Any) -> cute.Tensor:
        pointer = cute.recast_ptr(base + self.plan.buffer(name).offset, layout.inner, self.dtype)
        return cute.make_tensor(pointer, layout.outer)

    @cute.jit
    def _sync_all(self) -> None:
        """All threads of the CTA or of the pair; barrier inits and TMEM addresses become visible."""
        if const_expr(self.pair):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    @cute.jit
    def _arrive_mma(self, barrier: cute.Pointer, orders_smem: cutlass.Constexpr[bool] = False) -> None:
        """This warp's arrival for the MMA warp, after its TMEM accesses; of a pair, at its first CTA.

        The fence orders TMEM accesses before a relaxed arrival. ``orders_smem`` orders accesses to SMEM too,
        which across CTAs takes a memory barrier at the scope of the GPU.
        """
        fence_before_arrive()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            if const_expr(self.pair):
                cute.arch.mbarrier_arrive(barrier, 0, relaxed=not orders_smem, scope=_CLUSTER)
            else:
                cute.arch.mbarrier_arrive(barrier)

    def _commit(self, barrier: cute.Pointer) -> None:
        with cute.arch.elect_one():
            tcgen05.commit(barrier, self.all_ctas, self.group)

    def _gemm(
        self,
        tiled_mma: cute.TiledMma,
        acc: cute.Tensor,
        a: cute.Tensor,
        b: cute.Tensor,
        steps: range,
        accumulate: Any,
    ) -> None:
        atom = cute.make_mma_atom(tiled_mma.op)
        for k in steps:
            atom.set(tcgen05.Field.ACCUMULATE, accumulate if k == steps.start else True)
            cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)

    @cute.jit
    def _advance(self, ring: Ring) -> Ring:
        stage = ring.stage + 1
        wrapped = stage == self.config.kv_stages
        return Ring(Int32(0) if wrapped else stage, ring.phase ^ 1 if wrapped else ring.phase)

    def _load_block(
        self, atom: cute.CopyAtom, parts: tuple, n_block: Int32, ring: Ring, bars: dict, rank: Int32, dim: int
    ) -> Ring:
        cute.arch.mbarrier_wait(bars["kv_empty"] + ring.stage, ring.phase)
        elements = self.config.tile_n * dim // self.config.cta_group
        self._tma_load(atom, parts, n_block, ring.stage, bars["kv_full"] + ring.stage, rank, elements)
        return self._advance(ring)

    @cute.jit
    def _tma_load(
        self,
        atom: cute.CopyAtom,
        parts: tuple,
        block: Int32,
        stage: Int32,
        barrier: cute.Pointer,
        rank: Int32,
        elements: cutlass.Constexpr[int],
    ) -> None:
        """One box into SMEM; the pair's first CTA expects the bytes of both, and both signal its barrier."""
        smem, gmem = parts
        size = elements * self.dtype.width // 8 * self.config.cta_group
        if rank == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)
        cute.copy(atom, gmem[None, block], smem[None, stage], tma_bar_ptr=barrier)

    def _tma_partition(self, atom: cute.CopyAtom, smem: cute.Tensor, gmem: cute.Tensor) -> Any:
        return cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 3), cute.group_modes(gmem, 0, 3)
        )

    def _load_fragment(
        self,
        s: cute.Tensor,
        address: cute.Pointer,
        start: int,
        size: int,
        thread: Int32,
        visible: Int32,
        masked: bool,
    ) -> None:
        TmemRows(size, thread).load(address + start, s.iterator)
        cute.arch.fence_view_async_tmem_load()
        if masked:
            mask_from_column(s, tuple((i, start + i) for i in range(size)), visible)


_CLUSTER = cutlass._mlir.dialects.nvvm.MemScopeKind.CLUSTER


def build(problem: AttentionProblem, config: SM100ForwardConfig) -> tuple[Any, tuple[Any, ...]]:
    """The host function of the class of ``problem`` and fake arguments to compile it with.

    The arguments are those of :meth:`ForwardSm100.__call__`: q, k, v and out (batch, seqlen, heads, head_dim)
    with any strides but a contiguous last dimension, lse float32 (batch, heads, seqlen_q), softmax_scale,
    sm_count and the stream.

    Raises:
        InfeasibleError: no such kernel can run.
    """
    kernel = ForwardSm100(build_plan(problem, config, load_gpu("b200")))
    batch, seqlen_q, seqlen_k = (cute.sym_int() for _ in range(3))
    heads, kv_heads = cute.sym_int(divisibility=kernel.packed), cute.sym_int()

    def tensor(*shape: Any) -> Any:
        strides = (*(cute.sym_int64(divisibility=8) for _ in shape[:-1]), 1)
        return cute.runtime.make_fake_tensor(kernel.dtype, shape, strides, assumed_align=16)

    lse = cute.runtime.make_fake_tensor(
        Float32, (batch, heads, seqlen_q), (cute.sym_int64(), cute.sym_int64(), 1), assumed_align=4
    )
    arguments = (
        tensor(batch, seqlen_q, heads, kernel.head_dim),
        tensor(batch, seqlen_k, kv_heads, kernel.head_dim),
        tensor(batch, seqlen_k, kv_heads, kernel.head_dim_v),
        tensor(batch, seqlen_q, heads, kernel.head_dim_v),
        lse,
        Float32(1.0),
        Int32(148),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
    return kernel, arguments
