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
def library() -> Any:
    """The OpenBLAS that NumPy's wheel carries, or None (another BLAS, another naming)."""
    folder = Path(np.__file__).parent.parent / "numpy.libs"
    for path in folder.glob("libscipy_openblas*.so*"):
        try:
            found = ctypes.CDLL(str(path))
            found.scipy_openblas_get_num_threads64_.restype = ctypes.c_int
            found.scipy_openblas_set_num_threads64_.argtypes = [ctypes.c_int]
        except (OSError, AttributeError):
            continue
        return found
    return None


@contextmanager
def single_thread() -> Iterator[None]:
    """Limit NumPy's BLAS to one thread inside the context, where it can be limited."""
    blas = library()
    if blas is None:
        yield
        return
    before = blas.scipy_openblas_get_num_threads64_()
    blas.scipy_openblas_set_num_threads64_(1)
    try:
        yield
    finally:
        blas.scipy_openblas_set_num_threads64_(before)
