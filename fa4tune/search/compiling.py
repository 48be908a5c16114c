"""Compile what was chosen: kernels where it worked, outcomes with reasons where it did not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from fa4tune import __version__
from fa4tune.errors import CompileError
from fa4tune.hardware.gpu import Gpu
from fa4tune.kernels.compile import CompiledKernel, compile_many
from fa4tune.kernels.kernel_class import KernelClass
from fa4tune.kernels.toolchain import cuda_flavour, dsl_version
from fa4tune.outcome import Outcome
from fa4tune.problem import AttentionProblem
from fa4tune.record import Provenance, Trial
from fa4tune.search.candidates import Choice
from fa4tune.table.key import table_key

MAY_SPILL = ("default", "asked", "ablation")
"""Phases whose configs are measured even if their registers spill: someone wants to know their time."""


@dataclass(frozen=True, slots=True)
class Built:
    """A chosen config with its kernel."""

    choice: Choice
    kernel: CompiledKernel


def compile_provenance() -> dict[str, str]:
    """Versions on the compiling side."""
    return {"cuda_flavour": cuda_flavour(), "cutlass_dsl": dsl_version(), "fa4tune": __version__}


def build(
    problem: AttentionProblem,
    gpu: Gpu,
    choices: Sequence[Choice],
    *,
    study: str = "",
    progress: Callable[[int, int], None] | None = None,
) -> tuple[list[Built], list[Trial]]:
    """Compile ``choices`` in parallel processes.

    Returns:
        those that can be measured, in the order given, and a trial for each that did not compile or whose
        registers spill (found in its machine code, before any measurement is spent on it).
    """
    classes = {KernelClass.from_problem(problem, choice.config, gpu.arch): choice for choice in choices}
    kernels: dict[KernelClass, CompiledKernel | CompileError] = {}
    for done, (kernel_class, kernel) in enumerate(compile_many(classes), 1):
        kernels[kernel_class] = kernel
        if progress is not None:
            progress(done, len(classes))
    built, failed = [], []
    key = table_key(problem, gpu)
    provenance = msgspec.convert(compile_provenance(), Provenance)
    for kernel_class, choice in classes.items():
        kernel = kernels[kernel_class]
        if isinstance(kernel, CompileError):
            outcome, reason = Outcome.COMPILE_FAILED, str(kernel)
        elif kernel.spill_bytes and choice.phase not in MAY_SPILL:
            outcome, reason = Outcome.SPILLED, f"spills {kernel.spill_bytes} bytes of registers a thread"
        else:
            built.append(Built(choice, kernel))
            continue
        failed.append(
            Trial(
                problem=str(problem),
                kernel_class=kernel_class.name,
                kernel_version=kernel_class.version,
                config=choice.config.as_dict(),
                hardware_key=key.hardware,
                outcome=outcome,
                reason=reason,
                predicted_us=choice.predicted_us,
                resources={} if isinstance(kernel, CompileError) else resources_of(kernel),
                provenance=provenance,
                phase=choice.phase,
                study=study,
            )
        )
    return built, failed


def resources_of(kernel: CompiledKernel) -> dict[str, int]:
    """Registers and spills from the machine code, as trial records hold them."""
    return {"registers": kernel.registers, "spill_bytes": kernel.spill_bytes}
