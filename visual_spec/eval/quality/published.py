"""The figures that papers quote, from features of samples: FID, KID, Inception score; and differences of FID.

The Frechet distance grows with the noise in its moments, so resamples with repetition lie above the value itself. Its
interval is therefore that of a delete-a-group jackknife (Efron and Stein 1981): the samples are dealt into groups, each
is left out in turn, and value +- 1.96 standard errors is told. The moments of a group are summed once, so the interval
costs one eigendecomposition a group. Sums are in double precision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visual_spec.eval.intervals import Z_95, Figure
from visual_spec.eval.quality.metrics import check_features

GROUPS = 20  # of the jackknife


@dataclass(frozen=True)
class Gaussian:
    """Mean [D] and covariance [D, D] of the features of a reference, in double precision."""

    mean: Tensor
    covariance: Tensor

    @classmethod
    def of(cls, features: Tensor) -> Gaussian:
        """Of features [N, D]; the covariance is the unbiased one."""
        check_features(features, features)
        features = features.double()
        return cls(features.mean(0), features.T.cov())


class FrechetDistance:
    """Squared Frechet distance to one reference (Heusel et al. 2017, eq. 6).

    With S1 = R R^T, the trace of the root of S1 S2 is that of the symmetric R^T S2 R. R is taken once, and has as many
    columns as S1 has rank. Sets of fewer samples than features have eigenvalues that are zero but for rounding. They
    are left out, because the roots of thousands of them would add up to 1e-5.
    """

    def __init__(self, reference: Gaussian) -> None:
        values, vectors = torch.linalg.eigh(reference.covariance)
        kept = _above_rounding(values)
        self._root = vectors[:, kept] * values[kept].sqrt()  # [D, rank]
        self._reference = reference

    def __call__(self, mean: Tensor, covariance: Tensor) -> float:
        values = torch.linalg.eigvalsh(self._root.T @ covariance @ self._root)
        inner = values[_above_rounding(values)].sqrt().sum()
        traces = self._reference.covariance.trace() + covariance.trace()
        return max(0.0, ((self._reference.mean - mean).square().sum() + traces - 2 * inner).item())


def _above_rounding(values: Tensor) -> Tensor:
    """Which of the ascending eigenvalues of a matrix of no negative ones are more than rounding."""
    return values > len(values) * torch.finfo(values.dtype).eps * values[-1:].clamp_min(0)


def frechet(drawn: Tensor, reference: Gaussian) -> Figure:
    """The distance of features [N, D] to a reference, and its interval over other samples; the reference is fixed.

    Raises:
        ValueError: other features than the reference's, fewer than 2 samples a group, or values that are not finite.
    """
    whole, left_out = _leave_groups_out(drawn, FrechetDistance(reference))
    found = _jackknife(whole, left_out)
    return found | {"low": max(0.0, found["low"])}


def frechet_difference(first: Tensor, second: Tensor, reference: Gaussian) -> Figure:
    """The distance of the first set less that of the second, and its interval.

    Sample i of both has the same prompt and seed, and both are left out together. So what the two have in common falls
    out of the interval, which is far narrower than those of the distances themselves.

    Raises:
        ValueError: as `frechet`, or sets of different size.
    """
    if len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} samples given; paired sets have one size")
    distance = FrechetDistance(reference)
    one, one_left = _leave_groups_out(first, distance)
    other, other_left = _leave_groups_out(second, distance)
    return _jackknife(one - other, [a - b for a, b in zip(one_left, other_left, strict=True)])


def _leave_groups_out(features: Tensor, distance: FrechetDistance) -> tuple[float, list[float]]:
    """The distance of all samples, and without each group. Sample i is in group i modulo their number."""
    check_features(features, features)
    if features.shape[1] != len(distance._reference.mean):
        raise ValueError(
            f"{features.shape[1]} features of a sample, and {len(distance._reference.mean)} of the reference"
        )
    count = min(GROUPS, len(features) // 2)
    features = features.double()
    centre = features.mean(0)
    centred = features - centre
    groups = [centred[place::count] for place in range(count)]
    sums = torch.stack([group.sum(0) for group in groups])  # [G, D]
    squares = torch.stack([group.T @ group for group in groups])  # [G, D, D]

    def moments(size: int, total: Tensor, square: Tensor) -> tuple[Tensor, Tensor]:
        mean = total / size
        return centre + mean, (square - size * torch.outer(mean, mean)) / (size - 1)

    total, square = sums.sum(0), squares.sum(0)
    whole = distance(*moments(len(features), total, square))
    left_out = [
        distance(*moments(len(features) - len(group), total - sums[place], square - squares[place]))
        for place, group in enumerate(groups)
        if count > 1
    ]
    return whole, left_out


def _jackknife(value: float, left_out: list[float]) -> Figure:
    count = len(left_out)
    if count < 2:
        return {"value": value, "low": -math.inf, "high": math.inf}
    mean = math.fsum(left_out) / count
    error = math.sqrt((count - 1) / count * math.fsum((one - mean) ** 2 for one in left_out))
    return {"value": value, "low": value - Z_95 * error, "high": value + Z_95 * error}


def kernel_inception_distance(drawn: Tensor, reference: Tensor, *, subset_size: int = 1000) -> Figure:
    """KID (Binkowski et al. 2018): the mean over 100 random subsets of the unbiased estimate, by torch-fidelity.

    The interval is +- 1.96 standard deviations over the subsets, which papers quote: the spread of one subset's figure,
    wider than the uncertainty of the mean.

    Args:
        subset_size: at most the size of the smaller set, which it is cut to.

    Raises:
        ValueError: as `check_features`.
        ImportError: torch-fidelity is missing (extra `eval`).
    """
    check_features(drawn, reference)
    size = min(subset_size, len(drawn), len(reference))
    function = _fidelity("metric_kid").kid_features_to_metric
    found = function(drawn.float(), reference.float(), kid_subset_size=size, verbose=False)
    mean, spread = (found[f"kernel_inception_distance_{name}"] for name in ("mean", "std"))
    return {"value": mean, "low": mean - Z_95 * spread, "high": mean + Z_95 * spread, "subset_size": size}


def inception_score(logits: Tensor) -> Figure:
    """Inception score (Salimans et al. 2016) of logits [N, C] without bias, over ten splits, by torch-fidelity.

    The interval is the mean +- 1.96 standard errors over the splits.

    Raises:
        ValueError: fewer than ten samples.
        ImportError: torch-fidelity is missing (extra `eval`).
    """
    if len(logits) < 10:
        raise ValueError(f"{len(logits)} samples given; the Inception score splits them into ten parts")
    found = _fidelity("metric_isc").isc_features_to_metric(logits)
    mean, spread = (found[f"inception_score_{name}"] for name in ("mean", "std"))
    reach = Z_95 * spread / math.sqrt(10 - 1)
    return {"value": mean, "low": mean - reach, "high": mean + reach}


def _fidelity(name: str) -> Any:
    """A module of torch-fidelity."""
    import importlib

    try:
        return importlib.import_module(f"torch_fidelity.{name}")
    except ImportError as error:
        raise ImportError("this figure needs torch-fidelity: install visual-spec[eval]") from error
