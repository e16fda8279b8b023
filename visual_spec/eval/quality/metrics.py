"""How far apart two sets of pictures are, by the features of a network: plain functions of tensors `[N, D]`.

Every figure comes with its 95 % interval, as {value, low, high}.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from visual_spec.eval.intervals import Z_95, Figure, mean_figure, rate

_ROWS = 1024  # rows of a distance matrix held at once: 50,000 pictures need 400 MB, not 20 GB


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


def kth_neighbour(features: Tensor, neighbours: int) -> Tensor:
    """Distance [N] of each picture to its k-th nearest other one.

    Raises:
        ValueError: unless 1 <= neighbours < N.
    """
    if not 1 <= neighbours < len(features):
        raise ValueError(
            f"neighbours={neighbours} of {len(features)} pictures; pass 1 to {len(features) - 1}"
        )
    parts = [_distances(part, features) for part in features.split(_ROWS)]
    # Every row holds the picture's distance 0 to itself, so its k-th neighbour comes at place k + 1.
    return torch.cat([part.kthvalue(neighbours + 1, dim=1).values for part in parts])


def _distances(first: Tensor, second: Tensor) -> Tensor:
    # Without the matrix product, which does not give 0 for two equal rows.
    return torch.cdist(first, second, compute_mode="donot_use_mm_for_euclid_dist")


def precision_recall(real: Tensor, drawn: Tensor, *, neighbours: int = 3) -> dict[str, Figure]:
    """Improved precision and recall (Kynkaanniemi et al. 2019, section 2).

    Precision: the share of drawn pictures that lie in a ball around a real one, its radius the distance to that one's
    k-th nearest real picture. Recall: the same with the sets exchanged. Intervals are those of a rate (Wilson), with
    the balls taken as given.

    Raises:
        ValueError: as `frechet_distance` and `kth_neighbour`.
    """
    check_features(real, drawn)
    real, drawn = real.double(), drawn.double()
    return {
        "precision": rate(_in_balls(real, drawn, neighbours).any(0).tolist()),
        "recall": rate(_in_balls(drawn, real, neighbours).any(0).tolist()),
    }


def density_coverage(real: Tensor, drawn: Tensor, *, neighbours: int = 5) -> dict[str, Figure]:
    """Density and coverage (Naeem et al. 2020, section 3.2): like precision and recall, but an outlier counts little.

    Density: how many balls around real pictures hold a drawn one, over k; about 1 where the sets are alike. Coverage:
    the share of real pictures whose ball holds a drawn one.

    Raises:
        ValueError: as `precision_recall`.
    """
    check_features(real, drawn)
    inside = _in_balls(real.double(), drawn.double(), neighbours)  # [N, M]
    return {
        "density": mean_figure((inside.sum(0).double() / neighbours).tolist()),
        "coverage": rate(inside.any(1).tolist()),
    }


def _in_balls(centres: Tensor, points: Tensor, neighbours: int) -> Tensor:
    """Whether point j lies within the k-th neighbour distance of centre i: bool [N, M]."""
    radii = kth_neighbour(centres, neighbours)
    parts = zip(centres.split(_ROWS), radii.split(_ROWS), strict=True)
    return torch.cat([_distances(part, points) <= radius[:, None] for part, radius in parts])
