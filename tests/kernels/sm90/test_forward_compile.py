"""The Hopper forward as compiled: knobs reach the code, nothing spills, memory is what the plan says."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
import torch

from fa4tune.emulator.attention import emulate_forward, random_inputs
from fa4tune.emulator.capture import capture
from fa4tune.errors import InfeasibleError
from fa4tune.hardware.gpu import load_gpu
from fa4tune.kernels.compile import CompiledKernel, CompilePool
from fa4tune.kernels.config import SM90ForwardConfig, default_config
from fa4tune.kernels.kernel_class import KernelClass
from fa4tune.kernels.machine_code import disassemble
from fa4tune.kernels.sm90.forward_plan import build_plan
from fa4tune.problem import AttentionProblem
from fa4tune.runtime.arguments import forward_caller

pytest.importorskip("cutlass.cute")

H200 = load_gpu("h200")
PROBLEM = AttentionProblem.parse("b1_hq2_hk1_sq130_sk200_d64_dv64_bf16_causal_fwd")
BASE = "tile_m=128,tile_n=64,kv_stages=2,overlap=true,ping_pong=false,scheduler=persistent"
CHANGES = (
    "tile_m=192",
    "tile_n=80",
    "kv_stages=3",
    "ctas_per_sm=2,tile_n=48",
    "overlap=false",
    "ping_pong=true",
    "p_in_registers=false",
    "exp2_share=0.25",
    "exp2_share=0.25,exp2_degree=2",
    "rescale_threshold=8",
    "registers=232/32",
    "scheduler=single",
    "scheduler=lpt",
)
EMULATED = (
    ("b2_hq2_hk1_sq257_sk200_d64_dv64_bf16_causal_fwd", f"{BASE},tile_m=192", 1),
    ("b1_hq1_hk1_sq200_sk333_d64_dv64_bf16_causal_fwd", f"{BASE},overlap=false", 2),
    ("b1_hq2_hk2_sq1_sk300_d64_dv64_bf16_causal_fwd", f"{BASE},p_in_registers=false", None),
    ("b1_hq2_hk1_sq130_sk200_d64_dv64_bf16_causal_fwd", f"{BASE},exp2_share=0.25", 3),
    ("b1_hq1_hk1_sq130_sk200_d96_dv96_fp16_full_fwd", "tile_m=128,tile_n=80,ping_pong=true", 4),
    ("b1_hq1_hk1_sq130_sk200_d192_dv128_bf16_full_fwd", "tile_m=128,tile_n=96,ping_pong=true", None),
)
Kernels = Callable[[AttentionProblem, SM90ForwardConfig], CompiledKernel]


def with_knobs(knobs: str) -> SM90ForwardConfig:
    """The config of ``knobs``; of one named twice, the last value."""
    last = dict(part.split("=") for part in knobs.split(",") if part)
    return SM90ForwardConfig().with_text(",".join(f"{name}={value}" for name, value in last.items()))


@pytest.fixture(scope="module")
def kernels() -> Iterator[Kernels]:
    """Compiles in one process, each class once."""
    found: dict[KernelClass, CompiledKernel] = {}
    with CompilePool(1) as pool:

        def kernel(problem: AttentionProblem, config: SM90ForwardConfig) -> CompiledKernel:
            wanted = KernelClass.from_problem(problem, config, "sm_90a")
            if wanted not in found:
                found[wanted] = pool.submit(wanted, None).result()
            return found[wanted]

        yield kernel


def code(kernel: CompiledKernel) -> str:
    """PTX without names."""
    return re.sub(r"\b(kernel|cutlass)\w*", "name", kernel.ptx)


@pytest.mark.parametrize("change", CHANGES)
def test_every_knob_changes_the_code_and_spills_nothing(change: str, kernels: Kernels) -> None:
    kernel = kernels(PROBLEM, with_knobs(f"{BASE},{change}"))
    assert code(kernel) != code(kernels(PROBLEM, with_knobs(BASE)))
    assert kernel.spill_bytes == 0


@pytest.mark.parametrize("dims", ["d64_dv64", "d128_dv128"])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_default_config_spills_nothing(dims: str, mask: str, kernels: Kernels) -> None:
    problem = AttentionProblem.parse(f"b1_hq2_hk1_sq130_sk200_{dims}_bf16_{mask}_fwd")
    config = default_config(problem, "sm_90a")
    assert isinstance(config, SM90ForwardConfig)
    kernel = kernels(problem, config)
    assert kernel.spill_bytes == 0
    # more waits in the machine code would mean that the assembler serialised the MMAs
    waits = len(re.findall("wgmma.wait_group", kernel.ptx))
    (instructions,) = disassemble(kernel.cubin).values()
    assert sum(op.startswith("WARPGROUP.DEPBAR") for op in instructions) == waits


@pytest.mark.parametrize(("text", "knobs", "late"), EMULATED)
def test_emulated_result_equals_float64(text: str, knobs: str, late: int | None, kernels: Kernels) -> None:
    """Odd lengths, empty rows, GQA; with a seed, asynchronous work as late as synchronisation allows."""
    problem, config = AttentionProblem.parse(text), with_knobs(knobs)
    call = emulate_forward(problem, config, H200, late=late, kernel=kernels(problem, config))
    assert call.passed, (call.out_error, call.lse_error, call.findings)


def test_rows_with_negative_scores_only(kernels: Kernels) -> None:
    """The integer maximum cannot order these; each row's maximum is far below zero."""
    problem = AttentionProblem.parse("b1_hq1_hk1_sq64_sk200_d64_dv64_bf16_causal_fwd")
    generator = torch.Generator().manual_seed(0)
    q = torch.rand(1, 64, 1, 64, generator=generator).to(torch.bfloat16) + 0.5
    k = -torch.rand(1, 200, 1, 64, generator=generator).to(torch.bfloat16) - 1.0
    v = torch.randn(1, 200, 1, 64, generator=generator).to(torch.bfloat16)
    config = with_knobs(BASE)
    call = emulate_forward(problem, config, H200, inputs=(q, k, v), kernel=kernels(problem, config))
    assert call.passed, (call.out_error, call.lse_error, call.findings)


def test_launch_takes_the_planned_shared_memory(kernels: Kernels) -> None:
    config = with_knobs(BASE)
    kernel = kernels(PROBLEM, config)
    plan = build_plan(PROBLEM, config, H200)
    q, k, v = random_inputs(PROBLEM)
    names = [a.name for a in kernel.signature]
    launches = []

    def host(*args: object) -> None:
        launches.extend(capture(kernel, args, ptx=kernel.ptx, names=names, sm_count=H200.sm_count))

    out, lse = torch.empty_like(q), torch.empty(1, 2, 130)
    forward_caller(host, names, sm_count=H200.sm_count, window=PROBLEM.window)(q, k, v, out, lse, 0.125)
    (launch,) = launches
    assert launch.smem_bytes == plan.resources.smem_bytes
    assert launch.block == (plan.resources.threads, 1, 1)


def test_refused_configs_do_not_compile() -> None:
    from fa4tune.kernels.sm90.forward import build

    with pytest.raises(InfeasibleError, match="take turns"):
        build(PROBLEM, with_knobs("tile_m=64,ping_pong=true"))
