"""The figures that papers quote, from features of samples: FID, KID, Inception score; and differences of FID.

The Frechet distance grows with the noise in its moments, so resamples with repetition lie above the value itself. Its
interval therefore comes from a delete-a-group jackknife (Efron and Stein 1981): the samples are dealt into groups, each
is left out in turn, and the value is reported +- 1.96 standard errors. The moments of a group are summed once, so the
interval costs one eigendecomposition a group. Roots of its eigenvalues are less precise than the value, alike in all
groups.
Sums are in double precision.

The interval is about the mean distance of sets of this size, which lies above the distance of the laws. The limit of
many samples is extrapolated beside it (`frechet_with_limit`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType

import torch
from torch import Tensor

from visual_spec.eval.intervals import Z_95, Figure
from visual_spec.eval.quality.discrepancy import Sums, cubic_kernel
from visual_spec.files.extras import extra

GROUPS = 20  # of the jackknife
_ROUNDING = 1e-2  # of a covariance that others stated, relative to its largest entry or eigenvalue
_SUBSETS = 100  # of KID, as torch-fidelity takes them
_SPLITS, _T_95 = (
    10,
    2.2621571628,
)  # of the Inception score, and the 97.5 % point of Student's law of 9 degrees


def check_features(first: Tensor, second: Tensor) -> None:
    """Refuse, by ValueError, sets of fewer than 2 samples, and features of different width or not finite."""
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


def frechet_distance(first: Tensor, second: Tensor) -> float:
    """Squared Frechet distance of two Gaussians with the moments of two sets (Heusel et al. 2017, eq. 6).

    In double precision. A set smaller than its number of features gives a covariance without full rank, which is legal
    here.

    Args:
        first, second: features [N, D] and [M, D].

    Raises:
        ValueError: as `check_features`.
    """
    check_features(first, second)
    return gaussian_distance(Gaussian.of(first), Gaussian.of(second))


@dataclass(frozen=True)
class Gaussian:
    """Mean and covariance of features, in double precision.

    Attributes:
        mean: [D].
        root: [K, D], with root.T @ root the covariance. K is at most D.
    """

    mean: Tensor
    root: Tensor

    @classmethod
    def of(cls, features: Tensor) -> Gaussian:
        """The moments of features [N, D]; the covariance is the unbiased one. Its root never passes through squares."""
        check_features(features, features)
        features = features.double()
        mean = features.mean(0)
        root = (features - mean) / math.sqrt(len(features) - 1)
        return cls(mean, torch.linalg.qr(root, mode="r").R if len(root) > root.shape[1] else root)

    @classmethod
    def of_moments(cls, mean: Tensor, covariance: Tensor) -> Gaussian:
        """The Gaussian of a mean [D] and a covariance [D, D], whose eigenvalues a little below zero are rounding.

        Raises:
            ValueError: a matrix that is not symmetric, or has eigenvalues far below zero.
        """
        if (covariance - covariance.T).abs().max() > _ROUNDING * covariance.abs().max():
            raise ValueError("not symmetric")
        values, vectors = torch.linalg.eigh(covariance)
        if values[0] < -_ROUNDING * values.abs().max():
            raise ValueError(f"its eigenvalues go from {values[0]:.4g} to {values[-1]:.4g}")
        return cls(mean, values.clamp_min(0).sqrt()[:, None] * vectors.T)


def gaussian_distance(first: Gaussian, second: Gaussian) -> float:
    """The squared Frechet distance (Heusel et al. 2017, eq. 6).

    With S1 = A^T A and S2 = B^T B, the trace of the root of S1 S2 is the sum of the singular values of A B^T. Roots of
    eigenvalues of the product itself would turn rounding of 1e-16 into 1e-8 for each of thousands.
    """
    inner = torch.linalg.svdvals(first.root @ second.root.T).sum()
    shift = (first.mean - second.mean).square().sum()
    distance = shift + first.root.square().sum() + second.root.square().sum() - 2 * inner
    return max(0.0, distance.item())


def frechet_with_limit(
    drawn: Tensor, reference: Gaussian, strata: Sequence[str] | None = None, owners: Tensor | None = None
) -> tuple[Figure, Figure | None]:
    """The distance of features [N, D] to a reference that is fixed, with its interval over other samples; and the
    distance that it tends to for many samples (Chong and Forsyth 2020).

    The distance of N samples lies above its limit by about a constant over N, so the limit is twice the distance of all
    samples less the mean distance of two halves. To first order it varies as the distance itself, and its interval has
    the same width. In simulations it holds the limit in 92 to 96 % of sets where a half has 8 samples a feature, in
    83 % where it has 3. It may lie below 0. The reference's own moments count as exact.

    Args:
        strata: what each sample was asked for; see `deal`.
        owners: the sample [N] that each row of features is of, from 0 on; rows of one sample are left out together.
            None: one row a sample.

    Returns:
        the distance; its limit, None where a half has fewer than 2 samples a feature (`limit_size`).

    Raises:
        ValueError: other features than the reference's, fewer than 2 samples a group, or values that are not finite.
    """
    groups = _Groups(drawn, reference, strata, owners)
    whole, left_out = groups.left_out
    figure = _jackknife(whole, left_out)
    limit = None
    if groups.samples >= limit_size(drawn.shape[1]) and len(groups.sizes) % 2 == 0:
        half = len(groups.sizes) // 2
        value = 2 * whole - (groups.distance(range(half)) + groups.distance(range(half, 2 * half))) / 2
        reach = figure["high"] - whole
        limit = {"value": value, "low": value - reach, "high": value + reach}
    return figure | {"low": max(0.0, figure["low"])}, limit


def frechet_of_pairs(drawn: Tensor, other: Tensor, strata: Sequence[str] | None = None) -> Figure:
    """The distance of two sets, and its interval over other prompts: sample i of both has the same prompt.

    Both are left out together, so the distance of a set to itself is known exactly.

    Raises:
        ValueError: as `frechet_with_limit`, or sets of different size.
    """
    check_features(drawn, other)
    if len(drawn) != len(other):
        raise ValueError(f"{len(drawn)} and {len(other)} samples given; paired sets have one size")
    count = min(GROUPS, len(drawn) // 2)
    dealt = deal(len(drawn), count, strata)
    left_out = [
        frechet_distance(drawn[dealt != place], other[dealt != place]) for place in range(count) if count > 1
    ]
    figure = _jackknife(frechet_distance(drawn, other), left_out)
    return figure | {"low": max(0.0, figure["low"])}


def limit_size(width: int) -> int:
    """The fewest samples of `width` features whose distance is extrapolated."""
    return max(4 * width, 2 * GROUPS)


def frechet_difference(
    first: Tensor,
    second: Tensor,
    reference: Gaussian,
    strata: Sequence[str] | None = None,
    owners: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Figure:
    """The distance of the first set less the distance of the second, and its interval.

    Sample i of both has the same prompt and seed, and both are left out together. So what the two have in common falls
    out of the interval, which is far narrower than for the distances themselves.

    Args:
        owners: of the rows of both, as of `frechet_with_limit`.

    Raises:
        ValueError: as `frechet_with_limit`, or sets of different size.
    """
    groups = _Groups(first, reference, strata, owners[0])
    others = _Groups(second, reference, strata, owners[1])
    if groups.samples != others.samples:
        raise ValueError(f"{groups.samples} and {others.samples} samples given; paired sets have one size")
    (one, one_left), (other, other_left) = groups.left_out, others.left_out
    return _jackknife(one - other, [a - b for a, b in zip(one_left, other_left, strict=True)])


def deal(count: int, groups: int, strata: Sequence[str] | None = None) -> Tensor:
    """The group of each of `count` samples, [N]: at random, always alike, and each stratum as evenly as can be.

    By their places alone, classes drawn in turn would fall each into the same group, and groups of different classes
    differ far more than sets of samples do. Without strata, or where a class has fewer samples than there are groups,
    the interval counts which classes a group has, and is too wide: twice with 2 samples of each of 1,000 classes.

    Args:
        strata: what each sample was asked for; None: not known.
    """
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    if strata is not None:
        first: dict[str, int] = {}
        ranks = [first.setdefault(strata[int(place)], len(first)) for place in order]
        order = order[torch.tensor(ranks).argsort(stable=True)]
    dealt = torch.empty(count, dtype=torch.long)
    dealt[order] = torch.arange(count) % groups
    return dealt


class _Groups:
    """Features dealt into groups, with their sums, from which distances without some of the groups follow."""

    def __init__(
        self,
        features: Tensor,
        reference: Gaussian,
        strata: Sequence[str] | None,
        owners: Tensor | None = None,
    ) -> None:
        check_features(features, features)
        if features.shape[1] != len(reference.mean):
            raise ValueError(
                f"{features.shape[1]} features of a sample, and {len(reference.mean)} of the reference"
            )
        self.features, self.reference = features.double(), reference
        self.centre = self.features.mean(0)
        self.samples = len(features) if owners is None else int(owners.max()) + 1
        count = min(GROUPS, self.samples // 2)
        dealt = deal(self.samples, count, strata)
        dealt = dealt if owners is None else dealt[owners]
        groups = [self.features[dealt == place] - self.centre for place in range(count)]
        self.sizes = [len(group) for group in groups]
        self.sums = torch.stack([group.sum(0) for group in groups])  # [G, D]
        self.squares = torch.stack([group.T @ group for group in groups])  # [G, D, D]

    @cached_property
    def left_out(self) -> tuple[float, list[float]]:
        """The distance of all samples, and without each group."""
        whole = gaussian_distance(Gaussian.of(self.features), self.reference)
        if len(self.sizes) < 2:
            return whole, []
        total, square = self.sums.sum(0), self.squares.sum(0)
        without = [
            self._distance(len(self.features) - size, total - self.sums[place], square - self.squares[place])
            for place, size in enumerate(self.sizes)
        ]
        return whole, without

    def distance(self, groups: range) -> float:
        """The distance of the samples of some groups."""
        places = list(groups)
        size = sum(self.sizes[place] for place in places)
        return self._distance(size, self.sums[places].sum(0), self.squares[places].sum(0))

    def _distance(self, size: int, total: Tensor, square: Tensor) -> float:
        """The distance of `size` samples, by the sums of their features less the centre, and of their squares."""
        mean, root = total / size, self.reference.root
        covariance = (square - size * torch.outer(mean, mean)) / (size - 1)
        inner = torch.linalg.eigvalsh(root @ covariance @ root.T).clamp_min(0).sqrt().sum()
        shift = (self.reference.mean - self.centre - mean).square().sum()
        return (shift + root.square().sum() + covariance.trace() - 2 * inner).item()


def _jackknife(value: float, left_out: list[float]) -> Figure:
    count = len(left_out)
    if count < 2:
        return {"value": value, "low": -math.inf, "high": math.inf}
    mean = math.fsum(left_out) / count
    error = math.sqrt((count - 1) / count * math.fsum((one - mean) ** 2 for one in left_out))
    return {"value": value, "low": value - Z_95 * error, "high": value + Z_95 * error}


def kernel_inception_distance(
    drawn: Tensor, reference: Tensor, *, subset_size: int = 1000, device: str = "cpu"
) -> Figure:
    """KID (Binkowski et al. 2018): the mean over 100 random subsets of the unbiased estimate, by torch-fidelity.

    The interval is +- 1.96 standard errors over other samples of both sets: a delete-one jackknife of the estimate by
    all samples, and what the choice of 100 subsets adds. Papers quote `subset_spread`, the standard deviation over the
    subsets, which is the spread of one subset's figure, and 0 where a subset is the whole set.

    Args:
        subset_size: at most the size of the smaller set, which it is cut to.
        device: where the kernel matrices are computed.

    Raises:
        ValueError: as `check_features`, or fewer than 3 samples in a set.
        ImportError: torch-fidelity is missing (extra `eval`).
    """
    check_features(drawn, reference)
    size = min(subset_size, len(drawn), len(reference))
    if size < 3:
        raise ValueError(f"{len(drawn)} and {len(reference)} samples given; KID needs at least 3 of each")
    function = _fidelity("metric_kid").kid_features_to_metric
    figures = function(drawn.float(), reference.float(), kid_subset_size=size, verbose=False)
    mean, spread = (figures[f"kernel_inception_distance_{name}"] for name in ("mean", "std"))
    sets = [features.float().to(device) for features in (drawn, reference)]
    error = Sums.of(sets[0], sets[1], cubic_kernel, paired=False).error()
    reach = Z_95 * math.hypot(error, spread / math.sqrt(_SUBSETS))
    return {
        "value": mean,
        "low": mean - reach,
        "high": mean + reach,
        "subset_size": size,
        "subset_spread": spread,
    }


def inception_score(logits: Tensor) -> Figure:
    """Inception score (Salimans et al. 2016) of logits [N, C] without bias, over ten splits, by torch-fidelity.

    The interval is the mean +- 2.26 standard errors over the splits, by Student's law. It is about the mean score of
    splits of this size.

    Raises:
        ValueError: fewer than ten samples.
        ImportError: torch-fidelity is missing (extra `eval`).
    """
    if len(logits) < _SPLITS:
        raise ValueError(f"{len(logits)} samples given; the Inception score splits them into ten parts")
    figures = _fidelity("metric_isc").isc_features_to_metric(logits)
    mean, spread = (figures[f"inception_score_{name}"] for name in ("mean", "std"))
    reach = _T_95 * spread / math.sqrt(_SPLITS - 1)  # the spread is over N, not N - 1
    return {"value": mean, "low": mean - reach, "high": mean + reach}


def inception_score_adm(logits: Tensor, strata: Sequence[str] | None = None, *, split: int = 5000) -> Figure:
    """Inception score of logits [N, C] without bias as ADM's evaluator has it (Dhariwal and Nichol 2021).

    The mean over splits of 5,000 samples in their order, the last of which may be shorter; torch-fidelity shuffles the
    samples and makes ten splits of any size. The interval comes from a delete-a-group jackknife.

    Args:
        strata: what each sample was asked for; see `deal`.

    Raises:
        ValueError: fewer than 2 samples.
    """
    if len(logits) < 2:
        raise ValueError(f"{len(logits)} samples given; the Inception score needs at least 2")
    logs = logits.double().log_softmax(-1)
    parts = torch.arange(len(logits)) // split

    def score(kept: Tensor) -> float:
        scores = []
        for part in range(int(parts[-1]) + 1):
            rows = logs[kept & (parts == part)]
            if len(rows):
                mean = rows.exp().mean(0)
                scores.append(math.exp((rows.exp() * (rows - mean.log())).nansum(1).mean().item()))
        return math.fsum(scores) / len(scores)

    count = min(GROUPS, len(logits) // 2)
    dealt = deal(len(logits), count, strata)
    left_out = [score(dealt != place) for place in range(count)] if count > 1 else []
    return _jackknife(score(torch.ones(len(logits), dtype=torch.bool)), left_out)


def _fidelity(name: str) -> ModuleType:
    """A module of torch-fidelity."""
    import importlib

    with extra("eval", "this figure needs torch-fidelity"):
        return importlib.import_module(f"torch_fidelity.{name}")
