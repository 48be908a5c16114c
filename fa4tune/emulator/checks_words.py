"""How findings of the checks are named and worded, the same for both back-ends."""

from __future__ import annotations

from typing import Any

FAMILIES = ("warp", "wgmma", "load", "mma", "tmem.ld", "tmem.st", "copy", "barrier", "bulk")
"""Kinds of components of the vector clocks."""

#: Kind of finding where only the completion of an operation is missing, its issue being ordered.
_MISSING = {
    "load": "missing-load-wait",
    "bulk": "missing-bulk-wait",
    "copy": "missing-copy-wait",
    "wgmma": "missing-wgmma-wait",
    "mma": "missing-mma-wait",
    "tmem.ld": "missing-tcgen05-wait-ld",
    "tmem.st": "missing-tcgen05-wait-st",
}

Words = tuple[str, str]
"""Kind and message of a finding."""


def memory(tensor: bool) -> str:
    """The name of a memory."""
    return "tensor memory" if tensor else "shared memory"


def conflict(by: str, other: str, family: str, completed: bool, issued: bool, tensor: bool) -> Words:
    """An access conflicts with an earlier one.

    Args:
        by, other: the two in words.
        family: of the earlier one.
        completed: its completion is ordered before, as if fences were there.
        issued: its issue is ordered before.
        tensor: in tensor memory.
    """
    if family == "barrier":
        kind, text = "mbarrier-data", f"{by} touches the bytes of a live mbarrier"
    elif family == "warp" and completed:
        kind = "missing-tcgen05-fence" if tensor else "missing-proxy-fence"
        text = f"{by} is ordered after {other}, but without a fence between the proxies"
    elif completed:
        kind = "missing-tcgen05-fence"
        text = f"{by} is ordered after {other}, but without tcgen05.fence around the barrier"
    elif family in _MISSING and issued:
        kind = _MISSING[family]
        text = f"{by} is ordered after the issue of {other}, not after its completion"
    else:
        kind, text = "race", f"nothing orders {by} after {other}"
    return kind, f"{text}, both in {memory(tensor)}"


def global_race(by: str, other: str, foreign: bool) -> Words:
    """An access to global memory conflicts with one of the same cluster or (``foreign``) another."""
    where = " in another CTA" if foreign else ""
    return "global-race", f"nothing orders {by} after {other}{where}, both in global memory"


def uninitialised(by: str | None, tensor: bool) -> Words:
    """A read of what nothing wrote, by a warp (None) or something else."""
    kind = "uninitialised-tmem" if tensor else "uninitialised-shared"
    if by is None:
        return kind, "a read of shared memory that nothing wrote"
    return kind, f"{by} reads {memory(tensor)} that nothing wrote"


def init_race(bar: Any) -> Words:
    """An mbarrier that may not be initialised."""
    return "mbarrier-init-race", f"nothing orders this after the initialisation of the {bar.describe()}"


def barrier_fence(bar: Any) -> Words:
    """An mbarrier without its fence."""
    return (
        "missing-mbarrier-fence",
        f"no fence.mbarrier_init follows the initialisation of the {bar.describe()}",
    )


def reuse(bar: Any) -> Words:
    """An mbarrier initialised again too early."""
    return "mbarrier-reuse", f"nothing orders this after the last use of the {bar.describe()}"


def exited(what: str, cta: Any) -> Words:
    """Memory of a CTA that has exited."""
    return "exited-cta", f"{what}: CTA {cta.label} has exited"


def unawaited(what: str, family: str, foreign: bool, cta: Any) -> Words:
    """Something that nothing orders before the exit of the CTA whose memory it uses.

    Args:
        foreign: another CTA issued it.
    """
    if family == "bulk":
        kind = "missing-bulk-wait"
    elif foreign:
        kind = "exited-cta"
    else:
        kind = "unawaited-commit" if what == A_COMMIT else "unawaited"
    return kind, f"nothing keeps CTA {cta.label} from exiting before {what} is over"


def bytes_pending(bar: Any) -> Words:
    """Bytes that an mbarrier still expects at the end."""
    return "mbarrier-bytes", f"its CTA exits with {bar.tx} bytes pending ({bar.describe()})"


A_COMMIT = "a commit"
GLOBAL_READ = "a read of global memory"
GLOBAL_WRITE = "a write to global memory"
GLOBAL_ATOMIC = "an atomic on global memory"
UNSET_ACCUMULATOR: Words = ("uninitialised-register", "an accumulator that nothing wrote is added to")
WGMMA_FENCE: Words = (
    "missing-wgmma-fence",
    "registers accessed since the last wgmma.fence are given to a wgmma",
)
WGMMA_WAIT: Words = ("missing-wgmma-wait", "a register of a wgmma used before wgmma.wait_group")
LOAD_WAIT: Words = (
    "missing-tcgen05-wait-ld",
    "a register that tcgen05.ld writes used before tcgen05.wait::ld",
)


def unset_register(name: str) -> Words:
    """A register read before anything wrote it."""
    return "uninitialised-register", f"register {name} is read before anything wrote it"


def too_many(limit: int) -> str:
    """Why the checks cannot go on."""
    return f"the checks follow up to {limit} warps, barriers and groups of a cluster"
