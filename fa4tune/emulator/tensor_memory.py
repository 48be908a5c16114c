"""Tensor memory of a CTA: 128 lanes of 512 columns of 32 bits, allocated in powers of two of columns."""

from __future__ import annotations

from typing import Any

import numpy as np

from fa4tune.emulator.findings import FaultError
from fa4tune.emulator.lanes import Array

COLUMNS, LANES = 512, 128


class TensorMemory:
    """Contents (column-major: one row of the array a column) and allocation; born as NaN bits."""

    def __init__(self, cta: Any) -> None:
        self.cta = cta
        self.words: Array | None = None
        self.blocks: dict[int, int] = {}  # first column -> number of columns
        self.holders: dict[int, str] = {}  # first column -> who allocated it, and where
        self.relinquished = False
        self.waiters: list[Any] = []

    @property
    def data(self) -> Array:
        """The words, shape (512 columns, 128 lanes), uint32."""
        if self.words is None:
            self.words = np.full((COLUMNS, LANES), 0xFFFFFFFF, np.uint32)
        return self.words

    def allocated(self) -> list[str]:
        """Column ranges in use."""
        return [f"{a}..{a + n - 1}" for a, n in sorted(self.blocks.items())]

    def held(self) -> str:
        """Who holds which columns, in words."""
        if not self.blocks:
            return "none is allocated"
        parts = [
            f"{first}..{first + n - 1} are held by {self.holders.get(first, 'nobody')}"
            for first, n in sorted(self.blocks.items())
        ]
        return ", ".join(parts)

    def allocate(self, columns: int) -> int | None:
        """First fit; None if the caller must wait."""
        if columns < 32 or columns > COLUMNS or columns & (columns - 1):
            raise FaultError(
                "tmem", f"allocation of {columns} columns, which is no power of two from 32 to 512"
            )
        if self.relinquished:
            raise FaultError("tmem", "allocation after relinquish_alloc_permit")
        for first in range(0, COLUMNS, columns):
            if all(first + columns <= a or a + n <= first for a, n in self.blocks.items()):
                self.blocks[first] = columns
                return first
        return None

    def free(self, address: int, columns: int) -> None:
        """Give columns back; they must be one allocation."""
        first = address & 0xFFFF
        if self.blocks.get(first) != columns:
            raise FaultError(
                "tmem", f"dealloc of {columns} columns at {first}, allocated are {self.allocated()}"
            )
        del self.blocks[first]
        waiters, self.waiters = self.waiters, []
        for warp in waiters:
            warp.wake()

    def check(self, column: int, count: int, what: str) -> None:
        """Refuse an access outside of one allocation."""
        for first, n in self.blocks.items():
            if first <= column and column + count <= first + n:
                return
        raise FaultError(
            "out-of-bounds",
            f"{what} at TMEM columns {column}..{column + count - 1}, "
            f"allocated are {self.allocated() or 'none'}",
        )


class WantedColumns:
    """What a warp waits for in ``tcgen05.alloc``."""

    def __init__(self, tmem: TensorMemory, columns: int) -> None:
        self.tmem = tmem
        self.columns = columns

    def describe(self) -> str:
        """For a deadlock's report."""
        return (
            f"{self.columns} free columns in a row of the {COLUMNS} of CTA {self.tmem.cta.label}'s TMEM, "
            f"of which {self.tmem.held()}"
        )
