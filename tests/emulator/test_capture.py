"""Launch capture against launches that are known by construction."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fa4tune.emulator.capture import capture, parameter_sizes
from fa4tune.errors import EmulationError

cute = pytest.importorskip("cutlass.cute")
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from tests.emulator.capture_kernels import THREADS, TILE, load_tile, scale_and_negate


def _compile(host: Any, *arguments: Any, folder: Path, arch: str = "sm_90a", options: str = "") -> Any:
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(
        host,
        *arguments,
        stream,
        options=f"--enable-tvm-ffi --gpu-arch {arch} --keep-ptx --dump-dir {folder} {options}",
    )


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    length = cute.sym_int()
    vectors = [make_fake_compact_tensor(Float32, (length,)) for _ in range(2)]
    return _compile(scale_and_negate, *vectors, Float32(1.0), Int32(1), folder=tmp_path_factory.mktemp("ptx"))


@pytest.fixture(scope="module")
def compiled_tma(tmp_path_factory: pytest.TempPathFactory) -> Any:
    matrix = make_fake_tensor(
        BFloat16,
        (cute.sym_int(), cute.sym_int()),
        stride=(cute.sym_int64(divisibility=8), 1),
        assumed_align=16,
    )
    column = make_fake_compact_tensor(BFloat16, (cute.sym_int(),))
    return _compile(load_tile, matrix, column, folder=tmp_path_factory.mktemp("ptx"))


@pytest.mark.parametrize("length", [1, 300, 128])
def test_launches_of_one_host_function_are_captured_in_order(compiled: Any, length: int) -> None:
    source, target = torch.arange(float(length)), torch.zeros(length)
    first, second = capture(compiled, [source, target, 3.0, 4], names=["source", "target"])
    assert "scale" in first.entry
    assert "negate" in second.entry
    assert first.grid == (-(-length // THREADS), 1, 1)
    assert first.block == second.block == (THREADS, 1, 1)
    assert (first.cluster, second.cluster) == ((1, 1, 1), (2, 1, 1))
    assert second.grid == (4, 3, 2)
    assert (first.smem_bytes, second.smem_bytes) == (0, 4096)


def test_parameters_hold_pointers_lengths_and_scalars_of_the_call(compiled: Any) -> None:
    source, target = torch.zeros(77), torch.zeros(77)
    first, _ = capture(compiled, [source, target, 2.5, 4])
    assert [struct.unpack_from("<Qi", p) for p in first.parameters[:2]] == [
        (source.data_ptr(), 77),
        (target.data_ptr(), 77),
    ]
    assert struct.unpack("<f", first.parameters[2]) == (2.5,)


def test_buffers_are_the_callers_memory_exactly_bounded(compiled: Any) -> None:
    source, target = torch.arange(50.0), np.zeros(50, np.float32)
    launch, _ = capture(compiled, [source, target, 1.0, 2], names=["source", "target"], read_only=["source"])
    by_name = {b.name: b for b in launch.buffers}
    assert (by_name["source"].address, by_name["source"].nbytes) == (source.data_ptr(), 200)
    assert not by_name["source"].writable
    assert by_name["target"].writable
    by_name["target"].array[:4] = np.frombuffer(struct.pack("<f", 7.0), np.uint8)
    assert target[0] == 7.0


def test_overlapping_tensors_share_one_buffer(compiled: Any) -> None:
    whole = torch.arange(100.0)
    launch, _ = capture(compiled, [whole[:60], whole[40:], 1.0, 2], names=["a", "b"])
    (buffer,) = launch.buffers
    assert (buffer.name, buffer.address, buffer.nbytes) == ("a+b", whole.data_ptr(), 400)


@pytest.mark.parametrize(("rows", "columns", "stride"), [(64, 32, 32), (100, 40, 48), (3, 8, 8)])
def test_tma_descriptor_is_the_kernels_own(compiled_tma: Any, rows: int, columns: int, stride: int) -> None:
    matrix = torch.zeros(rows, stride, dtype=torch.bfloat16)[:, :columns]
    target = torch.zeros(TILE[0], dtype=torch.bfloat16)
    (launch,) = capture(compiled_tma, [matrix, target], names=["matrix", "target"])
    (descriptor,) = [p for p in launch.parameters if len(p) == 128]
    words = struct.unpack("<32I", descriptor)
    assert words[0] | words[1] << 32 == matrix.data_ptr()
    assert words[2] >> 4 & 7 == 1  # rank - 1
    assert words[3] << 4 == stride * 2
    assert (words[8] + 1, words[9] + 1) == (columns, rows)
    assert ((words[13] >> 24) + 1, (words[14] & 0xFF) + 1) == (TILE[1], TILE[0])
    buffer = next(b for b in launch.buffers if b.name == "matrix")
    assert buffer.nbytes == ((rows - 1) * stride + columns) * 2


def test_captures_of_one_kernel_are_independent(compiled: Any) -> None:
    small, large = torch.zeros(10), torch.zeros(1000)
    first = capture(compiled, [small, small.clone(), 1.0, 2])
    second = capture(compiled, [large, large.clone(), 1.0, 2])
    assert [x.grid[0] for x in (first[0], second[0])] == [1, 8]


def test_wrong_argument_is_refused_in_the_host_functions_words(compiled: Any) -> None:
    with pytest.raises(EmulationError, match=r"refused its arguments.*argument #0"):
        capture(compiled, [torch.zeros(5, dtype=torch.float16), torch.zeros(5), 1.0, 2])


def test_ptx_of_another_kernel_is_refused(compiled: Any, compiled_tma: Any) -> None:
    with pytest.raises(EmulationError, match="the PTX does not have"):
        capture(compiled, [torch.zeros(5), torch.zeros(5), 1.0, 2], ptx=compiled_tma.artifacts.PTX)


def test_object_without_a_host_function_is_refused() -> None:
    with pytest.raises(EmulationError, match="cannot capture dict"):
        capture({}, [], ptx=".target sm_90a\n.entry k()")


def test_missing_c_compiler_is_one_clear_error(
    compiled: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # an empty cache, or an earlier link would be found
    monkeypatch.setenv("FA4TUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(EmulationError, match="found no C compiler; install gcc or set CC"):
        capture(compiled, [torch.zeros(5), torch.zeros(5), 1.0, 2])


def test_parameter_sizes_follow_the_declarations() -> None:
    ptx = """
.visible .entry first(
\t.param .align 64 .b8 first_param_0[128],
\t.param .u64 .ptr .global .align 16 first_param_1,
\t.param .b8 first_param_2,
\t.param .f32 first_param_3
)
.entry second()
"""
    assert parameter_sizes(ptx) == {"first": (128, 8, 1, 4), "second": ()}
    with pytest.raises(EmulationError, match=r"no \.entry"):
        parameter_sizes("")
