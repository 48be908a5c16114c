"""The IO study: exponents of the traffic, the published plot, and the figure itself."""

from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

from tests.study import load_study

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def study() -> ModuleType:
    return load_study("io_complexity")


def test_slope_recovers_a_power_law(study: ModuleType) -> None:
    assert study.slope([1, 2, 5, 9], [7 * x**-1.5 for x in (1, 2, 5, 9)]) == pytest.approx(-1.5)


def test_traffic_scales_as_theory_says(
    study: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweeps = {sweep.variable: sweep for sweep in study.scaling_sweeps()}
    assert set(sweeps) == {"seqlen", "head_dim", "sram_elements"}
    for sweep in sweeps.values():
        for point in sweep.points:
            assert point.head_dim <= point.sram_elements <= point.seqlen * point.head_dim
        assert sweep.flash_slope == pytest.approx(sweep.expected, abs=0.1)
    assert sweeps["seqlen"].standard_slope == pytest.approx(2.0, abs=0.1)
    assert sweeps["head_dim"].standard_slope == pytest.approx(0.0, abs=0.1)
    assert sweeps["sram_elements"].standard_slope == pytest.approx(0.0, abs=1e-9)
    # The lower order fades: the last doubling of each sweep is nearer to theory than the first.
    for sweep in sweeps.values():
        traffic = [point.flash for point in sweep.points]
        if sweep.expected > 0:
            steps = [later / earlier for earlier, later in pairwise(traffic)]
            assert abs(steps[-1] - 4) < abs(steps[0] - 4)
    # FlashAttention v1 moves less than standard attention exactly where M exceeds about 3 d^2.
    for point in sweeps["sram_elements"].points:
        assert (point.flash < point.standard) == (point.sram_elements > 3 * point.head_dim**2)

    path = tmp_path / "figures" / "traffic.png"
    study.draw(list(sweeps.values()), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    study.print_scaling(list(sweeps.values()))
    assert f"exponent {sweeps['seqlen'].flash_slope:+.3f} (theory +2)" in capsys.readouterr().out


@pytest.mark.parametrize("index", range(4))
def test_block_size_plot_is_reproduced(study: ModuleType, index: int) -> None:
    columns, published = study.BLOCK_COLUMNS[index], study.PUBLISHED_GB[index]
    loop, everything = study.block_size_bytes(columns)
    assert loop == pytest.approx(study.model_bytes(columns), rel=1e-12)
    assert loop == pytest.approx(published, abs=0.15)
    assert loop < everything < loop * 1.2


def test_ledger_gives_the_four_figures_of_the_io_model(study: ModuleType) -> None:
    figures = [f"{study.block_size_bytes(columns)[0]:.2f}" for columns in study.BLOCK_COLUMNS]
    assert figures == ["6.71", "3.49", "1.88", "1.07"]


def test_training_traffic_falls_several_times(study: ModuleType) -> None:
    moved = study.training_bytes(51_200)
    # Eleven passes over N x N, the rest N x d.
    square = 11 * 1024 * 1024 * 2 * 1024 / 1e9
    assert square < moved["standard"] < 1.1 * square
    assert moved["flash"] < moved["standard"] / 3
