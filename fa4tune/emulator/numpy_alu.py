"""The NumPy back-end's table: canonical operation names to functions over lane vectors."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from fa4tune.emulator import lanes
from fa4tune.emulator.isa import Operation, unsupported
from fa4tune.emulator.lanes import F4, F8, I4, U2, U4, U8, Array

Function = Callable[..., Any]

#: What NumPy type a kind is computed in.
KIND_DTYPE = {
    "p": np.dtype("?"), "h": U2, "s": np.dtype("i2"), "u": U4, "i": I4, "q": U8, "l": np.dtype("i8"),
    "f": F4, "d": F8, "x": F4, "F": U2, "G": U2, "V": U4, "B": U4, "H": U2, "W": U4, "Q": U8,
}  # fmt: skip

_COMPARE = {
    "eq": np.equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip


def _unordered(compare: Function) -> Function:
    return lambda a, b: compare(a, b) | (a != a) | (b != b)


def _ne_ordered(a: Array, b: Array) -> Array:
    return np.not_equal(a, b) & (a == a) & (b == b)


def _comparison(name: str, is_float: bool) -> Function:
    if not is_float:
        return np.not_equal if name == "ne" else _COMPARE[name]
    if name == "ne":
        return _ne_ordered
    if name == "neu":
        return np.not_equal
    if name == "num":
        return lambda a, b: (a == a) & (b == b)
    if name == "nan":
        return lambda a, b: (a != a) | (b != b)
    if name.endswith("u"):
        return _unordered(_COMPARE[name[:-1]])
    return _COMPARE[name]


_COMBINE = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def _setp(operation: Operation, parts: list[str]) -> Function:
    kind = operation.src_kinds[0]
    compare = _comparison(parts[1], kind in "fdFG")
    if "ftz" in parts:
        plain = compare
        compare = lambda a, b: plain(lanes.ftz(a), lanes.ftz(b))  # noqa: E731
    if kind in "FG":
        load = lanes.f16_to_f32 if kind == "F" else lanes.bf16_to_f32
        inner = compare
        compare = lambda a, b: inner(load(a), load(b))  # noqa: E731
    two = operation.attrs["two"]
    combine = _COMBINE.get(parts[-1])
    if combine is None:
        if not two:
            return compare

        def both(a: Array, b: Array) -> tuple[Array, Array]:
            r = compare(a, b)
            return r, ~r

        return both

    def combined(a: Array, b: Array, c: Array) -> Any:
        r = compare(a, b)
        return (combine(r, c), combine(~r, c)) if two else combine(r, c)

    return combined


def _with_flags(function: Function, parts: list[str]) -> Function:
    if "ftz" in parts:
        inner = function
        function = lambda *a: lanes.ftz(inner(*(lanes.ftz(x) for x in a)))  # noqa: E731
    if "sat" in parts:
        unclamped = function

        def function(*a: Array) -> Array:
            r = unclamped(*a)
            return np.where(r != r, np.float32(0), np.minimum(np.maximum(r, np.float32(0)), np.float32(1)))

    return function


_DIRECTED: dict[str, Callable[[str], Function]] = {
    "add": lanes.add_directed,
    "sub": lanes.sub_directed,
    "mul": lanes.mul_directed,
    "fma": lanes.fma_directed,
}
_NEAREST: dict[str, Function] = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "fma": lanes.fma_rn}


def _float_arithmetic(operation: Operation, parts: list[str]) -> Function:
    name, mode = parts[0], parts[1]
    kind = operation.dst_kinds
    if kind == "d":
        if mode == "rn" and name != "fma":
            return _NEAREST[name]
        raise unsupported(operation.instruction, "is not modelled for f64")
    if kind in "FGVB":
        if mode != "rn":
            raise unsupported(operation.instruction, "is modelled for 16-bit floats in .rn only")
        if name == "fma":
            return lanes.fma16(kind, mode, "relu" in parts)
        return lanes.on_f32(kind, _with_flags(_NEAREST[name], [p for p in parts if p == "sat"]))
    function = _NEAREST[name] if mode == "rn" else _DIRECTED[name](mode)
    if name == "fma" and operation.src_kinds[:2] in ("GG", "FF"):
        load = lanes.bf16_to_f32 if operation.src_kinds[0] == "G" else lanes.f16_to_f32
        wide = function
        function = lambda a, b, c: wide(load(a), load(b), c)  # noqa: E731
    return _with_flags(function, parts)


def _minmax(operation: Operation, parts: list[str]) -> Function:
    largest = parts[0].startswith("max")
    kind = operation.dst_kinds
    if kind not in "fdFGVB":
        limit: Function = np.maximum if largest else np.minimum
        return (lambda a, b: np.maximum(limit(a, b), 0)) if "relu" in parts else limit
    if "NaN" in parts:
        base: Function = np.maximum if largest else np.minimum
    else:
        base = np.fmax if largest else np.fmin
    if "xorsign" in parts:
        plain: Function = base

        def signed(a: Array, b: Array) -> Array:
            sign = np.signbit(a) ^ np.signbit(b)
            r = plain(np.abs(a), np.abs(b))
            return np.where(sign, -r, r)

        base = signed

    function = base
    if parts[0].endswith("3"):
        function = lambda a, b, c: base(base(a, b), c)  # noqa: E731
    if "ftz" in parts:
        function = _with_flags(function, ["ftz"])
    return lanes.on_f32(kind, function) if kind in "FGVB" else function


_APPROXIMATE: dict[str, Function] = {
    "ex2": lanes.ex2,
    "lg2": lanes.lg2,
    "rcp": lanes.rcp,
    "rsqrt": lanes.rsqrt,
    "sqrt": lanes.through_f64(np.sqrt),
    "sin": lanes.through_f64(np.sin),
    "cos": lanes.through_f64(np.cos),
    "tanh": lanes.through_f64(np.tanh),
}


def _float_function(operation: Operation, parts: list[str]) -> Function:
    name, accuracy = parts[0], parts[1]
    kind = operation.dst_kinds
    function = _APPROXIMATE[name]
    if accuracy in ("rz", "rm", "rp"):
        if name != "rcp":
            raise unsupported(operation.instruction, f"is not modelled with .{accuracy}")
        function = lanes.rcp_directed(accuracy)
    if "ftz" in parts:
        function = lanes.ex2_ftz if name == "ex2" else _with_flags(function, ["ftz"])
    return lanes.on_f32(kind, function) if kind in "FGVB" else function


def _convert(operation: Operation, parts: list[str]) -> Function:
    """``cvt.TO.FROM.flags``."""
    to, of, flags = parts[1], parts[2], parts[3:]
    mode = next((f for f in flags if f in ("rn", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi", "rna")), None)
    refuse = unsupported(operation.instruction, "is a conversion that is not modelled")
    relu, ftz = "relu" in flags, "ftz" in flags
    integers = {"u8": np.uint8, "s8": np.int8, "u16": np.uint16, "s16": np.int16, "u32": np.uint32}
    integers |= {"s32": np.int32, "u64": np.uint64, "s64": np.int64}
    floats16 = {"f16": "F", "bf16": "G", "f16x2": "V", "bf16x2": "B"}
    if to in integers and of in integers:
        source: Any = np.dtype(integers[of])
        target: Any = np.dtype(integers[to])
        register = KIND_DTYPE[operation.dst_kinds]
        if "sat" in flags:
            info = np.iinfo(target)
            return lambda x: np.array(
                [min(max(v, info.min), info.max) for v in x.astype(source).tolist()], dtype=target
            ).astype(register)
        if source.itemsize >= target.itemsize and target.itemsize == register.itemsize:
            return lambda x: x.astype(target)
        return lambda x: x.astype(source).astype(target).astype(register)
    if to in integers:
        if of not in ("f32", "f16", "bf16") or mode not in ("rni", "rzi", "rmi", "rpi"):
            raise refuse
        convert = lanes.float_to_int(integers[to], mode)
        register = KIND_DTYPE[operation.dst_kinds]
        load: Function = {"f32": lanes.ftz if ftz else np.asarray, "f16": lanes.f16_to_f32}.get(
            of, lanes.bf16_to_f32
        )
        return lambda x: convert(load(x)).astype(register)
    if of in integers:
        source = np.dtype(integers[of])
        to_f32 = lanes.int_to_f32(mode or "rn")
        if to == "f32":
            return lambda x: to_f32(x.astype(source))
        if to == "f64" and source.itemsize <= 4:
            return lambda x: x.astype(source).astype(F8)
        if to in ("f16", "bf16") and mode == "rn" and source.itemsize <= 4:
            store: Function = (
                lanes.f64_to_f16 if to == "f16" else lambda s: lanes.f32_to_bf16(lanes.odd_f32(s))
            )
            return lambda x: store(x.astype(source).astype(F8))
        raise refuse
    if to == "f32" and of == "f32":
        rounding = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}.get(mode or "")
        function: Function = rounding if rounding is not None else np.positive
        if mode is not None and rounding is None:
            raise refuse
        return _with_flags(function, flags)
    if to == "f64" and of == "f32":
        return lambda x: x.astype(F8)
    if to == "f32" and of == "f64":
        return _with_flags(lambda x: lanes.round_f64(x, mode or "rn"), flags)
    if to == "f32" and of in ("f16", "bf16"):
        return lanes.f16_to_f32 if of == "f16" else lanes.bf16_to_f32
    if to in floats16 and of == "f32" and mode in ("rn", "rz") and not ({"sat", "satfinite"} & set(flags)):
        half = "bf16" not in to
        one: Function = {
            (True, "rn"): lanes.f32_to_f16,
            (True, "rz"): lanes.f32_to_f16_rz,
            (False, "rn"): lanes.f32_to_bf16,
            (False, "rz"): lanes.f32_to_bf16_rz,
        }[half, mode]
        if relu:
            plain = one
            one = lambda x: plain(np.where(x == x, np.maximum(x, np.float32(0)), x))  # noqa: E731
        if not to.endswith("x2"):
            return one
        if to == "bf16x2" and mode == "rn" and not relu:
            return lanes.bf16x2_rn
        return lambda a, b: lanes.pack16(one(a), one(b))
    raise refuse


def _saturating(a: Array, b: Array, function: Function) -> Array:
    wide = function(a.astype(np.int64), b.astype(np.int64))
    return np.clip(wide, -(1 << 31), (1 << 31) - 1).astype(np.int32)


_SIMPLE: dict[str, Function] = {
    "add": np.add,
    "sub": np.subtract,
    "add.sat": lambda a, b: _saturating(a, b, operator.add),
    "sub.sat": lambda a, b: _saturating(a, b, operator.sub),
    "mul.lo": np.multiply,
    "mul.hi": lanes.mul_hi,
    "mul.wide": lanes.mul_wide,
    "mad.lo": lambda a, b, c: a * b + c,
    "mad.hi": lambda a, b, c: lanes.mul_hi(a, b) + c,
    "mad.wide": lambda a, b, c: lanes.mul_wide(a, b) + c,
    "div": lanes.divide,
    "rem": lanes.remainder,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "cnot": lambda a: (a == 0).astype(a.dtype),
    "shl": lanes.shift_left,
    "shr": lanes.shift_right,
    "bfe": lanes.bit_extract,
    "bfi": lanes.bit_insert,
    "prmt": lanes.permute,
    "popc": lanes.popcount,
    "clz": lanes.leading_zeros,
    "bfind": lanes.bit_find,
    "brev": lanes.bit_reverse,
    "selp": lambda a, b, p: np.where(p, a, b),
    "copysign": lambda a, b: np.copysign(b, a),
}

_TESTP: dict[str, Function] = {
    "finite": np.isfinite,
    "infinite": np.isinf,
    "number": lambda x: x == x,
    "notanumber": np.isnan,
    "normal": lambda x: np.isfinite(x) & (np.abs(x) >= np.float32(2.0**-126)),
    "subnormal": lambda x: (x != 0) & (np.abs(x) < np.float32(2.0**-126)),
}


def resolve(operation: Operation) -> Function:
    """The function that computes an ``alu`` operation from arrays of its source kinds.

    Raises :class:`~fa4tune.emulator.parser.PtxError` for a variant outside of the model.
    """
    key = (operation.op, operation.dst_kinds, operation.src_kinds, bool(operation.attrs.get("two")))
    table = operation.attrs.get("table")
    try:
        return _resolve_cached(key, table)
    except LookupError:
        pass
    function = _resolve(operation)
    _CACHE[key, table] = function
    return function


_CACHE: dict[tuple[Any, Any], Function] = {}


def _resolve_cached(key: Any, table: Any) -> Function:
    return _CACHE[key, table]


def _resolve(operation: Operation) -> Function:
    parts = operation.op.split(".")
    name = parts[0]
    if operation.op in _SIMPLE:
        return _SIMPLE[operation.op]
    if name == "setp":
        return _setp(operation, parts)
    if name == "set":
        compare = _comparison(parts[1], operation.src_kinds[0] == "f")
        if parts[-1] == "f32":
            return lambda a, b: compare(a, b).astype(F4)
        return lambda a, b: np.negative(compare(a, b).astype(I4)).view(KIND_DTYPE[operation.dst_kinds])
    if name in ("add", "sub", "mul", "fma"):
        return _float_arithmetic(operation, parts)
    if name.rstrip("3") in ("min", "max"):
        return _minmax(operation, parts)
    if name in ("abs", "neg"):
        base: Function = np.abs if name == "abs" else np.negative
        if operation.dst_kinds in "FGVB":
            return lanes.on_f32(operation.dst_kinds, base)
        return _with_flags(base, parts)
    if name in _APPROXIMATE:
        return _float_function(operation, parts)
    if name == "div":
        return (
            _with_flags(lanes.div_rn, parts) if parts[1] in ("rn", "approx", "full") else _refuse(operation)
        )
    if name == "cvt":
        return _convert(operation, parts)
    if name == "shf":
        return lanes.funnel(parts[1], parts[2])
    if name == "lop3":
        return lanes.logic3(operation.attrs["table"])
    if name == "testp":
        return _TESTP[parts[1]]
    return _refuse(operation)


def _refuse(operation: Operation) -> Function:
    raise unsupported(operation.instruction, f"({operation.op}) is not modelled")


@cache
def constant(kind: str, bits: int, n: int = 32) -> Array:
    """A vector of one literal, given by its bits, in the type of ``kind``."""
    dtype = KIND_DTYPE[kind]
    if kind == "p":
        return np.full(n, bool(bits))
    if kind == "x":
        pair = np.array([bits & (1 << 64) - 1], dtype=U8).view(F4)
        return np.repeat(pair[:, None], n, axis=1)
    unsigned = np.dtype(f"u{dtype.itemsize}")
    value = np.full(n, bits & (1 << 8 * dtype.itemsize) - 1, dtype=unsigned).view(dtype)
    value.flags.writeable = False
    return value
