"""Which runtime function performs a system operation, and what it is told; the rest is ``fa_host``'s."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fa4tune.emulator.checks_cluster import fence_effects
from fa4tune.emulator.isa import Operation
from fa4tune.emulator.isa_memory import is_strong
from fa4tune.emulator.native.kinds import BASE

#: (function, fields of OperationInfo); a field ``extra0`` is an element of ``extra``.
Call = tuple[str, dict[str, int]]
TABLE: dict[str, Callable[[Operation], Call | None]] = {}

#: The same for what only the checks look at.
CHECKED: dict[str, Callable[[Operation], Call | None]] = {
    "tcgen05.wait.ld": lambda o: ("fa_checked", {"mode": 0}),
    "tcgen05.wait.st": lambda o: ("fa_checked", {"mode": 1}),
    "fence": lambda o: (
        "fa_checked", {"mode": 2, "flag": fence_effects(o.attrs["scope"], o.instruction.modifiers)},
    ),
    "tcgen05.fence": lambda o: ("fa_checked", {"mode": 3, "flag": int(o.attrs["before"])}),
    "bulk.commit": lambda o: ("fa_checked", {"mode": 4}),
    "bulk.wait": lambda o: ("fa_checked", {"mode": 5, "count": o.attrs["count"]}),
}  # fmt: skip

#: These change nothing that this machine models.
NOTHING = ("nop", "fence", "yield", "tcgen05.fence", "tcgen05.wait.ld", "wgmma.fence")
#: Written out by the translator itself.
INLINE = ("elect", "vote.all", "vote.any", "vote.uni", "vote.ballot", "activemask", "zero64")

_REGISTER_BYTES = {"H": 2, "W": 4, "Q": 8}
_SPACES = {"shared": 0, "shared::cta": 0, "shared::cluster": 1, "global": 2, "generic": 3, "local": 4}


def native_call(operation: Operation, checked: bool = False) -> Call:
    """The function that performs an operation; ``fa_host`` where there is no native one."""
    make = (CHECKED.get(operation.op) if checked else None) or TABLE.get(operation.op)
    found = make(operation) if make is not None else None
    return found if found is not None else ("fa_host", {})


def _op(*names: str) -> Callable[[Callable[[Operation], Call | None]], Callable[[Operation], Call | None]]:
    def register(function: Callable[[Operation], Call | None]) -> Callable[[Operation], Call | None]:
        for name in names:
            TABLE[name] = function
        return function

    return register


def _generic(operation: Operation) -> int:
    """Whether the address operand is a 64-bit generic one."""
    return int(BASE[operation.src_kinds[0]] == "q")


def _access(operation: Operation, kinds: str, function: str) -> Call | None:
    attrs = operation.attrs
    space = _SPACES.get(attrs["space"])
    if space is None or len(set(kinds)) != 1 or kinds[0] not in _REGISTER_BYTES:
        return None
    register = _REGISTER_BYTES[kinds[0]]
    if attrs["size"] > register:
        return None
    return function, {
        "offset": attrs["offset"], "size": attrs["size"], "count": len(kinds), "mode": space,
        "flag": int(bool(attrs.get("signed"))), "extra0": register, "extra7": int(is_strong(operation)),
    }  # fmt: skip


@_op("ld.shared", "ld.global", "ld.generic", "ld.local")
def _load(operation: Operation) -> Call | None:
    return _access(operation, operation.dst_kinds, "fa_load")


@_op("st.shared", "st.global", "st.generic", "st.local")
def _store(operation: Operation) -> Call | None:
    return _access(operation, operation.src_kinds[1:], "fa_store")


@_op("ldmatrix", "stmatrix")
def _matrix(operation: Operation) -> Call:
    attrs = operation.attrs
    fields = {"offset": attrs["offset"], "count": attrs["count"], "flag": int(attrs["transpose"])}
    return f"fa_{operation.op}", fields


@_op("tcgen05.ld", "tcgen05.st")
def _tmem(operation: Operation) -> Call | None:
    attrs = operation.attrs
    if attrs["shape"] != "32x32b":
        return None
    name = "fa_tmem_load" if operation.op.endswith("ld") else "fa_tmem_store"
    return name, {"offset": attrs["offset"], "count": attrs["repeat"]}


@_op("mbarrier.init")
def _init(operation: Operation) -> Call:
    return "fa_mbarrier_init", {"offset": operation.attrs["offset"], "mode": _generic(operation)}


@_op("mbarrier.arrive")
def _arrive(operation: Operation) -> Call:
    attrs = operation.attrs
    mode = _generic(operation) | 2 * attrs["expect"] | 4 * attrs["counted"]
    relaxed = int(attrs["semantics"] == "relaxed")
    return "fa_mbarrier_arrive", {
        "offset": attrs["offset"], "mode": mode, "flag": int(attrs["drop"]), "extra7": relaxed,
    }  # fmt: skip


@_op("mbarrier.wait")
def _wait(operation: Operation) -> Call:
    attrs = operation.attrs
    mode = _generic(operation) | 2 * attrs["parity"] | 4 * attrs["blocking"]
    return "fa_mbarrier_wait", {"offset": attrs["offset"], "mode": mode}


@_op("barrier.sync", "barrier.arrive")
def _barrier(operation: Operation) -> Call:
    return "fa_barrier", {"count": len(operation.src), "mode": int(operation.op == "barrier.sync")}


@_op("barrier.cluster.arrive", "barrier.cluster.wait")
def _cluster(operation: Operation) -> Call:
    relaxed = int(operation.attrs["semantics"] == "relaxed")
    return f"fa_cluster_{operation.op.rsplit('.', 1)[1]}", {"extra7": relaxed}


@_op("shfl.up", "shfl.down", "shfl.bfly", "shfl.idx")
def _shfl(operation: Operation) -> Call:
    return "fa_shfl", {"mode": ("up", "down", "bfly", "idx").index(operation.op[5:])}


@_op("mapa")
def _mapa(operation: Operation) -> Call:
    return "fa_mapa", {"mode": _generic(operation)}


@_op("wgmma.mma")
def _wgmma(operation: Operation) -> Call:
    attrs = operation.attrs
    mode = int(attrs["from_registers"]) | 2 * attrs["transpose_a"] | 4 * attrs["transpose_b"]
    mode |= 8 * (attrs["negate_a"] < 0) | 16 * (attrs["negate_b"] < 0)
    return "fa_wgmma", {"size": int(attrs["type"] == "bf16"), "mode": mode, "count": attrs["n"]}


@_op("wgmma.commit")
def _wgmma_commit(operation: Operation) -> Call:
    return "fa_wgmma_commit", {}


@_op("wgmma.wait")
def _wgmma_wait(operation: Operation) -> Call:
    return "fa_wgmma_wait", {"count": operation.attrs["count"]}


@_op("tcgen05.mma")
def _tensor_mma(operation: Operation) -> Call | None:
    attrs = operation.attrs
    disabled = len(operation.src) - 5
    if disabled > 8:
        return None
    mode = int(attrs["from_tmem"]) | 2 * (attrs["cta_group"] == 2)
    fields = {"offset": attrs["d_offset"], "offset2": attrs["a_offset"], "mode": mode, "count": disabled}
    return "fa_tensor_mma", fields


@_op("tcgen05.commit")
def _tensor_commit(operation: Operation) -> Call:
    mode = _generic(operation) | 2 * int(operation.attrs["multicast"])
    return "fa_tensor_commit", {"offset": operation.attrs["offset"], "mode": mode}


@_op("tma.load")
def _tma_load(operation: Operation) -> Call:
    attrs = operation.attrs
    return "fa_tma_load", {
        "offset": attrs["offset"], "offset2": attrs["barrier_offset"], "count": attrs["rank"],
        "mode": int(attrs["multicast"]) | 2 * (attrs["cta_group"] == 2),
    }  # fmt: skip


@_op("tma.store")
def _tma_store(operation: Operation) -> Call | None:
    attrs = operation.attrs
    if attrs["reduction"] is not None:
        return None
    return "fa_tma_store", {"offset": attrs["offset"], "count": attrs["rank"]}


@_op("tcgen05.wait.st", "bulk.commit", "bulk.wait")
def _late_only(operation: Operation) -> Call:
    return "fa_late_only", {}


def fill(info: Any, fields: dict[str, int]) -> None:
    """Write the fields into an OperationInfo."""
    for name, value in fields.items():
        if name.startswith("extra"):
            info.extra[int(name[5:])] = value
        else:
            setattr(info, name, value)
