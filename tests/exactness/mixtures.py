"""Models of continuous tokens whose heads know the law of each token: mixtures of normal laws, shifted by the context.

The laws of whole pictures are known as well, so samplers can be judged by what comes out of them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from visual_spec.models.continuous.diffusion import DiffusionSchedule, FlowSchedule
from visual_spec.models.core.continuous import ChainSettings
from visual_spec.models.core.protocol import TokenGrid


@dataclass(frozen=True)
class Mixture:
    """Weights [K], means [K, d] and spreads [K] of isotropic normal laws."""

    weights: Sequence[float]
    means: Any
    spreads: Sequence[float]

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        means = torch.tensor(self.means, dtype=torch.float64)
        means = means[:, None] if means.ndim == 1 else means
        weights, spreads = (torch.tensor(part, dtype=torch.float64) for part in (self.weights, self.spreads))
        return weights, means, spreads

    def noise(self, x: Tensor, shift: Tensor, of_token: Any, of_noise: Any) -> tuple[Tensor, Tensor]:
        """Means of noise and token given points `x = of_token token + of_noise noise`, all [..., d]."""
        weights, means, spreads = self.tensors()
        means = means + shift[..., None, :]  # [..., K, d]
        a, b = (torch.as_tensor(part, dtype=x.dtype)[..., None, None] for part in (of_token, of_noise))
        wide = (a * spreads[:, None]).square() + b.square()  # [..., K, 1]
        apart = x[..., None, :] - a * means
        log = (
            weights.log()
            - 0.5 * x.shape[-1] * wide[..., 0].log()
            - 0.5 * apart.square().sum(-1) / wide[..., 0]
        )
        # Not `softmax`, whose directional derivatives take long.
        share = (log - log.detach().amax(-1, keepdim=True)).exp()[..., None]
        share = share / share.sum(-2, keepdim=True)
        noise = (share * b * apart / wide).sum(-2)
        token = (share * (means + a * spreads[:, None].square() * apart / wide)).sum(-2)
        return noise, token

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """[count, d]."""
        weights, means, spreads = self.tensors()
        which = torch.multinomial(weights, count, replacement=True, generator=generator)
        fresh = torch.randn(count, means.shape[1], generator=generator, dtype=torch.float64)
        return means[which] + spreads[which, None] * fresh


def kept_shares() -> Tensor:
    """What is left of a token's variance at each of 1000 levels, from the published formula."""
    edges = [math.cos((j / 1000 + 0.008) / 1.008 * math.pi / 2) ** 2 for j in range(1001)]
    factors = [1.0 - min(1.0 - high / low, 0.999) for low, high in zip(edges, edges[1:], strict=False)]
    return torch.tensor(factors, dtype=torch.float64).cumprod(0)


KEPT = kept_shares()


class MixtureHead:
    """Knows its mixtures by number; a condition is a shift [d] and a number."""

    def __init__(self, mixtures: Sequence[Mixture], *, flow: bool, share: float, sway: float = 0.0) -> None:
        self.mixtures, self.flow, self.share, self.sway = mixtures, flow, share, sway

    def share_at(self, x: Tensor) -> Tensor:
        """What the head says of the variance at points [..., d]."""
        return self.share + self.sway * x.sin()

    def modulations(self, z: Tensor, times: Tensor) -> Tensor:
        return torch.cat(
            [z.expand(len(times), *z.shape), times.to(z)[:, None, None].expand(-1, len(z), 1)], -1
        )

    def denoise(self, x: Tensor, modulations: Tensor) -> Tensor:
        shift, number, time = modulations[..., :-2], modulations[..., -2], modulations[..., -1]
        if self.flow:
            a, b = 1.0 - time / 1000.0, time / 1000.0
        else:
            kept = KEPT[time.long()]
            a, b = kept.sqrt(), (1.0 - kept).sqrt()
        found = torch.zeros_like(x)
        for index in number.unique().tolist():
            noise, token = self.mixtures[int(index)].noise(x, shift, a, b)
            found = torch.where((number == index)[..., None], noise - token if self.flow else noise, found)
        if self.flow:
            return found
        return torch.cat([found, 2.0 * self.share_at(x) - 1.0], -1)


@dataclass
class MixtureState:
    """Tokens by slot, [B, L + window, d]."""

    conditions: Tensor
    tokens: Tensor
    guided: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def select(self, samples: Tensor) -> None:
        self.conditions, self.tokens = self.conditions[samples], self.tokens[samples]


class MixtureModel:
    """Two or more tokens in raster order: token n is of mixture n, shifted by `slope` times the sum of those before it.

    Args:
        mixtures: of the slots.
        share: where the learned variance lies between that of the posterior, 0, and that of the level, 1.
        sway: how far that moves with the point, so that chains that have parted have unequal widths.
    """

    dtype = torch.float64

    def __init__(
        self,
        mixtures: Sequence[Mixture],
        *,
        slope: float = 0.0,
        flow: bool = False,
        share: float = 0.0,
        sway: float = 0.0,
        chain: ChainSettings | None = None,
    ) -> None:
        self.grid = TokenGrid(1, len(mixtures))
        self.token_dim = mixtures[0].tensors()[1].shape[1]
        self.places = torch.arange(len(mixtures) + 1)
        self.slope, self.flow = slope, flow
        self.chain = chain or ChainSettings(20, final_noise=0.05)
        self.head = MixtureHead(list(mixtures), flow=flow, share=share, sway=sway)
        self.device = torch.device("cpu")

    def schedule(self, num_steps: int, eta: float | None = None) -> Any:
        return (FlowSchedule if self.flow else DiffusionSchedule)(num_steps, eta=eta)

    def _z(self, shift: Tensor, number: Tensor) -> Tensor:
        return torch.cat([shift, number.clamp_max(self.grid.num_tokens - 1).to(shift)[..., None]], -1)

    def prefill(self, condition: Any, *, batch_size: int, guided: bool, window: int) -> MixtureState:
        assert not guided
        tokens = torch.zeros(batch_size, self.grid.num_tokens + window, self.token_dim, dtype=self.dtype)
        number = torch.zeros(batch_size, dtype=torch.long)
        return MixtureState(self._z(torch.zeros_like(tokens[:, 0]), number), tokens)

    def __call__(self, state: MixtureState, tokens: Tensor, slots: Tensor) -> Tensor:
        state.tokens.scatter_(1, slots[..., None].expand_as(tokens), tokens)
        before = state.tokens.cumsum(1).gather(1, slots[..., None].expand_as(tokens))
        return self._z(self.slope * before, slots + 1)


class MaskedMixtureModel(MixtureModel):
    """The same law for a model that sees tokens both ways, of two slots, filled in raster order.

    Not knowing the first token, it has for the second one the law without that condition, `alone`.
    """

    prefill = property()  # pyright: ignore[reportAssignmentType]  # it has none

    def __init__(self, mixtures: Sequence[Mixture], alone: Mixture, **settings: Any) -> None:
        super().__init__([*mixtures, alone], **settings)
        self.grid = TokenGrid(1, 2)

    def prepare(self, condition: Any, *, batch_size: int, guided: bool) -> MixtureState:
        empty = torch.zeros(batch_size, 1, dtype=self.dtype)
        return MixtureState(empty, empty)

    def __call__(self, state: MixtureState, tokens: Tensor, known: Tensor, room: int | None = None) -> Tensor:  # pyright: ignore
        assert len(state.tokens) == len(tokens)
        first = torch.where(known[:, :1, None], tokens[:, :1], 0.0)
        shift = torch.cat([torch.zeros_like(first), self.slope * first], 1)
        number = torch.stack([torch.zeros(len(known)), torch.where(known[:, 0], 1.0, 2.0)], 1)
        return torch.cat([shift, number.to(shift)[..., None]], -1)


def straight_chain(
    model: MixtureModel, slot: int, shift: Tensor, generator: torch.Generator, **settings: Any
) -> Tensor:
    """Tokens [N, d] of a slot with shifts [N, d], from the formulas of the chains, without samplers or schedules."""
    chain = replace(model.chain, **settings)
    mixture, steps = model.head.mixtures[slot], chain.head_steps

    def normal() -> Tensor:
        return torch.randn(shift.shape, generator=generator, dtype=torch.float64)

    x = normal()
    if model.flow:
        eta = chain.eta or 0.0
        for i in range(steps, 0, -1):
            s, t = i / steps, (i - 1) / steps
            noise, token = mixture.noise(x, shift, 1 - s, s)
            wide = eta * t * math.sqrt(1 - ((1 - s) * t / ((1 - t) * s)) ** 2)
            x = (1 - t) * token + math.sqrt(t * t - wide * wide) * noise + wide * normal()
    else:
        levels = [round(i * 999 / (steps - 1)) for i in range(steps)]
        kept = [float(KEPT[level]) for level in levels]
        for i in range(steps - 1, -1, -1):
            before = kept[i - 1] if i else 1.0
            beta = 1 - kept[i] / before
            posterior = beta * (1 - before) / (1 - kept[i])
            noise, _ = mixture.noise(x, shift, math.sqrt(kept[i]), math.sqrt(1 - kept[i]))
            token = (x - math.sqrt(1 - kept[i]) * noise) / math.sqrt(kept[i])
            if chain.eta is None:
                share = model.head.share_at(x)
                mean = beta * math.sqrt(before) * token + (1 - before) * math.sqrt(1 - beta) * x
                x = mean / (1 - kept[i])
                if i:
                    log = share * math.log(beta) + (1 - share) * math.log(posterior)
                    x = x + (0.5 * log).exp() * normal()
            else:
                wide = chain.eta * math.sqrt(posterior)
                x = (
                    math.sqrt(before) * token
                    + math.sqrt(max(0.0, 1 - before - wide**2)) * noise
                    + wide * normal()
                )
    return x + chain.final_noise * normal()


def straight_sequences(
    model: MixtureModel, count: int, seed: int, slots: int | None = None, **settings: Any
) -> Tensor:
    """Sequences [count, L, d] by `straight_chain`, one token after the other."""
    generator, columns = torch.Generator().manual_seed(seed), []
    known = torch.zeros(count, model.token_dim, dtype=torch.float64)
    for slot in range(slots or model.grid.num_tokens):
        columns.append(straight_chain(model, slot, model.slope * known, generator, **settings))
        known = known + columns[-1]
    return torch.stack(columns, 1)


# -- statistics -------------------------------------------------------------------------------------------------------


def kolmogorov(one: Tensor, other: Tensor) -> float:
    """The largest distance of two empirical distribution functions of [N] and [M] numbers."""
    one, other = one.sort().values, other.sort().values
    both = torch.cat([one, other])
    found = [torch.searchsorted(part, both, right=True) / len(part) for part in (one, other)]
    return float((found[0] - found[1]).abs().max())


def critical(count: int, other: int | None = None, chance: float = 1e-3) -> float:
    """The distance that two samples of one law, or a sample and its law, exceed with this probability."""
    size = count if other is None else count * other / (count + other)
    return math.sqrt(-0.5 * math.log(chance / 2) / size)


def directions(points: Tensor, count: int = 8) -> list[Tensor]:
    """Numbers [N] of points [N, d] along some directions; of one number, itself."""
    if points.shape[1] == 1:
        return [points[:, 0]]
    generator = torch.Generator().manual_seed(0)
    axes = torch.randn(count, points.shape[1], generator=generator, dtype=torch.float64)
    return list((points @ (axes / axes.norm(dim=1, keepdim=True)).T).T)


def far_apart(one: Tensor, other: Tensor, chance: float = 1e-3) -> float:
    """The largest distance of points [N, d] and [M, d] along directions, over the critical one: above 1 they differ."""
    pairs = list(zip(directions(one), directions(other), strict=True))
    limit = critical(len(one), len(other), chance / len(pairs))
    return max(kolmogorov(a, b) for a, b in pairs) / limit
