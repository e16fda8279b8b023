"""Precision, recall, density and coverage: which samples lie within balls around others, of features [N, D].

A matrix of all distances of 50,000 samples has 20 GB. It is computed a few rows at a time, in single precision by a
matrix product, on a GPU where there is one. What rounding could turn is computed again from the differences, in double
precision, so the answers are as in double precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from visual_spec.eval.intervals import Figure, mean_figure, share_interval
from visual_spec.eval.quality.published import check_features

Report = Callable[[str], object]
_ROWS = 512  # of a distance matrix held at once: 100 MB for 50,000 samples
_PAIRS = 4096  # whose differences are held at once
_CANDIDATES = 16  # more than the neighbours asked for, whose distances are computed from differences
_TIE = 1e-12  # relative; distances this close are equal
_REPORTED = 10_000  # samples from which progress is reported


class _Points:
    """Features about a common centre and of a common size, twice: in double precision, and in single on a device."""

    def __init__(self, features: Tensor, centre: Tensor, size: Tensor, device: str) -> None:
        self.exact = (features.double() - centre).div_(size).to(device)
        self.rough = self.exact.float()
        self.squares = self.exact.square().sum(1)
        # Of the matrix product, of the norms, and of the sums: Higham 2002, section 3.1.
        self.error = (features.shape[1] + 16) * 2.0**-24

    def __len__(self) -> int:
        return len(self.exact)

    def least_squares(self, rows: slice, other: _Points) -> Tensor:
        """Squared distances [R, M] in single precision, not above the true ones."""
        norms = self.squares[rows, None].float() + other.squares.float()
        return norms * (1 - self.error) - 2 * self.rough[rows] @ other.rough.T

    def slack(self, rows: Tensor, other: _Points, columns: Tensor) -> Tensor:
        """Return how far `least_squares` may lie below the true squared distances of pairs, [P]."""
        return 4 * self.error * (self.squares[rows] + other.squares[columns])

    def true_squares(self, rows: Tensor, other: _Points, columns: Tensor) -> Tensor:
        """Squared distances of pairs [P], from their differences."""
        squares = [
            (self.exact[one] - other.exact[two]).square().sum(1)
            for one, two in zip(rows.split(_PAIRS), columns.split(_PAIRS), strict=True)
        ]
        return torch.cat(squares) if squares else self.squares.new_zeros(0)


@dataclass(frozen=True)
class _Cover:
    """Which points lie in balls.

    Attributes:
        balls: of each point, how many hold it, [M].
        held: of each ball, whether it holds a point, [N].
        alone: of each ball, how many points no other one holds, [N].
    """

    balls: Tensor
    held: Tensor
    alone: Tensor


def precision_recall(
    real: Tensor,
    drawn: Tensor,
    *,
    neighbours: int = 3,
    device: str = "cpu",
    report: Report = lambda text: None,
) -> dict[str, Figure]:
    """Improved precision and recall (Kynkaanniemi et al. 2019, section 2).

    Precision: the share of drawn pictures that lie in a ball around a real one, its radius the distance to that one's
    k-th nearest real picture. Recall: the same with the sets exchanged.

    An interval counts what other points would change, and what other balls would: it is Wilson's for a variance that is
    the binomial variance and a jackknife over balls, by the points that no other ball holds. It held the mean of a
    law in 96 to 100 % of simulated sets, so it is wide, up to twice; with the balls as given it held it in 58 to 94 %.

    Args:
        device: where the distances are computed.
        report: is called with how far the work is, of 10,000 samples or more.

    Raises:
        ValueError: as `frechet_distance`; unless 1 <= neighbours < N.
    """
    check_features(real, drawn)
    (one, other), _ = _prepared(device, real, drawn)
    with _full_precision():
        return {
            "precision": _share(_cover(one, other, neighbours, report)),
            "recall": _share(_cover(other, one, neighbours, report)),
        }


def density_coverage(
    real: Tensor, drawn: Tensor, *, neighbours: int = 5, device: str = "cpu"
) -> dict[str, Figure]:
    """Density and coverage (Naeem et al. 2020, section 3.2): like precision and recall, but an outlier counts little.

    Density: how many balls around real pictures hold a drawn one, over k; about 1 where the sets are alike. Coverage:
    the share of real pictures whose ball holds a drawn one. Their intervals take the other set as given, and are
    narrow by that.

    Raises:
        ValueError: as `precision_recall`.
    """
    check_features(real, drawn)
    (one, other), _ = _prepared(device, real, drawn)
    with _full_precision():
        cover = _cover(one, other, neighbours, lambda text: None)
    hits, total = int(cover.held.sum()), len(cover.held)
    low, high = share_interval(hits / total, total)
    return {
        "density": mean_figure((cover.balls.double() / neighbours).tolist()),
        "coverage": {"value": hits / total, "low": low, "high": high, "hits": hits, "total": total},
    }


def _prepared(device: str, *sets: Tensor) -> tuple[list[_Points], float]:
    """The sets about the mean of all, in units of their size, and the size."""
    count = sum(map(len, sets))
    centre = sum((features.double().sum(0) for features in sets), torch.zeros(())) / count
    lengths = [(features.double() - centre).norm(dim=1).sum() for features in sets]
    size = torch.stack(lengths).sum() / count
    size = size if size > 0 else torch.ones_like(size)
    return [_Points(features, centre, size, device) for features in sets], size.item()


@contextmanager
def _full_precision() -> Iterator[None]:
    """Matrix products of single precision round as their name says, whatever the program has set."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _chunks(count: int, what: str, report: Report) -> Iterator[slice]:
    reported = 0
    for first in range(0, count, _ROWS):
        yield slice(first, min(first + _ROWS, count))
        done = min(first + _ROWS, count)
        if count >= _REPORTED and done - reported >= count / 10:
            reported = done
            report(f"{what} of {done:,} of {count:,} samples")


def _kth_squares(points: _Points, neighbours: int, report: Report) -> Tensor:
    """Squared distance [N] to the k-th nearest other point."""
    kept = min(len(points) - 1, neighbours + _CANDIDATES)
    parts = []
    for rows in _chunks(len(points), "neighbours", report):
        least = points.least_squares(rows, points)
        places = torch.arange(rows.start, rows.stop, device=least.device)
        least[torch.arange(len(places), device=least.device), places] = math.inf
        bound, nearest = least.topk(kept, largest=False)
        true = points.true_squares(places.repeat_interleave(kept), points, nearest.flatten())
        squares = true.reshape(-1, kept).kthvalue(neighbours, dim=1).values
        if kept < len(points) - 1:
            # What is no candidate lies at least as far as the last one may.
            for row in (bound[:, -1] < squares).nonzero()[:, 0].tolist():
                squares[row] = _kth_of_all(points, rows.start + row, neighbours)
        parts.append(squares)
    return torch.cat(parts)


def _kth_of_all(points: _Points, place: int, neighbours: int) -> Tensor:
    columns = torch.arange(len(points), device=points.exact.device)
    true = points.true_squares(torch.full_like(columns, place), points, columns)
    true[place] = math.inf
    return true.kthvalue(neighbours).values


def _cover(centres: _Points, points: _Points, neighbours: int, report: Report) -> _Cover:
    """Balls around all centres, as wide as the distance to the k-th nearest other centre."""
    if not 1 <= neighbours < len(centres):
        raise ValueError(f"neighbours={neighbours} of {len(centres)} pictures; pass 1 to {len(centres) - 1}")
    radii = _kth_squares(centres, neighbours, report) * (1 + _TIE)
    balls = torch.zeros(len(points), dtype=torch.long, device=radii.device)
    owner, held = torch.zeros_like(balls), []
    for rows in _chunks(len(centres), "balls", report):
        inside = _inside(centres, rows, points, radii)
        balls += inside.sum(0)
        owner = torch.where(inside.any(0), inside.byte().argmax(0) + rows.start, owner)
        held.append(inside.any(1))
    alone = torch.bincount(owner[balls == 1], minlength=len(centres))
    return _Cover(balls.cpu(), torch.cat(held).cpu(), alone.cpu())


def _inside(centres: _Points, rows: slice, points: _Points, radii: Tensor) -> Tensor:
    """Return whether point j lies in the ball of centre i, bool [R, M]; decided in double precision."""
    least = centres.least_squares(rows, points)
    radius = radii[rows, None].float()
    inside = least <= radius * (1 + 2.0**-22)
    row, column = inside.nonzero(as_tuple=True)
    place = row + rows.start
    near = least[row, column] + centres.slack(place, points, column) >= radii[place]
    row, column, place = row[near], column[near], place[near]
    inside[row, column] = centres.true_squares(place, points, column) <= radii[place]
    return inside


def _share(cover: _Cover) -> Figure:
    """The share of points in balls, with its interval."""
    total, count = len(cover.balls), len(cover.alone)
    hits = int((cover.balls > 0).sum())
    share = hits / total
    lost = cover.alone.double() / total  # without a ball
    of_balls = (count - 1) / count * (lost - lost.mean()).square().sum().item()
    variance = share * (1 - share) / total + of_balls
    size = share * (1 - share) / variance if 0 < share < 1 else min(total, count)
    low, high = share_interval(share, size)
    return {"value": share, "low": low, "high": high, "hits": hits, "total": total}
