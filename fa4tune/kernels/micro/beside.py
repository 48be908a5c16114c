"""What one warpgroup's work costs while other warpgroups of the same CTA do theirs.

The first warpgroup runs its loop ``iterations`` times and raises a flag in shared memory; each other one
repeats its own work until it sees the flag. The cycles of the first warpgroup's warps, over those that they
take alone, say how much the others hold it up: tensor cores that keep accumulators in registers take turns
with arithmetic at the ports of the register file, warps of one scheduler take turns at it.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.cutlass_dsl import T, dsl_user_op
from cutlass.memory import SmemAllocator

from fa4tune.kernels.micro.arithmetic import OPERATIONS, Arithmetic, apply
from fa4tune.kernels.micro.base import MicroKernel, Walk, clock, source_value, volatile
from fa4tune.kernels.micro.wgmma import WARPGROUP, fill, make_mma, multiply, smem_layout

CHAINS = 8
"""Independent values of a thread's arithmetic."""

DEPTH = 128
"""K of a commit: eight instructions of 16."""

MATMULS = ("ss64", "ss128", "rs64", "rs128")
"""Matmuls that a warpgroup can run: where A comes from (SMEM, registers) and columns."""

FIRST_B_ROW = 64
"""Source row where B begins; A in SMEM takes those before it."""


@dsl_user_op
def write_flag(address: Int32, value: Int32, *, loc=None, ip=None) -> None:
    """Store a word that other warps look at."""
    operands = [Int32(x).ir_value(loc=loc, ip=ip) for x in (address, value)]
    volatile(None, operands, "st.volatile.shared.u32 [$0], $1;", "r,r", loc, ip)


@dsl_user_op
def read_flag(address: Int32, *, loc=None, ip=None) -> Int32:
    """What lies at ``address`` now."""
    operands = [Int32(address).ir_value(loc=loc, ip=ip)]
    return Int32(volatile(T.i32(), operands, "ld.volatile.shared.u32 $0, [$1];", "=r,r", loc, ip))


class Beside(MicroKernel):
    """A warpgroup whose work is timed, and others beside it.

    Args:
        first: work that is timed: of :data:`MATMULS` or of
            :data:`fa4tune.kernels.micro.arithmetic.OPERATIONS`.
        others: the same of each other warpgroup, separated by commas; may be empty.

    Raises:
        ValueError: work of another name.
    """

    def __init__(self, first: str, others: str) -> None:
        self.roles = [first, *filter(None, others.split(","))]
        self.max_threads = len(self.roles) * WARPGROUP
        for role in self.roles:
            if role not in (*MATMULS, *OPERATIONS):
                raise ValueError(f"work {role!r} is not one of {', '.join((*MATMULS, *OPERATIONS))}")

    def prepare(self, mSource: cute.Tensor) -> tuple:
        """MMA and operand layouts of each role; arithmetic has none."""
        return tuple([_operands(role) if role in MATMULS else () for role in self.roles])

    @cute.jit
    def body(self, mSource: cute.Tensor, host: tuple, iterations: Int32, walk: Walk) -> Any:
        thread = cute.arch.thread_idx()[0]
        group = cute.arch.make_warp_uniform(thread // WARPGROUP)
        smem = SmemAllocator()
        # whether the first is done, and two copies for each warpgroup that multiplies
        flags = smem.allocate_tensor(Int32, cute.make_layout(1 + 2 * len(self.roles)), 16)
        if thread == 0:
            flags[0] = Int32(0)
        tiles = [self._tiles(smem, role, host[i], mSource) for i, role in enumerate(self.roles)]
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()
        flag = flags.iterator.toint().to(Int32)
        began = clock()
        ended = began
        result = Float32(0.0)
        for i in cutlass.range_constexpr(len(self.roles)):
            if group == i:
                if const_expr(self.roles[i] in MATMULS):
                    result = self._multiply(i, host[i], tiles[i], mSource, iterations, flag)
                else:
                    result = self._calculate(i, mSource, iterations, flag)
                ended = clock()
                if const_expr(i == 0):
                    # a warp that is done early must not send the others home
                    cute.arch.barrier(barrier_id=1, number_of_threads=WARPGROUP)
                    if thread == 0:
                        write_flag(flag, Int32(1))
        return began, ended, result

    @cute.jit
    def _tiles(self, smem: SmemAllocator, role: str, host: tuple, mSource: cute.Tensor) -> Any:
        """Operands of a role in SMEM: (A, B), B alone where A is in registers, or nothing."""
        tiles: Any = ()
        if const_expr(role in MATMULS):
            _, a_layout, b_layout = host
            n = int(role[2:])
            sB = smem.allocate_tensor(BFloat16, b_layout.outer, 1024, swizzle=b_layout.inner)
            if const_expr(role.startswith("rs")):
                fill(sB[None, None, 0], DEPTH, n, mSource, Int32(FIRST_B_ROW))
                tiles = (sB,)
            else:
                fill(sB[None, None, 0], n, DEPTH, mSource, Int32(FIRST_B_ROW))
                sA = smem.allocate_tensor(BFloat16, a_layout.outer, 1024, swizzle=a_layout.inner)
                fill(sA[None, None, 0], 64, DEPTH, mSource, Int32(0))
                tiles = (sA, sB)
        return tiles

    @cute.jit
    def _fragments(self, mma: cute.TiledMma, tiles: Any, mSource: cute.Tensor) -> Any:
        """A and B as the instructions take them."""
        part = mma.get_slice(0)
        if const_expr(len(tiles) == 1):
            (sB,) = tiles
            thread = cute.arch.thread_idx()[0]
            tA = cute.make_rmem_tensor(part.partition_shape_A((64, DEPTH)), BFloat16)
            for j in cutlass.range_constexpr(cute.size(tA)):
                tA[j] = mSource[thread, j]
            sB = cute.make_tensor(sB.iterator, cute.select(sB.layout, mode=[1, 0, 2]))
        else:
            sA, sB = tiles
            tA = mma.make_fragment_A(part.partition_A(sA))[None, None, None, 0]
        return tA, mma.make_fragment_B(part.partition_B(sB))[None, None, None, 0]

    @cute.jit
    def _multiply(
        self, i: int, host: tuple, tiles: Any, mSource: cute.Tensor, iterations: Int32, flag: Int32
    ) -> Float32:
        """Commits of role ``i``, the next one always queued; the sum of its accumulators."""
        mma = host[0]
        tA, tB = self._fragments(mma, tiles, mSource)
        acc = cute.make_rmem_tensor(mma.get_slice(0).partition_shape_C((64, int(self.roles[i][2:]))), Float32)
        acc.fill(0.0)
        if const_expr(i == 0):
            for _ in cutlass.range(iterations, unroll=1):
                multiply(mma.op, acc, tA, tB, False)
                warpgroup.wait_group(1)
        else:
            turn = Int32(0)
            while self._agreed(i, flag, turn) == 0:
                multiply(mma.op, acc, tA, tB, False)
                warpgroup.wait_group(1)
                turn = turn + 1
        warpgroup.wait_group(0)
        result = acc[0]
        for j in cutlass.range_constexpr(1, cute.size(acc)):
            result = result + acc[j]
        return result

    @cute.jit
    def _agreed(self, i: int, flag: Int32, turn: Int32) -> Int32:
        """The flag, the same for all warps of role ``i``: one that left before the others breaks a matmul.

        Two copies in turn, so that one is not written again before all have read it.
        """
        copy = flag + 4 * (1 + 2 * i) + 4 * (turn % 2)
        if cute.arch.thread_idx()[0] % WARPGROUP == 0:
            write_flag(copy, read_flag(flag))
        cute.arch.barrier(barrier_id=1 + i, number_of_threads=WARPGROUP)
        return read_flag(copy)

    @cute.jit
    def _calculate(self, i: int, mSource: cute.Tensor, iterations: Int32, flag: Int32) -> Float32:
        """Chains of role ``i``'s operation; the sum of their values."""
        thread = cute.arch.thread_idx()[0]
        a, b = source_value(mSource, thread, 0), source_value(mSource, thread, 1)
        values = [source_value(mSource, thread, 2 + j) for j in range(CHAINS)]
        if const_expr(i == 0):
            for _ in cutlass.range(iterations, unroll=1):
                values = _chains(self.roles[i], values, a, b)
        else:
            while read_flag(flag) == 0:
                values = _chains(self.roles[i], values, a, b)
        result = values[0]
        for j in cutlass.range_constexpr(1, CHAINS):
            result = result + values[j]
        return result


def _operands(role: str) -> tuple:
    """(MMA, layout of A, layout of B) of a matmul."""
    n, registers = int(role[2:]), role.startswith("rs")
    return (
        make_mma(n, "registers" if registers else "smem", registers),
        smem_layout(64, DEPTH, 1),
        smem_layout(*((DEPTH, n) if registers else (n, DEPTH)), 1),
    )


def _chains(operation: str, values: list[Float32], a: Float32, b: Float32) -> list[Float32]:
    """One iteration of :class:`~fa4tune.kernels.micro.arithmetic.Arithmetic`."""
    values = list(values)
    for step in range(Arithmetic(operation, CHAINS).steps):
        for j in range(CHAINS):
            values[j] = apply(operation, values, j, step, a, b)
    return values
