from __future__ import annotations

import pytest

from fa4tune.emulator.machine import load, run
from fa4tune.emulator.parser import PtxError, parse
from fa4tune.emulator.ptx import Label, Memory, Register, Vector
from tests.emulator.emulator_harness import kernel, launch_of, line_of


def test_parse_entry_with_parameters_directives_and_registers() -> None:
    module = parse(
        """
//
.version 9.4
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 dyn[];
.visible .entry k(
	.param .align 4 .b8 k_param_0[12],
	.param .align 64 .b8 k_param_1[128],
	.param .u32 k_param_2
)
.reqntid 384, 1, 1
.minnctapersm 2
{
	.reg .b32 	%r<3>;
	ld.param.b32 	%r1, [k_param_0+4];
	mov.b32 	%r2, dyn;
	ret;
}
"""
    )
    entry = module.entries["k"]
    assert [(p.offset, p.nbytes) for p in entry.parameters] == [(0, 12), (64, 128), (192, 4)]
    assert entry.required_threads == (384, 1, 1)
    assert entry.min_ctas == 2
    assert module.version == (9, 4)
    assert module.target == "sm_90a"
    assert [i.opcode for i in entry.body] == ["ld", "mov", "ret"]


def test_scopes_repeat_labels_and_declare_register_families() -> None:
    body = """
    mov.b32 %r0, 0;
    {
    .reg .pred P1;
    LAB_WAIT:
    setp.eq.b32 P1, %r0, 0;
    @P1 bra.uni DONE;
    bra.uni LAB_WAIT;
    DONE:
    }
    {
    .reg .pred P1; .reg .b64 e<4>;
    LAB_WAIT:
    mov.b64 e3, 7;
    setp.eq.b32 P1, %r0, 0;
    @P1 bra.uni DONE;
    bra.uni LAB_WAIT;
    DONE:
    }
    """
    entry = parse(kernel(body, 0)).entries["k"]
    targets = [
        i.operands[0].name for i in entry.body if isinstance(i.operands[0] if i.operands else None, Label)
    ]
    assert len(set(targets)) == 4
    assert all(t in entry.labels for t in targets)
    guards = {i.predicate.index for i in entry.body if i.predicate is not None}
    assert len(guards) == 2


def test_operands_of_tensor_copies_and_vectors() -> None:
    body = "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%d0, {%r1, %r2}], [%r3+16];\nmov.b64 {%r1, %r2}, %d1;"
    entry = parse(kernel(body, 0)).entries["k"]
    store, unpack = entry.body[1], entry.body[2]
    assert isinstance(store.operands[0], Memory)
    assert store.operands[0].coordinates is not None
    assert len(store.operands[0].coordinates) == 2
    assert isinstance(store.operands[1], Memory)
    assert store.operands[1].offset == 16
    assert isinstance(unpack.operands[0], Vector)
    assert isinstance(unpack.operands[1], Register)


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("frobnicate.b32 %r1, %r2;", "unknown instruction"),
        ("add.rn.banana.f32 %f1, %f2, %f3;", "banana"),
        ("ex2.approx.ftz.f64 %d1, %d2;", "f64"),
        ("mov.b32 %r1, %unknown;", "neither a declared name"),
        ("bra.uni NOWHERE;", "NOWHERE is not defined"),
        ("tcgen05.mma.cta_group::1.kind::mxf4 [%r1], %d1, %d2, %r2, %p1;", "mxf4"),
        (
            "wgmma.mma_async.sync.aligned.m64n12k16.f32.bf16.bf16 {%f1}, %d1, %d2, %p1, 1, 1, 0, 0;",
            "m64nNk16",
        ),
        (".banana 12;", "unknown directive"),
        ("setmaxnreg.inc.sync.aligned.u32 23;", "multiple of 8"),
    ],
)
def test_what_is_not_modelled_is_an_error_with_line_and_text(statement: str, message: str) -> None:
    ptx = kernel(f"mov.b32 %r1, 1;\n{statement}", 0)
    with pytest.raises(PtxError) as error:
        load(ptx, "k")
    line = ptx.split("\n").index(statement) + 1
    assert error.value.line == line
    assert f"line {line}" in str(error.value)
    assert statement.rstrip(";") in str(error.value)
    assert message in str(error.value)


def test_back_end_gap_is_an_error_with_line_and_text() -> None:
    ptx = kernel("fma.rn.f64 %d1, %d1, %d1, %d1;", 0)
    with pytest.raises(PtxError, match=f"line {line_of(ptx, 'fma.rn.f64')}"):
        run(ptx, launch_of([]))


def test_version_7_is_refused() -> None:
    with pytest.raises(PtxError, match=r"7\.8"):
        parse(".version 7.8\n.target sm_90a\n.address_size 64\n")


def test_line_information_reaches_instructions_and_findings() -> None:
    ptx = kernel(
        ".loc 1 23 4\nmov.b64 %d0, 64;\n.loc\t1 24 9, function_name $L__info, inlined_at 1 7 3\nld.global.b32 %r1, [%d0];",
        0,
    )
    ptx = ptx.replace(".address_size 64\n", '.address_size 64\n.file\t1 "/src/kernel.py"\n', 1)
    ptx += ".section .debug_str\n{\n$L__info:\n.b8 95, 90, 0\n}\n"
    module = parse(ptx)
    assert module.files == {1: "/src/kernel.py"}
    finding = run(ptx, launch_of([])).errors[0]
    assert finding.kind == "out-of-bounds"
    assert finding.source == "/src/kernel.py:24"
    assert finding.line == line_of(ptx, "ld.global")
