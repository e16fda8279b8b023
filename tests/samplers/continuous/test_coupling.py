"""`couple` against the law it must draw from: mean, spread and their products, of many draws with frequent refusals."""

import pytest
import torch

from visual_spec.samplers.continuous.coupling import couple
from visual_spec.samplers.core.noise import DRAFT, CounterNoise

COUNT = 100_000


@pytest.mark.parametrize(
    "draft_widths", [(0.5, 0.9), (1.0, 0.6), (1.0, 1.0)], ids=["unequal", "one equal", "equal"]
)
def test_coupled_points_follow_the_target(draft_widths):
    keys = torch.randint(-(2**63), 2**63 - 1, (COUNT,), generator=torch.Generator().manual_seed(0))
    noise, slots = CounterNoise(keys, "cpu"), torch.zeros(COUNT, 1, dtype=torch.long)

    def law(mean: tuple[float, float], sigma: tuple[float, float]) -> tuple[torch.Tensor, torch.Tensor]:
        mean_of, sigma_of = (
            torch.tensor(part, dtype=torch.float64).expand(COUNT, 1, 2) for part in (mean, sigma)
        )
        return mean_of, sigma_of

    target, draft = law((0.0, 0.3), (1.0, 1.0)), law((0.8, -0.4), draft_widths)
    drafts = draft[0] + draft[1] * noise.normal(slots, 2, DRAFT, 0, torch.float64)
    points, kept = couple(drafts, draft, target, noise, slots, 0)
    assert 0.3 < float(kept.double().mean()) < 0.75 and torch.equal(points[kept], drafts[kept])
    standard = ((points - target[0]) / target[1])[:, 0]
    grid = torch.sort(standard, 0).values
    uniform = torch.distributions.Normal(0.0, 1.0).cdf(grid)
    ranks = torch.arange(1, COUNT + 1, dtype=torch.float64)[:, None] / COUNT
    # Kolmogorov's distance, at 1.95 / sqrt(N) once in a thousand runs.
    assert float((uniform - ranks).abs().max()) < 1.95 / COUNT**0.5
    products = standard.T @ standard / COUNT
    assert torch.allclose(products, torch.eye(2, dtype=torch.float64), atol=0.02)
