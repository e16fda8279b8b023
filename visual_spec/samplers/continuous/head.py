"""Speculation inside the head: several levels of a token's chain by one call of the head, with the same law.

The chain of a token is sequential: 100 calls of a small network that each wait for the last. But what the head
foretells hardly changes from level to level. So a few levels are drafted with the prediction of the last call, and one
call scores all points of the draft side by side (De Bortoli et al. 2025, sections 3.1 and 3.2, "frozen" drafts; coupled
by reflection, algorithm 3). Each point is kept with probability min(1, target / draft) and else replaced, so every
point follows the law of its level.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor

from visual_spec.models.core.continuous import AnyContinuousModel
from visual_spec.models.core.settings import MOST_CALLS, Within, register_to_config
from visual_spec.samplers.continuous.base import ContinuousState, Eta, FinalNoise, Guidance, HeadSteps, Order
from visual_spec.samplers.continuous.continuous import ContinuousSampler
from visual_spec.samplers.continuous.coupling import couple
from visual_spec.samplers.continuous.denoising import Chains, Law, drawn
from visual_spec.samplers.core.acceptance import accepted_prefix
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import CHAIN
from visual_spec.samplers.core.state import Run
from visual_spec.samplers.core.trace import LOSSLESS


class HeadSpeculativeSampler(ContinuousSampler):
    """Decodes as `ContinuousSampler`, with fewer calls of the head that wait for each other.

    Args:
        levels: of a chain that one call of the head scores, at least 2.
        steps: as `ContinuousSampler`, whose law this has with the same settings.

    The other settings are of the law (`ContinuousTokenSampler`); the chain's steps need noise.

    `ContinuousTrace.head_calls` counts what it saves; `target_calls` stay.
    """

    keeps = LOSSLESS

    @register_to_config
    def __init__(
        self,
        levels: Annotated[int, Within(2)] = 8,
        steps: Annotated[int | None, Within(1, MOST_CALLS, none="one a token")] = None,
        order: Order = None,
        guidance: Guidance = "linear",
        head_steps: HeadSteps = None,
        eta: Eta = None,
        final_noise: FinalNoise = None,
    ) -> None:
        pass

    def check(self, model: AnyContinuousModel, law: TokenLaw, batch_size: int, parts: dict[str, Any]) -> None:
        super().check(model, law, batch_size, parts)
        settings = self.chain_settings(model.chain)
        if model.schedule(settings.head_steps, settings.eta).deterministic:
            raise ValueError(
                f"the steps of this chain add no noise (eta={settings.eta}), so no drafted point could be kept; set "
                "eta above 0, such as 1, of this sampler and of plain decoding, or decode plainly."
            )

    def draw(self, run: Run, state: ContinuousState, z: Tensor, slots: Tensor) -> Tensor:
        chains = state.law.chains(run.model, z, slots)
        places, noise = state.places.gather(1, slots), run.noise
        walk = _Walk(chains, self.config.levels)
        x, top = chains.start(noise, places), state.law.levels - 1
        # The first call has nothing to draft with.
        level = torch.full_like(slots, top)
        tokens, rests = walk.evaluate(x[None], level[None])
        x = drawn(walk.law(x, level, tokens[0], rests[0]), noise, places, level, CHAIN)
        level, token, rest, calls = level - 1, tokens[0], rests[0], 1
        while (level >= 0).any():
            here = level >= 0
            new, steps, kept, token, rest = walk.advance(x, level, token, rest, noise, places)
            for name, number in (("tested", steps.clamp_max(self.config.levels - 1)), ("kept", kept)):
                state.count(name, torch.where(here, number, 0).sum(1), run.num_tokens)
            x = torch.where(here[..., None], new, x)
            level, calls = torch.where(here, level - steps, level), calls + 1
        state.count("head_calls", calls, run.num_tokens)
        return x


class _Walk:
    """Chains [B, N] that go down by several levels a call, each at its own pace."""

    def __init__(self, chains: Chains, width: int) -> None:
        self.chains, self.width = chains, width
        self.modulations = chains.model.head.modulations(chains.z.flatten(0, 1), chains.schedule.times)

    def evaluate(self, x: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
        """Predicted tokens [W, B, N, d] and what is after them, at points [W, B, N, d] of levels [W, B, N]."""
        chains = self.chains
        rows = torch.arange(chains.z.shape[0] * chains.z.shape[1], device=x.device)
        at = level.clamp_min(0).flatten(1)  # [W, B N]
        at = torch.cat([at, at], 1) if chains.law.guided else at
        output = chains.output_with(x, self.modulations[at, rows])
        return chains.schedule.predict(x, level.clamp_min(0), output)

    def law(self, x: Tensor, level: Tensor, token: Tensor, rest: Tensor) -> Law:
        """Of the points after `x [..., d]` of levels [...], where this token is predicted."""
        law = self.chains.law
        mean, sigma = self.chains.schedule.toward(x, level.clamp_min(0), token, rest)
        sigma = torch.where((level <= 0)[..., None], law.settings.final_noise, sigma)
        return mean, sigma * law.temperature

    def advance(
        self, x: Tensor, level: Tensor, token: Tensor, rest: Tensor, noise: Any, places: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Draft from a frozen prediction, score, and go down.

        Returns:
            points [B, N, d]; by how many levels they went down, and how many of these are kept drafts, long [B, N]; and
            the last prediction on the way.
        """
        points, drafts = [x], []
        for place in range(self.width - 1):
            drafts.append(self.law(points[-1], level - place, token, rest))
            points.append(drawn(drafts[-1], noise, places, (level - place).clamp_min(0), CHAIN))
        levels = level - torch.arange(self.width, device=level.device)[:, None, None]  # [W, B, N]
        stacked = torch.stack(points)  # [W, B, N, d]
        tokens, rests = self.evaluate(stacked, levels)
        mean, sigma = self.law(stacked, levels, tokens, rests)
        last = drawn((mean[-1], sigma[-1]), noise, places, levels[-1].clamp_min(0), CHAIN)
        # All drafted points at once, as columns.
        draft_mean, draft_sigma = (_columns(torch.stack(part)) for part in zip(*drafts, strict=True))
        draft, target = (draft_mean, draft_sigma), (_columns(mean[:-1]), _columns(sigma[:-1]))
        at, open_ = _columns(levels[:-1, ..., None])[..., 0], _columns((levels[:-1] >= 0)[..., None])[..., 0]
        slots = places.repeat(1, self.width - 1)
        new, kept = couple(_columns(stacked[1:]), draft, target, noise, slots, at.clamp_min(0), open_)
        count = places.shape[1]
        new = torch.cat([new.unflatten(1, (-1, count)).movedim(1, 0), last[None]])  # [W, B, N, d]
        kept = kept.unflatten(1, (-1, count)).movedim(1, -1)  # [B, N, W - 1]
        prefix = accepted_prefix(kept)
        stop = torch.minimum(prefix, level.clamp_min(0))  # the step that is not a kept draft, or the end
        return _at(new, stop), stop + 1, torch.minimum(prefix, stop + 1), _at(tokens, stop), _at(rests, stop)


def _columns(parts: Tensor) -> Tensor:
    """[W, B, N, d] as [B, W N, d]."""
    return parts.movedim(0, 1).flatten(1, 2)


def _at(parts: Tensor, index: Tensor) -> Tensor:
    """Entries [B, N, d] of [W, B, N, d]."""
    return parts.gather(0, index[None, ..., None].expand(1, *parts.shape[1:]))[0]
