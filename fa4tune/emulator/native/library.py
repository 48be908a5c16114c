"""The C runtime as a shared library, compiled once for a machine and kept in the cache directory."""

from __future__ import annotations

import ctypes
import platform
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from fa4tune.emulator.native import layout
from fa4tune.errors import CompileError, EmulationError
from fa4tune.kernels.toolchain import c_compiler, cache_dir, digest, link_shared

SOURCES = ("kernels.c", "sync.c", "memory.c", "tensor.c", "copies.c")
OPTIONS = (
    "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-lm",
)  # fmt: skip
#: Where the compiler would choose narrower vectors.
WIDE = "-mprefer-vector-width=512"


@cache
def _processor() -> str:
    """What ``-march=native`` depends on."""
    import llvmlite.binding as llvm

    features = sorted(name for name, on in llvm.get_host_cpu_features().items() if on)
    return f"{platform.machine()} {llvm.get_host_cpu_name()} {' '.join(features)}"


@cache
def library() -> ctypes.CDLL:
    """The runtime, compiled on first use.

    Raises:
        EmulationError: there is no C compiler, or the structs do not match ``layout.py``.
    """
    folder = resources.files("fa4tune.emulator.native")
    texts = [folder.joinpath(name).read_text() for name in ("runtime.h", *SOURCES)]
    compiler = c_compiler() or ""
    options = [*OPTIONS, WIDE] if "avx512f" in _processor() else [*OPTIONS]
    path = cache_dir("emulator") / f"{digest(compiler, _processor(), *options, *texts)}.so"
    if not path.exists():
        try:
            with resources.as_file(folder) as here:
                link_shared([Path(here) / name for name in SOURCES], path, options)
        except CompileError as error:
            raise EmulationError(f"the emulator's native runtime cannot be compiled: {error}") from None
    found = ctypes.CDLL(str(path))
    _declare(found)
    sizes = (ctypes.c_int64 * len(layout.STRUCTS))()
    found.fa_sizes(sizes)
    for struct, size in zip(layout.STRUCTS, sizes, strict=True):
        if ctypes.sizeof(struct) != size:
            raise EmulationError(
                f"{struct.__name__} has {ctypes.sizeof(struct)} bytes in Python and {size} in C"
            )
    return found


def _declare(found: Any) -> None:
    pointer, i32 = ctypes.c_void_p, ctypes.c_int32
    signatures: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "fa_sizes": (None, (pointer,)),
        "fa_push_ready": (None, (pointer, i32)),
        "fa_pop_ready": (i32, (pointer,)),
        "fa_wake": (None, (pointer, i32)),
        "fa_run_ready": (i32, (pointer, i32, i32)),
        "fa_free_operands": (None, (pointer,)),
        "fa_new_mbarrier": (i32, (pointer, i32, i32)),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
