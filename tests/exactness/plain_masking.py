"""Masked decoding written a second time, in plain Python, as the law of what it returns: {tokens: probability}.

Nothing of the library is used but the numbers in the model's table. Every outcome of every draw is a branch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import permutations, product

from visual_spec.models.core.tabular import TabularMaskedModel

Tokens = tuple[int, ...]  # all entries, codebooks of a slot beside each other; V where hidden
Others = Callable[[Tokens, int], list[list[float]]]  # probabilities of another model, by slot

SHARES = {
    "cosine": lambda u: math.cos(math.pi / 2 * u),
    "arccos": lambda u: math.acos(u) / (math.pi / 2),
    "linear": lambda u: 1 - u,
    "square": lambda u: 1 - u * u,
    "cubic": lambda u: 1 - u * u * u,
    "root": lambda u: 1 - math.sqrt(u),
}


@dataclass
class Plain:
    """The settings of a `MaskedSampler` and a `TokenLaw`, and what the former is given."""

    model: TabularMaskedModel
    steps: list[int]
    schedule: str = "cosine"
    clock: str = "maskgit"
    score: str = "log_probability"
    noise: float = 0.0
    span: int = 1
    span_score: str = "max"
    falling_temperature: bool = False
    guidance: str = "constant"
    least_guidance: float = 1.0
    filtered_score: bool = False
    scale: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    given: Tokens | None = None
    orders: list[list[int]] | None = None  # of units, first kept first, all as probable
    other: Others | None = None
    share: float = 0.5

    def law(self) -> dict[Tokens, float]:
        length, books = self.model.grid.num_tokens, self.model.grid.codebooks
        start = self.given or (self.model.vocab_size,) * (length * books)
        states = {start: 1.0}
        for stage in range(books):
            found: dict[Tokens, float] = defaultdict(float)
            for order in self.orders or [None]:
                for tokens, weight in states.items():
                    for result, probability in self.codebook(tokens, stage, order).items():
                        found[result] += weight * probability / len(self.orders or [0])
            states = found
        return dict(states)

    def codebook(self, start: Tokens, stage: int, order: list[int] | None) -> dict[Tokens, float]:
        """The law of the tokens behind a stage."""
        mask, books, steps = self.model.vocab_size, self.model.grid.codebooks, self.steps[stage]
        unknown = [i for i in range(self.model.grid.num_tokens) if start[i * books + stage] == mask]
        units = sorted({i // self.span for i in unknown})
        states = {start: 1.0}
        before = len(units)
        for step in range(steps):
            at = step / steps if self.clock == "maskgit" else step / max(steps - 1, 1)
            share = max(SHARES[self.schedule](at), 0.0)
            after = 0
            if step < steps - 1:
                following = (step + 1) / steps if self.clock == "maskgit" else (step + 1) / (steps - 1)
                after = int(len(units) * SHARES[self.schedule](following) + 1e-9)
                if self.clock == "maskgit":
                    after = min(after, before - 1)
                after = min(max(after, 1), len(units))
            left = (steps - 1 - step) / steps
            found: dict[Tokens, float] = defaultdict(float)
            for tokens, weight in states.items():
                for result, probability in self.step(tokens, stage, unknown, after, share, left, order):
                    found[result] += weight * probability
            states, before = found, after
        return dict(states)

    def step(
        self,
        tokens: Tokens,
        stage: int,
        unknown: list[int],
        after: int,
        share: float,
        left: float,
        order: list[int] | None,
    ) -> Iterator[tuple[Tokens, float]]:
        mask, books = self.model.vocab_size, self.model.grid.codebooks
        scale = self.scale
        if scale > 1 and self.guidance == "falling":
            scale = share * scale + (1 - share) * self.least_guidance
        if scale > 1 and self.guidance == "rising":
            scale = (1 - share) * scale + share * self.least_guidance
        temperature = max(self.temperature * left, 0.01) if self.falling_temperature else self.temperature
        hidden = [i for i in unknown if tokens[i * books + stage] == mask]
        plain, filtered = {}, {}
        for i in hidden:
            plain[i] = softmax(self.logits(tokens, stage, i, scale), temperature)
            filtered[i] = nucleus(plain[i], self.top_p)
        scored = filtered if self.filtered_score else plain
        for outcome in product(range(mask), repeat=len(hidden)):
            weight = math.prod(filtered[i][v] for i, v in zip(hidden, outcome, strict=True))
            if weight == 0:
                continue
            draft = list(tokens)
            for i, v in zip(hidden, outcome, strict=True):
                draft[i * books + stage] = v
            probability = {i: scored[i][v] for i, v in zip(hidden, outcome, strict=True)}
            if self.other is not None:
                others = self.other(tuple(draft), stage)
                for i, v in zip(hidden, outcome, strict=True):
                    probability[i] = self.share * probability[i] + (1 - self.share) * others[i][v]
            sure = {i: self.sure(probability[i], scored[i]) for i in hidden}
            units: dict[int, list[float]] = defaultdict(list)
            for i in hidden:
                units[i // self.span].append(sure[i])
            scores = {u: max(s) if self.span_score == "max" else sum(s) for u, s in units.items()}
            for stays, chance in self.stays(scores, after, left, order):
                result = list(draft)
                for i in hidden:
                    if i // self.span in stays:
                        result[i * books + stage] = mask
                yield tuple(result), weight * chance

    def sure(self, probability: float, law: list[float]) -> float:
        if self.score == "entropy":
            return sum(p * math.log(p) for p in law if p > 0)
        return math.log(probability) if self.score == "log_probability" else probability

    def stays(
        self, scores: dict[int, float], count: int, left: float, order: list[int] | None
    ) -> Iterator[tuple[set[int], float]]:
        """Sets of units that stay hidden, and the probability of each."""
        if order is not None:
            yield set([u for u in order if u in scores][len(scores) - count :]), 1.0
        elif count == 0:
            yield set(), 1.0
        elif not self.noise:
            yield set(sorted(scores, key=lambda u: (scores[u], u))[:count]), 1.0
        else:
            # Scores with Gumbel noise are ranked as Plackett and Luce have it.
            odds = {u: math.exp(s / (self.noise * left)) for u, s in scores.items()}
            for ranking in permutations(scores):
                chance, rest = 1.0, sum(odds.values())
                for u in ranking:
                    chance, rest = chance * odds[u] / rest, rest - odds[u]
                yield set(ranking[len(ranking) - count :]), chance

    def logits(self, tokens: Tokens, stage: int, slot: int, scale: float) -> list[float]:
        context = 0
        for entry in tokens:
            context = context * (self.model.vocab_size + 1) + entry
        with_text = self.model.logits[0, stage, context, slot].tolist()
        if scale <= 1:
            return with_text
        without = self.model.logits[-1, stage, context, slot].tolist()
        return [u + scale * (c - u) for c, u in zip(with_text, without, strict=True)]


def softmax(logits: list[float], temperature: float) -> list[float]:
    weights = [math.exp((x - max(logits)) / temperature) for x in logits]
    return [w / sum(weights) for w in weights]


def nucleus(law: list[float], top_p: float) -> list[float]:
    kept, mass = [0.0] * len(law), 0.0
    for v in sorted(range(len(law)), key=lambda v: -law[v]):
        if mass < top_p:
            kept[v] = law[v]
            mass += law[v]
    return [p / sum(kept) for p in kept]
