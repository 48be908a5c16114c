"""``fa4tune explain`` as people call it: a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import resources
from pathlib import Path

import matplotlib.image
import pytest

from fa4tune.table.store import Table

PROBLEM = "b4_hq16_hk16_sq8192_sk8192_d128_dv128_bf16_causal_fwd"


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fa4tune.cli.main", *arguments], capture_output=True, text=True, timeout=60
    )


def _json(*arguments: str) -> dict:  # type: ignore[type-arg]
    done = _run("explain", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize("gpu", ["h100", "h200", "b200", "b300"])
def test_json_has_the_documented_top_level(gpu: str) -> None:
    answer = _json(PROBLEM, "--gpu", gpu)
    assert {
        "predicted_tflops",
        "predicted_tflops_exact_flops",
        "bound",
        "cycles",
        "budgets",
        "config",
    } <= set(answer)
    assert {"tensor", "smem", "smem_mma_reads", "exp", "fma", "issue", "hbm"} <= set(answer["cycles"])
    assert 0 < answer["share_of_peak"] < 1
    paths = [value for name, value in answer["cycles"].items() if name.startswith("smem_")]
    assert sum(paths) == pytest.approx(answer["cycles"]["smem"])


def test_options_and_string_name_the_same_problem() -> None:
    options = [
        "--batch",
        "4",
        "--seqlen-q",
        "8192",
        "--heads",
        "16",
        "--head-dim",
        "128",
        "--causal",
        "--arch",
        "sm_100a",
    ]
    assert _json(*options) == _json(PROBLEM)


def test_default_config_of_blackwell_is_that_of_flash_attention_4() -> None:
    config = _json(PROBLEM)["config"]
    assert (config["tile_n"], config["q_tiles"], config["cta_group"]) == (128, 2, 1)
    assert (config["exp2_share"], config["exp2_degree"], config["rescale_threshold"]) == (0.125, 3, 8.0)


def test_gpus_and_configs_side_by_side() -> None:
    answer = _json(PROBLEM, "--gpu", "h200", "--gpu", "b200")
    alone = [_json(PROBLEM, "--gpu", gpu) for gpu in ("h200", "b200")]
    for case, single in zip(answer["cases"], alone, strict=True):
        assert case["gpu"] == single["gpu"]
        assert case["predicted_us"] == single["predicted_us"]
    text = _run("explain", PROBLEM, "--gpu", "h200", "--config", "default", "--config", "tile_n=96")
    assert text.returncode == 0, text.stderr
    assert "tile_n=96" in text.stdout
    assert "speed against the first" in text.stdout


def test_files_of_ones_own_have_columns_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    mine, same = tmp_path / "mine.toml", tmp_path / "other" / "mine.toml"
    mine.write_text('base = "b200"\n[exp_per_clk]\nvalue = 32\nsource = "what if"\n')
    same.write_text('base = "b200"\n')
    told = _run("explain", PROBLEM, "--gpu", "b200", "--gpu", str(mine)).stdout
    assert "mine: mine (from b200)" in told
    answer = _json(PROBLEM, "--gpu", "b200", "--gpu", str(mine))
    assert [case["gpu"] for case in answer["cases"]] == ["b200", "mine"]
    told = _run("explain", PROBLEM, "--gpu", str(mine), "--gpu", str(same)).stdout
    assert told.count(f"{mine}: ") == 2  # above the table and in words
    assert told.count(f"{same}: ") == 2


def test_critical_steps_add_up_to_the_period() -> None:
    for gpu in ("h200", "b200"):
        answer = _json(PROBLEM, "--gpu", gpu)
        steps = answer["critical_steps"]
        whole = sum(step["cycles"] for step in steps) / sum(step["tiles"] for step in steps)
        assert whole == pytest.approx(answer["period_cycles"], rel=0.03)
        assert [*dict.fromkeys(step["operation"] for step in steps)] == answer["critical_cycle"]


def test_measured_time_of_the_table_stands_beside_the_prediction(tmp_path: Path) -> None:
    table = Table(tmp_path, fallback=[resources.files("fa4tune.table") / "data"])  # type: ignore[list-item]
    entry = next(
        e for _, e in table.entries() if e.source == "measured" and e.hardware_key.startswith("sm_90a")
    )
    answer = _json(entry.problem, "--gpu", "h200", "--config", "tuned")
    assert answer["config"] == entry.kernel_config().as_dict()
    assert answer["measured_us"] == entry.median_us
    assert answer["error"] == pytest.approx(answer["predicted_us"] / entry.median_us - 1)
    other = _json(entry.problem, "--gpu", "h200", "--config", "tile_n=48,rescale_threshold=3")
    assert other["measured_us"] is None
    assert other["tuned"]["measured_us"] == entry.median_us
    nothing = _run("explain", entry.problem, "--gpu", "b200", "--config", "tuned", "--table", str(tmp_path))
    assert nothing.returncode == 2
    assert "no table has an entry" in nothing.stderr


@pytest.mark.parametrize("gpus", [("h200",), ("h200", "b200", "b300")])
def test_plot(tmp_path: Path, gpus: tuple[str, ...]) -> None:
    path = tmp_path / "bound.png"
    arguments = [word for gpu in gpus for word in ("--gpu", gpu)]
    done = _run("explain", PROBLEM, *arguments, "--plot", str(path))
    assert done.returncode == 0, done.stderr
    picture = matplotlib.image.imread(path)
    assert len({tuple(colour) for colour in picture.reshape(-1, picture.shape[-1])[::7]}) > 10
    refused = _run("explain", PROBLEM, "--plot", str(tmp_path / "bound.bmp"))
    assert refused.returncode == 2
    assert "no picture's name" in refused.stderr


def test_config_changes_the_prediction_and_refusals_name_numbers() -> None:
    base = _json(PROBLEM, "--gpu", "h200")
    small = _json(PROBLEM, "--gpu", "h200", "--config", "tile_m=64,tile_n=64,ping_pong=false")
    assert small["predicted_us"] > base["predicted_us"]
    refused = _run("explain", PROBLEM, "--gpu", "h200", "--config", "tile_n=256,kv_stages=4")
    assert refused.returncode == 2
    assert "cannot run" in refused.stderr
    assert any(character.isdigit() for character in refused.stderr)
    assert len(refused.stderr.strip().splitlines()) == 1


def test_single_query_is_memory_bound() -> None:
    answer = _json("b64_hq32_hk32_sq1_sk8192_d128_dv128_bf16_full_fwd", "--gpu", "h200")
    assert "memory" in answer["bound"] or "hbm" in answer["bound"].lower()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no problem was given"),
        (["b4_hq16"], "'b4_hq16' is not a problem"),
        ([PROBLEM, "--gpu", "rtx9090"], "GPU 'rtx9090' is not known"),
        ([PROBLEM, "--gpu", "h200", "--arch", "sm_100a"], "--gpu h200 is sm_90a but --arch says sm_100a"),
        ([PROBLEM, "--heads", "4"], "both a PROBLEM and --heads were given"),
        (["--batch", "1", "--heads", "8", "--head-dim", "64"], "the problem lacks --seqlen-q"),
        ([PROBLEM, "--config", "speed=1"], "knob 'speed' does not exist"),
        (
            ["--batch", "1", "--seqlen-q", "8", "--heads", "8", "--kv-heads", "3", "--head-dim", "64"],
            "kv_heads=3 does not divide heads=8",
        ),
    ],
)
def test_bad_usage_is_one_sentence_and_status_2(arguments: list[str], words: str) -> None:
    done = _run("explain", *arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("shape", "bound"),
    [
        (("--seqlen-q", "1", "--seqlen-k", "8192", "--kv-heads", "8"), "memory"),
        (("--seqlen-q", "128"), "memory"),
        (
            (
                "--seqlen-q",
                "8192",
            ),
            "compute",
        ),
    ],
)
def test_short_and_single_query_problems_are_memory_bound_whatever_the_kernel(
    shape: tuple[str, ...], bound: str
) -> None:
    common = ("--batch", "32", "--heads", "32", "--head-dim", "128", "--gpu", "h200")
    told = _json(*common, *shape)
    assert told["intensity"]["bound"] == bound
    text = _run("explain", *common, *shape).stdout
    assert ("The problem itself is memory-bound" in text) == (bound == "memory")


def test_explain_imports_neither_torch_nor_the_compiler() -> None:
    code = (
        f"import sys; sys.argv = ['fa4tune', 'explain', {PROBLEM!r}, '--json'];"
        "from fa4tune.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "heavy = {'torch', 'cutlass', 'optuna', 'scipy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_text_for_people_names_bound_budgets_and_changes() -> None:
    done = _run("explain", PROBLEM)
    assert done.returncode == 0
    for words in ("Bound by", "Budgets of a CTA", "What one knob would change", "tensor cores", "TFLOP/s"):
        assert words in done.stdout


def test_model_config_gives_heads_and_causal(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "hidden_size": 4096,
            }
        )
    )
    answer = _json("--model-config", str(path), "--batch", "2", "--seqlen-q", "4096")
    assert answer["problem"] == "b2_hq32_hk8_sq4096_sk4096_d128_dv128_bf16_causal_fwd"
