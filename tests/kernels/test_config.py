from __future__ import annotations

import pytest

from fa4tune.errors import ConfigError
from fa4tune.kernels.config import (
    CONFIGS,
    KernelConfig,
    SM90ForwardConfig,
    SM100ForwardConfig,
    default_config,
)
from fa4tune.problem import AttentionProblem

CLASSES = (SM90ForwardConfig, SM100ForwardConfig)


@pytest.mark.parametrize("kind", CLASSES)
def test_text_and_dict_round_trip(kind: type[KernelConfig]) -> None:
    config = kind()
    assert kind.from_dict(config.as_dict()) == config
    assert kind().with_text(str(config)) == config


@pytest.mark.parametrize("kind", CLASSES)
def test_every_choice_of_every_knob_is_valid_and_survives_text(kind: type[KernelConfig]) -> None:
    for name in kind.knobs():
        for value in kind.choices(name):
            config = kind().replace(**{name: value})
            assert kind().with_text(str(config)) == config


def test_registers_follow_the_tile_unless_given() -> None:
    base = SM90ForwardConfig()
    assert base.with_text("tile_m=192").registers != base.registers
    assert base.with_text("tile_m=192,registers=152/40").registers == (152, 40)


@pytest.mark.parametrize("tile_m", [64, 128, 192, 256])
@pytest.mark.parametrize("ctas", [1, 2])
def test_default_registers_fit_what_the_launch_allocates(tile_m: int, ctas: int) -> None:
    config = SM90ForwardConfig(tile_m=tile_m, ctas_per_sm=ctas)
    mma, producer = config.registers
    assert mma * config.warpgroups + producer <= config.launch_registers * (config.warpgroups + 1)
    assert config.launch_registers * config.threads * ctas <= 65536


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tile_m=100", "tile_m=100 is out of range"),
        ("tile_n=17", "tile_n=17 is out of range"),
        ("exp2_share=0.1", "exp2_share=0.1 is out of range; use a multiple of 0.0625"),
        ("registers=240", "registers=240 is out of range; give one count a role"),
        ("registers=241/24", "multiples of 8"),
        ("speed=9", "knob 'speed' does not exist"),
        ("tile_m", "not key=value"),
        ("kv_stages=two", "kv_stages='two' cannot be read"),
        ("scheduler=random", "scheduler=random is out of range"),
    ],
)
def test_bad_knob_gives_one_sentence(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SM90ForwardConfig().with_text(text)


def test_default_of_every_architecture_and_class_exists() -> None:
    for arch in CONFIGS:
        for dims in ("d64_dv64", "d96_dv96", "d128_dv128", "d192_dv128"):
            for mask in ("full", "causal"):
                problem = AttentionProblem.parse(f"b1_hq8_hk2_sq1000_sk1000_{dims}_bf16_{mask}_fwd")
                assert isinstance(default_config(problem, arch), CONFIGS[arch])


def test_defaults_of_blackwell_are_the_published_ones() -> None:
    dense = default_config(
        AttentionProblem.parse("b1_hq8_hk8_sq4096_sk4096_d128_dv128_bf16_full_fwd"), "sm_100a"
    )
    causal = default_config(
        AttentionProblem.parse("b1_hq8_hk8_sq4096_sk4096_d128_dv128_bf16_causal_fwd"), "sm_100a"
    )
    assert isinstance(dense, SM100ForwardConfig)
    assert isinstance(causal, SM100ForwardConfig)
    assert (dense.cta_group, dense.exp2_share, dense.registers[:2]) == (2, 0.1875, (184, 80))
    assert (causal.cta_group, causal.exp2_share, causal.registers[:2]) == (1, 0.125, (192, 72))
    assert dense.rescale_threshold == causal.rescale_threshold == 8.0


def test_unknown_architecture_is_refused() -> None:
    with pytest.raises(ConfigError, match="no forward kernel exists for 'sm_80'"):
        default_config(AttentionProblem.parse("b1_hq1_hk1_sq1_sk1_d64_dv64_bf16_full_fwd"), "sm_80")
