"""What clock a measured kernel ran at: common to all that take turns, and lower than sensors show.

Run `python studies/clock_in_turns.py`: prints, from `data/clock_in_turns.json`, how much longer eight configs
of each of four problems take in turns with 20 others than alone, beside the ratio of the clocks that
nvidia-smi showed; and, for kernels that a profiler read (`data/ncu_h200.jsonl`), the clock that its cycles
and the time in turns of the campaign give, beside the shown one.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean, pstdev

from campaign import DATA, data_of

from fa4tune.record import read_trials

TURNS = Path(__file__).parent / "data" / "clock_in_turns.json"
PROFILED = Path(__file__).parent / "data" / "ncu_h200.jsonl"


def turns() -> list[float]:
    """Print the first table; (time in turns over alone) over (clock alone over in turns), of each config."""
    print("in turns against alone: time ratio, shown clocks (alone, in turns) and their ratio")
    found = []
    for entry in json.loads(TURNS.read_text())["problems"]:
        print(entry["problem"])
        for row in entry["configs"]:
            time = row["turns_us"] / row["alone_us"]
            clock = row["alone_clock_mhz"] / entry["turns_clock_mhz"]
            found.append(time / clock)
            config = row["config"]
            print(
                f"  tile {config['tile_m']:3d}x{config['tile_n']:<3d} {row['alone_us']:8.1f} us alone, "
                f"{time:.3f}   {row['alone_clock_mhz']:.0f}, {entry['turns_clock_mhz']:.0f} MHz, {clock:.3f}"
            )
    return found


def shown() -> list[float]:
    """Print the second table; true over shown clock of each profiled kernel that the campaign measured."""
    measured = {
        (trial.problem, repr(sorted(trial.config.items()))): trial
        for path in (DATA, data_of("fresh"))
        for trial in read_trials(path)
        if trial.median_us and trial.provenance.clock_mhz
    }
    print("\nprofiled cycles over time in turns: true clock, shown clock, ratio")
    found = []
    for line in PROFILED.read_text().splitlines():
        row = json.loads(line)
        trial = measured.get((row.get("problem", ""), repr(sorted(row.get("config", {}).items()))))
        if trial is None or trial.median_us is None or trial.provenance.clock_mhz is None:
            continue
        true = row["duration_ns"] * 1e-3 * row["clock_hz"] * 1e-6 / trial.median_us
        found.append(true / trial.provenance.clock_mhz)
        print(f"  {trial.problem:54s} {true:5.0f} {trial.provenance.clock_mhz:5.0f} {found[-1]:.3f}")
    return found


def main() -> None:
    """Print both tables and what they come to."""
    ratios = turns()
    print(
        f"time ratio over clock ratio: mean {fmean(ratios):.3f}, standard deviation {pstdev(ratios):.3f}, "
        f"{len(ratios)} configs"
    )
    ratios = shown()
    print(
        f"true over shown: mean {fmean(ratios):.3f}, standard deviation {pstdev(ratios):.3f}, "
        f"{len(ratios)} kernels"
    )


if __name__ == "__main__":
    main()
