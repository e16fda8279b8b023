"""k-means (Lloyd 1982), for codebooks that start from data and for clusters of codes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_ROWS = 8192  # of vectors whose closeness to all centres is held at once


@torch.no_grad()
def k_means(vectors: Tensor, centres: Tensor, rounds: int, *, unit: bool = False) -> tuple[Tensor, Tensor]:
    """Move centres to the mean of the vectors that are nearest to them, round by round, until nothing changes.

    Deterministic: of centres that are as near the first one takes a vector, and one that serves none stays.

    Args:
        vectors: `[N, D]`.
        centres: `[K, D]`, to start from; left as they are.
        rounds: at most so many.
        unit: vectors and centres are of unit length, and so are the means.

    Returns:
        The centres `[K, D]`, and of each vector the number of the one that was nearest in the last round, long `[N]`.
    """
    nearest = torch.full((len(vectors),), -1, device=vectors.device)
    for _ in range(rounds):
        before, nearest = nearest, _nearest(vectors, centres, unit)
        if torch.equal(before, nearest):
            break  # the means of the same vectors are the same
        total = torch.zeros_like(centres).index_add_(0, nearest, vectors)  # [K, D]
        served = torch.bincount(nearest, minlength=len(centres))[:, None]
        means = F.normalize(total, dim=-1) if unit else total / served.clamp(min=1)
        moves = total.norm(dim=-1, keepdim=True) > 0 if unit else served > 0
        centres = torch.where(moves, means, centres)
    return centres, nearest


def _nearest(vectors: Tensor, centres: Tensor, unit: bool) -> Tensor:
    length = 0.0 if unit else 0.5 * centres.square().sum(-1)
    return torch.cat([(part @ centres.T - length).argmax(-1) for part in vectors.split(_ROWS)])
