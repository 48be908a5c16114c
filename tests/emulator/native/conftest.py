"""Both back-ends on the same launch, and what must be equal."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from fa4tune.emulator.native.backend import unavailable


@pytest.fixture(autouse=True)
def native_or_skip() -> None:
    """Skip where there is no native back-end."""
    if unavailable() is not None:
        pytest.skip(f"no native back-end: {unavailable()}")
