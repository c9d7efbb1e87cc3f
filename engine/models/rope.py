"""Rotary position tables, shared by every forward pass that wants the usual ones."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.models.config import ModelConfig


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Float32 [head_dim/2]; theta^(-2i/d) (RoFormer, eq. 15), rescaled where the config says so."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32)
    frequencies = 1.0 / (config.rope_theta ** (half / config.head_dim))
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    wavelength = 2 * math.pi / frequencies
    low = scaling.original_max_position / scaling.low_freq_factor
    high = scaling.original_max_position / scaling.high_freq_factor
    smooth = (scaling.original_max_position / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    scaled = torch.where(wavelength > low, frequencies / scaling.factor, frequencies)
    return torch.where((wavelength <= low) & (wavelength >= high), between, scaled)


def rope_table(config: ModelConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin, each [max_position, head_dim] in `dtype`, both halves filled (the rotate-half form)."""
    angles = torch.outer(torch.arange(config.max_position_embeddings, dtype=torch.float32), inverse_frequencies(config))
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)
