"""Explanations: what binds, where the time goes and what would help most must not contradict each other."""

from __future__ import annotations

import dataclasses
import random
from functools import cache

import pytest

from fa4tune.errors import ConfigError, InfeasibleError
from fa4tune.hardware.gpu import load_gpu
from fa4tune.kernels.config import default_config
from fa4tune.kernels.plan import Unit
from fa4tune.kernels.program import build_plan
from fa4tune.model.explain import RATE_NAMES, Explanation, explain, in_words, paragraphs, shares
from fa4tune.problem import AttentionProblem

RATE_OF = {"tensor cores": "mma", "exponential unit": "exp", "shared memory": "smem", "tensor memory": "tmem"}


def explained(text: str, gpu_name: str, **knobs: object) -> Explanation:
    problem, gpu = AttentionProblem.parse(text), load_gpu(gpu_name)
    config = default_config(problem, gpu.arch).replace(**knobs)
    return explain(build_plan(problem, config, gpu), gpu, changes=False)


@cache
def many() -> tuple[Explanation, ...]:
    """Random problems and configs, short and long, a single query to many."""
    rng = random.Random(5)
    found: list[Explanation] = []
    while len(found) < 150:
        keys = rng.choice([256, 512, 1024, 4096, 16384])
        queries = rng.choice([keys, keys, keys, 1, 16])
        heads = rng.choice([4, 16, 32])
        dim, mask = rng.choice([64, 128]), rng.choice(["full", "causal"])
        gpu = load_gpu(rng.choice(["h100", "h200", "b200", "b300"]))
        batch = max(1, rng.choice([8192, 65536]) // keys)
        problem = AttentionProblem(batch, heads, heads, queries, keys, dim, dim, "bf16", mask)
        config = default_config(problem, gpu.arch)
        try:
            for knob in rng.sample(sorted(config.knobs()), rng.randint(0, 3)):
                config = config.replace(**{knob: rng.choice(config.choices(knob))})
            found.append(explain(build_plan(problem, config, gpu), gpu, changes=False))
        except (ConfigError, InfeasibleError):
            continue
    return tuple(found)


def test_the_rate_named_first_is_the_one_that_helps_most() -> None:
    for explanation in many():
        top = max(explanation.gains, key=explanation.gains.__getitem__)
        last = paragraphs(explanation)[-1]
        if explanation.gains[top] >= 0.05:
            assert f"would help most: {RATE_NAMES[top]} (1% more gives {explanation.gains[top]:.2f}%" in last
        else:
            assert last.startswith("No single rate")


def test_where_something_else_helps_more_than_what_binds_the_text_says_where() -> None:
    told = 0
    for explanation in many():
        bound, text = explanation.prediction.bound, in_words(explanation)
        top = max(explanation.gains, key=explanation.gains.__getitem__)
        if explanation.gains[top] < 0.05:
            continue
        if bound in RATE_OF and RATE_OF[bound] != top:
            beside, chain = "counts beside the steady state of the loop", "takes as long as the " + bound
            assert beside in text or chain in text, (bound, explanation.gains)
            told += 1
        elif bound == "memory" and top != "hbm":
            assert "neither can gain much without the other" in text
            told += 1
        elif bound == "latency chain" and top == "hbm":
            assert "counts beside the steady state of the loop: where tiles start" in text
            told += 1
    assert told


def test_shares_of_the_time_add_up() -> None:
    for explanation in many():
        part = shares(explanation.prediction)
        assert all(-1e-9 <= share <= 1 + 1e-9 for share in part.values())
        assert sum(share for name, share in part.items() if name != "idle") == pytest.approx(1.0)


def test_a_loop_that_is_not_nearly_all_is_said_to_be_so() -> None:
    for explanation in many():
        few = shares(explanation.prediction)["loop"] < 0.8
        spoken = explanation.prediction.bound not in ("launch", "memory")
        assert ("The loop is" in in_words(explanation)) == (few and spoken)


@pytest.mark.parametrize("seqlen", [4096, 32768])
def test_tensor_cores_that_also_wait_for_operands_are_what_binds(seqlen: int) -> None:
    problem = AttentionProblem.parse(f"b1_hq16_hk16_sq{seqlen}_sk{seqlen}_d128_dv128_bf16_full_fwd")
    # arithmetic so quick that only the tensor cores are left
    gpu = dataclasses.replace(load_gpu("h200").scaled(exp=4.0, issue=4.0), turn_latency_clk=0.0)
    config = default_config(problem, gpu.arch).replace(ping_pong=True)
    told = explain(build_plan(problem, config, gpu), gpu, changes=False)
    assert told.prediction.bound == "tensor cores"
    assert max(told.gains, key=told.gains.__getitem__) == "mma"
    waits = 1 - told.cycles[Unit.TENSOR] / told.prediction.period
    assert 0.03 < waits < 0.5
    words = in_words(told)
    assert f"tensor cores are full (for {waits:.0%} of the time they wait for operands in shared" in words


def test_shared_memory_binds_where_it_is_full() -> None:
    problem = AttentionProblem.parse("b1_hq4_hk4_sq16384_sk16384_d128_dv128_bf16_causal_fwd")
    gpu = load_gpu("b300").scaled(smem=0.7)
    config = default_config(problem, gpu.arch).replace(q_tiles=1, exp2_share=0.0)
    told = explain(build_plan(problem, config, gpu), gpu, changes=False)
    assert told.prediction.bound == "shared memory"
    assert max(told.gains, key=told.gains.__getitem__) == "smem"
    assert "the shared memory is full" in in_words(told)


def test_idle_places_are_mentioned_where_tiles_are_few() -> None:
    few = explained("b1_hq16_hk16_sq128_sk16384_d128_dv128_bf16_full_fwd", "h200")
    assert shares(few.prediction)["idle"] > 0.8  # 16 tiles for 132 CTAs
    assert "Places for CTAs stand idle 8" in in_words(few)
    many_tiles = explained("b4_hq16_hk16_sq8192_sk8192_d128_dv128_bf16_full_fwd", "h200")
    assert "stand idle" not in in_words(many_tiles)


def test_steps_of_the_chain_stand_beside_the_rate_that_shortens_them() -> None:
    told = explained("b4_hq16_hk16_sq8192_sk8192_d128_dv128_bf16_full_fwd", "b200")
    assert told.prediction.bound == "latency chain"
    exps = [name for name in told.prediction.critical_cycle if name.startswith("exp")]
    assert exps
    helps = paragraphs(told)[-1]
    assert all(name in helps.split(", then ")[0] for name in exps)
