"""Emulated exponentials and the rescale threshold in upstream's Hopper kernel: their effect, predicted.

    python studies/upstream_softmax.py

FlashAttention-4's softmax was patched into the Hopper forward of flash-attn-4 and measured
(`data/upstream_softmax_h200.json`), and a second time, patched anew, with its machine code read
(`data/upstream_softmax_again_h200.json`). Predicted for the same kernel structure, arranged once as our own
kernel and once as that machine code: no constant is fitted to it.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from fa4tune.hardware.gpu import load_gpu
from fa4tune.kernels.config import SM90ForwardConfig
from fa4tune.kernels.sm90.forward_plan import OWN, Arrangement, build_plan
from fa4tune.model.predict import predict
from fa4tune.problem import AttentionProblem

UPSTREAM = Path(__file__).parent / "data" / "upstream_softmax_h200.json"
UPSTREAM_AGAIN = UPSTREAM.with_name("upstream_softmax_again_h200.json")


def machine_code(share: float, threshold: float) -> Arrangement:
    """Where upstream's softmax stands in machine code, as ``UPSTREAM_AGAIN`` records it.

    The assembler waits for PV after a sixth of the exponentials; with a share or a threshold, before them.
    Polynomials come first.
    """
    return Arrangement(wait_eighths=0 if share or threshold else 1, together=True)


HALVES = (slice(0, 4), slice(4, 8))
"""Columns of the head dimensions 64 and 128."""


class Effect(NamedTuple):
    """Change of speed by a share, threshold and degree, by column: predicted, measured, measured again."""

    row: tuple[float, float, int]
    said: list[float]
    took: list[float]
    again: list[list[float]]

    def near(self, took: Sequence[float]) -> int:
        """Head dimensions whose mean is predicted within 3 points."""
        return sum(abs(fmean(self.said[half]) - fmean(took[half])) <= 0.03 for half in HALVES)


def effects(arranged: Callable[[float, float], Arrangement]) -> list[Effect]:
    """Emulation and threshold in upstream's Hopper kernel, arranged as ``arranged(share, threshold)`` says.

    A row is timed for about 0.1 s a column, less than the second for whose power the board sets a clock, so
    that all rows share one: predicted are cycles.
    """
    gpu = load_gpu("h200")
    data, again = (json.loads(path.read_text()) for path in (UPSTREAM, UPSTREAM_AGAIN))
    columns = [tuple(column) for column in data["columns"]]

    def cycles(share: float, threshold: float, degree: int) -> list[float]:
        found = []
        for head_dim, seqlen, mask in columns:
            heads = 2048 // head_dim
            problem = AttentionProblem(
                16384 // seqlen, heads, heads, seqlen, seqlen, head_dim, head_dim, "bf16", mask
            )
            config = SM90ForwardConfig(
                **data["kernel"][str(head_dim)],
                **data["kernel"]["both"],
                exp2_share=share,
                exp2_degree=degree,
                rescale_threshold=threshold,
                scheduler="lpt" if mask == "causal" else "persistent",
            )
            plan = build_plan(problem, config, gpu, arranged(share, threshold))
            found.append(predict(plan, gpu).cycles)
        return found

    def measured(rows: list[dict[str, Any]], row: tuple[float, float, int]) -> list[list[float]]:
        names = ("exp2_share", "rescale_threshold", "exp2_degree")
        return [entry["tflops"] for entry in rows if tuple(entry[name] for name in names) == row]

    def over(speeds: Sequence[float], base: Sequence[float]) -> list[float]:
        return [speed / before - 1 for speed, before in zip(speeds, base, strict=True)]

    plain = (0.0, 0.0, 3)
    start = cycles(*plain)
    base = [fmean(column) for column in zip(*measured(data["rows"], plain), strict=True)]
    base_again = measured(again["rows"], plain)[0]
    rows = dict.fromkeys((r["exp2_share"], r["rescale_threshold"], r["exp2_degree"]) for r in data["rows"])
    return [
        Effect(
            row,
            over(start, cycles(*row)),
            over(measured(data["rows"], row)[0], base),
            [over(speeds, base_again) for speeds in measured(again["rows"], row)],
        )
        for row in rows
        if row != plain
    ]


def main() -> None:
    """Print :func:`effects`, arranged as our kernel and as upstream's machine code."""
    print(
        "Upstream's Hopper kernel with FlashAttention-4's softmax: effect on speed, predicted "
        "(measured; patched and measured again, each spelling)"
    )
    for words, arranged in (
        ("arranged as our kernel", lambda share, threshold: OWN),
        ("arranged as its machine code", machine_code),
    ):
        found = effects(arranged)
        print(f"\n{words}\nshare thr deg")
        for effect in found:
            share, threshold, degree = effect.row
            means = "  ".join(
                f"{fmean(effect.said[half]):+6.1%} ({fmean(effect.took[half]):+6.1%}; "
                f"{', '.join(f'{fmean(other[half]):+.1%}' for other in effect.again)})"
                for half in HALVES
            )
            each = " ".join(f"{p:+.1%} ({t:+.1%})" for p, t in zip(effect.said, effect.took, strict=True))
            print(f"{share:.3f} {threshold:3g} {degree:d} | {means} | {each}")
        near, again = (sum(e.near(e.took) for e in found), sum(e.near(e.again[0]) for e in found))
        print(f"means within 3 points: {near} of {2 * len(found)}; of those measured again {again}")


if __name__ == "__main__":
    main()
