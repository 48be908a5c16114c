"""The native checks find what the plain ones find, word for word and in the same order."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from fa4tune.emulator import checks_words
from fa4tune.emulator.checks_registers import RegisterPlan
from fa4tune.emulator.findings import Finding
from fa4tune.emulator.machine import load
from fa4tune.emulator.native.backend import unavailable
from fa4tune.emulator.native.registers import NativeRegisters
from tests.emulator.checked_kernels import ALL, COPIES, EXCHANGE, TCGEN05, WGMMA, Kernel
from tests.emulator.test_checks import FAULTS
from tests.study import load_study

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"no native back-end: {unavailable()}")

CASES: dict[str, tuple[Kernel, list[tuple[str, str]]]] = {
    **{name: (kernel, []) for name, kernel in ALL.items()},
    **{name: (fault[0], fault[3]) for name, fault in FAULTS.items()},
}


def both(kernel: Kernel, edits: list[tuple[str, str]], **options: Any) -> list[tuple[list[Finding], bool]]:
    """Findings, and whether it completed, of the plain and of the native back-end."""
    results = [kernel.run(*edits, backend=backend, **options) for backend in ("plain", "native")]
    return [(r.findings, r.completed) for r in results]


@pytest.mark.parametrize("late", [None, 0, 1, 2])
@pytest.mark.parametrize("name", CASES)
def test_findings_of_both_back_ends_are_equal(name: str, late: int | None) -> None:
    plain, native = both(*CASES[name], late=late)
    assert native == plain


#: Faults in pairs, so that a kernel has several findings, and their order and number matter.
PAIRS = [
    (COPIES, ["no proxy fence", "mbarrier without its fence"]),
    (COPIES, ["store not waited for", "data on an mbarrier"]),
    (WGMMA, ["no wgmma.fence", "wgmma without a proxy fence"]),
    (TCGEN05, ["no fence before the barrier", "no fence after the commit"]),
    (TCGEN05, ["tcgen05.ld not waited for", "tensor memory never written"]),
    (EXCHANGE, ["register never written"]),
]


@pytest.mark.parametrize("waivers", [(), ("tcgen05-fence", "tcgen05-wait-ld", "wgmma-fence")])
@pytest.mark.parametrize(("kernel", "names"), PAIRS)
def test_several_faults_and_waivers(kernel: Kernel, names: list[str], waivers: tuple[str, ...]) -> None:
    edits = [edit for name in names for edit in FAULTS[name][3]]
    plain, native = both(kernel, edits, waivers=waivers)
    assert plain[0]
    assert native == plain
    assert [f.extra for f in native[0]] == [f.extra for f in plain[0]]


def test_a_trace_does_not_change_what_is_found() -> None:
    name = "load not waited for"
    plain, native = both(*CASES[name], trace=True)
    assert native == plain
    assert native == both(*CASES[name])[1]


#: Register faults that the kernels of the other tests lack.
REGISTERS = {
    "moved on": "mov.b32 %r31, %r30;\nadd.s32 %r32, %r31, 1;",
    "written in one branch": "@%p1 mov.b32 %r30, 1;\nadd.s32 %r32, %r30, 1;",
    "branch taken": "@%p1 bra SKIP;\nmov.b32 %r30, 1;\nSKIP:\nadd.s32 %r32, %r30, 1;",
    "in a loop": "mov.b32 %r33, 0;\nLOOP:\nadd.s32 %r33, %r33, 1;\nsetp.lt.u32 %p5, %r33, 3;\n"
    "@%p5 bra LOOP;\nadd.s32 %r32, %r30, %r33;",
    "a predicate": "selp.b32 %r32, %r3, %r4, %p9;",
}


@pytest.mark.parametrize("name", REGISTERS)
def test_registers_that_nothing_wrote(name: str) -> None:
    edits = [("bar.sync 0; // written", f"{REGISTERS[name]}\nbar.sync 0;")]
    plain, native = both(EXCHANGE, edits)
    assert native == plain


def test_moves_between_a_load_and_its_wait_are_followed() -> None:
    wait = "tcgen05.wait::ld.sync.aligned;\nadd.s32 %r82, %r80, %r81;"
    moved = "mov.b32 %r83, %r80;\nadd.s32 %r82, %r83, 1;\ntcgen05.wait::ld.sync.aligned;"
    plain, native = both(TCGEN05, [(wait, moved)])
    assert [f.kind for f in plain[0]] == ["missing-tcgen05-wait-ld"]
    assert native == plain
    harmless = "mov.b32 %r83, %r80;\ntcgen05.wait::ld.sync.aligned;\nadd.s32 %r82, %r83, 1;"
    assert both(TCGEN05, [(wait, harmless)]) == [([], True), ([], True)]


def test_masks_of_registers_survive_packing() -> None:
    _, compiler = load(TCGEN05.ptx(("tcgen05.wait::ld.sync.aligned;", "")), "k", True)
    assert isinstance(compiler.plan, RegisterPlan)
    registers = NativeRegisters(compiler.plan)
    assert registers.words
    for register in registers.order:
        assert registers.unpack(registers.pack(1 << register)) == 1 << register
    assert registers.unpack(registers.pack(registers.followed)) == registers.followed


def test_every_family_has_a_place_in_the_clocks() -> None:
    assert len(set(checks_words.FAMILIES)) == len(checks_words.FAMILIES)
    assert checks_words.FAMILIES[-1] == "bulk"  # numbers from there on are those of lanes


# -- the forward kernels, unchanged and with a fault


@pytest.fixture(scope="module")
def study() -> ModuleType:
    pytest.importorskip("cutlass")
    return load_study("emulator_mutants")


def test_output_over_keys_is_a_race_of_tensor_copies(
    study: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(study.KERNELS, "sm_90a", ("b1_hq1_hk1_sq256_sk256_d64_dv64_bf16_full_fwd", 2))
    forward = study.forward_caller

    def over_keys(host: Any, names: list[str], **options: Any) -> Any:
        call = forward(host, names, **options)
        return lambda q, k, v, out, lse, scale: call(q, k, v, k, lse, scale)

    monkeypatch.setattr(study, "forward_caller", over_keys)
    monkeypatch.setattr(study, "READ_ONLY", ("mQ", "mV"))
    s = study.subject("sm_90a")
    for late in (None, 2):
        plain, native = (s.run(s.ptx, late, backend=backend) for backend in ("plain", "native"))
        assert {f.kind for f in plain[0]} == {"global-race"}
        assert any("a tensor load after a tensor store in another CTA" in f.message for f in plain[0])
        assert native == plain


#: Edits of the mutation study that leave the kernel running, each seen by another check.
EDITS = {
    "sm_90a": [
        "mbarrier wait removed", "proxy fence removed", "wgmma.fence removed", "wgmma.wait_group removed",
        "bulk wait_group removed", "named barrier removed", "load to 1 KiB further",
    ],
    "sm_100a": [
        "mbarrier wait removed", "tcgen05.wait::ld removed", "tcgen05.wait::st removed",
        "tcgen05.fence::after removed", "tcgen05.commit removed", "accumulator a column further",
    ],
}  # fmt: skip


#: Smaller than the study's.
PROBLEMS = {
    "sm_90a": ("b1_hq1_hk1_sq256_sk384_d64_dv64_bf16_full_fwd", 1),
    "sm_100a": ("b1_hq1_hk1_sq512_sk384_d64_dv64_bf16_full_fwd", 2),
}


@pytest.mark.parametrize("arch", EDITS)
def test_forward_kernels_and_their_mutants(
    study: ModuleType, monkeypatch: pytest.MonkeyPatch, arch: str
) -> None:
    monkeypatch.setitem(study.KERNELS, arch, PROBLEMS[arch])
    s = study.subject(arch)
    for late in (None, 3):
        assert s.run(s.ptx, late, backend="native") == ([], True)
    found = {}
    mutants = study.drawn(arch, s.ptx, set(range(len(s.ptx.splitlines()))), 400, 5)
    for name in EDITS[arch]:
        mutant = next((m for m in mutants if m.edit == name), None)
        if mutant is None:
            continue
        ptx = study.applied(s.ptx, mutant)
        results = []
        for backend in ("plain", "native"):
            findings, completed = s.run(ptx, None, backend=backend)
            results.append((findings, completed, s.out.view(torch.int16).tolist()))
        assert results[1] == results[0], mutant
        found[name] = {f.kind for f in results[1][0]}
    assert len(set().union(*found.values())) >= 4, found
