"""A kernel that is wrong is told so in the same words by both back-ends."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fa4tune.emulator.findings import Finding
from fa4tune.emulator.machine import run
from fa4tune.errors import EmulationError
from tests.emulator.emulator_harness import kernel, launch_of

FAULTS = {
    "global store out of bounds": (
        "mul.wide.u32 %off, %tid, 64;\nadd.s64 %a0, %b0, %off;\nst.global.b32 [%a0], %tid;"
    ),
    "misaligned global load": "add.s64 %a0, %b0, 2;\nld.global.b32 %r1, [%a0];",
    "shared load out of bounds": "mov.u32 %r1, smem;\nld.shared.b32 %r2, [%r1+4096];",
    "shared store through a wrong window": "mov.b64 %d1, 7;\nst.global.b32 [%d1], %tid;",
    "mbarrier that was never initialised": "mov.u32 %r1, smem;\nmbarrier.arrive.shared.b64 _, [%r1];",
    "over-arrival": (
        "mov.u32 %r1, smem;\nsetp.eq.u32 %p1, %tid, 0;\n"
        "@%p1 mbarrier.init.shared.b64 [%r1], 3;\nbar.sync 0;\n"
        "mbarrier.arrive.shared.b64 _, [%r1];"
    ),
    "deadlock at an mbarrier": (
        "mov.u32 %r1, smem;\nsetp.eq.u32 %p1, %tid, 0;\n"
        "@%p1 mbarrier.init.shared.b64 [%r1], 64;\nbar.sync 0;\n"
        "mbarrier.arrive.shared.b64 _, [%r1];\n"
        "W: mbarrier.try_wait.parity.shared.b64 %p2, [%r1], 0;\n@!%p2 bra W;"
    ),
    "deadlock at a named barrier": "bar.sync 1, 64;",
    "barrier count that is no multiple of a warp": "bar.sync 1, 33;",
    "local memory out of bounds of a trap": "trap;",
    "rank outside of the cluster": "mov.u32 %r1, smem;\nmapa.shared::cluster.u32 %r2, %r1, 3;",
    "no free registers": "setmaxnreg.inc.sync.aligned.u32 256;\nsetmaxnreg.inc.sync.aligned.u32 24;",
}  # fmt: skip


def findings(body: str, backend: str, trace: bool = False) -> list[Finding]:
    out = np.zeros(64, np.uint32)
    result = run(kernel(body, 1, shared=1024), launch_of([out], shared=1024), backend=backend, trace=trace)
    assert not result.completed
    # addresses of buffers differ between runs
    address = f"{out.ctypes.data:#x}"
    return [replace(f, message=f.message.replace(address, "base")) for f in result.findings]


@pytest.mark.parametrize("trace", [False, True])
@pytest.mark.parametrize("name", sorted(FAULTS))
def test_same_finding(name: str, trace: bool) -> None:
    plain, native = findings(FAULTS[name], "plain", trace), findings(FAULTS[name], "native", trace)
    assert [f.kind for f in plain] == [f.kind for f in native]
    for p, n in zip(plain, native, strict=True):
        if "misaligned" not in p.kind:
            assert p.message == n.message
        assert (p.line, p.text, p.where, p.details) == (n.line, n.text, n.where, n.details)


def test_a_program_that_reads_a_clock_runs_plainly() -> None:
    out = np.zeros(64, np.uint32)
    ptx = kernel("mov.u64 %d1, %clock64;\nst.global.b32 [%b0], %tid;", 1)
    assert run(ptx, launch_of([out]), backend="auto").completed
    with pytest.raises(EmulationError, match="reads %clock64"):
        run(ptx, launch_of([out]), backend="native")


def test_unknown_backend_is_refused() -> None:
    with pytest.raises(EmulationError, match="backend is 'fast', which is no back-end"):
        run(kernel("", 1), launch_of([np.zeros(8, np.uint32)]), backend="fast")
