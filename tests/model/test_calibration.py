"""Calibration recovers the constants of a machine whose measurements follow from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fa4tune.errors import HardwareError
from fa4tune.hardware.gpu import Gpu, load_gpu
from fa4tune.kernels.micro.suite import TILE_BYTES, suite
from fa4tune.model.calibration import (
    CALIBRATED,
    FIXED_POINT,
    Calibration,
    Measurements,
    base_gpu,
    calibrate,
)

TRUE = replace(
    load_gpu("h200"),
    sm_count=130,
    l2_bytes=50 << 20,
    clock_mhz=1700.0,
    max_clock_mhz=1950.0,
    power_watts=650.0,
    mma_flops_per_clk=4050.0,
    exp_per_clk=15.5,
    smem_bytes_per_clk=125.0,
    fma_per_clk=120.0,
    alu_per_clk=62.0,
    issue_per_clk=3.9,
    l2_bytes_per_clk=41.0,
    launch_us=2.4,
    mma_latency_clk=36.0,
    barrier_latency_clk=31.0,
    turn_latency_clk=27.0,
    copy_latency_clk=590.0,
    copy_miss_clk=410.0,
    arithmetic_latency_clk=77.0,
    warp_issue_per_clk=0.7,
    exp_overlap=0.35,
    exp_beside_mma=0.72,
    alu_beside_mma=0.55,
    fma_beside_mma=0.91,
    dense_hold=0.7,
    smem_conflict=0.8,
    hbm_efficiency=0.88,
    mma_clock=0.92,
    active_watts=500.0,
    tensor_watts=560.0,
)
"""A machine that differs from the H200's file in every number that can be calibrated."""

INSTRUCTIONS_A_KEY = 2.0
"""Of a warp's softmax section, beside one half exponential."""

MAXIMA_A_KEY = 0.25
"""Those of them that find the rows' maxima."""


BESIDE_SPREAD = {"rs128": 0.9, "ss128": 1.0, "rs64": 1.1}
"""How far one kind of matmul leaves more of a pipe's rate than another."""


def _section_cycles(keys: int, exponentials: bool) -> float:
    rest = keys * INSTRUCTIONS_A_KEY / TRUE.warp_issue_per_clk
    if not exponentials:
        return TRUE.arithmetic_latency_clk + rest
    units = keys / 2 * 32 / (TRUE.exp_per_clk / 4)
    beside = rest * (1 - MAXIMA_A_KEY / INSTRUCTIONS_A_KEY)
    return TRUE.arithmetic_latency_clk + rest + units - TRUE.exp_overlap * min(beside, units)


def _matmul_cycles(name: str) -> float:
    letters, n, steps = name.split(".")[1:4]
    columns, count = int(n[1:]), int(steps[1:])
    flops = 2 * 64 * columns * 16 * count
    operands = (64 * (letters == "ss") + columns) * 32 * count
    return max(flops / TRUE.mma_flops_per_clk, operands / TRUE.smem_bytes_per_clk)


def _cycles(name: str, work: float) -> float:
    """Cycles of an iteration of a probe on the true machine."""
    family, _, rest = name.partition(".")
    if family in ("ex2", "fma", "max", "max3", "convert", "shuffle", "polynomial", "fma_max"):
        rate = {"ex2": TRUE.exp_per_clk, "fma": TRUE.fma_per_clk, "max": TRUE.alu_per_clk}.get(family, 40.0)
        if family == "fma_max":
            return 259 * 16 / TRUE.issue_per_clk
        return work * 23.0 if rest == "latency" else work / rate
    if family.startswith("smem_"):
        return work * 29.0 if rest == "latency" else work / TRUE.smem_bytes_per_clk
    if family == "wgmma":
        groups = int(name[-1])
        return _matmul_cycles(name) * groups + (TRUE.mma_latency_clk if ".waited." in name else 0.0)
    if family == "interference":
        stores = int(name.removeprefix("interference.stores"))
        alone = work / TRUE.mma_flops_per_clk
        busy = (192 * 32 / TRUE.smem_bytes_per_clk) / (2 * 64 * 128 * 16 / TRUE.mma_flops_per_clk)
        others = stores * 16 * 128 / TRUE.smem_bytes_per_clk
        # period = alone (1 + conflict * busy * others / period)
        share = alone * TRUE.smem_conflict * busy * others
        return alone / 2 + (alone * alone / 4 + share) ** 0.5
    if family == "section":
        tile, kind, groups = rest.split(".")
        return _section_cycles(int(tile[1:]), kind == "full") * int(groups[2:])
    if family == "loop":
        return 3000.0
    if family == "mbarrier":
        return work * TRUE.barrier_latency_clk
    if family == "named":
        return work * TRUE.turn_latency_clk
    if family == "beside":
        first, others = rest.split(".")
        if first == "rs128":
            # its own time and, of the other's, what it stands still for
            return _matmul_cycles("wgmma.rs.n128.k8.queued.wg1") / (1.0 - TRUE.dense_hold * (others == "fma"))
        rate, left = {
            "ex2": (TRUE.exp_per_clk, TRUE.exp_beside_mma),
            "max": (TRUE.alu_per_clk, TRUE.alu_beside_mma),
            "fma": (TRUE.fma_per_clk, TRUE.fma_beside_mma),
        }[first]
        return work / rate / (1.0 if others == "none" else left * BESIDE_SPREAD[others])
    if family == "sync":
        return 25.0
    if family == "copy":
        transfer = work / TRUE.l2_bytes_per_clk
        return TRUE.copy_latency_clk + transfer + (TRUE.copy_miss_clk if ".hbm." in name else 0.0)
    if name == "hbm.throughput":
        return (
            work * 1e-3 * TRUE.max_clock_mhz * TRUE.sm_count / (TRUE.hbm_gbytes_per_s * TRUE.hbm_efficiency)
        )
    return work / TRUE.l2_bytes_per_clk


def _kernels() -> dict[str, dict[str, Any]]:
    kernels: dict[str, dict[str, Any]] = {
        f"arithmetic.{operation}.8": {"loop": {"FFMA": 256, "IADD3": 3}} for operation in ("fma", "fma_max")
    }
    for keys in (64, 128, 176):
        maxima = int(keys * MAXIMA_A_KEY)
        rest = {"FFMA": int(keys * INSTRUCTIONS_A_KEY) - maxima, "VIMNMX3": maxima, "FMNMX": 40}
        skipped = {"FMNMX": 40}
        kernels[f"section.n{keys}.arithmetic"] = {"loop": rest, "skipped": skipped}
        kernels[f"section.n{keys}.full"] = {
            "loop": {**rest, "MUFU.EX2": keys // 2},
            "skipped": skipped,
        }
    return kernels


def _lines() -> list[dict[str, Any]]:
    contents = suite("sm_90a")
    lines: list[dict[str, Any]] = [
        {
            "kind": "environment",
            "gpu": "a machine",
            "arch": "sm_90a",
            "sm_count": TRUE.sm_count,
            "l2_bytes": TRUE.l2_bytes,
            "memory_bytes": 150e9,
            "power_limit_watts": TRUE.power_watts,
            "max_clock_mhz": TRUE.max_clock_mhz,
            "driver": "580.1",
            "measured_at": "2026-01-02T03:04:05Z",
        }
    ]
    for probe in contents.probes:
        cycles = _cycles(probe.name, probe.work)
        sink = FIXED_POINT * (8 if probe.kernel.endswith(".8") else 1)
        lines.append(
            {
                "kind": "probe",
                "name": probe.name,
                "cycles": cycles,
                "us": cycles / TRUE.max_clock_mhz,
                "rate": probe.work / cycles,
                "unit": probe.unit,
                "sink": sink,
                "launches": [[n, n * cycles + 900, 0, 0, 0] for n in probe.iterations],
            }
        )
    lines.append(
        {
            "kind": "launch",
            "name": "l2.throughput",
            "event_us": TRUE.launch_us,
            "pair_us": 0.9,
            "graph_us": 1.4,
        }
    )
    for load in contents.loads:
        share = {"matmul": 0.97, "loop d64 wg2": 0.5, "loop d128 wg3": 0.8}.get(load.name, 0.6)
        share = share if load.tensor_flops else 0.0
        draw = TRUE.active_watts + share * TRUE.tensor_watts
        clock = TRUE.clock_mhz
        lines.append(
            {
                "kind": "load",
                "name": load.name,
                "clock_mhz": clock,
                "watts": draw * (clock / TRUE.max_clock_mhz) ** 3,
                "cycles": load.tensor_flops / (share or 1.0) / TRUE.mma_flops_per_clk,
                "tensor_flops": load.tensor_flops,
                "sensors": {"clocks.sm": clock / TRUE.mma_clock},
            }
        )
    return lines


def _calibration(lines: list[dict[str, Any]], base: Gpu | None = None) -> Calibration:
    measured = Measurements.from_lines(lines, _kernels())
    return calibrate(measured, base or base_gpu(measured.environment))


def test_every_constant_of_the_machine_is_recovered(tmp_path: Path) -> None:
    calibration = _calibration(_lines())
    assert not calibration.left_out
    assert not calibration.doubts
    path = tmp_path / "machine.toml"
    path.write_text(calibration.to_toml())
    gpu = load_gpu(str(path))
    for name in CALIBRATED:
        assert getattr(gpu, name) == pytest.approx(getattr(TRUE, name), rel=2e-3), name
        assert "measured on a machine, 2026-01-02" in gpu.sources[name]


def test_what_is_not_calibrated_keeps_the_base_s_number_and_source(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    path.write_text(_calibration(_lines()).to_toml())
    gpu, base = load_gpu(str(path)), load_gpu("h200")
    for name in ("hbm_bytes", "registers_per_sm", "tile_overhead_clk", "contention"):
        assert getattr(gpu, name) == getattr(base, name)
        assert gpu.sources[name] == base.sources[name]
    assert gpu.name == "h200-calibrated"


@pytest.mark.parametrize(
    ("missing", "fields"),
    [
        ("ex2.throughput", {"exp_per_clk", "exp_overlap"}),
        ("mbarrier.latency", {"barrier_latency_clk"}),
        ("named.latency", {"barrier_latency_clk", "turn_latency_clk"}),
        ("beside.ex2.rs64", {"exp_beside_mma"}),
        ("beside.max.none", {"alu_beside_mma"}),
        ("beside.rs128.fma", {"dense_hold"}),
        ("copy.l2.16k.alone", {"copy_latency_clk", "copy_miss_clk"}),
        ("interference.stores8", {"smem_conflict"}),
        ("hbm.throughput", {"hbm_efficiency"}),
    ],
)
def test_a_missing_measurement_leaves_out_what_needs_it_and_says_why(missing: str, fields: set[str]) -> None:
    lines = [line for line in _lines() if line.get("name") != missing]
    lines.append({"kind": "failed", "task": ["probe", missing], "reason": "no answer within 10 s"})
    calibration = _calibration(lines)
    assert set(calibration.left_out) == fields
    assert all(reason == "no answer within 10 s" for reason in calibration.left_out.values())
    assert len(calibration.numbers) == len(CALIBRATED) - len(fields)


def test_a_later_result_replaces_a_failure() -> None:
    failed = {"kind": "failed", "task": ["probe", "ex2.throughput"], "reason": "crashed"}
    assert not Measurements.from_lines([failed, *_lines()], _kernels()).failed


def test_an_implausible_number_is_left_out() -> None:
    lines = _lines()
    for line in lines:
        if line.get("name") == "ex2.throughput":
            line["rate"] = 100.0
    reason = _calibration(lines).left_out["exp_per_clk"]
    assert "100 was measured, outside 8 to 25.6" in reason


def test_wrong_results_and_spills_are_doubted() -> None:
    lines = _lines()
    for line in lines:
        if line.get("name") == "polynomial.throughput":
            line["sink"] = "nan"
    kernels = _kernels() | {"smem.load": {"loop": {"LDS": 32}, "spill_bytes": 64}}
    measured = Measurements.from_lines(lines, kernels)
    doubts = calibrate(measured, load_gpu("h200")).doubts
    assert len(doubts) == 2
    assert "polynomial.throughput computed nan" in doubts[0]
    assert "smem.load spills 64 bytes" in doubts[1]


def test_the_base_is_the_nearest_gpu_of_the_architecture() -> None:
    machine = {"arch": "sm_90a", "sm_count": 132}
    assert base_gpu(machine | {"memory_bytes": 85e9}).name == "h100"
    assert base_gpu(machine | {"memory_bytes": 150e9}).name == "h200"
    with pytest.raises(HardwareError, match="no GPU of sm_80"):
        base_gpu({"arch": "sm_80", "sm_count": 108, "memory_bytes": 40e9})


def test_results_without_a_machine_are_refused() -> None:
    with pytest.raises(HardwareError, match="name no machine"):
        Measurements.from_lines([line for line in _lines() if line["kind"] != "environment"], {})


def test_sources_may_contain_quotes(tmp_path: Path) -> None:
    lines = _lines()
    lines[0]["gpu"] = 'GPU "X"\\100'
    path = tmp_path / "machine.toml"
    path.write_text(_calibration(lines).to_toml())
    assert 'GPU "X"\\100' in load_gpu(str(path)).sources["exp_per_clk"]


def test_arithmetic_that_matmuls_do_not_hold_up_keeps_its_rate() -> None:
    lines = _lines()
    for line in lines:
        if str(line.get("name")).startswith("beside.fma."):
            line["cycles"] = {"beside.fma.none": 300.0}.get(line["name"], 298.0)
    number = next(n for n in _calibration(lines).numbers if n.field == "fma_beside_mma")
    assert number.value == 1.0
    assert "300 cycles alone, 298 (rs128), 298 (ss128), 298 (rs64) beside" in number.source


def test_what_independent_arithmetic_holds_up_is_the_rest_of_the_matmuls_rate() -> None:
    number = next(n for n in _calibration(_lines()).numbers if n.field == "dense_hold")
    assert "wgmma of 518 cycles takes 1726 beside another warpgroup's independent fma" in number.source


@pytest.mark.parametrize("name", ["matmul", "loop d128 wg2"])
def test_one_odd_load_does_not_change_the_clock_s_ratio(name: str) -> None:
    lines = _lines()
    for line in lines:
        if line.get("name") == name:
            line["sensors"] = {"clocks.sm": 1000.0}
    number = next(n for n in _calibration(lines).numbers if n.field == "mma_clock")
    assert number.value == pytest.approx(TRUE.mma_clock)


def test_without_sensors_the_shown_clock_is_not_made_up() -> None:
    lines = [{**line, "sensors": {}} if line["kind"] == "load" else line for line in _lines()]
    assert "shown by nvidia-smi" in _calibration(lines).left_out["mma_clock"]


def test_the_sweep_s_bytes_are_counted_for_all_sms() -> None:
    calibration = _calibration(_lines())
    source = next(n.source for n in calibration.numbers if n.field == "hbm_efficiency")
    assert f"at {TRUE.hbm_gbytes_per_s * TRUE.hbm_efficiency:.0f} of 4800 GB/s" in source
    assert TILE_BYTES == 32768
