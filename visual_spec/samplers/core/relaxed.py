"""Relaxed acceptance: a draft is kept more often than the exact rule allows if tokens like it are likely.

Picture tokens are partly interchangeable. Two published rules therefore test a draft together with similar tokens: GSD
with its neighbours in the sorted target law, LANTERN with the nearest codes of the codebook. They trade exactness for
speed at a fixed rate. A rule that keeps draft x with probability accept(x) moves, at one slot, the mass

    moved = sum over x of (draft(x) * accept(x) - target(x))+ .

This is at most the total variation distance (TVD) between the law of the committed token and the target law. It equals
that TVD if the rule keeps no draft less often than the exact rule and replaces refused drafts from `residual`. The
share of kept drafts then grows by the same amount: rules differ in which tokens they favour, not in the price. A decode
measures its own `moved` (`trace.DivergenceMeter`).

No rule keeps a draft that the target law forbids, whatever tokens are similar to it.

`kernels` computes the rules (`grouped_mass`, `clustered_mass`, `lantern_mass`): one Triton kernel each for float32 laws
on a GPU, and the definition in PyTorch elsewhere. This module states the rules and their guarantees; `relaxation` holds
their settings.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch import Tensor

from visual_spec.kernels.clustered_mass import clustered_mass
from visual_spec.kernels.grouped_mass import grouped_mass, smallest
from visual_spec.kernels.lantern_mass import lantern_mass, lending_limit, merge_neighbours
from visual_spec.models.core.kmeans import k_means
from visual_spec.samplers.core.acceptance import (
    CLUSTERED,
    EXACT,
    GROUPED,
    AcceptanceRule,
    Relaxation,
    exact_acceptance,
)

_TABLE_ROWS = 2**24  # distances in memory at once while a table is built


# -------------------------------------------------------------------------------------------------------- the rules


def grouped_acceptance(
    target: Tensor,
    draft_law: Tensor,
    drafts: Tensor,
    *,
    size: int = 14,
    gap: float = 0.15,
    distance: float | None = None,
    codebook: Tensor | None = None,
) -> Tensor:
    """Return the probability of keeping each draft under GSD: min(1, P(C) / Q(C)).

    P(C) and Q(C) are the target and draft mass of C, the group of the draft x. Tokens are sorted by target probability
    (ties by id). C contains x, the `size // 2` next less probable and the `(size - 1) // 2` next more probable tokens,
    without those too far from x. The group is cut off at the ends of the order. Tokens that the target law forbids are
    in no group. Refused drafts are replaced from `residual`. Size 1 is the exact rule. No bound on the divergence is
    known; it is measured.

    The group's ratio can also fall below target / draft. Let `withheld` be the mass that the exact rule would keep and
    this rule refuses. If `moved` is at least `withheld`, the TVD is `moved`; otherwise it lies between the two.
    `bounded_acceptance` with delta 1 only gives the withheld mass back: fewer refusals, and a TVD of `moved`.

    So et al., "Grouped speculative decoding for autoregressive image generation", ICCV 2025, with dynamic clusters;
    size 14, gap 0.15 and distance 0.5 are the release's. The release measures the distance between input embeddings
    of the language model, and falls back to the exact rule near the low end of the order; this function compares codes.

    Arguments and result as of `kernels.grouped_mass`: a member y has |target(y) - target(x)| < gap, and a squared
    distance of codes < distance.
    """
    return grouped_mass(target, draft_law, drafts, size=size, gap=gap, distance=distance, codebook=codebook)


def clustered_acceptance(target: Tensor, draft_law: Tensor, drafts: Tensor, *, clusters: Tensor) -> Tensor:
    """As `grouped_acceptance`, with fixed groups: the static clusters that GSD is compared with.

    `clusters`, long [V], are from `cluster_table`.
    """
    return clustered_mass(target, draft_law, drafts, clusters=clusters)


def lantern_acceptance(
    target: Tensor,
    draft_law: Tensor,
    drafts: Tensor,
    *,
    neighbours: Tensor,
    delta: float = 0.1,
    factor: float | None = None,
) -> Tensor:
    """Return the probability of keeping each draft under LANTERN: min(1, merged(x) / draft(x)).

    merged(x) is the target mass of the draft x and of the set A. A holds the nearest codes of x, in order of distance,
    as many as have a total mass of at most `delta` (LANTERN), or at most (factor - 1) * target(x) (LANTERN++). Refused
    drafts are replaced from the residual of `lantern_target`.

    Guarantee: if x is not random (the draft law is a point, as with a greedy drafter), the committed token's law is
    within TVD `delta` of the target law; it is `lantern_target`, which differs by the mass of A. In a tree of the most
    probable tokens this holds for each test of a sibling, not for all siblings of a slot together. If drafts are drawn,
    each x moves the mass of its own A, and only the TVD between draft law and target law bounds the TVD. `bounded_rule`
    repairs both cases. The factor gives no bound in any case.

    Jang et al., "LANTERN: Accelerating visual autoregressive models with relaxed speculative decoding", ICLR 2025,
    section 4; Park et al., "LANTERN++", 2025. Distances are between the codes that the decoder sees.

    Arguments and result as of `kernels.lantern_mass`; `neighbours` int [V, K] are from `neighbour_table`, `factor` is
    the lambda of LANTERN++.
    """
    return lantern_mass(target, draft_law, drafts, neighbours=neighbours, delta=delta, factor=factor)


def lantern_target(
    target: Tensor, drafts: Tensor, *, neighbours: Tensor, delta: float = 0.1, factor: float | None = None
) -> Tensor:
    """Return the target law with the mass of A moved to the draft (`lantern_acceptance`): [B, N, V] log-probabilities.

    Its residual replaces a refused draft. A slot without a draft (drafts = -1) keeps its target.
    """
    at = drafts.clamp(min=0)
    near, lent, merged = merge_neighbours(target, at, neighbours, *lending_limit(delta, factor))
    law = target.scatter(-1, near, target.gather(-1, near).masked_fill_(lent, -torch.inf))
    law.scatter_(-1, at[..., None], merged.log())
    return torch.where(drafts[..., None] < 0, target, law)


def bounded_acceptance(
    probability: Tensor, target: Tensor, draft_law: Tensor, drafts: Tensor, *, delta: float | Tensor
) -> Tensor:
    """Limit a relaxed acceptance so that no slot moves more mass than `delta`, however the draft is drawn: [B, N].

    The gain of a draft over the exact rule, accept(x) - exact(x), is limited to its share of the budget,

        delta * (1 - exact(x)) / TVD(target, draft law) .

    The mean of 1 - exact(x) over drafts is that TVD, so the mean gain is at most `delta`. If refused drafts are
    replaced from `residual`, the mean gain is the TVD between the committed token's law and the target law. For a point
    draft the share is `delta`, so LANTERN with this delta does not change. Where the laws differ by less than `delta`,
    no limit applies. A rule that keeps a draft less often than the exact rule is raised to it. Ours.

    Args:
        probability: [B, N], from the relaxed rule.
        target, draft_law: [B, N, V] log-probabilities.
        drafts: long [B, N].
        delta: the bound, 0 to 1; a number, or one for each slot, [B, N].
    """
    exact = exact_acceptance(target, draft_law, drafts)
    share = _share(exact, target, draft_law, delta)
    return exact + torch.minimum((probability - exact).clamp_(min=0), share)


def budget_behind(
    probability: Tensor, target: Tensor, draft_law: Tensor, drafts: Tensor, *, delta: float | Tensor
) -> Tensor:
    """Return the budget of the next sibling of a slot if `bounded_acceptance` refuses this draft: [B, N].

    A draft x that is kept with probability accept(x) uses accept(x) - exact(x) of its share. The rest is passed on. It
    counts for more the less often a refusal happens:

        (share(x) - accept(x) + exact(x)) / (1 - accept(x)) , at most 1 .

    Then all siblings of a slot together move at most `delta`, however they are drawn. Proof by induction from the last
    sibling. Let the siblings after a refused x commit a law within that budget of the residual, which is the same for
    all x. Replacing their law by the residual itself changes the committed law by at most the mean of
    (1 - accept(x)) * budget(x). The law with the residual is off by the mean of accept(x) - exact(x)
    (`bounded_acceptance`). The sum is at most the mean of share(x), which is `delta`. Ours.

    Args:
        probability: [B, N], with which `bounded_acceptance` keeps each draft.
        drafts: long [B, N], -1 where a slot has none; such a slot keeps its budget.
        target, draft_law, delta: as given to `bounded_acceptance`.
    """
    exact = exact_acceptance(target, draft_law, drafts.clamp(min=0))
    refused = 1 - probability
    left = (_share(exact, target, draft_law, delta) - (probability - exact)) / refused
    # A draft that is never refused has no next sibling: its budget does not matter, and 0 / 0 is avoided.
    return torch.where((drafts >= 0) & (refused > 0), left.clamp(0, 1), delta)


def _share(exact: Tensor, target: Tensor, draft_law: Tensor, delta: float | Tensor) -> Tensor:
    """Return the most that each draft may gain under the budget `delta`: [B, N]."""
    apart = draft_law.exp().sub_(target.exp()).clamp_(min=0).sum(-1)
    # Equal laws keep every draft anyway, so any share will do; the clamp only avoids 0 / 0.
    return delta * (1 - exact) / apart.clamp_(min=torch.finfo(apart.dtype).tiny)


def bounded_rule(
    probability: Callable[[Tensor, Tensor, Tensor], Tensor], delta: float | Tensor
) -> AcceptanceRule:
    """Return a relaxed acceptance under `bounded_acceptance`, with one budget for all siblings of a slot."""

    def held_back(target: Tensor, draft_law: Tensor, drafts: Tensor) -> Tensor:
        relaxed = probability(target, draft_law, drafts)
        return bounded_acceptance(relaxed, target, draft_law, drafts, delta=delta)

    def after_refusal(kept: Tensor, target: Tensor, draft_law: Tensor, drafts: Tensor) -> AcceptanceRule:
        return bounded_rule(probability, budget_behind(kept, target, draft_law, drafts, delta=delta))

    return AcceptanceRule(held_back, lossless=False, after_refusal=after_refusal)


# ------------------------------------------------------------------------------------------------------- the tables


def neighbour_table(codebook: Tensor, count: int, device: torch.device | str | None = None) -> Tensor:
    """Return the nearest other codes of every code, the nearest first: int32 [V, count].

    Args:
        codebook: [V, D], the codes as the decoder sees them (L2-normalised, if it normalises them).
        count: from 1 to V - 1.
        device: device of the table; default: the codebook's. The table is built there once, and cached for the next
            call with the same codes.
    """
    return _neighbour_table(*_content(codebook, device), count)


def cluster_table(codebook: Tensor, count: int, device: torch.device | str | None = None) -> Tensor:
    """Return the cluster of each code by k-means from a fixed start: long [V], below `count`; cached."""
    return _cluster_table(*_content(codebook, device), count)


def _content(codebook: Tensor, device: torch.device | str | None) -> tuple[bytes, int, torch.device]:
    # The contents of the codes are the cache key, because pipelines make a new tensor of them at every call.
    codes = codebook.detach().float().cpu().contiguous()
    return codes.numpy().tobytes(), codes.shape[1], torch.device(device or codebook.device)


def _codes(content: bytes, dim: int) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.float32).view(-1, dim)


@lru_cache(maxsize=4)
def _neighbour_table(content: bytes, dim: int, device: torch.device, count: int) -> Tensor:
    codes = _codes(content, dim).to(device)
    table = torch.zeros(len(codes), count, dtype=torch.int32, device=device)
    for rows in torch.arange(len(codes), device=device).split(max(1, _TABLE_ROWS // len(codes))):
        # No matrix product: its rounding would change the order of near codes.
        apart = torch.cdist(codes[rows], codes, compute_mode="donot_use_mm_for_euclid_dist")
        apart.scatter_(1, rows[:, None], torch.inf)
        table[rows] = smallest(apart, count)[1].int()
    return table


@lru_cache(maxsize=4)
def _cluster_table(content: bytes, dim: int, device: torch.device, count: int) -> Tensor:
    codes = _codes(content, dim)  # on the CPU: the same clusters for every device
    start = torch.randperm(len(codes), generator=torch.Generator().manual_seed(0))[:count]
    return k_means(codes, codes[start], 25)[1].to(device)


def rule_of(settings: Relaxation, codebook: Tensor | None, device: torch.device | str) -> AcceptanceRule:
    """Return the rule of some settings with its tables on a device. `codebook` has passed `Relaxation.check`."""
    if settings.lossless:
        return EXACT
    merge = None
    if settings.acceptance == GROUPED:
        probability = partial(
            grouped_acceptance,
            size=settings.group_size,
            gap=settings.probability_gap,
            distance=settings.code_distance,
            codebook=codebook.detach().float().to(device) if codebook is not None else None,
        )
    elif settings.acceptance == CLUSTERED:
        assert codebook is not None
        count = max(1, round(len(codebook) / settings.group_size))
        probability = partial(clustered_acceptance, clusters=cluster_table(codebook, count, device))
    else:
        assert codebook is not None
        lent = dict(
            neighbours=neighbour_table(codebook, settings.neighbours, device),
            delta=settings.delta,
            factor=settings.factor,
        )
        probability = partial(lantern_acceptance, **lent)
        merge = partial(lantern_target, **lent)
    if settings.bounded:
        return bounded_rule(probability, settings.delta)
    return AcceptanceRule(probability, merge, lossless=False)
