"""The fields of a config.json, read by name. What nobody read and is not known to be harmless is refused by name."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NoReturn

from engine.models.errors import ModelError

# Fields that change no value of a forward pass in float32 or bfloat16: bookkeeping, training, text generation defaults.
HARMLESS = frozenset({
    "architectures", "model_type", "transformers_version", "transformers.js_config", "_name_or_path",
    "name_or_path", "auto_map", "_attn_implementation_autoset", "_attn_implementation", "attn_implementation",
    "use_cache", "torch_dtype", "dtype", "use_bfloat16", "initializer_range", "attention_dropout", "hidden_dropout",
    "embd_pdrop", "resid_pdrop", "dropout", "classifier_dropout", "pad_token_id", "unk_token_id", "sep_token_id",
    "decoder_start_token_id", "bos_token_id", "eos_token_id", "is_llama_config", "tokenizer_class", "prefix",
    "id2label", "label2id", "problem_type", "task_specific_params", "finetuning_task", "return_dict",
    "output_hidden_states", "output_attentions", "output_scores", "return_dict_in_generate", "torchscript",
    "is_decoder", "chunk_size_feed_forward", "router_aux_loss_coef", "output_router_logits", "router_jitter_noise",
    "aux_loss_alpha", "seq_aux", "ep_size", "num_nextn_predict_layers", "max_length", "min_length", "do_sample",
    "early_stopping", "num_beams", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty",
    "length_penalty", "num_return_sequences", "unsloth_version", "unsloth_fixed",
})  # fmt: skip


class Fields:
    """`raw` with the names that were read. `where` stands in every error: the file, or the file and a field of it."""

    def __init__(self, raw: dict[str, Any], where: str) -> None:
        self.raw, self.where, self.read = raw, where, set[str]()

    def get(self, name: str, default: Any = None) -> Any:
        """The field's value, `default` where it is missing or null."""
        self.read.add(name)
        value = self.raw.get(name)
        return default if value is None else value

    def whole(self, name: str, default: int | None = None, least: int = 1) -> int:
        """Raises ModelError for what is not a whole number of at least `least`, a missing field without default too."""
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ModelError(
                "config_invalid", f"{self.where}: {name} must be a whole number of at least {least}, not {value!r}."
            )
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError("config_invalid", f"{self.where}: {name} must be a number, not {value!r}.")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise ModelError("config_invalid", f"{self.where}: {name} must be true or false, not {value!r}.")
        return value

    def only(self, name: str, *allowed: Any) -> None:
        """Refuses the field unless it is missing, null or one of `allowed`."""
        value = self.get(name)
        if value is not None and value not in allowed:
            self.refuse(name, value)

    def given(self, *names: str) -> None:
        """Refuses a config without these: their defaults differ from one family, and one version of it, to the next."""
        for name in names:
            if name not in self.raw:
                raise ModelError(
                    "config_invalid", f"{self.where} lacks the field {name}.", "Save the config with every field."
                )

    def refuse(self, name: str, value: Any) -> NoReturn:
        raise ModelError(
            "unsupported_field", f"{self.where}: {name} = {value!r} is not supported.", "Serve a model without it."
        )

    def refuse_the_rest(self, harmless: Collection[str] = HARMLESS) -> None:
        """Refuses the first field that was not read, is not null and is not `harmless`."""
        for name, value in self.raw.items():
            if name not in self.read and name not in harmless and value is not None:
                self.refuse(name, value)
