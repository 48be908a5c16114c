"""Run a CuTe DSL kernel under the emulator's checks, in tests and without a GPU.

Example::

    from fa4tune.testing import assert_clean, compile_host

    compiled = compile_host(host, *fake_arguments, arch="sm_90a")
    assert_clean(compiled, source, target, 2.0)

``docs/sanitizer.md`` has a whole kernel, and says what is checked.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fa4tune.emulator.findings import Finding
    from fa4tune.emulator.machine import Result


@dataclass(frozen=True, slots=True)
class Report:
    """What a checked call gave.

    Args:
        results: one of each launch, in order; those after a launch that did not complete are missing.
        late: the seed of the run that they are from, None for the eager one.
    """

    late: int | None
    results: list[Result] = field(default_factory=list)

    @property
    def findings(self) -> list[Finding]:
        """Findings of all launches, waived ones included."""
        return [f for r in self.results for f in r.findings]

    @property
    def faults(self) -> list[Finding]:
        """Findings that no waiver covers."""
        return [f for f in self.findings if f.severity != "waived"]

    def __str__(self) -> str:
        mode = "eager" if self.late is None else f"late, seed {self.late}"
        return "\n".join(str(f) for f in self.findings) or f"no findings ({mode})"


def compile_host(host: Any, *arguments: Any, arch: str, stream: bool = True, options: str = "") -> Any:
    """Compile a ``cute.jit`` host function so that it can be checked, with line information.

    Args:
        host: takes ``arguments`` and, with ``stream``, a CUDA stream last.
        arguments: as ``cute.compile`` takes them: fake tensors stand for real ones.
        arch: ``sm_90a`` or ``sm_100a``.
        options: further compile options.
    """
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream

    tail = (make_fake_stream(use_tvm_ffi_env_stream=True),) if stream else ()
    with tempfile.TemporaryDirectory(prefix="fa4tune-ptx-") as folder:
        flags = f"--enable-tvm-ffi --gpu-arch {arch} --keep-ptx --generate-line-info --dump-dir {folder}"
        return cute.compile(host, *arguments, *tail, options=f"{flags} {options}".strip())


def check_kernel(
    compiled: Any,
    *arguments: Any,
    late: int | None = None,
    waivers: Iterable[str] = (),
    ptx: str | None = None,
    names: Sequence[str] = (),
    read_only: Sequence[str] = (),
    sm_count: int | None = None,
) -> Report:
    """Call a compiled host function on CPU tensors under the checks; they hold its results afterwards.

    Args:
        compiled: result of :func:`compile_host`, or whatever
            :func:`fa4tune.emulator.capture.capture` takes, ``ptx``, ``names``, ``read_only`` and ``sm_count``
            likewise. A smaller ``sm_count`` makes a persistent kernel do several tiles a CTA.
        arguments: the runtime arguments without the stream; tensors on the CPU.
        late: seed of a random schedule; None for the plain one.
        waivers: names of :data:`fa4tune.emulator.checks.WAIVERS`.

    Raises:
        EmulationError: PTX that the emulator does not model, or arguments that the host function refuses.
    """
    from fa4tune.emulator.capture import capture, kernel_ptx
    from fa4tune.emulator.machine import run

    text = kernel_ptx(compiled) if ptx is None else ptx
    report = Report(late)
    launches = capture(compiled, arguments, ptx=text, names=names, read_only=read_only, sm_count=sm_count)
    for launch in launches:
        result = run(text, launch, check=True, late=late, waivers=waivers)
        report.results.append(result)
        if not result.completed:
            break
    return report


def assert_clean(
    compiled: Any, *arguments: Any, seeds: Iterable[int] = (0, 1), **options: Any
) -> list[Report]:
    """Fail unless a kernel runs without a finding, in the plain schedule and in random ones.

    Args:
        compiled, arguments, options: as :func:`check_kernel` takes them. Tensors must bear being used again:
            a kernel that reads its own output is checked with ``seeds=()``.
        seeds: of the random schedules.

    Returns:
        the reports, whose findings are all waived.

    Raises:
        AssertionError: with every finding.
    """
    reports = []
    for late in (None, *seeds):
        report = check_kernel(compiled, *arguments, late=late, **options)
        reports.append(report)
        if report.faults:
            raise AssertionError(f"{len(report.faults)} findings of the emulator's checks\n{report}")
    return reports
