"""One BLAS thread for the emulator's small matrix products: threads of a busy machine wait for each other."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np


@cache
def _library() -> Any:
    """The OpenBLAS that NumPy's wheel carries, or None (another BLAS, another naming)."""
    folder = Path(np.__file__).parent.parent / "numpy.libs"
    for path in folder.glob("libscipy_openblas*.so*"):
        try:
            library = ctypes.CDLL(str(path))
            library.scipy_openblas_get_num_threads64_.restype = ctypes.c_int
            library.scipy_openblas_set_num_threads64_.argtypes = [ctypes.c_int]
        except (OSError, AttributeError):
            continue
        return library
    return None


@contextmanager
def single_thread() -> Iterator[None]:
    """Limit NumPy's BLAS to one thread inside the context, where it can be limited."""
    library = _library()
    if library is None:
        yield
        return
    before = library.scipy_openblas_get_num_threads64_()
    library.scipy_openblas_set_num_threads64_(1)
    try:
        yield
    finally:
        library.scipy_openblas_set_num_threads64_(before)
