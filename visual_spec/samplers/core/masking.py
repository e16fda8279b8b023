"""The pieces of masked parallel decoding: how much is hidden when, how sure a draw is, and what is kept of it.

Every step of a masked decoder draws all hidden tokens at once, keeps those it is surest of, and hides the others again
(Chang et al., "MaskGIT", CVPR 2022, section 3.2). Decoders differ in their schedule, in what they call sure, in the
noise on it, and in what is kept together: single tokens, or spans of frames (Ziv et al., "MAGNeT", ICLR 2024, section
3.1). Here each of these is a piece of its own; `masked` puts them together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from visual_spec.kernels.law import unfiltered_reference
from visual_spec.kernels.masked_sample import masked_sample
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.samplers.core.checks import CheckedLaw
from visual_spec.samplers.core.noise import CHOICE, TOKEN, CounterNoise
from visual_spec.samplers.core.verification import fits

# Schedules: the share that is hidden when a decode has come `u` of its way, falling from 1 to 0.
SCHEDULES = {
    "cosine": lambda u: math.cos(math.pi * u / 2),
    "arccos": lambda u: 2 / math.pi * math.acos(u),  # the Halton sampler's (Besnier et al. 2025)
    "linear": lambda u: 1 - u,
    "square": lambda u: 1 - u**2,
    "cubic": lambda u: 1 - u**3,
    "root": lambda u: 1 - u**0.5,
}
# When a step stands at u = step / steps (MaskGIT), and when at step / (steps - 1), so that the last one finds a single
# unit hidden (MAGNeT's code).
CLOCKS = ("maskgit", "magnet")
# What is kept first: the likeliest draws, by log-probability or probability (the same but for the noise that is added
# to them), the slots of least entropy, or slots in an order that is fixed in advance.
SCORES = ("log_probability", "probability", "entropy", "random", "halton", "rolled_halton")
FIXED_ORDERS = ("random", "halton", "rolled_halton")
SPAN_SCORES = ("max", "sum")


# -- schedule ----------------------------------------------------------------------------------------------------------


def hidden_shares(schedule: str, clock: str, steps: int) -> list[float]:
    """The share of all that is hidden when each of `steps` steps begins; the first is 1."""
    last = steps if clock == "maskgit" else max(steps - 1, 1)
    return [max(0.0, SCHEDULES[schedule](step / last)) for step in range(steps)]


def hidden_counts(shares: Sequence[float], clock: str, units: Tensor) -> list[Tensor]:
    """How many units of each sample are hidden when each step begins: long [B] each.

    Args:
        shares: from `hidden_shares`.
        units: long [B], those that are to be decoded.

    At least one is hidden until the last step, and MaskGIT keeps at least one a step as long as there are two.
    """
    counts = [units]
    for share in shares[1:]:
        # The share of a count that should be whole may be a rounding error short of it.
        count = (share * units.double() + 1e-9).floor().long()
        most = counts[-1] - 1 if clock == "maskgit" else counts[-1]
        counts.append(torch.minimum(torch.minimum(count, most).clamp(min=1), units))
    return counts


# -- what is kept together ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spans:
    """The slots cut into spans, one behind the other, the last one shorter if need be. Spans of 1 are single tokens.

    Args:
        num_tokens: L.
        length: tokens of a span.
    """

    num_tokens: int
    length: int

    @property
    def count(self) -> int:
        """U, the number of spans."""
        return -(-self.num_tokens // self.length)

    def spread(self, values: Tensor) -> Tensor:
        """What holds of spans [B, U], for their tokens: [B, L]."""
        return values.repeat_interleave(self.length, 1)[:, : self.num_tokens]

    def any(self, values: Tensor) -> Tensor:
        """Whether a span holds a token of which it is true: bool [B, U] of bool [B, L]."""
        return self._cut(values, False).any(-1)

    def score(self, confidence: Tensor, hidden: Tensor, rule: str) -> Tensor:
        """How sure a span is: [B, U].

        Args:
            confidence: of single tokens, [B, L].
            hidden: bool [B, L], the tokens that count. Of a span without any the score is of no use.
            rule: one of `SPAN_SCORES`: that of its surest token, or the sum over them.
        """
        if rule == "sum":
            return self._cut(confidence.masked_fill(~hidden, 0), 0).sum(-1)
        return self._cut(confidence.masked_fill(~hidden, -torch.inf), -torch.inf).amax(-1)

    def _cut(self, values: Tensor, fill: float | bool) -> Tensor:
        missing = self.count * self.length - self.num_tokens
        return F.pad(values, (0, missing), value=fill).unflatten(1, (self.count, self.length))


# -- draw and score ----------------------------------------------------------------------------------------------------


def draw_and_score(
    law: CheckedLaw,
    noise: CounterNoise,
    logits: Tensor,
    slots: Tensor,
    checked_slots: Tensor,
    step: int,
    *,
    score: str | None,
    filtered: bool,
) -> tuple[Tensor, Tensor | None]:
    """Draw every position from its law, and say how sure each draw is. In one kernel on a GPU, but for entropies.

    Args:
        logits: [R, L, V], R = 2B where the law is guided, else B.
        slots: long [B, L], counters of the noise.
        checked_slots: long [B, L], under which the logits are checked; `law.num_tokens` where they are not.
        step: round of the noise.
        score: one of `SCORES` that looks at the law; None where nobody asks.
        filtered: score by the law that is drawn from; if not, by that law before top-k and top-p, and greedy draws by
            the law of temperature 1: they are all certain, and that is what tells them apart.

    Returns:
        Tokens, long [B, L]; and scores [B, L], None without a score.
    """
    guided = law.law.guided
    numbers = law.law.numbers(guided, logits.shape[-1])
    if fits(logits) and score != "entropy":
        drawn, log_probs, log_kept, finite = masked_sample(
            logits, noise.keys, slots, numbers, stream=TOKEN, round=step
        )
        law.remember(~finite, checked_slots)
        sure = log_probs if filtered else log_probs + log_kept
        return drawn, None if score is None else sure if score == "log_probability" else sure.exp()
    target = law(logits, checked_slots, guided)  # [B, L, V]
    drawn = noise.categorical(target, slots, TOKEN, step)
    if score is None:
        return drawn, None
    scored = target if filtered else unfiltered_reference(logits, checked_slots, numbers, target)
    return drawn, confidence(score, scored, drawn)


def confidence(score: str, log_probs: Tensor, drawn: Tensor) -> Tensor:
    """How sure draws are, larger is surer: [B, L].

    Args:
        score: one of `SCORES` that looks at the law.
        log_probs: [B, L, V], the laws.
        drawn: long [B, L].
    """
    if score == "entropy":
        return -torch.special.entr(log_probs.exp()).sum(-1)
    log_probability = log_probs.gather(-1, drawn[..., None])[..., 0]
    return log_probability if score == "log_probability" else log_probability.exp()


def mixed(log_probability: Tensor, other: Tensor, share: float) -> Tensor:
    """The logarithm of share * p + (1 - share) * other, from logarithms: MAGNeT's rescoring, section 3.4."""
    if share in (0.0, 1.0):
        return log_probability if share else other
    return torch.logaddexp(log_probability + math.log(share), other + math.log1p(-share))


def fixed_order(score: str, grid: TokenGrid, spans: Spans, noise: CounterNoise, slots: Tensor) -> Tensor:
    """Scores [B, U] that keep units in an order of their own, whatever is drawn.

    Args:
        score: one of `FIXED_ORDERS`. "random": another order for every sample. "halton": that of `halton_order`.
            "rolled_halton": the same, begun at another place of it for every sample.
        slots: long [B, U], counters of the units.
    """
    if score == "random":
        return noise.uniform(slots, CHOICE)
    shape = (grid.frames, grid.height, grid.width) if spans.length == 1 else (1, 1, spans.count)
    order = halton_order(*shape).to(slots.device)
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    ranks = rank.expand(len(slots), -1)
    if score == "rolled_halton":
        shift = (noise.uniform(slots[:, :1], CHOICE) * spans.count).long()  # [B, 1]
        ranks = (ranks + shift) % spans.count
    return -ranks.to(torch.float32)


def halton_order(frames: int, height: int, width: int) -> Tensor:
    """All cells of a grid, long [frames * height * width], such that every beginning covers it evenly.

    They come as a Halton sequence meets them first (Besnier et al., "Halton scheduler for masked generative image
    transformer", ICLR 2025), in base 2 along the first axis longer than 1, base 3 along the next, and base 5. The
    sequence goes on until every cell was met: a fixed number of points misses some cells of a large grid.
    """
    shape = (frames, height, width)
    axes = [axis for axis in range(3) if shape[axis] > 1]
    met, first, count = np.zeros(0, dtype=np.int64), 0, 4 * math.prod(shape)
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
    """The digits of numbers in a base, mirrored at the point: in [0, 1)."""
    result, scale, rest = np.zeros(len(numbers)), 1.0, numbers.copy()
    while rest.any():
        scale /= base
        result += scale * (rest % base)
        rest //= base
    return np.minimum(result, np.nextafter(1.0, 0.0))


# -- selection ---------------------------------------------------------------------------------------------------------


def least_sure(score: Tensor, hidden: Tensor, count: Tensor) -> Tensor:
    """Which units stay hidden, bool [B, U]: the `count` hidden ones of least score, the first of equal ones.

    Args:
        score: [B, U].
        hidden: bool [B, U]. Units that are not are never chosen, whatever their score.
        count: long [B].
    """
    # Ranks, not a threshold: a threshold would keep all of several equal scores, or none.
    order = torch.sort(score.masked_fill(~hidden, torch.inf), dim=1, stable=True).indices
    rank = torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    return hidden & (rank < count[:, None])
