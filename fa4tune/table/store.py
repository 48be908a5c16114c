"""Tables on disk: one file an entry, written atomically, read with every fault a miss.

``DIR/<hardware key>/<kernel class>-v<kernel version>/<bucket>/<problem>.json``: an exact lookup opens one
file, a bucket lookup lists one directory. Several processes may write one table: a writer locks it, keeps the
better of both entries and replaces the file in one step, so no reader sees half of one and no update is lost.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

import platformdirs
from filelock import FileLock, Timeout

from fa4tune.errors import TableError, TablePathError
from fa4tune.hardware.gpu import Gpu
from fa4tune.problem import AttentionProblem
from fa4tune.table.entry import Entry, better, decode_entry, encode_entry
from fa4tune.table.key import TableKey, distance, table_key

LOCK = ".lock"
"""File in a table that its writers lock; it stays behind, empty."""

LOCK_SECONDS = 30
"""How long a writer waits for others."""


class TableWarning(UserWarning):
    """A table file was left out; the message names it and says why."""


_warned: set[str] = set()


def _warn_once(path: Path, reason: str) -> None:
    name = str(path)
    if name not in _warned:
        _warned.add(name)
        warnings.warn(
            f"table entry {name} is left out: {reason}; run `fa4tune table check` or remove the file",
            TableWarning,
            stacklevel=3,
        )


def data_directory() -> Path:
    """Where tables and studies are kept: ``FA4TUNE_DATA`` if set, else the user's data directory."""
    return Path(os.environ.get("FA4TUNE_DATA") or platformdirs.user_data_dir("fa4tune"))


def default_directory() -> Path:
    """The user's own table: ``FA4TUNE_TABLE`` if set, else ``table`` in the data directory."""
    chosen = os.environ.get("FA4TUNE_TABLE")
    return Path(chosen) if chosen else data_directory() / "table"


@cache
def packaged_directory() -> Path:
    """The read-only tables that come with the package."""
    return Path(str(resources.files("fa4tune.table"))) / "data"


@dataclass(frozen=True, slots=True)
class Hit:
    """What a lookup found: the entry, its file, and whether it was tuned for exactly this problem."""

    entry: Entry
    path: Path
    exact: bool


@dataclass(frozen=True, slots=True)
class Fault:
    """A file of a table that is not used, and why."""

    path: Path
    reason: str


class Table:
    """Tables stacked over each other: the first directory is written, the others are only read.

    Args:
        directory: the table to write; the user's own by default.
        fallback: further tables to look in, in order; by default those that come with the package.
    """

    def __init__(
        self, directory: Path | str | None = None, *, fallback: Sequence[Path | str] | None = None
    ) -> None:
        self.directory = Path(directory) if directory is not None else default_directory()
        others = [packaged_directory()] if fallback is None else [Path(p) for p in fallback]
        self.directories = (self.directory, *others)

    # ------------------------------------------------------------------ reading

    def lookup(self, problem: AttentionProblem, gpu: Gpu) -> Hit | None:
        """The entry to use for ``problem`` on ``gpu``, or None.

        Measured entries before predicted ones; among these the exact problem before its bucket; in a bucket
        the nearest problem; and the written table before the others. Unusable files are misses, each with one
        warning in a process.
        """
        key = table_key(problem, gpu)
        best: tuple[tuple[bool, bool, float, int, str], Hit] | None = None
        for order, root in enumerate(self.directories):
            for path in self._files(root.joinpath(*key.parts)):
                entry = self._read(path, key)
                if entry is None:
                    continue
                exact = entry.problem == str(problem)
                far = 0.0 if exact else distance(AttentionProblem.parse(entry.problem), problem)
                rank = (entry.source != "measured", not exact, far, order, entry.problem)
                if best is None or rank < best[0]:
                    best = rank, Hit(entry, path, exact)
        return best[1] if best else None

    def entries(self) -> Iterator[tuple[Path, Entry]]:
        """All usable entries of all stacked tables, by path; each unusable file gives one warning."""
        for path, entry, reason in self._scan():
            if entry is None:
                _warn_once(path, reason)
            else:
                yield path, entry

    def faults(self) -> list[Fault]:
        """Every file that is not a usable entry in its place, with its reason."""
        return [Fault(path, reason) for path, entry, reason in self._scan() if entry is None]

    def _scan(self) -> Iterator[tuple[Path, Entry | None, str]]:
        for root in self.directories:
            for path in sorted(root.rglob("*.json")) if root.is_dir() else ():
                try:
                    yield path, _load(path, None, root), ""
                except TableError as error:
                    yield path, None, str(error)

    def _present(self, entry: Entry) -> Entry | None:
        """What the written table holds in the place of ``entry``; None where nothing usable."""
        try:
            return _load(self.path(entry), entry.key, None)
        except TableError:
            return None

    @staticmethod
    def _files(folder: Path) -> list[Path]:
        try:
            return sorted(path for path in folder.iterdir() if path.suffix == ".json")
        except OSError:
            return []

    @staticmethod
    def _read(path: Path, key: TableKey) -> Entry | None:
        try:
            return _load(path, key, None)
        except TableError as error:
            _warn_once(path, str(error))
            return None

    # ------------------------------------------------------------------ writing

    def path(self, entry: Entry) -> Path:
        """Where ``entry`` is written."""
        return self.directory.joinpath(*entry.key.parts, f"{entry.problem}.json")

    def require_writable(self) -> None:
        """Find out before minutes of work whether :meth:`put` can write.

        Raises:
            TableError: the table cannot be written.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.directory):
                pass
        except OSError as error:
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> TablePathError:
        return TablePathError(
            f"table {self.directory} cannot be written ({error.strerror or error}); "
            f"give a writable one with --table DIR or FA4TUNE_TABLE"
        )

    def put(self, entry: Entry, *, replace: bool = False) -> Path:
        """Write ``entry``, unless the table holds a better one (:func:`better`).

        Args:
            entry: what to write.
            replace: write it whatever the table holds: for a search that measured the present entry's config
                again along with its own candidates.

        Returns:
            the path of the entry.

        Raises:
            TableError: the table cannot be written.
        """
        path = self.path(entry)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(self.directory / LOCK, timeout=LOCK_SECONDS):
                present = None if replace else self._present(entry)
                if present is not None:
                    entry = better(entry, present)
                _write_atomic(path, encode_entry(entry))
        except Timeout:
            raise TableError(
                f"another process has held {self.directory / LOCK} for {LOCK_SECONDS} s; try again"
            ) from None
        except OSError as error:
            raise self._unwritable(error) from None
        return path

    def merge(self, other: Path | str) -> tuple[int, list[Fault]]:
        """Take over every entry of another table that is better than this one's, provenance with it.

        Returns:
            how many entries of this table changed, and the other's unusable files.

        Raises:
            TableError: ``other`` is not a directory, or this table cannot be written.
        """
        root = Path(other)
        if not root.is_dir():
            raise TablePathError(f"table {str(root)!r} is not a directory; give one that a search wrote")
        source = Table(root, fallback=())
        changed, faults = 0, []
        for path, entry, reason in source._scan():
            if entry is None:
                faults.append(Fault(path, reason))
                continue
            before = self._present(entry)
            self.put(entry)
            changed += self._present(entry) != before
        return changed, faults


def _load(path: Path, key: TableKey | None, root: Path | None) -> Entry:
    """Read one entry and hold it against its place: the looked-up ``key``, or its path under ``root``."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TableError(f"it cannot be read ({error.strerror or error})") from None
    entry = decode_entry(data)
    fits = entry.key == key if key is not None else path.parent == (root or path).joinpath(*entry.key.parts)
    if not fits or path.stem != entry.problem:
        raise TableError(f"it belongs to {entry.problem} at {entry.key}, not where it lies")
    return entry


def _write_atomic(path: Path, data: bytes) -> None:
    """Write a file beside ``path``, flush it to disk, and rename it: all of it appears or nothing."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
