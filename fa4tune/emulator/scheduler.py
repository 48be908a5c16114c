"""Which warp runs next, when asynchronous work is forced, and when a cluster is stuck."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from fa4tune.emulator.asynchronous import perform
from fa4tune.emulator.barriers import MBarrier
from fa4tune.emulator.findings import FaultError, Finding
from fa4tune.emulator.ptx import Instruction
from fa4tune.emulator.warp import BLOCKED, DONE, READY, Warp

if TYPE_CHECKING:
    from fa4tune.emulator.machine import Cluster

EAGER_FUEL = 512  #: blocks a warp may run before the next one gets its turn
LATE_FUEL = 48
STALL_SLICES = 4000  #: turns without any effect on memory or barriers before a cluster counts as livelocked


def run_cluster(cluster: Cluster) -> bool:
    """Run one cluster to its end. False if a finding of severity ``error`` stopped it."""
    machine = cluster.machine
    warp: Warp | None = None
    late = machine.late is not None
    rng = cluster.random
    priorities = {id(w): rng.random() for w in cluster.warps}
    stalled = 0
    timeouts = 0
    try:
        while True:
            if cluster.ready:
                stuck = None if late else cluster.run_ready(EAGER_FUEL, STALL_SLICES)
                if stuck is not None:
                    if stuck and not cluster.units.force(rng):
                        raise FaultError("livelock", "warps run without any effect", tuple(_report(cluster)))
                    continue
                warp = _pick(cluster, rng, priorities) if late else cluster.ready.popleft()
                before = machine.progress
                warp.run(rng.randint(1, LATE_FUEL) if late else EAGER_FUEL)
                if warp.state == READY:
                    cluster.ready.append(warp)
                if machine.progress != before:
                    stalled = 0
                else:
                    stalled += 1
                    if stalled > STALL_SLICES and not cluster.units.force(rng):
                        raise FaultError("livelock", "warps run without any effect", tuple(_report(cluster)))
                continue
            warp = None
            if all(w.state == DONE for w in cluster.warps):
                break
            if cluster.units.force(rng):
                timeouts = 0
                continue
            # A try_wait may return false at any time: a consumer that only peeks must go on to its other
            # work.
            peekers = [w for w in cluster.warps if w.state == BLOCKED and isinstance(w.waiting, MBarrier)]
            if not peekers or timeouts > 1:
                machine.current = _first_blocked(cluster)
                raise FaultError("deadlock", _summary(cluster), tuple(_report(cluster)))
            mark = machine.progress
            for w in peekers:
                if w.state == BLOCKED:
                    _time_out(w)
            _drain(cluster)
            timeouts = 0 if machine.progress != mark else timeouts + 1
        _finish(cluster)
    except FaultError as error:
        machine.findings.append(machine.finding(error, warp))
        machine.current = (None, None)
        return False
    return True


def _pick(cluster: Cluster, rng: random.Random, priorities: dict[int, float]) -> Warp:
    """The ready warp of the highest priority; priorities change now and then."""
    if rng.random() < 0.05:
        chosen = rng.choice(cluster.warps)
        priorities[id(chosen)] = rng.random()
    best = max(cluster.ready, key=lambda w: priorities[id(w)])
    if rng.random() < 0.2:
        best = rng.choice(cluster.ready)
    cluster.ready.remove(best)
    return best


def _time_out(warp: Warp) -> None:
    barrier = warp.waiting
    if warp in barrier.waiters:
        barrier.waiters.remove(warp)
    warp.timed_out = True
    warp.wake()


def _drain(cluster: Cluster) -> None:
    """Run what is ready until nothing is, without forcing anything."""
    machine = cluster.machine
    slices = 0
    while cluster.ready and slices < STALL_SLICES:
        warp = cluster.ready.popleft()
        try:
            warp.run(EAGER_FUEL)
        except FaultError as error:
            machine.locate(error)
            raise
        if warp.state == READY:
            cluster.ready.append(warp)
        slices += 1


def _first_blocked(cluster: Cluster) -> tuple[Instruction | None, Warp]:
    """Where the first blocked warp stands: a deadlock belongs to all of them, a report wants one line."""
    blocked = next(w for w in cluster.warps if w.state == BLOCKED)
    operations = cluster.machine.program.blocks[blocked.pc].operations
    return (operations[0].instruction if operations else None), blocked


def _summary(cluster: Cluster) -> str:
    blocked = [w for w in cluster.warps if w.state == BLOCKED]
    done = sum(w.state == DONE for w in cluster.warps)
    return f"{len(blocked)} of {len(cluster.warps)} warps wait for ever ({done} have exited)"


def _report(cluster: Cluster) -> list[str]:
    """Every warp that has not exited, then every barrier somebody waits for, then pending work."""
    lines: list[str] = []
    program = cluster.machine.program
    barriers: dict[int, str] = {}
    for w in cluster.warps:
        if w.state == DONE:
            continue
        operations = program.blocks[w.pc].operations
        at = operations[0].instruction if operations else None
        place = f"PTX line {at.line} `{at.text}`" if at is not None else f"block {w.pc}"
        source = cluster.machine.source(at)
        place += f" ({source})" if source else ""
        state = "blocked" if w.state == BLOCKED else "running"
        why = ""
        if w.state == BLOCKED and w.waiting is not None:
            description = w.waiting.describe()
            barriers[id(w.waiting)] = description
            why = f", waiting for {description}"
        lines.append(f"{w.label} {state} at {place}{why}")
    lines.extend(f"pending: {p.describe()}" for p in cluster.units.pending())
    for cta in cluster.ctas:
        for bar in cta.mbarriers.values():
            if id(bar) not in barriers and (bar.pending != bar.count or bar.tx):
                lines.append(f"open: {bar.describe()}")
        for named in cta.named.values():
            if id(named) not in barriers and named.arrived:
                lines.append(f"open: {named.describe()}")
    return lines


def _finish(cluster: Cluster) -> None:
    """A cluster's warps have all exited: complete what is still pending and check what must be released."""
    machine = cluster.machine
    if cluster.checks is not None:
        cluster.checks.finish()
    unawaited = cluster.units.pending()
    while cluster.units.force(random.Random(0)):
        pass
    for operation in unawaited:
        machine.findings.append(
            Finding(
                "unawaited",
                f"nothing orders {operation.what} before its CTA's exit",
                severity="warning",
                line=operation.instruction.line,
                text=operation.instruction.text,
                where=operation.warp.label,
                source=machine.source(operation.instruction),
            )
        )
    for warp in cluster.warps:
        for groups in warp.bulk.values():
            for group in (*groups.closed, groups.open):
                for operation in group:
                    perform(operation)
                    machine.findings.append(
                        Finding(
                            "unawaited",
                            f"its CTA exits without waiting for {operation.what}",
                            severity="warning",
                            line=operation.instruction.line,
                            text=operation.instruction.text,
                            where=warp.label,
                            source=machine.source(operation.instruction),
                        )
                    )
    for cta in cluster.ctas:
        left = cta.tmem.allocated()
        if left:
            raise FaultError("tmem-leak", f"CTA {cta.label} exits with TMEM columns {left} allocated")
