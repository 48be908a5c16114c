"""What the emulator reports: findings, and the exception that carries one out of the machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fa4tune.errors import EmulationError


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong with a kernel or a launch.

    Args:
        kind: short name, such as ``deadlock`` or ``out-of-bounds``.
        message: one sentence with the numbers that matter.
        severity: ``error`` or ``warning``.
        line: PTX line, 0 where the finding belongs to no instruction.
        text: PTX text of that line.
        where: CTA and warp, such as ``cta (0, 0, 0) rank 0 warp 12``.
        source: source file and line where the PTX has line information.
        details: further lines (every blocked warp, the state of every barrier).
    """

    kind: str
    message: str
    severity: str = "error"
    line: int = 0
    text: str = ""
    where: str = ""
    source: str = ""
    details: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict, compare=False)

    def __str__(self) -> str:
        place = f" at PTX line {self.line} `{self.text}`" if self.line else ""
        source = f" ({self.source})" if self.source else ""
        who = f" [{self.where}]" if self.where else ""
        lines = "".join(f"\n  {d}" for d in self.details)
        return f"{self.severity}: {self.kind}: {self.message}{place}{source}{who}{lines}"


class FaultError(EmulationError):
    """Execution cannot go on; becomes a :class:`Finding` with the instruction that raised it."""

    def __init__(self, kind: str, message: str, details: tuple[str, ...] = ()) -> None:
        self.kind = kind
        self.details = details
        super().__init__(message)
