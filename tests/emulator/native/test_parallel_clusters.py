"""Clusters on several cores give what they give on one."""

from __future__ import annotations

import numpy as np

from fa4tune.emulator.machine import Result, load, run
from fa4tune.emulator.native.parallel import independent
from tests.emulator.emulator_harness import kernel, launch_of

BODY = """
mov.u32 %r1, %ctaid.x;
mad.lo.s32 %r2, %r1, 64, %tid;
mov.u32 %r3, 0;
L: add.s32 %r3, %r3, %r2;
sub.s32 %r2, %r2, 1;
setp.gt.s32 %p1, %r2, 0;
@%p1 bra L;
mad.lo.s32 %r2, %r1, 64, %tid;
mul.wide.u32 %off, %r2, 4;
add.s64 %a0, %b0, %off;
st.global.b32 [%a0], %r3;
"""


def execute(body: str, workers: int, words: int = 64 * 24) -> tuple[np.ndarray, Result]:
    out = np.zeros(words, np.uint32)
    launch = launch_of([out], threads=64, grid=(24, 1, 1))
    return out, run(kernel(body, 1), launch, backend="native", workers=workers, counters=True)


def test_results_counters_and_order_are_those_of_one_core() -> None:
    alone, one = execute(BODY, 1)
    shared, four = execute(BODY, 4)
    n = np.arange(64 * 24, dtype=np.uint64)
    assert (alone == np.maximum(n * (n + 1) // 2, 0)).all()
    assert (alone == shared).all()
    assert one.completed
    assert four.completed
    assert one.counters == four.counters
    assert one.warp_instructions == four.warp_instructions


def test_the_first_fault_in_the_grid_is_the_one_reported() -> None:
    _, one = execute(BODY, 1, words=64 * 10)
    _, four = execute(BODY, 4, words=64 * 10)
    assert not four.completed
    assert [(f.kind, f.where, f.line) for f in one.findings] == [
        (f.kind, f.where, f.line) for f in four.findings
    ]
    assert "cta (10, 0, 0)" in four.findings[0].where


def test_clusters_that_share_atomics_stay_on_one_core() -> None:
    body = "atom.global.add.u32 %r1, [%b0], 1;"
    _, compiler = load(kernel(body, 1), "k")
    assert not independent(compiler.program)
    _, other = load(kernel("atom.shared.add.u32 %r1, [smem], 1;", 1, shared=64), "k")
    assert independent(other.program)
    out, result = execute(body, 4)
    assert result.completed
    assert out[0] == 64 * 24
