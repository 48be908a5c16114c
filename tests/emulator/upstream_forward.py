"""Compile flash-attn-4's forward on a machine without a GPU: ``python upstream_forward.py ARCH D MASK DIR``.

A process of its own, as upstream reads the architecture from the environment once. Writes ``kernel.o`` and
``kernel.ptx`` to DIR. Fake tensors stand in for CUDA ones.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from importlib import import_module
from pathlib import Path
from typing import Any

SM_COUNT = {"sm_90a": 132, "sm_100a": 148}


class _Hardware:
    """What upstream asks the driver, which is not here."""

    def __init__(self, *_: object) -> None:
        self.sms = SM_COUNT[os.environ["CUTE_DSL_ARCH"]]

    def get_max_active_clusters(self, size: int) -> int:
        return self.sms // size

    def get_device_multiprocessor_count(self) -> int:
        return self.sms


def _import_quack_without_triton() -> None:
    """quack's package imports its autotuner, which needs Triton; its modules do not."""
    if importlib.util.find_spec("triton") is None and "quack" not in sys.modules:
        spec = importlib.util.find_spec("quack")
        assert spec is not None
        assert spec.submodule_search_locations
        package = types.ModuleType("quack")
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules["quack"] = package
        import_module("quack.dsl")


def main(arch: str, head_dim: int, mask: str, folder: Path) -> None:
    """Compile one kernel."""
    dump = folder / "dump"
    dump.mkdir(parents=True, exist_ok=True)
    os.environ.update(
        CUTE_DSL_ARCH=arch,
        FLASH_ATTENTION_ARCH=arch[:-1],
        FLASH_ATTENTION_NUM_SMS=str(SM_COUNT[arch]),
        CUTE_DSL_KEEP="ptx",
        CUTE_DSL_DUMP_DIR=str(dump),
    )
    import cutlass
    import cutlass.cute as cute
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    _import_quack_without_triton()
    cutlass.utils.HardwareInfo = _Hardware
    compiled: list[Any] = []
    real = cute.compile

    class Recorder:
        """Stands for ``cute.compile`` and keeps what it returned."""

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            compiled.append(real(*args, **kwargs))
            return compiled[-1]

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    cute.compile = Recorder()
    from flash_attn.cute import interface

    with FakeTensorMode():
        q, k, v = (torch.empty(1, 1024, 1, head_dim, dtype=torch.bfloat16, device="cuda") for _ in range(3))
        interface._flash_attn_fwd(q, k, v, causal=mask == "causal", return_lse=True)
    compiled[0].export_to_c(object_file_path=str(folder / "kernel.o"), function_name="kernel")
    (folder / "kernel.ptx").write_text(compiled[0].__ptx__)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
