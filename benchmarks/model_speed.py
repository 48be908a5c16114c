"""Predictions a second on one core, plans built beforehand, each an object of its own.

Run `python benchmarks/model_speed.py`. Two sweeps: over the configs that the campaigns measured on an H200,
by kernel class, and over random feasible configs of one problem, as a search makes them. Caches are cold at
the beginning of a sweep; a second one over equal plans finds them warm. CPU time, so that other load on the
machine counts less.
"""

import json
import multiprocessing
import random
import time
from pathlib import Path

from fa4tune.errors import ConfigError, InfeasibleError
from fa4tune.hardware.gpu import Gpu, load_gpu
from fa4tune.kernels.config import default_config
from fa4tune.kernels.plan import KernelPlan
from fa4tune.kernels.program import build_plan
from fa4tune.model.predict import predict
from fa4tune.problem import AttentionProblem

DATA = Path(__file__).parents[1] / "studies" / "data"
CAMPAIGNS = ("campaign.jsonl", "campaign_fresh.jsonl")

CASES = (
    ("h200", "b4_hq16_hk16_sq4096_sk4096_d128_dv128_bf16_full_fwd"),
    ("h200", "b4_hq32_hk32_sq4096_sk4096_d64_dv64_bf16_causal_fwd"),
    ("b200", "b4_hq16_hk16_sq8192_sk8192_d128_dv128_bf16_full_fwd"),
    ("b200", "b4_hq16_hk16_sq8192_sk8192_d128_dv128_bf16_causal_fwd"),
)
CONFIGS = 600


def kernel_class(problem: AttentionProblem) -> str:
    """What the first sweep tells apart."""
    return f"d{problem.head_dim} {problem.mask_kind}"


def measured_trials() -> list[tuple[AttentionProblem, dict[str, object]]]:
    """(problem, knobs) of all configs that the campaigns measured, each once."""
    found = {}
    for name in CAMPAIGNS:
        for line in (DATA / name).read_text().splitlines():
            trial = json.loads(line)
            knobs = {k: tuple(v) if isinstance(v, list) else v for k, v in trial["config"].items()}
            found[trial["problem"], str(knobs)] = AttentionProblem.parse(trial["problem"]), knobs
    return list(found.values())


def random_plans(gpu: Gpu, text: str) -> tuple[list[KernelPlan], float]:
    """Feasible plans, and CPU seconds for a plan tried."""
    problem, rng = AttentionProblem.parse(text), random.Random(0)
    base = default_config(problem, gpu.arch)
    plans: list[KernelPlan] = []
    tried, start = 0, time.process_time()
    while len(plans) < CONFIGS:
        tried += 1
        try:
            config = base.replace(**{name: rng.choice(base.choices(name)) for name in base.knobs()})
            plans.append(build_plan(problem, config, gpu))
        except (ConfigError, InfeasibleError):
            continue
    return plans, (time.process_time() - start) / tried


def speed(plans: list[KernelPlan], gpu: Gpu) -> float:
    """Predictions a second."""
    start = time.process_time()
    for plan in plans:
        predict(plan, gpu)
    return len(plans) / (time.process_time() - start)


def cold_and_warm(plans: list[KernelPlan], again: list[KernelPlan], gpu: Gpu) -> str:
    """What both sweeps show; the second goes over equal plans that are other objects."""
    cold = speed(plans, gpu)
    return f"{cold:6.0f} a second, caches warm {speed(again, gpu):6.0f} ({len(plans)} configs)"


def measured(label: str) -> str:
    """The sweep over the measured configs of one kernel class."""
    gpu = load_gpu("h200")
    trials = [
        (p, default_config(p, gpu.arch), knobs) for p, knobs in measured_trials() if kernel_class(p) == label
    ]
    plans, again = (
        [build_plan(p, base.replace(**knobs), gpu) for p, base, knobs in trials] for _ in range(2)
    )
    return f"measured configs, {label:11s} {cold_and_warm(plans, again, gpu)}"


def searched(case: tuple[str, str]) -> str:
    """The sweep over random configs of one problem."""
    gpu = load_gpu(case[0])
    plans, building = random_plans(gpu, case[1])
    told = cold_and_warm(plans, random_plans(gpu, case[1])[0], gpu)
    return f"random configs, {' '.join(case)}: {told}, plans {building * 1e6:.0f} us each"


def main() -> None:
    labels = sorted({kernel_class(problem) for problem, _ in measured_trials()})
    # a process for each sweep: caches are cold
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for line in pool.imap(measured, labels):
            print(line, flush=True)
        for line in pool.imap(searched, CASES):
            print(line, flush=True)


if __name__ == "__main__":
    main()
