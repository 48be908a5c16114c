"""The picture of a replay: what it shows, and that what it says can be read."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import matplotlib
import pytest

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from fa4tune.hardware.gpu import load_gpu
from fa4tune.kernels.config import default_config
from fa4tune.kernels.program import build_plan
from fa4tune.model.replay import Replay, replay
from fa4tune.model.replay_plot import draw, figure_of, stretches
from fa4tune.problem import AttentionProblem

CASES = [
    ("h200", 64, "full"),
    ("h200", 64, "causal"),
    ("h200", 128, "full"),
    ("h200", 128, "causal"),
    ("b200", 128, "full"),
]


def play(gpu_name: str, head_dim: int, mask: str, **how: Any) -> Replay:
    gpu = load_gpu(gpu_name)
    text = f"b4_hq16_hk16_sq4096_sk4096_d{head_dim}_dv{head_dim}_bf16_{mask}_fwd"
    problem = AttentionProblem.parse(text)
    return replay(build_plan(problem, default_config(problem, gpu.arch), gpu), gpu, **how)


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    plt.close("all")


def labels_of(figure: Any) -> list[list[tuple[Any, str]]]:
    """(extent, text) of the labels on boxes, by panel."""
    return [
        [(text.get_window_extent(), text.get_text()) for text in axes.texts if text.get_gid() == "label"]
        for axes in figure.axes
    ]


@pytest.mark.parametrize(("gpu", "head_dim", "mask"), CASES)
def test_labels_neither_overlap_nor_leave_their_panel(gpu: str, head_dim: int, mask: str) -> None:
    figure = figure_of(play(gpu, head_dim, mask))
    panels = labels_of(figure)
    assert sum(map(len, panels)) > 40
    for axes, labels in zip(figure.axes, panels, strict=True):
        for (one, text), (other, second) in combinations(labels, 2):
            assert not one.overlaps(other), (text, second)
        span = axes.get_window_extent()
        # extents of text are of whole pixels
        assert all(span.x0 - 1 < extent.x0 and extent.x1 < span.x1 + 1 for extent, _ in labels)


def test_boxes_of_copies_in_flight_together_have_places_of_their_own() -> None:
    figure = figure_of(play("b200", 128, "full"))
    for axes in figure.axes:
        boxes = [p.get_extents() for c in axes.collections for p in c.get_paths()]
        for one, other in combinations(boxes, 2):
            wide = min(one.x1, other.x1) - max(one.x0, other.x0)
            tall = min(one.y1, other.y1) - max(one.y0, other.y0)
            assert wide <= 1e-6 or tall <= 1e-6


def test_legend_says_what_pale_boxes_are() -> None:
    (legend,) = figure_of(play("h200", 128, "full")).legends
    words = [text.get_text() for text in legend.get_texts()]
    assert "full: even K/V tile" in words
    assert any(word.startswith("pale: odd K/V tile") for word in words)
    assert {"tensor cores", "exponentials", "on the critical cycle"} <= set(words)


def test_products_on_the_tensor_cores_are_named() -> None:
    said = {
        text.split(" ·")[0]
        for labels in labels_of(figure_of(play("b200", 128, "full")))
        for _, text in labels
    }
    assert {"qk0", "qk1", "pv0 first", "pv1 first", "load_k", "load_v", "row_max"} <= said


def test_start_period_and_end_are_shown_at_one_scale() -> None:
    played = play("h200", 128, "full")
    shown = stretches(played)
    assert [stretch.title for stretch in shown] == ["start", "steady state", "end of the tile"]
    assert shown[0].begin == 0
    assert shown[-1].end == max(played.tile_ends)
    assert played.window is not None
    assert shown[1].begin < played.window[0] < played.window[1] < shown[1].end
    figure = figure_of(played)
    scales = [
        axes.get_window_extent().width / (s.end - s.begin) for axes, s in zip(figure.axes, shown, strict=True)
    ]
    assert max(scales) == pytest.approx(min(scales), rel=0.02)


def test_stretches_that_meet_become_one() -> None:
    for trips in (1, 6, 8):
        shown = stretches(play("h200", 128, "full", trips=trips))
        assert all(a.end < b.begin for a, b in pairwise(shown))
        assert shown[0].begin == 0
    assert len(stretches(play("h200", 128, "full", trips=1))) == 1
    assert stretches(play("h200", 128, "full", tiles=2))[-1].title == "end of the last tile"


@pytest.mark.parametrize(("ending", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_picture_is_written(tmp_path: Path, ending: str, magic: bytes) -> None:
    path = tmp_path / f"pipeline.{ending}"
    draw(play("h200", 64, "causal", trips=2), path)
    assert path.read_bytes().startswith(magic)
