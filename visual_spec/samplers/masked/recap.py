"""What a masked decoder keeps from one call to the next: nothing, keys and values (ReCAP), or features (a shortcut).

Between two calls of a masked model few tokens change, so most of a call repeats the one before. A policy says which
calls are full, and what stands in for the others:

* ReCAP (2505.19089): a full call chooses the tokens of the
  next few calls at once, its group. A local call computes only the slots of the group, which attend to the keys and
  values that the full call left for all others. The order inside the group does not change.
* Shortcut (MIGM-Shortcut, 2602.23996): a network of one block makes the features of the next call from the features of
  the last one and the tokens that were kept since. Only the model's head runs on them.

Both are approximations of the model. `MaskedSampler(measure=True)` measures how far they lead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

KINDS = ("recap", "shortcut")
_BUCKET = 8  # group widths are rounded up to multiples of this, so that few shapes occur


def full_calls(steps: int, reuse: int, reuse_from: float) -> list[bool]:
    """Return which of `steps` calls are full.

    Args:
        reuse: calls after each full call that reuse it; 0: all are full.
        reuse_from: share of the calls, rounded up, that are full before any reuse: features change most at the
            beginning.
    """
    first = math.ceil(reuse_from * steps - 1e-9) if reuse else steps
    return [step < first or (step - first) % (reuse + 1) == 0 for step in range(steps)]


def last_of_group(full: Sequence[bool], step: int) -> int:
    """Return the last step of those that reuse the full call `step`; `step` itself if none does."""
    last = step
    while last + 1 < len(full) and not full[last + 1]:
        last += 1
    return last


def group_width(shares: Sequence[float], num_units: int, span: int, first: int, last: int) -> int:
    """Return the most tokens that steps `first` to `last` keep, told from the schedule alone, rounded up to a bucket.

    Counts of samples with given tokens are on the device, and reading them would stall it.

    Args:
        shares: hidden share of the units before each step.
        num_units: of a whole sample.
        span: tokens of a unit.
    """
    after = shares[last + 1] if last + 1 < len(shares) else 0.0
    # Counts are rounded, at least one unit is kept a step, and one is hidden until the last step.
    units = math.ceil((shares[first] - after) * num_units) + 2 + last - first
    width = min(units, num_units) * span
    return -(-width // _BUCKET) * _BUCKET


def places_of(group: Tensor, width: int) -> Tensor:
    """Return the slots of a group, long [B, width], in order, and after them places past the grid, L and up.

    `group`: bool [B, L], at most `width` true in a row.
    """
    length = group.shape[1]
    order = torch.sort((~group).long(), dim=1, stable=True).indices[:, :width]
    order = F.pad(order, (0, width - order.shape[1]))
    place = torch.arange(width, device=group.device)
    return torch.where(place < group.sum(1, keepdim=True), order, length + place)


def scattered(values: Tensor, places: Tensor, whole: Tensor) -> Tensor:
    """Return `whole [B, L, ...]` with `values [B, n, ...]` at `places`, long [B, n]; those past the grid go nowhere."""
    index = places.view(*places.shape, *[1] * (values.ndim - 2)).expand_as(values)
    wide = torch.cat([whole, torch.zeros_like(values)], 1)
    return wide.scatter(1, index, values)[:, : whole.shape[1]]
