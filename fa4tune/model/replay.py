"""Replay a kernel event by event: when each operation of one CTA starts and ends, tile after tile.

The same durations, orders, dependencies and sharing rule as :func:`fa4tune.model.predict.predict`, played out
instead of solved. In the steady state the two agree, which is tested.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fa4tune.errors import ConfigError
from fa4tune.hardware.gpu import Gpu
from fa4tune.kernels.plan import KernelPlan, Unit
from fa4tune.model.predict import Prediction, load_of, predict, state_of
from fa4tune.model.run import Run, phases_of
from fa4tune.model.timing import UNITS, rates_of

SHOWN_TRIPS = 12
"""Iterations of a tile where the caller does not say; enough to see the steady state."""


@dataclass(frozen=True, slots=True)
class Event:
    """One execution of an operation, in cycles; ``iteration`` is -1 in prologue and epilogue.

    ``end`` is when its reader may go on, ``released`` when its unit or role is free again.
    """

    operation: str
    role: str
    unit: Unit
    asynchronous: bool
    tile: int
    iteration: int
    start: float
    released: float
    end: float


@dataclass(frozen=True, slots=True)
class Replay:
    """A played run of one CTA.

    Attributes:
        plan, gpu, prediction: what was played, and what ``predict`` says of it.
        events: in order of their start.
        tile_ends: cycle at which each tile is complete.
        period: cycles of an iteration, measured in the first tile; 0 below 6 iterations.
        window: (start, end) of one steady-state iteration, to be marked in a picture, or ``None``.
    """

    plan: KernelPlan
    gpu: Gpu
    prediction: Prediction
    events: tuple[Event, ...]
    tile_ends: tuple[float, ...]
    period: float
    window: tuple[float, float] | None

    def utilisation(self) -> Mapping[Unit, float]:
        """Busy share of each unit over the events, from work; comparable with the prediction's."""
        rates = rates_of(self.gpu)
        warps = {role.name: role.warps for role in self.plan.roles}
        operations = {o.name: o for o in (*self.plan.prologue, *self.plan.loop.body, *self.plan.epilogue)}
        cycles = dict.fromkeys(UNITS, 0.0)
        for event in self.events:
            operation = operations[event.operation]
            for unit, busy in zip(UNITS, rates.duration(operation, warps[operation.role]).units, strict=True):
                cycles[unit] += busy
        whole = max(self.tile_ends) / self.plan.resources.ctas_per_sm
        return {unit: busy / whole for unit, busy in cycles.items()}


def replay(
    plan: KernelPlan, gpu: Gpu, *, tiles: int = 1, trips: int | None = None, masked: int = 0
) -> Replay:
    """Play ``tiles`` output tiles of one CTA.

    Args:
        plan: the kernel.
        gpu: the hardware.
        tiles: output tiles, one after the other.
        trips: iterations of each; by default those of the problem's longest tile, at most ``SHOWN_TRIPS``.
        masked: iterations, the first of each tile, that apply the mask.

    Raises:
        ConfigError: more masked iterations than a tile has.
    """
    load = load_of(plan, gpu)
    count = min(load.trips.longest, SHOWN_TRIPS) if trips is None else trips
    if masked > count:
        raise ConfigError(f"{masked} masked iterations exceed a tile's {count}; mask at most all of them")
    state = state_of(plan, gpu, load)
    timed = state.plain
    rates = rates_of(gpu)
    units = {o.name: o for o in (*plan.prologue, *plan.loop.body, *plan.epilogue)}
    place = {o.name: index for index, o in enumerate(plan.loop.body)}
    barrier_free = 2 * len(plan.loop.body)
    events: list[Event] = []
    values = timed.played()
    mask_values = state.masked.played() if state.masked else values

    def record(name: str, role: str, tile: int, iteration: int, start: float, end: float) -> None:
        if end <= start:
            return
        operation = units[name]
        released = end
        if iteration >= 0 and operation.asynchronous:
            cycles = mask_values if iteration < masked else values
            released = start + max(cycles[barrier_free + place[name]], 0.0)
        events.append(
            Event(name, role, operation.unit, operation.asynchronous, tile, iteration, start, released, end)
        )

    run = Run(plan, timed, gpu, phases_of(plan, rates, state.hbm_busy), record)
    ends = tuple([run.tile(count, values, masked, mask_values) for _ in range(tiles)])
    events.sort(key=lambda e: (e.start, e.end))
    anchor = plan.loop.body[timed.skeleton.owners[timed.skeleton.arcs.sources[timed.cycle[0]]]].name
    starts = sorted(
        e.start for e in events if e.operation == anchor and e.tile == 0 and e.iteration >= masked
    )
    period, window = 0.0, None
    if len(starts) >= 6:
        # The last two iterations drain. Rings make the run repeat after several iterations; 12 is a
        # multiple of all that are common.
        last = len(starts) - 3
        turns = min(12, last // 2)
        period = (starts[last] - starts[last - turns]) / turns
        middle = last // 2
        window = (starts[middle], starts[middle] + period)
    return Replay(plan, gpu, predict(plan, gpu), tuple(events), ends, period, window)
