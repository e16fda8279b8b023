"""Noise that takes every outcome: a sampler that draws through it is run on all of them, one draw more each time."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.exactness.regions import Regions
from visual_spec.samplers.core.noise import MIXTURE, PROPOSAL, TOKEN, CounterNoise


class BranchingNoise(CounterNoise):
    """Takes the outcomes it is given, then reports the law of the next draw and plays on with outcome 0.

    A draw of n slots is n draws of one; ranking k tokens is k draws, each from what the ones before leave. Draws with
    certain outcomes, and draws for places past the grid, which are nobody's, make no branches. Refuses noise that is
    not fresh where it has to be.

    Args:
        weight: [N], of the rows.
        regions: long [N, slots], the polygon in which the own noise of each slot lies.
        call: index of the target call.
        cells: outcomes of a uniform number.
        given: of the draws decided so far, by their number: [N] each.
        tries: rounds of `PROPOSAL` and `MIXTURE` that belong to a call.
        early: (stream, round) of other calls' rounds that the first call drew; grows.
    """

    def __init__(
        self,
        weight: Tensor,
        regions: Tensor,
        table: Regions,
        call: int,
        cells: int,
        given: dict[int, Tensor],
        tries: int = 1,
        early: set[tuple[int, int]] | None = None,
    ) -> None:
        super().__init__(torch.zeros(len(weight), dtype=torch.long), "cpu")
        self.weight, self.regions, self.table = weight, regions, table
        self.call, self.cells, self.given, self.tries = call, cells, given, tries
        self.early = set() if early is None else early
        # [N, outcomes], the law of draw `number`, the first that is not decided
        self.pending: Tensor | None = None
        self.number = -1
        self._seen: list[tuple[str, int, Tensor]] = []

    def _fresh(self, kind: str, slots: Tensor, stream: int, round: int | Tensor) -> None:
        assert stream != TOKEN, "the slot's own noise serves Gumbel draws only"
        rounds = torch.as_tensor(round).expand_as(slots)
        if stream in (PROPOSAL, MIXTURE):
            assert (rounds // self.tries == self.call).all(), "noise of another call would be used again"
        elif self.call == 0:
            self.early |= {(stream, each) for each in rounds.unique().tolist()}
        else:
            reused = (rounds != self.call).any() or (stream, self.call) in self.early
            assert not reused, f"round {round} in call {self.call}: noise of another call would be used again"
        where = slots * 1_000_000 + rounds
        for other, used, before in self._seen:
            shared = other == kind and used == stream and (where[:, :, None] == before[:, None, :]).any()
            assert not shared, "the same noise is drawn twice in one call"
        if stream in (PROPOSAL, MIXTURE):
            assert len(where[0].unique()) == where.shape[1], "two tries share their noise"
        self._seen.append((kind, stream, where))

    def _draw(self, law: Tensor, at: Tensor) -> Tensor:
        """One draw: outcomes [N] of law [N, outcomes] at counter slots [N]."""
        if self.pending is not None:
            return torch.zeros_like(at)
        self.number += 1
        outcome = self.given.get(self.number)
        if outcome is None:
            certain = law.argmax(1)
            nobody = at >= self.regions.shape[1]
            law = torch.where(nobody[:, None], F.one_hot(certain, law.shape[1]).to(law), law)
            assert not law.isnan().any() and (law.sum(1) - 1).abs().max() < 1e-9
            if not (law.gather(1, certain[:, None]) == 1).all():
                self.pending = law
            return certain
        share = law.gather(1, outcome[:, None])[:, 0]
        self.weight = self.weight * torch.where(at >= self.regions.shape[1], 1, share)
        return outcome

    def _token(self, law: Tensor, at: Tensor, regions: Tensor | None) -> Tensor:
        """As `_draw`, with noise of which the region is known."""
        if regions is None:
            return self._draw(law, at)
        assert law.shape[1] <= 3 or self.call == 0, "polygons stand for the noise of three tokens at most"
        if law.shape[1] > 3 or self.pending is not None:
            return self._draw(law, at)
        place = at.clamp(max=regions.shape[1] - 1)[:, None]
        before = regions.gather(1, place)
        probability, left = self.table.draw(before[:, 0], law)
        outcome = self._draw(probability, at)
        if self.pending is None:
            after = torch.where(at[:, None] < regions.shape[1], left.gather(1, outcome[:, None]), before)
            regions.scatter_(1, place, after)
        return outcome

    def categorical(self, log_probs: Tensor, slots: Tensor, stream: int, round: int | Tensor = 0) -> Tensor:
        return self.ranking(log_probs, slots, 1, stream, round)[..., 0]

    def ranking(
        self, log_probs: Tensor, slots: Tensor, count: int, stream: int, round: int | Tensor = 0
    ) -> Tensor:
        regions = None
        if stream == TOKEN:
            assert (torch.as_tensor(round) == 0).all(), "the slot's own noise does not depend on the round"
            regions = self.regions = self.regions.clone()
        else:
            self._fresh("row", slots, stream, round)
            # Nodes of one level of a tree share their slot, and so one row of noise.
            where = (slots * 1_000_000 + round)[0]
            if len(where.unique()) < len(where):
                regions = torch.zeros_like(self.regions)
        # Where nothing is left the tokens are arbitrary: here always the first.
        first = F.one_hot(torch.tensor(0), log_probs.shape[-1]).to(log_probs.dtype)
        found = []
        for left, at in zip(log_probs.exp().unbind(1), slots.unbind(1), strict=True):
            tokens = []
            for _ in range(count):
                mass = left.sum(1, keepdim=True)
                law = torch.where(mass == 0, first, left / mass)
                tokens.append(self._token(law, at, regions))
                left = left.scatter(1, tokens[-1][:, None], 0.0)
            found.append(torch.stack(tokens, 1))
        return torch.stack(found, 1) if found else slots.new_zeros(*slots.shape, count)

    def race(
        self, log_probs: Tensor, slots: Tensor, stream: int, round: int | Tensor = 0
    ) -> tuple[Tensor, Tensor]:
        """Margins have no law that could be asked for: all are infinite, which is one of the choices they lead to."""
        tokens = self.categorical(log_probs, slots, stream, round)
        return tokens, torch.full_like(log_probs[..., 0], torch.inf)

    def bernoulli(self, probability: Tensor, slots: Tensor, stream: int, round: int | Tensor = 0) -> Tensor:
        self._fresh("scalar", slots, stream, round)
        return self._each(torch.stack([1 - probability, probability], -1), slots) == 1

    def uniform(
        self, slots: Tensor, stream: int, round: int | Tensor = 0, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        # The middle of each of `cells` equal intervals: all that a uniform choice among `cells` tokens looks at.
        self._fresh("scalar", slots, stream, round)
        laws = torch.full((*slots.shape, self.cells), 1 / self.cells, dtype=torch.float64)
        return (self._each(laws, slots).to(dtype) + 0.5) / self.cells

    def _each(self, laws: Tensor, slots: Tensor) -> Tensor:
        outcomes = [self._draw(law, at) for law, at in zip(laws.unbind(1), slots.unbind(1), strict=True)]
        return torch.stack(outcomes, 1) if outcomes else torch.zeros_like(slots)

    def gumbel(self, *_: Any, **__: Any) -> Tensor:
        raise NotImplementedError("what is drawn with bare Gumbel noise has no law that could be asked for")
