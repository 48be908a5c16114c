"""Online softmax of score rows held in registers, for any mapping of rows to a thread's registers.

A caller names the registers of each row it holds (a tuple of static indices) and keeps ``row_max`` (raw
score units) and ``row_sum`` for it. Scores stay unscaled until the exponential, whose argument is one fused
multiply-add: ``score * scale_log2 - row_max * scale_log2`` with ``scale_log2 = softmax_scale * log2(e)``.
Rescaling is conditional above a threshold (FlashAttention-4, arXiv 2603.05451, section 3.1.4).
"""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from fa4tune.kernels.exp2_device import exp2_emulated, exp2_hardware, fma, max3_as_integers, sign_bit

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)


def maximum_of(scores: cute.Tensor, row: tuple[int, ...], init: Float32, chains: int = 2) -> Float32:
    """Largest of ``init`` and the registers ``row`` of ``scores``, in ``chains`` independent chains."""
    heads = [init, *(scores[i] for i in row[: chains - 1])]
    for position, index in enumerate(row[chains - 1 :]):
        heads[position % chains] = cute.arch.fmax(heads[position % chains], scores[index])
    result = heads[0]
    for head in heads[1:]:
        result = cute.arch.fmax(result, head)
    return result


@cute.jit
def row_maxima(
    scores: cute.Tensor, rows: cutlass.Constexpr[tuple[tuple[int, ...], ...]], row_max: cute.Tensor
) -> cute.Tensor:
    """Largest of ``row_max[r]`` and this thread's registers of row ``r``, for each of ``rows``.

    Three-input integer maxima on the bits are exact as soon as one operand is not negative, which is nearly
    always; a warp with a lane that has seen negative scores only goes over its rows again, in float.
    """
    result = cute.make_rmem_tensor(len(rows), Float32)
    negative = Boolean(False)
    for r in cutlass.range_constexpr(len(rows)):
        result[r] = _integer_maximum(scores, rows[r], row_max[r])
        negative = negative | sign_bit(result[r])
    if any_lane(negative):
        for r in cutlass.range_constexpr(len(rows)):
            result[r] = maximum_of(scores, rows[r], row_max[r])
    return result


def _integer_maximum(scores: cute.Tensor, row: tuple[int, ...], init: Float32) -> Float32:
    heads = [init, scores[row[0]]]
    rest = row[1:]
    for pair in range(len(rest) // 2):
        a, b = rest[2 * pair], rest[2 * pair + 1]
        heads[pair % 2] = max3_as_integers(heads[pair % 2], scores[a], scores[b])
    last = scores[rest[-1]] if len(rest) % 2 else heads[1]
    return max3_as_integers(heads[0], heads[1], last)


@cute.jit
def advance_row_max(
    old_max: Float32,
    tile_max: Float32,
    scale_log2: Float32,
    threshold: cutlass.Constexpr[float],
    may_be_empty: cutlass.Constexpr[bool],
) -> tuple[Float32, Float32, Float32]:
    """The maximum that the exponentials of this tile are taken against.

    Args:
        old_max: maximum so far, -inf at first.
        tile_max: maximum of ``old_max`` and this tile's scores, the same in all lanes of the row.
        scale_log2: score to log2 units.
        threshold: keep ``old_max`` while the true one is at most this much larger (log2 units); 0 never.
        may_be_empty: rows without any visible score so far can occur (their maximum is -inf).

    Returns:
        (maximum kept, minus its scaled value, factor for what was accumulated against ``old_max``).
    """
    kept = tile_max
    finite = tile_max
    if const_expr(may_be_empty):
        finite = Float32(0.0) if tile_max == -Float32.inf else tile_max
    growth = (old_max - finite) * scale_log2
    factor = Float32(1.0)
    if const_expr(threshold > 0):
        small = growth >= Float32(-threshold)
        factor = exp2_hardware(growth)
        factor = Float32(1.0) if small else factor
        kept = old_max if small else kept
        finite = old_max if small else finite
    else:
        factor = exp2_hardware(growth)
    return kept, -finite * scale_log2, factor


def exponentiate(
    scores: cute.Tensor, index: int, scale_log2: Float32, minus_max: Float32, emulated: bool, degree: int
) -> Float32:
    """Replaces one score by 2^(score * scale_log2 + minus_max) and returns it."""
    argument = fma(scores[index], scale_log2, minus_max)
    value = exp2_emulated(argument, degree) if emulated else exp2_hardware(argument)
    scores[index] = value
    return value


@cute.jit
def normaliser(row_max: Float32, row_sum: Float32, scale_log2: Float32) -> tuple[Float32, Float32]:
    """(factor that normalises O, natural-log LSE) of a finished row; an empty row gives (0, -inf)."""
    empty = Boolean(row_sum == Float32(0.0))
    safe = Float32(1.0) if empty else row_sum
    factor = Float32(0.0) if empty else cute.arch.rcp_approx(safe)
    lse = -Float32.inf
    if not empty:
        lse = (row_max * scale_log2 + cute.math.log2(safe, fastmath=True)) * Float32(LN_2)
    return factor, lse


def any_lane(condition: Boolean) -> Boolean:
    """True in every lane if the condition holds in one lane of the warp."""
    return cute.arch.vote_any_sync(condition)


__all__ = [
    "LN_2",
    "LOG2_E",
    "Int32",
    "advance_row_max",
    "any_lane",
    "exponentiate",
    "maximum_of",
    "normaliser",
    "row_maxima",
]
