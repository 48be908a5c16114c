"""FlashAttention as first published (Dao et al., 2022), executed in float64 with an account of HBM traffic.

Algorithms 1 (forward) and 4 (backward) of that paper for one head, next to the standard attention that they
replace (Algorithms 0 and 3). Each load and store of the published algorithm is counted where it happens, in
elements; nothing is derived from a formula. What is on chip is free. The purpose is to study how traffic
depends on sequence length, head dimension and SRAM size, not to be fast.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fa4tune.errors import ConfigError, ProblemError

Array = NDArray[np.float64]


@dataclass
class Ledger:
    """HBM traffic in elements, by tensor.

    Tensors go by their names in the paper (Q, K, V, O, l, m, S, P, dO, dQ, dK, dV, dP, dS); the first store
    of the zeros that a loop accumulates into is kept apart as "initial O", "initial l" and so on, because
    implementations skip it.
    """

    reads: Counter[str] = field(default_factory=Counter)
    writes: Counter[str] = field(default_factory=Counter)

    def load(self, **tensors: Array) -> None:
        """Counts a read of each of the arrays."""
        for name, array in tensors.items():
            self.reads[name] += array.size

    def store(self, **tensors: Array) -> None:
        """Counts a write of each of the arrays."""
        for name, array in tensors.items():
            self.writes[name] += array.size

    def initialise(self, **tensors: Array) -> None:
        """Counts the write of an accumulator's first value."""
        for name, array in tensors.items():
            self.writes[f"initial {name}"] += array.size

    def elements(self) -> int:
        """All elements read and written."""
        return self.reads.total() + self.writes.total()

    def bytes(self, element_bytes: int, others: Mapping[str, int] | None = None) -> int:
        """All bytes moved.

        Args:
            element_bytes: size of an element.
            others: sizes of elements of tensors that differ, by name; 0 leaves a tensor out.
        """
        sizes = others or {}
        return sum(
            count * sizes.get(name, element_bytes)
            for side in (self.reads, self.writes)
            for name, count in side.items()
        )


class Forward(NamedTuple):
    """out (seqlen_q, head_dim); row_sum l and row_max m (seqlen_q), with lse = m + log(l); the traffic."""

    out: Array
    row_sum: Array
    row_max: Array
    ledger: Ledger


class Backward(NamedTuple):
    """Gradients shaped as q, k and v; the traffic."""

    dq: Array
    dk: Array
    dv: Array
    ledger: Ledger


class Blocks(NamedTuple):
    """Rows of a block of queries (B_r) and of a block of keys (B_c)."""

    rows: int
    columns: int


def block_sizes(sram_elements: int, head_dim: int) -> Blocks:
    """B_c = ceil(M / 4d) and B_r = min(ceil(M / 4d), d), for M elements of SRAM (Algorithm 1, line 1).

    Raises:
        ConfigError: M or d below 1.
    """
    if sram_elements < 1 or head_dim < 1:
        raise ConfigError(f"SRAM and head_dim must be at least 1 element, not {sram_elements} and {head_dim}")
    columns = -(-sram_elements // (4 * head_dim))
    return Blocks(rows=min(columns, head_dim), columns=columns)


def flash_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    sram_elements: int | None = None,
    blocks: Blocks | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Forward:
    """Algorithm 1: blocks of keys outside, blocks of queries inside, O kept normalised in HBM throughout.

    Args:
        q: (seqlen_q, head_dim). k, v: (seqlen_k, head_dim).
        sram_elements: M, which sets the block sizes (see `block_sizes`); this or `blocks`.
        blocks: the block sizes themselves.
        softmax_scale: factor on the scores; 1 / sqrt(head_dim) by default.
        causal: hides keys after the query, aligned bottom-right. As published, hidden blocks are not skipped.

    Returns:
        out 0, row_sum 0 and row_max -inf for rows without a key.

    Raises:
        ProblemError: shapes that do not fit, or another dtype than float64.
        ConfigError: not exactly one of `sram_elements` and `blocks`, or a size below 1.
    """
    scale = _check(q, k, v, softmax_scale)
    block_rows, block_columns = _blocks(sram_elements, blocks, q.shape[1])
    ledger = Ledger()
    out = np.zeros_like(q, dtype=np.float64)
    row_sum = np.zeros(len(q))
    row_max = np.full(len(q), -math.inf)
    ledger.initialise(O=out, l=row_sum, m=row_max)

    for j in _ranges(len(k), block_columns):
        k_j, v_j = k[j], v[j]
        ledger.load(K=k_j, V=v_j)
        for i in _ranges(len(q), block_rows):
            q_i, out_i, sum_i, max_i = q[i], out[i], row_sum[i], row_max[i]
            ledger.load(Q=q_i, O=out_i, l=sum_i, m=max_i)

            scores = _scores(q_i, k_j, scale, causal, i.start + len(k) - len(q) - j.start)
            block_max = scores.max(axis=1)
            weights = np.exp(scores - _finite(block_max)[:, None])
            new_max = np.maximum(max_i, block_max)
            old_factor = np.exp(max_i - _finite(new_max))
            block_factor = np.exp(block_max - _finite(new_max))
            new_sum = old_factor * sum_i + block_factor * weights.sum(axis=1)
            numerator = (old_factor * sum_i)[:, None] * out_i + block_factor[:, None] * (weights @ v_j)

            out[i] = numerator / np.where(new_sum == 0.0, 1.0, new_sum)[:, None]
            row_sum[i], row_max[i] = new_sum, new_max
            ledger.store(O=out[i], l=row_sum[i], m=row_max[i])
    return Forward(out, row_sum, row_max, ledger)


def flash_attention_backward(
    q: Array,
    k: Array,
    v: Array,
    dout: Array,
    forward: Forward,
    *,
    sram_elements: int | None = None,
    blocks: Blocks | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Backward:
    """Algorithm 4: S and P are recomputed from q, k and the saved l and m; dQ is accumulated in HBM.

    Args:
        dout: gradient of out, (seqlen_q, head_dim).
        forward: `flash_attention`'s result on the same inputs. The other arguments are that function's.

    Raises:
        ProblemError, ConfigError: as `flash_attention`; ProblemError too if dout is not shaped as out.
    """
    scale = _check(q, k, v, softmax_scale)
    if dout.shape != q.shape:
        raise ProblemError(f"dout must have the shape of out, {q.shape}, not {dout.shape}")
    block_rows, block_columns = _blocks(sram_elements, blocks, q.shape[1])
    ledger = Ledger()
    dq, dk, dv = (np.zeros(x.shape) for x in (q, k, v))
    ledger.initialise(dQ=dq, dK=dk, dV=dv)

    for j in _ranges(len(k), block_columns):
        k_j, v_j = k[j], v[j]
        ledger.load(K=k_j, V=v_j)
        dk_j, dv_j = np.zeros(k_j.shape), np.zeros(v_j.shape)
        for i in _ranges(len(q), block_rows):
            q_i, out_i, dout_i, dq_i = q[i], forward.out[i], dout[i], dq[i]
            sum_i, max_i = forward.row_sum[i], forward.row_max[i]
            ledger.load(Q=q_i, O=out_i, dO=dout_i, dQ=dq_i, l=sum_i, m=max_i)

            scores = _scores(q_i, k_j, scale, causal, i.start + len(k) - len(q) - j.start)
            weights = np.exp(scores - _finite(max_i)[:, None])
            probabilities = weights / np.where(sum_i == 0.0, 1.0, sum_i)[:, None]
            dv_j += probabilities.T @ dout_i
            d_probabilities = dout_i @ v_j.T
            delta = (dout_i * out_i).sum(axis=1, keepdims=True)
            d_scores = probabilities * (d_probabilities - delta)
            dk_j += scale * d_scores.T @ q_i

            dq[i] = dq_i + scale * d_scores @ k_j
            ledger.store(dQ=dq[i])
        dk[j], dv[j] = dk_j, dv_j
        ledger.store(dK=dk_j, dV=dv_j)
    return Backward(dq, dk, dv, ledger)


def standard_attention(
    q: Array, k: Array, v: Array, *, softmax_scale: float | None = None, causal: bool = False
) -> Forward:
    """Algorithm 0: three passes, with S and P written to HBM and read back between them.

    Arguments and errors as `flash_attention`. l and m are returned but stay on chip.
    """
    scale = _check(q, k, v, softmax_scale)
    ledger = Ledger()
    scores = _scores(q, k, scale, causal, len(k) - len(q))
    ledger.load(Q=q, K=k)
    ledger.store(S=scores)

    row_max = scores.max(axis=1, initial=-math.inf)
    weights = np.exp(scores - _finite(row_max)[:, None])
    row_sum = weights.sum(axis=1)
    probabilities = weights / np.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    ledger.load(S=scores)
    ledger.store(P=probabilities)

    out = probabilities @ v
    ledger.load(P=probabilities, V=v)
    ledger.store(O=out)
    return Forward(out, row_sum, row_max, ledger)


def standard_attention_backward(
    q: Array,
    k: Array,
    v: Array,
    dout: Array,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Backward:
    """Algorithm 3: five passes over seqlen_q x seqlen_k matrices in HBM, of which the forward left P there.

    Arguments and errors as `flash_attention_backward`.
    """
    scale = _check(q, k, v, softmax_scale)
    if dout.shape != q.shape:
        raise ProblemError(f"dout must have the shape of out, {q.shape}, not {dout.shape}")
    scores = _scores(q, k, scale, causal, len(k) - len(q))
    weights = np.exp(scores - _finite(scores.max(axis=1, initial=-math.inf))[:, None])
    row_sum = weights.sum(axis=1, keepdims=True)
    probabilities = weights / np.where(row_sum == 0.0, 1.0, row_sum)

    ledger = Ledger()
    dv = probabilities.T @ dout
    ledger.load(P=probabilities, dO=dout)
    ledger.store(dV=dv)

    d_probabilities = dout @ v.T
    ledger.load(dO=dout, V=v)
    ledger.store(dP=d_probabilities)

    delta = (probabilities * d_probabilities).sum(axis=1, keepdims=True)
    d_scores = probabilities * (d_probabilities - delta)
    ledger.load(P=probabilities, dP=d_probabilities)
    ledger.store(dS=d_scores)

    dq = scale * d_scores @ k
    ledger.load(dS=d_scores, K=k)
    ledger.store(dQ=dq)

    dk = scale * d_scores.T @ q
    ledger.load(dS=d_scores, Q=q)
    ledger.store(dK=dk)
    return Backward(dq, dk, dv, ledger)


def _check(q: Array, k: Array, v: Array, softmax_scale: float | None) -> float:
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.ndim != 2 or array.dtype != np.float64:
            raise ProblemError(
                f"{name} must be a float64 matrix of one head, (seqlen, head_dim), "
                f"not {array.dtype} of shape {array.shape}"
            )
    if q.shape[1] < 1 or k.shape[1] != q.shape[1] or v.shape != k.shape:
        raise ProblemError(
            f"q {q.shape}, k {k.shape} and v {v.shape} must share head_dim (at least 1), and k and v seqlen"
        )
    return 1.0 / math.sqrt(q.shape[1]) if softmax_scale is None else softmax_scale


def _blocks(sram_elements: int | None, blocks: Blocks | None, head_dim: int) -> Blocks:
    if (sram_elements is None) == (blocks is None):
        raise ConfigError("give exactly one of sram_elements and blocks")
    if sram_elements is not None:
        return block_sizes(sram_elements, head_dim)
    assert blocks is not None
    if min(blocks) < 1:
        raise ConfigError(
            f"block sizes must be at least 1, not {blocks.rows} rows and {blocks.columns} columns"
        )
    return blocks


def _ranges(length: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def _scores(q: Array, k: Array, scale: float, causal: bool, diagonal: int) -> Array:
    """Scaled scores of a block; with `causal`, row r sees columns up to r + diagonal."""
    scores = scale * q @ k.T
    if causal:
        scores = np.where(np.tri(len(q), len(k), diagonal, dtype=bool), scores, -math.inf)
    return scores


def _finite(row_max: Array) -> Array:
    """0 in place of the -inf of rows that have seen no key, so that exp(-inf - max) is 0 and not NaN."""
    return np.where(np.isneginf(row_max), 0.0, row_max)
