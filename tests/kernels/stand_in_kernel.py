"""A kernel with the attention kernels' host signature that compiles in a second: O = Q * scale, LSE = tile_n.

``exp2_degree`` chooses a failure, so that the ways a compiler ends can be tested, or a spill.
"""

from __future__ import annotations

import os
import time
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from fa4tune.kernels.config import KernelConfig
from fa4tune.problem import AttentionProblem

REFUSE, CRASH, HANG, SPILL = 1, 2, 4, 5
LIVE = 128


class StandIn:
    def __init__(self, config: Any) -> None:
        self.config = config

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
    ):
        self.kernel(mQ, mO, mLSE, softmax_scale).launch(
            grid=(mQ.shape[1], mQ.shape[2], mQ.shape[0]),
            block=(1024 if self.config.exp2_degree == SPILL else 64, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, mQ: cute.Tensor, mO: cute.Tensor, mLSE: cute.Tensor, scale: Float32):
        row, head, batch = cute.arch.block_idx()
        thread = cute.arch.thread_idx()[0]
        if thread == 0:
            mLSE[batch, head, row] = Float32(self.config.tile_n)
        if cutlass.const_expr(self.config.exp2_degree == SPILL):
            # LIVE values across a barrier, and 64 registers a thread
            kept = cute.make_rmem_tensor(LIVE, Float32)
            for i in cutlass.range_constexpr(LIVE):
                kept[i] = mLSE[batch, head, thread + 1024 * i]
            cute.arch.sync_threads()
            for i in cutlass.range_constexpr(LIVE):
                mLSE[batch, head, thread + 1024 * i] = kept[LIVE - 1 - i]
        for column in cutlass.range(thread, mQ.shape[3], 64):
            mO[batch, row, head, column] = (mQ[batch, row, head, column].to(Float32) * scale).to(
                mO.element_type
            )


def build(problem: AttentionProblem, config: KernelConfig) -> tuple[Any, tuple[Any, ...]]:
    """The host function and fake arguments, as the kernels of the package give them."""
    if config.exp2_degree == REFUSE:
        raise ValueError("no such kernel")
    if config.exp2_degree == CRASH:
        os.write(2, b"the compiler's last words\n")
        os.abort()
    if config.exp2_degree == HANG:
        time.sleep(60)
    dtype = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}[problem.dtype]

    def tensor(dim: int) -> Any:
        shape = (cute.sym_int(), cute.sym_int(), cute.sym_int(), dim)
        return make_fake_compact_tensor(dtype, shape, stride_order=(3, 2, 1, 0), assumed_align=16)

    q, k = tensor(problem.head_dim), tensor(problem.head_dim)
    v, o = tensor(problem.head_dim_v), tensor(problem.head_dim_v)
    lse = make_fake_compact_tensor(
        Float32, (cute.sym_int(), cute.sym_int(), cute.sym_int()), stride_order=(2, 1, 0)
    )
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return StandIn(config), (q, k, v, o, lse, Float32(1.0), Int32(1), stream)
