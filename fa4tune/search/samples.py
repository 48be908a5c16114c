"""Medians, spreads and the test that decides a duel. Standard library only: measuring hosts run this too."""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)

SIGNIFICANCE = 0.01
"""A challenger replaces the default only where chance explains its wins with less than this probability."""


def median(samples: Sequence[float]) -> float:
    """Median of at least one sample."""
    return statistics.median(samples)


def spread(samples: Sequence[float]) -> float:
    """Interquartile range (inclusive method); 0 for a single sample."""
    if len(samples) < 2:
        return 0.0
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return high - low


def sign_test(a: Sequence[float], b: Sequence[float]) -> float:
    """Two-sided p-value of the paired sign test that ``a`` and ``b`` are equally often the smaller one.

    Pairs are samples of one round, so that a clock that moves between rounds moves both. Ties are left out;
    without any other pair the value is 1.
    """
    wins = sum(x < y for x, y in zip(a, b, strict=True))
    losses = sum(x > y for x, y in zip(a, b, strict=True))
    n = wins + losses
    tail = sum(math.comb(n, k) for k in range(min(wins, losses) + 1)) / 2**n if n else 1.0
    return min(1.0, 2 * tail)


def finalists(medians: Mapping[int, float], default: int, count: int) -> list[int]:
    """The default and the ``count`` fastest others, fastest first; what a duel is run between."""
    others = sorted((time, name) for name, time in medians.items() if name != default)
    return [default, *(name for _, name in others[:count])]


def duel_winner(samples: Mapping[Name, Sequence[float]], default: Name | None) -> Name:
    """Who is written to the table: the smallest median, unless it is not significantly below the default's.

    ``samples`` holds one series of equal length a finalist, position by position from the same rounds. Of
    equal medians the first one wins.
    """
    best = min(samples, key=lambda name: median(samples[name]))
    if best == default or default is None or default not in samples:
        return best
    return best if sign_test(samples[best], samples[default]) < SIGNIFICANCE else default
