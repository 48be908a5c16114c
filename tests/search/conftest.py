"""A small search space, so that whole searches take a second."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from fa4tune.kernels.config import KernelConfig, SM90ForwardConfig, SM100ForwardConfig

SMALL: dict[type[KernelConfig], dict[str, tuple[Any, ...]]] = {
    SM90ForwardConfig: {
        "tile_m": (128, 192),
        "tile_n": (64, 96, 128, 160),
        "kv_stages": (1, 2, 3),
        "exp2_share": (0.0, 0.125),
        "exp2_degree": (2, 3),
        "registers": ((),),
        "scheduler": ("persistent", "lpt"),
    },
    SM100ForwardConfig: {
        "tile_n": (64, 96, 128),
        "kv_stages": (2, 3, 5),
        "exp2_share": (0.0, 0.125),
        "exp2_start": (0, 1),
        "registers": ((), (192, 72, 56)),
        "scheduler": ("persistent", "lpt"),
    },
}


@pytest.fixture(scope="session")
def small_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where rankings of the small space are kept."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def small_space(monkeypatch: pytest.MonkeyPatch, small_cache: Path) -> None:
    """Knobs with few choices, rankings of their own, one process."""

    def choices(cls: type[KernelConfig], name: str) -> tuple[Any, ...]:
        return SMALL[cls].get(name, (cls.knobs()[name].default,))

    monkeypatch.setattr(KernelConfig, "choices", classmethod(choices))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    monkeypatch.setenv("FA4TUNE_CACHE", str(small_cache))
