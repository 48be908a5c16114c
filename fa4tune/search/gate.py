"""The correctness gate: what a kernel must get right before any time of it counts.

On Gaussian and on heavy-tailed, correlated inputs a kernel's output is compared with float64 attention; its
error may be at most ``error_bound`` times that of a float32 computation with P and O rounded to the dtype.
Imports torch and the standard library only, because it travels to machines that measure.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fa4tune.kernels.inputs import gaussian_inputs, heavy_tailed_inputs
from fa4tune.kernels.reference import attention, attention_rounded, errors_against
from fa4tune.outcome import Outcome
from fa4tune.problem import AttentionProblem

KINDS = {"gaussian": gaussian_inputs, "heavy_tailed": heavy_tailed_inputs}

MAX_SCORES = 1 << 33
"""Scores that the references compute a problem and kind. Above it only some (sequence, key head) pairs are
compared, the first, the last and others evenly between; finiteness is checked everywhere."""

MAX_FACTOR = 4.0
"""A single element may be this many times as far off as the yardstick's worst one."""

LSE_BOUND = 5e-3
"""Largest difference of an LSE (natural log); a degree-2 polynomial alone moves it by up to 2.1e-3."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float], None]
"""``kernel(q, k, v, out, lse, softmax_scale)`` writes ``out`` and ``lse``."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The gate's answer. ``error`` holds by kind of input [ours, yardstick's], relative root mean squares."""

    outcome: Outcome | None
    reason: str = ""
    error: dict[str, list[float]] | None = None


@dataclass(frozen=True, slots=True)
class _Case:
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    rms: float
    max: float


def make_inputs(problem: AttentionProblem, kind: str, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of one kind for ``problem``, the same ones every time on one kind of device."""
    q, k, v, _ = KINDS[kind](
        batch=problem.batch,
        heads=problem.heads,
        kv_heads=problem.kv_heads,
        seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        dtype=DTYPES[problem.dtype],
        device=device,
        seed=1,
    )
    return q, k, v


def make_outputs(problem: AttentionProblem, q: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse that hold NaN until a kernel writes them."""
    out = q.new_full((problem.batch, problem.seqlen_q, problem.heads, problem.head_dim_v), math.nan)
    lse = q.new_full((problem.batch, problem.heads, problem.seqlen_q), math.nan, dtype=torch.float32)
    return out, lse


class Gate:
    """Inputs and references of one problem, computed once and used for every candidate.

    Args:
        problem: the forward problem.
        device: where inputs live and kernels run.
        error_bound: see the module.
    """

    def __init__(self, problem: AttentionProblem, device: str, error_bound: float = 1.3) -> None:
        self.problem = problem
        self.error_bound = error_bound
        self.softmax_scale = 1.0 / math.sqrt(problem.head_dim)
        self.sequences, self.key_heads = self._compared(device)
        self._cases = {kind: self._case(kind, device) for kind in KINDS}

    def _compared(self, device: str) -> tuple[Tensor, Tensor]:
        """Indices of the (sequence, key head) pairs that are compared."""
        p = self.problem
        pairs = p.batch * p.kv_heads
        count = max(2, MAX_SCORES // (p.gqa_group * p.seqlen_q * p.seqlen_k))
        if count < pairs:
            chosen = torch.linspace(0, pairs - 1, count, device=device).round().long().unique()
        else:
            chosen = torch.arange(pairs, device=device)
        return chosen // p.kv_heads, chosen % p.kv_heads

    def _case(self, kind: str, device: str) -> _Case:
        p = self.problem
        q, k, v = make_inputs(p, kind, device)
        chosen = self._rows(q), self._keys(k), self._keys(v)
        exact, exact_lse = attention(*chosen, softmax_scale=self.softmax_scale, window=p.window)
        rounded, _ = attention_rounded(*chosen, softmax_scale=self.softmax_scale, window=p.window)
        yardstick = errors_against(rounded, exact)
        # float32 holds the exact result far below the error bound at half the memory and read time
        return _Case(q, k, v, exact.float(), exact_lse.float(), yardstick.rms, yardstick.max)

    def _rows(self, tensor: Tensor) -> Tensor:
        """(batch, seqlen_q, heads, n) -> (pairs, seqlen_q, group, n) of the compared pairs."""
        grouped = tensor.unflatten(2, (self.problem.kv_heads, self.problem.gqa_group))
        return grouped[self.sequences, :, self.key_heads]

    def _keys(self, tensor: Tensor) -> Tensor:
        """(batch, seqlen_k, kv_heads, n) -> (pairs, seqlen_k, 1, n) of the compared pairs."""
        return tensor[self.sequences, :, self.key_heads].unsqueeze(2)

    def _lse_rows(self, lse: Tensor) -> Tensor:
        """(batch, heads, seqlen_q) -> (pairs, group, seqlen_q) of the compared pairs."""
        grouped = lse.unflatten(1, (self.problem.kv_heads, self.problem.gqa_group))
        return grouped[self.sequences, self.key_heads]

    def check(self, kernel: Kernel) -> Verdict:
        """Run ``kernel`` twice on each kind of input and compare; errors of the launch propagate."""
        errors: dict[str, list[float]] = {}
        for kind, case in self._cases.items():
            runs = []
            for _ in range(2):
                out, lse = make_outputs(self.problem, case.q)
                kernel(case.q, case.k, case.v, out, lse, self.softmax_scale)
                runs.append((out, lse))
            (out, lse), (again, lse_again) = runs
            reason = self._broken(out, lse)
            if not reason and not (torch.equal(out, again) and torch.equal(lse, lse_again)):
                different = int((out != again).sum())
                reason = f"two runs on the same inputs differ in {different} elements of out"
            if not reason:
                ours = errors_against(self._rows(out).float(), case.out)
                errors[kind] = [ours.rms, case.rms]
                reason = self._too_far(ours.rms, ours.max, self._lse_rows(lse), case)
            if reason:
                return Verdict(Outcome.INCORRECT, f"{kind} inputs: {reason}", errors)
        return Verdict(None, "", errors)

    def _broken(self, out: Tensor, lse: Tensor) -> str:
        bad = int(out.isfinite().logical_not().sum())
        if bad:
            return f"{bad} of {out.numel()} elements of out are not finite or were not written"
        if int(lse.isnan().sum()):
            return f"{int(lse.isnan().sum())} of {lse.numel()} LSE values are NaN or were not written"
        if self.problem.visible_pairs() and not bool(out.any()):
            return "out is zero everywhere"
        return ""

    def _too_far(self, rms: float, largest: float, lse: Tensor, case: _Case) -> str:
        if rms > self.error_bound * case.rms:
            return f"relative error {rms:.2e} exceeds {self.error_bound} times the yardstick {case.rms:.2e}"
        if largest > MAX_FACTOR * case.max:
            return f"one element is off by {largest:.2e}, the yardstick's worst by {case.max:.2e}"
        off = torch.where(lse == case.lse, 0.0, (lse - case.lse).abs()).max().item()
        if not off <= LSE_BOUND:
            return f"LSE is off by {off:.2e}, more than {LSE_BOUND}"
        return ""
