"""The process that touches the GPU: it loads candidates, checks and times them, and may die of one.

It reads one JSON job a line from stdin and answers with JSON lines on stdout; what libraries print goes to
stderr. Its parent (:mod:`fa4tune.search.measure`) restarts it after a crash or a hang. Jobs:

- ``{"op": "prepare", "problem": P}``: build inputs and references -> ``ready``;
- ``{"op": "check", "problem": P, "candidate": i}`` -> ``checked`` with outcome, reason, error;
- ``{"op": "time", "problem": P, "candidates": [...], "rounds": n}`` -> a ``turn`` before each candidate's
  first launch, a ``round`` for each round, then ``timed``; or ``failed`` with the candidate that raised.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from fa4tune.outcome import Outcome
from fa4tune.problem import AttentionProblem
from fa4tune.search.bundle import Candidate, Manifest
from fa4tune.search.device import Backend
from fa4tune.search.gate import Gate, Kernel, make_inputs, make_outputs

DEFAULT_BACKEND = "fa4tune.search.device:CudaBackend"


class Worker:
    """Serves jobs over one bundle.

    Args:
        bundle: directory of the manifest and the objects.
        backend: the machine.
        reply: takes each answer.
    """

    def __init__(self, bundle: Path, backend: Backend, reply: Callable[..., None]) -> None:
        self.bundle = bundle
        self.backend = backend
        self.reply = reply
        self.manifest = Manifest.read(bundle)
        self.candidates = {c.name: c for c in self.manifest.candidates}
        self._gates: dict[str, Gate] = {}
        self._kernels: dict[str, Kernel] = {}

    def serve(self, job: dict[str, Any]) -> None:
        """Do one job and answer it."""
        getattr(self, f"_{job['op']}")(job)

    def _gate(self, problem: str) -> Gate:
        if problem not in self._gates:
            self._gates.clear()  # the references of one problem fill gigabytes
            parsed = AttentionProblem.parse(problem)
            self._gates[problem] = Gate(parsed, self.backend.device, self.manifest.settings.error_bound)
        return self._gates[problem]

    def _kernel(self, candidate: Candidate) -> Kernel:
        key = json.dumps(candidate.kernel, sort_keys=True)
        if key not in self._kernels:
            self._kernels[key] = self.backend.load(self.bundle, candidate.kernel)
        return self._kernels[key]

    def _prepare(self, job: dict[str, Any]) -> None:
        self._gate(job["problem"])
        self.backend.synchronize()
        self.reply(op="ready")

    def _check(self, job: dict[str, Any]) -> None:
        candidate = self.candidates[job["candidate"]]
        gate = self._gate(job["problem"])
        try:
            verdict = gate.check(self._kernel(candidate))
            self.backend.synchronize()
        except Exception as error:  # whatever a launch raises is this candidate's outcome
            # A failed launch leaves the CUDA context unusable more often than not: ask for a new process.
            self.reply(op="checked", outcome=_outcome(error), reason=_sentence(error), error={}, fatal=True)
            return
        outcome = verdict.outcome.value if verdict.outcome else "ok"
        self.reply(
            op="checked", outcome=outcome, reason=verdict.reason, error=verdict.error or {}, fatal=False
        )

    def _time(self, job: dict[str, Any]) -> None:
        problem = AttentionProblem.parse(job["problem"])
        self._gates.clear()
        scale = 1.0 / math.sqrt(problem.head_dim)
        q, k, v = make_inputs(problem, "gaussian", self.backend.device)
        out, lse = make_outputs(problem, q)
        calls = []
        for name in job["candidates"]:
            self.reply(op="turn", candidate=name)
            try:
                kernel = self._kernel(self.candidates[name])
                call = _bind(kernel, q, k, v, out, lse, scale)
                call()
                self.backend.synchronize()
            except Exception as error:  # as in _check
                self.reply(op="failed", candidate=name, outcome=_outcome(error), reason=_sentence(error))
                return
            calls.append(call)
        self.reply(op="turn", candidate=None)
        graph = self._is_short(calls[0])
        with self.backend.watch() as sensors:
            for samples in self.backend.rounds(calls, job["rounds"], graph):
                self.reply(op="round", samples=samples)
        self.reply(op="timed", sensors=sensors, timing="cuda_graph" if graph else "events")

    def _is_short(self, call: Callable[[], None]) -> bool:
        first = [samples[0] for samples in self.backend.rounds([call], 3, False)]
        return sorted(first)[1] < self.manifest.settings.graph_below_us


def _bind(kernel: Kernel, *arguments: Any) -> Callable[[], None]:
    return lambda: kernel(*arguments)


def _outcome(error: Exception) -> str:
    if "out of memory" in str(error).lower():
        return Outcome.OUT_OF_MEMORY.value
    return Outcome.LAUNCH_FAILED.value


def _sentence(error: Exception) -> str:
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text[:400]}"


def main(arguments: list[str]) -> int:
    """``python -m fa4tune.search.worker BUNDLE [module:Backend]``."""
    answers: IO[str] = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(**message: Any) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    module, _, name = (arguments[1] if len(arguments) > 1 else DEFAULT_BACKEND).partition(":")
    try:
        backend: Backend = getattr(import_module(module), name)()
        worker = Worker(Path(arguments[0]), backend, reply)
        reply(op="hello", environment=backend.environment())
    except Exception as error:  # the parent turns it into its own error
        reply(op="unusable", reason=_sentence(error))
        return 1
    for line in sys.stdin:
        worker.serve(json.loads(line))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
