"""Exact laws of samplers: their own `prepare` and `step`, run on every outcome of every draw, whatever the sampler.

A run meets one draw more than the run before: the outcomes of the earlier ones are given, and it reports the law of the
next. Only outcomes of positive probability are followed, each as a row of one batch. Between two calls the states are
the sampler's own, and rows that no later call can tell apart are merged.

The states form a Markov chain, in which a state may follow itself (where a column waits for its replacement). So each
state is expanded once, for the probabilities of what follows it, and then the chain runs until all has been absorbed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.exactness.branching import BranchingNoise
from tests.exactness.regions import Regions, distinct, hash_rows, total_variation
from tests.exactness.states import join, select, settled
from visual_spec.samplers.core.acceptance import AcceptanceRule
from visual_spec.samplers.core.base import Sampler
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.state import Run
from visual_spec.samplers.core.trace import DivergenceMeter

PLAIN = TokenLaw()
_LEAST = 1e-17  # outcomes of less weight are dropped; the mass that is missing shows in the total
_STATES = 400  # states that are expanded together
_ROWS = 50_000  # rows of one run


@dataclass
class Branches:
    """States between two calls, each with the number of the state it follows, and its probability after that one."""

    weight: Tensor  # [N]
    origin: Tensor  # [N]
    regions: Tensor  # [N, counter slots]
    state: Any
    key: Tensor  # [N], equal for equal states

    def rows(self, index: Tensor) -> Branches:
        return select(self, index)


@dataclass
class Enumeration:
    """What a decode does.

    Attributes:
        law: [V ** L], the probability of every sequence (of valid entries, for columns).
        calls: the mean number of target calls.
        moved, tested: means of what the meter of a lossy rule counts, or of what the sampler measures in the end.
        visits: [states], how often each state is passed on the way, in the mean.
        by_call: the same for each call.
        layers: the states, by the call that first reaches them, with their numbers as `origin`.
    """

    law: Tensor
    calls: float
    moved: float
    tested: float
    visits: Tensor
    by_call: list[Tensor]
    layers: list[Branches]


def distance(found: Enumeration, want: Any, law: TokenLaw = PLAIN) -> float:
    """From a law [V ** L], or from that of a model's sequences; what was found adds up to 1."""
    assert found.law.sum().item() == pytest.approx(1, abs=1e-10)
    expected = want if isinstance(want, Tensor) else want.law_of_sequences(law, guided=law.guided)
    return total_variation(found.law, expected)


class Enumerator:
    """Enumerates one configuration of a sampler on a model whose laws are known.

    Args:
        rule: tests drafts in the place of the sampler's own.
        parts: what the sampler takes beside model and law.
    """

    def __init__(
        self,
        sampler: Sampler,
        model: Any,
        law: TokenLaw = PLAIN,
        *,
        rule: AcceptanceRule | None = None,
        **parts: Any,
    ) -> None:
        self.sampler, self.model, self.law, self.rule, self.parts = sampler, model, law, rule, parts
        self.first = self._begin(1)
        # One token is drawn at every counter slot of the grid.
        served = getattr(self.first.model, "grid", None)
        self.entries = self.first.num_tokens * getattr(served, "codebooks", 1)
        self.vocab_size = getattr(model, "vocab_size", 0) or parts["tokenizer"].codebook_size
        low, high = law.allowed or (0, self.vocab_size)
        self.cells = high - low
        self.table = Regions()
        self.early: set[tuple[int, int]] = set()
        self.tallies: dict[str, list[tuple[Tensor, Tensor]]] = {"moved": [], "tested": []}

    def run(self) -> Enumeration:
        one, zero = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.long)
        root = Branches(one, zero, torch.zeros(1, self.entries, dtype=torch.long), None, zero)
        fresh = self._expand(root, 0)
        numbers: dict[int, int] = {}  # of the states, by their keys
        fresh.origin = self._number(numbers, fresh)
        weight = torch.zeros(len(numbers), dtype=torch.float64).index_add_(0, fresh.origin, fresh.weight)
        layers, links, call = [fresh], [], 0
        while True:
            going = fresh.rows((~self._done(fresh.state, call)).nonzero()[:, 0])
            if not len(going.weight):
                break
            call += 1
            before = len(numbers)
            found = self._expand(replace(going, weight=torch.ones_like(going.weight)), call)
            to = self._number(numbers, found)
            links.append((found.origin, to, found.weight))
            first, _ = distinct(to)
            new = first[to[first] >= before]
            fresh = replace(found, origin=to).rows(new)
            layers.append(fresh)
        return self._absorb(layers, weight, links, len(numbers))

    def step(self, run: Run, state: Any) -> None:
        """One call. Those who look at what it does put themselves around it."""
        self.sampler.step(run, state)

    def count(self, origin: Tensor, state: Any, weight: Tensor) -> None:
        """Note what a call has done, each row with its weight after the state it started from."""
        meter = getattr(state, "meter", None)
        if meter is not None:
            self.tallies["moved"].append((origin, weight * meter.moved))
            self.tallies["tested"].append((origin, weight * meter.tested))

    def _begin(self, rows: int) -> Run:
        keys = torch.zeros(rows, dtype=torch.long)
        run = self.sampler.begin(self.model, None, self.law, keys, **self.parts)
        return run if self.rule is None else replace(run, rule=self.rule)

    def _done(self, state: Any, call: int) -> Tensor:
        count = self.first.num_calls
        if count is not None:
            return torch.full((len(state.tokens),), call >= count)
        return self.sampler.progress(self.first, state) == self.first.num_tokens

    def _absorb(
        self, layers: list[Branches], weight: Tensor, links: list[tuple[Tensor, Tensor, Tensor]], size: int
    ) -> Enumeration:
        """Run the chain. weight: of the first states; links: from, to, probability; size: number of states."""
        origin, to, share = (torch.cat(part) for part in zip(*links, strict=True))
        weight = F.pad(weight, (0, size - len(weight)))
        by_call = []
        while weight.sum() > _LEAST:
            by_call.append(weight)
            weight = torch.zeros_like(weight).index_add_(0, to, weight[origin] * share)
        visits = torch.stack(by_call).sum(0)
        valid = getattr(self.model, "valid", None)
        law, calls = None, 1.0
        for call, layer in enumerate(layers):
            done, mine = self._done(layer.state, call), visits[layer.origin]
            calls += float(mine[~done].sum())
            if done.any():
                tokens = layer.state.tokens[done][:, : self.first.num_tokens]
                tokens = tokens.flatten(1) if valid is None else tokens[:, valid]
                powers = self.vocab_size ** torch.arange(tokens.shape[1] - 1, -1, -1)
                if law is None:
                    law = torch.zeros(self.vocab_size ** len(powers), dtype=torch.float64)
                law.index_add_(0, tokens @ powers, mine[done])
                self._measure(layer.rows(done.nonzero()[:, 0]))
        assert law is not None
        self.visits = visits
        return Enumeration(law, calls, self.total("moved"), self.total("tested"), visits, by_call, layers)

    def total(self, name: str) -> float:
        """The mean of what was tallied."""
        return sum(float((self.visits[at] * amount).sum()) for at, amount in self.tallies[name])

    def _measure(self, ended: Branches) -> None:
        """What a sampler finds out on the finished tokens."""
        if getattr(ended.state, "used", None) is None and getattr(ended.state, "reference", None) is None:
            return
        run = replace(self.first, batch_size=len(ended.origin), cache=ended.state.cache)
        tokens = ended.state.tokens[:, : self.first.num_tokens]
        _, moved = self.sampler.measure(run, ended.state, tokens)
        assert moved is not None
        self.tallies["moved"].append((ended.origin, moved.double()))

    def _number(self, numbers: dict[int, int], branches: Branches) -> Tensor:
        """The numbers of these states; new ones get the next."""
        keys = branches.key.tolist()
        return torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys], dtype=torch.long)

    def _expand(self, branches: Branches, call: int) -> Branches:
        parts = [
            part
            for states in torch.arange(len(branches.weight)).split(_STATES)
            for part in self._replay(branches.rows(states), call, {})
        ]
        return self._merge(join(parts))

    def _replay(self, branches: Branches, call: int, given: dict[int, Tensor]) -> Iterator[Branches]:
        """All that a call makes of these states after the given outcomes."""
        tries = getattr(self.sampler, "tries", 1)
        known = branches.weight, branches.regions, self.table, call, self.cells
        noise = BranchingNoise(*known, given, tries, self.early)
        run, state = self._play(branches, noise, call)
        if noise.pending is None:
            if call:
                self.count(branches.origin, state, noise.weight)
            regions, key = settled(self.sampler, run, state, noise.regions)
            yield self._merge(Branches(noise.weight, branches.origin, regions, state, key))
            return
        # noise.weight is by now the probability of all that was given.
        row, outcome = (noise.weight[:, None] * noise.pending > _LEAST).nonzero(as_tuple=True)
        for part, more in zip(row.split(_ROWS), outcome.split(_ROWS), strict=True):
            chosen = {number: earlier[part] for number, earlier in given.items()}
            yield from self._replay(branches.rows(part), call, {**chosen, noise.number: more})

    def _play(self, branches: Branches, noise: BranchingNoise, call: int) -> tuple[Run, Any]:
        """Run the sampler's own code on rows that are in these states."""
        rows = len(branches.weight)
        if call == 0:
            run = replace(self._begin(rows), noise=noise)
            state = self.sampler.prepare(run)
            self.first.view, self.first.tables = run.view, run.tables
            return run, state
        state = select(branches.state, torch.arange(rows))
        if getattr(state, "meter", None) is not None:
            state.meter = DivergenceMeter(rows, torch.device("cpu"))
        run = replace(self.first, batch_size=rows, cache=state.cache, noise=noise)
        self.step(run, state)
        return run, state

    def _merge(self, branches: Branches) -> Branches:
        """Add up the branches that no later call can tell apart."""
        first, inverse = distinct(hash_rows(torch.stack([branches.key, branches.origin], 1)))
        weight = torch.zeros(len(first), dtype=torch.float64).index_add_(0, inverse, branches.weight)
        return replace(branches.rows(first), weight=weight)
