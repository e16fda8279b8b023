"""Published figures against closed forms, torch-fidelity and torchmetrics."""

import math

import numpy as np
import pytest
import torch

from tests.helpers.networks import exact_distance
from tests.helpers.refusals import refuses
from visual_spec.eval.quality import published
from visual_spec.eval.quality.neighbours import precision_recall
from visual_spec.eval.quality.published import (
    Gaussian,
    frechet_difference,
    frechet_distance,
    frechet_of_pairs,
)

WIDTH = 6
STANDARD = Gaussian.of_moments(torch.zeros(WIDTH).double(), torch.eye(WIDTH).double())


def frechet(*sets):
    """The distance without its limit."""
    return published.frechet_with_limit(*sets)[0]


def normal(count, seed, *, mean=0.0, spread=1.0):
    return mean + spread * torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed)).double()


def with_moments(features, mean, spread):
    """The same features shifted and scaled to exactly this mean and spread, uncorrelated."""
    centred = features - features.mean(0)
    root = torch.linalg.cholesky(torch.linalg.inv(centred.T.cov()))
    return mean + spread * centred @ root


def test_the_distance_of_two_gaussians_is_the_closed_form():
    drawn, true = with_moments(normal(500, 0), 1.0, 2.0), with_moments(normal(400, 1), -0.5, 0.5)
    expected = WIDTH * (1.5**2 + (2.0 - 0.5) ** 2)
    found = frechet(drawn, Gaussian.of(true))
    assert found["value"] == pytest.approx(expected, rel=1e-10)
    assert found["low"] < expected < found["high"]


def test_a_reference_of_given_moments_needs_no_samples():
    mean, covariance = torch.full((WIDTH,), 0.3, dtype=torch.float64), 0.25 * torch.eye(WIDTH).double()
    found = frechet(with_moments(normal(300, 2), 0.0, 1.0), Gaussian.of_moments(mean, covariance))
    assert found["value"] == pytest.approx(WIDTH * (0.3**2 + 0.5**2), rel=1e-10)


def test_the_distance_is_torch_fidelitys():
    fid = pytest.importorskip("torch_fidelity.metric_fid")
    drawn, true = normal(200, 3) ** 3, normal(150, 4, spread=1.3)
    theirs = fid.fid_statistics_to_metric(
        *(fid.fid_features_to_statistics(features) for features in (drawn, true)), False
    )
    assert frechet(drawn, Gaussian.of(true))["value"] == pytest.approx(
        theirs["frechet_inception_distance"], rel=1e-9
    )


def test_fewer_samples_than_features_are_no_less_exact():
    """Of 300 eigenvalues 280 are zero. The trace of the root by the singular values of 20 x 24 numbers instead."""
    generator = torch.Generator().manual_seed(14)
    drawn = torch.randn(20, 300, generator=generator).double() * torch.logspace(0, -4, 300).double()
    true = 0.5 + torch.randn(24, 300, generator=generator).double()
    expected = exact_distance(drawn, true)
    for one, other in ((drawn, true), (true, drawn)):
        assert frechet(one, Gaussian.of(other))["value"] == pytest.approx(expected, rel=1e-10)


def test_the_distance_of_gaussians_in_general():
    """For two dimensions tr (S1 S2)^(1/2) = (tr S1 S2 + 2 (det S1 det S2)^(1/2))^(1/2)."""
    first, second = (features[:, :2] @ features[:2, :2] for features in (normal(30, 7), normal(40, 8)))
    one, two = first.T.cov(), second.T.cov()
    assert not torch.allclose(one @ two, two @ one, rtol=0.05)
    shift = (first.mean(0) - second.mean(0)).square().sum()
    root = math.sqrt((one @ two).trace() + 2 * math.sqrt(one.det() * two.det()))
    expected = shift + (one + two).trace() - 2 * root
    assert frechet_distance(first, second) == pytest.approx(expected.item(), rel=1e-10)


def test_features_that_hardly_vary_lose_no_digits():
    """A large mean over a small spread: sums of squares would cancel."""
    first, second = normal(500, 12) * 1e-3 + 1e4, normal(500, 13) * 1e-3 + 1e4
    shifted = frechet_distance(first - 1e4, second - 1e4)
    assert frechet_distance(first, second) == pytest.approx(shifted, rel=1e-4)


def test_pairs_are_left_out_together():
    first = normal(200, 20)
    second = first + 0.5  # the noise is common, so the distance is known exactly, but only to one who pairs
    paired, apart = frechet_of_pairs(first, second), frechet(first, Gaussian.of(second))
    assert paired["value"] == pytest.approx(1.5) == apart["value"]
    assert paired["high"] - paired["low"] < 1e-9 < 0.1 < apart["high"] - apart["low"]


def test_the_standard_error_of_pairs_is_that_of_drawing_anew():
    def drawn(seed):
        return normal(150, 2 * seed), 1.3 * normal(150, 2 * seed + 1) + 1

    spread = torch.tensor([frechet_distance(*drawn(seed)) for seed in range(200)]).std().item()
    figures = [frechet_of_pairs(*drawn(seed)) for seed in range(1000, 1024)]
    reaches = [figure["high"] - figure["value"] for figure in figures]
    assert sum(reaches) / len(reaches) == pytest.approx(1.96 * spread, rel=0.2)


@pytest.mark.parametrize("count", [200, 900])
def test_small_spreads_count_beside_large_ones(count):
    """Uncorrelated features of spreads 1 to 1e-7; the sets differ in the small ones only: the sum of (s - t)^2."""
    first, second = torch.logspace(0, -7, 150).double(), torch.logspace(0, -7, 150).double()
    second[first < 1e-3] *= 1.5
    features = torch.randn(count, 150, generator=torch.Generator().manual_seed(15)).double()
    plain = torch.linalg.qr(features - features.mean(0)).Q * (count - 1) ** 0.5
    plain = torch.nn.functional.pad(plain, (0, 100))  # fewer or more samples than features
    first, second = (torch.nn.functional.pad(spread, (0, 100)) for spread in (first, second))
    expected = (first - second).square().sum().item()
    assert 1e-7 < expected < 1e-5
    for one, other in ((first, second), (second, first)):
        found = frechet(plain * one, Gaussian.of(plain * other))["value"]
        assert found == pytest.approx(expected, rel=1e-5)


def test_the_interval_of_a_paired_difference_is_that_of_a_paired_bootstrap():
    """Pairs are drawn again with repetition, 400 times, and both distances computed from scratch."""
    first = normal(600, 20, mean=0.3)
    second = torch.where(torch.arange(600)[:, None] % 3 == 0, normal(600, 21, mean=0.4), first)
    generator, values = torch.Generator().manual_seed(22), []
    for _ in range(400):
        chosen = torch.randint(600, (600,), generator=generator)
        one, other = (
            published.gaussian_distance(Gaussian.of(part), STANDARD)
            for part in (second[chosen], first[chosen])
        )
        values.append(one - other)
    found = frechet_difference(second, first, STANDARD)
    reach = 1.96 * float(np.std(values))
    assert found["high"] - found["value"] == pytest.approx(reach, rel=0.35)
    # Unpaired, the interval would be far wider.
    apart = sum(
        (one["high"] - one["value"]) ** 2 for one in (frechet(first, STANDARD), frechet(second, STANDARD))
    )
    assert reach < 0.8 * apart**0.5


def test_the_moments_without_a_group_are_those_of_the_others():
    features, reference = normal(61, 5, mean=100.0), Gaussian.of(normal(50, 6))
    whole, left_out = published._Groups(features, reference, None).left_out
    dealt = published.deal(61, published.GROUPS)
    kept = [features[dealt != group] for group in range(published.GROUPS)]
    direct = [published.gaussian_distance(Gaussian.of(one), reference) for one in kept]
    assert left_out == pytest.approx(direct, rel=1e-9)
    assert whole == pytest.approx(frechet_distance(features, normal(50, 6)), rel=1e-9)


def test_intervals_hold_what_they_say():
    """Of 200 sets of one law, the interval holds the law's expected distance at this size about 95 % of the time."""
    figures = [frechet(normal(400, 100 + seed, mean=0.4), STANDARD) for seed in range(200)]
    expected = float(np.mean([figure["value"] for figure in figures]))
    held = sum(figure["low"] <= expected <= figure["high"] for figure in figures)
    assert 180 <= held <= 199


def test_every_group_has_its_share_of_every_class():
    for count, classes in ((2000, 1000), (900, 20), (730, 7), (61, 61)):
        names = [str(index % classes) for index in range(count)]
        dealt = published.deal(count, 20, names)
        table = torch.zeros(classes, 20)
        for index, group in enumerate(dealt.tolist()):
            table[index % classes, group] += 1
        assert (table.amax(1) - table.amin(1)).max() <= 1
        assert table.sum(0).max() - table.sum(0).min() <= 1
    # Neither neighbours nor what comes back every 20 samples falls into one group.
    places = published.deal(2000, 20).reshape(100, 20)
    assert all(len(set(column)) > 15 for column in places.T.tolist())


@pytest.mark.slow
@pytest.mark.parametrize(("classes", "known"), [(20, True), (100, True), (1000, True), (100, False)])
def test_intervals_of_classes_in_turn_hold_what_they_say(classes, known):
    """Classes with means far apart, drawn in turn: other sets differ within the classes only.

    Dealt by their places, each group would be 5 or 50 classes, and the interval 5 to 20 times as wide.
    """
    reference = Gaussian.of_moments(torch.zeros(WIDTH).double(), 5 * torch.eye(WIDTH).double())
    means = normal(classes, 1, spread=2.0)
    names = [str(index % classes) for index in range(2000)]
    figures = [
        frechet(
            means.repeat(2000 // classes, 1) + normal(2000, 100 + seed), reference, names if known else None
        )
        for seed in range(150)
    ]
    values = np.array([figure["value"] for figure in figures])
    told = np.mean([figure["high"] - figure["value"] for figure in figures]) / 1.96
    held = np.mean([figure["low"] <= values.mean() <= figure["high"] for figure in figures])
    if known and classes <= 100:
        assert told == pytest.approx(values.std(), rel=0.2) and 0.88 <= held <= 0.99
    else:  # groups differ in their classes
        assert values.std() < told < 4 * values.std() and held > 0.95


def test_the_limit_of_many_samples_is_extrapolated():
    """Two laws whose distance is known. That of 600 samples lies far above it, and its interval does not hold it."""
    width, expected = 12, 12 * (0.1**2 + 0.1**2)
    reference = Gaussian.of_moments(torch.zeros(width).double(), torch.eye(width).double())
    drawn = [
        0.1 + 1.1 * torch.randn(600, width, generator=torch.Generator().manual_seed(seed)).double()
        for seed in range(100)
    ]
    found = [published.frechet_with_limit(one, reference) for one in drawn]
    limits = [limit for _, limit in found if limit is not None]
    assert len(limits) == 100
    assert sum(figure["low"] <= expected <= figure["high"] for figure, _ in found) < 50
    assert 88 <= sum(limit["low"] <= expected <= limit["high"] for limit in limits) <= 99
    assert np.mean([limit["value"] for limit in limits]) == pytest.approx(expected, rel=0.05)
    assert published.limit_size(2048) == 8192
    assert published.frechet_with_limit(drawn[0][:47], reference)[1] is None
    # By hand: twice the distance of all less the mean of both halves.
    dealt = published.deal(600, published.GROUPS)
    one, other = (
        published.gaussian_distance(Gaussian.of(drawn[0][half]), reference)
        for half in (dealt < 10, dealt >= 10)
    )
    assert limits[0]["value"] == pytest.approx(2 * found[0][0]["value"] - (one + other) / 2, rel=1e-9)


def test_a_paired_difference_resolves_what_single_distances_do_not():
    first = normal(400, 7, mean=0.4)
    second = first + 0.01  # sample by sample a little further off
    difference = frechet_difference(second, first, STANDARD)
    single = frechet(first, STANDARD)
    assert difference["low"] > 0
    assert difference["high"] - difference["low"] < 0.1 * (single["high"] - single["low"])
    assert difference["value"] == pytest.approx(
        frechet(second, STANDARD)["value"] - single["value"], rel=1e-9
    )
    same = frechet_difference(first, first.clone(), STANDARD)
    assert (same["value"], same["low"], same["high"]) == (0.0, 0.0, 0.0)
    refuses(ValueError, "400 and 399 samples", frechet_difference, first, first[1:], STANDARD)
    refuses(ValueError, "5 features.*6", frechet, first[:, :5], STANDARD)


def discrepancy(one, other):
    """KID's estimate by its formula."""

    def kernel(a, b):
        return (a.double() @ b.double().T / WIDTH + 1) ** 3

    within = sum(
        (k.sum() - k.trace()) / (len(k) * (len(k) - 1)) for k in (kernel(one, one), kernel(other, other))
    )
    return float(within - 2 * kernel(one, other).mean())


def test_kernel_distance_and_inception_score_are_what_their_papers_define():
    pytest.importorskip("torch_fidelity")
    drawn, true = normal(40, 8).float(), normal(50, 9, mean=0.5).float()
    found = published.kernel_inception_distance(drawn, true, subset_size=40)
    # Every subset holds all that was drawn, and some of the true samples.
    chosen, values = np.random.RandomState(2020), []
    for _ in range(100):
        one, other = drawn[chosen.choice(40, 40, False)], true[chosen.choice(50, 40, False)]
        values.append(discrepancy(one, other))
    assert found["value"] == pytest.approx(np.mean(values), rel=1e-4)
    assert found["subset_spread"] == pytest.approx(np.std(values), rel=1e-3)
    # Four classes, each as often as the others, and no doubt.
    sure = torch.full((40, 4), -50.0)
    sure[torch.arange(40), torch.arange(40) % 4] = 50.0
    score = published.inception_score(torch.cat([sure] * 25))
    assert score["value"] == pytest.approx(4.0, rel=0.02) and score["low"] < score["value"] <= score["high"]
    assert published.inception_score(torch.zeros(100, 4))["value"] == pytest.approx(1.0)
    refuses(ValueError, "9 samples given", published.inception_score, sure[:9])


def test_the_interval_of_a_kernel_distance_leaves_every_sample_out():
    pytest.importorskip("torch_fidelity")
    drawn, true = normal(20, 30).float(), normal(25, 31, mean=0.5).float()
    ones = [discrepancy(drawn[torch.arange(20) != place], true) for place in range(20)]
    others = [discrepancy(drawn, true[torch.arange(25) != place]) for place in range(25)]
    variance = 19 * np.var(ones) + 24 * np.var(others)
    found = published.kernel_inception_distance(drawn, true)
    reach = 1.96 * math.hypot(variance**0.5, found["subset_spread"] / 10)
    assert found["high"] - found["value"] == pytest.approx(reach, rel=1e-3)
    same = published.kernel_inception_distance(drawn, true[:20])
    assert same["value"] == pytest.approx(discrepancy(drawn, true[:20]), rel=1e-3)
    assert same["subset_spread"] < 1e-4 < 0.1 < same["high"] - same["low"]


@pytest.mark.slow
def test_intervals_of_kernel_distances_hold_what_they_say():
    pytest.importorskip("torch_fidelity")
    figures = [
        published.kernel_inception_distance(
            normal(150, 2 * seed).float(), normal(150, 2 * seed + 1, mean=0.3).float()
        )
        for seed in range(300, 400)
    ]
    mean = np.mean([figure["value"] for figure in figures])
    assert 88 <= sum(figure["low"] <= mean <= figure["high"] for figure in figures) <= 100


@pytest.mark.slow
def test_intervals_of_the_inception_score_hold_what_they_say():
    pytest.importorskip("torch_fidelity")
    figures = [
        published.inception_score(2 * torch.randn(400, 8, generator=torch.Generator().manual_seed(seed)))
        for seed in range(300)
    ]
    mean = np.mean([figure["value"] for figure in figures])
    assert 0.92 <= np.mean([figure["low"] <= mean <= figure["high"] for figure in figures]) <= 0.985


def test_precision_and_recall_are_torch_fidelitys():
    prc = pytest.importorskip("torch_fidelity.metric_prc")
    drawn, true = normal(80, 10, spread=0.8), normal(90, 11)
    theirs = prc.prc_features_to_metric(drawn, true, verbose=False)
    ours = precision_recall(true, drawn)
    assert {name: figure["value"] for name, figure in ours.items()} == pytest.approx(
        {name: theirs[name] for name in ("precision", "recall")}, abs=1e-7
    )


def test_one_group_says_nothing_of_the_interval():
    found = frechet(normal(3, 12), Gaussian.of(normal(30, 13)))
    assert found["high"] == math.inf


def test_bad_input_is_refused():
    good = normal(10, 50)[:, :3]
    refuses(ValueError, r"shapes \[10, 3\] and \[10, 4\]", frechet_distance, good, normal(10, 51)[:, :4])
    refuses(ValueError, "10.*1 pictures", frechet_distance, good, good[:1])
    refuses(ValueError, "not finite", frechet_distance, good, good / 0)
    refuses(ValueError, "10.*9 samples", frechet_of_pairs, good, good[:9])
