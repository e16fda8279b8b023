"""k-means (Lloyd 1982), for codebooks that start from data and for clusters of codes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_ROWS = 8192  # vectors whose distances to all centres are in memory at once


@torch.no_grad()
def k_means(vectors: Tensor, centres: Tensor, rounds: int, *, unit: bool = False) -> tuple[Tensor, Tensor]:
    """Move each centre to the mean of its nearest vectors, round by round, until nothing changes.

    Deterministic: ties go to the first centre, and a centre without vectors stays.

    Args:
        vectors: `[N, D]`.
        centres: `[K, D]`, the start; not changed.
        rounds: the most rounds.
        unit: vectors and centres have unit length, and so do the means.

    Returns:
        The centres `[K, D]`, and the number of each vector's nearest centre in the last round, long `[N]`.
    """
    nearest = torch.full((len(vectors),), -1, device=vectors.device)
    for _ in range(rounds):
        before, nearest = nearest, _nearest(vectors, centres, unit)
        if torch.equal(before, nearest):
            break  # the same vectors have the same means
        total = torch.zeros_like(centres).index_add_(0, nearest, vectors)  # [K, D]
        served = torch.bincount(nearest, minlength=len(centres))[:, None]
        means = F.normalize(total, dim=-1) if unit else total / served.clamp(min=1)
        moves = total.norm(dim=-1, keepdim=True) > 0 if unit else served > 0
        centres = torch.where(moves, means, centres)
    return centres, nearest


def _nearest(vectors: Tensor, centres: Tensor, unit: bool) -> Tensor:
    length = 0.0 if unit else 0.5 * centres.square().sum(-1)
    return torch.cat([(part @ centres.T - length).argmax(-1) for part in vectors.split(_ROWS)])
