"""GGUF files of the Llama family as Hugging Face folders: dequantised once to bfloat16, then mapped like any other model.

    python -m engine.models.gguf FILE OUT_DIR

Names and the q/k row order follow the GGUF specification of llama.cpp (`general.architecture` = llama): q and k rows are
stored interleaved for its rotary form and are put back into halves here.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from engine.models.errors import ModelError

READABLE = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
NEEDED = tuple(
    f"llama.{name}"
    for name in (
        "attention.head_count", "embedding_length", "feed_forward_length", "block_count", "context_length",
        "attention.layer_norm_rms_epsilon",
    )
)  # fmt: skip
NEEDED_TOKENIZER = ("tokenizer.ggml.model", "tokenizer.ggml.tokens")
CONTROL = 3  # tokenizer.ggml.token_type of special tokens


def convert_gguf(file: Path, out_dir: Path) -> Path:
    """Writes `out_dir` (config.json, model.safetensors in bfloat16, tokenizer files) whole or not at all, and returns it.

    Raises ModelError for a damaged file, another architecture or a tensor type that is not read.
    """
    if (out_dir / "config.json").is_file():
        return out_dir
    meta, tensors = _read(file)
    _refuse_gaps(file, meta, tensors)
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".convert-", dir=out_dir.parent))
    try:
        _write_weights(meta, tensors, staging)
        _write_tokenizer(meta, staging)
        (staging / "config.json").write_text(json.dumps(_config(meta, tensors), indent=1))
        os.chmod(staging, 0o755)
        try:
            staging.rename(out_dir)
        except OSError:
            if not (out_dir / "config.json").is_file():  # another process may have finished the same conversion first
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return out_dir


def _read(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    import gguf

    try:
        reader = gguf.GGUFReader(file)
        meta = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {t.name: t for t in reader.tensors}
    except (ValueError, OSError, IndexError, KeyError) as error:
        raise ModelError("gguf_damaged", f"{file} cannot be read as GGUF: {error}.", "Copy the file again.") from error
    if meta.get("general.architecture") != "llama":
        raise ModelError(
            "unknown_architecture",
            f"{file}: architecture {meta.get('general.architecture')!r} is not supported.",
            "Supported: llama.",
        )
    for tensor in tensors.values():
        if tensor.tensor_type.name not in READABLE:
            kind = tensor.tensor_type.name
            raise ModelError(
                "wrong_dtype", f"{file}: {tensor.name} is {kind}.", f"Readable types: {', '.join(READABLE)}."
            )
    return meta, tensors


def _refuse_gaps(file: Path, meta: dict[str, Any], tensors: dict[str, Any]) -> None:
    missing = [name for name in (*NEEDED, *NEEDED_TOKENIZER) if name not in meta]
    if missing:
        raise ModelError("gguf_damaged", f"{file} lacks the field {missing[0]}.", "Convert the model again.")
    known = {f"{part}.weight" for part in LAYER_NAMES} | {f"{part}.bias" for part in LAYER_NAMES}
    for name in tensors:
        if name not in TOP_NAMES and not name.startswith("rope_freqs") and name.split(".", 2)[-1] not in known:
            raise ModelError(
                "unsupported_field", f"{file}: the tensor {name} is not part of a Llama.", "Serve a model without it."
            )


def _unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _name(name: str) -> str:
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}"


def _write_weights(meta: dict[str, Any], tensors: dict[str, Any], out: Path) -> None:
    import torch
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    heads = int(meta["llama.attention.head_count"])
    kv_heads = int(meta.get("llama.attention.head_count_kv", heads))
    state = {}
    for name, tensor in tensors.items():
        if name.startswith("rope_freqs"):
            raise ModelError(
                "unsupported_field", "The GGUF file carries rope_freqs.", "Serve the Hugging Face folder of this model."
            )
        shape = tuple(int(n) for n in tensor.shape)[::-1]
        weight = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32).reshape(shape)
        if ".attn_q." in name or ".attn_k." in name:
            weight = _unpermute(weight, heads if ".attn_q." in name else kv_heads)
        state[_name(name)] = torch.from_numpy(np.require(weight, requirements=["C", "W"])).to(torch.bfloat16)
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})


def _config(meta: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    heads = int(meta["llama.attention.head_count"])
    hidden = int(meta["llama.embedding_length"])
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_size": hidden,
        "intermediate_size": int(meta["llama.feed_forward_length"]),
        "num_hidden_layers": int(meta["llama.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(meta.get("llama.attention.head_count_kv", heads)),
        "head_dim": int(meta.get("llama.rope.dimension_count", hidden // heads)),
        "max_position_embeddings": int(meta["llama.context_length"]),
        "rms_norm_eps": float(meta["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": float(meta.get("llama.rope.freq_base", 10000.0)),
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": "output.weight" not in tensors,
        "hidden_act": "silu",
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": meta.get("tokenizer.ggml.eos_token_id"),
    }
    if meta.get("llama.rope.scaling.type", "none") not in ("none", None):
        config["rope_scaling"] = {
            "rope_type": meta["llama.rope.scaling.type"],
            "factor": meta.get("llama.rope.scaling.factor", 1.0),
        }
    return config


def _write_tokenizer(meta: dict[str, Any], out: Path) -> None:
    """Byte-level BPE from the metadata. `tokenizer.ggml.pre` = smollm splits digits one by one before the byte level."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    if meta.get("tokenizer.ggml.model") != "gpt2":
        kind = meta.get("tokenizer.ggml.model")
        raise ModelError(
            "unsupported_field", f"tokenizer.ggml.model {kind!r} is not supported.", "Put a tokenizer.json in a folder."
        )
    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(m.split(" ")) for m in meta.get("tokenizer.ggml.merges", [])]
    try:
        tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    except Exception as error:  # the library raises bare Exception
        raise ModelError("tokenizer_damaged", f"The GGUF file's tokenizer: {error}.", "Copy the file again.") from error
    if meta.get("tokenizer.ggml.pre", "smollm") in ("smollm", "default"):
        steps = [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    else:  # Llama 3's splitting: words with their leading sign, digits in threes
        pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        steps = [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    kinds = meta.get("tokenizer.ggml.token_type", [])
    tokenizer.add_special_tokens(
        [AddedToken(tokens[i], special=True) for i, kind in enumerate(kinds) if kind == CONTROL]
    )
    tokenizer.save(str(out / "tokenizer.json"))

    def token(key: str) -> str | None:
        index = meta.get(f"tokenizer.ggml.{key}_token_id")
        return None if index is None else tokens[index]

    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "chat_template": meta.get("tokenizer.chat_template", ""),
    }
    (out / "tokenizer_config.json").write_text(json.dumps(described))


def main(arguments: list[str]) -> int:
    try:
        print(convert_gguf(Path(arguments[0]), Path(arguments[1])))
    except ModelError as error:
        print(json.dumps({"code": error.code, "message": error.message, "mend": error.mend}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
