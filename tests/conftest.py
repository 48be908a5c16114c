"""Options and skips of the whole suite."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-slow", action="store_true", help="also run tests marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reasons: dict[str, str] = {}
    if not config.getoption("--run-slow"):
        reasons["slow"] = "slow; give --run-slow"
    if importlib.util.find_spec("flash_attn") is None:
        reasons["peers"] = "flash-attn-4 is not installed (pip install 'fa4tune[peers]')"
    if not _has_gpu():
        reasons["gpu"] = "no CUDA GPU here"
    for item in items:
        for marker, reason in reasons.items():
            if marker in item.keywords:
                item.add_marker(pytest.mark.skip(reason=reason))


def _has_gpu() -> bool:
    return any(Path(p).exists() for p in ("/proc/driver/nvidia/version", "/dev/nvidia0"))


@pytest.fixture(autouse=True)
def own_directories(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep tests out of the user's data: tables and studies go to a fresh directory."""
    monkeypatch.setenv("FA4TUNE_TABLE", str(tmp_path_factory.mktemp("table")))
    monkeypatch.setenv("FA4TUNE_STUDIES", str(tmp_path_factory.mktemp("studies")))
    none = tmp_path_factory.mktemp("packaged")  # what the package ships must not decide what a test sees
    monkeypatch.setattr("fa4tune.table.store.packaged_directory", lambda: none)
