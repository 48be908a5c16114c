"""The compiler's process: reads one request a line on stdin, compiles, answers one line on stdout.

It runs apart from the caller because the compiler may crash or hang, and lives on because importing it takes
about a second. A request that exceeds its time ends the process through SIGALRM, whatever the compiler does.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import signal
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fa4tune.errors import Fa4tuneError
from fa4tune.kernels.kernel_class import KernelClass
from fa4tune.kernels.machine_code import resource_usage
from fa4tune.kernels.toolchain import c_compiler, link_kernel, source_hash

SYMBOL = "kernel"
"""Name that every object exports its host function under."""


def compile_to(kernel_class: KernelClass, module: str, folder: Path) -> dict[str, Any]:
    """Compile one class into ``folder``: ``kernel.o``, ``.ptx``, ``.cubin`` and, with a C compiler, ``.so``.

    Returns:
        Signature, resource usage and seconds as JSON values.
    """
    import cutlass.cute as cute

    kernel_module = importlib.import_module(module)
    started, cpu_started = time.perf_counter(), _cpu_seconds()
    host, arguments = kernel_module.build(kernel_class.representative(), kernel_class.config)
    dump = folder / "dump"
    dump.mkdir()
    compiled = cute.compile(
        host,
        *arguments,
        options=f"--enable-tvm-ffi --gpu-arch {kernel_class.arch} --keep-ptx --keep-cubin --dump-dir {dump}",
    )
    # Dump files are named after argument types only; these were read when this compilation ended.
    ptx, cubin = compiled.artifacts.PTX, compiled.artifacts.CUBIN
    for file in dump.iterdir():
        file.unlink()
    dump.rmdir()
    (folder / "kernel.ptx").write_text(ptx)
    (folder / "kernel.cubin").write_bytes(cubin)
    compiled.export_to_c(object_file_path=str(folder / "kernel.o"), function_name=SYMBOL)
    if c_compiler() is not None:
        link_kernel(folder / "kernel.o", folder / "kernel.so")
    usage = resource_usage(cubin)
    return {
        "signature": _signature(host, arguments),
        "resources": [asdict(u) for u in usage],
        "seconds": time.perf_counter() - started,
        "cpu_seconds": _cpu_seconds() - cpu_started,
    }


def _cpu_seconds() -> float:
    """CPU time of this process and of the programs that it ran and that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _signature(host: Any, arguments: Any) -> list[list[str]]:
    """Name and type of each runtime argument; the stream comes from the TVM-FFI environment."""
    function = host if inspect.isroutine(host) else type(host).__call__
    names = [name for name in inspect.signature(function).parameters if name != "self"]
    pairs = []
    for name, argument in zip(names, arguments, strict=True):
        element = getattr(argument, "element_type", None)
        if element is not None:
            pairs.append([name, f"{element.__name__.lower()}[{len(argument.shape)}]"])
        elif not type(argument).__name__.endswith("Stream"):
            pairs.append([name, type(argument).__name__.lower()])
    return pairs


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    if source_hash(request["module"]) != request["source_hash"]:
        return {"error": f"the source of {request['module']} changed while this process ran; start again"}
    kernel_class = KernelClass.from_dict(request["kernel_class"])
    try:
        importlib.import_module(request["module"])  # not on the kernel's time
        signal.setitimer(signal.ITIMER_REAL, request["timeout"])
        return compile_to(kernel_class, request["module"], Path(request["folder"]))
    except Fa4tuneError as error:
        return {"error": str(error)}
    except Exception as error:
        # the compiler's messages are long; the last lines say what and where
        trace = "".join(traceback.format_exception(error)).strip().splitlines()
        return {"error": f"{type(error).__name__}: {str(error).strip()[:1500]}", "trace": trace[-12:]}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def main() -> None:
    """Serve requests until stdin closes."""
    # whatever the compiler prints goes to stderr, the protocol keeps stdout
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        answer = _answer(request)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
