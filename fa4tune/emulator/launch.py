"""What one kernel launch hands to the machine: the emulator's only input beside the PTX."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class BufferRegion:
    """Global memory that a kernel may touch: exactly the bytes of one argument, or of arguments that overlap.

    Args:
        name: the argument's name; joined by ``+`` where several tensors share memory.
        address: of the first byte, the value a kernel's pointers hold.
        nbytes: size; the first byte that does not belong is ``address + nbytes``.
        array: view of that memory, uint8, one dimension. Writing to it writes the caller's tensor.
        writable: whether a store is legal.
    """

    name: str
    address: int
    nbytes: int
    array: NDArray[np.uint8]
    writable: bool = True


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch as the host function made it.

    Args:
        entry: name of the ``.entry`` in the PTX.
        grid: CTAs along x, y, z.
        block: threads of a CTA along x, y, z.
        cluster: CTAs of a cluster along x, y, z; ``(1, 1, 1)`` without clusters.
        smem_bytes: dynamic shared memory of a CTA.
        parameters: bytes of each kernel parameter, in the order of the PTX declaration. TMA descriptors are
            inside them.
        buffers: memory of the call's tensors, by address. The kernels of one call share them.
        keep_alive: owners of that memory.
    """

    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    smem_bytes: int
    parameters: tuple[bytes, ...]
    buffers: tuple[BufferRegion, ...]
    keep_alive: tuple[object, ...] = field(default=(), compare=False, repr=False)
