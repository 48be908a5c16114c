"""Does a kernel do what its plan says? Executed counts and barrier events against the plan's, by role."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from fa4tune.emulator.barriers import TraceEvent
from fa4tune.emulator.counters import Counters, WarpCounters
from fa4tune.emulator.memory import SMEM_BASE
from fa4tune.kernels.plan import KernelPlan, Operation, Work

ESTIMATES = ("fma", "alu", "issue", "fma_emulated", "alu_emulated", "issue_emulated")
"""Fields of :class:`~fa4tune.kernels.plan.Work` that a plan only estimates."""

Trips = Mapping[str, tuple[int, int]]
"""By role: K/V tiles that an output tile runs over, and how many of them are masked."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One number that differs; ``low`` and ``high`` bound what the plan allows (data may decide)."""

    role: str
    what: str
    executed: int
    low: int
    high: int

    def __str__(self) -> str:
        planned = str(self.low) if self.low == self.high else f"{self.low} to {self.high}"
        return f"{self.role}: {self.what} executed {self.executed}, planned {planned}"


def executed_work(counted: WarpCounters) -> Work:
    """Counters in a plan's words; what a plan only estimates stays zero."""
    b, e = counted.bytes, counted.exponentials
    loaded, stored = b["tma_read"], b["tma_write"] + b["tma_reduce"]
    return Work(
        mma_flops=sum(2 * m * n * k * count for (_, m, n, k), count in counted.mmas.items()),
        smem_mma_bytes=b["mma_smem"],
        smem_tma_write_bytes=loaded,
        smem_tma_read_bytes=stored,
        smem_generic_bytes=b["smem_read"] + b["smem_write"] + b["cp_async"],
        dsmem_bytes=b["dsmem_read"] + b["dsmem_write"],
        tmem_load_bytes=b["tmem_read"],
        tmem_store_bytes=b["tmem_write"],
        exp=e["mufu"] + e["mufu_other"],
        exp_emulated=e["polynomial"],
        global_read_bytes=loaded + b["global_read"],
        global_write_bytes=stored + b["global_write"] + b["atomic"],
    )


def _times(operation: Operation, in_loop: bool, trips: int, masked: int) -> tuple[int, int]:
    """How often an operation runs in one output tile, at least and at most."""
    if not in_loop:
        return 1, 1
    if operation.when == "masked":
        return masked, masked
    if operation.when == "after_first":
        return max(0, trips - 1), max(0, trips - 1)
    if operation.when == "rescaled":
        return 0, max(0, trips - 1)
    return trips, trips


def _operations(plan: KernelPlan) -> Iterable[tuple[Operation, bool]]:
    for operation in (*plan.prologue, *plan.epilogue):
        yield operation, False
    for operation in plan.loop.body:
        yield operation, True


def check_counts(
    plan: KernelPlan, counters: Counters, tiles: Iterable[Trips], *, ctas: int | None = None
) -> list[Mismatch]:
    """Compare executed work with the plan's, summed over all output tiles.

    Args:
        plan: the kernel's plan.
        counters: of a run.
        tiles: one entry an output tile: each role's trips.
        ctas: CTAs that ran, for operations that run once a CTA; default one a tile.

    Returns:
        every difference; empty where all exact kinds of work agree. Work of operations that data decide
        (``when="rescaled"``) may lie anywhere from none to all.
    """
    low: dict[str, Work] = {}
    high: dict[str, Work] = {}
    tiles = list(tiles)
    n_ctas = len(tiles) * plan.ctas_per_tile if ctas is None else ctas
    for operation, in_loop in _operations(plan):
        least = most = 0
        if operation.when == "once":
            least = most = n_ctas
        else:
            for trips in tiles:
                a, b = _times(operation, in_loop, *trips[operation.role])
                least += a * plan.ctas_per_tile
                most += b * plan.ctas_per_tile
        role = operation.role
        low[role] = low.get(role, Work()) + operation.work * least
        high[role] = high.get(role, Work()) + operation.work * most
    out = []
    for owner in plan.roles:
        role = owner.name
        warps = set(range(owner.first_warp, owner.first_warp + owner.warps))
        executed = executed_work(counters.total(warps=warps))
        for f in fields(Work):
            if f.name in ESTIMATES:
                continue
            value = getattr(executed, f.name)
            bounds = getattr(low.get(role, Work()), f.name), getattr(high.get(role, Work()), f.name)
            if not bounds[0] <= value <= bounds[1]:
                out.append(Mismatch(role, f.name, value, *bounds))
    return out


def executed_barriers(plan: KernelPlan, trace: Iterable[TraceEvent]) -> Counter[tuple[str, str, str]]:
    """(role, barrier, "waits" or "arrivals") of a trace; barriers without a name in the plan by number."""
    roles = {w: r.name for r in plan.roles for w in range(r.first_warp, r.first_warp + r.warps)}
    names: dict[tuple[str, int], str] = {}
    for barrier in plan.barriers:
        for stage in range(barrier.stages):
            if barrier.kind == "mbarrier":
                names["mbarrier", SMEM_BASE + barrier.offset + 8 * stage] = barrier.name
            else:
                names["named", barrier.offset + stage] = barrier.name
    out: Counter[tuple[str, str, str]] = Counter()
    seen: set[tuple[int, int, int, int, int]] = set()
    for event in trace:
        if event.space == "cluster" or event.warp < 0:
            continue
        name = names.get((event.space, event.barrier), f"{event.space} {event.barrier}")
        role = roles.get(event.warp, f"warp {event.warp}")
        if event.kind == "wait":
            wait = (event.cta, event.warp, event.owner, event.barrier, event.phase)
            if event.space == "named" or wait not in seen:  # one that looked first waits for the same phase
                out[role, name, "waits"] += 1
            seen.add(wait)
        elif event.kind == "commit" or (event.kind == "arrive" and event.space == "mbarrier"):
            out[role, name, "arrivals"] += event.amount
        elif event.kind == "arrive":
            out[role, name, "arrivals"] += 1
    return out


def check_barriers(
    plan: KernelPlan, trace: Iterable[TraceEvent], tiles: Iterable[Trips], *, ctas: int | None = None
) -> list[Mismatch]:
    """Compare waits and arrivals at every barrier with the plan's, role by role, summed over output tiles.

    A wait counts once a warp and phase (a look at the barrier that finds it complete, and the wait that then
    returns at once, are one), an arrival at an mbarrier once a thread or asynchronous unit, an arrival
    without wait at a named barrier once a warp. Barrier 0, the whole CTA's, belongs to no plan; a barrier
    that only keeps an order (it is named as an :class:`~fa4tune.kernels.plan.Order`) is no operation's.
    """
    executed = executed_barriers(plan, trace)
    planned: Counter[tuple[str, str, str]] = Counter()
    tiles = list(tiles)
    n_ctas = len(tiles) * plan.ctas_per_tile if ctas is None else ctas
    for operation, in_loop in _operations(plan):
        if operation.when == "once":
            times = n_ctas
        else:
            times = plan.ctas_per_tile * sum(
                _times(operation, in_loop, *trips[operation.role])[1] for trips in tiles
            )
        for name in operation.waits:
            planned[operation.role, name, "waits"] += times
        for name in operation.signals:
            planned[operation.role, name, "arrivals"] += times
    left_out = {"named 0", *(order.owner for order in plan.loop.orders)}
    out = []
    for key in sorted({*executed, *planned}):
        role, name, what = key
        if name in left_out or executed[key] == planned[key]:
            continue
        out.append(Mismatch(role, f"{what} at {name}", executed[key], planned[key], planned[key]))
    return out
