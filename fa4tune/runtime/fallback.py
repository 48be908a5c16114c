"""Attention without a kernel of ours: the float64 reference on the CPU, plain torch with a mask on a GPU."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fa4tune.kernels.reference import attention

SCORES_PER_CHUNK = 1 << 26
"""Scores held at once on a GPU (256 MiB in float32)."""


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """LSE is float32, and float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def reference_attention(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """out in q's dtype and LSE (natural log), computed in float64; arguments as of ``flash_attn_func``."""
    out, lse = attention(q, k, v, softmax_scale=softmax_scale, causal=causal)
    return out.to(q.dtype), lse.to(lse_dtype(q.dtype))


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """The same through torch's matrix products, in float32 or better, a chunk of rows at a time.

    The mask is explicit: causal is aligned bottom-right, and a row without a key gives out 0 and LSE -inf.
    """
    batch, seqlen_q, heads, _ = q.shape
    seqlen_k, kv_heads, head_dim_v = v.shape[1], v.shape[2], v.shape[3]
    work = lse_dtype(q.dtype)
    group = heads // kv_heads
    grouped = q.unflatten(2, (kv_heads, group)).permute(0, 2, 3, 1, 4)  # batch, kv head, group, row, dim
    keys = k.permute(0, 2, 3, 1).unsqueeze(2).to(work)
    values = v.permute(0, 2, 1, 3).unsqueeze(2).to(work)
    out = torch.empty(batch, seqlen_q, heads, head_dim_v, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, seqlen_q, dtype=work, device=q.device)
    rows = max(1, SCORES_PER_CHUNK // max(1, batch * heads * seqlen_k))
    columns = torch.arange(seqlen_k, device=q.device)
    for start in range(0, seqlen_q, rows):
        end = min(start + rows, seqlen_q)
        scores = grouped[..., start:end, :].to(work) @ keys * softmax_scale
        if causal:
            last = torch.arange(start, end, device=q.device) + seqlen_k - seqlen_q
            scores.masked_fill_(columns > last[:, None], -math.inf)
        piece = torch.logsumexp(scores, -1, keepdim=True)
        weights = torch.exp(scores - torch.where(piece == -math.inf, 0.0, piece))
        result = (weights @ values).permute(0, 3, 1, 2, 4).flatten(2, 3)
        out[:, start:end] = result.to(q.dtype)
        lse[:, :, start:end] = piece.squeeze(-1).flatten(1, 2)
    return out, lse
