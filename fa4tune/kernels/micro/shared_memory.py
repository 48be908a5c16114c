"""Shared memory: bandwidth of 16-byte loads and stores, latency of a chain of dependent loads."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op
from cutlass.memory import SmemAllocator

from fa4tune.kernels.micro.base import MicroKernel, Walk, clock, source_value, volatile

ACCESSES = 32
"""Accesses a thread and iteration."""

ACCESS_BYTES = 16

_WORDS = 32768
"""32-bit words of the buffer, a power of two: 128 KiB."""


@dsl_user_op
def load_16(address: Int32, *, loc=None, ip=None) -> tuple[Int32, ...]:
    """Four words at a shared address."""
    words = volatile(
        llvm.StructType.get_literal([T.i32()] * 4),
        [Int32(address).ir_value(loc=loc, ip=ip)],
        "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r,r",
        loc,
        ip,
    )
    return tuple(Int32(llvm.extractvalue(T.i32(), words, [i], loc=loc, ip=ip)) for i in range(4))


@dsl_user_op
def load_4(address: Int32, *, loc=None, ip=None) -> Int32:
    """The word at a shared address."""
    operands = [Int32(address).ir_value(loc=loc, ip=ip)]
    return Int32(volatile(T.i32(), operands, "ld.shared.b32 $0, [$1];", "=r,r", loc, ip))


@dsl_user_op
def store_16(address: Int32, words: tuple[Int32, ...], *, loc=None, ip=None) -> None:
    """Four words to a shared address."""
    operands = [Int32(v).ir_value(loc=loc, ip=ip) for v in (address, *words)]
    volatile(None, operands, "st.shared.v4.b32 [$0], {$1, $2, $3, $4};", "r,r,r,r,r", loc, ip)


class SharedMemory(MicroKernel):
    """One kind of access.

    Args:
        access: ``load`` or ``store`` (16 bytes a lane, a warp's 512 consecutive) or ``chain`` (each load's
            address is what the one before loaded).
    """

    def __init__(self, access: str) -> None:
        self.access = access

    @cute.jit
    def body(self, mSource: cute.Tensor, host: tuple, iterations: Int32, walk: Walk) -> Any:
        thread, threads = cute.arch.thread_idx()[0], cute.arch.block_dim()[0]
        words = SmemAllocator().allocate_tensor(Int32, cute.make_layout(_WORDS), 1024)
        base = words.iterator.toint().to(Int32)
        for i in cutlass.range(thread, _WORDS, threads, unroll=1):
            # a word holds its own address, or a value to load
            words[i] = (
                base + 4 * i
                if const_expr(self.access == "chain")
                else source_value(mSource, i // 128, i % 128).to(Int32)
            )
        cute.arch.sync_threads()
        result = [Int32(0), Int32(0)]
        offset = thread * ACCESS_BYTES
        began = clock()
        if const_expr(self.access == "chain"):
            address = base + offset
            for _ in cutlass.range(iterations, unroll=1):
                for _access in cutlass.range_constexpr(ACCESSES):
                    address = load_4(address)
            result[0] = address
        else:
            for i in cutlass.range(iterations, unroll=1):
                # the first address changes with the turn, so that no access repeats the one before
                at = base + ((offset + i * ACCESS_BYTES * 32) & (2 * _WORDS - 1))
                for access in cutlass.range_constexpr(ACCESSES):
                    where = at + access * 2 * _WORDS // ACCESSES
                    if const_expr(self.access == "load"):
                        loaded = load_16(where)
                        result[access % 2] = (
                            result[access % 2] ^ loaded[0] ^ loaded[1] ^ loaded[2] ^ loaded[3]
                        )
                    else:
                        store_16(where, (i, offset, i, offset))
        ended = clock()
        cute.arch.sync_threads()
        if const_expr(self.access == "store"):
            result[0] = words[thread]
        return began, ended, (result[0] ^ result[1]).to(Float32)
