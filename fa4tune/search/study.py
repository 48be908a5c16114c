"""A study: all trials of one problem on one kind of GPU, kept so that nothing finished is ever lost.

Two files side by side hold the same trials. The record file (JSON lines of :class:`fa4tune.record.Trial`) is
written first and is what other tools read; the Optuna study (a journal file, or any Optuna storage URL) is
what dashboards and fleets read. A process killed between the two is made good at the next start.
"""

from __future__ import annotations

import contextlib
import os
import socket
import warnings
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from fa4tune.errors import SearchError
from fa4tune.hardware.gpu import Gpu
from fa4tune.kernels.config import CONFIGS, KernelConfig
from fa4tune.outcome import Outcome
from fa4tune.problem import AttentionProblem
from fa4tune.record import Trial, append_trials, decode_trial, encode_trial, read_trials
from fa4tune.table.key import table_key
from fa4tune.table.store import data_directory

if TYPE_CHECKING:
    import optuna

RECORD = "fa4tune_record"
OWNER = "fa4tune_owner"
"""User attributes of an Optuna trial: its record as JSON, and the host and process that runs it."""


def default_directory() -> Path:
    """Where studies are kept: ``FA4TUNE_STUDIES`` if set, else ``studies`` in the data directory."""
    chosen = os.environ.get("FA4TUNE_STUDIES")
    return Path(chosen) if chosen else data_directory() / "studies"


class _JournalLock:
    """A lock on the journal that the system frees when its holder dies, however it dies."""

    def __init__(self, path: str) -> None:
        self._lock = FileLock(path + ".lock")

    def acquire(self) -> bool:
        self._lock.acquire()
        return True

    def release(self) -> None:
        self._lock.release()


class Study:
    """Trials of one problem.

    Args:
        problem, gpu: what is searched.
        directory: of record file and journal; default the user's data directory.
        storage: Optuna storage URL in place of the journal file (``sqlite:///FILE``, ``postgresql://...``).

    Raises:
        SearchError: the directory or the storage cannot be used; the sentence says what to do.
    """

    def __init__(
        self,
        problem: AttentionProblem,
        gpu: Gpu,
        *,
        directory: Path | None = None,
        storage: str | None = None,
    ) -> None:
        self.problem, self.gpu = problem, gpu
        self.key = table_key(problem, gpu)
        self.name = f"{problem}-{gpu.key}-v{self.key.kernel_version}"
        self.directory = directory or default_directory()
        self.record_path = self.directory / f"{self.name}.jsonl"
        self._optuna = self._open(storage)
        self._heal()

    def _open(self, url: str | None) -> optuna.Study:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            storage: Any = url
            if url is None:
                path = str(self.directory / f"{self.name}.journal")
                lock: Any = _JournalLock(path)
                lock.acquire()
                _drop_torn_line(Path(path))
                lock.release()
                storage = JournalStorage(JournalFileBackend(path, lock_obj=lock))
            return optuna.create_study(
                study_name=self.name, storage=storage, direction="minimize", load_if_exists=True
            )
        except OSError as error:
            raise SearchError(
                f"studies cannot be kept in {self.directory} ({error.strerror or error}); "
                f"give a writable directory with --studies DIR or FA4TUNE_STUDIES"
            ) from None
        except Exception as error:  # Optuna lets its database driver's errors through
            raise SearchError(
                f"storage {url!r} cannot be used ({str(error).splitlines()[0]}); give an Optuna storage URL"
            ) from None

    def _heal(self) -> None:
        """Bring record file and Optuna study to the same trials; fail what dead processes left running."""
        from optuna.trial import TrialState

        for trial in self._optuna.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if _is_dead(trial.user_attrs.get(OWNER, "")):
                self._optuna.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)
        in_file = {encode_trial(t): t for t in self._read()}
        in_study = {line.encode() + b"\n" for line in self._lines()}
        if self.record_path.exists():
            _drop_torn_line(self.record_path)
        append_trials(self.record_path, [decode_trial(d) for d in sorted(in_study - set(in_file))])
        for data in in_file:
            if data not in in_study:
                self._insert(in_file[data])

    def _lines(self) -> Iterator[str]:
        for trial in self._optuna.get_trials(deepcopy=False):
            line = trial.user_attrs.get(RECORD)
            if line is not None and trial.state.is_finished():
                yield line

    def _read(self) -> list[Trial]:
        return list(read_trials(self.record_path)) if self.record_path.exists() else []

    # ------------------------------------------------------------------ trials

    def trials(self) -> list[Trial]:
        """Every finished trial, oldest first."""
        return self._read()

    def tried(self) -> dict[KernelConfig, float | None]:
        """Configs that need no further trial: the latest measured median in us, or None for a failure."""
        cls = CONFIGS[self.gpu.arch]
        found: dict[KernelConfig, float | None] = {}
        for trial in self._read():
            with contextlib.suppress(ValueError):  # written for other knobs
                config = cls.from_dict(trial.config)
                if trial.outcome is Outcome.MEASURED and trial.median_us is not None:
                    found[config] = trial.median_us
                elif trial.outcome is not Outcome.PREDICTED:
                    found.setdefault(config, None)
        return found

    def begin(self, config: KernelConfig, phase: str) -> int:
        """Say in the Optuna study that ``config`` is being tried; returns the trial's number."""
        owner = f"{socket.gethostname()}:{os.getpid()}"
        parameters, distributions = parameters_of(config)
        self._optuna.enqueue_trial(parameters, user_attrs={"phase": phase, OWNER: owner})
        trial = self._optuna.ask(fixed_distributions=distributions)
        trial.set_user_attr("config", str(config))
        return trial.number

    def finish(self, number: int, record: Trial) -> None:
        """Store the outcome of a trial that :meth:`begin` opened: on disk before this returns."""
        from optuna.trial import TrialState

        append_trials(self.record_path, [record])
        trials = self._optuna.get_trials(deepcopy=False)
        storage, trial_id = self._optuna._storage, trials[number]._trial_id
        storage.set_trial_user_attr(trial_id, RECORD, encode_trial(record).decode().rstrip("\n"))
        if record.outcome.has_time:
            self._optuna.tell(number, record.median_us)
        else:
            self._optuna.tell(number, state=TrialState.FAIL)

    def abandon(self, number: int) -> None:
        """Close a trial that was begun and not measured."""
        from optuna.trial import TrialState

        self._optuna.tell(number, state=TrialState.FAIL, skip_if_finished=True)

    def add(self, records: list[Trial]) -> list[Trial]:
        """Store trials that were made elsewhere; those it already has are left out. Returns the new ones."""
        known = {encode_trial(t) for t in self._read()}
        new = [t for t in records if encode_trial(t) not in known]
        append_trials(self.record_path, new)
        for record in new:
            self._insert(record)
        return new

    def _insert(self, record: Trial) -> None:
        from optuna.trial import TrialState, create_trial

        attributes = {
            "phase": record.phase,
            "outcome": record.outcome.value,
            RECORD: encode_trial(record).decode().rstrip("\n"),
        }
        parameters: dict[str, Any] = {}
        distributions: dict[str, Any] = {}
        with contextlib.suppress(ValueError):
            config = CONFIGS[self.gpu.arch].from_dict(record.config)
            parameters, distributions = parameters_of(config)
            attributes["config"] = str(config)
        has_time = record.outcome.has_time and record.median_us is not None
        self._optuna.add_trial(
            create_trial(
                state=TrialState.COMPLETE if has_time else TrialState.FAIL,
                value=record.median_us if has_time else None,
                params=parameters,
                distributions=distributions,
                user_attrs=attributes,
            )
        )

    @property
    def optuna_study(self) -> optuna.Study:
        """The Optuna study, for dashboards and analysis."""
        return self._optuna


def _is_dead(owner: str) -> bool:
    """Whether the process ``host:pid`` is known to be gone: only this host's processes can be asked."""
    host, _, pid = owner.rpartition(":")
    if host != socket.gethostname() or not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _drop_torn_line(path: Path) -> None:
    """Cut off what a writer killed in the middle of a line left, so that the next line starts on its own."""
    if not path.exists():
        return
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    if end != len(data):
        os.truncate(path, end)


# -- knobs as Optuna parameters ------------------------------------------------------------------------------


def parameters_of(config: KernelConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """The config as Optuna parameters with their distributions, without values outside a knob's choices."""
    parameters, distributions = {}, {}
    for name, distribution in distributions_of(type(config)).items():
        value = _to_parameter(config, name)
        if _holds(distribution, value):
            parameters[name], distributions[name] = value, distribution
    return parameters, distributions


def _holds(distribution: Any, value: Any) -> bool:
    choices = getattr(distribution, "choices", None)
    if choices is not None:
        return value in choices
    return bool(
        distribution.low <= value <= distribution.high and not (value - distribution.low) % distribution.step
    )


def distributions_of(cls: type[KernelConfig]) -> dict[str, Any]:
    """An Optuna distribution a knob: evenly spaced integers are a range, everything else a category."""
    from optuna.distributions import CategoricalDistribution, IntDistribution

    found: dict[str, Any] = {}
    for name in cls.knobs():
        choices = cls.choices(name)
        steps = {b - a for a, b in pairwise(choices)} if _integers(choices) else set()
        if len(steps) == 1:
            found[name] = IntDistribution(choices[0], choices[-1], step=steps.pop())
        else:
            found[name] = CategoricalDistribution([_plain(c) for c in choices])
    return found


def config_of(cls: type[KernelConfig], parameters: dict[str, Any]) -> KernelConfig:
    """The inverse of :func:`parameters_of`.

    Raises:
        ConfigError: a combination that the config class refuses.
    """
    parse = {name: cls.knobs()[name].metadata["parse"] for name in parameters}
    values = {n: parse[n](v) if isinstance(v, str) and v else v for n, v in parameters.items()}
    return cls(**{n: () if v == "" else v for n, v in values.items()})


def _integers(choices: tuple[Any, ...]) -> bool:
    return len(choices) > 1 and all(isinstance(c, int) and not isinstance(c, bool) for c in choices)


def _plain(value: Any) -> Any:
    """A knob's value as Optuna stores it: tuples as text, the empty one (the default) as empty text."""
    return "/".join(map(str, value)) if isinstance(value, tuple) else value


def _to_parameter(config: KernelConfig, name: str) -> Any:
    value = getattr(config, name)
    if isinstance(value, tuple) and () in type(config).choices(name) and config.replace() == config:
        return ""
    return _plain(value)
