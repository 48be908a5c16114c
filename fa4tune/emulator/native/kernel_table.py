"""Which function of ``kernels.c`` computes an operation.

:func:`kernel` gives (name, literal arguments, whether it returns a predicate), or None for an operation that
is left to the NumPy function. Kind ``x`` is computed as two of ``f`` by the caller.
"""

from __future__ import annotations

from fa4tune.emulator.isa import Operation

Kernel = tuple[str, tuple[int, ...], bool]

_UNSIGNED = {"s": "h", "i": "u", "l": "q", "h": "h", "u": "u", "q": "q", "H": "h", "W": "u", "Q": "q"}
_SIGNLESS = {
    "add": "add", "sub": "sub", "mul.lo": "mul", "and": "and", "or": "or", "xor": "xor", "not": "not",
    "cnot": "cnot", "neg": "neg", "mad.lo": "mad", "shl": "shl",
}  # fmt: skip
_BY_KIND = {
    "mul.hi": "mulhi", "mul.wide": "mulwide", "mad.hi": "madhi", "mad.wide": "madwide", "div": "div",
    "rem": "rem", "min": "min", "max": "max", "abs": "abs", "shr": "shr", "bfe": "bfe", "bfi": "bfi",
    "min.relu": "min_relu", "max.relu": "max_relu", "popc": "popc", "clz": "clz", "brev": "brev",
    "bfind": "bfind",
}  # fmt: skip
_INTEGERS = "hsuiql"
_SIGNEDNESS_MATTERS = {"mulwide", "madwide", "popc", "clz", "bfind"}
_MISSING = {"madhi_q", "madhi_l", "brev_q"}


def kernel(operation: Operation, half_floats: bool) -> Kernel | None:
    """The kernel of an ``alu`` operation; ``half_floats`` says that the C compiler knows float16."""
    parts = operation.op.split(".")
    name, kind = parts[0], operation.dst_kinds
    first = operation.src_kinds[:1]
    if first in _INTEGERS and kind in _INTEGERS:
        found = _integer(operation, kind, first)
        if found is not None:
            return found
    if name == "setp":
        return None if first in "FGp" else (f"setp_{parts[1]}_{first}", (), True)
    if name == "testp":
        return f"testp_{parts[1]}", (), True
    if name == "shf":
        return f"shf_{parts[1]}_{parts[2]}", (), False
    if name == "prmt":
        return "prmt", (), False
    if name == "lop3":
        return "lop3", (operation.attrs["table"] & 255,), False
    if name == "cvt":
        return _convert(operation, parts, half_floats)
    return _float(operation, parts, half_floats)


def _integer(operation: Operation, kind: str, first: str) -> Kernel | None:
    if operation.op in _SIGNLESS:
        return f"{_SIGNLESS[operation.op]}_{_UNSIGNED[kind]}", (), False
    stem = _BY_KIND.get(operation.op)
    if stem is None:
        return None
    if stem in ("bfi", "popc", "clz"):
        first = _UNSIGNED[first]
    if stem == "abs" and first in "huq":
        return None
    name = f"{stem}_{first}"
    return None if name in _MISSING else (name, (), False)


def _float(operation: Operation, parts: list[str], half_floats: bool) -> Kernel | None:
    name, kind, flags = parts[0], operation.dst_kinds, parts[1:]
    if kind not in ("f", "d", "x"):
        return None
    base = "f" if kind == "x" else kind
    suffix = "".join(f"_{f}" for f in ("ftz", "sat") if f in flags)
    if kind == "d" and suffix:
        return None
    if name in ("add", "sub", "mul", "fma"):
        mode = flags[0]
        if mode != "rn" and (suffix not in ("", "_ftz") or kind == "d"):
            return None
        if name == "fma" and operation.src_kinds[:2] in ("GG", "FF"):
            if mode != "rn" or suffix or (operation.src_kinds[0] == "F" and not half_floats):
                return None
            return f"fma_rn_{operation.src_kinds}", (), False
        if name == "fma" and kind == "d":
            return None
        return f"{name}_{mode}{suffix}_{base}", (), False
    if name in ("min", "max", "min3", "max3"):
        if kind != "f" or "xorsign" in flags:
            return None
        stem = name.rstrip("3") + ("nan" if "NaN" in flags else "") + ("3" if name.endswith("3") else "")
        return f"{stem}{suffix}_f", (), False
    if name in ("abs", "neg"):
        return f"{name}{suffix}_{base}", (), False
    if kind != "f":
        return None
    if name == "copysign":
        return "copysign_f", (), False
    if name in ("ex2", "lg2"):
        return f"{name}{suffix}_f", (), False
    if name in ("rcp", "rsqrt", "sqrt") and flags[0] in ("approx", "rn"):
        return f"{name}{suffix}_f", (), False
    if name == "div" and flags[0] in ("rn", "approx", "full"):
        return f"div{suffix}_f", (), False
    return None


_BITS = {"u16": 16, "s16": 16, "u32": 32, "s32": 32, "u64": 64, "s64": 64}
_ROUND_TO_INTEGER = ("rni", "rzi", "rmi", "rpi")


def _convert(operation: Operation, parts: list[str], half_floats: bool) -> Kernel | None:
    to, of, flags = parts[1], parts[2], set(parts[3:])
    if flags & {"relu", "sat", "satfinite", "rna"}:
        return None
    whole = next((f for f in parts[3:] if f in _ROUND_TO_INTEGER), None)
    nearest = not flags & {"rz", "rm", "rp"}
    if to in _BITS and of in _BITS:
        return f"cvt_{of}_{_BITS[to]}", (), False
    if to in _BITS and of in ("u8", "s8"):
        return f"cvt_{of}{_UNSIGNED[operation.src_kinds]}_{_BITS[to]}", (), False
    if of == "f32" and to in ("s32", "u32", "s64", "u64") and whole and "ftz" not in flags:
        return f"cvt_{whole}_{to}", (), False
    if to == "f32" and of == "f32":
        if whole:
            return f"cvt_{whole}{'_ftz' if 'ftz' in flags else ''}_f32", (), False
        return ("cvt_ftz_f32", (), False) if flags == {"ftz"} else None
    if to == "f32" and (of in _BITS or of in ("bf16", "f64") or (of == "f16" and half_floats)):
        return (f"cvt_f32_{of}", (), False) if nearest and "ftz" not in flags else None
    if to == "f64" and of in ("s32", "u32", "f32"):
        return f"cvt_f64_{of}", (), False
    if of == "f32" and to in ("bf16", "bf16x2") and flags <= {"rn", "rz"} and flags:
        return f"cvt_{to}_{flags.pop()}", (), False
    if of == "f32" and to in ("f16", "f16x2") and flags == {"rn"} and half_floats:
        return f"cvt_{to}_rn", (), False
    return None
