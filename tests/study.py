"""Studies are scripts beside the package: tests load them by name."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load_study(name: str) -> ModuleType:
    """The module of ``studies/NAME.py``, registered under its name as a run of it would be."""
    path = Path(__file__).parents[1] / "studies" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
