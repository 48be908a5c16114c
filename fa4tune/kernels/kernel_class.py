"""The kernel class: everything that is compiled in, and nothing that is a runtime argument."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fa4tune.errors import ConfigError
from fa4tune.kernels.config import CONFIGS, KERNEL_VERSIONS, KernelConfig
from fa4tune.problem import AttentionProblem

KERNEL_MODULES = {
    "sm90_fwd": "fa4tune.kernels.sm90.forward",
    "sm100_fwd": "fa4tune.kernels.sm100.forward",
}
"""Module of a family's device code. Its ``build(problem, config)`` gives (host function, fake arguments)."""

_MASKS = {"full": "full", "causal": "causal", "window": "win128-128"}


def packed_heads(problem: AttentionProblem, family: str) -> int:
    """Query heads of a group that share a tile in a family's kernel; 1 where it does not pack."""
    if family == "sm100_fwd":
        from fa4tune.kernels.sm100 import forward_plan

        return forward_plan.packed_heads(problem)
    return 1


@dataclass(frozen=True, slots=True)
class KernelClass:
    """What a kernel is compiled for.

    Args:
        family: kernel family, a key of :data:`KERNEL_MODULES`.
        arch: compile target (``sm_90a``).
        direction, dtype, head_dim, head_dim_v: of the problem.
        mask_kind: ``full``, ``causal`` or ``window``; window sizes are runtime arguments.
        packed_heads: query heads of a group whose rows share a tile; 1 without packing.
        config: knob values.
    """

    family: str
    arch: str
    direction: str
    dtype: str
    head_dim: int
    head_dim_v: int
    mask_kind: str
    packed_heads: int
    config: KernelConfig

    @classmethod
    def from_problem(cls, problem: AttentionProblem, config: KernelConfig, arch: str) -> KernelClass:
        """The class that serves ``problem`` with ``config``; how many heads it packs is the family's rule.

        Raises:
            ConfigError: the config is of another architecture's kernel.
        """
        if arch not in CONFIGS or not isinstance(config, CONFIGS[arch]):
            wanted = CONFIGS[arch].family if arch in CONFIGS else f"one of {', '.join(CONFIGS)}"
            raise ConfigError(f"a {config.family} config does not compile for {arch}; it takes {wanted}")
        return cls(
            config.family,
            arch,
            problem.direction,
            problem.dtype,
            problem.head_dim,
            problem.head_dim_v,
            problem.mask_kind,
            packed_heads(problem, config.family),
            config,
        )

    @property
    def name(self) -> str:
        """Canonical string without the config, fit for file names and table keys."""
        return (
            f"{self.family}_{self.arch.replace('_', '')}_d{self.head_dim}_dv{self.head_dim_v}_{self.dtype}"
            f"_{self.mask_kind}_pack{self.packed_heads}_{self.direction}"
        )

    def __str__(self) -> str:
        return f"{self.name}[{self.config}]"

    @property
    def version(self) -> int:
        """Version of the kernel, of :data:`fa4tune.kernels.config.KERNEL_VERSIONS`."""
        return KERNEL_VERSIONS[self.family]

    @property
    def module(self) -> str:
        """Module that holds the kernel."""
        return KERNEL_MODULES[self.family]

    def with_config(self, config: KernelConfig) -> KernelClass:
        """The same class with other knob values."""
        return replace(self, config=config)

    def representative(self) -> AttentionProblem:
        """The one problem that the class is compiled from, so that an object depends on its class alone.

        Long enough that no choice for short sequences applies.
        """
        return AttentionProblem(
            batch=4,
            heads=16 * self.packed_heads,
            kv_heads=16,
            seqlen_q=8192,
            seqlen_k=8192,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            dtype=self.dtype,
            mask=_MASKS[self.mask_kind],
            direction=self.direction,
        )

    def as_dict(self) -> dict[str, Any]:
        """JSON form; :meth:`from_dict` is the inverse."""
        return {
            "family": self.family,
            "arch": self.arch,
            "direction": self.direction,
            "dtype": self.dtype,
            "head_dim": self.head_dim,
            "head_dim_v": self.head_dim_v,
            "mask_kind": self.mask_kind,
            "packed_heads": self.packed_heads,
            "config": self.config.as_dict(),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> KernelClass:
        """Read back what :meth:`as_dict` wrote.

        Raises:
            ConfigError: the architecture is unknown, or the config was written for another kernel version.
        """
        arch = values["arch"]
        if arch not in CONFIGS:
            raise ConfigError(f"architecture {arch!r} is not known; use one of {', '.join(CONFIGS)}")
        return cls(**{**values, "config": CONFIGS[arch].from_dict(values["config"])})
