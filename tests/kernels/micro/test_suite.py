from __future__ import annotations

import pytest

from fa4tune.hardware.gpu import ARCHITECTURES, load_gpu
from fa4tune.kernels.micro.suite import SWEEP_TILES, TILE_BYTES, suite


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_probe_and_load_names_a_kernel(arch: str) -> None:
    contents = suite(arch)
    kernels = {spec.name for spec in contents.kernels}
    probes = {probe.name for probe in contents.probes}
    assert len(kernels) == len(contents.kernels)
    assert len(probes) == len(contents.probes)
    assert {probe.kernel for probe in contents.probes} == kernels
    assert {load.probe for load in contents.loads} - {None} <= probes
    assert set(contents.launches) <= probes


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_probes_fit_the_machine(arch: str) -> None:
    for probe in suite(arch).probes:
        assert probe.threads % 32 == 0
        assert probe.threads <= 512
        assert probe.iterations[0] < probe.iterations[1]
        assert probe.work > 0
        assert probe.timed_threads % 32 == 0
        assert probe.timed_threads <= probe.threads


def test_walks_reach_the_memory_they_are_named_for() -> None:
    gpu = load_gpu("h200")
    probes = {probe.name: probe for probe in suite("sm_90a").probes}
    sweep = probes["hbm.throughput"]
    # one launch reads a multiple of L2, no tile twice
    assert sweep.iterations[0] * gpu.sm_count * TILE_BYTES > 5 * gpu.l2_bytes
    assert sweep.iterations[1] * gpu.sm_count < SWEEP_TILES
    for name in ("l2.throughput", "l2.throughput.8m", "copy.l2.32k.all"):
        assert probes[name].span * TILE_BYTES < 0.6 * gpu.l2_bytes
    assert probes["copy.hbm.32k.alone"].iterations[1] < probes["copy.hbm.32k.alone"].span


def test_only_architectures_with_wgmma_get_matmuls() -> None:
    assert any(spec.module == "wgmma" for spec in suite("sm_90a").kernels)
    assert not any(spec.module in ("wgmma", "interference", "beside") for spec in suite("sm_100a").kernels)


def test_beside_matmuls_only_the_first_warpgroup_is_timed() -> None:
    probes = [probe for probe in suite("sm_90a").probes if probe.name.startswith("beside.")]
    assert len(probes) == 14
    for probe in probes:
        assert probe.timed_threads == 128
        assert probe.threads == (128 if probe.name.endswith(".none") else 256)
