"""Fit the hardware file's free constants to the campaign, by cross-validation, and write the overlay.

Run `python studies/model_fit.py`: reads the times of `studies/data/campaign.jsonl` and the cycles of
`studies/data/ncu_cycles_h200.jsonl`, fits at most 12 bounded constants to all of them, prints what moved and
how well problems outside each fold are predicted, and writes `fa4tune/hardware/calibrated/h200.toml`, which
the GPU's own file is overlaid with from then on. Shapes of another campaign judge the result
(`model_accuracy.py`); `--half` fits to half of these shapes only, so that the other half can.
"""

import argparse
import hashlib
from pathlib import Path

from campaign import DATA, held_out, pause_us
from kernel_profile import CYCLES_DATA

from fa4tune.hardware.gpu import load_gpu
from fa4tune.model.accuracy import SHORTLIST, profiled, samples
from fa4tune.model.fit import CONSTANTS, fit, overlay
from fa4tune.record import read_trials

ROOT = Path(__file__).parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", default="h200", help="GPU by name, without its overlay")
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--half", action="store_true", help="leave every other shape out altogether")
    parser.add_argument("--out", type=Path, help="overlay to write")
    arguments = parser.parse_args()
    gpu = load_gpu(arguments.gpu, fitted=False)
    digest = hashlib.sha256(DATA.read_bytes() + CYCLES_DATA.read_bytes()).hexdigest()[:12]
    found = [s for s in samples(read_trials(DATA), gpu) if not (arguments.half and held_out(s.problem))]
    kernels = profiled(CYCLES_DATA, gpu)
    result = fit(found, kernels, gpu, pause_us(gpu), folds=arguments.folds)
    print(
        f"{result.samples} samples of {result.problems} problems, cycles of {result.kernels} kernels, "
        f"{DATA.name} and {CYCLES_DATA.name} sha256 {digest}\n"
    )
    print(f"{'constant':26s} {'before':>9s} {'fitted':>9s} {'+-folds':>9s}   bounds")
    for constant in CONSTANTS:
        name = constant.name
        print(
            f"{name:26s} {getattr(gpu, name):9.4g} {result.constants[name]:9.4g} {result.spread[name]:9.2g} "
            f"{constant.low:g} to {constant.high:g}: {constant.why}"
        )
    print(
        f"\n{'':12s} {'MAPE':>6s} {'good':>6s} {'max':>6s} {'Spearman':>9s} {'regret':>7s} {'worst':>6s} "
        f"{f'best<={SHORTLIST}':>8s}"
    )
    for label, a in (("before", result.before), ("held out", result.held_out), ("fitted", result.after)):
        print(
            f"{label:12s} {a.mape:6.1%} {a.good_mape:6.1%} {a.good_maximum:6.1%} {a.median_spearman:9.3f} "
            f"{a.regret:7.3f} {a.worst_regret:6.3f} {a.in_shortlist:8.0%}"
        )
    print(f"cycles of profiled kernels: mean error {result.cycles_error:.1%}")
    path = arguments.out or ROOT / "fa4tune" / "hardware" / "calibrated" / f"{arguments.gpu}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    files = f"studies/data: {DATA.name} and {CYCLES_DATA.name}, sha256 {digest}"
    path.write_text(overlay(result, arguments.gpu, files))
    print(f"\nwrote {path}")


if __name__ == "__main__":
    main()
