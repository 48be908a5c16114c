"""The Blackwell forward, executed: every pair of factor values that it serves, eagerly and late."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from fa4tune.emulator.attention import EmulatedCall, emulate_forward
from fa4tune.kernels.compile import CompiledKernel, compile_kernel, compile_many
from fa4tune.kernels.exp2 import POLYNOMIALS, emulated_columns
from fa4tune.kernels.inputs import AttentionInputs, gaussian_inputs, heavy_tailed_inputs
from fa4tune.kernels.kernel_class import KernelClass
from fa4tune.kernels.reference import attention, attention_rounded, errors_against, polynomial_exp2
from fa4tune.problem import AttentionProblem
from tests.kernels.sm100.matrix import (
    FACTORS,
    GPU,
    Case,
    drawn_values,
    make_case,
    pairwise_cases,
    refusal,
)

CASES, REFUSED = pairwise_cases()

SAMPLED = 60
"""Kernels that the slow test draws for each of its seeds."""

ALLOWED = 1.3
"""Error against that of float32 with P and O rounded to the dtype."""


def kernel_class(case: Case) -> KernelClass:
    return KernelClass.from_problem(case.problem, case.config, GPU.arch)


@pytest.fixture(scope="module")
def kernels() -> dict[KernelClass, CompiledKernel]:
    """The matrix's kernels, compiled side by side."""
    found = dict(compile_many(kernel_class(case) for case in CASES))
    errors = [str(kernel) for kernel in found.values() if isinstance(kernel, Exception)]
    assert not errors, "\n".join(errors)
    return {key: kernel for key, kernel in found.items() if isinstance(kernel, CompiledKernel)}


def draw(problem: AttentionProblem, number: int) -> AttentionInputs:
    """Gaussian and heavy-tailed inputs in turn, Gaussian where there are few rows.

    Where one key has nearly all the weight, its P is 1 if the row maximum is the true one, and rounded
    if a threshold kept an older one: a single such row may be off by twice the yardstick, which its float32
    row sum does not share. Over a hundred rows that is lost among the others.
    """
    rows = problem.batch * problem.heads * problem.seqlen_q
    heavy = number % 2 == 1 and rows > 100
    generate: Callable[..., AttentionInputs] = heavy_tailed_inputs if heavy else gaussian_inputs
    return generate(
        batch=problem.batch,
        heads=problem.heads,
        kv_heads=problem.kv_heads,
        seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        dtype={"bf16": torch.bfloat16, "fp16": torch.float16}[problem.dtype],
        seed=number,
    )


def check(case: Case, kernel: CompiledKernel, number: int, late: int | None) -> None:
    problem, config = case.problem, case.config
    inputs = draw(problem, number)
    q, k, v = inputs.q, inputs.k, inputs.v
    causal = problem.mask == "causal"
    call: EmulatedCall = emulate_forward(problem, config, GPU, inputs=(q, k, v), late=late, kernel=kernel)
    assert not call.findings
    assert all(result.completed for result in call.results)

    exact, exact_lse = attention(q, k, v, causal=causal)
    exp2 = None
    if config.exp2_degree <= 2:
        columns = emulated_columns(config.tile_n, round(16 * config.exp2_share), config.exp2_start)
        exp2 = polynomial_exp2(POLYNOMIALS[config.exp2_degree], columns)
    rounded, rounded_lse = attention_rounded(q, k, v, causal=causal, exp2=exp2)
    error, yardstick = errors_against(call.out, exact), errors_against(rounded, exact)
    assert error.rms <= ALLOWED * yardstick.rms
    # the row sum of a polynomial of degree 3 is off by its relative error, 8.8e-5
    lse_error = errors_against(call.lse, exact_lse).max
    assert lse_error <= ALLOWED * errors_against(rounded_lse, exact_lse).max + 1e-4


@pytest.mark.parametrize("number", range(len(CASES)), ids=[str(case) for case in CASES])
def test_pairwise_case(number: int, kernels: dict[KernelClass, CompiledKernel]) -> None:
    case = CASES[number]
    kernel = kernels[kernel_class(case)]
    check(case, kernel, number, late=None)
    check(case, kernel, number, late=number)


def test_only_a_causal_pair_is_refused() -> None:
    """Whatever two features are asked for together has a kernel, but for CTA pairs under a causal mask."""
    names = list(FACTORS)
    refused = {frozenset({(names[i], a), (names[j], b)}) for i, a, j, b in REFUSED}
    assert refused == {frozenset({("mask", "causal"), ("cta_group", 2)})}
    values = list(CASES[0].values)
    values[names.index("mask")], values[names.index("cta_group")] = "causal", 2
    reason = refusal(tuple(values))
    assert reason is not None
    assert "cta_group=2 serves the full mask only" in reason


def test_no_kernel_of_the_matrix_spills(kernels: dict[KernelClass, CompiledKernel]) -> None:
    spilled = {str(c): k.spill_bytes for c, k in kernels.items() if k.spill_bytes}
    assert not spilled


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_sample_of_the_whole_product(seed: int) -> None:
    """Kernels drawn from all combinations of factors, one pair of lengths each, late.

    All of them, some 40,000, would take days; a seed takes minutes.
    """
    rng = random.Random(seed)
    failures = []
    for number, values in enumerate(drawn_values(rng, SAMPLED)):
        case = make_case(values)
        try:
            check(case, compile_kernel(kernel_class(case)), number, late=number)
        except AssertionError as error:
            failures.append(f"{case}: {error}")
    assert not failures, "\n".join(failures)
