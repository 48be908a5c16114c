"""Instruction tests run on both back-ends: their references know neither."""

from __future__ import annotations

import pytest

from fa4tune.emulator.native.backend import unavailable

BOTH = (
    "test_integer_instructions", "test_float_instructions", "test_memory_and_warps",
    "test_asynchronous_copies", "test_matrix_instructions", "test_checks",
)  # fmt: skip


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__.rpartition(".")[2] in BOTH:
        metafunc.parametrize("emulator_backend", ["plain", "native"], indirect=True)


@pytest.fixture(autouse=True)
def emulator_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The back-end that the emulator takes by default."""
    name = getattr(request, "param", None)
    if name is None:
        return
    if name == "native" and unavailable() is not None:
        pytest.skip(f"no native back-end: {unavailable()}")
    monkeypatch.setenv("FA4TUNE_EMULATOR", name)
