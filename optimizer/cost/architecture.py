"""What a model reads and multiplies for each token, from the sizes that its config.json publishes.

Counts are of numbers (not bytes) in all layers together; a precision gives them bytes. Norms and biases are left out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from engine.models.config import ModelConfig

PUBLISHED = Path(__file__).with_name("architectures.json")


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention: `kv_rank + rope_dim` numbers a token and layer, shared by all heads."""

    q_rank: int  # 0: queries are not compressed
    kv_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder's sizes. `intermediate` is that of a dense MLP, in `dense_layers` where there are experts, else in all."""

    name: str
    hidden: int
    layers: int
    vocab: int
    heads: int
    source: str
    kv_heads: int = 1
    head_dim: int = 0
    gated_queries: bool = False  # queries come with a gate of their own size
    intermediate: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    dense_layers: int = 0
    latent: Latent | None = None
    window: int = 0  # positions seen by `windowed_layers`
    windowed_layers: int = 0
    attends_at_most: int = 0  # positions that sparse attention chooses; 0: all
    linear_layers: int = 0  # layers that keep a state of fixed size in place of keys and values
    linear_in: int = 0
    linear_out: int = 0
    linear_state_bytes: int = 0
    four_bit_experts_only: bool = False  # below eight bits only the experts are stored so, all else in bfloat16

    @property
    def full_layers(self) -> int:
        return self.layers - self.linear_layers

    @property
    def expert_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def attention_numbers(self) -> int:
        """In the matrices around attention."""
        h, n = self.hidden, self.heads
        if (m := self.latent) is not None:
            width = m.nope_dim + m.rope_dim
            queries = h * m.q_rank + m.q_rank * n * width if m.q_rank else h * n * width
            values = h * (m.kv_rank + m.rope_dim) + m.kv_rank * n * (m.nope_dim + m.value_dim)
            return self.layers * (queries + values + n * m.value_dim * h)
        queries = n * self.head_dim * (2 if self.gated_queries else 1)
        full = h * (queries + 2 * self.kv_heads * self.head_dim) + n * self.head_dim * h
        return self.full_layers * full + self.linear_layers * h * (self.linear_in + self.linear_out)

    @property
    def mlp_numbers(self) -> int:
        """In MLPs that every token goes through."""
        dense = self.dense_layers if self.experts else self.layers
        return 3 * self.hidden * (dense * self.intermediate + self.expert_layers * self.shared_intermediate)

    @property
    def expert_numbers(self) -> int:
        """In one expert of one layer."""
        return 3 * self.hidden * self.expert_intermediate

    @property
    def head_numbers(self) -> int:
        return self.vocab * self.hidden

    @property
    def kv_numbers(self) -> int:
        """That a token keeps, in all layers."""
        if self.latent is not None:
            return self.layers * (self.latent.kv_rank + self.latent.rope_dim)
        return self.full_layers * 2 * self.kv_heads * self.head_dim

    @property
    def state_bytes(self) -> int:
        """That a sequence keeps whatever its length."""
        return self.linear_layers * self.linear_state_bytes

    def attention_flops(self, absorbed: bool) -> int:
        """Of one query at one position, in all layers. `absorbed`: latent attention over the compressed keys, as in decode."""
        if (m := self.latent) is not None:
            width = 2 * m.kv_rank + m.rope_dim if absorbed else m.nope_dim + m.rope_dim + m.value_dim
            return 2 * self.heads * width * self.layers
        return 4 * self.heads * self.head_dim * self.full_layers

    def seen(self, context: float) -> float:
        """Positions that a query sees, on average over layers."""
        most = min(context, self.attends_at_most) if self.attends_at_most else context
        share = self.windowed_layers / self.layers
        return most * (1 - share) + min(most, self.window) * share

    def experts_touched(self, tokens: float) -> float:
        """Distinct experts of a layer that `tokens` tokens are sent to, when all are as likely."""
        if not self.experts:
            return 0.0
        return self.experts * (1 - (1 - self.experts_per_token / self.experts) ** tokens)

    @property
    def all_numbers(self) -> int:
        experts = self.expert_layers * self.experts * self.expert_numbers
        return self.attention_numbers + self.mlp_numbers + experts + 2 * self.head_numbers

    @property
    def active_numbers(self) -> int:
        """That one token is multiplied with, the head included."""
        experts = self.expert_layers * self.experts_per_token * self.expert_numbers
        return self.attention_numbers + self.mlp_numbers + experts + self.head_numbers


@cache
def published() -> dict[str, Architecture]:
    """Architectures whose sizes are kept here, by name, each with its source."""
    rows = json.loads(PUBLISHED.read_text())
    return {r["name"]: Architecture(**r | {"latent": Latent(**r["latent"]) if "latent" in r else None}) for r in rows}


def of_config(config: ModelConfig, name: str = "endpoint") -> Architecture:
    """The architecture of a model that the engine serves."""
    e, m = config.experts, config.latent
    return Architecture(
        name=name,
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        vocab=config.vocab_size,
        heads=config.num_attention_heads,
        source="config.json",
        kv_heads=1 if m else config.num_key_value_heads,
        head_dim=config.head_dim,
        intermediate=config.intermediate_size,
        experts=e.count if e else 0,
        experts_per_token=e.per_token if e else 0,
        expert_intermediate=e.intermediate_size if e else 0,
        shared_intermediate=e.shared_size if e else 0,
        dense_layers=config.num_hidden_layers - len(e.layers) if e else 0,
        latent=Latent(m.q_rank, m.kv_rank, m.rope_dim, m.nope_dim, m.value_dim) if m else None,
        window=config.sliding_window,
        windowed_layers=config.num_hidden_layers if config.sliding_window else 0,
    )
