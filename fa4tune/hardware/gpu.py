"""GPUs as data: a TOML file a GPU, each number with its source, and what-if scaling of them."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from fa4tune.errors import HardwareError

ARCHITECTURES = {"sm_90a": "h200", "sm_100a": "b200", "sm_103a": "b300"}
"""Compile target -> the GPU that ``--arch`` alone stands for."""

SCALES = {
    "mma": ("mma_flops_per_clk",),
    "exp": ("exp_per_clk",),
    "smem": ("smem_bytes_per_clk",),
    "fma": ("fma_per_clk",),
    "issue": ("issue_per_clk", "warp_issue_per_clk", "alu_per_clk"),
    "tmem": ("tmem_load_bytes_per_clk", "tmem_store_bytes_per_clk"),
    "l2": ("l2_bytes_per_clk",),
    "hbm": ("hbm_gbytes_per_s",),
}
"""What-if names -> the rates that they multiply."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. Rates are of an SM in one clock; ``sources`` says where each number is from.

    ``clock_mhz`` is the clock under attention load, ``max_clock_mhz`` the highest. ``arch`` is the compile
    target. ``l2_bytes_per_clk`` is an SM's share of L2 bandwidth, ``hbm_gbytes_per_s`` the whole GPU's.

    Latencies are cycles (``..._clk``): ``mma_start_clk`` of tensor cores that fill up when another group of
    matrix instructions starts, ``mma_latency_clk`` from the end of a matrix operation's last pass to its
    reader, ``barrier_latency_clk`` from an arrival to the waiting warp's next instruction,
    ``turn_latency_clk`` the same of roles that take turns at a named barrier,
    ``vote_latency_clk`` of a vote of a warp and the branch that it decides,
    ``copy_latency_clk`` of a bulk copy that hits L2 and ``copy_miss_clk`` what a miss adds,
    ``tmem_latency_clk`` of a tensor-memory load, ``arithmetic_latency_clk`` the drain of a section of
    arithmetic (reductions across lanes included). ``tile_overhead_clk`` is what a tile costs beside its
    operations, ``cta_start_clk`` what a CTA's start and end cost.

    ``warp_issue_per_clk`` is what one warp alone issues in a section of dependent arithmetic; ``exp_overlap``
    the part of the shorter of its exponentials and its other instructions that hides under the longer;
    ``exp_beside_mma``, ``alu_beside_mma`` and ``fma_beside_mma`` the part of a pipe's rate that is left while
    tensor cores that keep their accumulators in registers work; ``contention`` how far other roles' use of
    the tensor cores or tensor memory delays a role (0 never, 1 as if they met at random and shared evenly),
    ``section_contention`` the part of a section of arithmetic for which its busiest pipe works;
    ``dense_hold`` for which part of its length independent arithmetic, which a scheduler finds ready every
    cycle, holds up other roles' matmuls; ``smem_conflict`` the part of SMEM writes and thread accesses that
    holds up operand reads of the tensor cores when they meet (1: they come first). ``hbm_efficiency`` is the
    part of the HBM bandwidth that a kernel reaches.

    ``mma_clock`` is the true SM clock over the one that the driver shows while tensor cores work.
    ``active_watts`` and ``tensor_watts`` are the power at ``max_clock_mhz`` of busy SMs without matrix work
    and what fully busy tensor cores add, ``l2_watts`` what moving ``l2_bytes_per_clk`` to every SM adds.
    """

    name: str
    title: str
    arch: str
    memory_class: str
    sm_count: int
    clock_mhz: float
    max_clock_mhz: float
    power_watts: float
    mma_flops_per_clk: float
    exp_per_clk: float
    smem_bytes_per_clk: float
    fma_per_clk: float
    alu_per_clk: float
    issue_per_clk: float
    smem_per_sm: int
    smem_per_cta: int
    registers_per_sm: int
    threads_per_sm: int
    tmem_columns: int
    tmem_load_bytes_per_clk: float
    tmem_store_bytes_per_clk: float
    l2_bytes: int
    l2_bytes_per_clk: float
    hbm_bytes: int
    hbm_gbytes_per_s: float
    launch_us: float
    mma_start_clk: float
    mma_latency_clk: float
    barrier_latency_clk: float
    turn_latency_clk: float
    vote_latency_clk: float
    copy_latency_clk: float
    copy_miss_clk: float
    tmem_latency_clk: float
    arithmetic_latency_clk: float
    warp_issue_per_clk: float
    exp_overlap: float
    exp_beside_mma: float
    alu_beside_mma: float
    fma_beside_mma: float
    contention: float
    section_contention: float
    smem_conflict: float
    dense_hold: float
    tile_overhead_clk: float
    cta_start_clk: float
    hbm_efficiency: float
    mma_clock: float
    active_watts: float
    tensor_watts: float
    l2_watts: float
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def key(self) -> str:
        """Hardware key of tables: architecture, SM count and memory class; the name is provenance only."""
        return f"{self.arch}-{self.sm_count}sm-{self.memory_class}"

    @property
    def peak_tflops(self) -> float:
        """Dense bf16 TFLOP/s at ``clock_mhz``."""
        return self.mma_flops_per_clk * self.sm_count * self.clock_mhz * 1e-6

    @property
    def hbm_bytes_per_clk(self) -> float:
        """An SM's share of HBM bandwidth in one clock at ``clock_mhz``."""
        return self.hbm_gbytes_per_s * 1e3 / (self.clock_mhz * self.sm_count)

    def scaled(self, **factors: float) -> Gpu:
        """A GPU that does not exist: rates multiplied by ``factors`` (keys of :data:`SCALES`).

        Raises:
            HardwareError: an unknown rate or a factor that is not positive.
        """
        changes: dict[str, Any] = {}
        for name, factor in factors.items():
            if name not in SCALES:
                raise HardwareError(f"rate {name!r} cannot be scaled; use one of {', '.join(SCALES)}")
            if not factor > 0:
                raise HardwareError(f"scale {name}={factor} is not positive; give a factor above 0")
            changes.update({rate: getattr(self, rate) * factor for rate in SCALES[name]})
        label = "+".join(f"{name}x{factor:g}" for name, factor in factors.items())
        return dataclasses.replace(self, name=f"{self.name}[{label}]", **changes) if factors else self


_NUMBERS = {f.name: f.type for f in dataclasses.fields(Gpu)[4:-1]}
_WORDS = ("name", "title", "arch", "memory_class")

_DIVISORS = (
    "sm_count", "clock_mhz", "max_clock_mhz", "power_watts", "mma_flops_per_clk", "exp_per_clk",
    "smem_bytes_per_clk", "fma_per_clk", "alu_per_clk", "issue_per_clk", "warp_issue_per_clk",
    "l2_bytes_per_clk", "hbm_gbytes_per_s", "hbm_efficiency",
)  # fmt: skip
"""Numbers that times are divided by, above 0 on any GPU; those of tensor memory are where there is one."""


def _read(text: str, origin: str, parent: Gpu | None = None, file: Path | None = None) -> Gpu:
    """A GPU from TOML; on top of ``parent``, else of the one that a line ``base`` names.

    A ``file`` of one's own that does not name itself is called as the file is.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise HardwareError(f"{origin} is not TOML ({error}); see a file of fa4tune/hardware") from None
    base: dict[str, Any] = {}
    sources: dict[str, str] = {}
    named = data.pop("base", None)
    if parent is None and named is not None:
        name = str(named)
        if file is not None and name.endswith(".toml"):
            name = str(file.parent / name)  # as the file sees it
        parent = load_gpu(name)
    if parent is not None:
        base = {f.name: getattr(parent, f.name) for f in dataclasses.fields(Gpu) if f.name != "sources"}
        sources = dict(parent.sources)
        if file is not None:
            base["name"] = str(data.get("name", file.stem))
            base["title"] = f"{base['name']} (from {parent.name})"
    for key, entry in data.items():
        if key in _WORDS:
            if not isinstance(entry, str):
                raise HardwareError(f"{origin}: {key} must be text, got {entry!r}")
            base[key] = entry
        elif key in _NUMBERS:
            if not isinstance(entry, dict) or "value" not in entry or "source" not in entry:
                raise HardwareError(f"{origin}: {key} needs a table with value and source")
            value = entry["value"]
            least = "above 0" if key in _DIVISORS else "of at least 0"
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not number or value < 0 or (value == 0 and key in _DIVISORS):
                raise HardwareError(f"{origin}: {key} must be a number {least}, got {value!r}")
            base[key] = int(value) if _NUMBERS[key] == "int" else float(value)
            sources[key] = str(entry["source"])
        else:
            raise HardwareError(f"{origin}: {key!r} is not a field of a GPU; see a file of fa4tune/hardware")
    missing = [k for k in (*_WORDS, *_NUMBERS) if k not in base]
    if missing:
        some = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise HardwareError(f'{origin} lacks {some}; add them or a line base = "h200"')
    if base["arch"] not in ARCHITECTURES:
        raise HardwareError(f"{origin}: arch {base['arch']!r} is not one of {', '.join(ARCHITECTURES)}")
    gpu = Gpu(**base, sources=sources)
    if gpu.tmem_columns and not (gpu.tmem_load_bytes_per_clk and gpu.tmem_store_bytes_per_clk):
        raise HardwareError(
            f"{origin}: tmem_load_bytes_per_clk and tmem_store_bytes_per_clk must be above 0 "
            f"with tmem_columns={gpu.tmem_columns}"
        )
    return gpu


def gpu_names() -> list[str]:
    """Names that :func:`load_gpu` knows."""
    files = resources.files("fa4tune.hardware").iterdir()
    return sorted(f.name.removesuffix(".toml") for f in files if f.name.endswith(".toml"))


@cache
def load_gpu(name: str, *, fitted: bool = True) -> Gpu:
    """A GPU by name (``h100``, ``h200``, ``b200``, ``b300``) or from a TOML file of one's own.

    What was fitted to measured kernels of a known GPU lies in ``calibrated/NAME.toml`` and replaces the
    file's own numbers; ``fitted=False`` leaves that out.

    A file may start from a known GPU with ``base = "h200"`` (or from another file, by its path from the
    first) and override numbers, each with its source; a calibration overlay is such a file. Its name is its
    line ``name``, else the file's name without ``.toml``.

    Raises:
        HardwareError: the name is unknown, or the file is missing or malformed.
    """
    if name.endswith(".toml"):
        path = Path(name)
        if not path.is_file():
            raise HardwareError(
                f"hardware file {name!r} does not exist; give a name or an existing TOML file"
            )
        try:
            return _read(path.read_text(), name, file=path)
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no text"
            raise HardwareError(
                f"hardware file {name!r} cannot be read ({reason}); give a TOML file"
            ) from None
        except RecursionError:
            raise HardwareError(f"{name}: its base leads back to itself; give base a GPU's name") from None
    known = gpu_names()
    if name.lower() not in known:
        raise HardwareError(f"GPU {name!r} is not known; use one of {', '.join(known)} or a TOML file")
    folder, file = resources.files("fa4tune.hardware"), f"{name.lower()}.toml"
    gpu = _read(folder.joinpath(file).read_text(), file)
    overlay = folder.joinpath("calibrated", file)
    if fitted and overlay.is_file():
        return _read(overlay.read_text(), f"calibrated/{file}", gpu)
    return gpu


def choose_gpu(gpu: str | None, arch: str | None) -> Gpu:
    """The GPU that ``--gpu`` and ``--arch`` name together; neither means a B200.

    Raises:
        HardwareError: unknown names, or a GPU of another architecture than ``arch``.
    """
    if arch is not None and arch not in ARCHITECTURES:
        raise HardwareError(f"arch {arch!r} is not known; use one of {', '.join(ARCHITECTURES)}")
    if gpu is None:
        return load_gpu(ARCHITECTURES[arch or "sm_100a"])
    chosen = load_gpu(gpu)
    if arch is not None and chosen.arch != arch:
        raise HardwareError(
            f"--gpu {gpu} is {chosen.arch} but --arch says {arch}; give one of the two or a matching pair"
        )
    return chosen
