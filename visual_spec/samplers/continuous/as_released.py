"""Continuous speculative decoding (CSpD) as it was published, and as its code was released. Both change the law.

Wang et al. 2024, "Continuous speculative decoding for autoregressive image generation", section 3. The exact rules are
in `rules`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from visual_spec.samplers.continuous.coupling import keep_probability, log_density, rejected
from visual_spec.samplers.continuous.denoising import Law
from visual_spec.samplers.continuous.rules import ContinuousVerdict, Rule, Window
from visual_spec.samplers.core.noise import ACCEPT, CHAIN, RESIDUAL, rounds_of

_DRAWS = 128  # from each of two laws, to measure what a rule does to them
_MEASURED = 1023  # the level of their noise; chains have at most 1000


class CspdRule(Rule):
    """The published criterion (Wang et al. 2024, continuous speculative decoding, section 3): both chains share their
    noise up to the last level, whose two laws are compared, times a factor for the widths of the levels before.

    Conditional on the shared noise the last law is the target's own, so without that factor the test would be exact.
    With it, what is accepted and what replaces the rest are no longer normalised alike.

    `moved` estimates the distance between the committed token's law and the target's, both given the shared noise
    (`_scaled_distance`). Without that knowledge the laws are mixtures of these, and at most as far apart in the mean.
    """

    lossless = False
    stream = CHAIN
    steps = "some"
    tries = 4096

    def verify(self, window: Window) -> ContinuousVerdict:
        noise, draft = window.noise, window.log
        log = window.target.log(noise, window.places, CHAIN)
        count = window.drafts.shape[1]
        mean, sigma = (part[:, :count] for part in log.law(0))
        # log of the product of draft / target over the widths of all levels but the last.
        factor = _log_widths(draft.sigma) - _log_widths(log.sigma[:, :count])
        ratio = log_density(draft.tokens, mean, sigma) - log_density(draft.tokens, *draft.law(0))
        kept = noise.uniform(window.drafts, ACCEPT, 0, torch.float64).log() < factor + ratio
        tokens = log.tokens.clone()
        tokens[:, :count] = torch.where(kept[..., None], draft.tokens, mean)
        own = tokens[:, :count].clone()
        residual = _last_residual(mean, sigma, *draft.law(0), factor)
        own = rejected(own, ~kept & window.tested, residual, noise, window.drafts, 0, self.tries)
        tokens[:, :count] = own
        fresh = noise.normal(
            window.drafts, 2 * _DRAWS * mean.shape[-1], RESIDUAL, rounds_of(_MEASURED, None), mean.dtype
        )
        moved = _scaled_distance((mean, sigma), draft.law(0), factor, fresh, self.tries)
        return ContinuousVerdict(tokens, kept, moved=moved)


class CspdReleaseRule(Rule):
    """What the published code does. The target scores all drafts of a block given what was known before the block; a
    refused one is replaced in place, and what was drafted after it stays. Drafts have no noise of the last level, and
    are tested there with its width taken 42 times as large, and with the inverse of the published factor. A residual
    that finds nothing in 100 tries leaves zeros.

    `moved` counts every kept draft whole: it is a point, of which the target's law has no mass. What the missing
    context does comes on top.
    """

    lossless = False
    stream = CHAIN
    final_noise = False
    steps = "some"
    truncates = False
    temperature = 42.0
    tries = 100

    def verify(self, window: Window) -> ContinuousVerdict:
        """See `Rule`. `window.log.tokens` are the means of the last level."""
        noise, draft = window.noise, window.log
        assert window.draft is not None
        log = window.target.log(noise, window.places, CHAIN)
        count, wide = window.drafts.shape[1], self.temperature
        # The widths that the heads give to the last level, whatever is added there.
        start = window.target.schedule.kernel
        point, other_point = log.points[:, :, 1], draft.points[:, :, 1]
        mean, sigma = start(point, 0, window.target.output(point, 0))
        mean, sigma = mean[:, :count], sigma[:, :count]
        other, other_sigma = start(other_point, 0, window.draft.output(other_point, 0))
        factor = _log_widths(log.sigma[:, :count]) - _log_widths(draft.sigma)
        widened = log_density(other, mean, wide * sigma) - log_density(other, other, wide * other_sigma)
        ratio = widened + factor
        kept = noise.uniform(window.drafts, ACCEPT, 0, torch.float64).log() < ratio
        tokens = torch.where(kept[..., None], other, 0.0)
        residual = _last_residual(mean, sigma, other, other_sigma, factor)
        tokens = rejected(tokens, ~kept & window.tested, residual, noise, window.drafts, 0, self.tries)
        moved = ratio.exp().clamp_max(1.0)
        return ContinuousVerdict(torch.cat([tokens, log.tokens[:, count:]], 1), kept, moved=moved)


def _log_widths(sigma: Tensor) -> Tensor:
    """Sum over levels and numbers of log sigma, without the last level: float64 [B, N] of [B, N, T, d]."""
    return sigma[:, :, 1:].double().log().sum((2, 3))


def _last_residual(mean: Tensor, sigma: Tensor, other: Tensor, other_sigma: Tensor, factor: Tensor) -> Any:
    """Proposals from a law, kept with probability (1 - other / (law exp(factor)))+; see `rejected`."""

    def propose(rows: tuple[Tensor, Tensor], fresh: Tensor) -> tuple[Tensor, Tensor]:
        own, others = ((mean, sigma), (other, other_sigma))
        (m, s), (o, w) = ([part[rows][:, None].expand_as(fresh) for part in law] for law in (own, others))
        points = m + s * fresh
        ratio = log_density(points, o, w) - log_density(points, m, s) - factor[rows][:, None]
        return points, keep_probability(ratio)

    return propose


def _scaled_distance(target: Law, draft: Law, factor: Tensor, fresh: Tensor, tries: int) -> Tensor:
    """Total variation between a law t and what the test min(1, e^f t / q) of drafts from q makes of it: [B, N].

    A refused draft is replaced from (t - q e^-f)+, whose mass is Z = 1 - A e^-f if A of the drafts are kept. Where e^f
    t is below q the committed token has density e^f t, elsewhere q + (1 - A)(t - q e^-f) / Z. The difference to t is
    integrated by draws from t or q, whichever keep all terms between 0 and 1. Residuals that give up after `tries`
    leave a point, of which t has no mass.

    Args:
        target, draft: the laws t and q, (mean, sigma), each [B, N, d].
        factor: f, [B, N].
        fresh: normal noise [B, N, 2 K d], for K draws from each law.
    """
    noise = fresh.unflatten(-1, (2, -1, target[0].shape[-1])).unbind(2)  # [B, N, K, d] each

    def scaled(law: Law, own: Tensor) -> Tensor:
        """f + log(t / q) at draws from a law."""
        points = law[0][:, :, None] + law[1][:, :, None] * own
        wide = [tuple(part[:, :, None].expand_as(points) for part in both) for both in (target, draft)]
        return factor[..., None] + log_density(points, *wide[0]) - log_density(points, *wide[1])

    of_target, of_draft = scaled(target, noise[0]), scaled(draft, noise[1])
    below = factor < 0
    mass = keep_probability(-of_target).mean(-1)  # Z, by draws of the target
    kept = of_draft.clamp_max(0.0).exp().mean(-1)  # A, by drafts
    kept = torch.where(below, factor.clamp_max(0.0).exp() * (1.0 - mass), kept)
    mass = torch.where(below, mass, 1.0 - kept * (-factor).clamp_max(0.0).exp())
    by_target = torch.where(
        of_target < 0,
        1.0,
        ((-of_target).clamp_max(0.0).exp() - 1.0 + mass[..., None]).clamp_min(0.0) / _safe(mass),
    )
    share = kept[..., None] * (of_draft - factor[..., None]).exp()  # A t / q
    by_draft = torch.where(
        of_draft < 0, of_draft.clamp_max(0.0).exp(), (1.0 - share).clamp_min(0.0) / _safe(mass)
    )
    apart = keep_probability(-factor.abs()) * torch.where(below, by_target.mean(-1), by_draft.mean(-1))
    given_up = (1.0 - kept) * (1.0 - mass).clamp(0.0, 1.0) ** tries
    return (apart + given_up).clamp_max(1.0)


def _safe(mass: Tensor) -> Tensor:
    """A divisor [B, N, 1] that is not 0."""
    return mass[..., None].clamp_min(torch.finfo(mass.dtype).tiny)
