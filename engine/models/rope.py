"""Rotary position tables, shared by every forward pass that wants the usual ones."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.models.config import ModelConfig, RopeScaling


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Float32 [head_dim/2]; theta^(-2i/d) (RoFormer, eq. 15), rescaled where the config says so."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32)
    frequencies = 1.0 / (config.rope_theta ** (half / config.head_dim))
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "yarn":
        plain = yarn_share(config, scaling)
        return frequencies / scaling.factor * (1 - plain) + frequencies * plain
    wavelength = 2 * math.pi / frequencies
    low = scaling.original_max_position / scaling.low_freq_factor
    high = scaling.original_max_position / scaling.high_freq_factor
    smooth = (scaling.original_max_position / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    scaled = torch.where(wavelength > low, frequencies / scaling.factor, frequencies)
    return torch.where((wavelength <= low) & (wavelength >= high), between, scaled)


def yarn_share(config: ModelConfig, scaling: RopeScaling) -> Tensor:
    """Float32 [head_dim/2]: how much of its plain frequency each dimension keeps (Peng et al. 2023, section 3.2).

    All of it where it turns more than `beta_fast` times in the original context, nothing below `beta_slow` turns.
    """
    dim, pairs = config.head_dim, config.head_dim // 2

    def dimension(turns: float) -> float:
        return dim * math.log(scaling.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    span = high - low or 0.001  # a step, without dividing by zero
    return 1 - ((torch.arange(pairs, dtype=torch.float32) - low) / span).clamp(0, 1)


def rope_table(config: ModelConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin, each [max_position, head_dim] in `dtype`, both halves filled (the rotate-half form), with yarn's factor."""
    angles = torch.outer(torch.arange(config.max_position_embeddings, dtype=torch.float32), inverse_frequencies(config))
    angles = torch.cat([angles, angles], dim=-1)
    factor = 1.0 if config.rope_scaling is None else config.rope_scaling.attention_factor
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)
