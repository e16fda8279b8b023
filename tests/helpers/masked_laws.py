"""The exact law of masked samplers, found by forcing every outcome of their noise."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.exactness.plain_masking import Plain, Tokens
from tests.helpers.tabular import TabularMaskedModel
from visual_spec.samplers.core import base
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import CHOICE, TOKEN
from visual_spec.samplers.masked.masked import MaskedSampler


class ForcedNoise:
    """Row i makes the i-th choice of all outcomes, and is weighted by the probability of them.

    Outcomes that no one looks at (slots that are known) are drawn as well: their weights add up to 1.
    """

    def __init__(self, rows: int, chance: Any = None) -> None:
        self.digits = torch.arange(rows)
        self.weight = torch.ones(rows, dtype=torch.float64)
        self.used: set[tuple[int, int, int]] = set()
        self.chance = chance  # scores [B, U] of a step's draws over their noise
        self.score = torch.zeros(0)

    def _digit(self, base: int) -> Tensor:
        found, self.digits = self.digits % base, self.digits // base
        return found

    def _once(self, slots: Tensor, stream: int, round: int) -> None:
        for slot in slots[0].tolist():
            assert (slot, stream, round) not in self.used, "noise is used twice"
            self.used.add((slot, stream, round))

    def categorical(self, log_probs: Tensor, slots: Tensor, stream: int, round: int) -> Tensor:
        assert stream == TOKEN
        self._once(slots, stream, round)
        outcome = torch.stack([self._digit(log_probs.shape[-1]) for _ in range(slots.shape[1])], 1)
        picked = log_probs.gather(-1, outcome[..., None])[..., 0]
        self.weight = self.weight * picked.exp().prod(1)
        if self.chance is not None:
            self.score = self.chance(picked, round)
        return outcome

    def _ranking(self, count: int) -> Tensor:
        orders = torch.tensor(list(itertools.permutations(range(count))))
        return orders[self._digit(len(orders))]  # [B, U], the units, largest first

    def gumbel(self, slots: Tensor, size: int, stream: int, round: int, dtype: torch.dtype) -> Tensor:
        assert stream == CHOICE and size == 1
        self._once(slots, stream, round)
        ranking = self._ranking(slots.shape[1])
        score = self.score.gather(1, ranking)
        rest = score.flip(1).logcumsumexp(1).flip(1)
        self.weight = self.weight * (score - rest).sum(1).exp()
        # So far apart that the scores do not matter any more.
        height = torch.arange(ranking.shape[1], 0, -1, dtype=dtype).expand_as(ranking) * 1e9
        return torch.zeros_like(height).scatter(1, ranking, height)[..., None]

    def uniform(self, slots: Tensor, stream: int) -> Tensor:
        assert stream == CHOICE
        self._once(slots, stream, 0)
        if slots.shape[1] == 1:  # where an order begins
            count = self.rolls
            self.weight = self.weight / count
            return (self._digit(count)[:, None] + 0.5) / count
        ranking = self._ranking(slots.shape[1])
        self.weight = self.weight / math.factorial(slots.shape[1])
        height = torch.arange(ranking.shape[1], 0, -1, dtype=torch.float32).expand_as(ranking)
        return torch.zeros_like(height).scatter(1, ranking, height) / (ranking.shape[1] + 1)

    rolls = 0


def law_of_sampler(
    monkeypatch,
    sampler: MaskedSampler,
    model: TabularMaskedModel,
    law: TokenLaw,
    noise: ForcedNoise,
    **options,
) -> dict[Tokens, float]:
    rows = len(noise.weight)
    monkeypatch.setattr(base, "CounterNoise", lambda keys, device, **kept: noise)
    monkeypatch.setattr(base, "draw_keys", lambda generator, batch_size: torch.zeros(batch_size))
    given = options.pop("known_tokens", None)
    if given is not None:
        shape = (model.grid.num_tokens, model.grid.codebooks)
        options["known_tokens"] = torch.tensor(given).view(shape).expand(rows, -1, -1)
    result = sampler(model, None, law=law, batch_size=rows, **options)
    # Where draws decide, fewer steps may do; then rows that differ in choices never made are copies of each other.
    once = noise.digits == 0
    assert sampler.planned_calls(model, {}) is None or once.all(), "there are no more rows than outcomes"
    noise.weight = noise.weight * once
    tokens = result.tokens.flatten(1)
    assert (tokens >= 0).all() and (tokens < model.vocab_size).all()
    codes = (tokens * model.vocab_size ** torch.arange(tokens.shape[1])).sum(1)
    values, inverse = codes.unique(return_inverse=True)
    mass = torch.zeros(len(values), dtype=torch.float64).index_add_(0, inverse, noise.weight)
    first = torch.zeros(len(values), dtype=torch.long).scatter_(0, inverse, torch.arange(rows))
    return {tuple(tokens[i].tolist()): p for i, p in zip(first.tolist(), mass.tolist(), strict=True)}


def distance(found: dict[Tokens, float], wanted: dict[Tokens, float]) -> float:
    assert sum(found.values()) == pytest.approx(1, abs=1e-10)
    assert sum(wanted.values()) == pytest.approx(1, abs=1e-10)
    return sum(abs(found.get(key, 0) - wanted.get(key, 0)) for key in {*found, *wanted}) / 2


def wanted(model: TabularMaskedModel) -> Tensor:
    length = model.grid.num_tokens
    law = Plain(model, [3], noise=1.0).law()
    every = itertools.product(range(model.vocab_size), repeat=length)
    return torch.tensor([law.get(tokens, 0.0) for tokens in every], dtype=torch.float64)
