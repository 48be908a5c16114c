"""The Hopper forward does what its plan says: counts and barrier events, role by role."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fa4tune.emulator.attention import EmulatedCall, emulate_forward
from fa4tune.emulator.plan_check import Mismatch, check_barriers, check_counts
from fa4tune.hardware.gpu import load_gpu
from fa4tune.kernels.config import SM90ForwardConfig, default_config
from fa4tune.kernels.plan import KernelPlan
from fa4tune.kernels.sm90.forward_plan import build_plan, cta_trips, warpgroup_trips
from fa4tune.problem import AttentionProblem

pytest.importorskip("cutlass")

H200 = load_gpu("h200")
Tiles = list[dict[str, tuple[int, int]]]


def planned(text: str, knobs: str) -> tuple[AttentionProblem, SM90ForwardConfig, KernelPlan]:
    problem = AttentionProblem.parse(text)
    default = default_config(problem, "sm_90a")
    assert isinstance(default, SM90ForwardConfig)
    config = default.with_text(knobs)
    return problem, config, build_plan(problem, config, H200)


def tiles_of(problem: AttentionProblem, config: SM90ForwardConfig) -> tuple[Tiles, Tiles]:
    """(tiles that warpgroups compute, tiles that pass through the rings): a warpgroup may skip some."""
    computed: Tiles = []
    passing: Tiles = []
    for m_block in range(-(-problem.seqlen_q // config.tile_m)):
        loaded = (cta_trips(problem, config, m_block), 0)
        tile = {"load": loaded}
        for w in range(config.warpgroups):
            trips = warpgroup_trips(problem, config, m_block, w)
            tile[f"mma{w}"] = (trips.total, trips.masked)
        computed.append(tile)
        passing.append(dict.fromkeys(tile, loaded))
    heads = problem.batch * problem.heads
    return computed * heads, passing * heads


def compare(text: str, knobs: str) -> tuple[EmulatedCall, list[Mismatch]]:
    problem, config, plan = planned(text, knobs)
    call = emulate_forward(problem, config, H200, counters=True, trace=True)
    assert call.passed
    (result,) = call.results
    assert result.counters is not None
    assert result.trace is not None
    computed, passing = tiles_of(problem, config)
    return call, [
        *check_counts(plan, result.counters, computed),
        *check_barriers(plan, result.trace, passing),
    ]


@pytest.mark.parametrize("trips", [1, 2, 5])
@pytest.mark.parametrize(
    ("dims", "knobs"),
    [
        ("d128_dv128_bf16", "tile_m=128,tile_n=128,ping_pong=true"),
        ("d64_dv64_bf16", "tile_m=192,tile_n=128,ping_pong=false,exp2_share=0.25,rescale_threshold=8"),
        ("d128_dv128_bf16", "tile_m=128,tile_n=80,p_in_registers=false,scheduler=single"),
        ("d64_dv64_fp16", "tile_m=64,tile_n=64,overlap=false,ping_pong=false,scheduler=single"),
    ],
)
def test_counts_and_barriers_equal_the_plan(dims: str, knobs: str, trips: int) -> None:
    rows = int(knobs.split("tile_m=")[1].split(",")[0])
    columns = int(knobs.split("tile_n=")[1].split(",")[0])
    _, differences = compare(f"b1_hq1_hk1_sq{rows}_sk{columns * trips}_{dims}_full_fwd", knobs)
    assert not differences, [str(d) for d in differences]


def test_causal_tiles_of_different_lengths() -> None:
    _, differences = compare("b1_hq2_hk1_sq384_sk384_d64_dv64_bf16_causal_fwd", "tile_m=192,tile_n=128")
    assert not differences, [str(d) for d in differences]


def test_a_plan_that_is_wrong_is_told_so() -> None:
    problem, config, plan = planned("b1_hq1_hk1_sq128_sk256_d128_dv128_bf16_full_fwd", "tile_m=128")
    call = emulate_forward(problem, config, H200, counters=True, trace=True)
    (result,) = call.results
    assert result.counters is not None
    assert result.trace is not None
    computed, passing = tiles_of(problem, config)
    first = plan.loop.body[0]
    body = (replace(first, waits=first.waits * 2, work=first.work * 2), *plan.loop.body[1:])
    wrong = replace(plan, loop=replace(plan.loop, body=body))
    counts = check_counts(wrong, result.counters, computed)
    assert {(d.role, d.what) for d in counts} == {
        ("load", "smem_tma_write_bytes"),
        ("load", "global_read_bytes"),
    }
    barriers = check_barriers(wrong, result.trace, passing)
    assert [(d.role, d.what, d.executed, d.low) for d in barriers] == [("load", "waits at k_empty", 2, 4)]
    assert "executed 2, planned 4" in str(barriers[0])
