"""Sizes worked out from published configs against the parameter counts that the makers state, and the engine's own layout."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.models.config import Experts, LatentAttention, ModelConfig
from engine.models.layout import expected_shapes
from optimizer.cost.architecture import of_config, published
from optimizer.cost.roofline import step_bytes

# total and active parameters in 1e9, as model cards round them
STATED = {
    "Llama-3.1-8B": (8.0, 8.0),
    "Llama-3.1-70B": (70.6, 70.6),
    "Qwen3-32B": (32.8, 32.8),
    "Qwen3-235B-A22B": (235, 22),
    "Qwen3.5-397B-A17B": (397, 17),
    "gpt-oss-120b": (117, 5.1),
    "MiniMax-M2.5": (229, 10),
    "DeepSeek-V3": (671, 37),
    "Kimi-K2.5": (1000, 32),
    "GLM-5": (744, 40),
}


@pytest.mark.parametrize("name", STATED)
def test_sizes_add_up_to_what_the_maker_states(name: str) -> None:
    total, active = STATED[name]
    found = published()[name]
    assert found.all_numbers / 1e9 == pytest.approx(total, rel=0.04)
    assert found.active_numbers / 1e9 == pytest.approx(active, rel=0.16), "makers count embeddings or not"
    assert found.source.startswith("https://")


def test_every_published_architecture_is_checked() -> None:
    assert set(published()) == set(STATED)


def test_keys_and_values_of_a_token() -> None:
    assert published()["Llama-3.1-70B"].kv_numbers == 80 * 2 * 8 * 128
    assert published()["DeepSeek-V3"].kv_numbers == 61 * 576
    assert published()["Qwen3.5-397B-A17B"].kv_numbers == 15 * 2 * 2 * 256, "one layer of four keeps keys"


def test_windows_and_sparse_attention_see_less() -> None:
    assert published()["Llama-3.1-8B"].seen(5000) == 5000
    assert published()["gpt-oss-120b"].seen(5000) == (5000 + 128) / 2
    assert published()["GLM-5"].seen(5000) == 2048 and published()["GLM-5"].seen(100) == 100


def test_experts_that_tokens_touch() -> None:
    found = published()["Qwen3-235B-A22B"]
    assert found.experts_touched(1) == pytest.approx(8)
    assert found.experts_touched(2) == pytest.approx(16 - 8 * 8 / 128)
    assert found.experts_touched(1e4) == pytest.approx(128)
    assert published()["Llama-3.1-8B"].experts_touched(64) == 0


def test_the_engines_own_models_count_the_same(tiny_config: ModelConfig) -> None:
    found = of_config(tiny_config)
    assert 2 * found.active_numbers == step_bytes(tiny_config, "bfloat16")
    assert found.kv_numbers == tiny_config.kv_width * tiny_config.num_hidden_layers


@pytest.mark.parametrize("queries", [20, 0])
def test_latent_attention_and_experts_count_what_the_engine_loads(tiny_config: ModelConfig, queries: int) -> None:
    experts = Experts(8, 3, intermediate_size=32, layers=(1,), normalise=True, shared_size=48)
    latent = LatentAttention(24, queries, nope_dim=16, rope_dim=8, value_dim=12, interleaved=True)
    config = replace(tiny_config, experts=experts, latent=latent, head_dim=8, tie_word_embeddings=False)
    matrices = {name: shape for name, shape in expected_shapes(config).items() if len(shape) == 2}
    router = experts.count * config.hidden_size
    assert of_config(config).all_numbers == sum(a * b for a, b in matrices.values()) - router
    assert of_config(config).kv_numbers == config.kv_width * config.num_hidden_layers
