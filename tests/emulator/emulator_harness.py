"""Small PTX kernels: every thread loads its inputs, runs the body, stores its outputs."""

from __future__ import annotations

import re
import struct
from fractions import Fraction

import numpy as np

from fa4tune.emulator.launch import BufferRegion, Launch
from fa4tune.emulator.machine import Result, run

REGISTER = {"u16": "%h", "u32": "%r", "u64": "%d", "f32": "%f", "pred": "%p"}
DTYPE = {"u16": np.uint16, "u32": np.uint32, "u64": np.uint64, "f32": np.float32}
SIZE = {"u16": 2, "u32": 4, "u64": 8, "f32": 4}

HEADER = ".version 9.4\n.target {target}\n.address_size 64\n"


def buffer(name: str, array: np.ndarray, writable: bool = True) -> BufferRegion:
    """A region over an array's own memory."""
    flat = array.reshape(-1).view(np.uint8)
    return BufferRegion(name, array.ctypes.data, array.nbytes, flat, writable)


def kernel(body: str, n_buffers: int, *, target: str = "sm_100a", shared: int = 0, extra: str = "") -> str:
    """An entry ``k`` with pointers to buffers in %b0, %b1, ...; shared memory as ``smem``; tid in %tid."""
    parameters = ",\n".join(f".param .u64 p{i}" for i in range(n_buffers))
    loads = "\n".join(f"ld.param.u64 %b{i}, [p{i}];" for i in range(n_buffers))
    memory = ".extern .shared .align 1024 .b8 smem[];\n" if shared else ""
    return (
        HEADER.format(target=target)
        + memory
        + f".visible .entry k({parameters})\n{{\n"
        + ".reg .pred %p<64>;\n.reg .b16 %h<64>;\n.reg .b32 %r<512>;\n.reg .f32 %f<512>;\n"
        + ".reg .b64 %d<64>;\n.reg .b64 %b<16>;\n.reg .b64 %a<16>;\n.reg .b32 %tid;\n.reg .b64 %off;\n"
        + extra
        + loads
        + f"\nmov.u32 %tid, %tid.x;\n{body}\nret;\n}}\n"
    )


def launch_of(
    arrays: list[np.ndarray],
    *,
    threads: int = 32,
    grid: tuple[int, int, int] = (1, 1, 1),
    cluster: tuple[int, int, int] = (1, 1, 1),
    shared: int = 0,
    parameters: tuple[bytes, ...] = (),
) -> Launch:
    """A launch of :func:`kernel` on arrays."""
    regions = tuple(buffer(f"b{i}", a) for i, a in enumerate(arrays))
    pointers = tuple(struct.pack("<Q", a.ctypes.data) for a in arrays)
    return Launch("k", grid, (threads, 1, 1), cluster, shared, pointers + parameters, regions)


def execute(
    body: str,
    arrays: list[np.ndarray],
    *,
    shared: int = 0,
    target: str = "sm_100a",
    extra: str = "",
    late: int | None = None,
    trace: bool = False,
    counters: bool = False,
    **kw: object,
) -> Result:
    """Run a body over buffers; findings are returned."""
    ptx = kernel(body, len(arrays), target=target, shared=shared, extra=extra)
    launch = launch_of(arrays, shared=shared, **kw)  # type: ignore[arg-type]
    return run(ptx, launch, late=late, trace=trace, counters=counters)


def lanes(
    body: str, inputs: list[tuple[str, np.ndarray]], outputs: list[str], *, target: str = "sm_100a"
) -> list[np.ndarray]:
    """Run ``body`` once a thread over ``inputs`` of any common length.

    The k-th input lies in register ``%x{k}``, the k-th output is taken from ``%y{k}``; types are PTX types.
    """
    n = len(inputs[0][1])
    padded = -(-n // 32) * 32
    arrays = []
    for kind, values in inputs:
        full = np.zeros(padded, DTYPE[kind])
        full[:n] = np.asarray(values).view(DTYPE[kind]) if values.dtype != DTYPE[kind] else values
        arrays.append(full)
    results = [np.zeros(padded, DTYPE[kind]) for kind in outputs]
    declare = "".join(f".reg .{k.replace('u', 'b')} %x{i};\n" for i, (k, _) in enumerate(inputs))
    declare += "".join(f".reg .{k.replace('u', 'b')} %y{i};\n" for i, k in enumerate(outputs))
    text = "mov.u32 %r500, %ctaid.x;\nshl.b32 %r500, %r500, 5;\nadd.s32 %r500, %r500, %tid;\n"
    for i, (kind, _) in enumerate(inputs):
        text += f"mul.wide.u32 %off, %r500, {SIZE[kind]};\nadd.s64 %a0, %b{i}, %off;\n"
        text += f"ld.global.{kind} %x{i}, [%a0];\n"
    text += body + "\n"
    for i, kind in enumerate(outputs):
        text += f"mul.wide.u32 %off, %r500, {SIZE[kind]};\nadd.s64 %a0, %b{len(inputs) + i}, %off;\n"
        text += f"st.global.{kind} [%a0], %y{i};\n"
    result = execute(text, arrays + results, target=target, extra=declare, grid=(padded // 32, 1, 1))
    assert result.completed, [str(f) for f in result.findings]
    return [r[:n] for r in results]


# -- exact rounding, independently of NumPy


def exact(x: float) -> Fraction:
    """A finite float as a fraction."""
    return Fraction(float(x))


def round_to(value: Fraction, mode: str, bits: int = 24, emin: int = -126, emax: int = 127) -> float:
    """Round a fraction to a binary format in mode rn, rz, rm or rp; overflow as IEEE 754 says. Zero is +0."""
    if value == 0:
        return 0.0
    negative = value < 0
    magnitude = -value if negative else value
    exponent = 0
    # the exponent of the magnitude: 2**e <= m < 2**(e+1)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** exponent > magnitude:
        exponent -= 1
    ulp = Fraction(2) ** (max(exponent, emin) - bits + 1)
    quotient = magnitude / ulp
    floor = quotient.numerator // quotient.denominator
    rest = quotient - floor
    up = {
        "rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and floor & 1),
        "rz": False,
        "rm": negative and rest > 0,
        "rp": not negative and rest > 0,
    }[mode]
    result = (floor + bool(up)) * ulp
    largest = (2 - Fraction(2) ** (1 - bits)) * Fraction(2) ** emax
    if result > largest:
        away = mode == "rn" or (mode == "rm" and negative) or (mode == "rp" and not negative)
        out = float("inf") if away else float(largest)
        return -out if negative else out
    return -float(result) if negative else float(result)


def random_floats(n: int, seed: int, spread: int = 40) -> np.ndarray:
    """Float32 of random exponents, with the edge values in front."""
    rng = np.random.default_rng(seed)
    x = np.ldexp(rng.uniform(-2, 2, n), rng.integers(-spread, spread, n)).astype(np.float32)
    edges = np.array(
        [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 2.0**-126, -(2.0**-126), 2.0**-149, 3.4028235e38,
         -3.4028235e38, 1 + 2.0**-23, 0.5, 2.0**24, 127.0, -127.0, -149.5], np.float32,
    )  # fmt: skip
    x[: len(edges)] = edges
    return x


def same_floats(a: np.ndarray, b: np.ndarray, signed_zero: bool = True) -> bool:
    """Bit equality, any NaN equal to any NaN."""
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    nan = np.isnan(a) & np.isnan(b)
    equal = (a.view(np.uint32) == b.view(np.uint32)) if signed_zero else (a == b)
    return bool((nan | equal).all())


def register_list(prefix: str, n: int) -> str:
    """``{%r0, %r1, ...}``."""
    return "{" + ", ".join(f"{prefix}{i}" for i in range(n)) + "}"


def line_of(ptx: str, pattern: str) -> int:
    """The line number of the first match."""
    found = re.search(pattern, ptx)
    assert found is not None
    return ptx[: found.start()].count("\n") + 1
