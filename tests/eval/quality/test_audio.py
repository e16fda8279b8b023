"""Distances of clips and of sets of clips against closed forms and plain loops, and CLAP on a tiny random model."""

import math
import wave
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.audio_utils import mel_filter_bank

from tests.helpers.networks import save_clap, with_manifest
from tests.helpers.refusals import refuses
from visual_spec.eval.intervals import Z_95
from visual_spec.eval.quality import audio, discrepancy, extractors
from visual_spec.eval.quality.audio import kernel_figure
from visual_spec.eval.quality.discrepancy import Sums, gaussian_kernel
from visual_spec.eval.quality.extractors import Setup
from visual_spec.eval.quality.feature_sets import SampleFiles
from visual_spec.eval.quality.features import MelStatistics


def sample(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def kernel_audio_distance(reference, drawn, bandwidth: float | None = None) -> float:
    """The value alone, also of sets too small for an interval."""
    kernel = gaussian_kernel(bandwidth or audio.median_distance(reference))
    return audio.KAD_SCALE * Sums.of(reference.double(), drawn.double(), kernel, paired=False).value()


@pytest.mark.parametrize("rows", [1024, 7])
def test_the_kernel_distance_against_loops(rows, monkeypatch):
    monkeypatch.setattr(discrepancy, "_ROWS", rows)
    reference, drawn = sample(20, 4, seed=1), 1.3 * sample(17, 4, seed=2) + 1.0
    drawn[3] = reference[5]
    gaps = sorted(math.dist(a, b) for i, a in enumerate(reference.tolist()) for b in reference.tolist()[:i])
    width = gaps[(len(gaps) - 1) // 2]

    def mean(first, second, same):
        values = [
            math.exp(-(math.dist(a, b) ** 2) / (2 * width**2))
            for i, a in enumerate(first.tolist())
            for j, b in enumerate(second.tolist())
            if not (same and i == j)
        ]
        return sum(values) / len(values)

    expected = 100 * (
        mean(reference, reference, True) + mean(drawn, drawn, True) - 2 * mean(reference, drawn, False)
    )
    assert kernel_audio_distance(reference, drawn) == pytest.approx(expected, rel=1e-10)
    assert expected > 1


def test_the_bandwidth_of_a_large_reference_is_that_of_evenly_spaced_rows(monkeypatch):
    monkeypatch.setattr(audio, "_MEDIAN_ROWS", 10)
    reference, drawn = sample(35, 2, seed=3), sample(8, 2, seed=4)
    width = torch.pdist(reference[::4]).median().item()
    assert kernel_audio_distance(reference, drawn) == kernel_audio_distance(reference, drawn, bandwidth=width)


def test_sets_that_have_no_kernel_distance_are_refused():
    good = sample(5, 3, seed=5)
    refuses(ValueError, r"shapes \[5, 3\] and \[5, 2\]", kernel_figure, good, good[:, :2])
    refuses(ValueError, "5 and 1", kernel_figure, good, good[:1])
    refuses(ValueError, "not finite", kernel_figure, good, good / 0)
    refuses(ValueError, "bandwidth 0.0", kernel_figure, torch.ones(4, 3), good)


@pytest.fixture(scope="module")
def clap(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("clap")
    save_clap(folder)
    return folder


def clip(seconds: float, seed: int) -> np.ndarray:
    """Of 16 bits at 48 kHz."""
    return (6000 * sample(int(48_000 * seconds), seed=seed)).clamp(-32768, 32767).numpy().astype("<i2")


PROMPTS = ["a slow organ melody", "fast bell", "a melody"]


def embedded(clap: Path, folder: Path, clips: list[np.ndarray], *, rate: int = 48_000, batch_size: int = 16):
    folder.mkdir()
    for index, one in enumerate(clips):
        with wave.open(str(folder / f"{index:03d}.wav"), "wb") as file:
            file.setparams((1, 2, rate, 0, "NONE", ""))
            file.writeframes(one.tobytes())
    with_manifest(folder, PROMPTS[: len(clips)], "wav")
    extract, _, _ = extractors.clap_features(Setup({"clap": clap}, batch_size=batch_size))
    return extract(SampleFiles.open(folder), 0, len(clips))


def test_clap_scores_do_not_depend_on_the_batch(clap, tmp_path):
    clips = [clip(12, 3), clip(1, 4), clip(11, 5)]
    together, apart = (embedded(clap, tmp_path / f"{size}", clips, batch_size=size) for size in (3, 1))
    for name in ("features", "scores"):
        torch.testing.assert_close(together[name], apart[name], rtol=0, atol=1e-5)
    assert torch.allclose(together["features"].norm(dim=1), torch.ones(3), atol=1e-6)
    assert together["scores"].std() > 0.01


def test_clap_cuts_long_clips_by_their_place(clap, tmp_path):
    long, exact = clip(25, 6), clip(10, 7)
    state = np.random.get_state()[1].copy()  # type: ignore[index]
    first, again = (embedded(clap, tmp_path / name, [long, long])["features"] for name in "ab")
    assert torch.equal(first, again) and not torch.allclose(first[0], first[1], atol=1e-4)
    assert np.array_equal(state, np.random.get_state()[1])  # type: ignore[index]
    starts = [int(np.random.default_rng((place, 0)).integers(15 * 48_000 + 1)) for place in (0, 1)]
    cuts = [long[start : start + 480_000] for start in starts]
    assert torch.equal(first, embedded(clap, tmp_path / "cut", cuts)["features"])
    # An exact ten seconds is cut nowhere.
    assert torch.equal(*embedded(clap, tmp_path / "exact", [exact, exact])["features"])


def test_clap_resamples(clap, tmp_path):
    functional = pytest.importorskip("torchaudio.functional")
    one = clip(1, 8)[:16_000]
    found = embedded(clap, tmp_path / "slow", [one], rate=16_000)["features"]
    raised = functional.resample(torch.from_numpy(one / np.float32(32768)), 16_000, 48_000)
    as_file = (raised * 32768).round().clamp(-32768, 32767).numpy().astype("<i2")
    assert torch.allclose(found, embedded(clap, tmp_path / "fast", [as_file])["features"], atol=1e-4)
    assert not torch.allclose(found, embedded(clap, tmp_path / "as", [one])["features"], atol=1e-4)


def test_clap_says_what_it_lacks(tmp_path):
    with pytest.raises(FileNotFoundError, match="CLAP.*nowhere"):
        extractors.clap_features(Setup({"clap": tmp_path / "nowhere"}))
    save_clap(tmp_path / "fused", fusion=True)
    refuses(ValueError, "fuses features", extractors.clap_features, Setup({"clap": tmp_path / "fused"}))


def test_mel_statistics_by_hand():
    clips, rate = np.random.default_rng(1).uniform(-1, 1, (2, 1500)), 16_000
    clips[1, 700:] = 0  # silence counts as -60 dB
    filters = mel_filter_bank(513, 64, 0.0, rate / 2, rate, None, "htk")
    window = np.array([0.5 - 0.5 * math.cos(2 * math.pi * i / 1024) for i in range(1024)])
    found = MelStatistics(rate)(torch.from_numpy(clips))
    for clip, features in zip(clips, found, strict=True):
        padded, frames = np.pad(clip, 512), []
        for start in range(0, len(clip) + 1, 256):
            magnitude = np.abs(np.fft.rfft(padded[start : start + 1024] * window)) * 2 / window.sum()
            frames.append(20 * np.log10(np.maximum(magnitude @ filters, 1e-3)))
        expected = np.concatenate([np.mean(frames, 0), np.std(frames, 0)])
        assert np.abs(features.numpy() - expected).max() < 1e-3
    assert found.shape == (2, MelStatistics.num_features) and found.dtype == torch.float32


def test_the_interval_of_the_kernel_distance_leaves_one_prompt_out_at_a_time():
    generator = torch.Generator().manual_seed(0)
    reference, drawn = (torch.randn(9, 3, generator=generator) + shift for shift in (0.0, 0.4))
    width = torch.pdist(reference.double()).median().item()
    found = kernel_figure(reference, drawn)
    assert found["value"] == pytest.approx(kernel_audio_distance(reference, drawn), abs=1e-9)

    def others(count, out):
        return [place for place in range(count) if place != out]

    left = [
        kernel_audio_distance(reference[others(9, out)], drawn[others(9, out)], bandwidth=width)
        for out in range(9)
    ]
    error = math.sqrt(8 / 9 * sum((one - np.mean(left)) ** 2 for one in left))
    assert found["high"] - found["value"] == pytest.approx(Z_95 * error)
    assert found["value"] - found["low"] == pytest.approx(Z_95 * error)
    # Sets of different size: the variance is the sum of what the samples of either set do.
    apart = kernel_figure(reference, drawn[:8])
    wide = [
        [kernel_audio_distance(reference[others(9, out)], drawn[:8], bandwidth=width) for out in range(9)]
    ]
    wide += [[kernel_audio_distance(reference, drawn[others(8, out)], bandwidth=width) for out in range(8)]]
    variance = sum((len(one) - 1) * np.var(one) for one in wide)
    assert apart["value"] == pytest.approx(kernel_audio_distance(reference, drawn[:8]), abs=1e-9)
    assert apart["high"] - apart["value"] == pytest.approx(Z_95 * math.sqrt(variance))
    refuses(ValueError, "9.*8 clips", kernel_figure, reference, drawn[:8], paired=True)
    refuses(ValueError, "2 and 2 clips", kernel_figure, reference[:2], drawn[:2])
