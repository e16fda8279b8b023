"""Exact sequence laws of samplers that make too many draws for the full product of `branching`.

The step is run again and again on the same states: each run meets one draw more whose outcomes are given, and reports
the law of the first that is not, so that only outcomes of positive probability are ever followed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.exactness.branching import Branches, BranchingNoise, Enumerator
from visual_spec.samplers.core.noise import TOKEN

_LEAST = 1e-18
_STATES = 400  # states that are replayed together
_ROWS = 50_000  # rows of one call


@dataclass
class ReplayNoise(BranchingNoise):
    """Takes the outcomes it is given, then reports the law of the next draw and plays on with outcome 0.

    A draw of n columns is n draws of one; ranking k tokens is k draws, each from what the ones before leave.
    """

    given: list[Tensor] = field(default_factory=list)  # of [N]
    pending: Tensor | None = None  # [N, outcomes], the law of draw number len(given)
    number: int = 0

    def _draw(self, probability: Callable[[], Tensor]) -> Tensor:
        """One draw: outcomes [N]. The law is asked for only while all draws before it are decided."""
        rows = len(self.weight)
        if self.pending is not None:
            return torch.zeros(rows, dtype=torch.long)
        law = probability()
        assert not law.isnan().any() and (law.sum(1) - 1).abs().max() < 1e-9
        if self.number == len(self.given):
            self.pending = law
            return torch.zeros(rows, dtype=torch.long)
        outcome = self.given[self.number]
        self.number += 1
        self.weight = self.weight * law.gather(1, outcome[:, None])[:, 0]
        return outcome

    def _token(self, law: Tensor, at: Tensor, stream: int) -> Tensor:
        """law [N, V] at slot at [N, 1]."""
        if law.shape[1] != 3:
            # The polygons need three tokens; but where only the first slot uses its own noise, that is fresh too.
            assert stream != TOKEN or self.call == 0
        if stream != TOKEN or law.shape[1] != 3:
            return self._draw(lambda: law)
        parts: list[Tensor] = []

        def areas() -> Tensor:
            probability, left = self.table.draw(self.regions.gather(1, at)[:, 0], law)
            parts.append(left)
            return probability

        outcome = self._draw(areas)
        if self.pending is None:
            self.regions = self.regions.scatter(1, at, parts[0].gather(1, outcome[:, None]))
        return outcome

    def categorical(self, log_probs: Tensor, slots: Tensor, stream: int, round: int | Tensor = 0) -> Tensor:
        return self.ranking(log_probs, slots, 1, stream, round)[..., 0]

    def ranking(
        self, log_probs: Tensor, slots: Tensor, count: int, stream: int, round: int | Tensor = 0
    ) -> Tensor:
        if stream == TOKEN:
            assert round == 0, "the slot's own noise does not depend on the round"
        else:
            self._fresh("row", slots, stream, round)
        # Where nothing is left the tokens are arbitrary: here always the first.
        first = torch.zeros(log_probs.shape[-1], dtype=log_probs.dtype).index_fill(0, torch.tensor(0), 1.0)
        columns = []
        for column in range(slots.shape[1]):
            left = log_probs[:, column].exp()
            tokens = []
            for _ in range(count):
                mass = left.sum(1, keepdim=True)
                law = torch.where(mass > 0, left / mass, first)
                tokens.append(self._token(law, slots[:, column, None], stream))
                left = left.scatter(1, tokens[-1][:, None], 0.0)
            columns.append(torch.stack(tokens, 1))
        return torch.stack(columns, 1) if columns else slots.new_zeros(*slots.shape, count)

    def bernoulli(self, probability: Tensor, slots: Tensor, stream: int, round: int | Tensor = 0) -> Tensor:
        self._fresh("scalar", slots, stream, round)
        laws = torch.stack([1 - probability, probability], -1)  # [N, columns, 2]
        return self._columns(laws, slots) == 1

    def uniform(
        self, slots: Tensor, stream: int, round: int | Tensor = 0, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        self._fresh("scalar", slots, stream, round)
        laws = torch.full((*slots.shape, self.cells), 1 / self.cells, dtype=torch.float64)
        return (self._columns(laws, slots).to(dtype) + 0.5) / self.cells

    def _columns(self, laws: Tensor, slots: Tensor) -> Tensor:
        outcomes = [self._draw(lambda law=law: law) for law in laws.unbind(1)]
        return torch.stack(outcomes, 1) if outcomes else torch.zeros_like(slots)


class ReplayEnumerator(Enumerator):
    """`Enumerator` for any step on a `JacobiState`, by replay.

    Args:
        options: how `jacobi.prepare` and the redraft treat the sampler; `step` knows the rest.
        step: takes what `jacobi.step` takes; it gets `options` too, and may ignore them.
    """

    def _expand(self, branches: Branches | None, call: int) -> Branches:
        if branches is None:
            none = torch.zeros(1, self.length + self.options.window, dtype=torch.long)
            one = torch.ones(1, dtype=torch.float64)
            branches = Branches(one, torch.zeros(1, dtype=torch.long), none, None, none)
        parts = [
            self._merge(part)
            for states in torch.arange(len(branches.weight)).split(_STATES)
            for part in self._replay(branches.rows(states), call, [])
        ]
        return Branches.join(parts)

    def _replay(self, branches: Branches, call: int, given: list[Tensor]) -> Iterator[Branches]:
        """All that the step makes of these states behind the given outcomes, one [N] a draw."""
        noise = ReplayNoise(branches.weight, branches.regions, self.table, call, self.cells, given=given)
        state = self._call(branches, noise, call)
        if noise.pending is None:
            yield Branches(noise.weight, state.lengths, state.tokens, state.draft_law, noise.regions)
            return
        # noise.weight is by now the probability of all that was given.
        row, outcome = (noise.weight[:, None] * noise.pending > _LEAST).nonzero(as_tuple=True)
        for part, more in zip(row.split(_ROWS), outcome.split(_ROWS), strict=True):
            yield from self._replay(branches.rows(part), call, [*(earlier[part] for earlier in given), more])
