"""The SM clock under a power limit: of one kernel over and over, and of several that are measured in turns.

Dynamic power grows as clock times voltage squared, and voltage about as the clock, so that

    power = (busy * active_watts + tensor * tensor_watts + l2 * l2_watts) * (clock / highest clock) ** 3

While tensor cores work, the clock is ``mma_clock`` of what the driver shows (``studies/clock_in_turns.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

from fa4tune.hardware.gpu import Gpu

PAUSE_WATTS = 300.0
"""Power between kernels that are timed in turns, while a flush of L2 writes to HBM: between an H200's 120 W
idle and 550 W of a sweep through HBM."""


def full_watts(gpu: Gpu, busy: float, tensor: float, l2: float) -> float:
    """Power at the highest clock.

    Args:
        gpu: the hardware file.
        busy: share of SM time with a CTA at work.
        tensor: share of time that tensor cores are busy.
        l2: bytes that move from L2 to SMs, as a share of ``l2_bytes_per_clk``.
    """
    return busy * gpu.active_watts + tensor * gpu.tensor_watts + l2 * gpu.l2_watts


def clock_mhz(gpu: Gpu, watts: float) -> float:
    """The SM clock in the long run of a kernel that would take ``watts`` at the highest one."""
    limit = 1.0 if watts <= gpu.power_watts else (gpu.power_watts / watts) ** (1.0 / 3.0)
    return gpu.max_clock_mhz * gpu.mma_clock * limit


def clock_in_turns(gpu: Gpu, cycles: Sequence[float], watts: Sequence[float], pause_us: float) -> float:
    """The one SM clock (MHz) that kernels share which run in turns, a pause before each.

    The power limit holds for the mean over all of them: clocks follow over tens of milliseconds, turns last a
    few.

    Args:
        gpu: the hardware.
        cycles: of each kernel.
        watts: of each at the highest clock (:func:`full_watts`).
        pause_us: before each kernel, at :data:`PAUSE_WATTS`.
    """
    highest = gpu.max_clock_mhz * gpu.mma_clock
    energy = sum(c * w for c, w in zip(cycles, watts, strict=True)) / highest
    pauses = pause_us * len(cycles)
    ratio = 1.0
    for _ in range(60):
        # microjoules at this clock: time goes with its inverse, power with its cube
        used = energy * ratio**2 + pauses * PAUSE_WATTS
        allowed = gpu.power_watts * (sum(cycles) / (highest * ratio) + pauses)
        if used <= allowed * 1.0005 and (ratio == 1.0 or used >= allowed * 0.9995):
            break
        ratio = min(1.0, ratio * (allowed / used) ** (1.0 / 3.0))
    return highest * ratio
