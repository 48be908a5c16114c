"""One entry of a tuned-kernel table: the config, its time, what it was measured against, and how."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from fa4tune.errors import ConfigError, Fa4tuneError, ProblemError, TableError
from fa4tune.kernels.config import CONFIGS, KernelConfig
from fa4tune.problem import AttentionProblem
from fa4tune.record import Protocol, Provenance
from fa4tune.table.key import TableKey

SCHEMA = 1
"""Version of the entry's schema. A reader treats a newer one as a miss."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """The best config found for one problem.

    Args:
        problem: canonical problem string.
        hardware_key, kernel_class, bucket, kernel_version: the key (:mod:`fa4tune.table.key`).
        config: knob values by name.
        source: whether ``median_us`` was ``measured`` or is the model's prediction.
        kernel: how far the kernel itself was executed: ``measured`` on a GPU, ``emulated``, or ``absent``.
        median_us, spread_us: median and interquartile range, in microseconds, of the config's time in the
            last duel (a prediction has no spread).
        default_us: the default config's time from the same source, taken alongside; None where it failed.
        ratio: ``default_us / median_us``; 1.0 where the default is the best.
        predicted_us: the model's time for the config.
        trials: configs that were timed (or predicted) to choose this one.
        provenance, protocol: where and how the time was taken.
        study: name of the study that wrote it.
    """

    problem: str
    hardware_key: str
    kernel_class: str
    bucket: str
    kernel_version: int
    config: dict[str, Any]
    source: Literal["measured", "predicted"]
    kernel: Literal["absent", "emulated", "measured"]
    median_us: float
    default_us: float | None = None
    ratio: float | None = None
    spread_us: float | None = None
    predicted_us: float | None = None
    trials: int = 1
    provenance: Provenance = Provenance()
    protocol: Protocol | None = None
    study: str = ""
    schema: int = SCHEMA

    @property
    def key(self) -> TableKey:
        """The key it is stored under."""
        return TableKey(self.hardware_key, self.kernel_class, self.bucket, self.kernel_version)

    def kernel_config(self) -> KernelConfig:
        """The config as its dataclass.

        Raises:
            ConfigError: the knobs are not those of the kernel, or a value is out of range.
        """
        arch = self.hardware_key.split("-", 1)[0]
        if arch not in CONFIGS:
            raise ConfigError(f"architecture {arch!r} of the entry has no kernel; use {', '.join(CONFIGS)}")
        try:
            return CONFIGS[arch].from_dict(self.config)
        except TypeError as error:
            raise ConfigError(f"config holds a value of the wrong type ({error})") from None


_ENCODER = msgspec.json.Encoder(order="deterministic")
_DECODER = msgspec.json.Decoder(Entry)


def encode_entry(entry: Entry) -> bytes:
    """The entry as indented JSON, newline at the end."""
    return msgspec.json.format(_ENCODER.encode(entry), indent=2) + b"\n"


def decode_entry(data: bytes) -> Entry:
    """The inverse of :func:`encode_entry`, with everything checked that can be without its place.

    Raises:
        TableError: not JSON, another schema, or a problem, config or time that makes no sense.
    """
    try:
        head = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise TableError(f"it is not JSON ({error})") from None
    schema = head.get("schema") if isinstance(head, dict) else None
    if not isinstance(schema, int) or "kernel_class" not in head:
        raise TableError("it is not an entry of a fa4tune table")
    if schema > SCHEMA:
        raise TableError(f"it has schema {schema} and this fa4tune reads up to {SCHEMA}; update fa4tune")
    try:
        entry = _DECODER.decode(data)
        AttentionProblem.parse(entry.problem)
        entry.kernel_config()
    except (msgspec.ValidationError, ProblemError, ConfigError) as error:
        raise TableError(f"it does not fit this fa4tune ({error})") from None
    if not entry.median_us > 0 or (entry.default_us is not None and not entry.default_us > 0):
        raise TableError(f"its times are not positive ({entry.median_us} and {entry.default_us})")
    return entry


def better(new: Entry, old: Entry) -> Entry:
    """The entry to keep of two for the same problem and key: merging's rule.

    Measured beats predicted; of two measured ones the faster wins, except that a later measurement of the
    same config replaces the earlier; of two predicted ones the later given wins. The winner keeps its own
    provenance.

    Raises:
        Fa4tuneError: they are not for the same problem and key.
    """
    if (new.problem, new.key) != (old.problem, old.key):
        raise Fa4tuneError(f"entries of {new.problem} at {new.key} and {old.problem} at {old.key} differ")
    if new.source != old.source:
        return new if new.source == "measured" else old
    if new.source == "predicted":
        return new
    if new.config == old.config:
        return new if new.provenance.measured_at >= old.provenance.measured_at else old
    return new if new.median_us < old.median_us else old
