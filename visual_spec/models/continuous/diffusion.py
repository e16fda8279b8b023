"""The chains that draw one continuous token: MAR's denoising diffusion, and flow matching.

A chain has `num_steps` levels. It starts at level `num_steps - 1` from standard normal noise; level i takes a point to
the next, and what level 0 returns is the token. Each level is one normal law, which `kernel` gives as mean and standard
deviation, so that a chain can be logged, coupled and replayed.

    x = noise                                             # [N, d]
    for index in reversed(range(schedule.num_steps)):
        mean, sigma = schedule.kernel(x, index, head(x, schedule.times[index], z))
        x = mean + sigma * temperature * noise[index]     # the published chain has no noise at level 0
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

TRAINING_LEVELS = 1000


class Schedule(Protocol):
    """A chain of normal laws, steered by what a head returns.

    Attributes:
        num_steps: how many levels it has.
        times: [num_steps], what the head is told at each level.
    """

    num_steps: int
    times: Tensor

    def kernel(self, x: Tensor, index: int | Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation, each [N, d], of the point behind `x [N, d]`, at level `index`.

        Args:
            index: one for all points, or long [N].
            output: of the head, [N, outputs].
        """
        ...

    def to(self, device: torch.device | str) -> Schedule: ...


def cosine_betas(count: int = TRAINING_LEVELS) -> Tensor:
    """Variances added at each level, float64 [count], of the cosine schedule (Nichol and Dhariwal 2021, eq. 17)."""

    def kept(share: Tensor) -> Tensor:
        return ((share + 0.008) / 1.008 * math.pi / 2).cos().square()

    edges = torch.arange(count + 1, dtype=torch.float64) / count
    return (1.0 - kept(edges[1:]) / kept(edges[:-1])).clamp_max(0.999)


def respaced_levels(num_steps: int, count: int = TRAINING_LEVELS) -> list[int]:
    """Which of `count` levels a chain of fewer steps visits, from the first to the last, evenly.

    Raises:
        ValueError: a number of steps that is not in 1 to `count`.
    """
    if isinstance(num_steps, bool) or not isinstance(num_steps, int) or not 1 <= num_steps <= count:
        raise ValueError(f"num_steps={num_steps!r}; pass an integer from 1 to {count}.")
    stride = 1.0 if num_steps == 1 else (count - 1) / (num_steps - 1)
    place, found = 0.0, []
    for _ in range(num_steps):
        found.append(round(place))
        place += stride
    return found


class DiffusionSchedule:
    """MAR's chain: noise prediction, and a variance between that of the posterior and that of the level.

    The head returns the noise in a point, d numbers, and d numbers v from -1 to 1 that interpolate the logarithm of the
    variance (Nichol and Dhariwal 2021, section 3.1). The levels are `num_steps` of the 1000 of training; `times` are
    theirs (Nichol and Dhariwal 2021, section 4).

    Noise prediction asks much of a head: at level 999 its error is in the token 20,000 times as large. A head that was
    trained for a short time predicts sqrt(kept) noise - sqrt(1 - kept) token in its place (Salimans and Ho 2022,
    section 4), whose error the token has at most once. Nothing else changes.

    Args:
        num_steps: levels of the chain, 1 to 1000; 100 in the published evaluation.
        velocity: the head predicts that difference, not the noise.

    Raises:
        ValueError: as `respaced_levels`.
    """

    def __init__(self, num_steps: int = 100, *, velocity: bool = False) -> None:
        levels = respaced_levels(num_steps)
        # In float64: products of a thousand factors, of which differences are taken.
        kept = (1.0 - cosine_betas()).cumprod(0)[
            levels
        ]  # share of the token's variance that is left at each level
        before = torch.cat([kept.new_ones(1), kept[:-1]])
        betas = 1.0 - kept / before
        posterior = betas * (1.0 - before) / (1.0 - kept)
        # The first level's posterior has no width, and its logarithm would be infinite: it takes the second's.
        clipped = torch.cat([posterior[1:2] if num_steps > 1 else betas[:1], posterior[1:]])
        self.num_steps, self.velocity = num_steps, velocity
        self.times = torch.tensor(levels, dtype=torch.float32)
        self._table = torch.stack(
            [
                kept.sqrt() if velocity else kept.rsqrt(),
                (1.0 - kept).sqrt() if velocity else (1.0 / kept - 1.0).sqrt(),
                betas * before.sqrt() / (1.0 - kept),
                (1.0 - before) * (1.0 - betas).sqrt() / (1.0 - kept),
                clipped.log(),
                betas.log(),
            ],
            -1,
        ).float()  # [num_steps, 6]
        self._forward = torch.stack([kept.sqrt(), (1.0 - kept).sqrt()], -1).float()  # [num_steps, 2]

    def to(self, device: torch.device | str) -> DiffusionSchedule:
        """Move the tables, once, so that no level waits for a copy. Returns itself."""
        self.times, self._table = self.times.to(device), self._table.to(device)
        self._forward = self._forward.to(device)
        return self

    def kernel(self, x: Tensor, index: int | Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
        """See `Schedule`. `output [N, 2 d]`: the noise or the velocity, then v."""
        found, fraction = output.chunk(2, -1)
        # Of each entry [1], or [N, 1].
        of_x, of_output, of_start, of_point, low, high = self._table[index].unsqueeze(-1).unbind(-2)
        start = of_x * x - of_output * found
        share = (fraction + 1.0) / 2.0
        return of_start * start + of_point * x, (0.5 * (share * high + (1.0 - share) * low)).exp()

    # -- training: on a schedule of all levels ---------------------------------------------------------------------

    def noised(self, tokens: Tensor, index: Tensor, noise: Tensor) -> Tensor:
        """What tokens [N, d] are at levels [N], with this noise [N, d] in them."""
        share, of_noise = self._forward[index].unsqueeze(-1).unbind(-2)
        return share * tokens + of_noise * noise

    def losses(self, tokens: Tensor, index: Tensor, noise: Tensor, output: Tensor) -> Tensor:
        """Loss [N] of a head's `output [N, 2 d]` at points that `noised` made.

        Squared error of the noise or the velocity, a mean over the numbers, and the divergence in bits of the level's
        law from that of the true posterior, of which v alone learns (Nichol and Dhariwal 2021, section 3.1).
        """
        found, fraction = output.chunk(2, -1)
        point = self.noised(tokens, index, noise)
        mean, sigma = self.kernel(point, index, torch.cat([found.detach(), fraction], -1))
        table = self._table[index].unsqueeze(-1)
        true_mean = table[:, 2] * tokens + table[:, 3] * point
        true_log = table[:, 4]  # [N, 1]
        log = 2.0 * sigma.log()
        apart = (true_mean - mean).square() * (-log).exp()
        divergence = 0.5 * (log - true_log - 1.0 + (true_log - log).exp() + apart)
        share, of_noise = self._forward[index].unsqueeze(-1).unbind(-2)
        wanted = share * noise - of_noise * tokens if self.velocity else noise
        return (found - wanted).square().mean(-1) + divergence.mean(-1) / math.log(2.0)


class FlowSchedule:
    """Flow matching (Lipman et al. 2023) by Euler steps: a straight line from noise to the token, and its velocity.

    At share s of noise a point is (1 - s) token + s noise, and the head returns d numbers, noise - token. Every law is
    a point: sigma is 0.

    Args:
        num_steps: Euler steps, 1 to 1000.

    Raises:
        ValueError: as `respaced_levels`.
    """

    def __init__(self, num_steps: int = 25) -> None:
        respaced_levels(num_steps)
        self.num_steps = num_steps
        shares = torch.arange(1, num_steps + 1, dtype=torch.float64) / num_steps
        self._shares = shares.float()
        self.times = (TRAINING_LEVELS * shares).float()

    def to(self, device: torch.device | str) -> FlowSchedule:
        """Move the tables, once. Returns itself."""
        self.times, self._shares = self.times.to(device), self._shares.to(device)
        return self

    def kernel(self, x: Tensor, index: int | Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
        """See `Schedule`. `output [N, d]`: the velocity. Every step is equally long, whatever the level."""
        return x - output / self.num_steps, torch.zeros_like(x)

    def noised(self, tokens: Tensor, index: Tensor, noise: Tensor) -> Tensor:
        """What tokens [N, d] are at levels [N], with this noise [N, d] in them."""
        share = self._shares[index][:, None]
        return (1.0 - share) * tokens + share * noise

    def losses(self, tokens: Tensor, index: Tensor, noise: Tensor, output: Tensor) -> Tensor:
        """Squared error of the velocity, a mean over the numbers, [N]."""
        return (output - (noise - tokens)).square().mean(-1)
