"""LLVM IR to machine code in this process, and the tables that it reads."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import llvmlite.binding as llvm
import numpy as np

from fa4tune.emulator.cfg import Program
from fa4tune.emulator.checks_registers import RegisterPlan
from fa4tune.emulator.lanes import Array
from fa4tune.emulator.native import operations
from fa4tune.emulator.native.layout import OperationInfo
from fa4tune.emulator.native.library import library
from fa4tune.emulator.native.places import Translation
from fa4tune.emulator.native.registers import NativeRegisters
from fa4tune.emulator.native.state import address_of, aligned
from fa4tune.emulator.native.translate import translate


@dataclass(slots=True)
class NativeProgram:
    """Machine code of a program and what it reads.

    Args:
        address: of its run function.
        translation: the IR and its tables.
        engine: keeps the code alive.
        infos: an OperationInfo a call.
        operands: locations of all operands.
        constants: the constant pool.
        poison: what a register file holds before anything is written.
        registers: of a checked run.
    """

    address: int
    translation: Translation
    engine: Any
    infos: Any
    operands: Array
    constants: Array
    poison: Array
    registers: NativeRegisters | None
    operations_address: int = field(init=False)
    operands_address: int = field(init=False)

    def __post_init__(self) -> None:
        self.operations_address = ctypes.addressof(self.infos)
        self.operands_address = address_of(self.operands)


@cache
def _target() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple()


def compile_program(
    program: Program, *, host_only: bool = False, plan: RegisterPlan | None = None
) -> NativeProgram:
    """Translate and compile a program.

    Args:
        host_only: send every system operation through Python.
        plan: the register checks of a checked run.

    Raises:
        NotNativeError: only the plain back-end can run it.
        PtxError: an operand that is not modelled.
        EmulationError: the C runtime cannot be compiled.
    """
    runtime = library()
    registers = None if plan is None else NativeRegisters(plan)
    half_floats = hasattr(runtime, "k_cvt_f16_rn")
    translation = translate(program, half_floats=half_floats, host_only=host_only, registers=registers)
    if registers is not None:
        registers.seal()
    module = llvm.parse_assembly(translation.text)
    for name in translation.functions:
        llvm.add_symbol(name, ctypes.cast(getattr(runtime, name), ctypes.c_void_p).value)
    engine = llvm.create_mcjit_compiler(module, _target().create_target_machine(opt=0, jit=True))
    engine.finalize_object()
    infos = (OperationInfo * max(len(translation.calls), 1))()
    operands: list[int] = []
    for info, call in zip(infos, translation.calls, strict=False):
        operations.fill(info, call.fields)
        info.first, info.destinations = len(operands), len(call.destinations)
        operands += [*call.destinations, *call.sources]
    constants = aligned(len(translation.constants))
    constants[:] = np.frombuffer(translation.constants, np.uint8)
    return NativeProgram(
        engine.get_function_address("run"), translation, engine, infos, np.array([*operands, 0], np.int32),
        constants, _poison(program, translation), registers,
    )  # fmt: skip


def _poison(program: Program, translation: Translation) -> Array:
    """All ones, predicates false, as the plain warp's registers begin."""
    memory = np.full(translation.register_bytes, 0xFF, np.uint8)
    for at, kind in zip(translation.register_offsets, program.storage, strict=True):
        if kind == "p" and at is not None:
            memory[at : at + 4] = 0
    return memory
