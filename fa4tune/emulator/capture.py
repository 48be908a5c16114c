"""Launch capture: run a compiled CuTe DSL host function on CPU tensors and keep what it launches.

The host function decides grid, cluster, shared memory, parameters and TMA descriptors; nothing here repeats
its arithmetic. Its object is linked with a CUDA runtime that launches nothing (``capture_shim.c``) and called
with tensors that claim to be on CUDA device 0 but lie in host memory. Pointers in the captured parameters are
therefore host addresses, and the emulator reads and writes the caller's tensors.
"""

from __future__ import annotations

import ctypes
import os
import re
import tempfile
import threading
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fa4tune.emulator.launch import BufferRegion, Launch
from fa4tune.errors import CompileError, EmulationError
from fa4tune.hardware.gpu import ARCHITECTURES, load_gpu
from fa4tune.kernels.toolchain import c_compiler, cache_dir, digest, link_shared, runtime_archive

_ENTRY = re.compile(r"\.entry\s+(?P<name>[\w$]+)\s*\((?P<parameters>[^)]*)\)")
_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+\d+\s+)?\.(?P<type>[a-z]+\d+)\b[^,\[]*(?:\[(?P<count>\d+)\])?"
)
_TARGET = re.compile(r"^\s*\.target\s+(\w+)", re.MULTILINE)
_EXPORTED = re.compile(rb"\0__tvm_ffi_([A-Za-z0-9]\w*)\0")

_CALLBACK = ctypes.CFUNCTYPE(
    None,
    ctypes.c_char_p,
    ctypes.POINTER(ctypes.c_uint32),
    ctypes.POINTER(ctypes.c_uint32),
    ctypes.POINTER(ctypes.c_uint32),
    ctypes.c_uint64,
    ctypes.POINTER(ctypes.c_void_p),
)

_ONE_CAPTURE = threading.Lock()  # the shim holds one callback a library


def parameter_sizes(ptx: str) -> dict[str, tuple[int, ...]]:
    """Bytes of each parameter of each ``.entry`` of ``ptx``, in order of declaration.

    Raises:
        EmulationError: the text has no ``.entry``.
    """
    sizes = {}
    for entry in _ENTRY.finditer(ptx):
        declarations = _PARAMETER.finditer(entry["parameters"])
        sizes[entry["name"]] = tuple(
            int(p["type"].lstrip("abcdefghijklmnopqrstuvwxyz")) // 8 * int(p["count"] or 1)
            for p in declarations
        )
    if not sizes:
        raise EmulationError("the PTX has no .entry; give the text that the kernel was compiled to")
    return sizes


def capture(
    compiled: Any,
    args: Sequence[Any],
    *,
    ptx: str | None = None,
    names: Sequence[str] = (),
    read_only: Sequence[str] = (),
    sm_count: int | None = None,
) -> list[Launch]:
    """Call a compiled host function and return its kernel launches, in order.

    Args:
        compiled: what ``cute.compile(..., options="--enable-tvm-ffi ...")`` returned, an object with
            ``object_path`` and ``ptx``, or the path of an exported object file.
        args: what the host function takes: scalars and CPU tensors (torch, NumPy, anything with
            ``__dlpack__``), which are not copied. A stream from the TVM-FFI environment is not an argument.
        ptx: PTX of that very compilation. ``None`` takes it from ``compiled``, which a CuTe DSL result holds
            when it was compiled with ``--keep-ptx`` and a dump directory that exists.
        names: a name for each argument, for buffers and messages.
        read_only: names of tensors that the kernel must not write.
        sm_count: SMs that the host function sees when it asks; default the architecture's GPU.

    Raises:
        EmulationError: no PTX, no C compiler, arguments that the host function refuses, or a host function
            that calls more of the CUDA runtime than a launch needs.
    """
    if ptx is None:
        ptx = kernel_ptx(compiled)
    sizes = parameter_sizes(ptx)
    library, module, symbol = _load(_object_bytes(compiled))
    _set_attributes(library, ptx, sm_count)
    labels = [names[i] if i < len(names) else f"arg{i}" for i in range(len(args))]
    regions: list[BufferRegion] = []
    values = []
    for label, value in zip(labels, args, strict=True):
        if hasattr(value, "__dlpack__"):
            tensor, region = _claim_cuda(label, value, label not in read_only)
            value = tensor
            if region is not None:
                regions.append(region)
        values.append(value)
    launches: list[Launch] = []
    buffers = tuple(_merge(regions))
    failure: list[Exception] = []

    def on_launch(name: bytes, grid: Any, block: Any, cluster: Any, smem: int, pointers: Any) -> None:
        try:
            entry = name.decode()
            if entry not in sizes:
                raise EmulationError(
                    f"the host function launches {entry}, which the PTX does not have "
                    f"({', '.join(sizes)}); give the PTX of the same compilation"
                )
            parameters = tuple(ctypes.string_at(pointers[i], n) for i, n in enumerate(sizes[entry]))
            launches.append(
                Launch(
                    entry,
                    grid=_triple(grid),
                    block=_triple(block),
                    cluster=_triple(cluster),
                    smem_bytes=smem,
                    parameters=parameters,
                    buffers=buffers,
                    keep_alive=tuple(args),
                )
            )
        except Exception as error:  # an exception must not cross the C frame
            failure.append(error)

    callback = _CALLBACK(on_launch)
    with _ONE_CAPTURE:
        library.fa4tune_capture_begin(callback)
        try:
            module[symbol](*values)
        except Exception as error:
            problem = library.fa4tune_capture_problem().decode()
            hint = f"; it called {problem}, which a capture does not serve" if problem else ""
            raise EmulationError(f"the host function refused its arguments: {error}{hint}") from error
        finally:
            library.fa4tune_capture_begin(_CALLBACK())
    if failure:
        raise failure[0]
    return launches


def _triple(values: Any) -> tuple[int, int, int]:
    return int(values[0]), int(values[1]), int(values[2])


def kernel_ptx(compiled: Any) -> str:
    """The PTX that a compiled host function holds; an :class:`EmulationError` if it holds none."""
    ptx = getattr(compiled, "ptx", None)
    if ptx is None:
        ptx = getattr(getattr(compiled, "artifacts", None), "PTX", None)
    if not isinstance(ptx, str) or ".entry" not in ptx:
        raise EmulationError(
            "the compiled kernel holds no PTX; compile with --keep-ptx and a dump directory that exists, "
            "or pass ptx="
        )
    return ptx


def _object_bytes(compiled: Any) -> bytes:
    """The exported object. A fixed symbol makes equal kernels equal bytes, so that the link is cached."""
    path = getattr(compiled, "object_path", compiled)
    if isinstance(path, str | os.PathLike):
        return Path(path).read_bytes()
    if not hasattr(compiled, "export_to_c"):
        raise EmulationError(
            f"cannot capture {type(compiled).__name__}; give a cute.compile result or an exported object file"
        )
    with tempfile.TemporaryDirectory(prefix="fa4tune-capture-") as folder:
        target = Path(folder) / "kernel.o"
        try:
            compiled.export_to_c(object_file_path=str(target), function_name="kernel")
        except TypeError:
            raise EmulationError(
                "the kernel was compiled without the TVM-FFI interface; add --enable-tvm-ffi to its options"
            ) from None
        return target.read_bytes()


def _load(data: bytes) -> tuple[ctypes.CDLL, Any, str]:
    exported = sorted(set(_EXPORTED.findall(data)))
    if len(exported) != 1:
        raise EmulationError(
            f"the object exports {len(exported)} TVM-FFI functions, a capture needs one; "
            f"compile with --enable-tvm-ffi"
        )
    return *_load_library(_linked(data)), exported[0].decode()


def _linked(data: bytes) -> Path:
    shim = resources.files("fa4tune.emulator").joinpath("capture_shim.c").read_text()
    archive = runtime_archive()
    folder = cache_dir("capture")
    library = folder / f"{digest(data, shim, archive.read_bytes())}.so"
    if not library.exists():
        if c_compiler() is None:
            raise EmulationError(
                "launch capture links a C file and found no C compiler; install gcc or set CC"
            )
        with tempfile.TemporaryDirectory(prefix="fa4tune-capture-") as scratch:
            source, kernel = Path(scratch) / "capture_shim.c", Path(scratch) / "kernel.o"
            source.write_text(shim)
            kernel.write_bytes(data)
            try:
                link_shared([source, kernel, archive], library, ["-Wl,-Bsymbolic"])
            except CompileError as error:
                raise EmulationError(str(error)) from None
    return library


@cache
def _load_library(path: Path) -> tuple[ctypes.CDLL, Any]:
    import tvm_ffi

    module = tvm_ffi.load_module(str(path))
    library = ctypes.CDLL(str(path))
    library.fa4tune_capture_begin.argtypes = [_CALLBACK]
    library.fa4tune_capture_begin.restype = None
    library.fa4tune_capture_attribute.restype = None
    library.fa4tune_capture_problem.restype = ctypes.c_char_p
    return library, module


def _set_attributes(library: ctypes.CDLL, ptx: str, sm_count: int | None) -> None:
    """Answers to ``cudaDeviceGetAttribute``, by the numbers of ``cudaDeviceAttr``."""
    match = _TARGET.search(ptx)
    target = match[1] if match else ""
    if target not in ARCHITECTURES:
        raise EmulationError(
            f"the PTX is for {target or 'no target'}; the emulator runs {', '.join(ARCHITECTURES)}"
        )
    gpu = load_gpu(ARCHITECTURES[target])
    capability = int(target.removeprefix("sm_").rstrip("af"))
    attributes = {
        1: 1024,  # cudaDevAttrMaxThreadsPerBlock
        2: 1024,  # cudaDevAttrMaxBlockDimX
        3: 1024,  # cudaDevAttrMaxBlockDimY
        4: 64,  # cudaDevAttrMaxBlockDimZ
        5: 2**31 - 1,  # cudaDevAttrMaxGridDimX
        6: 65535,  # cudaDevAttrMaxGridDimY
        7: 65535,  # cudaDevAttrMaxGridDimZ
        8: 48 * 1024,  # cudaDevAttrMaxSharedMemoryPerBlock
        10: 32,  # cudaDevAttrWarpSize
        16: sm_count or gpu.sm_count,  # cudaDevAttrMultiProcessorCount
        39: gpu.threads_per_sm,  # cudaDevAttrMaxThreadsPerMultiProcessor
        75: capability // 10,  # cudaDevAttrComputeCapabilityMajor
        76: capability % 10,  # cudaDevAttrComputeCapabilityMinor
        81: gpu.smem_per_sm,  # cudaDevAttrMaxSharedMemoryPerMultiprocessor
        97: gpu.smem_per_cta,  # cudaDevAttrMaxSharedMemoryPerBlockOptin
    }
    for attribute, value in attributes.items():
        library.fa4tune_capture_attribute(attribute, value)


class _DLTensor(ctypes.Structure):
    """``DLTensor`` of the DLPack header, the first member of ``DLManagedTensor``."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_DL_CPU, _DL_CUDA = 1, 2


def _claim_cuda(name: str, value: Any, writable: bool) -> tuple[Any, BufferRegion | None]:
    """A TVM-FFI tensor over ``value``'s memory that says CUDA device 0, and that memory."""
    import tvm_ffi

    try:
        capsule = value.__dlpack__()
    except (BufferError, RuntimeError, TypeError) as error:
        raise EmulationError(f"{name} cannot be shared through DLPack: {error}") from None
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype = ctypes.c_void_p
    get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    tensor = _DLTensor.from_address(get_pointer(capsule, b"dltensor"))
    if tensor.device_type != _DL_CPU:
        raise EmulationError(f"{name} is not a CPU tensor; the emulator takes host memory")
    tensor.device_type, tensor.device_id = _DL_CUDA, 0
    low, high = 0, 1
    stride = 1
    for i in reversed(range(tensor.ndim)):
        extent = tensor.shape[i]
        step = tensor.strides[i] if tensor.strides else stride
        stride *= extent
        high = 0 if extent == 0 else high
        low += min(0, step * (extent - 1))
        high += max(0, step * (extent - 1)) if high else 0
    region = None
    if high:
        element = tensor.bits * tensor.lanes
        address = (tensor.data or 0) + tensor.byte_offset + low * element // 8
        nbytes = -(-(high - low) * element // 8)
        region = BufferRegion(name, address, nbytes, _memory(address, nbytes), writable)
    return tvm_ffi.from_dlpack(capsule), region


def _merge(regions: Sequence[BufferRegion]) -> Iterator[BufferRegion]:
    """Regions by address, those that overlap joined: q, k and v may be slices of one tensor."""
    group: list[BufferRegion] = []
    for region in sorted(regions, key=lambda r: (r.address, r.nbytes)):
        if group and region.address >= max(r.address + r.nbytes for r in group):
            yield _join(group)
            group = []
        group.append(region)
    if group:
        yield _join(group)


def _join(group: list[BufferRegion]) -> BufferRegion:
    if len(group) == 1:
        return group[0]
    start = group[0].address
    nbytes = max(r.address + r.nbytes for r in group) - start
    names = "+".join(r.name for r in group)
    return BufferRegion(names, start, nbytes, _memory(start, nbytes), any(r.writable for r in group))


def _memory(address: int, nbytes: int) -> NDArray[np.uint8]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
