"""GGUF files become Hugging Face folders with the same weights: every readable type, and clear words for the rest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file

from engine.models.config import read_config
from engine.models.errors import ModelError
from engine.models.gguf import convert_gguf
from engine.models.resolve import resolve_model
from engine.models.tokenizer import Tokenizer
from tests.conftest import TINY, write_tiny_model

HEADS, KV_HEADS, LAYERS = TINY["num_attention_heads"], TINY["num_key_value_heads"], TINY["num_hidden_layers"]
NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    write_tiny_model(folder)
    return folder


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a q or k projection as llama.cpp keeps them: the two halves of each head in turns."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(source: Path, file: Path, kind: Kind = Kind.F32, architecture: str = "llama", **changed: Any) -> Path:
    """The tiny model as llama.cpp's converter writes it: matrices in `kind`, norms in F32."""
    weights = {n: t.float().numpy() for n, t in load_file(source / "model.safetensors").items()}
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(TINY["hidden_size"])
    if not changed.get("no_ffn"):
        writer.add_feed_forward_length(TINY["intermediate_size"])
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_context_length(TINY["max_position_embeddings"])
    writer.add_layer_norm_rms_eps(TINY["rms_norm_eps"])
    writer.add_rope_freq_base(TINY["rope_theta"])
    writer.add_tokenizer_model(changed.get("tokenizer", "gpt2"))
    tokens = [*gguf_alphabet(), *(f"<t{i}>" for i in range(TINY["vocab_size"] - 256))]
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3] * (TINY["vocab_size"] - 256))
    writer.add_token_merges(changed.get("merges", []))
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    named = {f"{n}.weight": weights[f"{hf}.weight"] for n, hf in TOP.items()}
    for i in range(LAYERS):
        for name, hf in NAMES.items():
            value = weights[f"model.layers.{i}.{hf}.weight"]
            if name in ("attn_q", "attn_k"):
                value = interleaved(value, HEADS if name == "attn_q" else KV_HEADS)
            named[f"blk.{i}.{name}.weight"] = value
    for name, value in named.items():
        used = kind if value.ndim == 2 else Kind.F32
        writer.add_tensor(name, gguf.quants.quantize(value, used), raw_dtype=used)
    for name in changed.get("more", ()):
        writer.add_tensor(name, np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def gguf_alphabet() -> list[str]:
    from engine.models.tokenizer import BYTE_OF

    return list(BYTE_OF)


# The step between two values of a block of 32, as a share of its largest value: each type's rounding is half of it, and
# bfloat16 keeps 8 bits of what is left.
STEPS = {Kind.F32: 0.0, Kind.F16: 2**-10, Kind.BF16: 2**-8, Kind.Q8_0: 1 / 127, Kind.Q4_0: 1 / 8, Kind.Q4_1: 2 / 15}


@pytest.mark.parametrize("kind", STEPS, ids=lambda kind: kind.name)
def test_every_readable_type_gives_the_weights_back(source: Path, tmp_path: Path, kind: Kind) -> None:
    out = convert_gguf(write_gguf(source, tmp_path / "model.gguf", kind), tmp_path / "out")
    expected, found = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        blocks = value.reshape(-1, 32) if value.dim() == 2 else value.reshape(-1, 1)
        largest = blocks.abs().amax(1, keepdim=True)
        allowed = (STEPS[kind] * 0.51 if value.dim() == 2 else 0.0) * largest + 2**-8 * largest
        if kind is Kind.Q4_0:  # sixteen values from -8 to 7: the positive end of a block may fall one step short
            allowed = allowed + largest / 8
        error = (found[name].float().reshape(blocks.shape) - blocks).abs()
        assert bool((error <= allowed).all()), (name, float((error / largest).max()))
    config = read_config(out)
    assert (config.num_attention_heads, config.num_key_value_heads, config.tie_word_embeddings) == (
        HEADS,
        KV_HEADS,
        True,
    )
    assert (config.bos_token_id, config.eos_token_ids) == (256, (257,))


def test_rows_that_stay_interleaved_would_be_seen(source: Path, tmp_path: Path) -> None:
    """The comparison above catches q and k left in llama.cpp's order."""
    found = load_file(convert_gguf(write_gguf(source, tmp_path / "m.gguf"), tmp_path / "out") / "model.safetensors")
    q = found["model.layers.0.self_attn.q_proj.weight"].float()
    assert not np.allclose(interleaved(q.numpy(), HEADS), q.numpy(), atol=0.05)


def test_transformers_reads_the_same_weights(source: Path, tmp_path: Path) -> None:
    """A reader that is not ours."""
    from transformers import LlamaForCausalLM

    file = write_gguf(source, tmp_path / "model.gguf", Kind.Q8_0)
    theirs = LlamaForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, torch_dtype=torch.float32).state_dict()
    for name, value in load_file(convert_gguf(file, tmp_path / "out") / "model.safetensors").items():
        torch.testing.assert_close(value, theirs[name].bfloat16(), rtol=0, atol=0)


def test_the_tokenizer_comes_along(source: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer(convert_gguf(write_gguf(source, tmp_path / "m.gguf"), tmp_path / "out"))
    ids = tokenizer.encode("Zürich 12 🙂")
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == "Zürich 12 🙂"
    assert tokenizer.eos_ids == (257,) and tokenizer.chat([{"role": "user", "content": "hi"}]) == "hi"


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:2000])


def garble(file: Path) -> None:
    file.write_bytes(b"not a model" * 100)


@pytest.mark.parametrize("damage", [cut, garble])
def test_a_damaged_file_is_named(source: Path, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    file = write_gguf(source, tmp_path / "model.gguf")
    damage(file)
    with pytest.raises(ModelError) as caught:
        resolve_model(str(file), tmp_path / "data")
    assert caught.value.code == "gguf_damaged" and str(file) in caught.value.message


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "another architecture": ({"architecture": "mamba"}, "unknown_architecture", "mamba"),
    "a type that is not read": ({"kind": Kind.Q5_0}, "wrong_dtype", "Q5_0"),
    "a tokenizer that is not read": ({"tokenizer": "bert"}, "unsupported_field", "bert"),
    "its own rotary factors": ({"more": ["rope_freqs.weight"]}, "unsupported_field", "rope_freqs"),
    "a tensor of another design": ({"more": ["blk.0.ffn_gate_exps.weight"]}, "unsupported_field", "ffn_gate_exps"),
    "a field missing": ({"no_ffn": True}, "gguf_damaged", "llama.feed_forward_length"),
    "merges of tokens that are not there": ({"merges": ["a b"]}, "tokenizer_damaged", "ab"),
}


@pytest.mark.parametrize(("changes", "code", "named"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_read_is_refused_and_leaves_nothing(
    source: Path, tmp_path: Path, changes: dict[str, Any], code: str, named: str
) -> None:
    file = write_gguf(source, tmp_path / "model.gguf", **changes)
    with pytest.raises(ModelError) as caught:
        resolve_model(str(file), tmp_path / "data")
    assert caught.value.code == code and named in caught.value.message and caught.value.mend
    assert not list((tmp_path / "data" / "models").glob("*")), "a half-written folder was left"


def test_a_file_is_converted_once_and_again_when_it_changes(source: Path, tmp_path: Path) -> None:
    file = write_gguf(source, tmp_path / "model.gguf")
    first = resolve_model(str(file), tmp_path / "data")
    made = (first / "model.safetensors").stat().st_mtime_ns
    assert resolve_model(str(file), tmp_path / "data") == first
    assert (first / "model.safetensors").stat().st_mtime_ns == made
    write_gguf(source, file, Kind.Q8_0)
    assert resolve_model(str(file), tmp_path / "data") != first
