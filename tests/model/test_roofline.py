"""The roofline against published cycle tables: sums over plan operations must give them at any tile."""

from __future__ import annotations

import math

import pytest

from fa4tune.hardware.gpu import load_gpu
from fa4tune.kernels.config import SM90ForwardConfig, SM100ForwardConfig
from fa4tune.kernels.plan import Unit
from fa4tune.kernels.program import build_plan
from fa4tune.model.roofline import (
    iteration_cycles,
    iteration_work,
    problem_work,
    roofline,
    smem_cycles,
    unit_cycles,
)
from fa4tune.problem import AttentionProblem


def _problem(head_dim: int, head_dim_v: int, mask: str = "full", seqlen: int = 4096) -> AttentionProblem:
    return AttentionProblem(1, 8, 8, seqlen, seqlen, head_dim, head_dim_v, "bf16", mask)


@pytest.mark.parametrize(
    ("q_tiles", "dims", "tensor", "smem", "exp"),
    [
        # FlashAttention-4 (arXiv 2603.05451), table 1
        (1, (128, 128), 1024, 768, 1024),
        (2, (128, 128), 2048, 1536, 2048),
        # the same formulas at other head dims; V of head dim 64 is read as a 64-wide operand
        (1, (64, 64), 512, 384, 1024),
        (2, (64, 64), 1024, 768, 2048),
        (2, (192, 128), 2560, 2048, 2048),
    ],
)
def test_blackwell_plan_reproduces_the_published_cycles(
    q_tiles: int, dims: tuple[int, int], tensor: float, smem: float, exp: float
) -> None:
    gpu = load_gpu("b200")
    config = SM100ForwardConfig(q_tiles=q_tiles, exp2_share=0.0, kv_stages=2)
    plan = build_plan(_problem(*dims), config, gpu)
    cycles = iteration_cycles(plan, gpu)
    assert cycles[Unit.TENSOR] == tensor
    assert smem_cycles(iteration_work(plan), gpu).mma == smem
    assert cycles[Unit.EXP] == pytest.approx(exp, rel=2e-3)  # and one power of two a row for the rescale


@pytest.mark.parametrize(
    ("tile_m", "tile_n", "dim"),
    [
        (tile_m, tile_n, dim)
        for tile_m, widest in ((64, 176), (128, 176), (192, 80), (256, 48))
        for tile_n in (48, 80, 128, 176)
        for dim in (64, 128)
        if tile_n <= widest and (tile_m < 256 or dim == 64)  # the rest does not fit the registers
    ],
)
def test_hopper_plan_follows_the_formula_at_any_tile(tile_m: int, tile_n: int, dim: int) -> None:
    gpu = load_gpu("h200")
    config = SM90ForwardConfig(tile_m=tile_m, tile_n=tile_n, kv_stages=1)
    plan = build_plan(_problem(dim, dim), config, gpu)
    cycles = iteration_cycles(plan, gpu)
    work = iteration_work(plan)
    assert cycles[Unit.TENSOR] == 2 * tile_m * tile_n * 2 * dim / 4096
    assert (
        smem_cycles(work, gpu).mma == math.ceil(tile_m / 64) * ((64 + tile_n) * dim + tile_n * dim) * 2 / 128
    )
    assert tile_m * tile_n <= work.exp <= tile_m * (tile_n + 4)


def test_two_cta_pair_halves_the_b_operand() -> None:
    gpu = load_gpu("b200")
    config = SM100ForwardConfig(exp2_share=0.0, kv_stages=2)
    one = iteration_work(build_plan(_problem(128, 128), config, gpu))
    two = iteration_work(build_plan(_problem(128, 128), config.replace(cta_group=2), gpu))
    assert two.mma_flops == one.mma_flops
    # QK reads A (1 unit) and B, PV only B: B halves, per Q tile of 256 cycles a 128x128 operand
    assert one.smem_mma_bytes - two.smem_mma_bytes == 2 * (256 + 256) // 2 * 128
    assert two.smem_tma_write_bytes * 2 == one.smem_tma_write_bytes


def test_emulation_moves_exponentials_and_nothing_is_lost() -> None:
    gpu = load_gpu("b200")
    none = build_plan(_problem(128, 128), SM100ForwardConfig(exp2_share=0.0), gpu)
    part = build_plan(_problem(128, 128), SM100ForwardConfig(exp2_share=0.25), gpu)
    a, b = iteration_work(none), iteration_work(part)
    assert b.exp_emulated == 256 * 128 // 4
    assert a.exp == b.exp + b.exp_emulated
    assert b.fma > a.fma


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_matrix_work_of_the_problem_covers_its_flops(mask: str) -> None:
    gpu = load_gpu("b200")
    problem = _problem(128, 128, mask, seqlen=4000)
    plan = build_plan(problem, SM100ForwardConfig(kv_stages=2), gpu)
    work = problem_work(plan)
    assert problem.flops() <= work.mma_flops < 1.6 * problem.flops()


def test_binding_unit_is_the_slowest() -> None:
    gpu = load_gpu("b200")
    plan = build_plan(_problem(64, 64), SM100ForwardConfig(exp2_share=0.0), gpu)
    bounds = roofline(plan, gpu)
    assert bounds.bound == Unit.EXP
    assert bounds.time == max(bounds.seconds.values())
    doubled = gpu.scaled(exp=4)
    assert (
        roofline(build_plan(_problem(64, 64), SM100ForwardConfig(exp2_share=0.0), doubled), doubled).bound
        != Unit.EXP
    )


def test_single_query_is_bound_by_memory() -> None:
    gpu = load_gpu("b200")
    problem = AttentionProblem(64, 32, 32, 1, 8192, 128, 128)
    config = SM100ForwardConfig(q_tiles=1, kv_stages=2)
    bounds = roofline(build_plan(problem, config, gpu), gpu)
    assert bounds.seconds[Unit.HBM] > bounds.seconds[Unit.TENSOR]


def test_cycles_scale_with_the_rate_alone() -> None:
    gpu = load_gpu("b200")
    work = iteration_work(build_plan(_problem(128, 128), SM100ForwardConfig(), gpu))
    fast = gpu.scaled(exp=2, smem=4, mma=8)
    before, after = unit_cycles(work, gpu), unit_cycles(work, fast)
    assert after[Unit.EXP] * 2 == before[Unit.EXP]
    assert after[Unit.SMEM] * 4 == before[Unit.SMEM]
    assert after[Unit.TENSOR] * 8 == before[Unit.TENSOR]
    assert after[Unit.ISSUE] == before[Unit.ISSUE]
