from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fa4tune.kernels.tiles import m_blocks, tile_trips, work_tiles
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
    for block in range(m_blocks(problem, rows, packed)):
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
        trips = tile_trips(problem, rows, keys, block, packed)
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


def test_work_tiles_count_heads_and_sequences() -> None:
    problem = AttentionProblem.parse("b3_hq8_hk2_sq100_sk100_d64_dv64_bf16_full_fwd")
    assert work_tiles(problem, 64) == 2 * 8 * 3
    assert work_tiles(problem, 64, packed_heads=4) == 7 * 2 * 3
