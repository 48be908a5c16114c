"""Errors that fa4tune raises on purpose.

One root and few subclasses. What is wrong with an argument is also a :class:`ValueError`, so that callers who
know nothing of this package catch it as they expect. Each message is one sentence: what was wrong, the
offending value, what to do.
"""

from __future__ import annotations


class Fa4tuneError(Exception):
    """Root of every error this package raises deliberately."""


class ProblemError(Fa4tuneError, ValueError):
    """A problem (shape, dtype, mask) that cannot be expressed."""


class FileError(Fa4tuneError, ValueError):
    """A file to read or write that cannot be."""


class ConfigError(Fa4tuneError, ValueError):
    """A knob that does not exist for the kernel, or a value outside its range."""


class HardwareError(Fa4tuneError, ValueError):
    """A GPU that is unknown, a hardware file that is malformed, or ``--gpu`` against ``--arch``."""


class InfeasibleError(Fa4tuneError):
    """A config that no plan exists for; ``reasons`` holds every reason, each with its numbers."""

    def __init__(self, subject: str, reasons: tuple[str, ...]) -> None:
        self.subject = subject
        self.reasons = reasons
        super().__init__(f"{subject} cannot run: {'; '.join(reasons)}")


class PlanError(Fa4tuneError):
    """A plan that contradicts itself, such as operations that wait for each other in one iteration."""


class CompileError(Fa4tuneError):
    """The kernel compiler failed; the message holds the config and the compiler's last words."""


class TableError(Fa4tuneError):
    """A tuned-kernel table that cannot be read or written."""


class TablePathError(TableError, ValueError):
    """A directory given as a table that is none, or that cannot be written."""


class SearchError(Fa4tuneError):
    """A search that produced nothing, or a study that does not belong to the request."""


class BundleError(SearchError, ValueError):
    """A directory given as a bundle, as its results or to write one to that cannot serve as such."""


class EmulationError(Fa4tuneError):
    """The emulator met an instruction or a launch that it does not model."""


class LaunchError(Fa4tuneError):
    """A kernel call whose tensors or device cannot be served."""
