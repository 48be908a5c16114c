"""Predictions a second on one core, over random feasible configs; plans are built beforehand.

Run `python benchmarks/model_speed.py`. CPU time, so that other load on the machine counts less.
"""

import random
import time

from fa4tune.errors import ConfigError, InfeasibleError
from fa4tune.hardware.gpu import load_gpu
from fa4tune.kernels.config import default_config
from fa4tune.kernels.plan import KernelPlan
from fa4tune.kernels.program import build_plan
from fa4tune.model.predict import predict
from fa4tune.problem import AttentionProblem

CASES = (
    ("h200", "b4_hq16_hk16_sq4096_sk4096_d128_dv128_bf16_full_fwd"),
    ("h200", "b4_hq32_hk32_sq4096_sk4096_d64_dv64_bf16_causal_fwd"),
    ("b200", "b4_hq16_hk16_sq8192_sk8192_d128_dv128_bf16_full_fwd"),
    ("b200", "b4_hq16_hk16_sq8192_sk8192_d128_dv128_bf16_causal_fwd"),
)
CONFIGS = 600


def random_plans(gpu_name: str, text: str) -> tuple[list[KernelPlan], float]:
    """Feasible plans, and CPU seconds for a plan tried."""
    gpu, problem, rng = load_gpu(gpu_name), AttentionProblem.parse(text), random.Random(0)
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


def main() -> None:
    for gpu_name, text in CASES:
        plans, building = random_plans(gpu_name, text)
        gpu = load_gpu(gpu_name)
        start = time.process_time()
        for plan in plans:
            predict(plan, gpu)
        spent = (time.process_time() - start) / len(plans)
        print(
            f"{gpu_name} {text}: {1 / spent:.0f} predictions a second ({spent * 1e6:.0f} us each), "
            f"plans {building * 1e6:.0f} us each"
        )


if __name__ == "__main__":
    main()
