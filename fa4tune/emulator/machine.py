"""The machine: CTAs, clusters, and the run of a whole grid."""

from __future__ import annotations

import os
import random
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from fa4tune.emulator import (
    cfg,
    checks_words,
    isa_memory,
    isa_mma,
    isa_sync,
    runtime_copy,
    runtime_memory,
    runtime_sync,
    runtime_tcgen05,
    runtime_wgmma,
)
from fa4tune.emulator.asynchronous import AsyncUnits
from fa4tune.emulator.barriers import ClusterBarrier, MBarrier, NamedBarrier, TraceEvent
from fa4tune.emulator.blas import single_thread
from fa4tune.emulator.checks import Checks
from fa4tune.emulator.checks_cluster import ClusterChecks
from fa4tune.emulator.checks_compiler import CheckedCompiler
from fa4tune.emulator.checks_global import GlobalChecks
from fa4tune.emulator.codegen import SHARED_WINDOW, Compiler
from fa4tune.emulator.counters import Counters, WarpCounters, collect
from fa4tune.emulator.findings import FaultError, Finding
from fa4tune.emulator.lanes import Array
from fa4tune.emulator.launch import Launch
from fa4tune.emulator.memory import PARAM_WINDOW, RANK_SHIFT, SMEM_BASE, GlobalMemory, SharedMemory
from fa4tune.emulator.parser import parse
from fa4tune.emulator.ptx import Entry, Instruction, Module
from fa4tune.emulator.scheduler import run_cluster
from fa4tune.emulator.tensor_memory import TensorMemory
from fa4tune.emulator.warp import Warp
from fa4tune.errors import EmulationError

#: Modules whose import fills the decoder and runtime tables.
TABLES = (
    isa_memory,
    isa_mma,
    isa_sync,
    runtime_copy,
    runtime_memory,
    runtime_sync,
    runtime_tcgen05,
    runtime_wgmma,
)

REGISTER_FILE = 65536  #: 32-bit registers of an SM
SMEM_LIMIT = 232448  #: dynamic shared memory a CTA may have (227 KiB), Hopper and Blackwell

TIME_OUT_SHARE = 0.2  #: of unsuccessful try_waits that end at once in late mode

BACKENDS = ("auto", "native", "plain")

Progress = Callable[[int, int], None]


class BackendError(EmulationError, ValueError):
    """A back-end that does not exist."""


@dataclass(slots=True)
class Result:
    """What a run gave.

    Args:
        findings: what is wrong, in the order found; the run stopped at the first ``error``.
        completed: every CTA ran to its end.
        warp_instructions: executed instructions, counted per warp.
        counters: per CTA and warp, if asked for.
        trace: barrier events in execution order, if asked for.
        matrix_seconds: CPU time inside matrix products; only native code measures it.
    """

    findings: list[Finding] = field(default_factory=list)
    completed: bool = False
    warp_instructions: int = 0
    counters: Counters | None = None
    trace: list[TraceEvent] | None = None
    matrix_seconds: float = 0.0

    @property
    def errors(self) -> list[Finding]:
        """The findings of severity ``error``."""
        return [f for f in self.findings if f.severity == "error"]


class Cta:
    """One CTA: shared memory, barriers, tensor memory, warps."""

    def __init__(self, cluster: Cluster, rank: int, position: tuple[int, int, int]) -> None:
        machine = cluster.machine
        self.cluster = cluster
        self.machine = machine
        self.rank = rank
        self.position = position
        gx, gy, _ = machine.launch.grid
        self.number = position[0] + gx * (position[1] + gy * position[2])
        self.label = f"{position}" + (f" rank {rank}" if cluster.size > 1 else "")
        self.smem = SharedMemory(machine.smem_bytes)
        self.mbarriers: dict[int, MBarrier] = {}
        self.named: dict[int, NamedBarrier] = {}
        self.tmem = TensorMemory(self)
        self.operands: dict[Any, tuple[int, Array]] = {}
        threads = int(np.prod(machine.launch.block))
        self.thread_count = threads
        per_thread = REGISTER_FILE // (max(threads, 32) * machine.entry.min_ctas) & ~7
        self.initial_registers: int = min(per_thread, 256)
        self.register_pool = 0
        self.register_waiters: list[Warp] = []
        self.warps: list[Warp] = []
        self.warps = [self.new_warp(i) for i in range(-(-threads // 32))]

    def new_warp(self, index: int) -> Warp:
        """A warp of this CTA."""
        return Warp(self, index)

    def mbarrier(self, offset: int) -> MBarrier:
        """The mbarrier at a shared offset; a fault where none was initialised."""
        found = self.mbarriers.get(offset)
        if found is None:
            raise FaultError(
                "mbarrier", f"shared offset {offset} of CTA {self.label} holds no initialised mbarrier"
            )
        return found


class Cluster:
    """The CTAs that run together; a grid without clusters has clusters of one."""

    checks: ClusterChecks | None = None

    def __init__(self, machine: Machine, first: tuple[int, int, int]) -> None:
        self.machine = machine
        cx, cy, cz = machine.cluster_shape
        self.size = cx * cy * cz
        self.random = random.Random(f"{machine.late}/{first}")
        self.barrier = ClusterBarrier()
        self.units = AsyncUnits(machine.late is not None)
        self.ready: deque[Warp] = deque()
        self.ctas: list[Cta] = []
        for rank in range(self.size):
            position = (first[0] + rank % cx, first[1] + rank // cx % cy, first[2] + rank // (cx * cy))
            self.ctas.append(self.new_cta(rank, position))
        self.warps = [w for c in self.ctas for w in c.warps]
        self.barrier.expected = sum(w.threads for w in self.warps)
        self.ready.extend(self.warps)

    def new_cta(self, rank: int, position: tuple[int, int, int]) -> Cta:
        """A CTA of this cluster."""
        return Cta(self, rank, position)

    def run_ready(self, fuel: int, limit: int) -> bool | None:
        """Run all that can run, where a back-end has a loop of its own for it.

        Returns None for no such loop; else whether ``limit`` turns went by without any effect.
        """
        return None

    def gives_up(self) -> bool:
        """Whether a try_wait returns false although it could wait: now and then in late mode, else never."""
        return self.machine.late is not None and self.random.random() < TIME_OUT_SHARE

    def cta(self, rank: int) -> Cta:
        """A CTA by rank."""
        if rank >= self.size:
            raise FaultError("out-of-bounds", f"CTA rank {rank} of a cluster of {self.size}")
        return self.ctas[rank]

    def mbarrier(self, address: int) -> MBarrier:
        """The mbarrier at a shared::cluster address."""
        if address & 7:
            raise FaultError("misaligned", f"an mbarrier at {address:#x}, no multiple of 8")
        return self.cta(address >> RANK_SHIFT).mbarrier(address & (1 << RANK_SHIFT) - 1)

    def threads_left(self, warp: Warp, count: int) -> None:
        """Lanes exited."""
        self.barrier.leave(count)
        self.machine.progress += 1


class Machine:
    """One launch being executed."""

    parallel = False  #: whether clusters may run side by side

    def __init__(
        self,
        module: Module,
        compiler: Compiler,
        launch: Launch,
        *,
        late: int | None,
        counters: bool,
        trace: bool,
        waivers: Iterable[str] | None = None,
        roles: Mapping[tuple[int, int], str] | None = None,
    ) -> None:
        self.module = module
        self.roles = roles or {}
        self.checks = None if waivers is None else Checks(self, waivers)
        self.compiler = compiler
        self.program = compiler.program
        self.entry: Entry = compiler.program.entry
        self.launch = launch
        self.late = late
        self.counting = counters
        self.trace: list[TraceEvent] | None = [] if trace else None
        self.memory = GlobalMemory(launch.buffers)
        if self.checks is not None:
            self.checks.globals = GlobalChecks(self.checks, self.memory.regions)
        self.parameters = self._parameter_block()
        self.cluster_shape = launch.cluster
        self.symbols, self.smem_bytes = self._lay_out_shared()
        self.progress = 0
        self.steps = 0
        self.matrix_seconds = 0.0
        self.stamp = 1
        self.current: tuple[Instruction | None, Any] = (None, None)
        self.findings: list[Finding] = []
        self.tensor_maps: dict[bytes, Any] = {}
        if any(g % c for g, c in zip(launch.grid, launch.cluster, strict=True)):
            raise EmulationError(f"grid {launch.grid} is no multiple of the cluster {launch.cluster}")
        if self.entry.required_threads is not None and self.entry.required_threads != launch.block:
            raise EmulationError(
                f"block {launch.block} differs from .reqntid "
                f"{self.entry.required_threads} of {self.entry.name}"
            )

    def new_cluster(self, first: tuple[int, int, int]) -> Cluster:
        """The cluster whose first CTA has this position, about to run."""
        cluster = Cluster(self, first)
        if self.checks is not None:
            cluster.checks = ClusterChecks(self.checks, cluster)
        return cluster

    def session(self) -> AbstractContextManager[None]:
        """What surrounds the run of all clusters."""
        return nullcontext()

    def run_cluster(self, cluster: Cluster) -> bool:
        """Run a cluster to its end; False if an error stopped it."""
        return run_cluster(cluster)

    def _parameter_block(self) -> bytes:
        given, wanted = self.launch.parameters, self.entry.parameters
        if len(given) != len(wanted):
            raise EmulationError(
                f"{self.entry.name} takes {len(wanted)} parameters, the launch has {len(given)}"
            )
        block = bytearray()
        for value, parameter in zip(given, wanted, strict=True):
            if len(value) != parameter.nbytes:
                raise EmulationError(
                    f"parameter {parameter.name} has {parameter.nbytes} bytes, got {len(value)}"
                )
            block.extend(b"\0" * (parameter.offset - len(block)))
            block.extend(value)
        return bytes(block)

    def _lay_out_shared(self) -> tuple[dict[str, int], int]:
        """Offsets of shared variables (static ones first) and the bytes a CTA has from SMEM_BASE on."""
        symbols: dict[str, int] = {}
        at = SMEM_BASE
        dynamic = None
        local = 0
        for variable in (*self.module.variables, *self.entry.variables):
            if variable.space == "local":
                local = -(-local // variable.align) * variable.align
                symbols[variable.name] = local
                local += variable.nbytes
            elif variable.space != "shared":
                raise EmulationError(f"variable {variable.name} in .{variable.space} is not modelled")
            elif variable.extern:
                dynamic = variable
            else:
                at = -(-at // variable.align) * variable.align
                symbols[variable.name] = at
                at += variable.nbytes
        if dynamic is not None:
            at = -(-at // max(dynamic.align, 16)) * max(dynamic.align, 16)
            symbols[dynamic.name] = at
        end = at + self.launch.smem_bytes
        if end - SMEM_BASE > SMEM_LIMIT:
            raise EmulationError(
                f"{end - SMEM_BASE} bytes of shared memory exceed the {SMEM_LIMIT} that a CTA may have"
            )
        self._local_symbols = {v.name for v in self.entry.variables if v.space == "local"}
        return symbols, end - SMEM_BASE

    def symbol(self, name: str, cta: Cta) -> int:
        """Address of a variable as a CTA sees it."""
        value = self.symbols[name]
        return value if name in self._local_symbols else value | cta.rank << RANK_SHIFT

    def tick(self) -> int:
        """A new stamp for changed memory."""
        self.stamp += 1
        return self.stamp

    def atomic_view(
        self, warp: Warp, address: int, size: int, width: int, space: str, dtype: Any
    ) -> tuple[Array, int]:
        """A typed view and an index for an atomic at an address."""
        if space.startswith("shared") or (space == "generic" and address >= SHARED_WINDOW):
            if space == "generic":
                address -= SHARED_WINDOW
            rank, offset = address >> RANK_SHIFT, address & (1 << RANK_SHIFT) - 1
            cta = warp.cluster.cta(rank)
            start = cta.smem.check(offset, size * width, "an atomic")
            cta.smem.touch(start, size * width, self.tick())
            if warp.cluster.checks is not None:
                warp.cluster.checks.atomic(warp, cta, start, size * width)
            return cta.smem.views[size].view(dtype), start // size
        index, offset = self.memory.find(address, size * width, True)
        if warp.cluster.checks is not None:
            at = np.array([address], np.uint64)
            warp.cluster.checks.global_access(warp, at, size * width, True, True, checks_words.GLOBAL_ATOMIC)
        return self.memory.view(index, size).view(dtype), offset // size

    def bytes_at(self, address: int, nbytes: int) -> bytes:
        """Bytes at a generic address, for TMA descriptors."""
        if address >= PARAM_WINDOW:
            at = address - PARAM_WINDOW
            return self.parameters[at : at + nbytes]
        return self.memory.bytes_at(address, nbytes).tobytes()

    def emit(self, event: TraceEvent) -> None:
        """Append to the trace."""
        if self.trace is not None:
            self.trace.append(event)

    def locate(self, error: BaseException) -> Instruction | None:
        """The instruction whose generated code raised."""
        if self.current[0] is not None:
            return self.current[0]
        for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
            mapping = self.compiler.line_map.get(frame.f_code.co_filename)
            if mapping is not None and line < len(mapping):
                return mapping[line]
        return None

    def source(self, instruction: Instruction | None) -> str:
        """``file:line`` of an instruction where the PTX has line information, else nothing."""
        if instruction is None or instruction.source is None:
            return ""
        number, line = instruction.source
        return f"{self.module.files.get(number, f'file {number}')}:{line}"

    def finding(self, error: FaultError, warp: Warp | None) -> Finding:
        """A fault as a finding, with its instruction."""
        instruction = self.locate(error)
        who = self.current[1] or warp
        return Finding(
            error.kind,
            str(error),
            line=instruction.line if instruction is not None else 0,
            text=instruction.text if instruction is not None else "",
            where=who.label if who is not None else "",
            source=self.source(instruction),
            details=error.details,
        )


_COMPILED: dict[tuple[str, str, bool], tuple[Module, Compiler]] = {}


def load(ptx: str, entry: str, checked: bool = False) -> tuple[Module, Compiler]:
    """Parse and analyse a PTX text once; later calls share the generated code.

    Raises :class:`~fa4tune.errors.EmulationError` if the entry is missing or an instruction is not modelled.
    """
    key = (ptx, entry, checked)
    found = _COMPILED.get(key)
    if found is None:
        module = parse(ptx)
        if entry not in module.entries:
            raise EmulationError(
                f"the PTX has no entry {entry!r}, only {', '.join(module.entries) or 'none'}"
            )
        program = cfg.build(module.entries[entry])
        found = (module, CheckedCompiler(program) if checked else Compiler(program))
        if len(_COMPILED) >= 16:
            _COMPILED.pop(next(iter(_COMPILED)))
        _COMPILED[key] = found
    return found


def _machine(
    backend: str | None, module: Module, compiler: Compiler, launch: Launch, **options: Any
) -> Machine:
    """A machine over one of the back-ends."""
    given = "backend" if backend else "FA4TUNE_EMULATOR"
    backend = backend or os.environ.get("FA4TUNE_EMULATOR") or "auto"
    if backend not in BACKENDS:
        raise BackendError(
            f"{given} is {backend!r}, which is no back-end; choose one of {', '.join(BACKENDS)}"
        )
    if backend != "plain":
        from fa4tune.emulator.native import backend as native

        found = native.machine(module, compiler, launch, required=backend == "native", **options)
        if found is not None:
            return found
    return Machine(module, compiler, launch, **options)


def run(
    ptx: str,
    launch: Launch,
    *,
    late: int | None = None,
    counters: bool = False,
    trace: bool = False,
    check: bool = False,
    waivers: Iterable[str] = (),
    progress: Progress | None = None,
    backend: str | None = None,
    workers: int = 1,
    roles: Mapping[tuple[int, int], str] | None = None,
) -> Result:
    """Execute one kernel launch on the CPU. Buffers of the launch are read and written in place.

    Args:
        ptx: the kernel's PTX text (ISA 8 or 9).
        launch: grid, block, cluster, shared memory, parameter bytes and buffers.
        late: a seed: asynchronous work is then performed as late as the synchronisation allows and warps get
            random priorities, so that a missing wait shows as a wrong result. None runs eagerly.
        counters: count instructions, bytes and matrix operations per warp.
        trace: record every arrival and every wait at every barrier.
        check: look for races, missing fences and waits, and reads of what was never written
            (:data:`fa4tune.emulator.checks.KINDS`).
        waivers: names of :data:`fa4tune.emulator.checks.WAIVERS`, or one name; what they cover gets the
            severity ``waived``.
        progress: called with (clusters done, clusters in all).
        backend: ``native`` code through LLVM and a C compiler, the ``plain`` NumPy code, whose results are
            the same bits, or ``auto``: native where it can be had. None: what the environment variable
            ``FA4TUNE_EMULATOR`` says, else ``auto``.
        workers: threads that run clusters of this launch side by side in native code. Clusters run one
            after another all the same, whatever the number, with ``check`` (races between clusters are found
            in one record of global memory), with ``trace``, on the plain back-end, and where the kernel has
            atomics or reductions on global memory. Results are those of one thread.
        roles: what a warp is called in findings, by (rank of its CTA in the cluster, warp number).

    Returns:
        findings, counters and trace. A kernel that hangs or faults gives a finding, not an exception.

    Raises:
        EmulationError: PTX or a launch outside of the model.
        ValueError: a back-end or waiver that does not exist.
    """
    module, compiler = load(ptx, launch.entry, check)
    machine = _machine(
        backend, module, compiler, launch, late=late, counters=counters, trace=trace,
        waivers=waivers if check else None, roles=roles,
    )  # fmt: skip
    result = Result(findings=machine.findings, trace=machine.trace)
    shape = machine.cluster_shape
    gx, gy, gz = (g // c for g, c in zip(launch.grid, shape, strict=True))
    total = gx * gy * gz
    counted: list[WarpCounters] = []
    positions = [
        (n % gx * shape[0], n // gx % gy * shape[1], n // (gx * gy) * shape[2]) for n in range(total)
    ]
    if min(workers, total) > 1 and not check and machine.parallel and not trace:
        from fa4tune.emulator.native.parallel import run_clusters

        make = partial(
            _machine,
            backend,
            module,
            compiler,
            launch,
            late=late,
            counters=counters,
            trace=False,
            roles=roles,
        )
        with single_thread():
            done, result.matrix_seconds = run_clusters(
                make, positions, min(workers, total), counters, progress
            )
        result.findings.extend(f for c in done for f in c.findings)
        result.completed = len(done) == total and done[-1].finished
        result.warp_instructions = sum(c.steps for c in done)
        if counters:
            result.counters = Counters([w for c in done for w in c.counters])
        return result
    with np.errstate(all="ignore"), single_thread(), machine.session():
        for number, first in enumerate(positions):
            cluster = machine.new_cluster(first)
            finished = machine.run_cluster(cluster)
            if counters:
                counted.extend(collect(machine, cluster.ctas))
            if not finished:
                break
            if progress is not None:
                progress(number + 1, total)
        else:
            result.completed = True
    result.warp_instructions = machine.steps
    result.matrix_seconds = machine.matrix_seconds
    if counters:
        result.counters = Counters(counted)
    return result
