"""The exact law of what the masked sampler returns: the real sampler on every outcome of its draws, against a second
writing of the algorithm in plain Python."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.exactness.plain_masking import Plain, Tokens
from tests.helpers.masked_laws import ForcedNoise, distance, law_of_sampler, wanted
from tests.helpers.statistics import LEAST_P, p_value
from tests.helpers.tabular import TabularMaskedModel
from tests.helpers.tiny import seeded
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.models.core.settings import of_settings
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import CounterNoise
from visual_spec.samplers.masked import unmasking
from visual_spec.samplers.masked.masked import MaskedSampler
from visual_spec.samplers.masked.policies import Schedule
from visual_spec.samplers.masked.unmasking import MaskedTrace


def table(length: int, vocab: int, books: int = 1, seed: int = 0) -> TabularMaskedModel:
    return TabularMaskedModel(TokenGrid(1, length, codebooks=books), vocab, seed=seed)


def check(
    monkeypatch,
    model: TabularMaskedModel,
    settings: dict[str, Any],
    law: TokenLaw | None = None,
    given: Tokens | None = None,
    rolls: int = 0,
    **plain: Any,
) -> float:
    """Total variation between both laws."""
    law = law or TokenLaw()
    length, books, vocab = model.grid.num_tokens, model.grid.codebooks, model.vocab_size
    counts = settings["steps"]
    counts = [counts] * books if isinstance(counts, int) else list(counts)
    units = -(-length // settings.get("span", 1))
    noise, score = settings.get("choice_temperature", 0.0), settings.get("score", "log_probability")
    rows = vocab ** (length * sum(counts))
    if noise:
        rows *= math.factorial(units) ** (sum(counts) - books)
    if score == "random":
        rows *= math.factorial(units) ** books
    if score == "rolled_halton":
        rows *= rolls**books

    def chance(picked: Tensor, step: int) -> Tensor:
        left = 1 - (step + 1) / counts[0]
        # In the last step no noise is drawn.
        return (picked if score == "log_probability" else picked.exp()) / (noise * max(left, 1e-3))

    forced = ForcedNoise(rows, chance if noise else None)
    forced.rolls = rolls
    options: dict[str, Any] = {} if given is None else {"known_tokens": given}
    if "rescorer" in plain:
        rescorer = options["rescorer"] = plain.pop("rescorer")
        plain["other"] = rescorer.probabilities
    found = law_of_sampler(monkeypatch, of_settings(MaskedSampler, **settings), model, law, forced, **options)
    names = dict(choice_temperature="noise", rescorer_share="share")
    others = {names.get(k, k): v for k, v in settings.items() if k not in ("steps", "temperature", "score")}
    if plain.get("orders") is None:
        others["score"] = score
    second = Plain(
        model,
        counts,
        **others,
        temperature_curve=settings.get("temperature", "constant"),
        scale=law.guidance_scale,
        temperature=law.temperature,
        top_p=law.top_p,
        given=given,
        **plain,
    )
    return distance(found, second.law())


WARM = TokenLaw(guidance_scale=3.0, temperature=1.7, top_p=0.8)


@pytest.mark.parametrize(
    "settings, law",
    [
        (dict(steps=3), TokenLaw()),
        (dict(steps=3, schedule="linear"), TokenLaw(temperature=0.7)),
        (dict(steps=3, schedule="arccos"), TokenLaw(guidance_scale=2.0)),
        (dict(steps=3, schedule="root", guidance="rising"), TokenLaw(guidance_scale=2.5)),
        (dict(steps=3, clock="magnet", temperature="falling", guidance="falling"), WARM),
        (dict(steps=3, clock="magnet", schedule="cubic", guidance="falling", least_guidance=1.5), WARM),
        (dict(steps=3, schedule="square", filtered_score=True), WARM),
        (dict(steps=3, score="entropy", temperature="falling"), WARM),
        (dict(steps=1), WARM),
        (dict(steps=3, clock="halton", schedule="arccos", guidance="ramp", least_guidance=1.2), WARM),
        (dict(steps=3, schedule="power_2.5", temperature="root", last_temperature=0.5), WARM),
        (
            dict(steps=3, schedule="linear", temperature="root", last_temperature=0.3),
            TokenLaw(temperature=1.3),
        ),
        (dict(steps=3, entropy_bound=0.3), TokenLaw(temperature=0.6)),
        (dict(steps=3, score="entropy", entropy_bound=0.5), WARM),
        (dict(steps=2, score="probability", entropy_bound=0.0), TokenLaw(guidance_scale=2.0)),
        (dict(steps=3, entropy_bound=0.2, temperature="root", guidance="falling"), WARM),
        (dict(steps=3, threshold=0.6), TokenLaw(temperature=0.6)),
        (dict(steps=3, threshold=0.8, score="probability", guidance="falling"), WARM),
        (dict(steps=3, factor=1.0), TokenLaw()),
        (dict(steps=3, factor=0.7, score="probability"), TokenLaw(temperature=0.6, guidance_scale=2.0)),
    ],
    ids=lambda value: ",".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_law_of_single_tokens(monkeypatch, settings, law):
    assert check(monkeypatch, table(4, 2), settings, law) < 1e-10


@pytest.mark.parametrize("score", ["log_probability", "probability"])
def test_law_of_three_tokens_a_slot(monkeypatch, score):
    assert check(monkeypatch, table(4, 3), dict(steps=2, score=score)) < 1e-10


@pytest.mark.parametrize("score", ["log_probability", "probability"])
@pytest.mark.parametrize("steps", [2, 3])
def test_law_with_noise_on_the_choice(monkeypatch, score, steps):
    """Against the closed form of Plackett and Luce."""
    settings = dict(steps=steps, score=score, choice_temperature=1.3)
    assert check(monkeypatch, table(3, 2), settings) < 1e-10


@pytest.mark.parametrize("span_score", ["max", "sum"])
@pytest.mark.parametrize("length", [3, 4])
def test_law_of_magnet(monkeypatch, span_score, length):
    """Two codebooks one after the other, spans (the last one cut off), falling temperature and guidance, top-p."""
    settings: dict[str, Any] = dict(
        steps=(2, 2), clock="magnet", span=2, span_score=span_score, temperature="falling", guidance="falling"
    )
    assert check(monkeypatch, table(length, 2, books=2), settings, WARM) < 1e-10


def test_law_of_more_steps_for_the_first_codebook(monkeypatch):
    assert check(monkeypatch, table(3, 2, books=2), dict(steps=(3, 1), span=2, clock="magnet")) < 1e-10


def test_law_beside_given_tokens(monkeypatch):
    given = (1, 0, 2, 2, 2, 1, 2, 2)  # codebooks of a slot beside each other, 2 is the mask
    settings = dict(steps=(2, 1), span=2, clock="magnet")
    assert check(monkeypatch, table(4, 2, books=2), settings, given=given) < 1e-10


def test_a_codebook_that_is_given_whole_costs_no_call(monkeypatch):
    given = (1, 2, 0, 2, 1, 2)
    model = table(3, 2, books=2)
    noise = ForcedNoise(2 ** (3 * 2))
    sampler = MaskedSampler((3, 2))
    found = law_of_sampler(monkeypatch, sampler, model, TokenLaw(), noise, known_tokens=given)
    assert distance(found, Plain(model, [0, 2], given=given).law()) < 1e-10


def test_law_in_fixed_orders(monkeypatch):
    model = table(4, 2)
    halton = [2, 1, 3, 0]  # 1/2, 1/4, 3/4, 1/8
    settings = dict(steps=3, score="halton")
    assert check(monkeypatch, model, settings, orders=[halton]) < 1e-10
    rolled = [halton[-shift:] + halton[:-shift] for shift in range(4)]
    settings = dict(steps=2, score="rolled_halton", schedule="arccos")
    assert check(monkeypatch, model, settings, rolls=4, orders=rolled) < 1e-10
    settings = dict(steps=3, score="raster", clock="halton", schedule="arccos")
    assert check(monkeypatch, model, settings, orders=[[0, 1, 2, 3]]) < 1e-10
    settings = dict(steps=3, score="halton", entropy_bound=0.4)
    assert check(monkeypatch, model, settings, orders=[halton]) < 1e-10
    every = [list(order) for order in itertools.permutations(range(3))]
    assert check(monkeypatch, table(3, 2), dict(steps=3, score="random"), orders=every) < 1e-10


class TableRescorer:
    """Seeded logits for every clip, codebook and frame, and every state of all codes."""

    def __init__(self, length: int, vocab: int, books: int) -> None:
        self.vocab_size, self.special_id, self.num_frames = vocab, vocab + 5, length
        size = ((vocab + 1) ** (length * books), books, length, vocab)
        self.logits = 1.5 * torch.randn(size, generator=torch.Generator().manual_seed(9), dtype=torch.float64)

    def teacher_forced(self, codes: Tensor, condition: Any) -> Tensor:
        assert (codes != self.vocab_size).all(), "what is hidden has this model's own id"
        context = torch.zeros_like(codes[:, 0, 0])
        for entry in codes.transpose(1, 2).flatten(1).unbind(1):
            entry = torch.where(entry == self.special_id, self.vocab_size, entry)
            assert (entry <= self.vocab_size).all()
            context = context * (self.vocab_size + 1) + entry
        return self.logits[context]

    def probabilities(self, draft: Tokens, stage: int) -> list[list[float]]:
        context = 0
        for entry in draft:
            context = context * (self.vocab_size + 1) + entry
        return self.logits[context, stage].softmax(-1).tolist()


@pytest.mark.parametrize("score", ["log_probability", "probability"])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_law_with_rescoring(monkeypatch, score, share):
    """The convex combination of both models' probabilities ranks the spans; what is drawn stays the masked model's."""
    settings: dict[str, Any] = dict(
        steps=(2, 2), clock="magnet", span=2, score=score, temperature="falling", rescorer_share=share
    )
    rescorer = TableRescorer(3, 2, 2)
    assert check(monkeypatch, table(3, 2, books=2), settings, WARM, rescorer=rescorer) < 1e-10


@pytest.mark.parametrize("score", ["log_probability", "probability"])
def test_law_with_rescoring_of_single_tokens(monkeypatch, score):
    """Here the shares of both models matter, not only that there are two."""
    model, rescorer = table(4, 2), TableRescorer(4, 2, 1)
    settings = dict(steps=3, score=score, rescorer_share=0.15)
    assert check(monkeypatch, model, settings, rescorer=rescorer) < 1e-10
    laws = [
        Plain(model, [3], score=score, other=rescorer.probabilities, share=share).law()
        for share in (0.15, 0.5, 0.85, 1.0)
    ]
    assert all(distance(laws[0], other) > 1e-3 for other in laws[1:])


# ----------------------------------------------------------------------------------------------------------- mistakes


def test_catches_a_bound_that_counts_the_largest_entropy(monkeypatch):
    cumulative = Tensor.cummax
    settings = dict(steps=3, entropy_bound=0.3)
    # Without the largest subtracted, the sum itself is bounded.
    monkeypatch.setattr(Tensor, "cummax", lambda self, dim: cumulative(torch.zeros_like(self), dim))
    assert check(monkeypatch, table(4, 2), settings, TokenLaw(temperature=0.6)) > 1e-3


def test_catches_the_score_of_the_filtered_law(monkeypatch):
    monkeypatch.setattr(unmasking, "unfiltered_reference", lambda logits, slots, law, target: target)
    settings = dict(steps=3, clock="magnet", temperature="falling")
    assert check(monkeypatch, table(4, 3), dict(steps=2), TokenLaw(top_p=0.7)) > 1e-3
    monkeypatch.undo()
    assert check(monkeypatch, table(3, 3), settings, TokenLaw(top_p=0.7)) < 1e-10


def test_catches_noise_on_the_choice_that_does_not_fall(monkeypatch):
    whole = ForcedNoise.gumbel
    settings = dict(steps=3, choice_temperature=1.3)

    def steady(self, slots, size, stream, round, dtype):
        self.score = self.score * (1 - (round + 1) / 3)
        return whole(self, slots, size, stream, round, dtype)

    monkeypatch.setattr(ForcedNoise, "gumbel", steady)
    assert check(monkeypatch, table(3, 2), settings) > 1e-3


# --------------------------------------------------------------------------------------------------- the noise itself


STATISTIC = dict(steps=3, choice_temperature=1.0)


def observed(model: TabularMaskedModel, rows: int = 50_000, chunks: int = 3) -> Tensor:
    """How often each sequence comes out, with the real noise."""
    generator = torch.Generator().manual_seed(3)
    length = model.grid.num_tokens
    powers = model.vocab_size ** torch.arange(length - 1, -1, -1)
    total = torch.zeros(model.vocab_size**length, dtype=torch.long)
    for _ in range(chunks):
        sampler = of_settings(MaskedSampler, **STATISTIC)
        tokens = sampler(model, None, law=TokenLaw(), generator=generator, batch_size=rows).tokens
        total += torch.bincount(tokens @ powers, minlength=len(total))
    return total


def test_real_noise_follows_the_law(keys_in_bulk):
    model = table(3, 3)
    assert p_value(observed(model), wanted(model)) > LEAST_P


@pytest.mark.parametrize("method", ["categorical", "gumbel"])
def test_catches_noise_that_is_not_renewed(keys_in_bulk, monkeypatch, method):
    fresh = getattr(CounterNoise, method)

    def stale(self, *given):
        arguments = list(given)
        arguments[3] = 0  # the round
        return fresh(self, *arguments)

    monkeypatch.setattr(CounterNoise, method, stale)
    model = table(3, 3)
    assert p_value(observed(model), wanted(model)) < LEAST_P


LENGTH, CODES = 3, 3


def laws(model: TabularMaskedModel, tokens: list[int], temperature: float) -> Tensor:
    state = model.prepare(None, batch_size=1, guided=False)
    return (model(state, torch.tensor(tokens)[None, :, None], 0)[0] / temperature).softmax(-1)


def exact(model: TabularMaskedModel, temperature: float) -> tuple[float, float]:
    """The means over orders and draws of the summed total variations and log ratios, for one group of all tokens."""
    hidden = [CODES] * LENGTH
    first = laws(model, hidden, temperature)
    moved = ratio = 0.0
    orders = list(itertools.permutations(range(LENGTH)))
    for outcome in itertools.product(range(CODES), repeat=LENGTH):
        weight = math.prod(float(first[slot, token]) for slot, token in enumerate(outcome)) / len(orders)
        for order in orders:
            known = list(hidden)
            for slot in order:
                given = laws(model, known, temperature)[slot]
                moved += weight * float((first[slot] - given).clamp(min=0).sum())
                ratio += weight * math.log(float(first[slot, outcome[slot]] / given[outcome[slot]]))
                known[slot] = outcome[slot]
    return moved, ratio


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_estimates_have_the_exact_means(keys_in_bulk, temperature):
    model, rows = TabularMaskedModel(TokenGrid(1, LENGTH), CODES), 20_000
    sampler = MaskedSampler(1, measure=True)
    generator = torch.Generator().manual_seed(0)
    trace = sampler(
        model, None, law=TokenLaw(temperature=temperature), generator=generator, batch_size=rows
    ).trace
    assert isinstance(trace, MaskedTrace) and trace.moved_mass is not None
    assert trace.total_correlation is not None
    for found, want in zip(
        (trace.moved_mass, trace.total_correlation), exact(model, temperature), strict=True
    ):
        error = float(found.double().std()) / rows**0.5
        assert abs(float(found.double().mean()) - want) < 4 * error and 4 * error < 0.1 * want
    assert trace.divergence == pytest.approx(float(trace.moved_mass.mean()) / LENGTH, rel=1e-4)
    assert "a slot from one token a call" in trace.summary()


def test_one_token_a_call_moves_nothing():
    model = TabularMaskedModel(TokenGrid(1, 4), 3)
    for steps in (4, 2):
        sampler = MaskedSampler(steps, measure=True, schedule=Schedule(schedule="linear"))
        trace = sampler(
            model, None, law=TokenLaw(guidance_scale=2.0), generator=seeded(1), batch_size=1
        ).trace
        assert trace.divergence is not None and (trace.divergence == 0) == (steps == 4)
