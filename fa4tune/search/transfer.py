"""Split mode: candidates leave for a host that measures, results come back as trials and table entries."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import msgspec

from fa4tune.errors import BundleError, SearchError
from fa4tune.hardware.gpu import Gpu
from fa4tune.kernels.config import CONFIGS, KernelConfig
from fa4tune.kernels.toolchain import cache_dir
from fa4tune.outcome import Outcome
from fa4tune.problem import AttentionProblem
from fa4tune.record import Protocol, Provenance, Trial
from fa4tune.search.bundle import MANIFEST, RESULTS, Candidate, Manifest, Settings, read_lines
from fa4tune.search.compiling import Built, compile_provenance, resources_of
from fa4tune.search.samples import median, spread
from fa4tune.table.key import table_key

MAX_BYTES = 60 * 10**6
"""What a bundle may take."""

VENDORED = (
    "__init__.py",
    "errors.py",
    "outcome.py",
    "problem.py",
    "kernels/__init__.py",
    "kernels/inputs.py",
    "kernels/reference.py",
    "runtime/__init__.py",
    "runtime/arguments.py",
    "runtime/launcher.py",
    "search/__init__.py",
    "search/bundle.py",
    "search/device.py",
    "search/gate.py",
    "search/measure.py",
    "search/samples.py",
    "search/wheels.py",
    "search/worker.py",
)
"""Files of this package that a measuring host needs; none imports more than numpy, torch and tvm_ffi."""

SCRIPT = '''"""Measure this bundle on a GPU: python measure.py [--out OUT] [--budget-seconds S]."""

import sys
from pathlib import Path

here = Path(__file__).resolve().parent
sys.path.insert(0, str(here / "lib"))

from fa4tune.search.measure import main  # noqa: E402

sys.exit(main(bundle=here))
'''


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export wrote: candidates by problem, bytes, and whether the tvm_ffi wheel came along."""

    directory: Path
    candidates: dict[str, int]
    size: int
    wheel: str | None


def make_manifest(
    directory: Path,
    gpu: Gpu,
    built: dict[AttentionProblem, list[Built]],
    settings: Settings | None = None,
) -> Manifest:
    """Copy the kernels' libraries to ``directory`` and write its manifest.

    Raises:
        SearchError: a kernel was not linked, because no C compiler was there.
    """
    (directory / "objects").mkdir(parents=True, exist_ok=True)
    candidates: list[Candidate] = []
    for problem, of_problem in built.items():
        for item in of_problem:
            library = item.kernel.library_path
            if library is None:
                raise SearchError(
                    "kernels are not linked, as no C compiler was found; install gcc or name one with CC"
                )
            target = Path("objects") / f"{item.kernel.key}.so"
            if not (directory / target).exists():
                shutil.copyfile(library, directory / target)
            candidates.append(
                Candidate(
                    name=len(candidates),
                    problem=str(problem),
                    config=item.choice.config.as_dict(),
                    phase=item.choice.phase,
                    kernel={
                        "object": str(target),
                        "symbol": item.kernel.symbol,
                        "arguments": [a.name for a in item.kernel.signature],
                        "window": list(problem.window),
                    },
                    predicted_us=item.choice.predicted_us,
                    compile_s=round(item.kernel.seconds, 3),
                    resources=resources_of(item.kernel),
                )
            )
    keys = {problem: table_key(problem, gpu) for problem in built}
    manifest = Manifest(
        problems=tuple(str(problem) for problem in built),
        candidates=tuple(candidates),
        settings=settings or Settings(),
        arch=gpu.arch,
        hardware_key=gpu.key,
        kernel_classes={
            str(problem): of_problem[0].kernel.kernel_class.name for problem, of_problem in built.items()
        },
        kernel_version=next(key.kernel_version for key in keys.values()),
        provenance=compile_provenance(),
    )
    manifest.write(directory)
    return manifest


def export(
    directory: Path,
    gpu: Gpu,
    built: dict[AttentionProblem, list[Built]],
    *,
    python: str = "3.12",
    settings: Settings | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> Exported:
    """Write a self-contained bundle.

    Args:
        directory: new or empty.
        gpu: what the kernels are for.
        built: compiled candidates by problem.
        python: version of Python on the measuring host, for the tvm_ffi wheel.
        settings: of the measurement.
        note: told what could not be had.

    Raises:
        BundleError: the directory holds something else, or cannot be written.
        SearchError: the bundle is too large.
    """
    require_usable(directory)
    try:
        for old in ("objects", "lib", "wheels", "results"):
            shutil.rmtree(directory / old, ignore_errors=True)
        manifest = make_manifest(directory, gpu, built, settings)
        vendor(directory / "lib" / "fa4tune", VENDORED)
        (directory / "measure.py").write_text(SCRIPT)
        wheel = add_wheel(directory / "wheels", python, note)
    except OSError as error:
        raise _unwritable(directory, error) from None
    size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    if size > MAX_BYTES:
        raise SearchError(
            f"the bundle takes {size / 1e6:.0f} MB, more than {MAX_BYTES / 1e6:.0f}; export fewer --trials"
        )
    counts = Counter(candidate.problem for candidate in manifest.candidates)
    return Exported(directory, dict(counts), size, wheel)


def require_usable(directory: Path) -> None:
    """Find out before minutes of compiling whether a bundle can be written to ``directory``.

    Raises:
        BundleError: it holds something else, or cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()) and not (directory / MANIFEST).exists():
            raise BundleError(f"{directory} is not empty; give a new directory to export to")
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise _unwritable(directory, error) from None


def _unwritable(directory: Path, error: OSError) -> BundleError:
    return BundleError(f"{directory} cannot be written ({error.strerror or error}); export somewhere else")


def vendor(target: Path, files: Sequence[str]) -> None:
    """Copy files of this package to ``target``."""
    root = Path(str(resources.files("fa4tune")))
    for name in files:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / name, target / name)


def add_wheel(target: Path, python: str, note: Callable[[str], None]) -> str | None:
    """The apache-tvm-ffi wheel of the installed version for ``python`` on x86-64 Linux, kept in the cache."""
    version = metadata.version("apache-tvm-ffi")
    kept = cache_dir("wheels") / f"{version}-{python}"
    if not list(kept.glob("apache_tvm_ffi-*.whl")):
        platforms = [f"manylinux_2_{glibc}_x86_64" for glibc in (28, 27, 24, 17)] + ["manylinux2014_x86_64"]
        tags = [part for p in platforms for part in ("--platform", p)]
        digits = python.replace(".", "")
        command = [
            sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", *tags,
            "--python-version", python, "--implementation", "cp",
            "--abi", f"cp{digits}", "--abi", "abi3", "--abi", "none",
            "-d", str(kept), f"apache-tvm-ffi=={version}",
        ]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
            failure = (done.stderr.strip().splitlines() or ["no message"])[-1] if done.returncode else ""
        except (OSError, subprocess.TimeoutExpired) as error:
            failure = str(error)
        if failure:
            note(
                f"the apache-tvm-ffi {version} wheel for Python {python} could not be had ({failure}); "
                f"the measuring host must have it installed"
            )
            return None
    target.mkdir(parents=True, exist_ok=True)
    wheel = next(kept.glob("apache_tvm_ffi-*.whl"))
    shutil.copyfile(wheel, target / wheel.name)
    return wheel.name


# -- the way back --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Comparison:
    """What measuring some configs of one problem gave.

    Args:
        trials: a record of each outcome; a config that reached the duel has two.
        paired: samples in microseconds by config, position by position of the same rounds, of the last stage.
    """

    trials: list[Trial]
    paired: dict[KernelConfig, list[float]]


@dataclass(frozen=True, slots=True)
class Imported:
    """Results of one bundle: its manifest, and what came out for each problem."""

    manifest: Manifest
    results: dict[str, Comparison]


def load_results(directory: Path) -> Imported:
    """Trials of a bundle directory, or of the output directory of its measurement.

    Raises:
        BundleError: it holds no manifest or no results.
    """
    manifest = Manifest.read(directory)
    places = [directory / RESULTS, directory / "results" / RESULTS]
    path = next((place for place in places if place.exists()), None)
    if path is None:
        raise BundleError(
            f"{directory} holds no {RESULTS}; run measure.py first, or give its --out directory"
        )
    lines = list(read_lines(path, manifest.identity))
    results = {
        problem: _compared(manifest, problem, [line for line in lines if line["problem"] == problem])
        for problem in manifest.problems
    }
    return Imported(manifest, results)


def _compared(manifest: Manifest, problem: str, lines: Sequence[dict[str, Any]]) -> Comparison:
    """Trials and the paired samples of the duel or, without one, of the rounds or the default alone."""
    cls = CONFIGS[manifest.arch]
    checks = {line["candidate"]: line for line in lines if line["kind"] == "check"}
    timings = {line["phase"]: line for line in lines if line["kind"] == "timing"}
    candidates = {c.name: c for c in manifest.of(problem)}
    trials = [
        _trial(manifest, candidates[name], line, outcome=Outcome(line["outcome"]), reason=line["reason"])
        for name, line in checks.items()
        if line["outcome"] != "ok"
    ]
    paired: dict[KernelConfig, list[float]] = {}
    shown = [phase for phase in ("rounds", "duel") if phase in timings] or ["default"]
    for phase in shown:
        timing = timings.get(phase)
        if timing is None:
            continue
        paired = {}
        for index, name in enumerate(timing["candidates"]):
            if checks[name]["outcome"] != "ok":
                continue
            samples = [row[index] for row in timing["rounds"]]
            paired[cls.from_dict(candidates[name].config)] = samples
            trials.append(
                _trial(
                    manifest,
                    candidates[name],
                    checks[name],
                    outcome=Outcome.MEASURED,
                    timing=timing,
                    samples=samples,
                    phase="duel" if phase == "duel" else candidates[name].phase,
                )
            )
    return Comparison(trials, paired)


def _trial(
    manifest: Manifest,
    candidate: Candidate,
    check: dict[str, Any],
    *,
    outcome: Outcome,
    reason: str = "",
    timing: dict[str, Any] | None = None,
    samples: Sequence[float] = (),
    phase: str | None = None,
) -> Trial:
    origin: dict[str, Any] = dict(manifest.provenance)
    if timing is not None:
        origin |= {**timing["environment"], "measured_at": timing["measured_at"]}
    protocol = None
    if timing is not None:
        several = len(timing["candidates"]) > 1
        protocol = Protocol(timing=timing["timing"], rounds=len(timing["rounds"]), interleaved=several)
    return Trial(
        problem=candidate.problem,
        kernel_class=manifest.kernel_classes[candidate.problem],
        kernel_version=manifest.kernel_version,
        config=candidate.config,
        hardware_key=manifest.hardware_key,
        outcome=outcome,
        reason=reason,
        samples_us=list(samples),
        median_us=round(median(samples), 3) if samples else None,
        spread_us=round(spread(samples), 3) if samples else None,
        predicted_us=candidate.predicted_us,
        error=check.get("error") or {},
        resources=candidate.resources,
        compile_s=candidate.compile_s,
        provenance=msgspec.convert(origin, Provenance),  # leaves out what it does not know
        protocol=protocol,
        phase=phase or candidate.phase,
        study=manifest.identity,
    )
