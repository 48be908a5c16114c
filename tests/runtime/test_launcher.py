"""Loading and calling compiled kernels, on a CPU with the launch path's real library."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fa4tune.errors import LaunchError
from fa4tune.kernels.compile import CompiledKernel, compile_kernel
from fa4tune.kernels.config import SM90ForwardConfig
from fa4tune.kernels.kernel_class import KernelClass
from fa4tune.kernels.toolchain import link_shared
from fa4tune.problem import AttentionProblem
from fa4tune.runtime import launcher

pytest.importorskip("cutlass.cute")
TILE_N = 64


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CompiledKernel]:
    """The stand-in kernel: O = Q * softmax_scale, LSE = tile_n."""
    problem = AttentionProblem.parse("b1_hq2_hk1_sq64_sk64_d64_dv64_bf16_full_fwd")
    kernel_class = KernelClass.from_problem(problem, SM90ForwardConfig(tile_n=TILE_N), "sm_90a")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FA4TUNE_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.syspath_prepend(str(Path(__file__).parents[1] / "kernels"))
        yield compile_kernel(kernel_class, module="stand_in_kernel")


def _tensors(device: str = "cpu") -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(2, 5, 3, 64, generator=generator).to(torch.bfloat16)
    return [t.to(device) for t in (q, q, q, torch.zeros_like(q), torch.zeros(2, 3, 5))]


_CHILD = """
import ctypes, sys, types
runtime = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
import numpy as np, tvm_ffi
# the launcher imports torch for its CUDA runtime; a torch built for CUDA would not load beside the stand-in
sys.modules["torch"] = types.ModuleType("torch")
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("launcher", sys.argv[3])
launcher = module_from_spec(spec)
sys.modules["fa4tune"] = None
spec.loader.exec_module(launcher)
function = launcher.load_library(sys.argv[2])
assert launcher.load_library(sys.argv[2]) is function
try:
    function(1)
except TypeError as error:
    print(str(error).splitlines()[0])
print(sorted({"cutlass", "fa4tune.kernels", "fa4tune.errors"} & set(sys.modules)))
"""


def test_library_needs_only_the_cuda_runtime_and_tvm_ffi(kernel: CompiledKernel, tmp_path: Path) -> None:
    # A CUDA runtime of documented functions only, bound at load time: a symbol beyond those would not load.
    shim = Path(launcher.__file__).parents[1] / "emulator" / "capture_shim.c"
    runtime = tmp_path / "libcudart.so.13"
    link_shared([shim], runtime, [f"-Wl,-soname,{runtime.name}"])
    assert kernel.library_path is not None
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, str(runtime), str(kernel.library_path), launcher.__file__],
        capture_output=True,
        text=True,
        check=False,
        env={"LD_BIND_NOW": "1", "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr
    refusal, modules = done.stdout.splitlines()
    assert "Expects 7 parameters" in refusal
    assert modules == "[]"


def test_launcher_file_imports_only_the_standard_library_torch_and_tvm_ffi() -> None:
    allowed = {*sys.stdlib_module_names, "torch", "tvm_ffi"}
    for node in ast.parse(Path(launcher.__file__).read_text()).body:
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
        assert {n.split(".")[0] for n in names} <= allowed


def test_missing_library_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"none\.so cannot be loaded"):
        launcher.load_library(tmp_path / "none.so")


def test_cpu_tensors_need_emulate(kernel: CompiledKernel) -> None:
    with pytest.raises(LaunchError, match="takes CUDA tensors, got CPU; move them or pass emulate=True"):
        launcher.launch(kernel, *_tensors(), 1.0, 132)


def test_emulate_refuses_tensors_elsewhere(kernel: CompiledKernel) -> None:
    tensors = [t.to("meta") for t in _tensors()]
    with pytest.raises(LaunchError, match="emulate=True takes CPU tensors, got meta"):
        launcher.launch(kernel, *tensors, 1.0, 132, emulate=True)


def test_unlinked_object_loads_through_the_compilers_runtime(kernel: CompiledKernel, tmp_path: Path) -> None:
    class Unlinked:
        library_path = None
        object_path = kernel.object_path
        symbol = kernel.symbol
        ptx = ""

    function = launcher.load_kernel(Unlinked())
    with pytest.raises(TypeError, match="Expects 7 parameters"):
        function(1)
    assert launcher.load_kernel(Unlinked()) is function


@pytest.mark.skipif(
    importlib.util.find_spec("fa4tune.emulator.machine") is None, reason="the emulator is not installed"
)
def test_emulator_stands_in_for_the_gpu(kernel: CompiledKernel) -> None:
    q, k, v, out, lse = _tensors()
    launcher.launch(kernel, q, k, v, out, lse, 0.5, 132, emulate=True)
    assert torch.equal(out, (q.float() * 0.5).to(torch.bfloat16))
    assert torch.equal(lse, torch.full_like(lse, TILE_N))


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)
def test_kernel_runs_on_the_current_stream_and_in_a_graph(kernel: CompiledKernel) -> None:
    q, k, v, out, lse = _tensors("cuda")
    function = launcher.load_kernel(kernel)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        function(q, k, v, out, lse, 0.5, 132)
    stream.synchronize()
    assert torch.equal(out, (q.float() * 0.5).to(torch.bfloat16))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function(q, k, v, out, lse, 0.25, 132)
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, (q.float() * 0.25).to(torch.bfloat16))
