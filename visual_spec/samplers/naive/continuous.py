"""Continuous tokens, each drawn by a chain of denoising steps."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from visual_spec.models.core.continuous import CausalContinuousModel, guided
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import (
    ACCEPT,
    CHAIN,
    DRAFT,
    PROPOSAL,
    RESIDUAL,
    CounterNoise,
    rounds_of,
)
from visual_spec.samplers.naive.next_token import slots_from


class Chain:
    """The chain of normal laws by which a model draws the token of one slot: points [1, d], from noise to token.

    Args:
        z: [R, dim], the condition of the slot, conditional row first.
    """

    def __init__(
        self,
        model: CausalContinuousModel,
        z: Tensor,
        law: TokenLaw,
        slot: int,
        levels: int,
        eta: float,
        end: float,
    ) -> None:
        self.model, self.z, self.law, self.levels, self.end = model, z, law, levels, end
        self.schedule = model.schedule(levels, eta)
        # Grows along the picture.
        self.scale = 1 + (law.guidance_scale - 1) * (slot + 1) / model.grid.num_tokens
        self.place = model.places[slot].view(1, 1)

    def step(self, x: Tensor, level: int) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the point after x."""
        modulations = self.model.head.modulations(self.z, self.schedule.times[level : level + 1])[0]
        output = self.model.head.denoise(x.expand(len(self.z), -1).to(self.z.dtype), modulations)
        if self.law.guided:
            output = guided(output, self.scale, x.shape[-1])
        mean, sigma = self.schedule.kernel(x, level, output.to(x.dtype))
        sigma = sigma if level else torch.full_like(mean, self.end)
        return mean, sigma * self.law.temperature

    def draw(self, noise: CounterNoise, stream: int, attempt: int | None = None) -> list[Tensor]:
        """All points of a chain, the token last."""
        d, dtype = self.model.token_dim, torch.promote_types(self.z.dtype, torch.float32)
        tried = None if attempt is None else torch.tensor([[attempt]])
        points = [noise.normal(self.place, d, stream, rounds_of(self.levels, tried), dtype)[0]]
        for level in reversed(range(self.levels)):
            mean, sigma = self.step(points[-1], level)
            points.append(
                mean + sigma * noise.normal(self.place, d, stream, rounds_of(level, tried), dtype)[0]
            )
        return points

    def log_density(self, points: list[Tensor]) -> float:
        """Of a whole chain after its start, up to a constant."""
        total = 0.0
        for level, (x, following) in zip(
            reversed(range(self.levels)), zip(points, points[1:], strict=False), strict=True
        ):
            mean, sigma = (one.double() for one in self.step(x, level))
            total -= float((0.5 * ((following.double() - mean) / sigma).square() + sigma.log()).sum())
        return total


def continuous_speculative(
    model: CausalContinuousModel,
    drafter: CausalContinuousModel,
    condition: object,
    law: TokenLaw,
    noise: CounterNoise,
    num_drafts: int = 4,
    **chain: Any,
) -> tuple[Tensor, int]:
    """Speculative decoding of continuous tokens, with the whole denoising chain as the event. Lossless.

    Wang et al., "Continuous speculative decoding for autoregressive image generation", 2411.11925, compare densities of
    the chains that draw a draft. Here the ratio of the whole chains decides, and a refused draft is replaced by
    rejection from (target - draft)+, so no approximation is left. Returns tokens [1, L, d] and the model's calls.

    Args:
        chain: `levels`, `eta` and `end`, the standard deviation of the last level's noise, see `Chain`.
    """
    length = model.grid.num_tokens
    state = model.prefill(condition, batch_size=1, guided=law.guided, window=length)
    small = drafter.prefill(condition, batch_size=1, guided=law.guided, window=length)
    tokens, calls = Chain(model, state.conditions, law, 0, **chain).draw(noise, CHAIN)[-1][None], 1

    def after(network: Any, cache: Any, text: Tensor) -> Chain:
        """The chain of the slot after a text. The sampler scores all slots of the window in one call."""
        z = network(cache, text.to(network.dtype), slots_from(0, text.shape[1]))[:, -1]
        return Chain(network, z, law, text.shape[1], **chain)

    while (done := tokens.shape[1]) < length:
        text, drafted = tokens, []
        for _ in range(min(num_drafts, length - done)):
            drafted.append((own := after(drafter, small, text), own.draw(noise, DRAFT)))
            text = torch.cat([text, drafted[-1][1][-1][None]], 1)
        calls, kept = calls + 1, True
        for draft, points in drafted:
            target = after(model, state, tokens)
            ratio = target.log_density(points) - draft.log_density(points)
            kept = float(noise.uniform(target.place, ACCEPT, 0, torch.float64).log()) < ratio
            points = points if kept else replacement(target, draft, noise)
            tokens = torch.cat([tokens, points[-1][None]], 1)
            if not kept:
                break
        if kept and tokens.shape[1] < length:
            tokens = torch.cat([tokens, after(model, state, tokens).draw(noise, CHAIN)[-1][None]], 1)
    return tokens, calls


def replacement(target: Chain, draft: Chain, noise: CounterNoise) -> list[Tensor]:
    """A chain from (target - draft)+, normalised: chains of the target, each kept with probability 1 - draft / target,
    until one is."""
    attempt = 0
    while True:
        points = target.draw(noise, RESIDUAL, attempt)
        ratio = draft.log_density(points) - target.log_density(points)
        round = rounds_of(0, torch.tensor([[attempt]]))
        if float(noise.uniform(target.place, PROPOSAL, round, torch.float64)) < -math.expm1(min(ratio, 0.0)):
            return points
        attempt += 1
