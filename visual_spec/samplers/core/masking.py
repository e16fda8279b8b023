"""The parts of masked parallel decoding: the schedule, the score of a draw, and the choice of what to keep.

Every step of a masked decoder draws all hidden tokens at once, keeps those with the highest score, and hides the others
again (Chang et al., "MaskGIT", CVPR 2022, section 3.2). Decoders differ in their schedule, their score, the noise on
the score, and the unit that is kept: single tokens, or spans of frames (Ziv et al., "MAGNeT", ICLR 2024, section 3.1).
Each of these is one part here; `masked` combines them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from visual_spec.models.core.protocol import TokenGrid
from visual_spec.samplers.core.noise import CHOICE, CounterNoise

# Schedules: the hidden share after the fraction `u` of a decode, falling from 1 to 0.
SCHEDULES = {
    "cosine": lambda u: math.cos(math.pi * u / 2),
    "arccos": lambda u: 2 / math.pi * math.acos(u),  # the Halton sampler's (Besnier et al. 2025)
    "linear": lambda u: 1 - u,
    "square": lambda u: 1 - u**2,
    "cubic": lambda u: 1 - u**3,
    "root": lambda u: 1 - u**0.5,
    "power_2.5": lambda u: 1 - u**2.5,  # ReCAP's for MaskGIT (2505.19089)
}
# The clock gives u at each step: step / steps (MaskGIT), or step / (steps - 1), so that the last step finds a single
# unit hidden (MAGNeT's code). "halton" is MaskGIT's, but rounds the number of kept units down (the Halton sampler's
# code), where MaskGIT rounds the number of hidden ones. "recap" is MaskGIT's, but a step that would keep no unit keeps
# one that the last step would have kept (ReCAP's code).
CLOCKS = ("maskgit", "magnet", "halton", "recap")
# What is kept first: the likeliest draws, by log-probability or probability (these differ only with noise added), the
# slots of least entropy, or slots in a fixed order.
SCORES = ("log_probability", "probability", "entropy", "random", "halton", "rolled_halton", "raster")
FIXED_ORDERS = ("random", "halton", "rolled_halton", "raster")
SPAN_SCORES = ("max", "sum")


# -- schedule ----------------------------------------------------------------------------------------------------------


def hidden_shares(schedule: str, clock: str, steps: int) -> list[float]:
    """Return the share of all units that is hidden at the start of each of `steps` steps; the first is 1."""
    last = max(steps - 1, 1) if clock == "magnet" else steps
    return [max(0.0, SCHEDULES[schedule](step / last)) for step in range(steps)]


def hidden_counts(shares: Sequence[float], clock: str, units: Tensor) -> list[Tensor]:
    """Return how many units of each sample are hidden at the start of each step: a list of long [B].

    At least one unit is hidden until the last step. All clocks but MAGNeT's keep at least one per step as long as two
    are hidden.

    Args:
        shares: from `hidden_shares`.
        units: long [B], the number of units to decode.
    """
    counts, before, early = [units], units, torch.zeros_like(units)
    for share in shares[1:]:
        # A product that should be whole may miss it by a rounding error.
        wide = share * units.double()
        count = ((wide - 1e-9).ceil() if clock == "halton" else (wide + 1e-9).floor()).long()
        if clock == "recap":
            early, before = early + (count == before), count
            count = count - early
        most = counts[-1] if clock == "magnet" else counts[-1] - 1
        counts.append(torch.minimum(torch.minimum(count, most).clamp(min=1), units))
    return counts


# -- units -------------------------------------------------------------------------------------------------------------


class Spans:
    """The slots cut into consecutive spans; the last one may be shorter. Spans of 1 are single tokens.

    Args:
        num_tokens: L.
        length: tokens of a span.

    Attributes:
        count: U, the number of spans.
    """

    def __init__(self, num_tokens: int, length: int) -> None:
        self.num_tokens, self.length, self.count = num_tokens, length, -(-num_tokens // length)

    def spread(self, values: Tensor) -> Tensor:
        """Give every token the value of its span: [B, U] to [B, L]."""
        return values if self.length == 1 else values.repeat_interleave(self.length, 1)[:, : self.num_tokens]

    def any(self, values: Tensor) -> Tensor:
        """Whether any token of a span is true: bool [B, L] to bool [B, U]."""
        missing = self.count * self.length - self.num_tokens
        return F.pad(values, (0, missing), value=False).unflatten(1, (self.count, self.length)).any(-1)

    def score(self, confidence: Tensor, hidden: Tensor, rule: str) -> Tensor:
        """Return the score of each span: [B, U].

        Args:
            confidence: scores of single tokens, [B, L].
            hidden: bool [B, L], the tokens that count. The score of a span without hidden tokens has no meaning.
            rule: one of `SPAN_SCORES`: the score of the best token, or the sum of scores.
        """
        fill, missing = (0.0 if rule == "sum" else -torch.inf), self.count * self.length - self.num_tokens
        values = confidence.masked_fill(~hidden, fill)
        if self.length == 1:
            return values
        spans = F.pad(values, (0, missing), value=fill).unflatten(1, (self.count, self.length))
        return spans.sum(-1) if rule == "sum" else spans.amax(-1)


# -- scores ------------------------------------------------------------------------------------------------------------


def mixed(log_probability: Tensor, other: Tensor, share: float) -> Tensor:
    """Return log(share * p + (1 - share) * other) from log p and log other: MAGNeT's rescoring, section 3.4."""
    if share in (0.0, 1.0):
        return log_probability if share else other
    return torch.logaddexp(log_probability + math.log(share), other + math.log1p(-share))


def fixed_order(score: str, grid: TokenGrid, spans: Spans, noise: CounterNoise, slots: Tensor) -> Tensor:
    """Return scores [B, U] that keep units in a fixed order, whatever is drawn.

    Args:
        score: one of `FIXED_ORDERS`. "random": a different order for every sample. "halton": `halton_order`.
            "rolled_halton": the same order, started at a different place for every sample. "raster": from the first to
            the last.
        slots: long [B, U], counters of the units.
    """
    if score == "random":
        return noise.uniform(slots, CHOICE)
    if score == "raster":
        return -torch.arange(slots.shape[1], dtype=torch.float32, device=slots.device).expand(len(slots), -1)
    shape = (grid.frames, grid.height, grid.width) if spans.length == 1 else (1, 1, spans.count)
    order = halton_order(*shape).to(slots.device)
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    ranks = rank.expand(len(slots), -1)
    if score == "rolled_halton":
        shift = (noise.uniform(slots[:, :1], CHOICE) * spans.count).long()  # [B, 1]
        ranks = (ranks + shift) % spans.count
    return -ranks.to(torch.float32)


def halton_order(frames: int, height: int, width: int) -> Tensor:
    """Return all cells of a grid, long [frames * height * width], so that every prefix covers the grid evenly.

    Cells are ordered by their first visit by a Halton sequence (Besnier et al., "Halton scheduler for masked generative
    image transformer", ICLR 2025), in base 2 along the first axis longer than 1, base 3 along the next, and base 5. The
    sequence starts at its point 1, as the authors' code does; point 0 is the corner. It runs until every cell is
    visited: a fixed number of points misses some cells of a large grid.
    """
    shape = (frames, height, width)
    axes = [axis for axis in range(3) if shape[axis] > 1]
    met, first, count = np.zeros(0, dtype=np.int64), 1, 4 * math.prod(shape)
    while len(met) < math.prod(shape):
        points = np.arange(first, first + count)
        cells = np.zeros(count, dtype=np.int64)
        for axis, base in zip(axes, (2, 3, 5), strict=False):
            cells = cells * shape[axis] + (_radical_inverse(points, base) * shape[axis]).astype(np.int64)
        joined = np.concatenate([met, cells])
        met = joined[np.sort(np.unique(joined, return_index=True)[1])]
        first, count = first + count, 2 * count
    return torch.from_numpy(met)


def _radical_inverse(numbers: np.ndarray, base: int) -> np.ndarray:
    """Mirror the base-`base` digits of each number at the point: values in [0, 1)."""
    result, scale, rest = np.zeros(len(numbers)), 1.0, numbers.copy()
    while rest.any():
        scale /= base
        result += scale * (rest % base)
        rest //= base
    return np.minimum(result, np.nextafter(1.0, 0.0))


# -- selection ---------------------------------------------------------------------------------------------------------


def least_sure(score: Tensor, hidden: Tensor, count: Tensor) -> Tensor:
    """Return which units stay hidden, bool [B, U]: the `count` hidden units of least score, the first among ties.

    Args:
        score: [B, U].
        hidden: bool [B, U]. Other units are never chosen, whatever their score.
        count: long [B].
    """
    # Ranks, because a threshold would keep all of several equal scores, or none.
    order = torch.sort(score.masked_fill(~hidden, torch.inf), dim=1, stable=True).indices
    rank = torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    return hidden & (rank < count[:, None])


def beyond_entropy_bound(score: Tensor, entropy: Tensor, hidden: Tensor, bound: float) -> Tensor:
    """Return which units stay hidden, bool [B, U]: those beyond the most of highest score that the bound allows.

    Units are kept in falling order of score as long as the sum of their entropies, less the largest of them, is at most
    the bound; one at least. That sum bounds the dependence that drawing them together ignores (Ben-Hamu et al.,
    "Accelerated sampling from masked diffusion models via entropy bounded unmasking", 2505.24857, section 3.2).

    Args:
        score: [B, U].
        entropy: [B, U], in nats.
        hidden: bool [B, U]. Other units are never chosen.
        bound: gamma, at least 0.
    """
    order = torch.sort(score.masked_fill(~hidden, -torch.inf), dim=1, descending=True, stable=True).indices
    sorted_entropy = entropy.masked_fill(~hidden, 0).gather(1, order).double()
    excess = sorted_entropy.cumsum(1) - sorted_entropy.cummax(1).values
    beyond = excess > bound + 1e-12
    beyond[:, 0] = False
    return hidden & torch.zeros_like(hidden).scatter_(1, order, beyond)


def beyond_confidence(probability: Tensor, hidden: Tensor, least: Tensor) -> Tensor:
    """Return which units stay hidden, bool [B, U]: those from the first, likeliest first, that is below its least on.

    One at least is kept.

    Args:
        probability: [B, U], of the draws of the units.
        hidden: bool [B, U]. Other units are never chosen.
        least: [U], the least probability of the likeliest unit, of the next one, and so on.
    """
    ranked = torch.sort(probability.masked_fill(~hidden, -torch.inf), dim=1, descending=True, stable=True)
    below = ranked.values < least
    below[:, 0] = False
    return hidden & torch.zeros_like(hidden).scatter_(1, ranked.indices, below.long().cumsum(1) > 0)
