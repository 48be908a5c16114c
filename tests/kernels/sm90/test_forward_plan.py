"""The Hopper forward plan: budgets, reasons, counts and order, as arithmetic."""

from __future__ import annotations

from itertools import pairwise

import pytest

from fa4tune.errors import ConfigError, InfeasibleError
from fa4tune.hardware.gpu import load_gpu
from fa4tune.kernels.config import SM90ForwardConfig, default_config
from fa4tune.kernels.plan import KernelPlan, total_work
from fa4tune.kernels.sm90.forward_plan import (
    OWN,
    Arrangement,
    build_plan,
    cta_trips,
    emulated_registers,
    wait_register,
    warpgroup_trips,
)
from fa4tune.problem import AttentionProblem

H200 = load_gpu("h200")
D64 = "b1_hq2_hk1_sq1000_sk1000_d64_dv64_bf16_full_fwd"
D128 = "b1_hq2_hk1_sq1000_sk1000_d128_dv128_bf16_full_fwd"


def plan_of(text: str, knobs: str = "") -> KernelPlan:
    return build_plan(AttentionProblem.parse(text), SM90ForwardConfig().with_text(knobs), H200)


def reasons_of(text: str, knobs: str) -> str:
    with pytest.raises(InfeasibleError) as caught:
        plan_of(text, knobs)
    return "; ".join(caught.value.reasons)


@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_default_config_is_feasible(dims: tuple[int, int], mask: str) -> None:
    problem = AttentionProblem(2, 4, 2, 4096, 4096, *dims, mask=mask)
    config = default_config(problem, "sm_90a")
    assert isinstance(config, SM90ForwardConfig)
    plan = build_plan(problem, config, H200)
    assert plan.resources.smem_bytes <= plan.resources.smem_limit
    assert plan.resources.registers <= plan.resources.registers_limit


def test_buffers_do_not_overlap_and_are_aligned_for_the_swizzle() -> None:
    plan = plan_of(D64, "tile_m=192,p_in_registers=false,kv_stages=3")
    own = sorted((b for b in plan.buffers if b.overlays is None), key=lambda b: b.offset)
    assert [b.name for b in own] == ["q", "k", "v", "o", "p"]
    for buffer, following in pairwise(own):
        assert buffer.offset + buffer.total <= following.offset
    assert all(b.offset % 1024 == 0 for b in plan.buffers)
    assert own[-1].offset + own[-1].total == plan.resources.smem_bytes
    barrier_end = max(b.offset + 8 * b.stages for b in plan.barriers if b.kind == "mbarrier")
    assert barrier_end <= own[0].offset


def test_o_takes_the_place_of_q_unless_the_next_q_is_loaded_early() -> None:
    assert plan_of(D64, "scheduler=single").buffer("o").overlays == "q"
    assert plan_of(D64, "scheduler=persistent").buffer("o").overlays is None


@pytest.mark.parametrize(
    ("text", "knobs", "reason"),
    [
        (D128, "kv_stages=4", "bytes of SMEM (q 32768, k 131072, v 131072, o 32768) exceed the 232448"),
        (D64, "tile_m=128,ctas_per_sm=2,tile_n=128,kv_stages=3", "with ctas_per_sm=2"),
        (D64, "tile_m=256,tile_n=128", "need about 156 registers, an MMA thread has 112"),
        (D64, "tile_m=64,ping_pong=true", "two warpgroups to take turns"),
        (D64, "exp2_degree=2", "no effect while exp2_share=0"),
        (D64, "tile_n=64,exp2_share=0.0625", "no whole number of the 8 register pairs"),
        (D64.replace("bf16", "fp16"), "rescale_threshold=16", "fp16 holds up to 2^15"),
        (D64, "rescale_threshold=120", "past float32"),
        (D64.replace("full", "win64-0"), "", "no Hopper kernel"),
        (D64.replace("d64_dv64", "d72_dv64"), "", "head_dim=72 has no kernel"),
        (D64, "registers=168/40", "the launch allocates"),
    ],
)
def test_refusal_names_numbers(text: str, knobs: str, reason: str) -> None:
    tile = "" if "tile_m" in knobs else "tile_m=192," if "registers" in knobs else "tile_m=128,"
    assert reason in reasons_of(text, tile + knobs)


def test_every_reason_is_listed() -> None:
    text = reasons_of(D64, "tile_m=64,ping_pong=true,exp2_degree=2")
    assert "take turns" in text
    assert "no effect" in text


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1000), (127, 129), (1000, 1000), (513, 200)])
def test_warpgroups_cover_every_visible_key_and_mask_where_needed(
    mask: str, seqlen_q: int, seqlen_k: int
) -> None:
    config = SM90ForwardConfig(tile_m=192, tile_n=96)
    problem = AttentionProblem(1, 1, 1, seqlen_q, seqlen_k, 64, 64, mask=mask)
    for m_block in range(-(-seqlen_q // 192)):
        for w in range(3):
            trips = warpgroup_trips(problem, config, m_block, w)
            rows = [r for r in range(m_block * 192 + 64 * w, m_block * 192 + 64 * w + 64) if r < seqlen_q]
            seen = max((problem.visible_keys(r) for r in rows), default=0)
            clear = min((problem.visible_keys(r) for r in rows), default=0)
            assert trips.total == max(1, -(-seen // 96))
            assert 1 <= trips.masked <= trips.total
            assert (trips.total - trips.masked) * 96 <= clear
            assert trips.total <= cta_trips(problem, config, m_block)


def test_work_of_a_tile_by_formula() -> None:
    """A 192 x 128 tile at d=64: FLOPs 2 M N (d + dv); SMEM reads (64 + N) d + N dv a warpgroup, 2 bytes."""
    plan = plan_of(D64, "tile_m=192")
    body = [op.work for op in plan.loop.body if op.when != "masked"]
    assert sum(w.mma_flops for w in body) == 2 * 192 * 128 * 128
    assert sum(w.smem_mma_bytes for w in body) == 3 * 2 * ((64 + 128) * 64 + 128 * 64)
    # and two exponentials a thread for the factor of the maximum that moved
    assert sum(w.exp for w in body) == 192 * 128 + 3 * 128 * 2


def test_emulated_share_counts() -> None:
    assert sum(emulated_registers(128, 0.25)) == 16
    plan = plan_of(D64, "tile_m=192,exp2_share=0.25")
    assert sum(op.work.exp_emulated for op in plan.loop.body) == 192 * 128 // 4


def test_wait_for_pv_stands_at_a_whole_k_step() -> None:
    for tile_n in range(16, 257, 16):
        assert wait_register(tile_n, True) % 8 == 0
        assert wait_register(tile_n, True) <= tile_n // 4
    assert wait_register(128, False) == 0


@pytest.mark.parametrize("eighths", [0, 1, 4])
@pytest.mark.parametrize("together", [False, True])
def test_an_arrangement_moves_work_and_adds_none(eighths: int, together: bool) -> None:
    config = SM90ForwardConfig().with_text("exp2_share=0.25,tile_n=128")
    problem = AttentionProblem.parse(D128)
    own, other = (
        build_plan(problem, config, H200, arrangement)
        for arrangement in (OWN, Arrangement(eighths, together))
    )
    assert total_work(other.loop.body) == total_work(own.loop.body)
    names = [operation.name for operation in other.loop.body]
    assert ("exp0_first" in names) == (eighths > 0)
    assert {op.together for op in other.loop.body if op.work.exp_emulated} == {together}


def test_an_arrangement_has_a_wait_within_the_exponentials() -> None:
    for eighths in (-1, 8):
        with pytest.raises(ConfigError, match=f"wait_eighths must be 0 to 7, not {eighths}"):
            Arrangement(eighths)


def test_scarce_registers_cost_instructions() -> None:
    def beyond(knobs: str, tile_n: int) -> int:
        """Instructions of an iteration that are not in proportion to its keys, as those of few keys are."""
        few, more, many = (
            total_work(plan_of(D64, f"{knobs},tile_n={n}").loop.body).issue for n in (48, 64, tile_n)
        )
        return many - few - (more - few) * (tile_n - 48) // 16

    # P's addresses are kept, or computed in every iteration: 11 or 70 instructions of 8 warps
    assert beyond("p_in_registers=false", 128) == 0
    assert beyond("p_in_registers=false", 240) == 8 * 59


def test_turns_order_the_matrix_work_of_all_warpgroups() -> None:
    plan = plan_of(D64, "tile_m=192,ping_pong=true")
    turn = next(o for o in plan.loop.orders if o.owner == "turn")
    assert turn.operations == ("qk0", "pv0", "qk1", "pv1", "qk2", "pv2")
    assert not [o for o in plan_of(D64, "tile_m=192").loop.orders if o.owner == "turn"]
