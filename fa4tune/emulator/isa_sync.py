"""Decoders of barriers, fences, warp-wide operations and scheduling hints."""

from __future__ import annotations

from fa4tune.emulator.isa import TYPE_KIND, Modifiers, Operation, address, opcode, operand_count, unsupported
from fa4tune.emulator.isa_memory import SCOPES, address_kind, system
from fa4tune.emulator.ptx import Immediate, Instruction, Operand, Pair, Register, Sink

_SHARED = ("shared", "shared::cta", "shared::cluster")


@opcode("mbarrier")
def _mbarrier(ins: Instruction, m: Modifiers) -> Operation:
    name = m.need(
        "init", "inval", "arrive", "arrive_drop", "expect_tx", "complete_tx", "test_wait", "try_wait",
        "pending_count"
    )  # fmt: skip
    if name in ("test_wait", "try_wait"):
        return _mbarrier_wait(ins, m, name)
    no_complete = m.take("noComplete") is not None
    expect = name == "expect_tx"
    if name in ("arrive", "arrive_drop"):
        expect = m.take("expect_tx") is not None
        no_complete = no_complete or m.take("noComplete") is not None
    semantics = m.take("release", "relaxed")
    if semantics:
        m.take(*SCOPES)
    space = m.take(*_SHARED) or "generic"
    m.need("b64")
    if name == "pending_count":
        raise unsupported(ins, "reads the pending count of a state")
    kind = address_kind(space)
    if name in ("init", "inval", "expect_tx", "complete_tx"):
        operand_count(ins, 1 if name == "inval" else 2)
        base, offset = address(ins, ins.operands[0])
        src: tuple[Operand, ...] = (base, *ins.operands[1:])
        return system(
            ins, f"mbarrier.{name}", "barrier", src=src, src_kinds=kind + "u" * (len(src) - 1), offset=offset
        )
    n = operand_count(ins, 1, 2, 3)
    has_state = not (n == 1 or not isinstance(ins.operands[0], Register | Sink))
    operands = ins.operands[1:] if has_state else ins.operands
    state = ins.operands[:1] if has_state and isinstance(ins.operands[0], Register) else ()
    base, offset = address(ins, operands[0])
    extra = operands[1:]
    if expect and len(extra) != 1:
        raise unsupported(ins, "wants the byte count")
    return system(
        ins, "mbarrier.arrive", "barrier", dst=state, dst_kinds="q" * len(state), src=(base, *extra),
        src_kinds=kind + "u" * len(extra), offset=offset, expect=expect, drop=name == "arrive_drop",
        counted=bool(extra) and not expect, no_complete=no_complete, semantics=semantics or "release",
    )  # fmt: skip


def _mbarrier_wait(ins: Instruction, m: Modifiers, name: str) -> Operation:
    parity = m.take("parity") is not None
    if m.take("acquire", "relaxed"):
        m.take(*SCOPES)
    space = m.take("shared", "shared::cta") or "generic"
    m.need("b64")
    n = operand_count(ins, 3, 4)
    if n == 4 and name == "test_wait":
        raise unsupported(ins, "has a time limit")
    base, offset = address(ins, ins.operands[1])
    return system(
        ins, "mbarrier.wait", "wait", dst=ins.operands[:1], dst_kinds="p", src=(base, ins.operands[2]),
        src_kinds=address_kind(space) + ("u" if parity else "q"), offset=offset, parity=parity,
        blocking=name == "try_wait", suspends=name == "try_wait",
    )  # fmt: skip


@opcode("bar", "barrier")
def _bar(ins: Instruction, m: Modifiers) -> Operation:
    if m.take("cluster"):
        name = m.need("arrive", "wait")
        semantics = m.take("release", "relaxed") if name == "arrive" else m.take("acquire")
        m.take("aligned")
        operand_count(ins, 0)
        return system(
            ins, f"barrier.cluster.{name}", "barrier" if name == "arrive" else "wait",
            suspends=name == "wait", semantics=semantics,
        )  # fmt: skip
    if m.take("warp"):
        m.need("sync")
        return system(ins, "nop", "barrier")
    m.take("cta")
    name = m.need("sync", "arrive", "red")
    if name == "red":
        raise unsupported(ins, "reduces over a barrier")
    m.take("aligned")
    n = operand_count(ins, 1, 2)
    if name == "arrive" and n == 1:
        raise unsupported(ins, "arrives without a thread count")
    return system(
        ins, f"barrier.{name}", "wait" if name == "sync" else "barrier", src=ins.operands, src_kinds="u" * n,
        suspends=name == "sync",
    )  # fmt: skip


@opcode("fence", "membar")
def _fence(ins: Instruction, m: Modifiers) -> Operation:
    if ins.opcode == "membar":
        m.need("cta", "gl", "sys")
        return system(ins, "fence", "fence", scope="thread")
    if m.take("proxy"):
        kind = m.need("async", "alias", "tensormap::generic", "async::generic")
        while m.rest:
            m.need(*SCOPES, "acquire", "release", "sync_restrict::shared::cta",
            "sync_restrict::shared::cluster",
                   "global", "shared::cta", "shared::cluster")  # fmt: skip
        return system(ins, "fence", "fence", scope=f"proxy.{kind}")
    if m.take("mbarrier_init"):
        m.need("release")
        m.need("cluster")
        return system(ins, "fence", "fence", scope="mbarrier_init")
    m.need("acq_rel", "sc", "acquire", "release")
    m.take("sync_restrict::shared::cta", "sync_restrict::shared::cluster")
    m.take(*SCOPES)
    return system(ins, "fence", "fence", scope="thread")


@opcode("shfl")
def _shfl(ins: Instruction, m: Modifiers) -> Operation:
    m.need("sync")
    mode = m.need("up", "down", "bfly", "idx")
    m.need("b32")
    operand_count(ins, 5)
    d = ins.operands[0]
    dst = (d.first, d.second) if isinstance(d, Pair) else (d,)
    return system(
        ins,
        f"shfl.{mode}",
        "shuffle",
        dst=dst,
        dst_kinds="Wp"[: len(dst)],
        src=ins.operands[1:4],
        src_kinds="Wuu",
    )


@opcode("vote", "match")
def _vote(ins: Instruction, m: Modifiers) -> Operation:
    if ins.opcode == "vote":
        m.need("sync")
        mode = m.need("all", "any", "uni", "ballot")
        m.need("b32" if mode == "ballot" else "pred")
        return system(
            ins, f"vote.{mode}", "vote", dst=ins.operands[:1], dst_kinds="u" if mode == "ballot" else "p",
            src=ins.operands[1:2], src_kinds="p",
        )  # fmt: skip
    mode = m.need("any", "all")
    m.need("sync")
    kind = TYPE_KIND[m.need("b32", "b64")]
    d = ins.operands[0]
    dst = (d.first, d.second) if isinstance(d, Pair) else (d,)
    return system(
        ins,
        f"match.{mode}",
        "vote",
        dst=dst,
        dst_kinds="up"[: len(dst)],
        src=ins.operands[1:2],
        src_kinds=kind,
    )


@opcode("elect")
def _elect(ins: Instruction, m: Modifiers) -> Operation:
    m.need("sync")
    operand_count(ins, 2)
    d = ins.operands[0]
    if not isinstance(d, Pair):
        raise unsupported(ins, "has no predicate destination")
    if isinstance(d.first, Sink):
        return system(ins, "elect", "vote", dst=(d.second,), dst_kinds="p")
    return system(ins, "elect", "vote", dst=(d.first, d.second), dst_kinds="up")


@opcode("activemask")
def _activemask(ins: Instruction, m: Modifiers) -> Operation:
    m.need("b32")
    return system(ins, "activemask", "vote", dst=ins.operands[:1], dst_kinds="u")


@opcode("redux")
def _redux(ins: Instruction, m: Modifiers) -> Operation:
    m.need("sync")
    op = m.need("add", "min", "max", "and", "or", "xor")
    absolute = m.take("abs") is not None
    nan = m.take("NaN") is not None
    kind = TYPE_KIND[m.need("u32", "s32", "b32", "f32")]
    return system(
        ins, "redux", "shuffle", dst=ins.operands[:1], dst_kinds=kind, src=ins.operands[1:2], src_kinds=kind,
        operation=op, absolute=absolute, nan=nan, kind=kind,
    )  # fmt: skip


@opcode("setmaxnreg")
def _setmaxnreg(ins: Instruction, m: Modifiers) -> Operation:
    direction = m.need("inc", "dec")
    m.need("sync")
    m.need("aligned")
    m.need("u32")
    count = ins.operands[0]
    if not isinstance(count, Immediate) or not 24 <= count.value <= 256 or count.value % 8:
        raise unsupported(ins, "wants a literal multiple of 8 from 24 to 256")
    return system(ins, f"setmaxnreg.{direction}", "control", count=count.value, suspends=direction == "inc")


@opcode("nanosleep", "griddepcontrol")
def _sleep(ins: Instruction, m: Modifiers) -> Operation:
    if ins.opcode == "nanosleep":
        m.need("u32")
        return system(ins, "yield", "control")
    m.need("launch_dependents", "wait")
    return system(ins, "nop", "control")
