"""The checks of a run: what they can find, what is waived, and the findings themselves.

The kinds that this module names come on top of those that end a run in any mode (deadlock, out-of-bounds,
...). They do not end it: a race leaves memory as the schedule made it, and the search goes on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from fa4tune.emulator.findings import Finding
from fa4tune.errors import EmulationError

if TYPE_CHECKING:
    from fa4tune.emulator.checks_global import GlobalChecks
    from fa4tune.emulator.machine import Machine
    from fa4tune.emulator.ptx import Instruction

#: What a checked run can report beside the findings of any run, and what each means.
KINDS: dict[str, str] = {
    "race": "two accesses, one of them a write, that nothing orders",
    "missing-proxy-fence": "shared memory that a warp wrote and an asynchronous unit uses, ordered but "
    "without fence.proxy.async between them",
    "missing-load-wait": "data of a bulk or tensor copy used without a wait on its mbarrier",
    "missing-bulk-wait": "the source of a bulk store reused, or its CTA gone, before "
    "cp.async.bulk.wait_group",
    "missing-copy-wait": "data of cp.async used before its group was waited for",
    "missing-wgmma-wait": "registers or shared memory of a wgmma used before wgmma.wait_group",
    "missing-wgmma-fence": "registers of a wgmma accessed before it without a wgmma.fence between",
    "missing-mma-wait": "an operand or the accumulator of a tcgen05.mma used before a wait on its commit",
    "missing-tcgen05-wait-ld": "registers, or TMEM, of a tcgen05.ld used before tcgen05.wait::ld",
    "missing-tcgen05-wait-st": "TMEM that a tcgen05.st wrote used before tcgen05.wait::st",
    "missing-tcgen05-fence": "TMEM accesses of two warps ordered by a barrier, but without "
    "tcgen05.fence::before_thread_sync and ::after_thread_sync around it",
    "uninitialised-shared": "shared memory read that nothing wrote",
    "uninitialised-tmem": "tensor memory read that nothing wrote since its allocation",
    "uninitialised-register": "a register read that no instruction wrote",
    "mbarrier-init-race": "an mbarrier used where nothing orders its initialisation before",
    "missing-mbarrier-fence": "an mbarrier signalled by an asynchronous unit, or from another CTA, without a "
    "fence.mbarrier_init (or fence.proxy.async) after its initialisation",
    "mbarrier-reuse": "an mbarrier initialised or invalidated where nothing orders its earlier uses before",
    "mbarrier-data": "data stored to, or read from, the bytes of a live mbarrier",
    "mbarrier-bytes": "a CTA exits while bytes that an mbarrier expects have not arrived, or the reverse",
    "global-race": "two accesses to global memory, one of them a write, that nothing orders",
    "exited-cta": "an access to the memory of a CTA that nothing keeps from having exited",
    "unawaited": "asynchronous work that nothing orders before its CTA's exit",
    "unawaited-commit": "a tcgen05.commit that nothing orders before its CTA's exit",
}

#: Known habits of other people's kernels, by name: the kinds that the waiver covers, and why it is harmless.
WAIVERS: dict[str, tuple[tuple[str, ...], str]] = {
    "tcgen05-wait-ld": (
        ("missing-tcgen05-wait-ld",),
        "The assembler knows the registers that tcgen05.ld writes and waits for them itself where they are "
        "used; flash-attn-4's forward leaves tcgen05.wait::ld out for speed.",
    ),
    "tcgen05-fence": (
        ("missing-tcgen05-fence",),
        "A wait on an mbarrier that tcgen05.commit, or a warp after tcgen05.wait, signalled orders TMEM in "
        "practice; several kernels leave tcgen05.fence out around such barriers.",
    ),
    "unawaited-commit": (
        ("unawaited-commit",),
        "The last commits release stages that nobody fills again. Another commit of the same matrix "
        "operations is waited for, so the arrival is long past when the CTA exits.",
    ),
    "armed-stage": (
        ("mbarrier-bytes",),
        "CUTLASS's producer_tail acquires the stages that are left, which arms their barriers with the bytes "
        "of a load that is never issued; nobody waits for them.",
    ),
    "wgmma-fence": (
        ("missing-wgmma-fence",),
        "The assembler orders accesses to accumulator registers that it can see before a wgmma.",
    ),
}

REPORTS_PER_KIND = 20
"""Findings of one kind, at different instructions, after which no more are kept."""


class WaiverError(EmulationError, ValueError):
    """A waiver that does not exist, or that nothing could use."""


def waived_kinds(waivers: Iterable[str]) -> dict[str, str]:
    """The waiver that covers each waived kind; a string is one name.

    Raises:
        WaiverError: there is no waiver of a name.
    """
    out: dict[str, str] = {}
    for name in (waivers,) if isinstance(waivers, str) else waivers:
        if name not in WAIVERS:
            raise WaiverError(f"there is no waiver {name!r}; choose of {', '.join(WAIVERS)}")
        out |= dict.fromkeys(WAIVERS[name][0], name)
    return out


class Checks:
    """Findings of a checked run, each pair of instructions once.

    Args:
        machine: whose findings list they join.
        waivers: names from :data:`WAIVERS`.

    Raises:
        WaiverError: there is no waiver of a name.
    """

    def __init__(self, machine: Machine, waivers: Iterable[str]) -> None:
        self.machine = machine
        self.waived = waived_kinds(waivers)
        self.globals: GlobalChecks | None = None
        self.seen: set[tuple[Any, ...]] = set()
        self.counts: dict[str, int] = {}

    def report(
        self,
        kind: str,
        message: str,
        warp: Any,
        instruction: Instruction | None,
        other: tuple[Any, Instruction, str] | None = None,
    ) -> None:
        """Keep a finding unless the same one stands already.

        Args:
            warp: who did it.
            instruction: with what.
            other: the earlier party of a conflict: warp, instruction, and what it did.
        """
        line = instruction.line if instruction is not None else 0
        key = (kind, line, other[1].line if other is not None else message)
        if key in self.seen or self.counts.get(kind, 0) >= REPORTS_PER_KIND:
            return
        self.seen.add(key)
        self.counts[kind] = self.counts.get(kind, 0) + 1
        details: tuple[str, ...] = ()
        if other is not None:
            who, what, words = other
            at = self.machine.source(what)
            source = f" ({at})" if at else ""
            details = (f"against {words} at PTX line {what.line} `{what.text}`{source} [{role(who)}]",)
        waiver = self.waived.get(kind)
        self.machine.findings.append(
            Finding(
                kind,
                message,
                severity="waived" if waiver else "error",
                line=line,
                text=instruction.text if instruction is not None else "",
                where=role(warp),
                source=self.machine.source(instruction),
                details=details,
                extra={"waiver": waiver} if waiver else {},
            )
        )


def role(warp: Any) -> str:
    """CTA, warp and warpgroup in words."""
    if warp is None:
        return ""
    return f"{warp.label}, warpgroup {warp.index // 4}"
