"""Inputs that correctness gates run kernels on: Gaussian, and ones that look like real activations.

Both generators are deterministic for a seed on one kind of device (CPU and CUDA draw different numbers) and
leave torch's global generators alone. This file imports torch and the standard library only, because it is
copied as it is to machines that measure.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

LOG2_E = math.log2(math.e)

SEQUENCE_CORRELATION = 0.9
CHANNEL_CORRELATION = 0.5
RAMP_LOG2 = 40.0
"""Rise of the mean score along the keys, in units of log2, for the head and row of factor 1."""
SHARPNESS = 3.0
"""Factor on the queries of heavy-tailed inputs; brings the content's share of a score to 5-6 log2 units."""


class AttentionInputs(NamedTuple):
    """q (batch, seqlen_q, heads, head_dim), k and v with kv_heads, and dout shaped as out."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


def gaussian_inputs(
    *,
    batch: int,
    heads: int,
    kv_heads: int,
    seqlen_q: int,
    seqlen_k: int,
    head_dim: int,
    head_dim_v: int,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> AttentionInputs:
    """Independent standard normal elements: the scores' standard deviation is 1.44 log2 units.

    Args:
        dtype: element type of the results; they are drawn in float32 and rounded.
        seed: of the generator; each tensor has its own stream, so a shape changed in k does not move q.

    Raises:
        ValueError: a negative size, or kv_heads that does not divide heads.
    """
    shapes = _shapes(batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim, head_dim_v)
    return AttentionInputs(
        *(_normal(shape, _generator(seed, i, device)).to(dtype) for i, shape in enumerate(shapes))
    )


def heavy_tailed_inputs(
    *,
    batch: int,
    heads: int,
    kv_heads: int,
    seqlen_q: int,
    seqlen_k: int,
    head_dim: int,
    head_dim_v: int,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> AttentionInputs:
    """Correlated, heavy-tailed elements with outlier channels: sharp attention over a wide range of scores.

    What a kernel meets in trained models and not in Gaussian noise:

    - neighbours in the sequence (first-order autoregression, 0.9) and in head_dim (0.5) are alike;
    - elements are Student t with four degrees of freedom, of unit variance before scaling;
    - one channel in 32 is an outlier, an order of magnitude above the rest, the same ones in q and in k;
    - in those channels k grows along the sequence, so that a row's mean score rises by 5 to 50 log2 units
      from the first key to the last (`RAMP_LOG2` times a factor of the head and of the row), and the running
      maximum moves far more than any rescale threshold, several times;
    - the rest of a score has a standard deviation of 5 to 6 log2 units, with heavy tails: few keys count;
    - v and dout have the same texture and an outlier channel each.

    The numbers hold for the default softmax scale, 1 / sqrt(head_dim). Arguments, results and errors are
    those of `gaussian_inputs`.
    """
    shapes = _shapes(batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim, head_dim_v)
    q, k, v, dout = (_texture(shape, _generator(seed, i, device)) for i, shape in enumerate(shapes))
    generator = _generator(seed, len(shapes), device)

    if q.numel() and k.numel():
        count = max(1, head_dim // 32)
        # Channels by kv head, so that the query heads of a group agree with their keys.
        order = torch.rand(kv_heads, head_dim, generator=generator, device=q.device).argsort(-1)
        outlier = torch.zeros(kv_heads, head_dim, device=q.device).scatter_(-1, order[:, :count], 1.0)
        sign = 1.0 - 2.0 * torch.randint(0, 2, outlier.shape, generator=generator, device=q.device)
        direction = outlier * sign
        # Each of `count` channels adds height^2 * scale to a score: RAMP_LOG2 in all at the last key.
        height = math.sqrt(RAMP_LOG2 * math.sqrt(head_dim) / (count * LOG2_E))
        head_factor = torch.linspace(1.0, 0.25, heads, device=q.device)
        row_factor = 0.5 + 0.75 * torch.rand(batch, seqlen_q, heads, generator=generator, device=q.device)
        position = torch.linspace(0.0, 1.0, seqlen_k, device=q.device)
        q *= SHARPNESS
        # The texture stays off the outlier channels of q: it would multiply the ramp into noise.
        direction_q = direction.repeat_interleave(heads // kv_heads, 0)
        q *= 1.0 - direction_q.abs()
        q += height * (head_factor * row_factor)[..., None] * direction_q
        k += height * position[:, None, None] * direction
    for tensor in (v, dout):
        if tensor.numel():
            tensor[..., 0] *= 10.0
    return AttentionInputs(q.to(dtype), k.to(dtype), v.to(dtype), dout.to(dtype))


def _shapes(
    batch: int, heads: int, kv_heads: int, seqlen_q: int, seqlen_k: int, head_dim: int, head_dim_v: int
) -> tuple[tuple[int, int, int, int], ...]:
    """Shapes of q, k, v, dout."""
    sizes = {"batch": batch, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    sizes |= {"head_dim": head_dim, "head_dim_v": head_dim_v}
    for name, size in sizes.items():
        if size < 0:
            raise ValueError(f"{name} must not be negative, but is {size}")
    if kv_heads < 1 or heads < 1 or heads % kv_heads:
        raise ValueError(f"kv_heads must divide heads, but {kv_heads} does not divide {heads}")
    return (
        (batch, seqlen_q, heads, head_dim),
        (batch, seqlen_k, kv_heads, head_dim),
        (batch, seqlen_k, kv_heads, head_dim_v),
        (batch, seqlen_q, heads, head_dim_v),
    )


def _generator(seed: int, stream: int, device: torch.device | str) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(1_000_003 * seed + stream)


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device)


def _texture(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Student t elements of unit variance, correlated along the sequence (1) and the channels (-1)."""
    normal = _normal(shape, generator)
    normal = _autoregress(normal, SEQUENCE_CORRELATION, dim=1)
    return _student_t4(_autoregress(normal, CHANNEL_CORRELATION, dim=-1))


def _autoregress(noise: Tensor, correlation: float, dim: int) -> Tensor:
    """x_t = correlation * x_(t-1) + sqrt(1 - correlation^2) * noise_t, and x_0 = noise_0: variance stays 1.

    Solved by doubling: after the step of shift s, x_t is the sum over the last 2s terms. Terms below 1e-6 are
    left out.
    """
    x = noise * math.sqrt(1.0 - correlation**2)
    length = x.shape[dim]
    if length == 0:
        return x
    x.narrow(dim, 0, 1).copy_(noise.narrow(dim, 0, 1))
    shift = 1
    while shift < length and correlation**shift > 1e-6:
        earlier = x.narrow(dim, 0, length - shift) * correlation**shift
        x.narrow(dim, shift, length - shift).add_(earlier)
        shift *= 2
    return x


def _student_t4(normal: Tensor) -> Tensor:
    """Maps standard normal elements to Student t with 4 degrees of freedom over sqrt(2): unit variance.

    Through the quantile function in closed form (Shaw, 2006): with a = 4p(1 - p) for the tail probability p,
    t = 2 sqrt(cos(acos(sqrt(a)) / 3) / sqrt(a) - 1).
    """
    tail = 0.5 * torch.special.erfc(normal.abs() / math.sqrt(2.0))
    root = (4.0 * tail * (1.0 - tail)).sqrt().clamp(min=1e-6, max=1.0)
    magnitude = 2.0 * (torch.cos(torch.acos(root) / 3.0) / root - 1.0).clamp(min=0.0).sqrt()
    return torch.copysign(magnitude / math.sqrt(2.0), normal)
