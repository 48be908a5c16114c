"""The one package that a measuring host may lack: TVM-FFI, from a wheel that travels with the bundle."""

from __future__ import annotations

import os
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path


def provide_tvm_ffi(bundle: Path) -> tempfile.TemporaryDirectory[str] | None:
    """Make ``tvm_ffi`` importable from the bundle's wheel where it is not installed.

    Returns:
        the directory it was unpacked to, to be kept while measuring; None if it is installed or no wheel of
        this Python came along (the worker then says what is missing).
    """
    if find_spec("tvm_ffi") is not None:
        return None
    wheels = [w for w in sorted(bundle.glob("wheels/apache_tvm_ffi-*.whl")) if _fits(w.name)]
    if not wheels:
        return None
    folder = tempfile.TemporaryDirectory(prefix="fa4tune-")
    for wheel in [wheels[0], *bundle.glob("wheels/typing_extensions-*.whl")]:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder.name)
    paths = [folder.name, os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return folder


def _fits(wheel: str) -> bool:
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return f"-{tag}-" in wheel or "-abi3-" in wheel or "-none-" in wheel
