"""Device helpers of the Blackwell kernels: packed float32 pairs, TMEM views, fences."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm, nvvm
from cutlass.cute.nvgpu import tcgen05
from cutlass.cutlass_dsl import T, dsl_user_op

from fa4tune.kernels.exp2 import MIN_EXPONENT, POLYNOMIALS, ROUND_DOWN_MAGIC
from fa4tune.kernels.exp2_device import _add_exponent

LANE_STRIDE = 1 << 16
"""TMEM addresses hold the lane in bits 16-31 and the column in bits 0-15."""

Pair = tuple[Float32, Float32]


def _volatile(result: Any, operands: list, text: str, constraints: str, loc: Any, ip: Any) -> Any:
    """Inline PTX that is neither moved nor merged."""
    return llvm.inline_asm(
        result,
        operands,
        text,
        constraints,
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


def fma_pair(a: Pair, b: Pair, c: Pair) -> Pair:
    """``a * b + c`` of two values at once, each rounded once."""
    return cute.arch.fma_packed_f32x2(a, b, c, ftz=True)


def exp2_emulated_pair(x: Pair, degree: int) -> Pair:
    """2^x of two values by a polynomial; the packed form of :func:`fa4tune.kernels.exp2.exp2_polynomial`."""
    coefficients = POLYNOMIALS[degree]
    clamped = tuple(cute.arch.fmax(value, Float32(MIN_EXPONENT)) for value in x)
    magic = (Float32(ROUND_DOWN_MAGIC), Float32(ROUND_DOWN_MAGIC))
    rounded = cute.arch.add_packed_f32x2(clamped, magic, rnd="rm", ftz=True)
    floor = cute.arch.sub_packed_f32x2(rounded, magic)
    fraction = cute.arch.sub_packed_f32x2(clamped, floor)
    value = (Float32(coefficients[-1]), Float32(coefficients[-1]))
    for coefficient in reversed(coefficients[:-1]):
        value = fma_pair(value, fraction, (Float32(coefficient), Float32(coefficient)))
    return _add_exponent(value[0], rounded[0]), _add_exponent(value[1], rounded[1])


@dsl_user_op
def fence_after_wait(*, loc: Any = None, ip: Any = None) -> None:
    """Orders later TMEM accesses of this thread after the barrier wait before it."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC, loc=loc, ip=ip)


@dsl_user_op
def fence_before_arrive(*, loc: Any = None, ip: Any = None) -> None:
    """Orders earlier TMEM accesses of this thread before the barrier arrival after it."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC, loc=loc, ip=ip)


@dsl_user_op
def block_index(*, loc: Any = None, ip: Any = None) -> Int32:
    """The CTA's index in the grid, read where it stands."""
    return Int32(_volatile(T.i32(), [], "mov.u32 $0, %ctaid.x;", "=r", loc, ip))


@dsl_user_op
def opaque(value: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """``value``, unknown to the compiler, which computes what depends on it anew."""
    operands = [Int32(value).ir_value(loc=loc, ip=ip)]
    return Int32(_volatile(T.i32(), operands, "mov.b32 $0, $1;", "=r,r", loc, ip))


@dsl_user_op
def zero_read_here(address: cute.Pointer, *, loc: Any = None, ip: Any = None) -> Float32:
    """The zero that SMEM holds at ``address``, read where it stands, as float32.

    The assembler moves arithmetic ahead of stores and barrier arrivals, but it neither knows this value nor
    reads it before the arrivals that stand before: what adds it comes after them.
    """
    operands = [address.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip)]
    return Float32(_volatile(T.f32(), operands, "ld.volatile.shared.f32 $0, [$1];", "=f,r", loc, ip))


class TmemRows:
    """``columns`` 32-bit columns of all 128 lanes, a thread a lane, moved by one TMEM load or store."""

    def __init__(self, columns: int, thread: Int32, store: bool = False) -> None:
        self.columns = columns
        self.thread = thread
        kind = tcgen05.copy.St32x32bOp if store else tcgen05.copy.Ld32x32bOp
        self.atom = cute.make_copy_atom(kind(tcgen05.copy.Repetition(columns)), Float32)

    def _view(self, address: cute.Pointer) -> cute.Tensor:
        return cute.make_tensor(address, cute.make_layout((128, self.columns), stride=(LANE_STRIDE, 1)))

    def load(self, address: cute.Pointer, registers: cute.Pointer) -> None:
        """TMEM at ``address`` to registers, asynchronously; see ``fence_view_async_tmem_load``."""
        view = self._view(address)
        tiled = tcgen05.make_tmem_copy(self.atom, view)
        thread = tiled.get_slice(self.thread)
        shape = thread.partition_D(cute.make_identity_tensor((128, self.columns))).shape
        cute.copy(tiled, thread.partition_S(view), cute.make_tensor(registers, cute.make_layout(shape)))

    def store(self, address: cute.Pointer, registers: cute.Pointer) -> None:
        """Registers to TMEM at ``address``, asynchronously; see ``fence_view_async_tmem_store``."""
        view = self._view(address)
        tiled = tcgen05.make_tmem_copy(self.atom, view)
        thread = tiled.get_slice(self.thread)
        shape = thread.partition_S(cute.make_identity_tensor((128, self.columns))).shape
        cute.copy(tiled, cute.make_tensor(registers, cute.make_layout(shape)), thread.partition_D(view))
