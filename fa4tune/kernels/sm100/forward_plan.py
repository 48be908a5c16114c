"""The plan of the Blackwell forward kernel: memory, barriers, roles and the operations of one output tile.

Structure (FlashAttention-4, arXiv 2603.05451, section 3.1): one or two 128-row query tiles a CTA, a softmax
warpgroup for each (a thread a row), a correction warpgroup that rescales O off the critical path, one warp
that issues MMAs, one that issues TMA loads and one that stores O. S = Q K^T reads both operands from SMEM;
O += P V reads P from TMEM, where it overlays S. K and V share one ring.

With two query tiles the MMA warp goes pv0(i), qk0(i+1), pv1(i), qk1(i+1). With one, two S/P slots alternate
and qk(i+1) comes before pv(i). In both, an S slot is overwritten only after the PV that read the P in it, by
issue order alone.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from fa4tune.errors import ConfigError, InfeasibleError
from fa4tune.hardware.gpu import Gpu
from fa4tune.kernels.config import KERNEL_VERSIONS, MAX_CTA_REGISTERS, SM100ForwardConfig
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
from fa4tune.problem import AttentionProblem

TILE_M = 128
"""Query rows of one MMA accumulator: the lanes of TMEM."""

FRAGMENT = 32
"""Columns of a row that one TMEM load brings and one pass of the softmax handles."""

HELD_COLUMNS = 128
"""A row up to this long stays in registers; a longer one is read from TMEM twice: maximum, exponentials."""

HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128))
"""(head_dim, head_dim_v) that the kernel serves."""

EARLY_COLUMNS = 8
"""Columns of a fragment whose exponentials may begin before the fragment before it is stored.

They keep the exponential unit busy while rounding, storing and handing over P take their latencies.
"""

SUM_CHAINS = 4
"""Independent chains of packed additions to a row's sum where they come one after the other."""

MMA_K = 16
WARPS = 4
"""Warps of a warpgroup; each reaches its own 32 lanes of TMEM."""

MAX_FLOAT = {"fp16": 65504.0, "bf16": 3.3895e38}
"""Largest finite value of P's type."""

_DEFAULT = SM100ForwardConfig()


class Shape(NamedTuple):
    """What fixes a plan's operations: the tile, the dims and the knobs that shape softmax and issue order."""

    head_dim: int
    head_dim_v: int
    tile_n: int
    q_tiles: int
    cta_group: int
    split: int
    emulated_first: int
    emulated_last: int
    degree: int
    summed_late: int
    kv_stages: int
    persistent: bool
    overlay: bool


def packed_heads(problem: AttentionProblem) -> int:
    """Query heads of a group that share a tile: the largest power of two in the group, at most 128.

    Row ``r`` of a tile is query position ``r // packed_heads`` of head ``r % packed_heads``; a power of two
    divides the 128 rows, so that TMA moves whole boxes.
    """
    group = problem.gqa_group
    return min(group & -group, TILE_M)


def split_columns(tile_n: int, p_split: float) -> int:
    """Columns of P that the first arrival covers, a multiple of 16 (the depth of one MMA)."""
    return MMA_K * int(tile_n * p_split / MMA_K + 0.5)


def fragments(tile_n: int, split: int) -> tuple[tuple[int, int], ...]:
    """(first column, columns) of the passes over a row: 32 columns each, cut at ``split`` too."""
    cuts = sorted({*range(0, tile_n, FRAGMENT), split, tile_n})
    return tuple((a, b - a) for a, b in pairwise(cuts))


def columns_summed_late(tile_n: int, split: int, row_sum: str) -> int:
    """Columns of a row whose exponentials are added up after all of P has been handed over.

    Those that registers still hold then: all of a row of up to 128 keys, the last fragment of a longer one.
    """
    if row_sum == "with_exponentials":
        return 0
    return tile_n if tile_n <= HELD_COLUMNS else fragments(tile_n, split)[-1][1]


def build_plan(problem: AttentionProblem, config: SM100ForwardConfig, gpu: Gpu) -> KernelPlan:
    """The plan for ``problem`` with ``config`` on ``gpu``.

    Raises:
        InfeasibleError: the kernel cannot run so; every reason is listed with its numbers.
    """
    reasons = _knob_reasons(problem, config)
    d, dv, size = problem.head_dim, problem.head_dim_v, problem.element_bytes
    smem = _smem(
        d, dv, size, config.tile_n, config.kv_stages, config.q_tiles, config.cta_group, gpu.smem_per_cta
    )
    if smem.total > gpu.smem_per_cta:
        reasons.append(_smem_reason(problem, config, smem, gpu))
    columns = 2 * config.tile_n + config.q_tiles * dv
    if columns > gpu.tmem_columns:
        fits = (gpu.tmem_columns - config.q_tiles * dv) // 2 // MMA_K * MMA_K
        advice = f"tile_n={fits} fits" if fits > 0 else "no tile_n fits"
        reasons.append(
            f"2 S tiles of {config.tile_n} columns and {config.q_tiles} O tiles of {dv} take {columns} TMEM "
            f"columns, the SM has {gpu.tmem_columns}; {advice}"
        )
    used = 128 * (config.registers[0] * config.q_tiles + config.registers[1] + config.registers[2])
    pool = config.launch_registers * config.threads
    if used > pool:
        reasons.append(
            f"{config.q_tiles} softmax, a correction and another warpgroup with "
            f"{'/'.join(map(str, config.registers))} registers a thread take {used}, the CTA has {pool}"
        )
    if reasons:
        raise InfeasibleError(f"{config.family} [{config}] for {problem}", tuple(reasons))

    split = split_columns(config.tile_n, config.p_split)
    emulated = _emulated(config.tile_n, round(config.exp2_share * SHARE_DENOMINATOR), config.exp2_start)
    shape = Shape(
        d, dv, config.tile_n, config.q_tiles, config.cta_group, split,
        sum(emulated[:split]), sum(emulated[split:]), config.exp2_degree if any(emulated) else 0,
        columns_summed_late(config.tile_n, split, config.row_sum), config.kv_stages,
        config.scheduler == "persistent", smem.overlay,
    )  # fmt: skip
    prologue, loop, epilogue = _operations(shape)
    return KernelPlan(
        name=config.family,
        version=KERNEL_VERSIONS["sm100_fwd"],
        problem=problem,
        config=config,
        buffers=_buffers(shape, smem),
        barriers=_barriers(shape, smem.barriers),
        roles=_roles(config.q_tiles, config.cta_group, config.registers),
        prologue=prologue,
        loop=loop,
        epilogue=epilogue,
        resources=Resources(
            smem_bytes=smem.total,
            smem_limit=gpu.smem_per_cta,
            threads=config.threads,
            registers=used,
            registers_limit=min(MAX_CTA_REGISTERS, gpu.registers_per_sm),
            tmem_columns=columns,
            tmem_limit=gpu.tmem_columns,
        ),
        tile_rows=TILE_M * config.q_tiles * config.cta_group,
        tile_n=config.tile_n,
        scheduler=config.scheduler,
        ctas_per_tile=config.cta_group,
        packed_heads=packed_heads(problem),
        constants={
            "tile_m": TILE_M,
            "split": split,
            "passes": 1 if config.tile_n <= HELD_COLUMNS else 2,
            "summed_late": shape.summed_late,
            "s_slots": 2,
            "o_overlays_q": int(smem.overlay),
            "launch_registers": config.launch_registers,
            "rescale_rate": rescale_rate(config.rescale_threshold, config.tile_n, problem.seqlen_k),
            "emulated_columns": shape.emulated_first + shape.emulated_last,
        },
    )


# -- feasibility ---------------------------------------------------------------------------------------------


def _knob_reasons(problem: AttentionProblem, config: SM100ForwardConfig) -> list[str]:
    reasons: list[str] = []
    tile_n, threshold = config.tile_n, config.rescale_threshold
    if (problem.head_dim, problem.head_dim_v) not in HEAD_DIMS:
        served = ", ".join(f"{d}" if d == dv else f"{d} with {dv}" for d, dv in HEAD_DIMS)
        reasons.append(
            f"head_dim={problem.head_dim} with head_dim_v={problem.head_dim_v} has no kernel; {served} do"
        )
    if problem.mask_kind == "window":
        reasons.append(f"mask {problem.mask} has no Blackwell kernel; full and causal do")
    if config.cta_group == 2:
        if problem.mask_kind != "full":
            reasons.append(
                f"cta_group=2 serves the full mask only, not {problem.mask}: a pair shares its K/V tiles"
            )
        if tile_n % 32:
            reasons.append(f"tile_n={tile_n} is not a multiple of 32, which the MMA of a CTA pair needs")
    if config.kv_stages < 2 and config.q_tiles == 2:
        reasons.append(
            "kv_stages=1 deadlocks: two query tiles need a K tile and a V tile at once; use 2 or more"
        )
    if 2.0**threshold > MAX_FLOAT[problem.dtype]:
        reasons.append(
            f"rescale_threshold={threshold:g} lets P grow to 2^{threshold:g}, over the largest "
            f"{problem.dtype} {MAX_FLOAT[problem.dtype]:g}"
        )
    elif 2.0**threshold * problem.seqlen_k > MAX_FLOAT["bf16"]:
        reasons.append(
            f"rescale_threshold={threshold:g} lets the row sum of {problem.seqlen_k} keys grow past float32"
        )
    if config.exp2_share == 0:
        for name in ("exp2_degree", "exp2_start"):
            if getattr(config, name) != getattr(_DEFAULT, name):
                reasons.append(f"{name}={getattr(config, name)} has no effect while exp2_share=0")
    else:
        try:
            _emulated(tile_n, round(config.exp2_share * SHARE_DENOMINATOR), config.exp2_start)
        except ConfigError as error:
            reasons.append(str(error))
    split = split_columns(tile_n, config.p_split)
    if split == 0 or (split == tile_n and config.p_split < 1):
        reasons.append(
            f"p_split={config.p_split:g} of {tile_n} keys leaves one part without a K step of {MMA_K}"
        )
    launch, (softmax, _, other) = config.launch_registers, config.registers
    if softmax < launch:
        reasons.append(f"{softmax} registers of a softmax thread are fewer than the {launch} it starts with")
    if other > launch:
        reasons.append(f"{other} registers of the MMA and TMA warps are more than the {launch} of the launch")
    held = min(tile_n, HELD_COLUMNS)
    if config.registers[0] < held:
        reasons.append(
            f"{config.registers[0]} registers of a softmax thread cannot hold {held} scores of its row"
        )
    return reasons


class _Smem(NamedTuple):
    q: int
    kv: int
    o: int
    stats: int
    barriers: int
    stage: int
    overlay: bool
    total: int


@lru_cache(maxsize=4096)
def _smem(
    d: int, dv: int, size: int, tile_n: int, kv_stages: int, q_tiles: int, cta_group: int, limit: int
) -> _Smem:
    """Offsets in order Q, ring, O, statistics, barriers. O overlays Q where it would not fit beside it."""
    q_bytes, o_bytes = q_tiles * TILE_M * d * size, q_tiles * TILE_M * dv * size
    stage = tile_n * max(d, dv) * size // cta_group
    stats = 2 * 2 * TILE_M * 4
    # q_full, q_empty, p_full, p_last, s_full, o_full, o_ready, o_empty in pairs; statistics by tile and warp
    barriers = 8 * (2 * 8 + 2 * 2 * WARPS + 2 * kv_stages) + 16
    tail = stats + barriers
    kv_bytes = kv_stages * stage
    overlay = q_bytes + kv_bytes + o_bytes + tail > limit
    o = 0 if overlay else q_bytes + kv_bytes
    end = q_bytes + kv_bytes + (0 if overlay else o_bytes)
    return _Smem(0, q_bytes, o, end, end + stats, stage, overlay, end + tail)


def _smem_reason(problem: AttentionProblem, config: SM100ForwardConfig, smem: _Smem, gpu: Gpu) -> str:
    fixed = smem.total - config.kv_stages * (smem.stage + 16)
    stages = max(0, (gpu.smem_per_cta - fixed) // (smem.stage + 16))
    advice = f"kv_stages={stages} fits" if stages >= 2 else "a smaller tile_n or q_tiles=1 is needed"
    return (
        f"{config.kv_stages} stages of {smem.stage} bytes and {fixed} for Q (O in its place), statistics and "
        f"barriers take {smem.total} bytes of SMEM, a CTA has {gpu.smem_per_cta}; {advice}"
    )


@lru_cache(maxsize=4096)
def rescale_rate(threshold: float, tile_n: int, seqlen_k: int) -> float:
    """Expected share of iterations after the first in which a warp (32 rows) rescales; scores independent,
    Gaussian, of unit variance in natural-log units.

    Without a threshold a row has a new maximum in its *i*-th tile with probability ``1 / i``. With one, a row
    rescales at most once for each ``threshold`` that its maximum grows, from ``tile_n`` keys to all
    (``sqrt(2 ln n)`` each); below one step it never does. Data decide, this is what a prediction assumes.
    """
    trips = -(-seqlen_k // tile_n)
    if trips < 2:
        return 0.0
    always = sum(1 - (1 - 1 / i) ** 32 for i in range(2, trips + 1)) / (trips - 1)
    if threshold == 0:
        return always
    growth = (math.sqrt(2 * math.log(seqlen_k)) - math.sqrt(2 * math.log(tile_n))) / math.log(2)
    return min(always, 32 * int(growth / threshold) / (trips - 1))


@lru_cache(maxsize=4096)
def _emulated(tile_n: int, sixteenths: int, start: int) -> tuple[bool, ...]:
    if sixteenths == 0:
        return (False,) * tile_n
    return emulated_columns(tile_n, sixteenths, start)


# -- memory, barriers, roles ---------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _buffers(shape: Shape, smem: _Smem) -> tuple[Buffer, ...]:
    n, dv, q_tiles = shape.tile_n, shape.head_dim_v, shape.q_tiles
    return (
        Buffer("q", "smem", smem.kv // q_tiles, q_tiles, smem.q),
        Buffer("kv", "smem", smem.stage, shape.kv_stages, smem.kv),
        # in the place of Q each tile's O stays within its own Q
        Buffer("o", "smem", smem.kv // q_tiles, q_tiles, smem.o, "q")
        if smem.overlay
        else Buffer("o", "smem", TILE_M * dv * 2, q_tiles, smem.o),
        Buffer("stats", "smem", TILE_M * 4, 4, smem.stats),
        Buffer("s", "tmem", n, 2, 0),
        Buffer("p", "tmem", n, 2, 0, "s"),
        Buffer("acc", "tmem", dv, q_tiles, 2 * n),
    )


@lru_cache(maxsize=4096)
def _barriers(shape: Shape, offset: int) -> tuple[Barrier, ...]:
    cg, q_tiles = shape.cta_group, shape.q_tiles
    q_bytes = TILE_M * shape.head_dim * 2 * cg
    kv_bytes = shape.tile_n * max(shape.head_dim, shape.head_dim_v) * 2
    shared = "cluster" if cg == 2 else "cta"
    rows = [
        ("q_full", q_tiles, 1, q_bytes, shared),
        ("kv_full", shape.kv_stages, 1, kv_bytes, shared),
        ("kv_empty", shape.kv_stages, 1, 0, shared),
        ("s_full", 2, 1, 0, shared),
        ("p_full", 2, 2 * WARPS * cg, 0, shared),
        ("p_last", 2, WARPS * cg, 0, shared),
        ("scale_full", 2 * WARPS, 1, 0, "cta"),
        ("sum_full", q_tiles * WARPS, 1, 0, "cta"),
        ("o_full", q_tiles, 1, 0, shared),
        ("o_ready", q_tiles, WARPS, 0, "cta"),
    ]
    if shape.split == shape.tile_n:
        rows = [row for row in rows if row[0] != "p_last"]
    if shape.persistent:
        rows.append(("q_empty", q_tiles, 1, 0, "cta" if shape.overlay else shared))
        if not shape.overlay:
            rows.append(("o_empty", q_tiles, 1, 0, "cta"))
    barriers = []
    for name, stages, arrivals, tx_bytes, scope in rows:
        barriers.append(Barrier(name, "mbarrier", stages, arrivals, tx_bytes, scope, offset))
        offset += 8 * stages
    return tuple(barriers)


@lru_cache(maxsize=256)
def _roles(q_tiles: int, cta_group: int, registers: tuple[int, int, int]) -> tuple[Role, ...]:
    softmax, correction, other = registers
    first = WARPS * q_tiles
    last = first + WARPS
    return (
        *(Role(f"softmax{q}", WARPS * q, WARPS, softmax) for q in range(q_tiles)),
        Role("correction", first, WARPS, correction),
        Role("mma", last, 1, other, 0 if cta_group == 2 else None),
        Role("load", last + 1, 1, other),
        Role("store", last + 2, 1, other),
        Role("spare", last + 3, 1, other),
    )


# -- operations ----------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _operations(shape: Shape) -> tuple[tuple[Operation, ...], Loop, tuple[Operation, ...]]:
    tiles = range(shape.q_tiles)
    # Each group is built and cached from what it depends on: a search makes hundreds of thousands of plans.
    matrix = shape._replace(
        emulated_first=0, emulated_last=0, degree=0, summed_late=0, kv_stages=0, persistent=False,
        overlay=False,
    )  # fmt: skip
    softmax = shape._replace(
        head_dim=0, head_dim_v=0, q_tiles=0, cta_group=1, kv_stages=0, persistent=False, overlay=False
    )
    ends = shape._replace(
        tile_n=0, split=0, emulated_first=0, emulated_last=0, degree=0, summed_late=0, kv_stages=0
    )
    body = [*_load_operations(matrix)]
    for q in tiles:
        body += _mma_operations(matrix, q)
    for q in tiles:
        body += _softmax_operations(softmax, q)
    for q in tiles:
        body += _correction_operations(ends, q)
    prologue = tuple(_load_q(ends, q) for q in tiles)
    epilogue: list[Operation] = []
    for q in tiles:
        epilogue += _finish_operations(ends, q)
    # the load warp outlives the MMAs that release the last slots: their arrivals need this CTA's memory
    releases = ("kv_empty",) * shape.kv_stages + (("q_empty",) * shape.q_tiles if shape.persistent else ())
    epilogue.append(Operation("drain", "load", Unit.ISSUE, Work(issue=4), waits=releases, when="once"))
    edges = matrix._replace(
        head_dim=0,
        head_dim_v=0,
        cta_group=1,
        summed_late=min(shape.summed_late, 1),
        kv_stages=shape.kv_stages,
    )
    return prologue, Loop(tuple(body), _dependencies(edges), _orders(edges)), tuple(epilogue)


@lru_cache(maxsize=4096)
def _load_operations(shape: Shape) -> tuple[Operation, ...]:
    loads = []
    for name, dim in (("load_k", shape.head_dim), ("load_v", shape.head_dim_v)):
        size = shape.tile_n * dim * 2 // shape.cta_group
        loads.append(
            Operation(
                name,
                "load",
                Unit.L2,
                Work(smem_tma_write_bytes=size, global_read_bytes=size, issue=8),
                waits=("kv_empty",),
                signals=("kv_full",),
                asynchronous=True,
            )
        )
    return tuple(loads)


@lru_cache(maxsize=4096)
def _load_q(shape: Shape, q: int) -> Operation:
    size = TILE_M * shape.head_dim * 2
    return Operation(
        f"load_q{q}",
        "load",
        Unit.L2,
        Work(smem_tma_write_bytes=size, global_read_bytes=size, issue=8),
        waits=("q_empty",) if shape.persistent else (),
        signals=("q_full",),
        asynchronous=True,
    )


@lru_cache(maxsize=4096)
def _mma_operations(shape: Shape, q: int) -> list[Operation]:
    """QK and PV of one query tile; PV in two where it waits in its middle for the last part of P.

    The ring's barriers belong to whoever uses a tile first (wait) or last (release).
    """
    m, cg, last = TILE_M * shape.cta_group, shape.cta_group, shape.q_tiles - 1
    qk = Mma(m, shape.tile_n, MMA_K, shape.head_dim // MMA_K, "smem", cg)
    waits_k = ("kv_full",) if q == 0 else ()
    free = ("kv_empty",) if q == last else ()
    operations = [
        Operation(
            f"qk{q}", "mma", Unit.TENSOR, qk.work() + Work(issue=4 * qk.count), (qk,), waits_k,
            ("s_full", *free) * cg, asynchronous=True,
        )
    ]  # fmt: skip
    parts = ((0, shape.split, "first"), (shape.split, shape.tile_n, "last"))
    for start, end, part in parts:
        if start == end:
            continue
        pv = Mma(m, shape.head_dim_v, MMA_K, (end - start) // MMA_K, "tmem", cg)
        waits = ("p_full", *waits_k) if start == 0 else ("p_last",)
        each = ("o_full",) if shape.q_tiles == 1 else ()
        operations.append(
            Operation(
                f"pv{q}_{part}" if shape.split < shape.tile_n else f"pv{q}", "mma", Unit.TENSOR,
                pv.work() + Work(issue=4 * pv.count), (pv,), waits,
                (*each, *free) * cg if end == shape.tile_n else (), asynchronous=True,
            )
        )  # fmt: skip
    return operations


@lru_cache(maxsize=4096)
def _softmax_operations(shape: Shape, q: int) -> list[Operation]:
    """One tile's softmax. Instruction counts are of four warps, packed pairs where the hardware has them.

    ``load_s`` is the wait for the first fragment; the others arrive while maxima are taken.
    """
    n, rows, role = shape.tile_n, TILE_M, f"softmax{q}"
    passes = 1 if n <= HELD_COLUMNS else 2
    loads = -(-n // FRAGMENT)
    awaited = fragments(n, shape.split)[0][1]
    operations = [
        Operation(
            f"load_s{q}", role, Unit.TMEM,
            Work(tmem_load_bytes=rows * awaited * 4, issue=WARPS * (loads + 4)), waits=("s_full",) * WARPS,
        ),
        Operation(
            f"mask{q}", role, Unit.ALU, Work(alu=rows * n, issue=WARPS * n), when="masked",
        ),
        # a three-input maximum takes two scores an instruction
        Operation(
            f"row_max{q}", role, Unit.ALU,
            Work(
                tmem_load_bytes=rows * (n - awaited) * 4, alu=rows * n // 2, issue=WARPS * (n // 2 + 8)
            ),
        ),
        Operation(
            f"scale{q}", role, Unit.ISSUE,
            Work(fma=6 * rows, alu=6 * rows, smem_generic_bytes=4 * rows, issue=WARPS * 24),
            signals=("scale_full",) * WARPS, when="after_first",
        ),
        # a warp computes its factors only if one of its rows asks for a rescale
        Operation(f"factor{q}", role, Unit.EXP, Work(exp=rows, issue=WARPS), when="rescaled"),
    ]  # fmt: skip
    parts = (
        (0, shape.split, shape.emulated_first, "first", ("p_full",)),
        (shape.split, n, shape.emulated_last, "last", ("p_last",)),
    )
    for start, end, emulated, part, signal in parts:
        if start == end:
            continue
        columns = end - start
        late = max(0, end - max(start, n - shape.summed_late))
        work = exponential_work(rows, columns, emulated, shape.degree, late, last=end == n)
        if passes == 2:
            work = work + Work(tmem_load_bytes=rows * columns * 4, issue=WARPS * (columns // FRAGMENT))
        name = f"exp{q}_{part}" if shape.split < n else f"exp{q}"
        operations.append(Operation(name, role, Unit.EXP, work, signals=signal * WARPS))
    if shape.summed_late:
        # packed, in SUM_CHAINS chains that begin with a zero read from SMEM
        operations.append(
            Operation(
                f"row_sum{q}", role, Unit.FMA,
                Work(
                    fma=rows * (shape.summed_late + 2 * SUM_CHAINS), smem_generic_bytes=4 * rows,
                    issue=WARPS * (shape.summed_late // 2 + SUM_CHAINS + 2),
                ),
            )
        )  # fmt: skip
    return operations


def exponential_work(
    rows: int, columns: int, emulated: int, degree: int, summed_late: int, last: bool
) -> Work:
    """Scale, exponentiate, convert and store ``columns`` of each row, ``emulated`` of them by polynomial.

    An emulated pair takes ``3 + degree`` packed FMA-pipe instructions, and two clamps, shifts and adds on the
    ALU; a shift and an add fuse. A packed conversion and a TMEM store finish a pair, and an addition to the
    row sum unless it is among the ``summed_late``. Each fragment but a row's last one is chained to the next
    by a zero read from SMEM and added, of which a minimum with the row sum is taken if that grew.
    """
    warps = rows // 32
    pairs, polynomial, passes = columns // 2, emulated // 2, -(-columns // FRAGMENT)
    added, links = columns - summed_late, passes - last
    minima = links if added else 0
    return Work(
        exp=rows * (columns - emulated),
        exp_emulated=rows * emulated,
        fma=rows * (columns + added + emulated * (3 + degree) + links),
        alu=rows * (pairs + 2 * emulated + minima),
        smem_generic_bytes=4 * rows * links,
        issue=warps
        * (
            2 * pairs
            + added // 2
            + columns
            - emulated
            + polynomial * (7 + degree)
            + passes
            + 2 * links
            + minima
            + 4
        ),
        fma_emulated=rows * emulated * (3 + degree),
        alu_emulated=rows * 2 * emulated,
        issue_emulated=warps * polynomial * (7 + degree),
        tmem_store_bytes=rows * columns * 2,
    )


@lru_cache(maxsize=4096)
def _correction_operations(shape: Shape, q: int) -> list[Operation]:
    """What the correction warpgroup does for one query tile in an iteration.

    It tells the MMA warp that O may be accumulated into, in the first iteration because the previous output
    tile's O has left TMEM, later after its warps have read the scales and rescaled where a row asked for it.
    """
    rows, dv = TILE_M, shape.head_dim_v
    waits = ("scale_full",) * WARPS
    if shape.q_tiles == 1:
        waits += ("o_full",) * WARPS
    return [
        Operation(
            f"read_scale{q}", "correction", Unit.SMEM, Work(smem_generic_bytes=4 * rows, issue=WARPS * 8),
            waits=waits, when="after_first",
        ),
        Operation(
            f"rescale{q}", "correction", Unit.TMEM,
            Work(
                tmem_load_bytes=4 * rows * dv, tmem_store_bytes=4 * rows * dv, fma=rows * dv,
                issue=WARPS * (dv // 2 + 2 * dv // 16),
            ),
            when="rescaled",
        ),
        Operation(
            f"allow_pv{q}", "correction", Unit.ISSUE, Work(issue=WARPS * 4), signals=("p_full",) * WARPS,
        ),
    ]  # fmt: skip


@lru_cache(maxsize=4096)
def _finish_operations(shape: Shape, q: int) -> list[Operation]:
    """Once an output tile: LSE and row sum, O normalised and converted into SMEM, O stored by TMA."""
    rows, dv = TILE_M, shape.head_dim_v
    o_bytes = rows * dv * 2
    release: tuple[str, ...] = ()
    if shape.persistent:
        release = ("q_empty",) if shape.overlay else ("o_empty",)
    operations = [
        Operation(
            f"finish{q}", f"softmax{q}", Unit.ISSUE,
            # a reciprocal and a logarithm
            Work(
                smem_generic_bytes=4 * rows, global_write_bytes=4 * rows, fma=2 * rows, exp=2 * rows,
                issue=WARPS * 16,
            ),
            signals=("sum_full",) * WARPS,
        ),
        Operation(
            f"normalise{q}", "correction", Unit.TMEM,
            Work(
                tmem_load_bytes=4 * rows * dv, fma=rows * dv, alu=rows * dv // 2,
                smem_generic_bytes=o_bytes + 4 * rows, issue=WARPS * (dv + dv // 8 + 16),
            ),
            waits=(
                *("sum_full",) * WARPS,
                *("o_full",) * WARPS,
                *(("o_empty",) * WARPS if shape.persistent and not shape.overlay else ()),
            ),
            signals=("o_ready",) * WARPS,
        ),
        Operation(
            f"store_o{q}", "store", Unit.L2,
            Work(smem_tma_read_bytes=o_bytes, global_write_bytes=o_bytes, issue=8),
            waits=("o_ready",), signals=release, asynchronous=True,
        ),
    ]  # fmt: skip
    # q_full and o_full are the MMA warp's, once an output tile; a multicast commit arrives in both CTAs
    signals: tuple[str, ...] = () if shape.q_tiles == 1 else ("o_full",)
    if shape.persistent and not shape.overlay:
        signals += ("q_empty",)
    operations.append(
        Operation(
            f"commit_o{q}", "mma", Unit.ISSUE, Work(issue=4),
            waits=("q_full",), signals=signals * shape.cta_group,
        )
    )  # fmt: skip
    return operations


# -- order and dependencies ----------------------------------------------------------------------------------


def _pv_names(shape: Shape, q: int) -> tuple[str, ...]:
    return (f"pv{q}",) if shape.split == shape.tile_n else (f"pv{q}_first", f"pv{q}_last")


def _exp_names(shape: Shape, q: int) -> tuple[str, ...]:
    return (f"exp{q}",) if shape.split == shape.tile_n else (f"exp{q}_first", f"exp{q}_last")


@lru_cache(maxsize=4096)
def _orders(shape: Shape) -> tuple[Order, ...]:
    """Issue order of each role; the MMA warp's is the tensor pipe's too, K/V loads go in the order of use."""
    if shape.q_tiles == 2:
        steps = [*((n, 1) for n in _pv_names(shape, 0)), ("qk0", 0)]
        steps += [*((n, 1) for n in _pv_names(shape, 1)), ("qk1", 0)]
    else:
        steps = [("qk0", 0), *((n, 1) for n in _pv_names(shape, 0))]
    loads = Order("load", ("load_k", "load_v"), (0, 0) if shape.q_tiles == 2 else (0, 1))
    orders = [Order("mma", tuple(n for n, _ in steps), tuple(lag for _, lag in steps)), loads]
    for q in range(shape.q_tiles):
        softmax = (
            f"load_s{q}",
            f"mask{q}",
            f"row_max{q}",
            f"factor{q}",
            f"scale{q}",
            *_exp_names(shape, q),
            *((f"row_sum{q}",) if shape.summed_late else ()),
        )
        orders.append(Order(f"softmax{q}", softmax))
    correction = [
        f"{step}{q}" for q in range(shape.q_tiles) for step in ("read_scale", "rescale", "allow_pv")
    ]
    orders.append(Order("correction", tuple(correction)))
    return tuple(orders)


def ring_reuse(q_tiles: int, kv_stages: int) -> tuple[tuple[str, str, int], ...]:
    """(load, what it overwrites, K/V tiles in between), computed from the load sequence K0 V0 K1 V1 ...

    With one query tile K runs one ahead: K0 K1 V0 K2 V1 ... Tile *i* of K is place ``2 i + a`` of the
    sequence and of V place ``2 i + b``; a load overwrites what stands ``kv_stages`` places before it.
    """
    place = {"load_k": 0, "load_v": 1} if q_tiles == 2 else {"load_k": -1, "load_v": 2}
    reuse = []
    for load, at in place.items():
        old = at - kv_stages
        previous = next(name for name, other in place.items() if (old - other) % 2 == 0)
        reuse.append((load, previous, -((old - place[previous]) // 2)))
    return tuple(reuse)


@lru_cache(maxsize=4096)
def _dependencies(shape: Shape) -> tuple[Dependency, ...]:
    dependencies = []
    last = shape.q_tiles - 1
    for q in range(shape.q_tiles):
        exps, pvs = _exp_names(shape, q), _pv_names(shape, q)
        pairs = [
            ("load_k", f"qk{q}", "kv_full"),
            ("load_v", pvs[0], "kv_full"),
            (f"qk{q}", f"load_s{q}", "s_full"),
            (f"scale{q}", f"read_scale{q}", "scale_full"),
            (f"allow_pv{q}", pvs[0], "p_full"),
            *zip(exps, pvs, ("p_full", "p_last"), strict=False),
        ]
        dependencies += [Dependency(a, b, 0, why) for a, b, why in pairs]
        # O is complete up to the previous tile, seen through S of this one or, with one query tile, o_full
        dependencies.append(Dependency(pvs[-1], f"rescale{q}", 1, "O of the tile before"))
        if shape.q_tiles == 1:
            dependencies.append(Dependency(pvs[-1], f"read_scale{q}", 1, "o_full"))
    releases = {"load_k": f"qk{last}", "load_v": _pv_names(shape, last)[-1]}
    for load, previous, distance in ring_reuse(shape.q_tiles, shape.kv_stages):
        dependencies.append(Dependency(releases[previous], load, distance, "kv_empty"))
    return tuple(dependencies)
