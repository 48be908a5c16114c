"""What each knob does to the Hopper forward at head dim 64 and 128: measured against predicted.

Reads the trials of the recorded searches (studies/data/search) and prints, for every config that differs from
the class's default in one or two knobs, how much faster or slower it is, and what the model says today. With
--pairs it reads the campaign and its fresh shapes instead: of every two configs of a shape that differ in one
knob alone, the ratio of the times that they took in turns, over all lengths.

    python studies/hopper_knobs.py [--version 2 | --pairs]
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from fa4tune.hardware.gpu import Gpu, load_gpu
from fa4tune.kernels.config import SM90ForwardConfig
from fa4tune.kernels.program import build_plan
from fa4tune.model.predict import predict
from fa4tune.problem import AttentionProblem
from fa4tune.record import Trial, read_trials

DATA = Path(__file__).parent / "data" / "search"
CAMPAIGNS = ("campaign.jsonl", "campaign_fresh.jsonl")
SHOWN = ("ablation", "asked")
"""Phases of trials that were chosen to differ from the default in little."""


def changed(trial: Trial, default: Trial) -> dict[str, Any]:
    """Knobs in which a trial differs from the default, registers left out: they follow the tile."""
    return {k: v for k, v in trial.config.items() if default.config[k] != v and k != "registers"}


def predicted(problem: AttentionProblem, trial: Trial, gpu: Gpu) -> float:
    """Microseconds that the model says of a trial's config."""
    config = SM90ForwardConfig.from_dict(trial.config)
    return predict(build_plan(problem, config, gpu), gpu).microseconds


def rows(path: Path) -> list[tuple[str, float, float]]:
    """(change, measured speed, predicted speed) of one search, relative to the default (above 1: faster).

    Times are medians of the rounds in which all configs of the search took turns.
    """
    gpu = load_gpu("h200")
    trials = [t for t in read_trials(path) if t.median_us and t.phase != "duel"]
    default = next(t for t in trials if t.phase == "default")
    problem = AttentionProblem.parse(default.problem)
    base = predicted(problem, default, gpu)
    assert default.median_us is not None
    found = []
    for trial in trials:
        if trial.phase in SHOWN and trial.median_us:
            text = ", ".join(f"{k}={v}" for k, v in changed(trial, default).items())
            found.append((text, default.median_us / trial.median_us, base / predicted(problem, trial, gpu)))
    return sorted(found)


@dataclass(frozen=True)
class Pair:
    """Two configs of one shape, measured in turns, that differ in ``knob``: ``speed`` is how much faster
    ``value`` is than ``before``, ``predicted`` what the model says."""

    problem: AttentionProblem
    knob: str
    before: Any
    value: Any
    speed: float
    predicted: float


def pairs(trials: Iterable[Trial]) -> list[Pair]:
    """Every two measured configs of a study that differ in one knob, registers (which follow) aside."""
    gpu = load_gpu("h200")
    studies: dict[tuple[str, str], list[Trial]] = defaultdict(list)
    for trial in trials:
        if trial.median_us and trial.phase != "duel":
            studies[trial.problem, trial.study].append(trial)
    found = []
    for (text, _), members in studies.items():
        problem = AttentionProblem.parse(text)
        for one, other in combinations(members, 2):
            differ = changed(one, other)
            if len(differ) != 1:
                continue
            (knob,) = differ
            low, high = sorted((one, other), key=lambda t: t.config[knob])
            ratio = predicted(problem, low, gpu) / predicted(problem, high, gpu)
            assert low.median_us is not None
            assert high.median_us is not None
            speed = low.median_us / high.median_us
            values = low.config[knob], high.config[knob]
            found.append(Pair(problem, knob, *values, speed, ratio))
    return found


def print_pairs() -> None:
    """One line for every class and change of a knob: geometric mean and range over the shapes."""
    known: dict[tuple[Any, ...], list[Pair]] = defaultdict(list)
    for name in CAMPAIGNS:
        for pair in pairs(read_trials(DATA.parent / name)):
            problem = pair.problem
            known[problem.head_dim, problem.mask, pair.knob, pair.before, pair.value].append(pair)
    print(f"{'class and change':48} pairs shapes measured   from     to predicted")
    for (dim, mask, knob, before, value), members in sorted(known.items(), key=str):
        speeds = [p.speed for p in members]
        print(
            f"{f'd{dim} {mask}: {knob} {before} -> {value}':48} {len(members):5} "
            f"{len({p.problem for p in members}):6} {statistics.geometric_mean(speeds):7.3f}x "
            f"{min(speeds):6.3f} {max(speeds):6.3f} "
            f"{statistics.geometric_mean(p.predicted for p in members):8.3f}x"
        )


def main() -> None:
    """Print every recorded search of a kernel version, or the pairs of the campaign."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--version", default="2", help="kernel version of the records")
    parser.add_argument("--pairs", action="store_true", help="pairs of the campaign that differ in one knob")
    arguments = parser.parse_args()
    if arguments.pairs:
        print_pairs()
        return
    version = arguments.version
    for path in sorted(DATA.glob(f"*-v{version}.jsonl")):
        problem = path.name.split("-")[0]
        print(f"\n{problem}\n{'change of the default':58} measured predicted")
        for text, measured, said in rows(path):
            print(f"{text:58} {measured:7.3f}x {said:8.3f}x")


if __name__ == "__main__":
    main()
