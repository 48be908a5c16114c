"""Work that runs beside the warps: copies, tensor-core operations, groups of bulk stores.

Eagerly, an operation is performed when it is issued (tensor-core operations when they are committed). In late
mode it is queued and performed only when the synchronisation demands it: when its group is waited for, or
when no warp can run any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fa4tune.emulator.barriers import MBarrier
from fa4tune.emulator.ptx import Instruction

if TYPE_CHECKING:
    import random


@dataclass(slots=True)
class Pending:
    """An issued operation: what it does, the mbarriers it signals, and where it came from."""

    run: Callable[[], None]
    barriers: tuple[MBarrier, ...]
    what: str
    instruction: Instruction
    warp: Any

    def describe(self) -> str:
        """For a deadlock's report."""
        return f"{self.what} issued at PTX line {self.instruction.line} by {self.warp.label}"


class AsyncUnits:
    """The asynchronous units of one cluster.

    Args:
        late: queue work until the synchronisation demands it. Where ``random`` is set (by the checks), half
            of the copies land at once nevertheless: vector clocks find a missing wait at any timing, but the
            ways that a kernel takes where it only looks at a barrier depend on it.
    """

    def __init__(self, late: bool) -> None:
        self.late = late
        self.random: random.Random | None = None
        self.copies: list[Pending] = []
        self.tensor: dict[int, deque[Pending]] = {}

    def issue_copy(self, operation: Pending) -> None:
        """A copy whose completion an mbarrier signals; copies are not ordered among each other."""
        if self.late and (self.random is None or self.random.random() < 0.5):
            self.copies.append(operation)
        else:
            perform(operation)

    def issue_tensor(self, rank: int, operation: Pending, commit: bool) -> None:
        """A tensor-core operation of CTA ``rank``: performed in order of issue, at the latest by a commit."""
        queue = self.tensor.setdefault(rank, deque())
        queue.append(operation)
        if commit and not self.late:
            while queue:
                perform(queue.popleft())

    def force(self, random: random.Random) -> bool:
        """Perform some pending work, what somebody waits for if there is such; False if there is none."""
        wanted = [c for c in self.copies if any(b.waiters for b in c.barriers)]
        queues = [q for q in self.tensor.values() if q]
        wanted_queues = [q for q in queues if any(b.waiters for op in q for b in op.barriers)]
        choices: list[Any] = [*wanted, *wanted_queues] or [*self.copies, *queues]
        if not choices:
            return False
        choice = random.choice(choices)
        if isinstance(choice, deque):
            while choice:  # up to and including the next commit
                operation = choice.popleft()
                perform(operation)
                if operation.barriers:
                    break
        else:
            self.copies.remove(choice)
            perform(choice)
        return True

    def pending(self) -> list[Pending]:
        """Everything that has not been performed."""
        return [*self.copies, *(op for q in self.tensor.values() for op in q)]


def perform(operation: Pending) -> None:
    """Run one operation, noting who issued it in whatever it raises."""
    machine = operation.warp.machine
    machine.progress += 1
    outer, machine.current = machine.current, (operation.instruction, operation.warp)
    operation.run()
    machine.current = outer
