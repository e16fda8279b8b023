"""Laws and noise of samplers of continuous tokens."""

from typing import Any

import torch
from torch import Tensor

from tests.helpers.tiny import seeded
from tests.models.continuous import straight
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import CHAIN, CounterNoise, draw_keys

LAW = TokenLaw(guidance_scale=3.0, temperature=0.9)
LABELS = torch.tensor([3, 1])


def noise_of(seed: int) -> CounterNoise:
    return CounterNoise(draw_keys(seeded(seed), 1), "cpu")


def token(
    model: Any, name: str, z: Tensor, other: Tensor, scale: float, place: int, noise: Any, **chain: Any
) -> Tensor:
    """One token [d] from its condition and the null class's, point by point, with the noise of its place."""
    schedule, weights = model.schedule(chain["head_steps"], chain.get("eta")), model.state_dict()

    def normal(level: int) -> Tensor:
        return noise.normal(torch.tensor([[place]]), 3, CHAIN, level, torch.float64)[0, 0]

    x = normal(schedule.num_steps) * (0.9 if schedule.deterministic else 1.0)
    for level in range(schedule.num_steps - 1, -1, -1):
        time = float(schedule.times[level])
        with_class, without = (straight.head(weights, name, x, time, c) for c in (z, other))
        mixed = without[:3] + scale * (with_class[:3] - without[:3])
        mean, sigma = schedule.kernel(x[None], level, torch.cat([mixed, with_class[3:]])[None])
        width = sigma[0] if level else chain.get("final_noise", 0.0)
        x = mean[0] + 0.9 * width * normal(level)
    return x
