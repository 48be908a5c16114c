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
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import SmemAllocator

from fa4tune.hardware.gpu import ARCHITECTURES, load_gpu
from fa4tune.kernels import softmax
from fa4tune.kernels.config import SM90ForwardConfig
from fa4tune.kernels.exp2_device import pack_pair, stay_below
from fa4tune.kernels.mask import mask_from_column
from fa4tune.kernels.plan import Barrier, KernelPlan
from fa4tune.kernels.sm90.forward_plan import (
    ALIGNMENT,
    ROWS,
    WARPGROUP,
    WARPS,
    build_plan,
    emulated_registers,
)
from fa4tune.kernels.tile_scheduler import (
    TileShape,
    decode_tile,
    is_valid,
    persistent_index,
    tile_count,
    tile_shape,
)
from fa4tune.problem import AttentionProblem

DTYPES = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}


def build(problem: AttentionProblem, config: SM90ForwardConfig) -> tuple[ForwardSm90, tuple[Any, ...]]:
    """The host function of a kernel class and fake arguments to compile it with.

    Args:
        problem: any problem of the class; its lengths and head counts are not compiled in.
        config: knob values.

    Returns:
        (host function, arguments ``q, k, v, out (batch, seqlen, heads, d)``, ``lse (batch, heads, seqlen_q)``
        float32, ``softmax_scale``, ``sm_count``, stream); strides are dynamic, multiples of 16 bytes.

    Raises:
        InfeasibleError: no such kernel can run.
    """
    plan = build_plan(problem, config, load_gpu(ARCHITECTURES["sm_90a"]))
    dtype = DTYPES[problem.dtype]
    batch, seqlen_q, seqlen_k, heads, kv_heads = (cute.sym_int() for _ in range(5))

    def tensor(seqlen: Any, head_count: Any, dim: int) -> Any:
        strides = (*(cute.sym_int64(divisibility=16 * 8 // dtype.width) for _ in range(3)), 1)
        return make_fake_tensor(dtype, (batch, seqlen, head_count, dim), strides, assumed_align=16)

    lse_strides = (cute.sym_int64(), cute.sym_int64(), 1)
    arguments = (
        tensor(seqlen_q, heads, problem.head_dim),
        tensor(seqlen_k, kv_heads, problem.head_dim),
        tensor(seqlen_k, kv_heads, problem.head_dim_v),
        tensor(seqlen_q, heads, problem.head_dim_v),
        make_fake_tensor(Float32, (batch, heads, seqlen_q), lse_strides, assumed_align=4),
        Float32(1.0),
        Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
    return ForwardSm90(plan), arguments


class Ring(NamedTuple):
    """Position in a ring of stages and the parity to wait for there."""

    stage: Any
    phase: Any


class Ahead(NamedTuple):
    """Position of the next block, and whether its K and this block's V were seen to have arrived."""

    ring: Any
    k_arrived: Any
    v_arrived: Any


class Operands(NamedTuple):
    """MMA operands of a warpgroup: descriptors of Q, K, V and P (or P's registers), accumulators S and O."""

    qk: Any
    pv: Any
    q: Any
    k: Any
    v: Any
    p: Any
    s: Any
    o: Any


class Registers(NamedTuple):
    """The same accumulators as flat registers (P packed in pairs), and what the softmax keeps of a row."""

    s: Any
    o: Any
    p: Any
    p_store: Any
    row_max: Any
    row_sum: Any


class Position(NamedTuple):
    """Where a warpgroup's rows are: ``row`` of this thread, ``end`` the first key that row does not see and
    ``limit`` the first key that does not exist, both counted from this thread's first column."""

    group: Any
    thread: Any
    row: Any
    end: Any
    limit: Any


class ForwardSm90:
    """One kernel: ``plan`` is compiled in, lengths, head counts and strides are arguments."""

    def __init__(self, plan: KernelPlan) -> None:
        config, problem = plan.config, plan.problem
        assert isinstance(config, SM90ForwardConfig)
        self.plan, self.config = plan, config
        self.dtype = DTYPES[problem.dtype]
        self.head_dim, self.head_dim_v = problem.head_dim, problem.head_dim_v
        self.causal = problem.mask_kind == "causal"
        self.persistent = config.scheduler == "persistent"
        self.longest_first = bool(plan.constants["longest_first"])
        self.wait_register = int(plan.constants["wait_register"])
        self.emulated = emulated_registers(config.tile_n, config.exp2_share)
        # (register, column) of the two rows a thread holds, columns from the thread's first, 2 * (t % 4)
        elements = [(i, 8 * (i // 4) + i % 2) for i in range(config.tile_n // 2)]
        self.rows = tuple(tuple(e for e in elements if e[0] // 2 % 2 == row) for row in (0, 1))
        self.row_registers = tuple(tuple(register for register, _ in row) for row in self.rows)

    # -- host ------------------------------------------------------------------------------------------------

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
        """Launch on tensors as :func:`build` describes them; ``sm_count`` sizes a persistent grid."""
        config, d, dv, n = self.config, self.head_dim, self.head_dim_v, self.config.tile_n
        # (batch, seqlen, heads, d) -> (seqlen, d, heads, batch)
        mQ, mK, mV, mO = (
            cute.make_tensor(t.iterator, cute.select(t.layout, mode=[1, 3, 2, 0])) for t in (mQ, mK, mV, mO)
        )
        layouts = (
            self._smem_layout(ROWS, d, config.warpgroups),
            self._smem_layout(n, d, config.kv_stages),
            self._smem_layout(n, dv, config.kv_stages),
            self._smem_layout(ROWS, dv, config.warpgroups),
            self._smem_layout(ROWS, n, config.warpgroups),
        )
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        boxes = ((load, mQ, (ROWS, d)), (load, mK, (n, d)), (load, mV, (n, dv)), (store, mO, (ROWS, dv)))
        pairs = [
            cpasync.make_tiled_tma_atom(op, tensor, cute.select(layout, mode=[0, 1]), box)
            for (op, tensor, box), layout in zip(boxes, layouts, strict=False)
        ]
        seqlen_q, seqlen_k = Int32(mQ.shape[0]), Int32(mK.shape[0])
        heads, batch = Int32(mQ.shape[2]), Int32(mQ.shape[3])
        group = heads // Int32(mK.shape[2])
        row_bytes = (d + dv) * self.dtype.width // 8
        tiles = tile_shape(seqlen_q, config.tile_m, heads, batch, group, seqlen_k, row_bytes)
        grid = tile_count(tiles)
        if const_expr(self.persistent):
            grid = cutlass.min(grid, sm_count * config.ctas_per_sm)
        self.kernel(
            self._tiled_mma(n, warpgroup.OperandMajorMode.K, True),
            self._tiled_mma(dv, warpgroup.OperandMajorMode.MN, not config.p_in_registers),
            tuple(atom for atom, _ in pairs),
            tuple(tensor for _, tensor in pairs),
            mLSE,
            layouts,
            tiles,
            (seqlen_q, seqlen_k, group),
            softmax_scale * Float32(softmax.LOG2_E),
        ).launch(
            grid=[grid, 1, 1],
            block=[config.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=config.ctas_per_sm,
            preferred_smem_carveout=100,
        )

    def _tiled_mma(self, n: int, b_major: Any, a_in_smem: bool) -> cute.TiledMma:
        """One warpgroup's MMA of 64 rows and ``n`` columns."""
        source = warpgroup.OperandSource.SMEM if a_in_smem else warpgroup.OperandSource.RMEM
        types, k_major = (self.dtype, self.dtype), warpgroup.OperandMajorMode.K
        return sm90.make_trivial_tiled_mma(*types, k_major, b_major, Float32, (1, 1, 1), (ROWS, n), source)

    def _smem_layout(self, rows: int, columns: int, stages: int) -> Any:
        """(rows, columns, stages), columns contiguous and swizzled as TMA and wgmma want them."""
        kind = sm90.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, self.dtype, columns)
        atom = warpgroup.make_smem_layout_atom(kind, self.dtype)
        return cute.tile_to_shape(atom, (rows, columns, stages), order=(0, 1, 2))

    # -- kernel ----------------------------------------------------------------------------------------------

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
        """Allocates what the plan lists, in its order, and sends each warp to its role."""
        config = self.config
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_index == 0:
            for atom in tma:
                cpasync.prefetch_descriptor(atom)

        mbarriers, bars, tensors = self._allocate(layouts)
        if warp_index == 0:
            with cute.arch.elect_one():
                for barrier in mbarriers:
                    for stage in range(barrier.stages):
                        cute.arch.mbarrier_init(bars[barrier.name] + stage, barrier.arrivals)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        group = cute.arch.make_warp_uniform(warp_index // WARPS)
        if group == config.warpgroups:
            cute.arch.setmaxregister_decrease(self.plan.role("load").registers)
            if warp_index == WARPS * config.warpgroups:
                self.load(tma, gmem, tensors, bars, tiles, lengths)
        else:
            cute.arch.setmaxregister_increase(self.plan.role("mma0").registers)
            self.mma(qk_mma, pv_mma, tma[3], gmem[3], mLSE, tensors, bars, tiles, lengths, scale_log2)

    def _allocate(self, layouts: tuple) -> tuple[list[Barrier], dict[str, Any], dict[str, cute.Tensor]]:
        """mbarriers of the plan, their pointers, and its buffers as tensors."""
        smem = SmemAllocator()
        mbarriers = [b for b in self.plan.barriers if b.kind == "mbarrier"]
        pointers = {b.name: smem.allocate_array(cutlass.Int64, b.stages) for b in mbarriers}
        tensors: dict[str, cute.Tensor] = {}
        for buffer in self.plan.buffers:
            layout = layouts["qkvop".index(buffer.name)]
            if buffer.overlays is None:
                tensor = smem.allocate_tensor(self.dtype, layout.outer, ALIGNMENT, swizzle=layout.inner)
            else:
                below = tensors[buffer.overlays].iterator
                tensor = cute.make_tensor(cute.recast_ptr(below, layout.inner, self.dtype), layout.outer)
            tensors[buffer.name] = tensor
        return mbarriers, pointers, tensors

    @cute.jit
    def load(
        self, tma: tuple, gmem: tuple, tensors: dict, bars: dict, tiles: TileShape, lengths: tuple
    ) -> None:
        """Producer warp: Q of each warpgroup once a tile, K and V blocks in the order they are consumed."""
        config, n = self.config, self.config.tile_n
        seqlen_q, seqlen_k, kv_group = lengths
        block, grid, total = cute.arch.block_idx()[0], cute.arch.grid_dim()[0], tile_count(tiles)
        wave, index = Int32(0), block
        k_ring, v_ring, q_phase = Ring(Int32(0), Int32(1)), Ring(Int32(0), Int32(1)), Int32(1)
        working = is_valid(index, total)
        while working:
            m_block, head, batch = decode_tile(index, tiles, self.longest_first)
            kv_head = head // kv_group
            q = self._tma_tiles(tma[0], tensors["q"], gmem[0][None, None, head, batch], ROWS, self.head_dim)
            k = self._tma_tiles(tma[1], tensors["k"], gmem[1][None, None, kv_head, batch], n, self.head_dim)
            v = self._tma_tiles(tma[2], tensors["v"], gmem[2][None, None, kv_head, batch], n, self.head_dim_v)
            blocks = self.key_blocks((m_block + 1) * config.tile_m, seqlen_q, seqlen_k)
            for w in cutlass.range_constexpr(config.warpgroups):
                if const_expr(self.persistent):
                    cute.arch.mbarrier_wait(bars["q_empty"] + w, q_phase)
                self._tma_load(tma[0], q, m_block * config.warpgroups + w, Int32(w), bars, "q")
                if const_expr(w == 0):
                    # nobody needs more than this to begin
                    k_ring = self._load_block(tma[1], k, blocks - 1, bars, "k", k_ring)
            for i in cutlass.range(1, blocks, unroll=1):
                n_block = blocks - 1 - i
                if const_expr(config.overlap):
                    k_ring = self._load_block(tma[1], k, n_block, bars, "k", k_ring)
                v_ring = self._load_block(tma[2], v, n_block + 1, bars, "v", v_ring)
                if const_expr(not config.overlap):
                    k_ring = self._load_block(tma[1], k, n_block, bars, "k", k_ring)
            v_ring = self._load_block(tma[2], v, 0, bars, "v", v_ring)
            q_phase = q_phase ^ 1
            working = Boolean(False)
            if const_expr(self.persistent):
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
        tensors: dict,
        bars: dict,
        tiles: TileShape,
        lengths: tuple,
        scale_log2: Float32,
    ) -> None:
        """MMA warpgroup: S = QK, softmax, O += PV, epilogue."""
        config = self.config
        seqlen_q, seqlen_k, _ = lengths
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        group = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARPGROUP)
        ops, regs = self._fragments(qk_mma, pv_mma, tensors, thread, group)
        if const_expr(config.ping_pong):
            # the first turn is the first warpgroup's
            if group == config.warpgroups - 1:
                self._pass_turn(group)

        block, grid, total = cute.arch.block_idx()[0], cute.arch.grid_dim()[0], tile_count(tiles)
        wave, index = Int32(0), block
        ring, q_phase = Ring(Int32(0), Int32(0)), Int32(0)
        working = is_valid(index, total)
        while working:
            m_block, head, batch = decode_tile(index, tiles, self.longest_first)
            first_row = m_block * config.tile_m + group * ROWS
            tile_blocks = self.key_blocks((m_block + 1) * config.tile_m, seqlen_q, seqlen_k)
            blocks = self.key_blocks(first_row + ROWS, seqlen_q, seqlen_k)
            clear = self.clear_blocks(first_row, seqlen_q, seqlen_k)
            if first_row >= seqlen_q:
                blocks = Int32(1)
                clear = Int32(0)
            row = first_row + thread // 32 * 16 + thread % 32 // 4
            limit = seqlen_k - 2 * (thread % 4)
            at = Position(group, thread, row, row + 1 + limit - seqlen_q, limit)

            regs.o.fill(0.0)
            regs.row_max.fill(-Float32.inf)
            regs.row_sum.fill(0.0)
            for _ in cutlass.range(tile_blocks - blocks, unroll=1):
                ring = self.pass_over(bars, ring, group)
            cute.arch.mbarrier_wait(bars["q_full"] + group, q_phase)
            # blocks below `clear` need no mask; the first one gets it in any case
            clear = cutlass.min(clear, blocks - 1)
            masked = blocks - clear
            if const_expr(config.overlap):
                ahead = self.first_scores(ops, regs, bars, ring, at, scale_log2, blocks - 1)
                for i in cutlass.range(1, masked, unroll=1):
                    n_block = blocks - 1 - i
                    ring, ahead = self.step_overlap(
                        ops, regs, bars, ring, ahead, at, scale_log2, n_block, True
                    )
                for i in cutlass.range(clear, unroll=1):
                    n_block = clear - 1 - i
                    ring, ahead = self.step_overlap(
                        ops, regs, bars, ring, ahead, at, scale_log2, n_block, False
                    )
                self._release_q(bars, group)
                ring = self.last_values(ops, bars, ring)
            else:
                for i in cutlass.range(masked, unroll=1):
                    ring = self.step(ops, regs, bars, ring, at, scale_log2, blocks - 1 - i, True)
                for i in cutlass.range(clear, unroll=1):
                    ring = self.step(ops, regs, bars, ring, at, scale_log2, clear - 1 - i, False)
                self._release_q(bars, group)
            q_phase = q_phase ^ 1

            self.write_lse(regs, mLSE, at, head, batch, seqlen_q, scale_log2)
            self.store_o(ops, regs, tma_o, mO[None, None, head, batch], tensors["o"], at, m_block)
            working = Boolean(False)
            if const_expr(self.persistent):
                wave += 1
                index = persistent_index(wave, block, grid)
                working = is_valid(index, total)
        # SMEM must outlive the last store's reads
        if thread < 32:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    def _fragments(
        self, qk_mma: cute.TiledMma, pv_mma: cute.TiledMma, tensors: dict, thread: Int32, group: Int32
    ) -> tuple[Operands, Registers]:
        n, dv = self.config.tile_n, self.head_dim_v
        qk, pv = qk_mma.get_slice(0), pv_mma.get_slice(0)
        v_transposed = cute.make_tensor(
            tensors["v"].iterator, cute.select(tensors["v"].layout, mode=[1, 0, 2])
        )
        acc_s = cute.make_rmem_tensor(qk.partition_shape_C((ROWS, n)), Float32)
        acc_o = cute.make_rmem_tensor(pv.partition_shape_C((ROWS, dv)), Float32)
        p_registers = cute.make_rmem_tensor(pv.partition_shape_A((ROWS, n)), self.dtype)
        operand_p, p_store = p_registers, None
        if not self.config.p_in_registers:
            operand_p = pv_mma.make_fragment_A(pv.partition_A(tensors["p"]))[None, None, None, group]
            copy = cute.make_tiled_copy_C(self._stmatrix(), qk_mma).get_slice(thread)
            source = copy.retile(cute.make_tensor(p_registers.iterator, acc_s.layout))
            p_store = (copy, source, copy.partition_D(tensors["p"][None, None, group]))
        operands = Operands(
            qk_mma,
            pv_mma,
            qk_mma.make_fragment_A(qk.partition_A(tensors["q"]))[None, None, None, group],
            qk_mma.make_fragment_B(qk.partition_B(tensors["k"])),
            pv_mma.make_fragment_B(pv.partition_B(v_transposed)),
            operand_p,
            acc_s,
            acc_o,
        )
        flat_p = cute.make_tensor(p_registers.iterator, cute.make_layout(n // 2))
        registers = Registers(
            cute.make_tensor(acc_s.iterator, cute.make_layout(n // 2)),
            cute.make_tensor(acc_o.iterator, cute.make_layout(dv // 2)),
            cute.recast_tensor(flat_p, Int32),
            p_store,
            cute.make_rmem_tensor(2, Float32),
            cute.make_rmem_tensor(2, Float32),
        )
        return operands, registers

    # -- steps over a key block ------------------------------------------------------------------------------

    @cute.jit
    def first_scores(
        self,
        ops: Operands,
        regs: Registers,
        bars: dict,
        ring: Ring,
        at: Position,
        scale_log2: Float32,
        n_block: Int32,
    ) -> Ahead:
        """QK and softmax of the first block, before there is any PV to overlap with."""
        self._wait(bars, "k", ring)
        self._take_turn(at.group)
        self._gemm(ops.qk, ops.s, ops.q, ops.k[None, None, None, ring.stage], True)
        self._pass_turn(at.group)
        warpgroup.wait_group(0)
        self._release(bars, "k", ring)
        return self.softmax_tile(regs, scale_log2, n_block, at, bars, ring, True, None)

    @cute.jit
    def step_overlap(
        self,
        ops: Operands,
        regs: Registers,
        bars: dict,
        before: Ring,
        ahead: Ahead,
        at: Position,
        scale_log2: Float32,
        n_block: Int32,
        masked: cutlass.Constexpr[bool],
    ) -> tuple[Ring, Ahead]:
        """QK of this block and PV of the one before are in flight together; softmax runs under PV."""
        ring = ahead.ring
        if not ahead.k_arrived:
            self._wait(bars, "k", ring)
        self._take_turn(at.group)
        self._gemm(ops.qk, ops.s, ops.q, ops.k[None, None, None, ring.stage], True)
        if not ahead.v_arrived:
            self._wait(bars, "v", before)
        self._gemm(ops.pv, ops.o, ops.p, ops.v[None, None, None, before.stage], False)
        self._pass_turn(at.group)
        warpgroup.wait_group(1)
        self._release(bars, "k", ring)
        return ring, self.softmax_tile(regs, scale_log2, n_block, at, bars, ring, masked, before)

    @cute.jit
    def last_values(self, ops: Operands, bars: dict, ring: Ring) -> Ring:
        """PV of the last block, with nothing left to overlap it."""
        self._wait(bars, "v", ring)
        self._gemm(ops.pv, ops.o, ops.p, ops.v[None, None, None, ring.stage], False)
        warpgroup.wait_group(0)
        self._release(bars, "v", ring)
        return self._advance(ring)

    @cute.jit
    def step(
        self,
        ops: Operands,
        regs: Registers,
        bars: dict,
        ring: Ring,
        at: Position,
        scale_log2: Float32,
        n_block: Int32,
        masked: cutlass.Constexpr[bool],
    ) -> Ring:
        """QK, softmax and PV of one block, one after the other."""
        self._wait(bars, "k", ring)
        self._take_turn(at.group)
        self._gemm(ops.qk, ops.s, ops.q, ops.k[None, None, None, ring.stage], True)
        self._pass_turn(at.group)
        warpgroup.wait_group(0)
        self._release(bars, "k", ring)
        self.softmax_tile(regs, scale_log2, n_block, at, bars, ring, masked, None)
        return self.last_values(ops, bars, ring)

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
    def softmax_tile(
        self,
        regs: Registers,
        scale_log2: Float32,
        n_block: Int32,
        at: Position,
        bars: dict,
        ring: Ring,
        masked: cutlass.Constexpr[bool],
        pv_slot: Any,
    ) -> Ahead:
        """Scores to P, maximum and sum of the rows, O rescaled; a look at the next step's barriers.

        A PV in flight (of the V slot ``pv_slot``) reads P and writes O: exponentials before the wait for it
        stay float32 in the score registers.
        """
        config, n = self.config, self.config.tile_n
        s, row_max, row_sum = regs.s, regs.row_max, regs.row_sum
        if const_expr(masked):
            for r in cutlass.range_constexpr(2):
                end = cutlass.min(at.end + 8 * r, at.limit) if const_expr(self.causal) else at.limit
                mask_from_column(s, self.rows[r], end - n_block * n)
        factors, minus_max = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        tile_max = softmax.row_maxima(s, self.row_registers, row_max)
        for r in cutlass.range_constexpr(2):
            tile_max[r] = cute.arch.warp_reduction_max(tile_max[r], threads_in_group=4)
            row_max[r], minus_max[r], factors[r] = softmax.advance_row_max(
                row_max[r], tile_max[r], scale_log2, config.rescale_threshold, masked
            )
        sums = [row_sum[0] * factors[0], row_sum[1] * factors[1]]
        wait_at = self.wait_register if const_expr(pv_slot is not None) else 0
        following = self._advance(ring)
        k_arrived, v_arrived = Boolean(False), Boolean(False)
        for i in cutlass.range_constexpr(n // 2):
            if const_expr(i == wait_at):
                if const_expr(pv_slot is not None):
                    stay_below(sums[0] if const_expr(i > 0) else factors[1], bars["q_full"])
                    warpgroup.wait_group(0)
                    self._release(bars, "v", pv_slot)
                if const_expr(config.overlap):
                    # asked here, under the exponentials, the answer costs no time
                    k_arrived = self._arrived(bars, "k", following)
                    v_arrived = self._arrived(bars, "v", ring)
                self.rescale(regs.o, factors)
                for pair in cutlass.range_constexpr(wait_at // 2):
                    self._convert(regs, pair)
            r = i // 2 % 2
            value = softmax.exponentiate(s, i, scale_log2, minus_max[r], self.emulated[i], config.exp2_degree)
            sums[r] = sums[r] + value
            if const_expr(i >= wait_at and i % 2 == 1):
                self._convert(regs, i // 2)
        row_sum[0], row_sum[1] = sums
        if const_expr(not config.p_in_registers):
            # a warp's quarter of the MMA reads the 16 rows that the warp itself wrote
            cute.arch.fence_view_async_shared()
            cute.arch.sync_warp()
        return Ahead(following, k_arrived, v_arrived)

    @cute.jit
    def _convert(self, regs: Registers, pair: cutlass.Constexpr[int]) -> None:
        """Two exponentials to P; without P in registers a complete K step of 16 columns goes to SMEM."""
        regs.p[pair] = pack_pair(regs.s[2 * pair], regs.s[2 * pair + 1], self.dtype)
        if const_expr(regs.p_store is not None and pair % 4 == 3):
            copy, source, destination = regs.p_store
            step = (None, pair // 4), None, None  # an atom's values and, in the same mode, the K steps
            cute.copy(copy, source[step], destination[step])

    @cute.jit
    def rescale(self, o: cute.Tensor, factors: cute.Tensor) -> None:
        """O times the factor of its row; with a threshold only where some row of the warp needs it."""
        needed = True
        if const_expr(self.config.rescale_threshold > 0):
            needed = softmax.any_lane((factors[0] < Float32(1.0)) | (factors[1] < Float32(1.0)))
        if needed:
            for i in cutlass.range_constexpr(cute.size(o)):
                o[i] = o[i] * factors[i // 2 % 2]

    # -- epilogue --------------------------------------------------------------------------------------------

    @cute.jit
    def write_lse(
        self,
        regs: Registers,
        mLSE: cute.Tensor,
        at: Position,
        head: Int32,
        batch: Int32,
        seqlen_q: Int32,
        scale_log2: Float32,
    ) -> None:
        """Finishes the row sums, writes the LSE of rows that exist and normalises O."""
        factors = cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            total = cute.arch.warp_reduction_sum(regs.row_sum[r], threads_in_group=4)
            factors[r], lse = softmax.normaliser(regs.row_max[r], total, scale_log2)
            if at.thread % 4 == 0 and at.row + 8 * r < seqlen_q:
                mLSE[batch, head, at.row + 8 * r] = lse
        for i in cutlass.range_constexpr(cute.size(regs.o)):
            regs.o[i] = regs.o[i] * factors[i // 2 % 2]

    @cute.jit
    def store_o(
        self,
        ops: Operands,
        regs: Registers,
        tma_o: cute.CopyAtom,
        mO: cute.Tensor,
        sO: cute.Tensor,
        at: Position,
        m_block: Int32,
    ) -> None:
        """O of a warpgroup to SMEM and on by TMA, which clips rows past the end."""
        out = cute.make_rmem_tensor(ops.o.shape, self.dtype)
        packed = cute.recast_tensor(cute.make_tensor(out.iterator, cute.make_layout(cute.size(out))), Int32)
        for i in cutlass.range_constexpr(cute.size(packed)):
            packed[i] = pack_pair(regs.o[2 * i], regs.o[2 * i + 1], self.dtype)
        if const_expr(self.persistent):
            # the previous tile's store must have read the buffer
            if at.thread < 32:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            self._sync_warpgroup(at.group)
        copy = cute.make_tiled_copy_C(self._stmatrix(), ops.pv).get_slice(at.thread)
        cute.copy(copy, copy.retile(out), copy.partition_D(sO[None, None, at.group]))
        cute.arch.fence_view_async_shared()
        self._sync_warpgroup(at.group)
        if at.thread < 32:
            source, destination = self._tma_tiles(tma_o, sO, mO, ROWS, self.head_dim_v)
            row_tile = m_block * self.config.warpgroups + at.group
            cute.copy(tma_o, source[None, at.group], destination[None, row_tile])
            cute.arch.cp_async_bulk_commit_group()

    # -- shared by the roles ---------------------------------------------------------------------------------

    @cute.jit
    def key_blocks(self, end_row: Int32, seqlen_q: Int32, seqlen_k: Int32) -> Int32:
        """Key blocks that rows before ``end_row`` see, at least one: every tile runs the same code."""
        keys = seqlen_k
        if const_expr(self.causal):
            keys = cutlass.min(seqlen_k, cutlass.min(end_row, seqlen_q) + seqlen_k - seqlen_q)
        return cutlass.max(cute.ceil_div(keys, self.config.tile_n), 1)

    @cute.jit
    def clear_blocks(self, first_row: Int32, seqlen_q: Int32, seqlen_k: Int32) -> Int32:
        """Key blocks of which ``first_row``, and so every later row, sees every key."""
        keys = seqlen_k
        if const_expr(self.causal):
            keys = cutlass.max(cutlass.min(seqlen_k, first_row + 1 + seqlen_k - seqlen_q), 0)
        return keys // self.config.tile_n

    @cute.jit
    def _gemm(
        self,
        tiled_mma: cute.TiledMma,
        acc: cute.Tensor,
        a: cute.Tensor,
        b: cute.Tensor,
        zero_first: cutlass.Constexpr[bool],
    ) -> None:
        """Issues ``acc (+)= a b`` as one group of asynchronous MMAs."""
        atom = cute.make_mma_atom(tiled_mma.op)
        warpgroup.fence()
        for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
            atom.set(warpgroup.Field.ACCUMULATE, not zero_first or k != 0)
            cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
        warpgroup.commit_group()

    @cute.jit
    def _wait(self, bars: dict, operand: cutlass.Constexpr[str], ring: Ring) -> None:
        cute.arch.mbarrier_wait(bars[operand + "_full"] + ring.stage, ring.phase)

    def _arrived(self, bars: dict, operand: str, ring: Ring) -> Boolean:
        return cute.arch.mbarrier_test_wait(bars[operand + "_full"] + ring.stage, ring.phase)

    @cute.jit
    def _release(self, bars: dict, operand: cutlass.Constexpr[str], ring: Ring) -> None:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(bars[operand + "_empty"] + ring.stage)

    @cute.jit
    def _release_q(self, bars: dict, group: Int32) -> None:
        if const_expr(self.persistent):
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(bars["q_empty"] + group)

    @cute.jit
    def _advance(self, ring: Ring) -> Ring:
        stages = self.config.kv_stages
        stage, phase = ring.stage, ring.phase ^ 1
        if const_expr(stages > 1):
            wrapped = ring.stage + 1 == stages
            stage = Int32(0) if wrapped else ring.stage + 1
            phase = phase if wrapped else ring.phase
        return Ring(stage, phase)

    def _tma_tiles(
        self, atom: cute.CopyAtom, smem: cute.Tensor, gmem: cute.Tensor, rows: int, columns: int
    ) -> tuple[cute.Tensor, cute.Tensor]:
        """(SMEM by stage, global memory by block of rows) as the copy wants them."""
        blocks = cute.local_tile(gmem, (rows, columns), (None, 0))
        return cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(blocks, 0, 2)
        )

    @cute.jit
    def _load_block(
        self,
        atom: cute.CopyAtom,
        tiles: tuple,
        n_block: Int32,
        bars: dict,
        operand: cutlass.Constexpr[str],
        ring: Ring,
    ) -> Ring:
        cute.arch.mbarrier_wait(bars[operand + "_empty"] + ring.stage, ring.phase)
        self._tma_load(atom, tiles, n_block, ring.stage, bars, operand)
        return self._advance(ring)

    @cute.jit
    def _tma_load(
        self,
        atom: cute.CopyAtom,
        tiles: tuple,
        block: Int32,
        stage: Int32,
        bars: dict,
        operand: cutlass.Constexpr[str],
    ) -> None:
        full = bars[operand + "_full"] + stage
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.plan.barrier(operand + "_full").tx_bytes)
        cute.copy(atom, tiles[1][None, block], tiles[0][None, stage], tma_bar_ptr=full)

    def _stmatrix(self) -> cute.CopyAtom:
        return cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)

    @cute.jit
    def _take_turn(self, group: Int32) -> None:
        if const_expr(self.config.ping_pong):
            turn = self.plan.barrier("turn")
            cute.arch.barrier(barrier_id=turn.offset + group, number_of_threads=turn.arrivals)

    @cute.jit
    def _pass_turn(self, group: Int32) -> None:
        if const_expr(self.config.ping_pong):
            turn = self.plan.barrier("turn")
            after = Int32(0) if group + 1 == self.config.warpgroups else group + 1
            cute.arch.barrier_arrive(barrier_id=turn.offset + after, number_of_threads=turn.arrivals)

    @cute.jit
    def _sync_warpgroup(self, group: Int32) -> None:
        store = self.plan.barrier("store")
        cute.arch.barrier(barrier_id=store.offset + group, number_of_threads=store.arrivals)
