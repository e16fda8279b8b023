"""How far apart two sets of clips are by a kernel of their embeddings, and how close a clip is to a text.

The Frechet audio distance (Kilgour et al. 2019) is `published.frechet_distance` of VGGish embeddings. Distances under
different embeddings, or of sets of different size, do not compare (Gui et al. 2024): say the extractor, the sizes and
the reference with every figure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visual_spec.eval.intervals import Figure
from visual_spec.eval.quality.discrepancy import Sums, gaussian_kernel
from visual_spec.eval.quality.published import check_features

_MEDIAN_ROWS = 4096  # embeddings whose pairs give the bandwidth: 8.4 million distances
_KAD_SCALE = 100.0  # as the distance is published
_CLAP_RATE = 48_000


def kernel_audio_distance(reference: Tensor, drawn: Tensor, *, bandwidth: float | None = None) -> float:
    """Kernel audio distance (Chung et al. 2025): 100 times the squared maximum mean discrepancy.

    The kernel is Gaussian, exp(-d^2 / (2 bandwidth^2)). The estimate is the unbiased one (Gretton et al. 2012, eq. 3),
    so two sets of one law are 0 apart on average at any size, and a single value may be negative. Double precision.

    Args:
        reference, drawn: embeddings [N, D] and [M, D].
        bandwidth: default: the median distance of two reference embeddings, of 4096 evenly spaced ones if there are
            more. Values under different bandwidths do not compare.

    Raises:
        ValueError: as `frechet_distance`, or a bandwidth that is not above 0.
    """
    return _sums(reference, drawn, bandwidth, paired=False).value() * _KAD_SCALE


def kernel_figure(
    reference: Tensor, drawn: Tensor, *, bandwidth: float | None = None, paired: bool | None = None
) -> Figure:
    """`kernel_audio_distance` and its interval, value +- 1.96 jackknife standard errors; the bandwidth stays.

    Not a bootstrap: a clip drawn twice is exactly like itself, which the unbiased estimate would count as likeness.

    Args:
        reference, drawn, bandwidth: as of `kernel_audio_distance`.
        paired: clip i of both sets has the same prompt, and both are left out together; default: sets of one size.

    Raises:
        ValueError: as `kernel_audio_distance`, paired sets of different size, or fewer than 3 clips in a set.
    """
    check_features(reference, drawn)
    paired = len(reference) == len(drawn) if paired is None else paired
    if min(len(reference), len(drawn)) < 3 or (paired and len(reference) != len(drawn)):
        raise ValueError(
            f"{len(reference)} and {len(drawn)} clips given; pass at least 3 of each, and pairs of one number"
        )
    return _sums(reference, drawn, bandwidth, paired=paired).figure(_KAD_SCALE)


def _sums(reference: Tensor, drawn: Tensor, bandwidth: float | None, *, paired: bool) -> Sums:
    check_features(reference, drawn)
    reference, drawn = reference.double(), drawn.double()
    kernel = gaussian_kernel(_bandwidth(reference, bandwidth))
    return Sums.of(reference, drawn, kernel, paired=paired)


def _bandwidth(reference: Tensor, bandwidth: float | None) -> float:
    """The bandwidth that is passed, or the median distance of the reference; refused unless above 0."""
    if bandwidth is None:
        step = math.ceil(len(reference) / _MEDIAN_ROWS)
        bandwidth = torch.pdist(reference[::step]).median().item()
    if not 0 < bandwidth < math.inf:
        raise ValueError(
            f"bandwidth {bandwidth}; a finite one above 0 is needed: pass one, or a reference whose embeddings differ"
        )
    return bandwidth


def resampled(clip: Tensor, rate: int, wanted: int) -> np.ndarray:
    """A clip at another rate.

    Raises:
        ImportError: torchaudio is missing (extra `audio`).
    """
    if rate != wanted:
        try:
            from torchaudio.functional import resample  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ImportError(
                f"clips at {rate} Hz need torchaudio to become {wanted} Hz: install visual-spec[audio]"
            ) from error
        clip = resample(clip, rate, wanted)
    return clip.numpy()


class ClapScorer:
    """How well clips fit texts by a CLAP model (Wu et al. 2023), and embeddings of clips for the distances above.

    Clips are resampled to 48 kHz. One shorter than ten seconds is repeated as often as it fits, one longer is cut at a
    place drawn for it alone, so nothing depends on the batch. Scores under different weights do not compare.

    Args:
        folder: a model of transformers' `ClapModel` layout with its tokenizer; nothing is downloaded.
        device: where the model runs.
        batch_size: clips or texts in one call.

    Raises:
        FileNotFoundError: no such folder.
        ValueError: a model with feature fusion, which takes other inputs.
    """

    def __init__(self, folder: str | Path, *, device: str | torch.device = "cpu", batch_size: int = 16):
        if not Path(folder).is_dir():
            raise FileNotFoundError(
                f"no CLAP model at {folder}; pass a folder such as laion/larger_clap_music holds"
            )
        from transformers import AutoTokenizer, ClapConfig, ClapFeatureExtractor, ClapModel

        config: Any = ClapConfig.from_pretrained(folder)
        if config.audio_config.enable_fusion:
            raise ValueError(
                f"the CLAP model at {folder} fuses features of several cuts; pass one that does not"
            )
        self.model: Any = ClapModel.from_pretrained(folder, local_files_only=True)
        self.model.eval().requires_grad_(False).to(device)
        self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        # Not the stored setting: "fusion", the default, makes four spectrograms of a clip where the model takes one.
        self.extractor = ClapFeatureExtractor.from_pretrained(
            folder, truncation="rand_trunc", padding="repeatpad", local_files_only=True
        )
        self.batch_size = batch_size

    def embed_audio(self, waves: Sequence[Tensor | np.ndarray], sample_rate: int, *, seed: int = 0) -> Tensor:
        """Embeddings of length 1, float32 [N, D] on the CPU, of mono clips [T_i], which may differ in length.

        Args:
            seed: with a clip's place in the list it draws where a long clip is cut.

        Raises:
            ValueError: no clips, one that is not [T], empty or not finite, or a rate below 1.
            ImportError: a rate other than 48 kHz, and torchaudio is missing (extra `audio`).
        """
        if not len(waves) or sample_rate < 1:
            raise ValueError(f"{len(waves)} clips at {sample_rate} Hz given; pass at least one, at its rate")
        cuts = [
            self._cut(wave, sample_rate, np.random.default_rng((seed, i))) for i, wave in enumerate(waves)
        ]
        parts = []
        for start in range(0, len(cuts), self.batch_size):
            part = cuts[start : start + self.batch_size]
            inputs = self.extractor(part, sampling_rate=_CLAP_RATE, return_tensors="pt").to(self.model.device)
            with torch.no_grad():
                parts.append(self.model.get_audio_features(**inputs).pooler_output.float().cpu())
        return torch.cat(parts)

    def _cut(self, wave: Tensor | np.ndarray, sample_rate: int, rng: np.random.Generator) -> np.ndarray:
        """A clip at 48 kHz, no longer than the model takes."""
        clip = torch.as_tensor(wave).float().cpu()
        if clip.ndim != 1 or not len(clip) or not clip.isfinite().all():
            raise ValueError(
                f"a clip of shape {list(clip.shape)}; pass mono clips [samples] of finite values"
            )
        samples = resampled(clip, sample_rate, _CLAP_RATE)
        longest = self.extractor.nb_max_samples
        first = int(rng.integers(max(0, len(samples) - longest) + 1))
        return samples[first : first + longest]

    def embed_text(self, prompts: Sequence[str]) -> Tensor:
        """Embeddings of length 1, float32 [N, D] on the CPU.

        Raises:
            ValueError: no prompts.
        """
        if not len(prompts):
            raise ValueError("no prompts given; pass at least one")
        parts = []
        for start in range(0, len(prompts), self.batch_size):
            part = list(prompts[start : start + self.batch_size])
            inputs = self.tokenizer(part, padding=True, truncation=True, return_tensors="pt").to(
                self.model.device
            )
            with torch.no_grad():
                parts.append(self.model.get_text_features(**inputs).pooler_output.float().cpu())
        return torch.cat(parts)

    def score(
        self,
        waves: Sequence[Tensor | np.ndarray],
        sample_rate: int,
        prompts: Sequence[str],
        *,
        seed: int = 0,
    ) -> Tensor:
        """The cosine of each clip and its prompt, float32 [N], -1 to 1.

        Raises:
            ValueError, ImportError: as `embed_audio`, or not as many clips as prompts.
        """
        if len(waves) != len(prompts):
            raise ValueError(f"{len(waves)} clips and {len(prompts)} prompts given; pass as many of each")
        return (self.embed_audio(waves, sample_rate, seed=seed) * self.embed_text(prompts)).sum(-1)
