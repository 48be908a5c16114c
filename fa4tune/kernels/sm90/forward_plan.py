"""The plan of the Hopper forward kernel: memory, barriers, roles and the operations of one output tile.

A CTA holds ``tile_m`` query rows, 64 for each MMA warpgroup, and a producer warpgroup of which one warp
issues TMA loads. K and V have a ring each. A warpgroup computes S = Q K^T into registers, exponentiates it
there and feeds P to O += P V from registers (or through SMEM).

With ``overlap`` a warpgroup issues QK of a tile together with PV of the tile before and runs the softmax
under that PV: it waits for it only after the first part of the exponentials, because P's registers and O are
busy until then. With ``ping_pong`` the warpgroups take turns to issue.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from fa4tune.errors import ConfigError, InfeasibleError
from fa4tune.hardware.gpu import Gpu
from fa4tune.kernels.config import KERNEL_VERSIONS, MAX_CTA_REGISTERS, SM90ForwardConfig
from fa4tune.kernels.exp2 import SHARE_DENOMINATOR, emulated_columns
from fa4tune.kernels.plan import (
    Barrier,
    Buffer,
    Dependency,
    KernelPlan,
    Loop,
    Mma,
    Operation,
    Order,
    Resources,
    Role,
    Unit,
    Work,
)
from fa4tune.kernels.tiles import Trips, ceil_div
from fa4tune.problem import AttentionProblem

ROWS = 64
"""Query rows of a warpgroup: the M of wgmma."""

MMA_K = 16
WARPS = 4
"""Warps of a warpgroup."""

WARPGROUP = 32 * WARPS
ALIGNMENT = 1024
"""Buffers start at multiples of this, the period of the 128-byte swizzle."""

RESERVED_SMEM = 1024
"""Bytes of SMEM that the system takes for each CTA."""

WORKING_REGISTERS = 28
"""Registers an MMA thread needs beside its fragments, for addresses, row state and exponentials in flight."""

HELD_P = 8
"""Registers of P on its way to SMEM."""

MAX_EXPONENT = {"fp16": 15, "bf16": 127}
"""Largest power of two that P's type holds."""

_DEFAULT = SM90ForwardConfig()


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Where a tile's softmax stands in machine code; as the assembler leaves it in this kernel.

    Of another kernel with the same operations its machine code says where they stand.

    Args:
        wait_eighths: eighths of a tile's exponentials, 0 to 7, that run before the wait for the PV in flight;
            down to whole K steps.
        together: emulated exponentials stand together, ahead of the others.

    Raises:
        ConfigError: no such wait.
    """

    wait_eighths: int = 4
    together: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.wait_eighths <= 7:
            raise ConfigError(f"wait_eighths must be 0 to 7, not {self.wait_eighths}")


OWN = Arrangement()


class Shape(NamedTuple):
    """What fixes a plan's operations."""

    head_dim: int
    head_dim_v: int
    tile_n: int
    warpgroups: int
    kv_stages: int
    overlap: bool
    ping_pong: bool
    p_in_registers: bool
    persistent: bool
    o_overlays_q: bool
    emulated: tuple[bool, ...]
    degree: int
    threshold: float
    arrangement: Arrangement = OWN
    lacking: bool = False
    """Whether a thread's fragments need more registers than it has at launch, which the assembler goes by."""


def emulated_registers(tile_n: int, share: float) -> tuple[bool, ...]:
    """Which score registers of a thread (``tile_n / 2``, of two rows) take the polynomial.

    All lanes of a warp execute the same instruction, so the choice is made over the ``tile_n / 4`` columns of
    a row that one thread holds (pairs of them in adjacent registers), by the rule of
    :func:`fa4tune.kernels.exp2.emulated_columns` with fragments of 8, one K step of PV in two rows.

    Raises:
        ConfigError: the share does not fit.
    """
    if share == 0:
        return (False,) * (tile_n // 2)
    columns = emulated_columns(tile_n // 4, round(share * SHARE_DENOMINATOR), 0, 8)
    return tuple(columns[2 * (i // 4) + i % 2] for i in range(tile_n // 2))


def wait_register(tile_n: int, overlap: bool, eighths: int = OWN.wait_eighths) -> int:
    """Score register whose exponential is the first after the wait for the PV in flight; whole K steps."""
    return tile_n // 2 * eighths // 8 // 8 * 8 if overlap else 0


def warpgroup_trips(problem: AttentionProblem, config: SM90ForwardConfig, m_block: int, w: int) -> Trips:
    """K/V tiles that warpgroup ``w`` of tile ``m_block`` computes; it passes over the CTA's other tiles.

    The first tile it computes always runs the masked code, and there always is one.
    """
    first = m_block * config.tile_m + ROWS * w
    if first >= problem.seqlen_q:
        return Trips(1, 1)
    total = _key_tiles(problem, config.tile_n, first + ROWS)
    keys = problem.seqlen_k
    if problem.mask_kind == "causal":
        keys = max(0, min(keys, first + 1 + problem.seqlen_k - problem.seqlen_q))
    return Trips(total, total - min(keys // config.tile_n, total - 1))


def cta_trips(problem: AttentionProblem, config: SM90ForwardConfig, m_block: int) -> int:
    """K/V tiles that the CTA loads for tile ``m_block``."""
    return _key_tiles(problem, config.tile_n, (m_block + 1) * config.tile_m)


def _key_tiles(problem: AttentionProblem, tile_n: int, end_row: int) -> int:
    keys = problem.seqlen_k
    if problem.mask_kind == "causal":
        keys = min(keys, min(end_row, problem.seqlen_q) + problem.seqlen_k - problem.seqlen_q)
    return max(1, ceil_div(keys, tile_n))


def build_plan(
    problem: AttentionProblem, config: SM90ForwardConfig, gpu: Gpu, arrangement: Arrangement = OWN
) -> KernelPlan:
    """The plan for ``problem`` with ``config`` on ``gpu``, of this kernel or of one arranged otherwise.

    Raises:
        InfeasibleError: the kernel cannot run so; every reason is listed with its numbers.
    """
    persistent = config.scheduler == "persistent"
    overlay = not persistent and problem.head_dim_v <= problem.head_dim
    buffers, barriers, smem_bytes = _memory(
        problem.head_dim,
        problem.head_dim_v,
        problem.element_bytes,
        config.tile_n,
        config.warpgroups,
        config.kv_stages,
        persistent,
        overlay,
        config.p_in_registers,
        config.ping_pong,
    )
    reasons = _knob_reasons(problem, config)
    limit = min(gpu.smem_per_cta, gpu.smem_per_sm // config.ctas_per_sm - RESERVED_SMEM)
    if smem_bytes > limit:
        parts = ", ".join(f"{b.name} {b.total}" for b in buffers if b.overlays is None)
        reasons.append(
            f"{smem_bytes} bytes of SMEM ({parts}) exceed the {limit} of a CTA with ctas_per_sm="
            f"{config.ctas_per_sm}; lower kv_stages or tile_n"
        )
    used = WARPGROUP * (config.warpgroups * config.registers[0] + config.registers[1])
    pool = config.launch_registers * config.threads
    if used > pool:
        reasons.append(
            f"{config.warpgroups} MMA warpgroups and the producer take {used} registers with "
            f"{'/'.join(map(str, config.registers))} a thread, the launch allocates {pool}"
        )
    needed = _mma_registers(problem, config)
    if needed > config.registers[0]:
        reasons.append(
            f"S, O and P of tile_n={config.tile_n} need about {needed} registers, an MMA thread has "
            f"{config.registers[0]}; lower tile_n or tile_m"
        )
    if reasons:
        raise InfeasibleError(f"{config.family} [{config}] for {problem}", tuple(reasons))

    shape = Shape(
        problem.head_dim,
        problem.head_dim_v,
        config.tile_n,
        config.warpgroups,
        config.kv_stages,
        config.overlap,
        config.ping_pong,
        config.p_in_registers,
        persistent,
        overlay,
        emulated_registers(config.tile_n, config.exp2_share),
        config.exp2_degree if config.exp2_share else 0,
        config.rescale_threshold,
        arrangement,
        needed > config.launch_registers,
    )
    prologue, loop, epilogue = _operations(shape)
    mma, producer = config.registers
    return KernelPlan(
        name=config.family,
        version=KERNEL_VERSIONS["sm90_fwd"],
        problem=problem,
        config=config,
        buffers=buffers,
        barriers=barriers,
        roles=(
            *(Role(f"mma{w}", WARPS * w, WARPS, mma) for w in range(config.warpgroups)),
            Role("load", WARPS * config.warpgroups, WARPS, producer),
        ),
        prologue=prologue,
        loop=loop,
        epilogue=epilogue,
        resources=Resources(
            smem_bytes=smem_bytes,
            smem_limit=limit,
            threads=config.threads,
            registers=used,
            registers_limit=min(MAX_CTA_REGISTERS, gpu.registers_per_sm) // config.ctas_per_sm,
            ctas_per_sm=config.ctas_per_sm,
        ),
        tile_rows=config.tile_m,
        tile_n=config.tile_n,
        scheduler=config.scheduler,
        constants={
            "rows": ROWS,
            "always_masked": 1,
            "o_overlays_q": int(overlay),
            "longest_first": int(config.scheduler == "lpt" or (persistent and problem.mask_kind == "causal")),
            "wait_register": wait_register(config.tile_n, config.overlap, arrangement.wait_eighths),
            "emulated_registers": sum(shape.emulated),
            "launch_registers": config.launch_registers,
        },
    )


# -- feasibility ---------------------------------------------------------------------------------------------


def _knob_reasons(problem: AttentionProblem, config: SM90ForwardConfig) -> list[str]:
    reasons: list[str] = []
    for name in ("head_dim", "head_dim_v"):
        value = getattr(problem, name)
        if value % MMA_K or not MMA_K <= value <= 256:
            reasons.append(f"{name}={value} has no kernel; multiples of {MMA_K} up to 256 do")
    if problem.mask_kind == "window":
        reasons.append(f"mask {problem.mask} has no Hopper kernel; full and causal do")
    if config.ping_pong and config.warpgroups == 1:
        reasons.append("ping_pong=true needs two warpgroups to take turns, tile_m=64 has one")
    threshold, largest = config.rescale_threshold, MAX_EXPONENT[problem.dtype]
    if threshold > largest:
        reasons.append(
            f"rescale_threshold={threshold:g} lets P grow to 2^{threshold:g}, {problem.dtype} holds up to "
            f"2^{largest}"
        )
    elif 2.0**threshold * problem.seqlen_k > 2.0**127:
        reasons.append(
            f"rescale_threshold={threshold:g} lets the row sum of {problem.seqlen_k} keys grow past float32"
        )
    if config.exp2_share == 0:
        if config.exp2_degree != _DEFAULT.exp2_degree:
            reasons.append(f"exp2_degree={config.exp2_degree} has no effect while exp2_share=0")
    else:
        pairs, sixteenths = config.tile_n // 8, round(config.exp2_share * SHARE_DENOMINATOR)
        if pairs < SHARE_DENOMINATOR and pairs * sixteenths % SHARE_DENOMINATOR:
            reasons.append(
                f"exp2_share={config.exp2_share:g} is no whole number of the {pairs} register pairs that a "
                f"thread holds of a row with tile_n={config.tile_n}"
            )
        else:
            try:
                emulated_registers(config.tile_n, config.exp2_share)
            except ConfigError as error:
                reasons.append(str(error))
    return reasons


def _mma_registers(problem: AttentionProblem, config: SM90ForwardConfig) -> int:
    """Registers an MMA thread needs. Without overlap P takes the place of the scores it was made from."""
    p = config.tile_n // 4 if config.p_in_registers and config.overlap else HELD_P
    return config.tile_n // 2 + problem.head_dim_v // 2 + p + WORKING_REGISTERS


# -- memory and barriers -------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _memory(
    d: int,
    dv: int,
    size: int,
    tile_n: int,
    warpgroups: int,
    kv_stages: int,
    persistent: bool,
    overlay: bool,
    p_in_registers: bool,
    ping_pong: bool,
) -> tuple[tuple[Buffer, ...], tuple[Barrier, ...], int]:
    """Buffers, barriers and total bytes, in the order the kernel allocates: mbarriers, Q, K, V, O, P."""
    barriers: list[Barrier] = []
    offset = 0
    rows = [
        ("q_full", warpgroups, 1, ROWS * d * size),
        *([("q_empty", warpgroups, WARPS, 0)] if persistent else []),
        ("k_full", kv_stages, 1, tile_n * d * size),
        ("k_empty", kv_stages, WARPS * warpgroups, 0),
        ("v_full", kv_stages, 1, tile_n * dv * size),
        ("v_empty", kv_stages, WARPS * warpgroups, 0),
    ]
    for name, stages, arrivals, tx_bytes in rows:
        barriers.append(Barrier(name, "mbarrier", stages, arrivals, tx_bytes, offset=offset))
        offset += 8 * stages
    # hardware barrier 0 is the whole CTA's
    barriers.append(Barrier("store", "named", warpgroups, WARPGROUP, offset=1))
    if ping_pong:
        barriers.append(Barrier("turn", "named", warpgroups, 2 * WARPGROUP, offset=1 + warpgroups))
    buffers: list[Buffer] = []
    parts = [("q", ROWS * d, warpgroups), ("k", tile_n * d, kv_stages), ("v", tile_n * dv, kv_stages)]
    parts.append(("o", ROWS * dv, warpgroups))
    if not p_in_registers:
        parts.append(("p", ROWS * tile_n, warpgroups))
    for name, elements, stages in parts:
        if name == "o" and overlay:
            buffers.append(Buffer("o", "smem", elements * size, stages, buffers[0].offset, "q"))
            continue
        offset = ceil_div(offset, ALIGNMENT) * ALIGNMENT
        buffers.append(Buffer(name, "smem", elements * size, stages, offset))
        offset += elements * size * stages
    return tuple(buffers), tuple(barriers), offset


# -- operations ----------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _operations(shape: Shape) -> tuple[tuple[Operation, ...], Loop, tuple[Operation, ...]]:
    groups = range(shape.warpgroups)
    body = [*_load_operations(shape)]
    for w in groups:
        body += _mma_operations(shape, w)
        body += _softmax_operations(shape, w)
    prologue = tuple(_load_q(shape, w) for w in groups)
    epilogue = tuple(op for w in groups for op in _finish_operations(shape, w))
    return prologue, Loop(tuple(body), _dependencies(shape), _orders(shape)), epilogue


def _load_operations(shape: Shape) -> list[Operation]:
    loads = []
    for name, dim in (("k", shape.head_dim), ("v", shape.head_dim_v)):
        size = shape.tile_n * dim * 2
        loads.append(
            Operation(
                f"load_{name}", "load", Unit.L2,
                Work(smem_tma_write_bytes=size, global_read_bytes=size, issue=12),
                waits=(f"{name}_empty",), signals=(f"{name}_full",), asynchronous=True,
            )
        )  # fmt: skip
    return loads


def _load_q(shape: Shape, w: int) -> Operation:
    size = ROWS * shape.head_dim * 2
    return Operation(
        f"load_q{w}", "load", Unit.L2, Work(smem_tma_write_bytes=size, global_read_bytes=size, issue=12),
        waits=("q_empty",) if shape.persistent else (), signals=("q_full",), asynchronous=True,
    )  # fmt: skip


def _mma_operations(shape: Shape, w: int) -> list[Operation]:
    """QK and PV. A slot of the ring is released by one lane of each warp once its MMA has completed.

    Beside each instruction a warp moves a descriptor; once a product, it polls the ring's barrier, fences,
    and computes the slot's addresses (as a profiler counts them).
    """
    qk = Mma(ROWS, shape.tile_n, MMA_K, shape.head_dim // MMA_K)
    source = "registers" if shape.p_in_registers else "smem"
    pv = Mma(ROWS, shape.head_dim_v, MMA_K, shape.tile_n // MMA_K, source)
    return [
        Operation(
            f"{name}{w}", f"mma{w}", Unit.TENSOR,
            mma.work() + Work(issue=WARPS * (2 * mma.count + (24 if shape.overlap else 18))), (mma,),
            (f"{operand}_full",) * WARPS, (f"{operand}_empty",) * WARPS, asynchronous=True,
        )
        for name, mma, operand in (("qk", qk, "k"), ("pv", pv, "v"))
    ]  # fmt: skip


def _softmax_operations(shape: Shape, w: int) -> list[Operation]:
    """One tile's softmax in a warpgroup; a thread holds ``tile_n / 4`` columns of each of two rows."""
    n, dv, role, threads = shape.tile_n, shape.head_dim_v, f"mma{w}", WARPGROUP
    wait = wait_register(n, shape.overlap, shape.arrangement.wait_eighths)
    together = shape.arrangement.together
    operations = [
        Operation(
            f"mask{w}", role, Unit.ALU, Work(alu=2 * ROWS * n, issue=WARPS * (n + 8)), when="masked",
        ),
        # three-input maximum over the thread's columns, maximum over four lanes, factor of the old one
        Operation(
            f"row_max{w}", role, Unit.ALU,
            Work(
                alu=ROWS * n // 2 + 8 * threads, fma=8 * threads, exp=2 * threads,
                issue=WARPS * (n // 4 + 24),
            ),
        ),
    ]  # fmt: skip
    if wait:
        operations.append(
            Operation(
                f"exp{w}_first", role, Unit.EXP, _exponential_work(shape, 0, wait, convert=False),
                together=together,
            )
        )  # fmt: skip
    operations.append(
        Operation(
            f"rescale{w}", role, Unit.FMA, Work(fma=ROWS * dv, issue=WARPS * dv // 2),
            when="rescaled" if shape.threshold else "always",
        )
    )  # fmt: skip
    last = _exponential_work(shape, wait, n // 2, convert=True)
    if wait:
        last = last + Work(alu=threads * wait // 2, issue=WARPS * wait // 2)
    if not shape.p_in_registers:
        # a 16-byte row of an 8 x 8 block for each lane of stmatrix; where registers lack, their addresses are
        # computed again in every iteration (as a profiler counts them)
        addresses = 70 if shape.lacking else 11
        last = last + Work(smem_generic_bytes=ROWS * n * 2, issue=WARPS * (n // 16 + addresses))
    operations.append(
        Operation(f"exp{w}_last" if wait else f"exp{w}", role, Unit.EXP, last, together=together)
    )
    return operations


def _exponential_work(shape: Shape, start: int, end: int, *, convert: bool) -> Work:
    """Scale, exponentiate and sum score registers ``start`` to ``end`` of 128 threads; convert pairs of them.

    An emulated element takes a clamp, three additions, ``degree`` multiply-adds and a shift with addition in
    place of one instruction of the exponential unit.
    """
    count, emulated = end - start, sum(shape.emulated[start:end])
    pairs = count // 2 if convert else 0
    return Work(
        exp=WARPGROUP * (count - emulated),
        exp_emulated=WARPGROUP * emulated,
        fma=WARPGROUP * (2 * count + emulated * (3 + shape.degree)),
        alu=WARPGROUP * (pairs + 2 * emulated),
        issue=WARPS * (2 * count + (count - emulated) + pairs + emulated * (5 + shape.degree)),
        fma_emulated=WARPGROUP * emulated * (3 + shape.degree),
        alu_emulated=WARPGROUP * 2 * emulated,
        issue_emulated=WARPS * emulated * (5 + shape.degree),
    )


def _finish_operations(shape: Shape, w: int) -> list[Operation]:
    dv, role = shape.head_dim_v, f"mma{w}"
    o_bytes = ROWS * dv * 2
    barriers = ("store",) * WARPS * (2 if shape.persistent else 1)
    return [
        Operation(
            f"normalise{w}", role, Unit.ISSUE,
            Work(
                fma=ROWS * dv + 8 * WARPGROUP, alu=ROWS * dv // 2, exp=4 * WARPGROUP,
                smem_generic_bytes=o_bytes, global_write_bytes=4 * ROWS, issue=WARPS * (dv + 60),
            ),
            waits=(*("q_full",) * WARPS, *barriers),
            signals=("q_empty",) * WARPS if shape.persistent else (),
        ),
        Operation(
            f"store_o{w}", role, Unit.L2,
            Work(smem_tma_read_bytes=o_bytes, global_write_bytes=o_bytes, issue=8), asynchronous=True,
        ),
    ]  # fmt: skip


# -- order and dependencies ----------------------------------------------------------------------------------


def _orders(shape: Shape) -> tuple[Order, ...]:
    """Issue order of each role, and of all warpgroups' matrix work where they take turns."""
    late = 1 if shape.overlap else 0
    orders = [Order("load", ("load_k", "load_v"), (0, late))]
    for w in range(shape.warpgroups):
        softmax = [op.name for op in _softmax_operations(shape, w)]
        if shape.overlap:
            names = (f"qk{w}", f"pv{w}", *softmax)
            orders.append(Order(f"mma{w}", names, (0, 1, *(0,) * len(softmax))))
        else:
            orders.append(Order(f"mma{w}", (f"qk{w}", *softmax, f"pv{w}")))
    if shape.ping_pong:
        groups = range(shape.warpgroups)
        if shape.overlap:
            names = tuple(f"{kind}{w}" for w in groups for kind in ("qk", "pv"))
            orders.append(Order("turn", names, (0, 1) * shape.warpgroups))
        else:
            orders.append(Order("turn", tuple(f"qk{w}" for w in groups)))
    return tuple(orders)


def _dependencies(shape: Shape) -> tuple[Dependency, ...]:
    dependencies = []
    for w in range(shape.warpgroups):
        names = [op.name for op in _softmax_operations(shape, w)]
        last = names[-1]
        dependencies += [
            Dependency("load_k", f"qk{w}", 0, "k_full"),
            Dependency("load_v", f"pv{w}", 0, "v_full"),
            Dependency(f"qk{w}", f"mask{w}", 0, "scores complete"),
            Dependency(last, f"pv{w}", 0, "P complete"),
            Dependency(f"qk{w}", "load_k", shape.kv_stages, "k_empty"),
        ]
        if shape.overlap:
            dependencies.append(Dependency(f"pv{w}", f"rescale{w}", 1, "P and O free"))
            # the slot is released where the wait for PV stands, in the next tile's softmax
            before = names[names.index(f"rescale{w}") - 1]
            dependencies.append(Dependency(before, "load_v", shape.kv_stages - 1, "v_empty"))
        else:
            dependencies.append(Dependency(f"pv{w}", f"qk{w}", 1, "warpgroup waits for PV"))
        dependencies.append(Dependency(f"pv{w}", "load_v", shape.kv_stages, "v_empty"))
    return tuple(dependencies)
