"""wgmma m64nNk16 as attention issues it: a few K steps, one commit, a wait; by one to three warpgroups.

Every warpgroup multiplies 64 rows of its own with the same N columns. ``in_flight`` 0 waits for each commit,
which shows the time from issue to result; 1 keeps the next commit queued behind it, which shows the
throughput.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from fa4tune.kernels.micro.base import SOURCE_COLUMNS, MicroKernel, Walk, clock

WARPGROUP = 128

MOST_WARPGROUPS = 3


def smem_layout(rows: int, columns: int, stages: int) -> Any:
    """(rows, columns, stages), columns contiguous, swizzled as wgmma and TMA want them."""
    kind = sm90.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, BFloat16, columns)
    return cute.tile_to_shape(
        warpgroup.make_smem_layout_atom(kind, BFloat16), (rows, columns, stages), order=(0, 1, 2)
    )


def make_mma(n: int, a_source: str, b_rows_are_k: bool) -> cute.TiledMma:
    """m64 n ``n`` k16, bf16 to float32.

    Args:
        a_source: ``smem`` or ``registers``.
        b_rows_are_k: B lies in memory as (k, n), as V does; else as (n, k), as K does.
    """
    return sm90.make_trivial_tiled_mma(
        BFloat16,
        BFloat16,
        OperandMajorMode.K,
        OperandMajorMode.MN if b_rows_are_k else OperandMajorMode.K,
        Float32,
        atom_layout_mnk=(1, 1, 1),
        tiler_mn=(64, n),
        a_source=warpgroup.OperandSource.RMEM if a_source == "registers" else warpgroup.OperandSource.SMEM,
    )


@cute.jit
def fill(tile: cute.Tensor, rows: Any, columns: Any, mSource: cute.Tensor, first_row: Int32) -> None:
    """Copies the source from ``first_row`` on to a shared tile, all threads of the CTA together."""
    count = rows * columns
    for i in cutlass.range(cute.arch.thread_idx()[0], count, cute.arch.block_dim()[0], unroll=1):
        tile[i // columns, i % columns] = mSource[first_row + i // SOURCE_COLUMNS, i % SOURCE_COLUMNS]


@cute.jit
def multiply(atom_op: Any, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, zero: Any) -> None:
    """All K steps of ``a`` and ``b``, one commit; ``zero`` starts from zero instead of ``acc``."""
    atom = cute.make_mma_atom(atom_op)
    warpgroup.fence()
    for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
        atom.set(warpgroup.Field.ACCUMULATE, not zero or k != 0)
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
    warpgroup.commit_group()


class Wgmma(MicroKernel):
    """One shape.

    Args:
        n: columns of the instruction.
        a_source: ``smem`` (SS, B as K) or ``registers`` (RS, B as V).
        steps: instructions of K=16 in a commit, at most 8.
        in_flight: commits left running at each wait.
    """

    def __init__(self, n: int, a_source: str, steps: int, in_flight: int) -> None:
        # accumulators and A fragments of the widest shape leave registers for two warpgroups only
        self.max_threads = (2 if a_source == "registers" and n > 192 else MOST_WARPGROUPS) * WARPGROUP
        self.n = n
        self.a_source = a_source
        self.steps = steps
        self.in_flight = in_flight

    def prepare(self, mSource: cute.Tensor) -> tuple:
        """MMA and operand layouts."""
        k = 16 * self.steps
        registers = self.a_source == "registers"
        b_shape = (k, self.n) if registers else (self.n, k)
        return (
            make_mma(self.n, self.a_source, registers),
            smem_layout(64, k, MOST_WARPGROUPS),
            smem_layout(*b_shape, 1),
        )

    @cute.jit
    def body(self, mSource: cute.Tensor, host: tuple, iterations: Int32, walk: Walk) -> Any:
        mma, a_layout, b_layout = host
        k = 16 * self.steps
        smem = SmemAllocator()
        sA = smem.allocate_tensor(BFloat16, a_layout.outer, 1024, swizzle=a_layout.inner)
        sB = smem.allocate_tensor(BFloat16, b_layout.outer, 1024, swizzle=b_layout.inner)
        for group in cutlass.range_constexpr(MOST_WARPGROUPS):
            fill(sA[None, None, group], 64, k, mSource, Int32(64 * group))
        rows, columns = (k, self.n) if const_expr(self.a_source == "registers") else (self.n, k)
        fill(sB[None, None, 0], rows, columns, mSource, Int32(64 * MOST_WARPGROUPS))
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()

        thread = cute.arch.thread_idx()[0]
        group = cute.arch.make_warp_uniform(thread // WARPGROUP)
        part = mma.get_slice(0)
        acc = cute.make_rmem_tensor(part.partition_shape_C((64, self.n)), Float32)
        acc.fill(0.0)
        if const_expr(self.a_source == "registers"):
            tA = cute.make_rmem_tensor(part.partition_shape_A((64, k)), BFloat16)
            for i in cutlass.range_constexpr(cute.size(tA)):
                tA[i] = mSource[thread, i % SOURCE_COLUMNS]
            sBt = cute.make_tensor(sB.iterator, cute.select(sB.layout, mode=[1, 0, 2]))
            tB = mma.make_fragment_B(part.partition_B(sBt))[None, None, None, 0]
        else:
            tA = mma.make_fragment_A(part.partition_A(sA))[None, None, None, group]
            tB = mma.make_fragment_B(part.partition_B(sB))[None, None, None, 0]
        cute.arch.sync_threads()
        began = clock()
        for _ in cutlass.range(iterations, unroll=1):
            multiply(mma.op, acc, tA, tB, False)
            warpgroup.wait_group(self.in_flight)
        warpgroup.wait_group(0)
        ended = clock()
        result = acc[0]
        for i in cutlass.range_constexpr(1, cute.size(acc)):
            result = result + acc[i]
        return began, ended, result
