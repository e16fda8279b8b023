"""How far apart two sets of clips are by a kernel of their embeddings.

The Frechet audio distance (Kilgour et al. 2019) is `published.frechet_distance` of VGGish embeddings. Distances under
different embeddings, or of sets of different size, do not compare (Gui et al. 2024): say the extractor, the sizes and
the reference with every figure.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from visual_spec.eval.intervals import Figure
from visual_spec.eval.quality.discrepancy import Sums, gaussian_kernel
from visual_spec.eval.quality.published import check_features
from visual_spec.pipelines.audio_files import resample

_MEDIAN_ROWS = 4096  # embeddings whose pairs give the bandwidth: 8.4 million distances
KAD_SCALE = 100.0  # as the distance is published


def kernel_figure(reference: Tensor, drawn: Tensor, *, paired: bool | None = None) -> Figure:
    """Kernel audio distance (Chung et al. 2025), 100 times the squared maximum mean discrepancy, and its interval.

    The kernel is Gaussian, exp(-d^2 / (2 bandwidth^2)), its bandwidth `median_distance` of the reference; values under
    different bandwidths do not compare. The estimate is the unbiased one (Gretton et al. 2012, eq. 3), so two sets of
    one law are 0 apart on average at any size, and a single value may be negative. The interval is value +- 1.96
    jackknife standard errors, the bandwidth kept: in a bootstrap a clip drawn twice is exactly like itself, which the
    unbiased estimate would count as likeness. Double precision.

    Args:
        reference, drawn: embeddings [N, D] and [M, D].
        paired: clip i of both sets has the same prompt, and both are left out together; default: sets of one size.

    Raises:
        ValueError: as `frechet_distance` and `median_distance`, paired sets of different size, or fewer than 3 clips in
            a set.
    """
    check_features(reference, drawn)
    paired = len(reference) == len(drawn) if paired is None else paired
    if min(len(reference), len(drawn)) < 3 or (paired and len(reference) != len(drawn)):
        raise ValueError(
            f"{len(reference)} and {len(drawn)} clips given; pass at least 3 of each, and pairs of one number"
        )
    kernel = gaussian_kernel(median_distance(reference))
    return Sums.of(reference.double(), drawn.double(), kernel, paired=paired).figure(KAD_SCALE)


def median_distance(reference: Tensor) -> float:
    """The median distance of two embeddings, of 4096 evenly spaced ones if there are more.

    Raises:
        ValueError: it is not above 0.
    """
    step = math.ceil(len(reference) / _MEDIAN_ROWS)
    distance = torch.pdist(reference[::step].double()).median().item()
    if not 0 < distance < math.inf:
        raise ValueError(
            f"bandwidth {distance}; one above 0 is needed: pass a reference whose embeddings differ"
        )
    return distance


def resampled(clip: Tensor, rate: int, wanted: int) -> np.ndarray:
    """A clip [samples] at another rate."""
    return resample(clip, rate, wanted).numpy()
