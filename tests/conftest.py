"""Fixtures every part shares: the demo model and a tiny random Llama that every host can load in a moment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import paths

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "float32",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": 512,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CHAT_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    return paths.demo_model()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A 2-layer random float32 Llama with a byte-level tokenizer of its own."""
    folder = tmp_path_factory.mktemp("tiny") / "tiny"
    write_tiny_model(folder)
    return folder


def write_tiny_model(folder: Path, seed: int = 0, **changes: object) -> None:
    """Writes a tiny random Llama to `folder`; `changes` replace fields of its config."""
    import torch
    from safetensors.torch import save_file

    config = {**TINY, **changes}
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * (0.5 / shape[-1] ** 0.5 if len(shape) > 1 else 0.1) + (
            0 if len(shape) > 1 else 1
        )

    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    head_dim = hidden // config["num_attention_heads"]
    kv = config["num_key_value_heads"] * head_dim
    tensors = {
        "model.embed_tokens.weight": random(config["vocab_size"], hidden) * 4,
        "model.norm.weight": random(hidden),
    }
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = random(config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes = {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (ffn, hidden),
            "mlp.up_proj": (ffn, hidden),
            "mlp.down_proj": (hidden, ffn),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        tensors |= {
            f"{layer}.{name}.weight": random(*shape) * (2 if len(shape) > 1 else 1) for name, shape in shapes.items()
        }
        if config.get("attention_bias"):
            biased = {name: shape[:1] for name, shape in shapes.items() if name.startswith("self_attn")}
            tensors |= {f"{layer}.{name}.bias": random(*shape) - 1 for name, shape in biased.items()}
    dtype = getattr(torch, str(config["torch_dtype"]))
    save_file(
        {k: v.to(dtype).contiguous() for k, v in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    (folder / "config.json").write_text(json.dumps(config))
    write_tiny_tokenizer(folder, config["vocab_size"])


def write_tiny_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level BPE trained on a few sentences, padded to `vocab_size` entries, so that any text round-trips."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tok.decoder = decoders.ByteLevel()
    special = ["<unk>", "<s>", "</s>", "<|start|>", "<|end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tok.train_from_iterator([__doc__ or "", CHAT_TEMPLATE, "the quick brown fox jumps over the lazy dog " * 3], trainer)
    while tok.get_vocab_size() < vocab_size:
        tok.add_tokens([AddedToken(f"<extra_{tok.get_vocab_size()}>", normalized=False)])
    tok.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "eos_token": "</s>",
                "chat_template": CHAT_TEMPLATE,
            }
        )
    )
