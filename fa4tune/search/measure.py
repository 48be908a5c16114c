"""Measure the candidates of a bundle: correctness in a sacrificial process, then time in turns.

Runs on a host that has torch and a GPU but no compiler and no registry, as ``python DIR/measure.py``. Two
worker processes (:mod:`fa4tune.search.worker`) do the work, and this one only watches them. A worker that
crashes or goes silent is replaced, and its candidate is recorded as crashed or hung.

Order of work, so that a run that is cut off leaves the most useful part: the default config of every problem,
checked and timed; then the other candidates' correctness; then for each problem the survivors interleaved in
rounds; then duels between the fastest. Every answer is on disk before the next job starts, and a second run
with the same output directory goes on where the first one stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fa4tune
from fa4tune.errors import Fa4tuneError, SearchError
from fa4tune.outcome import Outcome
from fa4tune.search.bundle import Candidate, Manifest, Results
from fa4tune.search.samples import finalists, median
from fa4tune.search.wheels import provide_tvm_ffi
from fa4tune.search.worker import DEFAULT_BACKEND

START_SECONDS = 180.0
"""Patience with a worker that imports torch and opens the GPU."""

ROUND_SECONDS = 60.0
"""Patience with one round, or one first launch, while timing."""

CHECK_SHARE = 0.6
"""Part of the remaining budget that correctness may take before timing starts."""

MIN_ROUNDS = 5
"""Rounds that an interrupted timing must have for its samples to be kept."""

Report = Callable[[int, int, str], None]
"""``report(done, total, text)``: jobs finished, jobs in all, and what just happened."""


class WorkerGoneError(Exception):
    """The worker hung (``hung``) or died; ``reason`` says how."""

    def __init__(self, hung: bool, reason: str) -> None:
        super().__init__(reason)
        self.hung = hung
        self.reason = reason


class Child:
    """One worker process, with a thread that reads its answers so that waiting has a time limit."""

    def __init__(self, bundle: Path, backend: str, log: Path) -> None:
        root = str(Path(fa4tune.__file__).parent.parent)
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
        self._log = log.open("ab")
        self.process = subprocess.Popen(
            # -P: the working directory may hold another copy of the package
            [sys.executable, "-P", "-m", "fa4tune.search.worker", str(bundle), backend],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "PYTHONPATH": path},
        )
        self._answers: queue.Queue[bytes | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.environment: dict[str, Any] = {}
        self.prepared: str | None = None

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._answers.put(line)
        self._answers.put(None)

    def greet(self) -> None:
        """Wait until it is ready.

        Raises:
            SearchError: the machine cannot measure.
        """
        if self.environment:
            return
        try:
            answer = self.receive(START_SECONDS)
        except WorkerGoneError as error:
            raise SearchError(f"the measuring process did not start: {error.reason}") from None
        if answer["op"] == "unusable":
            raise SearchError(f"this machine cannot measure: {answer['reason']}")
        self.environment = answer["environment"]

    def send(self, **job: Any) -> None:
        """Give it a job; a dead process is noticed at the next :meth:`receive`."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(job).encode() + b"\n")
            self.process.stdin.flush()

    def receive(self, seconds: float) -> dict[str, Any]:
        """Its next answer.

        Raises:
            WorkerGoneError: none came in time, or the process ended.
        """
        try:
            line = self._answers.get(timeout=seconds)
        except queue.Empty:
            raise WorkerGoneError(True, f"no answer within {seconds:g} s") from None
        if line is None:
            code = self.process.wait()
            how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
            raise WorkerGoneError(False, f"the measuring process {how}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def stop(self) -> None:
        """End it for good."""
        self.process.kill()
        self.process.wait()
        self._log.close()


class Measurement:
    """One run over one bundle.

    Args:
        bundle: directory of the manifest and the objects.
        out: where results go; created if missing.
        budget_seconds: stop starting work after this long; None is no limit.
        backend: ``module:class`` of a :class:`fa4tune.search.device.Backend`.
        report: told of progress.

    Raises:
        SearchError: the bundle is damaged, results belong to another one, or ``out`` cannot be written.
    """

    def __init__(
        self,
        bundle: Path,
        out: Path,
        *,
        budget_seconds: float | None = None,
        backend: str = DEFAULT_BACKEND,
        report: Report | None = None,
    ) -> None:
        self.bundle = bundle
        self.manifest = Manifest.read(bundle)
        self.results = Results(out, self.manifest.identity)
        self.manifest.write(out)  # results alone are enough to import
        self.backend = backend
        self._log = out / "worker.log"
        self._report = report or (lambda done, total, text: None)
        self._end = None if budget_seconds is None else time.monotonic() + budget_seconds
        self._checker: Child | None = None
        self._timer: Child | None = None
        self._checks = {(line["problem"], line["candidate"]): line for line in self.results.of("check")}
        self._timings = {(line["problem"], line["phase"]): line for line in self.results.of("timing")}
        self._done = len(self._checks) + len(self._timings)
        self._total = len(self.manifest.candidates) + 3 * len(self.manifest.problems)

    def run(self) -> bool:
        """Do what is left, within the budget. True if everything was done."""
        settings, complete = self.manifest.settings, True
        try:
            for problem in self.manifest.problems:
                default = self.manifest.of(problem)[0]
                complete &= self._check(default, None)
                if self._passed(default):
                    complete &= self._time(problem, "default", [default.name], settings.rounds)
            for index, problem in enumerate(self.manifest.problems):
                limit = self._check_limit(len(self.manifest.problems) - index)
                for candidate in self.manifest.of(problem)[1:]:
                    complete &= self._check(candidate, limit)
            for problem in self.manifest.problems:
                survivors = [c.name for c in self.manifest.of(problem) if self._passed(c)]
                if len(survivors) > 1:
                    complete &= self._time(problem, "rounds", survivors, settings.rounds)
            for problem in self.manifest.problems:
                complete &= self._duel(problem)
        finally:
            for child in (self._checker, self._timer):
                if child is not None:
                    child.stop()
            self.results.close()
        return complete

    # ------------------------------------------------------------------ correctness

    def _passed(self, candidate: Candidate) -> bool:
        line = self._checks.get((candidate.problem, candidate.name))
        return line is not None and line["outcome"] == "ok"

    def _check_limit(self, problems_left: int) -> float | None:
        """When to stop checking the next problem, so that timing keeps its share of the budget."""
        if self._end is None:
            return None
        now = time.monotonic()
        return now + max(0.0, self._end - now) * CHECK_SHARE / problems_left

    def _over(self, limit: float | None) -> bool:
        ends = [end for end in (self._end, limit) if end is not None]
        return bool(ends) and time.monotonic() > min(ends)

    def _check(self, candidate: Candidate, limit: float | None) -> bool:
        key = candidate.problem, candidate.name
        if key in self._checks:
            return True
        if self._over(limit):
            return False
        child = self._checker = self._ready(self._checker)
        if self._timer is None:  # opens the GPU while the other one works
            self._timer = self._start()
        settings = self.manifest.settings
        answer: dict[str, Any]
        try:
            if child.prepared != candidate.problem:
                child.send(op="prepare", problem=candidate.problem)
                child.receive(settings.prepare_seconds)
                child.prepared = candidate.problem
        except WorkerGoneError as error:
            child.stop()
            raise SearchError(
                f"inputs and references of {candidate.problem} could not be made: {error.reason}; "
                f"see {self._log}"
            ) from None
        try:
            child.send(op="check", problem=candidate.problem, candidate=candidate.name)
            answer = child.receive(settings.check_seconds)
        except WorkerGoneError as error:
            outcome = Outcome.HUNG if error.hung else Outcome.CRASHED
            answer = {"outcome": outcome.value, "reason": error.reason, "error": {}, "fatal": True}
        if answer.pop("fatal"):
            child.stop()
            self._checker = None
        self._record(answer, candidate)
        return True

    def _record(self, answer: dict[str, Any], candidate: Candidate) -> None:
        """Write a check's line; a later failure while timing replaces an earlier ``ok``."""
        answer.pop("op", None)
        line = {"problem": candidate.problem, "candidate": candidate.name, **answer}
        self.results.append(kind="check", **line)
        self._checks[candidate.problem, candidate.name] = line
        self._step(f"{candidate.problem} #{candidate.name}: {line['outcome']} {line['reason']}".rstrip())

    def _step(self, text: str) -> None:
        self._done += 1
        self._report(self._done, max(self._total, self._done), text)

    # ------------------------------------------------------------------ time

    def _time(self, problem: str, phase: str, names: list[int], rounds: int) -> bool:
        if (problem, phase) in self._timings:
            return True
        while names and not self._over(None):
            collected: list[list[float]] = []
            turn: int | None = None
            try:
                child = self._timer = self._ready(self._timer)
                child.send(op="time", problem=problem, candidates=names, rounds=rounds)
                while True:
                    answer = child.receive(ROUND_SECONDS)
                    if answer["op"] == "turn":
                        turn = answer["candidate"]
                    elif answer["op"] == "round":
                        collected.append(answer["samples"])
                    elif answer["op"] == "timed":
                        self._save(problem, phase, names, collected, answer)
                        return True
                    else:
                        raise _Failed(answer["candidate"], answer["outcome"], answer["reason"])
            except _Failed as failed:
                self._drop(problem, failed)
                names = [name for name in names if name != failed.candidate]
            except WorkerGoneError as gone:
                self._stop_timer()
                if turn is None:  # not before its first launch: whose fault it is cannot be told
                    if len(collected) >= MIN_ROUNDS:
                        self._save(problem, phase, names, collected, {"timing": "events", "sensors": {}})
                    self._step(f"{problem}: timing ended early, {gone.reason}")
                    return False
                outcome = Outcome.HUNG if gone.hung else Outcome.CRASHED
                self._drop(problem, _Failed(turn, outcome.value, gone.reason))
                names = [name for name in names if name != turn]
        return not names

    def _save(
        self, problem: str, phase: str, names: list[int], rounds: list[list[float]], answer: dict[str, Any]
    ) -> None:
        assert self._timer is not None or rounds
        environment = self._environment | answer["sensors"]
        line = {
            "problem": problem,
            "phase": phase,
            "candidates": names,
            "rounds": [[round(sample, 3) for sample in samples] for samples in rounds],
            "timing": answer["timing"],
            "environment": environment,
            "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        self.results.append(kind="timing", **line)
        self._timings[problem, phase] = line
        times = _medians(line)
        best = min(times, key=lambda name: times[name])
        self._step(f"{problem} {phase}: best {times[best]:.1f} us (#{best}) of {len(names)}")

    def _drop(self, problem: str, failed: _Failed) -> None:
        """A candidate that passed its check and failed while timing; the process it failed in is replaced."""
        self._stop_timer()
        candidate = next(c for c in self.manifest.candidates if c.name == failed.candidate)
        self._record({"outcome": failed.outcome, "reason": failed.reason, "error": {}}, candidate)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.stop()
        self._timer = None

    def _duel(self, problem: str) -> bool:
        line = self._timings.get((problem, "rounds"))
        default = self.manifest.of(problem)[0].name
        settings = self.manifest.settings
        alive = {c.name for c in self.manifest.of(problem) if self._passed(c)}
        if not settings.duel_rounds:
            return True
        if line is None:
            return len(alive) < 2
        times = {name: value for name, value in _medians(line).items() if name in alive}
        if default not in times or len(times) < 2:
            return True
        names = finalists(times, default, settings.duel_finalists)
        return self._time(problem, "duel", names, settings.duel_rounds)

    # ------------------------------------------------------------------ processes

    def _start(self) -> Child:
        return Child(self.bundle, self.backend, self._log)

    def _ready(self, child: Child | None) -> Child:
        """A worker that has opened this bundle's kind of GPU."""
        child = child or self._start()
        try:
            child.greet()
            self._environment = child.environment
            arch, sm_count = child.environment["arch"], child.environment["sm_count"]
            wanted_arch, wanted_sms = self.manifest.hardware_key.split("-")[:2]
            if arch != wanted_arch.rstrip("af") or f"{sm_count}sm" != wanted_sms:
                raise SearchError(
                    f"this GPU is {child.environment['gpu']} ({arch}, {sm_count} SMs) and the bundle is for "
                    f"{self.manifest.hardware_key}; export it again with the right --gpu"
                )
        except SearchError:
            child.stop()
            raise
        return child


class _Failed(Exception):  # noqa: N818 - a signal within this file, not an error that callers meet
    """A candidate raised while it was timed."""

    def __init__(self, candidate: int, outcome: str, reason: str) -> None:
        super().__init__(reason)
        self.candidate, self.outcome, self.reason = candidate, outcome, reason


def _medians(line: dict[str, Any]) -> dict[int, float]:
    """Median microseconds by candidate of a timing line."""
    return {
        name: median([samples[i] for samples in line["rounds"]]) for i, name in enumerate(line["candidates"])
    }


class ConsoleReport:
    """Progress as lines on stderr: bar, time left, what happened."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._first: int | None = None

    def __call__(self, done: int, total: int, text: str) -> None:
        """Print one line."""
        self._first = done - 1 if self._first is None else self._first
        elapsed = time.monotonic() - self._start
        left = elapsed / (done - self._first) * (total - done)
        print(
            f"[{done}/{total}] {elapsed:.0f} s, about {left:.0f} s left: {text}", file=sys.stderr, flush=True
        )


def measure(
    bundle: Path,
    out: Path | None = None,
    *,
    budget_seconds: float | None = None,
    backend: str = DEFAULT_BACKEND,
    report: Report | None = None,
) -> bool:
    """Measure a bundle; results go to ``out`` (default: ``results`` in the bundle).

    Returns:
        whether everything was measured; False where the budget ended first.

    Raises:
        SearchError: the bundle or the machine cannot be used; the sentence says why.
    """
    folder = provide_tvm_ffi(bundle)
    try:
        return Measurement(
            bundle,
            out or bundle / "results",
            budget_seconds=budget_seconds,
            backend=backend,
            report=report,
        ).run()
    finally:
        if folder is not None:
            folder.cleanup()


def main(arguments: list[str] | None = None, bundle: Path | None = None) -> int:
    """Command line of ``measure.py`` in a bundle."""
    parser = argparse.ArgumentParser(description="Measure the attention kernels of a bundle on this GPU.")
    if bundle is None:
        parser.add_argument("bundle", type=Path, metavar="DIR")
    parser.add_argument("--out", type=Path, help="where results go (default: DIR/results)")
    parser.add_argument("--budget-seconds", type=float, help="start no new work after this long")
    parser.add_argument("--backend", default=DEFAULT_BACKEND, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    bundle = bundle or options.bundle
    out = options.out or bundle / "results"
    try:
        complete = measure(
            bundle,
            out,
            budget_seconds=options.budget_seconds,
            backend=options.backend,
            report=ConsoleReport(),
        )
    except Fa4tuneError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    state = "complete" if complete else "cut off; the same command goes on"
    print(f"results in {out} ({state})", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
