"""Kernel classes: what belongs to one compiled object."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from fa4tune.errors import ConfigError
from fa4tune.kernels.config import CONFIGS, KERNEL_VERSIONS, default_config
from fa4tune.kernels.kernel_class import KERNEL_MODULES, KernelClass
from fa4tune.problem import AttentionProblem

PROBLEMS = [
    "b4_hq16_hk16_sq4096_sk4096_d128_dv128_bf16_causal_fwd",
    "b1_hq8_hk2_sq77_sk300_d64_dv64_fp16_win3-5_fwd",
    "b2_hq4_hk4_sq1_sk1024_d96_dv64_bf16_full_fwd",
]


def _class(text: str, arch: str = "sm_90a") -> KernelClass:
    problem = AttentionProblem.parse(text)
    return KernelClass.from_problem(problem, default_config(problem, arch), arch)


@pytest.mark.parametrize("text", PROBLEMS)
@pytest.mark.parametrize("arch", sorted(CONFIGS))
def test_class_survives_json_and_its_representative(text: str, arch: str) -> None:
    kernel_class = _class(text, arch)
    assert KernelClass.from_dict(kernel_class.as_dict()) == kernel_class
    again = KernelClass.from_problem(kernel_class.representative(), kernel_class.config, arch)
    assert again == kernel_class


def test_lengths_and_batch_do_not_change_the_class() -> None:
    problem = AttentionProblem.parse(PROBLEMS[0])
    other = replace(problem, batch=1, heads=3, kv_heads=1, seqlen_q=5, seqlen_k=900)
    config = default_config(problem, "sm_90a")
    assert KernelClass.from_problem(problem, config, "sm_90a") == KernelClass.from_problem(
        other, config, "sm_90a"
    )


def test_packing_follows_the_familys_rule() -> None:
    grouped = replace(AttentionProblem.parse(PROBLEMS[0]), heads=24, kv_heads=2)
    assert [
        KernelClass.from_problem(grouped, default_config(grouped, arch), arch).packed_heads
        for arch in ("sm_90a", "sm_100a")
    ] == [1, 4]


def test_window_sizes_do_not_change_the_class_but_the_mask_kind_does() -> None:
    base = AttentionProblem.parse(PROBLEMS[1])
    config = default_config(base, "sm_90a")
    names = {
        mask: KernelClass.from_problem(replace(base, mask=mask), config, "sm_90a").name
        for mask in ("win3-5", "win9-9", "causal", "full")
    }
    assert names["win3-5"] == names["win9-9"]
    assert len(set(names.values())) == 3


def test_every_compiled_in_field_changes_name_or_text() -> None:
    kernel_class = _class(PROBLEMS[0])
    others = [
        replace(kernel_class, head_dim=64),
        replace(kernel_class, head_dim_v=64),
        replace(kernel_class, dtype="fp16"),
        replace(kernel_class, mask_kind="full"),
        replace(kernel_class, packed_heads=4),
        replace(kernel_class, direction="bwd"),
    ]
    assert len({c.name for c in [kernel_class, *others]}) == len(others) + 1
    tiled = kernel_class.with_config(kernel_class.config.replace(tile_n=64))
    assert (tiled.name, str(tiled)) != (kernel_class.name, str(kernel_class))
    assert tiled.name == kernel_class.name


def test_config_of_another_architecture_is_refused() -> None:
    problem = AttentionProblem.parse(PROBLEMS[0])
    with pytest.raises(ConfigError, match="sm90_fwd config does not compile for sm_100a; it takes sm100_fwd"):
        KernelClass.from_problem(problem, default_config(problem, "sm_90a"), "sm_100a")


def test_every_family_has_a_version_and_a_module() -> None:
    families = {config.family for config in CONFIGS.values()}
    assert families <= set(KERNEL_VERSIONS)
    assert set(KERNEL_VERSIONS) == set(KERNEL_MODULES)


@pytest.mark.parametrize("module", ["fa4tune.kernels.kernel_class", "fa4tune.kernels.compile"])
def test_importing_needs_neither_torch_nor_the_compiler(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'cutlass', 'tvm_ffi'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
