"""Verification of drafts: which are kept, what replaces the first refused one, and what the next call may test.

    identical   keep a draft if it is the token that the slot's own noise draws from the target law.
    exact       keep a draft x with probability min(1, target(x) / draft(x)), and replace the first refused one from
                (target - draft)+, normalised (Leviathan et al. 2023, algorithm 1).
    block       as exact, with one test of the whole chain of a drafter (`raster.block`).
    relaxed     as exact, with the probability of a relaxed rule (`relaxed`).

Every sampler that tests chains of drafts calls `verify`: one chain a sample, several (rows of a picture), or chains of
columns, whose K tokens stand or fall together. `raster.siblings` tests several drafts of one slot in turn. On a GPU one
kernel does everything after the model, if the rule allows; samplers need not know. `served.verify_window` is the same
test for a serving engine: plain tensors, and no state between calls.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from visual_spec.kernels.launch import fits
from visual_spec.samplers.core.acceptance import (
    EXACT,
    AcceptanceRule,
    accepted_prefix,
    exact_acceptance,
    residual,
)
from visual_spec.samplers.core.checks import CheckedLaw
from visual_spec.samplers.core.drafts import Draft, rows_of
from visual_spec.samplers.core.noise import ACCEPT, RESIDUAL, TOKEN, CounterNoise
from visual_spec.samplers.core.state import draw_near, draw_tokens
from visual_spec.samplers.core.trace import DivergenceMeter


@dataclass(frozen=True)
class Verdict:
    """The outcome of a call for its drafts.

    Attributes:
        tokens: long [B, N]. Kept drafts, then the replacement of the first refused one. Each later position of a chain
            holds a draft of its slot. Under acceptance "identical" that is the token that the slot's noise draws; if
            `coupled`, a draw from the target law that rarely differs from the draft; otherwise the draft unchanged.
        kept: long [B], drafts (columns) before the first refusal; [B, chains] for several chains.
        laws: [B, N, V] log-probabilities of the target; None if a kernel did not need them.
        drawn: long [B, N], a draw from the target law at every position, if a kernel made one; else None.
        near: bool [B, N], the near-ties; None if they were not asked for.
        replaced: bool [B], whether the first refused position holds its final tokens; None: it does.
    """

    tokens: Tensor
    kept: Tensor
    laws: Tensor | None
    drawn: Tensor | None = None
    near: Tensor | None = None
    replaced: Tensor | None = None

    @property
    def advance(self) -> Tensor:
        """How many positions are final, long [B]."""
        return self.kept + (1 if self.replaced is None else self.replaced)


def verify(
    law: CheckedLaw,
    noise: CounterNoise,
    logits: Tensor,
    slots: Tensor,
    draft: Draft,
    guided: bool,
    *,
    rule: AcceptanceRule = EXACT,
    round: int | Tensor = 0,
    coupled: bool = False,
    redraw: tuple[int, int | Tensor] | None = None,
    meter: DivergenceMeter | None = None,
    needs_laws: bool = False,
    unit: float | None = None,
) -> Verdict:
    """Test the drafts of a window: one chain a sample.

    Args:
        logits: [R, N, V], which predict `slots`, long [B, N].
        draft: a draft for each of these slots, except the last.
        rule: `IDENTICAL`, `EXACT`, `BLOCK`, or a relaxed one.
        round: round of the test and the replacement.
        coupled: also keep or replace the drafts after the refusal, for the next call (SCD / MC-SJD).
        redraw: stream and round of the noise with which the sampler will draw its next drafts from the laws. A kernel
            makes these draws on the way (`Verdict.drawn`).
        meter: counts the mass that a lossy rule moves.
        needs_laws: the sampler needs `Verdict.laws` whatever the rule.
        unit: mark near-ties under the identical rule, where numbers are rounded to this unit (`rounding_unit`).
    """
    if rule.identical and unit is not None:
        tokens, near = draw_near(law, noise, logits, slots, guided, unit)
        target = law(logits, slots, guided) if needs_laws else None
        return Verdict(tokens, accepted_prefix(tokens == draft.tokens), target, near=near)
    if fits(logits) and rule.identical and not needs_laws:
        tokens = draw_tokens(law, noise, logits, slots, guided)
        return Verdict(tokens, accepted_prefix(tokens == draft.tokens), None)
    if fits(logits) and rule is EXACT:
        return _verify_by_kernel(law, noise, logits, slots, draft, guided, round, redraw)
    target = law(logits, slots, guided)  # [B, N, V]
    return verify_laws(
        target,
        noise,
        slots,
        draft,
        rule=rule,
        round=round,
        coupled=coupled,
        meter=meter,
        inside=slots < law.num_tokens,
    )


def verify_laws(
    target: Tensor,
    noise: CounterNoise,
    slots: Tensor,
    draft: Draft,
    *,
    rule: AcceptanceRule,
    round: int | Tensor,
    coupled: bool = False,
    meter: DivergenceMeter | None = None,
    inside: Tensor | None = None,
    chains: int = 1,
    group: int = 1,
) -> Verdict:
    """As `verify`, with known target laws. N = chains * positions * group.

    Args:
        target: [B, N, V] log-probabilities.
        slots: long [B, N], the counter slots of the noise.
        draft: the drafts; the last position of every chain has none.
        inside: bool [B, N], the entries that the meter may count.
        chains: number of chains, tested independently.
        group: tokens per position (codebooks of a column), kept or refused together. In the first refused position the
            tokens that pass their own tests stay, and the others are replaced.
    """
    drafts = draft.tokens
    if rule.identical:
        tokens = noise.categorical(target, slots, TOKEN)
        kept, _ = _first_refusals(tokens == drafts, chains, group)
        return Verdict(tokens, kept, target)
    assert draft.label is not None
    there, at = drafts >= 0, drafts.clamp(min=0)
    label = draft.label.dense(drafts)  # [B, N, V], -inf where there is no draft
    if rule.whole is not None:
        kept, replacement = rule.whole(target, label, drafts, noise, slots, round)
        return Verdict(at.scatter(1, kept[:, None], replacement), kept, target)
    # The rule's value for a missing draft is undefined, perhaps nan.
    probability = rule.probability(target, label, at).masked_fill(~there, 0)
    accept = keep = noise.bernoulli(probability, slots, ACCEPT, round)
    kept, ahead = _first_refusals(accept, chains, group)  # ahead: positions up to the first refused one
    if meter is not None:
        exact = exact_acceptance(target, label, at).masked_fill(~there, 0)
        meter.add(probability, exact, ahead & there if inside is None else ahead & there & inside)
        if coupled:
            # A draft for the next call is labelled with the target law and must follow it, so the exact rule decides
            # here.
            keep = torch.where(ahead, accept, noise.bernoulli(exact, slots, RESIDUAL, round))
    if coupled:
        # Keep-or-replace is itself a draw from the target law, and agrees with the draft as often as possible.
        refused = ahead & ~_before(kept, drafts.shape[1], group)
        left = residual(rule.refused_target(target, drafts.masked_fill(~refused, -1)), label)
        return Verdict(
            torch.where(keep, drafts, noise.categorical(left, slots, RESIDUAL, round)), kept, target
        )
    where = _positions(kept, drafts.shape[1], group)  # long [B, chains * group], the first refused position
    left = rule.refused_target(rows_of(target, where), drafts.gather(1, where))
    left = residual(left, rows_of(label, where))
    replacement = noise.categorical(left, slots.gather(1, where), RESIDUAL, round)
    replacement = torch.where(accept.gather(1, where), drafts.gather(1, where), replacement)
    return Verdict(at.scatter(1, where, replacement), kept, target)


# -- positions -------------------------------------------------------------------------------------------------------


def _first_refusals(accept: Tensor, chains: int, group: int) -> tuple[Tensor, Tensor]:
    """Return the kept positions of each chain, long [B] or [B, chains]; and bool [B, N], up to the first refusal."""
    kept = accepted_prefix(accept.view(len(accept), chains, -1, group).all(-1))  # [B, chains]
    ahead = _before(kept + 1, accept.shape[1], group)
    return (kept[:, 0] if chains == 1 else kept), ahead


def _before(count: Tensor, size: int, group: int) -> Tensor:
    """Mark the first `count` positions of every chain: long [B] or [B, chains] to bool [B, size]."""
    count = count.view(len(count), -1)
    position = torch.arange(size // count.shape[1] // group, device=count.device)
    return (position < count[..., None])[..., None].expand(-1, -1, -1, group).flatten(1)


def _positions(kept: Tensor, size: int, group: int) -> Tensor:
    """Return the entries of the first refused position of every chain: long [B, chains * group]."""
    kept = kept.view(len(kept), -1)  # [B, chains]
    first = torch.arange(0, size, size // kept.shape[1], device=kept.device) + kept * group
    return (first[..., None] + torch.arange(group, device=kept.device)).flatten(1)


# -- kernels ---------------------------------------------------------------------------------------------------------


def _verify_by_kernel(
    law: CheckedLaw,
    noise: CounterNoise,
    logits: Tensor,
    slots: Tensor,
    draft: Draft,
    guided: bool,
    round: int | Tensor,
    redraw: tuple[int, int | Tensor] | None,
) -> Verdict:
    """Verify by the exact rule in one kernel. It replaces every refused draft, so `coupled` makes no difference."""
    from visual_spec.kernels.verify import verify as verify_kernel

    assert draft.label is not None
    stream, draw_round = redraw or (None, 0)
    laws, accept, tokens, drawn, finite = verify_kernel(
        logits,
        draft.tokens.clamp(min=0),
        draft.label.laws.float(),  # a drafter may compute in float64
        draft.label.rows,
        noise.keys,
        slots,
        law.numbers(logits, slots, guided),
        round=round,
        accept_stream=ACCEPT,
        residual_stream=RESIDUAL,
        draw_stream=stream,
        draw_round=draw_round,
    )
    law.remember(~finite, slots)
    return Verdict(tokens, accepted_prefix(accept), laws, None if stream is None else drawn)
