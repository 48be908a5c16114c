"""mbarriers, named barriers, the cluster barrier: state machines without lanes.

Rules (PTX ISA, mbarrier): a phase ends when the pending count and the transaction count are both zero, then
the pending count is reloaded. Transaction bytes may arrive before they are expected (the count goes
negative) as long as arrivals keep the phase open. A wait for parity P succeeds while the current phase's
parity is not P.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fa4tune.emulator.findings import FaultError

MAX_COUNT = (1 << 20) - 1  #: of arrivals and of transaction bytes (PTX ISA, mbarrier)


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One event at a barrier.

    Args:
        kind: ``arrive``, ``wait`` (it succeeded), ``expect_tx``, ``complete_tx``, ``commit`` (an arrival by
            the tensor core), ``init``, and ``sync_arrive``, the first half of a ``barrier.sync``, whose
            second half is a ``wait``.
        cta: linear CTA number in the grid.
        warp: warp number in that CTA, -1 for an asynchronous unit.
        space: ``mbarrier``, ``named`` or ``cluster``.
        owner: linear number of the CTA that holds the barrier.
        barrier: offset in shared memory, or the number of a named barrier.
        phase: of the barrier when the event happened; the phase waited for in a ``wait``.
        amount: arrivals (threads, for a named barrier) or bytes.
    """

    kind: str
    cta: int
    warp: int
    space: str
    owner: int
    barrier: int
    phase: int
    amount: int = 0


class MBarrier:
    """One mbarrier object in shared memory."""

    __slots__ = ("count", "cta", "offset", "pending", "phase", "tx", "waiters")

    def __init__(self, cta: Any, offset: int, count: int) -> None:
        if not 1 <= count <= MAX_COUNT:
            raise FaultError("mbarrier", f"initialised with a count of {count}, outside of 1..{MAX_COUNT}")
        self.cta = cta
        self.offset = offset
        self.count = count
        self.pending = count
        self.tx = 0
        self.phase = 0
        self.waiters: list[Any] = []

    def describe(self) -> str:
        """State in words, for a deadlock's report."""
        return (
            f"mbarrier at offset {self.offset} of CTA {self.cta.label}: phase {self.phase} "
            f"(parity {self.phase & 1}), "
            f"{self.pending} of {self.count} arrivals pending, {self.tx} bytes pending"
        )

    def arrive(self, count: int, drop: bool = False) -> None:
        """``count`` arrivals; ``drop`` also lowers the count of the phases to come."""
        if count > self.pending:
            raise FaultError(
                "mbarrier-over-arrival",
                f"{count} arrivals where {self.pending} are pending ({self.describe()})",
            )
        self.pending -= count
        if drop:
            self.count -= count
        self._check()

    def expect(self, nbytes: int) -> None:
        """Raise the transaction count."""
        self.tx += nbytes
        self._range()
        self._check()

    def complete(self, nbytes: int) -> None:
        """Bytes arrived."""
        self.tx -= nbytes
        self._range()
        self._check()

    def _range(self) -> None:
        if abs(self.tx) > MAX_COUNT:
            raise FaultError(
                "mbarrier-tx-count", f"{self.tx} transaction bytes leave the range ({self.describe()})"
            )

    def _check(self) -> None:
        if self.pending == 0 and self.tx == 0:
            self.phase += 1
            self.pending = self.count
            self.cta.machine.progress += 1
            waiters, self.waiters = self.waiters, []
            for warp in waiters:
                warp.wake()


@dataclass(slots=True)
class NamedBarrier:
    """One of a CTA's sixteen barriers; counts threads, a warp adds its full width."""

    number: int
    arrived: int = 0
    expected: int = 0
    generation: int = 0
    waiters: list[Any] = field(default_factory=list)

    def describe(self) -> str:
        """State in words."""
        here = f"{self.arrived} of {self.expected} threads arrived"
        return f"barrier {self.number}: {here}, round {self.generation}"

    def arrive(self, threads: int, expected: int) -> None:
        """Add threads; the last one ends the round."""
        if expected % 32 or expected == 0:
            raise FaultError("barrier", f"barrier {self.number} with a thread count of {expected}")
        if self.arrived and expected != self.expected:
            raise FaultError(
                "barrier",
                f"barrier {self.number} with a count of {expected} while a round for {self.expected} is open",
            )
        self.expected = expected
        self.arrived += threads
        if self.arrived > expected:
            raise FaultError("barrier", f"more threads than its count arrived ({self.describe()})")
        if self.arrived == expected:
            self.arrived = 0
            self.generation += 1
            waiters, self.waiters = self.waiters, []
            for warp in waiters:
                warp.wake()


class ClusterBarrier:
    """``barrier.cluster``: every thread of the cluster that has not exited must arrive."""

    def __init__(self) -> None:
        self.arrived = 0
        self.expected = 0
        self.generation = 0
        self.waiters: list[Any] = []

    def describe(self) -> str:
        """State in words."""
        return f"cluster barrier: {self.arrived} of {self.expected} threads arrived, round {self.generation}"

    def arrive(self, threads: int) -> None:
        """Add threads."""
        self.arrived += threads
        self.check()

    def leave(self, threads: int) -> None:
        """Threads exited: they count as arrived from now on."""
        self.expected -= threads
        if self.arrived:
            self.check()

    def check(self) -> None:
        """End the round if all have arrived."""
        if self.arrived >= self.expected:
            self.arrived = 0
            self.generation += 1
            waiters, self.waiters = self.waiters, []
            for warp in waiters:
                warp.wake()
