"""A host function whose kernel has a race if asked for."""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Constexpr, Float32

THREADS = 128


@cute.kernel
def rotate(source: cute.Tensor, target: cute.Tensor, synchronise: Constexpr[bool]):
    """Hand each element to the thread 32 further on."""
    tile = cute.make_tensor(cute.arch.alloc_smem(Float32, THREADS), cute.make_layout(THREADS))
    thread = cute.arch.thread_idx()[0]
    tile[thread] = source[thread]
    if synchronise:
        cute.arch.barrier()
    target[thread] = tile[(thread + 32) % THREADS]


@cute.jit
def host(source: cute.Tensor, target: cute.Tensor, synchronise: Constexpr[bool], stream: cuda.CUstream):
    """One CTA."""
    rotate(source, target, synchronise).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)
