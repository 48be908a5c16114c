"""Small kernels without a fault, to be given one: every text runs clean under the checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fa4tune.emulator.launch import Launch
from fa4tune.emulator.machine import Result, run
from tests.emulator.emulator_harness import kernel, launch_of


@dataclass(frozen=True)
class Kernel:
    """A body for the harness, and its launch."""

    body: str
    threads: int = 64
    ctas: int = 1
    target: str = "sm_100a"
    shared: int = 32768
    words: int = 8192
    clusters: int = 1

    def ptx(self, *edits: tuple[str, str]) -> str:
        """The text, each edit a piece that occurs once and what takes its place."""
        body = self.body
        for old, new in edits:
            assert body.count(old) == 1, (body.count(old), old)
            body = body.replace(old, new)
        return kernel(body, 2, shared=self.shared, target=self.target)

    def launch(self) -> Launch:
        """Its launch on fresh buffers."""
        arrays = [np.ones(self.words, np.uint32), np.zeros(self.words, np.uint32)]
        return launch_of(
            arrays,
            threads=self.threads,
            grid=(self.ctas * self.clusters, 1, 1),
            cluster=(self.ctas, 1, 1),
            shared=self.shared,
        )

    def run(self, *edits: tuple[str, str], **options: Any) -> Result:
        """Run it under the checks, with edits and options of ``run``."""
        return run(self.ptx(*edits), self.launch(), check=True, **options)


def wait(barrier: str, parity: int, label: str) -> str:
    """Wait for a phase; one line, so that an edit can remove it."""
    loop = f"mbarrier.try_wait.parity.shared.b64 P{label}, [{barrier}], {parity}; @P{label} bra.uni DONE{label}; bra.uni WAIT{label};"
    return f"{{ .reg .pred P{label}; WAIT{label}: {loop} DONE{label}: }}"


SETUP = """
mov.b32 %r0, smem;
shl.b32 %r1, %tid, 4;
add.s32 %r1, %r1, %r0;
mov.u32 %r2, %warpid;
shr.u32 %r2, %tid, 5;
elect.sync _|%p0, -1;
setp.eq.u32 %p1, %r2, 0;
and.pred %p2, %p0, %p1;
mov.b32 %r3, 0;
mov.b32 %r4, 7;
"""

#: Two warps hand 16 bytes a thread to each other.
EXCHANGE = Kernel(
    SETUP
    + """
xor.b32 %r10, %r1, 512;
st.shared.v4.b32 [%r1], {%r4, %r4, %r4, %r4};
bar.sync 0; // written
ld.shared.v4.b32 {%r20, %r21, %r22, %r23}, [%r10];
mul.wide.u32 %off, %tid, 4;
add.s64 %a0, %b1, %off;
st.global.b32 [%a0], %r20;
"""
)

#: A bulk load, a change in place, a bulk store, the buffer used again.
COPIES = Kernel(
    SETUP
    + f"""
add.s32 %r100, %r0, 8192;
@%p2 mbarrier.init.shared.b64 [%r100], 1;
@%p2 mbarrier.init.shared.b64 [%r100+8], 1;
fence.mbarrier_init.release.cluster;
bar.sync 0; // initialised
@%p2 mbarrier.arrive.expect_tx.shared.b64 _, [%r100], 1024;
@%p2 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r0], [%b0], 1024, [%r100];
{wait("%r100", 0, "A")} // landed
ld.shared.v4.b32 {{%r20, %r21, %r22, %r23}}, [%r1];
add.s32 %r20, %r20, 1;
st.shared.v4.b32 [%r1], {{%r20, %r21, %r22, %r23}};
fence.proxy.async.shared::cta;
bar.sync 0; // changed
@%p2 cp.async.bulk.global.shared::cta.bulk_group [%b1], [%r0], 1024;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group.read 0;
bar.sync 0; // stored
st.shared.v4.b32 [%r1], {{%r4, %r4, %r4, %r4}};
"""
)

#: cp.async of 16 bytes a thread, read by the other warp.
CP_ASYNC = Kernel(
    SETUP
    + """
mul.wide.u32 %off, %tid, 16;
add.s64 %a0, %b0, %off;
xor.b32 %r10, %r1, 512;
cp.async.cg.shared.global [%r1], [%a0], 16;
cp.async.commit_group;
cp.async.wait_group 0;
bar.sync 0;
ld.shared.v4.b32 {%r20, %r21, %r22, %r23}, [%r10];
"""
)

_DESCRIPTOR_90 = 8 << 16 | 16 << 32  # no swizzle; core matrices 128 and 256 bytes apart
_ACCUMULATORS = "{%f0, %f1, %f2, %f3}"

#: One wgmma m64n8k16 of a warpgroup: A of 2 KiB at smem, B of 256 bytes at smem + 2048.
WGMMA = Kernel(
    SETUP
    + f"""
st.shared.v4.b32 [%r1], {{%r3, %r3, %r3, %r3}};
st.shared.v4.b32 [%r1+2048], {{%r3, %r3, %r3, %r3}};
fence.proxy.async.shared::cta;
bar.sync 0; // written
cvt.u64.u32 %d0, %r0;
shr.u64 %d0, %d0, 4;
add.s64 %d1, %d0, 128;
mov.b64 %d2, {_DESCRIPTOR_90};
or.b64 %d0, %d0, %d2;
or.b64 %d1, %d1, %d2;
setp.ne.b32 %p3, 0, 0; // accumulate
wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {_ACCUMULATORS}, %d0, %d1, %p3, 1, 1, 0, 0;
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
add.f32 %f10, %f0, %f1;
bar.sync 0; // computed
st.shared.v4.b32 [%r1], {{%r4, %r4, %r4, %r4}};
""",
    threads=128,
    target="sm_90a",
)

_DESCRIPTOR_100 = 8 << 16 | 16 << 32 | 1 << 46
_INSTRUCTION = 1 << 4 | 1 << 7 | 1 << 10 | 16 // 8 << 17 | 128 // 16 << 24

#: A product into TMEM and one with A in TMEM, read back by the warpgroup.
TCGEN05 = Kernel(
    SETUP
    + f"""
add.s32 %r100, %r0, 16384;
@%p2 mbarrier.init.shared.b64 [%r100], 1;
@%p2 mbarrier.init.shared.b64 [%r100+8], 1;
fence.mbarrier_init.release.cluster;
st.shared.v4.b32 [%r1], {{%r3, %r3, %r3, %r3}};
st.shared.v4.b32 [%r1+2048], {{%r3, %r3, %r3, %r3}};
st.shared.v4.b32 [%r1+4096], {{%r3, %r3, %r3, %r3}};
fence.proxy.async.shared::cta;
@!%p1 bra ALLOCATED;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r0+16400], 64;
ALLOCATED:
bar.sync 0; // written
ld.shared.b32 %r60, [%r0+16400];
shl.b32 %r61, %r2, 21;
add.s32 %r62, %r60, %r61;
cvt.u64.u32 %d0, %r0;
shr.u64 %d0, %d0, 4;
add.s64 %d1, %d0, 256;
mov.b64 %d2, {_DESCRIPTOR_100};
or.b64 %d0, %d0, %d2;
or.b64 %d1, %d1, %d2;
mov.b32 %r70, {_INSTRUCTION:#x};
setp.ne.b32 %p3, 0, 0;
tcgen05.st.sync.aligned.32x32b.x8.b32 [%r62+32], {{%r3, %r3, %r3, %r3, %r3, %r3, %r3, %r3}};
tcgen05.wait::st.sync.aligned;
tcgen05.fence::before_thread_sync;
bar.sync 0; // A is there
tcgen05.fence::after_thread_sync; // of A
@%p2 tcgen05.mma.cta_group::1.kind::f16 [%r60], %d0, %d1, %r70, %p3;
@%p2 tcgen05.mma.cta_group::1.kind::f16 [%r60+16], [%r60+32], %d1, %r70, %p3;
@%p2 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r100];
{wait("%r100", 0, "A")} // product
tcgen05.fence::after_thread_sync; // of D
tcgen05.ld.sync.aligned.32x32b.x2.b32 {{%r80, %r81}}, [%r62];
tcgen05.wait::ld.sync.aligned;
add.s32 %r82, %r80, %r81;
tcgen05.fence::before_thread_sync;
bar.sync 0; // read
@!%p1 bra FREED;
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r60, 64;
FREED:
""",
    threads=128,
)

#: Each of two CTAs writes to the other's memory.
PAIR = Kernel(
    SETUP
    + """
mov.u32 %r50, %cluster_ctarank;
xor.b32 %r51, %r50, 1;
mapa.shared::cluster.u32 %r52, %r1, %r51;
st.shared::cluster.b32 [%r52], %r4;
barrier.cluster.arrive.release.aligned;
barrier.cluster.wait.acquire.aligned;
ld.shared.b32 %r20, [%r1];
""",
    threads=32,
    ctas=2,
)

#: Two CTAs, each with its own words of a buffer, and a counter for both.
GLOBAL = Kernel(
    SETUP
    + """
mov.u32 %r40, %ctaid.x;
mul.wide.u32 %d5, %r40, 256;
mul.wide.u32 %off, %tid, 4;
xor.b32 %r42, %tid, 32;
mul.wide.u32 %d6, %r42, 4;
add.s64 %a0, %b1, %off;
add.s64 %a1, %b1, %d6;
add.s64 %a0, %a0, %d5; // its own
add.s64 %a1, %a1, %d5; // its other warp's
st.global.b32 [%a0], %r4;
bar.sync 0; // stored
ld.global.b32 %r43, [%a1];
@%p2 atom.global.add.u32 %r44, [%b1+4096], 1;
""",
    clusters=2,
)

ALL = {
    "global": GLOBAL, "exchange": EXCHANGE, "copies": COPIES, "cp_async": CP_ASYNC, "wgmma": WGMMA, "tcgen05": TCGEN05, "pair": PAIR,
}  # fmt: skip
