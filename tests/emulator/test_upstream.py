"""Kernels that nobody here wrote: flash-attn-4's forward, eagerly and late over five seeds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fa4tune.emulator.attention import absolute_error, relative_error
from fa4tune.emulator.launch import Launch
from fa4tune.emulator.machine import run
from fa4tune.kernels.reference import attention

pytestmark = pytest.mark.peers

VARIANTS = [
    ("sm_90a", 64, "full"),
    ("sm_90a", 64, "causal"),
    ("sm_90a", 128, "full"),
    ("sm_90a", 128, "causal"),
    ("sm_100a", 64, "full"),
    ("sm_100a", 128, "causal"),
    ("sm_100a", 128, "full"),
]

#: The habits of its kernels that the checks know.
WAIVED = {"sm_90a": (), "sm_100a": ("tcgen05-wait-ld", "tcgen05-fence", "unawaited-commit", "armed-stage")}


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda v: f"{v[0]}-d{v[1]}-{v[2]}")
def variant(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, int, str, Path]:
    arch, head_dim, mask = request.param
    folder = tmp_path_factory.mktemp("upstream")
    script = Path(__file__).with_name("upstream_forward.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, str(script), arch, str(head_dim), mask, str(folder)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return arch, head_dim, mask, folder


def _launches(arch: str, folder: Path, tensors: tuple[torch.Tensor, ...]) -> list[Launch]:
    """Call the host function with upstream's argument order."""
    from fa4tune.emulator.capture import capture

    q, k, v, out, lse = tensors
    arguments: list[object] = [q, k, v, out, lse, q.shape[-1] ** -0.5, *[None] * 8]
    if arch == "sm_100a":
        arguments += [None, None, (None, None), *[None] * 7, q.shape[1]]
    else:
        arguments += [None, (None, None), None, None]
    ptx = (folder / "kernel.ptx").read_text()
    return capture(str(folder / "kernel.o"), arguments, ptx=ptx, names=["q", "k", "v", "out", "lse"])


@pytest.mark.parametrize("late", [None, 0, 1, 2, 3, 4])
def test_upstream_forward_is_right(variant: tuple[str, int, str, Path], late: int | None) -> None:
    arch, head_dim, mask, folder = variant
    generator = torch.Generator().manual_seed(head_dim)
    seqlen = 512
    q, k, v = (torch.randn(1, seqlen, 1, head_dim, generator=generator).to(torch.bfloat16) for _ in range(3))
    out = torch.full_like(q, float("nan"))
    lse = torch.full((1, 1, seqlen), float("nan"))
    (launch,) = _launches(arch, folder, (q, k, v, out, lse))
    if (arch, head_dim, mask) == ("sm_100a", 128, "full"):
        assert launch.cluster == (2, 1, 1)
    result = run((folder / "kernel.ptx").read_text(), launch, late=late)
    assert result.completed, [str(f) for f in result.findings]
    assert not result.errors
    exact_out, exact_lse = attention(q, k, v, causal=mask == "causal")
    assert relative_error(out, exact_out) < 1e-2
    assert absolute_error(lse, exact_lse) < 1e-3


@pytest.mark.parametrize("late", [None, 0, 1])
def test_upstream_forward_gives_no_finding_but_waived_ones(
    variant: tuple[str, int, str, Path], late: int | None
) -> None:
    arch, head_dim, _, folder = variant
    q, k, v = (torch.randn(1, 512, 1, head_dim).to(torch.bfloat16) for _ in range(3))
    out, lse = torch.full_like(q, float("nan")), torch.full((1, 1, 512), float("nan"))
    (launch,) = _launches(arch, folder, (q, k, v, out, lse))
    ptx = (folder / "kernel.ptx").read_text()
    result = run(ptx, launch, late=late, check=True, waivers=WAIVED[arch])
    assert [str(f) for f in result.findings if f.severity != "waived"] == []
    assert result.completed
