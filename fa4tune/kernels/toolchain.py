"""What compiling needs of the machine: the CuTe DSL wheel, a C compiler to link with, a cache directory."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path

from fa4tune.errors import CompileError

COMPILERS = ("cc", "gcc", "clang")
"""C compilers tried in order after the one that ``CC`` names."""


@cache
def cuda_flavour() -> str:
    """``cu13`` or ``cu12``: the newest CUDA flavour of the CuTe DSL wheel that is installed.

    The flavours emit different PTX and machine code, so it belongs to every cache key and to provenance.

    Raises:
        CompileError: the wheel is not installed.
    """
    flavours = [path.parent.name for path in _wheel_root().glob("cu*/lib")]
    if not flavours:
        raise CompileError(
            "nvidia-cutlass-dsl has no CUDA libraries; install nvidia-cutlass-dsl[cu13]==4.8.1 again"
        )
    return max(flavours, key=lambda name: int(name.removeprefix("cu")))


@cache
def _wheel_root() -> Path:
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    if spec is None or not spec.submodule_search_locations:
        raise CompileError(
            "nvidia-cutlass-dsl is not installed; pip install 'nvidia-cutlass-dsl[cu13]==4.8.1'"
        )
    return Path(next(iter(spec.submodule_search_locations)))


def dsl_version() -> str:
    """Version of the CuTe DSL wheel.

    Raises:
        CompileError: the wheel is not installed.
    """
    try:
        return importlib.metadata.version("nvidia-cutlass-dsl")
    except importlib.metadata.PackageNotFoundError:
        raise CompileError(
            "nvidia-cutlass-dsl is not installed; pip install 'nvidia-cutlass-dsl[cu13]==4.8.1'"
        ) from None


def runtime_archive() -> Path:
    """The wheel's static runtime archive: thin wrappers over the public CUDA runtime API."""
    return _wheel_root() / cuda_flavour() / "lib" / "libcuda_dialect_runtime_static.a"


def runtime_library() -> Path:
    """The wheel's dynamic runtime library, which loads an object that no linker made a library of."""
    return _wheel_root() / cuda_flavour() / "lib" / "libcute_dsl_runtime.so"


def c_compiler() -> str | None:
    """Path of a C compiler: the one that ``CC`` names, else the first of :data:`COMPILERS`, or None."""
    for name in (os.environ.get("CC", ""), *COMPILERS):
        found = shutil.which(name) if name else None
        if found:
            return found
    return None


def link_shared(inputs: Sequence[Path], output: Path, options: Sequence[str] = ()) -> None:
    """Compile and link ``inputs`` (C files, objects, archives) to the shared library ``output``, atomically.

    Raises:
        CompileError: there is no C compiler, or it fails; the message holds its last words.
    """
    compiler = c_compiler()
    if compiler is None:
        raise CompileError(
            f"linking {output.name} needs a C compiler and none of {', '.join(COMPILERS)} is on the PATH; "
            f"install gcc or name one with CC"
        )
    temporary = output.with_name(f".{output.name}.{os.getpid()}.{os.urandom(4).hex()}")
    command = [compiler, "-O1", "-fPIC", "-shared", "-o", str(temporary), *map(str, inputs), *options]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CompileError(f"{compiler} could not link {output.name}: {done.stderr.strip()[-800:]}")
        os.replace(temporary, output)
    finally:
        temporary.unlink(missing_ok=True)


@cache
def _directory(root: str | None) -> Path:
    if root:
        wanted = Path(root).expanduser()
    else:
        import platformdirs

        wanted = Path(platformdirs.user_cache_dir("fa4tune"))
    try:
        wanted.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=wanted):
            pass
    except OSError as error:
        fallback = Path(tempfile.mkdtemp(prefix="fa4tune-cache-"))
        warnings.warn(
            f"cache directory {wanted} is not writable ({error.strerror or error}); compiled kernels go to "
            f"{fallback} and are lost with it; set FA4TUNE_CACHE to a writable directory",
            stacklevel=3,
        )
        return fallback
    return wanted


def cache_dir(part: str) -> Path:
    """Directory ``part`` of the cache: below ``FA4TUNE_CACHE`` if set, else below the user's cache directory.

    Where that cannot be written, a temporary directory of this process and one warning that says so.
    """
    path = _directory(os.environ.get("FA4TUNE_CACHE")) / part
    path.mkdir(exist_ok=True)
    return path


def digest(*parts: bytes | str) -> str:
    """Hex key of ``parts``; lengths are part of it, so that moving a byte between parts changes the key."""
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "little"))
        total.update(data)
    return total.hexdigest()[:32]


def link_kernel(kernel: Path, output: Path) -> None:
    """Make a shared library of an exported object that runs where the compiler is not installed.

    It holds the object, the wheel's static archive and the hooks of ``runtime_shim.c``. It names
    ``libcudart.so.13`` (12 for the CUDA 12 flavour) as needed, which torch has loaded already; the TVM-FFI
    symbols come from ``tvm_ffi`` in the process.

    Raises:
        CompileError: there is no C compiler, or it fails.
    """
    with tempfile.TemporaryDirectory(prefix="fa4tune-link-") as scratch:
        shim = Path(scratch) / "runtime_shim.c"
        shim.write_text(runtime_shim())
        # an empty library of that name: the linker only has to note the dependency
        soname = f"libcudart.so.{cuda_flavour().removeprefix('cu')}"
        empty = Path(scratch) / "empty.c"
        empty.write_text("")
        link_shared([empty], Path(scratch) / soname, [f"-Wl,-soname,{soname}"])
        link_shared(
            [kernel, shim, runtime_archive()],
            output,
            ["-Wl,-Bsymbolic", "-Wl,--no-as-needed", f"-L{scratch}", f"-l:{soname}", "-s"],
        )


def runtime_shim() -> str:
    """Source of the hooks that every kernel library contains."""
    return resources.files("fa4tune.kernels").joinpath("runtime_shim.c").read_text()


@cache
def source_hash(module: str) -> str:
    """Hash of a kernel module and of all files of ``fa4tune.kernels`` that it imports, directly or not.

    Computed once a process: what was imported does not change with the file. Each compiler process compares
    its own with the caller's.

    Raises:
        CompileError: the module does not exist.
    """
    seen: dict[str, bytes] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        try:
            spec = importlib.util.find_spec(name)
        except ImportError:
            spec = None
        if spec is None or spec.origin is None:
            if name == module:
                raise CompileError(f"there is no kernel module {module!r}")
            continue  # a name imported from a module, not a module
        data = Path(spec.origin).read_bytes()
        seen[name] = data
        for node in ast.walk(ast.parse(data)):
            if isinstance(node, ast.Import):
                waiting += [a.name for a in node.names if a.name.startswith("fa4tune.kernels")]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fa4tune.kernels"):
                waiting += [str(node.module), *(f"{node.module}.{a.name}" for a in node.names)]
    return digest(*(part for name in sorted(seen) for part in (name, seen[name])))
