"""Distances of clips by which a codec is judged, against closed forms, plain loops and torchmetrics."""

import math

import numpy as np
import pytest
import torch

from scripts.train.waves import si_sdr, spectral_distance
from tests.helpers.refusals import refuses


def sample(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_distortion_ratio_of_known_parts():
    """Noise across the target, a tenth as large: 20 dB, at any scale and sign of the estimate."""
    target = torch.sin(2 * math.pi * torch.arange(1000) / 100)
    noise = 0.1 * torch.cos(2 * math.pi * torch.arange(1000) / 100)
    for scale in (1.0, -3.0, 1e-3):
        assert si_sdr(scale * (target + noise), target).item() == pytest.approx(20, abs=1e-4)
    assert si_sdr(target + 10 * noise, 5 * target).item() == pytest.approx(0, abs=1e-4)
    # An error along the target is no distortion: only its size has changed.
    assert si_sdr(1.5 * target + noise, target).item() == pytest.approx(20 + 20 * math.log10(1.5), abs=1e-4)
    assert si_sdr(2 * target, target).item() == math.inf
    batch = torch.stack([target + noise, target + 10 * noise]).unflatten(0, (2, 1))
    both = si_sdr(batch, target.expand(2, 1, -1))
    assert both.shape == (2, 1) and both.dtype == torch.float64
    assert both.flatten().tolist() == pytest.approx([20, 0], abs=1e-4)


def test_the_distortion_ratio_agrees_with_torchmetrics():
    functional = pytest.importorskip("torchmetrics.functional.audio")
    target, estimate = sample(3, 400, seed=6), sample(3, 400, seed=7) + sample(3, 400, seed=6)
    theirs = functional.scale_invariant_signal_distortion_ratio(estimate, target)
    torch.testing.assert_close(si_sdr(estimate, target), theirs, rtol=1e-9, atol=1e-9)


def loops(estimate: np.ndarray, target: np.ndarray, windows, filters=None) -> float:
    """The spectral distance, one window at a time."""
    total = []
    for window in windows:
        shape = np.array([0.5 - 0.5 * math.cos(2 * math.pi * i / window) for i in range(window)])
        differences = []
        for start in range(0, len(target) + 1, window // 4):
            levels = []
            for wave in (estimate, target):
                part = np.pad(wave, window // 2)[start : start + window] * shape
                magnitude = np.abs(np.fft.rfft(part)) * 2 / shape.sum()
                if filters is not None:
                    magnitude = magnitude @ filters[window]
                levels.append(20 * np.log10(np.maximum(magnitude, 1e-4)))
            differences.append(np.abs(levels[0] - levels[1]))
        total.append(np.mean(differences))
    return float(np.mean(total))


def test_the_spectral_distance_against_loops():
    target, estimate = 0.1 * sample(700, seed=8), 0.1 * sample(700, seed=9)
    target[:300] = 0
    windows = (256, 64, 32)
    found = spectral_distance(estimate, target, windows=windows).item()
    assert found == pytest.approx(loops(estimate.numpy(), target.numpy(), windows), rel=1e-9)
    batch = spectral_distance(
        torch.stack([estimate, target, target]), torch.stack([target, estimate, target]), windows=windows
    )
    assert batch.tolist() == pytest.approx([found, found, 0], rel=1e-12)


def test_the_spectral_distance_over_mel_bands():
    functional = pytest.importorskip("torchaudio.functional")
    target, estimate = 0.1 * sample(3000, seed=10), 0.1 * sample(3000, seed=11)
    windows = (2048, 512, 256)
    filters = {}
    for window in windows:
        bank = functional.melscale_fbanks(window // 2 + 1, 0.0, 8000.0, window // 16, 16_000)
        filters[window] = bank.double().numpy()
    found = spectral_distance(estimate, target, sample_rate=16_000, windows=windows).item()
    assert found == pytest.approx(loops(estimate.numpy(), target.numpy(), windows, filters), rel=1e-5)
    assert found != pytest.approx(spectral_distance(estimate, target, windows=windows).item(), rel=0.02)


def test_the_spectral_distance_of_a_change_in_loudness():
    noise = 0.3 * sample(2, 8000, seed=12)  # far above the floor at every frequency
    for rate in (None, 16_000):
        distance = spectral_distance(noise / 2, noise, sample_rate=rate, windows=(1024, 256))
        assert distance.tolist() == pytest.approx([20 * math.log10(2)] * 2, rel=1e-3)
    silence = torch.zeros(4096)
    assert spectral_distance(silence, silence).item() == 0
    assert spectral_distance(silence, silence + 1e-6).item() == 0  # both are silent


def test_bad_pairs_of_clips_are_refused():
    good = sample(3000, seed=13)
    for distance in (si_sdr, spectral_distance):
        refuses(ValueError, r"\[3000\].*\[2999\]", distance, good, good[1:])
        refuses(ValueError, r"\[0\]", distance, good[:0], good[:0])
        refuses(ValueError, "not finite", distance, good / 0, good)
    refuses(ValueError, "silent", si_sdr, torch.stack([good, good]), torch.stack([good, 0 * good]))
    for windows in ((4096,), (), (30,), (66,)):
        refuses(ValueError, "for 3000 samples", spectral_distance, good, good, windows=windows)
