"""The tables that come with the package: each entry usable, measured, and saying where it is from."""

from __future__ import annotations

from pathlib import Path

import fa4tune
from fa4tune.hardware.gpu import load_gpu
from fa4tune.kernels.program import build_plan
from fa4tune.problem import AttentionProblem
from fa4tune.table.store import Table

PACKAGED = Path(fa4tune.__file__).parent / "table" / "data"


def test_every_packaged_entry_can_be_used_and_has_its_provenance() -> None:
    table = Table(PACKAGED, fallback=())
    assert not list(table.faults())
    entries = [entry for _, entry in table.entries()]
    assert len(entries) >= 30
    for entry in entries:
        assert (entry.source, entry.kernel) == ("measured", "measured")
        assert entry.provenance.gpu
        assert entry.provenance.driver
        assert entry.median_us
        assert entry.default_us
        assert entry.ratio
        problem = AttentionProblem.parse(entry.problem)
        assert build_plan(problem, entry.kernel_config(), load_gpu("h200"))
        hit = table.lookup(problem, load_gpu("h200"))
        assert hit is not None
        assert hit.exact


def test_a_length_near_a_measured_one_is_served_by_its_bucket() -> None:
    near = AttentionProblem.parse("b4_hq32_hk32_sq4000_sk4000_d64_dv64_bf16_full_fwd")
    hit = Table(PACKAGED, fallback=()).lookup(near, load_gpu("h200"))
    assert hit is not None
    assert not hit.exact
