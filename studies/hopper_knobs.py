"""What each knob does to the Hopper forward at head dim 64 and 128: measured against predicted.

Reads the trials of the recorded searches (studies/data/search) and prints, for every config that differs from
the class's default in one or two knobs, how much faster or slower it is, and what the model says today.

    python studies/hopper_knobs.py [--version 2]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fa4tune.hardware.gpu import load_gpu
from fa4tune.kernels.config import SM90ForwardConfig
from fa4tune.kernels.program import build_plan
from fa4tune.model.predict import predict
from fa4tune.problem import AttentionProblem
from fa4tune.record import Trial, read_trials

DATA = Path(__file__).parent / "data" / "search"
SHOWN = ("ablation", "asked")
"""Phases of trials that were chosen to differ from the default in little."""


def changed(trial: Trial, default: Trial) -> dict[str, Any]:
    """Knobs in which a trial differs from the default, registers left out: they follow the tile."""
    return {k: v for k, v in trial.config.items() if default.config[k] != v and k != "registers"}


def rows(path: Path) -> list[tuple[str, float, float]]:
    """(change, measured speed, predicted speed) of one search, relative to the default (above 1: faster).

    Times are medians of the rounds in which all configs of the search took turns.
    """
    gpu = load_gpu("h200")
    trials = [t for t in read_trials(path) if t.median_us and t.phase != "duel"]
    default = next(t for t in trials if t.phase == "default")
    problem = AttentionProblem.parse(default.problem)

    def predicted(trial: Trial) -> float:
        config = SM90ForwardConfig.from_dict(trial.config)
        return predict(build_plan(problem, config, gpu), gpu).microseconds

    base = predicted(default)
    assert default.median_us is not None
    found = []
    for trial in trials:
        if trial.phase in SHOWN and trial.median_us:
            text = ", ".join(f"{k}={v}" for k, v in changed(trial, default).items())
            found.append((text, default.median_us / trial.median_us, base / predicted(trial)))
    return sorted(found)


def main() -> None:
    """Print every recorded search of a kernel version."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--version", default="2", help="kernel version of the records")
    version = parser.parse_args().version
    for path in sorted(DATA.glob(f"*-v{version}.jsonl")):
        problem = path.name.split("-")[0]
        print(f"\n{problem}\n{'change of the default':58} measured predicted")
        for text, measured, predicted in rows(path):
            print(f"{text:58} {measured:7.3f}x {predicted:8.3f}x")


if __name__ == "__main__":
    main()
