"""The mutation study: its edits apply, its draw repeats, its verdicts come from the records."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.study import load_study

pytest.importorskip("cutlass")


@pytest.fixture(scope="module")
def study() -> ModuleType:
    return load_study("emulator_mutants")


@pytest.fixture(scope="module")
def hopper(study: ModuleType) -> Any:
    return study.subject("sm_90a")


@pytest.fixture(scope="module")
def subjects(study: ModuleType, hopper: Any) -> dict[str, Any]:
    return {"sm_90a": hopper, "sm_100a": study.subject("sm_100a")}


def test_every_edit_changes_one_line_to_ptx_that_is_read(study: ModuleType, hopper: Any) -> None:
    from fa4tune.emulator.machine import load

    one_each = {m.edit: m for m in study.mutants("sm_90a", hopper.ptx)}
    assert len(one_each) > 25
    for mutant in one_each.values():
        changed = study.applied(hopper.ptx, mutant)
        pairs = zip(hopper.ptx.splitlines(), changed.splitlines(), strict=True)
        assert [n for n, (a, b) in enumerate(pairs, 1) if a != b] == [mutant.line]
        load(changed, hopper.launches[0].entry)


def test_draw_repeats_and_covers_every_edit_first(study: ModuleType, hopper: Any) -> None:
    lines = set(range(1, hopper.ptx.count("\n") + 2))
    first = study.drawn("sm_90a", hopper.ptx, lines, 70, 0)
    assert first == study.drawn("sm_90a", hopper.ptx, lines, 70, 0)
    assert first != study.drawn("sm_90a", hopper.ptx, lines, 70, 1)
    assert len(set(first)) == 70
    edits = {m.edit for m in study.mutants("sm_90a", hopper.ptx)}
    assert {m.edit for m in first[: len(edits)]} == edits


def test_a_mutant_is_judged(study: ModuleType, hopper: Any) -> None:
    findings, completed = hopper.run(hopper.ptx, None)
    assert completed
    assert not findings
    expected = hopper.out.clone(), hopper.lse.clone()
    mutant = next(m for m in study.mutants("sm_90a", hopper.ptx) if m.edit == "proxy fence removed")
    record = study.judge(hopper, mutant, expected)
    assert (record["verdict"], record["killed_by"]) == ("killed", "missing-proxy-fence")


def test_recorded_study_misses_at_most_one_in_twenty(study: ModuleType) -> None:
    data = json.loads(study.SUMMARY.read_text())
    records = data["mutants"]
    assert len(records) >= 100
    for arch, table in data["kernels"].items():
        mine = [r for r in records if r["arch"] == arch]
        assert table["verdicts"] == Counter(r["verdict"] for r in mine)
        assert table["verdicts"].get("missed", 0) <= 0.05 * len(mine)
        assert "hung" not in table["verdicts"]
    for record in records:
        assert record["verdict"] != "equivalent" or record["argument"]
        if not record.get("completed", True):
            assert record["kinds"], record


def test_recorded_study_is_of_the_kernels_that_are_compiled_today(
    study: ModuleType, subjects: dict[str, Any]
) -> None:
    data = json.loads(study.SUMMARY.read_text())
    assert set(data["kernels"]) == set(subjects)
    for arch, s in subjects.items():
        table = data["kernels"][arch]
        assert (table["problem"], table["config"]) == (study.KERNELS[arch][0], s.config)
        assert table["kernel_version"] == s.kernel_version
        if table["compiler"] != s.compiler:
            continue  # another compiler writes other PTX for the same kernel
        assert table["ptx"] == s.digest, f"the {arch} kernel changed: run studies/emulator_mutants.py again"
        lines = s.ptx.splitlines()
        for record in data["mutants"]:
            if record["arch"] == arch:
                assert record["ptx"] == s.digest
                assert record["text"] == lines[record["line"] - 1].strip()


def test_each_argument_is_about_one_mutant(study: ModuleType, subjects: dict[str, Any]) -> None:
    recorded = json.loads(study.SUMMARY.read_text())["kernels"]
    assert {a.arch for a in study.ARGUMENTS} == set(subjects)
    for arch, s in subjects.items():
        if recorded[arch]["compiler"] != s.compiler:
            continue
        every = [asdict(m) for m in study.mutants(arch, s.ptx)]
        for argument in study.ARGUMENTS:
            if argument.arch == arch:
                assert sum(argument.holds(mutant) for mutant in every) == 1, argument
    # another wgmma.fence of the same text is not covered by the argument for one
    fences = [m for m in study.mutants("sm_90a", subjects["sm_90a"].ptx) if m.edit == "wgmma.fence removed"]
    assert len(fences) > 1
    assert sum(study.argument(asdict(m)) is not None for m in fences) <= 1


def test_records_of_another_ptx_are_dropped(
    study: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    current, stale = (
        {"arch": "sm_90a", "ptx": "now", "line": 1},
        {"arch": "sm_90a", "ptx": "before", "line": 1},
    )
    monkeypatch.setattr(study, "LINES", tmp_path / "lines.jsonl")
    study.LINES.write_text(json.dumps(stale) + "\n" + json.dumps(current) + "\n")
    study.drop_others({"sm_90a": "now"})
    assert study.read_lines() == [current]
