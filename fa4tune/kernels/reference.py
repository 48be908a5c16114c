"""Attention by definition, in float64, to judge kernels against; and the error that a kernel is allowed.

Everything here takes q, k, v of layout (batch, seqlen, heads, head_dim), on any device, and works through the
score matrix in pieces, so that memory stays bounded at long sequences. Nothing is recorded for autograd.
This file imports torch and the standard library only, because it is copied as it is to machines that measure.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

SCORES_PER_PIECE = 1 << 24
"""Scores held at once (128 MiB in float64; a handful of arrays of that size live at the same time)."""

LOG2_E = math.log2(math.e)

Exp2 = Callable[[Tensor, Tensor], Tensor]
"""2^x of a float32 tensor (..., keys); the second argument holds the key index of each of its columns."""


class Errors(NamedTuple):
    """How far a result is from the exact one: see `errors_against`."""

    rms: float
    max: float


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(softmax_scale * q k^T) v in float64, over the keys that the masks leave.

    Query row i stands at key position p = i + seqlen_k - seqlen_q (aligned bottom-right). `causal` leaves the
    keys up to p, `window` = (left, right) the keys p - left .. p + right (None: no bound), `mask` those where
    it is True; a key must pass all three.

    Args:
        q: (batch, seqlen_q, heads, head_dim), any float dtype.
        k: (batch, seqlen_k, kv_heads, head_dim); kv_heads divides heads, and query head h uses kv head
            h // (heads // kv_heads).
        v: (batch, seqlen_k, kv_heads, head_dim_v).
        softmax_scale: factor on the scores; 1 / sqrt(head_dim) by default.
        mask: boolean, broadcastable to (batch, heads, seqlen_q, seqlen_k).

    Returns:
        out, float64 (batch, seqlen_q, heads, head_dim_v), and lse, float64 (batch, heads, seqlen_q), the
        natural logarithm of the row's sum of exponentials. A row without a key has out 0 and lse -inf.

    Raises:
        ValueError: shapes, devices or masks that do not fit together.
    """
    call = _Call.of(q, k, v, softmax_scale, causal, window, mask)
    out = call.new_rows(call.head_dim_v, torch.float64)
    lse = call.new_rows(None, torch.float64).fill_(-math.inf)
    with torch.no_grad():
        for piece in call.pieces():
            probabilities, piece_lse = _softmax(call, piece)
            rows = (piece.leads, slice(None), piece.rows)
            out[rows] = call.unfold(probabilities @ call.values(piece), piece)
            lse[rows] = call.unfold(piece_lse, piece).squeeze(-1)
    return call.heads_last(out), call.heads_first(lse)


def attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `attention` in float64, from their formulas.

    With P the probabilities: dV = P^T dO, dP = dO V^T, delta = rowsum(P * dP) (equal to rowsum(dO * O)),
    dS = P * (dP - delta), dQ = softmax_scale * dS K, dK = softmax_scale * dS^T Q; dK and dV are summed over
    the query heads that share a key head.

    Args:
        dout: gradient of out, (batch, seqlen_q, heads, head_dim_v). The other arguments are `attention`'s.

    Returns:
        dq, dk, dv in float64, shaped as q, k and v. Rows and keys that no pair leaves have gradient 0.

    Raises:
        ValueError: as `attention`, or dout has another shape than out.
    """
    call = _Call.of(q, k, v, softmax_scale, causal, window, mask)
    if dout.shape != (*q.shape[:3], v.shape[3]):
        raise ValueError(
            f"dout must have the shape of out, {(*q.shape[:3], v.shape[3])}, not {tuple(dout.shape)}"
        )
    dout_rows = call.fold_rows(dout)
    dq = call.new_rows(call.head_dim, torch.float64)
    dk = call.new_keys(call.head_dim)
    dv = call.new_keys(call.head_dim_v)
    with torch.no_grad():
        for piece in call.pieces():
            keys = (piece.leads, piece.keys)
            probabilities, _ = _softmax(call, piece)
            dout_piece = call.fold(dout_rows, piece)
            dv[keys] += probabilities.mT @ dout_piece
            d_probabilities = dout_piece @ call.values(piece).mT
            delta = (probabilities * d_probabilities).sum(-1, keepdim=True)
            d_scores = probabilities * (d_probabilities - delta) * call.softmax_scale
            dq[piece.leads, :, piece.rows] = call.unfold(d_scores @ call.key_rows(piece), piece)
            dk[keys] += d_scores.mT @ call.queries(piece)
    return call.heads_last(dq), call.keys_last(dk), call.keys_last(dv)


def attention_rounded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dtype: torch.dtype | None = None,
    exp2: Exp2 | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention as a faultless kernel would compute it: float32, with P and O rounded to `dtype`.

    Its distance from `attention` is the yardstick for a kernel's own error. Scores and sums are float32 (each
    dot product rounded once, which no setting of the matrix units can change), P = 2^(S - row max) is rounded
    to `dtype` for the product with V and summed unrounded, and the normalised O is rounded at the end.

    Args:
        dtype: what P and O are rounded to; q's by default.
        exp2: computes 2^x in place of torch; see `polynomial_exp2`. The other arguments are `attention`'s.

    Returns:
        out in `dtype` (batch, seqlen_q, heads, head_dim_v) and lse in float32 (batch, heads, seqlen_q).

    Raises:
        ValueError: as `attention`.
    """
    call = _Call.of(q, k, v, softmax_scale, causal, window, mask)
    dtype = q.dtype if dtype is None else dtype
    out = call.new_rows(call.head_dim_v, dtype)
    lse = call.new_rows(None, torch.float32).fill_(-math.inf)
    scale_log2 = call.softmax_scale * LOG2_E
    with torch.no_grad():
        for piece in call.pieces():
            products = (call.queries(piece) @ call.key_rows(piece).mT).to(torch.float32)
            scores = call.masked(products * scale_log2, piece)
            row_max = scores.amax(-1, keepdim=True)
            row_max = torch.where(row_max == -math.inf, 0.0, row_max)
            exponents = scores - row_max
            if exp2 is None:
                weights = torch.exp2(exponents)
            else:
                columns = torch.arange(piece.keys.start, piece.keys.stop, device=scores.device)
                weights = exp2(exponents, columns)
            row_sum = weights.sum(-1, keepdim=True)
            weighted = (weights.to(dtype).to(torch.float64) @ call.values(piece)).to(torch.float32)
            normalised = weighted / torch.where(row_sum == 0.0, 1.0, row_sum)
            rows = (piece.leads, slice(None), piece.rows)
            out[rows] = call.unfold(normalised, piece).to(dtype)
            lse[rows] = call.unfold((row_max + torch.log2(row_sum)) / LOG2_E, piece).squeeze(-1)
    return call.heads_last(out), call.heads_first(lse)


def polynomial_exp2(coefficients: Sequence[float], emulated: Sequence[bool]) -> Exp2:
    """2^x of which some columns come from a polynomial, as in a kernel that emulates the exponential unit.

    The polynomial's columns are computed as 2^floor(x) * p(x - floor(x)), by Horner's scheme in float32, x
    clamped to at least -127 (where the result is 0). Each fused multiply-add is a float64 product and sum
    rounded to float32; that rounds twice where a sum lies within 2^-53 of a tie, about once in 10^8.

    Args:
        coefficients: p0, p1, ... of 2^f on [0, 1].
        emulated: for each column of a tile, whether the polynomial computes it; key j is column
            j % len(emulated), as tiles start at multiples of their width.

    Returns:
        a function for `attention_rounded`'s `exp2`.
    """

    def exp2(x: Tensor, columns: Tensor) -> Tensor:
        chosen = torch.tensor(emulated, device=x.device)[columns % len(emulated)]
        clamped = x.clamp(min=-127.0)
        floor = clamped.floor()
        fraction = (clamped - floor).to(torch.float64)
        value = torch.full_like(x, coefficients[-1])
        for coefficient in reversed(coefficients[:-1]):
            value = (value.to(torch.float64) * fraction + coefficient).to(torch.float32)
        bits = value.view(torch.int32) + (floor.to(torch.int32) << 23)
        return torch.where(chosen, bits.view(torch.float32), torch.exp2(x))

    return exp2


def errors_against(actual: Tensor, exact: Tensor) -> Errors:
    """Root-mean-square and maximum difference, both relative to the root mean square of `exact`.

    The first averages rounding noise and is what error bounds compare; the second shows a single wrong
    element. Both are inf where a finite element of `exact` meets one that is not (or the reverse), and 0 for
    empty tensors. Equal infinities (the lse of a masked row) count as no difference.

    Raises:
        ValueError: the shapes differ.
    """
    if actual.shape != exact.shape:
        raise ValueError(f"cannot compare shapes {tuple(actual.shape)} and {tuple(exact.shape)}")
    if exact.numel() == 0:
        return Errors(0.0, 0.0)
    a, e = actual.detach().to(torch.float64), exact.detach().to(torch.float64)
    difference = torch.where(a == e, 0.0, a - e)
    largest = difference.abs().max().item()
    if not math.isfinite(largest):
        return Errors(math.inf, math.inf)
    if largest == 0.0:
        return Errors(0.0, 0.0)
    size = torch.where(e.isfinite(), e, 0.0).square().mean().sqrt().item()
    if size == 0.0:
        return Errors(math.inf, math.inf)
    return Errors(difference.square().mean().sqrt().item() / size, largest / size)


class _Piece(NamedTuple):
    """A block of the score matrix: some (batch, kv head) pairs, some rows, the keys those rows can see."""

    leads: slice
    rows: slice
    keys: slice


@dataclass(frozen=True)
class _Call:
    """One checked attention call. Query heads are folded as (batch * kv_heads, group, seqlen_q, head_dim).

    Inside a piece, group and rows are one dimension, so that each key head is read once for its group.
    """

    q: Tensor  # (batch * kv_heads, group, seqlen_q, head_dim)
    k: Tensor  # (batch * kv_heads, seqlen_k, head_dim)
    v: Tensor  # (batch * kv_heads, seqlen_k, head_dim_v)
    batch: int
    kv_heads: int
    softmax_scale: float
    left: int | None
    right: int | None
    mask: Tensor | None  # (batch, heads, seqlen_q, seqlen_k), expanded

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float | None,
        causal: bool,
        window: tuple[int | None, int | None],
        mask: Tensor | None,
    ) -> "_Call":
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            if tensor.dim() != 4:
                raise ValueError(
                    f"{name} must be (batch, seqlen, heads, head_dim), not of shape {tuple(tensor.shape)}"
                )
            if tensor.device != q.device:
                raise ValueError(f"q is on {q.device} and {name} on {tensor.device}; put both on one device")
            if not tensor.is_floating_point():
                raise ValueError(f"{name} must be of a float dtype, not {tensor.dtype}")
        batch, seqlen_q, heads, head_dim = q.shape
        seqlen_k, kv_heads = k.shape[1:3]
        if k.shape != (batch, seqlen_k, kv_heads, head_dim) or v.shape[:3] != k.shape[:3]:
            raise ValueError(
                f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit: batch must "
                f"agree, head_dim of q and k, and seqlen and heads of k and v"
            )
        if kv_heads == 0 or heads % kv_heads:
            raise ValueError(f"kv_heads must divide heads, but {kv_heads} does not divide {heads}")
        for bound in window:
            if bound is not None and bound < 0:
                raise ValueError(f"window bounds are numbers of keys or None, not {bound}")
        left, right = window
        if causal:
            right = 0
        if mask is not None:
            if mask.dtype != torch.bool:
                raise ValueError(f"mask must be boolean (True: attend), not {mask.dtype}")
            try:
                mask = mask.to(q.device).expand(batch, heads, seqlen_q, seqlen_k)
            except RuntimeError:
                wanted = (batch, heads, seqlen_q, seqlen_k)
                raise ValueError(
                    f"mask of shape {tuple(mask.shape)} does not broadcast to {wanted}"
                ) from None
        if softmax_scale is None:
            softmax_scale = 1.0 / math.sqrt(head_dim) if head_dim else 1.0
        q, k, v = q.detach(), k.detach(), v.detach()
        return cls(
            q=_fold_rows(q, kv_heads),
            k=k.transpose(1, 2).reshape(batch * kv_heads, seqlen_k, head_dim),
            v=v.transpose(1, 2).reshape(batch * kv_heads, seqlen_k, v.shape[3]),
            batch=batch,
            kv_heads=kv_heads,
            softmax_scale=softmax_scale,
            left=left,
            right=right,
            mask=mask,
        )

    @property
    def group(self) -> int:
        return self.q.shape[1]

    @property
    def seqlen_q(self) -> int:
        return self.q.shape[2]

    @property
    def seqlen_k(self) -> int:
        return self.k.shape[1]

    @property
    def head_dim(self) -> int:
        return self.q.shape[3]

    @property
    def head_dim_v(self) -> int:
        return self.v.shape[2]

    def pieces(self) -> Iterator[_Piece]:
        """Covers every row that can see a key, in pieces of about `SCORES_PER_PIECE` scores."""
        leads = self.q.shape[0]
        if not leads or not self.seqlen_q or not self.seqlen_k or not self.group:
            return
        scores_per_row = self.group * self.seqlen_k
        rows_step = max(1, min(self.seqlen_q, SCORES_PER_PIECE // scores_per_row))
        leads_step = max(1, SCORES_PER_PIECE // (scores_per_row * rows_step))
        shift = self.seqlen_k - self.seqlen_q
        for row in range(0, self.seqlen_q, rows_step):
            row_end = min(row + rows_step, self.seqlen_q)
            low = 0 if self.left is None else max(0, row + shift - self.left)
            high = self.seqlen_k if self.right is None else min(self.seqlen_k, row_end + shift + self.right)
            if low >= high:
                continue
            for lead in range(0, leads, leads_step):
                yield _Piece(
                    slice(lead, min(lead + leads_step, leads)), slice(row, row_end), slice(low, high)
                )

    def fold(self, rows: Tensor, piece: _Piece) -> Tensor:
        """(leads, group, rows, n) of a whole tensor -> the piece's (leads, group * rows, n) in float64."""
        return rows[piece.leads, :, piece.rows].flatten(1, 2).to(torch.float64)

    def unfold(self, rows: Tensor, piece: _Piece) -> Tensor:
        """(leads, group * rows, n) of a piece -> (leads, group, rows, n)."""
        return rows.unflatten(1, (self.group, piece.rows.stop - piece.rows.start))

    def queries(self, piece: _Piece) -> Tensor:
        return self.fold(self.q, piece)

    def key_rows(self, piece: _Piece) -> Tensor:
        return self.k[piece.leads, piece.keys].to(torch.float64)

    def values(self, piece: _Piece) -> Tensor:
        return self.v[piece.leads, piece.keys].to(torch.float64)

    def masked(self, scores: Tensor, piece: _Piece) -> Tensor:
        """Scores (leads, group * rows, keys) with -inf where a mask hides the key."""
        hidden = self._hidden(piece, scores.device)
        if hidden is None:
            return scores
        return self.unfold(scores, piece).masked_fill(hidden, -math.inf).flatten(1, 2)

    def _hidden(self, piece: _Piece, device: torch.device) -> Tensor | None:
        hidden: Tensor | None = None
        if self.left is not None or self.right is not None:
            rows = torch.arange(piece.rows.start, piece.rows.stop, device=device)
            keys = torch.arange(piece.keys.start, piece.keys.stop, device=device)
            distance = keys[None, :] - (rows[:, None] + self.seqlen_k - self.seqlen_q)
            hidden = torch.zeros_like(distance, dtype=torch.bool)
            if self.left is not None:
                hidden |= distance < -self.left
            if self.right is not None:
                hidden |= distance > self.right
        if self.mask is not None:
            leads = torch.arange(piece.leads.start, piece.leads.stop, device=device)
            heads = (leads % self.kv_heads)[:, None] * self.group + torch.arange(self.group, device=device)
            block = self.mask[:, :, piece.rows, piece.keys]
            excluded = ~block[(leads // self.kv_heads)[:, None], heads]
            hidden = excluded if hidden is None else hidden | excluded
        return hidden

    def fold_rows(self, tensor: Tensor) -> Tensor:
        return _fold_rows(tensor.detach(), self.kv_heads)

    def new_rows(self, width: int | None, dtype: torch.dtype) -> Tensor:
        """Zeros (batch * kv_heads, group, seqlen_q[, width])."""
        shape = self.q.shape[:3] if width is None else (*self.q.shape[:3], width)
        return torch.zeros(shape, dtype=dtype, device=self.q.device)

    def new_keys(self, width: int) -> Tensor:
        return torch.zeros((*self.k.shape[:2], width), dtype=torch.float64, device=self.q.device)

    def heads_first(self, rows: Tensor) -> Tensor:
        """(batch * kv_heads, group, seqlen_q) -> (batch, heads, seqlen_q)."""
        return rows.reshape(self.batch, self.kv_heads * self.group, self.seqlen_q)

    def heads_last(self, rows: Tensor) -> Tensor:
        """(batch * kv_heads, group, seqlen_q, n) -> (batch, seqlen_q, heads, n)."""
        shape = (self.batch, self.kv_heads * self.group, self.seqlen_q, rows.shape[3])
        return rows.reshape(shape).transpose(1, 2).contiguous()

    def keys_last(self, keys: Tensor) -> Tensor:
        """(batch * kv_heads, seqlen_k, n) -> (batch, seqlen_k, kv_heads, n)."""
        shape = (self.batch, self.kv_heads, self.seqlen_k, keys.shape[2])
        return keys.reshape(shape).transpose(1, 2).contiguous()


def _fold_rows(tensor: Tensor, kv_heads: int) -> Tensor:
    """(batch, seqlen, heads, n) -> (batch * kv_heads, group, seqlen, n)."""
    batch, seqlen, heads, width = tensor.shape
    return tensor.transpose(1, 2).reshape(batch * kv_heads, heads // kv_heads, seqlen, width)


def _softmax(call: _Call, piece: _Piece) -> tuple[Tensor, Tensor]:
    """Float64 probabilities (leads, group * rows, keys) and lse (leads, group * rows, 1) of a piece."""
    scores = call.masked(call.queries(piece) @ call.key_rows(piece).mT * call.softmax_scale, piece)
    row_max = scores.amax(-1, keepdim=True)
    row_max = torch.where(row_max == -math.inf, 0.0, row_max)
    weights = torch.exp(scores - row_max)
    row_sum = weights.sum(-1, keepdim=True)
    return weights / torch.where(row_sum == 0.0, 1.0, row_sum), row_max + torch.log(row_sum)
