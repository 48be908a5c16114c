"""Where values lie while a block is translated: moves are noted, short-lived registers share places.

A location is an offset in the register file, in the special registers or in the constant pool. A register's
own place is its home. Inside a block its value may lie elsewhere, in another register's home for instance;
before such a place is overwritten, the value is brought home.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fa4tune.emulator.cfg import Block, Program, uses
from fa4tune.emulator.isa import Operation
from fa4tune.emulator.native.kinds import BASE, SLOT
from fa4tune.emulator.native.layout import BASE_SHIFT
from fa4tune.emulator.native.registers import NativeRegisters
from fa4tune.emulator.ptx import Register

SPECIALS, CONSTANTS = 1, 2  #: bases of locations, 0 being the register file


@dataclass(slots=True)
class Call:
    """An operation that a runtime function performs: where its operands lie, and what it is told."""

    operation: Operation
    function: str
    src_kinds: str
    dst_kinds: str
    destinations: tuple[int, ...]
    sources: tuple[int, ...]
    fields: dict[str, int]


@dataclass(slots=True)
class Translation:
    """LLVM IR of a program and what goes with it.

    Args:
        text: the module; ``@run`` takes a pointer to the warp.
        register_offsets: of each register in a warp's register file of ``register_bytes``; None for one that
            lives inside one block only, whose place others use too.
        calls: what the numbered calls of the runtime mean.
        specials: offset in the special area, by (name, offset in bytes, kind).
        constants: the constant pool, 32 lanes a constant.
        functions: runtime functions and kernels that the module calls.
    """

    text: str
    register_offsets: list[int | None]
    register_bytes: int
    calls: list[Call]
    specials: dict[tuple[str, int, str], int]
    special_bytes: int
    constants: bytes
    functions: tuple[str, ...]


@dataclass(slots=True)
class Shared:
    """What the blocks of one program have in common."""

    program: Program
    half_floats: bool
    offsets: list[int | None]
    scratch: int  # where the places begin that blocks give to what lives inside them
    parameters: dict[str, int]
    parameter_bytes: int
    joins: set[int]
    host_only: bool
    registers: NativeRegisters | None
    lines: list[str] = field(default_factory=list)
    count: int = 0
    declared: dict[str, str] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    specials: dict[tuple[str, int, str], int] = field(default_factory=dict)
    special_bytes: int = 64  # the pointer to the parameter block comes first
    constants: dict[tuple[int, str], int] = field(default_factory=dict)
    pool: bytearray = field(default_factory=bytearray)
    scratch_bytes: int = 0

    def special(self, name: str, offset: int, base: str) -> int:
        """Location of a special register or of the address of a variable."""
        key = (name, offset, base)
        if key not in self.specials:
            self.specials[key] = self.special_bytes
            self.special_bytes += SLOT[base]
        return SPECIALS << BASE_SHIFT | self.specials[key]

    def constant(self, bits: int, base: str) -> int:
        """Location of a literal."""
        width = {"p": 4, "h": 2, "u": 4, "q": 8}[base]
        bits = (0xFFFFFFFF if bits else 0) if base == "p" else bits & (1 << 8 * width) - 1
        key = (bits, base)
        if key not in self.constants:
            self.constants[key] = len(self.pool)
            self.pool += (bits.to_bytes(width, "little") * 32)[: SLOT[base]].ljust(SLOT[base], b"\0")
        return CONSTANTS << BASE_SHIFT | self.constants[key]


class _Scratch:
    """Places in the scratch part of the register file, given and taken back while a block is written."""

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self.top = 0
        self.free: dict[int, list[int]] = {64: [], 128: [], 256: []}

    def take(self, nbytes: int) -> int:
        """A place of 64, 128 or 256 bytes."""
        if self.free[nbytes]:
            return self.free[nbytes].pop()
        at = self.top
        self.top += nbytes
        self.shared.scratch_bytes = max(self.shared.scratch_bytes, self.top)
        return self.shared.scratch + at

    def give(self, at: int, nbytes: int) -> None:
        """Take a place back."""
        self.free[nbytes].append(at)


class Places:
    """The places of one block's values. A subclass emits the copies."""

    def __init__(self, shared: Shared, block: Block) -> None:
        self.shared = shared
        self.block = block
        self.storage = shared.program.storage
        self.where: dict[int, tuple[int, ...]] = {}  # registers whose value is not at home
        self.users: dict[int, set[int]] = {}  # places to the registers of `where` that lie there
        self.scratch = _Scratch(shared)
        self.homes: dict[int, tuple[int, ...]] = {}  # of registers that live in this block only
        self.held: list[tuple[int, int]] = []  # places and sizes that are free once nobody uses them
        self.last_use: dict[int, int] = {}
        self.position = 0
        self.moving: set[int] = set()
        for i, operation in enumerate(block.operations):
            for d in operation.dst:
                if isinstance(d, Register):
                    self.last_use[d.index] = i
            for register in uses(operation):
                self.last_use[register.index] = i
        self.ending: dict[int, list[int]] = {}
        for register_index, i in self.last_use.items():
            self.ending.setdefault(i, []).append(register_index)

    def copy(self, to: int, of: int, base: str) -> None:
        """Emit a copy of one part of a value for the lanes of the block's mask."""
        raise NotImplementedError

    def release(self) -> None:
        """Give back what nothing needs from the current operation on."""
        for register in self.ending.get(self.position - 1, ()):
            if register in self.block.live_out:
                continue
            self.forget(register)
            home = self.homes.pop(register, None)
            if home is not None:
                self.held.append((home[0], SLOT[BASE[self.storage[register]]]))
        kept = []
        for at, nbytes in self.held:
            if self.users.get(at) or (nbytes == 256 and self.users.get(at + 128)):
                kept.append((at, nbytes))
            else:
                self.scratch.give(at, nbytes)
        self.held = kept

    def remember(self, register: int, parts: tuple[int, ...]) -> None:
        """Note where a register's value lies."""
        self.forget(register)
        self.where[register] = parts
        for at in parts:
            self.users.setdefault(at, set()).add(register)

    def forget(self, register: int) -> None:
        """The value is at home, or gone."""
        for at in self.where.pop(register, ()):
            self.users[at].discard(register)

    def home(self, register: int) -> tuple[int, ...]:
        """A register's own place or, for a float32 pair, places."""
        at = self.shared.offsets[register]
        pair = self.storage[register] == "x"
        if at is not None:
            return (at, at + 128) if pair else (at,)
        found = self.homes.get(register)
        if found is None:
            at = self.scratch.take(SLOT[BASE[self.storage[register]]])
            found = self.homes[register] = (at, at + 128) if pair else (at,)
        return found

    def parts(self, register: int) -> tuple[int, ...]:
        """Where a register's value lies."""
        return self.where.get(register) or self.home(register)

    def temporary(self) -> int:
        """A place of 256 bytes for the current operation, and as long as a register's value lies there."""
        at = self.scratch.take(256)
        self.held.append((at, 256))
        return at

    def is_live(self, register: int) -> bool:
        """Whether a value is needed behind the current operation or by it."""
        return register in self.block.live_out or self.last_use.get(register, -1) >= self.position

    def bring_home(self, register: int) -> None:
        """Copy a register's value into its own place."""
        base = BASE[self.storage[register]]
        home = self.home(register)
        if register in self.moving or set(self.where[register]) & set(home):
            # a cycle of moves: out of the way first
            aside = self.temporary()
            places = tuple(aside + 128 * n for n in range(len(home)))
            for to, of in zip(places, self.where[register], strict=True):
                self.copy(to, of, base)
            self.remember(register, places)
            if register in self.moving:
                return
        self.moving.add(register)
        self.vacate(home, register)
        for to, of in zip(home, self.where[register], strict=True):
            self.copy(to, of, base)
        self.forget(register)
        self.moving.discard(register)

    def vacate(self, places: tuple[int, ...], owner: int) -> None:
        """Before places are overwritten: save other registers' values that lie there."""
        for at in places:
            for other in list(self.users.get(at, ())):
                if other == owner or other not in self.users[at]:
                    continue
                if self.is_live(other):
                    self.bring_home(other)
                else:
                    self.forget(other)

    def target(self, register: int, guarded: bool) -> tuple[int, ...]:
        """Where a new value of a register goes; under a guard its old value must be there already."""
        if register in self.where:
            if guarded:
                self.bring_home(register)
            else:
                self.forget(register)
        home = self.home(register)
        self.vacate(home, register)
        return home
