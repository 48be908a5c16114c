"""What one warpgroup's work costs while other warpgroups of the same CTA do theirs.

The first warpgroup runs its loop ``iterations`` times; the others repeat theirs until it is done, which it
says through a flag in shared memory. Its cycles an iteration, over those without the others, are how much it is
held up.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.cutlass_dsl import T, dsl_user_op
from cutlass.memory import SmemAllocator

from fa4tune.kernels.exp2_device import fma
from fa4tune.kernels.micro.arithmetic import OPERATIONS, apply, convert_pair, exp2_negative
from fa4tune.kernels.micro.base import MicroKernel, Walk, clock, source_value, volatile
from fa4tune.kernels.micro.wgmma import WARPGROUP, fill, make_mma, multiply, smem_layout

CHAINS = 8
"""Independent values of a thread's arithmetic."""

INSTRUCTIONS = 256
"""Operations of a thread in an iteration of arithmetic; of ``softmax``, elements times four."""

STEPS = 8
"""Instructions of K=16 in a commit of a matmul."""

MATMULS = ("ss64", "ss128", "rs64", "rs128")
"""Matmuls that a warpgroup can run: source of A and columns."""


@dsl_user_op
def raise_flag(address: Int32, *, loc=None, ip=None) -> None:
    """Store 1 where the other warpgroups look."""
    volatile(None, [Int32(address).ir_value(loc=loc, ip=ip)], "st.volatile.shared.u32 [$0], 1;", "r", loc, ip)


@dsl_user_op
def read_flag(address: Int32, *, loc=None, ip=None) -> Int32:
    """What lies at ``address`` now."""
    operands = [Int32(address).ir_value(loc=loc, ip=ip)]
    return Int32(volatile(T.i32(), operands, "ld.volatile.shared.u32 $0, [$1];", "=r,r", loc, ip))


@dsl_user_op
def any_thread(value: Int32, barrier: int, *, loc=None, ip=None) -> Int32:
    """Whether any thread of a warpgroup has a value that is not 0; all of its warps hear the same."""
    text = (
        "{ .reg .pred p; .reg .pred q; setp.ne.u32 p, $1, 0; "
        f"barrier.cta.red.or.pred q, {barrier}, {WARPGROUP}, p; selp.u32 $0, 1, 0, q; }}"
    )
    return Int32(volatile(T.i32(), [Int32(value).ir_value(loc=loc, ip=ip)], text, "=r,r", loc, ip))


class Beside(MicroKernel):
    """Warpgroups with work of their own.

    Args:
        first: work that is timed: of :data:`MATMULS`, an operation of
            :data:`fa4tune.kernels.micro.arithmetic.OPERATIONS`, or ``softmax`` (multiply-add, exponential, sum
            and half a conversion an element).
        others: the same of the other warpgroups, separated by commas; may be empty.
    """

    def __init__(self, first: str, others: str) -> None:
        self.roles = [first, *[role for role in others.split(",") if role]]
        self.max_threads = max(2, len(self.roles)) * WARPGROUP
        strangers = [r for r in self.roles if r not in (*MATMULS, *OPERATIONS, "softmax")]
        if strangers:
            raise ValueError(f"work {strangers[0]!r} is not one of {', '.join((*MATMULS, *OPERATIONS))}, softmax")

    def prepare(self, mSource: cute.Tensor) -> tuple:
        """MMA and operand layouts of each role; arithmetic has none."""
        return tuple([self._operands(role) for role in self.roles])

    def _operands(self, role: str) -> tuple:
        if role not in MATMULS:
            return ()
        n, registers = int(role[2:]), role.startswith("rs")
        k = 16 * STEPS
        return (
            make_mma(n, "registers" if registers else "smem", registers),
            smem_layout(64, k, 1),
            smem_layout(*((k, n) if registers else (n, k)), 1),
        )

    @cute.jit
    def body(self, mSource: cute.Tensor, host: tuple, iterations: Int32, walk: Walk) -> Any:
        thread = cute.arch.thread_idx()[0]
        group = cute.arch.make_warp_uniform(thread // WARPGROUP)
        smem = SmemAllocator()
        flag = smem.allocate_tensor(Int32, cute.make_layout(1), 16)
        flag[0] = Int32(0)
        tiles = [self._tiles(smem, role, host[i], mSource) for i, role in enumerate(self.roles)]
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()
        address = flag.iterator.toint().to(Int32)
        began = clock()
        ended = began
        result = Float32(0.0)
        for i in cutlass.range_constexpr(len(self.roles)):
            if group == i:
                result = self._work(i, host[i], tiles[i], mSource, thread, iterations, address)
                ended = clock()
                if const_expr(i == 0):
                    raise_flag(address)
        return began, ended, result

    @cute.jit
    def _tiles(self, smem: SmemAllocator, role: str, host: tuple, mSource: cute.Tensor) -> Any:
        tiles = ()
        if const_expr(role in MATMULS):
            n, k = int(role[2:]), 16 * STEPS
            _, a_layout, b_layout = host
            sA = smem.allocate_tensor(BFloat16, a_layout.outer, 1024, swizzle=a_layout.inner)
            sB = smem.allocate_tensor(BFloat16, b_layout.outer, 1024, swizzle=b_layout.inner)
            fill(sA[None, None, 0], 64, k, mSource, Int32(0))
            rows, columns = (k, n) if const_expr(role.startswith("rs")) else (n, k)
            fill(sB[None, None, 0], rows, columns, mSource, Int32(64))
            tiles = (sA, sB)
        return tiles

    @cute.jit
    def _work(
        self, i: int, host: tuple, tiles: Any, mSource: cute.Tensor, thread: Int32, iterations: Int32, address: Int32
    ) -> Any:
        role = self.roles[i]
        result = Float32(0.0)
        if const_expr(role in MATMULS):
            mma = host[0]
            n, k = int(role[2:]), 16 * STEPS
            part = mma.get_slice(0)
            acc = cute.make_rmem_tensor(part.partition_shape_C((64, n)), Float32)
            acc.fill(0.0)
            sA, sB = tiles
            if const_expr(role.startswith("rs")):
                tA = cute.make_rmem_tensor(part.partition_shape_A((64, k)), BFloat16)
                for j in cutlass.range_constexpr(cute.size(tA)):
                    tA[j] = mSource[thread, j]
                sBt = cute.make_tensor(sB.iterator, cute.select(sB.layout, mode=[1, 0, 2]))
                tB = mma.make_fragment_B(part.partition_B(sBt))[None, None, None, 0]
            else:
                tA = mma.make_fragment_A(part.partition_A(sA))[None, None, None, 0]
                tB = mma.make_fragment_B(part.partition_B(sB))[None, None, None, 0]
            if const_expr(i == 0):
                for _ in cutlass.range(iterations, unroll=1):
                    multiply(mma.op, acc, tA, tB, False)
                    warpgroup.wait_group(1)
            else:
                # warps of a warpgroup that left at different turns would break its matmul
                while any_thread(read_flag(address), 1 + i) == 0:
                    multiply(mma.op, acc, tA, tB, False)
                    warpgroup.wait_group(1)
            warpgroup.wait_group(0)
            result = acc[0]
            for j in cutlass.range_constexpr(1, cute.size(acc)):
                result = result + acc[j]
        else:
            a, b = source_value(mSource, thread, 0), source_value(mSource, thread, 1)
            values = [source_value(mSource, thread, 2 + j) for j in range(CHAINS)]
            if const_expr(i == 0):
                for _ in cutlass.range(iterations, unroll=1):
                    values = self._turn(role, values, a, b)
            else:
                while read_flag(address) == 0:
                    values = self._turn(role, values, a, b)
            result = values[0]
            for j in cutlass.range_constexpr(1, CHAINS):
                result = result + values[j]
        return result

    def _turn(self, role: str, values: list[Float32], a: Float32, b: Float32) -> list[Float32]:
        values = list(values)
        if role != "softmax":
            for step in range(INSTRUCTIONS // CHAINS):
                for j in range(CHAINS):
                    values[j] = apply(role, values, j, step, a, b)
            return values
        for _ in range(INSTRUCTIONS // 4 // (CHAINS // 2)):
            # four elements from four values; four other values are their sums
            for j in range(CHAINS // 2):
                weight = exp2_negative(fma(values[j], a, b))
                values[CHAINS // 2 + j] = values[CHAINS // 2 + j] + weight
                values[j] = weight
            for j in range(0, CHAINS // 2, 2):
                values[j] = convert_pair(values[j], values[j + 1])
        return values
