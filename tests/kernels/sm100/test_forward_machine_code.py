"""What the compiler made of the Blackwell forward: spills, knobs that change code, estimated instructions."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from fa4tune.errors import InfeasibleError
from fa4tune.hardware.gpu import load_gpu
from fa4tune.kernels.compile import CompiledKernel, compile_kernel, compile_many
from fa4tune.kernels.config import SM100ForwardConfig, default_config
from fa4tune.kernels.kernel_class import KernelClass
from fa4tune.kernels.machine_code import disassemble
from fa4tune.kernels.plan import KernelPlan, total_work
from fa4tune.kernels.sm100.forward_plan import EARLY_COLUMNS, HEAD_DIMS, build_plan, fragments
from fa4tune.problem import AttentionProblem

B200 = load_gpu("b200")


def problem(d: int, dv: int, mask: str = "full", seqlen_q: int = 8192, group: int = 1) -> AttentionProblem:
    return AttentionProblem(4, 16, 16 // group, seqlen_q, 8192, d, dv, "bf16", mask)


def compiled(classes: list[KernelClass]) -> dict[KernelClass, CompiledKernel]:
    found = dict(compile_many(classes))
    errors = [str(kernel) for kernel in found.values() if isinstance(kernel, Exception)]
    assert not errors, "\n".join(errors)
    return {key: kernel for key, kernel in found.items() if isinstance(kernel, CompiledKernel)}


def test_defaults_do_not_spill() -> None:
    """Every head dim, dense and causal, long and short queries, and a doubled exponential unit."""
    cases = [(problem(*dims, mask), "sm_100a") for dims in HEAD_DIMS for mask in ("full", "causal")]
    cases += [(problem(128, 128, "causal", seqlen_q=8, group=4), "sm_100a")]
    cases += [(problem(*dims), "sm_103a") for dims in ((64, 64), (128, 128), (192, 128))]
    kernels = compiled([KernelClass.from_problem(p, default_config(p, arch), arch) for p, arch in cases])
    assert len(kernels) == len(cases)
    assert {str(c): k.spill_bytes for c, k in kernels.items() if k.spill_bytes} == {}
    for kernel_class, kernel in kernels.items():
        config = kernel_class.config
        assert isinstance(config, SM100ForwardConfig)
        assert kernel.registers == config.launch_registers


@cache
def base() -> tuple[AttentionProblem, SM100ForwardConfig]:
    case = problem(64, 64, "causal")
    config = default_config(case, "sm_100a")
    assert isinstance(config, SM100ForwardConfig)
    return case, config.replace(kv_stages=4, exp2_share=0.25)


def variants(values: int | None) -> dict[str, dict[object, KernelClass | str]]:
    """By knob, each of its (first ``values``) choices: the class to compile, or why the plan refuses it."""
    case, config = base()
    found: dict[str, dict[object, KernelClass | str]] = {}
    for knob in config.knobs():
        choices = [v for v in config.choices(knob) if v not in (getattr(config, knob), ())]
        for value in choices[:values]:
            changed = config.replace(**{knob: value})
            try:
                build_plan(case, changed, B200)
            except InfeasibleError as error:
                found.setdefault(knob, {})[value] = str(error)
            else:
                kernel_class = KernelClass.from_problem(case, changed, "sm_100a")
                found.setdefault(knob, {})[value] = kernel_class
    return found


def check_variants(found: dict[str, dict[object, KernelClass | str]]) -> None:
    case, config = base()
    unchanged = KernelClass.from_problem(case, config, "sm_100a")
    classes = [c for values in found.values() for c in values.values() if isinstance(c, KernelClass)]
    kernels = compiled([unchanged, *classes])
    for knob, values in found.items():
        codes = {kernels[unchanged].cubin}
        for value, result in values.items():
            if isinstance(result, str):
                assert "cannot run" in result
                continue
            assert kernels[result].cubin not in codes, f"{knob}={value} changes nothing"
            codes.add(kernels[result].cubin)


def test_a_value_of_each_knob_changes_the_machine_code() -> None:
    found = variants(1)
    assert set(found) == set(base()[1].knobs())
    check_variants(found)


@pytest.mark.slow
def test_every_value_of_each_knob_changes_the_machine_code_or_is_refused() -> None:
    check_variants(variants(None))


_PAIRS = {"FFMA2", "FADD2", "FMUL2"}
_SINGLES = {"FFMA", "FADD", "FMUL"}
_ALU = {"FMNMX", "FMNMX3", "F2FP", "SEL", "FSEL", "LOP3", "LEA", "ISETP", "FSETP", "SHF", "IADD3", "PRMT"}


def unmasked_iteration(knobs: str) -> tuple[KernelPlan, list[str], list[int]]:
    """Plan, opcodes of the softmax of an unmasked K/V tile, and where in these P is stored."""
    case = problem(128, 128)
    config = default_config(case, "sm_100a")
    config = config.with_text("cta_group=1,kv_stages=3").with_text(knobs)
    assert isinstance(config, SM100ForwardConfig)
    plan = build_plan(case, config, B200)
    kernel = compile_kernel(KernelClass.from_problem(case, config, "sm_100a"))
    (code,) = disassemble(kernel.cubin).values()

    # The second group of TMEM loads begins the unmasked iteration, a branch after its last TMEM store ends it
    parts = len(fragments(config.tile_n, int(plan.constants["split"])))
    start = [i for i, op in enumerate(code) if op.startswith("LDTM")][parts]
    stores = [i for i, op in enumerate(code) if op.startswith("STTM") and i > start][:parts]
    end = next(i for i, op in enumerate(code) if op.startswith("BRA") and i > stores[-1])
    return plan, [op.split(".")[0] for op in code[start:end]], [i - start for i in stores]


@pytest.mark.parametrize(("row_sum", "late"), [("after_p", 64), ("with_exponentials", 0)])
def test_rows_are_added_up_where_the_knob_says(row_sum: str, late: int) -> None:
    """The assembler moves arithmetic: 64 packed additions must stay behind the arrival for the last of P."""
    _, code, _ = unmasked_iteration(f"row_sum={row_sum}")
    arrival = max(i for i, op in enumerate(code) if op == "SYNCS")
    additions = Counter(code[arrival:])["FADD2"]
    assert late <= additions <= late + 4


@pytest.mark.parametrize("row_sum", ["after_p", "with_exponentials"])
@pytest.mark.parametrize("knobs", ["p_split=0.75", "p_split=0.5", "exp2_share=0.375", "exp2_share=0"])
def test_first_part_of_p_does_not_wait_for_the_rest(row_sum: str, knobs: str) -> None:
    plan, code, stores = unmasked_iteration(f"{knobs},row_sum={row_sum}")
    first = sum(start < plan.constants["split"] for start, _ in fragments(128, int(plan.constants["split"])))
    exponentials = Counter(code[: stores[first - 1]])["MUFU"] - 1  # one is the factor's
    needed = plan.loop.operation("exp0_first").work.exp // 128
    assert needed <= exponentials <= needed + EARLY_COLUMNS


@pytest.mark.parametrize(
    "knobs", ["exp2_share=0.1875", "exp2_share=0", "exp2_degree=4,tile_n=96", "row_sum=with_exponentials"]
)
def test_estimated_instructions_are_those_of_the_softmax_loop(knobs: str) -> None:
    """FMA and ALU elements and issued instructions of one unmasked iteration, within a tenth."""
    plan, code, _ = unmasked_iteration(knobs)
    executed = Counter(code)
    fma = sum(2 * executed[op] for op in _PAIRS) + sum(executed[op] for op in _SINGLES)
    alu = sum(executed[op] for op in _ALU)

    roles = ("always", "after_first")
    work = total_work(op for op in plan.loop.body if op.role == "softmax0" and op.when in roles)
    assert 128 * fma == pytest.approx(work.fma, rel=0.1)
    assert 128 * alu == pytest.approx(work.alu, rel=0.1)
    assert 4 * sum(executed.values()) == pytest.approx(work.issue, rel=0.1)
    assert 128 * (executed["MUFU"] - 1) == work.exp
