"""The configs and GPUs that one ``fa4tune explain`` compares, and what a table has measured of each."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from fa4tune.cli.common import choose_config
from fa4tune.hardware.gpu import Gpu, choose_gpu
from fa4tune.kernels.program import build_plan
from fa4tune.model.explain import Explanation, explain
from fa4tune.problem import AttentionProblem

if TYPE_CHECKING:
    from fa4tune.table.entry import Entry
    from fa4tune.table.store import Hit, Table


@dataclass(frozen=True, slots=True)
class Case:
    """One config on one GPU, explained.

    ``measured_us`` is the table's median for exactly this problem, GPU and config, or None; ``best`` the
    table's measured entry for the problem where that is another config.
    """

    label: str
    explanation: Explanation
    measured_us: float | None
    best: Entry | None

    @property
    def error(self) -> float | None:
        """Predicted over measured, less 1."""
        if self.measured_us is None:
            return None
        return self.explanation.prediction.microseconds / self.measured_us - 1.0

    def as_dict(self) -> dict[str, Any]:
        """The explanation's JSON object with what was measured."""
        found = self.explanation.as_dict() | {"measured_us": self.measured_us, "error": self.error}
        if self.best is not None:
            found["tuned"] = {"config": self.best.config, "measured_us": self.best.median_us}
        return found


def cases(
    problem: AttentionProblem, gpus: list[str], arch: str | None, configs: list[str], table: Table
) -> list[Case]:
    """Every config on every GPU, in the order given, GPUs outermost.

    Args:
        problem: what all of them compute.
        gpus: names or files; none: the default GPU (of ``arch``).
        arch: as ``--arch``.
        configs: as ``--config``; none: the class's default.
        table: where measured times come from.

    Raises:
        ConfigError: a config does not exist, or ``tuned`` and the table has none.
        InfeasibleError: a config cannot run on its GPU.
    """
    names: list[str | None] = [*gpus] or [None]
    texts: list[str | None] = [*configs] or [None]
    pairs = list(product(names, texts))
    loaded = {name: choose_gpu(name, arch) for name in names}
    alike = Counter(gpu.name for gpu in loaded.values())
    found = []
    for name, text in pairs:
        gpu = loaded[name]
        hit = table.lookup(problem, gpu)
        chosen = choose_config(problem, gpu, text, table)
        explanation = explain(build_plan(problem, chosen, gpu), gpu, changes=len(pairs) == 1)
        measured, best = _measured(problem, gpu, explanation, hit)
        parts = []
        if len(gpus) > 1:  # two files may have one name
            parts.append(gpu.name if alike[gpu.name] == 1 else str(name))
        if len(configs) > 1 or not parts:
            parts.append(text or "default")
        found.append(Case(" ".join(parts), explanation, measured, best))
    return found


def _measured(
    problem: AttentionProblem, gpu: Gpu, explanation: Explanation, hit: Hit | None
) -> tuple[float | None, Entry | None]:
    from fa4tune.kernels.config import default_config

    if hit is None or not hit.exact or hit.entry.source != "measured":
        return None, None
    entry, config = hit.entry, explanation.plan.config
    if config == entry.kernel_config():
        return entry.median_us, None
    return (entry.default_us if config == default_config(problem, gpu.arch) else None), entry
