from __future__ import annotations

from pathlib import Path

import pytest

from fa4tune.errors import HardwareError
from fa4tune.hardware.gpu import ARCHITECTURES, choose_gpu, gpu_names, load_gpu


@pytest.mark.parametrize("name", gpu_names())
def test_every_number_of_a_known_gpu_has_a_source(name: str) -> None:
    gpu = load_gpu(name)
    numbers = {
        field
        for field in gpu.__dataclass_fields__
        if field not in ("name", "title", "arch", "memory_class", "sources")
    }
    assert numbers == set(gpu.sources)
    assert all(source.strip() for source in gpu.sources.values())


def test_b200_peak_is_the_published_one() -> None:
    # 8192 * 148 * 1.85e9 (FlashAttention-4, section 2.2)
    assert load_gpu("b200").peak_tflops == pytest.approx(2243.0, abs=0.05)


def test_keys_do_not_depend_on_the_name(tmp_path: Path) -> None:
    renamed = tmp_path / "mine.toml"
    renamed.write_text('base = "h200"\nname = "mine"\ntitle = "Mine"\n')
    assert load_gpu(str(renamed)).key == load_gpu("h200").key != load_gpu("h100").key


def test_a_file_is_called_by_its_own_name_or_the_files(tmp_path: Path) -> None:
    texts = {
        "mine": 'base = "b200"\n',
        "named": 'base = "b200"\nname = "faster"\n',
        "titled": 'base = "b200"\ntitle = "A GPU"\n',
        "chained": 'base = "mine.toml"\n',
    }
    for stem, text in texts.items():
        (tmp_path / f"{stem}.toml").write_text(text)
    found = {stem: load_gpu(str(tmp_path / f"{stem}.toml")) for stem in texts}
    assert [gpu.name for gpu in found.values()] == ["mine", "faster", "titled", "chained"]
    assert [gpu.title for gpu in found.values()] == [
        "mine (from b200)", "faster (from b200)", "A GPU", "chained (from mine)",
    ]  # fmt: skip
    assert load_gpu("h200").name == load_gpu("h200", fitted=False).name == "h200"


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "gpu.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(HardwareError, match="cannot be read"):
        load_gpu(str(path))


def test_scaling_multiplies_only_the_named_rates() -> None:
    gpu = load_gpu("b200")
    faster = gpu.scaled(exp=2, hbm=1.5)
    assert faster.exp_per_clk == 2 * gpu.exp_per_clk
    assert faster.hbm_gbytes_per_s == 1.5 * gpu.hbm_gbytes_per_s
    assert faster.mma_flops_per_clk == gpu.mma_flops_per_clk
    assert gpu.scaled() is gpu


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_arch_alone_picks_its_gpu(arch: str) -> None:
    assert choose_gpu(None, arch).arch == arch


@pytest.mark.parametrize(
    ("gpu", "arch", "words"),
    [
        ("rtx5090", None, "GPU 'rtx5090' is not known; use one of"),
        (None, "sm_80", "arch 'sm_80' is not known"),
        ("b200", "sm_90a", "--gpu b200 is sm_100a but --arch says sm_90a"),
        ("missing.toml", None, "'missing.toml' does not exist"),
    ],
)
def test_bad_choice_gives_one_sentence(gpu: str | None, arch: str | None, words: str) -> None:
    with pytest.raises(HardwareError, match=words):
        choose_gpu(gpu, arch)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name = 'x'\n", "lacks title"),
        ('base = "h200"\n[exp_per_clk]\nvalue = 32\n', "needs a table with value and source"),
        ('base = "h200"\n[exp_per_clk]\nvalue = -1\nsource = "x"\n', "above 0, got -1"),
        ('base = "h200"\n[exp_per_clk]\nvalue = 0\nsource = "x"\n', "above 0, got 0"),
        ('base = "h200"\n[launch_us]\nvalue = nan\nsource = "x"\n', "at least 0, got nan"),
        ('base = "b200"\n[tmem_load_bytes_per_clk]\nvalue = 0\nsource = "x"\n', "with tmem_columns=512"),
        ('base = "gpu.toml"\n', "its base leads back to itself"),
        ('base = "h200"\n[speed]\nvalue = 1\nsource = "x"\n', "'speed' is not a field"),
        ("not toml", "is not TOML"),
    ],
)
def test_malformed_file_names_the_fault(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "gpu.toml"
    path.write_text(text)
    with pytest.raises(HardwareError, match=words):
        load_gpu(str(path))
