"""The squared maximum mean discrepancy of two sets (Gretton et al. 2012), and how far other samples would move it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from visual_spec.eval.intervals import Z_95, Figure

_ROWS = 1024  # rows of a kernel matrix held at once
Kernel = Callable[[Tensor, Tensor], Tensor]  # [N, D], [M, D] -> [N, M]


def gaussian_kernel(bandwidth: float) -> Kernel:
    """exp(-d^2 / (2 bandwidth^2)) of the distance d, exactly 1 for equal points."""

    def kernel(first: Tensor, second: Tensor) -> Tensor:
        # Without the matrix product, which does not give 0 for two equal rows.
        distances = torch.cdist(first, second, compute_mode="donot_use_mm_for_euclid_dist")
        return torch.exp(-0.5 * (distances / bandwidth) ** 2)

    return kernel


def gaussian_product_kernel(bandwidth: float) -> Kernel:
    """`gaussian_kernel` by a matrix product, which is fast, and exact to rounding for features of about one length."""

    def kernel(first: Tensor, second: Tensor) -> Tensor:
        lengths = first.square().sum(1)[:, None] + second.square().sum(1)
        return torch.exp((2 * first @ second.T - lengths) / (2 * bandwidth**2))

    return kernel


def cubic_kernel(first: Tensor, second: Tensor) -> Tensor:
    """(x y / D + 1)^3, of KID (Binkowski et al. 2018)."""
    return (first @ second.T / first.shape[1] + 1) ** 3


@dataclass(frozen=True)
class Sums:
    """Sums over kernel matrices in double precision, from which the discrepancy without some samples follows.

    Attributes:
        within: of each set, of every sample with the others, [N] and [M].
        own: of each set, of every sample with itself.
        rows, columns: of each sample with the other set, [N] and [M].
        paired: sample i of one with sample i of the other, [N]; None: sets without pairs.
    """

    within: tuple[Tensor, Tensor]
    own: tuple[Tensor, Tensor]
    rows: Tensor
    columns: Tensor
    paired: Tensor | None

    @classmethod
    def of(cls, first: Tensor, second: Tensor, kernel: Kernel, *, paired: bool) -> Sums:
        """Sum the kernel over features [N, D] and [M, D]."""
        own = tuple(
            torch.cat([kernel(row[None], row[None])[0].double() for row in points])
            for points in (first, second)
        )
        within = tuple(
            _sums(points, points, kernel)[0] - one for points, one in zip((first, second), own, strict=True)
        )
        pairs = None
        if paired:
            pairs = torch.cat(
                [kernel(a[None], b[None])[0].double() for a, b in zip(first, second, strict=True)]
            )
        return cls((within[0], within[1]), (own[0], own[1]), *_sums(first, second, kernel), pairs)

    def value(self, *, biased: bool = False) -> float:
        """The estimate; unbiased (eq. 3), or with each sample's likeness to itself (eq. 5)."""
        sizes = len(self.rows), len(self.columns)
        parts = [
            _mean(within.sum(), own.sum(), size, biased)
            for within, own, size in zip(self.within, self.own, sizes, strict=True)
        ]
        return (parts[0] + parts[1] - 2 * self.rows.sum() / math.prod(sizes)).item()

    def error(self, *, biased: bool = False) -> float:
        """Its standard error by a delete-one jackknife (Efron and Stein 1981): pairs are left out together.

        Without pairs the sets are independent, and the variance is the sum of theirs.
        """
        count, other = len(self.rows), len(self.columns)
        across = self.rows.sum()
        first, second = (
            _mean(within.sum() - 2 * within, own.sum() - own, len(within) - 1, biased)
            for within, own in zip(self.within, self.own, strict=True)
        )
        if self.paired is not None:
            left = first + second - 2 * (across - self.rows - self.columns + self.paired) / (count - 1) ** 2
            return math.sqrt(_variance(left))
        one = first - 2 * (across - self.rows) / ((count - 1) * other)
        two = second - 2 * (across - self.columns) / (count * (other - 1))
        return math.sqrt(_variance(one) + _variance(two))

    def figure(self, scale: float = 1.0, *, biased: bool = False) -> Figure:
        """`value` +- 1.96 of `error`, both times `scale`."""
        value, reach = scale * self.value(biased=biased), Z_95 * scale * self.error(biased=biased)
        return {"value": value, "low": value - reach, "high": value + reach}


def _mean(within: Tensor, own: Tensor, size: int, biased: bool) -> Tensor:
    return (within + own) / size**2 if biased else within / (size * (size - 1))


def _variance(left_out: Tensor) -> float:
    count = len(left_out)
    return (count - 1) / count * (left_out - left_out.mean()).square().sum().item()


def _sums(first: Tensor, second: Tensor, kernel: Kernel) -> tuple[Tensor, Tensor]:
    """Sums of the kernel matrix [N, M] along its rows [N], and along its columns [M]."""
    rows, columns = [], torch.zeros(len(second), dtype=torch.float64, device=second.device)
    for part in first.split(_ROWS):
        values = kernel(part, second).double()
        rows.append(values.sum(1))
        columns += values.sum(0)
    return torch.cat(rows), columns
