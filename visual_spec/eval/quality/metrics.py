"""How far apart two sets of pictures are, by the features of a network: plain functions of tensors `[N, D]`.

Every figure comes with its 95 % interval, as {value, low, high}.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from visual_spec.eval.intervals import Z_95, Figure


def frechet_distance(first: Tensor, second: Tensor) -> float:
    """Squared Frechet distance of two Gaussians with the means and covariances of two sets (Heusel et al. 2017, eq. 6).

    Double precision. The trace of the root of the product S1 S2 is taken as that of the symmetric
    S1^(1/2) S2 S1^(1/2), whose eigenvalues are real and not negative; rounding below zero is cut off. A set smaller
    than its number of features gives a covariance without full rank, which is legal here.

    Args:
        first, second: features [N, D] and [M, D].

    Raises:
        ValueError: fewer than 2 pictures in a set, features of different width, or features that are not finite.
    """
    check_features(first, second)
    return _gaussian_distance(_moments(first.double()), _moments(second.double()))


def check_features(first: Tensor, second: Tensor) -> None:
    """Refuse sets that cannot be compared; see `frechet_distance`."""
    if first.ndim != 2 or second.ndim != 2 or first.shape[1] != second.shape[1]:
        raise ValueError(
            f"features have shapes {list(first.shape)} and {list(second.shape)}; pass [N, D] and [M, D], "
            "both of one extractor"
        )
    if min(len(first), len(second)) < 2:
        raise ValueError(f"{len(first)} and {len(second)} pictures given; each set needs at least 2")
    if not (first.isfinite().all() and second.isfinite().all()):
        raise ValueError(
            "the features hold values that are not finite; look at the pictures they were taken from"
        )


def _moments(features: Tensor, counts: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Mean [D] and unbiased covariance [D, D] of a set in which picture i occurs `counts[i]` times (default: once)."""
    if counts is None:
        counts = torch.ones(len(features), dtype=features.dtype)
    mean = counts @ features / counts.sum()
    centred = features - mean
    return mean, (centred * counts[:, None]).T @ centred / (counts.sum() - 1)


def _gaussian_distance(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> float:
    (mean1, cov1), (mean2, cov2) = first, second
    values, vectors = torch.linalg.eigh(cov1)
    root = (vectors * values.clamp_min(0).sqrt()) @ vectors.T
    inner = torch.linalg.eigvalsh(root @ cov2 @ root).clamp_min(0).sqrt().sum()
    distance = (mean1 - mean2).square().sum() + cov1.trace() + cov2.trace() - 2 * inner
    return max(0.0, distance.item())


def frechet_figure(
    first: Tensor, second: Tensor, *, paired: bool = True, resamples: int = 200, seed: int = 0
) -> Figure:
    """`frechet_distance` and its interval, value +- 1.96 bootstrap standard errors.

    Not the percentiles of the bootstrap: the distance grows with the noise in its moments (Chong and Forsyth 2020), a
    resample has more of it, and so most percentile intervals miss the very value they belong to. For the same reason
    only distances of sets of one size compare, and two sets from one law are not 0 apart; the distance of plain
    decoding to plain decoding with other seeds says how far.

    Args:
        paired: picture i of both sets has the same prompt, so both are resampled by the same indices.

    Raises:
        ValueError: as `frechet_distance`, or paired sets of different size.
    """
    check_features(first, second)
    if paired and len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} pictures given; paired sets have one size")
    first, second = first.double(), second.double()
    value = _gaussian_distance(_moments(first), _moments(second))
    generator = torch.Generator().manual_seed(seed)

    def counts(size: int) -> Tensor:
        return torch.bincount(torch.randint(size, (size,), generator=generator), minlength=size).double()

    drawn = []
    for _ in range(resamples):
        one = counts(len(first))
        other = one if paired else counts(len(second))
        drawn.append(_gaussian_distance(_moments(first, one), _moments(second, other)))
    reach = Z_95 * torch.tensor(drawn).std().item() if resamples > 1 else math.inf
    return {"value": value, "low": max(0.0, value - reach), "high": value + reach}
