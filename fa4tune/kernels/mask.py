"""Masks of score tiles held in registers."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32


@cute.jit
def mask_from_column(scores: cute.Tensor, elements: tuple[tuple[int, int], ...], end_column: Int32) -> None:
    """Sets to -inf every score whose column is ``end_column`` or later.

    Args:
        scores: registers of a tile.
        elements: (register, column) of the scores of one row, both static; columns count from wherever
            ``end_column`` does.
        end_column: first column that the row does not see.
    """
    for register, column in elements:
        scores[register] = -Float32.inf if end_column <= column else scores[register]
