"""Decoders of loads, stores, atomics, matrix moves and asynchronous copies."""

from __future__ import annotations

from typing import Any

from fa4tune.emulator.isa import (
    RAW_KIND,
    TYPE_KIND,
    Modifiers,
    Operation,
    address,
    flat,
    opcode,
    operand_count,
    sink_or,
    unsupported,
)
from fa4tune.emulator.ptx import Immediate, Instruction, Memory, Operand, Pair, Sink, Vector

TYPE_BYTES = {"b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "b32": 4, "u32": 4, "s32": 4, "f32": 4}
TYPE_BYTES |= {
    "b64": 8,
    "u64": 8,
    "s64": 8,
    "f64": 8,
    "f16": 2,
    "bf16": 2,
    "f16x2": 4,
    "bf16x2": 4,
    "b128": 16,
}
SCOPES = ("cta", "cluster", "gpu", "sys")
SPACES = ("global", "shared", "shared::cta", "shared::cluster", "local", "param", "const")


def system(
    ins: Instruction,
    op: str,
    unit: str,
    *,
    dst: tuple[Operand, ...] = (),
    dst_kinds: str = "",
    src: tuple[Operand, ...] = (),
    src_kinds: str = "",
    suspends: bool = False,
    **attrs: Any,
) -> Operation:
    """An operation that touches the machine's state."""
    return Operation(op, "system", dst, dst_kinds, src, src_kinds, unit, ins, attrs, suspends)


def address_kind(space: str) -> str:
    """Shared and TMEM addresses are 32 bits, all others 64."""
    return "u" if space.startswith("shared") else "q"


def _memory_modifiers(m: Modifiers) -> tuple[str, str, int, str]:
    """Semantics, space, vector width and type of a load or store; cache hints change nothing here."""
    semantics = m.take("weak", "volatile", "relaxed", "acquire", "release", "mmio") or "weak"
    if semantics not in ("weak", "volatile"):
        m.take(*SCOPES)
    space = m.take(*SPACES) or "generic"
    if m.take("nc"):
        semantics = "nc"
    while m.rest and (m.rest[0] in ("ca", "cg", "cs", "lu", "cv", "wb", "wt") or m.rest[0].startswith("L")):
        m.rest.pop(0)
    width = int((m.take("v2", "v4", "v8") or "v1")[1:])
    kind = m.need(*TYPE_BYTES)
    return semantics, space, width, kind


def is_strong(operation: Operation) -> bool:
    """Whether a load or store may synchronise with others (PTX memory model: strong operations)."""
    return operation.attrs["semantics"] not in ("weak", "nc")


def register_kind(operand: Operand, kind_name: str) -> str:
    """The kind that a load or store uses for a register: as wide as the register, without meaning."""
    if kind_name in TYPE_KIND:
        return RAW_KIND[TYPE_KIND[kind_name]]
    return {"h": "H", "w": "W", "d": "Q"}[getattr(operand, "cls", "h")]  # 8-bit types in wider registers


@opcode("ld", "ldu")
def _ld(ins: Instruction, m: Modifiers) -> Operation:
    semantics, space, width, kind_name = _memory_modifiers(m)
    operand_count(ins, 2, 3)
    dst = flat(ins.operands[:1])
    if len(dst) != width:
        raise unsupported(ins, "has a vector of another width")
    base, offset = address(ins, ins.operands[1])
    kinds = "".join(register_kind(d, kind_name) for d in dst)
    if any(isinstance(d, Sink) for d in dst):
        raise unsupported(ins, "loads into `_`")
    return system(
        ins, f"ld.{space.split(':')[0]}", "memory", dst=dst, dst_kinds=kinds, src=(base,),
        src_kinds="q" if space == "param" else address_kind(space), offset=offset, size=TYPE_BYTES[kind_name],
        signed=kind_name in ("s8", "s16", "s32"), semantics=semantics, space=space,
    )  # fmt: skip


@opcode("st")
def _st(ins: Instruction, m: Modifiers) -> Operation:
    if m.take("async"):
        return _st_async(ins, m)
    if m.rest and m.rest[0] == "bulk":
        raise unsupported(ins, "is a bulk store")
    semantics, space, width, kind_name = _memory_modifiers(m)
    operand_count(ins, 2, 3)
    src = flat(ins.operands[1:2])
    if len(src) != width:
        raise unsupported(ins, "has a vector of another width")
    base, offset = address(ins, ins.operands[0])
    kinds = "".join(register_kind(s, kind_name) for s in src)
    return system(
        ins, f"st.{space.split(':')[0]}", "memory", src=(base, *src), src_kinds=address_kind(space) + kinds,
        offset=offset, size=TYPE_BYTES[kind_name], semantics=semantics, space=space,
    )  # fmt: skip


def _st_async(ins: Instruction, m: Modifiers) -> Operation:
    m.take("weak")
    m.need("shared::cluster")
    m.need("mbarrier::complete_tx::bytes")
    width = int((m.take("v2", "v4") or "v1")[1:])
    kind_name = m.need("b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64")
    operand_count(ins, 3)
    values = flat(ins.operands[1:2])
    if len(values) != width:
        raise unsupported(ins, "has a vector of another width")
    base, offset = address(ins, ins.operands[0])
    bar, bar_offset = address(ins, ins.operands[2])
    kinds = "".join(register_kind(v, kind_name) for v in values)
    return system(
        ins, "st.async", "async", src=(base, bar, *values), src_kinds="uu" + kinds, offset=offset,
        barrier_offset=bar_offset, size=TYPE_BYTES[kind_name],
    )  # fmt: skip


@opcode("atom", "red")
def _atom(ins: Instruction, m: Modifiers) -> Operation:
    if ins.opcode == "red" and m.rest and m.rest[0] == "async":
        raise unsupported(ins, "is asynchronous")
    semantics = m.take("relaxed", "acquire", "release", "acq_rel") or "relaxed"
    m.take(*SCOPES)
    space = m.take("global", "shared", "shared::cta", "shared::cluster") or "generic"
    operation = m.need("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")
    m.take("noftz")
    m.take("L2::cache_hint")
    width = int((m.take("v2", "v4", "v8") or "v1")[1:])
    kind_name = m.need(
        "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64", "f16x2", "bf16x2", "f16", "bf16"
    )
    kind = TYPE_KIND[kind_name]
    returns = ins.opcode == "atom"
    operands = ins.operands[1:] if returns else ins.operands
    dst = flat(ins.operands[:1]) if returns else ()
    if returns and isinstance(ins.operands[0], Sink):
        dst = ()
    base, offset = address(ins, operands[0])
    n_values = 2 if operation == "cas" else 1
    values = flat(operands[1 : 1 + n_values])
    if len(values) != width * n_values:
        raise unsupported(ins, "has operands of another shape")
    return system(
        ins, "atom", "atomic", dst=dst, dst_kinds=kind * len(dst), src=(base, *values),
        src_kinds=address_kind(space) + kind * len(values), offset=offset, operation=operation, kind=kind,
        type=kind_name, size=TYPE_BYTES[kind_name], space=space, semantics=semantics, width=width,
    )  # fmt: skip


@opcode("prefetch", "prefetchu", "applypriority", "discard")
def _prefetch(ins: Instruction, m: Modifiers) -> Operation:
    m.rest.clear()  # a hint: nothing to model but that the address exists, which its real users check
    return system(ins, "nop", "hint")


@opcode("createpolicy")
def _createpolicy(ins: Instruction, m: Modifiers) -> Operation:
    m.rest.clear()
    return system(ins, "zero64", "hint", dst=ins.operands[:1], dst_kinds="Q")


@opcode("ldmatrix", "stmatrix")
def _matrix(ins: Instruction, m: Modifiers) -> Operation:
    m.need("sync")
    m.need("aligned")
    m.need("m8n8")
    count = int(m.need("x1", "x2", "x4")[1:])
    transpose = m.take("trans") is not None
    m.take("shared", "shared::cta")
    m.need("b16")
    operand_count(ins, 2)
    load = ins.opcode == "ldmatrix"
    registers = flat(ins.operands[:1] if load else ins.operands[1:])
    if len(registers) != count:
        raise unsupported(ins, "has a vector of another width")
    base, offset = address(ins, ins.operands[1 if load else 0])
    if load:
        return system(
            ins, "ldmatrix", "memory", dst=registers, dst_kinds="W" * count, src=(base,), src_kinds="u",
            offset=offset, count=count, transpose=transpose,
        )  # fmt: skip
    return system(
        ins, "stmatrix", "memory", src=(base, *registers), src_kinds="u" + "W" * count, offset=offset,
        count=count, transpose=transpose,
    )  # fmt: skip


@opcode("movmatrix")
def _movmatrix(ins: Instruction, m: Modifiers) -> Operation:
    for word in ("sync", "aligned", "m8n8", "trans", "b16"):
        m.need(word)
    return system(
        ins, "movmatrix", "shuffle", dst=ins.operands[:1], dst_kinds="W", src=ins.operands[1:], src_kinds="W"
    )


@opcode("mapa", "getctarank")
def _mapa(ins: Instruction, m: Modifiers) -> Operation:
    space = m.take("shared::cluster")
    size = m.need("u32", "u64")
    kind = "u" if space else "q"
    if ins.opcode == "getctarank":
        return system(
            ins,
            "getctarank",
            "int",
            dst=ins.operands[:1],
            dst_kinds="u",
            src=ins.operands[1:],
            src_kinds=kind,
        )
    if (size == "u32") != bool(space):
        raise unsupported(ins, "maps an address of this size")
    return system(
        ins, "mapa", "int", dst=ins.operands[:1], dst_kinds=kind, src=ins.operands[1:], src_kinds=kind + "u"
    )


# -- asynchronous copies


@opcode("cp")
def _cp(ins: Instruction, m: Modifiers) -> Operation:
    reduce = m.take("reduce") is not None
    m.need("async")
    if m.take("bulk"):
        if m.take("tensor"):
            return _cp_tensor(ins, m, reduce)
        return _cp_bulk(ins, m, reduce)
    if m.take("commit_group"):
        return system(ins, "cp.async.commit", "async")
    if m.take("wait_group"):
        return _wait(ins, "cp.async.wait")
    if m.take("wait_all"):
        return system(ins, "cp.async.wait", "wait", count=0, suspends=False)
    if m.take("mbarrier"):
        m.need("arrive")
        noinc = m.take("noinc") is not None
        m.take("shared", "shared::cta")
        m.need("b64")
        base, offset = address(ins, ins.operands[0])
        return system(
            ins, "cp.async.mbarrier", "async", src=(base,), src_kinds="u", offset=offset, noinc=noinc
        )
    m.need("ca", "cg")
    m.need("shared", "shared::cta")
    m.need("global")
    hint = False
    while m.rest and m.rest[0].startswith("L2::"):
        hint |= m.rest.pop(0) == "L2::cache_hint"
    n = operand_count(ins, 3, 4, 5)
    size = ins.operands[2]
    if not isinstance(size, Immediate) or size.value not in (4, 8, 16):
        raise unsupported(ins, "copies a size that is no literal 4, 8 or 16")
    dst, dst_offset = address(ins, ins.operands[0])
    src, src_offset = address(ins, ins.operands[1])
    has_size = n - (1 if hint else 0) == 4
    extra = ins.operands[3:4] if has_size else ()
    return system(
        ins, "cp.async", "async", src=(dst, src, *extra), src_kinds="uq" + "u" * len(extra),
        dst_offset=dst_offset, src_offset=src_offset, size=size.value,
    )  # fmt: skip


def _wait(ins: Instruction, op: str, **attrs: Any) -> Operation:
    count = ins.operands[0]
    if not isinstance(count, Immediate):
        raise unsupported(ins, "waits for a number that is no literal")
    return system(ins, op, "wait", count=count.value, **attrs)


def _reduction(m: Modifiers, reduce: bool) -> str | None:
    return m.need("add", "min", "max", "inc", "dec", "and", "or", "xor") if reduce else None


def _cp_bulk(ins: Instruction, m: Modifiers, reduce: bool) -> Operation:
    if m.take("commit_group"):
        return system(ins, "bulk.commit", "async")
    if m.take("wait_group"):
        return _wait(ins, "bulk.wait", read=m.take("read") is not None)
    if m.take("prefetch"):
        m.rest.clear()
        return system(ins, "nop", "hint")
    to = m.need("shared::cluster", "shared::cta", "global")
    of = m.need("global", "shared::cta")
    group = m.need("mbarrier::complete_tx::bytes", "bulk_group") == "bulk_group"
    multicast = m.take("multicast::cluster") is not None
    hint = m.take("L2::cache_hint") is not None
    operation = _reduction(m, reduce)
    m.take("noftz")
    kind = m.need("f16", "bf16", "b32", "u32", "s32", "b64", "u64", "s64", "f32", "f64") if reduce else None
    operands = list(ins.operands)
    dst, dst_offset = address(ins, operands.pop(0))
    src, src_offset = address(ins, operands.pop(0))
    size = operands.pop(0)
    flat_src: list[Operand] = [dst, src, size]
    kinds = address_kind(to) + address_kind(of) + "u"
    bar_offset = 0
    if not group:
        bar, bar_offset = address(ins, operands.pop(0))
        flat_src.append(bar)
        kinds += "u"
    if multicast:
        flat_src.append(operands.pop(0))
        kinds += "h"
    if len(operands) != (1 if hint else 0):
        raise unsupported(ins, "has an unexpected number of operands")
    return system(
        ins, "bulk.copy", "tma", src=tuple(flat_src), src_kinds=kinds, to=to, of=of, group=group,
        multicast=multicast, dst_offset=dst_offset, src_offset=src_offset, barrier_offset=bar_offset,
        reduction=operation, type=kind,
    )  # fmt: skip


def _cp_tensor(ins: Instruction, m: Modifiers, reduce: bool) -> Operation:
    rank = int(m.need("1d", "2d", "3d", "4d", "5d")[0])
    to = m.need("shared::cluster", "shared::cta", "global")
    of = m.need("global", "shared::cta")
    operation = _reduction(m, reduce)
    m.take("tile")
    group = m.need("mbarrier::complete_tx::bytes", "bulk_group") == "bulk_group"
    options = set()
    while m.rest and m.rest[0] in ("multicast::cluster", "L2::cache_hint", "cta_group::1", "cta_group::2"):
        options.add(m.rest.pop(0))
    operands = list(ins.operands)
    load = of == "global"
    shared_operand = operands.pop(0) if load else None
    tensor = operands.pop(0)
    if not load:
        shared_operand = operands.pop(0)
    if not isinstance(tensor, Memory) or tensor.coordinates is None or len(tensor.coordinates) != rank:
        raise unsupported(ins, f"wants a tensor with {rank} coordinates")
    assert shared_operand is not None
    shared, offset = address(ins, shared_operand)
    src: list[Operand] = [shared, tensor.base, *tensor.coordinates]
    kinds = "uq" + "i" * rank
    bar_offset = 0
    if not group:
        bar, bar_offset = address(ins, operands.pop(0))
        src.append(bar)
        kinds += "u"
    multicast = "multicast::cluster" in options
    if multicast:
        src.append(operands.pop(0))
        kinds += "h"
    if len(operands) != (1 if "L2::cache_hint" in options else 0):
        raise unsupported(ins, "has an unexpected number of operands")
    pair = 2 if "cta_group::2" in options else 1
    return system(
        ins, "tma.load" if load else "tma.store", "tma", src=tuple(src), src_kinds=kinds, rank=rank,
        offset=offset, barrier_offset=bar_offset, multicast=multicast, cta_group=pair, reduction=operation,
        to=to, group=group,
    )  # fmt: skip


__all__ = ["Pair", "Vector", "address_kind", "sink_or", "system"]
