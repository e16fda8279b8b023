"""Magnitudes of waves over time and frequency."""

from __future__ import annotations

import torch
from torch import Tensor

_FLOOR = 1e-4  # relative to a full-scale sine: more than 80 dB below it counts as silence


def levels(waves: Tensor, window: int, sample_rate: int | None) -> Tensor:
    """Magnitudes in dB [..., bands, frames] for one window; frames reach `window / 2` past the ends, over zeros."""
    shape = torch.hann_window(window, dtype=torch.float64, device=waves.device)
    spectra = torch.stft(
        waves.reshape(-1, waves.shape[-1]),
        window,
        window // 4,
        window=shape,
        pad_mode="constant",
        return_complex=True,
    )
    magnitudes = spectra.abs() * (2 / shape.sum())
    if sample_rate is not None:
        from transformers.audio_utils import mel_filter_bank

        filters = mel_filter_bank(
            window // 2 + 1, window // 16, 0.0, sample_rate / 2, sample_rate, None, "htk"
        )
        magnitudes = torch.from_numpy(filters.T).to(magnitudes) @ magnitudes
    decibels = 20 * torch.log10(magnitudes.clamp_min(_FLOOR))
    return decibels.reshape(*waves.shape[:-1], *decibels.shape[1:])
