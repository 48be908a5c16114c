"""wgmma and tcgen05 against float64 products of matrices whose products and sums are exact."""

from __future__ import annotations

import numpy as np
import pytest

from fa4tune.emulator.machine import Result
from tests.emulator.emulator_harness import execute, register_list
from tests.emulator.sixteen_bits import encode

LATE = [None, 1, 2]


def integers(rows: int, columns: int, seed: int) -> np.ndarray:
    """Small integers: every product and sum is exact in float32."""
    return np.random.default_rng(seed).integers(-8, 9, (rows, columns)).astype(np.float64)


def to_bits(matrix: np.ndarray, kind: str) -> np.ndarray:
    table = {v: encode(float(v), kind) for v in np.unique(matrix)}
    return np.vectorize(table.get, otypes=[np.uint16])(matrix)


def chunk_swizzle(data: bytes, swizzle: int) -> bytes:
    """16-byte chunk c of row r of 128 bytes moves to c ^ (r mod 8, 4 or 2), as TMA places it."""
    chunks = np.frombuffer(data, np.uint8).reshape(-1, 8, 16)
    modulus = {0: 1, 32: 2, 64: 4, 128: 8}[swizzle]
    out = np.empty_like(chunks)
    for row in range(len(chunks)):
        for c in range(8):
            out[row, c ^ row % modulus] = chunks[row, c]
    return out.tobytes()


def place(matrix: np.ndarray, kind: str, swizzle: int, mn_major: bool) -> tuple[bytes, int, int, int]:
    """An operand (rows x depth) as TMA boxes would leave it: bytes, leading and stride offsets, K step in bytes.

    K-major: boxes of 8 rows and up by one swizzle width of K. MN-major: boxes of one swizzle width of rows by all of
    K. Without swizzle: 8 x 16-byte core matrices.
    """
    bits = to_bits(matrix, kind)
    rows, depth = bits.shape
    if not swizzle:
        # core matrices, K-major: 8 rows of 8 k; MN-major: 8 k of 8 rows; K cores of one row group follow each other
        cores = bits.reshape(rows // 8, 8, depth // 8, 8)
        if mn_major:
            data = np.ascontiguousarray(cores.transpose(0, 2, 3, 1))  # row group, k group, k, row
            return data.tobytes(), 128, depth // 8 * 128, 256
        data = np.ascontiguousarray(cores.transpose(0, 2, 1, 3))  # row group, k group, row, k
        return data.tobytes(), 128, depth // 8 * 128, 256
    width = swizzle // 2
    if mn_major:
        boxes = bits.T.reshape(depth, rows // width, width).transpose(1, 0, 2)
        data = b"".join(chunk_swizzle(np.ascontiguousarray(b).tobytes(), swizzle) for b in boxes)
        return data, depth * swizzle, 8 * swizzle, 16 * swizzle
    assert depth <= width
    padded = np.zeros((rows, width), np.uint16)
    padded[:, :depth] = bits
    return chunk_swizzle(padded.tobytes(), swizzle), 0, 8 * swizzle, 32


def sm90(start: int, leading: int, stride: int, swizzle: int) -> int:
    return (
        start >> 4 & 0x3FFF
        | leading >> 4 << 16
        | stride >> 4 << 32
        | {0: 0, 128: 1, 64: 2, 32: 3}[swizzle] << 62
    )


def sm100(start: int, leading: int, stride: int, swizzle: int) -> int:
    code = {0: 0, 128: 2, 64: 4, 32: 6}[swizzle]
    return start >> 4 & 0x3FFF | leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46 | code << 61


A_AT, B_AT = 2048, 2048 + 65536  # shared offsets (the window starts at 1024, the barriers lie there)

SETUP = """
mov.b32 %r0, smem;
mov.b32 %r100, %r0;
shr.u32 %r101, %tid, 5;
setp.eq.b32 %p10, %r101, 0;
elect.sync _|%p1, -1;
and.pred %p1, %p1, %p10;
@%p1 mbarrier.init.shared.b64 [%r100], 1;
@%p1 mbarrier.init.shared.b64 [%r100+8], 1;
fence.mbarrier_init.release.cluster;
bar.sync 0;
"""


def fill(a_bytes: int, b_bytes: int) -> str:
    """Copy the operands into shared memory."""
    return f"""
    @%p1 mbarrier.arrive.expect_tx.shared.b64 %d1, [%r100], {a_bytes + b_bytes};
    @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r0+1024], [%b0], {a_bytes}, [%r100];
    @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r0+66560], [%b1], {b_bytes}, [%r100];
    """ + wait("%r100", 0)


def wait(barrier: str, parity: int, offset: int = 0) -> str:
    return f"""
    {{
    .reg .pred P1;
    LAB_WAIT:
    mbarrier.try_wait.parity.shared.b64 P1, [{barrier}+{offset}], {parity};
    @P1 bra.uni DONE;
    bra.uni LAB_WAIT;
    DONE:
    }}
    """


# -- wgmma


def accumulator_matrix(raw: np.ndarray, n: int) -> np.ndarray:
    """Undo the documented fragment: register j of thread t to row and column."""
    out = np.zeros((64, n))
    for j in range(n // 2):
        for t in range(128):
            warp, lane = divmod(t, 32)
            row = 16 * warp + lane // 4 + 8 * (j // 2 % 2)
            out[row, 2 * (lane % 4) + j % 2 + 8 * (j // 4)] = raw[j, t]
    return out


def store_accumulators(n: int) -> str:
    text = "mul.wide.u32 %off, %tid, 4;\nadd.s64 %a0, %b2, %off;\n"
    return text + "".join(f"st.global.f32 [%a0+{512 * j}], %f{j};\n" for j in range(n // 2))


def wgmma(a: np.ndarray, b: np.ndarray, *, kind: str = "bf16", swizzle: tuple[int, int] = (128, 128),
          mn: tuple[bool, bool] = (False, False), negate: tuple[int, int] = (1, 1), start: float | None = None,
          from_registers: bool = False, late: int | None = None, skip_wait: bool = False,
          counters: bool = False) -> tuple[np.ndarray, Result]:  # fmt: skip
    """D = A B^T (+ start) by one group of k16 steps; A is 64 x K, B is N x K."""
    n, depth = b.shape
    a_data, a_lead, a_stride, a_step = place(a, kind, swizzle[0], mn[0])
    b_data, b_lead, b_stride, b_step = place(b, kind, swizzle[1], mn[1])
    out = np.full((n // 2, 128), np.nan, np.float32)
    body = SETUP + fill(len(a_data), len(b_data))
    body += "".join(
        f"mov.f32 %f{j}, 0f{np.float32(start or 0).view(np.uint32):08X};\n" for j in range(n // 2)
    )
    buffers = [np.frombuffer(a_data, np.uint8).copy(), np.frombuffer(b_data, np.uint8).copy(), out]
    if from_registers:
        fragments = np.zeros((depth // 16 * 4, 128), np.uint32)
        bits = to_bits(a, kind).astype(np.uint32)
        for step in range(depth // 16):
            for j in range(4):
                for t in range(128):
                    row = 16 * (t // 32) + t % 32 // 4 + 8 * (j % 2)
                    k = 16 * step + 2 * (t % 4) + 8 * (j // 2)
                    fragments[4 * step + j, t] = bits[row, k] | bits[row, k + 1] << 16
        buffers.append(fragments)
        body += "mul.wide.u32 %off, %tid, 4;\nadd.s64 %a1, %b3, %off;\n"
        body += "".join(f"ld.global.b32 %r{200 + i}, [%a1+{512 * i}];\n" for i in range(len(fragments)))
    body += "wgmma.fence.sync.aligned;\nsetp.eq.b32 %p2, 0, 0;\nsetp.ne.b32 %p3, 0, 0;\n"
    d = register_list("%f", n // 2)
    for step in range(depth // 16):
        a_desc = sm90(A_AT + step * a_step, a_lead, a_stride, swizzle[0])
        b_desc = sm90(B_AT + step * b_step, b_lead, b_stride, swizzle[1])
        body += f"mov.b64 %d2, {a_desc:#x};\nmov.b64 %d3, {b_desc:#x};\n"
        scale = "%p2" if step or start is not None else "%p3"
        operand = (
            "{" + ", ".join(f"%r{200 + 4 * step + j}" for j in range(4)) + "}" if from_registers else "%d2"
        )
        flags = f"{int(mn[1])}" if from_registers else f"{int(mn[0])}, {int(mn[1])}"
        body += f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} {d}, {operand}, %d3, {scale}, {negate[0]}, {negate[1]}, {flags};\n"
    body += "wgmma.commit_group.sync.aligned;\n"
    if not skip_wait:
        body += "wgmma.wait_group.sync.aligned 0;\n"
    body += store_accumulators(n)
    result = execute(
        body, buffers, shared=200 * 1024, threads=128, target="sm_90a", late=late, counters=counters
    )
    assert result.completed, [str(f) for f in result.findings]
    return accumulator_matrix(out, n), result


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("n", [8, 64, 136, 256])
def test_wgmma_joins_k_steps(n: int, late: int | None) -> None:
    a, b = integers(64, 64, n), integers(n, 64, n + 1)
    got, _ = wgmma(a, b, late=late)
    assert (got == a @ b.T).all()


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("a_mn", [False, True])
@pytest.mark.parametrize("b_mn", [False, True])
def test_wgmma_layouts(swizzle: int, a_mn: bool, b_mn: bool) -> None:
    a, b = integers(64, 16, 1), integers(128, 16, 2)
    got, _ = wgmma(a, b, swizzle=(swizzle, swizzle), mn=(a_mn, b_mn))
    assert (got == a @ b.T).all()


@pytest.mark.parametrize("b_mn", [False, True])
@pytest.mark.parametrize("late", LATE)
def test_wgmma_with_a_in_registers(b_mn: bool, late: int | None) -> None:
    a, b = integers(64, 64, 3), integers(64, 64, 4)
    got, _ = wgmma(a, b, mn=(False, b_mn), from_registers=True, late=late)
    assert (got == a @ b.T).all()


def test_wgmma_float16_accumulation_and_negation() -> None:
    a, b = integers(64, 32, 5), integers(32, 32, 6)
    got, _ = wgmma(a, b, kind="f16", start=2.5)
    assert (got == 2.5 + a @ b.T).all()
    got, _ = wgmma(a, b, negate=(-1, 1))
    assert (got == -(a @ b.T)).all()
    got, _ = wgmma(a, b, negate=(-1, -1))
    assert (got == a @ b.T).all()


def test_wgmma_without_a_wait_gives_stale_accumulators_in_late_mode() -> None:
    a, b = integers(64, 32, 7), integers(32, 32, 8)
    got, _ = wgmma(a, b, late=1, skip_wait=True, start=3.0)
    assert (got == 3.0).all()


def test_wgmma_products_are_float32_sums_of_bf16_products() -> None:
    rng = np.random.default_rng(9)
    a = (rng.integers(0x3F00, 0x4080, (64, 64)).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    b = (rng.integers(0x3F00, 0x4080, (64, 64)).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    got, _ = wgmma(a, b)
    want = a @ b.T
    assert np.abs(got / want - 1).max() < 64 * 2.0**-24


def test_wgmma_is_counted_once_a_warpgroup() -> None:
    _, result = wgmma(integers(64, 32, 1), integers(64, 32, 2), counters=True)
    assert result.counters is not None
    total = result.counters.total()
    assert dict(total.mmas) == {("wgmma.SS", 64, 64, 16): 2}
    assert total.bytes["mma_smem"] == 2 * (64 + 64) * 32
    assert total.bytes["tma_read"] == 64 * 128 * 2
    assert [w.instructions["mma"] for w in result.counters.warps] == [2, 2, 2, 2]


# -- tcgen05


def instruction(m: int, n: int, kind: str, mn: tuple[bool, bool], negate_a: bool = False) -> int:
    bf16 = int(kind == "bf16")
    return (
        1 << 4
        | bf16 << 7
        | bf16 << 10
        | int(negate_a) << 13
        | mn[0] << 15
        | mn[1] << 16
        | n // 8 << 17
        | m // 16 << 24
    )


def tcgen05(a: np.ndarray, b: np.ndarray, *, kind: str = "bf16", swizzle: int = 128, mn: tuple[bool, bool] = (False, False),
            pair: bool = False, from_tmem: bool = False, start: float | None = None, late: int | None = None,
            commit: bool = True, negate_a: bool = False, disable: str = "") -> tuple[np.ndarray, Result]:  # fmt: skip
    """The raw accumulator of D = A B^T: words of (CTA, lane, column); each CTA gets its share of the operands."""
    m, depth = a.shape
    n = b.shape[0]
    ctas = 2 if pair else 1
    share_a = [place(a[i * m // ctas : (i + 1) * m // ctas], kind, swizzle, mn[0]) for i in range(ctas)]
    share_b = [place(b[i * n // ctas : (i + 1) * n // ctas], kind, swizzle, mn[1]) for i in range(ctas)]
    a_size, b_size = len(share_a[0][0]), len(share_b[0][0])
    _, a_lead, a_stride, a_step = share_a[0]
    _, b_lead, b_stride, b_step = share_b[0]
    buffers = [
        np.frombuffer(b"".join(s[0] for s in share_a), np.uint8).copy(),
        np.frombuffer(b"".join(s[0] for s in share_b), np.uint8).copy(),
        np.full((ctas, 128, n), np.nan, np.float32),
    ]
    group = f"cta_group::{ctas}"
    columns = 512
    body = f"""
    mov.u32 %r50, %cluster_ctarank;
    mul.wide.u32 %off, %r50, {a_size};
    add.s64 %b0, %b0, %off;
    mul.wide.u32 %off, %r50, {b_size};
    add.s64 %b1, %b1, %off;
    """ + SETUP + fill(a_size, b_size) + f"""
    @!%p10 bra ALLOCATED;
    tcgen05.alloc.{group}.sync.aligned.shared::cta.b32 [%r0+64], {columns};
    tcgen05.relinquish_alloc_permit.{group}.sync.aligned;
    ALLOCATED:
    bar.sync 0;
    ld.shared.b32 %r60, [%r0+64];
    shl.b32 %r61, %r101, 21;
    add.s32 %r62, %r60, %r61;
    mov.f32 %f0, 0f{np.float32(start or 0).view(np.uint32):08X};
    """  # fmt: skip
    body += "".join(f"tcgen05.st.sync.aligned.32x32b.x1.b32 [%r62+{c}], {{%f0}};\n" for c in range(n))
    if from_tmem:
        words = np.ascontiguousarray(to_bits(a, kind)).view(np.uint32)  # (m, depth / 2)
        buffers.append(words)
        body += f"mul.wide.u32 %off, %tid, {2 * depth};\nadd.s64 %a2, %b3, %off;\n"
        body += f"mul.wide.u32 %off, %r50, {m // ctas * 2 * depth};\nadd.s64 %a2, %a2, %off;\n"
        for c in range(depth // 2):
            body += f"ld.global.b32 %r63, [%a2+{4 * c}];\ntcgen05.st.sync.aligned.32x32b.x1.b32 [%r62+{256 + c}], {{%r63}};\n"
    body += "tcgen05.wait::st.sync.aligned;\nfence.proxy.async.shared::cta;\n"
    body += (
        "barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n"
        if pair
        else "bar.sync 0;\n"
    )
    body += "tcgen05.fence::after_thread_sync;\nsetp.eq.b32 %p5, %r50, 0;\nand.pred %p6, %p1, %p5;\n"
    body += f"setp.ne.b32 %p7, {0 if start is None else 1}, 0;\nmov.b32 %r70, {instruction(m, n, kind, mn, negate_a):#x};\n"
    for step in range(depth // 16):
        a_desc = sm100(A_AT + step * a_step, a_lead, a_stride, swizzle)
        b_desc = sm100(B_AT + step * b_step, b_lead, b_stride, swizzle)
        body += f"mov.b64 %d2, {a_desc:#x};\nmov.b64 %d3, {b_desc:#x};\n"
        a_operand = f"[%r60+{256 + 8 * step}]" if from_tmem else "%d2"
        enable = "%p7" if step == 0 else "1"
        body += f"@%p6 tcgen05.mma.{group}.kind::f16 [%r60], {a_operand}, %d3, %r70, {disable}{enable};\n"
    if commit:
        multicast = ".multicast::cluster" if pair else ""
        body += f"mov.b16 %h1, 3;\n@%p6 tcgen05.commit.{group}.mbarrier::arrive::one.shared::cluster{multicast}.b64 [%r100+8]{', %h1' if pair else ''};\n"
        body += wait("%r100", 0, 8)
    body += "tcgen05.fence::after_thread_sync;\n"
    body += f"mul.wide.u32 %off, %r50, {512 * n};\nadd.s64 %b2, %b2, %off;\nmul.wide.u32 %off, %tid, {4 * n};\nadd.s64 %a0, %b2, %off;\n"
    for c in range(0, n, 16):
        body += f"tcgen05.ld.sync.aligned.32x32b.x16.b32 {register_list('%f', 16)}, [%r62+{c}];\ntcgen05.wait::ld.sync.aligned;\n"
        body += "".join(f"st.global.f32 [%a0+{4 * (c + i)}], %f{i};\n" for i in range(16))
    body += (
        f"bar.sync 0;\n@!%p10 bra FREED;\ntcgen05.dealloc.{group}.sync.aligned.b32 %r60, {columns};\nFREED:\n"
    )
    result = execute(
        body, buffers, shared=200 * 1024, threads=128, grid=(ctas, 1, 1), cluster=(ctas, 1, 1), late=late
    )
    return buffers[2], result


def finished(pair: tuple[np.ndarray, Result]) -> np.ndarray:
    assert pair[1].completed, [str(f) for f in pair[1].findings]
    return pair[0].astype(np.float64)


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("n", [16, 128, 256])
@pytest.mark.parametrize("from_tmem", [False, True])
def test_tcgen05_one_cta_128_rows(n: int, from_tmem: bool, late: int | None) -> None:
    a, b = integers(128, 64, n), integers(n, 64, n + 1)
    got = finished(tcgen05(a, b, from_tmem=from_tmem, late=late))
    assert (got[0] == a @ b.T).all()


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("a_mn", [False, True])
@pytest.mark.parametrize("b_mn", [False, True])
def test_tcgen05_layouts(swizzle: int, a_mn: bool, b_mn: bool) -> None:
    a, b = integers(128, 16, 1), integers(64, 16, 2)
    got = finished(tcgen05(a, b, swizzle=swizzle, mn=(a_mn, b_mn)))
    assert (got[0] == a @ b.T).all()


def test_tcgen05_64_rows_use_16_lanes_of_each_quarter() -> None:
    a, b = integers(64, 32, 3), integers(32, 32, 4)
    got = finished(tcgen05(a, b))
    want = a @ b.T
    for row in range(64):
        assert (got[0, 32 * (row // 16) + row % 16] == want[row]).all()


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("b_mn", [False, True])
def test_tcgen05_pair_of_256_rows(late: int | None, b_mn: bool) -> None:
    a, b = integers(256, 64, 5), integers(128, 64, 6)
    got = finished(tcgen05(a, b, pair=True, late=late, mn=(False, b_mn)))
    want = a @ b.T
    assert (got[0] == want[:128]).all()
    assert (got[1] == want[128:]).all()


@pytest.mark.parametrize("late", LATE)
def test_tcgen05_pair_with_a_in_tmem(late: int | None) -> None:
    a, b = integers(256, 32, 7), integers(64, 32, 8)
    got = finished(tcgen05(a, b, pair=True, from_tmem=True, late=late, start=1.5))
    want = 1.5 + a @ b.T
    assert (got.reshape(256, 64) == want).all()


def test_tcgen05_pair_of_128_rows_splits_columns_over_lanes() -> None:
    a, b = integers(128, 32, 9), integers(64, 32, 10)
    got = finished(tcgen05(a, b, pair=True))
    want = a @ b.T
    for cta in range(2):
        rows = want[64 * cta : 64 * cta + 64]
        assert (got[cta, :64, :32] == rows[:, :32]).all()
        assert (got[cta, 64:, :32] == rows[:, 32:]).all()


def test_tcgen05_float16_negation_and_disabled_lanes() -> None:
    a, b = integers(128, 32, 11), integers(32, 32, 12)
    assert (finished(tcgen05(a, b, kind="f16"))[0] == a @ b.T).all()
    assert (finished(tcgen05(a, b, negate_a=True))[0] == -(a @ b.T)).all()
    assert (finished(tcgen05(a, b, disable="{0, 0, 0, 0}, "))[0] == a @ b.T).all()
    got = finished(tcgen05(a, b, start=4.0, disable="{0xFF, 0, 0, 0}, "))[0]
    assert (got[:8] == 4.0).all()
    assert (got[8:] == 4.0 + (a @ b.T)[8:]).all()


def test_tcgen05_without_a_commit_is_stale_in_late_mode() -> None:
    a, b = integers(128, 32, 13), integers(32, 32, 14)
    got, result = tcgen05(a, b, start=2.0, late=1, commit=False)
    assert (got == 2.0).all()
    # nothing kept the operation from running after its accumulator was given back
    assert [f.kind for f in result.errors] == ["out-of-bounds"]
    assert "accumulator D" in result.errors[0].message


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r0], 48;", "no power of two"),
        ("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r0], 64;", "exits with TMEM columns"),
        ("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r0], 64;\n"
         "tcgen05.ld.sync.aligned.32x32b.x32.b32 " + register_list("%r", 32) + ", [60];", "columns 60..91"),
        ("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r0], 64;\n"
         "mov.b32 %r1, 0x200000;\ntcgen05.ld.sync.aligned.32x32b.x1.b32 {%r2}, [%r1];", "warp 0 reaches lanes 0..31"),
        ("tcgen05.dealloc.cta_group::1.sync.aligned.b32 0, 64;", "allocated are []"),
        ("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;\n"
         "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r0], 64;", "after relinquish"),
        ("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r0], 512;\n"
         "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r0], 32;", "wait for ever"),
    ],
)  # fmt: skip
def test_tmem_rules(body: str, message: str) -> None:
    result = execute("mov.b32 %r0, smem;\n" + body, [], shared=64)
    assert message in str(result.errors[0])


#: (strides in bits of the lane's digits, of the register's digits), as CUTLASS lists them for 16 rows of W bits
FRAGMENTS = {
    "16x64b": ([(2, 512), (2, 32), (8, 64)], [(1, 0)], 64),
    "16x128b": ([(4, 32), (8, 128)], [(2, 1024)], 128),
    "16x256b": ([(4, 64), (8, 256)], [(2, 32), (2, 2048)], 256),
}


def bit_of(number: int, digits: list[tuple[int, int]]) -> int:
    bit = 0
    for size, stride in digits:
        number, digit = divmod(number, size)
        bit += digit * stride
    return bit


@pytest.mark.parametrize(("shape", "registers"), [("16x64b", 1), ("16x128b", 2), ("16x256b", 4)])
def test_16_row_shapes_have_the_documented_fragments(shape: str, registers: int) -> None:
    out = np.zeros((128, 32), np.uint32)
    columns = {1: 2, 2: 4, 4: 8}[registers]
    source = "".join(f"mad.lo.s32 %r{10 + j}, %tid, {registers}, {j};\n" for j in range(registers))
    packed = "{" + ", ".join(f"%r{10 + j}" for j in range(registers)) + "}"
    loads = "{" + ", ".join(f"%r{20 + j}" for j in range(columns)) + "}"
    stores = "".join(f"st.global.b32 [%a0+{4 * j}], %r{20 + j};\n" for j in range(columns))
    body = f"""
    mov.b32 %r0, smem;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r0], 32;
    ld.shared.b32 %r1, [%r0];
    {source}
    tcgen05.st.sync.aligned.{shape}.x1.b32 [%r1], {packed};
    tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.32x32b.x{columns}.b32 {loads}, [%r1];
    mul.wide.u32 %off, %tid, 128;
    add.s64 %a0, %b0, %off;
    {stores}
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 32;
    """
    assert execute(body, [out], shared=64).completed
    lane_digits, register_digits, width = FRAGMENTS[shape]
    for t in range(32):
        for j in range(registers):
            row, bit = divmod(bit_of(t, lane_digits) + bit_of(j, register_digits), width)
            assert out[row, bit // 32] == t * registers + j
