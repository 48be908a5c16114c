"""The attention problem: everything about a call that decides which kernel is best for it.

A problem has one canonical string, ``b4_hq16_hk16_sq8192_sk8192_d128_dv128_bf16_causal_fwd``, which parses
back to an equal problem. Arithmetic on it is pure Python, so plans, model and table need no GPU package.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from fa4tune.errors import ProblemError

DTYPES = {"bf16": 2, "fp16": 2}
"""Supported element types and their size in bytes."""

DIRECTIONS = ("fwd", "bwd", "bwd_det")
"""``bwd_det`` is the deterministic backward pass."""

_PATTERN = re.compile(
    r"b(?P<batch>\d+)_hq(?P<heads>\d+)_hk(?P<kv_heads>\d+)_sq(?P<seqlen_q>\d+)_sk(?P<seqlen_k>\d+)"
    r"_d(?P<head_dim>\d+)_dv(?P<head_dim_v>\d+)_(?P<dtype>[a-z0-9]+)_(?P<mask>[a-z0-9\-]+)"
    r"_(?P<direction>fwd|bwd_det|bwd)"
)
_WINDOW = re.compile(r"win(\d+)-(\d+)")


@dataclass(frozen=True, slots=True)
class AttentionProblem:
    """One attention call.

    Args:
        batch: sequences.
        heads: query heads.
        kv_heads: key and value heads; divides ``heads`` (GQA when smaller, MQA when 1).
        seqlen_q: query rows of a sequence.
        seqlen_k: keys of a sequence.
        head_dim: elements of a query or key row.
        head_dim_v: elements of a value row.
        dtype: ``bf16`` or ``fp16``.
        mask: ``full``, ``causal`` (aligned bottom-right) or ``win<left>-<right>`` (a query at key position
            ``p = row + seqlen_k - seqlen_q`` sees keys ``p-left .. p+right``).
        direction: ``fwd``, ``bwd`` or ``bwd_det``.

    Raises:
        ProblemError: a value is out of range; the sentence names it.
    """

    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    dtype: str = "bf16"
    mask: str = "full"
    direction: str = "fwd"

    def __post_init__(self) -> None:
        for name in ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ProblemError(f"{name} must be a positive integer, got {value!r}; give at least 1")
        if self.heads % self.kv_heads:
            raise ProblemError(
                f"kv_heads={self.kv_heads} does not divide heads={self.heads}; "
                f"use a kv_heads that divides the query heads"
            )
        if self.dtype not in DTYPES:
            raise ProblemError(f"dtype {self.dtype!r} is not supported; use one of {', '.join(DTYPES)}")
        if self.direction not in DIRECTIONS:
            raise ProblemError(
                f"direction {self.direction!r} is not known; use one of {', '.join(DIRECTIONS)}"
            )
        if self.mask not in ("full", "causal") and not _WINDOW.fullmatch(self.mask):
            raise ProblemError(f"mask {self.mask!r} is not known; use full, causal or win<left>-<right>")

    @classmethod
    def parse(cls, text: str) -> AttentionProblem:
        """Build a problem from its canonical string.

        Raises:
            ProblemError: the text does not have the form, or a value is out of range.
        """
        match = _PATTERN.fullmatch(text.strip())
        if match is None:
            raise ProblemError(
                f"{text!r} is not a problem; "
                f"write it as b4_hq16_hk16_sq8192_sk8192_d128_dv128_bf16_causal_fwd"
            )
        fields: dict[str, Any] = match.groupdict()
        words = ("dtype", "mask", "direction")
        values: dict[str, Any] = {n: v if n in words else int(v) for n, v in fields.items()}
        return cls(**values)

    def __str__(self) -> str:
        return (
            f"b{self.batch}_hq{self.heads}_hk{self.kv_heads}_sq{self.seqlen_q}_sk{self.seqlen_k}"
            f"_d{self.head_dim}_dv{self.head_dim_v}_{self.dtype}_{self.mask}_{self.direction}"
        )

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of q, k, v and out."""
        return DTYPES[self.dtype]

    @property
    def gqa_group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // self.kv_heads

    @property
    def mask_kind(self) -> str:
        """``full``, ``causal`` or ``window``: what a kernel is compiled for (window sizes are arguments)."""
        return "window" if self.mask.startswith("win") else self.mask

    @property
    def window(self) -> tuple[int | None, int | None]:
        """Keys visible to the left and right of the diagonal; ``None`` is unlimited."""
        if self.mask == "full":
            return None, None
        if self.mask == "causal":
            return None, 0
        match = _WINDOW.fullmatch(self.mask)
        assert match is not None  # checked at construction
        return int(match[1]), int(match[2])

    def visible_keys(self, row: int) -> int:
        """Keys that query ``row`` attends to (0 for a fully masked row)."""
        left, right = self.window
        diagonal = row + self.seqlen_k - self.seqlen_q
        first = 0 if left is None else max(0, diagonal - left)
        last = self.seqlen_k - 1 if right is None else min(self.seqlen_k - 1, diagonal + right)
        return max(0, last - first + 1)

    def visible_pairs(self) -> int:
        """Query-key pairs that are not masked, of one head of one sequence, in closed form."""
        left, right = self.window
        q, k = self.seqlen_q, self.seqlen_k
        shift = k - q
        # pairs with key <= diagonal + right, minus pairs with key < diagonal - left
        upper = q * k if right is None else _pairs_up_to(q, k, shift + right)
        lower = 0 if left is None else _pairs_up_to(q, k, shift - left - 1)
        return upper - lower

    def flops(self) -> int:
        """Exact matrix FLOPs: ``2 * pairs * (d + dv)`` a head forward, 2.5 times that backward.

        Five matrix products backward against two forward (FlashAttention-4, arXiv 2603.05451, sections 3.1.1
        and 3.2.1); masked pairs are not counted. For ``head_dim != head_dim_v`` backward counts three
        products over ``head_dim`` and two over ``head_dim_v``.
        """
        return self._flops(self.visible_pairs())

    def flops_convention(self) -> float:
        """FLOPs as the field prints them: every pair counted, causal as half of them.

        ``4 * seqlen_q * seqlen_k * head_dim * heads`` a sequence forward (App. 5.1 of the same paper); window
        masks have no such convention and count exactly.
        """
        if self.mask_kind == "window":
            return float(self.flops())
        whole = self._flops(self.seqlen_q * self.seqlen_k)
        return whole / 2 if self.mask == "causal" else float(whole)

    def _flops(self, pairs: int) -> int:
        forward = 2 * pairs * (self.head_dim + self.head_dim_v)
        backward = 2 * pairs * (3 * self.head_dim + 2 * self.head_dim_v)
        return self.batch * self.heads * (forward if self.direction == "fwd" else backward)

    def compulsory_bytes(self) -> int:
        """Bytes that any forward implementation moves through HBM: q, k, v, out once and the float32 LSE."""
        q_rows = self.batch * self.seqlen_q * self.heads
        k_rows = self.batch * self.seqlen_k * self.kv_heads
        elements = (q_rows + k_rows) * (self.head_dim + self.head_dim_v)
        return elements * self.element_bytes + 4 * q_rows


def _pairs_up_to(q: int, k: int, offset: int) -> int:
    """Pairs ``(i, j)`` with ``0 <= i < q``, ``0 <= j < k`` and ``j <= i + offset``."""
    # row i sees clamp(i + offset + 1, 0, k) keys: zero rows, then a ramp, then full rows
    start = max(0, -offset)
    full_from = max(0, k - offset - 1)
    if start >= q:
        return 0
    ramp_end = min(q, max(full_from, start))
    ramp = (ramp_end - start) * (start + ramp_end - 1) // 2 + (ramp_end - start) * (offset + 1)
    return ramp + max(0, q - max(full_from, start)) * k
