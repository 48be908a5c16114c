"""The clock under a power limit: what it must satisfy, and clocks that a profiler read."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4tune.hardware.gpu import load_gpu
from fa4tune.model.power import PAUSE_WATTS, clock_in_turns, clock_mhz, full_watts

GPU = load_gpu("h200", fitted=False)
HIGHEST = GPU.max_clock_mhz * GPU.mma_clock


def mean_watts(cycles: list[float], watts: list[float], clock: float, pause_us: float) -> float:
    """Energy over time at ``clock``, power going with its cube."""
    times = [c / clock for c in cycles]
    energy = sum(t * w * (clock / HIGHEST) ** 3 for t, w in zip(times, watts, strict=True))
    pauses = pause_us * len(cycles)
    return (energy + pauses * PAUSE_WATTS) / (sum(times) + pauses)


kernels = st.lists(st.tuples(st.floats(1e4, 1e7), st.floats(200.0, 1600.0)), min_size=1, max_size=12)


@given(kernels, st.floats(0.0, 500.0))
@settings(max_examples=300, deadline=None)
def test_turns_meet_the_power_limit_or_run_at_the_highest_clock(
    found: list[tuple[float, float]], pause_us: float
) -> None:
    cycles, watts = [c for c, _ in found], [w for _, w in found]
    clock = clock_in_turns(GPU, cycles, watts, pause_us)
    assert 0.0 < clock <= HIGHEST
    if mean_watts(cycles, watts, HIGHEST, pause_us) <= GPU.power_watts:
        assert clock == HIGHEST
    else:
        assert mean_watts(cycles, watts, clock, pause_us) == pytest.approx(GPU.power_watts, rel=1e-3)


@given(st.floats(1e4, 1e7), st.floats(200.0, 1600.0))
@settings(max_examples=100, deadline=None)
def test_one_kernel_without_pauses_has_the_clock_of_the_long_run(cycles: float, watts: float) -> None:
    assert clock_in_turns(GPU, [cycles], [watts], 0.0) == pytest.approx(clock_mhz(GPU, watts), rel=1e-3)


@given(kernels)
@settings(max_examples=100, deadline=None)
def test_longer_pauses_never_lower_the_clock(found: list[tuple[float, float]]) -> None:
    cycles, watts = [c for c, _ in found], [w for _, w in found]
    clocks = [clock_in_turns(GPU, cycles, watts, pause) for pause in (0.0, 50.0, 5000.0)]
    assert clocks[0] <= clocks[1] * 1.001 <= clocks[2] * 1.002


def test_clock_keeps_power_at_the_limit() -> None:
    assert clock_mhz(GPU, 0.9 * GPU.power_watts) == HIGHEST
    for tensor in (0.6, 0.8, 1.0):
        watts = full_watts(GPU, 1.0, tensor, 1.0)
        assert watts > GPU.power_watts
        assert watts * (clock_mhz(GPU, watts) / HIGHEST) ** 3 == pytest.approx(GPU.power_watts)
    assert full_watts(GPU, 0.0, 0.0, 0.0) == 0.0
    assert full_watts(GPU, 0.5, 0.5, 0.5) == pytest.approx(0.5 * full_watts(GPU, 1.0, 1.0, 1.0))


def test_a_higher_limit_allows_a_higher_clock() -> None:
    more = dataclasses.replace(GPU, power_watts=1.2 * GPU.power_watts)
    assert clock_mhz(more, 1200.0) == pytest.approx(1.2 ** (1 / 3) * clock_mhz(GPU, 1200.0))
