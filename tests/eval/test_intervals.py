"""Intervals against the equations they solve, and against how often they hold."""

import math

import pytest
import torch

from tests.helpers.refusals import refuses
from visual_spec.eval.intervals import (
    mean_figure,
    rate,
    ratio_figure,
    ratio_with_error,
    share_figure,
    wilson_interval,
)


@pytest.mark.parametrize(("hits", "total"), [(0, 10), (1, 10), (81, 200), (160, 200), (10, 10), (1, 1)])
def test_the_wilson_interval_solves_its_equation(hits, total):
    low, high = wilson_interval(hits, total)
    share = hits / total
    assert 0 <= low <= share <= high <= 1
    # The ends are the rates from which the observed one is z standard deviations away (Wilson 1927).
    for end in (low, high):
        if 0 < end < 1:
            assert abs(share - end) / math.sqrt(end * (1 - end) / total) == pytest.approx(1.959964, rel=1e-5)
    assert (low == 0) == (hits == 0) and (high == 1) == (hits == total)
    figure = {"value": share, "low": low, "high": high, "hits": hits, "total": total}
    assert rate([True] * hits + [False] * (total - hits)) == figure


@pytest.mark.parametrize(("hits", "total"), [(0, 0), (-1, 5), (6, 5)])
def test_the_interval_of_nothing_is_refused(hits, total):
    refuses(ValueError, "0 <= hits <= total", wilson_interval, hits, total)


def test_a_mean_by_hand():
    figure = mean_figure([1.0, 2.0, 6.0])
    assert figure["value"] == 3.0
    reach = 1.959963984540054 * math.sqrt((4 + 1 + 9) / 2 / 3)
    assert (figure["low"], figure["high"]) == (pytest.approx(3 - reach), pytest.approx(3 + reach))
    assert mean_figure([5.0]) == {"value": 5.0, "low": 5.0, "high": 5.0}
    refuses(ValueError, "no values", mean_figure, [])


def test_the_mean_of_shares_stays_a_share():
    inside = [0.5, 0.75, 0.25, 0.5]
    assert share_figure(inside) == mean_figure(inside)
    # Six of seven right in one sample of eight: the normal law ends at 1.014.
    values = [6 / 7] + 7 * [1.0]
    assert mean_figure(values)["high"] > 1
    figure = share_figure(values)
    assert figure["value"] == mean_figure(values)["value"] and figure["value"] < figure["high"] < 1
    low, high = wilson_interval(8, 8)
    assert low < figure["low"]  # shares vary less than rates do
    # Where all are alike the interval is that of a rate, and not without width.
    assert share_figure([1.0] * 8) == {"value": 1.0, "low": low, "high": high}
    assert share_figure([0.0] * 8)["high"] == pytest.approx(1 - low)
    assert share_figure([0.5] * 8)["low"] == pytest.approx(wilson_interval(4, 8)[0])
    refuses(ValueError, r"to 1\.5", share_figure, [0, 1.5])


def test_tokens_over_calls_agree_with_the_benchmark():
    calls = [60, 71, 55, 90, 64]
    value, error = ratio_with_error([256] * len(calls), calls)
    figure = ratio_figure([256] * 5, calls)
    assert figure["value"] == pytest.approx(value)
    assert figure["high"] - figure["value"] == pytest.approx(1.959963984540054 * error)
    refuses(ValueError, "1 values over 0", ratio_figure, [1.0], [])


def test_a_ratio_lies_within_its_interval_about_as_often_as_promised():
    generator = torch.Generator().manual_seed(0)
    inside = 0
    for _ in range(1000):
        below = 5 + torch.rand(40, generator=generator)
        above = 3 * below + torch.randn(40, generator=generator)
        figure = ratio_figure(above.tolist(), below.tolist())
        inside += figure["low"] <= 3 <= figure["high"]
    assert 0.92 < inside / 1000 < 0.97
