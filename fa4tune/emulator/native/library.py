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

SOURCES = (
    "kernels.c", "sync.c", "memory.c", "tensor.c", "copies.c", "checks.c", "checks_shadow.c",
    "checks_tensor.c", "checks_global.c",
)  # fmt: skip
HEADERS = ("runtime.h", "operand.h", "checks.h")
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
    texts = [folder.joinpath(name).read_text() for name in (*HEADERS, *SOURCES)]
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
    pointer, i32, i64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    signatures: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "fa_sizes": (None, (pointer,)),
        "fa_push_ready": (None, (pointer, i32)),
        "fa_pop_ready": (i32, (pointer,)),
        "fa_wake": (None, (pointer, i32)),
        "fa_run_ready": (i32, (pointer, i32, i32)),
        "fa_free_operands": (None, (pointer,)),
        "fa_new_mbarrier": (i32, (pointer, i32, i32)),
        "fg_new": (pointer, (pointer,)),
        "fg_free": (None, (pointer,)),
        "fg_access": (None, (pointer, i32, i32, pointer, *[i32] * 5)),
        "fc_new": (pointer, (pointer, layout.REPORT, pointer, pointer)),
        "fc_free": (None, (pointer,)),
        "fc_size": (i32, (pointer,)),
        "fc_component": (i32, (pointer,)),
        "fc_epoch": (i32, (pointer,)),
        "fc_clock": (pointer, (pointer,)),
        "fc_step": (None, (pointer,)),
        "fc_own_of": (i32, (pointer, i32)),
        "fc_open_group": (i32, (pointer, i32)),
        "fc_close_of": (i32, (pointer, i32)),
        "fc_awaited_of": (None, (pointer, i32, i32)),
        "fc_registers_of": (pointer, (pointer, i32)),
        "fc_record": (i32, (pointer, i32, i32, i32, i32, i32, i32, i32)),
        "fc_reach_number": (None, (pointer, i32, i32)),
        "fc_touch": (None, (pointer, i32, i32, i32)),
        "fc_shared": (None, (pointer, i32, pointer, pointer, i32, i32, i32)),
        "fc_copied": (None, (pointer, i32, pointer, i32, i32, i32)),
        "fc_atomic": (None, (pointer, i32, pointer, i32, i32, i32)),
        "fc_access_list": (i32, (pointer, i32, i32, pointer, *[i32] * 4, pointer, *[i32] * 6)),
        "fc_forget": (None, (pointer, i32, i32, pointer, i32)),
        "fc_fence": (None, (pointer, i32)),
        "fc_tcgen05_fence": (None, (pointer, i32)),
        "fc_tcgen05_wait": (None, (pointer, i32)),
        "fc_assume_loaded": (None, (pointer,)),
        "fc_init": (None, (pointer, i32, pointer, pointer)),
        "fc_inval": (None, (pointer, i32, pointer, pointer)),
        "fc_use": (None, (pointer, i32, pointer, pointer)),
        "fc_arrive": (None, (pointer, i32, pointer, pointer, i32)),
        "fc_wait": (None, (pointer, i32, pointer, pointer)),
        "fc_named_arrive": (None, (pointer, i32, i64)),
        "fc_named_wait": (None, (pointer, i32, i64)),
        "fc_cluster_arrive": (None, (pointer, i32)),
        "fc_cluster_wait": (None, (pointer, i64)),
        "fc_copy_done": (None, (pointer, i32, i32, pointer, pointer, i64, i64, pointer, pointer, i32, i32)),
        "fc_arrived": (None, (pointer, i32, i32, pointer, pointer, pointer, i32, i32)),
        "fc_bulk_read": (None, (pointer, i32, i32, i64, i64, i32, i32)),
        "fc_bulk_commit": (None, (pointer, ctypes.c_uint32)),
        "fc_bulk_wait": (None, (pointer, ctypes.c_uint32, i32)),
        "fc_wgmma_registers": (None, (pointer, i32, i32)),
        "fc_finish": (None, (pointer,)),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
