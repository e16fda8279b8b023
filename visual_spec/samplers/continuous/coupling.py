"""Couplings of normal laws: turn a draw from one law into a draw from another that is equal as often as possible.

All laws have diagonal covariances. Points, means and standard deviations are `[B, N, d]`; a standard deviation of 0 is
a law with all its mass on one point.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from visual_spec.samplers.core.noise import ACCEPT, PROPOSAL, RESIDUAL, CounterNoise, rounds_of

_FEWEST, _MOST = 8, 4096  # proposals at once; each round that leaves some rows open doubles them


def log_density(x: Tensor, mean: Tensor, sigma: Tensor) -> Tensor:
    """Logarithm of a normal density, without its constant: float64 [...] of points [..., d].

    Of a law on one point it is +inf there, and -inf elsewhere.
    """
    x, mean, sigma = x.double(), mean.double(), sigma.double()
    point = (sigma == 0).all(-1)
    safe = torch.where(point[..., None], 1.0, sigma)
    density = -(0.5 * ((x - mean) / safe).square() + safe.log()).sum(-1)
    at = torch.where((x == mean).all(-1), torch.inf, -torch.inf)
    return torch.where(point, at, density)


def log_ratio(x: Tensor, target: tuple[Tensor, Tensor], draft: tuple[Tensor, Tensor]) -> Tensor:
    """log(target / draft) at points that were drawn from `draft`: float64 [...]; laws are (mean, sigma)."""
    ratio = log_density(x, *target) - log_density(x, *draft)
    # Both on one point, and the same: inf - inf.
    return torch.where(ratio.isnan() & (x == target[0]).all(-1), 0.0, ratio)


def keep_probability(ratio: Tensor) -> Tensor:
    """1 - exp(ratio) where that is above 0: the share of a law's draws that its residual keeps, for log ratios of the
    other law to it. Accurate near 0."""
    return -torch.expm1(ratio.clamp_max(0.0))


def couple(
    drafts: Tensor,
    draft: tuple[Tensor, Tensor],
    target: tuple[Tensor, Tensor],
    noise: CounterNoise,
    slots: Tensor,
    level: int | Tensor,
    tested: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draws from `target`, equal to `drafts` as often as laws that differ allow (a maximal coupling).

    A draft is kept with probability min(1, target / draft). Otherwise, if the covariances are equal, it is reflected at
    the plane between the means (Bou-Rabee, Eberle, Zimmer 2020, section 2.2; De Bortoli et al. 2025, algorithm 3): no
    loop. Else the residual (target - draft)+ is drawn by rejection.

    Args:
        drafts: [B, N, d], drawn from `draft`.
        draft, target: (mean, sigma), each [B, N, d].
        noise, slots, level: noise of the samples, slots long [B, N], and the level of the chain, which is one for all
            or long [B, N]. No slot and level may be coupled twice.
        tested: bool [B, N]; what comes out elsewhere means nothing, and takes no time.

    Returns:
        points [B, N, d], and bool [B, N], whether they are the drafts.
    """
    ratio = log_ratio(drafts, target, draft)
    kept = noise.uniform(slots, ACCEPT, level, torch.float64).log() < ratio
    (mean, sigma), (other_mean, other_sigma) = target, draft
    equal = (sigma == other_sigma).all(-1) & (sigma > 0).all(-1)
    safe = torch.where(equal[..., None], sigma, 1.0)
    apart = (other_mean - mean) / safe
    axis = apart / apart.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(apart.dtype).tiny)
    standard = (drafts - other_mean) / safe
    mirrored = mean + sigma * (standard - 2.0 * (axis * standard).sum(-1, keepdim=True) * axis)
    result = torch.where(kept[..., None], drafts, torch.where(equal[..., None], mirrored, mean))
    # What is left: unequal widths, and no law on one point, whose draw is its mean.
    left = ~kept & ~equal & (sigma > 0).any(-1)
    if tested is not None:
        left &= tested

    def propose(rows: tuple[Tensor, Tensor], fresh: Tensor) -> tuple[Tensor, Tensor]:
        points = mean[rows][:, None] + sigma[rows][:, None] * fresh  # [K, P, d]
        own, others = (
            (centre[rows][:, None].expand_as(points), width[rows][:, None].expand_as(points))
            for centre, width in (target, draft)
        )
        return points, keep_probability(log_ratio(points, others, own))

    return rejected(result, left, propose, noise, slots, level), kept


def rejected(
    result: Tensor,
    left: Tensor,
    propose: Callable[[tuple[Tensor, Tensor], Tensor], tuple[Tensor, Tensor]],
    noise: CounterNoise,
    slots: Tensor,
    level: int | Tensor,
    tries: int | None = None,
) -> Tensor:
    """Fill the rows of `result [B, N, d]` where bool [B, N] `left` by rejection sampling. Waits for the device.

    Args:
        propose: (rows, normal noise [K, P, d]) -> points [K, P, d] and the probability of keeping each, [K, P]. `rows`
            index the first two axes.
        level: as in `couple`. Attempts of different levels are independent.
        tries: give up after so many proposals, and leave what is there; None: never.
    """
    levels = torch.as_tensor(level, device=slots.device).expand_as(slots)
    first, count = 0, _FEWEST
    sample, column = left.nonzero(as_tuple=True)
    rows = (sample, column)
    while len(rows[0]) and (tries is None or first < tries):
        count = count if tries is None else min(count, tries - first)
        attempts = torch.arange(first, first + count, device=slots.device)
        own = CounterNoise(noise.keys[rows[0]], slots.device)
        at = slots[rows][:, None].expand(-1, count)
        rounds = rounds_of(levels[rows][:, None], attempts)
        fresh = own.normal(at, result.shape[-1], RESIDUAL, rounds, result.dtype)
        points, chance = propose(rows, fresh)
        good = own.uniform(at, PROPOSAL, rounds, torch.float64) < chance  # [K, P]
        # These are never kept; whoever reads the tokens refuses them.
        good |= ~points.isfinite().all(-1) | chance.isnan()
        hit, place = good.any(1), good.to(torch.uint8).argmax(1)
        done = tuple(part[hit] for part in rows)
        result[done] = points[hit, place[hit]]
        rows = (rows[0][~hit], rows[1][~hit])
        first, count = first + count, min(2 * count, _MOST)
    return result
