from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fa4tune.kernels.tiles import HeadTrips, Trips, ceil_div, m_blocks, tile_trips, work_tiles
from fa4tune.problem import AttentionProblem


@given(
    st.integers(1, 70),
    st.integers(1, 70),
    st.sampled_from(["full", "causal", "win5-3", "win0-0", "win20-40"]),
    st.sampled_from([8, 16]),
    st.sampled_from([4, 12]),
    st.sampled_from([1, 2, 4]),
)
def test_trips_cover_every_visible_pair_and_mask_only_where_needed(
    seqlen_q: int, seqlen_k: int, mask: str, rows: int, keys: int, packed: int
) -> None:
    problem = AttentionProblem(1, 4, 4 // packed, seqlen_q, seqlen_k, 64, 64, "bf16", mask)
    left, right = problem.window
    shift = seqlen_k - seqlen_q
    head = tile_trips(problem, rows, keys, packed)
    assert len(head) == m_blocks(problem, rows, packed)
    assert head.total == sum(head[n].total for n in range(len(head)))
    assert head.masked == sum(head[n].masked for n in range(len(head)))
    for block in range(len(head)):
        positions = sorted(
            {r // packed for r in range(block * rows, (block + 1) * rows)} & set(range(seqlen_q))
        )

        def visible(row: int, key: int) -> bool:
            return (
                key < seqlen_k
                and (left is None or key >= row + shift - left)
                and (right is None or key <= row + shift + right)
            )

        needed = {k // keys for row in positions for k in range(seqlen_k) if visible(row, k)}
        trips = head[block]
        if not needed:
            assert trips.total == 0 or mask.startswith("win")
            continue
        assert trips.total == max(needed) - min(needed) + 1
        clear = [
            b
            for b in range(min(needed), max(needed) + 1)
            if all(visible(row, k) for row in positions for k in range(b * keys, (b + 1) * keys))
        ]
        assert trips.masked == trips.total - len(clear)


def one_tile(problem: AttentionProblem, rows: int, keys: int, block: int, packed: int) -> Trips:
    """The same arithmetic for one tile in Python's integers."""
    first = block * rows // packed
    last = min(problem.seqlen_q - 1, ((block + 1) * rows - 1) // packed)
    shift = problem.seqlen_k - problem.seqlen_q

    def seen(row: int) -> int:
        return problem.seqlen_k if problem.mask == "full" else max(0, min(problem.seqlen_k, row + shift + 1))

    total = ceil_div(seen(last), keys)
    return Trips(total, total - seen(first) // keys)


@given(
    st.integers(1, 10**6),
    st.integers(1, 10**9),
    st.sampled_from(["full", "causal"]),
    st.sampled_from([64, 192, 256]),
    st.sampled_from([48, 128, 176]),
    st.sampled_from([1, 4]),
    st.data(),
)
def test_trips_of_long_heads_are_those_of_each_tile(
    seqlen_q: int, seqlen_k: int, mask: str, rows: int, keys: int, packed: int, data: st.DataObject
) -> None:
    problem = AttentionProblem(1, 4, 4 // packed, seqlen_q, seqlen_k, 64, 64, "bf16", mask)
    head = tile_trips(problem, rows, keys, packed)
    assert len(head) == m_blocks(problem, rows, packed)
    for block in {0, len(head) - 1, data.draw(st.integers(0, len(head) - 1))}:
        assert head[block] == one_tile(problem, rows, keys, block, packed)
    assert head.longest == head[len(head) - 1].total
    assert head.uniform == (len(set(zip(head.totals.tolist(), head.masks.tolist(), strict=True))) == 1)


def test_masked_at_least_never_masks_more_iterations_than_there_are() -> None:
    problem = AttentionProblem.parse("b1_hq1_hk1_sq500_sk300_d64_dv64_bf16_causal_fwd")
    plain, least = tile_trips(problem, 64, 96), tile_trips(problem, 64, 96, least=2)
    for n in range(len(plain)):
        assert least[n] == Trips(plain[n].total, max(plain[n].masked, min(2, plain[n].total)))
    assert plain.total == least.total
    assert plain.masked < least.masked


def test_trips_are_keys_of_caches_by_value() -> None:
    made = [HeadTrips(np.array([1, 2, 3]), np.array([1, 1, 1])) for _ in range(2)]
    assert made[0] == made[1]
    assert hash(made[0]) == hash(made[1])
    assert made[0] != HeadTrips(np.array([1, 3, 2]), np.array([1, 1, 1]))


def test_work_tiles_count_heads_and_sequences() -> None:
    problem = AttentionProblem.parse("b3_hq8_hk2_sq100_sk100_d64_dv64_bf16_full_fwd")
    assert work_tiles(problem, 64) == 2 * 8 * 3
    assert work_tiles(problem, 64, packed_heads=4) == 7 * 2 * 3
