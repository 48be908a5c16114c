"""Run a winner that no GPU here can run: its kernel class and config in the emulator, on a small problem."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from fa4tune.errors import CompileError, EmulationError, SearchError
from fa4tune.hardware.gpu import Gpu
from fa4tune.kernels.config import KernelConfig
from fa4tune.kernels.program import build_plan
from fa4tune.problem import AttentionProblem

TILES = 3
"""Key tiles of the small problem: a prologue, a steady iteration and an epilogue, the last tile cut short."""


def stand_in(problem: AttentionProblem, config: KernelConfig, gpu: Gpu) -> AttentionProblem:
    """A problem of the same class: one kv head, a tile and a row of queries, about three tiles of keys."""
    plan = build_plan(problem, config, gpu)
    rows = plan.tile_rows + 1
    keys = TILES * plan.tile_n - 5
    return dataclasses.replace(
        problem,
        batch=1,
        heads=problem.gqa_group,
        kv_heads=1,
        seqlen_q=min(problem.seqlen_q, rows),
        seqlen_k=min(problem.seqlen_k, keys if problem.mask == "full" else max(keys, rows)),
    )


def run_in_emulator(
    problem: AttentionProblem, config: KernelConfig, gpu: Gpu, note: Callable[[str], None]
) -> str:
    """``emulated`` if the config's kernel ran and was right, ``absent`` if it cannot be run here.

    It runs with asynchronous work as late as the synchronisation allows, so that a missing wait shows.

    Raises:
        SearchError: it ran and was wrong; such a config belongs in no table.
    """
    from fa4tune.emulator.attention import emulate_forward

    small = stand_in(problem, config, gpu)
    try:
        call = emulate_forward(small, config, gpu, late=0)
    except (CompileError, EmulationError, ImportError) as error:
        note(f"the winner was not run in the emulator: {error}")
        return "absent"
    if not call.passed:
        faults = "; ".join(f.message for f in call.findings[:2]) or f"error {call.out_error:.2g}"
        raise SearchError(
            f"the winner {config} gives a wrong result on {small} in the emulator ({faults}); report it, and "
            f"search with --no-emulate to see the prediction all the same"
        )
    return "emulated"
