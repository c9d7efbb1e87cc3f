"""What every model family promises: transformers' values on the same weights, however a request is cut into steps.

A family is a config class of transformers and the fields of a tiny model of it. Its tests subclass `FamilyContract`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.artifacts import ArtifactStore, baseline_files
from engine.batching import SeqStep, make_batch
from engine.contract import LoadedModel
from engine.host import to_batch
from engine.loader import load_forward, make_pool
from engine.models.weights import load_model

TINY: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "initializer_range": 0.3,  # wide enough that tokens differ by more than rounding
}
PROMPT = [(i * i * 7 + 13 * i) % 380 + 3 for i in range(40)]
OTHER = [(i * i * 5 + 11 * i) % 380 + 3 for i in range(23)]
NEW = 28  # tokens generated
MEAN_KL = (
    3e-2  # of bfloat16 logits from float32 ones: a hundredth of what two rows of one model lie apart; 2e-2 were seen
)


def write_family(folder: Path, family: str, fields: dict[str, Any]) -> None:
    """A tiny random model of transformers' `family` (`Qwen3`, `Mixtral`), as its own save_pretrained writes it."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**TINY, **fields})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(1)
    for name, tensor in model.state_dict().items():
        if name.endswith(("bias", "norm.weight", "layernorm.weight")):  # transformers begins with noughts and ones
            tensor.add_(0.3 * torch.randn(tensor.shape, generator=generator))
    model.save_pretrained(folder)


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


def kl(reference: Tensor, other: Tensor) -> float:
    """Mean KL divergence of `other` from `reference`, both logits [rows, vocab]."""
    p, q = reference.double().log_softmax(-1), other.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


class Ours:
    """The family's baseline on a pool whose free slots hold NaN; a sequence's blocks are scattered over it."""

    def __init__(self, folder: Path, artifacts: ArtifactStore, dtype: str = "float32") -> None:
        self.model: LoadedModel = load_model(folder, dtype)
        baseline = artifacts.baseline(self.model.config)
        self.forward = load_forward(baseline.path, baseline.hash, self.model, threads=1)
        self.pool = make_pool(self.forward, 64 * self.forward.allocate(1).bytes_per_block, "tests")
        for tensor in self.pool.tensors:
            tensor.fill_(float("nan"))

    def table(self, sequence: int) -> list[int]:
        return [(7 * (8 * sequence + i) + 3) % 64 for i in range(8)]

    def step(self, *parts: tuple[int, list[int], int], every_row: bool = False) -> Tensor:
        """One engine step of (sequence, tokens, start) each; its logits."""
        steps = [SeqStep(s, tokens, start, self.table(s), all_logits=every_row) for s, tokens, start in parts]
        with torch.inference_mode():
            logits: Tensor = self.forward(to_batch(make_batch(steps, self.pool.block_size)), self.pool)
        return logits

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        tokens = [int(self.step((0, prompt, 0))[-1].argmax())]
        while len(tokens) < count:
            tokens.append(int(self.step((0, tokens[-1:], len(prompt) + len(tokens) - 1))[-1].argmax()))
        return tokens


class FamilyContract:
    """`family` and `fields` say which model; `baseline` which source computes it."""

    family: str
    fields: dict[str, Any] = {}
    baseline: str = "grouped"

    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        path = tmp_path_factory.mktemp(self.family)
        write_family(path, self.family, self.fields)
        return path

    @pytest.fixture(scope="class")
    def reference(self, folder: Path) -> Any:
        return theirs(folder)

    @pytest.fixture(scope="class")
    def logits(self, reference: Any) -> Any:
        """tokens -> their float32 logits, [tokens, vocab]."""

        @cache
        def of(tokens: tuple[int, ...]) -> Tensor:
            with torch.inference_mode():
                found: Tensor = reference(torch.tensor([tokens])).logits[0]
            return found

        return lambda tokens: of(tuple(tokens))

    @pytest.fixture
    def ours(self, folder: Path, artifacts: ArtifactStore) -> Ours:
        return Ours(folder, artifacts)

    def test_its_baseline_is_the_one_that_serves_it(self, ours: Ours, artifacts: ArtifactStore) -> None:
        assert artifacts.baseline(ours.model.config).files() == baseline_files(self.baseline)

    def test_greedy_tokens_are_transformers(self, ours: Ours, reference: Any) -> None:
        assert ours.greedy(PROMPT, NEW) == their_greedy(reference, PROMPT, NEW)

    def test_every_row_of_a_prompt_has_their_logits(self, ours: Ours, logits: Any) -> None:
        torch.testing.assert_close(ours.step((0, PROMPT, 0), every_row=True), logits(PROMPT), rtol=1e-3, atol=1e-3)

    def test_a_prompt_in_chunks_has_their_logits(self, ours: Ours, logits: Any) -> None:
        chunks = [
            ours.step((0, PROMPT[at : at + 7], at), every_row=True) for at in range(0, len(PROMPT), 7)
        ]  # the last chunk: five tokens
        torch.testing.assert_close(torch.cat(chunks), logits(PROMPT), rtol=1e-3, atol=1e-3)

    def test_a_mixed_step_has_their_logits(self, ours: Ours, logits: Any) -> None:
        """A decode, a chunk in the middle of a prompt and a new prompt share a step; then all three decode together."""
        ours.step((0, PROMPT[:30], 0), (1, OTHER[:9], 0))
        mixed = ours.step((0, PROMPT[30:31], 30), (1, OTHER[9:20], 9), (2, OTHER[3:8], 0))
        expected = [logits(PROMPT[:31])[-1], logits(OTHER[:20])[-1], logits(OTHER[3:8])[-1]]
        torch.testing.assert_close(mixed, torch.stack(expected), rtol=1e-3, atol=1e-3)
        decodes = ours.step((2, OTHER[8:9], 5), (0, PROMPT[31:32], 31), (1, OTHER[20:21], 20))
        expected = [logits(OTHER[3:9])[-1], logits(PROMPT[:32])[-1], logits(OTHER[:21])[-1]]
        torch.testing.assert_close(decodes, torch.stack(expected), rtol=1e-3, atol=1e-3)

    def test_bfloat16_stays_near_float32(self, folder: Path, artifacts: ArtifactStore, logits: Any) -> None:
        half = Ours(folder, artifacts, "bfloat16")
        rows = [half.step((0, PROMPT[:20], 0), every_row=True)]
        rows += [half.step((0, PROMPT[at : at + 1], at)) for at in range(20, len(PROMPT))]
        assert kl(logits(PROMPT), torch.cat(rows)) < MEAN_KL
