"""Rules that test drafts of continuous tokens, each with what it replaces a refused one by.

A draft is the end of a chain. Its marginal density is an integral over all chains that end there, which nobody can
compute; so the test of discrete drafts, min(1, target / draft), needs another space in which both laws have densities:
the points of the chain one by one (`ChainRule`), the whole chain (`PathRule`), or a chain without noise (`OdeRule`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from visual_spec.models.core.continuous import ChainSettings, ContinuousModel
from visual_spec.samplers.continuous.conditions import is_causal
from visual_spec.samplers.continuous.coupling import couple, keep_probability, log_density
from visual_spec.samplers.continuous.denoising import ChainLog, Chains, drawn
from visual_spec.samplers.continuous.flow_density import pulled, pushed
from visual_spec.samplers.core.acceptance import accepted_prefix
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import ACCEPT, CHAIN, DRAFT, PROPOSAL, RESIDUAL, CounterNoise, rounds_of

_AT_ONCE = 4  # chains that a residual proposes at once


@dataclass
class Window:
    """The slots that one call of the target scores: N drafts, and the slot after them.

    Attributes:
        target: chains of the N + 1 slots, with all drafts before each as context; after them chains to be redrafted.
        draft: chains of the N drafts, as the drafter steers them, for rules that need them.
        log: the record of the drafts.
        noise: of the samples.
        places: long [B, N + 1 (+ redrafted columns)].
        tested: bool [B, N], drafts that are tested: of slots on the grid.
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
        tokens: [B, N + 1, d]. Kept drafts are committed, and so is the token of the first refused draft, or of the
            last slot if all are kept.
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

    Args:
        tolerance: of `AlignedRule`.

    Attributes:
        lossless: whether committed tokens follow the law of plain decoding.
        stream: the noise of the drafts' chains: their own, or the target's, which they then share.
        final_noise: whether the chain's last level has to add noise.
        steps: what other noise of the chain's steps the rule needs: "some", "none", or "any".
        truncates: whether what is after a refused draft is discarded, and what is verified knows the drafts before it.
    """

    lossless: ClassVar[bool] = True
    stream: ClassVar[int] = DRAFT
    final_noise: ClassVar[bool] = True
    steps: ClassVar[str] = "any"
    truncates: ClassVar[bool] = True

    def __init__(self, tolerance: float = 0.0) -> None:
        self.tolerance = tolerance

    def check(self, name: str, settings: ChainSettings, model: ContinuousModel, law: TokenLaw) -> None:
        """Refuse chains whose densities the rule could not compare; `name` is its own, as in the settings."""
        deterministic = model.schedule(settings.head_steps, settings.eta).deterministic
        if self.final_noise and settings.final_noise == 0:
            raise ValueError(
                f"rule={name!r} compares laws of the last level, which adds no noise (final_noise=0), so it would keep "
                "no draft; set final_noise, such as 0.05, of this sampler and of plain decoding, or of the model; or "
                "take another rule."
            )
        if self.steps == "none" and (not deterministic or settings.final_noise):
            raise ValueError(
                f"rule={name!r} is for chains with noise at their start only, and this one has eta={settings.eta} "
                f"and final_noise={settings.final_noise}; set eta=0 and final_noise=0 of this sampler and of plain "
                "decoding, or take another rule."
            )
        if self.steps == "some" and deterministic:
            raise ValueError(
                f"rule={name!r} compares laws of every step, and the steps of this chain add no noise (eta="
                f"{settings.eta}); set eta above 0, such as 1, of this sampler and of plain decoding, or take another "
                "rule."
            )
        if self.lossless and law.temperature == 0:
            raise ValueError(f"rule={name!r} has no densities at temperature 0; pass one above 0.")
        if not self.truncates and is_causal(model):
            raise ValueError(
                f"rule={name!r} scores drafts without those before them, which a causal model cannot; pass a masked "
                "model, or another rule."
            )

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
        # What is not tested, and the slot after the drafts, walk alone.
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
        """log(target / draft) of the drafts, float64 [B, N], and tokens [B, 1, d] of the slot after them."""
        raise NotImplementedError

    def propose(
        self, target: Chains, draft: Chains, noise: CounterNoise, places: Tensor, attempts: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Draws [b, K, d] of the target, and log(draft / target) there, float64 [b, K]."""
        raise NotImplementedError

    def verify(self, window: Window) -> ContinuousVerdict:
        ratio, later = self.ratio(window)
        kept = window.noise.uniform(window.drafts, ACCEPT, 0, torch.float64).log() < ratio
        tokens = torch.cat([window.log.tokens, later], 1)
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
        target, log = window.target, window.log
        count = window.drafts.shape[1]
        later = window.places[:, count:]
        free = target.start(window.noise, window.places)[:, count:]
        ratio = -log.log_likelihood()
        for level in reversed(range(target.law.levels)):
            # The drafts' own points, and the chain of the slot after them.
            mean, sigma = target.kernel(torch.cat([log.points[:, :, level + 1], free], 1), level)
            ratio = ratio + log_density(log.points[:, :, level], mean[:, :count], sigma[:, :count])
            free = drawn((mean[:, count:], sigma[:, count:]), window.noise, later, level, CHAIN)
        return ratio, free

    def propose(
        self, target: Chains, draft: Chains, noise: CounterNoise, places: Tensor, attempts: Tensor
    ) -> tuple[Tensor, Tensor]:
        log = target.log(noise, places, RESIDUAL, attempts)
        return log.tokens, draft.log_likelihood(log) - log.log_likelihood()


class OdeRule(WholeRule):
    """A chain without noise: a token's own density is known (`flow_density`), so the test is as for discrete tokens
    and keeps as much as any rule can."""

    final_noise = False
    steps = "none"

    def ratio(self, window: Window) -> tuple[Tensor, Tensor]:
        count = window.drafts.shape[1]
        assert window.draft is not None
        tokens, draft = pushed(window.draft, window.log.points[:, :, -1])
        tested = torch.cat([window.tested, torch.zeros_like(window.tested[:, :1])], 1)
        target = pulled(window.target, _padded(tokens), tested)[:, :count]
        return target - draft, window.target.log(window.noise, window.places, CHAIN).tokens[:, count:]

    def propose(
        self, target: Chains, draft: Chains, noise: CounterNoise, places: Tensor, attempts: Tensor
    ) -> tuple[Tensor, Tensor]:
        tokens, own = pushed(target, target.start(noise, places, RESIDUAL, attempts))
        return tokens, pulled(draft, tokens, torch.ones_like(own, dtype=torch.bool)) - own


class AlignedRule(Rule):
    """The target draws every token itself, with noise that the draft shares; a draft near it stays as the context of
    later tokens. So a token is drawn exactly, but given context that is off by up to the tolerance: the root mean
    square of the difference, over the d numbers, up to which a draft is near.
    """

    lossless = False
    stream = CHAIN
    final_noise = False

    def verify(self, window: Window) -> ContinuousVerdict:
        log = window.target.log(window.noise, window.places, CHAIN)
        apart = (log.tokens[:, :-1] - window.log.tokens).square().mean(-1).sqrt()
        return ContinuousVerdict(log.tokens, apart <= self.tolerance, log=log)


def _padded(columns: Tensor) -> Tensor:
    """Columns [B, N, d] and one of zeros."""
    return torch.cat([columns, torch.zeros_like(columns[:, :1])], 1)
