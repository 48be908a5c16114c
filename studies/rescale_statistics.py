"""How often a threshold on the row maximum spares the rescale of O, and what it costs in accuracy.

Run `python studies/rescale_statistics.py`: trains a small language model on the Python standard library (a
minute or two on a CPU), walks the softmax of FlashAttention-4 (arXiv 2603.05451, section 3.1.4) over Gaussian
inputs, over heavy-tailed ones and over the model's own layers, prints a table and draws
`figures/rescale_statistics.png`.
"""

import argparse
import math
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

from fa4tune.kernels.inputs import gaussian_inputs, heavy_tailed_inputs
from fa4tune.kernels.reference import attention, attention_rounded, errors_against

FIGURE = Path(__file__).parent / "figures" / "rescale_statistics.png"
LOG2_E = math.log2(math.e)
WARP, TILE_ROWS, TILE_N = 32, 256, 128
THRESHOLDS = (0.0, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0)


@dataclass(frozen=True)
class Walked:
    """One threshold on one set of inputs.

    Args:
        rows: share of (row, iteration) pairs after an output tile's first in which the row asks to rescale.
        warps: share of (warp, iteration) pairs in which one of its 32 rows does, so that the warp rescales.
        error: error of O against float64, relative to that of a computation that rounds P and O and nothing
            else.
        largest: largest exponential, in log2.
    """

    threshold: float
    rows: float
    warps: float
    error: float
    largest: float


def walk(
    q: Tensor, k: Tensor, v: Tensor, threshold: float, *, causal: bool, last_first: bool = True
) -> Walked:
    """The online softmax of the kernel, in float32 with P and O rounded to q's dtype.

    Args:
        q, k, v: (batch, seqlen, heads, head_dim), as many heads in all.
        threshold: growth of a row's maximum, in log2 units, up to which the old one is kept.
        causal: mask, aligned bottom-right.
        last_first: go through the key tiles from the last one down, as the kernel does.
    """
    asked, voted, out, largest = _walk(q, k, v, threshold, causal, last_first)
    exact, _ = attention(q, k, v, causal=causal)
    rounded, _ = attention_rounded(q, k, v, causal=causal)
    error = errors_against(out, exact).rms / errors_against(rounded, exact).rms
    return Walked(threshold, asked, voted, error, largest)


def _walk(
    q: Tensor, k: Tensor, v: Tensor, threshold: float, causal: bool, last_first: bool
) -> tuple[float, float, Tensor, float]:
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    scale = LOG2_E / math.sqrt(q.shape[-1])
    queries, keys, values = (t.transpose(1, 2).float() for t in (q, k, v))
    out = torch.zeros(*queries.shape[:3], v.shape[-1])
    asked = voted = row_turns = warp_turns = 0
    largest = -math.inf
    for start in range(0, seqlen_q, TILE_ROWS):
        rows = slice(start, min(start + TILE_ROWS, seqlen_q))
        position = torch.arange(rows.start, rows.stop) + seqlen_k - seqlen_q
        end = min(seqlen_k, int(position[-1]) + 1) if causal else seqlen_k
        blocks = list(range(max(1, -(-end // TILE_N))))
        row_max = torch.full((*queries.shape[:2], rows.stop - rows.start), -math.inf)
        row_sum = torch.zeros_like(row_max)
        acc = torch.zeros(*row_max.shape, v.shape[-1])
        for turn, block in enumerate(reversed(blocks) if last_first else blocks):
            columns = slice(block * TILE_N, min((block + 1) * TILE_N, seqlen_k))
            scores = queries[:, :, rows] @ keys[:, :, columns].mT * scale
            if causal:
                hidden = torch.arange(columns.start, columns.stop) > position[:, None]
                scores = scores.masked_fill(hidden, -math.inf)
            tile_max = torch.maximum(row_max, scores.amax(-1))
            finite = torch.where(tile_max == -math.inf, 0.0, tile_max)
            grown = (row_max - finite < -threshold) | (row_max == -math.inf)
            if turn:
                asks = grown & (row_max > -math.inf)  # a row that has seen no key has nothing to rescale
                asked += int(asks.sum())
                row_turns += grown.numel()
                warps = [part.any(-1) for part in asks.split(WARP, -1)]
                voted += sum(int(w.sum()) for w in warps)
                warp_turns += sum(w.numel() for w in warps)
            factor = torch.where(grown, torch.exp2(row_max - finite), 1.0)
            row_max = torch.where(grown, tile_max, row_max)
            against = torch.where(row_max == -math.inf, 0.0, row_max)
            p = torch.exp2(scores - against[..., None])
            largest = max(largest, float((scores - against[..., None]).max()))
            row_sum = row_sum * factor + p.sum(-1)
            acc = acc * factor[..., None] + p.to(q.dtype).float() @ values[:, :, columns]
        out[:, :, rows] = acc / torch.where(row_sum == 0, 1.0, row_sum)[..., None]
    shares = (asked / max(1, row_turns), voted / max(1, warp_turns))
    return *shares, out.transpose(1, 2).to(q.dtype), largest


# -- a small model -------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Causal attention with rotary positions, and a multilayer perceptron; keeps its last q, k and v."""

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        width = heads * head_dim
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.last: tuple[Tensor, Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seqlen, width) to the same."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, self.head_dim)).unbind(2)
        q, k = _rotate(q), _rotate(k)
        self.last = (q.detach(), k.detach(), v.detach())
        mixed = nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


def _rotate(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1])[:, None] * 10000.0 ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Model(nn.Module):
    """A language model of bytes."""

    def __init__(self, layers: int = 3, heads: int = 4, head_dim: int = 64) -> None:
        super().__init__()
        width = heads * head_dim
        self.embedding = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(heads, head_dim) for _ in range(layers))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, seqlen) bytes to logits."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def library_text(limit: int = 4_000_000) -> Tensor:
    """Source text of the Python standard library."""
    folder = Path(sysconfig.get_path("stdlib"))
    data = bytearray()
    for file in sorted(folder.glob("*.py")):
        data += file.read_bytes()
        if len(data) > limit:
            break
    return torch.frombuffer(data, dtype=torch.uint8).long()


def train(steps: int, seed: int = 0) -> tuple[Model, float]:
    """A model after ``steps`` of AdamW on 4 x 256 bytes, and its last losses' mean (nats a byte)."""
    torch.manual_seed(seed)
    text, model = library_text(), Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 50)
        starts = torch.randint(0, len(text) - 257, (4,))
        batch = torch.stack([text[s : s + 257] for s in starts])
        loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, sum(losses[-20:]) / len(losses[-20:])


def layer_inputs(model: Model, seqlen: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """q, k and v of each layer over one text of ``seqlen`` bytes, in bf16."""
    text = library_text()
    with torch.no_grad():
        model(text[None, :seqlen])
    for block in model.blocks:
        assert isinstance(block, Block)
        assert block.last is not None
        q, k, v = (t.to(torch.bfloat16) for t in block.last)
        yield q, k, v


# -- the study -----------------------------------------------------------------------------------------------


def all_inputs(seqlen: int, steps: int) -> tuple[dict[str, tuple[Tensor, Tensor, Tensor]], float]:
    """Inputs by name, and the loss of the model behind the layers."""
    found = {}
    for name, generate in (("Gaussian", gaussian_inputs), ("heavy-tailed", heavy_tailed_inputs)):
        drawn = generate(
            batch=1, heads=4, kv_heads=4, seqlen_q=seqlen, seqlen_k=seqlen, head_dim=64, head_dim_v=64
        )
        found[name] = (drawn.q, drawn.k, drawn.v)
    model, loss = train(steps)
    for i, qkv in enumerate(layer_inputs(model, seqlen)):
        found[f"layer {i}"] = qkv
    return found, loss


def draw(results: dict[str, list[Walked]], path: Path) -> None:
    """Share of rescales and error against the threshold."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    for name, walked in results.items():
        thresholds = [w.threshold for w in walked]
        left.plot(thresholds, [100 * w.warps for w in walked], marker="o", label=name)
        right.plot(thresholds, [w.error for w in walked], marker="o", label=name)
    left.set(xlabel="threshold, log2 units", ylabel="iterations in which a warp rescales, %")
    right.set(xlabel="threshold, log2 units", ylabel="error of O, by that of rounding P and O alone")
    left.legend()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    """Runs the study."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seqlen", type=int, default=1024, help="keys and queries")
    parser.add_argument("--steps", type=int, default=300, help="training steps of the model")
    parser.add_argument("--figure", type=Path, default=FIGURE, help="where to save the plot")
    arguments = parser.parse_args()
    inputs, loss = all_inputs(arguments.seqlen, arguments.steps)
    print(f"model: {loss:.2f} nats a byte after {arguments.steps} steps; causal, {arguments.seqlen} keys\n")
    print(
        "| inputs | threshold | rows that ask, % | warps that rescale, % | error | largest exponent |",
        flush=True,
    )
    print("|---|--:|--:|--:|--:|--:|")
    results: dict[str, list[Walked]] = {}
    for name, (q, k, v) in inputs.items():
        results[name] = [walk(q, k, v, t, causal=True) for t in THRESHOLDS]
        for w in results[name]:
            print(
                f"| {name} | {w.threshold:g} | {100 * w.rows:.1f} | {100 * w.warps:.1f} | {w.error:.2f} "
                f"| {w.largest:.1f} |"
            )
    for name, (q, k, v) in inputs.items():
        forwards = walk(q, k, v, 0.0, causal=True, last_first=False)
        print(
            f"\n{name}, no threshold, first keys first: {100 * forwards.warps:.1f}% of warps rescale", end=""
        )
    draw(results, arguments.figure)
    print(f"\n\nfigure: {arguments.figure}")


if __name__ == "__main__":
    main()
