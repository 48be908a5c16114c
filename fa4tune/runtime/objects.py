"""Find the compiled object of a kernel class: carried along, in the cache, or compiled now.

A directory named by ``FA4TUNE_OBJECTS`` holds objects that :func:`fa4tune.prepare` collected; with it a host
without the kernel compiler runs tuned kernels.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from fa4tune.errors import CompileError, LaunchError
from fa4tune.kernels.kernel_class import KernelClass

if TYPE_CHECKING:
    from fa4tune.kernels.compile import CompiledKernel

RECORD = "kernel.json"
LIBRARY = "kernel.so"


@dataclass(frozen=True, slots=True)
class LoadableKernel:
    """A linked kernel library: its class, symbol and runtime arguments in order."""

    kernel_class: KernelClass
    library: Path
    symbol: str
    arguments: tuple[str, ...]


def jit_allowed() -> bool:
    """Whether a missing object may be compiled; ``FA4TUNE_JIT=0`` forbids it."""
    return os.environ.get("FA4TUNE_JIT", "1").lower() not in ("0", "false", "no", "off")


def carried_objects() -> tuple[LoadableKernel, ...]:
    """Objects in the directory that ``FA4TUNE_OBJECTS`` names, of this version's kernels; read once."""
    directory = os.environ.get("FA4TUNE_OBJECTS")
    return _scan(directory) if directory else ()


@cache
def _scan(directory: str) -> tuple[LoadableKernel, ...]:
    return tuple(_read_all(Path(directory)))


def _read_all(directory: Path) -> Iterator[LoadableKernel]:
    for record_path in sorted(directory.glob(f"*/{RECORD}")):
        library = record_path.with_name(LIBRARY)
        with contextlib.suppress(
            OSError, ValueError, KeyError, TypeError
        ):  # foreign or of other knobs: a miss
            record = json.loads(record_path.read_text())
            kernel_class = KernelClass.from_dict(record["kernel_class"])
            if (
                library.exists()
                and record.get("kernel_version", kernel_class.version) == kernel_class.version
            ):
                names = tuple(name for name, _ in record["signature"])
                yield LoadableKernel(kernel_class, library, record["symbol"], names)


def find_object(kernel_class: KernelClass) -> LoadableKernel | None:
    """The object of ``kernel_class`` if it needs no compiling."""
    for carried in carried_objects():
        if carried.kernel_class == kernel_class:
            return carried
    from fa4tune.kernels.compile import cached_kernel

    try:
        kernel = cached_kernel(kernel_class)
    except CompileError:  # the compiler is not installed here, so this machine has no cache of it either
        return None
    return None if kernel is None else _loadable(kernel)


def alternatives(kernel_class: KernelClass) -> list[LoadableKernel]:
    """Carried objects of the same class with other configs: what to run where the wanted one is missing."""
    return [c for c in carried_objects() if c.kernel_class.with_config(kernel_class.config) == kernel_class]


def compile_object(kernel_class: KernelClass) -> LoadableKernel:
    """Compile ``kernel_class`` now.

    Raises:
        CompileError: the compiler is missing or failed.
        LaunchError: no C compiler could link the object.
    """
    from fa4tune.kernels.compile import compile_kernel

    return _loadable(compile_kernel(kernel_class))


def _loadable(kernel: CompiledKernel) -> LoadableKernel:
    if kernel.library_path is None:
        raise LaunchError(
            f"the object of {kernel.kernel_class.name} is not linked, as no C compiler was found; "
            f"install gcc or name one with CC"
        )
    names = tuple(argument.name for argument in kernel.signature)
    return LoadableKernel(kernel.kernel_class, kernel.library_path, kernel.symbol, names)


def collect(kernels: Sequence[CompiledKernel], directory: Path) -> None:
    """Copy what :func:`carried_objects` needs of compiled kernels to ``directory``.

    Raises:
        LaunchError: a kernel is not linked, or the directory cannot be written.
    """
    for kernel in kernels:
        library = _loadable(kernel).library
        target = directory / kernel.key
        try:
            target.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(library, target / LIBRARY)
            record = {
                "kernel_class": kernel.kernel_class.as_dict(),
                "kernel_version": kernel.kernel_class.version,
                "symbol": kernel.symbol,
                "signature": [[a.name, a.type] for a in kernel.signature],
            }
            (target / RECORD).write_text(json.dumps(record, indent=1) + "\n")
        except OSError as error:
            raise LaunchError(
                f"objects cannot be written to {directory} ({error.strerror or error}); "
                f"give another directory"
            ) from None
