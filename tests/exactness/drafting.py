"""Exact sequence laws of the samplers that draft with a second model: their real step, on every outcome of each draw.

Between two steps the state is the committed text and what the drafter has been fed, so branches merge into few. (Under
acceptance "identical" a slot's noise serves again in later rounds; but which text was committed says nothing about the
noise of the slots behind it, so it may be drawn afresh.) Caches are rebuilt for every step, with an absurd token
wherever no committed one stands: reading it would show.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.exactness.branching import Regions, _hash, _unique
from tests.exactness.replay import ReplayNoise
from visual_spec.models.core.tabular import TabularModel
from visual_spec.samplers import drafted
from visual_spec.samplers.core.checks import CheckedLaw
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import DRAFT, TOKEN
from visual_spec.samplers.core.trace import DivergenceMeter, Stopwatch
from visual_spec.samplers.drafted import DraftedState

_LEAST = 1e-18
_ROWS = 60_000  # rows of one step call


@dataclass
class DraftingNoise(ReplayNoise):
    """Draws for one slot with the same stream and round share their noise, as they do in `CounterNoise`.

    A tree draws the children of several nodes of one level in one call, with one row of noise.
    """

    fresh: Tensor | None = None  # [N, slots], the regions in which this call's draft noise lies

    def _token(self, law: Tensor, at: Tensor, stream: int) -> Tensor:
        if stream not in (TOKEN, DRAFT):
            return self._draw(lambda: law)
        if self.fresh is None:
            self.fresh = torch.zeros_like(self.regions)
        regions = self.fresh if stream == DRAFT else self.regions
        parts: list[Tensor] = []

        def areas() -> Tensor:
            probability, left = self.table.draw(regions.gather(1, at)[:, 0], law)
            parts.append(left)
            # Of a polygon that is hardly there, the parts do not quite add up to the whole.
            mass = probability.sum(1, keepdim=True)
            assert (self.weight * (mass[:, 0] - 1).abs()).max() < 1e-13
            return probability / mass

        outcome = self._draw(areas)
        if self.pending is None:
            regions.scatter_(1, at, parts[0].gather(1, outcome[:, None]))
        return outcome


@dataclass
class Texts:
    """States between two calls, with their probabilities. One row a state."""

    weight: Tensor  # [N]
    lengths: Tensor  # [N]
    fed: Tensor  # [N]
    tokens: Tensor  # [N, L]

    def rows(self, index: Tensor) -> Texts:
        return Texts(self.weight[index], self.lengths[index], self.fed[index], self.tokens[index])


@dataclass
class Outcome:
    """The exact law of what the sampler returns, [V ** L], and exact means: of the number of target calls, and of what
    the meter of a lossy rule counts, the mass moved and the slots tested."""

    law: Tensor
    calls: float
    moved: float
    tested: float


class DraftingEnumerator:
    """Enumerates one configuration of a drafted sampler on two tabular models.

    Args:
        most: the most tokens that one call commits.
        windows: of the model and of the drafter, as the sampler asks for them.
        step: (model, drafter, state, law, noise, watch) -> None.
        lossy: give the states a meter.
    """

    def __init__(
        self,
        model: TabularModel,
        drafter: TabularModel,
        law: TokenLaw,
        most: int,
        windows: tuple[int, int],
        step: Callable[..., None],
        lossy: bool = False,
    ) -> None:
        self.model, self.drafter, self.most, self.windows, self.step = model, drafter, most, windows, step
        self.length = model.grid.num_tokens
        self.law = CheckedLaw(law, self.length)
        self.table = Regions()
        self.lossy = lossy
        self.moved = self.tested = 0.0

    def run(self) -> Outcome:
        result = torch.zeros(self.model.vocab_size**self.length, dtype=torch.float64)
        powers = self.model.vocab_size ** torch.arange(self.length - 1, -1, -1)
        empty = torch.zeros(1, dtype=torch.long)
        texts = Texts(
            torch.ones(1, dtype=torch.float64), empty, empty, torch.zeros(1, self.length, dtype=torch.long)
        )
        texts = self._merge(self._replay(texts, 0))
        calls, call = 1.0, 0
        while len(texts.weight):
            call += 1
            calls += float(texts.weight.sum())
            texts = self._merge(self._replay(texts, call))
            done = texts.lengths == self.length
            result.index_add_(0, texts.tokens[done] @ powers, texts.weight[done])
            texts = texts.rows((~done).nonzero()[:, 0])
        return Outcome(result, calls, self.moved, self.tested)

    def _replay(self, texts: Texts, call: int) -> Texts:
        """Every successor of every state: runs meet one draw more each time, until all outcomes are given."""
        finished: list[Texts] = []
        work: list[tuple[Texts, list[Tensor]]] = [(texts, [])]
        while work:
            rows, given = work.pop()
            if len(rows.weight) > _ROWS:
                half = len(rows.weight) // 2
                for part in (slice(0, half), slice(half, None)):
                    index = torch.arange(len(rows.weight))[part]
                    work.append((rows.rows(index), [outcome[index] for outcome in given]))
                continue
            regions = torch.zeros(len(rows.weight), self.length + sum(self.windows), dtype=torch.long)
            noise = DraftingNoise(rows.weight, regions, self.table, call, self.model.vocab_size, given=given)
            state = self._call(rows, noise, call)
            if noise.pending is None:
                if state.meter is not None:
                    self.moved += float((noise.weight * state.meter.moved).sum())
                    self.tested += float((noise.weight * state.meter.tested).sum())
                finished.append(Texts(noise.weight, state.lengths, state.fed, state.tokens[:, : self.length]))
                continue
            row, outcome = (noise.weight[:, None] * noise.pending > _LEAST).nonzero(as_tuple=True)
            work.append((rows.rows(row), [*(earlier[row] for earlier in given), outcome]))
        return Texts(
            *(
                torch.cat([getattr(part, name) for part in finished])
                for name in ("weight", "lengths", "fed", "tokens")
            )
        )

    def _call(self, texts: Texts, noise: DraftingNoise, call: int) -> DraftedState:
        """Run the sampler's own code on rows that are in these states."""
        rows = len(texts.weight)
        caches = [
            network.prefill(None, batch_size=rows, guided=self.law.law.guided, window=window)
            for network, window in zip((self.model, self.drafter), self.windows, strict=True)
        ]
        if call == 0:
            return drafted.prepare(self.model, caches[0], caches[1], self.law, noise, self.most)
        absurd = self.model.vocab_size - 1

        def text(until: Tensor, size: int) -> Tensor:
            tokens = torch.full((rows, size), absurd)
            tokens[:, : self.length] = texts.tokens
            return tokens.masked_fill_(torch.arange(size) >= until[:, None], absurd)

        # The newest token is not in the model's cache yet.
        caches[0].tokens = text(texts.lengths - 1, self.length + self.windows[0])
        caches[1].tokens = text(texts.fed, self.length + self.windows[1])
        tokens = text(texts.lengths, self.length + self.most)
        state = DraftedState(
            cache=caches[0],
            drafter_cache=caches[1],
            tokens=tokens,
            lengths=texts.lengths,
            fed=texts.fed,
            round=call - 1,
            target_calls=torch.zeros_like(texts.lengths),
            commit_call=torch.zeros_like(tokens),
            meter=DivergenceMeter(rows, tokens.device) if self.lossy else None,
        )
        self.step(self.model, self.drafter, state, self.law, noise, Stopwatch())
        return state

    def _merge(self, texts: Texts) -> Texts:
        """Add up the branches that no later step can tell apart."""
        past = torch.arange(self.length) >= texts.lengths[:, None]
        tokens = texts.tokens.masked_fill(past, 0)
        first, inverse = _unique(_hash(torch.cat([texts.lengths[:, None], texts.fed[:, None], tokens], 1)))
        weight = torch.zeros(len(first), dtype=torch.float64).index_add_(0, inverse, texts.weight)
        return Texts(weight, texts.lengths[first], texts.fed[first], tokens[first])
