"""What the layers of a decoder-only model are made of, as frozen dataclasses. Sizes in elements, positions in tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Rotary scaling: `linear` divides positions; `llama3` rescales low frequencies (Llama 3.1 report, section 3.2);
    `yarn` blends divided and plain frequencies by how often they turn (Peng et al. 2023, section 3.2)."""

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # yarn: the blend starts and ends at whole dimensions
    attention_factor: float = 1.0  # yarn: what cosines and sines are multiplied with
    mscale_all_dim: float = 0.0  # yarn: DeepSeek-V3 multiplies its scores with the square of this one's magnitude


def magnitude(factor: float, weight: float = 1.0) -> float:
    """Yarn's growth of attention with the context's: 0.1 w ln(s) + 1 (Peng et al. 2023, eq. 22)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in place of an MLP: a router sends each token to `per_token` of `count` of them.

    `block`, `gate`, `up` and `down` name them: `model.layers.0.{block}.experts.3.{gate}.weight`.
    """

    count: int
    per_token: int
    intermediate_size: int  # of one expert
    layers: tuple[int, ...]  # the layers that have them; the others have an MLP of the model's intermediate_size
    normalise: bool  # the chosen experts' shares add up to one
    scoring: str = "softmax"  # or sigmoid, with a correction that takes part in choosing alone (DeepSeek-V3, eq. 16)
    scale: float = 1.0  # of the chosen shares
    groups: int = 1  # experts are chosen among those of the `groups_kept` best groups (DeepSeek-V2, section 2.2.2)
    groups_kept: int = 1
    shared_size: int = 0  # intermediate size of the expert that every token goes to; 0: there is none
    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, section 2.1): a token keeps `kv_rank + rope_dim` numbers for all heads."""

    kv_rank: int
    q_rank: int  # 0: queries are not compressed
    nope_dim: int  # of a head's query and key, without position
    rope_dim: int  # of a head's query and of the one key with position
    value_dim: int
    interleaved: bool  # rotated pairs lie side by side, not half a head apart


def baseline_of(config: Mapping[str, Any]) -> str:
    """Which source in `engine/baseline` computes the model whose `ModelConfig` has these fields."""
    if config.get("latent"):
        return "latent"
    return "grouped" if any(config.get(field) for field in ("head_norm", "sliding_window", "experts")) else "llama"
