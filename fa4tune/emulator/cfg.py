"""Control flow of an entry: basic blocks, where lanes meet again, live registers and their storage."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from fa4tune.emulator.isa import Operation, decode
from fa4tune.emulator.ptx import Entry, Label, Negated, Operand, Register

EXIT = -9  #: the virtual block that every exit leads to


@dataclass(slots=True)
class Block:
    """Straight-line code: it starts at a label, after a branch, or where the warp may be suspended."""

    index: int
    operations: list[Operation]
    successors: list[int] = field(default_factory=list)
    reconvergence: int = EXIT  # the immediate post-dominator
    live_out: frozenset[int] = frozenset()


@dataclass(eq=False, slots=True, weakref_slot=True)
class Program:
    """An entry ready for a back-end. ``storage`` gives each register's kind: p, h, u, f, q, x."""

    entry: Entry
    blocks: list[Block]
    storage: list[str]


def registers_of(operands: tuple[Operand, ...]) -> list[Register]:
    """The registers among operands; a negated predicate counts as its register."""
    out = []
    for operand in operands:
        if isinstance(operand, Register):
            out.append(operand)
        elif isinstance(operand, Negated):
            out.append(operand.register)
    return out


def uses(operation: Operation) -> list[Register]:
    """Registers that an operation reads, its guard included (and, when guarded, its destinations)."""
    out = registers_of(operation.src)
    predicate = operation.instruction.predicate
    if predicate is not None:
        out.append(predicate)
        out.extend(registers_of(operation.dst))
    if operation.op == "wgmma.mma":
        out.extend(registers_of(operation.dst))
    return out


#: These start a block, so that a suspended warp resumes right at them.
_ALONE = ("wgmma.mma",)


def build(entry: Entry) -> Program:
    """Decode an entry and analyse it. Raises :class:`~fa4tune.emulator.parser.PtxError` from decoding."""
    operations = [decode(i) for i in entry.body]
    starts = {0, *entry.labels.values()}
    for i, operation in enumerate(operations):
        if operation.suspends or operation.op in _ALONE:
            starts.add(i)
        if operation.category in ("branch", "exit") or operation.op in (*_ALONE, "yield"):
            starts.add(i + 1)
    order = sorted(s for s in starts if s <= len(operations))
    if not order or order[-1] != len(operations):
        order.append(len(operations))
    at = {start: i for i, start in enumerate(order[:-1])}
    blocks = [Block(i, operations[start:end]) for i, (start, end) in enumerate(pairwise(order))]
    for block in blocks:
        _link(block, entry, at, len(blocks))
    _post_dominators(blocks)
    _liveness(blocks)
    return Program(entry, blocks, _storage(entry, blocks))


def _link(block: Block, entry: Entry, at: dict[int, int], count: int) -> None:
    following = block.index + 1 if block.index + 1 < count else EXIT
    last = block.operations[-1] if block.operations else None
    if last is None or last.category not in ("branch", "exit"):
        block.successors = [following]
        return
    guarded = last.instruction.predicate is not None
    if last.category == "exit":
        block.successors = [EXIT, following] if guarded else [EXIT]
        return
    target = last.attrs["target"]
    assert isinstance(target, Label)
    position = entry.labels[target.name]
    goal = at.get(position, EXIT)
    last.attrs["block"] = goal
    block.successors = [goal, following] if guarded else [goal]


def _post_dominators(blocks: list[Block]) -> None:
    """Immediate post-dominators by the iteration of Cooper, Harvey and Kennedy on the reversed graph."""
    exit_node = len(blocks)
    following = [[exit_node if s == EXIT else s for s in b.successors] for b in blocks] + [[]]
    preceding: list[list[int]] = [[] for _ in range(exit_node + 1)]
    for i, nodes in enumerate(following):
        for s in nodes:
            preceding[s].append(i)
    order: list[int] = []
    seen = {exit_node}
    stack = [(exit_node, iter(preceding[exit_node]))]
    while stack:
        node, todo = stack[-1]
        for p in todo:
            if p not in seen:
                seen.add(p)
                stack.append((p, iter(preceding[p])))
                break
        else:
            order.append(node)
            stack.pop()
    number = {node: i for i, node in enumerate(order)}
    idom = {exit_node: exit_node}
    changed = True
    while changed:
        changed = False
        for node in reversed(order[:-1]):
            candidates = [s for s in following[node] if s in idom]
            if not candidates:
                continue
            best = candidates[0]
            for other in candidates[1:]:
                a, b = best, other
                while a != b:
                    while number[a] < number[b]:
                        a = idom[a]
                    while number[b] < number[a]:
                        b = idom[b]
                best = a
            if idom.get(node) != best:
                idom[node] = best
                changed = True
    for block in blocks:
        found = idom.get(block.index, exit_node)
        block.reconvergence = EXIT if found == exit_node else found


def _liveness(blocks: list[Block]) -> None:
    gen: list[set[int]] = []
    kill: list[set[int]] = []
    for block in blocks:
        read: set[int] = set()
        written: set[int] = set()
        for operation in block.operations:
            read.update(r.index for r in uses(operation) if r.index not in written)
            written.update(r.index for r in registers_of(operation.dst))
        gen.append(read)
        kill.append(written)
    live_in = [set(g) for g in gen]
    live_out: list[set[int]] = [set() for _ in blocks]
    changed = True
    while changed:
        changed = False
        for block in reversed(blocks):
            out: set[int] = set()
            for s in block.successors:
                if s != EXIT:
                    out |= live_in[s]
            if len(out) != len(live_out[block.index]):
                live_out[block.index] = out
                live_in[block.index] = gen[block.index] | (out - kill[block.index])
                changed = True
    for block in blocks:
        block.live_out = frozenset(live_out[block.index])


def _storage(entry: Entry, blocks: list[Block]) -> list[str]:
    """Choose how each register is stored, by votes of the instructions that give it a meaning.

    PTX registers have a width but no type. Registers joined by raw moves vote together, so that a move only
    renames an array; 64-bit registers are float32 pairs where packed arithmetic uses them.
    """
    parent = list(range(len(entry.registers)))

    def find(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    votes = [0] * len(parent)  # positive: float
    packs: list[tuple[int, list[int]]] = []
    for block in blocks:
        for operation in block.operations:
            raw: list[int] = []
            kinds = operation.dst_kinds + operation.src_kinds
            for operand, kind in zip(operation.dst + operation.src, kinds, strict=True):
                if not isinstance(operand, Register):
                    continue
                if kind in "fx":
                    votes[operand.index] += 1
                elif kind in "uiqld" and operation.op != "cvta.param":
                    votes[operand.index] -= 1
                elif kind in "WQ":
                    raw.append(operand.index)
            if operation.op in ("mov", "selp"):
                for other in raw[1:]:
                    parent[find(other)] = find(raw[0])
            elif operation.op == "pack.QW" or operation.op == "unpack.QW":
                wide = operation.dst if operation.op == "pack.QW" else operation.src
                parts = operation.src if operation.op == "pack.QW" else operation.dst
                packs.append(
                    (
                        wide[0].index if isinstance(wide[0], Register) else -1,
                        [r.index for r in registers_of(parts)],
                    )
                )
    total = [0] * len(parent)
    for i, vote in enumerate(votes):
        total[find(i)] += vote
    kinds_of = [""] * len(parent)
    for register in entry.registers:
        if register.cls in "ph":
            kinds_of[register.index] = register.cls
        elif register.cls == "d":
            kinds_of[register.index] = "x" if total[find(register.index)] > 0 else "q"
        elif register.cls == "o":
            kinds_of[register.index] = "q"
    for wide_index, part_indices in packs:
        vote = 1 if wide_index >= 0 and kinds_of[wide_index] == "x" else -1
        for i in part_indices:
            total[find(i)] += vote
    for register in entry.registers:
        if register.cls == "w":
            kinds_of[register.index] = "f" if total[find(register.index)] > 0 else "u"
    return kinds_of
