"""LPD's locality-aware order and the sizes of its groups (Zhang et al., 2507.01957, section 3.2).

Slots of one call should see much and depend little on each other: those next to drawn slots come first, and slots of
one call keep a distance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np


@cache
def group_sizes(num_tokens: int, steps: int) -> tuple[int, ...]:
    """Return how many slots each of `steps` calls draws: 1, then by a cosine, never fewer than the call before.

    For the published calls (20 and 32 of 256 slots, 48 of 1,024) these are the published sizes. Of the other numbers in
    the public code's table some differ by a slot in a few calls.
    """
    exact = num_tokens * -np.diff(np.cos(np.linspace(0, math.pi / 2, steps + 1)))
    sizes = np.maximum(1, np.rint(exact).astype(int))
    sizes[0] = 1 if steps > 1 else num_tokens
    while (surplus := int(sizes.sum()) - num_tokens) > 0:
        sizes[sizes.argmax()] -= 1
    sizes[-1] -= surplus
    return tuple(sizes.tolist())


@cache
def _geometry(height: int, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return of each pair of slots, `[L, L]`: steps apart, their distance, and 1 / distance of those side by side."""
    rows, columns = np.divmod(np.arange(height * width), width)
    down, along = rows[:, None] - rows, columns[:, None] - columns
    apart = np.maximum(abs(down), abs(along))
    distance = np.sqrt((down**2 + along**2).astype(float))
    return apart, distance, np.where(apart == 1, 1 / np.maximum(distance, 1), 0)


def locality_order(
    sizes: Sequence[int], height: int, width: int, ties: np.ndarray, repulsion: int
) -> list[int]:
    """Return the slots of a grid in the order of decoding.

    Each call takes the slots with the largest sum of 1 / distance to the drawn slots around them, as long as it is at
    least 1 and no slot of the call lies within the square of `repulsion`; then those farthest from its own.

    Args:
        sizes: of the groups, in sum all slots.
        ties: `[len(sizes), L]`: slots of one score come by the smallest of the call's row.
        repulsion: steps along rows or columns that two slots of a call are apart at the least.
    """
    apart, distance, nearness = _geometry(height, width)
    score, drawn, order = np.zeros(len(apart)), np.zeros(len(apart), bool), []
    for size, tie in zip(sizes, ties, strict=True):
        ranked = np.lexsort((tie, -score))
        ranked = ranked[~drawn[ranked]]
        group, near = [], score[ranked] >= 1  # with a drawn slot at its side, or two at its corners
        free = near.copy()
        while len(group) < size and free.any():
            group.append(int(ranked[free.argmax()]))
            free &= apart[group[-1], ranked] > repulsion
        taken = np.isin(ranked, group)
        left = np.concatenate([ranked[~near & ~taken], ranked[near & ~taken]])
        if len(left) <= size - len(group):
            group += left.tolist()
        closest = distance[left][:, group].min(1) if group else np.full(len(left), np.inf)
        while len(group) < size:
            at = int(closest.argmax())
            group.append(int(left[at]))
            closest = np.minimum(closest, distance[left, left[at]])
        order += group
        drawn[group] = True
        for slot in group:  # one by one: sums in this order decide ties
            score += nearness[slot]
    return order
