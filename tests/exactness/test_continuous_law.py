"""Samplers of continuous tokens on models whose laws are known, and what a broken rule looks like to the same tests.

The reference is the target's chain written out (`straight_chain`). Distances are over what samples of one law exceed
once in a thousand runs, so 1 is the limit.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.exactness.mixtures import (
    MaskedMixtureModel,
    Mixture,
    MixtureModel,
    far_apart,
    straight_chain,
    straight_sequences,
)
from visual_spec.samplers.continuous.as_released import _scaled_distance
from visual_spec.samplers.continuous.continuous import ContinuousSampler
from visual_spec.samplers.continuous.drafted import SpeculativeContinuousSampler
from visual_spec.samplers.continuous.head import HeadSpeculativeSampler
from visual_spec.samplers.continuous.jacobi import ContinuousJacobiSampler
from visual_spec.samplers.core.law import TokenLaw

pytestmark = pytest.mark.usefixtures("keys_in_bulk")

LINE = Mixture([0.3, 0.5, 0.2], [-1.2, 0.2, 1.4], [0.25, 0.3, 0.2])
LINE_DRAFT = Mixture([0.35, 0.45, 0.2], [-1.1, 0.25, 1.3], [0.3, 0.3, 0.25])
PLANE = Mixture([0.3, 0.4, 0.3], [[-1.0, 0.0], [0.8, 0.8], [0.6, -0.9]], [0.3, 0.35, 0.25])
PLANE_DRAFT = Mixture([0.33, 0.37, 0.3], [[-0.9, 0.1], [0.7, 0.8], [0.65, -0.8]], [0.33, 0.35, 0.3])

NOISY: dict[str, Any] = dict(head_steps=20, eta=1.0, final_noise=0.05)
# Learned variances: those of target and draft differ.
PUBLISHED: dict[str, Any] = dict(head_steps=20, final_noise=0.05)
QUIET: dict[str, Any] = dict(head_steps=20, eta=0.0, final_noise=0.0)


def reference(model: Any, settings: dict[str, Any], count: int, seed: int = 1) -> Tensor:
    """Tokens of slot 1 of a model whose tokens do not depend on each other."""
    shift = torch.zeros(count, model.token_dim, dtype=torch.float64)
    return straight_chain(model, 1, shift, torch.Generator().manual_seed(seed), **settings)


def drawn(sampler: Any, model: Any, count: int, seed: int = 2, **parts: Any) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return sampler(model, None, law=TokenLaw(), generator=generator, batch_size=count, **parts)


def pair(target: Mixture, draft: Mixture, *, flow: bool, shares: tuple[float, float] = (0.6, 0.3)) -> Any:
    """A model of two independent tokens of one law, and its drafter."""
    laws = zip((target, draft), shares, strict=True)
    return [MixtureModel([one, one], flow=flow, share=share) for one, share in laws]


def two_way_pair() -> Any:
    """The same for models that see tokens both ways."""
    laws = ((LINE, 0.6), (LINE_DRAFT, 0.3))
    return [MaskedMixtureModel([one, one], one, share=share) for one, share in laws]


# Samplers whose slot 1 was drafted, with the kind of chain they are for.
EXACT = {
    "chain, equal widths": (SpeculativeContinuousSampler("chain", 1, **NOISY), True, NOISY),
    "chain, learned widths": (SpeculativeContinuousSampler("chain", 1, **PUBLISHED), False, PUBLISHED),
    "path": (SpeculativeContinuousSampler("path", 1, **NOISY), True, NOISY),
    "path, learned widths": (SpeculativeContinuousSampler("path", 1, **PUBLISHED), False, PUBLISHED),
    "ode": (SpeculativeContinuousSampler("ode", 1, **QUIET), True, QUIET),
    "jacobi": (ContinuousJacobiSampler(2, **PUBLISHED), False, PUBLISHED),
    "head": (HeadSpeculativeSampler(6, **NOISY), True, NOISY),
    "head, learned widths": (HeadSpeculativeSampler(6, **PUBLISHED), False, PUBLISHED),
    "plain": (ContinuousSampler(**PUBLISHED), False, PUBLISHED),
    "plain, without noise": (ContinuousSampler(**QUIET), True, QUIET),
}


def check_law(name: str, laws: tuple[Mixture, Mixture], count: int, **changes: Any) -> Any:
    sampler, flow, settings = EXACT[name]
    if changes:
        sampler, settings = type(sampler).from_config(sampler.config, **changes), {**settings, **changes}
    target, draft = pair(*laws, flow=flow)
    parts = {"drafter": draft} if sampler.needs_drafter else {}
    result = drawn(sampler, target, count, **parts)
    expected = reference(target, settings, 4 * count)
    # The control: that the draft is another law, the test notices.
    assert far_apart(reference(draft, settings, 4 * count, seed=5), expected) > 1
    assert far_apart(result.tokens[:, 1], expected) < 1
    return result


@pytest.mark.parametrize("name", EXACT)
def test_exact_rules_draw_the_target_law(name):
    count = 800 if name == "ode" else 3000
    result = check_law(name, (LINE, LINE_DRAFT), count)
    assert result.trace.beside(result.trace.law_settings).lossless
    assert result.trace.acceptance is None or 0 < result.trace.acceptance < 1


@pytest.mark.parametrize("name", ["chain, equal widths", "chain, learned widths", "path", "head"])
def test_exact_rules_draw_the_target_law_in_the_plane(name):
    check_law(name, (PLANE, PLANE_DRAFT), 3000)


@pytest.mark.slow
@pytest.mark.parametrize("laws", [(LINE, LINE_DRAFT), (PLANE, PLANE_DRAFT)], ids=["line", "plane"])
@pytest.mark.parametrize("name", [name for name in EXACT if name != "ode"])
def test_exact_rules_draw_the_target_law_in_a_hundred_thousand_draws(name, laws):
    check_law(name, laws, 100_000, head_steps=100 if EXACT[name][2] is PUBLISHED else 20)


# -- negative controls ------------------------------------------------------------------------------------------------


def masked_pair(slope: float = 0.0) -> list[Any]:
    """Target and drafter of two tokens, the second shifted by the first, for models that see tokens both ways.

    Each law is one of two normal laws at +- 1, then one normal law; `alone` is the second token's without the first.
    """
    found = []
    for place, spread, of_second, share in ((1.0, 0.25, 0.35, 0.6), (0.95, 0.28, 0.38, 0.3)):
        first = Mixture([0.5, 0.5], [-place, place], [spread, spread])
        wide = ((slope * spread) ** 2 + of_second**2) ** 0.5
        alone = Mixture([0.5, 0.5], [-slope * place, slope * place], [wide, wide])
        second = Mixture([1.0], [0.0], [of_second])
        found.append(MaskedMixtureModel([first, second], alone, slope=slope, share=share))
    return found


def test_the_release_does_not_draw_the_target_law():
    """Of one token without context, where the published criterion is all that differs."""
    settings: dict[str, Any] = dict(head_steps=20, final_noise=0.0)
    target, draft = two_way_pair()
    sampler = SpeculativeContinuousSampler("cspd-release", 1, order="raster", **settings)
    result = drawn(sampler, target, 3000, drafter=draft)
    assert far_apart(result.tokens[:, 1], reference(target, settings, 12_000)) > 1
    assert not result.trace.lossless and result.trace.at_least
    assert result.trace.divergence == pytest.approx(result.trace.acceptance, abs=0.03)


def histogram_distance(found: Tensor, expected: Tensor) -> float:
    """A lower bound of the total variation distance, but for what finite samples add."""
    first, second = (torch.histc(part, 60, -3, 3) / len(part) for part in (found, expected))
    return float((first - second).clamp_min(0).sum())


@pytest.mark.parametrize("wide", [0.35, 0.7], ids=["narrow", "wide"])
def test_the_published_criterion_measures_no_less_than_it_does(wide):
    """Two tokens, one number each, both laws normal; the drafter's chain is narrower or wider at every level."""
    law, other = Mixture([1.0], [0.0], [0.5]), Mixture([1.0], [0.3], [wide])
    settings: dict[str, Any] = dict(head_steps=5, final_noise=0.5)
    shares = (0.6, 0.3) if wide < 0.5 else (0.3, 0.6)
    target, draft = pair(law, other, flow=False, shares=shares)
    sampler = SpeculativeContinuousSampler("cspd", 1, **settings)
    result = drawn(sampler, target, 8000, drafter=draft)
    expected = reference(target, settings, 200_000)
    noise = histogram_distance(reference(target, settings, 8000, seed=9), expected)
    off = histogram_distance(result.tokens[:, 1, 0], expected[:, 0]) - noise
    assert 0.02 < off < result.trace.divergence < 0.9
    assert f"at most {result.trace.divergence:.4f}" in result.trace.output_law


@pytest.mark.parametrize("factor", [-1.0, -0.1, 0.0, 0.1, 1.0, 30.0])
@pytest.mark.parametrize("laws", [(0.0, 1.0, 0.3, 0.9), (0.0, 1.0, 1.0, 0.5), (0.0, 0.5, 0.2, 0.4)])
def test_the_distance_under_a_factor_is_that_of_the_densities(laws, factor):
    """Acceptance, residual and what comes out written as densities on a fine grid."""
    x = torch.linspace(-12, 12, 240_001, dtype=torch.float64)
    width = float(x[1] - x[0])
    one, other = (
        torch.distributions.Normal(mean, sigma).log_prob(x).exp()
        for mean, sigma in zip(laws[::2], laws[1::2], strict=True)
    )
    scale = math.exp(factor)
    kept = torch.minimum(other, scale * one)
    residual = (one - other / scale).clamp_min(0)
    result = kept + (1 - float(kept.sum()) * width) * residual / (float(residual.sum()) * width)
    expected = float((result - one).abs().sum()) * width / 2
    mean, sigma, draft_mean, draft_sigma = (
        torch.full((400, 1, 1), value, dtype=torch.float64) for value in laws
    )
    fresh = torch.randn(400, 1, 256, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    factors = torch.full((400, 1), factor, dtype=torch.float64)
    found = _scaled_distance((mean, sigma), (draft_mean, draft_sigma), factors, fresh, 4096)
    assert float(found.mean()) == pytest.approx(expected, abs=0.01)
    assert factor or found.max() < 1e-12


def correlation(tokens: Tensor) -> float:
    return float(torch.corrcoef(tokens[:, :, 0].T)[0, 1])


def straight_correlation(model: Any, settings: dict[str, Any], count: int) -> float:
    return correlation(straight_sequences(model, count, 3, slots=2, **settings))


def block_of_two(rule: str, **settings: Any) -> Any:
    """Two tokens that are drafted together: a first token that nobody depends on stands before them."""
    return SpeculativeContinuousSampler(rule, 2, order="raster", **settings)


class Shifted(MaskedMixtureModel):
    """The pair of tokens after one that is always near 0, so that one block drafts both of them."""

    def __init__(self, mixtures: Any, alone: Mixture, **settings: Any) -> None:
        super().__init__(mixtures, alone, **settings)
        self.grid = type(self.grid)(1, 3)
        self.head.mixtures = [*self.head.mixtures, Mixture([1.0], [0.0], [0.1])]

    def __call__(self, state: Any, tokens: Tensor, known: Tensor, room: int | None = None) -> Tensor:
        z = super().__call__(state, tokens[:, 1:], known[:, 1:], room)
        before = torch.zeros_like(z[:, :1])
        before[..., -1] = 3.0
        return torch.cat([before, z], 1)


@pytest.mark.slow
def test_a_pair_of_tokens_hangs_together_as_it_should_and_not_without_context():
    settings: dict[str, Any] = dict(head_steps=20, final_noise=0.05)
    target, draft = (
        Shifted(model.head.mixtures[:2], model.head.mixtures[2], slope=0.8, share=model.head.share)
        for model in masked_pair(0.8)
    )
    wanted = straight_correlation(target, settings, 20_000)
    assert wanted == pytest.approx(0.92, abs=0.01)
    for rule in ("chain", "path", "cspd"):
        result = drawn(block_of_two(rule, **settings), target, 2000, drafter=draft)
        assert correlation(result.tokens[:, 1:]) == pytest.approx(wanted, abs=0.012), rule
        assert int(result.trace.target_calls.min()) == 2
    release = drawn(block_of_two("cspd-release", head_steps=20), target, 4000, drafter=draft)
    assert abs(correlation(release.tokens[:, 1:])) < 0.1
    parallel = drawn(ContinuousSampler(steps=1, order="raster", **settings), target, 4000)
    assert abs(correlation(parallel.tokens[:, 1:])) < 0.1


@pytest.mark.slow
def test_a_causal_pair_hangs_together_whoever_drafts():
    settings: dict[str, Any] = dict(head_steps=20, eta=1.0, final_noise=0.05)
    laws = [[Mixture([0.5, 0.5], [-m, m], [s, s])] for m, s in ((1.0, 0.25), (0.95, 0.28))]
    seconds = [Mixture([1.0], [0.0], [s]) for s in (0.35, 0.38)]
    target, draft = (
        MixtureModel([*first, second, second], slope=0.8, flow=True)
        for first, second in zip(laws, seconds, strict=True)
    )
    expected = straight_sequences(target, 16_000, 3, **settings)
    for sampler in (
        SpeculativeContinuousSampler("chain", 2, **settings),
        SpeculativeContinuousSampler("path", 2, **settings),
        ContinuousJacobiSampler(2, **settings),
    ):
        parts: dict[str, Any] = {"drafter": draft} if sampler.needs_drafter else {}
        tokens = drawn(sampler, target, 4000, **parts).tokens
        assert far_apart(tokens[..., 0], expected[..., 0]) < 1
        assert far_apart(tokens[:, 2], expected[:, 2]) < 1
    assert far_apart(drawn(ContinuousSampler(**settings), draft, 4000).tokens[:, 2], expected[:, 2]) > 1


# -- the last kernel --------------------------------------------------------------------------------------------------


# -- how much is kept -------------------------------------------------------------------------------------------------


def transported(model: MixtureModel, settings: dict[str, Any], points: Tensor) -> Tensor:
    """Where Euler steps take points of one number [N]: a growing function, so it carries quantiles along."""
    steps, mixture = settings["head_steps"], model.head.mixtures[1]
    x, nothing = points[:, None], torch.zeros(len(points), 1, dtype=torch.float64)
    for i in range(steps, 0, -1):
        noise, token = mixture.noise(x, nothing, 1 - i / steps, i / steps)
        x = x - (noise - token) / steps
    return x[:, 0]


def overlap(models: Any, settings: dict[str, Any]) -> float:
    """1 - TV of two laws on the line, from their distribution functions on a fine grid."""
    quantiles = torch.linspace(-6, 6, 40_001, dtype=torch.float64)
    grid = torch.linspace(-4, 4, 4001, dtype=torch.float64)
    shares = []
    for model in models:
        x = transported(model, settings, quantiles)
        assert (x.diff() > 0).all()
        at = torch.searchsorted(x, grid).clamp(1, len(x) - 1)
        weight = (grid - x[at - 1]) / (x[at] - x[at - 1])
        reached = torch.special.ndtr(quantiles[at - 1] + weight * (quantiles[at] - quantiles[at - 1]))
        shares.append(reached.diff())
    return float(torch.minimum(*shares).sum())


@pytest.mark.slow
def test_the_ode_rule_keeps_as_much_as_any_rule_can():
    """The mean of min(1, target / draft) under the draft is 1 - TV."""
    models, count = pair(LINE, LINE_DRAFT, flow=True), 800
    bound = overlap(models, QUIET)
    assert bound == pytest.approx(0.87, abs=0.02)
    trace = drawn(SpeculativeContinuousSampler("ode", 1, **QUIET), models[0], count, drafter=models[1]).trace
    assert trace.acceptance == pytest.approx(bound, abs=3.5 * (bound * (1 - bound) / count) ** 0.5)


def test_the_path_rule_keeps_four_fifths_of_the_bound():
    models, count = pair(LINE, LINE_DRAFT, flow=True), 3000
    one, other = (torch.histc(reference(model, NOISY, 40_000), 80, -4, 4) / 40_000 for model in models)
    bound = float(torch.minimum(one, other).sum())
    kept = {
        rule: drawn(
            SpeculativeContinuousSampler(rule, 1, **NOISY), models[0], count, drafter=models[1]
        ).trace.acceptance
        for rule in ("path", "chain")
    }
    assert 0.8 * bound < kept["path"] < bound + 0.02
    assert 0.7 * bound < kept["chain"] < bound + 0.02


def test_most_calls_of_the_head_are_spared():
    """A chain of 50 levels; the frozen prediction drafts well where the law is smooth."""
    model = MixtureModel([LINE] * 4, flow=True)
    settings: dict[str, Any] = dict(head_steps=50, eta=1.0)
    plain = drawn(ContinuousSampler(**settings), model, 1)
    fast = drawn(HeadSpeculativeSampler(8, **settings), model, 1)
    assert int(plain.trace.head_calls) == 200
    assert int(fast.trace.head_calls) <= 80 and fast.trace.acceptance > 0.8


@pytest.mark.parametrize(("tolerance", "limit"), [(0.0, 0.0), (0.05, 0.1), (100.0, 0.9)])
def test_the_measured_divergence_of_aligned_drafts_grows_with_the_tolerance(tolerance, limit):
    settings: dict[str, Any] = dict(head_steps=20, eta=1.0, final_noise=0.1)
    second = Mixture([1.0], [0.0], [0.35])
    target, draft = (
        MixtureModel([Mixture([1.0], [m], [0.3]), second, second, second], slope=0.8, flow=True)
        for m in (0, 0.3)
    )
    sampler = SpeculativeContinuousSampler("aligned", 3, tolerance=tolerance, measure=True, **settings)
    result = drawn(sampler, target, 500, drafter=draft)
    plain = drawn(ContinuousSampler(**settings), target, 500)
    if tolerance == 0:
        torch.testing.assert_close(result.tokens, plain.tokens)
        assert result.trace.divergence == pytest.approx(0, abs=1e-9)
    else:
        assert 0 < result.trace.divergence < limit


@pytest.mark.parametrize(
    ("rule", "mean", "settings"),
    [
        ("path", 0.8, dict(head_steps=3, eta=1.0, final_noise=0.3)),
        ("ode", 0.4, dict(head_steps=3, eta=0.0, final_noise=0.0)),
    ],
)
def test_whole_chains_follow_the_law_where_most_drafts_are_refused(rule, mean, settings):
    """A path residual with the noise of drafts is 7 limits off in 20,000 draws. A residual that tests with the noise of
    accepting is 1.6 limits off in 100,000 draws (path) and 2.4 (ode)."""
    target, draft = pair(Mixture([1.0], [0.0], [0.5]), Mixture([1.0], [mean], [0.5]), flow=True)
    result = drawn(SpeculativeContinuousSampler(rule, 1, **settings), target, 100_000, drafter=draft)
    assert result.trace.acceptance < 0.5
    assert far_apart(result.tokens[:, 1], reference(target, settings, 400_000)) < 1
