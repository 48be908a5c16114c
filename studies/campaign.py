"""One measurement campaign: 26 configs of the Hopper forward on each of 28 shapes, good configs and bad.

The records are what the model is fitted to (half of the shapes) and judged on (the other half). Lengths are
runtime arguments, so the configs of a (head dim, mask) share their compiled objects over all its shapes.

    python studies/campaign.py export DIR [--part 1/2]   compile, and write a bundle to measure elsewhere
    python DIR/measure.py --out OUT                      on the GPU host, a few minutes a part
    python studies/campaign.py import OUT                append the trials to studies/data/campaign.jsonl
    python studies/campaign.py summary                   what the file holds
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections import defaultdict
from pathlib import Path

from fa4tune.hardware.gpu import Gpu, load_gpu
from fa4tune.kernels.config import KernelConfig, default_config
from fa4tune.outcome import Outcome
from fa4tune.problem import AttentionProblem
from fa4tune.record import Trial, append_trials, read_trials
from fa4tune.search.bundle import Settings
from fa4tune.search.candidates import Choice, predicted_time
from fa4tune.search.compiling import Built, build
from fa4tune.search.ranking import rank_space
from fa4tune.search.space import diverse, random_feasible
from fa4tune.search.transfer import export, load_results

DATA = Path(__file__).parent / "data" / "campaign.jsonl"
CONFIGS_A_CLASS = 26
GOOD = 14
"""Configs of a class from the model's ranking, the default among them; the others are drawn at random."""

# batch, heads, kv_heads by sequence length: about 16k tokens, hidden size 2048, grouped heads at two lengths
SHAPES = {
    512: (32, 1, 1),
    1024: (16, 1, 1),
    2048: (8, 1, 4),
    4096: (4, 1, 1),
    8192: (2, 1, 4),
    16384: (1, 1, 1),
    32768: (1, 2, 1),
}
"""seqlen -> (batch, divisor of the 2048 / head_dim query heads, query heads a kv head)."""


def shapes(head_dim: int, mask: str) -> list[AttentionProblem]:
    """The campaign's problems of one kernel class, shortest first."""
    found = []
    for seqlen, (batch, divisor, group) in SHAPES.items():
        heads = 2048 // head_dim // divisor
        found.append(
            AttentionProblem(batch, heads, heads // group, seqlen, seqlen, head_dim, head_dim, "bf16", mask)
        )
    return found


def classes() -> list[tuple[int, str]]:
    """(head dim, mask) of every kernel class in the campaign."""
    return [(head_dim, mask) for head_dim in (64, 128) for mask in ("full", "causal")]


def held_out(problem: AttentionProblem) -> bool:
    """Whether a shape is kept from every fit: every other length, the other half for the causal mask."""
    index = list(SHAPES).index(problem.seqlen_q)
    return (index % 2 == 0) == (problem.mask == "causal")


def configs(head_dim: int, mask: str, gpu: Gpu) -> list[KernelConfig]:
    """The configs of one class: the default, the model's diverse best, and random feasible ones.

    Random ones are drawn by a fixed seed from all feasible configs, so bad ones are among them.
    """
    problem = next(p for p in shapes(head_dim, mask) if p.seqlen_q == 4096)
    default = default_config(problem, gpu.arch)
    good = diverse(rank_space(problem, gpu), GOOD - 1, taken=[default])
    chosen = [default, *(entry.config for entry in good)]
    rng = random.Random(f"{head_dim} {mask}")
    while len(chosen) < CONFIGS_A_CLASS:
        drawn = random_feasible(problem, gpu, rng)
        if drawn is not None and drawn not in chosen:
            chosen.append(drawn)
    return chosen


def write_bundle(directory: Path, part: int, parts: int, gpu: Gpu) -> None:
    """Compile and export part ``part`` (from 1) of ``parts``: every ``parts``-th shape of each class."""
    built: dict[AttentionProblem, list[Built]] = {}
    for head_dim, mask in classes():
        wanted = configs(head_dim, mask, gpu)
        own = shapes(head_dim, mask)
        choices = [Choice(c, "campaign" if i else "default", None) for i, c in enumerate(wanted)]
        kernels, failed = build(own[3], gpu, choices)
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
    # one comparison a shape is enough here: nothing is written to a table, so there is no duel
    written = export(directory, gpu, built, settings=Settings(rounds=11, duel_rounds=0), note=print)
    print(
        f"{written.directory}: {sum(written.candidates.values())} measurements, {written.size / 1e6:.1f} MB"
    )


def take(directory: Path) -> list[Trial]:
    """Append a measured bundle's trials to the campaign's file; trials already there are left out."""
    known = {(t.problem, str(t.config)) for t in read_trials(DATA)} if DATA.exists() else set()
    trials = [
        trial
        for result in load_results(directory).results.values()
        for trial in result.trials
        if (trial.problem, str(trial.config)) not in known
    ]
    append_trials(DATA, trials)
    return trials


def summary() -> None:
    """Print what the campaign holds: by shape, configs, best and worst time, TFLOP/s of the best."""
    by_problem: dict[str, list[Trial]] = defaultdict(list)
    for trial in read_trials(DATA):
        by_problem[trial.problem].append(trial)
    print(f"{'problem':58} {'':8} n failed {'best us':>9} {'median':>7} {'worst':>7} TFLOP/s")
    for text, trials in by_problem.items():
        problem = AttentionProblem.parse(text)
        times = sorted(t.median_us for t in trials if t.outcome is Outcome.MEASURED and t.median_us)
        failed = len(trials) - len(times)
        split = "held out" if held_out(problem) else "fit"
        print(
            f"{text:58} {split:8} {len(times)} {failed:4} {times[0]:10.1f} "
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
    verbs.add_parser("summary")
    options = parser.parse_args()
    if options.verb == "export":
        part, _, parts = options.part.partition("/")
        write_bundle(options.directory, int(part), int(parts), load_gpu(options.gpu))
    elif options.verb == "import":
        print(f"{len(take(options.directory))} trials added to {DATA}")
    else:
        summary()


if __name__ == "__main__":
    main()
