"""The Blackwell forward plan: published cycles, counts, order, ring reuse, refusals with their numbers."""

from __future__ import annotations

import itertools

import pytest

from fa4tune.errors import InfeasibleError
from fa4tune.hardware.gpu import Gpu, load_gpu
from fa4tune.kernels.config import SM100ForwardConfig, default_config
from fa4tune.kernels.plan import KernelPlan, total_work
from fa4tune.kernels.sm100 import forward_plan
from fa4tune.kernels.sm100.forward_plan import build_plan, packed_heads, ring_reuse
from fa4tune.problem import AttentionProblem

B200 = load_gpu("b200")
PLAIN = {"exp2_share": 0.0, "cta_group": 1, "kv_stages": 2}


def problem(
    d: int = 128,
    dv: int | None = None,
    mask: str = "full",
    dtype: str = "bf16",
    group: int = 1,
    sk: int = 4096,
) -> AttentionProblem:
    return AttentionProblem(2, 4 * group, 4, 4096, sk, d, dv or d, dtype, mask)


def plan(config: str = "", gpu: Gpu = B200, **of: object) -> KernelPlan:
    base = SM100ForwardConfig(**PLAIN)  # type: ignore[arg-type]
    return build_plan(problem(**of), base.with_text(config), gpu)  # type: ignore[arg-type]


def refusal(config: str, **of: object) -> str:
    with pytest.raises(InfeasibleError) as caught:
        plan(config, **of)
    return " | ".join(caught.value.reasons)


@pytest.mark.parametrize(
    ("tile", "dims", "mma", "smem", "exp"),
    [
        (128, (128, 128), 1024, 768, 1024),
        (256, (128, 128), 2048, 1536, 2048),
        (128, (64, 64), 512, 384, 1024),
        (256, (64, 64), 1024, 768, 2048),
        (256, (192, 128), 2560, 2048, 2048),
    ],
)
def test_plan_sums_are_the_published_cycles(
    tile: int, dims: tuple[int, int], mma: int, smem: int, exp: int
) -> None:
    """Table 1 of arXiv 2603.05451 and what its formulas give for other head dims."""
    found = plan(f"q_tiles={tile // 128}", d=dims[0], dv=dims[1])
    work = total_work(op for op in found.loop.body if op.when not in ("masked", "rescaled"))
    assert work.mma_flops / B200.mma_flops_per_clk == mma
    assert work.smem_mma_bytes / B200.smem_bytes_per_clk == smem
    assert work.exp / B200.exp_per_clk == exp


def test_emulation_moves_exponentials_off_the_unit() -> None:
    for share in (1 / 16, 2 / 16, 3 / 16, 4 / 16):
        work = total_work(plan(f"exp2_share={share}").loop.body)
        scales = 2 * 128  # of rescaled iterations, one a row
        assert work.exp_emulated == 2 * 128 * 128 * share
        assert work.exp - scales == 2 * 128 * 128 * (1 - share)


def test_pair_halves_what_a_cta_stages_and_reads_of_k_and_v() -> None:
    one, two = plan("kv_stages=3"), plan("cta_group=2,kv_stages=3")
    work_one, work_two = total_work(one.loop.body), total_work(two.loop.body)
    assert work_two.mma_flops == work_one.mma_flops
    assert work_two.smem_tma_write_bytes * 2 == work_one.smem_tma_write_bytes
    # QK reads 128 rows of Q and half of K, PV half of V: 0.75 and 0.5 of one CTA's
    assert work_two.smem_mma_bytes * 3 == work_one.smem_mma_bytes * 2
    assert two.tile_rows == 512
    assert two.ctas_per_tile == 2


@pytest.mark.parametrize(
    "config",
    ["", "q_tiles=1", "p_split=1.0", "cta_group=2", "scheduler=single", "kv_stages=5,q_tiles=2"],
)
def test_each_phase_of_a_barrier_is_waited_for(config: str) -> None:
    """One tile's arrivals complete as many phases as each waiting warp goes through, at any trip count."""
    found = plan(config)
    ctas = found.ctas_per_tile
    body = [op for op in (*found.prologue, *found.loop.body, *found.epilogue) if op.when != "once"]
    for barrier in found.barriers:
        # commits reach both CTAs of a pair; threads of both arrive where the pair's MMA warp waits
        by_mma = any(barrier.name in op.signals for op in body if op.role == "mma")
        per_phase = ctas if by_mma else barrier.arrivals // (ctas if barrier.name[0] == "p" else 1)
        by_warp = 4 if barrier.name in ("scale_full", "sum_full") else 1  # one stage a warp
        waiting = {op.role for op in body if barrier.name in op.waits}
        warps = sum(found.role(role).warps for role in waiting) // (2 if "softmax1" in waiting else 1)
        for trips in (1, 2, 7):
            counts = found.barrier_counts(trips).items()
            drained = sum(op.waits.count(barrier.name) for op in found.epilogue if op.when == "once")
            arrivals = sum(arrived for (_, name), (_, arrived) in counts if name == barrier.name)
            waits = sum(waited for (_, name), (waited, _) in counts if name == barrier.name) - drained
            assert arrivals * warps == waits * per_phase * by_warp, (barrier.name, trips)


def test_mma_order_unrolls_into_prologue_loop_and_tail() -> None:
    def unroll(found: KernelPlan, trips: int) -> list[tuple[str, int]]:
        order = next(o for o in found.loop.orders if o.owner == "mma")
        return [
            (name, turn - lag)
            for turn in range(trips + 1)
            for name, lag in zip(order.operations, order.lags, strict=True)
            if 0 <= turn - lag < trips
        ]

    whole = [("qk0", 0), ("qk1", 0), ("pv0", 0), ("qk0", 1), ("pv1", 0), ("qk1", 1), ("pv0", 1), ("pv1", 1)]
    assert unroll(plan("p_split=1.0"), 2) == whole
    assert unroll(plan("p_split=1.0,q_tiles=1"), 2) == [("qk0", 0), ("qk0", 1), ("pv0", 0), ("pv0", 1)]


@pytest.mark.parametrize("q_tiles", [1, 2])
@pytest.mark.parametrize("stages", range(1, 9))
def test_ring_reuse_is_what_walking_the_ring_shows(q_tiles: int, stages: int) -> None:
    trips = 20
    if q_tiles == 2:
        sequence = [(name, i) for i in range(trips) for name in ("load_k", "load_v")]
    else:
        sequence = [("load_k", 0)]
        for i in range(trips):
            sequence += [("load_k", i + 1), ("load_v", i)]
    steady = {
        (name, sequence[at - stages][0], i - sequence[at - stages][1])
        for at, (name, i) in enumerate(sequence)
        if at >= stages and 8 < i < trips - 2
    }
    assert set(ring_reuse(q_tiles, stages)) == steady


def test_three_stage_ring_reuses_at_distances_one_and_two() -> None:
    assert ring_reuse(2, 3) == (("load_k", "load_v", 2), ("load_v", "load_k", 1))


def test_every_cycle_of_the_loop_has_a_distance_above_zero() -> None:
    """Otherwise an operation would wait for itself: Bellman-Ford finds no cycle of distance <= 0."""
    for config in (
        "",
        "q_tiles=1",
        "p_split=1.0,kv_stages=2",
        "kv_stages=3,cta_group=2",
        "tile_n=96,q_tiles=1",
    ):
        loop = plan(config).loop
        edges = [*loop.dependencies, *(e for order in loop.orders for e in order.dependencies())]
        names = [op.name for op in loop.body]
        assert {e.source for e in edges} | {e.target for e in edges} <= set(names)
        # weigh an edge by its distance minus a little: a cycle of distance 0 is then negative
        reach = dict.fromkeys(names, 0.0)
        for _ in names:
            for edge in edges:
                reach[edge.target] = min(reach[edge.target], reach[edge.source] + edge.distance - 1e-3)
        assert all(reach[e.source] + e.distance - 1e-3 >= reach[e.target] - 1e-9 for e in edges), (
            f"a cycle without distance in {config!r}"
        )


def test_counts_grow_by_the_body_with_each_trip() -> None:
    found = plan("")
    body = total_work(op for op in found.loop.body if op.when != "masked")
    for trips in (2, 5, 33):
        more, less = found.counts(trips + 1), found.counts(trips)
        grown = sum(w.mma_flops for w in more.values()) - sum(w.mma_flops for w in less.values())
        assert grown == body.mma_flops
        assert less["mma"].mma_flops == trips * 2 * 4 * 128 * 128 * 128
        assert less["load"].smem_tma_write_bytes == (2 + 2 * trips) * 128 * 128 * 2
        assert less["softmax0"].tmem_load_bytes == trips * 128 * 128 * 4
        assert less["softmax1"].tmem_store_bytes == trips * 128 * 128 * 2


def test_buffers_do_not_overlap_and_fit() -> None:
    for dims in ((64, 64), (96, 96), (128, 128), (192, 128)):
        for mask in ("full", "causal"):
            case = problem(*dims, mask=mask)
            found = build_plan(case, default_config(case, "sm_100a"), B200)
            for space, limit in (("smem", B200.smem_per_cta), ("tmem", 512)):
                spans = sorted(
                    (b.offset, b.offset + b.total)
                    for b in found.buffers
                    if b.space == space and not b.overlays
                )
                assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
                assert spans[-1][1] <= limit
            barriers = sorted((b.offset, b.offset + 8 * b.stages) for b in found.barriers)
            assert all(end <= start for (_, end), (start, _) in itertools.pairwise(barriers))
            assert barriers[0][0] >= found.buffer("stats").offset + found.buffer("stats").total
            assert barriers[-1][1] + 4 <= found.resources.smem_bytes <= B200.smem_per_cta
            for name in ("q", "kv", "o"):
                assert found.buffer(name).offset % 1024 == 0
                assert found.buffer(name).size % 1024 == 0


def test_o_takes_the_place_of_q_only_where_it_must() -> None:
    assert plan("kv_stages=3").buffer("o").overlays is None
    assert plan("kv_stages=2", d=192, dv=128).buffer("o").overlays == "q"


@pytest.mark.parametrize(
    ("config", "of", "words"),
    [
        ("kv_stages=6", {}, ("232448", "kv_stages=5 fits")),
        ("tile_n=144", {}, ("544 TMEM columns", "tile_n=128 fits")),
        ("registers=208/80/64", {}, ("71680", "65536")),
        ("registers=104/80/64", {}, ("104", "128 scores")),
        ("registers=120/80/64", {}, ("120", "the 128 it starts with")),
        ("registers=128/80/136", {}, ("136", "the 128 of the launch")),
        ("rescale_threshold=16", {"dtype": "fp16"}, ("2^16", "65504")),
        ("rescale_threshold=120", {}, ("4096 keys", "float32")),
        ("cta_group=2", {"mask": "causal"}, ("cta_group=2", "causal")),
        ("cta_group=2,tile_n=112", {}, ("tile_n=112", "32")),
        ("exp2_degree=4", {}, ("exp2_degree=4 has no effect",)),
        ("exp2_start=0", {}, ("exp2_start=0 has no effect",)),
        ("exp2_share=1,exp2_start=2", {}, ("16/16", "64")),
        ("kv_stages=1", {}, ("deadlock",)),
        ("tile_n=16,p_split=0.75", {}, ("p_split=0.75", "16 keys")),
        ("", {"mask": "win64-0"}, ("win64-0",)),
        ("", {"d": 512, "dv": 512}, ("head_dim=512", "no tile_n fits")),
        ("", {"d": 80}, ("head_dim=80", "192 with 128")),
    ],
)
def test_refusal_names_the_numbers(config: str, of: dict[str, object], words: tuple[str, ...]) -> None:
    text = refusal(config, **of)
    for word in words:
        assert word in text


def test_every_reason_is_given_at_once() -> None:
    with pytest.raises(InfeasibleError) as caught:
        plan("tile_n=176,kv_stages=10,cta_group=2,exp2_degree=2,registers=232/80/64", mask="causal")
    assert len(caught.value.reasons) == 6


def test_bfloat16_takes_a_threshold_that_half_cannot() -> None:
    assert plan("rescale_threshold=16").config.rescale_threshold == 16  # type: ignore[attr-defined]


@pytest.mark.parametrize(("group", "packed"), [(1, 1), (3, 1), (4, 4), (6, 2), (8, 8), (256, 128)])
def test_packed_heads_is_the_power_of_two_in_the_group(group: int, packed: int) -> None:
    assert packed_heads(problem(group=group)) == packed


def test_defaults_of_every_class_are_feasible() -> None:
    for gpu, dims, mask, dtype, group, sq in itertools.product(
        (B200, load_gpu("b300")),
        forward_plan.HEAD_DIMS,
        ("full", "causal"),
        ("bf16", "fp16"),
        (1, 8),
        (1, 127, 1000, 8192),
    ):
        case = AttentionProblem(1, 8, 8 // group, sq, max(sq, 100), *dims, dtype, mask)
        config = default_config(case, gpu.arch)
        assert isinstance(config, SM100ForwardConfig)
        found = build_plan(case, config, gpu)
        assert found.tile_rows == 128 * config.q_tiles * config.cta_group


def test_rescale_rate_falls_with_the_threshold() -> None:
    rates = [forward_plan.rescale_rate(t, 128, 65536) for t in (0.0, 1.0, 4.0, 8.0)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > 0.1
    assert rates[-1] == 0.0
