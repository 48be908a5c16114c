"""A real timeline of one CTA of the Hopper forward, warp by warp, beside the model's replay of the same run.

    run-iket --output-dir OUT --clobber profile --enabled-cluster 0,0,0 --postprocess json -- \\
        python studies/hopper_timeline.py record            on the GPU, where the kernel compiler is
    python studies/hopper_timeline.py draw OUT/*.trace.json  anywhere: studies/figures/hopper_timeline.png

The kernel is the package's own; a subclass marks the steps of each warp with CuTe DSL's in-kernel event
tracing, which costs a few instructions a mark. Marks become spans here: ``wait`` (for a turn or K), ``issue``
(matmuls), ``scores`` (waiting for QK) and ``softmax``, which includes the wait for PV in its middle.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from fa4tune.hardware.gpu import load_gpu
from fa4tune.kernels.config import SM90ForwardConfig
from fa4tune.kernels.program import build_plan
from fa4tune.model.replay import replay
from fa4tune.problem import AttentionProblem

PROBLEM = AttentionProblem.parse("b1_hq132_hk132_sq192_sk4096_d64_dv64_bf16_full_fwd")
CONFIG = SM90ForwardConfig(tile_m=192, tile_n=128, ping_pong=True, scheduler="single")
"""One tile a CTA and one CTA an SM: what is seen is one prologue, 32 iterations and one epilogue."""

DATA = Path(__file__).parent / "data" / "hopper_timeline.json"
FIGURE = Path(__file__).parent / "figures" / "hopper_timeline.png"
COLORS = {"wait": "#bbbbbb", "issue": "#76b7b2", "scores": "#4e79a7", "softmax": "#e15759", "load": "#f1ce63"}


def record() -> None:
    """Compile the marked kernel and run it twice, the second time with a warm L2, under the profiler."""
    import cutlass
    import cutlass.cute as cute
    import torch
    from cutlass.cute.experimental import iket

    from fa4tune.kernels.sm90 import forward

    class Marked(forward.ForwardSm90):
        """The kernel with a mark before each step."""

        def _take_turn(self, group: Any) -> None:
            iket.mark("wait")
            super()._take_turn(group)
            iket.mark("issue")

        def _pass_turn(self, group: Any) -> None:
            super()._pass_turn(group)
            iket.mark("scores")

        def softmax_tile(self, *arguments: Any) -> Any:
            iket.mark("softmax")
            return super().softmax_tile(*arguments)

        def _load_block(self, *arguments: Any) -> Any:
            iket.mark("load")
            return super()._load_block(*arguments)

    host, fake = forward.build(PROBLEM, CONFIG)
    kernel = cute.compile(Marked(host.plan), *fake, options="--enable-tvm-ffi --gpu-arch sm_90a")
    p, device = PROBLEM, "cuda"
    generator = torch.Generator(device).manual_seed(0)
    shapes = [
        (p.batch, n, h, p.head_dim) for n, h in ((p.seqlen_q, p.heads), *[(p.seqlen_k, p.kv_heads)] * 2)
    ]
    q, k, v = (torch.randn(s, generator=generator, device=device).to(torch.bfloat16) for s in shapes)
    out, lse = torch.empty_like(q), torch.empty((p.batch, p.heads, p.seqlen_q), device=device)
    for _ in range(2):
        kernel(q, k, v, out, lse, p.head_dim**-0.5, 132)
        torch.cuda.synchronize()
    print("cutlass", cutlass.__version__, torch.cuda.get_device_name(), float(out.float().abs().mean()))


def spans(trace: dict[str, Any]) -> dict[int, list[tuple[str, float, float]]]:
    """(step, begin, end) in nanoseconds by warp of the last launch, counted from its first mark.

    A step lasts until the warp's next mark; the profiler's clock ticks every 32 ns.
    """
    names, places = trace["stringTable"], trace["locationTable"]
    marks: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for mark in trace["launches"][-1]["markers"]:
        marks[places[mark["locIdx"]]["warpId"]].append((mark["timestamp"], names[mark["markerNameIdx"]]))
    begin = min(time for own in marks.values() for time, _ in own)
    found: dict[int, list[tuple[str, float, float]]] = {}
    for warp, own in sorted(marks.items()):
        own.sort()
        found[warp] = [(name, float(a - begin), float(b - begin)) for (a, name), (b, _) in pairwise(own)]
    return found


def keep(trace: dict[str, Any]) -> None:
    """Write the last launch's spans of one warp a role to the repository's data."""
    own = spans(trace)
    groups = CONFIG.warpgroups
    rows = {**{f"mma{w}": own[4 * w] for w in range(groups)}, "load": own[4 * groups]}
    DATA.write_text(
        json.dumps({"problem": str(PROBLEM), "config": str(CONFIG), "gpu": "NVIDIA H200", **rows})
    )


def period(steps: list[tuple[str, float, float]]) -> float:
    """Nanoseconds an iteration: median distance of a warp's softmax steps, ends of the tile left out."""
    starts = [begin for name, begin, _ in steps if name == "softmax"][4:-4]
    return statistics.median([b - a for a, b in pairwise(starts)])


def share(steps: list[tuple[str, float, float]], name: str) -> float:
    """Part of the steady state that a warp spends in a step."""
    inner = [s for s in steps if s[0] != "load"]
    low, high = len(inner) // 6, len(inner) * 5 // 6
    part = inner[low:high]
    return sum(e - b for n, b, e in part if n == name) / (part[-1][2] - part[0][1])


def modelled() -> tuple[dict[str, list[tuple[str, float, float]]], float]:
    """The replay's steps by role in cycles, named as the marks are, and its period in cycles."""
    played = replay(build_plan(PROBLEM, CONFIG, load_gpu("h200")), load_gpu("h200"), trips=32)
    rows: dict[str, list[tuple[str, float, float]]] = defaultdict(list)
    for event in played.events:
        if event.role == "load":
            continue
        if event.operation.startswith("qk"):
            rows[event.role].append(("scores", event.start, event.end))
        elif event.operation.startswith("pv"):
            rows[event.role].append(("issue", event.start, event.end))
        elif not event.asynchronous:
            rows[event.role].append(("softmax", event.start, event.end))
    return rows, played.period


def draw() -> None:
    """The picture: four iterations of the three warpgroups, real above, replayed below, on one scale."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    real = {k: v for k, v in json.loads(DATA.read_text()).items() if isinstance(v, list)}
    real_period = statistics.mean(period(real[f"mma{w}"]) for w in range(CONFIG.warpgroups))
    rows, cycles = modelled()
    scale = real_period / cycles
    print(
        f"period: {real_period:.0f} ns real; {cycles:.0f} cycles replayed, {cycles / 1.98:.0f} ns at 1980 MHz"
    )
    for name in ("wait", "issue", "scores", "softmax"):
        print(f"  {name:8} {share(real['mma0'], name):4.0%} of a warp's time")
    figure, axes = plt.subplots(2, 1, figsize=(12, 5.2), sharex=True, layout="constrained")
    shown = 4 * real_period
    for axis, title, source, factor in (
        (axes[0], f"NVIDIA H200, in-kernel marks: {real_period:.0f} ns an iteration", real, 1.0),
        (axes[1], f"replay: {cycles:.0f} cycles an iteration, drawn to the same length", rows, scale),
    ):
        first = [b * factor for n, b, _ in source["mma0"] if n == "softmax"]
        origin = min(first, key=lambda b: abs(b - first[len(first) // 2]))
        for row, role in enumerate(f"mma{w}" for w in range(CONFIG.warpgroups)):
            for name, begin, end in source[role]:
                left, right = begin * factor - origin, end * factor - origin
                if right < 0 or left > shown:
                    continue
                # matmuls run beside the softmax: in the replay they have the lower lane
                lane = factor != 1.0 and name in ("issue", "scores")
                axis.broken_barh(
                    [(left, right - left)],
                    (row + (0.1 if lane else -0.4), 0.3 if lane else (0.8 if factor == 1.0 else 0.48)),
                    facecolor=COLORS[name],
                    edgecolor="white",
                    linewidth=0.4,
                )
        axis.set(yticks=range(CONFIG.warpgroups), ylim=(CONFIG.warpgroups - 0.5, -0.5), xlim=(0, shown))
        axis.set_yticklabels([f"warpgroup {w}" for w in range(CONFIG.warpgroups)])
        axis.set_title(title, fontsize=10, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
    axes[1].set_xlabel("nanoseconds")
    words = {
        "wait": "waits for its turn or K",
        "issue": "issues matmuls (replay: PV runs)",
        "scores": "waits for QK (replay: QK runs)",
        "softmax": "softmax (real: with the wait for PV)",
    }
    figure.legend(
        handles=[Patch(facecolor=COLORS[n], label=w) for n, w in words.items()],
        loc="outside lower center",
        ncols=4,
        frameon=False,
        fontsize=9,
    )
    figure.suptitle(
        "Hopper forward, head dim 64, 192x128 tile: the same steady state on the GPU and in the model"
    )
    FIGURE.parent.mkdir(exist_ok=True)
    figure.savefig(FIGURE, dpi=130)
    print(FIGURE)


def main() -> None:
    """Command line of the study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("record")
    drawing = verbs.add_parser("draw")
    drawing.add_argument(
        "trace", type=Path, nargs="?", help="JSON trace of run-iket (default: the recorded one)"
    )
    options = parser.parse_args()
    if options.verb == "record":
        record()
        return
    if options.trace is not None:
        keep(json.loads(options.trace.read_text()))
    draw()


if __name__ == "__main__":
    main()
