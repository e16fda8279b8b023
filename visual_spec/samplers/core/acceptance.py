"""Rules that decide whether a draft is kept, and what replaces it.

A rule sees the target law (the model's law at a slot) and the draft law (the law the draft at that slot was truly
drawn from). Both are log-probabilities, -inf outside the support.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


def exact_acceptance(target: Tensor, draft_law: Tensor, drafts: Tensor) -> Tensor:
    """Probability of keeping each draft, min(1, target / draft).

    With `residual` as the replacement, the committed token follows the target law exactly (Leviathan, Kalman,
    Matias, "Fast inference from transformers via speculative decoding", ICML 2023, theorem in appendix A.1).

    Args:
        target, draft_law: [B, N, V] log-probabilities.
        drafts: long [B, N].

    Returns:
        [B, N], of the laws' dtype.
    """
    at = drafts[..., None]
    return (target.gather(-1, at) - draft_law.gather(-1, at)).exp_().clamp_(max=1).squeeze(-1)


def identical_acceptance(candidates: Tensor, drafts: Tensor) -> Tensor:
    """Keep a draft when it is the token that the slot's own noise draws from the target law: BoolTensor [B, N].

    What is committed is then `candidates` either way, so the outcome is that of autoregressive sampling with the
    same noise, whatever the drafts were.
    """
    return candidates == drafts


def residual(target: Tensor, draft_law: Tensor) -> Tensor:
    """Law of the replacement of a refused draft, (target - draft)+ normalised: [B, N, V] log-probabilities.

    A slot without a draft has the draft law zero (-inf everywhere); its residual is the target itself. Where the
    difference has no mass, both laws are equal and no draft is ever refused; the target is returned.
    """
    difference = target.exp().sub_(draft_law.exp()).clamp_(min=0)
    mass = difference.sum(-1, keepdim=True)
    return torch.where(mass > 0, difference.div_(mass).log_(), target)


@dataclass(frozen=True)
class AcceptanceRule:
    """A rule with the tables it needs, as a sampler uses it.

    Attributes:
        probability: of keeping each draft, [B, N], from target [B, N, V], draft law [B, N, V] and drafts [B, N].
        merge: a rule that lends the draft mass of other tokens moves it here: from target [B, N, V] and drafts [B, N],
            -1 where a slot has none, to the law [B, N, V] that takes the target's place in `residual`.
        lossless: the committed token follows the target law.
        behind: a rule that gives each slot a budget makes of it the rule for the next sibling here, from the
            probability [B, N] with which this one was to be kept, and what it was made of: target, draft law, and
            drafts, -1 where a slot has none.
        identical: no probability decides: a draft is kept where it is the token that the slot's own noise draws. Labels
            of drafts are not looked at.
    """

    probability: Callable[[Tensor, Tensor, Tensor], Tensor] = exact_acceptance
    merge: Callable[[Tensor, Tensor], Tensor] | None = None
    lossless: bool = True
    behind: Callable[[Tensor, Tensor, Tensor, Tensor], AcceptanceRule] | None = None
    identical: bool = False

    def refused_target(self, target: Tensor, drafts: Tensor) -> Tensor:
        """The law whose `residual` replaces a refused draft. Arguments and result as of `merge`."""
        return target if self.merge is None else self.merge(target, drafts)

    def next_rule(
        self, probability: Tensor, target: Tensor, draft_law: Tensor, drafts: Tensor
    ) -> AcceptanceRule:
        """The rule for the sibling behind a refused draft. Arguments as of `behind`."""
        return self if self.behind is None else self.behind(probability, target, draft_law, drafts)


EXACT = AcceptanceRule()
IDENTICAL = AcceptanceRule(identical=True)


def accepted_prefix(accept: Tensor) -> Tensor:
    """How many drafts are kept before the first refusal: BoolTensor [..., N] to long [...]."""
    return accept.long().cumprod(-1).sum(-1)
