"""What the microbenchmarks measure is what their machine code does, loop by loop."""

from __future__ import annotations

import importlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fa4tune.errors import CompileError
from fa4tune.kernels.machine_code import listing
from fa4tune.kernels.micro.build import BuiltKernel, build, measured_loop
from fa4tune.kernels.micro.suite import KernelSpec, Suite, suite

Build = Callable[[str], BuiltKernel]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Build]:
    """Compiles kernels of the Hopper suite by name, each once."""
    before = os.environ.get("FA4TUNE_CACHE")
    os.environ["FA4TUNE_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    specs = {spec.name: spec for spec in suite("sm_90a").kernels}
    yield lambda name: build(specs[name], "sm_90a")
    if before is None:
        del os.environ["FA4TUNE_CACHE"]
    else:
        os.environ["FA4TUNE_CACHE"] = before


def _count(kernel: BuiltKernel, *opcodes: str) -> int:
    return sum(count for opcode, count in kernel.loop.items() if opcode.startswith(opcodes))


def _ptx(kernel: BuiltKernel) -> str:
    return kernel.library.with_suffix(".ptx").read_text()


def _listing(name: str) -> str:
    """Machine code of a kernel of the Hopper suite."""
    import cutlass.cute as cute

    from fa4tune.kernels.micro.base import fake_arguments

    spec = next(spec for spec in suite("sm_90a").kernels if spec.name == name)
    module = importlib.import_module(f"fa4tune.kernels.micro.{spec.module}")
    kernel = getattr(module, spec.class_name)(**dict(spec.arguments))
    with tempfile.TemporaryDirectory() as scratch:
        options = f"--gpu-arch sm_90a --keep-cubin --dump-dir {scratch}"
        return listing(cute.compile(kernel, *fake_arguments(), options=options).artifacts.CUBIN)


def _probe_work(name: str, contents: Suite) -> float:
    return next(p.work for p in contents.probes if p.name == name)


@pytest.mark.parametrize(
    ("kernel", "opcodes", "probe"),
    [
        ("arithmetic.ex2.8", {"MUFU.EX2": 1}, "ex2.throughput"),
        ("arithmetic.fma_max.8", {"FFMA": 0.5, "FMNMX": 0.5}, "fma_max.throughput"),
        ("arithmetic.max.1", {"FMNMX": 1}, None),
        ("arithmetic.max3.8", {"VIMNMX3": 1}, "max3.throughput"),
        ("arithmetic.convert.8", {"F2FP.BF16": 1}, "convert.throughput"),
    ],
)
def test_arithmetic_loop_is_the_operation_alone(
    built: Build, kernel: str, opcodes: dict[str, float], probe: str | None
) -> None:
    found = built(kernel)
    operations = 256 if probe is None else _probe_work(probe, suite("sm_90a")) / 512
    for opcode, share in opcodes.items():
        assert _count(found, opcode) == operations * share
    assert found.slots - sum(_count(found, opcode) for opcode in opcodes) <= 4
    assert found.spill_bytes == 0


def test_polynomial_exponential_takes_eight_instructions(built: Build) -> None:
    found = built("arithmetic.polynomial.8")
    elements = _probe_work("polynomial.throughput", suite("sm_90a")) / 512
    assert _count(found, "FFMA") == 3 * elements
    assert _count(found, "FADD") == 3 * elements
    assert _count(found, "FMNMX") == elements
    assert _count(found, "MUFU") == 0
    assert (found.slots - 3) / elements == 8


def test_memory_loops_access_what_the_probe_counts(built: Build) -> None:
    contents = suite("sm_90a")
    for access, opcode in (("load", "LDS.128"), ("store", "STS.128")):
        assert _count(built(f"smem.{access}"), opcode) * 16 * 512 == _probe_work(
            f"smem_{access}.throughput", contents
        )
    assert _count(built("smem.chain"), "LDS") == _probe_work("smem_load.latency", contents)


@pytest.mark.parametrize(
    ("name", "waits"),
    [
        ("wgmma.ss.n128.k8.queued", 1),
        ("wgmma.rs.n256.k8.queued", 1),
        ("wgmma.ss.n176.k4.waited", 1),
    ],
)
def test_matmul_loop_is_one_commit_that_is_not_serialized(built: Build, name: str, waits: int) -> None:
    found = built(name)
    _, _, n, steps, _ = name.split(".")
    assert _count(found, f"HGMMA.64x{n[1:]}x16.F32.BF16") == int(steps[1:])
    # the assembler that finds a hazard fences and waits around every single instruction
    assert _count(found, "WARPGROUP.ARRIVE") == 1
    assert _count(found, "WARPGROUP.DEPBAR") == waits
    assert found.spill_bytes == 0
    flops = 2 * 64 * int(n[1:]) * 16 * int(steps[1:])
    assert _probe_work(f"{name}.wg1", suite("sm_90a")) == flops
    pending = 1 if name.endswith("queued") else 0
    assert re.search(rf"wgmma\.wait_group\.sync\.aligned\s+{pending};", _ptx(found))


def test_section_without_exponentials_lacks_nothing_else(built: Build) -> None:
    full, rest = built("section.n128.full"), built("section.n128.arithmetic")
    keys, rows_of_a_thread = 128, 2
    per_thread = 64 * keys // 128
    assert _count(full, "MUFU.EX2") == per_thread + rows_of_a_thread
    assert _count(rest, "MUFU.EX2") == rows_of_a_thread
    for opcode in ("FFMA", "FADD", "VIMNMX3", "F2FP", "SHFL", "VOTE"):
        assert _count(full, opcode) == _count(rest, opcode), opcode
    # what the kernels' plans take a score to cost beside its exponential: half a three-input maximum,
    # multiply-add, sum, half a pack; the sink of this kernel adds a quarter
    assert rest.slots / per_thread == pytest.approx(3.25, abs=0.75)
    assert not rest.skipped


@pytest.mark.parametrize("kernel", ["section.n64.full", "section.n128.full", "section.n176.full"])
def test_scaled_scores_have_registers_of_their_own(kernel: str) -> None:
    # through one register, each would wait until the exponential unit has read the one before
    code = _listing(kernel)
    arguments = re.findall(r"MUFU\.EX2 R\d+, -?(R\d+)", code)
    scores = 64 * int(kernel.split(".")[1][1:]) // 128
    assert len(set(arguments)) == len(arguments) == scores + 2
    # scaled where the score was, so that no exponential has to be taken before the next score is scaled
    in_place = re.findall(r"FFMA\.FTZ (R\d+), \1\.?\w*, ", code)
    assert len(in_place) == scores


@pytest.mark.parametrize(
    ("kernel", "opcode"),
    [
        ("beside.ex2.none", "MUFU.EX2"),
        ("beside.ex2.rs128", "MUFU.EX2"),
        ("beside.fma.ss128", "FFMA"),
        ("beside.max.rs64", "FMNMX"),
    ],
)
def test_work_beside_matmuls_is_the_operation_alone(built: Build, kernel: str, opcode: str) -> None:
    found = built(kernel)
    assert _count(found, opcode) == _probe_work(kernel, suite("sm_90a")) / 128
    assert found.slots - _count(found, opcode) <= 4
    assert found.spill_bytes == 0


@pytest.mark.parametrize(("kernel", "columns"), [("beside.ex2.rs64", 64), ("beside.rs128.fma", 128)])
def test_matmuls_beside_arithmetic_are_not_serialized(kernel: str, columns: int) -> None:
    code = _listing(kernel)
    assert code.count(f"HGMMA.64x{columns}x16.F32.BF16") == 8
    assert code.count("WARPGROUP.ARRIVE") == 1
    # one in the loop, one behind it
    assert code.count("WARPGROUP.DEPBAR") == 2
    assert _probe_work("beside.rs128.fma", suite("sm_90a")) == 8 * 2 * 64 * 128 * 16


def test_loop_with_matmuls_multiplies_scores_and_output(built: Build) -> None:
    found = built("loop.n128.d64")
    assert _count(found, "HGMMA.64x128x16") == 64 // 16
    assert _count(found, "HGMMA.64x64x16") == 128 // 16
    assert _count(found, "MUFU.EX2") == 66
    assert _count(found, "WARPGROUP.ARRIVE") == 2
    # the way that negative scores take to their maxima is jumped over
    assert found.skipped == {"FMNMX": 64}


def test_stores_run_beside_matmuls(built: Build) -> None:
    few, many = _ptx(built("interference.stores0")), _ptx(built("interference.stores16"))
    assert few.count("st.shared.v4.b32") == 0
    assert many.count("st.shared.v4.b32") == 16
    assert few.count("wgmma.mma_async") == many.count("wgmma.mma_async") == 8


def test_copies_load_tiles_of_the_probe_s_size(built: Build) -> None:
    for name, boxes in (("copy.64x64.depth1", 1), ("copy.128x128.depth4", 2)):
        found = built(name)
        assert _count(found, "UTMALDG.2D") == boxes
        rows, columns = map(int, name.split(".")[1].split("x"))
        assert re.search(rf"mov\.b32\s+%r\d+, {rows * columns * 2};", _ptx(found))


def test_signals_are_one_arrival_and_one_wait(built: Build) -> None:
    found = built("signals.mbarrier")
    assert _count(found, "SYNCS.ARRIVE") == 1
    assert _count(found, "SYNCS.PHASECHK.TRANS64.TRYWAIT") == 1
    named = built("signals.named")
    assert _count(named, "BAR.SYNC") == 1
    assert _count(named, "BAR.ARV") == 1


def test_clock_is_read_around_the_loop_only(built: Build) -> None:
    assert len(re.findall(r"mov\.u64 \S+, %clock64;", _ptx(built("arithmetic.ex2.8")))) == 2


def test_build_is_cached_and_repairs_a_damaged_folder(built: Build) -> None:
    first = built("smem.chain")
    compiled: list[str] = []
    spec = next(s for s in suite("sm_90a").kernels if s.name == "smem.chain")
    assert build(spec, "sm_90a", compiled.append) == first
    assert not compiled
    Path(first.library).unlink()
    assert build(spec, "sm_90a", compiled.append) == first
    assert compiled == ["smem.chain"]


def test_code_without_clock_is_refused(built: Build) -> None:
    from fa4tune.kernels.micro import build as module

    text = ".L_x_1:\n        /*0000*/                   FADD R0, R0, R0 ;\n"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "listing", lambda cubin: text)
        with pytest.raises(CompileError, match="reads the clock 0 times"):
            measured_loop(b"")


def test_the_measured_loop_is_the_longest_one_and_knows_what_is_jumped_over() -> None:
    from fa4tune.kernels.micro import build as module

    lines = [
        "CS2R R2, SR_CLOCKLO", "@!P0 BRA `(.L_x_9)", ".L_x_1:", "FADD R0, R0, R0", ".L_x_2:",
        "FMUL R0, R0, R0",
        "@P1 BRA `(.L_x_2)", "@P2 BRA `(.L_x_3)", "FMNMX R1, R1, R0, PT", "FMNMX R1, R1, R0, PT", ".L_x_3:",
        "@P0 BRA `(.L_x_1)", ".L_x_9:", "CS2R R4, SR_CLOCKLO", "EXIT",
    ]  # fmt: skip
    text = "".join(
        f"{line}\n" if line.startswith(".L") else f"        /*{i:04x}*/   {line} ;\n"
        for i, line in enumerate(lines)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "listing", lambda cubin: text)
        loop, skipped = measured_loop(b"")
    assert loop == {"FADD": 1, "FMUL": 1, "BRA": 3, "FMNMX": 2}
    assert skipped == {"FMNMX": 2}


def test_a_kernel_that_cannot_compile_is_named(tmp_path: Path) -> None:
    spec = KernelSpec("odd", "arithmetic", "Arithmetic", (("operation", "sine"), ("chains", 8)))
    with pytest.raises(CompileError, match=r"odd did not compile.*sine"):
        build(spec, "sm_90a")
