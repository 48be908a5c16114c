"""The machine over native code: the plain machine's classes with their hot state in C structs."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import addressof, c_int32, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np

from fa4tune.emulator import numpy_alu
from fa4tune.emulator.codegen import RUNTIME
from fa4tune.emulator.findings import FaultError
from fa4tune.emulator.isa import Operation
from fa4tune.emulator.lanes import Array
from fa4tune.emulator.machine import Cluster, Cta, Machine
from fa4tune.emulator.native import layout, matrix, state
from fa4tune.emulator.native.checks import WORDS, NativeClusterChecks
from fa4tune.emulator.native.jit import NativeProgram
from fa4tune.emulator.native.kinds import SLOT
from fa4tune.emulator.native.layout import BASE_SHIFT, FAULT, HOST, OK, SUSPEND
from fa4tune.emulator.native.library import library
from fa4tune.emulator.native.parallel import independent
from fa4tune.emulator.native.places import Call, Translation
from fa4tune.emulator.native.state import field
from fa4tune.emulator.numpy_alu import KIND_DTYPE
from fa4tune.emulator.scheduler import run_cluster
from fa4tune.emulator.warp import BLOCKED, LOCAL_BYTES, READY, Warp

_FULL = 0xFFFFFFFF
#: Special registers that differ between CTAs, by how their names begin.
_PER_CTA = ("%ctaid", "%clusterid", "%cluster_ctaid", "%cluster_ctarank", "%smid")
_RUN = ctypes.CFUNCTYPE(c_int32, c_void_p)


@dataclass(slots=True)
class HostFunction:
    """The plain back-end's function of one numbered call."""

    call: Call
    function: Callable[..., Any]
    lanewise: bool  # takes arrays only, not the warp


class NativeMachine(Machine):
    """One launch being executed by native code."""

    progress = field("progress")
    stamp = field("stamp")

    def __init__(self, native: NativeProgram, *args: Any, **options: Any) -> None:
        self.native = native
        self.struct = layout.MachineState()
        super().__init__(*args, **options)
        self.parallel = independent(self.program)
        self.host_functions: dict[int, HostFunction] = {}
        self.warps: dict[int, NativeWarp] = {}
        self.special_templates: dict[int, Array] = {}
        self.error: BaseException | None = None
        self.cluster: NativeCluster | None = None
        self.callback = HOST(self._host)
        self._parameters = np.frombuffer(self.parameters or b"\0", np.uint8).copy()
        self._regions = (layout.Region * max(len(self.memory.regions), 1))()
        for target, region in zip(self._regions, self.memory.regions, strict=False):
            target.address, target.nbytes = region.address, region.nbytes
            target.bytes, target.writable = state.address_of(region.array), int(region.writable)
        s = self.struct
        s.parameters, s.parameter_bytes = state.address_of(self._parameters), len(self.parameters)
        s.regions, s.region_count = addressof(self._regions), len(self.memory.regions)
        s.late, s.observed = int(self.late is not None), int(self.trace is not None)
        s.blocks = len(self.program.blocks)
        s.operations, s.gemm = native.operations_address, matrix.sgemm_address()
        self.parameters_address = state.address_of(self._parameters)
        self.words = list(WORDS)  # what accesses are, for the checks of all clusters
        self.globals_address = 0 if self.checks is None else library().fg_new(addressof(s))
        self.function = _RUN(native.address)

    @contextmanager
    def session(self) -> Iterator[None]:
        """Without Python's cycle collector, which costs more than the run; clusters are taken apart."""
        enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            self._take_apart()
            if self.globals_address:
                library().fg_free(self.globals_address)
            if enabled:
                gc.enable()

    def new_cluster(self, first: tuple[int, int, int]) -> Cluster:
        """The cluster whose first CTA has this position; the one before is taken apart."""
        self._take_apart()
        self.cluster = NativeCluster(self, first)
        if self.checks is not None:
            self.cluster.checks = NativeClusterChecks(self.checks, self.cluster)
        return self.cluster

    def _take_apart(self) -> None:
        """Undo the references in circles among the parts of a cluster."""
        if self.cluster is None:
            return
        self.warps.clear()
        if isinstance(self.cluster.checks, NativeClusterChecks):
            self.cluster.checks.close_all()
        for cta in self.cluster.ctas:
            for warp in cta.warps:
                warp.__dict__.clear()
            cta.mbarriers.views.clear()
            cta.__dict__.clear()
        self.cluster.__dict__.clear()
        self.cluster = None

    def operation(self, number: int) -> Operation:
        """The operation of a numbered call."""
        return self.native.translation.calls[number].operation

    def run_cluster(self, cluster: Any) -> bool:
        """Run a cluster to its end; False if an error stopped it."""
        finished = run_cluster(cluster)
        for warp in cluster.warps:
            if self.counting:
                warp.settle()
            self.steps += warp.steps
        self.matrix_seconds = self.struct.matrix_ns * 1e-9
        for cta in cluster.ctas:
            library().fa_free_operands(cta.address)
        return finished

    # -- what Python does

    def _host(self, pointer: int, number: int, mask: int) -> int:
        """Perform one operation with the plain back-end's function."""
        warp = self.warps[pointer]
        try:
            if number < 0:
                matrix.perform(warp, number, mask >> 16, mask & 0xFFFF)
                return OK
            return self._perform(warp, number, mask)
        except BaseException as error:
            if self.current[0] is None and number >= 0:
                self.current = (self.operation(number).instruction, warp)
            self.error = error
            return FAULT

    def _perform(self, warp: NativeWarp, number: int, mask: int) -> int:
        host = self.host_functions.get(number)
        if host is None:
            host = self.host_functions[number] = _host_function(self.native.translation.calls[number])
        call = host.call
        if warp.agent is not None:
            warp.agent.at = number
        sources = [warp.value(at, kind).copy() for at, kind in zip(call.sources, call.src_kinds, strict=True)]
        m = None if mask == _FULL else state.unpack_predicate(mask)
        result = host.function(*sources) if host.lanewise else host.function(warp, m, *sources)
        if result is None:
            return SUSPEND if call.operation.suspends else OK
        count = len(call.destinations)
        for i, (at, kind) in enumerate(zip(call.destinations, call.dst_kinds, strict=True)):
            warp.put(at, kind, result if count == 1 else result[i], m)
        return OK

    def raise_error(self) -> None:
        """Raise what a call from native code raised."""
        error, self.error = self.error, None
        if error is None:
            raise FaultError("unsupported", f"lanes part more than {layout.MAX_STACK} times")
        raise error


def _host_function(call: Call) -> HostFunction:
    operation = call.operation
    if operation.category == "alu":
        return HostFunction(call, numpy_alu.resolve(operation), True)
    return HostFunction(call, RUNTIME[operation.op](operation), False)


class NativeCluster(Cluster):
    """A cluster whose queue of runnable warps, and cluster barrier, lie in C structs."""

    machine: Any
    ctas: list[Any]
    warps: list[Any]
    ready: Any

    def __init__(self, machine: NativeMachine, first: tuple[int, int, int]) -> None:
        self.struct = s = layout.ClusterState()
        self.address = addressof(s)
        super().__init__(machine, first)
        self.units = matrix.NativeUnits(machine.late is not None, self)
        self._ctas = (c_void_p * self.size)(*(c.address for c in self.ctas))
        self._warps = (c_void_p * len(self.warps))(*(w.address for w in self.warps))
        s.machine = addressof(machine.struct)
        s.ctas = ctypes.cast(self._ctas, type(s.ctas))
        s.warps = ctypes.cast(self._warps, type(s.warps))
        s.host, s.run = machine.callback, machine.native.address
        s.size, s.warp_count = self.size, len(self.warps)
        machine.warps = {w.address: w for w in self.warps}
        for number, warp in enumerate(self.warps):
            warp.number = number
        expected = self.barrier.expected
        self.barrier = state.NativeClusterBarrier(self)
        self.barrier.expected = expected
        self.ready = state.ReadyQueue(self)
        self.ready.extend(self.warps)

    def run_ready(self, fuel: int, limit: int) -> bool | None:
        """Run all that can run; whether ``limit`` turns went by without any effect."""
        answer = library().fa_run_ready(self.address, fuel, limit)
        if answer == FAULT:
            self.machine.raise_error()
        return bool(answer == SUSPEND)

    def new_cta(self, rank: int, position: tuple[int, int, int]) -> Cta:
        """A CTA of this cluster."""
        return NativeCta(self, rank, position)


class NativeCta(Cta):
    """A CTA whose barriers and warps lie in C structs."""

    machine: Any
    mbarriers: Any
    named: Any

    def __init__(self, cluster: NativeCluster, rank: int, position: tuple[int, int, int]) -> None:
        self.struct = layout.CtaState()
        self.special_places: list[tuple[slice, Array]] = []
        self.address = addressof(self.struct)
        super().__init__(cluster, rank, position)
        s, nbytes = self.struct, self.machine.smem_bytes
        self.tmem = state.NativeTensorMemory(self)
        self.bar_index = np.zeros(nbytes // 8 + 1, np.uint16)
        self._bars = np.zeros(layout.MAX_BARS * ctypes.sizeof(layout.MBarrierState), np.uint8)
        bars: Any = self._bars
        self.bars = (layout.MBarrierState * layout.MAX_BARS).from_buffer(bars)
        self.named_states = (layout.NamedBarrierState * 16)()
        s.cluster = cluster.address
        s.smem, s.stamps = state.address_of(self.smem.bytes), state.address_of(self.smem.stamps)
        s.bar_index = self.bar_index.ctypes.data_as(type(s.bar_index))
        s.bars = ctypes.cast(self.bars, type(s.bars))
        s.named = ctypes.cast(self.named_states, type(s.named))
        s.smem_bytes, s.rank, s.thread_count = nbytes, rank, self.thread_count
        self.mbarriers = state.MBarriers(self)
        self.named = state.NamedBarriers(self)

    def new_warp(self, index: int) -> Warp:
        """A warp of this CTA."""
        return NativeWarp(self, index)


class NativeWarp(Warp):
    """A warp whose registers and control state lie in a C struct."""

    machine: Any
    cluster: Any
    cta: Any

    pc = field("pc")
    join = field("join")
    number = field("number")
    cluster_round = field("cluster_round")
    steps = field("steps")

    def __init__(self, cta: NativeCta, index: int) -> None:
        self.struct = s = layout.WarpState()
        self.address = addressof(s)
        self.waiting_for: Any = None
        super().__init__(cta, index)
        native = self.machine.native
        translation = native.translation
        blocks = len(self.machine.program.blocks)
        self._visits = np.zeros((blocks, 2), np.int64)
        self.special_memory = self._special_memory(translation)
        self.bases = (self.memory, self.special_memory, native.constants)
        s.registers, s.special, s.constants = (state.address_of(b) for b in self.bases)
        s.cta, s.cluster = cta.address, self.cluster.address
        s.operations, s.operands = native.operations_address, native.operands_address
        s.visits = state.address_of(self._visits)
        s.index, s.threads = index, self.threads

    def _special_memory(self, translation: Translation) -> Array:
        """Special registers and addresses of variables, as translated code reads them.

        What no CTA changes is kept per warp number, what all warps of a CTA share per CTA.
        """
        memory = state.aligned(translation.special_bytes)
        known = self.machine.special_templates.get(self.index)
        if known is None:
            memory[:8].view(np.uint64)[0] = self.machine.parameters_address
            for (name, offset, base), at in translation.specials.items():
                if name.startswith("%") and not name.startswith(_PER_CTA):
                    self._put_special(memory, name, offset, base, at)
            self.machine.special_templates[self.index] = memory.copy()
        else:
            memory[:] = known
        if not self.cta.special_places:
            for (name, offset, base), at in translation.specials.items():
                if not name.startswith("%") or name.startswith(_PER_CTA):
                    self._put_special(memory, name, offset, base, at)
                    place = slice(at, at + SLOT[base])
                    self.cta.special_places.append((place, memory[place].copy()))
        else:
            for place, values in self.cta.special_places:
                memory[place] = values
        return memory

    def _put_special(self, memory: Array, name: str, offset: int, base: str, at: int) -> None:
        if base == "p":
            memory[at : at + 4].view(np.uint32)[0] = state.pack_predicate(self.special[name].astype(bool))
            return
        if name.startswith("%"):
            value = self.special[name]
        else:
            value = np.full(32, self.machine.symbol(name, self.cta) + offset, np.uint64)
        dtype = KIND_DTYPE[base]
        memory[at : at + 32 * dtype.itemsize].view(dtype)[...] = value.astype(dtype)

    def new_registers(self) -> state.RegisterFile:
        """Registers by number, over one piece of memory."""
        native = self.machine.native
        translation = native.translation
        self.memory = state.aligned(translation.register_bytes)
        self.memory[:] = native.poison
        return state.RegisterFile(self.memory, translation.register_offsets, self.machine.program.storage)

    # -- operands

    def value(self, location: int, kind: str) -> Array:
        """The operand at a location: a view, or booleans of a predicate."""
        memory, at = self.bases[location >> BASE_SHIFT], location & (1 << BASE_SHIFT) - 1
        if kind == "p":
            return state.unpack_predicate(int(memory[at : at + 4].view(np.uint32)[0]))
        if kind == "x":
            return memory[at : at + 256].view(np.float32).reshape(2, 32)
        dtype = KIND_DTYPE[kind]
        return memory[at : at + 32 * dtype.itemsize].view(dtype)

    def put(self, location: int, kind: str, value: Array, m: Array | None) -> None:
        """Write a result for the lanes of a mask."""
        if kind == "p":
            at = location & (1 << BASE_SHIFT) - 1
            word = self.memory[at : at + 4].view(np.uint32)
            old = state.unpack_predicate(int(word[0]))
            word[0] = state.pack_predicate(value if m is None else np.where(m, value, old))
            return
        target = self.value(location, kind)
        if value.dtype != target.dtype:
            value = np.ascontiguousarray(value).view(target.dtype)
        if m is None:
            target[...] = value
        else:
            target[..., m] = value[..., m]

    # -- state

    state = field("state")

    @property
    def mask(self) -> Array | None:
        """The active lanes; None for all 32."""
        bits = self.struct.mask
        return None if bits == _FULL else state.unpack_predicate(bits)

    @mask.setter
    def mask(self, lanes: Array | None) -> None:
        self.struct.mask = _FULL if lanes is None else state.pack_predicate(lanes)
        self.struct.lanes = self.struct.mask.bit_count()

    @property
    def alive(self) -> Array:
        """The lanes that have not exited."""
        return state.unpack_predicate(self.struct.alive)

    @alive.setter
    def alive(self, lanes: Array) -> None:
        self.struct.alive = state.pack_predicate(lanes)

    @property
    def timed_out(self) -> bool:
        """A wait that may fail fails."""
        return bool(self.struct.timed_out)

    @timed_out.setter
    def timed_out(self, value: bool) -> None:
        self.struct.timed_out = int(value)

    @property
    def token(self) -> int | None:
        """The round of a named barrier at which this warp has arrived."""
        found = self.struct.token
        return None if found < 0 else int(found)

    @token.setter
    def token(self, value: int | None) -> None:
        self.struct.token = -1 if value is None else value

    @property
    def waiting(self) -> Any:
        """What a blocked warp waits for."""
        kind, index = self.struct.wait_kind, self.struct.wait_index
        if kind == layout.WAIT_MBARRIER:
            return self.cluster.ctas[index >> 16].mbarriers.number(index & 0xFFFF)
        if kind == layout.WAIT_NAMED:
            return self.cta.named.get(index)
        if kind == layout.WAIT_CLUSTER:
            return self.cluster.barrier
        return self.waiting_for

    @waiting.setter
    def waiting(self, on: Any) -> None:
        self.struct.wait_kind = layout.WAIT_OTHER
        self.waiting_for = on

    def block(self, on: Any) -> None:
        """Sleep until :meth:`wake`."""
        self.struct.state = BLOCKED
        self.waiting = on

    def wake(self) -> None:
        """Become runnable."""
        if self.struct.state == BLOCKED:
            self.struct.state = READY
            self.cluster.ready.append(self)

    def run(self, fuel: int) -> None:
        """Run until blocked, done, or ``fuel`` blocks have been executed."""
        self.struct.fuel = fuel
        self.machine.function(self.address)
        if self.struct.fault:
            self.machine.raise_error()

    def settle(self) -> None:
        """Add what native code counted to the plain warp's counters."""
        self.visits = {(i, True): v for i, v in enumerate(self._visits.tolist()) if v[0]}
        for path, n in zip(layout.PATHS, self.struct.bytes, strict=True):
            if n:
                self.count_bytes(path, n)
        for kind in self.struct.mma_kinds[: self.struct.kinds]:
            self.count_event(matrix.count_key(kind.kind, kind.m, kind.n), kind.count)

    def _local(self) -> Array:
        if self.local is None:
            self.local = np.full((32, LOCAL_BYTES), 0xFF, np.uint8)
            self.struct.local = state.address_of(self.local)
        return self.local
