"""The two parts of a data set: a tenth of all captions is held out, by their hash, and no trainer uses it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TypeVar

import numpy as np

T = TypeVar("T")


def is_held_out(text: str) -> bool:
    """Return whether a caption is in the held-out tenth of all captions, which no trainer uses."""
    return hashlib.sha256(text.encode()).digest()[0] < 26


def sample_part(
    draw: Callable[[np.random.Generator], T],
    out: Callable[[T], bool],
    count: int,
    seed: int | tuple[int, int],
    held_out: bool,
) -> list[T]:
    """Return `count` of what `draw` draws for which `out`, whether it is held out, is `held_out`."""
    rng, found = np.random.default_rng(seed), list[T]()
    while len(found) < count:
        one = draw(rng)
        if out(one) == held_out:
            found.append(one)
    return found
