"""The format that a compiling host hands to a measuring host, and the lines it gets back.

A bundle is a directory with ``manifest.json`` and the candidates' objects; results are lines of one file.
Standard library only, because this file travels with the bundle.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from fa4tune.errors import BundleError, SearchError

FORMAT = 1
"""Version of manifest and results; a reader refuses another one."""

MANIFEST = "manifest.json"
RESULTS = "results.jsonl"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One config to measure on one problem.

    ``kernel`` is what the launcher needs to load it (paths relative to the bundle); the rest travels through
    to the trial record. ``phase`` is why it was chosen; the default config's is ``default``.
    """

    name: int
    problem: str
    config: dict[str, Any]
    phase: str
    kernel: dict[str, Any]
    predicted_us: float | None = None
    compile_s: float | None = None
    resources: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Settings:
    """How to measure.

    Args:
        rounds: turns of every candidate, interleaved.
        duel_rounds: turns of the finalists; 0 is no duel.
        duel_finalists: challengers of the default in the duel.
        graph_below_us: kernels faster than this are timed in replays of a CUDA graph.
        check_seconds, prepare_seconds: the watchdog's patience with a candidate, and with the inputs and
            references of a problem.
        error_bound: a kernel's root-mean-square error over the yardstick's, at most.
    """

    rounds: int = 15
    duel_rounds: int = 40
    duel_finalists: int = 3
    graph_below_us: float = 50.0
    check_seconds: float = 20.0
    prepare_seconds: float = 180.0
    error_bound: float = 1.3


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a bundle holds. ``identity`` ties results to it."""

    problems: tuple[str, ...]
    candidates: tuple[Candidate, ...]
    settings: Settings
    arch: str
    hardware_key: str
    kernel_classes: dict[str, str]
    kernel_version: int
    provenance: dict[str, str]
    format: int = FORMAT

    @property
    def identity(self) -> str:
        """Digest of the content."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """The manifest as JSON text."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, indent=1)

    def of(self, problem: str) -> list[Candidate]:
        """The candidates of one problem, its default config first."""
        own = [c for c in self.candidates if c.problem == problem]
        return sorted(own, key=lambda c: (c.phase != "default", c.name))

    def write(self, directory: Path) -> None:
        """Write it to ``directory``."""
        (directory / MANIFEST).write_text(self.to_json() + "\n")

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """The manifest of a bundle.

        Raises:
            BundleError: there is none, or it is damaged.
            SearchError: it has another format.
        """
        path = directory / MANIFEST
        try:
            data = json.loads(path.read_text())
            if data["format"] != FORMAT:
                raise SearchError(
                    f"{path} has format {data['format']} and this fa4tune reads {FORMAT}; "
                    f"export the bundle again with the same version"
                )
            return cls(
                problems=tuple(data.pop("problems")),
                candidates=tuple(Candidate(**c) for c in data.pop("candidates")),
                settings=Settings(**data.pop("settings")),
                **data,
            )
        except OSError:
            raise BundleError(f"{directory} holds no {MANIFEST}; give a directory of --export") from None
        except (KeyError, TypeError, ValueError) as error:
            raise BundleError(f"{path} is damaged ({error}); export the bundle again") from None


class Results:
    """The result lines of one bundle: read at the start, appended as they come.

    Raises:
        SearchError: the file belongs to another bundle.
        BundleError: the directory cannot be written.
    """

    def __init__(self, directory: Path, identity: str) -> None:
        self.path = directory / RESULTS
        self.identity = identity
        self.lines: list[dict[str, Any]] = []
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self.lines = list(read_lines(self.path, identity))
            self._file: TextIO = self.path.open("a")
            if self.path.stat().st_size and not self.path.read_bytes().endswith(b"\n"):
                self._file.write("\n")  # a writer was killed in the middle of a line
        except OSError as error:
            raise BundleError(
                f"results cannot be written to {directory} ({error.strerror or error}); give --out DIR"
            ) from None

    def append(self, **line: Any) -> None:
        """Write one line, on disk before this returns."""
        line = {"bundle": self.identity, **line}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.lines.append(line)

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The lines of one kind."""
        return [line for line in self.lines if line.get("kind") == kind]

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_lines(path: Path, identity: str) -> Iterator[dict[str, Any]]:
    """Complete result lines of a file; torn ones are left out.

    Raises:
        SearchError: a line is of another bundle.
    """
    if not path.exists():
        return
    for text in path.read_text(errors="replace").splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        if not isinstance(line, dict):
            continue
        if line.get("bundle") != identity:
            raise SearchError(
                f"{path} holds results of bundle {line.get('bundle')}, not of {identity}; "
                f"give the results that this bundle's measure.py wrote"
            )
        yield line
