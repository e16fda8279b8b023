"""The chains against Bayes' rule in double precision, and against laws that are known."""

import math

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from tests.helpers.refusals import refuses
from visual_spec.models.continuous.diffusion import (
    DiffusionSchedule,
    FlowSchedule,
    cosine_betas,
    respaced_levels,
)


def kept_share(level: int) -> float:
    """What is left of a token's variance at a level of training, from the published formula, as a plain product."""
    product = 1.0
    for i in range(level + 1):
        low, high = (math.cos((j / 1000 + 0.008) / 1.008 * math.pi / 2) ** 2 for j in (i, i + 1))
        product *= 1.0 - min(1.0 - high / low, 0.999)
    return product


def test_levels_are_the_published_ones():
    levels = respaced_levels(100)
    assert levels[:4] == [0, 10, 20, 30] and levels[-1] == 999 and len(set(levels)) == 100
    assert levels == [round(i * 999 / 99) for i in range(100)]
    assert respaced_levels(1000) == list(range(1000)) and respaced_levels(1) == [0]
    assert DiffusionSchedule(100).times.tolist() == levels
    betas = cosine_betas()
    assert betas[-1] == 0.999 and betas[0].item() == pytest.approx(1 - kept_share(0), rel=1e-9)


@pytest.mark.parametrize("steps", [0, 1001, True, 2.5])
def test_other_numbers_of_levels_are_refused(steps):
    for schedule in (DiffusionSchedule, FlowSchedule):
        refuses(ValueError, "from 1 to 1000", schedule, steps)


@pytest.mark.parametrize("index", [0, 1, 50, 99])
def test_kernel_is_the_posterior_by_bayes_rule(index):
    """p(x_before | x, token) is proportional to p(x | x_before) p(x_before | token): two normal laws of x_before."""
    levels = respaced_levels(100)
    kept = kept_share(levels[index])
    before = kept_share(levels[index - 1]) if index else 1.0
    x, noise = torch.tensor([[0.7, -1.2]]), torch.tensor([[0.3, 0.9]])
    start = (x.double() - math.sqrt(1 - kept) * noise) / math.sqrt(kept)
    alpha, beta = kept / before, 1 - kept / before
    if index:
        precision = 1 / (1 - before) + alpha / beta
        mean = (math.sqrt(before) * start / (1 - before) + math.sqrt(alpha) * x / beta) / precision
        narrow = 1 / precision
    else:  # the law before is a point, and the second level's width stands in for none
        mean = start
        second = kept_share(levels[1])
        narrow = (1 - second / kept) * (1 - kept) / (1 - second)
    schedule = DiffusionSchedule(100)
    for fraction, variance in ((-1.0, narrow), (1.0, beta), (0.0, math.sqrt(narrow * beta))):
        output = torch.cat([noise, torch.full_like(noise, fraction)], -1)
        found, sigma = schedule.kernel(x, index, output)
        torch.testing.assert_close(found.double(), mean, rtol=2e-4, atol=2e-5)
        torch.testing.assert_close(
            sigma.double().square(), torch.full((1, 2), variance, dtype=torch.float64), rtol=1e-3, atol=0
        )
    # Points at levels of their own give the same.
    many = schedule.kernel(x.repeat(3, 1), torch.tensor([3, index, 7]), output.repeat(3, 1))
    torch.testing.assert_close(many[0][1:2], found)
    torch.testing.assert_close(many[1][1:2], sigma)


@torch.no_grad()
def draw(schedule, head, x, temperature=1.0):
    for index in reversed(range(schedule.num_steps)):
        mean, sigma = schedule.kernel(x, index, head(x, index))
        x = mean + sigma * temperature * torch.randn_like(x) if index else mean
    return x


def test_a_velocity_says_the_same_as_the_noise_and_is_harmless_where_nothing_is_left():
    torch.manual_seed(0)
    by_noise, by_velocity = DiffusionSchedule(100), DiffusionSchedule(100, velocity=True)
    tokens, noise, fraction = torch.randn(3, 4, 2).unbind(0)
    for index in (0, 1, 40, 80):
        kept = kept_share(int(by_noise.times[index]))
        point = math.sqrt(kept) * tokens + math.sqrt(1 - kept) * noise
        velocity = math.sqrt(kept) * noise - math.sqrt(1 - kept) * tokens
        expected = by_noise.kernel(point, index, torch.cat([noise, fraction], -1))
        found = by_velocity.kernel(point, index, torch.cat([velocity, fraction], -1))
        torch.testing.assert_close(found[0], expected[0], rtol=1e-3, atol=1e-4)
        assert torch.equal(found[1], expected[1])
        levels = torch.full((4,), index)
        exact = torch.cat([velocity, torch.full_like(velocity, -1.0)], -1)
        nothing = torch.zeros(4)
        torch.testing.assert_close(
            by_velocity.losses(tokens, levels, noise, exact), nothing, rtol=0, atol=1e-3
        )
    zero = torch.zeros(1, 4)
    wrong = torch.tensor([[0.1, 0.1, 0.0, 0.0]])
    # What an error of a tenth does to the next point from the last level.
    moved = [s.kernel(zero[:, :2], 99, wrong)[0].abs().max() for s in (by_noise, by_velocity)]
    assert moved[0] > 5 and moved[1] < 0.01


def test_losses_are_squared_error_and_divergence():
    torch.manual_seed(0)
    schedule = DiffusionSchedule(1000)
    tokens, noise, output = torch.randn(6, 3), torch.randn(6, 3), torch.randn(6, 6) / 3
    index = torch.tensor([1, 10, 100, 500, 900, 999])
    kept = torch.tensor([kept_share(int(i)) for i in index])[:, None]
    point = kept.sqrt() * tokens + (1 - kept).sqrt() * noise
    torch.testing.assert_close(schedule.noised(tokens, index, noise), point, rtol=1e-4, atol=1e-5)
    exact = torch.cat([noise, torch.full_like(noise, -1.0)], -1)
    true, found = schedule.kernel(point, index, exact), schedule.kernel(point, index, output)
    divergence = kl_divergence(Normal(*true), Normal(*found)).mean(-1) / math.log(2)
    expected = (output[:, :3] - noise).square().mean(-1) + divergence
    torch.testing.assert_close(schedule.losses(tokens, index, noise, output), expected, rtol=2e-3, atol=1e-4)


def test_the_variance_alone_learns_from_the_divergence():
    torch.manual_seed(0)
    schedule = DiffusionSchedule(1000)
    tokens, noise = torch.randn(4, 2), torch.randn(4, 2)
    output = torch.randn(4, 4, requires_grad=True)
    schedule.losses(tokens, torch.tensor([5, 50, 500, 900]), noise, output).sum().backward()
    assert output.grad is not None
    # Of the mean of two squares.
    torch.testing.assert_close(output.grad[:, :2], (output.detach()[:, :2] - noise))
    assert (output.grad[:, 2:] != 0).all()


def test_flow_follows_its_velocity():
    torch.manual_seed(0)
    token, x = torch.tensor([[0.5, -2.0]]), torch.randn(5, 2)
    schedule = FlowSchedule(7)
    assert schedule.times[-1] == 1000 and schedule.times[0].item() == pytest.approx(1000 / 7)
    # The velocity of a law that is one point: straight lines, so Euler is exact.
    drawn = draw(schedule, lambda x, index: (x - token) / (schedule.times[index] / 1000), x)
    torch.testing.assert_close(drawn, token.expand(5, -1))
    index, noise = torch.tensor([0, 3, 6, 6, 2]), torch.randn(5, 2)
    share = ((index + 1) / 7)[:, None]
    torch.testing.assert_close(schedule.noised(x, index, noise), (1 - share) * x + share * noise)
    torch.testing.assert_close(schedule.losses(x, index, noise, noise - x), torch.zeros(5))
