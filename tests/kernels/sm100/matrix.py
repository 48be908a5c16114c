"""Cases of the Blackwell forward: every pair of factor values that the kernel serves, in few kernels."""

from __future__ import annotations

import dataclasses
import itertools
import random
from dataclasses import dataclass
from typing import Any

from fa4tune.errors import ConfigError, InfeasibleError
from fa4tune.hardware.gpu import load_gpu
from fa4tune.kernels.config import ROW_SUMS, SM100ForwardConfig
from fa4tune.kernels.sm100.forward_plan import HEAD_DIMS, build_plan
from fa4tune.problem import AttentionProblem

GPU = dataclasses.replace(load_gpu("b200"), sm_count=4)
"""Few SMs, so that persistent CTAs go through several output tiles."""

LENGTHS = (1, 127, 129, 1000)

KERNEL_FACTORS: dict[str, tuple[Any, ...]] = {
    "dims": HEAD_DIMS,
    "mask": ("full", "causal"),
    "cta_group": (1, 2),
    "dtype": ("bf16", "fp16"),
    "group": (1, 4, 6),
    "threshold": (0.0, 8.0),
    "degree": (2, 3, 5),
    "q_tiles": (1, 2),
    "scheduler": ("single", "persistent", "lpt"),
    "p_split": (0.5, 0.75, 1.0),
    "row_sum": ROW_SUMS,
    "tile_n": (64, 128, 160),
}
FACTORS = {**KERNEL_FACTORS, "seqlen_q": LENGTHS, "seqlen_k": LENGTHS}


@dataclass(frozen=True, slots=True)
class Case:
    """A problem and a config, with the factor values that they came from."""

    values: tuple[Any, ...]
    problem: AttentionProblem
    config: SM100ForwardConfig

    def __str__(self) -> str:
        p, c = self.problem, self.config
        return (
            f"{p.head_dim}x{p.head_dim_v}-{p.dtype}-{p.mask}-g{p.gqa_group}-{p.seqlen_q}x{p.seqlen_k}"
            f"-cta{c.cta_group}-q{c.q_tiles}-n{c.tile_n}-t{c.rescale_threshold:g}-deg{c.exp2_degree}"
            f"-split{c.p_split:g}-{c.row_sum}-{c.scheduler}"
        )

    @property
    def kernel(self) -> tuple[Any, ...]:
        """Values of the factors that are compiled in."""
        return self.values[: len(KERNEL_FACTORS)]


def make_case(values: tuple[Any, ...]) -> Case:
    """The case of one value a factor.

    Raises:
        InfeasibleError, ConfigError: the kernel refuses it, with the reasons.
    """
    v = dict(zip(FACTORS, values, strict=True))
    d, dv = v["dims"]
    # one query row gives few numbers to take an error from
    kv_heads, batch = (4, 4) if v["seqlen_q"] == 1 else (1, 1)
    problem = AttentionProblem(
        batch, kv_heads * v["group"], kv_heads, v["seqlen_q"], v["seqlen_k"], d, dv, v["dtype"], v["mask"]
    )
    stages = {64: 4, 96: 3, 128: 2, 192: 2}[d] * v["cta_group"]
    config = SM100ForwardConfig(
        tile_n=v["tile_n"],
        kv_stages=stages,
        q_tiles=v["q_tiles"],
        cta_group=v["cta_group"],
        exp2_share=0.25,
        exp2_degree=v["degree"],
        exp2_start=0,
        rescale_threshold=v["threshold"],
        p_split=v["p_split"],
        row_sum=v["row_sum"],
        scheduler=v["scheduler"],
    )
    build_plan(problem, config, GPU)
    return Case(values, problem, config)


def refusal(values: tuple[Any, ...]) -> str | None:
    """Why the kernel refuses a combination, or None."""
    try:
        make_case(values)
    except (InfeasibleError, ConfigError) as error:
        return str(error)
    return None


def _costly(values: tuple[Any, ...]) -> bool:
    """Whether the emulator would take a minute: a million scores of six heads."""
    v = dict(zip(FACTORS, values, strict=True))
    return v["seqlen_q"] * v["seqlen_k"] * v["group"] > 2_000_000


def drawn_values(rng: random.Random, count: int) -> list[tuple[Any, ...]]:
    """``count`` combinations of factor values that have a kernel and are no burden on the emulator."""
    choices, found = list(FACTORS.values()), []
    while len(found) < count:
        values = tuple(rng.choice(options) for options in choices)
        if not _costly(values) and refusal(values) is None:
            found.append(values)
    return found


def _pairs(values: tuple[Any, ...]) -> set[tuple[int, Any, int, Any]]:
    indexed = list(enumerate(values))
    return {(i, a, j, b) for (i, a), (j, b) in itertools.combinations(indexed, 2)}


def all_pairs() -> set[tuple[int, Any, int, Any]]:
    """Every pair of values of two factors."""
    pairs = set()
    for (i, a_values), (j, b_values) in itertools.combinations(enumerate(FACTORS.values()), 2):
        pairs |= {(i, a, j, b) for a in a_values for b in b_values}
    return pairs


def pairwise_cases(seed: int = 7, tries: int = 200) -> tuple[list[Case], set[tuple[int, Any, int, Any]]]:
    """Cases that together hold every pair of values that some feasible case holds, and the pairs left over.

    Greedy: the best of ``tries`` random feasible completions of an uncovered pair, again and again. Then each
    kernel gets one more pair of lengths, so that every head dim meets most combinations of lengths.
    """
    rng = random.Random(seed)
    choices = list(FACTORS.values())
    open_pairs, impossible = all_pairs(), set()
    cases: list[Case] = []
    while open_pairs:
        pair = min(open_pairs, key=repr)
        best: tuple[int, tuple[Any, ...]] | None = None
        for _ in range(tries):
            drawn = [rng.choice(options) for options in choices]
            drawn[pair[0]], drawn[pair[2]] = pair[1], pair[3]
            values = tuple(drawn)
            gain = len(_pairs(values) & open_pairs)
            if (best is None or gain > best[0]) and not _costly(values) and refusal(values) is None:
                best = gain, values
        if best is None:
            impossible.add(pair)
            open_pairs.remove(pair)
            continue
        cases.append(make_case(best[1]))
        open_pairs -= _pairs(best[1])
    met = {(case.values[0], case.values[-2:]) for case in cases}
    for case in list(cases):
        free = [
            lengths
            for lengths in itertools.product(LENGTHS, LENGTHS)
            if (case.values[0], lengths) not in met
            and not _costly((*case.kernel, *lengths))
            and refusal((*case.kernel, *lengths)) is None
        ]
        if free:
            lengths = rng.choice(free)
            met.add((case.values[0], lengths))
            cases.append(make_case((*case.kernel, *lengths)))
    return cases, impossible
