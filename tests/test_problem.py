from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa4tune.errors import ProblemError
from fa4tune.problem import AttentionProblem

masks = st.one_of(
    st.sampled_from(["full", "causal"]),
    st.builds(lambda left, right: f"win{left}-{right}", st.integers(0, 14), st.integers(0, 14)),
)
problems = st.builds(
    lambda b, group, hk, q, k, d, dv, dtype, mask, direction: AttentionProblem(
        b, group * hk, hk, q, k, d, dv, dtype, mask, direction
    ),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 14),
    st.integers(1, 14),
    st.sampled_from([64, 128, 192]),
    st.sampled_from([64, 128]),
    st.sampled_from(["bf16", "fp16"]),
    masks,
    st.sampled_from(["fwd", "bwd", "bwd_det"]),
)


@given(problems)
def test_canonical_string_parses_back(problem: AttentionProblem) -> None:
    assert AttentionProblem.parse(str(problem)) == problem


@given(problems)
def test_visible_pairs_equals_the_count_of_unmasked_pairs(problem: AttentionProblem) -> None:
    left, right = problem.window
    shift = problem.seqlen_k - problem.seqlen_q
    seen = sum(
        (left is None or key >= row + shift - left) and (right is None or key <= row + shift + right)
        for row in range(problem.seqlen_q)
        for key in range(problem.seqlen_k)
    )
    assert problem.visible_pairs() == seen
    assert sum(problem.visible_keys(row) for row in range(problem.seqlen_q)) == seen


def test_flops_follow_the_two_conventions() -> None:
    causal = AttentionProblem.parse("b4_hq16_hk16_sq4096_sk4096_d128_dv128_bf16_causal_fwd")
    full = AttentionProblem.parse("b4_hq16_hk16_sq4096_sk4096_d128_dv128_bf16_full_fwd")
    backward = AttentionProblem.parse("b4_hq16_hk16_sq4096_sk4096_d128_dv128_bf16_full_bwd")
    assert full.flops_convention() == full.flops() == 4 * 4096**2 * 128 * 16 * 4
    assert causal.flops_convention() == full.flops() / 2
    assert causal.flops() == full.flops() * (4096 + 1) / (2 * 4096)
    assert backward.flops() == 2.5 * full.flops()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("b4_hq16", "not a problem"),
        ("b4_hq16_hk3_sq8_sk8_d64_dv64_bf16_full_fwd", "kv_heads=3 does not divide heads=16"),
        ("b4_hq16_hk16_sq8_sk8_d64_dv64_fp32_full_fwd", "dtype 'fp32'"),
        ("b4_hq16_hk16_sq8_sk8_d64_dv64_bf16_diagonal_fwd", "mask 'diagonal'"),
        ("b0_hq16_hk16_sq8_sk8_d64_dv64_bf16_full_fwd", "batch must be a positive integer, got 0"),
    ],
)
def test_bad_problem_gives_one_sentence_with_the_value(text: str, words: str) -> None:
    with pytest.raises(ProblemError, match=words) as caught:
        AttentionProblem.parse(text)
    assert "\n" not in str(caught.value)
