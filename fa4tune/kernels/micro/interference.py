"""How other users of shared memory hold up matmuls: two warpgroups multiply, a third one stores.

All three meet each iteration, so that the stores spread over the matmuls; the next commit is always queued,
so that meeting costs the tensor cores nothing.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator

from fa4tune.kernels.micro.base import MicroKernel, Walk, clock
from fa4tune.kernels.micro.shared_memory import ACCESS_BYTES, store_16
from fa4tune.kernels.micro.wgmma import WARPGROUP, fill, make_mma, multiply, smem_layout

MULTIPLYING = 2
"""Warpgroups that multiply; one more stores."""

MOST_STORES = 16


class Interference(MicroKernel):
    """m64nNk16 with both operands in SMEM beside stores.

    Args:
        n: columns of the instruction.
        steps: instructions of K=16 in a commit, at most 8.
        stores: 16-byte stores of each storing thread in an iteration, at most :data:`MOST_STORES`.
    """

    max_threads = (MULTIPLYING + 1) * WARPGROUP

    def __init__(self, n: int, steps: int, stores: int) -> None:
        self.n = n
        self.steps = steps
        self.stores = stores

    def prepare(self, mSource: cute.Tensor) -> tuple:
        """MMA and operand layouts."""
        k = 16 * self.steps
        return make_mma(self.n, "smem", False), smem_layout(64, k, MULTIPLYING), smem_layout(self.n, k, 1)

    @cute.jit
    def body(self, mSource: cute.Tensor, host: tuple, iterations: Int32, walk: Walk) -> Any:
        mma, a_layout, b_layout = host
        k = 16 * self.steps
        smem = SmemAllocator()
        sA = smem.allocate_tensor(BFloat16, a_layout.outer, 1024, swizzle=a_layout.inner)
        sB = smem.allocate_tensor(BFloat16, b_layout.outer, 1024, swizzle=b_layout.inner)
        target = smem.allocate_tensor(
            Int32, cute.make_layout(MOST_STORES * WARPGROUP * ACCESS_BYTES // 4), 1024
        )
        for group in cutlass.range_constexpr(MULTIPLYING):
            fill(sA[None, None, group], 64, k, mSource, Int32(64 * group))
        fill(sB[None, None, 0], self.n, k, mSource, Int32(64 * MULTIPLYING))
        cute.arch.fence_view_async_shared()
        thread = cute.arch.thread_idx()[0]
        group = cute.arch.make_warp_uniform(thread // WARPGROUP)
        part = mma.get_slice(0)
        acc = cute.make_rmem_tensor(part.partition_shape_C((64, self.n)), Float32)
        acc.fill(0.0)
        tA = mma.make_fragment_A(part.partition_A(sA))
        tB = mma.make_fragment_B(part.partition_B(sB))[None, None, None, 0]
        address = target.iterator.toint().to(Int32) + thread % WARPGROUP * ACCESS_BYTES
        cute.arch.sync_threads()
        began = clock()
        if group < MULTIPLYING:
            for _ in cutlass.range(iterations, unroll=1):
                multiply(mma.op, acc, tA[None, None, None, group], tB, False)
                cute.arch.sync_threads()
                warpgroup.wait_group(1)
            warpgroup.wait_group(0)
        else:
            for i in cutlass.range(iterations, unroll=1):
                for store in cutlass.range_constexpr(self.stores):
                    where = address + store * WARPGROUP * ACCESS_BYTES
                    store_16(where, (i, thread, i, thread))
                cute.arch.sync_threads()
        ended = clock()
        cute.arch.sync_threads()
        result = Float32(target[thread])
        for i in cutlass.range_constexpr(cute.size(acc)):
            result = result + acc[i]
        return began, ended, result
