"""Chains and trees of drafts under relaxed rules, in plain Python and by the papers' definitions, on every outcome.

Nothing here is shared with the samplers but the settings. Laws are lists of probabilities.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tests.helpers.relaxed_rules import gsd_acceptance, lent, nearest
from visual_spec.samplers.core.acceptance import Relaxation
from visual_spec.samplers.core.relaxed import cluster_table

Law = list[float]


def apart(law: Law, other: Law) -> float:
    """Total variation distance."""
    return sum(abs(a - b) for a, b in zip(law, other, strict=True)) / 2


def point(token: int, size: int) -> Law:
    return [float(other == token) for other in range(size)]


def without(law: Law, tokens: Sequence[int]) -> Law:
    left = [0.0 if token in tokens else mass for token, mass in enumerate(law)]
    return [mass / sum(left) if sum(left) else 0.0 for mass in left]


class PlainRule:
    """One test of a draft x for the law p, when x was drawn from q."""

    def __init__(self, settings: Relaxation, codebook: Tensor) -> None:
        self.settings, self.codes = settings, codebook.double().tolist()
        count = max(1, round(len(codebook) / settings.group_size))
        self.clusters = cluster_table(codebook, count).tolist()

    def _lent(self, p: Law, x: int) -> list[int]:
        near = nearest(self.codes, x)[: self.settings.neighbours]
        return lent(p, x, near, self.settings.delta, self.settings.factor)

    def accept(self, p: Law, q: Law, x: int) -> float:
        """Of the rule itself, not held back."""
        settings = self.settings
        if settings.acceptance == "exact":
            return min(1, p[x] / q[x])
        if settings.acceptance == "lantern":
            return min(1, (p[x] + sum(p[y] for y in self._lent(p, x))) / q[x])
        if settings.acceptance == "grouped":
            log_p = [math.log(mass) if mass else -math.inf for mass in p]
            size, gap, limit = settings.group_size, settings.probability_gap, settings.code_distance
            return gsd_acceptance(log_p, q, x, size, gap, limit, self.codes)
        group = [y for y in range(len(p)) if self.clusters[y] == self.clusters[x]]
        return min(1, sum(p[y] for y in group) / sum(q[y] for y in group)) if p[x] else 0

    def test(self, p: Law, q: Law, x: int, budget: float) -> tuple[float, Law, float]:
        """With what probability x is kept; after a refusal, the law of what replaces it, and the budget left."""
        exact, keep, merged = min(1, p[x] / q[x]), self.accept(p, q, x), list(p)
        if self.settings.bounded:
            distance = sum(max(0, b - a) for a, b in zip(p, q, strict=True))
            share = budget * (1 - exact) / distance if distance else 0.0
            keep = exact + min(max(0.0, keep - exact), share)
            budget = min(1, (share - keep + exact) / (1 - keep)) if keep < 1 else budget
        elif self.settings.acceptance == "lantern":
            for y in self._lent(p, x):
                merged[x] += merged[y]
                merged[y] = 0.0
        rest = [max(0, a - b) for a, b in zip(merged, q, strict=True)]
        return keep, [mass / sum(rest) for mass in rest] if sum(rest) else merged, budget

    def walk(self, p: Law, drafts: Sequence[int], laws: Sequence[Law]) -> tuple[list[float], Law]:
        """Siblings in turn: how much of the time each is kept, and the law after the last times what is left."""
        kept, reached, budget = [], 1.0, self.settings.delta
        for x, q in zip(drafts, laws, strict=True):
            keep, after, left = self.test(p, q, x, budget) if q[x] > 0 else (0.0, p, budget)
            kept.append(reached * keep)
            reached *= 1 - keep
            p, budget = after, left
        return kept, [reached * mass for mass in p]

    def commits(self, p: Law, drafts: Sequence[int], laws: Sequence[Law]) -> Law:
        """Law of the committed token, given the siblings."""
        kept, law = self.walk(p, drafts, laws)
        law = list(law)
        for x, mass in zip(drafts, kept, strict=True):
            law[x] += mass
        return law


@dataclass
class PlainOutcome:
    """What a decode does: law of the sequence [V ** L], and means over samples of sums over tested slots.

    Attributes:
        apart: the total variation distance of the slot's law to the target law.
        moved: what the meter has to count.
    """

    law: Tensor
    calls: float = 0.0
    tested: float = 0.0
    apart: float = 0.0
    moved: float = 0.0


@dataclass
class PlainDecoder:
    """Decodes with two tabular models, given by the laws [V ** L] of their sequences."""

    target: Tensor
    draft: Tensor
    size: int
    length: int
    rule: PlainRule
    found: PlainOutcome = field(init=False)

    def __post_init__(self) -> None:
        self.exact = PlainRule(
            replace(self.rule.settings, acceptance="exact", bounded=False), torch.eye(self.size)
        )

    def next_law(self, sequences: Tensor, text: tuple[int, ...]) -> Law:
        shares = sequences.view([self.size] * self.length)[text].reshape(self.size, -1).sum(1)
        return (shares / shares.sum()).tolist()

    def run(self) -> PlainOutcome:
        self.found = PlainOutcome(torch.zeros(self.size**self.length, dtype=torch.float64), calls=1.0)
        for token, mass in enumerate(self.next_law(self.target, ())):
            self.call((token,), mass)
        return self.found

    def call(self, text: tuple[int, ...], weight: float) -> None:
        """A target call on a committed text, and all calls that follow."""
        if len(text) == self.length:
            index = sum(token * self.size**place for place, token in enumerate(reversed(text)))
            self.found.law[index] += weight
        elif weight > 1e-15:
            self.found.calls += weight
            self.slot(text, (), weight)

    def slot(self, text: tuple[int, ...], path: tuple[int, ...], weight: float) -> None:
        """The slot after a path of kept drafts."""
        if len(text + path) == self.length:
            return self.call(text + path, weight)
        p = self.next_law(self.target, text + path)
        law, moved, tested = [0.0] * self.size, 0.0, False
        for chance, drafts, laws in self.siblings(text, path):
            tested |= bool(drafts)
            kept, left = self.rule.walk(p, drafts, laws)
            for x, mass in zip(drafts, kept, strict=True):
                self.slot(text, (*path, x), weight * chance * mass)
            for token, mass in enumerate(left):
                self.call((*text, *path, token), weight * chance * mass)
            given = self.rule.commits(p, drafts, laws)
            moved += chance * self.moved(given, self.exact.commits(p, drafts, laws), drafts)
            law = [a + chance * b for a, b in zip(law, given, strict=True)]
        if tested:
            self.found.tested += weight
            self.found.apart += weight * apart(law, p)
            self.found.moved += weight * moved

    def siblings(
        self, text: tuple[int, ...], path: tuple[int, ...]
    ) -> list[tuple[float, list[int], list[Law]]]:
        """All that the drafts after a path may be: their probability, the drafts in turn, and their laws."""
        raise NotImplementedError

    def moved(self, law: Law, exact: Law, drafts: list[int]) -> float:
        return apart(law, exact)


@dataclass
class PlainChain(PlainDecoder):
    """Drafts drawn one by one."""

    num_drafts: int = 1

    def siblings(self, text, path):
        if len(path) == self.num_drafts:
            return [(1.0, [], [])]
        q = self.next_law(self.draft, text + path)
        return [(mass, [token], [q]) for token, mass in enumerate(q)]

    def moved(self, law, exact, drafts):
        # At the draft alone, as `DivergenceMeter.add`.
        return sum(max(0.0, law[x] - exact[x]) for x in drafts)


@dataclass
class PlainBranches(PlainDecoder):
    """One level of siblings drawn without replacement."""

    width: int = 2

    def siblings(self, text, path):
        if path:
            return [(1.0, [], [])]
        q = self.next_law(self.draft, text)
        found = []
        for drafts in itertools.permutations(range(self.size), self.width):
            laws = [without(q, drafts[:place]) for place in range(self.width)]
            chance = math.prod(law[x] for x, law in zip(drafts, laws, strict=True))
            found.append((chance, list(drafts), laws))
        return found


@dataclass
class PlainTree(PlainDecoder):
    """EAGLE-2's tree of the most probable tokens."""

    depth: int = 2
    width: int = 2
    num_nodes: int | None = None

    def nodes(self, text: tuple[int, ...]) -> list[tuple[tuple[int, ...], int]]:
        """The paths that are scored, each with its node's place among its siblings."""
        level: list[tuple[float, tuple[int, ...], int]] = [(0.0, (), 0)]
        drafted: list[tuple[float, tuple[int, ...], int]] = []
        for _ in range(min(self.depth, self.length - len(text))):
            found = []
            for score, path, _ in level:
                q = self.next_law(self.draft, text + path)
                best = sorted(range(self.size), key=lambda token, q=q: -q[token])[: self.width]
                found += [(score + math.log(q[x]), (*path, x), rank) for rank, x in enumerate(best)]
            level = sorted(found, key=lambda node: -node[0])[: self.width]
            drafted += level
        return [
            (path, rank) for _, path, rank in sorted(drafted, key=lambda node: -node[0])[: self.num_nodes]
        ]

    def siblings(self, text, path):
        ranked = sorted((rank, node[-1]) for node, rank in self.nodes(text) if node[:-1] == path)
        drafts = [token for _, token in ranked]
        return [(1.0, drafts, [point(token, self.size) for token in drafts])]

    def moved(self, law, exact, drafts):
        return apart(law, exact)
