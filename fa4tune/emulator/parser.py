"""A strict parser of the PTX that CuTe DSL emits (PTX ISA 8 and 9).

Statements end with ``;``. Inline assembly opens scopes with braces, declares registers in them (also families
such as ``d<8>``) and repeats label names such as ``LAB_WAIT``: names are looked up from the innermost scope
outwards, labels when the whole body is known. Anything the grammar below does not know raises
:class:`PtxError` with the line number and the text.
"""

from __future__ import annotations

import re
from functools import lru_cache

from fa4tune.emulator.ptx import (
    REGISTER_CLASS,
    Entry,
    FloatImmediate,
    Immediate,
    Instruction,
    Label,
    Memory,
    Module,
    Negated,
    Operand,
    Pair,
    Parameter,
    Register,
    Sink,
    Special,
    Symbol,
    Variable,
    Vector,
)
from fa4tune.errors import EmulationError


class PtxError(EmulationError):
    """PTX that cannot be understood; the message names the line and its text."""

    def __init__(self, message: str, line: int, text: str) -> None:
        self.line = line
        self.text = text.strip()
        super().__init__(f"PTX line {line}: {message}: `{self.text[:300]}`")


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_SPACE = re.compile(r"\s*")
_LABEL = re.compile(r"([A-Za-z_$%][\w$]*)\s*:(?!:)")
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)[^\n]*\n")
_NAME = r"[A-Za-z_$%][\w$]*"
_INTEGER = re.compile(r"-?(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?$")
_FLOAT = re.compile(r"0[fF]([0-9a-fA-F]{8})$|0[dD]([0-9a-fA-F]{16})$")
_REGISTER_NAME = re.compile(rf"{_NAME}$")
_SPECIAL = re.compile(
    r"%(?:(?:tid|ntid|ctaid|nctaid|clusterid|nclusterid|cluster_ctaid|cluster_nctaid)\.[xyz]"
    r"|laneid|warpid|nwarpid|smid|nsmid|gridid|cluster_ctarank|cluster_nctarank|lanemask_(?:eq|le|lt|ge|gt)"
    r"|clock|clock_hi|clock64|globaltimer|globaltimer_lo|globaltimer_hi|dynamic_smem_size|total_smem_size"
    r"|is_explicit_cluster)$"
)
_OFFSET = re.compile(r"(.+?)\s*([+-])\s*(-?\s*(?:0[xX][0-9a-fA-F]+|\d+))$")
_PARAM = re.compile(
    rf"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)(?:\s+\.ptr[\w\s.]*?)?\s+({_NAME})\s*(?:\[(\d+)\])?$"
)
_VARIABLE = re.compile(
    rf"(?:\.(?:visible|extern|weak)\s+)*\.(shared|global|const|local)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+"
    rf"({_NAME})\s*(?:\[(\d*)\])?\s*(?:=\s*(.*))?$",
    re.S,
)
_TYPE_BYTES = {
    "b8": 1,
    "u8": 1,
    "s8": 1,
    "b16": 2,
    "u16": 2,
    "s16": 2,
    "f16": 2,
    "b32": 4,
    "u32": 4,
    "s32": 4,
}
_TYPE_BYTES |= {"f32": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8, "b128": 16}


class _Scope:
    """Names declared between one pair of braces."""

    def __init__(self, parent: _Scope | None, number: int) -> None:
        self.parent = parent
        self.number = number
        self.registers: dict[str, Register] = {}
        self.families: dict[str, tuple[int, str]] = {}
        self.labels: dict[str, str] = {}


class _Parser:
    def __init__(self, text: str) -> None:
        # Comments become blanks of the same number of lines, so that line numbers stay true.
        self.text = _COMMENT.sub(lambda m: "\n" * m.group().count("\n"), text)
        self.pos = 0
        self.line = 1
        self.module = Module((0, 0), "", {}, [])
        self.source: tuple[int, int] | None = None

    def error(self, message: str, text: str | None = None, line: int | None = None) -> PtxError:
        if text is None:
            end = self.text.find("\n", self.pos)
            text = self.text[self.pos : end if end >= 0 else None]
        return PtxError(message, self.line if line is None else line, text)

    def advance(self, end: int) -> str:
        """Consume up to ``end`` and return what was consumed."""
        chunk = self.text[self.pos : end]
        self.line += chunk.count("\n")
        self.pos = end
        return chunk

    def skip_space(self) -> bool:
        match = _SPACE.match(self.text, self.pos)
        assert match is not None
        self.advance(match.end())
        return self.pos < len(self.text)

    def until(self, stop: str) -> str:
        end = self.text.find(stop, self.pos)
        if end < 0:
            raise self.error(f"no closing `{stop}`")
        chunk = self.advance(end)
        self.pos += len(stop)
        return chunk

    # -- module level

    def parse(self) -> Module:
        while self.skip_space():
            rest = self.text[self.pos : self.pos + 240]
            word = rest.split(None, 1)[0]
            if word == ".version":
                major, minor = self.until("\n").split()[1].split(".")
                self.module.version = (int(major), int(minor))
                self.line += 1
                if int(major) not in (8, 9):
                    raise self.error(f"PTX version {major}.{minor} is not 8 or 9", text=rest.split("\n")[0])
            elif word == ".target":
                self.module.target = self.until("\n").split(None, 1)[1].split(",")[0].strip()
                self.line += 1
            elif word == ".address_size":
                if self.until("\n").split()[1] != "64":
                    raise self.error("only 64-bit addresses are supported", text=rest.split("\n")[0])
                self.line += 1
            elif word == ".file":
                self.file_directive(self.until("\n"))
                self.line += 1
            elif word == ".section":
                self.until("{")
                self.until("}")
            elif re.match(r"(\.(visible|weak|extern)\s+)*\.entry\b", rest):
                self.entry()
            elif re.match(r"(\.(visible|weak|extern)\s+)*\.(shared|global|const)\b", rest):
                line = self.line
                self.module.variables.append(self.variable(self.until(";"), line))
            else:
                raise self.error("unknown directive")
        return self.module

    def file_directive(self, text: str) -> None:
        match = re.match(r'\.file\s+(\d+)\s+"([^"]*)"', text)
        if match is None:
            raise self.error("malformed .file directive", text=text)
        self.module.files[int(match.group(1))] = match.group(2)

    def variable(self, text: str, line: int) -> Variable:
        match = _VARIABLE.match(text.strip())
        if match is None:
            raise self.error("variable declaration not understood", text=text, line=line)
        space, align, kind, name, count, data = match.groups()
        if kind not in _TYPE_BYTES:
            raise self.error(f"unknown type .{kind}", text=text, line=line)
        size = _TYPE_BYTES[kind]
        extern = ".extern" in text[: match.start(1)]
        nbytes = size if count is None else size * int(count or 0)
        init: bytes | None = None
        if data is not None:
            if not data.startswith("{"):
                data = "{" + data + "}"
            numbers = [int(x, 0) for x in data.strip("{} \n").split(",") if x.strip()]
            init = b"".join((n & (1 << 8 * size) - 1).to_bytes(size, "little") for n in numbers)
        return Variable(name, space, nbytes, int(align or size), extern, init)

    def entry(self) -> None:
        line = self.line
        head = self.until("(")
        name = head.split()[-1]
        params: list[Parameter] = []
        offset = 0
        for piece in self.until(")").split(","):
            if not piece.strip():
                continue
            match = _PARAM.match(piece.strip())
            if match is None or match.group(2) not in _TYPE_BYTES:
                raise self.error("parameter not understood", text=piece, line=line)
            size = _TYPE_BYTES[match.group(2)]
            align = int(match.group(1) or size)
            nbytes = size * int(match.group(4) or 1)
            offset = -(-offset // align) * align
            params.append(Parameter(match.group(3), nbytes, align, offset))
            offset += nbytes
        entry = Entry(name, params, [], [], [], {})
        line = self.line
        directives = self.until("{")
        for piece in directives.strip().split("\n"):
            self.performance_directive(entry, piece.strip(), line)
        _Body(self, entry).parse()
        self.module.entries[name] = entry

    def performance_directive(self, entry: Entry, text: str, line: int) -> None:
        if not text:
            return
        word, _, rest = text.partition(" ")
        numbers = [int(n) for n in re.findall(r"\d+", rest)]
        if word in (".reqntid", ".reqnctapercluster"):
            x, y, z = (*numbers, 1, 1)[:3]
            if word == ".reqntid":
                entry.required_threads = (x, y, z)
            else:
                entry.required_cluster = (x, y, z)
        elif word == ".minnctapersm":
            entry.min_ctas = numbers[0]
        elif word not in (
            ".maxntid",
            ".maxnreg",
            ".explicitcluster",
            ".maxclusterrank",
            ".blocksareclusters",
        ):
            raise self.error("unknown performance directive", text=text, line=line)


class _Body:
    """The statements of one entry."""

    def __init__(self, parser: _Parser, entry: Entry) -> None:
        self.parser = parser
        self.entry = entry
        self.scope = _Scope(None, 0)
        self.scopes = 1
        self.branches: list[tuple[Instruction, str, _Scope]] = []

    def parse(self) -> None:
        p = self.parser
        while True:
            if not p.skip_space():
                raise p.error("the entry's body does not end", text=self.entry.name)
            char = p.text[p.pos]
            if char == "{":
                p.pos += 1
                self.scope = _Scope(self.scope, self.scopes)
                self.scopes += 1
                continue
            if char == "}":
                p.pos += 1
                if self.scope.parent is None:
                    break
                self.scope = self.scope.parent
                continue
            if char == ";":
                p.pos += 1
                continue
            loc = _LOC.match(p.text, p.pos)
            if loc is not None:
                p.source = (int(loc.group(1)), int(loc.group(2)))
                p.advance(loc.end())
                continue
            label = _LABEL.match(p.text, p.pos)
            if label is not None:
                self.label(label.group(1))
                p.advance(label.end())
                continue
            line = p.line
            self.statement(" ".join(p.until(";").split()), line)
        self.resolve()

    def label(self, name: str) -> None:
        if name in self.scope.labels:
            raise self.parser.error(f"label {name} is defined twice in one scope")
        unique = name if self.scope.parent is None else f"{name}#{self.scope.number}"
        self.scope.labels[name] = unique
        self.entry.labels[unique] = len(self.entry.body)

    def resolve(self) -> None:
        for instruction, name, scope in self.branches:
            where: _Scope | None = scope
            while where is not None and name not in where.labels:
                where = where.parent
            if where is None:
                raise PtxError(f"label {name} is not defined", instruction.line, instruction.text)
            instruction.operands = tuple(
                Label(where.labels[name]) if isinstance(o, Label) and o.name == name else o
                for o in instruction.operands
            )

    # -- statements

    def statement(self, text: str, line: int) -> None:
        if text.startswith(".reg "):
            self.declare(text, line)
        elif text.startswith((".shared ", ".local ")):
            self.entry.variables.append(self.parser.variable(text, line))
        elif text.startswith((".pragma", ".loc")):
            return
        elif text.startswith("."):
            raise PtxError("unknown directive", line, text)
        else:
            self.instruction(text, line)

    def declare(self, text: str, line: int) -> None:
        match = re.match(r"\.reg\s+\.(\w+)\s+(.*)$", text)
        if match is None or match.group(1) not in REGISTER_CLASS:
            raise PtxError("register declaration not understood", line, text)
        cls = REGISTER_CLASS[match.group(1)]
        for piece in match.group(2).split(","):
            family = re.match(rf"({_NAME})\s*<(\d+)>$", piece.strip())
            if family is not None:
                self.scope.families[family.group(1)] = (int(family.group(2)), cls)
            elif _REGISTER_NAME.match(piece.strip()):
                self.scope.registers[piece.strip()] = self.new_register(piece.strip(), cls)
            else:
                raise PtxError("register declaration not understood", line, text)

    def new_register(self, name: str, cls: str) -> Register:
        register = Register(len(self.entry.registers), name, cls)
        self.entry.registers.append(register)
        return register

    def find_register(self, name: str) -> Register | None:
        prefix = name.rstrip("0123456789")
        digits = name[len(prefix) :]
        scope: _Scope | None = self.scope
        while scope is not None:
            found = scope.registers.get(name)
            if found is not None:
                return found
            if digits and prefix in scope.families and int(digits) < scope.families[prefix][0]:
                register = self.new_register(name, scope.families[prefix][1])
                scope.registers[name] = register
                return register
            scope = scope.parent
        return None

    def instruction(self, text: str, line: int) -> None:
        rest = text
        predicate: Register | None = None
        negated = False
        if rest.startswith("@"):
            guard, _, rest = rest[1:].lstrip().partition(" ")
            negated = guard.startswith("!")
            predicate = self.find_register(guard.lstrip("!"))
            if predicate is None or predicate.cls != "p":
                raise PtxError(f"guard {guard} is not a declared predicate", line, text)
            rest = rest.lstrip()
        match = re.match(r"([a-z_][\w.:]*)\s*(.*)$", rest)
        if match is None:
            raise PtxError("statement not understood", line, text)
        opcode, *modifiers = _split_opcode(match.group(1))
        instruction = Instruction(
            opcode, tuple(modifiers), (), line, text, predicate, negated, self.parser.source
        )
        branch = opcode in ("bra", "brx", "call")
        operands: list[Operand] = []
        for piece in _split_operands(match.group(2), line, text):
            if branch and self.find_register(piece) is None and _REGISTER_NAME.match(piece):
                operands.append(Label(piece))
                self.branches.append((instruction, piece, self.scope))
            else:
                operands.append(self.operand(piece, line, text))
        instruction.operands = tuple(operands)
        self.entry.body.append(instruction)

    def operand(self, piece: str, line: int, text: str) -> Operand:
        if piece == "_":
            return Sink()
        if piece.startswith("["):
            if not piece.endswith("]"):
                raise PtxError(f"operand {piece} not understood", line, text)
            return self.memory(piece[1:-1].strip(), line, text)
        if piece.startswith("{") and piece.endswith("}"):
            return Vector(
                tuple(self.operand(x, line, text) for x in _split_operands(piece[1:-1], line, text))
            )
        if "|" in piece:
            first, second = piece.split("|")
            return Pair(self.operand(first.strip(), line, text), self.operand(second.strip(), line, text))
        if piece.startswith("!"):
            register = self.find_register(piece[1:].strip())
            if register is None:
                raise PtxError(f"{piece} is not declared", line, text)
            return Negated(register)
        number = _number(piece)
        if number is not None:
            return number
        register = self.find_register(piece)
        if register is not None:
            return register
        if _SPECIAL.match(piece):
            return Special(piece)
        match = _OFFSET.match(piece)
        if match is not None and self.is_symbol(match.group(1)):
            return Symbol(match.group(1), int(match.group(3), 0) * (-1 if match.group(2) == "-" else 1))
        if self.is_symbol(piece):
            return Symbol(piece)
        raise PtxError(f"operand {piece} is neither a declared name nor a literal", line, text)

    def is_symbol(self, name: str) -> bool:
        return (
            any(p.name == name for p in self.entry.parameters)
            or any(v.name == name for v in self.entry.variables)
            or any(v.name == name for v in self.parser.module.variables)
        )

    def memory(self, inner: str, line: int, text: str) -> Memory:
        pieces = _split_operands(inner, line, text)
        if len(pieces) == 2 and pieces[1].startswith("{"):
            coordinates = tuple(
                self.operand(x, line, text) for x in _split_operands(pieces[1][1:-1], line, text)
            )
            return Memory(self.operand(pieces[0], line, text), 0, coordinates)
        if len(pieces) != 1:
            raise PtxError(f"address [{inner}] not understood", line, text)
        base, offset = pieces[0], 0
        match = _OFFSET.match(base)
        if match is not None:
            base = match.group(1)
            offset = int(match.group(3).replace(" ", ""), 0) * (-1 if match.group(2) == "-" else 1)
        return Memory(self.operand(base, line, text), offset)


@lru_cache(maxsize=4096)
def _number(piece: str) -> Immediate | FloatImmediate | None:
    match = _FLOAT.match(piece)
    if match is not None:
        return FloatImmediate(int(match.group(1) or match.group(2), 16), 32 if match.group(1) else 64)
    if _INTEGER.match(piece):
        digits = piece.rstrip("U")
        octal = len(digits) > 1 and digits.lstrip("-")[0] == "0" and digits.lstrip("-").isdigit()
        return Immediate(int(digits, 8) if octal else int(digits, 0))
    return None


@lru_cache(maxsize=4096)
def _split_opcode(text: str) -> tuple[str, ...]:
    # "shared::cta" and "mbarrier::complete_tx::bytes" hold no dots, so a plain split is right.
    return tuple(text.split("."))


def _split_operands(text: str, line: int, whole: str) -> list[str]:
    """Split at commas outside of brackets and braces."""
    text = text.strip()
    if not text:
        return []
    if "[" not in text and "{" not in text and "(" not in text:
        return [piece.strip() for piece in text.split(",")]
    pieces: list[str] = []
    depth = 0
    start = 0
    for i, char in enumerate(text):
        if char in "[{(":
            depth += 1
        elif char in "]})":
            depth -= 1
        elif char == "," and depth == 0:
            pieces.append(text[start:i].strip())
            start = i + 1
    if depth:
        raise PtxError("unbalanced brackets", line, whole)
    pieces.append(text[start:].strip())
    return pieces


def parse(text: str) -> Module:
    """Parse one PTX translation unit.

    Returns the module with every entry's instructions, registers and labels resolved. Raises
    :class:`PtxError` (line number and text in the message) for anything not understood.
    """
    return _Parser(text).parse()
