"""``fa4tune calibrate``: measure the GPU at hand and write its numbers as a hardware file."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fa4tune.cli.common import ArchOption, GpuOption, JsonOption, emit_json, note
from fa4tune.errors import HardwareError, SearchError

if TYPE_CHECKING:
    from fa4tune.hardware.gpu import Gpu
    from fa4tune.model.calibration import Calibration, Measurements

COMPUTE_CAPABILITIES = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}
"""Compute capability -> compile target."""


def calibrate(
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE.toml", help="Hardware file to write.")
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option("--export", metavar="DIR", help="Write a bundle for a host without compiler, and stop."),
    ] = None,
    import_: Annotated[
        Path | None,
        typer.Option("--import", metavar="DIR", help="Read what DIR/calibrate.py measured instead."),
    ] = None,
    gpu: GpuOption = None,
    arch: ArchOption = None,
    python: Annotated[
        str, typer.Option("--python", help="Python of the measuring host, with --export.")
    ] = "3.12",
    budget_seconds: Annotated[
        float | None, typer.Option("--budget-seconds", help="Start no new measurement after this long.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Measure unit rates, latencies, bandwidths, clock and power; write them as a GPU of one's own.

    The file starts from the GPU that it is nearest to (or --gpu) and replaces what was measured, each number
    with its source. Use it as --gpu FILE.toml. On a host without compiler: --export DIR here, python
    DIR/calibrate.py there, --import DIR back here.
    """
    from fa4tune.hardware.gpu import choose_gpu, load_gpu
    from fa4tune.model.calibration import Measurements, base_gpu
    from fa4tune.model.calibration import calibrate as apply_rules
    from fa4tune.search.calibrate import read_results

    if export is not None and (import_ is not None or out is not None):
        raise HardwareError("--export only writes a bundle; give --out and --import in a run of their own")
    if out is not None and out.suffix != ".toml":
        raise HardwareError(f"--out {str(out)!r} must end in .toml, as --gpu tells files by that")
    if export is not None:
        _export(export, choose_gpu(gpu, arch).arch, python, json)
        return
    if import_ is not None:
        manifest, lines = read_results(import_)
    else:
        manifest, lines = _measure_here(budget_seconds)
    if arch is not None and arch != manifest.arch:
        raise HardwareError(f"--arch {arch} was given and {manifest.arch} was measured; leave --arch out")
    measured = Measurements.from_lines(lines, manifest.kernels)
    base = base_gpu(measured.environment) if gpu is None else load_gpu(gpu)
    if base.arch != manifest.arch:
        raise HardwareError(
            f"--gpu {gpu} is {base.arch} and {manifest.arch} was measured; give a GPU of {manifest.arch}"
        )
    calibration = apply_rules(measured, base)
    path = out or Path(f"{calibration.name}.toml")
    _write(path, calibration)
    if json:
        emit_json(_as_dict(path, calibration, measured, base))
    else:
        _show(path, calibration, measured, base)


def _export(directory: Path, arch: str, python: str, json: bool) -> None:
    from fa4tune.search.calibrate_bundle import export

    manifest = export(directory, arch, python=python, report=lambda text: note(f"compiling {text}"))
    size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    note(
        f"{len(manifest.kernels)} kernels for {arch}, {size / 1e6:.1f} MB; on the GPU's host run "
        f"python {directory.name}/calibrate.py, then here fa4tune calibrate --import {directory}"
    )
    if json:
        emit_json(
            {
                "directory": str(directory),
                "arch": arch,
                "kernels": len(manifest.kernels),
                "missing": manifest.missing,
                "bytes": size,
            }
        )


def _measure_here(budget_seconds: float | None) -> tuple[Any, list[dict[str, Any]]]:
    """Compile for the GPU at hand and measure it.

    Raises:
        SearchError: there is no GPU here, or none that there are kernels for.
    """
    from fa4tune.search.calibrate import measure, read_results
    from fa4tune.search.calibrate_bundle import export

    arch = _arch_here()
    with tempfile.TemporaryDirectory(prefix="fa4tune-calibrate-") as name:
        bundle = Path(name)
        note(f"compiling microbenchmarks for {arch}; those of an earlier calibration are kept")
        export(bundle, arch, python=None, report=lambda text: note(f"compiling {text}"))
        measure(bundle, bundle / "results", budget_seconds=budget_seconds, report=note)
        return read_results(bundle)


def _arch_here() -> str:
    import torch

    if not torch.cuda.is_available():
        raise SearchError(
            "no CUDA GPU is visible here; calibrate --export DIR --arch sm_90a makes a bundle that measures "
            "elsewhere"
        )
    capability = torch.cuda.get_device_capability(0)
    if capability not in COMPUTE_CAPABILITIES:
        raise SearchError(
            f"{torch.cuda.get_device_name(0)} has compute capability {capability[0]}.{capability[1]}; "
            f"there are kernels for {', '.join(f'{a}.{b}' for a, b in COMPUTE_CAPABILITIES)}"
        )
    return COMPUTE_CAPABILITIES[capability]


def _write(path: Path, calibration: Calibration) -> None:
    from fa4tune.hardware.gpu import load_gpu

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(calibration.to_toml())
    except OSError as error:
        raise HardwareError(f"{path} cannot be written ({error.strerror}); give --out FILE.toml") from None
    load_gpu(str(path.resolve()))  # a file that could not be read back must not be reported as written


def _as_dict(path: Path, calibration: Calibration, measured: Measurements, base: Gpu) -> dict[str, Any]:
    return {
        "file": str(path),
        "base": calibration.base,
        "environment": dict(measured.environment),
        "numbers": {
            n.field: {"value": n.value, "base": getattr(base, n.field), "source": n.source}
            for n in calibration.numbers
        },
        "left_out": dict(calibration.left_out),
        "doubts": list(calibration.doubts),
        "failed": dict(measured.failed),
        "probes": {
            name: {"cycles": line["cycles"], "rate": line["rate"], "unit": line["unit"]}
            for name, line in measured.probes.items()
        },
        "loads": {
            name: {key: line[key] for key in ("clock_mhz", "watts", "cycles") if key in line}
            for name, line in measured.loads.items()
        },
    }


def _show(path: Path, calibration: Calibration, measured: Measurements, base: Gpu) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(title=f"{calibration.title}: {len(calibration.numbers)} numbers", title_justify="left")
    table.add_column("number")
    table.add_column(calibration.base, justify="right")
    table.add_column("measured", justify="right")
    table.add_column("how")
    for number in calibration.numbers:
        how = number.source.split(": ", 1)[1]
        table.add_row(number.field, f"{getattr(base, number.field):.6g}", f"{number.value:.6g}", how)
    console.print(table)
    for name, reason in calibration.left_out.items():
        console.print(f"{name} keeps {getattr(base, name):.6g}: {reason}")
    for doubt in calibration.doubts:
        console.print(f"[bold]doubtful[/]: {doubt}")
    for task, reason in measured.failed.items():
        console.print(f"failed: {task}: {reason}")
    console.print(f"\nwritten to {path}; use it as --gpu {path}")


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("calibrate")(calibrate)
