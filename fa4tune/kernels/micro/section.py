"""The softmax of one tile as a section of a warpgroup's program, alone or between the matmuls it belongs to.

Without matmuls it shows what the arithmetic of a section costs one warpgroup alone, how much of its
exponentials hides under the rest, and how warpgroups delay each other. With them, S = QK and O += PV of
resident operands surround it: the inner loop of attention without its loads, whose share of tensor work also
says what power it draws.

A score's scaled value stays in the score's register, as in attention's kernels, where matmuls write the next
scores there. Without matmuls it is the next iteration's score. Were the exponential that score, the compiler
would put all scaled values through one register, and each would wait until the exponential unit has read the
one before.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator

from fa4tune.kernels import softmax
from fa4tune.kernels.exp2_device import exp2_hardware, fma, max3_as_integers, pack_pair
from fa4tune.kernels.micro.base import MicroKernel, Walk, clock, source_value
from fa4tune.kernels.micro.wgmma import MOST_WARPGROUPS, WARPGROUP, fill, make_mma, multiply, smem_layout


def largest(scores: cute.Tensor, row: tuple[int, ...], init: Float32) -> Float32:
    """Largest of ``init`` and the registers ``row`` of ``scores``, one of them positive, in two chains."""
    heads = [init, scores[row[0]]]
    for pair in range(len(row) // 2 - 1):
        a, b = scores[row[2 * pair + 1]], scores[row[2 * pair + 2]]
        heads[pair % 2] = max3_as_integers(heads[pair % 2], a, b)
    return max3_as_integers(*heads, scores[row[-1]])


class Section(MicroKernel):
    """One softmax tile of 64 rows and ``n`` keys a warpgroup and iteration.

    Args:
        n: keys.
        exponentials: False takes the exponentials' arguments in their place: the section's other work alone.
            Only without matmuls.
        head_dim: of the matmuls around it; 0 for none.
    """

    max_threads = MOST_WARPGROUPS * WARPGROUP

    def __init__(self, n: int, exponentials: bool = True, head_dim: int = 0) -> None:
        self.n = n
        self.exponentials = exponentials
        self.head_dim = head_dim
        elements = n // 2
        self.rows = tuple(tuple(i for i in range(elements) if (i // 2) % 2 == row) for row in (0, 1))

    def prepare(self, mSource: cute.Tensor) -> tuple:
        """MMAs and operand layouts, where there are matmuls."""
        if not self.head_dim:
            return ()
        return (
            make_mma(self.n, "smem", False),
            make_mma(self.head_dim, "registers", True),
            smem_layout(64, self.head_dim, MOST_WARPGROUPS),
            smem_layout(self.n, self.head_dim, 1),
        )

    @cute.jit
    def body(self, mSource: cute.Tensor, host: tuple, iterations: Int32, walk: Walk) -> Any:
        thread = cute.arch.thread_idx()[0]
        scale = cute.arch.fmin(source_value(mSource, thread, 0), Float32(0.125))
        scale = cute.arch.fmax(scale, Float32(0.0625))
        row_max = cute.make_rmem_tensor(2, Float32)
        row_sum = cute.make_rmem_tensor(2, Float32)
        row_max.fill(-Float32.inf)
        row_sum.fill(0.0)
        if const_expr(self.head_dim > 0):
            began, ended, result = self._with_matmuls(mSource, host, iterations, scale, row_max, row_sum)
        else:
            scores = cute.make_rmem_tensor(self.n // 2, Float32)
            p = cute.make_rmem_tensor(self.n // 4, Int32)
            for i in cutlass.range_constexpr(self.n // 2):
                scores[i] = source_value(mSource, thread + i // 64, i % 64)
            used = Int32(0)
            cute.arch.sync_threads()
            began = clock()
            for _ in cutlass.range(iterations, unroll=1):
                self._softmax(scores, p, scale, row_max, row_sum)
                for i in cutlass.range_constexpr(self.n // 4):
                    used = used ^ p[i]
            ended = clock()
            # the sign keeps P alive and leaves the result readable: 0 of exponentials, else 0 or -1
            result = (used >> 31).to(Float32)
        return began, ended, result + row_max[0] + row_max[1] + row_sum[0] + row_sum[1]

    @cute.jit
    def _with_matmuls(
        self,
        mSource: cute.Tensor,
        host: tuple,
        iterations: Int32,
        scale: Float32,
        row_max: cute.Tensor,
        row_sum: cute.Tensor,
    ) -> Any:
        qk_mma, pv_mma, q_layout, kv_layout = host
        d = self.head_dim
        smem = SmemAllocator()
        sQ = smem.allocate_tensor(BFloat16, q_layout.outer, 1024, swizzle=q_layout.inner)
        sK = smem.allocate_tensor(BFloat16, kv_layout.outer, 1024, swizzle=kv_layout.inner)
        sV = smem.allocate_tensor(BFloat16, kv_layout.outer, 1024, swizzle=kv_layout.inner)
        for group in cutlass.range_constexpr(MOST_WARPGROUPS):
            fill(sQ[None, None, group], 64, d, mSource, Int32(64 * group))
        fill(sK[None, None, 0], self.n, d, mSource, Int32(256))
        fill(sV[None, None, 0], self.n, d, mSource, Int32(512))
        cute.arch.fence_view_async_shared()
        group = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARPGROUP)
        qk, pv = qk_mma.get_slice(0), pv_mma.get_slice(0)
        tQ = qk_mma.make_fragment_A(qk.partition_A(sQ))[None, None, None, group]
        tK = qk_mma.make_fragment_B(qk.partition_B(sK))[None, None, None, 0]
        sVt = cute.make_tensor(sV.iterator, cute.select(sV.layout, mode=[1, 0, 2]))
        tV = pv_mma.make_fragment_B(pv.partition_B(sVt))[None, None, None, 0]
        acc_s = cute.make_rmem_tensor(qk.partition_shape_C((64, self.n)), Float32)
        acc_o = cute.make_rmem_tensor(pv.partition_shape_C((64, d)), Float32)
        tP = cute.make_rmem_tensor(pv.partition_shape_A((64, self.n)), BFloat16)
        scores = cute.make_tensor(acc_s.iterator, cute.make_layout(self.n // 2))
        o = cute.make_tensor(acc_o.iterator, cute.make_layout(d // 2))
        p = cute.recast_tensor(cute.make_tensor(tP.iterator, cute.make_layout(self.n // 2)), Int32)
        o.fill(0.0)
        cute.arch.sync_threads()
        began = clock()
        for _ in cutlass.range(iterations, unroll=1):
            multiply(qk_mma.op, acc_s, tQ, tK, True)
            warpgroup.wait_group(0)
            factors = self._softmax(scores, p, scale, row_max, row_sum)
            for i in cutlass.range_constexpr(d // 2):
                o[i] = o[i] * factors[(i // 2) % 2]
            multiply(pv_mma.op, acc_o, tP, tV, False)
            warpgroup.wait_group(0)
        ended = clock()
        result = o[0]
        for i in cutlass.range_constexpr(1, d // 2):
            result = result + o[i]
        return began, ended, result

    @cute.jit
    def _softmax(
        self, scores: cute.Tensor, p: cute.Tensor, scale: Float32, row_max: cute.Tensor, row_sum: cute.Tensor
    ) -> Any:
        """Scores to P; returns the factors of the rows' earlier sums."""
        factors, minus = [], []
        if const_expr(self.head_dim > 0):
            maxima = softmax.row_maxima(scores, self.rows, row_max)
        else:
            # rows with a positive maximum need no second way, which would be counted though not taken
            maxima = [largest(scores, self.rows[r], row_max[r]) for r in range(2)]
        for r in cutlass.range_constexpr(2):
            tile_max = cute.arch.warp_reduction_max(maxima[r], threads_in_group=4)
            row_max[r], minus_max, factor = softmax.advance_row_max(row_max[r], tile_max, scale, 0.0, False)
            row_sum[r] = row_sum[r] * factor
            factors.append(factor)
            minus.append(minus_max)
        sums = [row_sum[0], row_sum[1]]
        pair = [Float32(0.0), Float32(0.0)]
        for i in cutlass.range_constexpr(self.n // 2):
            r = (i // 2) % 2
            if const_expr(self.head_dim > 0):
                pair[i % 2] = softmax.exponentiate(scores, i, scale, minus[r], False, 3)
            else:
                scores[i] = fma(scores[i], scale, minus[r])
                pair[i % 2] = exp2_hardware(scores[i]) if const_expr(self.exponentials) else scores[i]
            sums[r] = sums[r] + pair[i % 2]
            if const_expr(i % 2 == 1):
                p[i // 2] = pack_pair(pair[0], pair[1], BFloat16)
        row_sum[0], row_sum[1] = sums
        return factors
