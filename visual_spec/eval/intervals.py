"""Figures with their 95 % intervals, as {value, low, high}, and quantiles of timings."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Figure = dict[str, float]
QUANTILES = {"p20": 0.2, "p50": 0.5, "p80": 0.8}
Z_95 = 1.959963984540054  # the 97.5 % point of the normal law


def wilson_interval(hits: int, total: int, z: float = Z_95) -> tuple[float, float]:
    """The interval of a rate, 95 % by default (Wilson 1927; Brown, Cai and DasGupta 2001, section 3.1.1).

    Raises:
        ValueError: unless 0 <= hits <= total and total >= 1.
    """
    if total < 1 or not 0 <= hits <= total:
        raise ValueError(f"{hits} hits of {total} given; pass 0 <= hits <= total and total >= 1")
    return share_interval(hits / total, total, z)


def share_interval(share: float, size: float, z: float = Z_95) -> tuple[float, float]:
    """Wilson's interval of a share from 0 to 1 whose variance is share (1 - share) / size; it stays from 0 to 1.

    For a share of another variance, `size` is the number of independent samples that would give it.
    """
    shrink = 1 + z * z / size
    centre = (share + z * z / (2 * size)) / shrink
    reach = z / shrink * math.sqrt(share * (1 - share) / size + z * z / (4 * size * size))
    # At the ends the formula gives exactly 0 and 1, which rounding would miss.
    return (0.0 if share == 0 else centre - reach), (1.0 if share == 1 else centre + reach)


def rate(values: Sequence[bool]) -> Figure:
    """The share of true values, at least one, with its Wilson interval: {value, low, high, hits, total}."""
    hits, total = sum(values), len(values)
    low, high = wilson_interval(hits, total)
    return {"value": hits / total, "low": low, "high": high, "hits": hits, "total": total}


def mean_figure(values: Sequence[float]) -> Figure:
    """The mean of values, at least one, with its interval by the normal law; a single value is its own interval."""
    if not values:
        raise ValueError("no values; a mean needs at least one")
    mean = math.fsum(values) / len(values)
    spread = math.fsum((value - mean) ** 2 for value in values) / max(1, len(values) - 1)
    reach = Z_95 * math.sqrt(spread / len(values))
    return {"value": mean, "low": mean - reach, "high": mean + reach}


def rounded(figure: Figure) -> Figure:
    """The figure to four digits, as records keep it."""
    return {key: round(value, 4) for key, value in figure.items()}


def share_figure(values: Sequence[float]) -> Figure:
    """The mean of shares from 0 to 1, each over one sample, with its interval, which stays from 0 to 1.

    It is the interval of `mean_figure` unless that leaves the range or has no width. Then it is Wilson's, for as many
    samples as give the variance of the mean, and at least as many as there are: shares vary no more than rates do.

    Raises:
        ValueError: no values, or one out of range.
    """
    if values and not (min(values) >= 0 and max(values) <= 1):
        raise ValueError(f"shares from {min(values)} to {max(values)}; pass numbers from 0 to 1")
    figure = mean_figure(values)
    share, reach = figure["value"], figure["high"] - figure["value"]
    if reach > 0 and figure["low"] >= 0 and figure["high"] <= 1:
        return figure
    size = max(len(values), share * (1 - share) * (Z_95 / reach) ** 2) if reach > 0 else len(values)
    low, high = share_interval(share, size)
    return {"value": share, "low": low, "high": high}


def ratio_with_error(above: Sequence[float], below: Sequence[float]) -> tuple[float, float]:
    """Sum over sum of paired values, and its standard error by the delta method (Cochran 1977, section 6.4).

    The error of a single pair is 0.

    Raises:
        ValueError: sequences that are empty or of different length, or a sum below of zero.
    """
    if len(above) != len(below) or not below or sum(below) == 0:
        raise ValueError(
            f"{len(above)} values over {len(below)}; pass as many of each, with a sum that is not 0"
        )
    value = math.fsum(above) / math.fsum(below)
    residuals = [a - value * b for a, b in zip(above, below, strict=True)]
    count, mean = len(below), math.fsum(below) / len(below)
    return value, math.sqrt(math.fsum(r * r for r in residuals) / max(1, count - 1) / count) / abs(mean)


def ratio_figure(above: Sequence[float], below: Sequence[float]) -> Figure:
    """`ratio_with_error` as a value with its interval."""
    value, error = ratio_with_error(above, below)
    return {"value": value, "low": value - Z_95 * error, "high": value + Z_95 * error}


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """p20, p50 and p80 of values, at least one, interpolated linearly between the two nearest."""
    if not values:
        raise ValueError("no values; a quantile needs at least one")
    return dict(zip(QUANTILES, np.quantile(values, [*QUANTILES.values()]).tolist(), strict=True))
