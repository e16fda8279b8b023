"""Rules that decide whether a draft is kept, and what replaces it.

A rule compares two laws: the target law (the model's law at a slot), and the draft law (the law that the draft at that
slot was truly drawn from). Both are log-probabilities, -inf outside the support.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


def exact_acceptance(target: Tensor, draft_law: Tensor, drafts: Tensor) -> Tensor:
    """Return the probability of keeping each draft, min(1, target / draft).

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


def residual(target: Tensor, draft_law: Tensor) -> Tensor:
    """Return the law that replaces a refused draft, (target - draft)+ normalised: [B, N, V] log-probabilities.

    A slot without a draft has the draft law zero (-inf everywhere), so its residual is the target itself. Where the
    difference has no mass, both laws are equal and no draft is ever refused; the function returns the target there.
    """
    difference = target.exp().sub_(draft_law.exp()).clamp_(min=0)
    mass = difference.sum(-1, keepdim=True)
    return torch.where(mass > 0, difference.div_(mass).log_(), target)


@dataclass(frozen=True)
class AcceptanceRule:
    """A rule together with the tables it needs.

    Attributes:
        probability: function of target [B, N, V], draft law [B, N, V] and drafts [B, N]; returns the probability of
            keeping each draft, [B, N].
        merge: for a rule that lends a draft the mass of other tokens. Function of target [B, N, V] and drafts [B, N]
            (-1 where a slot has none); returns the law [B, N, V] that takes the target's place in `residual`.
        lossless: whether the committed token follows the target law.
        behind: for a rule with a budget per slot. Returns the rule for the next sibling, from the probability [B, N] of
            keeping this one, its target, its draft law, and the drafts (-1 where a slot has none).
        identical: keep a draft exactly when it is the token that the slot's own noise draws. The labels of drafts are
            not used.
        block: test the drafts of a chain together (`visual_spec.samplers.core.block`).
    """

    probability: Callable[[Tensor, Tensor, Tensor], Tensor] = exact_acceptance
    merge: Callable[[Tensor, Tensor], Tensor] | None = None
    lossless: bool = True
    behind: Callable[[Tensor, Tensor, Tensor, Tensor], AcceptanceRule] | None = None
    identical: bool = False
    block: bool = False

    def refused_target(self, target: Tensor, drafts: Tensor) -> Tensor:
        """Return the law whose `residual` replaces a refused draft. Arguments and result are those of `merge`."""
        return target if self.merge is None else self.merge(target, drafts)

    def next_rule(
        self, probability: Tensor, target: Tensor, draft_law: Tensor, drafts: Tensor
    ) -> AcceptanceRule:
        """Return the rule for the sibling after a refused draft. Arguments are those of `behind`."""
        return self if self.behind is None else self.behind(probability, target, draft_law, drafts)


EXACT = AcceptanceRule()
IDENTICAL = AcceptanceRule(identical=True)
BLOCK = AcceptanceRule(block=True)


def accepted_prefix(accept: Tensor) -> Tensor:
    """Return how many drafts are kept before the first refusal: BoolTensor [..., N] to long [...]."""
    return accept.long().cumprod(-1).sum(-1)
