"""Compiling without a GPU: object cache, compiler processes, linking, machine code."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import fa4tune.kernels
from fa4tune.errors import CompileError
from fa4tune.kernels import compile as compiling
from fa4tune.kernels import toolchain
from fa4tune.kernels.compile import CompiledKernel, CompilePool, cached_kernel, compile_kernel, compile_many
from fa4tune.kernels.config import SM90ForwardConfig
from fa4tune.kernels.kernel_class import KernelClass
from fa4tune.kernels.machine_code import disassemble
from fa4tune.problem import AttentionProblem

pytest.importorskip("cutlass.cute")
MODULE = "stand_in_kernel"
PROBLEM = AttentionProblem.parse("b1_hq2_hk1_sq64_sk64_d64_dv64_bf16_full_fwd")
LIVE = 128  # values that the stand-in keeps when told to spill
REFUSE, CRASH, HANG, SPILL = 1, 2, 4, 5  # exp2_degree of the stand-in, see its module


def _class(**knobs: Any) -> KernelClass:
    return KernelClass.from_problem(PROBLEM, SM90ForwardConfig(**knobs), "sm_90a")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of this module's own, and the stand-in kernel importable in compiler processes."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FA4TUNE_CACHE", str(folder))
        patch.syspath_prepend(str(Path(__file__).parent))
        yield folder


@pytest.fixture(scope="module")
def pool(cache: Path) -> Iterator[CompilePool]:
    with CompilePool(1) as shared:
        yield shared


@pytest.fixture(scope="module")
def kernel(pool: CompilePool) -> CompiledKernel:
    return pool.submit(_class(), MODULE).result()


def test_compiled_kernel_is_complete(kernel: CompiledKernel) -> None:
    entry = re.search(r"\.entry (\w+)", kernel.ptx)
    assert entry is not None
    assert ".target sm_90a" in kernel.ptx
    assert [r.entry for r in kernel.resources] == [entry[1]]
    assert b"__tvm_ffi_kernel" in kernel.object_path.read_bytes()
    assert kernel.cubin[:4] == b"\x7fELF"
    assert [(a.name, a.type) for a in kernel.signature] == [
        ("mQ", "bfloat16[4]"),
        ("mK", "bfloat16[4]"),
        ("mV", "bfloat16[4]"),
        ("mO", "bfloat16[4]"),
        ("mLSE", "float32[3]"),
        ("softmax_scale", "float32"),
        ("sm_count", "int32"),
    ]


def test_resources_agree_with_the_machine_code(kernel: CompiledKernel) -> None:
    (usage,) = kernel.resources
    (opcodes,) = disassemble(kernel.cubin).values()
    assert "EXIT" in opcodes
    assert 0 < usage.registers <= 255
    assert not usage.spilled
    assert not any(op.startswith(("LDL", "STL")) for op in opcodes)


def test_spills_are_counted(pool: CompilePool) -> None:
    kernel = pool.submit(_class(exp2_degree=SPILL), MODULE).result()
    (usage,) = kernel.resources
    (opcodes,) = disassemble(kernel.cubin).values()
    assert usage.spilled
    assert usage.registers <= 64 < LIVE
    assert usage.spill_stores == sum(op.startswith("STL") for op in opcodes) > 0
    assert usage.spill_loads == sum(op.startswith("LDL") for op in opcodes) > 0
    # what does not fit goes out and comes back, 4 bytes a value
    assert kernel.spill_bytes >= 2 * 4 * (LIVE - 64)
    assert usage.stack_bytes >= 4 * (LIVE - 64)


def test_second_request_is_served_without_a_compiler(
    kernel: CompiledKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "CompilePool", None)
    again = compile_kernel(_class(), module=MODULE)
    assert again == kernel


def test_failures_are_values_and_the_pool_lives_on(cache: Path) -> None:
    wanted = [_class(exp2_degree=CRASH), _class(exp2_degree=REFUSE), _class(tile_n=64)]
    results = dict(compile_many(wanted, workers=1, module=MODULE))
    crashed, refused, good = (results[c] for c in wanted)
    assert isinstance(crashed, CompileError)
    assert "SIGABRT: the compiler's last words" in str(crashed)
    assert isinstance(refused, CompileError)
    assert "did not compile: ValueError: no such kernel" in str(refused)
    assert isinstance(good, CompiledKernel)
    assert not [p for p in (cache / "objects").iterdir() if p.name.startswith(".")]


def test_hanging_compiler_is_ended(cache: Path) -> None:
    with pytest.raises(CompileError, match="did not compile within 1 s"):
        compile_kernel(_class(exp2_degree=HANG), module=MODULE, timeout=1)


def test_damaged_entry_is_built_anew(pool: CompilePool) -> None:
    first = pool.submit(_class(tile_n=80), MODULE).result()
    first.object_path.unlink()
    assert cached_kernel(_class(tile_n=80), MODULE) is None
    second = pool.submit(_class(tile_n=80), MODULE).result()
    assert second.object_path.stat().st_size > 0
    (second.folder / "kernel.json").write_text("{")
    assert cached_kernel(_class(tile_n=80), MODULE) is None


def test_concurrent_writers_of_one_key_agree(cache: Path) -> None:
    wanted = _class(tile_n=96)
    with CompilePool(2) as two, ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda _: two.submit(wanted, MODULE).result(), range(2))
    assert first.folder == second.folder
    assert cached_kernel(wanted, MODULE) is not None
    assert not [p for p in (cache / "objects").iterdir() if p.name.startswith(".")]


def test_object_without_a_c_compiler_is_linked_once_there_is_one(
    pool: CompilePool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wanted = _class(tile_n=112)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        patch.delenv("CC", raising=False)
        kernel = compile_kernel(wanted, module=MODULE)
        assert kernel.library_path is None
    linked = cached_kernel(wanted, MODULE)
    assert linked is not None
    assert linked.library_path is not None


def test_key_depends_on_config_version_and_module(
    kernel: CompiledKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {
        kernel.key,
        compiling.object_key(_class(tile_n=64), MODULE),
        compiling.object_key(_class(), "fa4tune.kernels.config"),
    }
    monkeypatch.setitem(importlib.import_module("fa4tune.kernels.config").KERNEL_VERSIONS, "sm90_fwd", 99)
    keys.add(compiling.object_key(_class(), MODULE))
    assert len(keys) == 4
    assert kernel.folder.name == kernel.key


def test_source_hash_follows_imports_of_the_kernels_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fa4tune.kernels, "__path__", [*fa4tune.kernels.__path__, str(tmp_path)])
    (tmp_path / "probe_a.py").write_text("from fa4tune.kernels import probe_b\n")
    (tmp_path / "probe_b.py").write_text("import fa4tune.kernels.probe_c\nimport os\n")
    (tmp_path / "probe_c.py").write_text("VALUE = 1\n")

    def current() -> str:
        toolchain.source_hash.cache_clear()
        importlib.invalidate_caches()
        return toolchain.source_hash("fa4tune.kernels.probe_a")

    first = current()
    assert current() == first
    (tmp_path / "probe_c.py").write_text("VALUE = 2\n")
    changed = current()
    assert changed != first
    (tmp_path / "probe_c.py").write_text("VALUE = 1\n")
    assert current() == first
    toolchain.source_hash.cache_clear()


def test_source_that_changed_under_a_running_search_is_refused(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    monkeypatch.setattr(compiling, "source_hash", lambda module: "of an earlier file")
    with pytest.raises(CompileError, match="changed while this process ran; start again"):
        compile_kernel(_class(), module=MODULE)


def test_unwritable_cache_falls_back_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv("FA4TUNE_CACHE", str(blocker / "cache"))
    with pytest.warns(UserWarning, match="is not writable .*; set FA4TUNE_CACHE") as caught:
        first = toolchain.cache_dir("objects")
    assert len(caught) == 1
    assert toolchain.cache_dir("objects") == first
    assert os.access(first, os.W_OK)


def test_digest_separates_its_parts() -> None:
    assert toolchain.digest("ab", "c") != toolchain.digest("a", "bc")


def test_unknown_kernel_module_is_one_clear_error() -> None:
    with pytest.raises(CompileError, match="there is no kernel module 'no_such_kernel'"):
        compile_kernel(_class(), module="no_such_kernel")


def test_closed_pool_refuses_work_and_ends_its_processes() -> None:
    pool = CompilePool(1)
    future = pool.submit(_class(exp2_degree=HANG), MODULE)
    pool.close()
    with pytest.raises((CompileError, RuntimeError)):
        pool.submit(_class(), MODULE).result()
    assert future.cancelled() or isinstance(future.exception(), CompileError)
