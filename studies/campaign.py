"""One measurement campaign: 28 configs of the Hopper forward on each of 30 shapes, good configs and bad.

The model is fitted to these records. It is judged on others: `--set judged` names 20 more shapes (lengths,
batches and head counts of their own, random configs of their own), which no fit and no choice of a mechanism
has seen. `--set fresh`, `second`, `third` and `fourth` are 20 each that earlier models were judged on, and
that mechanisms were compared on since.
Lengths are runtime arguments, so the configs of a (head dim, mask) share their compiled objects over all its
shapes.

    python studies/campaign.py export DIR [--part 1/2]   compile, and write a bundle to measure elsewhere
    python DIR/measure.py --out OUT                      on the GPU host, a few minutes a part
    python studies/campaign.py import OUT                append the trials to studies/data/campaign.jsonl
                                                         (each --set to its own file)
    fa4tune search --import OUT --table DIR              and, as any bundle, the winners to a table
    python studies/campaign.py summary                   what the file holds
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from fa4tune.hardware.gpu import Gpu, load_gpu
from fa4tune.kernels.config import KernelConfig, default_config
from fa4tune.outcome import Outcome
from fa4tune.problem import AttentionProblem
from fa4tune.record import Trial, append_trials, read_trials
from fa4tune.search.bundle import Settings
from fa4tune.search.candidates import Choice, predicted_time
from fa4tune.search.compiling import Built, build
from fa4tune.search.device import FLUSH_BYTES
from fa4tune.search.ranking import rank_space
from fa4tune.search.space import diverse, random_feasible
from fa4tune.search.transfer import export, load_results

DATA = Path(__file__).parent / "data" / "campaign.jsonl"
CONFIGS_A_CLASS = 28
GOOD = 14
"""Configs of a class from the model's ranking; also the default, winners of searches, and random ones."""

WINNERS = 4
"""Fastest configs of a recorded search of the class that every shape tries too."""


class ShapeSet(NamedTuple):
    """Shapes that belong together: a word by which their random configs are drawn, and what they are.

    ``shapes``: seqlen -> (batch, divisor of the 2048 / head_dim query heads, query heads a kv head).
    """

    seed: str
    shapes: dict[int, tuple[int, int, int]]


SETS = {
    # about 16k tokens, hidden size 2048, grouped heads at two lengths
    "fit": ShapeSet(
        "",
        {
            512: (32, 1, 1),
            1024: (16, 1, 1),
            2048: (8, 1, 4),
            4096: (4, 1, 1),
            8192: (2, 1, 4),
            16384: (1, 1, 1),
            32768: (1, 2, 1),
        },
    ),
    # four that earlier models were judged on; mechanisms have been compared on them since
    "fresh": ShapeSet(
        " fresh",
        {640: (20, 1, 1), 1536: (6, 1, 4), 3072: (8, 1, 1), 6144: (2, 2, 2), 24576: (1, 2, 8)},
    ),
    # that a queue orders roles only in part, and power of L2, came from these
    "second": ShapeSet(
        " second",
        {768: (24, 1, 1), 1280: (5, 1, 2), 2560: (6, 1, 8), 5120: (3, 2, 1), 12288: (2, 4, 1)},
    ),
    # the rules of votes, of independent arithmetic and of sections of many roles came after these
    "third": ShapeSet(
        " judged",
        {896: (12, 1, 1), 1792: (4, 1, 8), 3584: (4, 2, 2), 7168: (1, 1, 4), 14336: (1, 2, 1)},
    ),
    # that stores of P hide under exponentials came after these
    "fourth": ShapeSet(
        " fourth",
        {960: (16, 1, 1), 2304: (6, 1, 4), 4608: (3, 2, 2), 9216: (2, 2, 1), 20480: (1, 1, 8)},
    ),
    # what the model is judged on; nothing was fitted to them, and no mechanism chosen by them
    "judged": ShapeSet(
        " fifth",
        {1152: (14, 1, 1), 1920: (8, 1, 2), 3840: (4, 1, 4), 10240: (2, 2, 2), 18432: (1, 1, 1)},
    ),
}


def data_of(which: str) -> Path:
    """The file of a set's trials."""
    return DATA if which == "fit" else DATA.with_name(f"campaign_{which}.jsonl")


def pause_us(gpu: Gpu) -> float:
    """Between two kernels in turns: L2 is flushed by writing to HBM, and two kernels are launched."""
    return FLUSH_BYTES / (gpu.hbm_gbytes_per_s * 1e3 * gpu.hbm_efficiency) + 2.0 * gpu.launch_us


def shapes(head_dim: int, mask: str, which: str = "fit") -> list[AttentionProblem]:
    """The problems of one kernel class in a set of :data:`SETS`, shortest first."""
    found = []
    for seqlen, (batch, divisor, group) in SETS[which].shapes.items():
        heads = 2048 // head_dim // divisor
        found.append(
            AttentionProblem(batch, heads, heads // group, seqlen, seqlen, head_dim, head_dim, "bf16", mask)
        )
    if head_dim == 128 and which == "fit":  # grouped heads as a model of 8 billion parameters has them
        found.insert(-2, AttentionProblem(1, 32, 8, 8192, 8192, 128, 128, "bf16", mask))
    return found


def classes() -> list[tuple[int, str]]:
    """(head dim, mask) of every kernel class in the campaign."""
    return [(head_dim, mask) for head_dim in (64, 128) for mask in ("full", "causal")]


def held_out(problem: AttentionProblem) -> bool:
    """Whether a shape is kept from every fit: every other length, the other half for the causal mask."""
    index = list(SETS["fit"].shapes).index(problem.seqlen_q)
    return (index % 2 == 0) == (problem.mask == "causal")


def configs(head_dim: int, mask: str, gpu: Gpu, which: str = "fit") -> list[KernelConfig]:
    """The configs of one class: default, winners of searches, the model's diverse best, random feasible ones.

    Random ones are drawn by a fixed seed (another one for each set) from all feasible configs, so bad ones
    are among them.
    """
    problem = next(p for p in shapes(head_dim, mask) if p.seqlen_q == 4096)
    chosen = [default_config(problem, gpu.arch)]
    measured = [t for path in (DATA.parent / "search").glob(f"{problem}-*.jsonl") for t in read_trials(path)]
    measured = sorted((t for t in measured if t.median_us), key=lambda t: t.median_us or 0.0)
    for trial in measured[:WINNERS]:
        config = type(chosen[0]).from_dict(trial.config)
        if config not in chosen:
            chosen.append(config)
    chosen += [entry.config for entry in diverse(rank_space(problem, gpu), GOOD, taken=chosen)]
    rng = random.Random(f"{head_dim} {mask}{SETS[which].seed}")
    while len(chosen) < CONFIGS_A_CLASS:
        drawn = random_feasible(problem, gpu, rng)
        if drawn is not None and drawn not in chosen:
            chosen.append(drawn)
    return chosen


def write_bundle(directory: Path, part: int, parts: int, gpu: Gpu, which: str) -> None:
    """Compile and export part ``part`` (from 1) of ``parts``: every ``parts``-th shape of each class."""
    built: dict[AttentionProblem, list[Built]] = {}
    for head_dim, mask in classes():
        wanted = configs(head_dim, mask, gpu, which)
        own = shapes(head_dim, mask, which)
        choices = [Choice(c, "campaign" if i else "default", None) for i, c in enumerate(wanted)]
        kernels, failed = build(own[0], gpu, choices)
        for trial in failed:
            print(f"d{head_dim} {mask}: {trial.outcome}: {trial.reason}", file=sys.stderr)
        for problem in own[part - 1 :: parts]:
            built[problem] = [
                Built(
                    Choice(
                        item.choice.config,
                        item.choice.phase,
                        predicted_time(problem, item.choice.config, gpu),
                    ),
                    item.kernel,
                )
                for item in kernels
            ]
        print(f"d{head_dim} {mask}: {len(kernels)} configs", file=sys.stderr)
    written = export(directory, gpu, built, settings=Settings(rounds=11, duel_rounds=20), note=print)
    print(
        f"{written.directory}: {sum(written.candidates.values())} measurements, {written.size / 1e6:.1f} MB"
    )


def take(directory: Path, data: Path) -> list[Trial]:
    """Append a measured bundle's trials to a file of the campaign; trials already there are left out."""
    known = {_identity(t) for t in read_trials(data)} if data.exists() else set()
    trials = [
        trial
        for result in load_results(directory).results.values()
        for trial in result.trials
        if trial.phase != "duel" and _identity(trial) not in known
    ]
    append_trials(data, trials)
    return trials


def _identity(trial: Trial) -> tuple[str, str, int]:
    return trial.problem, str(trial.config), trial.kernel_version


def summary(data: Path) -> None:
    """Print what a file holds: by shape, configs, best and worst time, TFLOP/s of the best."""
    by_problem: dict[str, list[Trial]] = defaultdict(list)
    for trial in read_trials(data):
        by_problem[trial.problem].append(trial)
    print(f"{'problem':58}   n failed {'best us':>9} {'median':>7} {'worst':>7} TFLOP/s")
    for text, trials in by_problem.items():
        problem = AttentionProblem.parse(text)
        times = sorted(t.median_us for t in trials if t.outcome is Outcome.MEASURED and t.median_us)
        failed = len(trials) - len(times)
        print(
            f"{text:58} {len(times):3} {failed:4} {times[0]:10.1f} "
            f"{statistics.median(times) / times[0]:6.2f}x {times[-1] / times[0]:6.2f}x "
            f"{problem.flops_convention() / times[0] * 1e-6:7.0f}"
        )


def main() -> None:
    """Command line of the study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    out = verbs.add_parser("export")
    out.add_argument("directory", type=Path)
    out.add_argument("--part", default="1/1", help="I/N: only every N-th shape of a class, from the I-th")
    out.add_argument("--gpu", default="h200")
    back = verbs.add_parser("import")
    back.add_argument("directory", type=Path)
    table = verbs.add_parser("summary")
    for verb in (out, back, table):
        verb.add_argument(
            "--set", choices=tuple(SETS), default="fit", help="shapes to fit to, or to judge the model on"
        )
    options = parser.parse_args()
    if options.verb == "export":
        part, _, parts = options.part.partition("/")
        write_bundle(options.directory, int(part), int(parts), load_gpu(options.gpu), options.set)
        return
    data = data_of(options.set)
    if options.verb == "import":
        print(f"{len(take(options.directory, data))} trials added to {data}")
    else:
        summary(data)


if __name__ == "__main__":
    main()
