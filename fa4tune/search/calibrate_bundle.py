"""Make a calibration bundle: compiled microbenchmarks and the part of this package that measures them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import fa4tune
from fa4tune.errors import BundleError, CompileError
from fa4tune.kernels.micro.suite import suite
from fa4tune.search.calibrate import MANIFEST, CalibrationManifest
from fa4tune.search.transfer import add_wheel, vendor

VENDORED = (
    "__init__.py",
    "errors.py",
    "kernels/__init__.py",
    "kernels/micro/__init__.py",
    "kernels/micro/suite.py",
    "runtime/__init__.py",
    "runtime/launcher.py",
    "search/__init__.py",
    "search/bundle.py",
    "search/calibrate.py",
    "search/calibrate_worker.py",
    "search/wheels.py",
)
"""Files of this package that a measuring host needs; none imports more than torch and tvm_ffi."""

_ENTRY = '''"""Calibrate this GPU: python calibrate.py [--out DIR] [--budget-seconds S]"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "lib"))

from fa4tune.search.calibrate import main  # noqa: E402

sys.exit(main(bundle=HERE))
'''


def export(
    directory: Path,
    arch: str,
    *,
    python: str | None = "3.12",
    report: Callable[[str], None] = lambda text: None,
) -> CalibrationManifest:
    """Write a bundle for ``arch`` that runs with Python, torch and tvm_ffi alone.

    Args:
        directory: new or empty, or an older bundle, which is replaced.
        arch: compile target.
        python: version on the measuring host, for which a wheel of tvm_ffi comes along; None for no wheel.
        report: told of each kernel that is compiled, and of what could not be had.

    Raises:
        BundleError: the directory holds something else, or cannot be written.
        CompileError: no kernel compiles.
    """
    from fa4tune.kernels.micro.build import SYMBOL, build
    from fa4tune.kernels.toolchain import cuda_flavour, dsl_version

    try:
        if directory.exists() and any(directory.iterdir()) and not (directory / MANIFEST).exists():
            raise BundleError(f"{directory} is not empty and no calibration bundle; give a new directory")
        for part in ("kernels", "lib", "wheels"):
            shutil.rmtree(directory / part, ignore_errors=True)
        (directory / "kernels").mkdir(parents=True)
    except OSError as error:
        raise BundleError(f"{directory} cannot be written ({error.strerror}); give --export DIR") from None
    kernels, missing = {}, {}
    for spec in suite(arch).kernels:
        try:
            built = build(spec, arch, report)
        except CompileError as error:
            missing[spec.name] = str(error)
            report(str(error))
            continue
        file = f"kernels/{spec.name}.so"
        shutil.copyfile(built.library, directory / file)
        kernels[spec.name] = {
            "file": file,
            "symbol": SYMBOL,
            "loop": built.loop,
            "skipped": built.skipped,
            "registers": built.registers,
            "spill_bytes": built.spill_bytes,
        }
    if not kernels:
        raise CompileError(f"no microbenchmark compiled for {arch}: {next(iter(missing.values()))}")
    vendor(directory / "lib" / "fa4tune", VENDORED)
    (directory / "calibrate.py").write_text(_ENTRY)
    if python is not None:
        add_wheel(directory / "wheels", python, report)
    versions = {"cuda": cuda_flavour(), "cutlass_dsl": dsl_version(), "fa4tune": fa4tune.__version__}
    manifest = CalibrationManifest(arch, kernels, missing, versions)
    manifest.write(directory)
    return manifest
