"""Say why a kernel is as fast as it is: units, what binds, budgets, and what each knob would change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fa4tune.errors import ConfigError, InfeasibleError
from fa4tune.hardware.gpu import Gpu
from fa4tune.kernels.config import KernelConfig
from fa4tune.kernels.plan import KernelPlan, Unit
from fa4tune.kernels.program import build_plan
from fa4tune.model.predict import Prediction, predict
from fa4tune.model.roofline import iteration_work, problem_work, roofline, smem_cycles, unit_cycles
from fa4tune.model.scaling import elasticities

UNIT_NAMES = {
    Unit.TENSOR: "tensor cores",
    Unit.SMEM: "shared memory",
    Unit.EXP: "exponential unit",
    Unit.FMA: "FMA",
    Unit.ALU: "ALU",
    Unit.ISSUE: "issue slots",
    Unit.TMEM: "tensor memory",
    Unit.L2: "L2",
    Unit.HBM: "HBM",
}
"""Words for people."""


RATE_NAMES = {
    "mma": "tensor cores",
    "exp": "exponential unit",
    "issue": "instruction issue",
    "smem": "shared memory",
    "tmem": "tensor memory",
    "l2": "L2",
    "hbm": "HBM",
}
"""Words for the rates of :data:`fa4tune.model.scaling.ELASTIC`."""


@dataclass(frozen=True, slots=True)
class KnobChange:
    """One knob at another value: the predicted time, or why it cannot run."""

    knob: str
    value: Any
    microseconds: float | None
    speedup: float | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Everything ``fa4tune explain`` shows of one config on one GPU.

    ``cycles`` are of one unmasked K/V iteration of one CTA; its SMEM lines are split by path in
    ``smem_paths``. ``hbm_cycles`` is the same iteration's share of the problem's compulsory HBM traffic.
    ``flops_per_byte`` is the problem's own arithmetic intensity, whatever kernel runs it: exact FLOPs over
    compulsory bytes; below ``ridge_flops_per_byte`` (peak over HBM bandwidth) no kernel is compute-bound.
    ``gains`` is, for each rate of the GPU, the percent of speed that one percent more of it gives.
    """

    plan: KernelPlan
    gpu: Gpu
    prediction: Prediction
    cycles: dict[Unit, float]
    smem_paths: dict[str, float]
    hbm_cycles: float
    roofline_bound: Unit
    roofline_tflops: float
    flops_per_byte: float
    ridge_flops_per_byte: float
    gains: dict[str, float]
    changes: tuple[KnobChange, ...]

    @property
    def memory_bound(self) -> bool:
        """Whether the problem itself, not this kernel, is bound by HBM."""
        return self.flops_per_byte < self.ridge_flops_per_byte

    def as_dict(self) -> dict[str, Any]:
        """The JSON object of ``fa4tune explain --json``."""
        resources, problem = self.plan.resources, self.plan.problem
        return {
            "problem": str(problem),
            "gpu": self.gpu.name,
            "hardware_key": self.gpu.key,
            "kernel": self.plan.name,
            "config": self.plan.config.as_dict() if isinstance(self.plan.config, KernelConfig) else {},
            "predicted_us": self.prediction.microseconds,
            "predicted_tflops": self.prediction.tflops,
            "predicted_tflops_exact_flops": self.prediction.tflops_exact,
            "share_of_peak": self.prediction.tflops_exact / self.gpu.peak_tflops,
            "peak_tflops": self.gpu.peak_tflops,
            "bound": self.prediction.bound,
            "roofline": {"bound": str(self.roofline_bound), "tflops_exact_flops": self.roofline_tflops},
            "intensity": {
                "flops_per_byte": self.flops_per_byte,
                "ridge_flops_per_byte": self.ridge_flops_per_byte,
                "bound": "memory" if self.memory_bound else "compute",
            },
            "cycles": {
                **{str(unit): cycles for unit, cycles in self.cycles.items()},
                **{f"smem_{path}": cycles for path, cycles in self.smem_paths.items()},
                "hbm": self.hbm_cycles,
            },
            "tile": {"rows": self.plan.tile_rows, "keys": self.plan.tile_n},
            "utilisation": {str(u): share for u, share in self.prediction.utilisation.items()},
            "period_cycles": self.prediction.period,
            "clock_mhz": self.prediction.clock_mhz,
            "breakdown_us": dict(self.prediction.breakdown),
            "critical_cycle": list(self.prediction.critical_cycle),
            "critical_steps": [
                {"operation": s.operation, "cycles": s.cycles, "then": s.why, "tiles": s.distance}
                for s in self.prediction.steps
            ],
            "gains": self.gains,
            "in_words": in_words(self),
            "budgets": {
                "smem_bytes": resources.smem_bytes,
                "smem_limit": resources.smem_limit,
                "tmem_columns": resources.tmem_columns,
                "tmem_limit": resources.tmem_limit,
                "registers": resources.registers,
                "registers_limit": resources.registers_limit,
                "threads": resources.threads,
                "ctas_per_sm": resources.ctas_per_sm,
                "roles": {role.name: role.registers for role in self.plan.roles},
            },
            "changes": [
                {
                    "knob": change.knob,
                    "value": list(change.value) if isinstance(change.value, tuple) else change.value,
                    "predicted_us": change.microseconds,
                    "speedup": change.speedup,
                    **({"reason": change.reason} if change.reason else {}),
                }
                for change in self.changes
            ],
        }


def in_words(explanation: Explanation) -> str:
    """What binds and what would help, in sentences for somebody who sees such a kernel for the first time."""
    plan, prediction = explanation.plan, explanation.prediction
    bound = prediction.bound
    share, busiest = max((share, unit) for unit, share in prediction.utilisation.items())
    rows = plan.tile_rows // plan.ctas_per_tile
    step = (
        f"a CTA works through {plan.tile_n} keys for {rows} query rows in {prediction.period:.0f} cycles, "
        f"again and again"
    )
    chain = " -> ".join(prediction.critical_cycle)
    if bound == "launch":
        text = (
            f"The kernel is so short that launching it takes {prediction.breakdown['launch']:.2g} of its "
            f"{prediction.microseconds:.2g} us; more work a launch is what helps."
        )
    elif bound == "memory":
        text = (
            "Reading q, k and v from HBM and writing the output takes longer than all that is computed with "
            "them: no config changes that, fewer or narrower bytes do."
        )
    elif bound == "latency chain":
        text = (
            f"No unit is full: the busiest, {UNIT_NAMES[busiest]}, works {share:.0%} of the time. What takes "
            f"the time is a chain of operations that wait for one another, {chain}: {step}, because the "
            f"chain is that long. Only what shortens the chain, or keeps more of them in flight, helps."
        )
    else:
        text = f"The {bound} cannot do more"
        if bound == UNIT_NAMES[Unit.SMEM] and busiest == Unit.TENSOR:
            text = (
                "The tensor cores cannot do more, because they wait for operands in shared memory while "
                "copies and threads use it"
            )
        text += (
            f": {step}, and nothing else is as busy. Work taken off them, or more of them, helps; the rest "
            f"hides behind."
        )
        if chain:
            text += f" A chain about as long: {chain}."
    most = sorted(explanation.gains.items(), key=lambda g: -g[1])[:3]
    gains = ", ".join(f"{RATE_NAMES[rate]} {gain:.2f}%" for rate, gain in most if gain >= 0.05)
    if gains:
        text += f" One percent more of a rate would make it faster by: {gains}."
    return text


def explain(plan: KernelPlan, gpu: Gpu, *, changes: bool = True) -> Explanation:
    """Explain ``plan`` on ``gpu``; ``changes=False`` leaves out the knob-by-knob what-if.

    All cycles are sums over plan operations over rates of the hardware file.
    """
    work = iteration_work(plan)
    cycles = {unit: value for unit, value in unit_cycles(work, gpu).items() if unit != Unit.TMEM or value}
    paths = smem_cycles(work, gpu)
    bounds = roofline(plan, gpu)
    iterations = max(1e-9, problem_work(plan).mma_flops / max(1, work.mma_flops))
    hbm_per_clock = gpu.hbm_bytes_per_clk
    prediction = predict(plan, gpu)
    assert isinstance(plan.config, KernelConfig)
    return Explanation(
        plan=plan,
        gpu=gpu,
        prediction=prediction,
        cycles=cycles,
        smem_paths={
            "mma_reads": paths.mma,
            "tma_writes": paths.tma_write,
            "tma_reads": paths.tma_read,
            "generic": paths.generic,
            "dsmem": paths.dsmem,
        },
        hbm_cycles=plan.problem.compulsory_bytes() / iterations / hbm_per_clock,
        roofline_bound=bounds.bound,
        roofline_tflops=plan.problem.flops() / bounds.time * 1e-12,
        flops_per_byte=plan.problem.flops() / plan.problem.compulsory_bytes(),
        ridge_flops_per_byte=gpu.peak_tflops * 1e3 / gpu.hbm_gbytes_per_s,
        gains=elasticities(plan.problem, plan.config, gpu),
        changes=knob_changes(plan, gpu, prediction.microseconds) if changes else (),
    )


def knob_changes(plan: KernelPlan, gpu: Gpu, microseconds: float) -> tuple[KnobChange, ...]:
    """Each knob at each other value a search would try, one at a time, fastest first.

    A value that cannot run stands at the end, with the reasons.
    """
    config = plan.config
    assert isinstance(config, KernelConfig)
    found: list[KnobChange] = []
    for knob in config.knobs():
        for value in config.choices(knob):
            if knob == "registers" and value == ():
                continue
            try:
                changed = config.replace(**{knob: value})
                if changed == config:
                    continue
                time = predict(build_plan(plan.problem, changed, gpu), gpu).microseconds
            except (InfeasibleError, ConfigError) as error:
                reasons = error.reasons if isinstance(error, InfeasibleError) else (str(error),)
                found.append(KnobChange(knob, value, None, None, "; ".join(reasons)))
                continue
            found.append(KnobChange(knob, value, time, microseconds / time))
    return tuple(sorted(found, key=lambda c: (c.microseconds is None, c.microseconds or 0.0)))
