"""Distances between sets against closed forms, against torchmetrics, and against plain loops."""

import math

import pytest
import torch

from visual_spec.eval.quality.published import Gaussian, frechet, frechet_distance, frechet_of_pairs
from visual_spec.models.shapes_features import ShapesFeatures


def sample(count: int, width: int, seed: int, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def with_moments(mean: torch.Tensor, covariance: torch.Tensor, count: int, seed: int) -> torch.Tensor:
    """A set whose mean and unbiased covariance are exactly those given."""
    noise = sample(count, len(mean), seed)
    noise = noise - noise.mean(0)
    noise = noise @ torch.linalg.inv(torch.linalg.cholesky(noise.T @ noise / (count - 1))).T
    return mean + noise @ torch.linalg.cholesky(covariance).T


def random_covariance(width: int, seed: int) -> torch.Tensor:
    root = sample(width, width, seed)
    return root @ root.T + 0.1 * torch.eye(width, dtype=torch.float64)


def test_the_distance_of_gaussians_on_a_line():
    first = with_moments(torch.tensor([1.0]).double(), torch.tensor([[4.0]]).double(), 50, 0)
    second = with_moments(torch.tensor([-2.0]).double(), torch.tensor([[9.0]]).double(), 70, 1)
    assert frechet_distance(first, second) == pytest.approx((1 + 2) ** 2 + (2 - 3) ** 2, rel=1e-12)


def test_the_distance_of_gaussians_with_common_axes():
    axes = torch.linalg.qr(sample(4, 4, 2)).Q
    one, two = torch.tensor([4.0, 1.0, 0.25, 9.0]).double(), torch.tensor([1.0, 1.0, 4.0, 0.01]).double()
    shift = torch.tensor([0.5, -1.0, 0.0, 2.0]).double()
    first = with_moments(torch.zeros(4).double(), axes * one @ axes.T, 60, 3)
    second = with_moments(shift, axes * two @ axes.T, 80, 4)
    expected = shift.square().sum() + (one.sqrt() - two.sqrt()).square().sum()
    assert frechet_distance(first, second) == pytest.approx(expected.item(), rel=1e-10)


def test_the_distance_of_gaussians_in_general():
    """For two dimensions tr (S1 S2)^(1/2) = (tr S1 S2 + 2 (det S1 det S2)^(1/2))^(1/2)."""
    cov1, cov2 = random_covariance(2, 5), random_covariance(2, 6)
    assert not torch.allclose(cov1 @ cov2, cov2 @ cov1, rtol=0.05)
    first = with_moments(torch.zeros(2).double(), cov1, 30, 7)
    second = with_moments(torch.ones(2).double(), cov2, 40, 8)
    root = math.sqrt((cov1 @ cov2).trace() + 2 * math.sqrt(cov1.det() * cov2.det()))
    assert frechet_distance(first, second) == pytest.approx(
        2 + (cov1 + cov2).trace().item() - 2 * root, rel=1e-10
    )


def test_the_distance_agrees_with_torchmetrics_on_our_features():
    fid = pytest.importorskip("torchmetrics.image.fid")
    torch.manual_seed(0)
    network = ShapesFeatures(heads={"colour": 3}, num_features=12, image_size=16, channels=4).eval()
    generator = torch.Generator().manual_seed(9)
    first = torch.randint(0, 256, (60, 3, 20, 20), generator=generator, dtype=torch.uint8)
    second = torch.randint(0, 200, (50, 3, 20, 20), generator=generator, dtype=torch.uint8)
    with torch.no_grad():  # features of an untrained network hardly vary before they are standardised
        raw = network.raw(first.float())
        network.centre.copy_(raw.mean(0))
        network.spread.copy_(raw.std(0))
    metric = fid.FrechetInceptionDistance(feature=network)
    metric.update(first, real=True)
    metric.update(second, real=False)
    with torch.no_grad():
        ours = frechet_distance(network(first), network(second))
    assert ours == pytest.approx(metric.compute().item(), rel=1e-5)
    assert ours > 0.1


def test_sets_smaller_than_their_features_have_a_distance():
    first, second = sample(5, 20, 10), sample(6, 20, 11) + 1
    distance = frechet_distance(first, second)
    # The nuclear norm of the product of the centred sets is the trace of the root: no covariance is formed.
    a, b = (first - first.mean(0)) / 2, (second - second.mean(0)) / math.sqrt(5)
    expected = (first.mean(0) - second.mean(0)).square().sum() + a.square().sum() + b.square().sum()
    expected -= 2 * torch.linalg.svdvals(a @ b.T).sum()
    assert distance == pytest.approx(expected.item(), rel=1e-6)
    assert frechet_distance(second, first) == pytest.approx(distance, rel=1e-6)
    assert frechet_distance(first, first) == pytest.approx(0, abs=1e-6)


def test_features_that_hardly_vary_lose_no_digits():
    """A large mean over a small spread: sums of squares would cancel."""
    first, second = sample(500, 3, 12) * 1e-3 + 1e4, sample(500, 3, 13) * 1e-3 + 1e4
    shifted = frechet_distance(first - 1e4, second - 1e4)
    assert frechet_distance(first, second) == pytest.approx(shifted, rel=1e-4)


def test_pairs_are_left_out_together():
    first = sample(200, 3, 20)
    second = first + 0.5  # the noise is common, so the distance is known exactly, but only to one who pairs
    paired, apart = frechet_of_pairs(first, second), frechet(first, Gaussian.of(second))
    assert paired["value"] == pytest.approx(0.75) and apart["value"] == pytest.approx(0.75)
    assert paired["high"] - paired["low"] < 1e-9 < 0.1 < apart["high"] - apart["low"]


def test_the_standard_error_of_pairs_is_that_of_drawing_anew():
    def drawn(seed):
        return sample(150, 3, 2 * seed), 1.3 * sample(150, 3, 2 * seed + 1) + 1

    spread = torch.tensor([frechet_distance(*drawn(seed)) for seed in range(200)]).std().item()
    figures = [frechet_of_pairs(*drawn(seed)) for seed in range(1000, 1024)]
    reaches = [figure["high"] - figure["value"] for figure in figures]
    assert sum(reaches) / len(reaches) == pytest.approx(1.96 * spread, rel=0.2)


def test_bad_input_is_refused():
    good = sample(10, 3, 50)
    with pytest.raises(ValueError, match=r"shapes \[10, 3\] and \[10, 4\]"):
        frechet_distance(good, sample(10, 4, 51))
    with pytest.raises(ValueError, match="10 and 1 pictures given; each set needs at least 2"):
        frechet_distance(good, good[:1])
    with pytest.raises(ValueError, match="not finite"):
        frechet_distance(good, good / 0)
    with pytest.raises(ValueError, match="10 and 9 samples given"):
        frechet_of_pairs(good, good[:9])
