"""Exact sequence laws of the column samplers: the real step, replayed on every outcome of every draw.

As `replay`, on states of columns. The polygon of an entry's own noise has the entry's counter slot. The states form a
Markov chain, in which a state may follow itself: where the residual of a column is not found. So each state is expanded
once, for the probabilities of what follows it, and then the chain runs until all weight has been absorbed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.exactness.branching import Enumeration, Regions, _hash, _quantise, _unique
from tests.exactness.replay import ReplayNoise
from visual_spec.models.core.tabular import TabularColumnModel
from visual_spec.samplers import columns_jacobi
from visual_spec.samplers.columns import Entries
from visual_spec.samplers.columns_jacobi import ColumnOptions, ColumnState
from visual_spec.samplers.core.checks import CheckedLaw
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import MIXTURE, PROPOSAL
from visual_spec.samplers.core.trace import DivergenceMeter, Stopwatch

_LEAST = 1e-17
_STATES = 400  # states that are replayed together
_ROWS = 50_000  # rows of one call


class ColumnNoise(ReplayNoise):
    """`ReplayNoise` with tries in rounds of their own, and with laws of two tokens as laws of three."""

    tries = 1

    def _fresh(self, kind: str, slots: Tensor, stream: int, round: int | Tensor) -> None:
        if stream not in (PROPOSAL, MIXTURE):
            super()._fresh(kind, slots, stream, round)
            return
        rounds = torch.as_tensor(round).expand_as(slots)
        assert (rounds // self.tries == self.call).all(), "noise of another call would be used again"
        # One number for slot and round, which `seen` then compares.
        super()._fresh(kind, slots * 1_000_000 + rounds, stream, self.call)
        within = (slots * 1_000_000 + rounds)[0]
        assert len(within.unique()) == len(within), "two tries share their noise"

    def _token(self, law: Tensor, at: Tensor, stream: int) -> Tensor:
        return super()._token(F.pad(law, (0, max(0, 3 - law.shape[1]))), at, stream)


@dataclass
class ColumnBranches:
    """States between two calls, each with the number of the state it follows, and its probability behind that one."""

    weight: Tensor  # [N]
    origin: Tensor  # [N]
    lengths: Tensor  # [N]
    pending: Tensor  # [N]
    tokens: Tensor  # [N, S + W, K]
    regions: Tensor  # [N, (S + W) * K]
    draft_law: Tensor | None  # [N, W, K, V]

    def _parts(self) -> list[Tensor | None]:
        return [getattr(self, field.name) for field in fields(self)]

    def rows(self, index: Tensor) -> ColumnBranches:
        return ColumnBranches(*(None if part is None else part[index] for part in self._parts()))  # type: ignore

    @staticmethod
    def join(parts: list[ColumnBranches]) -> ColumnBranches:
        together = zip(*(part._parts() for part in parts), strict=True)
        return ColumnBranches(*(None if part[0] is None else torch.cat(part) for part in together))  # type: ignore


class ColumnEnumerator:
    """Enumerates one configuration of the sampler on one tabular model.

    Args:
        step: takes what `columns_jacobi.step` takes.
    """

    def __init__(
        self,
        model: TabularColumnModel,
        law: TokenLaw,
        options: ColumnOptions,
        step: Callable[..., None] = columns_jacobi.step,
    ) -> None:
        self.model, self.options, self.step = model, options, step
        self.length = model.grid.num_tokens
        self.law, self.guided = CheckedLaw(law, self.length), law.guided
        first, stop = law.allowed or (0, model.vocab_size)
        self.cells = stop - first
        self.entries = Entries(model, options.window, torch.device("cpu"))
        self.table = Regions()
        self.tallies: dict[str, list[tuple[Tensor, Tensor]]] = {"moved": [], "tested": []}

    def run(self) -> Enumeration:
        size = (1, self.length + self.options.window, self.entries.codebooks)
        none, one = torch.zeros(size, dtype=torch.long), torch.ones(1, dtype=torch.float64)
        zero = none[:, 0, 0]
        start = ColumnBranches(one, zero, zero, zero > 0, none, none.flatten(1), None)
        fresh = self._expand(start, 0)
        numbers: dict[int, int] = {}  # of the states, by their keys
        known = self._number(numbers, fresh)
        weight = torch.zeros(len(numbers), dtype=torch.float64).index_add_(0, known, fresh.weight)
        states, links, call = [fresh], [], 0
        while len(fresh.weight):
            call += 1
            fresh.origin = self._number(numbers, fresh)
            # The same draws happen in every row; of which steps, only rows of one length agree on.
            after = [
                self._expand(fresh.rows((fresh.lengths == length).nonzero()[:, 0]), call)
                for length in fresh.lengths.unique()
                if length < self.length
            ]
            if not after:
                break
            found, before = ColumnBranches.join(after), len(numbers)
            to = self._number(numbers, found)
            links.append((found.origin, to, found.weight))
            first, _ = _unique(to)
            fresh = found.rows(first[to[first] >= before])
            states.append(fresh)
        return self._absorb(ColumnBranches.join(states), weight, links, numbers)

    def _absorb(
        self,
        states: ColumnBranches,
        weight: Tensor,
        links: list[tuple[Tensor, Tensor, Tensor]],
        numbers: dict[int, int],
    ) -> Enumeration:
        """Run the chain. weight: of the first states; links: from, to, probability."""
        origin, to, share = (torch.cat(part) for part in zip(*links, strict=True))
        lengths = torch.zeros(len(numbers), dtype=torch.long)
        lengths[self._number(numbers, states)] = states.lengths
        weight = F.pad(weight, (0, len(numbers) - len(weight)))
        visits = torch.zeros_like(weight)
        while weight.sum() > _LEAST:
            visits += weight
            weight = torch.zeros_like(weight).index_add_(0, to, weight[origin] * share)
        done = states.lengths == self.length
        valid = self.model.valid
        powers = self.model.vocab_size ** torch.arange(int(valid.sum()) - 1, -1, -1)
        sequences = states.tokens[done][:, : self.length][:, valid] @ powers
        law = torch.zeros(self.model.vocab_size ** len(powers), dtype=torch.float64)
        law.index_add_(0, sequences, visits[self._number(numbers, states)][done])
        calls = 1 + float(visits[lengths < self.length].sum())
        self.totals = {
            name: sum(float((visits[at] * amount).sum()) for at, amount in tally)
            for name, tally in self.tallies.items()
        }
        return Enumeration(law, calls, self.totals["moved"], self.totals["tested"])

    def _number(self, numbers: dict[int, int], branches: ColumnBranches) -> Tensor:
        """The numbers of these states; new ones get the next."""
        keys = self._key(branches).tolist()
        return torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys], dtype=torch.long)

    def _expand(self, branches: ColumnBranches, call: int) -> ColumnBranches:
        ones = torch.ones(len(branches.weight), dtype=torch.float64)
        branches = replace(branches, weight=ones)
        parts = [
            self._merge(part)
            for states in torch.arange(len(branches.weight)).split(_STATES)
            for part in self._replay(branches.rows(states), call, [])
        ]
        return self._merge(ColumnBranches.join(parts))

    def _replay(self, branches: ColumnBranches, call: int, given: list[Tensor]) -> Iterator[ColumnBranches]:
        """All that the step makes of these states behind the given outcomes, one [N] a draw."""
        noise = ColumnNoise(branches.weight, branches.regions, self.table, call, self.cells, given=given)
        noise.tries = self.options.tries
        state = self._call(branches, noise, call)
        if noise.pending is None:
            if call:
                self.count(branches, state, noise.weight)
            yield ColumnBranches(
                noise.weight,
                branches.origin,
                state.lengths,
                state.pending,
                state.tokens,
                noise.regions,
                state.draft_law,
            )
            return
        # noise.weight is by now the probability of all that was given.
        row, outcome = (noise.weight[:, None] * noise.pending > _LEAST).nonzero(as_tuple=True)
        for part, more in zip(row.split(_ROWS), outcome.split(_ROWS), strict=True):
            yield from self._replay(branches.rows(part), call, [*(earlier[part] for earlier in given), more])

    def count(self, branches: ColumnBranches, state: ColumnState, weight: Tensor) -> None:
        """Note what a step has done, each row with its weight behind the state it started from."""
        if state.meter is not None:
            self.tallies["moved"].append((branches.origin, weight * state.meter.moved))
            self.tallies["tested"].append((branches.origin, weight * state.meter.tested))

    def _call(self, branches: ColumnBranches, noise: ColumnNoise, call: int) -> ColumnState:
        """Run the sampler's own code on rows that are in these states."""
        rows, window = len(branches.weight), self.options.window
        cache = self.model.prefill(None, batch_size=rows, guided=self.guided, window=window)
        if call == 0:
            return columns_jacobi.prepare(self.entries, cache, self.law, noise, self.options)
        cache.tokens = self.entries.with_special(branches.tokens, torch.arange(branches.tokens.shape[1]))
        state = ColumnState(
            cache=cache,
            tokens=branches.tokens.clone(),
            lengths=branches.lengths,
            draft_law=branches.draft_law,
            pending=branches.pending,
            round=call - 1,
            target_calls=torch.zeros(rows, dtype=torch.long),
            commit_call=torch.zeros(branches.tokens.shape[:2], dtype=torch.long),
            meter=None if self.options.rule.lossless else DivergenceMeter(rows, torch.device("cpu")),
        )
        self.step(self.model, self.entries, state, self.law, noise, self.options, Stopwatch())
        return state

    def _merge(self, branches: ColumnBranches) -> ColumnBranches:
        """Add up the branches that no later step can tell apart."""
        steps = torch.arange(branches.tokens.shape[1])
        past = steps >= torch.clamp(branches.lengths + self.options.window - 1, max=self.length)[:, None]
        # The noise of a committed column is never used again, that of a forced entry is of no consequence.
        settled = (past | (steps < branches.lengths[:, None]))[..., None] | ~self.entries.valid
        law = branches.draft_law
        if law is not None:
            drafted = branches.lengths[:, None] + torch.arange(law.shape[1])
            outside = (drafted >= self.length)[..., None, None].expand_as(law).clone()
            outside[:, -1] = False
            law = law.masked_fill(outside, 0.0)
        plain = replace(
            branches,
            tokens=branches.tokens.masked_fill(past[..., None], 0),
            regions=branches.regions.masked_fill(settled.flatten(1), 0),
            draft_law=law,
        )
        first, inverse = _unique(_hash(torch.stack([self._key(plain), plain.origin], 1)))
        weight = torch.zeros(len(first), dtype=torch.float64).index_add_(0, inverse, plain.weight)
        return replace(plain.rows(first), weight=weight)

    def _key(self, branches: ColumnBranches) -> Tensor:
        """One number a state; equal states of a `_merge`, and but for chance only they, share it."""
        parts = [
            branches.lengths[:, None],
            branches.pending[:, None].long(),
            branches.tokens.flatten(1),
            branches.regions,
        ]
        if branches.draft_law is not None:
            # A state that is complete has no use for its last drafts.
            law = branches.draft_law.exp() * (branches.lengths < self.length)[:, None, None, None]
            parts.append(_quantise(law).flatten(1))
        return _hash(torch.cat(parts, 1))
