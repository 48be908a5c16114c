"""Decoders of the tensor-core instructions: wgmma (Hopper) and tcgen05 (Blackwell)."""

from __future__ import annotations

import re

from fa4tune.emulator.isa import Modifiers, Operation, address, flat, opcode, operand_count, unsupported
from fa4tune.emulator.isa_memory import address_kind, system
from fa4tune.emulator.ptx import Immediate, Instruction, Memory, Operand, Register, Vector


def literal(ins: Instruction, operand: Operand) -> int:
    """The value of an operand that must be a literal."""
    if not isinstance(operand, Immediate):
        raise unsupported(ins, f"has {operand} where only a literal is allowed")
    return operand.value


@opcode("wgmma")
def _wgmma(ins: Instruction, m: Modifiers) -> Operation:
    name = m.need("fence", "commit_group", "wait_group", "mma_async")
    m.need("sync")
    m.need("aligned")
    if name == "fence":
        return system(ins, "wgmma.fence", "fence")
    if name == "commit_group":
        return system(ins, "wgmma.commit", "async")
    if name == "wait_group":
        return system(ins, "wgmma.wait", "wait", count=literal(ins, ins.operands[0]), suspends=True)
    shape = re.fullmatch(r"m64n(\d+)k16", m.rest[0]) if m.rest else None
    if shape is None or int(shape.group(1)) % 8 or not 8 <= int(shape.group(1)) <= 256:
        raise unsupported(ins, "has a shape other than m64nNk16")
    m.rest.pop(0)
    n = int(shape.group(1))
    accumulator = m.need("f32")
    a_type = m.need("bf16", "f16")
    m.need(a_type)
    d = flat(ins.operands[:1])
    if len(d) != n // 2:
        raise unsupported(ins, f"has {len(d)} accumulator registers, not {n // 2}")
    from_registers = isinstance(ins.operands[1], Vector)
    rest = ins.operands[3:]
    a = flat(ins.operands[1:2])
    b = ins.operands[2]
    scale_d, scale_a, scale_b, *transpose = rest
    want = 1 if from_registers else 2
    if len(transpose) != want or len(a) != (4 if from_registers else 1):
        raise unsupported(ins, "has an unexpected number of operands")
    flags = [literal(ins, t) for t in transpose]
    return system(
        ins, "wgmma.mma", "mma", dst=d, dst_kinds="f" * len(d),
        src=(*a, b, scale_d), src_kinds=("W" * 4 if from_registers else "q") + "qp",
        n=n, type=a_type, accumulator=accumulator, from_registers=from_registers,
        negate_a=literal(ins, scale_a), negate_b=literal(ins, scale_b),
        transpose_a=0 if from_registers else flags[0], transpose_b=flags[-1],
    )  # fmt: skip


@opcode("tcgen05")
def _tcgen05(ins: Instruction, m: Modifiers) -> Operation:
    name = m.need(
        "mma", "ld", "st", "commit", "alloc", "dealloc", "relinquish_alloc_permit", "cp", "shift",
        "fence::before_thread_sync", "fence::after_thread_sync", "wait::ld", "wait::st",
    )  # fmt: skip
    if name.startswith("fence"):
        return system(ins, "tcgen05.fence", "fence", before=name.endswith("before_thread_sync"))
    if name.startswith("wait"):
        m.need("sync")
        m.need("aligned")
        return system(ins, f"tcgen05.{name.replace('::', '.')}", "wait")
    if name in ("ld", "st"):
        return _tcgen05_move(ins, m, name)
    if name in ("cp", "shift"):
        raise unsupported(ins, f".{name} is not modelled")
    group = int(m.need("cta_group::1", "cta_group::2")[-1])
    if name == "mma":
        return _tcgen05_mma(ins, m, group)
    if name == "commit":
        m.need("mbarrier::arrive::one")
        space = m.take("shared::cluster") or "generic"
        multicast = m.take("multicast::cluster") is not None
        m.need("b64")
        operand_count(ins, 2 if multicast else 1)
        base, offset = address(ins, ins.operands[0])
        return system(
            ins, "tcgen05.commit", "async", src=(base, *ins.operands[1:]),
            src_kinds=address_kind(space) + ("h" if multicast else ""), offset=offset, cta_group=group,
            multicast=multicast,
        )  # fmt: skip
    m.need("sync")
    m.need("aligned")
    if name == "relinquish_alloc_permit":
        return system(ins, "tcgen05.relinquish", "control", cta_group=group)
    if name == "alloc":
        space = m.take("shared::cta") or "generic"
        m.need("b32")
        base, offset = address(ins, ins.operands[0])
        return system(
            ins, "tcgen05.alloc", "control", src=(base, ins.operands[1]), src_kinds=address_kind(space) + "u",
            offset=offset, cta_group=group, suspends=True,
        )  # fmt: skip
    m.need("b32")
    return system(ins, "tcgen05.dealloc", "control", src=ins.operands, src_kinds="uu", cta_group=group)


def _tcgen05_move(ins: Instruction, m: Modifiers, name: str) -> Operation:
    if m.rest and m.rest[0] == "red":
        raise unsupported(ins, "reduces while loading")
    m.need("sync")
    m.need("aligned")
    shape = m.need("32x32b", "16x64b", "16x128b", "16x256b")
    repeat = int(m.need("x1", "x2", "x4", "x8", "x16", "x32", "x64", "x128")[1:])
    packed = m.take("pack::16b" if name == "ld" else "unpack::16b") is not None
    m.need("b32")
    if packed:
        raise unsupported(ins, "packs 16-bit values")
    count = repeat * {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4}[shape]
    registers = flat(ins.operands[:1] if name == "ld" else ins.operands[1:])
    if len(registers) != count:
        raise unsupported(ins, f"has {len(registers)} registers, not {count}")
    base, offset = address(ins, ins.operands[1 if name == "ld" else 0])
    if name == "ld":
        return system(
            ins, "tcgen05.ld", "tmem", dst=registers, dst_kinds="W" * count, src=(base,), src_kinds="u",
            offset=offset, shape=shape, repeat=repeat,
        )  # fmt: skip
    return system(
        ins, "tcgen05.st", "tmem", src=(base, *registers), src_kinds="u" + "W" * count, offset=offset,
        shape=shape, repeat=repeat,
    )  # fmt: skip


def _tcgen05_mma(ins: Instruction, m: Modifiers, group: int) -> Operation:
    m.need("kind::f16")
    if m.rest and m.rest[0].startswith("collector::a::"):
        m.rest.pop(0)  # how long the A operand is buffered: no effect on the result
    operands = list(ins.operands)
    disable: tuple[Operand, ...] = ()
    if len(operands) in (5, 6) and isinstance(operands[4], Vector):
        disable = flat((operands.pop(4),))
    if len(operands) != 5:
        raise unsupported(ins, "has an unexpected number of operands (scale-input-d is not modelled)")
    d, d_offset = address(ins, operands[0])
    from_tmem = isinstance(operands[1], Memory)
    a: Operand = operands[1]
    a_offset = 0
    if from_tmem:
        a, a_offset = address(ins, operands[1])
    accumulate = operands[4]
    if isinstance(accumulate, Register) and accumulate.cls != "p":
        raise unsupported(ins, "wants a predicate for enable-input-d")
    return system(
        ins, "tcgen05.mma", "mma", src=(d, a, operands[2], operands[3], accumulate, *disable),
        src_kinds="u" + ("u" if from_tmem else "q") + "qup" + "u" * len(disable), d_offset=d_offset,
        a_offset=a_offset, from_tmem=from_tmem, cta_group=group,
    )  # fmt: skip
