"""From microbenchmark results to hardware numbers: an overlay TOML whose numbers say how they were measured.

Pure arithmetic over the lines that a calibration wrote. Each number has one rule here, with the definition
that :class:`fa4tune.hardware.gpu.Gpu` gives it; one whose measurement failed or makes no sense is left out
with the reason, and keeps the base file's value.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fa4tune.errors import HardwareError
from fa4tune.hardware.gpu import Gpu, gpu_names, load_gpu
from fa4tune.kernels.micro.suite import BESIDE_MATMULS

WARP = 32

SCHEDULERS = 4
"""Warp schedulers of an SM; a warpgroup has one warp on each."""

PLAUSIBLE = {"rate": (0.5, 1.6), "latency": (0.05, 12.0), "part": (0.0, 1.2), "power": (0.3, 3.0)}
"""Range of a measured number over the base file's by kind (of a part: of the number itself). Beyond it the
measurement is taken to be wrong."""

FIXED_POINT = 0.6411857
"""Where 2^-x = x: what iterated exponentials approach."""

_MAXIMA = ("FMNMX", "VIMNMX")

SECTION_KEYS = (64, 128, 176)
"""Keys of the softmax sections measured."""


@dataclass(frozen=True, slots=True)
class Measurements:
    """Results of one bundle.

    Args:
        environment: facts of the machine.
        probes: by name: ``cycles`` and ``us`` of an iteration, ``rate`` in ``unit`` a clock and CTA.
        launches: by name: microseconds of a launch without work.
        loads: by name: clock and power under a load.
        kernels: by name: ``loop`` (opcodes of an iteration), ``skipped`` (those that a branch jumps over),
            ``spill_bytes``.
        failed: what could not be measured, with the reason.
    """

    environment: Mapping[str, Any]
    probes: Mapping[str, Mapping[str, Any]]
    launches: Mapping[str, Mapping[str, Any]]
    loads: Mapping[str, Mapping[str, Any]]
    kernels: Mapping[str, Mapping[str, Any]]
    failed: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_lines(
        cls, lines: Iterable[Mapping[str, Any]], kernels: Mapping[str, Mapping[str, Any]]
    ) -> Measurements:
        """Sort result lines; of several with one name the last counts.

        Raises:
            HardwareError: no line says which machine they are from.
        """
        by_kind: dict[str, dict[str, Mapping[str, Any]]] = {"probe": {}, "launch": {}, "load": {}}
        environment: Mapping[str, Any] | None = None
        failed: dict[str, str] = {}
        for line in lines:
            kind = line.get("kind")
            if kind == "environment":
                environment = line
            elif kind == "failed":
                failed[" ".join(line["task"])] = line["reason"]
            elif kind in by_kind:
                by_kind[kind][line["name"]] = line
                failed.pop(f"{kind} {line['name']}", None)
        if environment is None:
            raise HardwareError("the results name no machine; run calibrate.py of the bundle on a GPU first")
        return cls(environment, by_kind["probe"], by_kind["launch"], by_kind["load"], kernels, failed)

    def cycles(self, name: str) -> float:
        """Cycles of an iteration of a probe."""
        return float(self._probe(name)["cycles"])

    def rate(self, name: str) -> float:
        """Work of a CTA in a clock."""
        return float(self._probe(name)["rate"])

    def _probe(self, name: str) -> Mapping[str, Any]:
        found = self.probes.get(name)
        if found is None:
            raise _Missing(self.failed.get(f"probe {name}") or f"{name} was not measured")
        return found

    def load(self, name: str) -> Mapping[str, Any]:
        """Clock and power under a load."""
        found = self.loads.get(name)
        if found is None:
            raise _Missing(self.failed.get(f"load {name}") or f"load {name} was not measured")
        return found

    def loop(self, kernel: str, *opcodes: str) -> int:
        """Machine instructions of a warp in an iteration: all, or those that begin with ``opcodes``."""
        found = self.kernels.get(kernel, {})
        loop: Mapping[str, int] = found.get("loop", {})
        if not loop:
            raise _Missing(f"the instructions of {kernel} are not known")
        skipped: Mapping[str, int] = found.get("skipped", {})
        return sum(
            count - skipped.get(opcode, 0)
            for opcode, count in loop.items()
            if not opcodes or opcode.startswith(opcodes)
        )


class _Missing(Exception):  # noqa: N818 - a signal within this file
    """A measurement that a rule needs is not there or makes no sense."""


@dataclass(frozen=True, slots=True)
class Number:
    """One calibrated field of :class:`~fa4tune.hardware.gpu.Gpu`."""

    field: str
    value: float
    source: str


@dataclass(frozen=True, slots=True)
class Calibration:
    """The numbers of an overlay file.

    ``left_out`` says by field why a number keeps the base's value; ``doubts`` what in the measurements looks
    wrong.
    """

    base: str
    name: str
    title: str
    origin: str
    numbers: tuple[Number, ...]
    left_out: Mapping[str, str]
    doubts: tuple[str, ...]

    def to_toml(self) -> str:
        """The overlay file; :func:`fa4tune.hardware.gpu.load_gpu` reads it."""
        lines = [
            f"# {self.origin}.",
            f"# Numbers not here are those of {self.base}.",
            f"base = {json.dumps(self.base)}",
            f"name = {json.dumps(self.name)}",
            f"title = {json.dumps(self.title)}",
        ]
        for number in self.numbers:
            value = f"{number.value:.0f}" if number.value == int(number.value) else f"{number.value:.5g}"
            source = json.dumps(number.source, ensure_ascii=False)
            lines += ["", f"[{number.field}]", f"value = {value}", f"source = {source}"]
        return "\n".join(lines) + "\n"


def base_gpu(environment: Mapping[str, Any]) -> Gpu:
    """The GPU of this package that a machine is nearest to: same architecture, closest memory and SM count.

    Raises:
        HardwareError: no GPU of that architecture is known.
    """
    arch = str(environment["arch"])
    known = [gpu for gpu in map(load_gpu, gpu_names()) if gpu.arch == arch]
    if not known:
        raise HardwareError(f"no GPU of {arch} is known to start from; known are {', '.join(gpu_names())}")

    def distance(gpu: Gpu) -> float:
        memory = abs(float(environment["memory_bytes"]) / gpu.hbm_bytes - 1.0)
        return memory + abs(int(environment["sm_count"]) / gpu.sm_count - 1.0)

    return min(known, key=distance)


def calibrate(measured: Measurements, base: Gpu) -> Calibration:
    """Apply every rule.

    Args:
        measured: results of one machine.
        base: what the overlay starts from; see :func:`base_gpu`.
    """
    environment = measured.environment
    date = str(environment.get("measured_at", ""))[:10]
    where = f"measured on {environment.get('gpu', 'this GPU')}, {date}"
    numbers: list[Number] = []
    left_out: dict[str, str] = {}
    for name, kind, rule in _RULES:
        try:
            value, how = rule(measured, base)
            _check(name, kind, value, base)
        except _Missing as missing:
            left_out[name] = str(missing)
            continue
        numbers.append(Number(name, value, f"{where}: {how}"))
    versions = ", ".join(
        f"{label} {environment[key]}"
        for label, key in (("driver", "driver"), ("torch", "torch"), ("CUTLASS DSL", "compiler_cutlass_dsl"))
        if environment.get(key)
    )
    return Calibration(
        base.name,
        f"{base.name}-calibrated",
        f"{base.title}, calibrated {date}",
        f"Calibrated by fa4tune on {environment.get('gpu', 'a GPU')} on {date} ({versions})",
        tuple(numbers),
        left_out,
        tuple(_doubts(measured)),
    )


def _check(name: str, kind: str, value: float, base: Gpu) -> None:
    low, high = PLAUSIBLE.get(kind, (0.0, float("inf")))
    reference = 1.0 if kind == "part" else float(getattr(base, name))
    if kind in PLAUSIBLE and not low * reference <= value <= high * reference:
        raise _Missing(
            f"{value:.4g} was measured, outside {low * reference:.4g} to {high * reference:.4g}, "
            f"which is taken to be wrong"
        )


def _doubts(measured: Measurements) -> Iterable[str]:
    """What says that kernels did not do what they should."""
    for name, chains in (("ex2", 8), ("polynomial", 8)):
        for label, times in (("throughput", chains), ("warp", chains), ("latency", 1)):
            line = measured.probes.get(f"{name}.{label}")
            sink = line.get("sink") if line else None
            if line and not (
                isinstance(sink, float | int) and abs(sink - times * FIXED_POINT) < 2e-3 * times
            ):
                yield f"{name}.{label} computed {sink}, not {times * FIXED_POINT:.4f}"
    for name, kernel in measured.kernels.items():
        if kernel.get("spill_bytes"):
            yield f"kernel {name} spills {kernel['spill_bytes']} bytes of registers"
    for name, line in measured.probes.items():
        runs = [run[1] / run[0] for run in line.get("launches", ()) if run[0]]
        if runs and line["cycles"] > 3.0 * max(runs):
            yield f"{name} took {line['cycles']:.4g} cycles more an iteration than any launch had"


# ------------------------------------------------------------------ rules

Rule = Callable[[Measurements, Gpu], tuple[float, str]]


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(intercept, slope) by least squares."""
    xs, ys = zip(*points, strict=True)
    mean_x, mean_y = statistics.fmean(xs), statistics.fmean(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    return mean_y - slope * mean_x, slope


def _sm_count(m: Measurements, base: Gpu) -> tuple[float, str]:
    return float(m.environment["sm_count"]), "device query, multiprocessor count"


def _l2_bytes(m: Measurements, base: Gpu) -> tuple[float, str]:
    return float(m.environment["l2_bytes"]), "device query, L2 cache size"


def _power_watts(m: Measurements, base: Gpu) -> tuple[float, str]:
    watts = m.environment.get("power_limit_watts")
    if not watts:
        raise _Missing("the board's power limit could not be read")
    return float(watts), "power limit that nvidia-smi reads"


def _max_clock(m: Measurements, base: Gpu) -> tuple[float, str]:
    clock = m.environment.get("max_clock_mhz")
    if not clock:
        raise _Missing("the highest SM clock could not be read")
    return float(clock), "highest SM clock that nvidia-smi reads"


def _exp(m: Measurements, base: Gpu) -> tuple[float, str]:
    one = m.rate("ex2.warp")
    return m.rate("ex2.throughput"), f"ex2.approx in 8 chains of 16 warps; one warp alone reaches {one:.3g}"


def _fma(m: Measurements, base: Gpu) -> tuple[float, str]:
    one, chain = m.rate("fma.warp"), m.cycles("fma.latency") / 256
    return m.rate("fma.throughput"), (
        f"fma.rn.f32 in 8 chains of 16 warps; one warp alone reaches {one:.3g}, a dependent one takes "
        f"{chain:.3g} cycles"
    )


def _alu(m: Measurements, base: Gpu) -> tuple[float, str]:
    others = ", ".join(
        f"{label} {m.rate(name):.3g}"
        for label, name in (
            ("of three operands", "max3.throughput"),
            ("conversions of a pair to bf16", "convert.throughput"),
        )
        if name in m.probes
    )
    return m.rate("max.throughput"), f"min and max in 8 chains of 16 warps; {others}"


def _issue(m: Measurements, base: Gpu) -> tuple[float, str]:
    found = {}
    for operation in ("fma", "fma_max"):
        kernel = f"arithmetic.{operation}.8"
        warps = 16
        found[operation] = m.loop(kernel) * warps / m.cycles(f"{operation}.throughput")
    best = max(found, key=lambda operation: found[operation])
    return found[best], f"instructions of a loop of {best.replace('_', ' and ')} in 8 chains of 16 warps"


def _warp_issue(m: Measurements, base: Gpu) -> tuple[float, str]:
    low, high = SECTION_KEYS[0], SECTION_KEYS[-1]
    slots = m.loop(f"section.n{high}.arithmetic") - m.loop(f"section.n{low}.arithmetic")
    cycles = m.cycles(f"section.n{high}.arithmetic.wg1") - m.cycles(f"section.n{low}.arithmetic.wg1")
    return (
        slots / cycles,
        f"{slots} instructions of {high - low} more keys in one warpgroup's softmax without exponentials, "
        f"in {cycles:.0f} cycles",
    )


def _exp_overlap(m: Measurements, base: Gpu) -> tuple[float, str]:
    low, high = SECTION_KEYS[0], SECTION_KEYS[-1]
    full = m.cycles(f"section.n{high}.full.wg1") - m.cycles(f"section.n{low}.full.wg1")
    rest = m.cycles(f"section.n{high}.arithmetic.wg1") - m.cycles(f"section.n{low}.arithmetic.wg1")
    count = m.loop(f"section.n{high}.full", "MUFU.EX2") - m.loop(f"section.n{low}.full", "MUFU.EX2")
    exponentials = count * WARP / (m.rate("ex2.throughput") / SCHEDULERS)
    # maxima come before the exponentials, so that nothing of theirs can hide
    slots, maxima = (
        m.loop(f"section.n{high}.arithmetic", *only) - m.loop(f"section.n{low}.arithmetic", *only)
        for only in ((), _MAXIMA)
    )
    hidden = (rest + exponentials - full) / min(rest * (1.0 - maxima / slots), exponentials)
    return (
        min(1.0, max(0.0, hidden)),
        f"of {high - low} more keys of one warpgroup's softmax, exponentials alone take {exponentials:.0f} "
        f"cycles, the rest alone {rest:.0f}, both {full:.0f}",
    )


def _beside(m: Measurements, operation: str) -> tuple[float, str]:
    """Part of an operation's rate that is left beside a warpgroup that keeps the tensor cores busy."""
    alone = m.cycles(f"beside.{operation}.none")
    beside = {name: m.cycles(f"beside.{operation}.{name}") for name in BESIDE_MATMULS}
    return (
        min(1.0, statistics.fmean(alone / cycles for cycles in beside.values())),
        f"probes beside.{operation}, 256 instructions of a warpgroup in 8 chains: {alone:.0f} cycles alone, "
        f"{', '.join(f'{cycles:.0f} ({name})' for name, cycles in beside.items())} beside another's wgmma "
        f"with A from registers (rs) or SMEM (ss)",
    )


def _dense_hold(m: Measurements, base: Gpu) -> tuple[float, str]:
    beside, alone = m.cycles("beside.rs128.fma"), m.cycles("wgmma.rs.n128.k8.queued.wg1")
    return (
        max(0.0, 1.0 - alone / beside),
        f"wgmma of {alone:.0f} cycles takes {beside:.0f} beside another warpgroup's independent fma",
    )


def _arithmetic_latency(m: Measurements, base: Gpu) -> tuple[float, str]:
    points = [(float(n), m.cycles(f"section.n{n}.full.wg1")) for n in SECTION_KEYS]
    intercept, _ = _line(points)
    shuffle = m.cycles("shuffle.latency") / 256
    return (
        max(0.0, intercept),
        f"a softmax section of one warpgroup without its part that grows with the keys "
        f"({', '.join(f'{n}: {c:.0f}' for n, c in points)} cycles); a shuffle takes {shuffle:.3g}",
    )


def _smem(m: Measurements, base: Gpu) -> tuple[float, str]:
    stores, chain = m.rate("smem_store.throughput"), m.cycles("smem_load.latency") / 32
    return (
        m.rate("smem_load.throughput"),
        f"16-byte loads of 16 warps; stores {stores:.4g}, a dependent load takes {chain:.3g} cycles",
    )


def _queued(m: Measurements) -> dict[str, float]:
    return {name: float(line["rate"]) for name, line in m.probes.items() if ".queued.wg" in name}


def _mma(m: Measurements, base: Gpu) -> tuple[float, str]:
    rates = _queued(m)
    if not rates:
        raise _Missing(m.failed.get("probe wgmma.ss.n128.k8.queued.wg1") or "no matrix rate was measured")
    best = max(rates, key=lambda name: rates[name])
    narrow = rates.get("wgmma.ss.n64.k8.queued.wg2", 0.0)
    return (
        rates[best],
        f"fastest of {len(rates)} shapes, {best}, random operands; m64n64k16 with both operands in SMEM "
        f"{narrow:.4g}",
    )


def _service(m: Measurements, base: Gpu, name: str) -> float:
    """Cycles that the tensor core takes for one commit of ``wgmma.<ss|rs>.n<N>.k<steps>...``."""
    _, letters, n, steps, *_ = name.split(".")
    columns, count = int(n[1:]), int(steps[1:])
    rates = _queued(m)
    flops = 2 * 64 * columns * 16 * count
    operand = ((64 if letters == "ss" else 0) + columns) * 16 * 2 * count
    return max(flops / max(rates.values()), operand / m.rate("smem_load.throughput"))


def _mma_latency(m: Measurements, base: Gpu) -> tuple[float, str]:
    waited = [n for n in m.probes if n.endswith(".waited.wg1") and (".k4." in n or ".k8." in n)]
    if not waited or not _queued(m):
        raise _Missing("no matrix latency was measured")
    extra = {name: m.cycles(name) - _service(m, base, name) for name in waited}
    single = m.probes.get("wgmma.ss.n128.k1.waited.wg1")
    alone = f"; a single m64n128k16 takes {single['cycles']:.0f} cycles" if single else ""
    return (
        statistics.median(extra.values()),
        f"issue to result of {len(extra)} commits beyond the tensor core's own time, "
        f"{min(extra.values()):.0f} to {max(extra.values()):.0f}{alone}",
    )


def _smem_conflict(m: Measurements, base: Gpu) -> tuple[float, str]:
    # the operands of m64n128k16 keep SMEM busy for this part of the instruction's time
    busy = (64 + 128) * 16 * 2 / m.rate("smem_load.throughput") / (2 * 64 * 128 * 16 / max(_mma_rate(m)))
    alone = m.cycles("interference.stores0")
    parts = []
    for stores in (8, 16):
        cycles = m.cycles(f"interference.stores{stores}")
        others = stores * 16 * 128 / m.rate("smem_load.throughput") / cycles
        parts.append((cycles / alone - 1.0) / (busy * others))
    return (
        min(1.0, max(0.0, statistics.fmean(parts))),
        f"matmuls of two warpgroups beside 16 and 32 KiB of stores an iteration: {alone:.0f} cycles become "
        f"{m.cycles('interference.stores8'):.0f} and {m.cycles('interference.stores16'):.0f}",
    )


def _mma_rate(m: Measurements) -> list[float]:
    rates = list(_queued(m).values())
    if not rates:
        raise _Missing("no matrix rate was measured")
    return rates


def _barrier(m: Measurements, base: Gpu) -> tuple[float, str]:
    named, meeting = m.cycles("named.latency") / 2, m.cycles("sync.latency.wg3")
    return (
        m.cycles("mbarrier.latency") / 2,
        f"two warps answering each other through mbarriers; warpgroups through named barriers {named:.0f}, "
        f"a meeting of 12 warps {meeting:.0f}",
    )


def _turn(m: Measurements, base: Gpu) -> tuple[float, str]:
    there_and_back = m.cycles("named.latency")
    return (
        there_and_back / 2,
        f"two warpgroups that pass a turn to each other through named barriers, there and back in "
        f"{there_and_back:.0f} cycles",
    )


def _copy_points(m: Measurements, place: str, label: str) -> list[tuple[float, float]]:
    return [(kib * 1024.0, m.cycles(f"copy.{place}.{kib}k.{label}")) for kib in (8, 16, 32)]


def _copy_latency(m: Measurements, base: Gpu) -> tuple[float, str]:
    busy, alone = (_line(_copy_points(m, "l2", label)) for label in ("all", "alone"))
    spread = [m.probes[name]["cycles"] for k in (8, 16, 32) if (name := f"copy.l2.{k}k.spread") in m.probes]
    others = (
        f"; each SM other tiles {', '.join(f'{c:.0f}' for c in spread)} with their size" if spread else ""
    )
    return (
        max(0.0, busy[0]),
        f"one TMA load in flight on each SM, tiles of 8, 16 and 32 KiB that hit L2, their size taken out "
        f"({1 / busy[1]:.3g} B a clock); on one SM alone {alone[0]:.0f} ({1 / alone[1]:.3g} B a clock)"
        + others,
    )


def _copy_miss(m: Measurements, base: Gpu) -> tuple[float, str]:
    hit, miss = _copy_points(m, "l2", "alone"), _copy_points(m, "hbm", "alone")
    extra = [b[1] - a[1] for a, b in zip(hit, miss, strict=True)]
    return (
        statistics.fmean(extra),
        "one TMA load in flight on one SM, HBM less L2, tiles of 8, 16 and 32 KiB: "
        + ", ".join(f"{cycles:.0f}" for cycles in extra),
    )


def _l2_rate(m: Measurements, base: Gpu) -> tuple[float, str]:
    others = ", ".join(
        f"{label} {m.rate(name):.3g}"
        for label, name in (
            ("8 MiB", "l2.throughput.8m"),
            ("all SMs the same tile", "l2.throughput.shared"),
            ("one SM alone", "l2.throughput.alone"),
        )
        if name in m.probes
    )
    return m.rate("l2.throughput"), f"TMA loads of all SMs, 4 in flight, from 33 MiB; {others}"


def _hbm(m: Measurements, base: Gpu) -> tuple[float, str]:
    line = m._probe("hbm.throughput")
    bytes_each = float(line["rate"]) * float(line["cycles"]) * int(m.environment["sm_count"])
    gbytes = bytes_each / float(line["us"]) * 1e-3
    return (
        gbytes / base.hbm_gbytes_per_s,
        f"TMA loads of all SMs read 4 GiB at {gbytes:.0f} of {base.hbm_gbytes_per_s:.0f} GB/s",
    )


def _launch(m: Measurements, base: Gpu) -> tuple[float, str]:
    line = m.launches.get("l2.throughput") or m.launches.get("fma.throughput")
    if line is None:
        raise _Missing(m.failed.get("launch l2.throughput") or "no launch was measured")
    return (
        float(line["event_us"]),
        f"two events around a kernel of all SMs with 128 KiB of SMEM and no work; without the kernel "
        f"{line['pair_us']:.2f}, in a graph {line['graph_us']:.2f} a kernel",
    )


def _attention_like(m: Measurements) -> list[tuple[str, Mapping[str, Any]]]:
    return [(name, line) for name, line in m.loads.items() if name.startswith("loop ")]


def _clock(m: Measurements, base: Gpu) -> tuple[float, str]:
    busiest = [(n, line) for n, line in _attention_like(m) if not n.endswith("wg1")]
    if not busiest:
        raise _Missing("no clock under attention load was measured")
    clocks = [float(line["clock_mhz"]) for _, line in busiest]
    shown = ", ".join(f"{name} {clock:.0f}" for (name, _), clock in zip(busiest, clocks, strict=True))
    return statistics.median(clocks), f"SM clock of attention's inner loops without loads: {shown}"


def _mma_clock(m: Measurements, base: Gpu) -> tuple[float, str]:
    ratios = {}
    matmul = [("matmul", m.loads["matmul"])] if "matmul" in m.loads else []
    for name, line in [*matmul, *_attention_like(m)]:
        shown = line.get("sensors", {}).get("clocks.sm")
        if shown and line.get("clock_mhz"):
            ratios[name] = float(line["clock_mhz"]) / float(shown)
    if not ratios:
        raise _Missing("no clock under matrix work was both counted and shown by nvidia-smi")
    each = ", ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items())
    return (
        min(1.0, statistics.median(ratios.values())),
        f"cycles that kernels count over their time, over the clock that nvidia-smi shows: {each}",
    )


def _power_points(m: Measurements, base: Gpu) -> list[tuple[str, float, float]]:
    """(load, share of tensor work, watts at the highest clock) of loads that keep SMs busy."""
    clock = m.environment.get("max_clock_mhz") or base.max_clock_mhz
    names = ["softmax", "matmul", *(name for name, _ in _attention_like(m))]
    points = []
    for name in names:
        line = m.loads.get(name)
        if not line or not line.get("clock_mhz") or not line.get("watts"):
            continue
        flops = float(line.get("tensor_flops", 0.0))
        share = flops / float(line["cycles"]) / max(_mma_rate(m)) if flops else 0.0
        points.append((name, share, float(line["watts"]) / (float(line["clock_mhz"]) / float(clock)) ** 3))
    if len(points) < 3 or len({round(share, 2) for _, share, _ in points}) < 2:
        raise _Missing("power was measured under fewer than three loads")
    return points


def _watts(m: Measurements, base: Gpu, which: int) -> tuple[float, str]:
    points = _power_points(m, base)
    fit = _line([(share, watts) for _, share, watts in points])
    worst = max(abs(fit[0] + fit[1] * share - watts) for _, share, watts in points)
    shown = ", ".join(f"{name} {share:.0%} {watts:.0f}" for name, share, watts in points)
    return fit[
        which
    ], f"line through watts, as clock cubed, over tensor share: {shown}; worst off by {worst:.0f}"


_RULES: tuple[tuple[str, str, Rule], ...] = (
    ("sm_count", "device", _sm_count),
    ("clock_mhz", "rate", _clock),
    ("max_clock_mhz", "rate", _max_clock),
    ("power_watts", "power", _power_watts),
    ("mma_flops_per_clk", "rate", _mma),
    ("exp_per_clk", "rate", _exp),
    ("smem_bytes_per_clk", "rate", _smem),
    ("fma_per_clk", "rate", _fma),
    ("alu_per_clk", "rate", _alu),
    ("issue_per_clk", "rate", _issue),
    ("l2_bytes", "device", _l2_bytes),
    ("l2_bytes_per_clk", "rate", _l2_rate),
    ("launch_us", "latency", _launch),
    ("mma_latency_clk", "latency", _mma_latency),
    ("barrier_latency_clk", "latency", _barrier),
    ("turn_latency_clk", "latency", _turn),
    ("copy_latency_clk", "latency", _copy_latency),
    ("copy_miss_clk", "latency", _copy_miss),
    ("arithmetic_latency_clk", "latency", _arithmetic_latency),
    ("warp_issue_per_clk", "part", _warp_issue),
    ("exp_overlap", "part", _exp_overlap),
    ("exp_beside_mma", "part", lambda m, base: _beside(m, "ex2")),
    ("alu_beside_mma", "part", lambda m, base: _beside(m, "max")),
    ("fma_beside_mma", "part", lambda m, base: _beside(m, "fma")),
    ("dense_hold", "part", _dense_hold),
    ("smem_conflict", "part", _smem_conflict),
    ("hbm_efficiency", "part", _hbm),
    ("mma_clock", "part", _mma_clock),
    ("active_watts", "power", lambda m, base: _watts(m, base, 0)),
    ("tensor_watts", "power", lambda m, base: _watts(m, base, 1)),
)
"""Field, kind of number, rule: every number that a calibration replaces."""

CALIBRATED = tuple(name for name, _, _ in _RULES)
"""Fields that a calibration can replace."""
