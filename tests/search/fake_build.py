"""Compiling without a compiler, for searches on the fake backend: times are a formula of the config."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fa4tune.kernels.compile import Argument, CompiledKernel
from fa4tune.kernels.kernel_class import KernelClass
from fa4tune.kernels.machine_code import ResourceUsage
from fa4tune.search.candidates import Choice
from fa4tune.search.compiling import Built


def fake_build(
    problem: Any, gpu: Any, choices: Sequence[Choice], *, study: str = "", progress: Any = None
) -> tuple[list[Built], list[Any]]:
    """As :func:`fa4tune.search.compiling.build`; every config builds."""
    built = []
    for choice in choices:
        folder = Path(tempfile.mkdtemp(prefix="fake-kernel-"))
        (folder / "kernel.so").write_bytes(b"")
        kernel = CompiledKernel(
            kernel_class=KernelClass.from_problem(problem, choice.config, gpu.arch),
            key=folder.name,
            folder=folder,
            symbol="kernel",
            signature=(Argument("mQ", "bfloat16[4]"),),
            resources=(ResourceUsage("kernel", 168, 0, 0, 0, 0, 0),),
            seconds=0.1,
            cpu_seconds=0.1,
            flavour="cu13",
            dsl_version="4.8.1",
        )
        built.append(Built(choice, kernel))
    return built, []
