"""Latency of signals between warps: mbarriers and named barriers, as the kernels use them."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from fa4tune.kernels.micro.base import MicroKernel, Walk, clock

WARPGROUP = 128


class Signals(MicroKernel):
    """One kind of signal, once or twice an iteration.

    Args:
        kind: ``mbarrier`` (the first and the last warp answer each other: two signals an iteration),
            ``named`` (the first and the last warpgroup pass a turn to each other and back: two signals) or
            ``sync`` (all threads of the CTA meet: one).
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind

    @cute.jit
    def body(self, mSource: cute.Tensor, host: tuple, iterations: Int32, walk: Walk) -> Any:
        thread, threads = cute.arch.thread_idx()[0], cute.arch.block_dim()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        last = threads // 32 - 1
        bars = SmemAllocator().allocate_array(Int64, 2)
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(bars, 1)
                cute.arch.mbarrier_init(bars + 1, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        began = clock()
        if const_expr(self.kind == "mbarrier"):
            phase = Int32(0)
            if warp == 0:
                for _ in cutlass.range(iterations, unroll=1):
                    self._arrive(bars)
                    cute.arch.mbarrier_wait(bars + 1, phase)
                    phase = phase ^ 1
            elif warp == last:
                for _ in cutlass.range(iterations, unroll=1):
                    cute.arch.mbarrier_wait(bars, phase)
                    self._arrive(bars + 1)
                    phase = phase ^ 1
        elif const_expr(self.kind == "named"):
            group = warp // 4
            if group == 0:
                for _ in cutlass.range(iterations, unroll=1):
                    cute.arch.barrier_arrive(barrier_id=1, number_of_threads=2 * WARPGROUP)
                    cute.arch.barrier(barrier_id=2, number_of_threads=2 * WARPGROUP)
            elif group == last // 4:
                for _ in cutlass.range(iterations, unroll=1):
                    cute.arch.barrier(barrier_id=1, number_of_threads=2 * WARPGROUP)
                    cute.arch.barrier_arrive(barrier_id=2, number_of_threads=2 * WARPGROUP)
        else:
            for _ in cutlass.range(iterations, unroll=1):
                cute.arch.sync_threads()
        ended = clock()
        return began, ended, Float32(thread)

    @cute.jit
    def _arrive(self, barrier: Any) -> None:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barrier)
