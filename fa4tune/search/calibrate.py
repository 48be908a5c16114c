"""Measure a calibration bundle: microbenchmark kernels on the GPU at hand, results as JSON lines.

Runs on a host that has torch and a GPU but no compiler, as ``python DIR/calibrate.py``. A child process does
the work and says what it is about to do; this one watches it. What hangs, crashes or raises is recorded as
failed, the child replaced, and the rest goes on. A second run with the same output directory does only what
is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import fa4tune
from fa4tune.errors import BundleError, Fa4tuneError, SearchError
from fa4tune.kernels.micro.suite import VERSION, Suite, suite
from fa4tune.search.bundle import RESULTS, Results, read_lines
from fa4tune.search.wheels import provide_tvm_ffi

FORMAT = 1

MANIFEST = "calibration.json"

WORKER = "fa4tune.search.calibrate_worker"

START_SECONDS = 120.0
"""Patience with a child that imports torch and opens the GPU."""

TASK_SECONDS = 10.0
"""Patience with one task; a load takes its own time on top."""


@dataclass(frozen=True)
class CalibrationManifest:
    """What a calibration bundle holds.

    Args:
        arch: compile target of the kernels.
        kernels: library file, symbol and, for the arithmetic of results, loop opcodes by kernel name.
        missing: kernels that did not compile, with the reason.
        provenance: versions of what compiled them.
        format, suite: versions of layout and suite.
    """

    arch: str
    kernels: dict[str, dict[str, Any]]
    missing: dict[str, str]
    provenance: dict[str, str]
    format: int = FORMAT
    suite: int = VERSION

    @property
    def identity(self) -> str:
        """Digest that ties results to the bundle."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def write(self, directory: Path) -> None:
        """Write it to ``directory``."""
        (directory / MANIFEST).write_text(json.dumps(asdict(self), sort_keys=True, indent=1) + "\n")

    @classmethod
    def read(cls, directory: Path) -> CalibrationManifest:
        """The manifest of a bundle.

        Raises:
            BundleError: there is none, or it is damaged.
            SearchError: it is of another version.
        """
        path = directory / MANIFEST
        try:
            manifest = cls(**json.loads(path.read_text()))
        except OSError:
            raise BundleError(
                f"{directory} holds no {MANIFEST}; give a directory of calibrate --export"
            ) from None
        except (TypeError, ValueError) as error:
            raise BundleError(f"{path} is damaged ({error}); export the bundle again") from None
        if (manifest.format, manifest.suite) != (FORMAT, VERSION):
            raise SearchError(
                f"{path} has format {manifest.format} and suite {manifest.suite}, this fa4tune reads "
                f"{FORMAT} and {VERSION}; export the bundle again with the same version"
            )
        return manifest


def tasks(contents: Suite, manifest: CalibrationManifest) -> list[tuple[str, str, float]]:
    """(kind, name, seconds it takes at most) of everything that the bundle can measure, in order."""
    kernel_of = {probe.name: probe.kernel for probe in contents.probes}
    found = [("probe", p.name, TASK_SECONDS) for p in contents.probes if p.kernel in manifest.kernels]
    found += [
        ("launch", name, TASK_SECONDS) for name in contents.launches if kernel_of[name] in manifest.kernels
    ]
    found += [
        ("load", load.name, TASK_SECONDS + load.seconds)
        for load in contents.loads
        if load.probe is None or kernel_of[load.probe] in manifest.kernels
    ]
    return found


class _Child:
    """A worker process whose lines are read with a time limit."""

    def __init__(self, bundle: Path, out: Path, worker: str) -> None:
        root = str(Path(fa4tune.__file__).parent.parent)
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
        self._log = (out / "worker.log").open("ab")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", worker, str(bundle)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "PYTHONPATH": path},
        )
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def ask(self, **job: Any) -> None:
        """Send one job."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()

    def answer(self, seconds: float) -> dict[str, Any]:
        """The next answer; one with ``reason`` and ``gone`` where the process hung or died."""
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            return {"reason": f"no answer within {seconds:g} s", "gone": True}
        if line is None:
            code = self._process.wait()
            how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
            return {"reason": f"the measuring process {how}", "gone": True}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def stop(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        self._log.close()


def measure(
    bundle: Path,
    out: Path,
    *,
    budget_seconds: float | None = None,
    worker: str = WORKER,
    report: Callable[[str], None] = lambda text: None,
) -> bool:
    """Measure what is missing of a bundle's results; they are lines of ``results.jsonl`` in ``out``.

    Args:
        bundle: directory of ``calibrate --export``.
        out: directory of the results.
        budget_seconds: start nothing new after this long.
        worker: module that runs the kernels.
        report: told of each task.

    Returns:
        whether everything was measured.

    Raises:
        SearchError: the bundle, the output directory or the machine cannot be used.
    """
    end = None if budget_seconds is None else time.monotonic() + budget_seconds
    manifest = CalibrationManifest.read(bundle)
    results = Results(out, manifest.identity)
    manifest.write(out)  # so that the results can be read without the bundle
    folder = provide_tvm_ffi(bundle)
    try:
        return _run(bundle, out, manifest, results, end, worker, report)
    finally:
        results.close()
        if folder is not None:
            folder.cleanup()


def _run(
    bundle: Path,
    out: Path,
    manifest: CalibrationManifest,
    results: Results,
    end: float | None,
    worker: str,
    report: Callable[[str], None],
) -> bool:
    done = {(line["kind"], line["name"]) for line in results.lines if "name" in line}
    todo = [task for task in tasks(suite(manifest.arch), manifest) if task[:2] not in done]
    complete = True
    child: _Child | None = None
    try:
        for kind, name, seconds in todo:
            if end is not None and time.monotonic() + seconds - TASK_SECONDS > end:
                complete = False
                continue
            if child is None:
                child = _Child(bundle, out, worker)
                ready = child.answer(START_SECONDS)
                if "environment" not in ready:
                    raise SearchError(f"this machine cannot calibrate: {ready['reason']}")
                results.append(kind="environment", **ready["environment"])
            started = time.monotonic()
            child.ask(kind=kind, name=name)
            answer = child.answer(seconds)
            if "reason" in answer:
                complete = False
                if answer["gone"]:
                    child.stop()
                    child = None
                results.append(kind="failed", task=[kind, name], reason=answer["reason"])
                report(f"{kind} {name}: failed, {answer['reason']}")
            else:
                results.append(kind=kind, name=name, **answer)
                report(f"{kind} {name}: {_summary(kind, answer)} ({time.monotonic() - started:.2f} s)")
    finally:
        if child is not None:
            child.stop()
    return complete


def _summary(kind: str, answer: dict[str, Any]) -> str:
    if kind == "probe":
        return f"{answer['cycles']:.2f} cycles, {answer['rate']:.4g} {answer['unit']} a clock"
    if kind == "launch":
        return f"{answer['event_us']:.2f} us between events, {answer['graph_us']:.2f} us in a graph"
    return f"{answer['clock_mhz']:.0f} MHz, {answer['watts']:.0f} W"


def read_results(directory: Path) -> tuple[CalibrationManifest, list[dict[str, Any]]]:
    """Manifest and result lines of a measured bundle or of the output directory of its measurement.

    Raises:
        BundleError: it holds no manifest or no results.
        SearchError: they do not belong together.
    """
    manifest = CalibrationManifest.read(directory)
    places = (directory / RESULTS, directory / "results" / RESULTS)
    path = next((place for place in places if place.exists()), None)
    if path is None:
        raise BundleError(
            f"{directory} holds no {RESULTS}; run calibrate.py first, or give its --out directory"
        )
    return manifest, list(read_lines(path, manifest.identity))


def main(arguments: list[str] | None = None, bundle: Path | None = None) -> int:
    """Command line of ``calibrate.py`` in a bundle."""
    parser = argparse.ArgumentParser(description="Calibrate this GPU with the kernels of a bundle.")
    if bundle is None:
        parser.add_argument("bundle", type=Path, metavar="DIR")
    parser.add_argument("--out", type=Path, help="where results go (default: DIR/results)")
    parser.add_argument("--budget-seconds", type=float, help="start nothing new after this long")
    options = parser.parse_args(arguments)
    bundle = bundle or options.bundle
    out = options.out or bundle / "results"
    started = time.monotonic()

    def report(text: str) -> None:
        print(f"[{time.monotonic() - started:5.1f} s] {text}", file=sys.stderr, flush=True)

    try:
        complete = measure(bundle, out, budget_seconds=options.budget_seconds, report=report)
    except Fa4tuneError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    state = "complete" if complete else "incomplete; the same command goes on"
    print(f"results in {out} ({state}, {time.monotonic() - started:.0f} s)", file=sys.stderr)
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
