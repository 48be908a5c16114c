"""What became of one candidate config: a value, also when it failed."""

from __future__ import annotations

from enum import StrEnum


class Outcome(StrEnum):
    """How a trial ended; the value is what JSON holds.

    Only ``MEASURED`` and ``PREDICTED`` carry a time. Every other outcome carries a reason and stays in the
    results: a config that fails is knowledge that the next search uses.
    """

    MEASURED = "measured"
    PREDICTED = "predicted"
    INFEASIBLE = "infeasible"
    SPILLED = "spilled"
    COMPILE_FAILED = "compile_failed"
    LAUNCH_FAILED = "launch_failed"
    OUT_OF_MEMORY = "out_of_memory"
    INCORRECT = "incorrect"
    HUNG = "hung"
    CRASHED = "crashed"

    @property
    def has_time(self) -> bool:
        """Whether a time belongs to this outcome."""
        return self in (Outcome.MEASURED, Outcome.PREDICTED)
