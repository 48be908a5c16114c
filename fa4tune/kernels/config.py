"""Knobs of the kernels, defined once: keys, CLI options, table fields and search space derive from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from fa4tune.errors import ConfigError
from fa4tune.problem import AttentionProblem

MAX_CTA_REGISTERS = 65536
"""32-bit registers of an SM (Hopper and Blackwell)."""

SCHEDULERS = ("single", "persistent", "lpt")
"""One tile a CTA; a static persistent loop; longest tile first with heads in L2-sized sections."""

KERNEL_VERSIONS = {"sm90_fwd": 2, "sm100_fwd": 2}
"""Raised by hand when tuned numbers of a kernel family stop being comparable with those of earlier ones."""

ROW_SUMS = ("after_p", "with_exponentials")
"""When a row's exponentials are added up: while PV runs already, or as they are computed."""

SHARE_STEP = 1 / 16
"""Emulated shares of exponentials are multiples of this."""


def _integer(text: str) -> int:
    return int(text)


def _boolean(text: str) -> bool:
    lowered = text.lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off"):
        return False
    raise ValueError(text)


def _registers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("/"))


def _format(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "/".join(str(part) for part in value)
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def _knob(default: Any, parse: Callable[[str], Any], choices: Iterable[Any], doc: str) -> Any:
    return field(default=default, metadata={"parse": parse, "choices": tuple(choices), "doc": doc})


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """Base of the configs: parsing, formatting, replacing. Subclasses are validated at construction.

    ``choices`` of a knob are what a search draws from; the set of valid values is wider.
    """

    family: ClassVar[str] = ""

    @classmethod
    def knobs(cls) -> dict[str, dataclasses.Field[Any]]:
        """The knobs by name, in order."""
        return {f.name: f for f in dataclasses.fields(cls)}

    @classmethod
    def choices(cls, name: str) -> tuple[Any, ...]:
        """Values a search draws from."""
        choices: tuple[Any, ...] = cls.knobs()[name].metadata["choices"]
        return choices

    def with_text(self, text: str) -> Self:
        """A copy with the knobs of ``key=value,...`` changed; ``registers`` falls back to its default.

        Raises:
            ConfigError: unknown knob, unreadable value, or a value out of range.
        """
        changes: dict[str, Any] = {}
        knobs = self.knobs()
        for part in filter(None, (p.strip() for p in text.split(","))):
            name, equals, value = part.partition("=")
            if not equals:
                raise ConfigError(f"{part!r} is not key=value; write for example tile_n=128,kv_stages=2")
            if name not in knobs:
                raise ConfigError(
                    f"knob {name!r} does not exist in the {self.family} kernel; it has {', '.join(knobs)}"
                )
            if name in changes:
                raise ConfigError(f"{name} is given twice in {text!r}; give it once")
            try:
                changes[name] = knobs[name].metadata["parse"](value)
            except ValueError:
                raise ConfigError(
                    f"{name}={value!r} cannot be read; {name} is: {knobs[name].metadata['doc']}"
                ) from None
        return self.replace(**changes)

    def replace(self, **changes: Any) -> Self:
        """A copy with ``changes``; where they do not name ``registers`` it takes the new config's default."""
        return dataclasses.replace(self, **{"registers": (), **changes})

    def as_dict(self) -> dict[str, Any]:
        """Knob values by name, as JSON holds them."""
        return {
            name: list(value) if isinstance(value := getattr(self, name), tuple) else value
            for name in self.knobs()
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The inverse of :meth:`as_dict`.

        Raises:
            ConfigError: a knob is missing or unknown, or a value is out of range.
        """
        if set(values) != set(cls.knobs()):
            odd = ", ".join(sorted(set(values) ^ set(cls.knobs())))
            raise ConfigError(
                f"config has the wrong knobs ({odd}); it was written for another kernel version"
            )
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})

    def __str__(self) -> str:
        return ",".join(f"{name}={_format(getattr(self, name))}" for name in self.knobs())

    def _fail(self, name: str, want: str) -> ConfigError:
        return ConfigError(f"{name}={_format(getattr(self, name))} is out of range; {want}")

    def _check_exp2(self, share: float, degree: int, threshold: float, scheduler: str) -> None:
        if not 0 <= share <= 1 or share / SHARE_STEP != int(share / SHARE_STEP):
            raise self._fail("exp2_share", "use a multiple of 0.0625 from 0 to 1")
        if degree not in (1, 2, 3, 4, 5):
            raise self._fail("exp2_degree", "use 1 to 5")
        if not 0 <= threshold <= 120:
            raise self._fail("rescale_threshold", "use 0 (always rescale) to 120, in log2 units")
        if scheduler not in SCHEDULERS:
            raise self._fail("scheduler", f"use one of {', '.join(SCHEDULERS)}")

    def _check_registers(self, registers: tuple[int, ...], roles: str) -> None:
        if len(registers) != len(roles.split("/")):
            raise self._fail("registers", f"give one count a role, {roles}")
        if any(not isinstance(r, int) or r % 8 or not 24 <= r <= 256 for r in registers):
            raise self._fail("registers", "setmaxnreg takes multiples of 8 from 24 to 256")


@dataclass(frozen=True, slots=True)
class SM90ForwardConfig(KernelConfig):
    """Forward kernel for Hopper: a producer warpgroup and ``tile_m / 64`` MMA warpgroups.

    ``registers`` is (MMA warpgroup, producer warpgroup) a thread. Empty means the default for the tile.
    """

    family: ClassVar[str] = "sm90_fwd"

    tile_m: int = _knob(128, _integer, (64, 128, 192, 256), "query rows of a CTA, 64 a warpgroup")
    tile_n: int = _knob(
        128, _integer, tuple(range(48, 257, 16)), "keys of an iteration, a multiple of 16 up to 256"
    )
    kv_stages: int = _knob(2, _integer, (1, 2, 3, 4), "slots of the K ring and of the V ring")
    ctas_per_sm: int = _knob(1, _integer, (1, 2), "CTAs resident on an SM")
    overlap: bool = _knob(True, _boolean, (False, True), "issue QK of the next tile before PV of this one")
    ping_pong: bool = _knob(False, _boolean, (False, True), "warpgroups take turns on the tensor cores")
    p_in_registers: bool = _knob(True, _boolean, (False, True), "P feeds PV from registers, not from SMEM")
    exp2_share: float = _knob(
        0.0, float, (0.0, 0.0625, 0.125, 0.25), "share of the exponentials done by a polynomial"
    )
    exp2_degree: int = _knob(3, _integer, (2, 3), "degree of that polynomial")
    rescale_threshold: float = _knob(
        0.0, float, (0.0, 8.0), "growth of the row maximum, in log2 units, that triggers a rescale"
    )
    registers: tuple[int, ...] = _knob((), _registers, ((),), "registers a thread: MMA warpgroups/producer")
    scheduler: str = _knob("persistent", str, SCHEDULERS, "single, persistent or lpt")

    @property
    def warpgroups(self) -> int:
        """MMA warpgroups, 64 query rows each."""
        return self.tile_m // 64

    @property
    def threads(self) -> int:
        """Threads of a CTA, the producer warpgroup included."""
        return 128 * (self.warpgroups + 1)

    def __post_init__(self) -> None:
        if self.tile_m not in (64, 128, 192, 256):
            raise self._fail("tile_m", "use 64, 128, 192 or 256")
        if self.tile_n % 16 or not 16 <= self.tile_n <= 256:
            raise self._fail("tile_n", "use a multiple of 16 from 16 to 256")
        if not 1 <= self.kv_stages <= 8:
            raise self._fail("kv_stages", "use 1 to 8")
        if self.ctas_per_sm not in (1, 2):
            raise self._fail("ctas_per_sm", "use 1 or 2")
        self._check_exp2(self.exp2_share, self.exp2_degree, self.rescale_threshold, self.scheduler)
        if not self.registers:
            object.__setattr__(self, "registers", self._default_registers())
        self._check_registers(self.registers, "mma/producer")

    @property
    def launch_registers(self) -> int:
        """Registers a thread at launch: an equal share of the SM, in steps of 8."""
        return min(MAX_CTA_REGISTERS // (self.threads * self.ctas_per_sm) // 8 * 8, 256)

    def _default_registers(self) -> tuple[int, int]:
        """Producer at 24 or 32, MMA warpgroups the rest of what the launch allocated, at most 240."""
        pool = self.launch_registers * (self.warpgroups + 1)
        producer = 24 if self.warpgroups <= 2 else 32
        return min(240, (pool - producer) // self.warpgroups // 8 * 8), producer


@dataclass(frozen=True, slots=True)
class SM100ForwardConfig(KernelConfig):
    """Forward kernel for Blackwell: a softmax warpgroup a query tile, a correction warpgroup, MMA, TMA.

    ``registers`` is (softmax, correction, other) a thread. Defaults are FlashAttention-4's dense head-dim-128
    choice (upstream 4.0.0b36); :func:`default_config` gives those of other classes.
    """

    family: ClassVar[str] = "sm100_fwd"

    tile_n: int = _knob(128, _integer, tuple(range(64, 193, 16)), "keys of an iteration, a multiple of 16")
    kv_stages: int = _knob(3, _integer, (2, 3, 4, 5, 6, 8, 10), "slots of the ring that K and V share")
    q_tiles: int = _knob(2, _integer, (1, 2), "128-row query tiles of a CTA")
    cta_group: int = _knob(1, _integer, (1, 2), "CTAs that execute one MMA together")
    exp2_share: float = _knob(
        0.1875, float, tuple(s / 16 for s in range(7)), "share of the exponentials done by a polynomial"
    )
    exp2_degree: int = _knob(3, _integer, (2, 3, 4), "degree of that polynomial")
    exp2_start: int = _knob(1, _integer, (0, 1), "first 32-column fragment of a row that may be emulated")
    rescale_threshold: float = _knob(
        8.0, float, (0.0, 4.0, 8.0), "growth of the row maximum, in log2 units, that triggers a rescale"
    )
    p_split: float = _knob(
        0.75, float, (0.5, 0.75, 1.0), "part of P whose arrival lets the first part of PV start"
    )
    row_sum: str = _knob(
        "after_p", str, ROW_SUMS, "after_p (rows are added up while PV runs) or with_exponentials"
    )
    registers: tuple[int, ...] = _knob(
        (), _registers, ((), (184, 80, 64), (192, 72, 56), (176, 88, 72), (200, 64, 48)),
        "registers a thread: softmax/correction/other",
    )  # fmt: skip
    scheduler: str = _knob("persistent", str, SCHEDULERS, "single, persistent or lpt")

    @property
    def threads(self) -> int:
        """Threads of a CTA: a warpgroup a query tile, one for corrections, one of single-warp roles."""
        return 128 * (self.q_tiles + 2)

    @property
    def launch_registers(self) -> int:
        """Registers a thread at launch: an equal share of the SM, in steps of 8."""
        return min(MAX_CTA_REGISTERS // self.threads // 8 * 8, 256)

    def __post_init__(self) -> None:
        if self.tile_n % 16 or not 16 <= self.tile_n <= 256:
            raise self._fail("tile_n", "use a multiple of 16 from 16 to 256")
        if not 1 <= self.kv_stages <= 32:
            raise self._fail("kv_stages", "use 1 to 32")
        if self.q_tiles not in (1, 2):
            raise self._fail("q_tiles", "use 1 or 2")
        if self.cta_group not in (1, 2):
            raise self._fail("cta_group", "use 1 or 2")
        if not 0 <= self.exp2_start <= 7:
            raise self._fail("exp2_start", "use 0 to 7")
        if not 0 < self.p_split <= 1:
            raise self._fail("p_split", "use a part above 0, up to 1")
        if self.row_sum not in ROW_SUMS:
            raise self._fail("row_sum", f"use one of {', '.join(ROW_SUMS)}")
        self._check_exp2(self.exp2_share, self.exp2_degree, self.rescale_threshold, self.scheduler)
        if not self.registers:
            object.__setattr__(self, "registers", (192, 72, 56) if self.cta_group == 1 else (184, 80, 64))
        self._check_registers(self.registers, "softmax/correction/other")


CONFIGS: dict[str, type[KernelConfig]] = {
    "sm_90a": SM90ForwardConfig,
    "sm_100a": SM100ForwardConfig,
    "sm_103a": SM100ForwardConfig,
}
"""Config class of the forward kernel by compile target."""


def default_config(problem: AttentionProblem, arch: str) -> KernelConfig:
    """The config that a problem's class gets without a search.

    Blackwell: the choices of FlashAttention-4 (upstream 4.0.0b36 tuning table; off-emulation on ``sm_103a``).
    Hopper: what is fastest, or nearly so, over all lengths measured of a class on an H200
    (``studies/campaign.py``): a rescale threshold, a persistent grid, and for causal masks smaller tiles at
    head dim 64 and warpgroups without turns at 128.

    Raises:
        ConfigError: no kernel exists for the architecture.
    """
    if arch not in CONFIGS:
        raise ConfigError(f"no forward kernel exists for {arch!r}; use one of {', '.join(CONFIGS)}")
    causal = problem.mask_kind != "full"
    if arch == "sm_90a":
        return _default_sm90(problem, causal)
    return _default_sm100(problem, causal, doubled_exp=arch == "sm_103a")


LONG = 16384
"""Query rows of a causal sequence from which a static grid no longer balances on a Hopper GPU."""


def _default_sm90(problem: AttentionProblem, causal: bool) -> SM90ForwardConfig:
    largest = max(problem.head_dim, problem.head_dim_v)
    if largest <= 64:
        tile_m, tile_n, stages = (256, 64, 3) if causal else (192, 128, 2)
    else:
        tile_m, stages = 128, 2
        tile_n = 128 if largest <= 128 else 96 if problem.head_dim_v <= 128 else 80
    # dims over 128 leave no SMEM for an O of its own, which a persistent loop needs
    persistent = largest <= 128 and not (causal and problem.seqlen_q >= LONG)
    return SM90ForwardConfig(
        tile_m=tile_m,
        tile_n=tile_n,
        kv_stages=stages,
        ping_pong=not causal or largest != 128,
        rescale_threshold=8.0,
        scheduler="persistent" if persistent else "lpt" if causal else "single",
    )


def _default_sm100(problem: AttentionProblem, causal: bool, doubled_exp: bool) -> SM100ForwardConfig:
    dims = (problem.head_dim, problem.head_dim_v)
    pair = not causal and max(dims) > 96 and problem.seqlen_q * problem.gqa_group > 256
    share, start = 0.125, 1
    registers = (184, 80, 64) if pair and not doubled_exp else (192, 72, 56)
    if dims == (128, 128) and pair:
        share = 0.1875
    elif dims[0] == 192:
        share, start = (0.1875, 0) if pair else (0.0625, 1)
    elif max(dims) <= 96:
        registers = (200, 64, 48)
    stages = {64: 10, 96: 5, 128: 6 if pair else 3, 192: 5 if pair else 2}
    return SM100ForwardConfig(
        kv_stages=stages.get(dims[0], 2),
        q_tiles=2 if problem.seqlen_q * problem.gqa_group > 128 else 1,
        cta_group=2 if pair else 1,
        exp2_share=0.0 if doubled_exp else share,
        exp2_start=1 if doubled_exp else start,
        registers=registers,
        scheduler="lpt" if causal else "persistent",
    )
