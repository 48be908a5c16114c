"""Small host functions whose launches are known by construction."""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

THREADS = 128
TILE = (64, 32)


@cute.kernel
def scale(source: cute.Tensor, target: cute.Tensor, factor: Float32):
    index = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    if index < cute.size(source):
        target[index] = source[index] * factor


@cute.kernel
def negate(target: cute.Tensor):
    index = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    if index < cute.size(target):
        target[index] = -target[index]


@cute.jit
def scale_and_negate(
    source: cute.Tensor, target: cute.Tensor, factor: Float32, sm_count: Int32, stream: cuda.CUstream
):
    """Two launches: a CTA for each THREADS elements, then ``sm_count`` CTAs in clusters of two."""
    ctas = (cute.size(source) + THREADS - 1) // THREADS
    scale(source, target, factor).launch(grid=(ctas, 1, 1), block=(THREADS, 1, 1), stream=stream)
    negate(target).launch(
        grid=(sm_count, 3, 2), block=(THREADS, 1, 1), cluster=(2, 1, 1), smem=4096, stream=stream
    )


@cute.kernel
def copy_tile(
    load: cute.CopyAtom,
    coordinates: cute.Tensor,
    target: cute.Tensor,
    layout: cute.Layout,
):
    """TMA-loads tile (0, 0) and writes its first column."""
    smem = cute.arch.alloc_smem(target.element_type, cute.cosize(layout), alignment=128)
    barrier = cute.arch.alloc_smem(cute.Int64, 1)
    thread = cute.arch.thread_idx()[0]
    if thread == 0:
        cute.arch.mbarrier_init(barrier, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.barrier()
    tile = cute.make_tensor(smem, layout)
    source = cute.local_tile(coordinates, TILE, (0, 0))
    smem_part, global_part = cpasync.tma_partition(
        load, 0, cute.make_layout(1), cute.group_modes(tile, 0, 2), cute.group_modes(source, 0, 2)
    )
    if thread < 32:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, TILE[0] * TILE[1] * 2)
        cute.copy(load, global_part, smem_part, tma_bar_ptr=barrier)
    cute.arch.mbarrier_wait(barrier, 0)
    if thread < TILE[0]:
        target[thread] = tile[thread, 0]


@cute.jit
def load_tile(matrix: cute.Tensor, target: cute.Tensor, stream: cuda.CUstream):
    """One CTA; the TMA descriptor of ``matrix`` with boxes of TILE is a kernel parameter."""
    layout = cute.make_layout(TILE, stride=(TILE[1], 1))
    load, coordinates = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), matrix, layout, TILE)
    copy_tile(load, coordinates, target, layout).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)
