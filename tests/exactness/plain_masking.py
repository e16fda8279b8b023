"""Masked decoding written a second time, in plain Python, as the law of what it returns: {tokens: probability}.

Nothing of the library is used but the numbers in the model's table. Every outcome of every draw is a branch.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import permutations, product

from tests.helpers.tabular import TabularMaskedModel

Tokens = tuple[int, ...]  # all entries, codebooks of a slot beside each other; V where hidden
Others = Callable[[Tokens, int], list[list[float]]]  # probabilities of another model, by slot

SHARES = {
    "cosine": lambda u: math.cos(math.pi / 2 * u),
    "arccos": lambda u: math.acos(u) / (math.pi / 2),
    "linear": lambda u: 1 - u,
    "square": lambda u: 1 - u * u,
    "cubic": lambda u: 1 - u * u * u,
    "root": lambda u: 1 - math.sqrt(u),
    "power_2.5": lambda u: 1 - math.sqrt(u) * u * u,
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
    temperature_curve: str = "constant"
    last_temperature: float = 0.7
    entropy_bound: float | None = None
    threshold: float | None = None
    factor: float | None = None
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

    @property
    def bounded(self) -> bool:
        return any(bound is not None for bound in (self.entropy_bound, self.threshold, self.factor))

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
        """The law of the tokens after a stage."""
        mask, books, steps = self.model.vocab_size, self.model.grid.codebooks, self.steps[stage]
        unknown = [i for i in range(self.model.grid.num_tokens) if start[i * books + stage] == mask]
        units = sorted({i // self.span for i in unknown})
        states = {start: 1.0}
        before = len(units)
        for step in range(steps):
            at = step / max(steps - 1, 1) if self.clock == "magnet" else step / steps
            share = max(SHARES[self.schedule](at), 0.0)
            after = 0
            if step < steps - 1:
                following = (step + 1) / (steps - 1) if self.clock == "magnet" else (step + 1) / steps
                after = int(len(units) * SHARES[self.schedule](following) + 1e-9)
                if self.clock == "halton":
                    kept = len(units) * (1 - SHARES[self.schedule](following))
                    after = len(units) - int(kept + 1e-9)
                if self.clock != "magnet":
                    after = min(after, before - 1)
                after = min(max(after, 1), len(units))
            found: dict[Tokens, float] = defaultdict(float)
            for tokens, weight in states.items():
                if self.bounded and mask not in tokens:
                    found[tokens] += weight
                    continue
                if self.bounded and step < steps - 1:
                    after = -1
                for result, probability in self.step(
                    tokens, stage, unknown, after, share, (step, steps), order
                ):
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
        clock: tuple[int, int],
        order: list[int] | None,
    ) -> Iterator[tuple[Tokens, float]]:
        """Outcomes of the step clock[0] of clock[1]. `after` units stay hidden; -1: those beyond a bound."""
        mask, books = self.model.vocab_size, self.model.grid.codebooks
        scale = self.scale
        left = (clock[1] - 1 - clock[0]) / clock[1]
        past = clock[0] / max(clock[1] - 1, 1)
        if scale > 1 and self.guidance == "falling":
            scale = share * scale + (1 - share) * self.least_guidance
        if scale > 1 and self.guidance == "rising":
            scale = (1 - share) * scale + share * self.least_guidance
        if scale > 1 and self.guidance == "ramp":
            scale = past * scale + (1 - past) * self.least_guidance
        temperature = self.temperature
        if self.temperature_curve == "falling":
            temperature = max(temperature * left, 0.01)
        if self.temperature_curve == "root":
            temperature *= self.last_temperature + (1 - math.sqrt(past)) * (1 - self.last_temperature)
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
            if after == -1:
                stays = self.beyond(scores, {i: entropy(filtered[i]) for i in hidden}, order)
                result = [mask if i in stays else entry for i, entry in enumerate(draft)]
                yield tuple(result), weight
                continue
            for stays, chance in self.stays(scores, after, left, order):
                result = list(draft)
                for i in hidden:
                    if i // self.span in stays:
                        result[i * books + stage] = mask
                yield tuple(result), weight * chance

    def sure(self, probability: float, law: list[float]) -> float:
        if self.score == "entropy":
            return -entropy(law)
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

    def beyond(
        self, scores: dict[int, float], entropies: dict[int, float], order: list[int] | None
    ) -> set[int]:
        """The units left over when the surest are taken: while their entropies, less the largest, stay in the bound, or
        while the next one is as probable as it has to be."""
        ranking = sorted(scores, key=lambda u: (-scores[u], u))
        if order is not None:
            ranking = [u for u in order if u in scores]
        if self.entropy_bound is None:
            for number, u in enumerate(ranking[1:], 2):
                least = self.threshold if self.factor is None else 1 - self.factor / (number + 1)
                chance = math.exp(scores[u]) if self.score == "log_probability" else scores[u]
                if least is not None and chance < least:
                    return set(ranking[number - 1 :])
            return set()
        for count in range(len(ranking), 1, -1):
            taken = [entropies[u] for u in ranking[:count]]
            if sum(taken) - max(taken) <= self.entropy_bound:
                return set(ranking[count:])
        return set(ranking[1:])

    def logits(self, tokens: Tokens, stage: int, slot: int, scale: float) -> list[float]:
        context = 0
        for entry in tokens:
            context = context * (self.model.vocab_size + 1) + entry
        with_text = self.model.logits[0, stage, context, slot].tolist()
        if scale <= 1:
            return with_text
        without = self.model.logits[-1, stage, context, slot].tolist()
        return [u + scale * (c - u) for c, u in zip(with_text, without, strict=True)]


def entropy(law: list[float]) -> float:
    return -sum(p * math.log(p) for p in law if p > 0)


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
