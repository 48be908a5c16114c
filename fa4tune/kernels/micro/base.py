"""What all microbenchmark kernels share: one host signature, clock stamps, a walk over tiles, inline PTX.

Every kernel runs ``iterations`` turns of a loop in each of ``blocks`` CTAs of ``threads`` threads. Each warp
stamps its SM's clock before and after the loop, and each thread writes a result that depends on all the loop
computed, so that no compiler can leave the work out. A cost is the slope between two iteration counts, which
cancels the clock's own latency, the loop's start and its drain.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.cutlass_dsl import T, dsl_user_op

SOURCE_COLUMNS = 128
"""Columns of the source tensor: the widest head dim that the kernels multiply or copy."""


class Walk(NamedTuple):
    """Tiles that a CTA visits: ``start + block * block_step``, then every ``step``, modulo ``span``."""

    start: Any
    step: Any
    span: Any
    block_step: Any


class MicroKernel:
    """Base of the kernels: a subclass gives ``body`` and, where it needs host objects, ``prepare``.

    ``max_threads`` bounds registers a thread: 65536 over it.
    """

    max_threads = 512

    @cute.jit
    def __call__(
        self,
        mStamps: cute.Tensor,
        mSink: cute.Tensor,
        mSource: cute.Tensor,
        iterations: Int32,
        blocks: Int32,
        threads: Int32,
        start: Int32,
        step: Int32,
        span: Int32,
        block_step: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """Launch.

        Args:
            mStamps: int64, 2 a warp: clock before and after the loop.
            mSink: float32, one a thread: a value that depends on all the loop did.
            mSource: bf16 (rows, :data:`SOURCE_COLUMNS`): values to compute with, memory to copy.
            iterations: turns of the loop.
            blocks, threads: of the grid and of a CTA; ``threads`` a multiple of 32, at most ``max_threads``.
            start, step, span, block_step: see :class:`Walk`.
        """
        host = self.prepare(mSource)
        walk = Walk(start, step, span, block_step)
        self.kernel(mStamps, mSink, mSource, host, iterations, walk).launch(
            grid=[blocks, 1, 1],
            block=[threads, 1, 1],
            max_number_threads=[self.max_threads, 1, 1],
            preferred_smem_carveout=100,
            stream=stream,
        )

    def prepare(self, mSource: cute.Tensor) -> tuple:
        """Host objects that the kernel takes (MMA and copy atoms, layouts)."""
        return ()

    def body(self, mSource: cute.Tensor, host: tuple, iterations: Int32, walk: Walk) -> Any:
        """(clock before, clock after, float32 result) of this thread around ``iterations`` turns."""
        raise NotImplementedError

    @cute.kernel
    def kernel(
        self,
        mStamps: cute.Tensor,
        mSink: cute.Tensor,
        mSource: cute.Tensor,
        host: tuple,
        iterations: Int32,
        walk: Walk,
    ) -> None:
        began, ended, result = self.body(mSource, host, iterations, walk)
        thread, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        index = block * cute.arch.block_dim()[0] + thread
        if thread % 32 == 0:
            mStamps[index // 32 * 2] = began
            mStamps[index // 32 * 2 + 1] = ended
        mSink[index] = result


@dsl_user_op
def clock(*, loc=None, ip=None) -> Int64:
    """The SM's clock, in cycles; stays where it is among other instructions with side effects."""
    return Int64(volatile(T.i64(), [], "mov.u64 $0, %clock64;", "=l", loc, ip))


def volatile(result, operands, text, constraints, loc, ip):
    """Inline PTX that is neither removed nor moved across other such instructions."""
    return _asm(result, operands, text, constraints, True, loc, ip)


def pure(result, operands, text, constraints, loc, ip):
    """Inline PTX whose result is all it does."""
    return _asm(result, operands, text, constraints, False, loc, ip)


def _asm(result, operands, text, constraints, effects, loc, ip):
    return llvm.inline_asm(
        result,
        operands,
        text,
        constraints,
        has_side_effects=effects,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


def source_value(mSource: cute.Tensor, row: Any, column: Any) -> Float32:
    """One source element as float32: a value that the compiler does not know."""
    return mSource[row, column].to(Float32)


def fake_arguments() -> tuple[Any, ...]:
    """Arguments to compile with, in the order of :meth:`MicroKernel.__call__`."""
    return (
        make_fake_compact_tensor(Int64, (cute.sym_int(),)),
        make_fake_compact_tensor(Float32, (cute.sym_int(),)),
        make_fake_compact_tensor(
            cutlass.BFloat16, (cute.sym_int(), SOURCE_COLUMNS), stride_order=(1, 0), assumed_align=16
        ),
        *(Int32(1) for _ in range(7)),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
