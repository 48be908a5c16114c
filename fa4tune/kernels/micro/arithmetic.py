"""Throughput and latency of a thread's arithmetic: independent or dependent chains of one instruction.

``chains`` independent values a thread are each put through the same operation, ``CHAIN`` times an iteration.
With many chains and warps the pipe is the limit, with one of each its latency.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cutlass_dsl import T, dsl_user_op

from fa4tune.kernels.exp2_device import exp2_emulated, fma
from fa4tune.kernels.micro.base import MicroKernel, Walk, clock, pure, source_value

OPERATIONS = ("ex2", "fma", "max", "max3", "convert", "shuffle", "fma_max", "polynomial")
"""What a chain can be made of; ``fma_max`` alternates the two pipes that they use."""

LOOP_INSTRUCTIONS = 256
"""Instructions a thread and iteration, of all chains together: enough to hide the loop's own three."""

POLYNOMIAL_INSTRUCTIONS = 8
"""Machine instructions of one emulated exponential: clamp, round, two subtractions, three multiply-adds and
the exponent's shift and add in one."""

POLYNOMIAL_DEGREE = 3


@dsl_user_op
def exp2_negative(x: Float32, *, loc=None, ip=None) -> Float32:
    """2^-x on the exponential unit; iterated, it approaches 0.6412, so that values stay ordinary."""
    text = "{ .reg .f32 n; neg.f32 n, $1; ex2.approx.ftz.f32 $0, n; }"
    return Float32(pure(T.f32(), [Float32(x).ir_value(loc=loc, ip=ip)], text, "=f,f", loc, ip))


@dsl_user_op
def convert_pair(x: Float32, y: Float32, *, loc=None, ip=None) -> Float32:
    """Two values rounded to bf16 in one register, its bits taken as a float32 again."""
    operands = [Float32(v).ir_value(loc=loc, ip=ip) for v in (x, y)]
    text = "{ .reg .b32 p; cvt.rn.bf16x2.f32 p, $1, $2; mov.b32 $0, p; }"
    return Float32(pure(T.f32(), operands, text, "=f,f,f", loc, ip))


@dsl_user_op
def exchange(x: Float32, *, loc=None, ip=None) -> Float32:
    """The value of the neighbouring lane."""
    operands = [Float32(x).ir_value(loc=loc, ip=ip)]
    text = "shfl.sync.bfly.b32 $0, $1, 1, 31, -1;"
    return Float32(pure(T.f32(), operands, text, "=f,f", loc, ip))


@dsl_user_op
def clamp_step(x: Float32, bound: Float32, upper: bool, *, loc=None, ip=None) -> Float32:
    """The smaller (``upper``) or larger of two values; in turn, no step makes another one superfluous."""
    operands = [Float32(v).ir_value(loc=loc, ip=ip) for v in (x, bound)]
    text = f"{'min' if upper else 'max'}.f32 $0, $1, $2;"
    return Float32(pure(T.f32(), operands, text, "=f,f,f", loc, ip))


@dsl_user_op
def clamp_step_3(x: Float32, y: Float32, z: Float32, upper: bool, *, loc=None, ip=None) -> Float32:
    """The smallest (``upper``) or largest of three values by their bits, one instruction on Hopper."""
    operands = [Float32(v).ir_value(loc=loc, ip=ip) for v in (x, y, z)]
    kind = "min" if upper else "max"
    text = (
        "{ .reg .b32 x; .reg .b32 y; .reg .b32 z; mov.b32 x, $1; mov.b32 y, $2; mov.b32 z, $3; "
        f"{kind}.s32 x, x, y; {kind}.s32 x, x, z; mov.b32 $0, x; }}"
    )
    return Float32(pure(T.f32(), operands, text, "=f,f,f,f", loc, ip))


def apply(operation: str, values: list[Float32], index: int, step: int, a: Float32, b: Float32) -> Float32:
    """The next value of chain ``index``; ``a`` and ``b`` are any two values."""
    x = values[index]
    if operation == "ex2":
        return exp2_negative(x)
    if operation == "max" or (operation == "fma_max" and index % 2):
        return clamp_step(x, (a, b)[step % 2], step % 2 == 0)
    if operation == "max3":
        return clamp_step_3(x, values[(index + 1) % len(values)], (a, b)[step % 2], step % 2 == 0)
    if operation in ("fma", "fma_max"):
        return fma(x, a, b)
    if operation == "convert":
        return convert_pair(x, values[(index + 1) % len(values)])
    if operation == "shuffle":
        return exchange(x)
    if operation == "polynomial":
        return exp2_emulated(-x, POLYNOMIAL_DEGREE)
    raise ValueError(f"operation {operation!r} is not one of {', '.join(OPERATIONS)}")


class Arithmetic(MicroKernel):
    """Chains of one operation.

    Args:
        operation: of :data:`OPERATIONS`.
        chains: independent values a thread.
    """

    def __init__(self, operation: str, chains: int) -> None:
        self.operation = operation
        self.chains = chains

    @property
    def steps(self) -> int:
        """Operations on each chain in an iteration."""
        cost = POLYNOMIAL_INSTRUCTIONS if self.operation == "polynomial" else 1
        return LOOP_INSTRUCTIONS // cost // self.chains

    @cute.jit
    def body(self, mSource: cute.Tensor, host: tuple, iterations: Int32, walk: Walk) -> Any:
        thread = cute.arch.thread_idx()[0]
        a, b = source_value(mSource, thread, 0), source_value(mSource, thread, 1)
        values = [source_value(mSource, thread, 2 + i) for i in range(self.chains)]
        cute.arch.sync_threads()
        began = clock()
        for _ in cutlass.range(iterations, unroll=1):
            for step in cutlass.range_constexpr(self.steps):
                for i in cutlass.range_constexpr(self.chains):
                    values[i] = apply(self.operation, values, i, step, a, b)
        ended = clock()
        result = values[0]
        for i in cutlass.range_constexpr(1, self.chains):
            result = result + values[i]
        return began, ended, result
