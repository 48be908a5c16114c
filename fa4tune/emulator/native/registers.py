"""The register checks of a program as tables of the C runtime."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from fa4tune.emulator.checks_registers import RegisterCheck, RegisterPlan
from fa4tune.emulator.lanes import Array
from fa4tune.emulator.native import layout
from fa4tune.emulator.native.state import address_of


def _bits(mask: int) -> list[int]:
    out = []
    while mask:
        low = mask & -mask
        out.append(low.bit_length() - 1)
        mask ^= low
    return out


class NativeRegisters:
    """Masks of the registers that a check asks for, packed, and what to look at before which operation.

    Attributes:
        plan: where each check comes from.
        words: 64-bit words of a mask.
        tracked: numbers of the registers of which is followed whether they were written.
    """

    def __init__(self, plan: RegisterPlan) -> None:
        self.plan = plan
        followed = 0
        for block in plan.checks:
            for check in block:
                followed |= check.flying | check.loading | check.moved | check.touched
        self.order = _bits(followed)
        self.words = -(-len(self.order) // 64)
        self.followed = followed
        self.tracked = {register: number for number, register in enumerate(_bits(plan.tracked))}
        self._masks: dict[int, int] = {}
        self._checks: list[tuple[int, ...]] = []
        self._unset: list[tuple[int, int]] = []
        self.start = self.mask(plan.fenced)
        self.table: Any = None

    def pack(self, mask: int) -> Array:
        """Registers as words."""
        bits = [mask >> register & 1 for register in self.order] + [0] * (64 * self.words - len(self.order))
        return np.packbits(np.array(bits, np.uint8), bitorder="little").view(np.uint64)

    def unpack(self, packed: Array) -> int:
        """The reverse."""
        bits = np.unpackbits(packed.view(np.uint8), bitorder="little")
        return sum(1 << register for register, bit in zip(self.order, bits, strict=False) if bit)

    def mask(self, registers: int) -> int:
        """The number of a mask, -1 for one without a register that is followed."""
        registers &= self.followed
        return self._masks.setdefault(registers, len(self._masks)) if registers else -1

    def unset(self, registers: int) -> tuple[int, int]:
        """Registers that may not have been written: the first entry in their list, and how many there are."""
        first = len(self._unset)
        self._unset += [(self.tracked[register], register) for register in _bits(registers)]
        return first, len(self._unset) - first

    def add(self, check: RegisterCheck, operation: int) -> int:
        """A check before the operation of a numbered call; its number."""
        first = len(self._unset)
        self._unset += [(self.tracked[register.index], register.index) for register in check.unset]
        self._checks.append(
            (operation, self.mask(check.flying), self.mask(check.loading), self.mask(check.moved),
             self.mask(check.touched), int(check.clears), first, len(check.unset))
        )  # fmt: skip
        return len(self._checks) - 1

    def seal(self) -> None:
        """Make the tables, after everything was added."""
        checks = np.array([*self._checks, (0,) * 8], np.int32)
        unset = np.array([*self._unset, (0, 0)], np.int32)
        masks = np.concatenate([*(self.pack(m) for m in self._masks), np.zeros(1, np.uint64)])
        self.table = layout.RegisterTable(
            address_of(checks),
            address_of(unset),
            address_of(masks),
            self.words,
            len(self.tracked),
            self.start,
        )
        self._alive = (checks, unset, masks)

    @property
    def address(self) -> int:
        """Of the table."""
        return ctypes.addressof(self.table)
