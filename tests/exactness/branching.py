"""Exact sequence laws of the Jacobi sampler: its real `step`, run on every outcome of every draw at once.

Every draw of a step is replaced by a branch. Branches are the rows of one batch, each with its probability, and
branches that reach the same state are merged between steps, so nothing is sampled and nothing is re-implemented.

Draws with a slot's own Gumbel noise are dependent across rounds. With V = 3 their joint law is an area: with
E_v = exp(-G_v), independent standard exponentials, argmax(log target + G) = argmin E_v / target_v, which depends on
the direction of E only, and that is uniform on the triangle. A draw cuts the triangle into three convex cells, and a
branch carries the polygon in which its slot's noise must lie.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from visual_spec.models.core.tabular import TabularModel
from visual_spec.samplers import jacobi
from visual_spec.samplers.core.checks import CheckedLaw
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import TOKEN, CounterNoise
from visual_spec.samplers.core.trace import DivergenceMeter, Stopwatch
from visual_spec.samplers.jacobi import JacobiOptions, JacobiState

Point = tuple[float, float]  # the first two barycentric coordinates
_TRIANGLE: tuple[Point, ...] = ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0))
_EDGE = 1e-14  # a corner this near a cut lies on it
_LEAST = 1e-18  # branches of less weight are dropped; the mass that is missing shows in the total
_ROWS = 120_000  # rows of one step call


def _hash(columns: Tensor) -> Tensor:
    """One 64-bit number for each row of an integer matrix; equal rows and, but for chance, only they agree."""
    generator = torch.Generator().manual_seed(columns.shape[1])
    factors = torch.randint(-(2**62), 2**62, (columns.shape[1],), generator=generator)
    mixed = columns * 0x9E3779B97F4A7C1 + (columns >> 7)
    return (mixed * (2 * factors + 1)).sum(1)


def _quantise(probabilities: Tensor) -> Tensor:
    return (probabilities * 2**42).round().long()


def _unique(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Index of one representative of each distinct key, and the representative's position for every row."""
    values, inverse = keys.unique(return_inverse=True)
    first = torch.empty(len(values), dtype=torch.long)
    first[inverse] = torch.arange(len(keys))
    return first, inverse


def _area(polygon: tuple[Point, ...]) -> float:
    """Share of the triangle."""
    twice = 0.0
    for (x0, y0), (x1, y1) in zip(polygon, polygon[1:] + polygon[:1], strict=True):
        twice += x0 * y1 - x1 * y0
    return abs(twice)


def _clip(polygon: tuple[Point, ...], a: float, b: float, c: float) -> tuple[Point, ...]:
    """The part of a convex polygon where a x + b y + c >= 0."""
    kept: list[Point] = []
    heights = [a * x + b * y + c for x, y in polygon]
    for index, point in enumerate(polygon):
        before, height = heights[index - 1], heights[index]
        if (height > _EDGE and before < -_EDGE) or (height < -_EDGE and before > _EDGE):
            (x0, y0), (x1, y1) = polygon[index - 1], point
            share = before / (before - height)
            kept.append((x0 + share * (x1 - x0), y0 + share * (y1 - y0)))
        if height >= -_EDGE:
            kept.append(point)
    return tuple(kept)


def cells(polygon: tuple[Point, ...], law: list[float]) -> list[tuple[Point, ...]]:
    """The three parts of a polygon in which argmin E_v / law_v is 0, 1, 2."""
    # In barycentric coordinates E = (x, y, 1 - x - y); v wins over u where law_v E_u - law_u E_v >= 0.
    coordinates = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (-1.0, -1.0, 1.0))
    parts = []
    for v in range(3):
        part = polygon
        for u in range(3):
            if u != v and len(part) > 2:
                cut = [
                    law[v] * e_u - law[u] * e_v
                    for e_u, e_v in zip(coordinates[u], coordinates[v], strict=True)
                ]
                part = _clip(part, *cut)
        parts.append(part if law[v] > 0 and len(part) > 2 else ())
    return parts


class Regions:
    """The polygons that branches carry, by number; 0 is the whole triangle."""

    def __init__(self) -> None:
        self.polygons: list[tuple[Point, ...]] = [_TRIANGLE]
        self._number: dict[tuple, int] = {}
        self._cuts: dict[int, tuple[list[float], list[int]]] = {}

    def draw(self, regions: Tensor, laws: Tensor) -> tuple[Tensor, Tensor]:
        """Probability of each token given the region [N], law [N, 3], and the region that each leaves: [N, 3]."""
        keys = _hash(torch.cat([regions[:, None], _quantise(laws)], 1))
        first, inverse = _unique(keys)
        found = [
            self._cut(key, region, law)
            for key, region, law in zip(
                keys[first].tolist(), regions[first].tolist(), laws[first].tolist(), strict=True
            )
        ]
        probability = torch.tensor([shares for shares, _ in found], dtype=torch.float64)
        return probability[inverse], torch.tensor([numbers for _, numbers in found])[inverse]

    def _cut(self, key: int, region: int, law: list[float]) -> tuple[list[float], list[int]]:
        if key not in self._cuts:
            whole = self.polygons[region]
            parts = cells(whole, law)
            areas = [_area(part) for part in parts]
            # A polygon of no area is a branch of no weight; it needs no number of its own.
            numbers = [
                self._add(part) if area > _LEAST else 0 for part, area in zip(parts, areas, strict=True)
            ]
            self._cuts[key] = ([area / _area(whole) for area in areas], numbers)
        return self._cuts[key]

    def _add(self, polygon: tuple[Point, ...]) -> int:
        name = tuple(sorted((round(x, 13), round(y, 13)) for x, y in polygon))
        if name not in self._number:
            self._number[name] = len(self.polygons)
            self.polygons.append(polygon)
        return self._number[name]


@dataclass
class Branches:
    """States between two calls, with their probabilities. One row a state."""

    weight: Tensor  # [N]
    lengths: Tensor  # [N]
    tokens: Tensor  # [N, L + W]
    draft_law: Tensor | None  # [N, W, V]
    regions: Tensor  # [N, L + W]

    def rows(self, index: Tensor) -> Branches:
        law = None if self.draft_law is None else self.draft_law[index]
        return Branches(self.weight[index], self.lengths[index], self.tokens[index], law, self.regions[index])

    @staticmethod
    def join(parts: list[Branches]) -> Branches:
        laws = [part.draft_law for part in parts if part.draft_law is not None]
        return Branches(
            torch.cat([part.weight for part in parts]),
            torch.cat([part.lengths for part in parts]),
            torch.cat([part.tokens for part in parts]),
            torch.cat(laws) if laws else None,
            torch.cat([part.regions for part in parts]),
        )


@dataclass
class BranchingNoise(CounterNoise):
    """A noise source that takes given outcomes and multiplies up their probabilities.

    Without `outcomes` it takes outcome 0 everywhere and records what is drawn: `radices`, one list a call.
    Refuses noise that is not fresh where the enumeration takes it to be.
    """

    weight: Tensor  # [N]
    regions: Tensor  # [N, L + W]
    table: Regions
    call: int  # index of the target call
    cells: int  # outcomes of a uniform number
    outcomes: list[Tensor] | None = None  # one [N, columns] for each draw
    radices: list[list[int]] = field(default_factory=list)
    seen: list[tuple[str, int, Tensor]] = field(default_factory=list)

    def _next(self, radix: int, slots: Tensor) -> Tensor:
        self.radices.append([radix] * slots.shape[1])
        if self.outcomes is None:
            return torch.zeros_like(slots)
        return self.outcomes[len(self.radices) - 1]

    def _fresh(self, kind: str, slots: Tensor, stream: int, round: int | Tensor) -> None:
        assert stream != TOKEN, "the slot's own noise serves Gumbel draws only"
        assert round == self.call, (
            f"round {round} in call {self.call}: noise of another call would be used again"
        )
        for other, used, where in self.seen:
            shared = (slots[:, :, None] == where[:, None, :]).any()
            assert not (other == kind and used == stream and shared), (
                "the same noise is drawn twice in one call"
            )
        self.seen.append((kind, stream, slots.clone()))

    def _weigh(self, probability: Tensor) -> None:
        assert not probability.isnan().any()
        self.weight = self.weight * probability.prod(1)

    def categorical(self, log_probs: Tensor, slots: Tensor, stream: int, round: int | Tensor = 0) -> Tensor:
        outcome = self._next(log_probs.shape[-1], slots)
        laws = log_probs.softmax(-1)
        if stream != TOKEN:
            self._fresh("row", slots, stream, round)
            self._weigh(laws.gather(-1, outcome[..., None]).squeeze(-1))
            return outcome
        assert round == 0, "the slot's own noise does not depend on the round"
        for column in range(slots.shape[1]):
            at, chosen = slots[:, column, None], outcome[:, column, None]
            probability, left = self.table.draw(self.regions.gather(1, at)[:, 0], laws[:, column])
            self._weigh(probability.gather(1, chosen))
            self.regions = self.regions.scatter(1, at, left.gather(1, chosen))
        return outcome

    def bernoulli(self, probability: Tensor, slots: Tensor, stream: int, round: int | Tensor = 0) -> Tensor:
        outcome = self._next(2, slots)
        self._fresh("scalar", slots, stream, round)
        self._weigh(torch.where(outcome == 1, probability, 1 - probability))
        return outcome == 1

    def uniform(
        self, slots: Tensor, stream: int, round: int | Tensor = 0, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        # The middle of each of `cells` equal intervals: all that a uniform choice among `cells` tokens looks at.
        outcome = self._next(self.cells, slots)
        self._fresh("scalar", slots, stream, round)
        self.weight = self.weight / self.cells ** slots.shape[1]
        return (outcome.to(dtype) + 0.5) / self.cells


Step = Callable[..., None]


@dataclass
class Enumeration:
    """The exact law of what the sampler returns: [V ** L], and exact means: of the number of target calls, and of
    what the meter of a lossy rule counts, the mass moved and the slots tested."""

    law: Tensor
    calls: float
    moved: float
    tested: float


class Enumerator:
    """Enumerates one configuration of the sampler on one tabular model."""

    def __init__(
        self, model: TabularModel, law: TokenLaw, options: JacobiOptions, step: Step = jacobi.step
    ) -> None:
        self.model, self.options, self.step = model, options, step
        self.length = model.grid.num_tokens
        self.law = CheckedLaw(law, self.length)
        self.guided = law.guided
        first, stop = law.allowed or (0, model.vocab_size)
        self.cells = stop - first
        self.table = Regions()
        self.moved = self.tested = 0.0

    def run(self) -> Enumeration:
        result = torch.zeros(self.model.vocab_size**self.length, dtype=torch.float64)
        branches = self._expand(None, 0)
        calls, call = 1.0, 0
        powers = self.model.vocab_size ** torch.arange(self.length - 1, -1, -1)
        while len(branches.weight):
            call += 1
            calls += float(branches.weight.sum())
            # The same draws happen in every row; of which slots, only rows of one length agree on.
            parts = [
                self._expand(branches.rows((branches.lengths == length).nonzero()[:, 0]), call)
                for length in branches.lengths.unique()
            ]
            branches = Branches.join(parts)
            done = branches.lengths == self.length
            result.index_add_(0, branches.tokens[done][:, : self.length] @ powers, branches.weight[done])
            branches = self._merge(branches.rows((~done).nonzero()[:, 0]))
        return Enumeration(result, calls, self.moved, self.tested)

    def _expand(self, branches: Branches | None, call: int) -> Branches:
        """Every successor of every state. None stands for the start: then the call is the prefill."""
        if branches is None:
            size = self.length + self.options.window
            none = torch.zeros(1, size, dtype=torch.long)
            branches = Branches(
                torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.long), none, None, none
            )
        one = torch.zeros(1, dtype=torch.long)
        recording = self._noise(branches.rows(one), call, None)
        self._call(branches.rows(one), recording, call)
        radices = [radix for draw in recording.radices for radix in draw]
        count = math.prod(radices)
        digits = []  # of 0 .. count - 1 in the mixed base of the radices
        rest = torch.arange(count)
        for radix in radices:
            digits.append(rest % radix)
            rest = rest // radix
        combinations = torch.stack(digits, 1)  # [count, draws]
        widths = [len(draw) for draw in recording.radices]
        parts = []
        for start in range(0, len(branches.weight), max(1, _ROWS // count)):
            states = torch.arange(start, min(start + max(1, _ROWS // count), len(branches.weight)))
            chunk = branches.rows(states.repeat_interleave(count))
            outcomes = list(combinations.repeat(len(states), 1).split(widths, 1))
            noise = self._noise(chunk, call, outcomes)
            state = self._call(chunk, noise, call)
            assert [len(draw) for draw in noise.radices] == widths
            if state.meter is not None:
                self.moved += float((noise.weight * state.meter.moved).sum())
                self.tested += float((noise.weight * state.meter.tested).sum())
            after = Branches(noise.weight, state.lengths, state.tokens, state.draft_law, noise.regions)
            parts.append(self._merge(after.rows((after.weight > _LEAST).nonzero()[:, 0])))
        return Branches.join(parts)

    def _noise(self, branches: Branches, call: int, outcomes: list[Tensor] | None) -> BranchingNoise:
        return BranchingNoise(branches.weight, branches.regions, self.table, call, self.cells, outcomes)

    def _call(self, branches: Branches, noise: BranchingNoise, call: int) -> JacobiState:
        """Run the sampler's own code on rows that are in these states."""
        rows = len(branches.weight)
        window = self.options.window
        cache = self.model.prefill(None, batch_size=rows, guided=self.guided, window=window)
        if call == 0:
            return jacobi.prepare(self.model, cache, self.law, noise, self.options)
        cache.tokens = branches.tokens.clone()
        state = JacobiState(
            cache=cache,
            tokens=branches.tokens.clone(),
            lengths=branches.lengths,
            draft_law=branches.draft_law,
            round=call - 1,
            target_calls=torch.zeros(rows, dtype=torch.long),
            commit_call=torch.zeros_like(branches.tokens),
            meter=None if self.options.rule.lossless else DivergenceMeter(rows, branches.tokens.device),
        )
        self.step(self.model, state, self.law, noise, self.options, Stopwatch())
        return state

    def _merge(self, branches: Branches) -> Branches:
        """Add up the branches that no later step can tell apart."""
        slots = torch.arange(branches.tokens.shape[1])
        past = slots >= torch.clamp(branches.lengths + self.options.window - 1, max=self.length)[:, None]
        tokens = branches.tokens.masked_fill(past, 0)
        # The noise of a committed slot is never used again: it is summed over.
        regions = branches.regions.masked_fill(past | (slots < branches.lengths[:, None]), 0)
        parts = [branches.lengths[:, None], tokens, regions]
        law = branches.draft_law
        if law is not None:
            drafted = branches.lengths[:, None] + torch.arange(law.shape[1])
            outside = (drafted >= self.length)[..., None].expand_as(law).clone()
            outside[:, -1] = False
            law = law.masked_fill(outside, -math.log(law.shape[-1]))
            parts.append(_quantise(law.exp()).flatten(1))
        first, inverse = _unique(_hash(torch.cat(parts, 1)))
        weight = torch.zeros(len(first), dtype=torch.float64).index_add_(0, inverse, branches.weight)
        return Branches(
            weight,
            branches.lengths[first],
            tokens[first],
            None if law is None else law[first],
            regions[first],
        )


def total_variation(first: Tensor, second: Tensor) -> float:
    return 0.5 * float((first - second).abs().sum())
