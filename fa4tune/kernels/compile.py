"""From a kernel class to a compiled kernel, without a GPU: a disk cache and a pool of compiler processes.

The cache holds one folder an object, named by everything that the object depends on, and written under
another name first: readers see a whole folder or none, and of two writers the first one wins. Neither torch
nor cutlass is imported here; compiler processes import them.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fa4tune.errors import CompileError
from fa4tune.kernels.compile_worker import SYMBOL
from fa4tune.kernels.kernel_class import KernelClass
from fa4tune.kernels.machine_code import ResourceUsage
from fa4tune.kernels.toolchain import (
    c_compiler,
    cache_dir,
    cuda_flavour,
    digest,
    dsl_version,
    link_kernel,
    runtime_archive,
    runtime_shim,
    source_hash,
)

LAYOUT = "1"
"""Version of the cache's folder layout and of the compile options."""

TIMEOUT_SECONDS = 180.0
"""Time after which a compiler is taken to hang; an attention kernel takes a few seconds."""

KERNELS_PER_PROCESS = 64
"""Kernels after which a compiler process is replaced: it keeps what it compiled."""


@dataclass(frozen=True, slots=True)
class Argument:
    """A runtime argument of the host function: ``bfloat16[4]`` is a rank-4 tensor, ``float32`` a scalar."""

    name: str
    type: str


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """A kernel on disk.

    Args:
        kernel_class: what it was compiled for.
        key: content address in the cache.
        folder: holds ``kernel.o``, ``kernel.ptx``, ``kernel.cubin``, ``kernel.json`` and, where a C compiler
            was there, ``kernel.so``.
        symbol: name of the host function in object and library.
        signature: runtime arguments in order, without the stream.
        resources: registers, spills and stack by entry.
        seconds, cpu_seconds: wall and CPU time of compiling, linking and reading the machine code, when it
            was built; without importing the compiler.
        flavour, dsl_version: CUDA flavour and version of the compiler.
    """

    kernel_class: KernelClass
    key: str
    folder: Path
    symbol: str
    signature: tuple[Argument, ...]
    resources: tuple[ResourceUsage, ...]
    seconds: float
    cpu_seconds: float
    flavour: str
    dsl_version: str

    @property
    def object_path(self) -> Path:
        """The exported object file."""
        return self.folder / "kernel.o"

    @property
    def library_path(self) -> Path | None:
        """The library that runs without a compiler, or None where no C compiler could link it."""
        path = self.folder / "kernel.so"
        return path if path.exists() else None

    @property
    def ptx(self) -> str:
        """PTX of this very compilation."""
        return (self.folder / "kernel.ptx").read_text()

    @property
    def cubin(self) -> bytes:
        """Machine code."""
        return (self.folder / "kernel.cubin").read_bytes()

    @property
    def registers(self) -> int:
        """Largest count of registers a thread at launch."""
        return max(r.registers for r in self.resources)

    @property
    def spill_bytes(self) -> int:
        """Bytes that spills move, of all entries; 0 when nothing spilled."""
        return sum(r.spill_bytes for r in self.resources)


def object_key(kernel_class: KernelClass, module: str | None = None) -> str:
    """Content address of a class's object: class, sources, kernel version, compiler, flavour, linked runtime.

    Raises:
        CompileError: the compiler is not installed, or the kernel module does not exist.
    """
    return digest(
        LAYOUT,
        str(kernel_class),
        str(kernel_class.version),
        source_hash(module or kernel_class.module),
        dsl_version(),
        cuda_flavour(),
        runtime_shim(),
        runtime_archive().read_bytes(),
    )


def cached_kernel(kernel_class: KernelClass, module: str | None = None) -> CompiledKernel | None:
    """The class's object if the cache has it."""
    key = object_key(kernel_class, module)
    return _read(cache_dir("objects") / key, kernel_class, key)


def compile_kernel(
    kernel_class: KernelClass, *, module: str | None = None, timeout: float = TIMEOUT_SECONDS
) -> CompiledKernel:
    """The compiled kernel of a class, from the cache or compiled now in a process of its own.

    Args:
        kernel_class: what to compile.
        module: module with ``build(problem, config)``; default the family's.
        timeout: seconds after which the compiler is ended.

    Raises:
        CompileError: the compiler failed, crashed or ran out of time.
    """
    found = cached_kernel(kernel_class, module)
    if found is not None:
        return found
    with CompilePool(1, timeout=timeout) as pool:
        return pool.submit(kernel_class, module).result()


def compile_many(
    kernel_classes: Iterable[KernelClass],
    *,
    workers: int | None = None,
    module: str | None = None,
    timeout: float = TIMEOUT_SECONDS,
) -> Iterator[tuple[KernelClass, CompiledKernel | CompileError]]:
    """Compile classes in parallel; yields each with its kernel, or with the error, as they finish.

    Args:
        kernel_classes: what to compile; equal ones are compiled once and yielded once.
        workers: compiler processes; default one a CPU that this process may use.
        module: as in :func:`compile_kernel`.
        timeout: seconds for each kernel.
    """
    with CompilePool(workers, timeout=timeout) as pool:
        waiting = {pool.submit(c, module): c for c in dict.fromkeys(kernel_classes)}
        try:
            while waiting:
                done, _ = wait(waiting, return_when=FIRST_COMPLETED)
                for future in done:
                    kernel_class = waiting.pop(future)
                    error = future.exception()
                    if error is None:
                        yield kernel_class, future.result()
                    elif isinstance(error, CompileError):
                        yield kernel_class, error
                    else:
                        raise error
        finally:
            for future in waiting:
                future.cancel()


class CompilePool:
    """Compiler processes that serve :meth:`submit`. A context manager; leaving it ends them.

    Args:
        workers: processes at most; default one a CPU that this process may use. They start when needed.
        timeout: seconds for one kernel.
    """

    def __init__(self, workers: int | None = None, *, timeout: float = TIMEOUT_SECONDS) -> None:
        count = workers or len(os.sched_getaffinity(0))
        self._timeout = timeout
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="fa4tune-compile")
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()
        self._lock = threading.Lock()
        self._closed = False

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what has not started and end the processes, busy ones too."""
        with self._lock:
            self._closed = True
            processes = list(self._all)
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.end()
        self._threads.shutdown(wait=True)

    def submit(self, kernel_class: KernelClass, module: str | None = None) -> Future[CompiledKernel]:
        """Compile in the background; the future gives the kernel or raises :class:`CompileError`."""
        return self._threads.submit(self._compile, kernel_class, module or kernel_class.module)

    def _compile(self, kernel_class: KernelClass, module: str) -> CompiledKernel:
        key = object_key(kernel_class, module)
        objects = cache_dir("objects")
        found = _read(objects / key, kernel_class, key)
        if found is not None:
            return found
        folder = Path(tempfile.mkdtemp(prefix=f".{key}.", dir=objects))
        folder.chmod(0o755)  # a cache may be shared
        try:
            answer = self._ask(
                {
                    "kernel_class": kernel_class.as_dict(),
                    "module": module,
                    "source_hash": source_hash(module),
                    "folder": str(folder),
                    "timeout": self._timeout,
                }
            )
            if "error" in answer:
                raise CompileError(f"{kernel_class} did not compile: {answer['error']}")
            kernel = CompiledKernel(
                kernel_class,
                key,
                objects / key,
                SYMBOL,
                tuple(Argument(*pair) for pair in answer["signature"]),
                tuple(ResourceUsage(**fields) for fields in answer["resources"]),
                answer["seconds"],
                answer["cpu_seconds"],
                cuda_flavour(),
                dsl_version(),
            )
            _write(kernel, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return kernel

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            if self._closed:
                raise CompileError("the compile pool was closed")
            process = self._idle.pop() if self._idle else _Process()
            self._all.add(process)
        try:
            answer = process.ask(request)
        except BaseException:
            self._drop(process)
            raise
        if process.served >= KERNELS_PER_PROCESS:
            self._drop(process)
        else:
            with self._lock:
                self._idle.append(process)
        return answer

    def _drop(self, process: _Process) -> None:
        process.end()
        with self._lock:
            self._all.discard(process)


class _Process:
    """One compiler process."""

    def __init__(self) -> None:
        self.served = 0
        self._words = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the process)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        self._child = subprocess.Popen(
            [sys.executable, "-m", "fa4tune.kernels.compile_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            text=True,
            env=environment,
            # Ctrl-C is the caller's to handle; its end closes stdin, which ends this process
            start_new_session=True,
        )

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and wait for the answer.

        Raises:
            CompileError: the process died; the message says of what.
        """
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        try:
            self._child.stdin.write(json.dumps(request) + "\n")
            self._child.stdin.flush()
            line = self._child.stdout.readline()
        except (BrokenPipeError, ValueError):
            line = ""
        if not line:
            raise CompileError(self._last_words(request))
        self.served += 1
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_words(self, request: dict[str, Any]) -> str:
        code = self._child.wait()
        subject = KernelClass.from_dict(request["kernel_class"])
        if code == -signal.SIGALRM:
            return f"{subject} did not compile within {request['timeout']:g} s; raise the timeout"
        self._words.seek(max(0, self._words.seek(0, os.SEEK_END) - 600))
        words = self._words.read().decode(errors="replace").strip()
        cause = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        return f"{subject} ended its compiler process with {cause}{': ' + words if words else ''}"

    def end(self) -> None:
        """End the process, busy or not."""
        if self._child.poll() is None:
            self._child.kill()
        self._child.wait()
        for stream in (self._child.stdin, self._child.stdout):
            if stream is not None:
                try:
                    stream.close()
                except (BrokenPipeError, ValueError):
                    continue
        self._words.close()


def _write(kernel: CompiledKernel, folder: Path) -> None:
    """Put a finished folder in its place, unless another writer was first."""
    record = {
        "kernel_class": kernel.kernel_class.as_dict(),
        "symbol": kernel.symbol,
        "signature": [[a.name, a.type] for a in kernel.signature],
        "resources": [asdict(r) for r in kernel.resources],
        "seconds": kernel.seconds,
        "cpu_seconds": kernel.cpu_seconds,
        "flavour": kernel.flavour,
        "dsl_version": kernel.dsl_version,
    }
    (folder / "kernel.json").write_text(json.dumps(record, indent=1))
    try:
        os.rename(folder, kernel.folder)
    except OSError:
        if _read(kernel.folder, kernel.kernel_class, kernel.key) is None:
            # what is there is damaged: move it away and try again
            shutil.rmtree(kernel.folder, ignore_errors=True)
            os.rename(folder, kernel.folder)


def _read(folder: Path, kernel_class: KernelClass, key: str) -> CompiledKernel | None:
    """The kernel in ``folder``, or None where there is none or a damaged one."""
    try:
        record = json.loads((folder / "kernel.json").read_text())
        kernel = CompiledKernel(
            kernel_class,
            key,
            folder,
            record["symbol"],
            tuple(Argument(*pair) for pair in record["signature"]),
            tuple(ResourceUsage(**fields) for fields in record["resources"]),
            record["seconds"],
            record["cpu_seconds"],
            record["flavour"],
            record["dsl_version"],
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    needed = (kernel.object_path, folder / "kernel.ptx", folder / "kernel.cubin")
    if not all(path.is_file() and path.stat().st_size for path in needed):
        return None
    if kernel.library_path is None and c_compiler() is not None:
        # compiled where no C compiler was
        link_kernel(kernel.object_path, folder / "kernel.so")
    return kernel
