"""Programs that nobody wrote: registers, predicates and counters equal on both back-ends."""

from __future__ import annotations

import numpy as np
import pytest

from fa4tune.emulator.machine import Result, run
from tests.emulator.emulator_harness import kernel, launch_of
from tests.emulator.native.random_programs import FLOATS, INTS, random_body


def execute(seed: int, backend: str, threads: int, late: int | None) -> tuple[np.ndarray, np.ndarray, Result]:
    extra, body, words = random_body(seed)
    rng = np.random.default_rng(seed)
    inputs = rng.integers(0, 1 << 32, (threads, words["inputs"]), dtype=np.uint64).astype(np.uint32)
    inputs[:, 0] = rng.integers(0, 5, threads)
    inputs[:, INTS : INTS + FLOATS] = rng.uniform(-8, 8, (threads, FLOATS)).astype(np.float32).view(np.uint32)
    ints = np.zeros((threads, words["ints"]), np.uint32)
    floats = np.zeros((threads, words["floats"]), np.float32)
    ptx = kernel(body, 3, extra=extra)
    result = run(
        ptx, launch_of([inputs, ints, floats], threads=threads), backend=backend, counters=True, late=late
    )
    assert result.completed, [str(f) for f in result.findings]
    return ints, floats, result


@pytest.mark.parametrize("seed", range(60))
def test_same_bits_and_counts(seed: int) -> None:
    threads = (64, 32, 50)[seed % 3]
    plain_ints, plain_floats, plain = execute(seed, "plain", threads, None)
    native_ints, native_floats, native = execute(seed, "native", threads, seed if seed % 4 == 0 else None)
    assert (plain_ints == native_ints).all()
    same = plain_floats.view(np.uint32) == native_floats.view(np.uint32)
    assert (same | (np.isnan(plain_floats) & np.isnan(native_floats))).all()
    assert plain.counters == native.counters
    assert plain.warp_instructions == native.warp_instructions
