"""Run whole output tiles through a timed loop: prologue, iterations, epilogue, one tile after the other.

The run starts every operation as early as its role, its unit and what it waits for allow. Roles go from one
tile to the next on their own, as in a persistent kernel: loads of the next tile start while the last one is
stored. :mod:`fa4tune.model.replay` draws such a run; ``predict`` takes a tile's overhead from a short one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fa4tune.hardware.gpu import Gpu
from fa4tune.kernels.plan import KernelPlan, Operation
from fa4tune.model.pipeline import Timed
from fa4tune.model.skeleton import EXECUTES, ISSUES
from fa4tune.model.timing import Duration, Rates, from_hbm, hbm_cycles, is_load

Recorder = Callable[[str, str, int, int, float, float], None]
"""Called with (operation, role, tile, iteration or -1, start, end) for everything that runs."""


@dataclass(frozen=True, slots=True)
class Once:
    """A prologue or epilogue operation with what it waits for.

    ``after`` are indexes of operations of the same phase, ``after_loop`` of loop operations in their last
    iteration; ``waits`` of a prologue are for what the tile before signalled.
    """

    name: str
    role: str
    asynchronous: bool
    issue: float
    span: float
    after: tuple[int, ...]
    after_loop: tuple[int, ...]
    waits: tuple[str, ...]
    signals: tuple[str, ...]


Links = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
"""Of each operation of a phase ``after`` and ``after_loop``."""

Phases = tuple[tuple[Once, ...], tuple[Once, ...]]


@dataclass(frozen=True, slots=True)
class _Known:
    """Prologue and epilogue as they are while HBM is idle, and what keeps their plan's identity.

    ``loads`` are by phase (index, operation, cycles that L2 takes for it).
    """

    plan: KernelPlan
    rates: Rates
    phases: Phases
    loads: tuple[tuple[tuple[int, Operation, float], ...], ...]


_KNOWN: dict[tuple[int, int], _Known] = {}
"""By identity of the rates and the loop."""


def phases_of(plan: KernelPlan, rates: Rates, busy: float) -> Phases:
    """Prologue and epilogue of ``plan``.

    Q is read once, from HBM, which is as ``busy`` as :func:`fa4tune.model.timing.from_hbm` says.
    """
    known = _known(plan, rates)
    phases = []
    for idle, loads in zip(known.phases, known.loads, strict=True):
        late = [(index, hbm_cycles(o, rates.gpu, busy) - cycles) for index, o, cycles in loads]
        phase = list(idle)
        for index, longer in late:
            if longer > 0.0:
                phase[index] = replace(idle[index], span=idle[index].span + longer)
        phases.append(tuple(phase))
    return phases[0], phases[1]


def _known(plan: KernelPlan, rates: Rates) -> _Known:
    key = id(rates), id(plan.loop)
    found = _KNOWN.get(key)
    if found is not None and found.rates is rates and _same_operations(found.plan, plan):
        return found
    warps = {role.name: role.warps for role in plan.roles}
    phases, loads = [], []
    for operations, first in ((plan.prologue, True), (plan.epilogue, False)):
        durations = [rates.duration(operation, warps[operation.role]) for operation in operations]
        loads.append(tuple([(n, o, durations[n].other) for n, o in enumerate(operations) if is_load(o)]))
        links = _once_links(operations, plan.loop.body, first)
        phases.append(
            tuple(
                [
                    _once(o, from_hbm(duration, o, rates.gpu, 1.0, 0.0), link)
                    for o, duration, link in zip(operations, durations, links, strict=True)
                ]
            )
        )
    found = _Known(plan, rates, (phases[0], phases[1]), tuple(loads))
    if len(_KNOWN) > 10_000:
        _KNOWN.clear()
    _KNOWN[key] = found
    return found


def _same_operations(a: KernelPlan, b: KernelPlan) -> bool:
    return a.loop is b.loop and a.prologue is b.prologue and a.epilogue is b.epilogue and a.roles == b.roles


def _once_links(operations: tuple[Operation, ...], body: tuple[Operation, ...], prologue: bool) -> Links:
    """(earlier operations of the phase, loop operations) that each operation waits for through barriers.

    An operation that its role executes itself also sees the role's asynchronous loop operations completed.
    """
    signallers: dict[str, list[int]] = {}
    products: dict[str, list[int]] = {}
    if not prologue:
        for index, operation in enumerate(body):
            for name in dict.fromkeys(operation.signals):
                signallers.setdefault(name, []).append(index)
            if operation.asynchronous and operation.mma:
                products.setdefault(operation.role, []).append(index)
    links: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    before: dict[str, list[int]] = {}
    for index, operation in enumerate(operations):
        waits = dict.fromkeys(operation.waits)
        earlier = sorted({other for name in waits for other in before.get(name, ())})
        loop = set() if earlier or prologue else set(products.get(operation.role, ()))
        if not earlier:
            loop.update(other for name in waits for other in signallers.get(name, ()))
        links.append((tuple(earlier), tuple(sorted(loop))))
        for name in dict.fromkeys(operation.signals):
            before.setdefault(name, []).append(index)
    return tuple(links)


class Run:
    """The state of one CTA while tiles run through it.

    Args:
        plan: the kernel.
        timed: its loop.
        gpu: the hardware.
        phases: prologue and epilogue (:func:`phases_of`).
        recorder: is told what runs.
    """

    def __init__(
        self, plan: KernelPlan, timed: Timed, gpu: Gpu, phases: Phases, recorder: Recorder | None = None
    ) -> None:
        shape = timed.skeleton
        self._body, self._recorder, self._steps = plan.loop.body, recorder, shape.steps
        self._count = len(self._body)
        self._barrier = gpu.barrier_latency_clk
        self._ends: list[list[float]] = [[] for _ in range(self._count)]
        """End of each operation, as its reader sees it, by iteration over all tiles."""
        self._issued: list[list[float]] = [[] for _ in range(self._count)]
        self._orders = [0.0] * len(shape.order_owners)
        self._orders_of: dict[str, list[int]] = {}
        for number, owner in enumerate(shape.order_owners):
            self._orders_of.setdefault(owner, []).append(number)
        self._chains = [0.0] * shape.chains
        self._signalled: dict[str, float] = {}
        self._free: dict[str, float] = {}
        self._tile = 0
        self._deepest = max(step.lag for step in shape.steps)
        self._phases = phases

    def tile(
        self, trips: int, values: Sequence[float], masked: int = 0, masked_values: Sequence[float] = ()
    ) -> float:
        """Run one tile and return when its last operation is done.

        Args:
            trips: iterations.
            values: cycles of the operations as :class:`fa4tune.model.pipeline.Timed` has them.
            masked: iterations, the first ones, that take ``masked_values`` instead.
        """
        loaded = self._phase(0, 0)
        if trips:
            self._loop(trips, loaded, values, masked, masked_values)
        done = self._phase(1, trips)
        if trips:
            done = max(done, max(ends[-1] for ends in self._ends))
        self._tile += 1
        return done

    def _phase(self, which: int, trips: int) -> float:
        ends: list[float] = []
        fresh: dict[str, float] = {}
        finish = 0.0
        orders, barrier = self._orders, self._barrier
        for once in self._phases[which]:
            numbers = self._orders_of.get(once.role, ())
            at = self._free.get(once.role, 0.0)
            for number in numbers:
                at = max(at, orders[number])
            for index in once.after:
                at = max(at, ends[index] + barrier)
            if trips:
                for index in once.after_loop:
                    at = max(at, self._ends[index][-1] + barrier)
            if which == 0:
                for name in once.waits:
                    at = max(at, self._signalled.get(name, 0.0))
            end = at + once.span
            release = at + once.issue if once.asynchronous else end
            for number in numbers:
                orders[number] = release
            self._free[once.role] = release
            for name in once.signals:
                fresh[name] = end + barrier
            ends.append(end)
            finish = max(finish, end)
            if self._recorder:
                self._recorder(once.name, once.role, self._tile, -1, at, end)
        if which == 1:
            self._signalled.update(fresh)
            return finish
        return finish + barrier if ends else 0.0

    def _loop(
        self, trips: int, loaded: float, values: Sequence[float], masked: int, masked_values: Sequence[float]
    ) -> None:
        ends, issued, orders, chains = self._ends, self._issued, self._orders, self._chains
        count, barrier, recorder, body = self._count, self._barrier, self._recorder, self._body
        service_at, issue_at, turn_at = 2 * count, 3 * count, 4 * count
        base = len(ends[0])
        steps = self._steps
        for turn in range(trips + self._deepest):
            for kind, operation, lag, needs_q, waits, in_orders, in_chains in steps:
                iteration = turn - lag
                if iteration < 0 or iteration >= trips:
                    continue
                cycles = masked_values if iteration < masked else values
                at = loaded if needs_q and iteration == 0 else 0.0
                place = base + iteration
                for source, distance, remote in waits:
                    index = place - distance
                    if index >= 0:
                        begin = ends[source][index]
                        if remote:
                            begin += barrier
                        if begin > at:
                            at = begin
                for number, _ in in_orders:
                    if orders[number] > at:
                        at = orders[number]
                if kind == ISSUES:
                    release = at + cycles[issue_at + operation]
                    issued[operation].append(release)
                    for number, handed in in_orders:
                        orders[number] = at + cycles[turn_at + operation] if handed else release
                    continue
                if kind == EXECUTES:
                    begin = issued[operation][place]
                    if begin > at:
                        at = begin
                    for chain in in_chains:
                        if chains[chain] > at:
                            at = chains[chain]
                    hold = at + cycles[service_at + operation]
                    for chain in in_chains:
                        chains[chain] = hold
                    end = at + cycles[operation]
                else:
                    end = at + cycles[operation]
                    for number, _ in in_orders:
                        orders[number] = end
                ends[operation].append(end)
                if recorder:
                    recorder(body[operation].name, body[operation].role, self._tile, iteration, at, end)


def _once(operation: Operation, duration: Duration, links: tuple[tuple[int, ...], tuple[int, ...]]) -> Once:
    span = duration.tensor + duration.section + duration.tmem + duration.other + duration.latency
    return Once(
        operation.name,
        operation.role,
        duration.asynchronous,
        duration.issue,
        span,
        *links,
        operation.waits,
        operation.signals,
    )
