"""Rules that test drafts of continuous tokens, each with what it replaces a refused one by.

A draft is the end of a chain. Its marginal density is an integral over all chains that end there, which nobody can
compute; so the test of discrete drafts, min(1, target / draft), needs another space in which both laws have densities:
the points of the chain one by one (`ChainRule`), the whole chain (`PathRule`), or a chain without noise (`OdeRule`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from visual_spec.samplers.continuous.coupling import (
    couple,
    keep_probability,
    log_density,
    rejected,
    rounds_of,
)
from visual_spec.samplers.continuous.denoising import ChainLog, Chains, Law, drawn
from visual_spec.samplers.continuous.flow_density import pulled, pushed
from visual_spec.samplers.core.acceptance import accepted_prefix
from visual_spec.samplers.core.noise import ACCEPT, CHAIN, DRAFT, PROPOSAL, RESIDUAL, CounterNoise

_AT_ONCE = 4  # chains that a residual proposes at once
_DRAWS = 128  # from each of two laws, to measure what a rule does to them
_MEASURED = 1023  # the level of their noise; chains have at most 1000


@dataclass
class Window:
    """The slots that one call of the target scores: N drafts, and the slot behind them.

    Attributes:
        target: chains of the N + 1 slots, given all drafts before each; behind them those of columns to be redrafted.
        draft: chains of the N drafts, as the drafter steers them, for rules that need them.
        log: the record of the drafts.
        noise: of the samples.
        places: long [B, N + 1 (+ redrafted columns)].
        tested: bool [B, N], drafts that are tested: those of slots on the grid.
    """

    target: Chains
    draft: Chains | None
    log: ChainLog
    noise: CounterNoise
    places: Tensor
    tested: Tensor

    @property
    def drafts(self) -> Tensor:
        """Places of the drafts, long [B, N]."""
        return self.places[:, : self.log.points.shape[1]]


@dataclass
class ContinuousVerdict:
    """What a rule says of a window.

    Attributes:
        tokens: [B, N + 1, d]. That of a kept draft is committed; so is that of the first refused one, or of the slot
            behind if all are kept.
        kept: bool [B, N].
        moved: [B, N], for a lossy rule that knows it: the estimate of `DivergenceMeter`.
        log: of tokens that were drawn as chains of the target: of all slots ("aligned"), or of redrafted columns.
    """

    tokens: Tensor
    kept: Tensor
    moved: Tensor | None = None
    log: ChainLog | None = None


class Rule:
    """A rule.

    Attributes:
        lossless: whether committed tokens follow the law of plain decoding.
        stream: the noise of the drafts' chains: their own, or that of the target, which they then share.
        final_noise: whether the chain's last level has to add noise.
        steps: what other noise of the chain's steps the rule needs: "some", "none", or "any".
        truncates: whether what is behind a refused draft is discarded, and what is verified knows the drafts before it.
    """

    lossless: ClassVar[bool] = True
    stream: ClassVar[int] = DRAFT
    final_noise: ClassVar[bool] = True
    steps: ClassVar[str] = "any"
    truncates: ClassVar[bool] = True

    def verify(self, window: Window) -> ContinuousVerdict:
        """Test the drafts, and draw what replaces them."""
        raise NotImplementedError


class ChainRule(Rule):
    """The target walks its own chain beside the draft's: at each level it takes the draft's next point with probability
    min(1, target / draft), and else the point that a maximal coupling gives. Parted chains may meet again. A draft is
    kept if the chains end at one point (De Bortoli et al. 2025, algorithm 3, along two heads)."""

    def verify(self, window: Window) -> ContinuousVerdict:
        """See `Rule`. Columns to be redrafted walk along, with the noise of drafts."""
        target, log, noise = window.target, window.log, window.noise
        count = window.drafts.shape[1]
        own, redrafted = window.places[:, : count + 1], window.places[:, count + 1 :]
        # What is not tested, and the slot behind, walk alone.
        free = torch.cat([~window.tested, torch.ones_like(window.tested[:, :1])], 1)[..., None]
        x = target.start(noise, window.places)[:, : count + 1]
        x = torch.where(free, x, _padded(log.points[:, :, -1]))
        again = [target.start(noise, window.places, DRAFT)[:, count + 1 :]]
        laws, kept = [], torch.zeros_like(window.tested)
        for level in reversed(range(target.law.levels)):
            mean, sigma = target.kernel(torch.cat([x, again[-1]], 1), level)
            points, kept = couple(
                log.points[:, :, level],
                log.law(level),
                (mean[:, :count], sigma[:, :count]),
                noise,
                window.drafts,
                level,
                window.tested,
            )
            alone = drawn((mean[:, : count + 1], sigma[:, : count + 1]), noise, own, level, CHAIN)
            x = torch.where(free, alone, _padded(points))
            laws.append((mean[:, count + 1 :], sigma[:, count + 1 :]))
            again.append(drawn(laws[-1], noise, redrafted, level, DRAFT))
        means, sigmas = (torch.stack(parts[::-1], 2) for parts in zip(*laws, strict=True))
        return ContinuousVerdict(
            x, kept & window.tested, log=ChainLog(torch.stack(again[::-1], 2), means, sigmas)
        )


class WholeRule(Rule):
    """One test of a whole draft, min(1, target / draft), and a residual by rejection: a draw of the target is kept with
    probability (1 - draft / target)+. That takes one draw of the target a token in the mean, and has a long tail."""

    def ratio(self, window: Window) -> tuple[Tensor, Tensor]:
        """log(target / draft) of the drafts, float64 [B, N], and tokens [B, 1, d] of the slot behind them."""
        raise NotImplementedError

    def propose(
        self, target: Chains, draft: Chains, noise: CounterNoise, places: Tensor, attempts: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Draws [b, K, d] of the target, and log(draft / target) there, float64 [b, K]."""
        raise NotImplementedError

    def verify(self, window: Window) -> ContinuousVerdict:
        """See `Rule`."""
        ratio, behind = self.ratio(window)
        kept = window.noise.uniform(window.drafts, ACCEPT, 0, torch.float64).log() < ratio
        tokens = torch.cat([window.log.tokens, behind], 1)
        columns = accepted_prefix(kept)
        inside = columns < kept.shape[1]
        at = columns.clamp_max(kept.shape[1] - 1)
        left = (inside & window.tested.gather(1, at[:, None])[:, 0]).nonzero()[:, 0]
        first = 0
        while len(left):
            attempts = torch.arange(first, first + _AT_ONCE, device=left.device).expand(len(left), -1)
            column = columns[left]
            own = CounterNoise(window.noise.keys[left], left.device)
            places = window.places[left, column][:, None].expand(-1, _AT_ONCE)
            assert window.draft is not None
            target, draft = (chains.pick(left, column, _AT_ONCE) for chains in (window.target, window.draft))
            points, log_ratio = self.propose(target, draft, own, places, attempts)
            uniform = own.uniform(places, PROPOSAL, rounds_of(0, attempts), torch.float64)
            # What is not finite is never kept; whoever reads the tokens refuses it.
            good = (uniform < keep_probability(log_ratio)) | log_ratio.isnan() | ~points.isfinite().all(-1)
            hit, place = good.any(1), good.to(torch.uint8).argmax(1)
            tokens[left[hit], column[hit]] = points[hit, place[hit]]
            left, first = left[~hit], first + _AT_ONCE
        return ContinuousVerdict(tokens, kept)


class PathRule(WholeRule):
    """The whole chain is the event: target and draft are the products of the laws of its steps."""

    steps = "some"

    def ratio(self, window: Window) -> tuple[Tensor, Tensor]:
        """See `WholeRule`."""
        target, log = window.target, window.log
        count = window.drafts.shape[1]
        behind = window.places[:, count:]
        free = target.start(window.noise, window.places)[:, count:]
        ratio = -log.log_likelihood()
        for level in reversed(range(target.law.levels)):
            # The drafts' own points, and the chain of the slot behind them.
            mean, sigma = target.kernel(torch.cat([log.points[:, :, level + 1], free], 1), level)
            ratio = ratio + log_density(log.points[:, :, level], mean[:, :count], sigma[:, :count])
            free = drawn((mean[:, count:], sigma[:, count:]), window.noise, behind, level, CHAIN)
        return ratio, free

    def propose(
        self, target: Chains, draft: Chains, noise: CounterNoise, places: Tensor, attempts: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `WholeRule`."""
        log = target.log(noise, places, RESIDUAL, attempts)
        return log.tokens, draft.log_likelihood(log) - log.log_likelihood()


class OdeRule(WholeRule):
    """A chain without noise: a token's own density is known (`flow_density`), so the test is that of discrete tokens
    and keeps as much as any rule can."""

    final_noise = False
    steps = "none"

    def ratio(self, window: Window) -> tuple[Tensor, Tensor]:
        """See `WholeRule`."""
        count = window.drafts.shape[1]
        assert window.draft is not None
        tokens, draft = pushed(window.draft, window.log.points[:, :, -1])
        tested = torch.cat([window.tested, torch.zeros_like(window.tested[:, :1])], 1)
        target = pulled(window.target, _padded(tokens), tested)[:, :count]
        return target - draft, window.target.walk(window.noise, window.places)[:, count:]

    def propose(
        self, target: Chains, draft: Chains, noise: CounterNoise, places: Tensor, attempts: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `WholeRule`."""
        tokens, own = pushed(target, target.start(noise, places, RESIDUAL, attempts))
        return tokens, pulled(draft, tokens, torch.ones_like(own, dtype=torch.bool)) - own


class AlignedRule(Rule):
    """The target draws every token itself, with noise that the draft shares; a draft near it stays as the context of
    what is behind. So a token is drawn exactly, but given context that is off by up to the tolerance.

    Args:
        tolerance: root mean square of the difference, over the d numbers, up to which a draft is near.
    """

    lossless = False
    stream = CHAIN
    final_noise = False

    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance

    def verify(self, window: Window) -> ContinuousVerdict:
        """See `Rule`."""
        log = window.target.log(window.noise, window.places, CHAIN)
        apart = (log.tokens[:, :-1] - window.log.tokens).square().mean(-1).sqrt()
        return ContinuousVerdict(log.tokens, apart <= self.tolerance, log=log)


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
        """See `Rule`."""
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
    refused one is replaced in place, and what was drafted behind it stays. Drafts have no noise of the last level, and
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


RULES = {
    "chain": ChainRule,
    "path": PathRule,
    "ode": OdeRule,
    "aligned": AlignedRule,
    "cspd": CspdRule,
    "cspd-release": CspdReleaseRule,
}


def make_rule(name: str, tolerance: float) -> Rule:
    """The rule of a name."""
    return AlignedRule(tolerance) if name == "aligned" else RULES[name]()


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


def _padded(columns: Tensor) -> Tensor:
    """Columns [B, N, d] and one of zeros."""
    return torch.cat([columns, torch.zeros_like(columns[:, :1])], 1)
