"""fa4tune: predict, explain, search and run FlashAttention-4 style kernels.

Names below load on first use, so that ``import fa4tune`` needs neither torch nor the kernel compiler.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fa4tune.errors import Fa4tuneError
    from fa4tune.hardware.gpu import Gpu, load_gpu
    from fa4tune.kernels.config import default_config
    from fa4tune.outcome import Outcome
    from fa4tune.problem import AttentionProblem
    from fa4tune.runtime.attention import flash_attn_func, prepare

__version__ = "0.1.0"

_EXPORTS = {
    "AttentionProblem": "fa4tune.problem",
    "Fa4tuneError": "fa4tune.errors",
    "Gpu": "fa4tune.hardware.gpu",
    "Outcome": "fa4tune.outcome",
    "default_config": "fa4tune.kernels.config",
    "flash_attn_func": "fa4tune.runtime.attention",
    "load_gpu": "fa4tune.hardware.gpu",
    "prepare": "fa4tune.runtime.attention",
}

__all__ = [
    "AttentionProblem",
    "Fa4tuneError",
    "Gpu",
    "Outcome",
    "default_config",
    "flash_attn_func",
    "load_gpu",
    "prepare",
]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'fa4tune' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
