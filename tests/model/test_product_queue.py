"""The order into which products of several roles fall: that of the plan in which they take turns."""

from __future__ import annotations

import pytest

from fa4tune.errors import ConfigError, InfeasibleError
from fa4tune.hardware.gpu import load_gpu
from fa4tune.kernels.config import default_config
from fa4tune.kernels.plan import Loop
from fa4tune.kernels.program import build_plan
from fa4tune.model.product_queue import queued
from fa4tune.model.skeleton import QUEUE, skeleton
from fa4tune.problem import AttentionProblem


def hopper_loop(tile_m: int, overlap: bool, ping_pong: bool) -> Loop:
    gpu = load_gpu("h200")
    problem = AttentionProblem.parse("b4_hq16_hk16_sq4096_sk4096_d64_dv64_bf16_full_fwd")
    registers = {128: (240, 24), 192: (160, 32), 256: (112, 32)}[tile_m]
    config = default_config(problem, gpu.arch).replace(
        tile_m=tile_m, tile_n=64, registers=registers, kv_stages=2, overlap=overlap, ping_pong=ping_pong
    )
    return build_plan(problem, config, gpu).loop


@pytest.mark.parametrize("tile_m", [128, 192, 256])
@pytest.mark.parametrize("overlap", [True, False])
def test_the_queue_is_the_order_of_the_plan_with_turns(tile_m: int, overlap: bool) -> None:
    free, turns = hopper_loop(tile_m, overlap, False), hopper_loop(tile_m, overlap, True)
    order = queued(free)
    assert order is not None
    assert order.orders[:-1] == free.orders
    assert order.orders[-1].owner == QUEUE
    queue, turn = order.orders[-1], turns.orders[-1]
    assert queue.operations == turn.operations
    assert queue.lags == (turn.lags or (0,) * len(turn.operations))
    assert skeleton(order).turns == skeleton(turns).turns


@pytest.mark.parametrize("tile_m", [128, 192, 256])
def test_roles_that_take_turns_do_not_queue(tile_m: int) -> None:
    assert queued(hopper_loop(tile_m, True, True)) is None


@pytest.mark.parametrize("gpu_name", ["b200", "b300"])
def test_products_of_one_role_do_not_queue(gpu_name: str) -> None:
    gpu = load_gpu(gpu_name)
    problem = AttentionProblem.parse("b4_hq16_hk16_sq4096_sk4096_d128_dv128_bf16_causal_fwd")
    base = default_config(problem, gpu.arch)
    seen = 0
    for knob in base.knobs():
        for value in base.choices(knob):
            try:
                plan = build_plan(problem, base.replace(**{knob: value}), gpu)
            except (ConfigError, InfeasibleError):
                continue
            assert queued(plan.loop) is None
            seen += 1
    assert seen > 5
