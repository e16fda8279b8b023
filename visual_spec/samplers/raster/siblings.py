"""Siblings, several drafts for one slot: how they are drawn, and which one is kept.

Every rule is exact under one condition: the label of sibling j is the law that it was truly drawn from *given the
siblings before it*. For siblings drawn without replacement, that is the law without the earlier ones, renormalised. A
plain law as the label, or a label other than the law of the draw, changes the output law.

Laws are log-probabilities, -inf outside the support; the law of a missing draft is -inf everywhere. A slot is one row
here: target [B, V], siblings [B, K].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from visual_spec.samplers.core.acceptance import EXACT, AcceptanceRule, residual
from visual_spec.samplers.core.noise import ACCEPT, DRAFT, RESIDUAL, TOKEN, CounterNoise
from visual_spec.samplers.core.trace import DivergenceMeter

# The low half of a stream number is the purpose of a draw (the constants of `noise`, all far below 2**16). The high
# half is the sibling. No two pairs share a number, so no two siblings of a slot share bits. Sibling 0 has the plain
# stream, so a slot with one draft uses the same noise as without siblings.
_SIBLING_SHIFT = 16


def sibling_stream(stream: int, sibling: int) -> int:
    """Return the stream for the draws of one sibling."""
    return stream + (sibling << _SIBLING_SHIFT)


# ---------------------------------------------------------------------------------------------------- drawing


def without(law: Tensor, tokens: Tensor) -> Tensor:
    """Return the law given that none of `tokens` comes out: [..., V], or -inf everywhere if no other token is possible.

    Args:
        law: [..., V] log-probabilities.
        tokens: long [..., N].
    """
    left = law.scatter(-1, tokens, -torch.inf)
    mass = left.logsumexp(-1, keepdim=True)
    return torch.where(mass > -torch.inf, left - mass, left)


def with_replacement(
    law: Tensor, count: int, noise: CounterNoise, slots: Tensor, round: int | Tensor, stream: int = DRAFT
) -> tuple[Tensor, Tensor]:
    """Draw independent siblings from one law.

    Args:
        law: [B, V] log-probabilities.
        count: K.
        slots: long [B, 1].
        round, stream: address of the noise; each sibling has its own stream.

    Returns:
        Siblings, long [B, K], and the law of each given the earlier ones, [B, K, V]: the same law K times.
    """
    drawn = [
        noise.categorical(law[:, None], slots, sibling_stream(stream, sibling), round)
        for sibling in range(count)
    ]
    return torch.cat(drawn, 1), law[:, None].expand(-1, count, -1)


def without_replacement(
    law: Tensor, count: int, noise: CounterNoise, slots: Tensor, round: int | Tensor, stream: int = DRAFT
) -> tuple[Tensor, Tensor]:
    """Draw different siblings, each from the law without the earlier ones.

    They are the largest K of log-probability plus Gumbel noise (Kool, van Hoof, Welling, "Stochastic beams and where to
    find them", ICML 2019, section 2.3). Arguments as in `with_replacement`; the siblings share one row of noise.

    Returns:
        Siblings, long [B, K], and the law of each given the earlier ones, [B, K, V]. If the law has fewer than K
        tokens, the surplus siblings are no drafts, and their laws are -inf everywhere.
    """
    tokens = noise.ranking(law[:, None], slots, count, stream, round)[:, 0]  # [B, K]
    laws = [law]
    for sibling in range(1, count):
        laws.append(without(laws[-1], tokens[:, sibling - 1, None]))
    return tokens, torch.stack(laws[:count], 1)


# --------------------------------------------------------------------------------------------------- accepting


def verify_siblings(
    target: Tensor,
    siblings: Tensor,
    labels: Tensor | None,
    noise: CounterNoise,
    slots: Tensor,
    *,
    rule: AcceptanceRule,
    round: int | Tensor,
    there: Tensor | None = None,
    independent: bool = False,
    meter: DivergenceMeter | None = None,
    drawn: bool = True,
) -> tuple[Tensor, Tensor]:
    """Test the siblings of one slot in turn. Returns the kept one, and the law of the replacement if none is kept.

    Args:
        target: [B, V] log-probabilities.
        siblings: long [B, K].
        labels: [B, K, V], the law of each sibling given those before it; not needed under acceptance "identical".
        slots: long [B, 1].
        there: bool [B, K], false for a missing sibling.
        independent: test by K-SEQ; the siblings are independent draws from one law. Else by recursive rejection.
        meter: counts the mass that a lossy rule moves.
        drawn: whether the siblings were drawn; false if they are a function of earlier tokens.

    Returns:
        kept: long [B], the index of the kept sibling, K for none.
        left: [B, V], the law to draw from if none is kept, with noise `final_noise(rule, round)`.
    """
    count = siblings.shape[1]
    if rule.identical:
        same = siblings == noise.categorical(target[:, None], slots, TOKEN)  # [B, K]
        same = same if there is None else same & there
        return torch.where(same.any(1), same.long().argmax(1), count), target
    assert labels is not None
    if independent:
        return k_seq(target, siblings, labels[:, 0], noise, slots, round)
    probability, left = sibling_tests(target, siblings, labels, there, rule)
    if meter is not None:
        moved = moved_mass(target, siblings, labels if drawn else None, probability, left, there)
        tested = torch.ones_like(slots, dtype=torch.bool) if there is None else there.any(1, keepdim=True)
        meter.count(moved[:, None], tested)
    return first_kept(probability, noise, slots, round), left


def final_noise(rule: AcceptanceRule, round: int | Tensor) -> tuple[int, int | Tensor]:
    """Return stream and round of the noise that draws the token after the kept drafts."""
    return (TOKEN, 0) if rule.identical else (RESIDUAL, round)


def sibling_tests(
    target: Tensor,
    drafts: Tensor,
    draft_laws: Tensor,
    valid: Tensor | None = None,
    rule: AcceptanceRule = EXACT,
) -> tuple[Tensor, Tensor]:
    """Return the tests of `recursive_rejection` before any is made: their probabilities depend only on the siblings.

    Returns:
        The probability of keeping each sibling when those before it are refused, [B, K], 0 for a missing sibling; and
        the law after the last refusal, [B, V].
    """
    left, tests = target[:, None], []  # [B, 1, V]
    for sibling in range(drafts.shape[1]):
        token, law = drafts[:, sibling, None], draft_laws[:, sibling, None]  # [B, 1], [B, 1, V]
        there = law.gather(-1, token[..., None])[..., 0] > -torch.inf  # [B, 1]
        if valid is not None:
            there = there & valid[:, sibling, None]
        probability = rule.probability(left, law, token)
        probability = torch.where(there, probability, torch.zeros_like(probability))
        tests.append(probability)
        refused = token.masked_fill(~there, -1)
        rest = residual(rule.refused_target(left, refused), law)
        rule = rule.next_rule(probability, left, law, refused)
        left = torch.where(there[..., None], rest, left)
    return torch.cat(tests, 1), left[:, 0]


def first_kept(probability: Tensor, noise: CounterNoise, slots: Tensor, round: int | Tensor) -> Tensor:
    """Make the tests [B, K] in turn. Returns the index of the first sibling that passes, long [B]; K for none.

    `noise`, `slots`, `round`: slots is long [B, 1]; sibling j is tested with noise of `sibling_stream(ACCEPT, j)`.
    """
    accept = [
        noise.bernoulli(test, slots, sibling_stream(ACCEPT, sibling), round)
        for sibling, test in enumerate(probability.split(1, 1))
    ]
    return (~torch.cat(accept, 1)).long().cumprod(1).sum(1)


def recursive_rejection(
    target: Tensor,
    drafts: Tensor,
    draft_laws: Tensor,
    noise: CounterNoise,
    slots: Tensor,
    round: int | Tensor,
    valid: Tensor | None = None,
    rule: AcceptanceRule = EXACT,
) -> tuple[Tensor, Tensor]:
    """Test the siblings in turn, each against the residual that the earlier refusals left.

    Recursive rejection sampling: SpecInfer (Miao et al., ASPLOS 2024, section 4.3) for independent siblings; Yang et
    al. ("Multi-candidate speculative decoding", 2024, section 3) and Jeon et al. ("Recursive speculative decoding",
    2024) without replacement. Given the siblings before it, each sibling is a draft with a known law. So one step of
    `exact_acceptance` and `residual` leaves an exact problem to the next step. No other property of the laws is used.

    A relaxed rule tests each sibling as a draft for the law that is left. LANTERN (`lantern_target`) removes the mass
    lent to a refused sibling from that law together with the sibling, and the rest is renormalised; a later sibling
    with no mass left is certainly refused. Each test may then move `delta`, LANTERN's bound for point drafts, so a slot
    moves up to `delta` per test made. With bounded rules the siblings share one `delta` (`relaxed.budget_behind`).

    Args:
        target: [B, V], the target law.
        drafts: long [B, K].
        draft_laws: [B, K, V], the law that sibling j was drawn from given siblings 0 to j - 1. A deterministic sibling
            has a point law. May be an expanded view.
        noise, slots, round: as in `first_kept`.
        valid: bool [B, K], false for a missing sibling. A sibling to which its law gives no mass always counts as
            missing. `valid` must not depend on this slot's target law.
        rule: replaces the exact test.

    Returns:
        The index of the kept sibling, long [B], K for none; and the law of the replacement if all are refused, [B, V]
        (without meaning where a sibling is kept).
    """
    probability, left = sibling_tests(target, drafts, draft_laws, valid, rule)
    return first_kept(probability, noise, slots, round), left


def committed_law(probability: Tensor, drafts: Tensor, left: Tensor) -> Tensor:
    """The law of the token that tests [B, K] of siblings [B, K] commit, with `left` [B, V] after the last: [B, V]."""
    # [B, K + 1], each test and the final residual
    reached = F.pad((1 - probability).cumprod(1), (1, 0), value=1.0)
    law = left.exp() * reached[:, -1:]
    return law.scatter_add_(1, drafts, reached[:, :-1] * probability)


def moved_mass(
    target: Tensor,
    drafts: Tensor,
    draft_laws: Tensor | None,
    probability: Tensor,
    left: Tensor,
    valid: Tensor | None = None,
) -> Tensor:
    """Return the distance between the laws that relaxed and exact tests give a slot, given its siblings: [B].

    Given the siblings, relaxed tests commit one law and exact tests another. The result is the total variation distance
    (TVD) between the two. The mean of the second law over siblings is the target law, so the mean of the result is at
    least the TVD between the committed token's law and the target law:

    * siblings that are a function of earlier tokens (the most probable ones): there is nothing to average over, so the
      result is that TVD, for every rule. Only the mean over earlier tokens is estimated;
    * one drawn draft: the result is accept - exact, and its mean is the TVD, for rules that keep no draft less often
      than the exact one and replace refused drafts from the plain residual, as bounded rules do;
    * otherwise it is an upper bound: a token may gain when it is a sibling and lose when it is not, and one set of
      siblings does not show that. Under a bounded rule the mean is still at most `delta`.

    Args:
        draft_laws: None for siblings that are a function of earlier tokens.
        probability, left: from `sibling_tests` with the relaxed rule.
        target, drafts, valid: as in `recursive_rejection`.
    """
    law = committed_law(probability, drafts, left)
    if draft_laws is None:
        exact = target.exp()
    else:
        tests, rest = sibling_tests(target, drafts, draft_laws, valid)
        exact = committed_law(tests, drafts, rest)
    return (law - exact).clamp_(min=0).sum(1)


def k_seq(
    target: Tensor, drafts: Tensor, draft_law: Tensor, noise: CounterNoise, slots: Tensor, round: int | Tensor
) -> tuple[Tensor, Tensor]:
    """Test independent siblings by K-SEQ: each is kept with probability min(1, target / (rho * draft)).

    Sun et al., "SpecTr: fast speculative decoding via optimal transport", NeurIPS 2023 (arXiv 2310.15141). They prove
    that it accepts at least 1 - (1 - 1/K)**K of what the best rule for independent siblings accepts.

    Args:
        target, draft_law: [B, V].
        drafts: long [B, K], independent draws from `draft_law`.
        noise, slots, round: as in `recursive_rejection`.

    Returns:
        As `recursive_rejection`.
    """
    probability, left = k_seq_tests(target, drafts, draft_law)
    return first_kept(probability, noise, slots, round), left


def k_seq_tests(target: Tensor, drafts: Tensor, draft_law: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tests of `k_seq`: probabilities [B, K], and the law after the last, [B, V]. As `sibling_tests`."""
    rho, tries = _k_seq_rho(target, draft_law, drafts.shape[1])  # [B, 1] each
    at_draft = (target - rho.log()).gather(-1, drafts) - draft_law.gather(-1, drafts)  # [B, K]
    # One test keeps x with probability min(draft, target / rho)(x); on average `tries` tests are made.
    kept = torch.minimum(draft_law, target - rho.log()).exp() * tries
    left = (target.exp() - kept).clamp_(min=0)
    mass = left.sum(-1, keepdim=True)
    return at_draft.exp().clamp_(max=1), torch.where(mass > 0, (left / mass).log_(), target)


def _k_seq_rho(target: Tensor, draft_law: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the least rho in [1, K] without negative residual mass, and the mean number of tests: [B, 1] each.

    If one test accepts with probability beta, the mean number of tests is the sum of (1 - beta)**j over j < K. No token
    gets more than its target mass as long as this mean is at most rho. The mean falls with beta, and so rises with rho.
    """

    def tests(rho: Tensor) -> Tensor:
        refuse = 1 - torch.minimum(draft_law, target - rho.log()).exp().sum(-1, keepdim=True).clamp_(max=1)
        total = torch.ones_like(refuse)
        for _ in range(count - 1):
            total = total * refuse + 1
        return total

    low = target.new_ones(target.shape[0], 1)
    high = torch.full_like(low, count)
    # Where rho = 1 is feasible it is the answer. Otherwise bisect until the dtype has no more digits.
    for _ in range(53 if target.dtype == torch.float64 else 24):
        middle = (low + high) / 2
        feasible = tests(middle) <= middle
        low, high = torch.where(feasible, low, middle), torch.where(feasible, middle, high)
    one = torch.ones_like(high)
    high = torch.where(tests(one) <= one, one, high)
    return high, tests(high)
