"""Compile the microbenchmark kernels, and read from their machine code what the measured loop holds."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from fa4tune.errors import CompileError
from fa4tune.kernels.machine_code import listing, resource_usage
from fa4tune.kernels.micro.suite import KernelSpec
from fa4tune.kernels.toolchain import (
    cache_dir,
    cuda_flavour,
    digest,
    dsl_version,
    link_kernel,
    runtime_archive,
    runtime_shim,
    source_hash,
)

SYMBOL = "kernel"

PACKAGE = "fa4tune.kernels.micro"

_LABEL = re.compile(r"^(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);")
_CLOCK = "SR_CLOCKLO"


@dataclass(frozen=True)
class BuiltKernel:
    """A compiled microbenchmark kernel.

    Args:
        name: of its specification.
        library: shared library that runs without the compiler.
        loop: machine instructions of the measured loop, by opcode.
        skipped: those of them that a branch within the loop may jump over.
        registers: a thread.
        spill_bytes: must be 0 for the numbers to mean anything.
    """

    name: str
    library: Path
    loop: dict[str, int]
    skipped: dict[str, int]
    registers: int
    spill_bytes: int

    @property
    def slots(self) -> int:
        """Issue slots of a warp in one iteration that takes every branch."""
        return sum(self.loop.values()) - sum(self.skipped.values())


def measured_loop(cubin: bytes) -> tuple[dict[str, int], dict[str, int]]:
    """The longest loop between the first and the last reading of the clock.

    Returns:
        its instructions by opcode, and the part of them that lies between a branch and its later target.

    Raises:
        CompileError: the clock is not read twice, or there is no loop between.
    """
    code: list[tuple[str, str]] = []
    labels: dict[str, int] = {}
    for line in listing(cubin).splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif found := _INSTRUCTION.match(line):
            code.append((found[1], found[2]))
    readings = [i for i, (_, operands) in enumerate(code) if _CLOCK in operands]
    if len(readings) < 2:
        raise CompileError(f"the kernel reads the clock {len(readings)} times; a measured loop needs two")
    jumps = []
    for index in range(readings[0], readings[-1]):
        opcode, operands = code[index]
        target = re.search(r"\.L_x_\d+", operands) if opcode.startswith("BRA") else None
        if target and target[0] in labels:
            jumps.append((index, labels[target[0]]))
    loops = [(index + 1 - start, start) for index, start in jumps if readings[0] < start <= index]
    if not loops:
        raise CompileError("there is no loop between the two readings of the clock")
    length, start = max(loops)
    inside = range(start, start + length)
    jumped = {i for index, end in jumps if index in inside and end in inside for i in range(index + 1, end)}
    return _count(code, inside), _count(code, sorted(jumped))


def _count(code: list[tuple[str, str]], indexes: Iterable[int]) -> dict[str, int]:
    return dict(Counter(code[i][0] for i in indexes if code[i][0] != "NOP"))


def compile_kernel(spec: KernelSpec, arch: str, folder: Path) -> BuiltKernel:
    """Compile one kernel in this process and link it as ``folder/<name>.so``; also keeps its PTX there.

    Raises:
        CompileError: the compiler or the linker fails.
    """
    import cutlass.cute as cute

    from fa4tune.kernels.micro.base import fake_arguments

    kernel = getattr(importlib.import_module(f"{PACKAGE}.{spec.module}"), spec.class_name)(
        **dict(spec.arguments)
    )
    with tempfile.TemporaryDirectory(prefix="fa4tune-micro-") as scratch:
        options = f"--enable-tvm-ffi --gpu-arch {arch} --keep-ptx --keep-cubin --dump-dir {scratch}"
        try:
            compiled = cute.compile(kernel, *fake_arguments(), options=options)
        except Exception as error:
            words = str(error).strip()[-800:]
            raise CompileError(
                f"microbenchmark kernel {spec.name} did not compile for {arch}: {words}"
            ) from None
        ptx, cubin = compiled.artifacts.PTX, compiled.artifacts.CUBIN
        compiled.export_to_c(object_file_path=f"{scratch}/kernel.o", function_name=SYMBOL)
        library = folder / f"{spec.name}.so"
        link_kernel(Path(scratch) / "kernel.o", library)
    (folder / f"{spec.name}.ptx").write_text(ptx)
    usage = resource_usage(cubin)
    return BuiltKernel(
        spec.name,
        library,
        *measured_loop(cubin),
        max(u.registers for u in usage),
        sum(u.spill_bytes for u in usage),
    )


def build(spec: KernelSpec, arch: str, report: Callable[[str], None] = lambda text: None) -> BuiltKernel:
    """The kernel from the cache, or compiled now.

    Args:
        report: told of each kernel that has to be compiled.

    Raises:
        CompileError: it does not compile.
    """
    key = digest(
        json.dumps(asdict(spec), sort_keys=True),
        arch,
        source_hash(f"{PACKAGE}.{spec.module}"),
        source_hash(f"{PACKAGE}.build"),
        dsl_version(),
        cuda_flavour(),
        runtime_shim(),
        runtime_archive().read_bytes(),
    )
    folder = cache_dir("micro") / key
    found = _read(folder)
    if found is not None:
        return found
    report(spec.name)
    # written under another name first: readers see a whole folder or none
    scratch = Path(tempfile.mkdtemp(prefix=f".{key}.", dir=folder.parent))
    try:
        built = compile_kernel(spec, arch, scratch)
        record = {**asdict(built), "library": built.library.name}
        (scratch / "kernel.json").write_text(json.dumps(record, indent=1))
        shutil.rmtree(folder, ignore_errors=True)
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    found = _read(folder)
    assert found is not None
    return found


def _read(folder: Path) -> BuiltKernel | None:
    try:
        record = json.loads((folder / "kernel.json").read_text())
        built = BuiltKernel(**{**record, "library": folder / record["library"]})
    except (OSError, ValueError, TypeError):
        return None
    return built if built.library.is_file() else None
