"""Where an entry lives: hardware, kernel class, bucket, kernel version; and the one rule that makes buckets.

Keys hold integers and strings only, so that two processes, or two machines, never disagree about one.

**The bucket rule**: a number is replaced by the power of two nearest to it in ratio (:func:`rounded`). It
applies to the sequence lengths, to the window sizes and to the work tiles per SM (tiles of 128 query rows,
rounded up to a whole number an SM). Everything else of a problem is kept exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from fa4tune.hardware.gpu import Gpu
from fa4tune.kernels.config import default_config
from fa4tune.kernels.kernel_class import KernelClass
from fa4tune.kernels.tiles import ceil_div, work_tiles
from fa4tune.problem import AttentionProblem

TILE_ROWS = 128
"""Query rows of the tile that the bucket counts work in, whatever tile a config has."""

PROBLEM_FIELDS = {
    "batch": "bucket",  # through the work tiles per SM
    "heads": "bucket",  # through the work tiles per SM, and exactly as the group of a key head
    "kv_heads": "bucket",  # exactly, as the group: heads // kv_heads
    "seqlen_q": "bucket",
    "seqlen_k": "bucket",
    "head_dim": "class",
    "head_dim_v": "class",
    "dtype": "class",
    "mask": "class",  # the kind; window sizes are runtime arguments and go to the bucket
    "direction": "class",
}
"""Which part of the key each field of a problem decides. A test holds it against the dataclass."""

HARDWARE_FIELDS = ("arch", "sm_count", "memory_class")
"""Fields of a GPU in its key. Name, clocks, power and rates are provenance: renamed parts stay the same part,
and a what-if GPU is never looked up."""


@dataclass(frozen=True, slots=True)
class TableKey:
    """The key of a table entry, the exact problem left out.

    Args:
        hardware: architecture, SM count and memory class (:attr:`Gpu.key`).
        kernel_class: all that is compiled in but the config (:func:`kernel_class`).
        bucket: rounded lengths and work per SM (:func:`bucket`).
        kernel_version: integer of the kernel; numbers of different versions are not comparable.
    """

    hardware: str
    kernel_class: str
    bucket: str
    kernel_version: int

    @property
    def parts(self) -> tuple[str, str, str]:
        """The directories of a table that lead to the entries of this key."""
        return self.hardware, f"{self.kernel_class}-v{self.kernel_version}", self.bucket

    def __str__(self) -> str:
        return "/".join(self.parts)


def rounded(number: int) -> int:
    """The power of two nearest to ``number`` in ratio; 0 stays 0.

    With ``p`` the largest power of two up to ``n``, the result is ``p`` where ``n**2 < 2 p**2`` and else
    ``2 p``; ``n**2 == 2 p**2`` has no solution in integers.
    """
    if number < 1:
        return 0
    power = 1 << (number.bit_length() - 1)
    return power if number * number < 2 * power * power else 2 * power


def kernel_class(problem: AttentionProblem, arch: str) -> str:
    """All that the kernel for ``problem`` is compiled for, without the config (:attr:`KernelClass.name`).

    Raises:
        ConfigError: no kernel exists for ``arch``.
    """
    return KernelClass.from_problem(problem, default_config(problem, arch), arch).name


def tiles_per_sm(problem: AttentionProblem, gpu: Gpu) -> int:
    """Work tiles of :data:`TILE_ROWS` query rows an SM has to do, rounded up."""
    return ceil_div(work_tiles(problem, TILE_ROWS), gpu.sm_count)


def bucket(problem: AttentionProblem, gpu: Gpu) -> str:
    """The problems that share tuned configs: the bucket rule applied to ``problem``."""
    text = (
        f"sq{rounded(problem.seqlen_q)}-sk{rounded(problem.seqlen_k)}"
        f"-g{problem.gqa_group}-t{rounded(tiles_per_sm(problem, gpu))}"
    )
    if problem.mask_kind == "window":
        left, right = (rounded(size or 0) for size in problem.window)
        text += f"-w{left}-{right}"
    return text


def table_key(problem: AttentionProblem, gpu: Gpu) -> TableKey:
    """The key under which ``problem`` on ``gpu`` is stored and looked up.

    Raises:
        ConfigError: no kernel exists for the GPU's architecture.
    """
    compiled = KernelClass.from_problem(problem, default_config(problem, gpu.arch), gpu.arch)
    return TableKey(gpu.key, compiled.name, bucket(problem, gpu), compiled.version)


def distance(a: AttentionProblem, b: AttentionProblem) -> float:
    """How far two problems of one bucket are apart: the sum of the ratios of their differing sizes.

    Only for choosing the nearest of several entries: each size adds its larger value over its smaller one,
    less 1, so equal problems are at 0.
    """
    total = 0.0
    for field in fields(AttentionProblem):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if isinstance(x, int):
            total += max(x, y) / min(x, y) - 1
    return total
