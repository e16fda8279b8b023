"""The chains that draw one continuous token: MAR's denoising diffusion, and flow matching.

A chain has `num_steps` levels. It starts at level `num_steps - 1` from standard normal noise; level i takes a point to
the next, and what level 0 returns is the token. Each level is one normal law, which `kernel` gives as mean and standard
deviation, so that a chain can be logged, coupled and replayed. Both classes follow
`visual_spec.models.core.continuous.LevelSchedule`.

    x = noise                                             # [N, d]
    for index in reversed(range(schedule.num_steps)):
        mean, sigma = schedule.kernel(x, index, head(x, schedule.times[index], z))
        x = mean + sigma * temperature * noise[index]     # the published chain has no noise at level 0
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from visual_spec.models.core.continuous import ChainSettings
from visual_spec.models.core.settings import Within, whole

TRAINING_LEVELS = 1000


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
    num_steps = whole("num_steps", num_steps, Within(1, count))
    stride = 1.0 if num_steps == 1 else (count - 1) / (num_steps - 1)
    place, levels = 0.0, []
    for _ in range(num_steps):
        levels.append(round(place))
        place += stride
    return levels


class DiffusionSchedule:
    """MAR's chain: noise prediction, and a variance between the posterior's and the level's.

    The head returns the noise in a point, d numbers, and d numbers v from -1 to 1 that interpolate the logarithm of the
    variance (Nichol and Dhariwal 2021, section 3.1). The levels are `num_steps` of the 1000 of training; `times` are
    theirs (Nichol and Dhariwal 2021, section 4).

    Noise prediction asks much of a head: at level 999 its error is in the token 20,000 times as large. A head that was
    trained for a short time predicts sqrt(kept) noise - sqrt(1 - kept) token in its place (Salimans and Ho 2022,
    section 4), whose error the token has at most once. Nothing else changes.

    Args:
        num_steps: levels of the chain, 1 to 1000; 100 in the published evaluation.
        velocity: the head predicts that difference, not the noise.
        eta: None: the published chain. A number: noise of that share of the posterior's width in place of the learned
            one, in the chain of the same marginals (Song et al. 2021, equations 12 and 16). 0 is deterministic.

    Raises:
        ValueError: as `respaced_levels` and `ChainSettings`.
    """

    def __init__(self, num_steps: int = 100, *, velocity: bool = False, eta: float | None = None) -> None:
        levels = respaced_levels(num_steps)
        ChainSettings(eta=eta)
        # In float64: products of a thousand factors, of which differences are taken.
        # Share of the token's variance that is left at each level.
        kept = (1.0 - cosine_betas()).cumprod(0)[levels]
        before = torch.cat([kept.new_ones(1), kept[:-1]])
        betas = 1.0 - kept / before
        posterior = betas * (1.0 - before) / (1.0 - kept)
        # The first level's posterior has no width, and its logarithm would be infinite: it takes the second's.
        clipped = torch.cat([posterior[1:2] if num_steps > 1 else betas[:1], posterior[1:]])
        self.num_steps, self.velocity, self.eta, self.deterministic = num_steps, velocity, eta, eta == 0
        self.times = torch.tensor(levels, dtype=torch.float32)
        table = torch.stack(
            [
                kept.sqrt() if velocity else kept.rsqrt(),
                (1.0 - kept).sqrt() if velocity else (1.0 / kept - 1.0).sqrt(),
                betas * before.sqrt() / (1.0 - kept),
                (1.0 - before) * (1.0 - betas).sqrt() / (1.0 - kept),
                clipped.log(),
                betas.log(),
            ],
            -1,
        )
        self._table = table.float()  # [num_steps, 6]
        of_x, of_output, of_start, of_point, low, high = table.unbind(-1)
        width = torch.ones_like(low)
        self._forward = torch.stack([kept.sqrt(), (1.0 - kept).sqrt()], -1).float()  # [num_steps, 2]
        if eta is not None:
            sigma = (eta * eta * posterior).sqrt()
            # The noise is (x - share token) / rest.
            of_noise = (1.0 - before - sigma.square()).clamp_min(0.0).sqrt()
            ratio = of_noise / (1.0 - kept).sqrt()
            of_start, of_point, width = before.sqrt() - ratio * kept.sqrt(), ratio, sigma
            low = high = torch.zeros_like(width)
            self._fixed = torch.stack([of_start, of_point, sigma], -1).float()
        self.laws = torch.stack([of_start * of_x + of_point, -of_start * of_output, low, high, width], -1)

    def to(self, device: torch.device | str) -> DiffusionSchedule:
        """Move the tables, once, so that no level waits for a copy. Returns itself."""
        self.times, self._table = self.times.to(device), self._table.to(device)
        self._forward = self._forward.to(device)
        if self.eta is not None:
            self._fixed = self._fixed.to(device)
        return self

    def predict(self, x: Tensor, index: int | Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
        """See `LevelSchedule`. `output [..., 2 d]`: the noise or the velocity, then v."""
        noise, fraction = output.chunk(2, -1)
        of_x, of_output = self._table[index][..., :2].unsqueeze(-1).unbind(-2)  # each [1], or [..., 1]
        return of_x * x - of_output * noise, fraction

    def toward(self, x: Tensor, index: int | Tensor, token: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
        """See `LevelSchedule`. `rest`: v."""
        if self.eta is not None:
            of_start, of_point, sigma = self._fixed[index].unsqueeze(-1).unbind(-2)
            return of_start * token + of_point * x, sigma.expand_as(x)
        of_start, of_point, low, high = self._table[index][..., 2:].unsqueeze(-1).unbind(-2)
        share = (rest + 1.0) / 2.0
        return of_start * token + of_point * x, (0.5 * (share * high + (1.0 - share) * low)).exp()

    def kernel(self, x: Tensor, index: int | Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
        """See `LevelSchedule`."""
        return self.toward(x, index, *self.predict(x, index, output))

    # -- training: on a schedule of all levels ---------------------------------------------------------------------

    def noised(self, tokens: Tensor, index: Tensor, noise: Tensor) -> Tensor:
        """Return what tokens [N, d] are at levels [N], with this noise [N, d] in them."""
        share, of_noise = self._forward[index].unsqueeze(-1).unbind(-2)
        return share * tokens + of_noise * noise

    def losses(self, tokens: Tensor, index: Tensor, noise: Tensor, output: Tensor) -> Tensor:
        """Loss [N] of a head's `output [N, 2 d]` at points that `noised` made.

        Squared error of the noise or the velocity, a mean over the numbers, and the divergence in bits of the level's
        law from the true posterior, of which v alone learns (Nichol and Dhariwal 2021, section 3.1).
        """
        predicted, fraction = output.chunk(2, -1)
        point = self.noised(tokens, index, noise)
        mean, sigma = self.kernel(point, index, torch.cat([predicted.detach(), fraction], -1))
        table = self._table[index].unsqueeze(-1)
        true_mean = table[:, 2] * tokens + table[:, 3] * point
        true_log = table[:, 4]  # [N, 1]
        log = 2.0 * sigma.log()
        apart = (true_mean - mean).square() * (-log).exp()
        divergence = 0.5 * (log - true_log - 1.0 + (true_log - log).exp() + apart)
        share, of_noise = self._forward[index].unsqueeze(-1).unbind(-2)
        wanted = share * noise - of_noise * tokens if self.velocity else noise
        return (predicted - wanted).square().mean(-1) + divergence.mean(-1) / math.log(2.0)


class FlowSchedule:
    """Flow matching (Lipman et al. 2023): a straight line from noise to the token, and its velocity.

    At share s of noise a point is (1 - s) token + s noise, and the head returns d numbers, noise - token. Published are
    Euler steps, of which every law is a point: sigma is 0. The same velocity also steers chains that add noise and have
    the same marginals (Albergo et al. 2023, section 2.3).

    Args:
        num_steps: steps, 1 to 1000.
        eta: share of the noise of the ancestral chain, whose law is the posterior of the next point given the token;
            None or 0: Euler steps.

    Raises:
        ValueError: as `respaced_levels` and `ChainSettings`.
    """

    def __init__(self, num_steps: int = 25, *, eta: float | None = None) -> None:
        respaced_levels(num_steps)
        ChainSettings(eta=eta)
        self.num_steps, self.eta, self.deterministic = num_steps, eta, not eta
        shares = torch.arange(1, num_steps + 1, dtype=torch.float64) / num_steps
        self._shares = shares.float()
        self.times = (TRAINING_LEVELS * shares).float()
        later = shares - 1.0 / num_steps
        sigma = (
            (eta or 0.0) * later * (1.0 - ((1.0 - shares) * later / ((1.0 - later) * shares)).square()).sqrt()
        )
        rest = (later.square() - sigma.square()).clamp_min(0.0).sqrt()  # of the noise that is foretold
        of_start, of_point = 1.0 - later - rest * (1.0 - shares) / shares, rest / shares
        self._fixed = torch.stack([of_start, of_point, sigma], -1).float()
        none = torch.zeros_like(sigma)
        self.laws = torch.stack([of_start + of_point, -of_start * shares, none, none, sigma], -1)

    def to(self, device: torch.device | str) -> FlowSchedule:
        """Move the tables, once. Returns itself."""
        self.times, self._shares, self._fixed = (
            table.to(device) for table in (self.times, self._shares, self._fixed)
        )
        return self

    def predict(self, x: Tensor, index: int | Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
        """See `LevelSchedule`. `output [..., d]`: the velocity. Nothing follows the prediction: rest is [..., 0]."""
        return x - self._shares[index].unsqueeze(-1) * output, output[..., :0]

    def toward(self, x: Tensor, index: int | Tensor, token: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
        """See `LevelSchedule`."""
        of_start, of_point, sigma = self._fixed[index].unsqueeze(-1).unbind(-2)
        return of_start * token + of_point * x, sigma.expand_as(x)

    def kernel(self, x: Tensor, index: int | Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
        """See `LevelSchedule`."""
        if self.deterministic:  # the same in one product; every step is equally long, whatever the level
            return x - output / self.num_steps, torch.zeros_like(x)
        return self.toward(x, index, *self.predict(x, index, output))

    def noised(self, tokens: Tensor, index: Tensor, noise: Tensor) -> Tensor:
        """Return what tokens [N, d] are at levels [N], with this noise [N, d] in them."""
        share = self._shares[index][:, None]
        return (1.0 - share) * tokens + share * noise

    def losses(self, tokens: Tensor, index: Tensor, noise: Tensor, output: Tensor) -> Tensor:
        """Squared error of the velocity, a mean over the numbers, [N]."""
        return (output - (noise - tokens)).square().mean(-1)
