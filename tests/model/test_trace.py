"""The trace follows the event format and loses nothing."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from fa4tune.hardware.gpu import load_gpu
from fa4tune.kernels.config import default_config
from fa4tune.kernels.program import build_plan
from fa4tune.model.replay import Replay, replay
from fa4tune.model.trace import chrome_trace, write_trace
from fa4tune.problem import AttentionProblem


@pytest.fixture(scope="module", params=["h200", "b200"])
def played(request: pytest.FixtureRequest) -> Replay:
    gpu = load_gpu(request.param)
    problem = AttentionProblem.parse("b4_hq16_hk16_sq4096_sk4096_d128_dv128_bf16_full_fwd")
    return replay(build_plan(problem, default_config(problem, gpu.arch), gpu), gpu, tiles=2, trips=10)


def test_no_role_does_two_things_at_once(played: Replay) -> None:
    by_role: dict[str, list[tuple[float, float]]] = {}
    for event in played.events:
        if not event.asynchronous:
            by_role.setdefault(event.role, []).append((event.start, event.end))
    for spans in by_role.values():
        spans.sort()
        assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(spans))


def test_every_operation_runs_once_an_iteration(played: Replay) -> None:
    for operation in played.plan.loop.body:
        if operation.when != "always":
            continue
        seen = [(e.tile, e.iteration) for e in played.events if e.operation == operation.name]
        assert sorted(seen) == [(tile, i) for tile in range(2) for i in range(10)]


def test_reader_starts_after_what_it_depends_on(played: Replay) -> None:
    ends = {(e.operation, e.tile, e.iteration): e.end for e in played.events}
    starts = {(e.operation, e.tile, e.iteration): e.start for e in played.events}
    checked = 0
    for dependency in played.plan.loop.dependencies:
        for iteration in range(3, 10):
            source = (dependency.source, 0, iteration - dependency.distance)
            target = (dependency.target, 0, iteration)
            if source in ends and target in starts:
                assert starts[target] >= ends[source] - 1e-6, dependency
                checked += 1
    assert checked > 50


def test_trace_is_in_the_event_format(played: Replay, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(played, path)
    trace = json.loads(path.read_text())
    assert trace == chrome_trace(played)
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M" and e["name"] == "thread_name"}
    assert {"tensor cores", "steady state"} <= names
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert all(e["dur"] > 0 and e["ts"] >= 0 for e in spans)
    assert {e["name"] for e in spans} >= {o.name for o in played.plan.loop.body if o.mma}
    period = next(e for e in spans if e["name"].startswith("one period"))
    assert period["dur"] * played.prediction.clock_mhz == pytest.approx(played.period)
