"""Call compiled kernels: load a library once a process, hand it torch tensors on the current stream.

Only the standard library, torch and tvm_ffi are imported, so that this file also works where an exported
folder is measured. A kernel library is called directly as a TVM-FFI function: it takes the tensors' memory
and the current stream of their device, and launches, so a call can be captured in a CUDA graph. Callers in a
hurry keep what :func:`load_kernel` gives; :func:`launch` adds checks. With ``emulate=True`` CPU tensors take
the same path into the emulator instead of a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

try:
    from fa4tune.errors import LaunchError
except ImportError:  # an exported folder holds this file without the package

    class LaunchError(RuntimeError):  # type: ignore[no-redef]
        """A kernel that cannot be loaded here, or a call that its host function refuses."""


_LOADED: dict[str, Callable[..., None]] = {}
_LOADING = threading.Lock()


class KernelFiles(Protocol):
    """What a call needs of a compiled kernel. ``fa4tune.kernels.compile.CompiledKernel`` is one."""

    @property
    def library_path(self) -> Path | None:
        """The linked library; None where no C compiler could link the object."""

    @property
    def object_path(self) -> Path:
        """The exported object."""

    @property
    def symbol(self) -> str:
        """Name of the host function."""

    @property
    def ptx(self) -> str:
        """PTX of the same compilation; only the emulator reads it."""


def load_library(path: str | Path, symbol: str = "kernel") -> Callable[..., None]:
    """The host function of a kernel library, loaded once a process.

    Args:
        path: ``kernel.so``.
        symbol: exported name.

    Returns:
        A function of the kernel's runtime arguments: torch tensors and numbers, no stream.

    Raises:
        LaunchError: the file is missing, or lacks the CUDA runtime (import a CUDA build of torch).
    """
    key = f"{path}:{symbol}"
    function = _LOADED.get(key)
    if function is None:
        import torch  # noqa: F401  (brings the CUDA runtime that the library needs)
        import tvm_ffi

        with _LOADING:
            function = _LOADED.get(key)
            if function is None:
                try:
                    function = tvm_ffi.load_module(str(path))[symbol]
                except (RuntimeError, AttributeError, OSError) as error:
                    raise LaunchError(f"kernel library {path} cannot be loaded: {error}") from None
                _LOADED[key] = function
    return function


def load_kernel(kernel: KernelFiles) -> Callable[..., None]:
    """The host function of a compiled kernel, loaded once a process.

    Where no C compiler linked a library, the object is loaded through the kernel compiler's own runtime,
    which must then be installed.

    Raises:
        LaunchError: it cannot be loaded.
    """
    if kernel.library_path is not None:
        return load_library(kernel.library_path, kernel.symbol)
    key = f"{kernel.object_path}:{kernel.symbol}"
    function = _LOADED.get(key)
    if function is None:
        try:
            from cutlass.cute.runtime import load_module
        except ImportError:
            raise LaunchError(
                f"{kernel.object_path} was not linked, as no C compiler was there, and nvidia-cutlass-dsl, "
                f"which could load it, is not installed; install gcc and compile again"
            ) from None
        with _LOADING:
            module = load_module(str(kernel.object_path), enable_tvm_ffi=True)
            function = _LOADED.setdefault(key, getattr(module, kernel.symbol))
    return function


def launch(kernel: KernelFiles, *args: Any, emulate: bool = False, **emulator_options: Any) -> Any:
    """Run a compiled kernel once.

    Args:
        kernel: the compiled kernel.
        args: runtime arguments in the order of its signature: tensors and numbers, no stream.
        emulate: run the kernel's PTX on the CPU; the tensors must be CPU tensors, which are written in place.
        emulator_options: passed to :func:`fa4tune.emulator.machine.run`.

    Returns:
        None on a GPU; what the emulator returned for each launch, in a list, with ``emulate``.

    Raises:
        LaunchError: CPU tensors without ``emulate`` or CUDA tensors with it, or a refused call.
    """
    devices = {a.device.type for a in args if hasattr(a, "device")}
    if emulate:
        if devices - {"cpu"}:
            found = ", ".join(sorted(devices))
            raise LaunchError(f"emulate=True takes CPU tensors, got {found}; move them first")
        return _emulate(kernel, args, emulator_options)
    if "cpu" in devices:
        raise LaunchError("a kernel call takes CUDA tensors, got CPU; move them or pass emulate=True")
    try:
        return load_kernel(kernel)(*args)
    except (TypeError, ValueError, RuntimeError) as error:
        raise LaunchError(f"the kernel refused the call: {error}") from error


def _emulate(kernel: KernelFiles, args: tuple[Any, ...], options: dict[str, Any]) -> list[Any]:
    from fa4tune.emulator.capture import capture
    from fa4tune.emulator.machine import run

    ptx = kernel.ptx
    names = [a.name for a in getattr(kernel, "signature", ())]
    return [run(ptx, launched, **options) for launched in capture(kernel, args, ptx=ptx, names=names)]
