"""The emulator: executes CuTe DSL's PTX on a CPU. Importing this package imports nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fa4tune.emulator.launch import BufferRegion, Launch
    from fa4tune.emulator.machine import Result, run

__all__ = ["BufferRegion", "Launch", "Result", "run"]

_WHERE = {"run": "machine", "Result": "machine", "Launch": "launch", "BufferRegion": "launch"}


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        from importlib import import_module

        return getattr(import_module(f"fa4tune.emulator.{_WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
