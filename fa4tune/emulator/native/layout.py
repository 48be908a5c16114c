"""The structs of ``runtime.h`` as ctypes: what translated code, the C runtime and Python share."""

from __future__ import annotations

import ctypes
from ctypes import (
    CFUNCTYPE,
    POINTER,
    c_int16,
    c_int32,
    c_int64,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
)

READY, BLOCKED, DONE = 0, 1, 2
OK, SUSPEND, FAULT = 0, 1, 2
WAIT_NONE, WAIT_MBARRIER, WAIT_NAMED, WAIT_CLUSTER, WAIT_OTHER = range(5)
MAX_STACK, MAX_WAITERS, MAX_BARS, MAX_WARPS, MAX_MMA, MAX_KINDS = 128, 64, 256, 512, 512, 16
PATHS = (
    "global_read", "global_write", "smem_read", "smem_write", "dsmem_read", "dsmem_write", "tmem_read",
    "tmem_write", "tma_read", "tma_write", "mma_smem",
)  # fmt: skip
BASE_SHIFT = 28  #: of the base in an operand's location

HOST = CFUNCTYPE(c_int32, c_void_p, c_int32, c_uint32)
REPORT = CFUNCTYPE(None)


class OperationInfo(ctypes.Structure):
    """What an operation's runtime function must know beside its sources."""

    _fields_ = [
        ("offset", c_int64),
        ("first", c_int32),
        ("destinations", c_int32),
        ("size", c_int32),
        ("count", c_int32),
        ("mode", c_int32),
        ("flag", c_int32),
        ("offset2", c_int64),
        ("extra", c_int32 * 8),
    ]


class MBarrierState(ctypes.Structure):
    """An mbarrier."""

    _fields_ = [
        ("count", c_int32),
        ("pending", c_int32),
        ("tx", c_int32),
        ("live", c_int32),
        ("phase", c_int64),
        ("offset", c_int32),
        ("waiting", c_int32),
        ("waiters", c_int16 * MAX_WAITERS),
    ]


class NamedBarrierState(ctypes.Structure):
    """One of a CTA's named barriers."""

    _fields_ = [
        ("arrived", c_int32),
        ("expected", c_int32),
        ("used", c_int32),
        ("waiting", c_int32),
        ("generation", c_int64),
        ("waiters", c_int16 * MAX_WAITERS),
    ]


class Region(ctypes.Structure):
    """A buffer in global memory."""

    _fields_ = [("address", c_uint64), ("nbytes", c_int64), ("bytes", c_void_p), ("writable", c_int64)]


class MachineState(ctypes.Structure):
    """A launch."""

    _fields_ = [
        ("stamp", c_int64),
        ("progress", c_int64),
        ("parameters", c_void_p),
        ("parameter_bytes", c_int64),
        ("regions", c_void_p),
        ("region_count", c_int32),
        ("late", c_int32),
        ("observed", c_int32),
        ("blocks", c_int32),
        ("operations", c_void_p),
        ("gemm", c_void_p),
        ("matrix_ns", c_int64),
    ]


class Mma(ctypes.Structure):
    """A matrix operation that was issued and not yet performed."""

    _fields_ = [
        ("operation", c_int32),
        ("accumulate", c_int32),
        ("d", c_uint64),
        ("a", c_uint64),
        ("b", c_uint64),
        ("idesc", c_uint32),
        ("off", c_uint32 * 8),
        ("warp", c_int32),
    ]


class MmaCount(ctypes.Structure):
    """How many matrix operations of one shape a warp issued."""

    _fields_ = [
        ("kind", c_int32),
        ("m", c_int32),
        ("n", c_int32),
        ("pad", c_int32),
        ("count", c_int64),
    ]


class Frame(ctypes.Structure):
    """An entry of a warp's reconvergence stack."""

    _fields_ = [("pc", c_int32), ("join", c_int32), ("mask", c_uint32), ("pad", c_uint32)]


class WarpState(ctypes.Structure):
    """A warp."""

    _fields_ = [
        ("registers", c_void_p),
        ("special", c_void_p),
        ("constants", c_void_p),
        ("local", c_void_p),
        ("written", c_void_p),
        ("cta", c_void_p),
        ("cluster", c_void_p),
        ("operations", c_void_p),
        ("operands", c_void_p),
        ("visits", c_void_p),
        ("steps", c_int64),
        ("lanes", c_int64),
        ("mask", c_uint32),
        ("alive", c_uint32),
        ("pc", c_int32),
        ("join", c_int32),
        ("depth", c_int32),
        ("fuel", c_int32),
        ("state", c_int32),
        ("fault", c_int32),
        ("index", c_int32),
        ("number", c_int32),
        ("threads", c_int32),
        ("timed_out", c_int32),
        ("wait_kind", c_int32),
        ("wait_index", c_int32),
        ("token", c_int64),
        ("cluster_round", c_int64),
        ("open_mmas", c_int32),
        ("mma_count", c_int32),
        ("group_count", c_int32),
        ("kinds", c_int32),
        ("groups", c_int32 * MAX_MMA),
        ("mmas", Mma * MAX_MMA),
        ("mma_kinds", MmaCount * MAX_KINDS),
        ("bytes", c_int64 * len(PATHS)),
        ("stack", Frame * MAX_STACK),
    ]


class CtaState(ctypes.Structure):
    """A CTA."""

    _fields_ = [
        ("cluster", c_void_p),
        ("smem", c_void_p),
        ("stamps", c_void_p),
        ("tmem", c_void_p),
        ("bar_index", POINTER(c_uint16)),
        ("bars", POINTER(MBarrierState)),
        ("named", POINTER(NamedBarrierState)),
        ("operand_cache", c_void_p),
        ("smem_bytes", c_int32),
        ("rank", c_int32),
        ("bar_count", c_int32),
        ("thread_count", c_int32),
        ("tmem_owner", c_int16 * 16),
        ("tensor_count", c_int32),
        ("pad", c_int32),
        ("tensor", Mma * MAX_MMA),
    ]


class ClusterState(ctypes.Structure):
    """A cluster and its queue of runnable warps."""

    _fields_ = [
        ("machine", c_void_p),
        ("checks", c_void_p),
        ("ctas", POINTER(c_void_p)),
        ("warps", POINTER(c_void_p)),
        ("host", HOST),
        ("run", c_void_p),
        ("size", c_int32),
        ("warp_count", c_int32),
        ("ready_count", c_int32),
        ("stalled", c_int32),
        ("arrived", c_int32),
        ("expected", c_int32),
        ("waiting", c_int32),
        ("current", c_int32),
        ("generation", c_int64),
        ("waiters", c_int16 * MAX_WARPS),
        ("ready", c_int16 * MAX_WARPS),
    ]


class CheckedAccess(ctypes.Structure):
    """An access as the checks note it."""

    _fields_ = [
        ("component", c_int32),
        ("epoch", c_int32),
        ("issued", c_int32),
        ("operation", c_int32),
        ("warp", c_int32),
        ("family", c_int32),
        ("what", c_int32),
    ]


class Report(ctypes.Structure):
    """What the checks found, to be named."""

    _fields_ = [
        ("kind", c_int32),
        ("warp", c_int32),
        ("operation", c_int32),
        ("what", c_int32),
        ("pad", c_int32),
        ("flags", c_int32),
        ("tensor", c_int32),
        ("cta", c_int32),
        ("barrier", c_int32),
        ("index", c_int32),
        ("by", CheckedAccess),
        ("against", CheckedAccess),
    ]


class RegisterCheck(ctypes.Structure):
    """Registers to look at before an operation."""

    _fields_ = [
        ("operation", c_int32),
        ("flying", c_int32),
        ("loading", c_int32),
        ("moved", c_int32),
        ("touched", c_int32),
        ("clears", c_int32),
        ("first_unset", c_int32),
        ("unset_count", c_int32),
    ]


class RegisterTable(ctypes.Structure):
    """The checks of a program's registers."""

    _fields_ = [
        ("checks", c_void_p),
        ("unset", c_void_p),
        ("masks", c_void_p),
        ("words", c_int32),
        ("tracked", c_int32),
        ("start", c_int32),
        ("pad", c_int32),
    ]


#: In the order of ``fa_sizes`` of the runtime.
STRUCTS: tuple[type[ctypes.Structure], ...] = (
    OperationInfo, MBarrierState, NamedBarrierState, Region, MachineState, Mma, MmaCount, WarpState, CtaState,
    ClusterState, CheckedAccess, Report, RegisterCheck, RegisterTable,
)  # fmt: skip
