"""mbarriers, TMA tensors, bulk copies and their groups, eagerly and late."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from fa4tune.emulator import tensor_map
from fa4tune.emulator.machine import Result, run
from tests.emulator.emulator_harness import execute, kernel, launch_of

ELEMENT = {"u1": 0, "u2": 1, "u4": 2, "i4": 3, "f2": 6, "f4": 7, "bf16": 10}
ALL_MODES = [None, 1, 2, 3]


def encode(
    address: int, element: str, sizes: list[int], strides: list[int], box: list[int], swizzle: int
) -> bytes:
    """A tensor map, innermost dimension first; ``strides`` in bytes of dimensions 1 and up."""
    rank = len(sizes)
    words = [0] * 16
    words[0], words[1] = address & 0xFFFFFFFF, address >> 32
    words[2] = (rank - 1) << 4 | ELEMENT[element] << 7 | {0: 0, 32: 1, 64: 2, 128: 3}[swizzle] << 13
    for i, s in enumerate(strides):
        words[3 + i] = s >> 4 & 0xFFFFFFFF
    for i, n in enumerate(sizes):
        words[8 + i] = n - 1
    words[13] = (box[0] - 1) << 24
    words[14] = sum((b - 1) << 8 * i for i, b in enumerate(box[1:]))
    return struct.pack("<16I", *words) + b"\xa5" * 64


def with_map(body: str, arrays: list[np.ndarray], maps: list[bytes], *, late: int | None = None, threads: int = 32,
             shared: int = 8192, cluster: int = 1, trace: bool = False) -> Result:  # fmt: skip
    """Run with tensor maps as 128-byte parameters; their generic addresses in %a8, %a9."""
    ptx = kernel(body, len(arrays), shared=shared)
    extra = "".join(f",\n.param .align 64 .b8 map{i}[128]" for i in range(len(maps)))
    ptx = ptx.replace(")\n{", extra + ")\n{", 1)
    setup = "".join(
        f"mov.b64 %a{8 + i}, map{i};\ncvta.param.u64 %a{8 + i}, %a{8 + i};\n" for i in range(len(maps))
    )
    ptx = ptx.replace("mov.u32 %tid, %tid.x;\n", "mov.u32 %tid, %tid.x;\n" + setup, 1)
    launch = launch_of(
        arrays,
        threads=threads,
        grid=(cluster, 1, 1),
        cluster=(cluster, 1, 1),
        shared=shared,
        parameters=tuple(maps),
    )
    return run(ptx, launch, late=late, trace=trace)


INIT = """
mov.b32 %r0, smem;
add.s32 %r100, %r0, 4096;
elect.sync _|%p1, -1;
@%p1 mbarrier.init.shared.b64 [%r100], 1;
fence.mbarrier_init.release.cluster;
bar.sync 0;
"""

WAIT = """
{
.reg .pred P1;
LAB_WAIT:
mbarrier.try_wait.parity.shared.b64 P1, [%r100], 0, 10000000;
@P1 bra.uni DONE;
bra.uni LAB_WAIT;
DONE:
}
"""

#: 2048 bytes of shared memory to the last buffer.
DUMP = """
shl.b32 %r1, %tid, 4;
add.s32 %r2, %r0, %r1;
mul.wide.u32 %off, %tid, 16;
add.s64 %a0, %b1, %off;
""" + "".join(
    f"ld.shared.v4.b32 {{%r4, %r5, %r6, %r7}}, [%r2+{512 * i}];\nst.global.v4.b32 [%a0+{512 * i}], {{%r4, %r5, %r6, %r7}};\n"
    for i in range(4)
)


def chunk_swizzle(data: bytes, swizzle: int) -> bytes:
    """Move 16-byte chunks as the documented pattern says: the chunk index in a row of 128 bytes is xored with
    the row number modulo 8 (128 bytes), with row-pair bits for 64 and 32 bytes."""
    out = bytearray(len(data))
    for chunk in range(len(data) // 16):
        row, column = divmod(chunk, 8)
        moved = {0: column, 128: column ^ row % 8, 64: column ^ row % 8 % 4, 32: column ^ row % 8 % 2}[
            swizzle
        ]
        out[(row * 8 + moved) * 16 : (row * 8 + moved + 1) * 16] = data[chunk * 16 : chunk * 16 + 16]
    return bytes(out)


def load_body(coordinates: str, nbytes: int, rank: int = 2) -> str:
    return f"""
    @%p1 mbarrier.arrive.expect_tx.shared.b64 %d1, [%r100], {nbytes};
    @%p1 cp.async.bulk.tensor.{rank}d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r0], [%a8, {{{coordinates}}}], [%r100];
    """


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("late", ALL_MODES)
def test_tensor_load_swizzles_boxes(swizzle: int, late: int | None) -> None:
    inner = (swizzle or 128) // 2
    rows = 1024 // inner
    source = np.random.default_rng(swizzle).integers(0, 1 << 16, (128, 96)).astype(np.uint16)
    out = np.zeros(2048, np.uint8)
    tmap = encode(source.ctypes.data, "bf16", [96, 128], [192], [inner, rows], swizzle)
    result = with_map(INIT + load_body("16, 24", 2048) + WAIT + DUMP, [source, out], [tmap], late=late)
    assert result.completed, [str(f) for f in result.findings]
    box = source[24 : 24 + rows, 16 : 16 + inner]
    assert out.tobytes() == chunk_swizzle(np.ascontiguousarray(box).tobytes(), swizzle)


@pytest.mark.parametrize("coordinates", [(-8, -3), (80, 120), (0, 500), (-40, 0)])
def test_tensor_load_fills_outside_with_zero_and_counts_all_bytes(coordinates: tuple[int, int]) -> None:
    source = np.random.default_rng(5).integers(1, 1 << 16, (128, 96)).astype(np.uint16)
    out = np.full(2048, 7, np.uint8)
    tmap = encode(source.ctypes.data, "bf16", [96, 128], [192], [32, 32], 0)
    x, y = coordinates
    result = with_map(INIT + load_body(f"{x}, {y}", 2048) + WAIT + DUMP, [source, out], [tmap], trace=True)
    assert result.completed
    got = out.view(np.uint16).reshape(32, 32)
    for r in range(32):
        for c in range(32):
            inside = 0 <= y + r < 128 and 0 <= x + c < 96
            assert got[r, c] == (source[y + r, x + c] if inside else 0)
    assert result.trace is not None
    assert [e.amount for e in result.trace if e.kind == "complete_tx"] == [2048]


def test_tensor_of_five_dimensions_with_strides() -> None:
    source = np.arange(2 * 3 * 4 * 6 * 16, dtype=np.float32).reshape(2, 3, 4, 6, 16)
    view = source[:, :, ::2]  # dimension 2 with a stride of two rows
    out = np.zeros(2048, np.uint8)
    strides = [view.strides[i] for i in (3, 2, 1, 0)]
    tmap = encode(source.ctypes.data, "f4", [16, 6, 2, 3, 2], strides, [8, 2, 2, 2, 2], 0)
    result = with_map(INIT + load_body("4, 3, 0, 1, 0", 512, 5) + WAIT + DUMP, [source, out], [tmap])
    assert result.completed
    want = view[0:2, 1:3, 0:2, 3:5, 4:12]
    assert (out[:512].view(np.float32) == want.ravel()).all()


@pytest.mark.parametrize("swizzle", [0, 128])
@pytest.mark.parametrize("late", ALL_MODES)
def test_tensor_store_inverts_the_swizzle_and_clips(swizzle: int, late: int | None) -> None:
    target = np.zeros((24, 64), np.uint16)
    box = np.random.default_rng(6).integers(1, 1 << 16, (16, 64)).astype(np.uint16)
    staged = np.frombuffer(chunk_swizzle(box.tobytes(), swizzle), np.uint8).copy()
    tmap = encode(target.ctypes.data, "bf16", [64, 24], [128], [64, 16], swizzle)
    body = """
    mov.b32 %r0, smem;
    shl.b32 %r1, %tid, 4;
    add.s32 %r2, %r0, %r1;
    mul.wide.u32 %off, %tid, 16;
    add.s64 %a0, %b1, %off;
    """ + "".join(
        f"ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%a0+{512 * i}];\nst.shared.v4.b32 [%r2+{512 * i}], {{%r4, %r5, %r6, %r7}};\n"
        for i in range(4)
    )
    body += """
    fence.proxy.async.shared::cta;
    bar.sync 0;
    elect.sync _|%p1, -1;
    @%p1 cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%a8, {0, 16}], [%r0];
    @%p1 cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0;
    """
    result = with_map(body, [target, staged], [tmap], late=late)
    assert result.completed
    assert not result.findings
    assert (target[16:] == box[:8]).all()
    assert (target[:16] == 0).all()


@pytest.mark.parametrize(("element", "dtype"), [("f4", np.float32), ("i4", np.int32)])
def test_tensor_reduction_adds(element: str, dtype: type) -> None:
    target = np.arange(512).astype(dtype).reshape(16, 32)
    before = target.copy()
    body = """
    mov.b32 %r0, smem;
    shl.b32 %r1, %tid, 2;
    add.s32 %r2, %r0, %r1;
    """
    one = "0f3F800000" if dtype is np.float32 else "1"
    body += f"mov.b32 %r3, {one};\n" + "".join(f"st.shared.b32 [%r2+{128 * i}], %r3;\n" for i in range(8))
    body += """
    elect.sync _|%p1, -1;
    @%p1 cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%a8, {0, 4}], [%r0];
    @%p1 cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%a8, {0, 4}], [%r0];
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
    """
    tmap = encode(target.ctypes.data, element, [32, 16], [128], [32, 8], 0)
    assert with_map(body, [target], [tmap], late=1).completed
    before[4:12] += 2
    assert (target == before).all()


def test_multicast_reaches_every_cta_of_the_mask() -> None:
    source = np.arange(1024, dtype=np.uint16).reshape(16, 64)
    out = np.zeros((2, 2048), np.uint8)
    body = INIT + """
    barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned;
    mov.u32 %r50, %cluster_ctarank;
    @%p1 mbarrier.arrive.expect_tx.shared.b64 %d1, [%r100], 2048;
    setp.eq.and.b32 %p2, %r50, 0, %p1;
    mov.b16 %h1, 3;
    @%p2 cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%r0], [%a8, {0, 0}], [%r100], %h1;
    """ + WAIT + "mul.wide.u32 %off, %r50, 2048;\nadd.s64 %b1, %b1, %off;\n" + DUMP  # fmt: skip
    tmap = encode(source.ctypes.data, "bf16", [64, 16], [128], [64, 16], 128)
    for late in ALL_MODES:
        out[:] = 0
        result = with_map(body, [source, out], [tmap], cluster=2, late=late)
        assert result.completed, [str(f) for f in result.findings]
        want = chunk_swizzle(source.tobytes(), 128)
        assert out[0].tobytes() == want
        assert out[1].tobytes() == want


def test_a_removed_wait_shows_in_late_mode_only() -> None:
    source = np.arange(1, 1025, dtype=np.uint16).reshape(16, 64)
    tmap = encode(source.ctypes.data, "bf16", [64, 16], [128], [64, 16], 0)
    out = np.zeros(2048, np.uint8)
    faulty = INIT + load_body("0, 0", 2048) + DUMP
    assert with_map(faulty, [source, out], [tmap]).completed
    assert out.tobytes() == source.tobytes()
    result = with_map(faulty, [source, out], [tmap], late=1)
    assert out.tobytes() != source.tobytes()
    assert (out == 0xFF).all()
    assert [f.kind for f in result.findings] == ["unawaited"]


def test_a_missing_bulk_wait_shows_in_late_mode() -> None:
    body = """
    mov.b32 %r0, smem;
    shl.b32 %r1, %tid, 2;
    add.s32 %r2, %r0, %r1;
    st.shared.b32 [%r2], %tid;
    bar.sync 0;
    elect.sync _|%p1, -1;
    @%p1 cp.async.bulk.global.shared::cta.bulk_group [%b0], [%r0], 128;
    @%p1 cp.async.bulk.commit_group;
    WAIT
    bar.sync 0;
    mov.b32 %r3, 77;
    st.shared.b32 [%r2], %r3;
    """
    good = body.replace("WAIT", "@%p1 cp.async.bulk.wait_group.read 0;")
    for text, late, right in ((good, 4, True), (body.replace("WAIT", ""), 4, False), (good, None, True)):
        out = np.zeros(32, np.uint32)
        result = execute(text, [out], shared=256, late=late)
        assert result.completed
        assert (out == np.arange(32)).all() == right


@pytest.mark.parametrize("late", ALL_MODES)
def test_bulk_copy_between_ctas_signals_the_other_cta(late: int | None) -> None:
    out = np.zeros((2, 32), np.uint32)
    body = INIT + """
    mov.u32 %r50, %cluster_ctarank;
    xor.b32 %r51, %r50, 1;
    shl.b32 %r1, %tid, 2;
    add.s32 %r2, %r0, %r1;
    shl.b32 %r52, %r50, 8;
    add.s32 %r53, %r52, %tid;
    st.shared.b32 [%r2], %r53;
    fence.proxy.async.shared::cta;
    barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned;
    mapa.shared::cluster.u32 %r60, %r0, %r51;
    mapa.shared::cluster.u32 %r61, %r100, %r51;
    @%p1 mbarrier.arrive.expect_tx.shared.b64 %d1, [%r100], 128;
    @%p1 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r60+1024], [%r0], 128, [%r61];
    """ + WAIT + """
    ld.shared.b32 %r5, [%r2+1024];
    mul.wide.u32 %off, %r53, 0;
    shl.b32 %r54, %r50, 7;
    add.s32 %r55, %r54, %r1;
    cvt.u64.u32 %off, %r55;
    add.s64 %a0, %b0, %off;
    st.global.b32 [%a0], %r5;
    """  # fmt: skip
    result = execute(body, [out], shared=8192, grid=(2, 1, 1), cluster=(2, 1, 1), late=late)
    assert result.completed, [str(f) for f in result.findings]
    assert (out[0] == 256 + np.arange(32)).all()
    assert (out[1] == np.arange(32)).all()


@pytest.mark.parametrize(("kind", "dtype"), [("f32", np.float32), ("s32", np.int32), ("u64", np.uint64)])
def test_bulk_reduction_into_global_memory(kind: str, dtype: type) -> None:
    target = np.arange(64).astype(dtype)
    source = (np.arange(64) * 3).astype(dtype)
    nbytes = target.nbytes
    body = INIT + f"""
    @%p1 mbarrier.arrive.expect_tx.shared.b64 %d1, [%r100], {nbytes};
    @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r0], [%b1], {nbytes}, [%r100];
    """ + WAIT + f"""
    @%p1 cp.reduce.async.bulk.global.shared::cta.bulk_group.add.{kind} [%b0], [%r0], {nbytes};
    @%p1 cp.async.bulk.commit_group;
    @%p1 cp.async.bulk.wait_group 0;
    """  # fmt: skip
    assert execute(body, [target, source], shared=8192, late=2).completed
    assert (target == np.arange(64) * 4).all()


@pytest.mark.parametrize("late", ALL_MODES)
def test_cp_async_with_zero_fill(late: int | None) -> None:
    source = np.arange(1, 129, dtype=np.uint32)
    out = np.zeros(2048, np.uint8)
    body = """
    mov.b32 %r0, smem;
    shl.b32 %r1, %tid, 4;
    add.s32 %r2, %r0, %r1;
    mul.wide.u32 %off, %tid, 16;
    add.s64 %a0, %b0, %off;
    setp.lt.u32 %p1, %tid, 20;
    selp.b32 %r3, 16, 0, %p1;
    cp.async.cg.shared.global [%r2], [%a0], 16, %r3;
    cp.async.commit_group;
    cp.async.wait_group 0;
    bar.sync 0;
    """
    assert execute(body + DUMP, [source, out], shared=8192, late=late).completed
    want = np.where(np.arange(128) < 80, source, 0)
    assert (out[:512].view(np.uint32) == want).all()


# -- mbarriers


def test_transaction_bytes_may_come_before_they_are_expected() -> None:
    body = """
    mov.b32 %r100, smem;
    elect.sync _|%p1, -1;
    @%p1 mbarrier.init.shared.b64 [%r100], 1;
    @%p1 mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r100], 64;
    @%p1 mbarrier.arrive.expect_tx.shared.b64 %d1, [%r100], 64;
    mbarrier.test_wait.parity.shared.b64 %p2, [%r100], 0;
    mbarrier.test_wait.parity.shared.b64 %p3, [%r100], 1;
    selp.b32 %r1, 1, 0, %p2;
    selp.b32 %r2, 2, 0, %p3;
    or.b32 %r3, %r1, %r2;
    st.global.b32 [%b0], %r3;
    """
    out = np.zeros(1, np.uint32)
    assert execute(body, [out], shared=64).completed
    assert out[0] == 1


def test_phases_count_and_parity_1_passes_on_a_fresh_barrier() -> None:
    body = """
    mov.b32 %r100, smem;
    setp.eq.b32 %p1, %tid, 0;
    @%p1 mbarrier.init.shared.b64 [%r100], 32;
    bar.sync 0;
    mbarrier.try_wait.parity.shared.b64 %p2, [%r100], 1;
    mbarrier.arrive.shared.b64 %d1, [%r100];
    mbarrier.try_wait.shared.b64 %p3, [%r100], %d1;
    mbarrier.arrive.release.cta.shared::cta.b64 _, [%r100];
    mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %p4, [%r100], 1, 1000;
    and.pred %p5, %p2, %p3;
    and.pred %p5, %p5, %p4;
    selp.b32 %r1, 1, 0, %p5;
    st.global.b32 [%b0], %r1;
    """
    out = np.zeros(1, np.uint32)
    result = execute(body, [out], shared=64, trace=True)
    assert result.completed
    assert out[0] == 1
    assert result.trace is not None
    assert [(e.kind, e.phase, e.amount) for e in result.trace if e.kind == "arrive"] == [
        ("arrive", 0, 32), ("arrive", 1, 32),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("operation", "kind"),
    [
        ("mbarrier.arrive.shared.b64 %d1, [%r100], 1;", "mbarrier-over-arrival"),
        ("mbarrier.init.shared.b64 [%r100+8], 0;", "mbarrier"),
        ("mbarrier.init.shared.b64 [%r100+4], 1;", "misaligned"),
        ("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r100], 1048576;", "mbarrier-tx-count"),
    ],
)
def test_mbarrier_misuse(operation: str, kind: str) -> None:
    body = f"""
    mov.b32 %r100, smem;
    setp.eq.b32 %p1, %tid, 0;
    @%p1 mbarrier.init.shared.b64 [%r100], 31;
    {operation}
    """
    result = execute(body, [], shared=64)
    assert [f.kind for f in result.errors] == [kind]


def test_a_peeking_consumer_is_not_a_deadlock() -> None:
    """A try_wait that nobody satisfies may time out: the warp that peeks is also the one that arrives."""
    body = """
    mov.b32 %r100, smem;
    setp.eq.b32 %p1, %tid, 0;
    @%p1 mbarrier.init.shared.b64 [%r100], 1;
    bar.sync 0;
    mbarrier.try_wait.parity.shared.b64 %p2, [%r100], 0;
    @%p2 trap;
    @%p1 mbarrier.arrive.shared.b64 %d1, [%r100];
    mbarrier.try_wait.parity.shared.b64 %p3, [%r100], 0;
    @!%p3 trap;
    """
    for late in ALL_MODES:
        assert execute(body, [], shared=64, late=late).completed


def test_tensor_map_fields_are_checked() -> None:
    good = tensor_map.decode(encode(1 << 40, "bf16", [64, 100], [1 << 37], [64, 8], 128)[:128])
    assert good.sizes == (64, 100)
    assert good.box_bytes == 1024
    body = INIT + load_body("0, 0", 1024) + WAIT
    for bad in (
        encode(8, "bf16", [64, 8], [128], [64, 8], 0),
        encode(1 << 40, "bf16", [64, 8], [128], [65, 8], 0),
    ):
        result = with_map(body, [], [bad])
        assert [f.kind for f in result.errors] == ["descriptor"]
