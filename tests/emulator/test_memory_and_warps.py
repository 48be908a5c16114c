"""Address spaces, divergence, warp-wide instructions, named barriers."""

from __future__ import annotations

import numpy as np
import pytest

from fa4tune.emulator.machine import Result, run
from tests.emulator.emulator_harness import execute, kernel, lanes, launch_of


def only_error(result: Result) -> str:
    assert not result.completed
    assert len(result.errors) == 1
    assert result.errors[0].line > 0
    return str(result.errors[0])


# -- memory


def test_vector_and_narrow_accesses_round_trip() -> None:
    source = np.arange(512, dtype=np.uint8)
    target = np.zeros(512, np.uint8)
    body = """
    mul.wide.u32 %off, %tid, 16;
    add.s64 %a0, %b0, %off;  add.s64 %a1, %b1, %off;
    ld.global.v2.b32 {%r1, %r2}, [%a0];
    ld.global.u16 %h1, [%a0+8];
    ld.global.s8 %r3, [%a0+10];
    ld.global.u8 %r4, [%a0+11];
    ld.global.nc.L1::no_allocate.b32 %r5, [%a0+12];
    st.global.v2.b32 [%a1], {%r1, %r2};
    st.global.b16 [%a1+8], %h1;
    st.global.b8 [%a1+10], %r3;
    st.global.u8 [%a1+11], %r4;
    st.global.b32 [%a1+12], %r5;
    """
    assert execute(body, [source, target]).completed
    assert (source == target).all()


def test_narrow_loads_extend_by_their_type() -> None:
    source = np.full(128, 0x80, np.uint8)
    target = np.zeros(64, np.uint32)
    body = """
    mul.wide.u32 %off, %tid, 4;
    add.s64 %a0, %b0, %off;
    mul.wide.u32 %off, %tid, 8;
    add.s64 %a1, %b1, %off;
    ld.global.s8 %r1, [%a0];
    ld.global.u8 %r2, [%a0];
    st.global.v2.u32 [%a1], {%r1, %r2};
    """
    assert execute(body, [source, target]).completed
    assert (target.reshape(-1, 2) == [0xFFFFFF80, 0x80]).all()


def test_shared_and_generic_addresses_reach_the_same_bytes() -> None:
    target = np.zeros(32, np.uint32)
    body = """
    mov.b32 %r1, smem;
    shl.b32 %r2, %tid, 2;
    add.s32 %r3, %r1, %r2;
    xor.b32 %r4, %r2, 124;
    add.s32 %r5, %r1, %r4;
    st.shared.b32 [%r3+64], %tid;
    cvt.u64.u32 %d1, %r5;
    cvta.shared.u64 %d2, %d1;
    ld.b32 %r6, [%d2+64];
    mul.wide.u32 %off, %tid, 4;
    add.s64 %a0, %b0, %off;
    st.b32 [%a0], %r6;
    """
    assert execute(body, [target], shared=1024).completed
    assert (target == np.arange(32)[::-1]).all()


def test_local_memory_is_private_to_a_thread() -> None:
    target = np.zeros(32, np.uint32)
    extra = ".local .align 8 .b8 depot[64];\n"
    body = """
    mov.b64 %d1, depot;
    cvta.local.u64 %d2, %d1;
    mul.lo.s32 %r1, %tid, 3;
    st.local.b32 [%d1+8], %r1;
    ld.b32 %r2, [%d2+8];
    mul.wide.u32 %off, %tid, 4;
    add.s64 %a0, %b0, %off;
    st.global.b32 [%a0], %r2;
    """
    assert execute(body, [target], extra=extra).completed
    assert (target == 3 * np.arange(32)).all()


def test_shared_memory_is_born_as_nan() -> None:
    target = np.zeros(32, np.float32)
    body = """
    mov.b32 %r1, smem;
    ld.shared.b32 %f1, [%r1];
    mul.wide.u32 %off, %tid, 4;
    add.s64 %a0, %b0, %off;
    st.global.b32 [%a0], %f1;
    """
    assert execute(body, [target], shared=64).completed
    assert np.isnan(target).all()


@pytest.mark.parametrize(
    ("access", "message"),
    [
        ("ld.global.b32 %r1, [%b0+128];", "4 bytes at offset 128 of b0, which has 128"),
        ("st.global.b64 [%b0+128], %d0;", "8 bytes at offset 128 of b0"),
        ("ld.global.b32 %r1, [%d0];", "in no buffer"),
        ("ld.global.b32 %r1, [%b0+2];", "misaligned"),
        ("ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%b0+8];", "misaligned"),
        ("ld.shared.b32 %r1, [%r0+256];", "at shared offset 1280"),
        ("st.shared.b32 [%r0-4], %r1;", "at shared offset 1020"),
        ("ld.shared.b32 %r1, [%r0+1];", "misaligned"),
        ("add.s32 %r9, %r0, 16777216;\nld.shared.b32 %r1, [%r9];", "belongs to CTA rank 1"),
        ("mapa.shared::cluster.u32 %r9, %r0, 3;", "CTA rank 3 of a cluster of 1"),
        ("mbarrier.arrive.shared.b64 %d1, [%r0], 1;", "holds no initialised mbarrier"),
    ],
)
def test_bad_accesses_are_findings_with_their_line(access: str, message: str) -> None:
    memory = np.zeros(32, np.uint32)
    body = f"mov.b64 %d0, 4096;\nmov.b32 %r1, 0;\nmov.b32 %r0, smem;\n{access}"
    result = execute(body, [memory], shared=256)
    text = only_error(result)
    assert message in text
    assert access.split("\n")[-1].rstrip(";") in text


def test_store_to_a_read_only_buffer_is_a_finding() -> None:
    memory = np.zeros(32, np.uint32)
    launch = launch_of([memory])
    launch = type(launch)(
        launch.entry, launch.grid, launch.block, launch.cluster, 0, launch.parameters,
        tuple(type(b)(b.name, b.address, b.nbytes, b.array, False) for b in launch.buffers),
    )  # fmt: skip
    result = run(kernel("st.global.b32 [%b0], %tid;", 1), launch)
    assert "read-only" in only_error(result)


@pytest.mark.parametrize(
    ("operation", "kind", "expected"),
    [
        ("add", "u32", 32 * 31 // 2 + 5), ("max", "u32", 31), ("min", "u32", 0), ("or", "b32", 31),
        ("xor", "b32", 5), ("inc", "u32", 5 + 0), ("add", "f32", None),
    ],
)  # fmt: skip
def test_atomics_on_one_word(operation: str, kind: str, expected: int | None) -> None:
    memory = np.array([5, 0], np.uint32)
    value = "%tid"
    prologue = ""
    if kind == "f32":
        memory[:1].view(np.float32)[0] = 0.5
        prologue = "cvt.rn.f32.u32 %f1, %tid;\n"
        value = "%f1"
    result = execute(f"{prologue}red.relaxed.gpu.global.{operation}.{kind} [%b0], {value};", [memory])
    assert result.completed
    if kind == "f32":
        assert memory[:1].view(np.float32)[0] == 496.5
    elif operation == "inc":
        want = 5
        for t in range(32):
            want = 0 if want >= t else want + 1
        assert memory[0] == want
    else:
        assert memory[0] == expected


def test_compare_and_swap_returns_the_old_value() -> None:
    memory = np.array([3], np.uint32)
    out = np.zeros(32, np.uint32)
    body = """
    add.s32 %r1, %tid, 1;
    atom.global.cas.b32 %r2, [%b0], %tid, %r1;
    mul.wide.u32 %off, %tid, 4;
    add.s64 %a0, %b1, %off;
    st.global.b32 [%a0], %r2;
    """
    assert execute(body, [memory, out]).completed
    value, want = 3, []
    for t in range(32):
        want.append(value)
        value = t + 1 if value == t else value
    assert out.tolist() == want
    assert memory[0] == value


@pytest.mark.parametrize("transpose", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_matrix_moves_hold_the_documented_fragments(count: int, transpose: str) -> None:
    rng = np.random.default_rng(1)
    tiles = rng.integers(0, 1 << 16, (4, 8, 8)).astype(np.uint16)
    source, loaded, stored = (
        tiles.reshape(-1).copy(),
        np.zeros((count, 32), np.uint32),
        np.zeros(256, np.uint16),
    )
    registers = ", ".join(f"%r{10 + i}" for i in range(count))
    stores = "".join(f"st.global.b32 [%a2+{128 * i}], %r{10 + i};\n" for i in range(count))
    body = f"""
    mov.b32 %r0, smem;
    shl.b32 %r1, %tid, 4;
    add.s32 %r2, %r0, %r1;
    mul.wide.u32 %off, %tid, 16;
    add.s64 %a0, %b0, %off;
    ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%a0];
    st.shared.v4.b32 [%r2], {{%r4, %r5, %r6, %r7}};
    bar.sync 0;
    ldmatrix.sync.aligned.m8n8.x{count}{transpose}.shared.b16 {{{registers}}}, [%r2];
    mul.wide.u32 %off, %tid, 4;
    add.s64 %a2, %b1, %off;
    {stores}
    stmatrix.sync.aligned.m8n8.x{count}{transpose}.shared.b16 [%r2+512], {{{registers}}};
    bar.sync 0;
    ld.shared.v4.b32 {{%r4, %r5, %r6, %r7}}, [%r2+512];
    mul.wide.u32 %off, %tid, 16;
    add.s64 %a0, %b2, %off;
    st.global.v4.b32 [%a0], {{%r4, %r5, %r6, %r7}};
    """
    assert execute(body, [source, loaded, stored], shared=1024).completed
    for i in range(count):
        tile = tiles[i].T if transpose else tiles[i]
        for t in range(32):
            want = int(tile[t // 4, 2 * (t % 4)]) | int(tile[t // 4, 2 * (t % 4) + 1]) << 16
            assert loaded[i, t] == want
    assert (stored.reshape(4, 8, 8)[:count] == tiles[:count]).all()


# -- divergence


def test_nested_divergence_reconverges_and_loops_run_per_lane() -> None:
    body = """
    mov.b32 %r1, 0;
    mov.b32 %r2, 0;
    and.b32 %r3, %x0, 7;
    LOOP:
    setp.ge.u32 %p1, %r2, %r3;
    @%p1 bra END;
    and.b32 %r4, %r2, 1;
    setp.eq.b32 %p2, %r4, 0;
    @%p2 bra EVEN;
    add.s32 %r1, %r1, 100;
    bra NEXT;
    EVEN:
    add.s32 %r1, %r1, 1;
    NEXT:
    add.s32 %r2, %r2, 1;
    bra LOOP;
    END:
    activemask.b32 %y1;
    add.s32 %y0, %r1, 0;
    """
    x = np.arange(64, dtype=np.uint32)
    total, mask = lanes(body, [("u32", x)], ["u32", "u32"])
    want = [sum(1 if i % 2 == 0 else 100 for i in range(v % 8)) for v in x.tolist()]
    assert total.tolist() == want
    assert (mask == 0xFFFFFFFF).all()


def test_exit_of_some_lanes_lets_the_others_go_on() -> None:
    out = np.zeros(32, np.uint32)
    body = """
    mul.wide.u32 %off, %tid, 4;
    add.s64 %a0, %b0, %off;
    and.b32 %r1, %tid, 3;
    setp.eq.b32 %p1, %r1, 1;
    @%p1 exit;
    activemask.b32 %r2;
    st.global.b32 [%a0], %r2;
    """
    assert execute(body, [out]).completed
    mask = sum(1 << t for t in range(32) if t % 4 != 1)
    assert out.tolist() == [0 if t % 4 == 1 else mask for t in range(32)]


def test_predicated_instructions_keep_other_lanes() -> None:
    body = """
    setp.lt.u32 %p1, %x0, 16;
    mov.b32 %r1, 7;
    @%p1 add.s32 %r1, %x0, 1000;
    @!%p1 mul.lo.s32 %r1, %x0, 2;
    mov.b32 %y0, %r1;
    """
    x = np.arange(32, dtype=np.uint32)
    (got,) = lanes(body, [("u32", x)], ["u32"])
    assert (got == np.where(x < 16, x + 1000, 2 * x)).all()


# -- warp-wide


def shuffle_reference(mode: str, a: list[int], b: int, c: int) -> tuple[list[int], list[int]]:
    """The pseudocode of shfl.sync in the PTX ISA."""
    values, flags = [], []
    clamp, segment = c & 31, c >> 8 & 31
    for lane in range(32):
        high = (lane & segment) | (clamp & ~segment)
        low = lane & segment
        j = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": low | (b & ~segment)}[mode]
        ok = j >= high if mode == "up" else j <= high
        values.append(a[j if ok else lane])
        flags.append(int(ok))
    return values, flags


@pytest.mark.parametrize(
    ("mode", "b", "c"),
    [("up", 3, 0), ("down", 5, 31), ("bfly", 1, 31), ("bfly", 16, 31), ("idx", 7, 31), ("idx", 3, 0x181F),
     ("down", 2, 0x1807), ("up", 1, 0x1800)],
)  # fmt: skip
def test_shuffles(mode: str, b: int, c: int) -> None:
    x = np.random.default_rng(2).integers(0, 1 << 32, 32, dtype=np.uint32)
    body = f"shfl.sync.{mode}.b32 %y0|%p1, %x0, {b}, {c}, -1;\nselp.b32 %y1, 1, 0, %p1;"
    value, flag = lanes(body, [("u32", x)], ["u32", "u32"])
    values, flags = shuffle_reference(mode, x.tolist(), b, c)
    assert value.tolist() == values
    assert flag.tolist() == flags


def test_votes_matches_reductions_and_election() -> None:
    x = np.random.default_rng(3).integers(0, 4, 32).astype(np.uint32)
    body = """
    setp.eq.b32 %p1, %x0, 1;
    vote.sync.ballot.b32 %y0, %p1, -1;
    vote.sync.any.pred %p2, %p1, -1;
    vote.sync.all.pred %p3, %p1, -1;
    selp.b32 %r1, 1, 0, %p2;
    selp.b32 %r2, 2, 0, %p3;
    or.b32 %y1, %r1, %r2;
    match.any.sync.b32 %y2, %x0, -1;
    redux.sync.add.u32 %y3, %x0, -1;
    redux.sync.max.s32 %y4, %x0, -1;
    elect.sync %y5|%p4, -1;
    selp.b32 %y6, 1, 0, %p4;
    """
    ballot, any_all, match, total, largest, leader, elected = lanes(body, [("u32", x)], ["u32"] * 7)
    values = x.tolist()
    assert (ballot == sum(1 << i for i, v in enumerate(values) if v == 1)).all()
    assert (any_all == 1).all()
    assert match.tolist() == [sum(1 << j for j, w in enumerate(values) if w == v) for v in values]
    assert (total == sum(values)).all()
    assert (largest == max(values)).all()
    assert (leader == 0).all()
    assert elected.tolist() == [1] + [0] * 31


def test_election_under_a_partial_mask_takes_the_first_active_lane() -> None:
    body = """
    mov.b32 %y0, 99;
    setp.lt.u32 %p1, %x0, 5;
    @%p1 bra SKIP;
    elect.sync %r1|%p2, -1;
    selp.b32 %y0, 1, 0, %p2;
    SKIP:
    """
    (got,) = lanes(body, [("u32", np.arange(32, dtype=np.uint32))], ["u32"])
    assert got.tolist() == [99] * 5 + [1] + [0] * 26


# -- named barriers


def test_barrier_orders_producer_and_consumer_warps() -> None:
    out = np.zeros(64, np.uint32)
    body = """
    mov.b32 %r0, smem;
    shr.u32 %r1, %tid, 5;
    and.b32 %r2, %tid, 31;
    shl.b32 %r3, %r2, 2;
    add.s32 %r4, %r0, %r3;
    setp.eq.b32 %p1, %r1, 0;
    @%p1 bra PRODUCER;
    bar.sync 3, 64;
    ld.shared.b32 %r5, [%r4];
    mul.wide.u32 %off, %tid, 4;
    add.s64 %a0, %b0, %off;
    st.global.b32 [%a0], %r5;
    bra END;
    PRODUCER:
    mul.lo.s32 %r6, %r2, 5;
    st.shared.b32 [%r4], %r6;
    bar.arrive 3, 64;
    END:
    """
    for late in (None, 1, 2, 3):
        out[:] = 0
        result = execute(body, [out], shared=128, threads=64, late=late, trace=True)
        assert result.completed
        assert (out[32:] == 5 * np.arange(32)).all()
        assert result.trace is not None
        kinds = [(e.kind, e.warp, e.barrier, e.phase) for e in result.trace if e.space == "named"]
        assert sorted(kinds) == [("arrive", 0, 3, 0), ("sync_arrive", 1, 3, 0), ("wait", 1, 3, 0)]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("bar.sync 1, 96;", "2 of 2 warps wait for ever"),
        ("shr.u32 %r1, %tid, 5;\nadd.s32 %r1, %r1, 1;\nshl.b32 %r1, %r1, 5;\nadd.s32 %r1, %r1, 32;\nbar.sync 1, %r1;",
         "while a round for"),
        ("bar.sync 1, 33;", "thread count of 33"),
    ],
)  # fmt: skip
def test_barrier_misuse_is_named(body: str, message: str) -> None:
    assert message in only_error(execute(body, [], threads=64))


def test_deadlock_names_every_blocked_warp_and_barrier_state() -> None:
    body = """
    mov.b32 %r0, smem;
    setp.eq.b32 %p1, %tid, 0;
    @%p1 mbarrier.init.shared.b64 [%r0], 2;
    bar.sync 0;
    shr.u32 %r1, %tid, 5;
    setp.eq.b32 %p2, %r1, 1;
    @%p2 bra OTHER;
    WAIT:
    mbarrier.try_wait.parity.shared.b64 %p3, [%r0], 0;
    @%p3 bra END;
    bra WAIT;
    OTHER:
    bar.sync 5, 64;
    END:
    """
    for late in (None, 7):
        result = execute(body, [], shared=64, threads=64, late=late)
        finding = result.errors[0]
        assert finding.kind == "deadlock"
        details = "\n".join(finding.details)
        assert "warp 0 blocked at PTX line" in details
        assert "phase 0 (parity 0), 2 of 2 arrivals pending, 0 bytes pending" in details
        assert "warp 1 blocked at PTX line" in details
        assert "barrier 5: 32 of 64 threads arrived" in details


def test_register_pool_exhaustion_is_a_deadlock() -> None:
    # 512 threads start with 128 registers each; nobody gives any back.
    result = execute("setmaxnreg.inc.sync.aligned.u32 200;", [], threads=512)
    assert result.errors[0].kind == "deadlock"
    assert "registers a thread" in result.errors[0].details[0]
    body = """
    shr.u32 %r1, %tid, 5;
    setp.lt.u32 %p1, %r1, 8;
    @%p1 bra MORE;
    setmaxnreg.dec.sync.aligned.u32 56;
    bra END;
    MORE:
    setmaxnreg.inc.sync.aligned.u32 200;
    END:
    """
    assert execute(body, [], threads=512).completed


def test_trap_and_endless_loop_are_findings() -> None:
    assert "trap" in only_error(execute("trap;", []))
    result = execute("LOOP:\nadd.s32 %r1, %r1, 1;\nbra LOOP;", [])
    assert result.errors[0].kind == "livelock"


def test_polling_global_memory_sees_another_warp() -> None:
    flag, out = np.zeros(1, np.uint32), np.zeros(1, np.uint32)
    body = """
    shr.u32 %r1, %tid, 5;
    setp.eq.b32 %p1, %r1, 1;
    @%p1 bra WRITER;
    POLL:
    ld.acquire.gpu.global.b32 %r2, [%b0];
    setp.ne.b32 %p2, %r2, 9;
    @%p2 bra POLL;
    st.global.b32 [%b1], %r2;
    bra END;
    WRITER:
    mov.b32 %r3, 9;
    st.release.gpu.global.b32 [%b0], %r3;
    END:
    """
    for late in (None, 1):
        flag[0] = out[0] = 0
        assert execute(body, [flag, out], threads=64, late=late).completed
        assert out[0] == 9
