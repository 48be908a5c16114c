"""A kernel of each kind of fault, found and named at its line; the kernels without it run clean."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fa4tune.emulator.checks import KINDS, WAIVERS, waived_kinds
from fa4tune.errors import EmulationError
from tests.emulator.checked_kernels import (
    ALL,
    COPIES,
    CP_ASYNC,
    EXCHANGE,
    GLOBAL,
    PAIR,
    TCGEN05,
    WGMMA,
    Kernel,
    wait,
)

#: Kernel, kind of finding, text of the line it must point at, and the edits that make the fault.
FAULTS: dict[str, tuple[Kernel, str, str, list[tuple[str, str]]]] = {
    "no barrier between warps": (EXCHANGE, "race", "st.shared.v4", [("bar.sync 0; // written", "")]),
    "overlapping writes": (
        EXCHANGE, "race", "st.shared.b8",
        [("bar.sync 0; // written", "st.shared.b8 [%r0+1027], %r4;\nbar.sync 0;")],
    ),
    "memory never written": (
        EXCHANGE, "uninitialised-shared", "ld.shared.b32", [("bar.sync 0; // written", "ld.shared.b32 %r30, [%r1+4096];\nbar.sync 0;")],
    ),
    "register never written": (
        EXCHANGE, "uninitialised-register", "add.s32 %r31, %r30", [("bar.sync 0; // written", "add.s32 %r31, %r30, 1;\nbar.sync 0;")],
    ),
    "shared memory left": (
        EXCHANGE, "out-of-bounds", "ld.shared.b32", [("bar.sync 0; // written", "ld.shared.b32 %r30, [%r1+65536];\nbar.sync 0;")],
    ),
    "buffer left": (
        EXCHANGE, "out-of-bounds", "st.global", [("add.s64 %a0, %b1, %off;", "add.s64 %a0, %b1, 32768;")],
    ),
    "barrier that one warp waits at": (
        EXCHANGE, "deadlock", "bar.sync 1", [("bar.sync 0; // written", "bar.sync 0;\n@%p1 bar.sync 1, 64;")],
    ),
    "load not waited for": (COPIES, "missing-load-wait", "ld.shared.v4", [(wait("%r100", 0, "A"), "")]),
    "no proxy fence": (COPIES, "missing-proxy-fence", "cp.async.bulk.global", [("fence.proxy.async.shared::cta;", "")]),
    "store not waited for": (
        COPIES, "missing-bulk-wait", "st.shared.v4", [("cp.async.bulk.wait_group.read 0;", "")],
    ),
    "store in no group": (COPIES, "missing-bulk-wait", "st.shared.v4", [("cp.async.bulk.commit_group;", "")]),
    "mbarrier without its fence": (
        COPIES, "missing-mbarrier-fence", "cp.async.bulk.shared::cluster", [("fence.mbarrier_init.release.cluster;", "")],
    ),
    "mbarrier used before it is there": (
        COPIES, "mbarrier-init-race", "mbarrier.try_wait", [("bar.sync 0; // initialised", "")],
    ),
    "mbarrier never initialised": (
        COPIES, "mbarrier", "mbarrier.try_wait", [("@%p2 mbarrier.init.shared.b64 [%r100], 1;", "")],
    ),
    "too many bytes expected": (COPIES, "deadlock", "mbarrier.try_wait", [("[%r100], 1024;", "[%r100], 1040;")]),
    "two arrivals for one": (
        COPIES, "mbarrier-over-arrival", "mbarrier.arrive.shared", [("bar.sync 0; // initialised", "bar.sync 0;\n@%p2 mbarrier.arrive.shared.b64 _, [%r100+8], 2;")],
    ),
    "data on an mbarrier": (
        COPIES, "mbarrier-data", "st.shared.b32", [("bar.sync 0; // stored", "bar.sync 0;\n@%p2 st.shared.b32 [%r100+4], %r4;")],
    ),
    "mbarrier initialised again": (
        COPIES, "mbarrier-reuse", "mbarrier.init", [("bar.sync 0; // changed", "setp.eq.u32 %p5, %r2, 1;\nand.pred %p5, %p5, %p0;\n@%p5 mbarrier.init.shared.b64 [%r100], 1;\nbar.sync 0;")],
    ),
    "bytes that never come": (
        COPIES, "mbarrier-bytes", "", [("bar.sync 0; // stored", "bar.sync 0;\n@%p2 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r100+8], 64;")],
    ),
    "load that nobody waits for": (
        COPIES, "unawaited", "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r0+2048]",
        [("bar.sync 0; // stored", "bar.sync 0;\n@%p2 mbarrier.arrive.expect_tx.shared.b64 _, [%r100+8], 64;\n"
          "@%p2 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r0+2048], [%b0], 64, [%r100+8];")],
    ),
    "cp.async not waited for": (CP_ASYNC, "missing-copy-wait", "ld.shared", [("cp.async.wait_group 0;", "")]),
    "wgmma registers too early": (
        WGMMA, "missing-wgmma-wait", "add.f32", [("wgmma.wait_group.sync.aligned 0;", ""), ("bar.sync 0; // computed", "wgmma.wait_group.sync.aligned 0;\nbar.sync 0;")],
    ),
    "wgmma operand overwritten": (
        WGMMA, "missing-wgmma-wait", "st.shared.v4.b32 [%r1], {%r4", [("wgmma.wait_group.sync.aligned 0;", ""), ("add.f32 %f10, %f0, %f1;", "")],
    ),
    "no wgmma.fence": (WGMMA, "missing-wgmma-fence", "wgmma.mma_async", [("wgmma.fence.sync.aligned;", "")]),
    "wgmma without a proxy fence": (
        WGMMA, "missing-proxy-fence", "wgmma.mma_async", [("fence.proxy.async.shared::cta;", "")],
    ),
    "accumulator never written": (
        WGMMA, "uninitialised-register", "wgmma.mma_async", [("setp.ne.b32 %p3, 0, 0; // accumulate", "setp.eq.b32 %p3, 0, 0;")],
    ),
    "ill-formed wgmma descriptor": (
        WGMMA, "descriptor", "wgmma.mma_async", [("or.b64 %d1, %d1, %d2;", f"or.b64 %d1, %d1, %d2;\nor.b64 %d1, %d1, {1 << 49};")],
    ),
    "wgmma operand outside of memory": (
        WGMMA, "out-of-bounds", "wgmma.mma_async", [("add.s64 %d1, %d0, 128;", "add.s64 %d1, %d0, 4096;")],
    ),
    "wgmma operand never written": (
        WGMMA, "uninitialised-shared", "wgmma.mma_async", [("st.shared.v4.b32 [%r1+2048], {%r3, %r3, %r3, %r3};", "")],
    ),
    "tcgen05.st not waited for": (
        TCGEN05, "missing-tcgen05-wait-st", "tcgen05.mma", [("tcgen05.wait::st.sync.aligned;", "")],
    ),
    "tcgen05.ld not waited for": (
        TCGEN05, "missing-tcgen05-wait-ld", "add.s32 %r82", [("tcgen05.wait::ld.sync.aligned;", "")],
    ),
    "no fence before the barrier": (
        TCGEN05, "missing-tcgen05-fence", "tcgen05.mma", [("tcgen05.fence::before_thread_sync;\nbar.sync 0; // A is there", "bar.sync 0;")],
    ),
    "no fence after the barrier": (
        TCGEN05, "missing-tcgen05-fence", "tcgen05.mma", [("tcgen05.fence::after_thread_sync; // of A", "")],
    ),
    "no fence after the commit": (
        TCGEN05, "missing-tcgen05-fence", "tcgen05.ld", [("tcgen05.fence::after_thread_sync; // of D", "")],
    ),
    "product not waited for": (TCGEN05, "missing-mma-wait", "tcgen05.ld", [(wait("%r100", 0, "A"), "bar.sync 0;")]),
    "no barrier before the product": (
        TCGEN05, "race", "tcgen05.mma", [("bar.sync 0; // A is there", "")],
    ),
    "tensor memory never written": (
        TCGEN05, "uninitialised-tmem", "tcgen05.mma", [("tcgen05.st.sync.aligned.32x32b.x8.b32 [%r62+32], {%r3, %r3, %r3, %r3, %r3, %r3, %r3, %r3};", "")],
    ),
    "tensor memory given back too early": (
        TCGEN05, "out-of-bounds", "tcgen05.ld", [("bar.sync 0; // read", "")],
    ),
    "tensor memory not given back": (
        TCGEN05, "tmem-leak", "", [("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r60, 64;", "")],
    ),
    "columns that are not allocated": (
        TCGEN05, "out-of-bounds", "tcgen05.st", [("[%r62+32]", "[%r62+60]")],
    ),
    "allocation that overlaps": (
        TCGEN05, "deadlock", "tcgen05.alloc", [("ALLOCATED:", "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r0+16404], 512;\nALLOCATED:")],
    ),
    "ill-formed instruction descriptor": (TCGEN05, "descriptor", "tcgen05.mma", [("mov.b32 %r70, 0x", "mov.b32 %r70, 0x1")]),
    "commit that nobody waits for": (
        TCGEN05, "unawaited-commit", "tcgen05.commit", [("tcgen05.fence::after_thread_sync; // of D", "tcgen05.fence::after_thread_sync;\n"
         "@%p2 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r100+8];")],
    ),
    "words of another CTA written": (GLOBAL, "global-race", "st.global", [("add.s64 %a0, %a0, %d5; // its own", "")]),
    "words of another CTA read": (
        GLOBAL, "global-race", "ld.global", [("add.s64 %a1, %a1, %d5; // its other warp's", "")],
    ),
    "words of another warp read too early": (GLOBAL, "global-race", "ld.global", [("bar.sync 0; // stored", "")]),
    "plain store beside atomics": (
        GLOBAL, "global-race", "st.global.b32 [%b1+4096]",
        [("bar.sync 0; // stored", "bar.sync 0;\n@%p2 st.global.b32 [%b1+4096], %r4;")],
    ),
    "bytes of a word that another CTA writes": (
        GLOBAL, "global-race", "st.global.b8", [("bar.sync 0; // stored", "bar.sync 0;\nst.global.b8 [%b1+1033], %r4;")],
    ),
    "memory of a CTA that may have exited": (
        PAIR, "exited-cta", "st.shared::cluster", [("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\nld.shared.b32 %r20, [%r1];", "")],
    ),
    "memory of the other CTA too early": (
        PAIR, "race", "ld.shared", [("barrier.cluster.wait.acquire.aligned;\nld.shared.b32 %r20, [%r1];", "ld.shared.b32 %r20, [%r1];\nbarrier.cluster.wait.acquire.aligned;")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("late", [None, 0, 1, 2])
@pytest.mark.parametrize("name", ALL)
def test_kernels_without_a_fault_run_clean(name: str, late: int | None) -> None:
    result = ALL[name].run(late=late)
    assert [str(f) for f in result.findings] == []
    assert result.completed


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_named_at_its_line(name: str) -> None:
    base, kind, text, edits = FAULTS[name]
    findings = base.run(*edits).findings
    found = [f for f in findings if f.kind == kind]
    assert found, [str(f) for f in findings]
    assert found[0].severity == "error"
    lines = base.ptx(*edits).splitlines()
    assert not text or any(text in lines[f.line - 1] for f in found), [str(f) for f in found]


def test_every_kind_of_the_checks_has_a_fault() -> None:
    assert set(KINDS) <= {kind for _, kind, _, _ in FAULTS.values()}


def test_a_race_is_found_although_the_schedule_hides_it() -> None:
    # Warp 0 writes first and warp 1 reads it later: the value is right, whoever runs first by luck.
    body = EXCHANGE.body.replace("[%r10]", "[%r0]").replace(
        "bar.sync 0; // written", "@%p1 bra READ; nop_bar: bar.sync 1, 32;\nREAD:"
    )
    body = body.replace("nop_bar: ", "").replace("st.shared.v4.b32 [%r1]", "@%p1 st.shared.v4.b32 [%r1]")
    findings = Kernel(body).run().findings
    assert [f.kind for f in findings] == ["race"]
    assert "ld.shared" in findings[0].text
    assert "st.shared" in findings[0].details[0]


def test_a_deadlocked_allocation_names_who_holds_the_columns() -> None:
    base, _, _, edits = FAULTS["allocation that overlaps"]
    finding = next(f for f in base.run(*edits).findings if f.kind == "deadlock")
    blocked = next(d for d in finding.details if "tcgen05.alloc" in d)
    held = (
        base.ptx(*edits)
        .splitlines()
        .index("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r0+16400], 64;")
    )
    assert "waiting for 512 free columns in a row of the 512 of CTA (0, 0, 0)'s TMEM" in blocked
    assert f"0..63 are held by warp 0 since PTX line {held + 1}" in blocked


def test_neighbouring_bytes_are_no_race() -> None:
    body = EXCHANGE.body.replace(
        "bar.sync 0; // written",
        "shl.b32 %r40, %r2, 1;\nadd.s32 %r40, %r40, %r0;\n@%p0 st.shared.b16 [%r40+2048], %h0;\nbar.sync 0;",
    ).replace("mov.b32 %r4, 7;", "mov.b32 %r4, 7;\nmov.b16 %h0, 1;")
    assert [str(f) for f in Kernel(body).run().findings] == []
    overlapping = body.replace("shl.b32 %r40, %r2, 1;", "mov.b32 %r40, 0;")
    assert [f.kind for f in Kernel(overlapping).run().findings] == ["race"]


def test_findings_name_role_and_source_line() -> None:
    located = COPIES.body.replace("ld.shared.v4.b32 {%r20", ".loc 1 42 0\nld.shared.v4.b32 {%r20")
    text = (wait("%r100", 0, "A"), "")
    base = Kernel(located)
    finding = next(f for f in base.run(text).findings if f.kind == "missing-load-wait")
    assert finding.source == "file 1:42"
    assert finding.where.startswith("cta (0, 0, 0) warp 0")
    assert "warpgroup 0" in finding.where
    assert "a bulk copy at PTX line" in finding.details[0]


def test_bulk_stores_of_two_ctas_to_the_same_memory_race() -> None:
    base = replace(COPIES, clusters=2)
    findings = base.run().findings
    assert {f.kind for f in findings} == {"global-race"}
    assert all("cp.async.bulk.global" in f.text and "in another CTA" in f.message for f in findings)


def test_neighbouring_bytes_of_two_ctas_are_no_race() -> None:
    edit = "bar.sync 0;\n@%p2 st.global.b8 [%a2], %r4;"
    place = (
        "bar.sync 0; // stored",
        f"cvt.u64.u32 %d7, %r40;\nadd.s64 %d7, %d7, %b1;\nadd.s64 %a2, %d7, 2048;\n{edit}",
    )
    assert [str(f) for f in GLOBAL.run(place).findings] == []


def test_atomics_order_what_comes_before_them_in_another_cta() -> None:
    ordered = (
        "ld.global.b32 %r43, [%a1];\n@%p2 atom.global.add.u32 %r44, [%b1+4096], 1;",
        "@%p2 atom.global.add.u32 %r44, [%b1+4096], 1;\nbar.sync 0;\nld.global.b32 %r43, [%a1];",
    )
    foreign = ("add.s64 %a1, %a1, %d5; // its other warp's", "")
    assert [str(f) for f in GLOBAL.run(foreign, ordered).findings] == []
    strong = (
        ordered[0],
        "st.release.gpu.global.b32 [%a0+2048], %r4;\nld.acquire.gpu.global.b32 %r44, [%a0+2048];\nld.global.b32 %r43, [%a1];",
    )
    assert [str(f) for f in GLOBAL.run(foreign, strong).findings] == []


def test_waived_findings_stay_but_are_no_errors() -> None:
    edit = ("tcgen05.wait::ld.sync.aligned;", "")
    result = TCGEN05.run(edit, waivers=("tcgen05-wait-ld",))
    assert {f.severity for f in result.findings} == {"waived"}
    assert {f.extra["waiver"] for f in result.findings} == {"tcgen05-wait-ld"}
    assert not result.errors


RELAXED = [
    ("mbarrier.init.shared.b64 [%r100+8], 1;", "mbarrier.init.shared.b64 [%r100+8], 4;"),
    (
        "bar.sync 0; // A is there",
        "elect.sync _|%p4, 0xffffffff;\nadd.s32 %r101, %r100, 8;\n"
        f"@%p4 mbarrier.arrive.relaxed.cluster.shared::cta.b64 _, [%r101];\n{wait('%r101', 0, 'C')}",
    ),
]


def test_relaxed_arrival_after_a_tcgen05_fence_orders_tensor_memory() -> None:
    """PTX ISA, tcgen05 memory consistency: the pattern of instructions of different threads."""
    assert [str(f) for f in TCGEN05.run(*RELAXED).findings] == []
    unfenced = ("tcgen05.fence::before_thread_sync;\nbar.sync 0; // A is there", RELAXED[1][1])
    assert {f.kind for f in TCGEN05.run(RELAXED[0], unfenced).findings} == {"race"}


def test_relaxed_arrival_after_a_tcgen05_fence_orders_nothing_else() -> None:
    stored = "st.shared.v4.b32 [%r1], {%r3, %r3, %r3, %r3};\nfence.proxy.async.shared::cta;\nmov.b32 %r70, "
    edit = ("mov.b32 %r70, ", stored)
    assert [str(f) for f in TCGEN05.run(edit).findings] == []
    (finding,) = TCGEN05.run(*RELAXED, edit).findings
    assert finding.kind == "race"
    assert "both in shared memory" in str(finding)


def test_waivers_are_listed_with_reasons_and_unknown_ones_refused() -> None:
    for kinds, reason in WAIVERS.values():
        assert set(kinds) <= set(KINDS)
        assert reason.endswith(".")
    with pytest.raises(EmulationError, match="no waiver 'everything'"):
        EXCHANGE.run(waivers=("everything",))
    with pytest.raises(EmulationError, match="no waiver 'everything'"):
        EXCHANGE.run(waivers="everything")


def test_a_waiver_may_be_given_as_one_string() -> None:
    assert (
        waived_kinds("wgmma-fence") == waived_kinds(["wgmma-fence"]) == {"missing-wgmma-fence": "wgmma-fence"}
    )


@pytest.mark.parametrize(
    ("access", "nbytes"), [("st.shared.b32 [%r1+65536], %r4;", 4), ("st.shared.b8 [%r1+65536], %r4;", 1)]
)
def test_a_store_out_of_bounds_names_its_bytes(access: str, nbytes: int) -> None:
    (finding,) = EXCHANGE.run(("bar.sync 0; // written", access)).findings
    assert finding.kind == "out-of-bounds"
    assert f"a shared store of {nbytes} bytes at shared offset" in finding.message


@pytest.mark.parametrize(
    "name", ["no proxy fence", "load not waited for", "product not waited for", "no barrier between warps"]
)
@pytest.mark.parametrize("late", range(5))
def test_faults_are_found_in_late_mode_too(name: str, late: int) -> None:
    base, kind, _, edits = FAULTS[name]
    findings = base.run(*edits, late=late).findings
    # where the schedule turns the two around, the completion comes after the use, and nothing orders it so
    assert {kind, "race"} & {f.kind for f in findings}
