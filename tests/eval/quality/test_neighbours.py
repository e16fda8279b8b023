"""Precision, recall, density and coverage against plain loops in double precision, and what their intervals hold."""

import math

import numpy as np
import pytest
import torch

from tests.helpers.refusals import refuses
from visual_spec.eval.quality import neighbours as quality
from visual_spec.eval.quality.neighbours import density_coverage, precision_recall


def sample(count: int, width: int, seed: int, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def kth_neighbour(features, neighbours):
    """Distance [N] of each sample to its k-th nearest other one."""
    (points,), size = quality._prepared("cpu", features)
    return quality._kth_squares(points, neighbours, print).sqrt() * size


def loops(centres, points, neighbours):
    """Which points lie within the k-th neighbour distance of which centres, one pair at a time."""
    inside = []
    for i, centre in enumerate(centres):
        others = sorted(math.dist(centre, other) for j, other in enumerate(centres) if j != i)
        inside.append([math.dist(centre, point) <= others[neighbours - 1] for point in points])
    return inside


@pytest.mark.parametrize("rows", [512, 7])
@pytest.mark.parametrize("neighbours", [1, 3, 5])
def test_precision_and_recall_against_loops(neighbours, rows, monkeypatch):
    monkeypatch.setattr(quality, "_ROWS", rows)
    real, drawn = sample(40, 3, 30), 1.5 * sample(30, 3, 31) + 1.5
    drawn[4] = real[7]  # a picture that is in both sets, and one that is twice in its own
    drawn[5] = drawn[6]
    around_real = loops(real.tolist(), drawn.tolist(), neighbours)
    around_drawn = loops(drawn.tolist(), real.tolist(), neighbours)
    found = precision_recall(real, drawn, neighbours=neighbours)
    assert found["precision"]["hits"] == sum(any(row[j] for row in around_real) for j in range(30))
    assert found["recall"]["hits"] == sum(any(row[i] for row in around_drawn) for i in range(40))
    assert (found["precision"]["total"], found["recall"]["total"]) == (30, 40)
    assert 0 < found["precision"]["hits"] < 30 and found["recall"]["hits"] > 0
    more = density_coverage(real, drawn, neighbours=neighbours)
    assert more["density"]["value"] == pytest.approx(sum(map(sum, around_real)) / neighbours / 30)
    assert more["coverage"]["hits"] == sum(map(any, around_real))


def exact(real, drawn, neighbours):
    """The same by whole matrices of double precision."""

    def inside(centres, points):
        gaps = torch.cdist(centres, centres, compute_mode="donot_use_mm_for_euclid_dist")
        radii = gaps.kthvalue(neighbours + 1, dim=1).values
        away = torch.cdist(centres, points, compute_mode="donot_use_mm_for_euclid_dist")
        return away <= radii[:, None] * (1 + 1e-12)

    return inside(real, drawn), inside(drawn, real)


@pytest.mark.parametrize("spread", [1.0, 1e-4, 1e-7])
def test_single_precision_decides_nothing(spread):
    """Points that single precision cannot tell apart: far from zero, and close together beside a few far ones."""
    real, drawn = (1e3 + spread * sample(300, 24, seed) for seed in (60, 61))
    for one in (real, drawn):
        one[:3] += 50 * torch.arange(1, 4)[:, None]  # far ones, so that the common size is far above `spread`
    drawn[10:20] = real[10:20]
    around_real, around_drawn = exact(real, drawn, 3)
    found = precision_recall(real, drawn)
    assert found["precision"]["hits"] == int(around_real.any(0).sum())
    assert found["recall"]["hits"] == int(around_drawn.any(0).sum())
    gaps = torch.cdist(real, real, compute_mode="donot_use_mm_for_euclid_dist")
    assert kth_neighbour(real, 3).tolist() == pytest.approx(gaps.kthvalue(4, dim=1).values.tolist(), rel=1e-9)
    density = density_coverage(real, drawn, neighbours=3)["density"]["value"]
    assert density == pytest.approx(around_real.sum().item() / 3 / 300, rel=1e-12)


def test_copies_beyond_the_candidates_are_neighbours():
    real = sample(40, 5, 62).repeat_interleave(3, 0)
    real[::3] += 1e-9 * sample(40, 5, 63)
    for count in (1, 2, 30, 119):
        gaps = torch.cdist(real, real, compute_mode="donot_use_mm_for_euclid_dist")
        expected = gaps.kthvalue(count + 1, dim=1).values
        assert torch.allclose(kth_neighbour(real, count), expected, rtol=1e-6, atol=1e-14)


def test_no_matrix_of_all_distances_is_held(monkeypatch):
    """Of 6,000 samples such a matrix has 288 MB in double precision."""
    held = []
    plain = quality._Points.least_squares

    def watched(self, rows, other):
        found = plain(self, rows, other)
        held.append(found.numel() * found.element_size())
        return found

    monkeypatch.setattr(quality._Points, "least_squares", watched)
    told = []
    monkeypatch.setattr(quality, "_REPORTED", 6000)
    real, drawn = sample(6000, 8, 64), sample(6000, 8, 65)
    precision_recall(real, drawn, report=told.append)
    assert max(held) == 512 * 6000 * 4 and len(held) == 4 * 12
    assert told[0] == "neighbours of 1,024 of 6,000 samples"
    assert any(text == "balls of 6,000 of 6,000 samples" for text in told)


@pytest.mark.slow
@pytest.mark.parametrize(("real", "drawn", "width"), [(300, 300, 8), (1000, 300, 8), (300, 1000, 16)])
def test_intervals_hold_the_mean_of_a_law(real, drawn, width):
    """Both sets drawn anew 200 times. Wilson's interval of a rate, with the balls as given, held it in 58 to 94 %."""
    figures = [
        precision_recall(sample(real, width, 2 * seed), 0.9 * sample(drawn, width, 2 * seed + 1) + 0.3)
        for seed in range(200)
    ]
    for name in ("precision", "recall"):
        mean = np.mean([figure[name]["value"] for figure in figures])
        held = np.mean([figure[name]["low"] <= mean <= figure[name]["high"] for figure in figures])
        assert held >= 0.94, (name, held)
        reach = np.mean([figure[name]["high"] - figure[name]["low"] for figure in figures]) / 2 / 1.96
        assert reach < 3 * np.std([figure[name]["value"] for figure in figures])


def test_bad_input_is_refused():
    good = sample(10, 3, 50)
    refuses(ValueError, "neighbours=10.*10", precision_recall, good, good, neighbours=10)
