"""Device arithmetic of the softmax interiors: single PTX instructions and the emulated exponential.

The polynomial path executes, instruction by instruction, what :func:`fa4tune.kernels.exp2.exp2_polynomial`
computes on the host; coefficients and constants come from there.
"""

from __future__ import annotations

import cutlass
from cutlass import Boolean, Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from fa4tune.kernels.exp2 import MIN_EXPONENT, POLYNOMIALS, ROUND_DOWN_MAGIC


def _asm(result, operands, text, constraints, loc, ip):  # type: ignore[no-untyped-def]
    return llvm.inline_asm(
        result,
        operands,
        text,
        constraints,
        has_side_effects=False,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def fma(a: Float32, b: Float32, c: Float32, *, loc=None, ip=None) -> Float32:  # type: ignore[no-untyped-def]
    """``a * b + c`` rounded once, subnormals flushed."""
    operands = [Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b, c)]
    return Float32(_asm(T.f32(), operands, "fma.rn.ftz.f32 $0, $1, $2, $3;", "=f,f,f,f", loc, ip))


@dsl_user_op
def exp2_hardware(x: Float32, *, loc=None, ip=None) -> Float32:  # type: ignore[no-untyped-def]
    """2^x on the exponential unit."""
    operands = [Float32(x).ir_value(loc=loc, ip=ip)]
    return Float32(_asm(T.f32(), operands, "ex2.approx.ftz.f32 $0, $1;", "=f,f", loc, ip))


@dsl_user_op
def _add_round_down(a: Float32, b: Float32, *, loc=None, ip=None) -> Float32:  # type: ignore[no-untyped-def]
    operands = [Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b)]
    return Float32(_asm(T.f32(), operands, "add.rm.ftz.f32 $0, $1, $2;", "=f,f,f", loc, ip))


@dsl_user_op
def _sub(a: Float32, b: Float32, *, loc=None, ip=None) -> Float32:  # type: ignore[no-untyped-def]
    operands = [Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b)]
    return Float32(_asm(T.f32(), operands, "sub.rn.ftz.f32 $0, $1, $2;", "=f,f,f", loc, ip))


@dsl_user_op
def _add_exponent(fraction: Float32, rounded: Float32, *, loc=None, ip=None) -> Float32:  # type: ignore[no-untyped-def]
    # The integer floor sits in the low bits of `rounded`; the shift drops all others.
    operands = [Float32(x).ir_value(loc=loc, ip=ip) for x in (fraction, rounded)]
    text = (
        "{ .reg .b32 e; .reg .b32 f; mov.b32 f, $1; mov.b32 e, $2; "
        "shl.b32 e, e, 23; add.s32 e, e, f; mov.b32 $0, e; }"
    )
    return Float32(_asm(T.f32(), operands, text, "=f,f,f", loc, ip))


def exp2_emulated(x: Float32, degree: int) -> Float32:
    """2^x by a polynomial of `degree` on the FMA and ALU pipes; x below 128, anything under -127 gives 0."""
    coefficients = POLYNOMIALS[degree]
    clamped = cutlass.cute.arch.fmax(x, Float32(MIN_EXPONENT))
    rounded = _add_round_down(clamped, Float32(ROUND_DOWN_MAGIC))
    fraction = _sub(clamped, _sub(rounded, Float32(ROUND_DOWN_MAGIC)))
    value = Float32(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = fma(value, fraction, Float32(coefficient))
    return _add_exponent(value, rounded)


@dsl_user_op
def pack_pair(low: Float32, high: Float32, dtype, *, loc=None, ip=None) -> Int32:  # type: ignore[no-untyped-def]
    """Two float32 rounded to ``dtype`` (bf16 or fp16) in one 32-bit register, ``low`` in its low half."""
    kind = "bf16x2" if dtype is cutlass.BFloat16 else "f16x2"
    operands = [Float32(x).ir_value(loc=loc, ip=ip) for x in (low, high)]
    return Int32(_asm(T.i32(), operands, f"cvt.rn.{kind}.f32 $0, $2, $1;", "=r,f,f", loc, ip))


@dsl_user_op
def max3_as_integers(a: Float32, b: Float32, c: Float32, *, loc=None, ip=None) -> Float32:  # type: ignore[no-untyped-def]
    """The operand whose bits are the largest signed integer: the maximum if any of them is not negative.

    Hopper has a three-input maximum for integers only. Of negative numbers alone it gives the smallest.
    """
    operands = [Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b, c)]
    text = (
        "{ .reg .b32 x; .reg .b32 y; .reg .b32 z; mov.b32 x, $1; mov.b32 y, $2; mov.b32 z, $3; "
        "max.s32 x, x, y; max.s32 x, x, z; mov.b32 $0, x; }"
    )
    return Float32(_asm(T.f32(), operands, text, "=f,f,f,f", loc, ip))


@dsl_user_op
def sign_bit(x: Float32, *, loc=None, ip=None) -> Boolean:  # type: ignore[no-untyped-def]
    """Whether the sign is set, of zeros and NaN too."""
    bits = llvm.bitcast(T.i32(), Float32(x).ir_value(loc=loc, ip=ip), loc=loc, ip=ip)
    return Int32(bits) < Int32(0)


@dsl_user_op
def stay_below(value: Float32, slot, *, loc=None, ip=None) -> None:  # type: ignore[no-untyped-def]
    """Keeps what follows in program order behind the computation of ``value``, which is never negative.

    The assembler hoists a wait for asynchronous MMAs above independent arithmetic, which then does not
    overlap them. A shared-memory store that depends on the arithmetic, and is never taken, holds the wait.

    Args:
        value: result to wait for.
        slot: pointer to any shared memory, never written.
    """
    llvm.inline_asm(
        None,
        [Float32(value).ir_value(loc=loc, ip=ip), slot.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip)],
        "{ .reg .pred p; setp.lt.f32 p, $0, 0f00000000; @p st.shared.f32 [$1], $0; }",
        "f,r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
