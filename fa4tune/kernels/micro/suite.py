"""What a calibration measures: the microbenchmark kernels of an architecture, and launches of them.

Pure data, read by the compiling host, the measuring host and the arithmetic that turns results into hardware
numbers. Names are ``family.detail``; a name says which quantity it is, the numbers say how it was launched.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from itertools import product

VERSION = 2
"""Raised when results of an older suite no longer mean the same."""

WARP, WARPGROUP = 32, 128

MMA_SHAPES = (64, 128, 176, 256)
"""N of the wgmma instructions measured: O and S tiles of attention, and the widest."""

BESIDE_MATMULS = ("rs128", "ss128", "rs64")
"""Matmuls that arithmetic is measured beside: A in registers or SMEM, columns."""

MATMUL_ARCHITECTURES = ("sm_90a",)
"""Architectures whose matrix instructions the kernels issue."""

TILE_ROWS, TILE_COLUMNS = 128, 128
"""The tile that bandwidths are measured with: 32 KiB."""

TILE_BYTES = TILE_ROWS * TILE_COLUMNS * 2

SWEEP_TILES = 1 << 17
"""Tiles of a walk that reads HBM: 4 GiB, far beyond any L2."""


@dataclass(frozen=True)
class KernelSpec:
    """A kernel to compile: ``module`` of :mod:`fa4tune.kernels.micro`, class and its arguments."""

    name: str
    module: str
    class_name: str
    arguments: tuple[tuple[str, int | str | bool], ...]


@dataclass(frozen=True)
class Probe:
    """Launches of one kernel with two iteration counts; the difference is the cost of the iterations between.

    Args:
        name: of the quantity.
        kernel: name of its :class:`KernelSpec`.
        threads: of a CTA.
        work: what a CTA does in an iteration, in ``unit``.
        iterations: the two counts.
        every_sm: one CTA on each SM; else one CTA in all.
        start, step, span, block_step: walk over tiles.
        cold: L2 is filled with other data before each launch.
        timed_threads: of a CTA, the first ones: those whose cycles count; 0 for all.
    """

    name: str
    kernel: str
    threads: int
    work: float
    unit: str
    iterations: tuple[int, int]
    every_sm: bool = True
    start: int = 0
    step: int = 1
    span: int = 1
    block_step: int = 0
    cold: bool = False
    timed_threads: int = 0


@dataclass(frozen=True)
class Load:
    """A probe repeated for ``seconds`` while clock and power are read; ``probe`` None leaves the GPU idle.

    Args:
        name: of the load.
        probe: what runs.
        values: ``random`` or ``zero`` operands.
        tensor_flops: matrix work of a CTA in an iteration.
    """

    name: str
    probe: str | None
    values: str = "random"
    tensor_flops: float = 0.0
    seconds: float = 1.2


@dataclass(frozen=True)
class Suite:
    """Everything measured on one architecture."""

    arch: str
    kernels: tuple[KernelSpec, ...]
    probes: tuple[Probe, ...]
    loads: tuple[Load, ...]
    launches: tuple[str, ...] = field(default=("fma.throughput", "l2.throughput"))
    """Probes whose kernels are launched with no iterations, to time the launch alone."""


def _arithmetic() -> tuple[list[KernelSpec], list[Probe]]:
    from_chains = {
        "ex2": (1, 8),
        "fma": (1, 8),
        "max": (1, 8),
        "max3": (8,),
        "convert": (2, 8),
        "shuffle": (1, 8),
        "polynomial": (1, 8),
        "fma_max": (8,),
    }
    per_iteration = {"polynomial": 32}
    kernels, probes = [], []
    for operation, all_chains in from_chains.items():
        count = per_iteration.get(operation, 256)
        for chains in all_chains:
            name = f"arithmetic.{operation}.{chains}"
            arguments = (("operation", operation), ("chains", chains))
            kernels.append(KernelSpec(name, "arithmetic", "Arithmetic", arguments))
            if chains < 8:
                # dependent operations of one warp: the work is the length of the chain
                probes.append(Probe(f"{operation}.latency", name, WARP, count, "operations", (8, 40)))
                continue
            for label, threads in (("throughput", 512), ("warpgroup", WARPGROUP), ("warp", WARP)):
                probes.append(
                    Probe(f"{operation}.{label}", name, threads, count * threads, "elements", (8, 40))
                )
    return kernels, probes


def _shared_memory() -> tuple[list[KernelSpec], list[Probe]]:
    kernels = [
        KernelSpec(f"smem.{access}", "shared_memory", "SharedMemory", (("access", access),))
        for access in ("load", "store", "chain")
    ]
    probes = [Probe("smem_load.latency", "smem.chain", WARP, 32, "operations", (20, 100))]
    for access, (label, threads) in product(
        ("load", "store"), (("throughput", 512), ("warpgroup", WARPGROUP), ("warp", WARP))
    ):
        probes.append(
            Probe(f"smem_{access}.{label}", f"smem.{access}", threads, 32 * 16 * threads, "bytes", (20, 100))
        )
    return kernels, probes


def _matmul() -> tuple[list[KernelSpec], list[Probe]]:
    kernels, probes = [], []
    for n, source in product(MMA_SHAPES, ("smem", "registers")):
        groups = 2 if source == "registers" and n > 192 else 3
        letters = "ss" if source == "smem" else "rs"
        variants = [(8, 1), (1, 0), (2, 0), (4, 0), (8, 0)] if n == 128 else [(8, 1), (1, 0), (4, 0), (8, 0)]
        for steps, in_flight in variants:
            name = f"wgmma.{letters}.n{n}.k{steps}.{'queued' if in_flight else 'waited'}"
            arguments = (("n", n), ("a_source", source), ("steps", steps), ("in_flight", in_flight))
            kernels.append(KernelSpec(name, "wgmma", "Wgmma", arguments))
            flops = 2 * 64 * n * 16 * steps
            for warpgroups in range(1, groups + 1) if in_flight or steps == 8 else (1,):
                probes.append(
                    Probe(
                        f"{name}.wg{warpgroups}",
                        name,
                        WARPGROUP * warpgroups,
                        flops * warpgroups,
                        "flops",
                        (100, 500),
                    )
                )
    return kernels, probes


def _interference() -> tuple[list[KernelSpec], list[Probe]]:
    kernels, probes = [], []
    for stores in (0, 8, 16):
        name = f"interference.stores{stores}"
        arguments = (("n", 128), ("steps", 8), ("stores", stores))
        kernels.append(KernelSpec(name, "interference", "Interference", arguments))
        flops = 2 * 2 * 64 * 128 * 128
        probes.append(Probe(name, name, 3 * WARPGROUP, flops, "flops", (100, 500)))
    return kernels, probes


def _beside() -> tuple[list[KernelSpec], list[Probe]]:
    """One warpgroup's work beside another one's: arithmetic beside matmuls, and the other way around."""
    kernels, probes = [], []
    pairs = [*product(("ex2", "fma", "max"), ("", *BESIDE_MATMULS)), ("rs128", "max"), ("rs128", "fma")]
    for first, others in pairs:
        name = f"beside.{first}.{others or 'none'}"
        arguments = (("first", first), ("others", others))
        kernels.append(KernelSpec(name, "beside", "Beside", arguments))
        work, unit = (2 * 64 * 128 * 128, "flops") if first == "rs128" else (256 * WARPGROUP, "elements")
        threads = WARPGROUP * (2 if others else 1)
        probes.append(Probe(name, name, threads, work, unit, (20, 100), timed_threads=WARPGROUP))
    return kernels, probes


def _sections(matmul: bool) -> tuple[list[KernelSpec], list[Probe]]:
    kernels, probes = [], []
    variants = [(n, exponentials, 0) for n in (64, 128, 176) for exponentials in (True, False)]
    if matmul:
        variants += [(128, True, 64), (128, True, 128)]
    for n, exponentials, head_dim in variants:
        kind = "full" if exponentials else "arithmetic"
        name = f"loop.n{n}.d{head_dim}" if head_dim else f"section.n{n}.{kind}"
        arguments = (("n", n), ("exponentials", exponentials), ("head_dim", head_dim))
        kernels.append(KernelSpec(name, "section", "Section", arguments))
        for warpgroups in (1, 2, 3):
            elements = 64 * n * warpgroups
            probes.append(
                Probe(f"{name}.wg{warpgroups}", name, WARPGROUP * warpgroups, elements, "elements", (50, 250))
            )
    return kernels, probes


def _signals() -> tuple[list[KernelSpec], list[Probe]]:
    kernels = [
        KernelSpec(f"signals.{kind}", "signals", "Signals", (("kind", kind),))
        for kind in ("mbarrier", "named", "sync")
    ]
    probes = [
        Probe("mbarrier.latency", "signals.mbarrier", 2 * WARP, 2, "signals", (200, 1000)),
        Probe("mbarrier.latency.warpgroups", "signals.mbarrier", 3 * WARPGROUP, 2, "signals", (200, 1000)),
        Probe("named.latency", "signals.named", 2 * WARPGROUP, 2, "signals", (200, 1000)),
        *(
            Probe(f"sync.latency.wg{groups}", "signals.sync", WARPGROUP * groups, 1, "signals", (200, 1000))
            for groups in (1, 2, 3)
        ),
    ]
    return kernels, probes


def _copies() -> tuple[list[KernelSpec], list[Probe]]:
    kernels, probes = [], []
    for rows, columns, depth in ((64, 64, 1), (128, 64, 1), (128, 128, 1), (128, 128, 4)):
        arguments = (("rows", rows), ("columns", columns), ("depth", depth))
        name = f"copy.{rows}x{columns}.depth{depth}"
        kernels.append(KernelSpec(name, "bulk_copy", "BulkCopy", arguments))
    for rows, columns in ((64, 64), (128, 64), (128, 128)):
        kernel, kib = f"copy.{rows}x{columns}.depth1", rows * columns * 2 // 1024
        size = rows * columns * 2
        # all CTAs load the same few tiles, or each of them others of 132 times 8
        for label, every_sm, span, block_step in (
            ("alone", False, 16, 0),
            ("all", True, 16, 0),
            ("spread", True, 1056, 8),
        ):
            probes.append(
                Probe(
                    f"copy.l2.{kib}k.{label}",
                    kernel,
                    WARP,
                    size,
                    "bytes",
                    (200, 1000),
                    every_sm=every_sm,
                    span=span,
                    block_step=block_step,
                )
            )
        probes.append(
            Probe(
                f"copy.hbm.{kib}k.alone",
                kernel,
                WARP,
                size,
                "bytes",
                (50, 250),
                every_sm=False,
                span=SWEEP_TILES,
                cold=True,
            )
        )
    wide = f"copy.{TILE_ROWS}x{TILE_COLUMNS}.depth4"
    probes += [
        # every CTA walks the same 34 MB, each from another tile
        Probe("l2.throughput", wide, WARP, TILE_BYTES, "bytes", (200, 1000), span=1056, block_step=8),
        Probe("l2.throughput.8m", wide, WARP, TILE_BYTES, "bytes", (200, 1000), span=264, block_step=2),
        # all CTAs read the same tile at about the same time, as query tiles of one head read K and V
        Probe("l2.throughput.shared", wide, WARP, TILE_BYTES, "bytes", (200, 1000), span=64),
        Probe("l2.throughput.alone", wide, WARP, TILE_BYTES, "bytes", (200, 1000), every_sm=False, span=64),
        # step 0 stands for the number of CTAs: together they sweep the source once
        Probe(
            "hbm.throughput",
            wide,
            WARP,
            TILE_BYTES,
            "bytes",
            (100, 900),
            step=0,
            span=SWEEP_TILES,
            block_step=1,
            cold=True,
        ),
    ]
    return kernels, probes


@cache
def suite(arch: str) -> Suite:
    """The suite of a compile target; architectures without matmul kernels get the rest."""
    matmul = arch in MATMUL_ARCHITECTURES
    parts = [
        _arithmetic(),
        _shared_memory(),
        *([_matmul(), _interference(), _beside()] if matmul else []),
        _sections(matmul),
        _signals(),
        _copies(),
    ]
    # the most telling first, as a budget may cut the end off
    loads = [Load("idle", None), Load("softmax", "section.n128.full.wg3")]
    if matmul:
        step = 2 * 2 * 64 * 128
        commits = 2 * 2 * 64 * 128 * 128
        loads += [
            *(
                Load(f"loop d{d} wg{groups}", f"loop.n128.d{d}.wg{groups}", tensor_flops=step * d * groups)
                for d, groups in ((128, 2), (64, 3), (128, 3), (64, 2), (128, 1))
            ),
            Load("matmul", "wgmma.ss.n128.k8.queued.wg2", tensor_flops=commits),
            Load("matmul zeros", "wgmma.ss.n128.k8.queued.wg2", "zero", tensor_flops=commits),
        ]
    loads += [Load("sweep", "hbm.throughput"), Load("arithmetic", "fma_max.throughput")]
    return Suite(
        arch,
        tuple(kernel for kernels, _ in parts for kernel in kernels),
        tuple(probe for _, probes in parts for probe in probes),
        tuple(loads),
    )
