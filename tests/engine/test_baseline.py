"""The baseline forward pass beside transformers on the same weights: the same greedy tokens in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.artifacts import Artifact
from engine.batching import SeqStep, make_batch
from engine.host import to_batch
from engine.loader import load_forward, make_pool
from engine.models.tokenizer import Tokenizer
from engine.models.weights import load_model
from tests.conftest import write_tiny_model

VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {},
    "its own head": {"tie_word_embeddings": False},
    "one KV head": {"num_key_value_heads": 1},
    "as many KV heads as heads": {"num_key_value_heads": 4},
    "biased attention": {"attention_bias": True},
    "linear rope": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama3 rope": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
}
PROMPT = [(i * i * 7 + 13 * i) % 500 + 3 for i in range(40)]


class Ours:
    """The baseline, one sequence, its blocks scattered over the pool."""

    def __init__(self, folder: Path, baseline: Artifact) -> None:
        model = load_model(folder, "float32")
        self.forward = load_forward(baseline.path, baseline.hash, model, threads=1)
        self.pool = make_pool(self.forward, 1 << 26, "tests")
        self.table = [(7 * i + 3) % len(self.pool.tensors[0]) for i in range(8)]
        assert len(set(self.table)) == len(self.table)

    @torch.inference_mode()
    def logits(self, tokens: list[int], start: int, every_row: bool = False) -> torch.Tensor:
        step = SeqStep(1, tokens, start, self.table, all_logits=every_row)
        result: torch.Tensor = self.forward(to_batch(make_batch([step], self.pool.block_size)), self.pool)
        return result

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        tokens = [int(self.logits(prompt, 0)[-1].argmax())]
        while len(tokens) < count:
            tokens.append(int(self.logits(tokens[-1:], len(prompt) + len(tokens) - 1)[-1].argmax()))
        return tokens


def theirs(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32, attn_implementation="eager").eval()


def their_greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False,
            pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
    return list(out[0, len(prompt) :].tolist())


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_every_variant_gives_transformers_tokens_and_logits(
    changes: dict[str, Any], tmp_path: Path, baseline: Artifact
) -> None:
    write_tiny_model(tmp_path, **changes)
    ours, reference = Ours(tmp_path, baseline), theirs(tmp_path)
    assert ours.greedy(PROMPT, 24) == their_greedy(reference, PROMPT, 24)
    with torch.inference_mode():
        expected = reference(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(ours.logits(PROMPT, 0, every_row=True), expected, rtol=1e-4, atol=1e-4)


def test_the_demo_model_gives_transformers_tokens(demo_model: Path, baseline: Artifact) -> None:
    ours, reference, tokenizer = Ours(demo_model, baseline), theirs(demo_model), Tokenizer(demo_model)
    for text in ("The capital of France is", "def fibonacci(n):\n", "1, 2, 3, 5, 8, 13,"):
        prompt = tokenizer.encode(text)
        assert ours.greedy(prompt, 24) == their_greedy(reference, prompt, 24), text


def test_a_wrong_rope_base_would_be_seen(tmp_path: Path, baseline: Artifact) -> None:
    """The comparison above can fail: one changed number of the config changes the tokens."""
    write_tiny_model(tmp_path / "right")
    write_tiny_model(tmp_path / "wrong", rope_theta=100.0)
    assert Ours(tmp_path / "wrong", baseline).greedy(PROMPT, 24) != their_greedy(theirs(tmp_path / "right"), PROMPT, 24)


def test_a_prompt_in_chunks_gives_the_logits_of_the_whole(tmp_path: Path, baseline: Artifact) -> None:
    write_tiny_model(tmp_path)
    whole = Ours(tmp_path, baseline).logits(PROMPT, 0)
    parts = Ours(tmp_path, baseline)
    for start in range(0, len(PROMPT), 7):
        last = parts.logits(PROMPT[start : start + 7], start)
    torch.testing.assert_close(last, whole, rtol=1e-4, atol=1e-4)
