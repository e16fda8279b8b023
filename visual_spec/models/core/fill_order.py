"""In which order MAR fills its slots, how many each step takes, and how strong guidance is there (Li et al. 2024).

A step leaves a share cos(pi / 2 * (s + 1) / N) of the slots hidden, as in MaskGIT (Chang et al. 2022, section 3.1), but
takes at least one slot and leaves at least one to each step that follows. So N = L steps take one slot each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from visual_spec.models.core.settings import Within, whole


def hidden_after(num_tokens: int, num_steps: int) -> list[int]:
    """How many slots are still hidden behind each step of the published schedule.

    The last number is 1, as published, although the last step takes all that is left: guidance reads it.

    Raises:
        ValueError: a number of steps that is not in 1 to `num_tokens`.
    """
    num_steps = whole("num_steps", num_steps, Within(1, num_tokens), ", the number of tokens")
    left, found = num_tokens, []
    for step in range(num_steps):
        share = math.cos(math.pi / 2 * (step + 1) / num_steps)
        left = max(1, min(left - 1, math.floor(num_tokens * share)))
        found.append(left)
    return found


def step_slots(order: Tensor, num_steps: int) -> list[Tensor]:
    """The slots that each step fills, each long [B, n].

    Args:
        order: long [B, L], for each sample all its slots. As published it is read from its end: a step leaves hidden
            what stands first.

    Raises:
        ValueError: as `hidden_after` and `check_order`.
    """
    check_order(order)
    length = order.shape[1]
    edges = [length, *hidden_after(length, num_steps)[:-1], 0]
    return [order[:, low:high] for high, low in zip(edges[:-1], edges[1:], strict=True)]


def check_order(order: Tensor) -> None:
    """Refuse what is no order.

    Raises:
        ValueError: rows that are no permutations of the slots.
    """
    if order.ndim != 2 or order.is_floating_point():
        raise ValueError(
            f"an order of shape {list(order.shape)} and {order.dtype}; pass whole numbers [B, L]."
        )
    wanted = torch.arange(order.shape[1], device=order.device)
    wrong = (order.sort(-1).values != wanted).any(-1).nonzero()
    if len(wrong):
        raise ValueError(
            f"row {int(wrong[0])} of the order is no permutation of the slots 0 to {order.shape[1] - 1}; "
            "name each once."
        )


def random_orders(num_tokens: int, generators: Sequence[torch.Generator]) -> Tensor:
    """A random order of the slots for each generator, long [B, L] on the CPU."""
    return torch.stack([torch.randperm(num_tokens, generator=generator) for generator in generators])


def guidance_scales(scale: float, num_tokens: int, num_steps: int, *, linear: bool = True) -> list[float]:
    """The scale of guidance of each step: `scale`, or growing with the share of slots that the step leaves filled."""
    if not linear:
        return [scale] * num_steps
    return [
        1.0 + (scale - 1.0) * (num_tokens - left) / num_tokens for left in hidden_after(num_tokens, num_steps)
    ]
