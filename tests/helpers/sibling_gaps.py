"""How often the rules for several drafts of one slot keep one, beside the best that any exact rule could do."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from visual_spec.samplers.core.noise import CounterNoise
from visual_spec.samplers.raster.siblings import (
    k_seq_tests,
    sibling_tests,
    with_replacement,
    without_replacement,
)


def optimal_acceptance(target: Tensor, draft: Tensor, count: int, replace: bool = True) -> float:
    """The largest probability with which any exact rule can commit one of K siblings.

    Committing one of the siblings is a flow from sibling sets, of which set S has Pr(S), to the tokens in them, of
    which x takes at most target(x). The least cut of that network is the minimum, over sets H of tokens, of
    target(H) + 1 - Pr(all siblings are in H); the best H holds the tokens of the smallest target / draft, so that V + 1
    sets decide (Hu et al., "Towards optimal multi-draft speculative decoding", ICLR 2025, for both ways of drawing;
    Khisti et al., "Multi-draft speculative sampling", ICLR 2025, for two independent siblings).

    Args:
        target, draft: [V] log-probabilities.
        count: K, at least 1. Takes O(V) time, without replacement O(V K) for some hundred integration nodes.
        replace: siblings are independent; else drawn without replacement.

    Raises:
        ValueError: laws of other shapes, or K below 1.
    """
    if target.dim() != 1 or target.shape != draft.shape or count < 1:
        raise ValueError(
            f"target {tuple(target.shape)}, draft {tuple(draft.shape)}, count={count}; "
            "pass two laws [V] and a count of at least 1."
        )
    target, draft = target.double(), draft.double()
    there = draft > -torch.inf  # a token that is never drafted only adds to target(H)
    target, draft = target[there], draft[there]
    order = (target - draft).argsort()
    target, draft = target[order].exp(), draft[order].exp()
    if replace:
        inside = (draft.cumsum(0) / draft.sum()).clamp(max=1) ** count
    else:
        inside = _all_within_prefix(draft, min(count, len(draft)))
    cut = target.cumsum(0) + 1 - inside
    return min(1.0, float(cut.min()))  # the empty set cuts all: 1


def _all_within_prefix(draft: Tensor, count: int) -> Tensor:
    """Pr(the first K tokens drawn without replacement are among the first n), for every n from 1 to V: [V].

    Let token x ring after an exponential time of rate draft(x): the order of ringing is an order of drawing without
    replacement. The first K are within a prefix when K of it ring before the first token of the rest, which rings
    after an exponential time too. What is left is an integral over that time, t. In s = log t the integrand decays
    doubly exponentially and is analytic up to |Im s| < pi / 2, so that the trapezoidal rule of step 1/4 errs by about
    exp(-4 pi^2), less than rounding does.
    """
    rest = draft.flip(0).cumsum(0).flip(0)[1:]  # [V - 1], total rate after each prefix but the last
    step = 0.25
    last = math.log(45 / max(float(rest.min()), 1e-30)) if len(rest) else 0.0
    times = torch.arange(-40, max(last, 0.0) + step, step, dtype=draft.dtype).exp()[:, None]  # [T, 1]
    grown = draft * times  # [T, V]
    log_odds = grown + (-torch.expm1(-grown)).log()  # of having rung by then
    silent = -grown.cumsum(1)  # log Pr(nothing in the prefix has rung)
    exactly = torch.zeros_like(grown)  # log of the m-th elementary symmetric polynomial of the prefix's odds
    fewer = silent.exp()  # Pr(fewer than K have rung), summed over m
    for size in range(count - 1):
        empty = torch.full_like(exactly[:, :1], -torch.inf if size else 0.0)
        exactly = (log_odds + torch.cat([empty, exactly[:, :-1]], 1)).logcumsumexp(1)
        fewer = fewer + (silent + exactly).exp()
    density = rest * times * (-rest * times).exp()  # [T, V - 1], per unit of s
    inside = step * (density * (1 - fewer[:, :-1])).sum(0)
    return torch.cat([inside.clamp(0, 1), inside.new_ones(1)])


@dataclass(frozen=True)
class SiblingGap:
    """How often a rule commits one of K siblings, and how often the best rule could: means over pairs of laws.

    Attributes:
        rule: "recursive" (without replacement), "recursive, independent" or "k-seq" (independent siblings too).
        acceptance: the mean probability that a sibling is kept.
        error: its standard error, which is that of the drawing of siblings; the pairs are taken as given.
        optimum: the mean of `optimal_acceptance` for siblings that are drawn in this way.
    """

    rule: str
    acceptance: float
    error: float
    optimum: float

    @property
    def gap(self) -> float:
        """What the best rule would keep more often."""
        return self.optimum - self.acceptance


def sibling_gaps(
    target: Tensor, draft: Tensor, count: int, *, draws: int = 100, seed: int = 0
) -> list[SiblingGap]:
    """Compare the rules for K siblings with the best there can be, on given laws; for reports, not for decoding.

    Siblings are drawn, `draws` times for each pair of laws, but not accepted: given siblings the probability that one
    is kept is known.

    Args:
        target, draft: [N, V] log-probabilities, N pairs of laws.
        count: K, at least 1.
        draws: at least 2.
        seed: of the siblings.

    Raises:
        ValueError: laws of other shapes, a count below 1, or fewer than two draws.
    """
    if target.dim() != 2 or target.shape != draft.shape or count < 1 or draws < 2:
        raise ValueError(
            f"target {tuple(target.shape)}, draft {tuple(draft.shape)}, count={count}, draws={draws}; pass pairs of "
            "laws, [N, V] each, a count of at least 1 and at least 2 draws."
        )
    target, draft = target.double(), draft.double()
    noise = CounterNoise(torch.arange(len(target)) + (seed << 32), target.device)
    slots = torch.zeros(len(target), 1, dtype=torch.long, device=target.device)
    kept: dict[str, list[Tensor]] = {"recursive": [], "recursive, independent": [], "k-seq": []}
    for draw in range(draws):
        different = without_replacement(draft, count, noise, slots, draw)
        independent = with_replacement(draft, count, noise, slots, draw)
        tests = (
            sibling_tests(target, *different)[0],
            sibling_tests(target, *independent)[0],
            k_seq_tests(target, independent[0], draft)[0],
        )
        for found, probability in zip(kept.values(), tests, strict=True):
            found.append(1 - (1 - probability).prod(1))  # [N]
    gaps = []
    for rule, found in kept.items():
        accepted = torch.stack(found)  # [draws, N]
        error = float((accepted.var(0) / draws).sum().sqrt()) / len(target)
        pairs = zip(target, draft, strict=True)
        best = [optimal_acceptance(*pair, count, replace=rule != "recursive") for pair in pairs]
        gaps.append(SiblingGap(rule, float(accepted.mean()), error, sum(best) / len(best)))
    return gaps
