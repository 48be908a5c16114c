"""What a cubin says of itself: registers, stack, spills, instructions, by NVIDIA's binary tools."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fa4tune.errors import CompileError

_FUNCTION = re.compile(r"Function ([\w$.]+):\s*\n?\s*(.*)")
_FIELD = re.compile(r"(REG|STACK|SHARED|LOCAL):(\d+)")
_SECTION = re.compile(r"^\s*\.section\s+\.text\.([\w$.]+)")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")
_WIDTH = re.compile(r"\.(\d+)$")


@dataclass(frozen=True, slots=True)
class ResourceUsage:
    """Resources of one kernel a thread, and its spills.

    Args:
        entry: kernel name.
        registers: registers at launch; roles change theirs with ``setmaxnreg``.
        stack_bytes: stack frame.
        static_smem_bytes: statically allocated shared memory (dynamic memory is the launch's).
        spill_stores, spill_loads: instructions that write and read local memory.
        spill_bytes: bytes that those move when each runs once.
    """

    entry: str
    registers: int
    stack_bytes: int
    static_smem_bytes: int
    spill_stores: int
    spill_loads: int
    spill_bytes: int

    @property
    def spilled(self) -> bool:
        """Whether registers go through local memory."""
        return self.spill_bytes > 0


@cache
def _tool(name: str) -> str:
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        for candidate in sorted(Path(root).glob(f"cu*/bin/{name}"), reverse=True):
            return str(candidate)
    found = shutil.which(name)
    if found is None:
        raise CompileError(f"{name} is not installed; pip install nvidia-cuda-{name}")
    return found


def _run(name: str, *arguments: str) -> str:
    done = subprocess.run([_tool(name), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(f"{name} failed: {(done.stderr or done.stdout).strip()[-400:]}")
    return done.stdout


def listing(cubin: bytes) -> str:
    """The machine code as nvdisasm prints it, with labels and operands.

    Raises:
        CompileError: nvdisasm is missing or refuses the file.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return _run("nvdisasm", "--print-code", file.name)


def disassemble(cubin: bytes) -> dict[str, list[str]]:
    """Machine instructions by kernel, in order, as opcodes with modifiers (``LDG.E.128``).

    Raises:
        CompileError: nvdisasm is missing or refuses the file.
    """
    text = listing(cubin)
    functions: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in text.splitlines():
        section = _SECTION.match(line)
        if section:
            current = functions.setdefault(section[1], [])
        elif current is not None and (instruction := _INSTRUCTION.match(line)):
            current.append(instruction[1])
    return functions


def resource_usage(cubin: bytes) -> tuple[ResourceUsage, ...]:
    """Resources of each kernel in a cubin.

    Raises:
        CompileError: the tools are missing, refuse the file or find no kernel.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = _run("cuobjdump", "--dump-resource-usage", file.name)
    frames = {
        match[1]: {name: int(value) for name, value in _FIELD.findall(match[2])}
        for match in _FUNCTION.finditer(text)
    }
    # Spills live in the stack frame; disassembling takes a tenth of the compile time, so only with a frame.
    framed = any(fields.get("STACK", 0) or fields.get("LOCAL", 0) for fields in frames.values())
    code = disassemble(cubin) if framed else {}
    usages = []
    for entry, fields in frames.items():
        opcodes = Counter(code.get(entry, []))
        local = [(op, count) for op, count in opcodes.items() if op.split(".")[0] in ("LDL", "STL")]
        usages.append(
            ResourceUsage(
                entry=entry,
                registers=fields.get("REG", 0),
                stack_bytes=fields.get("STACK", 0),
                static_smem_bytes=fields.get("SHARED", 0),
                spill_stores=sum(count for op, count in local if op.startswith("STL")),
                spill_loads=sum(count for op, count in local if op.startswith("LDL")),
                spill_bytes=sum(count * _access_bytes(op) for op, count in local),
            )
        )
    if not usages:
        raise CompileError(f"cuobjdump found no kernel in a cubin of {len(cubin)} bytes")
    return tuple(usages)


def _access_bytes(opcode: str) -> int:
    """Bytes of a local load or store: 4 unless its last modifier is a width in bits."""
    width = _WIDTH.search(opcode)
    if width:
        return int(width[1]) // 8
    return {"U8": 1, "S8": 1, "U16": 2, "S16": 2}.get(opcode.rsplit(".", 1)[-1], 4)
