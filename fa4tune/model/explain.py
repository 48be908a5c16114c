"""Say why a kernel is as fast as it is: units, what binds, budgets, and what each knob would change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fa4tune.errors import ConfigError, InfeasibleError
from fa4tune.hardware.gpu import Gpu
from fa4tune.kernels.config import KernelConfig
from fa4tune.kernels.plan import KernelPlan, Unit
from fa4tune.kernels.program import build_plan
from fa4tune.model.predict import BOUND_WORDS, SATURATED, Prediction, predict
from fa4tune.model.roofline import iteration_work, problem_work, roofline, smem_cycles, unit_cycles
from fa4tune.model.scaling import elasticities

UNIT_NAMES = {**BOUND_WORDS, Unit.HBM: "HBM"}
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

RATE_UNITS = {
    "mma": (Unit.TENSOR,),
    "exp": (Unit.EXP,),
    "issue": (Unit.ALU, Unit.FMA, Unit.ISSUE),
    "smem": (Unit.SMEM,),
    "tmem": (Unit.TMEM,),
    "l2": (Unit.L2,),
    "hbm": (),
}
"""Units whose operations a rate shortens most."""

REST = {
    "fill": "filling the pipeline",
    "tiles": "starts and ends of tiles",
    "launch": "the launch",
    "memory": "waiting for HBM",
}
"""Words for the parts of :func:`shares` beside the loop."""

MOST = 0.8
"""A loop of this part of the time stands for all of it."""

IDLE = 0.2
"""Idle CTAs beyond this part of the time are worth a sentence."""

BOUND_RATES = {BOUND_WORDS[unit]: rate for rate, units in RATE_UNITS.items() for unit in units}
"""The rate of each unit that a prediction can be bound by."""

OUTSIDE = "where tiles start and end, and where some warps have no work in an iteration"
BESIDE = {"hbm": "where tiles start, and keys, values and queries come from HBM"}
"""Where a rate counts that does not shorten the loop's period; by rate, else ``OUTSIDE``."""


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
    ``gains`` is, for each rate of the GPU, the percent of speed that one percent more of it gives;
    ``eases_loop`` whether the largest of them comes from a shorter period of the loop.
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
    eases_loop: bool
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


def paragraphs(explanation: Explanation) -> tuple[str, ...]:
    """What binds, where the time goes and what would help most, for somebody new to such kernels.

    They agree: where the rate that would help most does not act on what binds, the last says where it does.
    The second is left out where there is nothing to say.
    """
    parts = (_what_binds(explanation), _where_time_goes(explanation), _what_helps(explanation))
    return tuple(part for part in parts if part)


def in_words(explanation: Explanation) -> str:
    """:func:`paragraphs` as one text."""
    return " ".join(paragraphs(explanation))


def shares(prediction: Prediction) -> dict[str, float]:
    """Parts of a kernel's time as the CTA that finishes last spends it, and ``idle``.

    ``loop``, ``tiles``, ``fill``, ``launch`` and ``memory`` add up to 1; ``idle`` is the part of the time
    between fill and end for which the mean CTA has no work any more.
    """
    spent = prediction.breakdown
    work = spent["steady"] + spent["masked"] + spent["tiles"]
    last = (1.0 + spent["tail"] / work) / prediction.microseconds if work else 0.0
    return {
        "loop": (spent["steady"] + spent["masked"]) * last,
        "tiles": spent["tiles"] * last,
        **{name: spent[name] / prediction.microseconds for name in ("fill", "launch", "memory")},
        "idle": spent["tail"] / (work + spent["tail"]) if work else 0.0,
    }


def _what_binds(explanation: Explanation) -> str:
    plan, prediction, bound = explanation.plan, explanation.prediction, explanation.prediction.bound
    spent = prediction.breakdown
    if bound == "launch":
        return (
            f"The kernel is so short that launching it takes {spent['launch']:.2g} of its "
            f"{prediction.microseconds:.2g} us; more work a launch is what helps."
        )
    if bound == "memory" and spent["memory"] > 0:
        return (
            "Reading q, k and v from HBM and writing the output takes longer than all that is computed with "
            "them: no config changes that, fewer or narrower bytes do."
        )
    if bound == "memory":
        return (
            "Reading q, k and v from HBM and writing the output takes about as long as all that is computed "
            "with them: neither can gain much without the other."
        )
    rows = plan.tile_rows // plan.ctas_per_tile
    step = f"{prediction.period:.0f} cycles for every {plan.tile_n} keys of {rows} query rows"
    if bound == "latency chain":
        share, busiest = max((share, unit) for unit, share in prediction.utilisation.items())
        return (
            f"No unit is full: the busiest, {UNIT_NAMES[busiest]}, works {share:.0%} of the time. In the "
            f"loop over K/V tiles, operations wait for one another in a chain, "
            f"{' -> '.join(prediction.critical_cycle)}, which takes a CTA {step}. Only what shortens steps "
            f"of this chain, or keeps more chains in flight, makes the loop faster."
        )
    several = bound in ("tensor cores", "issue slots")
    text = f"In the loop over K/V tiles the {bound} {'are' if several else 'is'} full"
    working = explanation.cycles[Unit.TENSOR] * plan.resources.ctas_per_sm / prediction.period
    if bound == UNIT_NAMES[Unit.TENSOR] and working < SATURATED:
        text += (
            f" (for {1 - working:.0%} of the time they wait for operands in shared memory, which copies and "
            f"threads use too)"
        )
    them = "them" if several else "it"
    return f"{text}: a CTA takes {step}. What takes work off {them} helps, the rest hides behind."


def _where_time_goes(explanation: Explanation) -> str:
    """Where the loop, of which :func:`_what_binds` speaks, is not nearly all; and CTAs without work."""
    prediction = explanation.prediction
    part = shares(prediction)
    text = ""
    if prediction.bound not in ("launch", "memory") and part["loop"] < MOST:
        rest = sorted(((part[name], words) for name, words in REST.items()), reverse=True)
        named = ", ".join(f"{words} {share:.0%}" for share, words in rest if share >= 0.02)
        text = f"The loop is {part['loop']:.0%} of the time, the rest is: {named}. "
    if part["idle"] > IDLE:
        text += (
            f"Places for CTAs stand idle {part['idle']:.0%} of the time: the problem has too few tiles for "
            f"the GPU, or too unequal ones."
        )
    return text.strip()


def _what_helps(explanation: Explanation) -> str:
    prediction = explanation.prediction
    ranked = sorted(explanation.gains.items(), key=lambda g: -g[1])
    most = [(rate, gain) for rate, gain in ranked[:3] if gain >= 0.05]
    if not most:
        return (
            "No single rate of the GPU would help: what is left is latencies, the launch and the clock, "
            "which sags with power."
        )
    units = {operation.name: operation.unit for operation in explanation.plan.loop.body}

    def gains(rate: str, gain: float, first: bool) -> str:
        steps = [name for name in prediction.critical_cycle if units[name] in RATE_UNITS[rate]]
        through = f", in {', '.join(steps)}" if steps and prediction.bound == "latency chain" else ""
        return f"{RATE_NAMES[rate]} ({'1% more gives ' if first else ''}{gain:.2f}% of speed{through})"

    named = ", then ".join(gains(rate, gain, n == 0) for n, (rate, gain) in enumerate(most))
    text = f"Of the GPU's rates, more of these would help most: {named}."
    if prediction.bound not in ("launch", "memory") and not explanation.eases_loop:
        text += f" The first counts beside the steady state of the loop: {BESIDE.get(most[0][0], OUTSIDE)}."
    elif prediction.bound in BOUND_RATES and BOUND_RATES[prediction.bound] != most[0][0]:
        text += (
            f" The first is in the chain {' -> '.join(prediction.critical_cycle)}, which takes as long as "
            f"the {prediction.bound}: neither gains much without the other."
        )
    elif sum(gain for gain in explanation.gains.values() if gain > 0) < 0.7:
        text += " All rates together give less than 0.7%: the rest is latencies, launch and the clock."
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
    gains = elasticities(plan.problem, plan.config, gpu)
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
        gains=gains,
        eases_loop=_eases_loop(plan, gpu, prediction.period, gains),
        changes=knob_changes(plan, gpu, prediction.microseconds) if changes else (),
    )


def _eases_loop(plan: KernelPlan, gpu: Gpu, period: float, gains: dict[str, float]) -> bool:
    """Whether at least half of what the most helpful rate gives comes from a shorter period of the loop."""
    top, step = max(gains, key=gains.__getitem__), 1.05
    shorter = 1.0 - predict(plan, gpu.scaled(**{top: step})).period / period
    return shorter >= 0.5 * gains[top] * (step - 1.0)


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
