"""The microbenchmark kernels compute what they should, without races, on the emulator."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fa4tune.kernels.micro.suite import KernelSpec, Probe, suite

Run = Callable[..., tuple[torch.Tensor, torch.Tensor]]

ROWS = 2048


@pytest.fixture(scope="module")
def source() -> torch.Tensor:
    return torch.randn(ROWS, 128, generator=torch.Generator().manual_seed(3)).bfloat16()


def _compile(spec: KernelSpec) -> Any:
    import cutlass.cute as cute

    from fa4tune.kernels.micro.base import fake_arguments

    module = importlib.import_module(f"fa4tune.kernels.micro.{spec.module}")
    kernel = getattr(module, spec.class_name)(**dict(spec.arguments))
    with tempfile.TemporaryDirectory() as scratch:
        options = f"--enable-tvm-ffi --gpu-arch sm_90a --keep-ptx --keep-cubin --dump-dir {scratch}"
        return cute.compile(kernel, *fake_arguments(), options=options)


@pytest.fixture(scope="module")
def run(source: torch.Tensor) -> Run:
    """Runs a probe on the emulator: (stamps of each warp, sink of each thread) by block."""
    from fa4tune.emulator.capture import capture
    from fa4tune.emulator.machine import run as emulate

    contents = suite("sm_90a")
    specs = {spec.name: spec for spec in contents.kernels}
    probes = {probe.name: probe for probe in contents.probes}
    compiled: dict[str, Any] = {}

    def go(
        name: str, iterations: int = 2, blocks: int = 1, late: int | None = None, **walk: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        probe: Probe = replace(probes[name], **walk)
        kernel = compiled.setdefault(probe.kernel, _compile(specs[probe.kernel]))
        warps = blocks * probe.threads // 32
        stamps = torch.full((warps * 2,), -1, dtype=torch.int64)
        sink = torch.full((blocks * probe.threads,), float("nan"))
        place = (probe.start, probe.step or blocks, min(probe.span, ROWS // 128), probe.block_step)
        arguments = (stamps, sink, source, iterations, blocks, probe.threads, *place)
        ptx = kernel.artifacts.PTX
        (launch,) = capture(kernel, arguments, ptx=ptx)
        result = emulate(ptx, launch, late=late)
        assert result.completed
        assert not result.findings
        times = stamps.view(blocks, -1, 2)
        # the emulator's clock stands still while a warp runs without waiting
        assert (times[:, :, 1] >= times[:, :, 0]).all()
        assert (times >= 0).all()
        return times, sink.view(blocks, -1)

    return go


@pytest.mark.parametrize("name", ["ex2.latency", "ex2.warp", "polynomial.warp"])
def test_exponential_chains_iterate_two_to_minus_x(run: Run, source: torch.Tensor, name: str) -> None:
    _, sink = run(name)
    chains = 1 if name.endswith("latency") else 8
    steps = 2 * (32 if name.startswith("polynomial") else 256) // chains
    x = source[:32, 2 : 2 + chains].double()
    for _ in range(steps):
        x = torch.exp2(-x)
    # the degree-3 polynomial is off by 9e-5 a step
    torch.testing.assert_close(sink[0].double(), x.sum(1), rtol=2e-4, atol=0)


def test_fma_chain_is_a_geometric_series(run: Run, source: torch.Tensor) -> None:
    _, sink = run("fma.latency", iterations=1)
    a, b, x = (source[:32, column].double() for column in (0, 1, 2))
    expected = a**256 * x + b * (1 - a**256) / (1 - a)
    small = a.abs() < 0.9
    torch.testing.assert_close(sink[0].double()[small], expected[small], rtol=1e-4, atol=1e-4)


def test_clamps_keep_values_between_the_bounds(run: Run, source: torch.Tensor) -> None:
    _, sink = run("max.latency", iterations=1)
    a, b, x = (source[:32, column].float() for column in (0, 1, 2))
    # min with a, then max with b, in turn
    torch.testing.assert_close(sink[0], torch.maximum(torch.minimum(x, a), b), rtol=0, atol=0)


def test_dependent_loads_follow_the_chain(run: Run) -> None:
    _, sink = run("smem_load.latency")
    # every word holds its own address
    assert torch.equal(sink[0] - sink[0, 0], 16.0 * torch.arange(32))


@pytest.mark.parametrize("name", ["smem_load.warpgroup", "smem_store.warpgroup"])
def test_accesses_stay_in_their_buffer(run: Run, name: str) -> None:
    # the emulator's memory is exactly bounded; many turns go around the buffer
    _, sink = run(name, iterations=130)
    assert torch.isfinite(sink).all()


@pytest.mark.parametrize("late", [None, 5])
@pytest.mark.parametrize("name", ["wgmma.ss.n64.k8.queued.wg3", "wgmma.ss.n64.k1.waited.wg1"])
def test_matmul_multiplies_the_source(run: Run, source: torch.Tensor, name: str, late: int | None) -> None:
    iterations = 3
    _, sink = run(name, iterations=iterations, late=late)
    k = 16 * int(name.split(".")[3][1:])
    flat = source.double().flatten()
    b = flat[192 * 128 :][: 64 * k].view(64, k)
    for group, found in enumerate(sink.view(-1, 128)):
        a = flat[64 * group * 128 :][: 64 * k].view(64, k)
        expected = iterations * (a.sum(0) @ b.sum(0))
        scale = (a.abs().sum(0) @ b.abs().sum(0)).item()
        assert found.double().sum().item() == pytest.approx(expected.item(), abs=1e-5 * scale)


@pytest.mark.parametrize("late", [None, 7])
def test_copies_leave_the_walk_s_tiles_in_the_ring(run: Run, source: torch.Tensor, late: int | None) -> None:
    # 6 tiles through 4 stages: stage 0 holds the fifth of each block's walk
    _, sink = run("l2.throughput", iterations=6, blocks=2, late=late, step=3, span=16, block_step=7, start=2)
    for block in range(2):
        tile = (2 + 7 * block + 4 * 3) % 16
        expected = source[128 * tile : 128 * tile + 32, 0].float()
        torch.testing.assert_close(sink[block], expected, rtol=0, atol=0)


def test_single_copies_use_one_stage(run: Run, source: torch.Tensor) -> None:
    _, sink = run("copy.l2.8k.all", iterations=3, late=2)
    torch.testing.assert_close(sink[0], source[128:160, 0].float(), rtol=0, atol=0)


@pytest.mark.parametrize(
    "name", ["mbarrier.latency", "mbarrier.latency.warpgroups", "named.latency", "sync.latency.wg2"]
)
@pytest.mark.parametrize("late", [1, 2])
def test_signals_neither_hang_nor_overtake(run: Run, name: str, late: int) -> None:
    run(name, iterations=5, late=late)


def _matmul_sum(source: torch.Tensor, role: str, group: int) -> tuple[float, float]:
    """(sum of all elements of one commit's product, of magnitudes) of what a warpgroup of ``beside`` does."""
    n = int(role[2:])
    flat = source.double().flatten()
    b = flat[64 * 128 :][: 128 * n]
    if role.startswith("ss"):
        a, b = flat[: 64 * 128].view(64, 128), b.view(n, 128).T
    else:
        # registers of a thread: of each K step two columns, two rows, two columns 8 further on
        rows, columns = source[128 * group :], torch.zeros(128, 128, dtype=torch.float64)
        b = b.view(128, n)
        for thread in range(128):
            for j in range(64):
                columns[thread, 16 * (j // 8) + 2 * (thread % 4) + j % 2 + 8 * (j % 8 // 4)] += rows[
                    thread, j
                ]
        a = columns
    return (a.sum(0) @ b.sum(1)).item(), (a.abs().sum(0) @ b.abs().sum(1)).item()


@pytest.mark.parametrize("late", [None, 5])
@pytest.mark.parametrize("others", ["none", "rs128", "ss128", "rs64"])
def test_arithmetic_beside_matmuls_is_timed_to_its_end(
    run: Run, source: torch.Tensor, others: str, late: int | None
) -> None:
    _, sink = run(f"beside.ex2.{others}", late=late)
    x = source[:128, 2:10].double()
    for _ in range(2 * 32):
        x = torch.exp2(-x)
    torch.testing.assert_close(sink[0, :128].double(), x.sum(1), rtol=2e-4, atol=0)
    if others != "none":
        # whole commits, as many as there was time for
        product, scale = _matmul_sum(source, others, 1)
        turns = sink[0, 128:].double().sum().item() / product
        assert turns == pytest.approx(round(turns), abs=1e-4 * scale / abs(product))


def test_matmuls_beside_arithmetic_are_as_many_as_asked_for(run: Run, source: torch.Tensor) -> None:
    _, sink = run("beside.rs128.max", iterations=3)
    product, scale = _matmul_sum(source, "rs128", 0)
    assert sink[0, :128].double().sum().item() == pytest.approx(3 * product, abs=1e-5 * scale)
    assert torch.isfinite(sink).all()


@pytest.mark.parametrize("kind", ["full", "arithmetic"])
def test_section_is_a_softmax_that_goes_on(run: Run, source: torch.Tensor, kind: str) -> None:
    iterations, keys = 3, 64
    _, sink = run(f"section.n{keys}.{kind}.wg1", iterations=iterations)
    scores = source[:128, : keys // 2].double()
    scale = source[:128, :1].double().clamp(0.0625, 0.125)
    rows = [[i for i in range(keys // 2) if i // 2 % 2 == r] for r in (0, 1)]
    expected = torch.zeros(128, dtype=torch.float64)
    for row in rows:
        x, maximum = scores[:, row], torch.full((128, 1), -torch.inf, dtype=torch.float64)
        total = torch.zeros(128, 1, dtype=torch.float64)
        for _ in range(iterations):
            highest = x.view(32, -1).amax(1).repeat_interleave(4)[:, None].maximum(maximum)
            total = total * torch.exp2((maximum - highest) * scale)
            maximum = highest
            x = (x - maximum) * scale
            total = total + (x if kind == "arithmetic" else torch.exp2(x)).sum(1, keepdim=True)
        expected += (maximum + total)[:, 0]
    # what keeps P alive adds its sign: none of exponentials, any of arguments
    sign = (sink[0].double() - expected).round()
    assert set(sign.tolist()) <= ({0.0} if kind == "full" else {0.0, -1.0})
    torch.testing.assert_close(sink[0].double(), expected + sign, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    "name",
    ["section.n64.full.wg1", "section.n64.arithmetic.wg2", "loop.n128.d64.wg1", "interference.stores8"],
)
def test_mixed_loops_end_with_finite_results(run: Run, name: str) -> None:
    _, sink = run(name, late=3)
    assert torch.isfinite(sink).all()
    assert len(sink.unique()) > 1
