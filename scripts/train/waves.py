"""Distances between waves, by which training judges a codec."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from visual_spec.data.waves import levels


def si_sdr(estimate: Tensor, target: Tensor) -> Tensor:
    """Return the scale-invariant signal-to-distortion ratio in dB (Le Roux et al. 2019): [..., T] to [...], float64.

    Means are not subtracted. Infinite for a multiple of the target.

    Raises:
        ValueError: the shapes differ, there are no samples, values are not finite, or the target is silent.
    """
    estimate, target = _check_pair(estimate, target)
    energy = target.square().sum(-1, keepdim=True)
    if not (energy > 0).all():
        raise ValueError(
            "a target is silent; the ratio is of parts of an estimate along the target and across it"
        )
    along = (estimate * target).sum(-1, keepdim=True) / energy * target
    return 10 * torch.log10(along.square().sum(-1) / (estimate - along).square().sum(-1))


def spectral_distance(
    estimate: Tensor,
    target: Tensor,
    *,
    sample_rate: int | None = None,
    windows: Sequence[int] = (2048, 1024, 512, 256, 128),
) -> Tensor:
    """Return the distance between the spectrograms of two clips in dB: [..., T] to [...], float64.

    It is the mean absolute difference of log magnitudes under Hann windows of several lengths, with a hop of a quarter.
    Long windows resolve tones, short ones onsets (the logarithmic part of the multi-scale loss of Engel et al. 2020).
    Magnitudes are relative to a full-scale sine at 0 dB, and those below -80 dB count as -80 dB.

    Args:
        sample_rate: in Hz: compare mel bands, one for every 16 samples of a window, instead of single frequencies.
        windows: lengths in samples, even; a clip must be at least as long as the longest.

    Raises:
        ValueError: as in `si_sdr`, but silence is allowed; or the windows do not fit.
    """
    estimate, target = _check_pair(estimate, target)
    if not windows or min(windows) < 32 or max(windows) > target.shape[-1] or any(w % 4 for w in windows):
        raise ValueError(
            f"windows {list(windows)} for {target.shape[-1]} samples; pass multiples of 4, at least 32 and at most as "
            "long as the clip"
        )
    distances = []
    for window in windows:
        first, second = (levels(wave, window, sample_rate) for wave in (estimate, target))
        distances.append((first - second).abs().mean((-2, -1)))
    return torch.stack(distances).mean(0)


def _check_pair(estimate: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return both in double precision, or refuse them."""
    if estimate.shape != target.shape or target.ndim < 1 or target.numel() == 0:
        raise ValueError(
            f"an estimate of shape {list(estimate.shape)} and a target of {list(target.shape)}; pass two of one shape "
            "[..., samples]"
        )
    if not (estimate.isfinite().all() and target.isfinite().all()):
        raise ValueError("a clip holds values that are not finite; look at what made it")
    return estimate.double(), target.double()
