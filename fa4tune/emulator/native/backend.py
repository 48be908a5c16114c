"""Choice of the native back-end: whether it can be had here, and the compiled programs that are kept."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from fa4tune.errors import EmulationError
from fa4tune.kernels.toolchain import c_compiler

if TYPE_CHECKING:
    from fa4tune.emulator.codegen import Compiler
    from fa4tune.emulator.launch import Launch
    from fa4tune.emulator.machine import Machine
    from fa4tune.emulator.native.jit import NativeProgram
    from fa4tune.emulator.ptx import Module

_PROGRAMS: WeakKeyDictionary[Compiler, NativeProgram | str] = WeakKeyDictionary()


@cache
def unavailable() -> str | None:
    """Why there is no native back-end here, or None if there is one."""
    if importlib.util.find_spec("llvmlite") is None:
        return "llvmlite is not installed"
    if c_compiler() is None:
        return "there is no C compiler; install gcc or set CC"
    try:
        from fa4tune.emulator.native.library import library

        library()
    except (EmulationError, OSError, RuntimeError) as error:
        return str(error)
    return None


def machine(
    module: Module, compiler: Compiler, launch: Launch, *, required: bool, **options: Any
) -> Machine | None:
    """A machine that runs native code; None where there is none for this program and none is required.

    Raises:
        EmulationError: ``required`` and there is none; the message says why.
    """
    program = _program(compiler)
    if isinstance(program, str):
        if required:
            raise EmulationError(f"the native back-end cannot run this: {program}")
        return None
    from fa4tune.emulator.native.machine import NativeMachine

    return NativeMachine(program, module, compiler, launch, **options)


def _program(compiler: Compiler) -> NativeProgram | str:
    found = _PROGRAMS.get(compiler)
    if found is None:
        found = unavailable() or _compile(compiler)
        _PROGRAMS[compiler] = found
    return found


def _compile(compiler: Compiler) -> NativeProgram | str:
    from fa4tune.emulator.native.jit import compile_program
    from fa4tune.emulator.native.translate import NotNativeError

    try:
        return compile_program(compiler.program, plan=compiler.plan)
    except NotNativeError as error:
        return str(error)
