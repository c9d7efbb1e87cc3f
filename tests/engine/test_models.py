"""Model folders: what is read is right, and what cannot be served is refused with the file, the reason and the mend."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.client import HostClient, HostFailure
from engine.models.config import ModelConfig, parse_config, read_config
from engine.models.errors import ModelError
from engine.models.resolve import resolve_model
from engine.models.rope import inverse_frequencies
from engine.models.tokenizer import ChatError, Tokenizer
from engine.models.weights import load_model, with_layers
from tests.conftest import TINY, write_tiny_model
from tests.damage import (
    change,
    cut_the_weights,
    damage_the_index,
    lose_a_shard,
    lose_a_tensor,
    shard,
    turn_a_tensor,
    whole_numbers,
)

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tiny_model(tmp_path / "model")
    return tmp_path / "model"


# what is read


def test_a_sharded_folder_holds_the_same_weights(folder: Path, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "sharded")
    shard(tmp_path / "sharded")
    one, many = load_model(folder), load_model(tmp_path / "sharded")
    assert one.weights.keys() == many.weights.keys()
    assert all(torch.equal(one.weights[n], many.weights[n]) for n in one.weights)


def test_weights_are_mapped_and_not_copied(folder: Path) -> None:
    """Their storage lies in the file's own mapping."""
    model = load_model(folder)
    address = model.weights["model.layers.0.mlp.up_proj.weight"].data_ptr()
    ranges = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    holds = [r for r in ranges if int(r[0].split("-")[0], 16) <= address < int(r[0].split("-")[1], 16)]
    assert holds and holds[0][-1].endswith("model.safetensors")


def test_another_dtype_is_served_when_asked_for(folder: Path) -> None:
    weights = load_model(folder, "bfloat16").weights
    assert {t.dtype for t in weights.values()} == {torch.bfloat16}


def test_fewer_layers_share_the_weights_and_what_was_repacked(folder: Path) -> None:
    model = load_model(folder)
    model.memo("packed", lambda: object())
    few = with_layers(model, 1)
    assert few.config.num_hidden_layers == 1 and few.weights is model.weights
    assert few.memo("packed", lambda: None) is model.repacked["packed"]
    assert with_layers(model, 0) is model


def test_config_defaults_are_those_of_the_architecture() -> None:
    config = parse_config({**TINY, "num_key_value_heads": None, "eos_token_id": [2, 7]}, "here")
    assert (config.num_key_value_heads, config.head_dim, config.eos_token_ids) == (4, 16, (2, 7))


def test_llama3_rope_is_transformers(folder: Path) -> None:
    """Each frequency equals the one that transformers computes."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    raw = {**TINY, "head_dim": 64, "rope_theta": 500000.0, "max_position_embeddings": 131072, "rope_scaling": LLAMA3}
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**raw), torch.device("cpu"))
    torch.testing.assert_close(inverse_frequencies(parse_config(raw, "here")), theirs, rtol=1e-6, atol=0)


def test_the_demo_is_smollm2(demo_model: Path) -> None:
    config = read_config(demo_model)
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert (config.num_attention_heads, config.num_key_value_heads, config.tie_word_embeddings) == (9, 3, True)


# what is refused

CONFIGS: dict[str, tuple[dict[str, Any], str, str]] = {
    "another architecture": ({"architectures": ["MambaForCausalLM"]}, "unknown_architecture", "MambaForCausalLM"),
    "no architecture": ({"architectures": []}, "unknown_architecture", "missing"),
    "a dtype": ({"torch_dtype": "float8_e4m3fn"}, "wrong_dtype", "float8_e4m3fn"),
    "an activation": ({"hidden_act": "gelu"}, "unsupported_field", "hidden_act"),
    "quantized": ({"quantization_config": {"bits": 4}}, "unsupported_field", "quantization_config"),
    "a window": ({"sliding_window": 128}, "unsupported_field", "sliding_window"),
    "a rope": ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "unsupported_field", "longrope"),
    "no layers": ({"num_hidden_layers": 0}, "config_invalid", "num_hidden_layers"),
    "a size in words": ({"hidden_size": "64"}, "config_invalid", "hidden_size"),
    "a size that is true": ({"vocab_size": True}, "config_invalid", "vocab_size"),
    "heads that do not divide": ({"num_key_value_heads": 3}, "config_invalid", "3 KV heads"),
}


@pytest.mark.parametrize(("fields", "code", "named"), CONFIGS.values(), ids=CONFIGS)
def test_a_config_is_refused_by_name(folder: Path, fields: dict[str, Any], code: str, named: str) -> None:
    change(folder, **fields)
    with pytest.raises(ModelError) as caught:
        read_config(folder)
    assert caught.value.code == code
    assert named in caught.value.message and str(folder / "config.json") in caught.value.message


FAULTS: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "a missing shard": (lose_a_shard, "missing_shard", "model-00002-of-00002.safetensors"),
    "a damaged index": (damage_the_index, "index_damaged", "index.json"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "missing_weights", "model.safetensors"),
    "weights cut short": (cut_the_weights, "weights_damaged", "model.safetensors"),
    "a missing tensor": (lose_a_tensor, "missing_tensor", "model.layers.1.mlp.up_proj.weight"),
    "a wrong shape": (turn_a_tensor, "wrong_shape", "model.norm.weight is (7,)"),
    "a wrong dtype": (whole_numbers, "wrong_dtype", "I8"),
    "a config that is not JSON": (lambda f: (f / "config.json").write_text("{"), "config_damaged", "config.json"),
    "a config that is a list": (lambda f: (f / "config.json").write_text("[]"), "config_damaged", "JSON object"),
    "no config": (lambda f: (f / "config.json").unlink(), "model_not_found", "config.json"),
}


@pytest.mark.parametrize(("break_it", "code", "named"), FAULTS.values(), ids=FAULTS)
def test_a_damaged_folder_is_refused_by_name(
    folder: Path, break_it: Callable[[Path], None], code: str, named: str
) -> None:
    break_it(folder)
    with pytest.raises(ModelError) as caught:
        load_model(folder)
    assert caught.value.code == code
    assert named in caught.value.message


def test_a_host_says_what_is_wrong_with_a_model(folder: Path) -> None:
    """The reason crosses the process boundary, with its code and its mend."""
    lose_a_shard(folder)
    with pytest.raises(HostFailure) as caught, HostClient(folder, threads=1):
        pass
    assert caught.value.code == "missing_shard" and "Copy the file again." in str(caught.value)


def test_a_dtype_that_is_not_served(folder: Path) -> None:
    with pytest.raises(ModelError, match="int8"):
        load_model(folder, "int8")


@pytest.mark.parametrize("ref", ["/no/such/folder", "nothing", "x" * 5000, "~nobody-of-that-name/model", ""])
def test_what_is_no_model_is_said_so(ref: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError) as caught:
        resolve_model(ref, tmp_path)
    assert caught.value.code == "model_not_found" and "demo" in caught.value.mend


# the tokenizer


@pytest.mark.parametrize("text", ["plain words", "  two  spaces\n\ttab", "Zürich – 東京 🙂", "", "<|start|>user"])
def test_text_round_trips(folder: Path, text: str) -> None:
    tokenizer = Tokenizer(folder)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special=False) == text
    known = [i for i in ids if tokenizer.token_bytes(i)]  # special tokens add no text
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == tokenizer.decode(known, skip_special=False)


def test_the_demo_tokenizer_and_template_are_transformers(demo_model: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = Tokenizer(demo_model), AutoTokenizer.from_pretrained(demo_model)
    messages = [{"role": "user", "content": "How tall is 8,849 m?"}]
    for text in ("The capital of France is", "x = 12345\n\n  y", "Zürich 東京 🙂"):
        assert ours.encode(text) == theirs(text, add_special_tokens=False).input_ids
    assert ours.chat(messages) == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def template(folder: Path, text: str) -> Tokenizer:
    (folder / "chat_template.jinja").write_text(text)
    return Tokenizer(folder)


HOSTILE = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.append(1) }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
)


@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_template_is_refused(folder: Path, text: str) -> None:
    """A template is a program from a stranger: it reaches no attribute of Python's and changes nothing."""
    with pytest.raises(ChatError):
        template(folder, text).chat([{"role": "user", "content": "hi"}])


def test_a_template_may_refuse_messages(folder: Path) -> None:
    with pytest.raises(ChatError, match="only users speak"):
        template(folder, "{{ raise_exception('only users speak') }}").chat([{"role": "system", "content": "hi"}])


def test_a_model_without_a_template_says_what_to_use(folder: Path) -> None:
    tokenizer = template(folder, "")
    assert not tokenizer.has_chat
    with pytest.raises(ChatError, match="/v1/completions"):
        tokenizer.chat([])


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_tokenizer_is_named(folder: Path, name: str) -> None:
    (folder / name).write_text("{")
    with pytest.raises(ModelError) as caught:
        Tokenizer(folder)
    assert caught.value.code == "tokenizer_damaged" and name in caught.value.message


def test_the_config_is_frozen(folder: Path) -> None:
    config: ModelConfig = read_config(folder)
    with pytest.raises(AttributeError):
        config.vocab_size = 1  # type: ignore[misc]
