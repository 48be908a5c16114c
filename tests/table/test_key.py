"""Keys: complete over problem and hardware, bucketed by one rule, made of strings and integers."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa4tune.hardware.gpu import Gpu, load_gpu
from fa4tune.problem import AttentionProblem
from fa4tune.table.key import (
    HARDWARE_FIELDS,
    PROBLEM_FIELDS,
    bucket,
    distance,
    kernel_class,
    rounded,
    table_key,
    tiles_per_sm,
)

BASE = AttentionProblem(4, 16, 16, 4096, 4096, 128, 128, "bf16", "causal", "fwd")
CHANGES = {
    "batch": 16,
    "heads": 64,
    "kv_heads": 4,
    "seqlen_q": 1024,
    "seqlen_k": 1024,
    "head_dim": 64,
    "head_dim_v": 64,
    "dtype": "fp16",
    "mask": "full",
    "direction": "bwd",
}


def test_every_field_of_a_problem_is_declared_in_the_key() -> None:
    assert set(PROBLEM_FIELDS) == {f.name for f in dataclasses.fields(AttentionProblem)}
    assert set(CHANGES) == set(PROBLEM_FIELDS)


@pytest.mark.parametrize("field", sorted(PROBLEM_FIELDS))
def test_changing_a_field_changes_the_declared_part(field: str) -> None:
    gpu = load_gpu("h200")
    other = dataclasses.replace(BASE, **{field: CHANGES[field]})
    assert table_key(other, gpu) != table_key(BASE, gpu)
    same_class = kernel_class(other, gpu.arch) == kernel_class(BASE, gpu.arch)
    same_bucket = bucket(other, gpu) == bucket(BASE, gpu)
    assert (same_class, same_bucket) == ((False, True) if PROBLEM_FIELDS[field] == "class" else (True, False))


def test_window_sizes_are_bucketed_and_left_and_right_are_distinct() -> None:
    gpu = load_gpu("h200")
    windows = [dataclasses.replace(BASE, mask=f"win{w}") for w in ("512-0", "2048-0", "0-512", "500-0")]
    keys = [table_key(problem, gpu) for problem in windows]
    assert len({keys[0], keys[1], keys[2]}) == 3
    assert keys[3] == keys[0]
    assert len({key.kernel_class for key in keys}) == 1


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Gpu) if f.name != "sources"])
def test_hardware_key_holds_architecture_sm_count_and_memory_only(field: str) -> None:
    gpu = load_gpu("h200")
    value = getattr(gpu, field)
    other = dataclasses.replace(gpu, **{field: value + "x" if isinstance(value, str) else value + 1})
    assert (other.key != gpu.key) == (field in HARDWARE_FIELDS)


def test_key_parts_are_strings_and_integers_and_the_same_in_another_process() -> None:
    key = table_key(BASE, load_gpu("h200"))
    assert all(isinstance(getattr(key, f.name), str | int) for f in dataclasses.fields(key))
    code = (
        "from fa4tune.problem import AttentionProblem as P; from fa4tune.hardware.gpu import load_gpu; "
        "from fa4tune.table.key import table_key; import dataclasses, json, sys; "
        f"print(json.dumps(dataclasses.asdict(table_key(P.parse('{BASE}'), load_gpu('h200')))));"
        "assert 'torch' not in sys.modules and 'cutlass' not in sys.modules"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert json.loads(output) == dataclasses.asdict(key)


@given(st.integers(1, 1 << 40))
def test_rounding_is_to_the_nearest_power_of_two_in_ratio(number: int) -> None:
    power = rounded(number)
    assert power & (power - 1) == 0
    # nearest: within a factor of sqrt(2) either way, in integers
    assert number * number <= 2 * power * power
    assert power * power <= 2 * number * number
    assert rounded(power) == power


def test_nearby_lengths_share_a_bucket_and_distant_ones_do_not() -> None:
    gpu = load_gpu("h200")
    near = dataclasses.replace(BASE, seqlen_q=4000, seqlen_k=4000)
    assert table_key(near, gpu) == table_key(BASE, gpu)
    assert distance(near, BASE) > 0 == distance(BASE, BASE)


def test_batch_and_heads_share_a_bucket_where_the_work_per_sm_does() -> None:
    gpu = load_gpu("h200")
    other = dataclasses.replace(BASE, batch=2, heads=32, kv_heads=32)
    assert tiles_per_sm(other, gpu) == tiles_per_sm(BASE, gpu)
    assert table_key(other, gpu) == table_key(BASE, gpu)
