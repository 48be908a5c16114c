"""The vocabulary of a kernel plan: one frozen object that kernel, feasibility, model and checks all read.

A plan is pure arithmetic over (problem, config, hardware). It names the memory a kernel owns, the barriers it
signals, the roles its warps play, and the operations of one output tile with their exact integer work. The
kernel takes buffers, barrier counts, register counts and issue order from it; feasibility is whether it can
be built; the model sums and orders its operations; the checks compare its counts with executed ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from itertools import pairwise

from fa4tune.problem import AttentionProblem


class Unit(StrEnum):
    """A shared resource of one SM (L2 and HBM: an SM's share of the GPU's)."""

    TENSOR = "tensor"
    SMEM = "smem"
    EXP = "exp"
    FMA = "fma"
    ALU = "alu"
    ISSUE = "issue"
    TMEM = "tmem"
    L2 = "l2"
    HBM = "hbm"


@dataclass(frozen=True, slots=True)
class Work:
    """Integer work of an operation, by path. All zero by default; adds and scales.

    ``exp_emulated`` counts elements whose power of two is a polynomial; their instructions are also in
    ``fma``, ``alu`` and ``issue``, and are all that ``fma_emulated``, ``alu_emulated`` and
    ``issue_emulated`` count. ``fma`` and ``alu`` count elements (lanes), ``issue`` warp instructions: all of
    these are estimates, checked against machine code within a tolerance; the others are exact.
    """

    mma_flops: int = 0
    smem_mma_bytes: int = 0
    smem_tma_write_bytes: int = 0
    smem_tma_read_bytes: int = 0
    smem_generic_bytes: int = 0
    dsmem_bytes: int = 0
    tmem_load_bytes: int = 0
    tmem_store_bytes: int = 0
    exp: int = 0
    exp_emulated: int = 0
    fma: int = 0
    alu: int = 0
    issue: int = 0
    fma_emulated: int = 0
    alu_emulated: int = 0
    issue_emulated: int = 0
    global_read_bytes: int = 0
    global_write_bytes: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __mul__(self, times: int) -> Work:
        return Work(*(getattr(self, f.name) * times for f in fields(self)))

    def nonzero(self) -> dict[str, int]:
        """The kinds that are not zero."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name)}


def total_work(operations: Iterable[Operation]) -> Work:
    """Sum of the operations' work."""
    total = Work()
    for operation in operations:
        total = total + operation.work
    return total


@dataclass(frozen=True, slots=True)
class Mma:
    """``count`` matrix instructions of one shape.

    Args:
        m, n, k: instruction shape; with ``cta_group`` 2, ``m`` and ``n`` are the pair's.
        count: instructions issued.
        a_source: ``smem``, ``registers`` (wgmma RS) or ``tmem`` (tcgen05 TS). B always comes from SMEM.
        cta_group: CTAs that execute one instruction together.
        element_bytes: bytes of one operand element.
    """

    m: int
    n: int
    k: int
    count: int
    a_source: str = "smem"
    cta_group: int = 1
    element_bytes: int = 2

    @property
    def flops(self) -> int:
        """FLOPs that one CTA's tensor core executes."""
        return 2 * self.m * self.n * self.k * self.count // self.cta_group

    @property
    def smem_bytes(self) -> int:
        """Operand bytes that one CTA reads from its SMEM, each instruction anew.

        A is split by rows and B by columns over a CTA pair (FlashAttention-4, arXiv 2603.05451, sections 2.2
        and 3.1.1).
        """
        a = self.m * self.k if self.a_source == "smem" else 0
        return (a + self.n * self.k) * self.element_bytes * self.count // self.cta_group

    def work(self) -> Work:
        """FLOPs and SMEM reads as :class:`Work`."""
        return Work(mma_flops=self.flops, smem_mma_bytes=self.smem_bytes)


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory a CTA owns: ``stages`` slots of ``size`` bytes (SMEM) or columns (TMEM) at ``offset``.

    ``overlays`` names the buffer whose memory this one reuses; it then takes no space of its own.
    """

    name: str
    space: str
    size: int
    stages: int = 1
    offset: int = 0
    overlays: str | None = None

    @property
    def total(self) -> int:
        """Bytes or columns of all stages."""
        return self.size * self.stages


@dataclass(frozen=True, slots=True)
class Barrier:
    """A physical barrier: an mbarrier array (``kind="mbarrier"``) or a hardware one (``kind="named"``).

    ``arrivals`` is the count an mbarrier is initialised with (threads of a named barrier); ``tx_bytes`` what
    one phase expects from asynchronous copies; ``scope`` is ``cta`` or ``cluster``.
    """

    name: str
    kind: str
    stages: int
    arrivals: int
    tx_bytes: int = 0
    scope: str = "cta"
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Role:
    """Warps ``first_warp .. first_warp + warps - 1`` that run one program with ``registers`` a thread."""

    name: str
    first_warp: int
    warps: int
    registers: int
    cta_rank: int | None = None


@dataclass(frozen=True, slots=True)
class Operation:
    """A step of one role.

    Args:
        name: unique in the plan (``qk0``, ``softmax1``, ``load_k``).
        role: who issues it.
        unit: the unit that executes it in order, or ``ISSUE`` where the role's own instructions are the work.
        work: exact integer work.
        mma: matrix instructions, already contained in ``work``.
        waits: barriers waited for before it, one entry a wait.
        signals: barriers arrived at after it, one entry an arrival as the trace counts them (a thread's or an
            asynchronous engine's).
        when: ``always``, ``masked`` (tiles that cross the mask or the end of the keys), ``after_first`` (all
            but an output tile's first iteration) or ``rescaled`` (data decide; never the first iteration); in
            prologue and epilogue ``once`` is once a CTA, not once an output tile.
        asynchronous: the role goes on at once; completion is seen through a barrier or a group wait.
        together: its emulated exponentials stand together in the machine code, ahead of the others.
    """

    name: str
    role: str
    unit: Unit
    work: Work = Work()
    mma: tuple[Mma, ...] = ()
    waits: tuple[str, ...] = ()
    signals: tuple[str, ...] = ()
    when: str = "always"
    asynchronous: bool = False
    together: bool = False


@dataclass(frozen=True, slots=True)
class Dependency:
    """``target`` of iteration *i* starts after ``source`` of iteration ``i - distance`` completed.

    Iterations are K/V tiles: ``pv0`` of iteration *i* multiplies with V tile *i*, whenever it is issued. A
    distance below zero occurs in orders only: an issuer that runs ahead puts ``qk0`` of tile *i + 1* before
    ``pv1`` of tile *i*.
    """

    source: str
    target: str
    distance: int = 0
    why: str = ""


@dataclass(frozen=True, slots=True)
class Order:
    """Operations that one issuing warp or in-order unit executes in this sequence, each turn anew.

    ``lags`` says how many K/V tiles each operation trails the turn: in turn *j* an operation of lag *l* works
    on tile ``j - l``, and is left out where that tile does not exist. (pv0, qk0, pv1, qk1) with lags
    (1, 0, 1, 0) is thus prologue, steady state and tail of a pipeline in one line. Empty means all zero.
    """

    owner: str
    operations: tuple[str, ...]
    lags: tuple[int, ...] = ()

    def dependencies(self) -> tuple[Dependency, ...]:
        """The sequence as edges between neighbours, the last operation to the next turn's first included."""
        lags = self.lags or (0,) * len(self.operations)
        steps = list(zip(self.operations, lags, strict=True))
        edges = [Dependency(a, b, la - lb, self.owner) for (a, la), (b, lb) in pairwise(steps)]
        (first, first_lag), (last, last_lag) = steps[0], steps[-1]
        return (*edges, Dependency(last, first, last_lag - first_lag + 1, self.owner))


@dataclass(frozen=True, slots=True)
class Loop:
    """One iteration over a K/V tile: the steady state whose period the model computes."""

    body: tuple[Operation, ...]
    dependencies: tuple[Dependency, ...] = ()
    orders: tuple[Order, ...] = ()

    def operation(self, name: str) -> Operation:
        """The operation of that name."""
        for operation in self.body:
            if operation.name == name:
                return operation
        raise KeyError(name)


@dataclass(frozen=True, slots=True)
class Resources:
    """What a CTA asks of an SM, beside what the SM has; ``limits`` of the same keys."""

    smem_bytes: int
    smem_limit: int
    threads: int
    registers: int
    registers_limit: int
    tmem_columns: int = 0
    tmem_limit: int = 0
    ctas_per_sm: int = 1


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """The plan of one kernel.

    ``prologue`` and ``epilogue`` run once an output tile, ``loop.body`` once a K/V tile. ``tile_rows`` counts
    query rows of one CTA's output tile (of the pair's, with 2-CTA MMA), ``tile_n`` keys of an iteration.
    ``ctas_per_tile`` is 2 for a CTA pair. ``constants`` are numbers the kernel compiles in.
    """

    name: str
    version: int
    problem: AttentionProblem
    config: object
    buffers: tuple[Buffer, ...]
    barriers: tuple[Barrier, ...]
    roles: tuple[Role, ...]
    prologue: tuple[Operation, ...]
    loop: Loop
    epilogue: tuple[Operation, ...]
    resources: Resources
    tile_rows: int
    tile_n: int
    scheduler: str
    ctas_per_tile: int = 1
    packed_heads: int = 1
    constants: Mapping[str, int | float] = field(default_factory=dict)

    def buffer(self, name: str) -> Buffer:
        """The buffer of that name."""
        return next(b for b in self.buffers if b.name == name)

    def barrier(self, name: str) -> Barrier:
        """The barrier of that name."""
        return next(b for b in self.barriers if b.name == name)

    def role(self, name: str) -> Role:
        """The role of that name."""
        return next(r for r in self.roles if r.name == name)

    def operations(self, trips: int, masked: int = 0) -> Iterable[tuple[Operation, int]]:
        """Each operation with how often one tile of ``trips`` iterations, ``masked`` of them masked, runs it.

        Operations with ``when="rescaled"`` are given at their maximum, once an iteration.
        """
        times = {"masked": masked, "after_first": max(0, trips - 1)}
        for operation in (*self.prologue, *self.epilogue):
            yield operation, 1
        for operation in self.loop.body:
            yield operation, times.get(operation.when, trips)

    def counts(self, trips: int, masked: int = 0) -> dict[str, Work]:
        """Work of one output tile by role."""
        totals: dict[str, Work] = {}
        for operation, times in self.operations(trips, masked):
            totals[operation.role] = totals.get(operation.role, Work()) + operation.work * times
        return totals

    def barrier_counts(self, trips: int, masked: int = 0) -> dict[tuple[str, str], tuple[int, int]]:
        """(waits, arrivals) of one output tile by (role, barrier)."""
        totals: dict[tuple[str, str], tuple[int, int]] = {}
        for operation, times in self.operations(trips, masked):
            for name, wait, signal in [(w, times, 0) for w in operation.waits] + [
                (s, 0, times) for s in operation.signals
            ]:
                waits, arrivals = totals.get((operation.role, name), (0, 0))
                totals[operation.role, name] = waits + wait, arrivals + signal
        return totals


@dataclass(frozen=True, slots=True)
class Program:
    """The kernels that one call launches, in order, and the bytes of global workspace they share."""

    kernels: tuple[KernelPlan, ...]
    workspace_bytes: int = 0

    @property
    def main(self) -> KernelPlan:
        """The kernel that dominates the time: the largest matrix work an iteration."""
        return max(self.kernels, key=lambda plan: total_work(plan.loop.body).mma_flops)
