"""The chain of a token: the head at all slots of a call, level by level, with guidance and temperature."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from visual_spec.kernels.head_step import head_step, takes
from visual_spec.models.core.continuous import ChainSettings, ContinuousModel, LevelSchedule, guided
from visual_spec.samplers.continuous.head_loop import AT_ONCE, HeadLoop
from visual_spec.samplers.core.noise import CHAIN, CounterNoise, rounds_of

Law = tuple[Tensor, Tensor]  # mean and standard deviation


@dataclass
class ChainLaw:
    """How the tokens of a decode are drawn from their conditions.

    Attributes:
        settings: of the chain.
        schedule: of the levels; a drafter's has as many as the target's.
        temperature: multiplies the noise of the chain's steps; of a deterministic chain, its start.
        guided: whether conditions hold unconditional rows.
        scales: [L + scratch], the scale of guidance at each slot.
        loop: draws tokens by plain chains of the target.
    """

    settings: ChainSettings
    schedule: LevelSchedule
    temperature: float
    guided: bool
    scales: Tensor
    loop: HeadLoop

    @property
    def levels(self) -> int:
        """T, of a chain."""
        return self.schedule.num_steps

    def select(self, samples: Tensor) -> None:
        """Nothing here depends on the samples."""

    def chains(self, model: ContinuousModel, z: Tensor, slots: Tensor) -> Chains:
        """The chains of slots [B, N] with conditions `z [R, N, dim]`, as `model`'s head steers them."""
        return Chains(self, model, self.schedule, z, self.scales[slots].to(z.dtype))


@dataclass
class Chains:
    """The chains of B x N tokens, given their conditions. Points are [..., B, N, d].

    Attributes:
        z: [R, N, dim].
        scales: [B, N], of guidance.
        calls: one number, the calls of the head so far, one after the other; chains that were picked share it.
        fused: whether the kernels of `head_step` may run, which have no derivatives.
    """

    law: ChainLaw
    model: ContinuousModel
    schedule: LevelSchedule
    z: Tensor
    scales: Tensor
    calls: list[int] = field(default_factory=lambda: [0])
    fused: bool = True
    _held: tuple[int, Tensor] | None = field(default=None, repr=False)

    @property
    def dtype(self) -> torch.dtype:
        """Of the points: at least float32."""
        return torch.promote_types(self.z.dtype, torch.float32)

    def pick(self, samples: Tensor, columns: Tensor, count: int) -> Chains:
        """The chains of one column, long [b], of each of some samples, long [b], `count` times: of b x count tokens."""
        rows = torch.cat([samples, samples + len(self.scales)]) if self.law.guided else samples
        at = columns.repeat(len(rows) // len(samples))
        z = self.z[rows, at][:, None].expand(-1, count, -1)
        scales = self.scales[samples, columns][:, None].expand(-1, count)
        return Chains(self.law, self.model, self.schedule, z, scales, self.calls)

    def start(
        self, noise: CounterNoise, places: Tensor, stream: int = CHAIN, attempts: Tensor | None = None
    ) -> Tensor:
        """Where the chains of places [B, N] start."""
        rounds = rounds_of(self.law.levels, attempts)
        x = noise.normal(places, self.model.token_dim, stream, rounds, self.dtype)
        return x * self.law.temperature if self.schedule.deterministic else x

    def output(self, x: Tensor, level: int) -> Tensor:
        """The head's output [..., B, N, outputs] at points [..., B, N, d] of one level."""
        return self.output_with(x, self._modulations(level))

    def output_with(self, x: Tensor, modulations: Tensor) -> Tensor:
        """The same with modulations that broadcast to [..., R N, M]."""
        self.calls[0] += 1
        by_kernels = self._by_kernels(x, modulations)
        if by_kernels is not None:
            return by_kernels
        flat = x.flatten(-3, -2).to(modulations.dtype)
        if self.law.guided:
            flat = torch.cat([flat, flat], -2)
        output = self.model.head.denoise(flat, modulations)
        if self.law.guided:
            output = guided(output, self.scales.reshape(-1, 1), self.model.token_dim)
        return output.unflatten(-2, x.shape[-3:-1]).to(x.dtype)

    def kernel(self, x: Tensor, level: int) -> Law:
        """Mean and standard deviation of the points after `x [..., B, N, d]`, noise of level 0 included."""
        mean, sigma = self.schedule.kernel(x, level, self.output(x, level))
        if level == 0:
            sigma = torch.full_like(mean, self.law.settings.final_noise)
        return mean, sigma * self.law.temperature

    def log(
        self, noise: CounterNoise, places: Tensor, stream: int, attempts: Tensor | None = None
    ) -> ChainLog:
        """Draw tokens of places [B, N], each with its own noise of a stream, and return the record of the chains.

        `attempts`: long, broadcasting to [B, N]: fresh noise for repeated chains of a place.
        """
        points, laws = [self.start(noise, places, stream, attempts)], []
        for level in reversed(range(self.law.levels)):
            laws.append(self.kernel(points[-1], level))
            points.append(drawn(laws[-1], noise, places, rounds_of(level, attempts), stream))
        mean, sigma = (torch.stack(parts[::-1], 2) for parts in zip(*laws, strict=True))
        return ChainLog(torch.stack(points[::-1], 2), mean, sigma)

    def log_likelihood(self, log: ChainLog) -> Tensor:
        """Logarithm of the density of chains after their start, without constants: float64 [B, N]."""
        from visual_spec.samplers.continuous.coupling import log_density  # where chains are compared

        levels = range(self.law.levels)
        return sum(
            (log_density(log.points[:, :, t], *self.kernel(log.points[:, :, t + 1], t)) for t in levels),
            torch.zeros((), dtype=torch.float64, device=self.z.device),
        )

    def _by_kernels(self, x: Tensor, modulations: Tensor) -> Tensor | None:
        """`output_with` by the kernels of `head_step`; None where they cannot run."""
        head: Any = self.model.head
        points, count = x.flatten(0, -2), x.shape[-3] * x.shape[-2]
        rows = len(points) * (2 if self.law.guided else 1)
        weights = head.step_weights() if self.fused and hasattr(head, "step_weights") else None
        if weights is None or not takes(points, rows, weights):
            return None
        each = modulations.expand(*x.shape[:-3], -1, -1)  # [..., R N, M]
        # All conditional rows come first, of all levels.
        each = each.unflatten(-2, (-1, count)).movedim(-3, 0).flatten(0, -2)
        scales = self.scales.flatten().repeat(len(points) // count) if self.law.guided else None
        _, mean, sigma = head_step(points, each, weights, scales, self.law.loop.output_law[x.dtype], None)
        if len(weights[-2]) > x.shape[-1]:
            mean = torch.cat([mean, 2.0 * sigma.log()], -1)
        return mean.view(*x.shape[:-1], -1)

    def _modulations(self, level: int) -> Tensor:
        """The modulations of a level; they are computed for it and for as many levels below it as fit."""
        if self._held is not None and 0 <= level - self._held[0] < len(self._held[1]):
            return self._held[1][level - self._held[0]]
        flat, times = self.z.flatten(0, 1), self.schedule.times
        one = self.model.head.modulations(flat, times[level : level + 1])
        first = max(0, level + 1 - max(1, AT_ONCE // max(1, one.nbytes)))
        if first < level:
            one = self.model.head.modulations(flat, times[first : level + 1])
        self._held = first, one
        return one[level - first]


@dataclass
class ChainLog:
    """The record of chains: what they went through, and the law of every step.

    Attributes:
        points: [B, N, T + 1, d]; at T the start, at 0 the token.
        mean, sigma: [B, N, T, d], of the law that point t was drawn from.
    """

    points: Tensor
    mean: Tensor
    sigma: Tensor

    @property
    def tokens(self) -> Tensor:
        return self.points[:, :, 0]

    def law(self, level: int) -> Law:
        """Of the point after level `level`."""
        return self.mean[:, :, level], self.sigma[:, :, level]

    def log_likelihood(self) -> Tensor:
        """As `Chains.log_likelihood`, under the laws that the chains were drawn from."""
        from visual_spec.samplers.continuous.coupling import log_density

        return log_density(self.points[:, :, :-1], self.mean, self.sigma).sum(2)

    def select(self, samples: Tensor) -> None:
        """Keep only the samples long [N]."""
        self.points, self.mean, self.sigma = (part[samples] for part in (self.points, self.mean, self.sigma))

    def at(self, columns: Tensor) -> ChainLog:
        """The record of some columns, long [B, N]."""
        rows = torch.arange(len(columns), device=columns.device)[:, None]
        return ChainLog(*(part[rows, columns] for part in (self.points, self.mean, self.sigma)))

    @classmethod
    def joined(cls, logs: list[ChainLog]) -> ChainLog:
        """The records of columns that follow each other."""
        return cls(
            *(torch.cat([getattr(log, name) for log in logs], 1) for name in ("points", "mean", "sigma"))
        )


def drawn(law: Law, noise: CounterNoise, places: Tensor, level: int | Tensor, stream: int) -> Tensor:
    """Draws from laws [B, N, d] of one level, with the noise of places [B, N]."""
    mean, sigma = law
    return mean + sigma * noise.normal(places, mean.shape[-1], stream, level, mean.dtype)
