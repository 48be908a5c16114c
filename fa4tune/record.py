"""The trial record: one JSON line for each config that was tried, whatever became of it.

Search, model validation, replay and studies read the same schema. Lines are appended and never rewritten.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from fa4tune.errors import SearchError
from fa4tune.outcome import Outcome

SCHEMA = 1
"""Version of the record's schema. A reader refuses a newer one."""


class Provenance(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where numbers come from. Times are not comparable without it.

    Clocks are SM clocks in MHz: the median read while timing; ``power_limit_watts`` the board's cap.
    """

    gpu: str = ""
    driver: str = ""
    cuda_flavour: str = ""
    cutlass_dsl: str = ""
    torch: str = ""
    python: str = ""
    fa4tune: str = ""
    clock_mhz: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    temperature_c: float | None = None
    measured_at: str = ""


class Protocol(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a time was taken. It belongs to the number as its unit does.

    ``timing`` says what one sample is (``cuda_graph``: a kernel in a graph replay; ``events``: between two
    events); ``l2`` is ``cold`` where the cache is flushed before each sample; ``interleaved`` configs took
    turns, one sample each round.
    """

    timing: str = "events"
    l2: str = "cold"
    inputs: str = "gaussian"
    warmup: int = 0
    rounds: int = 0
    interleaved: bool = True


class Trial(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One config tried on one problem.

    Args:
        problem: canonical problem string.
        kernel_class: family and everything compiled in but the config.
        kernel_version: integer of the kernel when it was compiled.
        config: knob values by name.
        hardware_key: architecture, SM count, memory class.
        outcome: what became of it; ``reason`` says why where no time belongs to it.
        samples_us: raw times in microseconds, in the order taken.
        median_us, spread_us: median and interquartile range of the samples (``predicted_us`` is the model's).
        error: relative error against float64 by kind of input, and the yardstick's, ``{"gaussian": [ours,
            rounded float32]}``.
        resources: registers, spills and SMEM from the machine code.
        phase: ``default``, ``model``, ``sampler``, ``duel`` or ``campaign``: why it was tried.
    """

    problem: str
    kernel_class: str
    config: dict[str, Any]
    hardware_key: str
    outcome: Outcome
    reason: str = ""
    samples_us: list[float] = []
    median_us: float | None = None
    spread_us: float | None = None
    predicted_us: float | None = None
    error: dict[str, list[float]] = {}
    resources: dict[str, int] = {}
    compile_s: float | None = None
    kernel_version: int = 1
    provenance: Provenance = Provenance()
    protocol: Protocol | None = None
    phase: str = ""
    study: str = ""
    schema: int = SCHEMA


_ENCODER = msgspec.json.Encoder(order="deterministic")
_DECODER = msgspec.json.Decoder(Trial)


def encode_trial(trial: Trial) -> bytes:
    """One JSON line, newline included. The schema number is always written."""
    data = msgspec.to_builtins(trial)
    return _ENCODER.encode({"schema": trial.schema, **data}) + b"\n"


def decode_trial(line: bytes | str) -> Trial:
    """The inverse of :func:`encode_trial`.

    Raises:
        SearchError: the line is not a trial record, or has a newer schema.
    """
    try:
        trial = _DECODER.decode(line)
    except (msgspec.ValidationError, msgspec.DecodeError, RecursionError) as error:
        start = (line.encode() if isinstance(line, str) else line)[:60]
        raise SearchError(f"not a trial record ({error}); the line begins {start!r}") from None
    if trial.schema > SCHEMA:
        raise SearchError(
            f"trial record has schema {trial.schema}, this fa4tune reads up to {SCHEMA}; "
            f"install a newer fa4tune"
        )
    return trial


def append_trials(path: Path, trials: Iterable[Trial]) -> None:
    """Append records to a JSON-lines file, each line in one write, flushed to disk before returning."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        for trial in trials:
            file.write(encode_trial(trial))
            file.flush()
        os.fsync(file.fileno())


def read_trials(path: Path) -> Iterator[Trial]:
    """Records of a JSON-lines file. A torn last line (a writer killed in the middle) is left out.

    Raises:
        SearchError: a complete line is not a trial record, or has a newer schema.
    """
    data = path.read_bytes()
    lines = data.split(b"\n")
    for number, line in enumerate(lines[:-1], 1):  # behind the last newline: nothing, or a torn line
        if line.strip():
            try:
                trial = decode_trial(line)
            except SearchError as error:
                raise SearchError(f"line {number} of {path}: {error}") from None
            yield trial
